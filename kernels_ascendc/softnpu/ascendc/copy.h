// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// DataCopy and DataCopyPad between GM and UB, and inside UB (asc-devkit
// include/basic_api/kernel_operator_data_copy_intf.h). A block lands on the next 32-byte boundary of UB; lengths and
// gaps are counted in the units of their side, from the end of one block to the start of the next. What a copy leaves
// undefined (padding) holds no value afterwards.
#ifndef SOFTNPU_ASCENDC_COPY_H
#define SOFTNPU_ASCENDC_COPY_H

#include "sync.h"

namespace AscendC {

namespace detail {

inline int64_t round_up(int64_t bytes) { return (bytes + emu::kBlock - 1) / emu::kBlock * emu::kBlock; }

// Blocks of `bytes` bytes; every stride from start to start, in bytes. left and right: bytes of padding in UB.
struct Shape {
  int64_t count, bytes, gm_stride, ub_stride, left = 0, right = 0;
};

inline void check_fields(const emu::Core& core, const char* what, bool cut) {
  if (cut) core.fail(emu::Trap::copy_params, "%s does not fit its parameter's type", what);
}

template <typename T>
void gm_to_ub(emu::Core& core, const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Shape& shape,
              const T* padding) {
  const int64_t occupied = round_up(shape.left + shape.bytes + shape.right);
  const emu::Operand target = dst.operand("dst");
  core.check(target, 0, (shape.count - 1) * shape.ub_stride + shape.left + shape.bytes + shape.right, emu::kBlock);
  const uint8_t* source = src.touch(shape.bytes, shape.count, shape.gm_stride, false);
  for (int64_t i = 0; i < shape.count; ++i) {
    const int64_t offset = target.offset + i * shape.ub_stride;
    core.write("dst", offset, occupied);  // the hardware writes whole blocks
    if (occupied != shape.bytes) core.forget(offset, occupied);
    std::memcpy(core.ub + offset + shape.left, source + i * shape.gm_stride, static_cast<size_t>(shape.bytes));
    core.write("dst", offset + shape.left, shape.bytes);
    if (padding != nullptr) {
      const auto fill = [&](int64_t from, int64_t bytes) {
        for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(sizeof(T))) {
          std::memcpy(core.ub + from + at, padding, sizeof(T));
        }
        core.write("dst", from, bytes);
      };
      fill(offset, shape.left);
      fill(offset + shape.left + shape.bytes, shape.right);
    }
  }
  ++core.counters.mte2_transfers;
  core.counters.mte2_bytes += shape.count * shape.bytes;
}

template <typename T>
void ub_to_gm(emu::Core& core, const GlobalTensor<T>& dst, const LocalTensor<T>& src, const Shape& shape) {
  const emu::Operand source = src.operand("src");
  core.check(source, 0, (shape.count - 1) * shape.ub_stride + shape.bytes, emu::kBlock);
  for (int64_t i = 0; i < shape.count; ++i) core.read("src", source.offset + i * shape.ub_stride, shape.bytes);
  uint8_t* target = dst.touch(shape.bytes, shape.count, shape.gm_stride, true);
  for (int64_t i = 0; i < shape.count; ++i) {
    std::memcpy(target + i * shape.gm_stride, core.ub + source.offset + i * shape.ub_stride,
                static_cast<size_t>(shape.bytes));
  }
  ++core.counters.mte3_transfers;
  core.counters.mte3_bytes += shape.count * shape.bytes;
}

template <typename T>
Shape contiguous(const emu::Core& core, const U32& count) {
  const int64_t bytes = count.wanted * static_cast<int64_t>(sizeof(T));
  if (bytes % emu::kBlock != 0) {
    core.fail(emu::Trap::truncated_copy, "count %lld is %lld bytes, no multiple of 32: the rest would not be copied",
              static_cast<long long>(count.wanted), static_cast<long long>(bytes));
  }
  if (bytes <= 0 || bytes / emu::kBlock > 65535) {
    core.fail(emu::Trap::copy_params, "count %lld is %lld blocks of 32 bytes, expected 1..65535",
              static_cast<long long>(count.wanted), static_cast<long long>(bytes / emu::kBlock));
  }
  return {1, bytes, bytes, bytes};
}

// Lengths and gaps in 32-byte blocks on both sides.
inline Shape blocks(const emu::Core& core, const DataCopyParams& params, bool to_ub) {
  check_fields(core, "blockCount", params.blockCount.cut());
  check_fields(core, "blockLen", params.blockLen.cut());
  check_fields(core, "srcGap", params.srcGap.cut());
  check_fields(core, "dstGap", params.dstGap.cut());
  if (params.blockCount < 1 || params.blockCount > 4095) {
    core.fail(emu::Trap::copy_params, "blockCount %d, expected 1..4095", static_cast<int>(params.blockCount));
  }
  if (params.blockLen < 1) core.fail(emu::Trap::copy_params, "blockLen 0, expected 1..65535 blocks of 32 bytes");
  const int64_t bytes = params.blockLen * emu::kBlock;
  const int64_t source = bytes + params.srcGap * emu::kBlock, target = bytes + params.dstGap * emu::kBlock;
  return {params.blockCount, bytes, to_ub ? source : target, to_ub ? target : source};
}

// Lengths in bytes, gaps in bytes on the GM side and in 32-byte blocks on the UB side. count 0: nothing to copy.
template <typename Params>
Shape padded(const emu::Core& core, const Params& params, bool to_ub, int64_t left, int64_t right) {
  check_fields(core, "blockCount", params.blockCount.cut());
  check_fields(core, "blockLen", params.blockLen.cut());
  check_fields(core, "srcStride", params.srcStride.cut());
  check_fields(core, "dstStride", params.dstStride.cut());
  if (params.blockCount > 4095) {
    core.fail(emu::Trap::copy_params, "blockCount %d, expected 0..4095", static_cast<int>(params.blockCount));
  }
  if (params.blockLen > 2097151) {
    core.fail(emu::Trap::pad_copy, "blockLen %lld bytes, expected at most 2097151",
              static_cast<long long>(params.blockLen.wanted));
  }
  if (left > emu::kBlock || right > emu::kBlock) {
    core.fail(emu::Trap::pad_copy, "padding of %lld bytes left and %lld right, expected at most 32 each",
              static_cast<long long>(left), static_cast<long long>(right));
  }
  const int64_t bytes = params.blockLen;
  const int64_t gm_gap = to_ub ? params.srcStride : params.dstStride;
  const int64_t ub_gap = to_ub ? params.dstStride : params.srcStride;
  return {bytes == 0 ? 0 : static_cast<int64_t>(params.blockCount), bytes, bytes + gm_gap,
          round_up(left + bytes + right) + ub_gap * emu::kBlock,    left,  right};
}

template <typename T, typename Params>
void pad_in(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Params& params, bool fill, const U8& left,
            const U8& right, const T& value, const emu::Where& where) {
  emu::Core& core = emu::core();
  core.begin("DataCopyPad", emu::Pipe::MTE2, where);
  const auto size = static_cast<int64_t>(sizeof(T));
  const Shape shape = padded(core, params, true, left.wanted * size, right.wanted * size);
  if (shape.bytes % size != 0) {
    core.fail(emu::Trap::pad_copy, "blockLen %lld bytes, expected whole elements of %lld",
              static_cast<long long>(shape.bytes), static_cast<long long>(size));
  }
  if (shape.count > 0) gm_to_ub(core, dst, src, shape, fill ? &value : nullptr);
}

template <typename T, typename Params>
void pad_out(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const Params& params, const emu::Where& where) {
  emu::Core& core = emu::core();
  core.begin("DataCopyPad", emu::Pipe::MTE3, where);
  const Shape shape = padded(core, params, false, 0, 0);
  if (shape.count > 0) ub_to_gm(core, dst, src, shape);
}

inline void ub_to_ub(const emu::Operand& target, const emu::Operand& source, const Shape& shape, int64_t source_stride,
                     const emu::Where& where) {
  emu::Core& core = emu::core();
  core.begin("DataCopy", emu::Pipe::V, where);
  core.count(emu::Op::DataCopy, (shape.count * shape.bytes + 255) / 256, shape.count * shape.bytes / 4);
  core.check(source, 0, (shape.count - 1) * source_stride + shape.bytes, emu::kBlock);
  core.check(target, 0, (shape.count - 1) * shape.ub_stride + shape.bytes, emu::kBlock);
  for (int64_t i = 0; i < shape.count; ++i) core.read("src", source.offset + i * source_stride, shape.bytes);
  for (int64_t i = 0; i < shape.count; ++i) {
    const int64_t from = source.offset + i * source_stride, to = target.offset + i * shape.ub_stride;
    if (from < to + shape.bytes && to < from + shape.bytes && from != to) {
      core.fail(emu::Trap::operand_overlap, "dst and src overlap in part");
    }
    core.write("dst", to, shape.bytes);
    std::memmove(core.ub + to, core.ub + from, static_cast<size_t>(shape.bytes));
  }
}

}  // namespace detail

