# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""pytorch/pytorch#158352, #155658: events are queried while a graph is captured.

Symptom: a query inside a capture may say that work has passed which never ran; or nothing is freed until its end.
Here: while a graph is captured no event is queried, whatever is called; what has passed meanwhile is given out right
after. The model device raises at every such query.
"""

from __future__ import annotations

import pytest

from afd_dsv4.device.model import CaptureViolation
from afd_dsv4.device.torch_device import TorchDevice
from afd_dsv4.workspace.arena import CaptureError, Settlement, StillLeased, WorkspaceArena
from afd_dsv4.workspace.fence import EventError
from afd_dsv4.workspace.identity import ExecutionId, Generation
from tests.regressions.machine import Machine, capture_id


def test_whatever_is_called_in_a_capture_no_event_is_queried() -> None:
    machine = Machine(slots=1, graphs=[["g"]])
    pending = machine.acquire(1)
    pending.touch(machine.a, writes=["x"])
    pending.seal()
    machine.device.run()  # passed, but nobody has looked yet
    with machine.device.capture():
        captured = machine.arena.capture("g", capture_id(2))
        captured.touch(machine.a, writes=["x"])
        captured.touch(machine.b, writes=["x"])
        assert machine.arena.settle(pending) is Settlement.NOT_QUIESCED
        assert machine.arena.watch() == ()
        assert machine.arena.live() == (pending, captured)
        assert not pending.over()
        for call in (machine.arena.close, machine.arena.reset):
            with pytest.raises(StillLeased):
                call()
        with pytest.raises(CaptureError):
            machine.acquire(3)
        captured.seal()
    assert machine.acquire(3).slot is pending.slot  # at once: nothing has piled up
    assert machine.arena.counters.handed_on == 0
    assert machine.arena.counters.quarantined == 0


def test_a_query_in_a_capture_is_an_error_of_the_arena_and_of_the_device() -> None:
    """Negative control: had one of the calls above asked, this is what it would have met."""
    machine = Machine(slots=1, graphs=[["g"]])
    pending = machine.acquire(1)
    pending.touch(machine.a, writes=["x"])
    pending.seal()
    assert pending.fence is not None
    with machine.device.capture():
        with pytest.raises(CaptureViolation):
            pending.fence.passed()
        captured = machine.arena.capture("g", capture_id(2))
        with pytest.raises(EventError, match="ask again after the capture"):
            pending.fence.passed()
        captured.seal()


@pytest.mark.npu
@pytest.mark.parametrize("asks", ["the arena", "a bare query"])
def test_a_real_capture_survives_the_arena_and_not_a_query(asks: str) -> None:
    torch = pytest.importorskip("torch")
    arena = WorkspaceArena(TorchDevice("npu"), 1)
    lease = arena.acquire(ExecutionId(Generation(1)))
    lease.touch(torch.npu.current_stream(), writes=["x"])
    lease.seal()
    event = torch.npu.Event()
    event.record()
    x = torch.ones(4).npu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()

    def capture() -> None:
        with torch.npu.graph(graph):
            x.add_(1)
            if asks == "a bare query":
                event.query()
            assert arena.settle(lease) is Settlement.NOT_QUIESCED
            with pytest.raises(CaptureError):
                arena.acquire(ExecutionId(Generation(2)))

    if asks == "a bare query":
        with pytest.raises(RuntimeError, match="cannot be queried while a stream is captur"):
            capture()
        return
    capture()
    graph.replay()
    assert x.cpu().eq(2).all()
    assert arena.settle(lease) is Settlement.RELEASED
