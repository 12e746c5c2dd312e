# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vLLM's Triton kernels on the software NPU: the launch, and what each body computes, written out the long way."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("afd_dsv4.softnpu.triton")

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime]

PAD, BLOCK = -1, 4
TABLE = [[3, 7, 9], [5, 2, 8]]


@pytest.fixture(scope="module")
def slot_kernel() -> Any:
    from vllm.v1.worker.block_table import _compute_slot_mapping_kernel

    assert isinstance(_compute_slot_mapping_kernel, triton.Kernel), "the launcher has not replaced triton.jit"
    return _compute_slot_mapping_kernel


def launch(kernel: Any, starts: list[int], positions: list[int], ranks: int = 1, rank: int = 0) -> Any:
    slots = torch.full((12,), 99, dtype=torch.int32).npu()
    table = torch.tensor(TABLE, dtype=torch.int32).npu()
    kernel[(len(starts),)](
        len(positions), 12, torch.tensor(starts, dtype=torch.int32).npu(), torch.tensor(positions).npu(), table,
        table.stride(0), BLOCK, slots, TOTAL_CP_WORLD_SIZE=ranks, TOTAL_CP_RANK=rank, CP_KV_CACHE_INTERLEAVE_SIZE=1,
        PAD_ID=PAD, BLOCK_SIZE=1024,
    )  # fmt: skip
    return slots


def test_slots_follow_the_table_and_the_rest_is_padding(slot_kernel: Any) -> None:
    positions = [5, 6, 0, 11]
    slots = launch(slot_kernel, [0, 2, 4], positions).tolist()
    rows = [0, 0, 1, 1]
    wanted = [TABLE[row][p // BLOCK] * BLOCK + p % BLOCK for row, p in zip(rows, positions, strict=True)]
    assert slots == wanted + [PAD] * 8


def test_tokens_of_no_request_keep_what_was_there(slot_kernel: Any) -> None:
    slots = launch(slot_kernel, [0, 1], [2, 3, 4]).tolist()
    assert slots == [3 * BLOCK + 2, 99, 99] + [PAD] * 9


def test_a_position_behind_its_row_of_the_table_gives_a_slot_that_no_pool_has(slot_kernel: Any) -> None:
    slots = launch(slot_kernel, [0, 1, 2], [12, 0]).tolist()
    assert slots[:2] == [triton.POISON, TABLE[1][0] * BLOCK]


def test_another_rank_of_a_context_gets_padding(slot_kernel: Any) -> None:
    positions = list(range(6))
    for rank in (0, 1):
        slots = launch(slot_kernel, [0, 6], positions, ranks=2, rank=rank).tolist()
        wanted = [
            TABLE[0][p // (2 * BLOCK)] * BLOCK + p % (2 * BLOCK) // 2 if p % 2 == rank else PAD for p in positions
        ]
        assert slots == wanted + [PAD] * 6


def test_a_launch_is_captured_and_reads_its_arguments_at_replay(slot_kernel: Any) -> None:
    positions = torch.tensor([1, 2]).npu()
    starts = torch.tensor([0, 2], dtype=torch.int32).npu()
    table = torch.tensor(TABLE, dtype=torch.int32).npu()
    slots = torch.zeros(2, dtype=torch.int32).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        slot_kernel[(2,)](2, 2, starts, positions, table, 3, BLOCK, slots, 1, 0, 1, PAD, 1024)
    positions.copy_(torch.tensor([4, 9]))
    graph.replay()
    assert slots.tolist() == [7 * BLOCK, 9 * BLOCK + 1]


def test_muls_add_rounds_once() -> None:
    from vllm_ascend.ops.triton.mul_add import muls_add_triton

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    found = muls_add_triton(x.npu(), y.npu(), 1.5).cpu()
    once = (x.double() * 1.5 + y.double()).float().to(torch.bfloat16)
    twice = x * 1.5 + y
    assert torch.equal(found, once)
    assert not torch.equal(twice, once), "the inputs tell the two apart"


def test_a_kernel_without_a_body_raises_by_name() -> None:
    @triton.jit(do_not_specialize=["n"])
    def unheard_of(x: Any, n: int) -> None: ...

    with pytest.raises(NotImplementedError, match=r"test_softnpu_triton:.*unheard_of has no body"):
        unheard_of[(1,)](None, n=3, num_warps=4)


def test_a_kernel_has_one_body() -> None:
    with pytest.raises(ValueError, match="muls_add_kernel has a body already"):
        triton.body("vllm_ascend.ops.triton.mul_add:muls_add_kernel")(lambda grid, arguments: None)


def test_a_real_triton_is_refused() -> None:
    class Utils:
        HAS_TRITON = True

    with pytest.raises(RuntimeError, match="found a real Triton"):
        triton.install(Utils)  # type: ignore[arg-type]
