# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A recorded trace as a test case: the same calls on a fresh arena, in front of a device that runs in any order.

A trace says what a host asked for; how far its device was at each call, another run decides anew. So one trace from a
user's machine becomes as many runs as there are seeds. Each access of a replay is stamped with its place in the host's
order and must run behind all earlier ones that it conflicts with; the trace that the replay itself leaves is checked,
too.

What a trace does not say is assumed as strictly as it allows: a lease that maps a seat goes on with the request of the
lease before, layer by layer, if that was still open, and otherwise has the seat after it; a step is complete with its
last touch. Slots may differ from the recorded ones. Captures and replays of graphs are refused: a trace has no graph.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from afd_dsv4.device.model import ModelDevice, ModelStream
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.identity import ExecutionId, Generation
from afd_dsv4.workspace.lease import Lease, LeaseState
from afd_dsv4.workspace.order import check
from afd_dsv4.workspace.staging import StagingRing
from afd_dsv4.workspace.trace import Record, Trace

WHOLE = "*"


@dataclass
class Memory:
    """Resources by who used them so far, in the order of the device.

    Attributes:
        wrong: accesses that ran ahead of an earlier one that they conflict with.
    """

    wrong: list[str] = field(default_factory=list)
    _used: dict[Hashable, tuple[int, int]] = field(default_factory=dict)  # last write and last access, in host order

    def use(self, place: int, name: str, reads: Iterable[Hashable], writes: Iterable[Hashable]) -> None:
        """An access runs. Its place in the host's order must be behind those that ran, where they conflict."""
        for resource in reads:
            wrote, used = self._used.get(resource, (-1, -1))
            if wrote > place:
                self.wrong.append(f"{name} reads {resource} after a later write")
            self._used[resource] = wrote, max(used, place)
        for resource in writes:
            wrote, used = self._used.get(resource, (-1, -1))
            if used > place:
                self.wrong.append(f"{name} writes {resource} after a later access")
            self._used[resource] = max(wrote, place), max(used, place)


@dataclass(frozen=True)
class Replayed:
    """What came of it.

    Attributes:
        wrong: accesses that ran out of order.
        unordered: what the order checker says of the replay's own trace.
        leases: how many were replayed.
        arena: with its counters.
    """

    wrong: tuple[str, ...]
    unordered: tuple[str, ...]
    leases: int
    arena: WorkspaceArena[ModelStream]

    @property
    def clean(self) -> bool:
        return not (self.wrong or self.unordered)


def replay(records: Sequence[Record], seed: int = 0, *, ordered: bool = True) -> Replayed:
    """Drive a fresh arena with a recorded host.

    Args:
        records: a trace from its beginning.
        seed: how far and in which order the device runs.
        ordered: False for an arena that queues no wait.

    Raises:
        ValueError: the trace has a capture or a graph in it, or does not begin at the beginning.
    """
    return _Replay(records, seed, ordered).run()


