# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The model device with its answers chosen from outside, and a log of all that it was given.

Problem: what the host does next depends on how far the device has come, and that may be anything.
Way: each query is a choice. "Passed" may be chosen whenever the device could have come so far, and then it has: it
runs what the event lies behind and nothing else, which loses nothing, since all else may run at any later time.
"Pending" may be chosen until the event must have passed. Nothing else moves the device.
Not here: what the queued work does to memory in all its other orders (`judge.py`, from the log).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from afd_dsv4.device.model import Deadlock, ModelDevice, ModelEvent, ModelStream, Point, Task

Choose = Callable[[int], int]
"""Picks one of n alternatives."""
Resource = tuple[object, ...]
Stamp = tuple[object, ...]


@dataclass(frozen=True)
class Work:
    """One launch, copy or host write, by what it reads (and must find) and writes."""

    name: str
    reads: tuple[tuple[Resource, Stamp], ...] = ()
    writes: tuple[tuple[Resource, Stamp], ...] = ()

    def __call__(self) -> None:
        """Running it changes nothing here: its effect is judged in all orders at once."""


@dataclass(frozen=True)
class Template:
    """Captured work: each replay makes it the replaying execution's."""

    bind: Callable[[Any], Work]

    def __call__(self) -> None:
        raise AssertionError("captured work runs at replays only")


class Queued(NamedTuple):
    """An entry of the log that a stream was given."""

    stream: ModelStream
    run: Task
    behind: Point | None


class Learnt(NamedTuple):
    """An entry of the log: the host knows that this point has passed."""

    point: Point


class HostDid(NamedTuple):
    """An entry of the log: the host itself touched memory that the device uses."""

    work: Work


Log = list[Queued | Learnt | HostDid]


class OracleStream(ModelStream):
    def __init__(self, index: int, device: OracleDevice) -> None:
        super().__init__(index)
        self._device = device

    def put(self, run: Task, behind: Point | None = None) -> Point:
        if isinstance(run, Template):
            run = run.bind(self._device.bound)
        self._device.log.append(Queued(self, run, behind))
        return super().put(run, behind)


class OracleEvent(ModelEvent):
    def __init__(self, device: OracleDevice) -> None:
        super().__init__(device)
        self._oracle = device

    def record(self, stream: ModelStream) -> None:
        self._oracle.fail("record")
        super().record(stream)

    def wait(self, stream: ModelStream) -> None:
        self._oracle.fail("wait")
        super().wait(stream)

    def query(self) -> bool:
        device, last = self._oracle, self.last
        device.fail("query")
        if super().query():
            passed = True
        elif last is None or not device.could_pass(last):
            passed = False
        else:
            passed = device.drained or bool(device.choose(2))
        if passed and last is not None:
            device.catch_up(last)
            device.log.append(Learnt(last))
        return passed

    def synchronize(self) -> None:
        self._allowed("waited for by the host")
        if self.last is not None:
            if not self._oracle.catch_up(self.last):
                raise Deadlock("the host waits for a stream that is hung")
            self._oracle.log.append(Learnt(self.last))


class OracleDevice(ModelDevice):
    """See the module.

    Args:
        choose: answers what is open.

    Attributes:
        log: all that streams were given and the host learnt, in host order.
        drained: the exploration is over; every query is answered by running what it asks for.
        bound: the execution that replays a graph.
        fail: called with "record", "wait" or "query" before an event does so; may raise, as a broken device does.
    """

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.choose = choose
        self.log: Log = []
        self.drained = False
        self.bound: object = None
        self.fail: Callable[[str], None] = lambda _what: None

    def stream(self) -> OracleStream:
        stream = OracleStream(len(self.streams), self)
        self.streams.append(stream)
        return stream

    def event(self) -> OracleEvent:
        self.events += 1
        return OracleEvent(self)

    def host(self, work: Work) -> None:
        """The host itself touches memory that the device uses."""
        self.log.append(HostDid(work))
