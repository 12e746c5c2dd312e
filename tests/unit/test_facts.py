# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Facts are read by exact paths: one that is not there is named and refused, never guessed."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from afd_dsv4.compat.contract import Drift, DriftKind, Verdict
from afd_dsv4.compat.facts import facts_from
from afd_dsv4.compat.stack import InstalledStack
from afd_dsv4.config import Mode, Settings
from afd_dsv4.gate import decide

STACK = InstalledStack("3.11.7", "x86_64", "2.13.0+cpu", "2.13.0", "0.23.0", "0.23.0", "5.24.0")
HOLDS = Verdict(True, (), STACK.name)
MODEL = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "hidden_size": 1024,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "max_position_embeddings": 4096,
}


class NPUPlatform:
    """Stands for vllm-ascend's, under its name."""


NPUPlatform.__module__ = "vllm_ascend.platform"
NPUPlatform.__qualname__ = "NPUPlatform"


class HfConfig:
    def __init__(self, values):
        self.values = values

    def to_dict(self):
        return self.values


def configuration(**additional: Any) -> SimpleNamespace:
    """The part of vLLM's configuration that is read, with the names and types of vLLM 0.23.0."""
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=HfConfig(MODEL), enable_sleep_mode=False, dtype="torch.bfloat16"),
        cache_config=SimpleNamespace(enable_prefix_caching=False, block_size=128, kv_offloading_size=None),
        parallel_config=SimpleNamespace(
            worker_cls="vllm_ascend.worker.worker.NPUWorker",
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
            num_ubatches=0,
        ),
        scheduler_config=SimpleNamespace(
            async_scheduling=True, max_num_seqs=4, max_num_batched_tokens=2048, policy="fcfs", scheduler_cls=None
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="NONE")),
        speculative_config=SimpleNamespace(method="mtp", num_speculative_tokens=2),
        kv_transfer_config=None,
        ec_transfer_config=None,
        lora_config=None,
        use_v2_model_runner=False,
        additional_config=additional,
    )


@pytest.fixture
def ascend(monkeypatch):
    """vllm-ascend's two modules as far as they are asked; yields what it made of the configuration."""
    resolved = SimpleNamespace(vllm_config=None, multistream_dsv4_dsa_overlap=True)
    utils, config = ModuleType("vllm_ascend.utils"), ModuleType("vllm_ascend.ascend_config")
    utils.get_ascend_device_type = lambda: SimpleNamespace(name="A3")  # type: ignore[attr-defined]
    config.get_ascend_config = lambda: resolved  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
    monkeypatch.setitem(sys.modules, "vllm_ascend.ascend_config", config)
    return resolved


def read(vllm_config, ascend):
    ascend.vllm_config = vllm_config
    return facts_from(vllm_config, NPUPlatform, STACK, HOLDS)


def test_everything_is_read_from_its_place(ascend):
    facts = read(configuration(afd={"role": "attention"}, enable_dsa_cp=True), ascend)
    assert facts.unread == ()
    assert facts.stack_name == "vllm-ascend-0.23.0"
    assert facts.platform == "vllm_ascend.platform.NPUPlatform"
    assert (facts.device, facts.overlap, facts.native_tail) == ("A3", True, False)
    assert facts.dtype == "bfloat16"
    assert facts.geometry is not None
    assert facts.geometry.compress_ratios == (0, 4, 128)
    assert facts.afd is not None
    assert (facts.afd.role, facts.dsa_context_parallel) == ("attention", True)
    assert (facts.speculative_method, facts.speculative_tokens) == ("mtp", 2)
    assert (facts.async_scheduling, facts.prefix_caching, facts.graphs) == (True, False, "NONE")
    assert (facts.max_num_seqs, facts.max_num_batched_tokens, facts.block_size) == (4, 2048, 128)


PATHS = (
    "model_config.hf_config",
    "model_config.enable_sleep_mode",
    "model_config.dtype",
    "cache_config.enable_prefix_caching",
    "cache_config.block_size",
    "cache_config.kv_offloading_size",
    "parallel_config.worker_cls",
    "parallel_config.decode_context_parallel_size",
    "parallel_config.prefill_context_parallel_size",
    "parallel_config.pipeline_parallel_size",
    "parallel_config.num_ubatches",
    "scheduler_config.async_scheduling",
    "scheduler_config.max_num_seqs",
    "scheduler_config.max_num_batched_tokens",
    "compilation_config.cudagraph_mode",
    "speculative_config.method",
    "speculative_config.num_speculative_tokens",
    "kv_transfer_config",
    "ec_transfer_config",
    "lora_config",
    "scheduler_config.policy",
    "scheduler_config.scheduler_cls",
    "speculative_config",
    "use_v2_model_runner",
    "additional_config",
    "scheduler_config",
)


