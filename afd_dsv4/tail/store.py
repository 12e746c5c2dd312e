# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Who owns which page: tails of requests, spares of workspace slots, and how they change hands.

Problem: a launch may not write a page that it also reads, so a request needs other pages for its new tail than it has
for its history, but only while the launch runs.
Way: every layer of every request owns exactly `tail_pages` pages, every slot exactly `spare_pages` a request: one
layer's worth. A launch that needs more pages than the request has idle takes spares and gives back as many pages of the
history it leaves; the next layer of the same execution takes those. Counts never change, so nothing can run dry and
nothing is ever searched for. Per layer this is a shift by one, so all layers are planned in one array operation; and
there are few ways in which a request's pages move, so each is worked out once, and all requests are planned in the same
operation, whatever they do.
Not here: when a page that changed hands may be touched. The lease orders that (`workspace/`): an execution's launches
follow each other, and it follows the last execution that had its requests' seats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Mapping as ReadOnly
from dataclasses import dataclass
from typing import NewType

import numpy as np

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.tables import (
    NO_COLUMN,
    Int32Array,
    Int64Array,
    Mapping,
    PageList,
    RequestChunk,
    RequestId,
    map_chunks,
)

SlotIndex = NewType("SlotIndex", int)
SeatIndex = NewType("SeatIndex", int)


class TailFull(RuntimeError):
    """More requests than tails."""


class UnknownRequest(KeyError):
    """A request that holds no seat."""

    def __str__(self) -> str:
        return str(self.args[0])


class TailVoid(RuntimeError):
    """A request's tail is not what its position says: some launches of its last execution never happened."""


class UnknownPosition(ValueError):
    """A chunk starts where the request's tail does not end: its history is not there."""


@dataclass(frozen=True)
class StepPlan:
    """One planned execution.

    Attributes:
        lists: page lists by ratio.
        continued: seats whose request goes on.
        taken: seats whose request is new: what was there before has ended.
        holders: what the store knows of the requests, as they were when this was planned.
    """

    lists: dict[int, PageList]
    continued: tuple[SeatIndex, ...]
    taken: tuple[SeatIndex, ...]
    holders: tuple[_Seat, ...] = ()

    @property
    def seats(self) -> tuple[SeatIndex, ...]:
        """All seats of the execution."""
        return self.continued + self.taken

    def void(self, why: str) -> None:
        """Declare the tails unreadable: launches that should have written them did not happen.

        Means these requests as planned: one that has ended and started anew since then is another.
        """
        for holder in self.holders:
            holder.void = holder.void or why  # what came first is the cause

    def written_by(self, generation: int) -> None:
        """Take down which forward writes these tails; what only reads them says nothing."""
        for holder in self.holders:
            holder.generation = generation


@dataclass(eq=False)
class _Seat:
    """What the store knows of one request."""

    index: SeatIndex
    low: int = 0  # the next start lies in [low, high]
    high: int = 0
    void: str | None = None  # why the tail must not be read
    generation: int = 0  # which forward wrote the tail last; 0 for none


class _Moves:
    """Ways in which the pages of a request move, each worked out when it first occurs.

    A way is where in the tail the history lies, how many pages it has, how many of them are left, and how many fresh
    ones are wanted. Indices are into a request's pages in one layer: its own, then the spares it takes, then nothing.
    """

    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._known: dict[tuple[int, ...], int] = {}  # way -> row of the arrays
        self.taken = np.empty(0, np.int64)  # how many spares
        self.given = np.empty((0, pages), np.int64)  # which pages take the place of the spares taken
        self.owned = np.empty((0, pages), np.int64)  # which are its own afterwards
        self.listed = np.empty((0, 2 * pages), np.int64)  # history, then fresh pages

    def find(self, first: Int64Array, history: Int64Array, left: Int64Array, fresh: Int64Array) -> list[int]:
        """The way of every request, as rows of the arrays."""
        ways = list(zip(first.tolist(), history.tolist(), left.tolist(), fresh.tolist(), strict=True))
        for way in set(ways) - self._known.keys():
            self._add(*way)
            self._known[way] = len(self.taken) - 1
        return [self._known[way] for way in ways]

    def _add(self, first: int, history: int, left: int, fresh: int) -> None:
        pages = self._pages
        read = [*range(first, first + history)]
        idle = [page for page in range(pages) if page not in read]
        taken = max(0, fresh - len(idle))
        new = idle[:fresh] + [pages + spare for spare in range(taken)]
        self.taken = np.append(self.taken, taken)
        self.given = np.vstack([self.given, read[:taken] + [0] * (pages - taken)])
        self.owned = np.vstack([self.owned, read[left:] + new + read[taken:left] + idle[fresh:]])
        self.listed = np.vstack([self.listed, (read + new + [2 * pages] * 2 * pages)[: 2 * pages]])


