// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The part of the C ABI that is the same for every back end: checks, sizes, figures, texts. See kernels.h.

#include "host.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "faults.h"
#include "figures.h"
#include "tiling.h"

namespace afd_dsv4 {
namespace {

constexpr int64_t kLastPosition = int64_t{1} << 30;
constexpr int64_t kMaxStride = int64_t{1} << 28;  // of staging rows: gaps are 32-bit bytes
constexpr int64_t kMaxPageRows = 1 << 20;

thread_local std::string last_error;

struct Refusal {
  std::string text;
};

// Every launch is checked, so that no text is made of what holds.
void Expect(bool holds, const char* field, int64_t found, std::string_view expected) {
  if (!holds)
    throw Refusal{std::string(field) + ": found " + std::to_string(found) + ", expected " + std::string(expected)};
}

void ExpectRange(const char* field, int64_t found, int64_t least, int64_t most) {
  if (found >= least && found <= most) return;
  Expect(false, field, found, std::to_string(least) + ".." + std::to_string(most));
}

void ExpectDtype(const char* field, int32_t found) {
  Expect(found == AFD_DSV4_FLOAT32 || found == AFD_DSV4_BFLOAT16, field, found, "0 (float32) or 1 (bfloat16)");
}

// What compress and tail_update share.
template <typename Params>
void CheckShape(const Params& p) {
  if (p.ratio == 1 || p.ratio == 2) {
    throw Refusal{"ratio: found " + std::to_string(p.ratio) +
                  ", and these windows (DeepSeek-V4.1) are not implemented; use the stock executor"};
  }
  const bool c4 = p.ratio == static_cast<int32_t>(kC4Ratio) && p.coff == 2 && (p.head_dim == 512 || p.head_dim == 128);
  const bool c128 = p.ratio == static_cast<int32_t>(kC128Ratio) && p.coff == 1 && p.head_dim == 512;
  if (!c4 && !c128) {
    throw Refusal{"ratio, coff, head_dim: found " + std::to_string(p.ratio) + ", " + std::to_string(p.coff) + ", " +
                  std::to_string(p.head_dim) + ", expected 4, 2, 512 or 4, 2, 128 or 128, 1, 512"};
  }
  const int64_t row = 2 * int64_t{p.coff} * p.head_dim;
  ExpectRange("requests", p.requests, 1, kMaxRequests);
  ExpectRange("columns", p.columns, 1, kLastPosition);
  ExpectRange("page_rows", p.page_rows, 1, kMaxPageRows);
  ExpectRange("pool_pages", p.pool_pages, 1, INT32_MAX);
  ExpectRange("page_stride", p.page_stride, p.page_rows * row, INT64_MAX / 4 / p.pool_pages);
  ExpectRange("row_stride", p.row_stride, row, kMaxStride);
  ExpectRange("carry", p.carry, 0, (p.coff - 1) * p.ratio);
  ExpectRange("launch_tokens", p.launch_tokens, 1, kLastPosition);
  ExpectRange("first_token", p.first_token, 0, p.launch_tokens - 1);
  ExpectRange("tokens", p.tokens, 1, p.launch_tokens - p.first_token);
  ExpectDtype("row_dtype", p.row_dtype);
  Expect(p.reserved == 0, "reserved", p.reserved, "0");
}

void Check(const AfdDsv4CompressParams& p) {
  CheckShape(p);
  Expect(p.rope_head_dim == static_cast<int32_t>(kRopeColumns), "rope_head_dim", p.rope_head_dim, "64");
  const int32_t rows = std::min(p.launch_tokens, p.launch_tokens / p.ratio + p.requests);
  if (p.out_rows != rows) {
    Expect(false, "out_rows", p.out_rows,
           std::to_string(rows) + " (min(launch_tokens, launch_tokens / ratio + requests))");
  }
  ExpectDtype("out_dtype", p.out_dtype);
  ExpectDtype("norm_dtype", p.norm_dtype);
  if (!std::isfinite(p.norm_eps) || p.norm_eps < 0) throw Refusal{"norm_eps: expected a finite number, 0 or more"};
}

void Check(const AfdDsv4TailParams& p) {
  CheckShape(p);
  ExpectRange("list_ids", p.list_ids, 1, kMaxListIds);
}

const char* NameOf(const AfdDsv4CompressParams*) { return "compress"; }
const char* NameOf(const AfdDsv4TailParams*) { return "tail_update"; }

void CopyText(const std::string& text, char* target, size_t size) {
  if (target != nullptr && size > 0) std::snprintf(target, size, "%s", text.c_str());
}

template <typename Params>
int CanImplement(const Params* params, char* reason, size_t size) {
  try {
    Check(*params);
    CopyText("", reason, size);
    return AFD_DSV4_OK;
  } catch (const Refusal& refusal) {
    CopyText(refusal.text, reason, size);
    return Fail(AFD_DSV4_REFUSED, NameOf(params), refusal.text.c_str());
  }
}

template <typename Params>
int CheckLaunchOf(uint32_t blocks, const Params* params) {
  if (blocks < 1 || blocks > kMaxBlocks) {
    const std::string text = "blocks: found " + std::to_string(blocks) + ", expected 1.." + std::to_string(kMaxBlocks);
    return Fail(AFD_DSV4_REFUSED, NameOf(params), text.c_str());
  }
  return CanImplement(params, nullptr, 0);
}

void Fill(const Cost& cost, int64_t ub_bytes, double units, AfdDsv4Figures* figures) {
  *figures = {ub_bytes, cost.bytes / units, cost.instructions / units, cost.barriers / units, cost.cycles / units};
}

template <typename Tiling>
void FillC4(const AfdDsv4CompressParams& p, AfdDsv4Figures* figures) {
  const Cost cost = CostOfC4<Tiling>(p.out_dtype == AFD_DSV4_BFLOAT16);
  Fill(cost, Tiling::kBytes, double(Tiling::kBatch) * kC4Ratio, figures);
}

template <typename Tiling>
void FillTail(const AfdDsv4TailParams& p, AfdDsv4Figures* figures) {
  const int32_t half = p.coff * p.head_dim;
  const int32_t rows = std::min(static_cast<int32_t>(Tiling::kPieceFloats) / half, p.ratio);
  Fill(CostOfTail<Tiling>(rows, half), Tiling::kBytes, rows, figures);
}

std::string FaultText(const int32_t* record) {
  const std::string request = std::to_string(record[2]), value = std::to_string(record[3]);
  const std::string limit = std::to_string(record[4]);
  switch (static_cast<FaultCode>(record[1])) {
    case FaultCode::kFirstToken:
      return "cu_seqlens[0]: found " + value + ", expected 0; nothing was written";
    case FaultCode::kTokens:
      return "cu_seqlens[" + std::to_string(record[2] + 1) + "]: found " + value + ", expected " +
             (record[3] < record[4] ? "at least " : "at most ") + limit + "; nothing was written";
    case FaultCode::kStart:
      return "starts[" + request + "]: found " + value + " with " + limit + " tokens, expected positions 0.." +
             std::to_string(kLastPosition) + "; nothing was written";
    case FaultCode::kColumn:
      return "state table of request " + request + ": position " + value + " lies behind its " + limit + " columns";
    case FaultCode::kPage:
      return "state table of request " + request + ": position " + value + " is said to be in page " + limit +
             ", which the pool has not";
    case FaultCode::kRow:
      return "staging rows of request " + request + ": position " + value + " lies " + limit +
             " rows before them; a tile ends behind the end of a window, and carries a window's rows with overlap";
    default:
      return "unknown fault " + std::to_string(record[1]);
  }
}

// How many faults the records of one operator count, and the first of them in the order of requests.
int64_t CountFaults(const int32_t* records, std::string* text) {
  const int32_t* first = nullptr;
  int64_t count = 0;
  for (const int32_t* record = records; record < records + kFaultRecords; record += kFaultWords) {
    if (record[0] == 0) continue;
    count += record[0];
    if (first == nullptr || record[2] < first[2]) first = record;
  }
  if (first != nullptr) *text = FaultText(first);
  return count;
}

}  // namespace

int Fail(int status, const char* kernel, const char* text) {
  last_error = std::string(kernel) + ": " + text;
  return status;
}

int CheckLaunch(uint32_t blocks, const AfdDsv4CompressParams* params) { return CheckLaunchOf(blocks, params); }
int CheckLaunch(uint32_t blocks, const AfdDsv4TailParams* params) { return CheckLaunchOf(blocks, params); }

int CheckFaults(const char* kernel, const int32_t* records) {
  std::string text;
  return CountFaults(records, &text) == 0 ? AFD_DSV4_OK : Fail(AFD_DSV4_FAULT, kernel, text.c_str());
}

}  // namespace afd_dsv4

