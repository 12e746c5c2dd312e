# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Every outcome and every state of the workspace arena, one by one, on the model device.

Whatever a test does, its trace must have no unordered reuse in it at the end.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from afd_dsv4.device.api import StreamId
from afd_dsv4.device.model import CaptureViolation, ModelDevice, ModelEvent, ModelGraph, ModelStream
from afd_dsv4.workspace.arena import (
    ArenaClosed,
    CaptureError,
    Exhausted,
    Settlement,
    StillLeased,
    WorkspaceArena,
)
from afd_dsv4.workspace.fence import EventError
from afd_dsv4.workspace.identity import Domain, ExecutionId, ExecutionKind, Generation
from afd_dsv4.workspace.lease import WHOLE, Lease, LeaseState, OrderError
from afd_dsv4.workspace.order import check
from afd_dsv4.workspace.trace import Trace
from tests.model_runtime import watch_lock

L = Lease[ModelStream]


class FaultyDevice(ModelDevice):
    """Calls named in `fail` raise, a `lively` one moves whenever it is asked.

    Attributes:
        made: its events, as long as somebody holds them.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.fail: set[str] = set()
        self.lively = False
        self.made: weakref.WeakSet[ModelEvent] = weakref.WeakSet()

    def event(self) -> ModelEvent:
        self.events += 1
        event = FaultyEvent(self)
        self.made.add(event)
        return event


class FaultyEvent(ModelEvent):
    def __init__(self, device: FaultyDevice) -> None:
        super().__init__(device)
        self._faulty = device

    def record(self, stream: ModelStream) -> None:
        self._may("record")
        super().record(stream)

    def wait(self, stream: ModelStream) -> None:
        self._may("wait")
        super().wait(stream)

    def query(self) -> bool:
        self._may("query")
        if self._faulty.lively:
            self._faulty.step()
        return super().query()

    def _may(self, call: str) -> None:
        if call in self._faulty.fail:
            raise RuntimeError(f"the device refuses to {call}")


class World:
    """An arena with a clock that a test moves, streams that a test advances, and the reasons of voided requests."""

    def __init__(
        self, slots: int = 2, *, streams: int = 3, graphs: Sequence[Iterable[Hashable]] = (), ordered: bool = True
    ) -> None:
        self.now = 0.0
        self.device = FaultyDevice()
        self.streams = [self.device.stream() for _ in range(streams)]
        self.trace = Trace(None)
        self.arena: WorkspaceArena[ModelStream] = WorkspaceArena(
            self.device, slots, graphs=graphs, ordered=ordered, fence_timeout_s=60, clock=self.clock, trace=self.trace
        )
        self.voids: list[tuple[int, str]] = []
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now

    def open(self, generation: int, *streams: ModelStream, continues: Sequence[L] = ()) -> L:
        """A lease that has touched on each of `streams`, and whose requests can be void."""
        lease = self.arena.acquire(ExecutionId(Generation(generation)))
        lease.follow(continues=continues, void=lambda why: self.voids.append((generation, why)))
        for stream in streams:
            lease.touch(stream, writes=[stream.index], step="layer 0")
            self.work(stream, f"{generation} on {stream.index}")
        if streams:
            lease.complete("layer 0")
        return lease

    def sealed(self, generation: int, *streams: ModelStream, continues: Sequence[L] = ()) -> L:
        lease = self.open(generation, *streams, continues=continues)
        lease.seal()
        return lease

    def work(self, stream: ModelStream, name: str) -> None:
        self.device.launch(stream, lambda: self.log.append(name))

    def run_only(self, *streams: ModelStream) -> None:
        """Run these streams as far as they come without the others."""
        while ready := [stream for stream in streams if stream.queue and stream.queue[0].ready()]:
            ready[0].queue.popleft().run()

    def given(self) -> list[int]:
        return [stream.given for stream in self.device.streams]

    def states(self) -> list[tuple[object, ...]]:
        """All that the arena knows and an outsider can see."""
        slots = [(s.lease, s.last, s.oldest, s.sealed, s.quarantined) for s in self.arena.slots]
        leases = [(s.last.state, s.last.fence) for s in self.arena.slots if s.last]
        counters = self.arena.counters
        return [*slots, *leases, (counters.quarantined, counters.waits, counters.records), tuple(self.given())]

    @contextmanager
    def captured(self, key: Hashable, generation: int) -> Iterator[tuple[L, ModelGraph]]:
        with self.device.capture() as graph:
            lease = self.arena.capture(key, capture_id(generation))
            yield lease, graph
            lease.seal()

    def replay(self, key: Hashable, generation: int, graph: ModelGraph, stream: ModelStream) -> L:
        lease = self.arena.replay(key, graph_id(generation))
        lease.touch(stream, writes=[WHOLE], step=WHOLE)
        self.device.replay(graph, stream)
        lease.complete(WHOLE)
        lease.seal()
        return lease


def live_id(generation: int, ubatch: int = 0) -> ExecutionId:
    return ExecutionId(Generation(generation), ubatch)


def graph_id(generation: int) -> ExecutionId:
    return ExecutionId(Generation(generation), domain=Domain.GRAPH)


def capture_id(generation: int) -> ExecutionId:
    return ExecutionId(Generation(generation), domain=Domain.GRAPH, kind=ExecutionKind.CAPTURE)


MakeWorld = Callable[..., World]


@pytest.fixture
def make() -> Iterator[MakeWorld]:
    """Makes worlds, and asks the order checker about each of them in the end."""
    made: list[World] = []

    def world(*arguments: object, **options: object) -> World:
        made.append(World(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield world
    for each in made:
        report = check(each.trace.records())
        assert not (each.arena.ordered and report.violations), report


# -- settlement


@pytest.mark.parametrize("by", ["lease", "identity"])
def test_a_lease_is_not_quiesced_until_its_fence_passes_then_released_then_already_released(
    make: MakeWorld, by: str
) -> None:
    world = make()
    a, b, _ = world.streams
    lease = world.open(1, a, b)
    what = lease if by == "lease" else lease.execution
    assert world.arena.settle(what) is Settlement.NOT_QUIESCED  # still open
    lease.seal()
    given = world.given()
    assert world.arena.settle(what) is Settlement.NOT_QUIESCED  # sealed, nothing has run
    world.run_only(a)
    assert world.arena.settle(what) is Settlement.NOT_QUIESCED  # one of two streams has
    world.run_only(b)
    assert world.arena.settle(what) is Settlement.RELEASED
    assert world.arena.settle(what) is Settlement.ALREADY_RELEASED
    assert lease.state is LeaseState.SETTLED
    assert world.given() == given  # asking queues nothing


def test_an_execution_that_the_arena_never_saw_is_not_found(make: MakeWorld) -> None:
    world = make()
    world.open(3)
    assert world.arena.settle(live_id(4)) is Settlement.NOT_FOUND


def test_a_lease_of_another_arena_is_not_found_and_stays_as_it_is(make: MakeWorld) -> None:
    here, there = make(), make()
    theirs = there.sealed(1, there.streams[0])
    there.device.run()
    assert here.arena.settle(theirs) is Settlement.NOT_FOUND
    assert theirs.state is LeaseState.SEALED
    assert there.arena.settle(theirs) is Settlement.RELEASED


def test_a_lease_of_an_arena_that_was_closed_is_stale_in_the_one_that_followed_it(make: MakeWorld) -> None:
    here, there = make(), make()
    theirs = there.sealed(1, there.streams[0])
    there.device.run()
    there.arena.close()
    for _ in range(2):
        assert here.arena.settle(theirs) is Settlement.STALE_GENERATION
    assert there.arena.settle(theirs) is Settlement.ALREADY_RELEASED


def test_a_generation_from_before_the_arena_is_stale_and_never_another_execution() -> None:
    device = FaultyDevice()
    arena: WorkspaceArena[ModelStream] = WorkspaceArena(device, 2, since=Generation(7))
    assert arena.settle(live_id(7)) is Settlement.STALE_GENERATION
    assert arena.settle(live_id(8)) is Settlement.NOT_FOUND
    arena.acquire(live_id(8))
    assert arena.settle(live_id(8)) is Settlement.NOT_QUIESCED
    assert arena.settle(live_id(7)) is Settlement.STALE_GENERATION


def test_a_lease_of_another_arena_cannot_be_quarantined_here(make: MakeWorld) -> None:
    here, there = make(), make()
    theirs = there.open(1)
    with pytest.raises(ValueError, match="of another arena"):
        here.arena.quarantine(theirs, "a mistake")
    assert theirs.state is LeaseState.ACQUIRED
    assert here.arena.counters.quarantined == there.arena.counters.quarantined == 0


@pytest.mark.parametrize("then", ["open", "sealed"])
def test_a_stale_or_second_settle_does_not_release_the_newer_lease_of_the_slot(make: MakeWorld, then: str) -> None:
    world = make(slots=1)
    old = world.sealed(1, world.streams[0])
    world.device.run()
    assert world.arena.settle(old) is Settlement.RELEASED
    new = world.open(2, world.streams[0])
    if then == "sealed":
        new.seal()
    assert new.slot is old.slot
    assert world.arena.settle(live_id(1)) is (
        Settlement.ALREADY_RELEASED if then == "open" else Settlement.STALE_GENERATION
    )
    assert world.arena.settle(old) is Settlement.ALREADY_RELEASED
    assert world.arena.settle(new) is Settlement.NOT_QUIESCED
    assert new.state is (LeaseState.ACQUIRED if then == "open" else LeaseState.SEALED)
    assert world.arena.live() == (new,)


@pytest.mark.parametrize("by", ["lease", "identity"])
@pytest.mark.parametrize("how", ["settled before", "never settled"])
def test_a_lease_from_before_a_reset_is_stale(make: MakeWorld, by: str, how: str) -> None:
    world = make(slots=1)
    lease = world.sealed(1, world.streams[0])
    world.device.run()
    if how == "settled before":
        assert world.arena.settle(lease) is Settlement.RELEASED
    world.arena.reset()
    new = world.open(2)
    assert world.arena.settle(lease if by == "lease" else lease.execution) is Settlement.STALE_GENERATION
    assert new.state is LeaseState.ACQUIRED


@pytest.mark.parametrize("by", ["lease", "identity"])
@pytest.mark.parametrize("state", ["open", "sealed"])
def test_a_quarantined_lease_is_in_doubt_for_ever(make: MakeWorld, by: str, state: str) -> None:
    world = make()
    lease = world.open(1, world.streams[0])
    if state == "sealed":
        lease.seal()
    world.arena.quarantine(lease, "by hand")
    what = lease if by == "lease" else lease.execution
    assert world.arena.settle(what) is Settlement.IN_DOUBT
    world.device.run()
    assert world.arena.settle(what) is Settlement.IN_DOUBT
    assert lease.state is LeaseState.QUARANTINED


def test_a_sealed_lease_that_touched_nothing_is_released_at_once(make: MakeWorld) -> None:
    world = make()
    lease = world.sealed(1)
    assert world.arena.settle(lease) is Settlement.RELEASED
    assert world.arena.settle(lease) is Settlement.ALREADY_RELEASED
    assert world.device.events == 0


def test_an_empty_lease_does_not_hide_those_that_it_follows(make: MakeWorld) -> None:
    """Its seats are remembered as its own: who takes them next must wait for what it never waited for itself."""
    world = make(slots=3)
    a, b, _ = world.streams
    first = world.sealed(1, a)
    empty = world.arena.acquire(live_id(2))
    empty.follow(continues=[first])
    empty.seal()
    assert world.arena.settle(empty) is Settlement.NOT_QUIESCED
    third = world.arena.acquire(live_id(3))
    third.follow(after=[empty])
    third.touch(b, writes=["x"])
    world.work(b, "third")
    third.seal()
    world.run_only(b)
    assert world.log == []
    world.device.run()
    assert world.log == ["1 on 0", "third"]
    assert world.arena.settle(empty) is Settlement.RELEASED


# -- quarantine


def test_a_fence_older_than_the_limit_is_quarantined_at_acquire_and_not_before(make: MakeWorld) -> None:
    world = make(slots=2)
    a, b, _ = world.streams
    world.now = 5
    lease = world.sealed(1, a)
    world.open(2, b)
    world.now = 65  # 60 s after the seal: the limit itself
    handed_on = world.open(3)
    assert handed_on.slot is lease.slot
    handed_on.seal()  # it touched nothing: the slot stays behind the first lease, whose age goes on
    world.now = 65.5
    with pytest.raises(Exhausted):
        world.open(4)
    assert lease.state is LeaseState.QUARANTINED
    assert world.arena.counters.quarantined == 1
    doubt = "generation 1 ubatch 0 substep 0 (live, eager) is in doubt"
    assert world.voids == [(1, f"{doubt}: its fence has not passed 60.5 s after its seal (limit 60)")]


def test_a_fence_that_has_passed_is_not_quarantined_however_old(make: MakeWorld) -> None:
    world = make(slots=1)
    world.sealed(1, world.streams[0])
    world.device.run()
    world.now = 1e6
    assert world.arena.watch() == ()
    world.open(2)
    assert world.arena.counters.quarantined == 0


def test_the_watchdog_quarantines_a_fence_that_is_too_old(make: MakeWorld) -> None:
    world = make()
    a, b, _ = world.streams
    hung, done = world.sealed(1, a), world.sealed(2, b)
    world.run_only(b)
    world.now = 61
    given = world.given()
    assert world.arena.watch() == ()  # nobody waits for it
    assert (hung.state, done.state) == (LeaseState.QUARANTINED, LeaseState.SETTLED)
    assert world.given() == given


def test_a_quarantined_slot_is_never_leased_again_nor_waited_for(make: MakeWorld) -> None:
    world = make(slots=2)
    a, b, _ = world.streams
    world.arena.quarantine(lost := world.sealed(1, a), "by hand")
    a.hung = True
    for generation in range(2, 20):
        lease = world.sealed(generation, b)
        assert lease.slot is not lost.slot
    world.run_only(b)
    assert not b.queue  # 18 leases ran, none of them behind the hung stream
    assert world.arena.counters.waits == 0
    assert world.arena.counters.handed_on == 17  # all on the one slot that is left
    a.hung = False
    world.device.run()  # that it passes after all does not bring it back
    world.open(20)
    with pytest.raises(Exhausted):
        world.open(21)
    assert [slot.quarantined for slot in world.arena.slots] == [lost, None]


def test_a_fence_that_cannot_be_recorded_quarantines_the_lease_and_raises(make: MakeWorld) -> None:
    world = make()
    lease = world.open(1, world.streams[0], world.streams[1])
    world.device.fail.add("record")
    with pytest.raises(RuntimeError, match="the device refuses to record"):
        lease.seal()
    world.device.fail.clear()
    assert lease.state is LeaseState.QUARANTINED
    assert world.arena.settle(lease) is Settlement.IN_DOUBT
    assert world.arena.slots[0].quarantined
    assert [why for _, why in world.voids] == [
        f"{lease.execution} is in doubt: its fence could not be recorded: the device refuses to record"
    ]
    with pytest.raises(OrderError, match="is sealed after it was quarantined"):
        lease.seal()


@pytest.mark.parametrize("ask", ["settle", "acquire", "watch", "drain", "replay"])
def test_a_fence_that_cannot_be_queried_is_not_believed_to_have_passed(make: MakeWorld, ask: str) -> None:
    world = make(slots=1, graphs=[["g"]])
    a = world.streams[0]
    if ask == "replay":
        with world.captured("g", 1) as (_, graph):
            pass
        lease = world.replay("g", 2, graph, a)
    else:
        lease = world.sealed(2, a)
    world.device.run()  # it has passed, but the device cannot say so
    world.device.fail.add("query")
    if ask == "settle":
        assert world.arena.settle(lease) is Settlement.IN_DOUBT
    elif ask == "watch":
        assert world.arena.watch() == ()
    elif ask == "drain":
        assert world.arena.drain(0) == (lease,)
    else:
        with pytest.raises(Exhausted) as caught:
            world.open(3) if ask == "acquire" else world.replay("g", 3, graph, a)
        assert caught.value.fatal
    assert lease.state is LeaseState.QUARANTINED
    assert lease.slot.quarantined
    assert world.arena.counters.quarantined == 1
    if ask != "replay":
        assert world.voids == [
            (2, f"{lease.execution} is in doubt: its fence cannot be queried: the device refuses to query")
        ]


def test_a_lease_is_quarantined_once_and_says_why_once(make: MakeWorld) -> None:
    world = make()
    lease = world.sealed(1, world.streams[0])
    for why in ("first", "second"):
        world.arena.quarantine(lease, why)
    world.now = 1000
    world.arena.watch()
    assert world.arena.settle(lease) is Settlement.IN_DOUBT
    assert world.arena.counters.quarantined == 1
    assert world.voids == [(1, f"{lease.execution} is in doubt: first")]
    assert [op for _, op, *_ in world.trace.records()].count("quarantine") == 1


def test_a_lease_that_is_over_cannot_be_quarantined_any_more(make: MakeWorld) -> None:
    world = make()
    lease = world.sealed(1, world.streams[0])
    world.device.run()
    assert world.arena.settle(lease) is Settlement.RELEASED
    assert lease.void is None  # what it would have voided is not kept alive either
    world.arena.quarantine(lease, "too late")
    assert lease.state is LeaseState.SETTLED
    assert world.voids == []
    assert world.arena.counters.quarantined == 0


def test_an_open_lease_that_is_quarantined_takes_no_touch_and_no_seal_and_keeps_its_slot(make: MakeWorld) -> None:
    world = make(slots=1)
    a, b, _ = world.streams
    before = world.sealed(1, a)
    lease = world.open(2, b)
    world.arena.quarantine(lease, "its thread is gone")
    for late in (lambda: lease.touch(b, writes=["x"]), lease.seal):
        with pytest.raises(OrderError, match="after it was quarantined"):
            late()
    assert world.voids == [(2, f"{lease.execution} is in doubt: its thread is gone")]
    world.device.run()
    assert world.arena.settle(before) is Settlement.RELEASED  # the lease before it is not drawn in
    with pytest.raises(Exhausted) as caught:
        world.open(3)
    assert caught.value.fatal
    assert world.arena.live() == (lease,)


def test_a_capture_that_is_quarantined_frees_its_slot_because_nothing_of_it_runs(make: MakeWorld) -> None:
    world = make(graphs=[["g"]])
    with world.device.capture():
        lease = world.arena.capture("g", capture_id(1))
        lease.touch(world.streams[0], writes=["x"])
        world.arena.quarantine(lease, "the capture broke off")
    with pytest.raises(CaptureError, match="was never captured"):
        world.arena.replay("g", graph_id(2))
    with world.captured("g", 3) as (again, _):
        pass
    assert again.slot is lease.slot
    assert world.arena.live() == ()


def test_a_slot_is_as_old_as_the_fence_that_pends_longest_however_often_it_is_handed_on(make: MakeWorld) -> None:
    world = make(slots=1)
    a, b, _ = world.streams
    a.hung = True
    hung = world.sealed(1, a)
    for world.now in (20, 40, 60):
        world.sealed(100 + world.now, a, b)
    assert world.arena.counters.handed_on == 3
    world.now = 61
    with pytest.raises(Exhausted) as caught:
        world.open(2)
    assert caught.value.fatal
    assert "has not passed 61 s after its seal (limit 60)" in dict(world.voids)[1]
    assert world.arena.slots[0].quarantined is hung
    assert world.arena.watch() == (world.arena.slots[0].last,)  # it waits for the hung one


def test_a_slot_that_is_always_pending_on_a_device_that_moves_is_never_quarantined(make: MakeWorld) -> None:
    """Whenever the slot is handed on, the last lease pends; the one before it has passed."""
    world = make(slots=1)
    a = world.streams[0]
    world.now = 59
    world.sealed(1, a)
    for generation in range(2, 200):
        world.now = 59 * generation
        given = a.given
        world.sealed(generation, a)
        while a.given - len(a.queue) < given:
            a.queue.popleft().run()
    assert world.arena.counters.handed_on == 198
    assert world.arena.counters.quarantined == 0
    assert world.arena.events.created == 2  # the fence of the lease that pends longest, and that of the others


@pytest.mark.parametrize("touches", [True, False], ids=["touch", "queue nothing"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_thousand_executions_that_break_off_behind_a_hung_stream_cost_no_more_than_the_first(
    make: MakeWorld, slots: int, touches: bool
) -> None:
    """Each follows the one before in its seat. Nothing may walk the chain of them, let alone every way through it."""
    world = make(slots=slots)
    a = world.streams[0]
    a.hung = True
    before = world.sealed(1, a)
    for generation in range(2, 1000):
        lease = world.arena.acquire(live_id(generation))
        lease.follow(after=[before], void=lambda _why: None)
        if touches:
            lease.touch(a, writes=["x"])
        lease.seal(whole=False)
        assert len(lease._undominated) <= 2
        before = lease
    world.now = 61
    world.arena.watch()
    assert world.arena.counters.quarantined >= 1


def test_nobody_is_made_to_wait_for_work_in_doubt(make: MakeWorld) -> None:
    world = make(slots=2)
    hung, other, healthy = world.streams
    hung.hung = True
    first = world.sealed(1, hung)
    world.now = 59
    second = world.sealed(2, other, continues=[first])  # so `other` waits for the hung stream
    world.now = 61
    assert world.arena.watch() == (second,)
    assert not second.can_be_waited_for()
    waits = world.arena.counters.waits
    with pytest.raises(Exhausted) as caught:  # not handed on, or the healthy stream would never move again
        world.open(3, healthy)
    assert not caught.value.fatal  # the second may pass yet
    assert world.arena.counters.waits == waits
    world.now = 59 + 61
    world.arena.watch()
    assert world.arena.counters.quarantined == 2
    with pytest.raises(Exhausted) as caught:
        world.open(4, healthy)
    assert caught.value.fatal


def test_who_has_the_slot_behind_a_lease_that_is_quarantined_is_quarantined_at_its_own_age(make: MakeWorld) -> None:
    world = make(slots=1)
    a, b, _ = world.streams
    a.hung = True
    first = world.sealed(1, a)
    world.now = 30
    second = world.sealed(2, b)
    world.now = 61
    assert world.arena.watch() == (second,)
    assert (first.state, second.state) == (LeaseState.QUARANTINED, LeaseState.SEALED)
    world.now = 91
    assert world.arena.watch() == ()
    assert second.state is LeaseState.QUARANTINED
    assert [generation for generation, _ in world.voids] == [1, 2]
    assert world.arena.counters.quarantined == 2
    assert world.arena.close() == (second,)


def test_a_query_that_another_threads_capture_forbids_quarantines_nothing(make: MakeWorld) -> None:
    """Between the begin of a capture and the arena's own word of it, and behind that, a look must not be fatal."""
    world = make()
    lease = world.sealed(1, world.streams[0])
    with world.device.capture(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.device), "capturing", lambda _self: False)  # as another thread sees it
        patch.setattr(ModelEvent, "query", forbidden)
        assert world.arena.watch() == ()
        assert world.arena.settle(lease) is Settlement.NOT_QUIESCED
    world.device.run()
    assert world.arena.settle(lease) is Settlement.RELEASED
    assert world.arena.counters.quarantined == 0


