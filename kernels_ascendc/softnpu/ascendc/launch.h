// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Runs a kernel on the emulation: for launchers on the host, never included by a kernel. Blocks run one after another
// in the asked order on the calling thread; a result may not depend on that order, and what would depend on it on a
// device is a Misuse. Different threads may run launches at the same time.
//
//   Launch launch(blocks);
//   launch.gm(rows, bytes, Access::read, "rows");
//   launch.run([&] { kernel(rows, out, params); });   // throws Misuse; launch.counters() says what was done
#ifndef SOFTNPU_ASCENDC_LAUNCH_H
#define SOFTNPU_ASCENDC_LAUNCH_H

#include <memory>
#include <numeric>

#include "core.h"

namespace softnpu::ascendc {

class Launch {
 public:
  explicit Launch(int64_t blocks, const Options& options = {}) : blocks_(blocks), options_(options) {
    if (blocks < 1) throw std::invalid_argument("blocks: found " + std::to_string(blocks) + ", expected 1 or more");
  }

  // The kernel may read or write these bytes. Ranges with a writable one among them may not overlap.
  void gm(const void* pointer, size_t bytes, Access access, const char* name) {
    memory_.add(pointer, bytes, access, name);
  }

  // kernel() is called once per block. Throws Misuse at the first broken rule; what ran until then has been written.
  template <typename Kernel>
  const Counters& run(Kernel&& kernel) {
    if (current != nullptr) throw std::logic_error("a launch inside a kernel");
    const auto core = std::make_unique<Core>(options_, memory_, counters_);
    struct Scope {
      ~Scope() { current = nullptr; }
    } scope;
    ++counters_.launches;
    for (const int64_t block : sequence()) {
      core->start(block, blocks_);
      current = core.get();
      kernel();
      core->finish();
    }
    memory_.check_blocks();
    return counters_;
  }
  const Counters& counters() const { return counters_; }

 private:
  std::vector<int64_t> sequence() const {
    std::vector<int64_t> order(static_cast<size_t>(blocks_));
    std::iota(order.begin(), order.end(), int64_t{0});
    if (options_.sequence == Options::Sequence::reverse) std::reverse(order.begin(), order.end());
    if (options_.sequence == Options::Sequence::shuffled) {
      uint64_t state = options_.seed;
      for (size_t i = order.size(); i > 1; --i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        std::swap(order[i - 1], order[static_cast<size_t>((state >> 33) % i)]);
      }
    }
    return order;
  }

  int64_t blocks_;
  Options options_;
  GlobalMemory memory_;
  Counters counters_;
};

}  // namespace softnpu::ascendc

#endif  // SOFTNPU_ASCENDC_LAUNCH_H
