# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""All device orders of what a host has queued, judged by what each launch would read.

The long way, and knowing nothing of leases, fences or traces: streams run in every order that their waits allow, and
whatever the host queued after it had learnt that an event passed runs behind that. Memory holds who wrote last; a
launch that finds somebody else's stamp is a corruption. The host's own writes to memory are one more stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from afd_dsv4.device.model import ModelStream
from tests.explorer.graph import Explored, explore
from tests.explorer.oracle import HostDid, Learnt, Log, Queued, Work

HOST = 0
Needs = dict[int, int]  # stream -> how many of its launches come first


@dataclass(frozen=True)
class Job:
    """A launch, with the launches of other streams that come first."""

    name: str
    needs: tuple[tuple[int, int], ...]
    reads: tuple[tuple[int, object], ...]
    writes: tuple[tuple[int, object], ...]


Jobs = tuple[tuple[Job, ...], ...]


def _join(into: Needs, other: Needs) -> None:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


def jobs(log: Log, last: Work) -> Jobs:
    """What is to run, by stream, the host's first. Waits and records are folded into what needs what.

    Args:
        log: of an `OracleDevice`.
        last: what is read when all is over.
    """
    streams: dict[ModelStream, int] = {}
    names: dict[object, int] = {}
    out: list[list[Job]] = [[]]
    floor: list[Needs] = [{}]  # by stream: what its next launch needs
    points: dict[tuple[ModelStream, int], Needs] = {}  # what must have run where a point has passed
    given: dict[ModelStream, int] = {}

    def add(stream: int, work: Work) -> None:
        needs = tuple((s, n) for s, n in sorted(floor[stream].items()) if s != stream and n)
        reads = tuple((names.setdefault(r, len(names)), stamp) for r, stamp in work.reads)
        writes = tuple((names.setdefault(r, len(names)), stamp) for r, stamp in work.writes)
        out[stream].append(Job(work.name, needs, reads, writes))
        floor[stream] = {}  # the stream's own order keeps it

    known: Needs = {}  # all the host ever learnt
    for entry in log:
        if isinstance(entry, Learnt):
            _join(floor[HOST], points[entry.point.stream, entry.point.given])
            _join(known, points[entry.point.stream, entry.point.given])
        elif isinstance(entry, HostDid):
            add(HOST, entry.work)
        else:
            assert isinstance(entry, Queued)
            if entry.stream not in streams:
                streams[entry.stream] = len(out)
                out.append([])
                floor.append({})
            me = streams[entry.stream]
            _join(floor[me], known)
            if out[HOST]:
                _join(floor[me], {HOST: len(out[HOST])})
            if entry.behind is not None:
                _join(floor[me], points[entry.behind.stream, entry.behind.given])
            if isinstance(entry.run, Work):
                add(me, entry.run)
            count = given[entry.stream] = given.get(entry.stream, 0) + 1
            points[entry.stream, count] = {**floor[me], me: len(out[me])}
    _join(floor[HOST], {stream: len(queue) for stream, queue in enumerate(out) if stream != HOST})
    add(HOST, last)
    return tuple(map(tuple, out))


def judge(todo: Jobs) -> Explored:
    """Every order of the jobs. A state is how far each stream has come, and who wrote what last."""
    size = 1 + max((r for queue in todo for job in queue for r, _ in job.reads + job.writes), default=-1)
    ends = tuple(map(len, todo))
    State = tuple[tuple[int, ...], tuple[object, ...]]

    def moves(state: State) -> list[tuple[str, State, bool]]:
        at, memory = state
        out = []
        for stream, index in enumerate(at):
            if index == ends[stream]:
                continue
            job = todo[stream][index]
            for other, count in job.needs:
                if at[other] < count:
                    break
            else:
                wrong = False
                for resource, stamp in job.reads:
                    if memory[resource] != stamp:
                        wrong = True
                after = memory
                if job.writes:
                    cells = list(memory)
                    for resource, stamp in job.writes:
                        cells[resource] = stamp
                    after = tuple(cells)
                out.append((job.name, ((*at[:stream], index + 1, *at[stream + 1 :]), after), wrong))
        return out

    return explore(((0,) * len(todo), (None,) * size), moves, lambda state: state[0] == ends)
