# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Streams, events, copies and graphs of the software NPU, through the real torch_npu.

No order is left to time: a gate (an external event that nobody has recorded yet) holds a stream for certain, and what
must not wait for it is seen to finish.
"""

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import pytest

from afd_dsv4.softnpu import runtime as rt
from tests.npu_programs import ForkedGraph, hand_offs
from tests.npu_streams import streams_apart

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu


class Gate:
    """Holds what is queued on a stream after ``hold`` until ``open``."""

    def __init__(self) -> None:
        self._event = torch.npu.ExternalEvent()
        self._key = torch.npu.Stream()
        self.held = 0

    def hold(self, stream: Any) -> None:
        self._event.wait(stream)
        self.held += 1

    def open(self) -> None:
        self._event.record(self._key)
        self.held -= 1
        self._key.synchronize()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    while gate.held > 0:  # a test that failed must not hang the run
        gate.open()
    torch.npu.synchronize()


@pytest.fixture(autouse=True)
def _no_race(request: pytest.FixtureRequest) -> Iterator[None]:
    """What these tests do is ordered, the host's part in it included: a gate that is opened after a synchronisation
    orders what it held behind what the host has seen. One program alone leaves its order open, on purpose."""
    before = rt.race_detection()
    rt.set_race_detection(True)
    rt.clear_races()
    yield
    found = rt.races()
    rt.clear_races()
    rt.set_race_detection(before)
    assert bool(found) == (
        request.node.name == test_waits_keep_a_hand_off_right_under_every_schedule_and_nothing_else_does.__name__
    ), found


@pytest.fixture(autouse=True)
def _quiet_schedule() -> Iterator[None]:
    yield
    rt.set_schedule(0)
    rt.set_copy_delay_us(0)


def pending(event: Any) -> bool:
    """Whether an event stays incomplete although everything that could run has had time to."""
    for _ in range(10):
        time.sleep(0.005)
        if event.query():
            return False
    return True


def acl_stream_id(stream: Any) -> int:
    found = ctypes.c_int32()
    assert ctypes.CDLL("libascendcl.so").aclrtStreamGetId(ctypes.c_void_p(stream.npu_stream), ctypes.byref(found)) == 0
    return found.value


def ramp(n: int = 64) -> Any:
    return torch.arange(float(n)).npu()


def test_there_is_one_device() -> None:
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 1
    assert torch.npu.get_device_properties(0).name == "Ascend910B3"


def test_an_event_is_complete_only_after_the_work_before_it(gate: Gate) -> None:
    side, event = torch.npu.Stream(), torch.npu.Event()
    assert event.query(), "an event that was never recorded counts as complete, as on the device"
    gate.hold(side)
    event.record(side)
    assert pending(event)
    assert not side.query()
    gate.open()
    event.synchronize()
    assert event.query()


def copy_behind(gate: Gate, side: Any, *, from_host: bool) -> tuple[Any, Any]:
    """Queue on `side`, behind a closed gate, the copy of a ramp into a new zero tensor, and an event after it."""
    source = torch.arange(64.0).pin_memory() if from_host else ramp()
    target, event = torch.zeros(64).npu(), torch.npu.Event()
    torch.npu.synchronize()
    gate.hold(side)
    with torch.npu.stream(side):
        target.copy_(source, non_blocking=True)
        event.record(side)
    return target, event


@pytest.mark.parametrize("from_host", [False, True])
def test_a_stream_wait_orders_two_streams(gate: Gate, from_host: bool) -> None:
    z, side = torch.zeros(64).npu(), torch.npu.Stream()
    y, event = copy_behind(gate, side, from_host=from_host)
    main = torch.npu.current_stream()
    main.wait_event(event)
    z.add_(y)
    done = torch.npu.Event()
    done.record(main)
    assert pending(done), "the main stream must wait for the gated one"
    gate.open()
    assert torch.equal(z.cpu(), torch.arange(64.0))


@pytest.mark.parametrize("from_host", [False, True])
def test_without_the_wait_the_data_is_wrong(gate: Gate, from_host: bool) -> None:
    """The negative control of the test above: the same program, the wait left out."""
    z, side = torch.zeros(64).npu(), torch.npu.Stream()
    y, event = copy_behind(gate, side, from_host=from_host)
    z.add_(y)
    torch.npu.current_stream().synchronize()  # done although the gate is still closed
    assert not event.query()
    assert torch.equal(z.cpu(), torch.zeros(64)), "the sum ran ahead and read the old values"
    gate.open()
    side.synchronize()
    assert torch.equal(y.cpu(), torch.arange(64.0))


def test_a_delayed_copy_takes_at_least_its_delay_and_arrives() -> None:
    host, target, side = torch.arange(64.0).pin_memory(), torch.zeros(64).npu(), torch.npu.Stream()
    torch.npu.synchronize()
    rt.set_copy_delay_us(200_000)
    before = time.monotonic()
    with torch.npu.stream(side):
        target.copy_(host, non_blocking=True)
    side.synchronize()
    # A lower bound: no load of the machine can break it.
    assert time.monotonic() - before >= 0.2
    rt.set_copy_delay_us(0)
    assert torch.equal(target.cpu(), torch.arange(64.0))


def test_a_wait_is_for_the_generation_recorded_when_it_was_issued(gate: Gate) -> None:
    first, second = torch.npu.Stream(), torch.npu.Stream()
    event, seen = torch.npu.Event(), torch.npu.Event()
    event.record(first)
    first.synchronize()
    second.wait_event(event)
    gate.hold(first)
    event.record(first)  # a newer generation, which the wait above must not wait for
    seen.record(second)
    seen.synchronize()
    assert pending(event)
    gate.open()
    event.synchronize()


def test_recording_again_does_not_release_an_older_wait_early(gate: Gate) -> None:
    slow, fast, waiter = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Stream()
    early, late, seen = torch.npu.Event(), torch.npu.Event(), torch.npu.Event()
    gate.hold(slow)
    early.record(slow)
    waiter.wait_event(early)
    seen.record(waiter)
    late.record(fast)
    late.synchronize()
    assert pending(seen)
    gate.open()
    seen.synchronize()


def test_one_record_of_an_external_event_releases_one_wait() -> None:
    event, done = torch.npu.ExternalEvent(), torch.npu.Event()
    key, first, second = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Stream()
    event.wait(first)
    event.record(key)
    first.synchronize()
    event.wait(second)
    done.record(second)
    assert pending(done)
    event.record(key)
    done.synchronize()


def test_a_pinned_buffer_is_read_when_the_stream_gets_there(gate: Gate) -> None:
    """Why a staging ring needs an event per entry: rewriting the buffer too early changes what is copied."""
    host, target, side = torch.full((8,), 1.0).pin_memory(), torch.zeros(8).npu(), torch.npu.Stream()
    torch.npu.synchronize()
    gate.hold(side)
    with torch.npu.stream(side):
        target.copy_(host, non_blocking=True)
    host.fill_(2.0)
    gate.open()
    side.synchronize()
    assert torch.equal(target.cpu(), torch.full((8,), 2.0))


def test_an_asynchronous_copy_to_pinned_memory_arrives_with_its_event(gate: Gate) -> None:
    source, host, side, event = ramp(8), torch.zeros(8).pin_memory(), torch.npu.Stream(), torch.npu.Event()
    torch.npu.synchronize()
    gate.hold(side)
    with torch.npu.stream(side):
        host.copy_(source, non_blocking=True)
        event.record(side)
    assert torch.equal(host, torch.zeros(8))
    gate.open()
    event.synchronize()
    assert torch.equal(host, torch.arange(8.0))


def test_a_host_scalar_is_read_when_the_operator_is_called(gate: Gate) -> None:
    x, scalar, side = torch.zeros(4).npu(), torch.tensor(1.0), torch.npu.Stream()
    torch.npu.synchronize()
    gate.hold(side)
    with torch.npu.stream(side):
        x.add_(scalar)
    scalar.fill_(100.0)
    gate.open()
    side.synchronize()
    assert torch.equal(x.cpu(), torch.ones(4))


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory_is_reused_in_stream_order_so_another_stream_needs_record_stream(
    gate: Gate, recorded: bool
) -> None:
    side, out = torch.npu.Stream(), torch.zeros(1 << 16).npu()
    x = torch.ones(1 << 16, device="npu")
    torch.npu.synchronize()
    gate.hold(side)
    with torch.npu.stream(side):
        out.copy_(x)
    if recorded:
        x.record_stream(side)
    address = x.data_ptr()
    del x
    y = torch.full((1 << 16,), 9.0, device="npu")
    torch.npu.current_stream().synchronize()
    assert (y.data_ptr() == address) == (not recorded)
    gate.open()
    side.synchronize()
    assert torch.equal(out.cpu(), torch.full((1 << 16,), 1.0 if recorded else 9.0))


def test_a_host_function_runs_in_stream_order(gate: Gate) -> None:
    seen: list[str] = []
    side = torch.npu.Stream()
    gate.hold(side)
    torch.npu._launch_host_func(side, lambda _: seen.append("ran"), None)
    assert seen == []
    gate.open()
    side.synchronize()
    assert seen == ["ran"]


def test_waiting_with_pythons_lock_held_does_not_deadlock(gate: Gate) -> None:
    """empty_cache waits for the device holding Python's lock; no queued operator may need that lock to finish."""
    x, side = torch.ones(256).npu(), torch.npu.Stream()
    rt.set_copy_delay_us(50_000)
    with torch.npu.stream(side):
        y = torch.empty_like(x)
        y.copy_(x)
        y.add_(1)
        y = y.clone() * 3.5
    torch.npu.empty_cache()
    side.synchronize()
    assert torch.equal(y.cpu(), torch.full((256,), 7.0))


