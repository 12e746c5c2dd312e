# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The plugin's functions beside a stand-in for vLLM: never raising, never silent, no class changed, heavy nothing.

The stand-in has vLLM's platform instance and its class method, and nothing else; the real one is in
`tests/integration/test_plugin_inert.py`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from afd_dsv4 import gate, plugin
from afd_dsv4.compat import contract
from afd_dsv4.compat import stack as stacks
from afd_dsv4.compat.adapters import ADAPTERS, Adapter
from afd_dsv4.config import CONFIG_VARIABLE, MODE_VARIABLE, Executor, Mode, Settings
from afd_dsv4.geometry import InputError
from tests.unit.test_facts import HOLDS, STACK, configuration

WORKER = "afd_dsv4.compat.adapters.example.AfdDsv4Worker"


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    monkeypatch.setattr(plugin, "_state", None)
    monkeypatch.setattr(plugin, "_reported", set())
    monkeypatch.setattr(stacks, "installed", lambda: STACK)
    monkeypatch.setattr(contract, "verify", lambda _, afd=False: HOLDS)
    monkeypatch.delitem(ADAPTERS, STACK.name)
    for variable in (CONFIG_VARIABLE, MODE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


class Vllm:
    """vLLM's platform with vllm-ascend's class, and configurations as vLLM makes them."""

    def __init__(self, monkeypatch):
        seen = self.seen = []

        class NPUPlatform:
            @classmethod
            def check_and_update_config(cls, vllm_config):
                seen.append(vllm_config)
                vllm_config.parallel_config.worker_cls = vllm_config.parallel_config.worker_cls or gate.NATIVE_WORKER
                resolved.vllm_config = vllm_config

            @classmethod
            def validate_request(cls, processed_inputs, params):
                seen.append((processed_inputs, params))

        NPUPlatform.__module__, NPUPlatform.__qualname__ = "vllm_ascend.platform", "NPUPlatform"
        resolved = SimpleNamespace(vllm_config=None, multistream_dsv4_dsa_overlap=False)
        self.platform = NPUPlatform()
        modules: dict[str, dict[str, Any]] = {
            "vllm": {},
            "vllm.platforms": {"current_platform": self.platform, "_current_platform": self.platform},
            "vllm_ascend.utils": {"get_ascend_device_type": lambda: SimpleNamespace(name="A2")},
            "vllm_ascend.ascend_config": {"get_ascend_config": lambda: resolved},
        }
        for name, values in modules.items():
            module = ModuleType(name)
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)

    def configure(self, worker_cls="", **additional):
        vllm_config = configuration(**additional)
        vllm_config.parallel_config.worker_cls = worker_cls
        vllm_config.scheduler_config.async_scheduling = False
        return self.check(vllm_config)

    def check(self, vllm_config):
        self.platform.check_and_update_config(vllm_config)
        return vllm_config


@pytest.fixture
def vllm(monkeypatch):
    return Vllm(monkeypatch)


@pytest.fixture
def adapter(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "vllm-ascend-0.23.0", Adapter(WORKER, frozenset({gate.MTP})))


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "vllm.plugins.afd_dsv4")
    return caplog


def state():
    found = plugin.state()
    assert found is not None
    return found


def worker_of(vllm_config):
    return vllm_config.parallel_config.worker_cls


# Off.


