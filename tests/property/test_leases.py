# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Laws of leases on a device model: whatever order the streams run in, tails and slots hold what they should.

Every launch writes its slot's table and pages symbolically, at the time its stream reaches it, not when it is queued.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.device.model import ModelDevice, ModelEvent, ModelStream
from afd_dsv4.execution.ubatch import cut
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SeatIndex, TailStore
from afd_dsv4.tail.tables import PageList, RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted, Settlement, WorkspaceArena
from afd_dsv4.workspace.fence import EventSource, Fence
from afd_dsv4.workspace.identity import ExecutionId, GenerationMint
from afd_dsv4.workspace.lease import Lease, LeaseState, OrderError
from afd_dsv4.workspace.staging import StagingRing
from tests.symbolic import SymbolicPool, expected

SHAPE = TailShape(4, True, 8, layers=3)
TOKENS = 40


class World:
    """One ratio, its pool, one table per slot, and a device whose streams run in a seeded order."""

    def __init__(self, seed: int, *, slots: int = 2, streams: int = 2, ordered: bool = True) -> None:
        self.device = ModelDevice(seed)
        self.streams = [self.device.stream() for _ in range(streams)]
        self.arena: WorkspaceArena[ModelStream] = WorkspaceArena(self.device, slots, ordered=ordered)
        self.store = TailStore({4: SHAPE}, max_num_seqs=3, slots=slots)
        self.pool = SymbolicPool(SHAPE)
        columns = SHAPE.columns(TOKENS)
        self.tables = [np.zeros((3, columns), np.int32) for _ in range(slots)]
        self.last: dict[SeatIndex, Lease[ModelStream]] = {}
        self.mint = GenerationMint()
        self.wrong: list[object] = []

    def begin(
        self, chunks: tuple[RequestChunk, ...], ubatch: int, generation: int
    ) -> tuple[Lease[ModelStream], PageList]:
        lease = self.arena.acquire(ExecutionId(generation, ubatch))
        plan = self.store.plan(chunks, lease.slot.index)
        lease.follow(
            continues=[self.last[seat] for seat in plan.continued],
            after=[self.last[seat] for seat in plan.taken if seat in self.last],
        )
        self.last.update(dict.fromkeys(plan.seats, lease))
        return lease, plan.lists[4]

    def launch(self, lease: Lease[ModelStream], pages: PageList, layer: int, stream: ModelStream) -> None:
        lease.touch(stream, writes=["table", "pages"], step=layer)
        slot = lease.slot.index
        table = pages.table(layer, SHAPE.columns(TOKENS))
        want = {name: rows for chunk in pages.chunks for name, rows in expected(SHAPE, chunk).items()}

        def scatter() -> None:
            self.tables[slot][: len(table)] = table

        def compress() -> None:
            got = self.pool.launch(pages.chunks, self.tables[slot][: len(table)], pages.starts)
            if got != want:
                self.wrong.append((lease.execution, layer))

        self.device.launch(stream, scatter)
        self.device.launch(stream, compress)
        lease.complete(layer)


def run_ubatches(world: World, rounds: int, lengths: list[int], alternate: bool) -> None:
    """Rounds of two uBatches on two streams, cut inside a request; layers in the order a uBatch engine has."""
    position = dict.fromkeys(range(3), 0)
    for turn in range(rounds):
        chunks = []
        for request in position:
            tokens = lengths[(turn + request) % len(lengths)]
            chunks.append(RequestChunk(RequestId(str(request)), position[request], position[request] + tokens))
            position[request] += tokens
        generation = world.mint.mint()
        parts = cut(chunks, sum(chunk.tokens for chunk in chunks) // 2)
        begun = [(u, *world.begin(part, u, generation)) for u, part in enumerate(parts) if part]
        for layer in range(SHAPE.layers):
            for ubatch, lease, pages in begun:
                stream = world.streams[(ubatch + (layer if alternate else 0)) % len(world.streams)]
                world.launch(lease, pages, layer, stream)
        for _, lease, _ in begun:
            lease.seal()
    world.device.run()


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, TOKENS), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_no_order_of_the_streams_mixes_up_rows(seed: int, lengths: list[int], alternate: bool, streams: int) -> None:
    world = World(seed, streams=streams)
    run_ubatches(world, 4, lengths, alternate)
    assert world.wrong == []


