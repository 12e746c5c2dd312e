# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Graphs of the stock executor: the real torch.npu.NPUGraph on the software NPU, replayed with other tokens.

A graph keeps the addresses of its workspace slot; everything that a replay needs is uploaded to the same places. Every
compressed row is compared bit for bit with the definition, and every trace is checked by the order checker.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from afd_dsv4.compressor import stock
from afd_dsv4.compressor.stock import StockExecution, StockRuntime
from afd_dsv4.geometry import Compressor, CompressorKind
from afd_dsv4.softnpu import runtime as softnpu
from afd_dsv4.tail.store import TailVoid
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import CaptureError, Exhausted, Settlement, StillLeased
from afd_dsv4.workspace.fence import EventError
from afd_dsv4.workspace.lease import OrderError
from afd_dsv4.workspace.order import check
from tests.npu_streams import streams_apart
from tests.stock_world import HIDDEN, Request, World, small_hidden_size

__all__ = ["small_hidden_size"]  # a fixture

pytestmark = pytest.mark.npu

ROPE_DIM = 64
PROMPTS = (126, 200, 61)  # a decode or two from a window's end of either ratio


@contextmanager
def schedule(seed: int, max_delay_us: int = 300) -> Iterator[None]:
    """Streams in an order of the seed's choice; 0: as they come."""
    softnpu.set_schedule(seed, max_delay_us)
    try:
        yield
    finally:
        softnpu.set_schedule(0)


