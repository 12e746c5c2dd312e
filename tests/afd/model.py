# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A model that is driven through the protocol, and the truth about its every row.

Per layer: the real compressor launches of that layer through an execution, an attention that flips signs, and experts
that scale columns; what the last layer's experts return is the output. All but the compressors is exact in bfloat16 or
rounds once, whatever a token is batched with, so each hidden state and compressed row has one right value: `Truth` has
them from the whole sequence in one piece, in NumPy, by the definition in `compressor/reference.py`.
The layers have the shape that afd-plugin's schedules ask for (`compute_attn_output`, `layers`, `start_layer`), so that
they carry the commit's own schedule functions, too.
Not here: attention over compressed rows. They are compared, not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from afd_dsv4.compressor import reference
from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.geometry import CompressorKind, ModelGeometry
from afd_dsv4.tail.tables import RequestChunk
from tests.stock_world import SPECS, random_weights

HIDDEN = 32  # the operator's own check of it must be waived
GEOMETRY = ModelGeometry("afd", HIDDEN, 3, (4, 128, 4))
LAYERS = GEOMETRY.num_layers
LENGTH = 264  # tokens of a sequence: two windows of 128, and some
SEQUENCES = 4
EXPERTS, TOPK = 4, 2
RATIOS = (4, 128)


def bfloat16(values: Any) -> torch.Tensor:
    """Exact: the values are bfloat16 already."""
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16()


