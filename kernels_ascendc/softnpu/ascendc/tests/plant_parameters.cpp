// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Plants of rules about what an instruction is given: sizes, alignment, ranges, overlap, round modes (traps 1 to 6, 12
// to 15, 20) and what a launcher registered.

#include "plant.h"

namespace softnpu::ascendc::tests {
namespace {

using namespace AscendC;

template <bool kWrong>
void ub_budget(const Gm&) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, 188160 + (kWrong ? 1 : 0));  // plant: ub_budget
}

template <bool kWrong>
void ub_budget_is_rounded_up(const Gm&) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> first, second;
  pipe.InitBuffer(first, kWrong ? 1 : 32);
  pipe.InitBuffer(second, 188160 - (kWrong ? 1 : 32));  // plant: ub_budget_is_rounded_up
}

template <bool kWrong>
void empty_buffer(const Gm&) {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer;
  pipe.InitBuffer(buffer, kWrong ? 0 : 1);  // plant: empty_buffer
}

template <bool kWrong>
void too_many_buffers(const Gm&) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> many;
  TBuf<TPosition::VECCALC> one;
  pipe.InitBuffer(many, 63, 32);
  pipe.InitBuffer(one, 32);
  TBuf<TPosition::VECCALC> another;
  if (kWrong) pipe.InitBuffer(another, 32);  // plant: too_many_buffers
}

template <bool kWrong>
void second_pipe(const Gm&) {
  TPipe pipe;
  if (kWrong) TPipe another;  // plant: second_pipe
}

template <bool kWrong>
void misaligned_operand(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Add(kit.t[512], kit.t, kit.t[kWrong ? 4 : 8], 64);  // plant: misaligned_operand
}

template <bool kWrong>
void misaligned_pair(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  WholeReduceMax<float>(kit.t[kWrong ? 513 : 514], kit.t, 64, 1, 1, 1, 8);  // plant: misaligned_pair
}

template <bool kWrong>
void past_the_tensor(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Exp(kit.t[960], kit.t[960], kWrong ? 65 : 64);  // plant: past_the_tensor
}

template <bool kWrong>
void past_a_part_of_a_buffer(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  LocalTensor<float> part = kit.buffer.Get<float>(64);
  Exp(part, part, kWrong ? 65 : 64);  // plant: past_a_part_of_a_buffer
}

template <bool kWrong>
void past_the_tensor_in_repeats(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Sqrt(kit.t, kit.t, 64, 16, {1, 1, 8, static_cast<uint8_t>(kWrong ? 9 : 8)});  // plant: past_the_tensor_in_repeats
}

template <bool kWrong>
void gather_outside(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  LocalTensor<uint32_t> index = kit.t[512].ReinterpretCast<uint32_t>();
  Duplicate(index, static_cast<uint32_t>(kWrong ? 256 : 252), 8);
  PipeBarrier<PIPE_V>();
  LocalTensor<float> source = kit.buffer.Get<float>(64);
  Gather(kit.t[768], source, index, 0, 8);  // plant: gather_outside
}

template <bool kWrong>
void tensor_without_memory(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  LocalTensor<float> nothing;
  Abs(kit.t, kWrong ? nothing : kit.t, 64);  // plant: tensor_without_memory
}

template <bool kWrong>
void truncated_copy(const Gm& gm) {
  Kit kit(gm);
  DataCopy(kit.t, kit.in, kWrong ? 12 : 16);  // plant: truncated_copy
}

template <bool kWrong>
void truncated_copy_out(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  DataCopy(kit.out, kit.t, kWrong ? 12 : 16);  // plant: truncated_copy_out
}

template <bool kWrong>
void long_block(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  const uint32_t bytes = kWrong ? 2097152 : 20;
  DataCopyPad(kit.out, kit.t, DataCopyExtParams{1, bytes, 0, 0, 0});  // plant: long_block
}

template <bool kWrong>
void part_of_an_element(const Gm& gm) {
  Kit kit(gm);
  const DataCopyExtParams copy(1, kWrong ? 6 : 8, 0, 0, 0);
  const DataCopyPadExtParams<float> pad;
  DataCopyPad(kit.t, kit.in, copy, pad);  // plant: part_of_an_element
}

template <bool kWrong>
void wide_padding(const Gm& gm) {
  Kit kit(gm);
  const uint8_t left = kWrong ? 9 : 8;
  DataCopyPadExtParams<float> pad{true, left, 0, 0.0f};
  DataCopyPad(kit.t, kit.in, DataCopyExtParams{1, 32, 0, 0, 0}, pad);  // plant: wide_padding
}

template <bool kWrong>
void too_many_blocks(const Gm& gm) {
  Kit kit(gm);
  const uint16_t blocks = kWrong ? 4096 : 4;
  DataCopy(kit.t, kit.in, DataCopyParams{blocks, 1, 0, 0});  // plant: too_many_blocks
}

