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
        behind: the fence of the slot's last lease, or None.
    """

    def __init__(
        self,
        arena: WorkspaceArena[S],
        slot: Slot[S],
        execution: ExecutionId,
        behind: Fence[S] | None,
    ) -> None:
        self.slot = slot
        self.execution = execution
        self.state = LeaseState.ACQUIRED
        self.fence: Fence[S] | None = None
        self._arena = arena
        self._behind = behind
        self._depends: tuple[Lease[S], ...] = ()
        self._streams: dict[StreamId, S] = {}
        self._count: dict[StreamId, int] = {}  # touches queued, per stream
        self._seen: dict[tuple[StreamId, int, StreamId], int] = {}  # (waiter, lease, other) -> touches waited for
        self._fenced: set[tuple[StreamId, int]] = set()  # (stream, lease) whose fence the stream waits for
        self._writer: dict[Hashable, tuple[StreamId, int]] = {}
        self._readers: dict[Hashable, dict[StreamId, int]] = {}
        self._steps: dict[Hashable, dict[StreamId, int]] = {}
        self._completed: set[Hashable] = set()

    def follow(self, leases: Sequence[Lease[S]]) -> None:
        """Name the executions that had this one's requests last; call it before the first touch.

        Raises:
            OrderError: the slot was touched already, without waiting for them.
        """
        with self._arena.lock:
            if self._streams:
                raise OrderError(f"{self.execution} names what it follows after it has touched its slot")
            self._depends = tuple(lease for lease in dict.fromkeys(leases) if not self._arena.is_over(lease))

    def touch(
        self,
        stream: S,
        *,
        reads: Iterable[Hashable] = (),
        writes: Iterable[Hashable] = (),
        step: Hashable = None,
        completes: bool = True,
    ) -> None:
        """Order what is queued on `stream` next behind all it conflicts with. Call it just before queueing.

        Args:
            stream: where the work goes.
            reads: parts of the slot that the work reads.
            writes: parts that it writes.
            step: names a launch (layer and kind) that other executions may have to follow, or have led: with a step,
                the same step of every execution that this one follows comes first.
            completes: whether this is the step's last launch; prefill and decode may be two.

        Raises:
            OrderError: the lease is sealed, or a depended-on execution has not launched `step` yet.
        """
        with self._arena.lock:
            if self.state is not LeaseState.ACQUIRED:
                raise OrderError(f"{self.execution} touches its slot after it was {self.state.value}")
            me = self._arena.device.stream_id(stream)
            if me not in self._streams:
                self._streams[me] = stream
                self._count[me] = 0
                if self._behind is not None and self._arena.ordered:
                    self._arena.counters.waits += self._behind.wait(stream, me)
            if step is not None:
                for before in self._depends:
                    self._follow(before, step, stream, me)
            index = self._count[me] = self._count[me] + 1
            for part in reads:
                self._after(self, self._writer.get(part), stream, me)
                self._readers.setdefault(part, {})[me] = index
            for part in writes:
                self._after(self, self._writer.get(part), stream, me)
                for reader in self._readers.pop(part, {}).items():
                    self._after(self, reader, stream, me)
                self._writer[part] = (me, index)
            if step is not None:
                self._steps.setdefault(step, {})[me] = index
                if completes:
                    self._completed.add(step)

    def _after(self, lease: Lease[S], touch: tuple[StreamId, int] | None, stream: S, me: StreamId) -> None:
        """Make `stream` wait for one touch of `lease`, unless it does already."""
        if touch is None or touch[0] == me:
            return
        other, index = touch
        key = (me, id(lease), other)
        if self._seen.get(key, 0) >= index:
            return
        self._seen[key] = lease._count[other]
        if self._arena.ordered:
            event = self._arena.events.record(lease._streams[other])
            event.wait(stream)
            self._arena.events.give_back(event)
            self._arena.counters.records += 1
            self._arena.counters.waits += 1

    def _follow(self, before: Lease[S], step: Hashable, stream: S, me: StreamId) -> None:
        """Make `stream` wait for the same step of an execution that had one of our requests before us."""
        if before.state is LeaseState.ACQUIRED:
            if step not in before._completed:
                raise OrderError(
                    f"{self.execution} launches {step} before {before.execution} did, whose rows it continues; "
                    f"launch each layer of the earlier execution first"
                )
            for launch in before._steps[step].items():
                self._after(before, launch, stream, me)
        elif (me, id(before)) not in self._fenced:
            self._fenced.add((me, id(before)))
            if before.fence is not None and self._arena.ordered:
                self._arena.counters.waits += before.fence.wait(stream, me)

    def seal(self) -> None:
        """No more launches: record the fence, one event per touched stream. Put it in a `finally`.

        A lease that touched nothing records nothing, and its slot stays behind the fence it had.

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
                self._arena.seal(self.slot, self.fence)
            else:
                self._arena.seal(self.slot, None)
            self.state = LeaseState.SEALED
            # The fence lies behind whatever we waited for, so nobody needs our chain any more.
            self._depends = ()
            self._behind = None
