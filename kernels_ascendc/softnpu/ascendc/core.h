// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// One vector core while it runs one block: its UB with what is known of every byte, its pipes, flags and buffers. Every
// emulated call goes through `begin`, then names the bytes it reads and writes; that is where a missing flag, a read of
// bytes never written, a wrong extent or an overlap ends the launch. Bookkeeping is one cell per 32-byte block (last
// writer, last reader of each pipe) and a bit per byte that was written, so a check costs about as much as the copy.
//
// Of the readers of a block the cell keeps no byte mask: two operations of which one reads and a later one writes
// other bytes of one block count as conflicting.
#ifndef SOFTNPU_ASCENDC_CORE_H
#define SOFTNPU_ASCENDC_CORE_H

#include <cstring>
#include <stdexcept>
#include <vector>

#include "counters.h"
#include "memory.h"
#include "misuse.h"
#include "order.h"

namespace softnpu::ascendc {

constexpr int64_t kUbBytes = 192 * 1024 - 8 * 1024 - 256;  // what a kernel may use by default
constexpr int64_t kBlock = 32;
constexpr int64_t kUbBlocks = kUbBytes / kBlock;
constexpr uint8_t kPoison = 0xFF;  // a NaN in every floating-point type

struct Options {
  enum class Sequence : uint8_t { forward, reverse, shuffled };
  Sequence sequence = Sequence::forward;  // of the blocks
  uint64_t seed = 0;                      // of the shuffle and of fuzz
  bool fuzz = false;                      // perturb what the device computes inexactly (trap 22)
  bool saturate = false;                  // saturation instead of INF/NAN mode (trap 23)
  bool faults = true;                     // whether launchers look at what kernels report; on a device none does
};

// An operand as an instruction sees it: where it lies in UB, and what is left of its tensor from there.
struct Operand {
  const char* name;
  int64_t offset;  // bytes in UB
  int64_t size;    // bytes; not positive if an index ran past the tensor
  int32_t buffer;  // -1: a tensor that was never given memory
  uint32_t generation;
};

enum class BufferState : uint8_t { free, occupied, enqueued, dequeued, plain };
inline const char* name_of(BufferState state) {
  constexpr const char* names[] = {"free", "allocated", "enqueued", "dequeued", "a TBuf"};
  return names[static_cast<int>(state)];
}

struct Buffer {
  int64_t begin, end;
  BufferState state;
  uint32_t generation = 0;  // of the tensor that AllocTensor last gave out
  int8_t enqueue_event = -1, free_event = -1;
  AscendC::HardEvent free_hard_event = AscendC::HardEvent::MAX;
  Where where{};  // of the call that led to the state
};

class Core {
 public:
  Core(const Options& options, GlobalMemory& memory, Counters& counters)
      : options(options), memory(memory), counters(counters), cells_(kUbBlocks), written_(kUbBlocks) {
    order.reset();
  }

  void start(int64_t block, int64_t blocks) {
    block_index = block;
    block_count = blocks;
    order.barrier_all();  // numbers go on, so that no cell has to be cleared: what blocks before did is complete
    buffers.clear();
    ub_used = 0;
    pipe_open = pipe_seen = false;
    std::memset(occupied_, 0, sizeof(occupied_));
    for (auto& ids : flags_) std::fill(std::begin(ids), std::end(ids), Flag{});
    pending_.clear();
    cleaned_.clear();
    first_write_ = memory.writes().size();
    ++counters.blocks;
  }

  // The next `bytes` bytes of UB, which hold nothing, as a buffer; whole blocks.
  void add_buffer(int64_t bytes, BufferState state) {
    buffers.push_back({ub_used, ub_used + bytes, state});
    std::memset(ub + ub_used, kPoison, static_cast<size_t>(bytes));
    std::fill_n(written_.begin() + ub_used / kBlock, bytes / kBlock, 0u);
    ub_used += bytes;
    counters.ub_bytes = std::max(counters.ub_bytes, ub_used);
  }

