# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm#54703: groups with a tiny window dominate what one request is charged with.

Symptom: two batches in flight are charged to the compressors' states, whose blocks hold few rows, although a request
keeps a handful of rows; most of the pool cannot be used.
Here, in the real scheduler: with the plugin no group has such a window. What is left to grow with the batch is the
attention's own window; `afd-dsv4 plan` says so.
"""

from __future__ import annotations

import pytest

from afd_dsv4.compat.harness import Case, SchedulerProcess
from afd_dsv4.geometry import preset

pytestmark = pytest.mark.vllm_runtime

PROMPT, BATCH, BLOCK = 131072, 32768, 128
STATES = ("c4_state", "c128_state")


def charged(scheduler: SchedulerProcess, plugin: bool, in_flight: int) -> dict[str, int]:
    case = Case(
        preset("flash"), (PROMPT,), BLOCK, BATCH, PROMPT, plugin=plugin, free_blocks=50_000,
        async_scheduling=in_flight == 2,
    )  # fmt: skip
    return scheduler.ask(case).whole_prompt[0]


def window(rows: int, block: int, in_flight: int) -> int:
    """Blocks of one group: its window and all rows in flight, and one for a window that straddles."""
    return -(-(rows - 1 + in_flight * BATCH) // block) + 1


@pytest.mark.parametrize("in_flight", [1, 2])
def test_natively_the_states_are_nearly_all_that_a_request_is_charged_with_and_here_none_of_it(
    scheduler: SchedulerProcess, in_flight: int
) -> None:
    native = charged(scheduler, False, in_flight)
    assert native["c4_state"] == window(8, 8, in_flight)
    assert native["c128_state"] == window(128, 32, in_flight)
    assert sum(native[state] for state in STATES) > 0.85 * sum(native.values())
    ours = charged(scheduler, True, in_flight)
    assert not any(ours.get(state) for state in STATES)
    # All else is as it was: what is dropped hides nothing.
    assert ours == {name: blocks for name, blocks in native.items() if name not in STATES}
    assert ours["swa"] == 2 * window(128, BLOCK, in_flight)
