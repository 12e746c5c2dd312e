# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Small programs of host threads: each shape of work, with each fault that it can meet.

A fault that may strike at several places strikes at each of them, once a run: `Faults` asks the chooser. Threads are as
in vLLM: those of uBatches end before the next forward begins (`joined`), and swallow what a layer raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from afd_dsv4.execution.cam import CamError, CamForward
from afd_dsv4.execution.forward import BrokenOff
from afd_dsv4.workspace.arena import ArenaClosed, CaptureError, Exhausted, Settlement, StillLeased
from afd_dsv4.workspace.identity import ExecutionId, Generation
from afd_dsv4.workspace.lease import LeaseState, OrderError
from tests.explorer.hosts import Program
from tests.explorer.oracle import OracleDevice, OracleStream, Work
from tests.explorer.world import TIMEOUT_S, Broken, Refused, Run, Thread, World, graph, live


class DeviceFailed(Exception):
    """A planted error of the runtime."""


class Faults:
    """What goes wrong in a run, at most once, wherever it can.

    Args:
        world: whose chooser says when.
        kind: "raise" (a layer raises), "die" (the thread of a uBatch ends without finishing), or "record", "wait",
            "query" (an event does).
    """

    def __init__(self, world: World, kind: str = "") -> None:
        self._world = world
        self._kind = kind
        self._over = False
        if kind in ("record", "wait", "query"):
            world.device.fail = self._fail

    def strikes(self, kind: str) -> bool:
        """Whether it does so here."""
        if kind != self._kind or self._over or self._world.device.drained:
            return False
        self._over = bool(self._world.device.choose(2))
        return self._over

    def _fail(self, what: str) -> None:
        if self.strikes(what):
            raise DeviceFailed(what)


def execute(
    world: World,
    execution: ExecutionId,
    names: Sequence[str],
    streams: Sequence[OracleStream],
    faults: Faults,
    *,
    joined: Callable[[], bool] | None = None,
    settle: bool = True,
    halves: bool = False,
) -> Thread:
    """One execution, step by step, as one thread does it.

    Args:
        world: where.
        execution: its identity.
        names: its requests.
        streams: step i goes to stream i mod their number; the lists go to the first.
        faults: what goes wrong.
        joined: when it may begin.
        settle: ask for its end right away.
        halves: each step is two launches, of the first request and of the others, on neighbouring streams.
    """
    yield joined
    name = f"{execution.generation}.{execution.ubatch}"
    try:
        entry = None
        if world.staging:
            entry = world.take(name)
            yield None
        try:
            run = world.begin(execution, names, streams[0], entry)
        finally:
            if world.staging and entry is not None:
                world.staging.copied(entry, streams[0])
    except (Exhausted, CaptureError, ArenaClosed, Refused, OrderError, DeviceFailed) as error:
        world.refused.append(error)
        return
    try:
        for index, step in enumerate(world.steps):
            yield run.may(step)
            if faults.strikes("die"):
                run.dead = True
                world.refused.append(Broken("died"))
                return
            if faults.strikes("raise"):
                raise Broken(f"at {step}")
            if halves:
                run.launch(step, streams[index % len(streams)], requests=slice(1), complete=False)
                yield None
                run.launch(step, streams[(index + 1) % len(streams)], requests=slice(1, None))
            else:
                run.launch(step, streams[index % len(streams)])
    except (Broken, OrderError, DeviceFailed) as error:  # the layer above swallows it
        world.refused.append(error)
    yield None
    finish(world, run)
    if settle:
        yield None
        world.settle(run)


def finish(world: World, run: Run) -> None:
    try:
        run.finish()
    except (OrderError, DeviceFailed) as error:
        world.refused.append(error)


def end_forward(world: World, threads: Callable[[], bool]) -> Thread:
    """The thread of the runner: finishes what dead threads left open."""
    yield threads
    for run in world.open():
        finish(world, run)


class Ended:
    """Wraps threads, and knows when they have ended."""

    def __init__(self) -> None:
        self._running = 0

    def watch(self, thread: Thread) -> Thread:
        self._running += 1
        try:
            yield from thread
        finally:
            self._running -= 1

    def wrap(self, threads: Iterable[Thread]) -> list[Thread]:
        return [self.watch(thread) for thread in threads]

    def __call__(self) -> bool:
        return self._running == 0


