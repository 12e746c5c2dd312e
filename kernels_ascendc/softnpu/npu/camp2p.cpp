// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// afd_ascend::a2e and e2a: activations from Attention ranks to their FFN rank and back. Contract: afd-plugin 85e826e,
// csrc/npu (torch_extension/torch_binding.cpp: schemas and the results' shapes; a2e/op_kernel/a2e.h and
// e2a/op_kernel/e2a.h: who sends what where).
// * E FFN ranks are 0..E-1 of the group, A Attention ranks E..E+A-1. Attention rank r sends to FFN rank r % E, which
//   receives from A / E of them.
// * a2e on Attention sends its rows and returns at once; on FFN it waits for all its senders, whose rows stand one
// after
//   the other. e2a goes the other way. batch_size counts on FFN only; each sender has batch_size / (A / E) rows.
// * What the kernels leave unwritten is poison: every result of a2e but expand_x on FFN, all of e2a on FFN.
// * The windows hold one transfer: on every rank of a group a2e and e2a take turns. CANN reads the wrong rows or spins
//   for ever otherwise, here it is an error; and so are senders with another number of rows than FFN expects.
// Left out: compute_gate, float16 (the binding always returns bfloat16), A that is no multiple of E (CANN's two kernels
// divide the rows differently then; the connector refuses A < E).
#include <cstring>

#include "peers.h"
#include "poison.h"

namespace softnpu {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr auto kA2e = "a2e", kE2a = "e2a";

struct Transfers {
  std::mutex mutex;
  uint64_t done = 0;                          // round trips
  bool between = false;                       // a2e was, e2a was not
  int64_t rows = 0, hidden = 0, experts = 0;  // what the a2e of this round trip had
};
States<Transfers>& states() {
  static auto* all = new States<Transfers>;  // never destroyed: a stream's thread may outlive static objects
  return *all;
}

struct World {
  int64_t experts, attentions, rank;

