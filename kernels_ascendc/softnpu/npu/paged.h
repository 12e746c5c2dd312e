// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// Problem: attention reads the tokens of a request through its block table, and a table or pool that does not have them
// must be an error, not a read of something else. Way: Pages finds one row at a time and checks the column, the page
// and the request; Lengths checks the prefix sums and lengths that say which tokens there are. Both read data: they are
// for CPU kernels only. Not here: layouts without pages.
#pragma once

#include <cstdint>

#include "operator.h"

namespace softnpu {

// A pool [pages, page rows, ...] of which only axis 0 may have gaps, behind block tables [requests, columns] of int32.
template <class T>
class Pages {
 public:
  Pages(const char* operation, const char* pool_name, const at::Tensor& pool, const at::Tensor& table)
      : operation_(operation),
        pool_name_(pool_name),
        data_(pool.const_data_ptr<T>()),
        table_(table.contiguous()),
        pages_(pool.size(0)),
        rows_(pool.size(1)),
        page_stride_(pool.stride(0)),
        row_stride_(pool.stride(1)),
        columns_(table.size(1)) {}

  // Entry `index` of a request; its width is the caller's to know.
  const T* row(int64_t request, int64_t index) const {
    const int64_t column = index / rows_;
    TORCH_CHECK(index >= 0 && column < columns_, operation_, ": ", pool_name_, ": entry ", index, " of request ",
                request, " is beyond its block table of ", columns_, " pages of ", rows_, " rows");
    const int64_t page = table_.const_data_ptr<int32_t>()[request * columns_ + column];
    TORCH_CHECK(page >= 0 && page < pages_, operation_, ": ", pool_name_, ": column ", column, " of request ", request,
                "'s block table names page ", page, ", the pool has ", pages_);
    return data_ + page * page_stride_ + index % rows_ * row_stride_;
  }

  // Rows [first, first + count) of a request as float32.
  void copy(int64_t request, int64_t first, int64_t count, int64_t width, float* out) const {
    for (int64_t i = 0; i < count; ++i) {
      const T* from = row(request, first + i);
      for (int64_t j = 0; j < width; ++j) out[i * width + j] = static_cast<float>(from[j]);
    }
  }

 private:
  const char* const operation_;
  const char* const pool_name_;
  const T* const data_;
  const at::Tensor table_;
  const int64_t pages_, rows_, page_stride_, row_stride_, columns_;
};

// The requests of a launch: request i has the query rows [begin(i), end(i)) and, with them, length(i) tokens.
class Lengths {
 public:
  // `ends` are prefix sums, with their leading 0 or without it; `rows` is how many query rows there are.
  Lengths(const char* operation, const at::Tensor& ends, const at::Tensor& lengths, int64_t rows)
      : ends_(ends.contiguous()), lengths_(lengths.contiguous()), skip_(ends.numel() - lengths.numel()) {
    const int32_t* end = ends_.const_data_ptr<int32_t>();
    TORCH_CHECK(skip_ == 0 || end[0] == 0, operation, ": the query's prefix sums begin with ", end[0], ", expected 0");
    for (int64_t i = 0; i < requests(); ++i) {
      TORCH_CHECK(begin(i) <= this->end(i) && this->end(i) <= rows, operation, ": request ", i, " has query rows [",
                  begin(i), ", ", this->end(i), "), expected prefix sums that grow to at most ", rows);
      TORCH_CHECK(length(i) >= 0, operation, ": request ", i, " has ", length(i), " tokens, expected none or more");
    }
  }

  int64_t requests() const { return lengths_.numel(); }
  int64_t begin(int64_t i) const { return i + skip_ == 0 ? 0 : ends_.const_data_ptr<int32_t>()[i + skip_ - 1]; }
  int64_t end(int64_t i) const { return ends_.const_data_ptr<int32_t>()[i + skip_]; }
  int64_t length(int64_t i) const { return lengths_.const_data_ptr<int32_t>()[i]; }
  // The position of the first query row: negative where there are more query rows than tokens, as a graph pads.
  int64_t first(int64_t i) const { return length(i) - (end(i) - begin(i)); }

 private:
  const at::Tensor ends_, lengths_;
  const int64_t skip_;
};

// Metadata, int32[1024]. The device's says which core does what for the lengths it was made for; another launch's would
// leave out or repeat work. Here it is a stamp of those lengths, and an operator refuses one made for others.
struct Stamp {
  static constexpr int64_t kSize = 1024;
  const char* operation;
  int32_t kind;  // which operator it is for
  int64_t heads, ratio;

  at::Tensor make(const at::Tensor& ends, const at::Tensor& lengths) const {
    at::Tensor made = at::zeros({kSize}, at::kInt);
    int32_t* data = made.mutable_data_ptr<int32_t>();
    const uint64_t hash = hash_of(lengths, hash_of(ends, 0xCBF29CE484222325ull));
    const int32_t head[] = {kind, static_cast<int32_t>(heads), static_cast<int32_t>(ratio),
                            static_cast<int32_t>(hash & 0xFFFFFFFF), static_cast<int32_t>(hash >> 32)};
    std::copy(std::begin(head), std::end(head), data);
    return made;
  }

  void check(const at::Tensor& metadata, const at::Tensor& ends, const at::Tensor& lengths) const {
    const at::Tensor found = metadata.contiguous(), expected = make(ends, lengths);
    const int32_t* f = found.const_data_ptr<int32_t>();
    const int32_t* e = expected.const_data_ptr<int32_t>();
    TORCH_CHECK(f[0] == e[0], operation, ": metadata: not what ", operation, "_metadata has filled");
    TORCH_CHECK(f[1] == e[1] && f[2] == e[2], operation, ": metadata: made for ", f[1], " heads and ratio ", f[2],
                ", the launch has ", e[1], " and ", e[2]);
    TORCH_CHECK(f[3] == e[3] && f[4] == e[4], operation, ": metadata: made for other lengths than this launch's");
  }

 private:
  static uint64_t hash_of(const at::Tensor& values, uint64_t hash) {
    const at::Tensor v = values.contiguous();
    for (int64_t i = 0; i < v.numel(); ++i)
      hash = (hash ^ static_cast<uint32_t>(v.const_data_ptr<int32_t>()[i])) * 0x100000001B3ull;
    return hash;
  }
};

}  // namespace softnpu
