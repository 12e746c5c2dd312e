// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Launches of ../../compressor/kernels.h on the host emulation of AscendC: a launch has run when the call returns.
// A misuse that the emulation finds ends the launch with AFD_DSV4_MISUSE and its cause in last_error; what blocks wrote
// before it stays. Every argument is registered with its bounds and whether it may be written, so that no kernel
// touches anything else unseen. What it does not do: streams (the caller's thread is the stream), timing.

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "../../compressor/entries.h"
#include "../../compressor/host.h"
#include "exports.h"
#include "launch.h"

namespace afd_dsv4 {
namespace {

using softnpu::ascendc::Access;
using softnpu::ascendc::Launch;
using softnpu::ascendc::Misuse;

uint8_t* Gm(const void* pointer) { return const_cast<uint8_t*>(static_cast<const uint8_t*>(pointer)); }

size_t DtypeBytes(int32_t dtype) { return dtype == AFD_DSV4_BFLOAT16 ? 2 : 4; }

template <typename Params>
size_t RowFloats(const Params& p) {
  return 2 * static_cast<size_t>(p.coff) * static_cast<size_t>(p.head_dim);
}

// Arguments that compress and tail_update share. The last row, and the last page, end with their data.
template <typename Params>
void RegisterTables(Launch* launch, const Params& p, const void* rows, const void* ape, const void* cu_seqlens,
                    const void* starts, const void* table) {
  const size_t staged = static_cast<size_t>(p.carry) + static_cast<size_t>(p.tokens), requests = p.requests;
  launch->gm(rows, ((staged - 1) * static_cast<size_t>(p.row_stride) + RowFloats(p)) * DtypeBytes(p.row_dtype),
             Access::read, "rows");
  launch->gm(ape, static_cast<size_t>(p.ratio) * RowFloats(p) / 2 * sizeof(float), Access::read, "ape");
  launch->gm(cu_seqlens, (requests + 1) * sizeof(int32_t), Access::read, "cu_seqlens");
  launch->gm(starts, requests * sizeof(int32_t), Access::read, "starts");
  launch->gm(table, requests * static_cast<size_t>(p.columns) * sizeof(int32_t), Access::read, "table");
}

template <typename Params>
size_t PoolBytes(const Params& p) {
  return (static_cast<size_t>(p.pool_pages - 1) * static_cast<size_t>(p.page_stride) +
          static_cast<size_t>(p.page_rows) * RowFloats(p)) *
         sizeof(float);
}

template <typename Kernel>
void Run(Launch* launch, Kernel&& kernel) {
  launch->run(std::forward<Kernel>(kernel));
  softnpu::ascendc::record(launch->counters());
}

// Records of faults as a launch finds them, kept over it: it gets clean ones, and so its status is its own. Records
// that it leaves alone are put back. As on a device, nobody looks where the option faults is 0.
class Records {
 public:
  Records(const char* kernel, void* workspace, uint32_t first)
      : kernel_(kernel),
        records_(static_cast<int32_t*>(workspace) + first),
        before_(records_, records_ + kFaultRecords) {
    std::fill_n(records_, kFaultRecords, 0);
  }
  Records(const Records&) = delete;
  ~Records() {
    for (uint32_t i = 0; i < kFaultRecords; i += kFaultWords) {
      if (records_[i] == 0) std::copy_n(&before_[i], kFaultWords, records_ + i);
    }
  }
  int Status() const { return softnpu::ascendc::options().faults ? CheckFaults(kernel_, records_) : AFD_DSV4_OK; }

 private:
  const char* kernel_;
  int32_t* records_;
  std::vector<int32_t> before_;
};

// Runs body(); an exception becomes a status.
template <typename Body>
int Guarded(const char* kernel, Body&& body) {
  try {
    return body();
  } catch (const Misuse& misuse) {
    return Fail(AFD_DSV4_MISUSE, kernel, misuse.what());
  } catch (const std::exception& error) {  // a range twice, no host memory
    return Fail(AFD_DSV4_RUNTIME, kernel, error.what());
  }
}

}  // namespace
}  // namespace afd_dsv4

using namespace afd_dsv4;

