# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a running server's plugin said of itself: on, refused, failed, quarantined.

Problem: a mode that was refused leaves a server that runs and serves natively; one line says so among thousands, once a
process, and a counter on the page.
Way: the lines that `plugin.py` and `notices.py` of this project write, by process, and the series `afd_dsv4_*`. Each
answer quotes the first line, says how many there are, and what to do.
Not here: whether the gate would say the same on this machine (`planned.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from afd_dsv4.doctor.facts import Finding, Severity
from afd_dsv4.doctor.lines import Line

#: As `Decision.line` of the gate writes it; reasons and the name of a stack may hold parentheses.
_MODE = re.compile(
    r"afd-dsv4 \S{1,80}, (mode '(\w{1,20})': (on|off|refused, stays off) \((.*?)\)(?:, executor .*)?(?:; stack: .*)?)",
    re.ASCII,
)
_FAILED = re.compile(r"afd-dsv4 \S{1,80}, (stays off: (.*))", re.ASCII)
_QUARANTINED = re.compile(r"afd-dsv4: slot ([0-9]{1,6}) is quarantined: ")
_LEFT = re.compile(r"[0-9]{1,6} of [0-9]{1,6} slots are left")
_EXCEPTION = re.compile(r"[A-Z]\w*(?:Error|Exception): ", re.ASCII)
_ON, _OFF, _REFUSED, _FAILS = "on", "off", "refused", "failed"
_SHOWN = 300  # characters of a line that is quoted

Labels = dict[str, str]


@dataclass(frozen=True)
class Verdict:
    """One line of ours about a configuration.

    Attributes:
        line: that says so.
        text: what it says.
        mode: that was asked for, empty where it could not be read.
        verdict: `on`, `off`, `refused` or `failed`.
        why: reasons, or the error.
    """

    line: Line
    text: str
    mode: str
    verdict: str
    why: str


@dataclass(frozen=True)
class Said:
    """What all lines of a start say together.

    Attributes:
        text: of the last one, None where there is none.
        plugin: whether it is on; None where nothing was said, or not the same everywhere.
        findings: what is wrong.
        spoke: whether anything was said of being on or not.
    """

    text: str | None
    plugin: bool | None
    findings: tuple[Finding, ...]
    spoke: bool


def of_log(lines: Iterable[Line]) -> Said:
    """Read the lines of one start."""
    verdicts, lost = [], []
    for line in lines:
        if line.bare:
            continue
        if found := _MODE.fullmatch(line.message):
            text, mode, word, why = found.groups()
            verdicts.append(Verdict(line, text, mode, _REFUSED if word.startswith(_REFUSED) else word, why))
        elif found := _FAILED.fullmatch(line.message):
            verdicts.append(Verdict(line, found[1], "", _FAILS, found[2]))
        elif found := _QUARANTINED.match(line.message):
            left = _LEFT.search(line.message)
            lost.append((line, found[1], left[0] if left else None))
    findings = [*_refused(verdicts), *_failed(verdicts), *_quarantined(lost)]
    differ = _disagree(verdicts)
    last = verdicts[-1] if verdicts else None
    return Said(
        last.text if last else None,
        None if last is None or differ else last.verdict == _ON,
        (*findings, *([differ] if differ else [])),
        bool(verdicts),
    )


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def _quoted(lines: list[Line]) -> str:
    return f"{'The line' if len(lines) == 1 else f'The first of {len(lines):,} lines'}: {_short(lines[0].whole)}"


def _refused(verdicts: list[Verdict]) -> Iterator[Finding]:
    for mode in dict.fromkeys(one.mode for one in verdicts if one.verdict == _REFUSED):
        these = [one for one in verdicts if one.verdict == _REFUSED and one.mode == mode]
        reasons = list(dict.fromkeys(reason for one in these for reason in _reasons(one.why)))
        yield Finding(
            "plugin-refused",
            Severity.PROBLEM,
            f"mode {mode!r} was refused when the server started, and native code serves",
            (_quoted([one.line for one in these]),),
            tuple(reasons),
            numbers={"mode": mode, "lines": len(these), "reasons": reasons},
        )


def _reasons(text: str) -> list[str]:
    """One, or several with numbers before them, as `Decision.line` of the gate writes them."""
    return re.split(r"(?:^|; )[0-9]{1,3}\. ", text)[1:] if text.startswith("1. ") else [text]


def _failed(verdicts: list[Verdict]) -> Iterator[Finding]:
    for why in dict.fromkeys(one.why for one in verdicts if one.verdict == _FAILS):
        these = [one.line for one in verdicts if one.verdict == _FAILS and one.why == why]
        if _EXCEPTION.match(why):
            remedy = "report it with this line: the plugin made a mistake, and native code serves"
        else:
            remedy = "correct the setting; the server does not start with it"
        yield Finding(
            "plugin-failed",
            Severity.PROBLEM,
            f"the plugin ended in an error and stays off: {_short(why)}",
            (_quoted(these),),
            (remedy,),
            numbers={"error": why[:_SHOWN], "lines": len(these)},
        )


_RESTART = "plan a restart of the worker: its slot and pages are never used again until then"
_TIMEOUT = "raise fence_timeout_s if a forward may take longer"


def _quarantined(lost: list[tuple[Line, str, str | None]]) -> Iterator[Finding]:
    if not lost:
        return
    slots = {(line.process, line.pid, slot) for line, slot, _ in lost}
    left = f"; {lost[-1][2]}" if lost[-1][2] else ""
    yield Finding(
        "quarantined",
        Severity.PROBLEM,
        f"{len(slots)} workspace slot{'s' * (len(slots) != 1)} quarantined: work of the device that nobody can prove "
        f"to be over{left}",
        (_quoted([line for line, _, _ in lost]),),
        (_RESTART, _TIMEOUT),
        numbers={"slots": len(slots)},
    )


def _disagree(verdicts: list[Verdict]) -> Finding | None:
    """The last word of every process; one that has no name may be any, and each of its words counts."""
    last = {(one.line.process, one.line.pid) if one.line.process else n: one for n, one in enumerate(verdicts)}
    # Off in a mode that was asked for is right in the role that has no use for it.
    words = {one.verdict: one for one in last.values() if one.verdict != _OFF or one.mode == _OFF}
    if _ON not in words or len(words) < 2:
        return None
    return Finding(
        "nodes-disagree",
        Severity.PROBLEM,
        f"processes of one server disagree about this plugin: {' and '.join(words)}",
        tuple(f"{word}: {_short(one.line.whole)}" for word, one in words.items()),
        ("give every node the same versions, options, AFD_DSV4_* and VLLM_PLUGINS, and restart all",),
        numbers={"verdicts": list(words)},
    )


def of_page(samples: Iterable[tuple[str, Labels, float]]) -> Said:
    """Read the series of ours on a metrics page."""
    decided: dict[tuple[str, str], int] = {}
    reasons: dict[str, int] = {}
    lost: dict[str, int] = {}
    on = False
    for name, labels, value in samples:
        if not name.startswith("afd_dsv4_") or not math.isfinite(value) or not 0 < value < 1 << 53:
            continue
        count = int(value)
        on = on or "rank" in labels  # only workers have one, and only where the plugin is on
        if name == "afd_dsv4_decisions_total":
            key = (labels.get("mode", "?"), labels.get("verdict", "?"))
            decided[key] = decided.get(key, 0) + count
        elif name == "afd_dsv4_refusals_total" and labels.get("what") == "configuration":
            reasons[labels.get("reason", "?")] = reasons.get(labels.get("reason", "?"), 0) + count
        elif name == "afd_dsv4_quarantined_total":
            who = f"engine {labels.get('engine', '?')}, rank {labels.get('rank', '?')}"
            lost[who] = lost.get(who, 0) + count
    verdicts = {verdict for _, verdict in decided}
    findings = [*_refused_on_page(decided, reasons), *_quarantined_on_page(lost)]
    on = on or _ON in verdicts
    differ = _ON in verdicts and _REFUSED in verdicts
    if differ:
        findings.append(
            Finding(
                "nodes-disagree",
                Severity.PROBLEM,
                "processes of one server disagree about this plugin: on and refused",
                (f"afd_dsv4_decisions_total counts {_counted(decided)}.",),
                ("give every node the same versions, options, AFD_DSV4_* and VLLM_PLUGINS, and restart all",),
                numbers={"verdicts": sorted(verdicts)},
            )
        )
    return Said(None, None if on and _REFUSED in verdicts else on, tuple(findings), on or bool(verdicts))


def _counted(decided: dict[tuple[str, str], int]) -> str:
    return ", ".join(f"{verdict} {count:,} (mode {mode!r})" for (mode, verdict), count in decided.items())


def _refused_on_page(decided: dict[tuple[str, str], int], reasons: dict[str, int]) -> Iterator[Finding]:
    for mode, count in ((mode, count) for (mode, verdict), count in decided.items() if verdict == _REFUSED):
        yield Finding(
            "plugin-refused",
            Severity.PROBLEM,
            f"mode {mode!r} was refused when the server started, and native code serves",
            (f"afd_dsv4_decisions_total counts {count:,} process{'es' * (count != 1)} that refused it.",),
            (
                *(f"the reason {reason!r}, {times:,} time{'s' * (times != 1)}" for reason, times in reasons.items()),
                "the server's log says what to change for each (give it with --log)",
            ),
            numbers={"mode": mode, "processes": count, "reasons": list(reasons)},
        )


def _quarantined_on_page(lost: dict[str, int]) -> Iterator[Finding]:
    if not lost:
        return
    count = sum(lost.values())
    yield Finding(
        "quarantined",
        Severity.PROBLEM,
        f"{count:,} lease{'s' * (count != 1)} quarantined: work of the device that nobody can prove to be over",
        (f"afd_dsv4_quarantined_total counts {', '.join(f'{n:,} ({who})' for who, n in lost.items())}.",),
        (_RESTART, _TIMEOUT),
        numbers={"leases": count},
    )
