# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A stand-in for the NPU model that afd-plugin 85e826e does not have: DeepSeek-V4 in two roles. For tests.

Problem: that commit registers AFDDeepseekV4ForCausalLM, but the class raises on every device but CUDA, so its NPU
workers, runners and connectors have no DeepSeek-V4 to run. Later commits ship one.
Way: vllm-ascend's own model (models/deepseek_v4.py at 80d8c194f), built with a piece left out. In the Attention role a
layer's experts are a proxy that sends and receives through the connector, and with CAMAsync routes; two stages follow
the order that afd-plugin's schedules have (`deepseek_v2_async_cam_forward.py`). In the FFN role there is no attention,
and `compute_ffn_output` runs a layer's experts: its whole MoE, or with CAMAsync what a work item brings.
Not here: what a product needs, and sequence parallelism, draft layers, quantisation, hashed routing without CAMAsync
(no ids cross the boundary at that commit). Nobody but tests on the software NPU uses it.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from afd_plugin.config import parse_afd_config
from afd_plugin.connectors.metadata import AFDF2ATransferPayload, AFDTransferContext, AFDTransferMetadata
from afd_plugin.model_executor.models.forward_context import get_afd_metadata_from_forward_context
from afd_plugin.model_executor.models.npu.async_cam_layout import (
    get_async_moe_ubatch_metadata_from_forward_context,
    prepare_cam_dispatch_payload,
    restore_cam_dispatch_output,
)
from afd_plugin.v1.worker.dbo import maybe_apply_dbo_yield
from torch import nn
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, override_forward_context
from vllm_ascend.models import deepseek_v4 as native
from vllm_ascend.ops.fused_moe.moe_mlp import unified_apply_mlp
from vllm_ascend.ops.fused_moe.moe_stage_contracts import MoEMlpComputeInput, MoEWeights
from vllm_ascend.ops.fused_moe.moe_stage_params import MoEQuantParams
from vllm_ascend.quantization.quant_type import QuantType


