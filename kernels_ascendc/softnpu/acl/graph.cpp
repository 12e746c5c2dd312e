// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Capture and replay. Each captured stream becomes a branch; events between branches become latches. A replay runs the
// first branch on the replaying stream's thread and every other branch on a worker stream of its own, so a wait that is
// missing inside a captured region can go wrong at replay, as on the device. Not done: task groups, graph update,
// conditional nodes.
#include <algorithm>
#include <chrono>

#include "runtime.h"

namespace softnpu {
namespace {

std::atomic<uint32_t> g_next_graph_id{1};

struct Captures {
  std::mutex mutex;
  std::map<uint32_t, Graph*> active;
};
thread_local aclmdlRICaptureMode t_capture_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
Captures& captures() {
  static auto* c = new Captures;
  return *c;
}

struct Replays {
  std::mutex mutex;
  uint64_t count = 0;
  const Graph* last = nullptr;  // null when it is gone
};
Replays& replays() {
  static auto* r = new Replays;
  return *r;
}

}  // namespace

Graph* active_capture(uint32_t id) {
  std::lock_guard<std::mutex> lock(captures().mutex);
  const auto it = captures().active.find(id);
  return it == captures().active.end() ? nullptr : it->second;
}

void Latch::open() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_ = true;
  changed_.notify_all();
}
void Latch::wait() {
  const Waiting waiting;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!open_ && !waiting.over()) changed_.wait_for(lock, std::chrono::milliseconds(20));
}
void Latch::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_ = false;
}

bool capture_forbids_queries() {
  const aclmdlRICaptureMode mode = t_capture_mode;
  std::lock_guard<std::mutex> lock(captures().mutex);
  for (const auto& [id, graph] : captures().active)
    if (graph->forbids_this_thread(mode)) return true;
  return false;
}

Graph::Graph(int device, aclmdlRICaptureMode mode)
    : device_(device), id_(g_next_graph_id++), mode_(mode), thread_(std::this_thread::get_id()) {
  std::lock_guard<std::mutex> lock(captures().mutex);
  captures().active[id_] = this;
}

Graph::~Graph() {
  {
    std::lock_guard<std::mutex> lock(replays().mutex);
    if (replays().last == this) replays().last = nullptr;
  }
  std::lock_guard<std::mutex> lock(captures().mutex);
  captures().active.erase(id_);
}

Branch* Graph::join(Stream* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& b : branches_)
    if (b->stream == stream) return b.get();
  auto made = std::make_unique<Branch>();
  made->graph = this;
  made->stream = stream;
  made->stream_id = stream->id();
  stream->set_branch(made.get());
  branches_.push_back(std::move(made));
  return branches_.back().get();
}

bool Graph::forbids_this_thread(aclmdlRICaptureMode mode_of_thread) const {
  if (mode_of_thread == ACL_MODEL_RI_CAPTURE_MODE_RELAXED || mode_ == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
  if (std::this_thread::get_id() == thread_) return true;
  return mode_ == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && mode_of_thread == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
}

void Graph::add(Branch* branch, Work work) {
  std::lock_guard<std::mutex> lock(mutex_);
  branch->nodes.push_back(std::move(work));
}

std::shared_ptr<Latch> Graph::add_record(Branch* branch) {
  auto latch = std::make_shared<Latch>();
  Work work;
  work.kind = Work::Kind::kRecord;
  work.latch = latch;
  work.run = [latch] { latch->open(); };
  {
    std::lock_guard<std::mutex> lock(mutex_);
    latches_.push_back(latch);
  }
  add(branch, std::move(work));
  return latch;
}

void Graph::add_wait(Branch* branch, std::shared_ptr<Latch> latch) {
  Work work;
  work.kind = Work::Kind::kWait;
  work.latch = latch;
  work.run = [latch] { latch->wait(); };
  add(branch, std::move(work));
}

bool Graph::joined() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<const Branch*> reached{branches_.front().get()};
  const auto is_reached = [&](const Branch* b) {
    return std::find(reached.begin(), reached.end(), b) != reached.end();
  };
  const auto waits = [](const Work& node) { return node.kind == Work::Kind::kWait && node.latch != nullptr; };
  const auto waited_for = [&](const Latch* latch) {
    for (const auto* b : reached)
      for (const auto& node : b->nodes)
        if (waits(node) && node.latch.get() == latch) return true;
    return false;
  };
  for (bool grew = true; grew;) {
    grew = false;
    for (const auto& b : branches_) {
      if (is_reached(b.get())) continue;
      // Work after the last record that somebody waits for is work nobody waits for. Waits at the end are not work.
      bool covered = false;
      for (auto node = b->nodes.rbegin(); node != b->nodes.rend(); ++node) {
        if (waits(*node)) continue;
        if (node->latch == nullptr) break;
        if (waited_for(node->latch.get())) {
          covered = true;
          break;
        }
      }
      const bool only_waits = std::all_of(b->nodes.begin(), b->nodes.end(), waits);
      if (covered || only_waits) {
        reached.push_back(b.get());
        grew = true;
      }
    }
  }
  return reached.size() == branches_.size();
}

Accesses Graph::accesses() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Accesses found;
  for (const auto& b : branches_)
    for (const auto& node : b->nodes) found.insert(found.end(), node.accesses.begin(), node.accesses.end());
  return found;
}

void Graph::end() {
  {
    std::lock_guard<std::mutex> lock(captures().mutex);
    captures().active.erase(id_);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& b : branches_) b->stream->set_branch(nullptr);
}

