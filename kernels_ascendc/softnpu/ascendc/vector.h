// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// How a vector instruction walks its operands. Two forms: `count` contiguous elements; or repeats of 8 blocks of 32
// bytes with block and repeat strides and a mask. The walker checks extents, overlap and order, the caller computes. A
// repeat is 256 bytes of the widest operand; a narrower operand then fills fewer blocks.
#ifndef SOFTNPU_ASCENDC_VECTOR_H
#define SOFTNPU_ASCENDC_VECTOR_H

#include <algorithm>

#include "tensors.h"

namespace softnpu::ascendc {

constexpr int64_t kRepeatBytes = 256;

// Elements of a repeat that are computed.
struct Lanes {
  uint64_t bits[2];
  int64_t count;  // of a repeat

  uint64_t run(int64_t first, int64_t length) const {  // `length` lanes of one word
    return (bits[first / 64] >> (first % 64)) & ((uint64_t{1} << length) - 1);
  }
  int64_t active() const { return __builtin_popcountll(bits[0]) + __builtin_popcountll(bits[1]); }
};

inline Lanes lanes_of(const Core& core, int64_t mask, int64_t lanes) {
  if (mask < 1 || mask > lanes) {
    core.fail(Trap::vector_params, "mask %lld, expected 1..%lld elements", static_cast<long long>(mask),
              static_cast<long long>(lanes));
  }
  const auto low = [](int64_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; };
  return {{low(mask), mask > 64 ? low(mask - 64) : 0}, lanes};
}
// The device reads one word of a bit mask for 32-bit elements, two for 16-bit ones.
inline Lanes lanes_of(const Core& core, const uint64_t* mask, int64_t lanes) {
  const Lanes result{{mask[0], lanes > 64 ? mask[1] : 0}, lanes};
  if (result.active() == 0) core.fail(Trap::vector_params, "the bit mask has no bit set");
  return result;
}

struct Side {
  Operand operand;
  int64_t element, block_stride, repeat_stride;  // bytes; strides from start to start

