// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Problem: vllm-ascend's DeepSeek-V4 calls operators that ship as NPU binaries (torch_npu.npu_*,
// torch.ops._C_ascend.*). Way: a family of operators is one file here. Each operator has a CPU kernel, which is the
// contract in a few lines of at::, and a meta kernel, which refuses what the operator refuses and says the result's
// shape. For "npu" the two are enough: on_stream() queues the CPU kernel on the current stream, as for every aten
// operator (../aten/kernels.cpp), so it is asynchronous, ordered with events, and captured by graphs. Data is read when
// the stream gets there: a kernel must not be asked for anything that depends on data earlier, and a fault in the data
// (an index out of its table) is an error of the device, seen at the next synchronisation. Not here: operators of
// torch_npu that no family has; they raise by name.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "settings.h"
#include "softaten.h"

namespace softnpu {

// What an operator does with tensors on the device.
inline torch::CppFunction on_stream() {
  return torch::CppFunction::makeFromBoxedFunction<&softaten::run_by_contract>();
}

// Limits of the operators here by name; torch.ops.softnpu.waive knows them too. Made once, as a static of its family:
//   const Limit kHidden("npu_rms_norm.hidden");  ...  if (!kHidden.waived()) ...
class Limit {
 public:
  explicit Limit(const char* name) : name_(name) { softnpu_add_waiver(name); }
  bool waived() const { return softnpu_is_waived(name_) > 0; }

 private:
  const char* name_;
};

// Refuses an argument the way all operators here do: what was asked, what was found, what was expected.
#define SOFTNPU_EXPECT(condition, operation, argument, found, ...) \
  TORCH_CHECK(condition, operation, ": ", argument, ": found ", found, ", expected ", __VA_ARGS__)

}  // namespace softnpu
