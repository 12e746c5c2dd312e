// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Attention of DeepSeek-V4 over shared KV. Contract: vllm-ascend's csrc/attention/sparse_attn_sharedkv (README, tiling,
// arch32 kernels): a query at position p sees the window [p - ori_win_left, p] of ori_kv, and of cmp_kv the entries
// below (p + 1) / cmp_ratio, all of them or, with cmp_sparse_indices, the first of its row's indices; one sink per head
// joins the softmax; a row before position 0 is zero; rows of no request are not written (here: NaN). Way: float32, in
// chunks of rows that see equally many entries, so that what a row gets depends on no other row but through at::bmm.
// Left out: BSND queries, KV without pages, softmax_lse; they are refused.
#include <ATen/Parallel.h>

#include <limits>

#include "paged.h"

namespace softnpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kName = "npu_sparse_attn_sharedkv";
constexpr int32_t kKind = 0x53415331;
constexpr int64_t kWidthStep = 64;         // how finely the number of compressed entries a row sees is rounded up
constexpr int64_t kRows = 128;             // rows of a chunk, at most
constexpr int64_t kChosenBytes = 2 << 20;  // of float32 KV that a chunk's indices choose, at most

const Limit kHeads("npu_sparse_attn_sharedkv.heads"), kHeadDim("npu_sparse_attn_sharedkv.head_dim"),
    kWindow("npu_sparse_attn_sharedkv.window"), kPage("npu_sparse_attn_sharedkv.page"),
    kTopk("npu_sparse_attn_sharedkv.topk"), kMetadata("npu_sparse_attn_sharedkv.metadata");

// Rows of a request that see equally many compressed entries, up to rounding.
struct Chunk {
  int64_t request, row, stop;
  int64_t position;  // of the first row
  int64_t width;     // compressed entries, rounded up
};

template <class T>
class Launch {
 public:
  Launch(const Tensor& q, const Tensor& ori_kv, const OptionalTensor& cmp_kv, const OptionalTensor& indices,
         const Tensor& ori_table, const OptionalTensor& cmp_table, const Tensor& sinks, double scale, int64_t ratio,
         int64_t window)
      : q_(q.to(at::kFloat).contiguous()),
        ori_(kName, "ori_kv", ori_kv, ori_table),
        cmp_(kName, "cmp_kv", cmp_kv ? *cmp_kv : ori_kv, cmp_table ? *cmp_table : ori_table),
        compressed_(cmp_kv.has_value()),
        indices_(indices ? indices->contiguous() : Tensor()),
        topk_(indices ? indices->size(-1) : 0),
        sinks_(sinks.view({1, -1, 1})),
        scale_(scale),
        ratio_(ratio),
        window_(window),
        heads_(q.size(1)),
        dim_(q.size(2)),
        out_(at::full(q.sizes(), std::numeric_limits<float>::quiet_NaN(), q.options())) {}

  // One parallel loop over chunks: within it every operator runs on one thread, the same way for every chunk.
  Tensor run(const Lengths& lengths) {
    std::vector<Chunk> chunks;
    for (int64_t b = 0; b < lengths.requests(); ++b) {
      const int64_t begin = lengths.begin(b), end = lengths.end(b), first = lengths.first(b);
      const int64_t row = std::min(end, begin - std::min<int64_t>(first, 0));
      out_.slice(0, begin, row).zero_();
      plan(b, row, end, first + row - begin, &chunks);
    }
    at::parallel_for(0, chunks.size(), 1, [&](int64_t from, int64_t to) {
      c10::InferenceMode guard;
      for (int64_t i = from; i < to; ++i) run_chunk(chunks[i]);
    });
    return out_;
  }

 private:
  int64_t visible(int64_t position) const {
    if (!compressed_) return 0;
    const int64_t all = (position + 1) / ratio_;
    return indices_.defined() ? std::min(all, topk_) : all;
  }
  int64_t width(int64_t position) const { return (visible(position) + kWidthStep - 1) / kWidthStep * kWidthStep; }

  void plan(int64_t b, int64_t row, int64_t end, int64_t position, std::vector<Chunk>* chunks) const {
    while (row < end) {
      Chunk chunk{b, row, row + 1, position, width(position)};
      const int64_t fit = indices_.defined() ? kChosenBytes / (std::max<int64_t>(chunk.width, 1) * dim_ * 4) : kRows;
      const int64_t limit = std::min(end, row + std::clamp<int64_t>(fit, 1, kRows));
      while (chunk.stop < limit && width(position + chunk.stop - row) == chunk.width) ++chunk.stop;
      chunks->push_back(chunk);
      position += chunk.stop - row;
      row = chunk.stop;
    }
  }