using namespace afd_dsv4;

extern "C" {

int afd_dsv4_can_implement_compress(const AfdDsv4CompressParams* params, char* reason, size_t size) {
  return CanImplement(params, reason, size);
}
int afd_dsv4_can_implement_tail_update(const AfdDsv4TailParams* params, char* reason, size_t size) {
  return CanImplement(params, reason, size);
}

int64_t afd_dsv4_workspace_bytes_compress(const AfdDsv4CompressParams* params) {
  if (CanImplement(params, nullptr, 0) != AFD_DSV4_OK) return -1;
  if (params->ratio == static_cast<int32_t>(kC4Ratio)) return kFaultsBytes;
  const int64_t windows = std::min(params->tokens, params->tokens / params->ratio + params->requests);
  return kFaultsBytes + windows * params->head_dim * kFloatBytes;
}
int64_t afd_dsv4_workspace_bytes_tail_update(const AfdDsv4TailParams* params) {
  return CanImplement(params, nullptr, 0) == AFD_DSV4_OK ? int64_t{kFaultsBytes} : -1;
}

int64_t afd_dsv4_faults(const void* workspace, char* text, size_t size) {
  const int32_t* records = static_cast<const int32_t*>(workspace);
  std::string compress, tail;
  const int64_t count = CountFaults(records, &compress) + CountFaults(records + kFaultRecords, &tail);
  CopyText(!compress.empty() ? "compress: " + compress : !tail.empty() ? "tail_update: " + tail : "", text, size);
  return count;
}

int afd_dsv4_figures_compress(int kernel, const AfdDsv4CompressParams* params, AfdDsv4Figures* figures) {
  if (const int status = CanImplement(params, nullptr, 0)) return status;
  const bool c4 = params->ratio == static_cast<int32_t>(kC4Ratio), bf16 = params->row_dtype == AFD_DSV4_BFLOAT16;
  if (kernel == AFD_DSV4_COMPRESS_C4 && c4) {
    if (params->head_dim == 512) {
      bf16 ? FillC4<C4Tiling<512, true>>(*params, figures) : FillC4<C4Tiling<512, false>>(*params, figures);
    } else {
      bf16 ? FillC4<C4Tiling<128, true>>(*params, figures) : FillC4<C4Tiling<128, false>>(*params, figures);
    }
  } else if (kernel == AFD_DSV4_POOL_C128 && !c4) {
    const Cost cost = bf16 ? CostOfC128<C128Tiling<true>>() : CostOfC128<C128Tiling<false>>();
    const double tokens = double(kC128Ratio) / C128Tiling<false>::kSlices;
    Fill(cost, bf16 ? C128Tiling<true>::kBytes : C128Tiling<false>::kBytes, tokens, figures);
  } else if (kernel == AFD_DSV4_NORM_ROPE && !c4) {
    Fill(CostOfFinish(params->out_dtype == AFD_DSV4_BFLOAT16), FinishTiling::kBytes,
         double(FinishTiling::kRows) * kC128Ratio, figures);
  } else {
    const std::string text = "kernel: found " + std::to_string(kernel) + ", which is not one of a launch with ratio " +
                             std::to_string(params->ratio);
    return Fail(AFD_DSV4_REFUSED, "figures", text.c_str());
  }
  return AFD_DSV4_OK;
}

int afd_dsv4_figures_tail_update(const AfdDsv4TailParams* params, AfdDsv4Figures* figures) {
  if (const int status = CanImplement(params, nullptr, 0)) return status;
  if (params->row_dtype == AFD_DSV4_BFLOAT16) {
    FillTail<TailTiling<true>>(*params, figures);
  } else {
    FillTail<TailTiling<false>>(*params, figures);
  }
  return AFD_DSV4_OK;
}

const char* afd_dsv4_last_error(void) { return last_error.c_str(); }

}  // extern "C"
