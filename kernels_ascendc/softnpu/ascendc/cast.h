// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Cast (asc-devkit include/basic_api/kernel_operator_vec_vconv_intf.h) between float and bfloat16_t, half or int32_t,
// and float to float (round to integer). Which round modes a pair has is checked when it runs, as on the device, where
// a wrong one is found by no compiler. Both modes for results that do not fit: INF/NAN and saturation.
#ifndef SOFTNPU_ASCENDC_CAST_H
#define SOFTNPU_ASCENDC_CAST_H

#include "elementwise.h"

namespace AscendC {

namespace detail {

inline float rounded(float value, RoundMode mode) {
  switch (mode) {
    case RoundMode::CAST_FLOOR:
      return std::floor(value);
    case RoundMode::CAST_CEIL:
      return std::ceil(value);
    case RoundMode::CAST_ROUND:
      return std::round(value);
    case RoundMode::CAST_TRUNC:
      return std::trunc(value);
    default:
      return std::nearbyint(value);  // the host rounds to nearest even unless told otherwise
  }
}

// fp32 to bfloat16: as to_bf16, with the other modes that keep the upper half or go to the next value.
inline uint16_t to_bf16(float value, RoundMode mode, bool saturate) {
  const uint32_t bits = softnpu::bits_of(value);
  if (mode == RoundMode::CAST_RINT || std::isnan(value) || std::isinf(value)) return softnpu::to_bf16(value, saturate);
  const bool negative = (bits >> 31) != 0;
  uint32_t upper = bits >> 16;
  const uint32_t rest = bits & 0xFFFFu;
  const bool up = mode == RoundMode::CAST_ROUND ? rest >= 0x8000u
                                                : rest != 0 && ((mode == RoundMode::CAST_CEIL && !negative) ||
                                                                (mode == RoundMode::CAST_FLOOR && negative));
  if (up) ++upper;
  return softnpu::to_bf16(softnpu::float_of(upper << 16), saturate);
}

inline int32_t to_int32(float value, RoundMode mode) {
  const float whole = rounded(value, mode);
  if (std::isnan(whole)) return 0;
  if (whole >= 0x1p31f) return std::numeric_limits<int32_t>::max();
  if (whole < -0x1p31f) return std::numeric_limits<int32_t>::min();
  return static_cast<int32_t>(whole);
}

inline void convert(float value, bfloat16_t& result, RoundMode mode, bool saturate) {
  result.bits = to_bf16(value, mode, saturate);
}
inline void convert(float value, half& result, RoundMode, bool saturate) {
  result.bits = softnpu::to_fp16(value, saturate);
}
inline void convert(float value, int32_t& result, RoundMode mode, bool) { result = to_int32(value, mode); }
inline void convert(float value, float& result, RoundMode mode, bool) { result = rounded(value, mode); }
inline void convert(bfloat16_t value, float& result, RoundMode, bool) { result = softnpu::from_bf16(value.bits); }
inline void convert(half value, float& result, RoundMode, bool) { result = softnpu::from_fp16(value.bits); }
inline void convert(int32_t value, float& result, RoundMode, bool) { result = static_cast<float>(value); }

template <typename T, typename U>
void check_cast(const emu::Core& core, RoundMode mode) {
  constexpr bool kToBf16 = std::is_same_v<T, bfloat16_t> && std::is_same_v<U, float>;
  constexpr bool kToHalf = std::is_same_v<T, half> && std::is_same_v<U, float>;
  constexpr bool kToInt = std::is_same_v<T, int32_t> && std::is_same_v<U, float>;
  constexpr bool kWhole = std::is_same_v<T, float> && std::is_same_v<U, float>;
  constexpr bool kFromInt = std::is_same_v<T, float> && std::is_same_v<U, int32_t>;
  constexpr bool kFrom16 = std::is_same_v<T, float> && (std::is_same_v<U, bfloat16_t> || std::is_same_v<U, half>);
  static_assert(kToBf16 || kToHalf || kToInt || kWhole || kFromInt || kFrom16,
                "trap 14: Cast is emulated between float and bfloat16_t, half, int32_t, float");
  const int number = static_cast<int>(mode);
  const bool directed = mode >= RoundMode::CAST_RINT && mode <= RoundMode::CAST_TRUNC;
  if constexpr (kToBf16 || kToInt || kWhole) {
    if (!directed) {
      core.fail(emu::Trap::types, "round mode %d, legal for this pair are RINT, FLOOR, CEIL, ROUND and TRUNC (1..5)",
                number);
    }
  } else if constexpr (kToHalf) {
    if (mode != RoundMode::CAST_NONE && mode != RoundMode::CAST_RINT) {
      core.fail(emu::Trap::types, "round mode %d, emulated for float to half are NONE and RINT", number);
    }
  } else if constexpr (kFromInt) {
    if (mode != RoundMode::CAST_NONE && mode != RoundMode::CAST_RINT) {
      core.fail(emu::Trap::types, "round mode %d, emulated for int32_t to float are NONE and RINT", number);
    }
  } else {
    if (mode != RoundMode::CAST_NONE) core.fail(emu::Trap::types, "round mode %d, legal is CAST_NONE (0) only", number);
  }
}

template <typename T, typename U>
auto cast_body(emu::Core& core, RoundMode mode) {
  return [saturate = core.options.saturate, mode](uint8_t* dst, const uint8_t* const* src, int64_t count) {
    T* d = reinterpret_cast<T*>(dst);
    const U* a = reinterpret_cast<const U*>(src[0]);
    for (int64_t i = 0; i < count; ++i) convert(a[i], d[i], mode, saturate);
  };
}

template <typename T, typename U, typename Mask>
void cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, RoundMode mode, Mask mask, const U8& repeat,
          const UnaryRepeatParams& params, const emu::Where& where) {
  emu::core().call("Cast", where);
  check_cast<T, U>(emu::core(), mode);
  unary(emu::Op::Cast, dst, src, mask, repeat, params, where, cast_body<T, U>(emu::core(), mode));
}

}  // namespace detail

template <typename T, typename U>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count,
                 emu::Where where = emu::Where::current()) {
  emu::Core& core = emu::core();
  core.begin(emu::Op::Cast, where);
  detail::check_cast<T, U>(core, roundMode);
  const emu::Operand sources[] = {src.operand("src")};
  emu::walk_count(core, emu::Op::Cast, dst.operand("dst"), sizeof(T), sources, sizeof(U), count,
                  detail::cast_body<T, U>(core, roundMode));
}
template <typename T, typename U, bool isSetMask = true>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint64_t mask,
                 const U8 repeatTime, const UnaryRepeatParams& repeatParams, emu::Where where = emu::Where::current()) {
  static_assert(isSetMask, "the mask register is not emulated");
  detail::cast(dst, src, roundMode, static_cast<int64_t>(mask), repeatTime, repeatParams, where);
}
template <typename T, typename U, bool isSetMask = true>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode,
                 const uint64_t mask[], const U8 repeatTime, const UnaryRepeatParams& repeatParams,
                 emu::Where where = emu::Where::current()) {
  static_assert(isSetMask, "the mask register is not emulated");
  detail::cast(dst, src, roundMode, mask, repeatTime, repeatParams, where);
}

// Scalar conversions (kernel_operator_scalar_intf.h).
inline bfloat16_t ToBfloat16(const float& value) { return {softnpu::to_bf16(value, false)}; }
inline float ToFloat(const bfloat16_t& value) { return softnpu::from_bf16(value.bits); }

}  // namespace AscendC

#endif  // SOFTNPU_ASCENDC_CAST_H
