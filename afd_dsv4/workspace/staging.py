# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The staging ring: pinned host memory that the device may still be copying from.

Rewriting a buffer while its last copy is queued would send the next batch's lists to this batch. Each entry therefore
carries an event recorded behind its copy, and is rewritten only after that event. With one entry more than there are
batches in flight the event has always passed; where it has not, the host waits, which is counted: the one host wait
that this project permits. An entry whose event does not come in time, or cannot be queried, is never used again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from afd_dsv4.workspace.fence import EventError, EventSource, OrderedEvent

POLL_S = 0.0001

S = TypeVar("S")
B = TypeVar("B")


class StagingLost(RuntimeError):
    """No entry is left whose copies are known to be over."""


class StagingRing(Generic[S, B]):
    """Buffers used in turn.

    Args:
        events: makes the events, one per buffer.
        buffers: the pinned buffers, one more than batches in flight.
        timeout_s: how long the host waits for one of them; None for as long as it takes.

    Attributes:
        host_waits: how often the host had to wait for a copy.
        copies: entries returned, each with copies of its own.
        out: entries in use, and those that will never be used again, since nobody can tell when their copies are over.
    """

    def __init__(self, events: EventSource[S], buffers: Sequence[B], *, timeout_s: float | None = None) -> None:
        if not buffers:
            raise ValueError("a staging ring needs at least one buffer")
        self._source = events
        self.entries = tuple(buffers)
        self._copied: list[OrderedEvent[S] | None] = [None] * len(buffers)
        self._timeout_s = timeout_s
        self._next = 0
        self.host_waits = 0
        self.copies = 0
        self.out: set[int] = set()

    def take(self) -> tuple[int, B]:
        """The next entry and its number; waits on the host if its last copy is still queued. Return it with `copied`.

        Raises:
            StagingLost: of no entry is it known that its copies are over.
            EventError: a graph is being captured.
        """
        if self._source.mute():
            raise EventError("a staging entry is taken while a graph is captured, which may not ask whether it is free")
        why: Exception | None = None
        for index in [i % len(self.entries) for i in range(self._next, self._next + len(self.entries))]:
            if index in self.out:
                continue
            self.out.add(index)
            try:
                self._wait(self._copied[index])
            except EventError:  # of a capture that has begun meanwhile
                self.out.discard(index)
                raise
            except Exception as error:
                if self._source.device.refused_by_capture(error):
                    self.out.discard(index)
                    raise EventError("a staging entry is taken while another thread captures a graph") from error
                why = error
                continue
            except BaseException:  # the host was interrupted; the copy goes on, and will pass
                self.out.discard(index)
                raise
            self._next = (index + 1) % len(self.entries)
            if self._source.trace is not None:
                self._source.trace.note(("rewrite", index))
            return index, self.entries[index]
        raise StagingLost(
            f"all {len(self.entries)} staging entries were taken and not returned, or their copies failed, or may "
            f"still be queued. The worker cannot go on; restart it"
        ) from why

    def _wait(self, event: OrderedEvent[S] | None) -> None:
        """Wait on the host for the copies of an entry."""
        if event is None or event.passed():
            return
        self.host_waits += 1
        if self._timeout_s is None:
            event.synchronize()
            return
        deadline = time.monotonic() + self._timeout_s
        while not event.passed():  # nobody can interrupt `synchronize`
            if time.monotonic() > deadline:
                raise TimeoutError(f"event {event.number} behind a copy has not passed within {self._timeout_s} s")
            time.sleep(POLL_S)

    def copied(self, index: int, stream: S) -> None:
        """Return an entry: its copies, all, some or none, are queued on `stream`, which alone has any."""
        event = self._copied[index] or self._source.new()
        stream_id = self._source.device.stream_id(stream)
        if self._source.trace is not None:
            self._source.trace.note(("copy", index, stream_id))
        event.record(stream, stream_id)
        self._copied[index] = event
        self.copies += 1
        self.out.discard(index)
