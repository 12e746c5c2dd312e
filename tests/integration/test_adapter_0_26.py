# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The adapter of (vllm 0.26.0, vllm-ascend 80d8c194f) in the real engine of that stack, on the software NPU.

That stack needs an environment of its own (docs/compat.md says how to make it): AFD_DSV4_STACK_0_26 names its
interpreter, and without it all of this is skipped. Native and plugin run in fresh processes with the same workloads;
tokens and log probabilities must be the same numbers. Not here: more ranks than one, and `make engine`'s larger loads.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.softnpu import checkpoint, engine

ROOT = Path(__file__).parents[2]
STACK = "vllm-ascend-80d8c194f"
PYTHON = os.environ.get("AFD_DSV4_STACK_0_26", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason=f"no such case: AFD_DSV4_STACK_0_26 names no interpreter with {STACK}"),
]

MODEL = checkpoint.Geometry(mtp=True)
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
MTP = {"method": "mtp", "num_speculative_tokens": 3}
CASES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs and asynchronous scheduling": {
        "async_scheduling": True,
        "enforce_eager": False,
        "compilation_config": GRAPHS,
    },
    "drafts and asynchronous scheduling": {"async_scheduling": True, "speculative_config": MTP},
}


def python(*arguments: str, timeout_s: float = 900) -> str:
    """Run that stack's interpreter at the root of the checkout, off the software NPU; return what it printed."""
    drop = ("LD_LIBRARY_PATH", "PYTHONPATH", "AFD_DSV4_MODE", "AFD_DSV4_CONFIG")
    environment = {name: value for name, value in os.environ.items() if name not in drop}
    environment |= {**engine.QUIET, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "SOFTNPU_WAIVE": ",".join(MODEL.waivers)}
    done = subprocess.run(
        [PYTHON, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-2000:]
    return done.stdout


def workload(seed: int) -> list[dict[str, Any]]:
    """Requests that arrive one by one, with lengths about a window's end or any, some of them aborted."""
    rng = random.Random(seed)
    found = []
    for i in range(6):
        length = rng.choice([rng.randint(1, 300), rng.choice((1, 3, 4, 5, 127, 128, 129, 131, 256, 260))])
        prompt = [rng.randrange(2, MODEL.vocabulary) for _ in range(length)]
        request = {"id": f"r{i}", "prompt": prompt, "max_tokens": rng.randint(1, 12), "arrive": rng.randrange(6)}
        if rng.random() < 0.3:
            request["abort"] = rng.randrange(3, 14)
        found.append(request)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("dsv4"), MODEL)


def test_that_stack_is_the_one_that_was_recorded() -> None:
    answer = json.loads(python("-m", "afd_dsv4", "compat", "check", "--json"))
    assert (answer["stack"], answer["status"], answer["unchecked"]) == (STACK, 0, [])


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_native_ones(case: str, folder: Path, tmp_path: Path) -> None:
    loads = [workload(seed) for seed in (20, 21)]

    def run(plugin: bool) -> dict[str, Any]:
        additional: dict[str, Any] = {"multistream_dsv4_dsa_overlap": False}
        if plugin:
            additional["afd_dsv4"] = {"mode": "colocated"}
        arguments = {"block_size": 32, "max_num_batched_tokens": 64, "additional_config": additional, **CASES[case]}
        spec = tmp_path / f"{plugin}.json"
        spec.write_text(json.dumps({"checkpoint": str(folder), "engine": arguments, "workloads": loads}))
        said = python("-m", "afd_dsv4.softnpu", "--", PYTHON, "-m", "afd_dsv4.softnpu.engine", str(spec))
        result: dict[str, Any] = json.loads(said.splitlines()[-1])
        return result

    with ThreadPoolExecutor(2) as threads:
        native, ours = threads.map(run, (False, True))
    # Two compressors of the C4 layer and one of the C128 layer are gone.
    assert sum(native["groups"]) - sum(ours["groups"]) == 3
    for theirs, mine in zip(native["workloads"], ours["workloads"], strict=True):
        assert (mine["tokens"], mine["logprobs"]) == (theirs["tokens"], theirs["logprobs"])
        assert sum(map(len, mine["tokens"].values())) > 20
    assert native["captured"] == ours["captured"]
    assert (ours["captured"] > 0) == ("graphs" in case)
