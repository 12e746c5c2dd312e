# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Metrics: what a step writes, that it reaches a page over processes, and that it is what docs/metrics.md says.

The workers are processes, and the page is made by prometheus_client as vLLM's API server makes it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import mmap_key
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.parser import text_string_to_metric_families

from afd_dsv4 import metrics
from afd_dsv4.config import Mode
from afd_dsv4.gate import Decision
from afd_dsv4.workspace.arena import Exhausted
from tests.metrics_worker import SEQS, SLOTS, Runtime

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
Key = tuple[str, frozenset[tuple[str, str]]]


def series(text: str) -> dict[Key, float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(metrics.PREFIX)
    }


def key(name: str, **labels: str) -> Key:
    return metrics.PREFIX + name, frozenset(labels.items())


def page(folder: Path) -> dict[Key, float]:
    """What an API server of several serves; vllm/v1/metrics/prometheus.py:get_prometheus_registry."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))
    return series(generate_latest(registry).decode())


def spawn(folder: Path | None, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != metrics.VARIABLE}
    if folder is not None:
        environment[metrics.VARIABLE] = str(folder)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def worker(folder: Path | None, *arguments: int) -> subprocess.CompletedProcess[str]:
    return spawn(folder, "-m", "tests.metrics_worker", *map(str, arguments))


def test_two_workers_reach_the_page_of_a_third_process_each_under_its_own_labels(tmp_path: Path) -> None:
    worker(tmp_path, 0, 0, 2)
    worker(tmp_path, 0, 1, 3)
    found = page(tmp_path)
    for rank, steps in (("0", 2), ("1", 3)):
        mine = {"engine": "0", "rank": rank}
        assert found[key("executor", executor="stock", **mine)] == 1
        assert found[key("leases_total", **mine)] == steps + SLOTS  # those of the end took every slot
        assert found[key("uploads_total", **mine)] == steps
        assert found[key("exhausted_total", **mine)] == 1
        assert found[key("quarantined_total", **mine)] == 0
        assert found[key("forward_refusals_total", reason="Exhausted", **mine)] == 1
        assert found[key("slots", state="acquired", **mine)] == SLOTS
        assert [found[key("slots", state=state, **mine)] for state in ("unused", "sealed", "settled")] == [0, 0, 0]
        assert found[key("tail_requests", state="used", **mine)] == steps
        assert found[key("tail_requests", state="free", **mine)] == SEQS - steps
        # 20 layers of C128; one of 128 rows in one page and one of the page before it: the tail of one request.
        used, free = (found[key("tail_pages", kind="c128", state=state, **mine)] for state in ("used", "free"))
        shape = Runtime().shapes[128]
        assert (used, free) == (steps * 20 * shape.tail_pages, (SEQS - steps) * 20 * shape.tail_pages)
        assert found[key("tail_pages", kind="c128", state="spare", **mine)] == SLOTS * SEQS * shape.spare_pages
        assert found[key("allocated_bytes", part="tails_and_spares", **mine)] == 1000
        assert found[key("allocated_bytes", part="host", **mine)] == 24


def test_a_restarted_worker_takes_its_gauges_over_and_counters_go_on(tmp_path: Path) -> None:
    worker(tmp_path, 0, 0, 3)
    worker(tmp_path, 0, 0, 1)
    found = page(tmp_path)
    assert found[key("tail_requests", state="used", engine="0", rank="0")] == 1  # not 4, and not 3
    assert found[key("uploads_total", engine="0", rank="0")] == 4


def test_a_worker_that_was_marked_dead_leaves_counters_alone(tmp_path: Path) -> None:
    worker(tmp_path, 0, 0, 1)
    (live,) = tmp_path.glob("gauge_live*.db")
    mark_process_dead(int(live.stem.rpartition("_")[2]), str(tmp_path))
    assert {name for name, _ in page(tmp_path)} == {
        metric.full_name for metric in metrics.METRICS if metric.counts and metric.where == "worker"
    }


def test_without_the_variable_a_worker_writes_nothing_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(metrics.VARIABLE, raising=False)
    metrics._say.cache_clear()
    with caplog.at_level(logging.INFO, metrics._logger.name):
        assert metrics.of_worker(Runtime(), lambda: (0, 0)) is None
        assert metrics.of_worker(Runtime(), lambda: (0, 1)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "afd-dsv4: no metrics of workers: PROMETHEUS_MULTIPROC_DIR is not set; to have them, see docs/metrics.md"
    ]


FORKED = """
import logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import prometheus_client
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]  # as vLLM sets it, which is too late for a fork
from afd_dsv4 import metrics
from tests.metrics_worker import Runtime
if os.fork() == 0:
    assert metrics.of_worker(Runtime(), lambda: (0, 0)) is None
