# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The trace: what the arena ordered, in the order in which the host asked for it.

Problem: a race leaves wrong numbers behind and no word about where it was; what is needed to find it is the order of a
few calls that are long gone.
Way: one tuple per call in a bounded ring, which is cheap enough to be left on.
Not here: any judgement (`order.py`).
"""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns
from typing import Any

Record = tuple[Any, ...]
"""`(ns, op, *fields)`, ns of `time.perf_counter_ns`."""


class Trace:
    """A ring of records, the newest of which are kept.

    Args:
        capacity: most records kept; None keeps all.
    """

    def __init__(self, capacity: int | None = 65536) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"a trace keeps at least one record, got capacity {capacity}; None keeps all")
        self._ring: deque[Record] = deque(maxlen=capacity)
        self._added = 0

    def add(self, op: str, *fields: Any) -> None:
        """Keep one record. The caller holds the lock under which the order was made."""
        self._ring.append((perf_counter_ns(), op, *fields))
        self._added += 1

    def records(self) -> list[Record]:
        """What is kept, oldest first."""
        return list(self._ring)

    @property
    def dropped(self) -> int:
        """How many records are no longer kept."""
        return self._added - len(self._ring)

    def clear(self) -> None:
        """Begin anew, as if nothing had been recorded."""
        self._ring.clear()
        self._added = 0
