# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the reports are replayed on: a model device, an arena, and memory whose cells know who wrote them.

Work reads and writes when its stream reaches it, not when it is queued; a read that finds another stamp than it should
is what the users saw as wrong tokens. A program is run in many seeded orders of the streams.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence

from afd_dsv4.device.model import ModelDevice, ModelEvent, ModelStream
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.identity import Domain, ExecutionId, ExecutionKind, Generation
from afd_dsv4.workspace.lease import Lease
from afd_dsv4.workspace.order import check
from afd_dsv4.workspace.trace import Trace

ModelLease = Lease[ModelStream]
ORDERS = 60


class Events(ModelDevice):
    """A model device that knows which of its events somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held: weakref.WeakSet[ModelEvent] = weakref.WeakSet()

    def event(self) -> ModelEvent:
        event = super().event()
        self.held.add(event)
        return event


class Machine:
    """A model device with three streams, memory, and an arena whose clock a test moves.

    Attributes:
        cells: stamp by cell.
        wrong: (cell, stamp expected, stamp found) of every bad read.
        now: the arena's time in seconds.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        slots: int = 2,
        graphs: Sequence[Iterable[Hashable]] = (),
        ordered: bool = True,
        device: ModelDevice | None = None,
    ) -> None:
        self.device = device or ModelDevice(seed)
        self.a, self.b, self.c = self.streams = [self.device.stream() for _ in range(3)]
        self.trace = Trace(None)
        self.now = 0.0
        self.arena: WorkspaceArena[ModelStream] = WorkspaceArena(
            self.device, slots, graphs=graphs, ordered=ordered, clock=lambda: self.now, trace=self.trace
        )
        self.cells: dict[Hashable, object] = {}
        self.wrong: list[tuple[Hashable, object, object]] = []

    def acquire(self, generation: int, ubatch: int = 0) -> ModelLease:
        return self.arena.acquire(ExecutionId(Generation(generation), ubatch))

    def write(self, stream: ModelStream, cell: Hashable, stamp: object) -> None:
        self.device.launch(stream, lambda: self.cells.update({cell: stamp}))

    def read(self, stream: ModelStream, cell: Hashable, stamp: object) -> None:
        def look() -> None:
            found = self.cells.get(cell)
            if found != stamp:
                self.wrong.append((cell, stamp, found))

        self.device.launch(stream, look)

    def use(self, stream: ModelStream, cell: Hashable, stamp: object) -> None:
        """A launch that fills a cell and works with what it put there."""
        self.write(stream, cell, stamp)
        self.read(stream, cell, stamp)


def graph_id(generation: int) -> ExecutionId:
    """Of a replay."""
    return ExecutionId(Generation(generation), domain=Domain.GRAPH)


def capture_id(generation: int) -> ExecutionId:
    """Of a capture."""
    return ExecutionId(Generation(generation), domain=Domain.GRAPH, kind=ExecutionKind.CAPTURE)


def corrupted(program: Callable[[Machine], None], *, orders: int = ORDERS, **options: object) -> int:
    """In how many orders of the streams some read was wrong. Where the arena orders, its trace must be clean, too."""
    bad = 0
    for seed in range(orders):
        machine = Machine(seed, **options)  # type: ignore[arg-type]
        program(machine)
        machine.device.run()
        bad += bool(machine.wrong)
        if machine.arena.ordered:
            report = check(machine.trace.records())
            assert not report.violations, report
    return bad
