// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The race detector, see races.h. A lane is one order of tasks: the host, a stream, or a branch of a replayed graph. A
// clock says, for every lane, how many of its tasks come before. The shadow says, for every range of bytes, which task
// wrote it last and which have read it since; a task that is not ordered behind these races with them.
#include "races.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "runtime.h"

namespace softnpu::races {

using Clock = std::vector<uint64_t>;

struct Site {
  std::string name;
  int32_t stream;  // -1: the host
  uint64_t task;   // how many the stream had been given since the detector was turned on
};

struct Item {
  enum class Kind { kTask, kRecord, kWait } kind;
  uint64_t session;
  std::shared_ptr<const Clock> host;  // what the host knew when the item was queued
  std::shared_ptr<const Site> site;   // tasks
  Accesses accesses;                  // tasks
  bool settled = true;                // tasks: false while it may still find accesses
  struct Order* order = nullptr;      // tasks that find accesses: where they are queued
  MarkPtr mark;                       // records and waits
};

struct Order {
  int index;
  Clock clock;
  std::shared_ptr<const Clock> host;  // joined already
  std::deque<ItemPtr> queue;          // not judged yet
  uint64_t tasks = 0;
};

struct Mark {
  uint64_t session;
  bool judged = false;
  Clock clock;
  std::vector<Order*> blocked;
};

namespace {

constexpr size_t kKept = 1000;

struct Epoch {
  int lane = -1;
  uint64_t count = 0;
  std::shared_ptr<const Site> site;
  bool before(const Clock& clock) const {
    return lane < 0 || (static_cast<size_t>(lane) < clock.size() && count <= clock[lane]);
  }
};

struct Segment {
  uintptr_t end;
  Epoch write;
  std::vector<Epoch> reads;  // since that write, none of them ordered behind another
};

struct Race {
  std::shared_ptr<const Site> first, second;
  bool first_writes, second_writes;
  uintptr_t begin, end;
};

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

class Detector {
 public:
  std::mutex mutex;
  std::atomic<bool> on{false};

  void start() {
    orders_.clear();
    shadow_.clear();
    lanes_ = 1;  // lane 0 is the host
    host_ = std::make_shared<Clock>(1);
    ++session_;
  }
  uint64_t session() const { return session_; }

  void queue(const Lane& lane, const ItemPtr& item) {
    auto& slot = orders_[{lane.stream, lane.branch}];
    if (slot == nullptr) {
      slot = std::make_unique<Order>();
      slot->index = lanes_++;
    }
    item->session = session_;
    item->host = host_;
    if (item->kind == Item::Kind::kTask) {
      item->site = std::make_shared<Site>(Site{item->site->name, lane.shown, slot->tasks++});
      if (!item->settled) item->order = slot.get();
    }
    slot->queue.push_back(item);
    advance(slot.get());
  }

  void settle(Item& item) {
    if (item.settled) return;
    item.settled = true;
    if (item.session == session_ && on) advance(item.order);
  }

  void host_passed(const Mark& mark) {
    if (mark.session != session_ || !mark.judged) return;
    auto known = std::make_shared<Clock>(*host_);
    join(*known, mark.clock);
    if (*known != *host_) host_ = std::move(known);
  }

  void host_access(const std::string& name, const Accesses& accesses) {
    auto known = std::make_shared<Clock>(*host_);
    const Epoch epoch{0, ++(*known)[0], std::make_shared<Site>(Site{name, -1, host_tasks_++})};
    touch_all(accesses, epoch, *known);
    host_ = std::move(known);
  }

  void forget(uintptr_t begin, uintptr_t end) {
    split(begin);
    split(end);
    shadow_.erase(shadow_.lower_bound(begin), shadow_.lower_bound(end));
  }

  std::vector<Race> kept;
  uint64_t count = 0;

 private:
  // Judges what is at the front of a lane, and of every lane that waited for it, as far as that goes.
  void advance(Order* first) {
    std::vector<Order*> ready{first};
    while (!ready.empty()) {
      Order* order = ready.back();
      ready.pop_back();
      while (!order->queue.empty()) {
        Item& item = *order->queue.front();
        if (item.kind == Item::Kind::kTask && !item.settled) break;
        if (item.kind == Item::Kind::kWait && !item.mark->judged) {
          item.mark->blocked.push_back(order);
          break;
        }
        judge(*order, item);
        if (item.kind == Item::Kind::kRecord) {
          ready.insert(ready.end(), item.mark->blocked.begin(), item.mark->blocked.end());
          item.mark->blocked.clear();
        }
        order->queue.pop_front();
      }
    }
  }

