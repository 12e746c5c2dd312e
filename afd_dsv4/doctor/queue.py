# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Says why a queue stands still, with the blocks that are wanted, who multiplies them, and what changes it.

Problem: vLLM counts a request that does not fit as `waiting, reason="capacity"`, at 0 % usage, and no more.
Way: pure functions from one `Server` to findings. The arithmetic is that of `admission.py`, which the tests hold
against the real scheduler; every remedy is computed before it is named, so that one that does not help is not offered.
A queue in which nobody runs and nothing is in use is stuck where a log says that nothing was computed for a whole
interval, or where the prompt that is asked about cannot fit: then nobody will free anything. One instant, which is all
that a metrics page shows, looks the same between two steps of requests that end where they start.
Not here: draft layers, prefix hits, context parallelism (as in `admission.py`), and what a request would find later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from afd_dsv4.admission import (
    ASYNC_BY_DEFAULT,
    GIB,
    NULL_BLOCKS,
    STATE_GROUPS,
    KvPlan,
    SchedulerLimits,
    gib_up,
    kv_plan,
    largest,
)
from afd_dsv4.doctor.facts import Engine, Finding, Server, Severity
from afd_dsv4.doctor.faults import too_long
from afd_dsv4.geometry import InputError, ModelGeometry, PageLayout, preset_name
from afd_dsv4.workspace.sizing import WorkspaceSizes, size_workspace

MIB: Final = 1 << 20
#: Batches for which the largest prompt is shown where the server's own is not known.
TYPICAL_BATCHES: Final = (4096, 8192, 16384, 32768, 65536)
#: What is taken where nobody says: vLLM's default for the first, as `plan` for the second.
ASYNC_ASSUMED: Final = ASYNC_BY_DEFAULT
SEQS_ASSUMED: Final = 16

_NEVER_ADMITTED: Final = ("vllm-project/vllm-ascend#15204", "vllm-project/afd-plugin#292")
_WINDOWS: Final = ("vllm-project/vllm#54703",)
_STUCK: Final = (*_NEVER_ADMITTED, "vllm-project/vllm-metal#479")
_SECOND_LOOK: Final = (
    "take a second page 10 s later: where it shows the same, and vllm:prompt_tokens_total and "
    "vllm:generation_tokens_total have not grown, the queue is stuck; a log, with --log, says so by itself"
)


