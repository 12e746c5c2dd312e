# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Reads the options of a server that is to be started, strictly.

Problem: an option that is misspelt, or of another type, and is therefore dropped counts as vLLM's default: the gate
then says yes to what nobody starts, or refuses what nobody asked for.
Way: a JSON object by the names of `vllm serve`, whose values must have the type that vLLM has for them; `no_x` is x set
to false, and `128k` is 128,000 where vLLM reads it so. Names are held to those that vLLM of the same release has, which
are recorded in `serve_options.json`; of another release it is said which names nobody looked at.
Not here: what the gate says of them (`planned.py`), and whether vLLM takes the value.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NoReturn

from afd_dsv4.compat.stack import release
from afd_dsv4.config import Settings, named_once
from afd_dsv4.doctor.facts import Finding, Severity
from afd_dsv4.geometry import MOST, InputError

#: Names of vLLM's options by its release; `python -m tests.doctor.serve_options` writes it.
RECORDED: Final = Path(__file__).with_name("serve_options.json")

#: Every option that is looked at, by what it must be.
FLAGS: Final = (
    "async_scheduling",
    "enable_chunked_prefill",
    "enable_dbo",
    "enable_lora",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "enforce_eager",
)
#: With the least that each may be.
COUNTS: Final = {
    "block_size": 1,
    "decode_context_parallel_size": 1,
    "max_model_len": 1,
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": 1,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "spec_tokens": 1,
    "ubatch_size": 0,
}
TEXTS: Final = (
    "dtype",
    "model",
    "performance_mode",
    "scheduler_cls",
    "scheduling_policy",
    "spec_method",
    "worker_cls",
)
OBJECTS: Final = (
    "additional_config",
    "compilation_config",
    "ec_transfer_config",
    "kv_transfer_config",
    "speculative_config",
)
SIZES: Final = ("kv_offloading_size",)
#: Names that may be written as their numbers: vllm/config/vllm.py:OptimizationLevel.
LEVELS: Final = ("O0", "O1", "O2", "O3")
CHOICES: Final = {"optimization_level": LEVELS}
LOOKED_AT: Final = frozenset((*FLAGS, *COUNTS, *TEXTS, *OBJECTS, *SIZES, *CHOICES))
#: The same within `compilation_config`: vllm/config/compilation.py:CompilationMode.
COMPILATION: Final = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")

#: Counts that may be written with a unit (vllm/engine/arg_utils.py:_compute_kwargs), and vLLM's own choice of one.
_WITH_UNIT: Final = ("max_model_len", "max_num_batched_tokens")
_CHOSEN: Final = {"max_model_len": ("auto", -1)}
_UNITS: Final = {unit: 1000**power for power, unit in enumerate("kmgt", 1)} | {
    unit: 1024**power for power, unit in enumerate("KMGT", 1)
}
#: Settings of the plugin itself, which belong one level deeper.
_OUR_KEYS: Final = tuple(field.name for field in fields(Settings))
_MOST_NAMES: Final = 10  # that are listed
_REMEDY: Final = 'give an object with the options of `vllm serve` by their names, such as {"max_num_seqs": 16}'


