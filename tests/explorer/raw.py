# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Scripts of streams and events, without any arena: the smallest form of a reported race.

A program is a list of operations per stream, all queued before anything runs, or a host that queues them one by one
and may query and wait in between. Device rules are torch.npu's: an event that was never recorded counts as complete, so
a wait for it queues nothing and a query answers true; a wait is for the record that was last when it was queued; with
the host task queue on, a call reaches its stream some time after the host made it, in order; a query inside a capture
is a violation, and what is queued there does not run.

Work reads and writes named resources symbolically: it writes a stamp, and a read that finds another one is a violation.

Counts against the prototype's (facts: table of six scripts): its states are positions and memory, where recording and
waiting are moves of their own, and exploration goes on behind a violation. Its "violating schedules" are distinct
violating moves of the state graph, not paths: with states merged, one such move stands for all orders that make it.
`Explored.violations` is that number, `Explored.violating` the paths: 4, 0, 3, 0, 3, 0, so they differ in the fifth
script only. `SCRIPTS` gives all six rows exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.explorer.graph import Explored, explore

Stamps = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Work:
    name: str
    reads: Stamps = ()
    writes: Stamps = ()


@dataclass(frozen=True)
class Record:
    event: str


@dataclass(frozen=True)
class Wait:
    event: str


StreamOp = Work | Record | Wait


@dataclass(frozen=True)
class Queue:
    """The host queues an operation."""

    stream: int
    op: StreamOp


@dataclass(frozen=True)
class Sync:
    """The host waits for an event."""

    event: str


@dataclass(frozen=True)
class Capture:
    """A capture begins or ends."""

    begins: bool


@dataclass(frozen=True)
class Query:
    """The host asks for an event and goes on with one of two lists."""

    event: str
    passed: tuple[HostOp, ...] = ()
    pending: tuple[HostOp, ...] = ()


HostOp = Queue | Sync | Query | Capture


@dataclass(frozen=True)
class Program:
    """A script.

    Attributes:
        streams: operations by stream, queued before anything runs.
        host: what the host does after that.
        task_queue: a queued operation reaches its stream later, not at once.
        blind: a query does not know what is still in the task queue, as one that asks ACL directly.
    """

    streams: tuple[tuple[StreamOp, ...], ...]
    host: tuple[HostOp, ...] = ()
    task_queue: bool = False
    blind: bool = False


class _State(NamedTuple):
    host: tuple[HostOp, ...]
    tasks: tuple[Queue, ...]
    queues: tuple[tuple[tuple[StreamOp, int], ...], ...]  # with the record that a wait waits for
    called: tuple[tuple[str, int], ...]  # records by event, as the host has called them
    recorded: tuple[tuple[str, int], ...]  # as the streams have them
    passed: tuple[tuple[str, int], ...]
    memory: Stamps
    capturing: bool


def _count(counts: tuple[tuple[str, int], ...], name: str) -> int:
    return dict(counts).get(name, 0)


def _set(values: tuple[tuple[str, int], ...], name: str, value: int) -> tuple[tuple[str, int], ...]:
    return tuple(sorted({**dict(values), name: value}.items()))


def _up(counts: tuple[tuple[str, int], ...], name: str) -> tuple[tuple[str, int], ...]:
    return _set(counts, name, _count(counts, name) + 1)


def _dispatch(state: _State, stream: int, op: StreamOp) -> _State:
    """An operation reaches its stream."""
    record = 0
    recorded = state.recorded
    if isinstance(op, Record):
        recorded = _up(recorded, op.event)
        record = _count(recorded, op.event)
    elif isinstance(op, Wait):
        record = _count(recorded, op.event)
        if not record:
            return state  # never recorded: complete, nothing to wait for
    queues = tuple((*q, (op, record)) if i == stream else q for i, q in enumerate(state.queues))
    return state._replace(queues=queues, recorded=recorded)


def _host(program: Program, state: _State) -> list[tuple[str, _State, bool]]:
    op, rest = state.host[0], state.host[1:]
    after = state._replace(host=rest)
    if isinstance(op, Capture):
        return [("capture", after._replace(capturing=op.begins), False)]
    if isinstance(op, Queue):
        name = f"queue {op.op}"
        if state.capturing:
            return [(name, after, False)]
        if isinstance(op.op, Record):
            after = after._replace(called=_up(state.called, op.op.event))
        if program.task_queue:
            return [(name, after._replace(tasks=(*state.tasks, op)), False)]
        return [(name, _dispatch(after, op.stream, op.op), False)]
    known = state.recorded if program.blind else state.called
    passed = _count(state.passed, op.event) >= _count(known, op.event)
    if isinstance(op, Sync):
        return [(f"synchronize {op.event}", after, state.capturing)] if passed else []
    answer = op.passed if passed else op.pending
    return [(f"query {op.event} -> {passed}", after._replace(host=(*answer, *rest)), state.capturing)]


