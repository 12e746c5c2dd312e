# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Decode graphs in the real engine with the plugin: the tokens of eager steps, from memory that never moves.

Two engines, each in a process of its own (`forked_engines`): one runs every step eagerly, the other replays a graph for
every decode step (FULL_DECODE_ONLY). Replays are counted by the software NPU, and the bytes that a graph touches come
from the accesses recorded at its capture. Both run in batch-invariant mode: a graph may have more rows than the step
has requests.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from afd_dsv4.softnpu import checkpoint, runtime
from tests.forked_engines import nursery

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = checkpoint.Geometry()
INVARIANT = {"AFD_DSV4_SOFTNPU_BATCH_INVARIANT": "1", "SOFTNPU_WAIVE": ",".join(MODEL.waivers)}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
}
LONGEST = 115


def load() -> list[dict[str, Any]]:
    """One request with LONGEST decodes, across windows of either ratio, and others that come and go beside it."""
    rng = random.Random(5)
    shapes = ((100, LONGEST, 0), (3, 30, 0), (131, 20, 8), (17, 40, 20))
    return [
        {
            "id": f"r{i}",
            "prompt": [rng.randrange(2, MODEL.vocabulary) for _ in range(length)],
            "max_tokens": answer,
            "arrive": arrive,
        }
        for i, (length, answer, arrive) in enumerate(shapes)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The load eagerly; and with graphs, with another one after the state tables were moved."""
    folder = checkpoint.write(tmp_path_factory.mktemp("dsv4"), MODEL)

    def run(loads: list[Any], arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
        additional = {"multistream_dsv4_dsa_overlap": False, "afd_dsv4": {"mode": "colocated"}}
        arguments = {"block_size": 32, "max_num_batched_tokens": 64, "additional_config": additional, **arguments}
        spec = {"checkpoint": str(folder), "engine": arguments, "workloads": loads, **more}
        return nursery(INVARIANT).run(spec)

    with ThreadPoolExecutor(2) as threads:
        eager = threads.submit(run, [load()], {})
        graphs = threads.submit(run, [load(), load()[1:2]], GRAPHS, replays=True, move_tables=1)
        return eager.result(), graphs.result()


def replays(runs: Any, workload: int) -> Any:
    (noted,) = runs[1]["workloads"][workload]["replays"]  # of the only worker
    return noted


def moved(notes: list[Any]) -> set[str]:
    """What of the plugin's memory was not in one place for all replays; all graphs share a slot."""
    return {name for name in notes[0]["memory"] if len({tuple(note["memory"][name][:2]) for note in notes}) > 1}


def test_a_replay_is_counted_and_what_a_graph_touches_is_told() -> None:
    """What the tests below believe, on a graph of one addition."""
    read, written, other = (torch.zeros(8, device="npu") for _ in range(3))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.add(read, 1, out=written)
    before = runtime.replays()
    graph.replay()
    graph.replay()
    assert runtime.replays() - before == 2
    touched = runtime.replayed_bytes()
    assert {(tensor.data_ptr(), tensor.nbytes) for tensor in (read, written)} <= set(touched)
    assert not any(at <= other.data_ptr() < at + size for at, size in touched)
    torch.npu.synchronize()
    del graph
    assert runtime.replayed_bytes() == ()


def test_a_hundred_replayed_steps_give_the_tokens_and_logprobs_of_eager_ones(runs: Any) -> None:
    eager, graphs = (run["workloads"][0] for run in runs)
    assert [runs[0]["captured"], runs[1]["captured"]] == [0, 3]
    assert len(eager["tokens"]["r0"]) == LONGEST
    assert (graphs["steps"], graphs["tokens"], graphs["logprobs"]) == (
        eager["steps"],
        eager["tokens"],
        eager["logprobs"],
    )


def test_the_decode_steps_are_really_replays_of_every_captured_size(runs: Any) -> None:
    noted = replays(runs, 0)
    assert noted["count"] == len(noted["notes"]) >= 100
    assert {note["graph"] for note in noted["notes"]} == {0, 1, 2}


def test_what_a_graph_reads_of_the_plugin_is_in_one_place_in_every_step(runs: Any) -> None:
    notes = replays(runs, 0)["notes"]
    assert moved(notes) == set()
    pages = {f"pages of {kind}" for kind in ("c4", "c4_indexer", "c128")}
    lists = {f"{what} of ratio {ratio}" for what in ("table", "cells", "starts", "ids") for ratio in (4, 128)}
    for note in notes:
        assert set(note["memory"]) == pages | lists
        # Not only what the host writes: the graph touches it. Which pages it touches, only a replay's table tells.
        assert {name for name, (_, _, touched) in note["memory"].items() if touched} == lists


def test_a_table_that_moves_is_seen(runs: Any) -> None:
    """Negative control: between two loads the tables got other memory."""
    before, after = replays(runs, 0)["notes"], replays(runs, 1)["notes"]
    tables = {"table of ratio 4", "table of ratio 128"}
    assert moved(before[-1:] + after) == tables
    assert not any(after[0]["memory"][name][2] for name in tables)


def test_torchs_ahead_of_time_compilation_refuses_what_vllm_ascends_compilers_return() -> None:
    """Why graphs in vLLM's own compile mode need VLLM_USE_AOT_COMPILE=0 on this stack, see docs/graphs.md.

    Seen with torch 2.13.0, vLLM 0.23.0 and vllm-ascend 0.23.0, whose authors ask for torch 2.10.0. It fails once the
    remedy is not needed any more.
    """
    from torch._dynamo.backends.common import aot_autograd

    def backend(graph: Any, inputs: Any) -> Any:  # vllm_ascend/compilation/compiler_interface.py:fusion_pass_compile
        return aot_autograd(fw_compiler=lambda graph, _: graph)(graph, inputs)

    x = torch.zeros(3)
    compiled = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
    assert compiled(x).tolist() == [1, 1, 1]
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(enable_aot_compile=True),
        pytest.raises(AssertionError, match=r"expected OutputCode, got .*GraphModule"),
    ):
        compiled.aot_compile(((x,), {}))


def test_a_norm_leaves_the_number_of_tokens_open() -> None:
    """vLLM compiles one graph for every number of tokens; a meta kernel that asks for a number fixes it."""
    import torch_npu
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    open_rows = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x, gamma = torch.zeros(5, 8, device="npu"), torch.ones(8, device="npu")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        rows = mode.from_tensor(x, symbolic_context=open_rows)
        y, rstd = torch_npu.npu_rms_norm(rows, mode.from_tensor(gamma), 1e-6)
        assert isinstance(y.shape[0], torch.SymInt)
        assert str(y.shape[0]) == str(rstd.shape[0]) == str(rows.shape[0]) != "5"
        # The control: a kernel that asks for the number.
        assert not isinstance(torch.empty(int(rows.shape[0])).shape[0], torch.SymInt)
        assert str(rows.shape[0]) == "5"
