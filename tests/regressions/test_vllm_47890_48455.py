# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm#47890, #48455: a group without kept state vetoes every prefix hit, or lets a wrong one pass.

Symptom: one group that never hits makes all prompts start at 0; told to hit always, its request goes on from a state
that nobody kept.
Here: tails are no KV group and veto nothing, and a request that starts behind 0 without a tail of its own is refused by
name, first by the step and then by the store. The gate refuses prefix caching before there is one.
"""

from __future__ import annotations

import pytest

from afd_dsv4.config import Mode, Settings
from afd_dsv4.execution.step import ImpossibleStep, Steps
from afd_dsv4.gate import decide
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SlotIndex, TailStore, UnknownRequest
from afd_dsv4.tail.tables import RequestChunk, RequestId
from tests.unit.test_gate import PLAIN

HIT = 128  # tokens that another request has computed: whole windows of either ratio
SHAPE = TailShape(4, True, 8, layers=1)
NEW = RequestId("new")


def test_a_hit_is_refused_by_name_and_the_same_prompt_from_0_is_not() -> None:
    steps = Steps()
    with pytest.raises(ImpossibleStep, match=f"'new' is new and starts at {HIT}.*prefix cache"):
        steps.chunks(["new"], [HIT], [72], {})
    assert steps.chunks(["new"], [0], [200], {}) == (RequestChunk(NEW, 0, 200),)


def test_a_step_that_lets_it_pass_meets_the_store() -> None:
    """Negative control: the first rows of a hit are read from pages, and there are none to name."""
    store = TailStore({4: SHAPE}, max_num_seqs=1, slots=1)
    assert len(SHAPE.need(HIT)) > 0  # also at the end of a window: C4's overlap
    with pytest.raises((UnknownRequest, ValueError), match="new"):
        store.plan([RequestChunk(NEW, HIT, 200)], SlotIndex(0))


def test_the_gate_says_which_option_it_is() -> None:
    from dataclasses import replace

    decision = decide(Settings(Mode.COLOCATED), replace(PLAIN, prefix_caching=True))
    assert decision.refused
    assert "--no-enable-prefix-caching" in decision.line()
