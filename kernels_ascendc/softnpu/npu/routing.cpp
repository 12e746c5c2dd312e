// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Rows to the experts and back. Contracts: csrc/moe/moe_init_routing_custom of vllm-ascend 0.23.0 (adapter, tiling,
// kernels), and torch_npu's npu_moe_init_routing_v2, npu_moe_token_permute and npu_moe_token_unpermute. Rows of one
// expert keep the order of their tokens. An expert outside active_expert_range, or -1 where the range is not all
// experts, gets no row: its row index is -1, and the rows left over are poison. Left out: drop and pad, quantisation,
// counts as keys and values, padded_mode.
#include <numeric>

#include "operator.h"
#include "poison.h"

namespace softnpu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// ---------------------------------------------------------------------------------------------- init_routing

struct Range {
  int64_t first, last;
};
Range range_of(IntArrayRef active_expert_range, int64_t expert_num) {
  return active_expert_range.empty() ? Range{0, expert_num} : Range{active_expert_range[0], active_expert_range[1]};
}
int64_t rows_out(const Tensor& expert_idx, int64_t active_num) {
  return active_num > 0 ? std::min(expert_idx.numel(), active_num) : expert_idx.numel();
}

FourTensors init_routing(const char* name, const Tensor& x, const Tensor& expert_idx, const OptionalTensor& scale,
                         int64_t active_num, int64_t expert_num, int64_t expert_tokens_num_type,
                         bool expert_tokens_num_flag, IntArrayRef active_expert_range, int64_t row_idx_type) {
  const Range range = range_of(active_expert_range, expert_num);
  const bool all = range.first == 0 && range.last == expert_num;
  const int64_t k = expert_idx.size(1), rows = rows_out(expert_idx, active_num);
  const Tensor experts = expert_idx.contiguous();
  const int32_t* expert = experts.const_data_ptr<int32_t>();
  std::vector<int64_t> counts(range.last - range.first);
  std::vector<int64_t> order;
  for (int64_t i = 0; i < experts.numel(); ++i) {
    SOFTNPU_EXPECT(expert[i] >= (all ? 0 : -1) && expert[i] < expert_num, name,
                   c10::str("expert_idx[", i / k, ", ", i % k, "]"), expert[i], "an expert, 0 to ", expert_num - 1,
                   all ? "" : ", or -1");
    if (expert[i] < range.first || expert[i] >= range.last) continue;
    ++counts[expert[i] - range.first];
    order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return expert[a] < expert[b]; });

  Tensor expanded = poison({rows, x.size(1)}, x.options());
  Tensor expanded_scale = poison({rows}, x.options().dtype(at::kFloat));
  // Type 0 says where each source row went, type 1 where each row comes from.
  Tensor row_idx = row_idx_type == 0 ? at::full({experts.numel()}, -1, experts.options())
                                     : poison({experts.numel()}, experts.options());
  for (int64_t row = 0; row < static_cast<int64_t>(order.size()); ++row) {
    const int64_t source = order[row];
    row_idx.mutable_data_ptr<int32_t>()[row_idx_type == 0 ? source : row] =
        static_cast<int32_t>(row_idx_type == 0 ? row : source);
  }
  const int64_t filled = std::min(rows, static_cast<int64_t>(order.size()));
  Tensor sources = at::empty({filled}, experts.options().dtype(at::kLong));
  for (int64_t row = 0; row < filled; ++row) sources.mutable_data_ptr<int64_t>()[row] = order[row] / k;
  expanded.slice(0, 0, filled).copy_(x.index_select(0, sources));
  if (scale.has_value()) expanded_scale.slice(0, 0, filled).copy_(scale->index_select(0, sources));
  Tensor tokens = poison({static_cast<int64_t>(counts.size())}, x.options().dtype(at::kLong));
  if (expert_tokens_num_flag) {
    if (expert_tokens_num_type == 0) std::partial_sum(counts.begin(), counts.end(), counts.begin());
    std::copy(counts.begin(), counts.end(), tokens.mutable_data_ptr<int64_t>());
  }
  return {expanded, row_idx, tokens, expanded_scale};
}

