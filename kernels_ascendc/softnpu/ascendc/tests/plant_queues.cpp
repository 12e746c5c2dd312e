// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Plants of rules about queues, their buffers, and event ids (traps 7, 8, 26).

#include "plant.h"

namespace softnpu::ascendc::tests {
namespace {

using namespace AscendC;

// A queue in and one out, two buffers of 64 floats each.
struct Queues {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in_queue;
  TQue<TPosition::VECOUT, 1> out_queue;
  GlobalTensor<float> in, out;

  explicit Queues(const Gm& gm) {
    pipe.InitBuffer(in_queue, 2, 256);
    pipe.InitBuffer(out_queue, 2, 256);
    in.SetGlobalBuffer(gm.in, Gm::kFloats);
    out.SetGlobalBuffer(gm.out, Gm::kFloats);
  }
  LocalTensor<float> load() {
    LocalTensor<float> t = in_queue.AllocTensor<float>();
    DataCopy(t, in, 64);
    in_queue.EnQue(t);
    return t;
  }
};

template <bool kWrong>
void no_free_buffer(const Gm& gm) {
  Queues q(gm);
  for (int i = 0; i < 3; ++i) {
    LocalTensor<float> t = q.in_queue.AllocTensor<float>();  // plant: no_free_buffer
    if (kWrong) continue;
    q.in_queue.EnQue(t);
    t = q.in_queue.DeQue<float>();
    q.in_queue.FreeTensor(t);
  }
}

template <bool kWrong>
void more_than_the_depth(const Gm& gm) {
  Queues q(gm);
  q.load();
  LocalTensor<float> t = q.in_queue.AllocTensor<float>();
  if (!kWrong) {
    LocalTensor<float> first = q.in_queue.DeQue<float>();
    q.in_queue.FreeTensor(first);
  }
  q.in_queue.EnQue(t);  // plant: more_than_the_depth
  LocalTensor<float> last = q.in_queue.DeQue<float>();
  q.in_queue.FreeTensor(last);
}

template <bool kWrong>
void empty_queue(const Gm& gm) {
  Queues q(gm);
  if (!kWrong) q.load();
  LocalTensor<float> t = q.in_queue.DeQue<float>();  // plant: empty_queue
  q.in_queue.FreeTensor(t);
}

template <bool kWrong>
void freed_in_the_queue(const Gm& gm) {
  Queues q(gm);
  LocalTensor<float> t = q.load();
  if (!kWrong) t = q.in_queue.DeQue<float>();
  q.in_queue.FreeTensor(t);  // plant: freed_in_the_queue
}

template <bool kWrong>
void tensor_of_another_queue(const Gm& gm) {
  Queues q(gm);
  LocalTensor<float> t = q.in_queue.AllocTensor<float>();
  if (kWrong) q.out_queue.EnQue(t);  // plant: tensor_of_another_queue
  q.in_queue.EnQue(t);
  t = q.in_queue.DeQue<float>();
  q.in_queue.FreeTensor(t);
}

template <bool kWrong>
void used_after_free(const Gm& gm) {
  Queues q(gm);
  q.load();
  LocalTensor<float> t = q.in_queue.DeQue<float>();
  LocalTensor<float> kept = t;
  if (!kWrong) Exp(t, t, 64);
  q.in_queue.FreeTensor(t);
  if (kWrong) Exp(kept, kept, 64);  // plant: used_after_free
}

template <bool kWrong>
void tensor_given_out_again(const Gm& gm) {
  TPipe pipe;
  TQue<TPosition::VECOUT, 1> queue;
  pipe.InitBuffer(queue, 1, 256);
  LocalTensor<float> old = queue.AllocTensor<float>();
  queue.EnQue(old);
  LocalTensor<float> t = queue.DeQue<float>();
  queue.FreeTensor(t);
  t = queue.AllocTensor<float>();
  Duplicate(kWrong ? old : t, 1.0f, 64);  // plant: tensor_given_out_again
  queue.EnQue(t);
  t = queue.DeQue<float>();
  queue.FreeTensor(t);
  (void)gm;
}

template <bool kWrong>
void left_in_the_queue(const Gm& gm) {
  Queues q(gm);
  LocalTensor<float> t = q.in_queue.AllocTensor<float>();
  q.in_queue.EnQue(t);  // plant: left_in_the_queue
  if (kWrong) return;
  t = q.in_queue.DeQue<float>();
  q.in_queue.FreeTensor(t);
}

template <bool kWrong>
void allocated_and_not_loaded(const Gm& gm) {
  Queues q(gm);
  LocalTensor<float> t = q.in_queue.AllocTensor<float>();
  if (!kWrong) DataCopy(t, q.in, 64);
  q.in_queue.EnQue(t);
  t = q.in_queue.DeQue<float>();
  Exp(t, t, 64);  // plant: allocated_and_not_loaded
  q.in_queue.FreeTensor(t);
}

// The second turn of a buffer holds what the first one left, on the device; here nothing may read it.
template <bool kWrong>
void stale_second_turn(const Gm& gm) {
  TPipe pipe;
  TQue<TPosition::VECIN, 1> queue;
  GlobalTensor<float> in;
  in.SetGlobalBuffer(gm.in, Gm::kFloats);
  pipe.InitBuffer(queue, 1, 256);
  for (uint32_t turn = 0; turn < 2; ++turn) {
    LocalTensor<float> t = queue.AllocTensor<float>();
    DataCopy(t, in, kWrong && turn == 1 ? 32 : 64);
    queue.EnQue(t);
    t = queue.DeQue<float>();
    Exp(t, t, 64);  // plant: stale_second_turn
    queue.FreeTensor(t);
  }
}

template <bool kWrong>
void padding_that_holds_nothing(const Gm& gm) {
  Kit kit(gm);
  kit.fill();
  DataCopyPad(kit.t, kit.in, DataCopyExtParams{1, 20, 0, 0, 0}, DataCopyPadExtParams<float>{!kWrong, 0, 3, 0.0f});
  kit.order<HardEvent::MTE2_V>();
  Exp(kit.t, kit.t, 8);  // plant: padding_that_holds_nothing
}

template <bool kWrong>
void lanes_never_written(const Gm& gm) {
  Kit kit(gm);
  Duplicate(kit.t, 1.0f, kWrong ? 63 : 64);
  PipeBarrier<PIPE_V>();
  Abs(kit.t, kit.t, 64, 1, {1, 1, 8, 8});  // plant: lanes_never_written
}

template <bool kWrong>
void nine_queues(const Gm&) {
  constexpr int kQueues = kWrong ? 9 : 8;
  TPipe pipe;
  TQue<TPosition::VECIN, 1> queues[kQueues];
  for (auto& queue : queues) {
    pipe.InitBuffer(queue, 1, 32);
    queue.EnQue(queue.template AllocTensor<float>());  // plant: nine_queues
  }
  for (auto& queue : queues) {
    LocalTensor<float> t = queue.template DeQue<float>();
    queue.FreeTensor(t);
  }
}

constexpr Plant kPlants[] = {
    PLANT(no_free_buffer, queue_state, 1),
    PLANT(more_than_the_depth, queue_state, 1),
    PLANT(empty_queue, queue_state, 1),
    PLANT(freed_in_the_queue, queue_state, 1),
    PLANT(tensor_of_another_queue, queue_state, 1),
    PLANT(used_after_free, queue_state, 1),
    PLANT(tensor_given_out_again, queue_state, 1),
    PLANT(left_in_the_queue, queue_state, 1),
    PLANT(allocated_and_not_loaded, poison_read, 1),
    PLANT(stale_second_turn, poison_read, 1),
    PLANT(padding_that_holds_nothing, poison_read, 1),
    PLANT(lanes_never_written, poison_read, 1),
    PLANT(nine_queues, event_ids, 1),
};

}  // namespace

Plants queue_plants() { return {kPlants, static_cast<int>(std::size(kPlants))}; }

}  // namespace softnpu::ascendc::tests
