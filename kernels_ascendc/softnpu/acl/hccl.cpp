// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// libhccl.so: collectives between processes of one host. Every message is a file in shared memory, written whole and
// renamed, named by sender, receiver and a sequence number that is taken when the call is issued; the transfer itself
// is a task of the caller's stream. Not done: topology, several hosts, waiting senders (a send is buffered; real HCCL
// may wait for the receiver, so a deadlock of that kind does not show here).
#include <acl/acl.h>
#include <fcntl.h>
#include <hccl/hccl.h>
#include <sys/stat.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "groups.h"
#include "softnpu.h"

#define SOFTNPU_API extern "C" __attribute__((visibility("default")))

namespace {

struct Message {
  uint32_t peer;
  uint64_t sequence;
};

// One rank's end of a communicator.
struct Communicator {
  std::string name, folder;
  uint32_t size = 0, rank = 0;
  std::map<uint32_t, uint64_t> sent, received;

  Message to(uint32_t peer) { return {peer, sent[peer]++}; }
  Message from(uint32_t peer) { return {peer, received[peer]++}; }
  std::vector<Message> to_all() {
    std::vector<Message> all;
    for (uint32_t peer = 0; peer < size; ++peer)
      if (peer != rank) all.push_back(to(peer));
    return all;
  }
  std::vector<Message> from_all() {
    std::vector<Message> all;
    for (uint32_t peer = 0; peer < size; ++peer)
      if (peer != rank) all.push_back(from(peer));
    return all;
  }
  std::string file(uint32_t source, uint32_t target, uint64_t sequence) const {
    return folder + "/" + std::to_string(source) + "_" + std::to_string(target) + "_" + std::to_string(sequence);
  }

  void put(const Message& m, const void* data, size_t bytes) const {
    const std::string target = file(rank, m.peer, m.sequence), partial = target + ".part";
    FILE* out = std::fopen(partial.c_str(), "wb");
    const bool written = out != nullptr && std::fwrite(data, 1, bytes, out) == bytes;
    if (out != nullptr && std::fclose(out) != 0) throw std::runtime_error("HCCL: cannot write " + partial);
    if (!written || std::rename(partial.c_str(), target.c_str()) != 0)
      throw std::runtime_error("HCCL: cannot write " + target);
  }
  void get(const Message& m, void* data, size_t bytes) const {
    const std::string source = file(m.peer, rank, m.sequence);
    FILE* in = nullptr;
    while ((in = std::fopen(source.c_str(), "rb")) == nullptr) {
      if (softnpu_exiting())
        throw std::runtime_error("HCCL: the process ended while rank " + std::to_string(rank) + " waited for rank " +
                                 std::to_string(m.peer));
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    const size_t found = std::fread(data, 1, bytes, in);
    const bool longer = std::fgetc(in) != EOF;
    std::fclose(in);
    unlink(source.c_str());
    if (found != bytes || longer)
      throw std::runtime_error("HCCL: rank " + std::to_string(rank) + " expected " + std::to_string(bytes) +
                               " bytes from rank " + std::to_string(m.peer) + " and got " +
                               (longer ? "more" : std::to_string(found)));
  }
};

Communicator* communicator(HcclComm handle) { return static_cast<Communicator*>(handle); }

size_t size_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      throw std::runtime_error("HCCL: data type " + std::to_string(type) + " is not supported on the software NPU");
  }
}

// What a transfer reads and writes.
SoftnpuAccess reads(const void* p, size_t bytes) { return {p, bytes, 1, 0, 0, 0}; }
SoftnpuAccess writes(const void* p, size_t bytes) { return {p, bytes, 1, 0, 1, 0}; }

HcclResult queue(aclrtStream stream, const char* name, const std::vector<SoftnpuAccess>& accesses,
                 std::function<void()> transfer) {
  softnpu_push_task(
      stream, name, [](void* f) { (*static_cast<std::function<void()>*>(f))(); },
      new std::function<void()>(std::move(transfer)), [](void* f) { delete static_cast<std::function<void()>*>(f); },
      accesses.data(), accesses.size(), 0);
  return HCCL_SUCCESS;
}

template <class T>
void reduce_as(void* into, const void* from, size_t count, HcclReduceOp op) {
  auto* a = static_cast<T*>(into);
  const auto* b = static_cast<const T*>(from);
  for (size_t i = 0; i < count; ++i) {
    switch (op) {
      case HCCL_REDUCE_SUM:
        a[i] = static_cast<T>(a[i] + b[i]);
        break;
      case HCCL_REDUCE_PROD:
        a[i] = static_cast<T>(a[i] * b[i]);
        break;
      case HCCL_REDUCE_MAX:
        a[i] = b[i] > a[i] ? b[i] : a[i];
        break;
      default:
        a[i] = b[i] < a[i] ? b[i] : a[i];
        break;
    }
  }
}

