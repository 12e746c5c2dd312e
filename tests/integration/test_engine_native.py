# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The real engine on the software NPU, without the plugin: vllm.LLM over vllm-ascend over torch_npu.

Each engine is a process of its own (`forked_engines`) and runs several workloads; two run at a time. Tokens are those
of a model with random weights: what is compared is the engine with itself. Not shown: tokens of another stack, and
more than one rank.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.softnpu.checkpoint import Geometry, write
from afd_dsv4.softnpu.engine import CHECKOUT, EngineError
from tests import forked_engines
from tests.forked_engines import nursery

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime, pytest.mark.slow, pytest.mark.timeout(900)]

Engine = dict[str, Any]
MTP = Geometry(mtp=True)
PROMPT = [(7 * i) % 120 + 2 for i in range(300)]
LONG = [{"id": "long", "prompt": PROMPT, "max_tokens": 24}]
#: One request alone, then three that share the steps; the short one ends while the others go on.
MIXED = [
    {"id": "long", "prompt": PROMPT, "max_tokens": 12},
    {"id": "short", "prompt": [5, 6, 7], "max_tokens": 6},
    {"id": "late", "prompt": [(11 * i) % 120 + 2 for i in range(130)], "max_tokens": 8, "arrive": 2},
]
#: Admitted with little, then growing past the pool of CHUNKED.
CROWD = [{"id": str(k), "prompt": [(k * i) % 120 + 2 for i in range(10)], "max_tokens": 30} for k in range(3, 11)]
ABORTED = [
    {"id": "kept", "prompt": PROMPT[:40], "max_tokens": 6},
    {"id": "gone", "prompt": PROMPT[:90], "max_tokens": 30, "abort": 4},
]
SPECULATIVE = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
}
CHUNKED = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 400, "num_gpu_blocks_override": 96}


def tokens(run: Engine, workload: int) -> Any:
    return run["workloads"][workload]["tokens"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("dsv4"), MTP)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Engine:
    return start(checkpoint, {}, [LONG, LONG, MIXED, ABORTED])


def start(checkpoint: Path, arguments: dict[str, Any], workloads: list[Any], **more: Any) -> Engine:
    # With the second stream, its default, vllm-ascend 0.23.0 frees a tensor that is still read, and runs differ.
    one_stream = {"additional_config": {"multistream_dsv4_dsa_overlap": False}}
    spec = {"checkpoint": str(checkpoint), "engine": {**one_stream, **arguments}, "workloads": workloads, **more}
    return nursery({"SOFTNPU_WAIVE": ",".join(MTP.waivers)}).run(spec)


@pytest.fixture(scope="module")
def others(checkpoint: Path, plain: Engine) -> dict[str, Engine]:
    expected = {"long": tokens(plain, 0)["long"]}
    calls: dict[str, tuple[dict[str, Any], list[Any], dict[str, Any]]] = {
        "chunked": (CHUNKED, [LONG, LONG, CROWD], {"zero_state": [1]}),
        "async": ({"async_scheduling": True}, [LONG, MIXED, ABORTED], {}),
        "mtp": (SPECULATIVE, [LONG], {"drafts": expected, "pattern": "aar"}),
        "graphs": (GRAPHS, [LONG, MIXED], {}),
    }
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(start, checkpoint, a, w, **more) for name, (a, w, more) in calls.items()}
        return {name: future.result() for name, future in runs.items()}


def test_every_request_gets_its_tokens_and_the_pool_is_empty_after_it(plain: Engine) -> None:
    wanted = {"long": 12, "short": 6, "late": 8}
    assert {name: len(row) for name, row in tokens(plain, 2).items()} == wanted
    for workload in plain["workloads"]:
        assert not workload["stuck"]
        assert workload["usage"][-1] == 0 < max(workload["usage"])
        assert workload["tokens"].keys() == workload["logprobs"].keys()
    assert plain["peak_device_bytes"][0] > plain["kv_bytes"] > 0


def test_two_runs_give_the_same_tokens_and_logprobs(plain: Engine) -> None:
    first, second = plain["workloads"][:2]
    assert (first["tokens"], first["logprobs"]) == (second["tokens"], second["logprobs"])
    assert len(set(first["tokens"]["long"])) > 5, "a model that always says the same would show nothing"


def test_an_aborted_request_ends_and_leaves_its_neighbour_alone(plain: Engine) -> None:
    aborted = plain["workloads"][3]
    assert len(aborted["tokens"]["kept"]) == 6
    assert len(aborted["tokens"].get("gone", [])) < 30
    assert aborted["usage"][-1] == 0


def test_small_chunks_give_the_same_tokens(plain: Engine, others: dict[str, Engine]) -> None:
    chunked = others["chunked"]["workloads"][0]
    assert max(chunked["scheduled"]) == 64 < max(plain["workloads"][0]["scheduled"])
    assert chunked["tokens"] == tokens(plain, 0)


