# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The afd executor: kernels of our own, given the same tails, page lists and tables as the stock operator.

Problem: the contract that the stock executor stands on is the shipped operator's, which may be rewritten; and its
projection, pooling and saving are one launch, so that nothing bounds what it needs of the device while it runs.
Way: a launch is three, in the order of one stream: projected rows go to staging rows of the workspace slot, `compress`
pools, norms and rotates their windows, `tail_update` saves what a later forward may read. Everything else (which pages,
leases, touches, page lists, checkpoints) is `stock.py`'s, so a tail of one executor is a tail of the other. A launch is
cut into tiles (`tiles.py`), so that staging rows do not grow with the chunk. Staging rows are the slot's, taken at
start-up; kinds that share them are ordered by touches. Per tile the host queues three operators, and a copy where rows
of the window before are carried; nothing per token, and nobody waits. A kernel on a device cannot say that a table is
bad, it leaves a record in the slot. Those of all layers gather there; they are copied to the host behind the last
launch, one copy per area and execution, and read at a later `begin`, once the fence has passed. From the first fault on
nothing begins any more.
Not here: the kernels (`kernels_ascendc/compressor`), and rows of a forward without an execution: it gets zeros.

The product of the projection is the device's own; like the stock operator's it depends on the batch on hardware. On the
software NPU both add in one order, so that the executors can be compared bit for bit.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.compressor.library import Library, find
from afd_dsv4.compressor.stock import AllocatedBytes, Split, StockRuntime
from afd_dsv4.compressor.tiles import Tile, cut_into_tiles
from afd_dsv4.config import DEFAULT_TILE_TOKENS
from afd_dsv4.geometry import FP32_BYTES, CompressorKind
from afd_dsv4.workspace.lease import Lease
from afd_dsv4.workspace.sizing import AREAS, FAULT_BYTES, carried_rows, kernel_bytes, staging_areas, tile_limit

_logger: Final = logging.getLogger("vllm.plugins.afd_dsv4")
_AREA_OF: Final = {kind: kinds for kinds in AREAS for kind in kinds}


class BadTables(RuntimeError):
    """Kernels found lengths, starts or pages on the device that no plan makes: a bug, or overwritten memory."""


def _named_area(kinds: tuple[CompressorKind, ...]) -> str:
    """An area of a slot, as touches name it."""
    return f"staging rows of {kinds[0].value}"


@functools.cache
def load(folder: Path, backend: str) -> Any:
    """Load the operators of one folder: torch.ops.afd_dsv4.

    Raises:
        OSError: the library cannot be loaded.
        RuntimeError: it is of another back end than is written beside it, or other operators are loaded already.
    """
    found = Library(folder, backend)
    torch.ops.load_library(str(found.operators))
    operators: Any = torch.ops.afd_dsv4
    if operators.backend() != backend:
        raise RuntimeError(
            f"{found.kernels} is of the back end {operators.backend()!r}, and beside it stands {backend!r}; build anew"
        )
    return operators