else:
    os.wait()
"""


def test_a_worker_whose_values_would_stay_in_its_process_says_what_to_do(tmp_path: Path) -> None:
    said = spawn(None, "-c", FORKED, str(tmp_path)).stdout
    assert "set VLLM_WORKER_MULTIPROC_METHOD=spawn" in said
    assert page(tmp_path) == {}


def test_a_folder_that_is_not_there_ends_no_worker(tmp_path: Path) -> None:
    program = (
        "from afd_dsv4 import metrics; from tests.metrics_worker import Runtime; "
        "assert metrics.of_worker(Runtime(), lambda: (0, 0)) is None"
    )
    assert "metrics are given up: FileNotFoundError" in spawn(tmp_path / "absent", "-c", program).stderr


# Files whose bytes exist: a store into a hole of a file on a full disk is SIGBUS, which ends the process.


def holes(folder: Path) -> dict[str, int]:
    """By file, how many of its bytes the disk has promised nobody."""
    found = {path.name: path.stat() for path in folder.iterdir()}
    return {
        name: stat.st_size - 512 * stat.st_blocks for name, stat in found.items() if stat.st_size > 512 * stat.st_blocks
    }


def test_the_files_of_a_worker_have_no_holes(tmp_path: Path) -> None:
    worker(tmp_path, 0, 0, 3)
    assert len([*tmp_path.glob("*.db")]) == 2
    assert holes(tmp_path) == {}
    (tmp_path / "planted").touch()
    os.truncate(tmp_path / "planted", 1 << 16)
    assert holes(tmp_path) == {"planted": 1 << 16}


REFUSING = """
from afd_dsv4 import metrics
for number in range(600):
    metrics.request_refused(f"reason {number:03} {'x' * 500}: what was found")
"""


def test_a_file_that_grows_has_its_bytes_first_and_loses_none(tmp_path: Path) -> None:
    """Each series is more than 200 bytes, so 600 of them are more than the first 64 KiB."""
    spawn(tmp_path, "-c", REFUSING)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size > 1 << 16
    assert holes(tmp_path) == {}
    reasons = {f"reason {number:03} {'x' * 500}"[:200] for number in range(600)}
    assert page(tmp_path) == {key("refusals_total", what="request", reason=reason): 1 for reason in reasons}


def test_the_room_that_is_reserved_is_more_than_the_longest_series_takes() -> None:
    label = "\U0001f600" * metrics._LONGEST_REASON
    for metric in metrics.METRICS:
        values = [label if name == "reason" else "x" * 40 for name in metric.labels]
        text = mmap_key(metric.full_name, metric.full_name, list(metric.labels), values, metric.text)
        assert 4 + len(text.encode()) + 8 + 16 < metrics._ROOM, metric


FULL = """
import errno, os, sys
if len(sys.argv) > 1:
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate = full
from afd_dsv4 import metrics
from tests.metrics_worker import Runtime
assert metrics.of_worker(Runtime(), lambda: (0, 0)) is None
metrics.request_refused("streaming input: no")
"""
GIVEN_UP = "afd-dsv4: metrics are given up: OSError: [Errno 28] No space left on device\n"


def test_without_room_metrics_are_given_up_once_and_the_page_still_reads(tmp_path: Path) -> None:
    assert spawn(tmp_path, "-c", FULL, "planted").stderr == GIVEN_UP
    assert page(tmp_path) == {}
    assert [*tmp_path.iterdir()] == []


def test_a_disk_that_is_really_full_ends_no_process(tmp_path: Path) -> None:
    """A file system of 64 KiB, most of them taken, in a mount namespace of its own."""
    script = 'mount -t tmpfs -o size=64k none "$0" && head -c 57344 /dev/zero >"$0/filler" && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no such case: nobody may mount here")
    done = subprocess.run(
        [*inside, sys.executable, "-c", FULL], cwd=ROOT, env={**os.environ, metrics.VARIABLE: str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, GIVEN_UP)


# Several of one process.

FORKS = """
import os
from afd_dsv4 import metrics
from tests.metrics_worker import Runtime
metrics.request_refused("streaming input: no")
if os.fork() == 0:
    runtime = Runtime()
    written = metrics.of_worker(runtime, lambda: (0, 0))
    for step in range(3):
        runtime.step(f"r{step}")
        runtime.device.run()
        written.step()
    metrics.request_refused("streaming input: no")
