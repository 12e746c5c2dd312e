# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Decides whether the plugin may change anything in this process, and says why.

Problem: a plugin that silently stays off looks exactly like one that works, until the queue is stuck. So every
decision carries its reasons, and a mode that was asked for and refused is told apart from a mode that was never asked
for.

Chosen way: a pure function from the settings to a frozen :class:`Decision`. In this release the integration into the
model runner does not exist, hence every mode ends in "off": ``off`` because it was asked for, ``afd`` and ``colocated``
as a refusal.

What it does not do: it reads no environment, looks at no installed package and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from afd_dsv4.config import Mode, Settings


@dataclass(frozen=True)
class Decision:
    """What one process may do.

    :param requested: the mode that was asked for.
    :param active: whether anything upstream may be wrapped. Always False in this release.
    :param refused: whether a mode other than ``off`` was asked for and not given.
    :param reasons: one sentence each, never empty.
    """

    requested: Mode
    active: bool
    refused: bool
    reasons: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.reasons:
            raise ValueError("a decision needs at least one reason")
        if self.active and self.refused:
            raise ValueError("a decision cannot be active and refused at once")

    def line(self) -> str:
        """Return the decision as one line for the log."""
        verdict = "on" if self.active else "refused, stays off" if self.refused else "off"
        return f"mode {self.requested.value!r}: {verdict} ({'; '.join(self.reasons)})"


def decide(settings: Settings) -> Decision:
    """Decide on the mode that the settings ask for."""
    mode = settings.mode
    if mode is Mode.OFF:
        return Decision(mode, active=False, refused=False, reasons=("no other mode was asked for",))
    reason = "not available in this release: the integration into the model runner is not there yet, native code runs"
    return Decision(mode, active=False, refused=True, reasons=(reason,))