def test_streams_apart_are_others_than_those_that_are_kept_though_the_pool_deals_all_in_turn() -> None:
    x = torch.zeros(8).npu()
    torch.npu.synchronize()
    with torch.npu.graph(torch.npu.NPUGraph()):
        x.add_(1)
    kept = [torch.npu.graph.default_capture_stream, torch.npu.Stream()]
    numbers = {stream.stream_id for stream in kept}
    assert numbers <= {torch.npu.Stream().stream_id for _ in range(64)}  # why they are asked for
    for _ in range(64):
        one, two = streams_apart(2, kept[1])
        assert len(numbers | {one.stream_id, two.stream_id}) == 4


def test_a_graph_records_without_running_and_replays_with_new_inputs() -> None:
    x, out = torch.ones(8).npu(), torch.zeros(8).npu()
    index = torch.tensor([0, 3]).npu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = (x * 2 + 1).softmax(-1)
        y.index_copy_(0, index, y[index] + x[index])
        out.add_(y)
    torch.npu.synchronize()
    assert torch.equal(out.cpu(), torch.zeros(8)), "capturing must not run anything"
    expected = torch.zeros(8)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        graph.replay()
        row = (torch.full((8,), value) * 2 + 1).softmax(-1)
        row[[0, 3]] += value
        expected += row
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_streams_of_a_graph_keep_their_order_under_an_adversarial_schedule(seed: int) -> None:
    graph = ForkedGraph()
    rt.set_schedule(seed, 2000)
    assert graph.right(1.0, 4.0)


