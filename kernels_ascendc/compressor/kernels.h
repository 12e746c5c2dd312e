// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The C ABI of our compressor kernels: the AscendC library, the CPU twin and the host emulation have these symbols.
//
// Problem: torch, ctypes and three builds of the kernels need one meaning of a launch. Way: plain C, constants in a
// struct of fixed-width numbers, everything that may change between replays of a graph in device memory. What it does
// not do: allocate, synchronise, copy to the host, project x to rows (the caller's GEMM does, into the staging rows).
//
// A launch takes the packed tokens [first_token, first_token + tokens) of launch_tokens: all of them (phase 1), or one
// tile (phase 2, a host loop over tiles; the results have the same bits). The row of packed token t is staging row
// t - first_token + carry: [kv | score], each [left | right] with overlap, without APE; `carry` rows of the tile before
// lie in front. A tile may end inside a request only behind the end of a window, and carry is then the ratio with
// overlap, else 0. Rows of positions before a request's start come from the pool: row p lies in page
// table[request][p / page_rows] at p % page_rows, as [kv | score + APE]. Page 0 is never written; history is mapped.
//
// Positions are below 2^30. Tokens behind cu_seqlens[requests] and requests without tokens are never addressed, nor is
// the start of the latter. A history read of page 0 is not guarded: as of the stock operator, its rows are what they
// are.
//
// Bad tables: a kernel checks what it reads from device memory and never touches anything outside the tensors. If
// cu_seqlens or starts are bad, nothing of the launch is written, as all rows behind would lie elsewhere. If a page id
// or column is bad, or a row is not at hand, a window's output row is NaN (its neighbours are right), and a tail's page
// is not written. The first fault of each block goes to the workspace (afd_dsv4_faults): a block that has found one
// writes its record over the one before, a block that has not leaves it, so what launches found stays until somebody
// clears it.
#ifndef AFD_DSV4_COMPRESSOR_KERNELS_H_
#define AFD_DSV4_COMPRESSOR_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#if defined(__GNUC__)
#define AFD_DSV4_API __attribute__((visibility("default")))
#else
#define AFD_DSV4_API
#endif

// Element types: row_dtype, out_dtype, norm_dtype.
enum AfdDsv4Dtype { AFD_DSV4_FLOAT32 = 0, AFD_DSV4_BFLOAT16 = 1 };

// What a launch or a check returns. Everything but AFD_DSV4_OK leaves its reason in afd_dsv4_last_error().
enum AfdDsv4Status {
  AFD_DSV4_OK = 0,
  AFD_DSV4_REFUSED = 1,  // arguments no kernel takes; nothing was launched
  AFD_DSV4_FAULT = 2,    // bad tables, see above; only the emulation, which has run them, returns it
  AFD_DSV4_MISUSE = 3,   // the emulation found a misuse of the device's interface in a kernel: a bug of ours
  AFD_DSV4_RUNTIME = 4,  // the launch itself failed
};

enum AfdDsv4Kernel {
  AFD_DSV4_COMPRESS_C4 = 0,  // pool, norm and RoPE
  AFD_DSV4_POOL_C128 = 1,    // pool only, into the workspace
  AFD_DSV4_NORM_ROPE = 2,    // second kernel of a C128 launch
  AFD_DSV4_TAIL_UPDATE = 3,
};

// Constants of a `compress` launch. Sizes count elements unless they say bytes.
typedef struct AfdDsv4CompressParams {
  int64_t page_stride;    // floats from one page of the pool to the next, >= page_rows * 2 * coff * head_dim
  int64_t row_stride;     // elements from one staging row to the next, >= 2 * coff * head_dim
  int32_t ratio;          // tokens of a window: 4 or 128 (1 and 2 are refused)
  int32_t coff;           // 2 with overlap (ratio 4), else 1
  int32_t head_dim;       // 512, or 128 with ratio 4
  int32_t rope_head_dim;  // 64
  int32_t requests;       // rows of the tables, padded ones included: 1..4096
  int32_t columns;        // of the state table
  int32_t page_rows;      // rows of a page
  int32_t pool_pages;     // pages of the pool, the null page included
  int32_t carry;          // staging rows in front of the tile's
  int32_t first_token;    // of the tile, in packed tokens
  int32_t tokens;         // of the tile, padded ones included
  int32_t launch_tokens;  // of all tiles, padded ones included
  int32_t out_rows;       // rows of out, cos, sin: min(launch_tokens, launch_tokens / ratio + requests)
  int32_t row_dtype;      // of the staging rows
  int32_t out_dtype;
  int32_t norm_dtype;  // of norm_weight
  float norm_eps;
  int32_t reserved;  // 0
} AfdDsv4CompressParams;