class _Pool:
    """Page ids of one ratio: int32 arrays, each id in exactly one place."""

    def __init__(self, shape: TailShape, max_num_seqs: int, slots: int) -> None:
        self.shape = shape
        self.pages = shape.pool_pages(max_num_seqs, slots)
        ids = np.arange(1, self.pages, dtype=np.int32)  # page 0 is the null page and belongs to nobody
        tails = shape.layers * max_num_seqs * shape.tail_pages
        self.owned = ids[:tails].reshape(shape.layers, max_num_seqs, shape.tail_pages).copy()
        self.spare = ids[tails:].reshape(slots, max_num_seqs, shape.spare_pages).copy()
        self.mapped = np.zeros((2, max_num_seqs), np.int64)  # of every seat's tail, first logical page and end
        self._moves = _Moves(shape.tail_pages)

    def move(self, mapping: Mapping, seats: Int64Array, slot: SlotIndex) -> tuple[Int32Array, Int32Array]:
        """Hand over the pages of an execution's requests in all layers.

        Args:
            mapping: logical pages of the chunks.
            seats: the requests' seats, each once. A request's place among them says which spares of the slot it takes.
            slot: the slot whose spares are used.

        Returns:
            Table columns of each request's history, then of its fresh pages, int32 [requests, list_ids], -1
            behind them; and their ids, int32 [layers, requests, list_ids], 0 behind them.
        """
        shape, requests = self.shape, len(seats)
        spares = self.spare[slot, :requests]
        (first, end), (tail, tail_end) = mapping.history, mapping.tail
        history, fresh = end - first, np.maximum(tail, end)
        at = np.where(history > 0, first - self.mapped[0, seats], 0)  # where nothing is read, it does not matter where
        ways = self._moves.find(at, history, np.minimum(tail, end) - first, tail_end - fresh)
        self.mapped[:, seats] = mapping.tail

        own, width = shape.tail_pages, 2 * shape.tail_pages + 1
        pages = np.zeros((shape.layers, requests, width), np.int32)  # of each request: its own, spares taken, nothing
        pages[:, :, :own] = self.owned[:, seats]
        flat, begins = pages.reshape(shape.layers, -1), np.arange(requests)[:, None] * width
        taken = self._moves.taken[ways]
        if taken.any():
            given = flat.take(begins + self._moves.given[ways], axis=1)
            used = np.arange(own) < taken[:, None]
            pages[:, :, own:-1] = np.concatenate([spares[None], given[:-1]])
            spares[used] = given[-1][used]
        self.owned[:, seats] = flat.take(begins + self._moves.owned[ways], axis=1)
        listed, place = self._moves.listed[ways], np.arange(shape.list_ids)
        logical = place + np.where(place < history[:, None], first[:, None], (fresh - history)[:, None])
        columns = np.where(listed < width - 1, logical - mapping.first_column[:, None], NO_COLUMN)
        return columns.astype(np.int32), flat.take(begins + listed, axis=1)


