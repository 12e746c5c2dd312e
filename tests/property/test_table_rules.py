# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The seven table rules: planned launches keep all of them; a mutant of each is caught by its name."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.evidence.controls import (
    MUTANTS,
    Mutant,
    alias_tail_with_history,
    check_mutants,
    drop_history,
    launch_of,
    planned_launch,
    rebase_by_a_page_less,
    rebase_to_zero,
)
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.rules import Rule, violations
from afd_dsv4.tail.store import SlotIndex, TailStore
from afd_dsv4.tail.tables import RequestChunk, RequestId
from tests.strategies import LENGTHS, shapes
from tests.symbolic import SymbolicPool, expected


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
        pages = store.plan(chunks, SlotIndex(number % 2)).lists[shape.ratio]
        for layer in range(shape.layers):
            assert violations(launch_of(pages, layer, store.pages(shape.ratio), padded=number % 2)) == ()


def same(one: object, other: object) -> bool:
    return np.array_equal(one, other) and getattr(one, "dtype", None) == getattr(other, "dtype", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mutant", "ratio", "rule"), MUTANTS, ids=[f"{m.__name__}-{r}" for m, r, _ in MUTANTS])
def test_a_mutant_of_a_rule_is_caught_by_name(mutant: Mutant, ratio: int, rule: Rule) -> None:
    launch = planned_launch(ratio)
    assert violations(launch) == ()
    changed = mutant(launch)
    assert any(not same(getattr(changed, name), getattr(launch, name)) for name in vars(launch) if name != "shape")
    assert rule in {violation.rule for violation in violations(changed)}


def test_every_rule_has_a_mutant() -> None:
    assert {rule for _, _, rule in MUTANTS} == set(Rule)
    assert all(control.caught for control in check_mutants())


@pytest.mark.parametrize("mutant", [drop_history, alias_tail_with_history, rebase_by_a_page_less, rebase_to_zero])
def test_the_mutants_that_break_reads_really_compress_wrong_rows(mutant: Mutant) -> None:
    """What the checker calls broken is broken: the symbolic operator pools other rows."""
    shape = TailShape(4, True, 8, layers=1, drafts=2)
    store = TailStore({4: shape}, max_num_seqs=2, slots=1)
    pool = SymbolicPool(shape)
    a, b = RequestId("a"), RequestId("b")
    for first, second in (((0, 301), (0, 70)), ((301, 601), (70, 73))):
        chunks = [RequestChunk(a, *first), RequestChunk(b, *second)]
        pages = store.plan(chunks, SlotIndex(0)).lists[4]
        launch = launch_of(pages, 0, store.pages(4))
        if first[0]:
            launch = mutant(launch)
        out = pool.launch(pages.chunks, launch.table, launch.starts)
        want = {name: rows for chunk in chunks for name, rows in expected(shape, chunk).items()}
        assert (out == want) == (first[0] == 0)