def test_a_missing_wait_inside_a_graph_goes_wrong_at_replay(gate: Gate) -> None:
    """Negative control: the side stream of the graph is held, and the first stream does not wait before it reads."""
    event = torch.npu.ExternalEvent()
    (side,), x, plus, out = streams_apart(1), torch.ones(8).npu(), torch.zeros(8).npu(), torch.zeros(8).npu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        main = torch.npu.current_stream()
        side.wait_stream(main)
        event.wait(side)
        with torch.npu.stream(side):
            plus.copy_(x + 1)
        out.copy_(plus)  # the wait belongs before this line
        event.record(main)
        main.wait_stream(side)
    graph.replay()
    torch.npu.synchronize()
    assert torch.equal(out.cpu(), torch.zeros(8))
    assert torch.equal(plus.cpu(), torch.full((8,), 2.0))


def test_a_capture_that_leaves_a_stream_unjoined_is_refused() -> None:
    (side,), x = streams_apart(1), torch.ones(8).npu()
    graph = torch.npu.NPUGraph()

    def capture() -> None:
        with torch.npu.graph(graph):
            y = x * 2
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                y.add_(1)

    with pytest.raises(RuntimeError, match="107025"):
        capture()
    torch.npu.set_stream(torch.npu.default_stream())  # torch.npu.graph leaves its own where the capture's end fails
    assert torch.equal((x + 1).cpu(), torch.full((8,), 2.0)), "the device goes on"


