# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The real arena and staging ring around symbolic memory: what an executor does, without torch and NumPy.

`World` calls the arena as `compressor/stock.py` does: take a staging entry, acquire, plan pages, follow, upload, launch
layer by layer with a scatter of the layer's ids first, complete, finish. Pages are planned after the rule of
`tail/store.py` in its hardest case: a request that goes on writes other pages than it reads, those that it read become
the slot's, and every layer passes them on to the next.

A host thread is a generator; each of its steps is what a real thread does without letting go of the arena's lock. It
yields None, or a condition that must hold before it goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field

from afd_dsv4.device.model import ModelGraph
from afd_dsv4.workspace.arena import Settlement, WorkspaceArena
from afd_dsv4.workspace.identity import Domain, ExecutionId, ExecutionKind, Generation
from afd_dsv4.workspace.lease import WHOLE, Lease, LeaseState, OrderError
from afd_dsv4.workspace.staging import StagingRing
from afd_dsv4.workspace.trace import Trace
from tests.explorer.oracle import OracleDevice, OracleStream, Resource, Stamp, Template, Work

Step = tuple[int, str]  # layer, kind
Thread = Generator[Callable[[], bool] | None, None, None]
TIMEOUT_S = 10.0


class Broken(Exception):
    """A planted exception."""


class Refused(Exception):
    """What an executor refuses before it leases anything or right after: no seat, or a void tail."""


@dataclass(eq=False)
class Request:
    """A request and its seat.

    Attributes:
        seat: whose pages it has.
        stamps: what its tail holds by step, once all that is planned has run.
        void: why its tail must not be read.
    """

    name: str
    seat: int
    stamps: dict[Step, Stamp] = field(default_factory=dict)
    void: str | None = None


@dataclass(frozen=True)
class Pages:
    """One request's part of a step: pages read, with what they hold, and written."""

    history: tuple[tuple[Resource, Stamp], ...]
    fresh: Resource


