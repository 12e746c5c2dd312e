# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Asks the real KV-cache managers how many tokens of an identical prompt hit; `python -m tests.prefix_managers`.

A process of its own, since vllm-ascend patches vLLM for the whole process. It reads `[block size, drafts, tokens]` as
JSON lines and answers each with a number. With drafts, the model has the layer of MTP, and vLLM says itself to which
group it belongs. Not here: a forward.
"""

from __future__ import annotations

import inspect
import json
import sys
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from afd_dsv4.compat import harness
from afd_dsv4.compat.scheduler_worker import Stack
from afd_dsv4.geometry import preset

BATCH, LONGEST, BLOCKS = 8192, 1 << 18, 20_000
DRAFTING = SimpleNamespace(speculative_config=SimpleNamespace(use_eagle=lambda: True))


@cache
def stack() -> Stack:
    return Stack()


@cache
def pool(block_size: int, drafts: bool) -> tuple[Any, Any, int, int]:
    """KV cache configuration, what hashes blocks of a request, and sizes of blocks for the scheduler and for hashes."""
    utils = stack().kv_cache_utils
    case = harness.Case(preset("flash"), (1,), block_size, BATCH, LONGEST, free_blocks=BLOCKS)
    config = stack().config(case)
    import_module("vllm.v1.core.single_type_kv_cache_manager").register_all_kvcache_specs(config)
    specs = dict(stack().specs(case, config))
    config.cache_config.enable_prefix_caching = True
    if drafts:
        last = next(name for name in reversed(specs) if name.endswith(".swa_cache"))
        specs["model.layers.43.attn.swa_cache"] = specs[last]
    groups = utils.get_kv_cache_groups(config, specs)
    if drafts:
        utils._annotate_eagle_groups_deepseek_v4(DRAFTING, specs, groups)
        assert sum(group.is_eagle_group for group in groups) == 1
    planned = utils.get_kv_cache_config_from_groups(config, groups, BLOCKS * (4 << 20))
    cache_config = utils.generate_scheduler_kv_cache_config([planned])
    config.cache_config.num_gpu_blocks = cache_config.num_blocks
    aligned, hashed = utils.resolve_kv_cache_block_sizes(cache_config, config)[:2]
    digest = import_module("vllm.utils.hashing").sha256
    utils.init_none_hash(digest)
    return cache_config, utils.get_request_block_hasher(hashed, digest), aligned, hashed


def hits(block_size: int, drafts: bool, tokens: int) -> int:
    """Tokens of the second of two identical prompts that are found, after the first was computed in chunks."""
    cache_config, hasher, aligned, hashed = pool(block_size, drafts)
    manager = import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    wanted = {
        "kv_cache_config": cache_config,
        "max_model_len": LONGEST,
        "enable_caching": True,
        "use_eagle": drafts,
        "scheduler_block_size": aligned,
        "hash_block_size": hashed,
        "max_num_batched_tokens": BATCH,
        "max_in_flight_tokens": BATCH,
    }
    has = inspect.signature(manager.__init__).parameters
    found = manager(**{name: value for name, value in wanted.items() if name in has})

    def request(name: str) -> Any:
        return import_module("vllm.v1.request").Request(
            request_id=name,
            prompt_token_ids=list(range(tokens)),
            sampling_params=import_module("vllm.sampling_params").SamplingParams(max_tokens=2),
            pooling_params=None,
            block_hasher=hasher,
        )

    first = request("first")
    for start in range(0, tokens, BATCH):
        chunk = min(BATCH, tokens - start)
        assert found.allocate_slots(first, chunk) is not None
        first.num_computed_tokens = start + chunk
    found.free(first)
    return int(found.get_computed_blocks(request("second"))[1])


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(hits(*json.loads(line))), flush=True)
