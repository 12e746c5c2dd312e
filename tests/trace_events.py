# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The rules of the Trace Event Format for the parts that `workspace/chrome.py` uses.

Perfetto's own trace processor (`trace_processor.py`) is one reader, takes seconds to ask, and passes over much without
a word. These are the rules that the format documents, for every reader and every part of a trace, and the one that
Perfetto adds, without which it drops slices: on a track they nest, to the nanosecond.
"""

from __future__ import annotations

import json
from typing import Any


def valid(document: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Check a document; returns its slices by track, outer ones first."""
    assert document["displayTimeUnit"] == "ns"
    events = json.loads(json.dumps(document, allow_nan=False))["traceEvents"]
    slices: dict[int, list[dict[str, Any]]] = {}
    arrows: dict[int, list[dict[str, Any]]] = {}
    named = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert event["pid"] == 1
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                named.add(event["tid"])
            continue
        assert event["ts"] >= 0
        assert event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault(event["tid"], []).append(event)
        elif event["ph"] in ("s", "f"):
            assert event["ph"] == "s" or event["bp"] == "e"  # binds to the slice around it, not to the next one
            arrows.setdefault(event["id"], []).append(event)
        else:
            assert event["ph"] == "i"
            assert event["s"] in ("t", "p")
    assert set(slices) <= named
    for track in slices.values():
        track.sort(key=lambda event: (event["ts"], -event["dur"]))
        around: list[int] = []  # ends of the slices that one is in
        for event in track:
            begin = round(event["ts"] * 1000)  # a reader counts whole nanoseconds
            end = begin + round(event["dur"] * 1000)
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)
    for start, finish in arrows.values():
        assert (start["ph"], finish["ph"]) == ("s", "f")
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"])
        assert start["ts"] <= finish["ts"]
        for end in (start, finish):
            assert any(s["ts"] <= end["ts"] <= s["ts"] + s["dur"] for s in slices[end["tid"]])
    return slices
