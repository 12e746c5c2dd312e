// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// One call of everything that is emulated, in every form. It is never run: that it compiles here and against CANN's
// public headers of 8.5.0, 9.0.0 and 9.1.0 says that the emulation bends no signature. Includes what a kernel includes.

#include "kernel_operator.h"

using namespace AscendC;

#define BINARY(NAME)              \
  NAME(f, f, f, 64);              \
  NAME(f, f, f, 64, 1, binary);   \
  NAME(f, f, f, mask, 1, binary); \
  NAME(f, f, f, 64, 1, {1, 1, 1, 8, 8, 8})
#define SCALAR(NAME)              \
  NAME(f, f, 1.0f, 64);           \
  NAME(f, f, 1.0f, 64, 1, unary); \
  NAME(f, f, 1.0f, mask, 1, unary)
#define UNARY(NAME)         \
  NAME(f, f, 64);           \
  NAME(f, f, 64, 1, unary); \
  NAME(f, f, mask, 1, unary)

void Operations(const LocalTensor<float>& f, const LocalTensor<int32_t>& n, const LocalTensor<bfloat16_t>& b,
                const LocalTensor<half>& h, const LocalTensor<uint32_t>& u) {
  uint64_t mask[2] = {1, 2};
  const BinaryRepeatParams binary(1, 1, 1, 8, 8, 8);
  const UnaryRepeatParams unary(1, 1, 8, 8);
  BINARY(Add);
  BINARY(Sub);
  BINARY(Mul);
  BINARY(Div);
  BINARY(Max);
  BINARY(Min);
  Add(n, n, n, 64);
  SCALAR(Adds);
  SCALAR(Muls);
  SCALAR(Maxs);
  SCALAR(Mins);
  UNARY(Exp);
  UNARY(Ln);
  UNARY(Sqrt);
  UNARY(Rsqrt);
  UNARY(Reciprocal);
  UNARY(Abs);
  Cast(b, f, RoundMode::CAST_RINT, 64);
  Cast(f, b, RoundMode::CAST_NONE, 64);
  Cast(h, f, RoundMode::CAST_RINT, 64);
  Cast(f, h, RoundMode::CAST_NONE, 64);
  Cast(n, f, RoundMode::CAST_RINT, 64);
  Cast(f, n, RoundMode::CAST_NONE, 64);
  Cast(f, f, RoundMode::CAST_RINT, 64);
  Cast(b, f, RoundMode::CAST_RINT, 64, 1, {1, 1, 4, 8});
  Cast(b, f, RoundMode::CAST_RINT, mask, 1, unary);
  Duplicate(f, 1.0f, 64);
  Duplicate(f, 1.0f, 64, 1, 1, 8);
  Duplicate(f, 1.0f, mask, 1, 1, 8);
  Brcb(f, f, 1, {1, 8});
  Gather(f, f, u, 0, 64);
  Copy(f, f, 64, 1, {1, 1, 8, 8});
  Copy(f, f, mask, 1, {1, 1, 8, 8});
  CreateVecIndex(n, 0, 64);
  WholeReduceSum<float>(f, f, 64, 1, 1, 1, 8);
  WholeReduceSum<float>(f, f, mask, 1, 1, 1, 8);
  WholeReduceMax<float>(f, f, 64, 1, 1, 1, 8);
  WholeReduceMax<float>(f, f, mask, 1, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
  BlockReduceSum<float>(f, f, 1, 64, 1, 1, 8);
  BlockReduceSum<float>(f, f, 1, mask, 1, 1, 8);
  BlockReduceMax<float>(f, f, 1, 64, 1, 1, 8);
  BlockReduceMax<float>(f, f, 1, mask, 1, 1, 8);
  ReduceSum<float>(f, f, f, 64);
  ReduceMax<float>(f, f, f, 64, true);
}

void Copies(const LocalTensor<float>& f, const GlobalTensor<float>& g) {
  DataCopy(f, g, 64);
  DataCopy(g, f, 64);
  DataCopy(f, f, 64);
  DataCopy(f, g, DataCopyParams{1, 1, 0, 0});
  DataCopy(g, f, DataCopyParams{1, 1, 0, 0});
  DataCopy(f, f, DataCopyParams{1, 1, 0, 0});
  DataCopyPad(f, g, DataCopyExtParams{1, 4, 0, 0, 0}, DataCopyPadExtParams<float>{false, 0, 0, 0.0f});
  DataCopyPad(g, f, DataCopyExtParams{1, 4, 0, 0, 0});
  DataCopyPad(f, g, DataCopyParams{1, 4, 0, 0}, DataCopyPadParams{false, 0, 0, 0});
  DataCopyPad(g, f, DataCopyParams{1, 4, 0, 0});
}

float Tensors(LocalTensor<float>& f, GlobalTensor<float>& g, __gm__ float* memory) {
  g.SetGlobalBuffer(memory);
  g.SetGlobalBuffer(memory, 64);
  g.SetL2CacheHint(CacheMode::CACHE_MODE_NORMAL);
  g.SetValue(0, g.GetValue(1));
  f.SetValue(1, f.GetValue(0));
  f.SetSize(f.GetSize());
  const LocalTensor<int32_t> reinterpreted = f.ReinterpretCast<int32_t>();
  const LocalTensor<float> part = f[8];
  const GlobalTensor<float> rest = g[8];
  const uint64_t addresses = f.GetPhyAddr() + f.GetPhyAddr(8) + g.GetSize();
  const __gm__ float* address = g.GetPhyAddr();
  (void)address;
  return static_cast<float>(addresses + part.GetSize() + rest.GetSize() + reinterpreted.GetPosition());
}

int64_t Synchronisation(const GlobalTensor<float>& g) {
  SetFlag<HardEvent::V_MTE3>(0);
  WaitFlag<HardEvent::V_MTE3>(0);
  PipeBarrier<PIPE_V>();
  PipeBarrier<PIPE_ALL>();
  SetAtomicAdd<float>();
  SetAtomicNone();
  DataCacheCleanAndInvalid<float, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(g);
  return GetBlockIdx() + GetBlockNum() + GetSubBlockIdx();
}

bool Buffers() {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 2> out;
  TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through;
  TBuf<TPosition::VECCALC> buffer;
  TBuf<> other;
  pipe.InitBuffer(in, 2, 256);
  pipe.InitBuffer(out, 2, 256);
  pipe.InitBuffer(through, 1, 256);
  pipe.InitBuffer(buffer, 256);
  pipe.InitBuffer(other, 256);
  LocalTensor<float> tensor = in.AllocTensor<float>();
  in.EnQue(tensor);
  tensor = in.DeQue<float>();
  in.FreeTensor(tensor);
  tensor = buffer.Get<float>();
  tensor = buffer.Get<float>(8);
  tensor = buffer.GetWithOffset<float>(8, 32);
  TEventID id = pipe.FetchEventID(HardEvent::MTE2_V);
  id = pipe.FetchEventID<HardEvent::MTE2_V>();
  id = pipe.AllocEventID<HardEvent::MTE2_V>();
  pipe.ReleaseEventID<HardEvent::MTE2_V>(id);
  pipe.Destroy();
  return in.VacantInQue() || in.HasTensorInQue() || in.HasIdleBuffer() || in.GetTensorCountInQue() > 0;
}
