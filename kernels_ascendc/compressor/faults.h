// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Which faults of a launch's tables a kernel reports. The record of a block is int32 [count, code, request, value,
// limit, 0, 0, 0] of its first fault in the last launch that had one; host.cpp has the texts.
#ifndef AFD_DSV4_COMPRESSOR_FAULTS_H_
#define AFD_DSV4_COMPRESSOR_FAULTS_H_

#include <stdint.h>

namespace afd_dsv4 {

enum class FaultCode : int32_t {
  kNone = 0,
  kFirstToken,  // cu_seqlens[0] = value is not 0
  kTokens,  // cu_seqlens[request + 1] = value runs backwards (limit: the one before) or past the launch (its tokens)
  kStart,   // starts[request] = value is negative, or its limit tokens run past the last position
  kColumn,  // position value lies behind the table's limit columns
  kPage,    // position value lies in page limit, which the pool has not
  kRow,     // the row of position value lies limit rows before the staging rows
};

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_FAULTS_H_
