# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""torch.ops.afd_dsv4: what is refused before anything is queued, what meta tensors say, what a bad table becomes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from afd_dsv4.compressor.afd import load
from afd_dsv4.compressor.library import find

pytestmark = pytest.mark.npu

RATIO, COFF, DIM, PAGES, PAGE_ROWS, REQUESTS, TOKENS = 4, 2, 512, 6, 8, 2, 20
ROWS = min(TOKENS, TOKENS // RATIO + REQUESTS)
WIDTH = 2 * COFF * DIM


@pytest.fixture(scope="module")
def ops() -> Any:
    library = find(os.environ)
    return load(library.folder, library.backend)


def arguments(device: str = "npu") -> dict[str, Any]:
    """Of a launch of two requests with 11 and 9 tokens from position 0; the tail of each in a page of its own."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TOKENS, WIDTH, generator=generator)
    return {
        "rows": rows.to(device),
        "pool": torch.zeros(PAGES, PAGE_ROWS, WIDTH, device=device),
        "ape": torch.randn(RATIO, WIDTH // 2, generator=generator).to(device),
        "norm_weight": torch.ones(DIM, dtype=torch.bfloat16, device=device),
        "cos": torch.ones(ROWS, 64, device=device),
        "sin": torch.zeros(ROWS, 64, device=device),
        "cu_seqlens": ints(0, 11, 20),
        "starts": ints(0, 0),
        "table": ints(0, 1, 0, 2).view(2, 2),
        "out": torch.zeros(ROWS, DIM, device=device),
        "workspace": torch.zeros(8192, dtype=torch.uint8, device=device),
        "ratio": RATIO,
        "coff": COFF,
        "norm_eps": 1e-6,
        "list_ids": 2,
        "carry": 0,
        "first_token": 0,
        "tokens": TOKENS,
        "launch_tokens": TOKENS,
        "blocks": 3,
    }


NOT_OF = {
    "compress": {"list_ids"},
    "tail_update": {"norm_weight", "cos", "sin", "out", "norm_eps"},
}


def call(ops: Any, name: str, given: dict[str, Any]) -> None:
    getattr(ops, name)(**{key: value for key, value in given.items() if key not in NOT_OF[name]})


def test_a_launch_gives_rows_and_tails_and_says_which_tensors_it_writes(ops: Any) -> None:
    given = arguments()
    before = {key: value.cpu() for key, value in given.items() if isinstance(value, torch.Tensor)}
    for name in NOT_OF:
        call(ops, name, given)
    torch.npu.synchronize()
    written = {key for key, value in before.items() if not torch.equal(value, given[key].cpu())}
    assert written == {"out", "pool"}  # the workspace has no fault to tell
    declared = {
        argument.name
        for name in NOT_OF
        for argument in getattr(ops, name).default._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    assert declared == {"out", "pool", "workspace"}
    tail = given["pool"][1].cpu()
    assert torch.equal(tail[:3, : WIDTH // 2], before["rows"][8:11, : WIDTH // 2])
    assert torch.equal(tail[:3, WIDTH // 2 :], before["rows"][8:11, WIDTH // 2 :] + before["ape"][:3])
    assert not tail[3:].any()


#: Operator, argument, what is given instead, what the error says of it.
WRONG = {
    "rows too short": (
        "compress",
        "rows",
        torch.zeros(19, WIDTH),
        "rows: found 19, expected at least carry + tokens, 20",
    ),
    "rows of another type": (
        "compress",
        "rows",
        torch.zeros(20, WIDTH).half(),
        "rows: found Half, expected Float or BF",
    ),
    "pages of other rows": ("compress", "pool", torch.zeros(6, 8, 1024), "pool: found [6, 8, 1024], expected pages of"),
    "another ape": ("tail_update", "ape", torch.zeros(4, 512), "ape: found [4, 512], expected [4, 1024]"),
    "lengths of 64 bits": ("compress", "cu_seqlens", torch.zeros(3).long(), "cu_seqlens: found Long, expected Int"),
    "too few starts": ("tail_update", "starts", torch.zeros(1).int(), "starts: found [1], expected [2]"),
    "angles of bf16": ("compress", "cos", torch.ones(ROWS, 64).bfloat16(), "cos: found BFloat16, expected Float"),
    "fewer angles": (
        "compress",
        "sin",
        torch.ones(ROWS - 1, 64),
        f"sin: found [{ROWS - 1}, 64], expected [{ROWS}, 64]",
    ),
    "half a workspace": (
        "compress",
        "workspace",
        torch.zeros(4096).byte(),
        "workspace: found 4096, expected at least 8192",
    ),
    "a small workspace": (
        "tail_update",
        "workspace",
        torch.zeros(8).byte(),
        "workspace: found 8, expected at least 8192",
    ),
    "ratio 1": ("compress", "ratio", 1, "found [4, 1024], expected [1, 1024]"),
    "no blocks": ("tail_update", "blocks", 0, "blocks: found 0, expected 1 to 128"),
    "carry without a tile before": ("compress", "carry", 4, "carry: found 4, expected at most first_token 0"),
    "a tile behind the end": ("compress", "first_token", 1, "launch_tokens: found 20, expected at least first_token"),
    "no list": ("tail_update", "list_ids", 0, "list_ids: found 0, expected 1"),
}


@pytest.mark.parametrize("device", ["npu", "meta"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_refused_on_the_device_and_on_meta_tensors_with_what_was_found(
    ops: Any, case: str, device: str
) -> None:
    name, argument, value, says = WRONG[case]
    given = arguments(device)
    given[argument] = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises(RuntimeError) as caught:
        call(ops, name, given)
    assert f"afd_dsv4::{name}: " in str(caught.value)
    assert says in str(caught.value)


def test_ratios_of_v4_1_are_refused_with_their_reason(ops: Any) -> None:
    given = arguments("meta") | {"ratio": 2, "coff": 1}
    given["ape"] = torch.zeros(2, WIDTH // 2, device="meta")
    given["out"] = torch.zeros(ROWS, WIDTH // 2, device="meta")
    given["norm_weight"] = torch.zeros(WIDTH // 2, device="meta")
    for name in NOT_OF:
        with pytest.raises(RuntimeError, match=f"afd_dsv4::{name}: .*2"):
            call(ops, name, given)


def test_another_device_is_refused_by_name(ops: Any) -> None:
    with pytest.raises(RuntimeError, match="table: found cpu, expected npu"):
        call(ops, "compress", arguments() | {"table": torch.zeros(2, 2, dtype=torch.int32)})


def test_meta_tensors_pass_where_a_launch_would_and_nothing_is_queued(ops: Any) -> None:
    queued = torch.ops.softnpu.calls()
    for name in NOT_OF:
        call(ops, name, arguments("meta"))
    x, w = torch.empty(3, 32, device="meta"), torch.empty(8, 32, device="meta")
    assert ops.project(x, w, w, torch.empty(3, 16, device="meta")) is None
    assert torch.ops.softnpu.calls() == queued
    with pytest.raises(RuntimeError, match=r"afd_dsv4::project: rows: found \[3, 15\], expected \[3, 16\]"):
        ops.project(x, w, w, torch.empty(3, 15, device="meta"))


@pytest.mark.parametrize(
    ("argument", "values", "says"),
    [
        ("table", [[0, 1], [0, PAGES]], "page"),
        ("cu_seqlens", [0, 11, 9], "cu_seqlens"),
        ("starts", [-1, 0], "start"),
    ],
)
def test_a_bad_table_is_an_error_of_the_device_at_the_next_synchronisation(
    ops: Any, argument: str, values: list[Any], says: str
) -> None:
    given = arguments()
    given[argument] = torch.tensor(values, dtype=torch.int32).npu()
    call(ops, "tail_update", given)
    with pytest.raises(RuntimeError, match=rf"a task failed: .*tail_update: .*{says}"):
        torch.npu.synchronize()
    assert not given["pool"][PAGES - 1].cpu().any()


def test_a_project_adds_as_the_stock_operator_does_into_rows_of_any_distance(ops: Any) -> None:
    from afd_dsv4.compressor import reference

    generator = torch.Generator().manual_seed(1)
    x, wkv, wgate = (torch.randn(n, 32, generator=generator).bfloat16() for n in (401, 24, 24))
    rows = torch.zeros(402, 64).npu()[1:, :48]
    ops.project(x.npu(), wkv.npu(), wgate.npu(), rows)
    want = [reference.project(x.float().numpy(), w.float().numpy()) for w in (wkv, wgate)]
    assert torch.equal(rows.cpu(), torch.cat([torch.from_numpy(half) for half in want], 1))
