// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// What ends an emulated launch: a rule of the device broken by a kernel. A kernel that breaks one computes something on
// hardware too (stale rows, truncated copies, a hang), so the emulation stops at the call and says which rule, where
// and why. Numbers 1..28 are the rows of the trap table in README.md; larger ones are rules the launcher adds.
#ifndef SOFTNPU_ASCENDC_MISUSE_H
#define SOFTNPU_ASCENDC_MISUSE_H

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <source_location>
#include <string>

namespace softnpu::ascendc {

using Where = std::source_location;

enum class Trap : int {
  ub_budget = 1,
  alignment = 2,
  extent = 3,
  truncated_copy = 4,
  pad_copy = 5,
  copy_params = 6,
  queue_state = 7,
  poison_read = 8,
  pipe_order = 9,
  event_balance = 10,
  vector_order = 11,
  vector_params = 12,
  operand_overlap = 13,
  types = 14,
  scalar_gm_write = 15,
  stale_scalar_read = 16,
  cross_core = 17,
  gm_order = 18,
  copy_order = 19,
  atomics = 20,
  event_ids = 26,
  gm_bounds = 101,
  gm_access = 102,
};

inline const char* name_of(Trap trap) {
  switch (trap) {
    case Trap::ub_budget:
      return "UB budget";
    case Trap::alignment:
      return "operand alignment";
    case Trap::extent:
      return "operand outside its tensor";
    case Trap::truncated_copy:
      return "copy size truncated to 32 bytes";
    case Trap::pad_copy:
      return "DataCopyPad units and ranges";
    case Trap::copy_params:
      return "DataCopy parameter ranges";
    case Trap::queue_state:
      return "queue state";
    case Trap::poison_read:
      return "read of bytes never written";
    case Trap::pipe_order:
      return "pipes not ordered";
    case Trap::event_balance:
      return "event balance";
    case Trap::vector_order:
      return "vector operations not ordered";
    case Trap::vector_params:
      return "vector parameter ranges";
    case Trap::operand_overlap:
      return "operands overlap";
    case Trap::types:
      return "types and round modes";
    case Trap::scalar_gm_write:
      return "scalar GM write";
    case Trap::stale_scalar_read:
      return "stale scalar GM read";
    case Trap::cross_core:
      return "cross-core overlap in GM";
    case Trap::gm_order:
      return "GM accesses of one core not ordered";
    case Trap::copy_order:
      return "copies of one pipe not ordered";
    case Trap::atomics:
      return "atomics";
    case Trap::event_ids:
      return "event ids exhausted";
    case Trap::gm_bounds:
      return "GM out of bounds";
    case Trap::gm_access:
      return "GM access not allowed";
  }
  return "unknown";
}

// Thrown by every emulated call; caught by the launcher. what() is one line: trap, call, cause, place, block.
class Misuse : public std::exception {
 public:
  Misuse(Trap trap, const char* api, std::string cause, const char* file, uint32_t line, int64_t block)
      : trap_(trap), cause_(std::move(cause)), file_(file), line_(line) {
    text_ = "trap " + std::to_string(static_cast<int>(trap)) + " (" + name_of(trap) + "): " + api + ": " + cause_ +
            " at " + file_ + ":" + std::to_string(line_) + ", block " + std::to_string(block);
  }
  const char* what() const noexcept override { return text_.c_str(); }
  int number() const { return static_cast<int>(trap_); }
  Trap trap() const { return trap_; }
  const char* name() const { return name_of(trap_); }
  const std::string& file() const { return file_; }
  uint32_t line() const { return line_; }
  const std::string& cause() const { return cause_; }

 private:
  Trap trap_;
  std::string cause_, file_, text_;
  uint32_t line_;
};

[[gnu::format(printf, 1, 2)]] inline std::string format(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(buffer, sizeof(buffer), text, arguments);
  va_end(arguments);
  return buffer;
}

}  // namespace softnpu::ascendc

#endif  // SOFTNPU_ASCENDC_MISUSE_H
