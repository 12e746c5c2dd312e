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

#include "../ops/exp32.h"
#include "../ops/numeric.h"
#include "core.h"

namespace softnpu::ascendc {

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
