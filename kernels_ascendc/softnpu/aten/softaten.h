// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Problem: device memory is host memory here, but torch_npu's aten kernels are device operators that do not exist
// without CANN. Way: every aten operator that has a CPU kernel is registered again for "npu" as one boxed function. It
// works out the result's shape with the meta kernel, allocates the result on the device, and queues the CPU kernel, on
// CPU views of the device memory, on the current stream: asynchronous, ordered with events, recorded by a graph
// capture, and without Python's global lock. An operator whose result shape depends on data, or that has no meta
// kernel, waits for the stream first. As on the device, queued work does not keep device tensors alive: torch's caching
// allocator reuses memory in stream order. Not done: internal (NZ) formats, sparse and quantised tensors, device random
// number streams (results are seeded by the device generator but drawn by the CPU generator).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <softnpu.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace softaten {

using torch::jit::Stack;

// CPU views of device tensors. One instance serves one operator call, so that tensors that share a storage still do.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& device_tensor);

 private:
  std::unordered_map<const void*, at::Tensor> tensors_;
  std::unordered_map<const void*, c10::Storage> storages_;
};

// A tensor on the meta device with the layout and dtype of `t`.
at::Tensor meta_of(const at::Tensor& t);

// The memory that a task touches, for the race detector (accesses.cpp). Adds a device tensor's; others have none.
using Accesses = std::vector<SoftnpuAccess>;
void add_access(const at::Tensor& t, bool writes, Accesses* out);

// The current stream of a device (launch.cpp).
class CurrentStream {
 public:
  explicit CurrentStream(c10::DeviceIndex device);
  bool wants_accesses() const;
  void push(const std::string& name, Accesses accesses, std::function<void()> task) const;
  // Calls ACL in the order of what torch_npu calls it for: at once, or from its host queue. A refusal raises, here or
  // at the next synchronisation.
  void enqueue(const std::string& name, std::function<int()> launch) const;
  void ran(const std::string& name, const Accesses& accesses) const;  // the caller does the stream's work itself
  void synchronize(const std::string& why) const;  // raises with the text of a failed task, and inside a capture
  bool capturing() const;
  void* handle() const { return handle_; }
  c10::Stream stream() const { return stream_; }

 private:
  void drain() const;  // empties torch_npu's host queue
  c10::Stream stream_;
  void* handle_;
};

// Fault injection (launch.cpp): nothing that torch_npu's host queue holds, now or later, goes on until it is released.
void hang_host_queue();
void release_host_queue();

// Boxed kernels (kernels.cpp).
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);
// For the operator libraries beside this one: what the meta kernel refuses is refused, and nothing ever waits.
__attribute__((visibility("default"))) void run_by_contract(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                                            Stack* stack);
void raise_by_name(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);
uint64_t queued_calls();
uint64_t waiting_calls();
uint64_t remembered_calls();  // whose results' shapes were known from an earlier call

// aten::copy_ (copy.cpp).
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking);

}  // namespace softaten
