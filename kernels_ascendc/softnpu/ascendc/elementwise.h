// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Add Sub Mul Div Max Min, Adds Muls Maxs Mins, Exp Ln Sqrt Rsqrt Reciprocal Abs (asc-devkit include/basic_api/
// kernel_operator_vec_{binary,binary_scalar,unary}_intf.h), each as count, mask and bit-mask form. Emulated for float;
// the four that the vector unit has for int32 too, for int32. MulAddDst, FusedMulAdd and Axpy are left out: whether the
// device rounds between product and sum is not documented.
#ifndef SOFTNPU_ASCENDC_ELEMENTWISE_H
#define SOFTNPU_ASCENDC_ELEMENTWISE_H

#include "values.h"
#include "vector.h"

namespace AscendC {

namespace detail {

template <typename T>
constexpr void check_arithmetic() {
  static_assert(!std::is_same_v<T, bfloat16_t>, "trap 14: dav-2201 has no bfloat16 arithmetic, Cast to float first");
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, int32_t>, "emulated for float and int32_t");
}
template <typename T>
constexpr void check_float() {
  static_assert(!std::is_same_v<T, bfloat16_t>, "trap 14: dav-2201 has no bfloat16 arithmetic, Cast to float first");
  static_assert(std::is_same_v<T, float>, "emulated for float");
}

template <typename T>
constexpr int64_t round_up_repeats(int64_t count) {
  constexpr int64_t kPerRepeat = emu::kRepeatBytes / static_cast<int64_t>(sizeof(T));
  return (count + kPerRepeat - 1) / kPerRepeat;
}

// The loops are in place or on disjoint operands (the walkers saw to it), so iterations do not depend on each other.
template <typename T, typename F>
auto binary_body(F function) {
  return [function](uint8_t* dst, const uint8_t* const* src, int64_t count) {
    T* d = reinterpret_cast<T*>(dst);
    const T *a = reinterpret_cast<const T*>(src[0]), *b = reinterpret_cast<const T*>(src[1]);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) d[i] = function(a[i], b[i]);
  };
}
template <typename T, typename F>
auto unary_body(F function) {
  return [function](uint8_t* dst, const uint8_t* const* src, int64_t count) {
    T* d = reinterpret_cast<T*>(dst);
    const T* a = reinterpret_cast<const T*>(src[0]);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) d[i] = function(a[i]);
  };
}
// With fuzz, every result is moved; by: the number that says how far.
template <typename F, typename Move>
auto inexact_body(emu::Core& core, F function, Move move) {
  return [&core, function, move, plain = unary_body<float>(function)](uint8_t* dst, const uint8_t* const* src,
                                                                      int64_t count) {
    plain(dst, src, count);
    if (!core.options.fuzz) return;
    float* d = reinterpret_cast<float*>(dst);
    for (int64_t i = 0; i < count; ++i) {
      d[i] = move(d[i], emu::noise(core.options.seed, core.number(), static_cast<uint64_t>(dst - core.ub) / 4 + i));
    }
  };
}

