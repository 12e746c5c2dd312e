# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm#41700, #43357, local-inference-lab/vllm#224: "Workspace is locked" ends the engine.

Symptom: a request needs more than what warm-up had locked (requires X, current Y); max_num_batched_tokens has no effect
on what is locked.
Here: what is taken at start-up is a function of the configured limits; no request within them needs more, and the limit
is used up by one.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.geometry import page_layout, preset
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SlotIndex, TailStore
from afd_dsv4.tail.tables import NO_COLUMN, RequestChunk, RequestId
from afd_dsv4.workspace.sizing import INT32, size_workspace, tail_shapes
from tests.strategies import shapes


def columns_needed(shape: TailShape, start: int, tokens: int) -> int:
    """The last column that a launch reaches, and one; the long way, from its first row to its last."""
    store = TailStore({shape.ratio: shape}, max_num_seqs=1, slots=1)
    request = RequestId("r")
    if start:
        store.plan([RequestChunk(request, 0, start)], SlotIndex(0))
    lists = store.plan([RequestChunk(request, start, start + tokens)], SlotIndex(0)).lists[shape.ratio]
    assert (lists.columns != NO_COLUMN).sum() <= shape.list_ids
    assert lists.ids.shape == (shape.layers, 1, shape.list_ids)
    written = {(int(lists.starts[0]) + row) // shape.page_rows for row in range(tokens)}
    mapped = set(map(int, lists.columns[lists.columns != NO_COLUMN]))
    return max(written | mapped) + 1


@settings(max_examples=200)
@given(shapes(), st.integers(0, 3000), st.integers(1, 600), st.integers(0, 300))
def test_no_launch_within_the_limits_needs_more_columns_than_were_taken(
    shape: TailShape, start: int, tokens: int, unused: int
) -> None:
    assert columns_needed(shape, start, tokens) <= shape.columns(tokens + unused)


@pytest.mark.parametrize("tokens", [1, 31, 128, 1000])
@pytest.mark.parametrize(("ratio", "page_rows"), [(4, 8), (4, 2), (128, 32)])
def test_some_launch_needs_all_of_them(ratio: int, page_rows: int, tokens: int) -> None:
    """Negative control: one column less, and a request within the limits would not fit."""
    shape = TailShape(ratio, ratio == 4, page_rows, layers=1)
    worst = max(columns_needed(shape, start, tokens) for start in range(2 * shape.period + ratio + 1))
    assert worst == shape.columns(tokens)


def test_the_configured_batch_decides_what_is_taken() -> None:
    geometry, layout = preset("flash"), page_layout("vllm-ascend-0.23.0", 128)
    small, large = (
        size_workspace(geometry, layout, max_num_seqs=1, max_num_batched_tokens=tokens, slots=1)
        for tokens in (4096, 65536)
    )
    # C4 pages have 8 rows and C128 pages 32; slot and idle table.
    more = 2 * INT32 * ((65536 - 4096) // 8 + (65536 - 4096) // 32)
    assert large.table_bytes - small.table_bytes == more
    c4 = tail_shapes(geometry, layout)[4]
    assert columns_needed(c4, 0, 65536) > c4.columns(4096)
