// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// RMSNorm and interleaved RoPE of pooled rows, cast to the output type: a building block of compress_c4.h, and the
// second kernel of a C128 launch.
//
// Problem: some thirty small dependent instructions per row would cost more than pooling it. Way: several rows at
// once, one instruction on all of them, strides over the rows. Order of operations as in
// afd_dsv4/compressor/reference.py: slices of 64 columns added by halves, 64 lanes in one WholeReduceSum, divided by
// the root (Rsqrt and Reciprocal of the device are approximations), two products and one sum per turned column. What it
// does not do: any row of a window that another core pools; RoPE on columns other than the last 64.
#ifndef AFD_DSV4_COMPRESSOR_NORM_ROPE_H_
#define AFD_DSV4_COMPRESSOR_NORM_ROPE_H_

#include "metadata.h"
#include "vector.h"

namespace afd_dsv4 {

template <typename Tiling>
class NormRope {
 public:
  __aicore__ inline NormRope() {}

  // scratch: Tiling::kScratchFloats floats that nobody else uses while Init or Compute run.
  __aicore__ inline void Init(AscendC::TPipe* pipe, const AfdDsv4CompressParams& params, const NormRopeInputs& gm,
                              const Floats& scratch) {
    pipe_ = pipe;
    epsilon_ = params.norm_eps;
    bf16Out_ = params.out_dtype == AFD_DSV4_BFLOAT16;
    scratch_ = scratch;
    const uint64_t rows = static_cast<uint64_t>(params.out_rows);
    cosGm_.SetGlobalBuffer((__gm__ float*)gm.cos, rows * kRopeColumns);
    sinGm_.SetGlobalBuffer((__gm__ float*)gm.sin, rows * kRopeColumns);
    outGm_.SetGlobalBuffer((__gm__ float*)gm.out, rows * kColumns);
    outBf16Gm_.SetGlobalBuffer((__gm__ bfloat16_t*)gm.out, rows * kColumns);
    pipe->InitBuffer(weightBuf_, Tiling::kWeightBytes);
    pipe->InitBuffer(swapBuf_, Tiling::kSwapBytes);
    pipe->InitBuffer(signBuf_, Tiling::kSignBytes);
    pipe->InitBuffer(rootBuf_, Tiling::kRootBytes);
    pipe->InitBuffer(angleQ_, 1, Tiling::kAngleBytes);
    if (bf16Out_) {
      pipe->InitBuffer(outQ_, 2, Tiling::kOutBytes / 2);
    } else {
      pipe->InitBuffer(outQ_, 1, Tiling::kOutBytes);
    }
    LoadConstants(params, gm.normWeight);
  }

  // cos and sin of `count` rows of out from `row` on; before the Compute of these rows, and behind the one before.
  __aicore__ inline void CopyIn(uint32_t row, uint32_t count) {
    Floats angles = angleQ_.template AllocTensor<float>();
    AscendC::DataCopy(angles, cosGm_[static_cast<uint64_t>(row) * kRopeColumns], count * kRopeColumns);
    AscendC::DataCopy(angles[Tiling::kRows * kRopeColumns], sinGm_[static_cast<uint64_t>(row) * kRopeColumns],
                      count * kRopeColumns);
    angleQ_.EnQue(angles);
  }

  // `rows` [count, columns], adjoining, are overwritten. Everything queued on the vector pipe before is done with them;
  // they are read until the caller's next barrier, or the flag of their queue.
  __aicore__ inline void Compute(const Floats& rows, uint32_t count) {
    Normalize(rows, count);
    Turn(rows, count);
    if (bf16Out_) {
      AscendC::LocalTensor<bfloat16_t> out = outQ_.template AllocTensor<bfloat16_t>();
      AscendC::Cast(out, rows, AscendC::RoundMode::CAST_RINT, count * kColumns);
      outQ_.EnQue(out);
    } else {
      Floats out = outQ_.template AllocTensor<float>();
      AscendC::DataCopy(out, rows, count * kColumns);
      outQ_.EnQue(out);
    }
  }

  __aicore__ inline void CopyOut(uint32_t row, uint32_t count) {
    if (bf16Out_) {
      AscendC::LocalTensor<bfloat16_t> out = outQ_.template DeQue<bfloat16_t>();
      AscendC::DataCopy(outBf16Gm_[static_cast<uint64_t>(row) * kColumns], out, count * kColumns);
      outQ_.FreeTensor(out);
    } else {
      Floats out = outQ_.template DeQue<float>();
      AscendC::DataCopy(outGm_[static_cast<uint64_t>(row) * kColumns], out, count * kColumns);
      outQ_.FreeTensor(out);
    }
  }

 private:
  static constexpr uint32_t kColumns = Tiling::kColumns;
  static constexpr uint32_t kRowBlocks = kColumns / kFloatBlock;
  static constexpr uint32_t kTurned = kColumns - kRopeColumns;  // the first turned column

