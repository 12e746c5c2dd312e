# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Every order of a small concurrent program at once, as paths through a graph of states.

Problem: orders are too many to run one by one, 10^8 for three streams of six launches.
Way: a state is all that the future depends on (positions and symbolic memory), so orders that meet in a state are
explored once from there on. Orders are then counted exactly, by dynamic programming over the paths.
Not here: what a program is (`raw.py` for scripts of streams and events, `judge.py` for what the arena has queued).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

State = TypeVar("State", bound=Hashable)
Move = tuple[str, State, bool]
"""Name, state after it, whether it breaks something."""


@dataclass(frozen=True)
class Explored:
    """What there is between the start and the ends.

    Attributes:
        states: distinct states.
        violations: distinct moves that break something: edges of the graph. The published prototype's "violating
            schedules" are these.
        schedules: orders from the start to an end, exactly.
        violating: those of them that break something.
        stuck: those that end although something is left to do.
        witness: the moves up to the first violation, breadth first; None without one.
    """

    states: int
    violations: int
    schedules: int
    violating: int
    stuck: int
    witness: tuple[str, ...] | None


def explore(
    start: State, moves: Callable[[State], list[tuple[str, State, bool]]], finished: Callable[[State], bool]
) -> Explored:
    """All orders. Every path must end: no state may lead back to itself."""
    seen: dict[State, tuple[State, str] | None] = {start: None}  # state -> how it was first reached
    level: dict[State, tuple[int, int]] = {start: (1, 1)}  # state -> orders that come here, those without a violation
    expanded: set[State] = set()
    violations = schedules = violating = stuck = 0
    witness: tuple[str, ...] | None = None
    while level:
        following: dict[State, tuple[int, int]] = {}
        for state, (orders, clean) in level.items():
            first = state not in expanded
            expanded.add(state)
            out = moves(state)
            if not out:
                schedules += orders
                violating += orders - clean
                stuck += 0 if finished(state) else orders
            for name, after, wrong in out:
                if wrong and first:
                    violations += 1
                    if witness is None:
                        witness = (*_path(seen, state), name)
                if after not in seen:
                    seen[after] = (state, name)
                before = following.get(after, (0, 0))
                following[after] = (before[0] + orders, before[1] + (0 if wrong else clean))
        level = following
    return Explored(len(seen), violations, schedules, violating, stuck, witness)


def _path(seen: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    names = []
    while (step := seen[state]) is not None:
        state, name = step
        names.append(name)
    return names[::-1]
