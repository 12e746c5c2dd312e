# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Graphs of the stock runtime on a real device: many replays between eager executions, every row compared.

Problem: a graph keeps the addresses of its workspace slot, and nothing but events and uploads to the same places tells
one replay from the next.
Way: some requests, a few tokens each per step, go on through the native form first (dense table, one layer after the
other), then through a runtime whose steps are replays of one graph and eager executions in random order, at most two in
flight as asynchronous scheduling has them. The indexer's compressors are on a side stream, in the graph and outside.
Every step has the same shape, so that equal rows have equal bits. Last, some replays whose page lists are wiped once
they are uploaded must give other rows, or the comparison is blind.
Not here: other shapes, failures in a graph's life (those are tested on the software NPU).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from afd_dsv4.compressor.stock import StockExecution, StockRuntime, call_operator
from afd_dsv4.evidence.cuda.staging import counted_synchronisations, own_stream
from afd_dsv4.evidence.rows import Batch, Inputs, LayerKind, Pack, make_inputs
from afd_dsv4.geometry import CompressorKind, ModelGeometry, PageLayout
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace import order
from afd_dsv4.workspace.sizing import tail_shapes
from afd_dsv4.workspace.trace import Trace

PROMPTS = (126, 200, 61, 97)  # a step or two from a window's end of either ratio
TOKENS = 3  # of a request in a step
IN_FLIGHT = 2
WIPED = 8  # replays of the control
KEY = "step"


@dataclass
class Replayed:
    """What was compared, and found.

    Attributes:
        replays: of the one graph.
        eager: executions between them.
        rows: compared.
        different: of them.
        control: rows that differ once the page lists are wiped.
        unordered: reuses that the order checker found in the trace.
        host_synchronisations: that torch noticed while steps were queued.
        host_waits: of the staging ring.
        events: made by the runtime.
        seconds: of all steps.
    """

    replays: int = 0
    eager: int = 0
    rows: int = 0
    different: int = 0
    control: int = 0
    unordered: int = 0
    host_synchronisations: int = 0
    host_waits: int = 0
    events: int = 0
    seconds: float = 0.0