  void run_chunk(const Chunk& c) const {
    const int64_t rows = c.stop - c.row;
    const Tensor q = q_.slice(0, c.row, c.stop);
    const Tensor near = window_of(c);
    std::vector<Tensor> scores;
    scores.push_back(at::bmm(q, near.transpose(1, 2)).mul_(scale_));
    for (int64_t i = 0; i < rows && c.position + i < window_ - 1; ++i)
      scores[0].select(0, i).slice(1, 0, window_ - 1 - c.position - i).fill_(-kInfinity);
    Tensor far;
    if (c.width > 0) {
      far = indices_.defined() ? chosen(c) : in_order(c);
      scores.push_back(at::bmm(q, far.transpose(1, 2)).mul_(scale_));
      for (int64_t i = 0; i < rows; ++i)
        if (const int64_t seen = visible(c.position + i); seen < c.width)
          scores[1].select(0, i).slice(1, seen, c.width).fill_(-kInfinity);
    }
    scores.push_back(sinks_.expand({rows, heads_, 1}));
    const Tensor p = at::softmax(at::cat(scores, -1), -1);
    Tensor out = at::bmm(p.slice(2, 0, window_), near);
    if (c.width > 0) out.add_(at::bmm(p.slice(2, window_, window_ + c.width), far));
    out_.slice(0, c.row, c.stop).copy_(out);
  }

  // [rows, window, dim]: what each row sees of ori_kv, zero before the first token; the rows overlap in memory.
  Tensor window_of(const Chunk& c) const {
    const int64_t rows = c.stop - c.row, tokens = rows + window_ - 1, from = c.position - window_ + 1;
    const int64_t missing = std::max<int64_t>(0, -from);
    const Tensor kv = at::empty({tokens, dim_}, at::kFloat);
    kv.slice(0, 0, missing).zero_();
    ori_.copy(c.request, from + missing, tokens - missing, dim_, kv.mutable_data_ptr<float>() + missing * dim_);
    return kv.as_strided({rows, window_, dim_}, {dim_, dim_, 1});
  }

  // [rows, width, dim]: the first compressed entries, the same memory for every row.
  Tensor in_order(const Chunk& c) const {
    const int64_t seen = visible(c.position + c.stop - c.row - 1);
    const Tensor kv = at::empty({c.width, dim_}, at::kFloat);
    kv.slice(0, seen).zero_();
    cmp_.copy(c.request, 0, seen, dim_, kv.mutable_data_ptr<float>());
    return kv.expand({c.stop - c.row, c.width, dim_});
  }

  // [rows, width, dim]: the compressed entries that each row's indices choose.
  Tensor chosen(const Chunk& c) const {
    const Tensor kv = at::empty({c.stop - c.row, c.width, dim_}, at::kFloat);
    float* out = kv.mutable_data_ptr<float>();
    const int32_t* index = indices_.const_data_ptr<int32_t>() + c.row * topk_;
    for (int64_t i = 0; i < c.stop - c.row; ++i, index += topk_) {
      const int64_t seen = visible(c.position + i), below = (c.position + i + 1) / ratio_;
      for (int64_t j = 0; j < seen; ++j) {
        TORCH_CHECK(index[j] >= 0 && index[j] < below, kName, ": cmp_sparse_indices: entry ", j, " of row ", c.row + i,
                    " is ", index[j], ", the row sees ", below, " compressed entries");
        cmp_.copy(c.request, index[j], 1, dim_, out + (i * c.width + j) * dim_);
      }
      std::fill(out + (i * c.width + seen) * dim_, out + (i + 1) * c.width * dim_, 0.0f);
    }
    return kv;
  }

  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Tensor q_;
  const Pages<T> ori_, cmp_;
  const bool compressed_;
  const Tensor indices_;
  const int64_t topk_;
  const Tensor sinks_;
  const double scale_;
  const int64_t ratio_, window_, heads_, dim_;
  const Tensor out_;
};

