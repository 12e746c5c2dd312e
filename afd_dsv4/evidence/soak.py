# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The soak: many executions, two uBatches on two streams and an auxiliary one, about one fault in a hundred.

Problem: that every reuse is ordered is easy to claim and hard to see; a race shows in one of many runs, and most often
where something has just failed.
Way: rounds of the load of `soak_load.py`, whose every byte `stamps.Witness` knows. After a round all is drained, every
byte of pages and tables is compared with its last writer, what is neither free nor quarantined and counted is lost,
and the order checker judges the round's trace. Every third round ends with a stream that never advances, or a
shutdown. A few rounds of the same load with fences off must all corrupt bytes and be out of order, or the soak proves
nothing and fails: their streams starve until the host waits, so that a disorder shows on a slow machine as on a fast
one. Load and faults are a function of the seed; the order in which streams advance is not.
On the software NPU that order is made hostile, and each runtime's first executions run under its race detector, with
pages touched one by one so that it can tell them apart. On CUDA launches are held up at random. A stream is held for
good by an external event that nobody records: where there are none (CUDA) the faults that need one are left out, as the
printed table of faults shows.

    python -m afd_dsv4.softnpu -- python -m afd_dsv4.evidence.soak
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afd_dsv4.evidence.soak_load import (
    CHUNKS,
    FENCE_TIMEOUT_S,
    LENGTH,
    SEATS,
    STREAMS,
    Fault,
    Gate,
    Lab,
    Load,
    NoDevice,
    Style,
    Totals,
)
from afd_dsv4.softnpu import runtime as softnpu
from afd_dsv4.tail.store import TailFull, TailVoid, UnknownPosition
from afd_dsv4.workspace import order
from afd_dsv4.workspace.arena import ArenaClosed, Settlement, StillLeased
from afd_dsv4.workspace.identity import ExecutionId, Generation
from afd_dsv4.workspace.lease import LeaseState, OrderError

ENDINGS = (Fault.FENCE, Fault.SHUTDOWN, Fault.WATCH, Fault.DRAIN, Fault.DOUBT)
INSIDE = tuple(fault for fault in Fault if fault not in ENDINGS)
NEED_HOLD = (Fault.CANCEL, Fault.STALL, Fault.FENCE, Fault.WATCH, Fault.DRAIN, Fault.DOUBT)
GROUP = 3  # rounds of one runtime; the last one ends with a fault
PER_FORWARD = 1.7  # executions, on average
DETECTED = 40  # executions of a runtime under the race detector
ROUND_LIMIT_S = 300  # a process that takes longer for a round hangs: it says where, and ends
# Most bytes by which a process may grow between its first round and its last. Runtimes with something in doubt are kept
# for ever, and allocators' working sets go up and down: by 12 MiB, but not up, over 48,000 executions without endings.
HOST_GROWTH = 48 << 20
UNORDERED_ROUNDS = 4
UNORDERED_EXECUTIONS = 150
# Much longer than the host takes for a launch: how fast it is must not decide whether a disorder shows. Under the
# soak's own schedules 8 of 120 rounds with fences off showed none.
UNORDERED_STARVE_US = 10_000