def forbidden(_event: ModelEvent) -> bool:
    raise CaptureViolation("an event is queried while something is captured")


def test_a_drain_during_a_capture_is_refused(make: MakeWorld) -> None:
    world = make(graphs=[["g"]])
    world.sealed(1, world.streams[0])
    with world.device.capture():
        lease = world.arena.capture("g", capture_id(2))
        with pytest.raises(CaptureError, match="cannot be drained while a graph is captured"):
            world.arena.drain(0.0)
        lease.seal()
    assert world.arena.counters.quarantined == 0


def test_an_empty_lease_does_not_postpone_the_time_out_of_the_lease_before(make: MakeWorld) -> None:
    world = make(slots=1)
    hung = world.sealed(1, world.streams[0])
    for generation in range(2, 60):
        world.now = generation - 1  # up to 58 s
        world.sealed(generation)
    world.now = 60.5
    with pytest.raises(Exhausted):
        world.open(60)
    assert hung.state is LeaseState.QUARANTINED


def test_executions_that_fail_to_begin_neither_postpone_the_time_out_nor_form_a_chain(make: MakeWorld) -> None:
    world = make(slots=1)
    hung = world.sealed(1, world.streams[0])
    for generation in range(2, 3000):
        world.now = 60 * generation / 3000
        failed = world.arena.acquire(live_id(generation))
        failed.follow(continues=[hung])
        failed.seal(whole=False)
    world.now = 60.5
    with pytest.raises(Exhausted) as caught:
        world.open(3000)
    assert caught.value.fatal
    assert world.arena.settle(hung) is Settlement.IN_DOUBT


