# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#9456: with drafts and asynchronous scheduling positions are used before they are right.

Symptom: the host runs ahead of the accepted drafts, and a copy that nobody waits for brings dirty positions.
Here: a chunk starts where the last one ended, less what may have been rejected, or the step is refused; and the gate
refuses drafts with asynchronous scheduling. (Host memory that is rewritten under a copy: tests/unit/test_staging.py,
test_whatever_the_order_of_streams_a_copy_reads_what_was_written_for_it.)
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from afd_dsv4 import gate
from afd_dsv4.config import Mode, Settings
from afd_dsv4.execution.step import ImpossibleStep, Steps
from afd_dsv4.gate import decide
from tests.unit.test_gate import PLAIN

DRAFTS, PROMPT = 2, 10


def after_a_verify() -> Steps:
    """A prompt, then a step of one token and its drafts, of which the device has not said how many it takes."""
    steps = Steps()
    steps.chunks(["r"], [0], [PROMPT], {})
    steps.chunks(["r"], [PROMPT], [1 + DRAFTS], {"r": DRAFTS})
    return steps


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_every_start_that_the_device_can_mean_is_taken(accepted: int) -> None:
    start = PROMPT + 1 + accepted
    assert after_a_verify().chunks(["r"], [start], [1], {})[0].start == start


@pytest.mark.parametrize("start", [PROMPT, PROMPT + 2 + DRAFTS])
def test_a_start_before_or_behind_them_is_refused(start: int) -> None:
    with pytest.raises(ImpossibleStep, match=f"goes on at {start}, and was left between 11 and 13"):
        after_a_verify().chunks(["r"], [start], [1], {})


def test_one_that_nobody_corrected_looks_right_so_the_gate_refuses_what_leads_to_it() -> None:
    """The optimistic start lies among the possible ones: only whoever configures the engine can be told."""
    assert after_a_verify().chunks(["r"], [PROMPT + 1 + DRAFTS], [1], {})
    both = replace(PLAIN, speculative_method="mtp", speculative_tokens=DRAFTS, async_scheduling=True)
    decision = decide(Settings(Mode.COLOCATED), replace(both, covers=frozenset({gate.MTP, gate.ASYNC_SCHEDULING})))
    assert decision.refused
    assert "exact starts" in decision.line()
    one = replace(both, async_scheduling=False, covers=frozenset({gate.MTP}))
    assert decide(Settings(Mode.COLOCATED), one).active
