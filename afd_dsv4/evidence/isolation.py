# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Isolation: with the plugin loaded and off, is every upstream symbol still the identical object?

Off is: no mode, mode off, and mode afd in a server without AFD; each behind an engine configuration of a DeepSeek-V4.
What the plugin may set on vLLM's platform instance is no symbol of a module or class; see plugin.py.
The answer comes from `isolation_probe.py`, in processes where nobody has patched anything before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

PROBE = "afd_dsv4.evidence.isolation_probe"
TIMEOUT_S = 600
OFF = ("None", "off", "afd")  # modes of the probe; no engine of its has an AFD role


@dataclass(frozen=True)
class Isolation:
    """What the probe found.

    Attributes:
        compared: upstream attributes compared by identity.
        changed: names that hold another object after the plugin was loaded off and an engine configuration was made.
        planted: names found after the probe patched upstream itself; empty would mean that it sees nothing.
    """

    compared: int
    changed: tuple[str, ...]
    planted: tuple[str, ...]


def check() -> Isolation:
    """Run the probe against the whole stack.

    Raises:
        RuntimeError: the probe did not answer.
    """
    command = [sys.executable, "-m", PROBE, "ascend"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the isolation probe did not answer in {TIMEOUT_S} s; run it alone: {command}") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the isolation probe ended with status {done.returncode}: {last}")
    found = json.loads(lines[-1])
    changed = {name for mode in OFF for name in found["modes"][mode]["changes"]}
    return Isolation(found["compared"], tuple(sorted(changed)), tuple(found["planted"]))
