// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The emulation's own C functions of a kernel library, beside those of its kernels: options of the launches to come,
// and the counters of those that were. Included by one source file of the library; its launchers call options() before
// a run and record() after it. The options and counters are the library's, shared by its threads.
#ifndef SOFTNPU_ASCENDC_EXPORTS_H
#define SOFTNPU_ASCENDC_EXPORTS_H

#include <mutex>

#include "launch.h"

namespace softnpu::ascendc {

struct Shared {
  std::mutex mutex;
  Options options;
  Counters counters;
};
inline Shared& shared() {
  static Shared state;
  return state;
}

inline Options options() {
  const std::lock_guard<std::mutex> lock(shared().mutex);
  return shared().options;
}
inline void record(const Counters& counters) {
  const std::lock_guard<std::mutex> lock(shared().mutex);
  shared().counters.add(counters);
}

}  // namespace softnpu::ascendc

#define SOFTNPU_EXPORT extern "C" __attribute__((visibility("default")))

// option: "order" (0 forward, 1 reverse, 2 shuffled), "seed", "fuzz" (0, 1), "saturate" (0, 1), "faults" (0: a launch
// does not look at what its kernels report, as on a device; 1). 0: set; 1: no such option, or a value it does not have.
SOFTNPU_EXPORT int afd_dsv4_emulation_set(const char* option, int64_t value) {
  softnpu::ascendc::Shared& state = softnpu::ascendc::shared();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const std::string name = option == nullptr ? "" : option;
  if (name == "seed") {
    state.options.seed = static_cast<uint64_t>(value);
  } else if (name == "order" && value >= 0 && value <= 2) {
    state.options.sequence = static_cast<softnpu::ascendc::Options::Sequence>(value);
  } else if (name == "fuzz" && (value == 0 || value == 1)) {
    state.options.fuzz = value == 1;
  } else if (name == "saturate" && (value == 0 || value == 1)) {
    state.options.saturate = value == 1;
  } else if (name == "faults" && (value == 0 || value == 1)) {
    state.options.faults = value == 1;
  } else {
    return 1;
  }
  return 0;
}

SOFTNPU_EXPORT void afd_dsv4_emulation_reset_counters(void) {
  const std::lock_guard<std::mutex> lock(softnpu::ascendc::shared().mutex);
  softnpu::ascendc::shared().counters = {};
}

// -1: no counter of that name.
SOFTNPU_EXPORT int64_t afd_dsv4_emulation_counter(const char* name) {
  softnpu::ascendc::Shared& state = softnpu::ascendc::shared();
  const std::lock_guard<std::mutex> lock(state.mutex);
  int64_t found = -1;
  state.counters.each([&](const std::string& counter, int64_t value) {
    if (name != nullptr && counter == name) found = value;
  });
  return found;
}

// Separated by commas; the text lives as long as the library.
SOFTNPU_EXPORT const char* afd_dsv4_emulation_counter_names(void) {
  static const std::string names = [] {
    std::string all;
    softnpu::ascendc::Counters{}.each(
        [&](const std::string& counter, int64_t) { all += (all.empty() ? "" : ",") + counter; });
    return all;
  }();
  return names.c_str();
}

#endif  // SOFTNPU_ASCENDC_EXPORTS_H
