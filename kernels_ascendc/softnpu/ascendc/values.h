// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// What the vector unit computes from values. fp32 follows IEEE with INF/NAN rules. Choices where the device leaves its
// bits open: Exp is afd_dsv4/compressor/reference.py:exp32 to the bit (for arguments above 0 the same polynomial), Ln,
// Sqrt, Rsqrt and Reciprocal are the correctly rounded results; fuzz moves Exp and Ln by up to 1 ulp and Rsqrt and
// Reciprocal by up to 2^-12, which is what a kernel may rely on. Denormals are kept; the device's handling is not
// documented. Compile without contraction (-ffp-contract=off), or sums of products lose their bits.
#ifndef SOFTNPU_ASCENDC_VALUES_H
#define SOFTNPU_ASCENDC_VALUES_H

#include <cmath>

#include "../ops/numeric.h"
#include "core.h"

namespace softnpu::ascendc {

inline float exp32(float x) {
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

// A NaN on either side wins, and 0 is larger than -0.
inline float maximum(float a, float b) {
  const float larger = (a > b || a != a) ? a : b;
  return a == b ? softnpu::float_of(softnpu::bits_of(a) & softnpu::bits_of(b)) : larger;
}
inline float minimum(float a, float b) {
  const float smaller = (a < b || a != a) ? a : b;
  return a == b ? softnpu::float_of(softnpu::bits_of(a) | softnpu::bits_of(b)) : smaller;
}
inline int32_t maximum(int32_t a, int32_t b) { return a > b ? a : b; }
inline int32_t minimum(int32_t a, int32_t b) { return a < b ? a : b; }

// Integer sums wrap, as the device without saturation does.
inline int32_t sum(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
inline int32_t difference(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}
inline int32_t product(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
}
inline float sum(float a, float b) { return a + b; }
inline float difference(float a, float b) { return a - b; }
inline float product(float a, float b) { return a * b; }

// A number from -1 to 1 that depends on nothing but its arguments.
inline double noise(uint64_t seed, uint64_t instruction, uint64_t element) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + instruction * 0xBF58476D1CE4E5B9u + element * 0x94D049BB133111EBu;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return static_cast<double>(static_cast<int64_t>(x)) * 0x1p-63;
}
inline float move_ulp(float value, double by) {
  if (!std::isnormal(value)) return value;
  const uint32_t bits = softnpu::bits_of(value);
  const float moved = softnpu::float_of(by > 1.0 / 3 ? bits + 1 : (by < -1.0 / 3 ? bits - 1 : bits));
  return std::isnormal(moved) ? moved : value;
}
inline float move_relative(float value, double by) {
  if (!std::isnormal(value)) return value;
  const float moved = static_cast<float>(static_cast<double>(value) * (1.0 + by * 0x1p-12));
  return std::isnormal(moved) ? moved : value;
}

}  // namespace softnpu::ascendc

#endif  // SOFTNPU_ASCENDC_VALUES_H
