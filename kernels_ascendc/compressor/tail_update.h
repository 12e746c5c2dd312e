// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Saves the rows that a later forward may read: from the staging rows to the pages that a request's end reaches.
//
// Problem: the rows that outlive a launch depend on tables that change between replays of a graph. Way: a piece of work
// is one request and one of the last list_ids columns of its table row that its end reaches; where that column has a
// page, the tile's rows of it are copied, kv as it is and score + APE, both in float32, in pieces that end where the
// APE starts again. A launch reads staging rows and writes pages, so cores never meet, as long as no page is in two
// places of the table (a table that says so is a bug of the caller). What it does not do: write page 0, read the pool,
// look at columns further back, run beside a compress that reads the same pages (the stream's order keeps them apart).
#ifndef AFD_DSV4_COMPRESSOR_TAIL_UPDATE_H_
#define AFD_DSV4_COMPRESSOR_TAIL_UPDATE_H_

#include "metadata.h"
#include "vector.h"

namespace afd_dsv4 {

template <typename Row>
class KernelTailUpdate {
 public:
  __aicore__ inline KernelTailUpdate(AscendC::TPipe* pipe, const AfdDsv4TailParams& params)
      : pipe_(pipe), params_(params), half_(static_cast<uint32_t>(params.coff * params.head_dim)) {}

  __aicore__ inline void Init(const TailInputs& gm) {
    rowsGm_.SetGlobalBuffer((__gm__ Row*)gm.rows);
    apeGm_.SetGlobalBuffer((__gm__ float*)gm.ape, static_cast<uint64_t>(params_.ratio) * half_);
    poolGm_.SetGlobalBuffer((__gm__ float*)gm.pool);
    pipe_->InitBuffer(inQ_, Tiling::kBuffers, Tiling::kInBytes);
    pipe_->InitBuffer(apeQ_, Tiling::kBuffers, Tiling::kApeBytes);
    pipe_->InitBuffer(outQ_, Tiling::kBuffers, Tiling::kOutBytes);
    faults_.Init(pipe_, gm.workspace, kFaultRecords);
    const Batch batch = BatchOf(params_);
    requests_.Init(batch, gm.cuSeqlens, gm.starts, &faults_);
    table_.Init(batch, gm.table, &faults_);
  }

  __aicore__ inline void Process() {
    if (requests_.Scan()) {
      const int64_t ids = params_.list_ids;
      const Share share = ShareOf(params_.requests * ids);
      for (int32_t number = share.first; number < share.end; ++number) {
        Save(static_cast<int32_t>(number / ids), static_cast<int32_t>(number % ids));
      }
    }
    faults_.Write();
  }

 private:
  static constexpr bool kBf16 = sizeof(Row) == 2;
  using Tiling = TailTiling<kBf16>;
  static constexpr uint32_t kPiece = Tiling::kPieceFloats;  // where the scores of a piece begin

  // The tile's rows of the column that lies `back` columns before the one of the request's last token.
  __aicore__ inline void Save(int32_t request, int32_t back) {
    const Requests<1>::Span span = requests_.SpanOf(request);
    if (span.first >= span.end) return;
    const int32_t column = (span.last - 1) / params_.page_rows - back;
    if (column < 0) return;
    const int32_t first = Larger(span.first, column * params_.page_rows);
    const int32_t end = Smaller(span.end, column * params_.page_rows + params_.page_rows);
    if (first >= end) return;
    const int32_t page = table_.Page(request, first);
    if (page <= 0) return;
    const int32_t most = static_cast<int32_t>(kPiece / half_);
    for (int32_t at = first; at < end;) {
      const int32_t count = Smaller(Smaller(end - at, most), params_.ratio - at % params_.ratio);
      CopyIn(static_cast<uint64_t>(span.row + (at - span.first)), at % params_.ratio, count);
      Compute(count);
      CopyOut(static_cast<uint64_t>(page) * static_cast<uint64_t>(params_.page_stride) +
                  static_cast<uint64_t>(at % params_.page_rows) * 2 * half_,
              count);
      at += count;
    }
  }

  __aicore__ inline void CopyIn(uint64_t row, int32_t phase, int32_t count) {
    AscendC::LocalTensor<Row> in = inQ_.template AllocTensor<Row>();
    const uint64_t stride = static_cast<uint64_t>(params_.row_stride);
    const AscendC::DataCopyExtParams copy(count, half_ * sizeof(Row), (stride - half_) * sizeof(Row), 0, 0);
    const AscendC::DataCopyPadExtParams<Row> none;
    AscendC::DataCopyPad(in, rowsGm_[row * stride], copy, none);
    AscendC::DataCopyPad(in[kPiece], rowsGm_[row * stride + half_], copy, none);
    inQ_.EnQue(in);
    Floats ape = apeQ_.template AllocTensor<float>();
    AscendC::DataCopy(ape, apeGm_[static_cast<uint64_t>(phase) * half_], static_cast<uint32_t>(count) * half_);
    apeQ_.EnQue(ape);
  }

  __aicore__ inline void Compute(int32_t rows) {
    AscendC::LocalTensor<Row> in = inQ_.template DeQue<Row>();
    Floats ape = apeQ_.template DeQue<float>();
    Floats out = outQ_.template AllocTensor<float>();
    const uint32_t count = static_cast<uint32_t>(rows) * half_;
    if constexpr (kBf16) {
      AscendC::Cast(out, in, AscendC::RoundMode::CAST_NONE, count);
      AscendC::Cast(out[kPiece], in[kPiece], AscendC::RoundMode::CAST_NONE, count);
      VectorBarrier();
      Count<Operation::kAdd>(out[kPiece], out[kPiece], ape, count);
    } else {
      AscendC::DataCopy(out, in, count);
      Count<Operation::kAdd>(out[kPiece], in[kPiece], ape, count);
    }
    outQ_.EnQue(out);
    apeQ_.FreeTensor(ape);
    inQ_.FreeTensor(in);
  }

  __aicore__ inline void CopyOut(uint64_t offset, int32_t count) {
    Floats out = outQ_.template DeQue<float>();
    const AscendC::DataCopyExtParams copy(count, half_ * kFloatBytes, 0, half_ * kFloatBytes, 0);
    AscendC::DataCopyPad(poolGm_[offset], out, copy);
    AscendC::DataCopyPad(poolGm_[offset + half_], out[kPiece], copy);
    outQ_.FreeTensor(out);
  }

  AscendC::TPipe* pipe_;
  AfdDsv4TailParams params_;
  uint32_t half_;  // floats of the kv part of a row
  Faults faults_;
  Requests<1> requests_;
  Table table_;
  AscendC::GlobalTensor<Row> rowsGm_;
  AscendC::GlobalTensor<float> apeGm_, poolGm_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> inQ_;    // 2 x 32,768 B (bf16: 16,384): kv | score of a piece
  AscendC::TQue<AscendC::TPosition::VECIN, 1> apeQ_;   // 2 x 16,384 B: APE of its rows
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outQ_;  // 2 x 32,768 B: kv | score + APE
};

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_TAIL_UPDATE_H_
