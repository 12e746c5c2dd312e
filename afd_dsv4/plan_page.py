# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The page of `afd-dsv4 plan --html`: a plan's document drawn, native beside plugin.

A pure function of `plan.document`: every figure is one of the document's, which the page carries along. Settings that
change the memory make a part of their own; within one, prompts are bars and chunk sizes an axis. What is left out of
the pictures, because there would be too many, is in the tables.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from afd_dsv4.admission import GROUP_NAMES, gib_up
from afd_dsv4.page import Bar, Html, Line, bars, chart, data, document, folded, lines, section, table, tag
from afd_dsv4.plan import (
    GROUP_WORDS,
    HBM_WORDS,
    MAX_NUM_SEQS,
    OTHERWISE,
    SCOPE,
    SIDES,
    drafting,
    memory,
    next_limit,
    scheduling,
)

MOST_PARTS: Final = 12
MOST_PROMPTS: Final = 6
_GROUPS: Final = tuple(enumerate(GROUP_NAMES, start=2))  # 0 and 1 are the sides
_Entry = Mapping[str, Any]


def page(plan: Mapping[str, Any]) -> str:
    """The page.

    Args:
        plan: as of `plan.document`.
    """
    parts: dict[int, list[int]] = {}
    for number, entry in enumerate(plan["answers"]):
        if "refused" not in entry:
            parts.setdefault(entry["part"], []).append(number)
    drawn = {f"part{at}": numbers for at, numbers in enumerate(list(parts.values())[:MOST_PARTS], start=1)}
    body = [_in_short(plan)]
    if len(drawn) > 1:
        links = (
            tag("li", tag("a", _heading(plan["answers"][at]), href=f"#{name}")) for name, (at, *_) in drawn.items()
        )
        body.append(tag("nav", tag("ul", *links), aria_label="Settings of the memory"))
    body += [_part(plan, name, numbers) for name, numbers in drawn.items()]
    if len(parts) > len(drawn):
        left = len(parts) - len(drawn)
        body.append(tag("p", f"{left} more combinations of model, block size, requests and memory are in the table."))
    body.append(_all(plan))
    asynchronous = plan["answers"][0]["async_scheduling"]  # one for all
    body.append(
        section(
            "how",
            "How to read it",
            tag("p", f"{SCOPE} {OTHERWISE[asynchronous]}"),
            tag(
                "p",
                "A prompt starts when all blocks of the whole prompt are free at once, whatever the first chunk takes. "
                "The largest chunk is the most tokens of a step with which it still starts, at most the prompt. "
                "Requests at once are prompts of that length, each prefilled while the others keep what a prefilled "
                "prompt keeps; tokens that they generate are not counted. Memory is "
                f"{HBM_WORDS}; a figure of it is rounded up, so that it is enough. "
                "Source of every figure: plan (arithmetic).",
            ),
            tag("pre", tag("code", shlex.join(plan["command"]))),
        )
    )
    lead = tag("p", "KV blocks that DeepSeek-V4 prompts need, natively and with the plugin, and what limits them next.")
    return document("afd-dsv4 plan", lead, body, plan)


def _figure(value: Any, path: str) -> Html:
    if value is None:
        return data(None, "not known", path)
    text = ("yes" if value else "no") if isinstance(value, bool) else f"{value:,}"
    return data(value, text, path)


def _figures(path: str) -> Callable[[int, str], str]:
    return lambda value, key: _figure(value, f"{path}/{key}")


def _gib(size: int) -> str:
    """Bytes as the reasons of an answer say them: up, so that the figure is enough when it is given to the command."""
    return f"{gib_up(size)} GiB"


def _in_short(plan: Mapping[str, Any]) -> Html:
    """The answer where a limit is met first, in words."""
    number = plan["hardest"]
    entry = plan["answers"][number]
    prompt, chunk = entry["prompt_tokens"], entry["max_num_batched_tokens"]
    words = []
    for side in SIDES:
        found, path = entry[side], f"/answers/{number}/{side}"
        limit = next_limit(prompt, chunk, found["by_group"], found["resident_by_group"], _figures(path))
        words += [
            tag("dt", side),
            tag(
                "dd",
                tag("p", f"{found['reason'][:1].upper()}{found['reason'][1:]}."),
                tag("p", tag("strong", "Next limit: "), *limit, "."),
            ),
        ]
    about = (
        f"{_heading(entry)} on {entry['stack']}: a prompt of {prompt:,} tokens in chunks of {chunk:,}, "
        f"{scheduling(entry['async_scheduling'])}{drafting(entry['plugin']['drafts'])}."
    )
    return section("short", "In short", tag("p", about), tag("dl", *words))


