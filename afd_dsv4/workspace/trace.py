# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The trace: what the arena ordered, in the order in which the host asked for it.

Problem: a race leaves wrong numbers behind and no word about where it was; to find it takes the order of a few calls
that are long gone.
Way: one tuple per call in a bounded ring, cheap enough to be left on, and a file of JSON lines that is read back
strictly: its header says how many records follow, so a file that was cut off is none. The records and their fields
are those of `FIELDS`. Times and numbers of events, streams, leases, workspace slots, seats and staging entries are
whole, of 64 bits; parts and steps are strings, whole numbers, enums or tuples of those. In a file an enum is its value.
The ring loses its beginning, never its end.
Not here: any judgement (`order.py`), any picture (`chrome.py`).
"""

from __future__ import annotations

import enum
import json
import math
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from time import perf_counter_ns
from typing import Any, BinaryIO

from afd_dsv4.geometry import InputError

Record = tuple[Any, ...]
"""`(ns, op, *fields)`; ns of `time.perf_counter_ns`, as near as is known."""

FORMAT = "afd-dsv4 trace"
VERSION = 2  # 1 did not say how many records it has
KINDS = ("live", "dummy", "profile", "capture")
NESTING = 8  # of parts and steps; what the arena writes has 2


class TraceError(InputError):
    """A trace that cannot be read or written: where, what was found there, what to do about it."""


class Trace:
    """Two lists in turn, so that the newest records are kept: at least half of the capacity, and what came since.

    A list's own `append` is the cheapest call there is, and a clock the dearest part of a record; so most records are
    made by `note`, and only those that `add` makes carry a time. The list is changed in `add` only.

    Args:
        capacity: most records kept, but for what is noted without an `add` in between; None keeps all.

    Attributes:
        note: keeps `(op, *fields)`. For the many records of a lease, between its acquire and its seal.
    """

    def __init__(self, capacity: int | None = 65536) -> None:
        if capacity is not None and capacity < 2:
            raise ValueError(f"a trace keeps at least two records, got capacity {capacity}; None keeps all")
        self._half = sys.maxsize if capacity is None else capacity // 2
        self._old: list[Record] = []
        self._new: list[Record] = []
        self._dropped = 0
        self.note: Callable[[Record], None] = self._new.append

    def add(self, *record: Any) -> None:
        """Keep `op, *fields` with its time. The lock under which the order is made must be held, as for `note`."""
        if len(self._new) >= self._half:
            self._dropped += len(self._old)
            self._turn(self._new)
        self.note((perf_counter_ns(), record))  # as it came: to unpack it here costs as much as all the rest

    def records(self) -> list[Record]:
        """What is kept, oldest first, each with a time: those without one lie evenly between those with one.

        Executions are kept as they are, and spelled out only here.
        """
        found: list[Record] = []
        noted: list[Record] = []
        last: int | None = None
        for record in [*self._old, *self._new]:
            if isinstance(record[0], str):
                noted.append(record)
                continue
            now, (op, *fields) = record
            found += _between(now if last is None else last, now, noted)
            if op == "acquire":
                fields[2] = str(fields[2])
            found.append((now, op, *fields))
            noted, last = [], now
        return found + _between(last or 0, last or 0, noted)

    @property
    def dropped(self) -> int:
        """How many records came before those that are kept."""
        return self._dropped

    def clear(self) -> None:
        """Drop all that is kept."""
        self._dropped += len(self._old) + len(self._new)
        self._turn([])

    def _turn(self, old: list[Record]) -> None:
        self._old, self._new = old, []
        self.note = self._new.append

    def save(self, path: Path | str, about: Mapping[str, Any] | None = None) -> None:
        """Write what is kept; see `save`."""
        save(path, self.records(), self.dropped, about)


def _between(start: int, end: int, noted: Sequence[Record]) -> list[Record]:
    return [(start + (end - start) * k // (len(noted) + 1), *record) for k, record in enumerate(noted, start=1)]


@dataclass(frozen=True)
class Header:
    """First line of a file.

    Attributes:
        records: how many the file has.
        dropped: records that came before those of the file.
        about: whatever the writer wanted to say: versions, device, seed.
    """

    records: int
    dropped: int
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Recorded:
    """A file that was read."""

    header: Header
    records: tuple[Record, ...]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _long(value: object) -> bool:
    return _whole(value) and -(1 << 63) <= value < 1 << 63  # type: ignore[operator]


def _hashable(value: object, depth: int = 0) -> bool:
    if isinstance(value, tuple):
        return depth < NESTING and all(_hashable(item, depth + 1) for item in value)
    return isinstance(value, str) or _whole(value)


_Shape = tuple[str, Callable[[Any], bool]]  # what a field must be, in words and as a test
_INT: _Shape = ("a whole number of 64 bits", _long)
_TEXT: _Shape = ("a string", lambda value: isinstance(value, str))
_FLAG: _Shape = ("true or false", lambda value: isinstance(value, bool))
_KIND: _Shape = (f"one of {', '.join(KINDS)}", lambda value: value in KINDS)
_STEP: _Shape = ("null, a string, a whole number or a list of those", lambda value: value is None or _hashable(value))
_PARTS: _Shape = (
    "a list of strings, whole numbers and lists of those",
    lambda value: isinstance(value, tuple) and _hashable(value),
)
_SEATS: _Shape = (
    "a list of whole numbers of 64 bits",
    lambda value: isinstance(value, tuple) and all(map(_long, value)),
)

FIELDS: dict[str, dict[str, _Shape]] = {
    "acquire": {"lease": _INT, "slot": _INT, "execution": _TEXT, "kind": _KIND},
    "map": {"lease": _INT, "seats": _SEATS},
    "touch": {"lease": _INT, "slot": _INT, "stream": _INT, "reads": _PARTS, "writes": _PARTS, "step": _STEP},
    "record": {"event": _INT, "stream": _INT},
    "wait": {"event": _INT, "stream": _INT},
    "passed": {"event": _INT},
    "seal": {"lease": _INT, "whole": _FLAG},
    "settle": {"lease": _INT, "outcome": _TEXT},
    "quarantine": {"lease": _INT, "why": _TEXT},
    "rewrite": {"entry": _INT},
    "copy": {"entry": _INT, "stream": _INT},
    "replay": {"lease": _INT, "key": _TEXT, "stream": _INT},
    "reset": {},
    "close": {},
}
"""The fields behind `ns` and `op`, in order.

