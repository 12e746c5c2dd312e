# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#14479, #16270: the small blocks of the compressors' states decide the block size of all.

Symptom: vLLM's engine core takes the smallest block of all KV groups for `cache_config.block_size`, so that a server
that was given 32 runs with 2; and prefix hits come in multiples of the least common multiple of all groups, 4,096.
Here, in the real scheduler: with the plugin the smallest group has the block size that was asked for. The multiple
stays what it is, because C128's own blocks make it. And the overwritten value is never taken for the asked one.
"""

from __future__ import annotations

import math

import pytest

from afd_dsv4.compat.harness import Case, SchedulerProcess
from afd_dsv4.geometry import InputError, page_layout, preset

pytestmark = pytest.mark.vllm_runtime


def blocks(scheduler: SchedulerProcess, size: int, plugin: bool) -> dict[str, int]:
    """Rows of a block by kind of group."""
    case = Case(preset("flash"), (100,), size, 4096, 8192, plugin=plugin, free_blocks=5000)
    return {group.name: group.block_rows for group in scheduler.ask(case).groups}


@pytest.mark.parametrize(("size", "smallest"), [(32, 2), (64, 4), (128, 8)])
def test_the_smallest_block_is_the_one_that_was_asked_for(
    scheduler: SchedulerProcess, size: int, smallest: int
) -> None:
    assert min(blocks(scheduler, size, plugin=False).values()) == smallest  # the fault, natively
    assert min(blocks(scheduler, size, plugin=True).values()) == size


def test_hits_come_in_the_same_multiples_as_natively(scheduler: SchedulerProcess) -> None:
    def multiple(plugin: bool) -> int:
        rows = blocks(scheduler, 32, plugin)
        tokens = {"c4_mla": 4, "c128_mla": 128}  # of a compressed row
        return math.lcm(*(count * tokens.get(name, 1) for name, count in rows.items()))

    assert multiple(plugin=False) == multiple(plugin=True) == 4096


@pytest.mark.parametrize("overwritten", [2, 4, 8])
def test_an_overwritten_block_size_is_refused_and_not_taken_for_the_asked_one(overwritten: int) -> None:
    with pytest.raises(InputError, match=f"{overwritten}.*32, 64, 128"):
        page_layout("vllm-ascend-0.23.0", overwritten)
