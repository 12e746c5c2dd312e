# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""HTML and SVG for the pages that the commands write: one file each, nothing fetched, no script that runs.

Problem: a page that is mailed around or opened years later must not need a network, and whoever reads it must be able
to follow every figure back to the JSON that it was made from.
Way: markup is built by `tag`, which escapes whatever is not `Html` already. A figure is a `<data>` element with the
exact value and its path in the document, which the page carries along as a block of JSON. Charts are drawn 360 units
wide, so that they are legible at the width of a telephone; each has a title, a description and its numbers as a table.
Series differ by dash and mark, not by colour alone. The policy in the head forbids every request.
Not here: what a page says (`plan_page.py`, `evidence/page.py`).
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 360  # of every chart, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 18, 10, 36  # around the plot of lines
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3", "1 2")


class Html(str):
    """Text that is markup already."""


def esc(value: object) -> Html:
    """Text as markup; what is markup stays as it is."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(parts: Iterable[object]) -> Html:
    """Parts one behind the other, each escaped unless it is markup."""
    return Html("".join(map(esc, parts)))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """One element. `class_` means class, `_` in other names a hyphen; an attribute that is None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def data(value: object, text: str, path: str = "") -> Html:
    """A figure: its value and its path in the document of the page, for whoever checks, and a text for people."""
    return tag("data", text, value=json.dumps(value), data_path=path or None)


def table(caption: str, head: Sequence[object], rows: Iterable[Sequence[object]], words: int = 1) -> Html:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        caption: what it shows.
        head: its columns.
        rows: cells; the first of each names the row.
        words: how many columns from the left hold words; the others hold numbers and are set to the right.
    """

    def cells(row: Sequence[object]) -> Html:
        return join(
            tag("th", cell, scope="row") if at == 0 else tag("td", cell, class_=None if at < words else "n")
            for at, cell in enumerate(row)
        )

    heads = join(tag("th", cell, scope="col", class_=None if at < words else "n") for at, cell in enumerate(head))
    body = join(tag("tr", cells(row)) for row in rows)
    whole = tag("table", tag("caption", caption), tag("thead", tag("tr", heads)), tag("tbody", body))
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def section(name: str, heading: str, *parts: object) -> Html:
    """A part of the page that can be linked to."""
    return tag("section", tag("h2", heading, id=name), *parts, aria_labelledby=name)


def folded(summary: str, *parts: object) -> Html:
    """What is there for whoever opens it."""
    return tag("details", tag("summary", summary), *parts)


def document(title: str, lead: object, body: Iterable[object], carried: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        title: of the page.
        lead: what stands below it.
        body: its sections.
        carried: the JSON that every figure of the page is from.
    """
    text = json.dumps(carried, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:"><meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
    )
    main = tag("main", tag("h1", title), tag("div", lead, class_="lead"), *body)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<title>{esc(title)}</title><style>{_CSS}</style></head>\n'
        f'<body>{main}\n<script type="application/json" id="document">{text}</script></body></html>\n'
    )


def chart(caption: str, drawn: Html, numbers: Html) -> Html:
    """A picture with its caption and its numbers."""
    return tag("figure", tag("figcaption", caption), drawn, folded("The same as a table", numbers))


@dataclass(frozen=True)
class Bar:
    """One horizontal bar.

    Attributes:
        label: what it is, written above its left end.
        parts: the lengths of which it consists, each with the number of its colour in the legend.
        text: what it amounts to, written above its right end.
        strong: whether a new group of bars begins here.
        start: what lies left of it, as in a waterfall.
        heading: of the group that begins here, written above it.
        mark: where a line crosses the bar: what there is, where the bar is what is wanted.
    """

    label: str
    parts: tuple[tuple[int, float], ...]
    text: str
    strong: bool = False
    start: float = 0
    heading: str = ""
    mark: float | None = None


