// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// umdk_cam_op_lib::async_{dispatch_send,dispatch_recv,combine_send,combine_recv}: tokens from Attention ranks to the
// FFN ranks of their experts and back, without a barrier. Contract: the schemas in the operator package that ships with
// afd-plugin 85e826e (umdk_cam_op_lib 209.0.0b1), how connectors/npu/async_cam.py of that commit calls them and uses
// their results, and the published kernels of openEuler's umdk (cam_moe_distribute_{dispatch,combine}_{send,recv}).
// * A Attention ranks are 0..A-1 of the group, M FFN ranks A..A+M-1. FFN rank m has the experts m*R..m*R+R-1 and the
//   shared expert. T = tp_size Attention ranks in a row are a DP group: one work item is what all of them send for a
//   layer.
// * dispatch_send(x [B,H], expert_ids [B,K]): to each FFN rank the rows of its experts, by expert and then by token,
//   and its share of all rows for the shared expert: B / M in a row, one more for the first B % M ranks. Also where
//   that is nothing. B is at most max_seq_len / T.
// * dispatch_recv(batch_size = max_seq_len of the senders): the next complete work item, DP groups in turn, beginning
//   behind the one of the last item. Results: routed rows, by expert, then by rank of the DP group, then by token;
//   shared rows by rank; two scales that only quantisation fills; batch_info [5 + T + (R+1)*T]; rows by expert [R];
//   shared rows [1]. batch_info: rows in all, first rank of the DP group, layer, first and last expert received (the
//   shared one is 0), for each rank of the DP group the rows that it sent to FFN ranks before this one, and for each
//   its rows by expert (shared first). The results have room for floor(262144 * BATCH_SIZE_FACTOR) routed rows
//   (variable of the environment, 1.0: a small model wants less) and that over M shared ones (the kernels do not scale
//   these).
// * combine_send(routed, shared, .., batch_info of the item): the results of those rows, row by row. Rows behind the
//   item's are not read, so an item without routed rows is answered with any tensor.
// * combine_recv(expert_ids, expert_scales [B,K] of the dispatch): waits for all FFN ranks. A row is the float32 sum
// over
//   its experts, in the order of expert_ids, of scale times row, plus its shared row, rounded once.
// * Both sends return a byte that nobody fills; it, the scales and the rows behind the item's are poison.
// * dispatch_send keeps its counts where combine_recv reads them: on an Attention rank the two take turns. CANN returns
//   wrong rows or spins for ever otherwise, here it is an error. So are: layers of a DP group's ranks that differ, a
//   layer that neither stays, nor is the next, nor the first one again (umdk_cam.layer_order), expert_ids of another
//   dispatch, an item that is answered twice or never was, an item that does not fit, and sizes that differ among the
//   four calls of an item.
// Left out: dynamic_quant 1, items received in several pieces, tensors that need gradients. Each is refused by name.
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "peers.h"
#include "poison.h"

namespace softnpu {
namespace {

using at::Tensor;

constexpr auto kDispatchSend = "async_dispatch_send", kDispatchRecv = "async_dispatch_recv",
               kCombineSend = "async_combine_send", kCombineRecv = "async_combine_recv";
constexpr int64_t kMostRows = 262144, kInfo = 5;
// The kernels count tokens in 16 bits, and copy rows in pieces of 32 bytes.
constexpr int64_t kMostTokens = 65535, kHiddenMultiple = 16;
const Limit kHiddenLimit("umdk_cam.hidden");
const Limit kLayerOrder("umdk_cam.layer_order");

struct World {
  int64_t hidden, topk, ffn, attention, experts;  // experts: routed ones of one FFN rank

  int64_t slots() const { return experts + 1; }  // the shared expert first
  bool operator==(const World&) const = default;
};
std::ostream& operator<<(std::ostream& out, const World& w) {
  return out << "hidden_size " << w.hidden << ", top_k " << w.topk << ", expert_rank_size " << w.ffn
             << ", attention_rank_size " << w.attention << ", expert_per_rank " << w.experts;
}

// What a message of either direction begins with; the counts of its world's slots and the rows follow.
struct Header {
  World world;
  int64_t layer, tp, max_seq_len, before, element, rows;
};

struct Message {
  Header header{};
  std::vector<int64_t> counts;  // rows by expert, the shared one first
  std::vector<char> rows;