def test_without_vllm_register_watches_nothing_and_says_nothing(log, monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    plugin.register()
    assert (state().calls, state().watching, state().error) == (1, False, None)
    assert not log.records


def test_off_is_the_default_and_changes_nothing_of_a_configuration(vllm, log):
    plugin.register()
    vllm_config = vllm.configure()
    assert vllm.seen == [vllm_config]
    assert worker_of(vllm_config) == gate.NATIVE_WORKER
    assert vllm_config.additional_config == {}
    assert "mode 'off': off (no other mode was asked for); stack: vllm 0.23.0, vllm-ascend 0.23.0" in log.text
    assert [record.levelname for record in log.records] == ["INFO"]


def test_off_in_the_environment_is_final_and_sets_no_attribute(vllm, log, monkeypatch):
    monkeypatch.setenv(MODE_VARIABLE, "off")
    plugin.register()
    assert vars(vllm.platform) == {}
    assert worker_of(vllm.configure(afd_dsv4={"mode": "colocated"})) == gate.NATIVE_WORKER
    assert (state().watching, state().configurations) == (False, 0)
    assert "additional_config is not looked at" in log.text


# Watching.


def test_no_class_changes_in_any_mode_and_the_instance_has_one_attribute(vllm, adapter, monkeypatch):
    before = dict(vars(type(vllm.platform)))
    for mode in ("", "afd", "colocated", "nonsense"):
        monkeypatch.setenv(MODE_VARIABLE, mode)
        plugin.register()
        assert {**vars(type(vllm.platform))} == before
        assert list(vars(vllm.platform)) == ["check_and_update_config"]


def test_registering_again_watches_once(vllm, log):
    for _ in range(3):
        plugin.register()
    vllm.configure()
    assert (state().calls, state().configurations, len(vllm.seen)) == (3, 1, 1)


def test_unwatching_gives_the_instance_back_as_it_was(vllm):
    plugin.register()
    plugin.unwatch()
    assert vars(vllm.platform) == {}
    vllm.configure()
    assert state().configurations == 0
    plugin.unwatch()


def test_an_attribute_that_somebody_else_had_set_is_called_and_given_back(vllm):
    calls = []
    theirs = vllm.platform.check_and_update_config = calls.append
    plugin.register()
    vllm.configure()
    assert (len(calls), vllm.seen, state().configurations) == (1, [], 1)
    plugin.unwatch()
    assert vars(vllm.platform)["check_and_update_config"] is theirs


def test_a_patch_of_the_class_that_comes_after_us_is_still_called(vllm, monkeypatch):
    plugin.register()
    calls = []
    monkeypatch.setattr(type(vllm.platform), "check_and_update_config", staticmethod(calls.append))
    vllm.configure()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("caller", "watching"),
    [
        ("vllm.v1.engine.core", False),
        ("vllm.v1.worker.worker_base", False),
        ("vllm.engine.arg_utils", True),
        ("a_users_script", True),
    ],
)
def test_where_a_configuration_exists_already_nothing_is_watched(vllm, caller, watching):
    # The loader, and who called it: as vLLM's modules call it, a function each.
    loader: dict[str, Any] = {"__name__": "vllm.plugins", "register": plugin.register}
    exec("def load():\n    register()", loader)
    module: dict[str, Any] = {"__name__": caller, "load": loader["load"]}
    exec("def start():\n    load()", module)
    module["start"]()
    assert state().watching is watching
    assert bool(vars(vllm.platform)) is watching


# On.


def test_on_enters_the_adapters_worker_and_whole_settings(vllm, adapter, log):
    plugin.register()
    given = {"afd_dsv4": {"mode": "colocated"}, "enable_dsa_cp": False}
    vllm_config = vllm.configure(**given)
    assert worker_of(vllm_config) == WORKER
    # The configuration has two drafts a step.
    assert vllm_config.additional_config == {
        **given,
        "afd_dsv4": {
            "mode": "colocated",
            "slots": 2,
            "drafts": 2,
            "fence_timeout_s": 60.0,
            "executor": "stock",
            "tile_tokens": 2048,
        },
    }
    assert state().decision.active
    assert "mode 'colocated': on (colocated was asked for), executor 'stock', 2 slots, " in log.text
    assert [record.levelname for record in log.records] == ["INFO"]


def test_the_operators_own_mapping_is_left_alone(vllm, adapter):
    plugin.register()
    vllm_config = configuration(afd_dsv4={"mode": "colocated"})
    vllm_config.scheduler_config.async_scheduling = False
    theirs = vllm_config.additional_config
    vllm.check(vllm_config)
    assert theirs == {"afd_dsv4": {"mode": "colocated"}}


def test_engines_of_one_process_are_decided_on_one_by_one(vllm, adapter, log):
    plugin.register()
    asked = [{}, {"mode": "colocated"}, {"mode": "off"}, {"mode": "afd"}, {"mode": "colocated", "slots": 3}, {}]
    workers = [worker_of(vllm.configure(afd_dsv4=ours)) == WORKER for ours in asked]
    assert workers == [False, True, False, False, True, False]
    assert state().configurations == 6
    assert len(log.records) == 4  # one for each outcome: off, on, refused, on with three slots


def test_a_configuration_made_from_one_that_is_on_stays_on_whatever_the_environment_says(vllm, adapter, monkeypatch):
    monkeypatch.setenv(MODE_VARIABLE, "colocated")
    plugin.register()
    first = vllm.configure()
    again = vllm.configure(WORKER, **first.additional_config)
    assert (worker_of(first), worker_of(again)) == (WORKER, WORKER)
    assert again.additional_config == first.additional_config


