# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A forward of several uBatches comes to a defined end, whichever of them goes wrong, and whoever hears of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from afd_dsv4.execution.cam import CamForward
from afd_dsv4.execution.forward import BrokenOff, Forward, ending
from afd_dsv4.execution.ubatch import cut
from afd_dsv4.tail.store import TailVoid
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.identity import ExecutionId, Generation
from afd_dsv4.workspace.lease import LeaseState, OrderError
from tests.model_runtime import ModelExecution, ModelRuntime

BATCH = (RequestChunk(RequestId("a"), 0, 9), RequestChunk(RequestId("b"), 0, 12))
PARTS = cut(BATCH, 15)  # in the middle of b


class Failure(Exception):
    """What a thread may end with."""


def run(runtime: ModelRuntime, forward: Forward[ModelExecution]) -> None:
    """All launches, layer by layer and uBatch by uBatch, each uBatch on a stream of its own."""
    streams = [runtime.device.stream() for _ in forward.executions]
    for layer in range(runtime.shape.layers):
        for ubatch, stream in enumerate(streams):
            forward[ubatch].launch(layer, stream)


def within(forward: Forward[ModelExecution], body: Callable[[], object]) -> None:
    with forward:
        body()


def unheard(forward: Forward[ModelExecution], ubatch: int, body: Callable[[ModelExecution], object]) -> None:
    """What a thread of a uBatch does above us: what it ends with is seen by nobody."""
    with suppress(Failure), forward.running(ubatch) as execution:
        body(execution)


def planted(_execution: ModelExecution) -> None:
    raise Failure("planted")


def states(forward: Forward[ModelExecution]) -> list[LeaseState | None]:
    return [execution.lease and execution.lease.state for execution in forward.executions]


def void(runtime: ModelRuntime, *names: str) -> None:
    """These requests are failed by name, and no other."""
    for chunk in BATCH:
        more = RequestChunk(chunk.request, chunk.end, chunk.end + 1)
        if chunk.request in names:
            with pytest.raises(TailVoid, match=f"request '{chunk.request}' lost its tail"):
                runtime.begin([more])
        else:
            with Forward(runtime, [[more]]) as forward:
                run(runtime, forward)
    assert runtime.open == {}


def test_all_executions_have_one_generation_and_are_sealed_at_the_end() -> None:
    runtime = ModelRuntime(1)
    with Forward(runtime, PARTS) as forward:
        assert [execution.lease.execution.ubatch for execution in forward.executions if execution.lease] == [0, 1]
        assert {execution.lease.execution.generation for execution in forward.executions if execution.lease} == {
            forward.generation
        }
        assert len(forward) == 2
        run(runtime, forward)
    assert states(forward) == [LeaseState.SEALED, LeaseState.SEALED]
    runtime.device.run()
    assert runtime.wrong == []
    void(runtime)


def test_a_generation_that_was_minted_before_is_kept() -> None:
    runtime = ModelRuntime(1)
    runtime.mint()
    with Forward(runtime, [[]], generation=Generation(7)) as forward:
        assert forward.generation == 7


def test_a_ubatch_without_requests_holds_nothing_and_lacks_nothing() -> None:
    runtime = ModelRuntime(1)
    with Forward(runtime, [BATCH, ()]) as forward:
        assert forward[1].lease is None
        run(runtime, forward)
    assert runtime.used == 1
    void(runtime)


def test_a_ubatch_that_the_forward_does_not_have_is_refused() -> None:
    runtime = ModelRuntime(1)
    with Forward(runtime, [[]]) as forward:
        for ubatch in (-1, 1):
            with pytest.raises(IndexError, match=f"uBatch {ubatch} of generation 1, which has 1; .*another cut"):
                forward[ubatch]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_part_that_cannot_begin_leaves_nothing_open_and_voids_those_before_it(failing: int) -> None:
    runtime = ModelRuntime(1, seats=failing + 1)
    new = [RequestChunk(RequestId(name), 0, 4) for name in "xyz"]
    parts = [[new[0]], new[1:]] if failing else [new[:2], [new[2]]]
    with pytest.raises(Exception, match="2 new requests, 1 free of") as raised:
        Forward(runtime, parts)
    assert raised.value.__context__ is None
    assert runtime.open == {}
    assert all(slot.lease is None for slot in runtime.arena.slots)
    if failing:
        with pytest.raises(TailVoid, match=r"'x' lost its tail: generation 1 ubatch 0 .* 3 launches missing"):
            runtime.begin([RequestChunk(RequestId("x"), 4, 5)])


