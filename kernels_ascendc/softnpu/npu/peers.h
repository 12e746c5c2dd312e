// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// What operators share that talk to other ranks (cam.cpp, camp2p.cpp): they find their group by the name that they are
// given, refuse another rank than this process has in it before anything is queued, and keep what the real operators
// keep in the group's windows: one State per rank of a group. A rank that has left is refused by name.
#pragma once

#include <groups.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "operator.h"

namespace softnpu {

inline std::shared_ptr<Group> group_of(const char* op, c10::string_view name, int64_t rank) {
  const std::string text(name);
  const auto group = find_group(text, static_cast<uint32_t>(rank));
  TORCH_CHECK(group != nullptr, op, ": rank ", rank, " of the group '", text,
              "' is not in this process; give the rank and the name of a communicator that was made here");
  TORCH_CHECK(!group->left(), op, ": rank ", rank, " has left the group '", text, "'; make a new one");
  return group;
}

// The queued operator, for an operator whose schema has `rank` and the group's name.
template <const char* const& kGroupArgument>
void on_stream_of_a_group(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = [&](const char* name) -> const c10::IValue& {
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == name) return torch::jit::peek(*stack, i, arguments.size());
    TORCH_CHECK(false, op.schema().name(), ": its schema has no ", name);
  };
  group_of(op.schema().name().c_str(), given(kGroupArgument).toStringRef(), given("rank").toInt());
  softaten::run_by_contract(op, keys, stack);
}

// The states of an operator family, by group and rank. Only the stream's thread touches what is in one.
template <class State>
class States {
 public:
  State& of(const Group& group) {
    std::lock_guard<std::mutex> lock(mutex_);
    return states_[{group.name, group.rank}];
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, uint32_t>, State> states_;
};

// Two streams that use one rank at the same time have no order.
class OneAtATime {
 public:
  OneAtATime(const char* op, std::mutex& mutex) : lock_(mutex, std::try_to_lock) {
    TORCH_CHECK(lock_.owns_lock(), op, ": another stream is inside an operator of the same rank");
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace softnpu
