// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Rotary embeddings. Contracts: inplace_partial_rotary_mul of vllm-ascend (csrc/attention/inplace_partial_rotary_mul,
// inplace_partial_rotary_mul_a3_tiling.cpp): x[..., start:end] = x * cos + rotate(x) * sin, interleaved, in float32;
// npu_rotary_mul of torch_npu: the same out of place and over the whole last dim, half or interleaved. Left out: the
// modes "quarter" and "interleave-half", and npu_rotary_mul's rotate matrix; they are refused, where vllm-ascend's
// binding returns from an unknown mode without doing anything.
#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;

Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const Tensor f = x.to(at::kFloat);
  const int64_t half = f.size(-1) / 2;
  const Tensor turned =
      interleaved ? at::stack({f.slice(-1, 1, std::nullopt, 2).neg(), f.slice(-1, 0, std::nullopt, 2)}, -1).flatten(-2)
                  : at::cat({f.slice(-1, half).neg(), f.slice(-1, 0, half)}, -1);
  return (f * cos.to(at::kFloat) + turned * sin.to(at::kFloat)).to(x.scalar_type());
}

void inplace_partial(Tensor& x, const Tensor& r1, const Tensor& r2, std::string_view, at::IntArrayRef partial_slice) {
  const Tensor part = x.slice(-1, partial_slice[0], partial_slice[1]);
  part.copy_(rotated(part, r1, r2, true));
}

bool floating(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kFloat;
}

void inplace_partial_meta(Tensor& x, const Tensor& r1, const Tensor& r2, std::string_view rotary_mode,
                          at::IntArrayRef partial_slice) {
  constexpr const char* kName = "inplace_partial_rotary_mul";
  SOFTNPU_EXPECT(rotary_mode == "interleave", kName, "rotary_mode", rotary_mode, "interleave");
  SOFTNPU_EXPECT(x.dim() == 4 && floating(x), kName, "x", x.sizes(), "four dims of Half, BFloat16 or Float");
  SOFTNPU_EXPECT(
      r1.scalar_type() == r2.scalar_type() && (r1.scalar_type() == x.scalar_type() || r1.scalar_type() == at::kFloat),
      kName, "r1 and r2's dtypes", r1.scalar_type(), "x's ", x.scalar_type(), " or Float, both alike");
  SOFTNPU_EXPECT(partial_slice.size() == 2 && partial_slice[0] >= 0 && partial_slice[0] < partial_slice[1] &&
                     partial_slice[1] <= x.size(3),
                 kName, "partial_slice", partial_slice, "[start, end) within x's last dim of ", x.size(3));
  const int64_t width = partial_slice[1] - partial_slice[0];
  const int64_t aligned = x.scalar_type() == at::kFloat ? 8 : 16;
  SOFTNPU_EXPECT(width % aligned == 0 && width <= 64, kName, "partial_slice", partial_slice, "a multiple of ", aligned,
                 " elements, at most 64");
  SOFTNPU_EXPECT(r1.dim() == 4 && r1.sizes() == r2.sizes() && r1.size(0) == x.size(0) && r1.size(1) == 1 &&
                     r1.size(2) == 1 && r1.size(3) == width && (x.size(1) == 1 || x.size(2) == 1),
                 kName, "r1 and r2", r1.sizes(), "[", x.size(0), ", 1, 1, ", width, "] for x ", x.sizes(),
                 ", found for r2 ", r2.sizes());
}

Tensor rotary_mul(const Tensor& input, const Tensor& r1, const Tensor& r2, std::string_view rotary_mode,
                  const std::optional<Tensor>&) {
  return rotated(input, r1, r2, rotary_mode == "interleave").contiguous();
}

Tensor rotary_mul_meta(const Tensor& input, const Tensor& r1, const Tensor& r2, std::string_view rotary_mode,
                       const std::optional<Tensor>& rotate) {
  constexpr const char* kName = "npu_rotary_mul";
  SOFTNPU_EXPECT(rotary_mode == "half" || rotary_mode == "interleave", kName, "rotary_mode", rotary_mode,
                 "half or interleave, those that the software NPU has");
  SOFTNPU_EXPECT(!rotate.has_value(), kName, "rotate", rotate->sizes(), "None");
  SOFTNPU_EXPECT(input.dim() == 4 && floating(input) && input.size(3) % 2 == 0, kName, "input", input.sizes(),
                 "four dims of Half, BFloat16 or Float, the last even");
  SOFTNPU_EXPECT(floating(r1) && r1.scalar_type() == r2.scalar_type() && r1.sizes() == r2.sizes(), kName, "r1 and r2",
                 r1.sizes(), "equal dtypes and shapes, found for r2 ", r2.sizes());
  bool broadcasts = r1.dim() == 4 && r1.size(3) == input.size(3);
  for (int64_t i = 0; broadcasts && i < 3; ++i) broadcasts = r1.size(i) == 1 || r1.size(i) == input.size(i);
  SOFTNPU_EXPECT(broadcasts, kName, "r1 and r2", r1.sizes(), "a shape that broadcasts to input's ", input.sizes());
  return at::empty(input.sizes(), input.options());
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  m.def("inplace_partial_rotary_mul(Tensor(a!) x, Tensor r1, Tensor r2, str rotary_mode, int[] partial_slice) -> ()");
}
TORCH_LIBRARY_IMPL(_C_ascend, CPU, m) { m.impl("inplace_partial_rotary_mul", softnpu::inplace_partial); }
TORCH_LIBRARY_IMPL(_C_ascend, Meta, m) { m.impl("inplace_partial_rotary_mul", softnpu::inplace_partial_meta); }
TORCH_LIBRARY_IMPL(_C_ascend, PrivateUse1, m) { m.impl("inplace_partial_rotary_mul", softnpu::on_stream()); }
TORCH_LIBRARY_IMPL(npu, CPU, m) { m.impl("npu_rotary_mul", softnpu::rotary_mul); }
TORCH_LIBRARY_IMPL(npu, Meta, m) { m.impl("npu_rotary_mul", softnpu::rotary_mul_meta); }
TORCH_LIBRARY_IMPL(npu, PrivateUse1, m) { m.impl("npu_rotary_mul", softnpu::on_stream()); }
