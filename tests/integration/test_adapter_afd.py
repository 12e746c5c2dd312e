# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The adapter of (vllm 0.26.0, vllm-ascend 80d8c194f, afd-plugin 85e826e) over the code of all three.

Two variables name them: AFD_DSV4_STACK_0_26 an interpreter with the first two (docs/compat.md), AFD_PLUGIN_PATH a
checkout of the third. Without either, all of this is skipped. `afd_adapter_probe.py` runs in processes of that
interpreter, on the software NPU.
afd-plugin is found by vLLM's own loader, as an installed distribution would be.
Not here: forwards, and a model: this commit has none of DeepSeek-V4 that an NPU can run.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.compat.adapters import ADAPTERS
from afd_dsv4.gate import AFD_WORKER
from afd_dsv4.softnpu import engine

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("AFD_DSV4_STACK_0_26", "")
CHECKOUT = os.environ.get("AFD_PLUGIN_PATH", "")
STACK = "vllm-ascend-80d8c194f+afd-plugin-85e826e"
OURS = ADAPTERS[STACK].worker
COLOCATED = ADAPTERS["vllm-ascend-80d8c194f"].worker
FFN_WORKER = "afd_plugin.v1.worker.npu.AFDNPUFFNWorker"
CAM, P2P = "CAMAsyncAFDConnector", "CAMP2pAFDConnector"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="no such case: AFD_DSV4_STACK_0_26 names no interpreter with that stack"),
    pytest.mark.skipif(not CHECKOUT, reason="no such case: AFD_PLUGIN_PATH names no checkout"),
]


