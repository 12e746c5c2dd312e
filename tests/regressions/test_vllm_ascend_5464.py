# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-ascend#5464: layers of one graph share a workspace that the graph holds weakly.

Symptom: wrong precision after replays; the second layer overwrites what the first still reads, and other work gets the
memory.
Here: two captured layers in one slot follow each other by captured events, which the arena keeps; whatever handle is
dropped, every replay reads its own. With the real NPUGraph: tests/integration/test_stock_graphs.py
(test_a_capture_on_two_streams_keeps_their_order_at_every_replay,
test_what_a_graph_uses_outlives_every_handle_until_the_runtime_is_closed).
"""

from __future__ import annotations

import gc

from afd_dsv4.device.model import ModelGraph
from afd_dsv4.workspace.lease import WHOLE
from tests.regressions.machine import Machine, capture_id, corrupted, graph_id

GRAPHS = [["g", "h"]]


def capture(machine: Machine, key: str, generation: int) -> ModelGraph:
    """Layer 0 on one stream, layer 1 on another; each fills the slot and reads it. Drops every handle but the graph."""
    with machine.device.capture() as graph:
        lease = machine.arena.capture(key, capture_id(generation))
        for layer, stream in enumerate((machine.a, machine.b)):
            lease.touch(stream, writes=["workspace"], step=layer)
            machine.use(stream, "workspace", (key, layer))
        lease.seal()
    return graph


def replay(machine: Machine, key: str, graph: ModelGraph, generation: int) -> None:
    lease = machine.arena.replay(key, graph_id(generation))
    stream = machine.streams[generation % 3]
    lease.touch(stream, writes=[WHOLE], step=WHOLE)
    machine.device.replay(graph, stream)
    lease.seal()


def program(machine: Machine) -> None:
    graphs = {key: capture(machine, key, generation) for generation, key in enumerate("gh", 1)}
    for generation in range(3, 9):
        key = "gh"[generation % 2]
        replay(machine, key, graphs[key], generation)


def test_every_replay_of_two_layers_in_one_slot_reads_what_it_wrote() -> None:
    assert corrupted(program, graphs=GRAPHS) == 0


def test_a_collection_between_capture_and_replay_takes_nothing_away() -> None:
    machine = Machine(graphs=GRAPHS)
    graph = capture(machine, "g", 1)
    gc.collect()
    for generation in range(2, 6):
        replay(machine, "g", graph, generation)
    machine.device.run()
    assert machine.wrong == []


def test_without_captured_events_the_layers_overwrite_each_other() -> None:
    """Negative control."""
    assert corrupted(program, graphs=GRAPHS, ordered=False) > 30
