# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The report of an evidence run: `evidence.json` as one page.

Problem: a JSON file of a thousand figures convinces nobody who does not already know where to look.
Way: a pure function of the file, and of the trace beside it for the timeline of the workspace slots. The seven points
come first, each with its verdict and the figures that it rests on; then memory, slots, parity, order and the rest; last
every figure of the file, by its place. Nothing is computed here but lengths of bars: what is shown is what the file
says, with the source that the file gives.
A section that is empty, because a part broke off or does not run on this device, says so.
Not here: any judgement (`run.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from afd_dsv4.page import (
    Bar,
    Html,
    Slice,
    bars,
    chart,
    data,
    document,
    folded,
    join,
    section,
    size,
    table,
    tag,
    timeline,
)
from afd_dsv4.workspace.chrome import chrome
from afd_dsv4.workspace.trace import Record

ROOT: Final = "/evidence"
MOST_SLICES: Final = 500
_FIGURE: Final = {"value", "unit", "source"}
_VERDICTS: Final = {"pass": "pass", "fail": "fail", "not_shown_here": "not shown here"}
_KINDS: Final = ("live", "dummy", "profile", "capture")
_DEVICES: Final = {
    "softnpu": "Everything here ran on the software NPU: real torch_npu, CPU threads for the silicon. It shows "
    "bookkeeping and order, nothing about numerics or speed of a device. No one has run this on Ascend hardware yet.",
    "cuda": "Everything here ran on a CUDA device. No one has run this on Ascend hardware yet.",
    "npu": "This ran on an Ascend NPU.",
}
#: Sections whose counts are plain numbers, and where their source is.
_COUNTS: Final = {
    "/admission/scenarios": "/admission/source",
    "/parity/tokens": "/parity/tokens/source",
    "/isolation": "/stack/device",
}
_OF_SLOTS: Final = "/performance/reuse/32,768 tokens/throughput_of/slots/"
#: What each point rests on: label and place in the file. What a device has not is left out.
_RESTS: Final[dict[int, tuple[tuple[str, str], ...]]] = {
    1: (
        ("compressed rows compared", "/parity/rows_total/compressed"),
        ("of which differ", "/parity/rows_total/compressed_different"),
        ("tail rows compared", "/parity/rows_total/tail"),
        ("of which differ", "/parity/rows_total/tail_different"),
        ("tokens decided by more than rounding", "/parity/tokens/free_running/decided"),
        ("of which differ", "/parity/tokens/free_running/mismatches"),
    ),
    2: (
        ("rows that differ", "/parity/rows_total/compressed_different"),
        ("tail rows that differ", "/parity/rows_total/tail_different"),
        ("reuses that nothing orders", "/order/trace/unordered_reuses"),
        ("rows that differ with the ordering off", "/order/negative_controls/touches/0/mismatched_rows_touches_off"),
        ("reuses unordered then", "/order/negative_controls/touches/0/unordered_reuses_touches_off"),
    ),
    3: (
        ("records of the trace", "/order/trace/records"),
        ("touches", "/order/trace/touches"),
        ("edges by events", "/order/trace/edges"),
        ("reuses that nothing orders", "/order/trace/unordered_reuses"),
        ("graph replays between eager executions", "/order/replays/replays"),
        ("bytes compared under load", "/order/soak/bytes_compared"),
        ("of which wrong", "/order/soak/bytes_wrong"),
    ),
    4: (
        ("tails of one request", "/memory/tail_bytes_per_request"),
        ("one workspace slot", "/memory/slot_bytes"),
        ("tails, spares, staging and lists of the batch", "/memory/plugin_tails_spares_staging_lists"),
        ("native payload of the same batch", "/memory/native_state_payload"),
    ),
    5: (
        ("throughput of slots over waiting for the device", _OF_SLOTS + "over_synchronised"),
        ("throughput of slots over memory of each layer's own", _OF_SLOTS + "over_private"),
    ),
    6: (("upstream symbols compared by identity", "/isolation/symbols_compared"),),
    7: (
        ("steps waited in the real engine, native", "/admission/engine/steps_waited/native"),
        ("with the plugin", "/admission/engine/steps_waited/plugin"),
        ("tokens of that prompt and others", "/admission/engine/tokens"),
        ("of which differ", "/admission/engine/tokens_that_differ"),
    ),
}


def render(evidence: Mapping[str, Any], records: Sequence[Record] = ()) -> str:
    """The page.

    Args:
        evidence: as written to evidence.json, strict.
        records: of the trace beside it; without them there is no timeline.
    """
    slots = _timeline(records)
    view = _View(evidence)
    device = str(view.at("/stack/device") or "an unknown device")
    passed = evidence.get("passed") is True
    lead = [
        tag(
            "p",
            tag("span", "Passed" if passed else "Failed", class_=f"verdict {'pass' if passed else 'fail'}"),
            f" on {device}, ",
            view.figure("/batch/tokens"),
            " tokens in ",
            str(len(view.at("/batch/requests") or ())),
            " requests. ",
            _DEVICES.get(device, ""),
        ),
        tag("pre", tag("code", shlex.join(map(str, evidence.get("command") or ())))),
    ]
    body = [
        view.points(),
        view.admission(),
        view.memory(),
        _slots(slots),
        view.parity(),
        view.order(),
        view.rest("performance", "Performance"),
        view.rest("isolation", "Isolation"),
        view.checks(),
        view.rest("stack", "Stack"),
        view.everything(),
    ]
    return document("afd-dsv4 evidence", join(lead), body, {"evidence": evidence, "timeline": slots})


class _View:
    """The sections."""

    def __init__(self, evidence: Mapping[str, Any]) -> None:
        self.evidence = evidence

    def at(self, pointer: str) -> Any:
        """What is at this place, None if nothing is."""
        found: Any = self.evidence
        for key in map(_plain, pointer.split("/")[1:]):
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, Mapping) and key in found:
                found = found[key]
            else:
                return None
        return found

    def figure(self, pointer: str) -> Html:
        """What is at this place, with its source if it says one; a dash where nothing is."""
        found = self.at(pointer)
        if _is_figure(found):
            text = shown(found["value"], found["unit"])
            return join([data(found["value"], text, f"{ROOT}{pointer}/value"), _source(found["source"])])
        if isinstance(found, (dict, list)) or found is None:
            return Html("-") if found is None else tag("span", _listed(found))
        plain = data(found, shown(found, ""), ROOT + pointer)
        counted = isinstance(found, (int, float)) and not isinstance(found, bool)
        return join([plain, _source(self._source_of(pointer))]) if counted else plain

    def _source_of(self, pointer: str) -> object:
        """Source of a plain count; sections that have such counts have one source for all."""
        for section_, source in _COUNTS.items():
            if pointer.startswith(f"{section_}/"):
                return self.at(source)
        return None

    def points(self) -> Html:
        """The RFC's points."""
        parts = []
        for at, point in enumerate(self.at("/verdicts/points") or ()):
            verdict = point["verdict"]
            rests = [
                (label, pointer) for label, pointer in self._rests(point["number"]) if self.at(pointer) is not None
            ]
            rows = [(label, self.figure(pointer)) for label, pointer in rests]
            numbers = [table(f"Figures of point {point['number']}", ("what", "figure"), rows, words=2)] if rows else []
            name = data(verdict, _VERDICTS[verdict], f"{ROOT}/verdicts/points/{at}/verdict")
            parts.append(
                tag(
                    "div",
                    tag("h3", f"{point['number']}. {point['text']}"),
                    tag(
                        "p",
                        tag("span", name, class_=f"verdict {verdict}"),
                        f": {point['because']}",
                        _source(point.get("source")),
                    ),
                    *numbers,
                    class_="point",
                )
            )
        if not parts:
            parts.append(tag("p", "The run did not come to its verdicts."))
        return section("points", "The seven points of vllm-project/afd-plugin#292", *parts)

    def _rests(self, number: int) -> Iterator[tuple[str, str]]:
        yield from _RESTS.get(number, ())
        for at, entry in enumerate(self.at("/memory/scaling") or ()):
            if number == 4 and "transient" in entry:
                yield (
                    f"a forward adds at its peak, {entry['what']} x {entry['scale']}",
                    f"/memory/scaling/{at}/transient",
                )

    def admission(self) -> Html:
        """What the real scheduler did."""
        head = ["scenario", "tokens of the prompts", "room for requests"]
        columns = {
            "blocks needed": "blocks_needed",
            "free": "free_blocks",
            "whole in the first step": "admitted",
            "prompts started": "prompts_started",
        }
        head += [f"{side}: {name}" for side in ("native", "plugin") for name in columns]
        rows, drawn = [], []
        for at, row in enumerate(self.at("/admission/scenarios") or ()):
            path = f"/admission/scenarios/{at}"
            name = f"{row['scenario'].replace('_', ' ')}, {row['max_num_seqs']}"
            rows.append(
                [
                    row["scenario"].replace("_", " "),
                    _listed(row["prompts"]),
                    self.figure(f"{path}/max_num_seqs"),
                    *(self.figure(f"{path}/{side}/{key}") for side in ("native", "plugin") for key in columns.values()),
                ]
            )
            for number, side in enumerate(("native", "plugin")):
                needed, free = row[side]["blocks_needed"], row[side]["free_blocks"]
                text = f"{needed:,} of {free:,} free"
                drawn.append(Bar(f"{name}: {side}", ((number, needed),), text, number == 0))
        parts: list[object] = []
        if rows:
            source = self.at("/admission/source")
            parts.append(
                tag(
                    "p",
                    "The real vLLM scheduler with vllm-ascend's KV groups, both sides from the same bytes.",
                    _source(source),
                )
            )
            words = "; ".join(f"{bar.label}: {bar.text}" for bar in drawn)
            title = "Blocks needed, by scenario and room for requests"
            numbers = table("What the scheduler did", head, rows, words=2)
            parts.append(
                tag("div", chart(title, bars("admission", title, words, drawn, _SIDES), numbers), class_="charts")
            )
        parts += self._mapping("/admission/engine", "The real engine, a long prompt behind others")
        return section("admission", "Admission", *(parts or [self._empty("/admission")]))

    def memory(self) -> Html:
        """The memory waterfall, and what does not grow."""
        value = self._value
        native = [("payload", "native_state_payload"), ("padding of its pages", "native_state_padding")]
        plugin = [(name, f"plugin_{name}") for name in ("tails", "spares", "lists", "staging", "tables")]
        start, falls = 0.0, []
        for label, key in native:
            falls.append((f"native: {label}", key, start, 0))
            start += value(key)
        held, holds = 0.0, []
        for label, key in plugin:
            holds.append((f"plugin: {label}", key, held, 1))
            held += value(key)
        allocated = "native_state_allocated_for_32768_tokens"
        if value(allocated) and self.at("/batch/tokens") == 32768:
            falls.append(("native: as allocated in blocks", allocated, 0.0, 0))
        falls.append(("plugin: tails, spares, staging and lists", "plugin_tails_spares_staging_lists", 0.0, 1))
        device = [
            (name.replace("_", " "), name, 0.0, 5)
            for name in ("plugin_held_by_the_allocator", "activations_peak", "device_peak")
        ]
        charts = [
            self._waterfall("state", "Compressor state of the batch", falls),
            self._waterfall("plugin", "What the plugin holds, enlarged", holds),
            self._waterfall("device", "Device memory of the run", device),
        ]
        parts: list[object] = (
            [tag("div", *(drawn for drawn in charts if drawn), class_="charts")] if any(charts) else []
        )
        parts += self._records("/memory/scaling", "What grows with layers, and with the chunk", words=1)
        parts += self._mapping("/memory", "All figures of memory", leave=("scaling",))
        return section("memory", "Memory", *(parts or [self._empty("/memory")]))

    def _value(self, key: str) -> float:
        found = self.at(f"/memory/{key}")
        return float(found["value"]) if _is_figure(found) else 0.0

    def _waterfall(self, name: str, title: str, falls: Sequence[tuple[str, str, float, int]]) -> Html | None:
        present = [fall for fall in falls if _is_figure(self.at(f"/memory/{fall[1]}"))]
        if not present:
            return None
        drawn = [
            Bar(label, ((colour, self._value(key)),), size(self._value(key)), start=start)
            for label, key, start, colour in present
        ]
        words = "; ".join(f"{bar.label}: {bar.text}" for bar in drawn)
        rows = [(label, self.figure(f"/memory/{key}")) for label, key, _, _ in present]
        return chart(title, bars(f"memory-{name}", title, words, drawn), table(title, ("what", "bytes"), rows))

    def parity(self) -> Html:
        """Rows and tokens."""
        parts = self._records("/parity/rows", "Rows, by the place where the batch is cut into two uBatches")
        parts += self._mapping("/parity/rows_total", "Rows of all cuts")
        parts += self._mapping("/parity/rows_full_hidden", "Rows at the model's own hidden size")
        parts += self._records("/parity/definition", "Rows against the definition")
        parts += self._mapping("/parity/tokens", "Tokens", leave=("controls",))
        parts += self._records("/parity/tokens/controls", "Faults planted into the model, which must be found")
        return section("parity", "Parity", *(parts or [self._empty("/parity")]))

    def order(self) -> Html:
        """The proof that every reuse is ordered, and that the proof sees what it must."""
        parts = self._mapping("/order/trace", "The order checker on the trace of the rows")
        rules = self.at("/order/negative_controls/table_rules") or ()
        if rules:
            caught = sum(rule["caught"] for rule in rules)
            parts.append(tag("p", f"Table rules broken on paper: {caught} of {len(rules)} named by the checker."))
        parts += self._records("/order/negative_controls/touches", "The same load with the ordering on and off")
        parts += self._records("/order/negative_controls/launched_broken", "Launched with a table rule broken", words=2)
        broken = self._records("/order/negative_controls/table_rules", "Table rules, each broken on paper", words=2)
        parts += [folded("Every rule", *broken)] if broken else []
        parts += self._mapping("/order", "Counters", leave=("trace", "negative_controls"))
        return section("order", "Order", *(parts or [self._empty("/order")]))

    def rest(self, name: str, heading: str) -> Html:
        """A section of names and values."""
        return section(name, heading, *(self._mapping(f"/{name}", heading) or [self._empty(f"/{name}")]))

    def checks(self) -> Html:
        """Every condition of the run; those that failed in plain sight."""
        head = ("check", "", "expected", "found")
        checks = self.at("/verdicts/checks") or ()
        failed = [check for check in checks if not check["passed"]]

        def rows(some: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[object]]:
            for check in some:
                verdict = "pass" if check["passed"] else "fail"
                yield (
                    check["name"],
                    tag("span", verdict, class_=f"verdict {verdict}"),
                    check["expected"],
                    check["found"],
                )

        parts: list[object] = [tag("p", f"{len(checks) - len(failed)} of {len(checks)} checks passed.")]
        if failed:
            parts.append(table("Failed", head, rows(failed), words=4))
        parts.append(folded("Every check", table("Every check", head, rows(checks), words=4)))
        return section("checks", "Checks", *parts)

    def everything(self) -> Html:
        """Every figure of the file."""
        rows = [
            (tag("code", pointer), self.figure(pointer), found["unit"]) for pointer, found in figures(self.evidence)
        ]
        listed = table("Every figure by its place in evidence.json", ("place", "value and source", "unit"), rows)
        return section("figures", "Every figure", folded(f"{len(rows):,} figures", listed))

    def _records(self, pointer: str, caption: str, words: int = 1) -> list[object]:
        """A list of like things as a table."""
        found = self.at(pointer)
        if not isinstance(found, list) or not found:
            return []
        keys = list(dict.fromkeys(key for entry in found for key in entry))
        rows = [[self.figure(f"{pointer}/{at}/{key}") for key in keys] for at in range(len(found))]
        return [table(caption, [_words(key) for key in keys], rows, words=words)]

    def _mapping(self, pointer: str, caption: str, leave: Sequence[str] = ()) -> list[object]:
        """Names and values, however deep, as a table; lists of things are left to others."""
        rows = [(name, self.figure(place)) for name, place in self._leaves(pointer, leave)]
        return [table(caption, ("what", "value"), rows, words=2)] if rows else []

    def _leaves(self, pointer: str, leave: Sequence[str] = (), above: str = "") -> Iterator[tuple[str, str]]:
        found = self.at(pointer)
        for key, value in found.items() if isinstance(found, Mapping) else ():
            name, place = f"{above}{_words(key)}", f"{pointer}/{_key(key)}"
            if key in leave or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
                continue
            if isinstance(value, Mapping) and not _is_figure(value):
                yield from self._leaves(place, (), f"{name}: ")
            elif value is not None:
                yield name, place

    def _empty(self, pointer: str) -> Html:
        found = self.at(pointer)
        why = found.get("not_shown_here") if isinstance(found, Mapping) else None
        return tag("p", f"Not shown here: {why}." if why else "This part broke off; a failed check says why.")


_SIDES: Final = ((0, "native"), (1, "plugin"))


def figures(value: Any, pointer: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every figure below a value, with its place."""
    if _is_figure(value):
        yield pointer, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from figures(inner, f"{pointer}/{_key(key)}")
    elif isinstance(value, (list, tuple)):
        for at, inner in enumerate(value):
            yield from figures(inner, f"{pointer}/{at}")


def _key(key: str) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _plain(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def shown(value: Any, unit: str) -> str:
    """A value for people; whole numbers of bytes as sizes, the others with their unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit == "bytes" and isinstance(value, (int, float)):
        return size(value)
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if isinstance(value, float) else str(value)
    return text if unit in ("", "count", "rows", "ratio") else f"{text} {unit}"


def _is_figure(value: object) -> bool:
    return isinstance(value, Mapping) and set(value) == _FIGURE


def _source(source: object) -> Html:
    return tag("span", f" {source}", class_="source") if source else Html("")


def _words(key: str) -> str:
    return key.replace("_", " ")


def _listed(values: Any) -> str:
    return ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values) or "none"


def _timeline(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The leases of the trace, as `chrome` finds them."""
    return [
        {
            "slot": event["tid"] - 1,
            "start_ms": round(event["ts"] / 1000, 3),
            "end_ms": round((event["ts"] + event["dur"]) / 1000, 3),
            **{key: event["args"][key] for key in ("lease", "execution", "kind", "outcome")},
        }
        for event in chrome(records)["traceEvents"]
        if event["ph"] == "X" and event["cat"] == "lease"
    ]


def _slots(slots: Sequence[Mapping[str, Any]]) -> Html:
    """Which lease had which workspace slot, and when."""
    heading = "Workspace slots over time"
    if not slots:
        return section("slots", heading, tag("p", "There is no trace beside this report."))
    shown_ = slots[:MOST_SLICES]
    tracks = sorted({lease["slot"] for lease in shown_})
    drawn, rows = [], []
    for at, lease in enumerate(shown_):
        text = (
            f"lease {lease['lease']} of {lease['execution']}, {lease['kind']}, {lease['outcome']}: "
            f"{lease['start_ms']:,.1f} to {lease['end_ms']:,.1f} ms"
        )
        colour = _KINDS.index(lease["kind"]) + 1 if lease["kind"] in _KINDS else 6
        drawn.append(Slice(tracks.index(lease["slot"]), lease["start_ms"], lease["end_ms"], colour, text))
        rows.append(
            [
                data(
                    lease[key],
                    f"{lease[key]:,}" if isinstance(lease[key], (int, float)) else lease[key],
                    f"/timeline/{at}/{key}",
                )
                for key in _LEASE
            ]
        )
    kinds = [
        (number, kind) for number, kind in enumerate(_KINDS, start=1) if any(lease["kind"] == kind for lease in shown_)
    ]
    words = f"{len(shown_)} leases on {len(tracks)} slots, from the acquire until the slot is handed on."
    picture = timeline("slots", heading, words, [f"slot {slot}" for slot in tracks], drawn, kinds)
    numbers = table("Leases", [_words(key) for key in _LEASE], rows)
    note = tag("p", "Times are those at which the host queued the work. trace.json beside this page has every touch.")
    more = (
        [tag("p", f"{len(slots) - len(shown_):,} later leases are in trace.json only.")] if slots[MOST_SLICES:] else []
    )
    return section("slots", heading, note, *more, chart("Leases by workspace slot", picture, numbers))


_LEASE: Final = ("lease", "slot", "execution", "kind", "outcome", "start_ms", "end_ms")
