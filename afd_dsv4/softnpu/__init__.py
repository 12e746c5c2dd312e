# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The software NPU, seen from Python: an NPU made of CPU threads, for machines without one.

Problem: torch_npu, vllm-ascend and this plugin can only be run where there is an NPU and CANN.
Way: ``python -m afd_dsv4.softnpu -- CMD`` starts CMD with the libraries of ``build/softnpu`` in CANN's place; the real
torch_npu runs on them. ``runtime`` is what a process inside may ask; importing this package imports neither torch nor
torch_npu. Not shown by it: device numerics, device kernels, speed.
"""
