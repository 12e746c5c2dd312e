# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What `vllm serve` on an Ascend device has where an option is left out.

Problem: vLLM's defaults are no constants. They follow from other options, from who asks and from what the platform
makes of them; a guess calls "on" what a server refuses, or takes a tenth of the memory that it reserves.
Way: the rules of vLLM and vllm-ascend, as functions of the options, the same for both supported stacks; a test asks
real configurations. They are those of `vllm serve`: the class `LLM` takes batches of 8,192 tokens by default. The
memory of the device counts for nothing: vLLM asks its platform for it, and Ascend's does not answer.
Not here: back ends of all2all that batch data parallelism (256 tokens), FlashComm, which rounds the batch, xlite, and
what the environment of the server turns off, such as TORCH_COMPILE_DISABLE.

Sources (0.23.0 of both; 0.26.0 with 80d8c194f): `vllm/engine/arg_utils.py:get_batch_defaults` and what calls it;
`vllm/config/vllm.py:VllmConfig.__post_init__`; `vllm_ascend/platform.py:NPUPlatform.check_and_update_config`, and its
`get_device_total_memory`; `vllm_ascend/utils.py:refresh_block_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from afd_dsv4.doctor.options import COMPILATION, LEVELS, Options
from afd_dsv4.gate import MTP, NO_GRAPHS

BATCH: Final = 2048
SEQS: Final = 256
BLOCK_SIZE: Final = 32  # of DeepSeek-V4
#: By number: vllm/config/compilation.py:CUDAGraphMode. The others are pairs of these.
_GRAPHS: Final = (NO_GRAPHS, "PIECEWISE", "FULL")
_PAIRS: Final = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_BY_LEVEL: Final = dict(zip(LEVELS, (NO_GRAPHS, "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"), strict=True))
_LEVEL: Final = "O2"
#: Methods that draft on the device, so that the scheduler may run ahead of them: vllm/config/speculative.py.
_ON_DEVICE: Final = ("dflash", "dspark", "eagle", "eagle3", "extract_hidden_states", "ngram_gpu")


@dataclass(frozen=True)
class Limits:
    """Of a server's scheduler and cache.

    Attributes:
        max_num_batched_tokens, block_size, max_num_seqs: vLLM's.
    """

    max_num_batched_tokens: int
    block_size: int
    max_num_seqs: int


def limits(asked: Options, *, batch: int | None, block_size: int | None, seqs: int | None, longest: int) -> Limits:
    """The limits, of which None is not said.

    Args:
        asked: the options.
        batch, block_size, seqs: those that are known.
        longest: sequence of the model; that of the options comes first.
    """
    told = asked.number("max_model_len", 0)  # -1 is vLLM's own choice
    longest = told if told > 0 else longest
    twice = 2 if asked.text("performance_mode") == "throughput" else 1
    most = seqs or SEQS * twice
    if batch is None:
        whole = 0 if asked.flag("enable_chunked_prefill", True) else longest
        batch = min(max(BATCH * twice, whole), most * longest)
    return Limits(batch, block_size or BLOCK_SIZE, seqs or min(most, batch))


def graphs(asked: Options) -> str:
    """Name of vLLM's graph mode. Only what vLLM compiles itself has graphs of pieces."""
    if asked.flag("enforce_eager", False):
        return NO_GRAPHS
    level = asked.choice("optimization_level", LEVELS) or _LEVEL
    compilation = asked.inner("compilation_config")
    by_level = COMPILATION[0] if level == LEVELS[0] else COMPILATION[-1]
    mode = compilation.choice("mode", COMPILATION) or by_level
    found = compilation.choice("cudagraph_mode", _GRAPHS, _PAIRS) or _BY_LEVEL[level]
    if mode in COMPILATION[1:-1] or ("PIECEWISE" in found and mode != COMPILATION[-1]):
        return NO_GRAPHS
    return found


def asynchronous(asked: Options, method: str | None) -> bool:
    """Whether the scheduler runs ahead, drafting with this method, None for none."""
    ahead = method is None or method in _ON_DEVICE or method.endswith(MTP)
    if method and asked.inner("speculative_config").flag("disable_padded_drafter_batch", False):
        ahead = False
    return asked.flag("async_scheduling", ahead)


def left_out(asked: Options, found: Limits, **known: int | None) -> str | None:
    """The defaults that `found` and `graphs` hold, in words; None where all was said.

    Args:
        asked: the options.
        found: what the server has.
        known: the limits by their names, as they were known.
    """
    mode = graphs(asked)
    told = asked.flag("enforce_eager", False) or asked.inner("compilation_config").values.get("cudagraph_mode")
    words = [f"graph mode {mode}"] * (told is None)
    words += [f"{name} {getattr(found, name):,}" for name, value in known.items() if value is None]
    return f"the defaults of `vllm serve` ({', '.join(words)})" if words else None
