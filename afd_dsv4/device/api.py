# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the core asks of a device: streams it can tell apart, and events that order them.

The core orders work and never does any: it needs no memory, no kernels and no torch. Implementations: `model.py` (a
device in plain Python whose streams a test advances), `torch_device.py` (torch.npu and torch.cuda).
"""

from __future__ import annotations

from typing import NewType, Protocol, TypeVar

StreamId = NewType("StreamId", int)

S_contra = TypeVar("S_contra", contravariant=True)


class Event(Protocol[S_contra]):
    """A point in a stream. Meaning follows torch.npu.Event."""

    def record(self, stream: S_contra) -> None:
        """Mark the point that `stream` has been given so far; an earlier mark of this event is forgotten."""

    def wait(self, stream: S_contra) -> None:
        """Make what `stream` is given from now on wait for the record that is the last one now, and not the host.

        A later record changes nothing for a wait that is queued, as with torch.npu.Event and torch.cuda.Event.
        """

    def query(self) -> bool:
        """Whether the last record has passed. True, too, for an event never recorded: callers must not rely on it.

        Illegal while a graph is being captured: it may raise, or answer without meaning (pytorch#158352).
        """

    def synchronize(self) -> None:
        """Make the host wait for the last record."""


class Device(Protocol[S_contra]):
    """Names streams and makes events."""

    def stream_id(self, stream: S_contra) -> StreamId:
        """An identity that is equal for two handles of one stream."""

    def event(self) -> Event[S_contra]:
        """A new event, without timing."""

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""

    def refused_by_capture(self, error: Exception) -> bool:
        """Whether an event call failed only because some thread is capturing a graph: later it will tell."""
