// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The software NPU's own types. Problem: torch_npu, unmodified, needs an ACL runtime, and there is none without CANN.
// Way: a device is host memory plus streams; a stream is a queue of closures with one worker thread; an event is a pair
// of counters; a graph is the closures recorded while its streams were capturing, one list per stream, replayed with
// the same parallelism. Not done: device kernels, IPC, virtual memory (expandable segments), graph task groups, timing
// models.
#pragma once

#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "races.h"
#include "softnpu.h"

#define SOFTNPU_API extern "C" __attribute__((visibility("default")))

namespace softnpu {

using Task = std::function<void()>;

// ---- settings (settings.cpp)

struct Settings {
  int devices;         // SOFTNPU_DEVICES, default 1
  uint64_t hbm_bytes;  // SOFTNPU_HBM_MB, default 8192, per device
  int poison;          // SOFTNPU_POISON: fill byte of fresh memory, default 0xA5; -1 ("off") leaves zeros
  std::string soc;     // SOFTNPU_SOC, default Ascend910B3
  bool trace;          // SOFTNPU_TRACE
  std::atomic<uint32_t> copy_delay_us;  // SOFTNPU_COPY_DELAY_US
  std::atomic<uint64_t> seed;           // SOFTNPU_SEED
  std::atomic<uint32_t> max_delay_us;   // SOFTNPU_MAX_DELAY_US
  std::atomic<bool> starve;             // SOFTNPU_SCHEDULE=starve
  bool races;                           // SOFTNPU_RACES: the detector is on from the start
  std::atomic<bool> destroy_hangs;      // SOFTNPU_DESTROY=hang: see groups.h
  std::atomic<uint64_t>
      schedule_epoch;  // counts softnpu_set_schedule calls; streams restart their task index on a change
};
Settings& settings();
void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- errors (device.cpp)

// Sets the calling thread's last error and the text aclGetRecentErrMsg returns; returns `code`, to be used in a return.
aclError fail(aclError code, const std::string& message);
// A task of `device` failed. Kept until one synchronisation reports it; printed at exit if none did.
void post_device_error(int device, const std::string& message);
// Success, or the oldest unreported failure of the device's tasks.
aclError take_device_error(int device);
int current_device();     // -1 before aclrtSetDevice
int device_or_default();  // current device, 0 before aclrtSetDevice

// True once the process is exiting: every wait gives up, so that worker threads can be joined.
bool exiting();

// ---- work (stream.cpp)

// What became of a stream, shared by the stream and by all who wait for what it was given.
class Fate {
 public:
  std::atomic<bool> dead{false};               // it runs nothing any more
  void wait_for(std::shared_ptr<Fate> other);  // null: it does not wait any more
  bool over() const;                           // it is dead, or waits for one that is over

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Fate> other_;
};

// External events and memory flags: which record releases which wait. The first record goes with the first wait, and so
// on.
class Pairs {
 public:
  races::MarkPtr of_record();
  races::MarkPtr of_wait();
  void reset();  // the signals that nobody has taken are gone

 private:
  std::mutex mutex_;
  std::deque<races::MarkPtr> records_, waits_;  // the ones without a partner yet
};

void forget_flags(const void* address, size_t bytes);  // the memory is gone

class Latch;

// What a stream is given. While it captures, a node of a graph, from which every replay makes new work.
struct Work {
  enum class Kind { kTask, kRecord, kWait } kind = Kind::kTask;
  Task run;
  std::string name;              // tasks: shown in errors and races
  Accesses accesses;             // tasks
  bool finds_more{};             // tasks: calls softnpu_found_access when it runs
  races::MarkPtr mark;           // records and waits
  std::shared_ptr<Pairs> pairs;  // of an external event, instead of the mark
  std::shared_ptr<Latch> latch;  // of an event inside a capture, instead of the mark
  races::ItemPtr item;           // set when it is queued
};

// ---- graphs under capture (graph.cpp)

// A one-shot gate inside a graph: what an event is between captured streams. Reset before each replay.
class Latch {
 public:
  void open();
  void wait();
  void close();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

class Graph;
class Stream;

// What one stream recorded into one graph, in issue order.
struct Branch {
  Graph* graph;
  Stream* stream;
  int32_t stream_id;
  std::vector<Work> nodes;
  std::unique_ptr<Stream> worker;  // runs the branch at replay; the first branch runs on the replaying stream
};

// What the race detector knows of one replay: an item for every node of every branch.
using ReplayItems = std::vector<std::vector<races::ItemPtr>>;

class Graph {
 public:
  Graph(int device, aclmdlRICaptureMode mode);
  ~Graph();
  Branch* join(Stream* stream);  // the stream's branch, made when it is not part of the capture yet
  void add(Branch* branch, Work work);
  std::shared_ptr<Latch> add_record(Branch* branch);
  void add_wait(Branch* branch, std::shared_ptr<Latch> latch);
  bool joined() const;                      // every branch's work is waited for, directly or not, by the first branch
  void end();                               // detaches the streams
  ReplayItems announce(int32_t stream_id);  // queues a replay with the race detector
  // Runs all branches; returns when all are done. Called on the thread of `on`.
  void replay(Stream& on, const ReplayItems& items);
  Accesses accesses() const;  // of all its tasks, as far as they were known when they were captured
  uint32_t id() const { return id_; }
  Stream* origin() const { return branches_.front()->stream; }
  // Whether a call that ACL does not allow during this capture may be made by this thread.
  bool forbids_this_thread(aclmdlRICaptureMode mode_of_thread) const;

