# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Launches of our compressor kernels, the memory they run in, and what must be in it afterwards.

Problem: a kernel that is right in its own rows may still read what it must not depend on, or write next to its output.
Way: a `Case` says what one launch is; a `World` lays out its memory (staging rows, pages, tables, RoPE rows, output,
workspace), fills with poison whatever the contract leaves out, puts a guard zone around every array, and computes the
whole memory as it must be after `compress` and `tail_update` from `afd_dsv4.compressor.reference`. `differences` then
compares every byte. A `Plant` spoils that expectation, so that the comparison itself can be seen to fail.
Not here: the C interface (`afd_dsv4.compressor.kernels`), and which cases are run.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afd_dsv4.compressor import reference
from afd_dsv4.compressor.kernels import CompressParams, CoreOrder, Dtype, Kernels, TailParams
from afd_dsv4.compressor.reference import Float32, PoolSpec
from afd_dsv4.geometry import InputError
from afd_dsv4.kernels_report import find
from afd_dsv4.tail.rows import TailShape

KINDS = {"c4": reference.C4, "c4_indexer": reference.C4_INDEXER, "c128": reference.C128}
#: Rows of a page as vllm-ascend ships them, and others that the tables allow.
PAGE_ROWS = {"c4": (8, 4, 2, 16, 32), "c4_indexer": (8, 4, 2, 16, 32), "c128": (32, 64, 128, 16, 8)}
LENGTHS = (0, 1, 2, 3, 4, 5, 127, 128, 129, 300, 4096)

POISON = 0x7FDEAD01  # a NaN that no computation makes
GUARD_BYTES, GUARD = 1024, 0xDB


@dataclass(frozen=True)
class Request:
    """Tokens [start, start + length) of one request; start is re-based, the last `drafts` may be taken back."""

    start: int
    length: int
    drafts: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Case:
    """One launch of one compressor.

    tile: most tokens of a tile (phase 2), 0 for all in one (phase 1). padded_requests, padded_tokens: behind the last
    one. page_gap, row_gap: elements between two pages, and between two staging rows. specials: how many elements of
    the rows are NaN, infinite or huge. short_list: only so many columns are looked at for tails as a tail has pages, as
    the executor does it; else twice as many.
    """

    kind: str
    requests: tuple[Request, ...]
    page_rows: int = 8
    row_dtype: Dtype = Dtype.FP32
    out_dtype: Dtype = Dtype.FP32
    norm_dtype: Dtype = Dtype.BF16
    blocks: int = 3
    order: CoreOrder = CoreOrder.FORWARD
    tile: int = 0
    padded_requests: int = 0
    padded_tokens: int = 0
    page_gap: int = 0
    row_gap: int = 0
    specials: int = 0
    seed: int = 0
    short_list: bool = False

    @property
    def spec(self) -> PoolSpec:
        return KINDS[self.kind]

    @property
    def shape(self) -> TailShape:
        return _shape(self.spec, self.page_rows, max((r.drafts for r in self.requests), default=0))

    @property
    def list_ids(self) -> int:
        """Columns of a request's table row, back from its end, that may hold pages of its tail."""
        return self.shape.tail_pages if self.short_list else self.shape.list_ids

    @property
    def tokens(self) -> int:
        """Tokens of the launch, padded ones too."""
        return sum(r.length for r in self.requests) + self.padded_tokens


@cache
def library() -> Kernels:
    """The kernels in the host emulation; skips the test where they are not built."""
    try:
        return Kernels(find())
    except InputError as error:
        pytest.skip(str(error))


@cache  # it works out once how many pages a tail has
def _shape(spec: PoolSpec, page_rows: int, drafts: int) -> TailShape:
    return TailShape(ratio=spec.ratio, overlap=spec.overlap, page_rows=page_rows, layers=1, drafts=drafts)


class Plant(enum.Enum):
    """What is wrong in an expectation that is spoilt on purpose."""

    APE = "the APE row of the next position"
    HISTORY = "the oldest history row is taken for missing"
    PAGE = "two pages of one tail are swapped"
    TAIL = "the last row of the tail is not written"
    OVERLAP = "the halves of the window before are swapped"
    ROPE = "the RoPE row of the window before"
    BEHIND = "a row behind the last window is written"


# ------------------------------------------------------------------------------------------------ memory


