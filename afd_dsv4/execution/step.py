# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""From what a scheduler says about one step to the chunks of an execution, and to the tails that end.

Problem: an engine names requests in three places (finished, preempted or resumed, scheduled), reorders its batch
between steps, and under asynchronous scheduling speaks of requests whose forwards are still in flight. A tail that is
ended too late runs the store dry; one that is continued at another position gives wrong rows without any error.
Way: everything goes by request id, never by batch row. A request owns a tail from its first chunk, which starts at 0,
or from the restore of a checkpoint, until it is finished, preempted or resumed, or begins at 0 again, which needs no
announcement; every later chunk starts where the last one ended, less rejected drafts. A step that breaks off leaves
tails that nobody may go on from.
Not here: whether the pages may be touched (`workspace/`), what is mapped (`tail/`), and where the numbers come from
(adapters). It imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from afd_dsv4.tail.tables import RequestChunk, RequestId


class ImpossibleStep(ValueError):
    """A step that contradicts those before it. Nothing of it was taken over."""


@dataclass(eq=False)
class _Next:
    """Where a request may go on: in [low, high]. One object for as long as it owns its tail."""

    low: int
    high: int


class Steps:
    """Which requests own a tail, and where each of them may go on."""

    def __init__(self) -> None:
        self._next: dict[RequestId, _Next] = {}
        self._lost: dict[RequestId, str] = {}  # of those, whose tails are not what their position says, and why

    def __len__(self) -> int:
        return len(self._next)

    def end(
        self, *, finished: Collection[str] = (), preempted: Collection[str] = (), resumed: Collection[str] = ()
    ) -> tuple[RequestId, ...]:
        """Take the ends of a step over; call it before `chunks`, and also for steps that schedule nothing.

        Args:
            finished: done or aborted since the last step. An id may be scheduled again in the same step: that is
                another request.
            preempted: lost its place; it comes back from position 0, if at all.
            resumed: comes back in this step. Its tail ends too, in case nobody said when it was preempted.

        Returns:
            Requests whose tails end now, in the order in which they were first scheduled.
        """
        return self._drop({*finished, *preempted, *resumed})

    def restarted(self, requests: Sequence[str], computed: Sequence[int]) -> tuple[RequestId, ...]:
        """Requests that begin at 0 again although nobody has said so. Their tails end; call it before `chunks`.

        Everything is computed anew, so this is right whoever took their blocks away (a reset of the cache, a pause).

        Args:
            requests: see `chunks`.
            computed: see `chunks`.
        """
        return self._drop({name for name, start in zip(requests, computed, strict=False) if start == 0})

    def restore(self, request: str, low: int, high: int) -> None:
        """Take over a request whose tail was restored from a checkpoint: its first chunk may start in `[low, high]`.

        Args:
            request: its id; it owns no tail here.
            low: the smallest position at which it may go on.
            high: the largest; more than `low` where an accept length was open.

        Raises:
            ImpossibleStep: it owns a tail, or low and high are no positions.
        """
        name = RequestId(request)
        if name in self._next:
            raise ImpossibleStep(f"request {request!r} has a tail here; end it before another is restored in its place")
        if not 0 <= low <= high:
            raise ImpossibleStep(f"request {request!r} is to go on in [{low}, {high}]; 0 <= low <= high must hold")
        self._next[name] = _Next(low, high)

    def lost(self, requests: Collection[str], why: str) -> None:
        """Take over that a step broke off: nobody may go on from the tails of these requests, which must start anew.

        Where a step broke off does not matter: with drafts, positions alone do not tell whether its rows were written.

        Args:
            requests: all that were scheduled in it.
            why: for whoever goes on all the same.
        """
        for name in requests:
            if (request := RequestId(name)) in self._next:  # whoever has no tail starts at 0 in any case
                self._lost.setdefault(request, why)

    def chunks(
        self,
        requests: Sequence[str],
        computed: Sequence[int],
        scheduled: Sequence[int],
        drafts: Mapping[str, int],
    ) -> tuple[RequestChunk, ...]:
        """The chunks of one forward, in batch order.

        Args:
            requests: ids in the order of the batch.
            computed: rows of each that are there already: where its chunk starts. Exact, rejected drafts taken off.
            scheduled: rows of each in this forward, drafts included.
            drafts: how many of them may be taken back; a request that is not named has none.

        Raises:
            ImpossibleStep: lists of unequal length, a request twice or without rows, nothing but drafts, a first
                chunk that does not start at 0, a later one that does not start where the request was left, or one
                behind a step that broke off.
        """
        if not len(requests) == len(computed) == len(scheduled):
            raise ImpossibleStep(
                f"{len(requests)} requests with {len(computed)} positions and {len(scheduled)} numbers of rows; "
                f"give one of each per request"
            )
        found: dict[RequestId, RequestChunk] = {}
        for name, start, rows in zip(requests, computed, scheduled, strict=True):
            request = RequestId(name)
            try:
                chunk = RequestChunk(request, int(start), int(start) + int(rows), drafts.get(name, 0))
            except ValueError as error:
                raise ImpossibleStep(str(error)) from error
            if request in found:
                raise ImpossibleStep(f"request {name!r} stands twice in one step; give one chunk a request")
            if request in self._lost:
                raise ImpossibleStep(f"request {name!r} lost its tail: {self._lost[request]}; end it and start it anew")
            left = self._next.get(request)
            if left is None and start != 0:
                raise ImpossibleStep(
                    f"request {name!r} is new and starts at {start}; its history was computed elsewhere (a prefix "
                    f"cache, a KV transfer, a preemption that nobody told), and there is no tail for it"
                )
            if left is not None and not left.low <= start <= left.high:
                raise ImpossibleStep(
                    f"request {name!r} goes on at {start}, and was left between {left.low} and {left.high}; positions "
                    f"must be exact on the host, with rejected drafts taken off"
                )
            found[request] = chunk
        for request, chunk in found.items():
            left = self._next.setdefault(request, _Next(0, 0))
            left.low, left.high = chunk.low, chunk.end
        return tuple(found.values())

    def remember(self) -> Callable[[], None]:
        """Take down where requests may go on; what is returned puts it back.

        What was lost since then stays lost, and what has ended stays ended, whatever was planned under its name since.
        """
        known, lost = [(request, left, left.low, left.high) for request, left in self._next.items()], dict(self._lost)

        def put_back() -> None:
            self._next = {request: left for request, left, _, _ in known if self._next.get(request) is left}
            for _, left, low, high in known:
                left.low, left.high = low, high
            self._lost = {request: why for request, why in {**self._lost, **lost}.items() if request in self._next}

        return put_back

    def _drop(self, gone: Set[str]) -> tuple[RequestId, ...]:
        ended = tuple(request for request in self._next if request in gone) if gone else ()
        for request in ended:
            del self._next[request]
            self._lost.pop(request, None)
        return ended
