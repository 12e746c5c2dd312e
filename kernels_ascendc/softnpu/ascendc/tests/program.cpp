// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// A kernel that is given as data: accesses of the four pipes to a few blocks of UB and GM, with flags and barriers
// between them. The tests make random ones and know from a graph of them which access is the first that nothing orders.

#include <array>

#include "plant.h"

namespace softnpu::ascendc::tests {
namespace {

using namespace AscendC;

constexpr HardEvent kEventsOfTests[] = {HardEvent::MTE2_V, HardEvent::V_MTE2,    HardEvent::MTE3_V,
                                        HardEvent::V_MTE3, HardEvent::MTE3_MTE2, HardEvent::MTE2_MTE3,
                                        HardEvent::S_V,    HardEvent::V_S,       HardEvent::S_MTE2,
                                        HardEvent::MTE2_S, HardEvent::S_MTE3,    HardEvent::MTE3_S};

template <size_t index = 0>
void flag(size_t event, bool set) {
  if constexpr (index < std::size(kEventsOfTests)) {
    if (event != index) return flag<index + 1>(event, set);
    set ? SetFlag<kEventsOfTests[index]>(0) : WaitFlag<kEventsOfTests[index]>(0);
  }
}

enum Step : int32_t { kVector, kCopyIn, kCopyOut, kGetValue, kSetValue, kSet, kWait, kBarrier };

void step(Kit& kit, const int32_t* code, int32_t number) {
  const auto block = [&](int32_t index) { return kit.t[static_cast<uint32_t>(index) * 8]; };
  switch (code[0]) {
    case kVector:
      return Adds(block(code[2]), block(code[1]), 1.0f, 8);
    case kCopyIn:
      return DataCopy(block(code[1]), code[2] < 0 ? kit.in : kit.out[static_cast<uint64_t>(code[2]) * 8], 8);
    case kCopyOut:
      return DataCopy(
          code[2] < 0 ? kit.sink[static_cast<uint64_t>(number) * 8] : kit.out[static_cast<uint64_t>(code[2]) * 8],
          block(code[1]), 8);
    case kGetValue:
      return static_cast<void>(block(code[1]).GetValue(0));
    case kSetValue:
      return block(code[1]).SetValue(0, 1.0f);
    case kSet:
      return flag(static_cast<size_t>(code[1]), true);
    case kWait:
      return flag(static_cast<size_t>(code[1]), false);
    default:
      break;
  }
  switch (code[1]) {
    case 0:
      return PipeBarrier<PIPE_S>();
    case 1:
      return PipeBarrier<PIPE_V>();
    case 2:
      return PipeBarrier<PIPE_MTE2>();
    case 3:
      return PipeBarrier<PIPE_MTE3>();
    default:
      return PipeBarrier<PIPE_ALL>();
  }
}

}  // namespace
}  // namespace softnpu::ascendc::tests

// steps: 3 numbers each, as `Step` says. The index of the step that ended the launch, or `count`; trap: why, or 0.
extern "C" __attribute__((visibility("default"))) int32_t ascendc_program(const int32_t* steps, int32_t count,
                                                                          int32_t* trap) {
  using namespace softnpu::ascendc;
  alignas(512) static thread_local std::array<std::array<float, tests::Gm::kFloats>, 3> memory;
  const tests::Gm gm{memory[0].data(), memory[1].data(), memory[2].data()};
  Launch launch(1);
  launch.gm(gm.in, sizeof(memory[0]), Access::read, "in");
  launch.gm(gm.out, sizeof(memory[1]), Access::read_write, "out");
  launch.gm(gm.sink, sizeof(memory[2]), Access::write, "sink");
  int32_t at = 0;
  *trap = 0;
  try {
    launch.run([&] {
      tests::Kit kit(gm);
      kit.fill();
      for (at = 0; at < count; ++at) tests::step(kit, steps + 3 * at, at);
    });
  } catch (const Misuse& misuse) {
    *trap = misuse.number();
  }
  return at;
}
