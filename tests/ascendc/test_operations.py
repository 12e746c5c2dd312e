# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What each emulated operation computes, and which elements it touches, against NumPy worked out element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afd_dsv4.compressor import reference
from tests.ascendc.emulation import ROUND_MODES, operate

Array = NDArray[Any]
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3.0e38, -3.0e38, 1e-30, 65519.0, 65520.0, 2.5, -2.5, 1.00390625],
    np.float32,
)


def values(rng: np.random.Generator, count: int, dtype: type = np.float32) -> Array:
    """Numbers with special values among them."""
    if dtype is np.int32:
        return rng.integers(-(2**31), 2**31, count, np.int64).astype(np.int32)
    plain = (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(np.float32)
    chosen = rng.random(count) < 0.3
    plain[chosen] = rng.choice(SPECIAL, int(chosen.sum()))
    return plain


def assert_same(actual: Array, expected: Array) -> None:
    """Equal bits; any NaN equals any NaN."""
    if actual.dtype == np.float32:
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(actual), nan)
        np.testing.assert_array_equal(actual[~nan].view(np.uint32), expected[~nan].view(np.uint32))
    else:
        np.testing.assert_array_equal(actual, expected)


def maximum(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan
    if a == b == 0:
        return 0.0 if math.copysign(1, a) > 0 or math.copysign(1, b) > 0 else -0.0
    return max(a, b)


def minimum(a: float, b: float) -> float:
    return -maximum(-a, -b)


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b,
    "Max": lambda a, b: np.array([maximum(float(x), float(y)) for x, y in zip(a, b, strict=True)], a.dtype),
    "Min": lambda a, b: np.array([minimum(float(x), float(y)) for x, y in zip(a, b, strict=True)], a.dtype),
}
SCALAR = {"Adds": "Add", "Muls": "Mul", "Maxs": "Max", "Mins": "Min"}
UNARY: dict[str, Callable[[Any], Any]] = {
    "Exp": reference.exp32,
    "Sqrt": np.sqrt,
    "Abs": np.abs,
    "Reciprocal": lambda a: np.float32(1) / a,
    "Rsqrt": lambda a: (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32),
}


def apply(name: str, a: Array, b: Array, scalar: np.generic) -> Array:
    with np.errstate(all="ignore"):
        if name in BINARY:
            return np.asarray(BINARY[name](a, b))
        if name in SCALAR:
            return np.asarray(BINARY[SCALAR[name]](a, np.full_like(a, scalar)))
        return np.asarray(UNARY[name](a))


arithmetic = st.sampled_from([*BINARY, *SCALAR, *UNARY])
seeds = st.integers(0, 2**32 - 1)


def element_type(name: str, integer: bool) -> type:
    return np.int32 if integer and name not in UNARY and name != "Div" else np.float32