class Stage:
    """One stage's execution, as `execution/cam.py` sees it; nothing without requests."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        lease = self.run.lease
        return self._lost or (f"{lease!r}" if lease.state is LeaseState.QUARANTINED else None)

    def computed(self, layer: int) -> bool:
        return all(step in self.run.launched for step in self.run.world.steps if step[0] == layer)

    def finish(self) -> None:
        if len(self.run.launched) < len(self.run.world.steps):
            self._lost = "launches are missing"
        if self.run.lease.state is LeaseState.ACQUIRED:
            self.run.finish()


class Stages:
    """What a forward of stages asks of a runtime. In place of chunks it gets names."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.open: list[Stage] = []

    @property
    def num_layers(self) -> int:
        return len(self.world.steps) // len(self.world.kinds)

    def mint(self) -> Generation:
        return Generation(1)

    def begin(self, chunks: Sequence[Any], *, generation: Generation | None = None, ubatch: int = 0) -> Stage:
        self.open.append(Stage(self.world.begin(live(generation or 1, ubatch), chunks, self.world.streams[0])))
        return self.open[-1]

    def open_of(self, generation: Generation) -> tuple[ExecutionId, ...]:
        return tuple(stage.run.execution for stage in self.open)

    def end_forward(self, generation: Generation) -> tuple[ExecutionId, ...]:
        left, self.open = self.open, []
        for stage in left:
            try:
                stage.finish()
            except (OrderError, DeviceFailed) as error:
                self.world.refused.append(error)
        return tuple(stage.run.execution for stage in left)

    def abandon(self, generation: Generation, why: str) -> tuple[ExecutionId, ...]:
        for stage in self.open:
            stage._lost = why
            self.world.arena.quarantine(stage.run.lease, why)
        return ()


