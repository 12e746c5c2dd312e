// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// C4 with overlap: pool, norm and turn windows of 4 tokens, each with the left halves of the 4 rows before.
//
// Problem: 8 KB of float32 rows per token have to pass through every core once, at the speed of the memory, in the
// order of operations of the stock operator. Way: a piece of 1,024 columns of windows (tiling.h). Copies put the rows
// where the stock operator has them, left half of the row before and right half of the own row in turn, so that halves
// of a window are adjoining floats and every fold is one instruction per window. The next piece is copied while one is
// computed: the queue holds two. Results wait in pooled rows until two pieces are together, then norm_rope.h finishes
// them. Rows before a request's start come from the pool (float32, APE in them), rows before position 0 are kv 0 and
// score -inf, a window whose rows cannot be had is NaN. bf16 rows are cast piece by piece; their history is copied
// straight into the float32 piece, without overlap, as at most two windows of a request have any. What it does not do:
// save tails (tail_update.h); share anything between cores.
#ifndef AFD_DSV4_COMPRESSOR_COMPRESS_C4_H_
#define AFD_DSV4_COMPRESSOR_COMPRESS_C4_H_

#include "metadata.h"
#include "norm_rope.h"
#include "vector.h"

namespace afd_dsv4 {

template <uint32_t head_dim, typename Row>
class KernelCompressC4 {
 public:
  __aicore__ inline KernelCompressC4(AscendC::TPipe* pipe, const AfdDsv4CompressParams& params)
      : pipe_(pipe), params_(params) {}

  __aicore__ inline void Init(const CompressInputs& gm, const NormRopeInputs& finish) {
    rowsGm_.SetGlobalBuffer((__gm__ Row*)gm.rows);
    poolGm_.SetGlobalBuffer((__gm__ float*)gm.pool);
    apeGm_.SetGlobalBuffer((__gm__ float*)gm.ape, kC4Ratio * kHalf);
    pipe_->InitBuffer(inQ_, Tiling::kInBuffers, Tiling::kInBytes);
    if constexpr (kBf16) pipe_->InitBuffer(workBuf_, Tiling::kWorkBytes);
    pipe_->InitBuffer(apeBuf_, Tiling::kApeBytes);
    pipe_->InitBuffer(treeBuf_, Tiling::kTreeBytes);
    pipe_->InitBuffer(pooledBuf_, Tiling::kPooledBytes);
    tree_ = treeBuf_.template Get<float>();
    pooled_ = pooledBuf_.template Get<float>();
    faults_.Init(pipe_, gm.workspace, 0);
    const Batch batch = BatchOf(params_);
    requests_.Init(batch, gm.cuSeqlens, gm.starts, &faults_);
    table_.Init(batch, gm.table, &faults_);
    norm_.Init(pipe_, params_, finish, tree_);
    ape_ = apeBuf_.template Get<float>();
    CopyPoolRows(ape_, apeGm_, 0, kHalf, 0, kC4Ratio, kLeft);
    CopyPoolRows(ape_, apeGm_, 0, kHalf, 0, kC4Ratio, kRight);
    Order<AscendC::HardEvent::MTE2_V>(pipe_);
  }

  __aicore__ inline void Process() {
    if (requests_.Scan()) {
      const Share share = ShareOf(requests_.highest() - requests_.lowest());
      const int32_t first = requests_.lowest() + share.first, end = requests_.lowest() + share.end;
      uint32_t turn = 0;
      if (first < end) CopyIn(pieces_[turn], first, end);
      uint32_t pooled = 0;  // rows that wait for the norm
      for (int32_t row = first; row < end; row += kWindows, turn ^= 1) {
        const Piece& piece = pieces_[turn];
        const bool last = row + kWindows >= end;
        pooled += piece.windows;
        const bool finish = last || pooled + kWindows > Tiling::kBatch;
        const uint32_t batch = static_cast<uint32_t>(row) + piece.windows - pooled;
        if (finish) norm_.CopyIn(batch, pooled);  // before the next piece: the vector unit must not wait for that one
        if (!last) CopyIn(pieces_[turn ^ 1], row + kWindows, end);
        Compute(piece, pooled_[(pooled - piece.windows) * head_dim]);
        if (finish) {
          norm_.Compute(pooled_, pooled);
          norm_.CopyOut(batch, pooled);
          pooled = 0;
        }
      }
    }
    faults_.Write();
  }

