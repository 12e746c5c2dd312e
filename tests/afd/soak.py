# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The soak of AFD: forwards through the protocol, with a fault at every numbered point of their life.

Problem: uBatches in threads, stages of a connector with answers under way, and requests that are cut between them each
end well as long as nothing goes wrong; what goes wrong does so where nobody looks.
Way: ranks live and end, one after another: random batches through the protocol double's schedule on hostile streams,
every compressed row and hidden state compared with the definition; at random forwards one of `points.Point`, whose
outcome (which error, naming what; which leases in which state; whose tails are void) is asserted where it is planted.
Each rank ends with a point that ends one, and is then counted: slots, staging entries and pages that are neither free
nor quarantined are lost; the order checker judges its trace. Controls, or the soak proves nothing: with the waits of
the same load left out rows must come out wrong and the checker must say so, and workspace tensors planted in payloads
must all be found.
Two ranks are two such processes; and two ranks of one world, whose FFN ranks are in a third process, without faults.
What it is not: evidence about a device, or about afd-plugin's own code: the protocol is the double's.

    python -m afd_dsv4.softnpu -- python -m tests.afd.soak
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from afd_dsv4.compressor import stock
from afd_dsv4.execution.boundary import BoundaryViolation
from afd_dsv4.execution.cam import CamError, CamForward
from afd_dsv4.execution.forward import BrokenOff, Forward
from afd_dsv4.geometry import CompressorKind
from afd_dsv4.softnpu import runtime as softnpu
from afd_dsv4.tail.store import TailVoid, UnknownPosition
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import ArenaClosed, Exhausted, Settlement, StillLeased
from afd_dsv4.workspace.identity import ExecutionId
from afd_dsv4.workspace.lease import LeaseState
from tests.afd import connectors, protocol, world
from tests.afd.points import Mode, Planted, Point
from tests.afd.rank import FENCE_TIMEOUT_S, SEATS, Rank
from tests.afd.wire import WrongPayload
from tests.boundary_plants import planted_tensors

STAGES = 10_000  # layers-times-stages of each mode, for each number of ranks
FAULT_RATE = 0.05  # of forwards
LIFE = 60  # forwards of a rank, at most
CONTROL_FORWARDS = 60
WORLD_FORWARDS = 100
STARVE_US = 10_000  # much longer than the host takes for a launch: how fast it is must not decide what a control shows
CELL_LIMIT_S = 900  # a process that takes longer hangs: it says where, and ends


@dataclass
class Totals:
    """What was done and found. They add up.

    Attributes:
        stages: layers times stages, by mode.
        hits: how often each point was hit, by mode.
        violations: of order, and outcomes that were not the expected ones.
        lost: slots, staging entries and pages that are neither free nor quarantined and counted.
        fatal: forwards given up with an item under way.
        swallowed: exceptions of threads that nobody raised again.
    """

    stages: Counter[Mode] = field(default_factory=Counter)
    hits: Counter[tuple[Mode, Point]] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    ranks: int = 0
    forwards: int = 0
    rows: int = 0
    corrupt: int = 0
    items: int = 0
    zero_token_items: int = 0
    audited: int = 0
    quarantined: int = 0
    fatal: int = 0
    swallowed: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def expect(self, outcome: bool, what: str) -> None:
        """Note an outcome that is not the expected one."""
        if not outcome:
            self.violations.append(f"unexpected outcome: not so that {what}")

    def expect_raise(self, error: type[Exception], words: str, call: Callable[[], object], what: str) -> None:
        """Note a refusal that does not come, or does not say why."""
        try:
            call()
        except error as found:
            self.expect(words in str(found), f"{what} says {words!r}, but: {found}")
        else:
            self.expect(False, f"{what} raises {error.__name__}")


