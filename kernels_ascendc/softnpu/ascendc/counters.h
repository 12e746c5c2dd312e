// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// What a launch did, as numbers: the base of static figures and models of a kernel's time, never a measurement of one.
#ifndef SOFTNPU_ASCENDC_COUNTERS_H
#define SOFTNPU_ASCENDC_COUNTERS_H

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace softnpu::ascendc {

// Operations of the V pipe, one counter triple each.
enum class Op : uint8_t {
  Add,
  Sub,
  Mul,
  Div,
  Max,
  Min,
  Adds,
  Muls,
  Maxs,
  Mins,
  Exp,
  Ln,
  Sqrt,
  Rsqrt,
  Reciprocal,
  Abs,
  Cast,
  Duplicate,
  Brcb,
  Gather,
  WholeReduceSum,
  WholeReduceMax,
  BlockReduceSum,
  BlockReduceMax,
  ReduceSum,
  ReduceMax,
  Copy,
  DataCopy,
  CreateVecIndex,
  count
};

inline constexpr std::array<const char*, static_cast<size_t>(Op::count)> kOpNames = {"Add",
                                                                                     "Sub",
                                                                                     "Mul",
                                                                                     "Div",
                                                                                     "Max",
                                                                                     "Min",
                                                                                     "Adds",
                                                                                     "Muls",
                                                                                     "Maxs",
                                                                                     "Mins",
                                                                                     "Exp",
                                                                                     "Ln",
                                                                                     "Sqrt",
                                                                                     "Rsqrt",
                                                                                     "Reciprocal",
                                                                                     "Abs",
                                                                                     "Cast",
                                                                                     "Duplicate",
                                                                                     "Brcb",
                                                                                     "Gather",
                                                                                     "WholeReduceSum",
                                                                                     "WholeReduceMax",
                                                                                     "BlockReduceSum",
                                                                                     "BlockReduceMax",
                                                                                     "ReduceSum",
                                                                                     "ReduceMax",
                                                                                     "Copy",
                                                                                     "DataCopy",
                                                                                     "CreateVecIndex"};

// Sums over the blocks of a launch, and over launches; ub_bytes is the largest sum of InitBuffer of any block.
// A repeat is 256 bytes of the wider operand; elements are those computed, masked ones left out.
struct Counters {
  struct Vector {
    int64_t instructions = 0, repeats = 0, elements = 0;
  };
  std::array<Vector, static_cast<size_t>(Op::count)> vector{};
  int64_t mte2_transfers = 0, mte2_bytes = 0, mte3_transfers = 0, mte3_bytes = 0, scalar_reads = 0, scalar_bytes = 0;
  int64_t barriers = 0, flags = 0, ub_bytes = 0, launches = 0, blocks = 0;

  void add(const Counters& other) {
    for (size_t i = 0; i < vector.size(); ++i) {
      vector[i].instructions += other.vector[i].instructions;
      vector[i].repeats += other.vector[i].repeats;
      vector[i].elements += other.vector[i].elements;
    }
    mte2_transfers += other.mte2_transfers;
    mte2_bytes += other.mte2_bytes;
    mte3_transfers += other.mte3_transfers;
    mte3_bytes += other.mte3_bytes;
    scalar_reads += other.scalar_reads;
    scalar_bytes += other.scalar_bytes;
    barriers += other.barriers;
    flags += other.flags;
    ub_bytes = std::max(ub_bytes, other.ub_bytes);
    launches += other.launches;
    blocks += other.blocks;
  }

  // Every figure with its name, for exports: call(name, value).
  template <typename Call>
  void each(Call&& call) const {
    for (size_t i = 0; i < vector.size(); ++i) {
      const std::string op = kOpNames[i];
      call("instructions." + op, vector[i].instructions);
      call("repeats." + op, vector[i].repeats);
      call("elements." + op, vector[i].elements);
    }
    call(std::string("bytes.mte2"), mte2_bytes);
    call(std::string("bytes.mte3"), mte3_bytes);
    call(std::string("bytes.scalar"), scalar_bytes);
    call(std::string("transfers.mte2"), mte2_transfers);
    call(std::string("transfers.mte3"), mte3_transfers);
    call(std::string("transfers.scalar"), scalar_reads);
    call(std::string("barriers"), barriers);
    call(std::string("flags"), flags);
    call(std::string("ub_bytes"), ub_bytes);
    call(std::string("launches"), launches);
    call(std::string("blocks"), blocks);
  }
};

}  // namespace softnpu::ascendc

#endif  // SOFTNPU_ASCENDC_COUNTERS_H
