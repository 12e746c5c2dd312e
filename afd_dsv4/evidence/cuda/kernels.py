# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"
"""The same as `plain.py` in Triton kernels: no host waits, no memory in proportion to windows times their rows.

One program for a token (`_save`) or a window (`_compress`); each finds its request in cu_seqlens, so that the host
knows no length and a graph can be replayed with others. A window of C128 has too many rows for one program's registers:
there slices of columns are pooled apart (`_pool`), and normed and rotated in a second kernel (`_finish`).
Tables are not trusted: no page outside the pool is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _save(
    rows,
    row_stride,
    ape,
    state,
    page_stride,
    pages,
    table,
    columns,
    starts,
    cu,
    requests,
    RATIO: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    token = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    ends = tl.load(cu + 1 + b, mask=b < requests, other=2147483647)
    request = tl.sum((ends <= token).to(tl.int32), 0)
    if request < requests:
        position = tl.load(starts + request) + token - tl.load(cu + request)
        column = position // PAGE_ROWS
        page = tl.load(table + request * columns + column, mask=column < columns, other=0)
        if (page > 0) & (page < pages):
            c = tl.arange(0, 2 * HALF)
            row = tl.load(rows + token.to(tl.int64) * row_stride + c)
            add = tl.load(ape + (position % RATIO) * HALF + c - HALF, mask=c >= HALF, other=0.0)
            there = state + page.to(tl.int64) * page_stride + (position % PAGE_ROWS) * 2 * HALF
            tl.store(there + c, tl.where(c >= HALF, row + add, row))


@triton.jit
def _pooled(
    r,
    c,
    rows,
    row_stride,
    ape,
    state,
    page_stride,
    pages,
    table,
    columns,
    starts,
    cu,
    requests,
    RATIO: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Whether result row `r` exists, and columns `c` of its pooled row."""
    b = tl.arange(0, BLOCK_B)
    mask = b < requests
    firsts = tl.load(cu + b, mask=mask, other=0)
    begins = tl.load(starts + b, mask=mask, other=0)
    stops = begins + tl.load(cu + b + 1, mask=mask, other=0) - firsts
    counts = stops // RATIO - begins // RATIO
    ends = tl.cumsum(counts, 0)
    request = tl.sum(((ends <= r) & mask).to(tl.int32), 0)
    there = request < requests
    mine = b == request
    first = tl.sum(tl.where(mine, firsts, 0), 0)
    start = tl.sum(tl.where(mine, begins, 0), 0)
    window = start // RATIO + r - tl.sum(tl.where(mine, ends - counts, 0), 0)
    i = tl.arange(0, HALF // DIM * RATIO)
    if HALF == DIM:
        position = window * RATIO + i
        left = i * 0
    else:
        position = (window - 1 + i % 2) * RATIO + i // 2
        left = i % 2 * DIM
    fresh = there & (position >= start)
    known = there & (position >= 0) & (position < start)
    ours = rows + (first + position - start).to(tl.int64) * row_stride + left
    add = ape + (position % RATIO) * HALF + left
    column = position // PAGE_ROWS
    page = tl.load(table + request * columns + column, mask=known & (column < columns), other=-1)
    inside = known & (page >= 0) & (page < pages)
    theirs = state + page.to(tl.int64) * page_stride + (position % PAGE_ROWS) * 2 * HALF + left
    f, k = fresh[:, None], inside[:, None]
    kv = tl.where(
        f,
        tl.load(ours[:, None] + c[None, :], mask=f, other=0.0),
        tl.load(theirs[:, None] + c[None, :], mask=k, other=0.0),
    )
    score = tl.where(
        f,
        tl.load(ours[:, None] + HALF + c[None, :], mask=f, other=0.0)
        + tl.load(add[:, None] + c[None, :], mask=f, other=0.0),
        tl.load(theirs[:, None] + HALF + c[None, :], mask=k, other=0.0),
    )
    score = tl.where((known & (inside == 0))[:, None], float("nan"), score)
    score = tl.where(f | known[:, None], score, float("-inf"))
    weight = tl.exp(score - tl.max(score, 0)[None, :])
    weight = weight / tl.sum(weight, 0)[None, :]
    return there, tl.sum(kv * weight, 0)


@triton.jit
def _norm_rope(row, r, norm_weight, cos, sin, eps, out, DIM: tl.constexpr, ROPE: tl.constexpr):
    """Norm, rotate and store one result row."""
    c = tl.arange(0, DIM)
    mean = tl.sum(row * row, 0) / DIM + eps
    row = row / tl.sqrt(mean) * tl.load(norm_weight + c).to(tl.float32)
    even, odd = tl.split(tl.reshape(row, (DIM // 2, 2)))
    at = 2 * tl.arange(0, DIM // 2) - (DIM - ROPE)
    turns = at >= 0
    cos_even = tl.load(cos + r * ROPE + at, mask=turns, other=1.0).to(tl.float32)
    cos_odd = tl.load(cos + r * ROPE + at + 1, mask=turns, other=1.0).to(tl.float32)
    sin_even = tl.load(sin + r * ROPE + at, mask=turns, other=0.0).to(tl.float32)
    sin_odd = tl.load(sin + r * ROPE + at + 1, mask=turns, other=0.0).to(tl.float32)
    new_even = tl.where(turns, even * cos_even - odd * sin_even, even)
    new_odd = tl.where(turns, odd * cos_odd + even * sin_odd, odd)
    whole = tl.reshape(tl.join(new_even, new_odd), (DIM,))
    tl.store(out + r.to(tl.int64) * DIM + c, whole.to(out.dtype.element_ty))


@triton.jit
def _compress(
    rows,
    row_stride,
    ape,
    state,
    page_stride,
    pages,
    table,
    columns,
    starts,
    cu,
    requests,
    norm_weight,
    cos,
    sin,
    eps,
    out,
    RATIO: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    r = tl.program_id(0)
    c = tl.arange(0, DIM)
    there, row = _pooled(
        r, c, rows, row_stride, ape, state, page_stride, pages, table, columns, starts, cu, requests,
        RATIO, HALF, DIM, PAGE_ROWS, BLOCK_B,
    )  # fmt: skip
    if there:
        _norm_rope(row, r, norm_weight, cos, sin, eps, out, DIM, ROPE)


@triton.jit
def _pool(
    rows,
    row_stride,
    ape,
    state,
    page_stride,
    pages,
    table,
    columns,
    starts,
    cu,
    requests,
    pooled,
    RATIO: tl.constexpr,
    HALF: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there, row = _pooled(
        r, c, rows, row_stride, ape, state, page_stride, pages, table, columns, starts, cu, requests,
        RATIO, HALF, DIM, PAGE_ROWS, BLOCK_B,
    )  # fmt: skip
    if there:
        tl.store(pooled + r * DIM + c, row)


@triton.jit
def _finish(
    pooled,
    starts,
    cu,
    requests,
    norm_weight,
    cos,
    sin,
    eps,
    out,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    r = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    mask = b < requests
    begins = tl.load(starts + b, mask=mask, other=0)
    stops = begins + tl.load(cu + b + 1, mask=mask, other=0) - tl.load(cu + b, mask=mask, other=0)
    if r < tl.sum(stops // RATIO - begins // RATIO, 0):
        row = tl.load(pooled + r * DIM + tl.arange(0, DIM))
        _norm_rope(row, r, norm_weight, cos, sin, eps, out, DIM, ROPE)


def save(
    rows: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> None:
    """See `plain.save`."""
    requests = len(starts)
    _save[(len(rows),)](
        rows,
        rows.stride(0),
        ape,
        state,
        state.stride(0),
        len(state),
        table,
        table.shape[1],
        starts,
        cu_seqlens,
        requests,
        *ape.shape,
        state.shape[1],
        triton.next_power_of_2(requests),
    )


def compress(
    rows: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    norm_eps: float,
    out: torch.Tensor,
) -> None:
    """See `plain.compress`."""
    if len(out):
        there = (rows, ape, state, table, starts, cu_seqlens)
        for kernel, grid, arguments in _launches(*there, norm_weight, rope_cos, rope_sin, norm_eps, out):
            kernel[grid](*arguments)


def prepared(stream: Any, *arguments: Any) -> Callable[[], None]:
    """`compress` with all of its arguments, to be queued on a stream again and again.

    Triton looks at every argument of every launch, and asks the driver about every pointer, which takes the host longer
    than all else of it; a compiled program would do neither.
    """
    found = []
    for kernel, grid, given in _launches(*arguments):
        compiled = kernel.warmup(*given, grid=grid)
        run = compiled.run  # loads the kernel
        words = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in given]
        hooks = (None, None, None)
        there = (*(*grid, 1, 1)[:3], stream.cuda_stream, compiled.function, compiled.packed_metadata, *hooks)
        found.append((partial(run, *there, *words), given))  # pointers keep nothing alive

    def queue() -> None:
        for launch, _ in found:
            launch()

    return queue


def _launches(
    rows: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    norm_eps: float,
    out: torch.Tensor,
) -> list[tuple[Any, tuple[int, ...], tuple[Any, ...]]]:
    """Kernels, grids and arguments of `compress`."""
    count, dim = out.shape
    (ratio, half), rope, requests = ape.shape, rope_cos.shape[1], len(starts)
    block = triton.next_power_of_2(requests)
    pool = (state, state.stride(0), len(state), table, table.shape[1], starts, cu_seqlens, requests)
    given = (rows, rows.stride(0), ape, *pool)
    finish = (norm_weight, rope_cos, rope_sin, norm_eps, out)
    if half > dim:
        return [(_compress, (count,), (*given, *finish, ratio, half, dim, rope, state.shape[1], block))]
    pooled = torch.empty((count, dim), dtype=torch.float32, device=out.device)
    return [
        (_pool, (count, dim // 32), (*given, pooled, ratio, half, dim, state.shape[1], block, 32)),
        (_finish, (count,), (pooled, starts, cu_seqlens, requests, *finish, ratio, dim, rope, block)),
    ]
