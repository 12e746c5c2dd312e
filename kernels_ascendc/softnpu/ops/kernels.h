// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The two numeric kernels of the compressor, built once per instruction set and chosen at run time.
//
// projection: out[m][n] = sum over k of a[m][k] * b[k][n], in fp32, k strictly ascending, one accumulator per
// output. A result therefore depends on its own row and column only: not on neighbouring rows, the tile it fell
// into, or the thread. Products of two bfloat16 or float16 values are exact in fp32, so for those types the bits
// are also the same with and without fused multiply-add, that is on every machine.
//
// pool: the arithmetic of the stock operator after the projection, in its order (see pool_kernel.cpp). Built without
// contraction into fused multiply-add: its bits are the same on every machine.
#ifndef SOFTNPU_OPS_KERNELS_H
#define SOFTNPU_OPS_KERNELS_H

#include <cstdint>

namespace softnpu {

constexpr int64_t kDepthBlock = 512;  // k values per block: one block of A and B panels stays in cache

struct ProjectionKernel {
  int64_t rows;     // rows of one register tile
  int64_t columns;  // columns of one register tile
  // a: [depth][rows], b: [depth][columns], both packed; c: [rows][stride], added to in place.
  void (*tile)(const float* a, const float* b, float* c, int64_t stride, int64_t depth);
};

struct PoolKernel {
  // kv[i], score[i]: [columns] of pool row i; null pointers stand for the missing group before the first one
  // (kv 0, score -inf). rows is a power of two. result: [columns].
  void (*pool)(const float* const* kv, const float* const* score, int64_t rows, int64_t columns, float* result);
  // RMSNorm in place over columns, then interleaved RoPE on the last rope_columns, both in fp32.
  void (*norm_rope)(float* row, const float* weight, const float* cos, const float* sin, int64_t columns,
                    int64_t rope_columns, float epsilon);
};

// The best the processor can run.
const ProjectionKernel& projection_kernel();
const PoolKernel& pool_kernel();
const char* isa_name();
// Another one, for tests; false where the processor or the build lacks it. Not while a launch runs.
bool select_isa(const char* name);

}  // namespace softnpu

#endif  // SOFTNPU_OPS_KERNELS_H