class Lines(logging.Handler):
    """Keeps what afd-dsv4 logs as errors, and what threads end with.

    Attributes:
        found: messages.
        swallowed: what Python would print of exceptions that end a thread.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self.swallowed: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.found.append(record.getMessage())


def said(error: BaseException | None) -> str:
    """All that an error and its causes say."""
    parts = []
    while error is not None and len(parts) < 10:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return " <- ".join(parts)


class Life:
    """One rank, from its start to its end.

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
            self.rank.model.auxiliary = self.rank.auxiliary, _APART[apart]

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
        chunks = self._batch()
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
        self.lines.swallowed.clear()
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
                totals.expect(len(new) == 1 and named in new[0], f"one line names what was given up: {new}")
                totals.expect(more == len(leases), f"{len(leases)} leases are given up, and not {more}")
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
            rank.reconnect()  # the FFN rank waits for the rest of this forward
        gone = [request for request in rank.requests if request.name in {chunk.request for chunk in chunks}]
        for request in gone[:1] if lost else []:
            if request.name in lost:
                self._refused(request.name, TailVoid, request.name)
        for request in gone:
            with suppress(ValueError):
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

    def _batch(self) -> tuple[RequestChunk, ...]:
        return self.rank.batch(self.rng)

    def _exhausted(self) -> None:
        rank, arena = self.rank, self.rank.runtime.arena
        rank.land_all()
        chunks = self._batch()
        leases = [arena.acquire(ExecutionId(rank.runtime.mint())) for _ in arena.slots]
        self.totals.expect_raise(Exhausted, str(leases[0].execution), lambda: rank.forward(chunks), "no slot")
        for lease in leases:
            lease.seal()
        rank.forward(chunks)  # nothing has changed

    def _cancel_between(self) -> None:
        rank = self.rank
        rank.forward(self._batch())
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

    # The end

    def end(self, point: Point | None) -> None:
        """End the rank at a point, and count; None where it is lost already."""
        rank, totals = self.rank, self.totals
        arena = rank.runtime.arena
        rank.land_all()
        expected: list[BaseException] = []
        if point is not None:
            rank.end_all()
            totals.hits[self.mode, point] += 1
            expected = self._at_the_end(point)
        # The connector first, then the arena: what is not over by then is given up, never waited for.
        errors = rank.close_connector()
        pending = getattr(rank.connector, "_pending_attention_payloads", None)
        totals.expect(not pending or bool(errors), f"close drops what is pending: {pending}")
        for request in list(rank.requests):
            with suppress(ValueError):
                rank.end(request)
        if point is Point.CLOSE_PENDING:
            totals.expect_raise(StillLeased, "Drain it first", rank.runtime.close, "close with a receive pending")
        else:
            quarantined = sum(slot.quarantined is not None for slot in arena.slots)
            totals.lost["slots"] += max(0, len(arena.slots) - quarantined - rank.take_slots())
        old = [slot.last for slot in arena.slots if slot.last is not None]
        left = rank.runtime.close(0.05)
        counted = arena.counters.quarantined
        totals.expect(len(left) == counted, f"{counted} leases were given up, and the runtime keeps {left}")
        totals.expect(
            all(lease.state in (LeaseState.SETTLED, LeaseState.QUARANTINED) for lease in old),
            f"in the end leases are settled or quarantined: {old}",
        )
        late = RequestChunk(RequestId("late 0"), 0, 1)
        totals.expect_raise(ArenaClosed, "closed", lambda: rank.runtime.begin([late]), "begin once closed")
        connectors.WIRE.release()
        errors += rank.stop_ffn()
        totals.expect(errors == expected, f"the connector and the FFN ranks end with {expected}, and not {errors}")
        torch.npu.synchronize()
        stock._NEVER_FREED.discard(rank.runtime)  # the device stands still: here, it is known to be over
        rank.drop()
        connectors.WIRE.forget()
        totals.lost["staging entries"] += len(rank.runtime.staging.out)
        for ratio in rank.runtime.shapes:
            pages = np.arange(1, rank.runtime.store.pages(ratio))
            totals.lost["pages"] += int(np.setdiff1d(pages, rank.runtime.store.owners(ratio)).size)
        totals.violations += rank.violations()
        totals.quarantined += counted
        for name in ("forwards", "rows", "corrupt", "items", "zero_token_items", "audited"):
            setattr(totals, name, getattr(totals, name) + getattr(rank.found, name))
        totals.stages[self.mode] += rank.found.stages
        totals.ranks += 1
        if point is Point.RESTART:
            self._restart(old)

    def _at_the_end(self, point: Point) -> list[BaseException]:
        """What leads to the end, and what connector and FFN ranks must then end with."""
        found: list[BaseException] | None = {
            Point.RECORD_FAILS: self._record_fails,
            Point.QUERY_FAILS: self._query_fails,
            Point.NEVER_ACQUIRE: self._never,
            Point.NEVER_WATCHED: self._never,
            Point.FFN_DIES: self._never,
            Point.CLOSE_PENDING: self._close_pending,
            Point.CLOSE_RAISES: self._close_raises,
            Point.USED_AFTER_CLOSE: self._used_after_close,
            Point.SHUTDOWN_OPEN: self._shutdown_open,
            Point.RESTART: self._nothing,
        }[point](point)
        return found or []

    def _two_stages(self) -> tuple[RequestChunk, ...]:
        """A batch of two requests: two stages however it is split."""
        return tuple(self.rank.new().chunk(tokens) for tokens in (5, 6))

    def _record_fails(self, _: Point) -> None:
        rank, totals = self.rank, self.totals
        if rank.model.auxiliary is not None:
            rank.model.auxiliary = None  # one stream, one record
        done = threading.Event()

        def fail() -> None:
            if not done.is_set():
                done.set()
                softnpu.fail_next_record(rank.stream)

        rank.at_end = fail
        error: BaseException | None = None
        try:
            rank.forward(self._two_stages())
        except Exception as raised:
            error = raised
        softnpu.clear_faults()
        totals.expect("recording an event" in said(error), f"a fence that cannot be recorded is named: {said(error)}")
        assert rank.running is not None
        lease = rank.running[0].lease
        assert lease is not None
        totals.expect(lease.state is LeaseState.QUARANTINED, f"its lease is quarantined: {lease!r}")
        rank.drop()
        torch.npu.synchronize()

    def _query_fails(self, _: Point) -> None:
        rank = self.rank
        rank.forward(self._two_stages())
        rank.land_all()
        assert rank.running is not None
        lease = rank.running[0].lease
        assert lease is not None
        if not lease.over():
            softnpu.clear_faults()
        rank.forward([request.chunk(1) for request in rank.requests])
        torch.npu.synchronize()
        lease = rank.running[0].lease
        assert lease is not None
        softnpu.fail_next_query()
        found = rank.runtime.arena.settle(lease)
        softnpu.clear_faults()
        self.totals.expect(found is Settlement.IN_DOUBT, f"what cannot be queried is in doubt: {found}")
        self.totals.expect(lease.state is LeaseState.QUARANTINED, f"its lease is quarantined: {lease!r}")
        rank.land_all()

    def _never(self, point: Point) -> list[BaseException]:
        """The answer of an item never comes: the stream stands still."""
        rank, totals, arena = self.rank, self.totals, self.rank.runtime.arena
        failed = RuntimeError("the expert fell over")
        if point is Point.FFN_DIES:
            rank.ffn[-1].fails = failed
        else:
            connectors.WIRE.mute = True
        rank.forward(self._two_stages())
        if point is Point.FFN_DIES:
            rank.ffn[-1].join()
        assert rank.running is not None
        leases = [execution.lease for execution in rank.running.executions if execution.lease is not None]
        totals.expect(arena.watch() == () and arena.counters.quarantined == 0, "nothing is given up before its time")
        rank.clock.now += FENCE_TIMEOUT_S
        if point is Point.NEVER_ACQUIRE:
            with torch.npu.stream(rank.auxiliary):
                begin = rank.runtime.begin
                chunk = RequestChunk(RequestId("late 0"), 0, 1)
                totals.expect_raise(Exhausted, "quarantined", lambda: begin([chunk]).finish(), "no slot is left")
        else:
            arena.watch()
        totals.expect(
            all(lease.state is LeaseState.QUARANTINED for lease in leases), f"{leases} are quarantined, being too late"
        )
        name = next(iter(rank.requests)).name
        totals.expect_raise(
            TailVoid, "in doubt", lambda: rank.runtime.begin([RequestChunk(name, 5, 6)]), "a request behind it"
        )
        rank.drop()
        return [failed] if point is Point.FFN_DIES else []

    def _close_pending(self, _: Point) -> None:
        connectors.WIRE.mute = True
        self.rank.forward(self._two_stages())
        self.rank.drop()

    def _close_raises(self, _: Point) -> list[BaseException]:
        rank, failed = self.rank, RuntimeError("the group cannot be destroyed")

        def destroy(*_: object) -> None:
            raise failed

        rank.forward(self._two_stages())
        rank.land_all()
        rank.connector._destroy = destroy
        self.totals.expect(rank.close_connector() == [failed], "what close raises is kept")
        self.totals.expect(rank.connector.is_initialized, "as at this commit, what comes behind it is not cleared")
        return [failed]  # and again

    def _used_after_close(self, _: Point) -> None:
        rank, totals = self.rank, self.totals
        totals.expect(rank.close_connector() == [], "the connector closes")
        totals.expect_raise(
            RuntimeError, "is not initialized", lambda: rank.forward(self._two_stages()), "a forward behind close"
        )
        rank.model.outputs, rank.model.keep = [], []

    def _shutdown_open(self, _: Point) -> None:
        rank, totals = self.rank, self.totals

        def shut() -> None:
            with torch.npu.stream(rank.stream), Forward(rank.runtime, [self._two_stages()]) as forward:
                named = str(forward[0].lease.execution)  # type: ignore[union-attr]
                totals.expect_raise(StillLeased, named, lambda: rank.runtime.close(0.05), "close with a lease open")
                totals.expect(not rank.runtime.arena.closed, "a close that is refused changes nothing")

        totals.expect_raise(BrokenOff, "launches missing", shut, "a forward that launches nothing")

    def _nothing(self, _: Point) -> None:
        self.rank.forward(self._two_stages())
        self.rank.land_all()

    def _restart(self, old: Sequence[Any]) -> None:
        """A new rank in the same process: generations go on, and what was leased before is stale."""
        rank, totals = Rank(self.mode), self.totals
        arena = rank.runtime.arena
        for lease in old:
            found = arena.settle(lease), arena.settle(lease.execution)
            totals.expect(
                set(found) == {Settlement.STALE_GENERATION}, f"a lease of before the restart is stale, and not {found}"
            )
        rank.forward([rank.new().chunk(5)])
        assert rank.running is not None
        newest = max((lease.execution.generation for lease in old), default=0)
        totals.expect(rank.running.generation > newest, "generations go on behind a restart")
        rank.land_all()
        totals.expect(rank.found.corrupt == 0, "the rows behind a restart are right")
        rank.end_all()
        totals.expect(not rank.disconnect(), "a rank without faults closes")
        totals.expect(rank.runtime.close(1.0) == (), "and leaves nothing")


