// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Projection of token rows by [wkv; wgate]: packs both operands for the kernel of kernels.h and walks the tiles.
// Weights are packed once per launch (fp32, depth * columns * 4 bytes); each thread owns one row buffer.
#ifndef SOFTNPU_OPS_PROJECTION_H
#define SOFTNPU_OPS_PROJECTION_H

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tensor.h"

namespace softnpu {

// Calls body(i) for i in 0..count-1, on up to `threads` host threads; no order is promised. body must not throw.
void parallel_for(int64_t count, int64_t threads, const std::function<void(int64_t)>& body);

float element_as_float(const void* data, int dtype, int64_t index);
void convert_to_float(const void* data, int dtype, int64_t first, int64_t count, float* result);

class PackedWeights {
 public:
  // Columns of the result: the rows of every weight [n_i, depth], in the order given.
  PackedWeights(const std::vector<const SoftnpuTensor*>& weights, int64_t threads);

  int64_t columns() const { return columns_; }
  int64_t stride() const { return stride_; }  // columns rounded up to whole panels
  int64_t depth() const { return depth_; }
  const float* panel(int64_t block, int64_t index) const;

 private:
  int64_t columns_, stride_, depth_;
  std::unique_ptr<float[]> data_;  // [depth block][panel][k][panel columns]
};

// One thread's buffer: projects up to any number of consecutive rows of x; row(i) is [columns] fp32.
class Projector {
 public:
  explicit Projector(const PackedWeights& weights) : weights_(weights) {}
  void run(const SoftnpuTensor& x, int64_t first, int64_t count);
  float* row(int64_t i) { return result_.data() + i * weights_.stride(); }

 private:
  const PackedWeights& weights_;
  std::vector<float> packed_, result_, line_;
};

}  // namespace softnpu

#endif  // SOFTNPU_OPS_PROJECTION_H