def has_kernel(operator: str) -> bool:
    """Whether torch_npu has a kernel for an operator of torch."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, "PrivateUse1"))


@dataclass(frozen=True)
class _TileRows:
    """A tile and the staging rows of it in one slot.

    Attributes:
        tile: which tokens.
        rows: [carry + tokens, row], as `compress` takes them.
        own: of its tokens.
        carried: rows in front that it takes along, and what they are copied from, the end of the tile before; None for
            none.
    """

    tile: Tile
    rows: torch.Tensor
    own: torch.Tensor
    carried: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class _Ended:
    """An execution whose kernels' records nobody has looked at.

    Attributes:
        lease: of it.
        void: voids its requests' tails.
        found: the records on the host, of each area, once the lease is over.
    """

    lease: Lease[Any]
    void: Callable[[str], None]
    found: list[torch.Tensor]


class AfdRuntime(StockRuntime):
    """A `StockRuntime` whose launches are our own kernels.

    Args:
        args, limits: of `StockRuntime`.
        tile_tokens: most tokens that are projected at once, see `workspace/sizing.py:tile_limit`.
        library: the kernels; None to look for them.
        cores: blocks of a launch; None for as many as the device has vector cores. Results do not depend on it.

    Raises:
        InputError: there are no kernels for this machine.
        RuntimeError: the kernels do not take the model's compressors, with the reason.

    Attributes:
        product: torch's operator that projects on hardware, see back_end_npu.cpp.
    """

    product: ClassVar[str] = "aten::mm.dtype_out"

    def __init__(
        self,
        *args: Any,
        tile_tokens: int = DEFAULT_TILE_TOKENS,
        library: Library | None = None,
        cores: int | None = None,
        **limits: Any,
    ) -> None:
        self.tile_tokens = tile_tokens
        self.library = find(os.environ) if library is None else library
        self._ops = load(self.library.folder, self.library.backend)
        if self.library.on_hardware and not has_kernel(self.product):  # else the projection is an operator of our own
            _logger.warning(
                "afd-dsv4: this torch_npu has no %s, which multiplies bfloat16 into float32; the afd executor projects "
                "with float32 copies of tokens and weights, which is slower and takes more memory",
                self.product,
            )
        self._cores = cores
        super().__init__(*args, **limits)
        if cores is None:
            self._cores = int(self._ops.vector_cores(self.device.device.index or 0))
        for kind in self.pools:
            self._try(kind, torch.device("meta"), self._limit, self.store.max_num_seqs)
        # Once for true: what a device loads with a kernel's first launch is not loaded while a graph is captured, and
        # kernels that do not run stop the start, not the first request. No forward before a capture would launch them.
        for kind in self.pools:
            self._try(kind, self.device.device, kind.ratio, 1)
        torch.get_device_module(self.device.device).synchronize()

    def _also_writes(self, kind: CompressorKind) -> tuple[str, ...]:
        return (_named_area(_AREA_OF[kind]),)

    def _make_areas(self, slots: int, drafts: int) -> list[dict[tuple[CompressorKind, ...], torch.Tensor]]:
        assert self.tile_tokens is not None
        seqs, tokens = self.store.max_num_seqs, self.max_num_batched_tokens
        self._limit = tile_limit(seqs, tokens, drafts, self.tile_tokens)
        sizes = staging_areas(
            self.geometry,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            tile_tokens=self.tile_tokens,
            drafts=drafts,
        )
        where = self.device.device
        areas = [
            {kinds: torch.empty(size, dtype=torch.uint8, device=where) for kinds, size in sizes.items()}
            for _ in range(slots)
        ]
        for slot in areas:
            for area in slot.values():
                area[:FAULT_BYTES].zero_()
        self._found = [
            [[torch.zeros(FAULT_BYTES, dtype=torch.uint8, pin_memory=True) for _ in sizes] for _ in range(2)]
            for _ in areas
        ]
        self._unseen: list[list[_Ended]] = [[] for _ in areas]
        self._bad: str | None = None
        return areas

    def allocated(self) -> AllocatedBytes:
        """See `StockRuntime.allocated`."""
        known = super().allocated()
        return replace(
            known, host=known.host + sum(found.nbytes for slot in self._found for turn in slot for found in turn)
        )

    def _end(self, lease: Lease[Any], void: Callable[[str], None]) -> None:
        if lease.captured:  # nothing has run
            return
        slot = lease.slot.index
        lease.touch(self.device.current_stream(), reads=[_named_area(kinds) for kinds in self.areas[slot]])
        self._found[slot].reverse()  # the two take turns
        for found, area in zip(self._found[slot][0], self.areas[slot].values(), strict=True):
            found.copy_(area[:FAULT_BYTES], non_blocking=True)
        self._unseen[slot].append(_Ended(lease, void, self._found[slot][0]))

    def _look(self) -> None:
        for unseen in self._unseen:
            # A copy has all that those before it have. With graphs the last one may always be under way: all replays
            # have one slot, and under asynchronous scheduling a step begins before the last one is over.
            ready = [count for count in (len(unseen), len(unseen) - 1) if count > 0 and unseen[count - 1].lease.over()]
            if not ready:
                continue
            seen = unseen[: ready[0]]
            del unseen[: ready[0]]
            if text := next(filter(None, map(self._ops.faults, seen[-1].found)), None):
                executions = ", ".join(str(ended.lease.execution) for ended in seen)
                self._bad = f"{executions}: kernels found bad tables on the device: {text}"
                for ended in seen:
                    ended.void(self._bad)
                break
        if self._bad is not None:
            raise BadTables(
                f"{self._bad}. What was returned is wrong, and so may tails be. The worker cannot go on; restart it, "
                f"and report this with the log"
            )

    def close(self, drain_s: float = 0.0) -> tuple[Lease[Any], ...]:
        """See `StockRuntime.close`. What kernels found since the last `begin` is logged."""
        lost = super().close(drain_s)
        try:
            self._look()
        except BadTables as error:
            _logger.error("afd-dsv4: %s", error)
        return lost

    def _most_rows(self, kind: CompressorKind) -> int:
        """Staging rows of the largest tile."""
        return self._limit + carried_rows(kind, self._limit, self.max_num_batched_tokens)

    def _memory(self, slot: int, kind: CompressorKind) -> tuple[torch.Tensor, torch.Tensor]:
        """Staging rows of a kind in a slot, and before them the workspace of its kernels: first the records of all."""
        area, row = self.areas[slot][_AREA_OF[kind]], self.geometry.row_bytes(kind)
        split = kernel_bytes(kind, self._limit, self.store.max_num_seqs, self.geometry.head_dim)
        rows = area[split : split + self._most_rows(kind) * row]
        return rows.view(torch.float32).view(-1, row // FP32_BYTES), area[:split]

    def _try(self, kind: CompressorKind, where: torch.device, tokens: int, requests: int) -> None:
        """Launch a batch of padding: on meta tensors to ask whether kernels take it, on the device to run them.

        No row of it is addressed, and its state table is all zero.
        """
        zeros = functools.partial(torch.zeros, device=where)
        pool, ratio, bfloat16 = self.pools[kind].to(where), kind.ratio, torch.bfloat16
        values, windows = pool.shape[2], min(tokens, tokens // ratio + requests)
        width, hidden = values // (2 * kind.coff), self.geometry.hidden_size
        x, weight = zeros((tokens, hidden), dtype=bfloat16), zeros((values // 2, hidden), dtype=bfloat16)
        rows, ape = zeros((tokens, values)), zeros((ratio, values // 2))
        angles = zeros((windows, self.geometry.qk_rope_head_dim))
        norm, out = zeros(width, dtype=bfloat16), zeros((windows, width), dtype=bfloat16)
        lists = [zeros(count, dtype=torch.int32) for count in (requests + 1, requests)]
        lists.append(zeros((requests, self.tables[0][ratio].columns), dtype=torch.int32))
        workspace = self._memory(0, kind)[1].to(where)
        launch = {"ratio": ratio, "coff": kind.coff, "carry": 0, "first_token": 0, "tokens": tokens}
        launch |= {"launch_tokens": tokens, "blocks": self._cores or 1}
        self._ops.project(x, weight, weight, rows)
        self._ops.compress(rows, pool, ape, norm, angles, angles, *lists, out, workspace, norm_eps=1e-6, **launch)
        list_ids = self.shapes[ratio].tail_pages
        self._ops.tail_update(rows, pool, ape, *lists, workspace, list_ids=list_ids, **launch)

    def _launch(
        self,
        lease: Lease[Any],
        split: Split,
        x: torch.Tensor,
        weights: CompressorWeights,
        kind: CompressorKind,
        table: torch.Tensor,
        starts: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rope_cos: torch.Tensor,
        rope_sin: torch.Tensor,
    ) -> torch.Tensor:
        ops, pool, ratio, coff = self._ops, self.pools[kind], kind.ratio, kind.coff
        tail_pages, cores, ape, tokens = self.shapes[ratio].tail_pages, self._cores, weights.ape, split.tokens
        if rope_cos.shape[1] != weights.rope_head_dim:
            raise RuntimeError(f"{rope_cos.shape[1]} angles a window, and weights that turn {weights.rope_head_dim}")
        workspace, tiles = split.tiles.get(kind) or self._plan_tiles(lease, split, kind)
        # Copies for one launch: vllm-ascend gathers angles for each anew, in the model's type (attention/dsa_v1.py:
        # _compute_compressor_metadata), and which of them are alike cannot be told from the tensors.
        cos, sin = rope_cos.float(), rope_sin.float()
        out = x.new_empty((rope_cos.shape[0], weights.norm_weight.shape[0]))
        for planned in tiles:
            rows, first, count, carry = planned.rows, planned.tile.first, planned.tile.tokens, planned.tile.carry
            if planned.carried is not None:
                front, last = planned.carried
                front.copy_(last)
            # Overloads, not packets: for a parameter of vLLM's, which has a __torch_function__, a packet asks again.
            ops.project.default(x[first : first + count], weights.wkv, weights.wgate, planned.own)
            ops.compress.default(
                rows,
                pool,
                ape,
                weights.norm_weight,
                cos,
                sin,
                cu_seqlens,
                starts,
                table,
                out,
                workspace,
                ratio,
                coff,
                weights.norm_eps,
                carry,
                first,
                count,
                tokens,
                cores,
            )
            ops.tail_update.default(
                rows,
                pool,
                ape,
                cu_seqlens,
                starts,
                table,
                workspace,
                ratio,
                coff,
                tail_pages,
                carry,
                first,
                count,
                tokens,
                cores,
            )
        return out

    def _plan_tiles(
        self, lease: Lease[Any], split: Split, kind: CompressorKind
    ) -> tuple[torch.Tensor, list[_TileRows]]:
        """The tiles of the launches of some requests in a slot: once, since all layers have the same."""
        if lease.captured:  # what will be replayed has other chunks
            if split.tokens > self._limit:
                raise ValueError(
                    f"a graph of {split.tokens} tokens is one tile, and tiles hold {self._limit}; capture a smaller "
                    f"one, or raise tile_tokens"
                )
            tiles: tuple[Tile, ...] = (Tile(0, split.tokens, 0),)
        else:
            tiles = cut_into_tiles(split.chunks, self._limit, kind.ratio, overlap=kind.overlap)
        memory, workspace = self._memory(lease.slot.index, kind)
        planned: list[_TileRows] = []
        for tile in tiles:
            rows = memory[: tile.carry + tile.tokens]
            carried = (rows[: tile.carry], planned[-1].rows[-tile.carry :]) if tile.carry else None
            planned.append(_TileRows(tile, rows, rows[tile.carry :], carried))
        split.tiles[kind] = workspace, planned
        return workspace, planned

    def compress_idle(
        self,
        kind: CompressorKind,
        x: torch.Tensor,
        weights: CompressorWeights,
        rope_cos: torch.Tensor,
        rope_sin: torch.Tensor,
        cu_seqlens: torch.Tensor,
    ) -> torch.Tensor:
        """Zeros: without an execution there is no slot to stage rows in, and nobody reads them.

        A tile is projected all the same, into memory that is given back, beside angles as a launch has them: what is
        taken beside the slot is there when vLLM measures its largest forward, and a graph's capture is not the first to
        ask for its shape.
        """
        self.idle(kind, cu_seqlens.shape[0] - 1)  # refuses what the stock executor refuses
        angles = rope_cos.float(), rope_sin.float()
        tile = x[: self._limit]
        rows = x.new_empty((tile.shape[0], 2 * weights.wkv.shape[0]), dtype=torch.float32)
        self._ops.project.default(tile, weights.wkv, weights.wgate, rows)
        return x.new_zeros((angles[0].shape[0], weights.norm_weight.shape[0]))
