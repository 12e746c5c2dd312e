// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The only translation unit that knows torch_npu: from torch's current stream to the software ACL's. With torch_npu's
// host queue on (TASK_QUEUE_ENABLE=1) kernels and copies go through it, so that they keep their order with the events
// and waits in it; what needs to know where the device is empties it first.
#include <acl/acl.h>
#include <softnpu.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <condition_variable>
#include <cstdlib>
#include <mutex>

#include "softaten.h"

namespace softaten {
namespace {

// Whether torch_npu puts work into its host queue, from which a thread of its own hands it to ACL.
bool host_queue() {
  static const bool on = [] {
    const char* enable = std::getenv("TASK_QUEUE_ENABLE");
    const char* blocking = std::getenv("ASCEND_LAUNCH_BLOCKING");
    return (enable == nullptr || std::string(enable) != "0") && (blocking == nullptr || std::string(blocking) != "1");
  }();
  return on;
}

// What keeps the host queue from going on while a test looks at what is in it.
std::mutex g_gate;
std::condition_variable g_opened;
bool g_closed = false;

}  // namespace

void hang_host_queue() {
  TORCH_CHECK(host_queue(), "softnpu: there is no host queue to hang; start the process with TASK_QUEUE_ENABLE=1");
  {
    std::lock_guard<std::mutex> lock(g_gate);
    g_closed = true;
  }
  at_npu::native::OpCommand::RunOpApiV2("a hung host queue", [] {
    std::unique_lock<std::mutex> lock(g_gate);
    g_opened.wait(lock, [] { return !g_closed; });
    return ACL_SUCCESS;
  });
}

void release_host_queue() {
  std::lock_guard<std::mutex> lock(g_gate);
  g_closed = false;
  g_opened.notify_all();
}

CurrentStream::CurrentStream(c10::DeviceIndex device)
    : stream_(c10_npu::getCurrentNPUStream(device).unwrap()),
      handle_(c10_npu::getCurrentNPUStream(device).stream(false)) {}

void CurrentStream::drain() const {
  if (host_queue()) c10_npu::NPUStream(stream_).stream(true);
}

void CurrentStream::enqueue(const std::string& name, std::function<int()> launch) const {
  if (host_queue()) {
    at_npu::native::OpCommand::RunOpApiV2(name, std::move(launch));
  } else if (const aclError e = launch()) {
    TORCH_CHECK(false, name, ": refused with ACL error ", e, ": ", aclGetRecentErrMsg());
  }
}

// While work is in the host queue it is not known yet whether the stream will be capturing.
bool CurrentStream::wants_accesses() const { return host_queue() || softnpu_wants_accesses(handle_) != 0; }

void CurrentStream::push(const std::string& name, Accesses accesses, std::function<void()> task) const {
  enqueue(name, [handle = handle_, name, accesses = std::move(accesses), task = std::move(task)] {
    softnpu_push_task(
        handle, name.c_str(), [](void* f) { (*static_cast<std::function<void()>*>(f))(); },
        new std::function<void()>(task), [](void* f) { delete static_cast<std::function<void()>*>(f); },
        accesses.data(), accesses.size(), 0);
    return ACL_SUCCESS;
  });
}

void CurrentStream::ran(const std::string& name, const Accesses& accesses) const {
  drain();
  if (!accesses.empty()) softnpu_stream_access(handle_, name.c_str(), accesses.data(), accesses.size());
}

void CurrentStream::synchronize(const std::string& why) const {
  drain();
  if (const aclError e = aclrtSynchronizeStream(handle_)) {
    TORCH_CHECK(false, why, ": waiting for the stream failed with ACL error ", e, ": ", aclGetRecentErrMsg());
  }
}

bool CurrentStream::capturing() const {
  drain();
  aclmdlRICaptureStatus status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  aclmdlRI graph = nullptr;
  aclmdlRICaptureGetInfo(handle_, &status, &graph);
  return status != ACL_MODEL_RI_CAPTURE_STATUS_NONE;
}

}  // namespace softaten
