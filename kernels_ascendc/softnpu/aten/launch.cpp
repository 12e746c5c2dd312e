// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The only translation unit that knows torch_npu: from torch's current stream to the software ACL's.
#include <acl/acl.h>
#include <softnpu.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>

#include "softaten.h"

namespace softaten {

CurrentStream::CurrentStream(c10::DeviceIndex device)
    : stream_(c10_npu::getCurrentNPUStream(device).unwrap()),
      handle_(c10_npu::getCurrentNPUStream(device).stream(true)) {}

bool CurrentStream::wants_accesses() const { return softnpu_wants_accesses(handle_) != 0; }

void CurrentStream::push(const std::string& name, const Accesses& accesses, std::function<void()> task) const {
  softnpu_push_task(
      handle_, name.c_str(), [](void* f) { (*static_cast<std::function<void()>*>(f))(); },
      new std::function<void()>(std::move(task)), [](void* f) { delete static_cast<std::function<void()>*>(f); },
      accesses.data(), accesses.size(), 0);
}

void CurrentStream::ran(const std::string& name, const Accesses& accesses) const {
  if (!accesses.empty()) softnpu_stream_access(handle_, name.c_str(), accesses.data(), accesses.size());
}

void CurrentStream::synchronize(const std::string& why) const {
  if (const aclError e = aclrtSynchronizeStream(handle_)) {
    TORCH_CHECK(false, why, ": waiting for the stream failed with ACL error ", e, ": ", aclGetRecentErrMsg());
  }
}

bool CurrentStream::capturing() const {
  aclmdlRICaptureStatus status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  aclmdlRI graph = nullptr;
  aclmdlRICaptureGetInfo(handle_, &status, &graph);
  return status != ACL_MODEL_RI_CAPTURE_STATUS_NONE;
}

}  // namespace softaten
