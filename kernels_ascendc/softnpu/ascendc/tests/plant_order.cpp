// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Plants of missing order: between pipes, inside a pipe, in GM, between cores, and of flags that do not balance (traps
// 9 to 11 and 16 to 19).

#include "plant.h"

namespace softnpu::ascendc::tests {
namespace {

using namespace AscendC;

template <bool kWrong>
void vector_before_dequeue(const Gm& gm) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> queue;
  GlobalTensor<float> in;
  in.SetGlobalBuffer(gm.in, Gm::kFloats);
  pipe.InitBuffer(queue, 1, 256);
  LocalTensor<float> t = queue.AllocTensor<float>();
  DataCopy(t, in, 64);
  queue.EnQue(t);
  if (!kWrong) t = queue.DeQue<float>();
  Exp(t, t, 64);  // plant: vector_before_dequeue
  if (kWrong) t = queue.DeQue<float>();
  queue.FreeTensor(t);
}

template <bool kWrong>
void copy_out_before_dequeue(const Gm& gm) {
  TPipe pipe;
  TQue<TPosition::VECOUT, 1> queue;
  GlobalTensor<float> out;
  out.SetGlobalBuffer(gm.out, Gm::kFloats);
  pipe.InitBuffer(queue, 1, 256);
  LocalTensor<float> t = queue.AllocTensor<float>();
  Duplicate(t, 1.0f, 64);
  if (!kWrong) {
    queue.EnQue(t);
    t = queue.DeQue<float>();
  }
  DataCopy(out, t, 64);  // plant: copy_out_before_dequeue
  queue.FreeTensor(t);
}

template <bool kWrong>
void copy_in_without_flag(const Gm& gm) {
  Kit kit(gm);
  DataCopy(kit.t, kit.in, 64);
  if (!kWrong) kit.order<HardEvent::MTE2_V>();
  Exp(kit.t, kit.t, 64);  // plant: copy_in_without_flag
}

// The older of two writes into one block, each of other bytes, is as unknown to MTE3 as the newer one.
template <bool kWrong>
void older_bytes_of_a_block(const Gm& gm) {
  Kit kit(gm);
  Duplicate(kit.t, 1.0f, 4);
  PipeBarrier<PIPE_V>();
  uint64_t upper[] = {0xF0};
  Duplicate(kit.t, 2.0f, upper, 1, 1, 8);
  if (!kWrong) kit.order<HardEvent::V_MTE3>();
  DataCopyPad(kit.out, kit.t, DataCopyExtParams{1, 16, 0, 0, 0});  // plant: older_bytes_of_a_block
}

template <bool kWrong>
void overwritten_while_copied_out(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  DataCopy(kit.out, kit.t, 64);
  if (!kWrong) kit.order<HardEvent::MTE3_V>();
  Duplicate(kit.t, 2.0f, 64);  // plant: overwritten_while_copied_out
}

template <bool kWrong>
void overwritten_while_read(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Exp(kit.t[512], kit.t, 64);
  if (!kWrong) kit.order<HardEvent::V_MTE2>();
  DataCopy(kit.t, kit.in, 64);  // plant: overwritten_while_read
}

template <bool kWrong>
void scalar_read_without_flag(const Gm& gm) {
  Kit kit(gm);
  Duplicate(kit.t, 1.0f, 64);
  if (!kWrong) kit.order<HardEvent::V_S>();
  (void)kit.t.GetValue(3);  // plant: scalar_read_without_flag
}

template <bool kWrong>
void scalar_write_without_flag(const Gm& gm) {
  Kit kit(gm);
  for (uint32_t i = 0; i < 64; ++i) kit.t.SetValue(i, 1.0f);
  if (!kWrong) kit.order<HardEvent::S_V>();
  Exp(kit.t, kit.t, 64);  // plant: scalar_write_without_flag
}

// A flag of two other pipes orders nothing between MTE2 and V.
template <bool kWrong>
void flag_of_other_pipes(const Gm& gm) {
  Kit kit(gm);
  DataCopy(kit.t, kit.in, 64);
  if (kWrong) {
    kit.order<HardEvent::MTE2_MTE3>();
  } else {
    kit.order<HardEvent::MTE2_MTE3>();
    kit.order<HardEvent::MTE3_V>();  // order is transitive
  }
  Exp(kit.t, kit.t, 64);  // plant: flag_of_other_pipes
}

template <bool kWrong>
void flag_set_too_early(const Gm& gm) {
  Kit kit(gm);
  SetFlag<HardEvent::MTE2_V>(0);
  DataCopy(kit.t, kit.in, 64);
  WaitFlag<HardEvent::MTE2_V>(0);
  if (!kWrong) kit.order<HardEvent::MTE2_V>();
  Exp(kit.t, kit.t, 64);  // plant: flag_set_too_early
}

template <bool kWrong>
void wait_without_set(const Gm& gm) {
  Kit kit(gm);
  if (!kWrong) SetFlag<HardEvent::MTE2_V>(0);
  WaitFlag<HardEvent::MTE2_V>(0);  // plant: wait_without_set
}

template <bool kWrong>
void set_twice(const Gm& gm) {
  Kit kit(gm);
  SetFlag<HardEvent::V_MTE3>(1);
  if (!kWrong) WaitFlag<HardEvent::V_MTE3>(1);
  SetFlag<HardEvent::V_MTE3>(1);  // plant: set_twice
  WaitFlag<HardEvent::V_MTE3>(1);
}

template <bool kWrong>
void never_waited_for(const Gm& gm) {
  Kit kit(gm);
  SetFlag<HardEvent::S_MTE3>(2);  // plant: never_waited_for
  if (!kWrong) WaitFlag<HardEvent::S_MTE3>(2);
}

template <bool kWrong>
void event_id_not_for_hand_use(const Gm& gm) {
  Kit kit(gm);
  const int32_t id = kWrong ? 6 : 5;
  SetFlag<HardEvent::V_S>(id);  // plant: event_id_not_for_hand_use
  WaitFlag<HardEvent::V_S>(id);
}

template <bool kWrong>
void read_after_write_on_v(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Exp(kit.t[512], kit.t, 64);
  if (!kWrong) PipeBarrier<PIPE_V>();
  Add(kit.t[64], kit.t[512], kit.t, 64);  // plant: read_after_write_on_v
}

template <bool kWrong>
void write_after_read_on_v(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Exp(kit.t[512], kit.t, 64);
  if (!kWrong) PipeBarrier<PIPE_V>();
  Duplicate(kit.t, 2.0f, 64);  // plant: write_after_read_on_v
}

// That it reads its own destination does not order it behind another reader.
template <bool kWrong>
void in_place_after_read_on_v(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Exp(kit.t[512], kit.t, 64);
  if (!kWrong) PipeBarrier<PIPE_V>();
  Adds(kit.t, kit.t, 1.0f, 64);  // plant: in_place_after_read_on_v
}

// The lanes before it are new, this one another write left behind without a barrier.
template <bool kWrong>
void lane_after_write_on_v(const Gm& gm) {
  Kit kit(gm);
  uint64_t third[] = {4}, lanes[] = {7};
  Duplicate(kit.t, 1.0f, third, 1, 1, 8);
  if (!kWrong) PipeBarrier<PIPE_V>();
  Duplicate(kit.t, 2.0f, lanes, 1, 1, 8);  // plant: lane_after_write_on_v
}

template <bool kWrong>
void write_after_write_on_v(const Gm& gm) {
  Kit kit(gm);
  Duplicate(kit.t, 1.0f, 64);
  if (!kWrong) PipeBarrier<PIPE_V>();
  Duplicate(kit.t[8], 2.0f, 64);  // plant: write_after_write_on_v
}

template <bool kWrong>
void barrier_of_another_pipe(const Gm& gm) {
  Kit kit(gm);
  Duplicate(kit.t, 1.0f, 64);
  if (kWrong) PipeBarrier<PIPE_MTE2>();
  if (!kWrong) PipeBarrier<PIPE_V>();
  Exp(kit.t, kit.t, 64);  // plant: barrier_of_another_pipe
}

template <bool kWrong>
void stale_scalar_read(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  DataCopy(kit.out, kit.t, 8);
  kit.order<HardEvent::MTE3_S>();
  if (!kWrong) DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(kit.out[12]);
  (void)kit.out.GetValue(12);  // plant: stale_scalar_read
}

// Cleaning the cache before the write has arrived cleans nothing.
template <bool kWrong>
void cleaned_too_early(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  DataCopy(kit.out, kit.t, 8);
  if (!kWrong) kit.order<HardEvent::MTE3_S>();
  DataCacheCleanAndInvalid<float, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(kit.out);
  if (kWrong) kit.order<HardEvent::MTE3_S>();
  (void)kit.out.GetValue(0);  // plant: cleaned_too_early
}

template <bool kWrong>
void scalar_read_of_another_core(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  if (GetBlockIdx() == 0) {
    DataCopy(kit.out, kit.t, 8);
  } else {
    (void)kit.out.GetValue(kWrong ? 12 : 16);  // plant: scalar_read_of_another_core
  }
}

template <bool kWrong>
void cores_write_the_same(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  const uint64_t from = static_cast<uint64_t>(GetBlockIdx()) * (kWrong ? 56 : 64);
  DataCopy(kit.out[from], kit.t, 64);  // plant: cores_write_the_same
}

template <bool kWrong>
void core_reads_what_another_writes(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  const uint64_t own = static_cast<uint64_t>(GetBlockIdx()) * 64;
  DataCopy(kit.t[64], kit.out[kWrong ? 0 : own], 64);  // plant: core_reads_what_another_writes
  kit.order<HardEvent::MTE2_MTE3>();
  DataCopy(kit.out[own], kit.t, 64);
}

template <bool kWrong>
void gm_read_after_write(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  DataCopy(kit.out, kit.t, 64);
  if (!kWrong) kit.order<HardEvent::MTE3_MTE2>();
  DataCopy(kit.t[512], kit.out[56], 64);  // plant: gm_read_after_write
}

template <bool kWrong>
void gm_write_after_read(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  DataCopy(kit.t[512], kit.out, 64);
  if (!kWrong) kit.order<HardEvent::MTE2_MTE3>();
  DataCopy(kit.out, kit.t, 64);  // plant: gm_write_after_read
}

template <bool kWrong>
void copies_in_overlap(const Gm& gm) {
  Kit kit(gm);
  DataCopy(kit.t, kit.in, 64);
  if (!kWrong) PipeBarrier<PIPE_MTE2>();
  DataCopy(kit.t[32], kit.in, 64);  // plant: copies_in_overlap
}

template <bool kWrong>
void copies_out_overlap(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  DataCopy(kit.out, kit.t, 64);
  if (!kWrong) PipeBarrier<PIPE_MTE3>();
  DataCopy(kit.out[32], kit.t, 64);  // plant: copies_out_overlap
}

constexpr Plant kPlants[] = {
    PLANT(vector_before_dequeue, pipe_order, 1),
    PLANT(copy_out_before_dequeue, pipe_order, 1),
    PLANT(copy_in_without_flag, pipe_order, 1),
    PLANT(older_bytes_of_a_block, pipe_order, 1),
    PLANT(overwritten_while_copied_out, pipe_order, 1),
    PLANT(overwritten_while_read, pipe_order, 1),
    PLANT(scalar_read_without_flag, pipe_order, 1),
    PLANT(scalar_write_without_flag, pipe_order, 1),
    PLANT(flag_of_other_pipes, pipe_order, 1),
    PLANT(flag_set_too_early, pipe_order, 1),
    PLANT(wait_without_set, event_balance, 1),
    PLANT(set_twice, event_balance, 1),
    PLANT(never_waited_for, event_balance, 1),
    PLANT(event_id_not_for_hand_use, event_balance, 1),
    PLANT(read_after_write_on_v, vector_order, 1),
    PLANT(write_after_read_on_v, vector_order, 1),
    PLANT(in_place_after_read_on_v, vector_order, 1),
    PLANT(lane_after_write_on_v, vector_order, 1),
    PLANT(write_after_write_on_v, vector_order, 1),
    PLANT(barrier_of_another_pipe, vector_order, 1),
    PLANT(stale_scalar_read, stale_scalar_read, 1),
    PLANT(cleaned_too_early, stale_scalar_read, 1),
    PLANT(scalar_read_of_another_core, stale_scalar_read, 2),
    PLANT(cores_write_the_same, cross_core, 2),
    PLANT(core_reads_what_another_writes, cross_core, 2),
    PLANT(gm_read_after_write, gm_order, 1),
    PLANT(gm_write_after_read, gm_order, 1),
    PLANT(copies_in_overlap, copy_order, 1),
    PLANT(copies_out_overlap, copy_order, 1),
};

}  // namespace

Plants order_plants() { return {kPlants, static_cast<int>(std::size(kPlants))}; }

}  // namespace softnpu::ascendc::tests