void reduce(void* into, const void* from, size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_FP32:
      return reduce_as<float>(into, from, count, op);
    case HCCL_DATA_TYPE_FP64:
      return reduce_as<double>(into, from, count, op);
    case HCCL_DATA_TYPE_FP16:
      return reduce_as<c10::Half>(into, from, count, op);
    case HCCL_DATA_TYPE_BFP16:
      return reduce_as<c10::BFloat16>(into, from, count, op);
    case HCCL_DATA_TYPE_INT8:
      return reduce_as<int8_t>(into, from, count, op);
    case HCCL_DATA_TYPE_UINT8:
      return reduce_as<uint8_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT16:
      return reduce_as<int16_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT32:
      return reduce_as<int32_t>(into, from, count, op);
    case HCCL_DATA_TYPE_INT64:
      return reduce_as<int64_t>(into, from, count, op);
    default:
      throw std::runtime_error("HCCL: data type " + std::to_string(type) + " cannot be reduced on the software NPU");
  }
}

// Every rank reduces in rank order, so that all ranks get the same bits.
void gather_and_reduce(const Communicator& c, const std::vector<Message>& messages, const void* own, void* out,
                       size_t count, HcclDataType type, HcclReduceOp op) {
  const size_t bytes = count * size_of(type);
  std::vector<std::vector<char>> parts(c.size);
  parts[c.rank].assign(static_cast<const char*>(own), static_cast<const char*>(own) + bytes);
  for (const Message& m : messages) {
    parts[m.peer].resize(bytes);
    c.get(m, parts[m.peer].data(), bytes);
  }
  for (uint32_t rank = 1; rank < c.size; ++rank) reduce(parts[0].data(), parts[rank].data(), count, type, op);
  std::memcpy(out, parts[0].data(), bytes);
}

const char* offset_by(const void* base, size_t offset) { return static_cast<const char*>(base) + offset; }
char* offset_by(void* base, size_t offset) { return static_cast<char*>(base) + offset; }

}  // namespace

SOFTNPU_API HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  std::random_device random;
  std::memset(info, 0, sizeof *info);
  std::snprintf(info->internal, 64, "softnpu_hccl_%08x%08x", random(), random());
  return HCCL_SUCCESS;
}
SOFTNPU_API HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* out) {
  auto* c = new Communicator;
  c->size = size;
  c->rank = rank;
  c->name = info->internal;
  try {
    c->folder = softnpu::join_group(c->name, size, rank)->folder;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "softnpu: HCCL: %s\n", e.what());
    return HCCL_E_INTERNAL;
  }
  *out = c;
  return HCCL_SUCCESS;
}
SOFTNPU_API HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank,
                                                  const HcclCommConfig*, HcclComm* out) {
  return HcclCommInitRootInfo(size, info, rank, out);
}
SOFTNPU_API HcclResult HcclCommDestroy(HcclComm handle) {
  // Queued transfers may still use the communicator, so it is never freed.
  const auto group = softnpu::find_group(communicator(handle)->name, communicator(handle)->rank);
  if (group != nullptr) group->leave();
  return HCCL_SUCCESS;
}
SOFTNPU_API HcclResult HcclGetCommName(HcclComm handle, char* name) {
  std::strcpy(name, communicator(handle)->name.c_str());
  return HCCL_SUCCESS;
}
SOFTNPU_API HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
SOFTNPU_API HcclResult HcclGetRankSize(HcclComm handle, uint32_t* size) {
  *size = communicator(handle)->size;
  return HCCL_SUCCESS;
}
SOFTNPU_API HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  *rank = communicator(handle)->rank;
  return HCCL_SUCCESS;
}
SOFTNPU_API const char* HcclGetErrorString(HcclResult) { return "an error of the software HCCL"; }

