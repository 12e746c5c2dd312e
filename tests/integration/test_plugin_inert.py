# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The real vLLM loads the plugin and makes its configurations beside it; every upstream object stays the identical one.

All of it comes from two runs of `evidence/isolation_probe.py`: vLLM alone, and with vllm-ascend. See there for what is
compared, and in which processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from afd_dsv4.compat.adapters import worker_class
from afd_dsv4.evidence.isolation_probe import OTHERS

pytestmark = [pytest.mark.vllm_runtime, pytest.mark.slow]

README = Path(__file__).parents[2] / "README.md"
PROBE = "afd_dsv4.evidence.isolation_probe"
NATIVE = "vllm_ascend.worker.worker.NPUWorker"
ADAPTED = worker_class("vllm-ascend-0.23.0")
WATCH, REQUESTS = "check_and_update_config", "validate_request"
ON = {"afd_dsv4": {"mode": "colocated"}}

#: One process makes them one after the other.
ENGINES = {
    "off": {},
    "on": {"additional_config": ON},
    "off again": {"additional_config": {"afd_dsv4": {"mode": "off"}}},
    "on with three slots": {"additional_config": {"afd_dsv4": {"mode": "colocated", "slots": 3}}},
    "misspelt": {"additional_config": {"afd_dsv4": {"mode": "colocated", "slot": 3}}},
    "as vLLM has it by default": {
        "additional_config": {**ON, "multistream_dsv4_dsa_overlap": True},
        "async_scheduling": None,
        "enable_prefix_caching": None,
        "enforce_eager": False,
    },
    "drafting": {"additional_config": ON, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "another worker": {"additional_config": ON, "worker_cls": "collections.OrderedDict"},
    "sleeping": {"additional_config": ON, "enable_sleep_mode": True},
    "in a pipeline": {"additional_config": ON, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    "ffn": {"additional_config": {"afd": {"role": "ffn"}, "afd_dsv4": {"mode": "afd"}}},
    "attention": {"additional_config": {"afd": {"role": "attention"}, "afd_dsv4": {"mode": "afd"}}},
}


@cache
def run_probe(stack):
    command = [sys.executable, "-m", PROBE, stack, json.dumps(ENGINES if stack == "ascend" else {})]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def probe(stack):
    done = run_probe(stack)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


STACKS = [pytest.param("vllm", id="vllm_alone"), pytest.param("ascend", id="vllm_ascend", marks=pytest.mark.npu)]
MODES = ["None", "off", "afd", "colocated", "nonsense"]


def test_both_entry_points_are_installed():
    found = {
        (e.group, e.name): e.value for g in ("general", "platform") for e in entry_points(group=f"vllm.{g}_plugins")
    }
    assert found["vllm.general_plugins", "afd_dsv4"] == "afd_dsv4.plugin:register"
    assert found["vllm.platform_plugins", "afd_dsv4"] == "afd_dsv4.plugin:platform"


def test_the_documented_list_for_vllm_plugins_is_every_plugin_of_vllm_ascend_and_ours():
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    theirs = {e.name for g in groups for e in entry_points(group=g) if e.value.split(":")[0] == "vllm_ascend"}
    assert set(OTHERS.split(",")) == theirs
    (documented,) = re.findall(r"^    VLLM_PLUGINS=(.*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert documented == f"{OTHERS},afd_dsv4"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stack", STACKS)
def test_no_upstream_symbol_changes_in_any_mode(stack, mode):
    seen = probe(stack)
    assert seen["compared"] > 10_000
    assert seen["modes"][mode]["changes"] == []
    assert seen["modes"][mode]["new_modules"] == []


@pytest.mark.parametrize("stack", STACKS)
def test_the_platform_instance_has_our_attribute_unless_the_environment_says_off_and_two_where_on(stack):
    modes = probe(stack)["modes"]
    assert [WATCH in modes[mode]["watched"] for mode in MODES] == [mode != "off" for mode in MODES]
    on = "colocated" if stack == "ascend" else None
    assert [REQUESTS in modes[mode]["watched"] for mode in MODES] == [mode == on for mode in MODES]
    assert [modes[mode]["watching"] for mode in MODES] == [mode != "off" for mode in MODES]


@pytest.mark.parametrize("stack", STACKS)
def test_register_runs_once_a_load_and_records_settings_that_cannot_be_read(stack):
    modes = probe(stack)["modes"]
    assert [modes[mode]["calls"] for mode in MODES] == [1, 1, 1, 1, 1]
    wrong = "setting mode: 'nonsense'; choose one of off, afd, colocated"
    assert [modes[mode]["error"] for mode in MODES] == [None, None, None, None, wrong]


@pytest.mark.parametrize("stack", STACKS)
def test_no_platform_is_claimed_and_with_our_name_alone_in_vllm_plugins_there_is_none(stack):
    seen = probe(stack)
    assert seen["platform"] == {"vllm": "UnspecifiedPlatform", "ascend": "NPUPlatform"}[stack]
    for mode in MODES:
        assert seen["modes"][mode]["platform_asked"] == ["afd_dsv4"]
        assert seen["modes"][mode]["platform_claimed"] == []


@pytest.mark.parametrize("stack", STACKS)
def test_the_comparison_sees_a_planted_patch(stack):
    planted = probe(stack)["planted"]
    assert "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots" in planted
    assert "vllm.v1.core.kv_cache_utils.get_kv_cache_groups" in planted


@pytest.mark.npu
def test_what_upstream_itself_sets_anew_with_every_configuration_is_little():
    assert len(probe("ascend")["theirs"]) <= 5


@pytest.mark.npu
@pytest.mark.parametrize("process", ["loaded_by_worker", "loaded_by_engine_core"])
def test_a_process_that_got_its_configuration_has_nothing_of_ours_on_the_platform(process):
    found = probe("ascend")["processes"][process]
    assert (found["calls"], found["watching"], found["error"]) == (1, False, None)
    assert not {WATCH, REQUESTS} & set(found["watched"])


def modes_engine(mode):
    return probe("ascend")["modes"][mode]["engine"]


@pytest.mark.npu
@pytest.mark.parametrize("mode", ["None", "off", "afd"])
def test_an_engine_that_is_off_keeps_vllm_ascends_worker(mode):
    engine = modes_engine(mode)
    assert (engine["worker"], engine["entered"], engine["active"]) == (NATIVE, None, False)
    assert engine["refused"] is (mode == "afd")


@pytest.mark.npu
def test_afd_without_afd_says_so():
    assert any('no additional_config["afd"]' in reason for reason in modes_engine("afd")["reasons"])


def entered_settings(slots, drafts):
    """All settings of an engine that the plugin works in, as they travel to its workers."""
    given = {"mode": "colocated", "slots": slots, "drafts": drafts, "fence_timeout_s": 60.0}
    return {**given, "executor": "stock", "tile_tokens": 2048}


@pytest.mark.npu
def test_colocated_from_the_environment_is_on_and_travels_in_the_configuration():
    engine = modes_engine("colocated")
    assert engine["active"], engine["reasons"]
    assert engine["worker"] == ADAPTED
    assert engine["entered"] == entered_settings(2, 0)


@pytest.mark.npu
def test_an_environment_that_cannot_be_read_ends_the_configuration():
    engine = modes_engine("nonsense")
    assert engine["worker"] is None
    assert "setting mode: 'nonsense'; choose one of off, afd, colocated" in engine["raised"]


def engine(name):
    return probe("ascend")["engines"][name]


@pytest.mark.npu
def test_engines_of_one_process_are_decided_on_one_by_one():
    names = ("off", "on", "off again", "on with three slots")
    assert [engine(name)["worker"] for name in names] == [NATIVE, ADAPTED, NATIVE, ADAPTED]
    entered = [engine(name)["entered"] for name in names]
    assert entered[1] == entered_settings(2, 0)
    assert entered[3] == entered_settings(3, 0)


@pytest.mark.npu
def test_drafts_are_those_of_the_real_speculative_configuration():
    found = engine("drafting")
    assert found["active"], found["reasons"]
    assert found["entered"] == entered_settings(2, 2)


@pytest.mark.npu
def test_settings_that_cannot_be_read_end_the_configuration_in_vllms_own_words_too():
    found = engine("misspelt")
    known = "mode, slots, drafts, fence_timeout_s, audit, executor, tile_tokens"
    assert found["error"] == f"additional_config['afd_dsv4']: unknown 'slot'; known are {known}"
    assert found["error"] in found["raised"]


@pytest.mark.npu
@pytest.mark.parametrize("name", ENGINES)
def test_everything_that_the_gate_asks_is_found_in_the_real_configuration(name):
    assert not [reason for reason in engine(name)["reasons"] if "cannot read" in reason]


@pytest.mark.npu
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("as vLLM has it by default", "prefix caching: on"),
        ("another worker", "worker class: collections.OrderedDict"),
        ("sleeping", "sleep mode: on"),
        ("in a pipeline", "pipeline parallelism: 2"),
        ("attention", "afd-plugin: not installed"),
        ("attention", "AFD connector: P2pNcclAFDConnector"),  # afd-plugin's default
    ],
)
def test_an_engine_that_we_cannot_serve_is_refused_and_serves_natively(name, says):
    found = engine(name)
    assert found["refused"]
    assert found["worker"] in (NATIVE, "collections.OrderedDict")
    assert [reason for reason in found["reasons"] if reason.startswith(says)], found["reasons"]


@pytest.mark.npu
def test_the_ffn_side_of_afd_is_off_and_no_refusal():
    found = engine("ffn")
    assert (found["worker"], found["refused"]) == (NATIVE, False)
    assert "'ffn'" in found["reasons"][0]


@pytest.mark.npu
def test_the_stack_is_told_with_the_decision():
    assert engine("on")["stack"].startswith("vllm 0.23.0")
    assert "vllm-ascend 0.23.0" in engine("on")["stack"]
