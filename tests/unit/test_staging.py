# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The staging ring on the model device: an entry is rewritten only when its copies are known to be over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.device.model import ModelDevice, ModelEvent, ModelStream
from afd_dsv4.workspace.fence import EventError, EventSource, OrderedEvent
from afd_dsv4.workspace.order import Kind, check
from afd_dsv4.workspace.staging import StagingLost, StagingRing
from afd_dsv4.workspace.trace import Trace

Entry = list[int]


class FaultyDevice(ModelDevice):
    """Calls its events are asked to do run `on` first, which may raise."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.on: Callable[[str], None] = lambda _call: None

    def event(self) -> ModelEvent:
        self.events += 1
        return FaultyEvent(self)


class FaultyEvent(ModelEvent):
    def __init__(self, device: FaultyDevice) -> None:
        super().__init__(device)
        self._faulty = device

    def record(self, stream: ModelStream) -> None:
        self._faulty.on("record")
        super().record(stream)

    def query(self) -> bool:
        self._faulty.on("query")
        return super().query()


def refuse(call: str) -> Callable[[str], None]:
    def on(asked: str) -> None:
        if asked == call:
            raise RuntimeError(f"the device refuses to {call}")

    return on


class World:
    """A ring whose copies note what they read."""

    def __init__(self, entries: int, *, seed: int = 0, timeout_s: float | None = None) -> None:
        self.device = FaultyDevice(seed)
        self.stream = self.device.stream()
        self.trace = Trace(None)
        self.source = EventSource(self.device, self.trace)
        self.ring: StagingRing[ModelStream, Entry] = StagingRing(
            self.source, [[0] for _ in range(entries)], timeout_s=timeout_s
        )
        self.seen: list[int] = []

    def batch(self, value: int, stream: ModelStream | None = None) -> int:
        """Write a value into an entry and queue its copy. Returns the entry's number."""
        stream = stream or self.stream
        number, entry = self.ring.take()
        entry[0] = value
        self.device.launch(stream, lambda: self.seen.append(entry[0]))
        self.ring.copied(number, stream)
        return number


def test_a_ring_without_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one buffer"):
        StagingRing(EventSource(ModelDevice()), [])


def test_entries_are_used_in_turn_and_have_one_event_each_for_ever() -> None:
    world = World(3)
    for turn in range(30):
        assert world.batch(turn) == turn % 3
        world.device.run()
    assert world.source.created == world.device.events == 3
    assert world.ring.host_waits == 0
    assert world.ring.out == set()
    assert world.seen == list(range(30))


def test_with_one_entry_more_than_batches_in_flight_the_host_never_waits() -> None:
    """A batch begins when the one two before it is over: two are in flight, and a third is being prepared."""
    waits = {}
    for entries in (3, 2):
        world = World(entries)
        for turn in range(12):
            world.batch(turn)
            while world.stream.done < 2 * (turn - 1):  # a copy and a record each
                world.device.step()
        waits[entries] = world.ring.host_waits
        assert world.seen == list(range(len(world.seen)))
    assert waits[3] == 0
    assert waits[2] == 10  # all but the first two: one entry too few is a wait a batch


def test_every_wait_of_the_host_is_counted_and_waits_for_no_more_than_it_must() -> None:
    world = World(2)
    for turn in range(4):
        world.batch(turn)
    assert world.ring.host_waits == 2
    assert world.seen == [0, 1]  # the copies of the entries that were written again, and not the later ones
    world.device.run()
    assert world.seen == [0, 1, 2, 3]


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=30))
def test_whatever_the_order_of_streams_a_copy_reads_what_was_written_for_it(
    seed: int, entries: int, batches: list[tuple[int, int]]
) -> None:
    world = World(entries, seed=seed)
    streams = [world.stream, world.device.stream(), world.device.stream()]
    for value, (stream, steps) in enumerate(batches):
        world.batch(value, streams[stream])
        for _ in range(steps):
            world.device.step()
    world.device.run()
    assert sorted(world.seen) == list(range(len(batches)))
    assert not check(world.trace.records()).violations


def test_an_entry_is_waited_for_on_the_stream_of_its_last_copy() -> None:
    world = World(1)
    other = world.device.stream()
    world.batch(1)
    world.device.run()
    world.batch(2, other)
    world.stream.hung = True  # has nothing to do with the entry any more
    world.batch(3, other)
    world.device.run()
    assert world.seen == [1, 2, 3]
    assert world.ring.host_waits == 1


