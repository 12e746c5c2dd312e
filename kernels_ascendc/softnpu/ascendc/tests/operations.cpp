// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// One operation on given bytes: loads up to three UB images, runs the operation, stores the image of its destination.
// The tests in Python say what has to come out.

#include <cstring>
#include <string>

#include "kernel_operator.h"
#include "launch.h"

extern "C" {

// offset: bytes of each operand from the start of its image. numbers: mask or count, repeats, strides, as the
// operation takes them; masked: 0 count form, 1 mask, 2 bit mask (bits). kind: element types, 0 float, 1 int32, 2 bf16,
// 3 half; the first of the destination. alias: 1 src0, 2 src1 lies in the image of dst.
struct OperationCase {
  const char* name;
  const uint8_t *src0, *src1;
  uint8_t* dst;
  int64_t bytes[3], offset[3];  // dst, src0, src1
  int64_t numbers[8];
  uint64_t bits[2];
  int32_t masked, dst_kind, src_kind, mode, alias, reserved;
  float scalar;
  int32_t fuzz, saturate;
  uint64_t seed;
  char text[768];
  int64_t repeats, elements;  // counted
};
}

namespace softnpu::ascendc::tests {
namespace {

using namespace AscendC;

template <typename D, typename S>
struct Operands {
  LocalTensor<D> dst;
  LocalTensor<S> src0, src1;
};

#define FORMS(CALL_COUNT, CALL_MASK)                        \
  do {                                                      \
    const auto n = static_cast<int32_t>(c.numbers[0]);      \
    const auto repeat = static_cast<uint8_t>(c.numbers[1]); \
    if (c.masked == 0) {                                    \
      CALL_COUNT;                                           \
    } else if (c.masked == 1) {                             \
      const auto mask = static_cast<uint64_t>(n);           \
      CALL_MASK;                                            \
    } else {                                                \
      uint64_t* mask = c.bits;                              \
      CALL_MASK;                                            \
    }                                                       \
  } while (false)

template <typename T>
bool arithmetic(OperationCase& c, const Operands<T, T>& o) {
  const std::string name = c.name;
  const int64_t* p = c.numbers + 2;
  const BinaryRepeatParams binary(p[0], p[1], p[2], p[3], p[4], p[5]);
  const UnaryRepeatParams unary(p[0], p[1], p[3], p[4]);
  const T scalar = static_cast<T>(c.scalar);
#define BINARY(NAME)                                                                          \
  if (name == #NAME) {                                                                        \
    FORMS(NAME(o.dst, o.src0, o.src1, n), NAME(o.dst, o.src0, o.src1, mask, repeat, binary)); \
    return true;                                                                              \
  }
#define SCALAR(NAME)                                                                         \
  if (name == #NAME) {                                                                       \
    FORMS(NAME(o.dst, o.src0, scalar, n), NAME(o.dst, o.src0, scalar, mask, repeat, unary)); \
    return true;                                                                             \
  }
  BINARY(Add)
  BINARY(Sub)
  BINARY(Mul)
  BINARY(Max)
  BINARY(Min)
  SCALAR(Adds)
  SCALAR(Muls)
  SCALAR(Maxs)
  SCALAR(Mins)
  if (name == "Duplicate") {
    FORMS(Duplicate(o.dst, scalar, n), Duplicate(o.dst, scalar, mask, repeat, p[0], p[3]));
    return true;
  }
  if (name == "CreateVecIndex") {
    CreateVecIndex(o.dst, scalar, static_cast<uint32_t>(c.numbers[0]));
    return true;
  }
  if constexpr (std::is_same_v<T, float>) {
    BINARY(Div)
#define UNARY(NAME)                                                          \
  if (name == #NAME) {                                                       \
    FORMS(NAME(o.dst, o.src0, n), NAME(o.dst, o.src0, mask, repeat, unary)); \
    return true;                                                             \
  }
    UNARY(Exp)
    UNARY(Ln)
    UNARY(Sqrt)
    UNARY(Rsqrt)
    UNARY(Reciprocal)
    UNARY(Abs)
  }
  return false;
}

bool reduction(OperationCase& c, const Operands<float, float>& o) {
  const std::string name = c.name;
  const auto n = [&](int i) { return static_cast<int32_t>(c.numbers[i]); };
  const auto order = static_cast<ReduceOrder>(c.mode);
  const bool bits = c.masked == 2;
  if (name == "WholeReduceSum") {
    if (bits) {
      WholeReduceSum(o.dst, o.src0, c.bits, n(1), n(2), n(3), n(4));
    } else {
      WholeReduceSum(o.dst, o.src0, n(0), n(1), n(2), n(3), n(4));
    }
  } else if (name == "WholeReduceMax") {
    if (bits) {
      WholeReduceMax(o.dst, o.src0, c.bits, n(1), n(2), n(3), n(4), order);
    } else {
      WholeReduceMax(o.dst, o.src0, n(0), n(1), n(2), n(3), n(4), order);
    }
  } else if (name == "BlockReduceSum") {
    bits ? BlockReduceSum(o.dst, o.src0, n(1), c.bits, n(2), n(3), n(4))
         : BlockReduceSum(o.dst, o.src0, n(1), n(0), n(2), n(3), n(4));
  } else if (name == "BlockReduceMax") {
    bits ? BlockReduceMax(o.dst, o.src0, n(1), c.bits, n(2), n(3), n(4))
         : BlockReduceMax(o.dst, o.src0, n(1), n(0), n(2), n(3), n(4));
  } else if (name == "ReduceSum") {
    ReduceSum(o.dst, o.src0, o.src1, n(0));
  } else if (name == "ReduceMax") {
    ReduceMax(o.dst, o.src0, o.src1, n(0), c.mode != 0);
  } else {
    return false;
  }
  return true;
}

template <typename T>
bool move(OperationCase& c, const Operands<T, T>& o) {
  const std::string name = c.name;
  const int64_t* p = c.numbers + 2;
  if (name == "Copy") {
    const CopyRepeatParams params(p[0], p[1], p[3], p[4]);
    FORMS(static_cast<void>(n), Copy(o.dst, o.src0, mask, repeat, params));
  } else if (name == "Brcb") {
    Brcb(o.dst, o.src0, c.numbers[1], {static_cast<uint16_t>(p[0]), static_cast<uint16_t>(p[3])});
  } else if (name == "Gather") {
    Gather(o.dst, o.src0, o.src1.template ReinterpretCast<uint32_t>(), static_cast<uint32_t>(c.numbers[1]),
           static_cast<uint32_t>(c.numbers[0]));
  } else if (name == "DataCopy") {
    if (c.masked == 0) {
      DataCopy(o.dst, o.src0, static_cast<uint32_t>(c.numbers[0]));
    } else {
      DataCopy(o.dst, o.src0, DataCopyParams(p[0], p[1], p[2], p[3]));
    }
  } else {
    return false;
  }
  return true;
}

template <typename D, typename S>
bool cast(OperationCase& c, const Operands<D, S>& o) {
  const int64_t* p = c.numbers + 2;
  const auto mode = static_cast<RoundMode>(c.mode);
  const UnaryRepeatParams params(p[0], p[1], p[3], p[4]);
  FORMS(Cast(o.dst, o.src0, mode, static_cast<uint32_t>(n)), Cast(o.dst, o.src0, mode, mask, repeat, params));
  return true;
}

// GM copies: the image of dst is loaded first, so that the result shows which bytes a copy touched.
template <typename T>
void copy_in(OperationCase& c, const LocalTensor<T>& dst, const GlobalTensor<T>& src) {
  const int64_t* p = c.numbers;
  if (c.masked == 0) {
    DataCopy(dst, src, static_cast<uint32_t>(p[0]));
  } else if (c.masked == 1) {
    DataCopy(dst, src, DataCopyParams(p[0], p[1], p[2], p[3]));
  } else {
    T value{};
    std::memcpy(&value, &c.bits[0], sizeof(T));
    DataCopyPad(dst, src, DataCopyExtParams(p[0], p[1], p[2], p[3], 0),
                DataCopyPadExtParams<T>(p[4] != 0, p[5], p[6], value));
  }
}
template <typename T>
void copy_out(OperationCase& c, const GlobalTensor<T>& dst, const LocalTensor<T>& src) {
  const int64_t* p = c.numbers;
  if (c.masked == 0) {
    DataCopy(dst, src, static_cast<uint32_t>(p[0]));
  } else if (c.masked == 1) {
    DataCopy(dst, src, DataCopyParams(p[0], p[1], p[2], p[3]));
  } else {
    DataCopyPad(dst, src, DataCopyExtParams(p[0], p[1], p[2], p[3], 0));
  }
}

struct Images {
  TPipe pipe;
  TBuf<TPosition::VECCALC> buffer[3];
  LocalTensor<uint16_t> at[3];