// A replay as the race detector sees it: the other branches begin where the replaying stream is, the stream goes on
// when all have ended, and in between there are the captured edges.
ReplayItems Graph::announce(int32_t stream_id) {
  ReplayItems items(branches_.size());
  if (!races::on()) return items;
  std::map<const Latch*, races::MarkPtr> marks;
  for (const auto& latch : latches_) marks[latch.get()] = races::new_mark();
  const auto lane = [&](size_t i) {
    return races::Lane{stream_id, static_cast<int32_t>(i), i == 0 ? stream_id : branches_[i]->stream_id};
  };
  const auto mark = [&](const Work& node) -> races::MarkPtr {
    if (node.latch != nullptr) return marks[node.latch.get()];
    if (node.pairs == nullptr) return nullptr;
    return node.kind == Work::Kind::kRecord ? node.pairs->of_record() : node.pairs->of_wait();
  };
  const auto begin = races::new_mark();
  races::queue_record(lane(0), begin);
  for (size_t i = 0; i < branches_.size(); ++i) {
    if (i > 0) races::queue_wait(lane(i), begin);
    for (const Work& node : branches_[i]->nodes) {
      races::ItemPtr item;
      if (node.kind == Work::Kind::kTask) {
        item = races::queue_task(lane(i), node.name, node.accesses, node.finds_more);
      } else if (node.kind == Work::Kind::kRecord) {
        races::queue_record(lane(i), mark(node));
      } else {
        races::queue_wait(lane(i), mark(node));
      }
      items[i].push_back(std::move(item));
    }
  }
  for (size_t i = 1; i < branches_.size(); ++i) {
    const auto end = races::new_mark();
    races::queue_record(lane(i), end);
    races::queue_wait(lane(0), end);
  }
  return items;
}

void Graph::replay(Stream& on, const ReplayItems& items) {
  std::lock_guard<std::mutex> lock(replaying_);
  const auto work = [&](size_t branch, size_t node) {
    Work made = branches_[branch]->nodes[node];
    if (!items[branch].empty()) made.item = items[branch][node];
    return made;
  };
  const auto over = [&] { return exiting() || on.fate()->dead; };
  for (size_t i = 1; i < branches_.size(); ++i) {
    auto& b = *branches_[i];
    if (b.worker == nullptr) b.worker = std::make_unique<Stream>(device_, next_stream_id());
    b.worker->clear_faults();  // it died with another stream
  }
  for (auto& latch : latches_) latch->close();
  for (size_t i = 1; i < branches_.size(); ++i) {
    auto& b = *branches_[i];
    for (size_t node = 0; node < b.nodes.size(); ++node) b.worker->enqueue(work(i, node));
  }
  const size_t nodes = branches_.front()->nodes.size();
  for (size_t node = 0; node < nodes && !over(); ++node) {
    Work made = work(0, node);
    on.execute(made);
  }
  // A dead stream takes its graph with it.
  if (over())
    for (size_t i = 1; i < branches_.size(); ++i) branches_[i]->worker->kill();
  for (size_t i = 1; i < branches_.size(); ++i) branches_[i]->worker->synchronize(-1);
}

}  // namespace softnpu

using namespace softnpu;

SOFTNPU_API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  auto* stream = stream_of(handle);
  if (stream->branch() != nullptr) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is capturing already");
  (new Graph(stream->device(), mode))->join(stream);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
  Branch* branch = stream_of(handle)->branch();
  *status = branch != nullptr ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (graph != nullptr) *graph = branch != nullptr ? branch->graph : nullptr;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* out) {
  auto* stream = stream_of(handle);
  Branch* branch = stream->branch();
  if (branch == nullptr) return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "the stream is not capturing");
  Graph* graph = branch->graph;
  if (graph->origin() != stream)
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture was begun on another stream");
  const bool joined = graph->joined();
  graph->end();
  if (!joined) {
    delete graph;
    *out = nullptr;
    return fail(ACL_ERROR_RT_STREAM_UNJOINED,
                "a stream joined the capture and the first stream does not wait for its work");
  }
  *out = graph;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
  std::swap(*mode, softnpu::t_capture_mode);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
  auto* graph = static_cast<Graph*>(handle);
  if (stream_of(stream)->branch() != nullptr)
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a graph cannot be replayed inside a capture");
  {
    std::lock_guard<std::mutex> lock(replays().mutex);
    ++replays().count;
    replays().last = graph;
  }
  stream_of(stream)->replay(graph);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclmdlRIDestroy(aclmdlRI handle) {
  // A replay may still be queued somewhere on its device.
  auto* graph = static_cast<Graph*>(handle);
  if (!on_stream_thread())
    for (auto* stream : streams_of_device(device_or_default())) stream->synchronize(-1);
  delete graph;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  *id = static_cast<Graph*>(handle)->id();
  return ACL_SUCCESS;
}

SOFTNPU_API uint64_t softnpu_replays() {
  std::lock_guard<std::mutex> lock(replays().mutex);
  return replays().count;
}
SOFTNPU_API uint64_t softnpu_replayed_accesses(SoftnpuAccess* out, uint64_t capacity) {
  std::lock_guard<std::mutex> lock(replays().mutex);
  if (replays().last == nullptr) return 0;
  const Accesses found = replays().last->accesses();
  std::copy_n(found.begin(), std::min<uint64_t>(capacity, found.size()), out);
  return found.size();
}
