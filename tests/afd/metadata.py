# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What goes with a transfer between Attention and FFN, as afd_plugin/connectors/metadata.py has it at 85e826e.

Fields, defaults and checks are upstream's; the JSON of the control payload is byte for byte what it sends. Not here:
graph-only fields, and the sharding helpers of `AFDDPMetadata`, which only a GPU uses.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class AFDTransferMetadata:
    layer_idx: int
    stage_idx: int
    seq_lens: list[int]

    def __post_init__(self) -> None:
        if not self.seq_lens:
            raise ValueError("a transfer has at least one sequence length")
        if min(self.seq_lens) <= 0:
            raise ValueError(f"sequence lengths are above 0, got {self.seq_lens}")

    @property
    def total_tokens(self) -> int:
        return sum(self.seq_lens)

    @classmethod
    def create_attention_metadata(cls, *, layer_idx: int, stage_idx: int, seq_len: int) -> AFDTransferMetadata:
        return cls(layer_idx, stage_idx, [seq_len])

    @classmethod
    def create_ffn_metadata(cls, *, layer_idx: int, stage_idx: int, seq_lens: list[int]) -> AFDTransferMetadata:
        return cls(layer_idx, stage_idx, [*seq_lens])

    def validate_tensor_shape(self, tensor_shape: tuple[int, ...]) -> bool:
        return bool(tensor_shape) and tensor_shape[0] == self.total_tokens


@dataclass(slots=True)
class AFDTransferState:
    pass


@dataclass(slots=True)
class AFDTransferContext:
    metadata: AFDTransferMetadata
    states: AFDTransferState | None = None


@dataclass(slots=True)
class AFDA2FTransferPayload:
    hidden_states: torch.Tensor
    context: AFDTransferContext
    router_logits: torch.Tensor | None = None
    input_ids: torch.Tensor | None = None


@dataclass(slots=True)
class AFDF2ATransferPayload:
    routed_output: torch.Tensor
    shared_output: torch.Tensor | None = None


@dataclass(slots=True)
class AFDDPMetadata:
    num_tokens_across_dp_cpu: torch.Tensor
    max_tokens_across_dp_cpu: torch.Tensor | None = None
    local_sizes: list[int] | None = None

    def __post_init__(self) -> None:
        tokens = torch.as_tensor(self.num_tokens_across_dp_cpu, dtype=torch.int32, device="cpu")
        most = tokens.max() if self.max_tokens_across_dp_cpu is None else self.max_tokens_across_dp_cpu
        self.num_tokens_across_dp_cpu = tokens
        self.max_tokens_across_dp_cpu = torch.as_tensor(most, dtype=torch.int32, device="cpu")


@dataclass(slots=True)
class AFDControlPayload:
    dp_metadata_list: dict[int, AFDDPMetadata]
    is_graph_capturing: bool
    is_warmup: bool


@dataclass(slots=True)
class AFDForwardContextMetadata:
    tokens_start_loc: list[int]
    requests_start_loc: list[int]
    stage_idx: int
    connector: Any
    tokens_lens: list[int]
    num_stages: int
    transaction_id: str | None = None
    tokens_unpadded_lens: list[int] = field(default_factory=list)

    def clone(self) -> AFDForwardContextMetadata:
        other = copy.copy(self)
        for name in ("tokens_start_loc", "requests_start_loc", "tokens_lens", "tokens_unpadded_lens"):
            setattr(other, name, [*getattr(self, name)])
        return other


def encode_control_payload(payload: AFDControlPayload) -> bytes:
    stages = {
        str(int(stage)): {
            "num_tokens_across_dp_cpu": counts.num_tokens_across_dp_cpu.tolist(),
            "max_tokens_across_dp_cpu": int(counts.max_tokens_across_dp_cpu),  # type: ignore[arg-type]
        }
        for stage, counts in payload.dp_metadata_list.items()
    }
    flags = {"is_graph_capturing": bool(payload.is_graph_capturing), "is_warmup": bool(payload.is_warmup)}
    return json.dumps({"dp_metadata_list": stages, **flags}, separators=(",", ":"), sort_keys=True).encode()


def decode_control_payload(payload_bytes: bytes) -> AFDControlPayload:
    found = json.loads(payload_bytes.decode())
    stages = {
        int(stage): AFDDPMetadata(
            torch.tensor(counts["num_tokens_across_dp_cpu"], dtype=torch.int32),
            torch.tensor(counts["max_tokens_across_dp_cpu"], dtype=torch.int32),
        )
        for stage, counts in found["dp_metadata_list"].items()
    }
    return AFDControlPayload(stages, bool(found["is_graph_capturing"]), bool(found["is_warmup"]))
