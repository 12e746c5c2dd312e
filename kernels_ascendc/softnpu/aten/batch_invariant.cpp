// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

#include "batch_invariant.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <kernels.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace softaten {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// Nothing else in a process uses this key; of those that a thread can switch on
// it is the one in front of all backends.
constexpr DispatchKey kKey = DispatchKey::TESTING_ONLY_GenericMode;
constexpr int64_t kPadding = 256;  // a multiple of what any vectorised loop takes at once

std::atomic<bool> g_on{[] {
  const char* value = std::getenv("AFD_DSV4_SOFTNPU_BATCH_INVARIANT");
  return value != nullptr && std::string_view(value) == "1";
}()};

enum class Kind { other, product, element, reduction, softmax, layer_norm, refused };

Kind kind_of(const c10::FunctionSchema& schema) {
  static const std::unordered_map<std::string_view, Kind> kinds = [] {
    std::unordered_map<std::string_view, Kind> all;
    const auto add = [&](Kind kind, std::initializer_list<const char*> names) {
      for (const char* name : names) all.emplace(name, kind);
    };
    add(Kind::product, {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"});
    add(Kind::element, {"acos",          "acosh",         "addcdiv",      "addcmul",
                        "asin",          "asinh",         "atan",         "atan2",
                        "atanh",         "celu",          "cos",          "cosh",
                        "digamma",       "elu",           "erf",          "erfc",
                        "erfinv",        "exp",           "exp2",         "expm1",
                        "gelu",          "hypot",         "lerp",         "lgamma",
                        "log",           "log10",         "log1p",        "log2",
                        "logaddexp",     "logaddexp2",    "logit",        "log_sigmoid_forward",
                        "mish",          "pow",           "reciprocal",   "rsqrt",
                        "selu",          "sigmoid",       "silu",         "sin",
                        "sinc",          "sinh",          "softplus",     "tan",
                        "tanh",          "xlogy",         "rsub",         "add",
                        "sub",           "fmod",          "remainder",    "special_xlog1py",
                        "special_erfcx", "special_ndtri", "floor_divide", "hardswish",
                        "hardsigmoid"});
    add(Kind::reduction,
        {"sum", "mean", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "prod", "nansum"});
    add(Kind::softmax, {"_softmax", "_log_softmax"});
    add(Kind::layer_norm, {"native_layer_norm"});
    add(Kind::refused,
        {"_convolution", "mkldnn_convolution", "_slow_conv2d_forward", "slow_conv3d_forward", "slow_conv_transpose2d",
         "_scaled_dot_product_flash_attention_for_cpu", "_addmm_activation", "addbmm", "glu"});
    return all;
  }();
  std::string_view name = schema.name();
  if (name.substr(0, 6) != "aten::") return Kind::other;
  name.remove_prefix(6);
  auto found = kinds.find(name);
  if (found == kinds.end() && name.back() == '_') found = kinds.find(name.substr(0, name.size() - 1));
  return found == kinds.end() ? Kind::other : found->second;
}

// One call: its arguments, by name, and what becomes of its results.
class Call {
 public:
  Call(const OperatorHandle& op, DispatchKeySet below, Stack* stack)
      : op_(op), below_(below), stack_(stack), arguments_(op.schema().arguments()) {
    values_ = torch::jit::pop(*stack, arguments_.size());
  }

  const std::vector<c10::Argument>& arguments() const { return arguments_; }
  std::vector<IValue>& values() { return values_; }
  IValue* find(const char* name) {
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (arguments_[i].name() == name) return &values_[i];
    return nullptr;
  }
  double scale(const char* name) {
    const IValue* value = find(name);
    return value == nullptr ? 1.0 : value->toScalar().toDouble();
  }
  bool writes(size_t i) const { return arguments_[i].alias_info() != nullptr && arguments_[i].alias_info()->isWrite(); }
  bool writes() const {
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (writes(i)) return true;
    return false;
  }

  // The kernel itself, with the arguments as they are now.
  Stack run() const {
    Stack values = values_;
    op_.redispatchBoxed(below_, &values);
    return values;
  }
  void finish(Stack results) {
    for (IValue& result : results) stack_->push_back(std::move(result));
  }
  // One result, in the argument that is written if there is one.
  void finish(const Tensor& result) {
    for (size_t i = 0; i < values_.size(); ++i) {
      if (!writes(i)) continue;
      const Tensor target = values_[i].toTensor();
      if (target.sizes() != result.sizes()) target.resize_(result.sizes());
      target.copy_(result);
      stack_->push_back(target);
      return;
    }
    stack_->push_back(result);
  }

 private:
  const OperatorHandle& op_;
  const DispatchKeySet below_;
  Stack* stack_;
  const std::vector<c10::Argument>& arguments_;
  std::vector<IValue> values_;
};

// a [rows, depth] by b [depth, columns] to out [rows, columns], fp32, with the
// register tile of the projection. b is packed panel by panel while it is used:
// most products here have few rows.
void multiply(const Tensor& a, const Tensor& b, float* out) {
  const softnpu::ProjectionKernel& kernel = softnpu::projection_kernel();
  const int64_t rows = a.size(0), depth = a.size(1), columns = b.size(1), width = kernel.columns;
  const int64_t groups = (rows + kernel.rows - 1) / kernel.rows;
  const float *left = a.const_data_ptr<float>(), *right = b.const_data_ptr<float>();
  const int64_t down = b.stride(0), across = b.stride(1);
  const int64_t panels = (columns + width - 1) / width, most = std::min(depth, softnpu::kDepthBlock);
  std::vector<float> packed(groups * kernel.rows * most), panel(width * most);
  std::vector<float> sums(panels * groups * kernel.rows * width);  // [panel][group][row][column]
  for (int64_t begin = 0; begin < depth; begin += softnpu::kDepthBlock) {
    const int64_t length = std::min(softnpu::kDepthBlock, depth - begin);
    std::fill(packed.begin(), packed.end(), 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
      float* to = packed.data() + i / kernel.rows * kernel.rows * length + i % kernel.rows;
      const float* row = left + i * a.stride(0) + begin * a.stride(1);
      for (int64_t k = 0; k < length; ++k) to[k * kernel.rows] = row[k * a.stride(1)];
    }
    for (int64_t column = 0; column < columns; column += width) {
      const int64_t count = std::min(width, columns - column);
      if (count < width) std::fill(panel.begin(), panel.end(), 0.0f);
      const float* from = right + begin * down + column * across;
      // Of a matrix with contiguous columns, in steps, so that neither side is left for long.
      constexpr int64_t kStep = 8;
      for (int64_t first = 0; first < length; first += kStep)
        for (int64_t j = 0; j < count; ++j) {
          const float* column_of = from + first * down + j * across;
          float* panel_of = panel.data() + first * width + j;
          const int64_t step = std::min(kStep, length - first);
          if (down == 1 && step == kStep)
            for (int64_t k = 0; k < kStep; ++k) panel_of[k * width] = column_of[k];
          else
            for (int64_t k = 0; k < step; ++k) panel_of[k * width] = column_of[k * down];
        }
      float* to = sums.data() + column * groups * kernel.rows;
      for (int64_t group = 0; group < groups; ++group)
        kernel.tile(packed.data() + group * kernel.rows * length, panel.data(), to + group * kernel.rows * width, width,
                    length);
    }
  }
  for (int64_t column = 0; column < columns; column += width)
    for (int64_t i = 0; i < rows; ++i)
      std::copy_n(sums.data() + column * groups * kernel.rows + i * width, std::min(width, columns - column),
                  out + i * columns + column);
}

// The product of two matrices, or of two batches of them.
Tensor product_of(const Tensor& a, const Tensor& b) {
  TORCH_CHECK(
      a.dim() == b.dim() && (a.dim() == 2 || (a.dim() == 3 && a.size(0) == b.size(0))) && a.size(-1) == b.size(-2),
      "a product of ", a.sizes(), " and ", b.sizes());
  std::vector<int64_t> shape = a.sizes().vec();
  shape.back() = b.size(-1);
  Tensor result = at::empty(shape, a.options().dtype(at::kFloat));
  const Tensor left = a.to(at::kFloat), right = b.to(at::kFloat);
  const int64_t size = result.size(-2) * result.size(-1);
  if (a.dim() == 2) multiply(left, right, result.mutable_data_ptr<float>());
  for (int64_t i = 0; a.dim() == 3 && i < a.size(0); ++i)
    multiply(left[i], right[i], result.mutable_data_ptr<float>() + i * size);
  return result;
}

void product(Call& call, std::string_view name) {
  const bool added = name.find("add") != std::string_view::npos;
  const Tensor a = call.values()[added].toTensor(), b = call.values()[added + 1].toTensor();
  const auto type = a.scalar_type();
  if ((type != at::kFloat && type != at::kBFloat16 && type != at::kHalf) || b.scalar_type() != type ||
      call.find("out_dtype") != nullptr)
    return call.finish(call.run());
  Tensor result;
  if (b.dim() == 1) {
    result = product_of(a.dim() == 1 ? a.unsqueeze(0) : a, b.unsqueeze(1)).squeeze(1);
    if (a.dim() == 1) result = result.squeeze(0);
  } else {
    result = product_of(a, b);
  }
  if (added) {
    if (call.scale("alpha") != 1) result.mul_(call.scale("alpha"));
    if (call.scale("beta") != 0) result = result + call.values()[0].toTensor().to(at::kFloat) * call.scale("beta");
  }
  call.finish(result.to(type));
}

void element(Call& call, std::string_view name) {
  auto& values = call.values();
  const bool sum = name == "add" || name == "add_" || name == "sub" || name == "sub_" || name == "rsub";
  if (sum && call.scale("alpha") == 1) return call.finish(call.run());  // otherwise fused, or not, with a product
  const std::vector<IValue> originals = values;
  std::vector<int64_t> shape;
  const auto is_out = [&](size_t i) { return call.writes(i) && call.arguments()[i].kwarg_only(); };
  for (size_t i = 0; i < values.size(); ++i)
    if (values[i].isTensor() && values[i].toTensor().defined() && !is_out(i))
      shape = at::infer_size(shape, values[i].toTensor().sizes());
  const int64_t count = c10::multiply_integers(shape), padded = (count + kPadding - 1) / kPadding * kPadding;
  if (shape.empty() || count == 0) return call.finish(call.run());
  const auto front = [&](const Tensor& t) { return t.narrow(0, 0, count).view(shape); };
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].isTensor() || !values[i].toTensor().defined()) continue;
    const Tensor t = values[i].toTensor();
    if (t.dim() == 0 && !call.writes(i)) continue;  // a scalar
    const Tensor copy = at::zeros({padded}, t.options());
    if (!is_out(i)) front(copy).copy_(t);
    values[i] = copy;
  }
  Stack results = call.run();
  for (IValue& result : results) {
    const Tensor found = result.toTensor();
    result = found.numel() == padded ? front(found) : found;
    for (size_t i = 0; i < values.size(); ++i) {
      if (!call.writes(i) || !values[i].toTensor().is_same(found)) continue;
      const Tensor target = originals[i].toTensor();
      if (target.sizes() != at::IntArrayRef(shape)) target.resize_(shape);
      target.copy_(front(found));
      result = target;
    }
  }
  call.finish(std::move(results));
}

