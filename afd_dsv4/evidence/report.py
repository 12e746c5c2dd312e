# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What an evidence run writes: figures with their source, checks, verdicts, one table, one JSON file, one page.

A figure without a source is a claim, so figures are made by `figure`, which asks for one. A verdict is one of three,
and what only a target stack can show is `not_shown_here` wherever the run was on the software NPU. The schema of the
file is in docs/evidence.md.
"""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afd_dsv4.files import write_whole
from afd_dsv4.geometry import InputError
from afd_dsv4.page import size as size  # for all parts of the run

SECTIONS = (
    "stack",
    "command",
    "batch",
    "admission",
    "memory",
    "parity",
    "order",
    "performance",
    "isolation",
    "verdicts",
    "passed",
)
# Beside evidence.json:
TRACE_FILE = "trace.jsonl"
CHROME_FILE = "trace.json"  # the same as a picture
PAGE_FILE = "report.html"

#: Whose report the free blocks of a scenario are from, and with them the memory that both sides get.
POOLS = {
    "published": "vllm-ascend#15204",
    "one_32k_prompt": "vllm-ascend#9543",
    "packed_batch": "vllm-ascend#9543",
}


class Source(str, enum.Enum):
    """Where a figure comes from."""

    SOFTNPU = "softnpu"
    CUDA = "cuda"
    NPU = "npu"
    MODEL = "model"  # arithmetic over a cost model
    PLAN = "plan"  # arithmetic over the allocation plan, or the real scheduler's own account of it


class Verdict(str, enum.Enum):
    """What the run says about one point of the RFC."""

    PASS = "pass"
    FAIL = "fail"
    NOT_SHOWN_HERE = "not_shown_here"


@dataclass(frozen=True)
class Check:
    """One condition of the run, with what was expected and found, in words."""

    name: str
    passed: bool
    expected: str
    found: str


@dataclass(frozen=True)
class Point:
    """One point of the RFC (vllm-project/afd-plugin#292)."""

    number: int
    text: str
    verdict: Verdict
    because: str


def figure(value: float | int, unit: str, source: Source) -> dict[str, Any]:
    """A number as the file holds it."""
    return {"value": value, "unit": unit, "source": source.value}


def prepare(folder: Path) -> None:
    """Make the folder, before minutes are spent on what cannot be written.

    Raises:
        InputError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".evidence.{os.getpid()}.json"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise InputError("--out", f"{folder} cannot be written ({error.strerror})", "name another folder") from error


def forget(folder: Path) -> None:
    """Remove the last run's files: one that breaks off must not leave an older verdict behind as if it were its own.

    What is refused before it runs leaves them.
    """
    for name in ("evidence.json", TRACE_FILE, CHROME_FILE, PAGE_FILE):
        (folder / name).unlink(missing_ok=True)


def write(folder: Path, evidence: dict[str, Any]) -> Path:
    """Write evidence.json whole or not at all.

    Raises:
        ValueError: a section is missing or unknown.
    """
    if tuple(evidence) != SECTIONS:
        raise ValueError(f"evidence has sections {list(evidence)}, the schema has {list(SECTIONS)}")
    return write_whole(folder / "evidence.json", json.dumps(strict(evidence), indent=2, allow_nan=False) + "\n")


def strict(value: Any) -> Any:
    """As the file holds it: JSON has no infinity and no NaN, a failed comparison may; they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(inner) for inner in value]
    return value


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right. An empty row becomes a rule."""
    full = [row for row in rows if row]
    widths = [max(len(row[column]) for row in full) for column in range(max(map(len, full)))]
    lines = []
    for row in rows:
        if not row:
            lines.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
            continue
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