class _RemoteMoE(native.DeepseekV4MoE):  # type: ignore[misc]  # untyped
    """The gate, and the connector where the experts would be."""

    def route(self, hidden: torch.Tensor, input_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each row, and their weights, scaled as vllm-ascend scales them."""
        asked = self.experts
        weights, ids, _ = torch.ops._C_ascend.moe_gating_top_k_hash(
            x=functional.linear(hidden.float(), self.gate.weight.float()),
            k=asked.top_k,
            bias=asked.e_score_correction_bias,
            input_ids=None if asked.tid2eid is None or input_ids is None else input_ids.to(torch.int64),
            tid2eid=asked.tid2eid,
            k_group=asked.topk_group,
            group_count=asked.num_expert_group,
            routed_scaling_factor=asked.routed_scaling_factor,
            eps=1e-20,
            group_select_mode=1,
            renorm=0,
            norm_type=2,
            out_flag=False,
        )
        return weights.to(hidden.dtype).float(), ids.to(torch.int32)  # rounded as where attention and experts are one

    def send(self, hidden: torch.Tensor, stage: int) -> Any:
        """Send a layer's rows; return what `receive` needs."""
        metadata = get_afd_metadata_from_forward_context()
        assert metadata is not None
        context: Any = get_forward_context()  # vllm-ascend's, which has more attributes than vLLM's
        routing: dict[str, Any] = {}
        layout = None
        if self.gate_here:
            weights, ids = self.route(hidden, context.input_ids)
            payload = prepare_cam_dispatch_payload(hidden, weights, ids, None, use_sequence_parallel=False)
            hidden, layout = payload.hidden_states, payload.layout
            routing = {"topk_weights": payload.topk_weights, "topk_ids": payload.topk_ids}
        transfer = AFDTransferMetadata.create_attention_metadata(
            layer_idx=self.layer_idx, stage_idx=stage, seq_len=int(hidden.shape[0])
        )
        metadata.connector.send_attn_output(hidden, AFDTransferContext(metadata=transfer), **routing)
        return hidden, layout

    def receive(self, sent: Any, stage: int) -> torch.Tensor:
        metadata = get_afd_metadata_from_forward_context()
        assert metadata is not None
        hidden, layout = sent
        output: torch.Tensor = metadata.connector.recv_ffn_output(ref_tensor=hidden, ubatch_idx=stage)
        return output if layout is None else restore_cam_dispatch_output(output, layout)

    def forward(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Send, let the other uBatch's thread run, receive."""
        stage = int(getattr(get_forward_context(), "ubatch_idx", 0))
        sent = self.send(hidden_states, stage)
        maybe_apply_dbo_yield(hidden_states, role="attention")
        return self.receive(sent, stage)


class _TwoStages:
    """One forward of a model in the stages that the runner has planned."""

    def __init__(self, model: Any, plan: Any, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        parent: Any = get_forward_context()
        self.model, self.plan = model, plan
        self.contexts: list[Any] = []
        self.hidden: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.mixed: dict[int, tuple[torch.Tensor, ...]] = {}  # by stage: what the residual streams need afterwards
        self.sent: dict[int, Any] = {}
        for number, stage in enumerate(plan.stages):
            rows = slice(int(stage.token_slice.start), int(stage.token_slice.stop))
            assert stage.input_tokens == stage.actual_tokens  # no sequence parallelism
            self.hidden.append(hidden[rows])
            self.positions.append(positions[rows])
            context: Any = copy.copy(parent)
            context.attn_metadata = plan.attn_metadata[number]
            context.additional_kwargs = dict(parent.additional_kwargs)
            context.ubatch_idx, context.num_ubatches, context.dbo_enabled = number, len(plan.stages), False
            context.num_tokens, context.pad_size = stage.actual_tokens, 0
            context.input_ids = None if parent.input_ids is None else parent.input_ids[rows]
            self.contexts.append(context)

    def attention(self, layer: Any, stage: int) -> None:
        with override_forward_context(self.contexts[stage]):
            hidden = self.hidden[stage]
            residual = hidden.clone()
            hidden, post, comb = layer.hc_pre(hidden, layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base)
            hidden = layer.self_attn(self.positions[stage], layer.input_layernorm(hidden), None)
            hidden = layer.hc_post(hidden, residual, post, comb)
            residual = hidden.clone()
            hidden, post, comb = layer.hc_pre(hidden, layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base)
            self.hidden[stage] = layer.post_attention_layernorm(hidden)
            self.mixed[stage] = (residual, post, comb)

    def send(self, layer: Any, stage: int) -> None:
        with override_forward_context(self.contexts[stage]):
            self.sent[stage] = layer.mlp.send(self.hidden[stage], stage)

    def receive(self, layer: Any, stage: int) -> None:
        with override_forward_context(self.contexts[stage]):
            output = layer.mlp.receive(self.sent[stage], stage)
            self.hidden[stage] = layer.hc_post(output, *self.mixed[stage])

    def run(self) -> torch.Tensor:
        layers = self.model.layers
        for number, layer in enumerate(layers):
            self.attention(layer, 0)
            if number:
                self.receive(layers[number - 1], 1)
            self.send(layer, 0)
            self.attention(layer, 1)
            self.receive(layer, 0)
            self.send(layer, 1)
        self.receive(layers[-1], 1)
        rows = torch.cat(self.hidden)
        return functional.pad(rows, (0, 0, 0, 0, 0, self.plan.parent_input_tokens - rows.shape[0]))


class _Model(native.DeepseekV4Model):  # type: ignore[misc]  # untyped
    """vllm-ascend's, and the other order of layers where the runner has planned stages."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        plan = get_async_moe_ubatch_metadata_from_forward_context()
        if plan is None:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = hidden.unsqueeze(1).repeat(1, self.hc_mult, 1)
        hidden = _TwoStages(self, plan, hidden, positions).run()
        self._mtp_hidden_buffer[: hidden.shape[0]].copy_(hidden.flatten(1))
        return self.norm(self.hc_head(hidden, self.hc_head_fn, self.hc_head_scale, self.hc_head_base))


class _NoAttention(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()


@contextmanager
def _built_without(role: str) -> Iterator[None]:
    """Have vllm-ascend's classes build a model without what the other role has."""
    left_out: dict[str, Any] = {"DeepseekV4Attention": _NoAttention}
    if role == "attention":
        left_out = {
            "DeepseekV4MoE": _RemoteMoE,
            "FusedMoE": lambda **asked: types.SimpleNamespace(**{**asked, "gate": None}),
            "DeepseekV2MLP": lambda **_: None,
        }
    whole = {name: getattr(native, name) for name in left_out}
    vars(native).update(left_out)
    try:
        yield
    finally:
        vars(native).update(whole)


class SoftnpuDeepseekV4ForCausalLM(native.AscendDeepseekV4ForCausalLM):  # type: ignore[misc]  # untyped
    """See the module."""

    model_cls = _Model

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        afd = parse_afd_config(vllm_config, validate=False)
        self.afd_role, self.routes = afd.role, bool(afd.compute_gate_on_attention)
        with _built_without(afd.role):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        if afd.role == "attention":
            for layer in self.model.layers:
                layer.mlp.gate_here = self.routes

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load what this role has."""

        def wanted(name: str) -> bool:
            if self.afd_role == "attention":
                return ".ffn.experts." not in name and ".ffn.shared_experts." not in name
            return ".attn." not in name

        loaded: set[str] = super().load_weights((name, weight) for name, weight in weights if wanted(name))
        return loaded

    def compute_ffn_output(
        self,
        hidden_states: torch.Tensor,
        layer_idx: int,
        *,
        group_list: torch.Tensor | None = None,
        expand_x_shared: torch.Tensor | None = None,
        **_scales: Any,
    ) -> Any:
        """FFN role: a layer's MoE, or of a work item the experts of its rows (`group_list`: rows by expert)."""
        moe = self.model.layers[layer_idx].mlp
        if group_list is None:
            return moe(hidden_states)
        assert expand_x_shared is not None
        experts = moe.experts.routed_experts
        shared = moe.shared_experts(expand_x_shared) if expand_x_shared.shape[0] else None
        if hidden_states.shape[0] == 0:
            return AFDF2ATransferPayload(routed_output=hidden_states, shared_output=shared)
        routed = unified_apply_mlp(
            mlp_compute_input=MoEMlpComputeInput(
                hidden_states=hidden_states,
                group_list=group_list,
                group_list_type=1,
                dynamic_scale=None,
                topk_scales=None,
                weights=MoEWeights(w1=experts.w13_weight, w2=experts.w2_weight),
                quant=MoEQuantParams(quant_type=QuantType.NONE),
                fusion=False,
                activation=moe.experts.activation,
                need_trans=False,
                swiglu_limit=experts.swiglu_limit or 0.0,
            )
        )
        return AFDF2ATransferPayload(
            routed_output=routed[0] if isinstance(routed, tuple) else routed, shared_output=shared
        )
