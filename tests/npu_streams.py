# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Streams that a test can rely on to be different ones.

torch deals the streams of a pool of 32 in turn. Who keeps one for long meets it again: `torch.npu.graph` keeps the one
that it captures on for the life of the process. Two streams that are one need no order, and a control finds nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")


def streams_apart(count: int, *others: Any) -> list[Any]:
    """`count` streams: none of each other, of `others`, the current one, or the one that torch captures on."""
    kept = [*others, torch.npu.current_stream(), torch.npu.graph.default_capture_stream]
    taken = {stream.stream_id for stream in kept if stream is not None}
    found: list[Any] = []
    while len(found) < count:
        stream = torch.npu.Stream()
        if stream.stream_id not in taken:
            taken.add(stream.stream_id)
            found.append(stream)
    return found
