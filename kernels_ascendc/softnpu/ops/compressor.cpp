// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// How a launch runs, and why this keeps "all saves before any read" with little memory:
//   1. The plan reads cu_seqlens, start_pos and the table, and finds where each row of the chunk is saved.
//   2. Tiles of some 400 rows are projected; their rows are saved; windows that lie wholly inside the chunk are
//      pooled at once, since they never look at the state. Rows in the middle of a chunk thus live for one tile.
//   3. Only after the last tile are the (at most two per request) windows pooled that reach back before start_pos;
//      the rows of the chunk they need were kept aside in step 2.
// Rows a window needs from the tile before are projected again: a projected row does not depend on its tile.

#include "compressor.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels.h"
#include "numeric.h"
#include "projection.h"
#include "refusal.h"
#include "settings.h"

namespace softnpu {
namespace {

constexpr int64_t kTileRows = 384;
constexpr int64_t kSliceColumns = 64;
constexpr int64_t kMaxPoolRows = 256;
constexpr int64_t kMaxHeadDim = 4096;

// ---------------------------------------------------------------------------------------------- checks

std::string dtype_name(int dtype) {
  switch (dtype) {
    case SOFTNPU_FLOAT32:
      return "float32";
    case SOFTNPU_FLOAT16:
      return "float16";
    case SOFTNPU_BFLOAT16:
      return "bfloat16";
    case SOFTNPU_INT32:
      return "int32";
    default:
      return "another type";
  }
}

[[noreturn]] void fail(const std::string& argument, const std::string& found, const std::string& expected) {
  refuse_argument("compressor", argument, found, expected);
}

[[noreturn]] void fail_limit(const std::string& argument, const std::string& found, const std::string& expected,
                             const std::string& waiver) {
  fail(argument, found, expected + " (limit of the stock operator; waiver '" + waiver + "')");
}

void expect_present(const char* name, const SoftnpuTensor& t) {
  if (!t.present) fail(name, "None", "a tensor");
}

void expect_dims(const char* name, const SoftnpuTensor& t, int dims) {
  if (t.dims != dims) fail(name, text(t.dims) + " dims " + shape_text(t), text(dims) + " dims");
}

void expect_size(const char* name, const SoftnpuTensor& t, int dim, int64_t size, const std::string& why) {
  if (t.shape[dim] != size) {
    fail(name, "dim " + text(dim) + " = " + text(t.shape[dim]) + " of " + shape_text(t), text(size) + " (" + why + ")");
  }
}

void expect_dtype(const char* name, const SoftnpuTensor& t, int dtype, const std::string& why) {
  if (t.dtype != dtype) fail(name, dtype_name(t.dtype), dtype_name(dtype) + (why.empty() ? "" : " (" + why + ")"));
}

void expect_rows(const char* name, const SoftnpuTensor& t, bool dense) {
  if (elements(t) == 0) return;  // has no layout
  const int last = t.dims - 1;
  if (t.shape[last] > 1 && t.stride[last] != 1) fail(name, "last stride " + text(t.stride[last]), "1");
  int64_t stride = t.shape[last];
  for (int i = last - 1; dense && i >= 0; stride *= t.shape[i], --i) {
    if (t.shape[i] > 1 && t.stride[i] != stride) {
      fail(name, "stride " + text(t.stride[i]) + " in dim " + text(i), text(stride) + " (contiguous)");
    }
  }
}

void check(const SoftnpuCompressorArgs& a) {
  const std::pair<const char*, const SoftnpuTensor*> required[] = {{"x", &a.x},
                                                                   {"wkv", &a.wkv},
                                                                   {"wgate", &a.wgate},
                                                                   {"state_cache", &a.state_cache},
                                                                   {"ape", &a.ape},
                                                                   {"norm_weight", &a.norm_weight},
                                                                   {"rope_sin", &a.rope_sin},
                                                                   {"rope_cos", &a.rope_cos},
                                                                   {"state_block_table", &a.state_block_table},
                                                                   {"cu_seqlens", &a.cu_seqlens}};
  for (const auto& [name, tensor] : required) expect_present(name, *tensor);
  if (a.seqused.present) fail("seqused", "a tensor", "None (it selects another template, which is not modelled)");

  if (a.x.dims == 3) fail("x", "3 dims " + shape_text(a.x), "2 dims (layout BSH is not modelled)");
  const std::pair<const char*, int> dims[] = {
      {"x", 2},           {"wkv", 2},      {"wgate", 2},    {"state_cache", 3},       {"ape", 2},
      {"norm_weight", 1}, {"rope_sin", 2}, {"rope_cos", 2}, {"state_block_table", 2}, {"cu_seqlens", 1}};
  for (size_t i = 0; i < std::size(dims); ++i) expect_dims(dims[i].first, *required[i].second, dims[i].second);
  if (a.start_pos.present) expect_dims("start_pos", a.start_pos, 1);

  // Attributes.
  if (a.cache_mode != 1) fail("cache_mode", text(a.cache_mode), "1 (arch32 tiling accepts no other)");
  if (a.rotary_mode != 2) fail("rotary_mode", text(a.rotary_mode), "2 (interleaved)");
  if (a.cmp_ratio <= 0) fail("cmp_ratio", text(a.cmp_ratio), "greater than 0");
  if (a.coff != 1 && a.coff != 2) fail("coff", text(a.coff), "1 or 2");
  const int64_t head_dim = a.norm_weight.shape[0], hidden = a.x.shape[1], pool_rows = a.coff * a.cmp_ratio;
  if (a.rope_head_dim != 64 && !waived(Waiver::rope_head_dim)) {
    fail_limit("rope_head_dim", text(a.rope_head_dim), "64", "compressor.rope_head_dim");
  }
  if (a.rope_head_dim < 2 || a.rope_head_dim % 2 != 0 || (head_dim > 0 && a.rope_head_dim > head_dim)) {
    fail("rope_head_dim", text(a.rope_head_dim), "even, 2.." + text(head_dim));
  }

  // Element types.
  const bool fp32 = a.x.dtype == SOFTNPU_FLOAT32;
  if (fp32 && !waived(Waiver::fp32)) {
    fail_limit("x", "float32", "bfloat16 or float16", "compressor.fp32");
  }
  if (!fp32 && a.x.dtype != SOFTNPU_BFLOAT16 && a.x.dtype != SOFTNPU_FLOAT16) {
    fail("x", dtype_name(a.x.dtype), "bfloat16 or float16");
  }
  expect_dtype("wkv", a.wkv, a.x.dtype, "as x");
  expect_dtype("wgate", a.wgate, a.x.dtype, "as x");
  expect_dtype("norm_weight", a.norm_weight, a.x.dtype, "as x on A2/A3");
  expect_dtype("state_cache", a.state_cache, SOFTNPU_FLOAT32, "");
  expect_dtype("ape", a.ape, SOFTNPU_FLOAT32, "");
  if (a.rope_sin.dtype != SOFTNPU_FLOAT32) expect_dtype("rope_sin", a.rope_sin, a.x.dtype, "as x, or float32");
  expect_dtype("rope_cos", a.rope_cos, a.rope_sin.dtype, "as rope_sin");
  expect_dtype("state_block_table", a.state_block_table, SOFTNPU_INT32, "");
  expect_dtype("cu_seqlens", a.cu_seqlens, SOFTNPU_INT32, "");
  if (a.start_pos.present) expect_dtype("start_pos", a.start_pos, SOFTNPU_INT32, "");

  // Empty arguments: x without tokens is a launch that does nothing; anything else empty fails tiling.
  const int64_t tokens = a.x.shape[0];
  for (const auto& [name, tensor] : required) {
    if (tokens != 0 && elements(*tensor) == 0) {
      fail(name, "an empty tensor " + shape_text(*tensor), "at least one element (only x may have no tokens)");
    }
  }

  // Sizes.
  if (a.cu_seqlens.shape[0] < 1) fail("cu_seqlens", "dim 0 = 0", "B + 1");
  if (head_dim != 128 && head_dim != 512 && !waived(Waiver::head_dim)) {
    fail_limit("norm_weight", "head dim " + text(head_dim), "128 or 512", "compressor.head_dim");
  }
  if (head_dim < 1 || head_dim > kMaxHeadDim) fail("norm_weight", text(head_dim), "head dim 1.." + text(kMaxHeadDim));
  if ((hidden < 1024 || hidden > 10240 || hidden % 512 != 0) && !waived(Waiver::hidden)) {
    fail_limit("x", "hidden " + text(hidden), "1024..10240 and a multiple of 512", "compressor.hidden");
  }
  const bool known = (a.cmp_ratio == 4 && a.coff == 2) || (a.cmp_ratio == 128 && a.coff == 1 && head_dim != 128);
  if (!known && !waived(Waiver::scenario)) {
    fail_limit("cmp_ratio, coff, head dim", text(a.cmp_ratio) + ", " + text(a.coff) + ", " + text(head_dim),
               "4, 2, 512 or 4, 2, 128 or 128, 1, 512", "compressor.scenario");
  }
  if (pool_rows > kMaxPoolRows || (pool_rows & (pool_rows - 1)) != 0) {
    fail("cmp_ratio", text(a.cmp_ratio), "a power of two with coff * cmp_ratio <= " + text(kMaxPoolRows));
  }
  const int64_t batch = a.cu_seqlens.shape[0] - 1, half = a.coff * head_dim;
  const int64_t rows = std::min(tokens, tokens / a.cmp_ratio + batch);
  expect_size("state_block_table", a.state_block_table, 0, batch, "batch, from cu_seqlens");
  if (a.start_pos.present) expect_size("start_pos", a.start_pos, 0, batch, "batch, from cu_seqlens");
  expect_size("wkv", a.wkv, 0, half, "coff * head dim");
  expect_size("wkv", a.wkv, 1, hidden, "hidden, from x");
  expect_size("wgate", a.wgate, 0, half, "coff * head dim");
  expect_size("wgate", a.wgate, 1, hidden, "hidden, from x");
  expect_size("state_cache", a.state_cache, 2, 2 * half, "2 * coff * head dim");
  expect_size("ape", a.ape, 0, a.cmp_ratio, "cmp_ratio");
  expect_size("ape", a.ape, 1, half, "coff * head dim");
  expect_size("rope_sin", a.rope_sin, 0, rows, "min(T, T / cmp_ratio + B)");
  expect_size("rope_cos", a.rope_cos, 0, rows, "min(T, T / cmp_ratio + B)");
  expect_size("rope_sin", a.rope_sin, 1, a.rope_head_dim, "rope_head_dim");
  expect_size("rope_cos", a.rope_cos, 1, a.rope_head_dim, "rope_head_dim");

  // Layout. Only the dim-0 stride of the state cache is passed to the kernel; the rest it takes for granted.
  expect_rows("x", a.x, false);
  for (const auto& [name, tensor] : required) {
    if (tensor != &a.x && tensor != &a.state_cache) expect_rows(name, *tensor, true);
  }
  if (a.start_pos.present) expect_rows("start_pos", a.start_pos, true);
  const SoftnpuTensor& s = a.state_cache;
  expect_rows("state_cache", s, false);
  if (s.shape[1] > 1 && s.stride[1] != s.shape[2]) {
    fail("state_cache", "stride " + text(s.stride[1]) + " in dim 1", text(s.shape[2]) + " (rows of a page adjoin)");
  }
  if (s.shape[0] > 1 && s.stride[0] < s.shape[1] * s.shape[2]) {
    fail("state_cache", "stride " + text(s.stride[0]) + " in dim 0",
         "at least " + text(s.shape[1] * s.shape[2]) + " (pages do not overlap)");
  }

  expect_present("out", a.out);
  expect_dims("out", a.out, 2);
  expect_dtype("out", a.out, a.x.dtype, "as x");
  expect_size("out", a.out, 0, rows, "rows of rope_sin");
  expect_size("out", a.out, 1, head_dim, "head dim");
  expect_rows("out", a.out, true);
}

// ---------------------------------------------------------------------------------------------- running

// splitmix64: a full-period mixer, so that any seed gives an unrelated order.
uint64_t mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

template <typename T>
void shuffle(std::vector<T>& items, uint64_t seed) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[(seed = mix(seed)) % i]);
}