def test_executions_that_fail_to_begin_leave_the_slot_behind_what_it_was(make: MakeWorld) -> None:
    world = make(slots=1)
    a, b, _ = world.streams
    world.sealed(1, a)
    for generation in (2, 3):
        world.arena.acquire(live_id(generation)).seal(whole=False)
    world.sealed(4, b)
    assert blocked(world, b) == [True]
    world.device.run()
    assert world.log == ["1 on 0", "4 on 1"]


# -- in doubt


def test_doubt_spreads_to_all_that_wait_directly_or_not_and_to_nobody_else(make: MakeWorld) -> None:
    world = make(slots=5, streams=5)
    a, b, c, d, e = world.streams
    a.hung = True
    first = world.sealed(1, a)
    world.now = 30
    second = world.sealed(2, b, continues=[first])
    third = world.sealed(3, c, continues=[second])
    apart, done = world.sealed(4, d), world.sealed(5, e)
    world.run_only(b, c, e)
    assert world.log == ["5 on 4"]
    world.now = 61
    assert world.arena.watch() == (second, third)
    leases = (first, second, third, apart, done)
    assert [world.arena.settle(lease) for lease in leases] == [
        Settlement.IN_DOUBT,
        Settlement.IN_DOUBT,
        Settlement.IN_DOUBT,
        Settlement.NOT_QUIESCED,
        Settlement.ALREADY_RELEASED,
    ]
    assert [generation for generation, _ in world.voids] == [1]
    world.now = 91  # now they are too old themselves; the one apart is, too
    assert world.arena.watch() == ()
    assert [generation for generation, _ in world.voids] == [1, 2, 3, 4]
    assert world.arena.counters.quarantined == 4


