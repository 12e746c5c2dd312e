# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The order checker: verdicts computed by hand, and against two checkers that are slow and obvious.

One slow checker builds the graph of what is ordered and closes it; the other lets a host and its streams run every
schedule they can. Records are written without times here; `timed` gives each one microsecond.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.device.model import ModelDevice, ModelStream
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.identity import Domain, ExecutionId, ExecutionKind, Generation
from afd_dsv4.workspace.order import Kind, Report, check
from afd_dsv4.workspace.staging import StagingRing
from afd_dsv4.workspace.trace import Trace

Op = tuple[Any, ...]  # a record without its time
Found = tuple[Kind, int | None, int, Any]  # kind, first and second record, one resource


def timed(ops: Iterable[Op]) -> list[Op]:
    return [(1000 * index, *op) for index, op in enumerate(ops)]


def judge(ops: Iterable[Op], dropped: int = 0) -> Report:
    return check(timed(ops), dropped)


def found(report: Report) -> set[Found]:
    return {
        (violation.kind, violation.first.number if violation.first else None, violation.second.number, resource)
        for violation in report.violations
        for resource in violation.resources or (None,)
    }


def of_kind(report: Report, kind: Kind) -> set[Found]:
    return {each for each in found(report) if each[0] is kind}


def acquire(lease: int, slot: int = 0, kind: str = "live") -> Op:
    return ("acquire", lease, slot, f"generation {lease}", kind)


def touch(
    lease: int, stream: int, reads: Sequence[Any] = (), writes: Sequence[Any] = (), step: Any = None, slot: int = 0
) -> Op:
    return ("touch", lease, slot, stream, tuple(reads), tuple(writes), step)


def edge(event: int, source: int, target: int) -> list[Op]:
    """`target` waits for all that `source` has been given."""
    return [("record", event, source), ("wait", event, target)]


A, B, C = 0, 1, 2  # streams
X = ("x",)
WRITES_X = {"writes": X}
SEAL, WHOLE = "seal", ("*",)

