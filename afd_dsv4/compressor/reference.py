# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a DeepSeek-V4 KV compressor computes, in NumPy: the definition every executor is compared with.

The problem: "equal" needs one meaning down to the last bit, over any chunking. The way: one function from the rows of
a whole sequence to its compressed rows (`compress_sequence`), without chunks, pages or tables, in fp32 and in the
order of operations of the stock vllm-ascend kernel (arch32, `op_kernel/arch32/{soft_max,compressor_vector_comm,
rms_norm,rope}.h`). `compressed_windows` is the same for any window whose rows are at hand, and `need` says which rows
those are after a boundary.

Two choices the device leaves open: its `Exp` is documented to 1 ulp only, here it is `exp32`, a fixed polynomial; and
`WholeReduceSum` adds its 64 lanes in adjacent pairs. The projection is a plain fp32 sum over ascending k (`project`);
the device's cube sums blocks in another order and depends on the batch, so projected rows are an input of every
comparison, never its subject.

What it does not do: choose pages, save or read state, run fast. It imports NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

_LANES = 64  # fp32 elements one vector instruction covers
_MAX_POOL_ROWS = 256


@dataclass(frozen=True)
class PoolSpec:
    """Shape of one compressor.

    ratio: tokens per window. coff: 2 with overlap (a window also pools the left half of the window before), else 1.
    head_dim: columns of a compressed row. rope_head_dim: how many of its last columns are rotated. norm_eps: RMSNorm.
    Raises ValueError for a shape the order of operations is not defined for.
    """

    ratio: int
    coff: int
    head_dim: int
    rope_head_dim: int = 64
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.coff not in (1, 2):
            raise ValueError(f"coff: found {self.coff}, expected 1 (no overlap) or 2 (overlap)")
        pool_rows = self.coff * self.ratio
        if self.ratio < 1 or pool_rows > _MAX_POOL_ROWS or pool_rows & (pool_rows - 1):
            raise ValueError(f"ratio: found {self.ratio}, expected a power of two, coff * ratio <= {_MAX_POOL_ROWS}")
        if self.rope_head_dim < 2 or self.rope_head_dim % 2 or self.rope_head_dim > self.head_dim:
            raise ValueError(f"rope_head_dim: found {self.rope_head_dim}, expected even, 2..{self.head_dim}")

    @property
    def overlap(self) -> bool:
        """Whether a window also pools the one before."""
        return self.coff == 2

    @property
    def half(self) -> int:
        """Columns of the kv part of a row, and of its score part."""
        return self.coff * self.head_dim

    @property
    def row_dim(self) -> int:
        """Columns of a row: [kv | score + APE], each [left | right] with overlap."""
        return 2 * self.half


C4 = PoolSpec(ratio=4, coff=2, head_dim=512)
C4_INDEXER = PoolSpec(ratio=4, coff=2, head_dim=128)
C128 = PoolSpec(ratio=128, coff=1, head_dim=512)


