# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Planted faults: one thing each is made wrong, in the real code or in what stands for its caller, and must be found.

A checker that finds nothing proves nothing until it has been seen to find something. Each mutant names what it breaks
and the program that shows it, which is clean without it. Where the fault is one of order, the order checker must report
every schedule in which the judge of memory finds a corruption: what a user's trace would show. The others break what a
trace does not say (contents, outcomes, refusals) and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from afd_dsv4.execution.cam import CamForward
from afd_dsv4.workspace.arena import Exhausted, Settlement, WorkspaceArena
from afd_dsv4.workspace.fence import EventSource, Fence, OrderedEvent
from afd_dsv4.workspace.lease import Lease, LeaseState
from afd_dsv4.workspace.staging import StagingRing
from tests.explorer.hosts import Program, Schedules
from tests.explorer.programs import programs
from tests.explorer.world import Run, World

Make = Callable[[Any], Any]
"""From what is there, what is to be there instead."""


@dataclass(frozen=True)
class Mutant:
    """A planted fault.

    Attributes:
        name: in a few words.
        breaks: what no longer holds.
        program: where it shows.
        swaps: class, attribute and what to make of it.
        traced: it is a fault of order, which a trace shows.
    """

    name: str
    breaks: str
    program: str
    swaps: tuple[tuple[type, str, Make], ...]
    traced: bool = True