def test_a_lease_in_doubt_is_released_if_it_passes_after_all(make: MakeWorld) -> None:
    world = make(slots=3)
    a, b, _ = world.streams
    first = world.sealed(1, a)
    world.now = 30
    second = world.sealed(2, b, continues=[first])
    world.now = 61
    assert world.arena.watch() == (second,)
    assert world.arena.settle(second) is Settlement.IN_DOUBT
    assert world.arena.settle(second.execution) is Settlement.IN_DOUBT
    assert second.state is LeaseState.SEALED  # in doubt is an answer, not a state
    world.device.run()
    assert world.arena.settle(second) is Settlement.RELEASED
    assert world.arena.settle(first) is Settlement.IN_DOUBT
    assert world.arena.counters.quarantined == 1


def test_a_lease_that_followed_an_earlier_one_of_the_slot_is_not_in_doubt(make: MakeWorld) -> None:
    world = make(slots=2)
    a, b, c = world.streams
    early = world.sealed(1, a)
    follower = world.sealed(2, b, continues=[early])
    world.run_only(a)  # the first is over, the follower has not run yet
    world.now = 10
    late = world.sealed(3, c)
    assert late.slot is early.slot
    world.arena.quarantine(late, "by hand")
    assert world.arena.settle(follower) is Settlement.NOT_QUIESCED
    assert world.arena.watch() == ()


