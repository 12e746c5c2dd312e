# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A small exploration of the real arena, every planted fault, and the explorer's own parts against the long way.

`make explore` is the same with all the schedules that time allows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.device.model import ModelDevice, Task
from tests.explorer.__main__ import RICH, explain, main
from tests.explorer.graph import explore
from tests.explorer.hosts import Chooser, Program, Schedules, run
from tests.explorer.judge import Jobs, jobs, judge
from tests.explorer.mutants import MUTANTS, Mutant, hunt, program_of
from tests.explorer.oracle import OracleDevice, Work
from tests.explorer.programs import programs
from tests.explorer.world import Thread, World


@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_no_schedule_of_the_shipped_protocol_violates_anything(program: Program) -> None:
    for outcome in Schedules(program, 40):
        assert outcome.clean, explain(outcome)


@pytest.mark.parametrize("option", ["--budget", "--mutant-budget", "--processes"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_command_that_would_look_at_nothing_is_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With no schedule nothing violates anything."""
    with pytest.raises(SystemExit) as ended:
        main([option, value])
    assert ended.value.code == 2
    assert f"argument {option}: {value} is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_found(mutant: Mutant) -> None:
    """The one that a checker misses fails here. For a fault of order, the trace must show what corrupted memory."""
    finding = hunt(mutant, limit=600, enough=1)
    assert finding.found, finding
    if mutant.traced:
        assert finding.corrupt, finding
        assert finding.unordered, finding


def test_stages_that_leave_their_schedule_are_a_counterexample_that_says_so() -> None:
    """And the next forward of the program is run all the same."""
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == "a receive that the forward is not told of"]
    finding = hunt(mutant, limit=20, enough=1)
    assert finding.example.startswith("refused: CamError('stage 1 of generation 1 sends layer 0 before stage 0")


@pytest.mark.parametrize("name", sorted({mutant.program for mutant in MUTANTS}))
def test_the_program_of_a_mutant_is_clean_without_it_in_all_the_schedules_looked_at(name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.program == name)
    assert all(outcome.clean for outcome in Schedules(program_of(mutant), 120))


def test_a_planted_fault_is_gone_afterwards() -> None:
    before = [(owner, name, owner.__dict__.get(name)) for mutant in MUTANTS for owner, name, _ in mutant.swaps]
    for mutant in MUTANTS:
        hunt(mutant, limit=1)
    assert before == [(owner, name, owner.__dict__.get(name)) for mutant in MUTANTS for owner, name, _ in mutant.swaps]


def test_mutants_and_programs_have_names_of_their_own() -> None:
    assert len(MUTANTS) >= 24
    for names in ([mutant.name for mutant in MUTANTS], [program.name for program in programs()]):
        assert len(set(names)) == len(names)


def test_host_schedules_are_all_interleavings_each_once() -> None:
    log: list[int] = []

    def thread(index: int, steps: int) -> Thread:
        for _ in range(steps):
            yield None
            log.append(index)

    program = Program("toy", World, lambda _world: [thread(0, 3), thread(1, 4)])
    seen = set()
    schedules = Schedules(program, 1000)
    for outcome in schedules:
        assert outcome.clean
        seen.add(tuple(log))
        log.clear()
    assert schedules.all
    assert len(seen) == math.comb(7, 3)


def test_where_there_are_more_schedules_than_the_limit_each_comes_once_and_none_is_called_all() -> None:
    program = programs()[0]
    schedules = Schedules(program, 200)
    seen = [outcome.choices for outcome in schedules]
    assert len(seen) == len(set(seen)) == 200
    assert not schedules.all


def test_a_query_is_answered_both_ways_until_it_must_have_passed() -> None:
    answers = []

    def asks(world: World) -> Thread:
        yield None
        event = world.device.event()
        stream = world.streams[0]
        world.device.launch(stream, Work("work"))
        event.record(stream)
        answers.append((event.query(), event.query(), event.query()))

    assert all(outcome.clean for outcome in Schedules(Program("toy", World, lambda world: [asks(world)]), 1000))
    assert sorted(answers) == [
        (False, False, False),
        (False, False, True),
        (False, True, True),
        (True, True, True),
    ]


def test_a_query_behind_a_hung_stream_is_pending() -> None:
    device = OracleDevice(lambda _alternatives: 1)
    one, two = device.stream(), device.stream()
    first, second = device.event(), device.event()
    first.record(one)
    first.wait(two)
    second.record(two)
    one.hung = True
    assert not second.query()
    one.hung = False
    assert second.query()


def test_a_schedule_is_repeated_by_its_choices() -> None:
    program = programs()[0]
    for outcome in Schedules(program, 20, seed=7):
        again = run(program, Chooser(list(outcome.choices)), {})
        assert (again.choices, again.explored) == (outcome.choices, outcome.explored)


def test_the_same_seed_draws_the_same_schedules() -> None:
    program = programs()[0]
    first, second, other = ([o.choices for o in Schedules(program, 60, seed)] for seed in (1, 1, 2))
    assert first == second
    assert first != other


Step = tuple[str, int, int]  # what, on which stream, with which event or resource


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["read", "write", "record", "wait", "learn", "host"]), st.integers(0, 2), st.integers(0, 1)
        ),
        max_size=9,
    )
)
def test_the_judge_counts_as_running_every_order_one_by_one_does(steps: list[Step]) -> None:
    device = OracleDevice(lambda _alternatives: 1)
    streams = [device.stream() for _ in range(3)]
    events = [device.event() for _ in range(2)]
    for number, (what, stream, which) in enumerate(steps):
        cell = (("cell", which), ("stamp", number))
        if what == "read":
            device.launch(streams[stream], Work(f"{number}", reads=((cell[0], ("stamp", number - 1)),)))
        elif what == "write":
            device.launch(streams[stream], Work(f"{number}", writes=(cell,)))
        elif what == "record":
            events[which].record(streams[stream])
        elif what == "wait":
            events[which].wait(streams[stream])
        elif what == "learn":
            events[which].synchronize()
        else:
            device.host(Work(f"{number}", writes=(cell,)))
    todo = jobs(device.log, Work("end"))
    found = judge(todo)
    orders = list(one_by_one(todo, [0] * len(todo), {}, clean=True))
    assert (found.schedules, found.violating, found.stuck) == (len(orders), orders.count(False), 0)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["work", "record", "wait"]), st.integers(0, 2), st.integers(0, 1)),
        max_size=8,
    )
)
def test_the_judge_allows_the_orders_that_the_model_device_can_run_in(steps: list[Step]) -> None:
    """Waits and records, which the judge folds away, are run as the entries that they are."""

    def queue(device: ModelDevice, work: Callable[[str], Task]) -> None:
        streams = [device.stream() for _ in range(3)]
        events = [device.event() for _ in range(2)]
        for number, (what, stream, which) in enumerate(steps):
            if what == "work":
                device.launch(streams[stream], work(str(number)))
            elif what == "record":
                events[which].record(streams[stream])
            else:
                events[which].wait(streams[stream])

    oracle = OracleDevice(lambda _alternatives: 1)
    queue(oracle, Work)
    ran = set()
    following: list[int] | None = []
    while following is not None:
        chooser = Chooser(following)
        device = ModelDevice()
        device.pick = lambda ready, chooser=chooser: ready[chooser(len(ready))]
        order: list[str] = []
        queue(device, lambda name, order=order: lambda: order.append(name))
        device.run()
        ran.add((*order, "end"))
        following = chooser.following()
    todo = jobs(oracle.log, Work("end"))
    assert set(named(todo, [0] * len(todo))) == ran
    assert judge(todo).schedules == len(ran)


def named(todo: Jobs, at: list[int]) -> list[tuple[str, ...]]:
    """Each order, by the names of the jobs."""
    if all(index == len(queue) for index, queue in zip(at, todo, strict=True)):
        return [()]
    return [
        (todo[stream][index].name, *rest)
        for stream, index in enumerate(at)
        if index < len(todo[stream]) and all(at[other] >= count for other, count in todo[stream][index].needs)
        for rest in named(todo, [i + (stream == other) for other, i in enumerate(at)])
    ]


def one_by_one(todo: Jobs, at: list[int], memory: dict[int, object], *, clean: bool) -> list[bool]:
    """Whether each order is clean, without merging anything."""
    if all(index == len(queue) for index, queue in zip(at, todo, strict=True)):
        return [clean]
    out = []
    for stream, queue in enumerate(todo):
        if at[stream] == len(queue) or any(at[other] < count for other, count in queue[at[stream]].needs):
            continue
        job = queue[at[stream]]
        good = all(memory.get(resource) == stamp for resource, stamp in job.reads)
        after = [index + (stream == other) for other, index in enumerate(at)]
        out += one_by_one(todo, after, {**memory, **dict(job.writes)}, clean=clean and good)
    return out


def test_orders_that_cannot_end_are_counted_as_stuck() -> None:
    found = explore(0, lambda state: [("step", state + 1, False)] if state < 2 else [], lambda state: state == 3)
    assert (found.schedules, found.stuck) == (1, 1)


def test_the_command_fails_when_a_mutant_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """One schedule is not enough to find them all."""
    assert main(["--budget", "1", "--mutant-budget", "1", "--processes", "1"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    match = re.fullmatch(r"explore: schedules=(\d+) violations=0 mutants=(\d+)/(\d+)", last)
    assert match
    assert len(programs()) <= int(match[1]) <= RICH * len(programs())
    assert int(match[2]) < int(match[3]) == len(MUTANTS)
