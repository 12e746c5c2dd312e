# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The plugin's settings, read strictly.

Problem: a misspelt option that is silently ignored leaves the server as it was, and looks like a plugin that does not
work.
Way: one frozen dataclass with a default for every setting; a mapping with an unknown key or a wrong value is refused
in one line that names the known ones. It imports neither torch nor vLLM.
Not here: where the mapping comes from, and whether a mode can be had on this stack (`gate.py`).
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from afd_dsv4.geometry import InputError

DEFAULT_SLOTS: Final = 2  # two uBatches


class Mode(enum.Enum):
    """What the plugin does: nothing, work with attention and FFN apart, or work in an ordinary server."""

    OFF = "off"
    AFD = "afd"
    COLOCATED = "colocated"


@dataclass(frozen=True)
class Settings:
    """All settings.

    Attributes:
        mode: `off` by default.
        slots: workspace slots, one per execution in flight.
        drafts: draft tokens of speculative decoding that one forward may have to take back.
        fence_timeout_s: seconds after which a slot whose fence has not passed is quarantined.

    Raises:
        InputError: a value out of range.
    """

    mode: Mode = Mode.OFF
    slots: int = DEFAULT_SLOTS
    drafts: int = 0
    fence_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _check("mode", self.mode, isinstance(self.mode, Mode), f"choose one of {', '.join(m.value for m in Mode)}")
        _check("slots", self.slots, _whole(self.slots) and self.slots >= 1, "it must be a whole number of at least 1")
        _check("drafts", self.drafts, _whole(self.drafts) and self.drafts >= 0, "it must be a whole number, 0 or more")
        seconds = self.fence_timeout_s
        good = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < float("inf")
        _check("fence_timeout_s", seconds, good, "it must be a number of seconds above 0")


def from_mapping(values: Mapping[str, object]) -> Settings:
    """Read settings from a mapping such as a parsed JSON object; missing keys take their defaults.

    Raises:
        InputError: an unknown key, or a value of the wrong kind or out of range.
    """
    if not isinstance(values, Mapping):
        raise InputError("settings", type(values).__name__, "give an object with one entry per setting")
    known = [field.name for field in fields(Settings)]
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise InputError("settings", f"unknown {', '.join(map(repr, unknown))}", f"known are {', '.join(known)}")
    given = dict(values)
    if isinstance(given.get("mode"), str) and given["mode"] in {mode.value for mode in Mode}:
        given["mode"] = Mode(given["mode"])
    return Settings(**given)  # type: ignore[arg-type]  # Settings checks every value itself


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: object, good: bool, remedy: str) -> None:
    if not good:
        raise InputError(f"setting {name}", reprlib.repr(value), remedy)
