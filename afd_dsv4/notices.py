# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a worker says in its log, once, with metrics or without: leases that are quarantined.

Problem: a quarantined lease takes a slot and pages for good, and an operator must learn of it also where nobody reads
metrics.
Way: the arena counts them; once a step that number is looked at, and where it has grown each slot that is lost is
named.
Not here: what has happened to the lease (`workspace/arena.py`), and the number itself on a page (`metrics.py`).
"""

from __future__ import annotations

import logging
from typing import Any, Final

from afd_dsv4.workspace.arena import WorkspaceArena

#: vLLM configures the loggers below its own.
_logger: Final = logging.getLogger("vllm.plugins.afd_dsv4")


class Notices:
    """Names each slot of an arena that is quarantined, once.

    Args:
        arena: of the worker.
    """

    def __init__(self, arena: WorkspaceArena[Any]) -> None:
        self._arena = arena
        self._said: set[int] = set()
        self._quarantined = 0

    def step(self) -> None:
        """Look once a step; one comparison as long as there is nothing."""
        arena = self._arena
        if arena.counters.quarantined == self._quarantined:
            return
        self._quarantined = arena.counters.quarantined
        lost = [slot for slot in arena.slots if slot.quarantined]
        for slot in lost:
            if slot.index not in self._said:
                self._said.add(slot.index)
                _logger.error(
                    "afd-dsv4: slot %d is quarantined: nobody can prove that %r is over. Neither it nor the pages of "
                    "its requests are used again; %d of %d slots are left. Plan a restart of this worker",
                    slot.index,
                    slot.quarantined,
                    len(arena.slots) - len(lost),
                    len(arena.slots),
                )
