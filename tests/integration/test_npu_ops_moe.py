# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The operators of DeepSeek-V4's mixture of experts, hyper-connections, norms and sampling, on the software NPU.

Each is compared with its definition, computed one element at a time in float64; each refusal is seen; and one chain of
all of them runs on a hung stream (nothing waits for it) and in a graph that is replayed with other data.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.softnpu import runtime as rt

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu

Tensor = Any
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: One rounding step of each dtype, relative.
STEP = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}


@pytest.fixture(autouse=True)
def _schedule() -> Iterator[None]:
    rt.set_schedule(5, 50)
    torch.ops.softnpu.waive("npu_hc_pre_v2.d", True)
    yield
    torch.ops.softnpu.waive("npu_hc_pre_v2.d", False)
    rt.set_schedule(0)


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    """Makes the next random tensor, on the host."""
    generator = torch.Generator().manual_seed(7)

    def make(*shape: int, dtype: Any = FP32, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return make


def ops() -> Any:
    return torch.ops._C_ascend


def torch_npu() -> Any:
    import torch_npu

    return torch_npu


def ints(*values: Any, dtype: Any = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def close(found: Tensor, wanted: Any, steps: float = 2.0) -> None:
    """Demand what the dtype of `found` can show of `wanted` (nested lists or a tensor of float64)."""
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    assert found.shape == wanted.shape
    step = STEP[found.dtype] * steps
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=step, atol=step, equal_nan=True)


# ---------------------------------------------------------------------------------------------- hyper-connections


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def hc_pre_of_one(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, hc_eps: float
) -> Any:
    """y, post and comb of one token [hc, d]."""
    hc, d = x.shape
    flat = [float(v) for v in x.flatten()]
    norm = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + eps)
    mix = [sum(a * float(b) for a, b in zip(flat, row, strict=True)) * norm for row in fn]
    pre = [sigmoid(mix[h] * float(scale[0]) + float(base[h])) + hc_eps for h in range(hc)]
    post = [2 * sigmoid(mix[hc + h] * float(scale[1]) + float(base[hc + h])) for h in range(hc)]
    comb = []
    for h in range(hc):
        row = [mix[2 * hc + h * hc + g] * float(scale[2]) + float(base[2 * hc + h * hc + g]) for g in range(hc)]
        total = sum(math.exp(v) for v in row)
        comb.append([math.exp(v) / total + hc_eps for v in row])
    for turn in range(2 * iterations - 1):
        if turn % 2 == 0:  # columns
            totals = [sum(comb[h][g] for h in range(hc)) + hc_eps for g in range(hc)]
            comb = [[comb[h][g] / totals[g] for g in range(hc)] for h in range(hc)]
        else:
            comb = [[v / (sum(row) + hc_eps) for v in row] for row in comb]
    y = [sum(pre[h] * float(x[h, i]) for h in range(hc)) for i in range(d)]
    return y, post, comb


@pytest.mark.parametrize("lead", [(3,), (2, 2)])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_hc_pre_is_its_definition_for_every_token(
    draw: Callable[..., Tensor], lead: tuple[int, ...], iterations: int
) -> None:
    x, fn, scale, base = draw(*lead, 4, 24, dtype=BF16), draw(24, 96), draw(3), draw(24)
    y, post, comb = ops().npu_hc_pre_v2(x.npu(), fn.npu(), scale.npu(), base.npu(), 4, iterations, 1e-6, 1e-3)
    assert (y.dtype, post.dtype, comb.dtype) == (BF16, FP32, FP32)
    wanted = [hc_pre_of_one(token, fn, scale, base, iterations, 1e-6, 1e-3) for token in x.reshape(-1, 4, 24)]
    for found, i, shape in ((y, 0, (24,)), (post, 1, (4,)), (comb, 2, (4, 4))):
        close(found, torch.tensor([w[i] for w in wanted], dtype=torch.float64).reshape(*lead, *shape), steps=4)


def test_a_token_gets_the_same_hyper_connection_in_every_batch(draw: Callable[..., Tensor]) -> None:
    # Only the projection, a matrix product, may depend on the batch: here each of its sums is exact.
    x, fn = draw(9, 4, 16, scale=3).round().to(BF16), draw(24, 64, scale=3).round()
    scale, base = draw(3), draw(24)
    rest = (fn.npu(), scale.npu(), base.npu(), 4, 20, 1e-6, 1e-6)
    whole = ops().npu_hc_pre_v2(x.npu(), *rest)
    for token in range(9):
        alone = ops().npu_hc_pre_v2(x[token : token + 1].npu(), *rest)
        for a, b in zip(whole, alone, strict=True):
            assert torch.equal(a[token].cpu(), b[0].cpu())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("weights", [BF16, FP32])
def test_hc_post_is_its_definition(draw: Callable[..., Tensor], dtype: Any, weights: Any) -> None:
    b, s, hc, d = 2, 3, 4, 5
    x, residual = draw(b, s, d, dtype=dtype), draw(b, s, hc, d, dtype=dtype)
    post, comb = draw(b, s, hc, dtype=weights), draw(b, s, hc, hc, dtype=weights)
    found = ops().npu_hc_post(x.npu(), residual.npu(), post.npu(), comb.npu())
    assert found.dtype == dtype
    wanted = torch.empty(b, s, hc, d, dtype=torch.float64)
    for i in range(b):
        for j in range(s):
            for h in range(hc):
                for e in range(d):
                    wanted[i, j, h, e] = float(post[i, j, h]) * float(x[i, j, e]) + sum(
                        float(comb[i, j, g, h]) * float(residual[i, j, g, e]) for g in range(hc)
                    )
    close(found, wanted, steps=4)