acquire, seal, settle, quarantine: steps of a lease. map: seats whose pages the steps of the lease touch. touch: work of
a lease is queued on a stream; the part `*` is the whole slot, the step `*` all steps. record, wait: of an event, on a
stream. passed: the host learnt that the event's last record has passed. copy: from a staging entry, queued on a stream.
rewrite: of a staging entry, by the host. replay: of a captured graph; its touch has a record of its own. reset, close:
of the arena.
"""


def save(path: Path | str, records: Sequence[Record], dropped: int = 0, about: Mapping[str, Any] | None = None) -> None:
    """Write a file of JSON lines: a header, then one record a line. Nothing is written if one cannot be read back.

    Args:
        path: where to; replaced if it exists.
        records: as of `Trace.records`.
        dropped: records that came before them.
        about: anything JSON can hold.

    Raises:
        TraceError: a record, or `about`, has no place in such a file.
        OSError: the file cannot be written.
    """
    names = {"format": FORMAT, "version": VERSION, "records": len(records), "dropped": dropped}
    try:
        header = json.dumps({**names, "about": dict(about or {})}, allow_nan=False)
    except (TypeError, ValueError) as error:
        remedy = "use strings, finite numbers, lists and dicts only"
        raise TraceError("about", f"is not JSON ({error})", remedy) from None
    rows = [plain(record) for record in records]
    for number, record in enumerate(rows):
        _check(record, f"record {number}", "record what FIELDS names")
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        file.write(header + "\n")
        file.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in rows)


def load(path: Path | str) -> Recorded:
    """Read a file that `save` wrote.

    Raises:
        TraceError: a line is not what it must be; says which, what was found and what to do.
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        lines = _lines(file)
        first = next(lines, None)
        if first is None:
            raise TraceError("line 1", "the file is empty", "give a file that Trace.save wrote")
        header = _header(*first)
        records = tuple(_record(where, line) for where, line in lines)
        if len(records) != header.records:
            raise TraceError("line 1", f"says {header.records} records, and {len(records)} follow", _EDITED)
        return Recorded(header, records)