  void judge(Order& order, Item& item) {
    if (order.host != item.host) {
      join(order.clock, *item.host);
      order.host = item.host;
    }
    const auto index = static_cast<size_t>(order.index);
    if (order.clock.size() <= index) order.clock.resize(index + 1);
    switch (item.kind) {
      case Item::Kind::kTask:
        touch_all(item.accesses, {order.index, ++order.clock[index], item.site}, order.clock);
        break;
      case Item::Kind::kRecord:
        item.mark->clock = order.clock;
        item.mark->judged = true;
        break;
      case Item::Kind::kWait:
        join(order.clock, item.mark->clock);
        break;
    }
  }

  void touch_all(const Accesses& accesses, const Epoch& epoch, const Clock& clock) {
    std::vector<Race> found;  // of this task: one for each rival, however many ranges they share
    for (const SoftnpuAccess& a : accesses) {
      auto begin = reinterpret_cast<uintptr_t>(a.address);
      for (uint64_t row = 0; row < a.rows; ++row, begin += a.stride)
        if (a.bytes > 0) touch(begin, begin + a.bytes, a.writes != 0, epoch, clock, found);
    }
    count += found.size();
    for (Race& race : found)
      if (kept.size() < kKept) kept.push_back(std::move(race));
  }

  void touch(uintptr_t begin, uintptr_t end, bool writes, const Epoch& epoch, const Clock& clock,
             std::vector<Race>& found) {
    split(begin);
    split(end);
    const auto first = shadow_.lower_bound(begin);
    auto it = first;
    uintptr_t at = begin;
    for (; it != shadow_.end() && it->first < end; ++it) {
      Segment& segment = it->second;
      if (!segment.write.before(clock)) report(segment.write, true, epoch, writes, it->first, segment.end, found);
      if (writes) {
        for (const Epoch& read : segment.reads)
          if (!read.before(clock)) report(read, false, epoch, true, it->first, segment.end, found);
        continue;
      }
      if (at < it->first) shadow_.emplace_hint(it, at, Segment{it->first, {}, {epoch}});
      at = segment.end;
      auto& reads = segment.reads;
      reads.erase(std::remove_if(reads.begin(), reads.end(), [&](const Epoch& read) { return read.before(clock); }),
                  reads.end());
      reads.push_back(epoch);
    }
    if (writes) {
      shadow_.erase(first, it);
      shadow_.emplace(begin, Segment{end, epoch, {}});
    } else if (at < end) {
      shadow_.emplace_hint(it, at, Segment{end, {}, {epoch}});
    }
  }

  // Makes `at` a border between segments.
  void split(uintptr_t at) {
    auto it = shadow_.lower_bound(at);
    if (it == shadow_.begin()) return;
    --it;
    if (it->second.end <= at) return;
    Segment rest = it->second;
    it->second.end = at;
    shadow_.emplace(at, std::move(rest));
  }

  static void report(const Epoch& rival, bool rival_writes, const Epoch& epoch, bool writes, uintptr_t begin,
                     uintptr_t end, std::vector<Race>& found) {
    for (Race& race : found) {
      if (race.first == rival.site && race.first_writes == rival_writes && race.second_writes == writes) {
        race.begin = std::min(race.begin, begin);
        race.end = std::max(race.end, end);
        return;
      }
    }
    found.push_back({rival.site, epoch.site, rival_writes, writes, begin, end});
  }

