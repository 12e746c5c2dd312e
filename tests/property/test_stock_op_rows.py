# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Laws of the stock compressor on the software NPU: the rows of the reference, the state contract as recorded.

Everything here compares bit for bit. Small compressors (head dim 64, hidden 24) run with the limits waived; one test
per kind uses the shipped sizes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afd_dsv4.compressor import reference
from afd_dsv4.compressor.reference import Float32, PoolSpec
from tests import stock_op
from tests.stock_op import REAL, SMALL, Chunk, Fault, Model, cast, counting, is_poison, options, same_bits, waived


@pytest.fixture(autouse=True, scope="module")
def limits_waived() -> Iterator[None]:
    with waived():
        yield


def run(model: Model, chunks: list[Chunk], state: Float32, table: NDArray[np.int32], **changes: Any) -> NDArray[Any]:
    return stock_op.compressor(model.arguments(chunks, state, table) | changes)


def expected_bits(model: Model, chunks: list[Chunk], *, saturate: bool = False) -> NDArray[Any]:
    rows = [model.expected(chunk) for chunk in chunks]
    return cast(np.concatenate(rows), model.x[0].dtype, saturate=saturate)


def check_rows(model: Model, chunks: list[Chunk], out: NDArray[Any]) -> None:
    """Result rows equal the definition; what follows them is poison."""
    expected = expected_bits(model, chunks)
    assert same_bits(out[: len(expected)], expected)
    assert is_poison(out[len(expected) :])


kinds = st.sampled_from(sorted(SMALL))
chunks_of = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=4)
seeds = st.integers(0, 2**32 - 1)


@given(
    kind=kinds,
    sizes=chunks_of,
    page_rows=st.sampled_from([1, 4, 8, 32, 100]),
    seed=seeds,
    dtype=st.sampled_from([np.uint16, np.float16, np.float32]),
)
@settings(max_examples=40)
def test_result_and_saved_rows_equal_the_reference(
    kind: str, sizes: list[tuple[int, int]], page_rows: int, seed: int, dtype: type
) -> None:
    chunks = [Chunk(i, start, length) for i, (start, length) in enumerate(sizes)]
    lengths = [c.start + c.length for c in chunks]
    model = Model.random(np.random.default_rng(seed), SMALL[kind], lengths, dtype=dtype)
    state, table = model.dense(chunks, page_rows)
    with counting("rows_saved", "rows_emitted", "rows_unmapped", "faults") as count:
        out = run(model, chunks, state, table)
    check_rows(model, chunks, out)
    for chunk, pages in zip(chunks, table, strict=True):
        end = chunk.start + chunk.length
        assert same_bits(state[pages].reshape(-1, model.spec.row_dim)[:end], model.rows[chunk.request])
        assert np.isnan(state[pages].reshape(-1, model.spec.row_dim)[end:]).all()
    assert np.isnan(state[0]).all()
    assert count == {
        "rows_saved": sum(c.length for c in chunks),
        "rows_emitted": sum(len(model.windows(c)) for c in chunks),
        "rows_unmapped": 0,
        "faults": 0,
    }


@pytest.mark.parametrize("kind", sorted(REAL))
def test_shipped_sizes_equal_the_reference_with_every_limit_in_force(kind: str, rng: np.random.Generator) -> None:
    model = Model.random(rng, REAL[kind], [140, 9, 260, 3], hidden=1024)
    chunks = [Chunk(0, 3, 137), Chunk(1, 8, 1), Chunk(2, 130, 130), Chunk(3, 0, 3)]
    state, table = model.dense(chunks, 8)
    for name in stock_op.WAIVERS:
        stock_op.core().softnpu_waive(f"compressor.{name}".encode(), 0)
    try:
        out = run(model, chunks, state, table)
    finally:
        for name in stock_op.WAIVERS:
            stock_op.core().softnpu_waive(f"compressor.{name}".encode(), 1)
    check_rows(model, chunks, out)


