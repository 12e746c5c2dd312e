# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the doctor offers is typed back into it, as an operator would: it helps, and one less does not.

Every remedy of a start and of a prompt must be one of those here: one that nobody feeds back fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from afd_dsv4.admission import GIB
from afd_dsv4.doctor import Given, Report, diagnose
from afd_dsv4.doctor.facts import Engine, Finding, Server
from afd_dsv4.doctor.machine import Machine
from afd_dsv4.geometry import preset

N, G = r"([0-9][0-9,]*)", r"([0-9]+\.[0-9]{2})"
BLOCK = 22 * (131_072 + 16_640)  # bytes of Flash, natively and with the plugin: 22 layers in the widest group
#: One case more or less, and whether it must help.
Tries = Iterator[tuple[Given, bool]]


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afd_dsv4.doctor.machine.survey", lambda _: Machine(None, None, None, (), {}))


def ask(given: Given) -> Report:
    report = diagnose(given, {}, preset)
    assert report.errors == ()
    return report


def problem(given: Given, code: str) -> Finding | None:
    return next((found for found in ask(given).findings if found.code == code), None)


def having(given: Given, **numbers: Any) -> Given:
    return replace(given, server=replace(given.server, **numbers))


def memory(given: Given, **numbers: Any) -> Given:
    """The same with another memory, told in another way."""
    return replace(having(given, **{"num_blocks": None, "kv_gib": None} | numbers), hbm_gib=None)


def whole(text: str) -> int:
    return int(text.replace(",", ""))


def hundredth_less(gib: str) -> float:
    return (int(gib.replace(".", "")) - 1) / 100


# What a remedy says, and what an operator makes of it.
def smaller_batch(given: Given, _: Finding, tokens: str) -> Tries:
    yield having(given, max_num_batched_tokens=whole(tokens)), True
    yield having(given, max_num_batched_tokens=whole(tokens) + 1), False


def apart(given: Given, _: Finding, blocks: str) -> Tries:
    found = problem(alone := having(given, async_scheduling=False), "prompt-fits")
    assert found
    assert found.numbers["plugin" if given.server.plugin else "native"]["blocks_needed"] == whole(blocks)
    yield alone, True


def apart_and_smaller(given: Given, found: Finding, tokens: str) -> Tries:
    yield from smaller_batch(having(given, async_scheduling=False), found, tokens)


def larger_cache(given: Given, _: Finding, gib: str, with_tails: str | None, blocks: str) -> Tries:
    yield memory(given, kv_gib=float(gib)), True
    yield memory(given, kv_gib=hundredth_less(gib)), False
    yield memory(given, num_blocks=whole(blocks) + 1), True
    yield memory(given, num_blocks=whole(blocks)), False
    assert (with_tails is None) is not given.server.plugin
    if with_tails:
        yield replace(memory(given), hbm_gib=float(with_tails)), True
        yield replace(memory(given), hbm_gib=hundredth_less(with_tails)), False


def in_chunks(given: Given, found: Finding, no: str | None, why: str) -> Tries:
    """An option that the doctor does not take; `tests/property` holds the figures to the real scheduler."""
    free = found.numbers["plugin" if given.server.plugin else "native"]["free_blocks"]
    figures = [whole(figure) for figure in re.findall(rf"{N}(?= blocks|:| at most)", why)]
    assert (max(figures) > free) is (no is not None)
    yield from ()


def the_plugin(
    given: Given, found: Finding, no: str | None, need: str, free: str, mib: str, requests: str, slots: str
) -> Tries:
    offered = given.hbm_gib
    if offered is None:
        offered = (given.server.num_blocks or 0) * BLOCK / GIB
    on = replace(memory(given, plugin=True), hbm_gib=offered)
    report = ask(on)
    (side,) = [one.numbers["plugin"] for one in report.findings if one.code in ("prompt-fits", "prompt-never-fits")]
    assert (side["blocks_needed"], side["free_blocks"]) == (whole(need), whole(free))
    assert report.sizes
    assert f"{report.sizes.device_bytes / 2**20:,.1f}" == mib
    assert (given.slots or 2, given.server.max_num_seqs) == (whole(slots), whole(requests))
    yield on, no is None


