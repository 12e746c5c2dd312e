// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The exponential of everything here that stands for the device's, whose last bit is not documented: a fixed polynomial
// in double precision, rounded once to float, so that afd_dsv4/compressor/reference.py:exp32 has the same bits. Compile
// it without contraction. Static, as objects for several instruction sets are linked together: each keeps its own.
#ifndef SOFTNPU_OPS_EXP32_H
#define SOFTNPU_OPS_EXP32_H

#include <cstdint>
#include <cstring>

namespace softnpu {

static inline float exp32(float x) {
  constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453, kShift = 6755399441055744.0;  // 1.5*2^52
  const double y = x < -110.0f ? -110.0 : (x > 110.0f ? 110.0 : static_cast<double>(x));
  const double shifted = y * kLog2E + kShift;
  const double r = y - (shifted - kShift) * kLn2;
  double p = 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  int64_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  const uint64_t scale_bits = (static_cast<uint64_t>(bits) + 1023u) << 52;
  double scale;
  std::memcpy(&scale, &scale_bits, sizeof(scale));
  return static_cast<float>(p * scale);
}

}  // namespace softnpu

#endif  // SOFTNPU_OPS_EXP32_H