  std::vector<char> pack() const {
    std::vector<char> bytes(sizeof header + counts.size() * sizeof(int64_t) + rows.size());
    std::memcpy(bytes.data(), &header, sizeof header);
    std::memcpy(bytes.data() + sizeof header, counts.data(), counts.size() * sizeof(int64_t));
    std::memcpy(bytes.data() + bytes.size() - rows.size(), rows.data(), rows.size());
    return bytes;
  }
  static Message unpack(const std::vector<char>& bytes) {
    Message m;
    std::memcpy(&m.header, bytes.data(), sizeof m.header);
    m.counts.resize(m.header.world.slots());
    std::memcpy(m.counts.data(), bytes.data() + sizeof m.header, m.counts.size() * sizeof(int64_t));
    m.rows.assign(bytes.begin() + sizeof m.header + m.counts.size() * sizeof(int64_t), bytes.end());
    return m;
  }
};

// A dispatch whose combine_recv has not run.
struct Dispatch {
  int64_t layer, batch_size;
  World world;
  std::vector<int32_t> expert_ids;
  std::vector<std::vector<int64_t>> counts;  // by FFN rank
};

struct Rank {
  std::mutex mutex;
  // On Attention.
  uint64_t dispatches = 0;
  std::optional<Dispatch> outstanding;
  int64_t first_layer = -1, last_layer = -1;
  // On FFN, by DP group.
  struct Item {
    World world;
    int64_t max_seq_len;
    std::vector<int64_t> info;
  };
  struct Source {
    uint64_t items = 0;
    std::optional<Item> unanswered;
  };
  std::vector<Source> sources;
  int64_t tp = 0;
  size_t next = 0;
};
States<Rank>& states() {
  static auto* all = new States<Rank>;  // never destroyed: a stream's thread may outlive static objects
  return *all;
}

std::shared_ptr<Group> group_for(const char* op, c10::string_view name, const World& world, int64_t rank) {
  const auto group = group_of(op, name, rank);
  TORCH_CHECK(group->size == world.attention + world.ffn, op, ": the group has ", group->size, " ranks, not ",
              world.attention, " + ", world.ffn);
  return group;
}

int64_t shared_share(int64_t tokens, int64_t ffn, int64_t index) {
  return tokens / ffn + (index < tokens % ffn ? 1 : 0);
}

template <class T>
const T* data(const Tensor& t) {
  return t.const_data_ptr<T>();
}
const char* row(const Tensor& dense, int64_t index) {
  return static_cast<const char*>(dense.const_data_ptr()) + index * dense.size(1) * dense.element_size();
}
void append(std::vector<char>* out, const char* from, size_t bytes) { out->insert(out->end(), from, from + bytes); }

Tensor unfilled(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return options.device().is_meta() ? at::empty(sizes, options) : poison(sizes, options);
}
Tensor done_byte(const Tensor& like) { return unfilled({1}, like.options().dtype(at::kChar)); }

// ---------------------------------------------------------------------------------------------- dispatch_send

Tensor dispatch_send(const Tensor& x, const Tensor& expert_ids, const Tensor&, int64_t, int64_t max_seq_len,
                     int64_t batch_size, int64_t hidden_size, int64_t top_k, int64_t expert_rank_size,
                     int64_t attention_rank_size, int64_t expert_per_rank, int64_t rank, int64_t, int64_t layer_index,
                     int64_t tp_size, int64_t, c10::string_view group_name) {
  const World world{hidden_size, top_k, expert_rank_size, attention_rank_size, expert_per_rank};
  const auto group = group_for(kDispatchSend, group_name, world, rank);
  Rank& state = states().of(*group);
  const OneAtATime alone(kDispatchSend, state.mutex);
  TORCH_CHECK(!state.outstanding.has_value(), kDispatchSend, ": rank ", rank, " of the group '", group->name,
              "' dispatches layer ", layer_index, " while layer ", state.outstanding->layer,
              " waits for its async_combine_recv, whose counts this would overwrite");
  TORCH_CHECK(kLayerOrder.waived() || state.last_layer < 0 || layer_index == state.last_layer ||
                  layer_index == state.last_layer + 1 || layer_index == state.first_layer,
              kDispatchSend, ": layer ", layer_index, " after layer ", state.last_layer,
              " of a model that begins with ", state.first_layer, "; expected the same, the next, or the first");

  const Tensor tokens = x.contiguous(), ids = expert_ids.contiguous();
  const int32_t* id = data<int32_t>(ids);
  const size_t bytes = tokens.size(1) * tokens.element_size();
  // Which tokens go to which expert, those of the shared ones first.
  std::vector<std::vector<std::vector<int64_t>>> to(world.ffn, std::vector<std::vector<int64_t>>(world.slots()));
  for (int64_t m = 0, token = 0; m < world.ffn; ++m)
    for (int64_t i = 0; i < shared_share(batch_size, world.ffn, m); ++i) to[m][0].push_back(token++);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    SOFTNPU_EXPECT(id[i] >= 0 && id[i] < world.ffn * world.experts, kDispatchSend,
                   c10::str("expert_ids[", i / top_k, ", ", i % top_k, "]"), id[i], "an expert, 0 to ",
                   world.ffn * world.experts - 1);
    to[id[i] / world.experts][1 + id[i] % world.experts].push_back(i / top_k);
  }
  Dispatch dispatch{layer_index, batch_size, world, std::vector<int32_t>(id, id + ids.numel()), {}};
  int64_t before = 0;
  for (int64_t m = 0; m < world.ffn; ++m) {
    Message message;
    for (const auto& rows : to[m]) {
      message.counts.push_back(static_cast<int64_t>(rows.size()));
      message.header.rows += static_cast<int64_t>(rows.size());
      for (const int64_t token : rows) append(&message.rows, row(tokens, token), bytes);
    }
    message.header = {world,
                      layer_index,
                      tp_size,
                      max_seq_len,
                      before,
                      static_cast<int64_t>(tokens.scalar_type()),
                      message.header.rows};
    const std::vector<char> packed = message.pack();
    group->put(static_cast<uint32_t>(attention_rank_size + m), c10::str("d", state.dispatches), packed.data(),
               packed.size());
    before += message.header.rows;
    dispatch.counts.push_back(message.counts);
  }
  ++state.dispatches;
  state.outstanding = std::move(dispatch);
  state.last_layer = layer_index;
  if (state.first_layer < 0) state.first_layer = layer_index;
  return done_byte(x);
}

// ---------------------------------------------------------------------------------------------- dispatch_recv

int64_t capacity() {
  double factor = 1.0;
  if (const char* text = std::getenv("BATCH_SIZE_FACTOR")) {
    char* end = nullptr;
    factor = std::strtod(text, &end);
    TORCH_CHECK(end != text && factor > 0 && factor <= 1, kDispatchRecv, ": BATCH_SIZE_FACTOR=", text,
                ": expected more than 0, and 1 at most");
  }
  const auto rows = static_cast<int64_t>(kMostRows * factor);
  TORCH_CHECK(rows > 0, kDispatchRecv, ": BATCH_SIZE_FACTOR leaves no row");
  return rows;
}

std::vector<Tensor> recv_results(const Tensor& x, const World& world, int64_t tp_size) {
  const auto longs = x.options().dtype(at::kLong), floats = x.options().dtype(at::kFloat);
  const int64_t rows = capacity();
  return {unfilled({rows, world.hidden}, x.options()),
          unfilled({std::max<int64_t>(1, rows / world.ffn), world.hidden}, x.options()),
          unfilled({1}, floats),
          unfilled({1}, floats),
          unfilled({kInfo + tp_size + world.slots() * tp_size}, longs),
          unfilled({world.experts}, longs),
          unfilled({1}, longs)};
}

// Fills the rows from `at` on from each message's rows of one expert.
int64_t fill(Tensor into, int64_t at, const std::vector<Message>& item, int64_t slot, std::vector<size_t>* read) {
  const size_t bytes = into.size(1) * into.element_size();
  for (size_t t = 0; t < item.size(); ++t) {
    const int64_t count = item[t].counts[slot];
    std::memcpy(static_cast<char*>(into.mutable_data_ptr()) + at * bytes, item[t].rows.data() + (*read)[t],
                count * bytes);
    (*read)[t] += count * bytes;
    at += count;
  }
  return at;
}

std::vector<Tensor> dispatch_recv(const Tensor& x, const Tensor&, int64_t, int64_t batch_size, int64_t hidden_size,
                                  int64_t top_k, int64_t expert_rank_size, int64_t attention_rank_size,
                                  int64_t expert_per_rank, int64_t rank, int64_t, int64_t tp_size, int64_t,
                                  c10::string_view group_name) {
  const World world{hidden_size, top_k, expert_rank_size, attention_rank_size, expert_per_rank};
  const auto group = group_for(kDispatchRecv, group_name, world, rank);
  Rank& state = states().of(*group);
  const OneAtATime alone(kDispatchRecv, state.mutex);
  const auto dp_groups = static_cast<size_t>(attention_rank_size / tp_size);
  TORCH_CHECK(state.tp == 0 || (state.tp == tp_size && state.sources.size() == dp_groups), kDispatchRecv, ": ",
              dp_groups, " DP groups of tp_size ", tp_size, " after ", state.sources.size(), " of ", state.tp,
              "; rank ", rank, " of the group '", group->name, "' counts its items by them");
  state.tp = tp_size;
  state.sources.resize(dp_groups);

  std::vector<std::vector<Group::Message>> sets;
  std::vector<size_t> order;
  for (size_t i = 0; i < state.sources.size(); ++i) {
    const size_t source = (state.next + i) % state.sources.size();
    order.push_back(source);
    sets.emplace_back();
    for (int64_t t = 0; t < tp_size; ++t)
      sets.back().push_back({static_cast<uint32_t>(source * tp_size + t), c10::str("d", state.sources[source].items)});
  }
  const size_t chosen = group->wait("async_dispatch_recv waits for a work item", sets);
  const size_t from = order[chosen];
  std::vector<Message> item;
  for (const Group::Message& message : sets[chosen])
    item.push_back(Message::unpack(group->take(message.source, message.what)));
  ++state.sources[from].items;
  state.next = (from + 1) % state.sources.size();
  TORCH_CHECK(!state.sources[from].unanswered.has_value(), kDispatchRecv, ": DP group ", from,
              " sends another item before its last one is answered");
  const Header& first = item.front().header;
  for (size_t t = 0; t < item.size(); ++t) {
    const Header& h = item[t].header;
    TORCH_CHECK(h.layer == first.layer, kDispatchRecv, ": rank ", sets[chosen][t].source, " sends layer ", h.layer,
                ", rank ", sets[chosen][0].source, " of the same DP group layer ", first.layer);
    TORCH_CHECK(h.world == world && h.tp == tp_size && h.max_seq_len == batch_size &&
                    h.element == static_cast<int64_t>(x.scalar_type()),
                kDispatchRecv, ": rank ", sets[chosen][t].source, " sent with ", h.world, ", tp_size ", h.tp,
                ", max_seq_len ", h.max_seq_len, ", ", static_cast<at::ScalarType>(h.element), "; rank ", rank,
                " receives with ", world, ", tp_size ", tp_size, ", max_seq_len ", batch_size, ", ", x.scalar_type());
  }

  std::vector<Tensor> results = recv_results(x, world, tp_size);
  std::vector<int64_t> counts(world.slots());
  for (const Message& message : item)
    for (int64_t slot = 0; slot < world.slots(); ++slot) counts[slot] += message.counts[slot];
  int64_t routed = 0;
  for (int64_t slot = 1; slot < world.slots(); ++slot) routed += counts[slot];
  TORCH_CHECK(routed <= results[0].size(0) && counts[0] <= results[1].size(0), kDispatchRecv, ": ", routed,
              " routed and ", counts[0], " shared rows where there is room for ", results[0].size(0), " and ",
              results[1].size(0), "; raise BATCH_SIZE_FACTOR (the software NPU receives an item in one piece)");
  std::vector<size_t> read(item.size());
  fill(results[1], 0, item, 0, &read);
  int64_t at = 0;
  for (int64_t slot = 1; slot < world.slots(); ++slot) at = fill(results[0], at, item, slot, &read);

  std::vector<int64_t> info{routed + counts[0], static_cast<int64_t>(from) * tp_size, first.layer, 1, world.experts};
  for (const Message& message : item) info.push_back(message.header.before);
  for (const Message& message : item) info.insert(info.end(), message.counts.begin(), message.counts.end());
  std::copy(info.begin(), info.end(), results[4].mutable_data_ptr<int64_t>());
  std::copy(counts.begin() + 1, counts.end(), results[5].mutable_data_ptr<int64_t>());
  *results[6].mutable_data_ptr<int64_t>() = counts[0];
  state.sources[from].unanswered = Rank::Item{world, batch_size, std::move(info)};
  return results;
}

// ---------------------------------------------------------------------------------------------- combine_send

Tensor combine_send(const Tensor& expand_x, const Tensor& expand_x_shared, const Tensor&, const Tensor& batch_info,
                    int64_t, int64_t batch_size, int64_t hidden_size, int64_t top_k, int64_t expert_rank_size,
                    int64_t attention_rank_size, int64_t expert_per_rank, int64_t rank, int64_t, int64_t tp_size,
                    c10::string_view group_name) {
  const World world{hidden_size, top_k, expert_rank_size, attention_rank_size, expert_per_rank};
  const auto group = group_for(kCombineSend, group_name, world, rank);
  Rank& state = states().of(*group);
  const OneAtATime alone(kCombineSend, state.mutex);
  const Tensor dense_info = batch_info.contiguous();
  const std::vector<int64_t> info(data<int64_t>(dense_info), data<int64_t>(dense_info) + dense_info.numel());
  TORCH_CHECK(state.tp == 0 || state.tp == tp_size, kCombineSend, ": tp_size ", tp_size, " after an ", kDispatchRecv,
              " with ", state.tp);
  const auto source = static_cast<size_t>(info[1]) / tp_size;
  const Rank::Item* item =
      source < state.sources.size() && state.sources[source].unanswered ? &*state.sources[source].unanswered : nullptr;
  TORCH_CHECK(item != nullptr && item->info == info, kCombineSend, ": expert_token_nums says layer ", info[2],
              " of rank ", info[1], ", and no such item of rank ", rank,
              " waits for an answer; give each item's own batch_info, once");
  TORCH_CHECK(item->world == world && item->max_seq_len == batch_size, kCombineSend, ": the item of layer ", info[2],
              " was received with ", item->world, ", batch_size ", item->max_seq_len, " and is answered with ", world,
              ", batch_size ", batch_size);

  const int64_t* counts = info.data() + kInfo + tp_size;  // of the rank t: slots() from counts + t * slots()
  int64_t routed = 0, shared = 0;
  for (int64_t t = 0; t < tp_size; ++t) {
    shared += counts[t * world.slots()];
    for (int64_t slot = 1; slot < world.slots(); ++slot) routed += counts[t * world.slots() + slot];
  }
  TORCH_CHECK(expand_x.size(0) >= routed && expand_x_shared.size(0) >= shared, kCombineSend, ": layer ", info[2],
              " of rank ", info[1], " has ", routed, " routed and ", shared, " shared rows, found ", expand_x.size(0),
              " and ", expand_x_shared.size(0));
  const Tensor rows = expand_x.contiguous(), shared_rows = expand_x_shared.contiguous();
  const size_t bytes = hidden_size * rows.element_size();
  std::vector<Message> answers(tp_size);
  int64_t shared_at = 0, at = 0;
  for (int64_t slot = 0; slot < world.slots(); ++slot)
    for (int64_t t = 0; t < tp_size; ++t) {
      const int64_t count = counts[t * world.slots() + slot];
      int64_t& position = slot == 0 ? shared_at : at;
      answers[t].counts.push_back(count);
      answers[t].header.rows += count;
      append(&answers[t].rows, row(slot == 0 ? shared_rows : rows, position), count * bytes);
      position += count;
    }
  const std::string what = c10::str("c", state.sources[source].items - 1);
  for (int64_t t = 0; t < tp_size; ++t) {
    answers[t].header = {
        world, info[2], tp_size, batch_size, 0, static_cast<int64_t>(rows.scalar_type()), answers[t].header.rows};
    const std::vector<char> packed = answers[t].pack();
    group->put(static_cast<uint32_t>(info[1] + t), what, packed.data(), packed.size());
  }
  state.sources[source].unanswered.reset();
  return done_byte(expand_x);
}

// ---------------------------------------------------------------------------------------------- combine_recv

Tensor combine_recv(const Tensor& expand_x, const Tensor& expert_ids, const Tensor& expert_scales, const Tensor&,
                    int64_t, int64_t batch_size, int64_t hidden_size, int64_t top_k, int64_t expert_rank_size,
                    int64_t attention_rank_size, int64_t expert_per_rank, int64_t rank, int64_t,
                    c10::string_view group_name) {
  const World world{hidden_size, top_k, expert_rank_size, attention_rank_size, expert_per_rank};
  const auto group = group_for(kCombineRecv, group_name, world, rank);
  Rank& state = states().of(*group);
  const OneAtATime alone(kCombineRecv, state.mutex);
  TORCH_CHECK(state.outstanding.has_value(), kCombineRecv, ": rank ", rank, " of the group '", group->name,
              "' has dispatched nothing that is not received yet");
  const Dispatch& dispatch = *state.outstanding;
  TORCH_CHECK(dispatch.world == world && dispatch.batch_size == batch_size, kCombineRecv, ": layer ", dispatch.layer,
              " was dispatched with ", dispatch.world, ", batch_size ", dispatch.batch_size, " and is received with ",
              world, ", batch_size ", batch_size);
  const Tensor ids = expert_ids.contiguous(), scales = expert_scales.contiguous();
  const int32_t* id = data<int32_t>(ids);
  TORCH_CHECK(std::equal(id, id + ids.numel(), dispatch.expert_ids.begin(), dispatch.expert_ids.end()), kCombineRecv,
              ": expert_ids are not those of the dispatch of layer ", dispatch.layer, ", whose rows come back");

  const std::string what = c10::str("c", state.dispatches - 1);
  std::vector<Group::Message> expected;
  for (int64_t m = 0; m < world.ffn; ++m) expected.push_back({static_cast<uint32_t>(attention_rank_size + m), what});
  group->wait(c10::str("async_combine_recv waits for the results of layer ", dispatch.layer), {expected});
  std::vector<Tensor> rows;                    // by FFN rank, in float32
  std::vector<std::vector<int64_t>> next_row;  // by FFN rank and expert
  std::vector<Message> answers;
  for (int64_t m = 0; m < world.ffn; ++m) {
    answers.push_back(Message::unpack(group->take(expected[m].source, what)));
    Message& answer = answers.back();
    TORCH_CHECK(answer.header.layer == dispatch.layer && answer.counts == dispatch.counts[m] &&
                    answer.header.world == world &&
                    answer.header.element == static_cast<int64_t>(expand_x.scalar_type()),
                kCombineRecv, ": FFN rank ", expected[m].source, " answers layer ", answer.header.layer, " in ",
                static_cast<at::ScalarType>(answer.header.element), " with ", answer.header.world, ", expected layer ",
                dispatch.layer, " in ", expand_x.scalar_type(), " with ", world, " and as many rows as were sent");
    rows.push_back(
        at::from_blob(answer.rows.data(), {answer.header.rows, hidden_size}, expand_x.options()).to(at::kFloat));
    next_row.emplace_back(world.slots());
    for (int64_t slot = 1; slot < world.slots(); ++slot)
      next_row[m][slot] = next_row[m][slot - 1] + answer.counts[slot - 1];
  }
  Tensor sum = at::zeros({batch_size, hidden_size}, expand_x.options().dtype(at::kFloat));
  for (int64_t token = 0, m = 0, taken = 0; token < batch_size; ++token) {
    float* out = sum.mutable_data_ptr<float>() + token * hidden_size;
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t expert = id[token * top_k + k], owner = expert / world.experts;
      const float scale = data<float>(scales)[token * top_k + k];
      const float* in = data<float>(rows[owner]) + hidden_size * next_row[owner][1 + expert % world.experts]++;
      for (int64_t h = 0; h < hidden_size; ++h) out[h] += scale * in[h];
    }
    while (taken == shared_share(batch_size, world.ffn, m)) {
      ++m;
      taken = 0;
    }
    const float* shared = data<float>(rows[m]) + hidden_size * taken++;
    for (int64_t h = 0; h < hidden_size; ++h) out[h] += shared[h];
  }
  state.outstanding.reset();
  return sum.to(expand_x.scalar_type());
}