@pytest.mark.parametrize("cam", [False, True])
def test_parts_may_come_from_whatever_can_be_gone_through_once(cam: bool) -> None:
    runtime = ModelRuntime(1)
    parts: Sequence[Sequence[RequestChunk]] = (part for part in PARTS)  # type: ignore[assignment]
    with (CamForward if cam else Forward)(runtime, parts) as forward:
        run(runtime, forward)
    assert states(forward) == [LeaseState.SEALED, LeaseState.SEALED]


@pytest.mark.parametrize("cam", [False, True])
@pytest.mark.parametrize("stop", [Failure, KeyboardInterrupt])
def test_parts_that_cannot_be_had_leave_nothing_open(cam: bool, stop: type[BaseException]) -> None:
    runtime = ModelRuntime(1)

    def parts() -> Iterator[Sequence[RequestChunk]]:
        yield PARTS[0]
        raise stop

    with pytest.raises(stop):
        (CamForward if cam else Forward)(runtime, parts())  # type: ignore[arg-type]
    assert runtime.open == {}
    assert runtime.arena.counters.leases == 0
    with pytest.raises(TypeError):
        (CamForward if cam else Forward)(runtime, [PARTS[0], 5])  # type: ignore[list-item]
    assert runtime.open == {}


@pytest.mark.parametrize(
    "second", [[[RequestChunk(RequestId("x"), 0, 4)]], [[], [], [RequestChunk(RequestId("x"), 0, 4)]]]
)
def test_a_generation_of_which_executions_are_open_is_refused_and_they_are_left_alone(
    second: list[list[RequestChunk]],
) -> None:
    runtime = ModelRuntime(1, slots=3)
    with Forward(runtime, PARTS) as forward:
        with pytest.raises(ValueError, match=r"generation 1, of which generation 1 ubatch 0 .* are open; mint one"):
            Forward(runtime, second, generation=forward.generation)
        assert states(forward) == [LeaseState.ACQUIRED, LeaseState.ACQUIRED]
        run(runtime, forward)
    with Forward(runtime, [()], generation=forward.generation) as after:
        assert after.generation == forward.generation
    void(runtime)


def test_an_exception_in_the_forward_settles_everything_and_goes_on() -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, PARTS)
    with pytest.raises(Failure):
        within(forward, lambda: (forward[0].launch(0, runtime.device.stream()), planted(forward[0])))
    assert states(forward) == [LeaseState.SEALED, LeaseState.SEALED]
    void(runtime, "a", "b")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_swallowed_exception_settles_its_execution_in_its_thread_and_breaks_the_forward(failing: int) -> None:
    runtime = ModelRuntime(1)
    streams = [runtime.device.stream() for _ in range(2)]
    forward = Forward(runtime, cut(BATCH, 9))  # between a and b

    def work(execution: ModelExecution) -> None:
        assert execution.lease is not None
        ubatch = execution.lease.execution.ubatch
        for layer in range(runtime.shape.layers):
            if (ubatch, layer) == (failing, 1):
                raise Failure("an expert is missing")
            execution.launch(layer, streams[ubatch])

    def body() -> None:
        for ubatch in (failing, 1 - failing):
            thread = threading.Thread(target=unheard, args=(forward, ubatch, work))
            thread.start()
            thread.join()
            assert states(forward)[ubatch] is LeaseState.SEALED
            assert states(forward)[1 - failing] is (LeaseState.ACQUIRED if ubatch == failing else LeaseState.SEALED)
        forward.finish(failing)  # again, as an adapter's own `finally` may do

    with pytest.raises(BrokenOff, match=f"uBatch {failing} of generation 1 broke off with Failure: an exp") as raised:
        within(forward, body)
    assert isinstance(raised.value.__cause__, Failure)
    runtime.device.run()
    assert runtime.wrong == []
    void(runtime, "ab"[failing])


