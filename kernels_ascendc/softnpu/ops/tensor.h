// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Tensors as the operator core sees them: an address, an element type, a shape and strides in elements.
// Plain C, so that ctypes can build them. The core owns no memory and never frees any.
#ifndef SOFTNPU_OPS_TENSOR_H
#define SOFTNPU_OPS_TENSOR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SOFTNPU_FLOAT32 = 0,
  SOFTNPU_FLOAT16 = 1,
  SOFTNPU_BFLOAT16 = 2,
  SOFTNPU_INT32 = 3,
  SOFTNPU_OTHER = 9,  // any other type: never accepted, only reported
};

typedef struct SoftnpuTensor {
  void* data;
  int32_t present;  // 0: the optional argument was not given
  int32_t dtype;
  int32_t dims;
  int32_t reserved;
  int64_t shape[4];
  int64_t stride[4];
} SoftnpuTensor;

// Every entry point returns one of these; on anything but SOFTNPU_OK the message says what was found.
enum {
  SOFTNPU_OK = 0,
  SOFTNPU_REFUSED = 1,  // an argument breaks the stock contract: nothing was read or written
  SOFTNPU_FAULT = 2,    // found while running, on data the host cannot see: the rows concerned are poison
};

#ifdef __cplusplus
}
#endif

#endif  // SOFTNPU_OPS_TENSOR_H
