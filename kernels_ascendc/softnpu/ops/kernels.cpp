// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

#include "kernels.h"

namespace softnpu {

#define SOFTNPU_DECLARE(isa)                  \
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

enum class Isa { generic, avx2, avx512 };

Isa detect()
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return Isa::avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
    return Isa::generic;
}

Isa isa()
{
    static const Isa found = detect();
    return found;
}

}  // namespace

const ProjectionKernel& projection_kernel()
{
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return avx512::projection;
    if (isa() == Isa::avx2) return avx2::projection;
#endif
    return generic::projection;
}

const PoolKernel& pool_kernel()
{
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return avx512::pooling;
    if (isa() == Isa::avx2) return avx2::pooling;
#endif
    return generic::pooling;
}

const char* isa_name()
{
    switch (isa()) {
        case Isa::avx512:
            return "avx512";
        case Isa::avx2:
            return "avx2";
        default:
            return "generic";
    }
}

}  // namespace softnpu
