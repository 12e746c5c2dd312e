# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The operator of this package against the definition (`compressor/reference.py`), on whatever device it runs.

Projected rows are the device's own: its matrix product adds in another order, and that is no subject here. Everything
behind it differs from the definition in the exponential and in the order of sums only, so rows may differ by one
bfloat16 ulp, here and there. Rows are resumed in chunks, so that history comes from pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from afd_dsv4.compressor import reference
from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.evidence.cuda import operator
from afd_dsv4.geometry import CompressorKind

SPECS = {
    CompressorKind.C4: reference.C4,
    CompressorKind.C4_INDEXER: reference.C4_INDEXER,
    CompressorKind.C128: reference.C128,
}
PAGE_ROWS = 8


@dataclass(frozen=True)
class Distance:
    """How far values are from the definition.

    Attributes:
        kind: of the compressor.
        values: compared.
        off: of them that differ at all.
        ulps: the largest difference.
    """

    kind: CompressorKind
    values: int
    off: int
    ulps: int


def ulps(ours: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Distance of two bfloat16 tensors in steps of bfloat16; int64. NaN is far from everything but NaN."""

    def place(values: torch.Tensor) -> torch.Tensor:
        bits = values.contiguous().view(torch.int16).long()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    far = (place(ours) - place(wanted)).abs()
    both = ours.isnan() & wanted.isnan()
    return torch.where(both, 0, torch.where(ours.isnan() | wanted.isnan(), 1 << 20, far))


def distance(
    kind: CompressorKind, device: torch.device, chunks: Sequence[int], *, hidden: int = 1024, seed: int = 0
) -> Distance:
    """Compress one request in chunks and compare every row with the definition from all rows at once."""
    spec, generator = SPECS[kind], torch.Generator().manual_seed(seed)
    tokens, half = sum(chunks), spec.half

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    weights = CompressorWeights(
        wkv=normal(half, hidden, scale=hidden**-0.5).bfloat16().to(device),
        wgate=normal(half, hidden, scale=hidden**-0.5).bfloat16().to(device),
        ape=normal(spec.ratio, half).to(device),
        norm_weight=(1 + normal(spec.head_dim, scale=0.1)).bfloat16().to(device),
        norm_eps=spec.norm_eps,
        rope_head_dim=spec.rope_head_dim,
    )
    x = normal(tokens, hidden).bfloat16().to(device)
    cos, sin = (torch.from_numpy(t).bfloat16() for t in reference.rope_table(np.arange(tokens)))
    columns = -(-tokens // PAGE_ROWS)
    state = torch.zeros((1 + columns, PAGE_ROWS, spec.row_dim), device=device)
    table = torch.arange(1, 1 + columns, dtype=torch.int32).view(1, columns).to(device)
    found, projected, start = [], [], 0
    for chunk in chunks:
        windows = torch.arange(start // spec.ratio, (start + chunk) // spec.ratio) * spec.ratio
        at = torch.cat([windows, windows.new_zeros(min(chunk, chunk // spec.ratio + 1) - len(windows))])
        mine = x[start : start + chunk]
        rows = operator.call(
            mine,
            weights,
            kind,
            state,
            table,
            torch.tensor([start], dtype=torch.int32).to(device),
            torch.tensor([0, chunk], dtype=torch.int32).to(device),
            cos[at].to(device),
            sin[at].to(device),
        )
        found.append(rows[: len(windows)].cpu())
        raw = torch.empty((chunk, 2 * half), dtype=torch.float32, device=device)
        operator.project(mine, (weights.wkv, weights.wgate), raw)  # of the same shape, so of the same bits
        projected.append(raw.cpu().numpy())
        start += chunk
    raw_rows = np.concatenate(projected)
    rows_ = reference.make_rows(raw_rows[:, :half], raw_rows[:, half:], weights.ape.cpu().numpy(), 0)
    first = slice(0, tokens // spec.ratio * spec.ratio, spec.ratio)
    wanted = reference.compress_sequence(
        rows_, spec, weights.norm_weight.cpu().float().numpy(), cos[first].float().numpy(), sin[first].float().numpy()
    )
    bits = torch.from_numpy(reference.bfloat16_bits(wanted).view(np.int16)).view(torch.bfloat16)
    far = ulps(torch.cat(found), bits)
    return Distance(kind, far.numel(), int((far > 0).sum()), int(far.max()))