// GM to UB, pipe MTE2.
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const U32 count,
                     emu::Where where = emu::Where::current()) {
  emu::Core& core = emu::core();
  core.begin("DataCopy", emu::Pipe::MTE2, where);
  detail::gm_to_ub<T>(core, dst, src, detail::contiguous<T>(core, count), nullptr);
}
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& repeatParams,
                     emu::Where where = emu::Where::current()) {
  emu::Core& core = emu::core();
  core.begin("DataCopy", emu::Pipe::MTE2, where);
  detail::gm_to_ub<T>(core, dst, src, detail::blocks(core, repeatParams, true), nullptr);
}
template <typename T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                        const DataCopyPadExtParams<T>& padParams, emu::Where where = emu::Where::current()) {
  detail::pad_in(dst, src, dataCopyParams, padParams.isPad, padParams.leftPadding, padParams.rightPadding,
                 padParams.paddingValue, where);
}
template <typename T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& dataCopyParams,
                        const DataCopyPadParams& padParams, emu::Where where = emu::Where::current()) {
  T value;
  std::memcpy(&value, &padParams.paddingValue, sizeof(T));
  detail::pad_in(dst, src, dataCopyParams, padParams.isPad, padParams.leftPadding, padParams.rightPadding, value,
                 where);
}

// UB to GM, pipe MTE3.
template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const U32 count,
                     emu::Where where = emu::Where::current()) {
  emu::Core& core = emu::core();
  core.begin("DataCopy", emu::Pipe::MTE3, where);
  detail::ub_to_gm(core, dst, src, detail::contiguous<T>(core, count));
}
template <typename T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& repeatParams,
                     emu::Where where = emu::Where::current()) {
  emu::Core& core = emu::core();
  core.begin("DataCopy", emu::Pipe::MTE3, where);
  detail::ub_to_gm(core, dst, src, detail::blocks(core, repeatParams, false));
}
template <typename T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                        emu::Where where = emu::Where::current()) {
  detail::pad_out(dst, src, dataCopyParams, where);
}
template <typename T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& dataCopyParams,
                        emu::Where where = emu::Where::current()) {
  detail::pad_out(dst, src, dataCopyParams, where);
}

// UB to UB, pipe V.
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const U32 count,
                     emu::Where where = emu::Where::current()) {
  emu::core().call("DataCopy", where);
  const detail::Shape shape = detail::contiguous<T>(emu::core(), count);
  detail::ub_to_ub(dst.operand("dst"), src.operand("src"), shape, shape.bytes, where);
}
template <typename T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& repeatParams,
                     emu::Where where = emu::Where::current()) {
  emu::core().call("DataCopy", where);
  const detail::Shape shape = detail::blocks(emu::core(), repeatParams, true);
  detail::ub_to_ub(dst.operand("dst"), src.operand("src"), shape, shape.gm_stride, where);
}

}  // namespace AscendC

#endif  // SOFTNPU_ASCENDC_COPY_H
