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

// The bytes that a task reads or writes: `rows` runs of `bytes` bytes, `stride` bytes from one to the next.
typedef struct SoftnpuAccess {
  const void* address;
  uint64_t bytes;
  uint64_t rows;
  uint64_t stride;
  int32_t writes;
  int32_t reserved;
} SoftnpuAccess;

// softnpu_push, with what the race detector and errors want to know: the operator's name and the memory that it
// touches. finds_more: the task calls softnpu_found_access when it runs, because only the device knows what it touches.
void softnpu_push_task(void* stream, const char* name, void (*fn)(void*), void* arg, void (*destroy)(void*),
                       const SoftnpuAccess* accesses, uint64_t count, int finds_more);
void softnpu_found_access(const SoftnpuAccess* accesses, uint64_t count);
// Whether anybody wants to know: the detector is on, or the stream is being captured.
int softnpu_wants_accesses(void* stream);
// What the caller has done itself, or will, in the place of a task of this stream.
void softnpu_stream_access(void* stream, const char* name, const SoftnpuAccess* accesses, uint64_t count);
// What the host does: races with everything that it has not seen to be done.
void softnpu_host_access(const char* name, const SoftnpuAccess* accesses, uint64_t count);

// The race detector, see races.h. Turning it on starts anew: what was queued before is not known. Environment:
// SOFTNPU_RACES=1.
typedef struct SoftnpuSite {
  char name[96];
  int32_t stream;  // ACL's stream id; -1: the host
  int32_t writes;
  uint64_t task;  // how many tasks the stream had been given before, since the detector was turned on
} SoftnpuSite;
typedef struct SoftnpuRace {
  SoftnpuSite first, second;  // in the order in which they were judged
  uint64_t address, bytes;    // from the first to the last shared byte
} SoftnpuRace;
void softnpu_set_races(int on);
int softnpu_races_on(void);
uint64_t softnpu_race_count(void);                            // all there were
uint64_t softnpu_races(SoftnpuRace* out, uint64_t capacity);  // the first of them, 1000 at most; how many
void softnpu_clear_races(void);

// Faults. A stream is ACL's handle, null the current device's default stream.
void softnpu_hang_stream(void* stream);              // what is queued from now on does not run until it is released
void softnpu_release_stream(void* stream);           // every hang of the stream
void softnpu_kill_stream(void* stream);              // what is queued, now and later, never runs; synchronising raises
void softnpu_fail_task(void* stream, uint64_t nth);  // the nth kernel, copy or host function from now; 1 is the next
// The next `times` calls of a kind return the ACL error `code`. kind: 0 create, 1 record, 2 wait, 3 query (of an
// event). stream: only records and waits on it; SOFTNPU_ANY_STREAM: all.
#define SOFTNPU_ANY_STREAM ((void*)-1)
void softnpu_fail_calls(int kind, void* stream, int32_t code, uint32_t times);
// Each call of the kinds in the mask (1 << kind; 1 << 4: each task) fails with this probability, a function of seed,
// kind and number of the call (of seed, stream and number of the task). Mask 0 turns it off.
void softnpu_set_fault_rate(uint64_t seed, double probability, uint32_t kinds, int32_t code);
uint64_t softnpu_faults_injected(void);
// Ends all of the above. A stream that was dead runs again what is queued from now on; what it lost stays lost, but
// its events complete, so that nobody waits for ever.
void softnpu_clear_faults(void);

// Graphs. How many replays there were, in all, and what the graph that was replayed last touches, as far as that was
// known when it was captured: how many pieces (`out` gets the first `capacity`), none once the graph is gone.
uint64_t softnpu_replays(void);
uint64_t softnpu_replayed_accesses(SoftnpuAccess* out, uint64_t capacity);

uint64_t softnpu_events_created(void);
uint64_t softnpu_events_destroyed(void);

// Adversarial schedule: before each task of a stream a delay of 0..max_us microseconds, a pure function of (seed,
// stream id, task index). Seed 0 turns it off. Setting it restarts the task index of every stream. Environment:
// SOFTNPU_SEED, SOFTNPU_MAX_DELAY_US (default 200).
void softnpu_set_schedule(uint64_t seed, uint32_t max_us);
// The other adversarial schedule: some tasks, a pure function of the same three, are held back, and their stream with
// them, until no other stream has anything to run and the host waits, or max_us microseconds have passed. Environment:
// SOFTNPU_SCHEDULE=starve.
void softnpu_set_starvation(uint64_t seed, uint32_t max_us);
int softnpu_schedule_holds(uint64_t seed, int32_t stream_id, uint64_t task_index);
uint64_t softnpu_tasks_held(void);
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

// A group of ranks by name, as HCCL's communicators make them: for ranks of one process, and tests. 0, or -1 with the
// reason on stderr. See groups.h.
int softnpu_group_join(const char* name, uint32_t size, uint32_t rank);
int softnpu_group_leave(const char* name, uint32_t rank);
int softnpu_group_waiting(const char* name, uint32_t rank);  // receives that wait now; -1: no such rank here
void softnpu_set_destroy_hangs(int on);                      // SOFTNPU_DESTROY=hang, or error

// Not 0 once the process is exiting: a task that waits for something must give up then.
int softnpu_exiting(void);

#ifdef __cplusplus
}
#endif
#endif  // SOFTNPU_H_