FourTensors init_routing_meta(const char* name, const Tensor& x, const Tensor& expert_idx, const OptionalTensor& scale,
                              const OptionalTensor& offset, int64_t active_num, int64_t expert_num,
                              int64_t drop_pad_mode, int64_t expert_tokens_num_type, int64_t quant_mode,
                              IntArrayRef active_expert_range, int64_t row_idx_type) {
  SOFTNPU_EXPECT(x.dim() == 2, name, "x's dims", x.dim(), "2");
  SOFTNPU_EXPECT(expert_idx.dim() == 2, name, "expert_idx's dims", expert_idx.dim(), "2");
  SOFTNPU_EXPECT(x.size(0) == expert_idx.size(0), name, "expert_idx's rows", expert_idx.size(0), "those of x, ",
                 x.size(0));
  SOFTNPU_EXPECT(expert_idx.scalar_type() == at::kInt, name, "expert_idx's dtype", expert_idx.scalar_type(), "Int");
  const auto type = x.scalar_type();
  SOFTNPU_EXPECT(type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kChar, name,
                 "x's dtype", type, "Half, BFloat16, Float or Char");
  SOFTNPU_EXPECT(quant_mode == -1, name, "quant_mode", quant_mode,
                 "-1 (the software NPU does not quantise while it routes)");
  SOFTNPU_EXPECT(drop_pad_mode == 0, name, "drop_pad_mode", drop_pad_mode,
                 "0 (the software NPU has no drop and pad mode)");
  SOFTNPU_EXPECT(expert_tokens_num_type == 0 || expert_tokens_num_type == 1, name, "expert_tokens_num_type",
                 expert_tokens_num_type, "0 (sums) or 1 (counts); the software NPU has no keys and values");
  SOFTNPU_EXPECT(row_idx_type == 0 || row_idx_type == 1, name, "row_idx_type", row_idx_type, "0 or 1");
  SOFTNPU_EXPECT(active_num >= -1, name, "active_num", active_num, "at least -1");
  SOFTNPU_EXPECT(expert_num > 0, name, "expert_num", expert_num, "more than 0");
  SOFTNPU_EXPECT(active_expert_range.empty() || active_expert_range.size() == 2, name, "active_expert_range",
                 active_expert_range, "two numbers or none");
  const Range range = range_of(active_expert_range, expert_num);
  SOFTNPU_EXPECT(0 <= range.first && range.first < range.last && range.last <= expert_num && range.last <= 10240, name,
                 "active_expert_range", active_expert_range, "first < last, within 0 to expert_num, ", expert_num,
                 ", and to 10240");
  SOFTNPU_EXPECT(!offset.has_value(), name, "offset", "a tensor", "none without quantisation");
  if (scale.has_value()) {
    SOFTNPU_EXPECT(scale->dim() == 1 && scale->size(0) == x.size(0), name, "scale", scale->sizes(), "[", x.size(0),
                   "]");
    SOFTNPU_EXPECT(scale->scalar_type() == at::kFloat, name, "scale's dtype", scale->scalar_type(), "Float");
  }
  const int64_t rows = rows_out(expert_idx, active_num);
  return {at::empty({rows, x.size(1)}, x.options()), at::empty({expert_idx.numel()}, expert_idx.options()),
          at::empty({range.last - range.first}, x.options().dtype(at::kLong)),
          at::empty({rows}, x.options().dtype(at::kFloat))};
}

constexpr auto kCustom = "npu_moe_init_routing_custom";

FourTensors custom(const Tensor& x, const Tensor& expert_idx, const OptionalTensor& scale, const OptionalTensor&,
                   int64_t active_num, int64_t, int64_t expert_num, int64_t, int64_t expert_tokens_num_type,
                   bool expert_tokens_num_flag, int64_t, IntArrayRef active_expert_range, int64_t row_idx_type) {
  return init_routing(kCustom, x, expert_idx, scale, active_num, expert_num, expert_tokens_num_type,
                      expert_tokens_num_flag, active_expert_range, row_idx_type);
}

FourTensors custom_meta(const Tensor& x, const Tensor& expert_idx, const OptionalTensor& scale,
                        const OptionalTensor& offset, int64_t active_num, int64_t, int64_t expert_num,
                        int64_t drop_pad_mode, int64_t expert_tokens_num_type, bool, int64_t quant_mode,
                        IntArrayRef active_expert_range, int64_t row_idx_type) {
  return init_routing_meta(kCustom, x, expert_idx, scale, offset, active_num, expert_num, drop_pad_mode,
                           expert_tokens_num_type, quant_mode, active_expert_range, row_idx_type);
}

constexpr auto kV2 = "npu_moe_init_routing_v2";

