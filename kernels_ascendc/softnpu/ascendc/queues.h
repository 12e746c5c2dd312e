// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// TPipe, TQue, TQueBind and TBuf (asc-devkit include/basic_api/kernel_tpipe.h, impl/basic_api/kernel_tquebind_impl.h).
// A queue is bookkeeping over flags: EnQue sets the flag that DeQue waits for, FreeTensor sets the one that the next
// AllocTensor of that buffer waits for, each with an id of the pool that hand-set flags draw from too.
// Left out: depth 0, queues other than VECIN, VECOUT and VECIN-to-VECOUT, buffer pools, spilling (SPM).
#ifndef SOFTNPU_ASCENDC_QUEUES_H
#define SOFTNPU_ASCENDC_QUEUES_H

#include <array>

#include "tensors.h"

namespace AscendC {

template <TPosition src, TPosition dst, int32_t depth, auto mask = 0>
class TQueBind {
  static constexpr bool kIn = src == TPosition::GM && dst == TPosition::VECIN;
  static constexpr bool kOut = src == TPosition::VECOUT && dst == TPosition::GM;
  static constexpr bool kThrough = src == TPosition::VECIN && dst == TPosition::VECOUT;
  static_assert(kIn || kOut || kThrough, "queues emulated: VECIN, VECOUT, TQueBind<VECIN, VECOUT>");
  static_assert(depth >= 1, "depth 0 (in-place queues) is not emulated");

 public:
  template <typename T>
  LocalTensor<T> AllocTensor(emu::Where where = emu::Where::current()) {
    emu::Core& core = begin("AllocTensor", where);
    for (int32_t i = 0; i < buffers_; ++i) {
      emu::Buffer& buffer = core.buffers[static_cast<size_t>(first_ + cursor_)];
      const int32_t chosen = first_ + cursor_;
      cursor_ = (cursor_ + 1) % buffers_;
      if (buffer.state != emu::BufferState::free) continue;
      if (buffer.free_event >= 0) {
        core.wait_flag(kFree, buffer.free_event);
        core.release_event(kFree, buffer.free_event);
        buffer.free_event = -1;
      }
      buffer.state = emu::BufferState::occupied;
      buffer.where = where;
      ++buffer.generation;
      core.forget(buffer.begin, buffer.end - buffer.begin);
      return tensor<T>(chosen);
    }
    core.fail(emu::Trap::queue_state, "none of the %d buffers is free: the core would hang", buffers_);
  }
  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor, emu::Where where = emu::Where::current()) {
    emu::Core& core = begin("EnQue", where);
    emu::Buffer& buffer = own(core, tensor.operand("tensor"));
    if (buffer.state != emu::BufferState::occupied && buffer.state != emu::BufferState::dequeued) {
      core.fail(emu::Trap::queue_state, "the tensor is %s, expected allocated", name_of(buffer.state));
    }
    if (used_ == depth) {
      core.fail(emu::Trap::queue_state, "%d tensors are in the queue, which is its depth", depth);
    }
    buffer.enqueue_event = core.allocate_event(kEnQue, true);
    core.set_flag(kEnQue, buffer.enqueue_event);
    buffer.state = emu::BufferState::enqueued;
    buffer.where = where;
    queue_[static_cast<size_t>((head_ + used_) % depth)] = tensor.operand("tensor").buffer;
    ++used_;
    return true;
  }
  template <typename T>
  LocalTensor<T> DeQue(emu::Where where = emu::Where::current()) {
    emu::Core& core = begin("DeQue", where);
    if (used_ == 0) core.fail(emu::Trap::queue_state, "the queue is empty");
    const int32_t chosen = queue_[static_cast<size_t>(head_)];
    head_ = (head_ + 1) % depth;
    --used_;
    emu::Buffer& buffer = core.buffers[static_cast<size_t>(chosen)];
    core.wait_flag(kEnQue, buffer.enqueue_event);
    core.release_event(kEnQue, buffer.enqueue_event);
    buffer.enqueue_event = -1;
    buffer.state = emu::BufferState::dequeued;
    buffer.where = where;
    return tensor<T>(chosen);
  }
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor, emu::Where where = emu::Where::current()) {
    emu::Core& core = begin("FreeTensor", where);
    emu::Buffer& buffer = own(core, tensor.operand("tensor"));
    if (buffer.state != emu::BufferState::dequeued) {
      core.fail(emu::Trap::queue_state, "the tensor is %s, expected dequeued", name_of(buffer.state));
    }
    buffer.free_event = core.allocate_event(kFree, true);
    buffer.free_hard_event = kFree;
    core.set_flag(kFree, buffer.free_event);
    buffer.state = emu::BufferState::free;
  }
  bool VacantInQue() const { return used_ < depth; }
  bool HasTensorInQue() const { return used_ > 0; }
  int32_t GetTensorCountInQue() const { return used_; }
  bool HasIdleBuffer() const {
    for (int32_t i = 0; i < buffers_; ++i) {
      if (emu::core().buffers[static_cast<size_t>(first_ + i)].state == emu::BufferState::free) return true;
    }
    return false;
  }

 private:
  friend class TPipe;
  static constexpr HardEvent kEnQue = kIn ? HardEvent::MTE2_V : (kOut ? HardEvent::V_MTE3 : HardEvent::MTE2_MTE3);
  static constexpr HardEvent kFree = kIn ? HardEvent::V_MTE2 : (kOut ? HardEvent::MTE3_V : HardEvent::MTE3_MTE2);
  static constexpr TPosition kPosition = kOut ? TPosition::VECOUT : TPosition::VECIN;

  emu::Core& begin(const char* api, const emu::Where& where) const {
    emu::Core& core = emu::core();
    core.call(api, where);
    if (buffers_ == 0) core.fail(emu::Trap::queue_state, "InitBuffer was not called for this queue");
    return core;
  }
  emu::Buffer& own(emu::Core& core, const emu::Operand& operand) const {
    if (operand.buffer < first_ || operand.buffer >= first_ + buffers_) {
      core.fail(emu::Trap::queue_state, "the tensor does not belong to this queue");
    }
    emu::Buffer& buffer = core.buffers[static_cast<size_t>(operand.buffer)];
    if (buffer.generation != operand.generation) {
      core.fail(emu::Trap::queue_state, "the tensor is of an earlier AllocTensor");
    }
    return buffer;
  }
  template <typename T>
  LocalTensor<T> tensor(int32_t index) const {
    const emu::Buffer& buffer = emu::core().buffers[static_cast<size_t>(index)];
    return LocalTensor<T>(buffer.begin, buffer.end - buffer.begin, index, buffer.generation, kPosition);
  }

  int32_t first_ = 0, buffers_ = 0, cursor_ = 0;
  int32_t head_ = 0, used_ = 0;
  std::array<int32_t, static_cast<size_t>(depth)> queue_{};
};

