// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Flags, barriers and system variables (asc-devkit include/basic_api/kernel_operator_{block_sync,sys_var,set_atomic,
// cache}_intf.h). Absent on purpose, so that a kernel with them does not compile: SyncAll and CrossCoreSetFlag, because
// blocks run one after another here; the mask register (SetVectorMask, SetMaskCount), because every form used sets its
// own mask.
#ifndef SOFTNPU_ASCENDC_SYNC_H
#define SOFTNPU_ASCENDC_SYNC_H

#include "tensors.h"

namespace AscendC {

namespace detail {
template <HardEvent event>
inline emu::Core& flag_call(const char* api, int32_t id, const emu::Where& where) {
  static_assert(emu::pipes_of(event).valid(), "an event between pipes that a vector core has");
  emu::Core& core = emu::core();
  core.call(api, where);
  if (id < 0 || id > 5) {
    core.fail(emu::Trap::event_balance, "id %d, expected 0..5 (6 and 7 are not for hand use)", id);
  }
  return core;
}
}  // namespace detail

template <HardEvent event>
inline void SetFlag(int32_t eventID, emu::Where where = emu::Where::current()) {
  detail::flag_call<event>("SetFlag", eventID, where).set_flag(event, eventID);
}
template <HardEvent event>
inline void WaitFlag(int32_t eventID, emu::Where where = emu::Where::current()) {
  detail::flag_call<event>("WaitFlag", eventID, where).wait_flag(event, eventID);
}
template <pipe_t pipe>
inline void PipeBarrier() {
  static_assert(pipe == PIPE_V || pipe == PIPE_MTE2 || pipe == PIPE_MTE3 || pipe == PIPE_S || pipe == PIPE_ALL,
                "a pipe that a vector core has");
  emu::Core& core = emu::core();
  ++core.counters.barriers;
  if constexpr (pipe == PIPE_ALL) {
    core.order.barrier_all();
  } else {
    core.order.barrier(pipe == PIPE_V      ? emu::Pipe::V
                       : pipe == PIPE_MTE2 ? emu::Pipe::MTE2
                       : pipe == PIPE_MTE3 ? emu::Pipe::MTE3
                                           : emu::Pipe::S);
  }
}

inline int64_t GetBlockIdx() { return emu::core().block_index; }
inline int64_t GetBlockNum() { return emu::core().block_count; }
inline int64_t GetSubBlockIdx() { return 0; }

inline void SetAtomicNone() {}
template <typename T>
inline void SetAtomicAdd(emu::Where where = emu::Where::current()) {
  emu::core().call("SetAtomicAdd", where);
  emu::core().fail(emu::Trap::atomics, "the order of floating-point atomics is not fixed, so results would not be");
}

// After it, scalar reads of the line (or of all lines) see what MTE3 had written and the scalar unit has waited for.
template <typename T, CacheLine entireType, DcciDst dcciDst>
inline void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst, emu::Where where = emu::Where::current()) {
  emu::Core& core = emu::core();
  core.begin("DataCacheCleanAndInvalid", emu::Pipe::S, where);
  core.clean_cache(reinterpret_cast<uint64_t>(dst.GetPhyAddr()) & ~(emu::kCacheLine - 1),
                   entireType == CacheLine::ENTIRE_DATA_CACHE);
}

}  // namespace AscendC

#endif  // SOFTNPU_ASCENDC_SYNC_H
