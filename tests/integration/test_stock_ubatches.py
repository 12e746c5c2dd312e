# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""uBatches and stages on both executors: each launch finds its execution, and each execution its end.

Threads take turns as vllm-ascend's and afd-plugin's threads of uBatches do: one runs at a time, each turn is handed
over, which uBatch is running is a field of the process, and nobody hears of what a thread raises. The operator is
called by its name, as the attention calls it, with the stand-ins of the adapter. Rows are those of the definition,
whichever executor launches; the afd executor cuts its larger launches into tiles.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0 import launches as adapter
from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.launches import Launches, UnknownLaunch
from afd_dsv4.compat.contract import Verdict
from afd_dsv4.compat.patch import DriftError
from afd_dsv4.compressor import stock
from afd_dsv4.compressor.afd import AfdRuntime
from afd_dsv4.compressor.stock import StockExecution, StockRuntime, call_operator
from afd_dsv4.execution.cam import CamForward
from afd_dsv4.execution.forward import BrokenOff, Forward
from afd_dsv4.execution.substep import Lane, drafting
from afd_dsv4.execution.ubatch import parts
from afd_dsv4.geometry import Compressor, ModelGeometry
from afd_dsv4.softnpu import runtime as softnpu
from afd_dsv4.tail.store import TailFull, TailVoid
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted, Settlement, StillLeased
from afd_dsv4.workspace.lease import LeaseState, OrderError
from afd_dsv4.workspace.order import check
from afd_dsv4.workspace.trace import Trace
from tests.stock_world import HIDDEN, LAYERS, Request, World, small_hidden_size

__all__ = ["small_hidden_size"]  # a fixture

pytestmark = pytest.mark.npu

EXECUTORS = {"stock": StockRuntime, "afd": partial(AfdRuntime, tile_tokens=128)}
on_both = pytest.mark.parametrize("executor", EXECUTORS)

VERDICT = Verdict(True, (), "made-up", frozenset(patch.recorded_as for patch in adapter._OPERATOR.patches))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    softnpu.set_schedule(0)
    torch.npu.synchronize()
    stock._NEVER_FREED.clear()
    assert not adapter._OPERATOR.applied


class Failure(Exception):
    """What a thread may end with."""


class Engine:
    """A world whose launches go by the operator's name.

    Args:
        seed, limits: of the world.
        names: of its requests.
        executor: which of `EXECUTORS`.

    Attributes:
        running: index of the uBatch that runs: what the adapter reads in the forward context.
    """

    def __init__(self, seed: int = 0, names: str = "abc", executor: str = "stock", **limits: Any) -> None:
        self.compressors = LAYERS.compressors
        places = [(compressor.layer, compressor.kind) for compressor in self.compressors]
        self.launches = Launches(torch.ops._C_ascend.compressor, places, torch.device("npu"))
        self.world = World(seed, cls=EXECUTORS[executor], operator=self.launches.queue, **limits)
        self.runtime = self.world.runtime
        self.requests: dict[str, Request] = {name: self.world.request() for name in names}
        self.running = 0

    def chunks(self, **tokens: int) -> list[RequestChunk]:
        found = []
        for name, count in tokens.items():
            start = self.requests[name].position
            found.append(RequestChunk(RequestId(name), start, start + count))
            self.requests[name].position += count
        return found

    def launch(
        self, chunks: Sequence[RequestChunk], compressor: Compressor, decodes: int, state: torch.Tensor | None = None
    ) -> None:
        """What the attention of one layer does: prefill, then decode."""
        layer, kind = compressor.layer, compressor.kind
        at = (layer, kind)
        for rows, metadata in (
            (slice(decodes, None), self.launches.metadata.prefill),
            (slice(0, decodes), self.launches.metadata.decode),
        ):
            if split := chunks[rows]:
                x, cos, sin, cu_seqlens = self.world.arguments(self.requests, split, kind)
                true_start = cu_seqlens[:-1]  # of no consequence
                place = self.launches.states[at] if state is None else state
                out = call_operator(
                    x, self.world.on_device[at], kind, place, metadata.block_table, true_start, cu_seqlens, cos, sin
                )
                self.world.pending.append((compressor, split, out))

    def attention(self, layer: int, ubatch: int, chunks: Sequence[RequestChunk], decodes: int = 0) -> None:
        self.running = ubatch
        for compressor in self.compressors:
            if compressor.layer == layer and chunks:
                self.launch(chunks, compressor, decodes)

    @property
    def layers(self) -> list[int]:
        return sorted({compressor.layer for compressor in self.compressors})

    def check(self) -> None:
        self.world.check_all(self.requests)
        assert self.world.different == 0
        assert check(self.runtime.trace.records(), self.runtime.trace.dropped).violations == ()

    def free(self) -> None:
        """Every slot is free, every page has one owner."""
        for slot in self.runtime.arena.slots:
            assert slot.lease is None
            assert slot.quarantined is None
            assert slot.last is None or slot.last.over()
        for ratio in self.runtime.shapes:
            owners = self.runtime.store.owners(ratio)
            assert np.array_equal(owners, np.arange(1, self.runtime.store.pages(ratio)))


