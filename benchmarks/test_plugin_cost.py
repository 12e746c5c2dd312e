# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the plugin costs a process of vLLM that does not use it.

vLLM loads it in every process, and asks it for every configuration. Each round is an interpreter of its own, which
times what the plugin adds: loading it by its entry points and calling both functions; and deciding, for one
configuration, that it is off. Interpreter and vLLM are not counted. Compared with the target is the quickest round:
every round does the same, and a busy machine only adds.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

Benchmark = Any
TARGET_S = 0.150
ROUNDS = 10

LOAD = """
import importlib.metadata, sys, time
points = [p for g in ("general", "platform") for p in importlib.metadata.entry_points(group=f"vllm.{g}_plugins")]
points = [point for point in points if point.name == "afd_dsv4"]
assert len(points) == 2
start = time.perf_counter()
for point in points:
    point.load()()
print(time.perf_counter() - start)
"""
DECIDE = """
import time
from types import SimpleNamespace
from afd_dsv4 import plugin
off = SimpleNamespace(model_config=1, additional_config={}, parallel_config=SimpleNamespace(worker_cls="auto"))
start = time.perf_counter()
plugin.configure(off, object)
print(time.perf_counter() - start)
assert plugin.state().decision, plugin.state()
"""


class Reported:
    """A clock that only what the rounds report moves on."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self._seconds

    def run(self, script: str) -> None:
        """Run one round."""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        self._seconds += float(done.stdout)


REPORTED = Reported()


@pytest.mark.benchmark(timer=REPORTED)
@pytest.mark.parametrize("script", [LOAD, DECIDE], ids=["load_and_register", "decide_that_it_is_off"])
def test_a_process_that_does_not_use_the_plugin_pays_150_ms_at_most(benchmark: Benchmark, script: str) -> None:
    """Both together are far below; each is held to the target by itself."""
    benchmark.pedantic(REPORTED.run, args=(script,), rounds=ROUNDS)
    if not benchmark.disabled:
        found = min(benchmark.stats.stats.data)
        assert found <= TARGET_S, f"{found * 1e3:.0f} ms at the quickest, {TARGET_S * 1e3:.0f} ms are allowed"
