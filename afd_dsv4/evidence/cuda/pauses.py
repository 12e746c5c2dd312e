# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Random pauses of a CUDA stream: streams that run as fast as they can rarely lose a race that they could lose."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import torch

CYCLES_PER_US = 1_700  # about; a pause need not be exact
SHARE = 0.125  # of the calls that pause


def pauses(rng: random.Random, longest_us: int) -> Callable[[], None]:
    """Something that lets the current stream stand still, so long at most, at one call in eight; for any thread."""
    lock = threading.Lock()

    def pause() -> None:
        with lock:
            us = rng.randrange(longest_us) if rng.random() < SHARE else 0
        if us:
            torch.cuda._sleep(us * CYCLES_PER_US)

    return pause
