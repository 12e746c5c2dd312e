# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""compressor_metadata on the software NPU against the same rows computed the long way, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests import stock_op
from tests.stock_op import Refused

DIM = 6
ONE = {np.uint16: 0x3F80, np.float16: 1.0, np.float32: 1.0}


def launch(
    lengths: list[int],
    starts: list[int],
    table: NDArray[np.int32],
    *,
    rows: int,
    ratio: int,
    page: int,
    flat: bool,
    rope_rows: int,
    dtype: Any = np.float32,
) -> dict[str, Any]:
    cos = (np.arange(rope_rows * DIM) % 30000 + 2).reshape(rope_rows, DIM).astype(dtype)
    return {
        "rope_cos": cos,
        "rope_sin": (cos * 2).astype(dtype),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32),
        "start_pos": np.array(starts, np.int32),
        "kv_block_table": table,
        "compress_cos": np.zeros((rows, 1, 1, DIM), dtype),
        "compress_sin": np.full((rows, 1, 1, DIM), 9, dtype),
        "slot_mapping": np.zeros(rows if flat else (rows, 2), np.int32),
        "kv_block_size": page,
        "slot_mapping_format": 1 if flat else 2,
        "compress_ratio": ratio,
        "num_reqs_actual": len(lengths),
    }


@given(
    requests=st.lists(st.tuples(st.integers(-3, 60), st.integers(0, 70)), min_size=1, max_size=5),
    ratio=st.sampled_from([1, 4, 128]),
    page=st.integers(1, 9),
    columns=st.integers(1, 12),
    rows=st.integers(1, 90),
    flat=st.booleans(),
    rope_rows=st.integers(1, 140),
    dtype=st.sampled_from([np.uint16, np.float16, np.float32]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_equal_those_computed_the_long_way(
    requests: list[tuple[int, int]],
    ratio: int,
    page: int,
    columns: int,
    rows: int,
    flat: bool,
    rope_rows: int,
    dtype: type,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    table = rng.integers(-1, 50, (len(requests) + 1, columns)).astype(np.int32)
    table[rng.random(table.shape) < 0.05] = 2**31 - 1
    starts, lengths = [start for start, _ in requests], [length for _, length in requests]
    a = launch(lengths, starts, table, rows=rows, ratio=ratio, page=page, flat=flat, rope_rows=rope_rows, dtype=dtype)
    stock_op.compressor_metadata(a)

    # Walk every token; the last one of a window makes a row.
    expected: list[tuple[int, int, int] | None] = []  # rope row, block, offset; None: invalid
    for request, (start, length) in enumerate(requests):
        for position in range(start, start + length if start >= 0 else start):
            if (position + 1) % ratio:
                continue
            window = position // ratio
            column, offset = divmod(window, page)
            first = position + 1 - ratio
            block = int(table[request, column]) if column < columns else -1
            too_far = flat and block * page + offset > 2**31 - 1
            expected.append(None if block < 0 or first >= rope_rows or too_far else (first, block, offset))
    expected = (expected + [None] * rows)[:rows]
    for row, entry in enumerate(expected):
        cos, sin = a["compress_cos"][row, 0, 0], a["compress_sin"][row, 0, 0]
        slot = a["slot_mapping"][row].tolist()
        if entry is None:
            assert (cos == ONE[dtype]).all()
            assert (sin == 0).all()
            assert slot == (-1 if flat else [-1, page - 1])
        else:
            first, block, offset = entry
            assert (cos == a["rope_cos"][first]).all()
            assert (sin == a["rope_sin"][first]).all()
            assert slot == (block * page + offset if flat else [block, offset])


def test_requests_past_num_reqs_actual_are_not_looked_at() -> None:
    table = np.array([[3], [4], [5]], np.int32)
    a = launch([4, 4, 4], [0, 0, 0], table, rows=3, ratio=4, page=8, flat=False, rope_rows=8)
    a["num_reqs_actual"] = 2
    stock_op.compressor_metadata(a)
    assert a["slot_mapping"].tolist() == [[3, 0], [4, 0], [-1, 7]]


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("block size 0", {"kv_block_size": 0}, "kv_block_size: found 0"),
    ("ratio 0", {"compress_ratio": 0}, "compress_ratio: found 0"),
    ("format 3", {"slot_mapping_format": 3}, "slot_mapping_format: found 3"),
    ("no requests", {"num_reqs_actual": 0}, "num_reqs_actual: found 0"),
    ("cu_seqlens too short", {"cu_seqlens": np.zeros(2, np.int32)}, r"cu_seqlens: found \[2\], expected more than"),
    ("starts too few", {"start_pos": np.zeros(1, np.int32)}, r"start_pos: found \[1\]"),
    ("table too short", {"kv_block_table": np.zeros((1, 4), np.int32)}, r"kv_block_table: found \[1, 4\]"),
    ("table without columns", {"kv_block_table": np.zeros((2, 0), np.int32)}, r"kv_block_table: found \[2, 0\]"),
    ("table in int64", {"kv_block_table": np.zeros((2, 4), np.int64)}, "kv_block_table: found another type"),
    ("cu_seqlens in int64", {"cu_seqlens": np.zeros(3, np.int64)}, "cu_seqlens: found another type"),
    ("starts in int64", {"start_pos": np.zeros(2, np.int64)}, "start_pos: found another type"),
    ("sin of another shape", {"rope_sin": np.zeros((7, DIM), np.float32)}, r"rope_sin: found \[7, 6\]"),
    ("sin of another type", {"rope_sin": np.zeros((8, DIM), np.float16)}, "rope_sin: found another type"),
    ("empty rope", {k: np.zeros((0, DIM), np.float32) for k in ("rope_cos", "rope_sin")}, r"rope_cos: found \[0, 6\]"),
    ("no rows", {"compress_cos": np.zeros((0, 1, 1, DIM), np.float32)}, r"compress_cos: found \[0"),
    ("rows of another width", {"compress_cos": np.zeros((4, 1, 1, 5), np.float32)}, r"compress_cos: found \[4"),
    ("two results per row", {"compress_cos": np.zeros((4, 2, 1, DIM), np.float32)}, r"compress_cos: found \[4, 2"),
    ("sin rows of another count", {"compress_sin": np.zeros((3, 1, 1, DIM), np.float32)}, r"compress_sin: found \[3"),
    ("result of another type", {"compress_cos": np.zeros((4, 1, 1, DIM), np.float16)}, "compress_cos: found another"),
    ("slots in int64", {"slot_mapping": np.zeros((4, 2), np.int64)}, "slot_mapping: found another type"),
    (
        "flat slots in format 2",
        {"slot_mapping": np.zeros(4, np.int32)},
        r"slot_mapping: found \[4\], expected \[4, 2",
    ),
    ("strided slots", {"slot_mapping": np.zeros((4, 4), np.int32)[:, ::2]}, "slot_mapping: found strides"),
]


@pytest.mark.parametrize(("changes", "message"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_what_breaks_the_contract_is_refused_with_what_and_why(changes: dict[str, Any], message: str) -> None:
    table = np.ones((2, 4), np.int32)
    a = launch([4, 8], [0, 0], table, rows=4, ratio=4, page=8, flat=False, rope_rows=8)
    stock_op.compressor_metadata(a)
    with pytest.raises(Refused, match=f"compressor_metadata: {message}"):
        stock_op.compressor_metadata(a | changes)