FourTensors v2(const Tensor& x, const Tensor& expert_idx, const OptionalTensor& scale, const OptionalTensor&,
               int64_t active_num, int64_t, int64_t expert_num, int64_t, int64_t expert_tokens_num_type,
               bool expert_tokens_num_flag, int64_t, IntArrayRef active_expert_range, int64_t row_idx_type,
               std::optional<int64_t>) {
  return init_routing(kV2, x, expert_idx, scale, active_num, expert_num, expert_tokens_num_type, expert_tokens_num_flag,
                      active_expert_range, row_idx_type);
}

FourTensors v2_meta(const Tensor& x, const Tensor& expert_idx, const OptionalTensor& scale,
                    const OptionalTensor& offset, int64_t active_num, int64_t, int64_t expert_num,
                    int64_t drop_pad_mode, int64_t expert_tokens_num_type, bool, int64_t quant_mode,
                    IntArrayRef active_expert_range, int64_t row_idx_type, std::optional<int64_t> x_dtype) {
  SOFTNPU_EXPECT(!x_dtype.has_value(), kV2, "x_dtype", *x_dtype, "none without quantisation");
  return init_routing_meta(kV2, x, expert_idx, scale, offset, active_num, expert_num, drop_pad_mode,
                           expert_tokens_num_type, quant_mode, active_expert_range, row_idx_type);
}

// ---------------------------------------------------------------------------------------------- permute, unpermute

int64_t rows_permuted(const Tensor& indices, std::optional<int64_t> num_out_tokens) {
  const int64_t wanted = num_out_tokens.value_or(0);
  return wanted > 0 ? std::min(wanted, indices.numel()) : indices.numel() + wanted;
}

std::tuple<Tensor, Tensor> permute(const Tensor& tokens, const Tensor& indices, std::optional<int64_t> num_out_tokens,
                                   bool) {
  const int64_t k = indices.dim() == 2 ? indices.size(1) : 1;
  const Tensor order = at::argsort(indices.reshape(-1), /*stable=*/true, 0, /*descending=*/false);
  const Tensor sorted = at::empty_like(order).scatter_(0, order, at::arange(order.numel(), order.options()));
  const Tensor sources = at::div(order.slice(0, 0, rows_permuted(indices, num_out_tokens)), k, "floor");
  return {tokens.index_select(0, sources), sorted.to(at::kInt)};
}

std::tuple<Tensor, Tensor> permute_meta(const Tensor& tokens, const Tensor& indices,
                                        std::optional<int64_t> num_out_tokens, bool padded_mode) {
  constexpr auto kName = "npu_moe_token_permute";
  SOFTNPU_EXPECT(tokens.dim() == 2, kName, "tokens' dims", tokens.dim(), "2");
  SOFTNPU_EXPECT(indices.dim() == 1 || indices.dim() == 2, kName, "indices' dims", indices.dim(), "1 or 2");
  SOFTNPU_EXPECT(indices.size(0) == tokens.size(0), kName, "indices' rows", indices.size(0), "those of tokens, ",
                 tokens.size(0));
  SOFTNPU_EXPECT(indices.scalar_type() == at::kInt || indices.scalar_type() == at::kLong, kName, "indices' dtype",
                 indices.scalar_type(), "Int or Long");
  SOFTNPU_EXPECT(!padded_mode, kName, "padded_mode", "true", "false");
  const int64_t rows = rows_permuted(indices, num_out_tokens);
  SOFTNPU_EXPECT(rows >= 0, kName, "num_out_tokens", *num_out_tokens, "at least minus the number of indices");
  return {at::empty({rows, tokens.size(1)}, tokens.options()),
          at::empty({indices.numel()}, tokens.options().dtype(at::kInt))};
}

Tensor unpermute(const Tensor& permuted_tokens, const Tensor& sorted_indices, const OptionalTensor& probs, bool,
                 at::OptionalIntArrayRef) {
  const Tensor rows = sorted_indices.to(at::kLong).contiguous();
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const int64_t row = rows.const_data_ptr<int64_t>()[i];
    SOFTNPU_EXPECT(row >= 0 && row < permuted_tokens.size(0), "npu_moe_token_unpermute",
                   c10::str("sorted_indices[", i, "]"), row, "a row of permuted_tokens, 0 to ",
                   permuted_tokens.size(0) - 1);
  }
  const Tensor gathered = permuted_tokens.index_select(0, rows);
  if (!probs.has_value()) return gathered;
  const int64_t k = probs->size(1);
  const Tensor parts = gathered.to(at::kFloat).view({-1, k, permuted_tokens.size(1)});
  const Tensor weights = probs->to(at::kFloat).unsqueeze(2);
  // One by one, so that a token's sum does not depend on how many tokens there are.
  Tensor sum = at::zeros({parts.size(0), parts.size(2)}, parts.options());
  for (int64_t i = 0; i < k; ++i) sum += parts.select(1, i) * weights.select(1, i);
  return sum.to(permuted_tokens.scalar_type());
}

