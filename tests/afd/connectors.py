# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The connectors of afd_plugin/connectors at 85e826e: base, factory, CAMAsync and CAMP2P.

Kept, because somebody may rely on it or suffer from it: CAMAsync queues its payload before the operator is launched, so
a launch that fails leaves a stale entry; `close` drops the queue and drains nothing, and where destroying the group
raises, what comes after is not cleared; work items have no identity but layer and sender, and stage 0 on FFN whatever
the stage was; an item without tokens is answered with a stand-in row; CAMP2P keeps its state on the forward context.
Stricter: what `wire.py` says, and a connector that was closed. Settings come as the namespaces of `settings`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from tests.afd import ubatching
from tests.afd.metadata import (
    AFDA2FTransferPayload,
    AFDControlPayload,
    AFDF2ATransferPayload,
    AFDTransferContext,
    AFDTransferMetadata,
    AFDTransferState,
    decode_control_payload,
    encode_control_payload,
)
from tests.afd.wire import UnmatchedReceive, Wire, WrongPayload

#: The wire of this process; connectors take it when they are initialised.
WIRE = Wire()


@dataclass(frozen=True)
class AFDConfig:
    connector: str = "CAMAsyncAFDConnector"
    async_dp: bool = False
    role: str = "attention"
    port: int = 1239
    host: str = "127.0.0.1"
    num_attention_ranks: int = 1
    num_ffn_ranks: int = 1
    compute_gate_on_attention: bool = False


def settings(
    *, hidden_size: int, topk: int, experts: int, max_tokens: int, ubatches: int = 1, extra: Mapping[str, Any] = {}
) -> SimpleNamespace:
    """As much of a VllmConfig as the connectors read."""
    hf = SimpleNamespace(hidden_size=hidden_size, num_experts_per_tok=topk, n_routed_experts=experts)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens, max_num_seqs=8),
        parallel_config=SimpleNamespace(num_ubatches=ubatches),
        additional_config={"afd": {"connector_extra_config": dict(extra)}},
    )


