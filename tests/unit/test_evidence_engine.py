# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What `make engine` judges, on results written by hand: every way to be wrong is seen."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.evidence import untouched
from afd_dsv4.evidence.engine import (
    BLOCK_BYTES,
    CONFIGURATIONS,
    Admission,
    Compared,
    Configuration,
    Contention,
    compare,
    failures,
    workloads,
)

LOAD = [{"id": "a", "max_tokens": 3}, {"id": "b", "max_tokens": 4, "abort": 5}]


def result(groups: int, a: list[int], b: list[int], preemptions: int = 0) -> dict[str, Any]:
    logprobs = {"a": [-0.5] * len(a), "b": [-0.25] * len(b)}
    load = {"tokens": {"a": a, "b": b}, "logprobs": logprobs, "preemptions": preemptions}
    return {"groups": [1] * groups, "workloads": [load]}


NATIVE = result(7, [1, 2, 3], [4, 5])
ADMITTED = Admission(
    tokens=100,
    refusal="does not fit",
    blocks=(10, 9),
    kv_bytes=9 * BLOCK_BYTES,
    workspace_bytes=BLOCK_BYTES,
    slots=2,
    blocks_used=4,
    scheduled=100,
    answered=4,
    peak_bytes=1,
)
WAITED = Contention(prompt=100, blocks=(10, 9), waited=(3, 0), tokens=20, mismatched=0)
CONTROL = Compared("control", tokens=5, mismatched=2)


def test_equal_tokens_are_equal_and_of_an_aborted_request_those_that_both_gave() -> None:
    found = compare(Configuration("c"), [LOAD], NATIVE, result(5, [1, 2, 3], [4, 5, 6]))
    assert (found.requests, found.tokens, found.mismatched, found.problems) == (2, 3 + 2, 0, [])


@pytest.mark.parametrize(
    ("a", "b", "mismatched", "problems"),
    [
        ([1, 9, 3], [4, 5], 1, 0),
        ([1, 2, 3], [4, 9], 1, 0),
        ([1, 2], [4, 5], 1, 1),
        ([], [4, 5], 3, 1),
    ],
)
def test_every_other_or_missing_token_is_counted(a: list[int], b: list[int], mismatched: int, problems: int) -> None:
    found = compare(Configuration("c"), [LOAD], NATIVE, result(5, a, b))
    assert (found.mismatched, len(found.problems)) == (mismatched, problems)


def test_a_plugin_that_was_off_is_no_comparison() -> None:
    assert "it was off" in compare(Configuration("c"), [LOAD], NATIVE, NATIVE).problems[0]


def test_a_configuration_meant_to_preempt_must_preempt() -> None:
    wanted = Configuration("c", preempts=True)
    assert "nothing was preempted" in compare(wanted, [LOAD], NATIVE, result(5, [1, 2, 3], [4, 5])).problems[0]
    assert compare(wanted, [LOAD], NATIVE, result(5, [1, 2, 3], [4, 5], preemptions=1)).problems == []


def test_all_is_well_only_where_everything_is() -> None:
    good = Compared("good", tokens=5)
    assert failures([good], CONTROL, ADMITTED, WAITED, []) == []
    for wrong in (
        failures([replace(good, mismatched=1)], CONTROL, ADMITTED, WAITED, []),
        failures([replace(good, logprobs_differ=1)], CONTROL, ADMITTED, WAITED, []),
        failures([replace(good, problems=["p"])], CONTROL, ADMITTED, WAITED, []),
        failures([good], replace(CONTROL, mismatched=0), ADMITTED, WAITED, []),
        failures([good], CONTROL, replace(ADMITTED, refusal=""), WAITED, []),
        failures([good], CONTROL, replace(ADMITTED, workspace_bytes=BLOCK_BYTES + 1), WAITED, []),
        failures([good], CONTROL, replace(ADMITTED, scheduled=99), WAITED, []),
        failures([good], CONTROL, replace(ADMITTED, answered=0), WAITED, []),
        failures([good], CONTROL, ADMITTED, replace(WAITED, waited=(0, 0)), []),
        failures([good], CONTROL, ADMITTED, replace(WAITED, waited=(3, 1)), []),
        failures([good], CONTROL, ADMITTED, replace(WAITED, mismatched=1), []),
        failures([good], CONTROL, ADMITTED, WAITED, ["other tokens"]),
    ):
        assert len(wrong) == 1


ENGINE = {"plugins": ["afd_dsv4", "ascend"], "groups": [1, 2], "workloads": [NATIVE["workloads"][0] | {"steps": 4}]}
ABSENT = ENGINE | {"plugins": ["ascend"]}


def test_native_behaviour_is_untouched_where_three_engines_agree_in_everything() -> None:
    def found(absent: Any = ABSENT, off: Any = ENGINE) -> list[str]:
        return untouched.problems({"off": off, "afd": ENGINE, "not installed": absent})

    load = ABSENT["workloads"][0]
    assert found() == []
    for part, other in (("tokens", {"a": [1]}), ("logprobs", {"a": [-1.0]}), ("steps", 5)):
        assert found(ABSENT | {"workloads": [load | {part: other}]}) == [f"not installed: {part} of workload 0 differ"]
    assert "KV groups" in found(ABSENT | {"groups": [1]})[0]
    assert "found the plugins" in found(ENGINE)[0]
    assert "found the plugins" in found(off=ABSENT)[0]
    silent = {"workloads": [load | {"tokens": {}}]}
    assert untouched.problems({"off": ENGINE | silent, "afd": ENGINE | silent, "not installed": ABSENT | silent}) == [
        "no tokens were compared"
    ]


def test_the_interpreter_has_all_packages_but_ours_also_where_an_earlier_run_left_one(tmp_path: Path) -> None:
    names = "{d.name.replace('-', '_') for d in distributions()}"
    ask = f"from importlib.metadata import distributions; print(*sorted({names}))"

    def packages(python: Path | str) -> set[str]:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, cwd=tmp_path)
        return set(done.stdout.split())

    for _ in range(2):
        assert packages(sys.executable) - packages(untouched.interpreter(tmp_path / "python")) == {"afd_dsv4"}


def test_workloads_are_a_function_of_configuration_and_seed_and_keep_its_limits() -> None:
    assert len(CONFIGURATIONS) >= 12
    for configuration in CONFIGURATIONS:
        loads = workloads(configuration, 20, 1, vocabulary=128)
        assert (
            loads == workloads(configuration, 20, 1, vocabulary=128) != workloads(configuration, 20, 2, vocabulary=128)
        )
        requests = [request for load in loads for request in load]
        assert max(len(load) for load in loads) <= configuration.requests
        assert max(len(request["prompt"]) for request in requests) <= configuration.longest
        assert {token for request in requests for token in request["prompt"]} <= set(range(2, 128))
        assert any("abort" in request for request in requests) is configuration.aborts