def _all(plan: Mapping[str, Any]) -> Html:
    head = ["settings", "prompt", "chunk"]
    columns = {
        "blocks needed": "blocks_needed",
        "free": "free_blocks",
        "starts": "admitted",
        "largest chunk": "largest_chunk",
        "at once": "requests_at_once",
        "limited by": "requests_limited_by",
    }
    head += [f"{side}: {column}" for side in SIDES for column in columns]
    rows, refused, small = [], [], []
    for number, entry in enumerate(plan["answers"]):
        path = f"/answers/{number}"
        row: list[object] = [_heading(entry)]
        row += [_figure(entry[key], f"{path}/{key}") for key in ("prompt_tokens", "max_num_batched_tokens")]
        for side in SIDES:
            for key in columns.values():
                if "refused" in entry:
                    row.append("-")
                elif key == "requests_limited_by":
                    row.append(data(entry[side][key], entry[side][key], f"{path}/{side}/{key}"))
                else:
                    row.append(_figure(entry[side][key], f"{path}/{side}/{key}"))
        where = f"{_heading(entry)}, chunk {entry['max_num_batched_tokens']:,}"
        if "refused" in entry:
            refused.append(tag("li", f"{where}: {entry['refused']}"))
        elif not entry["plugin"]["reserve_fits"]:
            small.append(tag("li", f"{where}, plugin: {entry['plugin']['reason']}"))
        rows.append(row)
    notes = [folded(f"{len(refused)} without an answer", tag("ul", *refused))] if refused else []
    if small:
        notes.append(folded(f"{len(small)} without room for what the plugin reserves", tag("ul", *small)))
    return section("all", "All answers", table("Every combination that was asked for", head, rows), *notes)


def _heading(entry: _Entry) -> str:
    return (
        f"{entry['model']}, block size {entry['block_size']}, longest sequence {entry['max_model_len']:,}, "
        f"{entry['max_num_seqs']:,} requests, memory {memory(entry['hbm_gib'], entry['free_blocks'])}"
    )


def _part(plan: Mapping[str, Any], name: str, numbers: Sequence[int]) -> Html:
    """One setting of the memory."""
    entries = plan["answers"]
    first = entries[numbers[0]]
    largest: dict[int, int] = {}  # by prompt, the answer with the largest chunk
    for number in numbers:
        prompt, chunk = entries[number]["prompt_tokens"], entries[number]["max_num_batched_tokens"]
        if prompt not in largest or chunk >= entries[largest[prompt]]["max_num_batched_tokens"]:
            largest[prompt] = number
    shown = list(largest.values())[:MOST_PROMPTS]
    figures = [_blocks(plan, name, shown), _bytes(plan, name, shown)]
    if entries[shown[0]]["native"]["largest_chunk"] is not None:
        figures += [
            _pairs(plan, f"{name}-chunk", shown, "largest_chunk", "Largest chunk with which it starts", "tokens"),
            _pairs(plan, f"{name}-requests", shown, "requests_at_once", "Requests at once", "requests"),
        ]
    curves = (number for number, curve in enumerate(plan["curves"]) if curve["part"] == first["part"])
    figures += [_curve(plan, f"{name}-curve{at}", at) for at, _ in zip(curves, shown, strict=False)]
    more = len(largest) - len(shown)
    note = [tag("p", f"{more} more prompt lengths are in the table below.")] if more > 0 else []
    return section(name, _heading(first), tag("div", *figures, class_="charts"), *note)


def _sides(plan: Mapping[str, Any], shown: Sequence[int]) -> Iterator[tuple[str, _Entry, str, str, bool]]:
    """Label, side, path and whether a prompt begins, for each bar of a picture."""
    for number in shown:
        entry = plan["answers"][number]
        for side in SIDES:
            label = f"{entry['prompt_tokens']:,} tokens, {side}"
            yield label, entry[side], f"/answers/{number}/{side}", side, side == SIDES[0]


