# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Laws of our compressor kernels in the host emulation: every byte after a launch is what the reference says.

`python -m tests.kernels_sweep` runs the same comparison over every start phase and 10,000 random cases.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.compressor import reference
from afd_dsv4.compressor.kernels import CoreOrder, Dtype, Kernels
from tests import kernels_world, stock_op
from tests.kernels_sweep import check, grid
from tests.kernels_world import KINDS, PAGE_ROWS, Case, Plant, Request, World, as_float, draw, random_case, same

seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(sorted(KINDS))
#: Requests with whole and broken windows, history of every kind, nothing to do, and drafts.
MIXED = {
    kind: tuple(Request(*numbers) for numbers in requests)
    for kind, requests in {
        "c4": ((0, 9), (3, 5), (7, 30, 2), (5, 0), (8, 1), (2, 1), (11, 17)),
        "c128": ((0, 130), (127, 1), (5, 300, 2), (9, 0), (200, 56), (0, 127)),
    }.items()
}
MIXED["c4_indexer"] = MIXED["c4"]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_world.library()


def run(kernels: Kernels, case: Case, **rows: object) -> World:
    world = World(case, **rows)
    world.launch(kernels)
    assert world.differences() == []
    return world


@given(seed=seeds)
@settings(max_examples=60)
def test_a_random_launch_leaves_every_byte_as_the_reference_says(kernels: Kernels, seed: int) -> None:
    run(kernels, random_case(np.random.default_rng(seed), seed))


