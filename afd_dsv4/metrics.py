# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The plugin's Prometheus metrics: what a worker's tails and workspace slots do, and what the gate says.

Problem: `/metrics` is served by vLLM's API server, and tails and slots live in workers, which are other processes;
vLLM's own loggers are not told of workers, and drop every collector with "vllm" in its name
(vllm/v1/metrics/prometheus.py:unregister_vllm_metrics).
Way: prometheus_client's multiprocess mode, which vLLM itself uses with several API servers: where
PROMETHEUS_MULTIPROC_DIR names a folder, every process writes its values to a file there, and the API server's page is
the sum of the files. A value must therefore be written when it changes, nobody can ask a worker for it: once a step,
behind the forward that is queued, a constant number of counters that arena, store and staging ring keep anyway is
looked at, and those that changed are written. Gauges are `livemostrecent`: one series belongs to one worker, and where
that was restarted the new process counts. The front end counts decisions and refusals of its own; with one API server
these are on its page in any case.
Without the variable a worker writes nothing and says so, once. One that was forked from a process which loaded
prometheus_client without it cannot write, and says that (`vllm serve` spawns its workers). Metrics that cannot be
written are given up with a warning; they never end a server. That takes care on a full disk: prometheus_client maps
files of holes, and a store into a hole that finds no room is a signal, which ends the process. So the bytes of a file
exist before a series of ours is put into it (`_reserve`).
Not here: figures that the device would have to be asked for. A slot counts as sealed until somebody has seen its fence
passed, which the next acquire does. The files of other metrics, vLLM's own, are as prometheus_client makes them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from afd_dsv4.gate import Decision
from afd_dsv4.geometry import CompressorKind
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SeatIndex, TailStore
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.lease import LeaseState
from afd_dsv4.workspace.staging import StagingRing

_logger: Final = logging.getLogger("vllm.plugins.afd_dsv4")

