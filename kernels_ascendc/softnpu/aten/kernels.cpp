// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The boxed kernels: one function runs every operator. See softaten.h for the plan.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <unordered_set>

#include "batch_invariant.h"
#include "softaten.h"

namespace softaten {
namespace {

using c10::IValue;
using c10::OperatorHandle;

std::atomic<uint64_t> g_queued{0}, g_waiting{0}, g_remembered{0};

bool on_device(const at::Tensor& t) { return t.defined() && t.is_privateuseone(); }

// Operators that take host tensors (indices, values) beside a device tensor; for the rest that is a mistake of the
// caller.
bool takes_host_tensors(const std::string& name) {
  static const std::unordered_set<std::string> names{"aten::index",         "aten::index_put",
                                                     "aten::index_put_",    "aten::_index_put_impl_",
                                                     "aten::_unsafe_index", "aten::_unsafe_index_put"};
  return names.count(name) != 0;
}

// The CPU has the convolution under another name; schemas are equal.
OperatorHandle cpu_equivalent(const OperatorHandle& op) {
  if (op.schema().name() != "aten::convolution_overrideable") return op;
  return c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", op.schema().overload_name().c_str());
}

// Operators whose meta kernel promises other shapes than the CPU kernel gives: they wait for the stream.
bool meta_misleads(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::native_batch_norm", "aten::_native_batch_norm_legit",    "aten::_batch_norm_with_update",
      "aten::_embedding_bag",    "aten::_embedding_bag_forward_only", "aten::_native_batch_norm_legit_no_training"};
  return names.count(name) != 0;
}

// Rebuilds a stack with every tensor, tensor list and device replaced.
template <class TensorFn>
IValue map_value(const IValue& value, c10::DeviceType device, const TensorFn& tensor) {
  if (value.isTensor()) return tensor(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& t : value.toTensorVector()) mapped.push_back(tensor(t));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      mapped.push_back(t.has_value() ? std::optional<at::Tensor>(tensor(*t)) : std::nullopt);
    return mapped;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) return IValue(c10::Device(device));
  return value;
}

struct Call {
  const OperatorHandle cpu_op;  // what the CPU and meta kernels are asked for; mostly the operator itself
  const c10::FunctionSchema& schema;
  std::string name;       // "aten::add"
  std::string full_name;  // "aten::add.Tensor"
  std::vector<IValue> arguments;
  c10::Device device{c10::DeviceType::PrivateUse1, -1};

  Call(const OperatorHandle& handle, Stack* stack)
      : cpu_op(cpu_equivalent(handle)),
        schema(handle.schema()),
        name(schema.name()),
        full_name(c10::toString(handle.operator_name())) {
    arguments = torch::jit::pop(*stack, schema.arguments().size());
    check_devices();
  }

  template <class F>
  void each_tensor_of(size_t argument, const F& f) const {
    map_value(arguments[argument], c10::DeviceType::CPU, [&](const at::Tensor& t) {
      if (t.defined()) f(t);
      return t;
    });
  }
  template <class F>
  void each_tensor(const F& f) const {
    for (size_t i = 0; i < arguments.size(); ++i) each_tensor_of(i, f);
  }

