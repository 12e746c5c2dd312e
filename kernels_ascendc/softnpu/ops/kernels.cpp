// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace softnpu {

#define SOFTNPU_DECLARE(isa)                \
  namespace isa {                           \
  extern const ProjectionKernel projection; \
  extern const PoolKernel pooling;          \
  }

SOFTNPU_DECLARE(generic)
#if defined(__x86_64__)
SOFTNPU_DECLARE(avx2)
SOFTNPU_DECLARE(avx512)
#endif

namespace {

struct Isa {
  const char* name;
  bool available;
  const ProjectionKernel* projection;
  const PoolKernel* pooling;
};

// Best first.
const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = [] {
    std::vector<Isa> list;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool fma = __builtin_cpu_supports("fma"), avx2_works = fma && __builtin_cpu_supports("avx2");
    const bool avx512_works = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    list.push_back({"avx512", avx512_works, &avx512::projection, &avx512::pooling});
    list.push_back({"avx2", avx2_works, &avx2::projection, &avx2::pooling});
#endif
    list.push_back({"generic", true, &generic::projection, &generic::pooling});
    return list;
  }();
  return all;
}

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa{
      &*std::find_if(isas().begin(), isas().end(), [](const Isa& isa) { return isa.available; })};
  return isa;
}

}  // namespace

const ProjectionKernel& projection_kernel() { return *chosen().load()->projection; }
const PoolKernel& pool_kernel() { return *chosen().load()->pooling; }
const char* isa_name() { return chosen().load()->name; }

bool select_isa(const char* name) {
  for (const Isa& isa : isas()) {
    if (isa.available && std::strcmp(isa.name, name) == 0) return chosen() = &isa, true;
  }
  return false;
}

}  // namespace softnpu
