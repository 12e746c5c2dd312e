# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What tails and slots cost, measured on real allocations, and what their size must not depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from afd_dsv4.compressor.stock import StockRuntime
from afd_dsv4.evidence.rows import Batch, make_inputs, run_plugin
from afd_dsv4.geometry import ModelGeometry, PageLayout
from afd_dsv4.workspace.sizing import WorkspaceSizes

SCALES = (1, 2, 4)


@dataclass(frozen=True)
class Scaled:
    """Measured bytes at one scale of layers or of the chunk.

    `transient` is the peak that one forward adds to what is held between forwards; measured where layers are scaled.
    """

    what: str
    scale: int
    tails: int
    spares: int
    staging: int
    lists: int
    tables: int
    transient: int | None = None


def measure(runtime: StockRuntime, slots: int) -> dict[str, int]:
    """Bytes of a runtime's tensors by class; tails and spares share pools and are told apart by page counts."""
    allocated = asdict(runtime.allocated())
    spares = sum(
        slots * runtime.store.max_num_seqs * runtime.shapes[kind.ratio].spare_pages * pool[0].nbytes
        for kind, pool in runtime.pools.items()
    )
    return {
        "tails": allocated["tails_and_spares"] - spares,
        "spares": spares,
        "lists": allocated["lists"],
        "tables": allocated["tables"],
        "staging": allocated["staging"],
        "host": allocated["host"],
    }


def planned(sizes: WorkspaceSizes) -> dict[str, int]:
    """The same classes as the sizing expression has them."""
    return {
        "tails": sizes.tail_bytes,
        "spares": sizes.spare_bytes,
        "lists": sizes.list_bytes,
        "tables": sizes.table_bytes,
        "staging": sizes.staging_bytes,
        "host": sizes.host_bytes,
    }


def unused(geometry: ModelGeometry, layout: PageLayout, by_group: Mapping[str, int], block_bytes: int) -> int:
    """Bytes of native's state blocks in which no page of the state lies.

    A block id takes the same bytes in every KV group, as many as the largest group of layers needs for its attention
    and indexer pages; the groups of the state fill the pages of their own layers.
    """
    empty = 0
    for group, ratio in (("c4_state", 4), ("c128_state", 128)):
        pages = sum(layout.page_bytes(each.kind) for each in geometry.compressors if each.kind.ratio == ratio)
        empty += by_group[group] * (block_bytes - pages)
    return empty


def scale(
    geometry: ModelGeometry, layout: PageLayout, device: torch.device, *, max_num_seqs: int, tokens: int, slots: int
) -> tuple[list[Scaled], list[str]]:
    """Allocate runtimes with 1, 2 and 4 times the layers, and for 1, 2 and 4 times the chunk.

    Returns:
        What was measured, and every law that does not hold, in words.
    """
    found = []
    for what in ("layers", "chunk"):
        for times in SCALES:
            model = multiplied(geometry, times) if what == "layers" else geometry
            runtime = StockRuntime(
                model,
                layout,
                device=device,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=tokens * (times if what == "chunk" else 1),
                slots=slots,
            )
            measured = measure(runtime, slots)
            del runtime, measured["host"]
            found.append(Scaled(what, times, **measured))
    return found, [
        *broken_laws(found, "layers", ("spares", "staging")),
        *broken_laws(found, "chunk", ("tails", "spares", "staging", "lists")),
    ]


def scale_forward(
    geometry: ModelGeometry, layout: PageLayout, device: torch.device, *, batch: Batch, slots: int, seed: int
) -> tuple[list[Scaled], list[str]]:
    """Run one batch through 1, 2 and 4 times the layers and measure what the forward adds at its peak.

    Compressed rows are dropped as an engine drops them that has stored them. Returns as `scale` does.
    """
    module: Any = torch.get_device_module(device)
    found = []
    for times in SCALES:
        model = multiplied(geometry, times)
        inputs = make_inputs(model, batch, device, seed)
        runtime = StockRuntime(
            model,
            layout,
            device=device,
            max_num_seqs=len(batch.chunks),
            max_num_batched_tokens=batch.tokens,
            slots=slots,
        )
        module.synchronize()
        module.reset_peak_memory_stats()
        before, _ = requested(module)
        run_plugin(runtime, batch, inputs, batch.cut_tokens(1), keep=False)
        transient = requested(module)[1] - before
        measured = measure(runtime, slots)
        del runtime, inputs, measured["host"]
        found.append(Scaled("layers of a forward", times, **measured, transient=transient))
    return found, broken_laws(found, "layers of a forward", ("transient",))


def requested(module: Any) -> tuple[int, int]:
    """Bytes that tensors have now, and the most since the last reset; an allocator's blocks may be larger, by chance.

    Args:
        module: torch.npu or torch.cuda.
    """
    stats = module.memory_stats()
    return tuple(int(stats[f"requested_bytes.all.{what}"]) for what in ("current", "peak"))  # type: ignore[return-value]


def multiplied(geometry: ModelGeometry, times: int) -> ModelGeometry:
    """The same model with so many times the layers."""
    ratios = geometry.compress_ratios * times
    return replace(geometry, num_layers=len(ratios), compress_ratios=ratios)


def broken_laws(found: Sequence[Scaled], what: str, fixed: Sequence[str]) -> list[str]:
    """Which of the classes `fixed` are not the same at every scale, in words."""
    values = {field: sorted({getattr(scaled, field) for scaled in found if scaled.what == what}) for field in fixed}
    return [f"{field} bytes depend on the {what}: {seen}" for field, seen in values.items() if len(seen) != 1]
