# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#15452 and its successors: a generic slot mapping reads outside of a bounded tail.

Symptom: `position // block` of positions 8..11 points behind an 8-row tail; an out-of-bounds read, or another
request's rows.
Here: every row that a launch reads or must keep has a column in its table, and the column a page, wherever the request
has got to.
"""

from __future__ import annotations

import numpy as np
import pytest

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.rules import Launch, Rule, violations
from afd_dsv4.tail.store import SlotIndex, TailStore
from afd_dsv4.tail.tables import Int32Array, RequestChunk, RequestId

SHAPE = TailShape(4, True, 8, layers=1)


def launch(chunk: RequestChunk, table: Int32Array, start: int, pages: int) -> Launch:
    true, given = np.array([chunk.start], np.int32), np.array([start], np.int32)
    lengths = np.array([0, chunk.tokens], np.int32)
    return Launch(SHAPE, (chunk,), table, given, true, true, lengths, pages)


@pytest.mark.parametrize("start", [*range(8, 12), 63, 64, 65, 1000, 32767, 131072])
def test_every_row_behind_a_tail_has_a_column_and_a_page(start: int) -> None:
    store = TailStore({4: SHAPE}, max_num_seqs=1, slots=1)
    store.plan([RequestChunk(RequestId("r"), 0, start)], SlotIndex(0))
    chunk = RequestChunk(RequestId("r"), start, start + 4)
    lists = store.plan([chunk], SlotIndex(0)).lists[4]
    table = lists.table(0, SHAPE.columns(4))
    assert violations(launch(chunk, table, int(lists.starts[0]), store.pages(4))) == ()
    base = start - int(lists.starts[0])
    for position in SHAPE.need(start):
        column = (position - base) // SHAPE.page_rows
        assert column < table.shape[1]
        assert table[0, column] > 0


@pytest.mark.parametrize("start", range(8, 12))
def test_the_generic_mapping_of_one_page_is_found(start: int) -> None:
    """Negative control: the true start, and a table of the one page that an 8-row tail has."""
    chunk = RequestChunk(RequestId("r"), start, start + 4)
    broken = {found.rule for found in violations(launch(chunk, np.array([[1]], np.int32), start, 9))}
    assert Rule.HISTORY_MAPPED in broken