def cam(fault: str, *, cut: bool) -> Build:
    """Two stages of one thread that take turns layer by layer, each on a stream of its own; then another forward."""

    def build(world: World) -> list[Thread]:
        faults = Faults(world, fault)

        def thread() -> Thread:
            try:
                with CamForward(Stages(world), [("p",), ("p",) if cut else ("q",)]) as forward:
                    before: int | None = None
                    for layer in range(len(world.steps) // len(world.kinds)):
                        for stage in (0, 1):
                            for step in world.steps:
                                if step[0] == layer:
                                    yield None
                                    if faults.strikes("raise"):
                                        raise Broken(f"at {step} of stage {stage}")
                                    forward[stage].run.launch(step, world.streams[stage])
                            if before is not None:
                                forward.received(before)
                            forward.sent(layer, stage)
                            before = stage
                    forward.received(1)
            except (Broken, BrokenOff, CamError, OrderError, DeviceFailed) as error:
                world.refused.append(error)  # a `CamError` is never allowed: this schedule is the right one
            for name in [name for name, request in world.requests.items() if request.void]:
                world.end(name)
            yield from execute(world, live(2), ("q",) if cut else ("p",), (world.streams[1],), faults)

        return [thread()]

    return build


Build = Callable[[World], list[Thread]]
FAULTS = ("", "raise", "die", "record", "wait", "query")
ANY_FAULT = (Broken, OrderError, DeviceFailed, Exhausted, Refused)


def apart(world: World) -> Thread:
    """Leases whose streams never wait for each other: each must wait for the last lease by itself."""
    for generation in (1, 2, 3):
        yield None
        lease = world.arena.acquire(live(generation))
        for shift, part in enumerate("xy"):
            yield None
            stream = world.streams[(generation + shift) % 3]
            lease.touch(stream, writes=(part,))
            cell = ((part, lease.slot.index), (generation,))
            world.device.launch(stream, Work(f"{generation} writes {part}", writes=(cell,)))
            lease.touch(stream, reads=(part,))
            world.device.launch(stream, Work(f"{generation} reads {part}", reads=(cell,)))
        yield None
        lease.seal()


def watcher(world: World, passes_s: float = 0.0) -> Thread:
    """Time passes, and the watchdog looks."""
    yield None
    world.now += passes_s
    world.arena.watch()


def clock(world: World, seconds: float) -> Thread:
    """Time passes, now and then."""
    for _ in range(2):
        yield None
        world.now += seconds


def hang(world: World, stream: int) -> Thread:
    """A stream dies."""
    yield None
    world.streams[stream].hung = True


def cancel(world: World, name: str) -> Thread:
    """A request is cancelled, wherever its executions are."""
    yield lambda: name in world.requests or bool(world.refused)
    if name in world.requests:
        world.end(name)


def settle_again(world: World) -> Thread:
    """Everything is settled twice, by lease and by identity, and something that never was."""
    yield lambda: len(world.runs) > 1
    for run in world.runs[:2]:
        world.arena.settle(run.lease)
        slot = run.lease.slot
        found = world.arena.settle(run.execution)
        assert (found is Settlement.STALE_GENERATION) == (run.lease not in (slot.lease, slot.last))
        yield None
    assert world.arena.settle(live(99)) is Settlement.NOT_FOUND


def ubatches(
    fault: str, *, cut: bool, second: Sequence[str] = ("p",), stream: int = 0, ended_before: Sequence[str] = ()
) -> Build:
    """Two uBatches on their streams, with or without a request cut between them, and a second forward."""

    def build(world: World) -> list[Thread]:
        zero, one = world.streams[:2]
        faults = Faults(world, fault)
        ended, closed, last = Ended(), Ended(), Ended()
        begun = (lambda: bool(world.runs or world.refused)) if cut else None
        threads = ended.wrap(
            [
                execute(world, live(1, 0), ("p",), (zero,), faults, settle=False),
                execute(world, live(1, 1), ("p",) if cut else ("q",), (one,), faults, joined=begun, settle=False),
            ]
        )
        if fault == "die":
            threads += closed.wrap([end_forward(world, ended)])
        done = closed if fault == "die" else ended

        def forward() -> Thread:
            yield done
            for name in ended_before:
                if name in world.requests:
                    world.end(name)
            yield from execute(world, live(2), second, (world.streams[stream],), faults)

        threads += last.wrap([forward()])
        return [*threads, end_forward(world, last)] if fault == "die" else threads

    return build


def shared(halves: bool, fault: str = "") -> Build:
    """Two uBatches that share an auxiliary stream, the second goes on with the requests of the first."""

    def build(world: World) -> list[Thread]:
        zero, one, auxiliary = world.streams
        faults = Faults(world, fault)
        names = ("p", "q") if halves else ("p",)

        def begun() -> bool:
            return bool(world.runs or world.refused)

        ended = Ended()
        threads = ended.wrap(
            [
                execute(world, live(1, 0), names, (zero, auxiliary), faults, halves=halves),
                execute(world, live(1, 1), names, (one, auxiliary), faults, joined=begun),
            ]
        )
        return [*threads, end_forward(world, ended)] if fault == "die" else threads

    return build


def in_a_row(*executions: tuple[Sequence[str], Sequence[int]], fault: str = "") -> Build:
    """One thread, one execution after the other: asynchronous scheduling. Each is requests and streams."""

    def build(world: World) -> list[Thread]:
        faults = Faults(world, fault)

        def thread() -> Thread:
            for generation, (names, streams) in enumerate(executions, 1):
                for name in [name for name in world.requests if name not in names]:
                    world.end(name)
                chosen = [world.streams[index] for index in streams]
                yield from execute(world, live(generation), names, chosen, faults, settle=False)
                for run in world.open():
                    if run.execution == live(generation):
                        finish(world, run)

        return [thread()]

    return build


def crowd(executions: int) -> Build:
    """Threads that know nothing of each other, more than there are slots."""

    def build(world: World) -> list[Thread]:
        faults = Faults(world)
        return [
            execute(world, live(1, index), (f"r{index}",), (world.streams[index % len(world.streams)],), faults)
            for index in range(executions)
        ]

    return build


def both(*builds: Build) -> Build:
    """The threads of several."""
    return lambda world: [thread for build in builds for thread in build(world)]


def one(make: Callable[..., Thread], *args: object) -> Build:
    """A single thread."""
    return lambda world: [make(world, *args)]


def world(**options: object) -> Callable[[OracleDevice], World]:
    return lambda device: World(device, **options)  # type: ignore[arg-type]


def replayed(world: World, generation: int, stream: int) -> Thread:
    """The lists go to the first stream, the graph to another."""
    yield None
    run = world.begin(graph(generation), ("p",), world.streams[0], None, "g")
    yield None
    run.replay("g", world.streams[stream])
    yield None
    run.finish()


def captured(world: World) -> Thread:
    """A graph is captured over two streams, then replayed on one and on the other."""
    yield None
    try:
        yield from world.capture("g", graph(11, capture=True), world.streams[:2])
    except CaptureError as error:
        world.refused.append(error)
        return
    yield from replayed(world, 12, 0)
    yield from replayed(world, 13, 1)


def recaptured(world: World) -> Thread:
    """The memory is replaced between two replays: the second is refused until the graph has been captured again."""
    yield from captured(world)
    world.drain()
    world.arena.reset()
    world.free_memory(tails=False)
    try:
        yield from replayed(world, 14, 0)
    except CaptureError as error:
        world.refused.append(error)
    else:
        raise AssertionError("a graph was replayed that writes to memory of somebody else")
    yield from world.capture("g", graph(15, capture=True), world.streams[:2])
    yield from replayed(world, 16, 1)


def asks_for_a_graph_nobody_named(world: World) -> Thread:
    yield None
    try:
        world.arena.capture("other", graph(9, capture=True))
    except CaptureError as error:
        world.refused.append(error)


def ends(world: World, what: str) -> Thread:
    """The arena is closed, or reset, at any time: refused while anything is live, and then nothing has changed.

    Otherwise the memory is gone, and whatever still touches it finds somebody else's.
    """
    yield None
    before = [(slot.lease, slot.last, slot.quarantined) for slot in world.arena.slots]
    try:
        getattr(world.arena, what)()
    except StillLeased as error:
        world.refused.append(error)
        assert [(slot.lease, slot.last, slot.quarantined) for slot in world.arena.slots] == before
        assert not world.arena.closed
    else:
        world.free_memory(tails=what == "close")


def programs() -> list[Program]:
    """All of them."""
    two = world()
    out = []

    def add(
        name: str,
        where: Callable[[OracleDevice], World],
        *builds: Build,
        allowed: tuple[type[BaseException], ...] = (),
        loses: bool = False,
        rich: bool = False,
    ) -> None:
        out.append(Program(name, where, both(*builds), allowed, loses, rich))

    for fault in FAULTS:
        allowed, loses = ANY_FAULT if fault else (), fault in ("record", "query")
        what = fault or "no fault"
        for cut in (False, True):
            shape = "cut request" if cut else "two uBatches"
            add(f"{shape}, {what}", two, ubatches(fault, cut=cut), allowed=allowed, loses=loses)
            if fault != "die":  # that thread is the runner's
                add(
                    f"two stages of one thread, {shape}, {what}",
                    two,
                    cam(fault, cut=cut),
                    allowed=(*allowed, BrokenOff) if fault else (),
                    loses=loses or fault in ("raise", "wait"),  # with an item under way both are quarantined
                )
        add(
            f"auxiliary stream overlaps inside a layer, {what}",
            world(kinds=("a", "b")),
            in_a_row((("p",), (0, 1)), (("p",), (0, 1)), (("p",), (0, 1)), fault=fault),
            allowed=allowed,
            loses=loses,
        )
        add(
            f"one slot on three streams, {what}",
            world(slots=1, streams=3, layers=3),
            in_a_row((("p",), (0, 1)), (("p",), (1, 2)), (("q",), (2, 0)), fault=fault),
            allowed=allowed,
            loses=loses,
        )
        add(
            f"a seat is taken again, {what}",
            world(streams=3, layers=3, seats=1),
            in_a_row((("p",), (0,)), (("q",), (1,)), (("r",), (2,)), fault=fault),
            allowed=allowed,
            loses=loses,
        )
        add(
            f"staging ring, {what}",
            world(entries=2, seats=3),
            in_a_row((("p",), (0,)), (("p", "q"), (1,)), (("p", "q", "r"), (0,)), (("q",), (1,)), fault=fault),
            allowed=allowed,
            loses=loses,
        )
    for cut in (False, True):
        shape = "cut request" if cut else "two uBatches"
        again = ubatches("", cut=cut, second=("q",))
        add(f"{shape}, a request is cancelled at any time", world(seats=3), again, one(cancel, "p"), allowed=ANY_FAULT)
        add(f"{shape}, the watchdog looks at any time", two, ubatches("", cut=cut), one(watcher))
        for stream in (0, 1):
            add(
                f"{shape}, stream {stream} dies, and time passes",
                two,
                ubatches("", cut=cut),
                one(hang, stream),
                one(watcher, TIMEOUT_S + 1),
                allowed=ANY_FAULT,
                loses=True,
            )
        for what in ("close", "reset"):
            add(
                f"{shape}, {what} at any time",
                two,
                ubatches("", cut=cut),
                one(ends, what),
                allowed=(StillLeased, ArenaClosed),
            )
        add(f"{shape}, all settled twice", two, ubatches("", cut=cut), one(settle_again))
    add(
        "a stream dies under every other execution, and time passes",
        two,
        in_a_row((("p",), (0,)), (("p",), (1,)), (("p",), (0,)), (("q",), (0,))),
        one(hang, 1),
        one(clock, TIMEOUT_S * 0.6),
        allowed=(Exhausted, Refused),
        loses=True,
    )
    add(
        "an execution breaks off behind a dead stream, and time passes",
        world(slots=2, seats=2, layers=1),
        ubatches("raise", cut=True, second=("q",), stream=1),
        one(hang, 0),
        one(watcher, TIMEOUT_S + 1),
        allowed=ANY_FAULT,
        loses=True,
    )
    add(
        "an execution breaks off behind a slow stream, and time passes",
        world(slots=2, seats=2, layers=1),
        ubatches("raise", cut=True, second=("q",), stream=1),
        one(watcher, TIMEOUT_S + 1),
        allowed=ANY_FAULT,
        loses=True,
    )
    kinds = world(streams=3, kinds=("a", "b"))
    for fault in ("", "raise", "die"):
        allowed, what = ANY_FAULT if fault else (), fault or "no fault"
        add(f"cut requests beside an auxiliary stream, {what}", kinds, shared(False, fault), allowed=allowed, rich=True)
        add(
            f"decode and prefill are two launches, {what}",
            world(streams=3),
            shared(True, fault),
            allowed=allowed,
            rich=True,
        )
    three = world(slots=3, streams=3, seats=3)
    add("three uBatches of two layers", three, crowd(3), rich=True)
    add("three uBatches of two layers, all settled twice", three, crowd(3), one(settle_again), rich=True)
    add("three layers of a cut request", world(layers=3), ubatches("", cut=True))
    few = world(streams=3, seats=3, layers=1)
    add("two slots, three uBatches", few, crowd(3), allowed=(Exhausted,), rich=True)
    add(
        "an execution breaks off behind one that still runs, and its seat is taken",
        world(streams=3, layers=3, seats=1, slots=3),
        ubatches("raise", cut=True, second=("q",), stream=2, ended_before=("p",)),
        allowed=ANY_FAULT,
        rich=True,
    )
    add(
        "two slots, three uBatches, all settled twice",
        few,
        crowd(3),
        one(settle_again),
        allowed=(Exhausted,),
        rich=True,
    )
    add(
        "a request of two executions ends, and its seat is taken",
        world(slots=3, streams=3, seats=1),
        in_a_row((("p",), (0,)), (("p",), (1,)), (("q",), (2,))),
    )
    add(
        "a request is cancelled under an open execution, and its seat is wanted",
        world(seats=1),
        crowd(2),
        one(cancel, "r0"),
        allowed=ANY_FAULT,
    )
    add("streams of a lease that share nothing", world(slots=1, streams=3), one(apart))
    graphs = world(slots=1, graphs=("g",))
    eager = in_a_row((("q",), (0,)), (("q",), (1,)))
    add("graph", graphs, one(captured), one(asks_for_a_graph_nobody_named), allowed=(CaptureError,))
    add("graph beside eager executions", graphs, one(captured), eager, allowed=(CaptureError,))
    layers = world(slots=1, layers=3, graphs=("g",))
    add("graph of three layers on two streams in turn", layers, one(captured), allowed=(CaptureError,))
    add("graph, and its memory is replaced", graphs, one(recaptured), allowed=(CaptureError,))
    return out
