# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Our kernels where an offset needs more than 32 bits: the bits of the same launch in memory without gaps.

Memory is mapped and hardly touched: pages and staging rows lie so far apart that their last elements are past 2^32.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afd_dsv4.compressor.kernels import Dtype, Kernels
from tests import kernels_world
from tests.kernels_world import KINDS, Case, Request, World

FAR_PAGE = (1 << 25) + 8  # elements from one to the next
FAR_ROW = {"c4": 1 << 28, "c4_indexer": 1 << 28, "c128": 1 << 25}  # 2^28 is the most that a launch takes
END = 1 << 30  # of positions


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_world.library()


def mapped(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that take memory only where they are touched."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)
    except OSError as error:
        pytest.skip(f"{size} bytes cannot be mapped here: {error}")


def launch(kernels: Kernels, world: World, constants: dict[str, int], arrays: dict[str, NDArray[Any]]) -> None:
    """Both launches of a world in one tile, with other constants and arrays."""
    compress, tail = world.params(range(world.case.tokens), 0)
    for params in (compress, tail):
        for name, value in constants.items():
            if hasattr(params, name):
                setattr(params, name, value)
    workspace = np.zeros(kernels.workspace_bytes(compress) // 4, np.float32)
    every = world.arrays | {"workspace": workspace} | arrays
    kernels.compress(3, compress, every)
    kernels.tail_update(3, tail, every)


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("kind", KINDS)
def test_pages_and_rows_past_32_bits_give_the_same_bits(kernels: Kernels, kind: str, dtype: Dtype) -> None:
    ratio = KINDS[kind].ratio
    case = Case(kind, (Request(ratio + 3, 2 * ratio + 2), Request(2 * ratio + 1, ratio + 5)), row_dtype=dtype)
    world = World(case)
    world.launch(kernels)
    assert world.differences() == []
    packed = kernels_world.to_dtype(np.concatenate(world.raw), dtype)
    rows = mapped((case.tokens, FAR_ROW[kind]), dtype.numpy)
    rows[:, : packed.shape[1]] = packed
    assert rows.size > 1 << 32
    first = 200  # the pages lie behind so many that nobody uses
    page = world.pool.shape[1]
    pool = mapped((first + len(world.pool), FAR_PAGE), np.float32)
    pool[first:, :page] = world.pool_before
    table = np.where(world.table > 0, world.table + first, 0).astype(np.int32)
    assert int(table.max()) * FAR_PAGE > 1 << 32
    out = np.full_like(world.out, 7)
    constants = {"page_stride": FAR_PAGE, "row_stride": FAR_ROW[kind], "pool_pages": len(pool)}
    launch(kernels, world, constants, {"rows": rows, "pool": pool, "table": table, "out": out})
    windows = sum(len(world.windows(request)) for request in case.requests)
    assert (out[:windows].view(np.uint32) == world.out[:windows].view(np.uint32)).all()
    assert (out[windows:] == 7).all()
    assert (pool[first:, :page].view(np.uint32) == world.pool.view(np.uint32)).all()
    assert not pool[:, page : 2 * page].any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_positions_give_the_bits_of_the_first(kernels: Kernels, kind: str) -> None:
    ratio, page_rows = KINDS[kind].ratio, 1 << 20
    world = World(Case(kind, (Request(2 * ratio + 1, 2 * ratio + 2),), page_rows=4 * ratio + 4))
    world.launch(kernels)
    assert world.differences() == []
    near, row, tokens = world.case.requests[0], KINDS[kind].row_dim, world.case.tokens - 3
    start = END - tokens  # the same phase
    assert (start - near.start) % ratio == 0
    pool = mapped((2, page_rows * row), np.float32)
    table = np.zeros((1, END // page_rows), np.int32)
    table[0, -1] = 1

    def far(position: int) -> NDArray[Any]:
        """The row of what is `position` in the world."""
        at = (position - near.start + start) % page_rows * row
        found: NDArray[Any] = pool[1, at : at + row]
        return found

    for position in world.need(near):
        far(position)[...] = world.row(world.pool_before, 0, position)
    constants = {"page_stride": page_rows * row, "page_rows": page_rows, "pool_pages": 2, "columns": table.shape[1]}
    constants |= {"tokens": tokens, "launch_tokens": tokens, "out_rows": tokens // ratio + 1}
    out = np.zeros_like(world.out)
    arrays = {"rows": np.concatenate(world.raw)[:tokens], "pool": pool, "table": table, "out": out}
    arrays |= {"starts": np.array([start], np.int32), "cu_seqlens": np.array([0, tokens], np.int32)}
    launch(kernels, world, constants, arrays)
    windows = (near.start + tokens) // ratio - near.start // ratio
    assert windows == 2
    assert (out[:windows].view(np.uint32) == world.out[:windows].view(np.uint32)).all()
    for position in range(near.start, near.start + tokens):
        assert (far(position).view(np.uint32) == world.row(world.pool, 0, position).view(np.uint32)).all()
