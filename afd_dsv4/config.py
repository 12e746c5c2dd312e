# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The plugin's settings, read strictly.

Problem: a misspelt option that is silently ignored leaves the server as it was, and looks like a plugin that does not
work.
Way: one frozen dataclass with a default for every setting, read from `additional_config["afd_dsv4"]` and from the
environment; an unknown key, a wrong value, or one setting in two places is refused in one line. `additional_config`
travels with vLLM's configuration to every process; the environment serves where a vllm-ascend forbids keys that are
not its own (0.23.0 and 0.26 do not), and to switch the plugin off without touching a command line.
Not here: whether a mode can be had (`gate.py`). It imports neither torch nor vLLM.
"""

from __future__ import annotations

import enum
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from afd_dsv4.geometry import InputError

#: Our key of vLLM's `additional_config`.
KEY: Final = "afd_dsv4"
#: Environment variable with all settings, a JSON object.
CONFIG_VARIABLE: Final = "AFD_DSV4_CONFIG"
#: Environment variable with the mode alone, for those who want nothing else.
MODE_VARIABLE: Final = "AFD_DSV4_MODE"

DEFAULT_SLOTS: Final = 2  # two uBatches
DEFAULT_FENCE_TIMEOUT_S: Final = 60.0
#: C4's rows of a tile are 16 MiB then: a small part of the device's second-level cache, and of its memory.
DEFAULT_TILE_TOKENS: Final = 2048
LEAST_TILE_TOKENS: Final = 128  # a window of the largest ratio


class Mode(enum.Enum):
    """What the plugin does: nothing, work with attention and FFN apart, or work in an ordinary server."""

    OFF = "off"
    AFD = "afd"
    COLOCATED = "colocated"


class Executor(enum.Enum):
    """What compresses: vllm-ascend's operator, or kernels of our own. `AUTO` leaves it to the gate."""

    AUTO = "auto"
    STOCK = "stock"
    AFD = "afd"


