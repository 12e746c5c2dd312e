# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The workspace arena: a fixed number of slots, each leased to one execution at a time.

A slot is handed on only behind the fence of its last lease: passed, or waited for by every stream of the new lease
before its first touch. Slots are chosen in the order passed, never used, oldest pending, so a wait is queued only when
all slots are in flight. Nothing is allocated here; what a slot consists of, its owner knows by `slot.index`.

When nobody can prove that a lease is over (its fence is older than `fence_timeout_s`, cannot be recorded, or cannot be
queried), it is quarantined: its slot is never leased again, its requests are void, and it is counted. Nothing brings it
back; a worker whose slots are all quarantined cannot go on and says so. Where a slot is handed on before its fence has
passed, the fence that pends longest is kept as it is until it passes (`Slot.oldest`), so that no slot stays young by
being handed on.

Graphs have slots of their own, assigned by key at start-up, because a captured graph keeps their addresses.

Only `drain`, for shutdown, ever waits.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from afd_dsv4.device.api import Device, StreamId
from afd_dsv4.tail.store import SlotIndex
from afd_dsv4.workspace.fence import EventSource, OrderedEvent
from afd_dsv4.workspace.identity import ExecutionId, ExecutionKind, Generation
from afd_dsv4.workspace.lease import Lease, LeaseState
from afd_dsv4.workspace.trace import Trace

S = TypeVar("S")


