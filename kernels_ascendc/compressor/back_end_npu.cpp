// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The torch binding on an NPU, see back_end.h. Not run on hardware yet.

#include <ATen/core/dispatch/Dispatcher.h>
#include <acl/acl.h>

#include <stdexcept>

#include "back_end.h"
#include "kernels.h"

namespace afd_dsv4 {

std::function<int()> submission(void* stream, const Launch& launch) {
  // Thrown, not returned: torch_npu takes what is returned for an error of ACL, and logs what is thrown with its text,
  // which only the thread that launched has (framework/OpParamMaker.cpp:ExecFunc).
  return [stream, run = launch.run] {
    if (run(stream) != AFD_DSV4_OK) throw std::runtime_error(afd_dsv4_last_error());
    return 0;
  };
}

namespace {

// bfloat16 in and float32 out, in one product: torch_npu 2.13 has it, older ones have not.
bool mixed_product() {
  static const bool found = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("aten::mm", "dtype_out")
                                .hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
  return found;
}

}  // namespace

void project(const at::Tensor& x, const at::Tensor& wkv, const at::Tensor& wgate, at::Tensor& rows) {
  const int64_t half = wkv.size(0);
  // Columns of rows: torch_npu may multiply into a contiguous temporary and copy it here. One product into whole rows
  // would want the two weights in one piece, and the model has them apart.
  at::Tensor kv = rows.narrow(1, 0, half), score = rows.narrow(1, half, half);
  const auto type = rows.scalar_type();
  if (type != x.scalar_type() && mixed_product()) {
    at::mm_out(kv, x, wkv.t(), type);
    at::mm_out(score, x, wgate.t(), type);
    return;
  }
  // Rows that are rounded to bfloat16 first would not be those of the stock operator, so float32 copies it is: right,
  // slower, and memory of the caching allocator for as long as the stream needs it.
  const at::Tensor tokens = x.to(type);
  at::mm_out(kv, tokens, wkv.to(type).t());
  at::mm_out(score, tokens, wgate.to(type).t());
}

int64_t vector_cores(c10::DeviceIndex device) {
  int64_t cores = 0;
  const aclError status = aclrtGetDeviceInfo(static_cast<uint32_t>(device), ACL_DEV_ATTR_VECTOR_CORE_NUM, &cores);
  TORCH_CHECK(status == ACL_SUCCESS && cores > 0, "afd_dsv4: vector cores of device ", static_cast<int>(device),
              ": found ", cores, " with ACL error ", status, "; a toolkit of CANN 8.5 or newer can tell them");
  return cores;
}

}  // namespace afd_dsv4