  bool is_ffn() const { return rank < experts; }
  int64_t ratio() const { return attentions / experts; }
  std::vector<uint32_t> senders() const {
    std::vector<uint32_t> all;
    for (int64_t from = rank + experts; from < experts + attentions; from += experts)
      all.push_back(static_cast<uint32_t>(from));
    return all;
  }
  uint32_t target() const { return static_cast<uint32_t>(rank % experts); }
};

void take_turns(const char* op, const Transfers& state, const Group& group, const World& world, bool second) {
  TORCH_CHECK(group.size == world.experts + world.attentions, op, ": the group has ", group.size, " ranks, not ",
              world.experts, " + ", world.attentions);
  TORCH_CHECK(state.between == second, op, ": rank ", world.rank, " of the group '", group.name, "' calls ", op,
              second ? " without an a2e before it" : " again before the e2a of the last one",
              "; the windows hold one transfer");
}

// Rows as a message: how many, and their bytes.
void send(Group& group, uint32_t target, const std::string& what, const Tensor& rows) {
  const Tensor dense = rows.contiguous();
  std::vector<char> message(sizeof(int64_t) + dense.nbytes());
  const int64_t count = dense.size(0);
  std::memcpy(message.data(), &count, sizeof count);
  std::memcpy(message.data() + sizeof count, dense.const_data_ptr(), dense.nbytes());
  group.put(target, what, message.data(), message.size());
}

void receive(const char* op, Group& group, uint32_t source, const std::string& what, Tensor into) {
  const std::vector<char> message = group.take(source, what);
  int64_t count = 0;
  std::memcpy(&count, message.data(), sizeof count);
  TORCH_CHECK(count == into.size(0) && message.size() == sizeof count + into.nbytes(), op, ": rank ", source, " sent ",
              count, " rows, rank ", group.rank, " expects ", into.size(0),
              "; ranks that share an FFN rank need equal, padded batches");
  std::memcpy(into.mutable_data_ptr(), message.data() + sizeof count, into.nbytes());
}

std::vector<Tensor> a2e_results(const Tensor& x, int64_t batch_size, int64_t hidden, int64_t topk, const World& world) {
  const bool routes = world.is_ffn() && world.rank < world.attentions;
  const auto bf16 = x.options().dtype(at::kBFloat16), ints = x.options().dtype(at::kInt),
             floats = x.options().dtype(at::kFloat), bools = x.options().dtype(at::kBool);
  const int64_t rows = routes ? batch_size : 1;
  const auto make = [](at::IntArrayRef sizes, const at::TensorOptions& options) {
    return options.device().is_meta() ? at::empty(sizes, options) : poison(sizes, options);
  };
  return {world.is_ffn() ? make({batch_size, hidden}, bf16) : make({1, 1}, bf16), make({rows, routes ? topk : 1}, ints),
          make({rows, routes ? topk : 1}, floats), make({world.ratio()}, ints), make({rows}, bools)};
}

std::vector<Tensor> a2e(const Tensor& x, const OptionalTensor&, const OptionalTensor&, int64_t batch_size,
                        int64_t hidden_size, int64_t topk, int64_t expert_rank_size, int64_t attention_rank_size,
                        int64_t rank, c10::string_view group_ep, int64_t, int64_t) {
  const auto group = group_of(kA2e, group_ep, rank);
  const World world{expert_rank_size, attention_rank_size, rank};
  Transfers& state = states().of(*group);
  const OneAtATime alone(kA2e, state.mutex);
  take_turns(kA2e, state, *group, world, false);
  std::vector<Tensor> results = a2e_results(x, batch_size, hidden_size, topk, world);
  const std::string what = c10::str("a", state.done);
  state.rows = world.is_ffn() ? batch_size : x.size(0);
  state.hidden = hidden_size;
  state.experts = world.experts;
  if (world.is_ffn()) {
    std::vector<Group::Message> expected;
    for (const uint32_t sender : world.senders()) expected.push_back({sender, what});
    group->wait("a2e waits for the activations of its Attention ranks", {expected});
    const int64_t rows = batch_size / world.ratio();
    int64_t at = 0;
    for (const uint32_t sender : world.senders()) {
      receive(kA2e, *group, sender, what, results[0].slice(0, at, at + rows));
      at += rows;
    }
  } else {
    send(*group, world.target(), what, x);
  }
  state.between = true;
  return results;
}

Tensor e2a(const Tensor& expand_x, const Tensor&, int64_t batch_size, int64_t hidden_size, int64_t,
           int64_t expert_rank_size, int64_t attention_rank_size, int64_t rank, c10::string_view group_ep, int64_t) {
  const auto group = group_of(kE2a, group_ep, rank);
  const World world{expert_rank_size, attention_rank_size, rank};
  Transfers& state = states().of(*group);
  const OneAtATime alone(kE2a, state.mutex);
  take_turns(kE2a, state, *group, world, true);
  const int64_t asked = world.is_ffn() ? batch_size : expand_x.size(0);
  TORCH_CHECK(asked == state.rows && hidden_size == state.hidden && world.experts == state.experts, kE2a, ": ", asked,
              " rows, hidden_size ", hidden_size, ", expert_rank_size ", world.experts, " after an a2e of ", state.rows,
              ", ", state.hidden, ", ", state.experts);
  const std::string what = c10::str("e", state.done);
  Tensor result = poison(world.is_ffn() ? at::IntArrayRef{1, 1} : at::IntArrayRef{expand_x.size(0), hidden_size},
                         expand_x.options());
  if (world.is_ffn()) {
    const int64_t rows = batch_size / world.ratio();
    int64_t at = 0;
    for (const uint32_t sender : world.senders()) {
      send(*group, sender, what, expand_x.slice(0, at, at + rows));
      at += rows;
    }
  } else {
    group->wait("e2a waits for the output of its FFN rank", {{{world.target(), what}}});
    receive(kE2a, *group, world.target(), what, result);
  }
  state.between = false;
  ++state.done;
  return result;
}

void check(const char* op, const char* argument, const Tensor& x, int64_t batch_size, int64_t hidden_size, int64_t topk,
           const World& world, int64_t aiv_num, bool rows_matter) {
  SOFTNPU_EXPECT(world.experts > 0 && world.attentions >= world.experts, op, "attention_rank_size", world.attentions,
                 "at least expert_rank_size, ", world.experts, ", which is at least 1");
  SOFTNPU_EXPECT(world.rank >= 0 && world.rank < world.experts + world.attentions, op, "rank", world.rank,
                 "a rank of the group of ", world.experts + world.attentions);
  SOFTNPU_EXPECT(world.attentions % world.experts == 0, op, "attention_rank_size", world.attentions,
                 "a multiple of expert_rank_size, ", world.experts,
                 " (the two kernels of the pin divide the rows differently otherwise)");
  SOFTNPU_EXPECT(hidden_size > 0 && topk > 0 && aiv_num > 0, op, "hidden_size, topk, aiv_num",
                 c10::str(hidden_size, ", ", topk, ", ", aiv_num), "more than 0");
  SOFTNPU_EXPECT(x.scalar_type() == at::kBFloat16, op, c10::str(argument, "'s dtype"), x.scalar_type(), "BFloat16");
  if (world.is_ffn())
    SOFTNPU_EXPECT(batch_size > 0 && batch_size % world.ratio() == 0, op, "batch_size", batch_size,
                   "a multiple of the Attention ranks that this FFN rank has, ", world.ratio());
  if (rows_matter)
    SOFTNPU_EXPECT(
        x.dim() == 2 && x.size(1) == hidden_size && (world.is_ffn() ? x.size(0) >= batch_size : x.size(0) > 0), op,
        argument, x.sizes(), "[", world.is_ffn() ? c10::str("at least ", batch_size) : "rows", ", ", hidden_size, "]");
}

std::vector<Tensor> a2e_meta(const Tensor& x, const OptionalTensor& expert_ids, const OptionalTensor& scales,
                             int64_t batch_size, int64_t hidden_size, int64_t topk, int64_t expert_rank_size,
                             int64_t attention_rank_size, int64_t rank, c10::string_view, int64_t aiv_num,
                             int64_t compute_gate) {
  const World world{expert_rank_size, attention_rank_size, rank};
  SOFTNPU_EXPECT(compute_gate == 0, kA2e, "compute_gate", compute_gate,
                 "0 (the software NPU has no gate on Attention here)");
  const auto absent = [](const OptionalTensor& t) { return !t.has_value() || t->numel() == 0; };
  SOFTNPU_EXPECT(absent(expert_ids) && absent(scales), kA2e, "expert_ids, scales", "tensors",
                 "none without compute_gate");
  check(kA2e, "x", x, batch_size, hidden_size, topk, world, aiv_num, !world.is_ffn());
  return a2e_results(x, batch_size, hidden_size, topk, world);
}

Tensor e2a_meta(const Tensor& expand_x, const Tensor& atten_batch_size, int64_t batch_size, int64_t hidden_size,
                int64_t topk, int64_t expert_rank_size, int64_t attention_rank_size, int64_t rank, c10::string_view,
                int64_t aiv_num) {
  const World world{expert_rank_size, attention_rank_size, rank};
  check(kE2a, "expand_x", expand_x, batch_size, hidden_size, topk, world, aiv_num, true);
  SOFTNPU_EXPECT(atten_batch_size.scalar_type() == at::kInt && atten_batch_size.dim() == 1 &&
                     atten_batch_size.size(0) == world.ratio(),
                 kE2a, "atten_batch_size", atten_batch_size.sizes(), "what a2e returned, Int [", world.ratio(), "]");
  if (world.is_ffn()) return at::empty({1, 1}, expand_x.options());
  return at::empty({expand_x.size(0), hidden_size}, expand_x.options());
}

const char* const kGroupEp = "group_ep";
torch::CppFunction queued() { return torch::CppFunction::makeFromBoxedFunction<&on_stream_of_a_group<kGroupEp>>(); }

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(afd_ascend, m) {
  m.def(
      "a2e(Tensor x, Tensor? expert_ids=None, Tensor? scales=None, int batch_size=0, int hidden_size=0, int topk=0, "
      "int expert_rank_size=0, int attention_rank_size=0, int rank=0, str group_ep='', int aiv_num=0, "
      "int compute_gate=0) -> Tensor[]");
  m.def(
      "e2a(Tensor expand_x, Tensor atten_batch_size, int batch_size=0, int hidden_size=0, int topk=0, "
      "int expert_rank_size=0, int attention_rank_size=0, int rank=0, str group_ep='', int aiv_num=0) -> Tensor");
}
TORCH_LIBRARY_IMPL(afd_ascend, CPU, m) {
  m.impl("a2e", softnpu::a2e);
  m.impl("e2a", softnpu::e2a);
}
TORCH_LIBRARY_IMPL(afd_ascend, Meta, m) {
  m.impl("a2e", softnpu::a2e_meta);
  m.impl("e2a", softnpu::e2a_meta);
}
TORCH_LIBRARY_IMPL(afd_ascend, PrivateUse1, m) {
  m.impl("a2e", softnpu::queued());
  m.impl("e2a", softnpu::queued());
}
