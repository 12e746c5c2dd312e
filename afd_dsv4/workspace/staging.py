# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The staging ring: pinned host memory that the device may still be copying from.

Rewriting a buffer while its last copy is queued would send the next batch's lists to this batch. Each entry therefore
carries an event recorded behind its copy, and is rewritten only after that event. With one entry more than there are
batches in flight the event has always passed; where it has not, the host waits, which is counted: the one host wait
that this project permits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from afd_dsv4.device.api import Device, Event

S = TypeVar("S")
B = TypeVar("B")


class StagingRing(Generic[S, B]):
    """Buffers used in turn.

    Args:
        device: makes the events.
        buffers: the pinned buffers, one more than batches in flight.
    """

    def __init__(self, device: Device[S], buffers: Sequence[B]) -> None:
        if not buffers:
            raise ValueError("a staging ring needs at least one buffer")
        self._device = device
        self.entries = tuple(buffers)
        self._copied: list[Event[S] | None] = [None] * len(buffers)
        self._next = 0
        self.host_waits = 0

    def take(self) -> tuple[int, B]:
        """The next entry and its number; waits on the host if its last copy is still queued."""
        index = self._next
        self._next = (index + 1) % len(self.entries)
        event = self._copied[index]
        if event is not None and not event.query():
            self.host_waits += 1
            event.synchronize()
        return index, self.entries[index]

    def copied(self, index: int, stream: S) -> None:
        """All copies from this entry are queued on `stream`."""
        event = self._copied[index]
        if event is None:
            event = self._copied[index] = self._device.event()
        event.record(stream)
