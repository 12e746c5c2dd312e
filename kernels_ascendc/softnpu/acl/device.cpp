// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Devices, contexts, errors, process exit. Device numbers are all a device is; a context is a device's only context.
#include <array>
#include <cstdio>

#include "runtime.h"

namespace softnpu {
namespace {

struct Context {
  int device;
};

struct DeviceErrors {
  std::mutex mutex;
  std::map<int, std::deque<std::string>> pending;
};

std::array<Context, 64>& contexts() {
  static auto* all = [] {
    auto* a = new std::array<Context, 64>;
    for (int d = 0; d < 64; ++d) (*a)[d].device = d;
    return a;
  }();
  return *all;
}

DeviceErrors& device_errors() {
  static auto* e = new DeviceErrors;
  return *e;
}

std::atomic<bool> g_initialised{false};
std::atomic<uint64_t> g_used_devices{0};  // bit per device that aclrtSetDevice has named
thread_local int t_device = -1;
thread_local aclError t_error = ACL_SUCCESS;
thread_local std::string t_message;

}  // namespace

aclError fail(aclError code, const std::string& message) {
  t_error = code;
  t_message = "softnpu: " + message;
  trace("error %d: %s", code, message.c_str());
  return code;
}

void post_device_error(int device, const std::string& message) {
  trace("task failed on device %d: %s", device, message.c_str());
  auto& e = device_errors();
  std::lock_guard<std::mutex> lock(e.mutex);
  e.pending[device].push_back(message);
}

aclError take_device_error(int device) {
  auto& e = device_errors();
  std::lock_guard<std::mutex> lock(e.mutex);
  auto& pending = e.pending[device];
  if (pending.empty()) return ACL_SUCCESS;
  const std::string first = pending.front();
  const size_t others = pending.size() - 1;
  pending.clear();  // what follows a failure is mostly its consequence: report the first, count the rest
  return fail(ACL_ERROR_RT_AICORE_EXCEPTION,
              "a task failed: " + first + (others ? " (and " + std::to_string(others) + " more)" : ""));
}

void print_unreported_errors() {
  auto& e = device_errors();
  std::lock_guard<std::mutex> lock(e.mutex);
  for (const auto& [device, pending] : e.pending)
    for (const auto& message : pending)
      std::fprintf(stderr, "softnpu: a task of device %d failed and nothing synchronised after it: %s\n", device,
                   message.c_str());
}

int current_device() { return t_device; }
int device_or_default() { return t_device < 0 ? 0 : t_device; }

}  // namespace softnpu

using softnpu::fail;
using softnpu::settings;

namespace {
aclError no_context() { return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set on this thread"); }
aclError check_device(int32_t device) {
  if (device >= 0 && device < settings().devices) return ACL_SUCCESS;
  return fail(ACL_ERROR_RT_INVALID_DEVICEID,
              "device " + std::to_string(device) + " of " + std::to_string(settings().devices) + " (SOFTNPU_DEVICES)");
}
}  // namespace

SOFTNPU_API aclError aclInit(const char*) {
  return softnpu::g_initialised.exchange(true) ? ACL_ERROR_REPEAT_INITIALIZE : ACL_SUCCESS;
}
SOFTNPU_API aclError aclFinalize() {
  softnpu::g_initialised = false;
  return ACL_SUCCESS;
}
SOFTNPU_API const char* aclGetRecentErrMsg() {
  static thread_local std::string handed_out;  // reading it clears it, as in ACL
  handed_out = std::move(softnpu::t_message);
  softnpu::t_message.clear();
  return handed_out.c_str();
}
SOFTNPU_API aclError aclrtGetLastError(aclrtLastErrLevel) {
  const aclError e = softnpu::t_error;
  softnpu::t_error = ACL_SUCCESS;
  return e;
}
SOFTNPU_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return softnpu::t_error; }
SOFTNPU_API void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

SOFTNPU_API const char* aclrtGetSocName() { return settings().soc.c_str(); }
SOFTNPU_API aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(settings().devices);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtSetDevice(int32_t device) {
  if (const aclError e = check_device(device)) return e;
  softnpu::g_used_devices |= 1ull << device;
  softnpu::t_device = device;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtGetDevice(int32_t* device) {
  if (softnpu::t_device < 0) return no_context();
  *device = softnpu::t_device;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
SOFTNPU_API aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (softnpu::t_device < 0) return no_context();
  *context = &softnpu::contexts()[softnpu::t_device];
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "null context");
  softnpu::t_device = static_cast<softnpu::Context*>(context)->device;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (const aclError e = check_device(device)) return e;
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = (softnpu::g_used_devices >> device) & 1;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t* value) {
  if (const aclError e = check_device(static_cast<int32_t>(device))) return e;
  switch (info) {  // an Ascend 910B3: 20 AI cores, 40 vector cores, 192 MB L2. Labels only; nothing is timed or tiled
                   // by them
    case ACL_DEVICE_INFO_AI_CORE_NUM:
      *value = 20;
      return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
      *value = 40;
      return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE:
      *value = int64_t{192} << 20;
      return ACL_SUCCESS;
    default:
      return fail(ACL_ERROR_RT_PARAM_INVALID, "unknown device capability");
  }
}
SOFTNPU_API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
SOFTNPU_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
SOFTNPU_API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
SOFTNPU_API aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }

SOFTNPU_API void softnpu_inject_error(int32_t device, const char* message) {
  softnpu::post_device_error(device, message);
}
