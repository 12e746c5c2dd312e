# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""candle-org/candle#165: the NPU allocator makes an ACL event for every free, and never gives it back.

Symptom: the process runs out of events; a pool took 10 % off the time.
Here: events are made by slots and streams, two each, and recorded again for ever: their number is the same after 10^5
leases as after the first few, and none is destroyed. (After 10^6: benchmarks/test_lease_cost.py.)
"""

from __future__ import annotations

import pytest

from afd_dsv4.device.torch_device import TorchDevice
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.identity import ExecutionId, Generation
from tests.regressions.machine import Machine

SLOTS = 2


def leases(machine: Machine, count: int, *, forget: bool = False) -> list[int]:
    """Leases one after the other, one in ten on two streams. Returns the events made after each power of ten."""
    machine.arena.trace = machine.arena.events.trace = None  # nothing is to be kept but what the arena keeps
    made = []
    for generation in range(1, count + 1):
        lease = machine.acquire(generation)
        lease.touch(machine.a, writes=["x"])
        if generation % 10 == 0:
            lease.touch(machine.b, writes=["x"])
        lease.seal()
        if forget:
            lease.slot.fence_events = ({}, {})
            lease.slot.touch_events.clear()
        for stream in (machine.a, machine.b):
            while stream.queue:
                stream.queue.popleft().run()
        if generation in (100, 1000, 10_000, 100_000):
            made.append(machine.device.events)
    return made


def test_after_100000_leases_there_are_as_many_events_as_after_100() -> None:
    machine = Machine(slots=SLOTS)
    # On the first stream one event for touches, on both one for the fence; the device keeps up, so one slot is used.
    assert leases(machine, 100_000) == [3, 3, 3, 3]
    assert machine.arena.events.created == 3


def test_an_event_per_lease_would_be_seen() -> None:
    """Negative control: the slot forgets its events after every lease."""
    assert leases(Machine(slots=SLOTS), 1000, forget=True) == [90 + 10 * 3, 900 + 100 * 3]


@pytest.mark.npu
def test_torch_npu_creates_no_event_after_the_first_leases() -> None:
    torch = pytest.importorskip("torch")
    from afd_dsv4.softnpu import runtime

    arena = WorkspaceArena(TorchDevice("npu"), SLOTS)
    streams = [torch.npu.Stream(), torch.npu.Stream()]
    first, destroyed = runtime.event_counts()
    for generation in range(1, 501):
        lease = arena.acquire(ExecutionId(Generation(generation)))
        for stream in streams:
            lease.touch(stream, writes=["x"])
        lease.seal()
    created = runtime.event_counts()[0] - first
    assert created == arena.events.created <= 3 * SLOTS * len(streams)
    assert runtime.event_counts()[1] == destroyed
    torch.npu.synchronize()
    assert arena.close() == ()