def engine_of(connector: str, extra: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    afd: dict[str, Any] = {"connector": connector, "role": arguments.pop("role", "attention")}
    if connector == CAM:
        afd |= {"async": True, "compute_gate_on_attention": True}
    if extra:
        afd["connector_extra_config"] = extra
    settings = {"mode": arguments.pop("mode", "afd"), **arguments.pop("settings", {})}
    additional = {"afd": afd, "afd_dsv4": settings, **arguments.pop("additional", {})}
    return {"additional_config": additional, **arguments}


TWO = {"async_moe_ubatching": True}
#: By name; one process makes them one after the other.
ENGINES = {
    "cam": engine_of(CAM),
    "cam in two stages": engine_of(CAM, TWO),
    "cam in two stages, with dense layers": engine_of(CAM, TWO, hf_overrides={"first_k_dense_replace": 1}),
    "cam cut at tokens": engine_of(
        CAM,
        {**TWO, "async_moe_split": "token", "attn_ranks_per_dp": 2},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ),
    "camp2p": engine_of(P2P),
    "camp2p with DBO": engine_of(P2P, enable_dbo=True),
    "worker named": engine_of(CAM, worker_cls=AFD_WORKER),
    "audited, with three slots": engine_of(CAM, settings={"audit": True, "slots": 3}),
    "p2pnccl": engine_of("P2pNcclAFDConnector"),
    "another worker": engine_of(CAM, worker_cls="collections.OrderedDict"),
    "one slot for two stages": engine_of(CAM, TWO, settings={"slots": 1}),
    "drafting": engine_of(P2P, speculative_config={"method": "mtp", "num_speculative_tokens": 1}),
    "prefix caching": engine_of(CAM, enable_prefix_caching=True),
    "second stream": engine_of(CAM, additional={"multistream_dsv4_dsa_overlap": True}),
    "graphs": engine_of(P2P, enforce_eager=False, compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
    "cam ffn": engine_of(CAM, role="ffn"),
    "camp2p ffn": engine_of(P2P, role="ffn"),
    "colocated with AFD": engine_of(CAM, mode="colocated"),
    "colocated": {"additional_config": {"afd_dsv4": {"mode": "colocated"}}},
    "cam again": engine_of(CAM),
}


def environment(*folders: Path | str) -> dict[str, str]:
    drop = ("LD_LIBRARY_PATH", "PYTHONPATH", "AFD_DSV4_MODE", "AFD_DSV4_CONFIG", "VLLM_PLUGINS")
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    path = os.pathsep.join([str(ROOT), *map(str, folders)])
    return {**kept, **engine.QUIET, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": path}


def run(*arguments: str, folders: tuple[Path | str, ...], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, *arguments],
        cwd=ROOT,
        env={**environment(*folders), **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metadata that an installation of afd-plugin has, beside its checkout: its entry point."""
    folder = tmp_path_factory.mktemp("metadata")
    info = folder / "vllm_afd_plugin-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-afd-plugin\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nafd = afd_plugin:register_afd\n")
    return folder


@pytest.fixture(scope="module")
def probed(installed: Path) -> dict[str, dict[str, Any]]:
    """What the probe found, by the connector that it made a worker with."""

    def probe(connector: str) -> dict[str, Any]:
        script = str(ROOT / "tests" / "integration" / "afd_adapter_probe.py")
        command = ["-m", "afd_dsv4.softnpu", "--", PYTHON, script, json.dumps(ENGINES if connector == CAM else {})]
        done = run(*command, folders=(CHECKOUT, installed), PROBE_CONNECTOR=connector, SOFTNPU_DEVICES="2")
        assert done.returncode == 0, done.stderr[-6000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor(2) as threads:
        return dict(zip((CAM, P2P), threads.map(probe, (CAM, P2P)), strict=True))


def decided(probed: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = probed[CAM]["engines"][name]
    return found


@pytest.mark.parametrize(
    ("name", "ubatches"),
    [
        ("cam", 1),
        ("cam in two stages", 2),
        ("cam cut at tokens", 2),
        ("camp2p", 1),
        ("worker named", 1),
        ("audited, with three slots", 1),
        ("cam again", 1),
    ],
)
def test_the_attention_role_is_on_with_both_connectors_whole_and_cut(
    name: str, ubatches: int, probed: dict[str, dict[str, Any]]
) -> None:
    found = decided(probed, name)
    assert found["active"], (found["reasons"], found["raised"], found["error"])
    assert found["worker"] == OURS
    (reason,) = found["reasons"]
    assert reason.endswith(f"{ubatches} uBatches")
    assert found["stack"].endswith("afd-plugin 0.1 (commit 85e826ed8239dd9d8032375bb84a56116e24f0e0)")
    audited = {"audit": True} if "audited" in name else {}
    slots = 3 if "three slots" in name else 2
    launching = {"executor": "stock", "tile_tokens": 2048}
    settled = {"mode": "afd", "slots": slots, "drafts": 0, "fence_timeout_s": 60.0, **launching, **audited}
    assert found["entered"] == settled


@pytest.mark.parametrize("name", ["cam ffn", "camp2p ffn"])
def test_the_ffn_role_is_off_and_no_refusal_and_has_afd_plugins_worker(
    name: str, probed: dict[str, dict[str, Any]]
) -> None:
    found = decided(probed, name)
    assert (found["active"], found["refused"], found["worker"]) == (False, False, FFN_WORKER)
    assert "'ffn'" in found["reasons"][0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("p2pnccl", "AFD connector: P2pNcclAFDConnector"),
        ("camp2p with DBO", "DBO of afd-plugin: 2 uBatches"),
        ("another worker", "worker class: collections.OrderedDict"),
        ("cam in two stages, with dense layers", "async_moe_ubatching: 1 dense layers first"),
        ("one slot for two stages", "setting slots: 1 for 2 uBatches"),
        ("drafting", "speculative decoding: mtp"),
        ("prefix caching", "prefix caching: on"),
        ("second stream", "multistream overlap: on"),
        ("graphs", "graph mode: FULL_DECODE_ONLY"),
    ],
)
def test_what_the_adapter_does_not_cover_is_refused_by_name_and_afd_plugin_serves(
    name: str, says: str, probed: dict[str, dict[str, Any]]
) -> None:
    found = decided(probed, name)
    assert found["refused"], found
    assert found["worker"] in (AFD_WORKER, "collections.OrderedDict")
    assert [reason for reason in found["reasons"] if reason.startswith(says)], found["reasons"]
    assert not [reason for reason in found["reasons"] if "cannot read" in reason]


def test_a_colocated_server_beside_an_installed_afd_plugin_has_the_colocated_adapter(
    probed: dict[str, dict[str, Any]],
) -> None:
    assert decided(probed, "colocated")["worker"] == COLOCATED
    found = decided(probed, "colocated with AFD")
    assert (found["refused"], found["worker"]) == (True, AFD_WORKER)


def test_the_commits_own_model_and_a_plugin_list_without_afd_are_refused_by_name(
    probed: dict[str, dict[str, Any]],
) -> None:
    for found in probed.values():
        (reason,) = found["with_its_own_model"]["reasons"]
        assert reason.startswith("AFD model: afd_plugin.model_executor.models.deepseek_v4:AFDDeepseekV4ForCausalLM")
        assert "every device but CUDA" in reason
        reasons = found["without_afd"]["reasons"]
        assert [r for r in reasons if "afd_plugin.compat.patches.config_validation" in r and "VLLM_PLUGINS" in r]


@pytest.mark.parametrize("name", ["off", "afd without AFD", "afd as FFN"])
def test_every_symbol_of_all_three_is_the_identical_object_where_the_plugin_is_not_on(
    name: str, probed: dict[str, dict[str, Any]]
) -> None:
    for found in probed.values():
        assert found["compared"] > 10_000
        seen = found["symbols"][name]
        assert (seen["changes"], seen["left"]) == ([], [])
        assert not seen["engine"]["active"]


def test_on_one_function_of_afd_plugins_is_replaced_and_put_back(probed: dict[str, dict[str, Any]]) -> None:
    for found in probed.values():
        seen = found["symbols"]["afd"]
        assert seen["engine"]["worker"] == OURS
        assert seen["changes"] == ["afd_plugin.compat.patches.config_validation._select_afd_worker_for_auto"]
        assert seen["left"] == []


@pytest.mark.parametrize(("connector", "ours"), [(CAM, "AfdDsv4CAMAsyncConnector"), (P2P, "AfdDsv4CAMP2pConnector")])
def test_vllm_makes_our_worker_runner_and_connector_and_nothing_of_ours_stays_registered(
    connector: str, ours: str, probed: dict[str, dict[str, Any]]
) -> None:
    found = probed[connector]["made"]
    assert found["named"] == found["worker_cls"] == OURS
    assert found["worker"] == ["AfdDsv4AttentionWorker", "WorkerMixin", "AFDNPUAttentionWorker", "NPUWorker"]
    assert found["runner"][:3] == ["AfdDsv4AttentionRunner", "RunnerMixin", "AFDNPUAttentionModelRunner"]
    assert found["connector"] == [ours, "WatchedMixin", connector]
    assert found["registry_is_as_before"]
    assert found["names_are_as_before"] == []
    assert found["architectures"] == ["AFDDeepseekV4ForCausalLM"]
    assert found["bytes_before_the_model"] == 0
    assert found["forgotten"] == [None, None, None]
    assert not found["initialized_at_the_end"]


@pytest.mark.parametrize("connector", [CAM, P2P])
def test_the_engine_ends_behind_the_tails_and_only_where_nothing_can_run_any_more(
    connector: str, probed: dict[str, dict[str, Any]]
) -> None:
    """Its end waits for the device, then frees the model. The worker sees to the tails once more; that does nothing."""
    ends = probed[connector]["made"]["ends"]
    for how in ("returns", "raises"):
        assert ends[how] == {"order": ["connector", "tails", "engine", "tails"], "left": []}, how
    doubts = {
        "hangs": "has not come back",
        "returns, with work queued": "has not come back",
        "raises, with work queued": "has not come back",
        "returns, with a lease in doubt": "leases in doubt: 1",
    }
    assert ends.keys() == {"returns", "raises", *doubts}
    for how, why in doubts.items():
        assert ends[how]["order"] == ["connector", "tails", "tails", "tails", "tails"], how  # it is asked to end twice
        assert len(ends[how]["left"]) == 2
        for line in ends[how]["left"]:
            assert "model and KV cache" in line
            assert why in line


@pytest.mark.parametrize("connector", [CAM, P2P])
def test_a_forward_of_any_kind_that_has_sent_and_not_received_is_the_last_to_send(
    connector: str, probed: dict[str, dict[str, Any]]
) -> None:
    found = probed[connector]["made"]["broken_off"]
    assert found["computes"] == found["computes again"] == "computed"
    assert "not" in found["sends"]
    assert "initialized" in found["sends"]  # what the native one says, behind the count
    assert "layer 4 of uBatch 0" in found["sends again"]
    assert "restart the worker" in found["sends again"]


def test_a_close_that_raises_or_never_comes_back_lets_the_worker_end_and_refuses_what_comes_after(
    probed: dict[str, dict[str, Any]],
) -> None:
    for found in probed.values():
        closed = found["closed"]
        assert closed["returns"] is None
        assert closed["devices"] == [1]  # the connector's, which no thread begins with
        assert closed["waits"]["ours"] < closed["waits"]["vLLM's"]  # or the worker is killed within
        assert (closed["looks without audit"], closed["looks"]) == (0, 1)
        assert closed["audited"] == 3  # what is given, what became of it, what waits
        assert [closed[f"{how}, hangs"] for how in ("returns", "raises", "hangs")] == ["False", "False", "True"]
        assert "planted" in closed["raises"]
        assert "has not come back" in closed["hangs"]
        assert "planted" in closed["raises, then sends"]
        assert "restart the worker" in closed["hangs, then sends"]


def test_the_installed_stack_is_as_recorded_with_afd_plugin(installed: Path) -> None:
    done = run("-m", "afd_dsv4", "compat", "check", "--json", folders=(CHECKOUT, installed))
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["status"], answer["unchecked"]) == (0, 0, [])
    other = answer["afd_plugin"]
    assert (other["contract"], other["drift"], other["unchecked"]) == ("afd-plugin-85e826e", [], [])
    assert other["adapter"] == OURS
    without = run("-m", "afd_dsv4", "compat", "check", folders=())
    assert without.returncode == 0
    assert "afd-plugin not installed" in without.stdout


def test_planted_drift_in_a_body_and_another_commit_are_refused_by_name(tmp_path: Path) -> None:
    shutil.copytree(Path(CHECKOUT) / "afd_plugin", tmp_path / "afd_plugin")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("85e826ed8239dd9d8032375bb84a56116e24f0e0\n")
    path = tmp_path / "afd_plugin" / "connectors" / "npu" / "async_cam.py"
    text = path.read_text()
    planted = text.replace("        context.states = states\n", "        context.states = states  # the same\n", 1)
    assert planted != text
    path.write_text(planted)
    check = ("-m", "afd_dsv4", "compat", "check")
    assert run(*check, folders=(tmp_path,)).returncode == 0  # a comment is no drift
    path.write_text(text.replace("        context.states = states\n", "        context.states = None\n", 1))
    done = run(*check, folders=(tmp_path,))
    assert done.returncode == 1
    assert "CAMAsyncAFDConnector.send_attn_output: edited body" in " ".join(done.stdout.split())
    script = (
        "from afd_dsv4.compat import afd, contract, patch, stack\n"
        "verdict = contract.verify(stack.installed(), afd=True)\n"
        "try: afd.let_ours_stand(verdict)\n"
        "except patch.DriftError as error: print(error)\n"
    )
    assert "send_attn_output" in run("-c", script, folders=(tmp_path,)).stdout
    (tmp_path / ".git" / "HEAD").write_text("03b57b3" + "0" * 33 + "\n")
    done = run(*check, folders=(tmp_path,))
    assert done.returncode == 2
    assert "unknown afd-plugin" in done.stdout
    assert "not recorded" in run("-c", script, folders=(tmp_path,)).stdout


def source_of(module: str, name: str) -> str:
    """The text of a function or method of the checkout, as Python writes it."""
    tree = ast.parse((Path(CHECKOUT) / "afd_plugin" / module).read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.unparse(found)


def test_what_is_refused_or_patched_because_of_this_commit_is_still_so_in_it() -> None:
    """A line that fails here says: that refusal or patch can go."""
    runner = "v1/worker/npu/attention_model_runner.py"
    build = source_of(runner, "_build_attention_metadata_with_ubatches")
    assert "dsa_metadata_caches = [shared_dsa_metadata_caches for _ in ubatch_slices]" in build  # DBO
    model = (Path(CHECKOUT) / "afd_plugin" / "model_executor" / "models" / "deepseek_v4.py").read_text()
    assert 'raise RuntimeError("AFD DeepSeek-V4 supports CUDA only")' in model
    select = source_of("validation.py", "afd_worker_qualname_for_platform_default")
    assert select.count("raise ValueError") == 2  # at any class but the platform's own
    assert "AFDNPUAttentionModelRunner(" in source_of("v1/worker/npu/attention_worker.py", "init_device")
    forget = source_of(runner, "execute_model")
    assert "_afd_pending_metadata" not in forget  # notes of a step stay behind it
