# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Plans that are only tried change no page, no position and no lease, whatever is tried between true forwards."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.execution.forward import BrokenOff, Forward
from afd_dsv4.execution.pcp import LeasedMeanwhile, pretending
from afd_dsv4.execution.step import ImpossibleStep, Steps
from afd_dsv4.execution.ubatch import parts
from afd_dsv4.tail.store import SlotIndex, TailVoid
from afd_dsv4.tail.tables import RequestChunk, RequestId
from tests.model_runtime import ModelExecution, ModelRuntime

SEATS = 4


class Engine:
    """Random forwards of two uBatches; a twin with the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.runtime = ModelRuntime(seed)
        self.steps = Steps()
        self.streams = [self.runtime.device.stream() for _ in range(2)]
        self.position: dict[str, int] = {}
        self.made = 0

    def batch(self, rng: random.Random, *, ends: bool = True) -> tuple[set[str], list[tuple[str, int, int]]]:
        """Requests that end, and name, start and rows of those that are scheduled."""
        gone = {name for name in self.position if ends and rng.random() < 0.2}
        names = [name for name in self.position if name not in gone]
        fresh = [f"request {self.made + i}" for i in range(rng.randrange(SEATS - len(names) + 1))]
        batch = [(name, self.position.get(name, 0), rng.randint(1, 9)) for name in names + fresh if rng.random() < 0.8]
        return gone, batch

    def plan(self, gone: set[str], batch: list[tuple[str, int, int]]) -> tuple[RequestChunk, ...]:
        for request in self.steps.end(finished=gone):
            self.runtime.end_request(request)
        names, starts, rows = ([row[i] for row in batch] for i in range(3))
        return self.steps.chunks(names, starts, rows, {})  # type: ignore[arg-type]

    def forward(self) -> tuple[object, ...]:
        """One, and what it mapped."""
        gone, batch = self.batch(self.rng)
        chunks = self.plan(gone, batch)
        for name in gone:
            del self.position[name]
        for name, start, rows in batch:
            self.position[name] = start + rows
        self.made += SEATS
        total = sum(chunk.tokens for chunk in chunks)
        first = self.rng.randint(0, total)
        mapped: list[object] = []
        with Forward(self.runtime, parts(chunks, [first, total - first])) as forward:
            for layer in range(self.runtime.shape.layers):
                for execution, stream in zip(forward.executions, self.streams, strict=True):
                    execution.launch(layer, stream)
            for execution in forward.executions:
                if execution.plan is not None:
                    lists = execution.plan.lists[4]
                    mapped += [lists.ids.tolist(), lists.columns.tolist(), lists.starts.tolist(), execution.plan.seats]
        return tuple(mapped)

    def try_out(self, rng: random.Random) -> None:
        """Stages of a batch that never comes, as the build of their metadata plans them."""
        slots = [slot.lease for slot in self.runtime.arena.slots], [slot.last for slot in self.runtime.arena.slots]
        states = [lease and lease.state for lease in slots[1]]
        with pretending(self.runtime.store, self.steps, lambda: self.runtime.arena.counters.leases):
            chunks = self.plan(*self.batch(rng, ends=False))  # an end is no plan
            total = sum(chunk.tokens for chunk in chunks)
            for part in parts(chunks, [total // 2, total - total // 2]):
                if part:
                    self.runtime.store.plan(part, SlotIndex(rng.randrange(2)))
        assert slots == (
            [slot.lease for slot in self.runtime.arena.slots],
            [slot.last for slot in self.runtime.arena.slots],
        )
        assert states == [lease and lease.state for lease in slots[1]]


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.randoms(use_true_random=False))
def test_an_engine_that_tries_plans_maps_the_same_pages_as_one_that_does_not(seed: int, rng: random.Random) -> None:
    engine, twin = Engine(seed), Engine(seed)
    for _ in range(8):
        for _ in range(rng.randrange(3)):
            engine.try_out(rng)
        assert engine.forward() == twin.forward()
        store = engine.runtime.store
        assert np.array_equal(store.owners(4), np.arange(1, store.pages(4)))
    engine.runtime.device.run()
    assert engine.runtime.wrong == []


def world() -> tuple[ModelRuntime, Steps, Forward[ModelExecution]]:
    runtime, steps = ModelRuntime(1), Steps()
    chunks = steps.chunks(["a", "b"], [0, 0], [9, 12], {})
    return runtime, steps, Forward(runtime, [chunks])


def test_an_open_lease_is_left_alone_and_its_forward_goes_on() -> None:
    runtime, steps, forward = world()
    stream = runtime.device.stream()
    with forward:
        forward[0].launch(0, stream)
        with pretending(runtime.store, steps, lambda: runtime.arena.counters.leases):
            runtime.store.plan(steps.chunks(["b"], [12], [30], {}), SlotIndex(1))
        for layer in (1, 2):
            forward[0].launch(layer, stream)
    with Forward(runtime, [steps.chunks(["b", "a"], [12, 9], [1, 20], {})]) as after:
        for layer in range(3):
            after[0].launch(layer, stream)
    runtime.device.run()
    assert runtime.wrong == []


@pytest.mark.parametrize("again", [False, True], ids=["ended", "ended, and another of its name planned"])
def test_a_request_that_ends_within_stays_ended_and_its_seat_is_another_request_s(again: bool) -> None:
    runtime, steps, forward = world()
    stream = runtime.device.stream()
    with forward:
        for layer in range(3):
            forward[0].launch(layer, stream)
        with pretending(runtime.store, steps, lambda: runtime.arena.counters.leases):
            assert steps.end(finished={"b"}) == (RequestId("b"),)
            runtime.end_request("b")
            if again:
                runtime.store.plan(steps.chunks(["b", "a"], [0, 9], [30, 2], {}), SlotIndex(1))
    assert runtime.store.seat(RequestId("b")) is None
    with pytest.raises(ImpossibleStep, match="'b' is new and starts at 12"):
        steps.chunks(["b"], [12], [1], {})
    assert steps.end(finished={"b"}) == ()
    assert np.array_equal(runtime.store.owners(4), np.arange(1, runtime.store.pages(4)))
    names = ["c", "d", "e", "a"]  # as many as there are seats
    with Forward(runtime, [steps.chunks(names, [0, 0, 0, 9], [5] * SEATS, {})]) as after:
        for layer in range(3):
            after[0].launch(layer, stream)
    runtime.device.run()
    assert runtime.wrong == []


def test_what_is_lost_and_ends_within_is_not_lost_for_the_next_of_its_name() -> None:
    runtime, steps, forward = world()
    with pretending(runtime.store, steps, lambda: runtime.arena.counters.leases):
        steps.lost(["b"], "planted")
        steps.end(finished={"b"})
        runtime.end_request("b")
    assert steps.chunks(["b"], [0], [4], {}) == (RequestChunk(RequestId("b"), 0, 4),)
    with pytest.raises(BrokenOff), forward:
        pass


def test_an_exception_within_puts_everything_back_and_goes_on() -> None:
    runtime, steps, forward = world()
    owners = [runtime.store.tail(RequestId(name), 4)[1].tolist() for name in "ab"]

    def body() -> None:
        with pretending(runtime.store, steps, lambda: runtime.arena.counters.leases):
            runtime.store.plan(steps.chunks(["b"], [12], [30], {}), SlotIndex(1))
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert owners == [runtime.store.tail(RequestId(name), 4)[1].tolist() for name in "ab"]
    assert steps.chunks(["b"], [12], [1], {}) == (RequestChunk(RequestId("b"), 12, 13),)
    runtime.end_forward(forward.generation)


def test_a_lease_within_is_refused_and_what_it_maps_stays() -> None:
    runtime, steps, forward = world()
    runtime.end_forward(forward.generation)
    with (
        pytest.raises(LeasedMeanwhile, match="1 workspace slots were leased while plans were only to be tried"),
        pretending(runtime.store, steps, lambda: runtime.arena.counters.leases),
    ):
        leased = Forward(runtime, [steps.chunks(["c"], [0], [3], {})])
    assert runtime.store.seat(RequestId("c")) is not None
    runtime.end_forward(leased.generation)


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt])
def test_an_error_with_a_lease_within_is_the_context_and_an_interrupt_goes_on(stop: type[BaseException]) -> None:
    runtime, steps, forward = world()
    runtime.end_forward(forward.generation)
    leased: list[Forward[ModelExecution]] = []

    def body() -> None:
        with pretending(runtime.store, steps, lambda: runtime.arena.counters.leases):
            leased.append(Forward(runtime, [steps.chunks(["c"], [0], [3], {})]))
            raise stop

    with pytest.raises(LeasedMeanwhile if stop is ValueError else stop) as raised:
        body()
    assert stop in (type(raised.value), type(raised.value.__context__))
    assert runtime.store.seat(RequestId("c")) is not None
    runtime.end_forward(leased[0].generation)


def test_a_tail_that_is_lost_while_plans_are_tried_stays_lost() -> None:
    runtime, steps, forward = world()
    with pretending(runtime.store, steps, lambda: runtime.arena.counters.leases):
        runtime.abandon(forward.generation, "planted")  # by a watchdog, say
        steps.lost(["b"], "planted")
    with pytest.raises(ImpossibleStep, match="'b' lost its tail: planted"):
        steps.chunks(["b"], [12], [1], {})
    with pytest.raises(TailVoid, match="in doubt: planted"):
        runtime.begin([RequestChunk(RequestId("a"), 9, 10)])
    with pytest.raises(BrokenOff), forward:
        pass
