# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A lease: one execution's hold on one workspace slot, and the order of everything that touches it.

Problem: the launches of an execution may come from several streams, and layer order on the host says nothing about
order on the device; the public attempt at cross-layer reuse corrupted output for exactly that (vllm#49236, vllm#52836).
Way: every launch, copy or scatter says `touch(stream, reads, writes)` before it is queued. A touch that conflicts with
an earlier one on another stream makes its stream wait for an event recorded behind that one; on one stream it costs
nothing. The event is recorded when the conflict shows, not with every touch: it then lies later than it must, never
earlier, and an execution on one stream records exactly one event, at its end.
Not here: which slot is leased, and when it may be handed on (`arena.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from afd_dsv4.device.api import StreamId
from afd_dsv4.workspace.fence import Fence
from afd_dsv4.workspace.identity import ExecutionId

if TYPE_CHECKING:
    from afd_dsv4.workspace.arena import Slot, WorkspaceArena

S = TypeVar("S")


class LeaseState(enum.Enum):
    """Life of a lease."""

    ACQUIRED = "acquired"
    SEALED = "sealed"
    SETTLED = "settled"


class OrderError(RuntimeError):
    """Work was queued in an order that the lease cannot make safe."""


class Lease(Generic[S]):
    """Made by `WorkspaceArena.acquire` only.

    Args:
        arena: whose slot it is.
        slot: the slot.
        execution: who holds it.
        behind: the slot's last lease that touched it, or None.
    """

    def __init__(
        self,
        arena: WorkspaceArena[S],
        slot: Slot[S],
        execution: ExecutionId,
        behind: Lease[S] | None,
    ) -> None:
        self.slot = slot
        self.execution = execution
        self.state = LeaseState.ACQUIRED
        self.fence: Fence[S] | None = None
        self._arena = arena
        self._behind = behind
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

    def follow(self, *, continues: Sequence[Lease[S]] = (), after: Sequence[Lease[S]] = ()) -> None:
        """Name what comes first; call it before the first touch.

        Args:
            continues: executions that had this one's requests last: each of their steps precedes the same step here.
            after: executions that had the same pages for requests that have ended: they precede everything here.

        Raises:
            OrderError: the slot was touched already, without waiting for them; or one of `after` is still open.
        """
        with self._arena.lock:
            if self._streams:
                raise OrderError(f"{self.execution} names what it follows after it has touched its slot")
            self._continues = tuple(lease for lease in dict.fromkeys(continues) if not lease.over())
            self._after = tuple(lease for lease in dict.fromkeys(after) if not lease.over())
            if still := [str(lease.execution) for lease in self._after if not lease.can_be_waited_for()]:
                raise OrderError(
                    f"{self.execution} takes pages that may still be touched by {'; '.join(still)}; finish that first"
                )

    def touch(
        self,
        stream: S,
        *,
        reads: Iterable[Hashable] = (),
        writes: Iterable[Hashable] = (),
        step: Hashable = None,
    ) -> None:
        """Order what is queued on `stream` next behind all it conflicts with. Call it just before queueing.

        Args:
            stream: where the work goes.
            reads: parts of the slot that the work reads.
            writes: parts that it writes.
            step: names a launch (layer and kind) that other executions may have to follow, or have led: with a step,
                the same step of every execution that this one continues comes first. See `complete`.

        Raises:
            OrderError: the lease is sealed, or an execution that this one continues has not completed `step`.
        """
        with self._arena.lock:
            if self.state is not LeaseState.ACQUIRED:
                raise OrderError(f"{self.execution} touches its slot after it was {self.state.value}")
            me = self._arena.device.stream_id(stream)
            # A wait that fails must not be remembered as made: every note is taken after the queueing it speaks of.
            if me not in self._streams:
                for lease in (self._behind, *self._after):
                    if lease is not None:
                        self._wait_for(lease, stream, me)
                self._streams[me] = stream
                self._count[me] = 0
            if step is not None:
                for before in self._continues:
                    self._continue(before, step, stream, me)
            index = self._count[me] = self._count[me] + 1
            for part in reads:
                self._order(self, self._writer.get(part), stream, me)
                self._readers.setdefault(part, {})[me] = index
            for part in writes:
                self._order(self, self._writer.get(part), stream, me)
                for reader in self._readers.get(part, {}).items():
                    self._order(self, reader, stream, me)
                self._readers.pop(part, None)
                self._writer[part] = (me, index)
            if step is not None:
                self._steps.setdefault(step, {})[me] = index

    def complete(self, step: Hashable) -> None:
        """All launches of `step` are queued; prefill and decode may be two. Call it once they are, not before."""
        with self._arena.lock:
            if step not in self._steps:
                raise OrderError(f"{self.execution} completes {step} without having touched its slot for it")
            self._completed.add(step)

    def over(self) -> bool:
        """Whether nothing that this lease covered can still run. Never waits; once true, stays true."""
        with self._arena.lock:
            if self.state is LeaseState.SETTLED:
                return True
            if self.state is LeaseState.ACQUIRED or (self.fence is not None and not self.fence.passed()):
                return False
            self._undominated = tuple(lease for lease in self._undominated if not lease.over())
            if self._undominated:
                return False
            self.state = LeaseState.SETTLED
            return True

    def can_be_waited_for(self) -> bool:
        """Whether all that this lease covers has been queued, so that a stream can wait for it."""
        return self.state is not LeaseState.ACQUIRED and all(lease.can_be_waited_for() for lease in self._undominated)

    def _order(self, lease: Lease[S], touch: tuple[StreamId, int] | None, stream: S, me: StreamId) -> None:
        """Make `stream` wait for one touch of `lease`, unless it does already."""
        if touch is None or touch[0] == me:
            return
        other, index = touch
        key = (me, id(lease), other)
        if self._seen.get(key, 0) >= index:
            return
        if self._arena.ordered:
            event = self._arena.events.record(lease._streams[other])
            event.wait(stream)
            self._arena.events.give_back(event)
            self._arena.counters.records += 1
            self._arena.counters.waits += 1
        self._seen[key] = lease._count[other]

    def _continue(self, before: Lease[S], step: Hashable, stream: S, me: StreamId) -> None:
        """Make `stream` wait for the same step of an execution that had one of our requests before us."""
        if step not in before._completed:
            state = "did" if before.state is LeaseState.ACQUIRED else "did, which ended without it"
            raise OrderError(
                f"{self.execution} launches {step} before {before.execution} {state}, and continues its rows; "
                f"launch each layer of the earlier execution first, and end its requests if it broke off"
            )
        if before.state is LeaseState.ACQUIRED:
            for launch in before._steps[step].items():
                self._order(before, launch, stream, me)
        else:
            # What the step itself followed, it waited for: the fence is enough even if the execution broke off later.
            self._wait_fence(before, stream, me)

    def _wait_fence(self, lease: Lease[S], stream: S, me: StreamId) -> None:
        """Make `stream` wait for what a sealed lease queued, once."""
        if (me, id(lease)) in self._fenced:
            return
        if lease.fence is not None and self._arena.ordered:
            self._arena.counters.waits += lease.fence.wait(stream, me)
        self._fenced.add((me, id(lease)))

    def _wait_for(self, lease: Lease[S], stream: S, me: StreamId) -> None:
        """Make `stream` wait for all that a lease covers."""
        if not lease.can_be_waited_for():
            raise OrderError(f"{self.execution} must wait for {lease.execution}, which is still open; finish it first")
        self._wait_fence(lease, stream, me)
        for other in lease._undominated:
            self._wait_for(other, stream, me)

    def seal(self, *, whole: bool = True) -> None:
        """No more launches: record the fence, one event per touched stream. Put it in a `finally`.

        A whole lease that touched nothing records nothing, and its slot stays behind the lease it was behind.

        Args:
            whole: every planned launch was queued. Otherwise pages changed owner without a launch that waited for what
                this lease followed, so whoever waits for this lease must wait for that, too.

        Raises:
            OrderError: sealed before.
        """
        with self._arena.lock:
            if self.state is not LeaseState.ACQUIRED:
                raise OrderError(f"{self.execution} is sealed twice")
            events = {owner: self._arena.events.record(stream) for owner, stream in self._streams.items()}
            self._arena.counters.records += len(events)
            if events:
                self.fence = Fence(events, self._arena.events)
            if not whole:
                behind = () if self._behind is None else (self._behind,)
                self._undominated = (*behind, *self._continues, *self._after)
            self.state = LeaseState.SEALED
            self._arena.seal(self.slot, self if events or not whole else None)
            # A whole lease's fence lies behind all that it waited for: nobody needs the chain any more.
            self._continues = self._after = ()
            self._behind = None
