# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A device in plain Python: streams are queues that a test advances in any legal order.

Use it to try a protocol without hardware, torch or threads: work is queued as callables, and `run` picks among the
streams that are not blocked, by a seeded generator. A stream blocks on an event, or because a test hung it; when
nothing else can move, `Deadlock` says so. Time does not exist here. As on a real device, a query inside a capture is
illegal, here always an error; and captured events are good for nothing outside their graph.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from afd_dsv4.device.api import StreamId

Task = Callable[[], None]


class Deadlock(RuntimeError):
    """Streams hold work and none can move."""


class CaptureViolation(RuntimeError):
    """Something that a graph capture forbids."""


class Point(NamedTuple):
    """The first `given` entries of a stream."""

    stream: ModelStream
    given: int

    def passed(self) -> bool:
        """Whether they have all run."""
        return self.stream.done >= self.given


class Entry(NamedTuple):
    """One entry of a queue.

    Attributes:
        ready: whether it may start.
        run: what it does.
        behind: what a wait waits for; None for anything else.
    """

    ready: Callable[[], bool]
    run: Task
    behind: Point | None = None


class ModelStream:
    """A queue.

    Attributes:
        index: its identity.
        queue: what has not run yet.
        given: entries it was ever given.
        hung: it does not move, until a test sets this back.
        graph: the graph it belongs to, for a stream inside a capture.
    """

    def __init__(self, index: int, graph: ModelGraph | None = None) -> None:
        self.index = StreamId(index)
        self.queue: deque[Entry] = deque()
        self.given = 0
        self.hung = False
        self.graph = graph

    def __repr__(self) -> str:
        return f"ModelStream({self.index})"

    @property
    def done(self) -> int:
        """Entries that have run."""
        return self.given - len(self.queue)

    def put(self, run: Task, behind: Point | None = None) -> Point:
        """Queue one entry; the point right behind it."""
        entry = Entry(_always if behind is None else behind.passed, run, behind)
        self.queue.append(entry)
        self.given += 1
        if self.graph is not None:
            self.graph.entries.append((self, entry))
        return Point(self, self.given)


class ModelGraph:
    """What was queued during a capture, by stream. Its entries never run themselves; each replay queues copies.

    Attributes:
        streams: what stands for each stream inside.
        entries: all of them, in the order of the capture.
    """

    def __init__(self) -> None:
        self.streams: dict[ModelStream, ModelStream] = {}
        self.entries: list[tuple[ModelStream, Entry]] = []

    def shadow(self, stream: ModelStream) -> ModelStream:
        """The queue inside the graph of what `stream` is given while it is captured."""
        if stream not in self.streams:
            self.streams[stream] = ModelStream(stream.index, self)
        return self.streams[stream]


class ModelEvent:
    """A wait binds to the record that was last when the wait was queued."""

    def __init__(self, device: ModelDevice) -> None:
        self._device = device
        self.last: Point | None = None

    def record(self, stream: ModelStream) -> None:
        """See `api.Event`."""
        self.last = self._device.target(stream).put(_nothing)

    def wait(self, stream: ModelStream) -> None:
        """See `api.Event`. Waiting for an event that was never recorded waits for nothing.

        Raises:
            CaptureViolation: one of both, the record and the wait, was captured.
        """
        target = self._device.target(stream)
        if self.last is not None and self.last.stream.graph is not target.graph:
            raise CaptureViolation(f"{stream} waits across the border of a capture; record and wait on one side")
        target.put(_nothing, self.last)

    def query(self) -> bool:
        """See `api.Event`.

        Raises:
            CaptureViolation: a graph is being captured, or the record was.
        """
        self._allowed("queried")
        return self.last is None or self.last.passed()

    def synchronize(self) -> None:
        """Let streams move until the last record has passed.

        Raises:
            CaptureViolation: a graph is being captured, or the record was.
            Deadlock: nothing can move, and it has not.
        """
        self._allowed("waited for by the host")
        while self.last is not None and not self.last.passed():
            self._device.step()

    def _allowed(self, what: str) -> None:
        if self._device.capturing() or (self.last is not None and self.last.stream.graph is not None):
            raise CaptureViolation(f"an event is {what} that was recorded, or while something is, inside a capture")