PREFIX: Final = "afd_dsv4_"
VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
#: Keeps series of workers that were marked dead (prometheus_client.multiprocess.mark_process_dead) off the page.
_GAUGE_MODE: Final = "livemostrecent"
#: What prometheus_client gives a new file, and doubles when it is full (prometheus_client/mmap_dict.py).
_FILE_BYTES: Final = 1 << 16
#: More than one series of ours takes in a file, the longest reason included.
_ROOM: Final = 1 << 12
_LONGEST_REASON: Final = 200  # a character is 12 bytes at most
UNUSED: Final = "unused"
#: Exceptions from here are ours; each that comes out of a forward ends its engine.
_OURS: Final = __name__.partition(".")[0] + "."


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as a query writes it, without the prefix.
        labels: of its series.
        where: "worker", or "front end" where vLLM's configuration is made and requests are taken.
        text: what it counts.

    Raises:
        ValueError: a name that vLLM would drop.
    """

    name: str
    labels: tuple[str, ...]
    where: str
    text: str

    def __post_init__(self) -> None:
        if "vllm" in self.name:
            raise ValueError(f"metric {self.name!r}: vLLM unregisters every name with 'vllm' in it")

    @property
    def full_name(self) -> str:
        """The name of a query."""
        return PREFIX + self.name

    @property
    def counts(self) -> bool:
        """Whether it only ever grows; else it is a gauge."""
        return self.name.endswith("_total")


#: Of one worker: rank of its engine in data parallelism, and its own among all workers of the server.
_WORKER: Final = ("engine", "rank")
_STATES: Final = (UNUSED, *(state.value for state in LeaseState))
_SEATS: Final = ("used", "free", "in_doubt")

EXECUTOR: Final = Metric("executor", (*_WORKER, "executor"), "worker", "1 for the executor in use: `stock` or `afd`")
SLOTS: Final = Metric(
    "slots",
    (*_WORKER, "state"),
    "worker",
    "workspace slots by the state of their last lease: `unused`, `acquired`, `sealed` (its fence has not been seen to "
    "have passed), `settled`, `quarantined` (never leased again)",
)
TAIL_PAGES: Final = Metric(
    "tail_pages",
    (*_WORKER, "kind", "state"),
    "worker",
    "pages of tails by compressor kind: `used` by requests, `free`, `in_doubt` (never taken again), and `spare` in the "
    "slots",
)
TAIL_REQUESTS: Final = Metric(
    "tail_requests",
    (*_WORKER, "state"),
    "worker",
    "requests that there are tails for (`max_num_seqs`): `used`, `free`, `in_doubt`",
)
ALLOCATED: Final = Metric(
    "allocated_bytes",
    (*_WORKER, "part"),
    "worker",
    "memory that the plugin holds: `tails_and_spares`, `lists`, `tables`, `staging`, `rows` (of the afd executor) on "
    "the device, `host` in pinned host memory",
)
LEASES: Final = Metric("leases_total", _WORKER, "worker", "leases acquired, one an execution")
UPLOADS: Final = Metric("uploads_total", _WORKER, "worker", "copies of page lists to the device, one an execution")
RECORDS: Final = Metric("events_recorded_total", _WORKER, "worker", "events recorded")
WAITS: Final = Metric("stream_waits_total", _WORKER, "worker", "waits of a stream for another one")
HOST_WAITS: Final = Metric(
    "host_waits_total",
    _WORKER,
    "worker",
    "waits of the host for an upload that was still queued; more than a few: the device is behind",
)
HANDED_ON: Final = Metric(
    "slots_handed_on_total",
    _WORKER,
    "worker",
    "slots taken over while their fence was pending: more executions in flight than slots; or graphs that are replayed "
    "one behind the other, which costs nothing: they share a slot and a stream",
)
EXHAUSTED: Final = Metric("exhausted_total", _WORKER, "worker", "executions that found no slot")
QUARANTINED: Final = Metric(
    "quarantined_total", _WORKER, "worker", "leases that nobody can prove to be over; above 0: plan a restart"
)
FORWARDS_REFUSED: Final = Metric(
    "forward_refusals_total",
    (*_WORKER, "reason"),
    "worker",
    "forwards refused by the plugin, by the name of its exception (`Exhausted`, `TailFull`, ...); each ends its engine",
)
DECISIONS: Final = Metric(
    "decisions_total",
    ("mode", "verdict"),
    "front end",
    "configurations that asked for a mode: `on`, `off` (of no use in this role) or `refused`; one a process",
)
REFUSALS: Final = Metric(
    "refusals_total",
    ("what", "reason"),
    "front end",
    "refused: `what` is `configuration` or `request`, `reason` what stands in front of the first colon of the log's "
    "sentence",
)

#: All of them, in the order of docs/metrics.md.
METRICS: Final = (
    EXECUTOR,
    SLOTS,
    TAIL_REQUESTS,
    TAIL_PAGES,
    ALLOCATED,
    LEASES,
    UPLOADS,
    RECORDS,
    WAITS,
    HOST_WAITS,
    HANDED_ON,
    EXHAUSTED,
    QUARANTINED,
    FORWARDS_REFUSED,
    DECISIONS,
    REFUSALS,
)


def table() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | type | labels | from | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        kind, labels = "counter" if metric.counts else "gauge", ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.full_name}` | {kind} | {labels} | {metric.where} | {metric.text} |")
    return "\n".join(lines) + "\n"


class Runtime(Protocol):
    """What is read of a runtime; `compressor/stock.py:StockRuntime` says what each is."""

    tile_tokens: int | None
    shapes: dict[int, TailShape]

    @property
    def arena(self) -> WorkspaceArena[Any]:
        """Its slots."""

    @property
    def store(self) -> TailStore:
        """Its tails."""

    @property
    def staging(self) -> StagingRing[Any, Any]:
        """Its pinned host memory."""

    @property
    def pools(self) -> Mapping[CompressorKind, Any]:
        """Its pages."""

    def allocated(self) -> Any:
        """Bytes of its tensors, a dataclass."""

    def seats_in_doubt(self) -> tuple[SeatIndex, ...]:
        """Seats that are not taken."""


#: By labels, which runtime of this process has their gauges: the one that came last.
_owners: Final[dict[tuple[str, str], int]] = {}
_numbers: Final = itertools.count()


class WorkerMetrics:
    """Writes the metrics of one worker.

    Two of the same labels in one process share their series: counters are the sum of both, gauges those of the one
    that came last. The other leaves them alone from then on, also when it ends.

    Args:
        runtime: of the worker.
        engine: rank of its engine in data parallelism.
        rank: of the worker among those of all engines.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, runtime: Runtime, engine: int, rank: int) -> None:
        self._runtime = runtime
        self._labels = {"engine": str(engine), "rank": str(rank)}
        self._who = str(engine), str(rank)
        self._number = _owners[self._who] = next(_numbers)
        self._off = False
        shapes, seqs, slots = runtime.shapes, runtime.store.max_num_seqs, len(runtime.arena.slots)
        self._pages = [shapes[kind.ratio].layers * shapes[kind.ratio].tail_pages for kind in runtime.pools]
        held = runtime.allocated()
        #: What stays until the end: gauges and their values.
        self._constant: list[tuple[Any, float]] = [
            (self._child(EXECUTOR, executor="stock" if runtime.tile_tokens is None else "afd"), 1),
            *((self._child(ALLOCATED, part=part.name), getattr(held, part.name)) for part in fields(held)),
            *(
                (
                    self._child(TAIL_PAGES, kind=kind.value, state="spare"),
                    slots * seqs * shapes[kind.ratio].spare_pages,
                )
                for kind in runtime.pools
            ),
        ]
        for gauge, value in self._constant:
            gauge.set(value)
        #: In the order of `_read`.
        self._write: list[Callable[[float], None]] = [
            *(self._child(metric).inc for metric in _COUNTED),
            *(self._child(SLOTS, state=state).set for state in _STATES),
            *(self._child(TAIL_REQUESTS, state=state).set for state in _SEATS),
            *(self._child(TAIL_PAGES, kind=kind.value, state=state).set for kind in runtime.pools for state in _SEATS),
        ]
        # A counter goes on where another runtime of this process left it; a gauge is written in any case.
        self._last: list[float] = [0.0] * len(_COUNTED) + [-1.0] * (len(self._write) - len(_COUNTED))
        self.step()

    def step(self) -> None:
        """Write what has changed. Call it once a step, behind the forward; costs the same whatever the load."""
        if self._off:
            return
        try:
            self._put(self._read())
        except Exception as error:
            self._give_up(error)

    def refused(self, error: BaseException) -> None:
        """Count a forward that was refused; exceptions of others are not ours to count."""
        if self._off or not type(error).__module__.startswith(_OURS):
            return
        try:
            self._child(FORWARDS_REFUSED, reason=type(error).__name__).inc()
        except Exception as other:
            self._give_up(other)

    def close(self) -> None:
        """The runtime has ended: count the rest, and let every gauge be 0."""
        self.step()
        if self._off:
            return
        self._off = True
        try:
            self._put([*self._last[: len(_COUNTED)], *[0.0] * (len(self._last) - len(_COUNTED))])
            for gauge, _ in self._constant if self._owns_gauges() else ():
                gauge.set(0)
        except Exception as error:
            self._give_up(error)

    def _child(self, metric: Metric, **labels: str) -> Any:
        return _series(metric, **self._labels, **labels)

    def _owns_gauges(self) -> bool:
        return _owners[self._who] == self._number

    def _put(self, values: list[float]) -> None:
        last = self._last
        for place, value in enumerate(values if self._owns_gauges() else values[: len(_COUNTED)]):
            if value != last[place]:
                self._write[place](value - last[place] if place < len(_COUNTED) else value)
        self._last = values

    def _read(self) -> list[float]:
        arena, store, staging = self._runtime.arena, self._runtime.store, self._runtime.staging
        counters = arena.counters
        values: list[float] = [
            counters.leases,
            staging.copies,
            counters.records,
            counters.waits,
            staging.host_waits,
            counters.handed_on,
            counters.exhausted,
            counters.quarantined,
        ]
        states = [_state(slot) for slot in arena.slots]
        values += [states.count(state) for state in _STATES]
        free = store.free_seats()
        doubt = set(self._runtime.seats_in_doubt()) if counters.quarantined else set()
        takeable = len(free) - sum(seat in doubt for seat in free) if doubt else len(free)
        seats = (store.max_num_seqs - len(doubt) - takeable, takeable, len(doubt))
        values += seats
        for pages in self._pages:
            values += [pages * count for count in seats]
        return values

    def _give_up(self, error: Exception) -> None:
        self._off = True
        _gave_up(error)