 private:
  static constexpr bool kBf16 = sizeof(Row) == 2;
  using Tiling = C4Tiling<head_dim, kBf16>;
  static constexpr uint32_t kHalf = 2 * head_dim;  // floats of the kv part of a row
  static constexpr int32_t kWindows = static_cast<int32_t>(Tiling::kWindows);
  static constexpr int32_t kRatio = static_cast<int32_t>(kC4Ratio);
  static constexpr uint32_t kWindow = Tiling::kWindowFloats;
  static constexpr uint32_t kScore = Tiling::kPieceFloats;  // where the scores of a piece begin
  static constexpr uint32_t kLeft = 0, kRight = 1;          // half of a row, and its pool row modulo 2

  // Where the rows of a window come from. History rows are the first of a half.
  struct Window {
    int32_t request, position;  // of the window's first row
    int32_t left, right;        // history rows of either half
    bool missing, fault;        // no window before it; rows that cannot be had
    __aicore__ inline bool Plain() const { return left == 0 && right == 0 && !missing && !fault; }
  };
  struct Piece {  // what the UB holds at once
    __aicore__ inline Piece() {}
    uint32_t windows;
    bool plain;  // all windows are
    Window window[Tiling::kWindows];
  };

  // Pool rows of one half, from `first` row of it on: kv or score of `count` rows, `row` on, of a row-major GM tensor.
  template <typename T>
  __aicore__ inline void CopyPoolRows(const AscendC::LocalTensor<T>& window, const AscendC::GlobalTensor<T>& gm,
                                      uint64_t offset, uint64_t stride, uint32_t first, uint32_t count, uint32_t half) {
    const AscendC::DataCopyExtParams copy(count, head_dim * sizeof(T), (stride - head_dim) * sizeof(T),
                                          head_dim * sizeof(T) / kBlockBytes, 0);
    AscendC::DataCopyPad(window[(2 * first + half) * head_dim], gm[offset + half * head_dim], copy,
                         AscendC::DataCopyPadExtParams<T>());
  }

  // ------------------------------------------------------------------------------------------------ copy in

  __aicore__ inline void CopyIn(Piece& piece, int32_t row, int32_t end) {
    AscendC::LocalTensor<Row> in = inQ_.template AllocTensor<Row>();
    piece.windows = static_cast<uint32_t>(Smaller(kWindows, end - row));
    piece.plain = true;
    for (uint32_t w = 0; w < piece.windows;) {
      Window& window = piece.window[w];
      Look(window, row + static_cast<int32_t>(w));
      if (window.Plain()) {
        // The windows behind a plain one of the same request are plain too.
        const uint32_t run = static_cast<uint32_t>(
            Smaller(requests_.WindowsFrom(row + static_cast<int32_t>(w)), static_cast<int32_t>(piece.windows - w)));
        for (uint32_t i = 1; i < run; ++i) piece.window[w + i] = window;
        CopyStaged(in[w * kWindow], window, kRatio * run);
        w += run;
      } else {
        piece.plain = false;
        if (!window.fault) {
          CopyStaged(in[w * kWindow], window, kRatio);
          if constexpr (!kBf16) CopyHistory(in[w * kWindow], window);
        }
        ++w;
      }
    }
    inQ_.EnQue(in);
  }

  // Finds the rows of window `number` of the launch, and whether all are to be had.
  __aicore__ inline void Look(Window& window, int32_t number) {
    requests_.Seek(number);
    const int32_t start = requests_.start(), at = requests_.Position(number);
    window.request = requests_.request();
    window.position = at;
    window.missing = at == 0;
    window.left = window.missing ? 0 : Smaller(kRatio, Larger(0, start - (at - kRatio)));
    window.right = Larger(0, start - at);
    window.fault = false;
    if (window.left + window.right > 0) {
      window.fault = !table_.Check(window.request, Larger(0, at - kRatio), start);
    }
    const int32_t oldest = Larger(start, Larger(0, at - kRatio)), staged = requests_.StagingRow(oldest);
    if (staged < 0 && !window.fault) {
      faults_.Add(FaultCode::kRow, window.request, oldest, -staged);
      window.fault = true;
    }
  }

