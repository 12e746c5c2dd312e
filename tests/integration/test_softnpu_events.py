# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Events of the software NPU as torch_npu's users meet them: what a query says, and when it may be asked.

With the host queue on, the rest of this is in `test_softnpu_task_queue.py`; waits and generations are in
`test_softnpu_streams.py`.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afd_dsv4.softnpu import runtime as rt

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu

CAPTURE_MODE_NOT_SUPPORT = "107030"
EVENT_CAPTURED = "107028"
ACL_EVENT_EXTERNAL = 0x20


@pytest.fixture(autouse=True)
def _no_faults_after() -> Iterator[None]:
    torch.npu.synchronize()
    yield
    rt.clear_faults()
    torch.npu.synchronize()


def recorded() -> Any:
    event = torch.npu.Event()
    event.record()
    return event


def test_an_event_that_was_never_recorded_says_true_and_waiting_for_it_waits_for_nothing() -> None:
    event, side = torch.npu.Event(), torch.npu.Stream()
    assert event.query()
    event.synchronize()
    side.wait_event(event)
    side.synchronize()


def test_an_event_stands_for_its_last_record_only() -> None:
    slow, fast, event = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Event()
    rt.hang_stream(slow)
    event.record(slow)
    assert not event.query()
    event.record(fast)
    event.synchronize()
    assert event.query(), "although the first record has not passed"


def test_every_record_of_an_external_event_releases_one_wait() -> None:
    """So a release to several consumers needs an event for each. ACL's own event: torch_npu makes its external events
    of memory flags, and two that wait for one flag at a time may both see it."""
    acl, signal = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p()
    assert acl.aclrtCreateEventExWithFlag(ctypes.byref(signal), ACL_EVENT_EXTERNAL) == 0
    key, waiters = torch.npu.Stream(), [torch.npu.Stream() for _ in range(2)]
    passed = [torch.npu.Event() for _ in waiters]
    for waiter, event in zip(waiters, passed, strict=True):
        assert acl.aclrtStreamWaitEvent(ctypes.c_void_p(waiter.npu_stream), signal) == 0
        event.record(waiter)
    for released in (1, 2):
        assert acl.aclrtRecordEvent(signal, ctypes.c_void_p(key.npu_stream)) == 0
        while sum(event.query() for event in passed) < released:
            pass
        key.synchronize()
        assert sum(event.query() for event in passed) == released
    assert acl.aclrtDestroyEvent(signal) == 0


def captured(inside: Callable[[], Any]) -> Any:
    graph = torch.npu.NPUGraph()
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        x.add_(1)
        return inside()


def test_a_query_during_a_capture_is_an_error_whatever_the_event() -> None:
    before = recorded()
    before.synchronize()
    with pytest.raises(RuntimeError, match=CAPTURE_MODE_NOT_SUPPORT):
        captured(before.query)
    with pytest.raises(RuntimeError, match=EVENT_CAPTURED):
        captured(lambda: recorded().query())
    assert before.query(), "the capture is over"


def test_a_capture_forbids_the_query_to_other_threads_too() -> None:
    before = recorded()
    before.synchronize()
    said: list[str] = []

    def ask() -> None:
        try:
            said.append(str(before.query()))
        except RuntimeError as error:
            said.append(str(error))

    def inside() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    captured(inside)
    assert CAPTURE_MODE_NOT_SUPPORT in said[0]
    ask()
    assert said[1] == "True"


def test_a_relaxed_thread_may_query_during_a_capture() -> None:
    """torch_npu's own allocators do it that way (aclmdlRICaptureThreadExchangeMode)."""
    acl, relaxed, before = ctypes.CDLL("libascendcl.so"), 2, recorded()
    before.synchronize()

    def inside() -> bool:
        mode = ctypes.c_int(relaxed)
        assert acl.aclmdlRICaptureThreadExchangeMode(ctypes.byref(mode)) == 0
        try:
            done: bool = before.query()
        finally:
            assert acl.aclmdlRICaptureThreadExchangeMode(ctypes.byref(mode)) == 0
        assert mode.value == relaxed
        return done

    assert captured(inside)
    with pytest.raises(RuntimeError, match=CAPTURE_MODE_NOT_SUPPORT):
        captured(before.query)


def test_memory_is_allocated_and_freed_during_a_capture_without_a_query() -> None:
    """A tensor that another stream used waits for its events until the capture is over."""
    side = torch.npu.Stream()
    used = torch.ones(1 << 16, device="npu")
    with torch.npu.stream(side):
        used.add_(1)
    used.record_stream(side)
    holder = [used]
    del used

    def inside() -> None:
        holder.clear()
        gc.collect()
        for _ in range(4):
            torch.empty(1 << 16, device="npu").fill_(1.0)

    captured(inside)


def test_events_are_counted_when_they_are_created_and_destroyed() -> None:
    gc.collect()
    created, destroyed = rt.event_counts()
    events = [torch.npu.Event() for _ in range(5)]
    assert rt.event_counts() == (created, destroyed), "torch_npu creates an event at its first record"
    for event in events:
        event.record()
        event.record()
    assert rt.event_counts() == (created + 5, destroyed)
    torch.npu.synchronize()
    del events, event
    gc.collect()
    assert rt.event_counts() == (created + 5, destroyed + 5)
