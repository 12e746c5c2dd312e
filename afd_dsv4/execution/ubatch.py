# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Cutting a batch into uBatches at a token, where a request may fall on both sides.

The part before the cut ends where the part behind it starts, so the second execution continues the first one's tail:
plan them in this order, and launch each layer of the first before the same layer of the second.
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
