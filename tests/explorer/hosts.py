# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Every host schedule of a program, run on the real arena one after the other.

Problem: the arena is real code with real state, which cannot be copied in the middle of a run.
Way: a run is a list of choices: which host thread goes next, how each event query is answered, whether a planted fault
strikes. It is repeated from the start with the same choices and the next alternative at the last open one, until none
is left. After each run two judges look at it that know nothing of each other: `judge.py` at the device work, in all its
orders, and the order checker at the arena's trace. Then the arena must be in a state that is defined.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from afd_dsv4.workspace.arena import Exhausted, Settlement
from afd_dsv4.workspace.identity import ExecutionId
from afd_dsv4.workspace.lease import LeaseState
from afd_dsv4.workspace.order import check
from tests.explorer.graph import Explored
from tests.explorer.judge import Jobs, jobs, judge
from tests.explorer.oracle import OracleDevice
from tests.explorer.world import TIMEOUT_S, Thread, World


@dataclass(frozen=True)
class Program:
    """A few host threads and what may become of them.

    Attributes:
        name: shape and fault.
        world: makes the worker.
        threads: makes the host threads.
        allowed: what the host may be told instead of what it asked for.
        loses: leases may end in quarantine.
        rich: hardly two of its schedules come to the same, so that it is worth more of them.
    """

    name: str
    world: Callable[[OracleDevice], World]
    threads: Callable[[World], list[Thread]]
    allowed: tuple[type[BaseException], ...] = ()
    loses: bool = False
    rich: bool = False


class Chooser:
    """Answers from a list, then always with the first alternative; remembers what it could have answered.

    Args:
        prefix: the first answers.
        rng: answers what comes after the prefix; None answers 0.
    """

    def __init__(self, prefix: list[int], rng: random.Random | None = None) -> None:
        self._prefix = prefix
        self._rng = rng
        self.taken: list[int] = []
        self.open: list[int] = []

    def __call__(self, alternatives: int) -> int:
        if alternatives == 1:
            return 0
        at = len(self.taken)
        if at < len(self._prefix):
            pick = self._prefix[at]
        else:
            pick = 0 if self._rng is None else self._rng.randrange(alternatives)
        self.taken.append(pick)
        self.open.append(alternatives)
        return pick

    def following(self) -> list[int] | None:
        """The choices of the next run in depth-first order; None after the last."""
        for at in range(len(self.taken) - 1, -1, -1):
            if self.taken[at] + 1 < self.open[at]:
                return [*self.taken[:at], self.taken[at] + 1]
        return None


@dataclass(frozen=True)
class Outcome:
    """One host schedule.

    Attributes:
        choices: repeat it with these.
        explored: all device orders of what it queued.
        fresh: no earlier schedule of the program queued the same.
        history: all that the arena did, as its trace has it without the times, hashed: choices may differ and the host
            still have done the same.
        unordered: what the order checker says of the trace.
        broken: what else is not as it must be.
    """

    choices: tuple[int, ...]
    explored: Explored
    fresh: bool
    history: int
    unordered: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not (self.explored.violating or self.explored.stuck or self.unordered or self.broken)


