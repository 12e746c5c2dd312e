# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Attention and FFN in processes of their own, over the software NPU's operators: the double's protocol, and the
commit's own.

The same world runs both: connectors, planner, two-stage schedule, contexts and threads of uBatches are those of
`tests/afd/`, or of the checkout that AFD_PLUGIN_PATH names; that one needs the interpreter of its stack, which
AFD_DSV4_STACK_0_26 names (docs/compat.md), and its connectors are the adapter's subclasses. The model is the tests'
own: no model of that commit has a compressor that runs on an NPU. Not shown: its runner and worker
(test_adapter_afd.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from afd_dsv4.softnpu import engine
from tests.afd import world

PYTHON = os.environ.get("AFD_DSV4_STACK_0_26", "")
CHECKOUT = os.environ.get("AFD_PLUGIN_PATH", "")

pytestmark = [pytest.mark.npu, pytest.mark.slow, pytest.mark.timeout(1800)]


def check(said: list[dict[str, Any]], mode: str, attention: int, protocol: str) -> None:
    """Every row is right, every lease settled, no slot more than uBatches; nothing of ours is in an FFN process."""
    ranks, experts = said[:attention], said[attention:]
    for rank in ranks:
        assert rank["protocol"] == protocol
        assert rank["rows"] > 50
        assert (rank["corrupt"], rank["violations"], rank["closed"], rank["left"]) == (0, [], [], 0)
        assert rank["slots"] == rank["most_slots"] == (1 if mode == "SYNC" else 2)
        assert rank["audited"] == 2 * rank["stages"] > 0
        assert rank["looks"] >= rank["audited"]
        ours = "AfdDsv4" if protocol != "the double" else ""
        assert rank["connector"].startswith(f"{ours}CAM")  # the adapter's own, on the commit's code
    for process in experts:
        assert process["protocol"] == protocol
        assert process["runtimes"] == 0
        assert process["errors"] == []
        assert process["items"] > 0


@pytest.mark.skipif(bool(CHECKOUT), reason="no such case: AFD_PLUGIN_PATH names the commit's own code")
def test_two_ranks_on_the_double_share_what_they_must_and_nothing_else() -> None:
    """With CAM; `make afd-soak` has the other modes."""
    check(world.run("CAM", attention=2, ffn=2, forwards=8), "CAM", 2, "the double")


@pytest.mark.skipif(not CHECKOUT, reason="no such case: AFD_PLUGIN_PATH names no checkout")
@pytest.mark.skipif(not PYTHON, reason="no such case: AFD_DSV4_STACK_0_26 names no interpreter with that stack")
@pytest.mark.parametrize(("mode", "ranks"), [("CAM", 1), ("CAM", 2), ("DBO", 1), ("SYNC", 1)])
def test_the_commits_own_connectors_schedule_and_threads_carry_our_executions(
    mode: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in engine.QUIET.items():
        monkeypatch.setenv(name, value)
    said = world.run(mode, attention=ranks, ffn=ranks, forwards=8, python=PYTHON)
    check(said, mode, ranks, "afd-plugin 85e826e")


@pytest.mark.skipif(not CHECKOUT, reason="no such case: AFD_PLUGIN_PATH names no checkout")
@pytest.mark.skipif(not PYTHON, reason="no such case: AFD_DSV4_STACK_0_26 names no interpreter with that stack")
def test_the_doubles_names_signatures_fields_and_plans_are_the_commits() -> None:
    drop = ("LD_LIBRARY_PATH", "PYTHONPATH")
    environment = {**engine.QUIET, **{name: value for name, value in os.environ.items() if name not in drop}}
    done = subprocess.run(
        [PYTHON, "-m", "afd_dsv4.softnpu", "--", PYTHON, "-m", "tests.afd.faithful"],
        cwd=world.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
