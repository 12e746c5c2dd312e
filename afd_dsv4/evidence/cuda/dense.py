# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Peak memory of a forward on the device: native's dense state of every layer against tails and workspace slots.

Problem: `rows.py` runs native layer by layer, because all layers together are what does not fit; what a plan says of
them is arithmetic, and this device has room to measure it.
Way: one batch, every layer's state pages allocated as vllm-ascend pads them and mapped densely, all in one forward; the
same with the stock runtime; each at once and at twice the layers. Weights and tokens are left out on both sides.
Not here: rows (`rows.py` compares them); KV caches, which both sides have alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from afd_dsv4.compressor.stock import StockRuntime, call_operator
from afd_dsv4.evidence import memory
from afd_dsv4.evidence.rows import Batch, Inputs, Pack, make_inputs, run_plugin
from afd_dsv4.geometry import ModelGeometry, PageLayout
from afd_dsv4.workspace.sizing import tail_shapes

ROUNDING = 1 << 20  # what is no state: arguments of launches, a few words each


@dataclass(frozen=True)
class Peak:
    """Bytes of one side at one number of layers.

    Attributes:
        layers: of the model, those without a compressor included.
        state: that is held for compressor state: pages of every layer, or tails, slots and lists.
        peak: most bytes allocated in a forward, weights and tokens left out.
    """

    layers: int
    state: int
    peak: int


@dataclass(frozen=True)
class Peaks:
    """Both sides, once and twice the layers.

    Attributes:
        native: dense.
        ours: tails and slots.
        tails: ours, at once and twice: tail pages and page lists, which are what may grow with layers.
    """

    native: tuple[Peak, Peak]
    ours: tuple[Peak, Peak]
    tails: tuple[int, int]

    def broken(self) -> list[str]:
        """What does not hold, in words."""
        found = []
        once, twice = self.native
        if twice.state != 2 * once.state:
            found.append(f"native's state is {once.state} and {twice.state} bytes, not doubled")
        if abs(twice.peak - once.peak - once.state) > ROUNDING:
            found.append(f"native's peak grows by {twice.peak - once.peak} bytes, its state by {once.state}")
        grown, tails = self.ours[1].peak - self.ours[0].peak, self.tails[1] - self.tails[0]
        if abs(grown - tails) > ROUNDING:
            found.append(f"our peak grows by {grown} bytes, tails and lists by {tails}")
        return found


def run_dense(geometry: ModelGeometry, layout: PageLayout, batch: Batch, inputs: Inputs) -> int:
    """One forward of the batch with dense state of every layer, allocated first. Returns the bytes of the state."""
    device, ratios = inputs.rope_cos.device, list(tail_shapes(geometry, layout))
    packs = [Pack(inputs, chunks, ratios) for chunks in (batch.earlier, batch.chunks)]
    held, launches = 0, []
    for compressor in geometry.compressors:
        kind, page_rows = compressor.kind, layout.page_rows(compressor.kind)
        columns = [-(-chunk.end // page_rows) for chunk in batch.chunks]
        raw = torch.empty((1 + sum(columns), layout.page_bytes(kind) // 4), dtype=torch.float32, device=device)
        state = raw[:, : page_rows * compressor.state_dim].unflatten(1, (page_rows, compressor.state_dim))
        table, first = torch.zeros((len(columns), max(columns)), dtype=torch.int32), 1
        for row, count in enumerate(columns):
            table[row, :count] = torch.arange(first, first + count)
            first += count
        held += raw.nbytes + table.nbytes
        launches.append((compressor, state, table.to(device)))
    for pack in packs:
        for compressor, state, table in launches:
            weights = inputs.weights[compressor.layer, compressor.kind]
            cos, sin = pack.rope[compressor.kind.ratio]
            mine = table[: len(pack.chunks)]
            call_operator(pack.x, weights, compressor.kind, state, mine, pack.starts, pack.cu_seqlens, cos, sin)
    return held


def peaks(geometry: ModelGeometry, layout: PageLayout, device: torch.device, *, tokens: int, seed: int) -> Peaks:
    """Measure both sides. The first request of the batch is resumed and comes first, as `Batch.of` makes it."""
    module: Any = torch.get_device_module(device)
    batch = Batch.of(tokens)
    native: list[Peak] = []
    ours: list[Peak] = []
    tails: list[int] = []
    for times in (1, 2):
        model = memory.multiplied(geometry, times)
        inputs = make_inputs(model, batch, device, seed)
        for measured in (native, ours):
            module.synchronize()
            module.reset_peak_memory_stats()
            before, _ = memory.requested(module)
            if measured is native:
                state = run_dense(model, layout, batch, inputs)
            else:
                runtime = StockRuntime(
                    model, layout, max_num_seqs=len(batch.chunks), max_num_batched_tokens=tokens, device=device, slots=2
                )
                run_plugin(runtime, batch, inputs, batch.cut_tokens(None), keep=False)
                found = memory.measure(runtime, 2)
                state = sum(size for name, size in found.items() if name != "host")
                tails.append(found["tails"] + found["lists"])
                del runtime
            module.synchronize()
            measured.append(Peak(model.num_layers, state, memory.requested(module)[1] - before))
        del inputs
    return Peaks((native[0], native[1]), (ours[0], ours[1]), (tails[0], tails[1]))
