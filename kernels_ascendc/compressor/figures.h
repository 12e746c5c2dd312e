// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// What a full piece costs, counted from the source of the kernels: bytes, instructions of the vector unit, those that
// wait for the one before, and the cycles of their data at the rates of the documentation (float32: 64 elements a
// cycle; 32 for Exp, Div and Sqrt; 64 in 7 cycles for WholeReduceSum; 5 for Gather). A model, nothing of it was
// measured. The host emulation counts what really runs; tests compare the two.
#ifndef AFD_DSV4_COMPRESSOR_FIGURES_H_
#define AFD_DSV4_COMPRESSOR_FIGURES_H_

#include "kernels.h"
#include "tiling.h"

namespace afd_dsv4 {

struct Cost {
  double bytes = 0, instructions = 0, barriers = 0, cycles = 0;

  // One operation: so many instructions, cycles on data, and whether the next one waits for it.
  void Add(double count, double data, bool barrier = true) {
    instructions += count;
    cycles += data;
    barriers += barrier;
  }
};

inline double Log2(double value) { return value <= 1 ? 0 : 1 + Log2(value / 2); }

template <typename Tiling>
void AddNormRope(Cost* cost, bool bf16_out) {
  const double rows = Tiling::kRows, slices = Tiling::kColumns / double(kLanes), all = rows * slices;
  cost->bytes += rows * (2 * kRopeColumns * kFloatBytes + Tiling::kColumns * (bf16_out ? 2.0 : 4.0));
  cost->Add(1, all);                                  // squares
  cost->Add(slices - 1, rows * (slices - 1), false);  // slices by halves
  cost->barriers += Log2(slices);
  cost->Add(1, 7 * rows);  // lanes
  const double roots = Tiling::kRootLanes / double(kFloatBlock);
  cost->Add(1, 1), cost->Add(1, 1), cost->Add(1, 2), cost->Add(1, roots);  // mean, epsilon, root, root of every lane
  const double each = rows < slices ? rows : slices;
  cost->Add(each, 2 * all), cost->Add(each, all);  // by the root, by the weight
  cost->Add(2, rows * kRopeColumns / 5.0 + rows);  // partners; sign of the sine
  cost->Add(2, 2 * rows), cost->Add(1, rows);      // products, sum
  cost->Add(1, all);                               // cast, or copy
}

// Instructions of a Fold (vector.h).
inline double FoldCount(uint32_t width, uint32_t stride, uint32_t windows) {
  return stride / kFloatBlock <= 255 && width / kLanes < windows ? width / kLanes : windows;
}

// Two pieces and their norm.
template <typename Tiling>
Cost CostOfC4(bool bf16_out) {
  constexpr uint32_t d = Tiling::kHeadDim, w = Tiling::kWindows, window = Tiling::kWindowFloats;
  const double row = w * d / double(kLanes);  // cycles of one pool row of every window
  Cost piece;
  piece.bytes = 2.0 * Tiling::kPieceFloats * Tiling::kRowBytes;
  if (Tiling::kWorkBytes > 0) piece.Add(2, 16 * row);
  const auto tree = [&] {
    for (uint32_t rows = 4; rows >= 1; rows /= 2) piece.Add(FoldCount(rows * d, window, w), rows * row);
  };
  piece.Add(w, 8 * row);  // APE
  tree();
  piece.Add(row, 8 * row);  // less the maximum
  piece.Add(1, 16 * row);   // exponentials
  tree();
  piece.Add(row, 16 * row);  // by the sum
  piece.Add(1, 8 * row);     // times kv
  tree();
  Cost cost;
  cost.bytes = 2 * piece.bytes;
  cost.instructions = 2 * piece.instructions;
  cost.barriers = 2 * piece.barriers;
  cost.cycles = 2 * piece.cycles;
  AddNormRope<typename Tiling::Norm>(&cost, bf16_out);
  return cost;
}

// One task: a window's slice of 64 columns.
template <typename Tiling>
Cost CostOfC128() {
  const double rows = kC128Ratio, levels = Log2(rows);
  Cost cost;
  cost.bytes = 2.0 * Tiling::kTaskFloats * Tiling::kRowBytes + Tiling::kOutBytes;
  if (Tiling::kWorkBytes > 0) cost.Add(2, 2 * rows);
  const auto tree = [&] {
    cost.Add(levels, rows - 1, false);
    cost.barriers += levels;
  };
  cost.Add(1, rows);  // APE
  tree();
  cost.Add(1, rows), cost.Add(1, 2 * rows);  // less the maximum, exponentials
  tree();
  cost.Add(1, 2 * rows), cost.Add(1, rows);  // by the sum, times kv
  tree();
  cost.Add(1, 1, false);  // result
  return cost;
}

inline Cost CostOfFinish(bool bf16_out) {
  Cost cost;
  cost.bytes = FinishTiling::kInBytes;
  AddNormRope<FinishTiling::Norm>(&cost, bf16_out);
  return cost;
}

// One piece of `rows` rows.
template <typename Tiling>
Cost CostOfTail(double rows, double half) {
  Cost cost;
  const double floats = rows * half;
  cost.bytes = floats * (2 * Tiling::kRowBytes + 3 * kFloatBytes);
  if (Tiling::kRowBytes == 2) {
    cost.Add(2, 2 * floats / kLanes), cost.Add(1, floats / kLanes, false);
  } else {
    cost.Add(2, 2 * floats / kLanes, false);
  }
  return cost;
}

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_FIGURES_H_
