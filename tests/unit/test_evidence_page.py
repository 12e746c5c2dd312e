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
from tests.pages import Element


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
    assert len(found) == 58
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


def part(page: str, name: str) -> Element:
    (found,) = (p for p in pages.read(page)[0].all("section") if p.attributes["aria-labelledby"] == name)
    return found


def test_the_answer_stands_above_the_points_and_says_each_figure_with_its_place(page) -> None:
    document = pages.carried(page)["evidence"]
    assert page.index('id="short"') < page.index('id="points"')
    short = part(page, "short")
    first, second, third, last = (sentence.text for sentence in short.all("li"))
    # Of the scenarios, the one that wants the most blocks natively: figures of the world only grow.
    at = 2
    row = document["admission"]["scenarios"][at]
    assert row["native"]["blocks_needed"] == max(
        each["native"]["blocks_needed"] for each in document["admission"]["scenarios"]
    )
    native, plugin = row["native"], row["plugin"]
    assert f"it wants {native['blocks_needed']:,} blocks where {native['free_blocks']:,} are free" in first
    assert f"{0} of 4 start in step 1" in first
    assert f"it wants {plugin['blocks_needed']:,} where {plugin['free_blocks']:,} are free" in first
    rows, tokens = document["parity"]["rows_total"], document["parity"]["tokens"]["free_running"]
    for name in ("compressed", "compressed_different", "tail", "tail_different"):
        assert f" {rows[name]['value']:,}" in second
    assert f"Of {tokens['decided']:,} tokens compared with" in second
    assert f"{tokens['mismatches']:,} differ." in second
    assert f"a prompt of {document['admission']['engine']['prompt']:,} tokens" in third
    assert "the 7 points: 2 pass, 2 fail, 3 not shown here; 1 of 2 checks passed." in last
    assert "Not shown here: what point 1 asks for (1); what point 4 asks for (4); what point 7 asks for (7)." in last
    assert ("Nothing of this ran on Ascend hardware." in last) == (document["stack"]["device"] != "npu")
    assert {figure.attributes["data-path"] for figure in short.all("data")} == {
        *(f"/evidence/admission/scenarios/{at}/prompts/{number}" for number in range(4)),
        *(f"/evidence/admission/scenarios/{at}/{key}" for key in ("max_num_seqs", "budget_bytes")),
        *(
            f"/evidence/admission/scenarios/{at}/{side}/{key}"
            for side in ("native", "plugin")
            for key in ("blocks_needed", "free_blocks")
        ),
        "/evidence/batch/tokens",
        *(f"/evidence/parity/rows_total/{name}/value" for name in rows),
        *(f"/evidence/parity/tokens/free_running/{key}" for key in ("decided", "mismatches")),
        "/evidence/admission/engine/prompt",
        *(f"/evidence/admission/engine/steps_waited/{side}/value" for side in ("native", "plugin")),
        *(f"/evidence/admission/engine/{key}/value" for key in ("tokens", "tokens_that_differ")),
    }


def test_a_prompt_of_which_nothing_starts_on_an_empty_server_never_starts() -> None:
    world = evidence()
    world["admission"]["scenarios"] = world["admission"]["scenarios"][:1]
    world["admission"]["scenarios"][0]["plugin"]["prompts_started"] = 1
    page = render(world)
    assert "are free and never starts. With the plugin" in part(page, "short").text
    assert "are free and starts in step 1. So says" in part(page, "short").text


