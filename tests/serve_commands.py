# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Commands of `vllm serve`: those that README and docs show, and those that say what vLLM has by default.

What a configuration has was read off the real ones of both supported stacks; `integration/test_serve_commands.py` asks
them again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from afd_dsv4.evidence.isolation_probe import MODEL as SMALLEST
from tests import docs_pages

#: What MODEL stands for in a command; the doctor asks for a size that the operator of a device takes.
MODEL = {**SMALLEST, "hidden_size": 4096}
GATE = """--additional-config '{"afd_dsv4": {"mode": "colocated"}}'"""
#: What stood in docs/quickstart.md, which said that it is on; it is refused.
FORMER = shlex.split(f"MODEL --no-enable-prefix-caching {GATE}")


@dataclass(frozen=True)
class Has:
    """What a configuration has."""

    graphs: str = "FULL_AND_PIECEWISE"
    batch: int = 2048
    block_size: int = 32
    seqs: int = 256
    asynchronous: bool = True


#: Options beside the gate's, and what a server with them has. The model's longest sequence is 16,384.
DEFAULTS = {
    "": Has(),
    "--enforce-eager": Has("NONE"),
    """--enforce-eager --compilation-config '{"cudagraph_mode": "FULL"}'""": Has("NONE"),
    "-O0": Has("NONE"),
    "--optimization-level 1": Has("PIECEWISE"),
    "--optimization-level 3": Has(),
    """-O0 --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'""": Has("FULL_DECODE_ONLY"),
    """-O0 --compilation-config '{"cudagraph_mode": "PIECEWISE"}'""": Has("NONE"),
    """--compilation-config '{"cudagraph_mode": "full_decode_only"}'""": Has("FULL_DECODE_ONLY"),
    """--compilation-config '{"cudagraph_mode": "NONE"}'""": Has("NONE"),
    """--compilation-config '{"cudagraph_mode": "PIECEWISE"}'""": Has("PIECEWISE"),
    """--compilation-config '{"cudagraph_mode": 2}'""": Has("FULL"),
    """--compilation-config '{"mode": 0}'""": Has("NONE"),
    """--compilation-config '{"mode": "none", "cudagraph_mode": "FULL"}'""": Has("FULL"),
    """--compilation-config '{"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}'""": Has("NONE"),
    """--compilation-config '{"mode": 1, "cudagraph_mode": "FULL_DECODE_ONLY"}'""": Has("NONE"),
    """--compilation-config '{"mode": 2}'""": Has("NONE"),
    """--compilation-config '{"mode": 3}'""": Has(),
    "--max-num-seqs 4": Has(seqs=4),
    "--max-num-batched-tokens 128": Has(batch=128, seqs=128),
    "--max-num-batched-tokens 8192": Has(batch=8192),
    "--max-num-seqs 1 --max-model-len 1024": Has(batch=1024, seqs=1),
    "--performance-mode throughput": Has(batch=4096, seqs=512),
    "--performance-mode throughput --max-num-seqs 8": Has(batch=4096, seqs=8),
    "--no-enable-chunked-prefill": Has(batch=16_384),
    "--no-enable-chunked-prefill --max-model-len 4k": Has(batch=4000),
    "--no-enable-chunked-prefill --max-model-len 1024": Has(),
    "--block-size 64": Has(block_size=64),
    "--no-async-scheduling": Has(asynchronous=False),
    """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'""": Has(),
    (
        "--speculative-config "
        """'{"method": "mtp", "num_speculative_tokens": 1, "disable_padded_drafter_batch": true}'"""
    ): Has(asynchronous=False),
    """--speculative-config '{"method": "ngram", "num_speculative_tokens": 2}'""": Has(asynchronous=False),
    "--enable-dbo --enforce-eager": Has("NONE"),  # which vllm-ascend ignores
    "--kv-offloading-size 1.5": Has(),
    """--kv-transfer-config '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'""": Has(),
}


def command(options: str) -> list[str]:
    """Words behind `vllm serve`."""
    return [*FORMER, *shlex.split(options)]


def documented() -> Iterator[tuple[str, list[str]]]:
    """Every command on a page, with its page, as words behind `vllm serve`; `...` alone says nothing."""
    for page in [*docs_pages.PAGES, *docs_pages.OTHERS]:
        for words in docs_pages.commands(docs_pages.text_of(page), ("vllm",)):
            if words[1:] != ["serve", "..."]:
                assert words[1] == "serve"
                yield page.name, words[2:]


def options_of(words: list[str]) -> dict[str, Any]:
    """The same as a file for `doctor --config` has it: by the long names, values as JSON where they are."""
    found: dict[str, Any] = {}
    for at, word in enumerate(words):
        if word.startswith("-O"):
            found["optimization-level"] = int(word[2:])
        elif word.startswith("--"):
            value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else "true"
            try:
                found[word[2:]] = json.loads(value)
            except ValueError:
                found[word[2:]] = value
    return found
