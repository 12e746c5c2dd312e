# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Fault injection on the software NPU: streams that hang or die, tasks that fail, event calls that return an error."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afd_dsv4.softnpu import runtime as rt

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu


@pytest.fixture(autouse=True)
def _no_faults_after() -> Iterator[None]:
    torch.npu.synchronize()
    yield
    rt.clear_faults()
    torch.npu.synchronize()


def add_one(x: Any, stream: Any) -> None:
    with torch.npu.stream(stream):
        x.add_(1)


def recorded(stream: Any) -> Any:
    event = torch.npu.Event()
    event.record(stream)
    return event


def zeros(n: int = 8) -> Any:
    x = torch.zeros(n, device="npu")
    torch.npu.synchronize()
    return x


# ------------------------------------------------------------------------------------------------ a stream that hangs


@pytest.mark.parametrize("raw", [False, True])
def test_a_hung_stream_runs_what_it_was_given_before_and_the_rest_when_it_is_released(raw: bool) -> None:
    x, side = zeros(), torch.npu.Stream()
    add_one(x, side)
    before = recorded(side)
    rt.hang_stream(side.npu_stream if raw else side)
    add_one(x, side)
    after = recorded(side)
    before.synchronize()
    other = torch.npu.Stream()
    recorded(other).synchronize()  # the rest of the device goes on
    assert not after.query()
    assert not side.query()
    assert torch.equal(x.cpu(), torch.ones(8))
    rt.release_stream(side.npu_stream if raw else side)
    after.synchronize()
    assert torch.equal(x.cpu(), torch.full((8,), 2.0))


def test_who_waits_for_a_hung_stream_waits_with_it() -> None:
    x, hung, waiter = zeros(), torch.npu.Stream(), torch.npu.Stream()
    rt.hang_stream(hung)
    waiter.wait_event(recorded(hung))
    add_one(x, waiter)
    seen = recorded(waiter)
    recorded(torch.npu.Stream()).synchronize()
    assert not seen.query()
    rt.release_stream(hung)
    seen.synchronize()
    assert torch.equal(x.cpu(), torch.ones(8))


def test_every_hang_ends_with_one_release_or_when_the_faults_are_cleared() -> None:
    x, side = zeros(), torch.npu.Stream()
    for end in (lambda: rt.release_stream(side), rt.clear_faults):
        for _ in range(2):
            rt.hang_stream(side)
            add_one(x, side)
        end()
        side.synchronize()
    assert torch.equal(x.cpu(), torch.full((8,), 4.0))


# ------------------------------------------------------------------------------------------------ a stream that dies


def test_a_dead_stream_never_runs_its_tasks_and_says_so_instead_of_hanging() -> None:
    x, side = zeros(), torch.npu.Stream()
    rt.hang_stream(side)
    add_one(x, side)
    queued = recorded(side)
    rt.kill_stream(side)
    add_one(x, side)
    later = recorded(side)
    for event in (queued, later):
        assert not event.query()
        with pytest.raises(RuntimeError, match="507001"):
            event.synchronize()
    assert not side.query()
    for wait in (side.synchronize, torch.npu.synchronize):
        with pytest.raises(RuntimeError, match=r"(?s)507001.*is dead"):
            wait()
    assert torch.equal(x.cpu(), torch.zeros(8)), "the rest of the device goes on"


def test_a_stream_that_is_killed_while_it_waits_for_an_event_dies_too() -> None:
    x, hung, side = zeros(), torch.npu.Stream(), torch.npu.Stream()
    rt.hang_stream(hung)
    side.wait_event(recorded(hung))
    add_one(x, side)
    rt.kill_stream(side)
    with pytest.raises(RuntimeError, match="507001"):
        side.synchronize()
    rt.release_stream(hung)
    hung.synchronize()
    assert torch.equal(x.cpu(), torch.zeros(8))


def test_who_waits_for_a_dead_stream_raises_and_who_does_not_goes_on() -> None:
    x, y, dead, waiter, third = zeros(), zeros(), *(torch.npu.Stream() for _ in range(3))
    rt.kill_stream(dead)
    waiter.wait_event(recorded(dead))
    add_one(x, waiter)
    third.wait_event(recorded(waiter))
    for stream in (waiter, third):
        with pytest.raises(RuntimeError, match=r"(?s)507001.*is dead, or waits"):
            stream.synchronize()
    fine = torch.npu.Stream()
    add_one(y, fine)
    fine.synchronize()
    assert torch.equal(x.cpu(), torch.zeros(8))
    assert torch.equal(y.cpu(), torch.ones(8))