class Schedules:
    """Distinct host schedules of a program: all of them, where there are not too many.

    Of more than `limit`, half are the first ones in depth-first order and half are drawn at random.

    Attributes:
        all: once iterated over, whether there are no others.
    """

    def __init__(self, program: Program, limit: int, seed: int = 0) -> None:
        self._program = program
        self._limit = limit
        self._rng = random.Random(f"{program.name} {seed}")
        self._cache: dict[Jobs, Explored] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._following: list[int] | None = []
        self.all = False

    def __iter__(self) -> Iterator[Outcome]:
        yield from self._first((self._limit + 1) // 2)
        yield from self._drawn()
        yield from self._first(self._limit)
        self.all = self._following is None

    def _first(self, limit: int) -> Iterator[Outcome]:
        """Depth first, from where this left off."""
        while self._following is not None and len(self._seen) < limit:
            chooser = Chooser(self._following)
            outcome = run(self._program, chooser, self._cache)
            self._following = chooser.following()
            yield from self._new(outcome)

    def _drawn(self) -> Iterator[Outcome]:
        """At random, until the limit, or until most draws bring nothing new: then depth first is faster."""
        stale = 0
        while self._following is not None and len(self._seen) < self._limit and stale < 20:
            outcome = run(self._program, Chooser([], self._rng), self._cache)
            stale = stale + 1 if outcome.choices in self._seen else 0
            yield from self._new(outcome)

    def _new(self, outcome: Outcome) -> Iterator[Outcome]:
        if outcome.choices not in self._seen:
            self._seen.add(outcome.choices)
            yield outcome


def run(program: Program, chooser: Chooser, cache: dict[Jobs, Explored]) -> Outcome:
    """One host schedule."""
    device = OracleDevice(chooser)
    world = program.world(device)
    broken: list[str] = []
    waiting: dict[int, Callable[[], bool] | None] = {}
    threads = dict(enumerate(program.threads(world)))
    for index, thread in list(threads.items()):
        _step(threads, waiting, index, thread, broken)
    while threads:
        able = [index for index in threads if (condition := waiting[index]) is None or condition()]
        if not able:
            broken.append(f"host threads {list(threads)} wait for each other")
            break
        index = able[chooser(len(able))]
        _step(threads, waiting, index, threads[index], broken)
    todo = jobs(device.log, world.last_look())
    fresh = todo not in cache
    if fresh:
        cache[todo] = judge(todo)
    records = world.trace.records()
    unordered = tuple(str(violation) for violation in check(records).violations)
    device.drained = True
    broken += [f"refused: {error!r}" for error in world.refused if not isinstance(error, program.allowed)]
    try:
        broken += _ends(program, world)
    except Exception as error:  # whatever it is: it was not expected
        broken.append(f"at the end: {error!r}")
    history = hash(tuple(record[1:] for record in records))
    return Outcome(tuple(chooser.taken), cache[todo], fresh, history, unordered, tuple(broken))


def _step(
    threads: dict[int, Thread],
    waiting: dict[int, Callable[[], bool] | None],
    index: int,
    thread: Thread,
    broken: list[str],
) -> None:
    """Let one host thread do one thing."""
    try:
        waiting[index] = next(thread)
    except StopIteration:
        del threads[index]
    except Exception as error:  # whatever it is: it was not expected
        broken.append(f"thread {index} ended with {error!r}")
        del threads[index]


def _ends(program: Program, world: World) -> list[str]:
    """Everything must have come to a defined end: each lease over or quarantined, each slot free or counted as lost."""
    arena, wrong = world.arena, []
    world.now += 2 * TIMEOUT_S
    arena.watch()
    for run in world.runs:
        outcome = world.settle(run)
        lost = run.lease.state is LeaseState.QUARANTINED
        over = outcome in (Settlement.RELEASED, Settlement.ALREADY_RELEASED, Settlement.STALE_GENERATION)
        if not over and outcome is not Settlement.IN_DOUBT:
            wrong.append(f"{run.lease!r} ends {outcome.value}")
        if lost and any(request.void is None for request in run.requests):
            wrong.append(f"{run.lease!r} is quarantined, and its requests are not void")
        if (lost or not over) and not program.loses:
            wrong.append(f"{run.lease!r} is in doubt, although all streams move")
    lost_leases = sum(run.lease.state is LeaseState.QUARANTINED for run in world.runs)
    if arena.counters.quarantined < lost_leases:
        wrong.append(f"{lost_leases} leases are quarantined, {arena.counters.quarantined} counted")
    if arena.closed:
        return wrong
    eager = [slot for slot in arena.slots if slot.index not in world.graph_slots]
    free = sum(not slot.quarantined for slot in eager)
    for count in range(len(eager) + 1):
        try:
            arena.acquire(ExecutionId(1000 + count))
        except Exhausted:
            if count != free:
                wrong.append(f"{free} slots should be free, {count} are")
            break
    else:
        wrong.append(f"more leases than {len(eager)} slots")
    return wrong