// ---------------------------------------------------------------------------------------------- what is refused

void check_world(const char* op, const World& world, int64_t rank, int64_t world_size, const Tensor& comm_args,
                 bool on_ffn) {
  SOFTNPU_EXPECT(world.ffn > 0 && world.attention > 0 && world.experts > 0, op,
                 "expert_rank_size, attention_rank_size, expert_per_rank",
                 c10::str(world.ffn, ", ", world.attention, ", ", world.experts), "more than 0");
  SOFTNPU_EXPECT(world_size == world.ffn + world.attention, op, "world_size", world_size,
                 "attention_rank_size + expert_rank_size, ", world.attention, " + ", world.ffn);
  const int64_t first = on_ffn ? world.attention : 0, last = on_ffn ? world_size - 1 : world.attention - 1;
  SOFTNPU_EXPECT(rank >= first && rank <= last, op, "rank", rank, on_ffn ? "an FFN" : "an Attention", " rank, ", first,
                 " to ", last);
  SOFTNPU_EXPECT(world.topk > 0 && world.topk <= world.ffn * world.experts, op, "top_k", world.topk, "1 to ",
                 world.ffn * world.experts, ", the number of experts");
  SOFTNPU_EXPECT(world.hidden > 0 && (world.hidden % kHiddenMultiple == 0 || kHiddenLimit.waived()), op, "hidden_size",
                 world.hidden, "a multiple of ", kHiddenMultiple);
  SOFTNPU_EXPECT(comm_args.scalar_type() == at::kHalf && comm_args.numel() == 1, op, "comm_args",
                 c10::str(comm_args.scalar_type(), " ", comm_args.sizes()), "Half [1]");
}

