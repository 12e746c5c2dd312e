# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Small programs of two streams whose result tells whether the software NPU kept their order."""

from __future__ import annotations

from typing import Any

import pytest

from afd_dsv4.softnpu import runtime as rt
from tests.npu_streams import streams_apart

torch = pytest.importorskip("torch")


def hand_offs(waits: bool, steps: int, **schedule: Any) -> bool:
    """Two streams hand one buffer back and forth; True when every hand-off read what was written.

    Args:
        waits: each stream waits for the other before it takes the buffer.
        steps: hand-offs.
        schedule: arguments of `rt.set_schedule`, set once the buffers are there; none leaves it as it is.
    """
    producer, consumer = streams_apart(2)
    buffer, rows = torch.zeros(16, device="npu"), torch.zeros(steps, 16, device="npu")
    torch.npu.synchronize()
    if schedule:
        rt.set_schedule(**schedule)
    for step in range(steps):
        with torch.npu.stream(producer):
            if waits:
                producer.wait_stream(consumer)
            buffer.fill_(float(step + 1))
        with torch.npu.stream(consumer):
            if waits:
                consumer.wait_stream(producer)
            rows[step].copy_(buffer)
    torch.npu.synchronize()
    return torch.equal(rows.cpu(), torch.arange(1.0, steps + 1)[:, None].expand(steps, 16))


class ForkedGraph:
    """A captured graph that forks to a second stream and joins it: of x it makes (2 x + 1) + 10 (2 x)."""

    def __init__(self) -> None:
        (side,), self._x, self._out = streams_apart(1), torch.ones(8, device="npu"), torch.zeros(8, device="npu")
        torch.npu.synchronize()
        self._graph = torch.npu.NPUGraph()
        with torch.npu.graph(self._graph):
            main = torch.npu.current_stream()
            double = self._x * 2
            side.wait_stream(main)
            with torch.npu.stream(side):
                plus = double + 1
            ten = double * 10
            main.wait_stream(side)
            self._out.copy_(plus + ten)

    def right(self, *values: float) -> bool:
        """Replay it with each value; True when every result is the right one."""
        found = []
        for value in values:
            self._x.fill_(value)
            self._graph.replay()
            found.append(torch.equal(self._out.cpu(), torch.full((8,), (value * 2 + 1) + value * 20)))
        return all(found)
