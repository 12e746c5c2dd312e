# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a stage of the asynchronous connector costs the host in one layer, beyond what it costs natively.

Counted is all that stands between the attention's call of the operator and the operator, for every compressor of the
layer: whose launch it is, the order, the touch, which views it gets; and what the connector notes when it sends and
receives. The operator and the scatter of page ids are not in it, nor is the audit of the boundary, which is off outside
of tests. Beside it stands what the native call of the same launch costs the host in the same run. Source: softnpu;
times are this machine's, and say nothing about a device.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any

import pytest

from afd_dsv4.compat.contract import Verdict
from afd_dsv4.geometry import CompressorKind, page_layout, preset
from afd_dsv4.softnpu.runtime import is_active
from afd_dsv4.tail.tables import RequestChunk, RequestId
from benchmarks.test_lease_cost import US, WATCH, Benchmark, hold

pytestmark = pytest.mark.npu

FLASH = preset("flash")
REQUESTS, ROWS = 8, 4  # of a batch; two stages of four requests
STAGES = 2
Call = tuple[tuple[Any, ...], dict[str, Any]]
VERDICT = Verdict(True, (), "this benchmark", frozenset({"_C_ascend::compressor"}))


class NoScatter:
    """In place of a state table, for a scatter that is not to be counted."""

    def scatter_(self, *_: object) -> None:
        """Nothing."""