def shorter_sequence(given: Given, _: Finding, tokens: str) -> Tries:
    yield having(given, max_model_len=whole(tokens)), True
    yield having(given, max_model_len=whole(tokens) + 1), False


def larger_budget(given: Given, _: Finding, gib: str, with_tails: str | None) -> Tries:
    assert (with_tails is None) is not given.server.plugin
    yield replace(given, hbm_gib=float(with_tails or gib)), True
    yield replace(given, hbm_gib=hundredth_less(with_tails or gib)), False


def the_plugin_starts(given: Given, _: Finding, gib: str) -> Tries:
    on = having(given, plugin=True)
    yield on, True
    yield replace(on, hbm_gib=float(gib)), True
    yield replace(on, hbm_gib=hundredth_less(gib)), False


def least_budget(given: Given, _: Finding, gib: str) -> Tries:
    yield replace(given, hbm_gib=float(gib)), True
    yield replace(given, hbm_gib=hundredth_less(gib)), False


def shorter_prompt(given: Given, _: Finding, tokens: str) -> Tries:
    yield replace(given, prompt_tokens=whole(tokens)), True
    yield replace(given, prompt_tokens=whole(tokens) + 1), False


def longer_sequence(given: Given, _: Finding, tokens: str) -> Tries:
    yield having(given, max_model_len=whole(tokens) + 1), True
    yield having(given, max_model_len=whole(tokens)), False


REMEDIES: dict[str, dict[str, Callable[..., Tries]]] = {
    "prompt-never-fits": {
        rf"--max-num-batched-tokens {N} or less": smaller_batch,
        rf"--no-async-scheduling: {N} blocks": apart,
        rf"--no-async-scheduling with --max-num-batched-tokens {N} or less": apart_and_smaller,
        (
            rf"a KV cache of {G} GiB on each worker(?:, {G} with tails and slots)?, {N} blocks and the null block"
        ): larger_cache,
        r"(not )?--no-scheduler-reserve-full-isl(.*)": in_chunks,
        (
            rf"(not even )?this plugin, with the states out of the KV cache: {N} of {N} blocks, beside ([0-9.,]+) MiB "
            rf"for tails of {N} requests and {N} slots"
        ): the_plugin,
    },
    "cache-too-small": {
        rf"--max-num-batched-tokens {N} or less": smaller_batch,
        rf"--max-model-len {N} or less": shorter_sequence,
        rf"a KV cache of {G} GiB(?:, {G} with tails and slots)?": larger_budget,
        rf"this plugin, with which {G} GiB are enough, tails and slots included": the_plugin_starts,
        rf"offer at least {G} GiB": least_budget,
    },
    "prompt-longer-than-model": {
        rf"shorten the prompt to at most {N} tokens: at least one is generated": shorter_prompt,
        rf"or start the server with --max-model-len above {N}": longer_sequence,
        r"no setting helps: the model itself ends at 1,048,576 tokens": lambda *_: iter(()),
    },
}


def a_case(random: Random) -> Given:
    """A prompt, or a start, of Flash in a memory in which it often does not fit."""
    start = random.random() < 0.4
    longest = random.choice((None, 65_536, 131_072, 1 << 20)) if random.random() < 0.9 else random.randint(2, 1 << 20)
    server = Server(
        block_size=128,
        max_num_batched_tokens=round(2 ** random.uniform(9, 18)),
        max_model_len=longest,
        max_num_seqs=random.randint(1, 128),
        async_scheduling=random.random() < 0.6,
        plugin=random.random() < 0.3,
    )
    gib = round(2 ** random.uniform(-7, 5), 3)
    given = Given(model="flash", server=server, slots=random.choice((None, 1, 3)), hbm_gib=gib)
    if start:
        return given
    given = replace(given, prompt_tokens=round(2 ** random.uniform(12, 20.2)))
    if random.random() < 0.5:
        return having(replace(given, hbm_gib=None), num_blocks=random.randint(2, 12_000))
    return given


