# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a stage of the asynchronous connector costs the host in one layer, beyond what it costs natively.

Counted is all that stands between the attention's call of the operator and the operator, for every compressor of the
layer: which uBatch the forward context names, whose launch it is, the order, the touch, which views it gets; and all
that the adapter's connector adds to one send and one receive. What is native is in neither: the operator and the
scatter of page ids, the connector's own calls (ours are run on a class whose calls do nothing, so that no afd-plugin is
needed), and who makes a stage's context current. Nor is the audit of the boundary, which is off outside of tests, and
what there is once a forward: its begin, its end, the cut. Beside it stands what the native call of the same launch
costs the host in the same run. Source: softnpu; times are this machine's, and say nothing about a device.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
from time import perf_counter
from types import ModuleType, SimpleNamespace
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


class Native:
    """In place of a connector of afd-plugin's, whose calls are not to be counted."""

    def send_attn_output(self, hidden_states: Any, context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def recv_ffn_output(self, ref_tensor: Any, ubatch_idx: int = 0, **kwargs: Any) -> Any:
        """Nothing."""


def watched() -> Any:
    """What the adapter makes of a connector. Its module wants afd-plugin's: where there is none, names stand in."""
    stands_in = {}
    if importlib.util.find_spec("afd_plugin") is None:
        for name in ("", ".connectors", ".connectors.factory", ".connectors.npu", ".connectors.npu.async_cam"):
            stands_in[f"afd_plugin{name}"] = ModuleType(f"afd_plugin{name}")
        stands_in["afd_plugin.connectors.npu.camp2p"] = ModuleType("afd_plugin.connectors.npu.camp2p")
        for name, member in (
            ("factory", "AFDConnectorFactory"),
            ("npu.async_cam", "CAMAsyncAFDConnector"),
            ("npu.camp2p", "CAMP2pAFDConnector"),
        ):
            setattr(stands_in[f"afd_plugin.connectors.{name}"], member, type(member, (Native,), {}))
    adapter = "afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f_afd_85e826e.connectors"
    sys.modules.update(stands_in)
    try:
        mixin = importlib.import_module(adapter).WatchedMixin
    finally:
        for name in (*stands_in, *([adapter] if stands_in else [])):
            sys.modules.pop(name, None)
    return type("Watched", (mixin, Native), {})()


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
        self.connector = watched()
        self.items = [
            [SimpleNamespace(metadata=SimpleNamespace(layer_idx=layer, stage_idx=stage)) for stage in range(STAGES)]
            for layer in range(FLASH.num_layers)
        ]

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
        from vllm.forward_context import get_forward_context, override_forward_context

        from afd_dsv4.execution.cam import CamForward

        def ubatch() -> int:
            """As the adapter's runner asks."""
            return int(getattr(get_forward_context(), "ubatch_idx", 0))

        WATCH.stop()
        spans = [RequestChunk(RequestId(str(i)), self.position, self.position + ROWS) for i in range(REQUESTS)]
        self.position += ROWS
        half = REQUESTS * ROWS // STAGES
        contexts: list[Any] = [SimpleNamespace(ubatch_idx=stage) for stage in range(STAGES)]
        cam = CamForward.from_stages(self.runtime, spans, [(0, half), (half, 2 * half)])
        tables = [table for slot in self.runtime.tables for table in slot.values()]
        true = [table.flat for table in tables]
        for table in tables:
            table.flat = NoScatter()  # type: ignore[assignment]
        operator, connector = self.torch.ops._C_ascend.compressor, self.connector
        connector.forward = cam
        with cam, self.launches.of(cam.executions, [self.decodes] * STAGES, ubatch):
            for items, calls in zip(self.items, self.calls, strict=True):
                for stage, item in enumerate(items):
                    with override_forward_context(contexts[stage]):
                        WATCH.go()
                        for positional, named in calls:
                            operator(*positional, **named)
                        connector.send_attn_output(None, item)
                        connector.recv_ffn_output(None, ubatch_idx=stage)
                        WATCH.stop()
        connector.forward = None
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
