# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Says why the prefix cache never hits.

Problem: vLLM counts tokens that were asked of the prefix cache and tokens that hit, and with DeepSeek-V4 on vllm-ascend
the second may stay 0 although all prompts begin alike: a hit must end at a block of every KV group.
Way: the least common multiple of their blocks, and what drafts drop of a hit. A test holds both to the real managers.
Not here: whether two prompts begin alike, which no metric tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from afd_dsv4.doctor.case import Case, told
from afd_dsv4.doctor.facts import Finding, Severity
from afd_dsv4.geometry import PageLayout

#: `vllm/config/speculative.py:use_eagle`: for drafts of these methods the last block of a hit is computed again, since
#: they read its hidden states. Names of models such as deepseek_mtp are that of the method, too.
_READ_HIDDEN_STATES: Final = ("eagle", "eagle3", "dflash", "dspark")


def drops_a_block(options: Mapping[str, Any]) -> bool:
    """Whether vLLM drops the last block of a hit, by the options of a server."""
    method = told(options, "speculative_config").get("method") or options.get("spec_method")
    return isinstance(method, str) and (method in _READ_HIDDEN_STATES or method.endswith("mtp"))


def hit_multiple(layout: PageLayout) -> int:
    """Tokens in whole multiples of which a prefix hit comes: the least common multiple of all groups' blocks.

    `lcm_block_size` of vllm_ascend/patch/platform/patch_kv_cache_coordinator.py. The plugin changes nothing: C128's own
    blocks make it.
    """
    return math.lcm(
        4 * layout.kv_rows, 128 * layout.kv_rows, layout.swa_rows, layout.c4_page_rows, layout.c128_page_rows
    )


def least_shared(layout: PageLayout, *, drops: bool) -> int:
    """Tokens that two prompts must share, and go on, for the second to hit.

    Where the last block of a hit is dropped, it is one of the sliding windows, to which the draft layer belongs.
    """
    return hit_multiple(layout) + (layout.swa_rows if drops else 0)


def findings(case: Case | None) -> Iterator[Finding]:
    """What the counters of the prefix cache say; nothing where there are none, or where it hits."""
    if case is None:
        return
    server = case.server
    if server.prefix_caching is False or server.hits != 0 or not server.queries:
        return
    multiple, least = hit_multiple(case.layout), least_shared(case.layout, drops=case.drops)
    prompt = case.prompt if case.prompt is not None else server.mean_prompt
    whose = "the prompt has" if case.prompt is not None else "prompts have on average"
    numbers = {
        "multiple": multiple,
        "least_shared": least,
        "queries": server.queries,
        "hits": 0,
        "mean_prompt": server.mean_prompt,
    }
    if prompt is not None and prompt > least:
        yield Finding(
            "no-prefix-hits",
            Severity.NOTE,
            f"no hit in {server.queries:,} tokens asked of the prefix cache, although {whose} {prompt:,.0f} tokens "
            f"and a hit needs {least:,}",
            ("Either no two prompts begin alike for so long, or what the first left was evicted before the second.",),
            (),
            ("vllm-project/vllm-ascend#12589", "vllm-project/vllm-ascend#9845"),
            numbers,
        )
        return
    remedies = [
        f"prompts that share more than {least:,} tokens, or --no-enable-prefix-caching, since it only costs here"
    ]
    if case.layout.block_size > 32:
        # All blocks are cut alike, and the multiple with them.
        smaller = least * 32 // case.layout.block_size
        remedies.insert(0, f"--block-size 32, with which a hit needs {smaller:,}")
    yield Finding(
        "prefix-hits-zero",
        Severity.PROBLEM,
        f"no hit in {server.queries:,} tokens asked of the prefix cache: with block size {case.layout.block_size} "
        f"hits come in multiples of {multiple:,} tokens",
        tuple(_why(case, multiple, least, None if prompt is None else f"Here {whose} {prompt:,.0f} tokens.")),
        tuple(remedies),
        ("vllm-project/vllm-ascend#16270", "vllm-project/vllm-ascend#13627", "vllm-project/vllm-ascend#10710"),
        numbers,
    )


def _why(case: Case, multiple: int, least: int, here: str | None) -> Iterator[str]:
    layout = case.layout
    yield (
        f"The tokens of a block, by KV group: c4_mla {4 * layout.kv_rows:,}, c128_mla {128 * layout.kv_rows:,}, swa "
        f"{layout.swa_rows}, c4_state {layout.c4_page_rows}, c128_state {layout.c128_page_rows}. A hit must end at a "
        f"block of every group, so in a multiple of all of them, {multiple:,}; and the last token of a prompt is "
        f"always computed. A prompt of up to {least:,} tokens never hits."
    )
    if case.drops:
        yield (
            f"That is {layout.swa_rows} more than the multiple, because the server drafts: the last block of a hit is "
            "computed again for its hidden states. Of releases before 0.23.0, vllm-project/vllm-ascend#10710 says that "
            f"a hit needed {2 * multiple:,}."
        )
    if here:
        yield here
    yield "The plugin does not change this, and does not run with prefix caching."
