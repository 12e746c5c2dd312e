// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The indexer of DeepSeek-V4's C4 layers. Contract: vllm-ascend's csrc/attention/vllm_quant_lightning_indexer (README,
// tiling, arch32 kernel): a query at position p scores the compressed keys below (p + 1) / cmp_ratio (sparse_mode 3)
// with scale_k * sum over heads of weight * relu(scale_q * q.k), and gets the indices of the sparse_count best, then
// -1; rows of no request are not written (here: 0x5A bytes). Way: q.k of int8 is exact in float32, the rest is float32
// in a fixed order, so that a row's result depends on nothing but the row; best first, of equals the lowest index. In
// chunks of rows, so that the scores of one chunk are bounded. Left out: BSND queries, keys without pages, values; they
// are refused.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "paged.h"

namespace softnpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kName = "npu_vllm_quant_lightning_indexer";
constexpr int32_t kKind = 0x514C4931;
constexpr int64_t kChunkRows = 64, kChunkKeys = 1024;
constexpr int64_t kChunkScores = 1 << 20;  // of one chunk, for bounded memory

const Limit kHeads("npu_vllm_quant_lightning_indexer.heads"), kHeadDim("npu_vllm_quant_lightning_indexer.head_dim"),
    kPage("npu_vllm_quant_lightning_indexer.page"), kMetadata("npu_vllm_quant_lightning_indexer.metadata");

// Orders by score, then by the lower index: the greater the better.
uint64_t rank(float score, int64_t index) {
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(index));
}

// The `count` best of `scores`, best first.
void best_of(const float* scores, int64_t seen, int64_t count, int32_t* out) {
  std::vector<uint64_t> ranks(seen);
  for (int64_t i = 0; i < seen; ++i) ranks[i] = rank(scores[i] == 0 ? 0.0f : scores[i], i);  // -0 is 0
  const int64_t kept = std::min(seen, count);
  if (kept < seen) std::nth_element(ranks.begin(), ranks.begin() + kept, ranks.end(), std::greater<>());
  std::sort(ranks.begin(), ranks.begin() + kept, std::greater<>());
  for (int64_t i = 0; i < kept; ++i) out[i] = static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(ranks[i]));
  std::fill(out + kept, out + count, -1);
}

struct Chunk {
  int64_t request, row, stop;
  int64_t position;  // of the first row
  int64_t keys;      // that any row can see
};

