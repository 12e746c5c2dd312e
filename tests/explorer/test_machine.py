# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Long runs: hypothesis drives the real arena, tail store and staging ring in front of the model device.

What the explorer does for all schedules of a few executions, this does for some schedules of many, with real page lists
and a symbolic operator, so that a wrong page shows as a wrong row. A run is also recorded, and the trace driven again
under other seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from afd_dsv4.device.model import Deadlock, ModelDevice, ModelStream
from afd_dsv4.execution.ubatch import cut
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SeatIndex, StepPlan, TailFull, TailStore, TailVoid
from afd_dsv4.tail.tables import PageList, RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted, Settlement, StillLeased, WorkspaceArena
from afd_dsv4.workspace.identity import ExecutionId, Generation, GenerationMint
from afd_dsv4.workspace.lease import Lease, LeaseState, OrderError
from afd_dsv4.workspace.order import check
from afd_dsv4.workspace.staging import StagingLost, StagingRing
from afd_dsv4.workspace.trace import Record, Trace, load
from tests.explorer.replay import replay
from tests.symbolic import SymbolicPool, expected

SHAPE = TailShape(4, True, 8, layers=3)
KINDS = ("compressor", "indexer")  # one ratio: they share lists and table
SEATS, SLOTS, STREAMS, TOKENS, TIMEOUT_S = 3, 2, 3, 40, 5.0
REQUESTS = [RequestId(name) for name in "abcd"]


FORWARD = {
    "names": st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=SEATS, unique=True),
    "tokens": st.lists(st.integers(1, TOKENS), min_size=SEATS, max_size=SEATS),
    "streams": st.permutations(range(STREAMS)),
    "share": st.floats(0, 1),
}


class Execution:
    def __init__(self, lease: Lease[ModelStream], plan: StepPlan) -> None:
        self.lease = lease
        self.plan = plan
        self.pages: PageList = plan.lists[4]
        self.steps = [(layer, kind) for layer in range(SHAPE.layers) for kind in KINDS]
        self.layer: int | None = None  # whose ids the table holds


