// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// The one header that kernels include. On a machine with CANN the include path leads to the genuine one; here to the
// emulation. What each part has and leaves out is said at its top, the trap table is in README.md.
#ifndef SOFTNPU_ASCENDC_KERNEL_OPERATOR_H
#define SOFTNPU_ASCENDC_KERNEL_OPERATOR_H

#include "cast.h"
#include "copy.h"
#include "elementwise.h"
#include "moves.h"
#include "queues.h"
#include "reduce.h"
#include "sync.h"
#include "tensors.h"
#include "types.h"

#endif  // SOFTNPU_ASCENDC_KERNEL_OPERATOR_H
