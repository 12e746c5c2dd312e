# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The order checker: does the trace order every reuse of a workspace slot, of a seat's pages and of staging?

Problem: a race corrupts output in one of many runs, and a test that sees right output has proved nothing.
Way: one pass over a trace (`trace.py`) with a vector clock per stream. Work is behind other work if a chain of these
leads from the one to the other: the order of a stream; an event's last record before a wait for it; and the host, which
queues all later work behind an event that it has seen pass. For every access and every other stream, the last access
there that conflicts must be behind; a stream is in order, so all earlier ones then are, too. A step of a lease writes
the pages of all its seats in that step; within a lease only the parts count, because two launches of one step have
different requests. The part and the step `*` conflict with all others of their slot or seat.

A capture runs nothing: its touches, records and waits order the captured work among itself, and no event recorded there
orders anything outside. A stream is in a capture once a lease of kind capture touches on it, or once it waits for an
event recorded in the capture, until the seal.

A trace without its beginning is judged on what is left; a chain through what was dropped orders only what was dropped.
Of a lease whose acquire was dropped, the slots are those it touches; its seats, and whether it is a capture, are not
known. Time and memory grow with the records and the streams, not with pairs of them.

Not here: the arena, whose rules this knows from the records only; whether every access was recorded, which a race
detector on the device sees.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from afd_dsv4.workspace.trace import FIELDS, Record, plain

WHOLE = "*"
RELEASED = "released"


class Kind(enum.Enum):
    """What is wrong."""

    SLOT = "unordered reuse of a workspace slot"
    SEAT = "unordered reuse of a seat's pages"
    STAGING = "staging entry rewritten before its copies"
    NOT_HELD = "touch without holding the slot"
    AFTER_END = "touch after the lease has ended"
    HELD = "slot leased while another lease is open"
    QUARANTINED = "slot of a quarantined lease leased again"
    UNRECORDED = "event without a record"
    SEALED_TWICE = "lease sealed twice"
    UNPROVEN = "lease released without proof"


@dataclass(frozen=True)
class Site:
    """One record, as far as it concerns a violation.

    Attributes:
        number: of the record, from 0 and counting those dropped before the trace.
        us: when the host made it, in microseconds since the first record of the trace.
        op: what it was.
        lease: the lease, if it is one's.
        execution: who holds the lease; None if its acquire was dropped.
        slot: the workspace slot, if it says one.
        stream: the stream, if it says one.
        step: the step, if it has one.
    """

    number: int
    us: float
    op: str
    lease: int | None = None
    execution: str | None = None
    slot: int | None = None
    stream: int | None = None
    step: Hashable = None

    def __str__(self) -> str:
        words = [f"record {self.number} ({self.op} at {self.us / 1000:.3f} ms"]
        if self.lease is not None:
            words.append(f"lease {self.lease} of {self.execution or 'an execution that began before the trace'}")
        words += [
            f"{name} {value}"
            for name, value in (("slot", self.slot), ("stream", self.stream), ("step", self.step))
            if value is not None
        ]
        return ", ".join(words) + ")"


@dataclass(frozen=True)
class Violation:
    """Two records that must not stand as they do.

    Attributes:
        kind: what is wrong.
        second: the record that makes it wrong.
        first: the record that it conflicts with; None if one is missing.
        resources: what both need: parts of a slot; seats; a staging entry; an event.
        hazard: how they conflict, for an unordered reuse: write after write, write after read or read after write.
    """

    kind: Kind
    second: Site
    first: Site | None = None
    resources: tuple[Hashable, ...] = ()
    hazard: str = ""

    def __str__(self) -> str:
        return f"{self.kind.value}: {_REMEDIES[self.kind](self)}"


def _unordered(what: str, violation: Violation) -> str:
    first, second = violation.first, violation.second
    assert first is not None
    return (
        f"nothing orders {second} behind {first}, {violation.hazard} of {what}; let stream {second.stream} wait for an "
        f"event recorded on stream {first.stream} behind the first, before the second is queued"
    )