# Each fault, the violation that it is (kind, first record, second record, resource), and the same trace mended.
FAULTS: dict[str, tuple[list[Op], Found, list[Op]]] = {
    "another stream writes what one wrote": (
        [acquire(1), touch(1, A, writes=X), touch(1, B, writes=X)],
        (Kind.SLOT, 1, 2, "x"),
        [acquire(1), touch(1, A, writes=X), *edge(1, A, B), touch(1, B, writes=X)],
    ),
    "another stream reads what one wrote": (
        [acquire(1), touch(1, A, writes=X), touch(1, B, reads=X)],
        (Kind.SLOT, 1, 2, "x"),
        [acquire(1), touch(1, A, writes=X), *edge(1, A, B), touch(1, B, reads=X)],
    ),
    "another stream writes what one reads": (
        [acquire(1), touch(1, A, reads=X), touch(1, B, writes=X)],
        (Kind.SLOT, 1, 2, "x"),
        [acquire(1), touch(1, A, reads=X), *edge(1, A, B), touch(1, B, writes=X)],
    ),
    "the event is recorded before the work": (
        [acquire(1), ("record", 1, A), touch(1, A, writes=X), ("wait", 1, B), touch(1, B, writes=X)],
        (Kind.SLOT, 2, 4, "x"),
        [acquire(1), touch(1, A, writes=X), ("record", 1, A), ("wait", 1, B), touch(1, B, writes=X)],
    ),
    "the event is recorded on the wrong stream": (
        [acquire(1), touch(1, A, writes=X), *edge(1, C, B), touch(1, B, writes=X)],
        (Kind.SLOT, 1, 4, "x"),
        [acquire(1), touch(1, A, writes=X), *edge(1, A, B), touch(1, B, writes=X)],
    ),
    "the wait comes after the work": (
        [acquire(1), touch(1, A, writes=X), ("record", 1, A), touch(1, B, writes=X), ("wait", 1, B)],
        (Kind.SLOT, 1, 3, "x"),
        [acquire(1), touch(1, A, writes=X), ("record", 1, A), ("wait", 1, B), touch(1, B, writes=X)],
    ),
    "a wait is for the record that was last when it was queued": (
        [acquire(1), ("record", 1, A), ("wait", 1, B), touch(1, A, writes=X), ("record", 1, A), touch(1, B, writes=X)],
        (Kind.SLOT, 3, 5, "x"),
        [acquire(1), ("record", 1, A), touch(1, A, writes=X), ("record", 1, A), ("wait", 1, B), touch(1, B, writes=X)],
    ),
    "a chain over a third stream that waits too late": (
        [acquire(1), touch(1, A, writes=X), *edge(1, A, C), *edge(2, B, C), touch(1, B, writes=X)],
        (Kind.SLOT, 1, 6, "x"),
        [acquire(1), touch(1, A, writes=X), *edge(1, A, C), *edge(2, C, B), touch(1, B, writes=X)],
    ),
    "the host saw the event pass before the work was recorded behind it": (
        [acquire(1), ("record", 1, A), ("passed", 1), touch(1, A, writes=X), touch(1, B, writes=X)],
        (Kind.SLOT, 3, 4, "x"),
        [acquire(1), touch(1, A, writes=X), ("record", 1, A), ("passed", 1), touch(1, B, writes=X)],
    ),
    "a slot is handed on behind no fence": (
        [acquire(1), touch(1, A, writes=X), (SEAL, 1, True), acquire(2), touch(2, B, writes=X), (SEAL, 2, True)],
        (Kind.SLOT, 1, 4, "x"),
        [acquire(1), touch(1, A, writes=X), ("record", 1, A), (SEAL, 1, True), acquire(2), ("wait", 1, B),
         touch(2, B, writes=X), (SEAL, 2, True)],
    ),
    "a replay beside what touches a part": (
        [acquire(1), touch(1, A, writes=X), touch(1, B, writes=WHOLE), ("replay", 1, "8", B)],
        (Kind.SLOT, 1, 2, "*"),
        [acquire(1), touch(1, A, writes=X), *edge(1, A, B), touch(1, B, writes=WHOLE), ("replay", 1, "8", B)],
    ),
    "a part is touched beside a replay": (
        [acquire(1), touch(1, A, writes=WHOLE), ("replay", 1, "8", A), touch(1, B, reads=X)],
        (Kind.SLOT, 1, 3, "x"),
        [acquire(1), touch(1, A, writes=WHOLE), ("replay", 1, "8", A), *edge(1, A, B), touch(1, B, reads=X)],
    ),
    "a seat's pages in one step": (
        [acquire(1), ("map", 1, (7,)), touch(1, A, step=3), acquire(2, 1), ("map", 2, (7, 8)),
         touch(2, B, step=3, slot=1)],
        (Kind.SEAT, 2, 5, 7),
        [acquire(1), ("map", 1, (7,)), touch(1, A, step=3), acquire(2, 1), ("map", 2, (7, 8)), *edge(1, A, B),
         touch(2, B, step=3, slot=1)],
    ),
    "a replay is all steps of its seats": (
        [acquire(1), ("map", 1, (7,)), touch(1, A, step=3), acquire(2, 1), ("map", 2, (7,)),
         touch(2, B, step="*", slot=1)],
        (Kind.SEAT, 2, 5, 7),
        [acquire(1), ("map", 1, (7,)), touch(1, A, step=3), acquire(2, 1), ("map", 2, (8,)),
         touch(2, B, step="*", slot=1)],
    ),
    "staging is rewritten before its copy": (
        [("copy", 0, A), ("record", 1, A), ("rewrite", 0)],
        (Kind.STAGING, 0, 2, 0),
        [("copy", 0, A), ("record", 1, A), ("passed", 1), ("rewrite", 0)],
    ),
    "staging is rewritten after the event before its copy": (
        [("record", 1, A), ("copy", 0, A), ("passed", 1), ("rewrite", 0)],
        (Kind.STAGING, 1, 3, 0),
        [("copy", 0, A), ("copy", 0, A), ("record", 1, A), ("passed", 1), ("rewrite", 0)],
    ),
    "another lease touches the slot": (
        [acquire(1), acquire(2, 1), touch(2, A, writes=X)],
        (Kind.NOT_HELD, 1, 2, None),
        [acquire(1), acquire(2, 1), touch(2, A, writes=X, slot=1)],
    ),
    "a lease that nobody acquired touches a slot": (
        [touch(1, A, writes=X)],
        (Kind.NOT_HELD, None, 0, None),
        [acquire(1), touch(1, A, writes=X)],
    ),
    "the slot has gone to another lease": (
        [acquire(1), (SEAL, 1, True), acquire(2), touch(1, A, writes=X), (SEAL, 2, True)],
        (Kind.NOT_HELD, 2, 3, None),
        [acquire(1), touch(1, A, writes=X), (SEAL, 1, True), acquire(2), (SEAL, 2, True)],
    ),
    "a replay after the arena was reset": (
        [acquire(1), ("reset",), touch(1, A, writes=WHOLE), ("replay", 1, "8", A)],
        (Kind.NOT_HELD, 1, 2, None),
        [("reset",), acquire(1), touch(1, A, writes=WHOLE), ("replay", 1, "8", A)],
    ),
    "a touch after the arena was closed": (
        [acquire(1), ("close",), touch(1, A, writes=X)],
        (Kind.NOT_HELD, 1, 2, None),
        [acquire(1), touch(1, A, writes=X), ("close",)],
    ),
    "a touch after the seal": (
        [acquire(1), (SEAL, 1, True), touch(1, A, writes=X)],
        (Kind.AFTER_END, 1, 2, None),
        [acquire(1), touch(1, A, writes=X), (SEAL, 1, True)],
    ),
    "a touch after the quarantine": (
        [acquire(1), ("quarantine", 1, "lost"), touch(1, A, writes=X)],
        (Kind.AFTER_END, 1, 2, None),
        [acquire(1), touch(1, A, writes=X), ("quarantine", 1, "lost")],
    ),
    "a slot is leased twice at a time": (
        [acquire(1), touch(1, A, writes=X), acquire(2), (SEAL, 1, True)],
        (Kind.HELD, 1, 2, None),
        [acquire(1), touch(1, A, writes=X), (SEAL, 1, True), acquire(2)],
    ),
    "a quarantined slot is leased again": (
        [acquire(1), (SEAL, 1, True), ("quarantine", 1, "lost"), acquire(2)],
        (Kind.QUARANTINED, 2, 3, None),
        [acquire(1), (SEAL, 1, True), ("quarantine", 1, "lost"), acquire(2, 1)],
    ),
    "an event that was never recorded is waited for": (
        [("wait", 1, A)],
        (Kind.UNRECORDED, None, 0, 1),
        [("record", 1, B), ("wait", 1, A)],
    ),
    "an event that was never recorded has passed": (
        [("record", 2, A), ("passed", 1)],
        (Kind.UNRECORDED, None, 1, 1),
        [("record", 1, A), ("passed", 1)],
    ),
    "an event is queried in a capture": (
        [acquire(1, 0, "capture"), touch(1, A, writes=X), ("record", 1, A), ("passed", 1)],
        (Kind.UNRECORDED, 2, 3, 1),
        [acquire(1, 0, "capture"), touch(1, A, writes=X), (SEAL, 1, True), ("record", 1, A), ("passed", 1)],
    ),
    "an event of a capture is waited for outside": (
        [acquire(1, 0, "capture"), touch(1, A, writes=X), ("record", 1, A), (SEAL, 1, True), ("wait", 1, B)],
        (Kind.UNRECORDED, 2, 4, 1),
        [acquire(1, 0, "capture"), touch(1, A, writes=X), (SEAL, 1, True), ("record", 1, A), ("wait", 1, B)],
    ),
    "captured work is unordered among itself": (
        [acquire(1, 0, "capture"), touch(1, A, writes=X), touch(1, B, writes=X)],
        (Kind.SLOT, 1, 2, "x"),
        [acquire(1, 0, "capture"), touch(1, A, writes=X), *edge(1, A, B), touch(1, B, writes=X)],
    ),
    "a lease is sealed twice": (
        [acquire(1), (SEAL, 1, True), (SEAL, 1, False)],
        (Kind.SEALED_TWICE, 1, 2, None),
        [acquire(1), (SEAL, 1, True), acquire(2), (SEAL, 2, True)],
    ),
    "a lease is released while its work may run": (
        [acquire(1), touch(1, A, writes=X), ("record", 1, A), (SEAL, 1, True), ("settle", 1, "released")],
        (Kind.UNPROVEN, 1, 4, None),
        [acquire(1), touch(1, A, writes=X), ("record", 1, A), (SEAL, 1, True), ("passed", 1),
         ("settle", 1, "released")],
    ),
    "a lease is released on one of its two streams": (
        [acquire(1), touch(1, A, writes=X), touch(1, B, writes=("y",)), ("record", 1, A), ("record", 2, B),
         (SEAL, 1, True), ("passed", 1), ("settle", 1, "released")],
        (Kind.UNPROVEN, 2, 7, None),
        [acquire(1), touch(1, A, writes=X), touch(1, B, writes=("y",)), ("record", 1, A), ("record", 2, B),
         (SEAL, 1, True), ("passed", 1), ("settle", 1, "not quiesced"), ("passed", 2), ("settle", 1, "released")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(name: str) -> None:
    ops, violation, _ = FAULTS[name]
    assert found(judge(ops)) == {violation}


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_trace_without_the_fault_is_clean(name: str) -> None:
    assert judge(FAULTS[name][2]).violations == ()


def test_every_kind_has_a_planted_fault() -> None:
    assert {violation[0] for _, violation, _ in FAULTS.values()} == set(Kind)


LEASE = [acquire(1), touch(1, A, writes=X), ("record", 1, A), (SEAL, 1, True)]


@pytest.mark.parametrize(
    "ops",
    [
        [acquire(1), touch(1, A, reads=X), touch(1, B, reads=X)],
        [acquire(1), touch(1, A, writes=X), touch(1, B, writes=("y",))],
        [acquire(1), acquire(2, 1), touch(1, A, writes=X), touch(2, B, writes=X, slot=1)],
        [acquire(1), ("map", 1, (7,)), touch(1, A, step=3), touch(1, B, step=3)],  # two requests of one lease
        [acquire(1), ("map", 1, (7,)), touch(1, A, step=3), touch(1, B, step=4)],
        [("copy", 0, A), ("copy", 0, B)],
        [("copy", 0, A), ("rewrite", 1)],
        [acquire(1), (SEAL, 1, True), ("settle", 1, "released")],  # touched nothing: nothing to prove
        [*LEASE, ("settle", 1, "in doubt"), ("settle", 1, "already released")],
        # A later lease took the slot behind the fence before it was quarantined: the slot is behind that lease now.
        [*LEASE, acquire(2), ("wait", 1, B), touch(2, B, writes=X), ("quarantine", 1, "lost"), (SEAL, 2, True),
         acquire(3)],
        # Captured work does not run: it neither needs to be behind anything, nor is anything behind it.
        [acquire(1), touch(1, A, writes=X), (SEAL, 1, True), acquire(2, 0, "capture"), touch(2, B, writes=X),
         (SEAL, 2, True), ("settle", 2, "released")],
        [acquire(1, 0, "capture"), touch(1, A, writes=X), *edge(1, A, B), touch(1, B, writes=X), (SEAL, 1, True),
         acquire(2), touch(2, C, writes=WHOLE), ("replay", 2, "8", C)],
    ],
)  # fmt: skip
def test_what_needs_no_order_is_clean(ops: list[Op]) -> None:
    assert judge(ops).violations == ()


def test_a_wait_inside_a_capture_orders_nothing_outside() -> None:
    """A and B are ordered in the graph; their work outside of it is not."""
    ops = [acquire(1, 0, "capture"), touch(1, A, writes=X), *edge(1, A, B), touch(1, B, writes=X), (SEAL, 1, True)]
    outside = [acquire(2, 1), touch(2, A, writes=X, slot=1), touch(2, B, writes=X, slot=1)]
    assert found(judge([*ops, *outside])) == {(Kind.SLOT, 7, 8, "x")}
    # Nor does an edge that was made outside before.
    ops = [acquire(2, 1), touch(2, A, writes=X, slot=1), *edge(1, A, B), acquire(1, 0, "capture")]
    inside = [touch(1, A, writes=X), touch(1, B, writes=X)]
    assert found(judge([*ops, *inside])) == {(Kind.SLOT, 5, 6, "x")}


def test_a_wait_that_is_captured_orders_nothing_that_runs() -> None:
    ops = [acquire(2, 1), touch(2, A, writes=X, slot=1), acquire(1, 0, "capture"), touch(1, B), *edge(1, A, B)]
    after = [(SEAL, 1, True), touch(2, B, writes=X, slot=1)]
    report = judge([*ops, *after])
    assert found(report) == {(Kind.SLOT, 1, 7, "x")}
    assert report.edges == 0


def test_a_slot_that_was_leased_twice_is_not_blamed_on_the_next_lease() -> None:
    assert found(judge([acquire(1), acquire(2), (SEAL, 2, True), acquire(3)])) == {(Kind.HELD, 0, 1, None)}


def test_a_touch_of_ones_own_does_not_hide_that_of_another_lease_before_it() -> None:
    begin = [acquire(1), ("map", 1, (7,)), acquire(2, 1), ("map", 2, (7,))]
    ops = [touch(1, A, step=0), touch(2, A, step=0, slot=1), touch(2, A, step=0, slot=1), touch(2, B, step=0, slot=1)]
    assert found(judge([*begin, *ops])) == {(Kind.SEAT, 4, 7, 7)}


def test_a_copy_that_is_captured_is_none_until_it_is_replayed() -> None:
    ops = [acquire(1, 0, "capture"), touch(1, A, writes=X), ("copy", 0, A), (SEAL, 1, True), ("rewrite", 0)]
    assert judge(ops).violations == ()


def test_the_last_access_of_each_other_stream_is_named_once() -> None:
    ops = [
        acquire(1),
        touch(1, A, writes=X),
        touch(1, A, reads=X, writes=("y",)),
        touch(1, B, writes=("y", "z"), reads=X),
        touch(1, C, writes=("x", "y", "z")),
    ]
    report = judge(ops)
    assert [(v.first and v.first.number, v.second.number, v.resources, v.hazard) for v in report.violations] == [
        (1, 3, ("x",), "read after write"),
        (2, 3, ("y",), "write after write"),
        (2, 4, ("x",), "write after read"),
        (3, 4, ("x",), "write after read"),
        (2, 4, ("y",), "write after write"),
        (3, 4, ("y", "z"), "write after write"),
    ]


def test_a_violation_names_both_sites_and_says_what_must_be_done() -> None:
    ops = [acquire(4, 2), touch(4, A, writes=X, step=(0, "c4"), slot=2), touch(4, B, reads=X, step=1, slot=2)]
    (violation,) = judge(ops).violations
    assert str(violation) == (
        "unordered reuse of a workspace slot: nothing orders record 2 (touch at 0.002 ms, lease 4 of generation 4, "
        "slot 2, stream 1, step 1) behind record 1 (touch at 0.001 ms, lease 4 of generation 4, slot 2, stream 0, step "
        "(0, 'c4')), read after write of slot 2, part 'x'; let stream 1 wait for an event recorded on stream 0 behind "
        "the first, before the second is queued"
    )


@pytest.mark.parametrize("name", FAULTS)
def test_every_violation_is_one_line_with_the_numbers_of_its_records(name: str) -> None:
    ops, (_, first, second, _), _ = FAULTS[name]
    for violation in judge(ops).violations:
        text = str(violation)
        assert "\n" not in text
        assert f"record {second} ({ops[second][0]} at 0.00{second} ms" in text
        assert first is None or f"record {first} ({ops[first][0]} at 0.00{first} ms" in text


def test_the_report_counts_what_was_judged() -> None:
    ops = [*LEASE, acquire(2), ("wait", 1, B), ("wait", 9, B), touch(2, B, writes=X), ("passed", 1), (SEAL, 2, True)]
    report = judge(ops, dropped=5)
    assert str(report) == "violations=0 records=10 leases=2 touches=2 edges=2 dropped=5"
    assert judge([]).violations == ()


def test_an_unknown_op_is_an_error() -> None:
    with pytest.raises(ValueError, match="record 5 has the unknown op 'tuch'; known are"):
        judge([("tuch", 1)], dropped=5)


# The prototype scenarios: a scheme of hand-over that was once shipped, and what mends it.

SCENARIOS: dict[str, tuple[list[Op], set[Found]]] = {
    "vllm#52836: the next layer's stream reuses the slot, no event": (
        [acquire(1), touch(1, A, writes=X, step=0), touch(1, A, reads=X, step=0), touch(1, B, writes=X, step=1)],
        {(Kind.SLOT, 2, 3, "x")},
    ),
    "vllm#52836, with an event of the consumer and a wait": (
        [acquire(1), touch(1, A, writes=X, step=0), touch(1, A, reads=X, step=0), *edge(1, A, B),
         touch(1, B, writes=X, step=1)],
        set(),
    ),
    "rmm#2489: B waits for A's event and does not record its own again; C takes over with the old one": (
        [acquire(1), ("record", 2, B), touch(1, A, writes=X), ("record", 1, A), ("wait", 1, B), touch(1, B, writes=X),
         ("wait", 2, C), touch(1, C, writes=X)],
        {(Kind.SLOT, 2, 7, "x"), (Kind.SLOT, 5, 7, "x")},
    ),
    "rmm#2490: B records again": (
        [acquire(1), ("record", 2, B), touch(1, A, writes=X), ("record", 1, A), ("wait", 1, B), touch(1, B, writes=X),
         ("record", 2, B), ("wait", 2, C), touch(1, C, writes=X)],
        set(),
    ),
    "released on the producer's event while a second stream reads": (
        [acquire(1), touch(1, A, writes=X), *edge(1, A, B), touch(1, B, reads=X), (SEAL, 1, True), ("passed", 1),
         ("settle", 1, "released"), acquire(2), touch(2, A, writes=X)],
        {(Kind.UNPROVEN, 4, 7, None), (Kind.SLOT, 4, 9, "x")},
    ),
    "released on the events of all": (
        [acquire(1), touch(1, A, writes=X), *edge(1, A, B), touch(1, B, reads=X), ("record", 2, B), (SEAL, 1, True),
         ("passed", 1), ("passed", 2), ("settle", 1, "released"), acquire(2), touch(2, A, writes=X)],
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_prototype_scenarios(name: str) -> None:
    ops, expected = SCENARIOS[name]
    assert found(judge(ops)) == expected


SYNCHRONIZE = [("record", 8, A), ("record", 9, B), ("passed", 8), ("passed", 9)]


@pytest.mark.parametrize(
    ("user", "before_usage", "before_reuse", "race", "keep_alive"),
    [
        pytest.param(B, [], [], True, True, id="no sync"),
        pytest.param(B, edge(1, A, B), [], False, True, id="usage waits for creation only"),
        pytest.param(B, [], edge(1, B, A), True, False, id="creation waits for usage only"),
        pytest.param(B, edge(1, A, B), edge(2, B, A), False, False, id="both directions"),
        pytest.param(B, SYNCHRONIZE, SYNCHRONIZE, False, False, id="device synchronize"),
        # The allocator records on the noted stream when the memory is freed, and gives it out once that has passed.
        pytest.param(B, [], [("record", 1, B), ("passed", 1)], True, False, id="record_stream only"),
        pytest.param(A, [], [], False, False, id="same stream"),
    ],
)
def test_the_truth_table_of_torch_npu(
    user: int, before_usage: list[Op], before_reuse: list[Op], race: bool, keep_alive: bool
) -> None:
    """Memory is created, used, freed and created anew; torch_npu's test_sanitizer_record_stream says what races."""
    creation, usage, reuse = touch(1, A, writes=X), touch(1, user, reads=X), touch(2, A, writes=X)
    ops = [acquire(1), creation, *before_usage, usage, (SEAL, 1, True), *before_reuse, acquire(2), reuse]
    pairs = {(first, second) for _, first, second, _ in of_kind(judge(ops), Kind.SLOT)}
    assert ((1, ops.index(usage)) in pairs, (ops.index(usage), ops.index(reuse)) in pairs) == (race, keep_alive)


# Random programs against the graph.

STREAMS, EVENTS, SLOTS, LEASES = range(3), range(2), range(2), range(1, 4)
USES = [
    ((), ("x",)),
    (("x",), ()),
    (("x",), ("y",)),
    (("x",), ("x", "y")),
    ((), ("*",)),
    (("*",), ()),
    (("*",), ("x",)),
]
TOUCHES = [
    [touch(lease, stream, reads, writes, step, slot)]
    for lease, stream, (reads, writes), step, slot in itertools.product(
        LEASES, STREAMS, USES, (None, 0, 0, 0, 0, 1, "*"), (0, 0, 1)
    )
]
MAPS = [[("map", lease, (5, 6))] for lease in LEASES] + [[("map", lease, (5,))] for lease in LEASES]
EDGES = [edge(event, *pair) for event in EVENTS for pair in itertools.permutations(STREAMS, 2)]
PARTS_OF_EDGES = [[half] for each in EDGES for half in each] + [[("passed", event)] for event in EVENTS]
PASSES = [[("record", event, stream), ("passed", event)] for event in EVENTS for stream in STREAMS]
STAGING = [[("copy", 0, stream)] for stream in STREAMS] + [[("rewrite", 0)]]
SETTLES = [[("settle", lease, "released")] for lease in LEASES]
LIVES = [
    *([acquire(lease, slot)] for lease in LEASES for slot in SLOTS),
    *([("seal", lease, True)] for lease in LEASES),
    *([("quarantine", lease, "why")] for lease in LEASES),
    [("reset",)],
    [("close",)],
]


def programs_of(*groups: list[list[Op]], sizes: tuple[int, int]) -> st.SearchStrategy[list[Op]]:
    """Fragments one after the other, each of any of the groups; a group named twice is as likely again."""
    fragments = st.lists(
        st.sampled_from(range(len(groups))).flatmap(lambda index: st.sampled_from(groups[index])),
        min_size=sizes[0],
        max_size=sizes[1],
    )
    return fragments.map(lambda chosen: [op for fragment in chosen for op in fragment])


ORDERED = (TOUCHES, TOUCHES, TOUCHES, EDGES, EDGES, PARTS_OF_EDGES, PASSES, STAGING, SETTLES)
programs = programs_of(*ORDERED, sizes=(6, 16))
ORDER_KINDS = (Kind.SLOT, Kind.SEAT, Kind.STAGING, Kind.UNPROVEN)


def stream_of(op: Op) -> int | None:
    field = {"touch": 3, "record": 2, "wait": 2, "copy": 2}.get(op[0])
    return op[field] if field else None


def bound(ops: Sequence[Op]) -> dict[int, int]:
    """For each wait and each pass, the record that it is for."""
    last: dict[int, int] = {}
    result = {}
    for index, op in enumerate(ops):
        if op[0] == "record":
            last[op[1]] = index
        elif op[0] in ("wait", "passed") and op[1] in last:
            result[index] = last[op[1]]
    return result


def closure(ops: Sequence[Op]) -> list[list[bool]]:
    """Floyd and Warshall on the records: whether the one is over before the other begins."""
    n, bounds = len(ops), bound(ops)
    before = [[False] * n for _ in ops]
    for first, second in itertools.combinations(range(n), 2):
        same_stream = stream_of(ops[first]) is not None and stream_of(ops[first]) == stream_of(ops[second])
        before[first][second] = same_stream or (ops[first][0] == "passed" and first in bounds)
    for target, source in bounds.items():
        before[source][target] = True
    for middle, first in itertools.product(range(n), repeat=2):
        if before[first][middle]:
            before[first] = [mine or further for mine, further in zip(before[first], before[middle], strict=True)]
    return before


def conflicts(ops: Sequence[Op]) -> Iterator[Found]:
    """All pairs that must be ordered, whether or not they are."""
    seats: dict[int, set[int]] = {}
    mapped: dict[int, set[int]] = {}
    for second, op in enumerate(ops):
        if op[0] == "map":
            seats.setdefault(op[1], set()).update(op[2])
        mapped[second] = set(seats.get(op[1], ())) if op[0] == "touch" else set()
        for first, other in enumerate(ops[:second]):
            pair = (other[0], op[0])
            if pair == ("copy", "rewrite") and other[1] == op[1]:
                yield Kind.STAGING, first, second, op[1]
            elif pair == ("touch", "settle") and other[1] == op[1]:
                yield Kind.UNPROVEN, first, second, None
            elif pair == ("touch", "touch"):
                _, lease, slot, _, reads, writes, step = op
                _, lease_, slot_, _, reads_, writes_, step_ = other
                for part in {*reads, *writes}:
                    meets = [each for each in (*reads_, *writes_) if part in (each, "*") or each == "*"]
                    if slot == slot_ and meets and (part in writes or any(each in writes_ for each in meets)):
                        yield Kind.SLOT, first, second, part
                if lease != lease_ and None not in (step, step_) and (step == step_ or "*" in (step, step_)):
                    for seat in mapped[second] & mapped[first]:
                        yield Kind.SEAT, first, second, seat


def last_of_each_stream(ops: Sequence[Op], racing: Iterable[Found]) -> set[Found]:
    last: dict[tuple[Any, ...], int] = {}
    for kind, first, second, resource in racing:
        assert first is not None
        key = (kind, second, resource, stream_of(ops[first]))
        last[key] = max(last.get(key, first), first)
    return {(kind, first, second, resource) for (kind, second, resource, _), first in last.items()}


@settings(max_examples=300)
@given(programs_of(MAPS, sizes=(0, 4)), programs)
def test_the_verdict_is_that_of_the_closed_graph(maps: list[Op], program: list[Op]) -> None:
    ops = [*maps, *program]
    before = closure(ops)
    racing = [each for each in conflicts(ops) if not before[each[1] or 0][each[2]]]
    assert {each for each in found(judge(ops)) if each[0] in ORDER_KINDS} == last_of_each_stream(ops, racing)


def reordered(ops: Sequence[Op]) -> set[tuple[int, int]]:
    """Runs every schedule. Pairs of records of which the second was over, or the host was at it, before the first was.

    The host queues one record after the other and cannot go past a `passed` before its record is over; a stream takes
    what it was given in order, and a wait once its record is over. A state is how far the host and each stream are.
    """
    queue = {stream: [i for i, op in enumerate(ops) if stream_of(op) == stream] for stream in STREAMS}
    bounds = bound(ops)
    pairs: set[tuple[int, int]] = set()
    start = (0, *(0 for _ in STREAMS))
    seen, todo = {start}, [start]
    while todo:
        host, *taken = todo.pop()
        over = {i for stream in STREAMS for i in queue[stream][: taken[stream]]}
        pairs |= {(first, second) for second in over for first in range(second) if first not in over}
        moves = []
        for stream in STREAMS:
            head = next(iter(queue[stream][taken[stream] :]), host)
            if head < host and (ops[head][0] != "wait" or bounds.get(head, head) in {head, *over}):
                moves.append((host, *(n + (other == stream) for other, n in enumerate(taken))))
        if host < len(ops) and (ops[host][0] != "passed" or bounds.get(host, host) in {host, *over}):
            if stream_of(ops[host]) is None:
                pairs |= {(first, host) for first in range(host) if first not in over}
            moves.append((host + 1, *taken))
        todo += [move for move in moves if move not in seen]
        seen.update(moves)
    return pairs


@settings(max_examples=150)
@given(programs_of(*ORDERED, MAPS, sizes=(5, 9)))
def test_a_pair_is_found_if_and_only_if_some_schedule_runs_it_the_other_way(ops: list[Op]) -> None:
    other_way = reordered(ops)
    racing = [each for each in conflicts(ops) if (each[1], each[2]) in other_way]
    assert {each for each in found(judge(ops)) if each[0] in ORDER_KINDS} == last_of_each_stream(ops, racing)


# A trace that has lost its beginning.


def needs(ops: Sequence[Op], violation: Found) -> int | None:
    """The first record without which nobody could find it; None if nothing may be missing."""
    kind, first, second, _ = violation
    if first is None:
        return None
    involved = [first, second]
    if kind is Kind.SEAT:  # whose seats they are
        involved += [i for i, op in enumerate(ops) if op[0] == "map" and op[1] in (ops[first][1], ops[second][1])]
    if kind is Kind.QUARANTINED:  # where the lease was
        involved += [i for i, op in enumerate(ops) if op[0] in ("acquire", "touch") and op[1] == ops[first][1]]
    return min(involved)


@settings(max_examples=150)
@given(programs_of(*ORDERED, MAPS, MAPS, LIVES, LIVES, LIVES, LIVES, sizes=(8, 24)))
def test_a_suffix_has_no_violation_of_its_own_and_all_of_the_whole_that_are_in_it(ops: list[Op]) -> None:
    whole = found(judge(ops))
    for cut in range(1, len(ops)):
        part = found(check(timed(ops)[cut:], dropped=cut))
        assert all((first or cut) >= cut and first is not None for _, first, _, _ in part)
        assert {each for each in whole if (needs(ops, each) or 0) >= cut} <= part
        for kind, first, second, resource in part - whole:
            # Where seats are unknown, the last access of a stream may be an earlier one; it is no less unordered.
            assert kind is Kind.SEAT
            assert any(
                (kind, later, second, resource) in whole and stream_of(ops[later]) == stream_of(ops[first or 0])
                for later in range((first or 0) + 1, second)
            )


@settings(max_examples=100)
@given(programs, programs, st.randoms(use_true_random=False))
def test_a_capture_is_judged_by_itself(device: list[Op], captured: list[Op], rng: random.Random) -> None:
    """Whatever is captured, on streams of its own, changes nothing outside, and is judged as if it ran alone."""

    def apart(op: Op) -> Op:  # other streams, other events, one lease, a slot of its own
        if op[0] == "touch":
            return touch(9, op[3] + 10, op[4], op[5], op[6], slot=9)
        return (op[0], op[1] + 10, op[2] + 10)

    inside = [apart(op) for op in captured if op[0] in ("touch", "record", "wait")]
    # A stream whose first record is no touch is in no capture yet.
    inside = [touch(9, stream + 10, slot=9) for stream in STREAMS] + inside
    begin = [acquire(9, 9, "capture")]
    alone = found(judge([acquire(9, 9), *inside]))

    turns = [False] * len(device) + [True] * len(inside)
    rng.shuffle(turns)
    sources = (iter(enumerate(device)), iter(enumerate(inside)))
    merged, place = list(begin), ({}, {})
    for turn in turns:
        index, op = next(sources[turn])
        place[turn][index] = len(merged)
        merged.append(op)

    def moved(violations: set[Found], turn: bool, shift: int = 0) -> set[Found]:
        where = {None: None, **place[turn]}
        return {
            (kind, where[None if first is None else first - shift], where[second - shift], resource)
            for kind, first, second, resource in violations
        }

    assert found(judge(merged)) == moved(found(judge(device)), False) | moved(alone, True, shift=1)


# What the arena itself records.


def trace_of_an_arena(seed: int, *, ordered: bool) -> Trace:
    """Executions on two slots and three streams: parts, seats that are continued, staging, graphs, and a device that
    runs whenever it likes.
    """
    rng = random.Random(seed)
    device = ModelDevice(seed)
    on = [device.stream() for _ in STREAMS]
    trace = Trace(None)
    arena: WorkspaceArena[ModelStream] = WorkspaceArena(device, 2, graphs=[["graph"]], ordered=ordered, trace=trace)
    ring = StagingRing(arena.events, [[0], [0]])
    captured = arena.capture("graph", ExecutionId(Generation(1), domain=Domain.GRAPH, kind=ExecutionKind.CAPTURE))
    for stream in on:
        captured.touch(stream, writes=["x"])
    captured.seal()
    before = None
    for number in range(2, 12):
        replayed = rng.random() < 0.2
        execution = ExecutionId(Generation(number), domain=Domain.GRAPH if replayed else Domain.EAGER)
        lease = arena.replay("graph", execution) if replayed else arena.acquire(execution)
        lease.follow(continues=[before] if before else [], seats=[5])
        if replayed:
            lease.touch(rng.choice(on), writes=["*"], step="*")
            lease.complete("*")
        else:
            entry, _ = ring.take()
            stream = rng.choice(on)
            lease.touch(stream, writes=["lists"])
            ring.copied(entry, stream)
            for layer in range(3):
                lease.touch(rng.choice(on), reads=["lists"], writes=["pages"], step=layer)
                lease.complete(layer)
        lease.seal()
        for _ in range(rng.randrange(20)):
            device.step()
        if before is not None:
            arena.settle(before)
        before = lease
    return trace


@pytest.mark.parametrize("seed", range(30))
def test_what_an_arena_orders_is_ordered(seed: int) -> None:
    trace = trace_of_an_arena(seed, ordered=True)
    report = check(trace.records(), trace.dropped)
    assert report.violations == ()
    assert report.leases == 11
    assert report.edges > 0


def test_what_an_arena_is_told_not_to_order_is_found() -> None:
    wrong = [check(trace_of_an_arena(seed, ordered=False).records()) for seed in range(30)]
    assert sum(1 for report in wrong if of_kind(report, Kind.SLOT)) >= 25
    assert any(of_kind(report, Kind.SEAT) for report in wrong)
    assert not any(of_kind(report, Kind.STAGING) for report in wrong)  # the ring has events of its own
