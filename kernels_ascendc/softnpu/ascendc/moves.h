// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Vector operations that move values without arithmetic: Duplicate, Brcb, Gather, Copy, CreateVecIndex (asc-devkit
// include/basic_api/kernel_operator_{vec_duplicate,vec_brcb,vec_gather,data_copy,vec_createvecindex}_intf.h).
// For 2- and 4-byte elements. Left out: Gatherb, GatherMask, Scatter, Transpose.
#ifndef SOFTNPU_ASCENDC_MOVES_H
#define SOFTNPU_ASCENDC_MOVES_H

#include "elementwise.h"

namespace AscendC {

namespace detail {

template <typename T>
constexpr void check_move() {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "emulated for elements of 2 and 4 bytes");
}

template <typename T, typename Mask>
void duplicate(const LocalTensor<T>& dst, const T& value, Mask mask, const U8& repeat, const U16& block_stride,
               const U8& repeat_stride, const emu::Where& where) {
  check_move<T>();
  emu::Core& core = emu::core();
  core.begin(emu::Op::Duplicate, where);
  const emu::Side to{dst.operand("dst"), sizeof(T), emu::stride_bytes(core, "dstBlockStride", block_stride, false),
                     emu::stride_bytes(core, "dstRepeatStride", repeat_stride)};
  const emu::Lanes lanes = emu::lanes_of(core, mask, emu::kRepeatBytes / static_cast<int64_t>(sizeof(T)));
  const int64_t repeats = emu::repeats_of(core, repeat);
  if (repeats == 0) return;
  core.check(to.operand, 0, to.extent(repeats, lanes), emu::kBlock);
  for (int64_t r = 0; r < repeats; ++r) {
    for (int64_t lane = 0; lane < lanes.count; ++lane) {
      if (!lanes.run(lane, 1)) continue;
      core.write("dst", to.address(r, lane), sizeof(T));
      std::memcpy(core.ub + to.address(r, lane), &value, sizeof(T));
    }
  }
  core.count(emu::Op::Duplicate, repeats, repeats * lanes.active());
}

template <typename T, typename Mask>
void copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, Mask mask, const U8& repeat, const CopyRepeatParams& p,
          const emu::Where& where) {
  check_move<T>();
  emu::Core& core = emu::core();
  core.begin(emu::Op::Copy, where);
  const emu::Side to{dst.operand("dst"), sizeof(T), emu::stride_bytes(core, "dstStride", p.dstStride, false),
                     emu::stride_bytes(core, "dstRepeatSize", p.dstRepeatSize)};
  const emu::Side from[] = {{src.operand("src"), sizeof(T), emu::stride_bytes(core, "srcStride", p.srcStride),
                             emu::stride_bytes(core, "srcRepeatSize", p.srcRepeatSize)}};
  emu::walk_repeats(core, emu::Op::Copy, to, from,
                    emu::lanes_of(core, mask, emu::kRepeatBytes / static_cast<int64_t>(sizeof(T))),
                    emu::repeats_of(core, repeat), false, [](uint8_t* d, const uint8_t* const* s, int64_t count) {
                      std::memmove(d, s[0], static_cast<size_t>(count) * sizeof(T));
                    });
}

}  // namespace detail

template <typename T>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count,
                      emu::Where where = emu::Where::current()) {
  detail::check_move<T>();
  emu::Core& core = emu::core();
  core.begin(emu::Op::Duplicate, where);
  if (count < 0) core.fail(emu::Trap::vector_params, "count %d", count);
  if (count == 0) return;
  T* d = reinterpret_cast<T*>(core.destination(dst.operand("dst"), count * static_cast<int64_t>(sizeof(T))));
  std::fill(d, d + count, scalarValue);
  core.count(emu::Op::Duplicate, detail::round_up_repeats<T>(count), count);
}
template <typename T, bool isSetMask = true>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask, const U8 repeatTime,
                      const U16 dstBlockStride, const U8 dstRepeatStride, emu::Where where = emu::Where::current()) {
  detail::duplicate(dst, scalarValue, static_cast<int64_t>(mask), repeatTime, dstBlockStride, dstRepeatStride, where);
}
template <typename T, bool isSetMask = true>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, uint64_t mask[], const U8 repeatTime,
                      const U16 dstBlockStride, const U8 dstRepeatStride, emu::Where where = emu::Where::current()) {
  detail::duplicate(dst, scalarValue, static_cast<const uint64_t*>(mask), repeatTime, dstBlockStride, dstRepeatStride,
                    where);
}

