# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A rank of the soak, and what is planted in its steps: the fault, and the outcome that it must have.

A fault is planted where `points` says, and its outcome asserted at once: which error, naming what; which leases in
which state; whose tails are void. How a rank ends is in `ends.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from afd_dsv4.execution.boundary import BoundaryViolation
from afd_dsv4.execution.cam import CamError, CamForward
from afd_dsv4.execution.forward import BrokenOff
from afd_dsv4.geometry import CompressorKind
from afd_dsv4.tail.store import TailVoid, UnknownPosition
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted
from afd_dsv4.workspace.identity import ExecutionId
from afd_dsv4.workspace.lease import LeaseState
from tests.afd import connectors
from tests.afd.judge import Lines, Totals, said
from tests.afd.points import Mode, Planted, Point
from tests.afd.rank import SEATS, Rank
from tests.afd.wire import WrongPayload

#: Which launches go to the auxiliary stream, by kind and uBatch.
APART: dict[str, Callable[[CompressorKind, int], bool]] = {
    "indexer": lambda kind, _: kind is CompressorKind.C4_INDEXER,
    "c128": lambda kind, _: kind is CompressorKind.C128,
    "uBatch 0": lambda _, ubatch: ubatch == 0,
}


class Faults:
    """One rank, and a batch for each of its forwards.

    Args:
        totals: where to note what is found.
        mode: of the rank.
        rng: decides everything but the order in which streams advance.
        lines: what is logged.
    """

    def __init__(self, totals: Totals, mode: Mode, rng: random.Random, lines: Lines) -> None:
        self.totals, self.mode, self.rng, self.lines = totals, mode, rng, lines
        self.rank = Rank(mode, split=rng.choice(["token", "request"]), sequence_parallel=rng.random() < 0.3)
        self.over = False
        apart = rng.choice(["", "", "indexer", "c128", "uBatch 0"])
        if apart:
            self.rank.model.auxiliary = self.rank.auxiliary, APART[apart]

    # In a step

    def plant(self, point: Point) -> bool:
        """Plant a point, and see its outcome. Returns whether it was hit; `over` tells whether the rank is lost."""
        special = {
            Point.EXHAUSTED: self._exhausted,
            Point.CANCEL_BETWEEN: self._cancel_between,
            Point.CANCEL_INSIDE: self._cancel_inside,
            Point.IDLE: self._idle,
        }.get(point)
        if special is not None:
            special()
            return True
        return self._broken(point)

    def _broken(self, point: Point) -> bool:
        rank, totals = self.rank, self.totals
        chunks = self.batch()
        if self.mode is not Mode.SYNC and sum(chunk.tokens for chunk in chunks) < 2:
            return False
        quarantined, logged = rank.runtime.arena.counters.quarantined, len(self.lines.found)
        expected: tuple[type[BaseException], str] = Planted, f"planted at point {point.number}:"
        if point is Point.WORKSPACE_SENT:
            expected = BoundaryViolation, "the pool of"
            rank.tampering = self._tamper(lambda hidden, more: (self._workspace(), more))
        elif point is Point.WRONG_SHAPE:
            expected = WrongPayload, "hidden_states"
            rank.tampering = self._tamper(lambda hidden, more: (hidden[:0], more))
        else:
            once = point is Point.BEFORE_BEGIN or (self.mode is Mode.SYNC and "UPLOAD" in point.name)
            skip = 1 if point is Point.BETWEEN_BEGINS else 0 if once else self.rng.randrange(2)
            if point.where - {Mode.DBO} and point.number >= Point.BEFORE_LAUNCH.number:
                skip = self.rng.randrange(6)
            rank.planter.arm(point, skip)
        self.lines.swallowed.clear()
        error: BaseException | None = None
        flight = None
        try:
            flight = rank.forward(chunks)
        except Exception as raised:
            error = raised
        hit = rank.planter.hit or getattr(rank.tampering, "hit", False)
        rank.planter.arm(None)
        rank.tampering = None
        if not hit:  # passed less often than it was to be skipped
            totals.expect(error is None, f"a forward without a fault has none: {said(error)}")
            return False
        # What ends a thread is printed where it ends, and need not be said again.
        text = " <- ".join([said(error), *self.lines.swallowed])
        if point is Point.IN_EXIT and error is None:
            # Everything was launched; the thread's result is missing, and what was merged is short.
            assert flight is not None
            totals.expect(len(flight.hidden) < sum(c.tokens for c in chunks), "a context that fails loses its output")
            rank.flights.remove(flight)
        else:
            totals.expect(
                expected[0].__name__ in text and expected[1] in text, f"{point} is named ({expected}): {text or None}"
            )
            if self.mode is Mode.DBO and point.number >= Point.BEFORE_LAUNCH.number and "NeverReady" not in text:
                totals.expect(isinstance(error, BrokenOff), f"what a thread swallows breaks the forward: {text}")
        self._outcome(point, chunks, quarantined, logged)
        return True

    def _outcome(self, point: Point, chunks: Sequence[RequestChunk], quarantined: int, logged: int) -> None:
        """Leases, tails and the log after a forward that broke off."""
        rank, totals, arena = self.rank, self.totals, self.rank.runtime.arena
        forward, parts = rank.running, rank.parts
        fatal = isinstance(forward, CamForward) and bool(forward.under_way)
        more = arena.counters.quarantined - quarantined
        lost: set[RequestId] = set()
        if forward is None:  # it has not begun, or not whole
            begun = {Point.BEFORE_BEGIN: 0, Point.BETWEEN_BEGINS: 1}.get(point)
            if begun is None:
                lost = {chunk.request for chunk in parts[0]}  # at least these
            else:
                lost = {chunk.request for part in parts[:begun] for chunk in part}
            totals.expect(more == 0, f"{point} quarantines nothing, and not {more}")
        else:
            leases = [execution.lease for execution in forward.executions if execution.lease is not None]
            if fatal:
                totals.fatal += 1
                states = {LeaseState.QUARANTINED}
                new = self.lines.found[logged:]
                named = f"generation {forward.generation} has sent layer"
                totals.expect(len(new) == 1 and named in new[0], f"one line names what was quarantined: {new}")
                totals.expect(more == len(leases), f"{len(leases)} leases are quarantined, and not {more}")
                totals.expect_raise(CamError, "failed", lambda: forward.sent(9, 0), "a failed forward")  # type: ignore[attr-defined]
            else:
                states = {LeaseState.SEALED, LeaseState.SETTLED}
                totals.expect(more == 0, f"{point} quarantines nothing, and not {more}")
            found = {lease.state for lease in leases}
            totals.expect(found <= states, f"after {point} leases are {states}, and not {found}")
            for execution, part in zip(forward.executions, parts, strict=True):
                if execution.lost is not None:
                    lost |= {chunk.request for chunk in part}
        totals.expect(not rank.runtime._open, f"no execution is left open: {rank.runtime._open}")
        rank.model.outputs, rank.model.keep = [], []
        rank.land_all()  # what came before has its answers
        if self.mode is not Mode.CAM:
            errors = rank.reconnect()
            totals.expect(not errors, f"both sides of a forward that broke off can be closed, without: {errors}")
        gone = [request for request in rank.requests if request.name in {chunk.request for chunk in chunks}]
        for request in [each for each in gone if each.name in lost][:1]:
            self._refused(request.name, TailVoid, request.name)
        for request in gone:
            if request in rank.requests:
                rank.end(request)
        if fatal:
            self.over = True

    def _refused(self, name: RequestId, error: type[Exception], words: str) -> None:
        begin = self.rank.runtime.begin
        with torch.npu.stream(self.rank.stream):
            # Wherever it would go on: that it may not is asked before where.
            chunk = RequestChunk(name, 1, 2)
            self.totals.expect_raise(error, words, lambda: begin([chunk]).finish(), f"{name!r} that goes on")

    def _tamper(self, change: Callable[[Any, Any], Any]) -> Any:
        left = [self.rng.randrange(4)]

        def tampering(hidden: Any, more: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                tampering.hit = True  # type: ignore[attr-defined]
                return change(hidden, more)
            return hidden, more

        tampering.hit = False  # type: ignore[attr-defined]
        return tampering

    def _workspace(self) -> torch.Tensor:
        pool = self.rank.runtime.pools[self.rng.choice([*CompressorKind])]
        return pool[self.rng.randrange(len(pool)), :1] if self.rng.random() < 0.5 else pool

    def batch(self) -> tuple[RequestChunk, ...]:
        """What the next forward is to have."""
        return self.rank.batch(self.rng)

    def _exhausted(self) -> None:
        rank, arena = self.rank, self.rank.runtime.arena
        rank.land_all()
        chunks = self.batch()
        leases = [arena.acquire(ExecutionId(rank.runtime.mint())) for _ in arena.slots]
        self.totals.expect_raise(Exhausted, str(leases[0].execution), lambda: rank.forward(chunks), "no slot")
        for lease in leases:
            lease.seal()
        rank.forward(chunks)  # nothing has changed

    def _cancel_between(self) -> None:
        rank = self.rank
        rank.forward(self.batch())
        if rank.requests:
            victim = self.rng.choice(rank.requests)
            if victim.position:
                rank.end(victim)
                self._refused(victim.name, UnknownPosition, victim.name)

    def _cancel_inside(self) -> None:
        """The answers are held back, so that the forward is in flight for certain while its request is cancelled."""
        rank, runtime = self.rank, self.rank.runtime
        rank.land_all()
        rank.end_all()
        connectors.WIRE.going.clear()
        requests = [rank.new() for _ in range(SEATS)]  # they take every seat
        first = rank.forward([request.chunk(self.rng.choice((3, 5, 9))) for request in requests])
        assert first is not None
        seat = runtime.store.seat(requests[1].name)
        rank.end(requests[1])
        heir = rank.new()
        rank.forward([requests[0].chunk(1), heir.chunk(7)])
        self.totals.expect(not first.over[0].query(), "the forward is in flight")
        self.totals.expect(runtime.store.seat(heir.name) == seat, "the seat of the cancelled request is taken")
        connectors.WIRE.going.set()
        rank.land_all()

    def _idle(self) -> None:
        executions = self.rank.runtime.arena.counters.leases
        self.rank.forward(())
        found = self.rank.runtime.arena.counters.leases - executions
        self.totals.expect(found == 0, f"a forward without requests leases nothing, and not {found}")
