// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Pool, RMSNorm and RoPE in the order of operations of the stock arch32 vector kernel, fp32 throughout:
//   softmax per column over the pool rows: maximum; subtract; exp; column sum; divide every row by the sum
//   weighted sum: multiply every row; column sum
//   column sum of n rows: rows i and i + n/2 first, then halves of halves (a tree, never left to right)
//   RMSNorm: square; add 64-column chunks i and i + n/2 by halves; sum the 64 lanes in adjacent pairs; times 1/D;
//            plus eps; square root; divide; times weight
//   RoPE: even lanes x*cos + (-next)*sin, odd lanes x*cos + previous*sin; two products, one sum
// exp is not the device's (its last bit is not documented): a fixed double-precision polynomial rounded once to
// float, so that the NumPy reference (afd_dsv4/compressor/reference.py, exp32) has the same bits by construction.
// Built once per instruction set, without fused multiply-add contraction.

#include <cmath>
#include <cstring>
#include <limits>

#include "exp32.h"
#include "kernels.h"

namespace softnpu {
namespace SOFTNPU_ISA {
namespace {

constexpr int64_t kChunk = 64;  // columns a vector instruction of the device covers, and a block here
constexpr int64_t kMaxRows = 256;

// The maximum of the device: a NaN on either side wins.
inline float max_nan(float a, float b) { return (a > b || a != a) ? a : b; }

void pool(const float* const* kv, const float* const* score, int64_t rows, int64_t columns, float* result) {
  alignas(64) float weight[kMaxRows][kChunk];
  alignas(64) float tree[kMaxRows / 2][kChunk];
  for (int64_t base = 0; base < columns; base += kChunk) {
    const int64_t width = columns - base < kChunk ? columns - base : kChunk;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < kChunk; ++k) weight[i][k] = -std::numeric_limits<float>::infinity();
      if (score[i] != nullptr) std::memcpy(weight[i], score[i] + base, width * sizeof(float));
    }
    // Fold rows pairwise: into `tree` first, then inside it.
    alignas(64) float top[kChunk], sum[kChunk];
    for (int64_t half = rows / 2, first = 1; half >= 1; half /= 2, first = 0) {
      for (int64_t i = 0; i < half; ++i) {
        const float* low = first ? weight[i] : tree[i];
        const float* high = first ? weight[i + half] : tree[i + half];
        for (int64_t k = 0; k < kChunk; ++k) tree[i][k] = max_nan(low[k], high[k]);
      }
    }
    std::memcpy(top, rows == 1 ? weight[0] : tree[0], sizeof(top));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < kChunk; ++k) weight[i][k] = exp32(weight[i][k] - top[k]);
    }
    for (int64_t half = rows / 2, first = 1; half >= 1; half /= 2, first = 0) {
      for (int64_t i = 0; i < half; ++i) {
        const float* low = first ? weight[i] : tree[i];
        const float* high = first ? weight[i + half] : tree[i + half];
        for (int64_t k = 0; k < kChunk; ++k) tree[i][k] = low[k] + high[k];
      }
    }
    std::memcpy(sum, rows == 1 ? weight[0] : tree[0], sizeof(sum));
    for (int64_t i = 0; i < rows; ++i) {
      if (kv[i] == nullptr) {
        for (int64_t k = 0; k < kChunk; ++k) weight[i][k] = 0.0f * (weight[i][k] / sum[k]);
      } else if (width == kChunk) {
        for (int64_t k = 0; k < kChunk; ++k) weight[i][k] = kv[i][base + k] * (weight[i][k] / sum[k]);
      } else {
        for (int64_t k = 0; k < width; ++k) weight[i][k] = kv[i][base + k] * (weight[i][k] / sum[k]);
      }
    }
    for (int64_t half = rows / 2, first = 1; half >= 1; half /= 2, first = 0) {
      for (int64_t i = 0; i < half; ++i) {
        const float* low = first ? weight[i] : tree[i];
        const float* high = first ? weight[i + half] : tree[i + half];
        for (int64_t k = 0; k < kChunk; ++k) tree[i][k] = low[k] + high[k];
      }
    }
    std::memcpy(result + base, rows == 1 ? weight[0] : tree[0], width * sizeof(float));
  }
}

float sum_of_squares(const float* row, int64_t columns) {
  constexpr int64_t kMaxColumns = 4096;
  alignas(64) float square[kMaxColumns];
  for (int64_t i = 0; i < columns; ++i) square[i] = row[i] * row[i];
  int64_t chunks = columns / kChunk;
  const int64_t rest = columns % kChunk;
  if (chunks > 0) {
    for (int64_t i = 0; i < rest; ++i) square[i] += square[chunks * kChunk + i];
  }
  for (int64_t half = chunks / 2; half > 0; half = chunks / 2) {
    chunks = (chunks + 1) / 2;
    for (int64_t i = 0; i < half * kChunk; ++i) square[i] += square[chunks * kChunk + i];
  }
  int64_t lanes = columns < kChunk ? columns : kChunk;
  for (int64_t i = lanes; i < kChunk; ++i) square[i] = 0.0f;  // lanes masked off by the device
  for (lanes = kChunk; lanes > 1; lanes /= 2) {
    for (int64_t i = 0; i < lanes / 2; ++i) square[i] = square[2 * i] + square[2 * i + 1];
  }
  return square[0];
}

void norm_rope(float* row, const float* weight, const float* cos, const float* sin, int64_t columns,
               int64_t rope_columns, float epsilon) {
  const float reciprocal = static_cast<float>(1.0 / static_cast<double>(columns));
  const float root = std::sqrt(sum_of_squares(row, columns) * reciprocal + epsilon);
  for (int64_t i = 0; i < columns; ++i) row[i] = (row[i] / root) * weight[i];
  float* tail = row + columns - rope_columns;
  for (int64_t i = 0; i < rope_columns; i += 2) {
    const float even = tail[i], odd = tail[i + 1];
    tail[i] = even * cos[i] + (-odd) * sin[i];
    tail[i + 1] = odd * cos[i + 1] + even * sin[i + 1];
  }
}

}  // namespace

extern const PoolKernel pooling;
const PoolKernel pooling = {pool, norm_rope};

}  // namespace SOFTNPU_ISA
}  // namespace softnpu
