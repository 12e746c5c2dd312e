// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// What the launchers of all back ends share with host.cpp.
#ifndef AFD_DSV4_COMPRESSOR_HOST_H_
#define AFD_DSV4_COMPRESSOR_HOST_H_

#include <stdint.h>

#include "kernels.h"

namespace afd_dsv4 {

// Keeps the text for afd_dsv4_last_error() and returns the status.
int Fail(int status, const char* kernel, const char* text);

// AFD_DSV4_OK, or AFD_DSV4_REFUSED with the reason kept: what a launch checks before it queues anything.
int CheckLaunch(uint32_t blocks, const AfdDsv4CompressParams* params);
int CheckLaunch(uint32_t blocks, const AfdDsv4TailParams* params);

// AFD_DSV4_OK, or AFD_DSV4_FAULT with the first fault of one operator's records kept: for back ends that have waited.
int CheckFaults(const char* kernel, const int32_t* records);

}  // namespace afd_dsv4

#endif  // AFD_DSV4_COMPRESSOR_HOST_H_
