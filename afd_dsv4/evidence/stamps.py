# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Stamps: an operator that compresses nothing, and knows of every byte who wrote it last.

Problem: rows that come out right prove little about a race. Most bytes of a page are never read again, and a wrong byte
in a compressed row does not say where it came from.
Way: the stock runtime is given this operator instead of the compressor. It reads and writes the rows that the stock one
would, through the state table that lies in the slot. Every row is a stamp of its request, layer, kind and position, so
that any other row differs in nearly every byte. What a launch found on the device (its history pages, its table, its
starts) is copied into a ledger of its stream, on the device, without any wait; what it should have found is noted on
the host, in the order in which launches are queued. `audit` compares the two, and every page and every table with its
last writer. Plain torch operators on the current stream, so it runs wherever torch has streams.
Not here: the numbers of a compressor (`rows.py`), the load and its faults (`soak.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from afd_dsv4.compressor.stock import StockExecution, StockRuntime
from afd_dsv4.geometry import CompressorKind
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.tables import NO_COLUMN, Int32Array, PageList, RequestChunk

Words = npt.NDArray[np.uint32]

# Odd, so that a step in any of them changes a stamp; the sums stay far apart for the sizes of a soak.
PER_REQUEST, PER_POSITION, PER_LAYER, PER_KIND, PER_WORD = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1
KINDS = {kind: number for number, kind in enumerate(CompressorKind)}


class Planted(RuntimeError):
    """A fault that the load injected."""


@functools.cache
def salt(layer: int, kind: CompressorKind) -> np.uint32:
    """What the stamps of a layer and kind have in common."""
    value: np.uint32 = np.uint32((layer * PER_LAYER + (1 + KINDS[kind]) * PER_KIND) & 0xFFFFFFFF)
    return value


@dataclass(frozen=True)
class Rows:
    """What a launch reads and writes, alike for all layers and kinds of one ratio.

    Attributes:
        cells: flat in the launch's part of the state table: of each history page, then of each written row.
        history: how many are history pages; they are read whole.
        places: of each written row, within its page.
        stamps: of the written rows, but for the layer and kind.
    """

    cells: Int32Array
    history: int
    places: Int32Array
    stamps: Words

    @classmethod
    def of(cls, shape: TailShape, columns: int, chunks: Sequence[tuple[int, RequestChunk]]) -> Rows:
        """Derive them.

        Args:
            shape: of the ratio.
            columns: width of the state table.
            chunks: with the number of their request.
        """
        page_rows = shape.page_rows
        reads, cells, places, stamps = [], [], [], []
        for index, (number, chunk) in enumerate(chunks):
            first = index * columns - shape.base(chunk.start) // page_rows
            history, tail = shape.pages(shape.need(chunk.start)), shape.pages(shape.live(chunk.low, chunk.end))
            reads += [first + page for page in history]
            # As the stock operator: every new row whose page is mapped, for history or for the tail, is written.
            for pages in (history, range(max(tail.start, history.stop), tail.stop)):
                low, high = max(pages.start * page_rows, chunk.start), min(pages.stop * page_rows, chunk.end)
                at = np.arange(low, max(low, high))
                cells.append(first + at // page_rows)
                places.append(at % page_rows)
                stamps.append(number * PER_REQUEST + at * PER_POSITION)
        return cls(
            np.concatenate([np.array(reads, np.int64), *cells]).astype(np.int32),
            len(reads),
            np.concatenate(places).astype(np.int32),
            np.concatenate(stamps).astype(np.uint32),
        )


def planned_tables(pages: PageList, columns: int) -> Int32Array:
    """The state table of every layer, int32 [layers, requests, columns]; written down without `PageList.table`."""
    tables = np.zeros((len(pages.ids), len(pages.chunks), columns), np.int32)
    for request, there in enumerate(pages.columns):
        used = there[there != NO_COLUMN]
        tables[:, request, used] = pages.ids[:, request, : len(used)]
    return tables


@dataclass
class Ledger:
    """What launches of one stream found, on the device, and what they should have found."""

    found: torch.Tensor
    used: int = 0
    expected: list[npt.NDArray[Any]] = field(default_factory=list)

    def keep(self, found: torch.Tensor, expected: npt.NDArray[Any]) -> None:
        """Queue the copy of what was found."""
        size = found.numel()
        if self.used + size > self.found.numel():
            raise RuntimeError(f"a ledger of {self.found.numel()} words is full; audit more often")
        self.found[self.used : self.used + size].copy_(found.view(-1))
        self.used += size
        self.expected.append(expected.reshape(-1).view(np.uint32))


@dataclass(frozen=True)
class Launch:
    """What the operator is given in place of weights: which launch it is.

    Attributes:
        execution: whose.
        layer: the model's.
        requests: those of this launch.
        tables: `planned_tables` of the execution.
        rows: of the requests.
        ledger: of the stream that it is queued on.
        fails: raise instead of queueing anything.
    """

    execution: StockExecution
    layer: int
    requests: slice
    tables: Int32Array
    rows: Rows
    ledger: Ledger
    fails: bool = False


class Ledgers:
    """One ledger a stream, made once.

    Args:
        device: where.
        words: size of each.
    """

    def __init__(self, device: torch.device, words: int) -> None:
        self._device = device
        self._words = words
        self._ledgers: dict[int, Ledger] = {}

    def of(self, stream: int) -> Ledger:
        """The ledger of a stream."""
        if stream not in self._ledgers:
            self._ledgers[stream] = Ledger(torch.empty(self._words, dtype=torch.int32, device=self._device))
        return self._ledgers[stream]

    @property
    def fullest(self) -> int:
        """Words used in the fullest."""
        return max((ledger.used for ledger in self._ledgers.values()), default=0)

    def audit(self) -> Audit:
        """Compare and empty them; the device must have run everything."""
        total = Audit()
        for ledger in self._ledgers.values():
            if ledger.used:
                found = ledger.found[: ledger.used].cpu().numpy().view(np.uint32)
                total += Audit.of(found, np.concatenate(ledger.expected))
            ledger.used, ledger.expected = 0, []
        return total


@dataclass(frozen=True)
class Audit:
    """Bytes compared, and bytes that were not what their last writer left."""

    compared: int = 0
    wrong: int = 0

    @classmethod
    def of(cls, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> Audit:
        """Compare two arrays of one shape byte by byte."""
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise ValueError(f"found {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}")
        here, there = np.ascontiguousarray(found), np.ascontiguousarray(expected)
        return cls(here.nbytes, int(np.count_nonzero(here.view(np.uint8) != there.view(np.uint8))))

    def __add__(self, other: Audit) -> Audit:
        return Audit(self.compared + other.compared, self.wrong + other.wrong)


class Witness:
    """The operator, and the host's account of what every byte must be.

    Its calls come in the order in which launches are queued, because the runtime makes them under the arena's lock.

    Args:
        ledgers: where launches leave what they found.

    Attributes:
        exact: touch the pages that were planned, one by one, and not those that the table in the slot names: slower,
            but a race detector can see which bytes of a pool a launch touches. The table is compared all the same.
        launches: so far.
    """

    def __init__(self, ledgers: Ledgers) -> None:
        self.ledgers = ledgers
        self.exact = False
        self.launches = 0
        self._runtime: StockRuntime | None = None

    def watch(self, runtime: StockRuntime) -> None:
        """Begin with a runtime that has done nothing: fill its pages with the stamp of nobody."""
        self._runtime = runtime
        self._ramps = {
            kind: (np.arange(pool.shape[2]) * PER_WORD).astype(np.uint32) for kind, pool in runtime.pools.items()
        }
        self._writers = {kind: np.zeros(pool.shape[:2], np.uint32) for kind, pool in runtime.pools.items()}
        self._tables = [
            {ratio: np.zeros(tuple(table.rows.shape), np.int32) for ratio, table in slot.items()}
            for slot in runtime.tables
        ]
        for kind, pool in runtime.pools.items():
            nobody = np.broadcast_to(self._ramps[kind].view(np.int32), tuple(pool.shape)).copy()
            pool.view(torch.int32).copy_(torch.from_numpy(nobody))

    def uploaded(self, slot: int, requests: int) -> None:
        """The tables of a slot were queued to be cleared for an execution."""
        for table in self._tables[slot].values():
            table[:requests] = 0

    def __call__(
        self,
        x: torch.Tensor,
        launch: Launch,
        kind: CompressorKind,
        state: torch.Tensor,
        table: torch.Tensor,
        starts: torch.Tensor,
        *_: object,
    ) -> torch.Tensor:
        """Queue what the stock operator would touch. Arguments as of `stock.call_operator`; `launch` for weights."""
        runtime, execution, rows, lease = self._runtime, launch.execution, launch.rows, launch.execution.lease
        assert runtime is not None
        assert lease is not None
        planned = launch.tables[runtime.layers[kind][launch.layer]]
        self._tables[lease.slot.index][kind.ratio][: len(planned)] = planned  # what `compress` has just queued
        if launch.fails:
            raise Planted(f"planted in the operator, layer {launch.layer} {kind.value}")
        planned = planned[launch.requests]
        mapped = planned.reshape(-1)[rows.cells]
        reads, total, dim = rows.history, len(rows.cells), state.shape[2]
        stamps = rows.stamps + salt(launch.layer, kind)
        # Fresh pinned memory: torch's host allocator does not hand it out again before this copy is over.
        host = torch.empty(total + len(stamps) * (1 + dim), dtype=torch.int32, pin_memory=True)
        words = host.numpy()
        words[:total] = rows.cells
        words[total : 2 * total - reads] = rows.places
        words[2 * total - reads :].view(np.uint32).reshape(-1, dim)[:] = stamps[:, None] + self._ramps[kind]
        there = host.to(table.device, non_blocking=True)
        flat, pool = table.view(-1), state.view(torch.int32)
        pages = flat.index_select(0, there[:total])
        if reads:
            found = self._read(pool, pages[:reads], mapped[:reads])
            launch.ledger.keep(found, self._writers[kind][mapped[:reads]][:, :, None] + self._ramps[kind])
        launch.ledger.keep(flat, planned)
        launch.ledger.keep(starts, execution.lists[kind.ratio].starts[launch.requests])
        if len(stamps):
            there = there[total:]
            values = there[total - reads :].view(-1, dim)
            if self.exact:
                for row in range(len(stamps)):
                    pool[mapped[reads + row], rows.places[row]].copy_(values[row])
            else:
                pool.index_put_((pages[reads:], there[: total - reads]), values)
            self._writers[kind][mapped[reads:], rows.places] = stamps
        self.launches += 1
        return x

    def _read(self, pool: torch.Tensor, found: torch.Tensor, planned: Int32Array) -> torch.Tensor:
        """Whole pages, as the table says that was found."""
        if self.exact:
            return torch.cat([pool[page] for page in planned])
        return pool.index_select(0, found)

    def audit(self) -> Audit:
        """Compare everything; the device must have run all that was queued."""
        assert self._runtime is not None
        total = self.ledgers.audit()
        for kind, pool in self._runtime.pools.items():
            found = pool.view(torch.int32).cpu().numpy().view(np.uint32)
            total += Audit.of(found, self._writers[kind][:, :, None] + self._ramps[kind])
        for slot, expected in zip(self._runtime.tables, self._tables, strict=True):
            for ratio, table in slot.items():
                whole = np.append(expected[ratio].ravel(), np.int32(0))  # the cell of padded entries keeps page 0
                total += Audit.of(table.flat.cpu().numpy(), whole)
        return total
