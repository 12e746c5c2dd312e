// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Vector instructions over a two-dimensional piece of UB, as few as a repeat stride allows.
//
// Problem: an instruction covers one stride, the kernels need rows inside windows. Way: name the operation as a
// template argument and choose the cheaper loop when the kernel is compiled. Counts go to the device's narrower
// parameters without a cast, here and in the kernels' copies, so that the emulation sees one that does not fit. What it
// does not do: barriers; the caller knows what depends on what.
#ifndef AFD_DSV4_COMPRESSOR_VECTOR_H_
#define AFD_DSV4_COMPRESSOR_VECTOR_H_

#include "kernel_operator.h"
#include "tiling.h"

namespace afd_dsv4 {

using Floats = AscendC::LocalTensor<float>;

enum class Operation { kAdd, kSub, kMul, kDiv, kMax };

template <Operation operation>
__aicore__ inline void Count(const Floats& result, const Floats& a, const Floats& b, uint32_t count) {
  const int32_t n = static_cast<int32_t>(count);
  if constexpr (operation == Operation::kAdd) AscendC::Add(result, a, b, n);
  if constexpr (operation == Operation::kSub) AscendC::Sub(result, a, b, n);
  if constexpr (operation == Operation::kMul) AscendC::Mul(result, a, b, n);
  if constexpr (operation == Operation::kDiv) AscendC::Div(result, a, b, n);
  if constexpr (operation == Operation::kMax) AscendC::Max(result, a, b, n);
}

template <Operation operation>
__aicore__ inline void Repeat(const Floats& result, const Floats& a, const Floats& b, uint32_t repeats,
                              const AscendC::BinaryRepeatParams& strides) {
  const uint64_t mask = kLanes;
  if constexpr (operation == Operation::kAdd) AscendC::Add(result, a, b, mask, repeats, strides);
  if constexpr (operation == Operation::kSub) AscendC::Sub(result, a, b, mask, repeats, strides);
  if constexpr (operation == Operation::kMul) AscendC::Mul(result, a, b, mask, repeats, strides);
  if constexpr (operation == Operation::kDiv) AscendC::Div(result, a, b, mask, repeats, strides);
  if constexpr (operation == Operation::kMax) AscendC::Max(result, a, b, mask, repeats, strides);
}

// For each of `windows` windows: result[0..width) = source[0..width) op source[width..2*width). Strides in floats.
template <Operation operation, uint32_t width, uint32_t resultStride, uint32_t sourceStride, uint32_t mostWindows>
__aicore__ inline void Fold(const Floats& result, const Floats& source, uint32_t windows) {
  constexpr bool strided = resultStride / kFloatBlock <= 255 && sourceStride / kFloatBlock <= 255;
  if constexpr (strided && width / kLanes < mostWindows) {
    const AscendC::BinaryRepeatParams strides(1, 1, 1, resultStride / kFloatBlock, sourceStride / kFloatBlock,
                                              sourceStride / kFloatBlock);
    for (uint32_t i = 0; i < width; i += kLanes) {
      Repeat<operation>(result[i], source[i], source[width + i], windows, strides);
    }
  } else {
    for (uint32_t w = 0; w < windows; ++w) {
      Count<operation>(result[w * resultStride], source[w * sourceStride], source[w * sourceStride + width], width);
    }
  }
}

// Every one of `rows` adjoining rows of `columns` floats, in place: row = row op other, `other` being one row.
template <Operation operation, uint32_t columns>
__aicore__ inline void EachRow(const Floats& rows, const Floats& other, uint32_t count) {
  const AscendC::BinaryRepeatParams strides(1, 1, 1, columns / kFloatBlock, columns / kFloatBlock, 0);
  for (uint32_t i = 0; i < columns; i += kLanes) Repeat<operation>(rows[i], rows[i], other[i], count, strides);
}

// Rows 2^n to one, in place: rows i and i + n/2 first, then by halves again.
template <Operation operation, uint32_t columns>
__aicore__ inline void Tree(const Floats& rows, uint32_t count) {
  for (; count > 1; count /= 2) {
    Count<operation>(rows, rows, rows[count / 2 * columns], count / 2 * columns);
    AscendC::PipeBarrier<PIPE_V>();
  }
}

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_VECTOR_H_
