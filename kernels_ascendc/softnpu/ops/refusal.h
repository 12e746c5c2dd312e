// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// How a check refuses an argument: it throws; the entry point catches it and hands the message to softnpu_last_error.
#ifndef SOFTNPU_OPS_REFUSAL_H
#define SOFTNPU_OPS_REFUSAL_H

#include <cstdint>
#include <string>

#include "settings.h"
#include "tensor.h"

namespace softnpu {

struct Refused {
  std::string message;
};

[[noreturn]] inline void refuse_argument(const std::string& operation, const std::string& argument,
                                         const std::string& found, const std::string& expected) {
  throw Refused{operation + ": " + argument + ": found " + found + ", expected " + expected};
}

// Runs a check and turns its refusal into the entry point's status.
template <typename Check>
int checked(Check check) {
  try {
    check();
  } catch (const Refused& refused) {
    return refuse(refused.message);
  }
  return SOFTNPU_OK;
}

inline std::string text(int64_t value) { return std::to_string(value); }

inline std::string shape_text(const SoftnpuTensor& t) {
  std::string result = "[";
  for (int i = 0; i < t.dims; ++i) {
    if (i) result += ", ";
    result += text(t.shape[i]);
  }
  return result + "]";
}

inline int64_t elements(const SoftnpuTensor& t) {
  int64_t count = 1;
  for (int i = 0; i < t.dims; ++i) count *= t.shape[i];
  return count;
}

}  // namespace softnpu

#endif  // SOFTNPU_OPS_REFUSAL_H
