// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Names, enums and parameter structs of the AscendC subset, as the headers of CANN 8.5 to 9.1 declare them for dav-2201
// (asc-devkit include/basic_api/kernel_struct_*.h, impl/basic_api/{kernel_event,kernel_reg}.h,
// utils/kernel_utils_mode.h). One difference that no caller sees: a field narrower than its argument remembers a value
// that did not fit, and the instruction that uses it ends the launch; the genuine constructors and parameters wrap
// silently.
#ifndef SOFTNPU_ASCENDC_TYPES_H
#define SOFTNPU_ASCENDC_TYPES_H

#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#define __aicore__
#define __global__
#define __vector__
#define __gm__
#define __ubuf__
#define GM_ADDR __gm__ uint8_t*

namespace softnpu::ascendc {

// 16-bit floating-point values: storage only, the vector unit of dav-2201 has no arithmetic the kernels use on them.
struct Bfloat16 {
  uint16_t bits = 0;
};
struct Half {
  uint16_t bits = 0;
};

// An unsigned parameter of the device's width that knows whether its value was cut.
template <typename T>
struct Field {
  template <std::integral V>
  constexpr Field(V given) : value(static_cast<T>(given)), wanted(static_cast<int64_t>(given)) {}
  constexpr operator T() const { return value; }
  constexpr bool cut() const { return wanted != static_cast<int64_t>(value); }
  T value;
  int64_t wanted;
};

}  // namespace softnpu::ascendc

using bfloat16_t = softnpu::ascendc::Bfloat16;
using half = softnpu::ascendc::Half;

enum pipe_t { PIPE_S = 0, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
enum KernelMetaType : uint8_t { KERNEL_TYPE_AIV_ONLY };
#define KERNEL_TASK_TYPE_DEFAULT(value) \
  static_assert((value) == KERNEL_TYPE_AIV_ONLY, "only vector kernels are emulated")

namespace AscendC {

namespace emu = softnpu::ascendc;
using TEventID = int8_t;

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC, LCM = VECCALC, SPM };
using QuePosition = TPosition;

enum class HardEvent : uint8_t {
  MTE2_MTE1,
  MTE1_MTE2,
  MTE1_M,
  M_MTE1,
  MTE2_V,
  V_MTE2,
  MTE3_V,
  V_MTE3,
  M_V,
  V_M,
  V_V,
  MTE3_MTE1,
  MTE1_MTE3,
  MTE1_V,
  MTE2_M,
  M_MTE2,
  V_MTE1,
  M_FIX,
  FIX_M,
  MTE3_MTE2,
  MTE2_MTE3,
  S_V,
  V_S,
  S_MTE2,
  MTE2_S,
  S_MTE3,
  MTE3_S,
  MAX = 35,
};

enum class RoundMode : uint8_t { CAST_NONE = 0, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX = 0, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };
enum class CacheMode { CACHE_MODE_DISABLE = 0, CACHE_MODE_NORMAL = 1, CACHE_MODE_LAST = 2, CACHE_MODE_PERSISTENT = 4 };
enum class CacheRwMode { READ = 1, WRITE = 2, RW = 3 };
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

using U8 = emu::Field<uint8_t>;
using U16 = emu::Field<uint16_t>;
using U32 = emu::Field<uint32_t>;

struct DataCopyParams {
  DataCopyParams() {}
  DataCopyParams(const U16 count, const U16 len, const U16 srcStrideIn, const U16 dstStrideIn)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn) {}
  U16 blockCount = 1;
  U16 blockLen = 0;  // 32-byte blocks; bytes in DataCopyPad
  union {
    U16 srcGap = 0;
    U16 srcStride;
  };
  union {
    U16 dstGap = 0;
    U16 dstStride;
  };
};

struct DataCopyExtParams {
  DataCopyExtParams() {}
  DataCopyExtParams(const U16 count, const U32 len, const U32 srcStrideIn, const U32 dstStrideIn, const U32 rsvIn)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn), rsv(rsvIn) {}
  U16 blockCount = 1;
  U32 blockLen = 0;   // bytes
  U32 srcStride = 0;  // bytes in GM, 32-byte blocks in UB; from the end of a block to the start of the next
  U32 dstStride = 0;
  U32 rsv = 0;
};

struct DataCopyPadParams {
  DataCopyPadParams() {}
  DataCopyPadParams(const bool isPadValue, const U8 leftPadValue, const U8 rightPadValue, const uint64_t padValue)
      : isPad(isPadValue), leftPadding(leftPadValue), rightPadding(rightPadValue), paddingValue(padValue) {}
  bool isPad = false;
  U8 leftPadding = 0;
  U8 rightPadding = 0;
  uint64_t paddingValue = 0;
};

template <typename T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() {}
  DataCopyPadExtParams(const bool isPadValue, const U8 leftPadValue, const U8 rightPadValue, T padValue)
      : isPad(isPadValue), leftPadding(leftPadValue), rightPadding(rightPadValue), paddingValue(padValue) {}
  bool isPad = false;
  U8 leftPadding = 0;
  U8 rightPadding = 0;
  T paddingValue{};
};

struct CopyRepeatParams {
  CopyRepeatParams() {}
  CopyRepeatParams(const U16 dstStrideIn, const U16 srcStrideIn, U16 dstRepeatSizeIn, U16 srcRepeatSizeIn)
      : dstStride(dstStrideIn),
        srcStride(srcStrideIn),
        dstRepeatSize(dstRepeatSizeIn),
        srcRepeatSize(srcRepeatSizeIn) {}
  U16 dstStride = 0;
  U16 srcStride = 0;
  U16 dstRepeatSize = 8;
  U16 srcRepeatSize = 8;
};

struct BinaryRepeatParams {
  BinaryRepeatParams() {}
  BinaryRepeatParams(const U8 dstBlkStrideIn, const U8 src0BlkStrideIn, const U8 src1BlkStrideIn,
                     const U8 dstRepStrideIn, const U8 src0RepStrideIn, const U8 src1RepStrideIn)
      : dstBlkStride(dstBlkStrideIn),
        src0BlkStride(src0BlkStrideIn),
        src1BlkStride(src1BlkStrideIn),
        dstRepStride(dstRepStrideIn),
        src0RepStride(src0RepStrideIn),
        src1RepStride(src1RepStrideIn) {}
  U8 dstBlkStride = 1;
  U8 src0BlkStride = 1;
  U8 src1BlkStride = 1;
  U8 dstRepStride = 8;
  U8 src0RepStride = 8;
  U8 src1RepStride = 8;
};

struct UnaryRepeatParams {
  UnaryRepeatParams() {}
  UnaryRepeatParams(const U16 dstBlkStrideIn, const U16 srcBlkStrideIn, const U8 dstRepStrideIn,
                    const U8 srcRepStrideIn)
      : dstBlkStride(dstBlkStrideIn),
        srcBlkStride(srcBlkStrideIn),
        dstRepStride(dstRepStrideIn),
        srcRepStride(srcRepStrideIn) {}
  U16 dstBlkStride = 1;
  U16 srcBlkStride = 1;
  U8 dstRepStride = 8;
  U8 srcRepStride = 8;
};

struct BrcbRepeatParams {
  BrcbRepeatParams() {}
  BrcbRepeatParams(const U16 dstBlkStrideIn, const U16 dstRepStrideIn)
      : dstRepStride(dstRepStrideIn), dstBlkStride(dstBlkStrideIn) {}
  U16 dstRepStride = 8;
  U16 dstBlkStride = 1;
};

}  // namespace AscendC

#endif  // SOFTNPU_ASCENDC_TYPES_H
