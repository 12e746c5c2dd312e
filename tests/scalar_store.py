# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Page lists the long way: one request, one page at a time, in lists. What the arrays of `tail.store` must equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.tables import RequestChunk, RequestId


@dataclass(frozen=True)
class ScalarList:
    """A page list of one ratio.

    Attributes:
        columns: of each request, of each page.
        ids: of each layer, each request, each page.
        starts: re-based.
    """

    columns: list[list[int]]
    ids: list[list[list[int]]]
    starts: list[int]


@dataclass
class ScalarPool:
    """Pages of one ratio: who owns which, and whose tail is where."""

    shape: TailShape
    owned: list[list[list[int]]]  # [layer][seat]
    spare: list[list[list[int]]]  # [slot][nth request]
    mapped: dict[int, list[int]] = field(default_factory=dict)  # seat -> logical pages of its tail

    @classmethod
    def new(cls, shape: TailShape, max_num_seqs: int, slots: int) -> ScalarPool:
        """Ids from 1 on: layer by layer, seat by seat; then slot by slot, request by request."""
        ids = iter(range(1, shape.pool_pages(max_num_seqs, slots)))

        def pages(groups: int, count: int) -> list[list[list[int]]]:
            return [[[next(ids) for _ in range(count)] for _ in range(max_num_seqs)] for _ in range(groups)]

        return cls(shape, pages(shape.layers, shape.tail_pages), pages(slots, shape.spare_pages))

    def owners(self) -> list[int]:
        """Every id that somebody owns, sorted."""
        return sorted(page for part in (self.owned, self.spare) for group in part for pages in group for page in pages)

    def move(self, chunk: RequestChunk, seat: int, slot: int, nth: int) -> tuple[list[int], list[list[int]], int]:
        """Columns, ids by layer, and re-based start of one request, whose pages change hands layer by layer."""
        shape = self.shape
        base = shape.base(chunk.start)
        history = [*shape.pages(shape.need(chunk.start))]
        tail = [*shape.pages(shape.live(chunk.low, chunk.end))]
        kept = [page for page in history if page in tail]
        left = [page for page in history if page not in tail]
        fresh = [page for page in tail if page not in history]
        place = {page: index for index, page in enumerate(self.mapped.get(seat, []))}
        idle = [index for index in range(shape.tail_pages) if index not in [place[page] for page in history]]
        own, taken = idle[: len(fresh)], max(0, len(fresh) - len(idle))
        spares, listed = self.spare[slot][nth], []
        for layer in range(shape.layers):
            old = self.owned[layer][seat]
            new = [old[index] for index in own] + spares[:taken]
            listed.append([old[place[page]] for page in history] + new)
            spares[:taken] = [old[place[page]] for page in left[:taken]]
            rest = [old[place[page]] for page in left[taken:]] + [old[index] for index in idle[len(fresh) :]]
            self.owned[layer][seat] = [old[place[page]] for page in kept] + new + rest
        self.mapped[seat] = tail
        return [page - base // shape.page_rows for page in (*history, *fresh)], listed, chunk.start - base


class ScalarStore:
    """Plans without checking anything; ends as the store does, so that requests get the same seats."""

    def __init__(self, shapes: Mapping[int, TailShape], *, max_num_seqs: int, slots: int) -> None:
        self.pools = {ratio: ScalarPool.new(shape, max_num_seqs, slots) for ratio, shape in shapes.items()}
        self.seats: dict[RequestId, int] = {}
        self.free = [*range(max_num_seqs)]

    def plan(self, chunks: Sequence[RequestChunk], slot: int) -> dict[int, ScalarList]:
        """Page lists by ratio."""
        for chunk in chunks:
            if chunk.request not in self.seats:
                self.seats[chunk.request] = seat = self.free.pop(0)
                for pool in self.pools.values():
                    pool.mapped.pop(seat, None)
        lists = {}
        for ratio, pool in self.pools.items():
            moved = [pool.move(chunk, self.seats[chunk.request], slot, nth) for nth, chunk in enumerate(chunks)]
            ids = [[ids[layer] for _, ids, _ in moved] for layer in range(pool.shape.layers)]
            lists[ratio] = ScalarList([columns for columns, _, _ in moved], ids, [start for _, _, start in moved])
        return lists

    def end(self, request: RequestId) -> None:
        """Give back its seat."""
        self.free.append(self.seats.pop(request))