  __aicore__ inline void LoadConstants(const AfdDsv4CompressParams& params, GM_ADDR normWeight) {
    weight_ = weightBuf_.template Get<float>();
    swap_ = swapBuf_.template Get<uint32_t>();
    sign_ = signBuf_.template Get<float>();
    root_ = rootBuf_.template Get<float>();
    roots_ = root_[Tiling::kRootLanes];

    for (uint32_t i = 0; i < kRopeColumns; ++i) {
      swap_.SetValue(i, static_cast<uint32_t>((kTurned + (i ^ 1u)) * kFloatBytes));
      sign_.SetValue(i, i % 2 == 0 ? -1.0f : 1.0f);
    }
    Order<AscendC::HardEvent::S_V>(pipe_);
    AscendC::LocalTensor<int32_t> swap = swap_.template ReinterpretCast<int32_t>();
    for (uint32_t r = 1; r < Tiling::kRows; ++r) {
      AscendC::Adds(swap[r * kRopeColumns], swap, static_cast<int32_t>(r * kColumns * kFloatBytes),
                    static_cast<int32_t>(kRopeColumns));
    }
    AscendC::Duplicate(root_, 1.0f, static_cast<int32_t>(Tiling::kRootLanes));  // lanes without a row stay finite

    if (params.norm_dtype == AFD_DSV4_BFLOAT16) {
      AscendC::GlobalTensor<bfloat16_t> gm;
      gm.SetGlobalBuffer((__gm__ bfloat16_t*)normWeight, kColumns);
      AscendC::LocalTensor<bfloat16_t> raw = scratch_.template ReinterpretCast<bfloat16_t>();
      AscendC::DataCopy(raw, gm, kColumns);
      Order<AscendC::HardEvent::MTE2_V>(pipe_);
      AscendC::Cast(weight_, raw, AscendC::RoundMode::CAST_NONE, kColumns);
    } else {
      AscendC::GlobalTensor<float> gm;
      gm.SetGlobalBuffer((__gm__ float*)normWeight, kColumns);
      AscendC::DataCopy(weight_, gm, kColumns);
      Order<AscendC::HardEvent::MTE2_V>(pipe_);
    }
    VectorBarrier();
  }

  __aicore__ inline void Normalize(const Floats& rows, uint32_t count) {
    AscendC::Mul(scratch_, rows, rows, static_cast<int32_t>(count * kColumns));
    VectorBarrier();
    FoldSlices<kColumns / 2>(count);
    AscendC::WholeReduceSum<float>(root_, scratch_, static_cast<int32_t>(kLanes), static_cast<int32_t>(count), 1, 1,
                                   static_cast<int32_t>(kRowBlocks));
    VectorBarrier();
    const int32_t lanes = static_cast<int32_t>(Tiling::kRootLanes);
    AscendC::Muls(root_, root_, 1.0f / kColumns, lanes);
    VectorBarrier();
    AscendC::Adds(root_, root_, epsilon_, lanes);
    VectorBarrier();
    AscendC::Sqrt(root_, root_, lanes);
    VectorBarrier();
    AscendC::Brcb(roots_, root_, static_cast<uint8_t>(Tiling::kRootLanes / kFloatBlock),
                  AscendC::BrcbRepeatParams(1, kFloatBlock));
    VectorBarrier();
    // Block r of roots_ holds the root of row r: stride 0 inside a row, one block from row to row.
    if constexpr (Tiling::kRows < kColumns / kLanes) {
      const AscendC::BinaryRepeatParams one(1, 1, 0, kFloatBlock, kFloatBlock, 0);
      for (uint32_t r = 0; r < count; ++r) {
        Repeat<Operation::kDiv>(rows[r * kColumns], rows[r * kColumns], roots_[r * kFloatBlock], kColumns / kLanes,
                                one);
      }
      VectorBarrier();
      for (uint32_t r = 0; r < count; ++r) {
        Count<Operation::kMul>(rows[r * kColumns], rows[r * kColumns], weight_, kColumns);
      }
    } else {
      const AscendC::BinaryRepeatParams all(1, 1, 0, kRowBlocks, kRowBlocks, 1);
      for (uint32_t i = 0; i < kColumns; i += kLanes) Repeat<Operation::kDiv>(rows[i], rows[i], roots_, count, all);
      VectorBarrier();
      EachRow<Operation::kMul, kColumns>(rows, weight_, count);
    }
    VectorBarrier();
  }

  // Squares: slices of 64 columns of each row, i and i + n/2, down to one slice.
  template <uint32_t width>
  __aicore__ inline void FoldSlices(uint32_t count) {
    Fold<Operation::kAdd, width, kColumns, kColumns, kColumns / kLanes + 1>(scratch_, scratch_, count);
    VectorBarrier();
    if constexpr (width > kLanes) FoldSlices<width / 2>(count);
  }