std::tuple<Tensor, Tensor> indexer(const Tensor& query, const Tensor& key, const Tensor& weights,
                                   const Tensor& query_dequant_scale, const Tensor& key_dequant_scale, int64_t, int64_t,
                                   const OptionalTensor& actual_seq_lengths_query,
                                   const OptionalTensor& actual_seq_lengths_key, const OptionalTensor& block_table,
                                   const OptionalTensor& metadata, std::string_view, std::string_view,
                                   int64_t sparse_count, int64_t sparse_mode, int64_t, int64_t, int64_t cmp_ratio,
                                   bool) {
  const int64_t heads = query.size(1), dim = query.size(2);
  const Lengths lengths(kName, *actual_seq_lengths_query, *actual_seq_lengths_key, query.size(0));
  if (!kMetadata.waived()) {
    const Tensor& ends = *actual_seq_lengths_query;
    Stamp{kName, kKind, heads, cmp_ratio}.check(*metadata, ends.slice(0, ends.numel() - lengths.requests()),
                                                *actual_seq_lengths_key);
  }
  const Pages<int8_t> keys(kName, "key", key, *block_table);
  const Pages<at::Half> scales(kName, "key_dequant_scale", key_dequant_scale, *block_table);
  const Tensor q = query.to(at::kFloat).contiguous();
  const Tensor w = (weights.to(at::kFloat) * query_dequant_scale.to(at::kFloat)).contiguous();
  const Tensor out = at::full({query.size(0), 1, sparse_count}, 0x5A5A5A5A, at::kInt);
  const float* weight = w.const_data_ptr<float>();
  int32_t* indices = out.mutable_data_ptr<int32_t>();

  std::vector<Chunk> chunks;
  for (int64_t b = 0; b < lengths.requests(); ++b) {
    const int64_t all = lengths.length(b) / cmp_ratio, begin = lengths.begin(b), end = lengths.end(b);
    const int64_t step = std::clamp<int64_t>(kChunkScores / std::max<int64_t>(all, 1), 1, kChunkRows);
    for (int64_t row = begin; row < end; row += step)
      chunks.push_back({b, row, std::min(end, row + step), lengths.first(b) + row - begin, all});
  }
  const auto run_chunk = [&](const Chunk& c) {
    const int64_t rows = c.stop - c.row;
    const auto seen = [&](int64_t i) {
      return sparse_mode == 0 ? c.keys : std::max<int64_t>(0, (c.position + i + 1) / cmp_ratio);
    };
    const int64_t most = seen(rows - 1);  // of the keys, no row sees one beyond
    std::vector<float> scores(rows * most), scale(kChunkKeys);
    const Tensor k = at::empty({kChunkKeys, dim}, at::kFloat);
    for (int64_t from = 0; from < most; from += kChunkKeys) {
      const int64_t count = std::min(kChunkKeys, most - from);
      keys.copy(c.request, from, count, dim, k.mutable_data_ptr<float>());
      scales.copy(c.request, from, count, 1, scale.data());
      const Tensor dots = at::mm(q.slice(0, c.row, c.stop).reshape({-1, dim}), k.slice(0, 0, count).t());
      const float* dot = dots.const_data_ptr<float>();
      for (int64_t i = 0; i < rows; ++i) {
        float* score = scores.data() + i * most + from;
        for (int64_t h = 0; h < heads; ++h, dot += count) {
          const float factor = weight[(c.row + i) * heads + h];
          for (int64_t j = 0; j < count; ++j) score[j] += factor * std::max(dot[j], 0.0f);
        }
        for (int64_t j = 0; j < count; ++j) score[j] *= scale[j];
      }
    }
    for (int64_t i = 0; i < rows; ++i)
      best_of(scores.data() + i * most, seen(i), sparse_count, indices + (c.row + i) * sparse_count);
  };
  at::parallel_for(0, chunks.size(), 1, [&](int64_t from, int64_t to) {
    c10::InferenceMode guard;
    for (int64_t i = from; i < to; ++i) run_chunk(chunks[i]);
  });
  return {out, at::empty({0}, at::kFloat)};
}

std::string limited(const std::string& expected, const char* waiver) {
  return expected + " (limit of the stock operator; waiver '" + waiver + "')";
}

void check_attributes(const char* name, int64_t query_quant_mode, int64_t key_quant_mode, std::string_view layout_query,
                      std::string_view layout_key, int64_t sparse_count, int64_t sparse_mode, int64_t pre_tokens,
                      int64_t next_tokens, int64_t cmp_ratio) {
  SOFTNPU_EXPECT(layout_query == "TND", name, "layout_query", layout_query, "TND, the one that the software NPU has");
  SOFTNPU_EXPECT(layout_key == "PA_BSND", name, "layout_key", layout_key, "PA_BSND");
  SOFTNPU_EXPECT(query_quant_mode == 0, name, "query_quant_mode", query_quant_mode, "0");
  SOFTNPU_EXPECT(key_quant_mode == 0, name, "key_quant_mode", key_quant_mode, "0");
  SOFTNPU_EXPECT(sparse_count > 0 && sparse_count <= 2048, name, "sparse_count", sparse_count, "1 to 2048");
  SOFTNPU_EXPECT(sparse_mode == 0 || sparse_mode == 3, name, "sparse_mode", sparse_mode, "0 or 3");
  SOFTNPU_EXPECT(pre_tokens == INT64_MAX, name, "pre_tokens", pre_tokens, INT64_MAX);
  SOFTNPU_EXPECT(next_tokens == INT64_MAX, name, "next_tokens", next_tokens, INT64_MAX);
  SOFTNPU_EXPECT(cmp_ratio > 0 && cmp_ratio <= 128 && (cmp_ratio & (cmp_ratio - 1)) == 0, name, "cmp_ratio", cmp_ratio,
                 "a power of 2 from 1 to 128");
}

