# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Laws of rows and pages: exactly what a later forward reads, and re-based starts the operator cannot tell apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.tables import RequestChunk, RequestId, map_chunks
from tests.strategies import LENGTHS, shapes


def rows_read_from(shape: TailShape, start: int, tokens: int) -> set[int]:
    """Rows before `start` that the windows completed by the next `tokens` rows pool, the long way."""
    read = set()
    for position in range(start, start + tokens):
        if (position + 1) % shape.ratio == 0:
            first = position + 1 - shape.ratio
            if shape.overlap and first >= shape.ratio:
                first -= shape.ratio
            read.update(range(first, min(position + 1, start)))
    return read


@given(shapes(), st.integers(0, 5000))
def test_need_is_exactly_what_some_later_forward_reads(shape: TailShape, position: int) -> None:
    read = rows_read_from(shape, position, 2 * shape.ratio)
    need = set(shape.need(position))
    assert read <= need
    # With overlap the current window's rows are read by two emissions; every needed row is read by one of them.
    assert need == read


@pytest.mark.parametrize(
    ("ratio", "position", "rows"),
    [
        (4, 0, range(0)),
        (4, 3, range(3)),
        (4, 4, range(4)),
        (4, 9, range(4, 9)),
        (128, 127, range(127)),
        (128, 128, range(128, 128)),
        (128, 129, range(128, 129)),
    ],
)
def test_need_matches_the_published_truth_table(ratio: int, position: int, rows: range) -> None:
    assert list(TailShape(ratio, ratio == 4, 8, 1).need(position)) == list(rows)


@given(shapes(), st.integers(0, 5000), st.integers(0, 9))
def test_live_pages_are_the_union_over_all_accept_lengths(shape: TailShape, low: int, drafts: int) -> None:
    union = {page for position in range(low, low + drafts + 1) for page in shape.pages(shape.need(position))}
    assert set(shape.pages(shape.live(low, low + drafts))) == union


@given(shapes(drafts=st.integers(0, 9)), st.integers(0, 5000), st.data())
def test_tail_pages_bounds_every_phase_and_is_reached(shape: TailShape, low: int, data: st.DataObject) -> None:
    drafts = data.draw(st.integers(0, shape.drafts))
    assert len(shape.pages(shape.live(low, low + drafts))) <= shape.tail_pages
    assert any(
        len(shape.pages(shape.live(p, p + d))) == shape.tail_pages
        for p in range(2 * shape.period + shape.reach)
        for d in range(shape.drafts + 1)
    )


@pytest.mark.parametrize(
    ("ratio", "page_rows", "pages", "ids"), [(4, 8, 2, 4), (4, 4, 2, 4), (128, 32, 4, 8), (128, 128, 1, 2)]
)
def test_tails_without_drafts_take_the_known_number_of_pages(ratio: int, page_rows: int, pages: int, ids: int) -> None:
    shape = TailShape(ratio, ratio == 4, page_rows, layers=1)
    assert (shape.tail_pages, shape.list_ids) == (pages, ids)


@given(shapes(), st.integers(0, 1 << 20))
def test_a_rebased_start_keeps_phase_and_previous_window(shape: TailShape, start: int) -> None:
    small = start - shape.base(start)
    assert small % shape.ratio == start % shape.ratio
    assert small % shape.page_rows == start % shape.page_rows
    assert (small >= shape.reach) == (start >= shape.reach)
    assert small < shape.period + shape.reach


@given(shapes(), st.integers(0, 1 << 20), LENGTHS)
def test_columns_suffice_wherever_a_launch_starts(shape: TailShape, start: int, tokens: int) -> None:
    assert (start - shape.base(start) + tokens - 1) // shape.page_rows < shape.columns(tokens)


@given(shapes(drafts=st.integers(0, 9)), st.lists(st.tuples(st.integers(0, 3000), LENGTHS), max_size=5), st.data())
def test_chunks_are_mapped_in_one_go_as_the_rules_of_rows_say_one_by_one(
    shape: TailShape, spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    chunks = []
    for start, tokens in spans:
        drafts = data.draw(st.integers(0, min(shape.drafts, tokens - 1)))
        chunks.append(RequestChunk(RequestId("r"), start, start + tokens, drafts))
    mapping = map_chunks(shape, chunks)
    for i, chunk in enumerate(chunks):
        history, tail = (range(*part[:, i].tolist()) for part in (mapping.history, mapping.tail))
        assert history == shape.pages(shape.need(chunk.start))
        assert set(tail) == set(shape.pages(shape.live(chunk.low, chunk.end)))
        assert tail or tail.start == history.stop
        assert mapping.start[i] == chunk.start - shape.base(chunk.start)
        assert mapping.first_column[i] * shape.page_rows == shape.base(chunk.start)