def test_our_worker_named_by_hand_is_refused_where_the_plugin_is_off(vllm, adapter):
    plugin.register()
    with pytest.raises(InputError, match="leave it to the plugin"):
        vllm.configure(WORKER)
    with pytest.raises(InputError, match="dsa_cp: on"):
        vllm.configure(WORKER, afd_dsv4={"mode": "colocated"}, enable_dsa_cp=True)


def test_a_configuration_without_a_model_is_none(vllm, adapter, monkeypatch):
    monkeypatch.setenv(MODE_VARIABLE, "colocated")
    plugin.register()
    vllm_config = configuration()
    vllm_config.model_config = None
    vllm.check(vllm_config)
    assert (state().configurations, state().decision) == (0, None)


# Requests.


class InputProcessor:
    """Asks the platform as vLLM's does."""

    def __init__(self, vllm, vllm_config):
        self.vllm, self.vllm_config = vllm, vllm_config

    def process_inputs(self, prompt, resumable=False):
        self.vllm.platform.validate_request(prompt, "params")
        return prompt


def test_streaming_input_is_refused_by_name_where_the_plugin_is_on_and_nowhere_else(vllm, adapter):
    plugin.register()
    native, ours = vllm.configure(), vllm.configure(afd_dsv4={"mode": "colocated"})
    for vllm_config, refused in ((native, False), (ours, True)):
        engine = InputProcessor(vllm, vllm_config)
        assert engine.process_inputs("whole") == "whole"
        assert vllm.seen[-1] == ("whole", "params")
        if refused:
            with pytest.raises(
                InputError, match=r"streaming input: .* keep its place while it waits; send whole prompts"
            ):
                engine.process_inputs("a part", resumable=True)
        else:
            assert engine.process_inputs("a part", resumable=True) == "a part"


def test_requests_are_watched_from_the_first_engine_with_the_plugin_until_unwatched(vllm, adapter):
    plugin.register()
    vllm.configure()
    assert list(vars(vllm.platform)) == ["check_and_update_config"]
    for _ in range(2):
        vllm.configure(afd_dsv4={"mode": "colocated"})
        assert list(vars(vllm.platform)) == ["check_and_update_config", "validate_request"]
    plugin.unwatch()
    assert vars(vllm.platform) == {}


def test_a_platform_that_refuses_a_request_itself_is_heard(vllm, adapter, monkeypatch):
    plugin.register()
    ours = vllm.configure(afd_dsv4={"mode": "colocated"})

    def refuse(*_):
        raise ValueError("theirs")

    monkeypatch.setattr(type(vllm.platform), "validate_request", staticmethod(refuse))
    with pytest.raises(ValueError, match="theirs"):
        InputProcessor(vllm, ours).process_inputs("whole")


# Refusals and errors.


def test_a_mode_that_is_refused_is_one_warning_with_every_reason_and_native_code_runs(vllm, log):
    plugin.register()
    for _ in range(2):
        vllm_config = vllm.configure(afd_dsv4={"mode": "colocated"}, enable_dsa_cp=True)
        assert worker_of(vllm_config) == gate.NATIVE_WORKER
        assert vllm_config.additional_config["afd_dsv4"] == {"mode": "colocated"}
    assert [record.levelname for record in log.records] == ["WARNING"]
    for reason in ("has no adapter yet", "dsa_cp: on"):
        assert reason in log.text


def test_a_stack_that_is_not_as_recorded_is_refused_and_named(vllm, adapter, log, monkeypatch):
    drift = contract.Drift("vllm:f", contract.DriftKind.BODY, "", "another body", "used", "consequence")
    monkeypatch.setattr(contract, "verify", lambda _, afd=False: contract.Verdict(True, (drift,), STACK.name))
    plugin.register()
    assert worker_of(vllm.configure(afd_dsv4={"mode": "colocated"})) == gate.NATIVE_WORKER
    assert "1 differences from what was recorded, such as: vllm:f: edited body: another body" in log.text