void check_floating(const char* op, const char* argument, const Tensor& t) {
  SOFTNPU_EXPECT(t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf, op, c10::str(argument, "'s dtype"),
                 t.scalar_type(), "BFloat16 or Half");
  SOFTNPU_EXPECT(!t.requires_grad(), op, argument, "a tensor that needs gradients", "one that does not");
}
void check_tp(const char* op, const World& world, int64_t tp_size, int64_t max_seq_len, int64_t dynamic_quant) {
  SOFTNPU_EXPECT(tp_size > 0 && world.attention % tp_size == 0, op, "tp_size", tp_size,
                 "a divisor of attention_rank_size, ", world.attention);
  SOFTNPU_EXPECT(max_seq_len >= tp_size && max_seq_len <= kMostRows, op, "max_seq_len", max_seq_len, "tp_size, ",
                 tp_size, ", to ", kMostRows);
  SOFTNPU_EXPECT(dynamic_quant == 0, op, "dynamic_quant", dynamic_quant, "0 (the software NPU does not quantise here)");
}
void check_ids(const char* op, const char* argument, const Tensor& t, at::ScalarType type, int64_t batch_size,
               int64_t top_k) {
  SOFTNPU_EXPECT(t.scalar_type() == type && t.dim() == 2 && t.size(0) == batch_size && t.size(1) == top_k, op, argument,
                 c10::str(t.scalar_type(), " ", t.sizes()), type, " [", batch_size, ", ", top_k, "]");
}

