# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The C core of the software NPU's compressor operators through ctypes, and random launches for it.

NumPy in, NumPy out, no torch: bfloat16 travels as its bits in uint16. A launch the core refuses raises `Refused`, one
that ends in a fault raises `Fault`, both with the core's own message.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afd_dsv4.compressor import reference
from afd_dsv4.compressor.reference import Float32, PoolSpec

ROOT = Path(__file__).resolve().parent.parent
#: Where `make setup` builds; the variable is for other builds.
LIBRARY = Path(os.environ.get("SOFTNPU_LIB_DIR", ROOT / "build" / "softnpu")) / "libsoftnpu_core.so"
WAIVERS = ("hidden", "head_dim", "rope_head_dim", "scenario", "fp32")

POISON_FP32, POISON_BF16, POISON_FP16 = 0x7FDEAD01, 0x7FDE, 0x7EAD

_CODES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 2, np.dtype(np.int32): 3}


class Refused(ValueError):
    """The launch breaks the stock contract; nothing was read or written."""


class Fault(RuntimeError):
    """Found while running; the rows concerned are poison."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("present", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("dims", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("stride", ctypes.c_int64 * 4),
    ]


_COMPRESSOR_TENSORS = [
    *("x", "wkv", "wgate", "state_cache", "ape", "norm_weight", "rope_sin", "rope_cos"),
    *("state_block_table", "cu_seqlens", "seqused", "start_pos", "out"),
]
_COMPRESSOR_NUMBERS = ["rope_head_dim", "cmp_ratio", "coff", "rotary_mode", "cache_mode"]
_SETTINGS = ["saturate", "cores", "seed", "threads"]


class _CompressorArgs(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in _COMPRESSOR_TENSORS),
        *((name, ctypes.c_int64) for name in _COMPRESSOR_NUMBERS),
        ("norm_eps", ctypes.c_double),
        *((name, ctypes.c_int64) for name in _SETTINGS),
    ]


_METADATA_TENSORS = [
    *("rope_cos", "rope_sin", "cu_seqlens", "start_pos", "kv_block_table"),
    *("compress_cos", "compress_sin", "slot_mapping"),
]
_METADATA_NUMBERS = ["kv_block_size", "slot_mapping_format", "compress_ratio", "num_reqs_actual"]


class _MetadataArgs(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in _METADATA_TENSORS),
        *((name, ctypes.c_int64) for name in _METADATA_NUMBERS),
    ]


@cache
def core() -> ctypes.CDLL:
    """The library; skips the test where it is not built (a failure where the run must be complete)."""
    if not LIBRARY.exists():
        pytest.skip(f"{LIBRARY} is not built; run: make setup")
    library = ctypes.CDLL(str(LIBRARY))
    for name in ("waiver_names", "option_names", "stat_names", "last_error", "isa"):
        getattr(library, f"softnpu_{name}").restype = ctypes.c_char_p
    library.softnpu_set_option.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    return library


def last_error() -> str:
    return str(core().softnpu_last_error().decode())


def _tensor(array: NDArray[Any] | None) -> _Tensor:
    if array is None:
        return _Tensor()
    four = ctypes.c_int64 * 4
    strides = [stride // array.itemsize for stride in array.strides]
    return _Tensor(array.ctypes.data, 1, _CODES.get(array.dtype, 9), array.ndim, 0, four(*array.shape), four(*strides))


def _call(status: int) -> None:
    if status:
        raise (Refused if status == 1 else Fault)(last_error())


def compressor(arguments: Mapping[str, Any]) -> NDArray[Any]:
    """Run a launch given by the stock argument names; the result is allocated here (or given as `out`)."""
    given = {"seqused": None, "start_pos": None, "rope_head_dim": 64, "norm_eps": 1e-6, "rotary_mode": 2}
    given |= {"cache_mode": 1} | dict(arguments)
    if "out" not in given:
        given["out"] = np.zeros((len(given["rope_sin"]), len(given["norm_weight"])), given["x"].dtype)
    args = _CompressorArgs()
    for name in _COMPRESSOR_TENSORS:
        setattr(args, name, _tensor(given[name]))
    for name in (*_COMPRESSOR_NUMBERS, "norm_eps"):
        setattr(args, name, given[name])
    _call(core().softnpu_compressor_check(ctypes.byref(args)))
    _call(core().softnpu_compressor_run(ctypes.byref(args)))
    result: NDArray[Any] = given["out"]
    return result


def compressor_metadata(arguments: Mapping[str, Any]) -> None:
    """Run compressor_metadata_out; the results are written into the arrays given."""
    args = _MetadataArgs()
    for name in _METADATA_TENSORS:
        setattr(args, name, _tensor(arguments[name]))
    for name in _METADATA_NUMBERS:
        setattr(args, name, arguments[name])
    _call(core().softnpu_metadata_check(ctypes.byref(args)))
    _call(core().softnpu_metadata_run(ctypes.byref(args)))


def project(x: NDArray[Any], weight: NDArray[Any], threads: int = 2) -> Float32:
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    tensors = [_tensor(array) for array in (x, weight, out)]
    _call(core().softnpu_project(*(ctypes.byref(tensor) for tensor in tensors), ctypes.c_int64(threads)))
    return out


@contextmanager
def waived(*names: str) -> Iterator[None]:
    """Switch the limits off inside; all of them without a name."""
    chosen = [f"compressor.{name}".encode() for name in names or WAIVERS]
    for name in chosen:
        assert core().softnpu_waive(name, 1) == 0, last_error()
    try:
        yield
    finally:
        for name in chosen:
            core().softnpu_waive(name, 0)


@contextmanager
def options(**values: int) -> Iterator[None]:
    before = {name: get_option(name) for name in values}
    for name, value in values.items():
        set_option(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            set_option(name, value)


def set_option(name: str, value: int) -> None:
    if core().softnpu_set_option(f"compressor.{name}".encode(), value):
        raise ValueError(last_error())


def get_option(name: str) -> int:
    value = ctypes.c_int64()
    if core().softnpu_get_option(f"compressor.{name}".encode(), ctypes.byref(value)):
        raise ValueError(last_error())
    return value.value


def stat(name: str) -> int:
    value = ctypes.c_int64()
    if core().softnpu_stat(name.encode(), ctypes.byref(value)):
        raise ValueError(last_error())
    return value.value


@contextmanager
def counting(*names: str) -> Iterator[dict[str, int]]:
    """How much each counter grows inside; filled in at the end."""
    grown = {name: -stat(f"compressor.{name}") for name in names}
    yield grown
    for name in names:
        grown[name] += stat(f"compressor.{name}")


# ------------------------------------------------------------------------------------------------ launches


def to_bits(values: Float32) -> NDArray[np.uint16]:
    return reference.bfloat16_bits(values)


def as_float(values: NDArray[Any]) -> Float32:
    """fp32 values of an array in any of the element types."""
    return reference.bfloat16_values(values) if values.dtype == np.uint16 else values.astype(np.float32)


def cast(values: Float32, dtype: np.dtype[Any], *, saturate: bool = False) -> NDArray[Any]:
    """fp32 to the element type of a result, as the operator's final cast."""
    if dtype == np.uint16:
        return reference.bfloat16_bits(values, saturate=saturate)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, start + length) of one request."""

    request: int
    start: int
    length: int


@dataclass
class Model:
    """One compressor with weights, and the inputs of some requests from position 0."""

    spec: PoolSpec
    x: list[NDArray[Any]]
    wkv: NDArray[Any]
    wgate: NDArray[Any]
    ape: Float32
    norm_weight: NDArray[Any]
    rows: list[Float32] = field(default_factory=list)

    @classmethod
    def random(
        cls, rng: np.random.Generator, spec: PoolSpec, lengths: Sequence[int], hidden: int = 24, dtype: Any = np.uint16
    ) -> Model:
        def draw(*shape: int, scale: float = 1.0) -> NDArray[Any]:
            values = (rng.standard_normal(shape) * scale).astype(np.float32)
            return to_bits(values) if dtype == np.uint16 else values.astype(dtype)

        model = cls(
            spec,
            [draw(length, hidden) for length in lengths],
            draw(spec.half, hidden, scale=hidden**-0.5),
            draw(spec.half, hidden, scale=2 * hidden**-0.5),
            rng.standard_normal((spec.ratio, spec.half)).astype(np.float32),
            cast((1 + 0.2 * rng.standard_normal(spec.head_dim)).astype(np.float32), np.dtype(dtype)),
        )
        # The operator's own projection: it is tested apart, and its rows are an input of what is compared here.
        for x in model.x:
            if len(x):
                kv, score = project(x, model.wkv), project(x, model.wgate)
                model.rows.append(reference.make_rows(kv, score, model.ape, 0))
            else:
                model.rows.append(np.zeros((0, spec.row_dim), np.float32))
        return model

    def windows(self, chunk: Chunk) -> range:
        """The windows that complete in a chunk."""
        return range(chunk.start // self.spec.ratio, (chunk.start + chunk.length) // self.spec.ratio)

    def expected(self, chunk: Chunk, rows: Float32 | None = None) -> Float32:
        """The compressed rows of a chunk by definition, fp32; from other rows of the request, if given."""
        rows = self.rows[chunk.request] if rows is None else rows
        windows = self.windows(chunk)
        cos, sin = reference.rope_table(np.array(windows) * self.spec.ratio, self.spec.rope_head_dim)
        return reference.compressed_windows(rows, 0, windows, self.spec, as_float(self.norm_weight), cos, sin)

    def arguments(self, chunks: Sequence[Chunk], state: Float32, table: NDArray[np.int32]) -> dict[str, Any]:
        """The operator's arguments for a launch of these chunks."""
        spec, x = self.spec, [self.x[c.request][c.start : c.start + c.length] for c in chunks]
        lengths = [c.length for c in chunks]
        tokens = sum(lengths)
        positions = [window * spec.ratio for c in chunks for window in self.windows(c)]
        rows = min(tokens, tokens // spec.ratio + len(chunks))
        cos, sin = reference.rope_table(np.array(positions + [0] * (rows - len(positions))), spec.rope_head_dim)
        return {
            "x": np.concatenate(x),
            "wkv": self.wkv,
            "wgate": self.wgate,
            "state_cache": state,
            "ape": self.ape,
            "norm_weight": self.norm_weight,
            "rope_sin": sin,
            "rope_cos": cos,
            "state_block_table": table,
            "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32),
            "start_pos": np.array([c.start for c in chunks], np.int32),
            "rope_head_dim": spec.rope_head_dim,
            "cmp_ratio": spec.ratio,
            "coff": spec.coff,
            "norm_eps": spec.norm_eps,
        }

    def state(self, pages: int, page_rows: int) -> Float32:
        """A state cache full of NaN."""
        return np.full((pages, page_rows, self.spec.row_dim), np.nan, np.float32)

    def dense(self, chunks: Sequence[Chunk], page_rows: int) -> tuple[Float32, NDArray[np.int32]]:
        """A state cache and a table that map every row of the chunks and before; history is in place."""
        columns = max(1, *(-(-(c.start + c.length) // page_rows) for c in chunks))
        table = np.arange(1, 1 + len(chunks) * columns, dtype=np.int32).reshape(len(chunks), columns)
        state = self.state(1 + table.size, page_rows)
        for chunk, pages in zip(chunks, table, strict=True):
            for position in range(chunk.start):
                row = self.rows[chunk.request][position]
                state[pages[position // page_rows], position % page_rows] = row
        return state, table


def padded_state(spec: PoolSpec, pages: int, page_rows: int, padding: int) -> tuple[Float32, Float32]:
    """A state cache whose pages lie `padding` elements apart, and the memory of those gaps."""
    page = page_rows * spec.row_dim
    flat = np.full((pages, page + padding), np.nan, np.float32)
    state = np.lib.stride_tricks.as_strided(
        flat, (pages, page_rows, spec.row_dim), (flat.strides[0], spec.row_dim * 4, 4)
    )
    return state, flat[:, page:]


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal bit for bit, every NaN taken for the same."""
    a32, b32 = as_float(a), as_float(b)
    nan = np.isnan(a32) & np.isnan(b32)
    return a.shape == b.shape and bool((nan | (a32.view(np.uint32) == b32.view(np.uint32))).all())


def is_poison(values: NDArray[Any]) -> bool:
    """Whether every element holds what the operator leaves where it writes nothing."""
    pattern = {4: POISON_FP32, 2: POISON_BF16 if values.dtype == np.uint16 else POISON_FP16}[values.itemsize]
    return bool((values.view(f"u{values.itemsize}") == pattern).all())


SMALL = {
    "c4": PoolSpec(ratio=4, coff=2, head_dim=64, rope_head_dim=16),
    "c128": PoolSpec(ratio=128, coff=1, head_dim=64, rope_head_dim=16),
}
REAL = {"c4": reference.C4, "c4_indexer": reference.C4_INDEXER, "c128": reference.C128}
