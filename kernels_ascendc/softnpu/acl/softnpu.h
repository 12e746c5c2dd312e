// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
//
// What the software NPU offers beyond ACL: a way for operator libraries to queue work, and knobs for tests.
// Exported by libascendcl.so. Plain C, so that an operator library needs neither ACL nor torch headers to use it.
#ifndef SOFTNPU_H_
#define SOFTNPU_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Runs fn(arg) on the stream's thread, after everything queued before it. A null stream is the current device's default
// stream. While the stream is being captured the call is recorded instead, and fn(arg) runs at every replay.
// destroy (may be null) is called once, when fn will not be called again: after the run, or with the graph.
// An exception thrown by fn becomes an error of the device: the next synchronisation reports it with its text.
void softnpu_push(void* stream, void (*fn)(void*), void* arg, void (*destroy)(void*));

// Adversarial schedule: before each task of a stream a delay of 0..max_us microseconds, a pure function of (seed,
// stream id, task index). Seed 0 turns it off. Setting it restarts the task index of every stream. Environment:
// SOFTNPU_SEED, SOFTNPU_MAX_DELAY_US (default 200).
void softnpu_set_schedule(uint64_t seed, uint32_t max_us);
uint32_t softnpu_schedule_delay_us(uint64_t seed, uint32_t max_us, int32_t stream_id, uint64_t task_index);

// Extra time for every asynchronous copy, in microseconds. Environment: SOFTNPU_COPY_DELAY_US.
void softnpu_set_copy_delay_us(uint32_t us);

// Bytes of device memory in use and the most there ever were (before torch's caching allocator), since the last reset.
uint64_t softnpu_device_bytes(int32_t device);
uint64_t softnpu_device_peak_bytes(int32_t device);
void softnpu_reset_peak(int32_t device);

// Total delay injected by the adversarial schedule so far, in microseconds.
uint64_t softnpu_delay_injected_us(void);

// Records an error of the device, as a failing task does. For fault injection in tests.
void softnpu_inject_error(int32_t device, const char* message);

// Not 0 once the process is exiting: a task that waits for something must give up then.
int softnpu_exiting(void);

#ifdef __cplusplus
}
#endif
#endif  // SOFTNPU_H_
