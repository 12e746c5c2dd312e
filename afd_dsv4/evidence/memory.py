# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What tails and slots cost, measured on real allocations, and what their size must not depend on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from afd_dsv4.compressor.stock import StockRuntime
from afd_dsv4.geometry import ModelGeometry, PageLayout
from afd_dsv4.workspace.sizing import WorkspaceSizes, size_workspace

SCALES = (1, 2, 4)


@dataclass(frozen=True)
class Scaled:
    """Measured bytes at one scale of layers or of the chunk."""

    what: str
    scale: int
    tails: int
    spares: int
    staging: int
    lists: int
    tables: int


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


def scale(
    geometry: ModelGeometry, layout: PageLayout, device: torch.device, *, max_num_seqs: int, tokens: int, slots: int
) -> tuple[list[Scaled], list[str]]:
    """Allocate runtimes with 1, 2 and 4 times the layers, and for 1, 2 and 4 times the chunk.

    Returns:
        What was measured, and every law that does not hold, in words.
    """
    found = []
    wrong = []
    for what in ("layers", "chunk"):
        for times in SCALES:
            ratios = geometry.compress_ratios * (times if what == "layers" else 1)
            model = replace(geometry, num_layers=len(ratios), compress_ratios=ratios)
            limits: dict[str, Any] = {
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": tokens * (times if what == "chunk" else 1),
                "slots": slots,
            }
            runtime = StockRuntime(model, layout, device=device, **limits)
            measured = measure(runtime, slots)
            if measured != planned(size_workspace(model, layout, **limits)):
                wrong.append(f"{times}x {what}: allocated bytes differ from the sizing expression")
            del runtime, measured["host"]
            found.append(Scaled(what, times, **measured))
    for what, fixed in (("layers", ("spares", "staging")), ("chunk", ("tails", "spares", "staging", "lists"))):
        for field in fixed:
            values = {getattr(scaled, field) for scaled in found if scaled.what == what}
            if len(values) != 1:
                wrong.append(f"{field} bytes depend on the {what}: {sorted(values)}")
    return found, wrong
