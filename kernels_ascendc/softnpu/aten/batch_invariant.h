// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Problem: a CPU kernel of torch may give a row other bits with other neighbours. A matrix product chooses its blocking
// by the number of rows, a vectorised loop computes its last elements one by one with other functions, a reduction is
// cut by layout and by threads. Then two runs that batch requests differently cannot be compared token by token.
// Way: while the mode is on, every aten call that a task of a stream makes, by itself or within an operator of ../npu,
// passes through one place, which sees to it that a row's result depends on that row alone:
//   matrix products (mm, addmm, bmm, baddbmm, mv, addmv, dot; with them matmul, linear, einsum)
//                     the projection of ../ops: fp32, k ascending, one accumulator an element, rounded once
//   functions of an element (exp, sigmoid, silu, pow, rsqrt, addcmul, ...; not those that IEEE 754 defines)
//                     on a contiguous copy that ends in padding, so that all elements are in the vectorised body
//   reductions with dimensions, softmax (sum, mean, var, norms, ...)
//                     on a contiguous copy of two or more rows, the reduced dimensions last, which its kernels take one
//                     by one
//   layer_norm        on a contiguous copy; rms_norm is made of the above
//   everything else   as it is: exact, or row by row, or by index; ties of sort and topk are decided within a row
// A task then runs on the stream's thread alone. Refused in the mode: convolutions and the fused attention of the CPU,
// which have products of their own. Not covered: reductions and softmax with an `out` argument, float64 products,
// gradients, and what is computed on the host.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace softaten {

// The mode: AFD_DSV4_SOFTNPU_BATCH_INVARIANT=1 at start, torch.ops.softnpu.set_batch_invariant() later. Read when a
// task runs.
bool batch_invariant();
bool set_batch_invariant(bool on);  // what it was

// For the thread of a stream while it runs a task.
class BatchInvariantGuard {
 public:
  BatchInvariantGuard();
  ~BatchInvariantGuard();

 private:
  std::optional<c10::impl::IncludeDispatchKeyGuard> calls_;
  int threads_ = 0;
};

}  // namespace softaten