Tensor unpermute_meta(const Tensor& permuted_tokens, const Tensor& sorted_indices, const OptionalTensor& probs,
                      bool padded_mode, at::OptionalIntArrayRef) {
  constexpr auto kName = "npu_moe_token_unpermute";
  SOFTNPU_EXPECT(permuted_tokens.dim() == 2, kName, "permuted_tokens' dims", permuted_tokens.dim(), "2");
  SOFTNPU_EXPECT(sorted_indices.dim() == 1, kName, "sorted_indices' dims", sorted_indices.dim(), "1");
  SOFTNPU_EXPECT(sorted_indices.scalar_type() == at::kInt, kName, "sorted_indices' dtype", sorted_indices.scalar_type(),
                 "Int");
  SOFTNPU_EXPECT(!padded_mode, kName, "padded_mode", "true", "false");
  const auto type = permuted_tokens.scalar_type();
  SOFTNPU_EXPECT(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat, kName, "permuted_tokens' dtype",
                 type, "Half, BFloat16 or Float");
  int64_t tokens = sorted_indices.size(0);
  if (probs.has_value()) {
    SOFTNPU_EXPECT(probs->dim() == 2, kName, "probs' dims", probs->dim(), "2");
    SOFTNPU_EXPECT(probs->numel() == tokens, kName, "probs", probs->sizes(), "one for each of the ", tokens,
                   " sorted_indices");
    const auto kind = probs->scalar_type();
    SOFTNPU_EXPECT(kind == at::kHalf || kind == at::kBFloat16 || kind == at::kFloat, kName, "probs' dtype", kind,
                   "Half, BFloat16 or Float");
    tokens = probs->size(0);
  }
  return at::empty({tokens, permuted_tokens.size(1)}, permuted_tokens.options());
}

// What torch_npu calls where gradients are on: the second result is for the backward pass.
std::tuple<Tensor, Tensor> unpermute_for_backward(const Tensor& permuted_tokens, const Tensor& sorted_indices,
                                                  const OptionalTensor& probs, bool padded_mode,
                                                  at::OptionalIntArrayRef restore_shape) {
  return {unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape), permuted_tokens};
}

std::tuple<Tensor, Tensor> unpermute_for_backward_meta(const Tensor& permuted_tokens, const Tensor& sorted_indices,
                                                       const OptionalTensor& probs, bool padded_mode,
                                                       at::OptionalIntArrayRef restore_shape) {
  return {unpermute_meta(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape),
          at::empty_like(permuted_tokens)};
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  m.def(
      "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
      "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
      "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=0, "
      "int[2] active_expert_range=[], int row_idx_type=0) -> (Tensor, Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(_C_ascend, CPU, m) { m.impl("npu_moe_init_routing_custom", softnpu::custom); }
TORCH_LIBRARY_IMPL(_C_ascend, Meta, m) { m.impl("npu_moe_init_routing_custom", softnpu::custom_meta); }
TORCH_LIBRARY_IMPL(_C_ascend, PrivateUse1, m) { m.impl("npu_moe_init_routing_custom", softnpu::on_stream()); }
TORCH_LIBRARY_IMPL(npu, CPU, m) {
  m.impl("npu_moe_init_routing_v2", softnpu::v2);
  m.impl("npu_moe_token_permute", softnpu::permute);
  m.impl("npu_moe_token_unpermute", softnpu::unpermute);
  m.impl("_npu_moe_token_unpermute", softnpu::unpermute_for_backward);
}
TORCH_LIBRARY_IMPL(npu, Meta, m) {
  m.impl("npu_moe_init_routing_v2", softnpu::v2_meta);
  m.impl("npu_moe_token_permute", softnpu::permute_meta);
  m.impl("npu_moe_token_unpermute", softnpu::unpermute_meta);
  m.impl("_npu_moe_token_unpermute", softnpu::unpermute_for_backward_meta);
}
TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) {
  m.impl("npu_moe_init_routing_v2", softnpu::on_stream());
  m.impl("npu_moe_token_permute", softnpu::on_stream());
  m.impl("npu_moe_token_unpermute", softnpu::on_stream());
  m.impl("_npu_moe_token_unpermute", softnpu::on_stream());
}
