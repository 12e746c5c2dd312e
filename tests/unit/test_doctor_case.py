# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the doctor counts with is what the gate decided: one answer has one size of tails and slots."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.config import Mode, Settings
from afd_dsv4.doctor import Given, Report, diagnose
from afd_dsv4.doctor.case import drafts_and_graphs
from afd_dsv4.doctor.facts import Server
from afd_dsv4.doctor.machine import Machine
from afd_dsv4.doctor.planned import Planned
from afd_dsv4.gate import FULL_GRAPHS, MTP, decide, off
from afd_dsv4.geometry import preset
from afd_dsv4.workspace.sizing import WorkspaceSizes
from tests.unit.test_gate import PLAIN

SERVER = Server(block_size=128, max_num_batched_tokens=32_768, max_num_seqs=64, max_model_len=133_120)
COLOCATED = Settings(Mode.COLOCATED)
#: As the recipe of Flash, with two drafts.
FACTS = replace(
    PLAIN,
    max_num_seqs=64,
    graphs="FULL_DECODE_ONLY",
    speculative_method=MTP,
    speculative_tokens=2,
    covers=frozenset({FULL_GRAPHS, MTP}),
)
RECIPE = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
}


def ask(monkeypatch: pytest.MonkeyPatch, planned: Planned, given: Given) -> Report:
    monkeypatch.setattr("afd_dsv4.doctor.machine.survey", lambda _: Machine(None, None, None, (), {}))
    monkeypatch.setattr("afd_dsv4.doctor.planned.plan", lambda *_, **__: planned)
    report = diagnose(given, {}, preset)
    assert report.errors == ()
    return report


def on(settings: Settings = COLOCATED, **facts: Any) -> Planned:
    return Planned(settings, decide(settings, replace(FACTS, **facts)))


def sizes_of(planned: Planned) -> WorkspaceSizes:
    assert planned.decision
    assert planned.decision.sizes
    return planned.decision.sizes


def test_a_server_that_the_gate_lets_have_the_plugin_is_judged_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Natively that memory is not enough, neither for a start nor for the prompt."""
    given = Given(model="flash", server=SERVER, prompt_tokens=63_778, hbm_gib=20.0)
    report = ask(monkeypatch, on(), given)
    assert [found.code for found in report.findings] == ["prompt-fits"]
    assert (report.server.plugin, report.server.sources["plugin"]) == (True, "gate")
    free = (20 * 2**30 - sizes_of(on()).device_bytes) // (22 * (131_072 + 16_640)) - 1
    assert f"1,127 of {free:,} KV blocks" in report.findings[0].title
    native = ask(monkeypatch, Planned(Settings(), off("nobody asked")), given)
    assert [found.code for found in native.findings] == ["cache-too-small", "prompt-never-fits"]
    assert native.server.plugin is None


def test_what_a_page_or_a_log_says_comes_before_the_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = Given(model="flash", server=replace(SERVER, plugin=False), prompt_tokens=63_778, hbm_gib=20.0)
    report = ask(monkeypatch, on(), given)
    assert (report.server.plugin, report.server.sources["plugin"]) == (False, "given")
    # A server that ran without a line of ours ran without the plugin.
    (tmp_path / "log").write_text("INFO 11-30 09:12:04 [x.py:1] Using max model len 133120\n")
    report = ask(monkeypatch, on(), replace(given, server=SERVER, log=str(tmp_path / "log")))
    assert report.server.plugin is None
    assert "prompt-never-fits" in [found.code for found in report.findings]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (COLOCATED, {}),
        (replace(COLOCATED, slots=4), {}),
        (replace(COLOCATED, drafts=5), {}),
        (COLOCATED, {"graphs": "NONE", "speculative_tokens": 0, "speculative_method": None}),
    ],
)
def test_the_sizes_are_those_of_the_gate_with_drafts_and_the_slot_of_graphs(
    settings: Settings, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = on(settings, **facts)
    prompt = Given(model="flash", server=SERVER, prompt_tokens=133_000, hbm_gib=3.0)
    report = ask(monkeypatch, planned, prompt)
    assert report.sizes == sizes_of(planned)
    free = (3 * 2**30 - sizes_of(planned).device_bytes) // (22 * (131_072 + 16_640)) - 1
    (found,) = [one for one in report.findings if one.code == "prompt-never-fits"]
    assert found.numbers["plugin"]["free_blocks"] == free


def test_the_plugin_is_offered_with_the_sizes_that_it_then_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A native server that drafts and has graphs."""
    (tmp_path / "c.json").write_text(json.dumps(RECIPE))
    config = str(tmp_path / "c.json")
    given = Given(model="flash", server=SERVER, prompt_tokens=63_778, hbm_gib=20.0, config=config)
    report = ask(monkeypatch, Planned(Settings(), off("nobody asked")), given)
    assert report.sizes == sizes_of(on())
    (found,) = [one for one in report.findings if one.code == "prompt-never-fits"]
    mib = sizes_of(on()).device_bytes / 2**20
    assert f"beside {mib:,.1f} MiB for tails of 64 requests and 3 slots" in found.remedies[-1]
    fewer = ask(monkeypatch, Planned(Settings(), off("nobody asked")), replace(given, slots=1))
    assert fewer.sizes
    assert fewer.sizes.slots == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (RECIPE, (2, True)),
        ({"spec_tokens": 3}, (3, False)),
        ({**RECIPE, "enforce_eager": True}, (2, False)),
        ({"compilation_config": '{"cudagraph_mode": "full_decode_only"}'}, (0, True)),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, (0, False)),
        ({"compilation_config": 3, "speculative_config": {"num_speculative_tokens": True}}, (0, False)),
        (
            {"compilation_config": {"cudagraph_mode": 2}, "speculative_config": {"num_speculative_tokens": -1}},
            (0, False),
        ),
        ({"speculative_config": {"num_speculative_tokens": 10**30}}, (0, False)),
        ({}, (0, False)),
    ],
)
def test_drafts_and_graphs_are_read_from_options_of_any_type(options: dict[str, Any], found: tuple[int, bool]) -> None:
    assert drafts_and_graphs(options) == found