  // What must hold when the kernel returned.
  void finish() {
    if (!pipe_seen) return;
    api_ = "end of the kernel";
    for (size_t i = 0; i < buffers.size(); ++i) {
      const BufferState state = buffers[i].state;
      if (state != BufferState::free && state != BufferState::plain) {
        where_ = buffers[i].where;
        fail(Trap::queue_state, "buffer %zu of the pipe is still %s", i, name_of(state));
      }
    }
    for (int event = 0; event < kEvents; ++event) {
      for (int id = 0; id < kEventIds; ++id) {
        if (flags_[event][id].set) {
          where_ = flags_[event][id].where;
          fail(Trap::event_balance, "flag %d of event %s was set and never waited for", id, event_name(event).c_str());
        }
      }
    }
  }

  // ---------------------------------------------------------------------------------------------- instructions

  void begin(const char* api, Pipe pipe, const Where& where) {
    api_ = api;
    where_ = where;
    pipe_ = pipe;
    number_ = order.issue(pipe);
    recent_[index_of(pipe)][number_ % kRecent] = where;
  }
  void begin(Op op, const Where& where) { begin(kOpNames[static_cast<size_t>(op)], Pipe::V, where); }
  uint32_t number() const { return number_; }
  void call(const char* api, const Where& where) {
    api_ = api;
    where_ = where;
  }
  void count(Op op, int64_t repeats, int64_t elements) {
    Counters::Vector& vector = counters.vector[static_cast<size_t>(op)];
    ++vector.instructions;
    vector.repeats += repeats;
    vector.elements += elements;
  }

  [[noreturn, gnu::noinline, gnu::format(printf, 3, 4)]] void fail(Trap trap, const char* text, ...) const {
    char buffer[512];
    va_list arguments;
    va_start(arguments, text);
    std::vsnprintf(buffer, sizeof(buffer), text, arguments);
    va_end(arguments);
    throw Misuse(trap, api_, buffer, where_.file_name(), where_.line(), block_index);
  }

  // `operand` must be usable for `bytes` bytes from `first` on, at an address that is a multiple of `alignment`.
  void check(const Operand& operand, int64_t first, int64_t bytes, int64_t alignment) const {
    if (operand.buffer < 0) fail(Trap::extent, "%s is a tensor without memory", operand.name);
    const Buffer& buffer = buffers[static_cast<size_t>(operand.buffer)];
    if (buffer.state != BufferState::plain) {
      if (buffer.state == BufferState::free) fail(Trap::queue_state, "%s was given back by FreeTensor", operand.name);
      if (buffer.generation != operand.generation) {
        fail(Trap::queue_state, "%s is of an earlier AllocTensor, its memory was given out again", operand.name);
      }
      if (buffer.state == BufferState::enqueued) {
        fail(Trap::pipe_order, "%s lies in its queue: EnQue was called and DeQue was not", operand.name);
      }
    }
    if (first < 0 || bytes < 0 || first + bytes > operand.size || operand.offset + first + bytes > buffer.end) {
      fail(Trap::extent, "%s needs bytes %lld..%lld, its tensor has %lld from there, its buffer %lld", operand.name,
           static_cast<long long>(first), static_cast<long long>(first + bytes), static_cast<long long>(operand.size),
           static_cast<long long>(buffer.end - operand.offset));
    }
    if ((operand.offset + first) % alignment != 0) {
      fail(Trap::alignment, "%s starts at UB byte %lld, which is no multiple of %lld", operand.name,
           static_cast<long long>(operand.offset + first), static_cast<long long>(alignment));
    }
  }

