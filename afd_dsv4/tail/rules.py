# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The seven rules of a sparse state table, checked on the host for one launch.

The stock operator checks none of them: an unmapped history row is read from page 0, an aliased page is overwritten
before it is read, and the result is a plausible wrong number. So whoever builds a launch can ask `violations` what is
wrong with it, by rule. The check is for debugging, tests and the evidence run; it is not on the hot path.

Source of the rules: the operator's ReadState and SaveState, see `rows.py`.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.tables import NULL_PAGE, Int32Array, RequestChunk


class Rule(enum.Enum):
    """What a correct launch keeps."""

    TAIL_MAPPED = "1: every row that some accept length may need later is mapped"
    HISTORY_MAPPED = "2: every row the launch reads is mapped, page 0 to nobody, and every column exists"
    NO_ALIAS = "3: a page that is read is not newly written, and no page stands for two logical pages"
    REBASE = "4: the re-based start keeps its phase and stays behind a full window; metadata gets the true start"
    ROW_SLICE = "5: table, starts and cu_seqlens speak of the same rows, seqused is None, padded rows are all 0"
    EXACT_START = "6: the start on the host is the start on the device"
    IDLE = "7: a forward without an execution gets an all-zero table and start 0"


@dataclass(frozen=True)
class Violation:
    """One broken rule."""

    rule: Rule
    detail: str


@dataclass(frozen=True)
class Launch:
    """What one compressor launch is given, as seen from the host.

    Attributes:
        shape: windows and pages.
        chunks: per batch row the chunk, or None for a padded row.
        table: int32 [rows, columns].
        starts: int32 [rows], as the compressor gets them.
        metadata_starts: int32 [rows], as `compressor_metadata` gets them.
        device_starts: int32 [rows], what the device knows the starts to be.
        cu_seqlens: int32 [rows + 1], first token of each row in the packed batch of this launch.
        pool_pages: pages in the pool.
        seqused: the operator's argument of that name is not None.
        planned: int32 [rows, columns], the table as the store planned it for this layer, where it is known. Without it
            a page that belongs to somebody else, but is in the pool and not mapped twice, cannot be told.
    """

    shape: TailShape
    chunks: tuple[RequestChunk | None, ...]
    table: Int32Array
    starts: Int32Array
    metadata_starts: Int32Array
    device_starts: Int32Array
    cu_seqlens: Int32Array
    pool_pages: int
    seqused: bool = False
    planned: Int32Array | None = None


def violations(launch: Launch) -> tuple[Violation, ...]:
    """Every broken rule of one launch, in the order of the rules."""
    found: list[Violation] = []
    shape = launch.shape
    rows = len(launch.chunks)
    sizes = (
        launch.table.shape[0],
        len(launch.starts),
        len(launch.metadata_starts),
        len(launch.device_starts),
        len(launch.cu_seqlens) - 1,
    )
    if set(sizes) != {rows}:
        what = "table, starts, metadata, device and cu_seqlens"
        found.append(Violation(Rule.ROW_SLICE, f"{rows} rows, but {what} have {sizes}"))
        return tuple(found)
    arguments = (launch.table, launch.starts, launch.metadata_starts, launch.device_starts, launch.cu_seqlens)
    if kinds := {str(argument.dtype) for argument in arguments} - {"int32"}:
        found.append(
            Violation(Rule.ROW_SLICE, f"arguments of type {', '.join(sorted(kinds))}, the operator takes int32")
        )
    if launch.cu_seqlens[0] != 0 or (np.diff(launch.cu_seqlens) < 0).any():
        found.append(Violation(Rule.ROW_SLICE, f"cu_seqlens {launch.cu_seqlens.tolist()} must start at 0 and not fall"))
    if launch.planned is not None:
        found += _as_planned(launch, launch.planned)
    if launch.seqused:
        found.append(Violation(Rule.ROW_SLICE, "seqused is given; it selects another template of the operator"))
    read: dict[int, list[str]] = defaultdict(list)
    written: dict[int, list[str]] = defaultdict(list)
    for row, chunk in enumerate(launch.chunks):
        table = launch.table[row]
        tokens = int(launch.cu_seqlens[row + 1] - launch.cu_seqlens[row])
        if chunk is None:
            if tokens:
                found.append(Violation(Rule.ROW_SLICE, f"padded row {row} has {tokens} tokens"))
            if table.any():
                rule = Rule.IDLE if not any(launch.chunks) else Rule.ROW_SLICE
                found.append(Violation(rule, f"row {row} has no execution behind it, yet maps pages"))
            starts = (launch.starts[row], launch.metadata_starts[row], launch.device_starts[row])
            if any(starts):
                detail = f"row {row} has no execution behind it, yet starts at {', '.join(map(str, starts))}"
                found.append(Violation(Rule.IDLE, detail))
            continue
        if tokens != chunk.tokens:
            found.append(Violation(Rule.ROW_SLICE, f"row {row} has {tokens} tokens for a chunk of {chunk.tokens}"))
        found += _start(launch, row, chunk)
        base = chunk.start - int(launch.starts[row])
        history, tail = shape.need(chunk.start), shape.live(chunk.low, chunk.end)
        found += _mapped(launch, row, history, base, Rule.HISTORY_MAPPED, "reads")
        found += _mapped(launch, row, tail, base, Rule.TAIL_MAPPED, "must keep")
        last = (chunk.end - 1 - base) // shape.page_rows
        if last >= len(table):
            found.append(Violation(Rule.HISTORY_MAPPED, f"row {row} reaches column {last}, the table has {len(table)}"))
        for column in np.flatnonzero(table):
            page = int(table[column])
            first = base + int(column) * shape.page_rows
            what = f"row {row} column {column}"
            if not NULL_PAGE < page < launch.pool_pages:
                detail = f"{what} maps page {page} of a pool of {launch.pool_pages}"
                found.append(Violation(Rule.HISTORY_MAPPED, detail))
            reads = range(max(first, history.start), min(first + shape.page_rows, history.stop))
            writes = range(max(first, chunk.start), min(first + shape.page_rows, chunk.end))
            if reads:
                read[page].append(what)
            if writes:
                written[page].append(what)
            if not reads and not writes:
                found.append(Violation(Rule.NO_ALIAS, f"{what} maps page {page}, which the launch has no use for"))
    for page, sites in {**read, **written}.items():
        sites = sorted({*read.get(page, []), *written.get(page, [])})
        if len(sites) > 1:
            found.append(Violation(Rule.NO_ALIAS, f"page {page} is mapped by {', '.join(sites)}"))
    return tuple(found)


