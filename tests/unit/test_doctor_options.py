# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the doctor makes of options before a server starts, on machines with vLLM, without it, and with half of it."""

from __future__ import annotations

import ast
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.compat.stack import KNOWN, origin_of, package_folder, release
from afd_dsv4.doctor import machine as machines
from afd_dsv4.doctor import options as reader
from afd_dsv4.doctor import planned
from afd_dsv4.doctor.facts import Severity
from afd_dsv4.doctor.machine import Machine, Plugin
from afd_dsv4.doctor.options import LOOKED_AT, RECORDED, Options, findings, options_of
from afd_dsv4.geometry import MOST, STACKS, InputError, preset
from tests.doctor.cases import ALONE, WITH_ASCEND, Packages, machine
from tests.doctor.serve_options import names_in
from tests.unit.test_doctor import asked

ON: dict[str, Any] = {"additional_config": {"afd_dsv4": {"mode": "colocated"}}}
GOOD = {**ON, "enable_prefix_caching": False, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
WHOLE: Packages = {**WITH_ASCEND, "vllm": ("0.23.0", {})}


def answer(
    tmp_path: Path, options: dict[str, Any], *arguments: str, packages: Packages | None = None, **environment: str
) -> tuple[dict[str, Any], int]:
    """Of one machine, which has nothing unless `packages` says what."""
    place = machine(tmp_path, packages or {})
    found, status, _ = asked(place, "--config", "-", *arguments, given=json.dumps(options).encode(), **environment)
    return found, status


def codes(found: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in found["findings"]]


# Without vLLM.


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"enable_lora": True}, "LoRA: on"),
        ({"enable_prefix_caching": None}, "prefix caching: on"),  # vLLM's default
        ({"pipeline_parallel_size": 2}, "pipeline parallelism: 2"),
        ({"scheduling_policy": "priority"}, "scheduling policy: priority"),
        ({"spec_method": "ngram", "spec_tokens": 2}, "speculative decoding: ngram"),
        ({"kv_offloading_size": 1.5}, "KV transfer: kv_offloading_size"),
    ],
)
@pytest.mark.parametrize("stack", STACKS)
def test_what_depends_on_options_alone_is_refused_without_vllm_with_the_reasons_that_vllms_machine_gives(
    wrong: dict[str, Any], says: str, stack: str
) -> None:
    asked_for = {**GOOD, **wrong}
    limits = {"max_num_batched_tokens": 8192, "block_size": 128, "max_num_seqs": 4}
    one = next(known for known in KNOWN if known.name == stack)
    there = machines.InstalledStack(
        *("3", "x", None, None, one.vllm, one.vllm_ascend or "0.1", None), vllm_ascend_commit=one.commit
    )
    plugins = (Plugin("vllm.platform_plugins", "ascend", "vllm_ascend:register", "x", True),)
    with_vllm = planned.plan(asked_for, Machine(there, None, None, plugins, {}), {}, preset("flash"), **limits)
    without = planned.plan(asked_for, Machine(None, None, None, (), {}), {}, preset("flash"), **limits, stack=stack)
    assert with_vllm.decision is not None
    assert without.decision == with_vllm.decision
    assert any(reason.startswith(says) for reason in without.decision.reasons)
    assert f"the stack is {stack}, its code is as recorded, its plugins are loaded" in without.assumed


def test_without_vllm_good_options_are_on_and_bad_ones_a_problem_for_the_stack_that_is_named(tmp_path: Path) -> None:
    found, status = answer(tmp_path / "good", GOOD)
    assert (status, found["findings"], found["gate"]["active"]) == (0, [], True)
    assert "the stack is vllm-ascend-0.23.0 (--stack says otherwise)" in " ".join(found["gate"]["assumed"])
    found, status = answer(tmp_path / "bad", ON, "--stack", "vllm-ascend-80d8c194f")
    assert (status, codes(found), found["gate"]["active"]) == (1, ["gate-refuses"], False)
    assert "the stack is vllm-ascend-80d8c194f, its code" in " ".join(found["gate"]["assumed"])