  // Rows of the staging buffer: `rows` rows of the right half, and of the left one as many less those without.
  __aicore__ inline void CopyStaged(const AscendC::LocalTensor<Row>& in, const Window& window, uint32_t rows) {
    const uint64_t stride = static_cast<uint64_t>(params_.row_stride);
    if (!window.missing) {
      const uint32_t first = static_cast<uint32_t>(window.left);
      CopyStagedHalf(in, window.position - kRatio + window.left, first, rows - first, stride, kLeft);
    }
    const uint32_t first = static_cast<uint32_t>(window.right);
    CopyStagedHalf(in, window.position + window.right, first, rows - first, stride, kRight);
  }
  __aicore__ inline void CopyStagedHalf(const AscendC::LocalTensor<Row>& in, int32_t position, uint32_t first,
                                        uint32_t count, uint64_t stride, uint32_t half) {
    if (count == 0) return;
    const uint64_t row = static_cast<uint64_t>(requests_.StagingRow(position)) * stride;
    CopyPoolRows(in, rowsGm_, row, stride, first, count, half);
    CopyPoolRows(in[kScore], rowsGm_, row + kHalf, stride, first, count, half);
  }

  // History rows of the pool, page by page. The table was checked.
  __aicore__ inline void CopyHistory(const Floats& window, const Window& from) {
    CopyHistoryHalf(window, from, from.position - kRatio, from.left, kLeft);
    CopyHistoryHalf(window, from, from.position, from.right, kRight);
  }
  __aicore__ inline void CopyHistoryHalf(const Floats& window, const Window& from, int32_t position, int32_t count,
                                         uint32_t half) {
    const uint64_t stride = 2 * kHalf;
    for (int32_t i = 0; i < count;) {
      const int32_t in_page = (position + i) % params_.page_rows;
      const int32_t run = Smaller(count - i, params_.page_rows - in_page);
      const uint64_t row =
          static_cast<uint64_t>(table_.Page(from.request, position + i)) * static_cast<uint64_t>(params_.page_stride) +
          static_cast<uint64_t>(in_page) * stride;
      CopyPoolRows(window, poolGm_, row, stride, static_cast<uint32_t>(i), static_cast<uint32_t>(run), half);
      CopyPoolRows(window[kScore], poolGm_, row + kHalf, stride, static_cast<uint32_t>(i), static_cast<uint32_t>(run),
                   half);
      i += run;
    }
  }

  // ------------------------------------------------------------------------------------------------ compute

  __aicore__ inline void Compute(const Piece& piece, const Floats& pooled) {
    AscendC::LocalTensor<Row> in = inQ_.template DeQue<Row>();
    if constexpr (kBf16) {
      const Floats work = workBuf_.template Get<float>();
      CastRows(piece, in, work);
      inQ_.FreeTensor(in);
      Pool(piece, work, pooled);
    } else {
      Pool(piece, in, pooled);
      inQ_.FreeTensor(in);
    }
  }

  __aicore__ inline void CastRows(const Piece& piece, const AscendC::LocalTensor<Row>& in, const Floats& work) {
    if (piece.plain) {
      const uint32_t count = piece.windows * kWindow;
      AscendC::Cast(work, in, AscendC::RoundMode::CAST_NONE, count);
      AscendC::Cast(work[kScore], in[kScore], AscendC::RoundMode::CAST_NONE, count);
      VectorBarrier();
      return;
    }
    for (uint32_t w = 0; w < piece.windows; ++w) {
      const Window& window = piece.window[w];
      if (window.fault) continue;
      for (int32_t r = 0; r < kRatio; ++r) {
        const uint32_t at = w * kWindow + static_cast<uint32_t>(2 * r) * head_dim;
        if (!window.missing && r >= window.left) CastRow(in, work, at);
        if (r >= window.right) CastRow(in, work, at + head_dim);
      }
    }
    Order<AscendC::HardEvent::V_MTE2>(pipe_);  // what the piece before made of the same memory is done
    for (uint32_t w = 0; w < piece.windows; ++w) {
      if (!piece.window[w].fault) CopyHistory(work[w * kWindow], piece.window[w]);
    }
    Order<AscendC::HardEvent::MTE2_V>(pipe_);  // and so are the casts, which the copies waited for
  }
  __aicore__ inline void CastRow(const AscendC::LocalTensor<Row>& in, const Floats& work, uint32_t at) {
    AscendC::Cast(work[at], in[at], AscendC::RoundMode::CAST_NONE, head_dim);
    AscendC::Cast(work[kScore + at], in[kScore + at], AscendC::RoundMode::CAST_NONE, head_dim);
  }