class Threads:
    """Threads of uBatches that take turns after each layer.

    Args:
        engine: whose launches.
        forward: with an execution for each.
        split: chunks by uBatch.
        decodes: of each.
        streams: of each; afd-plugin's share one.
        fail: uBatch and layer before which its thread raises.
    """

    def __init__(
        self,
        engine: Engine,
        forward: Forward[StockExecution],
        split: Sequence[Sequence[RequestChunk]],
        decodes: Sequence[int],
        streams: Sequence[Any],
        fail: tuple[int, int] | None = None,
    ) -> None:
        self.engine, self.forward, self.split = engine, forward, split
        self.decodes, self.streams, self.fail = decodes, streams, fail
        self.turns = [threading.Semaphore(int(ubatch == 0)) for ubatch in range(len(split))]
        self.raised: dict[int, BaseException] = {}
        threads = [threading.Thread(target=self._run, args=(ubatch,)) for ubatch in range(len(split))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, ubatch: int) -> None:
        left = list(self.engine.layers)
        try:
            with self.forward.running(ubatch), torch.npu.stream(self.streams[ubatch]):
                while left:
                    self.turns[ubatch].acquire()
                    if self.fail == (ubatch, left[0]):
                        raise Failure("an expert is missing")
                    self.engine.attention(left.pop(0), ubatch, self.split[ubatch], self.decodes[ubatch])
                    self.turns[(ubatch + 1) % len(self.turns)].release()
        except Exception as error:
            self.raised[ubatch] = error
        for _ in self.engine.layers:
            self.turns[(ubatch + 1) % len(self.turns)].release()


def dbo(engine: Engine, split: Sequence[Sequence[RequestChunk]], decodes: Sequence[int], **how: Any) -> Threads:
    """One forward of threads."""
    with (
        Forward(engine.runtime, split) as forward,
        engine.launches.of(forward.executions, decodes, lambda: engine.running),
    ):
        return Threads(engine, forward, split, decodes, **how)


