# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#9975: a million tokens need about 300 GB, because every token's states are kept.

Symptom: the state of every ratio is allocated for the whole sequence.
Here: what a request takes for its compressors is a function of ratio and layers. Neither the length of its sequence nor
the batch is in it; natively (0.23.0) the length is not either, but the batch is.
"""

from __future__ import annotations

from afd_dsv4.admission import SchedulerLimits, kv_plan
from afd_dsv4.geometry import CompressorKind, page_layout, preset
from afd_dsv4.workspace.sizing import size_workspace

PRO = preset("pro")
LAYOUT = page_layout("vllm-ascend-0.23.0", 128)
MILLION = 1 << 20


def tails(batch: int, requests: int) -> int:
    sizes = size_workspace(PRO, LAYOUT, max_num_seqs=requests, max_num_batched_tokens=batch)
    return sizes.tail_bytes


def native_states(batch: int, length: int) -> int:
    """Bytes of the blocks that admission counts for the states; one block costs all layers of the model."""
    plan = kv_plan(PRO, LAYOUT, plugin=False)
    need = plan.whole_prompt(length, SchedulerLimits(batch, length, 1))
    return (need["c4_state"] + need["c128_state"]) * plan.block_bytes


def test_a_requests_tails_are_a_few_megabytes_whatever_its_length_and_the_batch() -> None:
    one = tails(8192, 2) - tails(8192, 1)
    assert one == tails(32768, 9) - tails(32768, 8)
    # Between the rows that a later forward may read, and those with a page more on either side, the long way.
    rows = {kind: 7 if kind.ratio == 4 else 127 for kind in CompressorKind}
    bytes_of = {kind: len(PRO.layers_of(kind)) * PRO.row_bytes(kind) for kind in CompressorKind}
    assert sum(rows[kind] * bytes_of[kind] for kind in CompressorKind) < one
    assert one < sum((rows[kind] + 2 * LAYOUT.page_rows(kind)) * bytes_of[kind] for kind in CompressorKind)
    assert one < 64 * 2**20


def test_every_tokens_states_would_be_the_reported_size() -> None:
    """The symptom: all rows of a million tokens, one a token and compressor; and what a batch costs natively."""
    every_row = MILLION * sum(len(PRO.layers_of(kind)) * PRO.row_bytes(kind) for kind in CompressorKind)
    assert every_row > 300e9
    assert native_states(8192, MILLION) == native_states(8192, 1 << 17)
    assert native_states(32768, MILLION) > 3 * native_states(8192, MILLION) > 100 * (tails(8192, 2) - tails(8192, 1))
