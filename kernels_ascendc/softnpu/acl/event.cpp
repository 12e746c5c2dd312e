// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Events. An ordinary event counts its records (generations): a wait or a synchronisation is for the generation
// recorded last when it was issued, so recording again never releases an older wait early. An event never recorded is
// complete, as on the device. An external event (ACL_EVENT_EXTERNAL) is a signal instead: a wait blocks until a record
// or its own reset, and takes the signal, so one record releases one wait; both may be captured into a graph and then
// happen at every replay.
#include <chrono>
#include <utility>

#include "runtime.h"

namespace softnpu {
namespace {

uint64_t now_us() {
  using namespace std::chrono;
  return static_cast<uint64_t>(duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count());
}

// Shared by the handle and the tasks that use it: a handle may be destroyed while its record is still queued.
struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
  uint64_t timestamp_us = 0;
  int device = 0;
  bool signalled = false;        // external events only
  uint32_t captured_in = 0;      // id of the graph that the last record went into, 0 outside capture
  std::shared_ptr<Latch> latch;  // that record, for streams of the same capture
  std::shared_ptr<Fate> fate;    // of the stream of the last record
  races::MarkPtr mark;           // of the last record
  std::shared_ptr<Pairs> pairs;  // external events only

  uint64_t timestamp() {
    std::lock_guard<std::mutex> lock(mutex);
    return timestamp_us;
  }
  // Until the condition holds; false when it never will. A host thread gives up when the stream of the record is over;
  // a stream stays where it is, and who synchronises with it finds out.
  template <class Condition>
  bool wait(Condition condition, const std::shared_ptr<Fate>& recorder) {
    const Waiting waiting;
    Stream* own = this_stream();
    std::unique_lock<std::mutex> lock(mutex);
    if (condition()) return true;
    if (own != nullptr) own->fate()->wait_for(recorder);
    int lost = 0;
    bool met = false;
    while (!(met = condition()) && !waiting.over() && lost < 3) {
      changed.wait_for(lock, std::chrono::milliseconds(20));
      // Once it has lasted: what the stream did last may still be under way.
      lost = own == nullptr && recorder != nullptr && recorder->over() ? lost + 1 : 0;
    }
    if (own != nullptr) own->fate()->wait_for(nullptr);
    return met;
  }
};

struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
  uint32_t flags;
  bool external() const { return (flags & ACL_EVENT_EXTERNAL) != 0; }
};

Event* event_of(aclrtEvent handle) { return static_cast<Event*>(handle); }

std::atomic<uint64_t> g_created{0}, g_destroyed{0};

aclError query(aclrtEvent handle, bool* complete) {
  auto& state = *event_of(handle)->state;
  if (const aclError e = injected_error(Call::kQuery, nullptr)) return e;
  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.captured_in != 0)
    return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event was recorded inside a capture, so it cannot be queried");
  // As with CUDA: a capture in the global mode forbids it to every thread that has not asked for the relaxed mode.
  if (capture_forbids_queries())
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "an event cannot be queried while a stream is capturing");
  *complete = state.done >= state.recorded;
  if (*complete) races::host_passed(state.mark);
  return ACL_SUCCESS;
}

}  // namespace

races::MarkPtr Pairs::of_record() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!waits_.empty()) {
    auto mark = std::move(waits_.front());
    waits_.pop_front();
    return mark;
  }
  return records_.emplace_back(races::new_mark());
}

races::MarkPtr Pairs::of_wait() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!records_.empty()) {
    auto mark = std::move(records_.front());
    records_.pop_front();
    return mark;
  }
  return waits_.emplace_back(races::new_mark());
}

void Pairs::reset() {
  std::lock_guard<std::mutex> lock(mutex_);
  records_.clear();
}

// Memory flags, torch_npu's external events among them: the first write of a value goes with the first wait for it, and
// so on. Writing 0 is how a flag is reset, and releases nobody.
namespace {
struct Flags {
  std::mutex mutex;
  std::map<std::pair<uintptr_t, uint64_t>, std::shared_ptr<Pairs>> pairs;
};
Flags& flags() {
  static auto* f = new Flags;
  return *f;
}
std::shared_ptr<Pairs> pairs_of(const void* address, uint64_t value) {
  std::lock_guard<std::mutex> lock(flags().mutex);
  auto& pairs = flags().pairs[{reinterpret_cast<uintptr_t>(address), value}];
  if (pairs == nullptr) pairs = std::make_shared<Pairs>();
  return pairs;
}
}  // namespace

void forget_flags(const void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(flags().mutex);
  auto& pairs = flags().pairs;
  pairs.erase(pairs.lower_bound({begin, 0}), pairs.lower_bound({begin + bytes, 0}));
}

}  // namespace softnpu

using namespace softnpu;

SOFTNPU_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) {
  if (const aclError e = injected_error(Call::kCreate, nullptr)) return e;
  auto* made = new Event;
  made->flags = flags;
  made->state->device = device_or_default();
  if (made->external()) made->state->pairs = std::make_shared<Pairs>();
  ++g_created;
  *event = made;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) {
  return aclrtCreateEventExWithFlag(event, flags);
}
SOFTNPU_API aclError aclrtDestroyEvent(aclrtEvent event) {
  ++g_destroyed;
  delete event_of(event);
  return ACL_SUCCESS;
}

