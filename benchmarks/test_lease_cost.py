# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What ordering costs the host: leases and touches on the device model, without any device.

Compare ratios within one run; the absolute times are this machine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from afd_dsv4.device.model import ModelDevice
from afd_dsv4.geometry import page_layout, preset
from afd_dsv4.tail.store import SlotIndex, TailStore
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.identity import ExecutionId
from afd_dsv4.workspace.sizing import tail_shapes

Benchmark = Callable[..., Any]


@pytest.mark.parametrize("streams", [1, 2])
def test_one_lease(benchmark: Benchmark, streams: int) -> None:
    """Acquire, one touch a stream, seal, settle."""
    device = ModelDevice()
    queues = [device.stream() for _ in range(streams)]
    arena = WorkspaceArena(device, 2)

    def lease() -> None:
        held = arena.acquire(ExecutionId(1))
        for stream in queues:
            held.touch(stream, writes=[stream.index])
        held.seal()
        device.run()
        arena.settle(held)

    benchmark(lease)


@pytest.mark.parametrize("streams", [1, 2])
def test_sixty_two_touches(benchmark: Benchmark, streams: int) -> None:
    """The launches of one Flash forward; on two streams every launch conflicts with the one before."""
    device = ModelDevice()
    queues = [device.stream() for _ in range(streams)]
    arena = WorkspaceArena(device, 2)

    def forward() -> None:
        held = arena.acquire(ExecutionId(1))
        for launch in range(62):
            held.touch(queues[launch % streams], reads=["lists"], writes=["table", "pages"], step=launch)
        held.seal()
        device.run()

    benchmark(forward)


@pytest.mark.parametrize("requests", [1, 64])
def test_planning_one_decode_step_of_flash(benchmark: Benchmark, requests: int) -> None:
    """Pages of all layers of a step in which every request adds one token."""
    shapes = tail_shapes(preset("flash"), page_layout("vllm-ascend-0.23.0", 128))
    store = TailStore(shapes, max_num_seqs=requests, slots=1)
    position = 1000
    store.plan([RequestChunk(RequestId(str(i)), 0, position) for i in range(requests)], SlotIndex(0))

    def step() -> None:
        nonlocal position
        store.plan([RequestChunk(RequestId(str(i)), position, position + 1) for i in range(requests)], SlotIndex(0))
        position += 1

    benchmark(step)