def _blocks(plan: Mapping[str, Any], name: str, shown: Sequence[int]) -> Html:
    rows, numbers = [], []
    for label, found, path, _, first in _sides(plan, shown):
        parts = tuple((colour, found["by_group"][group]) for colour, group in _GROUPS)
        rows.append(Bar(label, parts, f"{found['blocks_needed']:,}", first))
        numbers.append(
            [
                label,
                *(_figure(found["by_group"][group], f"{path}/by_group/{group}") for group in GROUP_NAMES),
                _figure(found["blocks_needed"], f"{path}/blocks_needed"),
            ]
        )
    chunk = plan["answers"][shown[0]]["max_num_batched_tokens"]
    title = f"Whose blocks a prompt needs, in chunks of {chunk:,}"
    words = "; ".join(f"{row.label}: {row.text} blocks" for row in rows)
    drawn = bars(f"{name}-blocks", title, words, rows, _GROUPS)
    return chart(title, drawn, table(title, ["prompt", *GROUP_NAMES, "all"], numbers))


def _bytes(plan: Mapping[str, Any], name: str, shown: Sequence[int]) -> Html:
    rows, numbers = [], []
    for label, found, path, side, first in _sides(plan, shown):
        kv, whole = found["kv_bytes"], found["needed_bytes"]
        rows.append(Bar(label, ((5, kv), (3, whole - kv)), _gib(whole), first))
        reserved: object = "-"
        if side == "plugin":
            reserved = data(found["reserved_bytes"], _gib(found["reserved_bytes"]), f"{path}/reserved_bytes")
        numbers.append(
            [label, data(kv, _gib(kv), f"{path}/kv_bytes"), reserved, data(whole, _gib(whole), f"{path}/needed_bytes")]
        )
    title = "Memory that starts it, a rank"
    words = "; ".join(f"{row.label}: {row.text}" for row in rows)
    drawn = bars(
        f"{name}-bytes",
        title,
        words,
        rows,
        [(5, "KV blocks, with the null block"), (3, "tails and workspace slots, for all requests")],
    )
    return chart(title, drawn, table(title, ["prompt", "KV blocks", "tails and slots", "together"], numbers))


def _pairs(plan: Mapping[str, Any], name: str, shown: Sequence[int], key: str, title: str, unit: str) -> Html:
    rows, numbers = [], []
    for label, found, path, side, first in _sides(plan, shown):
        value, limit = found[key], found["requests_limited_by"]
        text = f"{value:,}" if value else "none"
        rows.append(Bar(label, ((SIDES.index(side), value),), text, first))
        row: list[object] = [label, _figure(value, f"{path}/{key}")]
        if key == "requests_at_once":
            words = "max-num-seqs" if limit == MAX_NUM_SEQS else f"{GROUP_WORDS[limit]} ({limit})"
            row.append(data(limit, words, f"{path}/requests_limited_by"))
        numbers.append(row)
    words = "; ".join(f"{row.label}: {row.text} {unit}" for row in rows)
    drawn = bars(name, title, words, rows, list(enumerate(SIDES)))
    head = ["prompt", unit, *(["limited by"] if key == "requests_at_once" else [])]
    return chart(title, drawn, table(title, head, numbers))


def _curve(plan: Mapping[str, Any], name: str, number: int) -> Html:
    curve = plan["curves"][number]
    chunks, rows = curve["chunks"], []
    for colour, side in enumerate(SIDES):
        rows.append(Line(f"{side} needs", tuple(curve[side]["blocks_needed"]), colour))
    for colour, side in enumerate(SIDES):
        if curve[side]["free_blocks"][0] is not None:
            rows.append(Line(f"{side} free", tuple(curve[side]["free_blocks"]), colour, level=True))
    title = f"Blocks that a prompt of {curve['prompt_tokens']:,} tokens needs, by chunk"
    last = "; ".join(f"{row.label} {row.values[-1]:,}" for row in rows)
    words = f"Chunks from {chunks[0]:,} to {chunks[-1]:,} tokens. At the largest: {last} blocks."
    path = f"/curves/{number}"
    numbers = [
        [
            _figure(chunk, f"{path}/chunks/{at}"),
            *(
                _figure(curve[side][key][at], f"{path}/{side}/{key}/{at}")
                for side in SIDES
                for key in ("blocks_needed", "free_blocks")
            ),
        ]
        for at, chunk in enumerate(chunks)
    ]
    head = ["chunk", *(f"{side}: {what}" for side in SIDES for what in ("blocks needed", "free"))]
    return chart(title, lines(name, title, words, chunks, rows, "tokens of a step"), table(title, head, numbers))
