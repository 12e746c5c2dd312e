// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

#include "projection.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "kernels.h"
#include "numeric.h"

namespace softnpu {

void parallel_for(int64_t count, int64_t threads, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) body(i);
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min(threads, count); ++i) helpers.emplace_back(work);
  work();
  for (auto& helper : helpers) helper.join();
}

float element_as_float(const void* data, int dtype, int64_t index) {
  if (dtype == SOFTNPU_FLOAT32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == SOFTNPU_BFLOAT16 ? from_bf16(bits) : from_fp16(bits);
}

void convert_to_float(const void* data, int dtype, int64_t first, int64_t count, float* result) {
  if (dtype == SOFTNPU_FLOAT32) {
    std::memcpy(result, static_cast<const float*>(data) + first, count * sizeof(float));
  } else if (dtype == SOFTNPU_BFLOAT16) {
    const uint16_t* source = static_cast<const uint16_t*>(data) + first;
    for (int64_t i = 0; i < count; ++i) result[i] = from_bf16(source[i]);
  } else {
    const uint16_t* source = static_cast<const uint16_t*>(data) + first;
    for (int64_t i = 0; i < count; ++i) result[i] = from_fp16(source[i]);
  }
}

PackedWeights::PackedWeights(const std::vector<const SoftnpuTensor*>& weights, int64_t threads) {
  const int64_t width = projection_kernel().columns;
  depth_ = weights[0]->shape[1];
  columns_ = 0;
  std::vector<const SoftnpuTensor*> owner;  // of each column
  std::vector<int64_t> source;              // row in its owner
  for (const SoftnpuTensor* weight : weights) {
    for (int64_t i = 0; i < weight->shape[0]; ++i) owner.push_back(weight), source.push_back(i);
    columns_ += weight->shape[0];
  }
  const int64_t panels = (columns_ + width - 1) / width;
  stride_ = panels * width;
  data_.reset(new float[static_cast<size_t>(stride_ * depth_)]);  // every element is written below
  parallel_for(panels, threads, [&](int64_t panel) {
    std::vector<float> line(kDepthBlock);
    for (int64_t begin = 0; begin < depth_; begin += kDepthBlock) {
      const int64_t length = std::min(kDepthBlock, depth_ - begin);
      float* target = data_.get() + begin * stride_ + panel * width * length;
      for (int64_t j = 0; j < width; ++j) {
        const int64_t column = panel * width + j;
        if (column < columns_) {
          convert_to_float(owner[column]->data, owner[column]->dtype, source[column] * depth_ + begin, length,
                           line.data());
        } else {
          std::fill(line.begin(), line.end(), 0.0f);
        }
        for (int64_t k = 0; k < length; ++k) target[k * width + j] = line[k];
      }
    }
  });
}

const float* PackedWeights::panel(int64_t block, int64_t index) const {
  const int64_t begin = block * kDepthBlock;
  const int64_t length = std::min(kDepthBlock, depth_ - begin);
  return data_.get() + begin * stride_ + index * projection_kernel().columns * length;
}

void Projector::run(const SoftnpuTensor& x, int64_t first, int64_t count) {
  const ProjectionKernel& kernel = projection_kernel();
  const int64_t groups = (count + kernel.rows - 1) / kernel.rows;
  const int64_t depth = weights_.depth(), stride = weights_.stride(), panels = stride / kernel.columns;
  packed_.resize(static_cast<size_t>(groups * kernel.rows * kDepthBlock));
  result_.assign(static_cast<size_t>(groups * kernel.rows * stride), 0.0f);
  line_.resize(kDepthBlock);
  for (int64_t begin = 0, block = 0; begin < depth; begin += kDepthBlock, ++block) {
    const int64_t length = std::min(kDepthBlock, depth - begin);
    for (int64_t i = 0; i < groups * kernel.rows; ++i) {
      float* target = packed_.data() + (i / kernel.rows) * kernel.rows * length + i % kernel.rows;
      if (i < count) {
        convert_to_float(x.data, x.dtype, (first + i) * x.stride[0] + begin, length, line_.data());
        for (int64_t k = 0; k < length; ++k) target[k * kernel.rows] = line_[k];
      } else {
        for (int64_t k = 0; k < length; ++k) target[k * kernel.rows] = 0.0f;
      }
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const float* b = weights_.panel(block, panel);
      for (int64_t group = 0; group < groups; ++group) {
        kernel.tile(packed_.data() + group * kernel.rows * length, b, row(group * kernel.rows) + panel * kernel.columns,
                    stride, length);
      }
    }
  }
}

}  // namespace softnpu
