# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The seven table rules: planned launches keep all of them; a mutant of each is caught by its name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.rules import Launch, Rule, violations
from afd_dsv4.tail.store import SlotIndex, TailStore
from afd_dsv4.tail.tables import PageList, RequestChunk, RequestId
from tests.strategies import LENGTHS, shapes
from tests.symbolic import SymbolicPool, as_int32, expected


def launch_of(pages: PageList, layer: int, pool_pages: int, padded: int = 0) -> Launch:
    """The launch that an executor makes of a planned list, with `padded` rows behind it as a graph has them."""
    tokens = [chunk.tokens for chunk in pages.chunks]
    columns = pages.shape.columns(max(tokens))
    true = as_int32([chunk.start for chunk in pages.chunks] + [0] * padded)
    table = np.concatenate([pages.table(layer, columns), np.zeros((padded, columns), np.int32)])
    return Launch(
        shape=pages.shape,
        chunks=pages.chunks + (None,) * padded,
        table=table,
        starts=np.concatenate([pages.starts, np.zeros(padded, np.int32)]),
        metadata_starts=true,
        device_starts=true,
        cu_seqlens=as_int32(np.cumsum([0, *tokens, *[0] * padded])),
        pool_pages=pool_pages,
    )


@settings(max_examples=40)
@given(shapes(drafts=st.integers(0, 9)), st.lists(st.lists(LENGTHS, min_size=1, max_size=3), max_size=4), st.randoms())
def test_every_planned_launch_keeps_every_rule(shape: TailShape, steps: list[list[int]], rng: random.Random) -> None:
    store = TailStore({shape.ratio: shape}, max_num_seqs=3, slots=2)
    low: dict[int, int] = {}
    high: dict[int, int] = {}
    for number, lengths in enumerate(steps):
        chunks = []
        for request, tokens in enumerate(lengths):
            start = rng.randint(low.get(request, 0), high.get(request, 0))
            drafts = rng.randint(0, min(shape.drafts, tokens - 1))
            chunks.append(RequestChunk(RequestId(str(request)), start, start + tokens, drafts))
            low[request], high[request] = start + tokens - drafts, start + tokens
        pages = store.plan(chunks, SlotIndex(number % 2))[0][shape.ratio]
        for layer in range(shape.layers):
            assert violations(launch_of(pages, layer, store.pages(shape.ratio), padded=number % 2)) == ()


def planned(ratio: int) -> Launch:
    """Two requests resumed inside a window and a page, one of them across both; with drafts."""
    shape = TailShape(ratio, ratio == 4, 2 if ratio == 4 else 32, layers=2, drafts=5)
    store = TailStore({ratio: shape}, max_num_seqs=2, slots=1)
    a, b = RequestId("a"), RequestId("b")
    store.plan([RequestChunk(a, 0, 301), RequestChunk(b, 0, 70)], SlotIndex(0))
    pages = store.plan([RequestChunk(a, 301, 601), RequestChunk(b, 70, 76, drafts=5)], SlotIndex(0))[0][ratio]
    return launch_of(pages, 1, store.pages(ratio), padded=1)


def edited(table: np.ndarray, row: int, column: int, value: int) -> np.ndarray:
    table = table.copy()
    table[row, column] = value
    return table


def history_column(launch: Launch) -> int:
    base = launch.chunks[0].start - int(launch.starts[0])
    return (launch.shape.need(launch.chunks[0].start).start - base) // launch.shape.page_rows


def tail_column(launch: Launch) -> int:
    base = launch.chunks[0].start - int(launch.starts[0])
    return (launch.chunks[0].end - 1 - base) // launch.shape.page_rows


def drop_tail(launch: Launch) -> Launch:
    return replace(launch, table=edited(launch.table, 0, tail_column(launch), 0))


