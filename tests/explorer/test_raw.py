# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The explorer of scripts: its counts are right, and it finds the races that were reported in public."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.explorer.raw import (
    SCRIPTS,
    Capture,
    HostOp,
    Program,
    Query,
    Queue,
    Record,
    Sync,
    Wait,
    Work,
    reads,
    run,
    writes,
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_prototype_table_is_reproduced(name: str) -> None:
    program, states, violations = SCRIPTS[name]
    found = run(program)
    assert (found.states, found.violations) == (states, violations)
    assert (found.witness is None) == (found.violating == 0) == (violations == 0)


@pytest.mark.parametrize(
    ("name", "schedules", "violating"),
    list(zip(SCRIPTS, [6, 1, 10, 1, 10, 1], [4, 0, 3, 0, 3, 0], strict=True)),
)
def test_the_orders_behind_the_table_are_counted_as_paths(name: str, schedules: int, violating: int) -> None:
    found = run(SCRIPTS[name][0])
    assert (found.schedules, found.violating, found.stuck) == (schedules, violating, 0)


def test_schedules_of_independent_streams_are_the_multinomial() -> None:
    lengths = (3, 4, 2)
    streams = tuple(tuple(Work(f"{s}{i}") for i in range(n)) for s, n in enumerate(lengths))
    found = run(Program(streams))
    assert found.schedules == math.factorial(9) // math.prod(map(math.factorial, lengths))
    assert found.states == math.prod(n + 1 for n in lengths)


def test_violating_schedules_are_those_that_trying_each_order_finds() -> None:
    """The long way: each of the 20 orders of two streams run one by one."""
    streams = ((writes(1), reads(1), writes(3)), (reads(3), writes(2), reads(2)))
    bad = 0
    for picks in set(itertools.permutations([0, 0, 0, 1, 1, 1])):
        at, slot, wrong = [0, 0], None, False
        for pick in picks:
            op = streams[pick][at[pick]]
            at[pick] += 1
            wrong |= any(slot != stamp for _, stamp in op.reads)
            slot = op.writes[0][1] if op.writes else slot
        bad += wrong
    assert run(Program(streams)).violating == bad


def test_a_wait_is_for_the_record_that_was_last_when_it_was_queued() -> None:
    host: tuple[HostOp, ...] = (
        Queue(0, writes(1)),
        Queue(0, Record("e")),
        Queue(1, Wait("e")),
        Queue(1, reads(1)),
        Queue(1, Record("f")),
        Queue(0, Wait("f")),
        Queue(0, writes(2)),
        Queue(0, Record("e")),  # again: the wait above does not wait for this one, or it would wait for itself
    )
    found = run(Program(((), ()), host))
    assert (found.violating, found.stuck) == (0, 0)


def test_an_event_that_was_never_recorded_counts_as_complete() -> None:
    """The trap of torch_npu: a forgotten record makes a busy slot look free."""

    def program(*record: HostOp) -> Program:
        asks = Query("e", passed=(Queue(1, writes(2)),))
        return Program(((), ()), (Queue(0, writes(1)), Queue(0, reads(1)), *record, asks))

    assert run(program()).violating > 0
    assert run(program(Queue(0, Record("e")))).violating == 0


@pytest.mark.parametrize("blind", [False, True])
def test_with_the_task_queue_on_a_record_still_in_it_is_not_complete(blind: bool) -> None:
    """A query that asks past the task queue finds the event unrecorded, and the slot free."""
    host = (Queue(0, writes(1)), Queue(0, reads(1)), Queue(0, Record("e")), Query("e", passed=(Queue(1, writes(2)),)))
    found = run(Program(((), ()), host, task_queue=True, blind=blind))
    assert (found.violating > 0) == blind
    assert run(Program(((), ()), host)).violating == 0


def test_a_host_that_waits_for_the_copy_may_rewrite_the_staging_entry() -> None:
    copy = Work("copy", reads=(("entry", 1),))
    host = (Queue(0, writes(1, "entry")), Queue(0, copy), Queue(0, Record("copied")))
    rewrite = Queue(1, writes(2, "entry"))
    assert run(Program(((), ()), (*host, rewrite))).violating > 0
    assert run(Program(((), ()), (*host, Sync("copied"), rewrite))).violating == 0


def test_a_query_inside_a_capture_is_a_violation_and_captured_work_does_not_run() -> None:
    found = run(Program(((),), (Capture(True), Queue(0, reads(7)), Query("e"), Capture(False))))
    assert (found.violations, found.schedules) == (1, 1)
    assert run(Program(((),), (Capture(True), Queue(0, reads(7)), Capture(False), Query("e")))).violations == 0


def test_streams_that_wait_for_each_other_in_a_circle_are_refused() -> None:
    with pytest.raises(ValueError, match="in a circle"):
        run(Program(((Wait("b"), Record("a")), (Wait("a"), Record("b")))))
