# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The numbered points of a forward's life at which the soak plants a fault, a cancellation or an end.

A point's number is its place in this list. `where` says in which modes it exists, `ends` whether the rank ends there.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace


class Mode(enum.Enum):
    """How Attention and FFN are coupled, and what a forward is cut into."""

    CAM = "two-stage CAM"
    DBO = "two-thread DBO on CAMP2P"
    SYNC = "single-uBatch CAMP2P"


CAM, DBO, SYNC = frozenset({Mode.CAM}), frozenset({Mode.DBO}), frozenset({Mode.SYNC})
TWO, ALL, P2P = CAM | DBO, CAM | DBO | SYNC, DBO | SYNC


class Point(enum.Enum):
    """A point. Values: what happens, in which modes, and whether it ends the rank in any case."""

    # Before anything is launched
    BEFORE_BEGIN = "exception before the executions begin", ALL, False
    BETWEEN_BEGINS = "exception between the begins of two uBatches", TWO, False
    UPLOAD_BEFORE = "the copy of the page lists fails before it is queued", ALL, False
    UPLOAD_BEHIND = "the copy of the page lists fails behind it", ALL, False
    EXHAUSTED = "a forward begins while every slot is held", ALL, False
    # Inside a forward
    BEFORE_LAUNCH = "exception before a compressor launch", ALL, False
    IN_LAUNCH = "the compressor operator raises", ALL, False
    AFTER_LAUNCH = "exception behind a compressor launch", ALL, False
    BEFORE_SEND = "exception before a send", ALL, False
    WORKSPACE_SENT = "a workspace tensor is handed to the connector", ALL, False
    WRONG_SHAPE = "a payload of another shape", ALL, False
    IN_SEND = "the send's operator raises, its entry queued already", ALL, False
    AFTER_SEND = "exception behind a send, before its receive", ALL, False
    IN_RECV = "exception in a receive", ALL, False
    AFTER_RECV = "exception behind a receive", ALL, False
    # The threads of uBatches
    BEFORE_BARRIER = "a uBatch's thread fails before the barrier", DBO, False
    AFTER_BARRIER = "a uBatch's thread fails behind the barrier", DBO, False
    IN_YIELD = "a uBatch's thread fails where it hands the baton over", DBO, False
    IN_EXIT = "a uBatch's context fails as it is left", DBO, False
    # Requests
    CANCEL_BETWEEN = "a request is cancelled between two steps", ALL, False
    CANCEL_INSIDE = "a request is cancelled with its forwards in flight, and its seat taken", ALL, False
    IDLE = "a forward without requests, with its connector traffic", ALL, False
    # What nobody can prove to be over
    RECORD_FAILS = "the event of a fence cannot be recorded", ALL, True
    QUERY_FAILS = "the event of a fence cannot be queried", ALL, True
    NEVER_ACQUIRE = "an answer that never comes, found as the next forward begins", ALL, True
    NEVER_WATCHED = "an answer that never comes, found by the watchdog", ALL, True
    FFN_DIES = "the FFN role fails with an item in hand", ALL, True
    # Ends
    CLOSE_PENDING = "connector closed with a receive pending", ALL, True
    CLOSE_RAISES = "connector's close raises", ALL, True
    USED_AFTER_CLOSE = "connector used after it was closed", ALL, True
    SHUTDOWN_OPEN = "shutdown with leases open", ALL, True
    RESTART = "restart with a new generation, and old leases asked for", ALL, True

    def __init__(self, what: str, where: frozenset[Mode], ends: bool) -> None:
        self.what = what
        self.where = where
        self.ends = ends

    @property
    def number(self) -> int:
        """Counts from 1, in the order above."""
        return [*Point].index(self) + 1


#: Points that are passed under this name by model, connector, wire or threads.
HOOKS = {
    Point.BEFORE_BEGIN: "before begin",
    Point.BEFORE_LAUNCH: "before launch",
    Point.IN_LAUNCH: "in launch",
    Point.AFTER_LAUNCH: "after launch",
    Point.BEFORE_SEND: "before send",
    Point.IN_SEND: "in send",
    Point.AFTER_SEND: "after send",
    Point.IN_RECV: "in recv",
    Point.AFTER_RECV: "after recv",
    Point.BEFORE_BARRIER: "enter",
    Point.AFTER_BARRIER: "ready",
    Point.IN_YIELD: "yield",
    Point.IN_EXIT: "exit",
    Point.BETWEEN_BEGINS: "begin",
    Point.UPLOAD_BEFORE: "before upload",
    Point.UPLOAD_BEHIND: "behind upload",
}


class Planted(RuntimeError):
    """A fault that a test injected; it names its point."""

    def __init__(self, point: Point) -> None:
        super().__init__(f"planted at point {point.number}: {point.what}")
        self.point = point


class Planter(SimpleNamespace):
    """Raises where it was told to.

    Attributes:
        point: where; None for nowhere.
        skip: how often the point is passed before.
        hit: whether it has raised.
    """

    def __init__(self) -> None:
        super().__init__(point=None, skip=0, hit=False)

    def arm(self, point: Point | None, skip: int = 0) -> None:
        """Raise when the point is passed for the `skip + 1`-th time."""
        self.point, self.skip, self.hit = point, skip, False

    def at(self, name: str) -> None:
        """A point is passed."""
        if self.point is None or self.hit or HOOKS.get(self.point) != name:
            return
        if self.skip:
            self.skip -= 1
            return
        self.hit = True
        raise Planted(self.point)
