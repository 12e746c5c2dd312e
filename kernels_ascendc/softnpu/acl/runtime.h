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

#include "softnpu.h"

#define SOFTNPU_API extern "C" __attribute__((visibility("default")))

namespace softnpu {

using Task = std::function<void()>;

// ---- settings (settings.cpp)
// -----------------------------------------------------------------------------------------
struct Settings {
  int devices;         // SOFTNPU_DEVICES, default 1
  uint64_t hbm_bytes;  // SOFTNPU_HBM_MB, default 8192, per device
  int poison;          // SOFTNPU_POISON: fill byte of fresh memory, default 0xA5; -1 ("off") leaves zeros
  std::string soc;     // SOFTNPU_SOC, default Ascend910B3
  bool trace;          // SOFTNPU_TRACE
  std::atomic<uint32_t> copy_delay_us;  // SOFTNPU_COPY_DELAY_US
  std::atomic<uint64_t> seed;           // SOFTNPU_SEED
  std::atomic<uint32_t> max_delay_us;   // SOFTNPU_MAX_DELAY_US
  std::atomic<uint64_t>
      schedule_epoch;  // counts softnpu_set_schedule calls; streams restart their task index on a change
};
Settings& settings();
void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- errors (device.cpp)
// --------------------------------------------------------------------------------------------- Sets the calling
// thread's last error and the text aclGetRecentErrMsg returns; returns `code`, to be used in a return.
aclError fail(aclError code, const std::string& message);
// A task of `device` failed. Kept until one synchronisation reports it; printed at exit if none did.
void post_device_error(int device, const std::string& message);
// Success, or the oldest unreported failure of the device's tasks.
aclError take_device_error(int device);
int current_device();     // -1 before aclrtSetDevice
int device_or_default();  // current device, 0 before aclrtSetDevice

// True once the process is exiting: every wait gives up, so that worker threads can be joined.
bool exiting();

// ---- graphs under capture (graph.cpp)
// -------------------------------------------------------------------------------- A one-shot gate inside a graph: what
// an event is between captured streams. Reset before each replay.
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
  struct Node {
    Task task;
    std::shared_ptr<Latch> opens;  // set for a recorded event
    std::shared_ptr<Latch> waits;  // set for a stream wait
  };
  Graph* graph;
  Stream* stream;
  std::vector<Node> nodes;
  std::unique_ptr<Stream> worker;  // runs the branch at replay; the first branch runs on the replaying stream
};

class Graph {
 public:
  explicit Graph(int device);
  ~Graph();
  Branch* join(Stream* stream);  // the stream's branch, made when it is not part of the capture yet
  void add_task(Branch* branch, Task task);
  std::shared_ptr<Latch> add_record(Branch* branch);
  void add_wait(Branch* branch, std::shared_ptr<Latch> latch);
  bool joined() const;      // every branch's work is waited for, directly or not, by the first branch
  void end();               // detaches the streams
  void replay(Stream& on);  // runs all branches; returns when all are done. Called on the thread of `on`
  uint32_t id() const { return id_; }
  Stream* origin() const { return branches_.front()->stream; }

 private:
  const int device_;
  const uint32_t id_;
  mutable std::mutex mutex_;  // guards the branches while several threads record
  std::mutex replaying_;      // one replay at a time, as on the device
  std::vector<std::unique_ptr<Branch>> branches_;
  std::vector<std::shared_ptr<Latch>> latches_;
};

// The capture with this id, or null when it has ended.
Graph* active_capture(uint32_t id);

// ---- streams (stream.cpp)
// --------------------------------------------------------------------------------------------
class Stream {
 public:
  Stream(int device, int32_t id);
  ~Stream();             // runs what is queued, then joins the thread
  void push(Task task);  // queues, or records while capturing
  bool idle();
  bool synchronize(int32_t timeout_ms);  // < 0: for ever. False on timeout
  void execute(Task& task);              // delay, run, turn an exception into a device error
  void stop();                           // process exit: drop what is queued, join

  Branch* branch();  // null unless capturing
  void set_branch(Branch* b);
  int device() const { return device_; }
  int32_t id() const { return id_; }

 private:
  void run();
  const int device_;
  const int32_t id_;
  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::deque<Task> queue_;
  bool busy_ = false, stopping_ = false;
  Branch* branch_ = nullptr;
  uint64_t schedule_epoch_ = 0, task_index_ = 0;  // touched by the executing thread only
  std::thread thread_;                            // started by the first task
};
Stream* stream_of(aclrtStream handle);  // null handle: the current device's default stream
std::vector<Stream*> streams_of_device(int device);
int32_t next_stream_id();
bool on_stream_thread();

// ---- memory (memory.cpp)
// --------------------------------------------------------------------------------------------- True when [p, p + n)
// lies in one device allocation.
bool is_device_memory(const void* p, size_t n);

}  // namespace softnpu
