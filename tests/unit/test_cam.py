# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Two stages with items under way: what the schedule allows, and what becomes of a forward that breaks off."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable

import pytest

from afd_dsv4.execution.cam import CamError, CamForward
from afd_dsv4.execution.forward import BrokenOff
from afd_dsv4.tail.store import TailVoid
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted
from afd_dsv4.workspace.identity import ExecutionId, Generation
from afd_dsv4.workspace.lease import LeaseState
from tests.model_runtime import ModelExecution, ModelRuntime

BATCH = [RequestChunk(RequestId("a"), 0, 9), RequestChunk(RequestId("b"), 0, 12)]
CUT = [(0, 11), (11, 21)]  # in the middle of b, as a split by tokens does
LAYERS = 3

Forward = CamForward[ModelExecution]


class Failure(Exception):
    """What a forward may break off with."""


def schedule(
    layers: int = LAYERS, stages: int = 2, *, attention: Callable[[int, int], object], forward: Forward
) -> None:
    """The order of `run_async_moe_ubatch_afd_forward` of afd-plugin: facts, 8.3."""
    steps = [(layer, stage) for layer in range(layers) for stage in range(stages)]
    attention(*steps[0])
    forward.sent(*steps[0])
    for before, after in itertools.pairwise(steps):
        if stages > 1:
            attention(*after)
            assert forward.received(before[1]) == before[0]
        else:
            assert forward.received(before[1]) == before[0]
            attention(*after)
        forward.sent(*after)
    assert forward.received(steps[-1][1]) == steps[-1][0]


class World:
    """A forward of two stages on one stream."""

    def __init__(
        self,
        batch: list[RequestChunk] | None = None,
        stages: list[tuple[int, int]] | None = None,
        cls: type[ModelRuntime] = ModelRuntime,
    ) -> None:
        self.runtime = cls(1)
        self.stream = self.runtime.device.stream()
        self.forward: Forward = CamForward.from_stages(
            self.runtime, BATCH if batch is None else batch, CUT if stages is None else stages
        )

    def attention(self, layer: int, stage: int) -> None:
        self.forward[stage].launch(layer, self.stream)

    def within(self, body: Callable[[], object]) -> None:
        with self.forward:
            body()

    def states(self) -> list[LeaseState | None]:
        return [execution.lease and execution.lease.state for execution in self.forward.executions]


@pytest.mark.parametrize("stages", [CUT, [(0, 21)], [(0, 21), (21, 21)], [(0, 0), (0, 21)]])
def test_the_schedule_runs_whatever_the_stages_are(stages: list[tuple[int, int]]) -> None:
    world = World(stages=stages)
    world.within(lambda: schedule(stages=len(stages), attention=world.attention, forward=world.forward))
    world.runtime.device.run()
    assert world.runtime.wrong == []
    assert world.runtime.compared == LAYERS * sum(start < stop for start, stop in stages)
    assert world.runtime.open == {}
    assert world.forward.failed is None


def test_the_first_stage_computes_the_first_part_and_the_second_continues_the_cut_request() -> None:
    world = World()
    parts = [execution.plan.lists[4].chunks for execution in world.forward.executions if execution.plan]
    assert parts == [
        (RequestChunk(RequestId("a"), 0, 9), RequestChunk(RequestId("b"), 0, 2)),
        (RequestChunk(RequestId("b"), 2, 12),),
    ]
    with pytest.raises(BrokenOff):
        world.within(lambda: None)


@pytest.mark.parametrize(
    "stages",
    [[(0, 11), (12, 21)], [(0, 11), (10, 21)], [(1, 21)], [(0, 11), (11, 20)], [(0, 22)], []],
    ids=["a gap", "an overlap", "a late start", "an early end", "a late end", "none"],
)
def test_stages_that_do_not_make_up_the_batch_are_refused_before_anything_begins(stages: list[tuple[int, int]]) -> None:
    runtime = ModelRuntime(1)
    with pytest.raises(ValueError, match=r"do not follow each other|must make up the batch"):
        CamForward.from_stages(runtime, BATCH, stages)
    assert runtime.arena.counters.leases == 0


