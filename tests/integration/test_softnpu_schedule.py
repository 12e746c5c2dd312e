# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The starving schedule of the software NPU: what it may reorder it does, what it may not it keeps, and it never locks.

The other schedule, a delay before every task, is tested in `test_softnpu_streams.py`.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from afd_dsv4.softnpu import runtime as rt
from tests.npu_programs import ForkedGraph, hand_offs

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu

SECOND = 1_000_000  # microseconds: a bound that nothing here reaches


@pytest.fixture(autouse=True)
def _quiet_schedule() -> Iterator[None]:
    torch.npu.synchronize()
    yield
    rt.set_schedule(0)
    torch.npu.synchronize()


def stream_id(stream: Any) -> int:
    found = ctypes.c_int32()
    assert ctypes.CDLL("libascendcl.so").aclrtStreamGetId(ctypes.c_void_p(stream.npu_stream), ctypes.byref(found)) == 0
    return found.value


def seed_that_holds(stream: Any, task: int, others: list[Any], tasks: int) -> int:
    """A seed that holds this task of the stream, and no other of its or of the others' first tasks."""
    for seed in range(1, 100_000):
        held = {
            (stream_id(s), index)
            for s in [stream, *others]
            for index in range(tasks)
            if rt.schedule_holds(seed, stream_id(s), index)
        }
        if held == {(stream_id(stream), task)}:
            return seed
    raise AssertionError("no such seed")


def test_what_is_held_is_a_function_of_seed_stream_and_task() -> None:
    def held(seed: int, stream: int) -> list[bool]:
        return [rt.schedule_holds(seed, stream, task) for task in range(300)]

    assert held(7, 1) == held(7, 1)
    assert held(7, 1) != held(8, 1)
    assert held(7, 1) != held(7, 2)
    assert not any(held(0, 1))
    assert 25 < sum(held(7, 1)) < 75, "one in six"


def test_a_run_holds_the_tasks_of_its_seed() -> None:
    side, x = torch.npu.Stream(), torch.zeros(8, device="npu")
    torch.npu.synchronize()
    for seed in (3, 4):
        rt.set_schedule(seed, SECOND, starve=True)
        before = rt.tasks_held()
        with torch.npu.stream(side):
            for _ in range(30):
                x.add_(1)
        side.synchronize()
        assert rt.tasks_held() - before == sum(rt.schedule_holds(seed, stream_id(side), task) for task in range(30))
    rt.set_schedule(0, starve=True)
    before = rt.tasks_held()
    with torch.npu.stream(side):
        x.add_(1)
    side.synchronize()
    assert rt.tasks_held() == before


def test_a_held_stream_is_overtaken_by_what_is_queued_later_on_another() -> None:
    """No time is involved: the held task gets its turn when the host waits and the other stream has run dry."""
    held, other = torch.npu.Stream(), torch.npu.Stream()
    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    rt.set_schedule(seed_that_holds(held, 0, [other], 4), SECOND, starve=True)
    with torch.npu.stream(held):
        x.fill_(1.0)
    with torch.npu.stream(other):
        for value in (2.0, 3.0, 4.0):
            x.fill_(value)
    torch.npu.synchronize()
    assert torch.equal(x.cpu(), torch.ones(8)), "queued first, ran last"


def test_a_held_stream_runs_when_its_bound_has_passed_although_the_rest_never_rests() -> None:
    held, busy = torch.npu.Stream(), torch.npu.Stream()
    x, done = torch.zeros(8, device="npu"), torch.npu.Event()
    torch.npu.synchronize()
    rt.set_schedule(seed_that_holds(held, 0, [busy], 2), 20_000, starve=True)
    signal = torch.npu.ExternalEvent()
    with torch.npu.stream(held):
        x.add_(1)
        done.record(held)
    while not done.query():  # the host never waits, so only the bound lets go
        pass
    signal.record(busy)
    assert torch.equal(x.cpu(), torch.ones(8))


def orders(seeds: range) -> set[float]:
    """Which of two unordered writes came last."""
    a, b = torch.npu.Stream(), torch.npu.Stream()
    x = torch.zeros(8, device="npu")
    seen = set()
    for seed in seeds:
        torch.npu.synchronize()
        rt.set_schedule(seed, SECOND, starve=True)
        with torch.npu.stream(a):
            x.fill_(1.0)
        with torch.npu.stream(b):
            x.fill_(2.0)
        torch.npu.synchronize()
        seen.add(float(x[0].item()))
    return seen


def test_an_unordered_pair_is_seen_in_both_orders_within_a_few_seeds() -> None:
    assert orders(range(1, 40)) == {1.0, 2.0}


@pytest.mark.parametrize("seed", range(1, 9))
def test_an_ordered_program_keeps_its_result_and_one_without_its_waits_does_not(seed: int) -> None:
    assert hand_offs(True, 40, seed=seed, max_delay_us=2000, starve=True)
    assert not hand_offs(False, 40, seed=seed, max_delay_us=2000, starve=True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_graph_of_two_streams_keeps_its_result_while_it_starves(seed: int) -> None:
    graph = ForkedGraph()
    rt.set_schedule(seed, 2000, starve=True)
    assert graph.right(1.0, 4.0)


def test_streams_that_all_wait_for_one_another_in_turn_come_to_their_end() -> None:
    """A ring of waits on eight streams, many held at once: nothing may wait for what waits for it."""
    streams = [torch.npu.Stream() for _ in range(8)]
    x = torch.zeros(8, device="npu")
    torch.npu.synchronize()
    rt.set_schedule(11, SECOND, starve=True)
    for _ in range(10):
        for before, stream in zip([streams[-1], *streams[:-1]], streams, strict=True):
            stream.wait_stream(before)
            with torch.npu.stream(stream):
                x.mul_(2).add_(1)
                x.remainder_(1009)
    torch.npu.synchronize()
    expected = 0
    for _ in range(80):
        expected = (expected * 2 + 1) % 1009
    assert torch.equal(x.cpu(), torch.full((8,), float(expected)))
