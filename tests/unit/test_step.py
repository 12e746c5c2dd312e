# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""One step at a time: which tails end, which chunks come, and what contradicts the steps before."""

from __future__ import annotations

from typing import Any

import pytest

from afd_dsv4.execution.step import ImpossibleStep, Steps
from afd_dsv4.tail.tables import RequestChunk, RequestId

A, B, C = (RequestId(name) for name in "abc")


def chunk(steps: Steps, name: str, start: int, rows: int, drafts: int = 0) -> RequestChunk:
    """One request alone in a step."""
    (found,) = steps.chunks([name], [start], [rows], {name: drafts} if drafts else {})
    return found


def test_chunks_come_in_batch_order_and_go_on_where_the_last_step_ended() -> None:
    steps = Steps()
    first = steps.chunks(["a", "b"], [0, 0], [5, 7], {})
    assert first == (RequestChunk(A, 0, 5), RequestChunk(B, 0, 7))
    second = steps.chunks(["b", "c", "a"], [7, 0, 5], [1, 3, 2], {})
    assert second == (RequestChunk(B, 7, 8), RequestChunk(C, 0, 3), RequestChunk(A, 5, 7))


def test_a_request_that_is_not_scheduled_for_a_while_keeps_its_tail() -> None:
    steps = Steps()
    chunk(steps, "a", 0, 5)
    assert steps.end() == ()
    chunk(steps, "b", 0, 5)
    assert chunk(steps, "a", 5, 1) == RequestChunk(A, 5, 6)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_with_drafts_a_request_goes_on_at_every_accept_length(accepted: int) -> None:
    steps = Steps()
    chunk(steps, "a", 0, 10)
    assert chunk(steps, "a", 10, 3, drafts=2) == RequestChunk(A, 10, 13, 2)
    assert chunk(steps, "a", 11 + accepted, 1).start == 11 + accepted


@pytest.mark.parametrize("how", ["finished", "preempted", "resumed"])
def test_an_ended_tail_is_told_once_and_the_request_starts_anew(how: str) -> None:
    steps = Steps()
    steps.chunks(["a", "b"], [0, 0], [5, 7], {})
    assert steps.end(**{how: {"b", "a", "never seen"}}) == (A, B)
    assert len(steps) == 0
    assert steps.end(**{how: {"a", "b"}}) == ()
    assert chunk(steps, "a", 0, 5).start == 0


def test_a_request_that_is_preempted_and_finished_in_one_step_ends_once() -> None:
    steps = Steps()
    chunk(steps, "a", 0, 5)
    assert steps.end(finished={"a"}, preempted={"a"}, resumed=["a"]) == (A,)


IMPOSSIBLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "a position ahead": ((["a"], [11], [1], {}), "'a' goes on at 11, and was left between 8 and 10"),
    "a position before every accept length": ((["a"], [7], [4], {}), "'a' goes on at 7, and was left between 8 and 10"),
    "a start that nobody computed": ((["new"], [4], [1], {}), "'new' is new and starts at 4"),
    "a request twice": ((["a", "a"], [10, 10], [1, 1], {}), "'a' stands twice"),
    "no rows": ((["a"], [10], [0], {}), r"0 <= start < end must hold, got \[10, 10\)"),
    "nothing but drafts": ((["a"], [10], [2], {"a": 2}), "2 drafts in 2 rows; at least one must stay"),
    "a negative position": ((["new"], [-1], [3], {}), r"0 <= start < end must hold, got \[-1, 2\)"),
    "a list too short": ((["a", "b"], [10], [1, 1], {}), "2 requests with 1 positions and 2 numbers of rows"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_is_refused_and_changes_nothing(name: str) -> None:
    step, why = IMPOSSIBLE[name]
    steps = Steps()
    chunk(steps, "a", 0, 10, drafts=2)
    with pytest.raises(ImpossibleStep, match=why):
        steps.chunks(*step)
    for start in (8, 9, 10):
        assert chunk(steps, "a", start, 10 - start or 2, drafts=max(0, 9 - start)).start == start
        steps = Steps()
        chunk(steps, "a", 0, 10, drafts=2)


def test_one_bad_chunk_takes_no_other_of_its_step_over() -> None:
    steps = Steps()
    chunk(steps, "a", 0, 10)
    with pytest.raises(ImpossibleStep):
        steps.chunks(["a", "new"], [10, 3], [1, 1], {})
    assert chunk(steps, "a", 10, 1) == RequestChunk(A, 10, 11)
    assert len(steps) == 1


def test_a_request_that_begins_at_0_again_is_told_once_and_starts_anew() -> None:
    steps = Steps()
    steps.chunks(["a", "b"], [0, 0], [5, 7], {})
    assert steps.restarted(["new", "b", "a"], [0, 7, 0]) == (A,)
    assert steps.chunks(["b", "a"], [7, 0], [1, 5], {}) == (RequestChunk(B, 7, 8), RequestChunk(A, 0, 5))
    assert steps.restarted(["b", "a"], [8, 5]) == ()


@pytest.mark.parametrize("start", [1, 7])
def test_a_request_that_goes_back_but_not_to_0_is_refused_by_name(start: int) -> None:
    steps = Steps()
    chunk(steps, "a", 0, 10, drafts=2)
    assert steps.restarted(["a"], [start]) == ()
    with pytest.raises(ImpossibleStep, match=f"'a' goes on at {start}, and was left between 8 and 10"):
        chunk(steps, "a", start, 1)


@pytest.mark.parametrize("start", [8, 9, 10])
def test_behind_a_step_that_broke_off_nobody_goes_on_at_any_position(start: int) -> None:
    # The rows of that step may or may not be there, and 8, 9 and 10 are all within what its drafts left open.
    steps = Steps()
    chunk(steps, "a", 0, 10, drafts=2)
    steps.lost(["a", "new"], "planted")
    steps.lost(["a"], "what came later is no cause")
    with pytest.raises(ImpossibleStep, match="'a' lost its tail: planted; end it and start it anew"):
        chunk(steps, "a", start, 1)
    assert chunk(steps, "new", 0, 3).end == 3  # had no tail, so it had nothing to lose


@pytest.mark.parametrize("how", ["finished", "restarted"])
def test_a_request_whose_tail_was_lost_starts_anew_at_0(how: str) -> None:
    steps = Steps()
    chunk(steps, "a", 0, 10)
    steps.lost(["a"], "planted")
    assert (steps.end(finished={"a"}) if how == "finished" else steps.restarted(["a"], [0])) == (A,)
    assert chunk(steps, "a", 0, 4).end == 4
    assert chunk(steps, "a", 4, 1).end == 5
