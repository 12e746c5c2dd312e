// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// C += x^T weight, in float32. Contract: torch_npu's atb::_npu_matmul_add_fp32, with which vllm-ascend's worker warms
// the ATB library up.
#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;

constexpr auto kName = "_npu_matmul_add_fp32";

void matmul_add(const Tensor& x, const Tensor& weight, Tensor& c) {
  c += at::mm(x.to(at::kFloat).t(), weight.to(at::kFloat));
}

void matmul_add_meta(const Tensor& x, const Tensor& weight, Tensor& c) {
  const auto type = x.scalar_type();
  SOFTNPU_EXPECT(type == at::kHalf || type == at::kBFloat16, kName, "x's dtype", type, "Half or BFloat16");
  SOFTNPU_EXPECT(weight.scalar_type() == type, kName, "weight's dtype", weight.scalar_type(), "x's, ", type);
  SOFTNPU_EXPECT(c.scalar_type() == at::kFloat, kName, "C's dtype", c.scalar_type(), "Float");
  SOFTNPU_EXPECT(x.dim() == 2, kName, "x's dims", x.dim(), "2");
  SOFTNPU_EXPECT(weight.dim() == 2 && weight.size(0) == x.size(0), kName, "weight", weight.sizes(), "[", x.size(0),
                 ", n]");
  SOFTNPU_EXPECT(c.dim() == 2 && c.size(0) == x.size(1) && c.size(1) == weight.size(1), kName, "C", c.sizes(), "[",
                 x.size(1), ", ", weight.size(1), "]");
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_IMPL(atb, CPU, m) { m.impl("_npu_matmul_add_fp32", softnpu::matmul_add); }
TORCH_LIBRARY_IMPL(atb, Meta, m) { m.impl("_npu_matmul_add_fp32", softnpu::matmul_add_meta); }
TORCH_LIBRARY_IMPL(atb, PrivateUse1, m) { m.impl("_npu_matmul_add_fp32", softnpu::on_stream()); }
