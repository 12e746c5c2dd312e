// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// C128, the first of two kernels: pool windows of 128 tokens into float32 rows of the workspace.
//
// Problem: there are few windows (64 in 8,192 tokens) for some 48 cores, and the stock operator's order of operations
// takes the maximum over all 128 rows before the first exponential. Way: a task is one window and 64 columns, all rows
// at once; columns do not see each other before the norm, which is a second kernel (norm_rope.h) instead of a barrier
// between cores. Tasks are numbered slice after slice, so that the APE of a slice stays while a core works on it.
// Copies take 256 bytes per row: the other half of a line belongs to the next slice, to a core windows * cores / tasks
// further on (an eighth of them), so it takes the second-level cache to read a line from memory once. Rows before a
// request's start come from the pool (float32, APE in them). A window whose rows cannot be had is NaN. bf16 rows are
// cast task by task, their history is copied into the float32 rows without overlap. What it does not do: keep running
// maxima and sums instead of rows (other bits); write out.
#ifndef AFD_DSV4_COMPRESSOR_COMPRESS_C128_H_
#define AFD_DSV4_COMPRESSOR_COMPRESS_C128_H_

#include "metadata.h"
#include "vector.h"

namespace afd_dsv4 {

template <typename Row>
class KernelPoolC128 {
 public:
  __aicore__ inline KernelPoolC128(AscendC::TPipe* pipe, const AfdDsv4CompressParams& params)
      : pipe_(pipe), params_(params) {}

  __aicore__ inline void Init(const CompressInputs& gm) {
    rowsGm_.SetGlobalBuffer((__gm__ Row*)gm.rows);
    poolGm_.SetGlobalBuffer((__gm__ float*)gm.pool);
    apeGm_.SetGlobalBuffer((__gm__ float*)gm.ape, kC128Ratio * kHalf);
    pooledGm_.SetGlobalBuffer((__gm__ float*)(gm.workspace + kFaultsBytes));
    pipe_->InitBuffer(inQ_, Tiling::kInBuffers, Tiling::kInBytes);
    if constexpr (kBf16) pipe_->InitBuffer(workBuf_, Tiling::kWorkBytes);
    pipe_->InitBuffer(apeBuf_, Tiling::kApeBytes);
    pipe_->InitBuffer(treeBuf_, Tiling::kTreeBytes);
    pipe_->InitBuffer(outQ_, Tiling::kOutBuffers, Tiling::kOutBytes);
    ape_ = apeBuf_.template Get<float>();
    tree_ = treeBuf_.template Get<float>();
    faults_.Init(pipe_, gm.workspace, 0);
    const Batch batch = BatchOf(params_);
    requests_.Init(batch, gm.cuSeqlens, gm.starts, &faults_);
    table_.Init(batch, gm.table, &faults_);
  }

  __aicore__ inline void Process() {
    if (requests_.Scan()) {
      windows_ = requests_.highest() - requests_.lowest();
      const Share share = ShareOf(static_cast<int64_t>(windows_) * Tiling::kSlices);
      uint32_t turn = 0;
      int32_t slice = -1;  // whose APE is at hand
      if (share.first < share.end) CopyIn(tasks_[turn], share.first);
      for (int32_t number = share.first; number < share.end; ++number, turn ^= 1) {
        const Task& task = tasks_[turn];
        if (task.slice != slice) CopyApe(slice = task.slice);
        if (number + 1 < share.end) CopyIn(tasks_[turn ^ 1], number + 1);
        Compute(task);
        CopyOut(task);
      }
    }
    faults_.Write();
  }

 private:
  static constexpr bool kBf16 = sizeof(Row) == 2;
  using Tiling = C128Tiling<kBf16>;
  static constexpr uint32_t kHalf = Tiling::kHeadDim;  // floats of the kv part of a row
  static constexpr int32_t kRatio = static_cast<int32_t>(kC128Ratio);
  static constexpr uint32_t kColumns = Tiling::kColumns;
  static constexpr uint32_t kScore = Tiling::kTaskFloats;  // where the scores of a task begin

