# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The NumPy definition of the compressor against float64 brute force, and its order of operations step by step."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afd_dsv4.compressor import reference
from afd_dsv4.compressor.reference import C4, C4_INDEXER, C128, Float32, PoolSpec

Float64 = NDArray[np.float64]
SMALL = [PoolSpec(4, 2, 64, rope_head_dim=16), PoolSpec(128, 1, 64, rope_head_dim=16)]


def brute_force(
    kv: Float64, score: Float64, ape: Float64, spec: PoolSpec, weight: Float64, cos: Float64, sin: Float64
) -> Float64:
    """One compressed row after the other, one column after the other, from the formulas, in float64."""
    tokens, dim = len(kv), spec.head_dim
    biased = np.array([score[p] + ape[p % spec.ratio] for p in range(tokens)])
    result = []
    for window in range(tokens // spec.ratio):
        row = np.empty(dim)
        for column in range(dim):
            pairs = []  # (score, kv) of every pool row
            for position in range(window * spec.ratio, (window + 1) * spec.ratio):
                own = column + (dim if spec.overlap else 0)
                pairs.append((biased[position, own], kv[position, own]))
                if spec.overlap and window > 0:
                    pairs.append((biased[position - spec.ratio, column], kv[position - spec.ratio, column]))
            top = max(s for s, _ in pairs)
            total = math.fsum(math.exp(s - top) for s, _ in pairs)
            row[column] = math.fsum(math.exp(s - top) * k for s, k in pairs) / total
        row = row / math.sqrt(math.fsum(x * x for x in row) / dim + spec.norm_eps) * weight
        tail = row[dim - spec.rope_head_dim :].copy()
        for i in range(0, spec.rope_head_dim, 2):
            c, s = cos[window, i], sin[window, i]
            row[dim - spec.rope_head_dim + i] = tail[i] * c - tail[i + 1] * s
            row[dim - spec.rope_head_dim + i + 1] = tail[i + 1] * c + tail[i] * s
        result.append(row)
    return np.array(result)


def draw(rng: np.random.Generator, spec: PoolSpec, tokens: int) -> tuple[Float32, ...]:
    kv, score = (rng.standard_normal((tokens, spec.half)).astype(np.float32) * s for s in (1, 2))
    ape = rng.standard_normal((spec.ratio, spec.half)).astype(np.float32)
    weight = (1 + 0.1 * rng.standard_normal(spec.head_dim)).astype(np.float32)
    cos, sin = reference.rope_table(np.arange(tokens // spec.ratio) * spec.ratio, spec.rope_head_dim)
    return kv, score, ape, weight, cos, sin


@pytest.mark.parametrize("spec", [*SMALL, C4_INDEXER])
def test_it_equals_a_float64_brute_force_within_rounding(spec: PoolSpec, rng: np.random.Generator) -> None:
    kv, score, ape, weight, cos, sin = draw(rng, spec, 2 * spec.ratio + 3)
    rows = reference.make_rows(kv, score, ape, 0)
    result = reference.compress_sequence(rows, spec, weight, cos, sin)
    exact = brute_force(*(a.astype(np.float64) for a in (kv, score, ape)), spec, *(
        a.astype(np.float64) for a in (weight, cos, sin)))  # fmt: skip
    assert result.dtype == np.float32
    assert result.shape == (2, spec.head_dim)
    assert np.abs(result - exact).max() < 3e-6 * np.abs(exact).max()


@pytest.mark.parametrize("spec", [C4, C4_INDEXER])
@pytest.mark.parametrize("fault", ["drop the left half", "swap the halves", "APE one phase late"])
def test_a_wrong_overlap_is_far_from_the_definition(spec: PoolSpec, fault: str, rng: np.random.Generator) -> None:
    kv, score, ape, weight, cos, sin = draw(rng, spec, 40)
    good = reference.compress_sequence(reference.make_rows(kv, score, ape, 0), spec, weight, cos, sin)
    if fault == "APE one phase late":
        rows = reference.make_rows(kv, score, ape, 1)
    else:
        rows = reference.make_rows(kv, score, ape, 0)
        parts = rows.reshape(40, 2, 2, spec.head_dim).copy()  # token, kv or score, left or right
        if fault == "swap the halves":
            parts = parts[:, :, ::-1]
        else:
            parts[:, 0, 0], parts[:, 1, 0] = 0, -np.inf
        rows = parts.reshape(40, -1)
    bad = reference.compress_sequence(rows, spec, weight, cos, sin)
    assert np.abs(bad - good).max() > 0.5


@pytest.mark.parametrize("spec", [*SMALL, C4, C4_INDEXER, C128])
def test_any_range_of_windows_equals_its_part_of_the_whole(spec: PoolSpec, rng: np.random.Generator) -> None:
    tokens = 5 * spec.ratio + 1
    kv, score, ape, weight, cos, sin = draw(rng, spec, tokens)
    rows = reference.make_rows(kv, score, ape, 0)
    whole = reference.compress_sequence(rows, spec, weight, cos, sin)
    for begin in range(5):
        for end in range(begin + 1, 6):
            start, windows = begin * spec.ratio, range(begin, end)
            oldest = reference.need(start, spec.ratio, spec.overlap).start if begin else 0
            part = reference.compressed_windows(
                rows[oldest : end * spec.ratio], oldest, windows, spec, weight, cos[begin:end], sin[begin:end]
            )
            assert np.array_equal(part, whole[begin:end])
    assert reference.compressed_windows(rows, 0, range(2, 2), spec, weight, cos[:0], sin[:0]).shape == (
        0,
        spec.head_dim,
    )


def test_a_missing_row_is_an_error_that_says_which(rng: np.random.Generator) -> None:
    rows = np.zeros((8, C4.row_dim), np.float32)
    with pytest.raises(ValueError, match=r"found positions 4\.\.11, expected 0\.\.7 for windows 1\.\.1"):
        reference.pooled_windows(rows, 4, range(1, 2), C4)
    with pytest.raises(ValueError, match=r"found positions 0\.\.7, expected 0\.\.11 for windows 1\.\.2"):
        reference.pooled_windows(rows, 0, range(1, 3), C4)


# (boundary, C4 rows, C128 rows): facts of the model, one row per kind of boundary
@pytest.mark.parametrize(
    ("position", "c4", "c128"),
    [
        (0, [], []),
        (1, [0], [0]),
        (3, [0, 1, 2], [0, 1, 2]),
        (4, [0, 1, 2, 3], [0, 1, 2, 3]),
        (5, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        (8, [4, 5, 6, 7], list(range(8))),
        (11, [4, 5, 6, 7, 8, 9, 10], list(range(11))),
        (127, [120, 121, 122, 123, 124, 125, 126], list(range(127))),
        (128, [124, 125, 126, 127], []),
        (129, [124, 125, 126, 127, 128], [128]),
        (256, [252, 253, 254, 255], []),
    ],
)
def test_need_lists_the_rows_after_a_boundary(position: int, c4: list[int], c128: list[int]) -> None:
    assert list(reference.need(position, 4, overlap=True)) == c4
    assert list(reference.need(position, 128, overlap=False)) == c128


def test_need_refuses_a_negative_position() -> None:
    with pytest.raises(ValueError, match="found -1"):
        reference.need(-1, 4, overlap=True)


@pytest.mark.parametrize("spec", SMALL)
def test_rows_outside_need_are_never_pooled_and_every_row_inside_is(spec: PoolSpec, rng: np.random.Generator) -> None:
    kv, score, ape, weight, cos, sin = draw(rng, spec, 3 * spec.ratio)
    rows = reference.make_rows(kv, score, ape, 0)
    start = spec.ratio + 2
    windows = range(1, 3)
    good = reference.compressed_windows(rows, 0, windows, spec, weight, cos[1:], sin[1:])
    for position in range(start):
        poisoned = rows.copy()
        poisoned[position] = np.nan
        result = reference.compressed_windows(poisoned, 0, windows, spec, weight, cos[1:], sin[1:])
        assert np.array_equal(result, good) == (position not in reference.need(start, spec.ratio, spec.overlap))


# ------------------------------------------------------------------------------------------------ arithmetic


def test_exp32_is_within_one_unit_in_the_last_place_and_exact_at_the_ends() -> None:
    values = np.concatenate([-np.logspace(-8, 2.1, 40001), [0.0, -0.0, -103.97, -87.33, -np.inf]]).astype(np.float32)
    result = reference.exp32(values)
    exact = np.array([math.exp(float(v)) for v in values])
    rounded = exact.astype(np.float32)
    assert np.abs(result.view(np.int32).astype(np.int64) - rounded.view(np.int32)).max() <= 1
    assert (result == rounded).mean() > 0.99999
    assert reference.exp32(np.array([0.0, -np.inf, -1e30], np.float32)).tolist() == [1.0, 0.0, 0.0]
    assert np.isnan(reference.exp32(np.array([np.nan], np.float32)))[0]


def test_column_sum_folds_halves() -> None:
    # 1 is lost in 2**24 unless it meets another 1 first; rows 1 and 3 meet first, then 0 and 2.
    rows = np.array([[2.0**24], [1.0], [0.0], [1.0]], np.float32)
    assert reference.column_sum(rows)[0] == 2.0**24 + 2
    assert reference.column_sum(rows[[0, 1, 3, 2]])[0] == 2.0**24  # 0 meets 1, and loses it; then again


def test_row_sum_folds_chunks_by_halves_and_then_adjacent_lanes(rng: np.random.Generator) -> None:
    for columns in (2, 8, 63, 64, 65, 128, 192, 200, 512):
        values = rng.standard_normal(columns).astype(np.float32)
        chunks = [list(values[i : i + 64]) for i in range(0, columns - columns % 64, 64)] or [list(values)]
        if columns > 64:
            for i, value in enumerate(values[len(chunks) * 64 :]):
                chunks[0][i] = np.float32(chunks[0][i] + value)
        while len(chunks) > 1:
            upper = (len(chunks) + 1) // 2
            for i in range(len(chunks) - upper):
                chunks[i] = [np.float32(a + b) for a, b in zip(chunks[i], chunks[upper + i], strict=True)]
            chunks = chunks[:upper]
        lanes = [*chunks[0], *[np.float32(0)] * (64 - len(chunks[0]))]
        while len(lanes) > 1:
            lanes = [np.float32(lanes[i] + lanes[i + 1]) for i in range(0, len(lanes), 2)]
        assert reference.row_sum(values) == lanes[0]


def test_pool_divides_before_it_weighs(rng: np.random.Generator) -> None:
    kv, score = (rng.standard_normal((8, 3)).astype(np.float32) for _ in range(2))
    for column in range(3):
        e = [reference.exp32(np.float32([s - score[:, column].max()]))[0] for s in score[:, column]]

        def tree(values: list[np.float32]) -> np.float32:
            while len(values) > 1:
                half = len(values) // 2
                values = [np.float32(a + b) for a, b in zip(values[:half], values[half:], strict=True)]
            return values[0]

        products = [np.float32(k * np.float32(x / tree(e))) for k, x in zip(kv[:, column], e, strict=True)]
        assert reference.pool(kv, score)[column] == tree(products)


def test_pool_survives_infinite_scores_below_and_spreads_nan() -> None:
    kv = np.array([[1.0], [3.0]], np.float32)
    assert reference.pool(kv, np.array([[-np.inf], [5.0]], np.float32))[0] == 3.0
    assert np.isnan(reference.pool(kv, np.array([[-np.inf], [-np.inf]], np.float32))[0])
    assert np.isnan(reference.pool(kv, np.array([[np.nan], [5.0]], np.float32))[0])


def test_rotation_turns_adjacent_pairs_and_leaves_the_rest(rng: np.random.Generator) -> None:
    values = rng.standard_normal((1, 10)).astype(np.float32)
    angle = np.array([[0.3, 0.3, 1.1, 1.1]])
    result = reference.rotate(values, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    assert np.array_equal(result[0, :6], values[0, :6])
    for pair, theta in ((6, 0.3), (8, 1.1)):
        turned = complex(*values[0, pair : pair + 2].astype(float)) * complex(math.cos(theta), math.sin(theta))
        assert result[0, pair : pair + 2] == pytest.approx([turned.real, turned.imag], rel=1e-6)


def nearest_bfloat16(value: float) -> float:
    """The nearest bfloat16, ties to even, by exact fractions."""
    if value == 0:
        return value
    sign, magnitude = math.copysign(1, value), Fraction(abs(value))
    exponent = max(math.frexp(abs(value))[1] - 1, -126)
    unit = Fraction(2) ** (exponent - 7)
    steps = magnitude / unit
    low = steps.numerator // steps.denominator
    rest = steps - low
    low += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2)
    rounded = low * unit
    return sign * (math.inf if rounded >= Fraction(2) ** 128 else float(rounded))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@settings(max_examples=300)
def test_bfloat16_rounds_to_nearest_even(value: float) -> None:
    rounded = float(reference.round_to_bfloat16(np.float32([value]))[0])
    assert rounded == nearest_bfloat16(value)
    assert math.copysign(1, rounded) == math.copysign(1, value)


def test_bfloat16_cast_modes() -> None:
    largest = 3.3895313892515355e38
    values = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1.0], np.float32)
    kept = reference.round_to_bfloat16(values)
    assert kept[0] == np.inf
    assert kept[1] == -np.inf
    assert np.isnan(kept[2])
    assert kept[3:].tolist() == [np.inf, -np.inf, 1.0]
    saturated = reference.round_to_bfloat16(values, saturate=True)
    assert saturated.tolist() == pytest.approx([largest, -largest, 0.0, largest, -largest, 1.0], rel=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 3, 512), "coff: found 3"),
        ((3, 1, 512), "ratio: found 3"),
        ((256, 2, 512), "ratio: found 256"),
        ((0, 1, 512), "ratio: found 0"),
        ((4, 2, 512, 63), "rope_head_dim: found 63"),
        ((4, 2, 32, 64), r"rope_head_dim: found 64, expected even, 2\.\.32"),
    ],
)
def test_impossible_shapes_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolSpec(*arguments)


def test_row_bytes_of_the_shipped_compressors() -> None:
    assert [4 * spec.row_dim for spec in (C4, C4_INDEXER, C128)] == [8192, 2048, 4096]


def test_rope_rows_carry_every_angle_twice_and_start_unturned() -> None:
    cos, sin = reference.rope_table(np.array([0, 4, 70000]))
    assert cos.shape == sin.shape == (3, 64)
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()
    assert np.array_equal(cos[:, 0::2], cos[:, 1::2])
    assert cos[1, 0] == pytest.approx(math.cos(4.0), rel=1e-6)  # the fastest pair turns 1 radian per position
    slowest = 160000.0 ** (-62 / 64) / 16  # the slowest is stretched by the YaRN factor
    assert sin[2, 62] == pytest.approx(math.sin(70000 * slowest), rel=1e-5)


def test_the_reference_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, afd_dsv4.compressor.reference; print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
