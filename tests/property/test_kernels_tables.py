# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Bad tables: a launch of our kernels ends with a fault by name, and touches nothing that is not its own.

What "nothing" means: guard zones around every array, inputs, the null page, the gaps between pages, and of the result
everything that the bad entry has no part in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afd_dsv4.compressor.kernels import Dtype, Fault, Kernels, Misuse
from tests import kernels_world
from tests.kernels_world import KINDS, PAGE_ROWS, Case, Request, World, poison, same, to_dtype

REQUESTS = {
    "c4": (Request(6, 11), Request(3, 2), Request(9, 8)),
    "c128": (Request(130, 260), Request(3, 2), Request(9, 140)),
}
REQUESTS["c4_indexer"] = REQUESTS["c4"]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_world.library()


def world_of(kind: str, **changes: Any) -> World:
    return World(Case(kind, REQUESTS[kind], page_rows=PAGE_ROWS[kind][0], page_gap=8, padded_requests=1, **changes))


def launch(kernels: Kernels, world: World) -> tuple[str, str]:
    """Both launches, also where the first one fails; what they said."""
    case, spec = world.case, world.case.spec
    rows = world.memory.input("rows", np.concatenate(world.raw).astype(np.float32))
    assert rows.shape == (case.tokens, spec.row_dim)
    compress, tail = world.params(range(case.tokens), 0)
    workspace = world.memory.array("workspace", (kernels.workspace_bytes(compress) // 4,), np.float32)
    arrays = world.arrays | {"rows": rows, "workspace": workspace}
    said = []
    for function, params in ((kernels.compress, compress), (kernels.tail_update, tail)):
        try:
            function(case.blocks, params, arrays)
            said.append("")
        except Fault as fault:
            said.append(str(fault))
    return said[0], said[1]


def untouched(array: NDArray[Any]) -> bool:
    clean = np.empty_like(array)
    poison(clean)
    return bool(same(array, clean).all())


BAD_LENGTHS = {  # table, entry, value
    "cu_seqlens begins behind the first token": ("cu_seqlens", 0, 1),
    "cu_seqlens runs backwards": ("cu_seqlens", 2, 1),
    "cu_seqlens is negative": ("cu_seqlens", 1, -4),
    "cu_seqlens passes the last token": ("cu_seqlens", 3, 10**6),
    "cu_seqlens is as large as it can be": ("cu_seqlens", 3, 2**31 - 1),
    "a start is negative": ("starts", 1, -1),
    "a start is as small as it can be": ("starts", 0, -(2**31)),
    "a start runs over the last position": ("starts", 2, 2**31 - 2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_lengths_or_starts_that_are_bad_stop_the_launch(kernels: Kernels, kind: str, name: str) -> None:
    table, entry, value = BAD_LENGTHS[name]
    world = world_of(kind, blocks=5)
    world.arrays[table][entry] = value
    world.memory.seal(table)
    for said in launch(kernels, world):
        assert f"{table}[{entry}]: found {value}" in said
        assert said.endswith("nothing was written")
    assert untouched(world.out)
    assert same(world.pool, world.pool_before).all()
    assert world.memory.differences() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [-1, -(2**31), 10**6, 2**31 - 1])
def test_a_page_that_the_pool_has_not_spoils_the_windows_that_read_it(kernels: Kernels, kind: str, page: int) -> None:
    world = world_of(kind)
    request = world.case.requests[0]
    column = (request.start - 1) // world.case.page_rows
    expected, pool = world.expected_windows(), world.expected_pool()
    world.table[0, column] = page
    world.memory.seal("table")
    compress, _ = launch(kernels, world)
    assert "state table of request 0: position" in compress
    assert f"is said to be in page {page}, which the pool has not" in compress
    # The first window of the request reads that page (C4's second one too, where rows before start lie in its past).
    first = world.out[: len(expected)]
    spoilt = np.isnan(first).all(axis=1)
    assert spoilt[0]
    assert spoilt.sum() <= 2
    assert same(first[~spoilt], expected[~spoilt]).all()
    assert untouched(world.out[len(expected) :])
    others = np.flatnonzero(~same(world.pool, pool).all(axis=1))  # at most the page that is not where it was
    assert len(others) <= 1
    assert world.memory.differences() == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_page_that_the_pool_has_not_is_no_tail(kernels: Kernels, kind: str, page: int) -> None:
    world = world_of(kind)
    request = world.case.requests[2]
    column = (request.end - 1) // world.case.page_rows
    expected, was = world.expected_windows(), world.table[2, column]
    pool = world.expected_pool()
    pool[was] = world.pool_before[was]
    world.table[2, column] = page
    world.memory.seal("table")
    compress, tail = launch(kernels, world)
    assert compress == ""
    assert "state table of request 2: position" in tail
    assert f"page {page}, which the pool has not" in tail
    assert same(world.out[: len(expected)], expected).all()
    assert same(world.pool, pool).all()
    assert world.memory.differences() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_behind_the_table_is_neither_read_nor_written(kernels: Kernels, kind: str) -> None:
    world = world_of(kind)
    ratio, columns = world.case.spec.ratio, world.table.shape[1]
    world.starts[2] += ratio * 10**6  # the same phase, so that every window is where it was
    world.memory.seal("starts")
    expected, pool = world.expected_windows(), world.expected_pool()
    for said in launch(kernels, world):
        assert "state table of request 2: position" in said
        assert said.endswith(f"lies behind its {columns} columns")
    before = sum(len(world.windows(r)) for r in world.case.requests[:2])
    assert same(world.out[:before], expected[:before]).all()
    assert np.isnan(world.out[before]).all()
    tails = [p for p in np.unique(world.table[2]) if p]
    assert same(world.pool[tails], world.pool_before[tails]).all()
    rest = np.setdiff1d(np.arange(len(pool)), tails)
    assert same(world.pool[rest], pool[rest]).all()
    assert world.memory.differences() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_that_ends_inside_a_window_is_told_apart(kernels: Kernels, kind: str) -> None:
    world = world_of(kind)
    cut = 3  # of 11 (260) tokens from position 6 (130) on: no window ends there
    rows = world.memory.input("rows", np.concatenate(world.raw)[cut:])
    compress, _ = world.params(range(cut, world.case.tokens), 0)
    workspace = world.memory.array("workspace", (kernels.workspace_bytes(compress) // 4,), np.float32)
    with pytest.raises(Fault, match=r"staging rows of request 0: position .* lies .* rows before them; a tile ends"):
        kernels.compress(3, compress, world.arrays | {"rows": rows, "workspace": workspace})
    expected = world.expected_windows()
    last = len(expected) - 1
    assert same(world.out[last:][:1], expected[last:]).all()
    assert world.memory.differences() == []


numbers = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 60), st.sampled_from([2**30, 2**24, -1, 0]))
changes = st.lists(
    st.tuples(st.sampled_from(["cu_seqlens", "starts", "table"]), st.integers(0, 10**6), numbers),
    min_size=1,
    max_size=6,
)


@given(
    kind=st.sampled_from(sorted(KINDS)), changes=changes, blocks=st.sampled_from([1, 3, 48]), seed=st.integers(0, 99)
)
@settings(max_examples=120)
def test_no_table_makes_a_launch_touch_what_is_not_its_own(
    kernels: Kernels, kind: str, changes: list[tuple[str, int, int]], blocks: int, seed: int
) -> None:
    """Two requests sharing a page is the one thing that a table may do and no kernel can see: the emulation does."""
    world = world_of(kind, blocks=blocks, seed=seed)
    for name, entry, value in changes:
        table = world.arrays[name].reshape(-1)
        table[entry % len(table)] = value
    for name in ("cu_seqlens", "starts", "table"):
        world.memory.seal(name)
    pages = world.table[world.table > 0]
    try:
        compress, tail = launch(kernels, world)
    except Misuse as misuse:
        if "cross-core overlap in GM" not in str(misuse) or len(np.unique(pages)) == len(pages):
            raise
        compress = tail = ""
    assert world.memory.differences() == []
    page = world.case.page_rows * world.case.spec.row_dim
    assert same(world.pool[0], world.pool_before[0]).all()
    assert same(world.pool[:, page:], world.pool_before[:, page:]).all()
    if "nothing was written" in compress:
        assert "nothing was written" in tail
        assert untouched(world.out)
        assert same(world.pool, world.pool_before).all()


@given(
    kind=st.sampled_from(sorted(KINDS)),
    changes=changes,
    blocks=st.sampled_from([1, 3, 7]),
    row_dtype=st.sampled_from(Dtype),
    longer=st.integers(0, 127),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_no_table_makes_a_tile_touch_what_is_not_its_own(
    kernels: Kernels,
    kind: str,
    changes: list[tuple[str, int, int]],
    blocks: int,
    row_dtype: Dtype,
    longer: int,
    seed: int,
) -> None:
    """The tiles that good tables have, with carried rows, and bad ones: no tile ends where a window does any more."""
    spec = KINDS[kind]
    ratio = spec.ratio
    tile_tokens = 2 * ratio + longer % ratio
    world = world_of(kind, blocks=blocks, row_dtype=row_dtype, tile=tile_tokens, seed=seed)
    tiles, packed = world.tiles(), np.concatenate(world.raw).astype(np.float32)
    for name, entry, value in changes:
        table = world.arrays[name].reshape(-1)
        table[entry % len(table)] = value
    for name in ("cu_seqlens", "starts", "table"):
        world.memory.seal(name)
    pages = world.table[world.table > 0]
    for number, tile in enumerate(tiles):
        carry = ratio if spec.overlap and tile.start else 0
        staged = to_dtype(packed[max(0, tile.start - carry) : tile.stop], row_dtype)
        rows = world.memory.input(f"rows {number}", staged)
        compress, tail = world.params(tile, carry)
        workspace = world.memory.array(f"workspace {number}", (kernels.workspace_bytes(compress) // 4,), np.float32)
        arrays = world.arrays | {"rows": rows, "workspace": workspace}
        for function, params in ((kernels.compress, compress), (kernels.tail_update, tail)):
            try:
                function(blocks, params, arrays)
            except Fault:
                pass
            except Misuse as misuse:
                if "cross-core overlap in GM" not in str(misuse) or len(np.unique(pages)) == len(pages):
                    raise
    assert world.memory.differences() == []
    page = world.case.page_rows * spec.row_dim
    assert same(world.pool[0], world.pool_before[0]).all()
    assert same(world.pool[:, page:], world.pool_before[:, page:]).all()


def test_what_launches_find_gathers_until_it_is_cleared_and_tails_have_records_of_their_own(kernels: Kernels) -> None:
    good, bad, worse = world_of("c4"), world_of("c4", blocks=2), world_of("c4", blocks=5)
    bad.table[0, (REQUESTS["c4"][0].start - 1) // bad.case.page_rows] = 10**6
    worse.table[2, (REQUESTS["c4"][2].end - 1) // worse.case.page_rows] = -7
    workspace = np.zeros(8192 // 4, np.float32)
    records = workspace.view(np.int32).reshape(2, 128, 8)  # of compress, of tail_update

    def run(world: World) -> str:
        rows = np.concatenate(world.raw).astype(np.float32)
        compress, tail = world.params(range(world.case.tokens), 0)
        arrays = world.arrays | {"rows": world.memory.input("rows", rows), "workspace": workspace}
        kernels.compress(world.case.blocks, compress, arrays)
        kernels.tail_update(world.case.blocks, tail, arrays)
        return kernels.faults(workspace)

    kernels.set("faults", 0)  # as on a device
    try:
        assert run(good) == ""
        assert not records.any()
        of_tails = run(worse)
        assert of_tails.startswith("tail_update: state table of request 2: position ")
        assert of_tails.endswith("is said to be in page -7, which the pool has not")
        assert not records[0].any()
        found, told = records[1].copy(), records[1, :, 0] > 0
        of_windows = run(bad)
        assert of_windows.startswith("compress: state table of request 0: position ")
        assert np.array_equal(records[1, told], found[told])  # of a core that the last launch did not have
        assert run(good) == of_windows
        records[0] = 0
        assert kernels.faults(workspace).startswith("tail_update: state table of request 0: position ")
        records[1, ~told] = 0
        assert kernels.faults(workspace) == of_tails
    finally:
        kernels.set("faults", 1)


def test_a_write_outside_would_be_seen(kernels: Kernels) -> None:
    """The negative control of the fuzz: a table that names a page of the pool where the expectation has none."""
    world = world_of("c4")
    free = np.setdiff1d(np.arange(1, len(world.pool)), world.table)[0]
    column = (world.case.requests[2].end - 1) // world.case.page_rows
    pool = world.expected_pool()
    world.table[2, column] = free
    world.memory.seal("table")
    assert launch(kernels, world) == ("", "")
    assert not same(world.pool, pool).all()
