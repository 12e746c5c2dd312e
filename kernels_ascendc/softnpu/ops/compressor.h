// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The stock operator _C_ascend::compressor as vllm-ascend 0.23.0 ships it for A2/A3 (arch32), in C++ on the host.
//
// What it keeps of the contract, because callers depend on it:
//   - cache mode 1 only: row of position p lives at page table[b][p / page_rows], row p % page_rows of state_cache,
//     whose dim-0 stride may be larger than a page; [kv | score + APE], each [left | right] with overlap (coff 2);
//   - a save under page 0 is skipped; a read is not guarded: page 0 is read like any other;
//   - every row of the chunk is saved, kv before score, and all saves happen before any history is read (the order
//     of arch32 cores is not defined; this is the worst allowed one), so a table that lets a launch read and newly
//     write one row is seen;
//   - history is read only for positions before start_pos, and only by windows that complete in the chunk;
//   - result rows are packed in request order; rows past the last one stay unwritten: here they hold poison;
//   - columns of the table that no row of the chunk needs are never looked at, nor is start_pos of an empty request.
// Where two rows of one launch map to one physical row the device has a race; here `cores` and `seed` decide which
// 64-column slice wins, always the same way for the same settings.
//
// What it does differently: where the device would read or write outside its tables (a column past the table, a page
// id past the cache, cu_seqlens that run backwards, a negative start) this is a fault: nothing outside is touched,
// the result rows concerned are poison, and the call returns SOFTNPU_FAULT with a message.
// What it does not do: 3-D x (layout BSH), seqused, rotary mode 1, cache mode 2.
#ifndef SOFTNPU_OPS_COMPRESSOR_H
#define SOFTNPU_OPS_COMPRESSOR_H

#include <stdint.h>

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// Shapes: x [T, hidden]; wkv, wgate [coff*D, hidden]; state_cache [pages, page_rows, 2*coff*D] fp32; ape
// [ratio, coff*D] fp32; norm_weight [D]; rope_sin, rope_cos [rows, rope_head_dim]; state_block_table [B, columns]
// int32; cu_seqlens [B + 1] int32; seqused absent; start_pos [B] int32 or absent (0); out [rows, D] of x's type;
// rows = min(T, T / ratio + B).
typedef struct SoftnpuCompressorArgs {
  SoftnpuTensor x, wkv, wgate, state_cache, ape, norm_weight, rope_sin, rope_cos;
  SoftnpuTensor state_block_table, cu_seqlens, seqused, start_pos, out;
  int64_t rope_head_dim, cmp_ratio, coff, rotary_mode, cache_mode;
  double norm_eps;
  // Taken from the settings by softnpu_compressor_check, so that a queued launch keeps those it was made under.
  int64_t saturate, cores, seed, threads;
} SoftnpuCompressorArgs;

// Checks everything the host can see (binding and tiling of the stock operator, less what is waived) and fills the
// settings. SOFTNPU_OK or SOFTNPU_REFUSED. Reads no element of any tensor.
int softnpu_compressor_check(SoftnpuCompressorArgs* args);

// Runs a checked launch. SOFTNPU_OK or SOFTNPU_FAULT.
int softnpu_compressor_run(const SoftnpuCompressorArgs* args);

// Calls seen(context, page, writes) for every page of the state cache that the launch reads or writes, as the table on
// the device says when it is called; once for each page and direction. Faulty arguments are passed over.
void softnpu_compressor_pages(const SoftnpuCompressorArgs* args, void (*seen)(void*, int64_t, int), void* context);

// out[m][n] = sum over k of x[m][k] * weight[n][k] with the operator's own kernel; contiguous, x and weight of the
// same float type, out float32. For tests of the projection alone.
int softnpu_project(const SoftnpuTensor* x, const SoftnpuTensor* weight, const SoftnpuTensor* out, int64_t threads);

// Instruction set of the kernels in use: "avx512", "avx2" or "generic".
const char* softnpu_isa(void);
// For tests: use another one from now on. 0, or -1 where the processor or the build lacks it.
int softnpu_select_isa(const char* name);

#ifdef __cplusplus
}
#endif

#endif  // SOFTNPU_OPS_COMPRESSOR_H
