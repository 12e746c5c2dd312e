// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Settings, read from the environment once, and the adversarial schedule. A value that cannot be read stops the
// process: a test that believes it runs on 512 MB must not run on the default.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace softnpu {
namespace {

uint64_t read_number(const char* name, uint64_t fallback, uint64_t lowest, uint64_t highest) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text, &end, 0);
  if (*end != '\0' || *text == '-' || value < lowest || value > highest) {
    std::fprintf(stderr, "softnpu: %s=%s: expected a whole number from %llu to %llu\n", name, text,
                 static_cast<unsigned long long>(lowest), static_cast<unsigned long long>(highest));
    std::exit(2);
  }
  return value;
}

int read_poison() {
  const char* text = std::getenv("SOFTNPU_POISON");
  if (text != nullptr && std::strcmp(text, "off") == 0) return -1;
  return static_cast<int>(read_number("SOFTNPU_POISON", 0xA5, 0, 255));
}

Settings* read_settings() {
  auto* s = new Settings;  // never destroyed: worker threads may outlive static destructors
  s->devices = static_cast<int>(read_number("SOFTNPU_DEVICES", 1, 1, 64));
  s->hbm_bytes = read_number("SOFTNPU_HBM_MB", 8192, 16, 1u << 20) << 20;
  s->poison = read_poison();
  const char* soc = std::getenv("SOFTNPU_SOC");
  s->soc = soc != nullptr && *soc != '\0' ? soc : "Ascend910B3";
  s->trace = read_number("SOFTNPU_TRACE", 0, 0, 1) != 0;
  s->copy_delay_us = static_cast<uint32_t>(read_number("SOFTNPU_COPY_DELAY_US", 0, 0, 60'000'000));
  s->seed = read_number("SOFTNPU_SEED", 0, 0, UINT64_MAX);
  s->max_delay_us = static_cast<uint32_t>(read_number("SOFTNPU_MAX_DELAY_US", 200, 1, 60'000'000));
  s->schedule_epoch = 1;
  return s;
}

uint64_t mix(uint64_t x) {  // splitmix64 finaliser
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace

Settings& settings() {
  static Settings* s = read_settings();
  return *s;
}

void trace(const char* format, ...) {
  if (!settings().trace) return;
  va_list args;
  va_start(args, format);
  std::fputs("softnpu: ", stderr);
  std::vfprintf(stderr, format, args);
  std::fputc('\n', stderr);
  va_end(args);
}

}  // namespace softnpu

SOFTNPU_API uint32_t softnpu_schedule_delay_us(uint64_t seed, uint32_t max_us, int32_t stream_id, uint64_t task_index) {
  if (seed == 0) return 0;
  const uint64_t h = softnpu::mix(seed ^ softnpu::mix(static_cast<uint64_t>(stream_id) ^ softnpu::mix(task_index)));
  return static_cast<uint32_t>(h % (static_cast<uint64_t>(max_us) + 1));
}

SOFTNPU_API void softnpu_set_schedule(uint64_t seed, uint32_t max_us) {
  auto& s = softnpu::settings();
  s.max_delay_us = max_us;
  s.seed = seed;
  ++s.schedule_epoch;
}

SOFTNPU_API void softnpu_set_copy_delay_us(uint32_t us) { softnpu::settings().copy_delay_us = us; }
