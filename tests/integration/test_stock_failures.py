# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What goes wrong around the stock executor, each time to a defined end.

Behind every failure: requests that it did not touch go on with the right rows, the others are failed by name, every
workspace slot is free or counted, every page has one owner, and the order checker finds nothing. Streams really hang,
die and fail on the software NPU; time is a number that the test sets.
"""

from __future__ import annotations

import gc
import random
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from afd_dsv4.compressor import stock
from afd_dsv4.compressor.stock import StockExecution, StockRuntime
from afd_dsv4.execution.forward import BrokenOff, Forward
from afd_dsv4.execution.ubatch import cut
from afd_dsv4.geometry import preset
from afd_dsv4.softnpu import runtime as softnpu
from afd_dsv4.tail.store import TailFull, TailVoid
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import ArenaClosed, Exhausted, Settlement, StillLeased
from afd_dsv4.workspace.identity import ExecutionId
from afd_dsv4.workspace.lease import LeaseState, OrderError
from afd_dsv4.workspace.order import Kind, check
from afd_dsv4.workspace.staging import StagingLost
from tests.stock_world import HIDDEN, Request, World, small_hidden_size

__all__ = ["small_hidden_size"]  # a fixture

pytestmark = pytest.mark.npu

PROMPTS = {"a": 126, "b": 200, "c": 61}


@pytest.fixture(autouse=True)
def no_fault_stays() -> Iterator[None]:
    gc.collect()
    gc.disable()  # torch records events where it frees pinned memory, and a fault there ends the process
    yield
    softnpu.clear_faults()
    softnpu.set_race_detection(False)
    softnpu.clear_races()
    gc.enable()
    softnpu.set_schedule(0)
    with suppress(RuntimeError):  # what was made to fail is reported here
        torch.npu.synchronize()
    stock._NEVER_FREED.clear()


class Engine:
    """What a model runner does around the executor: requests, positions, forwards; time stands still.

    Args:
        names: of the requests.
        limits: more arguments of the world.
    """

    def __init__(self, names: str = "abc", **limits: Any) -> None:
        self.now = 0.0
        self.world = World(0, clock=lambda: self.now, **limits)
        self.runtime = self.world.runtime
        self.streams = self.world.streams
        self.requests: dict[str, Request] = {name: self.world.request() for name in names}

    def prompts(self) -> None:
        """A first forward for every request, over before this returns."""
        tokens = {name: PROMPTS[name] for name in self.requests}
        self.forward(tokens)
        self.compare()

    def chunks(self, tokens: Mapping[str, int]) -> list[RequestChunk]:
        """The next chunks of some requests; an engine that plans them expects them to be computed."""
        found = []
        for name, count in tokens.items():
            start = self.requests[name].position
            found.append(RequestChunk(RequestId(name), start, start + count))
            self.requests[name].position += count
        return found

    def forward(self, tokens: Mapping[str, int], *, stream: Any = None) -> None:
        """All launches of a forward on one stream; streams of the world by uBatch where none is given."""
        before = self.world.streams
        self.world.streams = [stream, stream] if stream else before
        try:
            self.world.queue(self.requests, self.chunks(tokens))
        finally:
            self.world.streams = before

    def launch(self, execution: StockExecution, chunks: Sequence[RequestChunk], index: int, stream: Any) -> None:
        """One launch: the compressor of that index."""
        self.world.step(execution, self.requests, chunks, self.world.geometry.compressors[index], stream)

    def start_anew(self, *names: str) -> None:
        """What an engine does with requests that are failed by name: end them, and let others have the room."""
        for name in names:
            if self.runtime.store.seat(RequestId(name)) is not None:  # else it never began
                self.runtime.end_request(RequestId(name))
            del self.requests[name]
            self.requests[f"after {name}"] = self.world.request()

    def compare(self, *streams: Any) -> None:
        self.world.check_all(self.requests, streams)
        assert self.world.different == 0

    def void(self, *names: str, match: str = "") -> None:
        """These requests are failed by name, whoever asks."""
        for name in names:
            start = self.requests[name].position
            with pytest.raises(TailVoid, match=f"request '{name}' lost its tail: .*{match}"):
                self.runtime.begin([RequestChunk(RequestId(name), start, start + 1)])

    def settled(self, *, lost_slots: int = 0, lost_seats: int = 0, streams: Sequence[Any] = ()) -> None:
        """The state behind a failure: everybody goes on, and everything is free or counted."""
        names = [name for name in self.requests if self.requests[name].position < self.world.truth.length]
        tokens = {name: min(150, self.world.truth.length - self.requests[name].position) for name in names}
        compared = self.world.compared
        self.forward(tokens, stream=streams[0] if streams else None)
        self.compare(*streams)
        assert self.world.compared > compared
        accounted(self, lost_slots=lost_slots, lost_seats=lost_seats)


def accounted(engine: Engine, *, lost_slots: int = 0, lost_seats: int = 0) -> None:
    """Every slot is free or counted, every page has one owner, every reuse was ordered."""
    runtime = engine.runtime
    arena = runtime.arena
    for slot in arena.slots:
        assert slot.lease is None, f"{slot.lease} is open"
        assert slot.quarantined or slot.last is None or slot.last.over(), f"{slot.last} is not over"
    assert sum(bool(slot.quarantined) for slot in arena.slots) == lost_slots
    assert len(runtime.seats_in_doubt()) == lost_seats
    assert len([lease for lease in arena.live() if lease.state is LeaseState.QUARANTINED]) == lost_slots
    assert arena.counters.quarantined >= lost_slots
    for ratio in runtime.shapes:
        assert np.array_equal(runtime.store.owners(ratio), np.arange(1, runtime.store.pages(ratio)))
    assert check(runtime.trace.records(), runtime.trace.dropped).violations == ()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_request_cancelled_with_two_forwards_in_flight_leaves_its_seat_to_the_next_at_once(ordered: bool) -> None:
    engine = Engine()
    engine.prompts()
    seat = engine.runtime.store.seat(RequestId("a"))
    held, other = engine.streams
    softnpu.hang_stream(held)
    engine.forward({"a": 3, "b": 1}, stream=held)
    engine.forward({"a": 5}, stream=held)
    engine.runtime.end_request(RequestId("a"))
    engine.requests["d"] = engine.world.request()
    engine.runtime.arena.ordered = ordered
    engine.forward({"d": 130}, stream=other)
    assert engine.runtime.store.seat(RequestId("d")) == seat
    softnpu.release_stream(held)
    if ordered:
        engine.compare()
        del engine.requests["a"]
        engine.settled()
    else:  # negative control: the same seat, and nothing that keeps its next owner behind its last
        torch.npu.synchronize()
        found = check(engine.runtime.trace.records()).violations
        assert Kind.SEAT in {violation.kind for violation in found}


def test_the_seat_of_an_execution_that_broke_off_stays_behind_what_that_continued() -> None:
    engine = Engine()
    engine.prompts()
    held, other = engine.streams
    softnpu.hang_stream(held)
    engine.forward({"b": 150}, stream=held)
    engine.runtime.begin(engine.chunks({"b": 3})).finish()  # has queued nothing that waits for the hung stream
    engine.runtime.end_request(RequestId("b"))
    engine.requests["d"] = engine.world.request()
    engine.forward({"d": 130}, stream=other)
    softnpu.release_stream(held)
    engine.compare()
    del engine.requests["b"]
    engine.settled()


class FailingUpload(StockRuntime):
    """Fails where pages have changed hands, and nothing is queued yet."""

    fails = False

    def _upload(self, *arguments: Any) -> None:
        if self.fails:
            raise MemoryError("no pinned memory")
        super()._upload(*arguments)


def test_pages_that_moved_without_a_launch_stay_behind_who_touched_them_in_the_slot() -> None:
    engine = Engine(cls=FailingUpload, block_size=64)
    engine.prompts()
    runtime = engine.runtime
    assert isinstance(runtime, FailingUpload)
    held, other = engine.streams
    softnpu.set_race_detection(True)  # the pages are another request's by now, so the order checker knows no better
    softnpu.hang_stream(held)
    softnpu.hang_stream(other)
    _, read = runtime.store.tail(RequestId("a"), 4)
    engine.forward({"a": 150}, stream=held)
    engine.forward({"c": 1}, stream=other)
    (first, second) = (slot.last for slot in runtime.arena.slots)
    runtime.fails = True
    with pytest.raises(MemoryError):
        runtime.begin(engine.chunks({"b": 150}))  # in the slot of the hung forward
    runtime.fails = False
    _, given = runtime.store.tail(RequestId("b"), 4)
    assert set(read.ravel()) & set(given.ravel()), "pages that the hung forward reads are those of b's seat now"
    assert runtime.arena.slots[0].last is not first
    softnpu.release_stream(other)
    other.synchronize()
    engine.void("b", match="failed to begin: no pinned memory")
    runtime.end_request(RequestId("b"))
    del engine.requests["b"]
    engine.requests["d"] = engine.world.request()
    engine.forward({"d": 130}, stream=other)
    assert runtime.arena.slots[1].last is not second
    softnpu.release_stream(held)
    engine.compare()
    engine.settled()
    assert softnpu.races() == ()


class Stages:
    """Two uBatches in threads that take turns, as vllm-ascend runs them: nobody hears of what a thread raises.

    Args:
        engine: whose requests.
        parts: chunks by uBatch.
        fail: uBatch and launch at which its thread raises.
    """

    def __init__(self, engine: Engine, parts: Sequence[Sequence[RequestChunk]], fail: tuple[int, int]) -> None:
        self.engine = engine
        self.fail = fail
        self.swallowed: dict[int, BaseException] = {}
        self.generation = engine.runtime.mint()
        self.turns = [threading.Semaphore(1), threading.Semaphore(0)]
        self.begun = [engine.runtime.begin(p, generation=self.generation, ubatch=u) for u, p in enumerate(parts)]
        threads = [threading.Thread(target=self._run, args=(u, part)) for u, part in enumerate(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, ubatch: int, chunks: Sequence[RequestChunk]) -> None:
        try:
            for index in range(len(self.engine.world.geometry.compressors)):
                self.turns[ubatch].acquire()
                if self.fail == (ubatch, index):
                    raise KeyError("an expert is missing")
                self.engine.launch(self.begun[ubatch], chunks, index, self.engine.streams[ubatch])
                self.turns[1 - ubatch].release()
            self.begun[ubatch].finish()  # not in a `finally`
        except Exception as error:
            self.swallowed[ubatch] = error
        finally:
            for _ in self.engine.world.geometry.compressors:
                self.turns[1 - ubatch].release()

    def execution(self, ubatch: int) -> ExecutionId:
        lease = self.begun[ubatch].lease
        assert lease is not None
        return lease.execution


def test_a_swallowed_exception_in_the_second_ubatch_leaves_the_uncut_requests_of_the_first_alone() -> None:
    engine = Engine()
    engine.prompts()
    parts = cut(engine.chunks({"a": 40, "b": 60, "c": 30}), 70)  # in the middle of b
    stages = Stages(engine, parts, fail=(1, 2))
    assert [*stages.swallowed] == [1]
    assert engine.runtime.end_forward(stages.generation) == (stages.execution(1),)
    assert engine.runtime.end_forward(stages.generation) == ()
    engine.compare()  # what was launched, cut or not
    engine.void("b", "c", match="ubatch 1 .* ended with 3 of 5 launches missing, first layer 1 c128")
    engine.start_anew("b", "c")
    engine.settled()


def test_a_swallowed_exception_in_the_first_ubatch_takes_a_second_that_continues_it_along() -> None:
    engine = Engine()
    engine.prompts()
    parts = cut(engine.chunks({"a": 40, "b": 60, "c": 30}), 70)
    stages = Stages(engine, parts, fail=(0, 2))
    # The second uBatch goes on with rows of b that were never stored: refused, and all its requests with it.
    assert isinstance(stages.swallowed[1], OrderError)
    assert set(engine.runtime.end_forward(stages.generation)) == {stages.execution(0), stages.execution(1)}
    engine.compare()
    engine.void("a", "b", match="ubatch 0 .* ended with 3 of 5 launches missing")
    engine.void("c", match="ubatch 1 .* ended with 3 of 5 launches missing")
    engine.start_anew("a", "b", "c")
    engine.settled()


def test_a_swallowed_exception_in_the_first_ubatch_is_nothing_to_a_second_with_other_requests() -> None:
    engine = Engine()
    engine.prompts()
    parts = cut(engine.chunks({"a": 40, "b": 60, "c": 30}), 100)  # between b and c
    stages = Stages(engine, parts, fail=(0, 2))
    assert [*stages.swallowed] == [0]
    assert engine.runtime.end_forward(stages.generation) == (stages.execution(0),)
    engine.compare()
    engine.void("a", "b", match="ubatch 0 .* ended with 3 of 5 launches missing")
    engine.start_anew("a", "b")
    engine.settled()


def test_a_thread_that_goes_on_after_its_forward_was_ended_is_refused() -> None:
    engine = Engine("a")
    engine.prompts()
    (chunk,) = engine.chunks({"a": 4})
    generation = engine.runtime.mint()
    execution = engine.runtime.begin([chunk], generation=generation)
    engine.launch(execution, [chunk], 0, engine.streams[0])
    engine.runtime.end_forward(generation)
    with pytest.raises(OrderError, match="touches its slot after it was sealed"):
        engine.launch(execution, [chunk], 1, engine.streams[0])
    engine.compare()
    engine.void("a")
    engine.start_anew("a")
    engine.settled()


def test_an_exception_at_layer_20_of_41_with_half_the_pages_moved() -> None:
    flash = replace(preset("flash"), hidden_size=HIDDEN)
    engine = Engine("abc", geometry=flash, length=150)
    layers = sorted({compressor.layer for compressor in flash.compressors})
    assert len(layers) == 41
    engine.forward({"a": 45, "b": 30, "c": 10})
    engine.compare()
    chunks = engine.chunks({"a": 70, "c": 97})  # every page of either ratio changes hands on the way

    def break_off() -> None:
        with engine.runtime.begin(chunks) as execution:
            for index, compressor in enumerate(flash.compressors):
                if compressor.layer == layers[20]:
                    raise KeyError("layer 20")
                engine.launch(execution, chunks, index, engine.streams[compressor.layer % 2])

    with pytest.raises(KeyError, match="layer 20"):
        break_off()
    engine.compare()  # the rows of the first 20 layers
    engine.void("a", "c", match=f"32 of 62 launches missing, first layer {layers[20]} c4")
    engine.start_anew("a", "c")
    engine.settled()


class Connector:
    """The attention side of an asynchronous connector: what was sent is fetched in turn, stage by stage.

    Args:
        fail: number of the receive that raises, from 0.
        spins: the stream on which it spins for ever instead, as a receive does whose other side is gone.
    """

    def __init__(self, fail: int, spins: Any = None) -> None:
        self.pending: tuple[deque[int], deque[int]] = (deque(), deque())
        self.fail = fail
        self.spins = spins

    def send(self, stage: int, layer: int) -> None:
        self.pending[stage].append(layer)

    def receive(self, stage: int) -> None:
        self.fail -= 1
        if self.fail < 0:
            if self.spins is not None:
                softnpu.hang_stream(self.spins)
            raise ConnectionError("the other side is gone")
        self.pending[stage].popleft()


def moe_layers(engine: Engine, connector: Connector, stages: Sequence[tuple[StockExecution, Any]], stream: Any) -> None:
    """Attention of one stage while the experts of the other are elsewhere; all on one stream."""
    by_layer: dict[int, list[int]] = {}
    for index, compressor in enumerate(engine.world.geometry.compressors):
        by_layer.setdefault(compressor.layer, []).append(index)
    waiting: list[int] = []
    for layer, launches in by_layer.items():
        for stage, (execution, chunks) in enumerate(stages):
            if stage in waiting:
                connector.receive(stage)
                waiting.remove(stage)
            for index in launches:
                engine.launch(execution, chunks, index, stream)
            connector.send(stage, layer)
            waiting.append(stage)
    for stage in waiting:
        connector.receive(stage)


def dispatch_and_fail(engine: Engine, connector: Connector, stream: Any) -> None:
    parts = cut(engine.chunks({"a": 40, "b": 60}), 70)  # in the middle of b
    generation = engine.runtime.mint()

    def execute() -> None:
        with ExitStack() as executions:
            begun = [
                (executions.enter_context(engine.runtime.begin(part, generation=generation, ubatch=ubatch)), part)
                for ubatch, part in enumerate(parts)
            ]
            moe_layers(engine, connector, begun, stream)

    with pytest.raises(ConnectionError):
        execute()
    assert any(connector.pending), "it failed between a dispatch and its combine"
    assert engine.runtime.end_forward(generation) == ()


def test_an_exception_between_dispatch_and_combine() -> None:
    engine = Engine()
    engine.prompts()
    dispatch_and_fail(engine, Connector(fail=1), engine.streams[0])
    engine.compare()
    engine.void("a", match="ubatch 0 .* launches missing, first layer 2")
    engine.void("b", match="ubatch 1 .* launches missing, first layer 1")
    engine.start_anew("a", "b")
    engine.settled()


def test_an_exception_behind_the_last_launch_voids_nothing() -> None:
    engine = Engine()
    engine.prompts()
    dispatch_and_fail(engine, Connector(fail=4), engine.streams[0])
    engine.settled()


def test_a_combine_that_spins_for_ever_takes_its_executions_and_nothing_else() -> None:
    engine = Engine(slots=3)
    engine.prompts()
    healthy, spinning = engine.streams
    dispatch_and_fail(engine, Connector(fail=2, spins=spinning), spinning)
    engine.world.pending.clear()
    engine.now = 61
    assert engine.runtime.arena.watch() == ()  # nobody waits for them
    engine.void("a", match="ubatch 0 .* launches missing")  # the cause, not that it is in doubt as well
    engine.void("b", match="ubatch 1 .* launches missing")
    for name in "ab":
        engine.runtime.end_request(RequestId(name))
        del engine.requests[name]
    engine.settled(lost_slots=2, lost_seats=2, streams=[healthy])


def test_a_connector_that_closes_with_work_outstanding_is_refused_with_the_list_and_nothing_changes() -> None:
    engine = Engine("ab")
    engine.prompts()
    runtime = engine.runtime
    held, other = engine.streams
    softnpu.hang_stream(held)
    engine.forward({"a": 3}, stream=held)
    (chunk,) = engine.chunks({"b": 4})
    opened = runtime.begin([chunk])
    assert opened.lease is not None

    def state() -> object:  # an event may have passed meanwhile
        return vars(runtime.arena.counters).copy(), [r for r in runtime.trace.records() if r[1] != "passed"]

    before = state()
    for drain_s in (0.0, 0.01):  # nor is anything drained, let alone quarantined, while an execution is open
        with pytest.raises(StillLeased, match=r"2 leases may still touch it: .*sealed.*acquired.* Drain it first"):
            runtime.close(drain_s)
    assert state() == before
    for index in range(len(engine.world.geometry.compressors)):
        engine.launch(opened, [chunk], index, other)
    opened.finish()
    with pytest.raises(StillLeased, match="sealed"):
        runtime.close()
    engine.forward({"b": 2}, stream=other)  # it is open for work as before
    softnpu.release_stream(held)
    assert runtime.close(drain_s=30) == ()
    assert [record[1] for record in runtime.trace.records()].count("close") == 1
    engine.compare()
    accounted(engine)
    with pytest.raises(ArenaClosed, match="wants a workspace slot after the arena was closed"):
        runtime.begin(engine.chunks({"a": 1}))
    accounted(engine)


@pytest.mark.parametrize("doubt", [False, True])
def test_a_shutdown_keeps_the_memory_if_and_only_if_something_is_in_doubt(doubt: bool) -> None:
    engine = Engine("a")
    engine.prompts()
    stream = engine.streams[0]
    if doubt:
        softnpu.hang_stream(stream)
    engine.forward({"a": 3}, stream=stream)
    lost = engine.runtime.close(drain_s=0.01 if doubt else 30)
    assert [lease.state for lease in lost] == [LeaseState.QUARANTINED] * doubt
    engine.world.pending.clear()
    gone = weakref.ref(engine.runtime)
    gc.collect()
    held = sum(pool.nbytes for pool in engine.runtime.pools.values())
    before = torch.npu.memory_allocated()
    del engine.runtime, engine.world.runtime, lost
    gc.collect()
    assert (gone() is not None) == doubt
    assert (before - torch.npu.memory_allocated() >= held) != doubt


def test_a_runtime_that_is_dropped_while_work_is_queued_keeps_its_memory() -> None:
    engine = Engine("a")
    engine.prompts()
    softnpu.hang_stream(engine.streams[0])
    engine.forward({"a": 3}, stream=engine.streams[0])
    gone = weakref.ref(engine.runtime)
    del engine.runtime, engine.world.runtime
    gc.collect()
    assert gone() is not None


def test_a_stream_that_dies_takes_its_executions_and_the_next_to_die_takes_the_worker() -> None:
    engine = Engine()
    engine.prompts()
    runtime = engine.runtime
    healthy, dead = engine.streams
    softnpu.hang_stream(dead)
    engine.forward({"b": 3}, stream=dead)  # queued, not run
    softnpu.kill_stream(dead)
    engine.world.pending.clear()
    engine.forward({"a": 3}, stream=healthy)
    engine.compare(healthy)
    engine.now = 61
    assert runtime.arena.watch() == ()
    assert runtime.seats_in_doubt() == (runtime.store.seat(RequestId("b")),)
    engine.void("b", match=r"is in doubt: its fence has not passed 61 s after its seal \(limit 60")
    runtime.end_request(RequestId("b"))
    del engine.requests["b"]
    engine.settled(lost_slots=1, lost_seats=1, streams=[healthy])
    with pytest.raises(TailFull, match=r"1 new requests, 0 free of 3 tails, 0 more behind open .* 1 in doubt"):
        runtime.begin([RequestChunk(RequestId("d"), 0, 9)])

    softnpu.hang_stream(healthy)
    engine.forward({"a": 1}, stream=healthy)
    engine.world.pending.clear()
    engine.now = 200
    with pytest.raises(Exhausted, match=r"2 are quarantined for ever.*The worker cannot go on; restart it") as found:
        runtime.begin(engine.chunks({"c": 1}))
    assert found.value.fatal
    accounted(engine, lost_slots=2, lost_seats=2)
    assert len(runtime.close()) == 2


def test_exhaustion_by_open_executions_is_not_fatal() -> None:
    engine = Engine()
    engine.prompts()
    runtime = engine.runtime
    softnpu.hang_stream(engine.streams[1])
    engine.forward({"a": 1}, stream=engine.streams[1])
    engine.world.pending.clear()
    engine.now = 61
    opened = runtime.begin(engine.chunks({"b": 1}))
    with pytest.raises(Exhausted, match="Finish executions") as found:
        runtime.begin(engine.chunks({"c": 1}))
    assert not found.value.fatal
    opened.finish()
    engine.void("a", match="in doubt")
    engine.void("b", match="5 of 5 launches missing")


def test_an_event_that_never_completes_is_quarantined_and_who_waits_for_it_is_named() -> None:
    engine = Engine()
    engine.prompts()
    runtime = engine.runtime
    healthy, hung = engine.streams
    softnpu.hang_stream(hung)
    engine.forward({"b": 3}, stream=hung)
    (first,) = runtime.arena.live()
    engine.now = 50
    engine.forward({"b": 2}, stream=healthy)  # so this stream waits for the hung one
    (second,) = set(runtime.arena.live()) - {first}
    assert runtime.arena.watch() == ()
    engine.now = 60
    assert runtime.arena.watch() == ()
    assert runtime.arena.settle(second) is Settlement.NOT_QUIESCED
    engine.now = 61
    assert second in runtime.arena.watch()
    assert runtime.arena.settle(first) is Settlement.IN_DOUBT
    assert runtime.arena.settle(second.execution) is Settlement.IN_DOUBT
    engine.void("b", match="in doubt")
    softnpu.release_stream(hung)  # late: nobody takes the word back
    torch.npu.synchronize()
    assert runtime.arena.settle(second) is Settlement.RELEASED
    assert runtime.arena.settle(first) is Settlement.IN_DOUBT
    engine.world.pending.clear()
    runtime.end_request(RequestId("b"))
    del engine.requests["b"]
    engine.settled(lost_slots=1)


def test_who_would_go_on_behind_work_in_doubt_is_failed_by_name_and_queues_nothing() -> None:
    """c was never on the hung stream; but its last execution waits for it, because b is in the same batch."""
    engine = Engine()
    engine.prompts()
    runtime = engine.runtime
    healthy, hung = engine.streams
    softnpu.hang_stream(hung)
    engine.forward({"b": 3}, stream=hung)
    engine.now = 30
    engine.forward({"b": 2, "c": 2}, stream=healthy)
    engine.now = 61
    (second,) = runtime.arena.watch()
    waits, leases = runtime.arena.counters.waits, runtime.arena.counters.leases
    engine.void("c", match=f"{re.escape(str(second.execution))} is in doubt: it waits for what was quarantined")
    assert (runtime.arena.counters.waits, runtime.arena.counters.leases) == (waits, leases)
    softnpu.release_stream(hung)
    torch.npu.synchronize()
    engine.world.pending.clear()
    engine.start_anew("b", "c")
    engine.settled(lost_slots=1)


def test_a_hung_upload_does_not_hang_the_host() -> None:
    engine = Engine("a", slots=2, fence_timeout_s=0.05)
    engine.prompts()
    runtime = engine.runtime
    main = torch.npu.current_stream()
    softnpu.hang_stream(main)
    chunks = [RequestChunk(RequestId("x"), 0, 1)]
    for _ in range(3):  # each takes a staging entry, whose copies are queued on the hung stream
        with suppress(TailFull, TailVoid):
            runtime.begin(chunks).finish()
    with pytest.raises(StagingLost, match="all 3 staging entries") as found:
        runtime.begin(engine.chunks({"a": 1}))
    assert isinstance(found.value.__cause__, TimeoutError)
    assert runtime.staging.out == {0, 1, 2}
    softnpu.release_stream(main)
    torch.npu.synchronize()
    accounted(engine)


def test_an_error_that_recording_a_fence_raises_quarantines_the_execution() -> None:
    engine = Engine()
    engine.prompts()
    chunks = engine.chunks({"a": 3})
    execution = engine.runtime.begin(chunks)
    for index in range(len(engine.world.geometry.compressors)):
        engine.launch(execution, chunks, index, engine.streams[0])
    softnpu.fail_next_record(engine.streams[0])
    with pytest.raises(RuntimeError, match="507001"):
        execution.finish()
    assert engine.runtime.end_forward(execution.lease.execution.generation) == ()  # type: ignore[union-attr]
    engine.void("a", match="is in doubt: its fence could not be recorded: ")
    engine.compare()
    engine.runtime.end_request(RequestId("a"))
    del engine.requests["a"]
    engine.settled(lost_slots=1, lost_seats=1)


def test_an_error_that_querying_a_fence_raises_quarantines_the_execution_and_another_slot_is_taken() -> None:
    engine = Engine()
    engine.prompts()
    engine.forward({"b": 3})
    engine.compare()
    softnpu.fail_next_query()
    engine.forward({"a": 3})
    engine.compare()
    assert engine.runtime.arena.counters.quarantined == 1
    engine.void("b", match="is in doubt: its fence cannot be queried")
    engine.runtime.end_request(RequestId("b"))
    del engine.requests["b"]
    engine.settled(lost_slots=1, lost_seats=1)


@pytest.mark.parametrize("call", ["record", "wait", "create"])
def test_an_error_while_streams_are_ordered_breaks_the_launch_off(call: str) -> None:
    engine = Engine()
    engine.prompts()
    chunks = engine.chunks({"a": 3, "b": 2})
    with engine.runtime.begin(chunks) as execution:
        engine.launch(execution, chunks, 0, engine.streams[0])
        fail = {
            "record": lambda: softnpu.fail_next_record(engine.streams[0]),
            "wait": lambda: softnpu.fail_next_wait(engine.streams[1]),
            "create": lambda: softnpu.fail_next_create(),
        }[call]
        fail()
        with pytest.raises(RuntimeError, match="507001"):  # the hand-over to the other stream
            engine.launch(execution, chunks, 1, engine.streams[1])
    engine.void("a", "b", match="4 of 5 launches missing, first layer 0 c4_indexer")
    engine.compare()
    engine.start_anew("a", "b")
    engine.settled()


def test_an_error_that_recording_a_copy_raises_leaves_no_slot_behind_but_costs_a_staging_entry() -> None:
    engine = Engine()
    engine.prompts()
    for lost in (1, 2):
        (chunk,) = engine.chunks({"ab"[lost - 1]: 3})
        softnpu.fail_next_record(torch.npu.current_stream())
        with pytest.raises(RuntimeError, match="507001"):
            engine.runtime.begin([chunk])
        assert len(engine.runtime.staging.out) == lost
    engine.void("a", "b", match="5 of 5 launches missing")
    engine.start_anew("a", "b")
    engine.settled()
    softnpu.fail_next_record(torch.npu.current_stream())
    with pytest.raises(RuntimeError, match="507001"):
        engine.runtime.begin([RequestChunk(RequestId("c"), engine.requests["c"].position, 300)])
    with pytest.raises(StagingLost, match=r"all 3 staging entries.*restart it"):
        engine.runtime.begin([RequestChunk(RequestId("c"), engine.requests["c"].position, 300)])
    torch.npu.synchronize()
    accounted(engine)


@pytest.mark.parametrize("seed", range(4))
def test_random_errors_of_event_calls_never_make_a_row_wrong(seed: int) -> None:
    """An engine that fails all requests of a forward that broke off, and goes on with the others."""
    engine = Engine("abcd", slots=30, max_num_seqs=60)
    rng = random.Random(seed)
    broken = 0
    softnpu.set_schedule(seed + 1, 200)
    for turn in range(16):
        names = sorted(rng.sample(sorted(engine.requests), 2))
        tokens = {
            name: min(rng.choice([1, 4, 33, 128]), engine.world.truth.length - engine.requests[name].position)
            for name in names
        }
        parts = cut(engine.chunks(tokens), rng.randrange(sum(tokens.values())))
        generation = engine.runtime.mint()
        softnpu.set_fault_rate(1000 * seed + turn, 0.03, ("record", "wait", "query"))
        try:
            with ExitStack() as executions:
                begun = [
                    executions.enter_context(engine.runtime.begin(part, generation=generation, ubatch=ubatch))
                    for ubatch, part in enumerate(parts)
                ]
                for index, compressor in enumerate(engine.world.geometry.compressors):
                    for ubatch, (execution, part) in enumerate(zip(begun, parts, strict=True)):
                        if part:
                            engine.launch(execution, part, index, engine.streams[(ubatch + compressor.layer) % 2])
        except RuntimeError:
            broken += 1
            done = names
        else:
            done = [name for name in names if engine.requests[name].position == engine.world.truth.length]
        finally:
            softnpu.set_fault_rate(0, 0)
        assert engine.runtime.end_forward(generation) == ()
        engine.compare()
        engine.start_anew(*(name for name in done))
    assert 0 < broken < 16
    engine.now = 61  # what broke off behind a lease in doubt is in doubt, too, in its time
    assert engine.runtime.arena.watch() == ()
    lost = [slot for slot in engine.runtime.arena.slots if slot.quarantined]
    engine.settled(lost_slots=len(lost), lost_seats=len(engine.runtime.seats_in_doubt()))


class Unlocked(nullcontext[None]):
    """A lock that nobody ever holds."""

    def _is_owned(self) -> bool:
        return False


def test_a_launch_that_is_queued_without_the_lock_is_found() -> None:
    """Every launch of every test over `stock_world` is watched so."""
    engine = Engine("a")
    chunks = engine.chunks({"a": 4})
    with suppress(BrokenOff), Forward(engine.runtime, [chunks]) as forward:
        lock, engine.runtime.arena.lock = engine.runtime.arena.lock, Unlocked()  # type: ignore[assignment]
        try:
            with pytest.raises(AssertionError, match=r"touch_locked of .* does not hold arena\.lock"):
                engine.launch(forward[0], chunks, 0, engine.streams[0])
        finally:
            engine.runtime.arena.lock = lock
    with pytest.raises(TailVoid):
        engine.runtime.begin(engine.chunks({"a": 1}))