class Memory:
    """Named arrays, each between two guard zones; what was given as an input must stay as it was."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._before: dict[str, bytes] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A new array, aligned to 512 bytes as the device has it, full of poison."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(size + 2 * GUARD_BYTES + 512, GUARD, np.uint8)
        begin = -raw.ctypes.data % 512 + GUARD_BYTES
        array = raw[begin : begin + size].view(dtype).reshape(shape)
        poison(array)
        self._buffers[name], self._arrays[name] = raw, array
        return array

    def input(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        array = self.array(name, values.shape, values.dtype)
        array[...] = values
        self.seal(name)
        return array

    def seal(self, name: str) -> None:
        """From now on this array must not change."""
        self._before[name] = self._arrays[name].tobytes()

    def differences(self) -> list[str]:
        """What was written and must not be."""
        found = []
        for name, raw in self._buffers.items():
            array = self._arrays[name]
            begin = array.ctypes.data - raw.ctypes.data
            for side, zone in (("before", raw[:begin]), ("behind", raw[begin + array.nbytes :])):
                if (zone != GUARD).any():
                    found.append(f"{name}: {(zone != GUARD).sum()} bytes {side} it are overwritten")
            if name in self._before and array.tobytes() != self._before[name]:
                found.append(f"{name}: an input was overwritten")
        return found


def poison(array: NDArray[Any]) -> None:
    """Fill with what must never be read, or stay where nothing is written."""
    array.view(f"u{array.itemsize}")[...] = POISON if array.itemsize == 4 else POISON >> (32 - 8 * array.itemsize)


def same(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Elements equal bit for bit; any two NaN that a computation makes are equal, poison only equals itself."""
    bits = f"u{a.itemsize}"
    mark = POISON if a.itemsize == 4 else POISON >> 16
    a_bits, b_bits = a.view(bits), b.view(bits)
    a_nan, b_nan = np.isnan(as_float(a)), np.isnan(as_float(b))
    return (a_bits == b_bits) | (a_nan & b_nan & (a_bits != mark) & (b_bits != mark))


def as_float(values: NDArray[Any]) -> Float32:
    return reference.bfloat16_values(values) if values.dtype == np.uint16 else values


def to_dtype(values: Float32, dtype: Dtype) -> NDArray[Any]:
    return reference.bfloat16_bits(values) if dtype is Dtype.BF16 else values


@cache
def _bank() -> Float32:
    return np.random.default_rng(7).standard_normal(1 << 21).astype(np.float32)


def draw(rng: np.random.Generator, rows: int, columns: int) -> Float32:
    """Normal numbers; from a stock of them, because most of a case is rows."""
    bank, size = _bank(), rows * columns
    if size > len(bank) // 2:
        return rng.standard_normal((rows, columns), np.float32)
    begin = int(rng.integers(len(bank) - size))
    return bank[begin : begin + size].reshape(rows, columns).copy()


# ------------------------------------------------------------------------------------------------ world