class TailStore:
    """Pages of all requests and slots of one worker.

    Args:
        shapes: one per ratio (`workspace.sizing.tail_shapes`).
        max_num_seqs: most requests at once.
        slots: workspace slots.
    """

    def __init__(self, shapes: ReadOnly[int, TailShape], *, max_num_seqs: int, slots: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._pools = {ratio: _Pool(shape, max_num_seqs, slots) for ratio, shape in shapes.items()}
        self._seats: dict[RequestId, _Seat] = {}
        # First in, first out: a seat rests as long as possible, so its last lease has most likely passed.
        self._free = deque(SeatIndex(index) for index in range(max_num_seqs))

    def pages(self, ratio: int) -> int:
        """Pages of one pool, the null page included."""
        return self._pools[ratio].pages

    def seat(self, request: RequestId) -> SeatIndex | None:
        """The seat that a request holds, or None."""
        found = self._seats.get(request)
        return found.index if found else None

    def free_seats(self) -> tuple[SeatIndex, ...]:
        """Seats that no request holds."""
        return tuple(self._free)

    def plan(
        self,
        chunks: Sequence[RequestChunk],
        slot: SlotIndex,
        *,
        usable: Callable[[SeatIndex], bool] = lambda _seat: True,
        in_doubt: Callable[[SeatIndex], bool] = lambda _seat: False,
    ) -> StepPlan:
        """Plan one execution: pages change owner now, on the host, in the order in which executions are planned.

        A request seen for the first time must start at 0, unless `seat_at` seated it. Nothing is changed unless all
        chunks are valid.

        Args:
            chunks: at most one a request, in batch order.
            slot: the workspace slot of the execution.
            usable: whether a free seat may be taken now.
            in_doubt: whether one that is not will never be.

        Raises:
            TailFull: more new requests than seats that may be taken.
            TailVoid: a request whose tail was declared void.
            UnknownPosition: a start outside what the request's last chunk left open.
        """
        known = [self._seats.get(chunk.request) for chunk in chunks]
        if len({chunk.request for chunk in chunks}) != len(chunks):
            requests = [chunk.request for chunk in chunks]
            twice = sorted({request for request in requests if requests.count(request) > 1})
            raise ValueError(f"two chunks in one execution for {twice}; give one chunk a request")
        free = self._usable(known.count(None), usable, in_doubt)
        if any(held is not None and held.void is not None for held in known):
            self.refuse_void(chunks)
        for chunk, held in zip(chunks, known, strict=True):
            low, high = (held.low, held.high) if held is not None else (0, 0)
            if not low <= chunk.start <= high:
                raise UnknownPosition(
                    f"request {chunk.request!r} starts at {chunk.start}, its tail allows [{low}, {high}]; "
                    f"a request without a tail starts at 0"
                )
        mappings = {ratio: map_chunks(pool.shape, chunks) for ratio, pool in self._pools.items()}
        seats: list[_Seat] = []
        continued: list[SeatIndex] = []
        taken: list[SeatIndex] = []
        for chunk, held in zip(chunks, known, strict=True):
            seat = held or _Seat(free.pop(0))
            (continued if held else taken).append(seat.index)
            seat.low, seat.high = chunk.low, chunk.end
            seats.append(seat)
            if not held:
                self._free.remove(seat.index)
                self._seats[chunk.request] = seat
        indices = np.array([seat.index for seat in seats], np.int64)
        lists = {}
        for ratio, pool in self._pools.items():
            columns, ids = pool.move(mappings[ratio], indices, slot)
            starts = mappings[ratio].start.astype(np.int32)
            lists[ratio] = PageList(pool.shape, tuple(chunks), columns, ids, starts)
        return StepPlan(lists=lists, continued=tuple(continued), taken=tuple(taken), holders=tuple(seats))

    def seat_at(
        self,
        request: RequestId,
        low: int,
        high: int,
        *,
        usable: Callable[[SeatIndex], bool] = lambda _seat: True,
        in_doubt: Callable[[SeatIndex], bool] = lambda _seat: False,
    ) -> StepPlan:
        """Seat a request whose rows come from elsewhere: it goes on in `[low, high]`, and its tail is mapped for that.

        Whoever calls this writes the rows of `TailShape.live(low, high)` to the pages of `tail` before anything reads
        them, or declares the plan void. No page changes owner.

        Args:
            request: new here.
            low: the smallest position at which it may go on.
            high: the largest.
            usable: see `plan`.
            in_doubt: see `plan`.

        Returns:
            A plan without lists, of the seat taken.

        Raises:
            ValueError: the request has a seat, or `high - low` is more drafts than the tails are sized for.
            TailFull: no seat may be taken.
        """
        if request in self._seats:
            raise ValueError(f"request {request!r} has a tail here; end it before another is restored in its place")
        for ratio, pool in self._pools.items():
            if not 0 <= high - low <= pool.shape.drafts:
                raise ValueError(
                    f"request {request!r} is to go on in [{low}, {high}]; tails of ratio {ratio} are sized for "
                    f"{pool.shape.drafts} drafts"
                )
        seat = _Seat(self._usable(1, usable, in_doubt)[0], low, high)
        for pool in self._pools.values():
            pages = pool.shape.pages(pool.shape.live(low, high))
            pool.mapped[:, seat.index] = pages.start, pages.stop
        self._free.remove(seat.index)
        self._seats[request] = seat
        return StepPlan(lists={}, continued=(), taken=(seat.index,), holders=(seat,))

    def hold(self, request: RequestId) -> tuple[StepPlan, int, int, int]:
        """What reading a request's tail needs.

        Returns:
            A plan without lists that changes nothing, the smallest and the largest position at which the request may go
            on, and the generation that wrote the tail last.

        Raises:
            UnknownRequest: the request holds no seat.
            TailVoid: its tail was declared void.
        """
        seat = self._find(request)
        if seat.void is not None:
            raise TailVoid(f"request {request!r} lost its tail: {seat.void}; end it and start it anew")
        plan = StepPlan(lists={}, continued=(seat.index,), taken=(), holders=(seat,))
        return plan, seat.low, seat.high, seat.generation

    def whose(self, ratio: int, page: int) -> str:
        """Who owns a page now, in words; for errors and debugging, since it searches.

        Args:
            ratio: of the pool.
            page: physical id.
        """
        pool = self._pools[ratio]
        if (found := np.argwhere(pool.owned == page)).size:
            layer, seat, _ = found[0].tolist()
            holders = [request for request, held in self._seats.items() if held.index == seat]
            return f"tail of {f'request {holders[0]!r}' if holders else f'free seat {seat}'}, layer {layer} of the pool"
        if (found := np.argwhere(pool.spare == page)).size:
            return f"spare of workspace slot {found[0][0]}"
        return "null page"

    def _usable(
        self, new: int, usable: Callable[[SeatIndex], bool], in_doubt: Callable[[SeatIndex], bool]
    ) -> list[SeatIndex]:
        """Free seats that may be taken now, `new` of them at least. Not looked for where `new` is 0."""
        free = [seat for seat in self._free if usable(seat)] if new else []
        if new > len(free):
            lost = sum(map(in_doubt, self._free))
            behind = len(self._free) - len(free) - lost
            raise TailFull(
                f"{new} new requests, {len(free)} free of {self.max_num_seqs} tails, {behind} more behind open "
                f"executions, {lost} in doubt and never to be taken again; finish those, end requests or raise "
                f"max_num_seqs" + (", or restart the worker" if lost else "")
            )
        return free

    def refuse_void(self, chunks: Sequence[RequestChunk]) -> None:
        """Refuse requests whose tails must not be read, before anything is taken for them.

        Raises:
            TailVoid: a request whose tail was declared void.
        """
        for chunk in chunks:
            known = self._seats.get(chunk.request)
            if known is not None and known.void is not None:
                raise TailVoid(f"request {chunk.request!r} lost its tail: {known.void}; end it and start it anew")

    def end(self, request: RequestId) -> SeatIndex:
        """Give back a request's seat. Its pages stay with the seat, whose next request waits for the seat's last lease.

        Raises:
            UnknownRequest: the request holds no seat.
        """
        seat = self._find(request)
        del self._seats[request]
        self._free.append(seat.index)
        return seat.index

    def tail(self, request: RequestId, ratio: int) -> tuple[range, Int32Array]:
        """The logical tail pages of a request and their ids, int32 [layers, pages].

        Raises:
            UnknownRequest: the request holds no seat.
        """
        seat, pool = self._find(request).index, self._pools[ratio]
        mapped = range(*pool.mapped[:, seat].tolist())
        return mapped, pool.owned[:, seat, : len(mapped)].copy()

    def _find(self, request: RequestId) -> _Seat:
        if request not in self._seats:
            held = f"{len(self._seats)} of {self.max_num_seqs} seats are held"
            raise UnknownRequest(f"request {request!r} has no tail ({held}); it was ended, or never planned")
        return self._seats[request]

    def remember(self) -> Callable[[], None]:
        """Take down who has which pages and goes on where; what is returned puts it back, as often as it is called.

        Plans made in between are worth nothing from then on. A tail that was declared void stays void, and a request
        that has ended stays ended, also where a plan has seated another of its name. For `execution/pcp.py`, which says
        when this may be done.
        """
        seats = [(request, seat, seat.low, seat.high) for request, seat in self._seats.items()]
        free = tuple(self._free)
        pages = [(pool, pool.owned.copy(), pool.spare.copy(), pool.mapped.copy()) for pool in self._pools.values()]

        def put_back() -> None:
            stay = {request: seat for request, seat, _, _ in seats if self._seats.get(request) is seat}
            ended = [seat.index for request, seat, _, _ in seats if request not in stay]
            self._seats = stay
            for _, seat, low, high in seats:
                seat.low, seat.high = low, high
            self._free = deque((*free, *ended))
            for pool, owned, spare, mapped in pages:
                pool.owned[:], pool.spare[:], pool.mapped[:] = owned, spare, mapped

        return put_back

    def owners(self, ratio: int) -> Int32Array:
        """Every id that somebody owns, sorted: a permutation of 1 .. pages - 1, whatever was planned."""
        pool = self._pools[ratio]
        return np.sort(np.concatenate([pool.owned.ravel(), pool.spare.ravel()]))
