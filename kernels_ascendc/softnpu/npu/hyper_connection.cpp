// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Hyper-connections: what goes into a block, and how its result joins the residual streams. Contract: vllm-ascend
// 0.23.0's csrc/torch_binding.cpp (check_hc_pre_shape_and_dtype, check_hc_post_shape_and_dtype) and the kernels of
// csrc/moe/hc_pre and csrc/moe/hc_post. Every step but the projection is written as a loop over the tokens, so that
// what a token gets does not depend on the batch. Left out: npu_hc_pre and its parts, which the model does not call.
#include <cmath>

#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;

const Limit kPreD("npu_hc_pre_v2.d");

float sigmoid(float v) { return 1.0f / (1.0f + std::exp(-v)); }

// In place: softmax of each row, plus eps, then `iterations` times columns and, between them, rows divided by their sum
// plus eps.
void sinkhorn(float* comb, int64_t hc, int64_t iterations, float eps) {
  const auto at = [&](int64_t row, int64_t column) -> float& { return comb[row * hc + column]; };
  for (int64_t i = 0; i < hc; ++i) {
    float most = at(i, 0), sum = 0;
    for (int64_t j = 1; j < hc; ++j) most = std::max(most, at(i, j));
    for (int64_t j = 0; j < hc; ++j) sum += at(i, j) = std::exp(at(i, j) - most);
    for (int64_t j = 0; j < hc; ++j) at(i, j) = at(i, j) / sum + eps;
  }
  const auto normalise = [&](bool rows) {
    for (int64_t i = 0; i < hc; ++i) {
      float sum = 0;
      for (int64_t j = 0; j < hc; ++j) sum += rows ? at(i, j) : at(j, i);
      for (int64_t j = 0; j < hc; ++j) (rows ? at(i, j) : at(j, i)) /= sum + eps;
    }
  };
  normalise(false);
  for (int64_t i = 1; i < iterations; ++i) {
    normalise(true);
    normalise(false);
  }
}

std::tuple<Tensor, Tensor, Tensor> hc_pre(const Tensor& x, const Tensor& hc_fn, const Tensor& hc_scale,
                                          const Tensor& hc_base, int64_t hc_mult, int64_t hc_sinkhorn_iters,
                                          double norm_eps, double hc_eps) {
  const int64_t hc = hc_mult, d = x.size(-1);
  const Tensor flat = x.to(at::kFloat).reshape({-1, hc * d});
  const int64_t tokens = flat.size(0);
  // The scale of the norm is applied to the projections, as the kernel does.
  const Tensor mixes = at::mm(flat, hc_fn.t()).mul_((flat.square().mean(1, /*keepdim=*/true) + norm_eps).rsqrt());
  Tensor y = at::zeros({tokens, d}, flat.options());
  Tensor post = at::empty({tokens, hc}, flat.options()), comb = at::empty({tokens, hc, hc}, flat.options());
  const Tensor scales = hc_scale.contiguous(), bases = hc_base.contiguous();
  const float *scale = scales.const_data_ptr<float>(), *base = bases.const_data_ptr<float>();
  const auto eps = static_cast<float>(hc_eps);
  for (int64_t t = 0; t < tokens; ++t) {
    const float* mix = mixes.const_data_ptr<float>() + t * mixes.size(1);
    const float* in = flat.const_data_ptr<float>() + t * hc * d;
    float* out = y.mutable_data_ptr<float>() + t * d;
    float* c = comb.mutable_data_ptr<float>() + t * hc * hc;
    for (int64_t h = 0; h < hc; ++h) {
      const float pre = sigmoid(mix[h] * scale[0] + base[h]) + eps;
      for (int64_t i = 0; i < d; ++i) out[i] += pre * in[h * d + i];
      post.mutable_data_ptr<float>()[t * hc + h] = 2.0f * sigmoid(mix[hc + h] * scale[1] + base[hc + h]);
    }
    for (int64_t i = 0; i < hc * hc; ++i) c[i] = mix[2 * hc + i] * scale[2] + base[2 * hc + i];
    sinkhorn(c, hc, hc_sinkhorn_iters, eps);
  }
  auto lead = x.sizes().slice(0, x.dim() - 2).vec();
  const auto shaped = [&](const Tensor& value, std::initializer_list<int64_t> rest) {
    auto shape = lead;
    shape.insert(shape.end(), rest);
    return value.view(shape);
  };
  return {shaped(y, {d}).to(at::kBFloat16), shaped(post, {hc}), shaped(comb, {hc, hc})};
}

