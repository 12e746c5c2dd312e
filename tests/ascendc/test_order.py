# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Random programs of flags and barriers: the emulation stops at the first access that nothing orders, at no other.

The oracle is a graph of what must be complete before what, searched from every access; the emulation keeps clocks.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ascendc import emulation

VECTOR, COPY_IN, COPY_OUT, GET, SET_VALUE, SET, WAIT, BARRIER = range(8)
S, V, MTE2, MTE3, ALL = range(5)
EVENTS = [
    *((MTE2, V), (V, MTE2), (MTE3, V), (V, MTE3), (MTE3, MTE2), (MTE2, MTE3)),
    *((S, V), (V, S), (S, MTE2), (MTE2, S), (S, MTE3), (MTE3, S)),
]
PIPE_OF = {VECTOR: V, COPY_IN: MTE2, COPY_OUT: MTE3, GET: S, SET_VALUE: S}
BLOCKS = 3
Step = tuple[int, int, int]


@dataclass
class Graph:
    """Steps as nodes. A pipe starts a step when its waits and barriers before it are done; S runs one by one."""

    before: list[set[int]] = field(default_factory=list)  # of each step, those complete when it starts

    def add(self, steps: list[Step], index: int, matching: dict[int, int]) -> None:
        kind, what, _ = steps[index]
        direct: set[int] = set()
        for other in range(index):
            other_kind, other_what, _ = steps[other]
            if (BARRIER, ALL) in ((kind, what), (other_kind, other_what)):
                direct.add(other)
            elif kind in PIPE_OF:
                pipe = PIPE_OF[kind]
                if holds_up(other_kind, other_what, pipe) or (pipe == S and PIPE_OF.get(other_kind) == S):
                    direct.add(other)
            elif kind in (BARRIER, SET):
                pipe = what if kind == BARRIER else EVENTS[what][0]
                if holds_up(other_kind, other_what, pipe) or PIPE_OF.get(other_kind) == pipe:
                    direct.add(other)
            elif kind == WAIT and other == matching[index]:
                direct.add(other)
        self.before.append(direct.union(*(self.before[other] for other in direct)))


def holds_up(kind: int, what: int, pipe: int) -> bool:
    """Whether `pipe` does nothing until this step is done."""
    return (kind == WAIT and EVENTS[what][1] == pipe) or (kind == BARRIER and what == pipe)


def accesses(step: Step) -> list[tuple[str, int, bool]]:
    """Blocks of UB, and of the GM that is read and written, with whether they are written."""
    kind, first, second = step
    if kind == VECTOR:
        return [("UB", first, False), ("UB", second, True)]
    if kind not in PIPE_OF:
        return []
    touched = [("UB", first, kind in (COPY_IN, SET_VALUE))]
    if kind in (COPY_IN, COPY_OUT) and second >= 0:
        touched.append(("GM", second, kind == COPY_OUT))
    return touched


def first_unordered(steps: list[Step]) -> tuple[int, set[int]]:
    """The first step that touches what an earlier one, not known to be complete, touches; and the traps that say so."""
    matching, pending = {}, {}
    for index, (kind, what, _) in enumerate(steps):
        if kind == SET:
            pending[what] = index
        elif kind == WAIT:
            matching[index] = pending.pop(what)
    graph = Graph()
    for index, step in enumerate(steps):
        graph.add(steps, index, matching)
        traps = set()
        for space, block, writes in accesses(step):
            for other in set(range(index)) - graph.before[index]:
                if any(space == s and block == b and (writes or w) for s, b, w in accesses(steps[other])):
                    pipe, before = PIPE_OF[step[0]], PIPE_OF[steps[other][0]]
                    traps.add((9 if space == "UB" else 18) if pipe != before else 11 if pipe == V else 19)
        if traps:
            return index, traps
    return len(steps), {0}


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    """Up to 30 steps; every flag is set before it is waited for, and none is left."""
    block = st.integers(0, BLOCKS - 1)
    steps: list[Step] = []
    pending: list[int] = []
    for _ in range(draw(st.integers(1, 24))):
        kind = draw(st.sampled_from([*PIPE_OF, SET, SET, WAIT, BARRIER]))
        if kind == SET:
            event = draw(st.sampled_from([e for e in range(len(EVENTS)) if e not in pending]))
            pending.append(event)
            steps.append((SET, event, 0))
            if draw(st.booleans()):
                steps.append((WAIT, pending.pop(), 0))
        elif kind == WAIT and pending:
            steps.append((WAIT, pending.pop(draw(st.integers(0, len(pending) - 1))), 0))
        elif kind == BARRIER:
            steps.append((BARRIER, draw(st.sampled_from([S, V, V, MTE2, MTE3, ALL])), 0))
        elif kind in PIPE_OF:
            steps.append((kind, draw(block), draw(block if kind == VECTOR else st.integers(-1, 1))))
    return [*steps, *((WAIT, event, 0) for event in pending)]


def run(steps: list[Step]) -> tuple[int, int]:
    code = np.array(steps, np.int32).reshape(-1)
    trap = ctypes.c_int32()
    at = emulation.library().ascendc_program(ctypes.c_void_p(code.ctypes.data), len(steps), ctypes.byref(trap))
    return at, trap.value


SEEN: Counter[bool] = Counter()


@given(programs())
@settings(max_examples=400)
def check_programs(steps: list[Step]) -> None:
    at, trap = run(steps)
    index, traps = first_unordered(steps)
    SEEN[index < len(steps)] += 1
    assert at == index
    assert trap in traps


def test_the_emulation_stops_at_the_first_access_that_nothing_orders() -> None:
    SEEN.clear()
    check_programs()
    assert min(SEEN[True], SEEN[False]) > 40  # both outcomes, often
