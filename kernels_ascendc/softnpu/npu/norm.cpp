// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// RMSNorm. Contract: torch_npu's npu_rms_norm (self, gamma, epsilon) -> (y in self's dtype, rstd float32 with the
// normalised dims of size 1): statistics and product in float32, one rounding at the end. Left out: gamma of another
// dtype than self other than float32.
#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor> rms_norm(const Tensor& self, const Tensor& gamma, double epsilon) {
  const Tensor x = self.to(at::kFloat);
  std::vector<int64_t> dims;
  for (int64_t i = self.dim() - gamma.dim(); i < self.dim(); ++i) dims.push_back(i);
  const Tensor rstd = (x.square().mean(dims, /*keepdim=*/true) + epsilon).rsqrt();
  return {(x * rstd * gamma.to(at::kFloat)).to(self.scalar_type()), rstd};
}

std::tuple<Tensor, Tensor> rms_norm_meta(const Tensor& self, const Tensor& gamma, double) {
  SOFTNPU_EXPECT(gamma.dim() >= 1 && gamma.dim() <= self.dim() &&
                     self.sym_sizes().slice(self.dim() - gamma.dim()) == gamma.sym_sizes(),
                 "npu_rms_norm", "gamma", gamma.sym_sizes(), "the last dims of self, ", self.sym_sizes());
  SOFTNPU_EXPECT(self.is_floating_point() && self.scalar_type() != at::kDouble, "npu_rms_norm", "self's dtype",
                 self.scalar_type(), "Half, BFloat16 or Float");
  SOFTNPU_EXPECT(gamma.scalar_type() == self.scalar_type() || gamma.scalar_type() == at::kFloat, "npu_rms_norm",
                 "gamma's dtype", gamma.scalar_type(), self.scalar_type(), " or Float");
  auto statistics = self.sym_sizes().vec();
  for (int64_t i = self.dim() - gamma.dim(); i < self.dim(); ++i) statistics[i] = 1;
  return {at::empty_symint(self.sym_sizes(), self.options()),
          at::empty_symint(statistics, self.options().dtype(at::kFloat))};
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_IMPL(npu, CPU, m) { m.impl("npu_rms_norm", softnpu::rms_norm); }
TORCH_LIBRARY_IMPL(npu, Meta, m) { m.impl("npu_rms_norm", softnpu::rms_norm_meta); }
TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) { m.impl("npu_rms_norm", softnpu::on_stream()); }
