# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A fence: the set of events, one per stream, behind which a workspace slot is free.

One event is not enough, since an execution may touch its slot from several streams, and none of them needs to be last.
A fence without an event is an error and not "passed": an event that was never recorded would query true.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

from afd_dsv4.device.api import Device, Event, StreamId

S = TypeVar("S")


class EventPool(Generic[S]):
    """Events that are recorded again once their last record has passed, which keeps their number small.

    A wait must bind to the record that was last when it was queued, as aclrtCreateEventExWithFlag events and CUDA's do.
    """

    def __init__(self, device: Device[S]) -> None:
        self._device = device
        self._used: deque[Event[S]] = deque()
        self.created = 0

    def record(self, stream: S) -> Event[S]:
        """An event recorded on `stream` now."""
        if self._used and self._used[0].query():
            event = self._used.popleft()
        else:
            event = self._device.event()
            self.created += 1
        event.record(stream)
        return event

    def give_back(self, event: Event[S]) -> None:
        """The caller will neither query nor wait on this event again; waits already queued are safe."""
        self._used.append(event)


class Fence(Generic[S]):
    """Events by stream. Once they have all passed they go back to the pool, and the fence stays passed."""

    def __init__(self, events: Mapping[StreamId, Event[S]], pool: EventPool[S]) -> None:
        if not events:
            raise ValueError("a fence needs an event: an execution that touched nothing has no fence of its own")
        self._events = dict(events)
        self._pool = pool

    def passed(self) -> bool:
        """Whether every event has passed. Never waits."""
        for stream_id in [owner for owner, event in self._events.items() if event.query()]:
            self._pool.give_back(self._events.pop(stream_id))
        return not self._events

    def wait(self, stream: S, stream_id: StreamId) -> int:
        """Make `stream` wait for the fence; events of the stream itself are ordered already. Returns waits queued."""
        others = [event for owner, event in self._events.items() if owner != stream_id]
        for event in others:
            event.wait(stream)
        return len(others)
