# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin#251: the connector is closed while a receive is pending; the worker hangs, also on SIGKILL.

Symptom: `close` destroys the process group under a kernel that waits for the other side. It may never come back, and
what was queued behind the receive may run at any time, or never.
Here: the arena's own close does not ask the connector. While work may run it refuses, with the list, and changes
nothing; drained, it quarantines what is not over in time, and says so; the memory of that is never freed. So what runs
late finds its memory as it left it.
"""

from __future__ import annotations

import pytest

from afd_dsv4.workspace.arena import ArenaClosed, Settlement, StillLeased
from afd_dsv4.workspace.lease import LeaseState
from tests.regressions.machine import Machine, ModelLease


def receiving(machine: Machine) -> ModelLease:
    """A stage whose stream waits for an answer, with a launch queued behind it."""
    lease = machine.acquire(1)
    lease.touch(machine.a, writes=["table"])
    machine.write(machine.a, "table", "stage 1")
    machine.device.run()
    machine.a.hung = True  # combine_recv: the other side is gone
    lease.touch(machine.a, reads=["table"])
    machine.read(machine.a, "table", "stage 1")
    lease.seal()
    return lease


def free(machine: Machine) -> None:
    """The allocator gives the memory to somebody else."""
    machine.cells["table"] = "somebody else's"


def late(machine: Machine) -> list[object]:
    """The answer comes after all; what was read wrong."""
    machine.a.hung = False
    machine.device.run()
    return list(machine.wrong)


def test_a_close_with_a_receive_pending_refuses_and_changes_nothing() -> None:
    machine = Machine()
    lease = receiving(machine)
    with pytest.raises(StillLeased, match=r"cannot close: 1 leases may still touch it.*sealed"):
        machine.arena.close()
    assert not machine.arena.closed
    assert machine.arena.settle(lease) is Settlement.NOT_QUIESCED
    assert late(machine) == []
    assert machine.arena.settle(lease) is Settlement.RELEASED
    assert machine.arena.close() == ()


def test_what_is_not_over_in_time_is_quarantined_named_and_its_memory_kept() -> None:
    machine = Machine()
    lease = receiving(machine)
    machine.arena.drain(0.0)
    lost = machine.arena.close()
    assert lost == (lease,)
    assert lease.state is LeaseState.QUARANTINED
    assert machine.arena.settle(lease) is Settlement.IN_DOUBT
    with pytest.raises(ArenaClosed):
        machine.acquire(2)
    if not lost:  # which is what tells the owner of the memory that it may go
        free(machine)
    assert late(machine) == []


def test_memory_that_is_freed_with_the_connector_is_read_by_what_runs_late() -> None:
    """Negative control: the connector's close has come back, so everything is freed."""
    machine = Machine()
    receiving(machine)
    free(machine)
    assert late(machine) == [("table", "stage 1", "somebody else's")]