class Worker(RuleBasedStateMachine):
    """One worker, its requests, and what may happen to them."""

    ordered = True

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.device = ModelDevice(seed)
        self.streams = [self.device.stream() for _ in range(STREAMS)]
        self.now = 0.0
        self.trace = Trace(None)
        self.arena: WorkspaceArena[ModelStream] = WorkspaceArena(
            self.device,
            SLOTS,
            ordered=self.ordered,
            fence_timeout_s=TIMEOUT_S,
            clock=lambda: self.now,
            trace=self.trace,
        )
        self.store = TailStore({4: SHAPE}, max_num_seqs=SEATS, slots=SLOTS)
        self.pools = {kind: SymbolicPool(SHAPE) for kind in KINDS}
        columns = SHAPE.columns(TOKENS)
        self.tables = [np.zeros((SEATS, columns), np.int32) for _ in range(SLOTS)]
        self.lists: list[PageList | None] = [None] * SLOTS
        buffers: list[list[PageList]] = [[] for _ in range(SLOTS + 1)]
        self.staging = StagingRing(self.arena.events, buffers)
        self.mint = GenerationMint()
        self.positions: dict[RequestId, int] = {}
        self.last: dict[SeatIndex, Lease[ModelStream]] = {}
        self.executions: list[Execution] = []
        self.ended: list[Execution] = []
        self.wrong: list[object] = []
        self.refused: list[type[BaseException]] = []

    # What the runner does

    @precondition(lambda self: len(self.executions) < SLOTS)
    @rule(**FORWARD)
    def forward(self, names: list[RequestId], tokens: list[int], streams: list[int], share: float) -> None:
        """Begin a forward, cut into two uBatches where the share says so."""
        chunks = []
        for name, count in zip(names, tokens, strict=False):
            start = self.positions.get(name, 0)
            chunks.append(RequestChunk(name, start, start + count))
        generation = self.mint.mint()
        parts = cut(chunks, round(share * sum(chunk.tokens for chunk in chunks)))
        for ubatch, (part, stream) in enumerate(zip(parts, streams, strict=False)):
            if part and not self.begin(part, ubatch, generation, self.streams[stream]):
                break  # what comes behind would go on from rows that were never planned

    def begin(self, chunks: Sequence[RequestChunk], ubatch: int, generation: Generation, stream: ModelStream) -> bool:
        try:
            entry, buffer = self.staging.take()
        except StagingLost as error:
            return self.refuse(error)
        try:
            lease = self.arena.acquire(ExecutionId(generation, ubatch))
            try:
                plan = self.store.plan(chunks, lease.slot.index, usable=self.usable)
            except (TailFull, TailVoid) as error:
                lease.seal()
                if isinstance(error, TailVoid):
                    for name in [c.request for c in chunks if self.store.seat(c.request) is not None]:
                        self.cancel(name)
                return self.refuse(error)
            self.last_of(lease, plan)
            execution = Execution(lease, plan)
            self.executions.append(execution)
            self.positions.update({chunk.request: chunk.end for chunk in chunks})
            buffer[:] = [execution.pages]
            lease.touch(stream, writes=("lists", "table"))
            slot = lease.slot.index
            self.device.launch(stream, lambda: self.lists.__setitem__(slot, buffer[0]))
        except Exhausted as error:
            return self.refuse(error)
        finally:
            self.staging.copied(entry, stream)
        return True

    def last_of(self, lease: Lease[ModelStream], plan: StepPlan) -> None:
        lease.follow(
            continues=[self.last[seat] for seat in plan.continued],
            after=[self.last[seat] for seat in plan.taken if seat in self.last],
            seats=plan.seats,
            void=plan.void,
        )
        self.last.update(dict.fromkeys(plan.seats, lease))

    def usable(self, seat: SeatIndex) -> bool:
        return seat not in self.last or self.last[seat].can_be_waited_for()

    def refuse(self, error: BaseException) -> bool:
        self.refused.append(type(error))
        return False

    @precondition(lambda self: self.executions)
    @rule(which=st.integers(0, 9), count=st.integers(1, 6), stream=st.integers(0, STREAMS - 1), apart=st.booleans())
    def launch(self, which: int, count: int, stream: int, apart: bool) -> None:
        """Queue the next steps of an execution; the indexer's on another stream if they are apart."""
        execution = self.executions[which % len(self.executions)]
        for _ in range(min(count, len(execution.steps))):
            layer, kind = execution.steps[0]
            where = self.streams[(stream + (apart and kind == "indexer")) % STREAMS]
            try:
                self.queue(execution, layer, kind, where)
            except OrderError as error:  # its turn has not come, or never will
                self.refuse(error)
                return
            execution.steps.pop(0)

    def queue(self, execution: Execution, layer: int, kind: str, stream: ModelStream) -> None:
        lease, pages, slot = execution.lease, execution.pages, execution.lease.slot.index
        scatter = execution.layer != layer
        parts = (("pages", kind), *(("table",) if scatter else ()))
        lease.touch(stream, reads=("lists", "table"), writes=parts, step=(layer, kind))
        table, count = self.tables[slot], len(pages.chunks)
        want = {name: rows for chunk in pages.chunks for name, rows in expected(SHAPE, chunk).items()}

        def scattered() -> None:
            lists = self.lists[slot]
            if lists is not None:
                table[: len(lists.chunks)] = lists.table(layer, SHAPE.columns(TOKENS))

        def compressed() -> None:
            if self.pools[kind].launch(pages.chunks, table[:count], pages.starts) != want:
                self.wrong.append((lease.execution, layer, kind))

        if scatter:
            self.device.launch(stream, scattered)
            execution.layer = layer
        self.device.launch(stream, compressed)
        lease.complete((layer, kind))

    @precondition(lambda self: not self.executions)
    @rule(**FORWARD)
    def serve(self, names: list[RequestId], tokens: list[int], streams: list[int], share: float) -> None:
        """A whole forward, layer by layer, as uBatches take turns."""
        self.forward(names, tokens, streams, share)
        self.serve_out(streams)

    @precondition(lambda self: self.executions)
    @rule(streams=st.permutations(range(STREAMS)))
    def serve_out(self, streams: list[int]) -> None:
        """What is open is launched and finished, or ends where it can go no further."""
        for _ in range(SHAPE.layers):
            for which, _ in enumerate(list(self.executions)):
                self.launch(which, len(KINDS), streams[which % STREAMS], True)
        for execution in list(self.executions):
            self.end(execution)

    @precondition(lambda self: self.executions)
    @rule(which=st.integers(0, 9))
    def break_off(self, which: int) -> None:
        """An execution ends where it is."""
        self.end(self.executions[which % len(self.executions)])

    def end(self, execution: Execution) -> None:
        self.executions.remove(execution)
        self.ended.append(execution)
        if execution.steps:
            execution.plan.void(f"{execution.lease.execution} broke off")
        execution.lease.seal(whole=not execution.steps)

    @rule(name=st.sampled_from(REQUESTS))
    def cancel(self, name: RequestId) -> None:
        """A request ends, whatever is in flight."""
        if self.store.seat(name) is not None:
            self.store.end(name)
        self.positions.pop(name, None)

    # What the device and time do

    @rule(steps=st.integers(1, 12))
    def device_moves(self, steps: int) -> None:
        for _ in range(steps):
            try:
                self.device.step()
            except Deadlock:
                return

    @rule(seconds=st.floats(0.1, 0.5 * TIMEOUT_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(stream=st.integers(0, 4 * STREAMS))
    def stream_hangs(self, stream: int) -> None:
        """One time in four."""
        for hung in self.streams[stream : stream + 1]:
            hung.hung = True

    @rule()
    def streams_wake(self) -> None:
        for stream in self.streams:
            stream.hung = False

    # What the owner of the arena does

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 99), by_lease=st.booleans())
    def settle(self, which: int, by_lease: bool) -> None:
        lease = self.ended[which % len(self.ended)].lease
        known = lease.state
        outcome = self.arena.settle(lease if by_lease else lease.execution)
        if outcome is Settlement.RELEASED:
            assert (known, lease.state) == (LeaseState.SEALED, LeaseState.SETTLED)
        elif outcome is Settlement.ALREADY_RELEASED:
            assert known is LeaseState.SETTLED
        elif outcome is Settlement.STALE_GENERATION:
            assert not by_lease
            assert lease not in (lease.slot.lease, lease.slot.last)
        else:
            assert outcome in (Settlement.NOT_QUIESCED, Settlement.IN_DOUBT)
            assert lease.state in (LeaseState.SEALED, LeaseState.QUARANTINED)

    @rule()
    def watchdog(self) -> None:
        for lease in self.arena.watch():
            assert lease.state is not LeaseState.QUARANTINED

    @precondition(lambda self: self.executions)
    @rule()
    def close_is_refused(self) -> None:
        before = [(slot.lease, slot.last, slot.quarantined) for slot in self.arena.slots]
        for end in (self.arena.close, self.arena.reset):
            with pytest.raises(StillLeased):
                end()
        assert before == [(slot.lease, slot.last, slot.quarantined) for slot in self.arena.slots]
        assert not self.arena.closed

    # What always holds

    @invariant()
    def rows_are_right(self) -> None:
        assert not self.wrong

    @invariant()
    def every_page_has_one_owner(self) -> None:
        assert np.array_equal(self.store.owners(4), np.arange(1, self.store.pages(4)))

    @invariant()
    def every_lease_is_somewhere(self) -> None:
        held = [slot.lease for slot in self.arena.slots if slot.lease is not None]
        assert set(held) == {execution.lease for execution in self.executions}
        lost = sum(execution.lease.state is LeaseState.QUARANTINED for execution in self.ended)
        assert self.arena.counters.quarantined == lost
        assert self.arena.events.created <= 3 * SLOTS * STREAMS + SLOTS + 1

    @invariant()
    def an_open_execution_goes_on(self) -> None:
        assert all(execution.lease.state is LeaseState.ACQUIRED for execution in self.executions)

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for execution in list(self.executions):
            self.end(execution)
        self.streams_wake()
        self.device.run()  # what hung may run after all, and must not hurt anybody
        self.rows_are_right()
        self.now += 2 * TIMEOUT_S
        self.arena.watch()
        for execution in self.ended:
            outcome = self.arena.settle(execution.lease)
            doubtful = self.arena.counters.quarantined > 0  # and whoever broke off behind that is in doubt
            over = outcome in (Settlement.RELEASED, Settlement.ALREADY_RELEASED)
            assert over or (doubtful and outcome is Settlement.IN_DOUBT), (outcome, execution.lease)
        self.tails_are_right()
        assert check(self.trace.records()).violations == ()
        self.slots_are_free_or_lost()

    def tails_are_right(self) -> None:
        """Each request that is not void goes on by one window."""
        for name in list(self.positions):
            start = self.positions[name]
            if self.begin((RequestChunk(name, start, start + SHAPE.ratio),), 0, self.mint.mint(), self.streams[0]):
                execution = self.executions[0]
                while execution.steps:
                    self.queue(execution, *execution.steps.pop(0), self.streams[0])
                self.end(execution)
                self.device.run()
        self.rows_are_right()

    def slots_are_free_or_lost(self) -> None:
        free = sum(slot.quarantined is None for slot in self.arena.slots)
        for _ in range(free):
            self.arena.acquire(ExecutionId(self.mint.mint()))
        with pytest.raises(Exhausted) as refused:
            self.arena.acquire(ExecutionId(self.mint.mint()))
        assert refused.value.fatal == (free == 0)