@pytest.fixture(params=EXECUTORS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with bound(Engine(executor=request.param)) as engine:
        yield engine


@contextmanager
def bound(engine: Engine) -> Iterator[Engine]:
    engine.launches.bind(VERDICT)
    try:
        yield engine
    finally:
        engine.launches.unbind()


@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
def test_launches_of_two_threads_find_the_execution_of_their_ubatch(engine: Engine, streams: str) -> None:
    softnpu.set_schedule(3, 200)
    at = [engine.world.streams[0], engine.world.streams[streams != "one stream"]]
    dbo(engine, parts(engine.chunks(a=5, b=130, c=9), [70, 74]), [1, 0], streams=at)  # in the middle of b
    dbo(engine, parts(engine.chunks(c=1, a=2, b=200), [2, 201]), [1, 1], streams=at)  # in the middle of a
    dbo(engine, parts(engine.chunks(b=1, a=300), [301, 0]), [1, 0], streams=at)
    engine.check()
    engine.free()
    assert engine.world.compared > 0


@on_both
def test_three_ubatches_may_share_one_request(executor: str) -> None:
    softnpu.set_schedule(5, 200)
    with bound(Engine(executor=executor, slots=3)) as engine:
        streams = [*engine.world.streams, torch.npu.Stream()]
        dbo(engine, parts(engine.chunks(a=7, b=300), [100, 100, 107]), [1, 0, 0], streams=streams)
        engine.check()
        engine.free()


@on_both
def test_a_cut_request_whose_launches_do_not_wait_for_the_ubatch_before_is_wrong(executor: str) -> None:
    """Negative control: without the edge between uBatches the rows differ, and the order checker says so."""
    engine = Engine(executor=executor, ordered=False)
    for pool in engine.runtime.pools.values():  # where the right rows of a test before may still lie
        pool.zero_()
    torch.npu.synchronize()
    first, second = engine.world.streams
    split = parts(engine.chunks(a=300), [150, 150])
    softnpu.hang_stream(first)
    with Forward(engine.runtime, split) as forward:
        for compressor in engine.compressors:
            for ubatch, stream in enumerate((first, second)):
                engine.world.step(forward[ubatch], engine.requests, split[ubatch], compressor, stream)
    second.synchronize()
    softnpu.release_stream(first)
    engine.world.check_all(engine.requests)
    assert engine.world.different > 0
    assert check(engine.runtime.trace.records()).violations


@pytest.mark.parametrize("failing", [0, 1])
def test_a_swallowed_exception_of_one_thread_is_the_forwards(engine: Engine, failing: int) -> None:
    split = parts(engine.chunks(a=40, b=60, c=30), [100, 30])  # between b and c
    streams = [engine.world.streams[0]] * 2
    with pytest.raises(BrokenOff, match=f"uBatch {failing} .* broke off with Failure: an expert is missing"):
        dbo(engine, split, [0, 0], streams=streams, fail=(failing, 1))
    engine.check()
    lost = "c" if failing else "ab"
    for name in "abc":
        chunk = engine.chunks(**{name: 1})
        if name in lost:
            with pytest.raises(TailVoid, match=r"of 5 launches missing, first layer 1 c128"):
                engine.runtime.begin(chunk)
            engine.runtime.end_request(RequestId(name))
        else:
            dbo(engine, [chunk], [0], streams=streams)
    engine.check()
    engine.free()


def test_a_swallowed_exception_of_the_first_thread_takes_a_second_that_continues_it_along(engine: Engine) -> None:
    split = parts(engine.chunks(a=40, b=60, c=30), [70, 60])
    with pytest.raises(BrokenOff, match=r"uBatch 0 .* with Failure"):
        dbo(engine, split, [0, 0], streams=engine.world.streams, fail=(0, 1))
    engine.check()
    for name in "abc":
        with pytest.raises(TailVoid, match=r"launches missing, first layer 1 c128"):
            engine.runtime.begin(engine.chunks(**{name: 1}))
    engine.free()


def test_a_launch_of_a_ubatch_that_was_not_announced_is_refused(engine: Engine) -> None:
    chunks = engine.chunks(a=9)
    with (
        Forward(engine.runtime, [chunks]) as forward,
        engine.launches.of(forward.executions, [0], lambda: engine.running),
    ):
        for wrong in (1, -1):
            with pytest.raises(UnknownLaunch, match=f"c4 of layer 0 is launched by uBatch {wrong} of a forward that"):
                engine.attention(0, wrong, chunks)
        for layer in engine.layers:
            engine.attention(layer, 0, chunks)
    engine.check()
    with pytest.raises(ValueError, match="2 executions and 1 numbers of decodes; give one of each"):
        engine.launches.of([forward[0]] * 2, [0])


def test_metadata_of_another_ubatch_is_refused(engine: Engine) -> None:
    split = parts(engine.chunks(a=40, b=60, c=30), [40, 90])
    forward = Forward(engine.runtime, split)

    def body() -> None:
        with engine.launches.of(forward.executions, [0, 0], lambda: engine.running):
            engine.attention(0, 0, split[1])

    with pytest.raises(ValueError, match=r"90 tokens for 1 requests that have 40 .* another batch or uBatch"):
        within(forward, body)


def within(forward: Forward[StockExecution], body: Callable[[], object]) -> None:
    with forward:
        body()


def test_a_state_that_is_nobodys_is_refused_in_a_thread_of_the_forward_and_native_in_others(engine: Engine) -> None:
    chunks = engine.chunks(a=9)
    theirs = torch.zeros(4, 8, 7, device="npu")  # which the true operator refuses, in its own words
    compressor = engine.compressors[0]
    found: dict[str, BaseException | None] = {}

    def run(name: str, ours: bool) -> None:
        try:
            if ours:
                engine.attention(0, 0, chunks)
            engine.launch(chunks, compressor, 0, theirs)
        except Exception as error:
            found[name] = error
        else:
            found[name] = None

    with (
        suppress(BrokenOff),
        Forward(engine.runtime, [chunks]) as forward,
        engine.launches.of(forward.executions, [0]),
    ):
        for name, ours in (("ours", True), ("another engine's", False)):
            thread = threading.Thread(target=run, args=(name, ours))
            thread.start()
            thread.join()
    assert isinstance(found["ours"], UnknownLaunch)
    assert "state_cache" in str(found["another engine's"])


def test_launches_of_an_idle_forward_are_nobody_s(engine: Engine) -> None:
    with engine.launches.idling(engine.runtime):
        for layer in engine.layers:
            engine.attention(layer, 0, engine.chunks(a=130))
    torch.npu.synchronize()
    assert len(engine.world.pending) == len(engine.compressors)
    engine.world.pending = []
    engine.requests["a"].position = 0
    assert engine.runtime.arena.counters.leases == 0
    dbo(engine, [engine.chunks(a=130)], [0], streams=engine.world.streams)
    engine.check()
    engine.free()


@pytest.mark.parametrize("first", [0, 1])
def test_announcements_that_end_in_any_order_leave_what_is_not_over(engine: Engine, first: int) -> None:
    chunks = engine.chunks(a=9)
    forward = Forward(engine.runtime, [chunks])
    outer = engine.launches.of(forward.executions, [0])
    inner = engine.launches.of(forward.executions, [0]) if first else engine.launches.idling(engine.runtime)
    outer.__enter__()
    inner.__enter__()
    ends = [inner, outer]
    ends.pop(first).__exit__(None, None, None)
    if not first:  # the outer one is what launches are of: all of the forward's
        for layer in engine.layers:
            engine.attention(layer, 0, chunks)
    else:
        engine.attention(0, 0, chunks)
    ends.pop().__exit__(None, None, None)
    with pytest.raises(UnknownLaunch, match="outside a forward that the runner announced"):
        engine.attention(0, 0, chunks)
    with pytest.raises(UnknownLaunch, match="outside a forward that the runner announced"):
        engine.attention(LAYERS.num_layers - 1, 0, chunks)
    with suppress(BrokenOff):
        within(forward, lambda: None)


def test_a_thread_that_announces_while_another_one_s_forward_runs_is_refused(engine: Engine) -> None:
    found: list[BaseException] = []

    def other() -> None:
        try:
            with engine.launches.idling(engine.runtime):
                pass
        except UnknownLaunch as error:
            found.append(error)

    chunks = engine.chunks(a=9)
    with Forward(engine.runtime, [chunks]) as forward:
        with engine.launches.of(forward.executions, [0]):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            for layer in engine.layers:  # and the announced one goes on
                engine.attention(layer, 0, chunks)
        assert "while that of another thread runs" in str(found[0])
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(found) == 1
    engine.check()


def test_a_thread_that_launched_for_a_forward_may_run_a_native_engine_once_that_is_over(engine: Engine) -> None:
    chunks = engine.chunks(a=9)
    theirs = torch.zeros(4, 8, 7, device="npu")  # which the true operator refuses, in its own words
    launched, over = threading.Event(), threading.Event()
    found: list[BaseException] = []

    def other() -> None:
        for layer in engine.layers:
            engine.attention(layer, 0, chunks)
        launched.set()
        over.wait(60)
        try:
            engine.launch(chunks, engine.compressors[0], 0, theirs)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=other)
    with Forward(engine.runtime, [chunks]) as forward, engine.launches.of(forward.executions, [0]):
        thread.start()
        assert launched.wait(60)
    over.set()
    thread.join()
    assert not isinstance(found[0], UnknownLaunch)
    assert "state_cache" in str(found[0])


