# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#16794: the workspace of a captured graph is held weakly.

Symptom: a replay dies with 507011, because the allocator has given the address to somebody else.
Here: the arena holds what a capture used until it is captured anew, whoever drops his handles; the slots' memory
belongs to the runtime and not to the graph (tests/integration/test_stock_graphs.py,
test_what_a_graph_uses_outlives_every_handle_until_the_runtime_is_closed).
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.regressions.machine import Events, Machine, capture_id


def fork(machine: Machine, key: str, generation: int) -> weakref.ref[Any]:
    """Capture work on two streams; what is left is a weak reference to the device's graph."""
    with machine.device.capture() as graph:
        lease = machine.arena.capture(key, capture_id(generation))
        for stream in (machine.a, machine.b, machine.a):
            lease.touch(stream, writes=["x"])
        lease.seal()
    return weakref.ref(graph)


def test_what_was_captured_is_held_until_the_graph_is_captured_anew() -> None:
    device = Events()
    machine = Machine(graphs=[["g", "h"]], device=device)
    fork(machine, "g", 1)
    gc.collect()
    first = [weakref.ref(event) for event in device.held]
    assert len(first) == 2  # one record on each stream
    fork(machine, "h", 2)
    assert None not in [event() for event in first]
    assert len(device.held) == 4
    fork(machine, "g", 3)
    gc.collect()
    assert [event() for event in first] == [None, None]
    assert len(device.held) == 4


def test_what_only_a_weak_reference_holds_is_gone() -> None:
    """Negative control: the same look at something that nobody keeps."""
    device = Events()
    event = weakref.ref(device.event())
    gc.collect()
    assert event() is None
    assert len(device.held) == 0


@pytest.mark.npu
@pytest.mark.parametrize("strong", [True, False])
def test_on_the_allocator_of_torch_npu_an_address_is_safe_only_while_it_is_held(strong: bool) -> None:
    """The report itself: the graph writes to an address, and who owns it then."""
    torch = pytest.importorskip("torch")
    size = 1 << 20
    x, workspace = torch.full((size,), 7.0).npu(), torch.zeros(size).npu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        workspace.copy_(x)
    address = workspace.data_ptr()
    kept = workspace if strong else None
    del workspace
    other = torch.zeros(size).npu()
    torch.npu.synchronize()
    graph.replay()
    torch.npu.synchronize()
    assert (other.data_ptr() == address) == (not strong)
    assert other.cpu().eq(0.0 if strong else 7.0).all()
    assert kept is None or kept.cpu().eq(7.0).all()