TestLongRuns = Worker.TestCase
TestLongRuns.settings = settings(max_examples=40, stateful_step_count=60, suppress_health_check=list(HealthCheck))


def test_without_waits_long_runs_go_wrong() -> None:
    """Negative control: the machine sees what the arena prevents."""

    class Unordered(Worker):
        ordered = False

    quick = settings(max_examples=100, stateful_step_count=60, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Unordered, settings=quick)


def recorded(seed: int, forwards: int = 12) -> list[Record]:
    """The trace of a worker that serves, without faults: uBatches cut inside a request, two kinds on two streams."""
    worker: Any = Worker()
    worker.start(seed)
    for turn in range(forwards):
        names = REQUESTS[:SEATS] if turn % 3 else REQUESTS[1:]
        worker.serve(names, [7, 12, 33], [turn % STREAMS, (turn + 1) % STREAMS, 2], 0.5)
        worker.device_moves(5 + turn)
        worker.cancel(REQUESTS[turn % 4])
    worker.device.run()
    assert worker.wrong == []
    records: list[Record] = worker.trace.records()
    return records


@pytest.mark.parametrize("seed", range(5))
def test_a_recorded_run_is_clean_under_other_orders_of_the_device(seed: int) -> None:
    records = recorded(3)
    assert check(records).violations == ()
    found = replay(records, seed)
    assert found.leases > 15
    assert found.clean, (found.wrong, found.unordered)
    assert found.arena.counters.waits > 0