def test_a_ubatch_that_continues_one_that_broke_off_is_refused_and_both_are_void() -> None:
    runtime = ModelRuntime(1)
    streams = [runtime.device.stream() for _ in range(2)]
    forward = Forward(runtime, PARTS)

    def second(execution: ModelExecution) -> None:
        execution.launch(0, streams[1])
        with pytest.raises(OrderError, match="which ended without it"):
            execution.launch(1, streams[1])

    def body() -> None:
        unheard(forward, 0, lambda execution: (execution.launch(0, streams[0]), planted(execution)))
        unheard(forward, 1, second)

    with pytest.raises(BrokenOff, match=r"uBatch 0 .* with Failure: planted"):
        within(forward, body)
    assert all(execution.lost for execution in forward.executions)
    void(runtime, "a", "b")


def test_missing_launches_break_a_forward_of_which_nobody_said_anything() -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, cut(BATCH, 9))
    with pytest.raises(BrokenOff, match=r"uBatch 1 of generation 1 broke off, and nobody said why.*1 launches missing"):
        within(forward, lambda: (run(runtime, forward), forward[1].launched.pop()))
    void(runtime, "b")


@pytest.mark.parametrize("finished", [False, True])
def test_a_ubatch_whose_lease_somebody_else_quarantines_breaks_the_forward_though_all_is_launched(
    finished: bool,
) -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, cut(BATCH, 9))

    def body() -> None:
        run(runtime, forward)
        if finished:
            forward.finish(1)
        lease = forward[1].lease
        assert lease is not None
        runtime.arena.quarantine(lease, "planted")  # a watchdog

    with pytest.raises(BrokenOff, match=r"uBatch 1 of generation 1 broke off, and nobody said why.*was quarantined"):
        within(forward, body)
    assert states(forward) == [LeaseState.SEALED, LeaseState.QUARANTINED]
    void(runtime, "b")


def test_an_exception_behind_the_last_launch_breaks_the_forward_but_no_tail() -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, PARTS)
    with pytest.raises(BrokenOff, match=r"uBatch 1 .* Failure: planted\..*tails: whole"):
        within(forward, lambda: (run(runtime, forward), unheard(forward, 1, planted)))
    void(runtime)


def test_an_error_that_short_results_cause_has_the_swallowed_exception_as_its_cause() -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, PARTS)

    def body() -> None:
        unheard(forward, 0, planted)
        raise AssertionError("nothing to concatenate")

    with pytest.raises(BrokenOff, match="Failure: planted") as raised:
        within(forward, body)
    assert isinstance(raised.value.__cause__, Failure)
    assert isinstance(raised.value.__context__, AssertionError)


@pytest.mark.parametrize("heard", [0, 1])
def test_an_error_of_one_ubatch_does_not_hide_what_another_was_ended_by(heard: int) -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, cut(BATCH, 9))  # between a and b
    errors = [KeyError("zero"), KeyError("one")]

    def ends(ubatch: int) -> None:
        with forward.running(ubatch):
            raise errors[ubatch]

    def body() -> None:
        with suppress(KeyError):
            ends(1 - heard)
        ends(heard)

    with pytest.raises(BrokenOff, match=f"uBatch {1 - heard} .* with KeyError: '{['one', 'zero'][heard]}'") as raised:
        within(forward, body)
    assert raised.value.__cause__ is errors[1 - heard]
    assert raised.value.__context__ is errors[heard]
    void(runtime, "a", "b")