  __aicore__ inline void Turn(const Floats& rows, uint32_t count) {
    Floats angles = angleQ_.template DeQue<float>();
    const Floats cos = angles, sin = angles[Tiling::kRows * kRopeColumns], tail = rows[kTurned], turned = scratch_;
    const AscendC::BinaryRepeatParams tails(1, 1, 1, kRowBlocks, kRowBlocks, kFloatBlock);
    AscendC::Gather(turned, rows, swap_, 0, count * kRopeColumns);
    EachRow<Operation::kMul, kRopeColumns>(sin, sign_, count);
    VectorBarrier();
    Count<Operation::kMul>(turned, turned, sin, count * kRopeColumns);
    Repeat<Operation::kMul>(tail, tail, cos, count, tails);
    VectorBarrier();
    angleQ_.FreeTensor(angles);
    Repeat<Operation::kAdd>(tail, tail, turned, count, tails);
    VectorBarrier();
  }

  AscendC::TPipe* pipe_ = nullptr;
  float epsilon_ = 0.0f;
  bool bf16Out_ = true;
  AscendC::GlobalTensor<float> cosGm_, sinGm_, outGm_;
  AscendC::GlobalTensor<bfloat16_t> outBf16Gm_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> weightBuf_;  // columns * 4 B
  AscendC::TBuf<AscendC::TPosition::VECCALC> swapBuf_;    // rows * 256 B
  AscendC::TBuf<AscendC::TPosition::VECCALC> signBuf_;    // 256 B
  AscendC::TBuf<AscendC::TPosition::VECCALC> rootBuf_;    // rows (a multiple of 8) * 36 B
  AscendC::TQue<AscendC::TPosition::VECIN, 1> angleQ_;    // 1 x rows * 512 B
  AscendC::TQue<AscendC::TPosition::VECOUT, 1>
      outQ_;  // bf16: 2 x rows * columns * 2 B; float32: 1 x rows * columns * 4 B
  Floats weight_, sign_, root_, roots_, scratch_;
  AscendC::LocalTensor<uint32_t> swap_;
};

// The second kernel of a C128 launch: pooled rows of the workspace to rows of out.
class KernelNormRope {
 public:
  __aicore__ inline KernelNormRope(AscendC::TPipe* pipe, const AfdDsv4CompressParams& params)
      : pipe_(pipe), params_(params) {}

  __aicore__ inline void Init(const NormRopeInputs& gm, GM_ADDR cuSeqlens, GM_ADDR starts, GM_ADDR workspace) {
    pooledGm_.SetGlobalBuffer((__gm__ float*)(workspace + kFaultsBytes));
    pipe_->InitBuffer(inQ_, FinishTiling::kInBuffers, FinishTiling::kInBytes);
    pipe_->InitBuffer(scratchBuf_, FinishTiling::kScratchBytes);
    faults_.Init(pipe_, workspace, 0);
    requests_.Init(BatchOf(params_), cuSeqlens, starts, &faults_);
    norm_.Init(pipe_, params_, gm, scratchBuf_.Get<float>());
  }

  // Faults are the first kernel's to report: its record stays.
  __aicore__ inline void Process() {
    if (!requests_.Scan()) return;
    const Share share = ShareOf(requests_.highest() - requests_.lowest());
    if (share.first < share.end) CopyIn(share, share.first);
    for (int32_t row = share.first; row < share.end; row += kRows) {
      const uint32_t out = static_cast<uint32_t>(requests_.lowest() + row), count = CountFrom(share, row);
      norm_.CopyIn(out, count);
      if (row + kRows < share.end) CopyIn(share, row + kRows);
      Floats rows = inQ_.DeQue<float>();
      norm_.Compute(rows, count);
      inQ_.FreeTensor(rows);
      norm_.CopyOut(out, count);
    }
  }

 private:
  static constexpr int32_t kRows = FinishTiling::kRows;

  __aicore__ static inline uint32_t CountFrom(const Share& share, int32_t row) {
    return static_cast<uint32_t>(Smaller(kRows, share.end - row));
  }
  __aicore__ inline void CopyIn(const Share& share, int32_t row) {
    Floats rows = inQ_.AllocTensor<float>();
    AscendC::DataCopy(rows, pooledGm_[static_cast<uint64_t>(row) * FinishTiling::kHeadDim],
                      CountFrom(share, row) * FinishTiling::kHeadDim);
    inQ_.EnQue(rows);
  }

  AscendC::TPipe* pipe_;
  AfdDsv4CompressParams params_;
  Faults faults_;
  Requests<kC128Ratio> requests_;
  NormRope<FinishTiling::Norm> norm_;
  AscendC::GlobalTensor<float> pooledGm_;
  AscendC::TQue<AscendC::TPosition::VECIN, 2> inQ_;        // 2 x 16,384 B: pooled rows
  AscendC::TBuf<AscendC::TPosition::VECCALC> scratchBuf_;  // 16,384 B: squares, turned columns
};

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_NORM_ROPE_H_