def test_without_vllm_an_option_of_another_type_deep_inside_is_a_problem_too(tmp_path: Path) -> None:
    found, status = answer(tmp_path, {**GOOD, "speculative_config": {"method": 3}})
    assert (status, codes(found)) == (1, ["options"])


def test_mode_afd_is_judged_without_vllm_for_the_stack_that_afd_plugin_was_made_for(tmp_path: Path) -> None:
    options = {"additional_config": {"afd_dsv4": {"mode": "afd", "executor": "afd"}, "afd": {"connector": "Other"}}}
    found, status = answer(tmp_path, options)
    assert status == 1
    reasons = " ".join(found["gate"]["reasons"])
    assert "AFD connector: Other" in reasons
    assert "not installed" not in reasons
    assert "no adapter" not in reasons
    assert "kernels" not in reasons
    for said in ("the stack is vllm-ascend-80d8c194f", "afd-plugin-85e826e is installed", "the project's kernels"):
        assert said in " ".join(found["gate"]["assumed"])


def test_an_allowlist_that_leaves_ascend_out_is_seen_without_vllm(tmp_path: Path) -> None:
    found, _ = answer(tmp_path, GOOD, VLLM_PLUGINS="afd_dsv4")
    assert found["gate"]["reasons"][0].startswith("vLLM's platform: none of vllm-ascend's, which is not loaded")


# Off in the environment.


@pytest.mark.parametrize("packages", [{}, WHOLE])
def test_off_in_the_environment_is_final_and_no_setting_elsewhere_is_in_its_way(
    tmp_path: Path, packages: Packages
) -> None:
    """As `plugin.register`, which asks it first; and any other mode in two places is a problem (negative control)."""
    bad = {"additional_config": {"afd_dsv4": {"mode": "colocated", "slots": "many"}}}
    found, status = answer(tmp_path / "off", bad, packages={**packages, **ALONE}, AFD_DSV4_MODE=" Off")
    assert found["gate"]["mode"] == "off"
    assert found["gate"]["reasons"] == ["the environment says so; additional_config is not looked at"]
    assert {"settings", "gate-refuses"}.isdisjoint(codes(found))
    assert status == bool(codes(found))
    found, _ = answer(tmp_path / "on", GOOD, packages={**packages, **ALONE}, AFD_DSV4_MODE="colocated")
    assert "settings" in codes(found)


# The reader.


def test_an_option_with_no_before_it_is_the_option_set_to_false(tmp_path: Path) -> None:
    text = json.dumps({"no_enable_prefix_caching": True, "--no-async-scheduling": True})
    assert options_of(text, "c") == {"enable_prefix_caching": False, "async_scheduling": False}
    negative = {"no_enable_prefix_caching": True, "no_async_scheduling": True, "enforce_eager": True}
    found, status = answer(tmp_path, {**ON, **negative})
    assert (status, found["gate"]["active"]) == (0, True)
    assert (found["server"]["prefix_caching"], found["server"]["async_scheduling"]) == (False, False)


@pytest.mark.parametrize(
    ("written", "is_read_as"),
    [
        ({"max_model_len": "128k"}, 128_000),
        ({"max_model_len": "128K"}, 131_072),
        ({"max_num_batched_tokens": " 25.6k "}, 25_600),
        ({"max_num_batched_tokens": "1M"}, 1 << 20),
        ({"max_num_batched_tokens": "2m"}, 2_000_000),
        ({"max_num_batched_tokens": "8192"}, 8192),
        ({"max_model_len": "auto"}, -1),
        ({"max_model_len": -1}, -1),
        ({"ubatch_size": 0}, 0),
        ({"max_num_seqs": MOST}, MOST),
    ],
)
def test_a_count_is_read_as_vllm_reads_it(written: dict[str, Any], is_read_as: int) -> None:
    assert list(options_of(json.dumps(written), "c").values()) == [is_read_as]