def test_the_bars_of_admission_have_a_line_at_the_free_blocks_and_say_what_starts() -> None:
    world = evidence()
    (picture,) = part(render(world), "admission").all("figure")
    rows = world["admission"]["scenarios"]
    sides = [(row, row[side]) for row in rows for side in ("native", "plugin")]
    longest = max(max(side["blocks_needed"], side["free_blocks"]) for _, side in sides)
    (drawing,) = (svg for svg in picture.all("svg") if svg.attributes.get("role") == "img")
    lines = [line for line in drawing.all("line") if line.attributes["class"] == "mark"]
    assert [float(line.attributes["x1"]) for line in lines] == [
        pytest.approx(min(360 * side["free_blocks"] / longest, 359), abs=0.01) for _, side in sides
    ]
    texts = [text.text for text in drawing.all("text")]
    for row, side in sides:
        started, asked = side["prompts_started"], len(row["prompts"])
        said = (
            f"{started:,} of {asked} start in step 1"
            if asked > 1
            else "starts in step 1"
            if started
            else "never starts"
        )
        assert f"{side['blocks_needed']:,} of {side['free_blocks']:,} free: {said}" in texts
    assert [text.text for text in drawing.all("text") if text.attributes.get("class") == "strong"] == [
        "Reported prompt, room for 16 requests",
        "32K prompt, room for 128 requests",
        "Packed batch of this run, room for 128 requests",
    ]
    assert "free blocks" in picture.all("ul")[0].text


def test_admission_says_what_each_scenario_is_and_where_its_memory_is_from() -> None:
    world = evidence()
    admission = part(render(world), "admission")
    told = [item.text for item in admission.all("ul")[0].all("li")]
    for row, words, report in zip(
        world["admission"]["scenarios"],
        told,
        ("vllm-ascend#15204", "vllm-ascend#9543", "vllm-ascend#9543"),
        strict=True,
    ):
        assert f": {', '.join(f'{length:,}' for length in row['prompts'])} tokens in one batch" in words
        assert f"in {row['budget_bytes'] / 2**30:.2f} GiB. That is" in words
        assert f"the {row['native']['free_blocks']:,} blocks that {report} reports free" in words


def test_the_blocks_of_the_real_engine_are_those_that_there_are_not_those_that_it_wants() -> None:
    rows = [
        [cell.text for cell in (*row.all("th"), *row.all("td"))]
        for row in part(render(evidence()), "admission").all("tr")
    ]
    engine = evidence()["admission"]["engine"]
    assert ["native: blocks that there are, in all", f"{engine['blocks']['native']:,}"] in rows
    assert not [row for row in rows if row[0].startswith("blocks")]


def test_point_seven_says_how_long_the_prompt_of_the_real_engine_is() -> None:
    world = evidence()
    drawn = [p for p in part(render(world), "points").all("div") if p.attributes.get("class") == "point"]
    figures = {figure.attributes["data-path"] for figure in drawn[6].all("data")}
    assert "/evidence/admission/engine/prompt" in figures
    assert "/evidence/batch/tokens/value" not in figures
    assert "/evidence/batch/tokens" in figures


def test_the_three_parts_of_the_allocation_are_named_where_the_batch_is_that_of_the_allocation() -> None:
    memory = evidence()["memory"]
    whole = part(render(evidence()), "memory").all("p")[0]
    names = ("payload", "padding", "unused_of_allocated", "allocated_for_32768_tokens")
    assert [json.loads(figure.attributes["value"]) for figure in whole.all("data")] == [
        memory[f"native_state_{name}"]["value"] for name in names
    ]
    assert "pages that no state uses are" not in part(render(evidence(tokens=4096)), "memory").text


def test_the_device_of_the_tokens_is_named_as_torchs_word() -> None:
    world = evidence()
    world["parity"]["tokens"]["device"] = "npu"
    words = part(render(world), "parity").text
    assert "device, as torch names it: the software NPU answers to npu, toonpu" in words


def test_the_waterfall_is_as_long_as_its_bytes() -> None:
    root, _ = pages.read(render(evidence(), TRACE))
    memory = evidence()["memory"]

    def rectangles(title: str) -> list[tuple[float, float]]:
        (picture,) = (p for p in root.all("svg") if p.all("title") and p.all("title")[0].text == title)
        return [(float(r.attributes["x"]), float(r.attributes["width"])) for r in picture.all("rect")]

    names = ("payload", "padding", "unused_of_allocated", "allocated_for_32768_tokens")
    payload, padding, unused, allocated = (memory[f"native_state_{name}"]["value"] for name in names)
    bounded = memory["plugin_tails_spares_staging_lists"]["value"]
    longest = max(payload + padding + unused, allocated, bounded)
    expected = [(0, payload), (payload, padding), (payload + padding, unused), (0, allocated), (0, bounded)]
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
