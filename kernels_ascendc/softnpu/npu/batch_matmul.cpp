// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Batched matrix product with its transpositions. Contract: torch_npu's npu_transpose_batchmatmul: permute(bmm(
// permute(input, perm_x1), permute(weight, perm_x2)), perm_y), accumulated in float32, one rounding at the end. Left
// out: bias (the device has none either), scale (an int8 result) and batch_split_factor other than 1; they are refused.
#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kName = "npu_transpose_batchmatmul";

std::vector<int64_t> or_default(at::OptionalIntArrayRef given, std::vector<int64_t> otherwise) {
  return given.has_value() ? given->vec() : otherwise;
}

Tensor transpose_batchmatmul(const Tensor& input, const Tensor& weight, const OptionalTensor&, const OptionalTensor&,
                             at::OptionalIntArrayRef perm_x1, at::OptionalIntArrayRef perm_x2,
                             at::OptionalIntArrayRef perm_y, std::optional<int64_t>) {
  const Tensor x = input.permute(or_default(perm_x1, {0, 1, 2})).to(at::kFloat);
  const Tensor w = weight.permute(or_default(perm_x2, {0, 1, 2})).to(at::kFloat);
  return at::bmm(x, w).permute(or_default(perm_y, {1, 0, 2})).contiguous().to(input.scalar_type());
}

Tensor transpose_batchmatmul_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                                  const OptionalTensor& scale, at::OptionalIntArrayRef perm_x1,
                                  at::OptionalIntArrayRef perm_x2, at::OptionalIntArrayRef perm_y,
                                  std::optional<int64_t> batch_split_factor) {
  const auto x1 = or_default(perm_x1, {0, 1, 2}), x2 = or_default(perm_x2, {0, 1, 2}),
             y = or_default(perm_y, {1, 0, 2});
  using Dims = std::vector<int64_t>;
  SOFTNPU_EXPECT(
      input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16 || input.scalar_type() == at::kFloat,
      kName, "input's dtype", input.scalar_type(), "Half, BFloat16 or Float");
  SOFTNPU_EXPECT(weight.scalar_type() == input.scalar_type(), kName, "weight's dtype", weight.scalar_type(), "input's ",
                 input.scalar_type());
  SOFTNPU_EXPECT(input.dim() == 3 && weight.dim() == 3, kName, "input and weight", input.sizes(),
                 "three dims each, found for weight ", weight.sizes());
  SOFTNPU_EXPECT((x1 == Dims{0, 1, 2} || x1 == Dims{1, 0, 2}), kName, "perm_x1", at::IntArrayRef(x1),
                 "[0, 1, 2] or [1, 0, 2]");
  SOFTNPU_EXPECT((x2 == Dims{0, 1, 2} || x2 == Dims{0, 2, 1}), kName, "perm_x2", at::IntArrayRef(x2),
                 "[0, 1, 2] or [0, 2, 1]");
  SOFTNPU_EXPECT((y == Dims{1, 0, 2}), kName, "perm_y", at::IntArrayRef(y), "[1, 0, 2]");
  SOFTNPU_EXPECT(!bias.has_value(), kName, "bias", bias->sizes(), "None");
  SOFTNPU_EXPECT(!scale.has_value(), kName, "scale", scale->sizes(), "None, the software NPU has no int8 result");
  SOFTNPU_EXPECT(batch_split_factor.value_or(1) == 1, kName, "batch_split_factor", *batch_split_factor, "1");
  const Tensor a = input.permute(x1), b = weight.permute(x2);
  SOFTNPU_EXPECT(a.size(0) == b.size(0) && a.size(2) == b.size(1), kName, "weight", weight.sizes(), "a batch of ",
                 a.size(0), " matrices of ", a.size(2), " rows, for input ", input.sizes());
  return at::empty({a.size(1), a.size(0), b.size(2)}, input.options());
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_IMPL(npu, CPU, m) { m.impl("npu_transpose_batchmatmul", softnpu::transpose_batchmatmul); }
TORCH_LIBRARY_IMPL(npu, Meta, m) { m.impl("npu_transpose_batchmatmul", softnpu::transpose_batchmatmul_meta); }
TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) { m.impl("npu_transpose_batchmatmul", softnpu::on_stream()); }
