# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""How many KV blocks a prompt needs, natively and with the plugin, and in plain words why a request waits.

Problem: vLLM admits a request only when all blocks of its whole prompt are free, summed over every KV group, and then
says no more than "waiting: capacity" at 0 % usage. With DeepSeek-V4 on vllm-ascend nine blocks in ten are compressor
state that nobody reads again, so the queue stands still although almost nothing is stored.
Way: the arithmetic of the real scheduler as pure functions over `geometry`. They are exact for a request that starts
from nothing: no prefix hit, no speculative lookahead, no context parallelism, no KV connector. A property test holds
them against the real vLLM scheduler with the real vllm-ascend specs (`compat/harness.py`).
Not here: draft layers (they add sliding-window layers), decode steps, what other requests take meanwhile.

Sources (vLLM 0.23.0): `KVCacheManager.allocate_slots` in v1/core/kv_cache_manager.py,
`SingleTypeKVCacheManager.get_num_blocks_to_allocate` in v1/core/single_type_kv_cache_manager.py,
`SlidingWindowManager.get_num_skipped_tokens` there, `SlidingWindowSpec.max_admission_blocks_per_request` in
v1/kv_cache_interface.py, `_approximate_gcd` and `_max_memory_usage_bytes_from_groups` in v1/core/kv_cache_utils.py;
(vllm-ascend 0.23.0) `get_manager_for_kv_cache_spec` in core/single_type_kv_cache_manager.py,
`AscendMLAAttentionSpec.max_memory_usage_bytes` in core/kv_cache_interface.py, patch/platform/patch_kv_cache_utils.py
and patch_async_swa_kv_lifetime.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from afd_dsv4.geometry import CompressorKind, InputError, ModelGeometry, PageLayout

#: Kinds of KV groups, in the order in which every table shows them.
GROUP_NAMES: Final = ("c4_mla", "c128_mla", "swa", "c4_state", "c128_state")
STATE_GROUPS: Final = ("c4_state", "c128_state")
NULL_BLOCKS: Final = 1  # block 0 is never handed out
GIB: Final = 1 << 30
MIB: Final = 1 << 20
#: Two batches in flight: what `VllmConfig.__post_init__` of both supported releases decides where nobody does.
ASYNC_BY_DEFAULT: Final = True


