# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The plugin's settings, read strictly.

Problem: a misspelt option that is silently ignored leaves the server as it was, and looks like a plugin that does not
work.
Way: one frozen dataclass with a default for every setting, read from the environment; an unknown key or a wrong value
is refused in one line that names the known ones. The environment, because plugin functions run before vLLM has a
configuration, and because some vllm-ascend versions refuse an unknown key in `additional_config`.
Not here: whether a mode can be had in this release (`gate.py`). It imports neither torch nor vLLM.
"""

from __future__ import annotations

import enum
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from afd_dsv4.geometry import InputError

#: Environment variable with all settings, a JSON object.
CONFIG_VARIABLE: Final = "AFD_DSV4_CONFIG"
#: Environment variable with the mode alone, for those who want nothing else.
MODE_VARIABLE: Final = "AFD_DSV4_MODE"

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

    Raises:
        InputError: a value out of range.
    """

    mode: Mode = Mode.OFF
    slots: int = DEFAULT_SLOTS
    drafts: int = 0

    def __post_init__(self) -> None:
        _check("mode", self.mode, isinstance(self.mode, Mode), f"choose one of {', '.join(m.value for m in Mode)}")
        _check("slots", self.slots, _whole(self.slots) and self.slots >= 1, "it must be a whole number of at least 1")
        _check("drafts", self.drafts, _whole(self.drafts) and self.drafts >= 0, "it must be a whole number, 0 or more")


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Read the settings of a process: `AFD_DSV4_CONFIG`, a JSON object, and `AFD_DSV4_MODE` in place of its `mode`.

    A variable that is not set, or blank, sets nothing. Blanks around the mode and its case do not count.

    Raises:
        InputError: no JSON, a mode in both, or what `from_mapping` refuses.
    """
    text = environment.get(CONFIG_VARIABLE, "").strip()
    values = _parse(text) if text else {}
    mode = environment.get(MODE_VARIABLE, "").strip()
    if mode and isinstance(values, dict):
        if "mode" in values:
            found = f"{mode!r} in {MODE_VARIABLE} and {reprlib.repr(values['mode'])} in {CONFIG_VARIABLE}"
            raise InputError("setting mode", found, "set it in one of the two")
        values = {**values, "mode": mode.lower()}
    return from_mapping(values)


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


def _parse(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = sorted({key for key, _ in pairs if [other for other, _ in pairs].count(key) > 1})
        if twice:
            raise ValueError(f"{', '.join(map(repr, twice))} stands there twice")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        found = f"{reprlib.repr(text)} is no JSON object ({error})"
        raise InputError(CONFIG_VARIABLE, found, 'give one such as {"mode": "afd", "slots": 2}') from None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: object, good: bool, remedy: str) -> None:
    if not good:
        raise InputError(f"setting {name}", reprlib.repr(value), remedy)