@pytest.mark.parametrize("path", PATHS)
def test_an_attribute_that_moved_is_named_once_and_refused(path, ascend):
    vllm_config = configuration()
    *parents, name = path.split(".")
    owner = vllm_config
    for parent in parents:
        owner = getattr(owner, parent)
    delattr(owner, name)
    facts = read(vllm_config, ascend)
    assert facts.unread == (f"vllm_config.{path}",)
    decision = decide(Settings(Mode.COLOCATED), facts)
    assert any(f"cannot read vllm_config.{path}" in reason for reason in decision.reasons)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cache_config.enable_prefix_caching", None),
        ("cache_config.block_size", "128"),
        ("parallel_config.pipeline_parallel_size", True),
        ("scheduler_config.async_scheduling", 1),
        ("additional_config", ["afd"]),
    ],
)
def test_a_value_of_another_type_is_not_taken_for_one(path, value, ascend):
    vllm_config = configuration()
    *parents, name = path.split(".")
    owner = getattr(vllm_config, parents[0]) if parents else vllm_config
    setattr(owner, name, value)
    assert read(vllm_config, ascend).unread == (f"vllm_config.{path}",)


def test_options_that_ascend_resolved_for_another_engine_are_not_taken(ascend):
    vllm_config = configuration()
    ascend.vllm_config = configuration()
    facts = facts_from(vllm_config, NPUPlatform, STACK, HOLDS)
    assert facts.overlap is None
    assert "of this engine" in facts.unread[0]


@pytest.mark.parametrize(
    ("module", "function"),
    [("vllm_ascend.ascend_config", "get_ascend_config"), ("vllm_ascend.utils", "get_ascend_device_type")],
)
def test_a_function_of_ascends_that_raises_is_unread_with_what_it_said_and_refused(
    module, function, ascend, monkeypatch
):
    """As vllm-ascend's own does where it is imported before its configuration is made."""

    def raising() -> None:
        raise RuntimeError("not initialized, call init_ascend_config first")

    monkeypatch.setattr(sys.modules[module], function, raising)
    facts = read(configuration(), ascend)
    told = f"{module}.{function}() (RuntimeError: not initialized, call init_ascend_config first)"
    assert facts.unread == (told,)
    decision = decide(Settings(Mode.COLOCATED), facts)
    assert any(f"cannot read {told}" in reason for reason in decision.reasons)


