# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The gate and the plugin functions without vLLM: off by default, never silent, never raising, nothing heavy loaded."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from afd_dsv4 import gate, plugin


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch):
    monkeypatch.setattr(plugin, "_state", None)
    monkeypatch.delenv(gate.MODE_VARIABLE, raising=False)


@pytest.mark.parametrize("requested", [None, "", "  ", "off", " OFF "])
def test_off_is_the_default_and_no_refusal(requested):
    decision = gate.decide(requested)
    assert (decision.requested, decision.active, decision.refused) == ("off", False, False)


@pytest.mark.parametrize("requested", ["afd", "colocated", "AFD"])
def test_a_mode_that_this_release_lacks_is_refused_and_says_so(requested):
    decision = gate.decide(requested)
    assert decision.refused
    assert not decision.active
    assert "not available in this release" in decision.line()


def test_an_unknown_mode_is_refused_with_what_was_found_and_what_to_do():
    line = gate.decide("turbo").line()
    assert "'turbo'" in line
    assert "unknown mode" in line
    assert "off, afd, colocated" in line


def test_a_decision_without_a_reason_cannot_be_made():
    with pytest.raises(ValueError, match="reason"):
        gate.Decision("off", active=False, refused=False, reasons=())


def test_a_decision_cannot_be_active_and_refused():
    with pytest.raises(ValueError, match="at once"):
        gate.Decision("afd", active=True, refused=True, reasons=("x",))


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
    monkeypatch.setenv(gate.MODE_VARIABLE, "afd")
    with caplog.at_level(logging.INFO, "vllm.plugins.afd_dsv4"):
        plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stays off" in caplog.text


def test_register_survives_a_gate_that_fails_and_keeps_the_error(caplog, monkeypatch):
    def broken(requested):
        raise RuntimeError("planted")

    monkeypatch.setattr(plugin, "decide", broken)
    with caplog.at_level(logging.INFO, "vllm.plugins.afd_dsv4"):
        plugin.register()
    state = plugin.state()
    assert state is not None
    assert state.error == "RuntimeError: planted"
    assert "registration failed" in caplog.text


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