// The first fault is the message; later ones are counted.
class Faults {
 public:
  void add(const std::string& message) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (count_++ == 0) first_ = message;
  }
  int report() {
    if (count_ == 0) return SOFTNPU_OK;
    count(Stat::faults, count_);
    refuse("compressor: " + first_ + (count_ > 1 ? " (and " + text(count_ - 1) + " more)" : "") +
           "; the result rows concerned are poison");
    return SOFTNPU_FAULT;
  }

 private:
  std::mutex mutex_;
  std::string first_;
  int64_t count_ = 0;
};

struct Request {
  int64_t first, length, start;  // first token in the packed chunk; tokens; position of the first one
  int64_t window, windows;       // index of the first window that completes in the chunk; how many do
  int64_t out_row;               // of the first window
  int64_t kept, kept_rows;       // the first kept_rows rows of the chunk lie at `kept` in the kept rows
};

struct Tile {
  int64_t begin, end, project_from;  // tokens [begin, end) are this tile's own; rows before are projected again
};

class Launch {
 public:
  explicit Launch(const SoftnpuCompressorArgs& args)
      : a_(args),
        pool_(pool_kernel()),
        head_dim_(args.norm_weight.shape[0]),
        half_(args.coff * head_dim_),
        row_dim_(2 * half_),
        ratio_(args.cmp_ratio),
        overlap_(args.coff == 2),
        page_rows_(args.state_cache.shape[1]),
        columns_(args.state_block_table.shape[1]),
        state_(static_cast<float*>(args.state_cache.data)),
        table_(static_cast<const int32_t*>(args.state_block_table.data)),
        norm_weight_(head_dim_),
        missing_row_(row_dim_, float_of(kPoison32)) {
    convert_to_float(args.norm_weight.data, args.norm_weight.dtype, 0, head_dim_, norm_weight_.data());
  }