#: In the order of `WorkerMetrics._read`.
_COUNTED: Final = (LEASES, UPLOADS, RECORDS, WAITS, HOST_WAITS, HANDED_ON, EXHAUSTED, QUARANTINED)


def of_worker(runtime: Runtime, which: Callable[[], tuple[int, int]]) -> WorkerMetrics | None:
    """Metrics of a worker, None where they are off or cannot be written; says which, once.

    Args:
        runtime: of the worker.
        which: gives the arguments `engine` and `rank`; asked here, so that what it raises costs metrics and no start.
    """
    if not (folder := os.environ.get(VARIABLE)):
        _say(logging.INFO, f"no metrics of workers: {VARIABLE} is not set; to have them, see docs/metrics.md")
        return None
    try:
        from prometheus_client import values

        if values.ValueClass is values.MutexValue:
            raise RuntimeError(
                f"prometheus_client was loaded before {VARIABLE} was set, in the process that this one was forked "
                f"from; set VLLM_WORKER_MULTIPROC_METHOD=spawn, or set {VARIABLE} before the server starts"
            )
        made = WorkerMetrics(runtime, *which())
    except Exception as error:
        _gave_up(error)
        return None
    _say(logging.INFO, f"metrics of this worker are written to {folder} once a step")
    return made


def decided(decision: Decision) -> None:
    """Count what the gate said to a configuration that asked for a mode."""
    try:
        verdict = "on" if decision.active else "refused" if decision.refused else "off"
        _series(DECISIONS, mode=decision.requested.value, verdict=verdict).inc()
        for reason in decision.reasons if decision.refused else ():
            _refuse("configuration", reason)
    except Exception as error:
        _gave_up(error)


