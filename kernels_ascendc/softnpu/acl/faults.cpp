// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Fault injection: streams that hang or die, tasks that fail, event calls that return an error. A fault is drawn when a
// call is made or a task is queued, never when it runs, so that a seed gives the same faults in every run of a program
// with one host thread.
#include "runtime.h"

namespace softnpu {
namespace {

constexpr size_t kKinds = static_cast<size_t>(Call::kCount);
constexpr size_t kTask = kKinds;  // the kind after the calls

struct Planned {
  const Stream* stream;
  bool any;
  aclError code;
  uint32_t times;
};

struct Faults {
  std::mutex mutex;
  std::vector<Planned> planned[kKinds];
  uint64_t seed = 0, calls[kKinds] = {};
  double probability = 0;
  uint32_t kinds = 0;
  aclError code = 0;
};
Faults& faults() {
  static auto* f = new Faults;
  return *f;
}

std::atomic<uint64_t> g_epoch{0};  // counts set_fault_rate calls; streams count their tasks anew on a change
std::atomic<bool> g_any{false};    // whether there is anything to look for
std::atomic<uint64_t> g_injected{0};

bool drawn(const Faults& f, size_t kind, uint64_t a, uint64_t b) {
  if ((f.kinds >> kind & 1) == 0) return false;
  const uint64_t hash = mix(f.seed ^ mix(kind ^ mix(a ^ mix(b))));
  return static_cast<double>(hash >> 11) * 0x1p-53 < f.probability;
}

const char* name_of(Call call) {
  switch (call) {
    case Call::kCreate:
      return "creating an event";
    case Call::kRecord:
      return "recording an event";
    case Call::kWait:
      return "waiting for an event";
    default:
      return "querying an event";
  }
}

}  // namespace

aclError injected_error(Call call, const Stream* stream) {
  if (!g_any) return ACL_SUCCESS;
  const auto kind = static_cast<size_t>(call);
  auto& f = faults();
  std::lock_guard<std::mutex> lock(f.mutex);
  aclError code = ACL_SUCCESS;
  for (Planned& p : f.planned[kind]) {
    if (p.times == 0 || (!p.any && p.stream != stream)) continue;
    --p.times;
    code = p.code;
    break;
  }
  if (code == ACL_SUCCESS && drawn(f, kind, f.calls[kind]++, 0)) code = f.code;
  if (code == ACL_SUCCESS) return code;
  ++g_injected;
  return fail(code, std::string("an injected fault: ") + name_of(call));
}

bool task_is_to_fail(int32_t stream_id, uint64_t task) {
  if (!g_any) return false;
  auto& f = faults();
  std::lock_guard<std::mutex> lock(f.mutex);
  return drawn(f, kTask, static_cast<uint64_t>(stream_id), task);
}

uint64_t fault_epoch() { return g_epoch; }
void count_injected_fault() { ++g_injected; }

aclError dead_stream(int32_t stream_id) {
  return fail(ACL_ERROR_RT_TS_ERROR, "stream " + std::to_string(stream_id) +
                                         " is dead, or waits for one that is (an injected fault); "
                                         "softnpu_clear_faults ends it");
}

}  // namespace softnpu

using namespace softnpu;

SOFTNPU_API void softnpu_hang_stream(void* stream) { stream_of(stream)->hang(); }
SOFTNPU_API void softnpu_release_stream(void* stream) { stream_of(stream)->release(); }
SOFTNPU_API void softnpu_kill_stream(void* stream) { stream_of(stream)->kill(); }
SOFTNPU_API void softnpu_fail_task(void* stream, uint64_t nth) { stream_of(stream)->fail_task(nth); }
SOFTNPU_API void softnpu_fail_calls(int kind, void* stream, int32_t code, uint32_t times) {
  if (kind < 0 || kind >= static_cast<int>(kKinds)) return;
  const bool any = stream == SOFTNPU_ANY_STREAM;
  const Stream* of = any ? nullptr : stream_of(stream);
  auto& f = faults();
  std::lock_guard<std::mutex> lock(f.mutex);
  f.planned[kind].push_back({of, any, code, times});
  g_any = true;
}
SOFTNPU_API void softnpu_set_fault_rate(uint64_t seed, double probability, uint32_t kinds, int32_t code) {
  auto& f = faults();
  std::lock_guard<std::mutex> lock(f.mutex);
  f.seed = seed;
  f.probability = probability;
  f.kinds = kinds;
  f.code = code;
  for (uint64_t& calls : f.calls) calls = 0;
  ++g_epoch;
  g_any = true;
}
SOFTNPU_API uint64_t softnpu_faults_injected() { return g_injected; }
SOFTNPU_API void softnpu_clear_faults() {
  auto& f = faults();
  {
    std::lock_guard<std::mutex> lock(f.mutex);
    g_any = false;
    f.kinds = 0;
    for (auto& planned : f.planned) planned.clear();
  }
  any_stream([](Stream& stream) {
    stream.clear_faults();
    return false;
  });
}