// Constants of a `tail_update` launch; fields as above.
typedef struct AfdDsv4TailParams {
  int64_t page_stride;
  int64_t row_stride;
  int32_t ratio;
  int32_t coff;
  int32_t head_dim;
  int32_t requests;
  int32_t columns;
  int32_t page_rows;
  int32_t pool_pages;
  int32_t carry;
  int32_t first_token;
  int32_t tokens;
  int32_t launch_tokens;
  int32_t row_dtype;
  int32_t list_ids;  // columns that are looked at, back from the one that holds a request's last token: 1..64
  int32_t reserved;  // 0
} AfdDsv4TailParams;

// What one kernel takes by its tiling, and how long by a model (not a measurement): tiling.h.
typedef struct AfdDsv4Figures {
  int64_t ub_bytes;     // of the Unified Buffer that the kernel reserves; the device has 188,160
  double bytes;         // read from and written to device memory, per token (tail: per row of a tail)
  double instructions;  // of the vector unit, per token
  double barriers;      // of them wait for the one before, per token
  double cycles;        // of the vector unit on data alone, per token and on one core
} AfdDsv4Figures;

// Whether a kernel takes these constants: AFD_DSV4_OK or AFD_DSV4_REFUSED. reason (may be NULL) gets the answer as text
// of at most `size` bytes, the ending 0 included.
AFD_DSV4_API int afd_dsv4_can_implement_compress(const AfdDsv4CompressParams* params, char* reason, size_t size);
AFD_DSV4_API int afd_dsv4_can_implement_tail_update(const AfdDsv4TailParams* params, char* reason, size_t size);

// Bytes of the workspace of a launch, -1 for constants that are refused. 8,192 bytes of faults, half of compress and
// half of tail_update; with ratio 128 behind them one float32 row [head_dim] per window that can end in the tile,
// min(tokens, tokens / ratio + requests). It may be shared by launches that follow each other on one stream, and holds
// nothing between them but the faults, which have to be zero before the first.
AFD_DSV4_API int64_t afd_dsv4_workspace_bytes_compress(const AfdDsv4CompressParams* params);
AFD_DSV4_API int64_t afd_dsv4_workspace_bytes_tail_update(const AfdDsv4TailParams* params);

// Queues the kernels on a stream (aclrtStream; ignored by the emulation, which has run them when it returns).
//   blocks: vector cores to use, 1..128; any number gives the same bits.
//   rows: [carry + tokens, row_stride] of row_dtype, 512-byte aligned (as all tensors are that the device allocates).
//   pool: float32 [pool_pages, page_stride]. ape: float32 [ratio, coff * head_dim]. norm_weight: [head_dim].
//   cos, sin: float32 [out_rows, 64], of the first position of each window, each angle twice side by side.
//   cu_seqlens: int32 [requests + 1]. starts: int32 [requests]. table: int32 [requests, columns].
//   out: [out_rows, head_dim] of out_dtype: windows packed request after request over the whole launch, of which a tile
//   writes its own; rows behind the last window stay as they are. workspace: see above.
AFD_DSV4_API int afd_dsv4_launch_compress(uint32_t blocks, void* stream, const AfdDsv4CompressParams* params,
                                          const void* rows, const void* pool, const void* ape, const void* norm_weight,
                                          const void* cos, const void* sin, const void* cu_seqlens, const void* starts,
                                          const void* table, void* out, void* workspace);

// Saves, for each request, the rows of this tile that lie in the last list_ids columns its end reaches and whose page
// is not 0: kv, and score + APE in float32. Launch it behind the `compress` that reads the same pages, on its stream.
AFD_DSV4_API int afd_dsv4_launch_tail_update(uint32_t blocks, void* stream, const AfdDsv4TailParams* params,
                                             const void* rows, const void* ape, const void* cu_seqlens,
                                             const void* starts, const void* table, void* pool, void* workspace);

// Reads what launches left in the first 8,192 bytes of a workspace, here copied to host memory, since these were zero.
// Returns how many faults their records count; text (may be NULL) gets the first one in the order of requests, of
// compress before tail_update.
AFD_DSV4_API int64_t afd_dsv4_faults(const void* workspace, char* text, size_t size);

// Figures of one kernel for launches with these constants: AFD_DSV4_OK or AFD_DSV4_REFUSED.
AFD_DSV4_API int afd_dsv4_figures_compress(int kernel, const AfdDsv4CompressParams* params, AfdDsv4Figures* figures);
AFD_DSV4_API int afd_dsv4_figures_tail_update(const AfdDsv4TailParams* params, AfdDsv4Figures* figures);

// Why the last call of this thread did not return AFD_DSV4_OK; "" before the first.
AFD_DSV4_API const char* afd_dsv4_last_error(void);

// "ascendc", "twin" or "emulation".
AFD_DSV4_API const char* afd_dsv4_backend(void);

#if defined(__cplusplus)
}  // extern "C"
#endif

#endif  // AFD_DSV4_COMPRESSOR_KERNELS_H_