  int run() {
    count(Stat::launches, 1);
    poison_rows(0, a_.out.shape[0]);
    if (a_.x.shape[0] == 0) return SOFTNPU_OK;
    if (!plan_requests()) {
      count(Stat::rows_poisoned, a_.out.shape[0]);
      return faults_.report();
    }
    plan_saves();
    run_tiles();
    run_history_windows();
    count(Stat::rows_saved, saved_);
    count(Stat::rows_unmapped, unmapped_);
    count(Stat::rows_clobbered, clobbered_);
    count(Stat::rows_read, read_);
    count(Stat::page0_reads, page0_reads_);
    count(Stat::rows_emitted, emitted_);
    count(Stat::rows_poisoned, a_.out.shape[0] - emitted_);
    return faults_.report();
  }

  void pages(void (*seen)(void*, int64_t, int), void* context) {
    if (a_.x.shape[0] == 0 || !plan_requests()) return;
    plan_saves();
    std::set<int64_t> read, written;
    for (const int64_t row : target_)
      if (row != kUnmapped) written.insert(row / page_rows_);
    for (size_t b = 0; b < requests_.size(); ++b) {
      const Request& r = requests_[b];
      for (int64_t window = r.window; window < r.window + r.windows && reaches_back(r, window); ++window) {
        for (int64_t at = window_begin(window); at < std::min((window + 1) * ratio_, r.start); ++at) {
          bool fault = false;
          const int64_t row = physical_row(static_cast<int64_t>(b), at, "read", fault);
          if (!fault) read.insert(row / page_rows_);
        }
      }
    }
    for (const int64_t page : read) seen(context, page, 0);
    for (const int64_t page : written) seen(context, page, 1);
  }