def bars(
    name: str,
    title: str,
    description: str,
    rows: Sequence[Bar],
    legend: Sequence[tuple[int, str]] = (),
    marks: str = "",
) -> Html:
    """Horizontal bars from one origin.

    Args:
        name: begins the ids of the picture; once a page.
        title: for whoever cannot see it.
        description: what it shows, in words.
        rows: the bars, from above.
        legend: what the colours mean, where there is more than one.
        marks: what the lines across the bars mean, where there are some.
    """
    ends = [bar.start + sum(length for _, length in bar.parts) for bar in rows]
    longest = max([*ends, *(bar.mark or 0 for bar in rows)], default=0) or 1
    drawn: list[Html] = []
    top = 0.0
    for bar in rows:
        top += 10 if bar.strong and drawn else 0
        if bar.heading:
            drawn.append(_text(0, top + 12, bar.heading, strong=True))
            top += 20
        drawn.append(_text(0, top + 12, bar.label))
        drawn.append(_text(WIDTH, top + 12, bar.text, anchor="end"))
        left = bar.start / longest * WIDTH
        for colour, length in bar.parts:
            width = length / longest * WIDTH
            if length:
                width = max(width, 1.0)  # a sliver is still something
                left = min(left, WIDTH - width)
                drawn.append(
                    tag("rect", x=_at(left), y=_at(top + 17), width=_at(width), height=12, class_=f"f{colour}")
                )
            left += width
        if bar.mark is not None:
            at = _at(min(max(bar.mark / longest * WIDTH, 1.0), WIDTH - 1.0))  # the whole line inside the picture
            drawn.append(tag("line", x1=at, x2=at, y1=_at(top + 16), y2=_at(top + 32), class_="mark"))
        top += 34
    return join([_legend(legend, marks), _svg(name, title, description, top or 1, drawn)])


@dataclass(frozen=True)
class Line:
    """One line of a plot: a value for every position, None where there is none. `level` marks a limit."""

    label: str
    values: tuple[float | None, ...]
    colour: int
    level: bool = False