def refused(world: World, words: str, body: Callable[[], object]) -> None:
    """The forward fails so, and from then on everything is refused in the same words."""
    with pytest.raises(CamError, match=words):
        world.within(body)
    why = world.forward.failed
    assert why is not None
    for again in (lambda: world.forward.sent(2, 0), lambda: world.forward.received(0)):
        with pytest.raises(CamError, match=re.escape(why)):
            again()
    assert world.runtime.open == {}


def test_an_item_of_a_layer_whose_compressors_were_not_launched_is_not_sent() -> None:
    world = World()
    refused(world, "stage 0 of generation 1 sends layer 0, and has not launched", lambda: world.forward.sent(0, 0))
    assert world.forward.under_way == {}
    assert world.states() == [LeaseState.SEALED, LeaseState.SEALED]


def test_a_layer_without_compressors_is_sent_like_any_other() -> None:
    world = World()

    def body() -> None:
        for stage in (0, 1):
            for layer in range(LAYERS):
                world.attention(layer, stage)
            world.forward.sent(LAYERS, stage)  # and those before it had no experts
            assert world.forward.received(stage) == LAYERS

    world.within(body)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("stage 0 of generation 1 sends layer 1 before it has received that of layer 0", [("s", 0, 0), ("s", 1, 0)]),
        ("stage 0 of generation 1 sends layer 0 behind layer 0", [("s", 0, 0), ("r", 0), ("s", 0, 0)]),
        ("stage 1 of generation 1 receives what it has not sent", [("s", 0, 0), ("r", 1)]),
        ("stage 0 of generation 1 receives what it has not sent", [("s", 0, 0), ("r", 0), ("r", 0)]),
        ("stage 1 of generation 1 sends layer 0 out of turn: stage 0 comes next", [("s", 0, 1)]),
        ("stage 0 of generation 1 sends layer 1 out of turn: layer 0 of stage 1", [("s", 0, 0), ("r", 0), ("s", 1, 0)]),
        ("stage 1 of generation 1 sends layer 1 out of turn: layer 0 of stage 1", [("s", 0, 0), ("r", 0), ("s", 1, 1)]),
        ("stage 1 of generation 1 sends layer 0 before stage 0 has received", [("s", 0, 0), ("s", 0, 1)]),
        ("stage 0 of generation 1 sends layer 1000000 of a model that has 4", [("s", 10**6, 0)]),
        ("stage 0 of generation 1 sends layer 4 of a model that has 4", [("s", 4, 0)]),
        ("stage 0 of generation 1 sends layer -1 of a model that has 4", [("s", -1, 0)]),
        (
            "stage 0 of generation 1 sends layer 3, and has not launched all comp",
            [("s", 0, 0), ("r", 0), ("t",), ("s", 3, 0)],
        ),
        ("stage 2 of generation 1 is none: this forward has 2", [("s", 0, 2)]),
        ("stage -1 of generation 1 is none: this forward has 2", [("r", -1)]),
    ],
)
def test_a_stage_that_leaves_its_schedule_fails_the_forward(words: str, steps: list[tuple[object, ...]]) -> None:
    world = World()

    def body() -> None:
        calls: dict[object, Callable[..., object]] = {
            "s": world.forward.sent,
            "r": world.forward.received,
            "t": lambda: (world.attention(0, 1), world.forward.sent(0, 1), world.forward.received(1)),
        }
        for layer in range(2):
            world.attention(layer, 0)
        for name, *where in steps:
            calls[name](*where)

    refused(world, words, body)


def test_a_failed_forward_refuses_what_comes_although_somebody_caught_the_error() -> None:
    world = World()

    def body() -> None:
        with pytest.raises(CamError, match="receives what it has not sent"):
            world.forward.received(0)
        world.attention(0, 0)
        world.forward.sent(0, 0)

    refused(world, "moves layer 0 of stage 0 after it failed: stage 0 of generation 1 receives what it has not", body)


