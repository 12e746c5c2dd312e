// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The race detector. Problem: a missing event edge shows as wrong bytes only when the timing is unlucky. Way: every
// task says which bytes it reads and writes, and happens-before is followed by vector clocks, so that two tasks that
// nothing orders are reported although they ran in a harmless order. The edges: the order of a stream; from an event's
// record to the waits that were queued for it; inside a graph, its captured edges; and what the host has seen: all that
// is queued after a synchronisation, or after a query that said "complete", comes behind what had passed.
// Tasks are judged in the order in which they are queued, whenever they run. Three things put a judgement off, never
// change it: a wait for an external event that is not recorded yet, a task that finds out on the device what it touches
// (a table on the device says so), and what waits for one of these.
// Not done: accesses of the host (it may declare them); one clock stands for all host threads, so a race between what
// two of them queue is missed where a synchronisation of one lies between; a query's answer depends on timing, and so
// does the edge it gives; messages between processes order nothing; external events and memory flags pair their first
// record with their first wait, whatever value comparison the wait asks for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "softnpu.h"

namespace softnpu {

using Accesses = std::vector<SoftnpuAccess>;

namespace races {

struct Mark;  // a point in a stream's order, once it is judged: what is ordered behind it comes after all before it
struct Item;  // a task that is to be judged
using MarkPtr = std::shared_ptr<Mark>;
using ItemPtr = std::shared_ptr<Item>;

// A stream (branch 0), or branch 1, 2, ... of the graphs that are replayed on it. `shown` is the stream in reports.
struct Lane {
  int32_t stream;
  int32_t branch;
  int32_t shown;
};

bool on();
MarkPtr new_mark();  // null while the detector is off, as every result here; null is welcome wherever a mark is taken

ItemPtr queue_task(const Lane& lane, const std::string& name, Accesses accesses, bool finds_more);
void queue_record(const Lane& lane, const MarkPtr& mark);
void queue_wait(const Lane& lane, const MarkPtr& mark);

// While a task runs on this thread: where softnpu_found_access puts what it finds.
class Running {
 public:
  explicit Running(const ItemPtr& item);
  ~Running();
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  ItemPtr before_;
};
// The task has run, or never will.
void settle(const ItemPtr& item);

// The host knows that the work before the mark is done.
void host_passed(const MarkPtr& mark);
void host_access(const std::string& name, const Accesses& accesses);
// The memory is new, or gone.
void forget(const void* address, uint64_t bytes);

}  // namespace races
}  // namespace softnpu
