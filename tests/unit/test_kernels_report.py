# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""`afd-dsv4 kernels report`: its figures against sums by hand, its limits, and what it says where it cannot count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4 import kernels_report
from afd_dsv4.cli import main
from afd_dsv4.compressor import library, roofline
from afd_dsv4.compressor.roofline import modelled_time
from afd_dsv4.kernels_report import MIB, Limit, Report, answer, measure
from tests import kernels_world

FIXED = {
    "ub_bytes",
    "bytes_per_token",
    "bytes_per_token_tiled",
    "vector_instructions_per_token",
    "roofline_fraction_modelled",
    "slot_bytes",
}
COUNTERS = {"bytes.mte2": 0, "bytes.mte3": 0, "bytes.scalar": 0, "barriers": 0}


@pytest.fixture(scope="module")
def report() -> Report:
    return measure(kernels_world.library())


def of(report: Report, kernel: str, row_dtype: str = "fp32") -> kernels_report.KernelFigures:
    return next(f for f in report.kernels if (f.kernel, f.row_dtype) == (kernel, row_dtype))


def test_there_is_one_object_for_each_kernel_and_type_of_rows(report: Report) -> None:
    names = [(figures.kernel, figures.row_dtype) for figures in report.kernels]
    compress = ("compress_c4", "compress_c4_indexer", "compress_c128")
    assert names == [*((name, rows) for name in compress for rows in ("fp32", "bf16")), ("tail_update", "fp32")]


def test_bytes_per_token_are_those_of_rows_ropes_results_and_what_cores_load_for_themselves(report: Report) -> None:
    # C4, float32: a row of [kv | score], both twice 512 wide; a RoPE row of 2 x 64 and 512 bf16 for each 4 tokens. Each
    # half of a row is of one window; the left halves of the last window are of none.
    row, share, left = 2 * 1024 * 4, (2 * 64 * 4 + 512 * 2) / 4, 4 * 1024 * 4
    # Once a core: APE, norm weight and, which are few bytes, tables and its record.
    core = 4 * 1024 * 4 + 512 * 2
    expected = row + share + (3 * core - left) / 2048
    assert of(report, "compress_c4").bytes_per_token == pytest.approx(expected, abs=0.2)
    expected = row / 2 + share + (3 * core - left / 2) / 2048  # bf16 halves the rows
    assert of(report, "compress_c4", "bf16").bytes_per_token == pytest.approx(expected, abs=0.2)
    # C128: half the row; pooled rows of 512 float32 are written and read again; then RoPE and result, per 128 tokens;
    # and the APE, 128 x 512 float32, in slices of 64 columns for each core that works in them: at most 2 for each.
    row = 2 * 512 * 4
    shares = (2 * 2048 + 2 * 64 * 4 + 1024) / 128
    found = of(report, "compress_c128").bytes_per_token
    assert row + shares < found < row + shares + 1.1 * 48 * 2 * (128 * 64 * 4) / 32768
    # A decode's tail: a row read and written, and the APE of its score.
    assert of(report, "tail_update").bytes_per_token == pytest.approx(2 * 8192 + 4096, rel=0.03)


