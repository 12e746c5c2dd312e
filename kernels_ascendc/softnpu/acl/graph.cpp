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
Captures& captures() {
  static auto* c = new Captures;
  return *c;
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
  std::unique_lock<std::mutex> lock(mutex_);
  while (!open_ && !exiting()) changed_.wait_for(lock, std::chrono::milliseconds(20));
}
void Latch::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_ = false;
}

Graph::Graph(int device) : device_(device), id_(g_next_graph_id++) {
  std::lock_guard<std::mutex> lock(captures().mutex);
  captures().active[id_] = this;
}

Graph::~Graph() {
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
  stream->set_branch(made.get());
  branches_.push_back(std::move(made));
  return branches_.back().get();
}

void Graph::add_task(Branch* branch, Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  branch->nodes.push_back({std::move(task), nullptr, nullptr});
}

std::shared_ptr<Latch> Graph::add_record(Branch* branch) {
  auto latch = std::make_shared<Latch>();
  std::lock_guard<std::mutex> lock(mutex_);
  latches_.push_back(latch);
  branch->nodes.push_back({[latch] { latch->open(); }, latch, nullptr});
  return latch;
}

void Graph::add_wait(Branch* branch, std::shared_ptr<Latch> latch) {
  std::lock_guard<std::mutex> lock(mutex_);
  branch->nodes.push_back({[latch] { latch->wait(); }, nullptr, latch});
}

bool Graph::joined() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<const Branch*> reached{branches_.front().get()};
  const auto is_reached = [&](const Branch* b) {
    return std::find(reached.begin(), reached.end(), b) != reached.end();
  };
  const auto waited_for = [&](const Latch* latch) {
    for (const auto* b : reached)
      for (const auto& node : b->nodes)
        if (node.waits.get() == latch) return true;
    return false;
  };
  for (bool grew = true; grew;) {
    grew = false;
    for (const auto& b : branches_) {
      if (is_reached(b.get())) continue;
      // Work after the last record that somebody waits for is work nobody waits for. Waits at the end are not work.
      bool covered = false;
      for (auto node = b->nodes.rbegin(); node != b->nodes.rend(); ++node) {
        if (node->waits != nullptr) continue;
        if (node->opens == nullptr) break;
        if (waited_for(node->opens.get())) {
          covered = true;
          break;
        }
      }
      const bool only_waits =
          std::all_of(b->nodes.begin(), b->nodes.end(), [](const auto& n) { return n.waits != nullptr; });
      if (covered || only_waits) {
        reached.push_back(b.get());
        grew = true;
      }
    }
  }
  return reached.size() == branches_.size();
}

void Graph::end() {
  {
    std::lock_guard<std::mutex> lock(captures().mutex);
    captures().active.erase(id_);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& b : branches_) b->stream->set_branch(nullptr);
}

void Graph::replay(Stream& on) {
  std::lock_guard<std::mutex> lock(replaying_);
  for (auto& latch : latches_) latch->close();
  for (size_t i = 1; i < branches_.size(); ++i) {
    auto& b = *branches_[i];
    if (b.worker == nullptr) b.worker = std::make_unique<Stream>(device_, next_stream_id());
    for (auto& node : b.nodes) b.worker->push(node.task);
  }
  for (auto& node : branches_.front()->nodes) {
    if (exiting()) return;
    on.execute(node.task);
  }
  for (size_t i = 1; i < branches_.size(); ++i) branches_[i]->worker->synchronize(-1);
}

}  // namespace softnpu

using namespace softnpu;

SOFTNPU_API aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode) {
  auto* stream = stream_of(handle);
  if (stream->branch() != nullptr) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is capturing already");
  (new Graph(stream->device()))->join(stream);
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
  static thread_local aclmdlRICaptureMode current = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  std::swap(*mode, current);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
  auto* graph = static_cast<Graph*>(handle);
  if (stream_of(stream)->branch() != nullptr)
    return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a graph cannot be replayed inside a capture");
  auto* on = stream_of(stream);
  on->push([graph, on] { graph->replay(*on); });
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
