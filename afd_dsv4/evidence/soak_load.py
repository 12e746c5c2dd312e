# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The load of a soak: random forwards through the real stock runtime, each with at most one planted fault.

Requests come and go; a batch is cut into two uBatches, mostly inside a request; decode and prefill are one launch or
two; each uBatch has a stream of its own, and a thread of its own or one for both; some kinds go to an auxiliary stream;
the host runs ahead by as many forwards as asynchronous scheduling lets it, or without limit. What a fault must lead to
is asserted where it is planted, and an outcome that is another is noted, not raised: the load goes on.
Not here: rounds, what is compared and counted at their end, and the faults that end one (`soak.py`).
"""

from __future__ import annotations

import enum
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from threading import Event
from typing import Any, cast

import torch

from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.compressor.stock import StockExecution, StockRuntime
from afd_dsv4.evidence.stamps import Audit, Launch, Ledgers, Planted, Rows, Witness, planned_tables
from afd_dsv4.execution.ubatch import cut
from afd_dsv4.geometry import CompressorKind, ModelGeometry, PageLayout
from afd_dsv4.tail.store import TailVoid
from afd_dsv4.tail.tables import Int32Array, RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted, Settlement
from afd_dsv4.workspace.identity import ExecutionId, Generation
from afd_dsv4.workspace.lease import Lease, OrderError
from afd_dsv4.workspace.trace import Trace

# Two layers of one ratio, between which pages pass on, and one with two kinds; rows of a few words.
GEOMETRY = ModelGeometry("soak", 1, 3, (128, 4, 128), head_dim=4, index_head_dim=2, qk_rope_head_dim=1)
COMPRESSORS = GEOMETRY.compressors
LAYOUT = PageLayout(16, 16, 16, 4, 32, 4096, 4096)
SEATS = 4
MAX_TOKENS = 192  # of one execution
LENGTH = 400  # positions of a request
CHUNKS = (2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 64, 100)
FENCE_TIMEOUT_S = 60.0  # of a clock that the soak turns
STREAMS = 3
LEDGER_WORDS = 1 << 20
FORWARD_WORDS = 1 << 17  # more than any forward leaves in one ledger


class Fault(enum.Enum):
    """What is planted."""

    CANCEL = "request cancelled with two forwards in flight"
    SWALLOWED = "exception in a uBatch, swallowed by its thread"
    LAYER = "exception inside a launch"
    BETWEEN = "exception between two launches"
    UPLOAD = "begin fails in the upload"
    EXHAUSTED = "a slot asked for while all are held"
    SETTLED_TWICE = "lease settled twice"
    SETTLED_STALE = "lease of an old generation settled"
    STALL = "stream that stalls during a forward"
    SHUTDOWN = "shutdown with work outstanding"
    FENCE = "stream that never advances, found at an acquire"
    WATCH = "stream that never advances, found by the watchdog"
    DRAIN = "stream that never advances, found at shutdown"
    DOUBT = "stream that never advances, and another that waits for it"


class Clock:
    """Seconds that pass when it is asked, and when it is turned: what times out is decided, not raced for."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """A thousandth later than the last time."""
        self.now += 0.001
        return self.now


class Gate:
    """Holds what is queued on a stream from now on, until it is opened. Needs `torch.npu.ExternalEvent`.

    Args:
        event: an external event that was never recorded.
        stream: the one to hold.
        key: another one.
    """

    def __init__(self, event: Any, stream: Any, key: Any) -> None:
        self._event = event
        self._key = key
        event.wait(stream)

    def open(self) -> None:
        """Let the stream go on."""
        self._event.record(self._key)


class NoDevice(RuntimeError):
    """The device that was asked for is not there."""


class Lab:
    """What all rounds share: the device, its streams, the ledgers, the threads.

    Args:
        device: "npu", "cuda", ...

    Raises:
        NoDevice: it is not there.

    Attributes:
        streams: one for each uBatch.
        auxiliary: a third one.
        gates: all that were made since the device last stood still.
        can_hold: whether a stream can be made to stop.
        pause: called before a launch is queued, on its stream; for a device that can be made to pause there.
    """

    def __init__(self, device: str) -> None:
        try:
            if device == "npu":
                import torch_npu  # noqa: F401

            self.module: Any = torch.get_device_module(device)
            self.device = torch.device(device, self.module.current_device())
        except (ImportError, OSError, RuntimeError, AttributeError, AssertionError) as error:
            raise NoDevice(
                f"--device {device} is not there: {str(error).splitlines()[0]}. For the software NPU start the command "
                f"with `python -m afd_dsv4.softnpu --`"
            ) from None
        self.streams = (self.module.Stream(), self.module.Stream())
        self.auxiliary = self.module.Stream()
        self._key = self.module.Stream()  # made once: torch hands out a stream of a small pool, in turn
        self.nothing = torch.zeros((1, 1), device=self.device)
        self.ledgers = Ledgers(self.device, LEDGER_WORDS)
        self.threads = ThreadPoolExecutor(2)
        self.can_hold = hasattr(self.module, "ExternalEvent")
        self.gates: list[Gate] = []
        self.pause: Callable[[], None] = lambda: None
        self.module.synchronize()

    def on(self, stream: Any) -> None:
        """Let the calling thread queue on a stream from now on. Every call that queues says where."""
        self.module.set_stream(stream)

    def hold(self, stream: Any) -> Gate:
        """Let nothing run on a stream that is queued from now on."""
        # Its flag is freed with the event, though a stream may still wait for it: kept until the device has run all.
        self.gates.append(Gate(self.module.ExternalEvent(), stream, self._key))
        return self.gates[-1]


class WatchedRuntime(StockRuntime):
    """A runtime whose uploads the witness hears of, and which may fail in one.

    Attributes:
        fails: in how many uploads from now, and whether once all is queued; None for never.
    """

    witness: Witness
    fails: tuple[int, bool] | None = None

    def _upload(self, lease: Lease[Any], lists: dict[int, Any], host: Any, stream: Any) -> None:
        left, late = self.fails or (-1, False)
        self.fails = (left - 1, late) if left > 0 else None
        if left == 0 and not late:
            raise Planted("planted before the upload")
        super()._upload(lease, lists, host, stream)
        self.witness.uploaded(lease.slot.index, len(next(iter(lists.values())).starts))
        if left == 0:
            raise Planted("planted behind the upload")


@dataclass
class Totals:
    """What a soak did and found. They add up.

    Attributes:
        audit: bytes compared, and wrong ones.
        lost: slots, seats, staging entries and pages that are neither free nor quarantined and counted.
        violations: unordered reuses, races on the device, and outcomes that were not the expected ones.
        unordered: violations that the order checker found.
        races: violations that the software NPU's race detector found; the first 1000 of a runtime are kept.
        steady_rounds: rounds whose staging ring was as large as it is meant to be.
        events: made by a runtime, the most of all.
        resident: host memory of the process after each of its rounds, in bytes.
    """

    rounds: int = 0
    runtimes: int = 0
    executions: int = 0
    launches: int = 0
    audit: Audit = field(default_factory=Audit)
    lost: Counter[str] = field(default_factory=Counter)
    faults: Counter[Fault] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    unordered: int = 0
    races: int = 0
    records: int = 0
    edges: int = 0
    handed_on: int = 0
    quarantined: int = 0
    host_waits: int = 0
    steady_rounds: int = 0
    events: int = 0
    events_allowed: int = 0
    resident: list[int] = field(default_factory=list)

    @property
    def lost_count(self) -> int:
        """All that is lost."""
        return self.lost.total()

    def __add__(self, other: Totals) -> Totals:
        total = Totals(
            **{name.name: getattr(self, name.name) + getattr(other, name.name) for name in fields(self)},
        )
        total.events = max(self.events, other.events)
        total.events_allowed = max(self.events_allowed, other.events_allowed)
        return total

    def __str__(self) -> str:
        return (
            f"executions={self.executions} corrupt_bytes={self.audit.wrong} lost_slots={self.lost_count} "
            f"faults={self.faults.total()} violations={len(self.violations)}"
        )

    def expect(self, outcome: bool, what: str) -> None:
        """Note an outcome that is not the expected one."""
        if not outcome:
            self.violations.append(f"unexpected outcome: not so that {what}")

    def expect_raise(self, error: type[Exception], call: Callable[[], object], what: str) -> None:
        """Note a refusal that does not come."""
        try:
            call()
        except error:
            return
        self.expect(False, f"{what} raises {error.__name__}")


@dataclass
class Request:
    """A request of the load, and the position where it goes on."""

    number: int
    position: int = 0

    @property
    def name(self) -> RequestId:
        """What the runtime calls it."""
        return RequestId(f"request {self.number}")

    def chunk(self, tokens: int) -> RequestChunk:
        """Its next rows."""
        return RequestChunk(self.name, self.position, self.position + tokens)


@dataclass
class Part:
    """One execution of a forward, and how it is driven.

    Attributes:
        chunks: its requests.
        execution: the runtime's.
        stream: of its launches, but for those on the auxiliary stream.
        splits: requests of each launch of a compressor: decode and prefill may be two.
        tables: what the state tables must be, by ratio.
        rows: what is read and written, by ratio and index of the split.
        before: the part of the same forward that had one of its requests.
        fails: at which compressor, and how.
        error: what ended it.
        reached: one event a compressor, set once that is launched or never will be.
    """

    chunks: tuple[RequestChunk, ...]
    execution: StockExecution
    stream: Any
    splits: tuple[slice, ...]
    tables: dict[int, Int32Array]
    rows: dict[tuple[int, int], Rows]
    before: Part | None
    fails: tuple[int, Fault] | None = None
    error: Exception | None = None
    reached: tuple[Event, ...] = ()

    @property
    def lease(self) -> Lease[Any]:
        """Its lease."""
        assert self.execution.lease is not None
        return self.execution.lease

    @property
    def abandoned(self) -> bool:
        """Whether nobody finishes it: its thread has swallowed the exception."""
        return self.error is not None and self.fails is not None and self.fails[1] is Fault.SWALLOWED


@dataclass(frozen=True)
class Style:
    """How the forwards of a round are driven.

    Attributes:
        threads: each uBatch by a thread of its own.
        auxiliary: kinds that are launched on the auxiliary stream.
        upload_apart: page lists are uploaded there, too.
        depth: forwards in flight before the host waits for the oldest, as an engine does; None for no limit.
    """

    threads: bool = False
    auxiliary: frozenset[CompressorKind] = frozenset()
    upload_apart: bool = False
    depth: int | None = None

    @classmethod
    def of(cls, rng: random.Random) -> Style:
        """Draw one."""
        c4, indexer, c128 = CompressorKind
        kinds = rng.choice([(), (), (indexer,), (c128,), (c4, c128)])
        return cls(rng.random() < 0.5, frozenset(kinds), rng.random() < 0.3, rng.choice([1, 2, 2, 3, None]))


class Load:
    """One runtime, and the requests on it.

    Args:
        lab: where.
        totals: where to note what is found.
        slots: of the runtime.
        ordered: False queues no wait.
    """

    def __init__(self, lab: Lab, totals: Totals, slots: int, *, ordered: bool = True) -> None:
        self.lab = lab
        self.totals = totals
        self.clock = Clock()
        self.witness = Witness(lab.ledgers)
        self.trace = Trace(None)
        self.runtime = WatchedRuntime(
            GEOMETRY,
            LAYOUT,
            max_num_seqs=SEATS,
            max_num_batched_tokens=MAX_TOKENS,
            device=lab.device,
            slots=slots,
            fence_timeout_s=FENCE_TIMEOUT_S,
            clock=self.clock,
            trace=self.trace,
            ordered=ordered,
            operator=self.witness,
        )
        self.runtime.witness = self.witness
        self.witness.watch(self.runtime)
        lab.module.synchronize()
        self.requests: list[Request] = []
        self._numbers = 0
        self._flight: deque[list[Any]] = deque()
        totals.runtimes += 1

    # Requests

    def new(self) -> Request:
        """One more."""
        self._numbers += 1
        self.requests.append(Request(self._numbers))
        return self.requests[-1]

    def end(self, request: Request) -> None:
        """It is over, or cancelled."""
        if self.runtime.store.seat(request.name) is not None:  # not one that never ran
            self.runtime.end_request(request.name)
        self.requests.remove(request)

    def end_all(self) -> None:
        """All are over."""
        for request in list(self.requests):
            self.end(request)

    def batch(self, rng: random.Random) -> list[RequestChunk]:
        """Some of the requests, with new ones while there is room; decodes first."""
        while not self.requests or (len(self.requests) < SEATS and rng.random() < 0.7):
            self.new()
        room = MAX_TOKENS
        chunks = []
        for request in rng.sample(self.requests, rng.randint(1, len(self.requests))):
            tokens = 1 if request.position and rng.random() < 0.5 else rng.choice(CHUNKS)
            tokens = min(tokens, LENGTH - request.position, room)
            if tokens:
                room -= tokens
                chunks.append(request.chunk(tokens))
        return sorted(chunks, key=lambda chunk: not decodes(chunk))

    # One forward

    def forward(
        self,
        rng: random.Random,
        style: Style,
        fault: Fault | None = None,
        chunks: Sequence[RequestChunk] | None = None,
        *,
        cut_at: int | None = None,
        stream: int = 0,
    ) -> list[Part]:
        """Queue one forward, and see its outcome.

        Args:
            rng: decides.
            style: of the round.
            fault: what to plant: one that a single forward has.
            chunks: the batch; None draws one.
            cut_at: tokens of the first uBatch; None draws.
            stream: of the first uBatch.

        Returns:
            Its executions. A uBatch without tokens has none.
        """
        totals, runtime = self.totals, self.runtime
        chunks = self.batch(rng) if chunks is None else chunks
        tokens = sum(chunk.tokens for chunk in chunks)
        cut_at = rng.randint(0, tokens) if cut_at is None else cut_at
        shares = [(ubatch, share) for ubatch, share in enumerate(cut(chunks, cut_at)) if share]
        generation = runtime.mint()
        held = self.lab.hold(rng.choice(self.lab.streams)) if fault is Fault.STALL else None
        if fault is Fault.UPLOAD:
            runtime.fails = (rng.randrange(len(shares)), rng.random() < 0.5)
        parts: list[Part] = []
        void: set[RequestId] = set()
        try:
            for ubatch, share in shares:
                void = {chunk.request for _, chunks in shares[: len(parts) + 1] for chunk in chunks}
                place = self.lab.streams[(stream + ubatch) % 2]
                parts.append(self._begin(share, generation, ubatch, place, style, parts))
            void = set()
        except Planted:
            pass  # the forward is over, with what it has begun
        totals.expect(bool(void) == (fault is Fault.UPLOAD), "begin fails if its upload does")
        if not void:
            if fault is Fault.EXHAUSTED:
                got = self.take_slots(beside=len(parts))
                totals.expect(got < len(runtime.arena.slots), "an open execution keeps its slot")
            elif fault is Fault.SETTLED_STALE:
                found = runtime.arena.settle(parts[0].lease)
                totals.expect(found is Settlement.NOT_QUIESCED, f"an open lease is not over, but {found}")
            elif fault in (Fault.LAYER, Fault.BETWEEN, Fault.SWALLOWED):
                rng.choice(parts).fails = (rng.randrange(len(COMPRESSORS)), fault)
            (self._drive_threads if style.threads else self._drive_together)(parts, style)
        left = runtime.end_forward(generation)
        expected = tuple(part.lease.execution for part in parts if void or part.abandoned)
        totals.expect(left == expected, f"end_forward finds {expected} open, and not {left}")
        if held:
            held.open()
        totals.executions += len(parts)
        self._outcome(rng, parts, void)
        self._throttle(style)
        return parts

    def _begin(
        self,
        share: tuple[RequestChunk, ...],
        generation: Generation,
        ubatch: int,
        stream: Any,
        style: Style,
        parts: Sequence[Part],
    ) -> Part:
        self.lab.on(self.lab.auxiliary if style.upload_apart else stream)
        execution = self.runtime.begin(share, generation=generation, ubatch=ubatch)
        apart = sum(map(decodes, share)) * (generation % 2)  # in every other forward decodes are a launch of their own
        splits = tuple(s for s in (slice(0, apart), slice(apart, len(share))) if s.start < s.stop)
        numbered = [(int(chunk.request.split()[1]), chunk) for chunk in share]
        columns = {ratio: table.columns for ratio, table in self.runtime.tables[0].items()}
        tables = {ratio: planned_tables(pages, columns[ratio]) for ratio, pages in execution.lists.items()}
        rows = {
            (ratio, index): Rows.of(shape, columns[ratio], numbered[split])
            for ratio, shape in self.runtime.shapes.items()
            for index, split in enumerate(splits)
        }
        names = {chunk.request for chunk in share}
        before = next((part for part in parts if names & {chunk.request for chunk in part.chunks}), None)
        return Part(share, execution, stream, splits, tables, rows, before)

    def _step(self, part: Part, at: int, style: Style) -> None:
        """All launches of one compressor."""
        layer, kind = COMPRESSORS[at].layer, COMPRESSORS[at].kind
        fault = part.fails[1] if part.fails and part.fails[0] == at else None
        stream = self.lab.auxiliary if kind in style.auxiliary else part.stream
        ledger, nothing = self.lab.ledgers.of(stream.stream_id), self.lab.nothing
        self.lab.on(stream)
        self.lab.pause()
        for index, split in enumerate(part.splits):
            last = index == len(part.splits) - 1
            if last and fault is Fault.BETWEEN:
                raise Planted(f"planted before the last launch of {kind.value} in layer {layer}")
            fails = last and fault in (Fault.LAYER, Fault.SWALLOWED)
            rows = part.rows[kind.ratio, index]
            launch = Launch(part.execution, layer, split, part.tables[kind.ratio], rows, ledger, fails)
            tokens = sum(chunk.tokens for chunk in part.chunks[split])
            weights = cast(CompressorWeights, launch)
            x = nothing.expand(tokens, 1)
            part.execution.compress(layer, kind, x, weights, nothing, nothing, nothing, split)

    def _drive_together(self, parts: Sequence[Part], style: Style) -> None:
        """One thread for all uBatches, compressor by compressor."""
        for at in range(len(COMPRESSORS)):
            for part in parts:
                if part.error is None:
                    try:
                        self._step(part, at, style)
                    except (Planted, OrderError) as error:
                        part.error = error
        for part in parts:
            if not part.abandoned:
                part.execution.finish()

    def _drive_threads(self, parts: Sequence[Part], style: Style) -> None:
        """A thread for each uBatch. A part waits on the host for the one whose requests it continues, and only then."""
        for part in parts:
            part.reached = tuple(Event() for _ in COMPRESSORS)
        for done in [self.lab.threads.submit(self._drive, part, style) for part in parts]:
            done.result()

    def _drive(self, part: Part, style: Style) -> None:
        try:
            for at in range(len(COMPRESSORS)):
                if part.before is not None:
                    part.before.reached[at].wait()
                self._step(part, at, style)
                part.reached[at].set()
        except (Planted, OrderError) as error:
            part.error = error
        finally:
            for event in part.reached:
                event.set()
            if not part.abandoned:
                part.execution.finish()

    def _outcome(self, rng: random.Random, parts: Sequence[Part], void: set[RequestId]) -> None:
        """See that every part ended as planned; requests go on, or start anew where their tail was lost."""
        for part in parts:
            wanted: type[Exception] | None = Planted if part.fails else None
            if wanted is None and part.before is not None and part.before.error is not None:
                wanted = OrderError  # the rows that it continues are missing from there on
            found = None if part.error is None else type(part.error)
            self.totals.expect(found is wanted, f"{part.lease.execution} ends with {wanted}, and not {part.error!r}")
            if found is not None:
                void |= {chunk.request for chunk in part.chunks}
        ends = {chunk.request: chunk.end for part in parts for chunk in part.chunks}
        lost = [request for request in self.requests if request.name in void]
        if lost and rng.random() < 0.7:
            self.expect_refusal(lost[0], TailVoid, lost[0].name)
        for request in list(self.requests):
            if request in lost:
                self.end(request)
            elif request.name in ends:
                request.position = ends[request.name]
                if request.position >= LENGTH:
                    self.end(request)

    def _throttle(self, style: Style) -> None:
        """Let the host run ahead no further than an engine would."""
        if style.depth is not None:
            self._flight.append([stream.record_event() for stream in (*self.lab.streams, self.lab.auxiliary)])
            while len(self._flight) >= style.depth:
                for event in self._flight.popleft():
                    event.synchronize()
        if self.lab.ledgers.fullest > LEDGER_WORDS - FORWARD_WORDS:
            self.lab.module.synchronize()
            self.totals.audit += self.lab.ledgers.audit()

    # What must be refused

    def expect_refusal(self, request: Request, error: type[Exception], words: str) -> None:
        """Ask for an execution that must not begin; `words` are in the refusal."""
        self.lab.on(self.lab.streams[0])
        try:
            self.runtime.begin([request.chunk(1)]).finish()
        except error as refusal:
            self.totals.expect(words in str(refusal), f"a refusal names {words!r}: {refusal}")
        else:
            self.totals.expect(False, f"{request.name} at {request.position} is refused with {error.__name__}")

    def take_slots(self, beside: int = 0) -> int:
        """How many slots can be leased at once; they are given back untouched.

        Args:
            beside: executions that are open.
        """
        arena = self.runtime.arena
        leases: list[Lease[Any]] = []
        try:
            while len(leases) <= len(arena.slots):
                leases.append(arena.acquire(ExecutionId(self.runtime.mint())))
        except Exhausted as refusal:
            fatal = not leases and not beside
            self.totals.expect(refusal.fatal == fatal, f"only where no slot can come back this is fatal: {refusal}")
        for lease in leases:
            lease.seal()
        return len(leases)


def decodes(chunk: RequestChunk) -> bool:
    """Whether a chunk is one of decode."""
    return chunk.tokens == 1 and chunk.start > 0
