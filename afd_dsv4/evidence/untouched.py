# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Native behaviour, untouched: the same tokens with the plugin off, refused, and not installed at all.

Problem: that no upstream symbol changes (isolation.py) is half of "off means off"; the other half is what is served.
Way: the same workloads in three fresh engines: mode off, mode afd in a server without AFD, and an interpreter whose
environment is this one without our distribution, so that vLLM finds no entry point of ours. Tokens, log probabilities,
KV groups and steps must be equal. Each engine says which plugins it found, or the comparison would prove nothing.
Not here: symbols.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS = "afd_dsv4"
NAMES = ("off", "afd", "not installed")


def interpreter(folder: Path) -> Path:
    """Make a virtual environment in `folder` that holds what this one does but our distribution; return its python.

    What an earlier run left there is replaced.
    """
    venv.EnvBuilder(symlinks=True, with_pip=False, clear=True).create(folder)
    site = next(folder.glob("lib/python*/site-packages"))
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        # The distribution is its metadata and, of an editable one, what puts the checkout on the path.
        if OURS not in found.name.replace("-", "_"):
            (site / found.name).symlink_to(found)
    return next(folder.glob("bin/python"))


def problems(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs between the results of three engines (softnpu/engine.py), by the names of `NAMES`."""
    found = []
    for name, result in results.items():
        if (OURS in result["plugins"]) != (name != "not installed"):
            found.append(f"{name}: vLLM found the plugins {result['plugins']}")
    first = results[NAMES[0]]
    if not sum(len(tokens) for load in first["workloads"] for tokens in load["tokens"].values()):
        found.append("no tokens were compared")
    for name in NAMES[1:]:
        if results[name]["groups"] != first["groups"]:
            found.append(f"{name}: KV groups {results[name]['groups']}, and {first['groups']} {NAMES[0]}")
        for i, (one, other) in enumerate(zip(first["workloads"], results[name]["workloads"], strict=True)):
            found += [
                f"{name}: {part} of workload {i} differ"
                for part in ("tokens", "logprobs", "steps")
                if one[part] != other[part]
            ]
    return found


def python_of(name: str, folder: Path) -> str:
    """The interpreter of one of `NAMES`."""
    return str(interpreter(folder)) if name == "not installed" else sys.executable
