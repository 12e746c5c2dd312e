# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The contract of the stock compressor operator on a device that is no NPU, so that the same runtime drives it there.

What callers depend on is kept: which rows are saved and read (none under page 0 is saved, none after start is read),
all saves before any read (the worst order that the stock operator may have), rows packed request after request, rows
behind the last window unwritten, no length known to the host. `register` gives the operators the names under which
vllm-ascend has its own, so that everything that calls those runs unchanged.

Rows are projected in float32 by the device's own matrix product, which depends on what else is in the launch: only
launches of one shape have equal bits. The limits that the stock operator refuses at (hidden sizes, head dims) are not
checked, and nothing here is fast on purpose but the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from afd_dsv4.compressor.stock import CONTINUOUS, INTERLEAVED, call_operator
from afd_dsv4.evidence.cuda import plain

NAMESPACE = "_C_ascend"
PAIRS = 2  # the slot_mapping_format of A2 and A3
SCHEMAS = (
    (
        "compressor(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) state_cache, Tensor ape, Tensor norm_weight, "
        "Tensor rope_sin, Tensor rope_cos, Tensor? state_block_table, Tensor? cu_seqlens, Tensor? seqused, "
        "Tensor? start_pos, int rope_head_dim, int cmp_ratio, int coff, float norm_eps, int rotary_mode, "
        "int cache_mode) -> Tensor"
    ),
    (
        "compressor_metadata(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, Tensor start_pos, "
        "Tensor kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, "
        "int num_compressed_tokens, int num_reqs_actual) -> (Tensor, Tensor, Tensor)"
    ),
)
_registered: dict[str, Any] = {}


def on(device: torch.device) -> Any:
    """The module with `save`, `compress` and `prepared` for a device."""
    if device.type != "cuda":
        return plain
    from afd_dsv4.evidence.cuda import kernels

    return kernels


def project(x: torch.Tensor, weights: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
    """Write x [T, hidden] times each weight [N, hidden] transposed, side by side, into rows, float32 [T, sum of N]."""
    begin = 0
    for weight in weights:
        there = rows[:, begin : begin + len(weight)]
        if x.device.type == "cuda":
            torch.mm(x, weight.t(), out_dtype=torch.float32, out=there)
        else:
            there.copy_(x.float() @ weight.float().t())
        begin += len(weight)


def compressor(
    x: torch.Tensor,
    wkv: torch.Tensor,
    wgate: torch.Tensor,
    state_cache: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_sin: torch.Tensor,
    rope_cos: torch.Tensor,
    state_block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seqused: torch.Tensor | None,
    start_pos: torch.Tensor | None,
    rope_head_dim: int,
    cmp_ratio: int,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    cache_mode: int,
) -> torch.Tensor:
    """`_C_ascend::compressor`; see `stock.call_operator` for the arguments.

    Raises:
        ValueError: a mode or a shape that is not this contract's.
    """
    if (rotary_mode, cache_mode) != (INTERLEAVED, CONTINUOUS) or seqused is not None:
        raise ValueError(
            f"rotary_mode {rotary_mode}, cache_mode {cache_mode} and seqused {seqused} were asked for; "
            f"only {INTERLEAVED}, {CONTINUOUS} and None are there"
        )
    half = coff * norm_weight.shape[0]
    shapes = (tuple(ape.shape), len(wkv), len(wgate), state_cache.shape[2], rope_cos.shape[1], rope_sin.shape[1])
    wanted = ((cmp_ratio, half), half, half, 2 * half, rope_head_dim, rope_head_dim)
    if shapes != wanted:
        raise ValueError(f"ape, wkv, wgate, state_cache and rope have sizes {shapes}; cmp_ratio, coff want {wanted}")
    if state_cache.stride()[1:] != (2 * half, 1):
        raise ValueError(f"state_cache has strides {state_cache.stride()}; rows of a page must adjoin")
    out = x.new_empty((len(rope_cos), norm_weight.shape[0]))
    if not len(x):
        return out
    starts = torch.zeros_like(cu_seqlens[1:]) if start_pos is None else start_pos
    rows = x.new_empty((len(x), 2 * half), dtype=torch.float32)
    project(x, (wkv, wgate), rows)
    there = (rows, ape, state_cache, state_block_table, starts, cu_seqlens)
    module = on(x.device)
    module.save(*there)
    module.compress(*there, norm_weight, rope_cos, rope_sin, norm_eps, out)
    return out


def compressor_metadata(
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_pos: torch.Tensor,
    kv_block_table: torch.Tensor,
    kv_block_size: int,
    slot_mapping_format: int,
    compress_ratio: int,
    num_compressed_tokens: int,
    num_reqs_actual: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_C_ascend::compressor_metadata`: RoPE rows of the windows' first positions, and where compressed rows go.

    Returns:
        cos and sin [rows, dim], slots int32 [rows, 2]: block and row in it; -1 and the last row where there is none.
    """
    if slot_mapping_format != PAIRS:
        raise ValueError(f"slot_mapping_format {slot_mapping_format} was asked for; only {PAIRS} is there")
    cu, starts = cu_seqlens[: num_reqs_actual + 1], start_pos[:num_reqs_actual]
    request, window, there = plain.windows(cu, starts, compress_ratio, num_compressed_tokens)
    column, position = window // kv_block_size, window * compress_ratio
    there = there & (column < kv_block_table.shape[1]) & (position < len(rope_cos))
    block = kv_block_table[request, column.clamp(max=kv_block_table.shape[1] - 1)]
    there = there & (block >= 0)
    at, known = position.clamp(max=len(rope_cos) - 1), there[:, None]
    slots = torch.stack([block.int(), (window % kv_block_size).int()], dim=1)
    nowhere = torch.stack([torch.full_like(slots[:, 0], -1), torch.full_like(slots[:, 0], kv_block_size - 1)], dim=1)
    return (
        torch.where(known, rope_cos[at], 1.0).to(rope_cos.dtype),
        torch.where(known, rope_sin[at], 0.0).to(rope_sin.dtype),
        torch.where(known, slots, nowhere),
    )


#: For `StockRuntime(operator=...)`: the same call as the stock operator's, without its name.
call = partial(call_operator, compressor=compressor)


def register(device: str = "CUDA") -> None:
    """Let the operators bear the names of vllm-ascend's own, for one of torch's dispatch keys. Twice is once."""
    if device in _registered:
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    namespace = getattr(torch.ops, NAMESPACE)
    for schema, implementation in zip(SCHEMAS, (compressor, compressor_metadata), strict=True):
        name = schema.partition("(")[0]
        if not hasattr(namespace, name):
            library.define(schema)
        library.impl(name, implementation, device)
    _registered[device] = library  # an implementation lives as long as its library