# ---------------------------------------------------------------------------------------------- gating


def scores_of_one(logits: Tensor, norm: int) -> list[float]:
    values = [float(v) for v in logits]
    if norm == 0:
        total = sum(math.exp(v) for v in values)
        return [math.exp(v) / total for v in values]
    if norm == 1:
        return [sigmoid(v) for v in values]
    return [math.sqrt(math.log(1 + math.exp(v))) for v in values]


def gate_of_one(
    logits: Tensor, bias: Tensor | None, k: int, norm: int, renorm: int, scaling: float, groups: tuple[int, int, int]
) -> tuple[list[float], list[int]]:
    """Weights and experts of one token; groups are (kept, all, how they are judged)."""
    scores = scores_of_one(logits, norm)
    choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
    kept, count, mode = groups
    size = len(choice) // count
    if count > 1 and kept < count and size > 1:
        worth = []
        for g in range(count):
            best = sorted(choice[g * size : (g + 1) * size], reverse=True)
            worth.append(best[0] + best[1] if mode == 1 else best[0])
        winners = sorted(range(count), key=lambda g: (-worth[g], g))[:kept]
        choice = [v if e // size in winners else -math.inf for e, v in enumerate(choice)]
    experts = sorted(range(len(choice)), key=lambda e: (-choice[e], e))[:k]
    total = sum(scores[e] for e in experts) + 1e-20 if norm != 0 or renorm else 1.0
    return [scores[e] / total * scaling for e in experts], experts


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("norm", [0, 1, 2])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gating_by_score_is_its_definition(draw: Callable[..., Tensor], dtype: Any, norm: int, with_bias: bool) -> None:
    x = draw(7, 12, dtype=dtype)
    bias = draw(12, dtype=dtype) if with_bias else None
    y, experts, scores = ops().moe_gating_top_k_hash(
        x=x.npu(), k=3, bias=None if bias is None else bias.npu(), routed_scaling_factor=1.5, norm_type=norm,
        out_flag=True,
    )  # fmt: skip
    assert (y.dtype, experts.dtype, scores.dtype) == (dtype, torch.int32, FP32)
    wanted = [gate_of_one(row, bias, 3, norm, 0, 1.5, (1, 1, 0)) for row in x]
    assert experts.cpu().tolist() == [w[1] for w in wanted]
    close(y, [w[0] for w in wanted])
    close(scores, [scores_of_one(row, norm) for row in x])


@pytest.mark.parametrize("groups", [(1, 1, 1), (2, 4, 0), (2, 4, 1), (4, 4, 1), (1, 6, 1)])
@pytest.mark.parametrize(("norm", "renorm"), [(0, 0), (0, 1), (1, 1)])
def test_gating_keeps_to_the_best_groups(
    draw: Callable[..., Tensor], groups: tuple[int, int, int], norm: int, renorm: int
) -> None:
    x, bias = draw(9, 12), draw(12, scale=0.3)
    kept, count, mode = groups
    y, experts, scores = ops().moe_gating_top_k(
        x.npu(), 2, kept, count, mode, renorm, norm, False, 2.5, 1e-20, bias.npu()
    )
    wanted = [gate_of_one(row, bias, 2, norm, renorm, 2.5, groups) for row in x]
    assert experts.cpu().tolist() == [w[1] for w in wanted]
    close(y, [w[0] for w in wanted])
    assert (scores.cpu() > 1e10).all(), "out is not written without out_flag: poison"


@given(st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=4))
def test_equal_scores_go_to_the_lowest_expert(rows: list[list[int]]) -> None:
    experts = ops().moe_gating_top_k_hash(torch.tensor(rows, dtype=FP32), 4, norm_type=2)[1]
    assert experts.tolist() == [sorted(range(6), key=lambda e: (-row[e], e))[:4] for row in rows]


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("table", [torch.int32, torch.int64])
def test_a_table_chooses_the_experts_and_the_scores_weigh_them(
    draw: Callable[..., Tensor], ids: Any, table: Any
) -> None:
    x, input_ids = draw(4, 8), ints(3, 0, 3, 9, dtype=ids)
    tid2eid = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:2] for i in range(10)])
    y, experts, _ = ops().moe_gating_top_k_hash(
        x.npu(), 2, None, input_ids.npu(), tid2eid.to(table).npu(), routed_scaling_factor=1.5, norm_type=2
    )
    wanted_experts = [tid2eid[int(i)].tolist() for i in input_ids]
    assert experts.cpu().tolist() == wanted_experts
    wanted = []
    for row, chosen in zip(x, wanted_experts, strict=True):
        scores = scores_of_one(row, 2)
        wanted.append([scores[e] / sum(scores[c] for c in chosen) * 1.5 for e in chosen])
    close(y, wanted)


@pytest.mark.parametrize(
    ("input_ids", "tid2eid", "message"),
    [
        ([0, 5], [[0, 1]] * 5, r"input_ids\[1\]: found 5, expected a row of tid2eid, 0 to 4"),
        ([0, -1], [[0, 1]] * 5, r"input_ids\[1\]: found -1"),
        ([0, 1], [[0, 1], [2, 8]], r"tid2eid\[1, 1\]: found 8, expected an expert, 0 to 7"),
    ],
)
def test_an_id_or_expert_outside_its_table_is_an_error_of_the_device(
    draw: Callable[..., Tensor], input_ids: list[int], tid2eid: list[list[int]], message: str
) -> None:
    ops().moe_gating_top_k_hash(draw(2, 8).npu(), 2, None, ints(*input_ids).npu(), ints(*tid2eid).npu(), norm_type=2)
    with pytest.raises(RuntimeError, match=message):
        torch.npu.synchronize()


