# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""sgl-project/sglang#24878: a transfer kind that nobody knows moves no state, and says nothing.

Symptom: a default branch returns 0 pages, so that the decode side goes on from states that never came.
Here: tails are not transferred, and whatever moves KV is refused by its name, also a connector that nobody has heard
of.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from afd_dsv4.compat.facts import facts_from
from afd_dsv4.compat.stack import package_folder
from afd_dsv4.config import Mode, Settings
from afd_dsv4.gate import decide
from tests.unit.test_facts import HOLDS, STACK, NPUPlatform, configuration
from tests.unit.test_gate import PLAIN


def connectors() -> list[str]:
    """Names that the installed vLLM and vllm-ascend register, read as text; and one of nobody's."""
    found = {"SomeConnectorOfTomorrow"}
    for package in ("vllm", "vllm_ascend"):
        folder = package_folder(package)
        for path in folder.glob("distributed/kv_transfer/**/*.py") if folder else ():
            found |= set(re.findall(r"register_connector\(\s*\"(\w+)\"", path.read_text(encoding="utf-8")))
    return sorted(found)


@pytest.mark.parametrize("name", connectors())
def test_every_connector_is_refused_by_its_name(name: str) -> None:
    config = configuration()
    config.kv_transfer_config = SimpleNamespace(kv_connector=name)
    moved = facts_from(config, NPUPlatform, STACK, HOLDS).kv_transfer
    decision = decide(Settings(Mode.COLOCATED), replace(PLAIN, kv_transfer=moved))
    assert decision.refused
    assert name in decision.line()


def test_without_one_nothing_is_refused() -> None:
    """Negative control of the fact that is judged."""
    assert facts_from(configuration(), NPUPlatform, STACK, HOLDS).kv_transfer is None
    assert decide(Settings(Mode.COLOCATED), PLAIN).active


@pytest.mark.vllm_runtime
def test_the_names_are_those_of_the_installed_stack() -> None:
    assert {"NixlConnector", "MooncakeConnector"} < set(connectors())
    assert len(connectors()) > 10