@dataclass(frozen=True)
class SchedulerLimits:
    """The settings of vLLM that decide admission.

    Attributes:
        max_num_batched_tokens: most tokens of one step.
        max_model_len: longest sequence.
        max_num_seqs: most requests that run at once.
        batches_in_flight: vLLM's `max_concurrent_batches`: 2 with async scheduling, 1 without.

    Raises:
        InputError: a value below 1.
    """

    max_num_batched_tokens: int
    max_model_len: int
    max_num_seqs: int = 16
    batches_in_flight: int = 1

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            if getattr(self, field) < 1:
                raise InputError(field, f"{getattr(self, field)}", "it must be at least 1")

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that may be scheduled and not yet finished."""
        return self.batches_in_flight * self.max_num_batched_tokens


@dataclass(frozen=True)
class KvGroup:
    """All KV groups of one kind.

    Attributes:
        name: one of `GROUP_NAMES`.
        count: how many equal groups the stack makes of it (it splits long lists of layers).
        block_rows: rows in one block; compressed rows where `ratio` is above 1.
        ratio: tokens per row.
        window: tokens after which a row may be freed, None where rows live as long as the request.
    """

    name: str
    count: int
    block_rows: int
    ratio: int = 1
    window: int | None = None

    def blocks(self, tokens: int) -> int:
        """Blocks of all `count` groups for this many tokens, before any cap."""
        # The ratio divides first and rounds down: a window that is not full yet has no compressed row.
        return self.count * _ceil(tokens // self.ratio, self.block_rows)

    def cap(self, limits: SchedulerLimits) -> int:
        """Most blocks that the admission check asks for one request; vLLM frees older ones as it goes."""
        if self.window is None:
            return self.count * (_ceil(limits.max_model_len // self.ratio, self.block_rows) + 1)
        alive = min(self.window - 1 + limits.max_in_flight_tokens, limits.max_model_len)
        return self.count * (_ceil(alive, self.block_rows) + 1)

    def at_startup(self, limits: SchedulerLimits) -> int:
        """Blocks that vLLM's check at start-up asks for one sequence of the longest length.

        Compressed rows get no block to spare there, and a window that is not full counts as one.
        """
        if self.window is None:
            return self.count * _ceil(limits.max_model_len, self.ratio * self.block_rows)
        return self.cap(limits)

    def held(self, tokens: int, done: int) -> int:
        """Blocks for this many tokens, of which the first `done` are computed, their output read, and may be freed.

        What lies wholly before the window of the next token is freed.
        """
        if self.window is None:
            return self.blocks(tokens)
        gone = max(0, done - self.window + 1) // self.block_rows
        return self.blocks(tokens) - self.count * gone


@dataclass(frozen=True)
class KvPlan:
    """The KV groups of a model on a stack, and the bytes behind one block id.

    One block id spans all groups and all layers, so a block that holds 8 rows of C4 state costs as much as any other.
    """

    groups: tuple[KvGroup, ...]
    block_bytes: int

    def free_blocks(self, kv_bytes: int) -> int:
        """Blocks that an empty KV cache of this size can hand out.

        Raises:
            InputError: not even one block beside the null block.
        """
        free = kv_bytes // self.block_bytes - NULL_BLOCKS
        if free < 1:
            raise InputError(
                "KV cache memory",
                f"{max(kv_bytes, 0)} bytes hold no block that could be given out",
                f"offer at least {(NULL_BLOCKS + 1) * self.block_bytes} bytes (2 blocks of {self.block_bytes})",
            )
        return free

    def whole_prompt(self, tokens: int, limits: SchedulerLimits) -> dict[str, int]:
        """Blocks by kind of group that the admission check wants free for a whole prompt (capped)."""
        return self._by_group({g.name: min(g.blocks(tokens), g.cap(limits)) for g in self.groups})

    def chunk(self, tokens: int) -> dict[str, int]:
        """Blocks by kind of group that a first chunk really takes (not capped)."""
        return self._by_group({g.name: g.blocks(tokens) for g in self.groups})

    def at_startup(self, limits: SchedulerLimits) -> int:
        """Blocks that vLLM's check at start-up wants for one longest sequence, of all there are, the null block too."""
        return sum(group.at_startup(limits) for group in self.groups)

    def peak(self, tokens: int, limits: SchedulerLimits) -> int:
        """Most blocks that a prompt really takes at once on its way, alone, chunk by chunk.

        With fewer it preempts itself where admission does not ask for the whole prompt, each time anew.
        """
        batch = limits.max_num_batched_tokens
        last = (tokens - 1) // batch
        # What windows hold repeats as soon as a chunk begins at the same row of every block; compressed rows only grow.
        period = math.lcm(*(group.block_rows for group in self.groups if group.window is not None))
        most = 0
        for chunk in range(max(0, last - period), last + 1):
            given = chunk * batch
            done = max(0, given - (limits.batches_in_flight - 1) * batch)  # the output of the rest is still to be read
            end = min(given + batch, tokens)
            most = max(most, sum(group.held(end, done) for group in self.groups))
        return most

    def _by_group(self, needs: dict[str, int]) -> dict[str, int]:
        return {name: needs.get(name, 0) for name in GROUP_NAMES}


