# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A device in plain Python: streams are queues that a test advances in any legal order.

Use it to try a protocol without hardware, torch or threads: work is queued as callables, and `run` picks among the
streams that are not blocked, by a seeded generator or a given order. A stream blocks only on an event; when nothing can
move, the order the host asked for is cyclic and `Deadlock` says so. Time does not exist here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from afd_dsv4.device.api import StreamId

Task = Callable[[], None]


class Deadlock(RuntimeError):
    """Streams hold work and none can move."""


class ModelStream:
    """A queue of tasks, each with the condition that lets it start."""

    def __init__(self, index: int) -> None:
        self.index = StreamId(index)
        self.queue: deque[tuple[Callable[[], bool], Task]] = deque()

    def __repr__(self) -> str:
        return f"ModelStream({self.index})"


class ModelEvent:
    """An event with generations: a wait binds to the record that was last when the wait was queued."""

    def __init__(self, device: ModelDevice) -> None:
        self._device = device
        self._recorded = 0
        self._passed = 0

    def record(self, stream: ModelStream) -> None:
        """See `api.Event`."""
        self._recorded += 1
        generation = self._recorded

        def mark() -> None:
            self._passed = max(self._passed, generation)

        stream.queue.append((lambda: True, mark))

    def wait(self, stream: ModelStream) -> None:
        """See `api.Event`."""
        generation = self._recorded
        stream.queue.append((lambda: self._passed >= generation, lambda: None))

    def query(self) -> bool:
        """See `api.Event`."""
        return self._passed >= self._recorded

    def synchronize(self) -> None:
        """Let streams move until the last record has passed."""
        while not self.query():
            self._device.step()


class ModelDevice:
    """Makes streams and events, and decides which stream moves next."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._streams: list[ModelStream] = []
        self.events = 0

    def stream(self) -> ModelStream:
        """A new stream."""
        self._streams.append(ModelStream(len(self._streams)))
        return self._streams[-1]

    def stream_id(self, stream: ModelStream) -> StreamId:
        """See `api.Device`."""
        return stream.index

    def event(self) -> ModelEvent:
        """See `api.Device`."""
        self.events += 1
        return ModelEvent(self)

    def launch(self, stream: ModelStream, task: Task) -> None:
        """Queue `task` on `stream`."""
        stream.queue.append((lambda: True, task))

    def step(self) -> bool:
        """Run one task of one stream that can move. False when all queues are empty.

        Raises:
            Deadlock: work is queued and every stream is blocked.
        """
        waiting = [stream for stream in self._streams if stream.queue]
        if not waiting:
            return False
        ready = [stream for stream in waiting if stream.queue[0][0]()]
        if not ready:
            raise Deadlock(f"{len(waiting)} streams hold work and each waits for an event of another")
        self._random.choice(ready).queue.popleft()[1]()
        return True

    def run(self) -> None:
        """Run until every queue is empty."""
        while self.step():
            pass
