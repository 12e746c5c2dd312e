# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Our pages in a real browser, at the widths of a desk and of a telephone: no complaint, nothing cut off, all legible.

One browser shows every page in a frame of each width, and a page around them measures. Pages with planted faults must
be found by the same measure. Where no Chromium is installed, `pages.faults` is all that is known about a page.
"""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from afd_dsv4.cli import main
from afd_dsv4.evidence.page import render
from tests import pages
from tests.evidence_world import TRACE, evidence
from tests.unit.test_cli import FLASH_CONFIG

WIDTHS = (1280, 390)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PLAN = ["plan", "--model", "flash,pro", "--prompt-tokens", "8192,131072", "--max-num-batched-tokens", "8192,131072"]

MEASURE = """
function measure(frame) {
  const page = frame.contentDocument, faults = [], width = frame.clientWidth;
  if (page.documentElement.scrollWidth > width) faults.push('wider than ' + width);
  for (const folded of page.querySelectorAll('details')) folded.open = true;
  if (page.documentElement.scrollWidth > width) faults.push('wider than ' + width + ' when unfolded');
  for (const svg of page.querySelectorAll('svg[role=img]')) {
    const name = svg.querySelector('title').textContent, box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    if (!box.width || !box.height) faults.push('empty: ' + name);
    for (const [at, [words, place]] of texts.entries()) {
      if (place.left < box.left - 1 || place.right > box.right + 1 || place.bottom > box.bottom + 1)
        faults.push('cut off: ' + words);
      const size = parseFloat(getComputedStyle(svg.querySelector('text')).fontSize) * svg.getScreenCTM().a;
      if (size < 9) faults.push('too small: ' + words);
      for (const [other, there] of texts.slice(at + 1))
        if (Math.min(place.right, there.right) - Math.max(place.left, there.left) > 1 &&
            Math.min(place.bottom, there.bottom) - Math.max(place.top, there.top) > 3)
          faults.push('overlap: ' + words + ' | ' + other);
    }
  }
  const size = parseFloat(getComputedStyle(page.querySelector('td')).fontSize);
  if (size < 12) faults.push('table too small');
  return faults;
}
addEventListener('load', () => {
  const found = {};
  for (const frame of document.querySelectorAll('iframe')) found[frame.title] = measure(frame);
  document.getElementById('found').textContent = JSON.stringify(found);
});
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], str]:
    """Faults by page and width, and what the browser wrote to its console."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)}")
    folder = tmp_path_factory.mktemp("pages")
    memory = ["--block-size", "128", "--hbm-gib", "21.0618,40", "--max-num-seqs", "16"]
    assert main([*PLAN, *memory, "--html", str(folder / "plan.html")]) == 0
    plan = (folder / "plan.html").read_text(encoding="utf-8")
    name = folder / f"{'x' * 200}.json"
    name.write_text(json.dumps(FLASH_CONFIG))
    long = ["plan", "--model", f"{name},flash", *PLAN[3:], *memory, "--html", str(folder / "long.html")]
    assert main(long) == 0
    report = render(evidence(), TRACE)
    wide = '<p style="width:2000px">wide</p>'
    texts = {
        "plan": plan,
        "plan of a long name": (folder / "long.html").read_text(encoding="utf-8"),
        "report": report,
        "planted width": report.replace("</main>", f"{wide}</main>"),
        "planted cut": plan.replace('text-anchor="end"', ""),
        "planted overlap": plan.replace("tokens, native</text>", f"tokens, {'native' * 8}</text>"),
        "planted smallness": plan.replace("font:12px", "font:5px"),
        "planted request": report.replace("</main>", '<img src="https://planted.invalid/a.png" alt=""></main>'),
    }
    frames = "".join(
        f'<iframe title="{name}, {width}" width="{width}" height="600" style="border:0" srcdoc="{html.escape(text)}">'
        "</iframe>"
        for name, text in texts.items()
        for width in WIDTHS
    )
    around = folder / "around.html"
    around.write_text(f'<meta charset="utf-8"><pre id="found"></pre>{frames}<script>{MEASURE}</script>')
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, around.as_uri()], capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (block for block in pages.read(done.stdout)[0].all("pre") if block.attributes.get("id") == "found")
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(found.text), console


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["plan", "plan of a long name", "report"])
def test_nothing_is_cut_off_too_small_or_on_top_of_something_else(shown, name: str, width: int) -> None:
    found, _ = shown
    assert found[f"{name}, {width}"] == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("planted width", "wider than"),
        ("planted cut", "cut off: "),
        ("planted overlap", "overlap: "),
        ("planted smallness", "too small: "),
    ],
)
def test_a_planted_fault_of_the_layout_is_measured(shown, name: str, fault: str) -> None:
    found, _ = shown
    assert any(said.startswith(fault) for said in found[f"{name}, 390"])


def test_the_console_complains_about_the_planted_request_only(shown) -> None:
    _, console = shown
    lines = console.splitlines()
    assert lines
    assert all("planted.invalid" in line for line in lines), console


def test_the_pages_that_are_shown_are_the_pages_that_are_checked(tmp_path: Path) -> None:
    assert main([*PLAN, "--block-size", "128", "--html", str(tmp_path / "plan.html")]) == 0
    assert pages.faults((tmp_path / "plan.html").read_text(encoding="utf-8")) == []
