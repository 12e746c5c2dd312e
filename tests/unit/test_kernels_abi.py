# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The C ABI of our kernels: its mirror in Python, what is refused, the tiling, and what it says of itself."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from afd_dsv4.compressor.kernels import CompressParams, Dtype, Figures, Kernel, Kernels, Refused, TailParams
from afd_dsv4.compressor.roofline import RATES, REPEAT
from afd_dsv4.geometry import InputError
from afd_dsv4.kernels_report import UB_BYTES, Launch
from tests import kernels_world
from tests.kernels_world import KINDS, Case, Request, World

SOURCES = Path(__file__).resolve().parents[2] / "kernels_ascendc" / "compressor"
TYPES = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float, "double": ctypes.c_double}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_world.library()


def parts(kind: str) -> tuple[Kernel, ...]:
    return (Kernel.POOL_C128, Kernel.NORM_ROPE) if kind == "c128" else (Kernel.COMPRESS_C4,)


@pytest.mark.parametrize(
    ("struct", "mirror"),
    [("AfdDsv4CompressParams", CompressParams), ("AfdDsv4TailParams", TailParams), ("AfdDsv4Figures", Figures)],
)
def test_the_structs_mirror_the_header(struct: str, mirror: type[ctypes.Structure]) -> None:
    header = (SOURCES / "kernels.h").read_text(encoding="utf-8")
    body = header.split(f"typedef struct {struct} {{")[1].split("}")[0]
    fields = re.findall(r"^\s*(\w+) (\w+);", body, re.MULTILINE)
    assert [(name, TYPES[kind]) for kind, name in fields] == [tuple(field) for field in mirror._fields_]


def test_the_interface_names_no_type_of_torch_or_of_the_device() -> None:
    header = (SOURCES / "kernels.h").read_text(encoding="utf-8")
    assert re.findall(r"#include (\S+)", header) == ["<stddef.h>", "<stdint.h>"]


def test_nothing_outside_the_software_npu_includes_a_header_of_the_host() -> None:
    """What compiles for the device sees AscendC's header, its own, and fixed-width numbers."""
    of_cann = {"kernel_operator.h", "cpu_debug_launch.h", "acl/acl.h"}
    allowed = {"stdint.h", "stddef.h", "stdio.h", *of_cann, *(path.name for path in SOURCES.glob("*.h"))}
    kernel_headers = {"compress_c4.h", "compress_c128.h", "norm_rope.h", "tail_update.h", "vector.h", "metadata.h"}
    seen, queue = set(), ["compressor.asc"]
    while queue:
        name = queue.pop()
        seen.add(name)
        included = re.findall(r'#include [<"]([^>"]+)[>"]', (SOURCES / name).read_text(encoding="utf-8"))
        assert set(included) <= allowed, name
        queue += [other for other in included if (SOURCES / other).is_file() and other not in seen]
    assert seen >= {"entries.h", "tiling.h", "faults.h", *kernel_headers}
    includes = "\n".join(
        re.findall(r"#include .*", "\n".join(p.read_text(encoding="utf-8") for p in SOURCES.glob("*.*")))
    )
    assert "kernel_operator.h" in includes
    assert "softnpu" not in includes


REFUSED = [  # field, value, what the reason begins with
    ("ratio", 1, "ratio: found 1, and these windows"),
    ("ratio", 2, "ratio: found 2, and these windows"),
    ("ratio", 8, "ratio, coff, head_dim: found 8, 2, 512"),
    ("coff", 1, "ratio, coff, head_dim: found 4, 1, 512"),
    ("head_dim", 256, "ratio, coff, head_dim: found 4, 2, 256"),
    ("rope_head_dim", 32, "rope_head_dim: found 32, expected 64"),
    ("requests", 0, "requests: found 0"),
    ("requests", 4097, "requests: found 4097"),
    ("columns", 0, "columns: found 0"),
    ("page_rows", 0, "page_rows: found 0"),
    ("pool_pages", 0, "pool_pages: found 0"),
    ("page_stride", 100, "page_stride: found 100"),
    ("row_stride", 100, "row_stride: found 100"),
    ("carry", 5, "carry: found 5"),
    ("carry", -1, "carry: found -1"),
    ("first_token", -1, "first_token: found -1"),
    ("tokens", 0, "tokens: found 0"),
    ("tokens", 17, "tokens: found 17"),
    ("launch_tokens", 0, "launch_tokens: found 0"),
    ("out_rows", 6, "out_rows: found 6, expected 5"),
    ("row_dtype", 2, "row_dtype: found 2"),
    ("out_dtype", -1, "out_dtype: found -1"),
    ("norm_dtype", 7, "norm_dtype: found 7"),
    ("norm_eps", float("nan"), "norm_eps"),
    ("norm_eps", -1.0, "norm_eps"),
    ("reserved", 1, "reserved: found 1"),
]


