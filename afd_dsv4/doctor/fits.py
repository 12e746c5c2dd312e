# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Says whether a server would start, whether a prompt ever does, and what changes it.

Problem: the scheduler starts a prompt only where all blocks of the whole prompt are free, and says no more than that it
waits; vLLM's check at start-up asks nearly the same of the longest sequence.
Way: the arithmetic of `admission.py`, which the tests hold against the real scheduler. Every remedy with a number is
computed before it is named: typed back in it helps, and one less does not. What is often tried and does not help is
said not to.
Not here: what the server's queue looks like (`queue.py`); draft layers, prefix hits and context parallelism (as in
`admission.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from afd_dsv4.admission import GIB, MIB, NULL_BLOCKS, KvPlan, gib_up, largest
from afd_dsv4.doctor.case import Case
from afd_dsv4.doctor.facts import Finding, Server, Severity
from afd_dsv4.doctor.faults import too_long
from afd_dsv4.geometry import preset_name

NEVER_ADMITTED: Final = ("vllm-project/vllm-ascend#15204", "vllm-project/afd-plugin#292")
_WINDOWS: Final = ("vllm-project/vllm#54703",)


def startup(case: Case) -> Finding | None:
    """vLLM's check at start-up, where the memory is a plan; a server that runs has passed its own."""
    batch, whole = case.server.max_num_batched_tokens, case.hbm
    if whole is None or batch is None:
        return None
    plan, limits = case.plan(plugin=case.plugin), case.limits(batch)
    reserved = case.reserved(batch, plugin=case.plugin)
    wanted = plan.at_startup(limits) * plan.block_bytes if case.server.max_model_len else 0
    two = (1 + NULL_BLOCKS) * plan.block_bytes
    if whole - reserved < two:
        longest = _wanted(case, batch, case.max_model_len, plugin=case.plugin) if case.server.max_model_len else 0
        least = reserved + max(longest, two)
        return Finding(
            "cache-too-small",
            Severity.PROBLEM,
            f"{whole:,} B hold no KV block: a block spans all {case.geometry.num_layers} layers and takes "
            f"{plan.block_bytes:,} B, and block 0 is never handed out",
            (f"The plugin takes {reserved:,} B of it before.",) if reserved else (),
            (f"offer at least {gib_up(least)} GiB",),
            (),
            {"bytes": whole, "block_bytes": plan.block_bytes, "reserved_bytes": reserved, "least_bytes": least},
        )
    if wanted <= whole - reserved:
        return None
    shorter, smaller = _longest_that_starts(case, batch), _batch_that_starts(case, batch)
    return Finding(
        "cache-too-small",
        Severity.PROBLEM,
        f"the server would not start: a sequence of {case.max_model_len:,} tokens wants {gib_up(wanted)} GiB of KV "
        f"cache, there are {(whole - reserved) / GIB:.2f}",
        (
            (
                f"Before it starts, vLLM asks whether one sequence of {case.max_model_len:,} tokens fits: "
                f"{wanted // plan.block_bytes:,} blocks of {plan.block_bytes:,} B, "
                f"{(whole - reserved) // plan.block_bytes:,} there are."
            ),
            case.multiplier({group.name: group.at_startup(limits) for group in plan.groups}, plan),
        ),
        tuple(_remedies_of_a_start(case, batch, shorter, smaller)),
        ("vllm-project/vllm-ascend#14678",),
        {
            "max_model_len": case.max_model_len,
            "need_bytes": wanted,
            "need_blocks": wanted // plan.block_bytes,
            "available_bytes": whole - reserved,
            "fitting_max_model_len": shorter,
            "fitting_max_num_batched_tokens": smaller,
        },
    )


def _wanted(case: Case, batch: int, length: int, *, plugin: bool) -> int:
    """Bytes with which a server of this longest sequence starts, and then its longest prompt.

    They differ: vLLM's check counts other blocks than its scheduler asks for, and takes the null block for one of them.
    """
    plan = case.plan(plugin=plugin)
    limits = replace(case.limits(batch), max_model_len=length)
    prompt = sum(plan.whole_prompt(max(length - 1, 1), limits).values()) + NULL_BLOCKS
    return max(plan.at_startup(limits), prompt) * plan.block_bytes


def _starts(case: Case, batch: int, length: int, *, plugin: bool) -> bool:
    return _wanted(case, batch, length, plugin=plugin) + case.reserved(batch, plugin=plugin) <= (case.hbm or 0)


def _longest_that_starts(case: Case, batch: int) -> int:
    return largest(lambda length: _starts(case, batch, length, plugin=case.plugin), case.max_model_len)


def _batch_that_starts(case: Case, batch: int) -> int:
    return largest(lambda tokens: _starts(case, tokens, case.max_model_len, plugin=case.plugin), batch - 1)


def _remedies_of_a_start(case: Case, batch: int, shorter: int, smaller: int) -> Iterator[str]:
    """What starts the server and lets it start its longest prompt, which would wait for ever otherwise."""
    if smaller:
        yield f"--max-num-batched-tokens {smaller:,} or less"
    if shorter:
        yield f"--max-model-len {shorter:,} or less"
    wanted = _wanted(case, batch, case.max_model_len, plugin=case.plugin)
    yield f"a KV cache of {gib_up(wanted)} GiB{_with_tails(case, batch, wanted)}"
    if not case.plugin:
        mine = _wanted(case, batch, case.max_model_len, plugin=True) + case.reserved(batch, plugin=True)
        if mine <= (case.hbm or 0):
            yield f"this plugin, with which {gib_up(mine)} GiB are enough, tails and slots included"


def _with_tails(case: Case, batch: int, cache: int) -> str:
    """What a KV cache of so many bytes is with what the plugin reserves beside it."""
    return f", {gib_up(cache + case.reserved(batch, plugin=True))} with tails and slots" if case.plugin else ""


def prompt(case: Case, here: Sequence[str]) -> Finding | None:
    """Whether the prompt that is asked about starts.

    Args:
        case: the server.
        here: sentences on queues that look as if it did not.
    """
    if case.prompt is None:
        return None
    longest, batch = case.max_model_len, case.server.max_num_batched_tokens
    if case.prompt >= longest:  # of as many tokens, none could be generated
        known = case.server.max_model_len is not None
        what = "the server refuses it" if known else "that is all the model can do"
        return too_long(case.prompt, longest, what, case.geometry.max_position_embeddings)
    if batch is None:
        return not_judged(case, case.server, case.prompt)
    plan, free = case.plan(plugin=case.plugin), case.free(batch, plugin=case.plugin)
    whole = plan.whole_prompt(case.prompt, case.limits(batch))
    need = sum(whole.values())
    if free is None:
        return not_judged(case, case.server, case.prompt, need)
    if need <= free:
        return Finding(
            "prompt-fits",
            Severity.NOTE,
            f"a prompt of {case.prompt:,} tokens starts as soon as {need:,} of {free:,} KV blocks are free",
            numbers=_numbers(case, batch, case.prompt),
        )
    return Finding(
        "prompt-never-fits",
        Severity.PROBLEM,
        f"a prompt of {case.prompt:,} tokens never starts: it needs {need:,} KV blocks, and {free:,} are free when "
        "nothing runs",
        (
            *_table(whole, plan),
            case.multiplier(whole, plan),
            (
                "The scheduler starts a prompt only when all blocks of the whole prompt are free. Until then nothing "
                "is stored: usage stays at 0 %, and nothing behind it in the queue is tried."
            ),
            *here,
            *case.should_not_run(batch),
        ),
        tuple(_remedies(case, batch, case.prompt)),
        _WINDOWS if case.plugin else NEVER_ADMITTED,
        _numbers(case, batch, case.prompt),
    )


def not_judged(case: Case | None, server: Server, tokens: int, need: int | None = None) -> Finding:
    """That numbers are missing to say whether a prompt starts, and which."""
    wants = "" if need is None else f"; it needs {need:,} KV blocks"
    return Finding(
        "prompt-not-judged",
        Severity.NOTE,
        f"whether a prompt of {tokens:,} tokens starts cannot be said{wants}",
        (),
        (f"give {', '.join(option for option in missing(case, server) if option != '--prompt-tokens')}",),
        numbers={"prompt_tokens": tokens, "blocks_needed": need},
    )


def missing(case: Case | None, server: Server) -> list[str]:
    """Options that would make an answer more exact."""
    names = []
    if case is None:
        names += ["--model"] * (preset_name(server.model) is None)
        names += ["--block-size"] * (server.block_size is None)
    if server.num_blocks is None and server.kv_gib is None and (case is None or case.hbm is None):
        names.append("--num-gpu-blocks")
    names += ["--max-num-batched-tokens"] * (server.max_num_batched_tokens is None)
    return [*names, "--prompt-tokens"] if case is None or case.prompt is None else names


def _numbers(case: Case, batch: int, tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": tokens,
        "max_num_batched_tokens": batch,
        "max_in_flight_tokens": case.limits(batch).max_in_flight_tokens,
    }
    for side, plugin in (("native", False), ("plugin", True)):
        plan = case.plan(plugin=plugin)
        whole = plan.whole_prompt(tokens, case.limits(batch))
        found[side] = {
            "blocks_needed": sum(whole.values()),
            "by_group": whole,
            "free_blocks": case.free(batch, plugin=plugin),
            "block_bytes": plan.block_bytes,
        }
    return found


def _remedies(case: Case, batch: int, tokens: int) -> Iterator[str]:
    """What starts the prompt, each computed; what is often tried and does not help is said to."""
    plan, limits, free = case.plan(plugin=case.plugin), case.limits(batch), case.free(batch, plugin=case.plugin) or 0
    need = _needs(case, plan, batch, tokens)

    def enough(smaller: int, in_flight: int | None = None) -> bool:
        return _needs(case, plan, smaller, tokens, in_flight) <= (case.free(smaller, plugin=case.plugin) or 0)

    if together := largest(enough, batch - 1):
        yield f"--max-num-batched-tokens {together:,} or less"
    if limits.batches_in_flight > 1:
        apart = largest(lambda smaller: enough(smaller, 1), batch)
        if apart == batch:
            yield f"--no-async-scheduling: {_needs(case, plan, batch, tokens, 1):,} blocks"
        elif apart > together:
            yield f"--no-async-scheduling with --max-num-batched-tokens {apart:,} or less"
    cache = (need + NULL_BLOCKS) * plan.block_bytes
    yield (
        f"a KV cache of {gib_up(cache)} GiB on each worker{_with_tails(case, batch, cache)}, {need:,} blocks and the "
        "null block"
    )
    yield _in_chunks(plan.peak(tokens, limits), sum(plan.chunk(min(tokens, batch)).values()), free)
    if not case.plugin:
        sizes, left = case.sizes(batch), case.free(batch, plugin=True) or 0
        wanted = _needs(case, case.plan(plugin=True), batch, tokens)
        yield (
            f"{'' if wanted <= left else 'not even '}this plugin, with the states out of the KV cache: {wanted:,} "
            f"of {left:,} blocks, beside {sizes.device_bytes / MIB:,.1f} MiB for tails of {case.max_num_seqs} "
            f"requests and {sizes.slots} slots"
        )


def _needs(case: Case, plan: KvPlan, batch: int, tokens: int, in_flight: int | None = None) -> int:
    return sum(plan.whole_prompt(tokens, case.limits(batch, in_flight)).values())


def _in_chunks(peak: int, chunk: int, free: int) -> str:
    """What comes of a start that does not ask for the whole prompt."""
    flag = "--no-scheduler-reserve-full-isl"
    if chunk > free:
        return f"not {flag}: the first chunk alone wants {chunk:,} blocks"
    if peak > free:
        return (
            f"not {flag}: it would start with {chunk:,} blocks for the first chunk and never end, for on its way it "
            f"wants {peak:,}: it preempts itself there and begins anew"
        )
    return (
        f"{flag} starts it with {chunk:,} blocks for the first chunk, and on its way it takes {peak:,} at most; "
        "beside others it may be preempted again and again"
    )


def _table(whole: dict[str, int], plan: KvPlan) -> Iterator[str]:
    need = sum(whole.values())
    yield f"{'KV group':<12}{'blocks':>8}{'share':>8}{'tokens a block':>16}{'GiB':>8}"
    for group in plan.groups:
        blocks = whole[group.name]
        each = group.ratio * group.block_rows
        shown = f"{each:,}" + (f" (x{group.count})" if group.count > 1 else "")
        yield (
            f"{group.name:<12}{blocks:>8,}{100 * blocks / need:>6.1f} %{shown:>16}"
            f"{blocks * plan.block_bytes / GIB:>8.2f}"
        )
    yield f"{'all':<12}{need:>8,}{'':>8}{'':>16}{need * plan.block_bytes / GIB:>8.2f}"
