# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Prefix hits that never come; `tests/integration/test_prefix_hits.py` holds the figures to the real managers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.doctor import prefix
from afd_dsv4.doctor.case import Case
from afd_dsv4.doctor.facts import Finding, Server, Severity
from afd_dsv4.geometry import page_layout, preset
from tests.doctor.cases import HERE, run


def findings_of(block_size: int, *, drops: bool = False, prompt: int | None = None, **said: Any) -> list[Finding]:
    layout = page_layout("vllm-ascend-0.23.0", block_size)
    server = Server(block_size=block_size, **{"queries": 9, "hits": 0} | said)
    return list(prefix.findings(Case(server, preset("flash"), layout, prompt=prompt, drops=drops)))


@pytest.mark.parametrize(
    ("block_size", "drops", "least"),
    [
        (128, False, math.lcm(4 * 128, 128 * 128, 128, 8, 32)),
        (32, False, 4_096),  # vllm-project/vllm-ascend#16270
        (128, True, 128 * 129),  # measured by a user in vllm-project/vllm-ascend#14479
        (64, True, 8_192 + 64),
        (32, True, 4_096 + 32),
    ],
)
def test_a_prompt_of_one_token_more_than_must_be_shared_is_not_blamed_on_its_length(
    block_size: int, drops: bool, least: int
) -> None:
    for average in ("mean_prompt", "prompt"):
        (short,) = findings_of(block_size, drops=drops, **{average: least})
        (long,) = findings_of(block_size, drops=drops, **{average: least + 1})
        assert (short.code, short.severity) == ("prefix-hits-zero", Severity.PROBLEM)
        assert (long.code, long.severity) == ("no-prefix-hits", Severity.NOTE)
        assert (long.numbers["least_shared"], long.numbers["multiple"]) == (least, 128 * block_size)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("block_size", [128, 64, 32])
def test_what_is_offered_is_what_hits(block_size: int, drops: bool) -> None:
    (found,) = findings_of(block_size, drops=drops, mean_prompt=100.0)
    *smaller, longer = found.remedies
    shared = int(longer.removeprefix("prompts that share more than ").partition(" ")[0].replace(",", ""))
    for tokens, code in ((shared, "prefix-hits-zero"), (shared + 1, "no-prefix-hits")):
        assert [one.code for one in findings_of(block_size, drops=drops, mean_prompt=tokens)] == [code]
    assert bool(smaller) is (block_size > 32)
    for remedy in smaller:
        needed = int(remedy.removeprefix("--block-size 32, with which a hit needs ").replace(",", ""))
        for tokens, code in ((needed, "prefix-hits-zero"), (needed + 1, "no-prefix-hits")):
            assert [one.code for one in findings_of(32, drops=drops, mean_prompt=tokens)] == [code]


def test_of_drafts_it_is_said_what_they_cost_and_what_they_cost_before() -> None:
    assert not any("drafts" in line for line in findings_of(128, mean_prompt=100.0)[0].why)
    (said,) = [line for line in findings_of(128, drops=True, mean_prompt=100.0)[0].why if "drafts" in line]
    assert "128 more than the multiple" in said
    assert "before 0.23.0, vllm-project/vllm-ascend#10710 says that a hit needed 32,768" in said


@pytest.mark.parametrize(
    "numbers", [{"hits": 1}, {"queries": 0}, {"hits": None}, {"queries": None}, {"prefix_caching": False}]
)
def test_where_it_hits_or_nobody_asks_nothing_is_said(numbers: dict[str, Any]) -> None:
    assert findings_of(128, mean_prompt=100.0, **numbers) == []


@pytest.mark.parametrize(
    ("options", "drops"),
    [
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, True),
        ({"speculative_config": '{"method": "deepseek_mtp"}'}, True),
        ({"speculative_config": {"method": "eagle3"}}, True),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
        ({"speculative_config": {"num_speculative_tokens": 3}, "spec_method": "mtp"}, True),
        ({"spec_method": "mtp"}, True),
        ({"speculative_config": "{"}, False),
        ({"speculative_config": "[" * 100_000}, False),
        ({"speculative_config": {"method": 3}}, False),
        ({"speculative_config": None}, False),
        ({}, False),
    ],
)
def test_only_drafts_that_read_hidden_states_drop_a_block(options: dict[str, Any], drops: bool) -> None:
    """`use_eagle` of vllm/config/speculative.py."""
    assert prefix.drops_a_block(options) is drops


@pytest.mark.parametrize("source", ["config", "log"])
def test_the_drafts_of_a_server_are_read_from_its_options(source: str, tmp_path: Path) -> None:
    drafting = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    (tmp_path / "config").write_text(json.dumps(drafting))
    args = {"model": "x", **drafting}
    (tmp_path / "log").write_text(f"INFO 11-30 09:12:04 [utils.py:233] non-default args: {args}\n")
    page = (HERE / "short_prompts.metrics").read_bytes()
    needed = []
    for given in ([], [f"--{source}", str(tmp_path / source)]):
        done = run(tmp_path / "none", ["--metrics", "-", *given, "--json"], {}, page)
        (found,) = [one for one in json.loads(done.stdout)["findings"] if one["code"] == "prefix-hits-zero"]
        needed.append(found["numbers"]["least_shared"])
    assert needed == [4_096, 4_096 + 32]