def test_settings_that_cannot_be_read_end_the_configuration_with_one_line(vllm, adapter, log):
    plugin.register()
    with pytest.raises(InputError) as caught:
        vllm.configure(afd_dsv4={"mod": "colocated"})
    assert "unknown 'mod'; known are mode, slots, drafts, fence_timeout_s" in str(caught.value)
    (record,) = log.records
    assert record.levelname == "ERROR"
    assert record.getMessage().endswith(str(caught.value))
    assert "\n" not in record.getMessage()
    # The next engine is another matter.
    assert worker_of(vllm.configure(afd_dsv4={"mode": "colocated"})) == WORKER
    assert state().error is None


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        (
            CONFIG_VARIABLE,
            '{"modes": "afd"}',
            "AFD_DSV4_CONFIG: unknown 'modes'; known are mode, slots, drafts, fence_timeout_s",
        ),
        (CONFIG_VARIABLE, '{"mode":\n', "is no JSON object"),
        (MODE_VARIABLE, "turbo", "setting mode: 'turbo'; choose one of off, afd, colocated"),
    ],
)
def test_an_environment_that_cannot_be_read_lets_register_be_and_ends_the_configuration(
    vllm, log, monkeypatch, variable, text, says
):
    monkeypatch.setenv(variable, text)
    plugin.register()
    plugin.register()
    assert says in state().error
    assert [record.levelname for record in log.records] == ["ERROR"]
    assert log.records[0].getMessage() == f"afd-dsv4 {plugin.__version__}, stays off: {state().error}"
    with pytest.raises(InputError):
        vllm.configure()
    assert len(log.records) == 1  # the same line


def test_a_setting_in_two_places_ends_the_configuration(vllm, monkeypatch):
    monkeypatch.setenv(MODE_VARIABLE, "afd")
    plugin.register()
    with pytest.raises(InputError, match="one place only"):
        vllm.configure(afd_dsv4={"mode": "colocated"})


def test_register_recovers_once_the_settings_can_be_read(vllm, monkeypatch):
    monkeypatch.setenv(CONFIG_VARIABLE, "{")
    plugin.register()
    assert state().error
    monkeypatch.delenv(CONFIG_VARIABLE)
    plugin.register()
    assert state().error is None


def test_a_mistake_of_ours_is_an_error_line_and_native_code_runs(vllm, adapter, log, monkeypatch):
    def broken(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(plugin, "decide", broken)
    plugin.register()
    assert worker_of(vllm.configure(afd_dsv4={"mode": "colocated"})) == gate.NATIVE_WORKER
    assert "stays off: RuntimeError: planted" in log.text
    assert state().error == "RuntimeError: planted"


def test_a_platform_that_takes_no_attribute_leaves_the_plugin_off(monkeypatch, log):
    module = ModuleType("vllm.platforms")
    module.current_platform = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    plugin.register()
    assert state().watching is False
    assert "stays off: " in log.text


def test_register_survives_a_logger_that_fails_too(vllm, monkeypatch):
    class BrokenLogger:
        def log(self, *args):
            raise OSError("disk full")

    monkeypatch.setattr(plugin, "_logger", BrokenLogger())
    monkeypatch.setenv(MODE_VARIABLE, "off")
    plugin.register()
    assert state().error == "OSError: disk full"


def test_a_forked_child_says_its_own_line(vllm, log, monkeypatch):
    plugin.register()
    vllm.configure()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    vllm.configure()
    assert len(log.records) == 2
    assert state().pid == 1


def test_settings_of_an_engine_are_part_of_the_state(vllm, adapter):
    plugin.register()
    vllm.configure(afd_dsv4={"mode": "colocated", "slots": 3})
    assert state().settings == Settings(Mode.COLOCATED, slots=3)
    assert state().decision.settings == Settings(Mode.COLOCATED, slots=3, drafts=2, executor=Executor.STOCK)
    assert state().stack == "vllm 0.23.0, vllm-ascend 0.23.0"


# What it costs a process.


def test_platform_claims_none():
    assert plugin.platform() is None


def imported_by(code):
    """Top-level packages that a fresh interpreter has loaded after this, beyond the standard library and our own."""
    script = (
        f"import sys; before = set(sys.modules); {code}\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "print(sorted(new))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_loading_and_registering_imports_our_own_modules_and_the_standard_library_only():
    assert imported_by("from afd_dsv4 import plugin; plugin.register(); plugin.platform()") == "['afd_dsv4']"


def test_a_process_that_only_loads_the_plugin_loads_few_modules_of_it():
    code = (
        "import sys; from afd_dsv4 import plugin; plugin.register()\n"
        "print(*(name for name in sys.modules if name.startswith('afd_dsv4')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "afd_dsv4",
        "afd_dsv4.config",
        "afd_dsv4.gate",
        "afd_dsv4.geometry",
        "afd_dsv4.plugin",
        "afd_dsv4.tail",
        "afd_dsv4.tail.rows",
        "afd_dsv4.workspace",
        "afd_dsv4.workspace.sizing",
    }
