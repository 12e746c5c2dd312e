# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The workspace arena: a fixed number of slots, each leased to one execution at a time.

A slot is handed on only behind the fence of its last lease: passed, or waited for by every stream of the new lease
before its first touch. Slots are chosen in the order passed, never used, oldest pending, so a wait is queued only when
all slots are in flight. Nothing is allocated here; what a slot consists of, its owner knows by `slot.index`.

Not here yet: quarantine, time-outs and graph slots.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import Generic, TypeVar

from afd_dsv4.device.api import Device
from afd_dsv4.tail.store import SlotIndex
from afd_dsv4.workspace.fence import EventPool
from afd_dsv4.workspace.identity import ExecutionId
from afd_dsv4.workspace.lease import Lease, LeaseState

S = TypeVar("S")


class Exhausted(RuntimeError):
    """Every slot is leased to an execution that has not sealed it."""


class Settlement(enum.Enum):
    """What became of a lease. A race is a value, never an exception."""

    RELEASED = "released"
    ALREADY_RELEASED = "already released"
    NOT_QUIESCED = "not quiesced"


@dataclass
class ArenaCounters:
    """What ordering has cost so far.

    Attributes:
        leases: leases acquired.
        handed_on: slots taken over while their fence was pending: too few slots for the overlap.
        records: events recorded.
        waits: stream waits queued. Host waits are the staging ring's (`staging.py`).
    """

    leases: int = 0
    handed_on: int = 0
    records: int = 0
    waits: int = 0


@dataclass(eq=False)
class Slot(Generic[S]):
    """One workspace slot.

    Attributes:
        index: its place in every array that belongs to slots.
        lease: who holds it; None between leases.
        last: the last lease that touched it, behind which it is free; None if nobody did yet.
        sealed_at: sequence number of the last seal.
    """

    index: SlotIndex
    lease: Lease[S] | None = None
    last: Lease[S] | None = None
    sealed_at: int = 0


class WorkspaceArena(Generic[S]):
    """Leases slots and counts.

    Args:
        device: makes events and names streams.
        slots: executions that may be in flight at once.
        ordered: False queues no wait at all. Only for negative controls, which must then find corruption.
    """

    def __init__(self, device: Device[S], slots: int, *, ordered: bool = True) -> None:
        if slots < 1:
            raise ValueError(f"an arena needs at least one slot, got {slots}")
        self.device = device
        self.ordered = ordered
        self.events = EventPool(device)
        self.counters = ArenaCounters()
        self.lock = threading.RLock()
        self.slots = tuple(Slot[S](SlotIndex(index)) for index in range(slots))
        self._seals = 0

    def acquire(self, execution: ExecutionId) -> Lease[S]:
        """Lease a slot. Never waits on the host.

        Raises:
            Exhausted: no slot is sealed or unused.
        """
        with self.lock:
            free = [slot for slot in self.slots if slot.lease is None]
            passed = [slot for slot in free if slot.last is not None and slot.last.over()]
            unused = [slot for slot in free if slot.last is None]
            pending = [slot for slot in free if slot.last is not None and slot.last.can_be_waited_for()]
            candidates = passed or unused or sorted(pending, key=lambda slot: slot.sealed_at)
            if not candidates:
                holders = "; ".join(str(slot.lease.execution) for slot in self.slots if slot.lease)
                raise Exhausted(
                    f"{execution} wants a workspace slot, all {len(self.slots)} are held, or behind what is held, by: "
                    f"{holders}. Finish executions, or configure more slots"
                )
            slot = candidates[0]
            self.counters.leases += 1
            self.counters.handed_on += not (passed or unused)
            slot.lease = Lease(self, slot, execution, slot.last)
            return slot.lease

    def seal(self, slot: Slot[S], lease: Lease[S] | None) -> None:
        """Called by the lease: the slot is free behind `lease`; None if it touched nothing, then behind what it was."""
        with self.lock:
            self._seals += 1
            slot.lease = None
            slot.sealed_at = self._seals
            if lease is not None:
                slot.last = lease

    def settle(self, lease: Lease[S]) -> Settlement:
        """Ask whether a lease is over. Never waits."""
        with self.lock:
            if lease.state is LeaseState.SETTLED:
                return Settlement.ALREADY_RELEASED
            return Settlement.RELEASED if lease.over() else Settlement.NOT_QUIESCED