@dataclass(frozen=True)
class Settings:
    """All settings.

    Attributes:
        mode: `off`; `afd`, attention and FFN on different workers, in the role attention; `colocated`, an ordinary
            server.
        slots: workspace slots, one per execution in flight.
        drafts: draft tokens of speculative decoding that one forward may have to take back; None for as many as
            vLLM's speculative configuration says.
        fence_timeout_s: seconds after which work on the device that is still not over is quarantined: its slot and
            pages are never used again. Longer than any forward may take.
        audit: in mode `afd`, whether everything that crosses to the FFN role is checked to share no memory with tails
            and workspace slots; None for where the log is at level DEBUG.
        executor: what compresses: `stock`, vllm-ascend's operator; `afd`, the project's own kernels; `auto` leaves it
            to the gate, which takes `stock` on every supported stack.
        tile_tokens: most tokens that the afd executor projects and compresses at once, and so the size of its staging
            rows; `max_num_batched_tokens` or more for whole chunks.

    Raises:
        InputError: a value out of range.
    """

    mode: Mode = Mode.OFF
    slots: int = DEFAULT_SLOTS
    drafts: int | None = None
    fence_timeout_s: float = DEFAULT_FENCE_TIMEOUT_S
    audit: bool | None = None
    executor: Executor = Executor.AUTO
    tile_tokens: int = DEFAULT_TILE_TOKENS

    def __post_init__(self) -> None:
        _check("mode", self.mode, isinstance(self.mode, Mode), f"choose one of {', '.join(m.value for m in Mode)}")
        _check("slots", self.slots, _whole(self.slots, 1), "it must be a whole number of at least 1")
        good = self.drafts is None or _whole(self.drafts, 0)
        _check("drafts", self.drafts, good, "it must be a whole number, 0 or more")
        good = _number(self.fence_timeout_s) and 0 < self.fence_timeout_s <= 1e9
        _check("fence_timeout_s", self.fence_timeout_s, good, "it must be a number of seconds above 0 and at most 1e9")
        _check("audit", self.audit, self.audit is None or isinstance(self.audit, bool), "it must be true or false")
        names = ", ".join(executor.value for executor in Executor)
        _check("executor", self.executor, isinstance(self.executor, Executor), f"choose one of {names}")
        good = _whole(self.tile_tokens, LEAST_TILE_TOKENS)
        remedy = f"it must be a whole number of at least {LEAST_TILE_TOKENS}"
        _check("tile_tokens", self.tile_tokens, good, remedy)

    def as_mapping(self) -> dict[str, str | int | float]:
        """What `from_mapping` makes the same settings of; plain enough for JSON."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: getattr(value, "value", value) for name, value in given.items() if value is not None}


def read(additional_config: object, environment: Mapping[str, str]) -> Settings:
    """Read `additional_config["afd_dsv4"]`, `AFD_DSV4_CONFIG` (a JSON object) and `AFD_DSV4_MODE` (its `mode` alone).

    A variable that is not set, or blank, sets nothing. Blanks around the mode and its case do not count.

    Args:
        additional_config: vLLM's. It need not be a mapping, but only a mapping can hold our key.
        environment: such as `os.environ`.

    Raises:
        InputError: no JSON, one setting in two places, or what `from_mapping` refuses.
    """
    return from_mapping(_gather(additional_config, environment))


def switched_off(environment: Mapping[str, str]) -> bool:
    """Whether the environment alone says `off` in so many words. Then nothing else is asked.

    Raises:
        InputError: an environment that cannot be read.
    """
    values = _gather(None, environment)
    return "mode" in values and from_mapping(values).mode is Mode.OFF


def from_mapping(values: Mapping[str, object], place: str = "settings") -> Settings:
    """Read settings from a mapping such as a parsed JSON object; missing keys take their defaults.

    Raises:
        InputError: an unknown key, or a value of the wrong kind or out of range.
    """
    if not isinstance(values, Mapping):
        raise InputError(place, type(values).__name__, "give an object with one entry per setting")
    known = [field.name for field in fields(Settings)]
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise InputError(place, f"unknown {', '.join(map(repr, unknown))}", f"known are {', '.join(known)}")
    given = dict(values)
    for name, choices in (("mode", Mode), ("executor", Executor)):
        if isinstance(given.get(name), str) and given[name] in {choice.value for choice in choices}:
            given[name] = choices(given[name])
    return Settings(**given)  # type: ignore[arg-type]  # Settings checks every value itself


def _gather(additional_config: object, environment: Mapping[str, str]) -> dict[str, object]:
    """Every setting that was given, each checked to stand in one place only."""
    places: list[tuple[str, Any]] = []
    if isinstance(additional_config, Mapping) and KEY in additional_config:
        places.append((f"additional_config[{KEY!r}]", additional_config[KEY]))
    if text := environment.get(CONFIG_VARIABLE, "").strip():
        places.append((CONFIG_VARIABLE, _parse(text)))
    if mode := environment.get(MODE_VARIABLE, "").strip():
        places.append((MODE_VARIABLE, {"mode": mode.lower()}))
    found: dict[str, str] = {}
    values: dict[str, object] = {}
    for place, given in places:
        from_mapping(given, place)  # so that an error names the place
        for key, value in given.items():
            here = f"{reprlib.repr(value)} in {place}"
            if key in found:
                raise InputError(f"setting {key}", f"{found[key]} and {here}", "set it in one place only")
            found[key], values[key] = here, value
    return values


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object for `json.loads(object_pairs_hook=)`, which by itself keeps the last of two values of one name.

    Raises:
        ValueError: a name stands there twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = sorted({key for key, _ in pairs if [other for other, _ in pairs].count(key) > 1})
        raise ValueError(f"{', '.join(map(repr, twice))} stands there twice")
    return found


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        found = f"{reprlib.repr(text)} is no JSON object ({error})"
        raise InputError(CONFIG_VARIABLE, found, 'give one such as {"mode": "afd", "slots": 2}') from None


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check(name: str, value: object, good: bool, remedy: str) -> None:
    if not good:
        raise InputError(f"setting {name}", reprlib.repr(value), remedy)
