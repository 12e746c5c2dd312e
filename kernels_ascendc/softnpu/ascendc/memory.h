// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Global memory as a launch sees it: the ranges the launcher registered, and who touched which bytes of those that may
// be written. Blocks are emulated one after another, yet on the device they run at once: any two blocks of which one
// writes bytes the other touches are a misuse whatever the order they ran in here. Ranges that nobody may write need
// no bookkeeping beyond their bounds.
#ifndef SOFTNPU_ASCENDC_MEMORY_H
#define SOFTNPU_ASCENDC_MEMORY_H

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "misuse.h"
#include "order.h"

namespace softnpu::ascendc {

constexpr uint64_t kCacheLine = 64;  // of the data cache behind scalar GM reads

enum class Access : uint8_t { read = 1, write = 2, read_write = 3 };

struct GmRange {
  uint64_t begin, end;
  Access access;
  std::string name;
  bool writable() const { return access != Access::read; }
};

struct GmTouch {
  uint64_t begin, end;
  const char* file;
  uint32_t line, number;  // number: of the instruction on its pipe
  int32_t block;
  Pipe pipe;
  bool write;
};

class GlobalMemory {
 public:
  void add(const void* pointer, uint64_t bytes, Access access, const char* name) {
    if (bytes == 0) return;
    const uint64_t begin = reinterpret_cast<uint64_t>(pointer);
    if (pointer == nullptr) throw std::invalid_argument(std::string("gm ") + name + ": found a null pointer");
    for (const GmRange& range : ranges_) {
      const bool apart = begin + bytes <= range.begin || range.end <= begin;
      if (!apart && (access != Access::read || range.writable())) {
        throw std::invalid_argument(std::string("gm ") + name + " overlaps " + range.name + ", and one is writable");
      }
    }
    ranges_.push_back({begin, begin + bytes, access, name});
  }

  const GmRange* find(uint64_t begin, uint64_t end) const {
    for (const GmRange& range : ranges_) {
      if (begin >= range.begin && begin <= end && end <= range.end) return &range;  // an end may have wrapped
    }
    return nullptr;
  }
  // The range that holds `address` or lies nearest below it, for messages.
  std::string nearest(uint64_t address) const {
    const GmRange* best = nullptr;
    for (const GmRange& range : ranges_) {
      if (range.begin <= address && (best == nullptr || range.begin > best->begin)) best = &range;
    }
    if (best == nullptr) return "below every registered range";
    return "byte " + std::to_string(address - best->begin) + " of " + best->name + " [" +
           std::to_string(best->end - best->begin) + " bytes]";
  }

  void log(const GmTouch& touch) {
    std::vector<GmTouch>& list = touch.write ? writes_ : reads_;
    if (!list.empty()) {
      GmTouch& last = list.back();
      if (last.end == touch.begin && last.block == touch.block && last.pipe == touch.pipe && last.line == touch.line) {
        last.end = touch.end;
        last.number = touch.number;
        return;
      }
    }
    list.push_back(touch);
  }
  const std::vector<GmTouch>& writes() const { return writes_; }

  // Traps 16 and 17, once all blocks have run.
  void check_blocks() {
    std::sort(writes_.begin(), writes_.end(), [](const GmTouch& a, const GmTouch& b) { return a.begin < b.begin; });
    std::vector<GmTouch> merged;  // disjoint: overlapping writes are of one block
    for (const GmTouch& write : writes_) {
      if (!merged.empty() && write.begin < merged.back().end) {
        if (write.block != merged.back().block) report(Trap::cross_core, merged.back(), write);
        merged.back().end = std::max(merged.back().end, write.end);
      } else {
        merged.push_back(write);
      }
    }
    for (GmTouch read : reads_) {
      const bool scalar = read.pipe == Pipe::S;
      if (scalar) {  // a cache line comes as a whole
        read.begin &= ~(kCacheLine - 1);
        read.end = (read.end + kCacheLine - 1) & ~(kCacheLine - 1);
      }
      auto write = std::upper_bound(merged.begin(), merged.end(), read.begin,
                                    [](uint64_t begin, const GmTouch& touch) { return begin < touch.end; });
      for (; write != merged.end() && write->begin < read.end; ++write) {
        if (write->block != read.block) report(scalar ? Trap::stale_scalar_read : Trap::cross_core, *write, read);
      }
    }
  }

 private:
  [[noreturn]] void report(Trap trap, const GmTouch& first, const GmTouch& second) const {
    const uint64_t at = std::max(first.begin, second.begin);
    throw Misuse(trap, second.write ? "GM write" : "GM read",
                 format("block %d %s what block %d writes (%s:%u): %s", second.block, second.write ? "writes" : "reads",
                        first.block, first.file, first.line, nearest(at).c_str()),
                 second.file, second.line, second.block);
  }
  std::vector<GmRange> ranges_;
  std::vector<GmTouch> reads_, writes_;
};

}  // namespace softnpu::ascendc

#endif  // SOFTNPU_ASCENDC_MEMORY_H
