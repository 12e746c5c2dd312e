// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// aten::copy_, with the device's ordering rules: a plain block goes through aclrtMemcpyAsync (so that copy delays and
// bounds checks apply); a copy from pinned memory reads it when the stream gets there; a pageable or blocking copy is
// done when the call returns; any other layout or dtype is converted on the device by the stream.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <acl/acl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include "softaten.h"

namespace softaten {
namespace {

// The bytes of both tensors correspond one to one, without gaps.
bool plain(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

void copy_bytes(const at::Tensor& dst, const at::Tensor& src, aclrtMemcpyKind kind, const CurrentStream& stream) {
  const size_t bytes = dst.numel() * dst.element_size();
  stream.enqueue("aten::copy_",
                 [to = dst.mutable_data_ptr(), from = src.const_data_ptr(), bytes, kind, handle = stream.handle()] {
                   return aclrtMemcpyAsync(to, bytes, from, bytes, kind, handle);
                 });
}

void convert_on_device(const at::Tensor& dst, const at::Tensor& src, const CurrentStream& stream) {
  Aliases aliases;
  const at::Tensor to = aliases.of(dst), from = aliases.of(src);
  Accesses accesses;
  if (stream.wants_accesses()) {
    add_access(src, false, &accesses);
    add_access(dst, true, &accesses);
  }
  stream.push("aten::copy_", std::move(accesses), [to, from] {
    c10::InferenceMode guard;
    to.copy_(from);
  });
}

// Pinned memory must not be handed out again before the stream is done with it.
void keep_pinned(const at::Tensor& host, const CurrentStream& stream) {
  const auto& data = host.storage().data_ptr();
  at::getHostAllocator(c10::DeviceType::PrivateUse1)
      ->record_event(const_cast<void*>(host.const_data_ptr()), data.get_context(), stream.stream());
}

void from_host(const at::Tensor& dst, const at::Tensor& src, bool non_blocking, const CurrentStream& stream) {
  if (!plain(dst, src)) {
    // Convert the dtype on the host, the layout on the device.
    const at::Tensor dense = src.to(dst.scalar_type()).resolve_conj().resolve_neg().contiguous();
    if (dst.is_contiguous() && !dst.is_conj() && !dst.is_neg())
      return from_host(dst, dense, non_blocking && dense.is_same(src), stream);
    at::Tensor staged = at::empty(dst.sizes(), dst.options().memory_format(c10::MemoryFormat::Contiguous));
    from_host(staged, dense, non_blocking && dense.is_same(src), stream);
    return convert_on_device(dst, staged, stream);
  }
  const bool asynchronous = non_blocking && src.is_pinned();
  TORCH_CHECK(asynchronous || !stream.capturing(),
              "aten::copy_ from pageable or blocking host memory cannot be captured; use pinned "
              "memory and non_blocking=True");
  copy_bytes(dst, src, ACL_MEMCPY_HOST_TO_DEVICE, stream);
  if (asynchronous) {
    keep_pinned(src, stream);
  } else {
    stream.synchronize("aten::copy_");
  }
}

void to_host(const at::Tensor& dst, const at::Tensor& src, bool non_blocking, const CurrentStream& stream) {
  if (!plain(dst, src)) {
    at::Tensor dense = at::empty(src.sizes(), src.options().memory_format(c10::MemoryFormat::Contiguous));
    convert_on_device(dense, src, stream);
    at::Tensor host =
        at::empty(src.sizes(), src.options().device(c10::kCPU).memory_format(c10::MemoryFormat::Contiguous));
    to_host(host, dense, false, stream);
    dst.copy_(host);
    return;
  }
  const bool asynchronous = non_blocking && dst.is_pinned();
  TORCH_CHECK(asynchronous || !stream.capturing(),
              "aten::copy_ to pageable or blocking host memory cannot be captured; use pinned "
              "memory and non_blocking=True");
  copy_bytes(dst, src, ACL_MEMCPY_DEVICE_TO_HOST, stream);
  if (asynchronous) {
    keep_pinned(dst, stream);
  } else {
    stream.synchronize("aten::copy_");
  }
}

}  // namespace

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const at::Tensor src = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  if (self.numel() == 0 || self.is_same(src)) return self;
  const c10::Device device = self.is_privateuseone() ? self.device() : src.device();
  const c10::DeviceGuard guard(device);
  const CurrentStream stream(device.index());
  if (!src.is_privateuseone()) {
    from_host(self, src, non_blocking, stream);
  } else if (!self.is_privateuseone()) {
    to_host(self, src, non_blocking, stream);
  } else {
    if (src.device() != self.device()) {
      // Between devices: what the source's stream has queued comes first, and the source may be freed on return.
      const CurrentStream from(src.device().index());
      from.synchronize("aten::copy_ between devices");
    }
    if (plain(self, src)) {
      copy_bytes(self, src, ACL_MEMCPY_DEVICE_TO_DEVICE, stream);
    } else {
      convert_on_device(self, src, stream);
    }
    if (src.device() != self.device()) stream.synchronize("aten::copy_ between devices");
  }
  return self;
}

}  // namespace softaten