  void check_devices() {
    each_tensor([&](const at::Tensor& t) {
      if (!t.is_privateuseone()) return;
      if (device.index() < 0) device = t.device();
      TORCH_CHECK(t.device() == device, full_name, ": expected all tensors on the same device, found ", device, " and ",
                  t.device());
    });
    if (device.index() < 0) {
      for (const IValue& value : arguments)
        if (value.isDevice() && value.toDevice().is_privateuseone()) device = value.toDevice();
      if (device.index() < 0) device = c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice();
    }
    // A host scalar may be read. What is written must be on the device: the kernel would write a snapshot, and the
    // caller would never see it. What is indexed must be where its indices are.
    const bool host_tensors = takes_host_tensors(name);
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool device_only = writes(i) || (host_tensors && i == 0);
      each_tensor_of(i, [&](const at::Tensor& t) {
        TORCH_CHECK(t.is_privateuseone() || (!device_only && (t.dim() == 0 || host_tensors)), full_name,
                    ": expected all tensors on the same device, found ", device, " and ", t.device(), " (argument '",
                    schema.arguments()[i].name(), "')");
      });
    }
  }

  bool writes(size_t argument) const {
    const auto* alias = schema.arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }
  Accesses accesses() const {
    Accesses all;
    for (size_t i = 0; i < arguments.size(); ++i)
      each_tensor_of(i, [&](const at::Tensor& t) { add_access(t, writes(i), &all); });
    return all;
  }
  bool is_out(size_t argument) const { return writes(argument) && schema.arguments()[argument].is_out(); }

  // Whether another argument has the storage of this one, which is a tensor.
  bool shares_storage(size_t argument) const {
    const auto* storage = arguments[argument].toTensor().storage().unsafeGetStorageImpl();
    bool shares = false;
    for (size_t i = 0; i < arguments.size(); ++i)
      if (i != argument)
        each_tensor_of(
            i, [&](const at::Tensor& t) { shares |= on_device(t) && t.storage().unsafeGetStorageImpl() == storage; });
    return shares;
  }
  bool returns_tensors_only() const {
    for (const auto& r : schema.returns()) {
      const auto& type = *r.type();
      if (type.kind() == c10::TypeKind::TensorType) continue;
      if (type.kind() == c10::TypeKind::ListType &&
          type.cast<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType)
        continue;
      return false;
    }
    return true;
  }

  // The argument that return value `i` is, or -1 when it is a new tensor.
  int returned_argument(size_t i) const {
    const auto* returned = schema.returns()[i].alias_info();
    if (returned == nullptr || !returned->isWrite()) return -1;
    for (size_t j = 0; j < arguments.size(); ++j) {
      const auto* written = schema.arguments()[j].alias_info();
      if (written != nullptr && written->beforeSets() == returned->beforeSets()) return static_cast<int>(j);
    }
    TORCH_CHECK(false, full_name, ": its schema returns a written argument that it does not have");
  }
};

// A CPU generator for one call, seeded by the device generator, whose offset moves on: torch.npu.manual_seed repeats a
// run.
at::Generator cpu_generator(const Call& call, const IValue& given) {
  at::Generator device_generator =
      given.isNone() ? at::globalContext().defaultGenerator(call.device) : given.toGenerator();
  if (device_generator.device().is_cpu()) return device_generator;
  std::lock_guard<std::mutex> lock(device_generator.mutex());
  const uint64_t offset = device_generator.get_offset();
  device_generator.set_offset(offset + 4);
  return at::make_generator<at::CPUGeneratorImpl>(device_generator.current_seed() ^ (offset * 0x9E3779B97F4A7C15ull));
}

Stack cpu_arguments(const Call& call, Aliases& aliases, bool snapshot_host_tensors) {
  Stack mapped;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const IValue& value = call.arguments[i];
    const auto& type = *call.schema.arguments()[i].type();
    const bool generator =
        type.kind() == c10::TypeKind::GeneratorType ||
        (type.kind() == c10::TypeKind::OptionalType &&
         type.castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
    if (generator) {
      mapped.emplace_back(cpu_generator(call, value));
      continue;
    }
    mapped.push_back(map_value(value, c10::DeviceType::CPU, [&](const at::Tensor& t) -> at::Tensor {
      if (on_device(t)) return aliases.of(t);
      // The caller may change a host tensor before the queued kernel reads it. It may also have a Python object, which
      // the stream's thread could only release with Python's global lock: a deadlock when the lock's holder waits for
      // the stream.
      if (t.defined() && snapshot_host_tensors) {
        at::Tensor copy = t.clone();
        if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
        return copy;
      }
      return t;
    }));
  }
  return mapped;
}