@pytest.mark.parametrize("alternate", [False, True], ids=["cut request", "aux stream"])
def test_without_touches_the_same_load_mixes_up_rows(alternate: bool) -> None:
    """Negative control: nearly every order is wrong once no stream waits."""
    corrupt = 0
    for seed in range(20):
        world = World(seed, ordered=False)
        run_ubatches(world, 4, [7, 12, 33], alternate)
        corrupt += bool(world.wrong)
    assert corrupt >= 15


def test_one_stream_needs_no_wait_and_one_event_per_lease() -> None:
    world = World(0, streams=1)
    run_ubatches(world, 6, [9], alternate=False)
    assert world.arena.counters.waits == 0
    assert world.arena.counters.records == world.arena.counters.leases


def test_slots_are_taken_in_the_order_passed_never_used_oldest_pending() -> None:
    world = World(0, slots=3, streams=2)
    ids = itertools.count(1)

    def hold(stream: ModelStream) -> int:
        lease = world.arena.acquire(ExecutionId(next(ids)))
        lease.touch(stream, writes=["x"])
        lease.seal()
        return lease.slot.index

    slow, fast = world.streams
    gate = world.device.event()
    gate_holder = world.device.stream()
    world.device.launch(gate_holder, lambda: None)
    gate.record(gate_holder)
    gate.wait(slow)
    assert hold(slow) == 0  # nothing passed, the first unused
    assert hold(fast) == 1
    fast.queue.popleft()[1]()  # only the fast stream's event passes
    assert hold(fast) == 1  # passed before never used
    assert hold(slow) == 2
    assert world.arena.counters.handed_on == 0
    assert hold(slow) == 0  # all pending: the oldest seal
    assert world.arena.counters.handed_on == 1


def test_an_exhausted_arena_names_the_holders() -> None:
    world = World(0, slots=2)
    for ubatch in (0, 1):
        world.arena.acquire(ExecutionId(7, ubatch))
    with pytest.raises(
        Exhausted,
        match=r"none of 2 is free: held, or behind what is held, by: generation 7 ubatch 0.*generation 7 ubatch 1",
    ):
        world.arena.acquire(ExecutionId(8))


def test_a_handed_on_slot_makes_every_stream_of_the_new_lease_wait() -> None:
    world = World(0, slots=1, streams=3)
    a, b, c = world.streams
    order: list[str] = []
    first = world.arena.acquire(ExecutionId(1))
    first.touch(a, writes=["x"])
    world.device.launch(a, lambda: order.append("first"))
    first.seal()
    second = world.arena.acquire(ExecutionId(2))
    for stream, name in ((b, "b"), (c, "c")):
        second.touch(stream, writes=[name])
        world.device.launch(stream, lambda name=name: order.append(name))
    second.seal()
    world.device.run()
    assert order[0] == "first"


def test_a_lease_that_touched_nothing_leaves_the_slot_behind_its_old_fence() -> None:
    world = World(0, slots=1)
    first = world.arena.acquire(ExecutionId(1))
    first.touch(world.streams[0], writes=["x"])
    first.seal()
    empty = world.arena.acquire(ExecutionId(2))
    empty.seal()
    assert world.arena.settle(empty) is Settlement.RELEASED
    assert world.arena.settle(first) is Settlement.NOT_QUIESCED
    assert world.arena.slots[0].last is first
    world.device.run()
    assert world.arena.settle(first) is Settlement.RELEASED
    assert world.arena.settle(first) is Settlement.ALREADY_RELEASED
    assert first.state is LeaseState.SETTLED


def test_settling_an_unsealed_lease_says_not_quiesced() -> None:
    world = World(0)
    assert world.arena.settle(world.arena.acquire(ExecutionId(1))) is Settlement.NOT_QUIESCED


def test_a_touch_after_the_seal_and_a_second_seal_are_errors() -> None:
    world = World(0)
    lease = world.arena.acquire(ExecutionId(1))
    lease.touch(world.streams[0], writes=["x"])
    lease.seal()
    with pytest.raises(OrderError, match="touches its slot after it was sealed"):
        lease.touch(world.streams[0], reads=["x"])
    with pytest.raises(OrderError, match="is sealed after it was sealed"):
        lease.seal()


def test_a_layer_launched_before_the_execution_it_continues_is_an_error() -> None:
    world = World(0)
    generation = world.mint.mint()
    request = RequestId("r")
    first, pages = world.begin((RequestChunk(request, 0, 5),), 0, generation)
    second, more = world.begin((RequestChunk(request, 5, 9),), 1, generation)
    with pytest.raises(OrderError, match="launch each layer of the earlier execution first"):
        world.launch(second, more, 0, world.streams[1])
    world.launch(first, pages, 0, world.streams[0])
    world.launch(second, more, 0, world.streams[1])


