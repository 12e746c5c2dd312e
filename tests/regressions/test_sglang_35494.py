# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""sgl-project/sglang#35494: requests that share a prefix share one C4 state row, and a reused row keeps old rows.

Symptom: wrong tokens for one of two requests with the same prompt; stale rows after a row is given to another request.
Here: no two owners have a page in common in any layer, whatever their prompts are; and what a predecessor left in a
seat's pages is never read.
"""

from __future__ import annotations

import numpy as np
import pytest

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.rules import Launch, Rule, violations
from afd_dsv4.tail.store import SlotIndex, TailStore
from afd_dsv4.tail.tables import PageList, RequestChunk, RequestId
from tests.symbolic import SymbolicPool, expected

SHAPES = [TailShape(4, True, 8, layers=3), TailShape(128, False, 32, layers=3)]


def launch_of(lists: PageList, layer: int, pages: int) -> Launch:
    tokens = [chunk.tokens for chunk in lists.chunks]
    starts = np.array([chunk.start for chunk in lists.chunks], np.int32)
    return Launch(
        shape=lists.shape,
        chunks=lists.chunks,
        table=lists.table(layer, lists.shape.columns(max(tokens))),
        starts=lists.starts,
        metadata_starts=starts,
        device_starts=starts,
        cu_seqlens=np.cumsum([0, *tokens], dtype=np.int32),
        pool_pages=pages,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=["C4", "C128"])
def test_two_requests_with_one_prefix_have_no_page_in_common(shape: TailShape) -> None:
    store = TailStore({shape.ratio: shape}, max_num_seqs=2, slots=1)
    for start, end in ((0, 131), (131, 140), (140, 141)):
        twins = [RequestChunk(RequestId(name), start, end) for name in ("one", "two")]
        lists = store.plan(twins, SlotIndex(0)).lists[shape.ratio]
        for layer in range(shape.layers):
            first, second = (set(map(int, row)) - {0} for row in lists.ids[layer])
            assert not first & second
            assert violations(launch_of(lists, layer, store.pages(shape.ratio))) == ()
        tails = [set(map(int, store.tail(RequestId(name), shape.ratio)[1].ravel())) for name in ("one", "two")]
        assert not tails[0] & tails[1]


@pytest.mark.parametrize("shape", SHAPES, ids=["C4", "C128"])
def test_a_page_in_common_is_seen_by_the_rules_and_by_the_rows(shape: TailShape) -> None:
    """Negative control: the second request is given the first one's pages."""
    store, pool = TailStore({shape.ratio: shape}, max_num_seqs=2, slots=1), SymbolicPool(shape)
    wrong = False
    for start, end in ((0, 3), (3, 2 * shape.ratio)):
        twins = [RequestChunk(RequestId(name), start, end) for name in ("one", "two")]
        lists = store.plan(twins, SlotIndex(0)).lists[shape.ratio]
        lists.ids[0, 1] = lists.ids[0, 0]
        found = violations(launch_of(lists, 0, store.pages(shape.ratio)))
        assert Rule.NO_ALIAS in {violation.rule for violation in found}
        table = lists.table(0, shape.columns(end - start))
        want = {name: rows for chunk in twins for name, rows in expected(shape, chunk).items()}
        wrong |= pool.launch(lists.chunks, table, lists.starts) != want
    assert wrong


@pytest.mark.parametrize("shape", SHAPES, ids=["C4", "C128"])
def test_what_a_predecessor_left_in_the_pages_is_never_read(shape: TailShape) -> None:
    store, pool = TailStore({shape.ratio: shape}, max_num_seqs=1, slots=1), SymbolicPool(shape)
    for name, left in (("first", None), ("second", "first"), ("third", "second")):
        assert left in {None, *(row[0] for row in pool.rows.values())}  # the stale rows are there, and are not read
        position = 0
        for tokens in (3, shape.ratio - 1, 1, 2 * shape.ratio + 1):
            chunk = RequestChunk(RequestId(name), position, position + tokens)
            lists = store.plan([chunk], SlotIndex(0)).lists[shape.ratio]
            for layer in range(shape.layers):
                got = pool.launch((chunk,), lists.table(layer, shape.columns(tokens)), lists.starts)
                assert got == expected(shape, chunk)
            position += tokens
        store.end(RequestId(name))