else:
    assert os.wait()[1] == 0
    metrics.request_refused("streaming input: no")
"""


def test_counters_of_a_process_and_of_one_that_it_forked_add_up(tmp_path: Path) -> None:
    spawn(tmp_path, "-c", FORKS)
    found = page(tmp_path)
    assert found[key("refusals_total", what="request", reason="streaming input")] == 3
    assert found[key("leases_total", engine="0", rank="0")] == 3
    assert found[key("executor", engine="0", rank="0", executor="stock")] == 1
    assert len([*tmp_path.glob("counter_*.db")]) == 2
    assert holes(tmp_path) == {}


TWO = """
from afd_dsv4 import metrics
from tests.metrics_worker import Runtime
first, second = Runtime(), Runtime()
of_first = metrics.of_worker(first, lambda: (0, 0))
first.step("a", "b", "c")
of_first.step()
of_second = metrics.of_worker(second, lambda: (0, 0))
second.step("d")
of_second.step()
first.device.run()
first.step("e")
of_first.step()
of_first.close()
"""


def test_two_engines_of_one_process_add_their_counters_and_the_last_has_the_gauges(tmp_path: Path) -> None:
    spawn(tmp_path, "-c", TWO)
    found, mine = page(tmp_path), {"engine": "0", "rank": "0"}
    assert found[key("leases_total", **mine)] == 2 + 1
    assert found[key("tail_requests", state="used", **mine)] == 1
    assert found[key("tail_requests", state="free", **mine)] == SEQS - 1
    assert found[key("slots", state="sealed", **mine)] == 1
    assert found[key("executor", executor="stock", **mine)] == 1


class Noted:
    """A child of prometheus_client that notes instead."""

    def __init__(self, noted: list[Any], name: str) -> None:
        self._noted, self._name = noted, name

    def labels(self, **labels: str) -> Noted:
        which = [value for label, value in labels.items() if label not in ("engine", "rank")]
        return Noted(self._noted, "/".join([self._name, *which]))

    def inc(self, amount: float = 1) -> None:
        self._noted.append((self._name, amount))

    set = inc


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is written, in order."""
    found: list[Any] = []
    made = {metric.name: Noted(found, metric.name) for metric in metrics.METRICS}
    monkeypatch.setattr(metrics, "_made", lambda: made)
    return found


def test_a_step_writes_what_changed_and_nothing_else(noted: list[Any]) -> None:
    runtime = Runtime()
    written = metrics.WorkerMetrics(runtime, 0, 0)
    noted.clear()
    written.step()
    assert noted == []
    lease = runtime.step("a")
    written.step()
    c4, c128 = (21 * runtime.shapes[4].tail_pages, 20 * runtime.shapes[128].tail_pages)
    assert sorted(noted) == sorted(
        [
            ("leases_total", 1),
            ("uploads_total", 1),
            ("events_recorded_total", 1),  # the fence; the ring's own events are not counted
            ("slots/unused", 1),
            ("slots/sealed", 1),
            ("tail_requests/used", 1),
            ("tail_requests/free", 3),
            ("tail_pages/c4/used", c4),
            ("tail_pages/c4/free", 3 * c4),
            ("tail_pages/c128/used", c128),
            ("tail_pages/c128/free", 3 * c128),
        ]
    )
    noted.clear()
    runtime.device.run()
    written.step()
    assert noted == []  # nobody asked for the fence: a step must not query the device
    assert lease.over()
    written.step()
    assert noted == [("slots/sealed", 0), ("slots/settled", 1)]


