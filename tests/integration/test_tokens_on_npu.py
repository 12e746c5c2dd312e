# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Token parity with the stock operator and the plugin's tails on the (software) NPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from afd_dsv4.evidence.tokens import CHUNK_SIZES, FP32_WAIVER, run_token_parity, stock_runtime

pytestmark = pytest.mark.npu


def test_the_stock_executor_generates_the_tokens_of_transformers_and_every_fault_is_caught() -> None:
    report = run_token_parity("npu", seed=1, prompt_tokens=(301, 125, 5), generated=16)
    assert report.failures == ()
    assert report.runtime == "StockRuntime"
    assert report.waived_limits == (FP32_WAIVER,)
    assert report.free_running.positions == report.generated_positions == 3 * 16
    assert report.free_running.mismatches == report.teacher_forced.mismatches == report.prompts.mismatches == 0
    assert report.decided_share >= 0.95
    assert 0 < report.teacher_forced.max_difference <= report.tolerance
    assert report.batched_steps > 0
    assert set(CHUNK_SIZES) <= set(report.chunk_sizes)
    assert {control.name: control.caught for control in report.controls} == {
        "compressed rows zeroed": True,
        "C4 left half not carried": True,
        "c4 history dropped": True,
        "c4_indexer history dropped": True,
        "c128 history dropped": True,
    }
    assert any(control.mismatches for control in report.controls)
    assert FP32_WAIVER not in torch.ops.softnpu.waivers()


def test_smaller_pages_give_the_same_tokens() -> None:
    torch.ops.softnpu.waive(FP32_WAIVER, True)
    try:
        report = run_token_parity(
            "npu",
            seed=1,
            make_runtime=lambda geometry: stock_runtime(geometry, "npu", block_size=32),
            prompt_tokens=(301, 125),
            generated=8,
            controls=False,
        )
    finally:
        torch.ops.softnpu.waive(FP32_WAIVER, False)
    assert report.free_running.mismatches == report.teacher_forced.mismatches == report.prompts.mismatches == 0
    assert report.teacher_forced.max_difference <= report.tolerance
    assert report.max_row_difference <= report.tolerance