@pytest.mark.parametrize("how", ["never returned", "its copies cannot be marked"])
def test_an_entry_whose_copies_failed_is_out_for_ever_and_counted(how: str) -> None:
    world = World(3)
    if how == "never returned":
        lost, _ = world.ring.take()
    else:
        world.device.on = refuse("record")
        with pytest.raises(RuntimeError, match="refuses to record"):
            world.batch(0)
        world.device.on = lambda _call: None
        lost = 0
    assert world.ring.out == {lost}
    world.device.run()
    assert [world.batch(value) for value in range(6)] == [1, 2, 1, 2, 1, 2]
    assert world.ring.out == {lost}


def test_an_entry_whose_event_cannot_be_queried_is_out_and_the_next_one_is_used() -> None:
    world = World(2)
    world.batch(0)
    world.device.run()
    assert world.batch(1) == 1
    asked: list[str] = []

    def once(call: str) -> None:
        asked.append(call)
        if asked == ["query"]:
            raise RuntimeError("the device lost the event")

    world.device.on = once
    assert world.batch(2) == 1  # entry 0 was next
    assert world.ring.out == {0}


def test_a_copy_that_does_not_end_in_time_costs_its_entry_and_no_more() -> None:
    world = World(3, timeout_s=0.0)
    hung = world.device.stream()
    hung.hung = True
    world.batch(0, hung)
    for value in (1, 2):
        world.batch(value)
    world.device.catch_up(world.stream.put(lambda: None))
    assert [world.batch(value) for value in (3, 4)] == [1, 2]
    assert world.ring.out == {0}
    assert world.ring.host_waits == 1  # for the hung one


def test_when_no_entry_is_left_the_ring_says_so_and_why() -> None:
    world = World(2, timeout_s=0.0)
    world.stream.hung = True
    for value in (0, 1):
        world.batch(value)
    for _ in range(2):  # and stays so
        with pytest.raises(StagingLost, match=r"all 2 staging entries .* cannot go on; restart it") as caught:
            world.ring.take()
        assert world.ring.out == {0, 1}
    assert world.ring.host_waits == 2
    assert caught.value.__cause__ is None  # nobody was asked again
    world.stream.hung = False
    world.device.run()
    with pytest.raises(StagingLost):  # that they have passed after all does not bring them back
        world.ring.take()


def test_the_ring_names_the_error_that_took_its_last_entry() -> None:
    world = World(1)
    world.batch(0)
    world.device.on = refuse("query")
    with pytest.raises(StagingLost) as caught:
        world.ring.take()
    assert str(caught.value.__cause__) == "the device refuses to query"


@pytest.mark.parametrize("whose", ["the arena's", "somebody else's"])
def test_nothing_is_taken_while_a_graph_is_captured(whose: str) -> None:
    world = World(2)
    world.batch(0)
    world.device.run()
    rewrites = [record[1] for record in world.trace.records()].count("rewrite")
    with world.device.capture():
        if whose == "the arena's":
            world.source.captures += 1
        with pytest.raises(EventError, match="taken while a graph is captured"):
            world.ring.take()
        world.source.captures = 0
    assert world.ring.out == set()
    assert [record[1] for record in world.trace.records()].count("rewrite") == rewrites
    assert world.batch(1) == 1


def test_a_capture_that_begins_while_the_host_waits_does_not_cost_the_entry() -> None:
    world = World(1, timeout_s=60.0)
    world.batch(0)

    def begins(_call: str) -> None:
        world.source.captures = 1

    world.device.on = begins
    with pytest.raises(EventError, match="is queried while a graph is captured"):
        world.ring.take()
    world.source.captures, world.device.on = 0, lambda _call: None
    assert world.ring.out == set()
    world.device.run()
    assert world.batch(1) == 0


def test_a_ring_that_does_not_wait_is_seen_by_the_copies_and_by_the_order_checker() -> None:
    """Negative control."""

    class Careless(StagingRing[ModelStream, Entry]):
        def _wait(self, event: OrderedEvent[ModelStream] | None) -> None:
            pass

    world = World(2)
    world.ring = Careless(world.source, [[0], [0]])
    for value in range(4):
        world.batch(value)
    world.device.run()
    assert world.seen == [2, 3, 2, 3]
    assert [violation.kind for violation in check(world.trace.records()).violations] == [Kind.STAGING] * 2