def _unrecorded(violation: Violation) -> str:
    event = violation.resources[0]
    if violation.first is None:
        return f"nothing recorded event {event} before {violation.second}, so it orders nothing; record it first"
    return (
        f"{violation.second} is for event {event}, last recorded in a capture, by {violation.first}, where it never "
        f"passes; record it outside of the capture"
    )


def _named(values: Iterable[Hashable]) -> str:
    return ", ".join(map(repr, values))


_REMEDIES: dict[Kind, Callable[[Violation], str]] = {
    Kind.SLOT: lambda v: _unordered(f"slot {v.second.slot}, part {_named(v.resources)}", v),
    Kind.SEAT: lambda v: _unordered(f"the pages of seat {_named(v.resources)}", v),
    Kind.STAGING: lambda v: (
        f"the host does not know at {v.second} that {v.first} from staging entry {v.resources[0]} is over; "
        f"wait for an event recorded behind the copy"
    ),
    Kind.NOT_HELD: lambda v: (
        f"{v.second} by a lease that does not hold the slot"
        + (f" since {v.first}" if v.first else ", no acquire says so")
        + "; acquire the slot, and touch it between the acquire and the seal only"
    ),
    Kind.AFTER_END: lambda v: f"{v.second} is behind no fence, its lease ended at {v.first}; touch before the end",
    Kind.HELD: lambda v: f"{v.second} although nothing ended the lease after {v.first}; seal it before",
    Kind.QUARANTINED: lambda v: (
        f"{v.second} although work of the lease quarantined at {v.first} may still run there; never lease it again"
    ),
    Kind.UNRECORDED: _unrecorded,
    Kind.SEALED_TWICE: lambda v: f"{v.second} after {v.first}; seal a lease once",
    Kind.UNPROVEN: lambda v: (
        f"the host does not know at {v.second} that {v.first} is over; release a lease only when an event recorded "
        f"behind each of its touches has passed"
    ),
}


@dataclass(frozen=True)
class Report:
    """What was judged, and what was found wrong.

    Attributes:
        violations: by second record, then as found.
        records: records judged.
        leases: leases that they speak of.
        touches: touches, those of captures included.
        edges: waits that bound to a record, and events that the host saw pass.
        dropped: records before the first that was judged.
    """

    violations: tuple[Violation, ...]
    records: int
    leases: int
    touches: int
    edges: int
    dropped: int

    def __str__(self) -> str:
        return (
            f"violations={len(self.violations)} records={self.records} leases={self.leases} touches={self.touches} "
            f"edges={self.edges} dropped={self.dropped}"
        )


def check(records: Sequence[Record], dropped: int = 0) -> Report:
    """Judge a trace.

    Args:
        records: as of `Trace.records` or `trace.load`.
        dropped: records that came before them. If there are any, an event or a lease that nobody introduced is no
            violation.

    Raises:
        ValueError: a record has an unknown op.
    """
    return _Checker(records, dropped).run()


Clock = dict[int, int]  # by stream, how many of its pieces of work are behind


def _join(clock: Clock, other: Clock) -> None:
    for stream, epoch in other.items():
        if epoch > clock.get(stream, 0):
            clock[stream] = epoch


class _Access(NamedTuple):
    """Work that was queued."""

    epoch: int  # the how-manieth of its stream
    at: int  # index of its record
    lease: int
    writes: bool


class _Table:
    """By stream, the last access, and the last one of another lease than that one's."""

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.last: dict[int, _Access] = {}
        self.before: dict[int, _Access] = {}

    def note(self, stream: int, access: _Access) -> None:
        last = self.last.get(stream)
        if last is not None and last.lease != access.lease:
            self.before[stream] = last
        self.last[stream] = access

    def ahead(self, clock: Clock, but_of: int | None, found: dict[int, _Access]) -> None:
        """Add to `found`, by stream, the last access that `clock` is not behind, but for those of one lease."""
        for stream, last in self.last.items():
            access: _Access | None = last
            if last.lease == but_of:
                access = self.before.get(stream)
            if access is not None and access.epoch > clock.get(stream, 0):
                known = found.get(stream)
                if known is None or known.at < access.at:
                    found[stream] = access