  explicit Images(const OperationCase& c) {
    for (int i = 0; i < 3; ++i) {
      pipe.InitBuffer(buffer[i], std::max<int64_t>(c.bytes[i], 32));
      at[i] = buffer[i].Get<uint16_t>();
    }
  }
  static void load(const LocalTensor<uint16_t>& to, const uint8_t* from, int64_t bytes) {
    if (bytes == 0) return;
    GlobalTensor<uint16_t> gm;
    gm.SetGlobalBuffer(reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(from)));
    DataCopy(to, gm, static_cast<uint32_t>(bytes / 2));
  }
  static void store(uint8_t* to, const LocalTensor<uint16_t>& from, int64_t bytes) {
    GlobalTensor<uint16_t> gm;
    gm.SetGlobalBuffer(reinterpret_cast<uint16_t*>(to));
    DataCopy(gm, from, static_cast<uint32_t>(bytes / 2));
  }
};

bool operate(OperationCase& c, Images& images) {
  const auto at = [&](int32_t i, auto type) {
    using T = decltype(type);
    const int image = i > 0 && c.alias == i ? 0 : i;
    return images.at[image][static_cast<uint32_t>(c.offset[i] / 2)].template ReinterpretCast<T>();
  };
  const auto same = [&](auto type) {
    using T = decltype(type);
    return Operands<T, T>{at(0, type), at(1, type), at(2, type)};
  };
  if (std::string(c.name) == "Cast") {
    const int pair = c.dst_kind * 10 + c.src_kind;
    const auto mixed = [&](auto d, auto s) { return Operands<decltype(d), decltype(s)>{at(0, d), at(1, s), at(2, s)}; };
    if (pair == 20) return cast(c, mixed(bfloat16_t{}, 0.0f));
    if (pair == 2) return cast(c, mixed(0.0f, bfloat16_t{}));
    if (pair == 30) return cast(c, mixed(half{}, 0.0f));
    if (pair == 3) return cast(c, mixed(0.0f, half{}));
    if (pair == 10) return cast(c, mixed(int32_t{}, 0.0f));
    if (pair == 1) return cast(c, mixed(0.0f, int32_t{}));
    return pair == 0 && cast(c, mixed(0.0f, 0.0f));
  }
  if (c.dst_kind == 2) return move(c, same(bfloat16_t{}));
  if (c.dst_kind == 1) return arithmetic(c, same(int32_t{}));
  return arithmetic(c, same(0.0f)) || reduction(c, same(0.0f)) || move(c, same(0.0f));
}

void kernel(OperationCase& c) {
  Images images(c);
  const std::string name = c.name;
  if (name == "CopyIn" || name == "CopyOut") {
    const int local = name == "CopyIn" ? 0 : 1;
    Images::load(images.at[0], local == 0 ? c.dst : c.src0, c.bytes[local]);
    PipeBarrier<PIPE_ALL>();
    GlobalTensor<uint16_t> gm;
    gm.SetGlobalBuffer(reinterpret_cast<uint16_t*>(local == 0 ? const_cast<uint8_t*>(c.src0) : c.dst));
    const LocalTensor<uint16_t> tensor = images.at[0][static_cast<uint32_t>(c.offset[local] / 2)];
    const GlobalTensor<uint16_t> other = gm[static_cast<uint64_t>(c.offset[1 - local] / 2)];
    if (local == 1) return copy_out(c, other, tensor);
    copy_in(c, tensor, other);
    PipeBarrier<PIPE_ALL>();
    return Images::store(c.dst, images.at[0], c.bytes[0]);
  }
  Images::load(images.at[0], c.dst, c.bytes[0]);
  Images::load(images.at[1], c.src0, c.bytes[1]);
  Images::load(images.at[2], c.src1, c.bytes[2]);
  PipeBarrier<PIPE_ALL>();
  if (!operate(c, images)) throw std::invalid_argument(std::string("no operation ") + c.name);
  PipeBarrier<PIPE_ALL>();
  Images::store(c.dst, images.at[0], c.bytes[0]);
}

}  // namespace
}  // namespace softnpu::ascendc::tests

extern "C" __attribute__((visibility("default"))) int32_t ascendc_operation(OperationCase* c) {
  using namespace softnpu::ascendc;
  Options options;
  options.fuzz = c->fuzz != 0;
  options.saturate = c->saturate != 0;
  options.seed = c->seed;
  try {
    Launch launch(1, options);
    launch.gm(c->dst, static_cast<size_t>(c->bytes[0]), Access::read_write, "dst");
    launch.gm(c->src0, static_cast<size_t>(c->bytes[1]), Access::read, "src0");
    launch.gm(c->src1, static_cast<size_t>(c->bytes[2]), Access::read, "src1");
    launch.run([&] { tests::kernel(*c); });
    for (const Counters::Vector& vector : launch.counters().vector) {
      c->repeats += vector.repeats;
      c->elements += vector.elements;
    }
    return 0;
  } catch (const Misuse& misuse) {
    std::snprintf(c->text, sizeof(c->text), "%s", misuse.what());
    return misuse.number();
  } catch (const std::exception& error) {
    std::snprintf(c->text, sizeof(c->text), "%s", error.what());
    return -1;
  }
}
