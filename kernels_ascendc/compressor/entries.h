// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The entry of each kernel, once for every back end: compressor.asc starts them with <<<>>>, the host emulation calls
// them core by core. An entry is a shape and a row type; the types of out and norm_weight are looked at when it runs.
#ifndef AFD_DSV4_COMPRESSOR_ENTRIES_H_
#define AFD_DSV4_COMPRESSOR_ENTRIES_H_

#include "compress_c128.h"
#include "compress_c4.h"
#include "norm_rope.h"
#include "tail_update.h"

#define AFD_DSV4_COMPRESS_C4(name, head_dim, Row)                                                                      \
  extern "C" __global__ __vector__ void name(GM_ADDR rows, GM_ADDR pool, GM_ADDR ape, GM_ADDR normWeight, GM_ADDR cos, \
                                             GM_ADDR sin, GM_ADDR cuSeqlens, GM_ADDR starts, GM_ADDR table,            \
                                             GM_ADDR out, GM_ADDR workspace, AfdDsv4CompressParams params) {           \
    AscendC::TPipe pipe;                                                                                               \
    afd_dsv4::KernelCompressC4<head_dim, Row> kernel(&pipe, params);                                                   \
    kernel.Init({rows, pool, ape, cuSeqlens, starts, table, workspace}, {normWeight, cos, sin, out});                  \
    kernel.Process();                                                                                                  \
  }

#define AFD_DSV4_POOL_C128(name, Row)                                                                    \
  extern "C" __global__ __vector__ void name(GM_ADDR rows, GM_ADDR pool, GM_ADDR ape, GM_ADDR cuSeqlens, \
                                             GM_ADDR starts, GM_ADDR table, GM_ADDR workspace,           \
                                             AfdDsv4CompressParams params) {                             \
    AscendC::TPipe pipe;                                                                                 \
    afd_dsv4::KernelPoolC128<Row> kernel(&pipe, params);                                                 \
    kernel.Init({rows, pool, ape, cuSeqlens, starts, table, workspace});                                 \
    kernel.Process();                                                                                    \
  }

#define AFD_DSV4_TAIL_UPDATE(name, Row)                                                                    \
  extern "C" __global__ __vector__ void name(GM_ADDR rows, GM_ADDR ape, GM_ADDR cuSeqlens, GM_ADDR starts, \
                                             GM_ADDR table, GM_ADDR pool, GM_ADDR workspace,               \
                                             AfdDsv4TailParams params) {                                   \
    AscendC::TPipe pipe;                                                                                   \
    afd_dsv4::KernelTailUpdate<Row> kernel(&pipe, params);                                                 \
    kernel.Init({rows, ape, cuSeqlens, starts, table, pool, workspace});                                   \
    kernel.Process();                                                                                      \
  }

AFD_DSV4_COMPRESS_C4(afd_dsv4_compress_c4_512, 512, float)
AFD_DSV4_COMPRESS_C4(afd_dsv4_compress_c4_512_bf16, 512, bfloat16_t)
AFD_DSV4_COMPRESS_C4(afd_dsv4_compress_c4_128, 128, float)
AFD_DSV4_COMPRESS_C4(afd_dsv4_compress_c4_128_bf16, 128, bfloat16_t)
AFD_DSV4_POOL_C128(afd_dsv4_pool_c128, float)
AFD_DSV4_POOL_C128(afd_dsv4_pool_c128_bf16, bfloat16_t)
AFD_DSV4_TAIL_UPDATE(afd_dsv4_tail_update, float)
AFD_DSV4_TAIL_UPDATE(afd_dsv4_tail_update_bf16, bfloat16_t)

extern "C" __global__ __vector__ void afd_dsv4_norm_rope_512(GM_ADDR normWeight, GM_ADDR cos, GM_ADDR sin,
                                                             GM_ADDR cuSeqlens, GM_ADDR starts, GM_ADDR out,
                                                             GM_ADDR workspace, AfdDsv4CompressParams params) {
  AscendC::TPipe pipe;
  afd_dsv4::KernelNormRope kernel(&pipe, params);
  kernel.Init({normWeight, cos, sin, out}, cuSeqlens, starts, workspace);
  kernel.Process();
}

#undef AFD_DSV4_COMPRESS_C4
#undef AFD_DSV4_POOL_C128
#undef AFD_DSV4_TAIL_UPDATE

#endif  // AFD_DSV4_COMPRESSOR_ENTRIES_H_
