# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The evidence file: whole or not at all, strict JSON, and verdicts that follow the checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from afd_dsv4.evidence.report import POOLS, SECTIONS, Source, Verdict, figure, forget, prepare, size, table, write
from afd_dsv4.geometry import InputError, page_layout, preset


def evidence(**changed: object) -> dict[str, object]:
    return {**dict.fromkeys(SECTIONS, 0), **changed}


def test_the_file_holds_every_section_in_order_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = write(tmp_path, evidence(batch=figure(3, "rows", Source.SOFTNPU)))
    assert list(json.loads(path.read_text())) == list(SECTIONS)
    assert json.loads(path.read_text())["batch"] == {"value": 3, "unit": "rows", "source": "softnpu"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["evidence.json"]


@pytest.mark.parametrize("sections", [{}, {"surplus": 1}])
def test_a_missing_or_unknown_section_is_an_error_and_writes_nothing(
    tmp_path: Path, sections: dict[str, object]
) -> None:
    given = {**evidence(), **sections}
    if not sections:
        del given["order"]
    with pytest.raises(ValueError, match="the schema has"):
        write(tmp_path, given)
    assert list(tmp_path.iterdir()) == []


def test_infinity_and_nan_become_strings(tmp_path: Path) -> None:
    path = write(tmp_path, evidence(parity={"a": [float("inf"), float("nan"), 1.5]}))
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["parity"] == {"a": ["inf", "nan", 1.5]}


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        prepare(tmp_path / "file")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1,023 B"), (1 << 20, "1.0 MiB"), (3 << 29, "1.50 GiB"), (1536, "1.5 KiB")]
)
def test_sizes_are_written_for_people(value: int, text: str) -> None:
    assert size(value) == text


def test_a_table_lines_up_and_rules_off() -> None:
    assert table([("a", "bb"), (), ("ccc", "d")]) == "a    bb\n-------\nccc   d"


def run_with(source: Source, checks: dict[str, bool]):
    torch = pytest.importorskip("torch")
    from afd_dsv4.evidence.run import Run
    from afd_dsv4.geometry import page_layout, preset

    run = Run(source, torch.device("cpu"), preset("flash"), page_layout("vllm-ascend-0.23.0", 128), 32768, Path())
    for name, passed in checks.items():
        run.check(name, passed, "x", "y")
    return run


ALL = dict.fromkeys(
    ["tokens", "rows", "order", "launched", "table rule", "memory", "isolation", "admission", "engine"], True
)


def test_on_the_software_npu_what_needs_a_target_stack_is_never_passed() -> None:
    from afd_dsv4.evidence.run import _points

    verdicts = {point.number: point.verdict for point in _points(run_with(Source.SOFTNPU, ALL))}
    assert verdicts == {
        1: Verdict.PASS,
        2: Verdict.PASS,
        3: Verdict.NOT_SHOWN_HERE,
        4: Verdict.PASS,
        5: Verdict.NOT_SHOWN_HERE,
        6: Verdict.PASS,
        7: Verdict.NOT_SHOWN_HERE,
    }


@pytest.mark.parametrize(
    ("broken", "points"),
    [
        ("tokens", {1}),
        ("rows", {1, 2, 7}),
        ("order", {2, 3}),
        ("launched", {2}),
        ("table rule", {2}),
        ("memory", {4}),
        ("isolation", {6}),
        ("admission", {7}),
        ("engine", {7}),
    ],
)
def test_a_failed_check_fails_every_point_that_rests_on_it(broken: str, points: set[int]) -> None:
    from afd_dsv4.evidence.run import _points

    run = run_with(Source.SOFTNPU, {**ALL, broken: False})
    assert {point.number for point in _points(run) if point.verdict is Verdict.FAIL} == points


def test_a_point_without_a_check_fails() -> None:
    from afd_dsv4.evidence.run import _points

    run = run_with(Source.SOFTNPU, {name: True for name in ALL if name != "memory"})
    assert {point.number for point in _points(run) if point.verdict is Verdict.FAIL} == {4}


def test_native_allocates_payload_padding_and_pages_that_no_state_uses() -> None:
    from afd_dsv4.evidence.memory import unused

    geometry, layout = preset("flash"), page_layout("vllm-ascend-0.23.0", 128)
    # 32,768 tokens, in pages of 8 rows of C4 (attention pages of 128 KiB, indexer pages of 16,640 bytes) and of 32 of
    # C128; 43 layers, of which 21 have C4 and 20 C128. A block has room for the 22 layers of the largest KV group.
    attention, indexer = 128 * 512 * 2, 16_640
    block = 22 * (attention + indexer)
    assert block == 3_249_664  # as the real vLLM says
    c4, c128 = 32_768 // 8, 32_768 // 32
    payload = 32_768 * 4 * (21 * 2 * 2 * 512 + 21 * 2 * 2 * 128 + 20 * 2 * 512)
    padding = c4 * 21 * ((attention - 8 * 8192) + (indexer - 8 * 2048)) + c128 * 20 * (attention - 32 * 4096)
    empty = c4 * (attention + indexer) + c128 * (2 * attention + 22 * indexer)
    assert (payload, padding, empty) == (9_730_785_280, 5_659_164_672, 1_248_329_728)
    assert payload + padding + empty == (c4 + c128) * block
    assert unused(geometry, layout, {"c4_state": c4, "c128_state": c128}, block) == empty


def test_what_is_printed_of_admission_says_how_much_memory_and_of_which_report() -> None:
    from afd_dsv4.evidence.run import _pool

    row = {"scenario": "one_32k_prompt", "budget_bytes": 5012 * 3_249_664, "native": {"free_blocks": 5011}}
    assert _pool(row).startswith(
        "both sides from 15.17 GiB, the memory of the 5,011 blocks that vllm-ascend#9543 reports"
    )


def test_every_scenario_of_the_admission_has_its_report() -> None:
    from afd_dsv4.compat.harness import SCENARIOS

    assert {scenario.name for scenario in SCENARIOS} | {"packed_batch"} == {*POOLS}


def test_what_is_printed_of_the_real_engine_says_of_how_many_blocks_there_are() -> None:
    from afd_dsv4.evidence.engine import Contention
    from afd_dsv4.evidence.run import _waits

    assert _waits(Contention(4096, (765, 707), (10, 0), 40, 0)) == (
        "a prompt of 4,096 tokens waits 10 steps natively, where there are 765 blocks in all, and 0 with the plugin, "
        "where there are 707 and the same bytes hold tails and slots, too; 0 of 40 tokens differ"
    )


def test_only_a_run_that_begins_forgets_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "evidence.json").write_text("an older verdict")
    (tmp_path / "notes.txt").write_text("somebody else's")
    prepare(tmp_path)
    assert (tmp_path / "evidence.json").read_text() == "an older verdict"
    forget(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_device_that_is_not_there_leaves_the_last_run_as_it_was(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("no such case: there is a CUDA device")
    (tmp_path / "evidence.json").write_text("an older verdict")
    command = [sys.executable, "-m", "afd_dsv4", "evidence", "--device", "cuda", "--out", str(tmp_path)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LD_LIBRARY_PATH", "AFD_DSV4_SOFTNPU_DIR", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, "sees no CUDA device" in line) == (2, True), done.stderr
    assert (tmp_path / "evidence.json").read_text() == "an older verdict"
