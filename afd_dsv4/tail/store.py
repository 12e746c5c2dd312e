# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Who owns which page: tails of requests, spares of workspace slots, and how they change hands.

Problem: a launch may not write a page that it also reads, so a request needs other pages for its new tail than it has
for its history, but only while the launch runs.
Way: every layer of every request owns exactly `tail_pages` pages, every slot exactly `spare_pages` a request: one
layer's worth. A launch that needs more pages than the request has idle takes spares and gives back as many pages of the
history it leaves; the next layer of the same execution takes those. Counts never change, so nothing can run dry and
nothing is ever searched for. Per layer this is a shift by one, so all layers are planned in one array operation.
Not here: when a page that changed hands may be touched. The lease orders that (`workspace/`): an execution's launches
follow each other, and it follows the last execution that had its requests' seats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Mapping as ReadOnly
from dataclasses import dataclass, field
from typing import NewType

import numpy as np

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.tables import NO_COLUMN, Int32Array, Mapping, PageList, RequestChunk, RequestId, map_chunk

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


@dataclass
class _Seat:
    """What the store knows of one request."""

    index: SeatIndex
    low: int = 0  # the next start lies in [low, high]
    high: int = 0
    mapped: dict[int, range] = field(default_factory=dict)  # ratio -> logical pages of the tail
    void: str | None = None  # why the tail must not be read


