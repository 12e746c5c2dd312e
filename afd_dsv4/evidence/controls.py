# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Planted faults: what the evidence run must find broken, or its other results prove nothing.

Three families. A mutant breaks one table rule in the launch that an executor would make, and `rules.violations` must
name the rule. A sabotaged runtime really launches with broken lists, and the rows must come out different. A runtime
without stream waits runs the same load, and rows must come out different. Production code has no switch for the second
family: it is a subclass here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from afd_dsv4.compressor.stock import StockRuntime
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.rules import Launch, Rule, violations
from afd_dsv4.tail.store import SlotIndex, TailStore
from afd_dsv4.tail.tables import NO_COLUMN, Int32Array, PageList, RequestChunk, RequestId
from afd_dsv4.workspace.lease import Lease

Mutant = Callable[[Launch], Launch]


def _int32(values: Any) -> Int32Array:
    return np.asarray(values, np.int32)


def launch_of(pages: PageList, layer: int, pool_pages: int, padded: int = 0) -> Launch:
    """The launch that an executor makes of a planned list, with `padded` rows behind it as a graph has them.

    Args:
        pages: the list.
        layer: index among the layers of the ratio.
        pool_pages: pages in the pool.
        padded: rows without a request.
    """
    tokens = [chunk.tokens for chunk in pages.chunks]
    columns = pages.shape.columns(max(tokens))
    true = _int32([chunk.start for chunk in pages.chunks] + [0] * padded)
    table = np.concatenate([pages.table(layer, columns), np.zeros((padded, columns), np.int32)])
    return Launch(
        shape=pages.shape,
        chunks=pages.chunks + (None,) * padded,
        table=table,
        starts=np.concatenate([pages.starts, np.zeros(padded, np.int32)]),
        metadata_starts=true,
        device_starts=true,
        cu_seqlens=_int32(np.cumsum([0, *tokens, *[0] * padded])),
        pool_pages=pool_pages,
        planned=table,
    )


def planned_launch(ratio: int) -> Launch:
    """Two requests resumed inside a window and a page, one of them across both; with drafts."""
    shape = TailShape(ratio, ratio == 4, 2 if ratio == 4 else 32, layers=2, drafts=5)
    store = TailStore({ratio: shape}, max_num_seqs=2, slots=1)
    a, b = RequestId("a"), RequestId("b")
    store.plan([RequestChunk(a, 0, 301), RequestChunk(b, 0, 70)], SlotIndex(0))
    pages = store.plan([RequestChunk(a, 301, 601), RequestChunk(b, 70, 76, drafts=5)], SlotIndex(0)).lists[ratio]
    return launch_of(pages, 1, store.pages(ratio), padded=1)


def edited(table: Int32Array, row: int, column: int, value: int) -> Int32Array:
    """A copy with one cell changed."""
    table = table.copy()
    table[row, column] = value
    return table


def chunk_of(launch: Launch, row: int) -> RequestChunk:
    """The chunk of a row that is not padded."""
    chunk = launch.chunks[row]
    if chunk is None:
        raise ValueError(f"row {row} is padded")
    return chunk


def history_column(launch: Launch) -> int:
    """The column of the first request's oldest history page."""
    base = chunk_of(launch, 0).start - int(launch.starts[0])
    return (launch.shape.need(chunk_of(launch, 0).start).start - base) // launch.shape.page_rows


def tail_column(launch: Launch) -> int:
    """The column of the first request's newest tail page."""
    base = chunk_of(launch, 0).start - int(launch.starts[0])
    return (chunk_of(launch, 0).end - 1 - base) // launch.shape.page_rows


def drop_tail(launch: Launch) -> Launch:
    """Rule 1: the newest tail page is not mapped."""
    return replace(launch, table=edited(launch.table, 0, tail_column(launch), 0))


