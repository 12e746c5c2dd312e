// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// RMSNorm of a sum, which is a result, too. Contract: csrc/moe/add_rms_norm_bias of vllm-ascend 0.23.0 (tiling and
// add_rms_norm_bias.h), and torch_npu's npu_add_rms_norm, the same without a bias: (x1, x2, gamma) -> (y, rstd float32
// with the normalised dims of size 1, x = x1 + x2). With bfloat16 the sum that is normalised is the unrounded one, and
// the quotient is rounded before it is multiplied by gamma; with float16 the sum is rounded, and so is each step after.
#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

ThreeTensors add_rms_norm_bias(const Tensor& x1, const Tensor& x2, const Tensor& gamma, const OptionalTensor& beta,
                               double epsilon) {
  const auto type = x1.scalar_type();
  const auto round = [&](const Tensor& t) { return t.to(type).to(at::kFloat); };
  Tensor sum = x1.to(at::kFloat) + x2.to(at::kFloat);
  const Tensor x = sum.to(type);
  if (type == at::kHalf) sum = x.to(at::kFloat);
  std::vector<int64_t> dims;
  for (int64_t i = x1.dim() - gamma.dim(); i < x1.dim(); ++i) dims.push_back(i);
  const Tensor rstd = (sum.square().mean(dims, /*keepdim=*/true) + epsilon).rsqrt();
  Tensor y = round(sum * rstd) * gamma.to(at::kFloat);
  if (beta.has_value()) y = (type == at::kHalf ? round(y) : y) + beta->to(at::kFloat);
  return {y.to(type), rstd, x};
}

ThreeTensors meta(const char* name, const Tensor& x1, const Tensor& x2, const Tensor& gamma, const OptionalTensor& beta,
                  double epsilon) {
  const auto type = x1.scalar_type();
  SOFTNPU_EXPECT(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat, name, "x1's dtype", type,
                 "Half, BFloat16 or Float");
  SOFTNPU_EXPECT(x1.dim() >= 1 && x1.dim() <= 8, name, "x1's dims", x1.dim(), "1 to 8");
  for (const auto& size : x1.sym_sizes()) SOFTNPU_EXPECT(size > 0, name, "x1", x1.sym_sizes(), "no size to be 0");
  SOFTNPU_EXPECT(x2.sym_sizes() == x1.sym_sizes(), name, "x2", x2.sym_sizes(), "x1's sizes, ", x1.sym_sizes());
  const int64_t outer = x1.dim() - gamma.dim();
  SOFTNPU_EXPECT(gamma.dim() >= 1 && outer >= 0 && x1.sym_sizes().slice(outer) == gamma.sym_sizes(), name, "gamma",
                 gamma.sym_sizes(), "the last sizes of x1, ", x1.sym_sizes());
  SOFTNPU_EXPECT(x2.scalar_type() == type && gamma.scalar_type() == type, name, "the dtypes of x2 and gamma",
                 c10::str(x2.scalar_type(), " and ", gamma.scalar_type()), "x1's, ", type);
  if (beta.has_value()) {
    SOFTNPU_EXPECT(beta->sym_sizes() == gamma.sym_sizes(), name, "beta", beta->sym_sizes(), "gamma's sizes, ",
                   gamma.sym_sizes());
    SOFTNPU_EXPECT(beta->scalar_type() == type, name, "beta's dtype", beta->scalar_type(), "x1's, ", type);
  }
  SOFTNPU_EXPECT(epsilon >= 0, name, "epsilon", epsilon, "at least 0");
  auto statistics = x1.sym_sizes().vec();
  for (int64_t i = outer; i < x1.dim(); ++i) statistics[i] = 1;
  return {at::empty_symint(x1.sym_sizes(), x1.options()), at::empty_symint(statistics, x1.options().dtype(at::kFloat)),
          at::empty_symint(x1.sym_sizes(), x1.options())};
}

ThreeTensors add_rms_norm_bias_meta(const Tensor& x1, const Tensor& x2, const Tensor& gamma, const OptionalTensor& beta,
                                    double epsilon) {
  return meta("npu_add_rms_norm_bias", x1, x2, gamma, beta, epsilon);
}

ThreeTensors add_rms_norm(const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon) {
  return add_rms_norm_bias(x1, x2, gamma, std::nullopt, epsilon);
}

ThreeTensors add_rms_norm_meta(const Tensor& x1, const Tensor& x2, const Tensor& gamma, double epsilon) {
  return meta("npu_add_rms_norm", x1, x2, gamma, std::nullopt, epsilon);
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  m.def(
      "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6)-> (Tensor y ,"
      "Tensor rstd, Tensor x)");
}
TORCH_LIBRARY_IMPL(_C_ascend, CPU, m) { m.impl("npu_add_rms_norm_bias", softnpu::add_rms_norm_bias); }
TORCH_LIBRARY_IMPL(_C_ascend, Meta, m) { m.impl("npu_add_rms_norm_bias", softnpu::add_rms_norm_bias_meta); }
TORCH_LIBRARY_IMPL(_C_ascend, PrivateUse1, m) { m.impl("npu_add_rms_norm_bias", softnpu::on_stream()); }
TORCH_LIBRARY_IMPL(npu, CPU, m) { m.impl("npu_add_rms_norm", softnpu::add_rms_norm); }
TORCH_LIBRARY_IMPL(npu, Meta, m) { m.impl("npu_add_rms_norm", softnpu::add_rms_norm_meta); }
TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) { m.impl("npu_add_rms_norm", softnpu::on_stream()); }