@pytest.mark.parametrize(
    "text", ["128k", "1K", "25.6k", " 2M", "1.5K", "0x10", "128", "12.5", "2g", "1T", "k", "", "1kk"]
)
def test_a_unit_is_what_it_is_in_vllms_own_function(text: str) -> None:
    folder = package_folder("vllm")
    if folder is None:
        pytest.skip("vllm is not installed")
    tree = ast.parse((folder / "utils" / "argparse_utils.py").read_text(encoding="utf-8"))
    node = next(one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "human_readable_int")
    names: dict[str, Any] = {"re": __import__("re"), "argparse": __import__("argparse")}
    exec(compile(ast.Module([node], []), "vllm", "exec"), names)
    try:
        theirs = names["human_readable_int"](text)
    except (ValueError, names["argparse"].ArgumentTypeError):
        theirs = None
    assert reader._with_unit(text) == theirs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ('{"max_model_len": 131072.0}', "max_model_len is 131072.0; give a whole number of at least 1"),
        ('{"max_model_len": -1.0}', "max_model_len is -1.0; give a whole number"),
        ('{"max_model_len": "1.5K"}', "max_model_len is '1.5K'; give a whole number"),
        ('{"max_model_len": true}', "max_model_len is True; give a whole number"),
        ('{"max_num_seqs": "16"}', "max_num_seqs is '16'; give a whole number"),
        ('{"max_num_batched_tokens": 1' + "0" * 26 + "}", "and at most 1,099,511,627,776"),
        ('{"max_num_batched_tokens": "9999999999T"}', "and at most 1,099,511,627,776"),
        ('{"ubatch_size": -1}', "ubatch_size is -1; give a whole number of at least 0"),
        ('{"async_scheduling": "yes"}', "async_scheduling is 'yes'; give true or false, without quotes"),
        ('{"enable_prefix_caching": "false"}', "enable_prefix_caching is 'false'; give true or false"),
        ('{"enable_lora": 1}', "enable_lora is 1; give true or false"),
        ('{"no_max_num_seqs": true}', "max_num_seqs is False; give a whole number"),
        ('{"no_enable_lora": false}', "'no_enable_lora' is False; give true, or 'enable_lora' instead"),
        ('{"no_enable_lora": true, "enable-lora": true}', "'enable_lora' stands there twice, under one name or two"),
        ('{"dtype": 16}', "dtype is 16; give a text"),
        ('{"kv_offloading_size": "4"}', "kv_offloading_size is '4'; give a number"),
        ('{"speculative_config": 3}', "speculative_config is 3; give an object"),
        ('{"additional_config": "{"}', "additional_config is '{'; give a JSON object, each name in it once"),
        ('{"compilation-config.cudagraph_mode": "FULL"}', "give 'compilation_config' as an object"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused_by_name_whatever_the_mode(options: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        options_of(options, "c.json")
    assert str(error.value).startswith("config 'c.json': ")
    assert says in str(error.value)


def test_every_option_that_the_gate_is_asked_about_has_a_type_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none is read by the gate's facts and dropped by the reader."""
    used: set[str] = set()

    class Watched(Options):
        def _read(self, name: str, kind: type, otherwise: Any) -> Any:
            used.update([name] * (not self._path))
            return super()._read(name, kind, otherwise)

        def choice(self, name: str, *names: Any) -> str | None:
            used.update([name] * (not self._path))
            return super().choice(name, *names)

    monkeypatch.setattr(planned, "Options", Watched)
    planned.plan(ON, Machine(None, None, None, (), {}), {}, None, **dict.fromkeys(LIMITS))
    assert len(used) > 15
    assert used <= LOOKED_AT
    assert {*planned._TRANSFERS, planned._OFFLOADING} <= LOOKED_AT


LIMITS = ("max_num_batched_tokens", "block_size", "max_num_seqs")


def test_options_that_were_refused_are_not_judged_as_if_none_were_given(tmp_path: Path) -> None:
    found, status, _ = asked(tmp_path, "--config", "-", given=b'{"enable_lora": "no"}', AFD_DSV4_MODE="colocated")
    assert (status, found["findings"]) == (2, [])
    assert found["gate"]["active"] is None


def test_what_a_server_said_of_its_refusal_is_not_said_twice_from_the_options_in_its_log(tmp_path: Path) -> None:
    found, _, _ = asked(tmp_path, "--log", "plugin_refused.log")
    assert (codes(found), found["gate"]["refused"]) == (["plugin-refused"], True)
    found, _, _ = asked(tmp_path, "--log", "plugin_refused.log", "--config", "lora.json")  # options of a later start
    assert codes(found) == ["plugin-refused", "gate-refuses"]


# Names.


def test_a_misspelt_option_is_a_problem_that_names_the_one_that_was_meant(tmp_path: Path) -> None:
    for at, wrong in enumerate(("max_num_batched_tokns", "max-num-batched-token")):
        found, status = answer(tmp_path / str(at), {wrong: 4096, "tensor-parallel-size": 8, "port": 80})
        assert (status, codes(found)) == (1, ["unknown-option"])
        assert "did you mean max_num_batched_tokens?" in found["findings"][0]["remedies"][0]
        assert found["findings"][0]["numbers"] == {"options": [wrong.replace("-", "_")]}


def test_a_name_is_held_to_the_release_that_the_options_are_for(tmp_path: Path) -> None:
    """`watermark` came with 0.26."""
    assert not list(findings({"watermark": 0.1}, "0.26.0+cpu"))
    assert [finding.code for finding in findings({"watermark": 0.1}, "0.23.0")] == ["unknown-option"]
    assert not list(findings({"watermark": 0.1}, None))  # not known for which
    assert [finding.title for finding in findings({"watermerk": 0.1}, None)] == [
        "vLLM 0.23.0 or 0.26.0 has no option 'watermerk'"
    ]
    found, _ = answer(tmp_path / "0.23", {"watermark": 0.1}, packages=WHOLE)
    assert "unknown-option" in codes(found)
    found, status = answer(tmp_path / "0.26", {"watermark": 0.1}, "--stack", "vllm-ascend-80d8c194f")
    assert (status, codes(found)) == (0, [])


def test_of_a_release_that_is_not_known_it_is_said_which_names_nobody_looked_at() -> None:
    (note,) = findings({"max_num_seqs": 4, "port": 80, **{f"x{n}": 1 for n in range(20)}}, "9.9")
    assert (note.code, note.severity) == ("not-looked-at", Severity.NOTE)
    assert note.title.startswith("not looked at: 'port', 'x0', ")
    assert note.title.endswith(" and 11 others")
    assert not list(findings({"max_num_seqs": 4}, "9.9"))


def test_many_and_long_unknown_names_are_answered_at_once_and_shortened() -> None:
    (found,) = findings({"a" * 100_000 + str(n): 1 for n in range(1000)}, "0.23.0")
    assert len(found.title) < 1000
    assert len(found.remedies) == 10


def test_the_recorded_names_are_those_of_the_supported_releases_and_of_the_installed_one() -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert set(recorded) == {stack.vllm for stack in KNOWN}
    for names in recorded.values():
        assert set(names) >= LOOKED_AT
        assert not [name for name in names if name.startswith("no_")]  # which the reader takes for x set to false
    folder = package_folder("vllm")
    if folder is None:
        pytest.skip("vllm is not installed")
    version = release(origin_of(folder).version)
    assert names_in(folder) == recorded.get(version), "python -m tests.doctor.serve_options writes them"


# Questions that fail.


def broken(tmp_path: Path, packages: Packages) -> Path:
    """A machine where one distribution has entry points that are no text."""
    place = machine(tmp_path, {**packages, "bad": ("1", {})})
    (place / "bad-1.dist-info" / "entry_points.txt").write_bytes(b"[vllm.platform_plugins]\nfoo = \x80\xff bar\n")
    return place


def test_one_broken_distribution_hides_no_other_and_is_a_problem(tmp_path: Path) -> None:
    found, status, _ = asked(broken(tmp_path, WITH_ASCEND))
    assert status == 1
    assert "ascend" in {plugin["name"] for plugin in found["plugins"]}
    assert found["failed"]["plugins"].startswith("those of bad: UnicodeDecodeError")
    assert "unreadable" in codes(found)


def test_of_plugins_that_cannot_be_read_the_gate_says_nothing_and_what_it_assumes(tmp_path: Path) -> None:
    options = json.dumps(GOOD).encode()
    packages = {"vllm": ("0.23.0", {}), "vllm_ascend": ("0.23.0", {})}
    place = broken(tmp_path / "broken", packages)
    found, status, _ = asked(place, "--config", "-", given=options)
    assert status == 1
    assert not [reason for reason in found["gate"]["reasons"] if "platform" in reason]
    assert "plugins that cannot be read here are loaded" in found["gate"]["assumed"]
    found, _, _ = asked(place, "--config", "-", given=options, VLLM_PLUGINS="x")  # the allowlist can be read
    assert found["gate"]["reasons"][0].startswith("vLLM's platform")
    whole, _, _ = asked(machine(tmp_path / "whole", packages), "--config", "-", given=options)  # negative control
    assert whole["gate"]["reasons"][0].startswith("vLLM's platform")


def test_every_question_that_fails_is_a_problem_and_costs_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("disk")

    stack = machines.InstalledStack("3", "x", None, None, "0.23.0", "0.23.0", None)
    monkeypatch.setattr(machines, "installed", lambda: stack)
    for name in ("verify", "_plugins", "_patches"):
        monkeypatch.setattr(machines, name, fails)
    here = machines.survey({})
    assert set(here.failed) == {"drift", "plugins", "patches"}
    found = [finding for finding in machines.findings(here, {}, False) if finding.code == "unreadable"]
    assert [finding.severity for finding in found] == [Severity.PROBLEM] * 3
    plan = planned.plan(GOOD, here, {}, None, **dict.fromkeys(LIMITS))
    assert plan.decision is not None
    assert plan.decision.active
    assert "the code of the stack is as recorded" in plan.assumed
    monkeypatch.setattr(machines, "installed", fails)
    here = machines.survey({})
    assert "stack" in here.failed
    assert "unreadable" in [finding.code for finding in machines.findings(here, {}, False)]


def test_plugins_are_those_that_vllm_itself_would_be_given() -> None:
    """Where nothing is broken: the same entry points as `importlib.metadata` hands out, in the same order."""
    failed: dict[str, str] = {}
    ours = [(plugin.group, plugin.name, plugin.value) for plugin in machines._plugins({}, failed)]
    groups = (machines.PLATFORM_GROUP, machines.GENERAL_GROUP)
    theirs = [(one.group, one.name, one.value) for group in groups for one in metadata.entry_points(group=group)]
    assert not failed
    assert ours == theirs


def test_a_distribution_that_another_of_its_name_hides_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = machine(tmp_path / "hidden", {"vllm-plugin.x": ("1", {"vllm.platform_plugins": {"old": "x:old"}})})
    first = machine(tmp_path / "first", {"vllm_plugin_x": ("2", {"vllm.platform_plugins": {"new": "x:new"}})})
    for folder in (hidden, first):
        monkeypatch.syspath_prepend(str(folder))
    assert [plugin.name for plugin in machines._plugins({}, {}) if plugin.value.startswith("x:")] == ["new"]


def test_a_folder_that_an_installation_left_behind_is_no_failure(tmp_path: Path) -> None:
    place = machine(tmp_path, WITH_ASCEND)
    (place / "half-1.dist-info").mkdir()
    found, _, _ = asked(place)
    assert found["failed"] == {}