def test_a_slot_handed_on_while_its_fence_was_pending_puts_the_new_lease_in_doubt(make: MakeWorld) -> None:
    """The wait is queued already when the time-out comes: nothing can take it back, but it is said."""
    world = make(slots=1)
    a, b, c = world.streams
    hung = world.sealed(1, a)
    world.now = 59
    lease = world.open(2, b)
    world.now = 61
    assert world.arena.watch() == (lease,)
    assert hung.state is LeaseState.QUARANTINED
    assert world.arena.settle(lease) is Settlement.IN_DOUBT
    with pytest.raises(OrderError, match="must wait for"):
        lease.touch(c, writes=["x"])  # another stream is not made to wait for it any more
    lease.seal()
    assert world.arena.settle(lease) is Settlement.IN_DOUBT
    assert world.arena.watch() == (lease,)
    with pytest.raises(Exhausted) as caught:
        world.open(3)
    assert caught.value.fatal
    assert world.arena.counters.quarantined == 1
    world.device.run()
    assert world.arena.settle(lease) is Settlement.RELEASED
    assert [slot.quarantined for slot in world.arena.slots] == [hung]


def test_later_leases_of_a_quarantined_slot_are_in_doubt(make: MakeWorld) -> None:
    world = make(slots=1)
    a = world.streams[0]
    first = world.sealed(1, a)
    world.now = 30
    second = world.sealed(2, a)
    third = world.sealed(3, a)  # its fence is the event of the second, recorded again
    world.now = 61
    assert world.arena.watch() == (third,)
    assert first.state is LeaseState.QUARANTINED
    assert [world.arena.settle(lease) for lease in (first, second, third)] == [Settlement.IN_DOUBT] * 3


# -- exhaustion


def test_exhaustion_changes_nothing_and_a_later_acquire_works(make: MakeWorld) -> None:
    world = make(slots=3)
    a, b, _ = world.streams
    lost = world.sealed(1, a)
    world.arena.quarantine(lost, "by hand")
    held, other = world.open(2, b), world.open(3)
    before, leases = world.states(), world.arena.counters.leases
    for generation in range(4, 10):
        with pytest.raises(Exhausted):
            world.open(generation)
    assert world.states() == before
    assert world.arena.counters.leases == leases
    assert [generation for generation, _ in world.voids] == [1]
    assert (held.state, other.state) == (LeaseState.ACQUIRED, LeaseState.ACQUIRED)
    held.touch(b, reads=[0])
    held.seal()
    assert world.open(10).slot is held.slot


def test_exhausted_names_the_holders_and_the_lost_and_says_what_to_do(make: MakeWorld) -> None:
    world = make(slots=2)
    world.arena.quarantine(world.sealed(1, world.streams[0]), "by hand")
    held = world.open(2)
    with pytest.raises(Exhausted) as caught:
        world.open(3)
    assert not caught.value.fatal
    assert str(caught.value) == (
        "generation 3 ubatch 0 substep 0 (live, eager) wants a workspace slot, and none of 2 is free: "
        "held, or behind what is held, by: generation 2 ubatch 0 substep 0 (live, eager). "
        "1 are quarantined for ever, nobody can prove that these are over: "
        "Lease(1, slot 0, generation 1 ubatch 0 substep 0 (live, eager), quarantined). "
        "Finish executions, or configure more slots"
    )
    world.arena.quarantine(held, "by hand")
    with pytest.raises(Exhausted, match=r"2 are quarantined for ever.*The worker cannot go on; restart it") as caught:
        world.open(3)
    assert caught.value.fatal


def test_a_slot_behind_an_execution_that_is_open_elsewhere_is_not_lost(make: MakeWorld) -> None:
    """One slot is lost; the other one's lease broke off and follows a graph's, which may still finish."""
    world = make(slots=2, graphs=[["g"]])
    a, _, _ = world.streams
    with world.captured("g", 1) as (_, graph):
        pass
    graph_lease = world.arena.replay("g", graph_id(2))
    world.arena.quarantine(world.open(3), "by hand")
    broken = world.arena.acquire(live_id(4))
    broken.follow(continues=[graph_lease])
    broken.seal(whole=False)
    with pytest.raises(Exhausted, match="Finish executions") as caught:
        world.open(5)
    assert not caught.value.fatal
    graph_lease.touch(a, writes=[WHOLE])
    world.device.replay(graph, a)
    graph_lease.seal()
    assert world.open(5).slot is broken.slot


def test_an_execution_has_one_lease(make: MakeWorld) -> None:
    world = make(slots=3)
    world.open(1)
    with pytest.raises(ValueError, match="holds slot 0 already"):
        world.arena.acquire(live_id(1))
    assert world.arena.acquire(live_id(1, 1)).slot.index == 1  # another uBatch is another execution
    assert world.arena.counters.leases == 2


@pytest.mark.parametrize(("slots", "timeout_s"), [(0, 60.0), (1, 0.0), (1, -1.0)])
def test_an_arena_without_slots_or_without_time_is_refused(slots: int, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"at least one slot, got 0|fence_timeout_s must be above 0"):
        WorkspaceArena(ModelDevice(), slots, fence_timeout_s=timeout_s)


# -- close, drain, reset


@pytest.mark.parametrize("what", ["close", "reset"])
@pytest.mark.parametrize("state", ["open", "pending"])
def test_what_is_live_is_listed_and_nothing_is_changed(make: MakeWorld, what: str, state: str) -> None:
    world = make()
    done = world.sealed(1, world.streams[0])
    world.device.run()
    lease = world.open(2, world.streams[1])
    if state == "pending":
        lease.seal()
    assert done.state is LeaseState.SETTLED
    before = world.states()
    call = getattr(world.arena, what)
    with pytest.raises(StillLeased, match=rf"cannot {what}: 1 leases may still touch it: Lease\(2, slot 0, gen.*rain"):
        call()
    assert world.states() == before
    assert (world.arena.closed, world.arena.epoch) == (False, 0)
    if state == "open":
        lease.seal()
    world.device.run()
    call()