  // Adds APE to what was staged, and fills what is missing.
  __aicore__ inline void Complete(const Piece& piece, const Floats& kv, const Floats& score) {
    for (uint32_t w = 0; w < piece.windows; ++w) {
      const Window& window = piece.window[w];
      const Floats s = score[w * kWindow], k = kv[w * kWindow];
      if (window.Plain()) {
        Count<Operation::kAdd>(s, s, ape_, kWindow);
      } else if (window.fault) {
        AscendC::Duplicate(s, __builtin_nanf(""), static_cast<int32_t>(kWindow));
        AscendC::Duplicate(k, __builtin_nanf(""), static_cast<int32_t>(kWindow));
      } else {
        for (int32_t r = 0; r < kRatio; ++r) {
          const uint32_t left = static_cast<uint32_t>(2 * r) * head_dim, right = left + head_dim;
          if (window.missing) {
            AscendC::Duplicate(s[left], -__builtin_inff(), static_cast<int32_t>(head_dim));
            AscendC::Duplicate(k[left], 0.0f, static_cast<int32_t>(head_dim));
          } else if (r >= window.left) {
            Count<Operation::kAdd>(s[left], s[left], ape_[left], head_dim);
          }
          if (r >= window.right) Count<Operation::kAdd>(s[right], s[right], ape_[right], head_dim);
        }
      }
    }
    VectorBarrier();
  }

  // Eight rows of every window to one, by halves: result of the first fold, then in place.
  template <Operation operation, uint32_t stride>
  __aicore__ inline void Halve(const Floats& tree, const Floats& rows, uint32_t windows) {
    Fold<operation, 4 * head_dim, stride, kWindow, Tiling::kWindows>(tree, rows, windows);
    VectorBarrier();
    Fold<operation, 2 * head_dim, stride, stride, Tiling::kWindows>(tree, tree, windows);
    VectorBarrier();
  }

  __aicore__ inline void Pool(const Piece& piece, const Floats& kv, const Floats& pooled) {
    constexpr uint32_t kTreeWindow = kWindow / 2;
    const Floats score = kv[kScore];
    const uint32_t windows = piece.windows;
    const int32_t count = static_cast<int32_t>(windows * kWindow);
    Complete(piece, kv, score);

    Halve<Operation::kMax, kTreeWindow>(tree_, score, windows);
    Fold<Operation::kMax, head_dim, kTreeWindow, kTreeWindow, Tiling::kWindows>(tree_, tree_, windows);
    VectorBarrier();
    for (uint32_t w = 0; w < windows; ++w) {
      EachRow<Operation::kSub, head_dim>(score[w * kWindow], tree_[w * kTreeWindow], Tiling::kPoolRows);
    }
    VectorBarrier();
    AscendC::Exp(score, score, count);
    VectorBarrier();

    Halve<Operation::kAdd, kTreeWindow>(tree_, score, windows);
    Fold<Operation::kAdd, head_dim, kTreeWindow, kTreeWindow, Tiling::kWindows>(tree_, tree_, windows);
    VectorBarrier();
    for (uint32_t w = 0; w < windows; ++w) {
      EachRow<Operation::kDiv, head_dim>(score[w * kWindow], tree_[w * kTreeWindow], Tiling::kPoolRows);
    }
    VectorBarrier();

    AscendC::Mul(kv, kv, score, count);
    VectorBarrier();
    Halve<Operation::kAdd, kWindow>(kv, kv, windows);
    Fold<Operation::kAdd, head_dim, head_dim, kWindow, Tiling::kWindows>(pooled, kv, windows);
    VectorBarrier();
  }

  AscendC::TPipe* pipe_;
  AfdDsv4CompressParams params_;
  Faults faults_;
  Requests<kRatio> requests_;
  Table table_;
  NormRope<typename Tiling::Norm> norm_;
  Piece pieces_[2];
  AscendC::GlobalTensor<Row> rowsGm_;
  AscendC::GlobalTensor<float> poolGm_, apeGm_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> inQ_;     // 2 x 65,536 B (bf16: 32,768): kv | score of a piece
  AscendC::TBuf<AscendC::TPosition::VECCALC> workBuf_;  // bf16 only, 65,536 B: the piece in float32
  AscendC::TBuf<AscendC::TPosition::VECCALC> apeBuf_;   // 16,384 B (D = 128: 4,096): APE in the order of pool rows
  AscendC::TBuf<AscendC::TPosition::VECCALC> treeBuf_;  // 16,384 B: halves of maxima, then of sums; the norm's scratch
  AscendC::TBuf<AscendC::TPosition::VECCALC> pooledBuf_;  // 8,192 B: rows that wait for the norm
  Floats ape_, tree_, pooled_;
};

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_COMPRESS_C4_H_
