# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Decides whether the plugin may change anything in this process, and says why.

Problem: a plugin that silently stays off looks exactly like one that works, until the queue is stuck. So every
decision carries its reasons, and a mode that was asked for and refused is told apart from a mode that was never asked
for.

Chosen way: a pure function from the requested mode to a frozen :class:`Decision`. In this release the integration
into the model runner does not exist, hence every mode ends in "off": ``off`` because it was asked for, ``afd`` and
``colocated`` as a refusal.

What it does not do: it looks at no installed package, imports nothing of the stack and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from afd_dsv4.config import Mode

#: Environment variable with the requested mode. A variable, because plugin functions run before vLLM has a
#: configuration, and because some vllm-ascend versions refuse an unknown key in ``additional_config``.
MODE_VARIABLE: Final = "AFD_DSV4_MODE"

#: Every mode that has a meaning.
MODES: Final = tuple(mode.value for mode in Mode)


@dataclass(frozen=True)
class Decision:
    """What one process may do.

    :param requested: the mode as it was asked for, spelled as found.
    :param active: whether anything upstream may be wrapped. Always False in this release.
    :param refused: whether a mode other than ``off`` was asked for and not given.
    :param reasons: one sentence each, never empty.
    """

    requested: str
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
        return f"mode {self.requested!r}: {verdict} ({'; '.join(self.reasons)})"


def decide(requested: str | None) -> Decision:
    """Decide on the requested mode.

    :param requested: the value of :data:`MODE_VARIABLE`, or None where it is not set; surrounding blanks and case do
        not count.
    :returns: the decision. An unknown mode is a refusal, not an exception: the caller runs inside somebody else's
        start-up.
    """
    if requested is None or not requested.strip():
        return Decision("off", active=False, refused=False, reasons=(f"{MODE_VARIABLE} is not set",))
    mode = requested.strip().lower()
    if mode not in MODES:
        reason = f"unknown mode; set {MODE_VARIABLE} to one of {', '.join(MODES)}"
        return Decision(requested, active=False, refused=True, reasons=(reason,))
    if mode == "off":
        return Decision("off", active=False, refused=False, reasons=(f"{MODE_VARIABLE}=off",))
    reason = "not available in this release: the integration into the model runner is not there yet, native code runs"
    return Decision(mode, active=False, refused=True, reasons=(reason,))
