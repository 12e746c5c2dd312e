# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""docs/: what a page shows is what its command prints, every link leads somewhere, and tables are what the code says.

`make docs` builds the same pages strictly; none of this needs MkDocs.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from afd_dsv4 import cli
from afd_dsv4.compat import adapters
from afd_dsv4.workspace import trace
from tests import docs_pages as docs
from tests.docs_pages import DOCS, OTHERS, PAGES, ROOT
from tests.unit.test_doctor_docs import shows
from tests.unit.test_trace import STORY

#: Whose consoles `test_doctor_docs.py` runs, on machines of its own.
DOCTOR = "troubleshooting.md"
CONSOLES = [(page.name, *console) for page in PAGES if page.name != DOCTOR for console in docs.consoles(page)]
COMMANDS = {
    tuple(words[1:]): page.name
    for page in [*PAGES, *OTHERS]
    for words in docs.commands(docs.text_of(page))
    if words[0] == "afd-dsv4"
}
#: How a command begins that is not run, and why. Its options are parsed all the same.
NOT_RUN = {
    ("evidence",): "takes minutes: `make demo`",
    ("compat", "record"): "writes a contract; test_compat_contract.py records",
    ("compat", "check", "--against"): "wants the sources of a stack; test_compat_check.py has some",
    ("doctor",): "test_doctor_docs.py runs them on machines of its own",
}
TARGETS = re.findall(r"^([a-z-]+):.*## ", docs.text_of(ROOT / "Makefile"), re.MULTILINE)


