// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// How much of the Unified Buffer each kernel takes, buffer by buffer, and what it moves and computes per token.
//
// Problem: 188,160 bytes hold all that a core works on, and a piece should be large, because every copy and every
// vector instruction has a price beside its data. Way: constants alone, which the kernels use for InitBuffer,
// static_assert checks, and the host prints (afd_dsv4_figures_*). What it does not do: choose at run time; there is one
// tiling per shape. It knows nothing of AscendC, so that any C++17 compiler can read it.
#ifndef AFD_DSV4_COMPRESSOR_TILING_H_
#define AFD_DSV4_COMPRESSOR_TILING_H_

#include <stdint.h>

namespace afd_dsv4 {

constexpr uint32_t kUnifiedBufferBytes = 188160;  // of 192 KiB; 8 KiB + 256 B are the system's
constexpr uint32_t kBlockBytes = 32;              // UB addresses and strides
constexpr uint32_t kFloatBytes = 4;
constexpr uint32_t kFloatBlock = kBlockBytes / kFloatBytes;
constexpr uint32_t kLanes = 64;  // floats of one repeat of a vector instruction
constexpr uint32_t kRopeColumns = 64;

constexpr uint32_t kMaxBlocks = 128;
constexpr uint32_t kMaxRequests = 4096;
constexpr uint32_t kMaxListIds = 64;  // pages of 8 rows hold a tail of C128 with drafts in 19
constexpr uint32_t kFaultWords = 8;   // int32 of the record that a block leaves in the workspace: one UB block
constexpr uint32_t kFaultRecords = kMaxBlocks * kFaultWords;  // int32 of the records of one operator
constexpr uint32_t kFaultsBytes = 2 * kFaultRecords * 4;      // of compress, then of tail_update

constexpr uint32_t kC4Ratio = 4;
constexpr uint32_t kC128Ratio = 128;

// RMSNorm and RoPE of up to `rows` rows of `columns` floats: constants, RoPE rows, the result.
template <uint32_t columns, uint32_t rows>
struct NormRopeTiling {
  static constexpr uint32_t kColumns = columns;
  static constexpr uint32_t kRows = rows;
  static constexpr uint32_t kRootLanes = (rows + kFloatBlock - 1) / kFloatBlock * kFloatBlock;
  static constexpr uint32_t kWeightBytes = columns * kFloatBytes;            // norm weight
  static constexpr uint32_t kSwapBytes = rows * kRopeColumns * kFloatBytes;  // byte offsets of each column's partner
  static constexpr uint32_t kSignBytes = kRopeColumns * kFloatBytes;         // -1, +1, ...
  static constexpr uint32_t kRootBytes = kRootLanes * (kFloatBytes + kBlockBytes);  // root of each row; 8 times each
  static constexpr uint32_t kAngleBytes = 2 * rows * kRopeColumns * kFloatBytes;    // cos | sin
  static constexpr uint32_t kOutBytes = rows * columns * kFloatBytes;  // result: one float32 buffer or two of bf16
  static constexpr uint32_t kScratchFloats = rows * columns;           // of the caller: squares, turned columns
  static constexpr uint32_t kBytes = kWeightBytes + kSwapBytes + kSignBytes + kRootBytes + kAngleBytes + kOutBytes;
  static_assert(rows * (kFloatBlock * kFloatBytes) <= kRootLanes * kBlockBytes, "a block per root");
};

// C4: a piece is 1,024 columns of windows, 8 pool rows each: 2 windows of 512 columns or 8 of 128. A copy then moves 16
// KiB of float32, and every vector instruction on the piece covers at least 8 repeats. Two pieces are normed together.
template <uint32_t head_dim, bool bf16>
struct C4Tiling {
  static constexpr uint32_t kHeadDim = head_dim;
  static constexpr uint32_t kPoolRows = 2 * kC4Ratio;
  static constexpr uint32_t kWindows = 1024 / head_dim;
  static constexpr uint32_t kBatch = 2 * kWindows;
  static constexpr uint32_t kWindowFloats = kPoolRows * head_dim;
  static constexpr uint32_t kPieceFloats = kWindows * kWindowFloats;  // kv or score
  static constexpr uint32_t kRowBytes = bf16 ? 2 : 4;
  static constexpr uint32_t kInBuffers = 2;
  static constexpr uint32_t kInBytes = 2 * kPieceFloats * kRowBytes;                 // kv | score of a piece, as staged
  static constexpr uint32_t kWorkBytes = bf16 ? 2 * kPieceFloats * kFloatBytes : 0;  // the same in float32
  static constexpr uint32_t kApeBytes = kWindowFloats * kFloatBytes;                 // APE in the order of pool rows
  static constexpr uint32_t kTreeBytes = kPieceFloats / 2 * kFloatBytes;             // halves of maxima, then of sums
  static constexpr uint32_t kPooledBytes = kBatch * head_dim * kFloatBytes;          // rows that wait for the norm
  static constexpr uint32_t kFaultBytes = kFaultWords * 4;
  using Norm = NormRopeTiling<head_dim, kBatch>;
  static constexpr uint32_t kBytes =
      kInBuffers * kInBytes + kWorkBytes + kApeBytes + kTreeBytes + kPooledBytes + kFaultBytes + Norm::kBytes;
  static_assert(kBytes <= kUnifiedBufferBytes, "C4 does not fit");
  static_assert(Norm::kScratchFloats * kFloatBytes <= kTreeBytes, "the norm's scratch is the tree");
};

// C128: a task is 64 columns of one window, all 128 rows of them at once, because the order of operations wants the
// maximum before the first exponential. The APE of the 64 columns stays while a core works on them.
template <bool bf16>
struct C128Tiling {
  static constexpr uint32_t kHeadDim = 512;
  static constexpr uint32_t kColumns = kLanes;
  static constexpr uint32_t kSlices = kHeadDim / kColumns;
  static constexpr uint32_t kTaskFloats = kC128Ratio * kColumns;  // kv or score
  static constexpr uint32_t kRowBytes = bf16 ? 2 : 4;
  static constexpr uint32_t kInBuffers = 2;
  static constexpr uint32_t kInBytes = 2 * kTaskFloats * kRowBytes;                 // kv | score of a task, as staged
  static constexpr uint32_t kWorkBytes = bf16 ? 2 * kTaskFloats * kFloatBytes : 0;  // the same in float32
  static constexpr uint32_t kApeBytes = kTaskFloats * kFloatBytes;                  // APE of the slice
  static constexpr uint32_t kTreeBytes = kTaskFloats / 2 * kFloatBytes;             // halves of maxima, then of sums
  static constexpr uint32_t kOutBuffers = 2;
  static constexpr uint32_t kOutBytes = kColumns * kFloatBytes;  // the pooled columns
  static constexpr uint32_t kFaultBytes = kFaultWords * 4;
  static constexpr uint32_t kBytes =
      kInBuffers * kInBytes + kWorkBytes + kApeBytes + kTreeBytes + kOutBuffers * kOutBytes + kFaultBytes;
  static_assert(kBytes <= kUnifiedBufferBytes, "C128 does not fit");
};

// Second kernel of a C128 launch: rows of the workspace, normed and turned.
struct FinishTiling {
  static constexpr uint32_t kHeadDim = 512;
  static constexpr uint32_t kRows = 8;
  static constexpr uint32_t kInBuffers = 2;
  static constexpr uint32_t kInBytes = kRows * kHeadDim * kFloatBytes;       // pooled rows
  static constexpr uint32_t kScratchBytes = kRows * kHeadDim * kFloatBytes;  // squares, turned columns
  static constexpr uint32_t kFaultBytes = kFaultWords * 4;
  using Norm = NormRopeTiling<kHeadDim, kRows>;
  static constexpr uint32_t kBytes = kInBuffers * kInBytes + kScratchBytes + kFaultBytes + Norm::kBytes;
  static_assert(kBytes <= kUnifiedBufferBytes, "norm_rope does not fit");
};

// tail_update: pieces of up to 4,096 score columns, i.e. 4 rows of C4, 8 of C128, 16 of the C4 indexer; a piece ends
// where the APE starts again.
template <bool bf16>
struct TailTiling {
  static constexpr uint32_t kPieceFloats = 4096;  // kv or score
  static constexpr uint32_t kRowBytes = bf16 ? 2 : 4;
  static constexpr uint32_t kBuffers = 2;
  static constexpr uint32_t kInBytes = 2 * kPieceFloats * kRowBytes;     // kv | score, as staged
  static constexpr uint32_t kApeBytes = kPieceFloats * kFloatBytes;      // APE of the same rows
  static constexpr uint32_t kOutBytes = 2 * kPieceFloats * kFloatBytes;  // kv | score + APE
  static constexpr uint32_t kFaultBytes = kFaultWords * 4;
  static constexpr uint32_t kBytes = kBuffers * (kInBytes + kApeBytes + kOutBytes) + kFaultBytes;
  static_assert(kBytes <= kUnifiedBufferBytes, "tail_update does not fit");
};

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_TILING_H_