class Stages:
    """Forwards of two stages, of which only our part is on the watch."""

    def __init__(self, torch: Any, decodes: int) -> None:
        from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0 import launches as adapter
        from afd_dsv4.compressor.stock import StockRuntime

        self.torch = torch
        self.decodes = decodes
        self.device = torch.device("npu")
        places = [(compressor.layer, compressor.kind) for compressor in FLASH.compressors]
        true = torch.ops._C_ascend.compressor
        self.launches = adapter.Launches(true, places, self.device)
        nothing = torch.empty(0, device=self.device)
        self.runtime = StockRuntime(
            FLASH,
            page_layout("vllm-ascend-0.23.0", 128),
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=REQUESTS * ROWS,
            device=self.device,
            operator=lambda *_: nothing,
        )
        stage = REQUESTS // STAGES
        metadata = self.launches.metadata
        self.splits = [(metadata.prefill.block_table, stage - decodes), (metadata.decode.block_table, decodes)]
        self.inputs = {
            requests: (
                torch.zeros(requests * ROWS, FLASH.hidden_size, dtype=torch.bfloat16, device=self.device),
                torch.arange(0, (requests + 1) * ROWS, ROWS, dtype=torch.int32, device=self.device),
            )
            for _, requests in self.splits
        }
        self.weights = {kind: self._weights(kind) for kind in CompressorKind}
        self.rope = {
            (requests, kind.ratio): torch.zeros(
                min(requests * ROWS, requests * ROWS // kind.ratio + requests),
                FLASH.qk_rope_head_dim,
                dtype=torch.bfloat16,
                device=self.device,
            )
            for _, requests in self.splits
            for kind in CompressorKind
        }
        starts = torch.zeros(REQUESTS, dtype=torch.int32, device=self.device)
        self.calls: list[list[Call]] = [
            [
                self.arguments(compressor.kind, self.launches.states[layer, compressor.kind], table, requests, starts)
                for compressor in FLASH.compressors
                if compressor.layer == layer
                for table, requests in self.splits
                if requests
            ]
            for layer in range(FLASH.num_layers)
        ]
        self.position = 0
        self.stage = 0

    def _weights(self, kind: CompressorKind) -> tuple[Any, ...]:
        torch = self.torch
        head = FLASH.index_head_dim if kind is CompressorKind.C4_INDEXER else FLASH.head_dim
        wide = kind.coff * head
        bf16 = {"dtype": torch.bfloat16, "device": self.device}
        projection = torch.zeros(wide, FLASH.hidden_size, **bf16)
        return projection, projection, torch.zeros(kind.ratio, wide, device=self.device), torch.ones(head, **bf16)

    def arguments(self, kind: CompressorKind, state: Any, table: Any, requests: int, starts: Any) -> Call:
        """Of one launch, as vllm-ascend makes it."""
        (x, cu_seqlens), (wkv, wgate, ape, norm) = self.inputs[requests], self.weights[kind]
        rope = self.rope[requests, kind.ratio]
        return (x, wkv, wgate, state, ape, norm, rope, rope), {
            "state_block_table": table,
            "cu_seqlens": cu_seqlens,
            "seqused": None,
            "start_pos": starts,
            "rope_head_dim": FLASH.qk_rope_head_dim,
            "cmp_ratio": kind.ratio,
            "coff": kind.coff,
            "norm_eps": 1e-6,
            "rotary_mode": 2,
            "cache_mode": 1,
        }

    def forward(self) -> None:
        """All layers of both stages: attention, send, receive."""
        from afd_dsv4.execution.cam import CamForward

        WATCH.stop()
        spans = [RequestChunk(RequestId(str(i)), self.position, self.position + ROWS) for i in range(REQUESTS)]
        self.position += ROWS
        half = REQUESTS * ROWS // STAGES
        cam = CamForward.from_stages(self.runtime, spans, [(0, half), (half, 2 * half)])
        tables = [table for slot in self.runtime.tables for table in slot.values()]
        true = [table.flat for table in tables]
        for table in tables:
            table.flat = NoScatter()  # type: ignore[assignment]
        operator = self.torch.ops._C_ascend.compressor
        with cam, self.launches.of(cam.executions, [self.decodes] * STAGES, lambda: self.stage):
            for layer, calls in enumerate(self.calls):
                for self.stage in range(STAGES):
                    WATCH.go()
                    for positional, named in calls:
                        operator(*positional, **named)
                    cam.sent(layer, self.stage)
                    cam.received(self.stage)
                    WATCH.stop()
        for table, flat in zip(tables, true, strict=True):
            table.flat = flat
        self.torch.npu.synchronize()
        WATCH.go()

    def native(self, rounds: int = 50) -> float:
        """Microseconds that the host spends in the native call of one launch, at the median."""
        torch, kind, requests = self.torch, CompressorKind.C4, self.splits[0][1]
        state = torch.zeros(requests * 4, 8, FLASH.row_bytes(kind) // 4, device=self.device)
        table = torch.arange(1, requests * 3 + 1, dtype=torch.int32, device=self.device).view(requests, 3)
        starts = torch.zeros(requests, dtype=torch.int32, device=self.device)
        positional, named = self.arguments(kind, state, table, requests, starts)
        taken = []
        for _ in range(rounds):
            begun = perf_counter()
            torch.ops._C_ascend.compressor(*positional, **named)
            taken.append(perf_counter() - begun)
            torch.npu.synchronize()
        return statistics.median(taken) / US


@pytest.fixture
def torch() -> Any:
    """torch on the software NPU."""
    if not is_active():
        pytest.skip("npu: not on the software NPU; run: python -m afd_dsv4.softnpu -- python -m pytest benchmarks")
    found = pytest.importorskip("torch")
    pytest.importorskip("torch_npu")
    from afd_dsv4.softnpu import runtime

    runtime.install()
    return found


@pytest.mark.parametrize("decodes", [0, 1], ids=["one launch a compressor", "decodes and prefills"])
@pytest.mark.benchmark(timer=WATCH)
def test_a_stage_costs_the_host_30_us_a_layer(benchmark: Benchmark, torch: Any, decodes: int) -> None:
    """Mean of Flash's 43 layers: 21 have two compressors, 20 have one, 2 have none."""
    stages = Stages(torch, decodes)
    native = stages.native()
    stages.launches.bind(VERDICT)
    try:
        benchmark.pedantic(stages.forward, rounds=100, warmup_rounds=5)
    finally:
        stages.launches.unbind()
    benchmark.extra_info.update(native_call_us=native)
    hold(benchmark, 30, per=STAGES * FLASH.num_layers)
    assert stages.runtime.close(drain_s=10) == ()