class Truth:
    """Weights of the model, sequences, and what becomes of every token of them.

    Args:
        seed: of everything.
        routed: experts as CAM has them (two of four, and a shared one); else one dense FFN, as CAMP2P.

    Attributes:
        hidden: float32 [layers + 1, sequences, length, hidden]: what enters each layer, and the output.
        rows: by layer and kind, bfloat16 bits [sequences, windows, head_dim].
        ids: int32 [sequences, length, topk]: experts of a token, alike in all layers.
        topk_weights: float32, the same shape.
    """

    def __init__(self, seed: int, *, routed: bool) -> None:
        rng = np.random.default_rng(seed)
        self.routed = routed
        self.weights = random_weights(GEOMETRY, torch.Generator().manual_seed(seed))
        cos, sin = reference.rope_table(np.arange(LENGTH, dtype=np.int64))
        self.cos, self.sin = torch.from_numpy(cos).bfloat16(), torch.from_numpy(sin).bfloat16()
        self.signs = rng.choice([-1.0, 1.0], (LAYERS, HIDDEN)).astype(np.float32)
        self.experts = rng.choice([-2.0, -1.0, 0.5, 1.0, 2.0], (LAYERS, EXPERTS, HIDDEN)).astype(np.float32)
        self.shared = rng.choice([-1.0, 1.0], (LAYERS, HIDDEN)).astype(np.float32)
        self.dense = reference.round_to_bfloat16(rng.uniform(0.5, 2, (LAYERS, HIDDEN)).astype(np.float32))
        # Some tokens have both experts on one FFN rank of two.
        pairs = np.array([(0, 1), (0, 2), (1, 3), (2, 3), (3, 0), (2, 1)], np.int32)
        self.ids = pairs[rng.integers(0, len(pairs), (SEQUENCES, LENGTH))]
        self.topk_weights = rng.choice(np.array([0.25, 0.5, 1.0], np.float32), (SEQUENCES, LENGTH, TOPK))
        self.hidden = np.empty((LAYERS + 1, SEQUENCES, LENGTH, HIDDEN), np.float32)
        self.hidden[0] = reference.round_to_bfloat16(
            rng.standard_normal((SEQUENCES, LENGTH, HIDDEN)).astype(np.float32)
        )
        for layer in range(LAYERS):
            self.hidden[layer + 1] = self._ffn(layer, self.hidden[layer] * self.signs[layer])
        self.rows = {
            key: np.stack([self._compress(weights, key[1], self.hidden[key[0], s]) for s in range(SEQUENCES)])
            for key, weights in self.weights.items()
        }

    def _ffn(self, layer: int, x: Any) -> Any:
        if not self.routed:
            return reference.round_to_bfloat16(x * self.dense[layer])
        total = x * self.shared[layer]
        for k in range(TOPK):
            total = total + self.topk_weights[..., k, None] * (x * self.experts[layer][self.ids[..., k]])
        return reference.round_to_bfloat16(total.astype(np.float32))

    def _compress(self, weights: CompressorWeights, kind: CompressorKind, x: Any) -> Any:
        spec = SPECS[kind]
        projected = reference.make_rows(
            reference.project(x, weights.wkv.float().numpy()),
            reference.project(x, weights.wgate.float().numpy()),
            weights.ape.numpy(),
            0,
        )
        at = slice(0, LENGTH // spec.ratio * spec.ratio, spec.ratio)
        cos, sin = self.cos[at].float().numpy(), self.sin[at].float().numpy()
        compressed = reference.compress_sequence(projected, spec, weights.norm_weight.float().numpy(), cos, sin)
        return reference.bfloat16_bits(compressed).view(np.int16)


truth = functools.lru_cache(maxsize=4)(Truth)


class Experts:
    """The FFN role's share of the model: what it computes of what it receives."""

    def __init__(self, truth: Truth, ffn_rank: int, ffn_size: int, device: str = "npu") -> None:
        share = EXPERTS // ffn_size
        self.dense = bfloat16(truth.dense).to(device)
        self.shared = bfloat16(truth.shared).to(device)
        self.mine = bfloat16(truth.experts[:, ffn_rank * share : (ffn_rank + 1) * share]).to(device)

    def compute_ffn_output(self, hidden_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """A dense FFN."""
        return hidden_states * self.dense[layer_idx]

    def routed(self, hidden_states: torch.Tensor, layer_idx: int, group_list: torch.Tensor) -> torch.Tensor:
        """Rows that stand sorted by expert; `group_list` counts each expert's."""
        counts = group_list.tolist()
        expert = np.repeat(np.arange(len(counts)), counts)
        if not len(expert):
            return hidden_states
        return hidden_states * self.mine[layer_idx].index_select(0, torch.from_numpy(expert).to(self.mine.device))

    def everybodys(self, hidden_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """The shared expert."""
        return hidden_states * self.shared[layer_idx]


@dataclass(eq=False)
class Share:
    """One uBatch's part of a batch, on the device.

    Attributes:
        chunks: its requests.
        tokens: how many.
        rope: by ratio, cos and sin of each compressed row.
        cu_seqlens: int32 [requests + 1].
        ids: int32 [tokens, topk].
        topk_weights: float32, the same shape.
    """

    chunks: tuple[RequestChunk, ...]
    tokens: int
    rope: dict[int, tuple[torch.Tensor, torch.Tensor]]
    cu_seqlens: torch.Tensor
    ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(eq=False)
class Output:
    """A launch's compressed rows, to be compared once the device has run."""

    layer: int
    kind: CompressorKind
    chunks: tuple[RequestChunk, ...]
    rows: torch.Tensor


class DriverLayer:
    """A decoder layer as the schedules see it."""

    is_moe_layer = True

    def __init__(self, model: DriverModel, layer_idx: int) -> None:
        self.model = model
        self.layer_idx = layer_idx

    def compute_attn_output(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: Any, llama_4_scaling: Any = None
    ) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor, Any]:
        """Compress and attend; returns hidden states, residual, weights and ids of the routing, and router logits."""
        model = self.model
        ubatch = model.current_ubatch()
        share = model.shares[ubatch]
        model.compress(self.layer_idx, ubatch, hidden_states[: share.tokens])
        padding = len(hidden_states) - share.tokens
        ids, weights = share.ids, share.topk_weights
        if padding:
            ids = torch.cat([ids, ids.new_zeros((padding, TOPK))])
            weights = torch.cat([weights, weights.new_zeros((padding, TOPK))])
        return hidden_states * model.signs[self.layer_idx], residual, weights, ids, None


class DriverModel:
    """The Attention role's share of the model.

    Args:
        truth: its weights and sequences.
        current_ubatch: which uBatch is computed now, as the adapter asks: by the forward context.
        device: where.

    Attributes:
        shares: by uBatch, of the forward that runs.
        forward: its executions.
        outputs: compressed rows that were not compared yet.
        at: called with the name of a point that is passed; a test's faults.
        auxiliary: a stream, and which launches go there instead of to the current one; None for none.
    """

    start_layer, end_layer = 0, LAYERS

    def __init__(self, truth: Truth, current_ubatch: Callable[[], int], device: str = "npu") -> None:
        self.truth = truth
        self.current_ubatch = current_ubatch
        self.device = device
        self.layers = [DriverLayer(self, layer) for layer in range(LAYERS)]
        self.signs = bfloat16(truth.signs).to(device)
        self.weights = {
            key: replace(
                w,
                wkv=w.wkv.to(device),
                wgate=w.wgate.to(device),
                ape=w.ape.to(device),
                norm_weight=w.norm_weight.to(device),
            )
            for key, w in truth.weights.items()
        }
        self.embeddings = bfloat16(truth.hidden[0].reshape(-1, HIDDEN)).to(device)
        self.cos, self.sin = truth.cos.to(device), truth.sin.to(device)
        self.ids = torch.from_numpy(truth.ids.reshape(-1, TOPK)).to(device)
        self.topk_weights = torch.from_numpy(truth.topk_weights.reshape(-1, TOPK)).to(device)
        self.shares: list[Share] = []
        self.forward: Any = None
        self.outputs: list[Output] = []
        self.keep: list[Any] = []
        self.at: Callable[[str], None] = lambda _: None
        self.auxiliary: tuple[Any, Callable[[CompressorKind, int], bool]] | None = None

    def prepare(self, parts: Sequence[Sequence[RequestChunk]], parent_tokens: int) -> torch.Tensor:
        """Queue the inputs of a forward on the current stream; returns its hidden states, padded with zeros."""
        self.shares = [self._share(tuple(part)) for part in parts]
        hidden = torch.cat([self.embeddings[:0], *map(self._embed, parts)])
        if parent_tokens > len(hidden):
            hidden = torch.cat([hidden, hidden.new_zeros((parent_tokens - len(hidden), HIDDEN))])
        return hidden

    def _embed(self, chunks: Sequence[RequestChunk]) -> torch.Tensor:
        return self.embeddings.index_select(0, self._index(tokens_of(chunks)))

    def _share(self, chunks: tuple[RequestChunk, ...]) -> Share:
        tokens = sum(chunk.tokens for chunk in chunks)
        rope = {}
        for ratio in RATIOS:
            windows = [w * ratio for c in chunks for w in range(c.start // ratio, c.end // ratio)]
            padded = min(tokens, tokens // ratio + len(chunks)) - len(windows)
            at = self._index(np.array(windows + [0] * padded, np.int64))
            rope[ratio] = self.cos.index_select(0, at), self.sin.index_select(0, at)
        lengths = np.cumsum([0] + [chunk.tokens for chunk in chunks]).astype(np.int32)
        at = self._index(tokens_of(chunks))
        ids, weights = self.ids.index_select(0, at), self.topk_weights.index_select(0, at)
        return Share(chunks, tokens, rope, self._index(lengths), ids, weights)

    def _index(self, values: Any) -> torch.Tensor:
        host = torch.empty(len(values), dtype=torch.from_numpy(values).dtype, pin_memory=True)
        host.numpy()[:] = values
        return host.to(self.device, non_blocking=True)

    def compress(self, layer: int, ubatch: int, x: torch.Tensor) -> None:
        """All launches of a layer, in the execution of a uBatch."""
        share = self.shares[ubatch]
        for compressor in GEOMETRY.compressors:
            if compressor.layer != layer or not share.chunks:
                continue
            kind = compressor.kind
            self.at("before launch")
            arguments = (x, self.weights[layer, kind], *share.rope[kind.ratio], share.cu_seqlens)
            current = torch.npu.current_stream()
            if self.auxiliary is not None and self.auxiliary[1](kind, ubatch):
                other = self.auxiliary[0]
                other.wait_stream(current)
                with torch.npu.stream(other):
                    rows = self.forward[ubatch].compress(layer, kind, *arguments)
                self.keep += [x, share, rows]
            else:
                rows = self.forward[ubatch].compress(layer, kind, *arguments)
            self.outputs.append(Output(layer, kind, share.chunks, rows))
            self.at("after launch")

    def compare(self, outputs: Sequence[Output]) -> tuple[int, int]:
        """Compressed rows that were compared, and those that are wrong; the device must have run them."""
        compared = wrong = 0
        for output in outputs:
            first, ratio = 0, output.kind.ratio
            found = output.rows.cpu().view(torch.int16).numpy()
            for chunk in output.chunks:
                windows = slice(chunk.start // ratio, chunk.end // ratio)
                count = windows.stop - windows.start
                want = self.truth.rows[output.layer, output.kind][sequence_of(chunk)][windows]
                wrong += int((found[first : first + count] != want).any(1).sum())
                compared += count
                first += count
        return compared, wrong

    def compare_hidden(self, chunks: Sequence[RequestChunk], found: torch.Tensor) -> tuple[int, int]:
        """The same for the output of a forward; rows behind the batch must be zeros."""
        got = found.float().cpu().numpy()
        want, first = np.zeros_like(got), 0
        for chunk in chunks:
            want[first : first + chunk.tokens] = self.truth.hidden[LAYERS, sequence_of(chunk), chunk.start : chunk.end]
            first += chunk.tokens
        return len(got), int((got != want).any(1).sum())


def sequence_of(chunk: RequestChunk) -> int:
    """Which sequence a request is of: its name ends with it."""
    return int(chunk.request.rsplit(" ", 1)[1])


def tokens_of(chunks: Sequence[RequestChunk]) -> Any:
    """Flat index of every token."""
    ranges = [np.arange(c.start, c.end, dtype=np.int64) + sequence_of(c) * LENGTH for c in chunks]
    return np.concatenate([np.zeros(0, np.int64), *ranges])
