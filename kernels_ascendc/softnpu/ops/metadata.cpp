// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

#include "metadata.h"

#include <climits>
#include <cstring>
#include <string>
#include <utility>

#include "refusal.h"
#include "settings.h"

namespace softnpu {
namespace {

constexpr int64_t kFlat = 1, kBlockOffset = 2;

void expect(bool holds, const std::string& argument, const std::string& found, const std::string& expected) {
  if (!holds) refuse_argument("compressor_metadata", argument, found, expected);
}

bool contiguous(const SoftnpuTensor& t) {
  int64_t stride = 1;
  for (int i = t.dims - 1; i >= 0; stride *= t.shape[i], --i) {
    if (t.shape[i] > 1 && t.stride[i] != stride) return false;
  }
  return true;
}

void check(const SoftnpuMetadataArgs& a) {
  const SoftnpuTensor &cos = a.rope_cos, &sin = a.rope_sin;
  expect(cos.dims == 2, "rope_cos", shape_text(cos), "2 dims");
  expect(sin.dims == 2, "rope_sin", shape_text(sin), "2 dims");
  expect(cos.dtype == SOFTNPU_FLOAT32 || cos.dtype == SOFTNPU_FLOAT16 || cos.dtype == SOFTNPU_BFLOAT16, "rope_cos",
         "another type", "float32, float16 or bfloat16");
  expect(cos.dtype == sin.dtype, "rope_sin", "another type", "the type of rope_cos");
  expect(cos.shape[0] == sin.shape[0] && cos.shape[1] == sin.shape[1], "rope_sin", shape_text(sin), shape_text(cos));
  expect(cos.shape[0] > 0 && cos.shape[1] > 0, "rope_cos", shape_text(cos), "at least one element");
  expect(a.cu_seqlens.dims == 1, "cu_seqlens", shape_text(a.cu_seqlens), "1 dim");
  expect(a.start_pos.dims == 1, "start_pos", shape_text(a.start_pos), "1 dim");
  expect(a.kv_block_table.dims == 2, "kv_block_table", shape_text(a.kv_block_table), "2 dims");
  expect(a.cu_seqlens.dtype == SOFTNPU_INT32, "cu_seqlens", "another type", "int32");
  expect(a.start_pos.dtype == SOFTNPU_INT32, "start_pos", "another type", "int32");
  expect(a.kv_block_table.dtype == SOFTNPU_INT32, "kv_block_table", "another type", "int32");
  expect(a.kv_block_size > 0 && a.kv_block_size <= INT32_MAX, "kv_block_size", text(a.kv_block_size),
         "1.." + text(INT32_MAX));
  expect(a.compress_ratio > 0 && a.compress_ratio <= UINT32_MAX, "compress_ratio", text(a.compress_ratio),
         "1.." + text(UINT32_MAX));
  expect(a.slot_mapping_format == kFlat || a.slot_mapping_format == kBlockOffset, "slot_mapping_format",
         text(a.slot_mapping_format), "1 (flat) or 2 (block_offset)");
  expect(a.num_reqs_actual > 0, "num_reqs_actual", text(a.num_reqs_actual), "greater than 0");
  expect(a.cu_seqlens.shape[0] > a.num_reqs_actual, "cu_seqlens", shape_text(a.cu_seqlens),
         "more than num_reqs_actual = " + text(a.num_reqs_actual));
  expect(a.start_pos.shape[0] >= a.num_reqs_actual, "start_pos", shape_text(a.start_pos),
         "at least num_reqs_actual = " + text(a.num_reqs_actual));
  expect(a.kv_block_table.shape[0] >= a.num_reqs_actual, "kv_block_table", shape_text(a.kv_block_table),
         "at least num_reqs_actual = " + text(a.num_reqs_actual) + " rows");
  expect(a.kv_block_table.shape[1] > 0, "kv_block_table", shape_text(a.kv_block_table), "at least one column");

  const SoftnpuTensor &out_cos = a.compress_cos, &out_sin = a.compress_sin, &slots = a.slot_mapping;
  expect(out_cos.dims >= 2, "compress_cos", shape_text(out_cos), "at least 2 dims");
  expect(out_cos.shape[0] > 0, "compress_cos", shape_text(out_cos), "at least one row");
  expect(out_cos.shape[out_cos.dims - 1] == cos.shape[1], "compress_cos", shape_text(out_cos),
         "last dim " + text(cos.shape[1]));
  expect(elements(out_cos) == out_cos.shape[0] * cos.shape[1], "compress_cos", shape_text(out_cos),
         "[rows, 1, ..., dim]");
  bool same = out_sin.dims == out_cos.dims;
  for (int i = 0; same && i < out_cos.dims; ++i) same = out_sin.shape[i] == out_cos.shape[i];
  expect(same, "compress_sin", shape_text(out_sin), shape_text(out_cos));
  expect(out_cos.dtype == cos.dtype, "compress_cos", "another type", "the type of rope_cos");
  expect(out_sin.dtype == cos.dtype, "compress_sin", "another type", "the type of rope_cos");
  expect(slots.dtype == SOFTNPU_INT32, "slot_mapping", "another type", "int32");
  const bool flat = a.slot_mapping_format == kFlat;
  expect(slots.dims == (flat ? 1 : 2) && slots.shape[0] == out_cos.shape[0] && (flat || slots.shape[1] == 2),
         "slot_mapping", shape_text(slots), "[" + text(out_cos.shape[0]) + (flat ? "]" : ", 2]"));
  const std::pair<const char*, const SoftnpuTensor*> all[] = {{"rope_cos", &cos},
                                                              {"rope_sin", &sin},
                                                              {"cu_seqlens", &a.cu_seqlens},
                                                              {"start_pos", &a.start_pos},
                                                              {"kv_block_table", &a.kv_block_table},
                                                              {"compress_cos", &out_cos},
                                                              {"compress_sin", &out_sin},
                                                              {"slot_mapping", &slots}};
  for (const auto& [name, tensor] : all) expect(contiguous(*tensor), name, "strides", "a contiguous tensor");
}

uint32_t one(int dtype) {
  return dtype == SOFTNPU_FLOAT32 ? 0x3F800000u : dtype == SOFTNPU_BFLOAT16 ? 0x3F80u : 0x3C00u;
}

}  // namespace
}  // namespace softnpu