def test_what_a_dead_stream_finished_before_is_still_known_to_be_done() -> None:
    x, side = zeros(), torch.npu.Stream()
    add_one(x, side)
    event = recorded(side)
    event.synchronize()
    rt.kill_stream(side)
    assert event.query()
    event.synchronize()
    other = torch.npu.Stream()
    other.wait_event(event)
    add_one(x, other)
    other.synchronize()
    assert torch.equal(x.cpu(), torch.full((8,), 2.0))


def test_cleared_faults_revive_a_stream_without_what_it_lost_and_nobody_waits_for_ever() -> None:
    x, dead, waiter = zeros(), torch.npu.Stream(), torch.npu.Stream()
    rt.kill_stream(dead)
    add_one(x, dead)
    event = recorded(dead)
    waiter.wait_event(event)
    rt.clear_faults()
    waiter.synchronize()
    event.synchronize()
    add_one(x, dead)
    dead.synchronize()
    assert torch.equal(x.cpu(), torch.ones(8)), "the lost task stays lost, the new one runs"


def test_a_dead_stream_takes_its_graphs_with_it_and_a_revived_one_replays_them_whole() -> None:
    x, side = zeros(), torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        main = torch.npu.current_stream()
        y = x + 1
        side.wait_stream(main)
        with torch.npu.stream(side):
            z = y * 2
        main.wait_stream(side)
        x.copy_(z)
    runs = torch.npu.Stream()
    rt.hang_stream(runs)
    with torch.npu.stream(runs):
        graph.replay()
    rt.kill_stream(runs)
    with pytest.raises(RuntimeError, match="507001"):
        runs.synchronize()
    assert torch.equal(x.cpu(), torch.zeros(8))
    rt.clear_faults()
    with torch.npu.stream(runs):
        graph.replay()
    runs.synchronize()
    assert torch.equal(x.cpu(), torch.full((8,), 2.0))


