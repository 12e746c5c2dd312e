// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// What the torch binding (torch_binding.cpp) leaves to the machine it is built for, so that its own source is one: on
// an NPU launches go to the stream (back_end_npu.cpp), on the software NPU to the thread that is the stream
// (../softnpu/compressor/back_end.cpp).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace afd_dsv4 {

// The pages of tails that a launch may read or write; which ones, the tables on the device say when it runs.
struct Pages {
  const void* pool;                 // null: it touches none
  int64_t page_bytes, page_stride;  // bytes
  const int32_t *cu_seqlens, *starts, *table;
  int32_t requests, columns, page_rows, pool_pages, ratio, coff, list_ids;
  int64_t first_token, tokens;
  bool writes;
};

// One launch. What `run` holds are raw pointers and PODs by value: queued work keeps no tensor alive, the order of the
// stream does. The rest is for a machine that checks who touches what, and is looked at before `queue` returns.
struct Launch {
  const char* name;
  std::function<int(void* stream)> run;
  std::vector<std::pair<at::Tensor, bool>> tensors;  // true: written
  Pages pages;
};

// Queues a launch on the current stream of the device, behind all that torch_npu has queued there (torch_binding.cpp);
// the device need not be the current one.
void queue(const at::Device& device, const Launch& launch);

// How a launch goes to a stream, for `queue`: what does it once torch_npu's own queue has come to it.
std::function<int()> submission(void* stream, const Launch& launch);

// rows[:, :N] = x wkv^T, rows[:, N:] = x wgate^T in the rows' type, on the current stream. Arguments are checked.
void project(const at::Tensor& x, const at::Tensor& wkv, const at::Tensor& wgate, at::Tensor& rows);

// Cores that run blocks of a launch.
int64_t vector_cores(c10::DeviceIndex device);

}  // namespace afd_dsv4