class Exhausted(RuntimeError):
    """No slot can be leased.

    Attributes:
        fatal: no execution that may still finish holds one: all are quarantined.
    """

    def __init__(self, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.fatal = fatal


class CaptureError(RuntimeError):
    """A graph asks for what a capture or a replay cannot have."""


class StillLeased(RuntimeError):
    """The arena is to be closed or reset while work may still touch it. Nothing was changed."""


class ArenaClosed(RuntimeError):
    """A slot is asked for after the arena was closed."""


class Settlement(enum.Enum):
    """What became of a lease. A race is a value, never an exception."""

    RELEASED = "released"
    ALREADY_RELEASED = "already released"
    NOT_QUIESCED = "not quiesced"
    STALE_GENERATION = "stale generation"
    IN_DOUBT = "in doubt"
    NOT_FOUND = "not found"


@dataclass
class ArenaCounters:
    """What ordering has cost so far.

    Attributes:
        leases: leases acquired.
        handed_on: slots taken over while their fence was pending: too few slots for the overlap.
        records: events recorded.
        waits: stream waits queued. Host waits are the staging ring's (`staging.py`).
        quarantined: leases that nobody can prove to be over.
        exhausted: executions that got no slot.
    """

    leases: int = 0
    handed_on: int = 0
    records: int = 0
    waits: int = 0
    quarantined: int = 0
    exhausted: int = 0


@dataclass(eq=False)
class Slot(Generic[S]):
    """One workspace slot.

    Attributes:
        index: its place in every array that belongs to slots.
        lease: who holds it; None between leases.
        last: the last lease that touched it, behind which it is free; None if nobody did yet.
        oldest: the lease whose fence has pended longest, as far as is known; `last`, unless slots are handed on.
        sealed: sequence number of the seal of `last`.
        quarantined: the lease for which it is never leased again; None while it may be.
        touch_events: ordering within a lease, by stream. See `fence.py`.
        fence_events: the same for fences, twice: those of `oldest` are not recorded again while it is pending.
        pinned: which of the two are those of `oldest`.
    """

    index: SlotIndex
    lease: Lease[S] | None = None
    last: Lease[S] | None = None
    oldest: Lease[S] | None = None
    sealed: int = 0
    quarantined: Lease[S] | None = None
    touch_events: dict[StreamId, OrderedEvent[S]] = field(default_factory=dict)
    fence_events: tuple[dict[StreamId, OrderedEvent[S]], ...] = field(default_factory=lambda: ({}, {}))
    pinned: int = 0


class WorkspaceArena(Generic[S]):
    """Leases slots and counts.

    Args:
        device: makes events and names streams.
        slots: executions that may be in flight at once.
        graphs: one graph slot each, with the keys of the graphs that use it; such graphs must not overlap.
        ordered: False queues no wait at all. Only for negative controls, which must then find corruption.
        fence_timeout_s: a fence that has not passed for so long after its seal is not waited for any more.
        clock: seconds, monotonic.
        trace: where to note what was ordered; None for nowhere.
        since: the newest generation that was minted before there was this arena: leases of them are stale here.

    Attributes:
        slots: all of them, those of graphs last.
        epoch: counts resets; a lease or a graph of an earlier one is stale.
        lock: held while anything is decided or queued.
    """

    def __init__(
        self,
        device: Device[S],
        slots: int,
        *,
        graphs: Sequence[Iterable[Hashable]] = (),
        ordered: bool = True,
        fence_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
        since: Generation = Generation(0),  # noqa: B008  # an int
    ) -> None:
        if slots < 1:
            raise ValueError(f"an arena needs at least one slot, got {slots}")
        if fence_timeout_s <= 0:
            raise ValueError(f"fence_timeout_s must be above 0, got {fence_timeout_s}")
        self.device = device
        self.ordered = ordered
        self.fence_timeout_s = fence_timeout_s
        self.trace = trace
        self.events = EventSource(device, trace)
        self.counters = ArenaCounters()
        self.lock = threading.RLock()
        self.epoch = 0
        self.closed = False
        self.slots = tuple(Slot[S](SlotIndex(index)) for index in range(slots + len(graphs)))
        self._eager = self.slots[:slots]
        self._graphs: dict[Hashable, Slot[S]] = {}
        for slot, keys in zip(self.slots[slots:], graphs, strict=True):
            for key in keys:
                if key in self._graphs:
                    raise ValueError(f"graph key {key!r} is assigned to two slots")
                self._graphs[key] = slot
        self._captured: dict[Hashable, Lease[S]] = {}  # strong: a graph needs its events as long as it may be replayed
        self._replaced: list[Lease[S]] = []  # captured anew since
        self._clock = clock
        self._seals = 0
        self._newest = since

    def acquire(self, execution: ExecutionId) -> Lease[S]:
        """Lease a slot. Never waits on the host.

        Raises:
            Exhausted: no slot is sealed or unused.
            CaptureError: a graph is being captured, and this would query events; see `capture`.
            ArenaClosed: the arena was closed.
        """
        with self.lock:
            self._admit(execution)
            unused: Slot[S] | None = None
            pending: Slot[S] | None = None
            for slot in self._eager:
                if slot.lease is not None or slot.quarantined:
                    continue
                last = slot.last
                if last is None:
                    unused = unused or slot
                elif last.over():
                    return self._lease(slot, execution)
                elif (
                    not self._timed_out(slot)
                    and last.can_be_waited_for()
                    and (pending is None or slot.sealed < pending.sealed)
                ):
                    pending = slot
            if unused is not None:
                return self._lease(unused, execution)
            if pending is None:
                raise self._exhausted(execution, self._eager)
            if pending.last is not None and not pending.last.can_be_waited_for():
                return self.acquire(execution)  # it waits for what was quarantined since it was looked at
            self.counters.handed_on += 1
            return self._lease(pending, execution)

    def capture(self, key: Hashable, execution: ExecutionId) -> Lease[S]:
        """Lease the slot of a graph for its capture, and seal it within; its touches order captured work among itself.

        Queues nothing outside the capture and queries nothing, and until the seal nobody else may acquire.

        Raises:
            CaptureError: no slot was assigned to `key`, or an execution is open.
            Exhausted: the slot is quarantined.
            ArenaClosed: the arena was closed.
        """
        with self.lock:
            slot = self._graph_slot(key, execution)
            if self.closed:
                raise ArenaClosed(f"{execution} wants a workspace slot after the arena was closed")
            if execution.kind is not ExecutionKind.CAPTURE:
                raise ValueError(f"a capture has an execution of kind capture, got {execution}")
            if slot.quarantined:
                raise self._exhausted(execution, (slot,))
            if held := [slot.lease for slot in self.slots if slot.lease is not None]:
                raise CaptureError(
                    f"{execution} is to be captured while executions are open: {held}. Capture one graph at a time, "
                    f"with nothing else going on: what others queue meanwhile would end up in the graph, or break it"
                )
            old = self._captured.pop(key, None)
            if old is not None and slot.last is not None and slot.last.state is not LeaseState.SETTLED:
                self._replaced.append(old)
            self.events.captures += 1
            lease = self._lease(slot, execution, captured=True)
            self._captured[key] = lease
            return lease

    def replay(self, key: Hashable, execution: ExecutionId) -> Lease[S]:
        """Lease the slot of a captured graph, to replay it: touch the whole slot, queue the replay, seal.

        Raises:
            CaptureError: nothing was captured under `key`, or the arena was reset since: the graph would write to
                addresses that are no longer the slot's.
            Exhausted: the slot is held, or quarantined.
            ArenaClosed: the arena was closed.
        """
        with self.lock:
            slot = self._graph_slot(key, execution)
            captured = self._captured.get(key)
            if captured is None or captured.epoch != self.epoch or captured.state is not LeaseState.SETTLED:
                state = "is being captured"
                if captured is None:
                    state = "was never captured"
                elif captured.epoch != self.epoch:
                    state = "was captured before the arena was reset"
                raise CaptureError(f"{execution} replays graph {key!r}, which {state}; capture it (again) first")
            self._admit(execution)
            last = slot.last
            if self._replaced:  # those whose replays are over are not needed any more
                self._replaced = [old for old in self._replaced if old.slot.last and not old.slot.last.over()]
            if slot.lease is not None or slot.quarantined:
                raise self._exhausted(execution, (slot,))
            if last is not None and not last.over():
                if self._timed_out(slot) or not last.can_be_waited_for():
                    raise self._exhausted(execution, (slot,))
                self.counters.handed_on += 1
            return self._lease(slot, execution)

    def seal(self, lease: Lease[S], whole: bool) -> None:
        """Called by the lease: its slot is free behind it; where a whole one touched nothing, behind what it was."""
        slot = lease.slot
        self._seals += 1
        if self.trace is not None:
            self.trace.add("seal", lease.number, whole)
        slot.lease = None
        if lease.fence is None and whole:
            return
        lease.sealed_at = self._clock()
        if lease.fence is None and slot.last is not None and not slot.last.over():
            lease.sealed_at = slot.last.sealed_at  # it queued nothing, and the slot is as old as it was
        slot.last = lease
        slot.sealed = self._seals

    def events_for_fence(self, lease: Lease[S]) -> dict[StreamId, OrderedEvent[S]]:
        """Called by the lease that is about to be sealed: the events that its fence may record."""
        slot = lease.slot
        if slot.oldest is None or slot.oldest.over():
            # The last lease is not the oldest if it is pending still, and its events are then the other ones.
            if slot.last is not None and not slot.last.over():
                slot.oldest, slot.pinned = slot.last, 1 - slot.pinned
            else:
                slot.oldest = lease
                return slot.fence_events[slot.pinned]
        return slot.fence_events[1 - slot.pinned]

    def end_capture(self, lease: Lease[S], whole: bool) -> None:
        """Called by the lease: the capture is over. Nothing has run, so the slot stays behind what it was."""
        if self.trace is not None:
            self.trace.add("seal", lease.number, whole)
        lease.state = LeaseState.SETTLED
        lease.slot.lease = None
        self.events.captures -= 1
        if not whole:
            self._captured = {key: held for key, held in self._captured.items() if held is not lease}

    def settle(self, lease: Lease[S] | ExecutionId) -> Settlement:
        """Ask whether a lease is over, and release it if so. Never waits, and never changes another lease.

        Args:
            lease: the lease, or the identity of its execution.

        Returns:
            RELEASED: it is over, which nobody knew before.
            ALREADY_RELEASED: it is over.
            NOT_QUIESCED: it is open, or its work may still run.
            STALE_GENERATION: the memory was replaced since, or it is of another arena that was closed; or (by identity)
                no slot knows it, though its generation has been leased for, or was minted before there was this arena:
                its slot has had another lease since, or there never was one.
            IN_DOUBT: it is quarantined, or waits for what is.
            NOT_FOUND: it is a lease of another arena, or (by identity) of a generation that is still to come.
        """
        with self.lock:
            found = self._find(lease) if isinstance(lease, ExecutionId) else lease
            if isinstance(found, Settlement):
                return found
            if found.arena is not self:
                return Settlement.STALE_GENERATION if found.arena.closed else Settlement.NOT_FOUND
            outcome = self._settle(found)
            if self.trace is not None:
                self.trace.add("settle", found.number, outcome._value_)
            return outcome

    def quarantine(self, lease: Lease[S], why: str) -> None:
        """Quarantine a lease: nobody can prove that its work is over.

        Its slot is never leased again, its requests' tails are void, their seats are never taken. Does nothing for a
        lease that is over, or quarantined already. Nothing of a capture has run: only its graph is lost.

        Raises:
            ValueError: it is a lease of another arena.
        """
        if lease.arena is not self:
            raise ValueError(f"{lease!r} is of another arena; ask that one")
        with self.lock:
            if lease.state in (LeaseState.SETTLED, LeaseState.QUARANTINED):
                return
            slot = lease.slot
            if lease.captured:
                self.end_capture(lease, whole=False)
                lease.state = LeaseState.QUARANTINED
                return
            lease.state = LeaseState.QUARANTINED
            if slot.lease is lease:
                slot.lease, slot.last = None, lease
            # Otherwise a later lease has left the slot: it is behind that one, which waited for this and has a fence.
            if lease in (slot.last, slot.oldest) and slot.quarantined is None:
                slot.quarantined = lease
            self.counters.quarantined += 1
            if self.trace is not None:
                self.trace.add("quarantine", lease.number, why)
            if lease.void is not None:
                lease.void(f"{lease.execution} is in doubt: {why}")

    def watch(self) -> tuple[Lease[S], ...]:
        """Look for fences that do not pass: quarantine those that are too old. Never waits; call it now and then.

        Returns:
            Leases in doubt: not quarantined themselves, but a stream of theirs waits for a quarantined one.
        """
        with self.lock:
            if self.events.mute():
                return ()
            for slot in self.slots:
                if slot.last is not None and not slot.last.over():
                    self._timed_out(slot)
            return tuple(
                lease
                for slot in self.slots
                for lease in (slot.last, slot.lease)
                if lease is not None and lease.state is not LeaseState.QUARANTINED and self.in_doubt(lease)
            )

    def in_doubt(self, lease: Lease[S]) -> bool:
        """Whether a lease that is not over is quarantined, had its slot with one that is, or waits for one that is.

        A broken lease waits for all that it should have waited for, however long its own fence has passed.
        """
        if not self.counters.quarantined:
            return False
        with self.lock:
            lost = [slot.quarantined for slot in self.slots if slot.quarantined is not None]
            # In one slot, later leases wait for earlier ones, and may record their events again.
            return not lease.over() and any(
                other.state is LeaseState.QUARANTINED
                or other.slot.quarantined is not None
                or any(other.follows.get(each.slot.index, 0) >= each.number for each in lost)
                for other in lease.covers()
                if other.state is not LeaseState.SETTLED
            )

    def live(self) -> tuple[Lease[S], ...]:
        """Leases that may still touch their slots, quarantined ones included."""
        with self.lock:
            held = [lease for slot in self.slots for lease in (slot.last, slot.lease) if lease is not None]
            return tuple(lease for lease in held if not lease.over())

    def drain(self, timeout_s: float, *, pause_s: float = 0.001) -> tuple[Lease[S], ...]:
        """Wait on the host until every sealed lease is over; quarantine those that are not in time. For shutdown only.

        Returns:
            What is still live: open and quarantined leases.

        Raises:
            CaptureError: a graph is being captured, so nobody could tell what is over.
        """
        if self.events.mute():
            raise CaptureError("the arena cannot be drained while a graph is captured; end the capture first")
        deadline = time.monotonic() + timeout_s  # a real wait, whatever clock the time-outs go by
        while waiting := [lease for lease in self.live() if lease.state is LeaseState.SEALED]:
            if time.monotonic() >= deadline:
                for lease in waiting:
                    self.quarantine(lease, f"not over {timeout_s} s after the arena was to be drained")
                break
            time.sleep(pause_s)
        return self.live()

    def close(self) -> tuple[Lease[S], ...]:
        """Lease nothing any more. The memory of the slots may be freed, but for those of the leases returned.

        Returns:
            Quarantined leases: the device may touch their slots and pages at any time, so they must never be freed.

        Raises:
            StillLeased: an execution is open, or its work may still run. Nothing was changed; see `drain`.
        """
        with self.lock:
            live = self.live()
            self._refuse("close", [lease for lease in live if lease.state is not LeaseState.QUARANTINED])
            self.closed = True
            if self.trace is not None:
                self.trace.add("close")
            return live

    def reset(self) -> None:
        """The slots' memory is to be replaced: forget all leases, and make every captured graph stale.

        Raises:
            StillLeased: a lease is not over, or quarantined: its memory must not be replaced. Nothing was changed.
        """
        with self.lock:
            self._refuse("reset", self.live())
            self.epoch += 1
            for slot in self.slots:
                slot.last = slot.oldest = None
            self._replaced.clear()
            if self.trace is not None:
                self.trace.add("reset")

    def _admit(self, execution: ExecutionId) -> None:
        """Refuse what must not even look at the slots."""
        if self.closed:
            raise ArenaClosed(f"{execution} wants a workspace slot after the arena was closed")
        if self.events.mute():
            raise CaptureError(
                f"{execution} wants a workspace slot while a graph is captured, and none was assigned to it; "
                f"name the graph's key at start-up and call capture() (assigned: {[*self._graphs]})"
            )
        for slot in self.slots:
            if slot.lease is not None and slot.lease.execution == execution:
                raise ValueError(f"{execution} holds slot {slot.index} already; an execution has one lease")

    def _lease(self, slot: Slot[S], execution: ExecutionId, *, captured: bool = False) -> Lease[S]:
        self.counters.leases += 1
        if execution.generation > self._newest:
            self._newest = execution.generation
        slot.lease = Lease(self, slot, execution, self.counters.leases, slot.last, captured)
        if self.trace is not None:
            self.trace.add("acquire", self.counters.leases, slot.index, execution, execution.kind._value_)
        return slot.lease

    def _graph_slot(self, key: Hashable, execution: ExecutionId) -> Slot[S]:
        if key not in self._graphs:
            raise CaptureError(
                f"{execution} wants the slot of graph {key!r}, and none was assigned to it at start-up "
                f"(assigned: {[*self._graphs]}); name it there, or run this batch size without a graph"
            )
        return self._graphs[key]

    def _timed_out(self, slot: Slot[S]) -> bool:
        """Whether a slot is lost because a fence of it has been pending for too long; quarantines such leases."""
        for lease in dict.fromkeys((slot.oldest, slot.last)):
            if lease is None or lease.state is not LeaseState.SEALED or lease.over():
                continue
            if (age := self._clock() - lease.sealed_at) > self.fence_timeout_s:
                limit = self.fence_timeout_s
                self.quarantine(lease, f"its fence has not passed {age:.3g} s after its seal (limit {limit})")
        return slot.quarantined is not None

    def _find(self, execution: ExecutionId) -> Lease[S] | Settlement:
        for slot in self.slots:
            for lease in (slot.lease, slot.last):
                if lease is not None and lease.execution == execution:
                    return lease
        known = execution.generation <= self._newest
        return Settlement.STALE_GENERATION if known else Settlement.NOT_FOUND

    def _settle(self, lease: Lease[S]) -> Settlement:
        if lease.epoch != self.epoch:
            return Settlement.STALE_GENERATION
        if lease.state is LeaseState.SETTLED:
            return Settlement.ALREADY_RELEASED
        if lease.over():
            return Settlement.RELEASED
        return Settlement.IN_DOUBT if self.in_doubt(lease) else Settlement.NOT_QUIESCED

    def _exhausted(self, execution: ExecutionId, slots: Sequence[Slot[S]]) -> Exhausted:
        self.counters.exhausted += 1
        lost = [slot.quarantined for slot in slots if slot.quarantined]
        doubtful = [slot.last for slot in slots if not slot.quarantined and slot.last and self.in_doubt(slot.last)]
        message = f"{execution} wants a workspace slot, and none of {len(slots)} is free"
        if len(lost) + len(doubtful) < len(slots):
            # Where none of these slots is held, they are behind what is held elsewhere.
            held = [slot.lease for slot in slots if slot.lease] or [slot.lease for slot in self.slots if slot.lease]
            message += f": held, or behind what is held, by: {'; '.join(str(lease.execution) for lease in held)}"
        if lost:
            names = "; ".join(map(repr, lost))
            message += f". {len(lost)} are quarantined for ever, nobody can prove that these are over: {names}"
        if doubtful:
            message += f". {len(doubtful)} wait for what is quarantined: {'; '.join(map(repr, doubtful))}"
        if len(lost) == len(slots):
            return Exhausted(f"{message}. The worker cannot go on; restart it", fatal=True)
        return Exhausted(f"{message}. Finish executions, or configure more slots", fatal=False)

    def _refuse(self, what: str, live: Sequence[Lease[S]]) -> None:
        if live:
            held = "; ".join(map(repr, live))
            raise StillLeased(f"the arena cannot {what}: {len(live)} leases may still touch it: {held}. Drain it first")