def kv_plan(geometry: ModelGeometry, layout: PageLayout, *, plugin: bool) -> KvPlan:
    """The KV groups that the stack makes for this model; with the plugin the state layers are not among them.

    Raises:
        InputError: a model that the stack cannot group (it wants both C4 and C128 layers), or page sizes off.
    """
    layout.check_holds(geometry)
    c4, c128 = len(geometry.layers_of(CompressorKind.C4)), len(geometry.layers_of(CompressorKind.C128))
    if not c4 or not c128:
        raise InputError(
            f"{geometry.name}: compress ratios",
            f"{c4} C4 layers and {c128} C128 layers",
            "the stack groups the KV cache only for models that have both",
        )
    layers = {"c4_mla": c4, "c128_mla": c128, "swa": geometry.num_layers}
    if not plugin:
        layers |= {"c4_state": c4, "c128_state": c128}
    width = _group_width(list(layers.values()), c4)
    # The two compressed KV groups stay whole, whatever the width.
    counts = {name: 1 if name.endswith("mla") else _ceil(n, width) for name, n in layers.items()}
    c4_window = 2 * CompressorKind.C4.ratio  # a window reads the one before it
    groups: tuple[KvGroup, ...] = (
        KvGroup("c4_mla", counts["c4_mla"], layout.kv_rows, ratio=4),
        KvGroup("c128_mla", counts["c128_mla"], layout.kv_rows, ratio=128),
        KvGroup("swa", counts["swa"], layout.swa_rows, window=geometry.sliding_window),
    )
    if not plugin:
        groups += (
            KvGroup("c4_state", counts["c4_state"], layout.c4_page_rows, window=c4_window),
            KvGroup("c128_state", counts["c128_state"], layout.c128_page_rows, window=CompressorKind.C128.ratio),
        )
    widest = max(_ceil(n, counts[name]) for name, n in layers.items())
    return KvPlan(groups, widest * (layout.indexer_page_bytes + layout.other_page_bytes))


@dataclass(frozen=True)
class Admission:
    """The answer for one prompt that meets an empty KV cache.

    Attributes:
        by_group: blocks that the admission check wants free for the whole prompt, by kind of group.
        first_chunk: blocks that the first step would take.
        free_blocks: blocks that are free, None where that is not known.
        admitted: whether the scheduler starts the request, None where that cannot be said.
        reason: why, in plain words, and what to change where it waits.
    """

    by_group: dict[str, int]
    first_chunk: dict[str, int]
    free_blocks: int | None
    admitted: bool | None
    reason: str

    @property
    def blocks_needed(self) -> int:
        """Blocks of the whole prompt, all groups."""
        return sum(self.by_group.values())


def admit(plan: KvPlan, tokens: int, limits: SchedulerLimits, free_blocks: int | None) -> Admission:
    """Decide on one prompt as the scheduler would with an empty KV cache.

    Args:
        plan: the KV groups, see `kv_plan`.
        tokens: tokens of the prompt.
        limits: the scheduler's settings.
        free_blocks: blocks that the pool can hand out, None to learn only the need.

    Raises:
        InputError: a prompt that is empty or longer than the model, or a negative number of blocks.
    """
    check_prompt(tokens, limits)
    if free_blocks is not None and free_blocks < 0:
        raise InputError("free blocks", f"{free_blocks}", "it must not be negative")
    whole = plan.whole_prompt(tokens, limits)
    chunk = plan.chunk(min(tokens, limits.max_num_batched_tokens))
    if free_blocks is None:
        text = (
            f"the whole prompt needs {sum(whole.values()):,} blocks ({_shares(whole)}); how many are free is not known"
        )
        return Admission(whole, chunk, None, None, text)
    # allocate_slots also asks whether the chunk fits; no group's chunk needs more than its whole prompt.
    admitted = sum(whole.values()) <= free_blocks
    reason = _why_it_starts(whole, free_blocks) if admitted else _why_it_waits(plan, tokens, limits, free_blocks, whole)
    return Admission(whole, chunk, free_blocks, admitted, reason)


