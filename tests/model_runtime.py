# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Forwards on the model device: the real arena, leases and tail store, with names for rows (`symbolic.py`).

A launch writes its slot's table and the pages at the time its stream reaches it. What a stream of the device does at
which time, a test or a seed decides.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from afd_dsv4.device.model import ModelDevice, ModelStream
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SeatIndex, StepPlan, TailStore
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.identity import ExecutionId, Generation, GenerationMint
from afd_dsv4.workspace.lease import Lease, LeaseState
from afd_dsv4.workspace.trace import Trace
from tests.symbolic import SymbolicPool, expected

TOKENS = 40  # most of one launch


class HeldLease(Lease[Any]):
    """One whose `_locked` methods are for who holds the lock, and nobody else."""

    __slots__ = ()

    def touch_locked(self, *arguments: Any, **named: Any) -> None:
        self._held("touch_locked")
        super().touch_locked(*arguments, **named)

    def complete_locked(self, step: Hashable) -> None:
        self._held("complete_locked")
        super().complete_locked(step)

    def _held(self, name: str) -> None:
        assert self.arena.lock._is_owned(), f"{name} of {self!r} is called by a thread that does not hold arena.lock"


def watch_lock(arena: WorkspaceArena[Any]) -> None:
    """See to it that what it leases from here on is touched under its lock only."""
    make = arena._lease

    def lease(*arguments: Any, **named: Any) -> Lease[Any]:
        made = make(*arguments, **named)
        made.__class__ = HeldLease
        return made

    arena._lease = lease  # type: ignore[method-assign]


class ModelExecution:
    """One execution, with one compressor a layer.

    Attributes:
        lease: None without requests.
    """

    def __init__(self, runtime: ModelRuntime, lease: Lease[ModelStream] | None, plan: StepPlan | None) -> None:
        self.runtime = runtime
        self.lease = lease
        self.plan = plan
        self.launched: list[int] = []
        self._lost: str | None = None
        if lease is not None:
            runtime.open[lease.execution] = self

    @property
    def lost(self) -> str | None:
        """See `execution.forward.Execution`."""
        if self._lost is None and self.lease is not None and self.lease.state is LeaseState.QUARANTINED:
            return f"{self.lease.execution} was quarantined"
        return self._lost

    def launch(self, layer: int, stream: ModelStream) -> None:
        if self.lease is None or self.plan is None:
            return
        runtime, shape, pages = self.runtime, self.runtime.shape, self.plan.lists[4]
        self.lease.touch(stream, writes=["table", "pages"], step=layer)
        kept = runtime.tables[self.lease.slot.index]
        table = pages.table(layer, kept.shape[1])
        want = {name: rows for chunk in pages.chunks for name, rows in expected(shape, chunk).items()}

        def scatter() -> None:
            kept[: len(table)] = table

        def compress() -> None:
            got = runtime.pool.launch(pages.chunks, kept[: len(table)], pages.starts)
            runtime.compared += 1
            if got != want:
                runtime.wrong.append((str(self.lease and self.lease.execution), layer))

        runtime.device.launch(stream, scatter)
        runtime.device.launch(stream, compress)
        self.lease.complete(layer)
        self.launched.append(layer)

    def computed(self, layer: int) -> bool:
        return self.lease is None or layer >= self.runtime.shape.layers or layer in self.launched

    def finish(self) -> None:
        if self.lease is None or self.plan is None:
            return
        missing = self.runtime.shape.layers - len(self.launched)
        if missing and self.lease.state is LeaseState.ACQUIRED:
            self._lost = f"{self.lease.execution} ended with {missing} launches missing"
            self.plan.void(self._lost)
        self.runtime.open.pop(self.lease.execution, None)
        if self.lease.state is not LeaseState.QUARANTINED:
            self.lease.seal(whole=not missing)


class ModelRuntime:
    """What `execution.forward.Runtime` asks for.

    Args:
        seed: of the order in which the streams run.
        layers: each with one C4 compressor.
        seats: most requests.
        slots: workspace slots.
        graphs: see `WorkspaceArena`.
        ordered: False queues no wait.
        edges: False has no execution follow those that had its requests before.

    Attributes:
        wrong: launches whose rows were not those of the definition.
        compared: launches that have run.
        most: executions that were open at once, at most.
    """

    def __init__(
        self,
        seed: int,
        *,
        layers: int = 3,
        seats: int = 4,
        slots: int = 2,
        graphs: Sequence[Iterable[Hashable]] = (),
        ordered: bool = True,
        edges: bool = True,
    ) -> None:
        self.edges = edges
        self.shape = TailShape(4, True, 8, layers=layers)
        self.device = ModelDevice(seed)
        self.trace = Trace(None)
        self.arena: WorkspaceArena[ModelStream] = WorkspaceArena(
            self.device, slots, graphs=graphs, ordered=ordered, trace=self.trace
        )
        watch_lock(self.arena)
        self.store = TailStore({4: self.shape}, max_num_seqs=seats, slots=slots + len(graphs))
        self.pool = SymbolicPool(self.shape)
        self.tables = [np.zeros((seats, self.shape.columns(TOKENS)), np.int32) for _ in self.arena.slots]
        self.last: dict[SeatIndex, Lease[ModelStream]] = {}
        self.open: dict[ExecutionId, ModelExecution] = {}
        self.wrong: list[tuple[str, int]] = []
        self.compared = 0
        self.most = 0
        self._mint = GenerationMint()

    @property
    def num_layers(self) -> int:
        return self.shape.layers + 1  # the last one has no compressor

    def mint(self) -> Generation:
        return self._mint.mint()

    def begin(
        self, chunks: Sequence[RequestChunk], *, generation: Generation | None = None, ubatch: int = 0, substep: int = 0
    ) -> ModelExecution:
        if not chunks:
            return ModelExecution(self, None, None)
        self.store.refuse_void(chunks)
        lease = self.arena.acquire(ExecutionId(generation or self.mint(), ubatch, substep))
        try:
            plan = self.store.plan(chunks, lease.slot.index, usable=self._usable)
        except BaseException:
            lease.seal()
            raise
        lease.follow(
            continues=[self.last[seat] for seat in plan.continued if self.edges],
            after=[self.last[seat] for seat in plan.taken if seat in self.last],
            seats=plan.seats,
            void=plan.void,
        )
        self.last.update(dict.fromkeys(plan.seats, lease))
        execution = ModelExecution(self, lease, plan)
        self.most = max(self.most, len(self.open))
        return execution

    def _usable(self, seat: SeatIndex) -> bool:
        return seat not in self.last or self.last[seat].can_be_waited_for()

    def end_request(self, name: str) -> None:
        self.store.end(RequestId(name))

    def open_of(self, generation: Generation) -> tuple[ExecutionId, ...]:
        return tuple(execution for execution in self.open if execution.generation == generation)

    def end_forward(self, generation: Generation) -> tuple[ExecutionId, ...]:
        left = self.open_of(generation)
        for execution in left:
            self.open[execution].finish()
        return left

    def abandon(self, generation: Generation, why: str) -> tuple[ExecutionId, ...]:
        left = self.open_of(generation)
        for execution in left:
            given = self.open.pop(execution)
            given._lost = f"{execution} was quarantined: {why}"
            assert given.lease is not None
            self.arena.quarantine(given.lease, why)
        return left

    @property
    def used(self) -> int:
        """Slots that were ever leased."""
        return sum(slot.last is not None or slot.lease is not None for slot in self.arena.slots)