def test_after_the_close_nothing_is_leased_captured_or_replayed(make: MakeWorld) -> None:
    world = make(graphs=[["g"]])
    with world.captured("g", 1):
        pass
    lease = world.sealed(2, world.streams[0])
    world.device.run()
    assert world.arena.close() == ()
    for ask in (
        lambda: world.open(3),
        lambda: world.arena.capture("g", capture_id(3)),
        lambda: world.arena.replay("g", graph_id(3)),
    ):
        with pytest.raises(ArenaClosed, match=r"generation 3 .* after the arena was closed"):
            ask()
    assert world.arena.settle(lease) is Settlement.ALREADY_RELEASED
    assert world.arena.close() == ()  # closing twice is closing


def test_quarantined_leases_are_returned_by_the_close_and_stop_a_reset(make: MakeWorld) -> None:
    world = make()
    lost = world.sealed(1, world.streams[0])
    world.arena.quarantine(lost, "by hand")
    with pytest.raises(StillLeased, match="quarantined"):
        world.arena.reset()
    assert world.arena.epoch == 0
    assert world.arena.close() == (lost,)


def test_draining_waits_for_what_is_sealed_and_returns_what_stays(make: MakeWorld) -> None:
    world = make(slots=3)
    a, b, _ = world.streams
    b.hung = True
    done, lost, held = world.sealed(1, a), world.sealed(2, b), world.open(3)
    world.arena.quarantine(lost, "by hand")
    world.device.lively = True
    assert world.arena.drain(1e6, pause_s=0) == (lost, held)
    assert done.state is LeaseState.SETTLED
    assert b.queue  # only what was sealed is waited for
    assert world.arena.counters.quarantined == 1


def test_what_is_not_over_when_the_drain_ends_is_quarantined(make: MakeWorld) -> None:
    world = make()
    hung = world.sealed(1, world.streams[0])
    assert world.arena.drain(0) == (hung,)
    assert world.voids == [(1, f"{hung.execution} is in doubt: not over 0 s after the arena was to be drained")]
    assert world.arena.close() == (hung,)


def test_a_reset_keeps_the_events_and_makes_old_leases_and_graphs_stale(make: MakeWorld) -> None:
    world = make(slots=1, graphs=[["g"]])
    a, b, _ = world.streams
    with world.captured("g", 1) as (_, graph):
        pass
    old = world.sealed(2, a, b)
    world.replay("g", 3, graph, a)
    world.device.run()
    created = world.arena.events.created
    world.arena.reset()
    assert world.arena.epoch == 1
    with pytest.raises(CaptureError, match="'g', which was captured before the arena was reset; capture it"):
        world.arena.replay("g", graph_id(4))
    with pytest.raises(OrderError, match="after it was settled"):
        old.touch(a, writes=["x"])
    new = world.sealed(5, a, b)
    assert new.slot is old.slot
    assert world.arena.events.created == created
    with world.captured("g", 6) as (_, graph):
        pass
    world.replay("g", 7, graph, a)
    world.device.run()


# -- graphs


def test_a_graph_that_got_no_slot_at_start_up_can_neither_be_captured_nor_replayed(make: MakeWorld) -> None:
    world = make(graphs=[["g", "h"]])
    for ask in (lambda: world.arena.capture("x", capture_id(1)), lambda: world.arena.replay("x", graph_id(1))):
        with pytest.raises(CaptureError, match=r"slot of graph 'x'.* \(assigned: \['g', 'h'\]\); name it there"):
            ask()
    assert world.arena.live() == ()


def test_a_key_has_one_slot() -> None:
    with pytest.raises(ValueError, match="graph key 'g' is assigned to two slots"):
        WorkspaceArena(ModelDevice(), 1, graphs=[["g"], ["g"]])


def test_a_replay_needs_a_capture_that_was_completed(make: MakeWorld) -> None:
    world = make(graphs=[["g"]])
    with pytest.raises(CaptureError, match="which was never captured"):
        world.arena.replay("g", graph_id(1))
    with world.device.capture():
        broken = world.arena.capture("g", capture_id(2))
        broken.seal(whole=False)
    with pytest.raises(CaptureError, match="which was never captured"):
        world.arena.replay("g", graph_id(3))
    with world.device.capture():
        lease = world.arena.capture("g", capture_id(4))
        with pytest.raises(CaptureError, match="is being captured"):
            world.arena.replay("g", graph_id(5))
        lease.seal()
    world.arena.replay("g", graph_id(6))


def test_a_capture_while_an_execution_is_open_is_refused_and_names_it(make: MakeWorld) -> None:
    world = make(graphs=[["g"]])
    held = world.open(1)
    with pytest.raises(CaptureError, match=r"executions are open: \[Lease\(1, slot 0, generation 1"):
        world.arena.capture("g", capture_id(2))
    held.seal()
    with world.captured("g", 2), pytest.raises(CaptureError, match="one graph at a time"):
        world.arena.capture("g", capture_id(3))


def test_a_capture_has_an_execution_of_kind_capture(make: MakeWorld) -> None:
    world = make(graphs=[["g"]])
    with pytest.raises(ValueError, match="a capture has an execution of kind capture, got generation 1"):
        world.arena.capture("g", graph_id(1))


@pytest.mark.parametrize("whose", ["the arena's", "somebody else's"])
def test_nothing_is_leased_while_a_graph_is_captured_and_no_event_is_queried(make: MakeWorld, whose: str) -> None:
    world = make(graphs=[["g"]])
    pending = world.sealed(1, world.streams[0])
    world.now = 61

    def refused() -> None:
        with pytest.raises(CaptureError, match=r"generation 2 .* and none was assigned to it; .*\(assigned: \['g'\]\)"):
            world.open(2)
        # The model device raises at any query in here: none is made.
        assert world.arena.settle(pending) is Settlement.NOT_QUIESCED
        assert world.arena.watch() == ()
        assert (
            pending.state is LeaseState.SEALED
        )  # old enough to be quarantined, but nobody may ask whether it has passed
        assert pending in world.arena.live()
        with pytest.raises(StillLeased):
            world.arena.close()

    if whose == "the arena's":
        with world.captured("g", 3):
            refused()
            assert pending.fence is not None
            with pytest.raises(EventError, match="is queried while a graph is captured; ask again after the capture"):
                pending.fence.passed()
    else:
        with world.device.capture():
            refused()
    world.device.run()
    assert world.arena.settle(pending) is Settlement.RELEASED