def keep_only_the_tail_of_full_acceptance(launch: Launch) -> Launch:
    # Request b ends at 76 with 5 drafts; what only an earlier position needs goes: the save rule of the CYCLE mode.
    chunk = launch.chunks[1]
    sure = set(launch.shape.pages(launch.shape.need(chunk.end)))
    history = set(launch.shape.pages(launch.shape.need(chunk.start)))
    base = chunk.start - int(launch.starts[1])
    table = launch.table.copy()
    for page in set(launch.shape.pages(launch.shape.live(chunk.low, chunk.end))) - sure - history:
        table[1, page - base // launch.shape.page_rows] = 0
    return replace(launch, table=table)


def drop_history(launch: Launch) -> Launch:
    return replace(launch, table=edited(launch.table, 0, history_column(launch), 0))


def page_outside_the_pool(launch: Launch) -> Launch:
    return replace(launch, table=edited(launch.table, 0, history_column(launch), launch.pool_pages))


def narrow_table(launch: Launch) -> Launch:
    return replace(launch, table=launch.table[:, : tail_column(launch)])


def alias_tail_with_history(launch: Launch) -> Launch:
    page = int(launch.table[0, history_column(launch)])
    return replace(launch, table=edited(launch.table, 0, tail_column(launch), page))


def alias_requests(launch: Launch) -> Launch:
    return replace(launch, table=edited(launch.table, 1, tail_column_of_b(launch), int(launch.table[0].max())))


def tail_column_of_b(launch: Launch) -> int:
    return int(np.flatnonzero(launch.table[1])[0])


def rebase_by_a_page_less(launch: Launch) -> Launch:
    starts = launch.starts.copy()
    starts[0] += 1
    return replace(launch, starts=starts)


def rebase_to_zero(launch: Launch) -> Launch:
    """Right phase, but the operator would think there is no previous window."""
    starts = launch.starts.copy()
    starts[0] -= launch.shape.period
    return replace(launch, starts=starts)


def metadata_with_the_rebased_start(launch: Launch) -> Launch:
    return replace(launch, metadata_starts=launch.starts)


def table_of_another_slice(launch: Launch) -> Launch:
    return replace(launch, table=launch.table[1:])


def pages_in_a_padded_row(launch: Launch) -> Launch:
    return replace(launch, table=edited(launch.table, 2, 0, 1))


def seqused_given(launch: Launch) -> Launch:
    return replace(launch, seqused=True)


def optimistic_start(launch: Launch) -> Launch:
    device = launch.device_starts.copy()
    device[1] -= 1
    return replace(launch, device_starts=device)


def idle_forward_that_maps(launch: Launch) -> Launch:
    return replace(
        launch,
        chunks=(None,) * 3,
        table=edited(np.zeros_like(launch.table), 0, 0, 1),
        starts=np.zeros_like(launch.starts),
        cu_seqlens=np.zeros_like(launch.cu_seqlens),
    )


MUTANTS: list[tuple[Callable[[Launch], Launch], int, Rule]] = [
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
    (rebase_by_a_page_less, 4, Rule.REBASE),
    (rebase_to_zero, 4, Rule.REBASE),
    (metadata_with_the_rebased_start, 4, Rule.REBASE),
    (table_of_another_slice, 4, Rule.ROW_SLICE),
    (pages_in_a_padded_row, 4, Rule.ROW_SLICE),
    (seqused_given, 4, Rule.ROW_SLICE),
    (optimistic_start, 4, Rule.EXACT_START),
    (idle_forward_that_maps, 4, Rule.IDLE),
]


@pytest.mark.parametrize(("mutant", "ratio", "rule"), MUTANTS, ids=[f"{m.__name__}-{r}" for m, r, _ in MUTANTS])
def test_a_mutant_of_a_rule_is_caught_by_name(mutant: Callable[[Launch], Launch], ratio: int, rule: Rule) -> None:
    launch = planned(ratio)
    assert violations(launch) == ()
    changed = mutant(launch)
    assert any(not np.array_equal(getattr(changed, f), getattr(launch, f)) for f in vars(launch) if f != "shape")
    assert rule in {violation.rule for violation in violations(changed)}


def test_every_rule_has_a_mutant() -> None:
    assert {rule for _, _, rule in MUTANTS} == set(Rule)


@pytest.mark.parametrize("mutant", [drop_history, alias_tail_with_history, rebase_by_a_page_less, rebase_to_zero])
def test_the_mutants_that_break_reads_really_compress_wrong_rows(mutant: Callable[[Launch], Launch]) -> None:
    """What the checker calls broken is broken: the symbolic operator pools other rows."""
    shape = TailShape(4, True, 8, layers=1, drafts=2)
    store = TailStore({4: shape}, max_num_seqs=2, slots=1)
    pool = SymbolicPool(shape)
    a, b = RequestId("a"), RequestId("b")
    for first, second in (((0, 301), (0, 70)), ((301, 601), (70, 73))):
        chunks = [RequestChunk(a, *first), RequestChunk(b, *second)]
        pages = store.plan(chunks, SlotIndex(0))[0][4]
        launch = launch_of(pages, 0, store.pages(4))
        if first[0]:
            launch = mutant(launch)
        out = pool.launch(pages.chunks, launch.table, launch.starts)
        want = {name: rows for chunk in chunks for name, rows in expected(shape, chunk).items()}
        assert (out == want) == (first[0] == 0)