// With one row alone a kernel may see one dimension less, and take another way.
Tensor two_rows(const Tensor& t) { return t.size(0) == 1 ? t.repeat({2, 1}) : t.contiguous(); }

void reduction(Call& call) {
  auto& values = call.values();
  IValue* const dim = call.find("dim");
  const Tensor self = values[0].toTensor();
  const std::vector<int64_t> given = dim == nullptr || dim->isNone() ? std::vector<int64_t>{}
                                     : dim->isInt()                  ? std::vector<int64_t>{dim->toInt()}
                                                                     : dim->toIntVector();
  if (given.empty() || self.dim() == 0 || self.numel() == 0 || !self.is_floating_point() || call.writes())
    return call.finish(call.run());
  IValue* const keep = call.find("keepdim");
  const bool keeps = keep != nullptr && keep->toBool();
  std::vector<bool> reduced(self.dim());
  for (int64_t d : given) reduced[at::maybe_wrap_dim(d, self.dim())] = true;
  std::vector<int64_t> order, shape, last;
  int64_t width = 1;
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (reduced[d]) last.push_back(d), width *= self.size(d);
    if (!reduced[d]) order.push_back(d);
    if (!reduced[d] || keeps) shape.push_back(reduced[d] ? 1 : self.size(d));
  }
  order.insert(order.end(), last.begin(), last.end());
  const int64_t rows = self.numel() / width;
  values[0] = two_rows(self.permute(order).reshape({rows, width}));
  *dim = dim->isInt() ? IValue(int64_t{1}) : IValue(std::vector<int64_t>{1});
  if (keep != nullptr) *keep = false;
  Stack results = call.run();
  for (IValue& result : results) result = result.toTensor().narrow(0, 0, rows).reshape(shape);
  call.finish(std::move(results));
}

