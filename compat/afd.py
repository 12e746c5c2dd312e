# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Lets a worker class of ours stand where afd-plugin chooses one itself.

Problem: with `worker_cls` left to vLLM, afd-plugin maps the platform's own worker class to its own, and raises at any
other name; it does so behind the platform's say in a configuration, where the plugin has entered its class already.
Way: its function is asked no more about a configuration that has one of ours for AFD. In place from the first
configuration with AFD that the plugin is on for, in processes that make configurations, until `undo`. A worker class
that is named (`--worker-cls afd_plugin...`) is not chosen by afd-plugin, and needs none of this.
Not here: the class, which is one of afd-plugin's by inheritance (`adapters/`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from afd_dsv4.compat.adapters import ADAPTERS
from afd_dsv4.compat.contract import Verdict
from afd_dsv4.compat.patch import Patch, PatchSet
from afd_dsv4.gate import AFD


def _select(native: Callable[[Any], None]) -> Callable[[Any], None]:
    ours = {adapter.worker for adapter in ADAPTERS.values() if AFD in adapter.covers}

    def select(vllm_config: Any) -> None:
        if vllm_config.parallel_config.worker_cls not in ours:
            native(vllm_config)

    return select


_CHOICE: Final = PatchSet(
    "afd-plugin's choice of a worker class",
    [
        Patch(
            target="afd_plugin.compat.patches.config_validation:_select_afd_worker_for_auto",
            make=_select,
            reason="it raises at a worker class that is not the platform's own, and comes after the platform's say",
            removal="an afd-plugin that leaves a subclass of its worker as it is",
            alone=True,
        )
    ],
)


def let_ours_stand(verdict: Verdict) -> None:
    """Put it in place; nothing where it is.

    Args:
        verdict: of the installed stack with afd-plugin, see `contract.verify`.

    Raises:
        DriftError, PatchError: see `PatchSet.apply`. Nothing was changed.
    """
    _CHOICE.apply(verdict)


def undo() -> None:
    """Give afd-plugin its function back; nothing where it has it."""
    _CHOICE.undo()