def first_step(plan: KvPlan, prompts: Sequence[int], limits: SchedulerLimits, free_blocks: int) -> tuple[int, ...]:
    """Tokens that the first step gives each of these prompts, in queue order, starting from an empty KV cache.

    The scheduler stops at the first prompt that does not fit; nothing behind it is tried.

    Returns:
        One number per prompt, 0 where it waits.
    """
    budget, free = limits.max_num_batched_tokens, free_blocks
    given = [0] * len(prompts)
    for index, tokens in enumerate(prompts[: limits.max_num_seqs]):
        check_prompt(tokens, limits)
        chunk = min(tokens, budget)
        if chunk == 0 or sum(plan.whole_prompt(tokens, limits).values()) > free:
            break
        given[index] = chunk
        budget -= chunk
        free -= sum(plan.chunk(chunk).values())
    return tuple(given)


def check_prompt(tokens: int, limits: SchedulerLimits) -> None:
    """Refuse a prompt that no server would take.

    Raises:
        InputError: fewer than 1 token, or as many as the longest sequence: none could be generated
            (`vllm/v1/engine/input_processor.py`).
    """
    if tokens < 1:
        raise InputError("prompt", f"{tokens} tokens", "give at least 1")
    if tokens >= limits.max_model_len:
        raise InputError(
            "prompt",
            f"{tokens} tokens, the longest sequence is {limits.max_model_len}",
            f"shorten it to at most {limits.max_model_len - 1}: at least one token is generated",
        )


def _why_it_starts(whole: dict[str, int], free: int) -> str:
    return f"the whole prompt needs {sum(whole.values()):,} blocks and {free:,} are free ({_shares(whole)})"


def _why_it_waits(plan: KvPlan, tokens: int, limits: SchedulerLimits, free: int, whole: dict[str, int]) -> str:
    need = sum(whole.values())
    state = sum(whole[name] for name in STATE_GROUPS)
    text = f"waits, however long: the whole prompt needs {need:,} blocks and {free:,} are free ({_shares(whole)}). "
    if state:
        text += (
            f"Compressor states take {state:,} of them ({100 * state / need:.0f} %), although later steps read at most "
            f"7 rows of a C4 and 127 of a C128 compressor again. "
        )
    text += f"To start it: {gib_up((need + NULL_BLOCKS) * plan.block_bytes)} GiB of KV cache ({need:,} free blocks)"
    smaller = _largest_batch(plan, tokens, limits, free)
    if smaller:
        text += f", or max-num-batched-tokens {smaller:,} or less"
    if state:
        text += ", or the states out of the KV cache: what the plugin is for"
    return text


def _shares(whole: dict[str, int]) -> str:
    return ", ".join(f"{name} {blocks:,}" for name, blocks in whole.items() if blocks)


def _largest_batch(plan: KvPlan, tokens: int, limits: SchedulerLimits, free: int) -> int:
    """The largest smaller batch with which the prompt starts, 0 if none does. The need only grows with the batch."""

    def starts(batch: int) -> bool:
        tried = SchedulerLimits(batch, limits.max_model_len, limits.max_num_seqs, limits.batches_in_flight)
        return sum(plan.whole_prompt(tokens, tried).values()) <= free

    return largest(starts, limits.max_num_batched_tokens - 1)


def largest(good: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that is good, 0 if none is. The smaller ones of a good number are good."""
    low, high = 0, max(most, 0)
    while low < high:
        middle = (low + high + 1) // 2
        if good(middle):
            low = middle
        else:
            high = middle - 1
    return low


def gib_up(size: int) -> str:
    """Bytes in GiB, rounded up, so that the figure is enough when it is typed back in."""
    return f"{math.ceil(size * 100 / GIB) / 100:.2f}"


def _group_width(counts: list[int], least: int) -> int:
    """Layers in one group: the width from `least` up that pads the layer counts least; the larger of equals."""
    widths = range(least, max(least, *counts) + 1)
    return min(widths, key=lambda width: (sum(-n % width for n in counts), -width))


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
