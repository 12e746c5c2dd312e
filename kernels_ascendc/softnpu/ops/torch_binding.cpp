// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// torch.ops._C_ascend.{compressor, compressor_metadata, compressor_metadata_out} with the schemas of vllm-ascend
// 0.23.0, and torch.ops.softnpu.* for waivers, options and counters.
//
//   PrivateUse1  checks on the host, then queues the body on the current stream (softnpu_push_task): cu_seqlens,
//   start_pos
//                and the tables are read when the stream gets there, as by a real launch. Tensors are taken by address:
//                what keeps them valid is the stream order of the caching allocator, here as there. A fault is thrown
//                by the body and becomes an error of the device, reported at the next synchronisation.
//   CPU          the same body, at once; a fault is a RuntimeError.
//   Meta         the shapes of the stock meta functions (none for compressor_metadata_out, which has none).
// The stream comes from c10 and softnpu_push_task from libascendcl.so at run time, so this library also loads without
// either.

#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "compressor.h"
#include "metadata.h"
#include "settings.h"
#include "softnpu.h"

namespace {

using at::Tensor;

// ---------------------------------------------------------------------------------------------- arguments

int dtype_code(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return SOFTNPU_FLOAT32;
    case at::kHalf:
      return SOFTNPU_FLOAT16;
    case at::kBFloat16:
      return SOFTNPU_BFLOAT16;
    case at::kInt:
      return SOFTNPU_INT32;
    default:
      return SOFTNPU_OTHER;
  }
}

SoftnpuTensor describe(const char* name, const Tensor& tensor) {
  TORCH_CHECK(tensor.dim() <= 4, name, ": found ", tensor.dim(), " dims, expected at most 4");
  SoftnpuTensor t{};
  t.data = tensor.data_ptr();
  t.present = 1;
  t.dtype = dtype_code(tensor.scalar_type());
  t.dims = static_cast<int32_t>(tensor.dim());
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    t.shape[i] = tensor.size(i);
    t.stride[i] = tensor.stride(i);
  }
  return t;
}

SoftnpuTensor describe(const char* name, const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? describe(name, *tensor) : SoftnpuTensor{};
}

void expect_device(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  TORCH_CHECK(tensor.device() == like.device(), op, ": ", name, ": found ", tensor.device(), ", expected ",
              like.device(), ", the device of the first argument");
}

std::optional<Tensor> contiguous(const std::optional<Tensor>& tensor) {
  if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
  return tensor->contiguous();
}

// ---------------------------------------------------------------------------------------------- launching

// What this library uses of the software NPU.
struct Device {
  decltype(&softnpu_push_task) push;
  decltype(&softnpu_wants_accesses) wants_accesses;
  decltype(&softnpu_found_access) found_access;
  decltype(&softnpu_races_on) races_on;
};