template <TPosition pos, int32_t depth, auto mask = 0>
class TQue : public TQueBind<pos == TPosition::VECIN ? TPosition::GM : pos,
                             pos == TPosition::VECOUT ? TPosition::GM : pos, depth, mask> {};

template <TPosition pos = TPosition::LCM>
class TBuf {
  static_assert(pos == TPosition::VECCALC || pos == TPosition::VECIN || pos == TPosition::VECOUT,
                "a TBuf of a vector core lies in VECIN, VECOUT or VECCALC");

 public:
  template <typename T>
  LocalTensor<T> Get(emu::Where where = emu::Where::current()) {
    const emu::Buffer& buffer = own(where);
    return LocalTensor<T>(buffer.begin, buffer.end - buffer.begin, index_, 0, pos);
  }
  template <typename T>
  LocalTensor<T> Get(uint32_t len, emu::Where where = emu::Where::current()) {
    return GetWithOffset<T>(len, 0, where);
  }
  template <typename T>
  LocalTensor<T> GetWithOffset(uint32_t size, uint32_t bufOffset, emu::Where where = emu::Where::current()) {
    const emu::Buffer& buffer = own(where);
    const int64_t bytes = static_cast<int64_t>(size) * static_cast<int64_t>(sizeof(T));
    if (bufOffset + bytes > buffer.end - buffer.begin) {
      emu::core().fail(emu::Trap::extent, "%lld bytes from byte %u on, the buffer has %lld",
                       static_cast<long long>(bytes), bufOffset, static_cast<long long>(buffer.end - buffer.begin));
    }
    return LocalTensor<T>(buffer.begin + bufOffset, bytes, index_, 0, pos);
  }

