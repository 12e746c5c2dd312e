// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The adversarial schedules. Both are pure functions of (seed, stream, task index), and neither can keep a stream from
// running for more than its bound, so a legal program ends and has its result.
//   delay   a pause before every task: many orders, but two tasks keep theirs where one is queued long before the other
//   starve  some tasks are held back, and with them their stream, until the rest of the device has run out of work and
//           the host waits, or the bound has passed: what is queued later on other streams overtakes, so an unordered
//           pair is seen in both orders at the cost of a few pauses
#include <chrono>

#include "runtime.h"

namespace softnpu {

std::atomic<int> hosts_waiting{0};

namespace {

std::atomic<uint64_t> g_delay_injected{0}, g_held{0};
std::mutex g_mutex;
std::condition_variable g_changed;

uint64_t hash_of(uint64_t seed, int32_t stream_id, uint64_t task_index) {
  return mix(seed ^ mix(static_cast<uint64_t>(stream_id) ^ mix(task_index)));
}

bool others_are_idle(const Stream& held) {
  return !any_stream([&](const Stream& stream) { return &stream != &held && stream.runnable(); });
}

void hold(Stream& stream, uint32_t max_us) {
  ++g_held;
  std::unique_lock<std::mutex> lock(g_mutex);
  stream.waiting = true;
  g_changed.notify_all();  // this one is out of the way of the others that are held
  g_changed.wait_for(lock, std::chrono::microseconds(max_us), [&] {
    return exiting() || stream.fate()->dead || (hosts_waiting > 0 && others_are_idle(stream));
  });
  stream.waiting = false;  // with the mutex held: the others see it run before they look again
}

}  // namespace

uint64_t mix(uint64_t x) {  // splitmix64 finaliser
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

void wait_for_turn(Stream& stream, uint64_t task_index) {
  auto& s = settings();
  if (s.starve) {
    if (softnpu_schedule_holds(s.seed, stream.id(), task_index)) hold(stream, s.max_delay_us);
  } else if (const uint32_t us = softnpu_schedule_delay_us(s.seed, s.max_delay_us, stream.id(), task_index)) {
    std::this_thread::sleep_for(std::chrono::microseconds(us));
    g_delay_injected += us;
  }
}

// Without the mutex: who is held and misses this sees it at the next change, or when its bound has passed.
void schedule_changed() {
  if (settings().starve) g_changed.notify_all();
}

}  // namespace softnpu

using namespace softnpu;

namespace {
void set_schedule(uint64_t seed, uint32_t max_us, bool starve) {
  auto& s = settings();
  s.max_delay_us = max_us;
  s.starve = starve && seed != 0;
  s.seed = seed;
  ++s.schedule_epoch;
}
}  // namespace

SOFTNPU_API uint32_t softnpu_schedule_delay_us(uint64_t seed, uint32_t max_us, int32_t stream_id, uint64_t task_index) {
  if (seed == 0) return 0;
  return static_cast<uint32_t>(hash_of(seed, stream_id, task_index) % (static_cast<uint64_t>(max_us) + 1));
}
SOFTNPU_API int softnpu_schedule_holds(uint64_t seed, int32_t stream_id, uint64_t task_index) {
  return seed != 0 && hash_of(seed, stream_id, task_index) % 6 == 0;
}
SOFTNPU_API void softnpu_set_schedule(uint64_t seed, uint32_t max_us) { set_schedule(seed, max_us, false); }
SOFTNPU_API void softnpu_set_starvation(uint64_t seed, uint32_t max_us) { set_schedule(seed, max_us, true); }
SOFTNPU_API uint64_t softnpu_delay_injected_us() { return g_delay_injected; }
SOFTNPU_API uint64_t softnpu_tasks_held() { return g_held; }