bool shape_depends_on_data(const Call& call) {
  if (call.cpu_op.hasTag(at::Tag::data_dependent_output)) return true;
  if (!call.cpu_op.hasTag(at::Tag::dynamic_output_shape)) return false;
  if (call.name != "aten::index" && call.name != "aten::_unsafe_index") return true;
  // Indexing has a dynamic shape only with masks.
  bool masks = false;
  for (const std::optional<at::Tensor>& index : call.arguments[1].toOptionalTensorVector())
    masks |= index.has_value() && index->defined() &&
             (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
  return masks;
}

// What the meta kernels said before. Most of them are Python (torch._refs), and cost more than the operator itself; an
// engine asks the same thing in every step. What they say is a function of the arguments without the tensors' contents
// and of the default dtype, as long as nobody
// registers another meta kernel: what was asked before is not asked again. Only results are kept, not refusals.
class Remembered {
 public:
  // The question as bytes; empty if it cannot be written down.
  static std::string question(const Call& call) {
    // Our own operators refuse by waivers, which change; and their meta kernels cost nothing.
    if (call.name.rfind("aten::", 0) != 0) return {};
    std::string key = call.full_name;
    add(&key, static_cast<int64_t>(at::get_default_dtype_as_scalartype()));
    std::vector<const void*> seen;  // a tensor that is given twice is one tensor
    for (const IValue& value : call.arguments)
      if (!add_value(&key, value, &seen)) return {};
    return key;
  }

  bool find(const std::string& key, Stack* results) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = answers_.find(key);
    if (found == answers_.end()) return false;
    *results = found->second;
    return true;
  }

  void keep(const std::string& key, const Stack& results) {
    // Without the tensors' Python objects, which only a thread with Python's global lock may release.
    Stack copies;
    for (const IValue& value : results)
      copies.push_back(map_value(value, c10::DeviceType::Meta, [](const at::Tensor& t) {
        return t.defined() ? at::Tensor(at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type())) : t;
      }));
    std::lock_guard<std::mutex> lock(mutex_);
    if (answers_.size() == kMost) answers_.clear();
    answers_.emplace(key, std::move(copies));
  }

 private:
  static constexpr size_t kMost = 1 << 15;

  template <class T>
  static void add(std::string* key, const T& value) {
    key->append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  static void add(std::string* key, at::IntArrayRef values) {
    add(key, values.size());
    for (const int64_t value : values) add(key, value);
  }

  static bool add_tensor(std::string* key, const at::Tensor& t, std::vector<const void*>* seen) {
    const auto* impl = t.unsafeGetTensorImpl();
    add(key, std::find(seen->begin(), seen->end(), impl) - seen->begin());
    seen->push_back(impl);
    add(key, t.defined());
    if (!t.defined()) return true;
    // Of a host tensor the contents may matter; those of a number are written down.
    if (!on_device(t) && !(impl->is_wrapped_number() && t.dim() == 0)) return false;
    add(key, t.scalar_type());
    add(key, impl->is_wrapped_number());
    add(key, on_device(t));
    if (on_device(t)) {
      add(key, t.sizes());
      add(key, t.strides());
    } else {
      key->append(static_cast<const char*>(t.const_data_ptr()), t.element_size());
    }
    return true;
  }

  static bool add_value(std::string* key, const IValue& value, std::vector<const void*>* seen) {
    key->append(value.tagKind());
    key->push_back('\0');
    if (value.isNone() || value.isGenerator()) return true;
    if (value.isTensor()) return add_tensor(key, value.toTensor(), seen);
    if (value.isInt()) return add(key, value.toInt()), true;
    if (value.isDouble()) return add(key, value.toDouble()), true;
    if (value.isBool()) return add(key, value.toBool()), true;
    if (value.isComplexDouble()) return add(key, value.toComplexDouble()), true;
    if (value.isDevice()) return add(key, value.toDevice().type()), true;
    if (value.isString()) {
      const std::string& text = value.toStringRef();
      add(key, text.size());
      key->append(text);
      return true;
    }
    if (value.isList()) {
      const auto list = value.toListRef();
      add(key, list.size());
      for (const IValue& each : list)
        if (!add_value(key, each, seen)) return false;
      return true;
    }
    return false;
  }

  std::mutex mutex_;
  std::unordered_map<std::string, Stack> answers_;
};

Remembered& remembered() {
  static auto* all = new Remembered;  // never destroyed: a stream's thread may outlive static objects
  return *all;
}

