# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin, lessons of its 0.28 line: several Attention ranks of unequal length behind one FFN rank.

Symptom: garbage text. The FFN rank takes blocks of one length, so ranks must pad theirs; rows that pad were taken for
tokens, or the other way round.
Here: rows that pad are nobody's. Stages are cut where the planner's token slices say, without padding; a cut that
counts padding is refused before anything begins. And tokens that are not those of the requests are refused at the
launch (tests/integration/test_stock_runtime.py); a graph's padded rows store nothing (test_stock_graphs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from afd_dsv4.execution.cam import CamForward
from afd_dsv4.tail.tables import RequestChunk, RequestId
from tests.afd import protocol
from tests.model_runtime import ModelRuntime

P = protocol.double()


def batch(lengths: Sequence[int]) -> list[RequestChunk]:
    return [RequestChunk(RequestId(f"r{i}"), 0, length) for i, length in enumerate(lengths)]


def plan(lengths: Sequence[int]) -> Any:
    """Stages as padded as they come: sequence parallelism over eight ranks."""
    return P.plan_async_moe_stages(lengths, split="token", use_sequence_parallel=True, tensor_parallel_size=8)


@pytest.mark.parametrize("lengths", [(5,), (3, 18), (40,), (1, 1, 1, 38)])
def test_stages_have_the_tokens_of_the_requests_and_no_padding(lengths: Sequence[int]) -> None:
    runtime = ModelRuntime(1)
    stream = runtime.device.stream()
    stages = plan(lengths)
    assert any(stage.input_tokens > stage.actual_tokens for stage in stages)
    slices = [(stage.token_slice.start, stage.token_slice.stop) for stage in stages]
    with CamForward.from_stages(runtime, batch(lengths), slices) as forward:
        for layer in range(runtime.shape.layers):
            for stage in (0, 1):
                forward[stage].launch(layer, stream)
    runtime.device.run()
    assert runtime.wrong == []
    held = [sum(chunk.tokens for chunk in e.plan.lists[4].chunks) for e in forward.executions if e.plan]
    assert held == [stage.actual_tokens for stage in stages]


@pytest.mark.parametrize("lengths", [(5,), (3, 18), (40,)])
def test_a_cut_that_counts_padding_is_refused_before_anything_begins(lengths: Sequence[int]) -> None:
    """Planted: `input_tokens`, which is what the hidden states have, for the tokens of the requests."""
    runtime = ModelRuntime(1)
    first, second = (stage.input_tokens for stage in plan(lengths))
    with pytest.raises(ValueError, match="they must make up the batch"):
        CamForward.from_stages(runtime, batch(lengths), [(0, first), (first, first + second)])
    assert runtime.arena.counters.leases == 0