std::tuple<Tensor, Tensor> attention(const Tensor& q, const OptionalTensor& ori_kv, const OptionalTensor& cmp_kv,
                                     const OptionalTensor&, const OptionalTensor& cmp_sparse_indices,
                                     const OptionalTensor& ori_block_table, const OptionalTensor& cmp_block_table,
                                     const OptionalTensor& cu_seqlens_q, const OptionalTensor&, const OptionalTensor&,
                                     const OptionalTensor&, const OptionalTensor& seqused_kv,
                                     const OptionalTensor& sinks, const OptionalTensor& metadata, double softmax_scale,
                                     int64_t cmp_ratio, int64_t, int64_t, int64_t ori_win_left, int64_t,
                                     std::string_view, std::string_view, bool) {
  const Lengths lengths(kName, *cu_seqlens_q, *seqused_kv, q.size(0));
  if (!kMetadata.waived()) Stamp{kName, kKind, q.size(1), cmp_ratio}.check(*metadata, *cu_seqlens_q, *seqused_kv);
  const auto run = [&](auto zero) {
    return Launch<decltype(zero)>(q, *ori_kv, cmp_kv, cmp_sparse_indices, *ori_block_table, cmp_block_table, *sinks,
                                  softmax_scale, cmp_ratio, ori_win_left + 1)
        .run(lengths);
  };
  const Tensor out = q.scalar_type() == at::kHalf ? run(at::Half{}) : run(at::BFloat16{});
  return {out, at::empty({0}, q.options().dtype(at::kFloat))};
}

std::string limited(const std::string& expected, const char* waiver) {
  return expected + " (limit of the stock operator; waiver '" + waiver + "')";
}

void check_pool(const char* name, const Tensor& pool, const OptionalTensor& table, const Tensor& q, int64_t requests) {
  SOFTNPU_EXPECT(pool.dim() == 4 && pool.size(2) == 1 && pool.size(3) == q.size(2), kName, name, pool.sizes(),
                 "[pages, page rows, 1, ", q.size(2), "]");
  SOFTNPU_EXPECT(pool.scalar_type() == q.scalar_type(), kName, name, pool.scalar_type(), "q's ", q.scalar_type());
  SOFTNPU_EXPECT(pool.numel() > 0, kName, name, pool.sizes(), "a pool with pages");
  SOFTNPU_EXPECT(pool.stride(3) == 1 && pool.stride(1) == pool.size(3), kName, name, pool.strides(),
                 "strides without gaps but on axis 0");
  SOFTNPU_EXPECT((pool.size(1) % 16 == 0 && pool.size(1) <= 1024) || kPage.waived(), kName, name, pool.size(1),
                 limited("pages of a multiple of 16 rows, at most 1024", "npu_sparse_attn_sharedkv.page"));
  SOFTNPU_EXPECT(table.has_value(), kName, name, "no block table", "one, for layout PA_ND");
  SOFTNPU_EXPECT(table->scalar_type() == at::kInt && table->dim() == 2 && table->size(0) == requests, kName, name,
                 table->sizes(), "a block table of int32 [", requests, " requests, pages]");
}

