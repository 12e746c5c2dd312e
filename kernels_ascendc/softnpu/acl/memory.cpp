// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Memory: device memory is host memory, counted against SOFTNPU_HBM_MB and filled with a poison byte, so that reading
// what nothing wrote shows. Large blocks are copy-on-write views of one poisoned file, so that a big pool costs host
// memory only where it is written. Copies check that their device side lies in one allocation. Not done: expandable
// segments, IPC.
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace softnpu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kDeviceAlign = 512;
constexpr size_t kPoisonFile = size_t{16} << 20;

struct Block {
  size_t bytes;   // what counts against the limit
  size_t mapped;  // what munmap needs
  int device;
};

struct Memory {
  std::mutex mutex;
  std::map<uintptr_t, Block> device;
  std::map<uintptr_t, size_t> host;
  std::map<int, uint64_t> used, peak;
};
Memory& memory() {
  static auto* m = new Memory;
  return *m;
}

// One file of poison, shared by every large block.
int poison_file() {
  static const int fd = [] {
    const int made = memfd_create("softnpu-poison", MFD_CLOEXEC);
    if (made < 0 || ftruncate(made, kPoisonFile) != 0) return -1;
    void* p = mmap(nullptr, kPoisonFile, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
    if (p == MAP_FAILED) return -1;
    std::memset(p, settings().poison, kPoisonFile);
    munmap(p, kPoisonFile);
    return made;
  }();
  return fd;
}

void* map_device_block(size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  if (settings().poison < 0) return base;
  if (bytes < kPoisonFile) {
    std::memset(base, settings().poison, bytes);
    return base;
  }
  auto* at = static_cast<char*>(base);
  for (size_t left = bytes; left > 0;) {
    const size_t piece = std::min(left, kPoisonFile);
    if (poison_file() < 0 || mmap(at, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                                  poison_file(), 0) == MAP_FAILED) {
      std::memset(at, settings().poison, left);
      break;
    }
    at += piece;
    left -= piece;
  }
  return base;
}

aclError allocate(void** out, size_t bytes) {
  *out = nullptr;
  if (bytes == 0) return fail(ACL_ERROR_RT_PARAM_INVALID, "an allocation of 0 bytes");
  bytes = (bytes + kDeviceAlign - 1) / kDeviceAlign * kDeviceAlign;
  const size_t mapped = (bytes + kPage - 1) / kPage * kPage;
  const int device = device_or_default();
  auto& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  uint64_t& used = m.used[device];
  const std::string asked = std::to_string(bytes) + " bytes asked, " + std::to_string(used) + " of " +
                            std::to_string(settings().hbm_bytes) + " in use (SOFTNPU_HBM_MB)";
  if (used + bytes > settings().hbm_bytes)
    return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of device memory: " + asked);
  void* p = map_device_block(mapped);
  if (p == nullptr) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of host memory: " + asked);
  m.device[reinterpret_cast<uintptr_t>(p)] = {bytes, mapped, device};
  used += bytes;
  m.peak[device] = std::max(m.peak[device], used);
  races::forget(p, bytes);
  *out = p;
  return ACL_SUCCESS;
}

template <class Map>
auto find_block(Map& blocks, const void* p) {
  auto it = blocks.upper_bound(reinterpret_cast<uintptr_t>(p));
  return it == blocks.begin() ? blocks.end() : std::prev(it);
}

aclError check_copy(const void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "a copy is larger than its destination");
  const bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  const bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  if (bytes > 0 && to_device && !is_device_memory(dst, bytes))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "a copy's destination is not inside one device allocation");
  if (bytes > 0 && from_device && !is_device_memory(src, bytes))
    return fail(ACL_ERROR_RT_PARAM_INVALID, "a copy's source is not inside one device allocation");
  return ACL_SUCCESS;
}

// What the race detector follows: device memory, and pinned host memory, which the device reads and writes too.
bool is_followed(const void* p, size_t n) {
  if (is_device_memory(p, n)) return true;
  auto& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  const auto it = find_block(m.host, p);
  return it != m.host.end() && reinterpret_cast<uintptr_t>(p) + n <= it->first + it->second;
}

Accesses accesses_of(const void* dst, const void* src, size_t bytes) {
  Accesses accesses;
  if (src != nullptr && is_followed(src, bytes)) accesses.push_back({src, bytes, 1, 0, 0, 0});
  if (is_followed(dst, bytes)) accesses.push_back({dst, bytes, 1, 0, 1, 0});
  return accesses;
}

Work copy(const char* name, void* dst, const void* src, size_t bytes, aclrtStream stream, Task run) {
  Work work;
  work.name = name;
  work.run = std::move(run);
  if (softnpu_wants_accesses(stream) != 0) work.accesses = accesses_of(dst, src, bytes);
  return work;
}