 private:
  static constexpr int64_t kUnmapped = -1;

  // ------------------------------------------------------------------ plan

  bool plan_requests() {
    const int32_t* cu = static_cast<const int32_t*>(a_.cu_seqlens.data);
    const int32_t* starts = static_cast<const int32_t*>(a_.start_pos.present ? a_.start_pos.data : nullptr);
    const int64_t batch = a_.cu_seqlens.shape[0] - 1, tokens = a_.x.shape[0];
    if (cu[0] != 0) return faults_.add("cu_seqlens[0]: found " + text(cu[0]) + ", expected 0"), false;
    int64_t out_row = 0, kept = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t length = static_cast<int64_t>(cu[b + 1]) - cu[b];
      if (length < 0 || cu[b + 1] > tokens) {
        faults_.add("cu_seqlens[" + text(b + 1) + "]: found " + text(cu[b + 1]) + ", expected " + text(cu[b]) + ".." +
                    text(tokens));
        return false;
      }
      const int64_t start = starts == nullptr || length == 0 ? 0 : starts[b];
      if (start < 0 || start + length > INT32_MAX) {
        faults_.add("start_pos[" + text(b) + "]: found " + text(start) + " with " + text(length) +
                    " tokens, expected 0.." + text(INT32_MAX));
        return false;
      }
      Request r{cu[b], length, start, start / ratio_, (start + length) / ratio_ - start / ratio_, out_row, kept, 0};
      for (int64_t window = r.window; window < r.window + r.windows && reaches_back(r, window); ++window) {
        r.kept_rows = (window + 1) * ratio_ - start;
      }
      out_row += r.windows;
      kept += r.kept_rows;
      requests_.push_back(r);
    }
    tokens_ = cu[batch];
    kept_.resize(static_cast<size_t>(kept * row_dim_));
    request_of_.resize(static_cast<size_t>(tokens_));
    for (size_t b = 0; b < requests_.size(); ++b) {
      std::fill_n(request_of_.begin() + requests_[b].first, requests_[b].length, static_cast<int32_t>(b));
    }
    return true;
  }

  // First position a window pools from.
  int64_t window_begin(int64_t window) const { return std::max<int64_t>(0, (window - overlap_) * ratio_); }
  bool reaches_back(const Request& r, int64_t window) const { return window_begin(window) < r.start; }
  int64_t position(int64_t token) const {
    const Request& r = requests_[request_of_[token]];
    return r.start + token - r.first;
  }

  // Physical row of a position, or kUnmapped (page 0), or a fault (then `fault` is set).
  int64_t physical_row(int64_t request, int64_t position, const char* what, bool& fault) {
    const int64_t column = position / page_rows_;
    if (column >= columns_) {
      faults_.add(std::string(what) + " of position " + text(position) + " of request " + text(request) + ": column " +
                  text(column) + " of the state table, which has " + text(columns_));
      fault = true;
      return kUnmapped;
    }
    const int64_t page = table_[request * columns_ + column];
    if (page < 0 || page >= a_.state_cache.shape[0]) {
      faults_.add(std::string(what) + " of position " + text(position) + " of request " + text(request) + ": page " +
                  text(page) + " of the state cache, which has " + text(a_.state_cache.shape[0]));
      fault = true;
      return kUnmapped;
    }
    return page * page_rows_ + position % page_rows_;
  }

  float* state_row(int64_t physical) const {
    return state_ + physical / page_rows_ * a_.state_cache.stride[0] + physical % page_rows_ * row_dim_;
  }

  void plan_saves() {
    target_.resize(static_cast<size_t>(tokens_));
    std::vector<std::pair<int64_t, int64_t>> mapped;
    for (int64_t token = 0; token < tokens_; ++token) {
      bool fault = false;
      const int64_t physical = physical_row(request_of_[token], position(token), "save", fault);
      target_[token] = physical / page_rows_ == 0 ? kUnmapped : physical;
      if (target_[token] == kUnmapped) {
        unmapped_ += !fault;
      } else {
        mapped.emplace_back(physical, token);
      }
    }
    saved_ = static_cast<int64_t>(mapped.size());
    std::sort(mapped.begin(), mapped.end());
    for (size_t i = 0; i < mapped.size();) {
      size_t next = i + 1;
      while (next < mapped.size() && mapped[next].first == mapped[i].first) ++next;
      if (next - i > 1) {
        auto& rivals = rivals_[mapped[i].first];
        for (; i < next; ++i) rivals.push_back(mapped[i].second);
        clobbered_ += static_cast<int64_t>(rivals.size()) - 1;
      }
      i = next;
    }
  }

  // Where in the launch a core comes that saves this 64-column slice of this row: cores run in any order, one core
  // runs its own slices in token order.
  std::pair<uint64_t, int64_t> rank(int64_t token, int64_t slice) const {
    const int64_t slices = (head_dim_ + kSliceColumns - 1) / kSliceColumns;
    const int64_t groups = std::max<int64_t>(1, a_.cores / slices);
    const int64_t core = (token / (overlap_ ? 128 : 256) % groups * slices + slice) % a_.cores;
    return {mix(static_cast<uint64_t>(a_.seed) ^ mix(core)), token};
  }

  // ------------------------------------------------------------------ tiles

  std::vector<Tile> cut_tiles() const {
    const int64_t share = (tokens_ + a_.threads - 1) / a_.threads;
    const int64_t rows = std::min(kTileRows, std::max<int64_t>(96, (share + 11) / 12 * 12));
    std::vector<Tile> tiles;
    for (int64_t begin = 0; begin < tokens_;) {
      int64_t end = std::min(begin + rows, tokens_);
      if (end < tokens_) {  // rather between two windows than inside one
        const Request& r = requests_[request_of_[end]];
        const int64_t aligned = std::max(r.first, end - position(end) % ratio_);
        if (aligned > begin) end = aligned;
      }
      tiles.push_back({begin, end, project_from(begin, end)});
      begin = end;
    }
    return tiles;
  }

  // The request that runs into a tile may need rows from the tile before, for its first windows here.
  int64_t project_from(int64_t begin, int64_t end) const {
    const Request& r = requests_[request_of_[begin]];
    const int64_t at = position(begin), stop = std::min(end - r.first, r.length) + r.start;
    for (int64_t window = at / ratio_; (window + 1) * ratio_ <= stop; ++window) {
      if (!reaches_back(r, window)) return begin - std::max<int64_t>(0, at - window_begin(window));
    }
    return begin;
  }

  void run_tiles() {
    PackedWeights weights({&a_.wkv, &a_.wgate}, a_.threads);
    std::vector<Tile> tiles = cut_tiles();
    shuffle(tiles, static_cast<uint64_t>(a_.seed));
    std::mutex mutex;
    std::vector<std::unique_ptr<Projector>> idle;
    parallel_for(static_cast<int64_t>(tiles.size()), a_.threads, [&](int64_t i) {
      std::unique_ptr<Projector> projector;
      {
        std::lock_guard<std::mutex> guard(mutex);
        if (!idle.empty()) projector = std::move(idle.back()), idle.pop_back();
      }
      if (!projector) projector = std::make_unique<Projector>(weights);
      run_tile(tiles[i], *projector);
      std::lock_guard<std::mutex> guard(mutex);
      idle.push_back(std::move(projector));
    });
  }

  void run_tile(const Tile& tile, Projector& projector) {
    projector.run(a_.x, tile.project_from, tile.end - tile.project_from);
    const float* ape = static_cast<const float*>(a_.ape.data);
    for (int64_t token = tile.project_from; token < tile.end; ++token) {
      float* score = projector.row(token - tile.project_from) + half_;
      const float* add = ape + position(token) % ratio_ * half_;
      for (int64_t i = 0; i < half_; ++i) score[i] += add[i];
    }
    for (int64_t token = tile.begin; token < tile.end; ++token) {
      const float* row = projector.row(token - tile.project_from);
      save(token, row);
      const Request& r = requests_[request_of_[token]];
      if (token - r.first < r.kept_rows) {
        std::copy_n(row, row_dim_, kept_.data() + (r.kept + token - r.first) * row_dim_);
      }
    }
    for (int64_t token = tile.begin; token < tile.end;) {
      const Request& r = requests_[request_of_[token]];
      const int64_t from = position(token), to = std::min(tile.end - r.first, r.length) + r.start;
      for (int64_t window = from / ratio_; (window + 1) * ratio_ <= to; ++window) {
        if (reaches_back(r, window)) continue;
        emit(r, window,
             [&](int64_t at) -> const float* { return projector.row(r.first + at - r.start - tile.project_from); });
      }
      token += to - from;
    }
  }

  void save(int64_t token, const float* row) {
    const int64_t physical = target_[token];
    if (physical == kUnmapped) return;
    float* target = state_row(physical);
    const auto rivals = rivals_.find(physical);
    if (rivals == rivals_.end()) {
      std::copy_n(row, half_, target);                  // kv first,
      std::copy_n(row + half_, half_, target + half_);  // score second
      return;
    }
    for (int64_t column = 0, slice = 0; column < head_dim_; column += kSliceColumns, ++slice) {
      const auto mine = rank(token, slice);
      if (std::any_of(rivals->second.begin(), rivals->second.end(),
                      [&](int64_t rival) { return rank(rival, slice) > mine; })) {
        continue;
      }
      const int64_t width = std::min(kSliceColumns, head_dim_ - column);
      for (int64_t part = column; part < row_dim_; part += head_dim_) {
        std::copy_n(row + part, width, target + part);
      }
    }
  }

  // ------------------------------------------------------------------ windows

  void run_history_windows() {
    std::vector<std::pair<int64_t, int64_t>> work;  // request, window
    for (size_t b = 0; b < requests_.size(); ++b) {
      const Request& r = requests_[b];
      for (int64_t window = r.window; window < r.window + r.windows && reaches_back(r, window); ++window) {
        work.emplace_back(b, window);
      }
    }
    shuffle(work, mix(static_cast<uint64_t>(a_.seed)) ^ static_cast<uint64_t>(a_.cores));
    std::atomic<int64_t> read{0}, page0{0};
    parallel_for(static_cast<int64_t>(work.size()), a_.threads, [&](int64_t i) {
      const auto [b, window] = work[i];
      const Request& r = requests_[b];
      bool fault = false;
      emit(r, window, [&](int64_t at) -> const float* {
        if (at >= r.start) return kept_.data() + (r.kept + at - r.start) * row_dim_;
        const int64_t physical = physical_row(b, at, "read", fault);
        if (physical == kUnmapped) return missing_row_.data();
        ++read;
        page0 += physical / page_rows_ == 0;
        return state_row(physical);
      });
      if (fault) {
        poison_rows(r.out_row + window - r.window, 1);
        --emitted_;
      }
    });
    read_ = read;
    page0_reads_ = page0;
  }

  // Pools one window, whose row of position p is row_at(p), and stores its result row.
  template <typename RowAt>
  void emit(const Request& r, int64_t window, RowAt row_at) {
    const float *kv[kMaxPoolRows], *score[kMaxPoolRows];
    for (int64_t i = 0; i < ratio_; ++i) {
      if (overlap_) {  // the device interleaves the halves: left of the group before, right of this one
        const float* before = window == 0 ? nullptr : row_at((window - 1) * ratio_ + i);
        const float* own = row_at(window * ratio_ + i);
        kv[2 * i] = before;
        score[2 * i] = before == nullptr ? nullptr : before + half_;
        kv[2 * i + 1] = own + head_dim_;
        score[2 * i + 1] = own + half_ + head_dim_;
      } else {
        kv[i] = row_at(window * ratio_ + i);
        score[i] = kv[i] + half_;
      }
    }
    float row[kMaxHeadDim];
    pool_.pool(kv, score, a_.coff * ratio_, head_dim_, row);
    const int64_t out_row = r.out_row + window - r.window;
    std::vector<float> cos(a_.rope_head_dim), sin(a_.rope_head_dim);
    convert_to_float(a_.rope_cos.data, a_.rope_cos.dtype, out_row * a_.rope_head_dim, a_.rope_head_dim, cos.data());
    convert_to_float(a_.rope_sin.data, a_.rope_sin.dtype, out_row * a_.rope_head_dim, a_.rope_head_dim, sin.data());
    pool_.norm_rope(row, norm_weight_.data(), cos.data(), sin.data(), head_dim_, a_.rope_head_dim,
                    static_cast<float>(a_.norm_eps));
    store(out_row, row);
    ++emitted_;
  }

  void store(int64_t out_row, const float* row) {
    const bool saturate = a_.saturate != 0;
    if (a_.out.dtype == SOFTNPU_FLOAT32) {
      std::copy_n(row, head_dim_, static_cast<float*>(a_.out.data) + out_row * head_dim_);
      return;
    }
    uint16_t* target = static_cast<uint16_t*>(a_.out.data) + out_row * head_dim_;
    for (int64_t i = 0; i < head_dim_; ++i) {
      target[i] = a_.out.dtype == SOFTNPU_BFLOAT16 ? to_bf16(row[i], saturate) : to_fp16(row[i], saturate);
    }
  }

  void poison_rows(int64_t first, int64_t rows) {
    if (a_.out.dtype == SOFTNPU_FLOAT32) {
      std::fill_n(static_cast<uint32_t*>(a_.out.data) + first * head_dim_, rows * head_dim_, kPoison32);
    } else {
      std::fill_n(static_cast<uint16_t*>(a_.out.data) + first * head_dim_, rows * head_dim_,
                  a_.out.dtype == SOFTNPU_BFLOAT16 ? kPoisonBf16 : kPoisonFp16);
    }
  }

  const SoftnpuCompressorArgs& a_;
  const PoolKernel& pool_;
  const int64_t head_dim_, half_, row_dim_, ratio_;
  const int64_t overlap_;  // 1 with overlap, else 0
  const int64_t page_rows_, columns_;
  float* const state_;
  const int32_t* const table_;
  std::vector<float> norm_weight_;
  const std::vector<float> missing_row_;
  Faults faults_;
  int64_t tokens_ = 0;
  std::vector<Request> requests_;
  std::vector<int32_t> request_of_;                           // per token
  std::vector<int64_t> target_;                               // per token: physical row
  std::unordered_map<int64_t, std::vector<int64_t>> rivals_;  // physical row -> tokens saved to it, if several
  std::vector<float> kept_;
  int64_t saved_ = 0, unmapped_ = 0, clobbered_ = 0, read_ = 0, page0_reads_ = 0;
  std::atomic<int64_t> emitted_{0};
};

}  // namespace
}  // namespace softnpu