  // Check the order and the contents of UB bytes [offset, offset + bytes) that the running instruction reads.
  void read(const char* name, int64_t offset, int64_t bytes) {
    visit(offset, bytes, [&](Cell& cell, uint32_t& written, uint32_t mask) {
      const uint32_t* known = known_now_;
      const int self = index_of(pipe_);
      if (cell.writer > known[cell.writer_pipe]) [[unlikely]] {
        const bool own = cell.writer_pipe == self && cell.writer == number_;
        const uint32_t bytes = own ? cell.unordered : cell.writer_pipe == self ? cell.written_last : cell.written_pipe;
        if ((bytes & mask) != 0) conflict(name, "reads", "wrote", cell, -1);
      }
      if ((written & mask) != mask) [[unlikely]] {
        poison(name, cell, mask & ~written);
      }
      if (cell.readers[self] != number_) {
        cell.read_before = cell.readers[self];
        cell.readers[self] = number_;
      }
    });
  }
  void write(const char* name, int64_t offset, int64_t bytes) {
    visit(offset, bytes, [&](Cell& cell, uint32_t& written, uint32_t mask) {
      const uint32_t* known = known_now_;
      const int self = index_of(pipe_);
      if (cell.writer > known[cell.writer_pipe]) [[unlikely]] {
        if (cell.writer_pipe != self) conflict(name, "writes", "wrote", cell, -1);
        if (cell.writer != number_) cell.unordered = cell.written_last;
        if ((cell.unordered & mask) != 0) conflict(name, "writes", "wrote", cell, -1);
        cell.written_last |= mask;
      } else {
        cell.unordered = 0;
        cell.written_last = mask;
      }
      for (int other = 0; other < kPipes; ++other) {
        const bool own = other == self && cell.readers[other] == number_;
        if ((own ? cell.read_before : cell.readers[other]) > known[other]) [[unlikely]] {
          conflict(name, "writes", "read", cell, other);
        }
      }
      cell.written_pipe = mask | (cell.writer_pipe == self ? cell.written_pipe : 0);
      cell.writer = number_;
      cell.writer_pipe = static_cast<uint8_t>(self);
      written |= mask;
    });
  }
  // Bytes that hold nothing from now on: padding of a copy, a buffer that was given out again.
  void forget(int64_t offset, int64_t bytes) {
    if (bytes <= 0) return;
    std::memset(ub + offset, kPoison, static_cast<size_t>(bytes));
    visit(offset, bytes, [](Cell&, uint32_t& written, uint32_t mask) { written &= ~mask; });
  }
  // Whether the running instruction has written into the block at `offset` already.
  bool written_now(int64_t offset) const {
    const Cell& cell = cells_[static_cast<size_t>(offset / kBlock)];
    return cell.writer == number_ && cell.writer_pipe == index_of(pipe_);
  }

  const uint8_t* source(const Operand& operand, int64_t bytes, int64_t alignment = kBlock) {
    check(operand, 0, bytes, alignment);
    read(operand.name, operand.offset, bytes);
    return ub + operand.offset;
  }
  uint8_t* destination(const Operand& operand, int64_t bytes, int64_t alignment = kBlock) {
    check(operand, 0, bytes, alignment);
    write(operand.name, operand.offset, bytes);
    return ub + operand.offset;
  }

  // ---------------------------------------------------------------------------------------------- flags

  int8_t allocate_event(AscendC::HardEvent event, bool keep) {
    uint8_t& occupied = occupied_[static_cast<int>(event)];
    for (int id = 0; id < kEventIds; ++id) {
      if (occupied & (1u << id)) continue;
      if (keep) occupied = static_cast<uint8_t>(occupied | (1u << id));
      return static_cast<int8_t>(id);
    }
    fail(Trap::event_ids, "all %d ids of event %s are taken", kEventIds, event_name(static_cast<int>(event)).c_str());
  }
  void release_event(AscendC::HardEvent event, int id) {
    uint8_t& occupied = occupied_[static_cast<int>(event)];
    if (id < 0 || id >= kEventIds || !(occupied & (1u << id))) {
      fail(Trap::event_balance, "id %d of event %s is not taken", id, event_name(static_cast<int>(event)).c_str());
    }
    occupied = static_cast<uint8_t>(occupied & ~(1u << id));
  }
  void set_flag(AscendC::HardEvent event, int id) {
    Flag& flag = flags_[static_cast<int>(event)][id];
    if (flag.set) {
      fail(Trap::event_balance, "flag %d of event %s is set already and was not waited for", id,
           event_name(static_cast<int>(event)).c_str());
    }
    flag = {order.flag(pipes_of(event).from), where_, true};
    ++counters.flags;
  }
  void wait_flag(AscendC::HardEvent event, int id) {
    Flag& flag = flags_[static_cast<int>(event)][id];
    if (!flag.set) {
      fail(Trap::event_balance, "flag %d of event %s was never set: the core would hang", id,
           event_name(static_cast<int>(event)).c_str());
    }
    order.wait(pipes_of(event).to, flag.clock);
    flag.set = false;
  }
  // For destructors: as wait_flag, and nothing where the flag is not set.
  void drain_flag(AscendC::HardEvent event, int id) noexcept {
    Flag& flag = flags_[static_cast<int>(event)][id];
    if (flag.set) order.wait(pipes_of(event).to, flag.clock);
    flag.set = false;
  }
  static std::string event_name(int event) {
    const EventPipes pipes = pipes_of(static_cast<AscendC::HardEvent>(event));
    return std::string(name_of(pipes.from)) + "_" + name_of(pipes.to);
  }

