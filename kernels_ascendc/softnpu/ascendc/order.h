// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Which instructions of one core are known to be complete when another starts. The four pipes of a vector core run side
// by side, and even instructions of one pipe may overlap; only flags, barriers and the queues made of them order two
// instructions. Each pipe therefore has a clock: how many instructions of every pipe are complete before its next one
// starts. SetFlag<A_B> takes the clock of A with all that A has issued, WaitFlag joins it to the clock of B,
// PipeBarrier joins a pipe's own past. What bisheng would insert by itself (auto-sync) is not assumed.
#ifndef SOFTNPU_ASCENDC_ORDER_H
#define SOFTNPU_ASCENDC_ORDER_H

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "types.h"

namespace softnpu::ascendc {

enum class Pipe : uint8_t { S, V, MTE2, MTE3 };
constexpr int kPipes = 4;
inline constexpr std::array<const char*, kPipes> kPipeNames = {"S", "V", "MTE2", "MTE3"};
constexpr int index_of(Pipe pipe) { return static_cast<int>(pipe); }
inline const char* name_of(Pipe pipe) { return kPipeNames[index_of(pipe)]; }

constexpr int kEventIds = 8;
constexpr int kEvents = static_cast<int>(AscendC::HardEvent::MAX);

// The two pipes of an event of a vector core; {S, S} for events that it does not have.
struct EventPipes {
  Pipe from, to;
  constexpr bool valid() const { return from != to; }
};
constexpr EventPipes pipes_of(AscendC::HardEvent event) {
  using E = AscendC::HardEvent;
  switch (event) {
    case E::MTE2_V:
      return {Pipe::MTE2, Pipe::V};
    case E::V_MTE2:
      return {Pipe::V, Pipe::MTE2};
    case E::MTE3_V:
      return {Pipe::MTE3, Pipe::V};
    case E::V_MTE3:
      return {Pipe::V, Pipe::MTE3};
    case E::MTE3_MTE2:
      return {Pipe::MTE3, Pipe::MTE2};
    case E::MTE2_MTE3:
      return {Pipe::MTE2, Pipe::MTE3};
    case E::S_V:
      return {Pipe::S, Pipe::V};
    case E::V_S:
      return {Pipe::V, Pipe::S};
    case E::S_MTE2:
      return {Pipe::S, Pipe::MTE2};
    case E::MTE2_S:
      return {Pipe::MTE2, Pipe::S};
    case E::S_MTE3:
      return {Pipe::S, Pipe::MTE3};
    case E::MTE3_S:
      return {Pipe::MTE3, Pipe::S};
    default:
      return {Pipe::S, Pipe::S};
  }
}

class Order {
 public:
  using Clock = std::array<uint32_t, kPipes>;

  void reset() {
    *this = Order();
    known_[index_of(Pipe::S)][index_of(Pipe::S)] = std::numeric_limits<uint32_t>::max();  // scalar code runs in order
  }
  // The number of a new instruction on `pipe`; the first is 1, so that 0 is before everything.
  uint32_t issue(Pipe pipe) { return ++issued_[index_of(pipe)]; }
  const Clock& known(Pipe pipe) const { return known_[index_of(pipe)]; }
  bool is_known(Pipe to, Pipe from, uint32_t number) const { return known_[index_of(to)][index_of(from)] >= number; }

  void barrier(Pipe pipe) {
    if (pipe != Pipe::S) known_[index_of(pipe)][index_of(pipe)] = issued_[index_of(pipe)];
  }
  void barrier_all() {
    for (Clock& clock : known_) join(clock, issued_);
  }
  Clock flag(Pipe from) const {
    Clock clock = known_[index_of(from)];
    clock[index_of(from)] = issued_[index_of(from)];
    return clock;
  }
  void wait(Pipe to, const Clock& clock) { join(known_[index_of(to)], clock); }

 private:
  static void join(Clock& clock, const Clock& other) {
    for (int i = 0; i < kPipes; ++i) clock[i] = std::max(clock[i], other[i]);
  }
  Clock issued_{};
  std::array<Clock, kPipes> known_{};
};

}  // namespace softnpu::ascendc

#endif  // SOFTNPU_ASCENDC_ORDER_H
