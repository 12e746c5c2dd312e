# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The one expression that sizes tails and workspace slots.

Admission and `plan` read it, and the runtime compares what it allocated with it before it runs, so that the budget that
is promised and the memory that is taken cannot drift apart. Bytes are payload: an allocator's rounding and the
operator's own scratch are not included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from afd_dsv4.geometry import FP32_BYTES, CompressorKind, ModelGeometry, PageLayout
from afd_dsv4.tail.rows import TailShape

INT32 = 4
INT64 = 8
#: Where kernels of the afd executor leave what is wrong with their tables, in front of each area and on the host.
FAULT_BYTES: Final = 8192

#: Kinds that share memory for staging rows: a layer has one ratio, and launches of another layer are ordered behind it.
AREAS: Final = ((CompressorKind.C4, CompressorKind.C128), (CompressorKind.C4_INDEXER,))


def tail_shapes(geometry: ModelGeometry, layout: PageLayout, drafts: int = 0) -> dict[int, TailShape]:
    """One shape per ratio present in the model, keyed by ratio."""
    shapes = {}
    for kind in (CompressorKind.C4, CompressorKind.C128):
        layers = len(geometry.layers_of(kind))
        if layers:
            shapes[kind.ratio] = TailShape(
                ratio=kind.ratio,
                overlap=kind.overlap,
                page_rows=layout.page_rows(kind),
                layers=layers,
                drafts=drafts,
            )
    return shapes


def tile_limit(max_num_seqs: int, max_num_batched_tokens: int, drafts: int, tile_tokens: int) -> int:
    """Most tokens of one tile of the afd executor.

    A batch of decodes is always one tile, however many there are: where a graph of it is captured, nothing is known of
    the windows of what will be replayed.
    """
    return min(max_num_batched_tokens, max(tile_tokens, max_num_seqs * (1 + drafts)))


def carried_rows(kind: CompressorKind, limit: int, max_num_batched_tokens: int) -> int:
    """Rows that a tile takes along from the tile before: the window before its first, with overlap."""
    return kind.ratio if kind.overlap and limit < max_num_batched_tokens else 0


def kernel_bytes(kind: CompressorKind, limit: int, max_num_seqs: int, head_dim: int) -> int:
    """Bytes that the kernels of one tile use in front of its staging rows, `afd_dsv4_workspace_bytes_*` of kernels.h.

    Their faults; and for C128, whose windows are normed by a second kernel, a float32 row of each.
    """
    rows = 0 if kind.overlap else min(limit, limit // kind.ratio + max_num_seqs)
    return FAULT_BYTES + rows * head_dim * FP32_BYTES


def staging_areas(
    geometry: ModelGeometry,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    tile_tokens: int,
    drafts: int = 0,
) -> dict[tuple[CompressorKind, ...], int]:
    """Bytes of each area of staging rows in one slot of the afd executor, by the kinds that share it."""
    limit = tile_limit(max_num_seqs, max_num_batched_tokens, drafts, tile_tokens)
    areas: dict[tuple[CompressorKind, ...], int] = {}
    for kinds in AREAS:
        needs = [
            (limit + carried_rows(kind, limit, max_num_batched_tokens)) * geometry.row_bytes(kind)
            + kernel_bytes(kind, limit, max_num_seqs, geometry.head_dim)
            for kind in kinds
            if geometry.layers_of(kind)
        ]
        if needs:
            areas[kinds] = max(needs)
    return areas


@dataclass(frozen=True)
class WorkspaceSizes:
    """Bytes of everything the plugin allocates on one worker. See `size_workspace`.

    Attributes:
        tail_bytes_per_request: all layers' tail pages of one request, worst phase.
        tail_bytes: the same for `max_num_seqs` requests, plus one null page per kind.
        spare_bytes: spare pages of one layer of the largest batch, times slots.
        list_bytes: page lists of all layers on the device, times slots.
        table_bytes: wide state tables of all slots, and the all-zero one that forwards without an execution get.
        staging_bytes: the rest of a slot on the device (cells, re-based starts: no layer in it), times slots.
        host_bytes: pinned host memory behind lists and staging, all ring entries; and what kernels of the afd executor
            found in each slot.
        slots: number of workspace slots.
        rows_bytes: staging rows of the afd executor and what its kernels need beside them, times slots; 0 for stock.
    """

    tail_bytes_per_request: int
    tail_bytes: int
    spare_bytes: int
    list_bytes: int
    table_bytes: int
    staging_bytes: int
    host_bytes: int
    slots: int
    rows_bytes: int = 0

    @property
    def slot_bytes(self) -> int:
        """Device bytes of one workspace slot."""
        apart = self.spare_bytes + self.list_bytes + self.staging_bytes + self.rows_bytes
        return apart // self.slots + self.table_bytes // (self.slots + 1)

    @property
    def device_bytes(self) -> int:
        """Device bytes of tails and slots together: what is taken from the memory offered to the KV cache."""
        slots = self.spare_bytes + self.list_bytes + self.table_bytes + self.staging_bytes + self.rows_bytes
        return self.tail_bytes + slots


def size_workspace(
    geometry: ModelGeometry,
    layout: PageLayout,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    drafts: int = 0,
    slots: int = 2,
    tile_tokens: int | None = None,
) -> WorkspaceSizes:
    """Size tails and slots.

    Args:
        geometry: the model.
        layout: rows per page of the stack and block size in use.
        max_num_seqs: most requests in flight, and most requests in one batch.
        max_num_batched_tokens: most tokens of one launch; only the state tables depend on it, and staging rows where
            a tile may be as large.
        drafts: most draft tokens a forward may have to take back.
        slots: executions that may be in flight at once.
        tile_tokens: of the afd executor; None for the stock executor, which has no staging rows.
    """
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "slots": slots}
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    tail = null = spare = lists = table = staging = rows = found = 0
    if tile_tokens is not None:
        areas = staging_areas(
            geometry,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            tile_tokens=tile_tokens,
            drafts=drafts,
        )
        rows, found = sum(areas.values()), 2 * len(areas) * FAULT_BYTES
    for ratio, shape in tail_shapes(geometry, layout, drafts).items():
        for kind in CompressorKind:
            if kind.ratio != ratio or not geometry.layers_of(kind):
                continue
            page = shape.page_rows * geometry.row_bytes(kind)
            tail += shape.layers * shape.tail_pages * page
            spare += max_num_seqs * shape.spare_pages * page
            null += page
        lists += INT32 * shape.layers * max_num_seqs * shape.list_ids
        table += INT32 * (max_num_seqs * shape.columns(max_num_batched_tokens) + 1)
        staging += max_num_seqs * (INT64 * shape.list_ids + INT32)
    return WorkspaceSizes(
        tail_bytes_per_request=tail,
        tail_bytes=max_num_seqs * tail + null,
        spare_bytes=slots * spare,
        list_bytes=slots * lists,
        table_bytes=(slots + 1) * table,
        staging_bytes=slots * staging + INT32 * max_num_seqs,
        # One ring entry more than there are slots: the next batch is prepared while all slots are in flight.
        host_bytes=(slots + 1) * (lists + staging) + slots * found,
        slots=slots,
        rows_bytes=slots * rows,
    )
