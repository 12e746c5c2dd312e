# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""How a forward is cut into CAM stages, and in which order these attend, send and receive
(afd_plugin/model_executor/npu/async_cam_ubatching.py and models/npu/{async_cam_layout,deepseek_v2_async_cam_forward}.py
at 85e826e).

At most one dispatch is outstanding, and attention of one stage runs while FFN has the other. Stages may be padded with
rows of zeros, and so may the batch. An exception goes up as it is; nothing is drained.
Not here: dense layers, residuals, and more TP ranks than one, so the shards of a stage lie side by side in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from tests.afd import ubatching
from tests.afd.metadata import AFDForwardContextMetadata, AFDTransferContext, AFDTransferMetadata

ASYNC_MOE_UBATCH_METADATA_KEY = "afd_async_moe_ubatch_metadata"


@dataclass(frozen=True)
class AsyncMoeStage:
    request_slice: slice
    token_slice: slice
    input_tokens: int

    @property
    def actual_tokens(self) -> int:
        return int(self.token_slice.stop) - int(self.token_slice.start)


def plan_async_moe_stages(
    num_scheduled_tokens: Sequence[int], *, split: str, use_sequence_parallel: bool, tensor_parallel_size: int
) -> tuple[AsyncMoeStage, ...] | None:
    tokens = [int(count) for count in num_scheduled_tokens]
    if not tokens or min(tokens) <= 0:
        raise ValueError(f"scheduled tokens are above 0, got {tokens}")
    if tensor_parallel_size <= 0:
        raise ValueError(f"tensor_parallel_size is above 0, got {tensor_parallel_size}")
    if split not in ("request", "token"):
        raise ValueError(f"split is request or token, got {split!r}")
    ends = list(accumulate(tokens))
    total, requests = ends[-1], len(tokens)
    if split == "request":
        if requests < 2:
            return None
        # The boundary nearest to half the tokens; among equals that nearest to half the requests, then the first.
        first = min(range(1, requests), key=lambda at: (abs(2 * ends[at - 1] - total), abs(2 * at - requests), at))
        middle = ends[first - 1]
        second = first
    else:
        if tensor_parallel_size <= 1 or total < 2:
            return None
        middle = -(-total // 2)
        second = next(at for at, end in enumerate(ends) if end > middle)  # has the first token behind the cut
        first = next(at for at, end in enumerate(ends) if end >= middle) + 1
    align = tensor_parallel_size if use_sequence_parallel else 1
    return tuple(
        AsyncMoeStage(requests_of, slice(start, stop), -(-(stop - start) // align) * align)
        for requests_of, start, stop in ((slice(0, first), 0, middle), (slice(second, requests), middle, total))
    )


@dataclass(frozen=True)
class AsyncMoeUbatchMetadata:
    attn_metadata: list[dict[str, Any]]
    stages: tuple[AsyncMoeStage, ...]
    parent_input_tokens: int
    use_sequence_parallel: bool

    def __post_init__(self) -> None:
        if not self.stages or len(self.attn_metadata) != len(self.stages):
            raise ValueError(f"{len(self.attn_metadata)} attention metadata for {len(self.stages)} stages")
        end = 0
        for stage in self.stages:
            if stage.token_slice.start != end or not 0 < stage.actual_tokens <= stage.input_tokens:
                raise ValueError(f"stages follow each other, none is empty, and padding fits: {self.stages}")
            end = stage.token_slice.stop
        if self.parent_input_tokens < end:
            raise ValueError(f"stages of {end} tokens in a batch of {self.parent_input_tokens}")


def run_async_moe_ubatch_afd_forward(
    model: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    positions: torch.Tensor,
    afd_metadata: AFDForwardContextMetadata,
    async_moe_ubatch_metadata: AsyncMoeUbatchMetadata,
    llama_4_scaling: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    plan, connector = async_moe_ubatch_metadata, afd_metadata.connector
    parent = ubatching.get_forward_context()
    layers = model.layers[model.start_layer : model.end_layer]
    if len(hidden_states) != plan.parent_input_tokens or residual is not None:
        raise ValueError(f"{len(hidden_states)} rows for a batch of {plan.parent_input_tokens}; and no residual")
    states = [_padded(hidden_states[stage.token_slice], stage.input_tokens) for stage in plan.stages]
    places = [_padded(positions[stage.token_slice], stage.input_tokens) for stage in plan.stages]
    sent: list[torch.Tensor | None] = [None, None]

    def attend(layer: Any, stage: int) -> tuple[Any, ...]:
        context = copy(parent)
        context.attn_metadata = plan.attn_metadata[stage]
        context.additional_kwargs = dict(parent.additional_kwargs)
        context.ubatch_idx, context.num_ubatches, context.dbo_enabled = stage, len(plan.stages), False
        padding = plan.stages[stage].input_tokens - plan.stages[stage].actual_tokens
        context.num_tokens = plan.stages[stage].actual_tokens
        context.pad_size = padding if plan.use_sequence_parallel else 0
        with ubatching.override_forward_context(context):
            states[stage], _, *routing = layer.compute_attn_output(places[stage], states[stage], None, llama_4_scaling)
        if len(states[stage]) != plan.stages[stage].input_tokens:
            raise RuntimeError(f"attention of stage {stage} changed the number of its tokens")
        return tuple(routing)

    def send(layer: Any, stage: int, routing: tuple[Any, ...]) -> None:
        weights, ids, logits = routing
        dispatch_layer_transfer(connector, layer.layer_idx, stage, states[stage], ids, weights, logits)
        sent[stage] = states[stage]

    def receive(stage: int) -> None:
        reference = sent[stage]
        if reference is None:
            raise RuntimeError(f"stage {stage} has nothing to receive")
        states[stage] = connector.recv_ffn_output(ref_tensor=reference, ubatch_idx=stage)
        if len(states[stage]) != len(reference):
            raise RuntimeError(f"stage {stage} got {len(states[stage])} rows for {len(reference)}")
        sent[stage] = None

    send(layers[0], 0, attend(layers[0], 0))
    for layer, after in pairwise(layers):
        routing = attend(layer, 1)
        receive(0)
        send(layer, 1, routing)
        routing = attend(after, 0)
        receive(1)
        send(after, 0, routing)
    routing = attend(layers[-1], 1)
    receive(0)
    send(layers[-1], 1, routing)
    receive(1)
    found = torch.cat([state[: stage.actual_tokens] for state, stage in zip(states, plan.stages, strict=True)])
    return _padded(found, plan.parent_input_tokens), None


def run_attention_gate_afd_forward(
    model: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    positions: torch.Tensor,
    afd_metadata: AFDForwardContextMetadata,
    llama_4_scaling: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One stage: what the plan falls back to where it makes no two."""
    connector, stage = afd_metadata.connector, afd_metadata.stage_idx
    for layer in model.layers[model.start_layer : model.end_layer]:
        hidden_states, residual, weights, ids, logits = layer.compute_attn_output(
            positions, hidden_states, residual, llama_4_scaling
        )
        dispatch_layer_transfer(connector, layer.layer_idx, stage, hidden_states, ids, weights, logits)
        hidden_states = connector.recv_ffn_output(ref_tensor=hidden_states, ubatch_idx=stage)
    return hidden_states, residual


def dispatch_layer_transfer(
    connector: Any,
    layer: int,
    stage: int,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    router_logits: torch.Tensor | None,
) -> None:
    metadata = AFDTransferMetadata.create_attention_metadata(
        layer_idx=layer, stage_idx=stage, seq_len=len(hidden_states)
    )
    connector.send_attn_output(
        hidden_states,
        AFDTransferContext(metadata),
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        router_logits=router_logits,
    )


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """With rows of zeros behind."""
    if len(rows) == count:
        return rows
    return torch.cat([rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))])