def test_what_the_threads_of_several_ubatches_ended_with_is_all_named() -> None:
    runtime = ModelRuntime(1, slots=3)
    forward = Forward(runtime, [BATCH[:1], BATCH[1:], ()])

    def ends(name: str) -> None:
        raise Failure(name)

    def body() -> None:
        for ubatch, name in enumerate(("zero", "one", "two")):
            unheard(forward, ubatch, lambda _, name=name: ends(name))  # type: ignore[misc]

    with pytest.raises(BrokenOff, match=r"0 .* Failure: zero; uBatch 1 with Failure\('one'\); uBatch 2 with .*'two'"):
        within(forward, body)


def test_what_a_thread_ended_with_first_is_the_cause() -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, PARTS)
    errors = [Failure("first"), Failure("second")]

    def body() -> None:
        run(runtime, forward)
        for error in errors:
            forward.finish(1, error)

    with pytest.raises(BrokenOff, match="Failure: first") as raised:
        within(forward, body)
    assert raised.value.__cause__ is errors[0]


def test_a_finish_that_fails_in_a_thread_which_swallows_that_breaks_the_forward() -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, PARTS)
    lease = forward[1].lease
    assert lease is not None

    def body() -> None:
        run(runtime, forward)
        lease.seal()  # by somebody who must not
        with pytest.raises(OrderError, match="sealed after it was sealed"), forward.running(1):
            pass

    with pytest.raises(BrokenOff, match="uBatch 1 of generation 1 broke off with OrderError") as raised:
        within(forward, body)
    assert isinstance(raised.value.__cause__, OrderError)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_never_replaced(stop: type[BaseException]) -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, PARTS)

    def body() -> None:
        unheard(forward, 0, planted)
        raise stop

    with pytest.raises(stop):
        within(forward, body)
    assert runtime.open == {}


class NoEnd(ModelRuntime):
    """One that cannot settle what is left open."""

    def end_forward(self, generation: Generation) -> tuple[ExecutionId, ...]:
        raise RuntimeError("planted: no end")


@pytest.mark.parametrize("stop", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["a part that cannot begin", "its body", "a forward without uBatches"])
def test_what_breaks_a_forward_goes_on_also_where_its_end_fails_and_that_is_logged(
    where: str, stop: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    runtime = NoEnd(1)
    error = stop("planted: first")

    def begin(*_: object, **__: object) -> ModelExecution:
        raise error

    def raises() -> None:
        raise error

    def breaks() -> None:
        if where == "its body":
            within(Forward(runtime, PARTS), raises)
        elif where == "a part that cannot begin":
            runtime.begin = begin  # type: ignore[method-assign]
            Forward(runtime, PARTS)
        else:
            with ending(runtime, runtime.mint()):
                raise error

    with caplog.at_level(logging.ERROR, "vllm.plugins.afd_dsv4"), pytest.raises(stop, match="planted: first") as raised:
        breaks()
    assert raised.value is error
    (record,) = caplog.records
    assert record.getMessage() == "afd-dsv4: not all that generation 1 left open is settled"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "planted: no end"


def test_an_end_that_fails_is_told_where_nothing_else_broke_the_forward() -> None:
    runtime = NoEnd(1)
    with pytest.raises(RuntimeError, match="planted: no end"):
        within(Forward(runtime, PARTS), lambda: None)
    with pytest.raises(RuntimeError, match="planted: no end"), ending(runtime, runtime.mint()):
        pass


def test_a_thread_that_ends_after_its_forward_changes_nothing() -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, PARTS)
    with pytest.raises(BrokenOff):
        within(forward, lambda: None)
    forward.finish(0)
    with pytest.raises(OrderError, match="touches its slot after it was sealed"):
        forward[0].launch(0, runtime.device.stream())
    assert states(forward) == [LeaseState.SEALED, LeaseState.SEALED]


def test_a_forward_is_used_once() -> None:
    runtime = ModelRuntime(1)
    forward = Forward(runtime, [[]])
    within(forward, lambda: None)
    with pytest.raises(RuntimeError, match="generation 1 is over; make a new forward"):
        within(forward, lambda: None)