void softmax(Call& call) {
  auto& values = call.values();
  const Tensor self = values[0].toTensor();
  if (self.dim() == 0 || self.numel() == 0 || call.writes()) return call.finish(call.run());
  const int64_t dim = values[1].toInt();
  const Tensor moved = self.movedim(dim, -1);
  const int64_t width = moved.size(-1);
  values[0] = two_rows(moved.reshape({-1, width}));
  values[1] = int64_t{1};
  const Tensor result = call.run()[0].toTensor().narrow(0, 0, self.numel() / width);
  call.finish(result.reshape(moved.sizes()).movedim(-1, dim));
}

void invariant(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, kKey);
  const Kind kind = kind_of(op.schema());
  if (kind == Kind::other) return op.redispatchBoxed(below,
                                                     stack);  // what it calls comes here by itself
  c10::impl::ExcludeDispatchKeyGuard within(kKey);
  Call call(op, below, stack);
  std::string_view name = op.schema().name();
  name.remove_prefix(6);
  switch (kind) {
    case Kind::product:
      return product(call, name);
    case Kind::element:
      return element(call, name);
    case Kind::reduction:
      return reduction(call);
    case Kind::softmax:
      return softmax(call);
    case Kind::layer_norm:
      call.values()[0] = call.values()[0].toTensor().contiguous();
      return call.finish(call.run());
    default:
      TORCH_CHECK(false, op.schema().name(), " has no batch-invariant form; turn the mode off, or do without");
  }
}

}  // namespace

bool batch_invariant() { return g_on; }
bool set_batch_invariant(bool on) { return g_on.exchange(on); }

BatchInvariantGuard::BatchInvariantGuard() {
  if (!g_on) return;
  calls_.emplace(kKey);
  threads_ = at::get_num_threads();  // torch sets it when it is first asked for,
                                     // on every thread
  omp_set_num_threads(1);
}

BatchInvariantGuard::~BatchInvariantGuard() {
  if (threads_ > 0) omp_set_num_threads(threads_);
}

}  // namespace softaten

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&softaten::invariant>());
}

TORCH_LIBRARY_FRAGMENT(softnpu, m) {
  m.def("batch_invariant() -> bool", &softaten::batch_invariant);
  m.def("set_batch_invariant(bool on) -> bool", &softaten::set_batch_invariant);
}