_APART: dict[str, Callable[[CompressorKind, int], bool]] = {
    "indexer": lambda kind, _: kind is CompressorKind.C4_INDEXER,
    "c128": lambda kind, _: kind is CompressorKind.C128,
    "uBatch 0": lambda _, ubatch: ubatch == 0,
}


@contextmanager
def quiet(totals: Totals) -> Iterator[Lines]:
    """Count what threads swallow instead of printing it, and keep what is logged."""
    hook, lines = threading.excepthook, Lines()
    logger = logging.getLogger("vllm.plugins.afd_dsv4")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(lines)

    def swallowed(thread: threading.ExceptHookArgs) -> None:
        totals.swallowed += 1
        lines.swallowed.append(said(thread.exc_value))

    threading.excepthook = swallowed
    collects = gc.isenabled()
    gc.disable()  # torch records events where it frees pinned memory, which a planted fault would hit
    gc.freeze()  # what is there already need not be looked at after each rank
    try:
        yield lines
    finally:
        threading.excepthook = hook
        logger.removeHandler(lines)
        logger.propagate = propagate
        softnpu.set_schedule(0)
        softnpu.clear_faults()
        gc.unfreeze()
        if collects:
            gc.enable()
        gc.collect()


def soak(mode: Mode, seed: str, stages: int, *, points: bool = True) -> Totals:
    """Ranks of one mode, until so many stages were run and every point of the mode was hit.

    Args:
        mode: of the ranks.
        seed: decides load and faults.
        stages: at least so many.
        points: False plants nothing.
    """
    totals = Totals()
    rng = random.Random(seed)
    todo: list[Point] = []
    todo_ends: list[Point] = []
    with quiet(totals) as lines:
        while totals.stages[mode] < stages or (points and _missed(totals, mode)):
            softnpu.set_schedule(rng.getrandbits(31), rng.choice([10, 40, 150]), starve=rng.random() < 0.5)
            life = Life(totals, mode, rng, lines)
            for _ in range(rng.randint(2, LIFE)):
                missed = [point for point in _missed(totals, mode) if not point.ends]
                late = totals.stages[mode] + life.rank.found.stages >= stages
                if life.over or (late and not (points and missed)):
                    break
                if points and (late or rng.random() < FAULT_RATE):
                    todo = todo or _shuffled(rng, mode, ends=False)
                    point = missed[0] if late else todo.pop()
                    totals.hits[mode, point] += life.plant(point)
                else:
                    life.rank.forward(life._batch())
            todo_ends = todo_ends or _shuffled(rng, mode, ends=True)
            life.end(None if life.over or not points else todo_ends.pop())
            gc.collect()
    return totals