def test_a_step_of_two_launches_is_followed_only_after_both() -> None:
    world = World(0)
    first = world.arena.acquire(ExecutionId(1))
    second = world.arena.acquire(ExecutionId(1, 1))
    second.follow(continues=[first])
    first.touch(world.streams[0], writes=["decode"], step="layer 0")
    with pytest.raises(OrderError):
        second.touch(world.streams[1], writes=["x"], step="layer 0")
    first.touch(world.streams[0], writes=["prefill"], step="layer 0")
    first.complete("layer 0")
    second.touch(world.streams[1], writes=["x"], step="layer 0")


def test_completing_a_step_that_touched_nothing_is_an_error() -> None:
    with pytest.raises(OrderError, match="without having touched"):
        World(0).arena.acquire(ExecutionId(1)).complete("layer 0")


def test_a_layer_that_the_execution_before_never_launched_is_an_error_after_its_seal_too() -> None:
    world = World(0)
    request, generation = RequestId("r"), world.mint.mint()
    first, pages = world.begin((RequestChunk(request, 0, 5),), 0, generation)
    second, more = world.begin((RequestChunk(request, 5, 9),), 1, generation)
    world.launch(first, pages, 0, world.streams[0])
    first.seal(whole=False)  # broke off behind layer 0
    world.launch(second, more, 0, world.streams[1])
    with pytest.raises(OrderError, match="which ended without it"):
        world.launch(second, more, 1, world.streams[1])


@pytest.mark.parametrize("behind", [0, 60], ids=["even streams", "first stream far behind"])
def test_a_seat_and_a_slot_left_by_a_broken_execution_wait_for_all_that_it_followed(behind: int) -> None:
    """The second uBatch breaks off, the first one is still writing the layers that the second never waited for."""
    assert all(broken_then_reused(seed, behind, whole=False) == [] for seed in range(200))


def test_a_broken_execution_sealed_as_whole_lets_the_next_request_be_overwritten() -> None:
    """Negative control: the fence of the broken execution alone is not enough."""
    assert any(broken_then_reused(seed, 60, whole=True) for seed in range(50))


def broken_then_reused(seed: int, behind: int, *, whole: bool) -> list[object]:
    world = World(seed, streams=3)
    a, c = RequestId("a"), RequestId("c")
    others, pages = world.begin(tuple(RequestChunk(RequestId(name), 0, 9) for name in "xy"), 0, world.mint.mint())
    first, mine = world.begin((RequestChunk(a, 0, 15),), 0, world.mint.mint())
    for layer in range(SHAPE.layers):
        world.launch(others, pages, layer, world.streams[2])
    others.seal()
    second, more = world.begin((RequestChunk(a, 15, 31),), 1, first.execution.generation)
    for _ in range(behind):
        world.device.launch(world.streams[0], lambda: None)
    world.launch(first, mine, 0, world.streams[0])
    world.launch(second, more, 0, world.streams[1])
    second.seal(whole=whole)
    for layer in (1, 2):
        world.launch(first, mine, layer, world.streams[0])
    first.seal()
    world.store.end(a)  # the next request takes its seat
    for start, end in ((0, 17), (17, 30), (30, 37)):  # a tail of two pages: all that the seat owns in a layer
        lease, lists = world.begin((RequestChunk(c, start, end),), 0, world.mint.mint())
        for layer in range(SHAPE.layers):
            world.launch(lease, lists, layer, world.streams[2])
        lease.seal()
    world.device.run()
    return world.wrong


def test_pages_of_an_execution_that_is_still_open_are_not_given_away() -> None:
    world = World(0, slots=3)
    first, _ = world.begin((RequestChunk(RequestId("a"), 0, 5),), 0, 1)
    for name in ("b", "c"):  # the other seats rest longer than the first
        lease, pages = world.begin((RequestChunk(RequestId(name), 0, 5),), 0, 2)
        for layer in range(SHAPE.layers):
            world.launch(lease, pages, layer, world.streams[0])
        lease.seal()
    world.store.end(RequestId("a"))
    with pytest.raises(OrderError, match=r"may still be touched by generation 1 .* finish that first"):
        world.begin((RequestChunk(RequestId("d"), 0, 5),), 0, 3)
    assert first.state is LeaseState.ACQUIRED


