# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#9564, #9596, #9691, #1168: every captured graph takes streams and events of its own.

Symptom: "Alloc sq cq fail", 207005 or 207008, at about 2,048 streams.
Here: the arena makes no stream at all, and events by slots and streams. A graph on one stream needs none; one that
forks needs an event per stream that is waited for, since what is captured belongs to its graph, and gives it back with
it.
"""

from __future__ import annotations

import gc

import pytest

from afd_dsv4.device.torch_device import TorchDevice
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.identity import Domain, ExecutionId, ExecutionKind, Generation
from afd_dsv4.workspace.lease import WHOLE
from tests.regressions.machine import Events, Machine, capture_id, graph_id


def capture_and_replay(machine: Machine, keys: range, *, streams: int) -> None:
    for key in keys:
        with machine.device.capture() as graph:
            lease = machine.arena.capture(key, capture_id(1))
            for layer in range(6):
                lease.touch(machine.streams[layer % streams], writes=["table"], step=layer)
            lease.seal()
        for _ in range(2):
            replay = machine.arena.replay(key, graph_id(2))
            replay.touch(machine.a, writes=[WHOLE], step=WHOLE)
            machine.device.replay(graph, machine.a)
            replay.seal()
            machine.device.run()


@pytest.mark.parametrize("graphs", [1, 10, 60])
def test_graphs_on_one_stream_that_share_a_slot_need_one_event_together(graphs: int) -> None:
    machine = Machine(graphs=[range(graphs)])
    capture_and_replay(machine, range(graphs), streams=1)
    assert machine.arena.events.created == machine.device.events == 1  # the fence of the slot's replays


def test_one_slot_for_each_graph_would_need_an_event_for_each() -> None:
    """Negative control: the count sees what grows."""
    machine = Machine(graphs=[[key] for key in range(60)])
    capture_and_replay(machine, range(60), streams=1)
    assert machine.device.events == 60


def test_a_graph_that_forks_keeps_one_event_a_stream_and_gives_it_back() -> None:
    device = Events()
    machine = Machine(graphs=[range(20)], device=device)
    for _ in range(3):  # captured anew, twice
        capture_and_replay(machine, range(20), streams=2)
        gc.collect()
        assert len(device.held) == 20 * 2 + 1


@pytest.mark.npu
def test_on_torch_npu_captures_create_no_event_of_the_arena() -> None:
    torch = pytest.importorskip("torch")
    from afd_dsv4.softnpu import runtime

    keys = range(5)
    arena = WorkspaceArena(TorchDevice("npu"), 1, graphs=[keys])
    x = torch.ones(4).npu()
    torch.npu.synchronize()
    graphs = []
    for key in keys:
        graphs.append(torch.npu.NPUGraph())
        with torch.npu.graph(graphs[-1]):
            before = runtime.event_counts()[0]
            lease = arena.capture(key, ExecutionId(Generation(1), domain=Domain.GRAPH, kind=ExecutionKind.CAPTURE))
            for layer in range(4):
                lease.touch(torch.npu.current_stream(), writes=["x"], step=layer)
                x.add_(1)
            lease.seal()
            assert runtime.event_counts()[0] == before
    for key in keys:
        replay = arena.replay(key, ExecutionId(Generation(2), domain=Domain.GRAPH))
        replay.touch(torch.npu.current_stream(), writes=[WHOLE])
        graphs[key].replay()
        replay.seal()
    # The fence of the slot's replays, and a second one where a replay was queued behind a pending one.
    assert arena.events.created in (1, 2)
    assert x.cpu().eq(1 + 5 * 4).all()
