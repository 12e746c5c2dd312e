# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Where a report points to a test elsewhere, that test is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILE = re.compile(r"\b(?:tests|benchmarks)/\w+/?\w*\.py\b")
NAME = re.compile(r"\btest_\w+\b(?!\.py)")


def missing(text: str) -> set[str]:
    """Files, and tests in them, that a text names and that are not there."""
    found = {path for path in FILE.findall(text) if not (ROOT / path).is_file()}
    sources = [(ROOT / path).read_text(encoding="utf-8") for path in FILE.findall(text) if (ROOT / path).is_file()]
    names = set(NAME.findall(FILE.sub("", text)))
    return found | {name for name in names if not any(f"def {name}(" in source for source in sources)}


@pytest.mark.parametrize("path", sorted(HERE.glob("*.*")), ids=lambda path: path.name)
def test_every_test_that_is_pointed_to_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not missing(ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("see tests/unit/test_nothing.py", {"tests/unit/test_nothing.py"}),
        ("tests/unit/test_arena.py (test_that_never_was)", {"test_that_never_was"}),
        ("tests/unit/test_arena.py (test_a_key_has_one_slot)", set()),
    ],
)
def test_a_pointer_to_nowhere_is_seen(text: str, lost: set[str]) -> None:
    assert missing(text) == lost