def test_a_process_with_a_dead_stream_ends() -> None:
    code = (
        "import torch, torch_npu\n"
        "from afd_dsv4.softnpu import runtime as rt\n"
        "x = torch.zeros(8, device='npu')\n"
        "side, event = torch.npu.Stream(), torch.npu.Event()\n"
        "rt.hang_stream(side)\n"
        "for _ in range(2):\n"
        "    with torch.npu.stream(side):\n        x.add_(1)\n"
        "    event.record(side)\n"
        "    torch.npu.current_stream().wait_event(event)\n"
        "    rt.kill_stream(side)\n"
        "print('ends', flush=True)\n"
    )
    command = [sys.executable, "-m", "afd_dsv4.softnpu", "--", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "ends", done.stderr


# ------------------------------------------------------------------------------------------------ tasks that fail


def test_the_nth_task_from_now_fails_by_name_and_only_that_one() -> None:
    x, side = zeros(), torch.npu.Stream()
    before = rt.faults_injected()
    add_one(x, side)
    rt.fail_task(side, 2)
    for _ in range(4):
        add_one(x, side)
        recorded(side)  # events are not counted
    with pytest.raises(RuntimeError, match=r"an injected fault in place of aten::add_\.Tensor"):
        side.synchronize()
    assert torch.equal(x.cpu(), torch.full((8,), 4.0))
    assert rt.faults_injected() == before + 1
    with pytest.raises(ValueError, match="nth is 0"):
        rt.fail_task(side, 0)


def test_a_copy_and_a_graph_fail_like_a_kernel() -> None:
    x, y, side = zeros(), zeros(), torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.add_(1)
    with torch.npu.stream(side):
        rt.fail_task(side)
        y.copy_(torch.ones(8, device="cpu").pin_memory(), non_blocking=True)
        with pytest.raises(RuntimeError, match="in place of aclrtMemcpy host to device"):
            side.synchronize()
        rt.fail_task(side)
        graph.replay()
        with pytest.raises(RuntimeError, match="in place of a graph"):
            side.synchronize()
        graph.replay()
    side.synchronize()
    assert torch.equal(x.cpu(), torch.ones(8))
    assert torch.equal(y.cpu(), torch.zeros(8))


def surviving(seed: int, probability: float, side: Any = None) -> list[float]:
    """Which of 64 tasks ran: each adds one to its own element."""
    x, side = zeros(64), side or torch.npu.Stream()
    rt.set_fault_rate(seed, probability, ["task"])
    for i in range(64):
        with torch.npu.stream(side):
            x[i].add_(1)
    rt.clear_faults()
    if probability:
        with pytest.raises(RuntimeError, match="an injected fault"):
            side.synchronize()
    side.synchronize()
    kept: list[float] = x.cpu().tolist()
    return kept


def test_a_rate_fails_about_its_share_of_the_tasks() -> None:
    assert sum(surviving(1, 0.0)) == 64
    assert 0 < 64 - sum(surviving(1, 0.2)) < 40
    assert sum(surviving(2, 1.0)) == 0


def test_the_tasks_that_a_rate_fails_are_a_function_of_the_seed_and_the_stream() -> None:
    one, other = torch.npu.Stream(), torch.npu.Stream()
    assert surviving(3, 0.3, one) == surviving(3, 0.3, one)
    assert surviving(3, 0.3, one) != surviving(4, 0.3, one)
    assert surviving(3, 0.3, one) != surviving(3, 0.3, other)


# ------------------------------------------------------------------------------------------------ calls that fail


def create() -> None:
    recorded(torch.npu.current_stream())


def record() -> None:
    event = recorded(torch.npu.current_stream())
    event.record()


def wait() -> None:
    torch.npu.current_stream().wait_event(recorded(torch.npu.current_stream()))


def query() -> None:
    recorded(torch.npu.current_stream()).query()


CALLS = [
    (rt.fail_next_create, create, "creating"),
    (rt.fail_next_record, record, "recording"),
    (rt.fail_next_wait, wait, "waiting for"),
    (rt.fail_next_query, query, "querying"),
]


@pytest.mark.parametrize(("fail", "call", "what"), CALLS)
def test_an_event_call_returns_the_error_as_often_as_asked(
    fail: Callable[..., None], call: Callable[[], None], what: str
) -> None:
    call()
    fail(code=507018, times=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"(?s)507018.*an injected fault: {what} an event"):
            call()
    call()
    fail()
    rt.clear_faults()
    call()


def test_a_record_or_a_wait_can_be_made_to_fail_on_one_stream_only() -> None:
    one, other = torch.npu.Stream(), torch.npu.Stream()
    rt.fail_next_record(one)
    event = recorded(other)
    with pytest.raises(RuntimeError, match="507001"):
        recorded(one)
    recorded(one)
    rt.fail_next_wait(one)
    other.wait_event(event)
    with pytest.raises(RuntimeError, match="507001"):
        one.wait_event(event)
    one.wait_event(event)


def test_a_record_that_failed_left_the_event_as_it_was() -> None:
    side, event = torch.npu.Stream(), torch.npu.Event()
    event.record(side)
    event.synchronize()
    rt.hang_stream(side)
    rt.fail_next_record()
    with pytest.raises(RuntimeError, match="507001"):
        event.record(side)
    assert event.query(), "the older record is what the event stands for"


def failing_calls(seed: int) -> list[bool]:
    events = [recorded(torch.npu.current_stream()) for _ in range(64)]
    rt.set_fault_rate(seed, 0.25, ["query"])
    failed = []
    for event in events:
        try:
            event.query()
            failed.append(False)
        except RuntimeError:
            failed.append(True)
    rt.clear_faults()
    return failed


def test_the_calls_that_a_rate_fails_are_a_function_of_the_seed() -> None:
    assert failing_calls(5) == failing_calls(5)
    assert failing_calls(5) != failing_calls(6)
    assert 0 < sum(failing_calls(5)) < 40
    with pytest.raises(ValueError, match=r"expected 0\.\.1"):
        rt.set_fault_rate(1, 2.0)
    with pytest.raises(ValueError, match="kinds"):
        rt.set_fault_rate(1, 0.5, ["copy"])
