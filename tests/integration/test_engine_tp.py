# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Tensor parallelism in the real engine: two workers of vLLM's own executor, with collectives over the software HCCL.

Compressors are not sharded: each rank keeps the tails of every request, and the attention heads behind them are split.
An engine is a process of its own (`forked_engines`) with two more, natively and with the plugin; the second stream is
off and rows do not depend on their batch, as everywhere where tokens are compared. Not shown: more ranks, data and
expert parallelism.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from afd_dsv4.softnpu import checkpoint
from tests.forked_engines import nursery

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = checkpoint.Geometry()
ENVIRONMENT = {
    "SOFTNPU_DEVICES": "2",
    "AFD_DSV4_SOFTNPU_BATCH_INVARIANT": "1",
    "SOFTNPU_WAIVE": ",".join(MODEL.waivers),
}
CHUNK = 64
LENGTHS = (150, 5, 131, 260)


def load() -> list[dict[str, Any]]:
    rng = random.Random(3)
    prompts = [[rng.randrange(2, MODEL.vocabulary) for _ in range(length)] for length in LENGTHS]
    return [{"id": f"r{i}", "prompt": prompt, "max_tokens": 10, "arrive": i} for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The load twice on two ranks: natively, and with the plugin, where the second time all tails are lost."""
    folder = checkpoint.write(tmp_path_factory.mktemp("dsv4"), MODEL)

    def run(plugin: bool, **more: Any) -> dict[str, Any]:
        additional: dict[str, Any] = {"multistream_dsv4_dsa_overlap": False}
        if plugin:
            additional["afd_dsv4"] = {"mode": "colocated"}
        arguments = {
            "tensor_parallel_size": 2,
            "block_size": 32,
            "max_num_batched_tokens": CHUNK,
            "additional_config": additional,
        }
        spec = {"checkpoint": str(folder), "engine": arguments, "workloads": [load(), load()], **more}
        return nursery(ENVIRONMENT).run(spec)

    with ThreadPoolExecutor(2) as threads:
        native = threads.submit(run, False)
        plugin = threads.submit(run, True, zero_state=[1])
        return native.result(), plugin.result()


def answers(runs: Any, which: int, workload: int) -> Any:
    ran = runs[which]["workloads"][workload]
    return ran["steps"], ran["tokens"], ran["logprobs"]


def test_two_ranks_repeat_themselves_bit_for_bit_natively(runs: Any) -> None:
    assert len(runs[0]["peak_device_bytes"]) == 2
    assert {len(row) for row in runs[0]["workloads"][0]["tokens"].values()} == {10}
    assert answers(runs, 0, 0) == answers(runs, 0, 1)


def test_two_ranks_with_the_plugin_give_the_native_tokens_and_logprobs(runs: Any) -> None:
    assert sum(runs[0]["groups"]) - sum(runs[1]["groups"]) == 3  # both compressors of C4, that of C128
    assert answers(runs, 1, 0) == answers(runs, 0, 0)


def test_tails_that_are_lost_on_the_ranks_change_tokens(runs: Any) -> None:
    """Negative control: the same comparison, where the tails are zeroed before every step."""
    assert runs[1]["workloads"][1]["zeroed"] > 0
    assert runs[1]["workloads"][1]["steps"] == runs[1]["workloads"][0]["steps"]
    assert runs[1]["workloads"][1]["tokens"] != runs[1]["workloads"][0]["tokens"]