def keep_only_the_tail_of_full_acceptance(launch: Launch) -> Launch:
    """Rule 1: rows that only a shorter accept length needs are not mapped."""
    # Request b ends at 76 with 5 drafts; what only an earlier position needs goes: the save rule of the CYCLE mode.
    chunk = chunk_of(launch, 1)
    sure = set(launch.shape.pages(launch.shape.need(chunk.end)))
    history = set(launch.shape.pages(launch.shape.need(chunk.start)))
    base = chunk.start - int(launch.starts[1])
    table = launch.table.copy()
    for page in set(launch.shape.pages(launch.shape.live(chunk.low, chunk.end))) - sure - history:
        table[1, page - base // launch.shape.page_rows] = 0
    return replace(launch, table=table)


def drop_history(launch: Launch) -> Launch:
    """Rule 2: the oldest history page is not mapped; the operator would read page 0."""
    return replace(launch, table=edited(launch.table, 0, history_column(launch), 0))


def page_outside_the_pool(launch: Launch) -> Launch:
    """Rule 2: a page id behind the pool."""
    return replace(launch, table=edited(launch.table, 0, history_column(launch), launch.pool_pages))


def narrow_table(launch: Launch) -> Launch:
    """Rule 2: too few columns."""
    return replace(launch, table=launch.table[:, : tail_column(launch)])


def alias_tail_with_history(launch: Launch) -> Launch:
    """Rule 3: the tail is written to a page that the launch reads."""
    page = int(launch.table[0, history_column(launch)])
    return replace(launch, table=edited(launch.table, 0, tail_column(launch), page))


def alias_requests(launch: Launch) -> Launch:
    """Rule 3: two requests share a page."""
    return replace(launch, table=edited(launch.table, 1, tail_column_of_b(launch), int(launch.table[0].max())))


def tail_column_of_b(launch: Launch) -> int:
    """The first mapped column of the second request."""
    return int(np.flatnonzero(launch.table[1])[0])


def history_swapped(launch: Launch) -> Launch:
    """Rule 3: two history pages stand for each other."""
    table = launch.table.copy()
    first = history_column(launch)
    table[0, [first, first + 1]] = table[0, [first + 1, first]]
    return replace(launch, table=table)


def page_of_another_layer(launch: Launch) -> Launch:
    """Rule 3: a page that is in the pool and nowhere else in this launch, but somebody else's."""
    other = next(page for page in range(1, launch.pool_pages) if page not in launch.table)
    return replace(launch, table=edited(launch.table, 0, history_column(launch), other))


def middle_page_of_another(launch: Launch) -> Launch:
    """Rule 3: a column between history and tail, which needs no page, saves rows to somebody else's."""
    other = next(page for page in range(1, launch.pool_pages) if page not in launch.table)
    return replace(launch, table=edited(launch.table, 0, tail_column(launch) // 2, other))


def rebase_by_a_page_less(launch: Launch) -> Launch:
    """Rule 4: another phase."""
    starts = launch.starts.copy()
    starts[0] += 1
    return replace(launch, starts=starts)


def rebase_to_zero(launch: Launch) -> Launch:
    """Rule 4: right phase, but the operator would think there is no previous window."""
    starts = launch.starts.copy()
    starts[0] -= launch.shape.period
    return replace(launch, starts=starts)


def rebase_up(launch: Launch) -> Launch:
    """Rule 4: right phase, but a window that does not exist would be read."""
    starts = launch.starts.copy()
    starts[0] += launch.shape.period * (1 + chunk_of(launch, 0).start // launch.shape.period)
    return replace(launch, starts=starts)


def negative_start(launch: Launch) -> Launch:
    """Rule 4: a start before the sequence."""
    starts = launch.starts.copy()
    starts[0] -= 2 * launch.shape.period
    return replace(launch, starts=starts)


def metadata_with_the_rebased_start(launch: Launch) -> Launch:
    """Rule 4: RoPE and slots would be those of another position."""
    return replace(launch, metadata_starts=launch.starts)


def table_of_another_slice(launch: Launch) -> Launch:
    """Rule 5: the table has other rows than the launch."""
    return replace(launch, table=launch.table[1:])


def pages_in_a_padded_row(launch: Launch) -> Launch:
    """Rule 5: a padded row maps a page."""
    return replace(launch, table=edited(launch.table, 2, 0, 1))


def rows_swapped(launch: Launch) -> Launch:
    """Rule 5: the table's rows are those of other requests."""
    return replace(launch, table=launch.table[[1, 0, 2]])


def tokens_shifted(launch: Launch) -> Launch:
    """Rule 5: cu_seqlens point at other tokens."""
    return replace(launch, cu_seqlens=launch.cu_seqlens + np.int32(1))


def float_table(launch: Launch) -> Launch:
    """Rule 5: a type that the operator does not take."""
    return replace(launch, table=launch.table.astype(np.float32))


def device_starts_short(launch: Launch) -> Launch:
    """Rule 5: fewer device starts than rows."""
    return replace(launch, device_starts=launch.device_starts[1:])


def seqused_given(launch: Launch) -> Launch:
    """Rule 5: seqused selects another template of the operator."""
    return replace(launch, seqused=True)


def optimistic_start(launch: Launch) -> Launch:
    """Rule 6: the device starts earlier than the host thinks."""
    device = launch.device_starts.copy()
    device[1] -= 1
    return replace(launch, device_starts=device)


def idle_forward_that_maps(launch: Launch) -> Launch:
    """Rule 7: a forward without an execution maps a page."""
    return replace(
        launch,
        chunks=(None,) * 3,
        table=edited(np.zeros_like(launch.table), 0, 0, 1),
        starts=np.zeros_like(launch.starts),
        cu_seqlens=np.zeros_like(launch.cu_seqlens),
    )


MUTANTS: list[tuple[Mutant, int, Rule]] = [
    (drop_tail, 4, Rule.TAIL_MAPPED),
    (drop_tail, 128, Rule.TAIL_MAPPED),
    (keep_only_the_tail_of_full_acceptance, 4, Rule.TAIL_MAPPED),
    (drop_history, 4, Rule.HISTORY_MAPPED),
    (drop_history, 128, Rule.HISTORY_MAPPED),
    (page_outside_the_pool, 4, Rule.HISTORY_MAPPED),
    (narrow_table, 4, Rule.HISTORY_MAPPED),
    (alias_tail_with_history, 4, Rule.NO_ALIAS),
    (alias_tail_with_history, 128, Rule.NO_ALIAS),
    (alias_requests, 4, Rule.NO_ALIAS),
    (history_swapped, 4, Rule.NO_ALIAS),
    (page_of_another_layer, 4, Rule.NO_ALIAS),
    (page_of_another_layer, 128, Rule.NO_ALIAS),
    (middle_page_of_another, 4, Rule.NO_ALIAS),
    (rebase_by_a_page_less, 4, Rule.REBASE),
    (rebase_up, 4, Rule.REBASE),
    (negative_start, 4, Rule.REBASE),
    (rebase_to_zero, 4, Rule.REBASE),
    (metadata_with_the_rebased_start, 4, Rule.REBASE),
    (table_of_another_slice, 4, Rule.ROW_SLICE),
    (pages_in_a_padded_row, 4, Rule.ROW_SLICE),
    (rows_swapped, 4, Rule.ROW_SLICE),
    (tokens_shifted, 4, Rule.ROW_SLICE),
    (float_table, 4, Rule.ROW_SLICE),
    (device_starts_short, 4, Rule.ROW_SLICE),
    (seqused_given, 4, Rule.ROW_SLICE),
    (optimistic_start, 4, Rule.EXACT_START),
    (idle_forward_that_maps, 4, Rule.IDLE),
]


@dataclass(frozen=True)
class RuleControl:
    """One mutant, and the rules that the checker named."""

    rule: Rule
    mutant: str
    ratio: int
    named: tuple[Rule, ...]

    @property
    def caught(self) -> bool:
        """Whether the broken rule is among those named."""
        return self.rule in self.named


def check_mutants() -> list[RuleControl]:
    """Run every mutant through the rule checker."""
    found = []
    for mutant, ratio, rule in MUTANTS:
        named = dict.fromkeys(violation.rule for violation in violations(mutant(planned_launch(ratio))))
        found.append(RuleControl(rule, mutant.__name__, ratio, tuple(named)))
    return found


def forget_history(pages: PageList) -> PageList:
    """Rule 2 on the device: history entries leave the table, so the operator reads page 0."""
    ids = pages.ids.copy()
    for row, chunk in enumerate(pages.chunks):
        ids[:, row, : len(pages.shape.pages(pages.shape.need(chunk.start)))] = 0
    return replace(pages, ids=ids)


def forget_tail(pages: PageList) -> PageList:
    """Rule 1 on the device: fresh tail pages leave the table, so their rows are never saved."""
    ids = pages.ids.copy()
    for row, chunk in enumerate(pages.chunks):
        ids[:, row, len(pages.shape.pages(pages.shape.need(chunk.start))) :] = 0
    return replace(pages, ids=ids)


def write_tail_over_history(pages: PageList) -> PageList:
    """Rule 3 on the device: the newest tail page is the oldest history page, overwritten before it is read."""
    ids = pages.ids.copy()
    for row, chunk in enumerate(pages.chunks):
        used = int((pages.columns[row] != NO_COLUMN).sum())
        if pages.shape.need(chunk.start) and used > 1:
            ids[:, row, used - 1] = ids[:, row, 0]
    return replace(pages, ids=ids)


def shift_starts(pages: PageList) -> PageList:
    """Rule 4 on the device: starts one row too late, so windows are cut at the wrong rows."""
    return replace(pages, starts=pages.starts + np.int32(pages.starts > 0))


SABOTAGES: dict[Rule, Callable[[PageList], PageList]] = {
    Rule.TAIL_MAPPED: forget_tail,
    Rule.HISTORY_MAPPED: forget_history,
    Rule.NO_ALIAS: write_tail_over_history,
    Rule.REBASE: shift_starts,
}


class SabotagedRuntime(StockRuntime):
    """Uploads edited lists. Construct it like a `StockRuntime`, then set `sabotage`."""

    sabotage: Callable[[PageList], PageList] = staticmethod(lambda pages: pages)

    def _upload(self, lease: Lease[Any], lists: dict[int, PageList], host: Any, stream: Any) -> None:
        super()._upload(lease, {ratio: self.sabotage(pages) for ratio, pages in lists.items()}, host, stream)