class World(Load):
    """A runtime through its rounds, its faults and its end. Arguments as of `Load`."""

    def __init__(self, lab: Lab, totals: Totals, slots: int, *, ordered: bool = True) -> None:
        super().__init__(lab, totals, slots, ordered=ordered)
        self.lost_slots = 0  # quarantined, and counted
        self.lost_seats: set[int] = set()
        self._dropped = 0  # records of earlier rounds
        self._detecting = on_softnpu(lab)
        if self._detecting:
            self.witness.exact = True
            softnpu.clear_races()
            softnpu.set_race_detection(True)

    def play(self, rng: random.Random, style: Style, executions: int, fault_rate: float) -> None:
        """Queue forwards, some of them with a fault, until there are so many executions more."""
        allowed = [fault for fault in INSIDE if self.lab.can_hold or fault not in NEED_HOLD]
        todo: list[Fault] = []
        began = self.totals.executions
        while (done := self.totals.executions - began) < executions:
            if self._detecting and done >= DETECTED:
                self._end_detection()
            if rng.random() < PER_FORWARD * fault_rate:
                todo = todo or rng.sample(allowed, len(allowed))
                self.plant(rng, style, todo.pop())
            else:
                self.forward(rng, style)

    def _end_detection(self) -> None:
        if not self._detecting:
            return
        self._detecting = self.witness.exact = False
        self.lab.module.synchronize()
        self.totals.races += softnpu.race_count()
        self.totals.violations += [f"race on the device: {race}" for race in softnpu.races()]
        softnpu.set_race_detection(False)

    def plant(self, rng: random.Random, style: Style, fault: Fault) -> None:
        """Plant one of `INSIDE` in what is queued next, and see its outcome."""
        totals, arena = self.totals, self.runtime.arena
        totals.faults[fault] += 1
        if fault is Fault.CANCEL:
            self._cancel(rng, style)
            return
        parts = self.forward(rng, style, fault)
        if fault is Fault.SETTLED_TWICE:
            lease = parts[-1].lease
            self.lab.module.synchronize()
            totals.expect(lease.over(), "a lease is over once all has run")

            def state() -> tuple[object, ...]:
                return lease.slot.lease, lease.slot.last, lease.slot.quarantined, arena.counters.quarantined

            before = state()
            found = {arena.settle(lease), arena.settle(lease), arena.settle(lease.execution)}
            totals.expect(found == {Settlement.ALREADY_RELEASED}, f"a lease is released once, and not {found}")
            totals.expect(state() == before, "a lease that is settled twice is not freed twice")
            totals.expect_raise(OrderError, lease.seal, "a second seal")
        elif fault is Fault.SETTLED_STALE:
            for generation, wanted in (
                (Generation(1), Settlement.STALE_GENERATION),
                (Generation(self.runtime.mint() + 1), Settlement.NOT_FOUND),
            ):
                settled = arena.settle(ExecutionId(generation, 7))
                totals.expect(settled is wanted, f"generation {generation} is {wanted}, and not {settled}")

    def _cancel(self, rng: random.Random, style: Style) -> None:
        """A request is cancelled with two forwards in flight for certain, and its seat is taken at once."""
        self.end_all()
        victim, other, *_ = [self.new() for _ in range(SEATS)]  # they take every seat
        self.forward(rng, style, None, [request.chunk(rng.choice(CHUNKS[:8])) for request in self.requests])
        self.lab.module.synchronize()
        style = Style(style.threads, style.auxiliary)
        first, second = map(self.lab.hold, self.lab.streams)
        flying = []
        for stream in range(2):
            chunk = victim.chunk(rng.randint(1, 4))
            flying += self.forward(rng, style, None, [chunk], cut_at=chunk.tokens, stream=stream)
        self.totals.expect(not any(part.lease.over() for part in flying), "two forwards are in flight")
        seat = self.runtime.store.seat(victim.name)
        self.end(victim)
        heir = self.new()
        ahead = self.lab.streams[0].record_event()
        taken = self.forward(rng, style, None, [heir.chunk(5)], cut_at=5)[0].lease
        self.totals.expect(self.runtime.store.seat(heir.name) == seat, "the seat of the cancelled request is taken")
        first.open()
        ahead.synchronize()  # the heir could run now, and be overwritten, if it did not wait for the second forward
        self.totals.expect(not any(taken.over() for _ in range(300)), "the heir waits for who had its seat")
        second.open()
        self.lab.module.synchronize()
        self.end(other)  # room, so that the next is not refused for want of a seat
        self.expect_refusal(victim, UnknownPosition, victim.name)

    # The end of a round

    def close_round(self, rng: random.Random, style: Style, ending: Fault | None) -> None:
        """Drain, compare, count and judge; with an `ending` the runtime's life is over."""
        self._end_detection()
        self.lab.module.synchronize()
        held: Gate | None = None
        if ending is not None:
            self.totals.faults[ending] += 1
        if ending is Fault.SHUTDOWN:
            self._shut_down_while_open()
        elif ending is not None:
            held = self._stick(rng, ending)
        self.end_all()
        if ending is Fault.DRAIN:
            self._close(drain_s=0.05)
        self._count_lost(rng, style, ending)
        self.end_all()
        if ending is not None and ending is not Fault.DRAIN:
            self._close(drain_s=0.05)
        if held is not None:
            held.open()
        self.lab.module.synchronize()
        self.lab.gates.clear()
        if ending is not None:
            chunk = self.new().chunk(1)
            self.totals.expect_raise(ArenaClosed, lambda: self.runtime.begin([chunk]), "begin once closed")
        self.totals.audit += self.witness.audit()
        self._judge(style)

    def _shut_down_while_open(self) -> None:
        """Shutdown refuses while an execution is open, and changes nothing."""
        self.end_all()
        request = self.new()
        self.lab.on(self.lab.streams[0])
        execution = self.runtime.begin([request.chunk(3)])
        self.totals.expect_raise(StillLeased, lambda: self.runtime.close(1.0), "close with an execution open")
        self.totals.expect(not self.runtime.arena.closed, "a close that is refused changes nothing")
        execution.finish()  # without a launch
        self.expect_refusal(request, TailVoid, request.name)
        self.lab.module.synchronize()

    def _stick(self, rng: random.Random, ending: Fault) -> Gate:
        """The second uBatch's stream stops for good; everything else has run."""
        totals, arena, (free, stuck) = self.totals, self.runtime.arena, self.lab.streams
        for request in self.requests[2:]:
            self.end(request)
        for request in [request for request in self.requests if request.position + 8 > LENGTH]:
            self.end(request)
        while len(self.requests) < 2:
            self.new()
        chunks = [request.chunk(rng.randint(1, 4)) for request in self.requests]
        other = self.requests[1]
        held = self.lab.hold(stuck)
        lost = self.forward(rng, Style(), None, chunks, cut_at=chunks[0].tokens)[1].lease
        totals.expect(lost.state is LeaseState.SEALED, "what cannot advance is sealed all the same")
        free.synchronize()
        seat = self.runtime.store.seat(other.name)
        assert seat is not None
        self.lost_seats.add(seat)
        self.lost_slots += 1
        if ending is Fault.DRAIN:
            return held
        if ending is Fault.FENCE:
            self.clock.now += FENCE_TIMEOUT_S
            got = self.take_slots()
            totals.expect(got == len(arena.slots) - 1, f"an acquire finds the lost slot: {got} of {len(arena.slots)}")
        elif ending is Fault.WATCH:
            totals.expect(arena.watch() == () and arena.counters.quarantined == 0, "nothing is lost before its time")
            self.clock.now += FENCE_TIMEOUT_S
            totals.expect(arena.watch() == (), "nobody waits for the lost lease")
        else:
            self.clock.now += FENCE_TIMEOUT_S * 0.6
            late = self.forward(rng, Style(), None, [other.chunk(1)], cut_at=1)[0].lease
            self.clock.now += FENCE_TIMEOUT_S * 0.6
            totals.expect(arena.watch() == (late,), "what waits for a lost lease is in doubt")
            settled = arena.settle(late)
            totals.expect(settled is Settlement.IN_DOUBT, f"it cannot be settled: {settled}")
            self.clock.now += FENCE_TIMEOUT_S
            arena.watch()
            totals.expect(late.state is LeaseState.QUARANTINED, "in the end it is lost as well")
            self.lost_slots += 1
        totals.expect(lost.state is LeaseState.QUARANTINED, f"a fence out of time is quarantined: {lost!r}")
        totals.expect(arena.counters.quarantined == self.lost_slots, "what is quarantined is counted")
        if self.lost_slots < len(arena.slots):
            self.expect_refusal(other, TailVoid, "in doubt")
        return held

    def _count_lost(self, rng: random.Random, style: Style, ending: Fault | None) -> None:
        """What cannot be had any more although nothing is in doubt about it."""
        runtime, lost = self.runtime, self.totals.lost
        doubted = set(runtime.seats_in_doubt())
        self.totals.expect(doubted == self.lost_seats, f"seats {self.lost_seats} are in doubt, and not {doubted}")
        if not runtime.arena.closed:
            got, there = self.take_slots(), len(runtime.arena.slots) - self.lost_slots
            self.totals.expect(got <= there, f"no slot is leased twice: {got} leases at once of {there} slots")
            lost["slots"] += max(0, there - got)
            if got and ending is not Fault.DOUBT:  # there, both uBatches' streams stand still
                lost["seats"] += self._lost_seats(rng, style)
        lost["staging entries"] += len(runtime.staging.out)
        for ratio in runtime.shapes:
            pages = np.arange(1, runtime.store.pages(ratio))
            lost["pages"] += int(np.setdiff1d(pages, runtime.store.owners(ratio)).size)

    def _lost_seats(self, rng: random.Random, style: Style) -> int:
        """All seats are taken by new requests of one forward; returns how many of them cannot be."""
        there = SEATS - len(self.lost_seats)
        for seats in range(there, 0, -1):
            chunks = [self.new().chunk(1) for _ in range(seats)]
            try:
                self.forward(rng, Style(auxiliary=style.auxiliary), None, chunks, cut_at=seats)
            except TailFull:
                self.end_all()
                continue
            self.lab.streams[0].synchronize()
            self.lab.auxiliary.synchronize()
            return there - seats
        return there

    def _close(self, drain_s: float) -> None:
        lost = self.runtime.close(drain_s)
        counted = self.runtime.arena.counters.quarantined
        self.totals.expect(
            len(lost) == counted == self.lost_slots, f"{self.lost_slots} leases are lost: {lost!r}, {counted} counted"
        )

    def _judge(self, style: Style) -> None:
        """The order of the round, and what it has cost."""
        totals, arena, staging = self.totals, self.runtime.arena, self.runtime.staging
        report = order.check(self.trace.records(), self._dropped)
        self._dropped += report.records
        self.trace.clear()
        totals.records += report.records
        totals.edges += report.edges
        totals.unordered += len(report.violations)
        totals.violations += map(str, report.violations)
        waits, staging.host_waits = staging.host_waits, 0
        totals.host_waits += waits
        if style.depth is not None and len(arena.slots) >= 2 * style.depth:
            totals.steady_rounds += 1
            totals.expect(waits == 0, f"the host waits for no copy while the ring is large enough, and {waits} times")
        allowed = 3 * len(arena.slots) * STREAMS + len(staging.entries)
        totals.expect(arena.events.created <= allowed, f"{arena.events.created} events were made, {allowed} are enough")
        totals.events = max(totals.events, arena.events.created)
        totals.events_allowed = max(totals.events_allowed, allowed)

    def retire(self) -> None:
        """Add up what the runtime has counted."""
        counters = self.runtime.arena.counters
        self.totals.launches += self.witness.launches
        self.totals.handed_on += counters.handed_on
        self.totals.quarantined += counters.quarantined