template <typename T, typename Body>
void binary(emu::Op op, const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
            int64_t count, const emu::Where& where, Body&& body) {
  emu::Core& core = emu::core();
  core.begin(op, where);
  const emu::Operand sources[] = {src0.operand("src0"), src1.operand("src1")};
  emu::walk_count(core, op, dst.operand("dst"), sizeof(T), sources, sizeof(T), count, body);
}
template <typename T, typename Mask, typename Body>
void binary(emu::Op op, const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, Mask mask,
            const U8& repeat, const BinaryRepeatParams& p, bool accumulates, const emu::Where& where, Body&& body) {
  emu::Core& core = emu::core();
  core.begin(op, where);
  const emu::Side to{dst.operand("dst"), sizeof(T), emu::stride_bytes(core, "dstBlkStride", p.dstBlkStride, false),
                     emu::stride_bytes(core, "dstRepStride", p.dstRepStride)};
  const emu::Side from[] = {{src0.operand("src0"), sizeof(T), emu::stride_bytes(core, "src0BlkStride", p.src0BlkStride),
                             emu::stride_bytes(core, "src0RepStride", p.src0RepStride)},
                            {src1.operand("src1"), sizeof(T), emu::stride_bytes(core, "src1BlkStride", p.src1BlkStride),
                             emu::stride_bytes(core, "src1RepStride", p.src1RepStride)}};
  emu::walk_repeats(core, op, to, from, emu::lanes_of(core, mask, emu::kRepeatBytes / static_cast<int64_t>(sizeof(T))),
                    emu::repeats_of(core, repeat), accumulates, body);
}
template <typename T, typename Body>
void unary(emu::Op op, const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t count, const emu::Where& where,
           Body&& body) {
  emu::Core& core = emu::core();
  core.begin(op, where);
  const emu::Operand sources[] = {src.operand("src")};
  emu::walk_count(core, op, dst.operand("dst"), sizeof(T), sources, sizeof(T), count, body);
}
template <typename T, typename U, typename Mask, typename Body>
void unary(emu::Op op, const LocalTensor<T>& dst, const LocalTensor<U>& src, Mask mask, const U8& repeat,
           const UnaryRepeatParams& p, const emu::Where& where, Body&& body) {
  emu::Core& core = emu::core();
  core.begin(op, where);
  const emu::Side to{dst.operand("dst"), sizeof(T), emu::stride_bytes(core, "dstBlkStride", p.dstBlkStride, false),
                     emu::stride_bytes(core, "dstRepStride", p.dstRepStride)};
  const emu::Side from[] = {{src.operand("src"), sizeof(U), emu::stride_bytes(core, "srcBlkStride", p.srcBlkStride),
                             emu::stride_bytes(core, "srcRepStride", p.srcRepStride)}};
  constexpr int64_t kLanes = emu::kRepeatBytes / static_cast<int64_t>(std::max(sizeof(T), sizeof(U)));
  emu::walk_repeats(core, op, to, from, emu::lanes_of(core, mask, kLanes), emu::repeats_of(core, repeat), false, body);
}

}  // namespace detail

#define SOFTNPU_BINARY(NAME, CHECK, ACCUMULATES, EXPRESSION)                                                           \
  template <typename T>                                                                                                \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,                  \
                   const int32_t& count, emu::Where where = emu::Where::current()) {                                   \
    detail::CHECK<T>();                                                                                                \
    const auto body = detail::binary_body<T>([](T a, T b) { return EXPRESSION; });                                     \
    detail::binary(emu::Op::NAME, dst, src0, src1, count, where, body);                                                \
  }                                                                                                                    \
  template <typename T, bool isSetMask = true>                                                                         \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,   \
                   const U8 repeatTime, const BinaryRepeatParams& repeatParams,                                        \
                   emu::Where where = emu::Where::current()) {                                                         \
    static_assert(isSetMask, "the mask register is not emulated");                                                     \
    detail::CHECK<T>();                                                                                                \
    const auto body = detail::binary_body<T>([](T a, T b) { return EXPRESSION; });                                     \
    detail::binary(emu::Op::NAME, dst, src0, src1, static_cast<int64_t>(mask), repeatTime, repeatParams, ACCUMULATES,  \
                   where, body);                                                                                       \
  }                                                                                                                    \
  template <typename T, bool isSetMask = true>                                                                         \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask[], \
                   const U8 repeatTime, const BinaryRepeatParams& repeatParams,                                        \
                   emu::Where where = emu::Where::current()) {                                                         \
    static_assert(isSetMask, "the mask register is not emulated");                                                     \
    detail::CHECK<T>();                                                                                                \
    const auto body = detail::binary_body<T>([](T a, T b) { return EXPRESSION; });                                     \
    detail::binary(emu::Op::NAME, dst, src0, src1, static_cast<const uint64_t*>(mask), repeatTime, repeatParams,       \
                   ACCUMULATES, where, body);                                                                          \
  }

SOFTNPU_BINARY(Add, check_arithmetic, true, emu::sum(a, b))
SOFTNPU_BINARY(Sub, check_arithmetic, true, emu::difference(a, b))
SOFTNPU_BINARY(Mul, check_arithmetic, true, emu::product(a, b))
SOFTNPU_BINARY(Div, check_float, false, a / b)
SOFTNPU_BINARY(Max, check_arithmetic, true, emu::maximum(a, b))
SOFTNPU_BINARY(Min, check_arithmetic, true, emu::minimum(a, b))
#undef SOFTNPU_BINARY