def test_a_tile_on_all_cores_moves_what_each_core_loads_for_itself_beside_and_has_no_limit(report: Report) -> None:
    # C4: APE and norm weight once for each of 48 cores, else as above.
    row, share, left, core = 2 * 1024 * 4, (2 * 64 * 4 + 512 * 2) / 4, 4 * 1024 * 4, 4 * 1024 * 4 + 512 * 2
    tiled = of(report, "compress_c4").bytes_per_token_tiled
    assert tiled == pytest.approx(row + share + (48 * core - left) / 2048, abs=1)
    tiled = of(report, "compress_c4", "bf16").bytes_per_token_tiled
    assert tiled == pytest.approx(row / 2 + share + (48 * core - left / 2) / 2048, abs=1)
    # C128: 16 windows in 8 slices are 128 tasks for 48 cores, of which some work in two slices; norm weights for those
    # 16 that have a window to norm.
    row, shares, slices = 2 * 512 * 4, (2 * 2048 + 2 * 64 * 4 + 1024) / 128, 0
    for c in range(48):
        slices += len({task // 16 for task in range(128 * c // 48, 128 * (c + 1) // 48)})
    tiled = of(report, "compress_c128").bytes_per_token_tiled
    assert row + shares + slices * 32768 / 2048 < tiled < row + shares + (slices * 32768 + 48 * 1536) / 2048
    assert of(report, "tail_update").bytes_per_token_tiled is None
    assert not any("tile" in limit.name for limit in report.limits())


def test_slots_are_rows_and_workspace(report: Report) -> None:
    # 8,192 bytes of faults; C128 has a row of 2 KiB for each window, and one more a request.
    assert of(report, "compress_c4").slot_bytes == (32768 * 8192 + 8192, 2052 * 8192 + 8192)
    assert of(report, "compress_c4_indexer", "bf16").slot_bytes == (32768 * 1024 + 8192, 2052 * 1024 + 8192)
    assert of(report, "compress_c128").slot_bytes == (
        32768 * 4096 + 257 * 2048 + 8192,
        2048 * 4096 + 17 * 2048 + 8192,
    )
    assert report.slot_rows_phase_1 == 320 * MIB
    assert set(report.slot_phase_2) == {32768, 1048576}
    # Rows of C4 and its indexer with 4 carried ones, and the faults of both.
    assert set(report.slot_phase_2.values()) == {2052 * (8192 + 2048) + 2 * 8192}


def test_every_limit_of_the_design_is_asked_for_and_kept(report: Report) -> None:
    limits = report.limits()
    assert [str(limit) for limit in report.missed()] == []
    assert {limit.limit for limit in limits if "bytes per token" in limit.name} == {8700, 4600, 4300}
    assert sum("UB bytes" in limit.name for limit in limits) == 2 * len(report.kernels)
    assert sum(limit.at_least and limit.limit == 0.85 for limit in limits) == len(report.kernels)
    assert [limit.limit / MIB for limit in limits if "slot" in limit.name] == [320, 24, 24]


def test_the_command_prints_the_fixed_fields_with_the_source_of_each(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernels", "report", "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed == answer(report, True)[0] + "\n"  # the same counts in another run
    document = json.loads(printed)
    assert document["passed"] is True
    assert document["model"]["measured"] is False
    for kernel in document["kernels"]:
        assert set(kernel) >= FIXED
        assert set(kernel["sources"]) >= FIXED
        assert kernel["sources"]["ub_bytes"] == "static: tiling"
        tokens = f"{kernel['counted_tokens']:,} tokens"
        assert kernel["sources"]["bytes_per_token"].startswith(f"counted: host emulation of {tokens}")
        assert kernel["sources"]["roofline_fraction_modelled"] == "model, not a measurement"


def test_the_table_says_that_nothing_was_measured_and_what_was_kept(report: Report) -> None:
    text, status = answer(report, False)
    assert status == 0
    assert "Nothing here was measured on hardware." in text
    assert text.endswith("27 of 27 limits kept.")
    assert max(map(len, text.splitlines())) < 120


MISSES: dict[str, tuple[dict[str, Any], str]] = {
    "too much of the Unified Buffer": (
        {"ub_bytes": 188_192},
        "MISSED compress_c4 fp32, UB bytes: 188,192, at most 188,160",
    ),
    "a tiling that says less than is reserved": (
        {"counted_ub_bytes": 188_000},
        "MISSED compress_c4 fp32, UB bytes counted: 188,000, at most 185,920",
    ),
    "too many bytes": (
        {"bytes_per_token": 8701.0},
        "MISSED compress_c4 fp32, bytes per token of a whole chunk: 8,701, at most 8,700",
    ),
    "too slow by the model": (
        {"roofline_fraction_modelled": 0.8},
        "MISSED compress_c4 fp32, share of the roofline by the model: 0.8, at least 0.85",
    ),
    "no figure at all": (
        {"bytes_per_token": float("nan")},
        "MISSED compress_c4 fp32, bytes per token of a whole chunk: nan",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_figure_over_its_limit_fails_the_command_and_says_which(report: Report, name: str) -> None:
    changes, message = MISSES[name]
    planted = replace(report, kernels=(replace(report.kernels[0], **changes), *report.kernels[1:]))
    text, status = answer(planted, False)
    assert status == 1
    assert message in text
    text, status = answer(planted, True)
    assert status == 1
    document = json.loads(text)
    assert document["passed"] is False
    assert [limit["kept"] for limit in document["limits"]].count(False) == 1


def test_a_slot_that_grows_with_the_chunk_fails_the_command(report: Report) -> None:
    assert [str(limit) for limit in replace(report, slot_phase_2={1 << 20: 28 * MIB}).missed()] == [
        "slot of phase 2 at 1,048,576 tokens and 128 requests, bytes: 29,360,128, at most 25,165,824"
    ]
    assert replace(report, slot_rows_phase_1=320 * MIB + 1).missed()


def test_a_limit_is_kept_at_its_very_value() -> None:
    assert Limit("x", 1, 1).kept
    assert not Limit("x", 1.01, 1).kept
    assert Limit("x", 0.85, 0.85, at_least=True).kept
    assert not Limit("x", 0.8499, 0.85, at_least=True).kept


def test_without_the_library_the_command_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(library.VARIABLE, str(tmp_path))
    assert main(["kernels", "report"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{tmp_path} has no {library.KERNELS}" in said
    assert "run `make setup` in a checkout of afd-dsv4, no CANN is needed" in said


# ------------------------------------------------------------------------------------------------ model


def test_memory_time_is_all_bytes_at_the_bandwidth() -> None:
    # 1,600 bytes at 1.6 TB/s are 1 ns; over 10 tokens 0.1 ns each.
    time = modelled_time(COUNTERS | {"bytes.mte2": 1000, "bytes.mte3": 500, "bytes.scalar": 100}, 10)
    assert time.memory == pytest.approx(0.1)
    assert (time.data, time.barriers, time.fraction) == (0, 0, 1)


def test_vector_time_is_repeats_at_their_rate_and_barriers_spread_over_the_cores() -> None:
    counted = {"repeats.Add": 480, "repeats.Exp": 240, "repeats.WholeReduceSum": 48, "repeats.Ln": 0}
    instructions = {"instructions.Add": 60, "instructions.Exp": 30, "instructions.WholeReduceSum": 6}
    time = modelled_time(COUNTERS | counted | instructions | {"bytes.mte2": 16, "barriers": 48}, 2)
    # 480 + 2 x 240 + 7 x 48 cycles, on 48 cores of 1.85 GHz, over 2 tokens.
    assert time.data == pytest.approx((480 + 480 + 336) / 48 / 1.85 / 2)
    assert time.barriers == pytest.approx(48 * 22 / 48 / 1.85 / 2)
    assert time.all_wait == pytest.approx(96 * 22 / 48 / 1.85 / 2)
    assert time.total == time.data + time.barriers > time.memory
    assert time.fraction == pytest.approx(time.memory / time.total)
    assert time.least_fraction == pytest.approx(time.memory / (time.data + time.all_wait))
    assert time.least_fraction < time.fraction


@pytest.mark.parametrize(("operation", "rate"), [("Mul", 64), ("Div", 32), ("Sqrt", 32), ("Gather", 5), ("Brcb", 64)])
def test_rates_are_those_of_the_documentation(operation: str, rate: float) -> None:
    assert roofline.RATES[operation] == rate


def test_an_operation_without_a_rate_is_an_error_and_not_free() -> None:
    with pytest.raises(ValueError, match="no rate is known for Sort32"):
        modelled_time(COUNTERS | {"bytes.mte2": 1, "repeats.Sort32": 1}, 1)


@pytest.mark.parametrize(("moved", "tokens"), [(0, 1), (1, 0)])
def test_a_launch_that_moves_nothing_or_has_no_tokens_has_no_time(moved: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="has no modelled time"):
        modelled_time(COUNTERS | {"bytes.mte2": moved}, tokens)


def test_every_operation_of_the_emulation_has_a_rate() -> None:
    counters = kernels_world.library().counters()
    assert {name.partition(".")[2] for name in counters if name.startswith("repeats.")} <= set(roofline.RATES)