@pytest.mark.parametrize(("field", "value", "reason"), REFUSED)
def test_constants_that_no_kernel_takes_are_refused_before_anything_runs(
    kernels: Kernels, field: str, value: float, reason: str
) -> None:
    world = World(Case("c4", (Request(0, 16),)))
    compress, tail = world.params(range(16), 0)
    assert kernels.refusal(compress) is None
    assert kernels.refusal(tail) is None
    rows = world.memory.input("rows", world.raw[0])
    workspace = world.memory.array("workspace", (kernels.workspace_bytes(compress) // 4,), np.float32)
    arrays = world.arrays | {"rows": rows, "workspace": workspace}
    for params, launch in ((compress, kernels.compress), (tail, kernels.tail_update)):
        if hasattr(params, field):
            setattr(params, field, value)
            assert (kernels.refusal(params) or "").startswith(reason)
            with pytest.raises(Refused, match=re.escape(reason)):
                launch(3, params, arrays)
            with pytest.raises(Refused, match=re.escape(reason)):
                kernels.workspace_bytes(params)
    clean = np.empty_like(world.out)
    kernels_world.poison(clean)
    assert kernels_world.same(world.out, clean).all()
    assert world.memory.differences() == []


@pytest.mark.parametrize("blocks", [0, 129, 2**32 - 1])
def test_a_number_of_cores_that_no_device_has_is_refused(kernels: Kernels, blocks: int) -> None:
    with pytest.raises(Refused, match=f"blocks: found {blocks}, expected 1..128"):
        World(Case("c4", (Request(0, 16),), blocks=blocks)).launch(kernels)


@pytest.mark.parametrize("list_ids", [0, -1, 10**6])
def test_lists_that_a_tail_cannot_have_are_refused(kernels: Kernels, list_ids: int) -> None:
    tail = World(Case("c4", (Request(0, 16),))).params(range(16), 0)[1]
    tail.list_ids = list_ids
    assert (kernels.refusal(tail) or "").startswith(f"list_ids: found {list_ids}, expected 1..")


def test_an_array_that_is_smaller_than_the_constants_say_never_reaches_the_library(kernels: Kernels) -> None:
    world = World(Case("c4", (Request(0, 16),)))
    compress = world.params(range(16), 0)[0]
    arrays = world.arrays | {"rows": world.raw[0][:15], "workspace": np.zeros(2048, np.float32)}
    with pytest.raises(ValueError, match=r"rows: found 122880 bytes, expected 131072"):
        kernels.compress(1, compress, arrays)


def test_the_workspace_grows_with_the_windows_of_a_tile_and_not_with_the_launch(kernels: Kernels) -> None:
    sizes = {}
    for kind in KINDS:
        for launch_tokens, tokens in ((2048, 2048), (1 << 20, 2048)):
            params = Launch(KINDS[kind], [tokens], Dtype.FP32).compress
            params.launch_tokens = launch_tokens
            params.out_rows = launch_tokens // params.ratio + 1
            sizes[kind, launch_tokens] = kernels.workspace_bytes(params)
    # 8,192 bytes of faults; C128 puts a row of 512 floats behind them for each window: 2,048 / 128, and one a request.
    assert set(sizes.values()) == {8192, 8192 + 17 * 2048}
    assert sizes["c128", 2048] == sizes["c128", 1 << 20] == 8192 + 17 * 2048


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("kind", KINDS)
def test_the_unified_buffer_that_a_kernel_reserves_is_what_its_tiling_says(
    kernels: Kernels, kind: str, dtype: Dtype
) -> None:
    launch = Launch(KINDS[kind], [512], dtype)
    kernels.set("order", 0)
    arrays = launch.arrays(kernels)
    kernels.reset_counters()
    kernels.compress(2, launch.compress, arrays)
    reserved = [kernels.figures(part, launch.compress).ub_bytes for part in parts(kind)]
    assert kernels.counters()["ub_bytes"] == max(reserved)
    assert max(reserved) <= UB_BYTES
    kernels.reset_counters()
    kernels.tail_update(2, launch.tail, arrays)
    assert kernels.counters()["ub_bytes"] == kernels.figures(Kernel.TAIL_UPDATE, launch.tail).ub_bytes <= UB_BYTES


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_counted_is_near_what_the_tiling_promises(kernels: Kernels, kind: str, dtype: Dtype) -> None:
    """Full tiles on one core; on top come the tables, and what a core loads once, which is the APE above all."""
    tokens = 4096
    launch = Launch(KINDS[kind], [tokens], dtype)
    arrays = launch.arrays(kernels)
    kernels.reset_counters()
    kernels.compress(1, launch.compress, arrays)
    counted = kernels.counters()
    figures = [kernels.figures(part, launch.compress) for part in parts(kind)]
    moved = sum(counted[f"bytes.{pipe}"] for pipe in ("mte2", "mte3", "scalar")) / tokens
    instructions = sum(n for name, n in counted.items() if name.startswith("instructions.")) / tokens
    promised = sum(f.bytes for f in figures)
    assert promised <= moved <= 1.01 * promised + arrays["ape"].nbytes / tokens
    assert instructions == pytest.approx(sum(f.instructions for f in figures), rel=0.03)
    assert counted["barriers"] / tokens == pytest.approx(sum(f.barriers for f in figures), rel=0.1)
    repeats = ((name.partition(".")[2], n) for name, n in counted.items() if name.startswith("repeats."))
    cycles = sum(n * REPEAT / RATES[operation] for operation, n in repeats) / tokens
    assert cycles == pytest.approx(sum(f.cycles for f in figures), rel=0.01)


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize("kind", KINDS)
def test_what_tail_update_is_counted_to_do_with_full_pieces_is_what_its_tiling_promises(
    kernels: Kernels, kind: str, dtype: Dtype
) -> None:
    """Requests of one page of 8 rows. A decode's piece is one row, and takes more for a row: the report counts that."""
    launch = Launch(KINDS[kind], [8] * 64, dtype)
    arrays = launch.arrays(kernels)
    kernels.reset_counters()
    kernels.tail_update(1, launch.tail, arrays)
    counted, figures = kernels.counters(), kernels.figures(Kernel.TAIL_UPDATE, launch.tail)
    rows = 8 * 64
    moved = sum(counted[f"bytes.{pipe}"] for pipe in ("mte2", "mte3", "scalar")) / rows
    assert figures.bytes <= moved <= 1.03 * figures.bytes
    instructions = sum(n for name, n in counted.items() if name.startswith("instructions.")) / rows
    assert instructions == pytest.approx(figures.instructions)
    assert counted["barriers"] / rows == pytest.approx(figures.barriers)
    repeats = ((name.partition(".")[2], n) for name, n in counted.items() if name.startswith("repeats."))
    assert sum(n * REPEAT / RATES[operation] for operation, n in repeats) / rows == pytest.approx(figures.cycles)


def test_a_kernel_of_another_launch_has_no_figures(kernels: Kernels) -> None:
    params = Launch(KINDS["c4"], [512], Dtype.FP32).compress
    with pytest.raises(Refused, match="kernel: found 1, which is not one of a launch with ratio 4"):
        kernels.figures(Kernel.POOL_C128, params)


def test_the_tiling_is_plain_c_plus_plus_that_refuses_to_outgrow_the_buffer() -> None:
    text = (SOURCES / "tiling.h").read_text(encoding="utf-8")
    assert f"kUnifiedBufferBytes = {UB_BYTES}" in text
    assert re.findall(r"#include (\S+)", text) == ["<stdint.h>"]
    tilings = re.findall(r"^struct (\w+Tiling) \{", text, re.MULTILINE)
    assert set(tilings) == {"NormRopeTiling", "C4Tiling", "C128Tiling", "FinishTiling", "TailTiling"}
    # NormRopeTiling is a part of the others, and counted there.
    assert text.count("static_assert(kBytes <= kUnifiedBufferBytes") == len(tilings) - 1


def test_a_file_that_is_no_library_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "no.so").write_text("nothing")
    with pytest.raises(InputError, match=r"no\.so cannot be used .*; build it anew"):
        Kernels(tmp_path / "no.so")


def test_a_switch_that_the_emulation_lacks_is_an_error(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="speed=1: the back end 'emulation' has no such switch"):
        kernels.set("speed", 1)