def on_softnpu(lab: Lab) -> bool:
    """Whether the software NPU's knobs are there."""
    return lab.device.type == "npu" and softnpu.is_active()


@contextmanager
def hostile(lab: Lab, rng: random.Random, *, ordered: bool) -> Iterator[None]:
    """Make the order of the streams hostile, where the device can do so: delays, or streams that starve."""
    seed, starve = rng.getrandbits(31), rng.random() < 0.5
    longest_us = rng.choice([150, 400] if starve else [10, 40])
    if not ordered:
        starve, longest_us = True, UNORDERED_STARVE_US
    if on_softnpu(lab):
        softnpu.set_schedule(seed, longest_us, starve=starve)
    elif lab.device.type == "cuda":
        from afd_dsv4.evidence.cuda.pauses import pauses

        lab.pause = pauses(random.Random(seed), longest_us)
    try:
        yield
    finally:
        if on_softnpu(lab):
            softnpu.set_schedule(0)
        lab.pause = lambda: None


@contextmanager
def own_stream(lab: Lab) -> Iterator[None]:
    """Give the calling thread its current stream back, which the load changes with every call."""
    before = lab.module.current_stream()
    try:
        yield
    finally:
        lab.module.set_stream(before)


def soak(
    lab: Lab,
    *,
    seed: int,
    executions: int,
    rounds: Sequence[int],
    ordered: bool = True,
    fault_rate: float = 0.01,
    started: float | None = None,
) -> Totals:
    """Run rounds of a soak.

    Args:
        lab: where.
        seed: decides load and faults; a round does not depend on others but for those of its group.
        executions: at least so many a round.
        rounds: which of them; whole groups of `GROUP`, but for the last one.
        ordered: False queues no wait and ends no runtime: the negative control.
        fault_rate: faults per execution; those that end a group come on top.
        started: when the command began, to say now and then how far it is, and to end a process that hangs; None says
            nothing.
    """
    totals = Totals()
    world: World | None = None
    endings = [fault for fault in ENDINGS if lab.can_hold or fault not in NEED_HOLD]
    for index in rounds:
        rng = random.Random(f"soak {seed} {index}")
        slots = random.Random(f"slots {seed} {index // GROUP}").choice([2, 2, 3, 4])
        if world is None:
            world = World(lab, totals, slots, ordered=ordered)
        style = Style.of(rng)
        ending = endings[index // GROUP % len(endings)] if ordered and index % GROUP == GROUP - 1 else None
        if started is not None:
            faulthandler.dump_traceback_later(ROUND_LIMIT_S, exit=True, file=2)  # the real stderr
        with own_stream(lab), hostile(lab, rng, ordered=ordered):
            world.play(rng, style, executions, fault_rate)
            world.close_round(rng, style, ending)
        if ending is not None:
            world.retire()
            world = None
        faulthandler.cancel_dump_traceback_later()
        totals.rounds += 1
        totals.resident.append(resident_bytes())
        if started is not None and totals.rounds % 10 == 0:
            print(f"  {totals.rounds} rounds, {totals} in {time.monotonic() - started:.0f} s", flush=True)
    if world is not None:
        world.retire()
    return totals


def sees_disorder(lab: Lab, found: Totals) -> bool:
    """Whether bytes, trace and, where there is a race detector, device all say that something was out of order."""
    return bool(found.audit.wrong and found.unordered and (found.races or not on_softnpu(lab)))


def resident_bytes() -> int:
    """Host memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Job:
    """What one process does: every `of`-th group, from the `number`-th on."""

    number: int
    of: int
    device: str
    seed: int
    executions: int
    rounds: int
    started: float

    def run(self) -> tuple[list[int], Totals]:
        """Returns the blind rounds of the negative control, and the totals of the soak."""
        lab = Lab(self.device)
        blind = [
            index
            for index in range(UNORDERED_ROUNDS)[self.number :: self.of]
            if not sees_disorder(
                lab, soak(lab, seed=self.seed, executions=UNORDERED_EXECUTIONS, rounds=[index], ordered=False)
            )
        ]
        mine = [index for index in range(self.rounds) if index // GROUP % self.of == self.number]
        per_round = -(-self.executions // self.rounds)
        return blind, soak(lab, seed=self.seed, executions=per_round, rounds=mine, started=self.started)


def play(tasks: Sequence[Job]) -> tuple[list[int], list[Totals]]:
    """Do all jobs, each in a process of its own if there are several.

    Returns:
        The blind rounds of the negative control, and the totals by job.

    Raises:
        NoDevice: it is not there.
    """
    if len(tasks) == 1:
        done = [tasks[0].run()]
    else:
        with ProcessPoolExecutor(len(tasks), multiprocessing.get_context("spawn")) as pool:
            done = list(pool.map(Job.run, tasks))
    return sorted(index for found, _ in done for index in found), [part for _, part in done]


def failures(blind: Sequence[int], parts: Sequence[Totals]) -> list[str]:
    """Everything for which the soak fails, in words.

    Args:
        blind: rounds of the negative control that found nothing wrong.
        parts: one for each process.
    """
    found = []
    if blind:
        found.append(f"rounds {[*blind]} with fences off did not corrupt and violate: this soak proves nothing")
    for part in parts:
        grown = part.resident[-1] - part.resident[0] if part.resident else 0
        if grown > HOST_GROWTH:
            found.append(f"host memory grew by {grown >> 20} MiB from the first round to the last, more than the bound")
    totals = sum(parts, Totals())
    if totals.audit.wrong or totals.lost_count or totals.violations:
        found.append("bytes were corrupted, slots lost, or rules violated")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the negative control and the soak; 1 if anything failed, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m afd_dsv4.evidence.soak", description="Soak workspace leases.")
    parser.add_argument("--seed", type=int, default=20261130, help="of load and faults")
    parser.add_argument("--executions", type=int, default=100_000, help="at least so many (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--device", default="npu", help="npu, real or software, or cuda (default: %(default)s)")
    parser.add_argument("--jobs", type=int, help="processes (default: 2 on the software NPU, else 1)")
    asked = parser.parse_args(arguments)
    software = asked.device == "npu" and softnpu.is_active()
    jobs = asked.jobs or (min(2, os.cpu_count() or 1) if software else 1)
    if min(asked.executions, asked.rounds, jobs) < 1:
        parser.error("--executions, --rounds and --jobs must be at least 1")
    started = time.monotonic()
    tasks = [
        Job(number, jobs, asked.device, asked.seed, asked.executions, asked.rounds, started) for number in range(jobs)
    ]
    name = "the software NPU" if software else f"{asked.device}, as torch has it"
    print(f"soak on {name}, seed {asked.seed}, {asked.rounds} rounds in {jobs} processes", flush=True)
    try:
        blind, parts = play(tasks)
    except NoDevice as error:
        parser.error(str(error))
    wrong = failures(blind, parts)
    report(sum(parts, Totals()), parts, blind, time.monotonic() - started)
    for failure in wrong:
        print(f"failed: {failure}")
    print(f"soak: {sum(parts, Totals())}")
    return int(bool(wrong))


def report(totals: Totals, parts: Sequence[Totals], blind: Sequence[int], seconds: float) -> None:
    """Say what was done and found."""
    seen = UNORDERED_ROUNDS - len(blind)
    memory = ", ".join(f"{part.resident[0] >> 20} to {part.resident[-1] >> 20}" for part in parts if part.resident)
    print(
        f"negative control: {seen} of {UNORDERED_ROUNDS} rounds with fences off corrupted bytes and were out of order"
    )
    print("faults:")
    for fault in Fault:
        print(f"  {totals.faults[fault]:6} {fault.value}")
    print(
        f"bytes compared {totals.audit.compared}, launches {totals.launches}, runtimes {totals.runtimes}\n"
        f"trace records {totals.records}, edges {totals.edges}, unordered {totals.unordered}, races {totals.races}\n"
        f"slots handed on {totals.handed_on}, leases quarantined {totals.quarantined}\n"
        f"host waits {totals.host_waits}, for staging only; 0 in {totals.steady_rounds} rounds with a full ring\n"
        f"events of a runtime {totals.events}, at most {totals.events_allowed} are allowed\n"
        f"host memory, first to last round, in MiB: {memory}; at most {HOST_GROWTH >> 20} more are allowed\n"
        f"lost: {', '.join(f'{count} {what}' for what, count in totals.lost.items()) or 'nothing'}\n"
        f"time: {seconds:.0f} s"
    )
    for what in totals.violations[:20]:
        print(f"  {what}")


if __name__ == "__main__":
    sys.exit(main())