Tensor dispatch_send_meta(const Tensor& x, const Tensor& expert_ids, const Tensor& comm_args, int64_t,
                          int64_t max_seq_len, int64_t batch_size, int64_t hidden_size, int64_t top_k,
                          int64_t expert_rank_size, int64_t attention_rank_size, int64_t expert_per_rank, int64_t rank,
                          int64_t world_size, int64_t layer_index, int64_t tp_size, int64_t dynamic_quant,
                          c10::string_view) {
  const World world{hidden_size, top_k, expert_rank_size, attention_rank_size, expert_per_rank};
  check_world(kDispatchSend, world, rank, world_size, comm_args, false);
  check_tp(kDispatchSend, world, tp_size, max_seq_len, dynamic_quant);
  check_floating(kDispatchSend, "x", x);
  SOFTNPU_EXPECT(batch_size > 0 && batch_size <= std::min(max_seq_len / tp_size, kMostTokens), kDispatchSend,
                 "batch_size", batch_size, "1 to ", std::min(max_seq_len / tp_size, kMostTokens),
                 ", max_seq_len / tp_size");
  SOFTNPU_EXPECT(x.dim() == 2 && x.size(0) == batch_size && x.size(1) == hidden_size, kDispatchSend, "x", x.sizes(),
                 "[", batch_size, ", ", hidden_size, "]");
  check_ids(kDispatchSend, "expert_ids", expert_ids, at::kInt, batch_size, top_k);
  SOFTNPU_EXPECT(layer_index >= 0, kDispatchSend, "layer_index", layer_index, "a layer");
  return done_byte(x);
}

