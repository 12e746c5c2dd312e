# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The gate and the plugin functions without vLLM: off by default, never silent, never raising, nothing heavy loaded."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from afd_dsv4 import gate, plugin
from afd_dsv4.config import CONFIG_VARIABLE, MODE_VARIABLE, Mode, Settings


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    monkeypatch.setattr(plugin, "_state", None)
    for variable in (CONFIG_VARIABLE, MODE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


def registered(caplog):
    with caplog.at_level(logging.INFO, "vllm.plugins.afd_dsv4"):
        plugin.register()
    state = plugin.state()
    assert state is not None
    return state


def test_off_is_the_default_and_no_refusal():
    decision = gate.decide(Settings())
    assert (decision.requested, decision.active, decision.refused) == (Mode.OFF, False, False)


@pytest.mark.parametrize("mode", [Mode.AFD, Mode.COLOCATED])
def test_a_mode_that_this_release_lacks_is_refused_and_says_so(mode):
    decision = gate.decide(Settings(mode))
    assert decision.refused
    assert not decision.active
    assert "not available in this release" in decision.line()


def test_a_decision_without_a_reason_cannot_be_made():
    with pytest.raises(ValueError, match="reason"):
        gate.Decision(Mode.OFF, active=False, refused=False, reasons=())


def test_a_decision_cannot_be_active_and_refused():
    with pytest.raises(ValueError, match="at once"):
        gate.Decision(Mode.AFD, active=True, refused=True, reasons=("x",))


def test_register_logs_one_line_however_often_it_runs(caplog):
    with caplog.at_level(logging.INFO, "vllm.plugins.afd_dsv4"):
        for _ in range(3):
            plugin.register()
    assert len(caplog.records) == 1
    assert "mode 'off': off" in caplog.text
    state = plugin.state()
    assert state is not None
    assert state.calls == 3
    assert state.error is None


def test_register_warns_when_a_mode_was_asked_for_and_not_given(caplog, monkeypatch):
    monkeypatch.setenv(MODE_VARIABLE, "afd")
    state = registered(caplog)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stays off" in caplog.text
    assert state.decision == gate.decide(Settings(Mode.AFD))


def test_register_reads_all_settings_from_one_variable(caplog, monkeypatch):
    monkeypatch.setenv(CONFIG_VARIABLE, '{"mode": "colocated", "slots": 3}')
    state = registered(caplog)
    assert state.settings == Settings(Mode.COLOCATED, slots=3)
    assert "mode 'colocated': refused, stays off" in caplog.text


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        (CONFIG_VARIABLE, '{"modes": "afd"}', "settings: unknown 'modes'; known are mode, slots, drafts"),
        (CONFIG_VARIABLE, '{"mode":\n', "is no JSON object"),
        (MODE_VARIABLE, "turbo", "setting mode: 'turbo'; choose one of off, afd, colocated"),
    ],
)
def test_settings_that_cannot_be_read_leave_the_plugin_off_with_one_error_line(
    caplog, monkeypatch, variable, text, says
):
    monkeypatch.setenv(variable, text)
    registered(caplog)
    state = registered(caplog)  # the second time says nothing new
    assert (state.calls, state.settings, state.decision) == (2, None, None)
    assert says in state.error
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    line = caplog.records[0].getMessage()
    assert "stays off: " in line
    assert line.endswith(state.error)
    assert "\n" not in line


def test_register_recovers_once_the_settings_can_be_read(caplog, monkeypatch):
    monkeypatch.setenv(CONFIG_VARIABLE, "{")
    assert registered(caplog).error
    monkeypatch.delenv(CONFIG_VARIABLE)
    assert registered(caplog).error is None
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


def test_register_survives_a_gate_that_fails_and_keeps_the_error(caplog, monkeypatch):
    def broken(settings):
        raise RuntimeError("planted")

    monkeypatch.setattr(plugin, "decide", broken)
    assert registered(caplog).error == "RuntimeError: planted"
    assert "stays off: RuntimeError: planted" in caplog.text


def test_register_survives_a_logger_that_fails_too(monkeypatch):
    class BrokenLogger:
        def log(self, *args):
            raise OSError("disk full")

        error = log

    monkeypatch.setattr(plugin, "_logger", BrokenLogger())
    plugin.register()
    state = plugin.state()
    assert state is not None
    assert state.error == "OSError: disk full"


def test_platform_claims_none():
    assert plugin.platform() is None


def test_loading_and_registering_imports_none_of_the_stack():
    code = (
        "import sys; from afd_dsv4 import plugin; plugin.register(); plugin.platform();"
        "print(sorted({'torch', 'torch_npu', 'vllm', 'vllm_ascend', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