const Device& software_npu() {
  static const Device found = [] {
    // torch loads it with local scope, so the default search order does not see it.
    void* library = dlopen("libascendcl.so", RTLD_NOW | RTLD_NOLOAD);
    const auto symbol = [library](auto*& function, const char* name) {
      if (library != nullptr)
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    Device device{};
    symbol(device.push, "softnpu_push_task");
    symbol(device.wants_accesses, "softnpu_wants_accesses");
    symbol(device.found_access, "softnpu_found_access");
    symbol(device.races_on, "softnpu_races_on");
    return device;
  }();
  TORCH_CHECK(found.push != nullptr,
              "softnpu: libascendcl.so is not the software NPU (no softnpu_push_task): start the process with "
              "python -m afd_dsv4.softnpu -- CMD");
  return found;
}

// The bytes of a tensor, for the race detector: dense, or rows of one length and distance; else all it spans.
void add_access(const SoftnpuTensor& t, bool writes, std::vector<SoftnpuAccess>* out) {
  if (!t.present) return;
  const int64_t size = t.dtype == SOFTNPU_FLOAT32 || t.dtype == SOFTNPU_INT32 ? 4 : 2;
  int64_t run = 1, span = 1, rows = 1, stride = 0;
  bool regular = true;
  for (int i = t.dims - 1; i >= 0; --i) {
    if (t.shape[i] == 0) return;
    if (t.shape[i] == 1) continue;
    span += (t.shape[i] - 1) * t.stride[i];
    if (rows == 1 && t.stride[i] == run) {
      run *= t.shape[i];
    } else if (rows == 1 || t.stride[i] == rows * stride) {
      if (rows == 1) stride = t.stride[i];
      rows *= t.shape[i];
    } else {
      regular = false;
    }
  }
  const auto bytes = [&](int64_t elements) { return static_cast<uint64_t>(elements * size); };
  out->push_back(regular ? SoftnpuAccess{t.data, bytes(run), static_cast<uint64_t>(rows), bytes(stride), writes, 0}
                         : SoftnpuAccess{t.data, bytes(span), 1, 0, writes, 0});
}

// What a queued body is known to touch; the pages of the compressor's state are known when it runs.
std::vector<SoftnpuAccess> accesses_of(const SoftnpuCompressorArgs& a) {
  std::vector<SoftnpuAccess> all;
  for (const SoftnpuTensor* t : {&a.x, &a.wkv, &a.wgate, &a.ape, &a.norm_weight, &a.rope_sin, &a.rope_cos,
                                 &a.state_block_table, &a.cu_seqlens, &a.start_pos})
    add_access(*t, false, &all);
  add_access(a.out, true, &all);
  return all;
}
std::vector<SoftnpuAccess> accesses_of(const SoftnpuMetadataArgs& a) {
  std::vector<SoftnpuAccess> all;
  for (const SoftnpuTensor* t : {&a.rope_cos, &a.rope_sin, &a.cu_seqlens, &a.start_pos, &a.kv_block_table})
    add_access(*t, false, &all);
  for (const SoftnpuTensor* t : {&a.compress_cos, &a.compress_sin, &a.slot_mapping}) add_access(*t, true, &all);
  return all;
}

void find_more(const SoftnpuCompressorArgs& args) {
  softnpu_compressor_pages(
      &args,
      [](void* context, int64_t page, int writes) {
        const SoftnpuTensor& state = static_cast<const SoftnpuCompressorArgs*>(context)->state_cache;
        const SoftnpuAccess access{static_cast<const float*>(state.data) + page * state.stride[0],
                                   static_cast<uint64_t>(state.shape[1] * state.shape[2]) * sizeof(float),
                                   1,
                                   0,
                                   writes,
                                   0};
        software_npu().found_access(&access, 1);
      },
      const_cast<SoftnpuCompressorArgs*>(&args));
}
void find_more(const SoftnpuMetadataArgs&) {}

template <typename Args>
struct Body {
  Args args;
  int (*run)(const Args*);
};

template <typename Args>
void run_body(void* pointer) {
  const auto* body = static_cast<Body<Args>*>(pointer);
  if (software_npu().races_on() != 0) find_more(body->args);
  if (body->run(&body->args) != SOFTNPU_OK) throw std::runtime_error(softnpu_last_error());
}

template <typename Args>
void launch(const char* name, const at::Device& device, int (*run)(const Args*), const Args& args) {
  if (device.is_cpu()) {
    TORCH_CHECK(run(&args) == SOFTNPU_OK, softnpu_last_error());
    return;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  void* stream = guard.getStream(device).native_handle();
  const Device& npu = software_npu();
  std::vector<SoftnpuAccess> accesses;
  if (npu.wants_accesses(stream) != 0) accesses = accesses_of(args);
  npu.push(
      stream, name, run_body<Args>, new Body<Args>{args, run},
      [](void* pointer) { delete static_cast<Body<Args>*>(pointer); }, accesses.data(), accesses.size(),
      std::is_same_v<Args, SoftnpuCompressorArgs>);
}

// ---------------------------------------------------------------------------------------------- compressor

Tensor compressor_result(const Tensor& x, const Tensor& norm_weight, const Tensor& rope_sin, int64_t cmp_ratio) {
  TORCH_CHECK(x.dim() == 2 || x.dim() == 3, "compressor: x: found ", x.dim(), " dims, expected 2 or 3");
  TORCH_CHECK(norm_weight.dim() == 1, "compressor: norm_weight: found ", norm_weight.dim(), " dims, expected 1");
  TORCH_CHECK(rope_sin.dim() == x.dim(), "compressor: rope_sin: found ", rope_sin.dim(), " dims, expected ", x.dim(),
              " (as x)");
  TORCH_CHECK(cmp_ratio > 0, "compressor: cmp_ratio: found ", cmp_ratio, ", expected greater than 0");
  if (x.dim() == 3) {
    return at::empty_symint({x.sym_size(0), (x.sym_size(1) + cmp_ratio - 1) / cmp_ratio, norm_weight.sym_size(0)},
                            x.options());
  }
  return at::empty_symint({rope_sin.sym_size(0), norm_weight.sym_size(0)}, x.options());
}

Tensor compressor(const Tensor& x, const Tensor& wkv, const Tensor& wgate, Tensor& state_cache, const Tensor& ape,
                  const Tensor& norm_weight, const Tensor& rope_sin, const Tensor& rope_cos,
                  const std::optional<Tensor>& state_block_table, const std::optional<Tensor>& cu_seqlens,
                  const std::optional<Tensor>& seqused, const std::optional<Tensor>& start_pos, int64_t rope_head_dim,
                  int64_t cmp_ratio, int64_t coff, double norm_eps, int64_t rotary_mode, int64_t cache_mode) {
  Tensor out = compressor_result(x, norm_weight, rope_sin, cmp_ratio);
  const std::pair<const char*, const Tensor*> inputs[] = {{"wkv", &wkv},
                                                          {"wgate", &wgate},
                                                          {"state_cache", &state_cache},
                                                          {"ape", &ape},
                                                          {"norm_weight", &norm_weight},
                                                          {"rope_sin", &rope_sin},
                                                          {"rope_cos", &rope_cos}};
  for (const auto& [name, tensor] : inputs) expect_device("compressor", name, *tensor, x);
  const std::pair<const char*, const std::optional<Tensor>*> optional[] = {
      {"state_block_table", &state_block_table}, {"cu_seqlens", &cu_seqlens}, {"start_pos", &start_pos}};
  for (const auto& [name, tensor] : optional) {
    if (tensor->has_value() && (*tensor)->defined()) expect_device("compressor", name, **tensor, x);
  }
  // The stock call makes every input but the state cache contiguous, too. The copies outlive the queued body for the
  // same reason the arguments do: the allocator gives their memory to later work of this stream only.
  const Tensor x_ = x.contiguous(), wkv_ = wkv.contiguous(), wgate_ = wgate.contiguous(), ape_ = ape.contiguous();
  const Tensor norm_ = norm_weight.contiguous(), sin_ = rope_sin.contiguous(), cos_ = rope_cos.contiguous();
  const auto table_ = contiguous(state_block_table), cu_ = contiguous(cu_seqlens), start_ = contiguous(start_pos);
  SoftnpuCompressorArgs args{};
  args.x = describe("x", x_);
  args.wkv = describe("wkv", wkv_);
  args.wgate = describe("wgate", wgate_);
  args.state_cache = describe("state_cache", state_cache);
  args.ape = describe("ape", ape_);
  args.norm_weight = describe("norm_weight", norm_);
  args.rope_sin = describe("rope_sin", sin_);
  args.rope_cos = describe("rope_cos", cos_);
  args.state_block_table = describe("state_block_table", table_);
  args.cu_seqlens = describe("cu_seqlens", cu_);
  args.seqused = describe("seqused", seqused);
  args.start_pos = describe("start_pos", start_);
  args.out = describe("out", out);
  args.rope_head_dim = rope_head_dim;
  args.cmp_ratio = cmp_ratio;
  args.coff = coff;
  args.rotary_mode = rotary_mode;
  args.cache_mode = cache_mode;
  args.norm_eps = norm_eps;
  TORCH_CHECK(softnpu_compressor_check(&args) == SOFTNPU_OK, softnpu_last_error());
  launch("_C_ascend::compressor", x.device(), softnpu_compressor_run, args);
  return out;
}

Tensor compressor_meta(const Tensor& x, const Tensor&, const Tensor&, Tensor&, const Tensor&, const Tensor& norm_weight,
                       const Tensor& rope_sin, const Tensor&, const std::optional<Tensor>&,
                       const std::optional<Tensor>&, const std::optional<Tensor>&, const std::optional<Tensor>&,
                       int64_t, int64_t cmp_ratio, int64_t, double, int64_t, int64_t) {
  return compressor_result(x, norm_weight, rope_sin, cmp_ratio);
}

// ---------------------------------------------------------------------------------------------- metadata

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

ThreeTensors compressor_metadata_out(const Tensor& rope_cos, const Tensor& rope_sin, const Tensor& cu_seqlens,
                                     const Tensor& start_pos, const Tensor& kv_block_table, int64_t kv_block_size,
                                     int64_t slot_mapping_format, int64_t compress_ratio, int64_t num_reqs_actual,
                                     Tensor& compress_cos, Tensor& compress_sin, Tensor& slot_mapping) {
  const std::pair<const char*, const Tensor*> others[] = {
      {"rope_sin", &rope_sin},         {"cu_seqlens", &cu_seqlens},
      {"start_pos", &start_pos},       {"kv_block_table", &kv_block_table},
      {"compress_cos", &compress_cos}, {"compress_sin", &compress_sin},
      {"slot_mapping", &slot_mapping}};
  for (const auto& [name, tensor] : others) expect_device("compressor_metadata", name, *tensor, rope_cos);
  const Tensor cos_ = rope_cos.contiguous(), sin_ = rope_sin.contiguous(), cu_ = cu_seqlens.contiguous();
  const Tensor start_ = start_pos.contiguous(), table_ = kv_block_table.contiguous();
  SoftnpuMetadataArgs args{};
  args.rope_cos = describe("rope_cos", cos_);
  args.rope_sin = describe("rope_sin", sin_);
  args.cu_seqlens = describe("cu_seqlens", cu_);
  args.start_pos = describe("start_pos", start_);
  args.kv_block_table = describe("kv_block_table", table_);
  args.compress_cos = describe("compress_cos", compress_cos);
  args.compress_sin = describe("compress_sin", compress_sin);
  args.slot_mapping = describe("slot_mapping", slot_mapping);
  args.kv_block_size = kv_block_size;
  args.slot_mapping_format = slot_mapping_format;
  args.compress_ratio = compress_ratio;
  args.num_reqs_actual = num_reqs_actual;
  TORCH_CHECK(softnpu_metadata_check(&args) == SOFTNPU_OK, softnpu_last_error());
  launch("_C_ascend::compressor_metadata", rope_cos.device(), softnpu_metadata_run, args);
  return {compress_cos, compress_sin, slot_mapping};
}

ThreeTensors metadata_results(const Tensor& rope_cos, const Tensor& rope_sin, const Tensor& kv_block_table,
                              int64_t slot_mapping_format, int64_t num_compressed_tokens) {
  TORCH_CHECK(rope_cos.dim() == 2 && rope_sin.dim() == 2, "compressor_metadata: rope_cos, rope_sin: found ",
              rope_cos.dim(), " and ", rope_sin.dim(), " dims, expected 2");
  TORCH_CHECK(num_compressed_tokens > 0, "compressor_metadata: num_compressed_tokens: found ", num_compressed_tokens,
              ", expected greater than 0");
  TORCH_CHECK(slot_mapping_format == 1 || slot_mapping_format == 2, "compressor_metadata: slot_mapping_format: found ",
              slot_mapping_format, ", expected 1 (flat) or 2 (block_offset)");
  const c10::SymInt rows(num_compressed_tokens);
  const c10::SymDimVector rope_shape{rows, c10::SymInt(1), c10::SymInt(1), rope_cos.sym_size(1)};
  c10::SymDimVector slot_shape{rows};
  if (slot_mapping_format == 2) slot_shape.push_back(c10::SymInt(2));
  return {at::empty_symint(rope_shape, rope_cos.options()), at::empty_symint(rope_shape, rope_sin.options()),
          at::empty_symint(slot_shape, kv_block_table.options().dtype(at::kInt))};
}

ThreeTensors compressor_metadata(const Tensor& rope_cos, const Tensor& rope_sin, const Tensor& cu_seqlens,
                                 const Tensor& start_pos, const Tensor& kv_block_table, int64_t kv_block_size,
                                 int64_t slot_mapping_format, int64_t compress_ratio, int64_t num_compressed_tokens,
                                 int64_t num_reqs_actual) {
  auto [cos, sin, slots] =
      metadata_results(rope_cos, rope_sin, kv_block_table, slot_mapping_format, num_compressed_tokens);
  return compressor_metadata_out(rope_cos, rope_sin, cu_seqlens, start_pos, kv_block_table, kv_block_size,
                                 slot_mapping_format, compress_ratio, num_reqs_actual, cos, sin, slots);
}

ThreeTensors compressor_metadata_meta(const Tensor& rope_cos, const Tensor& rope_sin, const Tensor&, const Tensor&,
                                      const Tensor& kv_block_table, int64_t kv_block_size, int64_t slot_mapping_format,
                                      int64_t compress_ratio, int64_t num_compressed_tokens, int64_t num_reqs_actual) {
  TORCH_CHECK(kv_block_size > 0 && compress_ratio > 0 && num_reqs_actual > 0,
              "compressor_metadata: kv_block_size, compress_ratio, num_reqs_actual: found ", kv_block_size, ", ",
              compress_ratio, ", ", num_reqs_actual, ", expected all greater than 0");
  return metadata_results(rope_cos, rope_sin, kv_block_table, slot_mapping_format, num_compressed_tokens);
}

// ---------------------------------------------------------------------------------------------- settings

void check_known(int status) { TORCH_CHECK_VALUE(status >= 0, "softnpu: ", softnpu_last_error()); }

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

void waive(std::string name, bool on) { check_known(softnpu_waive(name.c_str(), on)); }

std::vector<std::string> waivers() {
  std::vector<std::string> on;
  for (const auto& name : split(softnpu_waiver_names())) {
    if (softnpu_is_waived(name.c_str()) > 0) on.push_back(name);
  }
  return on;
}

void set_option(std::string name, int64_t value) { check_known(softnpu_set_option(name.c_str(), value)); }

int64_t get_option(std::string name) {
  int64_t value = 0;
  check_known(softnpu_get_option(name.c_str(), &value));
  return value;
}

int64_t stats(std::string name) {
  int64_t value = 0;
  check_known(softnpu_stat(name.c_str(), &value));
  return value;
}

std::vector<std::string> waiver_names() { return split(softnpu_waiver_names()); }
std::vector<std::string> option_names() { return split(softnpu_option_names()); }
std::vector<std::string> stat_names() { return split(softnpu_stat_names()); }
void reset_stats() { softnpu_reset_stats(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(_C_ascend, m) {
  m.def(
      "compressor(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) state_cache, Tensor ape, Tensor norm_weight, "
      "Tensor rope_sin, Tensor rope_cos, Tensor? state_block_table, Tensor? cu_seqlens, Tensor? seqused, "
      "Tensor? start_pos, int rope_head_dim, int cmp_ratio, int coff, float norm_eps, int rotary_mode, "
      "int cache_mode) -> Tensor");
  m.def(
      "compressor_metadata(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos, "
      "Tensor kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, "
      "int num_compressed_tokens, int num_reqs_actual) -> (Tensor, Tensor, Tensor)");
  m.def(
      "compressor_metadata_out(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos, "
      "Tensor kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, int num_reqs_actual, "
      "Tensor(a!) compress_cos, Tensor(b!) compress_sin, Tensor(c!) slot_mapping) -> "
      "(Tensor(a!), Tensor(b!), Tensor(c!))");
}

TORCH_LIBRARY_IMPL(_C_ascend, PrivateUse1, m) {
  m.impl("compressor", compressor);
  m.impl("compressor_metadata", compressor_metadata);
  m.impl("compressor_metadata_out", compressor_metadata_out);
}

TORCH_LIBRARY_IMPL(_C_ascend, CPU, m) {
  m.impl("compressor", compressor);
  m.impl("compressor_metadata", compressor_metadata);
  m.impl("compressor_metadata_out", compressor_metadata_out);
}

TORCH_LIBRARY_IMPL(_C_ascend, Meta, m) {
  m.impl("compressor", compressor_meta);
  m.impl("compressor_metadata", compressor_metadata_meta);
}

TORCH_LIBRARY_FRAGMENT(softnpu, m) {
  m.def("waive(str name, bool on) -> ()", waive);
  m.def("waivers() -> str[]", waivers);
  m.def("waiver_names() -> str[]", waiver_names);
  m.def("set_option(str name, int value) -> ()", set_option);
  m.def("get_option(str name) -> int", get_option);
  m.def("option_names() -> str[]", option_names);
  m.def("stats(str name) -> int", stats);
  m.def("stat_names() -> str[]", stat_names);
  m.def("reset_stats() -> ()", reset_stats);
}