  int64_t address(int64_t repeat, int64_t lane) const {
    const int64_t per_block = kBlock / element;
    return operand.offset + repeat * repeat_stride + lane / per_block * block_stride + lane % per_block * element;
  }
  int64_t extent(int64_t repeats, const Lanes& lanes) const {
    int64_t end = 0;
    const int64_t per_block = kBlock / element;
    for (int64_t first = 0; first < lanes.count; first += per_block) {
      const uint64_t mask = lanes.run(first, per_block);
      if (mask == 0) continue;
      end = std::max(end, address(repeats - 1, first + 63 - __builtin_clzll(mask)) + element - operand.offset);
    }
    return end;
  }
  // No two blocks of it coincide.
  bool spread(int64_t repeats, int64_t blocks) const {
    return block_stride >= kBlock && (repeats == 1 || repeat_stride >= (blocks - 1) * block_stride + kBlock);
  }
};

template <typename Stride>
int64_t stride_bytes(const Core& core, const char* name, const Stride& blocks, bool may_be_zero = true) {
  if (blocks.cut() || (!may_be_zero && blocks == 0)) {
    core.fail(Trap::vector_params, "%s %lld is out of range", name, static_cast<long long>(blocks.wanted));
  }
  return blocks * kBlock;
}

template <typename Repeat>
int64_t repeats_of(const Core& core, const Repeat& repeat) {
  if (repeat.wanted < 0 || repeat.wanted > 255) {
    core.fail(Trap::vector_params, "repeatTime %lld, expected 0..255", static_cast<long long>(repeat.wanted));
  }
  return repeat.wanted;
}

// Contiguous form. body(dst, sources, n) computes n elements; sources are pointers into UB.
template <size_t kSources, typename Body>
void walk_count(Core& core, Op op, const Operand& dst, int64_t dst_element, const Operand (&src)[kSources],
                int64_t src_element, int64_t count, Body&& body) {
  if (count < 0) core.fail(Trap::vector_params, "count %lld", static_cast<long long>(count));
  if (count == 0) return;
  const uint8_t* sources[kSources];
  const int64_t dst_bytes = count * dst_element, src_bytes = count * src_element;
  for (size_t i = 0; i < kSources; ++i) {
    sources[i] = core.source(src[i], src_bytes);
    const bool apart = dst.offset + dst_bytes <= src[i].offset || src[i].offset + src_bytes <= dst.offset;
    if (!apart && (dst.offset != src[i].offset || dst_element != src_element)) [[unlikely]] {
      core.fail(Trap::operand_overlap, "dst and %s overlap in part", src[i].name);
    }
  }
  body(core.destination(dst, dst_bytes), sources, count);
  const int64_t per_repeat = kRepeatBytes / std::max(dst_element, src_element);
  core.count(op, (count + per_repeat - 1) / per_repeat, count);
}

// Repeat form. accumulates: the operation may use its own result of the repeat before as the last source.
template <size_t kSources, typename Body>
void walk_repeats(Core& core, Op op, const Side& dst, const Side (&src)[kSources], const Lanes& lanes, int64_t repeats,
                  bool accumulates, Body&& body) {
  if (repeats == 0) return;
  const int64_t dst_extent = dst.extent(repeats, lanes);
  core.check(dst.operand, 0, dst_extent, kBlock);
  int64_t widest = dst.element;
  bool may_meet[kSources];  // whether blocks of dst and of the source have to be compared
  for (size_t i = 0; i < kSources; ++i) {
    const int64_t extent = src[i].extent(repeats, lanes);
    core.check(src[i].operand, 0, extent, kBlock);
    widest = std::max(widest, src[i].element);
    const int64_t from = src[i].operand.offset, to = dst.operand.offset;
    const bool in_place = from == to && src[i].element == dst.element && src[i].block_stride == dst.block_stride &&
                          src[i].repeat_stride == dst.repeat_stride &&
                          dst.spread(repeats, lanes.count * dst.element / kBlock);
    may_meet[i] = from < to + dst_extent && to < from + extent && !in_place;
  }
  const Side& last = src[kSources - 1];
  const bool accumulating = accumulates && dst.repeat_stride == 0 && last.repeat_stride == 0 &&
                            dst.operand.offset == last.operand.offset && dst.block_stride == last.block_stride;
  const int64_t run = kBlock / widest, runs = lanes.count / run;
  const uint64_t full = (uint64_t{1} << run) - 1;
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    // All sources of a repeat first: the device reads a repeat before it writes it.
    for (size_t i = 0; i < kSources; ++i) {
      const bool own_result = accumulating && i == kSources - 1;
      for (int64_t r = 0; r < runs; ++r) {
        const uint64_t mask = lanes.run(r * run, run);
        if (mask == 0) continue;
        const int64_t address = src[i].address(repeat, r * run);
        if (may_meet[i] && !own_result && core.written_now(address)) {
          core.fail(Trap::operand_overlap, "repeat %lld writes what %s of a later repeat reads",
                    static_cast<long long>(repeat - 1), src[i].operand.name);
        }
        if (own_result && repeat > 0) continue;
        if (mask == full) {
          core.read(src[i].operand.name, address, run * src[i].element);
        } else {
          for (uint64_t rest = mask; rest != 0; rest &= rest - 1) {
            core.read(src[i].operand.name, address + __builtin_ctzll(rest) * src[i].element, src[i].element);
          }
        }
      }
    }
    for (int64_t r = 0; r < runs; ++r) {
      const uint64_t mask = lanes.run(r * run, run);
      if (mask == 0) continue;
      const int64_t address = dst.address(repeat, r * run), bytes = run * dst.element;
      for (size_t i = 0; i < kSources; ++i) {
        const Side& side = src[i];
        for (int64_t other = 0; may_meet[i] && other < runs; ++other) {
          const int64_t from = side.address(repeat, other * run);
          const bool apart = from + run * side.element <= address || address + bytes <= from;
          if (!apart && (other != r || from != address || side.element != dst.element) &&
              lanes.run(other * run, run) != 0) {
            core.fail(Trap::operand_overlap, "dst and %s overlap in part", side.operand.name);
          }
        }
      }
      if (repeat > 0 && dst.repeat_stride == 0 && !accumulating) {
        core.fail(Trap::operand_overlap, "every repeat writes the same dst");
      }
      const uint8_t* sources[kSources];
      const auto compute = [&](int64_t lane, int64_t count) {
        for (size_t i = 0; i < kSources; ++i) {
          sources[i] = core.ub + src[i].address(repeat, r * run) + lane * src[i].element;
        }
        const int64_t to = address + lane * dst.element;
        core.write(dst.operand.name, to, count * dst.element);
        body(core.ub + to, sources, count);
      };
      if (mask == full) {
        compute(0, run);
      } else {
        for (uint64_t rest = mask; rest != 0; rest &= rest - 1) compute(__builtin_ctzll(rest), 1);
      }
    }
  }
  core.count(op, repeats, repeats * lanes.active());
}

}  // namespace softnpu::ascendc

#endif  // SOFTNPU_ASCENDC_VECTOR_H