  // ---------------------------------------------------------------------------------------------- GM

  // The running instruction touches `count` pieces of `bytes` bytes, `stride` bytes from start to start.
  void touch_gm(uint64_t address, int64_t bytes, int64_t count, int64_t stride, bool write, int64_t declared);
  void clean_cache(uint64_t line, bool all) {
    cleaned_.push_back({line, all, order.known(Pipe::S)[index_of(Pipe::MTE3)]});
  }

  const Options& options;
  GlobalMemory& memory;
  Counters& counters;
  Order order;
  std::vector<Buffer> buffers;
  int64_t block_index = 0, block_count = 0, ub_used = 0;
  bool pipe_open = false, pipe_seen = false;
  alignas(64) uint8_t ub[kUbBytes];

 private:
  struct Cell {
    uint32_t writer = 0;  // number of the last writing instruction on its pipe
    uint32_t readers[kPipes] = {};
    uint32_t read_before = 0;   // the reader of its pipe before the instruction that read last
    uint32_t written_last = 0;  // bytes of the last write, and of those of its pipe before that nothing orders
    uint32_t unordered = 0;     // bytes of the latter only
    uint32_t written_pipe = 0;  // bytes of all writes of that pipe since another one wrote here
    uint8_t writer_pipe = 0;
  };
  struct Flag {
    Order::Clock clock{};
    Where where{};
    bool set = false;
  };
  struct Cleaned {
    uint64_t line;
    bool all;
    uint32_t known;  // MTE3 instructions that were complete
  };

  template <typename Visit>
  void visit(int64_t offset, int64_t bytes, Visit&& visit) {
    if (bytes <= 0) return;
    known_now_ = order.known(pipe_).data();
    Cell* cell = cells_.data() + offset / kBlock;
    Cell* const last = cells_.data() + (offset + bytes - 1) / kBlock;
    uint32_t mask = ~0u << (offset % kBlock);
    const uint32_t last_mask = ~0u >> (kBlock - 1 - (offset + bytes - 1) % kBlock);
    uint32_t* written = written_.data() + offset / kBlock;
    for (; cell != last; ++cell, ++written, mask = ~0u) visit(*cell, *written, mask);
    visit(*cell, *written, mask & last_mask);
  }

  [[noreturn, gnu::noinline]] void conflict(const char* name, const char* does, const char* did, const Cell& cell,
                                            int reader) const {
    const int other = reader >= 0 ? reader : cell.writer_pipe;
    const Pipe pipe = static_cast<Pipe>(other);
    const Trap trap = pipe != pipe_ ? Trap::pipe_order : (pipe == Pipe::V ? Trap::vector_order : Trap::copy_order);
    const uint32_t number = reader >= 0 ? cell.readers[reader] : cell.writer;
    const bool recent = order.flag(pipe)[other] - number < kRecent;
    const Where place = recent ? recent_[other][number % kRecent] : Where();
    fail(trap,
         "%s %s UB bytes from %lld on that instruction %u of pipe %s (%s:%u) %s and pipe %s knows it only up to %u",
         name, does, static_cast<long long>((&cell - cells_.data()) * kBlock), number, name_of(pipe),
         recent ? place.file_name() : "long before", place.line(), did, name_of(pipe_), order.known(pipe_)[other]);
  }
  [[noreturn, gnu::noinline]] void poison(const char* name, const Cell& cell, uint32_t missing) const {
    const int byte = __builtin_ctz(missing);
    fail(Trap::poison_read, "%s reads UB byte %lld, which nothing has written", name,
         static_cast<long long>((&cell - cells_.data()) * kBlock + byte));
  }
  void check_gm_order(const GmTouch& touch);

