# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""docs/troubleshooting.md: every command is one whose answer is run and kept, and says what the page shows."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.doctor.cases import CASES, HERE, ROOT, Case

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ ([^\n]*)\n(.*?)```", PAGE, re.DOTALL)
CODE = re.compile(r'Finding\(\s*"([a-z-]+)"')


def words(case: Case) -> frozenset[str]:
    """A command, whatever the order of its options."""
    variables = [f"{name}={value}" for name, value in case.environment.items()]
    return frozenset([*variables, *case.arguments])


def names_of(command: str) -> list[str]:
    """The cases that are this command; machines differ where nothing is asked."""
    parts = shlex.split(command)
    at = parts.index("afd-dsv4")
    assert parts[at + 1] == "doctor"
    asked = frozenset(parts[:at] + parts[at + 2 :])
    return [name for name, case in CASES.items() if words(case) == asked]


def shows(answer: str, excerpt: str) -> bool:
    """Whether the pieces between `...` stand in the answer as whole lines, one behind the other."""
    at = 0
    for piece in re.split(r"^\.\.\.\n", excerpt, flags=re.MULTILINE):
        found = f"\n{answer}".find(f"\n{piece}", at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


@pytest.mark.parametrize(("command", "excerpt"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_answer_on_the_page_is_the_answer(command: str, excerpt: str) -> None:
    answers = [(HERE / f"{name}.txt").read_text(encoding="utf-8") for name in names_of(command)]
    assert answers, f"{command}: add it to tests/doctor/cases.py"
    assert any(shows(answer, excerpt) for answer in answers)


def test_the_page_has_its_commands_and_a_wrong_excerpt_is_seen() -> None:
    """Negative control of the test above."""
    assert len(BLOCKS) == PAGE.count("$ ") >= 10
    answer = "a\nb\nc\nd\n"
    assert shows(answer, "...\nb\n...\nd\n")
    assert shows(answer, "a\nb\n...\n")
    assert not shows(answer, "...\nd\n...\nb\n")
    assert not shows(answer, "...\nb\nd\n")
    assert not shows(answer, "...\nB\n")
    assert names_of("afd-dsv4 doctor --metrics other.metrics") == []


def test_every_code_is_explained_and_none_that_does_not_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "afd_dsv4" / "doctor").glob("*.py"))
    table = PAGE.partition("## Every code")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == set(CODE.findall(sources))
