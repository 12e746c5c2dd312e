# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What stands in docs/: commands, links and headings; and the two tables that are written from the code.

`python -m tests.docs_pages` writes those tables anew; `tests/unit/test_docs.py` holds the pages to all of it. Patches
are read from the sources of `compat/`, because an adapter can be imported beside its stack only.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from afd_dsv4.config import Settings, from_mapping
from afd_dsv4.geometry import InputError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
#: Pages that are not of the site, and are read all the same.
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?:(?: {4}.*)?\n)+)")
#: `[text](target)` and `![text](target)`, not in code.
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fenced(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(text_of(page)) if name == language]


def consoles(page: Path) -> list[tuple[str, str]]:
    """Commands whose answer stands behind them, and the answer."""
    found = []
    for body in fenced(page, "console"):
        command, _, answer = body.partition("\n")
        if not command.startswith("$ ") or "\n$ " in body:
            raise ValueError(f"{page.name}: a console block is `$ command` and its answer, found {command!r}")
        found.append((command.removeprefix("$ "), answer))
    return found


def commands(text: str, of: Collection[str] = ("afd-dsv4", "make")) -> Iterator[list[str]]:
    """Every command of these programs in blocks of code, as words; what a shell does around it is left out."""
    blocks = [body for _, body in FENCE.findall(text)] + INDENTED.findall(FENCE.sub("", text))
    for line in re.sub(r"\\\n", " ", "\n".join(blocks)).splitlines():
        for part in re.split(r"\||&&", re.sub(r"(^|\s)#.*", "", line)):
            try:
                words = shlex.split(part.strip().removeprefix("$ "))
            except ValueError:
                continue  # no line of a shell
            while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0], re.DOTALL):
                words = words[1:]
            if words and Path(words[0]).name.startswith("python") and words[1:3] == ["-m", "afd_dsv4"]:
                words = ["afd-dsv4", *words[3:]]
            if words and words[0] in of:
                yield words


def plain(text: str) -> str:
    """Without code, in which nothing is a link or a heading."""
    without = INDENTED.sub("\n", FENCE.sub("", text))
    return re.sub(r"`[^`\n]*`", "``", without)


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and Python-Markdown both make them."""
    headings = re.findall(r"^#+ (.*)$", INDENTED.sub("\n", FENCE.sub("", text)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    """Links that lead nowhere, and pictures without words or from elsewhere."""
    found = []
    for picture, words, target in LINK.findall(plain(text)):
        if target.startswith(("http://", "https://")):
            if picture:
                found.append(f"{target}: a picture from elsewhere")
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(text_of(path))):
            found.append(target)
        if picture and not words.strip():
            found.append(f"{target}: no words")
    return found


# --- tables that are written from the code ----------------------------------------------------------------------------


def _accepted(name: str) -> str:
    """What a setting's own refusal says it wants."""
    try:
        from_mapping({name: object()})
    except InputError as error:
        return str(error).rpartition("; ")[2].removeprefix("it must be ").removeprefix("choose one of ")
    raise ValueError(f"setting {name} takes anything")


def meanings(docstring: str) -> dict[str, str]:
    """By name, of the section `Attributes` of a docstring."""
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", words) for name, words in entries}


def settings_table() -> str:
    what = meanings(Settings.__doc__ or "")
    lines = ["| setting | takes | default | meaning |", "|---|---|---|---|"]
    for field in fields(Settings):
        default = json.dumps(getattr(field.default, "value", field.default))
        meaning = what[field.name].replace("None for", "`null` for")
        lines.append(f"| `{field.name}` | {_accepted(field.name)} | `{default}` | {meaning} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Declared:
    """A `Patch` as its source says it."""

    target: str
    reason: str
    removal: str
    file: str


def declared(source: str, file: str) -> list[Declared]:
    """Every `Patch` that a source makes; ValueError where one of its words is not written out."""
    calls = [
        call
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "Patch"
    ]
    found = []
    for call in calls:
        words = {word.arg: word.value for word in call.keywords}
        said = {name: ast.literal_eval(words[name]) for name in ("target", "reason", "removal") if name in words}
        if len(said) != 3:
            raise ValueError(f"{file}:{call.lineno}: a Patch gives target, reason and removal by keyword")
        found.append(Declared(**said, file=file))
    return found


def patches() -> list[Declared]:
    files = sorted((ROOT / "compat").rglob("*.py"))
    return [one for file in files for one in declared(text_of(file), file.relative_to(ROOT / "compat").as_posix())]


def patches_table() -> str:
    lines = ["| replaced | where | why | goes when there is |", "|---|---|---|---|"]
    lines += [f"| `{one.target}` | `{one.file}` | {one.reason} | {one.removal} |" for one in patches()]
    return "\n".join(lines)


TABLES = {"configuration.md": ("settings", settings_table), "upstreaming.md": ("patches", patches_table)}


def with_table(text: str, name: str, table: str) -> str:
    """The page with the table between its two marks."""
    begin, end = f"<!-- {name}: written by python -m tests.docs_pages -->\n", f"<!-- end of {name} -->\n"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"no place for the table {name}")
    return f"{before}{begin}\n{table}\n\n{end}{after}"


def main() -> None:
    for page, (name, table) in TABLES.items():
        path = DOCS / page
        path.write_text(with_table(text_of(path), name, table()), encoding="utf-8")


if __name__ == "__main__":
    main()