std::vector<Tensor> dispatch_recv_meta(const Tensor& x, const Tensor& comm_args, int64_t, int64_t batch_size,
                                       int64_t hidden_size, int64_t top_k, int64_t expert_rank_size,
                                       int64_t attention_rank_size, int64_t expert_per_rank, int64_t rank,
                                       int64_t world_size, int64_t tp_size, int64_t dynamic_quant, c10::string_view) {
  const World world{hidden_size, top_k, expert_rank_size, attention_rank_size, expert_per_rank};
  check_world(kDispatchRecv, world, rank, world_size, comm_args, true);
  check_tp(kDispatchRecv, world, tp_size, batch_size, dynamic_quant);
  check_floating(kDispatchRecv, "x", x);
  SOFTNPU_EXPECT(x.numel() == 1, kDispatchRecv, "x", x.sizes(), "one element that says the dtype");
  return recv_results(x, world, tp_size);
}

Tensor combine_send_meta(const Tensor& expand_x, const Tensor& expand_x_shared, const Tensor& comm_args,
                         const Tensor& expert_token_nums, int64_t, int64_t batch_size, int64_t hidden_size,
                         int64_t top_k, int64_t expert_rank_size, int64_t attention_rank_size, int64_t expert_per_rank,
                         int64_t rank, int64_t world_size, int64_t tp_size, c10::string_view) {
  const World world{hidden_size, top_k, expert_rank_size, attention_rank_size, expert_per_rank};
  check_world(kCombineSend, world, rank, world_size, comm_args, true);
  check_tp(kCombineSend, world, tp_size, batch_size, 0);
  check_floating(kCombineSend, "expand_x", expand_x);
  SOFTNPU_EXPECT(expand_x_shared.scalar_type() == expand_x.scalar_type(), kCombineSend, "expand_x_shared's dtype",
                 expand_x_shared.scalar_type(), "that of expand_x, ", expand_x.scalar_type());
  for (const auto& [name, t] : {std::pair{"expand_x", expand_x}, std::pair{"expand_x_shared", expand_x_shared}})
    SOFTNPU_EXPECT(t.dim() == 2 && t.size(1) == hidden_size, kCombineSend, name, t.sizes(), "[rows, ", hidden_size,
                   "]");
  const int64_t length = kInfo + tp_size + world.slots() * tp_size;
  SOFTNPU_EXPECT(expert_token_nums.scalar_type() == at::kLong && expert_token_nums.dim() == 1 &&
                     expert_token_nums.size(0) == length,
                 kCombineSend, "expert_token_nums",
                 c10::str(expert_token_nums.scalar_type(), " ", expert_token_nums.sizes()),
                 "the batch_info of async_dispatch_recv, Long [", length, "]");
  return done_byte(expand_x);
}