@pytest.mark.parametrize("ends", [None, Failure, KeyboardInterrupt])
@pytest.mark.parametrize("what", ["all launched", "launches missing", "an item under way"])
def test_a_forward_whose_error_somebody_caught_does_not_end_as_if_nothing_had_happened(
    what: str, ends: type[BaseException] | None
) -> None:
    world = World()

    def body() -> None:
        if what == "all launched":
            schedule(attention=world.attention, forward=world.forward)
        if what == "an item under way":
            world.attention(0, 0)
            world.forward.sent(0, 0)
        with pytest.raises(CamError, match="receives what it has not sent"):
            world.forward.received(1)
        if ends is not None:
            raise ends("planted")

    if ends is KeyboardInterrupt:  # never replaced
        with pytest.raises(KeyboardInterrupt):
            world.within(body)
    else:
        with pytest.raises(CamError, match="stage 1 of generation 1 receives what it has not sent") as raised:
            world.within(body)
        assert ends is None or isinstance(raised.value.__context__, ends)
    assert world.forward.failed is not None
    assert world.runtime.open == {}
    if what == "an item under way":
        assert world.states() == [LeaseState.QUARANTINED, LeaseState.QUARANTINED]


@pytest.mark.parametrize("links", [1, 2, 3])
def test_an_error_that_comes_of_the_failure_is_not_replaced_however_many_lie_between(links: int) -> None:
    world = World()

    def words(left: int) -> None:
        try:
            if left > 1:
                words(left - 1)
            else:
                world.forward.received(0)
        except (CamError, Failure) as error:
            if left % 2:
                raise Failure(f"in {left} other words") from error
            raise Failure(f"in {left} other words")  # noqa: B904  # then it is its context

    def body() -> None:
        schedule(attention=world.attention, forward=world.forward)
        words(links)

    with pytest.raises(Failure, match=f"in {links} other words"):
        world.within(body)


def test_an_error_whose_chain_leads_back_to_itself_is_replaced_if_the_failure_is_not_in_it() -> None:
    world = World()
    one, two = Failure("one"), Failure("two")
    one.__cause__, two.__cause__ = two, one

    def body() -> None:
        with pytest.raises(CamError):
            world.forward.received(0)
        raise one

    with pytest.raises(CamError, match="stage 0 of generation 1 receives what it has not sent"):
        world.within(body)


def test_a_forward_that_is_over_sends_and_receives_nothing() -> None:
    world = World()
    world.within(lambda: schedule(attention=world.attention, forward=world.forward))
    for late in (lambda: world.forward.sent(LAYERS, 0), lambda: world.forward.received(1)):
        with pytest.raises(CamError, match=r"generation 1 moves .* after it was over"):
            late()


def test_an_exception_with_nothing_under_way_ends_the_forward_as_broken() -> None:
    world = World()

    def body() -> None:
        world.attention(0, 0)
        world.forward.sent(0, 0)
        world.forward.received(0)
        raise Failure("planted")

    with pytest.raises(Failure):
        world.within(body)
    assert world.states() == [LeaseState.SEALED, LeaseState.SEALED]
    assert world.runtime.arena.counters.quarantined == 0
    with pytest.raises(CamError, match="after it failed: Failure: planted"):
        world.forward.sent(1, 0)
    for name in "ab":
        with pytest.raises(TailVoid, match="launches missing"):
            world.runtime.begin([RequestChunk(RequestId(name), 12, 13)])


