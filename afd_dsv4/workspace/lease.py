# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A lease: one execution's hold on one workspace slot, and the order of everything that touches it.

Problem: the launches of an execution may come from several streams, and layer order on the host says nothing about
order on the device; the public attempt at cross-layer reuse corrupted output for exactly that (vllm#49236, vllm#52836).
Way: every launch, copy or scatter says `touch(stream, reads, writes)` before it is queued. A touch that conflicts with
an earlier one on another stream makes its stream wait for an event recorded behind that one; on one stream it costs
nothing. The event is recorded when the conflict shows, not with every touch: it then lies later than it must, never
earlier, and an execution on one stream records exactly one event, at its end.

A lease is acquired, then sealed with a fence, then settled once the fence has passed; or quarantined, for ever, when
nobody can prove that its work is over. Not here: which slot is leased, and when it may be handed on (`arena.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from afd_dsv4.device.api import StreamId
from afd_dsv4.workspace.fence import Fence, OrderedEvent
from afd_dsv4.workspace.identity import ExecutionId

if TYPE_CHECKING:
    from afd_dsv4.workspace.arena import Slot, WorkspaceArena

S = TypeVar("S")

#: As a part: all of the slot. As a step: all of the execution's launches, queued as one (a graph replay).
WHOLE = "*"


class LeaseState(enum.Enum):
    """Life of a lease."""

    ACQUIRED = "acquired"
    SEALED = "sealed"
    SETTLED = "settled"
    QUARANTINED = "quarantined"


class OrderError(RuntimeError):
    """Work was queued in an order that the lease cannot make safe."""


class Lease(Generic[S]):
    """Made by `WorkspaceArena` only.

    Args:
        arena: whose slot it is.
        slot: the slot.
        execution: who holds it.
        number: counts the arena's leases.
        behind: the slot's last lease that touched it, or None.
        captured: its touches are recorded into a graph and run at replays only.
    """

    __slots__ = (
        "_after",
        "_behind",
        "_completed",
        "_continues",
        "_count",
        "_fenced",
        "_readers",
        "_seen",
        "_steps",
        "_streams",
        "_undominated",
        "_whole",
        "_writer",
        "arena",
        "broken",
        "captured",
        "epoch",
        "execution",
        "fence",
        "follows",
        "number",
        "sealed_at",
        "slot",
        "state",
        "touch_events",
        "void",
    )

    def __init__(
        self,
        arena: WorkspaceArena[S],
        slot: Slot[S],
        execution: ExecutionId,
        number: int,
        behind: Lease[S] | None,
        captured: bool = False,
    ) -> None:
        self.slot = slot
        self.execution = execution
        self.number = number
        self.epoch = arena.epoch
        self.state = LeaseState.ACQUIRED
        self.captured = captured
        self.broken = False  # sealed without all of its launches
        self.fence: Fence[S] | None = None
        self.sealed_at = 0.0  # seconds of the arena's clock
        #: By slot, the latest lease that a stream of this one waits for, directly or not.
        self.follows: dict[int, int] = {}
        # A captured event belongs to its graph: another capture must not record it again.
        self.touch_events: dict[StreamId, OrderedEvent[S]] = {} if captured else slot.touch_events
        self.arena = arena
        self._behind = behind
        self.void: Callable[[str], None] | None = None
        self._continues: tuple[Lease[S], ...] = ()  # had our requests before us
        self._after: tuple[Lease[S], ...] = ()  # had, for other requests, the seats that ours have now
        self._undominated: tuple[Lease[S], ...] = ()  # what our fence does not lie behind
        self._streams: dict[StreamId, S] = {}
        self._count: dict[StreamId, int] = {}  # touches queued, per stream
        self._seen: dict[tuple[StreamId, int, StreamId], int] = {}  # (waiter, lease, other) -> touches waited for
        self._fenced: set[tuple[StreamId, int]] = set()  # (stream, lease) whose fence the stream waits for
        self._writer: dict[Hashable, tuple[StreamId, int]] = {}
        self._readers: dict[Hashable, dict[StreamId, int]] = {}
        self._steps: dict[Hashable, dict[StreamId, int]] = {}
        self._completed: set[Hashable] = set()
        self._whole = False  # a touch of all parts was made

    def __repr__(self) -> str:
        return f"Lease({self.number}, slot {self.slot.index}, {self.execution}, {self.state.value})"

    def follow(
        self,
        *,
        continues: Sequence[Lease[S]] = (),
        after: Sequence[Lease[S]] = (),
        seats: Sequence[int] = (),
        void: Callable[[str], None] | None = None,
    ) -> None:
        """Name what comes first, and what is lost if this goes wrong; call it before the first touch.

        Args:
            continues: executions that had this one's requests last: each of their steps precedes the same step here.
            after: executions that had the same pages for requests that have ended: they precede everything here.
            seats: whose pages the steps touch; for the trace.
            void: called with the reason if the lease is quarantined: its requests' tails must not be read any more.

        Raises:
            OrderError: the slot was touched already, without waiting for them; or one of `after` is still open, or will
                never be known to be over.
        """
        with self.arena.lock:
            if self._streams:
                raise OrderError(f"{self.execution} names what it follows after it has touched its slot")
            self._continues = tuple(lease for lease in dict.fromkeys(continues) if not lease.over())
            self._after = tuple(lease for lease in dict.fromkeys(after) if not lease.over())
            self.void = void
            if still := [str(lease.execution) for lease in self._after if not lease.can_be_waited_for()]:
                raise OrderError(
                    f"{self.execution} takes pages that may still be touched by {'; '.join(still)}; finish that first"
                )
            if self.arena.trace is not None:
                self.arena.trace.note(("map", self.number, tuple(seats)))

    def touch(
        self,
        stream: S,
        *,
        reads: Iterable[Hashable] = (),
        writes: Iterable[Hashable] = (),
        step: Hashable = None,
    ) -> None:
        """Order what is queued on `stream` next behind all it conflicts with. Call it just before queueing.

        Where several threads touch, hold `arena.lock` until the work is queued: another thread may order itself behind
        this touch as soon as it is made.

        Args:
            stream: where the work goes.
            reads: parts of the slot that the work reads.
            writes: parts that it writes.
            step: names a launch (layer and kind) that other executions may have to follow, or have led: with a step,
                the same step of every execution that this one continues comes first. See `complete`.

        Raises:
            OrderError: the lease is not open, or an execution that this one continues has not completed `step`.
        """
        with self.arena.lock:
            self.touch_locked(stream, tuple(reads), tuple(writes), step)

    def touch_locked(
        self, stream: S, reads: Sequence[Hashable], writes: Sequence[Hashable], step: Hashable = None
    ) -> None:
        """`touch` for who holds `arena.lock` already: to take it again takes the host a quarter of all this."""
        arena = self.arena
        if self.state is not LeaseState.ACQUIRED:
            raise OrderError(f"{self.execution} touches its slot after it was {self.state.value}")
        me = arena.device.stream_id(stream)
        # A wait that fails must not be remembered as made: every note is taken after the queueing it speaks of.
        if me not in self._streams:
            self._first_touch(stream, me)
        if step is not None and self._continues:
            for before in self._continues:
                self._continue(before, step, stream, me)
        index = self._count[me] + 1
        writer_of, readers_of, steps = self._writer, self._readers, self._steps
        whole = self._whole or WHOLE in writes or WHOLE in reads
        if len(self._count) > 1:  # the stream that is alone is in order with itself
            if whole:
                for touch in self._count.items():
                    self._order(self, touch, stream, me)
            for part in reads:
                writer = writer_of.get(part)
                if writer is not None and writer[0] != me:
                    self._order(self, writer, stream, me)
            for part in writes:
                writer = writer_of.get(part)
                if writer is not None and writer[0] != me:
                    self._order(self, writer, stream, me)
                readers = readers_of.get(part)
                if readers:
                    for reader in readers.items():
                        self._order(self, reader, stream, me)
        self._count[me] = index
        for part in reads:
            if part in readers_of:
                readers_of[part][me] = index
            else:
                readers_of[part] = {me: index}
        for part in writes:
            readers_of.pop(part, None)
            writer_of[part] = (me, index)
        if step is not None:
            if step in steps:
                steps[step][me] = index
            else:
                steps[step] = {me: index}
        self._whole = whole
        if arena.trace is not None:
            arena.trace.note(("touch", self.number, self.slot.index, me, reads, writes, step))

    def complete(self, step: Hashable) -> None:
        """All launches of `step` are queued; prefill and decode may be two. Call it once they are, not before."""
        with self.arena.lock:
            self.complete_locked(step)

    def complete_locked(self, step: Hashable) -> None:
        """`complete` for who holds `arena.lock` already."""
        if step not in self._steps:
            raise OrderError(f"{self.execution} completes {step} without having touched its slot for it")
        self._completed.add(step)

    def over(self) -> bool:
        """Whether nothing that this lease covered can still run. Never waits; once true, stays true."""
        if self.state is LeaseState.SETTLED:
            return True
        with self.arena.lock:
            if self.state is not LeaseState.SEALED or self.arena.events.mute():
                return False
            try:
                if self.fence is not None and not self.fence.passed():
                    return False
            except Exception as error:
                if not self.arena.device.refused_by_capture(error):
                    # The device cannot say: it will not be asked again, nor be believed.
                    self.arena.quarantine(self, f"its fence cannot be queried: {error}")
                return False
            self._undominated = tuple(lease for lease in self._undominated if not lease.over())
            if self._undominated:
                return False
            self.state = LeaseState.SETTLED
            self.void = None
            return True

    def can_be_waited_for(self) -> bool:
        """Whether all that this lease covers has been queued and fenced, so that a stream can wait for it.

        A lease in doubt can not: who waits for it might never move again.
        """
        if self.state is LeaseState.SETTLED:
            return True
        ended = (LeaseState.SEALED, LeaseState.SETTLED)
        return all(lease.state in ended for lease in self.covers()) and not self.arena.in_doubt(self)

    def covers(self) -> Iterable[Lease[S]]:
        """This lease and all that its fence does not lie behind, each once."""
        if not self._undominated:
            return (self,)
        found = {self.number: self}
        todo = [self]
        while todo:
            for lease in todo.pop()._undominated:
                if lease.number not in found:
                    found[lease.number] = lease
                    todo.append(lease)
        return found.values()

    def _first_touch(self, stream: S, me: StreamId) -> None:
        """Make `stream` wait for all that had the slot and the seats before; a capture queues nothing, so not there."""
        if not self.captured:
            for lease in (self._behind, *self._after):
                if lease is not None and lease.state is not LeaseState.SETTLED:
                    self._wait_for(lease, stream, me)
        self._streams[me] = stream
        self._count[me] = 0

    def _order(self, lease: Lease[S], touch: tuple[StreamId, int], stream: S, me: StreamId) -> None:
        """Make `stream` wait for one touch of `lease`, unless it does already."""
        other, index = touch
        if other == me:
            return
        key = (me, lease.number, other)
        if self._seen.get(key, 0) >= index:
            return
        if self.arena.ordered:
            event = lease.touch_events.get(other)
            if event is None:
                event = lease.touch_events[other] = self.arena.events.new()
            event.record(lease._streams[other], other)
            event.wait(stream, me)
            self.arena.counters.records += 1
            self.arena.counters.waits += 1
        self._seen[key] = lease._count[other]
        if lease is not self:
            self._note(lease)

    def _continue(self, before: Lease[S], step: Hashable, stream: S, me: StreamId) -> None:
        """Make `stream` wait for the same step of an execution that had one of our requests before us."""
        if self.arena.in_doubt(before):
            raise OrderError(f"{self.execution} continues {before.execution}, which is in doubt; end its requests")
        done = step if step in before._completed else WHOLE
        ended = before.state is not LeaseState.ACQUIRED
        # A graph replays all steps at once: it can follow what is queued completely, and nothing less.
        if not (done in before._completed or (step == WHOLE and ended and not before.broken)):
            state = "did, which ended without it" if ended else "did"
            raise OrderError(
                f"{self.execution} launches {step} before {before.execution} {state}, and continues its rows; "
                f"launch each layer of the earlier execution first, and end its requests if it broke off"
            )
        if before.state is LeaseState.ACQUIRED:
            for launch in before._steps[done].items():
                self._order(before, launch, stream, me)
        else:
            # What the step itself followed, it waited for: the fence is enough even if the execution broke off later.
            self._wait_fence(before, stream, me)

    def _wait_fence(self, lease: Lease[S], stream: S, me: StreamId) -> None:
        """Make `stream` wait for what a sealed lease queued, once."""
        if (me, lease.number) in self._fenced:
            return
        if lease.fence is not None and self.arena.ordered:
            self.arena.counters.waits += lease.fence.wait(stream, me)
        self._fenced.add((me, lease.number))
        self._note(lease)

    def _wait_for(self, lease: Lease[S], stream: S, me: StreamId) -> None:
        """Make `stream` wait for all that a lease covers."""
        if not lease.can_be_waited_for():
            raise OrderError(f"{self.execution} must wait for {lease!r}; finish it first, or take another slot")
        for other in lease.covers():
            self._wait_fence(other, stream, me)

    def _note(self, lease: Lease[S]) -> None:
        """Remember that this lease waits for `lease` and for all that it waits for."""
        for slot, number in ((lease.slot.index, lease.number), *lease.follows.items()):
            if self.follows.get(slot, 0) < number:
                self.follows[slot] = number

    def seal(self, *, whole: bool = True) -> None:
        """No more launches: record the fence, one event per touched stream. Put it in a `finally`.

        A whole lease that touched nothing records nothing, and its slot stays behind the lease it was behind. If an
        event cannot be recorded, nobody will know when the slot is free: the lease is quarantined, and the error
        goes on.

        Args:
            whole: every planned launch was queued. Otherwise pages changed owner without a launch that waited for what
                this lease followed, so whoever waits for this lease must wait for that, too.

        Raises:
            OrderError: sealed before, or quarantined.
        """
        arena = self.arena
        with arena.lock:
            if self.state is not LeaseState.ACQUIRED:
                raise OrderError(f"{self.execution} is sealed after it was {self.state.value}")
            if self.captured:
                arena.end_capture(self, whole)
                return
            if not self._streams and (self._continues or self._after):
                whole = False  # pages changed owner, and no launch has waited for those who had them
            if self._streams:
                events = {}
                fence_events = arena.events_for_fence(self)
                try:
                    for stream_id, stream in self._streams.items():
                        event = fence_events.get(stream_id)
                        if event is None:
                            event = fence_events[stream_id] = arena.events.new()
                        event.record(stream, stream_id)
                        events[stream_id] = event
                except BaseException as error:
                    arena.quarantine(self, f"its fence could not be recorded: {error}")
                    raise
                arena.counters.records += len(events)
                self.fence = Fence(events)
            self.broken = not whole
            if not whole:
                # What it touched waited for who had the slot and the seats before. What queued nothing is no link: many
                # such in a row must not become a chain.
                before = self._continues
                if self.fence is None:
                    before = tuple(lease for lease in (self._behind, *self._continues, *self._after) if lease)
                empty = [lease for lease in before if lease.broken and lease.fence is None]
                linked = (lease for link in before for lease in (link._undominated if link in empty else (link,)))
                self._undominated = tuple(dict.fromkeys(linked))
            self.state = LeaseState.SEALED
            arena.seal(self, whole)
            # A whole lease's fence lies behind all that it waited for: nobody needs the chain any more.
            self._continues = self._after = ()
            self._behind = None
