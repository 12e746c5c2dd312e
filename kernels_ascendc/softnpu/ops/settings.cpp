// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

#include "settings.h"

#include <array>
#include <map>
#include <mutex>

#include "tensor.h"

namespace softnpu {
namespace {

struct OptionRange {
  int64_t initial, low, high;
};

constexpr std::array<const char*, static_cast<int>(Waiver::count_)> kWaivers = {
    "compressor.hidden", "compressor.head_dim", "compressor.rope_head_dim", "compressor.scenario", "compressor.fp32"};
constexpr std::array<const char*, static_cast<int>(Option::count_)> kOptions = {
    "compressor.saturate", "compressor.cores", "compressor.seed", "compressor.threads"};
constexpr std::array<OptionRange, static_cast<int>(Option::count_)> kRanges = {
    {{0, 0, 1}, {24, 1, 96}, {0, 0, INT64_MAX}, {2, 1, 64}}};
constexpr std::array<const char*, static_cast<int>(Stat::count_)> kStats = {
    "compressor.launches",  "compressor.rows_saved",       "compressor.rows_unmapped", "compressor.rows_clobbered",
    "compressor.rows_read", "compressor.page0_reads",      "compressor.rows_emitted",  "compressor.rows_poisoned",
    "compressor.faults",    "compressor_metadata.launches"};

std::array<std::atomic<bool>, kWaivers.size()> waivers{};

// Those that other libraries have added. Elements stay where they are, so that a flag is read without the lock's help.
struct Added {
  std::mutex mutex;
  std::map<std::string, std::atomic<bool>> flags;
};
Added& added() {
  static Added* const all = new Added;  // outlives all libraries
  return *all;
}
std::atomic<bool>* find_added(const char* name) {
  std::lock_guard<std::mutex> lock(added().mutex);
  const auto found = name == nullptr ? added().flags.end() : added().flags.find(name);
  return found == added().flags.end() ? nullptr : &found->second;
}
std::array<std::atomic<int64_t>, kStats.size()> stats{};
std::array<std::atomic<int64_t>, kOptions.size()> options{kRanges[0].initial, kRanges[1].initial, kRanges[2].initial,
                                                          kRanges[3].initial};
thread_local std::string last_error;

template <size_t N>
int find(const std::array<const char*, N>& names, const char* name) {
  for (size_t i = 0; i < N; ++i) {
    if (name != nullptr && std::string(names[i]) == name) return static_cast<int>(i);
  }
  return -1;
}

template <size_t N>
std::string join(const std::array<const char*, N>& names) {
  std::string text;
  for (const char* name : names) {
    if (!text.empty()) text += ',';
    text += name;
  }
  return text;
}

int unknown(const char* what, const char* name, const std::string& names) {
  last_error = std::string("no ") + what + " is called '" + (name ? name : "") + "'; there are: " + names;
  return -1;
}

std::string all_waivers() {
  std::string names = join(kWaivers);
  std::lock_guard<std::mutex> lock(added().mutex);
  for (const auto& [name, flag] : added().flags) names += "," + name;
  return names;
}

}  // namespace

bool waived(Waiver waiver) { return waivers[static_cast<int>(waiver)]; }
int64_t option(Option option) { return options[static_cast<int>(option)]; }
void count(Stat stat, int64_t amount) { stats[static_cast<int>(stat)] += amount; }

int refuse(const std::string& message) {
  last_error = message;
  return SOFTNPU_REFUSED;
}

}  // namespace softnpu

using namespace softnpu;

extern "C" {

int softnpu_waive(const char* name, int on) {
  const int i = find(kWaivers, name);
  std::atomic<bool>* flag = i < 0 ? find_added(name) : &waivers[i];
  if (flag == nullptr) return unknown("waiver", name, all_waivers());
  *flag = on != 0;
  return 0;
}

int softnpu_is_waived(const char* name) {
  const int i = find(kWaivers, name);
  const std::atomic<bool>* flag = i < 0 ? find_added(name) : &waivers[i];
  return flag == nullptr ? unknown("waiver", name, all_waivers()) : static_cast<int>(flag->load());
}

void softnpu_add_waiver(const char* name) {
  std::lock_guard<std::mutex> lock(added().mutex);
  added().flags.try_emplace(name, false);
}

int softnpu_set_option(const char* name, int64_t value) {
  const int i = find(kOptions, name);
  if (i < 0) return unknown("option", name, join(kOptions));
  if (value < kRanges[i].low || value > kRanges[i].high) {
    last_error = std::string("option ") + name + ": found " + std::to_string(value) + ", expected " +
                 std::to_string(kRanges[i].low) + ".." + std::to_string(kRanges[i].high);
    return -1;
  }
  options[i] = value;
  return 0;
}

int softnpu_get_option(const char* name, int64_t* value) {
  const int i = find(kOptions, name);
  if (i < 0) return unknown("option", name, join(kOptions));
  *value = options[i];
  return 0;
}

int softnpu_stat(const char* name, int64_t* value) {
  const int i = find(kStats, name);
  if (i < 0) return unknown("counter", name, join(kStats));
  *value = stats[i];
  return 0;
}

void softnpu_reset_stats(void) {
  for (auto& stat : stats) stat = 0;
}

const char* softnpu_waiver_names(void) {
  static thread_local std::string names;
  names = all_waivers();
  return names.c_str();
}

const char* softnpu_option_names(void) {
  static const std::string names = join(kOptions);
  return names.c_str();
}

const char* softnpu_stat_names(void) {
  static const std::string names = join(kStats);
  return names.c_str();
}

const char* softnpu_last_error(void) { return last_error.c_str(); }

}  // extern "C"
