# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A file that the commands write is there whole, or as it was."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from afd_dsv4.cli import main
from afd_dsv4.files import write_whole
from afd_dsv4.workspace.trace import save
from tests.unit.test_cli import FLASH_CONFIG

PLAN = ["plan", "--model", "flash", "--prompt-tokens", "32768,65536", "--block-size", "128", "--free-blocks", "6958"]
PLAN += ["--max-num-batched-tokens", "32768"]


def test_a_writing_that_breaks_off_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    kept = write_whole(tmp_path / "page.html", "the old page")
    with pytest.raises(UnicodeEncodeError):
        write_whole(kept, "x" * 100_000 + "\ud800")  # a lone surrogate has no UTF-8
    assert kept.read_text() == "the old page"
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(UnicodeEncodeError):  # negative control: what Python does by itself
        kept.write_text("x" * 100_000 + "\ud800", encoding="utf-8")
    assert kept.read_text() != "the old page"


def test_a_link_leads_where_it_led(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / "real" / "page.html")
    write_whole(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real" / "page.html").read_text() == "new"


def test_links_in_a_circle_are_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert main([*PLAN, "--html", str(tmp_path / "a")]) == 2
    assert "its links lead in a circle" in capfd.readouterr().err
    assert (tmp_path / "a").is_symlink()


def test_a_file_keeps_its_mode_and_may_have_the_longest_of_names(tmp_path: Path) -> None:
    longest = tmp_path / ("n" * 255)
    longest.touch(0o600)
    write_whole(longest, "text")
    assert (longest.read_text(), stat.S_IMODE(longest.stat().st_mode)) == ("text", 0o600)


def test_what_is_write_protected_is_left_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "page.html"
    kept.write_text("the old page")
    for protected, said in ((kept, "it is write-protected"), (tmp_path, "its folder is write-protected")):
        # Root may write everywhere, so the mode alone shows nothing.
        monkeypatch.setattr(os, "access", lambda place, _, protected=protected: place != protected)
        with pytest.raises(PermissionError, match=said):
            write_whole(kept, "new")
    assert kept.read_text() == "the old page"


def test_what_is_no_regular_file_is_written_as_it_is(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
    reader.start()
    write_whole(fifo, "through")
    reader.join()
    assert read == ["through"]
    assert fifo.is_fifo()


@pytest.mark.parametrize("options", [[*PLAN, "--html"]], ids=["plan --html"])
def test_a_command_on_a_full_disk_says_so_and_keeps_the_page_before(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    page.write_text("the old page")

    def full(self: Path, text: str, encoding: str | None = None) -> int:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main([*options, str(page)]) == 2
    assert "No space left on device" in capfd.readouterr().err
    assert page.read_text() == "the old page"
    assert [one.name for one in tmp_path.iterdir()] == ["plan.html"]


def test_a_command_does_not_write_over_what_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path("own.json")
    model.write_text(json.dumps(FLASH_CONFIG))
    (tmp_path / "link.html").symlink_to(tmp_path / "own.json")
    for page in ("own.json", "./own.json", "link.html"):
        assert main([*PLAN, "--model", "own.json", "--html", page]) == 2
        assert f"html: {page!r} is what was read; choose another file" in capfd.readouterr().err
    assert json.loads(model.read_text()) == FLASH_CONFIG
    assert main([*PLAN, "--model", "own.json", "--html", "own.html"]) == 0  # negative control

    save(Path("t.jsonl"), [(0, "reset")], 0)
    before = Path("t.jsonl").read_bytes()
    assert main(["trace", "chrome", "t.jsonl", "--out", "t.jsonl"]) == 2
    assert "out: 't.jsonl' is what was read" in capfd.readouterr().err
    assert Path("t.jsonl").read_bytes() == before


def test_a_page_holds_a_name_that_is_no_utf_8(tmp_path: Path) -> None:
    odd = os.fsdecode(b"odd\xff.json")
    (tmp_path / odd).write_text(json.dumps(FLASH_CONFIG))
    assert main([*PLAN, "--model", str(tmp_path / odd), "--html", str(tmp_path / "p.html")]) == 0
    assert "odd\\udcff.json" in (tmp_path / "p.html").read_text(encoding="utf-8")
