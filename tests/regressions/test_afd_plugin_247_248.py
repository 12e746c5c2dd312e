# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin#247, #248: with two DP ranks the first request hangs until the second one comes.

Symptom: what was patched is wrapped again by vllm-ascend afterwards, so the patch is below the wrap; and profile runs
skip the connector's traffic, so the roles meet for the first time when the first request is there.
Here: a place that somebody has replaced since is left as it is and named, never put back over him; applying again
changes nothing. And a forward without requests sends and receives every item of its schedule, holding no workspace
slot; one that leaves out a receive is found, though it holds nothing.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afd_dsv4.compat.contract import Verdict
from afd_dsv4.compat.patch import Patch, PatchSet
from afd_dsv4.execution.cam import CamError, CamForward
from tests.model_runtime import ModelExecution, ModelRuntime

LAYERS = 5
NAME = "upstream_of_247"


@pytest.fixture
def upstream() -> Iterator[Any]:
    """A module with the function that both want."""
    module = types.ModuleType(NAME)
    module.run_engine_core = lambda: ["native"]  # type: ignore[attr-defined]
    sys.modules[NAME] = module
    yield module
    del sys.modules[NAME]


def wrap(name: str) -> Callable[[Any], Any]:
    """A wrapper that says that it ran."""

    def make(original: Any) -> Any:
        def run() -> list[str]:
            return [name, *original()]

        return run

    return make


def patches() -> tuple[PatchSet, Verdict]:
    patch = Patch(f"{NAME}:run_engine_core", wrap("ours"), "a report", "never", alone=True)
    return PatchSet(NAME, [patch]), Verdict(True, (), "made-up", frozenset({patch.recorded_as}))


def test_what_is_wrapped_after_us_is_left_and_named_and_applying_again_is_nothing(upstream: Any) -> None:
    ours, verdict = patches()
    ours.apply(verdict)
    upstream.run_engine_core = theirs = wrap("theirs")(upstream.run_engine_core)
    ours.apply(verdict)
    assert upstream.run_engine_core() == ["theirs", "ours", "native"]
    (left,) = ours.undo()
    assert f"{NAME}:run_engine_core is left as it is" in str(left)
    assert upstream.run_engine_core is theirs
    ours.apply(verdict)  # on top, once more: where it was meant to be
    assert upstream.run_engine_core() == ["ours", "theirs", "ours", "native"]
    assert ours.undo() == ()
    assert upstream.run_engine_core is theirs


def test_putting_the_original_back_without_a_look_would_drop_the_later_wrap(upstream: Any) -> None:
    """Negative control."""
    original = upstream.run_engine_core
    upstream.run_engine_core = wrap("ours")(original)
    upstream.run_engine_core = wrap("theirs")(upstream.run_engine_core)
    upstream.run_engine_core = original
    assert upstream.run_engine_core() == ["native"]


def profile(forward: CamForward[ModelExecution], *, receive: bool = True) -> int:
    """A profile run: the whole schedule of two stages, with no requests. Returns the number of items."""
    items = 0
    with forward:
        for layer in range(LAYERS):
            for stage in (0, 1):
                assert forward[stage].computed(layer)  # there is nothing to launch
                forward.sent(layer, stage)
                items += 1
                if receive:
                    assert forward.received(stage) == layer
    return items


def test_a_forward_without_requests_has_all_its_traffic_and_no_workspace_slot() -> None:
    runtime = ModelRuntime(1, layers=LAYERS)
    assert profile(CamForward(runtime, [(), ()])) == 2 * LAYERS
    assert runtime.arena.counters.leases == 0
    assert runtime.device.events == 0


def test_an_item_of_a_profile_run_that_is_not_received_is_found() -> None:
    """Negative control: the run holds nothing, and its traffic is followed all the same."""
    with pytest.raises(CamError, match=r"stage 1 .* sends layer 0 before stage 0 has received that of layer 0"):
        profile(CamForward(ModelRuntime(1, layers=LAYERS), [(), ()]), receive=False)