  static constexpr uint32_t kRecent = 1024;
  Where recent_[kPipes][kRecent];  // where the last instructions of each pipe were called, for messages
  std::vector<Cell> cells_;
  std::vector<uint32_t> written_;  // per block of UB, the bytes that hold a value
  uint8_t occupied_[kEvents];
  Flag flags_[kEvents][kEventIds];
  std::vector<GmTouch> pending_;  // touches of this block that a later one may conflict with
  size_t pending_limit_ = 64;
  std::vector<Cleaned> cleaned_;
  size_t first_write_ = 0;  // of this block in the log
  const char* api_ = "";
  Where where_;
  Pipe pipe_ = Pipe::S;
  uint32_t number_ = 0;
  const uint32_t* known_now_ = nullptr;
};

inline void Core::touch_gm(uint64_t address, int64_t bytes, int64_t count, int64_t stride, bool write,
                           int64_t declared) {
  const int64_t extent = (count - 1) * stride + bytes;
  if (declared >= 0 && extent > declared) {
    fail(Trap::extent, "GM tensor has %lld bytes from there, %lld are needed", static_cast<long long>(declared),
         static_cast<long long>(extent));
  }
  const GmRange* range = memory.find(address, address + static_cast<uint64_t>(extent));
  if (range == nullptr) {
    fail(Trap::gm_bounds, "%lld bytes of GM from %s on", static_cast<long long>(extent),
         memory.nearest(address).c_str());
  }
  const Access wanted = write ? Access::write : Access::read;
  if ((static_cast<int>(range->access) & static_cast<int>(wanted)) == 0) {
    fail(Trap::gm_access, "%s is registered for %s only", range->name.c_str(), write ? "reading" : "writing");
  }
  if (!range->writable()) return;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t begin = address + static_cast<uint64_t>(i * stride);
    check_gm_order({begin, begin + static_cast<uint64_t>(bytes), where_.file_name(), where_.line(), number_,
                    static_cast<int32_t>(block_index), pipe_, write});
  }
}

inline void Core::check_gm_order(const GmTouch& touch) {
  if (touch.pipe == Pipe::S) {
    const uint64_t begin = touch.begin & ~(kCacheLine - 1);
    const uint64_t end = (touch.end + kCacheLine - 1) & ~(kCacheLine - 1);
    for (size_t i = first_write_; i < memory.writes().size(); ++i) {
      const GmTouch& write = memory.writes()[i];
      if (write.end <= begin || end <= write.begin) continue;
      const bool clean = std::any_of(cleaned_.begin(), cleaned_.end(), [&](const Cleaned& done) {
        return done.known >= write.number && (done.all || done.line == begin);
      });
      if (!clean) {
        fail(Trap::stale_scalar_read, "the cache line was written by MTE3 in this launch (%s:%u): %s", write.file,
             write.line, memory.nearest(touch.begin).c_str());
      }
    }
  }
  for (const GmTouch& before : pending_) {
    if (before.end <= touch.begin || touch.end <= before.begin || !(before.write || touch.write)) continue;
    if (before.number == touch.number && before.pipe == touch.pipe) continue;
    if (order.is_known(touch.pipe, before.pipe, before.number)) continue;
    fail(before.pipe == touch.pipe ? Trap::copy_order : Trap::gm_order,
         "%s GM that pipe %s %s at %s:%u, and pipe %s does not know that it is done: %s",
         touch.write ? "writes" : "reads", name_of(before.pipe), before.write ? "wrote" : "read", before.file,
         before.line, name_of(touch.pipe), memory.nearest(std::max(before.begin, touch.begin)).c_str());
  }
  memory.log(touch);
  pending_.push_back(touch);
  if (pending_.size() > pending_limit_) {
    std::erase_if(pending_, [&](const GmTouch& before) {
      return order.is_known(Pipe::MTE2, before.pipe, before.number) &&
             order.is_known(Pipe::MTE3, before.pipe, before.number);
    });
    pending_limit_ = std::max<size_t>(64, 2 * pending_.size());
  }
}

inline thread_local constinit Core* current = nullptr;

inline Core& core() {
  if (current == nullptr) throw std::logic_error("an AscendC call outside of softnpu::ascendc::Launch::run");
  return *current;
}

}  // namespace softnpu::ascendc

#endif  // SOFTNPU_ASCENDC_CORE_H
