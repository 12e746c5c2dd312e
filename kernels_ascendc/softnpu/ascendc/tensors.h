// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// LocalTensor and GlobalTensor (asc-devkit include/basic_api/kernel_tensor.h). A tensor is a window: where it starts
// and how much of it is left, so that `t[i]` is shorter than `t`. An index past the end is reported by the instruction
// that uses the result, because operator[] has no place for a source location.
// Left out: GlobalTensor::operator() and LocalTensor::operator() (references that nothing could check), shapes, traits.
#ifndef SOFTNPU_ASCENDC_TENSORS_H
#define SOFTNPU_ASCENDC_TENSORS_H

#include "core.h"
#include "types.h"

namespace AscendC {

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;
  LocalTensor() = default;

  LocalTensor operator[](const uint32_t offset) const {
    LocalTensor result = *this;
    result.offset_ += static_cast<int64_t>(offset) * static_cast<int64_t>(sizeof(T));
    result.size_ -= static_cast<int64_t>(offset) * static_cast<int64_t>(sizeof(T));
    return result;
  }
  T GetValue(const uint32_t index, emu::Where where = emu::Where::current()) const {
    emu::Core& core = emu::core();
    core.begin("LocalTensor.GetValue", emu::Pipe::S, where);
    const uint8_t* source = core.source((*this)[index].operand("tensor"), sizeof(T), sizeof(T));
    T value;
    std::memcpy(&value, source, sizeof(T));
    return value;
  }
  template <typename S>
  void SetValue(const uint32_t index, const S value, emu::Where where = emu::Where::current()) const {
    emu::Core& core = emu::core();
    core.begin("LocalTensor.SetValue", emu::Pipe::S, where);
    const T converted = static_cast<T>(value);
    std::memcpy(core.destination((*this)[index].operand("tensor"), sizeof(T), sizeof(T)), &converted, sizeof(T));
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    return LocalTensor<U>(offset_, size_, buffer_, generation_, position_);
  }
  uint64_t GetPhyAddr() const { return static_cast<uint64_t>(offset_); }
  uint64_t GetPhyAddr(const uint32_t offset) const { return (*this)[offset].GetPhyAddr(); }
  int32_t GetPosition() const { return static_cast<int32_t>(position_); }
  void SetSize(const uint32_t size) { size_ = static_cast<int64_t>(size) * static_cast<int64_t>(sizeof(T)); }
  uint32_t GetSize() const { return size_ > 0 ? static_cast<uint32_t>(size_ / static_cast<int64_t>(sizeof(T))) : 0; }

  // Not of AscendC: for the emulation itself.
  LocalTensor(int64_t offset, int64_t size, int32_t buffer, uint32_t generation, TPosition position)
      : offset_(offset), size_(size), buffer_(buffer), generation_(generation), position_(position) {}
  emu::Operand operand(const char* name) const { return {name, offset_, size_, buffer_, generation_}; }

 private:
  int64_t offset_ = 0, size_ = 0;
  int32_t buffer_ = -1;
  uint32_t generation_ = 0;
  TPosition position_ = TPosition::VECCALC;
};

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;

  void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize) {
    address_ = buffer;
    declared_ = static_cast<int64_t>(bufferSize * sizeof(T));
  }
  void SetGlobalBuffer(__gm__ T* buffer) {
    address_ = buffer;
    declared_ = -1;
  }
  const __gm__ T* GetPhyAddr() const { return address_; }
  __gm__ T* GetPhyAddr(const uint64_t offset) const { return address_ + offset; }
  GlobalTensor operator[](const uint64_t offset) const {
    GlobalTensor result = *this;
    const uint64_t bytes = offset * sizeof(T);  // wraps as on the device; the access is found out of bounds
    result.address_ = reinterpret_cast<T*>(reinterpret_cast<uint64_t>(address_) + bytes);
    if (declared_ >= 0) {
      const auto declared = static_cast<uint64_t>(declared_);
      result.declared_ = bytes < declared ? static_cast<int64_t>(declared - bytes) : 0;
    }
    return result;
  }
  // Through the data cache: stale once MTE3 has written the line in the same launch (trap 16).
  T GetValue(const uint64_t offset, emu::Where where = emu::Where::current()) const {
    emu::Core& core = emu::core();
    core.begin("GlobalTensor.GetValue", emu::Pipe::S, where);
    const GlobalTensor element = (*this)[offset];
    element.touch(sizeof(T), 1, 0, false);
    ++core.counters.scalar_reads;
    core.counters.scalar_bytes += static_cast<int64_t>(sizeof(T));
    T value;
    std::memcpy(&value, element.address_, sizeof(T));
    return value;
  }
  void SetValue(const uint64_t, T, emu::Where where = emu::Where::current()) {
    emu::core().begin("GlobalTensor.SetValue", emu::Pipe::S, where);
    emu::core().fail(emu::Trap::scalar_gm_write,
                     "leaves a dirty cache line that may overwrite what other cores write beside it; use DataCopyPad");
  }
  uint64_t GetSize() const { return declared_ > 0 ? static_cast<uint64_t>(declared_) / sizeof(T) : 0; }
  template <CacheRwMode mode = CacheRwMode::RW>
  void SetL2CacheHint(CacheMode) {}

  // Not of AscendC: the running instruction touches `count` pieces of `bytes` bytes, `stride` bytes apart.
  __gm__ uint8_t* touch(int64_t bytes, int64_t count, int64_t stride, bool write) const {
    emu::Core& core = emu::core();
    if (reinterpret_cast<uint64_t>(address_) % sizeof(T) != 0) {
      core.fail(emu::Trap::alignment, "GM address %p is no multiple of the element's %zu bytes",
                static_cast<const void*>(address_), sizeof(T));
    }
    core.touch_gm(reinterpret_cast<uint64_t>(address_), bytes, count, stride, write, declared_);
    return reinterpret_cast<uint8_t*>(address_);
  }

 private:
  __gm__ T* address_ = nullptr;
  int64_t declared_ = -1;  // bytes; -1: never said
};

}  // namespace AscendC

#endif  // SOFTNPU_ASCENDC_TENSORS_H