def test_a_stack_without_ascends_modules_is_unread_and_nothing_is_imported(monkeypatch):
    for name in ("vllm_ascend.utils", "vllm_ascend.ascend_config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    facts = facts_from(configuration(), NPUPlatform, STACK, HOLDS)
    assert facts.unread == ("vllm_ascend.utils", "vllm_ascend.ascend_config")
    assert "vllm_ascend.utils" not in sys.modules


@pytest.mark.parametrize(
    ("afd", "role"),
    [
        ({"role": "ffn"}, "ffn"),
        ({"afd_role": "attention"}, "attention"),
        ({"connector": "x"}, "attention"),  # afd-plugin's default
        ({"role": 3}, "3"),
        ("attention", "attention"),
    ],
)
def test_the_afd_role_is_read_under_both_names_and_an_unreadable_one_is_none_that_works(afd, role, ascend):
    found = read(configuration(afd=afd), ascend).afd
    assert found is not None
    assert found.role == role
    assert read(configuration(afd=None), ascend).afd is None


def test_the_connector_and_its_stages_are_read_under_afd_plugins_names_and_defaults(ascend):
    def afd(**values: Any) -> Any:
        return read(configuration(afd=values), ascend)

    extra = {"async_moe_ubatching": True, "async_moe_split": "token"}
    whole = afd(afd_connector="CAMAsyncAFDConnector", connector_extra_config=extra, **{"async": True})
    assert (whole.afd.connector, whole.afd.asynchronous) == ("CAMAsyncAFDConnector", True)
    assert (whole.afd.stages, whole.afd.split, whole.ubatches) == (2, "token", 2)
    plain = afd(connector="CAMAsyncAFDConnector", async_dp=False)
    assert (plain.afd.stages, plain.afd.split, plain.afd.asynchronous, plain.ubatches) == (1, "request", False, 1)
    assert afd().afd.connector == "P2pNcclAFDConnector"
    other = afd(connector="CAMP2pAFDConnector", connector_extra_config={"core_num": 4})
    assert (other.afd.connector, other.ubatches, other.unread) == ("CAMP2pAFDConnector", 1, ())


@pytest.mark.parametrize(
    ("dense", "cuts", "found", "unread"),
    [
        (None, True, 0, False),  # the key is not there
        (3, True, 3, False),
        (3, False, 0, False),  # an uncut forward has one execution
        ("3", True, None, True),
        ("3", False, 0, False),
    ],
)
def test_layers_without_experts_are_counted_where_a_step_is_cut(dense, cuts, found, unread, ascend):
    afd = {"connector": "CAMAsyncAFDConnector", "connector_extra_config": {"async_moe_ubatching": cuts}}
    vllm_config = configuration(afd=afd)
    values = vllm_config.model_config.hf_config.to_dict()
    if dense is not None:
        values = {**values, "first_k_dense_replace": dense}
    vllm_config.model_config.hf_config = SimpleNamespace(to_dict=lambda: values)
    facts = read(vllm_config, ascend)
    assert facts.afd is not None
    assert facts.afd.dense == found
    assert facts.unread == (("vllm_config.model_config.hf_config.first_k_dense_replace",) if unread else ())


@pytest.mark.parametrize(
    ("afd", "path"),
    [
        ({"async": "yes"}, "async"),
        ({"connector_extra_config": 3}, "connector_extra_config"),
        ({"connector_extra_config": {"async_moe_ubatching": 1}}, "connector_extra_config.async_moe_ubatching"),
        (
            {"connector_extra_config": {"async_moe_ubatching": True, "async_moe_num_ubatches": "2"}},
            "connector_extra_config.async_moe_num_ubatches",
        ),
    ],
)
def test_a_setting_of_afd_plugin_of_another_type_is_named_and_not_guessed(afd, path, ascend):
    facts = read(configuration(afd={"connector": "CAMAsyncAFDConnector", **afd}), ascend)
    assert facts.unread == (f'additional_config["afd"].{path}',)


def test_the_installed_afd_plugin_decides_on_the_adapter_and_is_told(ascend):
    pair = replace(STACK, vllm="0.26.0", vllm_ascend="0.1", vllm_ascend_commit="80d8c194f")
    afd = {"role": "attention", "connector": "CAMP2pAFDConnector"}

    def found(commit: str | None, version: str | None = "of no version", stack: InstalledStack = pair) -> Any:
        vllm_config = configuration(afd=afd)
        ascend.vllm_config = vllm_config
        return facts_from(vllm_config, NPUPlatform, replace(stack, afd_plugin=version, afd_plugin_commit=commit), HOLDS)

    right = found("85e826ed8239dd9d8032375bb84a56116e24f0e0")
    assert (right.afd.pin, right.afd.lacks) == ("afd-plugin-85e826e", None)
    assert str(right.worker_class).endswith("afd_85e826e.worker.AfdDsv4AttentionWorker")
    assert "afd" in right.covers
    for commit in ("2f4f462", "044464a", "2e4378f"):
        old = found(commit)
        assert (old.afd.pin, old.worker_class, old.covers) == (f"afd-plugin-{commit}", None, frozenset())
        assert "registers no DeepSeek-V4" in str(old.afd.lacks)
    unknown = found("03b57b3")
    assert (unknown.afd.pin, unknown.afd.plugin, unknown.worker_class) == (None, "commit 03b57b3", None)
    assert found(None).afd.plugin == "commit unknown"
    assert found(None, None).afd.plugin is None
    assert found("85e826e", stack=STACK).worker_class is None  # it was not made for that vllm-ascend


def test_what_of_afd_plugin_is_not_in_the_process_is_named_and_the_registered_model_is_told(ascend, monkeypatch):
    afd = {"role": "attention"}
    patches = [
        f"afd_plugin.compat.patches.{name}"
        for name in ("async_dp_engine", "async_dp_forward_context", "config_validation", "engine_core")
    ]
    facts = read(configuration(afd=afd), ascend)
    assert facts.afd is not None
    assert list(facts.afd.not_loaded) == patches
    assert facts.afd.model is None or "vllm.model_executor.models.registry" in sys.modules
    for name in patches[:-1]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    registry = ModuleType("vllm.model_executor.models.registry")
    lazy = SimpleNamespace(module_name="afd_plugin.model_executor.models.deepseek_v4", class_name="Some")
    registry.ModelRegistry = SimpleNamespace(models={"AFDDeepseekV4ForCausalLM": lazy})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    facts = read(configuration(afd=afd), ascend)
    assert facts.afd is not None
    assert (facts.afd.not_loaded, facts.afd.model) == (
        (patches[-1],),
        "afd_plugin.model_executor.models.deepseek_v4:Some",
    )
    registry.ModelRegistry.models["AFDDeepseekV4ForCausalLM"] = SimpleNamespace(model_cls=HfConfig)  # type: ignore[attr-defined]
    facts = read(configuration(afd=afd), ascend)
    assert facts.afd is not None
    assert facts.afd.model == f"{HfConfig.__module__}:HfConfig"


def test_a_connector_and_offloading_both_move_kv(ascend):
    vllm_config = configuration()
    vllm_config.cache_config.kv_offloading_size = 4.0
    assert read(vllm_config, ascend).kv_transfer == "kv_offloading_size 4.0"
    vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="MooncakeConnector")
    assert read(vllm_config, ascend).kv_transfer == "kv_transfer_config with MooncakeConnector"


