// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Top-k and top-p. Contract: torch_npu's npu_top_k_top_p, whose definition is vLLM's own
// (vllm/v1/sample/ops/topk_topp_sampler.py): what is below the k-th largest logit becomes -inf, then, in ascending
// order, what lies within the first 1 - p of the probability; the largest always stays. Statistics are float32.
#include <limits>

#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr auto kName = "npu_top_k_top_p";

Tensor top_k_top_p(const Tensor& logits, const OptionalTensor& p, const OptionalTensor& k) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  auto [sorted, order] = logits.to(at::kFloat).sort(/*stable=*/true, -1, /*descending=*/false);
  if (k.has_value()) {
    const Tensor ks = k->to(at::kLong).contiguous();
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t count = ks.const_data_ptr<int64_t>()[row];
      SOFTNPU_EXPECT(count >= 1 && count <= vocabulary, kName, c10::str("k[", row, "]"), count, "1 to ", vocabulary);
    }
    const Tensor least = sorted.gather(1, (vocabulary - ks).unsqueeze(1));
    sorted.masked_fill_(sorted < least, kNever);
  }
  if (p.has_value()) {
    const Tensor ps = p->to(at::kFloat).contiguous();
    for (int64_t row = 0; row < rows; ++row) {
      const float share = ps.const_data_ptr<float>()[row];
      SOFTNPU_EXPECT(share >= 0 && share <= 1, kName, c10::str("p[", row, "]"), share, "0 to 1");
    }
    Tensor dropped = sorted.softmax(-1).cumsum(-1) <= 1 - ps.unsqueeze(1);
    dropped.select(1, vocabulary - 1).fill_(false);
    sorted.masked_fill_(dropped, kNever);
  }
  return at::empty_like(sorted).scatter_(1, order, sorted).to(logits.scalar_type());
}

Tensor top_k_top_p_meta(const Tensor& logits, const OptionalTensor& p, const OptionalTensor& k) {
  SOFTNPU_EXPECT(logits.dim() == 2 && logits.size(1) > 0, kName, "logits", logits.sizes(), "[rows, vocabulary]");
  const auto type = logits.scalar_type();
  SOFTNPU_EXPECT(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat, kName, "logits' dtype", type,
                 "Half, BFloat16 or Float");
  SOFTNPU_EXPECT(p.has_value() || k.has_value(), kName, "p and k", "neither", "at least one of them");
  const auto expect = [&](const char* argument, const OptionalTensor& t, at::ScalarType expected) {
    if (!t.has_value()) return;
    SOFTNPU_EXPECT(t->dim() == 1 && t->size(0) == logits.size(0), kName, argument, t->sizes(), "[", logits.size(0),
                   "]");
    SOFTNPU_EXPECT(t->scalar_type() == expected, kName, c10::str(argument, "'s dtype"), t->scalar_type(), expected);
  };
  expect("p", p, type);
  expect("k", k, at::kInt);
  return at::empty(logits.sizes(), logits.options());
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_IMPL(npu, CPU, m) { m.impl("npu_top_k_top_p", softnpu::top_k_top_p); }
TORCH_LIBRARY_IMPL(npu, Meta, m) { m.impl("npu_top_k_top_p", softnpu::top_k_top_p_meta); }
TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) { m.impl("npu_top_k_top_p", softnpu::on_stream()); }
