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

from afd_dsv4.device.model import ModelDevice, ModelStream
from afd_dsv4.execution.ubatch import cut
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import RowIndex, TailStore
from afd_dsv4.tail.tables import PageList, RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted, Settlement, WorkspaceArena
from afd_dsv4.workspace.fence import EventPool, Fence
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
        self.last: dict[RowIndex, Lease[ModelStream]] = {}
        self.mint = GenerationMint()
        self.wrong: list[object] = []

    def begin(
        self, chunks: tuple[RequestChunk, ...], ubatch: int, generation: int
    ) -> tuple[Lease[ModelStream], PageList]:
        lease = self.arena.acquire(ExecutionId(generation, ubatch))
        lists, rows = self.store.plan(chunks, lease.slot.index)
        lease.follow([self.last[row] for row in rows if row in self.last])
        for row in rows:
            self.last[row] = lease
        return lease, lists[4]

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
    with pytest.raises(Exhausted, match=r"all 2 are held by: generation 7 ubatch 0.*generation 7 ubatch 1"):
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
    assert world.arena.slots[0].fence is first.fence
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
    with pytest.raises(OrderError, match="sealed twice"):
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
    second.follow([first])
    first.touch(world.streams[0], writes=["decode"], step="layer 0", completes=False)
    with pytest.raises(OrderError):
        second.touch(world.streams[1], writes=["x"], step="layer 0")
    first.touch(world.streams[0], writes=["prefill"], step="layer 0")
    second.touch(world.streams[1], writes=["x"], step="layer 0")


def test_a_fence_without_an_event_is_an_error() -> None:
    device = ModelDevice()
    with pytest.raises(ValueError, match="needs an event"):
        Fence({}, EventPool(device))


def test_events_are_reused_once_they_have_passed() -> None:
    world = World(0)
    run_ubatches(world, 3, [9], alternate=True)
    created = world.arena.events.created
    for _ in range(50):
        lease = world.arena.acquire(ExecutionId(world.mint.mint()))
        for stream in world.streams:
            lease.touch(stream, writes=["x"])
        lease.seal()
        world.device.run()
    assert world.arena.events.created <= created + 4


def test_a_staging_entry_is_rewritten_only_after_its_copy() -> None:
    device = ModelDevice(1)
    stream = device.stream()
    ring: StagingRing[ModelStream, list[int]] = StagingRing(device, [[0], [0]])
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


def test_a_cut_inside_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inside its drafts \[8, 10\)"):
        cut([RequestChunk(RequestId("r"), 5, 10, drafts=2)], 4)
