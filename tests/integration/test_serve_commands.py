# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Commands of `vllm serve` in vLLM's real parser and configuration: the gate says on, and the doctor says the same.

The other stack is asked where AFD_DSV4_STACK_0_26 names its interpreter (docs/compat.md says how to make it).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.doctor import defaults
from afd_dsv4.doctor.machine import Machine
from afd_dsv4.doctor.options import Options, options_of
from afd_dsv4.doctor.planned import plan
from afd_dsv4.geometry import from_hf_config
from afd_dsv4.softnpu import engine
from tests import serve_commands
from tests.serve_commands import DEFAULTS, FORMER, MODEL, Has, command, documented
from tests.unit.test_doctor import asked

ROOT = Path(__file__).parents[2]
OTHER = os.environ.get("AFD_DSV4_STACK_0_26", "")
NO_OTHER = "no such case: AFD_DSV4_STACK_0_26 names no interpreter with vllm-ascend-80d8c194f"

pytestmark = [pytest.mark.vllm_runtime, pytest.mark.npu, pytest.mark.slow]
STACKS = pytest.mark.parametrize(
    "stack",
    ["vllm-ascend-0.23.0", pytest.param("vllm-ascend-80d8c194f", marks=pytest.mark.skipif(not OTHER, reason=NO_OTHER))],
)
LIMITS = ("max_num_batched_tokens", "block_size", "max_num_seqs")
PAGES = list(documented())
COMMANDS = [*(words for _, words in PAGES), *map(command, DEFAULTS), [*FORMER, "--no-such-option"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return folder


@cache
def answers(stack: str, folder: Path) -> list[dict[str, Any]]:
    """Of the real configurations, all from one process."""
    here = stack == "vllm-ascend-0.23.0"
    probe = ["-m", "tests.serve_probe", str(folder)]
    run = [sys.executable, *probe] if here else [OTHER, "-m", "afd_dsv4.softnpu", "--", OTHER, *probe]
    drop = ("AFD_DSV4_MODE", "AFD_DSV4_CONFIG", *(() if here else ("LD_LIBRARY_PATH", "PYTHONPATH")))
    environment = {name: value for name, value in os.environ.items() if name not in drop} | engine.QUIET
    done = subprocess.run(
        run,
        input=json.dumps(COMMANDS),
        cwd=ROOT,
        env=environment | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def real(words: list[str], stack: str, folder: Path) -> dict[str, Any]:
    found = answers(stack, folder)[COMMANDS.index(words)]
    assert "error" not in found, found["error"]
    return found


def doctor(words: list[str], stack: str, folder: Path, tmp_path: Path) -> dict[str, Any]:
    """On a machine without vLLM."""
    given = json.dumps(serve_commands.options_of(words)).encode()
    arguments = ("--config", "-", "--model", str(folder / "config.json"), "--stack", stack)
    found, _, errors = asked(tmp_path, *arguments, given=given)
    assert errors == ""
    assert "unknown-option" not in [finding["code"] for finding in found["findings"]]
    gate, sizes = found["gate"], found["sizes"]
    return {
        "active": gate["active"],
        "reasons": gate["reasons"],
        "reserved": sizes["reserved_bytes"] if gate["active"] else None,
        "slots": sizes["slots"] if gate["active"] else None,
    }


def test_the_pages_show_commands() -> None:
    assert {page for page, _ in PAGES} >= {"README.md", "quickstart.md"}
    assert FORMER not in [words for _, words in PAGES]


@STACKS
@pytest.mark.parametrize(("page", "words"), PAGES, ids=[page for page, _ in PAGES])
def test_a_command_on_a_page_is_on_and_the_doctor_says_the_same(
    page: str, words: list[str], stack: str, folder: Path, tmp_path: Path
) -> None:
    found = real(words, stack, folder)
    assert found["active"], f"{page}: {found['reasons']}"
    said = doctor(words, stack, folder, tmp_path)
    assert said == {name: found[name] for name in said}


@STACKS
def test_the_command_that_the_quick_start_had_is_refused_by_both_and_what_is_no_option_by_the_parser(
    stack: str, folder: Path, tmp_path: Path
) -> None:
    """Negative control of the test above."""
    found = real(FORMER, stack, folder)
    assert not found["active"]
    assert found["reasons"][0].startswith("graph mode: FULL_AND_PIECEWISE")
    said = doctor(FORMER, stack, folder, tmp_path)
    assert said == {name: found[name] for name in said}
    assert answers(stack, folder)[-1] == {"error": "the parser refuses it"}


@STACKS
@pytest.mark.parametrize("options", DEFAULTS)
def test_a_default_is_what_a_real_configuration_has_and_the_gate_answers_the_same(
    options: str, stack: str, folder: Path
) -> None:
    found = real(command(options), stack, folder)
    limits = found["limits"]
    has = Has(found["graphs"], *(limits[name] for name in LIMITS), found["asynchronous"])
    assert has == DEFAULTS[options]
    told = options_of(json.dumps(serve_commands.options_of(command(options))), "c")
    geometry = from_hf_config(MODEL, "model")
    known = {name: told.get(name) for name in LIMITS}
    said = plan(told, Machine(None, None, None, (), {}), {}, geometry, **known, stack=stack)
    assert said.decision is not None
    assert (said.decision.active, list(said.decision.reasons)) == (found["active"], found["reasons"])
    assert (said.decision.sizes and said.decision.sizes.device_bytes) == found["reserved"]
    assert said.limits == defaults.Limits(**limits)
    assert defaults.graphs(Options(told)) == found["graphs"]
