# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The C ABI of our compressor kernels (kernels_ascendc/compressor/kernels.h) for NumPy arrays in host memory.

Problem: report and tests launch the kernels without torch, and a pointer says nothing about the memory behind it.
Way: ctypes. The structs mirror those of the header. A launch checks that each array is as large as its constants say;
everything else is checked by the library, whose status becomes an exception.
Not here: launches on a device (torch.ops.afd_dsv4), where the library is (`library.py`). The switches and counters of
the emulation are in no other back end.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afd_dsv4.geometry import InputError


class Dtype(enum.IntEnum):
    """Element type of staging rows, results and norm weights; bfloat16 travels as its bits in uint16."""

    FP32 = 0
    BF16 = 1

    @property
    def numpy(self) -> type[np.float32] | type[np.uint16]:
        """The type of its arrays."""
        return np.float32 if self is Dtype.FP32 else np.uint16


class Kernel(enum.IntEnum):
    """What a launch is made of: C4 is one kernel, C128 two."""

    COMPRESS_C4 = 0
    POOL_C128 = 1
    NORM_ROPE = 2
    TAIL_UPDATE = 3


class CoreOrder(enum.IntEnum):
    """In which order the emulation runs the cores of a launch."""

    FORWARD = 0
    REVERSE = 1
    SHUFFLED = 2


class Refused(ValueError):
    """No kernel takes these constants; nothing was launched."""


class Fault(RuntimeError):
    """The tables are bad; what they said of other requests is computed, as kernels.h says."""


class Misuse(RuntimeError):
    """The emulation found that a kernel breaks a rule of the device: a bug of ours."""


_TABLES: Final = ("cu_seqlens", "starts", "table")
_ERRORS: Final = {1: Refused, 2: Fault, 3: Misuse}


class CompressParams(ctypes.Structure):
    """AfdDsv4CompressParams."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("page_stride", "row_stride")),
        *((name, ctypes.c_int32) for name in ("ratio", "coff", "head_dim", "rope_head_dim", "requests", "columns")),
        *((name, ctypes.c_int32) for name in ("page_rows", "pool_pages", "carry", "first_token", "tokens")),
        *((name, ctypes.c_int32) for name in ("launch_tokens", "out_rows", "row_dtype", "out_dtype", "norm_dtype")),
        ("norm_eps", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    )


class TailParams(ctypes.Structure):
    """AfdDsv4TailParams."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("page_stride", "row_stride")),
        *((name, ctypes.c_int32) for name in ("ratio", "coff", "head_dim", "requests", "columns", "page_rows")),
        *((name, ctypes.c_int32) for name in ("pool_pages", "carry", "first_token", "tokens", "launch_tokens")),
        *((name, ctypes.c_int32) for name in ("row_dtype", "list_ids", "reserved")),
    )


class Figures(ctypes.Structure):
    """AfdDsv4Figures: what a kernel takes by its tiling."""

    _fields_ = (
        ("ub_bytes", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("bytes", "instructions", "barriers", "cycles")),
    )