 private:
  const int device_;
  const uint32_t id_;
  const aclmdlRICaptureMode mode_;
  const std::thread::id thread_;
  mutable std::mutex mutex_;  // guards the branches while several threads record
  std::mutex replaying_;      // one replay at a time, as on the device
  std::vector<std::unique_ptr<Branch>> branches_;
  std::vector<std::shared_ptr<Latch>> latches_;
};

// The capture with this id, or null when it has ended.
Graph* active_capture(uint32_t id);
// Whether a capture is under way during which this thread must not ask the device how far it is.
bool capture_forbids_queries();

// ---- streams (stream.cpp)

enum class Waited { kDone, kTimeout, kDead };

class Stream {
 public:
  Stream(int device, int32_t id);
  ~Stream();                // runs what is queued, then joins the thread
  void push(Work work);     // queues, or records while capturing
  void enqueue(Work work);  // queues; the race detector knows it already, and no fault is injected
  void replay(Graph* graph);
  bool idle();
  Waited synchronize(int32_t timeout_ms);  // < 0: for ever
  void execute(Work& work);                // delay, run, turn an exception into a device error
  void stop();                             // process exit: drop what is queued, join

  // Faults, see faults.cpp.
  void hang();
  void release();
  void kill();
  void fail_task(uint64_t nth);
  void clear_faults();

  Branch* branch();  // null unless capturing
  void set_branch(Branch* b);
  bool runnable() const;  // has something to run that waits for nobody
  int device() const { return device_; }
  int32_t id() const { return id_; }
  const std::shared_ptr<Fate>& fate() const { return fate_; }
  races::Lane lane() const { return {id_, 0, id_}; }
  races::MarkPtr mark_end();  // a mark behind all that the stream has been given

  std::atomic<bool> waiting{false};  // its thread waits for an event, a release or its turn

 private:
  void run();
  void announce(Work& work);
  void fail_if_planned(Work& work);
  void put(Work work);  // with the mutex held
  const int device_;
  const int32_t id_;
  const std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();
  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::deque<Work> queue_;
  std::atomic<size_t> load_{0};  // what is queued or running
  bool busy_ = false, stopping_ = false;
  Branch* branch_ = nullptr;
  std::vector<std::shared_ptr<Latch>> holds_;
  std::vector<Task> lost_;         // records that a dead stream was given
  std::vector<uint64_t> failing_;  // numbers of the tasks that are to fail
  uint64_t tasks_ = 0;             // queued so far
  uint64_t executed_ = 0;
  uint64_t fault_epoch_ = 0, first_drawn_ = 0;    // tasks are drawn by their number since set_fault_rate
  uint64_t schedule_epoch_ = 0, task_index_ = 0;  // touched by the executing thread only
  std::thread thread_;                            // started by the first task
};
Stream* stream_of(aclrtStream handle);  // null handle: the current device's default stream
std::vector<Stream*> streams_of_device(int device);
// Whether this holds for a stream, the workers of graphs included; none is destroyed meanwhile.
bool any_stream(const std::function<bool(Stream&)>& is);
int32_t next_stream_id();
Stream* this_stream();  // whose thread this is, or null
bool on_stream_thread();

// For as long as it lives, the calling stream or host thread waits for another stream.
class Waiting {
 public:
  Waiting();
  ~Waiting();
  bool over() const;  // it waits in vain: the process exits, or the stream has died

 private:
  Stream* const stream_;
  const bool outer_;
};

// ---- schedule (schedule.cpp)

// The adversarial schedule: called by the stream's thread before each task.
void wait_for_turn(Stream& stream, uint64_t task_index);
uint64_t mix(uint64_t x);
void schedule_changed();  // a stream or a host thread began or ended to wait, or a stream ran out of work
extern std::atomic<int> hosts_waiting;

// ---- faults (faults.cpp)

// The error that this call is to return, or success. `stream`: null for a call without one.
enum class Call { kCreate, kRecord, kWait, kQuery, kCount };
aclError injected_error(Call call, const Stream* stream);
bool task_is_to_fail(int32_t stream_id, uint64_t task);
uint64_t fault_epoch();
void count_injected_fault();
aclError dead_stream(int32_t stream_id);

// ---- memory (memory.cpp)

// True when [p, p + n) lies in one device allocation.
bool is_device_memory(const void* p, size_t n);

}  // namespace softnpu