 private:
  friend class TPipe;
  const emu::Buffer& own(const emu::Where& where) const {
    emu::core().call("TBuf.Get", where);
    if (index_ < 0) emu::core().fail(emu::Trap::queue_state, "InitBuffer was not called for this TBuf");
    return emu::core().buffers[static_cast<size_t>(index_)];
  }
  int32_t index_ = -1;
};

class TPipe {
 public:
  explicit TPipe(emu::Where where = emu::Where::current()) {
    emu::Core& core = emu::core();
    core.call("TPipe", where);
    if (core.pipe_seen) core.fail(emu::Trap::ub_budget, "a second TPipe in one kernel");
    core.pipe_seen = core.pipe_open = true;
  }
  ~TPipe() { Destroy(); }
  TPipe(const TPipe&) = delete;
  TPipe& operator=(const TPipe&) = delete;

  template <TPosition src, TPosition dst, int32_t depth, auto mask>
  bool InitBuffer(TQueBind<src, dst, depth, mask>& que, U8 num, U32 len, emu::Where where = emu::Where::current()) {
    emu::Core& core = begin(where, len);
    if (num.wanted < 1 || num.wanted > kBuffers) {
      core.fail(emu::Trap::ub_budget, "%lld buffers, expected 1..%d", static_cast<long long>(num.wanted), kBuffers);
    }
    que.first_ = static_cast<int32_t>(core.buffers.size());
    que.buffers_ = num;
    que.cursor_ = que.head_ = que.used_ = 0;
    for (int32_t i = 0; i < que.buffers_; ++i) add(core, len, emu::BufferState::free);
    return true;
  }
  template <TPosition pos>
  bool InitBuffer(TBuf<pos>& buf, U32 len, emu::Where where = emu::Where::current()) {
    emu::Core& core = begin(where, len);
    buf.index_ = static_cast<int32_t>(core.buffers.size());
    add(core, len, emu::BufferState::plain);
    return true;
  }
  TEventID FetchEventID(HardEvent event, emu::Where where = emu::Where::current()) {
    emu::core().call("FetchEventID", where);
    return emu::core().allocate_event(event, false);
  }
  template <HardEvent event>
  TEventID FetchEventID(emu::Where where = emu::Where::current()) {
    return FetchEventID(event, where);
  }
  template <HardEvent event>
  TEventID AllocEventID(emu::Where where = emu::Where::current()) {
    emu::core().call("AllocEventID", where);
    return emu::core().allocate_event(event, true);
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id, emu::Where where = emu::Where::current()) {
    emu::core().call("ReleaseEventID", where);
    emu::core().release_event(event, id);
  }
  // Waits for the flags of buffers that were given back, and for all pipes. Throws nothing: it runs in destructors.
  void Destroy() noexcept {
    emu::Core* core = emu::current;
    if (core == nullptr || !core->pipe_open) return;
    core->pipe_open = false;
    for (emu::Buffer& buffer : core->buffers) {
      if (buffer.free_event >= 0) core->drain_flag(buffer.free_hard_event, buffer.free_event);
      buffer.free_event = -1;
    }
    core->order.barrier_all();
  }

 private:
  static constexpr int kBuffers = 64;

  emu::Core& begin(const emu::Where& where, const U32& len) const {
    emu::Core& core = emu::core();
    core.call("InitBuffer", where);
    if (len.cut() || len == 0) {
      core.fail(emu::Trap::ub_budget, "%lld bytes, expected more than 0", static_cast<long long>(len.wanted));
    }
    return core;
  }
  static void add(emu::Core& core, int64_t len, emu::BufferState state) {
    const int64_t bytes = (len + emu::kBlock - 1) / emu::kBlock * emu::kBlock;
    if (core.buffers.size() >= kBuffers) core.fail(emu::Trap::ub_budget, "more than %d buffers", kBuffers);
    if (core.ub_used + bytes > emu::kUbBytes) {
      core.fail(emu::Trap::ub_budget, "%lld bytes are in use and %lld more asked for, UB has %lld",
                static_cast<long long>(core.ub_used), static_cast<long long>(bytes),
                static_cast<long long>(emu::kUbBytes));
    }
    core.add_buffer(bytes, state);
  }
};

}  // namespace AscendC

#endif  // SOFTNPU_ASCENDC_QUEUES_H
