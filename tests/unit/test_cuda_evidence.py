# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The evidence run on a CUDA device, as far as it can be judged without one: verdicts, laws, and the script's file."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from afd_dsv4.evidence import run
from afd_dsv4.evidence.cuda import parts
from afd_dsv4.evidence.cuda.dense import ROUNDING, Peak, Peaks
from afd_dsv4.evidence.report import Source, Verdict, figure
from afd_dsv4.geometry import InputError, page_layout, preset
from afd_dsv4.softnpu.runtime import is_active

ROOT = Path(__file__).resolve().parents[2]
PASSED = ("rows: a", "order: a", "launched a", "table rule a", "memory: a", "reuse: the host", "reuse: b", "cost: a")


def judged(*failed: str) -> dict[int, Verdict]:
    one = run.Run(
        Source.CUDA, torch.device("cpu"), preset("flash"), page_layout("vllm-ascend-0.23.0", 128), 1024, Path()
    )
    for name in PASSED:
        one.check(name, name not in failed, "", "")
    return {point.number: point.verdict for point in run._points(one)}


def test_a_cuda_device_shows_order_memory_and_cost_and_never_a_token_a_symbol_or_the_target_stack() -> None:
    assert judged() == {
        number: Verdict.NOT_SHOWN_HERE if number in (1, 6, 7) else Verdict.PASS for number in range(1, 8)
    }


@pytest.mark.parametrize(
    ("failed", "points"),
    [
        ("rows: a", {1, 2, 7}),
        ("order: a", {2, 3}),
        ("reuse: b", {3}),
        ("reuse: the host", {3, 5}),
        ("memory: a", {4}),
        ("cost: a", {5}),
    ],
)
def test_a_check_that_fails_fails_its_points(failed: str, points: set[int]) -> None:
    assert {number for number, verdict in judged(failed).items() if verdict is Verdict.FAIL} == points


def test_cuda_is_taken_only_where_it_is_asked_for_and_not_on_the_software_npu() -> None:
    if is_active():
        with pytest.raises(InputError, match="runs on the software NPU"):
            run._source("cuda")
    else:
        assert run._source("cuda") is Source.CUDA
        assert run._source("softnpu") is Source.SOFTNPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="no such case: there is a CUDA device here")
def test_without_a_cuda_device_the_run_says_so_in_one_line() -> None:
    with pytest.raises(InputError, match="sees no CUDA device"):
        parts.prepare()


def peaks() -> Peaks:
    return Peaks(
        (Peak(43, 1 << 30, (1 << 30) + 500), Peak(86, 2 << 30, (2 << 30) + 500)),
        (Peak(43, 50 << 20, 390 << 20), Peak(86, 99 << 20, 440 << 20)),
        (45 << 20, 95 << 20),
    )


def test_native_that_doubles_and_ours_that_grows_by_tails_breaks_no_law() -> None:
    assert peaks().broken() == []


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (replace(peaks(), native=(peaks().native[0], peaks().native[0])), "not doubled"),
        (replace(peaks(), native=(peaks().native[0], Peak(86, 2 << 30, 3 << 30))), "native's peak grows"),
        (replace(peaks(), ours=(peaks().ours[0], Peak(86, 0, (440 << 20) + ROUNDING + 1))), "our peak grows"),
    ],
)
def test_every_law_of_memory_is_seen_broken(planted: Peaks, words: str) -> None:
    assert words in "; ".join(planted.broken())


def test_all_that_is_measured_in_full_is_measured_a_little_in_a_quick_run() -> None:
    for name in ("fault_rounds", "turns", "reuses", "replays", "eager", "executions", "rounds"):
        assert 0 < getattr(parts.QUICK, name) < getattr(parts.FULL, name)
    loads = {f"{tokens:,} tokens" + f" in {cut} uBatches" * (cut > 1) for tokens, cut in parts.FULL.timed}
    assert {*parts.PRIVATE_RATIO, *parts.SYNCHRONISED_RATIO} <= loads  # every threshold has a load


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_script", ROOT / "benchmarks" / "device" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_takes_its_options_and_refuses_what_makes_no_batch(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = script.parse(["--quick", "--tokens", "4096", "--out", "x", "--executions", "7"])
    assert (asked.quick, asked.tokens, asked.out, asked.executions) == (True, 4096, Path("x"), 7)
    assert script.parse([]).executions is None
    for wrong in (["--tokens", "1023"], ["--executions", "0"]):
        with pytest.raises(SystemExit):
            script.parse(wrong)
        assert wrong[1] in capsys.readouterr().err


def test_the_scripts_file_holds_bare_numbers_commit_and_failures_and_survives_parts_that_broke_off(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(script.COMMIT, "0123abc")
    points = [{"number": 3, "verdict": "pass"}, {"number": 7, "verdict": "not_shown_here"}]
    checks = [{"name": "a", "passed": True}, {"name": "b", "passed": False}]
    found = script.summary(
        {
            "stack": {"cuda": {"name": "some device"}},
            "command": ["x"],
            "passed": False,
            "verdicts": {"points": points, "checks": checks},
            "performance": {"reuse": {"slots": {"rounds": figure(3, "count", Source.CUDA), "also": [1.5]}}},
            "memory": {},
            "parity": {},
            "order": {},
        }
    )
    assert json.loads(json.dumps(found)) == found
    assert found["commit"] == "0123abc"
    assert found["points"] == {"3": "pass", "7": "not_shown_here"}
    assert [check["name"] for check in found["failed"]] == ["b"]
    assert found["reuse"] == {"slots": {"rounds": 3, "also": [1.5]}}
    assert found["replays"] is None
