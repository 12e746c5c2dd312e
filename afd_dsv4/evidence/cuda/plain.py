# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a compressor launch does, in plain torch: which row goes where, what is saved, what a window becomes.

Problem: the kernels of `kernels.py` run on a CUDA device only, and what they mean must be testable on any machine.
Way: the same three functions without kernels, vectorised over rows; where the kernels cannot run, the operator runs on
these. `save` waits on the host (it selects rows), the kernels never do.
Not here: the projection, and the contract of the operator (`operator.py`); equal bits with `compressor/reference.py`,
whose exponential and order of sums are an NPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def windows(
    cu_seqlens: torch.Tensor, starts: torch.Tensor, ratio: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each of `rows` result rows is; results are packed request after request.

    Args:
        cu_seqlens: int32 [requests + 1].
        starts: int32 [requests].
        ratio: tokens per window.
        rows: of the result, those behind the last window included.

    Returns:
        Request, window within the request's sequence, and whether there is such a row; int64, int64, bool, [rows] each.
    """
    start, lengths = starts.long(), cu_seqlens.diff().long()
    counts = (start + lengths) // ratio - start // ratio
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=starts.device)
    request = torch.searchsorted(ends, row, right=True)
    there = request < len(starts)
    request = request.clamp(max=len(starts) - 1)
    return request, start[request] // ratio + row - (ends - counts)[request], there


def save(
    rows: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> None:
    """Save every row whose page is mapped; APE is added to the score half.

    Args:
        rows: float32 [tokens, 2 * half], projected: `[kv | score]`.
        ape: float32 [ratio, half].
        state: float32 [pages, page rows, 2 * half], changed in place; page 0 never is.
        table: int32 [requests, columns].
        starts: int32 [requests].
        cu_seqlens: int32 [requests + 1]; tokens behind its end are not looked at.
    """
    (ratio, half), page_rows = ape.shape, state.shape[1]
    token = torch.arange(int(cu_seqlens[-1]), device=rows.device)
    request = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    position = starts.long()[request] + token - cu_seqlens.long()[request]
    column = position // page_rows
    page = torch.where(
        column < table.shape[1], table[request, column.clamp(max=table.shape[1] - 1)].long(), torch.zeros_like(column)
    )
    mapped = (page > 0) & (page < len(state))
    token, position, page = token[mapped], position[mapped], page[mapped]
    saved = rows[token].clone()
    saved[:, half:] += ape[position % ratio]
    state[page, position % page_rows] = saved


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
    """Pool, norm and rotate every window that ends in the launch.

    Rows before a request's start are read from `state`, whatever page the table names, page 0 too; a page outside the
    pool makes the window NaN. Arguments as of `save`, and:

    Args:
        norm_weight: [D].
        rope_cos: [result rows, rope dim], every angle twice side by side.
        rope_sin: the same.
        norm_eps: added to the mean square.
        out: [result rows, D], written; rows behind the last window are not.
    """
    (ratio, half), page_rows, dim = ape.shape, state.shape[1], norm_weight.shape[0]
    request, window, there = windows(cu_seqlens, starts, ratio, len(out))
    request, window = request[there], window[there]
    start, first = starts.long()[request][:, None], cu_seqlens.long()[request][:, None]
    member = torch.arange(ratio * half // dim, device=rows.device)
    if half == dim:
        position, left = window[:, None] * ratio + member, torch.zeros_like(member)
    else:  # interleaved: left half of the row a window before, right half of the own row
        position = (window[:, None] - 1 + member % 2) * ratio + member // 2
        left = member % 2 * dim
    column = position.clamp(min=0) // page_rows
    page = torch.where(
        column < table.shape[1], table[request[:, None], column.clamp(max=table.shape[1] - 1)].long(), len(state)
    )
    inside = (page >= 0) & (page < len(state))
    fresh = position >= start
    ours = rows[(first + position - start).clamp(0, max(len(rows) - 1, 0))].clone()
    ours[..., half:] += ape[position % ratio]
    theirs = state[torch.where(inside, page, 0), position.clamp(min=0) % page_rows]
    theirs = torch.where(inside[..., None], theirs, torch.nan)
    row = torch.where(fresh[..., None], ours, theirs)
    at = left[:, None] + torch.arange(dim, device=rows.device)
    at = at.expand(len(window), -1, -1)
    missing = (position < 0)[..., None]
    kv = torch.where(missing, 0.0, row.gather(2, at))
    score = torch.where(missing, -torch.inf, row.gather(2, half + at))
    pooled = (torch.softmax(score, dim=1) * kv).sum(1)
    normed = pooled / (pooled.square().mean(-1, keepdim=True) + norm_eps).sqrt() * norm_weight.float()
    rope = rope_cos.shape[1]
    cos, sin = rope_cos[: len(out)][there].float(), rope_sin[: len(out)][there].float()
    even, odd = normed[:, dim - rope :: 2], normed[:, dim - rope + 1 :: 2]
    turned = torch.stack(
        [even * cos[:, ::2] - odd * sin[:, ::2], odd * cos[:, 1::2] + even * sin[:, 1::2]], dim=-1
    ).flatten(1)
    out[there] = torch.cat([normed[:, : dim - rope], turned], dim=1).to(out.dtype)


def prepared(stream: Any, *arguments: Any) -> Callable[[], None]:
    """`compress` with all of its arguments, to be queued on a stream again and again."""
    module: Any = torch.get_device_module(arguments[0].device)

    def queue() -> None:
        with module.stream(stream):
            compress(*arguments)

    return queue