class _Replay:
    def __init__(self, records: Sequence[Record], seed: int, ordered: bool) -> None:
        self.records = records
        self.rng = random.Random(seed)
        self.device = ModelDevice(seed)
        self.trace = Trace(None)
        slots = 1 + max((record[3] for record in records if record[1] in ("acquire", "touch")), default=0)
        self.arena: WorkspaceArena[ModelStream] = WorkspaceArena(
            self.device, slots, ordered=ordered, trace=self.trace, clock=lambda: 0.0
        )
        entries = 1 + max((record[2] for record in records if record[1] in ("rewrite", "copy")), default=0)
        self.ring = StagingRing(self.arena.events, list(range(entries)))
        self.entries: dict[int, int] = {}  # recorded -> ours
        self.streams: dict[int, ModelStream] = {}
        self.leases: dict[int, Lease[ModelStream]] = {}
        self.mapped: dict[int, tuple[int, ...]] = {}
        self.last: dict[int, Lease[ModelStream]] = {}  # by seat
        self.memory = Memory()
        #: (lease, step) -> index of the last touch
        self.complete = {(record[2], record[7]): at for at, record in enumerate(records) if record[1] == "touch"}

    def run(self) -> Replayed:
        for at, (_, op, *fields) in enumerate(self.records):
            if op in ("acquire", "map", "touch", "seal", "settle", "quarantine", "rewrite", "copy"):
                getattr(self, f"_{op}")(at, *fields)
            elif op == "replay":
                raise ValueError(f"record {at} replays a graph, which a trace does not hold")
            # The rest (record, wait, passed, reset, close) this arena does for itself, or not.
            for _ in range(self.rng.randrange(2)):  # slower than the host: much is in flight
                self.device.step()
        self.device.run()
        unordered = tuple(map(str, check(self.trace.records()).violations))
        return Replayed(tuple(self.memory.wrong), unordered, len(self.leases), self.arena)

    def _stream(self, index: int) -> ModelStream:
        if index not in self.streams:
            self.streams[index] = self.device.stream()
        return self.streams[index]

    def _lease(self, at: int, number: int) -> Lease[ModelStream]:
        if number not in self.leases:
            raise ValueError(f"record {at} is of lease {number}, whose acquire is missing; replay a trace as a whole")
        return self.leases[number]

    def _acquire(self, at: int, number: int, _slot: int, _execution: str, kind: str) -> None:
        if kind == "capture":
            raise ValueError(f"record {at} begins a capture, which a replay cannot repeat")
        self.leases[number] = self.arena.acquire(ExecutionId(Generation(number)))

    def _map(self, at: int, number: int, seats: tuple[int, ...]) -> None:
        before = [self.last[seat] for seat in seats if seat in self.last]
        lease = self._lease(at, number)
        open_still = [other for other in before if other.state is LeaseState.ACQUIRED]
        after = [other for other in before if other.can_be_waited_for()]
        lease.follow(continues=open_still, after=after, seats=seats)
        self.mapped[number] = tuple(seats)
        self.last.update(dict.fromkeys(seats, lease))

    def _touch(
        self,
        at: int,
        number: int,
        _slot: int,
        stream: int,
        reads: Sequence[Hashable],
        writes: Sequence[Hashable],
        step: Hashable,
    ) -> None:
        lease, where = self._lease(at, number), self._stream(stream)
        if WHOLE in (*reads, *writes, step):
            raise ValueError(f"record {at} touches a slot as a whole, as the replay of a graph does")
        lease.touch(where, reads=reads, writes=writes, step=step)
        slot, name = lease.slot.index, f"record {at} of lease {number}"
        read = [("slot", slot, part) for part in reads]
        written = [("slot", slot, part) for part in writes]
        # Launches of one lease in one step have different requests; leases have a seat's step in their own order.
        pages = [("seat", seat, step) for seat in self.mapped.get(number, ()) if step is not None]
        self.device.launch(where, lambda: self.memory.use(at, name, read, written))
        self.device.launch(where, lambda: self.memory.use(number, name, (), pages))
        if step is not None and self.complete[number, step] == at:
            lease.complete(step)

    def _seal(self, at: int, number: int, whole: bool) -> None:
        self._lease(at, number).seal(whole=whole)

    def _settle(self, at: int, number: int, _outcome: str) -> None:
        self.arena.settle(self._lease(at, number))

    def _quarantine(self, at: int, number: int, why: str) -> None:
        self.arena.quarantine(self._lease(at, number), why)

    def _rewrite(self, at: int, entry: int) -> None:
        self.entries[entry], _ = self.ring.take()
        self.memory.use(at, f"record {at}", (), [("entry", self.entries[entry])])

    def _copy(self, at: int, entry: int, stream: int) -> None:
        mine, where = self.entries.pop(entry), self._stream(stream)
        self.device.launch(where, lambda: self.memory.use(at, f"record {at}", [("entry", mine)], ()))
        self.ring.copied(mine, where)