const char* name_of(aclrtMemcpyKind kind) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_DEVICE:
      return "aclrtMemcpy host to device";
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return "aclrtMemcpy device to host";
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
      return "aclrtMemcpy device to device";
    default:
      return "aclrtMemcpy";
  }
}

}  // namespace

bool is_device_memory(const void* p, size_t n) {
  auto& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  const auto it = find_block(m.device, p);
  return it != m.device.end() && reinterpret_cast<uintptr_t>(p) + n <= it->first + it->second.bytes;
}

}  // namespace softnpu

using namespace softnpu;

SOFTNPU_API aclError aclrtMalloc(void** out, size_t bytes, aclrtMemMallocPolicy) { return allocate(out, bytes); }
SOFTNPU_API aclError aclrtMallocAlign32(void** out, size_t bytes, aclrtMemMallocPolicy) { return allocate(out, bytes); }
SOFTNPU_API aclError aclrtFree(void* p) {
  auto& m = memory();
  Block block;
  {
    std::lock_guard<std::mutex> lock(m.mutex);
    const auto it = m.device.find(reinterpret_cast<uintptr_t>(p));
    if (it == m.device.end()) return fail(ACL_ERROR_RT_PARAM_INVALID, "freeing an address that was not allocated");
    block = it->second;
  }
  // Queued work may still use the block; on the device freeing waits for it too.
  if (!on_stream_thread())
    for (auto* stream : streams_of_device(block.device)) stream->synchronize(-1);
  races::forget(p, block.bytes);
  forget_flags(p, block.bytes);
  std::lock_guard<std::mutex> lock(m.mutex);
  m.device.erase(reinterpret_cast<uintptr_t>(p));
  m.used[block.device] -= block.bytes;
  munmap(p, block.mapped);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtMallocHost(void** out, size_t bytes) {
  bytes = (std::max<size_t>(bytes, 1) + 63) / 64 * 64;
  *out = std::aligned_alloc(64, bytes);
  if (*out == nullptr) return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of pinned host memory");
  if (settings().poison >= 0) std::memset(*out, settings().poison, bytes);
  races::forget(*out, bytes);
  auto& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.host[reinterpret_cast<uintptr_t>(*out)] = bytes;
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtFreeHost(void* p) {
  auto& m = memory();
  {
    std::lock_guard<std::mutex> lock(m.mutex);
    if (m.host.erase(reinterpret_cast<uintptr_t>(p)) == 0)
      return fail(ACL_ERROR_RT_PARAM_INVALID, "freeing a host address that was not allocated");
  }
  std::free(p);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtPointerGetAttributes(const void* p, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  const auto x = reinterpret_cast<uintptr_t>(p);
  auto& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (const auto it = find_block(m.device, p); it != m.device.end() && x < it->first + it->second.bytes) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->location.id = static_cast<uint32_t>(it->second.device);
  } else if (const auto host = find_block(m.host, p); host != m.host.end() && x < host->first + host->second) {
    attributes->location.type = ACL_MEM_LOCATION_TYPE_HOST;
  }
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  auto& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  *total = settings().hbm_bytes;
  *free_bytes = *total - m.used[device_or_default()];
  return ACL_SUCCESS;
}

SOFTNPU_API aclError aclrtMemcpy(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind) {
  if (const aclError e = check_copy(dst, room, src, bytes, kind)) return e;
  if (races::on()) races::host_access(name_of(kind), accesses_of(dst, src, bytes));
  std::memmove(dst, src, bytes);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtMemcpyAsync(void* dst, size_t room, const void* src, size_t bytes, aclrtMemcpyKind kind,
                                      aclrtStream stream) {
  if (const aclError e = check_copy(dst, room, src, bytes, kind)) return e;
  stream_of(stream)->push(copy(name_of(kind), dst, src, bytes, stream, [=] {
    if (const uint32_t us = settings().copy_delay_us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    std::memmove(dst, src, bytes);
  }));
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtMemset(void* dst, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "a fill is larger than its destination");
  if (races::on()) races::host_access("aclrtMemset", accesses_of(dst, nullptr, bytes));
  std::memset(dst, value, bytes);
  return ACL_SUCCESS;
}
SOFTNPU_API aclError aclrtMemsetAsync(void* dst, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  if (bytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "a fill is larger than its destination");
  stream_of(stream)->push(copy("aclrtMemset", dst, nullptr, bytes, stream, [=] { std::memset(dst, value, bytes); }));
  return ACL_SUCCESS;
}

SOFTNPU_API uint64_t softnpu_device_bytes(int32_t device) {
  auto& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  return m.used[device];
}
SOFTNPU_API uint64_t softnpu_device_peak_bytes(int32_t device) {
  auto& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  return m.peak[device];
}
SOFTNPU_API void softnpu_reset_peak(int32_t device) {
  auto& m = memory();
  std::lock_guard<std::mutex> lock(m.mutex);
  m.peak[device] = m.used[device];
}