Tensor combine_recv_meta(const Tensor& expand_x, const Tensor& expert_ids, const Tensor& expert_scales,
                         const Tensor& comm_args, int64_t, int64_t batch_size, int64_t hidden_size, int64_t top_k,
                         int64_t expert_rank_size, int64_t attention_rank_size, int64_t expert_per_rank, int64_t rank,
                         int64_t world_size, c10::string_view) {
  const World world{hidden_size, top_k, expert_rank_size, attention_rank_size, expert_per_rank};
  check_world(kCombineRecv, world, rank, world_size, comm_args, false);
  check_floating(kCombineRecv, "expand_x", expand_x);
  SOFTNPU_EXPECT(expand_x.numel() == 1, kCombineRecv, "expand_x", expand_x.sizes(), "one element that says the dtype");
  SOFTNPU_EXPECT(batch_size > 0 && batch_size <= kMostTokens, kCombineRecv, "batch_size", batch_size, "1 to ",
                 kMostTokens);
  check_ids(kCombineRecv, "expert_ids", expert_ids, at::kInt, batch_size, top_k);
  check_ids(kCombineRecv, "expert_scales", expert_scales, at::kFloat, batch_size, top_k);
  return at::empty({batch_size, hidden_size}, expand_x.options());
}

const char* const kGroupName = "group_name";
torch::CppFunction queued() { return torch::CppFunction::makeFromBoxedFunction<&on_stream_of_a_group<kGroupName>>(); }

}  // namespace
}  // namespace softnpu