def test_an_encoder_elsewhere_lora_priorities_and_foreign_schedulers_are_seen(ascend):
    vllm_config = configuration()
    plain = read(vllm_config, ascend)
    assert (plain.kv_transfer, plain.lora, plain.policy, plain.scheduler_cls) == (None, False, "fcfs", None)
    vllm_config.ec_transfer_config = SimpleNamespace(ec_connector="Some")
    vllm_config.lora_config = SimpleNamespace()
    vllm_config.scheduler_config.policy = "priority"
    vllm_config.scheduler_config.scheduler_cls = HfConfig
    found = read(vllm_config, ascend)
    assert (found.kv_transfer, found.lora, found.policy) == ("ec_transfer_config with Some", True, "priority")
    assert found.scheduler_cls == f"{HfConfig.__module__}.HfConfig"
    vllm_config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    assert read(vllm_config, ascend).scheduler_cls is None


def test_a_queue_that_vllm_ascend_puts_into_the_scheduler_without_a_name_is_told(ascend):
    for enabled, told in ((False, None), (True, "vllm-ascend's short_request_first_config")):
        ascend.scheduler_config = SimpleNamespace(short_request_first_config=SimpleNamespace(enabled=enabled))
        assert read(configuration(), ascend).scheduler_cls == told


def test_the_native_tail_mode_counts_only_where_the_stack_has_it(ascend, monkeypatch):
    asked = configuration(enable_dsv4_shared_compressor_workspace=True)
    assert read(asked, ascend).native_tail is False
    gate = "get_dsv4_shared_compressor_workspace_fallback_reasons"
    monkeypatch.setattr(sys.modules["vllm_ascend.ascend_config"], gate, list, raising=False)
    assert read(asked, ascend).native_tail is True
    assert read(configuration(), ascend).native_tail is False


def test_drift_and_a_contract_that_was_never_recorded_are_facts(ascend):
    drift = Drift("vllm:f", DriftKind.DEFAULT, "x=1", "x=2", "used", "consequence")
    for verdict, found in (
        (HOLDS, ()),
        (Verdict(True, (drift,), STACK.name), ("vllm:f: changed default: x=1 -> x=2",)),
        (Verdict(False, (), STACK.name), ("no contract of vllm-ascend-0.23.0 is recorded",)),
        (Verdict(False, (), None), ()),  # an unknown stack is refused for that
    ):
        assert facts_from(configuration(), NPUPlatform, STACK, verdict).drift == found


def test_a_model_that_cannot_be_read_is_told_and_not_raised(ascend):
    vllm_config = configuration()
    vllm_config.model_config.hf_config = HfConfig(MODEL | {"compress_ratios": [2, 4, 128]})
    facts = read(vllm_config, ascend)
    assert facts.geometry is None
    assert "V4.1" in str(facts.geometry_error)