def options_of(text: str, name: str) -> dict[str, Any]:
    """Read a JSON file with the options of a server; `max-num-seqs` is `max_num_seqs`, null is not given.

    Raises:
        InputError: no JSON object, one option twice, the plugin's own settings at the top, or a value that the option
            cannot have.
    """
    file = f"config {name!r}"
    try:
        found = json.loads(text, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InputError(file, f"cannot be read as JSON ({str(error)[:80]})", _REMEDY) from None
    if not isinstance(found, dict):
        raise InputError(file, f"holds a JSON {type(found).__name__}", _REMEDY)
    try:
        options = named_once([_positive(key, value) for key, value in found.items() if value is not None])
    except InputError as error:
        raise InputError(file, f"{error.what} is {error.found}", error.remedy) from None
    except ValueError as error:  # as of max-num-seqs and max_num_seqs, or no_x and x
        raise InputError(file, f"{error}, under one name or two", _REMEDY) from None
    for wrong in (key for key in _OUR_KEYS if key in options):
        remedy = 'put it under {"additional_config": {"afd_dsv4": ...}}, as for vLLM'
        raise InputError(file, f"has the plugin's own {wrong!r} among the options of vLLM", remedy)
    for wrong in (key for key in options if "." in key):
        whole = wrong.partition(".")[0]
        raise InputError(file, f"{reprlib.repr(wrong)} names a part of an option", f"give {whole!r} as an object")
    try:
        return {key: _value(key, value) for key, value in options.items()}
    except InputError as error:
        raise InputError(file, f"{error.what} is {error.found}", error.remedy) from None


def findings(options: Mapping[str, Any], vllm: str | None) -> Iterator[Finding]:
    """Names that nobody looked at.

    Args:
        options: as `options_of` reads them.
        vllm: version that they are for, None for any that is recorded.
    """
    others = [name for name in options if name not in LOOKED_AT]
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    of = list(recorded) if vllm is None else [str(release(vllm))]
    known = sorted({name for one in of for name in recorded.get(one, ())})
    if not known:
        if others:
            why = f"Which options vLLM {vllm} has is not known here: one that is misspelt would not be seen."
            title = f"not looked at: {_listed(others)}"
            yield Finding("not-looked-at", Severity.NOTE, title, (why,), (), (), {"options": others})
        return
    unknown = [name for name in others if name not in known]
    if unknown:
        remedies = []
        for name in unknown[:_MOST_NAMES]:
            near = difflib.get_close_matches(name[:100], known, 1)
            remedies.append(
                f"{reprlib.repr(name)}: did you mean {near[0]}?"
                if near
                else f"{reprlib.repr(name)}: write the whole long name of the option, or leave it out"
            )
        yield Finding(
            "unknown-option",
            Severity.PROBLEM,
            f"vLLM {' or '.join(of)} has no option {_listed(unknown)}",
            ("It counts for nothing here. `vllm serve` ends with an error at a name that begins none of its options.",),
            tuple(remedies),
            (),
            {"options": unknown},
        )


class Options:
    """Reads options that may be missing, or null, for vLLM's default; one of another type is refused by name."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values, self._path = values, path

    def inner(self, name: str) -> Options:
        """The options in an object, or in the text of one, as on a command line."""
        value = self.values.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value, object_pairs_hook=named_once)
            except (ValueError, RecursionError):
                self._refuse(name, value, "a JSON object, each name in it once")
        if value is not None and not isinstance(value, Mapping):
            self._refuse(name, value, "an object")
        return Options(value or {}, f"{self._path}{name}.")

    def flag(self, name: str, otherwise: bool) -> bool:
        """True or false."""
        return bool(self._read(name, bool, otherwise))

    def number(self, name: str, otherwise: int) -> int:
        """A whole number."""
        return int(self._read(name, int, otherwise))

    def text(self, name: str) -> str | None:
        """A text that is not empty."""
        value = self._read(name, str, "")
        return str(value) if value else None

    def choice(self, name: str, numbered: Sequence[str], others: Sequence[str] = ()) -> str | None:
        """One of these names, however it is written, or the number of one that has one."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) is int and 0 <= value < len(numbered):
            return numbered[value]
        if not isinstance(value, str) or value.upper() not in (*numbered, *others):
            self._refuse(name, value, f"one of {', '.join((*numbered, *others))}")
        return value.upper()

    def _read(self, name: str, kind: type, otherwise: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            return otherwise
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            self._refuse(name, value, {bool: "true or false", int: "a whole number", str: "a text"}[kind])
        return value

    def _refuse(self, name: str, value: object, wanted: str) -> NoReturn:
        raise InputError(f"option {self._path}{name}", reprlib.repr(value), f"it must be {wanted}")


def _positive(key: str, value: object) -> tuple[str, object]:
    """Name and value, of `no_x` those of x. vLLM has no option of its own that begins so."""
    name = key.lstrip("-").replace("-", "_")
    if not name.startswith("no_"):
        return name, value
    if value is not True:
        raise InputError(reprlib.repr(name), reprlib.repr(value), f"give true, or {reprlib.repr(name[3:])} instead")
    return name[3:], False


def _value(name: str, value: Any) -> Any:
    if name in COUNTS:
        return _count(name, value)
    if name in FLAGS and not isinstance(value, bool):
        raise InputError(name, reprlib.repr(value), "give true or false, without quotes")
    if name in TEXTS and not isinstance(value, str):
        raise InputError(name, reprlib.repr(value), "give a text")
    if name in SIZES and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        raise InputError(name, reprlib.repr(value), "give a number")
    try:
        if name in OBJECTS:
            return dict(Options({name: value}).inner(name).values)
        if name in CHOICES:
            return Options({name: value}).choice(name, CHOICES[name])
    except InputError as error:
        raise InputError(name, error.found, f"give {error.remedy.removeprefix('it must be ')}") from None
    return value


def _count(name: str, value: Any) -> int:
    if type(value) in (int, str) and value in _CHOSEN.get(name, ()):
        return -1
    number = _with_unit(value) if isinstance(value, str) and name in _WITH_UNIT else value
    least = COUNTS[name]
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= MOST:
        remedy = f"give a whole number of at least {least} and at most {MOST:,}"
        raise InputError(name, reprlib.repr(value), remedy + (", or one such as 128k" if name in _WITH_UNIT else ""))
    return number


def _with_unit(text: str) -> int | None:
    """As vllm/utils/argparse_utils.py:human_readable_int: `1k` is 1,000, `1K` is 1,024, `25.6k` is 25,600."""
    said = re.fullmatch(r"([0-9]{1,20})(\.[0-9]{1,20})?([kKmMgGtT]?)", text.strip())
    if said is None or (said[2] and said[3] not in tuple("kmgt")):
        return None
    return int(float(said[1] + said[2]) * _UNITS[said[3]]) if said[2] else int(said[1]) * _UNITS.get(said[3], 1)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(map(reprlib.repr, names[:_MOST_NAMES])) + (f" and {more:,} others" if more > 0 else "")