void call_meta(const Call& call, Stack* results) {
  const std::string question = Remembered::question(call);
  if (!question.empty() && remembered().find(question, results)) {
    ++g_remembered;
    return;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  std::unordered_map<const void*, at::Tensor> metas;
  Stack arguments;
  for (const IValue& value : call.arguments) {
    if (value.isGenerator()) {
      arguments.emplace_back();
      continue;
    }
    arguments.push_back(map_value(value, c10::DeviceType::Meta, [&](const at::Tensor& t) -> at::Tensor {
      if (!on_device(t)) return t;
      auto& meta = metas[t.unsafeGetTensorImpl()];
      if (!meta.defined()) meta = meta_of(t);
      return meta;
    }));
  }
  call.cpu_op.callBoxed(arguments);
  *results = std::move(arguments);
  if (!question.empty() && call.returns_tensors_only()) remembered().keep(question, *results);
}

// Runs the meta kernel. False when there is none or it cannot tell: then the CPU kernel has the word.
bool run_meta(const Call& call, Stack* results) {
  if (shape_depends_on_data(call) || meta_misleads(call.name)) return false;
  try {
    call_meta(call, results);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Only the CPU kernel knows whether a written argument that is read as well may be resized: mostly it refuses. Resized
// here, the argument would be read in its new shape, unfilled.
bool resizes_what_it_reads(const Call& call, const Stack& metas) {
  for (size_t i = 0; i < metas.size(); ++i) {
    const int argument = call.returned_argument(i);
    if (argument < 0 || !call.arguments[argument].isTensor()) continue;
    if (call.arguments[argument].toTensor().sizes() != metas[i].toTensor().sizes() &&
        (!call.is_out(argument) || call.shares_storage(argument)))
      return true;
  }
  return false;
}

// The CPU view of a written argument, with the layout of the device tensor behind it.
class WrittenView {
 public:
  explicit WrittenView(const at::Tensor& view)
      : view_(view),
        sizes_(view.sizes().vec()),
        strides_(view.strides().vec()),
        offset_(view.storage_offset()),
        conj_(view.is_conj()),
        neg_(view.is_neg()) {}

  // A CPU kernel may leave its result in another layout, or conjugated or negated by a bit of the view, which the
  // device tensor does not get: bring the memory to what the device tensor says.
  void settle() const {
    TORCH_CHECK(view_.sizes() == at::IntArrayRef(sizes_), "a written argument of shape ", at::IntArrayRef(sizes_),
                " was resized to ", view_.sizes());
    if (view_.strides() == at::IntArrayRef(strides_) && view_.storage_offset() == offset_ && view_.is_conj() == conj_ &&
        view_.is_neg() == neg_)
      return;
    const at::Tensor value = view_.clone();
    auto* impl = view_.unsafeGetTensorImpl();
    impl->set_storage_offset(offset_);
    impl->set_sizes_and_strides(sizes_, strides_);
    impl->_set_conj(conj_);
    impl->_set_neg(neg_);
    view_.copy_(value);
  }

 private:
  at::Tensor view_;
  std::vector<int64_t> sizes_, strides_;
  int64_t offset_;
  bool conj_, neg_;
};

at::Tensor allocate_like(const at::Tensor& t, c10::Device device) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
}

// Writes a CPU result into the device result. The meta kernel promised the layout; a broken promise must not pass.
void store(const at::Tensor& target, const at::Tensor& value) {
  TORCH_CHECK(value.defined() == target.defined(),
              "the meta kernel and the CPU kernel disagree about an undefined result");
  if (!value.defined()) return;
  // The device keeps statistics in FP32 where the CPU has them in the input's type: widening loses nothing.
  const bool widens =
      target.is_floating_point() && value.is_floating_point() && target.element_size() > value.element_size();
  TORCH_CHECK(target.sizes() == value.sizes() && (target.dtype() == value.dtype() || widens),
              "the meta kernel promised ", target.sizes(), " ", target.dtype(), ", the CPU kernel gave ", value.sizes(),
              " ", value.dtype());
  target.copy_(value);
}

std::vector<at::Tensor> flat_tensors(const Stack& values) {
  std::vector<at::Tensor> flat;
  for (const IValue& value : values) {
    if (value.isTensor()) {
      flat.push_back(value.toTensor());
    } else {
      for (const at::Tensor& t : value.toTensorVector()) flat.push_back(t);
    }
  }
  return flat;
}

// New results are on the device now, and get their contents when the stream gets there; written arguments are returned.
// Out arguments take the shape that the meta kernel gave theirs.
void queue(const Call& call, const CurrentStream& stream, const Stack& metas, Stack* stack) {
  Aliases aliases;
  Accesses accesses;
  const bool wanted = stream.wants_accesses();
  auto targets = std::make_shared<std::vector<at::Tensor>>();  // CPU views of the new results
  auto sources = std::make_shared<std::vector<size_t>>();      // which return values the new results come from
  for (size_t i = 0; i < metas.size(); ++i) {
    const int argument = call.returned_argument(i);
    if (argument >= 0) {
      const IValue& written = call.arguments[argument];
      if (written.isTensor() && call.is_out(argument) && written.toTensor().sizes() != metas[i].toTensor().sizes())
        written.toTensor().resize_(metas[i].toTensor().sizes());
      stack->push_back(written);
      continue;
    }
    sources->push_back(i);
    stack->push_back(map_value(metas[i], c10::DeviceType::PrivateUse1, [&](const at::Tensor& meta) -> at::Tensor {
      if (!meta.defined()) {
        targets->emplace_back();
        return meta;
      }
      at::Tensor result = allocate_like(meta, call.device);
      targets->push_back(aliases.of(result));
      if (wanted) add_access(result, true, &accesses);
      return result;
    }));
  }
  if (wanted) {
    const Accesses given = call.accesses();
    accesses.insert(accesses.end(), given.begin(), given.end());
  }
  auto arguments = std::make_shared<Stack>(cpu_arguments(call, aliases, true));
  auto written = std::make_shared<std::vector<WrittenView>>();
  for (size_t i = 0; i < call.arguments.size(); ++i)
    if (call.writes(i)) call.each_tensor_of(i, [&](const at::Tensor& t) { written->emplace_back(aliases.of(t)); });
  const OperatorHandle op = call.cpu_op;
  stream.push(call.full_name, std::move(accesses), [op, arguments, targets, sources, written, name = call.full_name] {
    c10::InferenceMode guard;
    const BatchInvariantGuard rows;
    const auto failed = [&](const char* why) { throw std::runtime_error(name + ": " + why); };
    try {
      Stack values = *arguments;
      op.callBoxed(values);
      for (const WrittenView& view : *written) view.settle();
      Stack fresh;
      for (size_t i : *sources) fresh.push_back(values[i]);
      const auto results = flat_tensors(fresh);
      TORCH_CHECK(results.size() == targets->size(),
                  "the meta kernel and the CPU kernel disagree about the number of results");
      for (size_t i = 0; i < results.size(); ++i) store((*targets)[i], results[i]);
    } catch (const c10::Error& e) {
      failed(e.what_without_backtrace());
    } catch (const std::exception& e) {
      failed(e.what());
    }
  });
}

// The last resort: wait for the stream, run in the caller, copy the results to the device.
void run_now(const Call& call, const CurrentStream& stream, Stack* stack) {
  TORCH_CHECK(!stream.capturing(), call.full_name,
              " cannot be captured: its result depends on data, or it has no meta kernel");
  const bool wanted = stream.wants_accesses();
  if (wanted) stream.ran(call.full_name, call.accesses());
  stream.synchronize(call.full_name);
  Accesses results;  // of memory that the call allocates
  Aliases aliases;
  Stack values = cpu_arguments(call, aliases, false);
  // Out arguments may be resized by the kernel: they get memory of their own, and are copied to the device. Not those
  // that share a storage: the kernel must see that to refuse it, or to read what it overwrites.
  std::vector<std::pair<at::Tensor, at::Tensor>> outs;  // device tensor, CPU tensor
  std::vector<WrittenView> written;
  for (size_t i = 0; i < values.size(); ++i) {
    if (call.is_out(i)) {
      TORCH_CHECK(values[i].isTensor(), call.full_name, ": lists of out tensors are not supported on the software NPU");
      const at::Tensor out = call.arguments[i].toTensor();
      if (!call.shares_storage(i))
        values[i] = at::empty_strided(out.sizes(), out.strides(), out.options().device(c10::kCPU));
      outs.emplace_back(out, values[i].toTensor());
    } else if (call.writes(i)) {
      call.each_tensor_of(i, [&](const at::Tensor& t) { written.emplace_back(aliases.of(t)); });
    }
  }
  {
    c10::InferenceMode guard;
    const BatchInvariantGuard rows;
    try {
      call.cpu_op.callBoxed(values);
    } catch (const c10::Error& e) {
      const std::string why = e.what_without_backtrace();
      TORCH_CHECK(why.find("not resizable") == std::string::npos, call.full_name,
                  ": a written argument that is also read has another shape than the result, and cannot grow; give the "
                  "result memory of its own");
      throw;
    }
    for (const WrittenView& view : written) view.settle();
    // Before any device tensor is resized, and with it moved.
    for (auto& [out, result] : outs) result = result.clone();
  }
  for (auto& [out, result] : outs) {
    if (out.sizes() != result.sizes()) out.resize_(result.sizes());
    if (wanted) add_access(out, true, &results);
    c10::InferenceMode guard;
    Aliases target;
    target.of(out).copy_(result);
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (const int argument = call.returned_argument(i); argument >= 0) {
      stack->push_back(call.arguments[argument]);
      continue;
    }
    stack->push_back(map_value(values[i], c10::DeviceType::PrivateUse1, [&](const at::Tensor& t) -> at::Tensor {
      if (!t.defined()) return t;
      at::Tensor result = allocate_like(t, call.device);
      if (wanted) add_access(result, true, &results);
      c10::InferenceMode guard;
      Aliases target;
      target.of(result).copy_(t);
      return result;
    }));
  }
  if (results.empty()) return;
  stream.ran(call.full_name, results);
  stream.synchronize(call.full_name);  // the host has seen it done
}

}  // namespace

at::Tensor Aliases::of(const at::Tensor& t) {
  at::Tensor& alias = tensors_[t.unsafeGetTensorImpl()];
  if (alias.defined()) return alias;
  const auto* impl = t.storage().unsafeGetStorageImpl();
  auto found = storages_.find(impl);
  if (found == storages_.end()) {
    // Not owning: the caching allocator orders reuse by stream, as on the device.
    c10::Storage view(c10::Storage::use_byte_size_t(), impl->nbytes(),
                      c10::DataPtr(const_cast<void*>(impl->data()), c10::Device(c10::kCPU)), nullptr, false);
    found = storages_.emplace(impl, std::move(view)).first;
  }
  alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* made = alias.unsafeGetTensorImpl();
  made->set_storage_offset(t.storage_offset());
  made->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made->set_wrapped_number(true);
  if (t.is_conj()) made->_set_conj(true);
  if (t.is_neg()) made->_set_neg(true);
  return alias;
}

at::Tensor meta_of(const at::Tensor& t) {
  at::Tensor meta = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

void run_on_cpu(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Call call(op, stack);
  const c10::DeviceGuard guard(call.device);
  const CurrentStream stream(call.device.index());
  Stack metas;
  if (!call.returns_tensors_only() || !run_meta(call, &metas) || resizes_what_it_reads(call, metas)) {
    ++g_waiting;
    return run_now(call, stream, stack);
  }
  ++g_queued;
  queue(call, stream, metas, stack);
}

void run_by_contract(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Call call(op, stack);
  const c10::DeviceGuard guard(call.device);
  const CurrentStream stream(call.device.index());
  Stack metas;
  call_meta(call, &metas);
  ++g_queued;
  queue(call, stream, metas, stack);
}

void raise_by_name(const OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, c10::toString(op.operator_name()),
      " has no body on the software NPU: no CPU kernel stands in for this device operator. Register one for "
      "PrivateUse1 (kernels_ascendc/softnpu/npu shows how), or run it on the CPU.");
}

uint64_t queued_calls() { return g_queued; }
uint64_t waiting_calls() { return g_waiting; }
uint64_t remembered_calls() { return g_remembered; }

}  // namespace softaten
