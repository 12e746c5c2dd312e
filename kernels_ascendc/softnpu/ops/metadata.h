// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The stock operator _C_ascend::compressor_metadata: for every compressed row of a step its RoPE row and its slot in
// the compressed KV cache. Request b contributes (s + len) / r - s / r rows (none where s < 0 or len <= 0), packed in
// request order; row i of a request is compressed position c = s / r + i, its RoPE row is c * r, its slot is offset
// c % kv_block_size in block kv_block_table[b, c / kv_block_size].
// A row is invalid (cos 1, sin 0, slot -1; format 2: block -1, offset kv_block_size - 1) past the last request, where
// its column lies outside the table, where the block is negative, where its RoPE row lies outside the table, and in
// format 1 where the slot exceeds int32. The device judges the last two per tile of rows, here it is per row.
#ifndef SOFTNPU_OPS_METADATA_H
#define SOFTNPU_OPS_METADATA_H

#include <stdint.h>

#include "tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// Shapes: rope_cos, rope_sin [positions, dim] of one float type; cu_seqlens [> num_reqs_actual], start_pos
// [>= num_reqs_actual], kv_block_table [>= num_reqs_actual, columns], all int32; compress_cos, compress_sin
// [rows, ..., dim] as rope_cos; slot_mapping int32, [rows] in format 1 (flat), [rows, 2] in format 2.
typedef struct SoftnpuMetadataArgs {
  SoftnpuTensor rope_cos, rope_sin, cu_seqlens, start_pos, kv_block_table;
  SoftnpuTensor compress_cos, compress_sin, slot_mapping;
  int64_t kv_block_size, slot_mapping_format, compress_ratio, num_reqs_actual;
} SoftnpuMetadataArgs;

int softnpu_metadata_check(const SoftnpuMetadataArgs* args);
int softnpu_metadata_run(const SoftnpuMetadataArgs* args);

#ifdef __cplusplus
}
#endif

#endif  // SOFTNPU_OPS_METADATA_H