def helped(tried: Given, code: str) -> bool:
    """Whether a problem is gone; a server that starts and never its longest prompt is not helped."""
    longest = tried.server.max_model_len
    if code == "cache-too-small" and longest is not None:
        prompt = replace(tried, prompt_tokens=max(longest - 1, 1))
        return problem(prompt, code) is None and problem(prompt, "prompt-never-fits") is None
    return problem(tried, code) is None


def test_every_remedy_with_a_number_helps_when_it_is_typed_back_in_and_one_less_does_not() -> None:
    random, seen = Random(15_204), set()
    rare = Server(block_size=128, max_num_batched_tokens=8192, max_num_seqs=16, async_scheduling=False, plugin=False)
    in_chunks_only = Given(model="flash", server=replace(rare, num_blocks=1548), prompt_tokens=65_536)
    for given in (in_chunks_only, *(a_case(random) for _ in range(100))):
        for found in ask(given).findings:
            if found.code not in REMEDIES:
                continue
            for remedy in found.remedies:
                ((pattern, tries, said),) = [
                    (pattern, tries, match)
                    for pattern, tries in REMEDIES[found.code].items()
                    if (match := re.fullmatch(pattern, remedy))
                ]
                seen.add((found.code, pattern, remedy.startswith("not ")))
                for tried, helps in tries(given, found, *said.groups()):
                    assert helped(tried, found.code) is helps, (remedy, given, tried)
    wanted = {(code, pattern, False) for code, patterns in REMEDIES.items() for pattern in patterns}
    nots = {(code, pattern, True) for code, pattern, _ in wanted if pattern.startswith("(not ")}
    assert seen == wanted | nots


def test_a_plugin_that_would_not_start_either_is_not_offered() -> None:
    random, kept_back = Random(9543), 0
    for _ in range(60):
        given = having(a_case(random), plugin=None)
        found = problem(given, "cache-too-small")
        if found is None or given.hbm_gib is None or found.remedies[0].startswith("offer"):
            continue
        offered = any(remedy.startswith("this plugin") for remedy in found.remedies)
        assert offered is (problem(having(given, plugin=True), "cache-too-small") is None)
        kept_back += not offered
    assert kept_back > 3


def test_of_a_prompt_that_is_too_much_for_the_plugin_too_it_is_said_that_it_does_not_help() -> None:
    server = Server(block_size=128, max_num_batched_tokens=262_144, max_num_seqs=128, num_blocks=6959)
    found = problem(Given(model="flash", server=server, prompt_tokens=1_000_000), "prompt-never-fits")
    assert found
    need = math.ceil(250_000 / 128) + math.ceil(7_812 / 128) + 2 * (math.ceil((127 + 2 * 262_144) / 128) + 1)
    tails = 128 * 13_926_400 + 32 * 4096 + 8 * 8192 + 8 * 2048  # a null page of each kind
    assert need == 10_212
    (said,) = [remedy for remedy in found.remedies if "this plugin" in remedy]
    mib = float(said.partition("beside ")[2].partition(" MiB")[0].replace(",", ""))
    assert tails / 2**20 < mib
    free = int(6959 * BLOCK - mib * 2**20) // BLOCK - 1
    assert said.startswith(f"not even this plugin, with the states out of the KV cache: {need:,} of {free:,} blocks")


def test_a_queue_of_unknown_prompts_is_offered_the_plugin_only_where_it_lets_longer_ones_start() -> None:
    """Tails of so many requests leave fewer blocks than the states would take."""
    for seqs, offered in ((16, True), (1_500, False)):
        page = Server(block_size=128, max_num_batched_tokens=32_768, max_num_seqs=seqs, num_blocks=6959)
        text = str(ask(Given(model="flash", server=replace(page, engines=(Engine("0", 0, 1, 0, 0.0),)))))
        assert "a smaller --max-num-batched-tokens" in text
        assert ("or this plugin: see the table" in text) is offered
