// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Which operator gets which kernel. torch.ops.softnpu.install() registers once, after torch_npu has:
//   a view, an allocation, a storage operation           torch_npu's own kernel stays
//   an aten operator with a CPU kernel                   run_on_cpu
//   a composite one that torch_npu overrides             torch's own composite again
//   any other operator of torch_npu (aten, npu, atb)     raise_by_name; operator libraries loaded later may override
// Operators that torch_npu does not touch and that have no CPU kernel keep torch's composites.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <mutex>
#include <set>

#include "softaten.h"

namespace softaten {
namespace {

using c10::DispatchKey;
using c10::OperatorHandle;

// Allocation, storage and host-side queries: right as they are, because they need no device operator.
const std::set<std::string>& native_names() {
  static const std::set<std::string> names{
      "aten::empty", "aten::empty_strided", "aten::new_empty_strided", "aten::as_strided", "aten::resize_",
      "aten::resize_as_", "aten::_resize_output_", "aten::set_", "aten::set_data", "aten::is_set_to",
      "aten::record_stream", "aten::is_pinned", "aten::pin_memory", "aten::_pin_memory", "aten::_local_scalar_dense",
      "aten::_has_compatible_shallow_copy_type", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::copy_",
      // npu: formats, shapes and settings; what they lead to on the device fails by itself
      "npu::get_npu_format", "npu::get_storage_size", "npu::npu_format_cast", "npu::npu_format_cast_",
      "npu::_npu_format_cast", "npu::empty_with_format", "npu::unsafe_empty_with_format",
      "npu::empty_with_swapped_memory", "npu::npu_change_data_ptr", "npu::copy_memory_", "npu::npu_reshape",
      "npu::npu_prefetch", "npu::set_op_timeout_ms", "npu::super_kernel_scope_begin", "npu::super_kernel_scope_end",
      "npu::attention_worker_scheduler", "npu::attention_worker_scheduler_", "npu::ffn_worker_scheduler",
      "npu::ffn_worker_scheduler_"};
  return names;
}

bool is_view(const OperatorHandle& op) {
  if (op.hasTag(at::Tag::inplace_view)) return true;
  for (const auto& r : op.schema().returns())
    if (r.alias_info() != nullptr && !r.alias_info()->isWrite()) return true;
  return false;
}

template <DispatchKey key>
void redirect(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  op.callBoxedForDispatchKey(key, *stack);
}

struct Registrar {
  std::map<std::string, std::unique_ptr<torch::Library>>
      libraries;  // kept for ever: dropping one undoes its registrations
  int64_t on_cpu = 0, composite = 0, raising = 0;

  void impl(const OperatorHandle& op, DispatchKey key, torch::CppFunction function) {
    const std::string ns = op.schema().getNamespace().has_value() ? std::string(*op.schema().getNamespace()) : "aten";
    auto& library = libraries[ns];
    if (library == nullptr)
      library = std::make_unique<torch::Library>(torch::Library::IMPL, ns, std::nullopt, __FILE__, __LINE__);
    library->impl(c10::toString(op.operator_name()).c_str(), torch::dispatch(key, std::move(function)));
  }

  void add(const OperatorHandle& op) {
    const std::string& name = op.schema().name();
    const bool aten = name.rfind("aten::", 0) == 0;
    const bool own = op.hasKernelForDispatchKey(DispatchKey::PrivateUse1);
    const bool own_autograd = op.hasKernelForDispatchKey(DispatchKey::AutogradPrivateUse1);
    if (native_names().count(name) != 0 || is_view(op)) return;
    if (!aten) {
      if (!own || (name.rfind("npu::", 0) != 0 && name.rfind("atb::", 0) != 0)) return;
      // Shape functions compute on the host.
      if (name.find("_infer_output") != std::string::npos || name.find("_get_max_workspace") != std::string::npos)
        return;
      impl(op, DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<&raise_by_name>());
      ++raising;
      return;
    }
    if (op.hasKernelForDispatchKey(DispatchKey::CPU) || name == "aten::convolution_overrideable") {
      impl(op, DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
      if (own_autograd && op.hasKernelForDispatchKey(DispatchKey::Autograd))
        impl(op, DispatchKey::AutogradPrivateUse1,
             torch::CppFunction::makeFromBoxedFunction<&redirect<DispatchKey::Autograd>>());
      ++on_cpu;
    } else if (!own && !own_autograd) {
      return;
    } else if (op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
      constexpr auto composite_kernel = &redirect<DispatchKey::CompositeImplicitAutograd>;
      impl(op, DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<composite_kernel>());
      impl(op, DispatchKey::AutogradPrivateUse1, torch::CppFunction::makeFromBoxedFunction<composite_kernel>());
      ++composite;
    } else if (op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd)) {
      impl(op, DispatchKey::PrivateUse1,
           torch::CppFunction::makeFromBoxedFunction<&redirect<DispatchKey::CompositeExplicitAutograd>>());
      if (own_autograd && op.hasKernelForDispatchKey(DispatchKey::Autograd))
        impl(op, DispatchKey::AutogradPrivateUse1,
             torch::CppFunction::makeFromBoxedFunction<&redirect<DispatchKey::Autograd>>());
      ++composite;
    } else if (op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
      impl(op, DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
      ++on_cpu;
    } else {
      impl(op, DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<&raise_by_name>());
      ++raising;
    }
  }
};

// torch_npu's own zeros takes pin_memory without looking at it, and vllm-ascend passes it for device tensors
// (spec_decode/llm_base_proposer.py: slot_mapping_group); torch's composite would refuse it.
at::Tensor zeros(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool>) {
  return at::empty(size, at::TensorOptions().dtype(dtype).layout(layout).device(device)).zero_();
}

// torch warns once that kernels are overridden, which is the point here.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// [operators run on the CPU, composites restored, operators that raise]
std::vector<int64_t> install() {
  static std::mutex mutex;
  static Registrar* registrar = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (registrar == nullptr) {
    auto* made = new Registrar;
    Quiet quiet;
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames())
      if (auto op = dispatcher.findSchema(name)) made->add(*op);
    auto copy = dispatcher.findSchemaOrThrow("aten::copy_", "");
    made->impl(copy, DispatchKey::PrivateUse1, torch::CppFunction(TORCH_FN(copy_)));
    auto zero = dispatcher.findSchemaOrThrow("aten::zeros", "");
    made->impl(zero, DispatchKey::PrivateUse1, torch::CppFunction(TORCH_FN(zeros)));
    registrar = made;
  }
  return {registrar->on_cpu, registrar->composite, registrar->raising};
}

// [calls queued on a stream, calls that waited for the stream] so far
std::vector<int64_t> calls() {
  return {static_cast<int64_t>(queued_calls()), static_cast<int64_t>(waiting_calls()),
          static_cast<int64_t>(remembered_calls())};
}

}  // namespace
}  // namespace softaten

TORCH_LIBRARY_FRAGMENT(softnpu, m) {
  m.def("install() -> int[]", &softaten::install);
  m.def("calls() -> int[]", &softaten::calls);
  m.def("hang_host_queue() -> ()", &softaten::hang_host_queue);
  m.def("release_host_queue() -> ()", &softaten::release_host_queue);
}
