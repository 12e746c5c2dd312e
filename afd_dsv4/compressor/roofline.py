# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""How long a kernel takes by a model of the device, from what it was counted to do. A model, not a measurement.

Problem: no kernel of this project has run on hardware, and still one wants to know whether it is far from what the
memory allows.
Way: two times, of which the longer counts, because copies and vector operations of neighbouring tiles overlap (every
queue has two buffers). Memory: all bytes moved, at the bandwidth of HBM. Vector: each operation's repeats at the rate
of the documentation, and a fixed cost for each barrier, behind which an instruction waits for the one before; spread
evenly over the cores. The share of the roofline is memory time over the longer of the two. That cost is the one number
without a source, so the share is also given for the case that every instruction waits.
What it leaves out: hits in the second-level cache (the staging rows of a tile of 2,048 tokens fit in it), copies in
pieces too short for full bandwidth (C128 takes 256 bytes a row), bank conflicts, scalar code that the vector pipe waits
for, the first and last tile of a core, which overlap with nothing, and what starting a kernel costs (`LAUNCH_US`).

Source of the constants: the CANN documentation in cann/asc-devkit for Atlas A2 and A3 (NPU architecture 2201).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: Bytes per second of HBM; the documentation says "about 1.6 TB/s".
HBM_BYTES_PER_SECOND: Final = 1.6e12
#: Vector cores of a 910B (it has 40 to 50) and their clock in Hz.
CORES: Final = 48
CLOCK_HZ: Final = 1.85e9
#: float32 elements of one repeat (256 bytes).
REPEAT: Final = 64
#: Elements per cycle in float32, of the documentation's table of vector instructions.
RATES: Final[Mapping[str, float]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min", "Adds", "Muls", "Maxs", "Mins", "Cast", "Duplicate"), 64.0),
    **dict.fromkeys(("Reciprocal", "Rsqrt", "Abs", "Brcb", "CreateVecIndex", "Compare", "CompareScalar"), 64.0),
    **dict.fromkeys(("Select", "BlockReduceSum", "BlockReduceMax"), 64.0),
    **dict.fromkeys(("Exp", "Ln", "Sqrt", "Div"), 32.0),
    **dict.fromkeys(("WholeReduceSum", "WholeReduceMax", "ReduceSum", "ReduceMax"), 64 / 7),
    "Gather": 5.0,
    # Not in the table: one repeat of 256 bytes a cycle is assumed, as for every other move.
    **dict.fromkeys(("Copy", "DataCopy"), 64.0),
}
#: Cycles that a barrier of the vector pipe costs. Undocumented: 45 dependent instructions with their barriers were put
#: at 500 to 1,000 cycles when the kernels were designed, and this is the upper end.
BARRIER_CYCLES: Final = 22.0
#: What an empty kernel takes on all cores, of the documentation ("about 20 to 21 us"). Not in the share.
LAUNCH_US: Final = 21.0


@dataclass(frozen=True)
class ModelledTime:
    """Nanoseconds per token on all cores together.

    Attributes:
        memory: of all bytes at the bandwidth of HBM: the roofline.
        data: of the vector operations' repeats.
        barriers: of the barriers between them.
        all_wait: of a barrier behind every instruction, in place of `barriers`: the worst case.
    """

    memory: float
    data: float
    barriers: float
    all_wait: float

    @property
    def total(self) -> float:
        """The longer of memory and vector time."""
        return max(self.memory, self.data + self.barriers)

    @property
    def fraction(self) -> float:
        """Share of the roofline that is reached; 1 where memory is what takes longest."""
        return self.memory / self.total

    @property
    def least_fraction(self) -> float:
        """The same if every instruction waits for the one before."""
        return self.memory / max(self.memory, self.data + self.all_wait)


def modelled_time(counters: Mapping[str, int], tokens: int) -> ModelledTime:
    """The time of a launch of which the counters are known.

    Args:
        counters: `instructions.<operation>`, `repeats.<operation>`, `barriers`, `bytes.mte2`, `bytes.mte3` and
            `bytes.scalar`, summed over all cores (kernels_ascendc/softnpu/ascendc/counters.h).
        tokens: that the launch took.

    Raises:
        ValueError: no tokens, nothing moved, or an operation without a rate.
    """
    moved = sum(counters[f"bytes.{pipe}"] for pipe in ("mte2", "mte3", "scalar"))
    if tokens < 1 or moved < 1:
        raise ValueError(f"a launch of {tokens} tokens that moves {moved} bytes has no modelled time")
    repeats = {name.partition(".")[2]: n for name, n in counters.items() if name.startswith("repeats.") and n}
    if unknown := repeats.keys() - RATES.keys():
        raise ValueError(f"no rate is known for {', '.join(sorted(unknown))}; add it to RATES, with its source")
    instructions = sum(n for name, n in counters.items() if name.startswith("instructions."))
    nanoseconds_per_cycle = 1e9 / (CORES * CLOCK_HZ * tokens)
    return ModelledTime(
        memory=moved / HBM_BYTES_PER_SECOND * 1e9 / tokens,
        data=sum(n * REPEAT / RATES[name] for name, n in repeats.items()) * nanoseconds_per_cycle,
        barriers=counters["barriers"] * BARRIER_CYCLES * nanoseconds_per_cycle,
        all_wait=instructions * BARRIER_CYCLES * nanoseconds_per_cycle,
    )
