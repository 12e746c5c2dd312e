# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A stock runtime on the software NPU, with weights, requests, and the truth about every row that it may compress.

The truth is the definition in `compressor/reference.py`, computed from the whole sequence in one piece.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from afd_dsv4.compressor import reference
from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.compressor.stock import StockExecution, StockRuntime
from afd_dsv4.execution.ubatch import cut
from afd_dsv4.geometry import Compressor, CompressorKind, ModelGeometry, page_layout
from afd_dsv4.tail.tables import RequestChunk
from tests.model_runtime import watch_lock
from tests.npu_streams import streams_apart

HIDDEN = 32  # the operator's own check of it must be waived: `small_hidden_size`
LAYERS = ModelGeometry("three layers", HIDDEN, 3, (4, 128, 4))
LENGTH = 500
SPECS = {
    CompressorKind.C4: reference.C4,
    CompressorKind.C4_INDEXER: reference.C4_INDEXER,
    CompressorKind.C128: reference.C128,
}


def random_weights(
    geometry: ModelGeometry, generator: torch.Generator
) -> dict[tuple[int, CompressorKind], CompressorWeights]:
    """Of every compressor, by layer and kind, on the CPU."""
    found = {}
    for compressor in geometry.compressors:
        wide = compressor.kind.coff * compressor.head_dim
        found[compressor.layer, compressor.kind] = CompressorWeights(
            wkv=torch.randn(wide, geometry.hidden_size, generator=generator).bfloat16(),
            wgate=torch.randn(wide, geometry.hidden_size, generator=generator).bfloat16(),
            ape=torch.randn(compressor.kind.ratio, wide, generator=generator),
            norm_weight=torch.randn(compressor.head_dim, generator=generator).bfloat16(),
            norm_eps=1e-6,
        )
    return found


@dataclass
class Request:
    """Tokens of one request, and the compressed rows that the definition gives for them."""

    x: torch.Tensor
    rows: dict[tuple[int, CompressorKind], torch.Tensor]
    position: int = 0