using namespace softnpu;

extern "C" {

int softnpu_compressor_check(SoftnpuCompressorArgs* args) {
  if (const int status = checked([&] { check(*args); })) return status;
  args->saturate = option(Option::saturate);
  args->cores = option(Option::cores);
  args->seed = option(Option::seed);
  args->threads = option(Option::threads);
  return SOFTNPU_OK;
}

int softnpu_compressor_run(const SoftnpuCompressorArgs* args) {
  try {
    return Launch(*args).run();
  } catch (const std::exception& error) {  // out of host memory, no thread
    count(Stat::faults, 1);
    refuse(std::string("compressor: ") + error.what());
    return SOFTNPU_FAULT;
  }
}

void softnpu_compressor_pages(const SoftnpuCompressorArgs* args, void (*seen)(void*, int64_t, int), void* context) {
  Launch(*args).pages(seen, context);
}

int softnpu_project(const SoftnpuTensor* x, const SoftnpuTensor* weight, const SoftnpuTensor* out, int64_t threads) {
  if (x->dims != 2 || weight->dims != 2 || out->dims != 2 || x->shape[1] != weight->shape[1] ||
      out->shape[0] != x->shape[0] || out->shape[1] != weight->shape[0] || x->dtype != weight->dtype) {
    return refuse("project: found " + shape_text(*x) + ", " + shape_text(*weight) + ", " + shape_text(*out) +
                  ", expected x [T, H], weight [N, H] of one type and out [T, N]");
  }
  const PackedWeights weights({weight}, threads);
  const int64_t rows = x->shape[0], tiles = (rows + kTileRows - 1) / kTileRows;
  parallel_for(tiles, threads, [&](int64_t tile) {
    const int64_t first = tile * kTileRows, count = std::min(kTileRows, rows - first);
    Projector projector(weights);
    projector.run(*x, first, count);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(projector.row(i), weights.columns(),
                  static_cast<float*>(out->data) + (first + i) * weights.columns());
    }
  });
  return SOFTNPU_OK;
}

const char* softnpu_isa(void) { return isa_name(); }
int softnpu_select_isa(const char* name) { return select_isa(name) ? 0 : -1; }

}  // extern "C"