def two_stream_graph(world: World) -> tuple[L, ModelGraph]:
    """a writes, b reads it, a writes again."""
    a, b, _ = world.streams
    with world.captured("g", 1) as (lease, graph):
        lease.touch(a, writes=["x"])
        world.work(a, "write")
        lease.touch(b, reads=["x"])
        world.work(b, "read")
        lease.touch(a, writes=["x"])
        world.work(a, "write again")
    return lease, graph


@pytest.mark.parametrize("ordered", [True, False])
def test_captured_touches_order_the_captured_work_and_queue_nothing_outside(make: MakeWorld, ordered: bool) -> None:
    world = make(graphs=[["g"]], ordered=ordered)
    a = world.streams[0]
    world.sealed(9, *world.streams)  # pending: a capture waits for nothing of it
    given = world.given()
    lease, graph = two_stream_graph(world)
    assert world.given() == given
    assert world.arena.settle(lease) is Settlement.ALREADY_RELEASED  # nothing of it runs, so it is over
    assert lease.slot.last is None
    world.device.run()
    world.log.clear()
    for _ in range(20):
        world.device.replay(graph, a)
    world.device.run()
    right = ["write", "read", "write again"] * 20
    assert (world.log == right) == ordered  # negative control: without events the streams of the graph race


def test_a_graph_is_captured_anew_while_its_last_replay_is_pending_and_waits_for_it_when_replayed(
    make: MakeWorld,
) -> None:
    world = make(graphs=[["g"]])
    a, b, _ = world.streams
    _, graph = two_stream_graph(world)
    world.replay("g", 2, graph, a)
    given = world.given()
    with world.captured("g", 3) as (lease, graph):  # the model device refuses a wait across the border of a capture
        lease.touch(b, writes=["x"])
        world.work(b, "new")
    assert world.given() == given
    world.replay("g", 4, graph, b)
    world.device.run()
    assert world.log == ["write", "read", "write again", "new"]


def test_a_replay_follows_the_upload_and_the_last_replay_and_precedes_what_comes_after(make: MakeWorld) -> None:
    for main in (0, 1):
        world = make(graphs=[["g"]])
        copies, compute = world.streams[main], world.streams[1 - main]
        _, graph = two_stream_graph(world)
        for generation in (2, 3, 4):
            lease = world.arena.replay("g", graph_id(generation))
            lease.touch(copies, writes=["lists"])
            world.work(copies, f"upload {generation}")
            lease.touch(compute, writes=[WHOLE], step=WHOLE)
            world.device.replay(graph, compute)
            lease.complete(WHOLE)
            lease.touch(copies, reads=["x"])
            world.work(copies, f"after {generation}")
            lease.seal()
        world.device.run()
        each = ["write", "read", "write again"]
        assert world.log == [
            name for turn in (2, 3, 4) for name in (f"upload {turn}", *each, f"after {turn}")
        ]  # fmt: skip


def test_a_replay_waits_for_the_graph_before_it_in_the_same_slot_and_for_no_eager_lease(make: MakeWorld) -> None:
    world = make(graphs=[["g", "h"]])
    a, b, _ = world.streams
    graphs = {}
    for generation, key in enumerate("gh", 1):
        with world.captured(key, generation) as (lease, graphs[key]):
            lease.touch(a, writes=["x"])
            world.work(a, key)
    world.sealed(3, world.streams[2])
    world.replay("g", 4, graphs["g"], a)
    world.replay("h", 5, graphs["h"], b)
    assert world.arena.counters.handed_on == 1
    world.run_only(*(s for s in world.device.streams if s is not a and s is not world.streams[2]))
    assert world.log == []  # b waits for a's replay
    world.run_only(*(s for s in world.device.streams if s is not world.streams[2]))
    assert world.log == ["g", "h"]


def test_a_graph_slot_that_is_held_is_not_replayed_into_and_the_holder_is_named(make: MakeWorld) -> None:
    world = make(graphs=[["g"]])
    with world.captured("g", 1):
        pass
    world.arena.replay("g", graph_id(2))
    with pytest.raises(Exhausted, match=r"none of 1 is free: held.*by: generation 2 .*Finish") as caught:
        world.arena.replay("g", graph_id(3))
    assert not caught.value.fatal


def test_a_replay_that_never_ends_is_quarantined_and_the_graph_cannot_be_captured_anew(make: MakeWorld) -> None:
    world = make(graphs=[["g"]])
    with world.captured("g", 1) as (_, graph):
        pass
    hung = world.replay("g", 2, graph, world.streams[0])
    world.now = 61
    for ask in (lambda: world.arena.replay("g", graph_id(3)), lambda: world.arena.capture("g", capture_id(4))):
        with pytest.raises(Exhausted, match="quarantined for ever") as caught:
            ask()
        assert caught.value.fatal
    assert hung.state is LeaseState.QUARANTINED
    world.open(5)  # eager executions go on


def test_captured_events_live_as_long_as_the_graph_may_be_replayed(make: MakeWorld) -> None:
    world = make(graphs=[["g"]])
    lease, _ = two_stream_graph(world)
    assert len(world.device.made) == 2  # one record on each side
    del lease, _
    gc.collect()
    assert len(world.device.made) == 2
    with world.captured("g", 2):  # the graph is captured anew: nobody replays the old one
        pass
    gc.collect()
    assert len(world.device.made) == 0


def test_another_capture_in_the_same_slot_does_not_record_the_captured_events_again(make: MakeWorld) -> None:
    world = make(graphs=[["g", "h"]])
    a, b, _ = world.streams
    two_stream_graph(world)
    mine = {event: event.last for event in world.device.made}
    with world.captured("h", 2) as (lease, _):
        for stream in (a, b, a):
            lease.touch(stream, writes=["x"])
    assert {event: event.last for event in mine} == mine
    assert len(world.device.made) == 4
    eager = world.open(3)
    for stream in (a, b, a):
        eager.touch(stream, writes=["x"])
    assert {event: event.last for event in mine} == mine


# -- touches


def blocked(world: World, *streams: ModelStream) -> list[bool]:
    world.run_only(*streams)
    return [bool(stream.queue) for stream in streams]


@pytest.mark.parametrize("how", ["reads", "writes"])
def test_a_touch_of_the_whole_slot_follows_every_part_and_is_followed_by_every_part(make: MakeWorld, how: str) -> None:
    world = make()
    a, b, c = world.streams
    lease = world.arena.acquire(live_id(1))
    lease.touch(a, reads=["x"])
    world.work(a, "x")
    lease.touch(b, writes=["y"])
    world.work(b, "y")
    lease.touch(c, **{how: [WHOLE]})
    world.work(c, "whole")
    lease.touch(a, reads=["z"])
    world.work(a, "z")
    assert world.arena.counters.waits == 4  # c for a and b, then a for b and c
    world.run_only(c)
    assert world.log == []
    assert blocked(world, a, c) == [True, True]
    assert world.log == ["x"]
    world.device.run()
    assert world.log == ["x", "y", "whole", "z"]


