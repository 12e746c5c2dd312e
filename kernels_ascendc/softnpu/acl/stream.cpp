// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Streams: a queue and one worker thread each, started by the first task. Tasks never hold Python's global lock unless
// they take it themselves, so waiting for a stream while holding that lock is safe for every task queued by this
// project.
#include <chrono>
#include <cstdlib>
#include <set>

#include "runtime.h"

namespace softnpu {

void print_unreported_errors();  // device.cpp

namespace {

struct Registry {
  std::mutex mutex;
  std::set<Stream*> all;      // graph workers included, so that exit can join them
  std::set<Stream*> visible;  // made by aclrtCreateStream or as a default stream
  std::map<int, Stream*> defaults;
};

Registry& registry() {
  static auto* r = new Registry;
  return *r;
}

std::atomic<int32_t> g_next_id{0};
std::atomic<uint64_t> g_delay_injected{0};
std::atomic<bool> g_exiting{false};
thread_local bool t_on_stream_thread = false;

void stop_all() {
  g_exiting = true;
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    streams.assign(registry().all.begin(), registry().all.end());
  }
  for (auto* stream : streams) stream->stop();
  print_unreported_errors();
}

}  // namespace

bool exiting() { return g_exiting; }
bool on_stream_thread() { return t_on_stream_thread; }
int32_t next_stream_id() { return g_next_id++; }

Stream::Stream(int device, int32_t id) : device_(device), id_(id) {
  // Registered late, so it runs before the static destructors of the libraries whose code the tasks call.
  static const int registered = std::atexit(stop_all);
  (void)registered;
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.insert(this);
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().all.erase(this);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Stream::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    queue_.clear();
  }
  work_.notify_all();
  if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
}

Branch* Stream::branch() {
  std::lock_guard<std::mutex> lock(mutex_);
  return branch_;
}

void Stream::set_branch(Branch* b) {
  std::lock_guard<std::mutex> lock(mutex_);
  branch_ = b;
}

void Stream::push(Task task) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (branch_ != nullptr) {
    Branch* b = branch_;
    lock.unlock();
    b->graph->add_task(b, std::move(task));
    return;
  }
  if (stopping_) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  queue_.push_back(std::move(task));
  lock.unlock();
  work_.notify_one();
}

void Stream::execute(Task& task) {
  auto& s = settings();
  if (schedule_epoch_ != s.schedule_epoch) {
    schedule_epoch_ = s.schedule_epoch;
    task_index_ = 0;
  }
  if (const uint32_t us = softnpu_schedule_delay_us(s.seed, s.max_delay_us, id_, task_index_++)) {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    g_delay_injected += us;
  }
  try {
    task();
  } catch (const std::exception& e) {
    post_device_error(device_, "stream " + std::to_string(id_) + ": " + e.what());
  } catch (...) {
    post_device_error(device_, "stream " + std::to_string(id_) + ": unknown exception");
  }
}

void Stream::run() {
  t_on_stream_thread = true;
  aclrtSetDevice(device_);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    execute(task);
    task = nullptr;  // its resources go before the stream counts as idle
    lock.lock();
    busy_ = false;
    if (queue_.empty()) idle_.notify_all();
  }
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

bool Stream::synchronize(int32_t timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [&] { return queue_.empty() && !busy_; };
  if (timeout_ms < 0) {
    idle_.wait(lock, done);
    return true;
  }
  return idle_.wait_for(lock, std::chrono::milliseconds(timeout_ms), done);
}

Stream* stream_of(aclrtStream handle) {
  if (handle != nullptr) return static_cast<Stream*>(handle);
  auto& r = registry();
  const int device = device_or_default();
  {
    std::lock_guard<std::mutex> lock(r.mutex);
    if (const auto it = r.defaults.find(device); it != r.defaults.end()) return it->second;
  }
  auto* made = new Stream(device, next_stream_id());
  std::lock_guard<std::mutex> lock(r.mutex);
  const auto [it, inserted] = r.defaults.emplace(device, made);
  if (inserted) r.visible.insert(made);  // a lost race leaks one idle stream
  return it->second;
}

std::vector<Stream*> streams_of_device(int device) {
  std::vector<Stream*> found;
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (auto* stream : registry().visible)
    if (stream->device() == device) found.push_back(stream);
  return found;
}

}  // namespace softnpu

using namespace softnpu;

namespace {
aclError captured_error(const char* what) {
  return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
              std::string(what) + " is not allowed while the stream is capturing");
}
}  // namespace

SOFTNPU_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  if (current_device() < 0) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set on this thread");
  auto* made = new Stream(current_device(), next_stream_id());
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().visible.insert(made);
  }
  *stream = made;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
SOFTNPU_API aclError aclrtDestroyStream(aclrtStream handle) {
  if (handle == nullptr) return fail(ACL_ERROR_RT_PARAM_INVALID, "cannot destroy a null stream");
  auto* stream = static_cast<Stream*>(handle);
  if (stream->branch() != nullptr) return captured_error("destroying a stream");
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().visible.erase(stream);
  }
  delete stream;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
SOFTNPU_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
SOFTNPU_API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream_of(stream)->id();
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  auto* stream = stream_of(handle);
  if (stream->branch() != nullptr) return captured_error("a stream query");
  *status = stream->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  auto* stream = stream_of(handle);
  if (stream->branch() != nullptr) return captured_error("a stream synchronisation");
  if (!stream->synchronize(timeout_ms))
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream synchronisation timed out");
  return take_device_error(stream->device());
}
SOFTNPU_API aclError aclrtSynchronizeStream(aclrtStream stream) {
  return aclrtSynchronizeStreamWithTimeout(stream, -1);
}
SOFTNPU_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  const int device = device_or_default();
  const auto streams = streams_of_device(device);
  for (auto* stream : streams)
    if (stream->branch() != nullptr) return captured_error("a device synchronisation");
  for (auto* stream : streams)
    if (!stream->synchronize(timeout_ms))
      return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "device synchronisation timed out");
  return take_device_error(device);
}
SOFTNPU_API aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

SOFTNPU_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void* arg) {
  stream_of(stream)->push([=] { fn(arg); });
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtLaunchCallback(aclrtCallback fn, void* arg, aclrtCallbackBlockType, aclrtStream stream) {
  stream_of(stream)->push([=] { fn(arg); });
  return ACL_SUCCESS;
}
// Callbacks run on the stream's thread, so there is nothing for a report thread to do.
SOFTNPU_API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
SOFTNPU_API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
SOFTNPU_API aclError aclrtProcessReport(int32_t) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return ACL_ERROR_RT_THREAD_SUBSCRIBE;
}

SOFTNPU_API void softnpu_push(void* stream, void (*fn)(void*), void* arg, void (*destroy)(void*)) {
  // Copies of the task share one owner, so destroy runs once, with the last of them.
  std::shared_ptr<void> owner(arg, [destroy](void* a) {
    if (destroy != nullptr) destroy(a);
  });
  stream_of(stream)->push([fn, owner] { fn(owner.get()); });
}
SOFTNPU_API int softnpu_exiting() { return exiting() ? 1 : 0; }
SOFTNPU_API uint64_t softnpu_delay_injected_us() { return g_delay_injected; }
