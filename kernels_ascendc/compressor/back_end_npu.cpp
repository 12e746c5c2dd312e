// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The torch binding on an NPU, see back_end.h. Not run on hardware yet.

#include <acl/acl.h>

#include "back_end.h"

namespace afd_dsv4 {

std::function<int()> submission(void* stream, const Launch& launch) {
  return [stream, run = launch.run] { return run(stream); };
}

void project(const at::Tensor& x, const at::Tensor& wkv, const at::Tensor& wgate, at::Tensor& rows) {
  const int64_t half = wkv.size(0);
  at::Tensor kv = rows.narrow(1, 0, half), score = rows.narrow(1, half, half);
  if (rows.scalar_type() == x.scalar_type()) {
    at::mm_out(kv, x, wkv.t());
    at::mm_out(score, x, wgate.t());
  } else {
    at::mm_out(kv, x, wkv.t(), rows.scalar_type());
    at::mm_out(score, x, wgate.t(), rows.scalar_type());
  }
}

int64_t vector_cores(c10::DeviceIndex device) {
  int64_t cores = 0;
  const aclError status = aclrtGetDeviceInfo(static_cast<uint32_t>(device), ACL_DEV_ATTR_VECTOR_CORE_NUM, &cores);
  TORCH_CHECK(status == ACL_SUCCESS && cores > 0, "afd_dsv4: vector cores of device ", static_cast<int>(device),
              ": found ", cores, " with ACL error ", status, "; a toolkit of CANN 8.5 or newer can tell them");
  return cores;
}

}  // namespace afd_dsv4
