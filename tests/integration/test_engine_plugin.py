# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The plugin in the real engine: vLLM 0.23.0 with vllm-ascend 0.23.0 serves the same tokens with tails as without.

Native and plugin run in processes of their own (`forked_engines`), with the same workloads and, where memory is no
limit, the same schedule; then tokens and logprobs must be the same numbers. vllm-ascend's second stream is off here:
with it (its default) native runs differ among themselves, because `AscendDSAImpl.cv_indexer_select_qli` frees a tensor
that its second stream still reads; the race detector names the two operators. Preemption is part of `make engine`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from afd_dsv4.geometry import ModelGeometry, page_layout
from afd_dsv4.softnpu import checkpoint
from afd_dsv4.workspace.sizing import size_workspace
from tests.forked_engines import nursery

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = checkpoint.Geometry(mtp=True)
BLOCK_SIZE = 32
BLOCK_BYTES = 4160 + 32768  # one layer of each ratio: one indexer page and one other
LENGTHS = (1, 3, 4, 5, 127, 128, 129, 131, 256, 260)  # about the windows' ends
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run workloads in an engine of their own, with the plugin or without."""
    folder = checkpoint.write(tmp_path_factory.mktemp("dsv4"), MODEL)

    def run(
        workloads: Any,
        *,
        plugin: bool,
        settings: Any = None,
        spec: Any = None,
        prelude: str = "",
        **arguments: Any,
    ) -> dict[str, Any]:
        additional = {"multistream_dsv4_dsa_overlap": False}
        if plugin:
            additional["afd_dsv4"] = {"mode": "colocated", **(settings or {})}  # type: ignore[assignment]
        described = {
            "checkpoint": str(folder),
            "engine": {"block_size": BLOCK_SIZE, "additional_config": additional, **arguments},
            "workloads": workloads,
            **(spec or {}),
        }
        return nursery({"SOFTNPU_WAIVE": ",".join(MODEL.waivers)}).run(described, prelude=prelude)

    return run


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, MODEL.vocabulary) for _ in range(length)]


def workload(seed: int, requests: int = 6, *, longest: int = 300, answer: int = 12, aborts: bool = False) -> list[Any]:
    """Requests that arrive one by one; half of them with a length about a window's end."""
    rng = random.Random(seed)
    found = []
    for i in range(requests):
        length = rng.choice([rng.randint(1, longest), rng.choice(LENGTHS)])
        request = {"id": f"r{i}", "prompt": prompt(rng, length), "max_tokens": rng.randint(1, answer)}
        request["arrive"] = rng.randrange(6)
        if aborts and rng.random() < 0.4:
            request["abort"] = rng.randrange(3, 14)
        found.append(request)
    return found


def answers(result: dict[str, Any]) -> list[Any]:
    return [(load["steps"], load["tokens"], load["logprobs"]) for load in result["workloads"]]


