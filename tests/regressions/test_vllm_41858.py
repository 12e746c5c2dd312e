# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm#41858 (fixed by #42275): the workspace of the second uBatch was never warmed.

Symptom: an assertion in the first step that uses two uBatches, because warm-up had sized the first one's memory only.
Here: every slot is sized at start-up by one expression, used or not; the first batch of a second uBatch may be the
largest of all, and nothing grows for it.
"""

from __future__ import annotations

import pytest

from afd_dsv4.geometry import page_layout, preset
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SlotIndex, TailStore
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.sizing import size_workspace
from tests.regressions.machine import Machine
from tests.symbolic import SymbolicPool, expected

SHAPE = TailShape(4, True, 8, layers=3)
SEQS = 4


def forward(store: TailStore, pool: SymbolicPool, chunks: list[RequestChunk], slot: int) -> None:
    lists = store.plan(chunks, SlotIndex(slot)).lists[4]
    want = {name: rows for chunk in chunks for name, rows in expected(SHAPE, chunk).items()}
    for layer in range(SHAPE.layers):
        table = lists.table(layer, SHAPE.columns(max(chunk.tokens for chunk in chunks)))
        assert pool.launch(lists.chunks, table, lists.starts) == want


def chunks(starts: int, tokens: int) -> list[RequestChunk]:
    return [RequestChunk(RequestId(str(i)), starts, starts + tokens) for i in range(SEQS)]


def test_the_first_batch_of_the_second_slot_may_be_the_largest() -> None:
    store, pool = TailStore({4: SHAPE}, max_num_seqs=SEQS, slots=2), SymbolicPool(SHAPE)
    pages = store.pages(4)
    forward(store, pool, chunks(0, 5)[:1], 0)  # the warm-up: one request, one uBatch
    store.end(RequestId("0"))
    forward(store, pool, chunks(0, 15), 1)
    forward(store, pool, chunks(15, 500), 1)
    assert store.pages(4) == pages


def test_a_store_that_was_sized_for_the_first_slot_only_is_found() -> None:
    """Negative control."""
    store, pool = TailStore({4: SHAPE}, max_num_seqs=SEQS, slots=1), SymbolicPool(SHAPE)
    with pytest.raises(IndexError):
        forward(store, pool, chunks(0, 15), 1)


@pytest.mark.parametrize("model", ["flash", "pro"])
def test_two_slots_are_twice_one_slot(model: str) -> None:
    geometry, layout = preset(model), page_layout("vllm-ascend-0.23.0", 128)
    one, two, three = (
        size_workspace(geometry, layout, max_num_seqs=SEQS, max_num_batched_tokens=8192, slots=slots)
        for slots in (1, 2, 3)
    )
    assert two.device_bytes - one.device_bytes == three.device_bytes - two.device_bytes
    assert two.spare_bytes == 2 * one.spare_bytes
    assert two.list_bytes == 2 * one.list_bytes


def test_a_second_ubatch_gets_a_slot_of_its_own_in_its_first_step() -> None:
    machine = Machine(slots=2)
    for generation in range(1, 20):
        lease = machine.acquire(generation)
        lease.touch(machine.a, writes=["x"])
        lease.seal()
        machine.device.run()
        assert lease.slot.index == 0
    assert [machine.acquire(20, ubatch).slot.index for ubatch in (0, 1)] == [0, 1]