@dataclass(frozen=True)
class Finding:
    """What came of a mutant.

    Attributes:
        schedules: run.
        corrupt: those with a device order that corrupts memory.
        unordered: those whose trace the order checker objects to.
        broken: those that end otherwise than they must.
        unseen: corrupt ones, of a fault of order, that the order checker passed.
        example: the first objection.
    """

    schedules: int = 0
    corrupt: int = 0
    unordered: int = 0
    broken: int = 0
    unseen: int = 0
    example: str = ""

    @property
    def found(self) -> bool:
        return bool(self.corrupt or self.unordered or self.broken) and not self.unseen

    def convicts(self, mutant: Mutant) -> bool:
        """Whether this is what must be found: of a fault of order, the trace must show what it corrupted."""
        return self.found and (not mutant.traced or bool(self.corrupt and self.unordered))

    def __str__(self) -> str:
        by = [
            f"{name} {count}"
            for name, count in (
                ("memory", self.corrupt),
                ("trace", self.unordered),
                ("outcome", self.broken),
                ("MISSED BY TRACE", self.unseen),
            )
            if count
        ]
        return f"found by {', '.join(by)} of {self.schedules} schedules" if by else f"MISSED in {self.schedules}"


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Within, the code is wrong."""
    with ExitStack() as stack:
        for owner, name, make in mutant.swaps:
            original = owner.__dict__.get(name)
            setattr(owner, name, make(original))
            stack.callback(setattr if original is not None else _remove, owner, name, original)
        yield


def _remove(owner: type, name: str, _original: None) -> None:
    delattr(owner, name)


def program_of(mutant: Mutant) -> Program:
    return next(program for program in programs() if program.name == mutant.program)


def hunt(mutant: Mutant, *, limit: int, seed: int = 0, enough: int | None = None) -> Finding:
    """Run its program with the fault planted.

    Args:
        mutant: what to plant.
        limit: most schedules.
        seed: of random ones.
        enough: stop after so many schedules with a corruption (or, for an untraced one, with anything).
    """
    finding = Finding()
    with planted(mutant):
        for outcome in Schedules(program_of(mutant), limit, seed):
            corrupt = outcome.explored.violating > 0
            example = [*outcome.unordered, *outcome.broken, *map(str, outcome.explored.witness or ())]
            finding = Finding(
                finding.schedules + 1,
                finding.corrupt + corrupt,
                finding.unordered + bool(outcome.unordered),
                finding.broken + bool(outcome.broken),
                finding.unseen + (mutant.traced and corrupt and not outcome.unordered),
                finding.example or next(iter(example), ""),
            )
            seen = finding.corrupt if mutant.traced else finding.corrupt + finding.broken
            if enough is not None and seen >= enough:
                break
    return finding


MUTANTS: list[Mutant] = []

AUX = "auxiliary stream overlaps inside a layer, no fault"
ROW = "one slot on three streams, no fault"
SEAT = "a seat is taken again, no fault"
CUT = "cut request, no fault"
STAGING = "staging ring, no fault"
TWO = "two uBatches, no fault"
GRAPH = "graph"
CROWD = "two slots, three uBatches, all settled twice"


def plant(
    name: str, breaks: str, program: str, owner: type, attribute: str, *, traced: bool = True
) -> Callable[[Make], Make]:
    """The function below makes the wrong attribute of the right one."""

    def add(make: Make) -> Make:
        MUTANTS.append(Mutant(name, breaks, program, ((owner, attribute, make),), traced))
        return make

    return add


def also(owner: type, attribute: str) -> Callable[[Make], Make]:
    """The fault above needs this one, too: another guard would stop it."""

    def add(make: Make) -> Make:
        MUTANTS[-1] = replace(MUTANTS[-1], swaps=(*MUTANTS[-1].swaps, (owner, attribute, make)))
        return make

    return add


def _nothing(_original: Any) -> Any:
    return lambda *_args, **_kwargs: None


# Within a lease


@plant("layer hand-off without event", "layer L+1 on another stream does not wait for layer L", AUX, Lease, "_order")
def _(original: Any) -> Any:
    return lambda self, lease, *touch: None if lease is self else original(self, lease, *touch)


@plant(
    "table copy not awaited by the auxiliary stream",
    "a launch does not wait for the copy of what it reads",
    AUX,
    Lease,
    "touch",
)
def _(original: Any) -> Any:
    def touch(self: Lease[Any], stream: Any, *, reads: Any = (), writes: Any = (), step: Any = None) -> None:
        written = self._writer
        self._writer = {part: touch for part, touch in written.items() if part not in reads}
        try:
            original(self, stream, reads=reads, writes=writes, step=step)
        finally:
            self._writer = written | self._writer

    return touch


@plant(
    "readers are overwritten",
    "a write waits for the last writer, not for those who read since",
    AUX,
    Lease,
    "touch",
)
def _(original: Any) -> Any:
    def touch(self: Lease[Any], *args: Any, **kwargs: Any) -> None:
        self._readers.clear()
        original(self, *args, **kwargs)

    return touch


@plant(
    "waited for once is waited for ever",
    "a stream that waited for another does not wait for what that is given later",
    AUX,
    Lease,
    "_order",
)
def _(original: Any) -> Any:
    def order(self: Lease[Any], lease: Any, touch: Any, stream: Any, me: Any) -> None:
        original(self, lease, touch, stream, me)
        if touch[0] != me:
            self._seen[me, lease.number, touch[0]] = 10**9

    return order


@plant("wait before record", "the wait is for the event's record before this one", AUX, Lease, "_order")
def _(original: Any) -> Any:
    def order(self: Lease[Any], lease: Any, touch: Any, stream: Any, me: Any) -> None:
        event = lease.touch_events.get(touch[0])
        if touch[0] == me or event is None or self._seen.get((me, lease.number, touch[0]), 0) >= touch[1]:
            original(self, lease, touch, stream, me)
            return
        event.wait(stream, me)
        event.record(lease._streams[touch[0]], touch[0])
        self._seen[me, lease.number, touch[0]] = lease._count[touch[0]]

    return order


@plant("event not recorded", "an event says it was recorded, and was not", AUX, OrderedEvent, "record")
def _(_original: Any) -> Any:
    def record(self: OrderedEvent[Any], _stream: Any, _stream_id: Any) -> None:
        self._recorded = True

    return record


@plant("recorded on the wrong stream", "every event lies behind the first stream's work", AUX, OrderedEvent, "record")
def _(original: Any) -> Any:
    return lambda self, _stream, _id: original(self, self._source.device.streams[0], 0)


# From lease to lease


@plant("not re-recorded at a hand-on", "a later lease's fence is the earlier one's event", ROW, OrderedEvent, "record")
def _(original: Any) -> Any:
    return lambda self, *stream: None if self._recorded else original(self, *stream)


@plant("released on the producer only", "the fence has no event of the second stream", AUX, Lease, "seal")
def _(original: Any) -> Any:
    def seal(self: Lease[Any], **whole: Any) -> None:
        self._streams = dict(list(self._streams.items())[:1])
        original(self, **whole)

    return seal


@plant("handed on without a wait", "a new lease does not wait for the slot's last one", ROW, Lease, "_first_touch")
def _(original: Any) -> Any:
    def first(self: Lease[Any], *stream: Any) -> None:
        self._behind = None
        original(self, *stream)

    return first


@plant(
    "only the first stream waits at a hand-on",
    "the other streams of the new lease touch the slot at once",
    "streams of a lease that share nothing",
    Lease,
    "_first_touch",
)
def _(original: Any) -> Any:
    def first(self: Lease[Any], *stream: Any) -> None:
        if self._streams:
            self._behind = None
        original(self, *stream)

    return first


@plant("a fence waits for one of its events", "the others are forgotten", ROW, Fence, "wait")
def _(_original: Any) -> Any:
    def wait(self: Fence[Any], stream: Any, stream_id: Any) -> int:
        for owner, event in list(self._events.items())[-1:]:
            if owner != stream_id:
                event.wait(stream, stream_id)
        return 1

    return wait


@plant("fence passes without its events", "a pending fence says passed", TWO, Fence, "passed")
def _(_original: Any) -> Any:
    return lambda self: True


@plant("fence passes with its first event", "the other streams may still run", AUX, Fence, "passed")
def _(_original: Any) -> Any:
    return lambda self: next(iter(self._events.values())).passed()


@plant(
    "seat taken without a wait",
    "the new request's launches do not wait for the seat's last lease",
    SEAT,
    Lease,
    "follow",
)
def _(original: Any) -> Any:
    return lambda self, **named: original(self, **{**named, "after": ()})


@plant(
    "page returned under an older fence",
    "a seat comes back behind an earlier lease than its last",
    "a request of two executions ends, and its seat is taken",
    World,
    "follow",
)
def _(original: Any) -> Any:
    def follow(self: World, run: Any, continues: Any, after: Any) -> None:
        seats = [request.seat for request in run.requests]
        oldest = [next(r.lease for r in self.runs if any(q.seat == seat for q in r.requests)) for seat in seats]
        original(self, run, continues, oldest if after else ())

    return follow


@plant("uBatch edge dropped", "uBatch 1 does not wait for uBatch 0's launch of the layer", CUT, Lease, "_continue")
def _(original: Any) -> Any:
    return _nothing(original)


@plant(
    "edge between stages dropped",
    "stage 1 does not wait for stage 0's launch of the layer on the other stream",
    "two stages of one thread, cut request, no fault",
    Lease,
    "_continue",
)
def _(original: Any) -> Any:
    return _nothing(original)


@plant(
    "a receive that the forward is not told of",
    "stages leave their schedule, which the forward refuses",
    "two stages of one thread, two uBatches, no fault",
    CamForward,
    "received",
    traced=False,
)
def _(original: Any) -> Any:
    return _nothing(original)


@plant(
    "step completed with its first launch",
    "uBatch 1 goes on while uBatch 0 has still to launch the layer's prefill",
    "decode and prefill are two launches, no fault",
    Lease,
    "touch",
    traced=False,  # in half of the schedules all is ordered, the wrong way round
)
def _(original: Any) -> Any:
    def touch(self: Lease[Any], stream: Any, **what: Any) -> None:
        original(self, stream, **what)
        self._completed.add(what.get("step"))

    return touch


@plant(
    "broken execution sealed as whole",
    "who waits for it does not wait for what it should have waited for",
    "an execution breaks off behind one that still runs, and its seat is taken",
    Lease,
    "seal",
)
def _(original: Any) -> Any:
    return lambda self, whole=True: original(self, whole=True)


@plant(
    "seat handed on while its lease is open",
    "what is still to be launched is not behind any fence",
    "a request is cancelled under an open execution, and its seat is wanted",
    Lease,
    "can_be_waited_for",
)
def _(_original: Any) -> Any:
    return lambda self: True


# Staging


@plant("staging rewritten early", "the host does not wait for the copy", STAGING, StagingRing, "_wait")
def _(original: Any) -> Any:
    return _nothing(original)


@plant("staging returned without a record", "a copy that is queued is not waited for", STAGING, StagingRing, "copied")
def _(original: Any) -> Any:
    def copied(self: StagingRing[Any, Any], index: int, stream: Any) -> None:
        before = self._copied[index]
        original(self, index, stream)
        self._copied[index] = before

    return copied


# Settlement, time-outs and quarantine


@plant(
    "double settle frees twice",
    "a second settle frees the slot under its next holder",
    CROWD,
    WorkspaceArena,
    "_settle",
)
def _(original: Any) -> Any:
    def settle(self: WorkspaceArena[Any], lease: Lease[Any]) -> Settlement:
        outcome: Settlement = original(self, lease)
        if outcome is Settlement.ALREADY_RELEASED:
            lease.slot.lease = None
        return outcome

    return settle


@plant(
    "settle frees an open lease", "a slot is free while launches are still to come", CROWD, WorkspaceArena, "_settle"
)
def _(original: Any) -> Any:
    def settle(self: WorkspaceArena[Any], lease: Lease[Any]) -> Settlement:
        if lease.state is LeaseState.ACQUIRED:
            lease.slot.lease = None
        outcome: Settlement = original(self, lease)
        return outcome

    return settle


@plant(
    "generation not checked",
    "the identity of an old execution finds the present one",
    "two uBatches, all settled twice",
    WorkspaceArena,
    "_find",
    traced=False,
)
def _(original: Any) -> Any:
    def find(self: WorkspaceArena[Any], execution: Any) -> Any:
        for slot in self.slots:
            for lease in (slot.lease, slot.last):
                if lease is not None and lease.execution.ubatch == execution.ubatch and execution.generation < 99:
                    return lease
        return original(self, execution)

    return find


@plant(
    "time-out waits instead of quarantining",
    "a slot behind a dead stream is handed on for ever",
    "two uBatches, stream 0 dies, and time passes",
    WorkspaceArena,
    "_timed_out",
    traced=False,
)
def _(_original: Any) -> Any:
    return lambda self, slot: False


@plant(
    "quarantined slot leased again",
    "the dead stream may still write into it",
    "two uBatches, stream 0 dies, and time passes",
    WorkspaceArena,
    "acquire",
)
def _(original: Any) -> Any:
    def acquire(self: WorkspaceArena[Any], execution: Any) -> Any:
        for slot in self.slots:
            if slot.quarantined is not None:
                slot.quarantined = slot.last = None
        return original(self, execution)

    return acquire


@plant(
    "quarantine voids nothing",
    "a request goes on from a tail that the device may still change",
    "two uBatches, stream 0 dies, and time passes",
    WorkspaceArena,
    "quarantine",
    traced=False,
)
def _(original: Any) -> Any:
    def quarantine(self: WorkspaceArena[Any], lease: Lease[Any], why: str) -> None:
        lease.void = None
        original(self, lease, why)

    return quarantine


@plant(
    "a fence that cannot be queried has passed",
    "an error of the device frees the slot",
    "two uBatches, query",
    Fence,
    "passed",
)
def _(original: Any) -> Any:
    def passed(self: Fence[Any]) -> bool:
        try:
            return bool(original(self))
        except Exception:
            return True

    return passed


@plant(
    "a fence that cannot be recorded is left out",
    "the slot is free behind nothing",
    "two uBatches, record",
    Lease,
    "seal",
)
def _(original: Any) -> Any:
    def seal(self: Lease[Any], **whole: Any) -> None:
        try:
            original(self, **whole)
        except Exception:
            self.state, self._streams = LeaseState.ACQUIRED, {}
            self.slot.quarantined, self.slot.last, self.slot.lease = None, self._behind, self
            original(self, **whole)

    return seal


@plant(
    "garbage collection frees",
    "a dropped handle gives its slot back although its launches are queued",
    "two uBatches, die",
    Run,
    "dead",
)
def _(_original: Any) -> Any:
    def drop(self: Run, dead: bool) -> None:
        self.__dict__["dead"] = dead
        if dead:
            self.lease.slot.lease = None

    return property(lambda self: self.__dict__["dead"], drop)


@plant(
    "exhaustion cascades",
    "who is told that no slot is free takes one from its holder for ever",
    CROWD,
    WorkspaceArena,
    "acquire",
    traced=False,
)
def _(original: Any) -> Any:
    def acquire(self: WorkspaceArena[Any], execution: Any) -> Any:
        try:
            return original(self, execution)
        except Exhausted:
            if self.slots[0].lease is not None:
                self.quarantine(self.slots[0].lease, "somebody wanted its slot")
            raise

    return acquire


@plant(
    "the host waits in acquire",
    "a dead stream stops the worker",
    "two uBatches, stream 0 dies, and time passes",
    WorkspaceArena,
    "acquire",
    traced=False,
)
def _(original: Any) -> Any:
    def acquire(self: WorkspaceArena[Any], execution: Any) -> Any:
        for slot in self.slots:
            for event in (event for events in slot.fence_events for event in events.values()):
                event.synchronize()
        return original(self, execution)

    return acquire


@plant(
    "void request continued",
    "a launch reads rows that were never written",
    "cut request, raise",
    Run,
    "void",
    traced=False,
)
def _(original: Any) -> Any:
    return _nothing(original)


@also(Lease, "seal")
def _(original: Any) -> Any:
    def seal(self: Lease[Any], **whole: Any) -> None:
        self._completed.update((layer, kind) for layer in range(9) for kind in "ab")
        original(self, **whole)

    return seal


@plant("warmed only for uBatch 0", "uBatch 1 works in the memory of uBatch 0", TWO, WorkspaceArena, "__init__")
def _(original: Any) -> Any:
    def init(self: WorkspaceArena[Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.slots[1].index = self.slots[0].index

    return init


# Shutdown


@plant(
    "close changes something before it refuses",
    "an arena that refused to close is closed",
    "two uBatches, close at any time",
    WorkspaceArena,
    "close",
    traced=False,
)
def _(original: Any) -> Any:
    def close(self: WorkspaceArena[Any]) -> Any:
        self.closed = True
        return original(self)

    return close


@plant(
    "reset with live leases",
    "memory is replaced while launches are queued",
    "two uBatches, reset at any time",
    WorkspaceArena,
    "live",
    traced=False,
)
def _(_original: Any) -> Any:
    return lambda self: ()


# Graphs


@plant(
    "query in a capture",
    "acquire asks for events while a graph is captured",
    "graph beside eager executions",
    EventSource,
    "mute",
    traced=False,
)
def _(_original: Any) -> Any:
    return lambda self: False


@also(OrderedEvent, "_check")
def _(original: Any) -> Any:
    return _nothing(original)


@plant(
    "captured slot held weakly",
    "once the capture is over nothing keeps what the graph needs",
    GRAPH,
    WorkspaceArena,
    "end_capture",
    traced=False,
)
def _(original: Any) -> Any:
    def end(self: WorkspaceArena[Any], lease: Lease[Any], whole: bool) -> None:
        original(self, lease, whole)
        self._captured.clear()

    return end


@plant(
    "slot of a graph leased to eager executions",
    "a replay finds its slot held, and no other will do",
    "graph beside eager executions",
    WorkspaceArena,
    "__init__",
    traced=False,
)
def _(original: Any) -> Any:
    def init(self: WorkspaceArena[Any], *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._eager = self.slots

    return init


@plant("captured launches without edges", "inside the graph the streams race", GRAPH, Lease, "_order")
def _(original: Any) -> Any:
    return lambda self, *touch: None if self.captured else original(self, *touch)


@plant("replay without a touch", "the graph runs before the lists are there", GRAPH, Lease, "touch", traced=False)
def _(original: Any) -> Any:
    def touch(self: Lease[Any], stream: Any, **what: Any) -> None:
        if what.get("step") == "*":
            self._steps["*"] = {}  # so that the step can be completed
        else:
            original(self, stream, **what)

    return touch


@plant(
    "graph replayed after its memory was replaced",
    "it writes to addresses that are somebody else's",
    "graph, and its memory is replaced",
    WorkspaceArena,
    "reset",
    traced=False,
)
def _(original: Any) -> Any:
    def reset(self: WorkspaceArena[Any]) -> None:
        epoch = self.epoch
        original(self)
        self.epoch = epoch

    return reset
