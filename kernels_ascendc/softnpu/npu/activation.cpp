// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// SwiGLU. Contract: torch_npu's npu_swiglu: silu of the first half times the second half along a dim, in float32, one
// rounding at the end. Written as a loop, so that an element's value does not depend on where it stands.
#include <cmath>

#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;

Tensor swiglu(const Tensor& input, int64_t dim) {
  const auto halves = input.to(at::kFloat).chunk(2, dim);
  Tensor out = halves[0].clone(at::MemoryFormat::Contiguous);
  const Tensor factors = halves[1].contiguous();
  float* a = out.mutable_data_ptr<float>();
  const float* b = factors.const_data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); ++i) a[i] = a[i] / (1.0f + std::exp(-a[i])) * b[i];
  return out.to(input.scalar_type());
}

Tensor swiglu_meta(const Tensor& input, int64_t dim) {
  constexpr auto kName = "npu_swiglu";
  const auto type = input.scalar_type();
  SOFTNPU_EXPECT(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat, kName, "input's dtype", type,
                 "Half, BFloat16 or Float");
  SOFTNPU_EXPECT(input.dim() >= 1 && dim >= -input.dim() && dim < input.dim(), kName, "dim", dim, "a dim of input, ",
                 input.sym_sizes());
  auto sizes = input.sym_sizes().vec();
  auto& halved = sizes[dim < 0 ? dim + input.dim() : dim];
  SOFTNPU_EXPECT(halved % 2 == 0, kName, "input's size along dim", halved, "an even number");
  halved = halved / 2;
  return at::empty_symint(sizes, input.options());
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_IMPL(npu, CPU, m) { m.impl("npu_swiglu", softnpu::swiglu); }
TORCH_LIBRARY_IMPL(npu, Meta, m) { m.impl("npu_swiglu", softnpu::swiglu_meta); }
TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) { m.impl("npu_swiglu", softnpu::on_stream()); }
