# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin#178: a replay under asynchronous scheduling reads the metadata of the next step.

Symptom: the parameters of a captured graph are updated for the next replay while the last one is still queued; mended
with a synchronize of the stream before every replay.
Here: a graph's slot is leased anew for every replay, and what is uploaded for it waits on its stream for the last one's
fence. The host waits for nothing.
"""

from __future__ import annotations

from afd_dsv4.workspace.lease import WHOLE
from tests.regressions.machine import Machine, capture_id, corrupted, graph_id

GRAPHS = [["decode"]]


def replays(machine: Machine) -> None:
    """One capture, then eight steps: their lists come on a stream of their own, each replay works on another."""
    with machine.device.capture() as graph:
        lease = machine.arena.capture("decode", capture_id(1))
        lease.touch(machine.a, reads=["lists"], writes=["pages"])
        lease.seal()
    for step in range(2, 10):
        lease = machine.arena.replay("decode", graph_id(step))
        lease.touch(machine.b, writes=["lists"])
        machine.write(machine.b, "lists", step)
        lease.touch(machine.a, writes=[WHOLE], step=WHOLE)
        machine.device.replay(graph, machine.a)
        machine.read(machine.a, "lists", step)
        lease.complete(WHOLE)
        lease.seal()


def test_every_replay_reads_the_lists_of_its_own_step_and_the_host_never_waits() -> None:
    assert corrupted(replays, graphs=GRAPHS) == 0
    machine = Machine(graphs=GRAPHS)
    replays(machine)  # nothing has run when the last one is queued
    assert machine.a.done == 0
    assert machine.arena.counters.handed_on == 7


def test_without_the_waits_replays_read_the_lists_of_other_steps() -> None:
    """Negative control: upstream without its synchronize."""
    assert corrupted(replays, graphs=GRAPHS, ordered=False) > 0