def test_what_needs_the_host_is_refused_inside_a_capture() -> None:
    x = torch.ones(8).npu()
    for use in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.copy_(torch.zeros(8))):
        graph = torch.npu.NPUGraph()
        with pytest.raises(RuntimeError, match="captur"), torch.npu.graph(graph):
            use()
    assert torch.equal((x + 1).cpu(), torch.full((8,), 2.0))


def test_a_failing_task_is_reported_by_the_next_synchronisation_with_its_name() -> None:
    x = torch.ones(8).npu()
    x.index_copy_(0, torch.tensor([99]).npu(), torch.ones(1).npu())
    with pytest.raises(RuntimeError, match=r"aten::index_copy_.*index 99 is out of bounds"):
        torch.npu.synchronize()
    torch.npu.synchronize()  # reported once
    assert torch.equal((torch.ones(3).npu() + 1).cpu(), torch.full((3,), 2.0))


def test_an_injected_error_is_reported_like_a_failed_task() -> None:
    rt.inject_error("a planted fault")
    with pytest.raises(RuntimeError, match="a planted fault"):
        torch.npu.current_stream().synchronize()
    torch.npu.synchronize()


def test_the_adversarial_schedule_is_a_function_of_seed_stream_and_task() -> None:
    def delays(seed: int, stream: int) -> list[int]:
        return [rt.schedule_delay_us(seed, 500, stream, task) for task in range(64)]

    assert delays(7, 1) == delays(7, 1)
    assert delays(7, 1) != delays(8, 1)
    assert delays(7, 1) != delays(7, 2)
    assert delays(0, 1) == [0] * 64
    assert max(delays(7, 1)) <= 500
    assert len(set(delays(7, 1))) > 32


def test_a_run_injects_the_delays_of_its_seed() -> None:
    side = torch.npu.Stream()
    x = torch.ones(8).npu()
    torch.npu.synchronize()

    def injected(seed: int) -> int:
        rt.set_schedule(seed, 300)
        before = rt.delay_injected_us()
        with torch.npu.stream(side):
            for _ in range(20):
                x.add_(1)
        side.synchronize()
        return rt.delay_injected_us() - before

    for seed in (11, 11, 12):
        assert injected(seed) == sum(rt.schedule_delay_us(seed, 300, acl_stream_id(side), task) for task in range(20))
    assert injected(0) == 0


def test_waits_keep_a_hand_off_right_under_every_schedule_and_nothing_else_does() -> None:
    assert all(hand_offs(True, 8, seed=seed, max_delay_us=3000) for seed in range(1, 6))
    broken = [not hand_offs(False, 8, seed=seed, max_delay_us=3000) for seed in range(1, 6)]
    assert any(broken), "the schedules must be able to break it"
