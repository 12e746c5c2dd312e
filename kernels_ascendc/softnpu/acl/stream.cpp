// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Streams: a queue and one worker thread each, started by the first task. Tasks never hold Python's global lock unless
// they take it themselves, so waiting for a stream while holding that lock is safe for every task queued by this
// project.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>
#include <stdexcept>

#include "groups.h"
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
std::atomic<bool> g_exiting{false};
thread_local Stream* t_stream = nullptr;

void stop_all() {
  g_exiting = true;
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    streams.assign(registry().all.begin(), registry().all.end());
  }
  for (auto* stream : streams) stream->stop();
  leave_all_groups();
  print_unreported_errors();
}

}  // namespace

bool exiting() { return g_exiting; }
bool on_stream_thread() { return t_stream != nullptr; }
Stream* this_stream() { return t_stream; }
int32_t next_stream_id() { return g_next_id++; }

Waiting::Waiting() : stream_(t_stream), outer_(stream_ != nullptr && stream_->waiting.exchange(true)) {
  if (stream_ == nullptr) ++hosts_waiting;
  schedule_changed();
}
Waiting::~Waiting() {
  if (stream_ != nullptr) {
    stream_->waiting = outer_;
  } else {
    --hosts_waiting;
  }
}
bool Waiting::over() const { return exiting() || (stream_ != nullptr && stream_->fate()->dead); }

void Fate::wait_for(std::shared_ptr<Fate> other) {
  std::lock_guard<std::mutex> lock(mutex_);
  other_ = std::move(other);
}

bool Fate::over() const {
  if (dead) return true;
  std::shared_ptr<Fate> at;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    at = other_;
  }
  for (int steps = 0; at != nullptr && steps < 1000; ++steps) {  // streams that wait for each other go round in circles
    if (at->dead) return true;
    std::lock_guard<std::mutex> lock(at->mutex_);
    at = at->other_;
  }
  return false;
}

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
    load_ -= queue_.size();
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

bool Stream::runnable() const { return load_ > 0 && !waiting && !fate_->dead; }

void Stream::push(Work work) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (branch_ != nullptr) {
    Branch* b = branch_;
    lock.unlock();
    b->graph->add(b, std::move(work));
    return;
  }
  if (work.kind == Work::Kind::kTask) fail_if_planned(work);
  announce(work);
  put(std::move(work));
}

void Stream::replay(Graph* graph) {
  // However the replay ends, the detector must not wait for what its tasks would have found.
  const std::shared_ptr<ReplayItems> items(new ReplayItems(graph->announce(id_)), [](ReplayItems* all) {
    for (const auto& branch : *all)
      for (const auto& item : branch) races::settle(item);
    delete all;
  });
  Work work;
  work.name = "a graph";
  work.run = [graph, items, this] { graph->replay(*this, *items); };
  std::lock_guard<std::mutex> lock(mutex_);
  fail_if_planned(work);
  put(std::move(work));
}

void Stream::fail_if_planned(Work& work) {
  const uint64_t task = tasks_++;
  if (fault_epoch_ != fault_epoch()) {
    fault_epoch_ = fault_epoch();
    first_drawn_ = task;
  }
  const auto planned = std::find(failing_.begin(), failing_.end(), task);
  if (planned == failing_.end() && !task_is_to_fail(id_, task - first_drawn_)) return;
  if (planned != failing_.end()) failing_.erase(planned);
  count_injected_fault();
  work.run = [name = work.name] { throw std::runtime_error("an injected fault in place of " + name); };
}

void Stream::enqueue(Work work) {
  std::lock_guard<std::mutex> lock(mutex_);
  put(std::move(work));
}

// Tells the race detector, in the order of the queue.
void Stream::announce(Work& work) {
  if (!races::on()) return;
  switch (work.kind) {
    case Work::Kind::kTask:
      work.item = races::queue_task(lane(), work.name, std::move(work.accesses), work.finds_more);
      break;
    case Work::Kind::kRecord:
      races::queue_record(lane(), work.pairs != nullptr ? work.pairs->of_record() : work.mark);
      break;
    case Work::Kind::kWait:
      races::queue_wait(lane(), work.pairs != nullptr ? work.pairs->of_wait() : work.mark);
      break;
  }
}

void Stream::put(Work work) {
  if (stopping_ || fate_->dead) {
    races::settle(work.item);
    if (work.kind == Work::Kind::kRecord && fate_->dead) lost_.push_back(std::move(work.run));
    return;
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  ++load_;
  queue_.push_back(std::move(work));
  work_.notify_one();
}

races::MarkPtr Stream::mark_end() {
  auto mark = races::new_mark();
  if (mark == nullptr) return mark;
  std::lock_guard<std::mutex> lock(mutex_);
  races::queue_record(lane(), mark);
  return mark;
}

void Stream::execute(Work& work) {
  auto& s = settings();
  if (schedule_epoch_ != s.schedule_epoch) {
    schedule_epoch_ = s.schedule_epoch;
    task_index_ = 0;
  }
  const uint64_t index = task_index_++;
  if (s.seed != 0) wait_for_turn(*this, index);
  try {
    const races::Running running(work.item);
    work.run();
  } catch (const std::exception& e) {
    post_device_error(device_, "stream " + std::to_string(id_) + ": " + e.what());
  } catch (...) {
    post_device_error(device_, "stream " + std::to_string(id_) + ": unknown exception");
  }
  races::settle(work.item);
}

void Stream::run() {
  t_stream = this;
  aclrtSetDevice(device_);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    execute(work);
    work = Work{};  // its resources go before the stream counts as idle
    lock.lock();
    busy_ = false;
    ++executed_;
    --load_;
    if (queue_.empty()) {
      idle_.notify_all();
      schedule_changed();
    }
  }
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_ && !fate_->dead;
}

