# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""rapidsai/rmm#510, NVIDIA/cuml#2632: streams are destroyed while the free list still has their events.

Symptom: a segmentation fault, or memory that never comes back.
Here: a lease keeps the handles of its streams until it is over; while one may still run, closing is refused and says
what it waits for; a stream that died costs its slot, which is counted, and nothing else.
"""

from __future__ import annotations

import gc
import weakref

import pytest

from afd_dsv4.device.model import ModelStream
from afd_dsv4.workspace.arena import Exhausted, Settlement, StillLeased
from tests.regressions.machine import Machine, ModelLease


def leased_on_a_stream_of_its_own(machine: Machine) -> tuple[ModelLease, weakref.ref[ModelStream]]:
    stream = machine.device.stream()
    lease = machine.acquire(1)
    lease.touch(stream, writes=["x"])
    machine.write(stream, "x", 1)
    return lease, weakref.ref(stream)


def test_the_handle_of_a_stream_lives_as_long_as_its_lease_is_open() -> None:
    machine = Machine()
    lease, stream = leased_on_a_stream_of_its_own(machine)
    machine.device.streams.pop()  # the user lets it go
    gc.collect()
    assert stream() is not None
    lease.seal()  # records on it
    assert lease.fence is not None


def test_closing_with_a_live_lease_is_refused_and_after_a_drain_it_is_not() -> None:
    machine = Machine()
    lease, _ = leased_on_a_stream_of_its_own(machine)
    lease.seal()
    with pytest.raises(StillLeased, match=r"Lease\(1, slot 0, generation 1"):
        machine.arena.close()
    assert not machine.arena.closed
    machine.device.run()
    assert machine.arena.drain(0) == ()
    assert machine.arena.close() == ()


def test_a_stream_that_died_costs_its_slot_and_is_reported_at_the_close() -> None:
    machine = Machine(slots=2)
    lease, stream = leased_on_a_stream_of_its_own(machine)
    lease.seal()
    dead = stream()
    assert dead is not None
    dead.hung = True
    machine.now = 1000
    machine.arena.watch()
    for generation in range(2, 50):
        other = machine.acquire(generation)
        other.touch(machine.a, writes=["x"])
        other.seal()
        assert other.slot is not lease.slot
        while machine.a.queue:
            machine.device.step()
    assert machine.arena.drain(0) == (lease,)
    assert machine.arena.close() == (lease,)
    assert machine.arena.counters.quarantined == 1


def test_a_slot_whose_stream_died_would_be_taken_without_the_fence() -> None:
    """Negative control: with its fence the slot is not passed; by hand, on a query of an event of nobody, it is."""
    machine = Machine(slots=1)
    lease, stream = leased_on_a_stream_of_its_own(machine)
    lease.seal()
    dead = stream()
    assert dead is not None
    dead.hung = True
    assert machine.arena.settle(lease) is Settlement.NOT_QUIESCED
    assert machine.device.event().query()  # what a free list sees that lost the event with the stream
    machine.now = 1000
    with pytest.raises(Exhausted) as caught:
        machine.acquire(2)
    assert caught.value.fatal