@pytest.mark.parametrize("kind", sorted(SMALL))
@pytest.mark.parametrize("phase", [0, 1, 3, 127, 128])
def test_a_launch_of_many_tiles_equals_the_reference(kind: str, phase: int, rng: np.random.Generator) -> None:
    # 384 rows make a tile: these cut inside windows, inside requests, and across hundreds of tiny requests.
    chunks = [Chunk(0, phase, 1500), *(Chunk(i, 5 * i % 7, 1 + i % 3) for i in range(1, 300)), Chunk(300, 130, 700)]
    model = Model.random(rng, SMALL[kind], [c.start + c.length for c in chunks], hidden=8)
    state, table = model.dense(chunks, 32)
    check_rows(model, chunks, run(model, chunks, state, table))


class Pages:
    """A sparse table kept by hand: maps history and tail only, never a page twice, poisons what it gets back."""

    def __init__(self, spec: PoolSpec, state: Float32, page_rows: int, columns: int) -> None:
        self.spec, self.state, self.page_rows = spec, state, page_rows
        self.table = np.zeros((1, columns), np.int32)
        self.free = list(range(len(state) - 1, 0, -1))

    def _columns(self, position: int) -> set[int]:
        needed = reference.need(position, self.spec.ratio, self.spec.overlap)
        return {row // self.page_rows for row in needed}

    def before(self, end: int) -> None:
        for column in self._columns(end):
            if self.table[0, column] == 0:
                self.table[0, column] = self.free.pop(0)

    def after(self, end: int) -> None:
        for column in set(np.flatnonzero(self.table[0])) - self._columns(end):
            page = self.table[0, column]
            self.state[page] = np.nan
            self.free.append(int(page))
            self.table[0, column] = 0


@given(
    kind=kinds,
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    page_rows=st.sampled_from([2, 4, 8, 16, 32, 128]),
    seed=seeds,
)
@settings(max_examples=40)
def test_any_chunking_with_sparse_pages_gives_the_rows_of_one_pass(
    kind: str, lengths: list[int], page_rows: int, seed: int
) -> None:
    spec, total = SMALL[kind], sum(lengths)
    model = Model.random(np.random.default_rng(seed), spec, [total], hidden=8)
    pages = Pages(
        spec, model.state(1 + 2 * (2 + 2 * spec.ratio // page_rows), page_rows), page_rows, -(-total // page_rows)
    )
    start, results = 0, []
    for length in lengths:
        chunk = Chunk(0, start, length)
        pages.before(start + length)
        out = run(model, [chunk], pages.state, pages.table)
        results.append(out[: len(model.windows(chunk))])
        pages.after(start + length)
        start += length
    assert same_bits(np.concatenate(results), expected_bits(model, [Chunk(0, 0, total)]))
    assert np.isnan(pages.state[0]).all()


@pytest.mark.parametrize(("kind", "start"), [("c4", 4), ("c4", 6), ("c4", 7), ("c128", 1), ("c128", 127)])
def test_dropping_one_history_page_is_not_survived(kind: str, start: int, rng: np.random.Generator) -> None:
    model = Model.random(rng, SMALL[kind], [start + 130])
    chunk = Chunk(0, start, 130)
    state, table = model.dense([chunk], 4)
    column = reference.need(start, model.spec.ratio, model.spec.overlap).start // 4
    table[0, column] = 0
    out = run(model, [chunk], state, table)
    assert np.isnan(stock_op.as_float(out[0])).all()  # page 0 is NaN here


@given(kind=kinds, start=st.integers(0, 260), length=st.integers(1, 260), seed=seeds)
@settings(max_examples=30)
def test_page_0_is_never_written_but_read_like_any_other(kind: str, start: int, length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = Model.random(rng, SMALL[kind], [start + length])
    chunk, page_rows = Chunk(0, start, length), 8
    state = model.state(2, page_rows)
    state[0] = rng.standard_normal(state[0].shape)
    before = state.copy()
    table = np.zeros((1, -(-(start + length) // page_rows)), np.int32)
    with counting("rows_saved", "rows_unmapped", "page0_reads", "rows_read") as count:
        out = run(model, [chunk], state, table)
    assert same_bits(state, before)
    # The long way: every position before start holds the row of page 0 at its place in the page.
    rows = model.rows[0].copy()
    rows[:start] = state[0][np.arange(start) % page_rows]
    windows = model.windows(chunk)
    assert same_bits(out[: len(windows)], cast(model.expected(chunk, rows), out.dtype))
    assert count["rows_saved"] == 0
    assert count["rows_unmapped"] == length
    assert count["page0_reads"] == count["rows_read"]


@given(kind=kinds, start=st.integers(0, 300), length=st.integers(1, 300), seed=seeds)
@settings(max_examples=30)
def test_history_is_read_only_before_start_and_only_for_windows_that_complete(
    kind: str, start: int, length: int, seed: int
) -> None:
    spec = SMALL[kind]
    model = Model.random(np.random.default_rng(seed), spec, [start + length], hidden=8)
    chunk = Chunk(0, start, length)
    state, table = model.dense([chunk], 4)
    with counting("rows_read") as count:
        run(model, [chunk], state, table)
    # The long way: for every window that completes, each pool row that lies before start is one read.
    reads = 0
    for window in model.windows(chunk):
        own = range(window * spec.ratio, (window + 1) * spec.ratio)
        older = range(max(0, (window - 1) * spec.ratio), window * spec.ratio) if spec.overlap else range(0)
        reads += sum(position < start for position in [*own, *older])
    assert count["rows_read"] == reads


@pytest.mark.parametrize(
    ("kind", "start", "length"), [("c4", 6, 6), ("c4", 7, 200), ("c128", 3, 260), ("c128", 127, 2)]
)
def test_rows_are_saved_before_history_is_read(kind: str, start: int, length: int, rng: np.random.Generator) -> None:
    """A table that reuses a history page for the tail is legal to pass in and silently wrong: this has to show."""
    spec = SMALL[kind]
    model = Model.random(rng, spec, [start + length])
    chunk, page_rows = Chunk(0, start, length), 4
    state, table = model.dense([chunk], page_rows)
    check_rows(model, [chunk], run(model, [chunk], state.copy(), table))
    history = reference.need(start, spec.ratio, spec.overlap).start // page_rows
    tail = (start + length - 1) // page_rows
    assert tail != history
    aliased = table.copy()
    aliased[0, tail] = aliased[0, history]
    after = state.copy()
    out = run(model, [chunk], after, aliased)
    windows = len(model.windows(chunk))
    good = expected_bits(model, [chunk])
    assert not same_bits(out[:1], good[:1])
    # The long way: history rows of the shared page are those just saved there.
    rows = model.rows[0].copy()
    for position in range(tail * page_rows, start + length):
        target = history * page_rows + position % page_rows
        if target < start:
            rows[target] = model.rows[0][position]
    poisoned = cast(model.expected(chunk, rows), out.dtype)
    assert same_bits(out[:windows], poisoned)


@given(kind=kinds, sizes=chunks_of, seed=seeds)
@settings(max_examples=15)
def test_cores_seed_and_threads_do_not_change_a_lawful_launch(
    kind: str, sizes: list[tuple[int, int]], seed: int
) -> None:
    chunks = [Chunk(i, start, length) for i, (start, length) in enumerate(sizes)]
    model = Model.random(np.random.default_rng(seed), SMALL[kind], [c.start + c.length for c in chunks], hidden=8)
    state, table = model.dense(chunks, 8)
    results = []
    for cores in (1, 3, 24, 48):
        for threads in (1, 2, 5):
            with options(cores=cores, threads=threads, seed=seed + cores):
                after = state.copy()
                results.append((run(model, chunks, after, table), after))
    for out, after in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(after, results[0][1])


def test_two_rows_saved_to_one_place_leave_a_slice_of_either_as_cores_and_seed_decide(rng: np.random.Generator) -> None:
    spec = PoolSpec(ratio=4, coff=2, head_dim=256, rope_head_dim=16)
    model = Model.random(rng, spec, [600])
    chunk = Chunk(0, 0, 600)
    state = model.state(2, 4)
    table = np.zeros((1, 150), np.int32)
    table[0, [3, 100]] = 1  # rows 12..15 and 400..403, in different core groups
    outcomes = set()
    for seed in range(12):
        twice = []
        for threads in (1, 2):
            with options(seed=seed, threads=threads, cores=24), counting("rows_clobbered", "rows_saved") as count:
                after = state.copy()
                run(model, [chunk], after, table)
            assert count == {"rows_clobbered": 4, "rows_saved": 8}
            twice.append(after)
        assert same_bits(*twice)
        for row in range(4):
            mine, other = model.rows[0][12 + row], model.rows[0][400 + row]
            for column in range(0, spec.row_dim, 64):
                piece = twice[0][1, row, column : column + 64]
                assert same_bits(piece, mine[column : column + 64]) or same_bits(piece, other[column : column + 64])
        outcomes.add(twice[0][1].tobytes())
    assert len(outcomes) > 2
    with options(cores=1):
        after = state.copy()
        run(model, [chunk], after, table)
    assert same_bits(after[1], model.rows[0][400:404])  # one core saves in token order


def test_the_stride_between_pages_is_honoured_and_the_gap_untouched(rng: np.random.Generator) -> None:
    model = Model.random(rng, SMALL["c4"], [101, 50])
    chunks = [Chunk(0, 50, 51), Chunk(1, 3, 47)]
    plain, table = model.dense(chunks, 8)
    padded, gap = stock_op.padded_state(model.spec, len(plain), 8, padding=24)
    padded[...] = plain
    gap[...] = 7.0
    out = run(model, chunks, plain, table)
    assert same_bits(run(model, chunks, padded, table), out)
    assert same_bits(np.ascontiguousarray(padded), plain)
    assert (gap == 7.0).all()


def test_entries_no_row_needs_are_never_looked_at(rng: np.random.Generator) -> None:
    model = Model.random(rng, SMALL["c4"], [203, 0, 30])
    chunks = [Chunk(0, 201, 2), Chunk(1, 0, 0), Chunk(2, 0, 30)]
    state, table = model.dense(chunks, 4)
    garbage = table.copy()
    garbage[0, :49] = -7  # before the history of position 201
    garbage[0, 51:] = 2**30
    garbage[1] = 2**31 - 1  # an empty request
    garbage[2, 8:] = -1
    arguments = model.arguments(chunks, state, garbage)
    arguments["start_pos"][1] = -12345
    arguments["x"] = np.concatenate([arguments["x"], arguments["x"][:6]])  # padded tokens past cu_seqlens[-1]
    for name in ("rope_sin", "rope_cos"):
        rows = min(38, 38 // 4 + 3)
        arguments[name] = np.concatenate([arguments[name], np.zeros((rows - len(arguments[name]), 16), np.float32)])
    check_rows(model, chunks, stock_op.compressor(arguments))


def test_without_start_pos_every_request_starts_at_0(rng: np.random.Generator) -> None:
    model = Model.random(rng, SMALL["c4"], [9, 17])
    chunks = [Chunk(0, 0, 9), Chunk(1, 0, 17)]
    state, table = model.dense(chunks, 4)
    check_rows(model, chunks, run(model, chunks, state, table, start_pos=None))


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
def test_no_tokens_no_reads_no_writes(dtype: type, rng: np.random.Generator) -> None:
    model = Model.random(rng, SMALL["c4"], [8], dtype=dtype)
    state = model.state(1, 4)
    arguments = model.arguments([Chunk(0, 4, 0)], state, np.full((1, 1), 99, np.int32))
    assert stock_op.compressor(arguments).shape == (0, 64)


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("dtype", [np.uint16, np.float16])
def test_both_cast_modes_treat_infinities_and_nan_as_the_device_does(
    dtype: type, saturate: int, rng: np.random.Generator
) -> None:
    spec = PoolSpec(ratio=4, coff=2, head_dim=8, rope_head_dim=2)
    model = Model.random(rng, spec, [4], hidden=8, dtype=dtype)
    # With one row that dominates the softmax the pooled row is that row; the norm weight then makes huge, infinite
    # and NaN columns. (inf in the pooled row itself would make the whole norm NaN.)
    weight = np.array([np.inf, -np.inf, np.nan, 3e38, -3e38, 1.0, 1.0, 1.0], np.float32)
    model.norm_weight = cast(weight, np.dtype(dtype))
    state, table = model.dense([Chunk(0, 0, 4)], 4)
    with options(saturate=saturate):
        out = run(model, [Chunk(0, 0, 4)], state, table)[0]
    exact = model.expected(Chunk(0, 0, 4))[0]
    largest = 65504.0 if dtype == np.float16 else 3.3895313892515355e38
    values = stock_op.as_float(out)
    assert np.isnan(exact[2])
    for i in (0, 1):
        assert np.isinf(exact[i])
        assert values[i] == (np.copysign(largest, exact[i]) if saturate else exact[i])
    assert values[2] == 0 if saturate else np.isnan(values[2])
    assert np.isfinite(values[5:]).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_nan_in_one_token_spoils_exactly_the_windows_that_pool_it(dtype: type, rng: np.random.Generator) -> None:
    model = Model.random(rng, SMALL["c4"], [40], dtype=dtype)
    chunk = Chunk(0, 0, 40)
    clean = run(model, [chunk], *model.dense([chunk], 4))
    model.x[0][9, 3] = 0x7FC0 if dtype == np.uint16 else np.nan
    dirty = run(model, [chunk], *model.dense([chunk], 4))
    for window in range(10):
        if window in (2, 3):  # its own window, and the next one through the left half
            assert np.isnan(stock_op.as_float(dirty[window])).all()
        else:
            assert same_bits(dirty[window], clean[window])


FAULTS: dict[str, tuple[Any, str, list[int]]] = {
    # what is broken -> how, message, requests whose first window is poison
    "a page id past the cache is read": (lambda a: a["state_block_table"].__setitem__((0, 1), 999), "page 999", [0]),
    "a negative page id is read": (lambda a: a["state_block_table"].__setitem__((0, 1), -1), "page -1", [0]),
    "a page id past the cache is saved to": (lambda a: a["state_block_table"].__setitem__((1, 4), 999), "save of", []),
    "the table is too narrow to save": (
        lambda a: a.update(state_block_table=a["state_block_table"][:, :4].copy()),
        "column 4",
        [],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_leaving_the_tables_is_a_fault_and_touches_nothing_outside(name: str, rng: np.random.Generator) -> None:
    breaks, message, poisoned = FAULTS[name]
    model = Model.random(rng, SMALL["c4"], [13, 20])
    chunks = [Chunk(0, 9, 4), Chunk(1, 0, 20)]
    state, table = model.dense(chunks, 4)
    guarded = np.full((len(state) + 2, *state.shape[1:]), 5.0, np.float32)
    guarded[1:-1] = state
    arguments = model.arguments(chunks, guarded[1:-1], table)
    breaks(arguments)
    out = arguments["out"] = np.zeros((len(arguments["rope_sin"]), 64), np.uint16)
    with counting("faults") as count, pytest.raises(Fault, match=message):
        stock_op.compressor(arguments)
    assert count["faults"] > 0
    assert (guarded[[0, -1]] == 5.0).all()
    good = [model.expected(chunk) for chunk in chunks]
    assert is_poison(out[:1]) if 0 in poisoned else same_bits(out[:1], cast(good[0], out.dtype))
    assert same_bits(out[1:6], cast(good[1], out.dtype))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("cu_seqlens", [1, 4, 24], r"cu_seqlens\[0\]: found 1, expected 0"),
        ("cu_seqlens", [0, 25, 24], r"cu_seqlens\[1\]: found 25, expected 0\.\.24"),
        ("cu_seqlens", [0, 4, 3], r"cu_seqlens\[2\]: found 3, expected 4\.\.24"),
        ("cu_seqlens", [0, 4, 2**31 - 1], r"cu_seqlens\[2\]"),
        ("start_pos", [-1, 0], r"start_pos\[0\]: found -1"),
        ("start_pos", [2**31 - 2, 0], r"start_pos\[0\]: found 2147483646"),
    ],
)
def test_lengths_and_starts_out_of_range_poison_the_whole_result(
    name: str, values: list[int], message: str, rng: np.random.Generator
) -> None:
    model = Model.random(rng, SMALL["c4"], [13, 20])
    chunks = [Chunk(0, 9, 4), Chunk(1, 0, 20)]
    state, table = model.dense(chunks, 4)
    before = state.copy()
    out = np.zeros((8, 64), np.uint16)
    with pytest.raises(Fault, match=message):
        run(model, chunks, state, table, out=out, **{name: np.array(values, np.int32)})
    assert is_poison(out)
    assert same_bits(state, before)


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set_has_the_same_bits(isa: str, rng: np.random.Generator) -> None:
    library, best = stock_op.core(), stock_op.core().softnpu_isa()
    if library.softnpu_select_isa(isa.encode()):
        pytest.skip(f"no such case: this processor has no {isa}")
    try:
        assert library.softnpu_isa() == isa.encode()
        for spec in SMALL.values():
            for dtype in (np.uint16, np.float16, np.float32):
                model = Model.random(rng, spec, [300], dtype=dtype)  # projects with `isa`
                if dtype != np.float32:
                    for weight, part in ((model.wkv, slice(0, spec.half)), (model.wgate, slice(spec.half, None))):
                        rows = reference.project(stock_op.as_float(model.x[0]), stock_op.as_float(weight))
                        if part.start:
                            rows = rows + model.ape[np.arange(300) % spec.ratio]
                        assert same_bits(model.rows[0][:, part], rows)
                chunks = [Chunk(0, 3, 297)]
                check_rows(model, chunks, run(model, chunks, *model.dense(chunks, 8)))
    finally:
        library.softnpu_select_isa(best)


@given(rows=st.integers(1, 60), hidden=st.integers(1, 1100), columns=st.integers(1, 70), seed=seeds)
@settings(max_examples=25)
def test_a_projected_row_depends_on_itself_alone_and_sums_in_ascending_order(
    rows: int, hidden: int, columns: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = stock_op.to_bits(rng.standard_normal((rows, hidden)).astype(np.float32))
    weight = stock_op.to_bits(rng.standard_normal((columns, hidden)).astype(np.float32))
    whole = stock_op.project(x, weight)
    assert same_bits(whole, reference.project(stock_op.as_float(x), stock_op.as_float(weight)))
    pick = rng.permutation(rows)[: max(1, rows // 2)]
    assert same_bits(stock_op.project(np.ascontiguousarray(x[pick]), weight, threads=1), whole[pick])


def test_an_fp32_projection_is_within_rounding_of_float64(rng: np.random.Generator) -> None:
    x, weight = (rng.standard_normal((n, 700)).astype(np.float32) for n in (50, 33))
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.abs(stock_op.project(x, weight) - exact).max() < 700 * 2.0**-24 * np.abs(exact).max()


MEMORY = """
import json, resource
import numpy as np
from tests import stock_op
from afd_dsv4.compressor.reference import C4
with stock_op.waived("hidden"):
    hidden, tokens = 64, 32768
    x, rows = np.zeros((tokens, hidden), np.uint16), 8193
    w, rope = np.zeros((1024, hidden), np.uint16), np.zeros((rows, 64), np.float32)
    arguments = dict(x=x, wkv=w, wgate=w, state_cache=np.zeros((1, 8, 2048), np.float32), ape=np.zeros((4, 1024),
        np.float32), norm_weight=np.zeros(512, np.uint16), rope_sin=rope, rope_cos=rope,
        state_block_table=np.zeros((1, 4096), np.int32), cu_seqlens=np.array([0, tokens], np.int32), cmp_ratio=4,
        coff=2, out=np.ones((rows, 512), np.uint16))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stock_op.compressor(arguments)
    print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024))
"""


def test_a_launch_of_32768_rows_needs_little_host_memory() -> None:
    stock_op.core()
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, cwd=stock_op.ROOT)
    assert json.loads(done.stdout) < 64  # MiB; its rows, all at once, would be 256
