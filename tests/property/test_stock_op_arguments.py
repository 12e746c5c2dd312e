# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the stock compressor refuses on the host, argument by argument, which limits can be waived, and the switches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from afd_dsv4.compressor.reference import C128, PoolSpec
from tests import stock_op
from tests.stock_op import REAL, Chunk, Model, Refused, options, waived

Change = Callable[[dict[str, Any]], None]


def arguments() -> dict[str, Any]:
    """A launch the stock operator accepts with every limit in force: two requests, 24 tokens, hidden 1024, D 128."""
    model = Model.random(np.random.default_rng(0), REAL["c4_indexer"], [4, 20], hidden=1024)
    chunks = [Chunk(0, 0, 4), Chunk(1, 0, 20)]
    state, table = model.dense(chunks, 8)
    return model.arguments(chunks, state, table)


def put(name: str, value: Any) -> Change:
    return lambda a: a.update({name: value})


def cut(name: str, *index: Any) -> Change:
    return lambda a: a.update({name: np.ascontiguousarray(a[name][index])})


def to(name: str, dtype: Any) -> Change:
    return lambda a: a.update({name: a[name].astype(dtype)})


def extend(name: str) -> Change:
    return lambda a: a.update({name: np.concatenate([a[name], a[name][:1]])})


REQUIRED = [
    *("x", "wkv", "wgate", "state_cache", "ape", "norm_weight", "rope_sin", "rope_cos"),
    *("state_block_table", "cu_seqlens"),
]

