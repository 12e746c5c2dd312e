// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// A whole kernel in the style of the project's own: queues with two buffers, metadata read from GM, rows split over the
// blocks. Softmax of rows of 64 floats, row r of request b scaled by scale[b], rounded to bfloat16.

#include <cstdio>

#include "exports.h"
#include "kernel_operator.h"

namespace softnpu::ascendc::tests {
namespace {

class KernelSoftmax {
 public:
  static constexpr uint32_t kColumns = 64, kRowBytes = kColumns * sizeof(float);

  __aicore__ inline KernelSoftmax(AscendC::TPipe* pipe, int32_t requests) : pipe_(pipe), requests_(requests) {}

  __aicore__ inline void Init(GM_ADDR rows, GM_ADDR offsets, GM_ADDR scale, GM_ADDR out) {
    rowsGm_.SetGlobalBuffer((__gm__ float*)rows);
    offsetsGm_.SetGlobalBuffer((__gm__ int32_t*)offsets);
    scaleGm_.SetGlobalBuffer((__gm__ float*)scale);
    outGm_.SetGlobalBuffer((__gm__ bfloat16_t*)out);
    pipe_->InitBuffer(inQ_, 2, kRowBytes);
    pipe_->InitBuffer(outQ_, 2, kRowBytes / 2);
    pipe_->InitBuffer(tmpBuf_, 3 * kRowBytes);
  }
  __aicore__ inline void Process() {
    const int32_t total = offsetsGm_.GetValue(requests_);
    const int64_t blocks = AscendC::GetBlockNum(), block = AscendC::GetBlockIdx();
    int32_t request = 0;
    for (int64_t row = total * block / blocks; row < total * (block + 1) / blocks; ++row) {
      while (offsetsGm_.GetValue(request + 1) <= row) ++request;
      CopyIn(row);
      Compute(scaleGm_.GetValue(request));
      CopyOut(row);
    }
  }

 private:
  __aicore__ inline void CopyIn(int64_t row) {
    AscendC::LocalTensor<float> t = inQ_.AllocTensor<float>();
    AscendC::DataCopy(t, rowsGm_[row * kColumns], kColumns);
    inQ_.EnQue(t);
  }
  __aicore__ inline void Compute(float scale) {
    AscendC::LocalTensor<float> t = inQ_.DeQue<float>();
    AscendC::LocalTensor<float> x = tmpBuf_.Get<float>(), scalar = x[kColumns], wide = x[2 * kColumns];
    AscendC::Muls(x, t, scale, kColumns);
    AscendC::Duplicate(scalar, 1.0f, kColumns);
    AscendC::PipeBarrier<PIPE_V>();
    inQ_.FreeTensor(t);
    AscendC::WholeReduceMax<float>(scalar, x, 64, 1, 1, 1, 8, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
    AscendC::PipeBarrier<PIPE_V>();
    Broadcast(wide, scalar);
    AscendC::Sub(x, x, wide, 64, 1, {1, 1, 0, 8, 8, 0});
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Exp(x, x, kColumns);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::WholeReduceSum<float>(scalar, x, 64, 1, 1, 1, 8);
    AscendC::PipeBarrier<PIPE_V>();
    Broadcast(wide, scalar);
    AscendC::Div(x, x, wide, 64, 1, {1, 1, 0, 8, 8, 0});
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::LocalTensor<bfloat16_t> o = outQ_.AllocTensor<bfloat16_t>();
    AscendC::Cast(o, x, AscendC::RoundMode::CAST_RINT, kColumns);
    AscendC::PipeBarrier<PIPE_V>();
    outQ_.EnQue(o);
  }
  __aicore__ inline void Broadcast(const AscendC::LocalTensor<float>& wide, const AscendC::LocalTensor<float>& scalar) {
    AscendC::Brcb(wide, scalar, 1, {1, 8});
    AscendC::PipeBarrier<PIPE_V>();
  }
  __aicore__ inline void CopyOut(int64_t row) {
    AscendC::LocalTensor<bfloat16_t> o = outQ_.DeQue<bfloat16_t>();
    AscendC::DataCopy(outGm_[row * kColumns], o, kColumns);
    outQ_.FreeTensor(o);
  }

  AscendC::TPipe* pipe_;
  int32_t requests_;
  AscendC::GlobalTensor<float> rowsGm_, scaleGm_;
  AscendC::GlobalTensor<int32_t> offsetsGm_;
  AscendC::GlobalTensor<bfloat16_t> outGm_;
  AscendC::TQue<AscendC::TPosition::VECIN, 1> inQ_;
  AscendC::TQue<AscendC::TPosition::VECOUT, 1> outQ_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> tmpBuf_;
};

__global__ __vector__ void softmax(GM_ADDR rows, GM_ADDR offsets, GM_ADDR scale, GM_ADDR out, int32_t requests) {
  AscendC::TPipe pipe;
  KernelSoftmax op(&pipe, requests);
  op.Init(rows, offsets, scale, out);
  op.Process();
}

thread_local char last_error[768];

}  // namespace
}  // namespace softnpu::ascendc::tests

// rows [capacity, 64] float; offsets [requests + 1]; scale [requests]; out [capacity, 64] bfloat16. 0, or the trap.
extern "C" __attribute__((visibility("default"))) int32_t ascendc_softmax(int64_t blocks, int64_t capacity,
                                                                          int32_t requests, void* rows, void* offsets,
                                                                          void* scale, void* out) {
  using namespace softnpu::ascendc;
  try {
    Launch launch(blocks, options());
    launch.gm(rows, static_cast<size_t>(capacity) * 256, Access::read, "rows");
    launch.gm(offsets, static_cast<size_t>(requests + 1) * 4, Access::read, "offsets");
    launch.gm(scale, static_cast<size_t>(requests) * 4, Access::read, "scale");
    launch.gm(out, static_cast<size_t>(capacity) * 128, Access::write, "out");
    record(launch.run([&] {
      tests::softmax(static_cast<uint8_t*>(rows), static_cast<uint8_t*>(offsets), static_cast<uint8_t*>(scale),
                     static_cast<uint8_t*>(out), requests);
    }));
    return 0;
  } catch (const Misuse& misuse) {
    std::snprintf(tests::last_error, sizeof(tests::last_error), "%s", misuse.what());
    return misuse.number();
  }
}
extern "C" __attribute__((visibility("default"))) const char* ascendc_softmax_error() {
  return softnpu::ascendc::tests::last_error;
}
