# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A trace as a picture, for Perfetto and chrome://tracing.

Problem: in a list of records nobody sees what ran beside what, and behind which event.
Way: one pass that writes the JSON object of the Trace Event Format. A workspace slot is a track, a lease a slice on it,
from its acquire until it is sealed or, where the slot stays its own for so long, settled. Touches are thin slices
inside. An arrow leads from the last touch that an event was recorded behind to the first touch that was queued behind a
wait for it. Quarantine, reset and close are instants.
Not here: when the work itself ran; the trace knows when the host queued it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afd_dsv4.workspace.trace import Record, plain


def chrome(records: Sequence[Record]) -> dict[str, Any]:
    """The object to write as JSON. Times are microseconds since the first record."""
    return {"traceEvents": _View(records).events, "displayTimeUnit": "ns"}


_PID = 1
_THIN_US = 1.0  # a touch has no length of its own: that of its work is not known here


class _View:
    """The events, built in one pass."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.events: list[dict[str, Any]] = [self._meta("process_name", 0, name="afd-dsv4 workspace")]
        self._slots: set[int] = set()
        self._open: dict[int, dict[str, Any]] = {}  # by slot, the slice of the lease that has it
        self._leases: dict[int, dict[str, Any]] = {}
        self._touched: dict[int, dict[str, Any]] = {}  # by stream, its last touch
        self._recorded: dict[int, dict[str, Any]] = {}  # by event, the touch it was last recorded behind
        self._waiting: dict[int, list[tuple[int, dict[str, Any]]]] = {}  # by stream, arrows that its next touch gets
        self._arrows = 0
        times = [(record[0] - records[0][0]) / 1000 for record in records]
        for index, (_, op, *fields) in enumerate(map(plain, records)):
            after = times[index + 1] if index + 1 < len(times) else times[index] + _THIN_US
            self._add(op, fields, times[index], after)
        for lease in self._open.values():
            self._extend(lease, times[-1] + _THIN_US)

    def _add(self, op: str, fields: list[Any], now: float, after: float) -> None:
        if op == "acquire":
            lease, slot, execution, kind = fields
            self._begin(lease, slot, now, {"execution": execution, "kind": kind})
        elif op == "touch":
            self._touch(fields, now, min(max(after - now, 0.0), _THIN_US))
        elif op in ("seal", "settle", "quarantine"):
            lease, detail = fields
            self._end(op, lease, detail, now)
        elif op == "record":
            event, stream = fields
            self._recorded.pop(event, None)
            if stream in self._touched:
                self._recorded[event] = self._touched[stream]
        elif op == "wait":
            event, stream = fields
            if event in self._recorded:
                self._waiting.setdefault(stream, []).append((event, self._recorded[event]))
        elif op in ("reset", "close"):
            self.events.append(self._event(op, "arena", "i", now, 0, s="p"))

    def _begin(self, lease: int, slot: int, now: float, args: dict[str, Any]) -> dict[str, Any]:
        if slot in self._open:
            self._extend(self._open[slot], now)
        args = {"lease": lease, **args, "outcome": "open"}
        event = self._event(f"lease {lease}", "lease", "X", now, self._track(slot), dur=0.0, args=args)
        self._open[slot] = self._leases[lease] = event
        self.events.append(event)
        return event

    def _track(self, slot: int) -> int:
        """The slot's thread; named when first used. Thread 0 belongs to the arena."""
        if slot not in self._slots:
            self._slots.add(slot)
            self.events.append(self._meta("thread_name", slot + 1, name=f"slot {slot}"))
            self.events.append(self._meta("thread_sort_index", slot + 1, sort_index=slot))
        return slot + 1

    def _extend(self, lease: dict[str, Any], now: float) -> None:
        """The slice of a lease lasts until now, unless it has ended."""
        if lease["args"]["outcome"] == "open":
            lease["dur"] = now - lease["ts"]

    def _touch(self, fields: list[Any], now: float, room: float) -> None:
        lease, slot, stream, reads, writes, step = fields
        if lease not in self._leases:
            unknown = "not in this trace"
            self._begin(lease, slot, now, {"execution": unknown, "kind": unknown})
        name = f"stream {stream}" if step is None else f"stream {stream}: {_words(step)}"
        args = {"lease": lease, "stream": stream, "reads": [*map(_words, reads)], "writes": [*map(_words, writes)]}
        event = self._event(name, "touch", "X", now, self._track(slot), dur=room, args=args)
        self.events.append(event)
        self._touched[stream] = event
        for source, behind in self._waiting.pop(stream, ()):
            self._arrows += 1
            arrow = {"name": f"event {source}", "cat": "order", "pid": _PID, "id": self._arrows}
            self.events.append({**arrow, "ph": "s", "ts": behind["ts"], "tid": behind["tid"]})
            self.events.append({**arrow, "ph": "f", "ts": now, "tid": slot + 1, "bp": "e"})

    def _end(self, op: str, lease: int, detail: Any, now: float) -> None:
        event = self._leases.get(lease)
        if event is None:  # all that is known of it came before this trace
            return
        if self._open.get(event["tid"] - 1) is event:
            event["dur"] = now - event["ts"]
        args = event["args"]
        if op == "seal":
            args.update(outcome="sealed", whole=detail)
        elif op == "settle" and args["outcome"] != "released":  # asking once more says "already released"
            args["outcome"] = detail
        elif op == "quarantine":
            args.update(outcome="quarantined", why=detail)
            name = f"quarantine of lease {lease}"
            self.events.append(self._event(name, "lease", "i", now, event["tid"], s="t", args={"why": detail}))

    @staticmethod
    def _event(name: str, category: str, phase: str, now: float, tid: int, **more: Any) -> dict[str, Any]:
        return {"name": name, "cat": category, "ph": phase, "ts": now, "pid": _PID, "tid": tid, **more}

    @staticmethod
    def _meta(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": _PID, "tid": tid, "args": args}


def _words(value: Any) -> str:
    """A part or step as one word: `pages/c4`."""
    return "/".join(map(_words, value)) if isinstance(value, tuple) else str(value)