extern "C" {

int afd_dsv4_launch_compress(uint32_t blocks, void*, const AfdDsv4CompressParams* params, const void* rows,
                             const void* pool, const void* ape, const void* norm_weight, const void* cos,
                             const void* sin, const void* cu_seqlens, const void* starts, const void* table, void* out,
                             void* workspace) {
  if (const int status = CheckLaunch(blocks, params)) return status;
  return Guarded("compress", [&] {
    const AfdDsv4CompressParams p = *params;
    const size_t out_rows = static_cast<size_t>(p.out_rows), dim = static_cast<size_t>(p.head_dim);
    const size_t angles = out_rows * kRopeColumns * sizeof(float), results = out_rows * dim * DtypeBytes(p.out_dtype);
    const size_t room = static_cast<size_t>(afd_dsv4_workspace_bytes_compress(&p));
    const Records records("compress", workspace, 0);
    const auto finish = [&](Launch* launch) {
      launch->gm(norm_weight, dim * DtypeBytes(p.norm_dtype), Access::read, "norm_weight");
      launch->gm(cos, angles, Access::read, "cos");
      launch->gm(sin, angles, Access::read, "sin");
      launch->gm(out, results, Access::write, "out");
    };
    Launch launch(blocks, softnpu::ascendc::options());
    RegisterTables(&launch, p, rows, ape, cu_seqlens, starts, table);
    launch.gm(pool, PoolBytes(p), Access::read, "pool");
    launch.gm(workspace, room, Access::write, "workspace");
    const bool bf16 = p.row_dtype == AFD_DSV4_BFLOAT16;
    if (p.ratio == static_cast<int32_t>(kC4Ratio)) {
      const auto kernel = p.head_dim == 512 ? (bf16 ? afd_dsv4_compress_c4_512_bf16 : afd_dsv4_compress_c4_512)
                                            : (bf16 ? afd_dsv4_compress_c4_128_bf16 : afd_dsv4_compress_c4_128);
      finish(&launch);
      Run(&launch, [&] {
        kernel(Gm(rows), Gm(pool), Gm(ape), Gm(norm_weight), Gm(cos), Gm(sin), Gm(cu_seqlens), Gm(starts), Gm(table),
               Gm(out), Gm(workspace), p);
      });
      return records.Status();
    }
    const auto kernel = bf16 ? afd_dsv4_pool_c128_bf16 : afd_dsv4_pool_c128;
    Run(&launch, [&] { kernel(Gm(rows), Gm(pool), Gm(ape), Gm(cu_seqlens), Gm(starts), Gm(table), Gm(workspace), p); });
    Launch second(blocks, softnpu::ascendc::options());
    finish(&second);
    second.gm(cu_seqlens, (static_cast<size_t>(p.requests) + 1) * sizeof(int32_t), Access::read, "cu_seqlens");
    second.gm(starts, static_cast<size_t>(p.requests) * sizeof(int32_t), Access::read, "starts");
    second.gm(workspace, room, Access::read, "workspace");
    Run(&second, [&] {
      afd_dsv4_norm_rope_512(Gm(norm_weight), Gm(cos), Gm(sin), Gm(cu_seqlens), Gm(starts), Gm(out), Gm(workspace), p);
    });
    return records.Status();
  });
}

int afd_dsv4_launch_tail_update(uint32_t blocks, void*, const AfdDsv4TailParams* params, const void* rows,
                                const void* ape, const void* cu_seqlens, const void* starts, const void* table,
                                void* pool, void* workspace) {
  if (const int status = CheckLaunch(blocks, params)) return status;
  return Guarded("tail_update", [&] {
    const AfdDsv4TailParams p = *params;
    const Records records("tail_update", workspace, kFaultRecords);
    Launch launch(blocks, softnpu::ascendc::options());
    RegisterTables(&launch, p, rows, ape, cu_seqlens, starts, table);
    launch.gm(pool, PoolBytes(p), Access::write, "pool");
    launch.gm(workspace, kFaultsBytes, Access::write, "workspace");
    const auto kernel = p.row_dtype == AFD_DSV4_BFLOAT16 ? afd_dsv4_tail_update_bf16 : afd_dsv4_tail_update;
    Run(&launch, [&] { kernel(Gm(rows), Gm(ape), Gm(cu_seqlens), Gm(starts), Gm(table), Gm(pool), Gm(workspace), p); });
    return records.Status();
  });
}

const char* afd_dsv4_backend(void) { return "emulation"; }

}  // extern "C"