std::tuple<Tensor, Tensor> attention_meta(
    const Tensor& q, const OptionalTensor& ori_kv, const OptionalTensor& cmp_kv,
    const OptionalTensor& ori_sparse_indices, const OptionalTensor& cmp_sparse_indices,
    const OptionalTensor& ori_block_table, const OptionalTensor& cmp_block_table, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor& seqused_q, const OptionalTensor& seqused_kv,
    const OptionalTensor& sinks, const OptionalTensor& metadata, double, int64_t cmp_ratio, int64_t ori_mask_mode,
    int64_t cmp_mask_mode, int64_t ori_win_left, int64_t ori_win_right, std::string_view layout_q,
    std::string_view layout_kv, bool return_softmax_lse) {
  SOFTNPU_EXPECT(layout_q == "TND", kName, "layout_q", layout_q, "TND, the one that the software NPU has");
  SOFTNPU_EXPECT(layout_kv == "PA_ND", kName, "layout_kv", layout_kv, "PA_ND, the one that the software NPU has");
  SOFTNPU_EXPECT(!return_softmax_lse, kName, "return_softmax_lse", "True", "False");
  SOFTNPU_EXPECT(q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, kName, "q's dtype", q.scalar_type(),
                 "Half or BFloat16");
  SOFTNPU_EXPECT(q.dim() == 3 && q.numel() > 0, kName, "q", q.sizes(), "[rows, heads, head_dim], not empty");
  SOFTNPU_EXPECT(q.size(1) % 4 == 0 || kHeads.waived(), kName, "q's heads", q.size(1),
                 limited("a multiple of 4", "npu_sparse_attn_sharedkv.heads"));
  SOFTNPU_EXPECT(q.size(2) == 512 || kHeadDim.waived(), kName, "head_dim", q.size(2),
                 limited("512", "npu_sparse_attn_sharedkv.head_dim"));
  SOFTNPU_EXPECT(cu_seqlens_q.has_value() && cu_seqlens_q->dim() == 1 && cu_seqlens_q->numel() > 1 &&
                     cu_seqlens_q->scalar_type() == at::kInt,
                 kName, "cu_seqlens_q", cu_seqlens_q ? cu_seqlens_q->sizes() : at::IntArrayRef{},
                 "int32 [requests + 1], for layout TND");
  const int64_t requests = cu_seqlens_q->numel() - 1;
  SOFTNPU_EXPECT(seqused_kv.has_value() && seqused_kv->dim() == 1 && seqused_kv->numel() == requests &&
                     seqused_kv->scalar_type() == at::kInt,
                 kName, "seqused_kv", seqused_kv ? seqused_kv->sizes() : at::IntArrayRef{}, "int32 [", requests, "]");
  SOFTNPU_EXPECT(!seqused_q.has_value(), kName, "seqused_q", seqused_q->sizes(), "None, for layout TND");
  SOFTNPU_EXPECT(!ori_sparse_indices.has_value(), kName, "ori_sparse_indices", ori_sparse_indices->sizes(), "None");
  SOFTNPU_EXPECT(ori_kv.has_value(), kName, "ori_kv", "None", "a pool");
  check_pool("ori_kv", *ori_kv, ori_block_table, q, requests);
  if (cmp_kv.has_value()) {
    check_pool("cmp_kv", *cmp_kv, cmp_block_table, q, requests);
    SOFTNPU_EXPECT(cmp_ratio == 4 || cmp_ratio == 128, kName, "cmp_ratio", cmp_ratio, "4 or 128");
  }
  if (cmp_sparse_indices.has_value()) {
    SOFTNPU_EXPECT(cmp_kv.has_value(), kName, "cmp_kv", "None", "a pool, for cmp_sparse_indices");
    SOFTNPU_EXPECT(cmp_sparse_indices->scalar_type() == at::kInt && cmp_sparse_indices->dim() == 3 &&
                       cmp_sparse_indices->size(0) == q.size(0) && cmp_sparse_indices->size(1) == 1 &&
                       cmp_sparse_indices->size(2) > 0,
                   kName, "cmp_sparse_indices", cmp_sparse_indices->sizes(), "int32 [", q.size(0), ", 1, topk]");
    const int64_t topk = cmp_sparse_indices->size(2);
    SOFTNPU_EXPECT(topk == 512 || topk == 1024 || kTopk.waived(), kName, "cmp_sparse_indices' topk", topk,
                   limited("512 or 1024", "npu_sparse_attn_sharedkv.topk"));
  }
  SOFTNPU_EXPECT(
      sinks.has_value() && sinks->scalar_type() == at::kFloat && sinks->dim() == 1 && sinks->numel() == q.size(1),
      kName, "sinks", sinks ? sinks->sizes() : at::IntArrayRef{}, "float32 [", q.size(1), " heads]");
  SOFTNPU_EXPECT(metadata.has_value() && metadata->scalar_type() == at::kInt && metadata->numel() == Stamp::kSize,
                 kName, "metadata", metadata ? metadata->sizes() : at::IntArrayRef{}, "int32 [", Stamp::kSize,
                 "], of npu_sparse_attn_sharedkv_metadata");
  SOFTNPU_EXPECT(ori_mask_mode == 4, kName, "ori_mask_mode", ori_mask_mode, "4");
  SOFTNPU_EXPECT(cmp_mask_mode == 3, kName, "cmp_mask_mode", cmp_mask_mode, "3");
  SOFTNPU_EXPECT(ori_win_left == 127 || (kWindow.waived() && ori_win_left >= 0), kName, "ori_win_left", ori_win_left,
                 limited("127", "npu_sparse_attn_sharedkv.window"));
  SOFTNPU_EXPECT(ori_win_right == 0, kName, "ori_win_right", ori_win_right, "0");
  return {at::empty(q.sizes(), q.options()), at::empty({0}, q.options().dtype(at::kFloat))};
}

Tensor metadata(int64_t num_heads_q, int64_t, int64_t, const OptionalTensor& cu_seqlens_q, const OptionalTensor&,
                const OptionalTensor&, const OptionalTensor&, const OptionalTensor& seqused_kv, int64_t, int64_t,
                int64_t, int64_t, int64_t, int64_t cmp_ratio, int64_t, int64_t, int64_t, int64_t, std::string_view,
                std::string_view, bool, bool, std::string_view) {
  return Stamp{kName, kKind, num_heads_q, cmp_ratio}.make(*cu_seqlens_q, *seqused_kv);
}