class Kernels:
    """One loaded library.

    Raises:
        InputError: the file is no library of this machine, or lacks a function.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            self._bind()
        except (OSError, AttributeError) as error:
            raise InputError("kernels", f"{path} cannot be used ({error})", "build it anew") from None

    def _bind(self) -> None:
        library = self._library
        pointers = [ctypes.c_void_p] * 11
        library.afd_dsv4_launch_compress.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, *pointers]
        library.afd_dsv4_launch_tail_update.argtypes = [
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            *pointers[:7],
        ]
        for name in ("last_error", "backend"):
            getattr(library, f"afd_dsv4_{name}").restype = ctypes.c_char_p
        for name in ("workspace_bytes_compress", "workspace_bytes_tail_update", "faults"):
            getattr(library, f"afd_dsv4_{name}").restype = ctypes.c_int64

    @property
    def backend(self) -> str:
        """ "ascendc", "twin" or "emulation"."""
        return str(self._library.afd_dsv4_backend().decode())

    def last_error(self) -> str:
        """Why the last call of this thread failed."""
        return str(self._library.afd_dsv4_last_error().decode(errors="replace"))

    def _check(self, status: int) -> None:
        if status:
            raise _ERRORS.get(status, RuntimeError)(self.last_error())

    def refusal(self, params: CompressParams | TailParams) -> str | None:
        """Why no kernel takes these constants; None if one does."""
        ask = self._library[f"afd_dsv4_can_implement_{_name(params)}"]
        reason = ctypes.create_string_buffer(512)
        return reason.value.decode() if ask(ctypes.byref(params), reason, ctypes.c_size_t(512)) else None

    def workspace_bytes(self, params: CompressParams | TailParams) -> int:
        """Bytes of the workspace of a launch. Raises Refused."""
        size = int(getattr(self._library, f"afd_dsv4_workspace_bytes_{_name(params)}")(ctypes.byref(params)))
        self._check(1 if size < 0 else 0)
        return size

    def figures(self, kernel: Kernel, params: CompressParams | TailParams) -> Figures:
        """What a kernel takes by its tiling. Raises Refused."""
        figures = Figures()
        if isinstance(params, TailParams):
            status = self._library.afd_dsv4_figures_tail_update(ctypes.byref(params), ctypes.byref(figures))
        else:
            status = self._library.afd_dsv4_figures_compress(
                ctypes.c_int(kernel), ctypes.byref(params), ctypes.byref(figures)
            )
        self._check(status)
        return figures

    def faults(self, workspace: NDArray[Any]) -> str:
        """The first fault that launches left in a workspace since its first bytes were zero; "" for none."""
        text = ctypes.create_string_buffer(512)
        self._library.afd_dsv4_faults(ctypes.c_void_p(workspace.ctypes.data), text, ctypes.c_size_t(512))
        return text.value.decode()

    def compress(self, blocks: int, params: CompressParams, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Launch `compress`.

        Args:
            blocks: vector cores.
            params: constants.
            arrays: rows, pool, ape, norm_weight, cos, sin, cu_seqlens, starts, table, out and workspace, C-contiguous.

        Raises:
            Refused, Fault, Misuse: see there.
            ValueError: an array is smaller than the constants say.
        """
        names = ("rows", "pool", "ape", "norm_weight", "cos", "sin", *_TABLES, "out", "workspace")
        self._launch(self._library.afd_dsv4_launch_compress, blocks, params, {name: arrays[name] for name in names})

    def tail_update(self, blocks: int, params: TailParams, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Launch `tail_update`; as `compress`, with fewer arrays."""
        names = ("rows", "ape", *_TABLES, "pool", "workspace")
        self._launch(self._library.afd_dsv4_launch_tail_update, blocks, params, {name: arrays[name] for name in names})

    def _launch(
        self, function: Any, blocks: int, params: CompressParams | TailParams, arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        if self.refusal(params) is None:  # what is refused has no sizes to compare with
            least = _bytes(params) | {"workspace": self.workspace_bytes(params)}
            for name, array in arrays.items():
                if array.nbytes < least[name] or not array.flags.c_contiguous:
                    raise ValueError(f"{name}: found {array.nbytes} bytes, expected {least[name]}, contiguous")
        pointers = [array.ctypes.data for array in arrays.values()]
        self._check(function(blocks, None, ctypes.addressof(params), *pointers))

    # ------------------------------------------------------------------------------------------------ emulation

    def set(self, option: str, value: int) -> None:
        """Turn a switch of the emulation: order, seed, fuzz, saturate, faults.

        Raises:
            ValueError: it has none of that name, or is no emulation.
        """
        turn = getattr(self._library, "afd_dsv4_emulation_set", None)
        if turn is None or turn(option.encode(), ctypes.c_int64(value)):
            raise ValueError(f"{option}={value}: the back end {self.backend!r} has no such switch")

    def reset_counters(self) -> None:
        """Set every counter of the emulation to 0."""
        self._library.afd_dsv4_emulation_reset_counters()

    def counters(self) -> dict[str, int]:
        """What launches did since `reset_counters`, over all cores (kernels_ascendc/softnpu/ascendc/counters.h)."""
        names = self._library.afd_dsv4_emulation_counter_names
        value = self._library.afd_dsv4_emulation_counter
        names.restype, value.restype = ctypes.c_char_p, ctypes.c_int64
        return {name: int(value(name.encode())) for name in names().decode().split(",")}


def _name(params: CompressParams | TailParams) -> str:
    return "compress" if isinstance(params, CompressParams) else "tail_update"


def _bytes(params: CompressParams | TailParams) -> dict[str, int]:
    """Least bytes of each array of a launch."""
    element = {Dtype.FP32: 4, Dtype.BF16: 2}
    sizes = {
        "rows": (params.carry + params.tokens) * params.row_stride * element[params.row_dtype],
        "pool": params.pool_pages * params.page_stride * 4,
        "ape": params.ratio * params.coff * params.head_dim * 4,
        "cu_seqlens": (params.requests + 1) * 4,
        "starts": params.requests * 4,
        "table": params.requests * params.columns * 4,
    }
    if isinstance(params, CompressParams):
        sizes |= {
            "norm_weight": params.head_dim * element[params.norm_dtype],
            "cos": params.out_rows * params.rope_head_dim * 4,
            "sin": params.out_rows * params.rope_head_dim * 4,
            "out": params.out_rows * params.head_dim * element[params.out_dtype],
        }
    return sizes
