# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin#213: an FFN rank that is given zero tokens hangs or crashes.

Symptom: it waits for an event that nobody records.
Here: an execution without tokens leases nothing (tests/integration/test_stock_runtime.py,
test_an_execution_without_requests_leases_nothing_and_queues_nothing); a lease that touches nothing makes no event and
keeps nobody waiting; waiting for an event without a record is an error at once, on the host.
"""

from __future__ import annotations

import pytest

from afd_dsv4.workspace.arena import Settlement
from afd_dsv4.workspace.fence import EventError, EventSource
from tests.regressions.machine import Machine


def test_a_lease_without_tokens_queues_nothing_makes_no_event_and_is_over_at_once() -> None:
    machine = Machine(slots=1)
    for generation in range(1, 1000):
        lease = machine.acquire(generation)
        lease.seal()
        assert machine.arena.settle(lease) is Settlement.RELEASED
    assert machine.device.events == 0
    assert [stream.given for stream in machine.streams] == [0, 0, 0]
    assert (machine.arena.counters.waits, machine.arena.counters.handed_on) == (0, 0)


def test_ranks_with_and_without_tokens_in_turn_never_wait_for_the_idle_ones() -> None:
    machine = Machine(slots=2)
    for generation in range(1, 100):
        lease = machine.acquire(generation)
        if generation % 2:
            lease.touch(machine.a, writes=["x"])
            machine.use(machine.a, "x", generation)
        lease.seal()
    machine.device.run()  # raises if anything waits for what never comes
    assert machine.wrong == []
    assert machine.arena.close() == ()


def test_a_wait_for_an_event_without_a_record_is_an_error_and_the_device_would_not_have_said_so() -> None:
    """Negative control: the device calls it passed, and lets a stream go on at once."""
    machine = Machine()
    bare = machine.device.event()
    assert bare.query()
    bare.wait(machine.a)
    machine.device.run()
    event = EventSource(machine.device).new()
    with pytest.raises(EventError, match="which was never recorded"):
        event.wait(machine.a, machine.a.index)
    for ask in (event.passed, event.synchronize):
        with pytest.raises(EventError, match="never recorded; the device would call it passed"):
            ask()
