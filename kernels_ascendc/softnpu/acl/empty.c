// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// libge_runner.so, libgraph.so, libacl_tdt_channel.so: torch_npu names them as needed and calls nothing in them at
// import.
__attribute__((visibility("default"))) int softnpu_has_no_functions_here;
