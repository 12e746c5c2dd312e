// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Conversions between the element types, and the poison that fills what the stock operator leaves unwritten.
// Casts to 16 bits round to nearest even (CAST_RINT) and know both modes of the device for infinities and NaN.
#ifndef SOFTNPU_OPS_NUMERIC_H
#define SOFTNPU_OPS_NUMERIC_H

#include <cmath>
#include <cstdint>
#include <cstring>

namespace softnpu {

// Quiet NaN with a payload no arithmetic produces, so that a reader of unwritten memory is recognised.
constexpr uint32_t kPoison32 = 0x7FDEAD01u;
constexpr uint16_t kPoisonBf16 = 0x7FDEu;
constexpr uint16_t kPoisonFp16 = 0x7EADu;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float from_bf16(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

inline float from_fp16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t exponent = (value >> 10) & 0x1Fu;
  const uint32_t mantissa = value & 0x3FFu;
  if (exponent == 0x1Fu) return float_of(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float subnormal = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

inline uint16_t to_bf16(float value, bool saturate) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (std::isnan(value)) return saturate ? 0 : static_cast<uint16_t>(sign | 0x7FC0u);
  const uint16_t rounded = static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  const bool infinite = (rounded & 0x7FFFu) == 0x7F80u;
  return infinite && saturate ? static_cast<uint16_t>(sign | 0x7F7Fu) : rounded;
}

inline uint16_t to_fp16(float value, bool saturate) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (std::isnan(value)) return saturate ? 0 : static_cast<uint16_t>(sign | 0x7E00u);
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | (saturate ? 0x7BFFu : 0x7C00u));
  if (magnitude < 0x1p-14f) {  // subnormal: adding 0.5 rounds to a multiple of 2^-24, to nearest even
    return static_cast<uint16_t>(sign | (bits_of(magnitude + 0.5f) & 0x7FFu));
  }
  const uint32_t magnitude_bits = bits & 0x7FFFFFFFu;
  return static_cast<uint16_t>(sign | ((magnitude_bits - 0x38000000u + 0xFFFu + ((magnitude_bits >> 13) & 1u)) >> 13));
}

}  // namespace softnpu

#endif  // SOFTNPU_OPS_NUMERIC_H
