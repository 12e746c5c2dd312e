# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The interface between an engine and whatever compresses: one execution, then one call per layer and kind.

Two executors stand behind it, with the same tails: `stock.py` drives the operator that vllm-ascend ships, `afd.py` the
project's own kernels. `library.py` says whether there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from afd_dsv4.geometry import CompressorKind
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.identity import Generation


@dataclass(frozen=True)
class CompressorWeights:
    """Weights of one compressor, as the stock operator takes them.

    Attributes:
        wkv: [coff * D, hidden], the dtype of x.
        wgate: the same.
        ape: [ratio, coff * D], float32.
        norm_weight: [D], the dtype of x.
        norm_eps: added to the mean square.
        rope_head_dim: rotated values at the end of a row.
    """

    wkv: torch.Tensor
    wgate: torch.Tensor
    ape: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    rope_head_dim: int = 64


class Execution(Protocol):
    """One uBatch of one forward, from planning to the last compressor launch."""

    def compress(
        self,
        layer: int,
        kind: CompressorKind,
        x: torch.Tensor,
        weights: CompressorWeights,
        rope_cos: torch.Tensor,
        rope_sin: torch.Tensor,
        cu_seqlens: torch.Tensor,
        requests: slice = slice(None),
    ) -> torch.Tensor:
        """Queue one compressor launch on the current stream.

        Args:
            layer: the model's layer; those of one kind in ascending order.
            kind: which of its compressors.
            x: [T, hidden], the packed tokens of the launch: exactly those of its requests.
            weights: of this compressor.
            rope_cos: [R, rope_head_dim] with R = min(T, T // ratio + requests), at each window's first position.
            rope_sin: the same.
            cu_seqlens: int32 [requests + 1], first token of each request within x.
            requests: those of this launch, where prefill and decode are two launches, in either order; each once.

        Returns:
            [R, D] in x's dtype: compressed rows, request after request. Rows beyond the last window are unfilled.
        """

    def finish(self) -> None:
        """No more launches. Call it in a `finally`."""


class Executor(Protocol):
    """Owns tails and workspace slots."""

    def begin(
        self, chunks: Sequence[RequestChunk], *, generation: Generation | None = None, ubatch: int = 0
    ) -> Execution:
        """Plan an execution and lease its workspace slot."""

    def end_request(self, request: RequestId) -> None:
        """The request is over: its tail may be given to another."""
