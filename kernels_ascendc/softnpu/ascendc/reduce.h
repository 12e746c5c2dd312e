// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Reductions of float (asc-devkit include/basic_api/kernel_operator_vec_reduce_intf.h; names of 8.5, which 9.1 keeps).
// Sums add neighbours, then neighbours of the results, until one is left; a lane that is masked off counts as 0.
// Maxima propagate NaN, the lowest index wins, and an index is stored as the bits of a uint32.
// Units of dstRepStride: one result of a repeat (4 bytes, 8 with value and index, 32 for BlockReduce).
// Left out: Min forms, PairReduceSum, masked forms of ReduceSum and ReduceMax.
#ifndef SOFTNPU_ASCENDC_REDUCE_H
#define SOFTNPU_ASCENDC_REDUCE_H

#include "elementwise.h"

namespace AscendC {

namespace detail {

constexpr int64_t kFloatLanes = 64;

// The values of one repeat; lanes that are masked off hold `missing`.
inline void load_repeat(emu::Core& core, const emu::Side& src, const emu::Lanes& lanes, int64_t repeat, float missing,
                        float (&values)[kFloatLanes]) {
  for (int64_t first = 0; first < kFloatLanes; first += 8) {
    const uint64_t mask = lanes.run(first, 8);
    const int64_t address = src.address(repeat, first);
    if (mask == 0xFF) {
      core.read("src", address, emu::kBlock);
      std::memcpy(values + first, core.ub + address, emu::kBlock);
      continue;
    }
    for (int64_t i = 0; i < 8; ++i) {
      values[first + i] = missing;
      if (!((mask >> i) & 1)) continue;
      core.read("src", address + 4 * i, 4);
      std::memcpy(values + first + i, core.ub + address + 4 * i, 4);
    }
  }
}

inline float pair_sum(float* values, int64_t count) {
  for (; count > 1; count /= 2) {
    for (int64_t i = 0; i < count / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
  }
  return values[0];
}

struct Maximum {
  float value;
  uint32_t index;
};
inline Maximum maximum_of(const float* values, const emu::Lanes& lanes, int64_t first, int64_t count) {
  Maximum best{-std::numeric_limits<float>::infinity(), 0};
  bool any = false;
  for (int64_t i = 0; i < count; ++i) {
    if (!lanes.run(first + i, 1)) continue;
    const float value = values[first + i];
    if (!any || value > best.value || (value != value && best.value == best.value)) {
      best = {value, static_cast<uint32_t>(first + i)};
    }
    if (any && value == best.value) best.value = emu::maximum(value, best.value);
    any = true;
  }
  return best;
}

template <typename T, typename Mask>
struct Reduction {
  emu::Core& core;
  emu::Side src;
  emu::Lanes lanes;
  int64_t repeats;
  emu::Operand dst;
  int64_t step;  // bytes of dst per repeat

  Reduction(emu::Op op, const LocalTensor<T>& to, const LocalTensor<T>& from, Mask mask, int32_t repeat,
            int32_t dst_stride, int64_t unit, int32_t src_block_stride, int32_t src_repeat_stride, int64_t written,
            int64_t alignment, const emu::Where& where)
      : core(emu::core()), dst(to.operand("dst")) {
    check_float<T>();
    core.begin(op, where);
    const U16 block_stride = src_block_stride, repeat_stride = src_repeat_stride, target_stride = dst_stride;
    src = {from.operand("src"), sizeof(T), emu::stride_bytes(core, "srcBlkStride", block_stride),
           emu::stride_bytes(core, "srcRepStride", repeat_stride)};
    emu::stride_bytes(core, "dstRepStride", target_stride);
    lanes = emu::lanes_of(core, mask, kFloatLanes);
    repeats = emu::repeats_of(core, U8(repeat));
    step = target_stride * unit;
    if (repeats == 0) return;
    core.check(src.operand, 0, src.extent(repeats, lanes), emu::kBlock);
    core.check(dst, 0, (repeats - 1) * step + written, alignment);
    core.count(op, repeats, repeats * lanes.active());
  }
  // Where repeat `index` stores `bytes` bytes; its source was read by then.
  uint8_t* target(int64_t index, int64_t bytes) {
    const int64_t offset = dst.offset + index * step;
    for (int64_t later = index + 1; later < repeats; ++later) {
      for (int64_t lane = 0; lane < kFloatLanes; lane += 8) {
        const int64_t address = src.address(later, lane);
        if (address < offset + bytes && offset < address + emu::kBlock && lanes.run(lane, 8) != 0) {
          core.fail(emu::Trap::operand_overlap, "repeat %lld writes what src of repeat %lld reads",
                    static_cast<long long>(index), static_cast<long long>(later));
        }
      }
    }
    core.write("dst", offset, bytes);
    return core.ub + offset;
  }
};

template <typename T, typename Mask>
void whole_sum(const LocalTensor<T>& dst, const LocalTensor<T>& src, Mask mask, int32_t repeat, int32_t dst_stride,
               int32_t block_stride, int32_t repeat_stride, const emu::Where& where) {
  Reduction<T, Mask> reduction(emu::Op::WholeReduceSum, dst, src, mask, repeat, dst_stride, 4, block_stride,
                               repeat_stride, 4, 4, where);
  float values[kFloatLanes];
  for (int64_t r = 0; r < reduction.repeats; ++r) {
    load_repeat(reduction.core, reduction.src, reduction.lanes, r, 0.0f, values);
    const float sum = pair_sum(values, kFloatLanes);
    std::memcpy(reduction.target(r, 4), &sum, 4);
  }
}

template <typename T, typename Mask>
void whole_max(const LocalTensor<T>& dst, const LocalTensor<T>& src, Mask mask, int32_t repeat, int32_t dst_stride,
               int32_t block_stride, int32_t repeat_stride, ReduceOrder order, const emu::Where& where) {
  const bool both = order == ReduceOrder::ORDER_VALUE_INDEX || order == ReduceOrder::ORDER_INDEX_VALUE;
  const int64_t unit = both ? 8 : 4;
  Reduction<T, Mask> reduction(emu::Op::WholeReduceMax, dst, src, mask, repeat, dst_stride, unit, block_stride,
                               repeat_stride, unit, 8, where);
  float values[kFloatLanes];
  for (int64_t r = 0; r < reduction.repeats; ++r) {
    load_repeat(reduction.core, reduction.src, reduction.lanes, r, 0.0f, values);
    const Maximum best = maximum_of(values, reduction.lanes, 0, kFloatLanes);
    uint8_t* to = reduction.target(r, unit);
    const bool value_first = order == ReduceOrder::ORDER_VALUE_INDEX || order == ReduceOrder::ORDER_ONLY_VALUE;
    std::memcpy(to, value_first ? static_cast<const void*>(&best.value) : &best.index, 4);
    if (both) std::memcpy(to + 4, value_first ? static_cast<const void*>(&best.index) : &best.value, 4);
  }
}

template <typename T, typename Mask>
void block_reduce(emu::Op op, const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t repeat, Mask mask,
                  int32_t dst_stride, int32_t block_stride, int32_t repeat_stride, const emu::Where& where) {
  Reduction<T, Mask> reduction(op, dst, src, mask, repeat, dst_stride, emu::kBlock, block_stride, repeat_stride,
                               emu::kBlock, emu::kBlock, where);
  float values[kFloatLanes], results[8];
  for (int64_t r = 0; r < reduction.repeats; ++r) {
    load_repeat(reduction.core, reduction.src, reduction.lanes, r, 0.0f, values);
    for (int64_t block = 0; block < 8; ++block) {
      results[block] = op == emu::Op::BlockReduceSum ? pair_sum(values + 8 * block, 8)
                                                     : maximum_of(values, reduction.lanes, 8 * block, 8).value;
    }
    std::memcpy(reduction.target(r, emu::kBlock), results, emu::kBlock);
    for (int64_t block = 0; block < 8;
         ++block) {  // what the device stores for a block without a lane is not documented
      if (reduction.lanes.run(8 * block, 8) == 0) {
        reduction.core.forget(reduction.dst.offset + r * reduction.step + 4 * block, 4);
      }
    }
  }
}

// The source of a reduction over `count` elements, with the space it works in checked and left undefined.
template <typename T>
const float* begin_reduction(emu::Op op, const LocalTensor<T>& src, const LocalTensor<T>& tmp, int32_t count,
                             const emu::Where& where) {
  check_float<T>();
  emu::Core& core = emu::core();
  core.begin(op, where);
  if (count < 1) core.fail(emu::Trap::vector_params, "count %d, expected 1 or more", count);
  const uint8_t* values = core.source(src.operand("src"), count * int64_t{4});
  const emu::Operand work = tmp.operand("sharedTmpBuffer");
  const emu::Operand from = src.operand("src");
  const int64_t needed = round_up_repeats<T>(count) * (op == emu::Op::ReduceMax ? 8 : 4);
  const int64_t bytes = (needed + emu::kBlock - 1) / emu::kBlock * emu::kBlock;
  if (work.offset != from.offset && work.offset < from.offset + count * 4 && from.offset < work.offset + bytes) {
    core.fail(emu::Trap::operand_overlap, "sharedTmpBuffer and src overlap in part");
  }
  core.destination(work, bytes);
  core.count(op, round_up_repeats<T>(count), count);
  return reinterpret_cast<const float*>(values);
}

}  // namespace detail

template <typename T, bool isSetMask = true>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                           const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                           const int32_t srcRepStride, emu::Where where = emu::Where::current()) {
  detail::whole_sum(dst, src, static_cast<int64_t>(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride, where);
}
template <typename T, bool isSetMask = true>
inline void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[],
                           const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                           const int32_t srcRepStride, emu::Where where = emu::Where::current()) {
  detail::whole_sum(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, where);
}
template <typename T, bool isSetMask = true>
inline void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask,
                           const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                           const int32_t srcRepStride, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX,
                           emu::Where where = emu::Where::current()) {
  detail::whole_max(dst, src, static_cast<int64_t>(mask), repeatTime, dstRepStride, srcBlkStride, srcRepStride, order,
                    where);
}
template <typename T, bool isSetMask = true>
inline void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[],
                           const int32_t repeatTime, const int32_t dstRepStride, const int32_t srcBlkStride,
                           const int32_t srcRepStride, ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX,
                           emu::Where where = emu::Where::current()) {
  detail::whole_max(dst, src, mask, repeatTime, dstRepStride, srcBlkStride, srcRepStride, order, where);
}

