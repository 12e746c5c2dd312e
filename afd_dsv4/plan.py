# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""`afd-dsv4 plan`: what prompts need, natively and with the plugin, over any lists of settings.

Problem: one answer says that a prompt waits; it does not say how far away from starting it is, which setting would move
it how much, or what stands in the way next once the compressor state is gone.
Way: a `Question` is one combination of settings. `answer` asks `admission` and `workspace/sizing.py` for both sides and
searches what follows from them: the largest chunk with which the prompt still starts, how many such prompts fit at
once, and the KV groups that limit both. `sweep` does so for every combination, `document` is the whole as JSON.
Not here: any formula about blocks (`admission.py`), pages (`plan_page.py`), options (`cli.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from afd_dsv4.admission import (
    GIB,
    GROUP_NAMES,
    MIB,
    NULL_BLOCKS,
    STATE_GROUPS,
    Admission,
    KvPlan,
    SchedulerLimits,
    admit,
    gib_up,
    kv_plan,
    largest,
)
from afd_dsv4.geometry import InputError, ModelGeometry, PageLayout
from afd_dsv4.workspace.sizing import WorkspaceSizes, size_workspace

MOST_COMBINATIONS: Final = 1000
SIDES: Final = ("native", "plugin")
MAX_NUM_SEQS: Final = "max_num_seqs"  # what limits requests where blocks do not
SEQS_MARK: Final = "*"  # the same in a table
LEAST_CURVE: Final = 1024  # tokens of the smallest chunk of a curve that nobody asked for
HBM_WORDS: Final = "GiB a rank for the KV cache and all that the plugin reserves, not the card's size"

GROUP_WORDS: Final = {
    "c4_mla": "compressed rows of C4 layers",
    "c128_mla": "compressed rows of C128 layers",
    "swa": "the sliding-window groups",
    "c4_state": "C4 compressor state",
    "c128_state": "C128 compressor state",
}


@dataclass(frozen=True)
class Question:
    """One combination of settings.

    Attributes:
        geometry: the model.
        layout: page sizes of the stack for the block size.
        stack: its name.
        prompt_tokens: tokens of the prompt.
        max_num_batched_tokens: most tokens of a step, which is the chunk of a long prompt.
        max_num_seqs: most requests at once; what the plugin reserves for.
        max_model_len: longest sequence.
        async_scheduling: two batches in flight instead of one.
        slots: workspace slots.
        executor: what compresses.
        tile_tokens: tokens that it stages at once, None where it stages none.
        drafts: draft tokens that a forward may have to take back; tails are sized for them.
        free_blocks: free KV blocks of both sides, None where not given.
        hbm_gib: memory of the KV cache and the plugin together, None where not given.
    """

    geometry: ModelGeometry
    layout: PageLayout
    stack: str
    prompt_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    async_scheduling: bool
    slots: int
    executor: str
    tile_tokens: int | None
    drafts: int = 0
    free_blocks: int | None = None
    hbm_gib: float | None = None

    def __post_init__(self) -> None:
        most = self.geometry.max_position_embeddings
        if self.max_model_len > most:
            raise InputError("max-model-len", f"{self.max_model_len}, {self.geometry.name} ends at {most}", "lower it")

    @property
    def limits(self) -> SchedulerLimits:
        """Settings of the scheduler."""
        return SchedulerLimits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            batches_in_flight=2 if self.async_scheduling else 1,
        )

    @cached_property
    def sizes(self) -> WorkspaceSizes:
        """What the plugin takes."""
        return size_workspace(
            self.geometry,
            self.layout,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            drafts=self.drafts,
            slots=self.slots,
            tile_tokens=self.tile_tokens,
        )

    def plan(self, side: str) -> KvPlan:
        """The KV groups of a side."""
        return kv_plan(self.geometry, self.layout, plugin=side == "plugin")

    def free(self, side: str, plan: KvPlan) -> int | None:
        """Blocks that a side can hand out, None where no memory was given; 0 where the plugin reserves too much of it.

        Raises:
            InputError: the memory holds not even two blocks where nothing is reserved: nobody has an answer.
        """
        if self.hbm_gib is None:
            return self.free_blocks
        budget = int(self.hbm_gib * GIB)
        if side == "plugin":
            return max((budget - self.sizes.device_bytes) // plan.block_bytes - NULL_BLOCKS, 0)
        try:
            return plan.free_blocks(budget)
        except InputError:
            raise InputError(
                "HBM budget",
                f"{exact(self.hbm_gib)} GiB hold no two KV blocks of {plan.block_bytes:,} bytes; the first is never "
                "handed out",
                f"offer at least {gib_up((1 + NULL_BLOCKS) * plan.block_bytes)} GiB",
            ) from None

    def in_chunks(self, tokens: int) -> Question:
        """The same with another chunk."""
        return replace(self, max_num_batched_tokens=tokens)

    def needs(self, plan: KvPlan) -> int:
        """Blocks that must be free for the prompt to start."""
        return sum(plan.whole_prompt(self.prompt_tokens, self.limits).values())


@dataclass(frozen=True)
class Side:
    """The answer for one side.

    Attributes:
        admission: what the scheduler does, and why.
        block_bytes: bytes of one block.
        largest_chunk: most tokens of a step with which the prompt starts, at most the prompt; 0 if with none, None if
            the memory is not known.
        requests: such prompts that are there at once, each prefilled when the others are; None if not known.
        resident: blocks that a prefilled prompt keeps, by kind of group.
    """

    admission: Admission
    block_bytes: int
    largest_chunk: int | None
    requests: int | None
    resident: dict[str, int]


@dataclass(frozen=True)
class Answer:
    """Both sides of one question, or why there is no answer."""

    question: Question
    sides: dict[str, Side]
    refused: str | None = None


def answer(question: Question) -> Answer:
    """Ask for both sides.

    Raises:
        InputError: a prompt longer than the model, or memory that holds nothing.
    """
    sides = {}
    for side in SIDES:
        plan = question.plan(side)
        free = question.free(side, plan)
        found = admit(plan, question.prompt_tokens, question.limits, free)
        if not _reserve_fits(question, found):
            found = replace(found, reason=_why_nothing_is_left(question, plan))
        resident = {group.name: group.held(question.prompt_tokens, question.prompt_tokens) for group in plan.groups}
        sides[side] = Side(
            admission=found,
            block_bytes=plan.block_bytes,
            largest_chunk=None if free is None else _largest(question.prompt_tokens, question.in_chunks, side, plan),
            requests=None if free is None else _requests(found, sum(resident.values()), question.max_num_seqs),
            resident={name: resident.get(name, 0) for name in GROUP_NAMES},
        )
    return Answer(question, sides)


def _reserve_fits(question: Question, found: Admission) -> bool:
    """Whether what a side reserves leaves blocks; with a number of blocks the memory beside them is somebody else's."""
    return question.hbm_gib is None or bool(found.free_blocks)


def _why_nothing_is_left(question: Question, plan: KvPlan) -> str:
    """Of the plugin, with what would start the prompt; each is tried before it is said."""
    assert question.hbm_gib is not None
    reserved = question.sizes.device_bytes
    text = (
        f"no server starts: {exact(question.hbm_gib)} GiB do not hold the {reserved:,} bytes that the plugin reserves "
        f"and two KV blocks of {plan.block_bytes:,}, of which the first is never handed out. To start the prompt: "
        f"{gib_up((question.needs(plan) + NULL_BLOCKS) * plan.block_bytes + reserved)} GiB"
    )
    ways: list[tuple[str, int, Callable[[int], Question]]] = [
        ("--max-num-seqs", question.max_num_seqs, lambda value: replace(question, max_num_seqs=value)),
        ("--slots", question.slots, lambda value: replace(question, slots=value)),
        ("--max-num-batched-tokens", question.max_num_batched_tokens, question.in_chunks),
    ]
    for option, now, tried in ways:
        if fits := _largest(now - 1, tried, "plugin", plan):
            text += f", or {option} {fits:,}{' or less' if fits > 1 else ''}"
    return text


def _largest(most: int, tried: Callable[[int], Question], side: str, plan: KvPlan) -> int:
    """The largest value of a setting with which the prompt starts, 0 if none."""

    def starts(value: int) -> bool:
        question = tried(value)
        free = question.free(side, plan)
        return free is not None and question.needs(plan) <= free

    return largest(starts, most)


def _requests(found: Admission, resident: int, most: int) -> int:
    """The last of them needs its whole prompt free while the others keep what they keep."""
    left = (found.free_blocks or 0) - found.blocks_needed
    return 0 if left < 0 else min(most, 1 + left // max(resident, 1))


def sweep(questions: Sequence[Question]) -> list[Answer]:
    """Answer every question; one that has no answer says so in its place.

    Raises:
        InputError: none of them has an answer.
    """
    answers, first = [], None
    for question in questions:
        try:
            answers.append(answer(question))
        except InputError as error:
            first = first or error
            answers.append(Answer(question, {}, str(error)))
    if first and all(entry.refused for entry in answers):
        raise first
    return answers


def combinations(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """One of each list, in every way.

    Raises:
        InputError: more than `MOST_COMBINATIONS`.
    """
    count = math.prod(map(len, lists))
    if count > MOST_COMBINATIONS:
        raise InputError("plan", f"the lists give {count:,} combinations", f"ask for at most {MOST_COMBINATIONS:,}")
    return list(itertools.product(*lists))


def as_json(entry: Answer) -> dict[str, Any]:
    """One answer as `plan --json` prints it."""
    question, limits, sizes = entry.question, entry.question.limits, entry.question.sizes
    found: dict[str, Any] = {
        "stack": question.stack,
        "model": question.geometry.name,
        "prompt_tokens": question.prompt_tokens,
        "block_size": question.layout.block_size,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_in_flight_tokens": limits.max_in_flight_tokens,
        "async_scheduling": question.async_scheduling,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
    }
    for name, side in entry.sides.items():
        admission = side.admission
        found[name] = {
            "blocks_needed": admission.blocks_needed,
            "by_group": admission.by_group,
            "first_chunk_blocks": sum(admission.first_chunk.values()),
            "first_chunk_by_group": admission.first_chunk,
            "free_blocks": admission.free_blocks,
            "block_bytes": side.block_bytes,
            "admitted": admission.admitted,
            "reason": admission.reason,
        }
    if entry.sides:
        found["plugin"] |= {
            "tail_bytes_per_request": sizes.tail_bytes_per_request,
            "tail_bytes": sizes.tail_bytes,
            "executor": question.executor,
            "drafts": question.drafts,
            "slots": sizes.slots,
            "slot_bytes": sizes.slot_bytes,
            "reserved_bytes": sizes.device_bytes,
            "reserve_fits": _reserve_fits(question, entry.sides["plugin"].admission),
            "host_bytes": sizes.host_bytes,
        }
    return found


def document(answers: Sequence[Answer], command: Sequence[str]) -> dict[str, Any]:
    """A sweep as JSON; what the page shows, and no more.

    `part` numbers the settings of one picture, `hardest` the answer that the next limits are taken from.
    """
    facets = dict.fromkeys(facet(entry.question) for entry in answers)
    parts = {settings: number for number, settings in enumerate(facets)}
    return {
        "command": list(command),
        "hardest": hardest(answers),
        "answers": [{"part": parts[facet(entry.question)], **_wide(entry)} for entry in answers],
        "curves": [{"part": parts[facet(group[0].question)], **_curve(group)} for group in _by_chunk(answers)],
    }


def _wide(entry: Answer) -> dict[str, Any]:
    question = entry.question
    found = as_json(entry) | {"free_blocks": question.free_blocks, "hbm_gib": question.hbm_gib}
    if entry.refused:
        return found | {"refused": entry.refused}
    for name, side in entry.sides.items():
        kv_bytes = (side.admission.blocks_needed + NULL_BLOCKS) * side.block_bytes  # as `admit` says it in GiB
        reserved = question.sizes.device_bytes if name == "plugin" else 0
        found[name] |= {
            "needed_bytes": kv_bytes + reserved,
            "kv_bytes": kv_bytes,
            "largest_chunk": side.largest_chunk,
            "requests_at_once": side.requests,
            "resident_blocks": sum(side.resident.values()),
            "resident_by_group": side.resident,
            "start_limited_by": most_of(side.admission.by_group),
            "requests_limited_by": requests_limited_by(question, side),
        }
    return found


def requests_limited_by(question: Question, side: Side) -> str:
    """What keeps one more request from being there: the setting, or the kind of group with the most of all blocks then.

    Those are what all that are there keep, and what the one more needs to start.
    """
    if side.requests == question.max_num_seqs:
        return MAX_NUM_SEQS
    there = side.requests or 0
    return most_of({name: need + there * side.resident[name] for name, need in side.admission.by_group.items()})


def most_of(by_group: Mapping[str, int]) -> str:
    """The kind of group with the most blocks."""
    return max(by_group, key=lambda name: by_group[name])


def facet(question: Question) -> tuple[Any, ...]:
    """What answers of one picture have in common: everything but prompt and chunk."""
    return (
        question.geometry,
        question.layout.block_size,
        question.max_num_seqs,
        question.hbm_gib,
        question.free_blocks,
    )


def _by_chunk(answers: Sequence[Answer]) -> list[list[Answer]]:
    groups: dict[tuple[Any, ...], list[Answer]] = {}
    for entry in answers:
        if not entry.refused:
            groups.setdefault((facet(entry.question), entry.question.prompt_tokens), []).append(entry)
    return list(groups.values())


def _curve(group: Sequence[Answer]) -> dict[str, Any]:
    """Blocks over chunk sizes: those asked for, or, if that is one, the powers of two up to the prompt as well."""
    question = group[0].question
    asked = {entry.question.max_num_batched_tokens for entry in group}
    if len(asked) == 1:
        asked |= {1 << power for power in range(LEAST_CURVE.bit_length() - 1, question.prompt_tokens.bit_length())}
        asked.add(question.prompt_tokens)
    chunks = sorted(asked)
    found: dict[str, Any] = {
        "model": question.geometry.name,
        "block_size": question.layout.block_size,
        "max_num_seqs": question.max_num_seqs,
        "free_blocks": question.free_blocks,
        "hbm_gib": question.hbm_gib,
        "prompt_tokens": question.prompt_tokens,
        "chunks": chunks,
    }
    for side in SIDES:
        plan = question.plan(side)
        tried = [question.in_chunks(chunk) for chunk in chunks]
        found[side] = {
            "blocks_needed": [one.needs(plan) for one in tried],
            "free_blocks": [one.free(side, plan) for one in tried],
        }
    return found


def as_table(answers: Sequence[Answer]) -> str:
    """A sweep for the terminal: settings that vary as columns, the others above."""
    columns: list[tuple[str, Callable[[Question], str]]] = [
        ("model", lambda q: q.geometry.name),
        ("block size", lambda q: str(q.layout.block_size)),
        ("longest sequence", lambda q: f"{q.max_model_len:,}"),
        ("max-num-seqs", lambda q: f"{q.max_num_seqs:,}"),
        ("memory", lambda q: memory(q.hbm_gib, q.free_blocks)),
        ("prompt", lambda q: f"{q.prompt_tokens:,}"),
        ("chunk", lambda q: f"{q.max_num_batched_tokens:,}"),
    ]
    shown = [column for column in columns if len({column[1](entry.question) for entry in answers}) > 1]
    fixed = [f"{name} {of(answers[0].question)}" for name, of in columns if (name, of) not in shown]
    sides = [f"{side} {what}" for side in SIDES for what in ("blocks", "free", "starts", "largest chunk", "at once")]
    rows = [[name for name, _ in shown] + sides]
    limits = [requests_limited_by(entry.question, side) for entry in answers for side in entry.sides.values()]
    mark = {MAX_NUM_SEQS: SEQS_MARK} if MAX_NUM_SEQS in limits else {}
    notes = []
    for entry in answers:
        row = [of(entry.question) for _, of in shown]
        if entry.refused:
            notes.append(f"{', '.join(row)}: {entry.refused}")
            row += ["-"] * len(sides)
        for side in entry.sides.values():
            found = side.admission
            row += [
                f"{found.blocks_needed:,}",
                known(found.free_blocks),
                known(found.admitted),
                known(side.largest_chunk),
                known(side.requests) + mark.get(requests_limited_by(entry.question, side), " " if mark else ""),
            ]
            if not _reserve_fits(entry.question, found):
                notes.append(f"{', '.join(row[: len(shown)])}, plugin: {found.reason}")
        rows.append(row)
    heads = [cell.split(" ", 1) if cell in sides else ["", cell] for cell in rows[0]]
    rows[:1] = [[head[0] for head in heads], [head[1] for head in heads]]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    question = answers[-1].question
    above = [
        f"{', '.join(fixed)} on {question.stack}, {scheduling(question.async_scheduling)}{drafting(question.drafts)}"
    ]
    if question.hbm_gib is not None:
        above.append(f"memory: {HBM_WORDS}")
    if mark:
        notes.append(f"{SEQS_MARK} as many as --max-num-seqs allows")
    hard = answers[hardest(answers)]
    ends = [f"{name} next limit: {_next_limit(hard.question, side)}." for name, side in hard.sides.items()]
    return "\n".join([*above, "", *lines, "", *notes, *ends])


def limited_by(by_group: Mapping[str, int]) -> tuple[str, int]:
    """What takes the most blocks, in words, and how many.

    Compressor state is one thing to whoever looks for a remedy, though it is two kinds of groups.
    """
    state = sum(by_group[group] for group in STATE_GROUPS)
    rest = {group: blocks for group, blocks in by_group.items() if group not in STATE_GROUPS}
    if state > max(rest.values()):
        return "compressor state (c4_state and c128_state)", state
    group = most_of(rest)
    return f"{GROUP_WORDS[group]} ({group})", rest[group]


def hardest(answers: Sequence[Answer]) -> int:
    """Which answer needs the most blocks natively: that is where a limit is met first."""
    needs = {at: entry.sides["native"].admission.blocks_needed for at, entry in enumerate(answers) if entry.sides}
    return max(needs, key=lambda at: needs[at])


def next_limit(
    prompt: int,
    chunk: int,
    by_group: Mapping[str, int],
    resident: Mapping[str, int],
    figure: Callable[[int, str], str] = lambda value, _: f"{value:,}",
) -> list[str]:
    """What stands in the way next on one side, in words.

    Args:
        prompt: its tokens.
        chunk: tokens of a step.
        by_group: blocks that it needs to start.
        resident: blocks that it keeps once it is prefilled.
        figure: how a number is shown that has a place in the side's JSON, which is the second argument.
    """
    what, blocks = limited_by(by_group)
    keeps = most_of(resident)
    return [
        f"{what} with {blocks:,} of ",
        figure(sum(by_group.values()), "blocks_needed"),
        f" blocks of a prompt of {prompt:,} tokens in chunks of {chunk:,}; once it is prefilled, ",
        f"{GROUP_WORDS[keeps]} ({keeps}) with ",
        figure(resident[keeps], f"resident_by_group/{keeps}"),
        " of ",
        figure(sum(resident.values()), "resident_blocks"),
    ]


def _next_limit(question: Question, side: Side) -> str:
    prompt, chunk = question.prompt_tokens, question.max_num_batched_tokens
    return "".join(next_limit(prompt, chunk, side.admission.by_group, side.resident))


def scheduling(asynchronous: bool) -> str:
    """Which of vLLM's two ways was counted with, in words."""
    if asynchronous:
        return "asynchronous scheduling (2 batches in flight, as vLLM does by default)"
    return "no asynchronous scheduling (1 batch in flight)"


def drafting(drafts: int) -> str:
    """Behind other words: what tails are sized for beside the request itself."""
    return f", tails for {drafts:,} draft token{'s' * (drafts > 1)}" if drafts else ""


def exact(gib: float) -> str:
    """A number as it would be typed: two that differ look different."""
    return repr(gib).removesuffix(".0")


def memory(hbm_gib: float | None, free_blocks: int | None) -> str:
    """The memory that was given, in words."""
    if hbm_gib is not None:
        return f"{exact(hbm_gib)} GiB"
    return "not given" if free_blocks is None else f"{free_blocks:,} free blocks"


def known(value: int | None) -> str:
    """A number or a truth, for people."""
    if value is None:
        return "?"
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:,}"


def as_text(entry: Answer) -> str:
    """One answer for the terminal."""
    question, limits, sizes = entry.question, entry.question.limits, entry.question.sizes
    geometry, layout = question.geometry, question.layout
    native, plugin = (entry.sides[side].admission for side in SIDES)
    rows = [("KV blocks for", "native", "plugin")]
    rows += [(name, f"{native.by_group[name]:,}", f"{plugin.by_group[name]:,}") for name in GROUP_NAMES]
    rows += [
        ("whole prompt", f"{native.blocks_needed:,}", f"{plugin.blocks_needed:,}"),
        ("first chunk", f"{sum(native.first_chunk.values()):,}", f"{sum(plugin.first_chunk.values()):,}"),
        ("free", known(native.free_blocks), known(plugin.free_blocks)),
        ("admitted", known(native.admitted), known(plugin.admitted)),
    ]
    kinds = ", ".join(
        f"{len(geometry.layers_of(kind))} {kind.value} ({geometry.row_bytes(kind):,} B a row, "
        f"{layout.page_rows(kind)} rows a page)"
        for kind in dict.fromkeys(compressor.kind for compressor in geometry.compressors)
    )
    request = (
        f"{geometry.name} on {question.stack}, block size {layout.block_size}: {question.prompt_tokens:,} prompt "
        f"tokens, {limits.max_num_batched_tokens:,} tokens a step, longest sequence {limits.max_model_len:,}, "
        f"{scheduling(question.async_scheduling)}"
    )
    if question.hbm_gib is not None:
        request += f"; {exact(question.hbm_gib)} {HBM_WORDS}"
    rest = sizes.device_bytes - sizes.tail_bytes - sizes.slots * sizes.slot_bytes
    reserved = (
        f"The plugin reserves {sizes.device_bytes / MIB:,.1f} MiB ({sizes.device_bytes:,} B): "
        f"tails {sizes.tail_bytes:,} (null pages and {limits.max_num_seqs} requests of "
        f"{sizes.tail_bytes_per_request:,}{drafting(question.drafts)}), "
        f"{sizes.slots} workspace slots of {sizes.slot_bytes:,} for the {question.executor} executor, and {rest:,} for "
        f"forwards without requests."
    )
    scope = f"{SCOPE} {OTHERWISE[question.async_scheduling]}"
    if question.free_blocks is not None:
        reserved += " With --free-blocks this is not taken from the plugin's blocks."
    return "\n".join(
        [
            request,
            scope,
            f"compressors: {kinds}",
            "",
            *(f"  {name:<14}{left:>12}{right:>12}" for name, left, right in rows),
            "",
            "One block: " + ", ".join(f"{name} {side.block_bytes:,} B" for name, side in entry.sides.items()) + ".",
            reserved,
            f"native: {native.reason}.",
            f"plugin: {plugin.reason}.",
        ]
    )


SCOPE: Final = (
    "For one fresh prompt on an empty server: no draft layers, prefix hits, KV connector or context parallelism. "
    "The plugin's column is what a server needs in which the plugin works."
)

#: Beside `scheduling`: what to do where the server does the other.
OTHERWISE: Final = {
    True: "If the server's log says that asynchronous scheduling is disabled, add --no-async-scheduling.",
    False: "If the server's log says that asynchronous scheduling is enabled, leave --no-async-scheduling out.",
}