def need(position: int, ratio: int, overlap: bool) -> range:
    """Positions whose rows a launch starting at `position` may read: [trunc(position) - overlap*ratio, position)."""
    if position < 0:
        raise ValueError(f"position: found {position}, expected 0 or more")
    return range(max(0, position // ratio * ratio - (ratio if overlap else 0)), position)


# ------------------------------------------------------------------------------------------------ element types


def bfloat16_bits(values: Float32, *, saturate: bool = False) -> NDArray[np.uint16]:
    """Round fp32 to bfloat16 (nearest, ties to even; CAST_RINT), as its 16 bits.

    saturate=False is INF_NAN mode: infinities and NaN stay, too large values become infinite. saturate=True is
    saturation mode: infinite results become the largest finite value of their sign, NaN becomes 0.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    sign = ((bits >> np.uint32(16)) & np.uint32(0x8000)).astype(np.uint16)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> np.uint32(16)) & np.uint32(1))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if not saturate:
        return np.where(nan, sign | np.uint16(0x7FC0), rounded).astype(np.uint16)
    infinite = (rounded & np.uint16(0x7FFF)) == np.uint16(0x7F80)
    return np.where(nan, np.uint16(0), np.where(infinite, sign | np.uint16(0x7F7F), rounded)).astype(np.uint16)


def bfloat16_values(bits: NDArray[np.uint16]) -> Float32:
    """The fp32 values of bfloat16 bits."""
    result: Float32 = (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return result


def round_to_bfloat16(values: Float32, *, saturate: bool = False) -> Float32:
    """`bfloat16_bits` as fp32 values."""
    return bfloat16_values(bfloat16_bits(values, saturate=saturate))


# ------------------------------------------------------------------------------------------------ arithmetic


def exp32(values: Float32) -> Float32:
    """Exponential of fp32 values <= 0 (softmax after the maximum is taken off), NaN kept.

    A degree-9 polynomial in double precision, rounded once to fp32: only IEEE sums, products and one scaling by a
    power of two, so that C++ has the same bits on every machine (kernels_ascendc/softnpu/ops/pool_kernel.cpp).
    """
    log2_e, ln_2, shift = 1.4426950408889634, 0.6931471805599453, 6755399441055744.0  # shift = 1.5 * 2**52
    y = np.clip(values.astype(np.float64), -110.0, 110.0)  # NaN passes np.clip
    shifted = y * log2_e + shift
    r = y - (shifted - shift) * ln_2
    p = np.full_like(r, 1.0 / 362880.0)
    for factor in (40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0):
        p = p * r + 1.0 / factor
    scale = ((shifted.view(np.uint64) + np.uint64(1023)) << np.uint64(52)).view(np.float64)
    with np.errstate(under="ignore", invalid="ignore"):
        result: Float32 = (p * scale).astype(np.float32)
    return result


def column_sum(values: Float32) -> Float32:
    """Sum over axis -2, whose length is a power of two: rows i and i + n/2 first, then by halves again."""
    rows = values.shape[-2]
    while rows > 1:
        rows //= 2
        values = values[..., :rows, :] + values[..., rows : 2 * rows, :]
    result: Float32 = values[..., 0, :]
    return result


def row_sum(values: Float32) -> Float32:
    """Sum over axis -1: 64-column chunks i and i + n/2 by halves, then the 64 lanes in adjacent pairs."""
    columns = values.shape[-1]
    chunks, rest = divmod(columns, _LANES)
    lanes = np.zeros((*values.shape[:-1], max(chunks, 1) * _LANES), np.float32)
    if chunks == 0:
        lanes[..., :columns] = values
    else:
        lanes[...] = values[..., : chunks * _LANES]
        lanes[..., :rest] += values[..., chunks * _LANES :]
    while chunks > 1:
        half, chunks = chunks // 2, (chunks + 1) // 2
        start = chunks * _LANES
        lanes[..., : half * _LANES] += lanes[..., start : start + half * _LANES]
    lanes = lanes[..., :_LANES]
    while lanes.shape[-1] > 1:
        lanes = lanes[..., 0::2] + lanes[..., 1::2]
    result: Float32 = lanes[..., 0]
    return result


def pool(kv: Float32, score: Float32) -> Float32:
    """Softmax of `score` over axis -2, per column, as weights of `kv`; [..., pool rows, columns] -> [..., columns]."""
    with np.errstate(invalid="ignore", over="ignore"):
        weights = exp32(score - score.max(axis=-2, keepdims=True))
        weights = weights / column_sum(weights)[..., None, :]
        return column_sum(kv * weights)


def rms_norm(values: Float32, weight: Float32, epsilon: float) -> Float32:
    """x / sqrt(mean(x*x) + eps) * weight over axis -1; divided, not multiplied by a reciprocal root, as the device."""
    reciprocal = np.float32(1.0 / values.shape[-1])
    with np.errstate(invalid="ignore", over="ignore"):
        mean = row_sum(values * values) * reciprocal + np.float32(epsilon)
        result: Float32 = values / np.sqrt(mean)[..., None] * weight
    return result


def rotate(values: Float32, cos: Float32, sin: Float32) -> Float32:
    """Interleaved (GPT-J) RoPE on the last cos.shape[-1] columns; cos and sin carry every angle twice, side by side."""
    result: Float32 = values.copy()
    tail = values[..., values.shape[-1] - cos.shape[-1] :]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = result[..., values.shape[-1] - cos.shape[-1] :]
    with np.errstate(invalid="ignore", over="ignore"):
        turned[..., 0::2] = even * cos[..., 0::2] + (-odd) * sin[..., 0::2]
        turned[..., 1::2] = odd * cos[..., 1::2] + even * sin[..., 1::2]
    return result


# ------------------------------------------------------------------------------------------------ compressor


def project(x: Float32, weight: Float32) -> Float32:
    """x [T, H] times weight [N, H] transposed: fp32, k ascending, one sum per output, so rows do not see each other.

    Exact to the bit against the C++ operator where x and weight hold bfloat16 or float16 values (their products are
    exact in fp32); for other fp32 values fused multiply-add makes the operator differ in the last bit.
    """
    result = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for k in range(x.shape[1]):
        result += x[:, k, None] * weight[None, :, k]
    return result


def make_rows(kv: Float32, score: Float32, ape: Float32, start: int) -> Float32:
    """The rows of consecutive tokens from position `start`: [T, 2*half] = [kv | score + ape[position % ratio]]."""
    positions = start + np.arange(kv.shape[0])
    return np.concatenate([kv, score + ape[positions % ape.shape[0]]], axis=-1)


def pooled_windows(rows: Float32, first: int, windows: range, spec: PoolSpec) -> Float32:
    """Pool `windows`, before norm and RoPE: [len(windows), head_dim] fp32.

    rows [n, row_dim] are those of positions first .. first + n - 1 and must hold all the windows pool from.
    """
    ratio, dim, half = spec.ratio, spec.head_dim, spec.half
    if len(windows) == 0:
        return np.zeros((0, dim), np.float32)
    begin, end = windows.start * ratio, windows.stop * ratio
    oldest = max(0, begin - (ratio if spec.overlap else 0))
    if first > oldest or first + len(rows) < end:
        raise ValueError(
            f"rows: found positions {first}..{first + len(rows) - 1}, expected {oldest}..{end - 1} "
            f"for windows {windows.start}..{windows.stop - 1}"
        )
    own = rows[begin - first : end - first].reshape(len(windows), ratio, spec.row_dim)
    if not spec.overlap:
        return pool(own[..., :half], own[..., half:])
    before = np.zeros((len(windows), ratio, spec.row_dim), np.float32)
    before[..., half:] = -np.inf  # window 0 has none before it: kv 0, score -inf
    skip = 1 if windows.start == 0 else 0
    before[skip:] = rows[begin - (1 - skip) * ratio - first : end - ratio - first].reshape(-1, ratio, spec.row_dim)
    # The device interleaves the two: left half of the row before, right half of the own row, row by row.
    kv = np.stack([before[..., :dim], own[..., dim:half]], axis=2).reshape(len(windows), 2 * ratio, dim)
    score = np.stack([before[..., half : half + dim], own[..., half + dim :]], axis=2)
    return pool(kv, score.reshape(len(windows), 2 * ratio, dim))


def compressed_windows(
    rows: Float32, first: int, windows: range, spec: PoolSpec, norm_weight: Float32, cos: Float32, sin: Float32
) -> Float32:
    """Compressed rows of `windows` in fp32, [len(windows), head_dim]; round with `bfloat16_bits` for the operator's.

    rows, first: as for `pooled_windows`. norm_weight [head_dim]. cos, sin [len(windows), rope_head_dim]: the RoPE rows
    of the first position of each window (window * ratio).
    """
    pooled = pooled_windows(rows, first, windows, spec)
    return rotate(rms_norm(pooled, norm_weight, spec.norm_eps), cos, sin)


def compress_sequence(rows: Float32, spec: PoolSpec, norm_weight: Float32, cos: Float32, sin: Float32) -> Float32:
    """Compressed rows of a whole sequence from position 0, [T // ratio, head_dim] fp32.

    rows [T, row_dim] (`make_rows` with start 0); cos, sin [T // ratio, rope_head_dim].
    """
    return compressed_windows(rows, 0, range(len(rows) // spec.ratio), spec, norm_weight, cos, sin)


def rope_table(positions: NDArray[np.int64], rope_head_dim: int = 64) -> tuple[Float32, Float32]:
    """cos, sin [len(positions), rope_head_dim] of compressed layers, every angle twice side by side.

    compress_rope_theta 160000 with YaRN factor 16, original length 65536, beta 32 and 1, no mscale (the checkpoints'
    configuration).
    """
    base, factor, original, beta_fast, beta_slow = 160000.0, 16.0, 65536, 32.0, 1.0
    exponents = np.arange(0, rope_head_dim, 2) / rope_head_dim
    plain = base**-exponents

    def correction(beta: float) -> float:
        return float(rope_head_dim * np.log(original / (beta * 2 * np.pi)) / (2 * np.log(base)))

    low = max(np.floor(correction(beta_fast)), 0.0)
    high = min(np.ceil(correction(beta_slow)), rope_head_dim - 1.0)
    ramp = np.clip((np.arange(rope_head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    angles = np.asarray(positions, np.float64)[:, None] * (plain / factor * ramp + plain * (1.0 - ramp))
    angles = np.repeat(angles, 2, axis=-1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
