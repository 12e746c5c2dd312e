# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#15920: the memory is planned from what a profile run happened to need.

Symptom: the profile run had 2,048 tokens; a real prefill takes 18 GiB more, and the server dies.
Here: nothing is measured. The plan is a function of the configured limits, and the runtime refuses to start if it has
taken anything else (tests/integration/test_stock_runtime.py, test_allocated_bytes_are_the_sized_bytes).
"""

from __future__ import annotations

from dataclasses import replace

from afd_dsv4.geometry import page_layout, preset
from afd_dsv4.workspace.sizing import size_workspace, tail_shapes

LAYOUT = page_layout("vllm-ascend-0.23.0", 128)


def test_the_plan_covers_the_largest_batch_that_is_configured_not_the_profiled_one() -> None:
    limits = {"max_num_seqs": 16, "slots": 2}
    profiled = size_workspace(preset("flash"), LAYOUT, max_num_batched_tokens=2048, **limits)
    configured = size_workspace(preset("flash"), LAYOUT, max_num_batched_tokens=65536, **limits)
    assert replace(configured, table_bytes=0) == replace(profiled, table_bytes=0)  # the rest knows no batch
    for ratio, shape in tail_shapes(preset("flash"), LAYOUT).items():
        last_row = shape.period - 1 + shape.reach + 65536 - 1  # of the longest chunk with the latest re-based start
        assert last_row // shape.page_rows == shape.columns(65536) - 1
        # Negative control: the profiled plan would not have held it.
        assert last_row // shape.page_rows >= shape.columns(2048), ratio