# ---------------------------------------------------------------------------------------------- routing


def routed(experts: list[list[int]], first: int, last: int) -> list[int]:
    """The source slots in the order of the rows they get."""
    flat = [e for row in experts for e in row]
    return sorted((i for i, e in enumerate(flat) if first <= e < last), key=lambda i: (flat[i], i))


EXPERTS = st.integers(1, 3).flatmap(
    lambda k: st.lists(st.lists(st.integers(0, 5), min_size=k, max_size=k), min_size=1, max_size=6)
)


@given(EXPERTS, st.sampled_from([(0, 6), (0, 3), (3, 6), (2, 3)]), st.sampled_from([0, 1]), st.sampled_from([0, 1]))
@settings(max_examples=60)
def test_routing_sorts_rows_by_expert_and_says_where_they_went(
    experts: list[list[int]], span: tuple[int, int], kind: int, row_idx_type: int
) -> None:
    first, last = span
    x = torch.arange(len(experts) * 4, dtype=FP32).reshape(-1, 4)
    scale = torch.arange(len(experts), dtype=FP32)
    k = len(experts[0])
    arguments = {
        "scale": scale,
        "active_num": x.shape[0] * k,
        "expert_num": 6,
        "expert_tokens_num_type": kind,
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
        "active_expert_range": [first, last],
        "row_idx_type": row_idx_type,
    }
    order = routed(experts, first, last)
    counts = [sum(row.count(e) for row in experts) for e in range(first, last)]
    for operator in (ops().npu_moe_init_routing_custom, torch.ops.npu.npu_moe_init_routing_v2):
        rows, row_idx, tokens, row_scale = operator(x, ints(*experts), **arguments)
        assert rows.shape == (x.shape[0] * k, 4)
        assert rows[: len(order)].tolist() == [x[i // k].tolist() for i in order]
        assert row_scale[: len(order)].tolist() == [float(i // k) for i in order]
        assert (rows[len(order) :] > 1e10).all(), "rows that no expert here has are poison"
        if row_idx_type == 0:
            assert row_idx.tolist() == [order.index(i) if i in order else -1 for i in range(len(experts) * k)]
        else:
            assert row_idx[: len(order)].tolist() == order
        assert tokens.tolist() == (counts if kind == 1 else [sum(counts[: i + 1]) for i in range(len(counts))])


def test_an_expert_that_is_none_gets_no_row_in_expert_parallel_and_is_an_error_elsewhere() -> None:
    x, experts = torch.ones(2, 4), ints([0, -1], [3, 2])
    local = ops().npu_moe_init_routing_custom(x, experts, expert_num=4, quant_mode=-1, active_expert_range=[0, 2])
    assert local[1].tolist() == [0, -1, -1, -1]
    with pytest.raises(RuntimeError, match=r"expert_idx\[0, 1\]: found -1, expected an expert, 0 to 3"):
        ops().npu_moe_init_routing_custom(x, experts, expert_num=4, quant_mode=-1)
    with pytest.raises(RuntimeError, match=r"expert_idx\[1, 0\]: found 3, expected an expert, 0 to 2"):
        ops().npu_moe_init_routing_custom(x, experts, expert_num=3, quant_mode=-1, active_expert_range=[0, 2])


def test_routing_stops_at_the_active_rows() -> None:
    x, experts = torch.arange(8.0).reshape(4, 2), ints([1], [0], [1], [0])
    rows, row_idx, tokens, _ = ops().npu_moe_init_routing_custom(
        x, experts, active_num=3, expert_num=2, quant_mode=-1, expert_tokens_num_type=1, expert_tokens_num_flag=True
    )
    assert rows.tolist() == [x[1].tolist(), x[3].tolist(), x[0].tolist()]
    assert row_idx.tolist() == [2, 0, 3, 1]
    assert tokens.tolist() == [2, 2]


@given(EXPERTS, st.sampled_from([None, 0, 2, -1]))
@settings(max_examples=40)
def test_permutation_is_a_stable_sort_and_says_where_rows_went(experts: list[list[int]], wanted: int | None) -> None:
    x = torch.arange(len(experts) * 3, dtype=FP32).reshape(-1, 3)
    k = len(experts[0])
    order = routed(experts, 0, 6)
    rows, places = torch.ops.npu.npu_moe_token_permute(x, ints(*experts), wanted)
    count = len(order) if not wanted else min(wanted, len(order)) if wanted > 0 else len(order) + wanted
    assert rows.tolist() == [x[i // k].tolist() for i in order[:count]]
    assert places.tolist() == [order.index(i) for i in range(len(order))]
    assert places.dtype == torch.int32


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("weights", [BF16, FP32, None])
def test_unpermutation_adds_the_weighed_rows_of_a_token(draw: Callable[..., Tensor], dtype: Any, weights: Any) -> None:
    rows = draw(12, 5, dtype=dtype)
    places = torch.randperm(12, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    probs = None if weights is None else draw(4, 3, dtype=weights)
    found = torch_npu().npu_moe_token_unpermute(rows.npu(), places.npu(), None if probs is None else probs.npu())
    assert found.dtype == dtype
    if probs is None:
        assert found.cpu().tolist() == [rows[int(i)].tolist() for i in places]
        return
    wanted = [
        [sum(float(rows[int(places[3 * t + j]), i]) * float(probs[t, j]) for j in range(3)) for i in range(5)]
        for t in range(4)
    ]
    close(found, wanted, steps=4)


@pytest.mark.parametrize("row", [4, -1])
def test_unpermutation_from_a_row_that_is_not_there_is_an_error_of_the_device(row: int) -> None:
    torch_npu().npu_moe_token_unpermute(torch.ones(4, 2).npu(), ints(0, 1, row, 3).npu())
    with pytest.raises(RuntimeError, match=rf"sorted_indices\[2\]: found {row}, expected a row of permuted_tokens"):
        torch.npu.synchronize()


# ---------------------------------------------------------------------------------------------- products, activation


def grouped(x: Tensor, weight: Tensor, group_list: Tensor, kind: int, bias: Any = None, split_item: int = 2) -> Tensor:
    return torch_npu().npu_grouped_matmul(
        x=[x], weight=[weight], bias=None if bias is None else [bias], split_item=split_item, group_list_type=kind,
        group_type=0, group_list=group_list,
    )[0]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_multiplies_its_own_rows(
    draw: Callable[..., Tensor], dtype: Any, kind: int, with_bias: bool, transposed: bool
) -> None:
    counts = [2, 0, 3, 1]
    x = draw(8, 6, dtype=dtype)
    weight = draw(4, 5, 6, dtype=dtype).transpose(1, 2) if transposed else draw(4, 6, 5, dtype=dtype)
    bias = draw(4, 5, dtype=FP16 if dtype == FP16 else FP32) if with_bias else None
    groups = ints(*(counts if kind == 1 else [2, 2, 5, 6]), dtype=torch.int64)
    found = grouped(x.npu(), weight.npu(), groups.npu(), kind, None if bias is None else bias.npu())
    owners = [e for e, count in enumerate(counts) for _ in range(count)]
    wanted = [
        [
            sum(float(x[row, i]) * float(weight[e, i, j]) for i in range(6))
            + (0 if bias is None else float(bias[e, j]))
            for j in range(5)
        ]
        for row, e in enumerate(owners)
    ]
    assert found.dtype == dtype
    close(found[:6], wanted, steps=4)
    assert (found[6:].cpu().float() > 100).all(), "rows of no group are poison"


@pytest.mark.parametrize(
    ("kind", "groups", "message"),
    [
        (1, [2, -1], r"group_list\[1\]: found -1, expected a count of 0 to 2, the rows left"),
        (1, [2, 3], r"group_list\[1\]: found 3, expected a count of 0 to 2, the rows left"),
        (0, [2, 1], r"group_list\[1\]: found 1, expected a sum of 0 to 4, not below the one before, 2"),
        (0, [2, 5], r"group_list\[1\]: found 5, expected a sum of 0 to 4"),
    ],
)
def test_groups_that_do_not_fit_the_rows_are_an_error_of_the_device(kind: int, groups: list[int], message: str) -> None:
    grouped(torch.ones(4, 2).npu(), torch.ones(2, 2, 3).npu(), ints(*groups, dtype=torch.int64).npu(), kind)
    with pytest.raises(RuntimeError, match=message):
        torch.npu.synchronize()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_swiglu_is_its_definition_and_rounds_once(draw: Callable[..., Tensor], dtype: Any, dim: int) -> None:
    x = draw(4, 6, 8, dtype=dtype, scale=3)
    found = torch_npu().npu_swiglu(x.npu(), dim=dim)
    gate, up = (half.double() for half in x.chunk(2, dim))
    close(found, gate * (1 / (1 + torch.exp(-gate))) * up, steps=1)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("normalised", [1, 2])
@pytest.mark.parametrize("with_beta", [False, True])
def test_the_norm_of_a_sum_is_its_definition(
    draw: Callable[..., Tensor], dtype: Any, normalised: int, with_beta: bool
) -> None:
    a, b = draw(3, 4, 6, dtype=dtype), draw(3, 4, 6, dtype=dtype)
    shape = a.shape[-normalised:]
    gamma, beta = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype) if with_beta else None
    y, rstd, total = ops().npu_add_rms_norm_bias(
        a.npu(), b.npu(), gamma.npu(), None if beta is None else beta.npu(), 1e-5
    )
    assert torch.equal(total.cpu(), (a.float() + b.float()).to(dtype))
    value = a.double() + b.double()
    dims = tuple(range(-normalised, 0))
    wanted_rstd = 1 / ((value * value).mean(dims, keepdim=True) + 1e-5).sqrt()
    assert rstd.dtype == FP32
    torch.testing.assert_close(rstd.cpu().double(), wanted_rstd, rtol=STEP[FP16 if dtype == FP16 else FP32], atol=0)
    wanted = value * wanted_rstd * gamma.double() + (0 if beta is None else beta.double())
    close(y, wanted, steps=6)
    if beta is None:
        without = torch_npu().npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-5)
        assert all(torch.equal(x.cpu(), z.cpu()) for x, z in zip(without, (y, rstd, total), strict=True))


def test_atb_adds_the_product_in_float32(draw: Callable[..., Tensor]) -> None:
    x, weight, c = draw(3, 4, dtype=FP16), draw(3, 5, dtype=FP16), draw(4, 5)
    found = c.npu()
    torch_npu()._npu_matmul_add_fp32(x.npu(), weight.npu(), found)
    close(found, c.double() + x.double().t() @ weight.double())


# ---------------------------------------------------------------------------------------------- sampling


def kept_of_one(logits: list[float], k: int | None, p: float | None) -> list[int]:
    order = sorted(range(len(logits)), key=lambda i: (logits[i], i))
    kept = [i for i in order if k is None or logits[i] >= logits[order[-k]]]
    if p is None:
        return sorted(kept)
    total = sum(math.exp(logits[i]) for i in kept)
    passed, out = 0.0, []
    for i in kept:
        passed += math.exp(logits[i]) / total
        if passed > 1 - p or i == kept[-1]:
            out.append(i)
    return sorted(out)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("given_k", [True, False])
@pytest.mark.parametrize("given_p", [True, False])
def test_top_k_top_p_keeps_what_its_definition_keeps(
    draw: Callable[..., Tensor], dtype: Any, given_k: bool, given_p: bool
) -> None:
    logits = draw(6, 30, dtype=dtype, scale=2)
    k, p = ints(1, 30, 5, 7, 2, 30), torch.tensor([0.5, 0.9, 1.0, 0.25, 0.75, 0.0], dtype=dtype)
    if not (given_k or given_p):
        with pytest.raises(RuntimeError, match="p and k: found neither"):
            torch_npu().npu_top_k_top_p(logits.npu())
        return
    found = torch_npu().npu_top_k_top_p(logits.npu(), p=p.npu() if given_p else None, k=k.npu() if given_k else None)
    assert found.dtype == dtype
    for row in range(6):
        values = logits[row].tolist()
        kept = kept_of_one(values, int(k[row]) if given_k else None, float(p[row]) if given_p else None)
        assert found[row].tolist() == [v if i in kept else -math.inf for i, v in enumerate(values)]


@pytest.mark.parametrize(
    ("k", "p", "message"),
    [(0, 0.5, r"k\[1\]: found 0, expected 1 to 4"), (5, 0.5, r"k\[1\]: found 5"), (2, 1.5, r"p\[1\]: found 1.5")],
)
def test_a_k_or_p_out_of_range_is_an_error_of_the_device(k: int, p: float, message: str) -> None:
    torch_npu().npu_top_k_top_p(torch.ones(2, 4).npu(), p=torch.tensor([0.5, p]).npu(), k=ints(1, k).npu())
    with pytest.raises(RuntimeError, match=message):
        torch.npu.synchronize()


# ---------------------------------------------------------------------------------------------- refusals


def t(*shape: int, dtype: Any = FP32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


def pre(
    x: Any = (2, 4, 8), fn: Any = (24, 32), scale: Any = (3,), base: Any = (24,), mult: int = 4, dtype: Any = BF16
) -> Any:
    return ops().npu_hc_pre_v2(t(*x, dtype=dtype), t(*fn), t(*scale), t(*base), mult, 20, 1e-6, 1e-6)


def post(
    residual: Any = (1, 2, 4, 8), p: Any = (1, 2, 4), c: Any = (1, 2, 4, 4), x: Any = (1, 2, 8), dtype: Any = FP32
) -> Any:
    return ops().npu_hc_post(t(*x), t(*residual, dtype=dtype), t(*p), t(*c))


def by_hash(x: Any = (2, 8), k: int = 2, dtype: Any = FP32, **others: Any) -> Any:
    return ops().moe_gating_top_k_hash(t(*x, dtype=dtype), k, **{"norm_type": 2, **others})


def by_table(ids: int = 2, id_type: Any = torch.int32, width: int = 2, table_type: Any = torch.int32) -> Any:
    return by_hash(input_ids=t(ids, dtype=id_type), tid2eid=t(5, width, dtype=table_type))


def by_score(x: Any = (2, 8), k: int = 2, groups: Any = (1, 1, 1), renorm: int = 0, norm: int = 0) -> Any:
    return ops().moe_gating_top_k(t(*x), k, *groups, renorm, norm, False, 1.0, 1e-20, None)


def route(x: Any = (2, 4), idx: Any = (2, 3), dtype: Any = torch.int32, **others: Any) -> Any:
    return ops().npu_moe_init_routing_custom(
        t(*x), t(*idx, dtype=dtype), **{"expert_num": 4, "quant_mode": -1, **others}
    )


def product(
    w: Any = (2, 2, 3), w_type: Any = FP32, groups: Any = 2, groups_type: Any = torch.int64, **others: Any
) -> Any:
    return torch_npu().npu_grouped_matmul(
        [t(4, 2)], [t(*w, dtype=w_type)], group_list=t(groups, dtype=groups_type),
        **{"split_item": 2, "group_type": 0, "group_list_type": 1, **others},
    )  # fmt: skip


def norm_of(
    x: Any = (2, 4), other: Any = (2, 4), gamma: int = 4, beta: Any = None, eps: float = 1e-6, dtype: Any = FP32
) -> Any:
    return ops().npu_add_rms_norm_bias(t(*x), t(*other), t(gamma, dtype=dtype), beta, eps)


REFUSALS: list[tuple[str, Callable[[], Any], str]] = [
    ("hc_pre dims", lambda: pre(x=(4, 8)), "x's dims: found 2, expected 3 or 4"),
    ("hc_pre empty", lambda: pre(x=(0, 4, 8)), "x: found .*expected no size to be 0"),
    ("hc_pre mult", lambda: pre(mult=2), "hc_mult: found 2, expected 4"),
    ("hc_pre streams", lambda: pre(x=(2, 3, 8)), "expected the last but one size 4"),
    ("hc_pre fn", lambda: pre(fn=(24, 31)), r"hc_fn: found \[24, 31\], expected \[24, 32\]"),
    ("hc_pre scale", lambda: pre(scale=(4,)), "hc_scale: found"),
    ("hc_pre base", lambda: pre(base=(23,)), "hc_base: found"),
    ("hc_pre x's dtype", lambda: pre(dtype=FP32), "x's dtype: found Float"),
    ("hc_post x", lambda: post(x=(2, 8)), "x's dims: found 2, expected 3"),
    ("hc_post residual", lambda: post(residual=(1, 2, 4, 7)), "residual: found"),
    ("hc_post post", lambda: post(p=(1, 2, 3)), "post: found"),
    ("hc_post comb", lambda: post(c=(1, 2, 4, 3)), "comb: found"),
    ("hc_post dtype", lambda: post(dtype=FP16), "residual's dtype: found Half"),
    ("hash dims", lambda: by_hash(x=(8,)), "x's dims: found 1, expected 2"),
    ("hash dtype", lambda: by_hash(dtype=torch.int32), "x's dtype: found Int"),
    ("hash experts", lambda: by_hash(x=(1, 2049)), "the number of experts: found 2049, expected 1 to 2048"),
    ("hash k", lambda: by_hash(k=9), "k: found 9, expected 1 to the number of experts, 8"),
    ("hash renorm", lambda: by_hash(renorm=1), "renorm: found 1, expected 0"),
    ("hash norm", lambda: by_hash(norm_type=3), "norm_type: found 3"),
    ("hash groups", lambda: by_hash(group_count=2), "group_count: found 2, expected 1 with softplus"),
    ("hash eps", lambda: by_hash(eps=0.0), "eps: found 0, expected more than 0"),
    ("hash scaling", lambda: by_hash(routed_scaling_factor=0.0), "routed_scaling_factor: found 0"),
    ("hash bias", lambda: by_hash(bias=t(7)), r"bias: found \[7\], expected \[8\]"),
    ("hash bias's dtype", lambda: by_hash(bias=t(8, dtype=BF16)), "bias's dtype: found BFloat16, expected x's, Float"),
    ("hash ids alone", lambda: by_hash(input_ids=t(2, dtype=torch.int32)), "expected both input_ids and tid2eid"),
    ("hash ids", lambda: by_table(ids=3), "input_ids: found .3., expected 2 ids"),
    ("hash ids' dtype", lambda: by_table(id_type=FP32), "input_ids' dtype: found Float"),
    ("hash table", lambda: by_table(width=3), r"tid2eid: found \[5, 3\], expected \[ids, k\], k = 2"),
    ("hash table's dtype", lambda: by_table(table_type=FP32), "tid2eid's dtype: found Float"),
    ("score groups", lambda: by_score(groups=(1, 3, 1)), "group_count: found 3, expected a divisor"),
    ("score kept", lambda: by_score(groups=(3, 2, 1)), "k_group: found 3, expected 1 to group_count, 2"),
    ("score mode", lambda: by_score(groups=(1, 1, 2)), "group_select_mode: found 2, expected 0 or 1"),
    ("score small groups", lambda: by_score(groups=(2, 8, 1)), "the experts of a group: found 1, expected at least 2"),
    (
        "score few",
        lambda: by_score(k=3, groups=(1, 4, 0)),
        "k: found 3, expected at most the experts of k_group groups",
    ),
    ("score wide", lambda: by_score(x=(1, 130), groups=(1, 65, 1)), "expected at most 2048 experts with each group"),
    ("score norm", lambda: by_score(norm=2), "norm_type: found 2"),
    ("score renorm", lambda: by_score(renorm=2), "renorm: found 2"),
    ("routing rows", lambda: route(idx=(3, 3)), "expert_idx's rows: found 3, expected those of x, 2"),
    ("routing dims", lambda: route(x=(2,)), "x's dims: found 1, expected 2"),
    ("routing dtype", lambda: route(dtype=torch.int64), "expert_idx's dtype: found Long, expected Int"),
    ("routing quantised", lambda: route(quant_mode=1), "quant_mode: found 1, expected -1"),
    ("routing pads", lambda: route(drop_pad_mode=1), "drop_pad_mode: found 1, expected 0"),
    ("routing counts", lambda: route(expert_tokens_num_type=2), "expert_tokens_num_type: found 2"),
    ("routing type", lambda: route(row_idx_type=2), "row_idx_type: found 2"),
    ("routing active", lambda: route(active_num=-2), "active_num: found -2"),
    ("routing experts", lambda: route(expert_num=0), "expert_num: found 0, expected more than 0"),
    (
        "routing range",
        lambda: route(active_expert_range=[2, 2]),
        "active_expert_range: found .2, 2., expected first < last",
    ),
    ("routing over", lambda: route(active_expert_range=[0, 5]), "active_expert_range: found .0, 5."),
    ("routing scale", lambda: route(scale=t(3)), "scale: found"),
    ("routing offset", lambda: route(offset=t(1)), "offset: found a tensor"),
    ("permute dims", lambda: torch_npu().npu_moe_token_permute(t(2), t(2, dtype=torch.int32)), "tokens' dims: found 1"),
    ("permute dtype", lambda: torch_npu().npu_moe_token_permute(t(2, 2), t(2)), "indices' dtype: found Float"),
    (
        "permute rows",
        lambda: torch_npu().npu_moe_token_permute(t(2, 2), t(3, dtype=torch.int32)),
        "indices' rows: found 3",
    ),
    (
        "permute padded",
        lambda: torch_npu().npu_moe_token_permute(t(2, 2), t(2, dtype=torch.int32), None, True),
        "padded_mode: found true",
    ),
    (
        "unpermute dtype",
        lambda: torch_npu().npu_moe_token_unpermute(t(2, 2), t(2)),
        "sorted_indices' dtype: found Float",
    ),
    (
        "unpermute probs",
        lambda: torch_npu().npu_moe_token_unpermute(t(4, 2), t(4, dtype=torch.int32), t(3, 1)),
        "probs: found",
    ),
    ("product groups", lambda: product(groups=3), "group_list: found .3., expected one entry for each of the 2"),
    ("product groups' dtype", lambda: product(groups_type=torch.int32), "group_list's dtype: found Int, expected Long"),
    ("product weight", lambda: product(w=(2, 3, 3)), r"weight: found \[2, 3, 3\], expected \[experts, 2, n\]"),
    ("product weight's dtype", lambda: product(w_type=BF16), "weight's dtype: found BFloat16, expected x's, Float"),
    ("product type", lambda: product(group_type=-1), "group_type: found -1, expected 0"),
    ("product split", lambda: product(split_item=0), "split_item: found 0, expected 2 or 3"),
    ("product list", lambda: product(group_list_type=2), "group_list_type: found 2"),
    ("product act", lambda: product(act_type=1), "act_type: found 1, expected 0"),
    ("product scale", lambda: product(scale=[t(2, 3)]), "scale: found tensors, expected none: the quantised"),
    ("product bias", lambda: product(bias=[t(2, 4)]), "bias: found"),
    (
        "product bias's dtype",
        lambda: product(bias=[t(2, 3, dtype=BF16)]),
        "bias's dtype: found BFloat16, expected Float",
    ),
    ("swiglu odd", lambda: torch_npu().npu_swiglu(t(2, 3)), "input's size along dim: found 3, expected an even number"),
    ("swiglu dtype", lambda: torch_npu().npu_swiglu(t(2, 4, dtype=torch.int32)), "input's dtype: found Int"),
    ("swiglu dim", lambda: torch_npu().npu_swiglu(t(2, 4), 2), "dim: found 2, expected a dim of input"),
    ("norm sum", lambda: norm_of(other=(2, 3)), "x2: found"),
    ("norm gamma", lambda: norm_of(gamma=3), "gamma: found"),
    ("norm gamma's dtype", lambda: norm_of(dtype=BF16), "the dtypes of x2 and gamma"),
    ("norm beta", lambda: norm_of(beta=t(3)), "beta: found"),
    ("norm empty", lambda: norm_of(x=(0, 4), other=(0, 4)), "expected no size to be 0"),
    ("norm epsilon", lambda: norm_of(eps=-1.0), "epsilon: found -1, expected at least 0"),
    (
        "top k",
        lambda: torch_npu().npu_top_k_top_p(t(2, 4), k=t(2, dtype=torch.int64)),
        "k's dtype: found Long, expected Int",
    ),
    (
        "top p",
        lambda: torch_npu().npu_top_k_top_p(t(2, 4), p=t(2, dtype=BF16)),
        "p's dtype: found BFloat16, expected Float",
    ),
    ("top rows", lambda: torch_npu().npu_top_k_top_p(t(2, 4), p=t(3)), r"p: found \[3\], expected \[2\]"),
    ("atb", lambda: torch_npu()._npu_matmul_add_fp32(t(2, 2), t(2, 2), t(2, 2)), "x's dtype: found Float"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_what_the_operator_refuses_is_refused_where_it_is_called(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()


def test_only_a_waiver_lets_hyper_connections_have_another_width() -> None:
    pre()
    torch.ops.softnpu.waive("npu_hc_pre_v2.d", False)
    with pytest.raises(
        RuntimeError, match=r"d, the last size of x: found 8, expected 4096 or 7168 \(limit npu_hc_pre_v2.d"
    ):
        pre()
    y, post_, comb = pre(x=(1, 4, 4096), fn=(24, 4 * 4096))
    assert (y.shape, post_.shape, comb.shape) == ((1, 4096), (1, 4), (1, 4, 4))


# ---------------------------------------------------------------------------------------------- all of them


class Layer:
    """What vllm-ascend does between two attentions, with weights of its own; see models/deepseek_v4.py."""

    def __init__(self, draw: Callable[..., Tensor]) -> None:
        self.fn, self.scale, self.base = (w.npu() for w in (draw(24, 64), draw(3), draw(24)))
        self.gate, self.bias, self.gamma = draw(6, 16).npu(), draw(6).npu(), draw(16, dtype=BF16).npu()
        self.w13, self.w2 = draw(6, 16, 16, dtype=BF16).npu(), draw(6, 16, 8, dtype=BF16).npu()
        self.table = torch.tensor([[0, 1], [5, 2], [3, 4]], dtype=torch.int32, device="npu")

    def experts(self, x: Tensor, ids: Tensor | None) -> Tensor:
        hashed = {} if ids is None else {"input_ids": ids, "tid2eid": self.table}
        bias = self.bias if ids is None else None
        weights, experts, _ = ops().moe_gating_top_k_hash(
            x.float() @ self.gate.t(), 2, bias=bias, norm_type=2, routed_scaling_factor=1.5, **hashed
        )
        rows, row_idx, counts, _ = ops().npu_moe_init_routing_custom(
            x, experts, active_num=2 * x.shape[0], expert_num=6, expert_tokens_num_type=1, expert_tokens_num_flag=True,
            active_expert_range=[0, 6], quant_mode=-1,
        )  # fmt: skip
        hidden = torch_npu().npu_swiglu(grouped(rows, self.w13.transpose(1, 2), counts, 1))
        out = grouped(hidden, self.w2.transpose(1, 2), counts, 1)
        return torch_npu().npu_moe_token_unpermute(out, torch.abs(row_idx), probs=weights)

    def __call__(self, streams: Tensor, ids: Tensor | None) -> tuple[Tensor, ...]:
        x, post_, comb = ops().npu_hc_pre_v2(streams, self.fn, self.scale, self.base, 4, 20, 1e-6, 1e-6)
        x, _, _ = ops().npu_add_rms_norm_bias(x, x, self.gamma, None, 1e-6)
        x = self.experts(x, ids)
        out = ops().npu_hc_post(x[None], streams[None], post_[None], comb[None])[0]
        p, k = torch.full((x.shape[0],), 0.9, device="npu"), torch.full((x.shape[0],), 5, device="npu").int()
        return out, torch_npu().npu_top_k_top_p(x.float(), p=p, k=k)


@pytest.mark.parametrize("hashed", [False, True])
def test_no_operator_waits_for_its_stream(draw: Callable[..., Tensor], hashed: bool) -> None:
    layer, x = Layer(draw), draw(5, 4, 16, dtype=BF16).npu()
    ids = ints(0, 2, 1, 1, 0).npu() if hashed else None
    wanted = [value.cpu() for value in layer(x, ids)]
    stream = torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    waited = rt.calls()[1]
    rt.hang_stream(stream)
    try:
        with torch.npu.stream(stream):
            found = layer(x, ids)
    finally:
        rt.release_stream(stream)
    stream.synchronize()
    assert rt.calls()[1] == waited
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("hashed", [False, True])
def test_a_captured_layer_is_replayed_with_other_data(draw: Callable[..., Tensor], hashed: bool) -> None:
    layer, x = Layer(draw), torch.zeros(5, 4, 16, dtype=BF16, device="npu")
    ids = torch.zeros(5, dtype=torch.int32, device="npu") if hashed else None
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        out = layer(x, ids)
    for turn in range(3):
        x.copy_(draw(5, 4, 16, dtype=BF16))
        if ids is not None:
            ids.copy_(torch.arange(5).add(turn).remainder(3).int())
        graph.replay()
        torch.npu.synchronize()
        for a, b in zip(out, layer(x, ids), strict=True):
            assert torch.equal(a.cpu(), b.cpu())


def test_what_torch_compile_may_trace_has_shapes_for_any_number_of_tokens(draw: Callable[..., Tensor]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    layer = Layer(draw)

    def between(streams: Tensor) -> Tensor:
        x, post_, comb = ops().npu_hc_pre_v2(streams, layer.fn, layer.scale, layer.base, 4, 20, 1e-6, 1e-6)
        x, _, y = ops().npu_add_rms_norm_bias(x, x, layer.gamma, None, 1e-6)
        x = torch_npu().npu_swiglu(torch.cat([x, torch_npu().npu_add_rms_norm(x, y, layer.gamma)[0]], -1))
        return ops().npu_hc_post(x[None], streams[None], post_[None], comb[None])[0]

    with torch.no_grad():
        traced = make_fx(between, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
            draw(5, 4, 16, dtype=BF16).npu()
        )
    other = draw(9, 4, 16, dtype=BF16).npu()
    assert torch.equal(traced(other).cpu(), between(other).cpu())


# ---------------------------------------------------------------------------------------------- what is left out


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops().npu_gemma_rms_norm(t(2, 4), t(4)),
        lambda: ops().swap_blocks_batch(torch.ones(1), torch.ones(1), torch.ones(1), 0),  # host tensors
        lambda: ops().device_print("none at all"),
        lambda: ops().npu_hc_pre_inv_rms(torch.ones(2, 4, device="meta")),
    ],
)
def test_an_operator_that_is_left_out_says_so_by_name(call: Callable[[], Any]) -> None:
    with pytest.raises(
        NotImplementedError, match=r"^_C_ascend::\w+ of vllm-ascend 0.23.0 is left out of the software NPU"
    ):
        call()


@pytest.mark.parametrize("name", ["npu_moe_finalize_routing", "npu_moe_gating_top_k", "npu_moe_distribute_combine_v2"])
def test_an_operator_of_torch_npu_without_a_body_raises_by_name(name: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "npu_moe_finalize_routing": (t(2, 2), None, None, None, None, t(2), None),
        "npu_moe_gating_top_k": (t(2, 8), 2),
        "npu_moe_distribute_combine_v2": (*(t(2, 2) for _ in range(5)), "", 1, 0, 8),
    }
    with pytest.raises(NotImplementedError, match=f"npu::{name} has no body on the software NPU"):
        getattr(torch.ops.npu, name)(*arguments[name])


@pytest.mark.vllm_runtime
def test_the_schemas_are_those_of_the_wheel() -> None:
    spec = find_spec("vllm_ascend")
    assert spec is not None
    assert spec.origin is not None
    (binding,) = Path(spec.origin).parent.glob("vllm_ascend_C*.so")
    with binding.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        names = [str(s.name) for s in torch._C._jit_get_all_schemas() if s.name.startswith("_C_ascend::")]
        assert len(names) > 60
        unlike, missing = [], []
        for name in (n.removeprefix("_C_ascend::") for n in names):
            # A name in the binary is followed by the rest of its schema, and ends with a zero byte.
            stated = re.findall(rb"\0" + name.encode() + rb" ?(\([^\0]*->[^\0]*)\0", content)
            if not stated:
                missing.append(name)
                continue
            wanted = {str(torch._C.parse_schema(f"{name}{text.decode()}")) for text in stated}
            if str(getattr(ops(), name).default._schema).removeprefix("_C_ascend::") not in wanted:
                unlike.append(name)
    assert (unlike, missing) == ([], [])