class _Member:
    """A part of a slot, or a step of a seat."""

    __slots__ = ("touched", "wrote")

    def __init__(self) -> None:
        self.wrote = _Table()
        self.touched = _Table()


class _Shared:
    """What leases share: a slot by parts, or a seat's pages by steps; `*` apart, and all members together."""

    __slots__ = ("every", "members", "whole")

    def __init__(self) -> None:
        self.members: defaultdict[Hashable, _Member] = defaultdict(_Member)
        self.whole = _Member()
        self.every = _Member()

    def access(
        self, member: Hashable, stream: int, access: _Access, clock: Clock, but_of: int | None = None
    ) -> Iterable[_Access]:
        """Note an access; returns the conflicting ones that it is not behind, the last of each stream."""
        found: dict[int, _Access] = {}
        if member == WHOLE:
            mine = self.whole
            against = [self.every]
        else:
            mine = self.members[member]
            against = [mine, self.whole]
        for other in against:
            (other.touched if access.writes else other.wrote).ahead(clock, but_of, found)
        for each in (mine, self.every):
            each.touched.note(stream, access)
            if access.writes:
                each.wrote.note(stream, access)
        return found.values()


class _Domain:
    """Where work is ordered among itself: the device, or one capture."""

    def __init__(self, lease: int | None = None) -> None:
        self.lease = lease  # the one that captures
        self.open = True
        self.clocks: dict[int, Clock] = {}
        self.slots: defaultdict[int, _Shared] = defaultdict(_Shared)
        self.seats: defaultdict[int, _Shared] = defaultdict(_Shared)


class _Lease:
    """What is known of a lease."""

    def __init__(self) -> None:
        self.acquired: int | None = None  # index of the record
        self.slot: int | None = None
        self.execution: str | None = None
        self.domain: _Domain | None = None  # of its capture
        self.seats: set[int] = set()
        self.active: dict[int, int] = {}  # by slot, index of its last acquire or touch
        self.last: dict[int, _Access] = {}  # by stream, its last touch
        self.sealed: int | None = None
        self.ended: int | None = None


class _Slot:
    """Who has a slot."""

    def __init__(self) -> None:
        self.acquired: tuple[int, int] | None = None  # index and lease of the last acquire
        self.open: dict[int, int] = {}  # leases that are to end before the next acquire, by their last record
        self.quarantined: list[int] = []