def test_a_trace_read_back_from_its_file_replays_the_same(tmp_path: Path) -> None:
    worker_trace = Trace(None)
    records = recorded(5, forwards=4)
    for record in records:
        worker_trace.note(record[1:])
    worker_trace.save(tmp_path / "trace.jsonl")
    again = load(tmp_path / "trace.jsonl").records
    one, two = replay(records, 1), replay(again, 1)
    assert one.clean
    assert two.clean
    assert one.arena.counters == two.arena.counters


def test_a_replay_without_waits_is_not_clean_in_memory_or_trace() -> None:
    records = recorded(3)
    found = [replay(records, seed, ordered=False) for seed in range(5)]
    assert all(each.wrong for each in found)
    assert all(each.unordered for each in found)


def test_a_trace_that_a_replay_cannot_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="begins a capture"):
        replay([(0, "acquire", 1, 0, "x", "capture")])
    with pytest.raises(ValueError, match="whose acquire is missing"):
        replay([(0, "seal", 1, True)])
    with pytest.raises(ValueError, match="replays a graph"):
        replay([(0, "replay", 1, "key", 0)])


def two_slots() -> tuple[ModelDevice, list[ModelStream], WorkspaceArena[ModelStream], list[float]]:
    device, now = ModelDevice(), [0.0]
    streams = [device.stream(), device.stream()]
    return device, streams, WorkspaceArena(device, 2, fence_timeout_s=10.0, clock=lambda: now[0]), now


def test_a_lease_that_broke_off_behind_a_lost_one_stays_in_doubt_when_its_slot_has_moved_on() -> None:
    """Found by a long run: it was not quiesced for ever."""
    device, (one, two), arena, _ = two_slots()
    first, second = arena.acquire(ExecutionId(Generation(1))), arena.acquire(ExecutionId(Generation(1), 1))
    second.follow(continues=[first])
    second.touch(two, writes=["lists"])
    second.seal(whole=False)
    first.touch(one, writes=["lists"])
    first.seal()
    third = arena.acquire(ExecutionId(Generation(2)))
    third.touch(two, writes=["lists"])
    third.seal()
    arena.quarantine(first, "slow")
    device.run()
    assert third.slot is second.slot
    assert arena.settle(third) is Settlement.RELEASED
    assert arena.settle(second) is Settlement.IN_DOUBT


def test_a_slot_behind_one_that_is_quarantined_in_the_same_acquire_is_not_leased() -> None:
    """Found by a long run: the new lease was refused at its first touch."""
    device, (one, two), arena, now = two_slots()
    free, lost = arena.acquire(ExecutionId(Generation(1))), arena.acquire(ExecutionId(Generation(1), 1))
    two.hung = True
    lost.touch(two, writes=["lists"])
    lost.seal()
    free.seal()
    follower = arena.acquire(ExecutionId(Generation(2)))
    follower.follow(after=[lost])
    follower.touch(one, writes=["lists"])
    now[0] = 6.0
    follower.seal()
    now[0] = 12.0
    with pytest.raises(Exhausted):
        arena.acquire(ExecutionId(Generation(3)))
    assert lost.state is LeaseState.QUARANTINED
    two.hung = False
    device.run()
    arena.acquire(ExecutionId(Generation(3)))