def test_seats_in_doubt_are_neither_used_nor_free(noted: list[Any]) -> None:
    runtime = Runtime()
    written = metrics.WorkerMetrics(runtime, 0, 0)
    lease = runtime.step("a")
    runtime.arena.quarantine(lease, "a test says so")
    held, idle = runtime.store.seat("a"), runtime.store.free_seats()[0]  # type: ignore[arg-type]
    assert held is not None
    runtime.doubt = (held, idle)
    noted.clear()
    written.step()
    assert ("quarantined_total", 1) in noted
    assert ("slots/quarantined", 1) in noted
    assert ("tail_requests/in_doubt", 2) in noted
    assert ("tail_requests/free", 2) in noted
    assert ("tail_requests/used", 0) not in noted  # it was 0 before the step


def test_what_a_worker_holds_is_nothing_once_it_has_ended(noted: list[Any]) -> None:
    runtime = Runtime()
    written = metrics.WorkerMetrics(runtime, 0, 0)
    runtime.step("a")
    before = list(noted)
    noted.clear()
    written.close()
    at_end = dict(noted)
    held = {name for name, value in [*before, *noted] if value and not name.endswith("_total")}
    assert {"executor/stock", "allocated_bytes/host", "tail_pages/c4/spare", "tail_requests/used"} < held
    assert {name: at_end[name] for name in held} == dict.fromkeys(held, 0)
    assert at_end["leases_total"] == 1
    noted.clear()
    written.step()
    written.refused(Exhausted("none", fatal=True))
    assert noted == []


def test_other_exceptions_of_a_forward_are_not_counted(noted: list[Any]) -> None:
    written = metrics.WorkerMetrics(Runtime(), 0, 0)
    noted.clear()
    written.refused(RuntimeError("out of memory"))
    assert noted == []
    written.refused(Exhausted("none", fatal=False))
    assert noted == [("forward_refusals_total/Exhausted", 1)]


def test_a_refusal_of_the_gate_is_counted_by_what_stands_in_front_of_its_colon(noted: list[Any]) -> None:
    reasons = ("prefix caching: on; set --no-enable-prefix-caching", "LoRA: on; drop it")
    metrics.decided(Decision(Mode.COLOCATED, active=False, refused=True, reasons=reasons))
    metrics.request_refused("streaming input: it would keep its place; send whole prompts")
    assert noted == [
        ("decisions_total/colocated/refused", 1),
        ("refusals_total/configuration/prefix caching", 1),
        ("refusals_total/configuration/LoRA", 1),
        ("refusals_total/request/streaming input", 1),
    ]


def test_a_metric_that_cannot_be_written_ends_neither_step_nor_decision(
    noted: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime()
    written = metrics.WorkerMetrics(runtime, 0, 0)

    def full(_: Any, amount: float = 1) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Noted, "inc", full)
    metrics._say.cache_clear()
    written._write = [Noted(noted, "x").inc for _ in written._write]
    runtime.step("a")
    written.step()
    runtime.step("b")
    written.step()
    metrics.decided(Decision(Mode.AFD, active=False, refused=False, reasons=("the AFD role here is 'ffn'",)))
    assert [record.getMessage() for record in caplog.records] == [
        "afd-dsv4: metrics are given up: OSError: no space left"
    ]


def test_no_name_is_one_that_vllm_unregisters() -> None:
    with pytest.raises(ValueError, match="vLLM unregisters"):
        metrics.Metric("of_vllm_total", (), "worker", "")


def test_the_page_has_the_table_of_the_code_and_names_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert metrics.table() in text
    known = {metric.full_name for metric in metrics.METRICS}
    named = set(re.findall(rf"\b{metrics.PREFIX}[a-z_]+", text))
    assert named == known
    assert re.findall(rf"\b{metrics.PREFIX}[a-z_]+", "`afd_dsv4_planted_total`") == ["afd_dsv4_planted_total"]
