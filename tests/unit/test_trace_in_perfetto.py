# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The picture of a trace, read by Perfetto's own trace processor: nothing dropped, nothing moved."""

from __future__ import annotations

import json

import pytest

from afd_dsv4.workspace.chrome import chrome
from tests.trace_processor import Perfetto
from tests.unit.test_trace import PLANTED, STORY

SLICES = """
    select slice.ts, slice.dur, slice.name, slice.category, thread.name as track
    from slice left join thread_track on slice.track_id = thread_track.id left join thread using (utid)
    order by slice.ts, slice.dur desc
"""
ARROWS = """
    select out.ts as leaves, out.name as of, into_.ts as arrives, into_.name as at
    from flow join slice out on slice_out = out.id join slice into_ on slice_in = into_.id
    order by out.ts
"""


def test_perfetto_reads_every_slice_and_every_arrow_where_the_trace_has_them() -> None:
    with Perfetto(chrome(STORY)) as read:
        assert read.faults() == []
        assert read.rows(SLICES) == [
            (0, 10_000, "lease 1", "lease", "slot 0"),
            (4_000, 1_000, "stream 7: 3/c4", "touch", "slot 0"),
            (7_000, 1_000, "stream 8", "touch", "slot 0"),
            (11_000, 5_000, "lease 2", "lease", "slot 0"),
            (14_000, 1_000, "stream 7: *", "touch", "slot 0"),
            (16_000, 0, "quarantine of lease 2", "lease", "slot 0"),
            (17_000, 0, "reset", "arena", None),
            (18_000, 0, "close", "arena", None),
        ]
        assert read.rows(ARROWS) == [
            (4_000, "stream 7: 3/c4", 7_000, "stream 8"),
            (7_000, "stream 8", 14_000, "stream 7: *"),
        ]


def test_perfetto_says_what_it_drops() -> None:
    """Negative control of `faults`."""
    document = json.loads(json.dumps(chrome(STORY)))
    PLANTED["a nanosecond too long"](document)
    PLANTED["an arrow back in time"](document)
    with Perfetto(document) as read:
        assert dict(read.faults()) == {"slice_drop_overlapping_complete_event": 1, "flow_end_without_start": 1}


def test_perfetto_drops_a_slice_of_an_unknown_phase_without_a_word() -> None:
    """Which is why slices and arrows are compared one by one."""
    document = json.loads(json.dumps(chrome(STORY)))
    PLANTED["an unknown phase"](document)
    with Perfetto(document) as read:
        assert read.faults() == []
        assert (0, 10_000, "lease 1", "lease", "slot 0") not in read.rows(SLICES)


def test_perfetto_refuses_what_is_no_trace() -> None:
    with pytest.raises(Perfetto.Error):
        Perfetto({"traceEvents": "none"}).rows(SLICES)