  struct Task {
    int32_t slice, window;      // window: from the tile's first
    int32_t request, position;  // of the window's first row
    int32_t history;            // rows of the pool, before those of the staging buffer
    bool fault;
  };

  // The slice's columns of `count` rows of a row-major GM tensor.
  template <typename T>
  __aicore__ inline void CopyRows(const AscendC::LocalTensor<T>& rows, const AscendC::GlobalTensor<T>& gm,
                                  uint64_t stride, int32_t count) {
    const AscendC::DataCopyExtParams copy(count, kColumns * sizeof(T), (stride - kColumns) * sizeof(T), 0, 0);
    AscendC::DataCopyPad(rows, gm, copy, AscendC::DataCopyPadExtParams<T>());
  }

  __aicore__ inline void CopyApe(int32_t slice) {
    Order<AscendC::HardEvent::V_MTE2>(pipe_);  // the slice before is done with it
    CopyRows(ape_, apeGm_[static_cast<uint64_t>(slice) * kColumns], kHalf, kRatio);
    Order<AscendC::HardEvent::MTE2_V>(pipe_);
  }

  __aicore__ inline void CopyIn(Task& task, int32_t number) {
    AscendC::LocalTensor<Row> in = inQ_.template AllocTensor<Row>();
    Look(task, number);
    if (!task.fault) {
      if constexpr (!kBf16) CopyHistory(in, task);
      const uint64_t stride = static_cast<uint64_t>(params_.row_stride);
      const uint64_t from = static_cast<uint64_t>(requests_.StagingRow(task.position + task.history)) * stride +
                            static_cast<uint64_t>(task.slice) * kColumns;
      const uint32_t at = static_cast<uint32_t>(task.history) * kColumns;
      CopyRows(in[at], rowsGm_[from], stride, kRatio - task.history);
      CopyRows(in[kScore + at], rowsGm_[from + kHalf], stride, kRatio - task.history);
    }
    inQ_.EnQue(in);
  }

  // Finds the rows of a task's window, and whether all are to be had.
  __aicore__ inline void Look(Task& task, int32_t number) {
    task.slice = number / windows_;
    task.window = number % windows_;
    const int32_t window = requests_.lowest() + task.window;
    requests_.Seek(window);
    task.request = requests_.request();
    task.position = requests_.Position(window);
    task.history = Larger(0, requests_.start() - task.position);
    task.fault = task.history > 0 && !table_.Check(task.request, task.position, requests_.start());
    const int32_t staged = requests_.StagingRow(task.position + task.history);
    if (staged < 0 && !task.fault) {
      faults_.Add(FaultCode::kRow, task.request, task.position + task.history, -staged);
      task.fault = true;
    }
  }

  // History rows of the pool, page by page. The table was checked.
  __aicore__ inline void CopyHistory(const Floats& rows, const Task& task) {
    const uint64_t stride = 2 * kHalf;
    for (int32_t i = 0; i < task.history;) {
      const int32_t in_page = (task.position + i) % params_.page_rows;
      const int32_t run = Smaller(task.history - i, params_.page_rows - in_page);
      const uint64_t from = static_cast<uint64_t>(table_.Page(task.request, task.position + i)) *
                                static_cast<uint64_t>(params_.page_stride) +
                            static_cast<uint64_t>(in_page) * stride + static_cast<uint64_t>(task.slice) * kColumns;
      const uint32_t at = static_cast<uint32_t>(i) * kColumns;
      CopyRows(rows[at], poolGm_[from], stride, run);
      CopyRows(rows[kScore + at], poolGm_[from + kHalf], stride, run);
      i += run;
    }
  }

