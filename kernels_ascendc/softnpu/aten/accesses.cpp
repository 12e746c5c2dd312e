// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// The bytes of a tensor, for the race detector: runs of bytes, evenly spaced, so that slices of rows or of columns of
// one buffer have nothing in common. A tensor that would need more than kMostBlocks of these counts as everything
// between its first and its last byte.
#include <algorithm>
#include <vector>

#include "softaten.h"

namespace softaten {
namespace {

constexpr int64_t kMostBlocks = 4096;

struct Dim {
  int64_t size, stride;  // stride in bytes
};

}  // namespace

void add_access(const at::Tensor& t, bool writes, Accesses* out) {
  if (!t.defined() || !t.is_privateuseone() || t.numel() == 0) return;
  const auto bytes = static_cast<int64_t>(t.element_size());
  const auto* first = static_cast<const char*>(t.storage().data()) + t.storage_offset() * bytes;
  std::vector<Dim> dims;
  for (int64_t i = 0; i < t.dim(); ++i)
    if (t.size(i) > 1 && t.stride(i) != 0) dims.push_back({t.size(i), t.stride(i) * bytes});
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  int64_t run = bytes, end = bytes;  // the run at the start; everything
  std::vector<Dim> outer;
  for (const Dim& dim : dims) {
    end += (dim.size - 1) * dim.stride;
    if (outer.empty() && dim.stride == run) {
      run *= dim.size;
    } else if (!outer.empty() && dim.stride == outer.back().stride * outer.back().size) {
      outer.back().size *= dim.size;
    } else {
      outer.push_back(dim);
    }
  }
  int64_t blocks = 1;
  for (size_t i = 1; i < outer.size(); ++i) blocks *= outer[i].size;
  const auto add = [&](const char* address, int64_t length, const Dim& rows) {
    out->push_back({address, static_cast<uint64_t>(length), static_cast<uint64_t>(rows.size),
                    static_cast<uint64_t>(rows.stride), writes, 0});
  };
  if (blocks > kMostBlocks) return add(first, end, {1, 0});
  for (int64_t block = 0; block < blocks; ++block) {
    const char* at = first;
    int64_t rest = block;
    for (size_t i = 1; i < outer.size(); rest /= outer[i++].size) at += rest % outer[i].size * outer[i].stride;
    add(at, run, outer.empty() ? Dim{1, 0} : outer.front());
  }
}

}  // namespace softaten
