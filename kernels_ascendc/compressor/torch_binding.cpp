// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// torch.ops.afd_dsv4: our kernels (kernels.h) as operators of torch.
//
// PrivateUse1  everything that the host can see is checked, then the launch is queued on the current stream through a
//              custom handler of torch_npu's OpCommand, so that it keeps its place among all that torch_npu's own queue
//              holds. Whatever changes between replays of a captured graph is read from device memory; addresses and
//              constants are taken by value. Nothing is allocated, and nobody waits.
// Meta         the same checks without addresses; nothing is written, and there is no result.
// What differs between an NPU and the software NPU is in back_end.h.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <limits>
#include <string>

#include "back_end.h"
#include "kernels.h"
#include "tiling.h"

namespace afd_dsv4 {

void queue(const at::Device& device, const Launch& launch) {
  const c10::DeviceGuard guard(device);  // OpCommand takes the current device's queue, whatever stream the handler has
  // Not stream(): that waits for the queue. What the handler is given has its place in it.
  void* stream = c10_npu::getCurrentNPUStream(device.index()).stream(false);
  at_npu::native::OpCommand command;
  command.Name(launch.name);
  command.SetCustomHandler(submission(stream, launch));
  command.Run();
}

namespace {

using at::Tensor;

// What was asked, what was found, what is to be there.
#define AFD_EXPECT(condition, argument, found, ...) \
  TORCH_CHECK(condition, "afd_dsv4::", op, ": ", argument, ": found ", found, ", expected ", __VA_ARGS__)

void expect(const char* op, const char* name, const Tensor& t, const Tensor& like, at::ScalarType type,
            at::IntArrayRef shape) {
  AFD_EXPECT(t.device() == like.device(), name, t.device(), like.device(), ", the device of the first argument");
  AFD_EXPECT(t.scalar_type() == type, name, t.scalar_type(), type);
  AFD_EXPECT(t.sizes() == shape, name, t.sizes(), shape);
  AFD_EXPECT(t.is_contiguous(), name, t.strides(), "it to be contiguous");
}

int32_t dtype_code(const char* op, const char* name, const Tensor& t) {
  AFD_EXPECT(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16, name, t.scalar_type(),
             "Float or BFloat16");
  return t.scalar_type() == at::kFloat ? 0 : 1;
}

int32_t narrow(const char* op, const char* name, int64_t value) {
  AFD_EXPECT(value >= 0 && value <= std::numeric_limits<int32_t>::max(), name, value, "0 to 2^31 - 1");
  return static_cast<int32_t>(value);
}

// What both launches have.
struct Common {
  const Tensor &rows, &pool, &ape, &cu_seqlens, &starts, &table;
  int64_t ratio, coff, carry, first_token, tokens, launch_tokens, blocks;
};

void check(const char* op, const Common& c) {
  const auto two = [&](const char* name, const Tensor& t, int64_t dims) {
    AFD_EXPECT(t.dim() == dims, name, t.dim(), dims, " dims");
  };
  two("rows", c.rows, 2), two("pool", c.pool, 3), two("ape", c.ape, 2), two("table", c.table, 2);
  const int64_t width = c.rows.size(1), requests = c.table.size(0);
  AFD_EXPECT(c.ratio > 0 && (c.coff == 1 || c.coff == 2), "ratio, coff", c.ratio, "above 0 and 1 or 2, not ", c.coff);
  AFD_EXPECT(c.carry >= 0 && c.first_token >= 0 && c.tokens >= 0, "carry, first_token, tokens", c.carry,
             "none below 0, not ", c.first_token, ", ", c.tokens);
  AFD_EXPECT(c.carry <= c.first_token, "carry", c.carry, "at most first_token ", c.first_token);
  AFD_EXPECT(c.first_token + c.tokens <= c.launch_tokens, "launch_tokens", c.launch_tokens, "at least first_token + ",
             "tokens, ", c.first_token + c.tokens);
  AFD_EXPECT(c.rows.size(0) >= c.carry + c.tokens, "rows", c.rows.size(0), "at least carry + tokens, ",
             c.carry + c.tokens);
  AFD_EXPECT(c.rows.stride(1) == 1 && c.rows.stride(0) >= width, "rows", c.rows.strides(), "whole rows");
  AFD_EXPECT(c.blocks >= 1 && c.blocks <= 128, "blocks", c.blocks, "1 to 128");
  AFD_EXPECT(c.pool.scalar_type() == at::kFloat && c.pool.device() == c.rows.device(), "pool", c.pool.scalar_type(),
             "Float on ", c.rows.device());
  AFD_EXPECT(c.pool.size(2) == width && c.pool.stride(2) == 1 && c.pool.stride(1) == width &&
                 c.pool.stride(0) >= c.pool.size(1) * width,
             "pool", c.pool.sizes(), "pages of whole rows of ", width, " values");
  expect(op, "ape", c.ape, c.rows, at::kFloat, {c.ratio, width / 2});
  expect(op, "cu_seqlens", c.cu_seqlens, c.rows, at::kInt, {requests + 1});
  expect(op, "starts", c.starts, c.rows, at::kInt, {requests});
  expect(op, "table", c.table, c.rows, at::kInt, {requests, c.table.size(1)});
}

// Fields of the same name in both parameter structs.
template <typename Params>
Params common_params(const char* op, const Common& c) {
  Params p{};
  p.ratio = narrow(op, "ratio", c.ratio);
  p.coff = narrow(op, "coff", c.coff);
  p.head_dim = narrow(op, "head_dim", c.rows.size(1) / (2 * c.coff));
  p.requests = narrow(op, "requests", c.table.size(0));
  p.columns = narrow(op, "columns", c.table.size(1));
  p.page_rows = narrow(op, "page_rows", c.pool.size(1));
  p.pool_pages = narrow(op, "pool_pages", c.pool.size(0));
  p.page_stride = c.pool.stride(0);
  p.row_dtype = dtype_code(op, "rows", c.rows);
  p.row_stride = c.rows.stride(0);
  p.carry = narrow(op, "carry", c.carry);
  p.first_token = narrow(op, "first_token", c.first_token);
  p.tokens = narrow(op, "tokens", c.tokens);
  p.launch_tokens = narrow(op, "launch_tokens", c.launch_tokens);
  return p;
}

// list_ids: of a launch that writes them.
Pages pages_of(const Common& c, bool writes, int64_t list_ids) {
  Pages p{};
  p.pool = c.pool.data_ptr();
  p.page_stride = c.pool.stride(0) * c.pool.element_size();
  p.page_bytes = c.pool.size(1) * c.pool.size(2) * c.pool.element_size();
  p.cu_seqlens = c.cu_seqlens.data_ptr<int32_t>();
  p.starts = c.starts.data_ptr<int32_t>();
  p.table = c.table.data_ptr<int32_t>();
  p.requests = c.table.size(0), p.columns = c.table.size(1);
  p.page_rows = c.pool.size(1), p.pool_pages = c.pool.size(0);
  p.ratio = c.ratio, p.coff = c.coff, p.list_ids = list_ids;
  p.first_token = c.first_token, p.tokens = c.tokens;
  p.writes = writes;
  return p;
}

void check_workspace(const char* op, const Tensor& workspace, const Tensor& rows, int64_t bytes) {
  AFD_EXPECT(workspace.device() == rows.device() && workspace.is_contiguous() &&
                 static_cast<int64_t>(workspace.nbytes()) >= bytes,
             "workspace", workspace.nbytes(), "at least ", bytes, " bytes in one piece on ", rows.device());
}

// ---------------------------------------------------------------------------------------------- compress

AfdDsv4CompressParams compress_params(const Common& c, const Tensor& norm_weight, const Tensor& cos, const Tensor& sin,
                                      const Tensor& out, const Tensor& workspace, double norm_eps) {
  const char* op = "compress";
  check(op, c);
  AFD_EXPECT(out.dim() == 2 && cos.dim() == 2, "out, cos", out.dim(), "2 dims, as of cos, which has ", cos.dim());
  const int64_t head_dim = c.rows.size(1) / (2 * c.coff);
  expect(op, "out", out, c.rows, out.scalar_type(), {out.size(0), head_dim});
  expect(op, "norm_weight", norm_weight, c.rows, norm_weight.scalar_type(), {head_dim});
  expect(op, "cos", cos, c.rows, at::kFloat, {out.size(0), cos.size(1)});
  expect(op, "sin", sin, c.rows, at::kFloat, cos.sizes());
  auto p = common_params<AfdDsv4CompressParams>(op, c);
  p.rope_head_dim = narrow(op, "rope_head_dim", cos.size(1));
  p.out_dtype = dtype_code(op, "out", out);
  p.out_rows = narrow(op, "out_rows", out.size(0));
  p.norm_dtype = dtype_code(op, "norm_weight", norm_weight);
  p.norm_eps = static_cast<float>(norm_eps);
  char reason[512] = "";
  const int status = afd_dsv4_can_implement_compress(&p, reason, sizeof reason);
  TORCH_CHECK(status == AFD_DSV4_OK, "afd_dsv4::", op, ": ", reason);
  check_workspace(op, workspace, c.rows, afd_dsv4_workspace_bytes_compress(&p));
  return p;
}

void compress(const Tensor& rows, const Tensor& pool, const Tensor& ape, const Tensor& norm_weight, const Tensor& cos,
              const Tensor& sin, const Tensor& cu_seqlens, const Tensor& starts, const Tensor& table, Tensor& out,
              Tensor& workspace, int64_t ratio, int64_t coff, double norm_eps, int64_t carry, int64_t first_token,
              int64_t tokens, int64_t launch_tokens, int64_t blocks) {
  const Common c{rows, pool,  ape,         cu_seqlens, starts,        table, ratio,
                 coff, carry, first_token, tokens,     launch_tokens, blocks};
  const auto params = compress_params(c, norm_weight, cos, sin, out, workspace, norm_eps);
  if (tokens == 0) return;
  const auto run = [params, blocks = static_cast<uint32_t>(blocks), rows = rows.data_ptr(), pool = pool.data_ptr(),
                    ape = ape.data_ptr(), norm = norm_weight.data_ptr(), cos = cos.data_ptr(), sin = sin.data_ptr(),
                    cu = cu_seqlens.data_ptr(), starts = starts.data_ptr(), table = table.data_ptr(),
                    out = out.data_ptr(), workspace = workspace.data_ptr()](void* stream) {
    return afd_dsv4_launch_compress(blocks, stream, &params, rows, pool, ape, norm, cos, sin, cu, starts, table, out,
                                    workspace);
  };
  queue(rows.device(), {"afd_dsv4::compress",
                        run,
                        {{rows.narrow(0, 0, carry + tokens), false},
                         {ape, false},
                         {norm_weight, false},
                         {cos, false},
                         {sin, false},
                         {cu_seqlens, false},
                         {starts, false},
                         {table, false},
                         {out, true},
                         {workspace, true}},
                        pages_of(c, false, 0)});
}

void compress_meta(const Tensor& rows, const Tensor& pool, const Tensor& ape, const Tensor& norm_weight,
                   const Tensor& cos, const Tensor& sin, const Tensor& cu_seqlens, const Tensor& starts,
                   const Tensor& table, Tensor& out, Tensor& workspace, int64_t ratio, int64_t coff, double norm_eps,
                   int64_t carry, int64_t first_token, int64_t tokens, int64_t launch_tokens, int64_t blocks) {
  const Common c{rows, pool,  ape,         cu_seqlens, starts,        table, ratio,
                 coff, carry, first_token, tokens,     launch_tokens, blocks};
  compress_params(c, norm_weight, cos, sin, out, workspace, norm_eps);
}

// ---------------------------------------------------------------------------------------------- tail_update

AfdDsv4TailParams tail_params(const Common& c, const Tensor& workspace, int64_t list_ids) {
  const char* op = "tail_update";
  check(op, c);
  auto p = common_params<AfdDsv4TailParams>(op, c);
  p.list_ids = narrow(op, "list_ids", list_ids);
  char reason[512] = "";
  const int status = afd_dsv4_can_implement_tail_update(&p, reason, sizeof reason);
  TORCH_CHECK(status == AFD_DSV4_OK, "afd_dsv4::", op, ": ", reason);
  check_workspace(op, workspace, c.rows, afd_dsv4_workspace_bytes_tail_update(&p));
  return p;
}

void tail_update(const Tensor& rows, Tensor& pool, const Tensor& ape, const Tensor& cu_seqlens, const Tensor& starts,
                 const Tensor& table, Tensor& workspace, int64_t ratio, int64_t coff, int64_t list_ids, int64_t carry,
                 int64_t first_token, int64_t tokens, int64_t launch_tokens, int64_t blocks) {
  const Common c{rows, pool,  ape,         cu_seqlens, starts,        table, ratio,
                 coff, carry, first_token, tokens,     launch_tokens, blocks};
  const auto params = tail_params(c, workspace, list_ids);
  if (tokens == 0) return;
  const auto run = [params, blocks = static_cast<uint32_t>(blocks), rows = rows.data_ptr(), ape = ape.data_ptr(),
                    cu = cu_seqlens.data_ptr(), starts = starts.data_ptr(), table = table.data_ptr(),
                    pool = pool.data_ptr(), workspace = workspace.data_ptr()](void* stream) {
    return afd_dsv4_launch_tail_update(blocks, stream, &params, rows, ape, cu, starts, table, pool, workspace);
  };
  queue(rows.device(), {"afd_dsv4::tail_update",
                        run,
                        {{rows.narrow(0, 0, carry + tokens), false},
                         {ape, false},
                         {cu_seqlens, false},
                         {starts, false},
                         {table, false},
                         {workspace, true}},
                        pages_of(c, true, list_ids)});
}

void tail_update_meta(const Tensor& rows, Tensor& pool, const Tensor& ape, const Tensor& cu_seqlens,
                      const Tensor& starts, const Tensor& table, Tensor& workspace, int64_t ratio, int64_t coff,
                      int64_t list_ids, int64_t carry, int64_t first_token, int64_t tokens, int64_t launch_tokens,
                      int64_t blocks) {
  const Common c{rows, pool,  ape,         cu_seqlens, starts,        table, ratio,
                 coff, carry, first_token, tokens,     launch_tokens, blocks};
  tail_params(c, workspace, list_ids);
}

// ---------------------------------------------------------------------------------------------- project

void check_project(const Tensor& x, const Tensor& wkv, const Tensor& wgate, const Tensor& rows) {
  const char* op = "project";
  AFD_EXPECT(x.dim() == 2 && wkv.dim() == 2 && rows.dim() == 2, "x, wkv, rows", x.dim(), "2 dims each");
  AFD_EXPECT(x.stride(1) == 1, "x", x.strides(), "whole rows");
  expect(op, "wkv", wkv, x, x.scalar_type(), {wkv.size(0), x.size(1)});
  expect(op, "wgate", wgate, x, x.scalar_type(), wkv.sizes());
  AFD_EXPECT(rows.device() == x.device(), "rows", rows.device(), x.device(), ", the device of x");
  dtype_code(op, "rows", rows);
  AFD_EXPECT(rows.size(0) == x.size(0) && rows.size(1) == 2 * wkv.size(0), "rows", rows.sizes(), "[", x.size(0), ", ",
             2 * wkv.size(0), "]");
  AFD_EXPECT(rows.stride(1) == 1 && rows.stride(0) >= rows.size(1), "rows", rows.strides(), "whole rows");
}

void project_checked(const Tensor& x, const Tensor& wkv, const Tensor& wgate, Tensor& rows) {
  check_project(x, wkv, wgate, rows);
  const c10::OptionalDeviceGuard guard(x.device());
  if (x.size(0) > 0) project(x, wkv, wgate, rows);
}

void project_meta(const Tensor& x, const Tensor& wkv, const Tensor& wgate, Tensor& rows) {
  check_project(x, wkv, wgate, rows);
}

std::string backend() { return afd_dsv4_backend(); }

std::string faults(const Tensor& records) {
  const char* op = "faults";
  expect(op, "records", records, records, at::kByte, {static_cast<int64_t>(kFaultsBytes)});
  char text[512];
  afd_dsv4_faults(records.data_ptr(), text, sizeof text);
  return text;
}

}  // namespace
}  // namespace afd_dsv4