std::tuple<Tensor, Tensor> indexer_meta(const Tensor& query, const Tensor& key, const Tensor& weights,
                                        const Tensor& query_dequant_scale, const Tensor& key_dequant_scale,
                                        int64_t query_quant_mode, int64_t key_quant_mode,
                                        const OptionalTensor& actual_seq_lengths_query,
                                        const OptionalTensor& actual_seq_lengths_key, const OptionalTensor& block_table,
                                        const OptionalTensor& metadata, std::string_view layout_query,
                                        std::string_view layout_key, int64_t sparse_count, int64_t sparse_mode,
                                        int64_t pre_tokens, int64_t next_tokens, int64_t cmp_ratio, bool return_value) {
  check_attributes(kName, query_quant_mode, key_quant_mode, layout_query, layout_key, sparse_count, sparse_mode,
                   pre_tokens, next_tokens, cmp_ratio);
  SOFTNPU_EXPECT(!return_value, kName, "return_value", "True", "False");
  SOFTNPU_EXPECT(query.scalar_type() == at::kChar && key.scalar_type() == at::kChar, kName, "query and key's dtypes",
                 query.scalar_type(), "Char, found for key ", key.scalar_type());
  SOFTNPU_EXPECT(query.dim() == 3 && query.numel() > 0, kName, "query", query.sizes(),
                 "[rows, heads, head_dim], not empty");
  const int64_t rows = query.size(0), heads = query.size(1), dim = query.size(2);
  SOFTNPU_EXPECT(heads == 64 || kHeads.waived(), kName, "query's heads", heads,
                 limited("64", "npu_vllm_quant_lightning_indexer.heads"));
  SOFTNPU_EXPECT(dim == 128 || kHeadDim.waived(), kName, "head_dim", dim,
                 limited("128", "npu_vllm_quant_lightning_indexer.head_dim"));
  SOFTNPU_EXPECT(key.dim() == 4 && key.numel() > 0 && key.size(2) == 1 && key.size(3) == dim, kName, "key", key.sizes(),
                 "[pages, page rows, 1, ", dim, "]");
  SOFTNPU_EXPECT((key.size(1) % 16 == 0 && key.size(1) <= 1024) || kPage.waived(), kName, "key", key.size(1),
                 limited("pages of a multiple of 16 rows, at most 1024", "npu_vllm_quant_lightning_indexer.page"));
  SOFTNPU_EXPECT(key.stride(3) == 1 && key.stride(1) == dim, kName, "key", key.strides(),
                 "strides without gaps but on axis 0");
  SOFTNPU_EXPECT(
      weights.scalar_type() == at::kHalf && weights.dim() == 2 && weights.size(0) == rows && weights.size(1) == heads,
      kName, "weights", weights.sizes(), "float16 [", rows, ", ", heads, "]");
  SOFTNPU_EXPECT(query_dequant_scale.scalar_type() == at::kHalf && query_dequant_scale.sizes() == weights.sizes(),
                 kName, "query_dequant_scale", query_dequant_scale.sizes(), "float16 ", weights.sizes());
  SOFTNPU_EXPECT(key_dequant_scale.scalar_type() == at::kHalf && key_dequant_scale.sizes() == key.sizes().slice(0, 3),
                 kName, "key_dequant_scale", key_dequant_scale.sizes(), "float16 ", key.sizes().slice(0, 3));
  SOFTNPU_EXPECT(key_dequant_scale.stride(1) == 1, kName, "key_dequant_scale", key_dequant_scale.strides(),
                 "strides without gaps but on axis 0");
  SOFTNPU_EXPECT(actual_seq_lengths_key.has_value() && actual_seq_lengths_key->scalar_type() == at::kInt &&
                     actual_seq_lengths_key->dim() == 1 && actual_seq_lengths_key->numel() > 0,
                 kName, "actual_seq_lengths_key",
                 actual_seq_lengths_key ? actual_seq_lengths_key->sizes() : at::IntArrayRef{}, "int32 [requests]");
  const int64_t requests = actual_seq_lengths_key->numel();
  SOFTNPU_EXPECT(
      actual_seq_lengths_query.has_value() && actual_seq_lengths_query->scalar_type() == at::kInt &&
          actual_seq_lengths_query->dim() == 1 &&
          (actual_seq_lengths_query->numel() == requests || actual_seq_lengths_query->numel() == requests + 1),
      kName, "actual_seq_lengths_query",
      actual_seq_lengths_query ? actual_seq_lengths_query->sizes() : at::IntArrayRef{}, "int32 prefix sums of ",
      requests, " requests, with their leading 0 or without it");
  SOFTNPU_EXPECT(block_table.has_value() && block_table->scalar_type() == at::kInt && block_table->dim() == 2 &&
                     block_table->size(0) == requests,
                 kName, "block_table", block_table ? block_table->sizes() : at::IntArrayRef{}, "int32 [", requests,
                 " requests, pages]");
  SOFTNPU_EXPECT(metadata.has_value() && metadata->scalar_type() == at::kInt && metadata->numel() == Stamp::kSize,
                 kName, "metadata", metadata ? metadata->sizes() : at::IntArrayRef{}, "int32 [", Stamp::kSize,
                 "], of npu_vllm_quant_lightning_indexer_metadata");
  return {at::empty({rows, 1, sparse_count}, query.options().dtype(at::kInt)),
          at::empty({0}, query.options().dtype(at::kFloat))};
}

