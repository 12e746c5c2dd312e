# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Cutting a batch into uBatches at tokens, where a request may fall on both sides.

The part before a cut ends where the part behind it starts, so the later execution continues the earlier one's tail:
plan them in this order, and launch each layer of the earlier before the same layer of the later (`forward.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from afd_dsv4.tail.tables import RequestChunk


def cut(chunks: Sequence[RequestChunk], tokens: int) -> tuple[tuple[RequestChunk, ...], tuple[RequestChunk, ...]]:
    """Split a packed batch behind its first `tokens` tokens; either side may be empty.

    Raises:
        ValueError: a cut outside the batch, or one that leaves only drafts of a request behind it: at least one row of
            a part must stay, whatever is accepted.
    """
    total = sum(chunk.tokens for chunk in chunks)
    if not 0 <= tokens <= total:
        raise ValueError(f"cut after {tokens} tokens of a batch of {total}; choose 0 to {total}")
    first, second = [], []
    left = tokens
    for chunk in chunks:
        if left >= chunk.tokens:
            first.append(chunk)
        elif left <= 0:
            second.append(chunk)
        else:
            middle = chunk.start + left
            if chunk.drafts and middle >= chunk.low:
                raise ValueError(
                    f"cut at row {middle} of {chunk.request!r} leaves nothing but drafts [{chunk.low}, {chunk.end}) "
                    f"behind it; cut before row {chunk.low}"
                )
            first.append(replace(chunk, end=middle, drafts=0))
            second.append(replace(chunk, start=middle))
        left -= chunk.tokens
    return tuple(first), tuple(second)


def parts(chunks: Sequence[RequestChunk], tokens: Sequence[int]) -> tuple[tuple[RequestChunk, ...], ...]:
    """Split a packed batch into as many uBatches as there are numbers of tokens; any of them may be empty.

    Args:
        chunks: the batch, in its order.
        tokens: of each uBatch; together those of the batch.

    Raises:
        ValueError: other tokens than the batch has, or a cut that leaves only drafts behind it (`cut`).
    """
    total = sum(chunk.tokens for chunk in chunks)
    if sum(tokens) != total or any(count < 0 for count in tokens):
        raise ValueError(f"uBatches of {[*tokens]} tokens for a batch of {total}; they must make up the batch")
    found, rest = [], tuple(chunks)
    for count in tokens:
        part, rest = cut(rest, count)
        found.append(part)
    return tuple(found)


def cut_at(chunks: Sequence[RequestChunk], slices: Sequence[tuple[int, int]]) -> tuple[tuple[RequestChunk, ...], ...]:
    """`parts` for token slices, as planners give them.

    Args:
        chunks: the batch, in its order.
        slices: first token of each uBatch in the packed batch, and the one behind its last, without padding.

    Raises:
        ValueError: slices with a gap or an overlap, or see `parts`.
    """
    ends = [0, *(stop for _, stop in slices)]
    if [start for start, _ in slices] != ends[:-1]:
        raise ValueError(f"token slices {[*slices]} do not follow each other from token 0 on")
    return parts(chunks, [stop - start for start, stop in slices])
