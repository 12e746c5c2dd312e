# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""One adapter per exact stack, with or without afd-plugin: what it is called and what it covers.

An adapter imports its stack at its top, so it is named here by strings; importing this package imports none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from afd_dsv4.compat.stack import AfdPin


@dataclass(frozen=True)
class Adapter:
    """What the gate has to know.

    Attributes:
        worker: qualified name of the worker class that stands in for vllm-ascend's own.
        covers: features of the engine that it is right with, of `gate.COVERABLE`.
    """

    worker: str
    covers: frozenset[str]


#: By name of the stack, see `stack.InstalledStack.name`; where it is for AFD, of both, see `full_name`.
ADAPTERS: Final[dict[str, Adapter]] = {
    "vllm-ascend-0.23.0": Adapter(
        worker="afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.worker.AfdDsv4Worker",
        covers=frozenset({"async_scheduling", "full_graphs", "mtp", "optimistic_starts", "overlap"}),
    ),
    "vllm-ascend-80d8c194f": Adapter(
        worker="afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f.worker.AfdDsv4Worker",
        covers=frozenset({"async_scheduling", "full_graphs", "mtp", "optimistic_starts", "overlap"}),
    ),
    "vllm-ascend-80d8c194f+afd-plugin-85e826e": Adapter(
        worker="afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f_afd_85e826e.worker.AfdDsv4AttentionWorker",
        covers=frozenset({"afd", "async_scheduling", "ubatches"}),
    ),
}


def full_name(stack_name: str | None, pin: AfdPin | None) -> str | None:
    """Name of a stack with afd-plugin, None where either is not known, or they were not made for each other."""
    return f"{stack_name}+{pin.name}" if stack_name and pin and pin.stack == stack_name else None


def worker_class(stack_name: str | None) -> str | None:
    """Name of the worker class for a stack, None where there is no adapter."""
    adapter = ADAPTERS.get(stack_name) if stack_name else None
    return adapter.worker if adapter else None