template <bool kWrong>
void length_that_wraps(const Gm& gm) {
  Kit kit(gm);
  const int length = kWrong ? 65536 + 2 : 2;
  const DataCopyParams params(1, length, 0, 0);
  DataCopy(kit.t, kit.in, params);  // plant: length_that_wraps
}

template <bool kWrong>
void repeat_that_wraps(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  const int repeats = kWrong ? 257 : 1;
  Add(kit.t, kit.t, kit.t, 64, repeats, {1, 1, 1, 8, 8, 8});  // plant: repeat_that_wraps
}

template <bool kWrong>
void gather_that_wraps(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  LocalTensor<uint32_t> index = kit.t[512].ReinterpretCast<uint32_t>();
  Duplicate(index, 0u, 64);
  PipeBarrier<PIPE_V>();
  Gather(kit.t[768], kit.t, index, 0, kWrong ? 16384 : 64);  // plant: gather_that_wraps
}

template <bool kWrong>
void wide_mask(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Adds(kit.t, kit.t, 1.0f, kWrong ? 65 : 64, 1, {1, 1, 8, 8});  // plant: wide_mask
}

template <bool kWrong>
void stride_that_wraps(const Gm& gm) {
  Kit kit(gm, 16384);
  kit.fill();
  const int stride = kWrong ? 256 : 255;  // a row of 2048 floats is 256 blocks
  const BinaryRepeatParams params(1, 1, 1, stride, stride, stride);
  Mul(kit.t, kit.t, kit.t, 64, 2, params);  // plant: stride_that_wraps
}

template <bool kWrong>
void destination_block_stride_0(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  const uint8_t stride = kWrong ? 0 : 1;
  Div(kit.t[512], kit.t, kit.t, 64, 1, {stride, 1, 0, 8, 8, 8});  // plant: destination_block_stride_0
}

template <bool kWrong>
void partial_overlap(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Add(kit.t[kWrong ? 32 : 64], kit.t, kit.t, 64);  // plant: partial_overlap
}

template <bool kWrong>
void repeat_feeds_a_later_one(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Adds(kit.t[kWrong ? 64 : 0], kit.t, 1.0f, 64, 4, {1, 1, 8, 8});  // plant: repeat_feeds_a_later_one
}

template <bool kWrong>
void accumulation_of_the_wrong_operand(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  if (kWrong) {
    Add(kit.t, kit.t, kit.t[64], 64, 4, {1, 1, 1, 0, 0, 8});  // plant: accumulation_of_the_wrong_operand
  } else {
    Add(kit.t, kit.t[64], kit.t, 64, 4, {1, 1, 1, 0, 8, 0});
  }
}

template <bool kWrong>
void gather_from_the_midst_of_a_block(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  LocalTensor<uint32_t> index = kit.t[512].ReinterpretCast<uint32_t>();
  Duplicate(index, 0u, 8);
  PipeBarrier<PIPE_V>();
  Gather(kit.t[768], kit.t[kWrong ? 4 : 8], index, 0, 8);  // plant: gather_from_the_midst_of_a_block
}

template <bool kWrong>
void gather_in_place(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  LocalTensor<uint32_t> index = kit.t[512].ReinterpretCast<uint32_t>();
  Duplicate(index, 0u, 8);
  PipeBarrier<PIPE_V>();
  Gather(kit.t[kWrong ? 0 : 64], kit.t, index, 0, 8);  // plant: gather_in_place
}

template <bool kWrong>
void brcb_in_place(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  Brcb(kit.t[kWrong ? 0 : 64], kit.t, 1, {1, 8});  // plant: brcb_in_place
}

template <bool kWrong>
void cast_to_bf16_without_rounding(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  LocalTensor<bfloat16_t> to = kit.t[512].ReinterpretCast<bfloat16_t>();
  const RoundMode mode = kWrong ? RoundMode::CAST_NONE : RoundMode::CAST_RINT;
  Cast(to, kit.t, mode, 64);  // plant: cast_to_bf16_without_rounding
}

template <bool kWrong>
void cast_from_bf16_with_rounding(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  LocalTensor<bfloat16_t> from = kit.t[512].ReinterpretCast<bfloat16_t>();
  const RoundMode mode = kWrong ? RoundMode::CAST_RINT : RoundMode::CAST_NONE;
  Cast(kit.t, from, mode, 64);  // plant: cast_from_bf16_with_rounding
}

template <bool kWrong>
void scalar_gm_write(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  if (kWrong) {
    kit.out.SetValue(0, 1.0f);  // plant: scalar_gm_write
  } else {
    DataCopyPad(kit.out, kit.t, DataCopyExtParams{1, 4, 0, 0, 0});
  }
}

template <bool kWrong>
void atomics(const Gm& gm) {
  Kit kit(gm);
  if (kWrong) SetAtomicAdd<float>();  // plant: atomics
  SetAtomicNone();
}

