# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin#264 (review), #334: a full synchronize for every work item; an idle replica blocks for ever.

Symptom: the host waits for the device at every item; a replica without work leaves before an all-reduce that the others
wait in.
Here: leases are credits, waited for by streams and never by the host; a stream waits only for what has been queued
already, so waits cannot form a circle; and an idle replica runs its lease like any other, so it comes to the
collective.
"""

from __future__ import annotations

import itertools

import pytest

from afd_dsv4.device.model import Deadlock, ModelDevice, ModelEvent, Point
from tests.regressions.machine import ORDERS, Machine


class Counting(ModelDevice):
    """Counts what makes the host wait."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.synchronized = 0

    def event(self) -> ModelEvent:
        event = super().event()
        really = event.synchronize

        def synchronize() -> None:
            self.synchronized += 1
            really()

        event.synchronize = synchronize  # type: ignore[method-assign]
        return event


def test_a_thousand_work_items_make_the_host_wait_for_none() -> None:
    device = Counting()
    machine = Machine(slots=2, device=device)
    for item in range(1, 1001):  # nothing of it runs meanwhile: the worst case for the host
        lease = machine.acquire(item)
        stream = machine.streams[item % 3]
        lease.touch(stream, writes=["x"])
        machine.use(stream, ("x", lease.slot.index), item)
        lease.seal()
    assert device.synchronized == 0
    assert machine.arena.counters.handed_on == 998  # the streams wait instead
    machine.device.run()
    assert machine.wrong == []


def test_the_count_sees_a_synchronize_for_every_item() -> None:
    """Negative control."""
    device = Counting()
    machine = Machine(slots=2, device=device)
    for _ in range(10):
        event = device.event()
        event.record(machine.a)
        event.synchronize()
    assert device.synchronized == 10


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_ubatches_that_cross_each_others_streams_never_stand_still(order: tuple[int, int, int]) -> None:
    for seed in range(ORDERS // 6):
        machine = Machine(seed, slots=2)
        for generation in range(1, 5):
            pair = [machine.acquire(generation, ubatch) for ubatch in (0, 1)]
            pair[1].follow(continues=[pair[0]])
            for layer in range(3):
                for ubatch, lease in enumerate(pair):
                    stream = machine.streams[order[(layer + ubatch + generation) % 3]]
                    lease.touch(stream, writes=["x"], step=layer)
                    lease.complete(layer)
            for lease in pair:
                lease.seal()
        machine.device.run()  # raises Deadlock if it does


def all_reduce(machine: Machine, *, idle_comes: bool) -> None:
    """Replica a has work, replica b has none; each goes on once both have come."""
    for generation, stream in ((1, machine.a), (2, machine.b)):
        lease = machine.acquire(generation)
        if stream is machine.a:
            lease.touch(stream, writes=["x"])
            machine.use(stream, "x", generation)
        lease.seal()
    come_a = machine.a.put(lambda: None)
    come_b = machine.b.put(lambda: None) if idle_comes else Point(machine.b, machine.b.given + 1)
    machine.a.put(lambda: None, come_b)
    if idle_comes:
        machine.b.put(lambda: None, come_a)


def test_an_idle_replica_comes_to_the_all_reduce() -> None:
    machine = Machine(slots=2)
    all_reduce(machine, idle_comes=True)
    machine.device.run()


def test_one_that_leaves_first_is_seen_as_a_deadlock() -> None:
    """Negative control; so is a circle of waits for what is not queued yet."""
    machine = Machine(slots=2)
    all_reduce(machine, idle_comes=False)
    with pytest.raises(Deadlock):
        machine.device.run()
    machine = Machine()
    machine.a.put(lambda: None, Point(machine.b, 2))
    machine.b.put(lambda: None, Point(machine.a, 1))
    machine.b.put(lambda: None)
    with pytest.raises(Deadlock):
        machine.device.run()
