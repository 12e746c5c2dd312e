# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The two functions that vLLM calls in every process: ``register`` and ``platform``.

Problem: vLLM calls a general plugin's function in the front end, the engine core, every worker and every
model-inspection process, possibly more than once, and an exception from it ends that process. A plugin that fails to
import, on the other hand, is only logged and then missed.

Chosen way: ``register`` never raises; it reads the settings, asks the gate, logs one line about its own state per
process and keeps that state for :func:`state`. Settings that cannot be read leave the plugin off, with one error line.
``platform`` always returns None, because two active platform plugins stop vLLM. Neither imports torch or vLLM.

What it does not do: in this release it wraps nothing. Every upstream symbol stays the identical object.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Final

from afd_dsv4 import __version__
from afd_dsv4.config import Settings, from_environment
from afd_dsv4.gate import Decision, decide
from afd_dsv4.geometry import InputError

# A child of vLLM's own logger, so that the line appears where users look, with vLLM's handlers and level, and without
# importing vLLM.
_logger: Final = logging.getLogger("vllm.plugins.afd_dsv4")


@dataclass(frozen=True)
class PluginState:
    """What :func:`register` did in this process.

    :param pid: process that ran it; a forked child that inherited the state sees its parent's id here.
    :param calls: how often it ran.
    :param settings: as read from the environment, None where ``error`` is set.
    :param decision: the gate's decision, None where ``error`` is set.
    :param error: what went wrong, None where nothing did.
    """

    pid: int
    calls: int
    settings: Settings | None
    decision: Decision | None
    error: str | None


_state: PluginState | None = None


def state() -> PluginState | None:
    """Return what :func:`register` last recorded in this process, None if it never ran."""
    return _state


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: decide, report, never raise. May run any number of times."""
    global _state
    previous = _state
    calls = previous.calls + 1 if previous else 1
    try:
        settings = from_environment(os.environ)
        decision = decide(settings)
        _state = PluginState(os.getpid(), calls, settings, decision, None)
        level = logging.WARNING if decision.refused else logging.INFO
        _report(previous, level, decision.line())
    except InputError as error:
        _fail(previous, calls, " ".join(str(error).split()))
    except Exception as error:  # an exception here would end the host process
        _fail(previous, calls, f"{type(error).__name__}: {error}")


def _fail(previous: PluginState | None, calls: int, error: str) -> None:
    """Stay off. A logger that fails too must not hurt the host; the state still tells."""
    global _state
    _state = PluginState(os.getpid(), calls, None, None, error)
    try:
        _report(previous, logging.ERROR, f"stays off: {error}")
    except Exception:
        return


def _report(previous: PluginState | None, level: int, line: str) -> None:
    """Log once per process and outcome: vLLM may load plugins again, and the log should not fill up."""
    now = _state
    assert now is not None
    if previous is None or (previous.pid, previous.decision, previous.error) != (now.pid, now.decision, now.error):
        _logger.log(level, "afd-dsv4 %s, %s", __version__, line)


def platform() -> None:
    """Entry point of the group ``vllm.platform_plugins``: claim no platform, ever."""