#define SOFTNPU_BLOCK_REDUCE(NAME)                                                                                     \
  template <typename T, bool isSetMask = true>                                                                         \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime, const int32_t mask, \
                   const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,                 \
                   emu::Where where = emu::Where::current()) {                                                         \
    detail::block_reduce(emu::Op::NAME, dst, src, repeatTime, static_cast<int64_t>(mask), dstRepStride, srcBlkStride,  \
                         srcRepStride, where);                                                                         \
  }                                                                                                                    \
  template <typename T, bool isSetMask = true>                                                                         \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeatTime,                     \
                   const uint64_t mask[], const int32_t dstRepStride, const int32_t srcBlkStride,                      \
                   const int32_t srcRepStride, emu::Where where = emu::Where::current()) {                             \
    detail::block_reduce(emu::Op::NAME, dst, src, repeatTime, mask, dstRepStride, srcBlkStride, srcRepStride, where);  \
  }
SOFTNPU_BLOCK_REDUCE(BlockReduceSum)
SOFTNPU_BLOCK_REDUCE(BlockReduceMax)
#undef SOFTNPU_BLOCK_REDUCE

// Each repeat as WholeReduceSum, the repeats one after another.
template <typename T, bool isSetMask = true>
inline void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
                      const int32_t count, emu::Where where = emu::Where::current()) {
  const float* values = detail::begin_reduction(emu::Op::ReduceSum, src, sharedTmpBuffer, count, where);
  float total = 0.0f, repeat[detail::kFloatLanes];
  for (int32_t first = 0; first < count; first += detail::kFloatLanes) {
    for (int32_t i = 0; i < detail::kFloatLanes; ++i) repeat[i] = first + i < count ? values[first + i] : 0.0f;
    const float sum = detail::pair_sum(repeat, detail::kFloatLanes);
    total = first == 0 ? sum : total + sum;
  }
  std::memcpy(emu::core().destination(dst.operand("dst"), 4, 4), &total, 4);
}
// dst[0] is the maximum; with calIndex dst[1] holds the bits of its index.
template <typename T>
inline void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
                      const int32_t count, bool calIndex = false, emu::Where where = emu::Where::current()) {
  const float* values = detail::begin_reduction(emu::Op::ReduceMax, src, sharedTmpBuffer, count, where);
  detail::Maximum best{values[0], 0};
  for (int32_t i = 1; i < count; ++i) {
    if (values[i] > best.value || (values[i] != values[i] && best.value == best.value)) {
      best = {values[i], static_cast<uint32_t>(i)};
    } else if (values[i] == best.value) {
      best.value = emu::maximum(values[i], best.value);
    }
  }
  uint8_t* to = emu::core().destination(dst.operand("dst"), calIndex ? 8 : 4, 4);
  std::memcpy(to, &best.value, 4);
  if (calIndex) std::memcpy(to + 4, &best.index, 4);
}

}  // namespace AscendC

#endif  // SOFTNPU_ASCENDC_REDUCE_H