SOFTNPU_API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  auto* event = event_of(handle);
  auto* stream = stream_of(stream_handle);
  auto state = event->state;
  if (const aclError e = injected_error(Call::kRecord, stream)) return e;
  Work work;
  work.kind = Work::Kind::kRecord;
  if (event->external()) {
    work.pairs = state->pairs;
    work.run = [state] {
      std::lock_guard<std::mutex> lock(state->mutex);
      state->signalled = true;
      state->timestamp_us = now_us();
      state->changed.notify_all();
    };
    stream->push(std::move(work));
    return ACL_SUCCESS;
  }
  if (Branch* branch = stream->branch()) {
    auto latch = branch->graph->add_record(branch);
    std::lock_guard<std::mutex> lock(state->mutex);
    state->captured_in = branch->graph->id();
    state->latch = std::move(latch);
    return ACL_SUCCESS;
  }
  uint64_t generation;
  work.mark = races::new_mark();
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    generation = ++state->recorded;
    state->captured_in = 0;
    state->latch = nullptr;
    state->device = stream->device();
    state->fate = stream->fate();
    state->mark = work.mark;
  }
  work.run = [state, generation] {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (state->done < generation) state->done = generation;
    state->timestamp_us = now_us();
    state->changed.notify_all();
  };
  stream->push(std::move(work));
  return ACL_SUCCESS;
}

SOFTNPU_API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  auto* event = event_of(handle);
  auto* stream = stream_of(stream_handle);
  auto state = event->state;
  if (const aclError e = injected_error(Call::kWait, stream)) return e;
  Work work;
  work.kind = Work::Kind::kWait;
  if (event->external()) {
    work.pairs = state->pairs;
    work.run = [state] {
      // Testing and taking are one: two that wait must not both see one signal.
      state->wait([&] { return std::exchange(state->signalled, false); }, nullptr);
    };
    stream->push(std::move(work));
    return ACL_SUCCESS;
  }
  uint64_t generation;
  uint32_t captured_in;
  std::shared_ptr<Latch> latch;
  std::shared_ptr<Fate> fate;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    generation = state->recorded;
    captured_in = state->captured_in;
    latch = state->latch;
    fate = state->fate;
    work.mark = state->mark;
  }
  if (captured_in != 0) {
    Graph* graph = active_capture(captured_in);
    if (graph == nullptr)
      return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "the event was last recorded inside a capture that has ended");
    if (Branch* own = stream->branch(); own != nullptr && own->graph != graph)
      return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "the event belongs to another capture");
    Branch* branch = graph->join(stream);
    graph->add_wait(branch, std::move(latch));
    return ACL_SUCCESS;
  }
  if (stream->branch() != nullptr) {
    if (generation == 0) return ACL_SUCCESS;  // never recorded: there is nothing to wait for
    return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                "a capturing stream cannot wait for an event recorded outside the capture");
  }
  work.run = [state, generation, fate] { state->wait([&] { return state->done >= generation; }, fate); };
  stream->push(std::move(work));
  return ACL_SUCCESS;
}

SOFTNPU_API aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
  auto state = event_of(handle)->state;
  if (state->pairs != nullptr) state->pairs->reset();
  Work work;
  work.name = "aclrtResetEvent";
  work.run = [state] {
    std::lock_guard<std::mutex> lock(state->mutex);
    state->signalled = false;
  };
  stream_of(stream)->push(std::move(work));
  return ACL_SUCCESS;
}

SOFTNPU_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  bool complete = false;
  if (const aclError e = query(event, &complete)) return e;
  *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  bool complete = false;
  if (const aclError e = query(event, &complete)) return e;
  *status = complete ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  auto state = event_of(event)->state;
  uint64_t generation;
  std::shared_ptr<Fate> fate;
  races::MarkPtr mark;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (state->captured_in != 0)
      return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event was recorded inside a capture, so it cannot be waited for");
    generation = state->recorded;
    fate = state->fate;
    mark = state->mark;
  }
  if (!state->wait([&] { return state->done >= generation; }, fate) && !exiting())
    return fail(ACL_ERROR_RT_TS_ERROR, "the event was recorded on a stream that is dead (an injected fault)");
  races::host_passed(mark);
  return take_device_error(state->device);
}

SOFTNPU_API aclError aclrtEventElapsedTime(float* ms, aclrtEvent start, aclrtEvent end) {
  const uint64_t from = event_of(start)->state->timestamp(), to = event_of(end)->state->timestamp();
  if (from == 0 || to == 0)
    return fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "an event has not completed a record yet");
  *ms = static_cast<float>(static_cast<int64_t>(to - from)) / 1000.0f;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* timestamp) {
  *timestamp = event_of(event)->state->timestamp();
  return ACL_SUCCESS;
}

// Memory flags: the other way streams wait for each other; what torch_npu makes its external events of.
SOFTNPU_API aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
  Work work;
  work.kind = Work::Kind::kRecord;
  if (value != 0) work.pairs = pairs_of(address, value);
  work.run = [=] { __atomic_store_n(static_cast<uint64_t*>(address), value, __ATOMIC_RELEASE); };
  stream_of(stream)->push(std::move(work));
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag, aclrtStream stream) {
  Work work;
  work.kind = Work::Kind::kWait;
  work.pairs = pairs_of(address, value);
  work.run = [=] {
    const Waiting waiting;
    const auto reached = [&](uint64_t now) {
      switch (flag) {
        case ACL_STREAM_WAIT_VALUE_GEQ:
          return now >= value;
        case ACL_STREAM_WAIT_VALUE_EQ:
          return now == value;
        case ACL_STREAM_WAIT_VALUE_AND:
          return (now & value) != 0;
        default:
          return ~(now | value) != 0;
      }
    };
    while (!reached(__atomic_load_n(static_cast<uint64_t*>(address), __ATOMIC_ACQUIRE)) && !waiting.over())
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  };
  stream_of(stream)->push(std::move(work));
  return ACL_SUCCESS;
}

SOFTNPU_API uint64_t softnpu_events_created() { return g_created; }
SOFTNPU_API uint64_t softnpu_events_destroyed() { return g_destroyed; }
