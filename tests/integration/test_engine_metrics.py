# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Metrics of the real engine: what its worker wrote is on the page that vLLM makes, and vLLM takes none of it away."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from afd_dsv4.metrics import VARIABLE
from afd_dsv4.softnpu import checkpoint
from tests.forked_engines import nursery

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = checkpoint.Geometry(mtp=True)
#: In the engine's process, before it: two pages, with a folder and without, as vLLM's API servers make them.
SERVED = """
import os
from pathlib import Path
from prometheus_client import Gauge, generate_latest
from vllm.v1.metrics import prometheus
from afd_dsv4 import metrics
from afd_dsv4.config import Mode
from afd_dsv4.gate import Decision
Gauge("vllm_planted", "x", multiprocess_mode="mostrecent").set(1)
metrics.decided(Decision(Mode.AFD, active=False, refused=True, reasons=("LoRA: on; drop it",)))
prometheus.unregister_vllm_metrics()
folder = os.environ[metrics.VARIABLE]
Path(folder, "several").write_bytes(generate_latest(prometheus.get_prometheus_registry()))
del os.environ[metrics.VARIABLE]
Path(folder, "one").write_bytes(generate_latest(prometheus.get_prometheus_registry()))
os.environ[metrics.VARIABLE] = folder
"""


def test_a_workers_steps_are_on_the_page(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path / "model", MODEL)
    files = tmp_path / "files"
    files.mkdir()
    additional = {"multistream_dsv4_dsa_overlap": False, "afd_dsv4": {"mode": "colocated"}}
    engine = {"block_size": 32, "additional_config": additional, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    requests = [{"id": f"r{i}", "prompt": [2 + i] * 100, "max_tokens": 3, "arrive": 0} for i in range(2)]
    described = {"checkpoint": str(folder), "engine": engine, "workloads": [requests]}
    environment = {"SOFTNPU_WAIVE": ",".join(MODEL.waivers), VARIABLE: str(files)}
    found = nursery(environment).run(described, prelude=SERVED)
    assert [len(tokens) for tokens in found["workloads"][0]["tokens"].values()] == [3, 3]

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(files))
    worker = {"engine": "0", "rank": "0"}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"afd_dsv4_{name}", worker | labels)

    leases = value("leases_total")
    assert leases is not None
    assert leases >= 200 // 64 + 2  # the chunks of the prompts, and two more tokens each
    assert value("uploads_total") == leases  # no graphs
    assert value("events_recorded_total") == leases  # one stream
    assert value("exhausted_total") == value("quarantined_total") == value("host_waits_total") == 0
    assert value("executor", executor="stock") == 1
    assert (value("allocated_bytes", part="tails_and_spares") or 0) > 0
    # A server steps once more to say who has finished (EngineCoreProc.has_work); the loop of this test does not.
    used, free = value("tail_requests", state="used"), value("tail_requests", state="free")
    assert used in (1, 2)
    assert free == 4 - used
    assert value("slots", state="acquired") == 0
    for page in ("several", "one"):
        text = (files / page).read_text(encoding="utf-8")
        assert 'afd_dsv4_decisions_total{mode="afd",verdict="refused"} 1.0' in text
        assert 'afd_dsv4_refusals_total{reason="LoRA",what="configuration"} 1.0' in text
        # vLLM takes what has its name off its registry; what is in the folder stays.
        assert ("vllm_planted" in text) is (page == "several")
    decided = {"mode": "colocated", "verdict": "on"}
    assert registry.get_sample_value("afd_dsv4_decisions_total", decided) is not None
