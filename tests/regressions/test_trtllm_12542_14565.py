# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""NVIDIA/TensorRT-LLM#12542, #14565: a block is evicted before an asynchronous send; a time-out frees what is read.

Symptom: the receiver gets another request's rows; a use after free once a transfer times out or is cancelled.
Here: a transfer is a touch like any other. A lease is released on proof only, which the transfer's event is part of;
cancelling is not proof, and a time-out takes the slot out of use instead of freeing it.
"""

from __future__ import annotations

import pytest

from afd_dsv4.workspace.arena import Exhausted, Settlement
from afd_dsv4.workspace.lease import LeaseState
from tests.regressions.machine import Machine, ModelLease, corrupted


def sent(machine: Machine, generation: int) -> ModelLease:
    """Rows are computed on stream a and sent from b."""
    lease = machine.acquire(generation)
    lease.touch(machine.a, writes=["rows"])
    machine.write(machine.a, "rows", generation)
    lease.touch(machine.b, reads=["rows"])
    machine.read(machine.b, "rows", generation)
    return lease


def program(machine: Machine) -> None:
    for generation in range(1, 5):
        sent(machine, generation).seal()


def test_a_slot_is_not_overwritten_before_the_send_has_read_it() -> None:
    assert corrupted(program, slots=1) == 0


def released_on_the_producers_event(machine: Machine) -> None:
    produced = machine.device.event()
    for generation in range(1, 5):
        machine.write(machine.a, "rows", generation)
        produced.record(machine.a)
        produced.wait(machine.b)
        machine.read(machine.b, "rows", generation)


def test_released_on_the_producers_event_it_is() -> None:
    """Negative control."""
    assert corrupted(released_on_the_producers_event) > 0


@pytest.mark.parametrize("ends", ["whole", "cancelled"])
def test_a_lease_with_a_send_in_flight_is_settled_by_nothing_but_its_event(ends: str) -> None:
    machine = Machine(slots=1)
    machine.b.hung = True
    lease = sent(machine, 1)
    lease.seal(whole=ends == "whole")
    while machine.a.queue:  # the producer has long finished
        machine.device.step()
    for _ in range(3):
        assert machine.arena.settle(lease) is Settlement.NOT_QUIESCED
    machine.b.hung = False
    machine.device.run()
    assert machine.arena.settle(lease) is Settlement.RELEASED
    assert machine.wrong == []


def test_a_send_that_times_out_takes_its_slot_with_it() -> None:
    machine = Machine(slots=2)
    machine.b.hung = True
    lost = sent(machine, 1)
    lost.seal()
    machine.now = 61
    machine.arena.watch()
    assert lost.state is LeaseState.QUARANTINED
    for generation in range(2, 20):  # nobody else writes there, however long it takes
        lease = machine.acquire(generation)
        lease.touch(machine.c, writes=["rows"])
        machine.write(machine.c, ("rows", lease.slot.index), generation)
        lease.seal()
        assert lease.slot is not lost.slot
        while machine.c.queue:
            machine.device.step()
    held = machine.acquire(20)
    with pytest.raises(Exhausted, match="1 are quarantined for ever"):
        machine.acquire(21)
    assert held.slot is not lost.slot
    machine.b.hung = False
    machine.device.run()
    assert machine.wrong == []  # the send comes after all, and reads its own rows
    assert machine.arena.settle(lost) is Settlement.IN_DOUBT