class Graph:
    """A captured forward with its static buffers, as an engine keeps them.

    Args:
        world: whose runtime and weights.
        key: of the graph.
        tokens: of each request.
        side: where the indexer's compressor is launched; None for the stream of all others.
    """

    def __init__(self, world: World, key: str, tokens: Sequence[int], *, side: Any = None) -> None:
        self.world, self.key, self.tokens, self.side = world, key, list(tokens), side
        total = sum(tokens)
        self.x = torch.zeros(total, HIDDEN, dtype=torch.bfloat16, device="npu")
        self.cu_seqlens = torch.zeros(len(tokens) + 1, dtype=torch.int32, device="npu")
        rows = {kind.ratio: min(total, total // kind.ratio + len(tokens)) for kind in CompressorKind}
        self.rope = {
            ratio: tuple(torch.zeros(n, ROPE_DIM, dtype=torch.bfloat16, device="npu") for _ in "cs")
            for ratio, n in rows.items()
        }
        self.outputs: dict[Compressor, torch.Tensor] = {}
        self.graph = torch.npu.NPUGraph()

    def capture(self) -> Graph:
        """Capture on torch's own capture stream."""
        with self.begin() as execution, torch.npu.graph(self.graph):
            self.launches(execution)
        return self

    def begin(self) -> StockExecution:
        chunks = [RequestChunk(RequestId(f"captured {i}"), 0, n) for i, n in enumerate(self.tokens)]
        return self.world.runtime.capture(self.key, chunks)

    def launches(self, execution: StockExecution) -> None:
        main = torch.npu.current_stream()
        if self.side is not None:
            self.side.wait_stream(main)
        for compressor in self.world.geometry.compressors:
            beside = self.side is not None and compressor.kind is CompressorKind.C4_INDEXER
            with torch.npu.stream(self.side if beside else main):
                key = (compressor.layer, compressor.kind)
                self.outputs[compressor] = execution.compress(
                    *key, self.x, self.world.on_device[key], *self.rope[compressor.kind.ratio], self.cu_seqlens
                )
        if self.side is not None:
            main.wait_stream(self.side)

    def replay(
        self,
        requests: Mapping[str, Request],
        chunks: Sequence[RequestChunk],
        *,
        stream: Any = None,
        pad: str = "with a token",
    ) -> StockExecution:
        """Replay with the tokens of `chunks`; rows behind them belong to nobody."""
        world = self.world
        with torch.npu.stream(stream or torch.npu.current_stream()):
            execution = world.runtime.begin_replay(self.key, chunks)
            self.write(requests, chunks, pad)
            execution.replay(self.graph)
            world.pending += [(compressor, chunks, out.clone()) for compressor, out in self.outputs.items()]
        execution.finish()
        return execution

    def write(self, requests: Mapping[str, Request], chunks: Sequence[RequestChunk], pad: str = "with a token") -> None:
        """Fill the static buffers on the current stream."""
        lengths = [chunk.tokens for chunk in chunks]
        more = len(self.tokens) - len(lengths)
        lengths += [1 if pad == "with a token" else 0] * more
        new = {id(self.cu_seqlens): torch.tensor([0, *lengths]).cumsum(0).int()}
        new[id(self.x)] = torch.cat([requests[c.request].x[c.start : c.end] for c in chunks])
        for ratio, (cos, sin) in self.rope.items():
            at = torch.tensor([w * ratio for c in chunks for w in range(c.start // ratio, c.end // ratio)]).long()
            new[id(cos)], new[id(sin)] = self.world.cos[at], self.world.sin[at]
        for there in (self.cu_seqlens, self.x, *(table for pair in self.rope.values() for table in pair)):
            host = new[id(there)].pin_memory()
            self.world.keep.append(host)
            there[: len(host)].copy_(host, non_blocking=True)


class Load:
    """Requests that go on by eager forwards and replays, each step from where the last one ended."""

    def __init__(self, world: World, names: str = "abc") -> None:
        self.world = world
        self.requests = {name: world.request() for name in names}

    def chunks(self, tokens: Mapping[str, int], drafts: int = 0) -> list[RequestChunk]:
        found = []
        for name, count in tokens.items():
            start = self.requests[name].position
            found.append(RequestChunk(RequestId(name), start, start + count, drafts))
            self.requests[name].position += count
        return found

    def eager(self, tokens: Mapping[str, int], **how: Any) -> None:
        self.world.queue(self.requests, self.chunks(tokens), **how)

    def replay(self, graph: Graph, names: str = "abc", **how: Any) -> None:
        self.replay_chunks(graph, self.chunks(dict.fromkeys(names, graph.tokens[0])), **how)

    def replay_chunks(self, graph: Graph, chunks: Sequence[RequestChunk], **how: Any) -> None:
        graph.replay(self.requests, chunks, **how)

    def prompts(self) -> None:
        self.eager(dict(zip(self.requests, PROMPTS, strict=False)))

    def check(self) -> None:
        """All rows are right, and the trace says why."""
        self.world.check_all(self.requests)
        assert self.world.compared > 0
        assert self.world.different == 0
        clean(self.world.runtime)


def clean(runtime: StockRuntime) -> None:
    report = check(runtime.trace.records(), runtime.trace.dropped)
    assert report.violations == ()
    assert report.touches > 0


def addresses(runtime: StockRuntime) -> list[int]:
    """Where everything is that a graph may have captured."""
    tensors = [table.flat for slot in runtime.tables for table in slot.values()]
    tensors += [lists.flat for lists in runtime.lists]
    return [t.data_ptr() for t in (*tensors, *runtime.pools.values())]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_replay_compresses_the_rows_of_the_definition_between_eager_forwards(seed: int) -> None:
    world = World(0, graphs=[("decode",)])
    load = Load(world)
    before = addresses(world.runtime)
    with schedule(seed):
        load.prompts()
        graph = Graph(world, "decode", [1, 1, 1]).capture()
        for step in range(14):
            if step % 5 == 3:
                load.eager({"a": 2, "b": 1, "c": 33}, cut_tokens=20, alternate=True)
            load.replay(graph, stream=world.streams[step % 3 % 2])
        load.eager({"a": 7, "c": 40}, cut_tokens=5)
        load.check()
    assert addresses(world.runtime) == before
    assert world.runtime.arena.events.captures == 0


@pytest.mark.parametrize("pad", ["with a token", "without tokens"])
def test_fewer_requests_than_captured_leave_the_other_rows_to_nobody(pad: str) -> None:
    world = World(0, graphs=[("decode",)])
    load = Load(world)
    load.prompts()
    graph = Graph(world, "decode", [1, 1, 1]).capture()
    # Pages that an unpadded replay maps in rows that the next one does not have must not be written.
    for names in ("abc", "c", "ab", "cb", "b", "abc", "bca", "a", "abc"):
        load.replay(graph, names, pad=pad)
    load.eager({"a": 100, "b": 100, "c": 100})
    load.check()


def test_replays_with_drafts_go_on_from_every_accept_length() -> None:
    drafts = 3
    world = World(0, graphs=[("verify",)], drafts=drafts)
    load = Load(world, "ab")
    load.prompts()
    graph = Graph(world, "verify", [1 + drafts] * 2).capture()
    for accepted in (0, 1, 2, 3, 0, 3):
        chunks = load.chunks(dict.fromkeys("ab", 1 + drafts), drafts)
        graph.replay(load.requests, chunks)
        world.check_all(load.requests)
        for chunk in chunks:
            load.requests[chunk.request].position = chunk.start + 1 + accepted
    load.eager({"a": 100, "b": 100})
    load.check()


@pytest.mark.parametrize("seed", [5, 6])
def test_graphs_that_share_a_slot_follow_each_other_on_any_stream(seed: int) -> None:
    world = World(0, graphs=[("one", "two")])
    load = Load(world, "ab")
    with schedule(seed, 1000):
        load.prompts()
        one, two = Graph(world, "one", [1]).capture(), Graph(world, "two", [1, 1]).capture()
        rng = random.Random(seed)
        for step in range(12):
            graph, names = rng.choice([(one, "a"), (one, "b"), (two, "ab"), (two, "ba"), (two, "b")])
            load.replay(graph, names, stream=world.streams[step % 2])
        assert world.runtime.arena.counters.handed_on > 0
        load.check()
    assert {lease.slot.index for lease in world.runtime.arena.live()} <= {2}


@pytest.mark.parametrize("seed", [7, 8])
def test_graphs_with_slots_of_their_own_overlap_with_each_other_and_with_eager_forwards(seed: int) -> None:
    world = World(0, graphs=[("left",), ("right",)])
    load = Load(world)
    with schedule(seed, 1000):
        load.prompts()
        left, right = Graph(world, "left", [1]).capture(), Graph(world, "right", [1, 1]).capture()
        for _ in range(5):
            load.replay(left, "a", stream=world.streams[0])
            load.replay(right, "bc", stream=world.streams[1])
            load.eager({"a": 5, "b": 1}, cut_tokens=4)
            load.replay(right, "ca", stream=world.streams[0])
        load.check()


@pytest.mark.parametrize("seed", [9, 10, 11])
def test_a_capture_on_two_streams_keeps_their_order_at_every_replay(seed: int) -> None:
    assert replayed_on_two_streams(seed, ordered=True) == 0


def test_without_touches_a_capture_on_two_streams_goes_wrong_at_replay() -> None:
    """Negative control: nothing orders the indexer's compressor behind the scatter, nor the next scatter behind it."""
    assert sum(replayed_on_two_streams(seed, ordered=False) for seed in (9, 10, 11)) > 0


def replayed_on_two_streams(seed: int, *, ordered: bool) -> int:
    """Replays of a graph whose indexer has a stream of its own; wrong rows."""
    world = World(0, graphs=[("decode",)])
    load = Load(world)
    load.prompts()
    torch.npu.synchronize()
    world.runtime.arena.ordered = ordered  # of the capture only: replays keep their order all the same
    graph = Graph(world, "decode", [1, 1, 1], side=world.streams[1]).capture()
    world.runtime.arena.ordered = True
    with schedule(seed, 1000):
        for _ in range(8):
            load.replay(graph, stream=world.streams[0])
        world.check_all(load.requests)
    found = check(world.runtime.trace.records()).violations
    assert bool(found) != ordered, "the order checker sees it whatever the streams did"
    return world.different


@pytest.mark.parametrize("ordered", [True, False])
def test_a_replay_on_another_stream_than_its_upload_follows_it(ordered: bool) -> None:
    world = World(0, graphs=[("decode",)])
    load = Load(world)
    load.prompts()
    graph = Graph(world, "decode", [1, 1, 1]).capture()
    load.check()
    chunks = load.chunks(dict.fromkeys("abc", 1))
    graph.write(load.requests, chunks)
    torch.npu.synchronize()
    world.runtime.arena.ordered = ordered
    softnpu.set_race_detection(True)
    try:
        with torch.npu.stream(world.streams[0]):
            execution = world.runtime.begin_replay("decode", chunks)
        with torch.npu.stream(world.streams[1]), execution:
            execution.replay(graph.graph)
        torch.npu.synchronize()
        found = softnpu.races()
    finally:
        softnpu.set_race_detection(False)
        softnpu.clear_races()
    assert bool(found) != ordered, found
    if ordered:
        world.pending += [(compressor, chunks, out.clone()) for compressor, out in graph.outputs.items()]
        load.check()


def test_a_capture_asks_no_event_while_other_work_is_pending_and_refuses_what_would() -> None:
    world = World(0, graphs=[("decode",), ("other",)])
    runtime = world.runtime
    load = Load(world)
    load.prompts()
    graph = Graph(world, "decode", [1, 1, 1])
    load.check()
    held, (side,), probe = world.streams[0], streams_apart(1, *world.streams), torch.npu.Event()
    softnpu.hang_stream(held)
    load.eager({"a": 1})
    (pending,) = runtime.arena.live()
    probe.record(held)
    eager = load.chunks(dict.fromkeys("abc", 1))
    counters = vars(runtime.arena.counters).copy()
    with torch.npu.stream(side):  # `torch.npu.graph` would wait for the device
        graph.graph.capture_begin()
        with graph.begin() as execution:
            with pytest.raises(RuntimeError, match="captur"):
                probe.query()  # the software NPU refuses it: whoever asks is seen
            with pytest.raises(CaptureError, match="begins while a graph is captured"):
                runtime.begin(eager)
            with pytest.raises(CaptureError, match="begins while a graph is captured"):
                runtime.begin_replay("other", eager)
            with pytest.raises(CaptureError, match="while executions are open"):
                runtime.capture("other", eager)
            with pytest.raises(EventError, match="while a graph is captured"):
                runtime.staging.take()
            with pytest.raises(StillLeased):
                runtime.close()
            with pytest.raises(StillLeased):
                runtime.arena.reset()
            assert runtime.arena.watch() == ()
            assert runtime.seats_in_doubt() == ()
            assert runtime.arena.settle(pending) is Settlement.NOT_QUIESCED
            graph.launches(execution)
        graph.graph.capture_end()
    assert not probe.query()
    softnpu.release_stream(held)
    assert vars(runtime.arena.counters) == {**counters, "leases": counters["leases"] + 1}
    world.queue(load.requests, eager)  # what was refused left nothing behind
    for _ in range(3):
        load.replay(graph)
    load.check()


@pytest.mark.parametrize("announced", [True, False], ids=["begun before the capture", "begun within"])
def test_a_watchdog_on_another_thread_gives_nothing_up_while_a_graph_is_captured(announced: bool) -> None:
    """ACL refuses a query by whatever thread while another captures; that says nothing about the fence asked for."""
    world = World(0, graphs=[("decode",)])
    arena = world.runtime.arena
    load = Load(world)
    load.prompts()
    load.check()
    softnpu.hang_stream(world.streams[0])
    load.eager({"a": 1})
    (pending,) = arena.live()
    looks: list[Any] = []

    def look() -> None:
        other = threading.Thread(target=lambda: looks.append((arena.watch(), arena.settle(pending))))
        other.start()
        other.join()

    graph = Graph(world, "decode", [1, 1, 1])
    with torch.npu.stream(torch.npu.Stream()):
        execution = graph.begin() if announced else None
        graph.graph.capture_begin()
        look()
        execution = execution or graph.begin()
        graph.launches(execution)
        look()
        if not announced:
            execution.finish()
            look()
        graph.graph.capture_end()
        if announced:
            execution.finish()
    assert looks == [((), Settlement.NOT_QUIESCED)] * len(looks)
    softnpu.release_stream(world.streams[0])
    torch.npu.synchronize()
    assert arena.settle(pending) is Settlement.RELEASED
    assert arena.counters.quarantined == 0
    load.replay(graph)
    load.check()


def test_a_key_without_a_slot_is_refused_and_the_engine_goes_on_eagerly() -> None:
    world = World(0, graphs=[("decode",)])
    load = Load(world)
    load.prompts()
    unknown = Graph(world, "prefill", [1, 1, 1])
    with pytest.raises(CaptureError, match=r"'prefill'.*none was assigned.*assigned: \['decode'\]"):
        unknown.capture()
    with pytest.raises(CaptureError, match="none was assigned"):
        world.runtime.begin_replay("prefill", [RequestChunk(RequestId("a"), 126, 127)])
    with pytest.raises(CaptureError, match="was never captured"):
        world.runtime.begin_replay("decode", [RequestChunk(RequestId("a"), 126, 127)])
    load.eager({"a": 5, "b": 5, "c": 200}, cut_tokens=100)
    graph = Graph(world, "decode", [1, 1, 1]).capture()
    load.replay(graph)
    load.check()


def test_a_capture_is_for_as_many_requests_and_tokens_as_the_runtime_was_sized_for() -> None:
    runtime = World(0, graphs=[("decode",)]).runtime
    chunks = [RequestChunk(RequestId(f"captured {i}"), 0, 1) for i in range(4)]
    with pytest.raises(ValueError, match="captured for 4 requests in a runtime for 3"):
        runtime.capture("decode", chunks)
    with pytest.raises(ValueError, match="captured without requests"):
        runtime.capture("decode", [])
    with pytest.raises(ValueError, match="1501 tokens in a runtime sized for 1500"):
        runtime.capture("decode", [RequestChunk(RequestId("captured"), 0, 1501)])
    assert runtime.arena.events.captures == 0


def test_a_replay_after_the_arena_was_reset_is_refused_until_the_graph_is_captured_anew() -> None:
    world = World(0, graphs=[("decode",)])
    load = Load(world)
    load.prompts()
    graph = Graph(world, "decode", [1, 1, 1]).capture()
    load.replay(graph)
    load.check()
    world.runtime.arena.reset()
    chunks = load.chunks(dict.fromkeys("abc", 1))
    with pytest.raises(CaptureError, match=r"graph 'decode'.*capture it \(again\) first"):
        world.runtime.begin_replay("decode", chunks)
    graph = Graph(world, "decode", [1, 1, 1]).capture()
    load.replay_chunks(graph, chunks)
    load.replay(graph)
    load.check()


def test_a_replay_is_once_and_of_what_was_begun_for_it() -> None:
    world = World(0, graphs=[("decode",)])
    runtime, load = world.runtime, Load(world, "ab")
    load.prompts()
    graph = Graph(world, "decode", [1, 1]).capture()
    with pytest.raises(ValueError, match=r"2 requests with 3 tokens for graph 'decode', captured for 2 and 2"):
        runtime.begin_replay("decode", [RequestChunk(RequestId("a"), 126, 128), RequestChunk(RequestId("b"), 200, 201)])
    chunks = load.chunks({"a": 1, "b": 1})
    with runtime.begin_replay("decode", chunks) as execution:
        graph.write(load.requests, chunks)
        first = world.geometry.compressors[0]
        with pytest.raises(OrderError, match=r"was begun for graph 'decode'; replay that, once"):
            world.step(execution, load.requests, chunks, first, torch.npu.current_stream())
        with pytest.raises(Exhausted, match="wants a workspace slot"):
            runtime.begin_replay("decode", chunks)
        execution.replay(graph.graph)
        with pytest.raises(OrderError, match="was replayed already"):
            execution.replay(graph.graph)
    world.pending += [(compressor, chunks, out.clone()) for compressor, out in graph.outputs.items()]
    with (
        pytest.raises(OrderError, match="was begun without a graph"),
        runtime.begin(load.chunks({"a": 1})) as execution,
    ):
        execution.replay(graph.graph)
    with pytest.raises(TailVoid, match="'a' lost its tail"):
        runtime.begin(load.chunks({"a": 1}))
    load.replay(graph, "b")
    load.check()


@pytest.mark.parametrize("announced", [True, False])
def test_an_idle_rank_replays_a_graph_without_requests_and_stores_nothing(announced: bool) -> None:
    """Unannounced, the replay writes into the tails that the last one mapped: the negative control."""
    world = World(0, graphs=[("decode",)])
    load = Load(world, "ab")
    load.prompts()
    graph = Graph(world, "decode", [1, 1]).capture()
    load.replay(graph, "ab")
    world.check_all(load.requests)
    graph.x.fill_(7)
    if announced:
        with world.runtime.begin_replay("decode", ()) as execution:
            execution.replay(graph.graph)
    else:
        graph.graph.replay()
    for _ in range(3):
        load.replay(graph, "ab")
    world.check_all(load.requests)
    assert (world.different == 0) == announced
    clean(world.runtime)


def test_a_replay_that_never_happens_voids_the_tails_by_name() -> None:
    world = World(0, graphs=[("decode",)])
    load = Load(world, "ab")
    load.prompts()
    graph = Graph(world, "decode", [1, 1]).capture()
    world.runtime.begin_replay("decode", load.chunks({"a": 1})).finish()
    with pytest.raises(TailVoid, match=r"'a' lost its tail: generation .* ended with 5 of 5 launches missing"):
        world.runtime.begin_replay("decode", load.chunks({"a": 1}))
    load.replay(graph, "b")
    load.check()


def test_a_capture_that_broke_off_is_no_graph_and_can_be_repeated() -> None:
    world = World(0, graphs=[("decode",)])
    runtime, load = world.runtime, Load(world)
    load.prompts()
    broken = Graph(world, "decode", [1, 1, 1])

    def break_off() -> None:
        with torch.npu.graph(broken.graph), broken.begin() as execution:
            first = world.geometry.compressors[0]
            execution.compress(
                first.layer,
                first.kind,
                broken.x,
                world.on_device[first.layer, first.kind],
                *broken.rope[4],
                broken.cu_seqlens,
            )
            raise KeyError("the layer above failed")

    with pytest.raises(KeyError):
        break_off()
    chunks = load.chunks(dict.fromkeys("abc", 1))
    with pytest.raises(CaptureError, match=r"capture it \(again\) first"):
        runtime.begin_replay("decode", chunks)
    load.replay_chunks(Graph(world, "decode", [1, 1, 1]).capture(), chunks)
    load.check()


def test_a_capture_that_nobody_finishes_is_ended_with_its_forward() -> None:
    world = World(0, graphs=[("decode",)])
    runtime, load = world.runtime, Load(world)
    load.prompts()
    torch.npu.synchronize()
    generation = runtime.mint()
    chunks = [RequestChunk(RequestId("captured"), 0, 1)]
    with torch.npu.graph(torch.npu.NPUGraph()):
        lost = runtime.capture("decode", chunks, generation=generation)
        assert lost.lease is not None
    chunks = load.chunks(dict.fromkeys("abc", 1))
    with pytest.raises(CaptureError, match="begins while a graph is captured"):
        runtime.begin(chunks)
    assert runtime.end_forward(generation) == (lost.lease.execution,)
    world.queue(load.requests, chunks)
    load.replay(Graph(world, "decode", [1, 1, 1]).capture())
    load.check()


def test_what_a_graph_uses_outlives_every_handle_until_the_runtime_is_closed() -> None:
    world = World(0, graphs=[("decode",)])
    load = Load(world)
    load.prompts()
    graph = Graph(world, "decode", [1, 1, 1], side=world.streams[1]).capture()
    before = addresses(world.runtime)
    gc.collect()  # the execution of the capture, its lease and its lists have no other owner
    torch.npu.empty_cache()
    load.replay(graph)
    load.check()
    # Whoever still has the graph can replay it without the runtime: its memory must not be anybody else's.
    held = torch.npu.memory_allocated()
    gone = weakref.ref(world.runtime)
    try:
        del world.runtime
        gc.collect()
        kept = gone()
        assert kept is not None
        assert addresses(kept) == before
        assert torch.npu.memory_allocated() >= held
        graph.graph.replay()
        torch.npu.synchronize()
        assert kept.close() == ()
    finally:
        stock._NEVER_FREED.discard(gone())
    del kept
    gc.collect()
    assert gone() is None


def test_a_closed_runtime_replays_nothing() -> None:
    world = World(0, graphs=[("decode",)])
    load = Load(world)
    load.prompts()
    Graph(world, "decode", [1, 1, 1]).capture()
    load.check()
    assert world.runtime.close(drain_s=5) == ()
    with pytest.raises(RuntimeError, match="after the arena was closed"):
        world.runtime.begin_replay("decode", load.chunks({"a": 1}))