  std::map<std::pair<int32_t, int32_t>, std::unique_ptr<Order>> orders_;
  std::map<uintptr_t, Segment> shadow_;
  std::shared_ptr<const Clock> host_ = std::make_shared<Clock>(1);
  int lanes_ = 1;
  uint64_t session_ = 0, host_tasks_ = 0;
};

Detector& detector() {
  static auto* d = [] {
    auto* made = new Detector;
    if (settings().races) {
      made->start();
      made->on = true;
    }
    return made;
  }();
  return *d;
}

thread_local ItemPtr t_running;

}  // namespace

bool on() { return detector().on; }

MarkPtr new_mark() {
  auto& d = detector();
  if (!d.on) return nullptr;
  std::lock_guard<std::mutex> lock(d.mutex);
  auto mark = std::make_shared<Mark>();
  mark->session = d.session();
  return mark;
}

ItemPtr queue_task(const Lane& lane, const std::string& name, Accesses accesses, bool finds_more) {
  auto& d = detector();
  if (!d.on) return nullptr;
  auto item = std::make_shared<Item>();
  item->kind = Item::Kind::kTask;
  item->site = std::make_shared<Site>(Site{name, lane.shown, 0});
  item->accesses = std::move(accesses);
  item->settled = !finds_more;
  std::lock_guard<std::mutex> lock(d.mutex);
  d.queue(lane, item);
  return item;
}

namespace {
void queue_edge(const Lane& lane, Item::Kind kind, const MarkPtr& mark) {
  auto& d = detector();
  if (!d.on || mark == nullptr) return;
  std::lock_guard<std::mutex> lock(d.mutex);
  if (mark->session != d.session()) return;  // of before the detector was last turned on
  auto item = std::make_shared<Item>();
  item->kind = kind;
  item->mark = mark;
  d.queue(lane, item);
}
}  // namespace

void queue_record(const Lane& lane, const MarkPtr& mark) { queue_edge(lane, Item::Kind::kRecord, mark); }
void queue_wait(const Lane& lane, const MarkPtr& mark) { queue_edge(lane, Item::Kind::kWait, mark); }

Running::Running(const ItemPtr& item) : before_(std::exchange(t_running, item)) {}
Running::~Running() { t_running = std::move(before_); }

void settle(const ItemPtr& item) {
  if (item == nullptr || item->order == nullptr) return;
  auto& d = detector();
  std::lock_guard<std::mutex> lock(d.mutex);
  d.settle(*item);
}

void host_passed(const MarkPtr& mark) {
  auto& d = detector();
  if (!d.on || mark == nullptr) return;
  std::lock_guard<std::mutex> lock(d.mutex);
  d.host_passed(*mark);
}

void host_access(const std::string& name, const Accesses& accesses) {
  auto& d = detector();
  if (!d.on || accesses.empty()) return;
  std::lock_guard<std::mutex> lock(d.mutex);
  d.host_access(name, accesses);
}

void forget(const void* address, uint64_t bytes) {
  auto& d = detector();
  if (!d.on) return;
  std::lock_guard<std::mutex> lock(d.mutex);
  d.forget(reinterpret_cast<uintptr_t>(address), reinterpret_cast<uintptr_t>(address) + bytes);
}

}  // namespace softnpu::races

using namespace softnpu;

namespace {
Accesses list_of(const SoftnpuAccess* accesses, uint64_t count) { return {accesses, accesses + count}; }

SoftnpuSite public_site(const races::Site& site, bool writes) {
  SoftnpuSite shown{};
  std::strncpy(shown.name, site.name.c_str(), sizeof shown.name - 1);
  shown.stream = site.stream;
  shown.writes = writes;
  shown.task = site.task;
  return shown;
}
}  // namespace

SOFTNPU_API void softnpu_found_access(const SoftnpuAccess* accesses, uint64_t count) {
  if (races::t_running == nullptr) return;
  auto& known = races::t_running->accesses;  // not judged before the task is done, so nobody else looks at it
  if (races::t_running->order != nullptr) known.insert(known.end(), accesses, accesses + count);
}
SOFTNPU_API void softnpu_host_access(const char* name, const SoftnpuAccess* accesses, uint64_t count) {
  races::host_access(name, list_of(accesses, count));
}
SOFTNPU_API void softnpu_set_races(int on) {
  auto& d = races::detector();
  std::lock_guard<std::mutex> lock(d.mutex);
  if (on != 0 && !d.on) d.start();
  d.on = on != 0;
}
SOFTNPU_API int softnpu_races_on() { return races::on(); }
SOFTNPU_API uint64_t softnpu_race_count() {
  auto& d = races::detector();
  std::lock_guard<std::mutex> lock(d.mutex);
  return d.count;
}
SOFTNPU_API uint64_t softnpu_races(SoftnpuRace* out, uint64_t capacity) {
  auto& d = races::detector();
  std::lock_guard<std::mutex> lock(d.mutex);
  const uint64_t given = std::min<uint64_t>(capacity, d.kept.size());
  for (uint64_t i = 0; i < given; ++i) {
    const races::Race& race = d.kept[i];
    out[i] = {public_site(*race.first, race.first_writes), public_site(*race.second, race.second_writes), race.begin,
              race.end - race.begin};
  }
  return given;
}
SOFTNPU_API void softnpu_clear_races() {
  auto& d = races::detector();
  std::lock_guard<std::mutex> lock(d.mutex);
  d.kept.clear();
  d.count = 0;
}
