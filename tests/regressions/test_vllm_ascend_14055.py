# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#14055: a finished or preempted request returns its blocks while the next step is in flight.

Symptom: with asynchronous scheduling the next owner writes blocks that step N+1 still reads.
Here: a request's pages return under the fence of the last lease that mapped them. With two forwards in flight and an
abort after the first, the next owner waits for the second.
"""

from __future__ import annotations

import pytest

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SlotIndex, TailFull, TailStore
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.order import Kind, check
from tests.regressions.machine import ORDERS, Machine, ModelLease, corrupted

SHAPE = TailShape(4, True, 8, layers=2)
OLD, NEW = RequestId("old"), RequestId("new")


def store() -> TailStore:
    return TailStore({4: SHAPE}, max_num_seqs=1, slots=3)


def program(machine: Machine, waits_for: str = "the last lease") -> None:
    pages = store()
    last: ModelLease | None = None
    leases = []
    steps = [(OLD, 0, 5, machine.a), (OLD, 5, 9, machine.b), (NEW, 0, 5, machine.c)]
    for generation, (request, start, end, stream) in enumerate(steps, 1):
        if request is NEW:
            pages.end(OLD)  # the abort: nothing has run yet
        lease = machine.acquire(generation)
        history = set(map(int, pages.tail(OLD, 4)[1][0])) if request is OLD and start else set()
        plan = pages.plan([RequestChunk(request, start, end)], lease.slot.index)
        if request is OLD or waits_for == "the last lease":
            after = [last] if request is NEW and last else []
        else:
            after = leases[:1] if waits_for == "the first lease" else []
        lease.follow(continues=[last] if request is OLD and last else [], after=after, seats=plan.seats)
        lease.touch(stream, writes=["table"], step=0)
        for page in sorted(history):
            machine.read(stream, page, OLD)
        for page in sorted(set(map(int, plan.lists[4].ids[0].ravel())) - {0}):
            machine.use(stream, page, request)
        lease.complete(0)
        lease.seal()
        leases.append(lease)
        last = lease


def test_the_next_owner_of_the_pages_waits_for_the_second_forward() -> None:
    assert corrupted(program) == 0


@pytest.mark.parametrize("waits_for", ["the first lease", "nothing"])
def test_returned_under_an_older_fence_or_none_the_pages_are_overwritten(waits_for: str) -> None:
    """Negative control; the order checker sees it in every order."""
    bad = 0
    for seed in range(ORDERS):
        machine = Machine(seed, slots=3)
        program(machine, waits_for)
        machine.device.run()
        bad += bool(machine.wrong)
        assert {violation.kind for violation in check(machine.trace.records()).violations} == {Kind.SEAT}
    assert bad > 0


def test_a_seat_behind_an_open_forward_is_not_given_away() -> None:
    machine, pages = Machine(slots=3), store()
    lease = machine.acquire(1)
    plan = pages.plan([RequestChunk(OLD, 0, 5)], SlotIndex(0))
    pages.end(OLD)
    with pytest.raises(TailFull, match="1 more behind open executions"):
        pages.plan([RequestChunk(NEW, 0, 5)], SlotIndex(1), usable=lambda seat: lease.can_be_waited_for())
    lease.touch(machine.a, writes=["table"])
    lease.seal()
    assert (
        pages.plan([RequestChunk(NEW, 0, 5)], SlotIndex(1), usable=lambda seat: lease.can_be_waited_for()).taken
        == plan.taken
    )
