// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Events. An ordinary event counts its records (generations): a wait or a synchronisation is for the generation
// recorded last when it was issued, so recording again never releases an older wait early. An event never recorded is
// complete, as on the device. An external event (ACL_EVENT_EXTERNAL) is a signal instead: a wait blocks until a record
// or its own reset, and takes the signal, so one record releases one wait; both may be captured into a graph and then
// happen at every replay.
#include <chrono>

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

  uint64_t timestamp() {
    std::lock_guard<std::mutex> lock(mutex);
    return timestamp_us;
  }
  template <class Condition>
  void wait(Condition condition) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!condition() && !exiting()) changed.wait_for(lock, std::chrono::milliseconds(20));
  }
};

struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
  uint32_t flags;
  bool external() const { return (flags & ACL_EVENT_EXTERNAL) != 0; }
};

Event* event_of(aclrtEvent handle) { return static_cast<Event*>(handle); }

aclError query(aclrtEvent handle, bool* complete) {
  auto& state = *event_of(handle)->state;
  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.captured_in != 0)
    return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event was recorded inside a capture, so it cannot be queried");
  *complete = state.done >= state.recorded;
  return ACL_SUCCESS;
}

}  // namespace
}  // namespace softnpu

using namespace softnpu;

SOFTNPU_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) {
  auto* made = new Event;
  made->flags = flags;
  made->state->device = device_or_default();
  *event = made;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) {
  return aclrtCreateEventExWithFlag(event, flags);
}
SOFTNPU_API aclError aclrtDestroyEvent(aclrtEvent event) {
  delete event_of(event);
  return ACL_SUCCESS;
}

SOFTNPU_API aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  auto* event = event_of(handle);
  auto* stream = stream_of(stream_handle);
  auto state = event->state;
  if (event->external()) {
    stream->push([state] {
      std::lock_guard<std::mutex> lock(state->mutex);
      state->signalled = true;
      state->timestamp_us = now_us();
      state->changed.notify_all();
    });
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
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    generation = ++state->recorded;
    state->captured_in = 0;
    state->latch = nullptr;
    state->device = stream->device();
  }
  stream->push([state, generation] {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (state->done < generation) state->done = generation;
    state->timestamp_us = now_us();
    state->changed.notify_all();
  });
  return ACL_SUCCESS;
}

SOFTNPU_API aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  auto* event = event_of(handle);
  auto* stream = stream_of(stream_handle);
  auto state = event->state;
  if (event->external()) {
    stream->push([state] {
      state->wait([&] { return state->signalled; });
      std::lock_guard<std::mutex> lock(state->mutex);
      state->signalled = false;
    });
    return ACL_SUCCESS;
  }
  uint64_t generation;
  uint32_t captured_in;
  std::shared_ptr<Latch> latch;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    generation = state->recorded;
    captured_in = state->captured_in;
    latch = state->latch;
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
  if (stream->branch() != nullptr && generation != 0)
    return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                "a capturing stream cannot wait for an event recorded outside the capture");
  stream->push([state, generation] { state->wait([&] { return state->done >= generation; }); });
  return ACL_SUCCESS;
}

SOFTNPU_API aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
  auto state = event_of(handle)->state;
  stream_of(stream)->push([state] {
    std::lock_guard<std::mutex> lock(state->mutex);
    state->signalled = false;
  });
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
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (state->captured_in != 0)
      return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event was recorded inside a capture, so it cannot be waited for");
    generation = state->recorded;
  }
  state->wait([&] { return state->done >= generation; });
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

// Memory flags: the other way streams wait for each other.
SOFTNPU_API aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
  stream_of(stream)->push([=] { __atomic_store_n(static_cast<uint64_t*>(address), value, __ATOMIC_RELEASE); });
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtValueWait(void* address, uint64_t value, uint32_t flag, aclrtStream stream) {
  stream_of(stream)->push([=] {
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
    while (!reached(__atomic_load_n(static_cast<uint64_t*>(address), __ATOMIC_ACQUIRE)) && !exiting())
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return ACL_SUCCESS;
}
