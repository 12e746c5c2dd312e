// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Settings, read from the environment once. A value that cannot be read stops the process: a test that believes it runs
// on 512 MB must not run on the default.
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
  const char* schedule = std::getenv("SOFTNPU_SCHEDULE");
  s->starve = schedule != nullptr && std::strcmp(schedule, "starve") == 0;
  if (schedule != nullptr && *schedule != '\0' && !s->starve && std::strcmp(schedule, "delay") != 0) {
    std::fprintf(stderr, "softnpu: SOFTNPU_SCHEDULE=%s: expected delay or starve\n", schedule);
    std::exit(2);
  }
  s->races = read_number("SOFTNPU_RACES", 0, 0, 1) != 0;
  const char* destroy = std::getenv("SOFTNPU_DESTROY");
  s->destroy_hangs = destroy != nullptr && std::strcmp(destroy, "hang") == 0;
  if (destroy != nullptr && *destroy != '\0' && !s->destroy_hangs && std::strcmp(destroy, "error") != 0) {
    std::fprintf(stderr, "softnpu: SOFTNPU_DESTROY=%s: expected error or hang\n", destroy);
    std::exit(2);
  }
  return s;
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

SOFTNPU_API void softnpu_set_copy_delay_us(uint32_t us) { softnpu::settings().copy_delay_us = us; }
