// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// What a core reads of a launch's tables, and what it reports of bad ones.
//
// Problem: which windows a core has to make follows from cu_seqlens and starts, which change between replays of a
// graph, so no host may count them. Way: windows are numbered over the whole launch, request after request, which is
// also their row of `out`; every core counts them from the start (scalar reads through the data cache, which nothing
// writes in this launch), and takes a share that depends on the numbers alone. Bad tables are reported and nothing is
// touched outside the tensors, see kernels.h. What it does not do: sort, balance by cost, keep anything for the next
// launch.
#ifndef AFD_DSV4_COMPRESSOR_METADATA_H_
#define AFD_DSV4_COMPRESSOR_METADATA_H_

#include "faults.h"
#include "kernel_operator.h"
#include "kernels.h"
#include "tiling.h"

namespace afd_dsv4 {

// Orders everything queued on one pipe before everything queued later on another.
template <AscendC::HardEvent event>
__aicore__ inline void Order(AscendC::TPipe* pipe) {
  const int32_t id = static_cast<int32_t>(pipe->FetchEventID(event));
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

__aicore__ inline void VectorBarrier() { AscendC::PipeBarrier<PIPE_V>(); }

__aicore__ inline int32_t Smaller(int32_t a, int32_t b) { return a < b ? a : b; }
__aicore__ inline int32_t Larger(int32_t a, int32_t b) { return a > b ? a : b; }

struct CompressInputs {
  GM_ADDR rows;
  GM_ADDR pool;
  GM_ADDR ape;
  GM_ADDR cuSeqlens;
  GM_ADDR starts;
  GM_ADDR table;
  GM_ADDR workspace;
};
struct NormRopeInputs {
  GM_ADDR normWeight;
  GM_ADDR cos;
  GM_ADDR sin;
  GM_ADDR out;
};
struct TailInputs {
  GM_ADDR rows;
  GM_ADDR ape;
  GM_ADDR cuSeqlens;
  GM_ADDR starts;
  GM_ADDR table;
  GM_ADDR pool;
  GM_ADDR workspace;
};

// [first, end) of `count` things for this core.
struct Share {
  int32_t first, end;
};
__aicore__ inline Share ShareOf(int64_t count) {
  const int64_t core = AscendC::GetBlockIdx(), cores = AscendC::GetBlockNum();
  return {static_cast<int32_t>(count * core / cores), static_cast<int32_t>(count * (core + 1) / cores)};
}

// First fault of this core, with how many there were. A core without one writes nothing, so that the records of many
// launches gather until somebody looks.
class Faults {
 public:
  __aicore__ inline Faults() {}

  // first: where the records of the operator begin, kFaultRecords * n.
  __aicore__ inline void Init(AscendC::TPipe* pipe, GM_ADDR workspace, uint32_t first) {
    pipe_ = pipe;
    gm_.SetGlobalBuffer((__gm__ int32_t*)workspace + first + AscendC::GetBlockIdx() * kFaultWords, kFaultWords);
    pipe->InitBuffer(record_, kFaultWords * sizeof(int32_t));
  }

  // request, value, limit: as the text of the code wants them, host.cpp.
  __aicore__ inline void Add(FaultCode code, int32_t request, int32_t value, int32_t limit) {
    if (count_++ != 0) return;
    code_ = static_cast<int32_t>(code);
    request_ = request;
    value_ = value;
    limit_ = limit;
  }

  __aicore__ inline void Write() {
    if (count_ == 0) return;
    AscendC::LocalTensor<int32_t> record = record_.Get<int32_t>();
    const int32_t words[kFaultWords] = {count_, code_, request_, value_, limit_, 0, 0, 0};
    for (uint32_t i = 0; i < kFaultWords; ++i) record.SetValue(i, words[i]);
    Order<AscendC::HardEvent::S_MTE3>(pipe_);
    AscendC::DataCopy(gm_, record, kFaultWords);
  }

 private:
  AscendC::TPipe* pipe_ = nullptr;
  AscendC::GlobalTensor<int32_t> gm_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> record_;  // 32 B
  int32_t count_ = 0, code_ = 0, request_ = 0, value_ = 0, limit_ = 0;
};

// What compress and tail_update have in common of their constants.
struct Batch {
  int32_t requests, launch_tokens, first_token, tokens, carry, columns, page_rows, pool_pages;
};
template <typename Params>
__aicore__ inline Batch BatchOf(const Params& p) {
  return {p.requests, p.launch_tokens, p.first_token, p.tokens, p.carry, p.columns, p.page_rows, p.pool_pages};
}

// The request at hand, and the numbers of its windows.
template <int32_t ratio>
class Requests {
 public:
  __aicore__ inline Requests() {}

  __aicore__ inline void Init(const Batch& batch, GM_ADDR cuSeqlens, GM_ADDR starts, Faults* faults) {
    batch_ = batch;
    faults_ = faults;
    cuGm_.SetGlobalBuffer((__gm__ int32_t*)cuSeqlens, static_cast<uint64_t>(batch.requests) + 1);
    startsGm_.SetGlobalBuffer((__gm__ int32_t*)starts, static_cast<uint64_t>(batch.requests));
  }

  // Checks both tables and counts: windows [lowest(), highest()) end in the tile. False: nothing may be written.
  __aicore__ inline bool Scan() {
    const int32_t tileEnd = batch_.first_token + batch_.tokens;
    int32_t windows = 0;
    lowest_ = highest_ = 0;
    int32_t begin = cuGm_.GetValue(0);
    if (begin != 0) {
      faults_->Add(FaultCode::kFirstToken, 0, begin, 0);
      return false;
    }
    for (int32_t b = 0; b < batch_.requests; ++b) {
      const int32_t end = cuGm_.GetValue(b + 1);
      if (end < begin || end > batch_.launch_tokens) {
        faults_->Add(FaultCode::kTokens, b, end, end < begin ? begin : batch_.launch_tokens);
        return false;
      }
      if (end > begin) {
        const int32_t start = startsGm_.GetValue(b);
        if (start < 0 || start > kLastPosition - (end - begin)) {
          faults_->Add(FaultCode::kStart, b, start, end - begin);
          return false;
        }
        if (begin < batch_.first_token) lowest_ = windows + Ended(start, Smaller(end, batch_.first_token) - begin);
        if (begin < tileEnd) highest_ = windows + Ended(start, Smaller(end, tileEnd) - begin);
        windows += Ended(start, end - begin);
      }
      begin = end;
    }
    request_ = -1;
    begin_ = end_ = 0;
    firstWindow_ = nextWindow_ = 0;
    return true;
  }
  __aicore__ inline int32_t lowest() const { return lowest_; }
  __aicore__ inline int32_t highest() const { return highest_; }

  // Goes to the request that window `number` of the launch belongs to; lowest() <= number < highest().
  __aicore__ inline void Seek(int32_t number) {
    if (number < firstWindow_) {
      request_ = -1;
      end_ = nextWindow_ = 0;
    }
    while (nextWindow_ <= number) Next();
  }
  __aicore__ inline int32_t request() const { return request_; }
  __aicore__ inline int32_t start() const { return start_; }
  // The tile's tokens of any request: none if first == end.
  struct Span {
    int32_t first, end;  // positions
    int32_t last;        // position behind the request's last token, in this tile or not
    int32_t row;         // staging row of `first`
  };
  __aicore__ inline Span SpanOf(int32_t request) const {
    const int32_t begin = cuGm_.GetValue(request), end = cuGm_.GetValue(request + 1);
    const int32_t first = Larger(begin, batch_.first_token);
    const int32_t behind = Smaller(end, batch_.first_token + batch_.tokens);
    if (behind <= first) return {0, 0, 0, 0};
    const int32_t shift = startsGm_.GetValue(request) - begin;
    return {first + shift, behind + shift, end + shift, first - batch_.first_token + batch_.carry};
  }
  // How many windows from `number` on belong to the request at hand.
  __aicore__ inline int32_t WindowsFrom(int32_t number) const { return nextWindow_ - number; }
  // The first position of window `number` of the launch, in the request at hand.
  __aicore__ inline int32_t Position(int32_t number) const { return (start_ / ratio + number - firstWindow_) * ratio; }
  // Staging row of a position >= start() of the request at hand; negative if it is not at hand.
  __aicore__ inline int32_t StagingRow(int32_t position) const {
    return begin_ + (position - start_) - batch_.first_token + batch_.carry;
  }

 private:
  static constexpr int32_t kLastPosition = 1 << 30;

  // Windows that end in `tokens` tokens from position `start` on.
  __aicore__ static inline int32_t Ended(int32_t start, int32_t tokens) { return (start % ratio + tokens) / ratio; }

  __aicore__ inline void Next() {
    ++request_;
    begin_ = end_;
    firstWindow_ = nextWindow_;
    end_ = cuGm_.GetValue(request_ + 1);
    if (end_ > begin_) {
      start_ = startsGm_.GetValue(request_);
      nextWindow_ += Ended(start_, end_ - begin_);
    }
  }

  Batch batch_{};
  Faults* faults_ = nullptr;
  AscendC::GlobalTensor<int32_t> cuGm_, startsGm_;
  int32_t lowest_ = 0, highest_ = 0;
  int32_t request_ = -1, begin_ = 0, end_ = 0, start_ = 0;  // tokens [begin_, end_) from position start_ on
  int32_t firstWindow_ = 0, nextWindow_ = 0;                // numbers of its windows
};

// The pool row of a position, or that there is none.
class Table {
 public:
  __aicore__ inline Table() {}

  __aicore__ inline void Init(const Batch& batch, GM_ADDR table, Faults* faults) {
    batch_ = batch;
    faults_ = faults;
    gm_.SetGlobalBuffer((__gm__ int32_t*)table, static_cast<uint64_t>(batch.requests) * batch.columns);
  }

  // Page of a position; -1 and a fault where the table does not name one of the pool.
  __aicore__ inline int32_t Page(int32_t request, int32_t position) {
    const int32_t column = position / batch_.page_rows;
    if (column >= batch_.columns) {
      faults_->Add(FaultCode::kColumn, request, position, batch_.columns);
      return -1;
    }
    const int32_t page = gm_.GetValue(static_cast<uint64_t>(request) * batch_.columns + column);
    if (page < 0 || page >= batch_.pool_pages) {
      faults_->Add(FaultCode::kPage, request, position, page);
      return -1;
    }
    return page;
  }

  // Whether the table names a page for every position of [first, end).
  __aicore__ inline bool Check(int32_t request, int32_t first, int32_t end) {
    for (int32_t at = first; at < end; at += batch_.page_rows - at % batch_.page_rows) {
      if (Page(request, at) < 0) return false;
    }
    return true;
  }

 private:
  Batch batch_{};
  Faults* faults_ = nullptr;
  AscendC::GlobalTensor<int32_t> gm_;
};

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_METADATA_H_