TORCH_LIBRARY_FRAGMENT(umdk_cam_op_lib, m) {
  m.def(
      "async_dispatch_send(Tensor x, Tensor expert_ids, Tensor comm_args, int comm_id, int max_seq_len, "
      "int batch_size, int hidden_size, int top_k, int expert_rank_size, int attention_rank_size, int expert_per_rank, "
      "int rank, int world_size, int layer_index, int tp_size, int dynamic_quant, str group_name) -> Tensor");
  m.def(
      "async_dispatch_recv(Tensor x, Tensor comm_args, int comm_id, int batch_size, int hidden_size, int top_k, "
      "int expert_rank_size, int attention_rank_size, int expert_per_rank, int rank, int world_size, int tp_size, "
      "int dynamic_quant, str group_name) -> Tensor[]");
  m.def(
      "async_combine_send(Tensor expand_x, Tensor expand_x_shared, Tensor comm_args, Tensor expert_token_nums, "
      "int comm_id, int batch_size, int hidden_size, int top_k, int expert_rank_size, int attention_rank_size, "
      "int expert_per_rank, int rank, int world_size, int tp_size, str group_name) -> Tensor");
  m.def(
      "async_combine_recv(Tensor expand_x, Tensor expert_ids, Tensor expert_scales, Tensor comm_args, int comm_id, "
      "int batch_size, int hidden_size, int top_k, int expert_rank_size, int attention_rank_size, int expert_per_rank, "
      "int rank, int world_size, str group_name) -> Tensor");
}
TORCH_LIBRARY_IMPL(umdk_cam_op_lib, CPU, m) {
  m.impl("async_dispatch_send", softnpu::dispatch_send);
  m.impl("async_dispatch_recv", softnpu::dispatch_recv);
  m.impl("async_combine_send", softnpu::combine_send);
  m.impl("async_combine_recv", softnpu::combine_recv);
}
TORCH_LIBRARY_IMPL(umdk_cam_op_lib, Meta, m) {
  m.impl("async_dispatch_send", softnpu::dispatch_send_meta);
  m.impl("async_dispatch_recv", softnpu::dispatch_recv_meta);
  m.impl("async_combine_send", softnpu::combine_send_meta);
  m.impl("async_combine_recv", softnpu::combine_recv_meta);
}
TORCH_LIBRARY_IMPL(umdk_cam_op_lib, PrivateUse1, m) {
  for (const char* name : {"async_dispatch_send", "async_dispatch_recv", "async_combine_send", "async_combine_recv"})
    m.impl(name, softnpu::queued());
}
