# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""How a rank of the soak ends, and what must then be left of it.

Some ends are planted (`points`): an answer that never comes, a fence that cannot be recorded or queried, a connector
that does not close. Whatever the end, slots, staging entries and pages that are neither free nor quarantined are lost.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from afd_dsv4.compressor import stock
from afd_dsv4.execution.forward import BrokenOff, Forward
from afd_dsv4.softnpu import runtime as softnpu
from afd_dsv4.tail.store import TailVoid
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import ArenaClosed, Exhausted, Settlement, StillLeased
from afd_dsv4.workspace.lease import LeaseState
from tests.afd import connectors
from tests.afd.faults import Faults
from tests.afd.judge import said
from tests.afd.points import Point
from tests.afd.rank import FENCE_TIMEOUT_S, Rank


class Life(Faults):
    """One rank, from its start to its end."""

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
        # The connector first, then the arena: what is not over by then is quarantined, never waited for.
        errors = rank.close_connector()
        pending = getattr(rank.connector, "_pending_attention_payloads", None)
        totals.expect(not pending or bool(errors), f"close drops what is pending: {pending}")
        rank.end_all()
        if point is Point.CLOSE_PENDING:
            totals.expect_raise(StillLeased, "Drain it first", rank.runtime.close, "close with a receive pending")
        else:
            quarantined = sum(slot.quarantined is not None for slot in arena.slots)
            totals.lost["slots"] += max(0, len(arena.slots) - quarantined - rank.take_slots())
        old = [slot.last for slot in arena.slots if slot.last is not None]
        left = rank.runtime.close(0.05)
        counted = arena.counters.quarantined
        totals.expect(len(left) == counted, f"{counted} leases were quarantined, and the runtime keeps {left}")
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
        rank.forward([request.chunk(1) for request in rank.requests])
        torch.npu.synchronize()
        assert rank.running is not None
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
        totals.expect(arena.watch() == () and arena.counters.quarantined == 0, "nothing is quarantined before its time")
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
