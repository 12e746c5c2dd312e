# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Laws of forwards of several uBatches, over random schedules of threads and of stages, with faults and cancellations.

However many layers and requests there are, a worker needs one workspace slot for each uBatch, draft lane and graph key.
Whatever breaks off, every lease comes to a defined end, every page keeps one owner, and no row is mixed up.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from afd_dsv4.device.model import ModelStream
from afd_dsv4.execution.cam import CamError, CamForward
from afd_dsv4.execution.forward import BrokenOff, Forward
from afd_dsv4.execution.substep import Lane, drafting, lanes
from afd_dsv4.execution.ubatch import parts
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted
from afd_dsv4.workspace.identity import Domain, ExecutionId, ExecutionKind
from afd_dsv4.workspace.lease import WHOLE, LeaseState, OrderError
from afd_dsv4.workspace.order import check
from tests.model_runtime import TOKENS, ModelExecution, ModelRuntime


class Fault(Exception):
    """What a schedule breaks off with."""


class Engine:
    """Forwards at random: batches, cuts, schedules, and what goes wrong.

    Args:
        rng: of all choices.
        layers: of the model.
        seats: most requests.
        ubatches: of a forward, or stages.
        draft_ratios: of the draft layers.
        graphs: keys of graphs.
        faulty: forwards may break off.
        spare: slots more than are needed.
        limits: more arguments of the runtime.

    Attributes:
        seen: what has happened, in words.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        layers: int,
        seats: int,
        ubatches: int,
        draft_ratios: list[int],
        graphs: int,
        faulty: bool = False,
        spare: int = 0,
        **limits: bool,
    ) -> None:
        self.seen: set[str] = set()
        self.rng, self.ubatches, self.faulty, self.seats = rng, ubatches, faulty, seats
        self.lanes = lanes(layers, draft_ratios)
        self.keys = [f"graph {i}" for i in range(graphs)]
        self.needed = ubatches + len(self.lanes) + graphs
        self.runtime = ModelRuntime(
            rng.randrange(1 << 30),
            layers=layers,
            seats=seats,
            slots=ubatches + spare,
            graphs=[[key] for key in self.keys],
            **limits,
        )
        self.drafts: dict[Lane, ModelRuntime] = {
            lane: ModelRuntime(rng.randrange(1 << 30), layers=1, seats=seats, slots=1) for lane in self.lanes
        }
        shared = rng.random() < 0.5  # threads of afd-plugin share a stream
        streams = [self.runtime.device.stream() for _ in range(1 if shared else ubatches)]
        self.streams = [streams[ubatch % len(streams)] for ubatch in range(ubatches)]
        self.position: dict[str, int] = {}
        self.void: set[str] = set()
        self.names = itertools.count()
        self.dead = False  # all slots may be quarantined: the worker cannot go on

    def chunks(self) -> list[RequestChunk]:
        for name in [n for n in self.position if n in self.void or self.rng.random() < 0.15]:
            self.end(name)
        while len(self.position) < self.seats and self.rng.random() < 0.7:
            self.position[f"request {next(self.names)}"] = 0
        found = []
        for name in self.rng.sample(sorted(self.position), len(self.position)):
            rows = self.rng.randint(1, max(1, TOKENS // self.seats))
            found.append(RequestChunk(RequestId(name), self.position[name], self.position[name] + rows))
            self.position[name] += rows
        return found

    def end(self, name: str) -> None:
        del self.position[name]
        self.void.discard(name)
        if self.runtime.store.seat(RequestId(name)) is not None:
            self.runtime.end_request(name)

    def cut(self, chunks: list[RequestChunk]) -> list[int]:
        total = sum(chunk.tokens for chunk in chunks)
        ends = sorted(self.rng.randint(0, total) for _ in range(self.ubatches - 1))
        return [end - start for start, end in zip([0, *ends], [*ends, total], strict=True)]

    def move(self) -> None:
        """The device gets on, or stands still."""
        for _ in range(self.rng.choice([0, 0, 3, 50])):
            self.runtime.device.step()

    def cancel(self) -> None:
        """A request ends while its forward runs."""
        if self.position and self.rng.random() < 0.05:
            self.seen.add("cancelled within a forward")
            self.end(self.rng.choice(sorted(self.position)))

    def fails(self) -> bool:
        return self.faulty and self.rng.random() < 0.01

    def launch(self, execution: ModelExecution, layer: int, stream: ModelStream) -> None:
        if self.fails():
            raise Fault
        execution.launch(layer, stream)
        self.move()
        self.cancel()

    def threads(self, forward: Forward[ModelExecution]) -> None:
        """Each uBatch a thread: one takes its turn, then the next; what one raises is heard by nobody."""

        def thread(ubatch: int) -> Iterator[None]:
            with forward.running(ubatch) as execution:
                for layer in range(self.runtime.shape.layers):
                    self.launch(execution, layer, self.streams[ubatch])
                    yield

        turns = [thread(ubatch) for ubatch in range(self.ubatches)]
        while turns:
            for turn in list(turns):
                try:
                    next(turn)
                except (StopIteration, Fault, OrderError):
                    turns.remove(turn)

    def stages(self, forward: CamForward[ModelExecution]) -> None:
        """The schedule of the asynchronous connector, with a fault at any of its points."""

        def attention(layer: int, stage: int) -> None:
            self.launch(forward[stage], layer, self.streams[0])

        def send(layer: int, stage: int) -> None:
            forward.sent(layer, stage)
            if self.fails():
                raise Fault

        steps = [(layer, stage) for layer in range(self.runtime.shape.layers) for stage in range(self.ubatches)]
        attention(*steps[0])
        send(*steps[0])
        for before, after in itertools.pairwise(steps):
            ahead = self.ubatches > 1
            if ahead:
                attention(*after)
            forward.received(before[1])
            if not ahead:
                attention(*after)
            send(*after)
        forward.received(steps[-1][1])

    def forward(self) -> None:
        chunks = self.chunks()
        split = parts(chunks, self.cut(chunks))
        names = [str(chunk.request) for chunk in chunks]
        threads = self.rng.random() < 0.5
        make = Forward if threads else CamForward
        try:
            forward = make(self.runtime, split)
            with forward:
                if isinstance(forward, CamForward):
                    self.stages(forward)
                else:
                    self.threads(forward)
        except (Fault, BrokenOff, CamError) as error:
            self.seen.add(f"broken off: {type(error).__name__}")
            self.void.update(name for name in names if name in self.position)
            self.dead = self.runtime.arena.counters.quarantined > 0
        else:
            self.draft(forward)
            self.replay()
        assert self.runtime.open == {}
        assert all(slot.lease is None for slot in self.runtime.arena.slots)

    def run(self, forwards: int) -> None:
        """So many, unless the worker dies before."""
        for _ in range(forwards):
            if self.dead:
                self.seen.add("dead")
                break
            self.forward()

    def draft(self, forward: Forward[ModelExecution]) -> None:
        for substep in range(1, 4):
            name = RequestId(f"draft {next(self.names)}")
            with drafting(self.drafts, substep, [RequestChunk(name, 0, 5)], forward.generation) as execution:
                if execution is not None:
                    execution.launch(0, execution.runtime.device.stream())
            if execution is not None:
                execution.runtime.end_request(name)
                execution.runtime.device.run()

    def replay(self) -> None:
        arena, device = self.runtime.arena, self.runtime.device
        for key in self.keys:
            if key not in arena._captured:
                with device.capture():
                    arena.capture(key, capture(self.runtime)).seal()
            lease = arena.replay(key, ExecutionId(self.runtime.mint(), domain=Domain.GRAPH))
            lease.touch(self.streams[0], writes=[WHOLE], step=WHOLE)
            lease.complete(WHOLE)
            lease.seal()

    def check(self) -> None:
        runtimes = [self.runtime, *self.drafts.values()]
        for runtime in runtimes:
            runtime.device.run()
            assert runtime.wrong == []
            assert check(runtime.trace.records(), runtime.trace.dropped).violations == ()
            assert np.array_equal(runtime.store.owners(4), np.arange(1, runtime.store.pages(4)))
            for slot in runtime.arena.slots:
                assert slot.last is None or slot.last.over() or slot.last.state is LeaseState.QUARANTINED
        assert sum(runtime.used for runtime in runtimes) <= self.needed
        assert self.runtime.most <= self.ubatches


def capture(runtime: ModelRuntime) -> ExecutionId:
    return ExecutionId(runtime.mint(), domain=Domain.GRAPH, kind=ExecutionKind.CAPTURE)


SHAPES = {
    "layers": st.sampled_from([1, 2, 5, 12]),
    "seats": st.sampled_from([1, 3, 8]),
    "ubatches": st.integers(1, 3),
    "draft_ratios": st.sampled_from([[], [0], [0, 4]]),
    "graphs": st.integers(0, 2),
}


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 30), **SHAPES)
def test_slots_are_enough_for_any_schedule_whatever_the_layers_and_requests(
    seed: int, layers: int, seats: int, ubatches: int, draft_ratios: list[int], graphs: int
) -> None:
    engine = Engine(
        random.Random(seed), layers=layers, seats=seats, ubatches=ubatches, draft_ratios=draft_ratios, graphs=graphs
    )
    engine.run(6)  # raises Exhausted where they are not
    engine.check()
    for words in engine.seen:
        event(words)


def test_one_slot_less_is_not_enough() -> None:
    """The bound is no looser than it says."""
    engine = Engine(random.Random(1), layers=2, seats=3, ubatches=2, draft_ratios=[], graphs=0, spare=-1)
    with pytest.raises(Exhausted, match="none of 1 is free"):
        engine.run(6)


@settings(max_examples=80)
@given(seed=st.integers(0, 1 << 30), **SHAPES)
def test_whatever_breaks_off_every_lease_has_an_end_and_no_row_is_mixed_up(
    seed: int, layers: int, seats: int, ubatches: int, draft_ratios: list[int], graphs: int
) -> None:
    engine = Engine(
        random.Random(seed),
        layers=layers,
        seats=seats,
        ubatches=ubatches,
        draft_ratios=draft_ratios,
        graphs=graphs,
        faulty=True,
    )
    engine.run(8)
    engine.check()
    for words in engine.seen:
        event(words)


@pytest.mark.parametrize("without", ["ordered", "edges"])
def test_without_waits_or_the_edge_between_ubatches_the_same_schedules_mix_rows_up(without: str) -> None:
    """Negative control."""
    found = 0
    for seed in range(20):
        limits = {without: False}
        engine = Engine(random.Random(seed), layers=5, seats=3, ubatches=2, draft_ratios=[], graphs=0, **limits)
        engine.run(6)
        engine.runtime.device.run()
        found += bool(engine.runtime.wrong)
    assert found >= 5
