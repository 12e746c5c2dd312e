# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The evidence run as a user starts it, on the smallest batch: exit status, file, verdicts that follow its checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from afd_dsv4.evidence.report import CHROME_FILE, PAGE_FILE, SECTIONS, TRACE_FILE
from afd_dsv4.workspace.chrome import chrome
from afd_dsv4.workspace.trace import load
from tests import pages
from tests.trace_events import valid
from tests.trace_processor import Perfetto

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime, pytest.mark.slow, pytest.mark.timeout(900)]

SOURCES = {"softnpu", "plan"}


def figures(value: object) -> list[dict[str, object]]:
    """Every figure anywhere in the file."""
    if isinstance(value, dict):
        own = [value] if value.keys() == {"value", "unit", "source"} else []
        return own + [figure for inner in value.values() for figure in figures(inner)]
    return [figure for inner in value for figure in figures(inner)] if isinstance(value, list) else []


def test_the_run_passes_writes_its_file_and_claims_nothing_about_a_device(tmp_path: Path) -> None:
    (tmp_path / "evidence.json").write_text('{"passed": true, "from": "an older run"}')
    for name in (TRACE_FILE, CHROME_FILE, PAGE_FILE):
        (tmp_path / name).write_text("of an older run")
    # Started without the launcher: the command finds the software NPU by itself.
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    command = [sys.executable, "-m", "afd_dsv4", "evidence", "--tokens", "1024", "--out", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    found = json.loads((tmp_path / "evidence.json").read_text())
    assert list(found) == list(SECTIONS)
    assert found["passed"] is True
    assert found["stack"]["device"] == "softnpu"
    assert found["batch"]["tokens"] == sum(request["tokens"] for request in found["batch"]["requests"]) == 1024
    assert set(found["batch"]["waived"]) == {"compressor.hidden", "compressor.fp32"}
    assert all(check["passed"] for check in found["verdicts"]["checks"])
    verdicts = {point["number"]: point["verdict"] for point in found["verdicts"]["points"]}
    assert verdicts == {number: "not_shown_here" if number in (3, 5, 7) else "pass" for number in range(1, 8)}
    assert {figure["source"] for figure in figures(found)} == SOURCES

    total = found["parity"]["rows_total"]
    assert total["compressed"]["value"] > 6 * 1024 // 4 * 21  # six cuts, a C4 row for every four tokens of 21 layers
    assert total["compressed_different"]["value"] == total["tail_different"]["value"] == 0
    served = found["admission"]["engine"]
    assert served["prompt"] == 1024
    assert served["steps_waited"]["native"]["value"] > 0 == served["steps_waited"]["plugin"]["value"]
    assert served["tokens"]["value"] > 4
    assert served["tokens_that_differ"]["value"] == 0
    controls = found["order"]["negative_controls"]
    assert all(load["mismatched_rows_touches_off"]["value"] > 0 for load in controls["touches"])
    assert all(launch["compressed_different"]["value"] > 0 for launch in controls["launched_broken"])
    for load_ in controls["touches"]:
        assert load_["unordered_reuses_touches_on"]["value"] == 0 < load_["unordered_reuses_touches_off"]["value"]

    trace = found["order"]["trace"]
    assert trace["unordered_reuses"]["value"] == trace["dropped"]["value"] == 0
    recorded = load(tmp_path / trace["file"])
    assert recorded.header.about["stack"]["device"] == "softnpu"
    # Six cuts of three forwards, two uBatches where the batch is cut; 62 launches and an upload in each.
    leases = 6 * 3 + 5
    assert trace["leases"]["value"] == leases
    assert trace["touches"]["value"] == leases * 63 == [op for _, op, *_ in recorded.records].count("touch")
    assert trace["records"]["value"] == len(recorded.records)
    picture = json.loads((tmp_path / CHROME_FILE).read_text())
    assert picture == json.loads(json.dumps(chrome(recorded.records)))
    assert set(valid(picture)) == {1, 2}  # a track for each slot
    with Perfetto(picture) as read:
        assert read.faults() == []
        slices = dict(read.rows("select category, count(*) as slices from slice where dur > 0 group by category"))
        assert slices == {"lease": leases, "touch": leases * 63}
        arrows = sum(event["ph"] == "s" for event in picture["traceEvents"])
        assert read.rows("select count(*) as arrows from flow") == [(arrows,)]
    page = (tmp_path / PAGE_FILE).read_text(encoding="utf-8")
    assert pages.faults(page) == []
    assert pages.carried(page)["evidence"] == found
    assert len(pages.carried(page)["timeline"]) == leases
    judged = subprocess.run(
        [sys.executable, "-m", "afd_dsv4", "trace", "check", str(tmp_path / trace["file"])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (judged.returncode, f"records={len(recorded.records)}" in judged.stdout) == (0, True), judged.stdout
    assert "No one has run this on Ascend hardware yet." in done.stdout
