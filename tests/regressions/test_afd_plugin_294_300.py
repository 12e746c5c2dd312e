# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin#294, #300: the stages of a forward share one builder's buffers; a copy each stops the host.

Symptom: stage 1's metadata is built in place over stage 0's, which attends with it; the first remedy copied input ids
to the host for every stage.
Here: what a stage's launches read lies in its own workspace slot, and is planned on the host: the begin of stage 1
changes nothing that stage 0 has, whatever order the stages run in, and no stage makes the host wait.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from afd_dsv4.execution.forward import Forward
from afd_dsv4.execution.ubatch import cut
from afd_dsv4.tail.tables import RequestChunk, RequestId
from tests.model_runtime import ModelRuntime

BATCH = (RequestChunk(RequestId("a"), 0, 9), RequestChunk(RequestId("b"), 0, 12))
PARTS = cut(BATCH, 15)  # in the middle of b, as a split by tokens does


def run(seed: int, *, shared: bool) -> ModelRuntime:
    """One forward, its stages on streams of their own."""
    runtime = ModelRuntime(seed)
    if shared:
        runtime.tables = [runtime.tables[0]] * len(runtime.tables)
    streams = [runtime.device.stream() for _ in PARTS]
    with Forward(runtime, PARTS) as forward:
        for layer, stage in itertools.product(range(runtime.shape.layers), range(2)):
            forward[stage].launch(layer, streams[stage])
    runtime.device.run()
    return runtime


def test_what_a_stage_reads_is_its_own_in_every_order_of_the_streams() -> None:
    for seed in range(40):
        assert run(seed, shared=False).wrong == []


def test_one_buffer_for_both_stages_gives_wrong_rows() -> None:
    """Negative control: upstream's builder."""
    assert any(run(seed, shared=True).wrong for seed in range(40))


def test_planning_a_stage_leaves_those_before_it_as_they_were() -> None:
    runtime = ModelRuntime(1)
    generation = runtime.mint()
    first = runtime.begin(PARTS[0], generation=generation, ubatch=0)
    assert first.plan is not None
    pages = first.plan.lists[4]
    before = [array.copy() for array in (pages.columns, pages.ids, pages.starts)]
    second = runtime.begin(PARTS[1], generation=generation, ubatch=1)
    assert second.plan is not None
    for array, was in zip((pages.columns, pages.ids, pages.starts), before, strict=True):
        assert np.array_equal(array, was)
    for array, theirs in itertools.product(
        (pages.columns, pages.ids, pages.starts), vars(second.plan.lists[4]).values()
    ):
        assert not isinstance(theirs, np.ndarray) or not np.shares_memory(array, theirs)


def test_many_stages_make_the_host_wait_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    for name in ("run", "step", "catch_up"):
        monkeypatch.setattr(f"afd_dsv4.device.model.ModelDevice.{name}", lambda *_, name=name: waited.append(name))
    runtime = ModelRuntime(1, slots=2)
    stream = runtime.device.stream()
    position = 0
    for _ in range(100):  # nothing of it runs meanwhile
        parts = cut([RequestChunk(RequestId("a"), position, position + 6)], 3)
        position += 6
        with Forward(runtime, parts) as forward:
            for layer, stage in itertools.product(range(runtime.shape.layers), range(2)):
                forward[stage].launch(layer, stream)
    assert waited == []