SOFTNPU_API HcclResult HcclSend(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle,
                                aclrtStream stream) {
  auto* c = communicator(handle);
  const Message m = c->to(peer);
  return queue(stream, "HcclSend", {reads(data, count * size_of(type))},
               [=] { c->put(m, data, count * size_of(type)); });
}
SOFTNPU_API HcclResult HcclRecv(void* data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle,
                                aclrtStream stream) {
  auto* c = communicator(handle);
  const Message m = c->from(peer);
  return queue(stream, "HcclRecv", {writes(data, count * size_of(type))},
               [=] { c->get(m, data, count * size_of(type)); });
}
SOFTNPU_API HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream stream) {
  for (uint32_t i = 0; i < count; ++i)
    if (items[i].sendRecvType == HCCL_SEND)
      HcclSend(items[i].buf, items[i].count, items[i].dataType, items[i].remoteRank, handle, stream);
  for (uint32_t i = 0; i < count; ++i)
    if (items[i].sendRecvType != HCCL_SEND)
      HcclRecv(items[i].buf, items[i].count, items[i].dataType, items[i].remoteRank, handle, stream);
  return HCCL_SUCCESS;
}
SOFTNPU_API HcclResult HcclAllReduce(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op,
                                     HcclComm handle, aclrtStream stream) {
  auto* c = communicator(handle);
  const auto sends = c->to_all(), receives = c->from_all();
  return queue(stream, "HcclAllReduce", {reads(in, count * size_of(type)), writes(out, count * size_of(type))}, [=] {
    for (const Message& m : sends) c->put(m, in, count * size_of(type));
    gather_and_reduce(*c, receives, in, out, count, type, op);
  });
}
SOFTNPU_API HcclResult HcclReduceScatter(void* in, void* out, uint64_t count, HcclDataType type, HcclReduceOp op,
                                         HcclComm handle, aclrtStream stream) {
  auto* c = communicator(handle);
  const auto sends = c->to_all(), receives = c->from_all();
  return queue(stream, "HcclReduceScatter",
               {reads(in, c->size * count * size_of(type)), writes(out, count * size_of(type))}, [=] {
                 const size_t bytes = count * size_of(type);
                 for (const Message& m : sends) c->put(m, offset_by(in, m.peer * bytes), bytes);
                 gather_and_reduce(*c, receives, offset_by(in, c->rank * bytes), out, count, type, op);
               });
}
SOFTNPU_API HcclResult HcclAllGather(void* in, void* out, uint64_t count, HcclDataType type, HcclComm handle,
                                     aclrtStream stream) {
  auto* c = communicator(handle);
  const auto sends = c->to_all(), receives = c->from_all();
  return queue(stream, "HcclAllGather",
               {reads(in, count * size_of(type)), writes(out, c->size * count * size_of(type))}, [=] {
                 const size_t bytes = count * size_of(type);
                 for (const Message& m : sends) c->put(m, in, bytes);
                 std::memmove(offset_by(out, c->rank * bytes), in, bytes);
                 for (const Message& m : receives) c->get(m, offset_by(out, m.peer * bytes), bytes);
               });
}
SOFTNPU_API HcclResult HcclBroadcast(void* data, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                                     aclrtStream stream) {
  auto* c = communicator(handle);
  if (c->rank == root) {
    const auto sends = c->to_all();
    return queue(stream, "HcclBroadcast", {reads(data, count * size_of(type))}, [=] {
      for (const Message& m : sends) c->put(m, data, count * size_of(type));
    });
  }
  const Message m = c->from(root);
  return queue(stream, "HcclBroadcast", {writes(data, count * size_of(type))},
               [=] { c->get(m, data, count * size_of(type)); });
}
SOFTNPU_API HcclResult HcclAlltoAllV(const void* in, const void* in_counts, const void* in_offsets,
                                     HcclDataType in_type, const void* out, const void* out_counts,
                                     const void* out_offsets, HcclDataType out_type, HcclComm handle,
                                     aclrtStream stream) {
  auto* c = communicator(handle);
  const auto list = [&](const void* p) {
    return std::vector<uint64_t>(static_cast<const uint64_t*>(p), static_cast<const uint64_t*>(p) + c->size);
  };
  const auto sends = c->to_all(), receives = c->from_all();
  auto* target = const_cast<void*>(out);  // HCCL declares its output const
  const auto send_counts = list(in_counts), send_offsets = list(in_offsets);
  const auto receive_counts = list(out_counts), receive_offsets = list(out_offsets);
  const size_t from = size_of(in_type), to = size_of(out_type);
  std::vector<SoftnpuAccess> accesses;
  for (uint32_t peer = 0; peer < c->size; ++peer) {
    accesses.push_back(reads(offset_by(in, send_offsets[peer] * from), send_counts[peer] * from));
    accesses.push_back(writes(offset_by(target, receive_offsets[peer] * to), receive_counts[peer] * to));
  }
  return queue(stream, "HcclAlltoAllV", accesses, [=] {
    for (const Message& m : sends) c->put(m, offset_by(in, send_offsets[m.peer] * from), send_counts[m.peer] * from);
    std::memmove(offset_by(target, receive_offsets[c->rank] * to), offset_by(in, send_offsets[c->rank] * from),
                 send_counts[c->rank] * from);
    for (const Message& m : receives)
      c->get(m, offset_by(target, receive_offsets[m.peer] * to), receive_counts[m.peer] * to);
  });
}
SOFTNPU_API HcclResult HcclAlltoAll(const void* in, uint64_t send_count, HcclDataType in_type, const void* out,
                                    uint64_t receive_count, HcclDataType out_type, HcclComm handle,
                                    aclrtStream stream) {
  const uint32_t size = communicator(handle)->size;
  std::vector<uint64_t> sends(size, send_count), receives(size, receive_count), in_offsets(size), out_offsets(size);
  for (uint32_t i = 0; i < size; ++i) {
    in_offsets[i] = i * send_count;
    out_offsets[i] = i * receive_count;
  }
  return HcclAlltoAllV(in, sends.data(), in_offsets.data(), in_type, out, receives.data(), out_offsets.data(), out_type,
                       handle, stream);
}
SOFTNPU_API HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  auto* c = communicator(handle);
  const auto sends = c->to_all(), receives = c->from_all();
  return queue(stream, "HcclBarrier", {}, [=] {
    char token = 0;
    for (const Message& m : sends) c->put(m, &token, 1);
    for (const Message& m : receives) c->get(m, &token, 1);
  });
}