class Asked:
    """In place of the true operator: keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def default(self, x: torch.Tensor, *_: Any, **named: Any) -> torch.Tensor:
        self.calls.append(named)
        return x


def test_each_launch_has_its_own_norm_and_rope_and_never_seqused() -> None:
    compressor, asked = LAYERS.compressors[0], Asked()
    place = (compressor.layer, compressor.kind)
    launches = Launches(asked, [place], torch.device("npu"))
    engine = Engine()
    engine.runtime._operator = launches.queue
    x, cos, sin, cu_seqlens = engine.world.arguments(engine.requests, engine.chunks(a=9), compressor.kind)
    weights = engine.world.on_device[place]
    owner = adapter._Owner(weakref.ref(launches), *place)

    def launch(eps: float, rope: int, seqused: torch.Tensor | None) -> None:
        launches.launch(
            owner,
            x,
            weights.wkv,
            weights.wgate,
            launches.states[place],
            weights.ape,
            weights.norm_weight,
            sin,
            cos,
            launches.metadata.prefill.block_table,
            cu_seqlens,
            seqused,
            cu_seqlens[:-1],
            rope,
            compressor.kind.ratio,
            compressor.kind.coff,
            eps,
            2,
            1,
        )

    with launches.idling(engine.runtime):
        for eps, rope in ((1e-6, 64), (1e-5, 64), (1e-5, 32), (1e-6, 64)):
            launch(eps, rope, None)
        with pytest.raises(UnknownLaunch, match="launched with ratio, coff, rotary mode, cache mode and seqused"):
            launch(1e-6, 64, cu_seqlens[1:])
    found = [(call["norm_eps"], call["rope_head_dim"]) for call in asked.calls]
    assert found == [(1e-6, 64), (1e-5, 64), (1e-5, 32), (1e-6, 64)]
    assert all(call["seqused"] is None for call in asked.calls)
    engine.runtime.close(drain_s=5)


def test_a_bind_that_fails_leaves_nobody_s_stand_ins_behind() -> None:
    before = dict(adapter._OWNERS)
    places = [(compressor.layer, compressor.kind) for compressor in LAYERS.compressors]
    launches = Launches(torch.ops._C_ascend.compressor, places, torch.device("npu"))
    with pytest.raises(DriftError):
        launches.bind(Verdict(False, ("planted",), "made-up", frozenset()))
    assert before == adapter._OWNERS
    assert not adapter._OPERATOR.applied


def stages(engine: Engine, forward: CamForward[StockExecution], fail: Callable[[str, int, int], None]) -> None:
    """The two-stage schedule; `fail` is asked at every point and may raise."""
    split = [execution._chunks for execution in forward.executions]
    steps = [(layer, stage) for layer in engine.layers for stage in range(len(split))]

    def attention(layer: int, stage: int) -> None:
        fail("attention", layer, stage)
        engine.attention(layer, stage, split[stage])

    def send(layer: int, stage: int) -> None:
        fail("before the send", layer, stage)
        forward.sent(layer, stage)
        fail("behind the send", layer, stage)

    attention(*steps[0])
    send(*steps[0])
    for before, after in zip(steps, [*steps[1:], None], strict=True):
        if after is not None:
            attention(*after)
        assert forward.received(before[1]) == before[0]
        if after is not None:
            send(*after)


def cam(engine: Engine, chunks: Sequence[RequestChunk], ends: Sequence[int], **how: Any) -> None:
    slices = list(zip([0, *ends], ends, strict=False))
    with (
        CamForward.from_stages(engine.runtime, chunks, slices) as forward,
        engine.launches.of(forward.executions, [0] * len(slices), lambda: engine.running),
    ):
        stages(engine, forward, how.get("fail", lambda *_: None))


def test_two_stages_compress_the_rows_of_the_definition(engine: Engine) -> None:
    for tokens, ends in (({"a": 99, "b": 40}, [70, 139]), ({"b": 1, "a": 300}, [150, 301]), ({"a": 1}, [1, 1])):
        cam(engine, engine.chunks(**tokens), ends)
    engine.check()
    engine.free()
    assert engine.runtime.arena.counters.leases == 5  # the stage without tokens leases nothing


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("where", ["attention", "before the send", "behind the send"])
def test_a_fault_at_any_point_of_the_schedule_ends_defined(engine: Engine, where: str, layer: int, stage: int) -> None:
    cam(engine, engine.chunks(a=10, b=10, c=3), [15, 23])

    def fail(*at: object) -> None:
        if at == (where, layer, stage):
            raise Failure("planted")

    with pytest.raises(Failure):
        cam(engine, engine.chunks(a=10, b=10), [15, 20], fail=fail)
    # A stage's attention comes before the other's item is received.
    under_way = (where != "before the send" and (layer, stage) != (0, 0)) or where == "behind the send"
    engine.check()
    arena = engine.runtime.arena
    assert arena.counters.quarantined == (2 if under_way else 0)
    # Where the last launches of a stage are queued, the rows of its requests are there: b is in both, a in the first.
    lost = {("before the send", 2, 0): "b", ("before the send", 2, 1): ""}.get((where, layer, stage), "ab")
    for name in lost:
        with pytest.raises(TailVoid, match="is in doubt: generation" if under_way else "launches missing"):
            engine.runtime.begin(engine.chunks(**{name: 1}))
    if under_way:
        with pytest.raises(Exhausted, match="2 are quarantined for ever") as raised:
            engine.runtime.begin(engine.chunks(c=1))
        assert raised.value.fatal
        assert len(engine.runtime.close()) == 2
    else:
        cam(engine, engine.chunks(**{name: 4 for name in "abc" if name not in lost}), [2, 4 * (3 - len(lost))])
        engine.check()
        engine.free()


def test_a_request_that_is_cancelled_inside_a_forward_keeps_its_pages_until_both_ubatches_are_over() -> None:
    with bound(Engine(slots=3)) as engine:
        cancelled(engine)


def cancelled(engine: Engine) -> None:
    split = parts(engine.chunks(a=40, b=60, c=30), [70, 60])
    first, second = engine.world.streams
    with Forward(engine.runtime, split) as forward:
        for index, compressor in enumerate(engine.compressors):
            if index == 2:
                engine.runtime.end_request(RequestId("b"))  # in the middle, cut in two
                with pytest.raises(TailFull, match=r"1 more behind open executions"):
                    engine.runtime.begin([RequestChunk(RequestId("d"), 0, 4)])
            for ubatch, stream in enumerate((first, second)):
                engine.world.step(forward[ubatch], engine.requests, split[ubatch], compressor, stream)
    before, queued, engine.world.pending = dict(engine.requests), engine.world.pending, []
    engine.requests["b"] = engine.world.request()  # its successor has its name and its seat
    dbo(engine, [engine.chunks(b=130, a=1)], [0], streams=[first])
    engine.check()
    engine.world.pending = queued
    engine.world.check_all(before)
    assert engine.world.different == 0
    engine.free()


def test_a_forward_with_open_executions_is_not_closed_over_and_its_end_lets_it(engine: Engine) -> None:
    split = parts(engine.chunks(a=40, b=60), [70, 30])
    forward = Forward(engine.runtime, split)
    with pytest.raises(StillLeased, match="2 leases may still touch it"):
        engine.runtime.close(drain_s=5)
    assert not engine.runtime.arena.closed
    with pytest.raises(BrokenOff):
        within(forward, lambda: None)
    assert engine.runtime.close(drain_s=5) == ()


def test_what_was_quarantined_is_returned_at_the_close_and_finishing_it_later_does_nothing(engine: Engine) -> None:
    split = parts(engine.chunks(a=40, b=60), [70, 30])
    forward = Forward(engine.runtime, split)
    given = engine.runtime.abandon(forward.generation, "planted")
    assert [execution.ubatch for execution in given] == [0, 1]
    assert engine.runtime.abandon(forward.generation, "again") == ()
    forward.finish(0)
    with pytest.raises(BrokenOff, match="was quarantined: planted"):
        within(forward, lambda: None)
    with pytest.raises(OrderError, match="after it was quarantined"):
        engine.world.step(forward[1], engine.requests, split[1], engine.compressors[0], engine.world.streams[0])
    lost = engine.runtime.close(drain_s=1)
    assert [lease.state for lease in lost] == [LeaseState.QUARANTINED] * 2
    assert engine.runtime in stock._NEVER_FREED


@pytest.mark.parametrize("cam", [False, True], ids=["ubatches", "stages"])
@pytest.mark.parametrize("whole", [False, True], ids=["launches missing", "all launched"])
def test_what_others_quarantine_while_it_is_open_breaks_its_forward(engine: Engine, whole: bool, cam: bool) -> None:
    split = parts(engine.chunks(a=40, b=60), [40, 60])
    forward = (CamForward if cam else Forward)(engine.runtime, split)
    lease = forward[1].lease
    assert lease is not None

    def body() -> None:
        for compressor in engine.compressors if whole else []:
            for stage, chunks in enumerate(split):
                stream = engine.world.streams[0]
                engine.world.step(forward[stage], engine.requests, chunks, compressor, stream)
        if not whole:
            forward.finish(0)
        engine.runtime.arena.quarantine(lease, "planted")

    with pytest.raises(BrokenOff, match=r"uBatch [01] of generation"):
        within(forward, body)
    assert forward[1].lost == f"{lease.execution} is in doubt: planted"
    assert (forward[0].lost is None) == whole
    assert engine.runtime.end_forward(forward.generation) == ()
    with pytest.raises(TailVoid, match="is in doubt: planted"):
        engine.runtime.begin([RequestChunk(RequestId("b"), 60, 61)])
    assert engine.runtime.close(drain_s=5) == (lease,)


class FailingTrace(Trace):
    """One that fails as the first lease is quarantined."""

    failed = False

    def add(self, *record: Any) -> None:
        super().add(*record)
        if record[0] == "quarantine" and not self.failed:
            self.failed = True
            raise RuntimeError("planted: no memory")


def test_one_quarantine_that_fails_leaves_no_other_execution_to_be_sealed_and_no_tail_to_be_read() -> None:
    engine = Engine(trace=FailingTrace())
    forward = Forward(engine.runtime, parts(engine.chunks(a=40, b=60), [40, 60]))
    with pytest.raises(RuntimeError, match="planted: no memory"):
        engine.runtime.abandon(forward.generation, "planted")
    with pytest.raises(BrokenOff, match="was quarantined: planted"):
        within(forward, lambda: None)
    assert [each.lease and each.lease.state for each in forward.executions] == [LeaseState.QUARANTINED] * 2
    for name in "ab":
        with pytest.raises(TailVoid, match="is in doubt: planted"):
            engine.runtime.begin([RequestChunk(RequestId(name), 60, 61)])
    assert len(engine.runtime.close(drain_s=1)) == 2


def test_after_an_elastic_restart_what_was_before_it_is_stale(engine: Engine) -> None:
    dbo(engine, [engine.chunks(a=40)], [0], streams=engine.world.streams)
    old = engine.runtime.arena.slots[0].last
    assert old is not None
    torch.npu.synchronize()
    assert engine.runtime.arena.settle(old) is Settlement.RELEASED
    engine.runtime.close(drain_s=5)
    assert engine.runtime.arena.settle(old) is Settlement.ALREADY_RELEASED
    after = Engine()
    for _ in range(2):
        assert after.runtime.arena.settle(old) is Settlement.STALE_GENERATION
        assert after.runtime.arena.settle(old.execution) is Settlement.STALE_GENERATION
        with Forward(after.runtime, [after.chunks(a=4)]) as forward:
            assert forward.generation > old.execution.generation
            for compressor in after.compressors:
                after.world.step(forward[0], after.requests, forward[0]._chunks, compressor, after.world.streams[0])
    after.check()


def test_a_draft_lane_has_a_runtime_of_its_own_and_other_draft_layers_cost_nothing() -> None:
    target = Engine(names="a")
    layer = ModelGeometry("a draft layer", HIDDEN, 1, (4,))
    lane = Lane(2, 0, 4)
    draft = World(7, geometry=layer, slots=1)
    requests = {"a": draft.request()}
    runtimes: dict[Lane, StockRuntime] = {lane: draft.runtime}
    chunks = target.chunks(a=40)
    with Forward(target.runtime, [chunks]) as forward:
        for compressor in target.compressors:
            target.world.step(forward[0], target.requests, chunks, compressor, target.world.streams[0])
    with drafting(runtimes, 1, chunks, forward.generation) as execution:
        assert execution is None
    assert draft.runtime.arena.counters.leases == 0
    with drafting(runtimes, 2, chunks, forward.generation) as execution:
        assert execution is not None
        assert execution.lease is not None
        assert execution.lease.execution.generation == forward.generation
        assert execution.lease.execution.substep == 2
        for compressor in layer.compressors:
            draft.step(execution, requests, chunks, compressor, draft.streams[0])
    assert execution.lease.state is LeaseState.SEALED
    target.check()
    draft.check_all(requests)
    assert draft.different == 0 < draft.compared
    with (
        pytest.raises(ValueError, match="substep 0 is none of a draft"),
        drafting(runtimes, 0, chunks, forward.generation),
    ):
        pass