Tensor metadata(int64_t num_heads_q, int64_t, int64_t, int64_t, int64_t, const OptionalTensor& actual_seq_lengths_query,
                const OptionalTensor& actual_seq_lengths_key, int64_t, int64_t, int64_t, std::string_view,
                std::string_view, int64_t, int64_t, int64_t, int64_t, int64_t cmp_ratio, std::string_view) {
  return Stamp{kName, kKind, num_heads_q, cmp_ratio}.make(*actual_seq_lengths_query, *actual_seq_lengths_key);
}

Tensor metadata_meta(int64_t, int64_t num_heads_k, int64_t, int64_t query_quant_mode, int64_t key_quant_mode,
                     const OptionalTensor& actual_seq_lengths_query, const OptionalTensor& actual_seq_lengths_key,
                     int64_t batch_size, int64_t, int64_t, std::string_view layout_query, std::string_view layout_key,
                     int64_t sparse_count, int64_t sparse_mode, int64_t pre_tokens, int64_t next_tokens,
                     int64_t cmp_ratio, std::string_view) {
  constexpr const char* kName = "npu_vllm_quant_lightning_indexer_metadata";
  check_attributes(kName, query_quant_mode, key_quant_mode, layout_query, layout_key, sparse_count, sparse_mode,
                   pre_tokens, next_tokens, cmp_ratio);
  SOFTNPU_EXPECT(num_heads_k == 1, kName, "num_heads_k", num_heads_k, "1");
  for (const auto& [name, lengths] : {std::pair("actual_seq_lengths_query", &actual_seq_lengths_query),
                                      std::pair("actual_seq_lengths_key", &actual_seq_lengths_key)})
    SOFTNPU_EXPECT(lengths->has_value() && (*lengths)->dim() == 1 && (*lengths)->numel() == batch_size &&
                       (*lengths)->scalar_type() == at::kInt,
                   kName, name, lengths->has_value() ? (*lengths)->sizes() : at::IntArrayRef{}, "int32 [", batch_size,
                   "]");
  return at::empty({Stamp::kSize}, actual_seq_lengths_key->options().dtype(at::kInt));
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  m.def(
      "npu_vllm_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
      "Tensor key_dequant_scale, int query_quant_mode=0, int key_quant_mode=0, Tensor? actual_seq_lengths_query=None, "
      "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, Tensor? metadata=None, "
      "str layout_query=\"BSND\", str layout_key=\"BSND\", int sparse_count=2048, int sparse_mode=3, "
      "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int cmp_ratio=1, "
      "bool return_value=False) -> (Tensor sparse_indices, Tensor sparse_values)");
  m.def(
      "npu_vllm_quant_lightning_indexer_metadata(int num_heads_q, int num_heads_k, int head_dim, int query_quant_mode, "
      "int key_quant_mode, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
      "int batch_size=0, int max_seqlen_q=0, int max_seqlen_k=0, str layout_query=\"BSND\", "
      "str layout_key=\"BSND\", int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, "
      "int next_tokens=9223372036854775807, int cmp_ratio=1, str device=\"npu\") -> (Tensor metadata)");
}
TORCH_LIBRARY_IMPL(_C_ascend, CPU, m) {
  m.impl("npu_vllm_quant_lightning_indexer", softnpu::indexer);
  m.impl("npu_vllm_quant_lightning_indexer_metadata", softnpu::metadata);
}
TORCH_LIBRARY_IMPL(_C_ascend, Meta, m) {
  m.impl("npu_vllm_quant_lightning_indexer", softnpu::indexer_meta);
  m.impl("npu_vllm_quant_lightning_indexer_metadata", softnpu::metadata_meta);
}
TORCH_LIBRARY_IMPL(_C_ascend, PrivateUse1, m) {
  m.impl("npu_vllm_quant_lightning_indexer", softnpu::on_stream());
  m.impl("npu_vllm_quant_lightning_indexer_metadata", softnpu::on_stream());
}