  __aicore__ inline void Compute(const Task& task) {
    AscendC::LocalTensor<Row> in = inQ_.template DeQue<Row>();
    if constexpr (kBf16) {
      const Floats work = workBuf_.template Get<float>();
      if (!task.fault) CastRows(task, in, work);
      inQ_.FreeTensor(in);
      Pool(task, work);
    } else {
      Pool(task, in);
      inQ_.FreeTensor(in);
    }
  }

  __aicore__ inline void CastRows(const Task& task, const AscendC::LocalTensor<Row>& in, const Floats& work) {
    const uint32_t at = static_cast<uint32_t>(task.history) * kColumns;
    AscendC::Cast(work[at], in[at], AscendC::RoundMode::CAST_NONE, kScore - at);
    AscendC::Cast(work[kScore + at], in[kScore + at], AscendC::RoundMode::CAST_NONE, kScore - at);
    if (task.history > 0) {
      Order<AscendC::HardEvent::V_MTE2>(pipe_);  // what the task before made of the same memory is done
      CopyHistory(work, task);
      Order<AscendC::HardEvent::MTE2_V>(pipe_);
    }
    VectorBarrier();
  }

  __aicore__ inline void Pool(const Task& task, const Floats& kv) {
    const Floats score = kv[kScore];
    const int32_t count = static_cast<int32_t>(kScore);
    if (task.fault) {
      AscendC::Duplicate(kv, __builtin_nanf(""), 2 * count);
    } else {
      const uint32_t at = static_cast<uint32_t>(task.history) * kColumns;
      Count<Operation::kAdd>(score[at], score[at], ape_[at], kScore - at);
    }
    VectorBarrier();

    Count<Operation::kMax>(tree_, score, score[kScore / 2], kScore / 2);
    VectorBarrier();
    Tree<Operation::kMax, kColumns>(tree_, kRatio / 2);
    EachRow<Operation::kSub, kColumns>(score, tree_, kRatio);
    VectorBarrier();
    AscendC::Exp(score, score, count);
    VectorBarrier();

    Count<Operation::kAdd>(tree_, score, score[kScore / 2], kScore / 2);
    VectorBarrier();
    Tree<Operation::kAdd, kColumns>(tree_, kRatio / 2);
    EachRow<Operation::kDiv, kColumns>(score, tree_, kRatio);
    VectorBarrier();

    AscendC::Mul(kv, kv, score, count);
    VectorBarrier();
    Tree<Operation::kAdd, kColumns>(kv, kRatio);
    Floats out = outQ_.template AllocTensor<float>();
    AscendC::DataCopy(out, kv, kColumns);
    outQ_.EnQue(out);
    VectorBarrier();  // the next task is cast into the same rows
  }

  __aicore__ inline void CopyOut(const Task& task) {
    Floats out = outQ_.template DeQue<float>();
    AscendC::DataCopy(
        pooledGm_[static_cast<uint64_t>(task.window) * kHalf + static_cast<uint64_t>(task.slice) * kColumns], out,
        kColumns);
    outQ_.FreeTensor(out);
  }

  AscendC::TPipe* pipe_;
  AfdDsv4CompressParams params_;
  int32_t windows_ = 0;  // of the tile
  Faults faults_;
  Requests<kRatio> requests_;
  Table table_;
  Task tasks_[2];
  AscendC::GlobalTensor<Row> rowsGm_;
  AscendC::GlobalTensor<float> poolGm_, apeGm_, pooledGm_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> inQ_;     // 2 x 65,536 B (bf16: 32,768): kv | score of a task
  AscendC::TBuf<AscendC::TPosition::VECCALC> workBuf_;  // bf16 only, 65,536 B: the task in float32
  AscendC::TBuf<AscendC::TPosition::VECCALC> apeBuf_;   // 32,768 B: APE of the slice
  AscendC::TBuf<AscendC::TPosition::VECCALC> treeBuf_;  // 16,384 B: halves of maxima, then of sums
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outQ_;   // 2 x 256 B: the pooled columns
  Floats ape_, tree_;
};

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_COMPRESS_C128_H_
