# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The real vLLM loads the plugin, and every upstream object is still the identical one."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.metadata import entry_points

import pytest

pytestmark = [pytest.mark.vllm_runtime, pytest.mark.slow]

PROBE = "afd_dsv4.evidence.isolation_probe"


@cache
def run_probe(stack):
    return subprocess.run([sys.executable, "-m", PROBE, stack], capture_output=True, text=True, timeout=240)


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stack", STACKS)
def test_no_upstream_symbol_changes_in_any_mode(stack, mode):
    seen = probe(stack)
    assert seen["compared"] > 10_000
    assert seen["modes"][mode]["changes"] == []
    assert seen["modes"][mode]["new_modules"] == []


@pytest.mark.parametrize("stack", STACKS)
def test_the_loader_ran_register_once_a_load_and_recorded_refusals_and_errors(stack):
    modes = probe(stack)["modes"]
    assert [modes[mode]["calls"] for mode in MODES] == [1, 2, 3, 4, 5]
    wrong = "setting mode: 'nonsense'; choose one of off, afd, colocated"
    assert [modes[mode]["error"] for mode in MODES] == [None, None, None, None, wrong]
    assert [modes[mode]["refused"] for mode in MODES] == [False, False, True, True, False]


@pytest.mark.parametrize("stack", STACKS)
def test_no_platform_is_claimed(stack):
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