class _Program:
    """The steps, and what the native form makes of them."""

    def __init__(
        self, geometry: ModelGeometry, layout: PageLayout, device: torch.device, steps: int, seed: int
    ) -> None:
        names = [RequestId(f"request {index}") for index in range(len(PROMPTS))]
        last = [prompt + TOKENS * steps for prompt in PROMPTS]
        prompts = tuple(RequestChunk(name, 0, end) for name, end in zip(names, PROMPTS, strict=True))
        ends = tuple(RequestChunk(name, 0, end) for name, end in zip(names, last, strict=True))
        self.geometry = geometry
        self.layout = layout
        self.inputs: Inputs = make_inputs(geometry, Batch((), prompts, ends), device, seed)
        ratios = list(tail_shapes(geometry, layout))
        self.packs = [Pack(self.inputs, prompts, ratios)]
        for step in range(steps):
            begin = [prompt + TOKENS * step for prompt in PROMPTS]
            chunks = tuple(RequestChunk(n, at, at + TOKENS) for n, at in zip(names, begin, strict=True))
            self.packs.append(Pack(self.inputs, chunks, ratios))
        self.rows = {(c.layer, c.kind): self._native(c.layer, c.kind, last) for c in geometry.compressors}

    def _native(self, layer: int, kind: CompressorKind, last: Sequence[int]) -> list[torch.Tensor]:
        page_rows, device = self.layout.page_rows(kind), self.inputs.rope_cos.device
        columns = -(-max(last) // page_rows)
        table = torch.arange(1, 1 + columns * len(last), dtype=torch.int32).view(len(last), columns).to(device)
        width = self.geometry.row_bytes(kind) // 4
        state = torch.zeros((1 + columns * len(last), page_rows, width), device=device)
        found = []
        for pack in self.packs:
            cos, sin = pack.rope[kind.ratio]
            weights = self.inputs.weights[layer, kind]
            rows = call_operator(pack.x, weights, kind, state, table, pack.starts, pack.cu_seqlens, cos, sin)
            found.append(rows[: pack.emitted(kind.ratio)])
        return found


class _Steps:
    """The runtime that goes through a program."""

    def __init__(self, program: _Program, device: torch.device) -> None:
        self.program = program
        self.module: Any = torch.get_device_module(device)
        self.runtime = StockRuntime(
            program.geometry,
            program.layout,
            max_num_seqs=len(PROMPTS),
            max_num_batched_tokens=sum(PROMPTS),
            device=device,
            graphs=[(KEY,)],
            trace=Trace(None),
        )
        self.main, self.side = self.module.Stream(), self.module.Stream()
        self.wrong = {stream: torch.zeros((), dtype=torch.int64, device=device) for stream in (self.main, self.side)}
        self.found = Replayed()
        self._flight: deque[Any] = deque()
        pack = program.packs[1]
        self.x, self.cu_seqlens = pack.x.clone(), pack.cu_seqlens.clone()
        self.rope = {ratio: (cos.clone(), sin.clone()) for ratio, (cos, sin) in pack.rope.items()}
        self.outputs: dict[LayerKind, torch.Tensor] = {}
        self.graph: Any = None
        self.module.synchronize()

    def _launch(
        self,
        execution: StockExecution,
        pack: Any,
        main: Any,
        then: Callable[[LayerKind, torch.Tensor], None],
    ) -> None:
        """All compressors, the indexer's on the side stream, which begins and ends with the main one."""
        self.side.wait_stream(main)
        for compressor in self.program.geometry.compressors:
            key = (compressor.layer, compressor.kind)
            with self.module.stream(self.side if compressor.kind is CompressorKind.C4_INDEXER else main):
                cos, sin = pack.rope[compressor.kind.ratio]
                weights = self.program.inputs.weights[key]
                then(key, execution.compress(*key, pack.x, weights, cos, sin, pack.cu_seqlens))
        main.wait_stream(self.side)

    def _compare(self, index: int, key: LayerKind, rows: torch.Tensor, stream: Any) -> None:
        """Queue the comparison of one compressor in one step."""
        wanted = self.program.rows[key][index]
        if len(wanted):
            self.wrong[stream] += (rows[: len(wanted)].view(torch.int16) != wanted.view(torch.int16)).any(1).sum()
            self.found.rows += len(wanted)

    def eager(self, index: int) -> None:
        """Step `index` without the graph."""
        pack = self.program.packs[index]

        def then(key: LayerKind, rows: torch.Tensor) -> None:
            on_side = key[1] is CompressorKind.C4_INDEXER
            self._compare(index, key, rows, self.side if on_side else self.main)

        with self.runtime.begin(pack.chunks) as execution:
            self._launch(execution, pack, self.main, then)
        self.found.eager += 1
        self._throttle()

    def capture(self) -> None:
        """Capture a step."""
        self.graph = self.module.CUDAGraph() if hasattr(self.module, "CUDAGraph") else self.module.NPUGraph()
        chunks = [RequestChunk(RequestId(f"captured {index}"), 0, TOKENS) for index in range(len(PROMPTS))]
        with self.runtime.capture(KEY, chunks) as execution, self.module.graph(self.graph):
            self._launch(execution, self, self.module.current_stream(), self.outputs.__setitem__)

    def replay(self, index: int, wipe: bool = False) -> None:
        """Step `index` with the graph."""
        pack = self.program.packs[index]
        execution = self.runtime.begin_replay(KEY, pack.chunks)
        assert execution.lease is not None
        if wipe:
            self.runtime.lists[execution.lease.slot.index].flat.zero_()
        self.x.copy_(pack.x)
        self.cu_seqlens.copy_(pack.cu_seqlens)
        for ratio, (cos, sin) in self.rope.items():
            cos.copy_(pack.rope[ratio][0])
            sin.copy_(pack.rope[ratio][1])
        execution.replay(self.graph)
        execution.finish()
        for key, rows in self.outputs.items():
            self._compare(index, key, rows, self.main)
        self.found.replays += 1
        self._throttle()

    def _throttle(self) -> None:
        """Let the host run ahead as far as an engine does."""
        self._flight.append(self.main.record_event())
        if len(self._flight) >= IN_FLIGHT:
            self._flight.popleft().synchronize()

    def different(self) -> int:
        """Rows that differ so far; waits for the device."""
        self.module.synchronize()
        return sum(int(count) for count in self.wrong.values())


def replay_steps(
    geometry: ModelGeometry, layout: PageLayout, device: torch.device, *, replays: int, eager: int, seed: int
) -> Replayed:
    """Go through `replays` replays and `eager` eager executions behind a prompt, and through the control."""
    program = _Program(geometry, layout, device, 1 + replays + eager + WIPED, seed)
    how = [True] * replays + [False] * eager
    random.Random(seed).shuffle(how)
    steps = _Steps(program, device)
    with own_stream(steps.module):
        steps.module.set_stream(steps.main)
        steps.eager(0)
        steps.eager(1)  # compiles what the capture must not
        steps.module.synchronize()
        steps.capture()
        began = time.perf_counter()
        with counted_synchronisations() as seen:
            for index, graph in enumerate(how, start=2):
                (steps.replay if graph else steps.eager)(index)
        found = steps.found
        found.different = steps.different()
        found.seconds = time.perf_counter() - began
        found.host_synchronisations = seen.count
        found.host_waits = steps.runtime.staging.host_waits
        found.events = steps.runtime.arena.events.created
        trace = steps.runtime.trace
        found.unordered = len(order.check(trace.records(), trace.dropped).violations)
        rows = found.rows
        for index in range(2 + len(how), 2 + len(how) + WIPED):
            steps.replay(index, wipe=True)
        found.control = steps.different() - found.different
        found.replays, found.rows = replays, rows
        steps.module.synchronize()
    return found