@pytest.mark.parametrize("quiet", [False, True], ids=["an exception", "nothing"])
def test_a_forward_that_ends_with_an_item_under_way_is_quarantined_and_says_so_once(
    quiet: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()

    def body() -> None:
        world.attention(0, 0)
        world.forward.sent(0, 0)
        world.attention(0, 1)
        world.forward.received(0)
        world.forward.sent(0, 1)
        if not quiet:
            raise Failure("the link is gone")

    cause = "it ended" if quiet else "Failure: the link is gone"
    why = f"generation 1 has sent layer 0 of stage 1 and not received it: {cause}"
    with caplog.at_level(logging.ERROR, "vllm.plugins.afd_dsv4"), pytest.raises(CamError if quiet else Failure):
        world.within(body)
    (line,) = caplog.messages
    assert line == f"afd-dsv4: {why}. Nobody can tell when its work is over; restart the worker"
    assert world.forward.failed == why
    assert world.states() == [LeaseState.QUARANTINED, LeaseState.QUARANTINED]
    assert world.runtime.open == {}
    assert world.runtime.arena.counters.quarantined == 2
    for name in "ab":
        with pytest.raises(TailVoid, match="is in doubt: generation 1 has sent layer 0 of stage 1"):
            world.runtime.begin([RequestChunk(RequestId(name), 12, 13)])
    with pytest.raises(CamError, match="after it failed: generation 1 has sent"):
        world.forward.sent(1, 0)


class NoQuarantine(ModelRuntime):
    """One that cannot do it."""

    def abandon(self, generation: Generation, why: str) -> tuple[ExecutionId, ...]:
        raise RuntimeError("planted: no quarantine")


@pytest.mark.parametrize("raised", [None, Failure, KeyboardInterrupt])
def test_what_cannot_be_quarantined_is_never_sealed_and_the_forward_ends_with_what_broke_it(
    raised: type[BaseException] | None, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(cls=NoQuarantine)

    def body() -> None:
        world.attention(0, 0)
        world.forward.sent(0, 0)
        if raised is not None:
            raise raised

    with caplog.at_level(logging.ERROR, "vllm.plugins.afd_dsv4"), pytest.raises(raised or CamError):
        world.within(body)
    first, second = caplog.records
    assert "generation 1 has sent layer 0 of stage 0 and not received it" in first.getMessage()
    assert second.getMessage() == "afd-dsv4: what generation 1 left open is not quarantined"
    assert second.exc_info is not None
    assert str(second.exc_info[1]) == "planted: no quarantine"
    world.forward.finish(0)  # as an adapter's own `finally` may do
    assert world.states() == [LeaseState.ACQUIRED, LeaseState.ACQUIRED]
    with pytest.raises(Exhausted):
        world.runtime.begin([RequestChunk(RequestId("c"), 0, 1)])


def test_a_stage_that_was_finished_keeps_its_fence_when_the_other_is_quarantined() -> None:
    world = World(stages=[(0, 9), (9, 21)])

    def body() -> None:
        world.attention(0, 0)
        world.forward.sent(0, 0)
        world.attention(0, 1)
        world.forward.received(0)
        for layer in range(1, LAYERS):
            world.attention(layer, 0)
        world.forward.finish(0)
        world.forward.sent(0, 1)
        raise Failure

    with pytest.raises(Failure):
        world.within(body)
    assert world.states() == [LeaseState.SEALED, LeaseState.QUARANTINED]
    world.runtime.device.run()
    assert world.forward[0].lease is not None
    assert world.forward[0].lease.over()
    world.runtime.begin([RequestChunk(RequestId("a"), 9, 10)])


def test_a_stage_that_ends_with_its_item_under_way_is_not_sealed_but_quarantined() -> None:
    world = World()

    def body() -> None:
        with world.forward.running(0):
            for layer in range(LAYERS):
                world.attention(layer, 0)
            world.forward.sent(LAYERS - 1, 0)
            raise Failure

    with pytest.raises(Failure):
        world.within(body)
    assert world.states() == [LeaseState.QUARANTINED, LeaseState.QUARANTINED]


def test_a_stage_that_is_finished_sends_nothing() -> None:
    world = World(stages=[(0, 9), (9, 21)])

    def body() -> None:
        for layer in range(LAYERS):
            world.attention(layer, 0)
        world.forward.finish(0)
        world.forward.sent(LAYERS - 1, 0)

    refused(world, f"stage 0 of generation 1 sends layer {LAYERS - 1} after it was finished", body)


def test_a_swallowed_exception_in_a_stage_breaks_the_forward_off_with_nothing_under_way() -> None:
    world = World()

    def body() -> None:
        with pytest.raises(Failure), world.forward.running(0):
            raise Failure("planted")

    with pytest.raises(BrokenOff, match="uBatch 0 of generation 1 broke off with Failure: planted"):
        world.within(body)
    assert world.states() == [LeaseState.SEALED, LeaseState.SEALED]
