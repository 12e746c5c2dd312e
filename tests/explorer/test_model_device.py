# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The model device: what a capture forbids, what a hung stream stops, and what one event drags along."""

from __future__ import annotations

import pytest

from afd_dsv4.device.model import CaptureViolation, Deadlock, ModelDevice


def test_a_query_inside_a_capture_raises() -> None:
    device = ModelDevice()
    stream, event = device.stream(), device.event()
    event.record(stream)
    with device.capture():
        assert device.capturing()
        for ask in (event.query, event.synchronize):
            with pytest.raises(CaptureViolation):
                ask()
    assert not device.capturing()
    device.run()
    assert event.query()


def test_captured_work_runs_at_each_replay_and_not_before() -> None:
    device = ModelDevice()
    one, two = device.stream(), device.stream()
    log: list[str] = []
    event = device.event()
    with device.capture() as graph:
        device.launch(one, lambda: log.append("first"))
        event.record(one)
        event.wait(two)
        device.launch(two, lambda: log.append("second"))
    device.run()
    assert log == []
    for _ in range(2):
        device.launch(one, lambda: log.append("before"))
        device.replay(graph, one)
        device.launch(one, lambda: log.append("after"))
    device.run()
    assert log == ["before", "first", "second", "after"] * 2


def test_captured_work_without_an_edge_runs_in_any_order() -> None:
    first = set()
    for seed in range(20):
        device = ModelDevice(seed)
        streams = [device.stream(), device.stream()]
        log: list[int] = []
        with device.capture() as graph:
            for stream in streams:
                device.launch(stream, lambda log=log, index=stream.index: log.append(index))
        device.replay(graph, streams[0])
        device.run()
        first.add(log[0])
    assert first == {0, 1}


def test_a_wait_across_the_border_of_a_capture_and_a_query_of_a_captured_event_raise() -> None:
    device = ModelDevice()
    stream, outside, inside = device.stream(), device.event(), device.event()
    outside.record(stream)
    with device.capture():
        inside.record(stream)
        with pytest.raises(CaptureViolation):
            outside.wait(stream)
    with pytest.raises(CaptureViolation):
        inside.wait(stream)
    with pytest.raises(CaptureViolation):
        inside.query()


def test_catching_up_with_an_event_runs_what_it_lies_behind_and_nothing_else() -> None:
    device = ModelDevice()
    one, two, three = (device.stream() for _ in range(3))
    log: list[str] = []
    first, second = device.event(), device.event()
    device.launch(one, lambda: log.append("a"))
    first.record(one)
    device.launch(one, lambda: log.append("late"))
    first.wait(two)
    device.launch(two, lambda: log.append("b"))
    second.record(two)
    device.launch(three, lambda: log.append("elsewhere"))
    assert second.last is not None
    assert device.catch_up(second.last)
    assert log == ["a", "b"]
    assert first.query()
    assert second.query()


def test_behind_a_hung_stream_nothing_moves() -> None:
    device = ModelDevice()
    one, two = device.stream(), device.stream()
    event, behind = device.event(), device.event()
    event.record(one)
    event.wait(two)
    behind.record(two)
    one.hung = True
    assert behind.last is not None
    assert not device.catch_up(behind.last)
    with pytest.raises(Deadlock):
        device.run()
    assert (one.done, two.done) == (0, 0)
    one.hung = False
    device.run()
    assert behind.query()
