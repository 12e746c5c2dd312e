# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""rapidsai/rmm#2489 (fixed by #2490): a merged free list drops the donor's pending work, and a third stream steals it.

Symptom: stream B takes memory behind A's event and never records its own again; C takes it behind B's old event, while
A still works.
Here: the fence of a lease lies behind all that its slot was handed on behind, and is recorded anew at every lease. The
script without an arena is in tests/explorer/raw.py (3 of 10 orders wrong; 0 once B records again).
"""

from __future__ import annotations

import pytest

from afd_dsv4.device.model import ModelDevice, ModelEvent, ModelStream
from tests.regressions.machine import Machine, corrupted


def handed_on_twice(machine: Machine) -> None:
    """A, then B, then C, each before the one before is over."""
    for generation, stream in enumerate(machine.streams, 1):
        lease = machine.acquire(generation)
        lease.touch(stream, writes=["x"])
        machine.use(stream, "x", generation)
        lease.seal()


def through_an_empty_lease(machine: Machine) -> None:
    """B takes the slot and has nothing to do: C must still wait for A."""
    for generation, stream in ((1, machine.a), (2, None), (3, machine.c)):
        lease = machine.acquire(generation)
        if stream is not None:
            lease.touch(stream, writes=["x"])
            machine.use(stream, "x", generation)
        lease.seal()


@pytest.mark.parametrize("program", [handed_on_twice, through_an_empty_lease])
def test_the_third_stream_waits_for_the_first(program) -> None:
    assert corrupted(program, slots=1) == 0


class NeverAgain(ModelDevice):
    """Its events take their first record only."""

    def event(self) -> ModelEvent:
        event = super().event()
        really = event.record

        def record(stream: ModelStream) -> None:
            if event.last is None:
                really(stream)

        event.record = record  # type: ignore[method-assign]
        return event


def rounds(machine: Machine) -> None:
    """Streams that have had the slot before, so that their events have a record from then."""
    for generation in range(1, 10):
        lease = machine.acquire(generation)
        stream = machine.streams[generation % 3]
        lease.touch(stream, writes=["x"])
        machine.use(stream, "x", generation)
        lease.seal()


def test_an_event_that_is_not_recorded_again_lets_it_steal() -> None:
    """Negative control: the fault of the report, planted in the device."""
    assert corrupted(rounds, slots=1) == 0
    bad = 0
    for seed in range(40):
        machine = Machine(slots=1, device=NeverAgain(seed))
        rounds(machine)
        machine.device.run()
        bad += bool(machine.wrong)
    assert bad > 20


def test_without_the_events_it_steals() -> None:
    """Negative control."""
    for program in (handed_on_twice, through_an_empty_lease):
        assert corrupted(program, slots=1, ordered=False) > 0