def test_parts_that_do_not_conflict_are_not_ordered(make: MakeWorld) -> None:
    world = make()
    a, b, _ = world.streams
    lease = world.arena.acquire(live_id(1))
    lease.touch(a, writes=["x"], reads=["shared"])
    lease.touch(b, writes=["y"], reads=["shared"])
    assert world.arena.counters.waits == 0


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [("reads", "reads", 0), ("reads", "writes", 1), ("writes", "reads", 1), ("writes", "writes", 1)],
)
@pytest.mark.parametrize("same", [True, False])
def test_two_touches_of_a_part_are_ordered_if_one_writes_and_streams_differ(
    make: MakeWorld, first: str, second: str, waits: int, same: bool
) -> None:
    world = make()
    a, b, _ = world.streams
    lease = world.arena.acquire(live_id(1))
    lease.touch(a, **{first: ["x"]})
    lease.touch(a if same else b, **{second: ["x"]})
    assert world.arena.counters.waits == (0 if same else waits)


def test_a_writer_waits_for_every_reader(make: MakeWorld) -> None:
    world = make()
    a, b, c = world.streams
    lease = world.arena.acquire(live_id(1))
    for stream in (a, b):
        lease.touch(stream, reads=["x"])
        world.work(stream, f"read on {stream.index}")
    lease.touch(c, writes=["x"])
    world.work(c, "write")
    assert blocked(world, a, c) == [False, True]
    assert blocked(world, b, c) == [False, False]
    assert world.log == ["read on 0", "read on 1", "write"]


def test_a_wait_is_queued_once_and_a_second_writer_waits_for_the_first_one_only(make: MakeWorld) -> None:
    world = make()
    a, b, c = world.streams
    lease = world.arena.acquire(live_id(1))
    lease.touch(a, reads=["x"])
    for _ in range(3):
        lease.touch(b, writes=["x"])
    assert world.arena.counters.waits == 1
    lease.touch(c, writes=["x"])  # behind b, which is behind a
    assert world.arena.counters.waits == 2


@pytest.mark.parametrize("call", ["record", "wait"])
def test_a_touch_that_raises_leaves_no_note(make: MakeWorld, call: str) -> None:
    world = make()
    a, b, _ = world.streams
    lease = world.arena.acquire(live_id(1))
    lease.touch(a, writes=["x"])
    world.device.fail.add(call)
    with pytest.raises(RuntimeError, match=f"refuses to {call}"):
        lease.touch(b, writes=["x"])
    world.device.fail.clear()
    touches = [record for record in world.trace.records() if record[1] == "touch"]
    assert [record[4] for record in touches] == [a.index]
    for part in ("x", WHOLE):  # nothing was queued on b that it would have to wait for
        lease.touch(a, writes=[part])
    assert world.arena.counters.waits == 0
    lease.touch(b, writes=["x"])  # repeated, the wait is queued
    assert world.arena.counters.waits == 1
    assert [entry.behind.stream for entry in b.queue if entry.behind] == [a]


def test_a_first_touch_that_raises_makes_its_stream_wait_when_it_is_repeated(make: MakeWorld) -> None:
    world = make(slots=1)
    a, b, _ = world.streams
    world.sealed(1, a)
    lease = world.arena.acquire(live_id(2))
    world.device.fail.add("wait")
    with pytest.raises(RuntimeError, match="refuses to wait"):
        lease.touch(b, writes=["x"])
    world.device.fail.clear()
    assert lease.follows == {}
    lease.touch(b, writes=["x"])
    world.work(b, "second")
    lease.seal()
    assert blocked(world, b) == [True]
    world.device.run()
    assert world.log == ["1 on 0", "second"]


def test_naming_what_comes_first_after_a_touch_is_an_error(make: MakeWorld) -> None:
    world = make()
    first = world.sealed(1, world.streams[0])
    lease = world.open(2, world.streams[1])
    with pytest.raises(OrderError, match="names what it follows after it has touched its slot"):
        lease.follow(continues=[first])


def test_a_step_of_a_quarantined_execution_cannot_be_continued(make: MakeWorld) -> None:
    world = make(slots=3)
    first = world.sealed(1, world.streams[0])
    world.arena.quarantine(first, "by hand")
    lease = world.open(2, continues=[first])
    with pytest.raises(OrderError, match=r"continues generation 1 .* which is in doubt; end its requests"):
        lease.touch(world.streams[1], writes=["x"], step="layer 0")


def test_pages_of_a_quarantined_execution_cannot_be_taken(make: MakeWorld) -> None:
    world = make(slots=3)
    first = world.sealed(1, world.streams[0])
    world.arena.quarantine(first, "by hand")
    lease = world.arena.acquire(live_id(2))
    with pytest.raises(OrderError, match="takes pages that may still be touched by generation 1"):
        lease.follow(after=[first])


# -- handles


def test_a_handle_that_is_dropped_frees_nothing(make: MakeWorld) -> None:
    world = make(slots=1)
    lease = world.open(1, world.streams[0])
    gone = lease.execution
    del lease
    gc.collect()
    world.device.run()
    with pytest.raises(Exhausted, match="by: generation 1"):
        world.open(2)
    assert world.arena.settle(gone) is Settlement.NOT_QUIESCED
    with pytest.raises(StillLeased):
        world.arena.close()


def test_a_lease_says_who_it_is(make: MakeWorld) -> None:
    world = make()
    lease = world.open(7)
    assert repr(lease) == "Lease(1, slot 0, generation 7 ubatch 0 substep 0 (live, eager), acquired)"
    assert world.device.stream_id(world.streams[0]) == StreamId(0)


@pytest.mark.parametrize("holder", ["nobody", "another thread"])
def test_a_touch_by_a_thread_without_the_lock_is_found(holder: str) -> None:
    """What the real executor's launches are watched with; see `stock_world`."""
    device = ModelDevice(0)
    arena: WorkspaceArena[ModelStream] = WorkspaceArena(device, 1)
    watch_lock(arena)
    stream, lease = device.stream(), arena.acquire(ExecutionId(Generation(1)))
    with arena.lock:
        lease.touch_locked(stream, (), ("table",), 0)
        lease.complete_locked(0)
    lease.touch(stream, writes=("table",), step=1)
    lease.complete(1)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with arena.lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    if holder == "another thread":
        thread.start()
        held.wait()
    try:
        with pytest.raises(AssertionError, match=r"touch_locked of .* does not hold arena\.lock"):
            lease.touch_locked(stream, (), ("table",), 0)
        with pytest.raises(AssertionError, match=r"complete_locked of .* does not hold arena\.lock"):
            lease.complete_locked(0)
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
    lease.seal()