// 8 elements of src per repeat, each filling one block of dst.
template <typename T>
inline void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const U8 repeatTime,
                 const BrcbRepeatParams& repeatParams, emu::Where where = emu::Where::current()) {
  detail::check_move<T>();
  emu::Core& core = emu::core();
  core.begin(emu::Op::Brcb, where);
  const int64_t repeats = emu::repeats_of(core, repeatTime);
  const int64_t block_stride = emu::stride_bytes(core, "dstBlkStride", repeatParams.dstBlkStride, false);
  const int64_t repeat_stride = emu::stride_bytes(core, "dstRepStride", repeatParams.dstRepStride);
  if (repeats == 0) return;
  const emu::Operand target = dst.operand("dst"), source = src0.operand("src0");
  const int64_t read = repeats * 8 * static_cast<int64_t>(sizeof(T));
  const int64_t written = (repeats - 1) * repeat_stride + 7 * block_stride + emu::kBlock;
  core.check(target, 0, written, emu::kBlock);
  if (target.offset < source.offset + read && source.offset < target.offset + written) {
    core.fail(emu::Trap::operand_overlap, "dst and src0 overlap");
  }
  const uint8_t* elements = core.source(source, read);
  for (int64_t i = 0; i < repeats * 8; ++i) {
    const int64_t to = target.offset + i / 8 * repeat_stride + i % 8 * block_stride;
    core.write("dst", to, emu::kBlock);
    for (int64_t at = 0; at < emu::kBlock; at += static_cast<int64_t>(sizeof(T))) {
      std::memcpy(core.ub + to + at, elements + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    }
  }
  core.count(emu::Op::Brcb, repeats, repeats * 8 * (emu::kBlock / static_cast<int64_t>(sizeof(T))));
}

// dst[i] = the element at byte srcOffset[i] + srcBaseAddr of src.
template <typename T>
inline void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
                   const uint32_t srcBaseAddr, const uint32_t count, emu::Where where = emu::Where::current()) {
  detail::check_move<T>();
  emu::Core& core = emu::core();
  core.begin(emu::Op::Gather, where);
  if (count == 0) return;
  const auto size = static_cast<int64_t>(sizeof(T));
  if (const int64_t repeats = count * size / emu::kRepeatBytes;
      repeats > 255) {  // the device's own loop counts in 8 bits
    core.fail(emu::Trap::vector_params, "count %u is %lld repeats, expected at most 255", count,
              static_cast<long long>(repeats));
  }
  const emu::Operand target = dst.operand("dst"), source = src.operand("src");
  const int64_t written = count * size;
  core.check(source, 0, size, emu::kBlock);
  const auto* offsets = reinterpret_cast<const uint32_t*>(core.source(srcOffset.operand("srcOffset"), count * 4));
  for (uint32_t i = 0; i < count; ++i) {
    const int64_t at = static_cast<int64_t>(offsets[i]) + srcBaseAddr;
    core.check(source, at, size, size);
    core.read("src", source.offset + at, size);
    if (target.offset <= source.offset + at && source.offset + at < target.offset + written) {
      core.fail(emu::Trap::operand_overlap, "dst covers element %u of src", i);
    }
  }
  const emu::Operand index = srcOffset.operand("srcOffset");
  if (target.offset < index.offset + count * 4 && index.offset < target.offset + written) {
    core.fail(emu::Trap::operand_overlap, "dst and srcOffset overlap");
  }
  uint8_t* to = core.destination(target, written);
  for (uint32_t i = 0; i < count; ++i) {
    std::memcpy(to + i * size, core.ub + source.offset + offsets[i] + srcBaseAddr, sizeof(T));
  }
  core.count(emu::Op::Gather, detail::round_up_repeats<T>(count), count);
}

template <typename T, bool isSetMask = true>
inline void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask, const U8 repeatTime,
                 const CopyRepeatParams& repeatParams, emu::Where where = emu::Where::current()) {
  static_assert(isSetMask, "the mask register is not emulated");
  detail::copy(dst, src, static_cast<int64_t>(mask), repeatTime, repeatParams, where);
}
template <typename T, bool isSetMask = true>
inline void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[], const U8 repeatTime,
                 const CopyRepeatParams& repeatParams, emu::Where where = emu::Where::current()) {
  static_assert(isSetMask, "the mask register is not emulated");
  detail::copy(dst, src, mask, repeatTime, repeatParams, where);
}

// dst[i] = firstValue + i.
template <typename T>
inline void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count,
                           emu::Where where = emu::Where::current()) {
  detail::check_arithmetic<T>();
  emu::Core& core = emu::core();
  core.begin(emu::Op::CreateVecIndex, where);
  if (count == 0) return;
  T* d = reinterpret_cast<T*>(core.destination(dst.operand("dst"), count * static_cast<int64_t>(sizeof(T))));
  for (uint32_t i = 0; i < count; ++i) d[i] = emu::sum(firstValue, static_cast<T>(i));
  core.count(emu::Op::CreateVecIndex, detail::round_up_repeats<T>(count), count);
}

}  // namespace AscendC

#endif  // SOFTNPU_ASCENDC_MOVES_H