class ModelDevice:
    """Makes streams and events, and decides which stream moves next.

    Attributes:
        streams: all of them, those of replays included.
        pick: which of the streams that can move does; a seeded choice.
        events: made so far.
    """

    def __init__(self, seed: int = 0) -> None:
        self.pick: Callable[[list[ModelStream]], ModelStream] = random.Random(seed).choice
        self._graph: ModelGraph | None = None
        self.streams: list[ModelStream] = []
        self.events = 0

    def stream(self) -> ModelStream:
        """A new stream."""
        self.streams.append(ModelStream(len(self.streams)))
        return self.streams[-1]

    def stream_id(self, stream: ModelStream) -> StreamId:
        """See `api.Device`."""
        return stream.index

    def event(self) -> ModelEvent:
        """See `api.Device`."""
        self.events += 1
        return ModelEvent(self)

    def refused_by_capture(self, error: Exception) -> bool:
        """See `api.Device`."""
        return isinstance(error, CaptureViolation)

    def capturing(self) -> bool:
        """See `api.Device`. Every stream is captured while one is."""
        return self._graph is not None

    @contextmanager
    def capture(self) -> Iterator[ModelGraph]:
        """What is queued within goes into the graph, and nothing of it runs."""
        if self._graph is not None:
            raise CaptureViolation("a capture begins inside a capture; end that first")
        self._graph = ModelGraph()
        try:
            yield self._graph
        finally:
            self._graph = None

    def replay(self, graph: ModelGraph, stream: ModelStream) -> None:
        """Queue a graph behind all that `stream` has and before all that it gets; inside, only captured edges order.

        Each captured stream becomes a new stream of the device, so that whatever a capture failed to order may race.
        """
        fork = stream.put(_nothing)
        copies = {shadow: self.stream() for shadow in graph.streams.values()}
        for copy in copies.values():
            copy.put(_nothing, fork)
        for shadow, entry in graph.entries:
            behind = entry.behind and Point(copies[entry.behind.stream], entry.behind.given + 1)
            copies[shadow].put(entry.run, behind)
        for copy in copies.values():
            stream.put(_nothing, Point(copy, copy.given))

    def target(self, stream: ModelStream) -> ModelStream:
        """Where what is queued on `stream` goes: there, or into the graph that is being captured."""
        return stream if self._graph is None else self._graph.shadow(stream)

    def launch(self, stream: ModelStream, task: Task) -> None:
        """Queue `task` on `stream`."""
        self.target(stream).put(task)

    def step(self) -> bool:
        """Run one entry of one stream that can move. False when all queues are empty.

        Raises:
            Deadlock: work is queued and every stream is blocked or hung.
        """
        waiting = [stream for stream in self.streams if stream.queue]
        if not waiting:
            return False
        ready = [stream for stream in waiting if not stream.hung and stream.queue[0][0]()]
        if not ready:
            raise Deadlock(f"{len(waiting)} streams hold work, and each is hung or waits for an event of another")
        self.pick(ready).queue.popleft()[1]()
        return True

    def run(self) -> None:
        """Run until every queue is empty."""
        while self.step():
            pass

    def catch_up(self, point: Point) -> bool:
        """Run what lies before `point`, and nothing else. False if a hung stream is in the way: then nothing runs."""
        need = self._before(point)
        if need is None:
            return False
        while need:
            for stream, given in list(need.items()):
                while stream.done < given and stream.queue[0].ready():
                    stream.queue.popleft().run()
                if stream.done >= given:
                    del need[stream]
        return True

    def could_pass(self, point: Point) -> bool:
        """Whether `catch_up` could."""
        return self._before(point) is not None

    def _before(self, point: Point) -> dict[ModelStream, int] | None:
        """How far each stream must come for `point` to pass; None if a hung one must move."""
        need: dict[ModelStream, int] = {}
        points = [point]
        while points:
            stream, given = points.pop()
            done = stream.done
            first = need.get(stream, done)
            if given <= first:
                continue
            if stream.hung:
                return None
            need[stream] = given
            points += [behind for i in range(first - done, given - done) if (behind := stream.queue[i].behind)]
        return need


def _always() -> bool:
    return True


def _nothing() -> None:
    pass