Waited Stream::synchronize(int32_t timeout_ms) {
  const Waiting waiting;
  const auto mark = mark_end();
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [&] { return (queue_.empty() && !busy_) || fate_->dead; };
  const auto begun = std::chrono::steady_clock::now();
  // Waiting for a dead stream counts once it has lasted: what died last may have released this one before.
  uint64_t at = 0;
  int stuck = 0;
  while (stuck < 3 && !idle_.wait_for(lock, std::chrono::milliseconds(30), done)) {
    stuck = fate_->over() && at == executed_ ? stuck + 1 : 0;
    at = executed_;
    if (timeout_ms >= 0 && std::chrono::steady_clock::now() - begun >= std::chrono::milliseconds(timeout_ms))
      return Waited::kTimeout;
  }
  if (stuck > 0 || fate_->dead) return Waited::kDead;
  races::host_passed(mark);
  return Waited::kDone;
}

// ---- faults

// A hang is a gate in the queue: what was queued before it still runs.
void Stream::hang() {
  auto gate = std::make_shared<Latch>();
  Work work;
  work.kind = Work::Kind::kWait;
  work.run = [gate] { gate->wait(); };
  std::lock_guard<std::mutex> lock(mutex_);
  holds_.push_back(std::move(gate));
  put(std::move(work));
}

void Stream::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& gate : holds_) gate->open();
  holds_.clear();
}

void Stream::kill() {
  std::deque<Work> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fate_->dead = true;
    load_ -= queue_.size();
    dropped.swap(queue_);
    for (Work& work : dropped)
      if (work.kind == Work::Kind::kRecord) lost_.push_back(std::move(work.run));
    for (auto& gate : holds_) gate->open();
    holds_.clear();
  }
  for (Work& work : dropped) races::settle(work.item);
  idle_.notify_all();
  schedule_changed();
}

void Stream::fail_task(uint64_t nth) {
  std::lock_guard<std::mutex> lock(mutex_);
  failing_.push_back(tasks_ + nth - 1);
}

void Stream::clear_faults() {
  release();
  std::vector<Task> lost;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failing_.clear();
    fate_->dead = false;
    lost.swap(lost_);
  }
  for (Task& record : lost) record();
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

bool any_stream(const std::function<bool(Stream&)>& is) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return std::any_of(registry().all.begin(), registry().all.end(), [&](Stream* stream) { return is(*stream); });
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

aclError wait_for(Stream& stream, int32_t timeout_ms) {
  switch (stream.synchronize(timeout_ms)) {
    case Waited::kTimeout:
      return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "the synchronisation timed out");
    case Waited::kDead:
      return dead_stream(stream.id());
    default:
      return ACL_SUCCESS;
  }
}

// A host function, or a task of an operator library.
Work task(const char* name, Task run) {
  Work work;
  work.run = std::move(run);
  work.name = name;
  return work;
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
  if (stream->fate()->over()) stream->kill();  // it would never run out of work
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
  const auto mark = stream->mark_end();
  const bool idle = stream->idle();
  if (idle) races::host_passed(mark);
  *status = idle ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  auto* stream = stream_of(handle);
  if (stream->branch() != nullptr) return captured_error("a stream synchronisation");
  if (const aclError e = wait_for(*stream, timeout_ms)) return e;
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
    if (stream->fate()->dead) return dead_stream(stream->id());  // at once, whatever else hangs
  for (auto* stream : streams)
    if (const aclError e = wait_for(*stream, timeout_ms)) return e;
  return take_device_error(device);
}
SOFTNPU_API aclError aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

SOFTNPU_API aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void* arg) {
  stream_of(stream)->push(task("a host function", [=] { fn(arg); }));
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtLaunchCallback(aclrtCallback fn, void* arg, aclrtCallbackBlockType, aclrtStream stream) {
  stream_of(stream)->push(task("a host function", [=] { fn(arg); }));
  return ACL_SUCCESS;
}
// Callbacks run on the stream's thread, so there is nothing for a report thread to do.
SOFTNPU_API aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
SOFTNPU_API aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
SOFTNPU_API aclError aclrtProcessReport(int32_t) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return ACL_ERROR_RT_THREAD_SUBSCRIBE;
}

SOFTNPU_API void softnpu_push_task(void* stream, const char* name, void (*fn)(void*), void* arg, void (*destroy)(void*),
                                   const SoftnpuAccess* accesses, uint64_t count, int finds_more) {
  // Copies of the task share one owner, so destroy runs once, with the last of them.
  std::shared_ptr<void> owner(arg, [destroy](void* a) {
    if (destroy != nullptr) destroy(a);
  });
  Work work = task(name, [fn, owner] { fn(owner.get()); });
  work.accesses.assign(accesses, accesses + count);
  work.finds_more = finds_more != 0;
  stream_of(stream)->push(std::move(work));
}
SOFTNPU_API void softnpu_push(void* stream, void (*fn)(void*), void* arg, void (*destroy)(void*)) {
  softnpu_push_task(stream, "a task", fn, arg, destroy, nullptr, 0, 0);
}
SOFTNPU_API int softnpu_wants_accesses(void* stream) { return races::on() || stream_of(stream)->branch() != nullptr; }
SOFTNPU_API void softnpu_stream_access(void* stream, const char* name, const SoftnpuAccess* accesses, uint64_t count) {
  races::queue_task(stream_of(stream)->lane(), name, {accesses, accesses + count}, false);
}
SOFTNPU_API int softnpu_exiting() { return exiting() ? 1 : 0; }