using namespace softnpu;

extern "C" {

int softnpu_metadata_check(const SoftnpuMetadataArgs* args) {
  return checked([&] { check(*args); });
}

int softnpu_metadata_run(const SoftnpuMetadataArgs* args) {
  const SoftnpuMetadataArgs& a = *args;
  const int32_t* cu = static_cast<const int32_t*>(a.cu_seqlens.data);
  const int32_t* starts = static_cast<const int32_t*>(a.start_pos.data);
  const int32_t* table = static_cast<const int32_t*>(a.kv_block_table.data);
  int32_t* slots = static_cast<int32_t*>(a.slot_mapping.data);
  const int64_t rows = a.compress_cos.shape[0], dim = a.rope_cos.shape[1], columns = a.kv_block_table.shape[1];
  const int64_t size = a.rope_cos.dtype == SOFTNPU_FLOAT32 ? 4 : 2;
  const char* cos = static_cast<const char*>(a.rope_cos.data);
  const char* sin = static_cast<const char*>(a.rope_sin.data);
  char* out_cos = static_cast<char*>(a.compress_cos.data);
  char* out_sin = static_cast<char*>(a.compress_sin.data);
  const bool flat = a.slot_mapping_format == kFlat;
  const uint32_t unit = one(a.rope_cos.dtype);
  int64_t row = 0;

  auto invalid = [&] {
    for (int64_t i = 0; i < dim; ++i) std::memcpy(out_cos + (row * dim + i) * size, &unit, size);
    std::memset(out_sin + row * dim * size, 0, dim * size);
    if (flat) {
      slots[row] = -1;
    } else {
      slots[2 * row] = -1;
      slots[2 * row + 1] = static_cast<int32_t>(a.kv_block_size - 1);
    }
  };
  for (int64_t request = 0; request < a.num_reqs_actual; ++request) {
    const int64_t start = starts[request], length = static_cast<int64_t>(cu[request + 1]) - cu[request];
    if (start < 0 || length <= 0) continue;
    for (int64_t position = start / a.compress_ratio; position < (start + length) / a.compress_ratio && row < rows;
         ++position, ++row) {
      const int64_t column = position / a.kv_block_size, offset = position % a.kv_block_size;
      const int64_t rope_row = position * a.compress_ratio;
      const int64_t block = column < columns ? table[request * columns + column] : -1;
      if (block < 0 || rope_row >= a.rope_cos.shape[0] || (flat && block * a.kv_block_size + offset > INT32_MAX)) {
        invalid();
        continue;
      }
      std::memcpy(out_cos + row * dim * size, cos + rope_row * dim * size, dim * size);
      std::memcpy(out_sin + row * dim * size, sin + rope_row * dim * size, dim * size);
      if (flat) {
        slots[row] = static_cast<int32_t>(block * a.kv_block_size + offset);
      } else {
        slots[2 * row] = static_cast<int32_t>(block);
        slots[2 * row + 1] = static_cast<int32_t>(offset);
      }
    }
  }
  for (; row < rows; ++row) invalid();
  count(Stat::metadata_launches, 1);
  return SOFTNPU_OK;
}

}  // extern "C"
