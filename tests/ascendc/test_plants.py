# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Every rule that the emulation models is broken by at least one planted kernel, and caught with its name and place."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.ascendc import emulation
from tests.ascendc.emulation import FORWARD, REVERSE, SHUFFLED, SOURCES, run_plant

#: Rows of the trap table that are no misuse of a call: values and round modes (21 to 23, test_operations.py), what
#: the device does not document (24), part of 16 (25), code size (27), graph replay (28, test_kernel.py).
NO_PLANT = {21, 22, 23, 24, 25, 27, 28}


@cache
def planted_lines() -> dict[str, tuple[Path, int]]:
    found = {}
    for path in sorted((SOURCES / "tests").glob("plant_*.cpp")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := re.search(r"// plant: (\w+)$", line):
                assert match[1] not in found
                found[match[1]] = (path, number)
    return found


def test_there_is_one_plant_for_every_marked_line() -> None:
    library = emulation.library()
    names = {run_plant(index, wrong=False).name for index in range(library.ascendc_plant_count())}
    assert names == set(planted_lines())
    assert len(names) == library.ascendc_plant_count()


def test_every_row_of_the_trap_table_has_a_plant_or_a_reason() -> None:
    traps = {run_plant(index, wrong=False).expected for index in range(emulation.library().ascendc_plant_count())}
    assert {trap for trap in traps if trap < 100} | NO_PLANT == set(range(1, 29))
    assert not traps & NO_PLANT


def test_each_plant_is_caught_by_its_name_file_and_line() -> None:
    for index in range(emulation.library().ascendc_plant_count()):
        report = run_plant(index, wrong=True)
        path, line = planted_lines()[report.name]
        assert (report.trap, Path(report.file).name, report.line) == (report.expected, path.name, line), report
        assert f"trap {report.trap} (" in report.text
        assert f"{report.file}:{line}, block " in report.text


@pytest.mark.parametrize("order", [FORWARD, REVERSE, SHUFFLED])
def test_the_twin_of_each_plant_passes_also_right_after_the_plant(order: int) -> None:
    for index in range(emulation.library().ascendc_plant_count()):
        assert run_plant(index, wrong=True, order=order).trap != 0
        twin = run_plant(index, wrong=False, order=order)
        assert twin.trap == 0, twin


def test_conflicts_between_cores_are_found_in_every_order_of_the_blocks() -> None:
    for index in range(emulation.library().ascendc_plant_count()):
        for order in (FORWARD, REVERSE, SHUFFLED):
            report = run_plant(index, wrong=True, order=order)
            assert report.trap == report.expected, report


REFUSED = {
    "AscendC::LocalTensor<bfloat16_t> t; AscendC::Add(t, t, t, 64);": "no bfloat16 arithmetic",
    "AscendC::LocalTensor<bfloat16_t> t; AscendC::Exp(t, t, 64);": "no bfloat16 arithmetic",
    "AscendC::LocalTensor<bfloat16_t> t; AscendC::Cast(t, t, AscendC::RoundMode::CAST_NONE, 64);": "Cast is emulated",
    "AscendC::LocalTensor<float> t; AscendC::Muls(t, t, 2, 64);": "no matching function for call to .Muls",
    "AscendC::SetFlag<AscendC::HardEvent::MTE1_M>(0);": "pipes that a vector core has",
    "AscendC::SyncAll();": "SyncAll. is not a member",
}


def test_what_the_device_has_not_does_not_compile(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "refused.cpp"
    bodies = [f"void f{number}() {{ {body} }}" for number, body in enumerate(REFUSED)]
    source.write_text("\n".join(['#include "kernel_operator.h"', *bodies]))
    command = [compiler, "-std=c++20", "-fsyntax-only", "-w", f"-I{SOURCES}", str(source)]
    run = subprocess.run(command, capture_output=True, text=True, env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"})
    assert run.returncode != 0
    for message in REFUSED.values():
        assert re.search(message, run.stderr), (message, run.stderr[-4000:])