def pair(run: Run, workloads: Any, **how: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same natively and with the plugin, at once."""
    with ThreadPoolExecutor(2) as threads:
        native, ours = (threads.submit(run, workloads, plugin=plugin, **how) for plugin in (False, True))
        return native.result(), ours.result()


CHUNKS = {"max_num_batched_tokens": 64}
LOADS = [workload(seed) for seed in (0, 1)]
ABORTED = [workload(seed, answer=20, aborts=True) for seed in (10, 11)]
REPLAYED = {"async_scheduling": True, "enforce_eager": False, "compilation_config": GRAPHS, **CHUNKS}


@pytest.fixture(scope="module")
def eager(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """`LOADS` in eager mode, natively and with the plugin."""
    return pair(run, LOADS, **CHUNKS)


def test_tokens_are_native_ones_in_eager_mode_and_fewer_groups_are_left(eager: Any) -> None:
    native, ours = eager
    assert answers(ours) == answers(native)
    assert [len(load["tokens"]) for load in ours["workloads"]] == [6, 6]
    # Two compressors of the C4 layer and one of the C128 layer are gone, and the groups that they had.
    assert sum(native["groups"]) - sum(ours["groups"]) == 3
    assert len(native["groups"]) - len(ours["groups"]) == 2


@pytest.fixture(scope="module")
def graphs(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """`ABORTED` with graphs, natively and with the plugin."""
    return pair(run, ABORTED, **REPLAYED)


def test_tokens_are_native_ones_with_graphs_aborts_and_asynchronous_scheduling(graphs: Any) -> None:
    native, ours = graphs
    assert answers(ours) == answers(native)


OURS = {"executor": "afd", "tile_tokens": 128}
#: No launch of the stock operator by the plugin goes unseen.
WITHOUT_STOCK = """
from afd_dsv4.compressor import stock
def refuse(*args, **named):
    raise AssertionError("the stock executor launched")
stock.call_operator = refuse
"""


def test_tokens_are_native_ones_with_our_own_kernels_in_graphs_and_beside_them(run: Run, graphs: Any) -> None:
    ours = run(ABORTED, plugin=True, settings=OURS, prelude=WITHOUT_STOCK, **REPLAYED)
    assert [answers(other) == answers(ours) for other in graphs] == [True, True]


def test_batches_that_are_cut_into_tiles_give_the_tokens_of_the_stock_executor(run: Run) -> None:
    rng = random.Random(12)
    load = [{"id": f"r{i}", "prompt": prompt(rng, 299 - i), "max_tokens": 3} for i in range(2)]
    spec = {"drafts": {}, "pattern": "ar"}
    how = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "spec": spec}
    with ThreadPoolExecutor(2) as threads:
        each = [
            threads.submit(run, [load], plugin=True, settings=given, prelude=prelude, max_num_batched_tokens=512, **how)
            for given, prelude in (({"executor": "stock"}, ""), (OURS, WITHOUT_STOCK))
        ]
        stock, ours = (thread.result() for thread in each)
    assert answers(ours) == answers(stock)
    assert max(ours["workloads"][0]["scheduled"]) == 512


def test_tokens_are_native_ones_with_drafts_of_every_accept_length(run: Run, eager: Any) -> None:
    expected = eager[0]["workloads"][0]["tokens"]
    spec = {"drafts": expected, "pattern": "aaraaarrar"}
    how = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}, "spec": spec, **CHUNKS}
    native, ours = pair(run, LOADS[:1], **how)
    assert answers(ours) == answers(native)
    assert ours["workloads"][0]["steps"] < eager[0]["workloads"][0]["steps"]  # some were accepted


def test_prompts_that_wait_natively_run_together_in_the_same_memory(run: Run) -> None:
    rng = random.Random(9)
    load = [{"id": f"r{i}", "prompt": prompt(rng, 300), "max_tokens": 2} for i in range(3)]
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 1024}
    geometry = ModelGeometry("small", MODEL.hidden, len(MODEL.ratios), MODEL.ratios)
    taken = size_workspace(geometry, page_layout("vllm-ascend-0.23.0", BLOCK_SIZE), **limits).device_bytes
    limits["max_model_len"] = 400
    blocks = 450
    native = run([load], plugin=False, num_gpu_blocks_override=blocks, **limits)
    ours = run([load], plugin=True, num_gpu_blocks_override=blocks - -(-taken // BLOCK_BYTES), **limits)
    waits = [max(step["capacity"] for step in result["workloads"][0]["waiting"]) for result in (native, ours)]
    assert waits[0] > 0
    assert waits[1] == 0
    assert ours["workloads"][0]["tokens"].keys() == {"r0", "r1", "r2"}


LOSSY = """
import torch
from afd_dsv4.compressor import stock
true = stock.call_operator
def lossy(x, weights, kind, state, table, *rest, **named):
    return true(x, weights, kind, state, torch.zeros_like(table), *rest, **named)
stock.call_operator = lossy
"""


def test_tails_that_are_never_written_change_tokens(run: Run, eager: Any) -> None:
    """Negative control: the comparison sees a plugin that loses rows."""
    wrong = run(LOADS, plugin=True, prelude=LOSSY, **CHUNKS)["workloads"]
    right = eager[1]["workloads"]
    assert [load["steps"] for load in wrong] == [load["steps"] for load in right]
    assert [load["tokens"] for load in wrong] != [load["tokens"] for load in right]