TORCH_LIBRARY(afd_dsv4, m) {
  // rows [carry + tokens, 2*coff*D] of [kv | score]; pool [pages, page rows, 2*coff*D]; out [R, D]; see kernels.h.
  m.def(
      "compress(Tensor rows, Tensor pool, Tensor ape, Tensor norm_weight, Tensor cos, Tensor sin, Tensor cu_seqlens, "
      "Tensor starts, Tensor table, Tensor(a!) out, Tensor(b!) workspace, int ratio, int coff, float norm_eps, "
      "int carry, int first_token, int tokens, int launch_tokens, int blocks) -> ()");
  m.def(
      "tail_update(Tensor rows, Tensor(a!) pool, Tensor ape, Tensor cu_seqlens, Tensor starts, Tensor table, "
      "Tensor(b!) workspace, int ratio, "
      "int coff, int list_ids, int carry, int first_token, int tokens, int launch_tokens, int blocks) -> ()");
  m.def("project(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) rows) -> ()");
  // What launches left in the first bytes of their workspace, copied to the host: the first fault, or nothing.
  m.def("faults(Tensor records) -> str");
  m.def("backend() -> str", afd_dsv4::backend);
  m.def("vector_cores(int device) -> int",
        [](int64_t device) { return afd_dsv4::vector_cores(static_cast<c10::DeviceIndex>(device)); });
}

TORCH_LIBRARY_IMPL(afd_dsv4, PrivateUse1, m) {
  m.impl("compress", afd_dsv4::compress);
  m.impl("tail_update", afd_dsv4::tail_update);
  m.impl("project", afd_dsv4::project_checked);
}

TORCH_LIBRARY_IMPL(afd_dsv4, CPU, m) { m.impl("faults", afd_dsv4::faults); }

TORCH_LIBRARY_IMPL(afd_dsv4, Meta, m) {
  m.impl("compress", afd_dsv4::compress_meta);
  m.impl("tail_update", afd_dsv4::tail_update_meta);
  m.impl("project", afd_dsv4::project_meta);
}
