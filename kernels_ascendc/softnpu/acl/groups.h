// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Problem: operators that talk to other ranks are given the name of an HCCL group, and nothing else. Way: who creates
// a communicator joins a group of that name, and an operator finds its rank there. Messages are files in the group's
// folder in shared memory, written whole and renamed, read once; a counter beside them wakes who waits. A rank holds a
// lock on a file of its own, which the kernel takes from a process that dies; a child that it has forked is no rank and
// holds none of its locks. A process may have several ranks of a group. What waits ends with an error of the device
// when its own rank has left the group, when those it waits for have left or died, or when the process ends: within a
// tenth of a second. With SOFTNPU_DESTROY=hang leaving a group that somebody waits in does not return and the wait does
// not end, as CANN's can: for tests that kill the process. Not done: several hosts.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace softnpu {

#define SOFTNPU_GROUPS_API __attribute__((visibility("default")))

// One rank's end of a group.
class SOFTNPU_GROUPS_API Group {
 public:
  Group(std::string name, uint32_t size, uint32_t rank);
  ~Group();

  const std::string name, folder;
  const uint32_t size, rank;

  void put(uint32_t target, const std::string& what, const void* data, size_t bytes) const;
  std::vector<char> take(uint32_t source, const std::string& what) const;  // what wait() has said to be there

  struct Message {
    uint32_t source;
    std::string what;
  };
  // Waits for all messages of one of the sets, and says which: the first that is complete. Ends with an exception when
  // no set can become complete any more, because this rank has left or those that would have to send have.
  size_t wait(const std::string& why, const std::vector<std::vector<Message>>& sets);

  bool left() const { return left_; }
  int waiting() const { return waiting_; }  // how many wait() run now
  void leave();                             // once
  void forsake();                           // in a forked child: the rank is its parent's

 private:
  std::string file(uint32_t source, uint32_t target, const std::string& what) const;
  bool has(const Message& message) const;
  bool gone(uint32_t other) const;
  void ring() const;

  std::atomic<uint32_t>* bell_ = nullptr;
  int lock_ = -1;
  std::atomic<bool> left_{false};
  std::atomic<int> waiting_{0};
};

// The folder exists until the last rank has left it.
SOFTNPU_GROUPS_API std::shared_ptr<Group> join_group(const std::string& name, uint32_t size, uint32_t rank);
// The rank's end in this process, also after it has left; null if it was never here.
SOFTNPU_GROUPS_API std::shared_ptr<Group> find_group(const std::string& name, uint32_t rank);
SOFTNPU_GROUPS_API void leave_all_groups();

}  // namespace softnpu