std::tuple<Tensor, Tensor, Tensor> hc_pre_meta(const Tensor& x, const Tensor& hc_fn, const Tensor& hc_scale,
                                               const Tensor& hc_base, int64_t hc_mult, int64_t hc_sinkhorn_iters,
                                               double, double) {
  constexpr auto kName = "npu_hc_pre_v2";
  constexpr int64_t kHc = 4, kMix = (2 + kHc) * kHc;
  SOFTNPU_EXPECT(x.dim() == 3 || x.dim() == 4, kName, "x's dims", x.dim(), "3 or 4");
  const auto sizes = x.sym_sizes();
  for (const auto& size : sizes) SOFTNPU_EXPECT(size > 0, kName, "x", sizes, "no size to be 0");
  const auto d = x.sym_size(-1);
  SOFTNPU_EXPECT(hc_mult == kHc, kName, "hc_mult", hc_mult, kHc);
  SOFTNPU_EXPECT(x.sym_size(-2) == kHc, kName, "x", sizes, "the last but one size ", kHc);
  SOFTNPU_EXPECT(kPreD.waived() || d == 4096 || d == 7168, kName, "d, the last size of x", d,
                 "4096 or 7168 (limit npu_hc_pre_v2.d)");
  SOFTNPU_EXPECT(hc_fn.dim() == 2 && hc_fn.sym_size(0) == kMix && hc_fn.sym_size(1) == kHc * d, kName, "hc_fn",
                 hc_fn.sym_sizes(), "[", kMix, ", ", kHc * d, "]");
  SOFTNPU_EXPECT(hc_scale.dim() == 1 && hc_scale.sym_size(0) == 3, kName, "hc_scale", hc_scale.sym_sizes(), "[3]");
  SOFTNPU_EXPECT(hc_base.dim() == 1 && hc_base.sym_size(0) == kMix, kName, "hc_base", hc_base.sym_sizes(), "[", kMix,
                 "]");
  SOFTNPU_EXPECT(x.scalar_type() == at::kBFloat16, kName, "x's dtype", x.scalar_type(), "BFloat16");
  for (const Tensor* t : {&hc_fn, &hc_scale, &hc_base})
    SOFTNPU_EXPECT(t->scalar_type() == at::kFloat, kName, "the dtype of hc_fn, hc_scale or hc_base", t->scalar_type(),
                   "Float");
  SOFTNPU_EXPECT(hc_sinkhorn_iters >= 1, kName, "hc_sinkhorn_iters", hc_sinkhorn_iters, "at least 1");
  const auto lead = sizes.slice(0, x.dim() - 2);
  std::vector<c10::SymInt> y(lead.begin(), lead.end()), post(y), comb(y);
  y.push_back(d);
  post.emplace_back(kHc);
  comb.insert(comb.end(), {kHc, kHc});
  const auto fp32 = x.options().dtype(at::kFloat);
  return {at::empty_symint(y, x.options()), at::empty_symint(post, fp32), at::empty_symint(comb, fp32)};
}

// y[h] = post[h] * x + sum over g of comb[g, h] * residual[g]
Tensor hc_post(const Tensor& x, const Tensor& residual, const Tensor& post, const Tensor& comb) {
  const Tensor in = x.to(at::kFloat).unsqueeze(2), weights = comb.to(at::kFloat), streams = residual.to(at::kFloat);
  Tensor y = post.to(at::kFloat).unsqueeze(3) * in;
  for (int64_t g = 0; g < residual.size(2); ++g)
    y += weights.select(2, g).unsqueeze(3) * streams.select(2, g).unsqueeze(2);
  return y.to(residual.scalar_type());
}

Tensor hc_post_meta(const Tensor& x, const Tensor& residual, const Tensor& post, const Tensor& comb) {
  constexpr auto kName = "npu_hc_post";
  SOFTNPU_EXPECT(x.dim() == 3, kName, "x's dims", x.dim(), "3");
  for (const auto& size : x.sym_sizes()) SOFTNPU_EXPECT(size > 0, kName, "x", x.sym_sizes(), "no size to be 0");
  SOFTNPU_EXPECT(residual.dim() == 4 && residual.sym_size(2) > 0, kName, "residual", residual.sym_sizes(),
                 "4 dims, [b, s, hc, d]");
  const auto b = x.sym_size(0), s = x.sym_size(1), hc = residual.sym_size(2);
  const auto expect = [&](const char* argument, const Tensor& t, std::vector<c10::SymInt> shape) {
    SOFTNPU_EXPECT(t.sym_sizes() == c10::SymIntArrayRef(shape), kName, argument, t.sym_sizes(),
                   c10::SymIntArrayRef(shape));
  };
  expect("residual", residual, {b, s, hc, x.sym_size(2)});
  expect("post", post, {b, s, hc});
  expect("comb", comb, {b, s, hc, hc});
  const auto real = [](at::ScalarType type) {
    return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
  };
  SOFTNPU_EXPECT(real(x.scalar_type()), kName, "x's dtype", x.scalar_type(), "Half, BFloat16 or Float");
  SOFTNPU_EXPECT(residual.scalar_type() == x.scalar_type(), kName, "residual's dtype", residual.scalar_type(), "x's, ",
                 x.scalar_type());
  SOFTNPU_EXPECT(real(post.scalar_type()), kName, "post's dtype", post.scalar_type(), "Half, BFloat16 or Float");
  SOFTNPU_EXPECT(comb.scalar_type() == post.scalar_type(), kName, "comb's dtype", comb.scalar_type(), "post's, ",
                 post.scalar_type());
  return at::empty_symint(residual.sym_sizes(), residual.options());
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  m.def(
      "npu_hc_pre_v2(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, int hc_sinkhorn_iters, "
      "float norm_eps, float hc_eps) -> (Tensor out0, Tensor out1, Tensor out2)");
  m.def("npu_hc_post(Tensor x, Tensor residual, Tensor post, Tensor comb) -> (Tensor out)");
}
TORCH_LIBRARY_IMPL(_C_ascend, CPU, m) {
  m.impl("npu_hc_pre_v2", softnpu::hc_pre);
  m.impl("npu_hc_post", softnpu::hc_post);
}
TORCH_LIBRARY_IMPL(_C_ascend, Meta, m) {
  m.impl("npu_hc_pre_v2", softnpu::hc_pre_meta);
  m.impl("npu_hc_post", softnpu::hc_post_meta);
}
TORCH_LIBRARY_IMPL(_C_ascend, PrivateUse1, m) {
  m.impl("npu_hc_pre_v2", softnpu::on_stream());
  m.impl("npu_hc_post", softnpu::on_stream());
}
