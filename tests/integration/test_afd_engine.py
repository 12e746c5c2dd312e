# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The real engine in afd-plugin's two roles, natively and with the plugin in mode afd, on the software NPU.

What runs of afd-plugin 85e826e is its own: workers, runners, planner, connectors, work-item loop, DBO. Its model for
DeepSeek-V4 is for CUDA only, so the model is a stand-in of ours (`afd_dsv4/softnpu/afd_model.py`), in both runs the
same. Needs that commit (AFD_PLUGIN_PATH) and its stack (AFD_DSV4_STACK_0_26); without them all of this is skipped.
Against the engine in one role: CAMP2P carries the rows and nothing else changes, so tokens are the same numbers. CAM
weights and adds up the experts' rows in float32 and rounds once, where one role rounds the shared expert's sum again:
log probabilities differ in the second digit behind the point, and a token may.
Not here: DBO, which that commit cannot run with DeepSeek-V4. `_build_attention_metadata_with_ubatches` gives both
uBatches one set of vllm-ascend's caches of sparse attention metadata, so the second runs with the first one's; where
their numbers of requests differ, attention refuses the block tables. Nor more ranks than one of each role, sequence
parallelism, graphs.
"""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.geometry import ModelGeometry, page_layout
from afd_dsv4.softnpu import afd, checkpoint, engine
from afd_dsv4.workspace.sizing import size_workspace

PYTHON, COMMIT = os.environ.get("AFD_DSV4_STACK_0_26", ""), os.environ.get(afd.CHECKOUT, "")
pytestmark = [
    pytest.mark.npu,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not COMMIT, reason="no such case: AFD_PLUGIN_PATH names no checkout"),
    pytest.mark.skipif(not PYTHON, reason="no such case: AFD_DSV4_STACK_0_26 names no interpreter of that stack"),
]

RANKS = {"num_attention_ranks": 1, "num_ffn_ranks": 1}
CAM = {"connector": "CAMAsyncAFDConnector", "async": True, "compute_gate_on_attention": True, **RANKS}
P2P = {"connector": "CAMP2pAFDConnector", **RANKS}
#: By name: the model's hashed layers (no ids cross with CAMP2P), and afd-plugin's mapping.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "CAM": (1, CAM),
    "CAM in two stages": (1, {**CAM, "connector_extra_config": {"async_moe_ubatching": True}}),
    "CAMP2P": (0, P2P),
}
BLOCK_SIZE = 32
BLOCK_BYTES = 4160 + 32768  # one layer of each ratio: one indexer page and one other


def load(*lengths: int, tokens: int = 6, steps: int = 0) -> list[dict[str, Any]]:
    """Requests of these lengths, `steps` apart."""
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 128) for _ in range(length)] for length in lengths]
    return [{"id": f"r{i}", "prompt": p, "max_tokens": tokens, "arrive": i * steps} for i, p in enumerate(prompts)]


def crowd(plugin: bool) -> dict[str, Any]:
    """Memory that holds all of three prompts at once only where their compressors' states are not in it."""
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 1024}
    small = checkpoint.Geometry()
    geometry = ModelGeometry("small", small.hidden, len(small.ratios), small.ratios)
    taken = size_workspace(geometry, page_layout("vllm-ascend-80d8c194f", BLOCK_SIZE), **limits).device_bytes
    return {**limits, "max_model_len": 400, "num_gpu_blocks_override": 450 - plugin * -(-taken // BLOCK_BYTES)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a case once, in one role, or in two natively or with the plugin."""

    @functools.cache
    def folder(hashed: int) -> Path:
        written = checkpoint.write(tmp_path_factory.mktemp(f"dsv4_{hashed}"), checkpoint.Geometry(hash_layers=hashed))
        afd.prepare(written)
        return written

    @functools.cache
    def run(case: str, plugin: bool, crowded: bool = False) -> dict[str, Any]:
        hashed, mapping = CASES.get(case, (int(case == "one role, hashed"), {}))
        additional: dict[str, Any] = {"multistream_dsv4_dsa_overlap": False}
        if plugin:
            additional["afd_dsv4"] = {"mode": "afd"}
        arguments = crowd(plugin) if crowded else {"max_num_batched_tokens": 64}
        spec = {
            "checkpoint": str(folder(hashed)),
            "engine": {"block_size": BLOCK_SIZE, "additional_config": additional, **arguments},
            "workloads": [load(300, 300, 300, tokens=2) if crowded else load(150, 5, 131, 60, steps=1)],
        }
        waived = ",".join(checkpoint.Geometry().waivers)
        environment = {"AFD_DSV4_SOFTNPU_BATCH_INVARIANT": "1", "SOFTNPU_WAIVE": waived}
        if not mapping:
            return engine.run(spec, environment, 1500, PYTHON)
        return afd.run(spec, mapping, environment, 1500, PYTHON)

    return run


def answers(result: Any) -> Any:
    done = result["workloads"][0]
    return done["steps"], done["tokens"], done["logprobs"]


@pytest.mark.parametrize("case", CASES)
def test_the_plugin_gives_the_tokens_of_the_native_roles(ran: Any, case: str) -> None:
    native, ours = ran(case, False), ran(case, True)
    assert sum(native["groups"]) - sum(ours["groups"]) == 3  # both compressors of C4, that of C128
    assert answers(ours) == answers(native)
    assert {len(row) for row in answers(ours)[1].values()} == {6}


@pytest.mark.parametrize("case", CASES)
def test_the_other_role_computes_every_layer_and_owns_no_compressor(ran: Any, case: str) -> None:
    for plugin in (False, True):
        (ffn,) = ran(case, plugin)["ffn"]
        assert ffn["compressors"] == 0
        assert set(ffn["served"]) == {"0", "1", "2"}
        assert len(set(ffn["served"].values())) == 1


def test_two_stages_give_the_tokens_of_one(ran: Any) -> None:
    split, whole = ran("CAM in two stages", False), ran("CAM", False)
    assert answers(split) == answers(whole)
    assert split["ffn"][0]["served"]["0"] > whole["ffn"][0]["served"]["0"]


def test_two_roles_of_camp2p_give_the_tokens_of_one(ran: Any) -> None:
    assert answers(ran("CAMP2P", False)) == answers(ran("one role", False))


def test_prompts_that_wait_natively_run_together_in_the_same_memory(ran: Any) -> None:
    waits = []
    for plugin in (False, True):
        done = ran("CAM", plugin, True)["workloads"][0]
        waits.append(max(step["capacity"] for step in done["waiting"]))
        assert done["tokens"].keys() == {"r0", "r1", "r2"}
    assert waits[0] > 0
    assert waits[1] == 0


def test_two_roles_of_cam_differ_from_one_by_a_rounding(ran: Any) -> None:
    """As long as the tokens before are the same ones."""
    _, tokens, logprobs = answers(ran("CAM", False))
    _, expected, expected_logprobs = answers(ran("one role, hashed", False))
    assert tokens["r1"] == expected["r1"]
    for name, row in expected.items():
        for i, token in enumerate(row):
            if tokens[name][i] != token:
                break
            assert abs(logprobs[name][i] - expected_logprobs[name][i]) < 0.05