def lines(name: str, title: str, description: str, at: Sequence[int], rows: Sequence[Line], axis: str) -> Html:
    """Lines over positions, both axes logarithmic.

    Args:
        name: begins the ids of the picture; once a page.
        title: for whoever cannot see it.
        description: what it shows, in words.
        at: positions, ascending, from 1.
        rows: the lines.
        axis: what the positions are.
    """
    height = 220
    known = [value for row in rows for value in row.values if value]
    low, high = _decades(known)
    first, last = math.log2(at[0]), math.log2(at[-1])

    def x(position: float) -> float:
        share = 0.5 if first == last else (math.log2(position) - first) / (last - first)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (math.log10(max(value, low)) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return height - _BOTTOM - share * (height - _TOP - _BOTTOM)

    drawn = []
    for tick in _ticks(low, high):
        drawn.append(tag("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=_at(y(tick)), y2=_at(y(tick)), class_="grid"))
        drawn.append(_text(_LEFT - 5, y(tick) + 4, short(tick), anchor="end", quiet=True))
    step = max(1, math.ceil(len(at) / 6))
    for position in list(at)[::-1][::step]:
        drawn.append(_text(x(position), height - _BOTTOM + 15, short(position), anchor="middle", quiet=True))
    drawn.append(_text(WIDTH - _RIGHT, height - 4, axis, anchor="end", quiet=True))
    for number, row in enumerate(rows):
        points = [(x(position), y(value)) for position, value in zip(at, row.values, strict=True) if value]
        path = " ".join(f"{_at(left)},{_at(top)}" for left, top in points)
        dash = _DASHES[number % len(_DASHES)] or None
        drawn.append(tag("polyline", points=path, class_=f"l{row.colour}", stroke_dasharray=dash))
        if not row.level:
            drawn += [tag("circle", cx=_at(left), cy=_at(top), r=2.6, class_=f"f{row.colour}") for left, top in points]
    names = [(row.colour, row.label, _DASHES[number % len(_DASHES)]) for number, row in enumerate(rows)]
    return join([_line_legend(names), _svg(name, title, description, height, drawn)])


@dataclass(frozen=True)
class Slice:
    """One stretch of a track, in milliseconds; `text` is what it is."""

    track: int
    start: float
    end: float
    colour: int
    text: str


def timeline(
    name: str,
    title: str,
    description: str,
    tracks: Sequence[str],
    rows: Sequence[Slice],
    legend: Sequence[tuple[int, str]],
) -> Html:
    """Tracks, each with what went on there over time."""
    end = max((row.end for row in rows), default=1) or 1
    drawn: list[Html] = []
    for number, label in enumerate(tracks):
        drawn.append(_text(0, number * 44 + 12, label))
        drawn.append(tag("rect", x=0, y=number * 44 + 17, width=WIDTH, height=18, class_="track"))
    for row in rows:
        left, width = row.start / end * WIDTH, max((row.end - row.start) / end * WIDTH, 0.6)
        place = {"x": _at(left), "y": row.track * 44 + 17, "width": _at(width), "height": 18}
        drawn.append(tag("rect", tag("title", row.text), class_=f"f{row.colour} edge", **place))
    bottom = len(tracks) * 44
    drawn += [_text(0, bottom + 12, "0 ms", quiet=True)]
    drawn += [_text(WIDTH, bottom + 12, f"{end:,.0f} ms", anchor="end", quiet=True)]
    return join([_legend(legend), _svg(name, title, description, bottom + 18, drawn)])


def short(value: float) -> str:
    """A number for an axis: 512, 32K (thousands of 1,024 where that divides it), 10k, 2M."""
    for factor, letter in ((1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if value >= factor and value % factor == 0:
            return f"{value / factor:.0f}{letter}"
    for power, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= power:
            return f"{value / power:.3g}{letter}"
    return f"{value:g}"


def size(value: float) -> str:
    """Bytes for a person: 15.50 GiB, 46.9 MiB, 7.6 KiB."""
    for unit, factor, digits in (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if value >= factor:
            return f"{value / factor:,.{digits}f} {unit}"
    return f"{value:,.0f} B"


def _svg(name: str, title: str, description: str, height: float, drawn: Iterable[Html]) -> Html:
    words = [tag("title", title, id=f"{name}-title"), tag("desc", description, id=f"{name}-desc")]
    box = f"0 0 {WIDTH} {_at(height)}"
    return tag("svg", *words, *drawn, viewBox=box, role="img", aria_labelledby=f"{name}-title {name}-desc")


def _text(
    x: float, y: float, words: str, *, anchor: str | None = None, quiet: bool = False, strong: bool = False
) -> Html:
    looks = "quiet" if quiet else "strong" if strong else None
    return tag("text", words, x=_at(x), y=_at(y), text_anchor=anchor, class_=looks)


def _legend(names: Sequence[tuple[int, str]], marks: str = "") -> Html:
    entries = [tag("li", tag("span", class_=f"swatch b{number}", aria_hidden="true"), name) for number, name in names]
    if marks:
        line = tag("line", x1=6, x2=6, y1=0, y2=14, class_="mark")
        entries.append(tag("li", tag("svg", line, viewBox="0 0 12 14", class_="sign", aria_hidden="true"), marks))
    return tag("ul", *entries, class_="legend") if entries else Html("")


def _line_legend(names: Iterable[tuple[int, str, str]]) -> Html:
    entries = []
    for colour, name, dash in names:
        line = tag("line", x1=0, x2=28, y1=5, y2=5, class_=f"l{colour}", stroke_dasharray=dash or None)
        entries.append(tag("li", tag("svg", line, viewBox="0 0 28 10", class_="key", aria_hidden="true"), name))
    return tag("ul", *entries, class_="legend")


def _at(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around the values."""
    if not values:
        return 1.0, 10.0
    low, high = 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values)))
    return low, high if high > low else low * 10


def _ticks(low: float, high: float) -> list[float]:
    decades = round(math.log10(high / low))
    steps = (1, 2, 5) if decades <= 2 else (1,)
    found = [low * 10**power * step for power in range(decades) for step in steps]
    return [*found, high]


_CSS: Final = """
:root{color-scheme:light dark;--paper:#fff;--ink:#16202c;--soft:#52606f;--rule:#d5dbe3;--panel:#f5f7fa;--link:#0b57b0;
--good:#0a6b3d;--bad:#b3261e;--open:#7a4b00;
--c0:#b34a00;--c1:#0b62c4;--c2:#0a7a55;--c3:#7a3fd0;--c4:#b01e63;--c5:#596675;--c6:#8a6d00}
@media (prefers-color-scheme:dark){:root{--paper:#11161d;--ink:#e7ecf2;--soft:#a6b2c0;--rule:#354150;--panel:#1a222c;
--link:#82bdff;--good:#58d296;--bad:#ff8f85;--open:#f2bd6b;
--c0:#f2a15a;--c1:#70b4ff;--c2:#4fcf9f;--c3:#bda1ff;--c4:#ff92bf;--c5:#a3b0bf;--c6:#e0c14a}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1160px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.7rem;line-height:1.25;margin:.3em 0}
h2{font-size:1.25rem;margin:2em 0 .5em;padding-top:.6em;border-top:1px solid var(--rule)}
h3{font-size:1.05rem;margin:1.5em 0 .3em}
p,li{max-width:75ch}
h1,h2,h3,p,li,dd,tbody th{overflow-wrap:anywhere}
.lead{color:var(--soft)}
a{color:var(--link)}
code{font:.9em/1.5 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
pre{background:var(--panel);border:1px solid var(--rule);border-radius:6px;padding:10px 12px;overflow-x:auto}
pre code{white-space:pre-wrap}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:16px;align-items:start}
figure{margin:0;background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:12px 14px}
figcaption{font-weight:600;margin-bottom:8px}
svg{display:block;width:100%;max-width:470px;height:auto}
svg text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--ink)}
svg text.quiet{fill:var(--soft);font-size:11px}
svg text.strong{font-weight:600}
.mark{stroke:var(--ink);stroke-width:2}
.grid{stroke:var(--rule);stroke-width:1}
.track{fill:var(--paper);stroke:var(--rule)}
.edge{stroke:var(--panel);stroke-width:.5}
polyline,.key line{fill:none;stroke-width:2}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:0 0 8px;padding:0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:6px}
.swatch{width:12px;height:12px;border-radius:2px;display:inline-block;flex:none}
.key{width:28px;height:10px;flex:none}
.sign{width:12px;height:14px;flex:none}
.scroll{overflow:auto;margin:14px 0 18px;max-width:100%;max-height:36rem}
thead th{position:sticky;top:0;background:var(--paper)}figure thead th{background:var(--panel)}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding-bottom:4px}
th,td{text-align:left;vertical-align:top;padding:4px 10px 4px 0;border-bottom:1px solid var(--rule)}
tbody th{font-weight:400}
.n{text-align:right}td.n{white-space:nowrap}
tbody th{min-width:9.5em}
dt{font-weight:700}dd{margin:0 0 0 1em}dd p{margin:.3em 0}
details{margin:8px 0}
summary{cursor:pointer;color:var(--link)}
.pass{color:var(--good)}.fail{color:var(--bad)}.not_shown_here{color:var(--open)}
.verdict{font-weight:700;white-space:nowrap}
.source{color:var(--soft);font-size:.85em}
.point{border-left:4px solid var(--rule);padding:2px 0 2px 14px;margin:16px 0}
.point h3{margin:.2em 0}
@media print{details{display:block}}
""" + "".join(f".f{n}{{fill:var(--c{n})}}.l{n}{{stroke:var(--c{n})}}.b{n}{{background:var(--c{n})}}" for n in range(7))
