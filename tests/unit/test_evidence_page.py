# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The report of an evidence run: every figure of the file, with its source, in the place where it belongs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from afd_dsv4.evidence.page import render
from afd_dsv4.evidence.report import SECTIONS, Source
from tests import pages
from tests.evidence_world import TRACE, evidence


def walk(value: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Places and values of all figures, without the page's own way to find them."""
    if isinstance(value, dict) and sorted(value) == ["source", "unit", "value"]:
        yield pointer, value
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(inner, f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}")


@pytest.fixture(scope="module", params=list(Source)[:3], ids=lambda source: source.value)
def page(request) -> str:
    return render(evidence(request.param), TRACE)


def test_every_figure_of_the_file_is_in_the_page_with_its_source(page) -> None:
    assert pages.faults(page) == []
    document = pages.carried(page)["evidence"]
    assert document == evidence(Source(document["stack"]["device"]))
    cells = {}
    for cell in pages.read(page)[0].all("td"):
        for figure in cell.all("data"):
            cells.setdefault(figure.attributes["data-path"], []).append(cell)
    found = list(walk(document, "/evidence"))
    assert len(found) == 57
    for place, figure in found:
        assert cells[f"{place}/value"]
        for cell in cells[f"{place}/value"]:
            assert [span.text.strip() for span in cell.all("span")] == [figure["source"]], place


def test_plain_counts_have_the_source_of_their_section(page) -> None:
    document = pages.carried(page)["evidence"]
    device = document["stack"]["device"]
    sources = {
        "/evidence/parity/tokens/free_running/decided": device,
        "/evidence/parity/tokens/controls/0/mismatches": device,
        "/evidence/admission/scenarios/0/native/blocks_needed": "plan",
        "/evidence/isolation/symbols_compared": device,
        "/evidence/stack/block_size": None,
    }
    cells = [
        (figure.attributes["data-path"], cell) for cell in pages.read(page)[0].all("td") for figure in cell.all("data")
    ]
    for place, source in sources.items():
        found = {"".join(span.text.strip() for span in cell.all("span")) for path, cell in cells if path == place}
        assert found == {source or ""}, place


def test_each_point_has_its_verdict_its_reason_and_what_it_rests_on(page) -> None:
    document = pages.carried(page)["evidence"]
    drawn = [part for part in pages.read(page)[0].all("div") if part.attributes.get("class") == "point"]
    assert len(drawn) == 7
    rests = {
        1: "/parity/rows_total/compressed_different/value",
        2: "/order/trace/unordered_reuses/value",
        3: "/order/trace/edges/value",
        4: "/memory/scaling/1/transient/value",
        5: "/performance/reuse/32,768 tokens/throughput_of/slots/over_synchronised/value",
        6: "/isolation/symbols_compared",
        7: "/admission/engine/steps_waited/plugin/value",
    }
    for part, point in zip(drawn, document["verdicts"]["points"], strict=True):
        assert point["text"] in part.text
        assert point["because"] in part.text
        assert point["verdict"].replace("_", " ") in part.text
        assert "/evidence" + rests[point["number"]] in {d.attributes["data-path"] for d in part.all("data")}


def test_the_page_says_where_it_ran_the_command_and_what_failed(page) -> None:
    words = pages.read(page)[0].all("main")[0].text
    device = pages.carried(page)["evidence"]["stack"]["device"]
    assert ("No one has run this on Ascend hardware yet." in words) == (device != "npu")
    assert "afd-dsv4 evidence --out 'a folder'" in words
    assert words.index("Failed") < words.index("The seven points")
    assert "1 of 2 checks passed." in words
    assert "memory: <none>" in words
    assert "more & more" in words
    assert "2 of 3 named by the checker" in words


def test_the_waterfall_is_as_long_as_its_bytes() -> None:
    root, _ = pages.read(render(evidence(), TRACE))
    memory = evidence()["memory"]

    def rectangles(title: str) -> list[tuple[float, float]]:
        (picture,) = (p for p in root.all("svg") if p.all("title") and p.all("title")[0].text == title)
        return [(float(r.attributes["x"]), float(r.attributes["width"])) for r in picture.all("rect")]

    names = ("native_state_payload", "native_state_padding", "native_state_allocated_for_32768_tokens")
    payload, padding, allocated = (memory[name]["value"] for name in names)
    bounded = memory["plugin_tails_spares_staging_lists"]["value"]
    longest = max(payload + padding, allocated, bounded)
    expected = [(0, payload), (payload, padding), (0, allocated), (0, bounded)]
    for (x, width), (start, length) in zip(rectangles("Compressor state of the batch"), expected, strict=True):
        assert x == pytest.approx(360 * start / longest, abs=0.01)
        assert width == pytest.approx(360 * length / longest, abs=0.01)
    parts = [memory[f"plugin_{name}"]["value"] for name in ("tails", "spares", "lists", "staging", "tables")]
    for number, (x, width) in enumerate(rectangles("What the plugin holds, enlarged")):
        assert x == pytest.approx(360 * sum(parts[:number]) / sum(parts), abs=0.01)
        assert width == pytest.approx(360 * parts[number] / sum(parts), abs=0.01)


def test_the_timeline_has_each_lease_on_its_slot_until_the_slot_is_handed_on() -> None:
    page = render(evidence(), TRACE)
    leases = pages.carried(page)["timeline"]
    # In ms since the first record: sealed leases keep their slot until they are settled or it is acquired again.
    assert [(lease["lease"], lease["slot"], lease["start_ms"], lease["outcome"]) for lease in leases] == [
        (1, 0, 0.0, "released"),
        (2, 1, 1.0, "sealed"),
        (3, 0, 7.0, "released"),
    ]
    assert [lease["end_ms"] for lease in leases if lease["slot"] == 0] == [6.0, 10.0]
    root, _ = pages.read(page)
    (picture,) = (p for p in root.all("svg") if p.all("title") and p.all("title")[0].text.startswith("Workspace slots"))
    drawn = [r for r in picture.all("rect") if "edge" in r.attributes["class"]]
    assert [float(r.attributes["x"]) for r in drawn] == [0, 36, 252]
    assert [r.attributes["class"][:2] for r in drawn] == ["f1", "f2", "f1"]
    assert "There is no trace" in pages.read(render(evidence()))[0].all("main")[0].text


def test_a_part_that_broke_off_or_does_not_run_here_says_so() -> None:
    empty = {section: {} for section in SECTIONS} | {"command": [], "passed": False}
    page = render(empty)
    assert [fault for fault in pages.faults(page) if fault != "no figures"] == []
    assert pages.read(page)[0].all("main")[0].text.count("This part broke off") == 7
    for section in ("admission", "isolation"):
        empty[section] = {"not_shown_here": f"{section} needs <vLLM>"}
    words = pages.read(render(empty))[0].all("main")[0].text
    assert "admission needs <vLLM>" in words
    assert "isolation needs <vLLM>" in words


def test_a_wrong_figure_or_source_is_found() -> None:
    page = render(evidence(), TRACE)
    value = evidence()["parity"]["rows_total"]["tail"]["value"]
    shown = f'value="{value}" data-path="/evidence/parity/rows_total/tail/value">{value:,}<'
    assert page.count(shown) > 1
    assert any(
        "the page says" in fault for fault in pages.faults(page.replace(shown, shown.replace(f">{value:,}", ">1"), 1))
    )
    assert json.loads(json.dumps(pages.carried(page)["evidence"])) == evidence()
