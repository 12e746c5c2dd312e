# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Tiles of a launch: every token once, no tile too large, and every row that a window of it reads at hand."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from afd_dsv4.compressor.tiles import Tile, cut_into_tiles
from afd_dsv4.tail.tables import RequestChunk, RequestId

REQUESTS = st.lists(st.tuples(st.integers(0, 600), st.integers(1, 900)), max_size=6)
KINDS = st.sampled_from([(4, True), (128, False)])


def chunks(requests: list[tuple[int, int]]) -> list[RequestChunk]:
    return [RequestChunk(RequestId(str(i)), start, start + tokens) for i, (start, tokens) in enumerate(requests)]


def missing_rows(tiles: tuple[Tile, ...], batch: list[RequestChunk], ratio: int, overlap: bool) -> list[str]:
    """Rows of windows that end in a tile which are neither before their request's start nor in the tile, the long way.

    The rows in front of a tile's own must have been in the tile before, as rows of its own or carried.
    """
    found, before = [], 0
    for index, tile in enumerate(tiles):
        held = range(tile.first - tile.carry, tile.first + tile.tokens)
        if index and 2 * tile.carry > tiles[index - 1].carry + tiles[index - 1].tokens:
            found.append(f"{tile} carries rows that lie where they are carried to")
        before = 0
        for chunk in batch:
            for token in range(max(before, tile.first), min(before + chunk.tokens, tile.first + tile.tokens)):
                position = chunk.start + token - before
                if (position + 1) % ratio:
                    continue
                oldest = max(position + 1 - (2 if overlap else 1) * ratio, chunk.start)
                for read in range(oldest, position + 1):
                    packed = before + read - chunk.start
                    if packed not in held:
                        found.append(f"{chunk.request} at {position} reads {read}, which {tile} has not")
            before += chunk.tokens
    return found


@given(requests=REQUESTS, kind=KINDS, limit=st.integers(128, 700))
@example(requests=[(3, 2000)], kind=(4, True), limit=128)
@example(requests=[(3, 2000)], kind=(4, True), limit=12)
@example(requests=[(0, 127), (127, 1000)], kind=(128, False), limit=128)
@example(requests=[(0, 125), (0, 3), (5, 300)], kind=(4, True), limit=128)
def test_tiles_hold_every_token_once_and_every_row_that_their_windows_read(requests, kind, limit):
    (ratio, overlap), batch = kind, chunks(requests)
    tiles = cut_into_tiles(batch, limit, ratio, overlap=overlap)
    packed = [token for tile in tiles for token in range(tile.first, tile.first + tile.tokens)]
    assert packed == list(range(sum(chunk.tokens for chunk in batch)))
    assert all(0 < tile.tokens <= limit for tile in tiles)
    assert missing_rows(tiles, batch, ratio, overlap) == []
    total = sum(chunk.tokens for chunk in batch)
    if total <= limit:
        assert tiles == ((Tile(0, total, 0),) if total else ())
    assert len(tiles) <= 1 + total // (limit - ratio + 1)


def test_a_cut_in_the_midst_of_a_window_and_a_tile_without_the_rows_before_it_are_seen():
    batch = chunks([(0, 256)])
    assert missing_rows((Tile(0, 127, 0), Tile(127, 129, 0)), batch, 128, False)
    assert missing_rows((Tile(0, 128, 0), Tile(128, 128, 0)), batch, 4, True)
    assert missing_rows((Tile(0, 126, 0), Tile(126, 130, 4)), batch, 4, True)
    assert missing_rows((Tile(0, 4, 0), Tile(4, 252, 4)), batch, 4, True)
    assert not missing_rows((Tile(0, 128, 0), Tile(128, 128, 4)), batch, 4, True)


@pytest.mark.parametrize(("limit", "ratio", "overlap"), [(127, 128, False), (11, 4, True)])
def test_tiles_that_may_not_hold_a_window_are_refused_unless_one_holds_all(limit, ratio, overlap):
    with pytest.raises(ValueError, match=f"tiles of at most {limit} tokens"):
        cut_into_tiles(chunks([(0, 300)]), limit, ratio, overlap=overlap)
    assert cut_into_tiles(chunks([(5, limit)]), limit, ratio, overlap=overlap) == (Tile(0, limit, 0),)
