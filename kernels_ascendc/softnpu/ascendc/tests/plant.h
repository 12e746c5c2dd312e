// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// A plant: a kernel of a few lines that breaks one rule of the device, and its twin that does not. The line that breaks
// it carries a comment `plant: NAME`, which the test looks up to compare it with the line that was reported.
#ifndef SOFTNPU_ASCENDC_TESTS_PLANT_H
#define SOFTNPU_ASCENDC_TESTS_PLANT_H

#include "kernel_operator.h"
#include "launch.h"

namespace softnpu::ascendc::tests {

// GM of every plant: `in` may be read, `out` read and written, `sink` only written.
struct Gm {
  static constexpr int64_t kFloats = 4096;
  float *in, *out, *sink;
};

struct Plant {
  const char* name;
  Trap trap;
  int64_t blocks;
  void (*wrong)(const Gm&);
  void (*right)(const Gm&);
  const char* file;
};

// What most plants begin with: a pipe, and `floats` floats of a TBuf.
struct Kit {
  AscendC::TPipe pipe;
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer;
  AscendC::LocalTensor<float> t;
  AscendC::GlobalTensor<float> in, out, sink;

  explicit Kit(const Gm& gm, uint32_t floats = 1024) {
    pipe.InitBuffer(buffer, floats * 4);
    t = buffer.Get<float>();
    in.SetGlobalBuffer(gm.in, Gm::kFloats);
    out.SetGlobalBuffer(gm.out, Gm::kFloats);
    sink.SetGlobalBuffer(gm.sink, Gm::kFloats);
  }
  template <AscendC::HardEvent event>
  void order() {
    const int32_t id = pipe.FetchEventID(event);
    AscendC::SetFlag<event>(id);
    AscendC::WaitFlag<event>(id);
  }
  // The whole buffer holds values, and every pipe may go on.
  void fill() {
    AscendC::Duplicate(t, 1.0f, static_cast<int32_t>(t.GetSize()));
    AscendC::PipeBarrier<PIPE_ALL>();
  }
};

struct Plants {
  const Plant* plants;
  int count;
};
Plants parameter_plants();
Plants queue_plants();
Plants order_plants();

}  // namespace softnpu::ascendc::tests

#define PLANT(NAME, TRAP, BLOCKS) {#NAME, Trap::TRAP, BLOCKS, NAME<true>, NAME<false>, __FILE__}

#endif  // SOFTNPU_ASCENDC_TESTS_PLANT_H