class World:
    """One worker.

    Args:
        device: whose queries are chosen.
        slots: workspace slots.
        streams: how many.
        layers: of each kind.
        kinds: compressors in a layer.
        seats: most requests at once.
        entries: of the staging ring; 0 for none.
        graphs: one key per graph slot.
    """

    def __init__(
        self,
        device: OracleDevice,
        *,
        slots: int = 2,
        streams: int = 2,
        layers: int = 2,
        kinds: Sequence[str] = ("a",),
        seats: int = 2,
        entries: int = 0,
        graphs: Sequence[Hashable] = (),
    ) -> None:
        self.device = device
        self.now = 0.0
        self.trace = Trace(None)
        self.arena: WorkspaceArena[OracleStream] = WorkspaceArena(
            device,
            slots,
            graphs=[[key] for key in graphs],
            fence_timeout_s=TIMEOUT_S,
            clock=lambda: self.now,
            trace=self.trace,
        )
        self.streams = [device.stream() for _ in range(streams)]
        self.staging = StagingRing(self.arena.events, list(range(entries))) if entries else None
        self.steps: list[Step] = [(layer, kind) for layer in range(layers) for kind in kinds]
        self.kinds = tuple(kinds)
        page = itertools.count(1)
        self.owned: dict[tuple[int, Step], Resource] = {
            (seat, step): ("page", next(page)) for step in self.steps for seat in range(seats)
        }
        self.spare: dict[tuple[int, int, str], Resource] = {
            (slot, place, kind): ("page", next(page))
            for slot in range(slots + len(graphs))
            for place in range(seats)
            for kind in kinds
        }
        self.free = list(range(seats))
        self.requests: dict[str, Request] = {}
        self.last: dict[int, Lease[OracleStream]] = {}
        self.runs: list[Run] = []
        self.refused: list[BaseException] = []  # what the host was told instead of what it asked for
        self.graph_slots = range(slots, slots + len(graphs))
        self.graphs: dict[Hashable, ModelGraph] = {}
        self.memory = 0  # counts how often the slots' memory was replaced: a captured graph keeps its addresses

    def usable(self, seat: int) -> bool:
        """Whether a stream can be made to wait for all that may still touch a free seat's pages."""
        return seat not in self.last or self.last[seat].can_be_waited_for()

    def begin(
        self,
        execution: ExecutionId,
        names: Sequence[str],
        stream: OracleStream,
        entry: int | None = None,
        graph: Hashable = None,
    ) -> Run:
        """Lease, plan, follow and upload."""
        lease = self.arena.acquire(execution) if graph is None else self.arena.replay(graph, execution)
        run = Run(self, lease, execution)
        self.runs.append(run)
        planned = False
        try:
            continued, taken = self._plan(run, names)
            planned = True
            self.follow(
                run,
                continues=[self.last[r.seat] for r in continued],
                after=[self.last[r.seat] for r in taken if r.seat in self.last],
            )
            self.upload(run, stream, entry)
        except BaseException as error:
            if planned:
                run.void(f"failed to begin: {error}")
                self.last.update({request.seat: lease for request in run.requests})
            lease.seal(whole=not planned)
            raise
        self.last.update({request.seat: lease for request in run.requests})
        return run

    def follow(self, run: Run, continues: list[Lease[OracleStream]], after: list[Lease[OracleStream]]) -> None:
        seats = [request.seat for request in run.requests]
        run.lease.follow(continues=continues, after=after, seats=seats, void=run.void)

    def upload(self, run: Run, stream: OracleStream, entry: int | None) -> None:
        slot = (run.lease.slot.index, self.memory)
        run.lease.touch(stream, writes=("lists", "table"))
        reads = () if entry is None else ((("entry", entry), (run.name,)),)
        writes = ((("lists", *slot), (run.name,)), (("table", *slot), (run.name,)))
        self.device.launch(stream, Work(f"{run.name} uploads", reads, writes))

    def take(self, run: str) -> int:
        """The host fills a staging entry."""
        assert self.staging is not None
        entry, _ = self.staging.take()
        self.device.host(Work(f"{run} fills entry {entry}", writes=((("entry", entry), (run,)),)))
        return entry

    def _plan(self, run: Run, names: Sequence[str]) -> tuple[list[Request], list[Request]]:
        """Pages change owner. Like the store: nothing changes unless all is well."""
        new = [name for name in names if name not in self.requests]
        free = [seat for seat in self.free if self.usable(seat)]
        if len(new) > len(free):
            raise Refused(f"no seat for {new}")
        if void := [name for name in names if name in self.requests and self.requests[name].void]:
            raise Refused(f"the tails of {void} are void")
        for name in new:
            self.requests[name] = Request(name, free.pop(0))
            self.free.remove(self.requests[name].seat)
        run.requests = [self.requests[name] for name in names]
        slot = run.lease.slot.index
        for place, request in enumerate(run.requests):
            for step in self.steps:
                page = self.owned[request.seat, step]
                stamp = (run.name, *step)
                if request.name in new:
                    run.pages.setdefault(step, []).append(Pages((), page))
                else:
                    fresh = self.spare[slot, place, step[1]]
                    self.owned[request.seat, step], self.spare[slot, place, step[1]] = fresh, page
                    run.pages.setdefault(step, []).append(Pages(((page, request.stamps[step]),), fresh))
                request.stamps[step] = (request.name, *stamp)
        return (
            [request for request in run.requests if request.name not in new],
            [request for request in run.requests if request.name in new],
        )

    def open(self) -> list[Run]:
        """Executions that nobody has finished."""
        return [run for run in self.runs if run.lease.state is LeaseState.ACQUIRED]

    def end(self, name: str) -> None:
        """A request ends, or is cancelled: its seat is free, its pages stay with the seat."""
        self.free.append(self.requests.pop(name).seat)

    def capture(self, key: Hashable, execution: ExecutionId, streams: Sequence[OracleStream]) -> Thread:
        """Capture all steps as one graph, each on the next stream in turn."""
        run = Run(self, self.arena.capture(key, execution), execution)
        with self.device.capture() as self.graphs[key]:
            try:
                for step, stream in zip(self.steps, itertools.cycle(streams), strict=False):
                    yield None
                    run.launch(step, stream)
            finally:
                run.lease.seal(whole=len(run.launched) == len(self.steps))

    def settle(self, run: Run) -> Settlement:
        return self.arena.settle(run.lease)

    def drain(self) -> None:
        """The host waits for everything."""
        for stream in self.streams:
            event = self.device.event()
            event.record(stream)
            event.synchronize()

    def free_memory(self, *, tails: bool) -> None:
        """The host frees all slots, and the tails with them or not; others use the memory, and slots get new."""
        gone: list[Resource] = [
            (part, slot.index, self.memory) for slot in self.arena.slots for part in ("table", "lists")
        ]
        self.memory += 1
        if tails:
            gone += [*self.owned.values(), *self.spare.values()]
            self.requests.clear()
        self.device.host(Work("memory is freed", writes=tuple((what, ("freed",)) for what in gone)))

    def last_look(self) -> Work:
        """What must be there when all is over: every tail that nobody called void."""
        reads = [
            (self.owned[request.seat, step], stamp)
            for request in self.requests.values()
            if request.void is None
            for step, stamp in request.stamps.items()
        ]
        return Work("tails are read", reads=tuple(reads))