@dataclass(frozen=True)
class Case:
    """One server, complete enough to count blocks.

    Attributes:
        server: its numbers.
        geometry: the model.
        layout: pages of its stack and block size.
        prompt: tokens of the prompt that is asked about, None for none.
        hbm: bytes for the KV cache and all that the plugin reserves; None where the server's blocks are known.
        slots: workspace slots of the plugin.
        tile_tokens: of its afd executor; None where the stock operator compresses.
    """

    server: Server
    geometry: ModelGeometry
    layout: PageLayout
    prompt: int | None = None
    hbm: int | None = None
    slots: int = 2
    tile_tokens: int | None = None

    @property
    def max_model_len(self) -> int:
        """Longest sequence; the model's where the server's is not known."""
        return self.server.max_model_len or self.geometry.max_position_embeddings

    @property
    def max_num_seqs(self) -> int:
        """Requests at once."""
        return self.server.max_num_seqs or SEQS_ASSUMED

    def limits(self, batch: int, in_flight: int | None = None) -> SchedulerLimits:
        """The scheduler's settings with this batch."""
        asynchronous = ASYNC_ASSUMED if self.server.async_scheduling is None else self.server.async_scheduling
        return SchedulerLimits(batch, self.max_model_len, self.max_num_seqs, in_flight or 1 + asynchronous)

    def plan(self, *, plugin: bool) -> KvPlan:
        """The KV groups of one side."""
        return kv_plan(self.geometry, self.layout, plugin=plugin)

    def sizes(self, batch: int) -> WorkspaceSizes:
        """What the plugin reserves."""
        return size_workspace(
            self.geometry,
            self.layout,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=batch,
            slots=self.slots,
            tile_tokens=self.tile_tokens,
        )

    def kv_bytes(self, batch: int) -> int | None:
        """Bytes of both sides together: the KV cache, and with the plugin what it reserves beside it."""
        if self.hbm is not None:
            return self.hbm
        here = self.plan(plugin=bool(self.server.plugin)).block_bytes
        if self.server.num_blocks is not None:
            found = self.server.num_blocks * here
        elif self.server.kv_gib is not None:
            found = int(self.server.kv_gib * GIB)
        else:
            return None
        return found + (self.sizes(batch).device_bytes if self.server.plugin else 0)

    def free(self, batch: int, *, plugin: bool) -> int | None:
        """Blocks that one side can hand out when nothing runs; 0 where there is none, None where it is not known."""
        whole = self.kv_bytes(batch)
        if whole is None:
            return None
        whole -= self.sizes(batch).device_bytes if plugin else 0
        return max(whole // self.plan(plugin=plugin).block_bytes - NULL_BLOCKS, 0)


def findings(case: Case | None, server: Server, prompt: int | None = None) -> Iterator[Finding]:
    """Everything that the numbers say.

    Args:
        case: the server with its model, None where blocks cannot be counted.
        server: the same numbers.
        prompt: tokens of the prompt that is asked about, the same as the case's where there is one.
    """
    verdict = None
    if case is None and prompt is not None:
        yield _not_judged(case, server, prompt)
    if case is not None:
        small = _too_little(case)
        if small:
            yield small
        verdict = _prompt(case)
        if verdict:
            yield verdict
            if verdict.code == "prompt-never-fits":  # which explains a queue that is stuck, too
                yield from _moving(server)
                yield from _hits(case, server)
                return
    sure = [engine for engine in server.engines if engine.stuck]
    if sure and not (verdict and verdict.code == "stuck-although-it-fits"):
        yield _stuck(sure, case, server)
    if unsure := [engine for engine in server.engines if engine.looks_stuck and not engine.stuck]:
        yield _stuck(unsure, case, server)
    yield from _moving(server)
    yield from _hits(case, server)


def _too_little(case: Case) -> Finding | None:
    """vLLM's check at start-up, where the memory is a plan; a server that runs has passed its own."""
    batch = case.server.max_num_batched_tokens
    if case.hbm is None or batch is None:
        return None
    side = bool(case.server.plugin)
    plan, limits = case.plan(plugin=side), case.limits(batch)
    reserved = case.sizes(batch).device_bytes if side else 0
    have = case.hbm - reserved
    if have < (1 + NULL_BLOCKS) * plan.block_bytes:
        least = reserved + (1 + NULL_BLOCKS) * plan.block_bytes
        return Finding(
            "cache-too-small",
            Severity.PROBLEM,
            f"{case.hbm:,} B hold no KV block: a block spans all {case.geometry.num_layers} layers and takes "
            f"{plan.block_bytes:,} B, and block 0 is never handed out",
            (f"The plugin takes {reserved:,} B of it before.",) if reserved else (),
            (f"offer at least {gib_up(least)} GiB",),
            (),
            {"bytes": case.hbm, "block_bytes": plan.block_bytes, "reserved_bytes": reserved, "least_bytes": least},
        )
    if case.server.max_model_len is None:
        return None

    def need(length: int) -> int:
        return plan.at_startup(replace(limits, max_model_len=length)) * plan.block_bytes

    wanted = need(case.max_model_len)
    if wanted <= have:
        return None
    fits = largest(lambda length: need(length) <= have, case.max_model_len)
    why = (
        (
            f"Before it starts, vLLM asks whether one sequence of {case.max_model_len:,} tokens fits: "
            f"{wanted // plan.block_bytes:,} blocks of {plan.block_bytes:,} B, {have // plan.block_bytes:,} there are."
        ),
        _multiplier({g.name: g.cap(limits) for g in plan.groups}, plan, case),
    )
    smaller = largest(lambda tokens: plan.at_startup(case.limits(tokens)) * plan.block_bytes <= have, batch - 1)
    remedies = [f"--max-num-batched-tokens {smaller:,} or less"] if smaller else []
    remedies += [f"--max-model-len {fits:,} or less"] if fits else []
    remedies.append(f"a KV cache of {gib_up(wanted)} GiB")
    if not side:
        mine = case.plan(plugin=True)
        total = mine.at_startup(limits) * mine.block_bytes + case.sizes(batch).device_bytes
        if total <= case.hbm:
            remedies.append(f"this plugin, with which {gib_up(total)} GiB are enough, tails and slots included")
    return Finding(
        "cache-too-small",
        Severity.PROBLEM,
        f"the server would not start: a sequence of {case.max_model_len:,} tokens wants {gib_up(wanted)} GiB of KV "
        f"cache, there are {_gib(have)}",
        why,
        tuple(remedies),
        ("vllm-project/vllm-ascend#14678", "vllm-project/vllm-ascend#9975"),
        {
            "max_model_len": case.max_model_len,
            "need_bytes": wanted,
            "need_blocks": wanted // plan.block_bytes,
            "available_bytes": have,
            "fitting_max_model_len": fits,
            "fitting_max_num_batched_tokens": smaller,
        },
    )


def _prompt(case: Case) -> Finding | None:
    if case.prompt is None:
        return None
    longest = case.max_model_len
    if case.prompt >= longest:  # of as many tokens, none could be generated
        known = case.server.max_model_len is not None
        what = "the server refuses it" if known else "that is all the model can do"
        return too_long(case.prompt, longest, what, case.geometry.max_position_embeddings)
    batch = case.server.max_num_batched_tokens
    if batch is None:
        return _not_judged(case, case.server, case.prompt)
    side = bool(case.server.plugin)
    plan, limits, free = case.plan(plugin=side), case.limits(batch), case.free(batch, plugin=side)
    whole = plan.whole_prompt(case.prompt, limits)
    need = sum(whole.values())
    if free is None:
        return _not_judged(case, case.server, case.prompt, need)
    if need <= free:
        stuck = [engine for engine in case.server.engines if engine.stuck]
        return _fits_and_waits(case, need, free, stuck) if stuck else _fits(case, batch, need, free)
    why = [
        *_table(whole, plan),
        _multiplier(whole, plan, case),
        (
            "The scheduler starts a prompt only when all blocks of the whole prompt are free. Until then nothing is "
            "stored: usage stays at 0 %, and nothing behind it in the queue is tried."
        ),
    ]
    why += [f"So it is here: {_queue(engine)}." for engine in case.server.engines if engine.looks_stuck]
    why += _should_not_run(case, batch)
    return Finding(
        "prompt-never-fits",
        Severity.PROBLEM,
        f"a prompt of {case.prompt:,} tokens never starts: it needs {need:,} KV blocks, and {free:,} are free when "
        "nothing runs",
        tuple(why),
        tuple(_remedies(case, batch, need, free)),
        _WINDOWS if side else _NEVER_ADMITTED,
        _numbers(case, batch),
    )


def _fits(case: Case, batch: int, need: int, free: int) -> Finding:
    assert case.prompt is not None
    return Finding(
        "prompt-fits",
        Severity.NOTE,
        f"a prompt of {case.prompt:,} tokens starts as soon as {need:,} of {free:,} KV blocks are free",
        numbers=_numbers(case, batch),
    )


def _not_judged(case: Case | None, server: Server, prompt: int, need: int | None = None) -> Finding:
    wants = "" if need is None else f"; it needs {need:,} KV blocks"
    return Finding(
        "prompt-not-judged",
        Severity.NOTE,
        f"whether a prompt of {prompt:,} tokens starts cannot be said{wants}",
        (),
        (f"give {', '.join(option for option in _missing(case, server) if option != '--prompt-tokens')}",),
        numbers={"prompt_tokens": prompt, "blocks_needed": need},
    )


def _should_not_run(case: Case, batch: int) -> Iterator[str]:
    """What vLLM's own check at start-up, which asks for nearly the same, would have said to a server that runs."""
    server = case.server
    if server.max_model_len is None or server.num_blocks is None:
        return
    wanted = case.plan(plugin=bool(server.plugin)).at_startup(case.limits(batch))
    if wanted > server.num_blocks:
        yield (
            f"With these numbers vLLM's check at start-up wants {wanted:,} blocks and refuses to start. That the "
            "server runs means that its vllm-ascend counts otherwise there, or that a number here is not its own."
        )


def _numbers(case: Case, batch: int) -> dict[str, Any]:
    assert case.prompt is not None
    found: dict[str, Any] = {
        "prompt_tokens": case.prompt,
        "max_num_batched_tokens": batch,
        "max_in_flight_tokens": case.limits(batch).max_in_flight_tokens,
    }
    for side, plugin in (("native", False), ("plugin", True)):
        plan = case.plan(plugin=plugin)
        whole = plan.whole_prompt(case.prompt, case.limits(batch))
        found[side] = {
            "blocks_needed": sum(whole.values()),
            "by_group": whole,
            "free_blocks": case.free(batch, plugin=plugin),
            "block_bytes": plan.block_bytes,
        }
    return found


def _fits_and_waits(case: Case, need: int, free: int, stuck: list[Engine]) -> Finding:
    return Finding(
        "stuck-although-it-fits",
        Severity.PROBLEM,
        f"{_queue(stuck[0])}, although a prompt of {case.prompt:,} tokens needs {need:,} of {free:,} blocks",
        (
            (
                "By these numbers it starts. So the first request of the queue is another, longer one, behind which "
                "this one waits; or a number here is not the server's."
            ),
        ),
        ("compare the numbers above with the server's log (give it with --log)",),
        _STUCK,
        _numbers(case, case.server.max_num_batched_tokens or 0),
    )


def _remedies(case: Case, batch: int, need: int, free: int) -> Iterator[str]:
    """What starts the prompt, each computed; what is often tried and does not help is said to."""
    assert case.prompt is not None
    side = bool(case.server.plugin)
    plan, limits = case.plan(plugin=side), case.limits(batch)

    def enough(tokens: int, in_flight: int | None = None) -> bool:
        return sum(plan.whole_prompt(case.prompt or 0, case.limits(tokens, in_flight)).values()) <= free

    if smaller := largest(enough, batch - 1):
        yield f"--max-num-batched-tokens {smaller:,} or less"
    if limits.batches_in_flight > 1:
        apart = sum(plan.whole_prompt(case.prompt, case.limits(batch, 1)).values())
        larger = largest(lambda tokens: enough(tokens, 1), batch - 1)
        if apart <= free:
            yield f"--no-async-scheduling: {apart:,} blocks"
        elif larger > smaller:
            yield f"--no-async-scheduling with --max-num-batched-tokens {larger:,} or less"
    gib = gib_up((need + NULL_BLOCKS) * plan.block_bytes)
    yield f"a KV cache of {gib} GiB on each worker, {need:,} blocks and the null block"
    chunk, peak = sum(plan.chunk(min(case.prompt, batch)).values()), plan.peak(case.prompt, limits)
    flag = "--no-scheduler-reserve-full-isl"
    if chunk > free:
        yield f"not {flag}: the first chunk alone wants {chunk:,} blocks"
    elif peak > free:
        yield (
            f"not {flag}: it would start with {chunk:,} blocks for the first chunk and never end, for on its way it "
            f"wants {peak:,}: it preempts itself there and begins anew"
        )
    else:
        yield (
            f"{flag} starts it with {chunk:,} blocks for the first chunk, and on its way it takes {peak:,} at most; "
            "beside others it may be preempted again and again"
        )
    if not side:
        mine, left = case.plan(plugin=True), case.free(batch, plugin=True) or 0
        wanted = sum(mine.whole_prompt(case.prompt, limits).values())
        sizes = case.sizes(batch)
        yield (
            f"{'' if wanted <= left else 'not even '}this plugin, with the states out of the KV cache: {wanted:,} "
            f"of {left:,} blocks, beside {sizes.device_bytes / MIB:,.1f} MiB for tails of {case.max_num_seqs} "
            f"requests and {sizes.slots} slots"
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


def _multiplier(whole: dict[str, int], plan: KvPlan, case: Case) -> str:
    """Who multiplies: the states where they are paged, otherwise the sliding windows."""
    state = sum(whole.get(name, 0) for name in STATE_GROUPS)
    share = 100 * state / sum(whole.values())
    block = f"a block spans all {case.geometry.num_layers} layers and takes {plan.block_bytes:,} B, whoever asks for it"
    if state:
        return (
            f"Who multiplies: the compressors' states, {state:,} blocks ({share:.0f} %). A C4 compressor takes one for "
            f"every {case.layout.c4_page_rows} tokens of the batch, C128 one for every {case.layout.c128_page_rows}, "
            f"and {block}. Later steps read at most 7 rows of a C4 and 127 of a C128 compressor again."
        )
    swa = whole["swa"]
    return (
        f"Who multiplies: the sliding windows, {swa:,} blocks ({100 * swa / sum(whole.values()):.0f} %), each group "
        f"one for every {case.layout.swa_rows} tokens of the batch; {block}."
    )


def _stuck(engines: list[Engine], case: Case | None, server: Server) -> Finding:
    """A queue that is stuck, or looks so, with nobody knowing of what length its first prompt is."""
    sure = engines[0].stuck
    batch, side = server.max_num_batched_tokens, bool(server.plugin)
    if case:
        free = case.free(batch or TYPICAL_BATCHES[-1], plugin=side)
    else:
        free = server.num_blocks - NULL_BLOCKS if server.num_blocks else None
    blocks = f"all {'' if free is None else f'{free:,} '}blocks are free"
    certain = (
        f"Nobody runs and nothing was computed, so {blocks}, and still the first request of the queue wants more. "
        "Nobody will free any: it waits until it is aborted or the server is restarted, and nothing behind it is tried."
    )
    perhaps = (
        f"Nobody runs, so {blocks}. Either the first request of the queue wants more, and then it waits until it is "
        "aborted or the server is restarted; or this is an instant between two steps, as of a server whose requests "
        "end in the step in which they start, for one token each. One page cannot tell which."
    )
    why = [
        certain if sure else perhaps,
        *(f"The same elsewhere: {_queue(engine)}." for engine in engines[1:]),
    ]
    remedies = [] if sure else [_SECOND_LOOK]
    numbers: dict[str, Any] = {
        "engines": {engine.name: engine.for_capacity for engine in engines},
        "free_blocks": free,
    }
    if case and free is not None:
        rows = _largest_prompts(case, (batch,) if batch else TYPICAL_BATCHES)
        numbers["largest_prompt"] = {str(tokens): {"native": one, "plugin": two} for tokens, one, two in rows}
        why += [
            f"{'tokens a step':<16}{'largest prompt that starts, natively':>38}{'with this plugin':>20}",
            *(
                f"{tokens:<16,}{_prompt_shown(one, case):>38}{_prompt_shown(two, case):>20}"
                for tokens, one, two in rows
            ),
        ]
        if all(row[1 + side] == case.max_model_len - 1 for row in rows):
            why.append(
                "By these numbers every prompt starts: one of them is not the server's, or its model is another."
            )
        elif not side:
            why.append(
                f"Who multiplies: the compressors' states, one block for every {case.layout.c4_page_rows} tokens "
                f"(C4) and one for every {case.layout.c128_page_rows} (C128) of the batch."
            )
            remedies.append("a smaller --max-num-batched-tokens, or this plugin: see the table")
    if case and batch:
        why += _should_not_run(case, batch)
    if case is None and _another_model(server):
        why.append(f"Blocks are counted for DeepSeek-V4 only, and {server.model} is not called so (--model decides).")
    elif missing := _missing(case, server):
        remedies.append(f"to know more, give {', '.join(missing)}")
    if not sure:
        title = f"{_queue(engines[0])}: it looks stuck"
        return Finding("looks-stuck", Severity.PROBLEM, title, tuple(why), tuple(remedies), _STUCK, numbers)
    return Finding(
        "stuck-queue",
        Severity.PROBLEM,
        f"{_queue(engines[0])}: the first of the queue never starts",
        tuple(why),
        tuple(remedies),
        _STUCK,
        numbers,
    )


def _another_model(server: Server) -> bool:
    return server.model is not None and "deepseek" not in server.model.lower()


def _missing(case: Case | None, server: Server) -> list[str]:
    options = []
    if case is None:
        options += ["--model"] * (preset_name(server.model) is None)
        options += ["--block-size"] * (server.block_size is None)
    if server.num_blocks is None and server.kv_gib is None and (case is None or case.hbm is None):
        options.append("--num-gpu-blocks")
    options += ["--max-num-batched-tokens"] * (server.max_num_batched_tokens is None)
    return [*options, "--prompt-tokens"] if case is None or case.prompt is None else options


def _largest_prompts(case: Case, batches: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return [(batch, _largest_prompt(case, batch, False), _largest_prompt(case, batch, True)) for batch in batches]


def _largest_prompt(case: Case, batch: int, plugin: bool) -> int:
    plan, free, limits = case.plan(plugin=plugin), case.free(batch, plugin=plugin) or 0, case.limits(batch)
    return largest(lambda tokens: sum(plan.whole_prompt(tokens, limits).values()) <= free, case.max_model_len - 1)


def _prompt_shown(tokens: int, case: Case) -> str:
    return "any" if tokens == case.max_model_len - 1 else f"{tokens:,}" if tokens else "none"


def _moving(server: Server) -> Iterator[Finding]:
    """Queues that stand in line, and are not stuck."""
    for engine in server.engines:
        if engine.deferred:
            held = f" ({server.kv_connector})" if server.kv_connector else ""
            yield Finding(
                "deferred",
                Severity.NOTE,
                f"{engine.label}: {_requests(engine.deferred)} deferred, for a KV transfer{held}, a LoRA adapter or a "
                "grammar, not for blocks",
                ("More blocks do not help them; look at the connector's own log and metrics.",),
                (),
                ("vllm-project/vllm-ascend#13478",),
                {"engine": engine.name, "deferred": engine.deferred},
            )
        if engine.asleep:
            yield _asleep(engine)
        elif engine.for_capacity and (engine.running or engine.usage or engine.throughput):
            in_use = "an unknown share" if engine.usage is None else f"{100 * engine.usage:.1f} %"
            who = f"{engine.running} running" if engine.running else "nobody runs"
            who += f", {engine.throughput:,.1f} tokens a second" if engine.throughput else ""
            if not engine.name.isdigit() and not engine.name.startswith("1 "):
                yield _of_several(engine, who)
                continue
            yield Finding(
                "queue-moves",
                Severity.NOTE,
                f"{engine.label}: {_requests(engine.for_capacity)} waiting behind others: {who}, {in_use} of the KV "
                "cache is in use",
                (
                    (
                        "Not stuck as long as running requests end. A second look that shows the same numbers says "
                        "otherwise."
                    ),
                ),
                (),
                (),
                {"engine": engine.name, "waiting": engine.for_capacity, "running": engine.running},
            )


def _of_several(engine: Engine, who: str) -> Finding:
    return Finding(
        "queue-not-known",
        Severity.NOTE,
        f"{engine.label}: {_requests(engine.for_capacity)} waiting, {who}: whether they wait behind others or in an "
        "engine that is stuck is not known",
        ("That line of the log adds all engines up: one may run while another stands still.",),
        ("give the metrics page, which shows every engine by itself, with --metrics",),
        numbers={"engines": engine.name, "waiting": engine.for_capacity, "running": engine.running},
    )


def _asleep(engine: Engine) -> Finding:
    waiting = engine.for_capacity
    return Finding(
        "asleep",
        Severity.PROBLEM if waiting else Severity.NOTE,
        f"{engine.label} sleeps, with {_requests(waiting)} waiting",
        ("A sleeping engine starts nothing, however many blocks are free.",),
        ("wake it: POST /wake_up, or LLM.wake_up()",),
        (),
        {"engine": engine.name, "waiting": waiting},
    )


def hit_multiple(layout: PageLayout) -> int:
    """Tokens in whole multiples of which a prefix hit comes: the least common multiple of all groups' blocks.

    `vllm/v1/core/kv_cache_utils.py:resolve_kv_cache_block_sizes`. The plugin changes nothing: C128's own blocks make
    it.
    """
    return math.lcm(
        4 * layout.kv_rows, 128 * layout.kv_rows, layout.swa_rows, layout.c4_page_rows, layout.c128_page_rows
    )


def _hits(case: Case | None, server: Server) -> Iterator[Finding]:
    if server.prefix_caching is False or server.hits != 0 or not server.queries or case is None:
        return
    multiple = hit_multiple(case.layout)
    prompt = case.prompt if case.prompt is not None else server.mean_prompt
    blocks = (
        f"c4_mla {4 * case.layout.kv_rows:,}, c128_mla {128 * case.layout.kv_rows:,}, swa {case.layout.swa_rows}, "
        f"c4_state {case.layout.c4_page_rows}, c128_state {case.layout.c128_page_rows}"
    )
    whose = "the prompt has" if case.prompt is not None else "prompts have on average"
    if prompt is not None and prompt > multiple:
        yield Finding(
            "no-prefix-hits",
            Severity.NOTE,
            f"no hit in {server.queries:,} tokens asked of the prefix cache, although {whose} {prompt:,.0f} tokens "
            f"and a hit needs {multiple:,}",
            ("Either no two prompts begin alike, or drafts drop the last block of each hit and with it the multiple.",),
            (),
            ("vllm-project/vllm-ascend#9845", "vllm-project/vllm-ascend#13627"),
            {"multiple": multiple, "queries": server.queries, "mean_prompt": server.mean_prompt},
        )
        return
    remedies = [
        f"prompts that share more than {multiple:,} tokens, or --no-enable-prefix-caching, since it only costs here"
    ]
    if case.layout.block_size > 32:
        remedies.insert(0, "--block-size 32, with which a hit needs 4,096")
    yield Finding(
        "prefix-hits-zero",
        Severity.PROBLEM,
        f"no hit in {server.queries:,} tokens asked of the prefix cache: with block size {case.layout.block_size} "
        f"hits come in multiples of {multiple:,} tokens",
        (
            (
                f"The tokens of a block, by KV group: {blocks}. A hit must end at a block of every group, so in a "
                f"multiple of all of them, {multiple:,}; and the last token of a prompt is always computed. A prompt "
                f"of up to {multiple:,} tokens never hits."
            ),
            *([f"Here {whose} {prompt:,.0f} tokens."] if prompt is not None else []),
            "The plugin does not change this, and does not run with prefix caching yet.",
        ),
        tuple(remedies),
        ("vllm-project/vllm-ascend#16270", "vllm-project/vllm-ascend#12589")[: 1 + (case.layout.block_size > 32)],
        {"multiple": multiple, "queries": server.queries, "hits": 0, "mean_prompt": server.mean_prompt},
    )


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


def _queue(engine: Engine) -> str:
    waiting = _requests(engine.for_capacity)
    return f"{engine.label}: {waiting} waiting for capacity, none running, 0 % of the KV cache in use"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def case_of(server: Server, geometry: ModelGeometry | None, layout: PageLayout | None, **rest: Any) -> Case | None:
    """A case where both model and pages are known, otherwise None.

    Raises:
        InputError: a model whose pages the stack does not have.
    """
    if geometry is None or layout is None:
        return None
    case = Case(server, geometry, layout, **rest)
    for plugin in (False, True):
        case.plan(plugin=plugin)  # raises here, and not in the middle of an answer
    if case.hbm is not None and case.hbm < 1:
        raise InputError("HBM budget", f"{case.hbm} bytes", "give a positive number")
    return case
