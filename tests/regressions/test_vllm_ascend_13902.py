# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#13902: memory is replaced (weights are reloaded), a captured graph keeps the old address.

Symptom: replays read garbage.
Here: replacing the slots' memory is a reset; it is refused while a replay may run, and makes every graph stale, so that
a replay raises until the graph is captured anew. With the real NPUGraph: tests/integration/test_stock_graphs.py
(test_a_replay_after_the_arena_was_reset_is_refused_until_the_graph_is_captured_anew).
"""

from __future__ import annotations

import pytest

from afd_dsv4.device.model import ModelGraph
from afd_dsv4.workspace.arena import CaptureError, StillLeased
from afd_dsv4.workspace.lease import WHOLE
from tests.regressions.machine import Machine, capture_id, graph_id


class Slots:
    """Where the slot is, and a graph that reads what is there."""

    def __init__(self) -> None:
        self.machine = Machine(graphs=[["g"]])
        self.base = 0

    def capture(self, generation: int) -> ModelGraph:
        with self.machine.device.capture() as graph:
            lease = self.machine.arena.capture("g", capture_id(generation))
            lease.touch(self.machine.a, reads=["weights"])
            self.machine.read(self.machine.a, ("weights", self.base), f"loaded at {self.base}")
            lease.seal()
        return graph

    def load(self, base: int) -> None:
        """Other memory, with other values; whoever owned the old place may put anything there."""
        self.machine.cells = {("weights", self.base): "garbage", ("weights", base): f"loaded at {base}"}
        self.base = base

    def replay(self, graph: ModelGraph, generation: int) -> None:
        lease = self.machine.arena.replay("g", graph_id(generation))
        lease.touch(self.machine.a, writes=[WHOLE], step=WHOLE)
        self.machine.device.replay(graph, self.machine.a)
        lease.seal()


def test_a_replay_after_a_reset_raises_until_the_graph_is_captured_anew() -> None:
    slots = Slots()
    slots.load(1)
    graph = slots.capture(1)
    slots.replay(graph, 2)
    slots.machine.device.run()
    slots.machine.arena.reset()
    slots.load(2)
    with pytest.raises(CaptureError, match=r"captured before the arena was reset; capture it \(again\) first"):
        slots.replay(graph, 3)
    slots.replay(slots.capture(4), 5)
    slots.machine.device.run()
    assert slots.machine.wrong == []


def test_memory_under_a_replay_that_may_run_is_not_replaced() -> None:
    slots = Slots()
    slots.load(1)
    slots.replay(slots.capture(1), 2)
    with pytest.raises(StillLeased, match="cannot reset: 1 leases may still touch it"):
        slots.machine.arena.reset()
    slots.machine.device.run()
    slots.machine.arena.reset()


def test_a_graph_that_is_replayed_all_the_same_reads_garbage() -> None:
    """Negative control: past the arena, the device does what it was told."""
    slots = Slots()
    slots.load(1)
    graph = slots.capture(1)
    slots.load(2)
    slots.machine.device.replay(graph, slots.machine.a)
    slots.machine.device.run()
    assert slots.machine.wrong == [(("weights", 1), "loaded at 1", "garbage")]