def _shuffled(rng: random.Random, mode: Mode, *, ends: bool) -> list[Point]:
    points = [point for point in Point if mode in point.where and point.ends == ends]
    return rng.sample(points, len(points))


def _missed(totals: Totals, mode: Mode) -> list[Point]:
    return [point for point in Point if mode in point.where and not totals.hits[mode, point]]


def control(mode: Mode, seed: str, *, ordered: bool, forwards: int = CONTROL_FORWARDS) -> tuple[int, int]:
    """The same load with uBatch 0's launches on a stream of its own that starves; with waits and without.

    Returns:
        Corrupt rows, and violations of order.
    """
    totals = Totals()
    rng = random.Random(seed)
    with quiet(totals):
        softnpu.set_schedule(rng.getrandbits(31), STARVE_US, starve=True)
        rank = Rank(mode, ordered=ordered)
        rank.model.auxiliary = rank.auxiliary, _APART["uBatch 0"]
        for _ in range(forwards):
            rank.forward(rank.batch(rng))
        rank.land_all()
        found = rank.found.corrupt, len(rank.violations())
        rank.end_all()
        rank.disconnect()
        rank.runtime.close(1.0)
    return found


@dataclass(frozen=True)
class Cell:
    """What one process does: one of the ranks of one mode.

    Attributes:
        mode: of its ranks.
        ranks: how many processes share the stages.
        number: which of them this is.
        stages: of all of them.
    """

    mode: Mode
    ranks: int
    number: int
    seed: int
    stages: int

    def run(self) -> tuple[Totals, list[str]]:
        """Returns the totals, and controls that were blind."""
        start()
        faulthandler.dump_traceback_later(CELL_LIMIT_S, exit=True, file=2)
        name = f"{self.mode.name} {self.ranks} {self.number} {self.seed}"
        blind = []
        if self.mode is not Mode.SYNC:
            corrupt, violations = control(self.mode, name, ordered=False)
            if not corrupt or not violations:
                blind.append(f"{name}: without waits {corrupt} corrupt rows, {violations} violations")
            if any(found := control(self.mode, name, ordered=True)):
                blind.append(f"{name}: with waits {found[0]} corrupt rows, {found[1]} violations")
        totals = soak(self.mode, name, -(-self.stages // self.ranks))
        faulthandler.cancel_dump_traceback_later()
        return totals, blind


def start() -> None:
    """Make this process ready for the software NPU and a tiny model."""
    softnpu.install()
    torch.ops.softnpu.waive("compressor.hidden", True)
    torch.set_num_threads(1)


def failures(totals: Totals, blind: Sequence[str], planted: tuple[int, int], modes: Sequence[Mode]) -> list[str]:
    """Everything for which the soak fails, in words."""
    found = [f"a control was blind: {line}" for line in blind]
    found += [
        f"point {point.number} ({point.what}) was not hit in {mode.value}"
        for mode in modes
        for point in _missed(totals, mode)
    ]
    if planted[0] != planted[1] or not planted[1]:
        found.append(f"{planted[1] - planted[0]} of {planted[1]} planted workspace tensors were not found")
    if totals.violations or totals.corrupt or totals.lost.total():
        found.append("order or outcomes were violated, rows corrupted, or slots lost")
    return found


def report(totals: Totals, modes: Sequence[Mode], seconds: float) -> None:
    """Say what was done and found."""
    print("points, hit in " + ", ".join(mode.value for mode in modes))
    for point in Point:
        hits = " ".join(f"{totals.hits[mode, point] if mode in point.where else '-':>6}" for mode in modes)
        print(f"  {point.number:3} {hits}  {point.what}")
    for mode in modes:
        print(f"layers-times-stages of {mode.value}: {totals.stages[mode]}")
    print(
        f"ranks {totals.ranks}, forwards {totals.forwards}, rows compared {totals.rows}, "
        f"calls audited {totals.audited}\nitems answered {totals.items}, without tokens {totals.zero_token_items}\n"
        f"forwards given up with an item under way {totals.fatal}, leases quarantined {totals.quarantined}, "
        f"exceptions swallowed by threads {totals.swallowed}\n"
        f"lost: {', '.join(f'{count} {what}' for what, count in totals.lost.items() if count) or 'nothing'}\n"
        f"time: {seconds:.0f} s"
    )
    for what in totals.violations[:20]:
        print(f"  {what}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; 1 if anything is not as it must be, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m tests.afd.soak", description="Soak AFD on the protocol double.")
    parser.add_argument("--seed", type=int, default=20261130, help="of load and faults")
    parser.add_argument("--stages", type=int, default=STAGES, help="of each mode and number of ranks (%(default)s)")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="processes of Attention (default: 1, then 2)")
    parser.add_argument("--connector", choices=[mode.name.lower() for mode in Mode], help="one mode (default: all)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes at once")
    asked = parser.parse_args(arguments)
    if asked.stages < 1 or asked.jobs < 1:
        parser.error("--stages and --jobs must be at least 1")
    if not softnpu.is_active():
        parser.error("runs on the software NPU: python -m afd_dsv4.softnpu -- python -m tests.afd.soak")
    started = time.monotonic()
    modes = [Mode[asked.connector.upper()]] if asked.connector else [*Mode]
    cells = [
        Cell(mode, ranks, number, asked.seed, asked.stages)
        for ranks in ([asked.ranks] if asked.ranks else [1, 2])
        for mode in modes
        for number in range(ranks)
    ]
    print(f"soak of AFD on the protocol double and the software NPU, seed {asked.seed}, {len(cells)} cells", flush=True)
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        planting = pool.submit(_planted)
        done = list(pool.map(Cell.run, cells))
        planted = planting.result()
    totals = sum((found for found, _ in done), Totals())
    if asked.ranks != 1:
        for mode in modes:
            totals += beside(mode, asked.seed)
    blind = [line for _, lines in done for line in lines]
    report(totals, modes, time.monotonic() - started)
    wrong = failures(totals, blind, planted, modes)
    for failure in wrong:
        print(f"failed: {failure}")
    print(
        f"afd-soak: stages={sum(totals.stages.values())} violations={len(totals.violations)} "
        f"corrupt_rows={totals.corrupt} lost_slots={totals.lost.total()} planted_tensors={planted[0]}/{planted[1]}"
    )
    return int(bool(wrong))


def beside(mode: Mode, seed: int) -> Totals:
    """Two Attention ranks and two FFN ranks in processes of one world, over the operators, without faults."""
    totals = Totals()
    said = world.run(mode.name, attention=2, ffn=2, forwards=WORLD_FORWARDS, seed=seed)
    for rank in said[:2]:
        totals.stages[mode] += rank["stages"]
        totals.violations += rank["violations"]
        totals.expect((rank["closed"], rank["left"]) == ([], 0), f"a rank of a world ends without a rest: {rank}")
        totals.lost["slots"] += rank["most_slots"] - rank["slots"]
        for name in ("forwards", "rows", "corrupt", "audited"):
            setattr(totals, name, getattr(totals, name) + rank[name])
        totals.ranks += 1
    totals.items += said[2]["items"]
    totals.expect(said[2]["runtimes"] == 0 and not said[2]["errors"], f"an FFN process has nothing of ours: {said[2]}")
    return totals


def _planted() -> tuple[int, int]:
    start()
    return planted_tensors(protocol.double(), Rank(Mode.CAM).runtime)


if __name__ == "__main__":
    sys.exit(main())