class _Pool:
    """Page ids of one ratio: int32 arrays, each id in exactly one place."""

    def __init__(self, shape: TailShape, max_num_seqs: int, slots: int) -> None:
        self.shape = shape
        self.pages = shape.pool_pages(max_num_seqs, slots)
        ids = np.arange(1, self.pages, dtype=np.int32)  # page 0 is the null page and belongs to nobody
        tails = shape.layers * max_num_seqs * shape.tail_pages
        self.owned = ids[:tails].reshape(shape.layers, max_num_seqs, shape.tail_pages).copy()
        self.spare = ids[tails:].reshape(slots, max_num_seqs, shape.spare_pages).copy()

    def move(self, mapping: Mapping, mapped: range, seat: SeatIndex, slot: SlotIndex, lane: int) -> Int32Array:
        """Hand over the pages of one request in all layers; ids of history then fresh pages, int32 [layers, n].

        Args:
            mapping: logical pages of the chunk.
            mapped: logical pages of the present tail; page `mapped[i]` is `owned[:, seat, i]`.
            seat: the request's seat.
            slot: the slot whose spares are used.
            lane: the request's place in the batch, which is its lane of spares.
        """
        old = self.owned[:, seat, :].copy()
        place = {page: index for index, page in enumerate(mapped)}
        history = [place[page] for page in mapping.history]
        kept = [place[page] for page in mapping.kept]
        left = [place[page] for page in mapping.left]
        idle = [index for index in range(old.shape[1]) if index not in history]
        fresh = len(mapping.fresh)
        own, taken = idle[:fresh], max(0, fresh - len(idle))
        given, rest = left[:taken], left[taken:] + idle[fresh:]

        spares = np.empty((old.shape[0], taken), np.int32)
        spares[0] = self.spare[slot, lane, :taken]
        spares[1:] = old[:-1, given]
        self.spare[slot, lane, :taken] = old[-1, given]
        new = np.concatenate([old[:, own], spares], axis=1)
        self.owned[:, seat, :] = np.concatenate([old[:, kept], new, old[:, rest]], axis=1)
        return np.concatenate([old[:, history], new], axis=1)


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

    def plan(
        self,
        chunks: Sequence[RequestChunk],
        slot: SlotIndex,
        *,
        usable: Callable[[SeatIndex], bool] = lambda _seat: True,
        in_doubt: Callable[[SeatIndex], bool] = lambda _seat: False,
    ) -> StepPlan:
        """Plan one execution: pages change owner now, on the host, in the order in which executions are planned.

        A request seen for the first time must start at 0. Nothing is changed unless all chunks are valid.

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
        requests = [chunk.request for chunk in chunks]
        if len(set(requests)) != len(requests):
            twice = sorted({request for request in requests if requests.count(request) > 1})
            raise ValueError(f"two chunks in one execution for {twice}; give one chunk a request")
        new = [chunk for chunk in chunks if chunk.request not in self._seats]
        free = [seat for seat in self._free if usable(seat)] if new else []
        if len(new) > len(free):
            lost = sum(map(in_doubt, self._free))
            behind = len(self._free) - len(free) - lost
            raise TailFull(
                f"{len(new)} new requests, {len(free)} free of {self.max_num_seqs} tails, {behind} more behind open "
                f"executions, {lost} in doubt and never to be taken again; finish those, end requests or raise "
                f"max_num_seqs" + (", or restart the worker" if lost else "")
            )
        self.refuse_void(chunks)
        for chunk in chunks:
            known = self._seats.get(chunk.request, _Seat(SeatIndex(-1)))
            if not known.low <= chunk.start <= known.high:
                raise UnknownPosition(
                    f"request {chunk.request!r} starts at {chunk.start}, its tail allows [{known.low}, {known.high}]; "
                    f"a request without a tail starts at 0"
                )
        mappings = {ratio: [map_chunk(pool.shape, chunk) for chunk in chunks] for ratio, pool in self._pools.items()}
        for chunk in new:
            self._free.remove(free[0])
            self._seats[chunk.request] = _Seat(free.pop(0))
        seats = [self._seats[request] for request in requests]
        lists = {ratio: self._list(ratio, chunks, seats, mappings[ratio], slot) for ratio in self._pools}
        for chunk, seat in zip(chunks, seats, strict=True):
            seat.low, seat.high = chunk.low, chunk.end
        taken = {chunk.request for chunk in new}
        return StepPlan(
            lists=lists,
            continued=tuple(self._seats[request].index for request in requests if request not in taken),
            taken=tuple(self._seats[request].index for request in requests if request in taken),
            holders=tuple(seats),
        )

    def refuse_void(self, chunks: Sequence[RequestChunk]) -> None:
        """Refuse requests whose tails must not be read, before anything is taken for them.

        Raises:
            TailVoid: a request whose tail was declared void.
        """
        for chunk in chunks:
            known = self._seats.get(chunk.request)
            if known is not None and known.void is not None:
                raise TailVoid(f"request {chunk.request!r} lost its tail: {known.void}; end it and start it anew")

    def _list(
        self, ratio: int, chunks: Sequence[RequestChunk], seats: list[_Seat], mappings: list[Mapping], slot: SlotIndex
    ) -> PageList:
        pool = self._pools[ratio]
        shape = pool.shape
        columns = np.full((len(chunks), shape.list_ids), NO_COLUMN, np.int32)
        ids = np.zeros((shape.layers, len(chunks), shape.list_ids), np.int32)
        for lane, (seat, mapping) in enumerate(zip(seats, mappings, strict=True)):
            moved = pool.move(mapping, seat.mapped.get(ratio, range(0)), seat.index, slot, lane)
            pages = [*mapping.history, *mapping.fresh]
            columns[lane, : len(pages)] = [page - mapping.first_column for page in pages]
            ids[:, lane, : len(pages)] = moved
            seat.mapped[ratio] = mapping.tail
        starts = np.array([mapping.start for mapping in mappings], np.int32)
        return PageList(shape=shape, chunks=tuple(chunks), columns=columns, ids=ids, starts=starts)

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
        seat = self._find(request)
        mapped = seat.mapped.get(ratio, range(0))
        return mapped, self._pools[ratio].owned[:, seat.index, : len(mapped)].copy()

    def _find(self, request: RequestId) -> _Seat:
        if request not in self._seats:
            held = f"{len(self._seats)} of {self.max_num_seqs} seats are held"
            raise UnknownRequest(f"request {request!r} has no tail ({held}); it was ended, or never planned")
        return self._seats[request]

    def owners(self, ratio: int) -> Int32Array:
        """Every id that somebody owns, sorted: a permutation of 1 .. pages - 1, whatever was planned."""
        pool = self._pools[ratio]
        return np.sort(np.concatenate([pool.owned.ravel(), pool.spare.ravel()]))