REFUSALS: list[tuple[str, Change, str]] = [
    *((f"{n} missing", put(n, None), f"compressor: {n}: found None, expected a tensor") for n in REQUIRED),
    ("seqused given", put("seqused", np.zeros(2, np.int32)), "seqused: found a tensor, expected None"),
    ("x of one dim", cut("x", 0), r"x: found 1 dims \[1024\], expected 2 dims"),
    ("x of three dims", lambda a: a.update(x=a["x"][None]), r"x: found 3 dims \[1, 24, 1024\], expected 2"),
    ("wkv of one dim", cut("wkv", 0), "wkv: found 1 dims"),
    ("wgate of one dim", cut("wgate", 0), "wgate: found 1 dims"),
    ("state_cache of four dims", lambda a: a.update(state_cache=a["state_cache"][:, :, None]), "state_cache: found 4"),
    ("ape of one dim", cut("ape", 0), "ape: found 1 dims"),
    ("norm_weight of two dims", lambda a: a.update(norm_weight=a["norm_weight"][None]), "norm_weight: found 2 dims"),
    ("rope_sin of three dims", lambda a: a.update(rope_sin=a["rope_sin"][None]), "rope_sin: found 3 dims"),
    ("rope_cos of three dims", lambda a: a.update(rope_cos=a["rope_cos"][None]), "rope_cos: found 3 dims"),
    ("table of one dim", cut("state_block_table", 0), "state_block_table: found 1 dims"),
    ("cu_seqlens of two dims", lambda a: a.update(cu_seqlens=a["cu_seqlens"][None]), "cu_seqlens: found 2 dims"),
    ("start_pos of two dims", lambda a: a.update(start_pos=a["start_pos"][None]), "start_pos: found 2 dims"),
    ("cache mode 2", put("cache_mode", 2), "cache_mode: found 2, expected 1"),
    ("cache mode 0", put("cache_mode", 0), "cache_mode: found 0, expected 1"),
    ("rotary mode 1", put("rotary_mode", 1), "rotary_mode: found 1, expected 2"),
    ("ratio 0", put("cmp_ratio", 0), "cmp_ratio: found 0, expected greater than 0"),
    ("coff 3", put("coff", 3), "coff: found 3, expected 1 or 2"),
    ("odd rope head dim", put("rope_head_dim", 63), "rope_head_dim: found 63"),
    ("x of float32", to("x", np.float32), "x: found float32, expected bfloat16 or float16 .*waiver 'compressor.fp32'"),
    ("x of float64", to("x", np.float64), "x: found another type"),
    ("wkv of another type", to("wkv", np.float16), "wkv: found float16, expected bfloat16"),
    ("wgate of another type", to("wgate", np.float32), "wgate: found float32, expected bfloat16"),
    ("norm_weight in float32", to("norm_weight", np.float32), "norm_weight: found float32, expected bfloat16 .as x"),
    ("state_cache in float16", to("state_cache", np.float16), "state_cache: found float16, expected float32"),
    ("ape in float16", to("ape", np.float16), "ape: found float16, expected float32"),
    ("rope_sin of another type", to("rope_sin", np.float16), "rope_sin: found float16, expected bfloat16"),
    ("rope_cos of another type", to("rope_cos", np.uint16), "rope_cos: found bfloat16, expected float32 .as rope_sin"),
    ("table in int64", to("state_block_table", np.int64), "state_block_table: found another type, expected int32"),
    ("cu_seqlens in int64", to("cu_seqlens", np.int64), "cu_seqlens: found another type, expected int32"),
    ("start_pos in int64", to("start_pos", np.int64), "start_pos: found another type, expected int32"),
    ("a cache without pages", cut("state_cache", slice(0)), "state_cache: found an empty tensor"),
    ("a cache without rows", cut("state_cache", slice(None), slice(0)), "state_cache: found an empty tensor"),
    ("a table without columns", cut("state_block_table", slice(None), slice(0)), "state_block_table: found an empty"),
    ("no hidden", lambda a: [cut(n, slice(None), slice(0))(a) for n in ("x", "wkv", "wgate")] and None, "x: found an"),
    ("no rope rows", lambda a: [cut(n, slice(0))(a) for n in ("rope_sin", "rope_cos")] and None, "rope_sin: found an"),
    ("cu_seqlens without entries", cut("cu_seqlens", slice(0)), "cu_seqlens: found an empty tensor"),
    ("a request too many in the table", extend("state_block_table"), r"state_block_table: found dim 0 = 3 .* 2 .batch"),
    ("a request too many in cu_seqlens", extend("cu_seqlens"), r"state_block_table: found dim 0 = 2 .* 3 .batch"),
    ("a start too many", extend("start_pos"), r"start_pos: found dim 0 = 3 .* 2 .batch"),
    ("wkv too long", extend("wkv"), r"wkv: found dim 0 = 257 .* 256 .coff"),
    ("wgate too long", extend("wgate"), r"wgate: found dim 0 = 257 .* 256 .coff"),
    ("wkv too narrow", cut("wkv", slice(None), slice(1023)), r"wkv: found dim 1 = 1023 .* 1024 .hidden"),
    ("wgate too narrow", cut("wgate", slice(None), slice(1023)), r"wgate: found dim 1 = 1023 .* 1024 .hidden"),
    ("rows of the cache too narrow", cut("state_cache", ..., slice(511)), r"state_cache: found dim 2 = 511 .* 512"),
    ("ape too long", extend("ape"), r"ape: found dim 0 = 5 .* 4 .cmp_ratio"),
    ("ape too narrow", cut("ape", slice(None), slice(128)), r"ape: found dim 1 = 128 .* 256"),
    ("a rope_sin row too many", extend("rope_sin"), r"rope_sin: found dim 0 = 9 .* 8 .min"),
    ("a rope_cos row too many", extend("rope_cos"), r"rope_cos: found dim 0 = 9 .* 8 .min"),
    ("a rope_sin row too few", cut("rope_sin", slice(7)), r"rope_sin: found dim 0 = 7 .* 8 .min"),
    ("rope_sin too narrow", cut("rope_sin", slice(None), slice(62)), r"rope_sin: found dim 1 = 62 .* 64"),
    ("rope_cos too narrow", cut("rope_cos", slice(None), slice(62)), r"rope_cos: found dim 1 = 62 .* 64"),
    ("x in columns", lambda a: a.update(x=np.asfortranarray(a["x"])), "x: found last stride 24, expected 1"),
    ("a transposed weight", lambda a: a.update(wkv=np.asfortranarray(a["wkv"])), "wkv: found last stride"),
    ("pages that overlap", lambda a: a.update(state_cache=np.lib.stride_tricks.as_strided(
        a["state_cache"], strides=(512 * 4, 512 * 4, 4))), "state_cache: found stride 512 in dim 0, expected at least"),
    ("rows of a page apart", lambda a: a.update(state_cache=np.lib.stride_tricks.as_strided(
        a["state_cache"], (2, 4, 512), (8 * 512 * 4, 2 * 512 * 4, 4))), "state_cache: found stride 1024 in dim 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_a_launch_that_breaks_the_contract_is_refused_with_what_and_why(change: Change, message: str) -> None:
    given = arguments()
    stock_op.compressor(given)  # fine before the change
    given["state_cache"][...] = 3.0
    out = given["out"] = np.full((8, 128), 9, np.uint16)
    change(given)
    with pytest.raises(Refused, match=message):
        stock_op.compressor(given)
    assert (out == 9).all(), "a refused launch must write nothing"
    if given["state_cache"] is not None and given["state_cache"].dtype == np.float32:
        assert (given["state_cache"] == 3.0).all()


LIMITS: list[tuple[str, PoolSpec, int, str]] = [
    ("hidden", C128, 512, "x: found hidden 512, expected 1024..10240 and a multiple of 512"),
    ("hidden", C128, 1025, "x: found hidden 1025"),
    ("hidden", C128, 10752, "x: found hidden 10752"),
    ("head_dim", PoolSpec(4, 2, 256), 1024, "norm_weight: found head dim 256, expected 128 or 512"),
    ("rope_head_dim", PoolSpec(4, 2, 128, rope_head_dim=32), 1024, "rope_head_dim: found 32, expected 64"),
    ("scenario", PoolSpec(8, 1, 128), 1024, "found 8, 1, 128, expected 4, 2, 512"),
    ("scenario", PoolSpec(128, 1, 128), 1024, "found 128, 1, 128"),
]


@pytest.mark.parametrize(("waiver", "spec", "hidden", "message"), LIMITS)
def test_each_limit_names_its_waiver_and_the_waiver_lifts_it(
    waiver: str, spec: PoolSpec, hidden: int, message: str, rng: np.random.Generator
) -> None:
    model = Model.random(rng, spec, [spec.ratio], hidden=hidden)
    chunk = Chunk(0, 0, spec.ratio)
    given = model.arguments([chunk], *model.dense([chunk], 8))
    with pytest.raises(Refused, match=f"{message}.*waiver 'compressor.{waiver}'"):
        stock_op.compressor(given)
    with waived(waiver):
        out = stock_op.compressor(given)
    assert stock_op.same_bits(out[:1], stock_op.cast(model.expected(chunk), out.dtype))
    with pytest.raises(Refused, match=message):  # in force again
        stock_op.compressor(given)


@pytest.mark.parametrize("spec", [PoolSpec(2, 2, 40, 8), PoolSpec(1, 1, 200, 2), PoolSpec(64, 2, 65, 64)])
def test_odd_shapes_follow_the_same_order_of_operations(spec: PoolSpec, rng: np.random.Generator) -> None:
    chunks = [Chunk(0, 0, 300), Chunk(1, 70, 130)]
    model = Model.random(rng, spec, [300, 200], dtype=np.float32)
    with waived():
        out = stock_op.compressor(model.arguments(chunks, *model.dense(chunks, 8)))
    expected = np.concatenate([model.expected(chunk) for chunk in chunks])
    assert stock_op.same_bits(out[: len(expected)], expected)


def test_unknown_waivers_options_and_counters_are_refused_with_the_known_names() -> None:
    library = stock_op.core()
    assert library.softnpu_waive(b"compressor.nonsense", 1) == -1
    assert "no waiver is called 'compressor.nonsense'; there are: compressor.hidden," in stock_op.last_error()
    assert library.softnpu_is_waived(b"hidden") == -1
    with pytest.raises(ValueError, match=r"no option is called 'compressor.core'; there are: .*compressor.cores"):
        stock_op.set_option("core", 1)
    with pytest.raises(ValueError, match=r"option compressor.cores: found 0, expected 1\.\.96"):
        stock_op.set_option("cores", 0)
    with pytest.raises(ValueError, match=r"option compressor.saturate: found 2, expected 0\.\.1"):
        stock_op.set_option("saturate", 2)
    with pytest.raises(ValueError, match=r"no counter is called 'rows'"):
        stock_op.stat("rows")


def test_names_are_listed_and_waivers_are_off_at_start() -> None:
    library = stock_op.core()
    names = library.softnpu_waiver_names().decode().split(",")
    own = [name for name in names if name.startswith("compressor.")]  # other operators' libraries add theirs
    assert own == names[: len(own)] == [f"compressor.{name}" for name in stock_op.WAIVERS]
    assert all(library.softnpu_is_waived(name.encode()) == 0 for name in names)
    assert library.softnpu_option_names().decode().split(",") == [
        f"compressor.{name}" for name in ("saturate", "cores", "seed", "threads")
    ]
    with options(seed=5):
        assert stock_op.get_option("seed") == 5
    assert stock_op.get_option("seed") == 0