@dataclass
class World:
    """The memory of one case. `raw` and `history` are made by the seed unless they are given.

    raw: per request, [kv | score] of its tokens. history: per request, rows [kv | score + APE] of `need(start)`.
    """

    case: Case
    raw: list[Float32] = field(default_factory=list)
    history: list[Float32] = field(default_factory=list)
    ape: Float32 | None = None
    norm_weight: NDArray[Any] | None = None
    rng: np.random.Generator = field(init=False)
    memory: Memory = field(init=False, default_factory=Memory)

    def __post_init__(self) -> None:
        case, spec = self.case, self.case.spec
        self.rng = np.random.default_rng([20261130, case.seed])
        if not self.raw:
            self._draw_rows()
        if self.ape is None:
            self.ape = draw(self.rng, spec.ratio, spec.half)
        if self.norm_weight is None:
            weight = 1 + 0.2 * draw(self.rng, 1, spec.head_dim)[0]
            self.norm_weight = to_dtype(weight.astype(np.float32), case.norm_dtype)
        self._lay_out()

    def _draw_rows(self) -> None:
        case, spec, rng = self.case, self.case.spec, self.rng
        for request in case.requests:
            rows = draw(rng, request.length, spec.row_dim)
            rows[:, spec.half :] *= 2
            self.raw.append(reference.round_to_bfloat16(rows) if case.row_dtype is Dtype.BF16 else rows)
            self.history.append(draw(rng, len(self.need(request)), spec.row_dim))
        every = [rows for rows in (*self.raw, *self.history) if rows.size]
        for _ in range(case.specials if every else 0):
            rows = every[rng.integers(len(every))]
            rows[rng.integers(len(rows)), rng.integers(spec.row_dim)] = rng.choice(
                np.array([np.nan, np.inf, -np.inf, 3e38, -3e38], np.float32)
            )
            if case.row_dtype is Dtype.BF16:
                rows[...] = reference.round_to_bfloat16(rows)

    def need(self, request: Request) -> range:
        """Positions whose rows lie in pages before the launch, and that it may read."""
        return reference.need(request.start, self.case.spec.ratio, self.case.spec.overlap)

    def _lay_out(self) -> None:
        case, spec, shape = self.case, self.case.spec, self.case.shape
        requests = len(case.requests) + case.padded_requests
        lengths = [r.length for r in case.requests] + [0] * case.padded_requests
        memory = self.memory
        self.cu_seqlens = memory.input("cu_seqlens", np.cumsum([0, *lengths], dtype=np.int32))
        starts = [r.start for r in case.requests] + [0] * case.padded_requests
        self.starts = memory.input("starts", np.array(starts, np.int32))
        columns = max([1, *(-(-r.end // case.page_rows) for r in case.requests)])
        table = np.zeros((requests, columns), np.int32)
        mapped = [
            (b, column)
            for b, request in enumerate(case.requests)
            for column in sorted({*shape.pages(self.need(request)), *self._tail_pages(request)})
        ]
        pages = 1 + len(mapped) + 2
        for (b, column), page in zip(mapped, self.rng.permutation(np.arange(1, pages)), strict=False):
            table[b, column] = page
        self.table = memory.input("table", table)
        self.pool = memory.array("pool", (pages, case.page_rows * spec.row_dim + case.page_gap), np.float32)
        for b, request in enumerate(case.requests):
            for position, row in zip(self.need(request), self.history[b], strict=True):
                self.row(self.pool, b, position)[...] = row
        self.ape_array = memory.input("ape", self.ape)
        self.norm_array = memory.input("norm_weight", self.norm_weight)
        self.out_rows = min(case.tokens, case.tokens // spec.ratio + requests)
        self.out = memory.array("out", (self.out_rows, spec.head_dim), case.out_dtype.numpy)
        self.cos = memory.array("cos", (self.out_rows, spec.rope_head_dim), np.float32)
        self.sin = memory.array("sin", (self.out_rows, spec.rope_head_dim), np.float32)
        positions = [w * spec.ratio + 12800 for r in case.requests for w in self.windows(r)]
        cos, sin = reference.rope_table(np.array(positions, np.int64), spec.rope_head_dim)
        self.cos[: len(positions)], self.sin[: len(positions)] = cos, sin
        memory.seal("cos"), memory.seal("sin")
        self.pool_before = self.pool.copy()

    def _tail_pages(self, request: Request) -> range:
        if request.length == 0:
            return range(0)
        return self.case.shape.pages(self.case.shape.live(request.end - request.drafts, request.end))

    def row(self, pool: Float32, request: int, position: int) -> Float32:
        """The row of a position in its page; of `pool`, which is laid out as the launch's."""
        column, place = divmod(position, self.case.page_rows)
        begin = place * self.case.spec.row_dim
        row: Float32 = pool[self.table[request, column], begin : begin + self.case.spec.row_dim]
        return row

    def windows(self, request: Request) -> range:
        """The windows that complete in this launch."""
        return range(request.start // self.case.spec.ratio, request.end // self.case.spec.ratio)

    # -------------------------------------------------------------------------------------------- launch

    def tiles(self) -> list[range]:
        """Packed tokens of each tile: inner bounds are window ends of the request that they cut."""
        case, spec, bounds = self.case, self.case.spec, [0]
        if case.tile == 0 or case.tokens == 0:
            return [range(case.tokens)]
        while bounds[-1] < case.tokens:
            bound = min(bounds[-1] + case.tile, case.tokens)
            b = int(np.searchsorted(self.cu_seqlens, bound, side="right")) - 1  # the request that token `bound` is of
            if bound < self.cu_seqlens[-1] and self.cu_seqlens[b] < bound:
                position = int(self.starts[b]) + bound - int(self.cu_seqlens[b])
                bound = max(int(self.cu_seqlens[b]), bound - position % spec.ratio)
            if bound <= bounds[-1]:
                raise ValueError(f"tile: found {case.tile} tokens, which hold no window end; take more")
            bounds.append(bound)
        return [range(a, b) for a, b in pairwise(bounds)]

    def params(self, tile: range, carry: int) -> tuple[CompressParams, TailParams]:
        """The constants of both launches of a tile."""
        case, spec = self.case, self.case.spec
        both = {
            "page_stride": self.pool.shape[1],
            "row_stride": spec.row_dim + case.row_gap,
            "ratio": spec.ratio,
            "coff": spec.coff,
            "head_dim": spec.head_dim,
            "requests": len(self.starts),
            "columns": self.table.shape[1],
            "page_rows": case.page_rows,
            "pool_pages": len(self.pool),
            "carry": carry,
            "first_token": tile.start,
            "tokens": len(tile),
            "launch_tokens": case.tokens,
            "row_dtype": case.row_dtype,
        }
        compress = CompressParams(
            **both,
            rope_head_dim=spec.rope_head_dim,
            out_rows=self.out_rows,
            out_dtype=case.out_dtype,
            norm_dtype=case.norm_dtype,
            norm_eps=spec.norm_eps,
        )
        return compress, TailParams(**both, list_ids=case.list_ids)

    def launch(self, library: Kernels) -> None:
        """compress and tail_update, tile by tile. Raises what the library raises."""
        case, spec = self.case, self.case.spec
        packed = np.concatenate([np.zeros((0, spec.row_dim), np.float32), *self.raw])
        library.set("order", case.order)
        library.set("seed", case.seed)
        for number, tile in enumerate(self.tiles()):
            carry = spec.ratio if spec.overlap and tile.start else 0
            rows = self.memory.array(
                f"rows of tile {number}", (carry + len(tile), spec.row_dim + case.row_gap), case.row_dtype.numpy
            )
            # What a tile has no use for stays poison: rows of the launch's padding, and carried rows before the first.
            first = max(0, tile.start - carry)
            used = packed[first : tile.stop]
            rows[first - (tile.start - carry) :][: len(used), : spec.row_dim] = to_dtype(used, case.row_dtype)
            self.memory.seal(f"rows of tile {number}")
            compress, tail = self.params(tile, carry)
            size = max(library.workspace_bytes(compress), library.workspace_bytes(tail))
            workspace = self.memory.array(f"workspace of tile {number}", (size // 4,), np.float32)
            arrays = self.arrays | {"rows": rows, "workspace": workspace}
            library.compress(case.blocks, compress, arrays)
            library.tail_update(case.blocks, tail, arrays)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """What every tile of the launch has in common, by the names of the interface."""
        return {
            "pool": self.pool,
            "ape": self.ape_array,
            "norm_weight": self.norm_array,
            "cos": self.cos,
            "sin": self.sin,
            "cu_seqlens": self.cu_seqlens,
            "starts": self.starts,
            "table": self.table,
            "out": self.out,
        }

    # -------------------------------------------------------------------------------------------- expectation

    def rows(self, b: int) -> tuple[Float32, int]:
        """The rows [kv | score + APE] that a request's windows may pool, and the position of the first."""
        request = self.case.requests[b]
        new, half = self.raw[b], self.case.spec.half
        assert self.ape is not None
        made = reference.make_rows(new[:, :half], new[:, half:], self.ape, request.start)
        return np.concatenate([self.history[b], made]), self.need(request).start

    def expected_windows(self, plant: Plant | None = None) -> Float32:
        """The compressed rows of the launch, packed, fp32."""
        spec, first, results = self.case.spec, 0, [np.zeros((0, self.case.spec.head_dim), np.float32)]
        ape, weight = self.ape, as_float(self.norm_array)
        for b, request in enumerate(self.case.requests):
            windows = self.windows(request)
            if plant is Plant.APE:
                self.ape = np.roll(ape, 1, axis=0)
            rows, oldest = self.rows(b)
            self.ape = ape
            if plant is Plant.HISTORY and len(self.history[b]):
                rows[0, : spec.half], rows[0, spec.half :] = 0, -np.inf
            if plant is Plant.OVERLAP:
                rows = np.roll(rows.reshape(len(rows), 2 * spec.coff, -1), 1, axis=1).reshape(rows.shape)
            at = slice(first, first + len(windows))
            cos, sin = self.cos[at], self.sin[at]
            if plant is Plant.ROPE:
                cos, sin = np.roll(self.cos, 1, axis=0)[at], np.roll(self.sin, 1, axis=0)[at]
            with np.errstate(all="ignore"):
                results.append(reference.compressed_windows(rows, oldest, windows, spec, weight, cos, sin))
            first += len(windows)
        return np.concatenate(results)

    def expected_pool(self, plant: Plant | None = None) -> Float32:
        """The page pool after the launch: of the last `list_ids` columns that the end reaches, the mapped ones."""
        case, pool = self.case, self.pool_before.copy()
        for b, request in enumerate(case.requests):
            rows, oldest = self.rows(b)
            last = (request.end - 1) // case.page_rows
            oldest_column = last - case.list_ids + 1
            for position in range(max(request.start, oldest_column * case.page_rows), request.end):
                if self.table[b, position // case.page_rows] != 0:
                    self.row(pool, b, position)[...] = rows[position - oldest]
            if plant is Plant.TAIL and request.length:
                self.row(pool, b, request.end - 1)[...] = self.row(self.pool_before, b, request.end - 1)
        if plant is Plant.PAGE:
            written = np.flatnonzero(~same(pool, self.pool_before).all(axis=1))
            pool[written] = pool[np.roll(written, 1)]
        return pool

    def differences(self, plant: Plant | None = None) -> list[str]:
        """Everything in memory that is not as it must be after the launch; empty if all is right."""
        found = self.memory.differences()
        windows = to_dtype(self.expected_windows(plant), self.case.out_dtype)
        out = np.empty_like(self.out)
        poison(out)
        out[: len(windows)] = windows
        if plant is Plant.BEHIND:
            out[len(windows) :] = 0
        for name, got, want in (("out", self.out, out), ("pool", self.pool, self.expected_pool(plant))):
            right = same(got, want)
            if not right.all():
                row, column = (int(i) for i in np.argwhere(~right)[0])
                found.append(
                    f"{name}: {(~right).sum()} elements differ, the first at [{row}, {column}]: "
                    f"{got[row, column]!r}, expected {want[row, column]!r}"
                )
        return found

    def float64_windows(self) -> NDArray[np.float64]:
        """The compressed rows in float64, the long way: window by window, without the order of operations."""
        spec, results = self.case.spec, []
        ratio, dim, half = spec.ratio, spec.head_dim, spec.half
        weight = as_float(self.norm_array).astype(np.float64)
        for b, request in enumerate(self.case.requests):
            rows, oldest = self.rows(b)
            exact = rows.astype(np.float64)
            for window in self.windows(request):
                kv, score = [], []
                for position in range(window * ratio - (ratio if spec.overlap else 0), (window + 1) * ratio):
                    if position < 0:
                        continue
                    row = exact[position - oldest]
                    part = slice(half - dim, half) if position >= window * ratio else slice(0, dim)
                    kv.append(row[:half][part]), score.append(row[half:][part])
                weights = np.exp(np.array(score) - np.max(score, axis=0))
                pooled = (np.array(kv) * weights).sum(axis=0) / weights.sum(axis=0)
                normed = pooled / np.sqrt((pooled**2).mean() + spec.norm_eps) * weight
                cos, sin = self.cos[len(results)].astype(float), self.sin[len(results)].astype(float)
                tail = normed[dim - spec.rope_head_dim :]
                turned = np.stack([-tail[1::2], tail[0::2]], axis=1).reshape(-1)
                results.append(np.concatenate([normed[: dim - spec.rope_head_dim], tail * cos + turned * sin]))
        return np.array(results).reshape(-1, dim)


# ------------------------------------------------------------------------------------------------ cases


def random_case(rng: np.random.Generator, seed: int) -> Case:
    """A case of any shape, short enough that thousands of them are run."""
    kind = str(rng.choice(list(KINDS), p=(0.4, 0.35, 0.25)))
    spec = KINDS[kind]
    long = 129 if kind == "c4" else 300
    requests = []
    for _ in range(rng.integers(1, 7)):
        length = int(
            rng.choice([rng.integers(0, 7), rng.integers(0, 30), rng.integers(0, long + 1)], p=(0.6, 0.3, 0.1))
        )
        drafts = int(rng.integers(0, min(4, length))) if length > 1 and rng.random() < 0.3 else 0
        requests.append(Request(int(rng.integers(0, 3 * spec.ratio)), length, drafts))
    tiled = rng.random() < 0.3
    return Case(
        kind,
        tuple(requests),
        page_rows=int(rng.choice(PAGE_ROWS[kind])),
        row_dtype=Dtype(rng.integers(2)),
        out_dtype=Dtype(rng.integers(2)),
        norm_dtype=Dtype(rng.integers(2)),
        blocks=int(rng.choice([1, 2, 3, 24, 48])),
        order=CoreOrder(rng.integers(3)),
        tile=int(rng.integers(2 * spec.ratio, 4 * spec.ratio)) if tiled else 0,
        padded_requests=int(rng.integers(0, 3)),
        # A launch without any token is refused.
        padded_tokens=int(rng.integers(0 if any(r.length for r in requests) else 1, 9)),
        page_gap=int(rng.choice([0, 0, 8, 64])),
        row_gap=int(rng.choice([0, 0, 16, 512])),
        specials=int(rng.integers(1, 4)) if rng.random() < 0.15 else 0,
        seed=seed,
        short_list=bool(rng.integers(2)),
    )
