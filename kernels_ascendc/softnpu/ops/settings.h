// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors

// Process-wide switches and counters of the operator core.
//
// Waivers switch off one named limit of an operator each; all are on (limits hold) at start. Those of the compressor:
//   compressor.hidden         hidden 1024..10240 and a multiple of 512
//   compressor.head_dim       head dim 128 or 512
//   compressor.rope_head_dim  rope head dim 64
//   compressor.scenario       (ratio, coff, head dim) one of (4,2,512) (4,2,128) (128,1,512)
//   compressor.fp32           x, weights and norm in float16 or bfloat16 only
// Options (integers; the binding and tests set them by name):
//   compressor.saturate  0: infinities and NaN survive the final cast (INF_NAN mode, the default of torch_npu)
//                        1: saturation mode: +-inf becomes the largest finite value, NaN becomes 0
//   compressor.cores     1..96, how many cores share a launch (24): decides which slice wins where two logical
//                        rows are saved to one physical row, and in which order windows are emitted
//   compressor.seed      seed of that order
//   compressor.threads   host threads of one launch (2); never changes a result
// Counters only grow, until softnpu_reset_stats().
#ifndef SOFTNPU_OPS_SETTINGS_H
#define SOFTNPU_OPS_SETTINGS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// 0, or -1 when the name (or the value of an option) is unknown; then softnpu_last_error() says what is known.
int softnpu_waive(const char* name, int on);
int softnpu_is_waived(const char* name);
// Adds the waiver of a limit that another library checks. Once is enough, more often changes nothing.
void softnpu_add_waiver(const char* name);
int softnpu_set_option(const char* name, int64_t value);
int softnpu_get_option(const char* name, int64_t* value);
int softnpu_stat(const char* name, int64_t* value);
void softnpu_reset_stats(void);
// Names, comma separated, in a fixed order.
const char* softnpu_waiver_names(void);
const char* softnpu_option_names(void);
const char* softnpu_stat_names(void);
// Message of the last refusal of this thread.
const char* softnpu_last_error(void);

#ifdef __cplusplus
}

#include <atomic>
#include <string>

namespace softnpu {

enum class Waiver { hidden, head_dim, rope_head_dim, scenario, fp32, count_ };
enum class Option { saturate, cores, seed, threads, count_ };
enum class Stat {
  launches,
  rows_saved,
  rows_unmapped,
  rows_clobbered,
  rows_read,
  page0_reads,
  rows_emitted,
  rows_poisoned,
  faults,
  metadata_launches,
  count_
};

bool waived(Waiver waiver);
int64_t option(Option option);
void count(Stat stat, int64_t amount);
int refuse(const std::string& message);  // remembers the message for softnpu_last_error, returns SOFTNPU_REFUSED

}  // namespace softnpu
#endif

#endif  // SOFTNPU_OPS_SETTINGS_H
