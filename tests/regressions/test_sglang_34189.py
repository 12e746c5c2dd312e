# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""sgl-project/sglang#34189: more than 4 draft tokens write less of the state ring than they should.

Symptom: stale state after some accept lengths, and no error.
Here: the tail of every accept length is mapped, for as many drafts as the tails were sized for, and more are refused by
name. All shapes and draft counts: tests/property/test_tail_store.py
(test_every_accept_length_of_every_draft_count_goes_on_from_a_whole_tail).
"""

from __future__ import annotations

import numpy as np
import pytest

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SlotIndex, TailStore, UnknownPosition
from afd_dsv4.tail.tables import RequestChunk, RequestId, map_chunks
from tests.symbolic import SymbolicPool, expected

R = RequestId("r")


def rows_after(drafts: int, told: int, accepted: int, prompt: int) -> bool:
    """Whether the windows behind a verify batch are right if its tail is mapped for `told` drafts.

    Every logical page has a physical one of its own, so that nothing but a missing row can be wrong.
    """
    shape, pool = TailShape(4, True, 2, layers=1, drafts=told), SymbolicPool(TailShape(4, True, 2, layers=1))

    def launch(chunk: RequestChunk) -> object:
        mapping = map_chunks(shape, [chunk])
        table = np.zeros((1, shape.columns(64)), np.int32)
        for pages in (mapping.history, mapping.tail):
            for page in range(*pages[:, 0]):
                table[0, page - mapping.first_column[0]] = page + 1
        return pool.launch((chunk,), table, mapping.start.astype(np.int32))

    launch(RequestChunk(R, 0, prompt))
    end = prompt + 1 + drafts
    launch(RequestChunk(R, prompt, end, told))
    position = end - drafts + accepted
    after = RequestChunk(R, position, position + 9)
    return launch(after) == expected(shape, after)


@pytest.mark.parametrize("drafts", range(10))
def test_rows_are_lost_only_where_the_tail_is_mapped_for_too_few_drafts(drafts: int) -> None:
    """With `told` = `drafts` none. With fewer: the fault of the report, planted, and seen wherever it can do harm.

    A row r behind the prompt's last page (r = prompt, even) is needed as soon as one token is accepted. The tail starts
    at trunc4(prompt + 1 + drafts - told) - 4, which can lie behind r's page of 2 rows once drafts - told is 5.
    """
    for told in range(drafts + 1):
        wrong = [
            (prompt, accepted)
            for prompt in range(1, 18)
            for accepted in range(drafts + 1)
            if not rows_after(drafts, told, accepted, prompt)
        ]
        assert bool(wrong) == (drafts - told >= 5), (told, wrong)


def test_drafts_that_the_tails_were_not_sized_for_and_starts_that_they_do_not_allow_are_refused() -> None:
    shape = TailShape(4, True, 8, layers=1, drafts=4)
    store = TailStore({4: shape}, max_num_seqs=1, slots=1)
    store.plan([RequestChunk(R, 0, 20)], SlotIndex(0))
    before = store.owners(4)
    with pytest.raises(ValueError, match="has 5 drafts; tails are sized for 4"):
        store.plan([RequestChunk(R, 20, 26, 5)], SlotIndex(0))
    store.plan([RequestChunk(R, 20, 25, 4)], SlotIndex(0))
    with pytest.raises(UnknownPosition, match=r"starts at 20, its tail allows \[21, 25\]"):
        store.plan([RequestChunk(R, 20, 22)], SlotIndex(0))
    assert np.array_equal(before, store.owners(4))
