# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""NVIDIA/TensorRT-LLM#18660: a side pool that admission does not know of runs dry.

Symptom: the engine aborts in the middle of a request.
Here: what the plugin takes is subtracted from the memory offered to the KV cache before blocks are promised (also by
`afd-dsv4 plan`: tests/unit/test_cli.py), and the pages of as many requests as vLLM may run are always there.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from afd_dsv4.admission import GIB, kv_plan
from afd_dsv4.geometry import page_layout, preset
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SlotIndex, TailFull, TailStore
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.sizing import size_workspace

SEQS = 8


def test_blocks_are_promised_out_of_what_the_plugin_leaves() -> None:
    geometry, layout = preset("flash"), page_layout("vllm-ascend-0.23.0", 128)
    plan = kv_plan(geometry, layout, plugin=True)
    taken = size_workspace(geometry, layout, max_num_seqs=64, max_num_batched_tokens=65536).device_bytes
    budget = 20 * GIB
    promised = plan.free_blocks(budget - taken)
    assert (promised + 1) * plan.block_bytes + taken <= budget  # the null block is one more
    # Negative control: promised out of the whole budget, they are more than there is.
    assert (plan.free_blocks(budget) + 1) * plan.block_bytes + taken > budget


@pytest.mark.parametrize(
    "shape", [TailShape(4, True, 8, 2, drafts=3), TailShape(128, False, 32, 2)], ids=["C4", "C128"]
)
def test_the_pages_of_every_request_that_may_run_are_there_in_every_phase(shape: TailShape) -> None:
    rng = random.Random(0)
    store = TailStore({shape.ratio: shape}, max_num_seqs=SEQS, slots=2)
    everybody = np.arange(1, store.pages(shape.ratio))
    position = dict.fromkeys((RequestId(str(i)) for i in range(SEQS)), 0)
    for turn in range(200):
        chunks = []
        for request, start in position.items():
            tokens = rng.choice([1, shape.drafts + 1, shape.ratio, 3 * shape.ratio + 1])
            drafts = min(shape.drafts, tokens - 1) if rng.random() < 0.5 else 0
            chunks.append(RequestChunk(request, start, start + tokens, drafts))
            position[request] = start + tokens - rng.randint(0, drafts)
        store.plan(chunks, SlotIndex(turn % 2))
        assert np.array_equal(store.owners(shape.ratio), everybody)  # none lost, none twice


def test_one_request_more_than_planned_is_refused_before_anything_changes() -> None:
    shape = TailShape(4, True, 8, 2)
    store = TailStore({4: shape}, max_num_seqs=SEQS, slots=1)
    store.plan([RequestChunk(RequestId(str(i)), 0, 5) for i in range(SEQS)], SlotIndex(0))
    tails = [store.tail(RequestId(str(i)), 4)[1] for i in range(SEQS)]
    with pytest.raises(TailFull, match=f"1 new requests, 0 free of {SEQS} tails"):
        store.plan([RequestChunk(RequestId("0"), 5, 9), RequestChunk(RequestId("one more"), 0, 5)], SlotIndex(0))
    assert all(np.array_equal(tail, store.tail(RequestId(str(i)), 4)[1]) for i, tail in enumerate(tails))
    store.plan([RequestChunk(RequestId("0"), 5, 9)], SlotIndex(0))