_EDITED = "the file was cut off or edited; save the trace again"


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise OverflowError(text)
    return value


def _lines(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, start=1):
        where = f"line {number}"
        try:
            yield where, json.loads(line.decode("utf-8"), parse_float=_finite, parse_constant=_finite)
        except UnicodeDecodeError as error:
            raise TraceError(where, f"is not UTF-8 ({error.reason} at byte {error.start})", _EDITED) from None
        except json.JSONDecodeError as error:
            raise TraceError(where, f"is not JSON ({error})", _EDITED) from None
        except OverflowError as error:
            raise TraceError(where, f"holds {_short(str(error))}, which is no finite number", _EDITED) from None
        except (RecursionError, ValueError):  # ValueError: Python's own limit for numbers
            found = "is nested too deep, or holds a number with thousands of digits"
            raise TraceError(where, found, _EDITED) from None


def _header(where: str, found: Any) -> Header:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise TraceError(where, f"is {_short(found)}, not the header of a trace", "give a file that Trace.save wrote")
    version = found.get("version")
    if not _whole(version) or version != VERSION:
        remedy = (
            f"this release reads version {VERSION}; save the trace again, or read it with the release that wrote it"
        )
        raise TraceError(where, f"is a trace of version {_short(version)}", remedy)
    if set(found) != {"format", "version", "records", "dropped", "about"}:
        names, remedy = ", ".join(map(_short, found)), "it has format, version, records, dropped and about, and no more"
        raise TraceError(where, f"the header has {names}", remedy)
    for name in ("records", "dropped"):
        if not _long(found[name]) or found[name] < 0:
            raise TraceError(where, f"{name} is {_short(found[name])}", "it must be a whole number from 0, of 64 bits")
    about = found["about"]
    if not isinstance(about, dict):
        raise TraceError(where, f"about is {_short(about)}", "it must be an object")
    return Header(found["records"], found["dropped"], about)


def _record(where: str, found: Any) -> Record:
    remedy = "a record is [ns, op, fields...]; save the trace again"
    if not isinstance(found, list):
        raise TraceError(where, f"is {_short(found)}, not a list", remedy)
    record: Record = plain(found)
    _check(record, where, remedy)
    return record


def _check(record: Record, where: str, remedy: str) -> None:
    if len(record) < 2 or not _long(record[0]):
        raise TraceError(where, f"does not begin with a time of 64 bits and an op ({_short(record)})", remedy)
    shapes = FIELDS.get(record[1]) if isinstance(record[1], str) else None
    if shapes is None:
        raise TraceError(where, f"has the unknown op {_short(record[1])}", f"known are {', '.join(FIELDS)}")
    fields = record[2:]
    if len(fields) != len(shapes):
        names = ", ".join(shapes) or "none"
        raise TraceError(where, f"{record[1]} has {len(fields)} fields", f"it takes {len(shapes)}: {names}")
    for (name, (words, fits)), value in zip(shapes.items(), fields, strict=True):
        if not fits(value):
            raise TraceError(where, f"{name} of {record[1]} is {_short(value)}", f"it must be {words}")


def plain(value: Any, depth: int = -2) -> Any:
    """Sequences as tuples, enums as their values, whole numbers as int; anything else is for `_check` to refuse."""
    if isinstance(value, list | tuple):
        return value if depth > NESTING else tuple(plain(item, depth + 1) for item in value)
    if isinstance(value, enum.Enum):
        return plain(value.value, depth)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return value


def _short(value: object) -> str:
    return reprlib.repr(value)