class AFDConnectorBase(ABC):
    control_plane: AFDControlPlane | None = None
    attn_size: int = 0
    ffn_size: int = 0

    @classmethod
    @abstractmethod
    def parse_extra_config(cls, raw: Mapping[str, Any] | None) -> Any: ...

    def __init__(self, rank: int, local_rank: int, vllm_config: Any, afd_config: AFDConfig, role_rank: int) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.vllm_config = vllm_config
        self.afd_config = afd_config
        self.role_rank = role_rank
        self.extra_info = self.parse_extra_config(vllm_config.additional_config["afd"]["connector_extra_config"])

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def init_afd_connector(self) -> None: ...

    @property
    @abstractmethod
    def is_initialized(self) -> bool: ...

    @abstractmethod
    def send_attn_output(self, hidden_states: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None: ...

    @abstractmethod
    def recv_ffn_output(self, ref_tensor: torch.Tensor, ubatch_idx: int = 0, **kwargs: Any) -> torch.Tensor: ...

    @abstractmethod
    def recv_attn_output(self, ubatch_idx: int = 0, **kwargs: Any) -> AFDA2FTransferPayload: ...

    @abstractmethod
    def send_ffn_output(self, ffn_output: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None: ...


class AFDControlPlane(ABC):
    @abstractmethod
    def update_state_from_dp_metadata(self, payload: AFDControlPayload) -> None: ...

    @abstractmethod
    def send_dp_metadata_list(self, payload: AFDControlPayload) -> None: ...

    @abstractmethod
    def recv_dp_metadata_list(self) -> AFDControlPayload: ...


class AFDConnectorFactory:
    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str, *, replace: bool = False) -> None:
        if name in cls._registry and not replace:
            raise ValueError(f"connector {name!r} is registered already")

        def load() -> type[AFDConnectorBase]:
            found = vars(importlib.import_module(module_path))[class_name]
            if not issubclass(found, AFDConnectorBase):
                raise TypeError(f"{module_path}.{class_name} is no AFDConnectorBase")
            return found  # type: ignore[no-any-return]

        cls._registry[name] = load

    @classmethod
    def create_connector(
        cls, rank: int, local_rank: int, vllm_config: Any, afd_config: AFDConfig | None = None
    ) -> AFDConnectorBase:
        if afd_config is None:
            raise ValueError("the double parses no VllmConfig; give an AFDConfig")
        return cls.get_connector_class(afd_config.connector)(rank, local_rank, vllm_config, afd_config, rank)

    @classmethod
    def get_connector_class(cls, connector_name: str) -> type[AFDConnectorBase]:
        if connector_name not in cls._registry:
            raise ValueError(f"no AFD connector is called {connector_name}")
        return cls._registry[connector_name]()  # type: ignore[no-any-return]

    @classmethod
    def parse_connector_extra_info(cls, connector_name: str, source: Any) -> Any:
        raw = source.additional_config["afd"]["connector_extra_config"]
        return cls.get_connector_class(connector_name).parse_extra_config(raw)


# CAMAsync

EXTRA = {
    "dynamicQuant": "dynamic_quant",
    "attn_ranks_per_dp": "attn_ranks_per_dp",
    "async_moe_ubatching": "async_moe_ubatching",
    "async_moe_num_ubatches": "async_moe_num_ubatches",
    "async_moe_split": "async_moe_split",
}


@dataclass(frozen=True)
class AFDAsyncExtraInfo:
    dynamic_quant: int = 0
    attn_ranks_per_dp: int = 1
    async_moe_ubatching: bool = False
    async_moe_num_ubatches: int = 2
    async_moe_split: str = "request"


@dataclass(slots=True)
class AFDAsyncTransferState(AFDTransferState):
    batch_size: int = 1
    hidden_size: int = 1
    topk: int = 1
    layer_idx: int = 0
    token_nums_rankid_layeridx: torch.Tensor | None = None
    expert_token_nums_shared: torch.Tensor | None = None
    group_list: torch.Tensor | None = None
    dynamic_scales: torch.Tensor | None = None
    expand_x_shared: torch.Tensor | None = None
    dynamic_scales_shared: torch.Tensor | None = None


@dataclass(slots=True)
class AFDAsyncFFNWorkItem:
    hidden_states: torch.Tensor
    context: AFDTransferContext
    recv_output: AFDA2FTransferPayload
    layer_idx: int
    stage_idx: int
    num_tokens: int
    total_num_tokens: int
    shared_num_tokens: int


@dataclass(frozen=True, slots=True)
class AFDAsyncTopology:
    role: str
    role_rank: int
    world_rank: int
    attn_size: int
    ffn_size: int
    expert_per_rank: int

    @property
    def world_size(self) -> int:
        return self.attn_size + self.ffn_size


def build_async_topology(
    afd_config: AFDConfig, role_rank: int, *, num_routed_experts: int | None = None
) -> AFDAsyncTopology:
    attention, ffn = afd_config.num_attention_ranks, afd_config.num_ffn_ranks
    sizes = {"attention": attention, "ffn": ffn}
    if min(attention, ffn) <= 0 or not 0 <= role_rank < sizes[afd_config.role]:
        raise ValueError(f"{afd_config.role} rank {role_rank} in a world of {attention} + {ffn}")
    world_rank = role_rank + (attention if afd_config.role == "ffn" else 0)
    return AFDAsyncTopology(
        afd_config.role, role_rank, world_rank, attention, ffn, -(-(num_routed_experts or 1) // ffn)
    )


class CAMAsyncAFDConnector(AFDConnectorBase):
    control_plane = None

    @classmethod
    def parse_extra_config(cls, raw: Mapping[str, Any] | None) -> AFDAsyncExtraInfo:
        raw = raw or {}
        if unknown := sorted(set(raw) - set(EXTRA)):
            raise ValueError(f"unknown AFD async connector_extra_config field(s): {', '.join(unknown)}")
        return AFDAsyncExtraInfo(**{EXTRA[name]: value for name, value in raw.items()})

    def __init__(self, rank: int, local_rank: int, vllm_config: Any, afd_config: AFDConfig, role_rank: int) -> None:
        super().__init__(rank, local_rank, vllm_config, afd_config, role_rank)
        hf = vllm_config.model_config.hf_config
        self.hidden_size = hf.hidden_size
        self.topk = hf.num_experts_per_tok
        self.num_routed_experts = hf.n_routed_experts
        self.dynamic_quant = self.extra_info.dynamic_quant
        self.max_seq_len = vllm_config.scheduler_config.max_num_batched_tokens
        self.comm_id = 0
        self.tp_size = self.extra_info.attn_ranks_per_dp
        self.topology = build_async_topology(afd_config, role_rank, num_routed_experts=self.num_routed_experts)
        self.world_rank = self.topology.world_rank
        self.attn_size = self.topology.attn_size
        self.ffn_size = self.topology.ffn_size
        self.expert_per_rank = self.topology.expert_per_rank
        self.group_name = ""
        self.cam_pg: Any = None
        self.comm_args: torch.Tensor | None = None
        self._placeholder: torch.Tensor | None = None
        self._pending_attention_payloads: dict[int, list[tuple[AFDTransferContext, torch.Tensor, torch.Tensor]]] = {}
        self._initialized = False

    @property
    def is_initialized(self) -> bool:
        return self._initialized

    def init_afd_connector(self) -> None:
        if self._initialized:
            return
        name = f"afd_async_cam {self.afd_config.host}:{self.afd_config.port}"
        self.cam_pg = self.group_name = WIRE.join(name, self.world_rank, self.attn_size, self.ffn_size)
        self.comm_args = torch.empty((1,), dtype=torch.float16, device="npu")
        self._placeholder = torch.empty((1,), dtype=torch.bfloat16, device="npu")
        self._initialized = True

    def close(self) -> None:
        if self.cam_pg is not None:
            self._destroy()
        self.cam_pg = self.comm_args = self._placeholder = None
        self._pending_attention_payloads.clear()
        self._initialized = False

    def _destroy(self) -> None:
        """`dist.destroy_process_group`."""
        WIRE.leave(self.cam_pg, self.world_rank)

    def select_experts(self, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("the model of the tests routes by a table")

    def send_attn_output(self, hidden_states: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None:
        self._require_initialized()
        metadata = context.metadata
        if not metadata.validate_tensor_shape(tuple(hidden_states.shape)):
            raise WrongPayload(
                f"hidden_states {tuple(hidden_states.shape)} for a transfer of {metadata.total_tokens} tokens"
            )
        topk_ids, topk_weights = kwargs.get("topk_ids"), kwargs.get("topk_weights")
        if topk_ids is None or topk_weights is None:
            raise RuntimeError("CAMAsyncAFDConnector.send_attn_output needs topk_ids and topk_weights")
        states = AFDAsyncTransferState(metadata.total_tokens, self.hidden_size, self.topk, metadata.layer_idx)
        for name, routing in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if tuple(routing.shape) != (states.batch_size, states.topk):
                raise WrongPayload(
                    f"{name} {tuple(routing.shape)}; {states.batch_size} tokens to {states.topk} experts"
                )
        context.states = states
        # Before the launch, as upstream at this commit: if that fails, the entry stays.
        self._pending_attention_payloads.setdefault(metadata.stage_idx, []).append((context, topk_ids, topk_weights))
        assert self.comm_args is not None
        WIRE.async_dispatch_send(
            hidden_states,
            topk_ids,
            self.comm_args,
            self.comm_id,
            self.max_seq_len,
            states.batch_size,
            states.hidden_size,
            states.topk,
            self.ffn_size,
            self.attn_size,
            self.expert_per_rank,
            self.world_rank,
            self.topology.world_size,
            states.layer_idx,
            self.tp_size,
            self.dynamic_quant,
            self.group_name,
        )

    def recv_ffn_output(self, ref_tensor: torch.Tensor, ubatch_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        self._require_initialized()
        given = [kwargs.get(name) for name in ("context", "topk_ids", "topk_weights")]
        if any(value is None for value in given):
            pending = self._pending_attention_payloads.get(ubatch_idx)
            if not pending:
                raise UnmatchedReceive(f"stage {ubatch_idx} receives, and has nothing pending; send first")
            given = [mine if mine is not None else theirs for mine, theirs in zip(given, pending.pop(0), strict=True)]
            if not pending:
                del self._pending_attention_payloads[ubatch_idx]
        context, topk_ids, topk_weights = given
        states = _require_async_transfer_state(context)  # type: ignore[arg-type]
        return WIRE.async_combine_recv(
            ref_tensor.new_empty((1,)),
            topk_ids,  # type: ignore[arg-type]
            topk_weights,  # type: ignore[arg-type]
            self.comm_args,  # type: ignore[arg-type]
            self.comm_id,
            states.batch_size,
            states.hidden_size,
            states.topk,
            self.ffn_size,
            self.attn_size,
            self.expert_per_rank,
            self.world_rank,
            self.topology.world_size,
            self.group_name,
        )

    def recv_attn_output(self, ubatch_idx: int = 0, **kwargs: Any) -> AFDA2FTransferPayload:
        self._require_initialized()
        tokens = int(kwargs.get("batch_size", self.max_seq_len) or 1)
        layer = int(kwargs.get("layer_idx", 0) or 0)
        states = AFDAsyncTransferState(tokens, self.hidden_size, self.topk, layer)
        metadata = AFDTransferMetadata.create_ffn_metadata(layer_idx=layer, stage_idx=ubatch_idx, seq_lens=[tokens])
        assert self._placeholder is not None
        assert self.comm_args is not None
        (
            hidden_states,
            states.expand_x_shared,
            states.dynamic_scales,
            states.dynamic_scales_shared,
            states.token_nums_rankid_layeridx,
            states.group_list,
            states.expert_token_nums_shared,
        ) = WIRE.async_dispatch_recv(
            kwargs.get("placeholder", self._placeholder),
            self.comm_args,
            self.comm_id,
            tokens,
            self.hidden_size,
            self.topk,
            self.ffn_size,
            self.attn_size,
            self.expert_per_rank,
            self.world_rank,
            self.topology.world_size,
            self.tp_size,
            self.dynamic_quant,
            self.group_name,
        )
        return AFDA2FTransferPayload(hidden_states, AFDTransferContext(metadata, states))

    def recv_ffn_work_item(self, *, stage_idx: int, max_num_tokens: int) -> AFDAsyncFFNWorkItem:
        received = self.recv_attn_output(
            stage_idx, layer_idx=0, batch_size=max(1, self.max_seq_len or max_num_tokens), stage_idx=stage_idx
        )
        metadata, states = received.context.metadata, _require_async_transfer_state(received.context)
        assert states.token_nums_rankid_layeridx is not None
        assert states.expert_token_nums_shared is not None
        assert states.group_list is not None
        assert states.expand_x_shared is not None
        total, layer = (int(states.token_nums_rankid_layeridx[at].item()) for at in (0, 2))
        shared = int(states.expert_token_nums_shared[0].item())
        tokens = int(states.group_list.sum().item())
        metadata.layer_idx, metadata.stage_idx, metadata.seq_lens = layer, stage_idx, [tokens]  # [0] passes no check
        states.expand_x_shared = states.expand_x_shared[:shared]
        return AFDAsyncFFNWorkItem(
            received.hidden_states[:tokens],
            received.context,
            received,
            layer,
            stage_idx,
            tokens,
            max(1, total),
            shared,
        )

    def send_ffn_work_item_output(
        self, work_item: AFDAsyncFFNWorkItem, ffn_output: torch.Tensor | AFDF2ATransferPayload
    ) -> torch.Tensor | AFDF2ATransferPayload:
        if work_item.num_tokens == 0:
            # The dispatch buffer may be int8, which the combine does not take: one row of zeros stands in.
            width = work_item.recv_output.hidden_states.shape[-1]
            stand_in = torch.zeros((1, width), dtype=torch.bfloat16, device=work_item.hidden_states.device)
            work_item.context.metadata.seq_lens = [1]
            if isinstance(ffn_output, AFDF2ATransferPayload):
                ffn_output = AFDF2ATransferPayload(stand_in, ffn_output.shared_output)
            else:
                ffn_output = stand_in
        self._send_ffn_output_payload(ffn_output, work_item.context, stage_idx=work_item.stage_idx)
        return ffn_output

    def _send_ffn_output_payload(
        self, ffn_output: torch.Tensor | AFDF2ATransferPayload, context: AFDTransferContext, *, stage_idx: int
    ) -> None:
        if not isinstance(ffn_output, AFDF2ATransferPayload):
            self.send_ffn_output(ffn_output, context, ubatch_idx=stage_idx)
        elif ffn_output.shared_output is None:
            self.send_ffn_output(ffn_output.routed_output, context, ubatch_idx=stage_idx)
        else:
            self.send_ffn_output(
                ffn_output.routed_output, context, ubatch_idx=stage_idx, expand_x_shared=ffn_output.shared_output
            )

    def send_ffn_output(self, ffn_output: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None:
        self._require_initialized()
        states = _require_async_transfer_state(context)
        handle = states.token_nums_rankid_layeridx
        if handle is None:
            handle = kwargs.get("token_nums_rankid_layeridx")
        if handle is None:
            raise RuntimeError("a combine needs TokenNums_Rankid_Layeridx of the dispatch that it answers")
        shared = kwargs.get("expand_x_shared")
        WIRE.async_combine_send(
            ffn_output,
            ffn_output if shared is None else shared,
            self.comm_args,  # type: ignore[arg-type]
            handle,
            self.comm_id,
            states.batch_size,
            states.hidden_size,
            states.topk,
            self.ffn_size,
            self.attn_size,
            self.expert_per_rank,
            self.world_rank,
            self.topology.world_size,
            self.tp_size,
            self.group_name,
        )

    def _require_initialized(self) -> None:
        if not self._initialized:
            raise RuntimeError("CAMAsyncAFDConnector is not initialized")


def _require_async_transfer_state(context: AFDTransferContext) -> AFDAsyncTransferState:
    if not isinstance(context.states, AFDAsyncTransferState):
        raise RuntimeError("CAMAsyncAFDConnector needs an AFDAsyncTransferState in the transfer context")
    return context.states


# CAMP2P


@dataclass(frozen=True)
class CAMP2PExtraInfo:
    core_num: int = 8
    attn_core_num: int | None = None
    ffn_core_num: int | None = None
    compute_gate_on_attention: bool = False
    quant_mode: int = 0

    def aiv_num_for_role(self, role: str) -> int:
        own = self.attn_core_num if role == "attention" else self.ffn_core_num
        return self.core_num if own is None else own

    def validate_supported(self) -> None:
        if self.compute_gate_on_attention or self.quant_mode:
            raise RuntimeError("CAMP2P has neither the gate on Attention nor quantisation")


@dataclass(slots=True)
class CAMP2PTransferState(AFDTransferState):
    aiv_num: int = 8
    batch_size: int = 0
    h: int = 0
    k: int = 1
    atten_batch_size: torch.Tensor | None = None
    x_active_mask: torch.Tensor | None = None
    cam_p2p_ep_name: str | None = None


class CAMP2pAFDConnector(AFDConnectorBase):
    @classmethod
    def parse_extra_config(cls, raw: Mapping[str, Any] | None) -> CAMP2PExtraInfo:
        raw = raw or {}
        if unknown := sorted(set(raw) - set(CAMP2PExtraInfo.__dataclass_fields__)):
            raise ValueError(f"unknown CAMP2P connector_extra_config field(s): {', '.join(unknown)}")
        return CAMP2PExtraInfo(**raw)

    def __init__(self, rank: int, local_rank: int, vllm_config: Any, afd_config: AFDConfig, role_rank: int) -> None:
        super().__init__(rank, local_rank, vllm_config, afd_config, role_rank)
        self.attn_size, self.ffn_size = afd_config.num_attention_ranks, afd_config.num_ffn_ranks
        if not 0 < self.ffn_size <= self.attn_size:
            raise ValueError(f"CAMP2P wants at least as many Attention ranks as FFN ranks, got {self.attn_size}")
        self.world_rank = role_rank + (self.ffn_size if afd_config.role == "attention" else 0)
        self.dp_metadata_list: dict[int, Any] = {}
        self.is_graph_capturing = False
        self.is_warmup = False
        hf = vllm_config.model_config.hf_config
        self.hidden_size = hf.hidden_size
        self.num_experts_per_tok = hf.num_experts_per_tok
        self.aiv_num = self.extra_info.aiv_num_for_role(afd_config.role)
        self.hccl_comm_name_list: list[str] = []
        self.control_plane = CAMP2pAFDControlPlane(self)
        self._initialized = False

    @property
    def is_initialized(self) -> bool:
        return self._initialized

    def init_afd_connector(self) -> None:
        if self._initialized:
            return
        for ubatch in range(max(1, self.vllm_config.parallel_config.num_ubatches)):
            name = f"afd{ubatch or ''} {self.afd_config.host}:{self.afd_config.port}"
            self.hccl_comm_name_list.append(WIRE.join(name, self.world_rank, self.attn_size, self.ffn_size))
        self._initialized = True

    def close(self) -> None:
        for name in self.hccl_comm_name_list:
            self._destroy(name)
        self.hccl_comm_name_list = []
        self._initialized = False

    def _destroy(self, name: str) -> None:
        """`dist.destroy_process_group`."""
        WIRE.leave(name, self.world_rank)

    def send_attn_output(self, hidden_states: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None:
        self._require_initialized()
        metadata = context.metadata
        if not metadata.validate_tensor_shape(tuple(hidden_states.shape)):
            raise WrongPayload(
                f"hidden_states {tuple(hidden_states.shape)} for a transfer of {metadata.total_tokens} tokens"
            )
        state = CAMP2PTransferState(self.aiv_num, metadata.total_tokens, self.hidden_size, self.num_experts_per_tok)
        forward_context = ubatching.get_forward_context()
        forward_context.cam_afdtransfer_state = state
        forward_context.ubatch_idx = metadata.stage_idx
        outputs = WIRE.a2e(hidden_states, None, None, *self._sizes(state), self._group(metadata.stage_idx), 8, 0)
        state.atten_batch_size = outputs[3]

    def recv_ffn_output(self, ref_tensor: torch.Tensor, ubatch_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        self._require_initialized()
        forward_context = ubatching.get_forward_context()
        state = getattr(forward_context, "cam_afdtransfer_state", None)
        if state is None or state.atten_batch_size is None:
            raise UnmatchedReceive(f"uBatch {ubatch_idx} receives, and its forward context knows no send; send first")
        forward_context.ubatch_idx = ubatch_idx
        return WIRE.e2a(ref_tensor, state.atten_batch_size, *self._sizes(state), self._group(ubatch_idx), 8)

    def recv_attn_output(self, ubatch_idx: int = 0, **kwargs: Any) -> AFDA2FTransferPayload:
        self._require_initialized()
        counts = self.dp_metadata_list[ubatch_idx].num_tokens_across_dp_cpu.tolist()
        share = self.attn_size // self.ffn_size
        tokens = max(1, sum(counts[self.role_rank * share : (self.role_rank + 1) * share]))
        state = CAMP2PTransferState(self.aiv_num, tokens, self.hidden_size, self.num_experts_per_tok)
        nothing = torch.empty(0, dtype=torch.bfloat16, device="npu")
        outputs = WIRE.a2e(nothing, None, None, *self._sizes(state), self._group(ubatch_idx), 8, 0)
        state.atten_batch_size, state.x_active_mask = outputs[3], outputs[4]
        metadata = AFDTransferMetadata.create_ffn_metadata(
            layer_idx=kwargs.get("layer_idx", 0), stage_idx=ubatch_idx, seq_lens=[tokens]
        )
        return AFDA2FTransferPayload(outputs[0], AFDTransferContext(metadata, state))

    def send_ffn_output(self, ffn_output: torch.Tensor, context: AFDTransferContext, **kwargs: Any) -> None:
        self._require_initialized()
        state = context.states
        if not isinstance(state, CAMP2PTransferState) or state.atten_batch_size is None:
            raise RuntimeError("CAMP2P answers a transfer that it did not receive")
        ubatch = int(kwargs.get("ubatch_idx", context.metadata.stage_idx))
        WIRE.e2a(ffn_output, state.atten_batch_size, *self._sizes(state), self._group(ubatch), 8)

    def _sizes(self, state: CAMP2PTransferState) -> tuple[int, int, int, int, int, int]:
        return state.batch_size, state.h, state.k, self.ffn_size, self.attn_size, self.world_rank

    def _group(self, ubatch: int) -> str:
        if not 0 <= ubatch < len(self.hccl_comm_name_list):
            raise RuntimeError(f"CAMP2P has groups for {len(self.hccl_comm_name_list)} uBatches, and none for {ubatch}")
        return self.hccl_comm_name_list[ubatch]

    def _require_initialized(self) -> None:
        if not self._initialized:
            raise RuntimeError("CAMP2P connector is not initialized")


class CAMP2pAFDControlPlane(AFDControlPlane):
    def __init__(self, connector: CAMP2pAFDConnector) -> None:
        self.connector = connector

    def update_state_from_dp_metadata(self, payload: AFDControlPayload) -> None:
        self.connector.dp_metadata_list = payload.dp_metadata_list
        self.connector.is_graph_capturing = payload.is_graph_capturing
        self.connector.is_warmup = payload.is_warmup

    def send_dp_metadata_list(self, payload: AFDControlPayload) -> None:
        self.connector._require_initialized()
        here = self.connector
        WIRE.send_control(here.hccl_comm_name_list[0], encode_control_payload(payload), here.role_rank)

    def recv_dp_metadata_list(self) -> AFDControlPayload:
        self.connector._require_initialized()
        here = self.connector
        return decode_control_payload(WIRE.recv_control(here.hccl_comm_name_list[0], here.role_rank))


for _name in ("CAMP2pAFDConnector", "CAMAsyncAFDConnector"):
    AFDConnectorFactory.register_connector(_name, __name__, _name)