def test_a_slot_behind_an_open_execution_is_not_handed_on() -> None:
    world = World(0, slots=2)
    request = RequestId("r")
    world.begin((RequestChunk(request, 0, 5),), 0, 1)
    broken, _ = world.begin((RequestChunk(request, 5, 9),), 1, 1)
    broken.seal(whole=False)
    with pytest.raises(Exhausted, match="or behind what is held, by: generation 1 ubatch 0"):
        world.arena.acquire(ExecutionId(2))


def test_a_fence_without_an_event_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs an event"):
        Fence({})


@pytest.mark.parametrize("progress", [True, False], ids=["device keeps up", "device stands still"])
@pytest.mark.parametrize(("slots", "streams"), [(1, 1), (2, 2), (3, 4)])
def test_events_made_are_two_or_three_per_slot_and_stream_however_many_leases(
    slots: int, streams: int, progress: bool
) -> None:
    world = World(0, slots=slots, streams=streams)
    for _ in range(1000):
        lease = world.arena.acquire(ExecutionId(world.mint.mint()))
        for stream in world.streams * 2:
            lease.touch(stream, writes=["x"])
        lease.seal()
        if progress:
            world.device.run()
    assert world.arena.events.created == world.device.events <= (2 if progress else 3) * slots * streams


def test_a_staging_entry_is_rewritten_only_after_its_copy() -> None:
    device = ModelDevice(1)
    stream = device.stream()
    ring: StagingRing[ModelStream, list[int]] = StagingRing(EventSource(device), [[0], [0]])
    seen = []
    for value in range(6):
        index, buffer = ring.take()
        buffer[0] = value
        device.launch(stream, lambda buffer=buffer: seen.append(buffer[0]))
        ring.copied(index, stream)
    device.run()
    assert seen == list(range(6))
    assert ring.host_waits == 4  # two entries, no stream progress in between: every reuse had to wait


@given(st.integers(0, 2**32), st.integers(0, 120))
def test_a_cut_batch_is_the_same_rows_in_two_parts(seed: int, tokens: int) -> None:
    rng = random.Random(seed)
    chunks = []
    for request in range(3):
        start = rng.randint(0, 50)
        chunks.append(RequestChunk(RequestId(str(request)), start, start + rng.randint(1, 40)))
    total = sum(chunk.tokens for chunk in chunks)
    if tokens > total:
        with pytest.raises(ValueError, match="choose 0 to"):
            cut(chunks, tokens)
        return
    first, second = cut(chunks, tokens)
    packed = [(chunk.request, row) for chunk in chunks for row in range(chunk.start, chunk.end)]
    assert [(chunk.request, row) for chunk in first for row in range(chunk.start, chunk.end)] == packed[:tokens]
    assert [(chunk.request, row) for chunk in second for row in range(chunk.start, chunk.end)] == packed[tokens:]


@pytest.mark.parametrize("tokens", [3, 4])
def test_a_cut_that_leaves_only_drafts_behind_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=r"leaves nothing but drafts \[8, 10\) behind it; cut before row 8"):
        cut([RequestChunk(RequestId("r"), 5, 10, drafts=2)], tokens)


def test_a_cut_before_the_drafts_keeps_them_in_the_second_part() -> None:
    first, second = cut([RequestChunk(RequestId("r"), 5, 10, drafts=2)], 2)
    assert first == (RequestChunk(RequestId("r"), 5, 7),)
    assert second == (RequestChunk(RequestId("r"), 7, 10, drafts=2),)


def test_a_wait_that_failed_is_made_when_the_touch_is_repeated() -> None:
    """The note that a stream waits is taken after the wait is queued."""

    class Flaky(ModelDevice):
        failing = False

        def event(self) -> ModelEvent:
            event = super().event()
            really = event.wait

            def wait(stream: ModelStream) -> None:
                if self.failing:
                    raise RuntimeError("the runtime refused the wait")
                really(stream)

            event.wait = wait  # type: ignore[method-assign]
            return event

    device = Flaky(0)
    one, two = device.stream(), device.stream()
    arena = WorkspaceArena(device, 1)
    lease = arena.acquire(ExecutionId(1))
    lease.touch(one, writes=["pages"])
    order: list[str] = []
    device.launch(one, lambda: order.append("one"))
    device.failing = True
    with pytest.raises(RuntimeError):
        lease.touch(two, writes=["pages"])
    device.failing = False
    lease.touch(two, writes=["pages"])
    device.launch(two, lambda: order.append("two"))
    while two.queue and two.queue[0][0]():  # the second stream runs as far as it can
        two.queue.popleft()[1]()
    assert order == []
    device.run()
    assert order == ["one", "two"]