@given(arithmetic, st.booleans(), st.integers(0, 300), seeds)
@settings(max_examples=150)
def test_the_count_form_computes_the_first_elements_and_no_other(
    name: str, integer: bool, count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    dtype = element_type(name, integer)
    a, b, before = (values(rng, 304, dtype) for _ in range(3))
    scalar = values(rng, 1)[0] if dtype is np.float32 else np.float32(rng.integers(-99, 99))
    outcome = operate(name, before, a, b, numbers=[count], scalar=float(scalar))
    assert outcome.trap == 0, outcome.text
    expected = before.copy()
    expected[:count] = apply(name, a[:count], b[:count], dtype(scalar))
    assert_same(outcome.dst, expected)
    assert (outcome.repeats, outcome.elements) == (-(-count // 64), count)


def lanes_of(masked: int, mask: int, bits: list[int], lanes: int) -> Array:
    if masked == 1:
        return np.arange(mask)
    return np.array([lane for lane in range(lanes) if bits[lane // 64] >> (lane % 64) & 1])


def indices(lanes: Array, per_block: int, offset: int, block: int, repeat: int, step: int) -> Array:
    """Element indices of the lanes of repeat `step`."""
    result: Array = offset + step * repeat * per_block + lanes // per_block * block * per_block + lanes % per_block
    return result


@st.composite
def forms(draw: st.DrawFn, lanes: int = 64) -> tuple[int, int, list[int], int]:
    """masked, mask, bits, repeats."""
    word = st.integers(0, 2**64 - 1)
    bits = [draw(word), draw(word) if lanes > 64 else 0]
    if not any(bits):
        bits[0] = 1
    return draw(st.sampled_from([1, 2])), draw(st.integers(1, lanes)), bits, draw(st.integers(0, 4))


@given(
    *(arithmetic, st.booleans(), forms(), seeds),
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(*[st.integers(0, 3)] * 3),
)
@settings(max_examples=150)
def test_the_repeat_forms_follow_mask_and_strides(
    name: str,
    integer: bool,
    form: tuple[int, int, list[int], int],
    seed: int,
    blocks: tuple[int, int, int],
    repeat_strides: tuple[int, int, int],
    offsets: tuple[int, int, int],
) -> None:
    rng = np.random.default_rng(seed)
    masked, mask, bits, repeats = form
    dtype = element_type(name, integer)
    before, a, b = (values(rng, 512, dtype) for _ in range(3))
    scalar = np.float32(3)
    first = mask if masked == 1 else 0
    outcome = operate(
        *(name, before, a, b),
        numbers=[first, repeats, *blocks, *repeat_strides],
        offsets=[32 * offset for offset in offsets],
        bits=bits,
        masked=masked,
        scalar=float(scalar),
    )
    assert outcome.trap == 0, outcome.text
    lanes = lanes_of(masked, mask, bits, 64)
    expected = before.copy()
    for step in range(repeats):
        to, left, right = (
            indices(lanes, 8, 8 * offsets[side], blocks[side], repeat_strides[side], step) for side in range(3)
        )
        expected[to] = apply(name, a[left], b[right], dtype(scalar))
    assert_same(outcome.dst, expected)
    assert outcome.elements == repeats * len(lanes)


@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Max", "Min"])
def test_an_accumulating_repeat_takes_its_own_result(name: str) -> None:
    rows = np.random.default_rng(5).standard_normal(256).astype(np.float32)
    first = np.arange(64, dtype=np.float32)
    numbers = [64, 4, 1, 1, 1, 0, 8, 0]
    outcome = operate(name, first, rows, numbers=numbers, masked=1, alias=2)
    assert outcome.trap == 0, outcome.text
    expected = first
    for row in rows.reshape(4, 64):
        expected = np.asarray(BINARY[name](row, expected))
    assert_same(outcome.dst, expected)


@given(arithmetic, st.integers(1, 2), st.booleans(), seeds)
@settings(max_examples=40)
def test_operands_may_be_the_destination(name: str, alias: int, count_form: bool, seed: int) -> None:
    x, y = (values(np.random.default_rng(seed + i), 128) for i in range(2))
    numbers = [128] if count_form else [64, 2, 1, 1, 1, 8, 8, 8]
    outcome = operate(name, x, y, y, numbers=numbers, masked=int(not count_form), alias=alias, scalar=3.0)
    assert outcome.trap == 0, outcome.text
    left, right = (x, y) if alias == 1 else (y, x)
    assert_same(outcome.dst, apply(name, left, right, np.float32(3)))


@pytest.mark.parametrize("a", SPECIAL)
def test_infinities_nan_and_signed_zeros_follow_the_table(a: np.float32) -> None:
    left, right = np.full(len(SPECIAL), a, np.float32), SPECIAL
    for name in BINARY:
        outcome = operate(name, np.zeros_like(right), left, right, numbers=[len(SPECIAL)])
        with np.errstate(all="ignore"):
            assert_same(outcome.dst, np.asarray(BINARY[name](left, right)))


def test_the_table_of_special_results() -> None:
    def one(name: str, a: float, b: float = 0.0) -> float:
        image = [np.full(8, value, np.float32) for value in (7.0, a, b)]
        return float(operate(name, *image, numbers=[1]).dst[0])

    inf, largest = math.inf, float(np.finfo(np.float32).max)
    assert one("Exp", -inf) == 0
    assert one("Exp", largest) == inf
    assert one("Ln", 0.0) == -inf
    assert one("Rsqrt", 0.0) == inf
    assert one("Div", 1.0, 0.0) == inf
    assert math.isnan(one("Div", 0.0, 0.0))
    assert math.isnan(one("Sub", -inf, -inf))
    assert math.isnan(one("Mul", 0.0, inf))
    assert math.isnan(one("Max", math.nan, 1.0))
    assert math.isnan(one("Max", 1.0, math.nan))
    assert math.copysign(1.0, one("Max", -0.0, 0.0)) == 1.0
    assert math.copysign(1.0, one("Max", 0.0, -0.0)) == 1.0


def test_exp_and_ln_are_within_one_ulp_of_the_truth() -> None:
    rng = np.random.default_rng(1)
    x = (-np.abs(rng.standard_normal(2048)) * 20).astype(np.float32)
    exp = operate("Exp", np.zeros_like(x), x, numbers=[2048]).dst
    truth = np.exp(x.astype(np.float64))
    assert np.all(np.abs(exp - truth) <= np.spacing(truth.astype(np.float32)))
    positive = -x + np.float32(0.5)
    ln = operate("Ln", np.zeros_like(x), positive, numbers=[2048]).dst
    truth = np.log(positive.astype(np.float64))
    assert np.all(np.abs(ln - truth) <= np.spacing(np.abs(truth).astype(np.float32)))


@pytest.mark.parametrize(("name", "largest"), [("Exp", None), ("Ln", None), ("Rsqrt", 2**-12), ("Reciprocal", 2**-12)])
def test_fuzz_moves_inexact_results_within_their_precision(name: str, largest: float | None) -> None:
    x = np.linspace(0.1, 9.0, 512, dtype=np.float32)
    exact, moved, again, other = (
        operate(name, np.zeros_like(x), x, numbers=[512], fuzz=fuzz, seed=seed).dst
        for fuzz, seed in ((False, 0), (True, 1), (True, 1), (True, 2))
    )
    np.testing.assert_array_equal(moved, again)
    assert np.any(moved != exact)
    assert np.any(moved != other)
    if largest is None:
        assert np.all(np.abs(moved.view(np.int32) - exact.view(np.int32)) <= 1)
    else:
        assert np.all(np.abs(moved / exact.astype(np.float64) - 1) <= largest * 1.001)


def test_fuzz_leaves_exact_operations_and_special_results_alone() -> None:
    x = np.resize(SPECIAL, 64)
    for name in ("Add", "Div", "Sqrt"):
        plain, fuzzed = (operate(name, x, x, x, numbers=[64], fuzz=fuzz).dst for fuzz in (False, True))
        assert_same(fuzzed, plain)
    special = np.array([-np.inf, np.inf, np.nan] * 16, np.float32)
    assert_same(operate("Exp", special, special, numbers=[48], fuzz=True).dst, np.exp(special))


# ------------------------------------------------------------------------------------------------ Cast


@pytest.mark.parametrize("saturate", [False, True])
def test_cast_to_bfloat16_rounds_to_nearest_even_in_both_modes(saturate: bool) -> None:
    x = np.concatenate([SPECIAL, values(np.random.default_rng(2), 1009)])
    outcome = operate("Cast", np.zeros(1024, np.uint16), x, numbers=[1024], mode=ROUND_MODES["RINT"], saturate=saturate)
    np.testing.assert_array_equal(outcome.dst, reference.bfloat16_bits(x, saturate=saturate))


@pytest.mark.parametrize("mode", ["FLOOR", "CEIL", "ROUND", "TRUNC"])
def test_cast_to_bfloat16_rounds_in_the_asked_direction(mode: str) -> None:
    x = values(np.random.default_rng(3), 1024)
    x = np.where(np.isfinite(x) & (np.abs(x) < 1e38), x, np.float32(1.25))
    x[:4] = [1.00390625, -1.00390625, 1.0, -3.01171875]  # ties between two bfloat16 values
    actual = reference.bfloat16_values(operate("Cast", np.zeros(1024, np.uint16), x, numbers=[1024],
                                               mode=ROUND_MODES[mode]).dst)  # fmt: skip
    towards_zero = reference.bfloat16_values((x.view(np.uint32) >> 16).astype(np.uint16))
    away = reference.bfloat16_values(((x.view(np.uint32) >> 16) + 1).astype(np.uint16))
    exact = towards_zero == x
    nearer = np.abs(x.astype(np.float64) - towards_zero) < np.abs(away.astype(np.float64) - x)
    chosen = {
        "TRUNC": towards_zero,
        "FLOOR": np.where(x < 0, away, towards_zero),
        "CEIL": np.where(x < 0, towards_zero, away),
        "ROUND": np.where(nearer, towards_zero, away),
    }[mode]
    np.testing.assert_array_equal(actual, np.where(exact, towards_zero, chosen))


def test_cast_from_sixteen_bits_is_exact() -> None:
    bits = np.arange(0, 65536, 7, dtype=np.uint16)
    wide = operate("Cast", np.zeros(len(bits), np.float32), bits, numbers=[len(bits)]).dst
    assert_same(wide, reference.bfloat16_values(bits))
    halves = bits.view(np.float16)
    assert_same(operate("Cast", np.zeros(len(bits), np.float32), halves, numbers=[len(bits)]).dst,
                halves.astype(np.float32))  # fmt: skip


@pytest.mark.parametrize("saturate", [False, True])
def test_cast_to_half_rounds_to_nearest_even_in_both_modes(saturate: bool) -> None:
    x = np.concatenate([SPECIAL, values(np.random.default_rng(4), 1009)])
    actual = operate("Cast", np.zeros(1024, np.float16), x, numbers=[1024], mode=1, saturate=saturate).dst
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    if saturate:
        expected = np.where(np.isnan(expected), np.float16(0), np.clip(expected, -65504, 65504)).astype(np.float16)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mode", ["RINT", "FLOOR", "CEIL", "ROUND", "TRUNC"])
def test_cast_to_int32_rounds_as_asked_and_saturates(mode: str) -> None:
    x = np.array([2.5, -2.5, 3.5, 0.49, -0.49, 1e10, -1e10, np.nan, 7.0, -0.5, 0.5, 1.5], np.float32)
    rounding: dict[str, Callable[[float], float]] = {
        "RINT": round, "FLOOR": math.floor, "CEIL": math.ceil, "TRUNC": math.trunc,
        "ROUND": lambda v: math.copysign(math.floor(abs(v) + 0.5), v),
    }  # fmt: skip
    expected = [0 if math.isnan(v) else int(np.clip(rounding[mode](float(v)), -(2**31), 2**31 - 1)) for v in x]
    actual = operate("Cast", np.zeros(len(x), np.int32), x, numbers=[len(x)], mode=ROUND_MODES[mode]).dst
    np.testing.assert_array_equal(actual, np.array(expected, np.int32))


@given(forms(), seeds, st.tuples(st.integers(1, 3), st.integers(0, 2)), st.tuples(st.integers(1, 9), st.integers(0, 9)))
@settings(max_examples=60)
def test_the_repeat_form_of_cast_packs_sixteen_bits_into_half_the_blocks(
    form: tuple[int, int, list[int], int], seed: int, blocks: tuple[int, int], repeat_strides: tuple[int, int]
) -> None:
    masked, mask, bits, repeats = form
    x = values(np.random.default_rng(seed), 512)
    before = np.full(1024, 0x4242, np.uint16)
    numbers = [mask if masked == 1 else 0, repeats, *blocks, 0, *repeat_strides]
    outcome = operate("Cast", before, x, numbers=numbers, masked=masked, bits=bits, mode=1)
    assert outcome.trap == 0, outcome.text
    lanes = lanes_of(masked, mask, bits, 64)
    expected = before.copy()
    for step in range(repeats):
        source = indices(lanes, 8, 0, blocks[1], repeat_strides[1], step)
        expected[indices(lanes, 16, 0, blocks[0], repeat_strides[0], step)] = reference.bfloat16_bits(x[source])
    np.testing.assert_array_equal(outcome.dst, expected)


# ------------------------------------------------------------------------------------------------ reductions


def masked_repeat(x: Array, lanes: Array, strides: tuple[int, int], step: int, missing: float) -> Array:
    row = np.full(64, missing, np.float32)
    row[lanes] = x[indices(lanes, 8, 0, *strides, step)]
    return row


source_strides = st.tuples(st.integers(0, 3), st.integers(0, 9))


@given(forms(), seeds, st.integers(1, 9), source_strides)
@settings(max_examples=60)
def test_whole_reduce_sum_adds_neighbours(
    form: tuple[int, int, list[int], int], seed: int, step: int, strides: tuple[int, int]
) -> None:
    masked, mask, bits, repeats = form
    x = np.random.default_rng(seed).standard_normal(512).astype(np.float32)
    before = np.full(64, 7, np.float32)
    outcome = operate("WholeReduceSum", before, x, numbers=[mask, repeats, step, *strides], masked=masked, bits=bits)
    assert outcome.trap == 0, outcome.text
    lanes = lanes_of(masked, mask, bits, 64)
    expected = before.copy()
    for repeat in range(repeats):
        expected[repeat * step] = reference.row_sum(masked_repeat(x, lanes, strides, repeat, 0.0))
    assert_same(outcome.dst, expected)


@given(forms(), seeds, st.integers(0, 3), st.integers(1, 5), source_strides)
@settings(max_examples=60)
def test_whole_reduce_max_gives_value_and_index_in_the_asked_order(
    form: tuple[int, int, list[int], int], seed: int, order: int, step: int, strides: tuple[int, int]
) -> None:
    masked, mask, bits, repeats = form
    x = values(np.random.default_rng(seed), 512)
    before = np.full(64, 7, np.float32)
    numbers = [mask, repeats, step, *strides]
    outcome = operate("WholeReduceMax", before, x, numbers=numbers, masked=masked, bits=bits, mode=order)
    assert outcome.trap == 0, outcome.text
    lanes = lanes_of(masked, mask, bits, 64)
    expected = before.copy()
    for repeat in range(repeats):
        row = masked_repeat(x, lanes, strides, repeat, 0.0)
        nan = [lane for lane in lanes if np.isnan(row[lane])]
        best = nan[0] if nan else next(lane for lane in lanes if row[lane] == max(row[lanes]))
        value = row[best]
        if value == 0:
            value = np.float32(0 if any(row[lane] == 0 and not np.signbit(row[lane]) for lane in lanes) else -0.0)
        index = np.array([best], np.uint32).view(np.float32)[0]
        stored = [[value, index], [index, value], [value], [index]][order]
        expected[repeat * step * len(stored) :][: len(stored)] = stored
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(outcome.dst), nan)
    np.testing.assert_array_equal(outcome.dst[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@given(forms(), seeds, st.integers(1, 2), source_strides)
@settings(max_examples=40)
def test_block_reductions_give_one_value_per_block(
    form: tuple[int, int, list[int], int], seed: int, step: int, strides: tuple[int, int]
) -> None:
    masked, mask, bits, repeats = form
    x = np.random.default_rng(seed).standard_normal(512).astype(np.float32)
    before = np.full(128, 7, np.float32)
    lanes = lanes_of(masked, mask, bits, 64)
    for name, missing in (("BlockReduceSum", 0.0), ("BlockReduceMax", -np.inf)):
        numbers = [mask, repeats, step, *strides]
        outcome = operate(name, before, x, numbers=numbers, masked=masked, bits=bits)
        if repeats and len({lane // 8 for lane in lanes}) < 8:
            assert outcome.trap == 8, outcome.text  # a block without a lane gives nothing
            continue
        assert outcome.trap == 0, outcome.text
        expected = before.copy()
        for repeat in range(repeats):
            rows = masked_repeat(x, lanes, strides, repeat, missing).reshape(8, 8)
            if name == "BlockReduceSum":
                pairs = rows[:, 0::2] + rows[:, 1::2]
                fours = pairs[:, 0::2] + pairs[:, 1::2]
                reduced = fours[:, 0] + fours[:, 1]
            else:
                reduced = rows.max(axis=1)
            expected[repeat * step * 8 :][:8] = reduced
        assert_same(outcome.dst, expected)


@given(st.integers(1, 700), seeds)
@settings(max_examples=40)
def test_reduce_sum_adds_repeats_one_after_another_and_reduce_max_finds_the_first(count: int, seed: int) -> None:
    x = np.random.default_rng(seed).integers(-9, 9, 704).astype(np.float32) * np.float32(0.1)
    space = np.zeros(64, np.float32)
    total = operate("ReduceSum", np.full(8, 7, np.float32), x, space, numbers=[count]).dst
    expected = np.float32(0)
    for first in range(0, count, 64):
        part = reference.row_sum(np.pad(x[first : min(first + 64, count)], (0, max(0, first + 64 - count))))
        expected = part if first == 0 else expected + part
    assert_same(total, np.array([expected, *[7] * 7], np.float32))
    best = operate("ReduceMax", np.full(8, 7, np.float32), x, space, numbers=[count], mode=1).dst
    assert best[0] == x[:count].max()
    assert best.view(np.uint32)[1] == int(np.argmax(x[:count]))
    np.testing.assert_array_equal(best[2:], 7)


# ------------------------------------------------------------------------------------------------ moves


@given(
    forms(128), seeds, st.tuples(st.integers(1, 3), st.integers(0, 3)), st.tuples(st.integers(1, 9), st.integers(0, 9))
)
@settings(max_examples=60)
def test_copy_moves_blocks_of_sixteen_bits(
    form: tuple[int, int, list[int], int], seed: int, blocks: tuple[int, int], repeat_strides: tuple[int, int]
) -> None:
    masked, mask, bits, repeats = form
    x = np.random.default_rng(seed).integers(0, 65536, 1024).astype(np.uint16)
    before = np.full(1024, 0x4242, np.uint16)
    numbers = [mask if masked == 1 else 0, repeats, *blocks, 0, *repeat_strides]
    outcome = operate("Copy", before, x, numbers=numbers, masked=masked, bits=bits)
    assert outcome.trap == 0, outcome.text
    lanes = lanes_of(masked, mask, bits, 128)
    expected = before.copy()
    for step in range(repeats):
        source = indices(lanes, 16, 0, blocks[1], repeat_strides[1], step)
        expected[indices(lanes, 16, 0, blocks[0], repeat_strides[0], step)] = x[source]
    np.testing.assert_array_equal(outcome.dst, expected)


@given(st.integers(0, 3), st.integers(1, 2), st.integers(8, 16))
@settings(max_examples=20)
def test_brcb_makes_a_block_of_each_element(repeats: int, block: int, repeat_stride: int) -> None:
    x = np.arange(24, dtype=np.float32)
    before = np.full(640, 7, np.float32)
    outcome = operate("Brcb", before, x, numbers=[0, repeats, block, 0, 0, repeat_stride])
    assert outcome.trap == 0, outcome.text
    expected = before.copy()
    for repeat in range(repeats):
        for element in range(8):
            start = (repeat * repeat_stride + element * block) * 8
            expected[start : start + 8] = x[repeat * 8 + element]
    np.testing.assert_array_equal(outcome.dst, expected)


@given(st.integers(0, 64), st.sampled_from([0, 8, 128]), seeds)
@settings(max_examples=30)
def test_gather_takes_elements_by_byte_offset(count: int, base: int, seed: int) -> None:
    x = np.arange(128, dtype=np.float32)
    index = np.random.default_rng(seed).integers(0, 64, 64).astype(np.uint32) * 4
    outcome = operate("Gather", np.full(64, 7, np.float32), x, index.view(np.float32), numbers=[count, base])
    assert outcome.trap == 0, outcome.text
    expected = np.full(64, 7, np.float32)
    expected[:count] = x[(index[:count] + base) // 4]
    np.testing.assert_array_equal(outcome.dst, expected)


def test_duplicate_and_create_vec_index() -> None:
    before = np.full(128, 7, np.float32)
    assert_same(operate("Duplicate", before, before, numbers=[70], scalar=2.5).dst,
                np.array([2.5] * 70 + [7] * 58, np.float32))  # fmt: skip
    strided = operate("Duplicate", before, before, numbers=[12, 2, 2, 0, 0, 4], masked=1, scalar=2.5).dst
    expected = before.copy()
    for block, width in ((0, 8), (2, 4), (4, 8), (6, 4)):
        expected[8 * block : 8 * block + width] = 2.5
    assert_same(strided, expected)
    numbers = np.full(64, -1, np.int32)
    np.testing.assert_array_equal(
        operate("CreateVecIndex", numbers, numbers, numbers=[40], scalar=5).dst, [*range(5, 45), *[-1] * 24]
    )


def test_data_copy_inside_ub_moves_blocks_with_gaps() -> None:
    x, before = np.arange(128, dtype=np.float32), np.full(128, 7, np.float32)
    np.testing.assert_array_equal(operate("DataCopy", before, x, numbers=[64]).dst[:72], [*range(64), *[7] * 8])
    moved = operate("DataCopy", before, x, numbers=[0, 0, 3, 2, 1, 2], masked=1).dst
    expected = before.copy()
    for block in range(3):
        expected[32 * block : 32 * block + 16] = x[24 * block : 24 * block + 16]
    np.testing.assert_array_equal(moved, expected)


# ------------------------------------------------------------------------------------------------ GM and UB


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.booleans())
@settings(max_examples=40)
def test_copies_count_gaps_from_the_end_of_a_block(
    count: int, length: int, source_gap: int, target_gap: int, out: bool
) -> None:
    x, before = np.arange(1000, 1256, dtype=np.float32), np.arange(256, dtype=np.float32)
    numbers = [count, length, source_gap, target_gap]
    outcome = operate("CopyOut" if out else "CopyIn", before, x, numbers=numbers, masked=1)
    assert outcome.trap == 0, outcome.text
    expected = before.copy()
    for block in range(count):
        source, target = block * (length + source_gap) * 8, block * (length + target_gap) * 8
        expected[target : target + 8 * length] = x[source : source + 8 * length]
    np.testing.assert_array_equal(outcome.dst, expected)


@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 40), st.integers(0, 2), st.integers(0, 16))
@settings(max_examples=60)
def test_a_padded_copy_fills_whole_blocks_of_ub(count: int, length: int, gap: int, target_gap: int, left: int) -> None:
    x, before = np.arange(1000, 1512, dtype=np.uint16), np.arange(512, dtype=np.uint16)
    right = -(left + length) % 16
    numbers = [count, 2 * length, 2 * gap, target_gap, 1, left, right]
    outcome = operate("CopyIn", before, x, numbers=numbers, masked=2, bits=[777, 0], offsets=[0, 6, 0])
    assert outcome.trap == 0, outcome.text
    expected = before.copy()
    width = left + length + right
    for block in range(count):
        source, target = 3 + block * (length + gap), block * (width + 16 * target_gap)
        expected[target : target + width] = 777
        expected[target + left : target + left + length] = x[source : source + length]
    np.testing.assert_array_equal(outcome.dst, expected)


@given(st.integers(0, 4), st.integers(0, 20), st.integers(0, 2), st.integers(0, 9))
@settings(max_examples=60)
def test_a_padded_copy_to_gm_writes_its_bytes_and_no_other(count: int, length: int, gap: int, target_gap: int) -> None:
    x, before = np.arange(1000, 1512, dtype=np.uint16), np.arange(512, dtype=np.uint16)
    numbers = [count, 2 * length, gap, 2 * target_gap]
    outcome = operate("CopyOut", before, x, numbers=numbers, masked=2, offsets=[6, 0, 0])
    assert outcome.trap == 0, outcome.text
    expected = before.copy()
    for block in range(count if length else 0):
        source, target = block * (-(-length // 16) + gap) * 16, 3 + block * (length + target_gap)
        expected[target : target + length] = x[source : source + length]
    np.testing.assert_array_equal(outcome.dst, expected)


def test_what_a_copy_leaves_undefined_may_not_be_stored() -> None:
    x = np.arange(64, dtype=np.uint16)
    undefined = operate("CopyIn", np.zeros(64, np.uint16), x, numbers=[1, 10, 0, 0, 0, 0, 0], masked=2)
    assert undefined.trap == 8