class Truth:
    """Weights and RoPE tables of a model, and requests with the rows that the definition gives for them."""

    def __init__(self, seed: int, geometry: ModelGeometry, length: int) -> None:
        self.length = length
        self.generator = generator = torch.Generator().manual_seed(seed)
        self.weights = random_weights(geometry, generator)
        cos, sin = reference.rope_table(np.arange(length, dtype=np.int64))
        self.cos, self.sin = torch.from_numpy(cos).bfloat16(), torch.from_numpy(sin).bfloat16()
        self._requests: list[Request] = []

    def request(self, index: int) -> Request:
        """The request of that number, at its beginning."""
        while len(self._requests) <= index:
            self._requests.append(self._make())
        return replace(self._requests[index])

    def _make(self) -> Request:
        x = torch.randn(self.length, HIDDEN, generator=self.generator).bfloat16()
        rows = {}
        for (layer, kind), weights in self.weights.items():
            spec = SPECS[kind]
            projected = reference.make_rows(
                reference.project(x.float().numpy(), weights.wkv.float().numpy()),
                reference.project(x.float().numpy(), weights.wgate.float().numpy()),
                weights.ape.numpy(),
                0,
            )
            at = slice(0, self.length // spec.ratio * spec.ratio, spec.ratio)
            compressed = reference.compress_sequence(
                projected,
                spec,
                weights.norm_weight.float().numpy(),
                self.cos[at].float().numpy(),
                self.sin[at].float().numpy(),
            )
            bits = reference.bfloat16_bits(compressed).view(np.int16)
            rows[layer, kind] = torch.from_numpy(bits).view(torch.bfloat16)
        return Request(x, rows)


truth = functools.lru_cache(maxsize=4)(Truth)  # most of a small test's time


class World:
    """A runtime with weights, requests and the truth about them.

    Args:
        seed: of weights and tokens; worlds with one seed share them.
        geometry: the model.
        length: tokens of a request.
        block_size: of the page layout.
        cls: makes the runtime.
        limits: more arguments of the runtime.
    """

    def __init__(
        self,
        seed: int,
        *,
        geometry: ModelGeometry = LAYERS,
        length: int = LENGTH,
        block_size: int = 128,
        cls: type[StockRuntime] = StockRuntime,
        **limits: Any,
    ) -> None:
        self.geometry = geometry
        self.layout = page_layout("vllm-ascend-0.23.0", block_size)
        limits = {"max_num_seqs": 3, "max_num_batched_tokens": 3 * length, "device": "npu", **limits}
        self.runtime = cls(geometry, self.layout, **limits)
        watch_lock(self.runtime.arena)
        self.truth = truth(seed, geometry, length)
        self.cos, self.sin = self.truth.cos, self.truth.sin
        self.on_device = {
            key: replace(w, wkv=w.wkv.npu(), wgate=w.wgate.npu(), ape=w.ape.npu(), norm_weight=w.norm_weight.npu())
            for key, w in self.truth.weights.items()
        }
        # The last for what the host waits for: nothing else is ever queued there.
        *self.streams, self.copies = streams_apart(3)
        self.different = 0
        self.compared = 0
        self.pending: list[tuple[Compressor, Sequence[RequestChunk], torch.Tensor]] = []
        self.keep: list[torch.Tensor] = []  # queued work does not keep its arguments
        self._requests = itertools.count()

    def request(self) -> Request:
        """The next request."""
        return self.truth.request(next(self._requests))

    def forward(self, requests: Mapping[str, Request], chunks: Sequence[RequestChunk], **how: Any) -> None:
        """One forward, compared."""
        self.queue(requests, chunks, **how)
        self.check_all(requests)

    def queue(
        self,
        requests: Mapping[str, Request],
        chunks: Sequence[RequestChunk],
        *,
        cut_tokens: int | None = None,
        alternate: bool = False,
        decodes: int = 0,
        prefill_first: bool = False,
    ) -> None:
        """One forward in one or two uBatches; `decodes` requests at the front are launched apart from the rest."""
        parts = cut(chunks, sum(chunk.tokens for chunk in chunks) if cut_tokens is None else cut_tokens)
        generation = self.runtime.mint()
        begun = [(part, self.runtime.begin(part, generation=generation, ubatch=u)) for u, part in enumerate(parts)]
        for compressor in self.geometry.compressors:
            for ubatch, (part, execution) in enumerate(begun):
                splits = [s for s in (slice(0, decodes), slice(decodes, len(part))) if part[s]]
                for rows in reversed(splits) if prefill_first else splits:
                    stream = self.streams[(ubatch + (compressor.layer if alternate else 0)) % 2]
                    self.step(execution, requests, part[rows], compressor, stream, rows)
        for _, execution in begun:
            execution.finish()

    def step(
        self,
        execution: StockExecution,
        requests: Mapping[str, Request],
        chunks: Sequence[RequestChunk],
        compressor: Compressor,
        stream: Any,
        rows: slice = slice(None),
    ) -> None:
        """One launch on a stream, whose rows `check_all` compares."""
        layer, kind = compressor.layer, compressor.kind
        args = self.arguments(requests, chunks, kind)
        with torch.npu.stream(stream):
            out = execution.compress(layer, kind, args[0], self.on_device[layer, kind], *args[1:], rows)
        self.pending.append((compressor, chunks, out))

    def check_all(self, requests: Mapping[str, Request], streams: Sequence[Any] = ()) -> None:
        """Wait for the device, or for some of its streams, and compare all that was queued."""
        for stream in streams:
            stream.synchronize()
        if not streams:
            torch.npu.synchronize()
        for compressor, split, out in self.pending:
            with torch.npu.stream(self.copies):
                rows = out.cpu()
            self.check(requests, split, compressor.layer, compressor.kind, rows)
        self.pending = []

    def launch(
        self,
        execution: StockExecution,
        requests: Mapping[str, Request],
        split: Sequence[RequestChunk],
        layer: int,
        kind: CompressorKind,
        rows: slice,
    ) -> torch.Tensor:
        args = self.arguments(requests, split, kind)
        return execution.compress(layer, kind, args[0], self.on_device[layer, kind], *args[1:], rows)

    def arguments(
        self, requests: Mapping[str, Request], split: Sequence[RequestChunk], kind: CompressorKind
    ) -> list[torch.Tensor]:
        """Tokens, cos, sin and cu_seqlens of a launch, on the device."""
        ratio = kind.ratio
        x = torch.cat([torch.empty(0, HIDDEN).bfloat16(), *(requests[c.request].x[c.start : c.end] for c in split)])
        windows = [w * ratio for c in split for w in range(c.start // ratio, c.end // ratio)]
        padded = min(len(x), len(x) // ratio + len(split)) - len(windows)
        at = torch.tensor(windows + [0] * padded, dtype=torch.int64)
        lengths = torch.tensor([0] + [c.tokens for c in split]).cumsum(0).int()
        with torch.npu.stream(self.copies):
            found = [t.npu() for t in (x, self.cos[at], self.sin[at], lengths)]
        self.keep += found
        return found

    def check(
        self,
        requests: Mapping[str, Request],
        split: Sequence[RequestChunk],
        layer: int,
        kind: CompressorKind,
        out: torch.Tensor,
    ) -> None:
        first = 0
        for c in split:
            windows = range(c.start // kind.ratio, c.end // kind.ratio)
            got = out[first : first + len(windows)].view(torch.int16)
            want = requests[c.request].rows[layer, kind][windows.start : windows.stop].view(torch.int16)
            self.different += int((got != want).any(dim=1).sum())
            self.compared += len(windows)
            first += len(windows)


@pytest.fixture(scope="module", autouse=True)
def small_hidden_size() -> Iterator[None]:
    """Waives the operator's check of the hidden size; a test module imports it."""
    from afd_dsv4.softnpu import runtime

    runtime.install()
    torch.ops.softnpu.waive("compressor.hidden", True)
    yield
    torch.ops.softnpu.waive("compressor.hidden", False)
