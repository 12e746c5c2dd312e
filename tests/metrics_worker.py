# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A process with tails and slots and no vLLM, which writes its metrics; `python -m tests.metrics_worker` to be one.

Arena, store and ring are the real ones, on the model device, so that what a step should have counted can be worked out
by hand.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from afd_dsv4 import metrics
from afd_dsv4.device.model import ModelDevice
from afd_dsv4.geometry import CompressorKind, page_layout, preset
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SeatIndex, TailStore
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.identity import Domain, ExecutionId, ExecutionKind, Generation
from afd_dsv4.workspace.sizing import tail_shapes
from afd_dsv4.workspace.staging import StagingRing

SEQS, SLOTS = 4, 2


@dataclass
class Bytes:
    tails_and_spares: int = 1000
    host: int = 24


class Runtime:
    """What `metrics.Runtime` asks for, of real parts."""

    tile_tokens: int | None = None

    def __init__(self) -> None:
        self.device = ModelDevice()
        self.stream = self.device.stream()
        geometry = preset("flash")
        self.shapes: dict[int, TailShape] = tail_shapes(geometry, page_layout("vllm-ascend-0.23.0", 128))
        self.arena: WorkspaceArena[Any] = WorkspaceArena(self.device, SLOTS)
        self.store = TailStore(self.shapes, max_num_seqs=SEQS, slots=SLOTS)
        self.staging: StagingRing[Any, list[int]] = StagingRing(self.arena.events, [[] for _ in range(SLOTS + 1)])
        self.pools: dict[CompressorKind, Any] = {CompressorKind.C4: [], CompressorKind.C128: []}
        self.doubt: tuple[SeatIndex, ...] = ()
        self._generation = 0

    def allocated(self) -> Bytes:
        return Bytes()

    def seats_in_doubt(self) -> tuple[SeatIndex, ...]:
        return self.doubt

    def execution(self) -> ExecutionId:
        self._generation += 1
        return ExecutionId(Generation(self._generation), 0, 0, Domain.EAGER, ExecutionKind.LIVE)

    def step(self, *requests: str, seal: bool = True) -> Any:
        """One execution of these requests, begun as a runtime begins it."""
        stream = self.stream
        entry, _ = self.staging.take()
        lease = self.arena.acquire(self.execution())
        self.store.plan([RequestChunk(RequestId(name), 0, 5) for name in requests], lease.slot.index)
        self.staging.copied(entry, stream)
        lease.touch(stream, writes=["lists"])
        if seal:
            lease.seal(whole=True)
        return lease


def main(engine: int, rank: int, steps: int) -> None:
    """Take `steps` executions of a request each, all still to run on the device."""
    runtime = Runtime()
    written = metrics.of_worker(runtime, lambda: (engine, rank))
    assert written is not None
    for step in range(steps):
        runtime.step(f"r{step}")
        runtime.device.run()
        written.step()
    try:
        for _ in range(SLOTS + 1):
            runtime.arena.acquire(runtime.execution())
    except RuntimeError as error:
        written.refused(error)
    written.step()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