def _device(state: _State, stream: int) -> tuple[str, _State, bool] | None:
    """The next operation of a stream; None if it is blocked."""
    op, record = state.queues[stream][0]
    queues = tuple(q[1:] if i == stream else q for i, q in enumerate(state.queues))
    after = state._replace(queues=queues)
    if isinstance(op, Wait):
        blocked = _count(state.passed, op.event) < record
        return None if blocked else (f"{stream}: wait {op.event}", after, False)
    if isinstance(op, Record):
        return f"{stream}: record {op.event}", after._replace(passed=_set(state.passed, op.event, record)), False
    memory = dict(state.memory)
    wrong = any(memory.get(resource) != stamp for resource, stamp in op.reads)
    memory.update(op.writes)
    return f"{stream}: {op.name}", after._replace(memory=tuple(sorted(memory.items()))), wrong


def _start(program: Program) -> _State:
    """Everything of `streams` is queued: records first, so that a wait finds its record wherever there is one."""
    state = _State(program.host, (), ((),) * len(program.streams), (), (), (), (), False)
    left = [list(ops) for ops in program.streams]
    while any(left):
        records = {op.event for ops in left for op in ops if isinstance(op, Record)}
        heads = [i for i, ops in enumerate(left) if ops and not (isinstance(ops[0], Wait) and ops[0].event in records)]
        if not heads:
            raise ValueError(f"the streams wait for each other in a circle: {program.streams}")
        op = left[heads[0]].pop(0)
        state = _dispatch(state, heads[0], op)
        if isinstance(op, Record):
            state = state._replace(called=_up(state.called, op.event))
    return state


def run(program: Program) -> Explored:
    """Every order of a program."""

    def moves(state: _State) -> list[tuple[str, _State, bool]]:
        out = _host(program, state) if state.host else []
        if state.tasks:
            task = state.tasks[0]
            rest = state._replace(tasks=state.tasks[1:])
            out.append((f"dispatch {task.op}", _dispatch(rest, task.stream, task.op), False))
        return out + [move for i, queue in enumerate(state.queues) if queue and (move := _device(state, i))]

    def finished(state: _State) -> bool:
        return not (state.host or state.tasks or any(state.queues))

    return explore(_start(program), moves, finished)


def writes(stamp: int, what: str = "slot") -> Work:
    return Work(f"{stamp} writes {what}", writes=((what, stamp),))


def reads(stamp: int, what: str = "slot") -> Work:
    return Work(f"{stamp} reads {what}", reads=((what, stamp),))


def _without(program: Program, stream: int, op: StreamOp) -> Program:
    streams = [tuple(o for o in ops if i != stream or o != op) for i, ops in enumerate(program.streams)]
    return replace(program, streams=tuple(streams))


# Each fixed script, and the one planted fault that turns it into the reported race.
_LAYERS = Program(((writes(1), reads(1), Record("e")), (Wait("e"), writes(2), reads(2))))
_MERGE = Program(((writes(1), Record("a")), (Wait("a"), Record("b")), (Wait("b"), writes(2), reads(2))))
_CONSUMERS = Program(((writes(1), Record("p")), (Wait("p"), reads(1), Record("c")), (Wait("c"), writes(2))))

#: Script -> (program, states, violations) of the prototype.
SCRIPTS: dict[str, tuple[Program, int, int]] = {
    "vllm#52836: layer L+1 on an auxiliary stream reuses the slot, no event": (
        _without(_without(_LAYERS, 0, Record("e")), 1, Wait("e")),
        13,
        4,
    ),
    "the same with the consumer's event and a wait": (_LAYERS, 7, 0),
    "rmm#2489: B waits for A's event and never records its own again, C takes with B's": (
        _without(_MERGE, 1, Record("b")),
        18,
        3,
    ),
    "rmm#2490: B records again": (_MERGE, 8, 0),
    "released on the producer's event while a second stream reads": (
        replace(_CONSUMERS, streams=(*_CONSUMERS.streams[:2], (Wait("p"), writes(2)))),
        14,
        1,
    ),
    "released on all consumers": (_CONSUMERS, 8, 0),
}
