# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""`afd-dsv4 kernels report`: what our kernels take of the device, and how near the model puts them to its memory.

Problem: no kernel has run on hardware, and figures from a desk drift away from the code.
Way: Unified Buffer from the tiling that the kernels compile in; bytes and vector instructions counted while the strict
host emulation runs each kernel; time from those counts by `compressor/roofline.py`; slots from `workspace/sizing.py`,
which also sizes what is allocated. Each figure carries its source, and is held to the limits of the design: a miss is
a line that says by how much, and exit status 1. The limits of bytes are of a whole chunk (phase 1); what a tile of
the default size moves, on all cores, stands beside them and has none.
What it does not do: measure. The emulation knows nothing of time, and the model leaves out what its docstring says.
"""

from __future__ import annotations

import json
import os
import reprlib
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afd_dsv4.admission import MIB
from afd_dsv4.compressor import library, reference, roofline
from afd_dsv4.compressor.kernels import CompressParams, Dtype, Figures, Kernel, Kernels, TailParams
from afd_dsv4.compressor.reference import PoolSpec
from afd_dsv4.compressor.roofline import ModelledTime, modelled_time
from afd_dsv4.geometry import CompressorKind, InputError, preset
from afd_dsv4.workspace.sizing import staging_areas

EXIT_MISSED: Final = 1

#: What a launch is counted with: a sixteenth of a 32,768-token prefill on a sixteenth of the 48 cores, so that what
#: each core loads for itself is as much per token.
PREFILL_TOKENS: Final = 2048
PREFILL_CORES: Final = 3
#: C128 loads its APE once per core and slice of columns, whatever the tokens: only the whole launch tells.
WHOLE_TOKENS: Final = 32768
#: `tail_update` is counted for a batch of decodes, in which every row is a row of a tail.
DECODES: Final = 48

UB_BYTES: Final = 188_160  # 192 KiB less what the compiler reserves
PHASE_2_TILE: Final = 2048
PHASE_2_CHUNKS: Final = (32768, 1 << 20)
MAX_SEQS: Final = 128
ROOFLINE: Final = 0.85

_KINDS: Final = {
    "compress_c4": (CompressorKind.C4, reference.C4),
    "compress_c4_indexer": (CompressorKind.C4_INDEXER, reference.C4_INDEXER),
    "compress_c128": (CompressorKind.C128, reference.C128),
    "tail_update": (CompressorKind.C4, reference.C4),
}
#: Most bytes per token, by kernel and type of the staging rows.
_BYTES: Final = {
    ("compress_c4", "fp32"): 8700,
    ("compress_c4", "bf16"): 4600,
    ("compress_c128", "fp32"): 4300,
}


@dataclass(frozen=True)
class KernelFigures:
    """One kernel with one type of staging rows.

    Attributes:
        kernel: its name in the C ABI; `compress_c128` is two kernels in one launch.
        row_dtype: type of the staging rows.
        counted: tokens, and cores of the emulation, of the launch that was counted.
        ub_bytes: Unified Buffer it reserves, of two kernels the larger.
        counted_ub_bytes: the same as the emulation saw it.
        bytes_per_token: read and written in device memory.
        bytes_per_token_tiled: the same for a tile of 2,048 tokens on all cores, of which each loads its constants for
            few windows; None for `tail_update`.
        vector_instructions_per_token: of all cores together.
        roofline_fraction_modelled: memory time over modelled time.
        roofline_fraction_if_all_wait: the same if every vector instruction waited for the one before.
        time: nanoseconds per token by the model.
        slot_bytes: staging rows and workspace of this kernel in a slot: of a chunk of 32,768 tokens (phase 1), and of a
            tile of 2,048 (phase 2).
    """

    kernel: str
    row_dtype: str
    counted: tuple[int, int]
    ub_bytes: int
    counted_ub_bytes: int
    bytes_per_token: float
    bytes_per_token_tiled: float | None
    vector_instructions_per_token: float
    roofline_fraction_modelled: float
    roofline_fraction_if_all_wait: float
    time: ModelledTime
    slot_bytes: tuple[int, int]


@dataclass(frozen=True)
class Limit:
    """One figure held to its limit."""

    name: str
    found: float
    limit: float
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Whether the figure is on the right side; a NaN is on none."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def __str__(self) -> str:
        side = "at least" if self.at_least else "at most"
        return f"{self.name}: {_number(self.found)}, {side} {_number(self.limit)}"


@dataclass(frozen=True)
class Report:
    """All figures of one library."""

    backend: str
    kernels: tuple[KernelFigures, ...]
    slot_rows_phase_1: int
    slot_phase_2: dict[int, int]

    def limits(self) -> list[Limit]:
        """Every figure that has a limit."""
        found = []
        for figures in self.kernels:
            name = f"{figures.kernel} {figures.row_dtype}"
            found.append(Limit(f"{name}, UB bytes", figures.ub_bytes, UB_BYTES))
            found.append(Limit(f"{name}, UB bytes counted", figures.counted_ub_bytes, figures.ub_bytes))
            if limit := _BYTES.get((figures.kernel, figures.row_dtype)):
                found.append(Limit(f"{name}, bytes per token of a whole chunk", figures.bytes_per_token, limit))
            found.append(
                Limit(f"{name}, share of the roofline by the model", figures.roofline_fraction_modelled, ROOFLINE, True)
            )
        found.append(Limit("slot of phase 1 at 32,768 tokens, bytes of rows", self.slot_rows_phase_1, 320 * MIB))
        for chunk, size in self.slot_phase_2.items():
            found.append(Limit(f"slot of phase 2 at {chunk:,} tokens and {MAX_SEQS} requests, bytes", size, 24 * MIB))
        return found

    def missed(self) -> list[Limit]:
        """Those that are not kept."""
        return [limit for limit in self.limits() if not limit.kept]


def run(as_json: bool) -> tuple[str, int]:
    """The report as text, and the exit status.

    Raises:
        InputError: the kernels are not built, or are no emulation, which alone can count.
    """
    return answer(measure(Kernels(find())), as_json)


def answer(report: Report, as_json: bool) -> tuple[str, int]:
    """A report as text, and the exit status: 1 if a limit is missed."""
    return (_json(report) if as_json else _text(report)), EXIT_MISSED if report.missed() else 0


def find() -> Path:
    """The library, in the folders of `library.find`, or in the build of a checkout; torch's operators are not needed.

    Raises:
        InputError: it is not there.
    """
    package = Path(__file__).resolve().parent
    built, installed = package.parent / "build" / "softnpu", package / "lib"
    given = (os.environ.get(name, "").strip() for name in (library.VARIABLE, library.SOFTWARE_NPU))
    named = next(filter(None, given), None)
    try:
        folder = Path(named) if named else installed if (installed / library.KERNELS).is_file() else built
        there = (folder / library.KERNELS).is_file()
    except OSError as error:
        remedy = f"name another folder in {library.VARIABLE}"
        raise InputError("kernels", f"{reprlib.repr(named)} cannot be read ({error.strerror})", remedy) from None
    if not there:
        raise InputError(
            "kernels",
            f"{folder} has no {library.KERNELS}",
            "the report needs the host emulation: run `make setup` in a checkout of afd-dsv4, no CANN is needed",
        )
    return folder / library.KERNELS


def measure(kernels: Kernels) -> Report:
    """Run every kernel in the emulation, and put its figures together."""
    if kernels.backend != "emulation":
        raise InputError(
            "kernels",
            f"the back end is {kernels.backend!r}, which counts nothing",
            f"point {library.VARIABLE} to the folder of the host emulation (build/softnpu of a checkout)",
        )
    found = [
        _measure(kernels, name, dtype)
        for name in ("compress_c4", "compress_c4_indexer", "compress_c128")
        for dtype in Dtype
    ]
    found.append(_measure(kernels, "tail_update", Dtype.FP32))
    geometry = preset("flash")
    rows = sum(WHOLE_TOKENS * geometry.row_bytes(kind) for kind in (CompressorKind.C4, CompressorKind.C4_INDEXER))
    tiled = {
        chunk: sum(
            staging_areas(
                geometry, max_num_seqs=MAX_SEQS, max_num_batched_tokens=chunk, tile_tokens=PHASE_2_TILE
            ).values()
        )
        for chunk in PHASE_2_CHUNKS
    }
    return Report(kernels.backend, tuple(found), rows, tiled)


def _measure(kernels: Kernels, name: str, dtype: Dtype) -> KernelFigures:
    spec, tail = _KINDS[name][1], name == "tail_update"
    tokens, cores = (PREFILL_TOKENS, PREFILL_CORES) if spec.overlap else (WHOLE_TOKENS, roofline.CORES)
    lengths = [1] * DECODES if tail else [tokens]
    if tail:
        tokens, cores = DECODES, DECODES
    launch = Launch(spec, lengths, dtype)
    static = _static(kernels, name, launch)
    counted = _count(kernels, launch, cores, tail=tail)
    tile = None if tail else _count(kernels, Launch(spec, [PHASE_2_TILE], dtype), roofline.CORES)
    time = modelled_time(counted, tokens)
    return KernelFigures(
        kernel=name,
        row_dtype=dtype.name.lower(),
        counted=(tokens, cores),
        ub_bytes=max(figures.ub_bytes for figures in static),
        counted_ub_bytes=counted["ub_bytes"],
        bytes_per_token=_moved(counted) / tokens,
        bytes_per_token_tiled=None if tile is None else _moved(tile) / PHASE_2_TILE,
        vector_instructions_per_token=sum(n for key, n in counted.items() if key.startswith("instructions.")) / tokens,
        roofline_fraction_modelled=time.fraction,
        roofline_fraction_if_all_wait=time.least_fraction,
        time=time,
        slot_bytes=(
            _slot(kernels, spec, dtype, WHOLE_TOKENS, 0),
            _slot(kernels, spec, dtype, PHASE_2_TILE, spec.ratio if spec.overlap else 0),
        ),
    )


def _count(kernels: Kernels, launch: Launch, cores: int, *, tail: bool = False) -> dict[str, int]:
    arrays = launch.arrays(kernels)
    kernels.reset_counters()
    if tail:
        kernels.tail_update(cores, launch.tail, arrays)
    else:
        kernels.compress(cores, launch.compress, arrays)
    return kernels.counters()


def _moved(counted: dict[str, int]) -> int:
    return sum(counted[f"bytes.{pipe}"] for pipe in ("mte2", "mte3", "scalar"))


def _static(kernels: Kernels, name: str, launch: Launch) -> list[Figures]:
    if name == "tail_update":
        return [kernels.figures(Kernel.TAIL_UPDATE, launch.tail)]
    parts = (Kernel.COMPRESS_C4,) if launch.spec.overlap else (Kernel.POOL_C128, Kernel.NORM_ROPE)
    return [kernels.figures(part, launch.compress) for part in parts]


def _slot(kernels: Kernels, spec: PoolSpec, dtype: Dtype, tokens: int, carry: int) -> int:
    launch = Launch(spec, [tokens], dtype, carry)
    return (carry + tokens) * spec.row_dim * np.dtype(dtype.numpy).itemsize + kernels.workspace_bytes(launch.compress)


class Launch:
    """A launch of requests that begin at position 0 (a decode: behind a whole window), in memory of its own."""

    PAGE_ROWS: Final = 8

    def __init__(self, spec: PoolSpec, lengths: Sequence[int], dtype: Dtype, carry: int = 0) -> None:
        self.spec, self.lengths, self.dtype, self.carry = spec, lengths, dtype, carry
        tokens = sum(lengths)
        both: dict[str, Any] = {
            "page_stride": self.PAGE_ROWS * spec.row_dim,
            "row_stride": spec.row_dim,
            "ratio": spec.ratio,
            "coff": spec.coff,
            "head_dim": spec.head_dim,
            "requests": len(lengths),
            "columns": -(-max(lengths) // self.PAGE_ROWS),
            "page_rows": self.PAGE_ROWS,
            "pool_pages": 1 + len(lengths),
            "carry": carry,
            "tokens": tokens,
            "launch_tokens": tokens,
            "row_dtype": dtype,
        }
        self.compress = CompressParams(
            **both,
            rope_head_dim=spec.rope_head_dim,
            out_rows=min(tokens, tokens // spec.ratio + len(lengths)),
            out_dtype=Dtype.BF16,
            norm_dtype=Dtype.BF16,
            norm_eps=spec.norm_eps,
        )
        self.tail = TailParams(**both, list_ids=4)

    def arrays(self, kernels: Kernels) -> dict[str, NDArray[Any]]:
        """Its memory: rows of one number, tables that map the last page of each request."""
        spec, params = self.spec, self.compress
        workspace = max(kernels.workspace_bytes(self.compress), kernels.workspace_bytes(self.tail))
        table = np.zeros((params.requests, params.columns), np.int32)
        table[:, -1] = np.arange(1, params.requests + 1)
        rope = np.zeros((params.out_rows, spec.rope_head_dim), np.float32)
        return {
            "rows": _aligned((params.tokens + self.carry, spec.row_dim), self.dtype.numpy, 0x3F80),
            "pool": np.zeros((params.pool_pages, params.page_stride), np.float32),
            "ape": np.zeros((spec.ratio, spec.half), np.float32),
            "norm_weight": np.full(spec.head_dim, 0x3F80, np.uint16),
            "cos": rope + 1,
            "sin": rope,
            "cu_seqlens": np.cumsum([0, *self.lengths], dtype=np.int32),
            "starts": np.zeros(params.requests, np.int32),
            "table": table,
            "out": np.zeros((params.out_rows, spec.head_dim), np.uint16),
            "workspace": np.zeros(workspace // 4, np.float32),
        }


def _aligned(shape: tuple[int, int], dtype: type, bits: int) -> NDArray[Any]:
    """An array as a device allocates it, on a bound of 512 bytes, filled with bfloat16 `bits` or the same in fp32."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    memory = np.zeros(size + 512, np.uint8)
    begin = -memory.ctypes.data % 512
    array: NDArray[Any] = memory[begin : begin + size].view(dtype).reshape(shape)
    array[...] = bits if dtype is np.uint16 else 1.0
    return array


