# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Token parity of the tiny DeepSeek-V4: the comparison accepts right rows, and only those."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.evidence.token_model import LAYER_TYPES, build_model, model_config, text_tokens
from afd_dsv4.evidence.tokens import CHUNK_SIZES, TokenReport, _failures, rounding_tolerance, run_token_parity
from afd_dsv4.geometry import CompressorKind

# The second request meets its 128th token while generating.
WORKLOAD = {"hidden_size": 256, "prompt_tokens": (301, 125), "generated": 12, "controls": False}


class DenseRuntime:
    """Remembers every token and works each window out from the formulas, in float64, one row at a time.

    `fault` plants: "forget" (only the running chunk is known), "left" (a C4 window never sees the one before it),
    "phase" (APE counts from the start of the chunk).
    """

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.inputs: dict[tuple[str, int, CompressorKind], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def begin(self, chunks, *, generation=None, ubatch=0):
        self.chunks = chunks
        return self

    def finish(self):
        pass

    def end_request(self, request):
        for key in [key for key in self.inputs if key[0] == request]:
            del self.inputs[key]

    def compress(self, layer, kind, x, weights: CompressorWeights, rope_cos, rope_sin, cu_seqlens):
        wkv, wgate, ape, norm = (t.double() for t in (weights.wkv, weights.wgate, weights.ape, weights.norm_weight))
        dim, ratio = len(norm), kind.ratio
        out = torch.full((len(rope_cos), dim), float("nan"))
        packed = 0
        for index, chunk in enumerate(self.chunks):
            known = self.inputs[chunk.request, layer, kind]
            tokens = x[cu_seqlens[index] : cu_seqlens[index + 1]].double()
            known.extend(zip(tokens @ wkv.T, tokens @ wgate.T, strict=True))
            assert len(known) == chunk.end
            first = chunk.start if self.fault == "forget" else 0
            phase = chunk.start if self.fault == "phase" else 0
            for window in range(chunk.start // ratio, chunk.end // ratio):
                values, scores = [], []
                for position in range(window * ratio, (window + 1) * ratio):
                    halves = [(position, slice(0, dim))]
                    if kind.overlap:
                        halves = [(position, slice(dim, 2 * dim))]
                        if self.fault != "left":
                            halves.append((position - ratio, slice(0, dim)))
                    for place, half in halves:
                        if place >= first:
                            values.append(known[place][0][half])
                            scores.append((known[place][1] + ape[(place - phase) % ratio])[half])
                if not values:
                    values, scores = [torch.zeros(dim).double()], [torch.zeros(dim).double()]
                pooled = (torch.stack(scores).softmax(0) * torch.stack(values)).sum(0)
                row = pooled / (pooled.square().mean() + weights.norm_eps).sqrt() * norm
                cos, sin = rope_cos[packed].double(), rope_sin[packed].double()
                even, odd = row[-64::2].clone(), row[-63::2].clone()
                row[-64::2] = even * cos[::2] - odd * sin[::2]
                row[-63::2] = odd * cos[1::2] + even * sin[1::2]
                out[packed] = row.float()
                packed += 1
        return out


def parity(fault: str = "", seed: int = 0) -> TokenReport:
    return run_token_parity("cpu", seed, make_runtime=lambda _geometry: DenseRuntime(fault), **WORKLOAD)


@pytest.fixture(scope="module")
def right() -> TokenReport:
    return parity()


def test_the_formulas_generate_the_tokens_of_transformers(right: TokenReport) -> None:
    report = right
    assert report.failures == ()
    assert report.passed
    assert report.free_running.mismatches == report.teacher_forced.mismatches == report.prompts.mismatches == 0
    assert report.free_running.positions == report.generated_positions == 2 * 12
    assert report.teacher_forced.positions == 301 + 125 + 2 * 11
    # Two C4 layers with two compressors each, one C128 layer.
    assert report.compressed_rows == 4 * (312 // 4 + 136 // 4) + 312 // 128 + 136 // 128
    assert set(CHUNK_SIZES) <= set(report.chunk_sizes)
    assert report.max_row_difference < report.tolerance


@pytest.mark.parametrize("fault", ["forget", "left", "phase"])
def test_a_compressor_with_a_fault_is_told_from_a_right_one(fault: str) -> None:
    report = parity(fault)
    assert not report.passed
    assert report.teacher_forced.mismatches > 0
    assert report.teacher_forced.max_difference > 10 * report.tolerance


def test_rows_that_are_not_numbers_fail_instead_of_vanishing_in_a_maximum() -> None:
    class Poisoned(DenseRuntime):
        def compress(self, *arguments):
            return super().compress(*arguments) * float("nan")

    report = run_token_parity("cpu", make_runtime=lambda _geometry: Poisoned(), **WORKLOAD)
    assert report.teacher_forced.max_difference == float("inf")
    assert report.max_row_difference == float("inf")
    assert not report.passed


def test_rows_of_another_dtype_are_refused_with_the_option_to_set() -> None:
    class Rounded(DenseRuntime):
        def compress(self, *arguments):
            return super().compress(*arguments).bfloat16()

    with pytest.raises(RuntimeError, match="FP32 option"):
        run_token_parity("cpu", make_runtime=lambda _geometry: Rounded(), **WORKLOAD)


def test_the_model_has_every_kind_of_layer_and_the_sizes_of_the_released_models() -> None:
    geometry = build_model(3).geometry
    geometry.check_stock_operator()
    assert list(LAYER_TYPES) == [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ]
    assert geometry.compress_ratios == (0, 4, 128, 4)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    def first(seed: int) -> torch.Tensor:
        return build_model(seed, hidden_size=64).weights[1, CompressorKind.C4].wkv

    assert torch.equal(first(5), first(5))
    assert not torch.equal(first(5), first(6))


def test_the_text_is_the_essay_in_heapq_and_starts_again_at_its_end() -> None:
    essay = heapq.__about__.encode()
    assert bytes(text_tokens(10, 0)) == essay[:10] == b"Heap queue"
    assert bytes(text_tokens(20, len(essay) - 7)) == essay[-7:] + essay[:13]
    assert bytes(text_tokens(len(essay) + 1, 0)) == essay + essay[:1]
    assert bytes(text_tokens(9, 3 * len(essay) + 5)) == essay[5:14]


def test_the_tolerance_is_fixed_by_sizes_and_grows_with_them() -> None:
    small, large = rounding_tolerance(model_config(256)), rounding_tolerance(model_config(1024))
    assert 1e-5 < small < large < 1e-3


def test_a_device_whose_operator_takes_no_fp32_is_refused_with_the_remedy() -> None:
    if hasattr(torch.ops.softnpu, "waive"):
        pytest.skip("no such case: the software NPU takes FP32")
    with pytest.raises(RuntimeError, match=r"afd_dsv4\.softnpu"):
        run_token_parity("cpu")


def test_a_share_of_undecided_positions_or_a_missing_chunk_size_is_a_failure(right: TokenReport) -> None:
    report = right
    thin = replace(report.free_running, decided=20)
    assert any("95%" in line for line in _failures(replace(report, free_running=thin), row_tolerance=1e-3))
    assert any("[129]" in line for line in _failures(replace(report, chunk_sizes=CHUNK_SIZES[:-1]), row_tolerance=1e-3))
