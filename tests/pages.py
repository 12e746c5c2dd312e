# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What every page must be, checked from its text alone; a browser is asked elsewhere.

Nothing is fetched, every id is there once and every reference to one leads somewhere, every picture has words and a
table, and every figure is the one at its place in the document that the page carries, as its text says.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}
#: Attributes that make a browser fetch or run something.
FETCHES = {"src", "href", "xlink:href", "srcset", "action", "poster", "data", "background", "formaction", "style"}
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    text: str = ""
    inside: list[Element] = field(default_factory=list)

    def all(self, name: str) -> list[Element]:
        return [self] * (self.name == name) + [found for inner in self.inside for found in inner.all(name)]


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        if len(element.attributes) != len(attrs):
            self.faults.append(f"<{tag}> has an attribute twice")
        self.open[-1].inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        if self.open[-1].name == tag:
            self.open.pop()
        else:
            self.faults.append(f"</{tag}> ends <{self.open[-1].name}>")

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


def read(page: str) -> tuple[Element, list[str]]:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader.root, reader.faults + [f"<{element.name}> is never closed" for element in reader.open[1:]]


def carried(page: str) -> object:
    """The document in the page."""
    (block,) = (s for s in read(page)[0].all("script") if s.attributes.get("type") == "application/json")
    return json.loads(block.text)


def place(document: object, pointer: str) -> object:
    """What RFC 6901 says is there."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        document = document[int(key)] if isinstance(document, list) else document[key]  # type: ignore[index]
    return document


def says(text: str, value: object) -> bool:
    """Whether a text for people is about this value, without asking who wrote it."""
    if value is None:
        return text == "not known"
    if isinstance(value, bool):
        return text == ("yes" if value else "no")
    if isinstance(value, str):
        return text.replace(" ", "_").replace("-", "_") == value.replace(" ", "_").replace("-", "_") or value in text
    number, _, unit = text.partition(" ")
    found = float(number.replace(",", ""))
    if unit in UNITS:
        digits = len(number.partition(".")[2])
        step = UNITS[unit] / 10**digits  # to the nearest, or up where a figure must be enough
        return -0.5000001 * step <= found * UNITS[unit] - value < step
    return found == value if isinstance(value, int) else abs(found - value) <= 1e-5 * abs(value)


def faults(page: str) -> list[str]:
    """All that is wrong."""
    root, found = read(page)
    elements = [element for name in {*_names(root)} for element in root.all(name)]
    for element in elements:
        for name, value in element.attributes.items():
            if name.startswith("on"):
                found.append(f"<{element.name}> runs {name}")
            if name in FETCHES and not value.startswith(("#", "data:")):
                found.append(f"<{element.name}> fetches {name}={value}")
        if element.name in ("iframe", "object", "embed", "base", "img"):
            found.append(f"<{element.name}> is not ours")
        if element.name == "script" and element.attributes.get("type") != "application/json":
            found.append("a script that runs")
        if element.name == "style" and re.search(r"url\(|@import|https?:", element.text):
            found.append("the style fetches something")
    ids = Counter(element.attributes["id"] for element in elements if "id" in element.attributes)
    found += [f"id {name} {count} times" for name, count in ids.items() if count > 1]
    for element in elements:
        for name in element.attributes.get("aria-labelledby", "").split():
            if name not in ids:
                found.append(f"no id {name}")
    for figure in root.all("figure"):
        if not figure.all("table"):
            found.append(f"no table beside the picture {figure.all('figcaption')[0].text!r}")
    for svg in root.all("svg"):
        if svg.attributes.get("aria-hidden") == "true":
            continue
        words = [child for child in svg.inside[:2] if child.name in ("title", "desc") and child.text.strip()]
        if svg.attributes.get("role") != "img" or len(words) != 2:
            found.append("a picture without words")
        if "nan" in "".join(str(child.attributes) for child in svg.inside).lower():
            found.append("a picture with NaN")
    if [element for element in root.all("html") if not element.attributes.get("lang")] or not root.all("title")[0].text:
        found.append("no language or no title")
    document = carried(page)
    figures = root.all("data")
    for figure in figures:
        value, pointer = json.loads(figure.attributes["value"]), figure.attributes["data-path"]
        try:
            there = place(document, pointer)
        except (KeyError, IndexError, TypeError):
            found.append(f"nothing at {pointer}")
            continue
        if there != value or type(there) is not type(value):
            found.append(f"{pointer} is {there}, the page has {value}")
        elif not says(figure.text, value):
            found.append(f"{pointer} is {value}, the page says {figure.text}")
    if not figures:
        found.append("no figures")
    return found


def _names(element: Element) -> list[str]:
    return [element.name, *(name for inner in element.inside for name in _names(inner))]


def pointers(page: str) -> set[str]:
    """Places of the figures in the page."""
    return {figure.attributes["data-path"] for figure in read(page)[0].all("data")}
