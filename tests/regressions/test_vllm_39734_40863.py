# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm#39734, #40863: a prompt that start-up let pass is never admitted, and nobody behind it either.

Symptom: usage stays at 0 %, and every later request waits behind one long one, whose admission counts more blocks than
the start-up check did.
Here, in the real scheduler: both counts are the same, natively and with the plugin, so that a pool that start-up lets
pass admits the longest request. Natively the queue still stops at one that does not fit; with the plugin that one fits.
"""

from __future__ import annotations

import pytest

from afd_dsv4.compat.harness import Case, SchedulerProcess
from afd_dsv4.geometry import preset

pytestmark = pytest.mark.vllm_runtime

LONGEST = 131072


def longest(scheduler: SchedulerProcess, free: int, plugin: bool) -> tuple[int, int, int]:
    """Blocks that start-up and admission want for one request of the longest length, and its tokens in step 1."""
    asked = Case(preset("flash"), (LONGEST,), 128, 8192, LONGEST, plugin=plugin, free_blocks=free)
    outcome = scheduler.ask(asked)
    return outcome.startup_blocks, sum(outcome.whole_prompt[0].values()), outcome.scheduled_tokens()


@pytest.mark.parametrize("plugin", [False, True])
def test_what_start_up_lets_pass_is_admitted(scheduler: SchedulerProcess, plugin: bool) -> None:
    at_start, at_admission, _ = longest(scheduler, 50_000, plugin)
    assert at_start == at_admission
    assert longest(scheduler, at_start, plugin)[2] == 8192
    # Negative control: a pool that is one block short leaves the request where the reports found theirs.
    assert longest(scheduler, at_start - 1, plugin)[2] == 0


def test_a_prompt_that_does_not_fit_natively_holds_up_a_short_one_and_with_the_plugin_neither_waits(
    scheduler: SchedulerProcess,
) -> None:
    def steps(prompts: tuple[int, ...], plugin: bool) -> list[tuple[dict[str, int], int, float]]:
        case = Case(preset("flash"), prompts, 128, 32768, LONGEST, plugin=plugin, free_blocks=5011, steps=2)
        found = scheduler.ask(case).steps
        return [(step.scheduled, step.waiting_for_capacity, step.kv_usage) for step in found]

    assert steps((32768, 100), plugin=False) == [({}, 2, 0.0)] * 2
    assert [scheduled for scheduled, *_ in steps((32768, 100), plugin=True)] == [{"r0": 32768}, {"r0": 1, "r1": 100}]
    # It is the long one: without it the short one starts natively.
    assert steps((100,), plugin=False)[0][0] == {"r0": 100}
