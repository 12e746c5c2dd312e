# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Who is running: the identity of one execution.

An execution is one forward of one uBatch that may launch a compressor. Its generation is minted here, once per runner
forward; identifiers of connectors are never reused for it, since both stages of a connector share theirs.
"""

from __future__ import annotations

import enum
import itertools
import threading
from dataclasses import dataclass
from typing import NewType

Generation = NewType("Generation", int)


class Domain(enum.Enum):
    """How the work of an execution reaches the device."""

    EAGER = "eager"
    GRAPH = "graph"


class ExecutionKind(enum.Enum):
    """What an execution is for. Only live ones have requests."""

    LIVE = "live"
    DUMMY = "dummy"
    PROFILE = "profile"
    CAPTURE = "capture"


@dataclass(frozen=True)
class ExecutionId:
    """The key of a lease.

    Attributes:
        generation: the runner forward.
        ubatch: index of the DBO thread or CAM stage; 0 where there is none.
        substep: 0 for the target model, 1 and up for draft lanes that own a compressor.
        domain: eager or graph.
        kind: live, dummy, profile or capture.
    """

    generation: Generation
    ubatch: int = 0
    substep: int = 0
    domain: Domain = Domain.EAGER
    kind: ExecutionKind = ExecutionKind.LIVE

    def __post_init__(self) -> None:
        if self.generation < 1 or self.ubatch < 0 or self.substep < 0:
            raise ValueError(f"generation counts from 1, ubatch and substep from 0, got {self}")

    def __str__(self) -> str:
        where = f"generation {self.generation} ubatch {self.ubatch} substep {self.substep}"
        return f"{where} ({self.kind.value}, {self.domain.value})"


class GenerationMint:
    """Hands out generations, each once, from any thread."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._lock = threading.Lock()

    def mint(self) -> Generation:
        """A generation that was not handed out before."""
        with self._lock:
            return Generation(next(self._next))
