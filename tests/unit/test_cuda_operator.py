# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The stock operator's contract as a CUDA device gets it, in its plain form on the CPU; the kernels need the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.evidence.cuda import definition, operator, plain
from afd_dsv4.geometry import CompressorKind

CPU = torch.device("cpu")
RATIO, DIM, PAGE_ROWS = 4, 8, 4
UNWRITTEN = 7.0


@dataclass
class Launch:
    """A launch of an overlap compressor over rows of ones, whose score says nothing, with one request per start."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    table: list[list[int]]
    pages: int = 9
    behind: int = 2  # tokens that belong to nobody
    rows: torch.Tensor = field(init=False)
    state: torch.Tensor = field(init=False)
    ape: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rows = torch.zeros(sum(self.lengths) + self.behind, 4 * DIM)
        self.rows[:, : 2 * DIM] = 1 + torch.arange(len(self.rows))[:, None]
        self.state = torch.full((self.pages, PAGE_ROWS, 4 * DIM), -1.0)
        self.ape = torch.zeros(RATIO, 2 * DIM)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        cu = torch.tensor([0, *self.lengths]).cumsum(0).int()
        return self.rows, self.ape, self.state, torch.tensor(self.table).int(), torch.tensor(self.starts).int(), cu

    def compress(self) -> torch.Tensor:
        count = min(len(self.rows), len(self.rows) // RATIO + len(self.lengths))
        cos, sin = torch.ones(count, 2), torch.zeros(count, 2)
        out = torch.full((count, DIM), UNWRITTEN)
        plain.compress(*self.arguments, torch.ones(DIM), cos, sin, 0.0, out)
        return out


@pytest.mark.parametrize("kind", list(CompressorKind))
def test_chunks_give_the_rows_of_the_definition_but_for_one_step_of_bfloat16_here_and_there(
    kind: CompressorKind,
) -> None:
    found = definition.distance(kind, CPU, (5, 130, 1, 2, 1, 117), hidden=32)
    assert found.values == 256 // kind.ratio * definition.SPECS[kind].head_dim
    assert found.ulps <= 1
    assert found.off < found.values / 1000


def test_a_row_that_is_lost_from_history_is_far_from_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    save = plain.save

    def forgets(rows: torch.Tensor, *rest: Any) -> None:
        save(torch.zeros_like(rows), *rest)

    monkeypatch.setattr(plain, "save", forgets)
    found = definition.distance(CompressorKind.C4, CPU, (5, 30), hidden=32)
    assert found.ulps > 10
    assert found.off > 500


def test_the_distance_counts_steps_across_zero_and_takes_nan_for_far() -> None:
    tiny = torch.tensor([1], dtype=torch.int16).view(torch.bfloat16)
    ours = torch.cat([tiny, tiny, torch.tensor([1.0, 1.0, float("nan"), float("nan")]).bfloat16()])
    wanted = torch.cat([-tiny, tiny, torch.tensor([1.0, 1.0078125, float("nan"), 1.0]).bfloat16()])
    assert definition.ulps(ours, wanted).tolist() == [2, 0, 0, 1, 0, 1 << 20]


def test_rows_are_saved_to_mapped_pages_and_nowhere_else() -> None:
    # Positions 2 to 6, pages of 4 rows: 2 and 3 are not mapped, 4 to 6 lie in page 5.
    launch = Launch((5,), (2,), [[0, 5]])
    before = launch.state.clone()
    plain.save(*launch.arguments)
    assert torch.equal(launch.state[5, :3], launch.rows[2:5])
    launch.state[5, :3] = before[5, :3]
    assert torch.equal(launch.state, before)


@pytest.mark.parametrize("page", [-3, 9, 1000])
def test_a_page_outside_the_pool_is_not_written_and_makes_a_window_that_reads_it_nan(page: int) -> None:
    launch = Launch((4,), (4,), [[page, page]])
    before = launch.state.clone()
    plain.save(*launch.arguments)
    assert torch.equal(launch.state, before)
    assert launch.compress()[0].isnan().all()


def test_columns_that_the_table_does_not_have_are_neither_written_nor_read() -> None:
    launch = Launch((5,), (4,), [[3]])
    before = launch.state.clone()
    plain.save(*launch.arguments)
    assert torch.equal(launch.state, before)
    assert not launch.compress()[0].isnan().any()  # its history is in column 0, and the rest is fresh


def test_ape_is_added_to_the_score_of_what_is_saved_by_its_place_in_the_window() -> None:
    launch = Launch((2,), (5,), [[0, 2]])
    launch.ape[:] = torch.arange(4.0)[:, None]
    plain.save(*launch.arguments)
    assert launch.state[2, 1, 2 * DIM :].tolist() == [1.0] * 2 * DIM
    assert launch.state[2, 2, 2 * DIM :].tolist() == [2.0] * 2 * DIM
    assert launch.state[2, 2, 0] == launch.rows[1, 0]


def test_rows_are_packed_by_request_and_those_behind_the_last_window_are_left_alone() -> None:
    # Windows end at 4 and 8 of the first request, in none of the second and the empty third, and at 8 of the last.
    launch = Launch((8, 3, 0, 1), (0, 0, 5, 7), [[0, 0], [0, 0], [0, 0], [1, 2]])
    out = launch.compress()
    assert (out != UNWRITTEN).all(1).tolist() == [True, True, True, False, False, False, False]


def arguments(**changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "x": torch.ones(4, 16).bfloat16(),
        "wkv": torch.ones(2 * DIM, 16).bfloat16(),
        "wgate": torch.ones(2 * DIM, 16).bfloat16(),
        "state_cache": torch.zeros(3, PAGE_ROWS, 4 * DIM),
        "ape": torch.zeros(RATIO, 2 * DIM),
        "norm_weight": torch.ones(DIM).bfloat16(),
        "rope_sin": torch.zeros(2, 2),
        "rope_cos": torch.ones(2, 2),
        "state_block_table": torch.tensor([[1]], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
        "seqused": None,
        "start_pos": None,
        "rope_head_dim": 2,
        "cmp_ratio": RATIO,
        "coff": 2,
        "norm_eps": 1e-6,
        "rotary_mode": 2,
        "cache_mode": 1,
    }
    return {**given, **changed}


def test_every_save_comes_before_any_read_as_in_the_worst_order_of_the_stock_operator() -> None:
    # Page 1 is history of positions 0 to 3, and what positions 4 to 7 are saved to: rule 3 of the tables is broken.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, generator=generator).bfloat16()
    weight = torch.randn(2 * DIM, 16, generator=generator).bfloat16()
    state = torch.randn(3, PAGE_ROWS, 4 * DIM, generator=generator)
    resumed = {"x": x, "wkv": weight, "wgate": weight, "start_pos": torch.tensor([4]).int()}

    def rows(history: int, state: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([[history, 1]]).int()
        return operator.compressor(**arguments(state_block_table=table, state_cache=state, **resumed))[:1]

    apart, together = state.clone(), state.clone()
    kept = rows(2, apart)
    broken = rows(1, together)
    assert not torch.equal(kept, broken)
    apart[2] = apart[1]  # as if positions 4 to 7 had been history
    assert torch.equal(rows(2, apart), broken)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"cache_mode": 2}, "cache_mode 2"),
        ({"rotary_mode": 1}, "rotary_mode 1"),
        ({"seqused": torch.zeros(1)}, "seqused"),
        ({"coff": 1}, "coff"),
        ({"cmp_ratio": 8}, "cmp_ratio"),
        ({"state_cache": torch.zeros(3, 4 * DIM, PAGE_ROWS).mT}, "must adjoin"),
    ],
)
def test_what_is_not_in_the_contract_is_refused_by_name(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        operator.compressor(**arguments(**changed))


def test_without_tokens_nothing_is_done_and_a_padded_page_stride_is_taken() -> None:
    empty = {"x": torch.ones(0, 16).bfloat16(), "rope_cos": torch.ones(0, 2), "rope_sin": torch.ones(0, 2)}
    assert operator.compressor(**arguments(**empty)).shape == (0, DIM)
    padded = torch.zeros(3, PAGE_ROWS * 4 * DIM + 5)[:, : PAGE_ROWS * 4 * DIM].unflatten(1, (PAGE_ROWS, 4 * DIM))
    out = operator.compressor(**arguments(state_cache=padded))
    assert out.dtype == torch.bfloat16
    assert (padded[1, :, 0] == 16.0).all()  # sixteen products of ones


def test_metadata_names_the_rope_row_and_the_place_of_every_window() -> None:
    cos, sin = torch.arange(40.0)[:, None].expand(-1, 2), -torch.arange(40.0)[:, None].expand(-1, 2)
    cu, starts = torch.tensor([0, 9, 12]).int(), torch.tensor([3, 30]).int()
    table = torch.tensor([[5, 6], [7, 8]]).int()
    got_cos, got_sin, slots = operator.compressor_metadata(
        cos.contiguous(), sin.contiguous(), cu, starts, table, 2, operator.PAIRS, 4, 5, 2
    )
    # Request 0 covers 3 to 11: windows 0, 1, 2. Request 1 covers 30 to 32: window 7, whose block is not in the table.
    assert got_cos[:, 0].tolist() == [0.0, 4.0, 8.0, 1.0, 1.0]
    assert got_sin[:, 0].tolist() == [0.0, -4.0, -8.0, 0.0, 0.0]
    assert slots.tolist() == [[5, 0], [5, 1], [6, 0], [-1, 1], [-1, 1]]
    with pytest.raises(ValueError, match="slot_mapping_format 1"):
        operator.compressor_metadata(cos, sin, cu, starts, table, 2, 1, 4, 5, 2)


def test_the_runtime_calls_it_as_it_calls_the_stock_operator() -> None:
    given = arguments()
    weights = CompressorWeights(given["wkv"], given["wgate"], given["ape"], given["norm_weight"], 1e-6, 2)
    there = (given["state_block_table"], torch.zeros(1, dtype=torch.int32), given["cu_seqlens"])
    out = operator.call(
        given["x"], weights, CompressorKind.C4, given["state_cache"], *there, given["rope_cos"], given["rope_sin"]
    )
    assert torch.equal(out[:1], operator.compressor(**arguments())[:1])


@pytest.mark.device
def test_the_kernels_do_what_the_plain_form_does() -> None:
    from afd_dsv4.evidence.cuda import kernels

    generator = torch.Generator().manual_seed(0)
    for ratio, coff, dim, page_rows in ((4, 2, 512, 8), (4, 2, 128, 8), (128, 1, 512, 32)):
        lengths, starts, half = (150, 0, 7, 300), (2, 3, 0, 127), coff * dim
        rows = torch.randn(sum(lengths) + 2, 2 * half, generator=generator)
        ape = torch.randn(ratio, half, generator=generator)
        columns = 427 // page_rows + 1
        pages = 4 * columns + 1
        state = torch.randn(pages, page_rows, 2 * half, generator=generator)
        table = (1 + torch.randperm(pages - 1, generator=generator)).view(4, columns).int()
        table[torch.rand(4, columns, generator=generator) < 0.3] = 0
        table[0, 0] = pages + 3
        cu, begin = torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor(starts).int()
        count = min(len(rows), len(rows) // ratio + 4)
        turn = torch.rand(count, 32, generator=generator).repeat_interleave(2, 1)
        finish = (torch.ones(dim).bfloat16(), turn.cos().bfloat16(), turn.sin().bfloat16())
        results = []
        for module, device in ((plain, "cpu"), (kernels, "cuda")):
            there = [t.clone().to(device) for t in (rows, ape, state, table, begin, cu)]
            out = torch.full((count, dim), UNWRITTEN, device=device)
            module.save(*there)
            module.compress(*there, *(t.to(device) for t in finish), 1e-6, out)
            results.append((there[2].cpu(), out.cpu()))
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True, rtol=1e-4, atol=1e-5)