def request_refused(reason: str) -> None:
    """Count a request that was refused.

    Args:
        reason: the sentence that its sender gets.
    """
    try:
        _refuse("request", reason)
    except Exception as error:
        _gave_up(error)


def _refuse(what: str, sentence: str) -> None:
    _series(REFUSALS, what=what, reason=sentence.partition(":")[0][:_LONGEST_REASON]).inc()


def _state(slot: Any) -> str:
    """Of a slot's last lease, without asking the device."""
    lease = slot.quarantined or slot.lease or slot.last
    return str(lease.state.value) if lease else UNUSED


def _series(metric: Metric, **labels: str) -> Any:
    """One series, in a file whose bytes exist."""
    made = _made()[metric.name]
    _reserve("counter" if metric.counts else f"gauge_{_GAUGE_MODE}")
    return made.labels(**labels)


def _reserve(kind: str) -> None:
    """Give this process's file of a kind its bytes, with room for one more series; without such files, do nothing.

    prometheus_client takes a file as long as it finds it, and makes it twice as long when it is full: so does this,
    one series earlier.

    Raises:
        OSError: there is no room. A file that was not there before is not left, because one of no bytes would break
            the page.
    """
    from prometheus_client import values

    if values.ValueClass is values.MutexValue:
        return
    name = os.path.join(os.environ[VARIABLE], f"{kind}_{os.getpid()}.db")  # noqa: PTH118
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)  # as prometheus_client; not to append, or glibc cannot
    try:
        held = os.fstat(file).st_size
        size = max(held, _FILE_BYTES)
        (used,) = struct.unpack("i", os.pread(file, 4, 0).ljust(4, b"\0"))
        try:
            os.posix_fallocate(file, 0, size if used + _ROOM <= size else 2 * size)
        except OSError:
            if not held:
                os.unlink(name)  # noqa: PTH108
            raise
    finally:
        os.close(file)


@functools.cache
def _made() -> Mapping[str, Any]:
    """The metrics of this process, made when first wanted: prometheus_client takes each name once."""
    from prometheus_client import Counter, Gauge

    def make(metric: Metric) -> Any:
        if metric.counts:
            return Counter(metric.full_name, metric.text, metric.labels)
        return Gauge(metric.full_name, metric.text, metric.labels, multiprocess_mode=_GAUGE_MODE)

    return {metric.name: make(metric) for metric in METRICS}


@functools.cache
def _say(level: int, text: str) -> None:
    """Once a process."""
    _logger.log(level, "afd-dsv4: %s", text)


def _gave_up(error: Exception) -> None:
    _say(logging.WARNING, f"metrics are given up: {type(error).__name__}: {error}")
