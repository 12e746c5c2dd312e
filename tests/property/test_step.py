# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Any schedule of an engine gives chunks that the tail store accepts, and every lie about it is refused.

The engine here is as asynchronous as vLLM's: it schedules a step before it knows what the last one accepted, and may
learn of an end one step late.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from afd_dsv4.execution.step import ImpossibleStep, Steps
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SlotIndex, TailStore
from afd_dsv4.tail.tables import RequestId

DRAFTS = 3
SEATS = 4


@dataclass
class Running:
    """One request: rows that are truly there, and those that a step has queued."""

    position: int = 0
    scheduled: int = 0
    drafts: int = 0

    def settle(self, rng: random.Random) -> None:
        """The last step is over: some of its drafts stay."""
        self.position += self.scheduled - rng.randint(0, self.drafts)
        self.scheduled = self.drafts = 0


class Engine:
    """Schedules at random; a request has a seat while it runs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.running: dict[str, Running] = {}
        self.waiting: list[str] = []  # preempted
        self.finished: set[str] = set()
        self.made = 0

    def step(self) -> tuple[dict[str, set[str]], list[tuple[str, int, int, int]]]:
        """Ends since the last step, and the batch: id, position, rows, drafts."""
        rng = self.rng
        for request in self.running.values():
            request.settle(rng)
        gone = {name for name in self.running if rng.random() < 0.1}
        preempted = {name for name in self.running.keys() - gone if rng.random() < 0.1}
        finished, self.finished = self.finished | gone, set()
        for name in gone | preempted:
            del self.running[name]
        self.waiting += sorted(preempted)
        resumed = set()
        while len(self.running) < SEATS and rng.random() < 0.6:
            if self.waiting and rng.random() < 0.7:
                name = self.waiting.pop(0)
                resumed.add(name)
            elif gone and rng.random() < 0.5:
                name = gone.pop()  # resubmitted under the same id
            else:
                name, self.made = f"request {self.made}", self.made + 1
            self.running[name] = Running()
        batch = []
        for name, request in rng.sample(sorted(self.running.items()), len(self.running)):
            if rng.random() < 0.8:
                decodes = request.position > 0 and rng.random() < 0.6
                request.drafts = rng.randint(0, DRAFTS) if decodes else 0
                request.scheduled = 1 + request.drafts if decodes else rng.choice([1, 3, 4, 5, 127, 128, 129, 300])
                batch.append((name, request.position, request.scheduled, request.drafts))
        # One that nobody told of its preemption, as after a forced one: it is named when it comes back.
        told = {name for name in preempted if rng.random() < 0.8 or name in resumed}
        late = preempted - told
        self.finished = {name for name in late if name in self.waiting}
        self.waiting = [name for name in self.waiting if name not in self.finished]
        return {"finished": finished, "preempted": told, "resumed": resumed}, batch


def take(steps: Steps, batch: list[tuple[str, int, int, int]]) -> tuple[object, ...]:
    names, computed, scheduled, drafts = (list(column) for column in zip(*batch, strict=True))
    return steps.chunks(names, computed, scheduled, {n: d for n, d in zip(names, drafts, strict=True) if d})


@settings(max_examples=60)
@given(st.integers(0, 1 << 30))
def test_any_schedule_gives_chunks_that_the_store_accepts_and_every_tail_is_given_back(seed: int) -> None:
    engine, steps = Engine(seed), Steps()
    shapes = {4: TailShape(4, True, 8, 2, DRAFTS), 128: TailShape(128, False, 32, 1, DRAFTS)}
    # A preemption that was not told holds its seat for one step longer.
    store = TailStore(shapes, max_num_seqs=2 * SEATS, slots=1)
    for _ in range(30):
        ends, batch = engine.step()
        for request in steps.end(**ends):
            store.end(request)
        if batch:
            chunks = take(steps, batch)
            assert [(c.request, c.start, c.tokens, c.drafts) for c in chunks] == batch  # type: ignore[attr-defined]
            store.plan(chunks, SlotIndex(0))  # type: ignore[arg-type]
    everybody = {*engine.running, *engine.finished, *engine.waiting}
    for request in steps.end(finished=everybody):
        store.end(request)
    assert len(steps) == 0
    assert all(store.seat(RequestId(name)) is None for name in everybody)


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.sampled_from(["optimistic", "behind", "end untold", "twice"]))
def test_every_lie_is_refused(seed: int, lie: str) -> None:
    engine, steps = Engine(seed), Steps()
    for _ in range(40):
        known = {name: request.position + request.scheduled for name, request in engine.running.items()}
        ends, batch = engine.step()
        victims = [row for row in batch if row[0] in known and not any(row[0] in names for names in ends.values())]
        if lie == "end untold":
            victims = [
                row for row in batch if row[0] in known and row[0] in ends["finished"] and known[row[0]] > DRAFTS
            ]
            ends = {how: set() for how in ends} if victims else ends
        steps.end(**ends)
        if not victims:
            if batch:
                take(steps, batch)
            continue
        name, position, rows, drafts = victims[0]
        lies = {"optimistic": known[name] + 1, "behind": known[name] - DRAFTS - 1, "end untold": 0, "twice": position}
        others = [row for row in batch if row[0] != name or lie == "twice"]
        with pytest.raises(ImpossibleStep):
            take(steps, [*others, (name, lies[lie], rows, drafts)])
        return
    event(f"{lie}: no occasion")
