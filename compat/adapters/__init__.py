# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""One adapter per exact stack: what it is called and what it covers.

An adapter imports its stack at its top, so it is named here by strings; importing this package imports none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Adapter:
    """What the gate has to know.

    Attributes:
        worker: qualified name of the worker class that stands in for vllm-ascend's own.
        covers: features of the engine that it is right with, of `gate.COVERABLE`.
    """

    worker: str
    covers: frozenset[str]


#: By name of the stack, see `stack.InstalledStack.name`.
ADAPTERS: Final[dict[str, Adapter]] = {
    "vllm-ascend-0.23.0": Adapter(
        worker="afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.worker.AfdDsv4Worker",
        covers=frozenset({"async_scheduling", "full_graphs", "mtp", "optimistic_starts", "overlap"}),
    ),
    "vllm-ascend-80d8c194f": Adapter(
        worker="afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f.worker.AfdDsv4Worker",
        covers=frozenset({"async_scheduling", "full_graphs", "mtp", "optimistic_starts", "overlap"}),
    ),
}


def worker_class(stack_name: str | None) -> str | None:
    """Name of the worker class for a stack, None where there is no adapter."""
    adapter = ADAPTERS.get(stack_name) if stack_name else None
    return adapter.worker if adapter else None
