# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin at 85e826e, no report: both stages of a forward have one transaction id, and stage_idx 0.

Symptom: the stage's contexts keep the parent's metadata, so `afd_metadata.stage_idx` and `transaction_id` are the same
for both; work items carry neither. Whoever keys state by them gives both stages one entry.
Here: an execution is known by a generation of our own and the index of its uBatch, which the forward context has, and
which is absent where there is one only. So both stages have a workspace slot each, and their rows are right.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from afd_dsv4.execution.cam import CamForward  # noqa: E402
from afd_dsv4.tail.tables import RequestChunk, RequestId  # noqa: E402
from tests.afd import protocol  # noqa: E402
from tests.model_runtime import ModelExecution, ModelRuntime  # noqa: E402

P = protocol.double()
BATCH = [RequestChunk(RequestId("a"), 0, 9), RequestChunk(RequestId("b"), 0, 12)]


class Connector:
    """Sends nothing anywhere, and tells the forward."""

    def __init__(self, forward: CamForward[ModelExecution]) -> None:
        self.forward = forward

    def send_attn_output(self, _hidden: object, context: Any, **_: object) -> None:
        self.forward.sent(context.metadata.layer_idx, context.metadata.stage_idx)

    def recv_ffn_output(self, ref_tensor: Any, ubatch_idx: int = 0) -> Any:
        self.forward.received(ubatch_idx)
        return ref_tensor


class Layer:
    """Launches its compressor for whoever runs."""

    def __init__(self, layer_idx: int, model: Model) -> None:
        self.layer_idx, self.model = layer_idx, model

    def compute_attn_output(self, _positions: Any, hidden: Any, *_: object) -> tuple[Any, ...]:
        context = P.get_forward_context()
        metadata = context.additional_kwargs["afd_metadata"]
        self.model.seen.append((getattr(context, "ubatch_idx", 0), metadata.stage_idx, metadata.transaction_id))
        self.model.launch(self.layer_idx, context, metadata)
        return hidden, None, hidden, hidden, hidden


class Model:
    """The model that the commit's schedule drives.

    Attributes:
        seen: of every launch: uBatch index of the context, stage and transaction of the metadata.
    """

    def __init__(self, by: str, layers: int) -> None:
        self.runtime = ModelRuntime(3, layers=layers)
        self.stream = self.runtime.device.stream()
        self.by = by
        self.seen: list[tuple[int, int, str]] = []
        self.start_layer, self.end_layer = 0, layers
        self.layers = [Layer(layer, self) for layer in range(layers)]

    def launch(self, layer: int, context: Any, metadata: Any) -> None:
        index = getattr(context, "ubatch_idx", 0) if self.by == "ubatch_idx" else metadata.stage_idx
        self.forward[index].launch(layer, self.stream)

    def run(self) -> None:
        plan = P.plan_async_moe_stages(
            [chunk.tokens for chunk in BATCH], split="token", use_sequence_parallel=False, tensor_parallel_size=2
        )
        slices = [(stage.token_slice.start, stage.token_slice.stop) for stage in plan]
        with CamForward.from_stages(self.runtime, BATCH, slices) as self.forward:
            metadata = P.AFDForwardContextMetadata(
                [0], [0], 0, Connector(self.forward), [21], 2, transaction_id="afd-npu-1"
            )
            context = SimpleNamespace(additional_kwargs={"afd_metadata": metadata})
            with P.override_forward_context(context):
                hidden = torch.zeros(21, 4)
                stages = P.AsyncMoeUbatchMetadata([{}, {}], plan, 21, False)
                P.run_async_moe_ubatch_afd_forward(self, hidden, None, torch.zeros(21), metadata, stages)
        self.runtime.device.run()


def test_both_stages_have_their_own_execution_and_right_rows() -> None:
    model = Model("ubatch_idx", layers=3)
    model.run()
    leases = [execution.lease for execution in model.forward.executions]
    assert [lease.execution.ubatch for lease in leases if lease] == [0, 1]
    assert len({lease.slot.index for lease in leases if lease}) == 2
    assert len({lease.execution.generation for lease in leases if lease}) == 1
    assert model.runtime.wrong == []
    assert model.runtime.compared == 6
    assert [ubatch for ubatch, _, _ in model.seen] == [0, 1] * 3


def test_the_metadata_of_both_stages_is_one_and_who_goes_by_it_is_found() -> None:
    """Negative control: launches by `afd_metadata.stage_idx`. All are stage 0's, and the next send says so."""
    model = Model("stage_idx", layers=3)
    with pytest.raises(Exception, match="stage 1 of generation 1 sends layer 0, and has not launched") as raised:
        model.run()
    assert type(raised.value).__name__ == "CamError"
    assert {ubatch for ubatch, _, _ in model.seen} == {0, 1}
    assert {(stage, transaction) for _, stage, transaction in model.seen} == {(0, "afd-npu-1")}


def test_generations_are_told_apart_where_transactions_repeat() -> None:
    """Warm-up, dummy and drafting forwards have no transaction of their own, or one that was used."""
    runtime = ModelRuntime(1)
    generations = {runtime.mint() for _ in range(100)}
    assert len(generations) == 100