Tensor metadata_meta(int64_t, int64_t num_heads_kv, int64_t, const OptionalTensor& cu_seqlens_q, const OptionalTensor&,
                     const OptionalTensor&, const OptionalTensor&, const OptionalTensor& seqused_kv, int64_t batch_size,
                     int64_t, int64_t, int64_t, int64_t, int64_t, int64_t ori_mask_mode, int64_t cmp_mask_mode, int64_t,
                     int64_t ori_win_right, std::string_view layout_q, std::string_view layout_kv, bool, bool,
                     std::string_view) {
  constexpr const char* kName = "npu_sparse_attn_sharedkv_metadata";
  SOFTNPU_EXPECT(layout_q == "TND", kName, "layout_q", layout_q, "TND, the one that the software NPU has");
  SOFTNPU_EXPECT(layout_kv == "PA_ND", kName, "layout_kv", layout_kv, "PA_ND, the one that the software NPU has");
  SOFTNPU_EXPECT(num_heads_kv == 1, kName, "num_heads_kv", num_heads_kv, "1");
  SOFTNPU_EXPECT(seqused_kv.has_value() && seqused_kv->dim() == 1 && seqused_kv->scalar_type() == at::kInt &&
                     seqused_kv->numel() == batch_size,
                 kName, "seqused_kv", seqused_kv ? seqused_kv->sizes() : at::IntArrayRef{}, "int32 [", batch_size, "]");
  SOFTNPU_EXPECT(cu_seqlens_q.has_value() && cu_seqlens_q->dim() == 1 && cu_seqlens_q->scalar_type() == at::kInt &&
                     cu_seqlens_q->numel() == batch_size + 1,
                 kName, "cu_seqlens_q", cu_seqlens_q ? cu_seqlens_q->sizes() : at::IntArrayRef{}, "int32 [",
                 batch_size + 1, "]");
  SOFTNPU_EXPECT(ori_mask_mode == 4, kName, "ori_mask_mode", ori_mask_mode, "4");
  SOFTNPU_EXPECT(cmp_mask_mode == 3, kName, "cmp_mask_mode", cmp_mask_mode, "3");
  SOFTNPU_EXPECT(ori_win_right == 0, kName, "ori_win_right", ori_win_right, "0");
  return at::empty({Stamp::kSize}, cu_seqlens_q->options().dtype(at::kInt));
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  m.def(
      "npu_sparse_attn_sharedkv(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, "
      "Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, "
      "Tensor? cmp_block_table=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, "
      "Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, Tensor? seqused_kv=None, Tensor? sinks=None, "
      "Tensor? metadata=None, float softmax_scale=0, int cmp_ratio=0, int ori_mask_mode=4, int cmp_mask_mode=3, "
      "int ori_win_left=128, int ori_win_right=0, str layout_q=\"BSND\", str layout_kv=\"PA_ND\", "
      "bool return_softmax_lse=False) -> (Tensor out, Tensor softmax_lse)");
  m.def(
      "npu_sparse_attn_sharedkv_metadata(int num_heads_q, int num_heads_kv, int head_dim, Tensor? cu_seqlens_q=None, "
      "Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, Tensor? seqused_q=None, "
      "Tensor? seqused_kv=None, int batch_size=0, int max_seqlen_q=0, int max_seqlen_kv=0, int ori_topk=0, "
      "int cmp_topk=0, int cmp_ratio=4, int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=128, "
      "int ori_win_right=0, str layout_q=\"BSND\", str layout_kv=\"PA_ND\", bool has_ori_kv=True, "
      "bool has_cmp_kv=True, str device=\"npu\") -> (Tensor metadata)");
}
TORCH_LIBRARY_IMPL(_C_ascend, CPU, m) {
  m.impl("npu_sparse_attn_sharedkv", softnpu::attention);
  m.impl("npu_sparse_attn_sharedkv_metadata", softnpu::metadata);
}
TORCH_LIBRARY_IMPL(_C_ascend, Meta, m) {
  m.impl("npu_sparse_attn_sharedkv", softnpu::attention_meta);
  m.impl("npu_sparse_attn_sharedkv_metadata", softnpu::metadata_meta);
}
TORCH_LIBRARY_IMPL(_C_ascend, PrivateUse1, m) {
  m.impl("npu_sparse_attn_sharedkv", softnpu::on_stream());
  m.impl("npu_sparse_attn_sharedkv_metadata", softnpu::on_stream());
}
