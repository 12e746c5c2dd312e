# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the soak of AFD has found, and whether that is what must be.

Totals of ranks, threads and processes add up; an outcome that is not the expected one is a violation like one of order.
What threads swallow is kept, not printed: whoever has planted it knows what it must say.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from afd_dsv4.softnpu import runtime as softnpu
from tests.afd.points import Mode, Point


@dataclass
class Totals:
    """What was done and found. They add up.

    Attributes:
        stages: layers times stages, by mode.
        hits: how often each point was hit, by mode.
        violations: of order, and outcomes that were not the expected ones.
        lost: slots, staging entries and pages that are neither free nor quarantined and counted.
        fatal: forwards quarantined with an item under way.
        swallowed: exceptions of threads that nobody raised again.
    """

    stages: Counter[Mode] = field(default_factory=Counter)
    hits: Counter[tuple[Mode, Point]] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    ranks: int = 0
    forwards: int = 0
    rows: int = 0
    corrupt: int = 0
    items: int = 0
    zero_token_items: int = 0
    audited: int = 0
    quarantined: int = 0
    fatal: int = 0
    swallowed: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def expect(self, outcome: bool, what: str) -> None:
        """Note an outcome that is not the expected one."""
        if not outcome:
            self.violations.append(f"unexpected outcome: not so that {what}")

    def expect_raise(self, error: type[Exception], words: str, call: Callable[[], object], what: str) -> None:
        """Note a refusal that does not come, or does not say why."""
        try:
            call()
        except error as found:
            self.expect(words in str(found), f"{what} says {words!r}, but: {found}")
        else:
            self.expect(False, f"{what} raises {error.__name__}")


class Lines(logging.Handler):
    """Keeps what afd-dsv4 logs as errors, and what threads end with.

    Attributes:
        found: messages.
        swallowed: what Python would print of exceptions that end a thread.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self.swallowed: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.found.append(record.getMessage())


def said(error: BaseException | None) -> str:
    """All that an error and its causes say."""
    parts = []
    while error is not None and len(parts) < 10:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return " <- ".join(parts)


@contextmanager
def quiet(totals: Totals) -> Iterator[Lines]:
    """Count what threads swallow instead of printing it, and keep what is logged."""
    hook, lines = threading.excepthook, Lines()
    logger = logging.getLogger("vllm.plugins.afd_dsv4")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(lines)

    def swallowed(thread: threading.ExceptHookArgs) -> None:
        totals.swallowed += 1
        lines.swallowed.append(said(thread.exc_value))

    threading.excepthook = swallowed
    collects = gc.isenabled()
    gc.disable()  # torch records events where it frees pinned memory, which a planted fault would hit
    gc.collect()  # what is garbage must not be kept with the rest
    frozen = gc.get_freeze_count()
    gc.freeze()  # what is there already need not be looked at after each rank
    try:
        yield lines
    finally:
        threading.excepthook = hook
        logger.removeHandler(lines)
        logger.propagate = propagate
        softnpu.set_schedule(0)
        softnpu.clear_faults()
        if not frozen:
            gc.unfreeze()
        if collects:
            gc.enable()
        gc.collect()


def missed(totals: Totals, mode: Mode) -> list[Point]:
    """Points that were not hit."""
    return [point for point in Point if mode in point.where and not totals.hits[mode, point]]


def failures(totals: Totals, blind: Sequence[str], planted: tuple[int, int], modes: Sequence[Mode]) -> list[str]:
    """Everything for which the soak fails, in words."""
    found = [f"a control was blind: {line}" for line in blind]
    found += [
        f"point {point.number} ({point.what}) was not hit in {mode.value}"
        for mode in modes
        for point in missed(totals, mode)
    ]
    if planted[0] != planted[1] or not planted[1]:
        found.append(f"{planted[1] - planted[0]} of {planted[1]} planted workspace tensors were not found")
    if totals.violations or totals.corrupt or totals.lost.total():
        found.append("order or outcomes were violated, rows corrupted, or slots lost")
    return found


def report(totals: Totals, modes: Sequence[Mode], seconds: float) -> None:
    """Say what was done and found."""
    print("points, hit in " + ", ".join(mode.value for mode in modes))
    for point in Point:
        hits = " ".join(f"{totals.hits[mode, point] if mode in point.where else '-':>6}" for mode in modes)
        print(f"  {point.number:3} {hits}  {point.what}")
    for mode in modes:
        print(f"layers-times-stages of {mode.value}: {totals.stages[mode]}")
    print(
        f"ranks {totals.ranks}, forwards {totals.forwards}, rows compared {totals.rows}, "
        f"calls audited {totals.audited}\nitems answered {totals.items}, without tokens {totals.zero_token_items}\n"
        f"forwards quarantined with an item under way {totals.fatal}, leases quarantined {totals.quarantined}, "
        f"exceptions swallowed by threads {totals.swallowed}\n"
        f"lost: {', '.join(f'{count} {what}' for what, count in totals.lost.items() if count) or 'nothing'}\n"
        f"time: {seconds:.0f} s"
    )
    for what in totals.violations[:20]:
        print(f"  {what}")
