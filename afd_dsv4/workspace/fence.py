# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Events that cannot lie, and the fence: the set of events behind which a workspace slot is free.

One event is not enough for a slot, since an execution may touch it from several streams, and none of them needs to be
last. A device answers "passed" for an event that nobody recorded, and without meaning while a graph is captured; both
would look like a free slot, so an `OrderedEvent` raises instead.

Each slot owns three events per stream, made at first use and recorded again ever after: one for touches within a lease,
only waited for; one for the fence; and a second for fences, used while the first belongs to a lease that is pending. So
leases make at most slots x streams x 3 events, however many there are; captures keep their own. This rests on what
`device.api.Event.wait` promises: a wait is for the record that was last when it was queued. CANN documents it for
aclrtRecordEvent on events of aclrtCreateEventExWithFlag, which are those that torch_npu makes. A fence whose event has
meanwhile been recorded by a later lease of the slot lies later than it must, never earlier.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from afd_dsv4.device.api import Device, Event, StreamId
from afd_dsv4.workspace.trace import Trace

S = TypeVar("S")


class EventError(RuntimeError):
    """An event was asked what it cannot know."""


class EventSource(Generic[S]):
    """Makes events and numbers them for the trace.

    Attributes:
        created: events made so far.
        captures: graphs being captured now; while there are any, no event may be queried.
    """

    def __init__(self, device: Device[S], trace: Trace | None = None) -> None:
        self.device = device
        self.trace = trace
        self.created = 0
        self.captures = 0

    def mute(self) -> bool:
        """Whether no event may be queried now: a graph is being captured, by the arena or by the calling thread."""
        return bool(self.captures) or self.device.capturing()

    def new(self) -> OrderedEvent[S]:
        """A new event."""
        self.created += 1
        return OrderedEvent(self, self.device.event(), self.created)


class OrderedEvent(Generic[S]):
    """An event that says in the trace what was done with it. Made by `EventSource.new` only."""

    __slots__ = ("_event", "_recorded", "_source", "number")

    def __init__(self, source: EventSource[S], event: Event[S], number: int) -> None:
        self.number = number
        self._source = source
        self._event = event
        self._recorded = False

    def record(self, stream: S, stream_id: StreamId) -> None:
        """Mark what `stream` has been given so far."""
        self._event.record(stream)
        self._recorded = True
        if self._source.trace is not None:
            self._source.trace.note(("record", self.number, stream_id))

    def wait(self, stream: S, stream_id: StreamId) -> None:
        """Make what `stream` is given from now on wait for the last record.

        Raises:
            EventError: there is no record.
        """
        if not self._recorded:
            raise EventError(f"stream {stream_id} would wait for event {self.number}, which was never recorded")
        self._event.wait(stream)
        if self._source.trace is not None:
            self._source.trace.note(("wait", self.number, stream_id))

    def passed(self) -> bool:
        """Whether the last record has passed.

        Raises:
            EventError: there is no record, or a graph is being captured.
        """
        self._check()
        passed = self._event.query()
        if passed and self._source.trace is not None:
            self._source.trace.note(("passed", self.number))
        return passed

    def synchronize(self) -> None:
        """Make the host wait for the last record.

        Raises:
            EventError: there is no record, or a graph is being captured.
        """
        self._check()
        self._event.synchronize()
        if self._source.trace is not None:
            self._source.trace.note(("passed", self.number))

    def _check(self) -> None:
        if not self._recorded:
            raise EventError(f"event {self.number} was never recorded; the device would call it passed")
        if self._source.captures:
            raise EventError(f"event {self.number} is queried while a graph is captured; ask again after the capture")


class Fence(Generic[S]):
    """Recorded events by stream, which the fence takes over. Once seen to pass, it stays passed."""

    __slots__ = ("_events",)

    def __init__(self, events: dict[StreamId, OrderedEvent[S]]) -> None:
        if not events:
            raise ValueError("a fence needs an event: an execution that touched nothing has no fence of its own")
        self._events = events

    def passed(self) -> bool:
        """Whether every event has passed. Never waits."""
        for stream_id in tuple(self._events):
            if self._events[stream_id].passed():
                del self._events[stream_id]
        return not self._events

    def wait(self, stream: S, stream_id: StreamId) -> int:
        """Make `stream` wait for the fence; events of the stream itself are ordered already. Returns waits queued."""
        others = [event for owner, event in self._events.items() if owner != stream_id]
        for event in others:
            event.wait(stream, stream_id)
        return len(others)
