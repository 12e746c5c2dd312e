# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Where the afd executor cuts a launch, so that staging rows need not hold a whole chunk.

Problem: a tile must hold every row of the windows that end in it, or know where else they are.
Way: a launch is cut between requests and, within a request, behind the end of a window only. Then a tile has all rows
of its windows but those of the window before its first, which overlap asks for: the tile before hands those on. The
host knows every chunk's true start, so cuts cost the device nothing, and no window's result depends on them.
Not here: a launch whose chunks are not known, as in a graph. It is one tile (`workspace/sizing.py:tile_limit`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from afd_dsv4.tail.tables import RequestChunk


@dataclass(frozen=True)
class Tile:
    """Consecutive tokens of a launch.

    Attributes:
        first: packed index of the first token.
        tokens: how many.
        carry: rows of the tokens right before it that lie in front of its own.
    """

    first: int
    tokens: int
    carry: int


def cut_into_tiles(chunks: Sequence[RequestChunk], limit: int, ratio: int, *, overlap: bool) -> tuple[Tile, ...]:
    """Cut a launch into as few tiles as going from front to back gives.

    Args:
        chunks: its requests, packed in this order.
        limit: most tokens of a tile.
        ratio: tokens of a window.
        overlap: whether a window reads the one before.

    Raises:
        ValueError: there is to be a cut, and a tile might not hold a window, or not, apart from what it carries itself,
            the rows that the next one carries.
    """
    carry = ratio if overlap else 0
    least = ratio + 2 * carry  # so that rows that are carried lie apart from where they go: a cut leaves enough
    if limit < least and sum(chunk.tokens for chunk in chunks) > limit:
        raise ValueError(f"tiles of at most {limit} tokens for windows that need {least}; make them larger")
    cuts, first, end = [0], 0, 0  # of the tile, and of the requests before
    for chunk in chunks:
        begin, end = end, end + chunk.tokens
        while end - first > limit:
            last = first + limit
            # Behind the last window that ends in the tile; where none does, in front of the request.
            first = max(last - (chunk.start + last - begin) % ratio, begin)
            cuts.append(first)
    cuts.append(end)
    return tuple(
        Tile(first, end - first, carry if first else 0) for first, end in itertools.pairwise(cuts) if end > first
    )