class _Checker:
    """One pass over the records."""

    def __init__(self, records: Sequence[Record], dropped: int) -> None:
        self.records = records
        self.dropped = dropped
        self.violations: list[Violation] = []
        self.device = _Domain()
        self.inside: dict[int, _Domain] = {}  # by stream, the capture that it is in
        self.known: Clock = {}  # what the host knows to have passed
        self.told: dict[int, int] = {}  # by stream, how much of what the host has learnt is in its clock
        self.learnt = 0
        self.events: dict[int, tuple[int, _Domain, Clock]] = {}
        self.leases: defaultdict[int, _Lease] = defaultdict(_Lease)
        self.slots: defaultdict[int, _Slot] = defaultdict(_Slot)
        self.copies: defaultdict[int, dict[int, _Access]] = defaultdict(dict)
        self.void: int | None = None  # the last reset or close
        self.touches = self.edges = 0

    def run(self) -> Report:
        handlers: dict[str, Callable[..., None]] = {
            "acquire": self.acquire,
            "map": self.map,
            "touch": self.touch,
            "record": self.record,
            "wait": self.wait,
            "passed": self.passed,
            "seal": self.seal,
            "settle": self.settle,
            "quarantine": self.quarantine,
            "rewrite": self.rewrite,
            "copy": self.copy,
            "replay": self.replay,
            "reset": self.reset,
            "close": self.reset,
        }
        for index, (_, op, *fields) in enumerate(self.records):
            handler = handlers.get(op)
            if handler is None:
                raise ValueError(f"record {self.dropped + index} has the unknown op {op!r}; known are {[*handlers]}")
            handler(index, *fields)
        return Report(
            tuple(self.violations), len(self.records), len(self.leases), self.touches, self.edges, self.dropped
        )

    def acquire(self, index: int, number: int, slot: int, execution: str, kind: str) -> None:
        place = self.slots[slot]
        for other, active in place.open.items():
            if other != number:
                self._blame(Kind.HELD, index, active)
        for quarantined in place.quarantined:
            self._blame(Kind.QUARANTINED, index, quarantined)
        place.acquired = (index, number)
        place.open = {number: index}
        lease = self.leases[number] = _Lease()
        lease.acquired, lease.slot, lease.execution = index, slot, execution
        lease.active[slot] = index
        if kind == "capture":
            lease.domain = _Domain(number)

    def map(self, _index: int, number: int, seats: Iterable[int]) -> None:
        self.leases[number].seats.update(seats)

    def touch(
        self,
        index: int,
        number: int,
        slot: int,
        stream: int,
        reads: Iterable[Hashable],
        writes: Iterable[Hashable],
        step: Hashable,
    ) -> None:
        self.touches += 1
        lease = self.leases[number]
        self._may_touch(index, number, lease, slot)
        lease.active[slot] = self.slots[slot].open[number] = index
        domain = self.device
        if lease.domain is not None and lease.domain.open:
            domain = self.inside[stream] = lease.domain
        clock = self._clock(domain, stream)
        clock[stream] = epoch = clock.get(stream, 0) + 1
        written = frozenset(writes)
        wrote, read = _Access(epoch, index, number, True), _Access(epoch, index, number, False)
        if domain is self.device:
            lease.last[stream] = wrote
        parts = domain.slots[slot]
        found: defaultdict[tuple[int, str], list[Hashable]] = defaultdict(list)
        for part in dict.fromkeys(reads):
            if part not in written:
                for other in parts.access(part, stream, read, clock):
                    found[other.at, "read after write"].append(part)
        for part in dict.fromkeys(writes):
            for other in parts.access(part, stream, wrote, clock):
                found[other.at, "write after write" if other.writes else "write after read"].append(part)
        for (other_index, hazard), members in found.items():
            self._blame(Kind.SLOT, index, other_index, members, hazard)
        if step is not None and lease.seats:
            same: defaultdict[int, list[int]] = defaultdict(list)
            for seat in lease.seats:
                for other in domain.seats[seat].access(step, stream, wrote, clock, but_of=number):
                    same[other.at].append(seat)
            for other_index, seats in same.items():
                self._blame(Kind.SEAT, index, other_index, sorted(seats), "write after write")

    def record(self, index: int, event: int, stream: int) -> None:
        domain = self.inside.get(stream, self.device)
        self.events[event] = (index, domain, dict(self._clock(domain, stream)))

    def wait(self, index: int, event: int, stream: int) -> None:
        if (found := self._recorded(index, event)) is None:
            return
        domain, behind = found
        if domain is not self.device:
            self.inside[stream] = domain
        if domain is self.inside.get(stream, self.device):
            self.edges += 1
            _join(self._clock(domain, stream), behind)

    def passed(self, index: int, event: int) -> None:
        found = self._recorded(index, event)
        if found is None:
            return
        domain, behind = found
        if domain is not self.device:
            self._blame(Kind.UNRECORDED, index, self.events[event][0], (event,))
            return
        self.edges += 1
        self.learnt += 1
        _join(self.known, behind)

    def seal(self, index: int, number: int, _whole: bool) -> None:
        lease = self.leases[number]
        if lease.sealed is not None:
            self._blame(Kind.SEALED_TWICE, index, lease.sealed)
        lease.sealed = index
        self._end(index, number, lease)

    def settle(self, index: int, number: int, outcome: str) -> None:
        if outcome != RELEASED:
            return
        lease = self.leases[number]
        for stream, last in lease.last.items():
            if last.epoch > self.known.get(stream, 0):
                self._blame(Kind.UNPROVEN, index, last.at)
        self._end(index, number, lease)

    def quarantine(self, index: int, number: int, _why: str) -> None:
        lease = self.leases[number]
        self._end(index, number, lease)
        for slot, active in lease.active.items():
            place = self.slots[slot]
            # Leased since: then it is behind that lease, which waited for this one, or the parts will tell.
            if place.acquired is None or place.acquired[0] <= active:
                place.quarantined.append(index)

    def rewrite(self, index: int, entry: int) -> None:
        for stream, copy in self.copies[entry].items():
            if copy.epoch > self.known.get(stream, 0):
                self._blame(Kind.STAGING, index, copy.at, (entry,))

    def copy(self, index: int, entry: int, stream: int) -> None:
        if stream in self.inside:  # runs at replays, which say for themselves what they touch
            return
        clock = self._clock(self.device, stream)
        clock[stream] = epoch = clock.get(stream, 0) + 1
        self.copies[entry][stream] = _Access(epoch, index, -1, False)

    def replay(self, _index: int, number: int, _key: str, _stream: int) -> None:
        """Its touch has a record of its own."""
        self.leases[number]

    def reset(self, index: int) -> None:
        self.void = index

    def _may_touch(self, index: int, number: int, lease: _Lease, slot: int) -> None:
        """Blame the last record that says that the lease may not touch the slot."""
        reasons: list[tuple[int, Kind]] = []
        if lease.ended is not None:
            reasons.append((lease.ended, Kind.AFTER_END))
        if lease.acquired is not None and lease.slot != slot:
            reasons.append((lease.acquired, Kind.NOT_HELD))
        last = self.slots[slot].acquired
        if last is not None and last[1] != number:
            reasons.append((last[0], Kind.NOT_HELD))
        if self.void is not None and (lease.acquired is None or lease.acquired < self.void):
            reasons.append((self.void, Kind.NOT_HELD))
        if reasons:
            first, kind = max(reasons, key=lambda reason: reason[0])
            self._blame(kind, index, first)
        elif lease.acquired is None and not self.dropped:
            self._blame(Kind.NOT_HELD, index, None)

    def _recorded(self, index: int, event: int) -> tuple[_Domain, Clock] | None:
        """Where an event was last recorded, and behind what; None, and a violation, where that orders nothing."""
        known = self.events.get(event)
        if known is None:
            if not self.dropped:
                self._blame(Kind.UNRECORDED, index, None, (event,))
            return None
        recorded, domain, behind = known
        if not domain.open:
            self._blame(Kind.UNRECORDED, index, recorded, (event,))
            return None
        return domain, behind

    def _end(self, index: int, number: int, lease: _Lease) -> None:
        """Nothing may be touched by the lease any more; a capture is over."""
        lease.ended = index
        for slot in lease.active:
            self.slots[slot].open.pop(number, None)
        if lease.domain is not None and lease.domain.open:
            lease.domain.open = False
            self.inside = {stream: domain for stream, domain in self.inside.items() if domain is not lease.domain}

    def _clock(self, domain: _Domain, stream: int) -> Clock:
        """The clock of a stream, with all that the host has learnt: what is queued now is queued after that."""
        clock = domain.clocks.setdefault(stream, {})
        if domain is self.device and self.told.get(stream) != self.learnt:
            self.told[stream] = self.learnt
            _join(clock, self.known)
        return clock

    def _blame(
        self,
        kind: Kind,
        second: int,
        first: int | None,
        resources: Iterable[Hashable] = (),
        hazard: str = "",
    ) -> None:
        site = None if first is None else self._site(first)
        self.violations.append(Violation(kind, self._site(second), site, plain(tuple(resources)), hazard))

    def _site(self, index: int) -> Site:
        ns, op, *fields = self.records[index]
        said: dict[str, Any] = dict(zip(FIELDS[op], fields, strict=True))
        lease = said.get("lease")
        return Site(
            number=self.dropped + index,
            us=(ns - self.records[0][0]) / 1000,
            op=op,
            lease=lease,
            execution=None if lease is None else self.leases[lease].execution,
            slot=said.get("slot"),
            stream=said.get("stream"),
            step=plain(said.get("step")),
        )