def _as_planned(launch: Launch, planned: Int32Array) -> list[Violation]:
    """Cells that are not the planned ones: another row's (a wrong slice), or anybody's (an alias)."""
    found = []
    width = min(planned.shape[1], launch.table.shape[1])
    for row in range(len(launch.chunks)):
        cells, own = launch.table[row, :width], planned[row, :width]
        if np.array_equal(cells, own):
            continue
        column = int(np.flatnonzero(cells != own)[0])
        others = [other for other in range(len(planned)) if np.array_equal(cells, planned[other, :width])]
        whose = (
            f"the table of row {others[0]}" if others else f"page {cells[column]} for {own[column]} in column {column}"
        )
        found.append(Violation(Rule.ROW_SLICE if others else Rule.NO_ALIAS, f"row {row} maps {whose}"))
    return found


def _start(launch: Launch, row: int, chunk: RequestChunk) -> list[Violation]:
    shape, start = launch.shape, int(launch.starts[row])
    found = []
    if chunk.start != launch.device_starts[row]:
        detail = f"row {row} starts at {chunk.start} on the host, at {launch.device_starts[row]} on the device"
        found.append(Violation(Rule.EXACT_START, detail))
    if start % shape.period != chunk.start % shape.period:
        detail = f"row {row}: {chunk.start} re-based to {start} changes phase mod {shape.period}"
        found.append(Violation(Rule.REBASE, detail))
    if not 0 <= start <= chunk.start:
        found.append(
            Violation(Rule.REBASE, f"row {row}: {chunk.start} re-based to {start}, outside [0, {chunk.start}]")
        )
    if chunk.start >= shape.reach > start:
        found.append(Violation(Rule.REBASE, f"row {row}: {chunk.start} re-based to {start} loses the previous window"))
    if launch.metadata_starts[row] != chunk.start:
        detail = f"row {row}: metadata is given start {launch.metadata_starts[row]}, the true one is {chunk.start}"
        found.append(Violation(Rule.REBASE, detail))
    return found


def _mapped(launch: Launch, row: int, rows: range, base: int, rule: Rule, verb: str) -> list[Violation]:
    """Rows that fall on a column that is missing or null."""
    table = launch.table[row]
    missing = [
        page
        for page in launch.shape.pages(range(rows.start - base, rows.stop - base))
        if page >= len(table) or page < 0 or table[page] == NULL_PAGE
    ]
    if not missing:
        return []
    return [Violation(rule, f"row {row} {verb} rows [{rows.start}, {rows.stop}) and columns {missing} are not mapped")]