#define SOFTNPU_SCALAR(NAME, EXPRESSION)                                                                               \
  template <typename T, bool isSetMask = true>                                                                         \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count,   \
                   emu::Where where = emu::Where::current()) {                                                         \
    detail::check_arithmetic<T>();                                                                                     \
    const auto body = detail::unary_body<T>([b = scalarValue](T a) { return EXPRESSION; });                            \
    detail::unary(emu::Op::NAME, dst, src, count, where, body);                                                        \
  }                                                                                                                    \
  template <typename T, bool isSetMask = true>                                                                         \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t mask,          \
                   const U8 repeatTime, const UnaryRepeatParams& repeatParams,                                         \
                   emu::Where where = emu::Where::current()) {                                                         \
    static_assert(isSetMask, "the mask register is not emulated");                                                     \
    detail::check_arithmetic<T>();                                                                                     \
    const auto body = detail::unary_body<T>([b = scalarValue](T a) { return EXPRESSION; });                            \
    detail::unary(emu::Op::NAME, dst, src, static_cast<int64_t>(mask), repeatTime, repeatParams, where, body);         \
  }                                                                                                                    \
  template <typename T, bool isSetMask = true>                                                                         \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, uint64_t mask[],        \
                   const U8 repeatTime, const UnaryRepeatParams& repeatParams,                                         \
                   emu::Where where = emu::Where::current()) {                                                         \
    static_assert(isSetMask, "the mask register is not emulated");                                                     \
    detail::check_arithmetic<T>();                                                                                     \
    const auto body = detail::unary_body<T>([b = scalarValue](T a) { return EXPRESSION; });                            \
    detail::unary(emu::Op::NAME, dst, src, static_cast<const uint64_t*>(mask), repeatTime, repeatParams, where, body); \
  }

SOFTNPU_SCALAR(Adds, emu::sum(a, b))
SOFTNPU_SCALAR(Muls, emu::product(a, b))
SOFTNPU_SCALAR(Maxs, emu::maximum(a, b))
SOFTNPU_SCALAR(Mins, emu::minimum(a, b))
#undef SOFTNPU_SCALAR

#define SOFTNPU_UNARY(NAME, BODY)                                                                                      \
  template <typename T>                                                                                                \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count,                         \
                   emu::Where where = emu::Where::current()) {                                                         \
    detail::check_float<T>();                                                                                          \
    detail::unary(emu::Op::NAME, dst, src, count, where, BODY);                                                        \
  }                                                                                                                    \
  template <typename T, bool isSetMask = true>                                                                         \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, const U8 repeatTime,           \
                   const UnaryRepeatParams& repeatParams, emu::Where where = emu::Where::current()) {                  \
    static_assert(isSetMask, "the mask register is not emulated");                                                     \
    detail::check_float<T>();                                                                                          \
    detail::unary(emu::Op::NAME, dst, src, static_cast<int64_t>(mask), repeatTime, repeatParams, where, BODY);         \
  }                                                                                                                    \
  template <typename T, bool isSetMask = true>                                                                         \
  inline void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask[], const U8 repeatTime,         \
                   const UnaryRepeatParams& repeatParams, emu::Where where = emu::Where::current()) {                  \
    static_assert(isSetMask, "the mask register is not emulated");                                                     \
    detail::check_float<T>();                                                                                          \
    detail::unary(emu::Op::NAME, dst, src, static_cast<const uint64_t*>(mask), repeatTime, repeatParams, where, BODY); \
  }

#define SOFTNPU_INEXACT(EXPRESSION, MOVE) \
  detail::inexact_body(emu::core(), [](float a) { return static_cast<float>(EXPRESSION); }, emu::MOVE)

SOFTNPU_UNARY(Exp, SOFTNPU_INEXACT(softnpu::exp32(a), move_ulp))
SOFTNPU_UNARY(Ln, SOFTNPU_INEXACT(std::log(static_cast<double>(a)), move_ulp))
SOFTNPU_UNARY(Rsqrt, SOFTNPU_INEXACT(1.0 / std::sqrt(static_cast<double>(a)), move_relative))
SOFTNPU_UNARY(Reciprocal, SOFTNPU_INEXACT(1.0f / a, move_relative))
SOFTNPU_UNARY(Sqrt, detail::unary_body<float>([](float a) { return std::sqrt(a); }))
SOFTNPU_UNARY(Abs, detail::unary_body<float>([](float a) { return std::fabs(a); }))
#undef SOFTNPU_INEXACT
#undef SOFTNPU_UNARY

}  // namespace AscendC

#endif  // SOFTNPU_ASCENDC_ELEMENTWISE_H
