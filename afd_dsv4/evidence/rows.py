# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Row parity: the same packed batch through every compressor layer, native and with tails, compared bit for bit.

Native is the stock operator with a dense table over padded state pages, as vllm-ascend allocates them; layer by layer,
since all layers together are what does not fit. Ours is `StockRuntime`, all layers in one execution per uBatch, on two
streams. Both get the same tokens, weights, launches and, from `compressor_metadata`, the same RoPE rows, so the
projected rows are equal and every compressed row and every needed tail row must be. Behind the batch every request goes
on for some rows, from the tails that the batch left.

What the layers compute is not a model: inputs are random and independent of each other. Tokens are `tokens.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.compressor.stock import StockRuntime, call_operator
from afd_dsv4.execution.ubatch import cut
from afd_dsv4.geometry import CompressorKind, ModelGeometry, PageLayout
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.sizing import tail_shapes

CUT_PHASES = (1, 3, 4, 127, 128)
RESUMED_AT = 203  # inside a window of either ratio, and inside a page of every shipped size
LATER = 131  # rows of every request behind the batch: they complete a window of either ratio, with the batch's tail
ROPE_DIM = 64
PAIR_FORMAT = 2  # slot_mapping_format of A2 and A3
METADATA_PAGE = 128
SHARES = (9, 17, 5)  # of 32 parts; a fourth request takes the rest

LayerKind = tuple[int, CompressorKind]


@dataclass(frozen=True)
class Batch:
    """A packed batch of four requests of unequal length, the first of them resumed.

    Attributes:
        earlier: what ran before the batch: the first rows of the resumed request.
        chunks: the batch, in order.
        later: what runs behind the batch: some rows of every request, which go on from the tails it left.
    """

    earlier: tuple[RequestChunk, ...]
    chunks: tuple[RequestChunk, ...]
    later: tuple[RequestChunk, ...]

    @classmethod
    def of(cls, tokens: int) -> Batch:
        """A batch of `tokens` tokens.

        Raises:
            ValueError: too few tokens to cut a request behind its first window of 128.
        """
        if tokens < 1024:
            raise ValueError(f"the evidence batch needs at least 1024 tokens, got {tokens}")
        lengths = [tokens * share // 32 - share for share in SHARES]
        lengths.append(tokens - sum(lengths))
        starts = [RESUMED_AT, 0, 0, 0]
        chunks = tuple(
            RequestChunk(RequestId(f"request {index}"), start, start + length)
            for index, (start, length) in enumerate(zip(starts, lengths, strict=True))
        )
        return cls(
            earlier=(RequestChunk(chunks[0].request, 0, RESUMED_AT),),
            chunks=chunks,
            later=tuple(RequestChunk(chunk.request, chunk.end, chunk.end + LATER) for chunk in chunks),
        )

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return sum(chunk.tokens for chunk in self.chunks)

    def cut_tokens(self, phase: int | None) -> int:
        """Where to cut so that the second request is cut at `phase` modulo 128; None: behind the last token.

        The first uBatch gets the larger share, so that without ordering the second one overtakes it.
        """
        if phase is None:
            return self.tokens
        inside = self.chunks[1].tokens * 3 // 4 // 128 * 128
        return self.chunks[0].tokens + inside + phase


@dataclass
class LayerRows:
    """What one compressor of one layer gave, on the host: compressed rows [n, D], needed tail rows [m, state_dim]."""

    compressed: torch.Tensor
    tail: torch.Tensor


@dataclass
class Comparison:
    """Rows compared and found different, bit for bit."""

    compressed: int = 0
    compressed_different: int = 0
    tail: int = 0
    tail_different: int = 0

    @property
    def different(self) -> int:
        """All mismatched rows."""
        return self.compressed_different + self.tail_different

    def add(self, ours: LayerRows, native: LayerRows) -> None:
        """Compare one compressor of one layer.

        Raises:
            ValueError: the two do not even have the same rows.
        """
        if ours.compressed.shape != native.compressed.shape or ours.tail.shape != native.tail.shape:
            raise ValueError(
                f"rows to compare differ in shape: {ours.compressed.shape} and {native.compressed.shape}, "
                f"tails {ours.tail.shape} and {native.tail.shape}"
            )
        self.compressed += len(ours.compressed)
        self.tail += len(ours.tail)
        # Compared as integers: equal bits, and a NaN equals itself.
        bits = torch.int32 if ours.compressed.dtype == torch.float32 else torch.int16
        self.compressed_different += int((ours.compressed.view(bits) != native.compressed.view(bits)).any(dim=1).sum())
        self.tail_different += int((ours.tail.view(torch.int32) != native.tail.view(torch.int32)).any(dim=1).sum())


@dataclass(frozen=True)
class Inputs:
    """Weights of every compressor, RoPE tables, and tokens by request; all on the device."""

    weights: dict[LayerKind, CompressorWeights]
    rope_cos: torch.Tensor
    rope_sin: torch.Tensor
    tokens: dict[RequestId, torch.Tensor]

    def packed(self, chunks: Sequence[RequestChunk]) -> torch.Tensor:
        """[T, hidden] of a packed batch."""
        return torch.cat([self.tokens[chunk.request][chunk.start : chunk.end] for chunk in chunks])


def make_inputs(geometry: ModelGeometry, batch: Batch, device: torch.device, seed: int) -> Inputs:
    """Random weights and tokens, bfloat16 as served; scores spread enough that every row of a window counts."""
    generator = torch.Generator().manual_seed(seed)
    hidden = geometry.hidden_size

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    weights: dict[LayerKind, CompressorWeights] = {}
    for compressor in geometry.compressors:
        kind, dim = compressor.kind, compressor.head_dim
        wide = kind.coff * dim
        weights[compressor.layer, kind] = CompressorWeights(
            wkv=normal(wide, hidden, scale=hidden**-0.5).bfloat16().to(device),
            wgate=normal(wide, hidden, scale=hidden**-0.5).bfloat16().to(device),
            ape=normal(kind.ratio, wide).to(device),
            norm_weight=(1 + normal(dim, scale=0.1)).bfloat16().to(device),
            norm_eps=1e-6,
        )
    angles = torch.outer(
        torch.arange(max(chunk.end for chunk in batch.later)), 160000.0 ** -(torch.arange(0, ROPE_DIM, 2) / ROPE_DIM)
    ).repeat_interleave(2, dim=1)
    tokens = {chunk.request: normal(chunk.end, hidden).bfloat16().to(device) for chunk in batch.later}
    return Inputs(
        weights=weights,
        rope_cos=angles.cos().bfloat16().to(device),
        rope_sin=angles.sin().bfloat16().to(device),
        tokens=tokens,
    )


class Pack:
    """One uBatch's device arguments that no layer changes: tokens, cu_seqlens, and per ratio the RoPE rows.

    The RoPE rows come from the stock `compressor_metadata`, which gets the true starts.
    """

    def __init__(self, inputs: Inputs, chunks: tuple[RequestChunk, ...], ratios: Sequence[int]) -> None:
        device = inputs.rope_cos.device
        self.chunks = chunks
        self.x = inputs.packed(chunks) if chunks else inputs.rope_cos.new_empty((0, 0))
        lengths = [chunk.tokens for chunk in chunks]
        self.cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        starts = torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32).to(device)
        self.starts = starts
        self.rope: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for ratio in ratios:
            if not chunks:
                self.rope[ratio] = (inputs.rope_cos[:0], inputs.rope_sin[:0])
                continue
            rows = min(len(self.x), len(self.x) // ratio + len(chunks))
            pages = max(chunk.end for chunk in chunks) // ratio // METADATA_PAGE + 1
            table = torch.arange(1, len(chunks) * pages + 1, dtype=torch.int32).view(len(chunks), pages).to(device)
            cos, sin, _ = torch.ops._C_ascend.compressor_metadata(
                inputs.rope_cos,
                inputs.rope_sin,
                self.cu_seqlens,
                starts,
                table,
                METADATA_PAGE,
                PAIR_FORMAT,
                ratio,
                rows,
                len(chunks),
            )
            self.rope[ratio] = (cos.view(rows, ROPE_DIM), sin.view(rows, ROPE_DIM))

    def emitted(self, ratio: int) -> int:
        """Compressed rows that this uBatch emits; what lies behind them in the operator's output is unfilled."""
        return sum(chunk.end // ratio - chunk.start // ratio for chunk in self.chunks)


def needed_rows(kind: CompressorKind, position: int) -> list[int]:
    """Rows before `position` that some later window pools, the long way: window by window, without `tail.rows`."""
    needed: set[int] = set()
    for last in range(position, position + 2 * kind.ratio):
        if (last + 1) % kind.ratio == 0:
            first = last + 1 - kind.ratio * (2 if kind.overlap else 1)
            needed.update(range(max(first, 0), position))
    return sorted(needed)


def run_native(
    geometry: ModelGeometry, layout: PageLayout, batch: Batch, inputs: Inputs, cut_tokens: int
) -> tuple[dict[LayerKind, LayerRows], int]:
    """Dense tables over padded pages, one layer at a time. Returns the rows, and the bytes of the largest layer."""
    device = inputs.rope_cos.device
    shapes = tail_shapes(geometry, layout)
    earlier = Pack(inputs, batch.earlier, list(shapes))
    packs = [Pack(inputs, part, list(shapes)) for part in cut(batch.chunks, cut_tokens)]
    later = Pack(inputs, batch.later, list(shapes))
    found: dict[LayerKind, LayerRows] = {}
    largest = 0
    order = {chunk.request: index for index, chunk in enumerate(batch.chunks)}
    for compressor in geometry.compressors:
        kind, page_rows = compressor.kind, layout.page_rows(compressor.kind)
        columns = [-(-chunk.end // page_rows) for chunk in batch.later]
        firsts = [1 + sum(columns[:index]) for index in range(len(columns))]
        table = torch.zeros((len(columns), max(columns)), dtype=torch.int32)
        for index, (first, count) in enumerate(zip(firsts, columns, strict=True)):
            table[index, :count] = torch.arange(first, first + count)
        padded = layout.page_bytes(kind) // 4
        raw = torch.empty((1 + sum(columns), padded), dtype=torch.float32, device=device)
        state = raw[:, : page_rows * compressor.state_dim].unflatten(1, (page_rows, compressor.state_dim))
        largest = max(largest, raw.nbytes)
        parts = []
        tails = []
        for pack in (earlier, *packs, later):
            if pack is later:
                for index, chunk in enumerate(batch.chunks):
                    positions = torch.tensor(needed_rows(kind, chunk.end), dtype=torch.int64)
                    pages = table[index, positions // page_rows].long()
                    tails.append(state[pages.to(device), (positions % page_rows).to(device)].cpu())
            if not pack.chunks:
                continue
            mine = table[[order[chunk.request] for chunk in pack.chunks]].to(device)
            cos, sin = pack.rope[kind.ratio]
            weights = inputs.weights[compressor.layer, kind]
            rows = call_operator(pack.x, weights, kind, state, mine, pack.starts, pack.cu_seqlens, cos, sin)
            parts.append(rows[: pack.emitted(kind.ratio)].cpu())
        found[compressor.layer, kind] = LayerRows(torch.cat(parts), torch.cat(tails))
        del raw, state
    return found, largest


@dataclass
class PluginRun:
    """Rows of our run, and the seconds it took."""

    rows: dict[LayerKind, LayerRows]
    seconds: float


def run_plugin(
    runtime: StockRuntime,
    batch: Batch,
    inputs: Inputs,
    cut_tokens: int,
    *,
    alternate: bool = False,
    keep: bool = True,
) -> PluginRun:
    """All layers in one execution per uBatch, each uBatch on a stream of its own.

    Args:
        runtime: tails and slots; its requests are ended before this returns.
        batch: the load.
        inputs: tokens and weights.
        cut_tokens: where the batch is cut into two uBatches.
        alternate: launch every other layer on the other stream, as an auxiliary stream would.
        keep: False drops every compressed row as soon as it is queued, as an engine does that stores it elsewhere.
    """
    module: Any = torch.get_device_module(inputs.rope_cos.device)
    ratios = list(runtime.shapes)
    streams = [module.Stream(), module.Stream()]
    outputs: dict[LayerKind, list[torch.Tensor]] = {}
    earlier, later = (Pack(inputs, chunks, ratios) for chunks in (batch.earlier, batch.later))
    packs = [Pack(inputs, part, ratios) for part in cut(batch.chunks, cut_tokens)]
    tails: dict[LayerKind, torch.Tensor] = {}
    module.synchronize()
    started = time.perf_counter()
    for forward in ([earlier], packs, [later]):
        if forward == [later] and keep:
            module.synchronize()
            tails = {(c.layer, c.kind): _tail(runtime, batch, c.layer, c.kind) for c in runtime.geometry.compressors}
        generation = runtime.mint()
        with ExitStack() as executions:
            begun = [
                (
                    ubatch,
                    pack,
                    executions.enter_context(runtime.begin(pack.chunks, generation=generation, ubatch=ubatch)),
                )
                for ubatch, pack in enumerate(forward)
            ]
            for compressor in runtime.geometry.compressors:
                key = (compressor.layer, compressor.kind)
                for ubatch, pack, execution in begun:
                    cos, sin = pack.rope[compressor.kind.ratio]
                    with module.stream(streams[(ubatch + (compressor.layer if alternate else 0)) % 2]):
                        rows = execution.compress(*key, pack.x, inputs.weights[key], cos, sin, pack.cu_seqlens)
                    if keep:
                        outputs.setdefault(key, []).append(rows[: pack.emitted(compressor.kind.ratio)])
                    del rows
    module.synchronize()
    seconds = time.perf_counter() - started
    found = {key: LayerRows(torch.cat([rows.cpu() for rows in parts]), tails[key]) for key, parts in outputs.items()}
    for chunk in batch.chunks:
        runtime.end_request(chunk.request)
    return PluginRun(found, seconds)


def _tail(runtime: StockRuntime, batch: Batch, layer: int, kind: CompressorKind) -> torch.Tensor:
    """The needed tail rows of all requests in one compressor, from the pages that the store says hold them."""
    pool = runtime.pools[kind]
    page_rows = pool.shape[1]
    at = runtime.layers[kind][layer]
    pages, places = [], []
    for chunk in batch.chunks:
        mapped, ids = runtime.store.tail(chunk.request, kind.ratio)
        for position in needed_rows(kind, chunk.end):
            pages.append(int(ids[at, mapped.index(position // page_rows)]))
            places.append(position % page_rows)
    where = torch.tensor([pages, places], dtype=torch.int64).to(pool.device)
    return pool[where[0], where[1]].cpu()


def compare(ours: dict[LayerKind, LayerRows], native: dict[LayerKind, LayerRows]) -> Comparison:
    """Compare every compressor of every layer.

    Raises:
        ValueError: one side has a layer that the other has not.
    """
    if ours.keys() != native.keys():
        raise ValueError(f"layers to compare differ: {sorted(map(str, ours.keys() ^ native.keys()))}")
    found = Comparison()
    for key, rows in ours.items():
        found.add(rows, native[key])
    return found
