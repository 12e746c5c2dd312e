// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The register tile of the projection (contract: kernels.h). The build compiles this file once per instruction set
// and names it by SOFTNPU_ISA; the tile shape follows the register file.

#include "kernels.h"

namespace softnpu {
namespace SOFTNPU_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12, kVectors = 2;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRows = 8, kVectors = 2;
#else
constexpr int kLanes = 4, kRows = 4, kVectors = 2;
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

void tile(const float* a, const float* b, float* c, int64_t stride, int64_t depth) {
  Vector sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[i][j] = *reinterpret_cast<Vector*>(c + i * stride + j * kLanes);
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector column[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) column[j] = *reinterpret_cast<const Vector*>(b + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += a[i] * column[j];
    }
    a += kRows;
    b += kVectors * kLanes;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) *reinterpret_cast<Vector*>(c + i * stride + j * kLanes) = sum[i][j];
  }
}

}  // namespace

extern const ProjectionKernel projection;
const ProjectionKernel projection = {kRows, kVectors * kLanes, tile};

}  // namespace SOFTNPU_ISA
}  // namespace softnpu