template <bool kWrong>
void gm_out_of_bounds(const Gm& gm) {
  Kit kit(gm);
  GlobalTensor<float> unsized;
  unsized.SetGlobalBuffer(gm.in);
  DataCopy(kit.t, unsized[Gm::kFloats - (kWrong ? 8 : 16)], 16);  // plant: gm_out_of_bounds
}

template <bool kWrong>
void gm_before_the_start(const Gm& gm) {
  Kit kit(gm);
  GlobalTensor<float> unsized;
  unsized.SetGlobalBuffer(gm.in);
  const int64_t row = kWrong ? -1 : 0;                             // a negative row wraps, as on the device
  DataCopy(kit.t, unsized[static_cast<uint64_t>(row * 512)], 16);  // plant: gm_before_the_start
}

template <bool kWrong>
void gm_end_wraps(const Gm& gm) {
  Kit kit(gm);
  GlobalTensor<float> unsized;
  unsized.SetGlobalBuffer(gm.in);
  const uint64_t to_the_end = (uint64_t{0} - reinterpret_cast<uint64_t>(gm.in)) / sizeof(float);
  DataCopy(kit.t, unsized[kWrong ? to_the_end - 8 : 0], 16);  // plant: gm_end_wraps
}

template <bool kWrong>
void before_the_gm_tensor(const Gm& gm) {
  Kit kit(gm);
  GlobalTensor<float> sized;
  sized.SetGlobalBuffer(gm.in + 64, 64);
  DataCopy(kit.t, sized[static_cast<uint64_t>(kWrong ? -16 : 0)], 16);  // plant: before_the_gm_tensor
}

template <bool kWrong>
void past_the_gm_tensor(const Gm& gm) {
  Kit kit(gm);
  GlobalTensor<float> sized;
  sized.SetGlobalBuffer(gm.in, 64);
  DataCopy(kit.t, sized[kWrong ? 56 : 48], 16);  // plant: past_the_gm_tensor
}

template <bool kWrong>
void write_to_an_input(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  DataCopy(kWrong ? kit.in : kit.out, kit.t, 16);  // plant: write_to_an_input
}

template <bool kWrong>
void read_of_an_output(const Gm& gm) {
  Kit kit(gm);
  DataCopy(kit.t, kWrong ? kit.sink : kit.in, 16);  // plant: read_of_an_output
}

constexpr Plant kPlants[] = {
    PLANT(ub_budget, ub_budget, 1),
    PLANT(ub_budget_is_rounded_up, ub_budget, 1),
    PLANT(empty_buffer, ub_budget, 1),
    PLANT(too_many_buffers, ub_budget, 1),
    PLANT(second_pipe, ub_budget, 1),
    PLANT(misaligned_operand, alignment, 1),
    PLANT(misaligned_pair, alignment, 1),
    PLANT(past_the_tensor, extent, 1),
    PLANT(past_a_part_of_a_buffer, extent, 1),
    PLANT(past_the_tensor_in_repeats, extent, 1),
    PLANT(gather_outside, extent, 1),
    PLANT(gather_from_the_midst_of_a_block, alignment, 1),
    PLANT(tensor_without_memory, extent, 1),
    PLANT(past_the_gm_tensor, extent, 1),
    PLANT(before_the_gm_tensor, extent, 1),
    PLANT(truncated_copy, truncated_copy, 1),
    PLANT(truncated_copy_out, truncated_copy, 1),
    PLANT(long_block, pad_copy, 1),
    PLANT(part_of_an_element, pad_copy, 1),
    PLANT(wide_padding, pad_copy, 1),
    PLANT(too_many_blocks, copy_params, 1),
    PLANT(length_that_wraps, copy_params, 1),
    PLANT(repeat_that_wraps, vector_params, 1),
    PLANT(gather_that_wraps, vector_params, 1),
    PLANT(wide_mask, vector_params, 1),
    PLANT(stride_that_wraps, vector_params, 1),
    PLANT(destination_block_stride_0, vector_params, 1),
    PLANT(partial_overlap, operand_overlap, 1),
    PLANT(repeat_feeds_a_later_one, operand_overlap, 1),
    PLANT(accumulation_of_the_wrong_operand, operand_overlap, 1),
    PLANT(gather_in_place, operand_overlap, 1),
    PLANT(brcb_in_place, operand_overlap, 1),
    PLANT(cast_to_bf16_without_rounding, types, 1),
    PLANT(cast_from_bf16_with_rounding, types, 1),
    PLANT(scalar_gm_write, scalar_gm_write, 1),
    PLANT(atomics, atomics, 1),
    PLANT(gm_out_of_bounds, gm_bounds, 1),
    PLANT(gm_before_the_start, gm_bounds, 1),
    PLANT(gm_end_wraps, gm_bounds, 1),
    PLANT(write_to_an_input, gm_access, 1),
    PLANT(read_of_an_output, gm_access, 1),
};

}  // namespace

Plants parameter_plants() { return {kPlants, static_cast<int>(std::size(kPlants))}; }

}  // namespace softnpu::ascendc::tests