@pytest.mark.parametrize("kind", KINDS)
def test_every_start_phase_meets_every_length(kernels: Kernels, kind: str) -> None:
    """C128 with a fourth of its phases, and one request of 4,096 tokens a kind; the sweep has them all."""
    cases = list(grid(kind))
    short = [case for case in cases if len(case.requests) > 1]
    long = [case for case in cases if len(case.requests) == 1]
    for case in (*short[:: 4 if kind == "c128" else 1], long[len(long) // 2]):
        run(kernels, case)
    assert {r.start for case in short for r in case.requests} == set(range(128 if kind == "c128" else 16))
    assert {r.length for case in cases for r in case.requests} == set(kernels_world.LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
def test_cores_and_their_order_change_no_bit(kernels: Kernels, kind: str) -> None:
    case = Case(kind, MIXED[kind], page_rows=PAGE_ROWS[kind][0], padded_tokens=3, padded_requests=2)
    first = run(kernels, case)
    for blocks in (1, 3, 24, 48):
        for order in CoreOrder:
            world = run(kernels, replace(case, blocks=blocks, order=order))
            assert (world.out.view(np.uint32) == first.out.view(np.uint32)).all()
            assert (world.pool.view(np.uint32) == first.pool.view(np.uint32)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_phase_2_have_the_bits_of_one_launch(kernels: Kernels, kind: str) -> None:
    case = Case(kind, MIXED[kind], page_rows=PAGE_ROWS[kind][0], padded_tokens=3)
    first = run(kernels, case)
    ratio = case.spec.ratio
    for tile in (ratio, ratio + 3, 3 * ratio):
        world = run(kernels, replace(case, tile=tile))
        assert len(world.tiles()) > 1
        assert (world.out.view(np.uint32) == first.out.view(np.uint32)).all()
        assert (world.pool.view(np.uint32) == first.pool.view(np.uint32)).all()


@given(kind=kinds, lengths=st.lists(st.integers(1, 150), min_size=2, max_size=6), seed=seeds)
@settings(max_examples=12)
def test_any_chunking_gives_the_rows_of_one_launch(kernels: Kernels, kind: str, lengths: list[int], seed: int) -> None:
    """Each chunk finds its history in the pages that the chunk before wrote: read back here, not made up."""
    spec, total = KINDS[kind], sum(lengths)
    rng = np.random.default_rng(seed)
    raw, ape = draw(rng, total, spec.row_dim), draw(rng, spec.ratio, spec.half)
    case = Case(kind, (Request(0, total),), page_rows=PAGE_ROWS[kind][0], short_list=True)
    nothing = np.zeros((0, spec.row_dim), np.float32)
    whole = run(kernels, case, raw=[raw], history=[nothing], ape=ape)
    start, history, results = 0, nothing, []
    for length in lengths:
        chunk = replace(case, requests=(Request(start, length),))
        world = run(kernels, chunk, raw=[raw[start : start + length]], history=[history], ape=ape)
        results.append(world.out[: len(world.windows(chunk.requests[0]))])
        start += length
        needed = reference.need(start, spec.ratio, spec.overlap)
        history = np.array([world.row(world.pool, 0, p) for p in needed], np.float32).reshape(-1, spec.row_dim)
    assert same(np.concatenate(results), whole.out[: total // spec.ratio]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_gives_each_request_the_rows_it_has_alone(kernels: Kernels, kind: str) -> None:
    case = Case(kind, MIXED[kind], page_rows=PAGE_ROWS[kind][0])
    together, first = run(kernels, case), 0
    for b, request in enumerate(case.requests):
        if request.length == 0:
            continue
        alone = run(
            kernels,
            replace(case, requests=(request,)),
            raw=[together.raw[b]],
            history=[together.history[b]],
            ape=together.ape,
            norm_weight=together.norm_weight,
        )
        windows = len(together.windows(request))
        # RoPE rows follow the window's number, so the same request has the same ones here.
        assert same(together.out[first : first + windows], alone.out[:windows]).all()
        first += windows


@pytest.mark.parametrize(("kind", "starts"), [("c4", range(8)), ("c4_indexer", (3, 6)), ("c128", (0, 126, 127, 130))])
def test_drafts_may_be_taken_back_to_every_accept_length(kernels: Kernels, kind: str, starts: range) -> None:
    spec, drafts = KINDS[kind], 3
    for start in starts:
        request = Request(start, 1 + drafts, drafts)
        case = Case(kind, (request,), page_rows=PAGE_ROWS[kind][0], seed=start, short_list=True)
        verified = run(kernels, case)
        rows, oldest = verified.rows(0)
        for accepted in range(1, 2 + drafts):
            go_on = start + accepted
            needed = reference.need(go_on, spec.ratio, spec.overlap)
            saved = [verified.row(verified.pool, 0, p) for p in needed]
            history = np.array(saved, np.float32).reshape(-1, spec.row_dim)
            assert same(history, rows[needed.start - oldest : go_on - oldest]).all()
            later = replace(case, requests=(Request(go_on, 2 * spec.ratio),), seed=start + 100)
            world = World(later, ape=verified.ape)  # other tokens than the drafts
            world = run(kernels, later, raw=world.raw, history=[history], ape=verified.ape)
            assert len(world.windows(later.requests[0])) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", list(Dtype))
def test_nan_and_infinite_rows_spoil_what_the_reference_says_and_nothing_else(
    kernels: Kernels, kind: str, dtype: Dtype
) -> None:
    case = Case(kind, MIXED[kind], PAGE_ROWS[kind][0], row_dtype=dtype, out_dtype=dtype, specials=12)
    spoilt = False
    for seed in range(3):
        world = run(kernels, replace(case, seed=seed))
        spoilt |= bool(np.isnan(world.expected_windows()).any())
    assert spoilt


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_takes_new_metadata_from_the_same_memory(kernels: Kernels, kind: str) -> None:
    """A graph keeps constants and addresses: two batches of as many tokens, one behind the other in one memory."""
    shape = Case(kind, (), page_rows=PAGE_ROWS[kind][0])
    long = replace(shape, requests=(Request(3, 140), Request(0, 5)), padded_requests=1, padded_tokens=6, seed=1)
    other = replace(shape, requests=(Request(2, 4), Request(6, 130), Request(7, 2)), padded_tokens=15, seed=2)
    first, second = World(long), World(other)
    spec = long.spec
    assert long.tokens == other.tokens
    columns = max(first.table.shape[1], second.table.shape[1])
    pages = max(len(first.pool), len(second.pool))
    table, pool = np.zeros((3, columns), np.int32), np.zeros((pages, first.pool.shape[1]), np.float32)
    rows = np.zeros((first.case.tokens, spec.row_dim), np.float32)
    arrays = {name: array.copy() for name, array in first.arrays.items()} | {"table": table, "pool": pool, "rows": rows}
    compress, tail = first.params(range(first.case.tokens), 0)
    for params in (compress, tail):
        params.columns, params.pool_pages = columns, pages
    arrays["workspace"] = np.zeros(kernels.workspace_bytes(compress) // 4, np.float32)
    for world in (first, second):
        table[...] = 0
        table[:, : world.table.shape[1]] = world.table
        pool[: len(world.pool)] = world.pool
        rows[: sum(map(len, world.raw))] = np.concatenate(world.raw)
        for name in ("cu_seqlens", "starts", "cos", "sin", "ape", "norm_weight"):
            arrays[name][...] = world.arrays[name]
        kernels.compress(3, compress, arrays)
        kernels.tail_update(3, tail, arrays)
        world.out[...], world.pool[...] = arrays["out"], pool[: len(world.pool)]
        # Rows behind the last window are of the launch before: only windows are compared.
        windows = world.expected_windows()
        assert same(world.out[: len(windows)], kernels_world.to_dtype(windows, world.case.out_dtype)).all()
        assert same(world.pool, world.expected_pool()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_are_near_those_of_float64(kernels: Kernels, kind: str) -> None:
    world = run(kernels, Case(kind, MIXED[kind], page_rows=PAGE_ROWS[kind][0]))
    exact = world.float64_windows()
    assert len(exact) > 3
    assert np.abs(world.out[: len(exact)] - exact).max() < 2e-5  # the rows are normed: their size is about 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_exponential_that_is_off_by_its_last_bit_moves_the_rows_within_a_tolerance(
    kernels: Kernels, kind: str
) -> None:
    """The device's Exp is known to 1 ulp only: nothing may hang on its last bit."""
    world = World(Case(kind, MIXED[kind], page_rows=PAGE_ROWS[kind][0]))
    kernels.set("fuzz", 1)
    try:
        world.launch(kernels)
    finally:
        kernels.set("fuzz", 0)
    windows = world.expected_windows()
    got = world.out[: len(windows)]
    assert not same(got, windows).all()
    assert np.abs(got - windows).max() < 1e-5
    assert same(world.pool, world.expected_pool()).all()


@pytest.mark.parametrize("saturate", [0, 1])
def test_the_final_cast_follows_the_mode_of_the_device(kernels: Kernels, saturate: int) -> None:
    weight = np.ones(512, np.float32)
    weight[:3] = np.inf, np.nan, -np.inf
    world = World(Case("c4", (Request(0, 8),), out_dtype=Dtype.BF16, norm_dtype=Dtype.FP32), norm_weight=weight)
    kernels.set("saturate", saturate)
    try:
        world.launch(kernels)
    finally:
        kernels.set("saturate", 0)
    expected = reference.bfloat16_bits(world.expected_windows(), saturate=bool(saturate))
    assert same(world.out[:2], expected).all()
    assert np.isfinite(as_float(expected)).all() == bool(saturate)


@given(kind=kinds, seed=seeds)
@settings(max_examples=20)
def test_both_executors_have_the_same_bits(kernels: Kernels, kind: str, seed: int) -> None:
    """The stock operator's C core projects tokens; our kernels get its projection as staging rows."""
    rng, hidden = np.random.default_rng(seed), 8
    drawn = replace(random_case(rng, seed), kind=kind, page_rows=PAGE_ROWS[kind][0], tile=0, specials=0)
    case = replace(drawn, norm_dtype=drawn.out_dtype, row_dtype=Dtype.FP32)
    spec, dtype = case.spec, case.out_dtype
    wkv, wgate = (kernels_world.to_dtype(draw(rng, spec.half, hidden), dtype) for _ in range(2))
    x = kernels_world.to_dtype(draw(rng, case.tokens, hidden), dtype)
    raw, first = [], 0
    for request in case.requests:
        tokens = x[first : first + request.length]
        first += request.length
        nothing = np.zeros((0, spec.half), np.float32)
        parts = [stock_op.project(tokens, weight) if len(tokens) else nothing for weight in (wkv, wgate)]
        raw.append(np.concatenate(parts, axis=1))
    history = [draw(rng, len(reference.need(r.start, spec.ratio, spec.overlap)), spec.row_dim) for r in case.requests]
    world = World(case, raw=raw, history=history)
    pool = world.pool.copy()
    state = np.lib.stride_tricks.as_strided(
        pool, (len(pool), case.page_rows, spec.row_dim), (pool.strides[0], 4 * spec.row_dim, 4)
    )
    world.launch(kernels)
    assert world.differences() == []
    with stock_op.waived():
        stock = stock_op.compressor(
            {
                "x": x,
                "wkv": wkv,
                "wgate": wgate,
                "state_cache": state,
                "ape": world.ape,
                "norm_weight": world.norm_weight,
                "rope_sin": world.sin,
                "rope_cos": world.cos,
                "state_block_table": world.table,
                "cu_seqlens": world.cu_seqlens,
                "start_pos": world.starts,
                "rope_head_dim": spec.rope_head_dim,
                "cmp_ratio": spec.ratio,
                "coff": spec.coff,
                "norm_eps": spec.norm_eps,
            }
        )
    windows = sum(len(world.windows(r)) for r in case.requests)
    assert same(world.out[:windows], stock[:windows]).all()
    for b, request in enumerate(case.requests):
        # The stock operator also saves rows before the tail where their page is mapped; nobody reads those again.
        for position in case.shape.live(request.end - request.drafts, request.end) if request.length else ():
            assert same(world.row(world.pool, b, position).copy(), world.row(pool, b, position).copy()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_entries_no_row_needs_are_never_looked_at(kernels: Kernels, kind: str) -> None:
    ratio = KINDS[kind].ratio
    case = Case(kind, (Request(3 * ratio, 40 * ratio), Request(5, 0), Request(1, 6)), page_rows=PAGE_ROWS[kind][0])
    case = replace(case, padded_requests=2)
    world = World(case)
    needed = case.shape.pages(world.need(case.requests[0]))
    last = (case.requests[0].end - 1) // case.page_rows
    world.table[0, : needed.start] = -7
    world.table[0, needed.stop : last - case.list_ids + 1] = 2**30
    world.table[1] = 2**31 - 1
    world.table[3:] = -1
    world.starts[[1, 3, 4]] = -12345
    world.memory.seal("table")
    world.memory.seal("starts")
    world.launch(kernels)
    world.table[[1, 3, 4]] = 0  # for the expectation
    world.starts[[1, 3, 4]] = 0, 0, 0
    world.memory.seal("table")
    world.memory.seal("starts")
    assert world.differences() == []


# ------------------------------------------------------------------------------------------------ negative controls


@pytest.mark.parametrize("plant", list(Plant))
def test_an_expectation_with_a_fault_is_seen_to_differ(kernels: Kernels, plant: Plant) -> None:
    world = World(Case("c4", MIXED["c4"], padded_tokens=9))
    world.launch(kernels)
    assert world.differences() == []
    found = world.differences(plant)
    assert found, plant.value
    assert found[0].startswith("pool" if plant in (Plant.PAGE, Plant.TAIL) else "out")


def test_a_byte_outside_an_array_and_a_changed_input_are_seen(kernels: Kernels) -> None:
    world = World(Case("c4", MIXED["c4"]))
    world.launch(kernels)
    assert world.differences() == []
    for name, side in (("out", 1), ("pool", -1)):
        raw, array = world.memory._buffers[name], world.memory._arrays[name]
        begin = array.ctypes.data - raw.ctypes.data
        place = begin + array.nbytes if side > 0 else begin - 1
        raw[place] ^= 1
        assert len(world.differences()) == 1
        raw[place] ^= 1
    world.starts[0] += 1
    assert "starts: an input was overwritten" in world.differences()


def test_a_null_page_that_is_written_is_seen(kernels: Kernels) -> None:
    world = World(Case("c128", MIXED["c128"], page_rows=32))
    world.launch(kernels)
    world.pool[0, 5] = 0
    assert [text.split(":")[0] for text in world.differences()] == ["pool"]


def test_the_sweep_counts_what_differs_and_prints_which_case_it_is(
    kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong, refused = (World(Case("c4", (Request(3, 9), Request(0, 8)))) for _ in range(3))
    wrong.pool_before[0, 7] = 1.0
    refused.starts[0] = -1
    tally = check(kernels, right, "right")
    assert capsys.readouterr().out == ""
    tally += check(kernels, wrong, "case 5 of seed 3")
    assert capsys.readouterr().out.startswith("case 5 of seed 3: pool: 1 elements differ, the first at [0, 7]")
    tally += check(kernels, refused, "case 6")
    assert capsys.readouterr().out.startswith("case 6: Fault: compress: starts[0]: found -1")
    # By hand: tokens 3 to 11 end windows 0, 1 and 2, tokens 0 to 7 end two; three times.
    assert str(tally) == "3 launches, 6 requests, 15 compressed rows: 2 differ"
