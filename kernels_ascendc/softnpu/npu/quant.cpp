// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Dynamic quantisation. Contract: torch_npu's npu_dynamic_quant (input, smooth_scales) -> (y int8, scale float32): per
// token, that is per row of the last dim, scale = max |x| / 127 and y = x / scale, rounded half to even; a row of zeros
// has scale 0 and stays zero. Left out: other result types than int8, group_index, other modes than per token; they are
// refused.
#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kName = "npu_dynamic_quant";

std::tuple<Tensor, Tensor> dynamic_quant(const Tensor& input, const OptionalTensor& smooth_scales,
                                         const OptionalTensor&, std::optional<int64_t>, std::string_view, double) {
  Tensor x = input.to(at::kFloat);
  if (smooth_scales.has_value()) x = x * smooth_scales->to(at::kFloat);
  const Tensor scale = x.abs().amax({-1}) / 127.0;
  const Tensor divisor = scale.masked_fill(scale == 0, 1.0).unsqueeze(-1);
  const Tensor y = (x / divisor).round().clamp(-128, 127).nan_to_num(0.0).to(at::kChar);
  return {y, scale};
}

std::tuple<Tensor, Tensor> dynamic_quant_meta(const Tensor& input, const OptionalTensor& smooth_scales,
                                              const OptionalTensor& group_index, std::optional<int64_t> dst_type,
                                              std::string_view quant_mode, double) {
  SOFTNPU_EXPECT(input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16, kName, "input's dtype",
                 input.scalar_type(), "Half or BFloat16");
  SOFTNPU_EXPECT(input.dim() >= 2 && input.size(-1) > 0, kName, "input", input.sizes(), "two dims or more");
  SOFTNPU_EXPECT(!dst_type.has_value() || *dst_type == static_cast<int64_t>(at::kChar), kName, "dst_type", *dst_type,
                 "int8, the one that the software NPU has");
  SOFTNPU_EXPECT(quant_mode == "pertoken", kName, "quant_mode", quant_mode,
                 "pertoken, the one that the software NPU has");
  SOFTNPU_EXPECT(!group_index.has_value(), kName, "group_index", group_index->sizes(),
                 "None, the software NPU has no groups");
  SOFTNPU_EXPECT(!smooth_scales.has_value() || (smooth_scales->scalar_type() == input.scalar_type() &&
                                                smooth_scales->dim() == 1 && smooth_scales->size(0) == input.size(-1)),
                 kName, "smooth_scales", smooth_scales->sizes(), input.scalar_type(), " [", input.size(-1), "]");
  return {at::empty(input.sizes(), input.options().dtype(at::kChar)),
          at::empty(input.sizes().slice(0, input.dim() - 1), input.options().dtype(at::kFloat))};
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_IMPL(npu, CPU, m) { m.impl("npu_dynamic_quant", softnpu::dynamic_quant); }
TORCH_LIBRARY_IMPL(npu, Meta, m) { m.impl("npu_dynamic_quant", softnpu::dynamic_quant_meta); }
TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) { m.impl("npu_dynamic_quant", softnpu::on_stream()); }
