# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A batch cut into any number of uBatches, against counting its tokens one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd_dsv4.execution.ubatch import cut, cut_at, parts
from afd_dsv4.tail.tables import RequestChunk, RequestId

BATCH = (RequestChunk(RequestId("a"), 5, 9), RequestChunk(RequestId("b"), 0, 3, 2))


@st.composite
def batches(draw: st.DrawFn) -> tuple[RequestChunk, ...]:
    rows = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 12)), max_size=6))
    return tuple(RequestChunk(RequestId(str(i)), start, start + tokens) for i, (start, tokens) in enumerate(rows))


@given(batches(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_token_lands_in_its_ubatch_in_its_place(
    batch: tuple[RequestChunk, ...], ubatches: int, rng: random.Random
) -> None:
    tokens = [(chunk.request, row) for chunk in batch for row in range(chunk.start, chunk.end)]
    where = sorted(rng.randrange(ubatches) for _ in tokens)  # of each token, its uBatch
    counts = [where.count(ubatch) for ubatch in range(ubatches)]
    found = parts(batch, counts)
    assert len(found) == ubatches
    for ubatch, part in enumerate(found):
        assert [(chunk.request, row) for chunk in part for row in range(chunk.start, chunk.end)] == [
            token for token, its in zip(tokens, where, strict=True) if its == ubatch
        ]
        assert len({chunk.request for chunk in part}) == len(part)
        assert all(chunk.drafts == 0 for chunk in part)
    ends = [sum(counts[: i + 1]) for i in range(ubatches)]
    assert cut_at(batch, list(zip([0, *ends], ends, strict=False))) == found
    if ubatches == 2:
        assert cut(batch, counts[0]) == found


def test_a_request_may_be_in_all_of_many_ubatches() -> None:
    (whole,) = parts([RequestChunk(RequestId("a"), 3, 10)], [7])
    assert whole == (RequestChunk(RequestId("a"), 3, 10),)
    assert parts(whole, [1, 0, 5, 1]) == (
        (RequestChunk(RequestId("a"), 3, 4),),
        (),
        (RequestChunk(RequestId("a"), 4, 9),),
        (RequestChunk(RequestId("a"), 9, 10),),
    )


def test_drafts_stay_with_the_last_part_of_their_request() -> None:
    assert parts(BATCH, [2, 2, 3]) == (
        (RequestChunk(RequestId("a"), 5, 7),),
        (RequestChunk(RequestId("a"), 7, 9),),
        (RequestChunk(RequestId("b"), 0, 3, 2),),
    )


@pytest.mark.parametrize("tokens", [[5, 2], [6, 1]])
def test_a_cut_that_leaves_nothing_but_drafts_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"leaves nothing but drafts \[1, 3\) behind it; cut before row 1"):
        parts(BATCH, tokens)


@pytest.mark.parametrize("tokens", [[], [6], [8], [3, 3], [9, -2]])
def test_other_tokens_than_the_batch_has_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="for a batch of 7; they must make up the batch"):
        parts(BATCH, tokens)


@pytest.mark.parametrize("slices", [[(1, 7)], [(0, 3), (4, 7)], [(0, 4), (3, 7)], [(0, 4), (7, 4), (4, 7)]])
def test_slices_with_a_gap_or_an_overlap_are_refused(slices: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"token slices .* do not follow each other from token 0 on"):
        cut_at(BATCH, slices)


def test_a_slice_that_goes_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="they must make up the batch"):
        cut_at(BATCH, [(0, 9), (9, 7)])


@pytest.mark.parametrize("tokens", [-1, 8])
def test_a_cut_outside_the_batch_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"cut after {tokens} tokens of a batch of 7; choose 0 to 7"):
        cut(BATCH, tokens)