def test_the_loss_of_the_compressors_state_between_chunks_is_seen(others: dict[str, Engine]) -> None:
    kept, lost, _ = others["chunked"]["workloads"]
    assert lost["zeroed"] > 0 == kept["zeroed"]
    assert lost["tokens"] != kept["tokens"]


def test_a_small_pool_preempts_and_every_request_still_ends(others: dict[str, Engine]) -> None:
    crowd = others["chunked"]["workloads"][2]
    assert crowd["preemptions"] > 0
    assert max(reasons["capacity"] for reasons in crowd["waiting"]) > 0
    assert {len(row) for row in crowd["tokens"].values()} == {30}
    assert not crowd["stuck"]


def test_asynchronous_scheduling_gives_the_same_tokens(plain: Engine, others: dict[str, Engine]) -> None:
    assert tokens(others["async"], 0) == tokens(plain, 0)
    assert tokens(others["async"], 1)["short"] == tokens(plain, 2)["short"]
    assert tokens(others["async"], 2)["kept"] == tokens(plain, 3)["kept"]


def test_drafts_accepted_and_rejected_give_the_same_tokens_in_fewer_steps(
    plain: Engine, others: dict[str, Engine]
) -> None:
    assert tokens(others["mtp"], 0) == tokens(plain, 0)
    assert others["mtp"]["workloads"][0]["steps"] < plain["workloads"][0]["steps"]
    assert 2 in others["mtp"]["workloads"][0]["scheduled"]


def test_graphs_give_the_tokens_of_eager_steps(plain: Engine, others: dict[str, Engine]) -> None:
    assert others["graphs"]["captured"] > 0 == plain["captured"]
    assert tokens(others["graphs"], 0) == tokens(plain, 0)
    assert tokens(others["graphs"], 1) == tokens(plain, 2)


def test_an_engine_begins_with_one_thread_no_device_and_nothing_of_another() -> None:
    """What `forked_engines` promises; and how an engine ended is told."""
    engines = nursery({"SOFTNPU_WAIVE": ",".join(MTP.waivers)})
    with pytest.raises(EngineError, match=r"^exit 3: "):
        engines.run({}, prelude="import vllm; vllm.planted = True; raise SystemExit(3)")
    seen = "hasattr(vllm, 'planted'), len(os.listdir('/proc/self/task')), torch.npu.is_initialized()"
    with pytest.raises(EngineError, match=r"^exit 1: \(False, 1, False\)"):
        engines.run({}, prelude=f"import os, torch, vllm; raise SystemExit(({seen}))")
    with pytest.raises(EngineError, match="unknown"):
        engines.run({"workload": []})


def test_who_goes_before_asking_leaves_nothing_behind_and_nobody_waits_unreaped() -> None:
    engines = nursery({"SOFTNPU_WAIVE": ",".join(MTP.waivers)})
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(engines._address)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(16) == b""  # it has ended without running anything
    with pytest.raises(EngineError) as ended:
        engines.run({}, prelude="import os; raise SystemExit(f'waited for by {os.getppid()} .')")
    waiter = Path("/proc", str(ended.value).split()[-2])
    while waiter.exists() and waiter.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        pass
    with pytest.raises(EngineError, match=r"^exit 1: False"):
        engines.run({}, prelude=f"import pathlib; raise SystemExit(str(pathlib.Path('{waiter}').exists()))")
    assert not [name for name in ("out", "err") if Path(CHECKOUT, name).exists()]


def test_an_environment_does_not_end_the_engines_of_another_that_somebody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forked_engines, "_made", {})  # the true one goes on
    first = nursery({"WAITED": "1"})
    try:
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(first.run, {})  # which has not even imported vLLM
            while not first._runs:
                pass
            with pytest.raises(RuntimeError, match=r"while 1 of {'WAITED': '1'} run; ask for them once those are over"):
                nursery({"WAITED": "2"})
            assert nursery({"WAITED": "1"}) is first
            assert not first.ended
            first._kill()
            assert isinstance(waiting.exception(), EngineError)
        second = nursery({"WAITED": "2"})
        assert not second.ended
        second.close()
    finally:
        first.close()


def test_an_engine_that_is_waited_for_in_vain_costs_those_behind_it_only_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forked_engines, "_made", {})  # the true one goes on
    first = nursery({"WAITED": "1"})
    try:
        assert nursery({"WAITED": "1"}) is first
        with pytest.raises(EngineError, match="no answer in time"):
            first.run({}, timeout_s=0.01)  # it has not even imported vLLM
        second = nursery({"WAITED": "1"})
        assert (second is first, second.ended) == (False, False)
        second.close()
    finally:
        first.close()