# ------------------------------------------------------------------------------------------------ output


def _sources(figures: KernelFigures) -> dict[str, str]:
    tokens, cores = figures.counted
    counted = f"counted: host emulation of {tokens:,} tokens on {cores} cores"
    return {
        "ub_bytes": "static: tiling",
        "bytes_per_token": counted,
        "bytes_per_token_tiled": f"counted: host emulation of {PHASE_2_TILE:,} tokens on {roofline.CORES} cores",
        "vector_instructions_per_token": counted,
        "roofline_fraction_modelled": "model, not a measurement",
        "roofline_fraction_if_all_wait": "model, not a measurement",
        "slot_bytes": "static: sizing",
    }


def _json(report: Report) -> str:
    kernels = []
    for figures in report.kernels:
        document = asdict(figures)
        tokens, cores = document.pop("counted")
        time = document.pop("time")
        document["slot_bytes"] = dict(zip(("phase_1", "phase_2"), figures.slot_bytes, strict=True))
        document |= {
            "counted_tokens": tokens,
            "counted_cores": cores,
            "nanoseconds_per_token_modelled": time,
            "sources": _sources(figures),
        }
        kernels.append(document)
    return json.dumps(
        {
            "backend": report.backend,
            "kernels": kernels,
            "slot": {
                "phase_1_rows_bytes": report.slot_rows_phase_1,
                "phase_2_bytes": {str(chunk): size for chunk, size in report.slot_phase_2.items()},
                "source": "static: sizing",
            },
            "model": {
                "measured": False,
                "source": "CANN documentation (cann/asc-devkit), except barrier_cycles, an estimate of ours",
                "hbm_bytes_per_second": roofline.HBM_BYTES_PER_SECOND,
                "cores": roofline.CORES,
                "clock_hz": roofline.CLOCK_HZ,
                "barrier_cycles": roofline.BARRIER_CYCLES,
                "launch_us_not_included": roofline.LAUNCH_US,
            },
            "limits": [asdict(limit) | {"kept": limit.kept} for limit in report.limits()],
            "passed": not report.missed(),
        },
        indent=2,
    )


