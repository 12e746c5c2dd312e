// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The write into a KV pool. Contract: vllm-ascend's csrc/moe/scatter_nd_update_v2: update[i] goes to var[indices[i]],
// in place, whatever var's strides; a row whose first index is -1 (padding: [-1, page rows - 1]) has its target before
// var and is left out. Stricter than the device, which leaves out all that falls outside and lets an index of one dim
// spill into the next: any other index outside var is an error. Of equal targets the last row stays; the device does
// not say.
#include "operator.h"

namespace softnpu {
namespace {

using at::Tensor;

constexpr const char* kName = "npu_scatter_nd_update_v2";

void scatter(Tensor& var, const Tensor& indices, const Tensor& update) {
  const int64_t dims = indices.size(-1);
  const Tensor at = indices.to(at::kLong).reshape({-1, dims}).contiguous();
  const int64_t* index = at.const_data_ptr<int64_t>();
  // One row of targets, as var has it; the strides of the indexed dims lead from one to the next.
  Tensor target = var;
  for (int64_t d = 0; d < dims; ++d) target = target.select(0, 0);
  const Tensor rows = update.contiguous().view([&] {
    std::vector<int64_t> sizes{at.size(0)};
    sizes.insert(sizes.end(), target.sizes().begin(), target.sizes().end());
    return sizes;
  }());
  const bool whole = target.is_contiguous();
  const size_t bytes = target.numel() * target.element_size();
  for (int64_t i = 0; i < at.size(0); ++i, index += dims) {
    int64_t offset = 0;
    for (int64_t d = 0; d < dims; ++d) {
      const bool padding = index[0] == -1 && d == 0;
      TORCH_CHECK(padding || (index[d] >= 0 && index[d] < var.size(d)), kName, ": index ", index[d], " of row ", i,
                  " is outside dim ", d, " of var, which has ", var.size(d), " (padding: a first index of -1)");
      offset += index[d] * var.stride(d);
    }
    if (index[0] == -1) continue;
    if (whole)
      std::memcpy(static_cast<char*>(target.mutable_data_ptr()) + offset * target.element_size(),
                  static_cast<const char*>(rows.const_data_ptr()) + i * bytes, bytes);
    else
      target.as_strided(target.sizes(), target.strides(), target.storage_offset() + offset).copy_(rows.select(0, i));
  }
}

void scatter_meta(Tensor& var, const Tensor& indices, const Tensor& update) {
  SOFTNPU_EXPECT(indices.scalar_type() == at::kInt || indices.scalar_type() == at::kLong, kName, "indices' dtype",
                 indices.scalar_type(), "Int or Long");
  SOFTNPU_EXPECT(update.scalar_type() == var.scalar_type(), kName, "update's dtype", update.scalar_type(), "var's ",
                 var.scalar_type());
  SOFTNPU_EXPECT(indices.dim() >= 2 && indices.size(-1) >= 1 && indices.size(-1) <= var.dim(), kName, "indices",
                 indices.sizes(), "[..., up to ", var.dim(), " indices into var ", var.sizes(), "]");
  int64_t elements = 1;
  for (int64_t d = 0; d + 1 < indices.dim(); ++d) elements *= indices.size(d);
  for (int64_t d = indices.size(-1); d < var.dim(); ++d) elements *= var.size(d);
  SOFTNPU_EXPECT(update.numel() == elements, kName, "update", update.sizes(), elements, " elements: one row of var ",
                 var.sizes(), " for each row of indices ", indices.sizes());
}

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  m.def("npu_scatter_nd_update_v2(Tensor(a!) var, Tensor indices, Tensor update) -> ()");
}
TORCH_LIBRARY_IMPL(_C_ascend, CPU, m) { m.impl("npu_scatter_nd_update_v2", softnpu::scatter); }
TORCH_LIBRARY_IMPL(_C_ascend, Meta, m) { m.impl("npu_scatter_nd_update_v2", softnpu::scatter_meta); }
TORCH_LIBRARY_IMPL(_C_ascend, PrivateUse1, m) { m.impl("npu_scatter_nd_update_v2", softnpu::on_stream()); }
