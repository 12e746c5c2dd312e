# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The loads of the soak of AFD: ranks one after another, with faults; controls; worlds of processes, without faults."""

from __future__ import annotations

import gc
import random

from afd_dsv4.softnpu import runtime as softnpu
from tests.afd import world
from tests.afd.ends import Life
from tests.afd.faults import APART
from tests.afd.judge import Totals, missed, quiet
from tests.afd.points import Mode, Point
from tests.afd.rank import Rank

FAULT_RATE = 0.05  # of forwards
LIFE = 60  # forwards of a rank, at most
CONTROL_FORWARDS = 60
WORLD_FORWARDS = 100
STARVE_US = 10_000  # much longer than the host takes for a launch: how fast it is must not decide what a control shows


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
        while totals.stages[mode] < stages or (points and missed(totals, mode)):
            softnpu.set_schedule(rng.getrandbits(31), rng.choice([10, 40, 150]), starve=rng.random() < 0.5)
            life = Life(totals, mode, rng, lines)
            for _ in range(rng.randint(2, LIFE)):
                left = [point for point in missed(totals, mode) if not point.ends]
                late = totals.stages[mode] + life.rank.found.stages >= stages
                if life.over or (late and not (points and left)):
                    break
                if points and (late or rng.random() < FAULT_RATE):
                    todo = todo or _shuffled(rng, mode, ends=False)
                    point = left[0] if late else todo.pop()
                    totals.hits[mode, point] += life.plant(point)
                else:
                    life.rank.forward(life.batch())
            todo_ends = todo_ends or _shuffled(rng, mode, ends=True)
            life.end(None if life.over or not points else todo_ends.pop())
            gc.collect()
    return totals


def _shuffled(rng: random.Random, mode: Mode, *, ends: bool) -> list[Point]:
    points = [point for point in Point if mode in point.where and point.ends == ends]
    return rng.sample(points, len(points))


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
        rank.model.auxiliary = rank.auxiliary, APART["uBatch 0"]
        for _ in range(forwards):
            rank.forward(rank.batch(rng))
        rank.land_all()
        found = rank.found.corrupt, len(rank.violations())
        rank.end_all()
        rank.disconnect()
        rank.runtime.close(1.0)
    return found


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