def _text(report: Report) -> str:
    head = (
        "kernel",
        "rows",
        "UB bytes",
        "B/token",
        "in a tile",
        "vector instr./token",
        "of roofline",
        "all wait",
        "slot MiB, 1 | 2",
    )
    rows = [
        (
            figures.kernel,
            figures.row_dtype,
            f"{figures.ub_bytes:,}",
            f"{figures.bytes_per_token:,.0f}",
            "-" if figures.bytes_per_token_tiled is None else f"{figures.bytes_per_token_tiled:,.0f}",
            f"{figures.vector_instructions_per_token:.2f}",
            f"{figures.roofline_fraction_modelled:.0%}",
            f"{figures.roofline_fraction_if_all_wait:.0%}",
            " | ".join(f"{size / MIB:.2f}" for size in figures.slot_bytes),
        )
        for figures in report.kernels
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for row in (head, *rows):
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join((*names, *numbers)))
    counted = sorted({figures.counted for figures in report.kernels}, reverse=True)
    runs = ", ".join(f"{tokens:,} tokens on {cores} cores" for tokens, cores in counted)
    tiled = ", ".join(f"{size / MIB:.2f} MiB for a chunk of {chunk:,}" for chunk, size in report.slot_phase_2.items())
    notes = [
        f"UB bytes: static, from the tiling. B/token and instructions: counted by the host emulation of {runs};",
        "tail_update in a batch of decodes, where every row is a row of a tail.",
        f"The limits of bytes are of these, whole chunks (phase 1). In a tile: {PHASE_2_TILE:,} tokens on",
        f"{roofline.CORES} cores (phase 2), each of which loads APE and norm weights for few windows, all but one of",
        "them out of the second-level cache, which is counted as memory; no limit is set for it.",
        f"\nOf roofline: a model, not a measurement: HBM at {roofline.HBM_BYTES_PER_SECOND / 1e12:.1f} TB/s against",
        f"{roofline.CORES} vector cores at {roofline.CLOCK_HZ / 1e9:.2f} GHz, elements per cycle by operation as the",
        f"CANN documentation has them, and {roofline.BARRIER_CYCLES:.0f} cycles a barrier, an estimate of ours.",
        "All wait: the same if every instruction waited for the one before.",
        f"Starting a kernel on all cores takes about {roofline.LAUNCH_US:.0f} us by that documentation; not in it.",
        "\nSlot: rows and workspace of the kernel alone, in phase 1 (32,768 tokens at once) | 2 (tiles of 2,048).",
        f"One slot of phase 1 has {report.slot_rows_phase_1 / MIB:.0f} MiB of rows for 32,768 tokens (C4 and its",
        f"indexer; C128 has the same memory); one of phase 2 {tiled}.",
    ]
    missed = report.missed()
    return "\n".join(
        [
            f"Kernels of the back end {report.backend!r}. Nothing here was measured on hardware.",
            "",
            *lines,
            "",
            *(textwrap.fill(note, 110) for note in " ".join(notes).split("\n")),
            "",
            *(f"MISSED {limit}" for limit in missed),
            f"{len(report.limits()) - len(missed)} of {len(report.limits())} limits kept.",
        ]
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