def why_not(words: tuple[str, ...]) -> str | None:
    return next((why for begin, why in NOT_RUN.items() if words[: len(begin)] == begin), None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader stands who has run `make demo`."""
    evidence = tmp_path / "build" / "evidence"
    evidence.mkdir(parents=True)
    trace.save(evidence / "trace.jsonl", STORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "command", "answer"), CONSOLES, ids=[f"{page}: {line}" for page, line, _ in CONSOLES])
def test_a_command_prints_what_stands_behind_it(page, command, answer, capsys):
    name, *words = command.split()
    assert name == "afd-dsv4"
    assert cli.main(words) == 0
    assert shows(capsys.readouterr().out, answer)


def test_consoles_are_found_and_a_wrong_answer_is_seen(tmp_path):
    """Negative control of the test above."""
    assert len(CONSOLES) == sum(docs.text_of(page).count("```console") for page in PAGES if page.name != DOCTOR) >= 5
    page = tmp_path / "page.md"
    page.write_text("```console\n$ afd-dsv4 plan\n...\nfree 1\n```\n")
    ((command, answer),) = docs.consoles(page)
    assert (command, answer) == ("afd-dsv4 plan", "...\nfree 1\n")
    assert shows("a\nfree 1\n", answer)
    assert not shows("a\nfree 2\n", answer)
    page.write_text("```console\n$ afd-dsv4 plan\n$ afd-dsv4 doctor\n```\n")
    with pytest.raises(ValueError, match="a console block is"):
        docs.consoles(page)


@pytest.mark.parametrize("page", [page for page in PAGES if docs.fenced(page, "pycon")], ids=lambda page: page.name)
def test_lines_for_an_interpreter_give_what_stands_behind_them(page):
    text = "\n".join(docs.fenced(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert len(test.examples) >= 5
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_parser_takes_every_command(words):
    cli._parser().parse_args(list(words))


@pytest.mark.parametrize("words", [words for words in COMMANDS if not why_not(words)], ids=" ".join)
def test_quick_commands_succeed(words, folder, capsys):
    known = words[0] != "compat" or importlib.util.find_spec("vllm_ascend")
    assert cli.main(list(words)) == (0 if known else 2), capsys.readouterr()


def test_every_reason_not_to_run_a_command_is_of_use():
    assert {why_not(words) for words in COMMANDS} == {None, *NOT_RUN.values()}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.name)
def test_targets_of_make_exist(page):
    text = docs.text_of(page)
    named = [words[1] for words in docs.commands(text) if words[0] == "make"] + re.findall(r"`make ([\w-]+)", text)
    assert set(named) <= set(TARGETS)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.name)
def test_links_lead_somewhere_and_pictures_have_words(page):
    assert docs.broken(page, docs.text_of(page)) == []


def test_a_broken_link_is_seen():
    """Negative control of the test above."""
    text = "[a](why.md) [b](gone.md) [c](why.md#gone) [d](why.md#what-you-see) ![](pictures/lease.svg) `[e](f.md)`\n"
    text += "![e](https://example.org/e.png)\n"
    found = ["gone.md", "why.md#gone", "pictures/lease.svg: no words"]
    found.append("https://example.org/e.png: a picture from elsewhere")
    assert docs.broken(DOCS / "index.md", text) == found


def test_what_leads_out_of_docs_becomes_a_path_on_the_site():
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "theme" / "site_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))

    def shown(text):
        return hooks.on_page_markdown(text, page=page)

    assert shown("see [README.md](../README.md), please") == "see `README.md`, please"
    assert shown("[the recipes](../recipes/README.md#x)") == "the recipes (`recipes/README.md` of the repository)"
    # For the strict build to complain about, or to follow.
    for kept in ("[a](../gone.md)", "[a](../../above.md)", "[a](why.md)", "![a](../README.md)", "[a](../docs/why.md)"):
        assert shown(kept) == kept


def test_the_site_has_every_page():
    listed = re.findall(r": ([\w-]+\.md)$", docs.text_of(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES)


def test_the_theme_needs_no_network_and_runs_nothing():
    text = docs.text_of(DOCS / "theme" / "main.html") + docs.text_of(DOCS / "theme" / "site.css")
    assert not re.search(r"<script|https?:|@import|url\(|\bon\w+=", text)


def test_pictures_need_no_network_and_say_what_they_show():
    pictures = sorted((DOCS / "pictures").iterdir())
    assert [picture.name for picture in pictures] == ["lease.svg", "lifetimes.svg", "stages.svg"]
    for picture in pictures:
        text = docs.text_of(picture)
        assert 'role="img"' in text
        assert re.search(r"<title>.+</title>\s*<desc>.+</desc>", text)
        assert not re.search(r"href=|@import|url\((?!#)|<script|<foreignObject", text)


@pytest.mark.parametrize("page", docs.TABLES)
def test_tables_are_what_the_code_says(page):
    name, table = docs.TABLES[page]
    text = docs.text_of(DOCS / page)
    assert text == docs.with_table(text, name, table()), "run python -m tests.docs_pages"


def test_the_table_of_settings_says_default_range_and_meaning():
    """The long way for three of them; the rest is compared by the test above."""
    rows = [
        line.split(" | ") for line in docs.text_of(DOCS / "configuration.md").splitlines() if line.startswith("| `")
    ]
    table = {row[0].strip("| `"): row[1:] for row in rows}
    assert table["slots"][:2] == ["a whole number of at least 1", "`2`"]
    assert table["mode"][:2] == ["off, afd, colocated", '`"off"`']
    assert table["fence_timeout_s"][1] == "`60.0`"
    assert table["audit"][2].startswith("in mode `afd`, whether everything that crosses")


def test_the_readme_has_every_setting_with_its_default():
    section = docs.text_of(ROOT / "README.md").partition("## Configuration")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in section.splitlines() if line.startswith("| `")]
    written = {row[0].strip("| `"): row[2].strip("`") for row in rows}
    said = {"drafts": "as many as vLLM drafts", "audit": "where the log is at level DEBUG"}
    lines = docs.settings_table().splitlines()[2:]
    settings = {line.split("`")[1]: line.split(" | ")[2].strip('`"') for line in lines}
    assert written == {name: said.get(name, default) for name, default in settings.items()}


def test_every_adapter_has_its_patches_on_the_page():
    """Found the long way: by what stands in front of the colon in every `target=` of the sources."""
    sources = {path: docs.text_of(path) for path in Path(adapters.__file__).parents[1].rglob("*.py")}
    targets = [target for text in sources.values() for target in re.findall(r'\btarget="([^"]+)"', text)]
    page = docs.text_of(DOCS / "upstreaming.md")
    assert len(targets) >= 4
    assert all(f"| `{target}` |" in page for target in targets)


def test_a_patch_whose_words_are_not_written_out_is_seen():
    """Negative control of the table of patches."""
    good = 'Patch(target="a:b", make=f, reason="why", removal="when")'
    assert docs.declared(f"x = [patch.{good}]", "f.py") == [docs.Declared("a:b", "why", "when", "f.py")]
    with pytest.raises(ValueError, match="target, reason and removal"):
        docs.declared('Patch("a:b", f, "why", "when")', "f.py")
    with pytest.raises(ValueError, match="malformed"):
        docs.declared('Patch(target=name, make=f, reason="why", removal="when")', "f.py")
    with pytest.raises(ValueError, match="no place"):
        docs.with_table("# Page\n", "patches", "|")


def test_words_are_explained_once():
    words = re.findall(r"^\| ([a-z][\w -]*) \|", docs.text_of(DOCS / "glossary.md"), re.MULTILINE)[1:]
    assert len(words) == len(set(words))
    contributing = re.search(
        r"\*\*The same words everywhere\*\*: (.*?)\. No synonyms", docs.text_of(OTHERS[1]), re.DOTALL
    )
    named = {re.sub(r"\s+", " ", word) for word in contributing[1].split(",")}
    assert {word.strip().lower() for word in named} <= {word.lower() for word in words} | {"kv group"}
