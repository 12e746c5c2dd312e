// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// A matrix product for each expert. Contract: torch_npu's npu_grouped_matmul in the one form that vllm-ascend uses
// without quantisation: one x [m, k], one weight [experts, k, n], group_type 0 (rows are grouped), split_item 2 or 3
// (one result), group_list on the device, of sums or counts. Products are float32, rounded once. Rows behind the last
// group are not computed: poison. Left out: all else, among it quantisation, activation and the overload with a host
// group_list, which raises by name.
#include "operator.h"
#include "poison.h"

namespace softnpu {
namespace {

using at::Tensor;
using at::TensorList;
using Tensors = std::optional<TensorList>;
using Int = std::optional<int64_t>;

constexpr auto kName = "npu_grouped_matmul";

bool given(Tensors tensors) { return tensors.has_value() && !tensors->empty(); }

std::vector<Tensor> grouped_matmul(TensorList xs, TensorList weights, Tensors bias, Tensors, Tensors, Tensors, Tensors,
                                   Tensors, const std::optional<Tensor>& group_list, Tensors, Tensors, Tensors, Int,
                                   Int, Int group_list_type, Int, at::OptionalIntArrayRef, Int, Int, Int, Int, Int) {
  const Tensor &x = xs[0], &weight = weights[0];
  const Tensor groups = group_list->contiguous();
  Tensor out = poison({x.size(0), weight.size(2)}, x.options());
  int64_t first = 0;
  for (int64_t expert = 0; expert < weight.size(0); ++expert) {
    const int64_t entry = groups.const_data_ptr<int64_t>()[expert];
    const bool counts = group_list_type.value_or(0) == 1;
    const int64_t last = counts ? first + entry : entry;
    SOFTNPU_EXPECT(last >= first && last <= x.size(0), kName, c10::str("group_list[", expert, "]"), entry,
                   counts ? "a count of 0 to " : "a sum of 0 to ", counts ? x.size(0) - first : x.size(0),
                   counts ? ", the rows left" : c10::str(", not below the one before, ", first));
    if (last > first) {
      Tensor product = at::mm(x.slice(0, first, last).to(at::kFloat), weight[expert].to(at::kFloat));
      if (given(bias)) product += (*bias)[0][expert].to(at::kFloat);
      out.slice(0, first, last).copy_(product);
    }
    first = last;
  }
  return {out};
}

std::vector<Tensor> grouped_matmul_meta(TensorList xs, TensorList weights, Tensors bias, Tensors scale, Tensors offset,
                                        Tensors antiquant_scale, Tensors antiquant_offset, Tensors per_token_scale,
                                        const std::optional<Tensor>& group_list, Tensors activation_input,
                                        Tensors activation_quant_scale, Tensors activation_quant_offset, Int split_item,
                                        Int group_type, Int group_list_type, Int act_type, at::OptionalIntArrayRef,
                                        Int output_dtype, Int x_dtype, Int weight_dtype, Int scale_dtype,
                                        Int per_token_scale_dtype) {
  const std::pair<const char*, const Tensors*> quantised[] = {{"scale", &scale},
                                                              {"offset", &offset},
                                                              {"antiquant_scale", &antiquant_scale},
                                                              {"antiquant_offset", &antiquant_offset},
                                                              {"per_token_scale", &per_token_scale},
                                                              {"activation_input", &activation_input},
                                                              {"activation_quant_scale", &activation_quant_scale},
                                                              {"activation_quant_offset", &activation_quant_offset}};
  for (const auto& [argument, value] : quantised)
    SOFTNPU_EXPECT(!given(*value), kName, argument, "tensors",
                   "none: the quantised and the activating variants are not on the software NPU");
  const std::pair<const char*, Int> types[] = {{"output_dtype", output_dtype},
                                               {"x_dtype", x_dtype},
                                               {"weight_dtype", weight_dtype},
                                               {"scale_dtype", scale_dtype},
                                               {"per_token_scale_dtype", per_token_scale_dtype}};
  for (const auto& [argument, value] : types)
    SOFTNPU_EXPECT(!value.has_value(), kName, argument, *value, "none: the result has x's dtype");
  SOFTNPU_EXPECT(act_type.value_or(0) == 0, kName, "act_type", *act_type, "0");
  SOFTNPU_EXPECT(xs.size() == 1 && weights.size() == 1, kName, "x and weight",
                 c10::str(xs.size(), " and ", weights.size(), " tensors"), "one tensor each");
  const Tensor &x = xs[0], &weight = weights[0];
  SOFTNPU_EXPECT(group_type.has_value() && *group_type == 0, kName, "group_type", group_type.value_or(-1), "0");
  const int64_t split = split_item.value_or(0);
  SOFTNPU_EXPECT(split == 2 || split == 3, kName, "split_item", split, "2 or 3: one result");
  const int64_t kind = group_list_type.value_or(0);
  SOFTNPU_EXPECT(kind == 0 || kind == 1, kName, "group_list_type", kind, "0 (sums) or 1 (counts)");
  SOFTNPU_EXPECT(x.dim() == 2, kName, "x's dims", x.dim(), "2");
  SOFTNPU_EXPECT(weight.dim() == 3 && weight.size(1) == x.size(1), kName, "weight", weight.sizes(), "[experts, ",
                 x.size(1), ", n]");
  const auto type = x.scalar_type();
  SOFTNPU_EXPECT(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat, kName, "x's dtype", type,
                 "Half, BFloat16 or Float");
  SOFTNPU_EXPECT(weight.scalar_type() == type, kName, "weight's dtype", weight.scalar_type(), "x's, ", type);
  SOFTNPU_EXPECT(group_list.has_value(), kName, "group_list", "none", "a tensor");
  SOFTNPU_EXPECT(group_list->scalar_type() == at::kLong, kName, "group_list's dtype", group_list->scalar_type(),
                 "Long");
  SOFTNPU_EXPECT(group_list->dim() == 1 && group_list->size(0) == weight.size(0) && weight.size(0) <= 1024, kName,
                 "group_list", group_list->sizes(), "one entry for each of the ", weight.size(0),
                 " experts, at most 1024");
  if (given(bias)) {
    const Tensor& b = (*bias)[0];
    SOFTNPU_EXPECT(bias->size() == 1 && b.dim() == 2 && b.size(0) == weight.size(0) && b.size(1) == weight.size(2),
                   kName, "bias", b.sizes(), "one tensor, [", weight.size(0), ", ", weight.size(2), "]");
    const auto expected = type == at::kBFloat16 ? at::kFloat : type;
    SOFTNPU_EXPECT(b.scalar_type() == expected, kName, "bias's dtype", b.scalar_type(), expected);
  }
  return {at::empty({x.size(0), weight.size(2)}, x.options())};
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_IMPL(npu, CPU, m) { m.impl("npu_grouped_matmul", softnpu::grouped_matmul); }
TORCH_LIBRARY_IMPL(npu, Meta, m) { m.impl("npu_grouped_matmul", softnpu::grouped_matmul_meta); }
TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) { m.impl("npu_grouped_matmul", softnpu::on_stream()); }
