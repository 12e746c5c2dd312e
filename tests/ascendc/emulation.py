# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The test library of the AscendC emulation through ctypes: planted misuses, single operations, one whole kernel.

NumPy in, NumPy out. bfloat16 travels as its bits in uint16, half as float16.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ROOT / "kernels_ascendc" / "softnpu" / "ascendc"
#: Where `make setup` builds; the variable is for other builds.
LIBRARY = Path(os.environ.get("SOFTNPU_LIB_DIR", ROOT / "build" / "softnpu")) / "libsoftnpu_ascendc_tests.so"

FORWARD, REVERSE, SHUFFLED = 0, 1, 2
ROUND_MODES = {"NONE": 0, "RINT": 1, "FLOOR": 2, "CEIL": 3, "ROUND": 4, "TRUNC": 5, "ODD": 6}
_KINDS = {np.dtype(np.float32): 0, np.dtype(np.int32): 1, np.dtype(np.uint16): 2, np.dtype(np.float16): 3}


class _Report(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("expected", "trap", "line")),
        ("name", ctypes.c_char * 64),
        ("file", ctypes.c_char * 256),
        ("text", ctypes.c_char * 768),
    ]


class _Case(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        *((name, ctypes.c_void_p) for name in ("src0", "src1", "dst")),
        ("bytes", ctypes.c_int64 * 3),
        ("offset", ctypes.c_int64 * 3),
        ("numbers", ctypes.c_int64 * 8),
        ("bits", ctypes.c_uint64 * 2),
        *((name, ctypes.c_int32) for name in ("masked", "dst_kind", "src_kind", "mode", "alias", "reserved")),
        ("scalar", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("fuzz", "saturate")),
        ("seed", ctypes.c_uint64),
        ("text", ctypes.c_char * 768),
        *((name, ctypes.c_int64) for name in ("repeats", "elements")),
    ]


@cache
def library() -> ctypes.CDLL:
    """The test library; the test that asks is skipped where it is not built."""
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY} is not built; run: make setup")
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.ascendc_softmax_error.restype = ctypes.c_char_p
    loaded.ascendc_softmax.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, *[ctypes.c_void_p] * 4]
    loaded.afd_dsv4_emulation_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    loaded.afd_dsv4_emulation_counter.restype = ctypes.c_int64
    loaded.afd_dsv4_emulation_counter_names.restype = ctypes.c_char_p
    return loaded


@dataclass(frozen=True)
class Report:
    """What became of a plant. expected: the trap its wrong kernel breaks. trap: the one reported, 0 for none."""

    name: str
    expected: int
    trap: int
    file: str
    line: int
    text: str


def run_plant(index: int, *, wrong: bool, order: int = FORWARD) -> Report:
    """Run plant `index`, the kernel that breaks its rule or the twin that does not."""
    report = _Report()
    library().ascendc_plant_run(index, int(wrong), order, ctypes.byref(report))
    return Report(
        *(report.name.decode(), report.expected, report.trap, report.file.decode(), report.line, report.text.decode())
    )


@dataclass(frozen=True)
class Outcome:
    """What became of one operation. dst: its destination image. trap: 0, or the rule it broke, with `text`."""

    dst: NDArray[Any]
    trap: int
    text: str
    repeats: int
    elements: int


def operate(
    name: str,
    dst: NDArray[Any],
    src0: NDArray[Any],
    src1: NDArray[Any] | None = None,
    *,
    numbers: Sequence[int] = (),
    offsets: Sequence[int] = (0, 0, 0),
    bits: Sequence[int] = (0, 0),
    masked: int = 0,
    mode: int = 0,
    alias: int = 0,
    scalar: float = 0.0,
    fuzz: bool = False,
    saturate: bool = False,
    seed: int = 0,
) -> Outcome:
    """Run one operation on copies of the images.

    offsets: of dst, src0, src1 in bytes. numbers: count, or mask, repeats and strides in the order the API has them.
    alias: 1 or 2 for src0 or src1 in the image of dst.
    masked: 0 count form, 1 mask form, 2 bit-mask form with `bits` (for copies: 0 count, 1 blocks, 2 padded).
    """
    images = [dst.copy(), src0.copy(), (np.zeros(8, np.float32) if src1 is None else src1).copy()]
    padded = []
    for image in images:
        raw = np.zeros(-(-image.nbytes // 32) * 32, np.uint8)
        raw[: image.nbytes] = image.view(np.uint8)
        padded.append(raw)
    case = _Case(name=name.encode(), masked=masked, mode=mode, alias=alias)
    case.scalar, case.fuzz, case.saturate, case.seed = scalar, fuzz, saturate, seed
    case.dst, case.src0, case.src1 = (raw.ctypes.data for raw in padded)
    case.bytes[:] = [raw.nbytes for raw in padded]
    case.offset[:] = list(offsets)
    case.numbers[:] = [*numbers, *[0] * (8 - len(numbers))]
    case.bits[:] = list(bits)
    case.dst_kind, case.src_kind = _KINDS[dst.dtype], _KINDS[src0.dtype]
    trap = library().ascendc_operation(ctypes.byref(case))
    result = padded[0][: dst.nbytes].view(dst.dtype)
    return Outcome(result, trap, case.text.decode(), case.repeats, case.elements)