class Run:
    """One execution.

    Attributes:
        launched: steps queued.
    """

    def __init__(self, world: World, lease: Lease[OracleStream], execution: ExecutionId) -> None:
        self.world = world
        self.lease = lease
        self.execution = execution
        self.name = f"{execution.generation}.{execution.ubatch}"
        self.requests: list[Request] = []
        self.pages: dict[Step, list[Pages]] = {}
        self.launched: list[Step] = []
        self.layer: int | None = None  # whose ids the table holds
        self.dead = False  # its thread has ended and left it open

    def void(self, why: str) -> None:
        for request in self.requests:
            request.void = why

    def may(self, step: Hashable) -> Callable[[], bool]:
        """A uBatch thread's turn: those that had our requests before have queued this step, or are finished."""

        def ready() -> bool:
            return all(
                step in before._completed
                or before.state is not LeaseState.ACQUIRED
                or any(run.dead for run in self.world.runs if run.lease is before)
                for before in self.lease._continues
            )

        return ready

    def launch(self, step: Step, stream: OracleStream, *, requests: slice = slice(None), complete: bool = True) -> None:
        """Scatter the layer's ids where the table has others, and compress; decode and prefill may be two launches."""
        layer, kind = step
        scatter = self.layer != layer
        writes = (("pages", kind), "table") if scatter else (("pages", kind),)
        self.lease.touch(stream, reads=("lists", "table"), writes=writes, step=step)
        self.queue(step, stream, scatter, requests)
        self.layer = layer
        if complete:
            self.launched.append(step)
            self.lease.complete(step)

    def replay(self, key: Hashable, stream: OracleStream) -> None:
        """Queue all steps as one graph."""
        self.lease.touch(stream, writes=(WHOLE,), step=WHOLE)
        self.world.device.bound = self
        self.world.device.replay(self.world.graphs[key], stream)
        self.launched = list(self.world.steps)
        self.lease.complete(WHOLE)

    def queue(self, step: Step, stream: OracleStream, scatter: bool, requests: slice) -> None:
        """The work itself; captured, it is that of whoever replays it."""
        slot = (self.lease.slot.index, self.world.memory)
        scattered = Template(lambda run: run.scatter(step, slot))
        compressed = Template(lambda run: run.compress(step, slot, requests))
        capturing = self.world.device.capturing()
        if scatter:
            self.world.device.launch(stream, scattered if capturing else scattered.bind(self))
        self.world.device.launch(stream, compressed if capturing else compressed.bind(self))

    def scatter(self, step: Step, slot: tuple[int, int]) -> Work:
        lists, ids = ((("lists", *slot), (self.name,)),), ((("table", *slot), (self.name, step[0])),)
        return Work(f"{self.name} scatters {step}", lists, ids)

    def compress(self, step: Step, slot: tuple[int, int], requests: slice) -> Work:
        reads: list[tuple[Resource, Stamp]] = [(("table", *slot), (self.name, step[0]))]
        writes: list[tuple[Resource, Stamp]] = []
        for request, pages in list(zip(self.requests, self.pages.get(step, []), strict=True))[requests]:
            reads += pages.history
            writes.append((pages.fresh, (request.name, self.name, *step)))
        return Work(f"{self.name} compresses {step}", tuple(reads), tuple(writes))

    def finish(self) -> None:
        missing = [step for step in self.world.steps if step not in self.launched]
        if missing:
            self.void(f"{self.name} ended without {missing}")
        try:
            self.lease.seal(whole=not missing)
        except OrderError:
            raise
        except BaseException as error:
            self.void(f"{self.name} could not be sealed: {error}")
            raise


def live(generation: int, ubatch: int = 0) -> ExecutionId:
    return ExecutionId(Generation(generation), ubatch)


def graph(generation: int, *, capture: bool = False) -> ExecutionId:
    kind = ExecutionKind.CAPTURE if capture else ExecutionKind.LIVE
    return ExecutionId(Generation(generation), 0, 0, Domain.GRAPH, kind)
