// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The torch binding of our own kernels on the software NPU, see ../../compressor/back_end.h: a launch is a task of the
// stream's thread, captured by graphs and seen by the race detector, and a misuse that the emulation finds is an error
// of the device. The projection adds in the order of the stock operator's (../ops/projection.h), so that the two
// executors can be compared bit for bit; the device's matrix product is another.

#include "../../compressor/back_end.h"

#include <softnpu.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "../../compressor/kernels.h"
#include "projection.h"
#include "settings.h"

namespace afd_dsv4 {
namespace {

constexpr int64_t kCores = 8;       // results do not depend on it
constexpr int64_t kTileRows = 384;  // of a task of the projection

// The bytes of a matrix or vector, as runs of one length and distance.
SoftnpuAccess access_of(const at::Tensor& t, bool written) {
  const auto size = static_cast<uint64_t>(t.element_size());
  const bool rows = t.dim() == 2 && !t.is_contiguous();
  const auto bytes = (rows ? t.size(1) : t.numel()) * size, stride = rows ? t.stride(0) * size : 0;
  return {t.data_ptr(), bytes, rows ? static_cast<uint64_t>(t.size(0)) : 1, stride, written, 0};
}

// Every page that the launch may touch, as the tables say now. What a table must not say, the kernels refuse.
void find_pages(const Pages& p) {
  for (int32_t b = 0; b < p.requests; ++b) {
    const int64_t begin = std::max<int64_t>(p.cu_seqlens[b], p.first_token);
    const int64_t end = std::min<int64_t>(p.cu_seqlens[b + 1], p.first_token + p.tokens);
    if (end <= begin || p.starts[b] < 0) continue;
    const int64_t start = p.starts[b], first = start + begin - p.cu_seqlens[b], last = start + end - p.cu_seqlens[b];
    // Read: what the windows that end here have before the request's start. Written: what is here, in the last columns.
    int64_t low = std::max<int64_t>((first / p.ratio - (p.coff - 1)) * p.ratio, 0), high = start;
    if (p.writes) {
      const int64_t columns = (start + p.cu_seqlens[b + 1] - p.cu_seqlens[b] + p.page_rows - 1) / p.page_rows;
      low = std::max<int64_t>(first, (columns - p.list_ids) * p.page_rows), high = last;
    } else if (last / p.ratio == first / p.ratio) {
      continue;  // no window ends here
    }
    for (int64_t column = low / p.page_rows; column * p.page_rows < high && column < p.columns; ++column) {
      const int32_t page = p.table[b * static_cast<int64_t>(p.columns) + column];
      if (page <= 0 || page >= p.pool_pages) continue;
      const auto* address = static_cast<const char*>(p.pool) + page * p.page_stride;
      const SoftnpuAccess access{address, static_cast<uint64_t>(p.page_bytes), 1, 0, p.writes, 0};
      softnpu_found_access(&access, 1);
    }
  }
}

struct Task {
  std::function<int(void*)> run;
  Pages pages;
};

}  // namespace

std::function<int()> submission(void* stream, const Launch& launch) {
  std::vector<SoftnpuAccess> accesses;
  for (const auto& [tensor, written] : launch.tensors) {
    if (tensor.numel() > 0) accesses.push_back(access_of(tensor, written));
  }
  return [stream, name = launch.name, accesses = std::move(accesses), task = Task{launch.run, launch.pages}] {
    softnpu_push_task(
        stream, name,
        [](void* pointer) {
          const Task& task = *static_cast<Task*>(pointer);
          if (task.pages.pool != nullptr && softnpu_races_on() != 0) find_pages(task.pages);
          if (task.run(nullptr) != 0) throw std::runtime_error(afd_dsv4_last_error());
        },
        new Task(task), [](void* pointer) { delete static_cast<Task*>(pointer); }, accesses.data(), accesses.size(),
        task.pages.pool != nullptr);
    return 0;
  };
}

void project(const at::Tensor& x, const at::Tensor& wkv, const at::Tensor& wgate, at::Tensor& rows) {
  const auto matrix = [](const at::Tensor& t) {
    SoftnpuTensor found{};
    found.data = t.data_ptr();
    found.dtype = t.scalar_type() == at::kBFloat16 ? SOFTNPU_BFLOAT16
                  : t.scalar_type() == at::kHalf   ? SOFTNPU_FLOAT16
                                                   : SOFTNPU_FLOAT32;
    found.present = 1;
    found.dims = 2;
    for (int i = 0; i < 2; ++i) found.shape[i] = t.size(i), found.stride[i] = t.stride(i);
    return found;
  };
  TORCH_CHECK(rows.scalar_type() == at::kFloat, "afd_dsv4::project: rows: found ", rows.scalar_type(),
              ", expected Float on the software NPU, whose products are float32");
  int64_t threads = 1;
  softnpu_get_option("compressor.threads", &threads);
  const SoftnpuTensor a = matrix(x), b = matrix(wkv), c = matrix(wgate), out = matrix(rows);
  const auto run = [=](void*) {
    const softnpu::PackedWeights weights({&b, &c}, threads);
    softnpu::parallel_for((a.shape[0] + kTileRows - 1) / kTileRows, threads, [&](int64_t tile) {
      const int64_t first = tile * kTileRows, count = std::min(kTileRows, a.shape[0] - first);
      softnpu::Projector projector(weights);
      projector.run(a, first, count);
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(projector.row(i), weights.columns(), static_cast<float*>(out.data) + (first + i) * out.stride[0]);
      }
    });
    return 0;
  };
  queue(x.device(), {"afd_dsv4::project", run, {{x, false}, {wkv, false}, {wgate, false}, {rows, true}}, Pages{}});
}

int64_t vector_cores(c10::DeviceIndex) { return kCores; }

}  // namespace afd_dsv4
