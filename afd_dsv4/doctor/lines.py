# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Cuts a log into lines, and lines into starts of a server.

Problem: a container puts a time, a JSON object or colours around each line; a line may quote what a user typed; and one
file often holds several starts, the last of which is the one that is asked about.
Way: wrappings are taken off, and the message is what stands behind vLLM's own `INFO 11-30 05:28:02 [core.py:113] `. A
line without that is kept, as `bare`, where Python printed an exception. A start begins where vLLM prints the options,
where an API server comes with another process id, or where an engine is made a second time.
Not here: what the messages say (`logs.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

OPTIONS: Final = "non-default args: "
ENGINE: Final = "Initializing a V1 LLM engine"
NOT_LOADED: Final = "Failed to load plugin "
#: A whole number in a message, and one with a point, of at most 12 digits. `\\d` would take the digits of every script.
NUMBER: Final = "([0-9]{1,12})(?![0-9])"
POINTED: Final = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(?![0-9.])"

_PREFIX = re.compile(
    r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2} "
    r"\[[^\]\n]{1,200}:[0-9]{1,7}\] "
)
_PROCESS = re.compile(r"\(([A-Za-z][\w-]{0,63}) pid=([0-9]{1,10})[^()\n]{0,40}\)")
#: What container runtimes put before a line: Kubernetes' time and stream, and compose's name of the service.
_CONTAINER = re.compile(r"[0-9]\S{0,40} std(?:out|err) [FP] |[\w.-]{1,80} +\| ", re.ASCII)
#: What Python writes before an exception's message.
RAISED: Final = re.compile(r"[A-Za-z_][\w.]{0,80}(?:Error|Exception): ", re.ASCII)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_API_SERVER = re.compile(r"API_?SERVER", re.IGNORECASE)
_JSON = re.compile(r"^\{[^\n]*\}[ \r]*(?:\n|\Z)", re.MULTILINE)
_PARTIAL: Final = 16_384  # bytes after which Docker goes on in another object
_LONGEST: Final = 1 << 17  # characters of a line that are looked at


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        process, pid: who wrote it, as vLLM's prefix says; empty where it says nothing.
        message: behind all prefixes.
        bare: whether it is an exception that Python printed, and not written by vLLM's logger.
        whole: the line, without what a container put around it.
    """

    process: str
    pid: str
    message: str
    bare: bool
    whole: str


def unwrapped(text: str) -> str:
    """A log without colours and without JSON objects around its lines (`log` of Docker, `message` of others)."""
    return _COLOUR.sub("", _JSON.sub(lambda found: _inner(found[0]), text))


def _inner(line: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return line
    text = found.get("log", found.get("message"))
    if not isinstance(text, str):
        return line
    goes_on = not text.endswith("\n") and len(text.encode("utf-8", "replace")) >= _PARTIAL
    return text if goes_on else text.rstrip("\r\n") + "\n"


def is_log(text: str) -> bool:
    """Whether one line at least is in vLLM's format."""
    return _PREFIX.search(text) is not None


def is_api_server(process: str) -> bool:
    """Whether this is the name of a process that answers requests."""
    return _API_SERVER.match(process) is not None


def lines_with(words: Iterable[str], text: str) -> Iterator[Line]:
    """The lines that hold one of the words, in their order; a log may have millions of others."""
    begins = set()
    for word in words:
        at = text.find(word)
        while at >= 0:
            begins.add(text.rfind("\n", 0, at) + 1)
            end = text.find("\n", at)
            at = text.find(word, end) if end >= 0 else -1
    for begin in sorted(begins):
        end = text.find("\n", begin)
        line = _line(text[begin : min(end if end >= 0 else len(text), begin + _LONGEST)].rstrip("\r"))
        if not line.bare or RAISED.match(line.message):
            yield line


def _line(text: str) -> Line:
    prefix = _PREFIX.search(text)
    before = text[: prefix.start()] if prefix else text[:400]
    named = list(_PROCESS.finditer(before))
    # The one nearest to the message: others are of those who collect logs.
    process = (named[-1] if prefix else named[0]) if named else None
    if prefix:
        start = prefix.end()
    elif process:
        start = process.end() + 1
    else:
        start = found.end() if (found := _CONTAINER.match(text)) else 0
    name, pid = (process[1], process[2]) if process else ("", "")
    whole = text[process.start() if process else prefix.start() if prefix else start :]
    return Line(name, pid, text[start:], prefix is None, whole)


@dataclass
class _Start:
    """One start, as far as it was read.

    Attributes:
        lines: of it.
        told, engines: processes that printed options, or made an engine.
        servers: process ids of API servers, by name.
    """

    lines: list[Line] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    engines: set[str] = field(default_factory=set)
    servers: dict[str, str] = field(default_factory=dict)

    def is_over(self, line: Line, pids: set[str]) -> bool:
        """Whether this line is of another start; `pids` are those of API servers that were seen before."""
        if line.bare:
            return False
        if line.message.startswith(OPTIONS):
            # Several servers of one start have names of their own.
            if self.told:
                return not line.process or line.process in self.told
            return any(not _before_options(one) for one in self.lines)
        if is_api_server(line.process) and line.pid not in pids and line.process in self.servers:
            return True
        return line.message.startswith(ENGINE) and line.process in self.engines

    def take(self, line: Line) -> None:
        self.lines.append(line)
        if line.bare:
            return
        if line.message.startswith(OPTIONS):
            self.told.add(line.process)
        elif line.message.startswith(ENGINE):
            self.engines.add(line.process)
        if is_api_server(line.process):
            self.servers[line.process] = line.pid


def starts(lines: Iterable[Line]) -> list[list[Line]]:
    """The lines by the start that they are of, at least one, which may be empty."""
    found = [_Start()]
    pids: set[str] = set()
    for line in lines:
        now = found[-1]
        if now.is_over(line, pids):
            new = _Start()
            while now.lines and _before_options(now.lines[-1]):
                new.lines.insert(0, now.lines.pop())
            found = [*found, new] if now.lines else [*found[:-1], new]
        found[-1].take(line)
        if is_api_server(line.process):
            pids.add(line.pid)
    return [start.lines for start in found]


def _before_options(line: Line) -> bool:
    """Whether a line is of the begin of a process, where vLLM loads plugins, has no name yet, and reads options."""
    said = line.message.startswith(NOT_LOADED) or re.match(r"afd-dsv4 \S{1,80}, ", line.message) is not None
    return said and not line.process and not line.bare
