// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// What stands in results, or parts of them, that an operator leaves unwritten. On the device it is whatever the memory
// held. Here it is the byte 0x5A throughout: in any floating point type a large finite number, because callers multiply
// such rows by 0 (vllm-ascend's expert parallel combine does), and in an integer type an index out of every table.
#pragma once

#include <ATen/ATen.h>

#include <cstring>

namespace softnpu {

inline at::Tensor poison(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor t = at::empty(sizes, options);
  if (t.nbytes() != 0) std::memset(t.mutable_data_ptr(), 0x5A, t.nbytes());
  return t;
}

}  // namespace softnpu
