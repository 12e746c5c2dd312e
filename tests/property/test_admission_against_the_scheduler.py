# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Our admission arithmetic against the real vLLM scheduler with the real vllm-ascend KV-cache code.

One checker compares everything that both sides say; wrong formulas go through the same checker and must fail.
"""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afd_dsv4.admission import KvGroup, KvPlan, SchedulerLimits, first_step, kv_plan
from afd_dsv4.compat.harness import Case, HarnessError, Route, admission_evidence
from afd_dsv4.compat.stack import installed
from afd_dsv4.geometry import DEFAULT_STACK, CompressorKind, ModelGeometry, page_layout, preset
from afd_dsv4.plan import Question, answer

pytestmark = [
    pytest.mark.vllm_runtime,
    pytest.mark.skipif(installed().name is None, reason=f"needs a supported stack, installed is {installed()}"),
]


def limits_of(case, flights=None):
    return SchedulerLimits(
        case.max_num_batched_tokens,
        case.max_model_len,
        case.max_num_seqs,
        flights or (2 if case.async_scheduling else 1),
    )


def plan_of(case):
    return kv_plan(case.geometry, page_layout(DEFAULT_STACK, case.block_size), plugin=case.plugin)


def differences(case, outcome, plan, limits, step=first_step):
    """Everything in which the formula and the scheduler disagree, by name."""
    free = case.free_blocks if case.free_blocks is not None else plan.free_blocks(case.kv_bytes)
    groups = {group.name: [g for g in outcome.groups if g.name == group.name] for group in plan.groups}
    ours_and_theirs = {
        "block bytes": (plan.block_bytes, outcome.block_bytes),
        "free blocks": (free, outcome.free_blocks),
        "tokens in flight": (limits.max_in_flight_tokens, outcome.max_in_flight_tokens),
        "start-up": (plan.at_startup(limits), outcome.startup_blocks),
        "groups": (sum(group.count for group in plan.groups), len(outcome.groups)),
        "groups of a kind": ([g.count for g in plan.groups], [len(groups[g.name]) for g in plan.groups]),
        "rows of a block": (
            [{g.block_rows} for g in plan.groups],
            [{real.block_rows for real in groups[g.name]} for g in plan.groups],
        ),
        "whole prompt": ([_used(plan.whole_prompt(n, limits)) for n in case.prompts], _all_used(outcome.whole_prompt)),
        "first chunk": (
            [_used(plan.chunk(min(n, case.max_num_batched_tokens))) for n in case.prompts],
            _all_used(outcome.first_chunk),
        ),
        "first step": (
            {f"r{i}": n for i, n in enumerate(step(plan, case.prompts, limits, free)) if n},
            outcome.steps[0].scheduled,
        ),
    }
    return {name: pair for name, pair in ours_and_theirs.items() if pair[0] != pair[1]}


def _used(needs):
    return {name: blocks for name, blocks in needs.items() if blocks}


def _all_used(needs):
    return [_used(need) for need in needs]


@st.composite
def geometries(draw):
    """Flash, Pro, or any other pattern of layers that the stack can group."""
    name = draw(st.sampled_from(["flash", "pro", "flash", "pro", "other"]))
    if name != "other":
        return preset(name)
    ratios = draw(st.lists(st.sampled_from([0, 4, 128]), max_size=40).map(lambda some: [4, 128, *some]))
    return ModelGeometry("other", 4096, len(ratios), tuple(draw(st.permutations(ratios))))


@st.composite
def cases(draw):
    prompts = tuple(draw(st.lists(st.integers(1, 130_000), min_size=1, max_size=4)))
    max_num_seqs = draw(st.integers(1, 128))
    memory = draw(st.sampled_from(["free_blocks", "kv_bytes"]))
    return Case(
        geometry=draw(geometries()),
        prompts=prompts,
        block_size=draw(st.sampled_from([32, 64, 128])),
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 131_072)),
        max_model_len=draw(st.integers(max(prompts) + 1, 1 << 20)),
        max_num_seqs=max_num_seqs,
        plugin=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        **{memory: draw(st.integers(1, 30_000) if memory == "free_blocks" else st.integers(1 << 28, 1 << 36))},
    )


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_our_formula_is_what_the_real_scheduler_does(scheduler, case):
    plan = plan_of(case)
    assert differences(case, scheduler.ask(case), plan, limits_of(case)) == {}


def published(**changes):
    case = Case(
        geometry=preset("flash"),
        prompts=(63778,),
        block_size=128,
        max_num_batched_tokens=65536,
        max_model_len=131072,
        free_blocks=6958,
    )
    return dataclasses.replace(case, **changes)


# Chosen so that every wrong formula below differs somewhere.
TELLING = (
    published(),
    published(prompts=(32850,), plugin=True),
    published(prompts=(63778,), max_num_batched_tokens=4096),
    published(prompts=(63778,), max_num_batched_tokens=16384, async_scheduling=True),
    published(prompts=(20000, 30000, 100), max_num_batched_tokens=65536, free_blocks=5011),
    published(prompts=(20000, 9000), max_num_batched_tokens=20001, plugin=True),
    published(free_blocks=None, kv_bytes=6959 * 3249664 - 1),
    published(prompts=(100,), max_num_batched_tokens=2048, max_model_len=5123, async_scheduling=True),
)


class RoundsRowsUp(KvGroup):
    def blocks(self, tokens):
        return self.count * -(-tokens // (self.ratio * self.block_rows))


class StartsUpWithFullWindows(KvGroup):
    def at_startup(self, limits):
        return self.blocks(limits.max_model_len) if self.window is None else self.cap(limits)


class NoSpareBlockInTheCap(KvGroup):
    def cap(self, limits):
        return super().cap(limits) - self.count


class NoCap(KvGroup):
    def cap(self, limits):
        return 1 << 60


class CountsTheNullBlock(KvPlan):
    def free_blocks(self, kv_bytes):
        return super().free_blocks(kv_bytes) + 1


def with_groups(kind, **changes):
    """The plan with every group rebuilt as another class or with other fields."""

    def mutate(plan):
        def rebuild(group):
            fields = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
            wanted = changes if group.name in changes.get("only", group.name) else {}
            return kind(**{**fields, **{key: value for key, value in wanted.items() if key != "only"}})

        return dataclasses.replace(plan, groups=tuple(rebuild(group) for group in plan.groups))

    return mutate


def tries_the_next_prompt(plan, prompts, limits, free):
    """A queue that does not stop at a prompt that waits."""
    given_tokens = []
    for tokens in prompts:
        (got,) = first_step(plan, [tokens], limits, free)
        got = min(got, limits.max_num_batched_tokens - sum(given_tokens))
        free -= sum(plan.chunk(got).values()) if got else 0
        given_tokens.append(got)
    return given_tokens


WRONG = {
    "rows are rounded up before they are counted": with_groups(RoundsRowsUp),
    "start-up leaves out a window that is not full": with_groups(StartsUpWithFullWindows),
    "the cap has no block to spare": with_groups(NoSpareBlockInTheCap),
    "there is no cap": with_groups(NoCap),
    "sliding-window layers are one group": with_groups(KvGroup, only="swa", count=1),
    "a C4 state page holds 16 rows": with_groups(KvGroup, only="c4_state", block_rows=16),
    "C128 states keep two windows": with_groups(KvGroup, only="c128_state", window=256),
    "the null block is handed out": lambda plan: CountsTheNullBlock(plan.groups, plan.block_bytes),
    "a block costs one layer less": lambda plan: dataclasses.replace(plan, block_bytes=plan.block_bytes * 21 // 22),
}


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompt=st.integers(1, 12_000),
    batch=st.integers(100, 4_000),
    block_size=st.sampled_from([32, 64, 128]),
    plugin=st.booleans(),
    asynchronous=st.booleans(),
)
def test_with_its_peak_free_a_prompt_ends_without_a_check_at_its_start_and_with_one_block_less_it_does_not(
    scheduler, prompt, batch, block_size, plugin, asynchronous
):
    case = Case(
        preset("flash"),
        (prompt,),
        block_size,
        batch,
        prompt + 100,
        max_num_seqs=1,
        plugin=plugin,
        free_blocks=1 << 14,
        async_scheduling=asynchronous,
        reserve_full_isl=False,
        steps=-(-prompt // batch),
    )
    peak = plan_of(case).peak(prompt, limits_of(case))
    assert 1 < peak <= sum(plan_of(case).whole_prompt(prompt, limits_of(case)).values())

    def chunks(free):
        steps = scheduler.ask(dataclasses.replace(case, free_blocks=free)).steps
        return [step.scheduled.get("r0", 0) for step in steps]

    starts = range(0, prompt, batch)
    assert chunks(peak) == [min(batch, prompt - start) for start in starts]
    assert 0 in chunks(peak - 1)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_formula_is_caught(scheduler, wrong):
    found = {}
    for case in TELLING:
        found |= differences(case, scheduler.ask(case), WRONG[wrong](plan_of(case)), limits_of(case))
    assert found, "no case tells this formula from the right one"


def test_the_telling_cases_agree_with_the_right_formula(scheduler):
    for case in TELLING:
        assert differences(case, scheduler.ask(case), plan_of(case), limits_of(case)) == {}


def test_forgetting_the_second_batch_in_flight_is_caught(scheduler):
    case = TELLING[3]
    found = differences(case, scheduler.ask(case), plan_of(case), limits_of(case, flights=1))
    assert {"tokens in flight", "whole prompt"} <= set(found)


def test_a_queue_that_goes_on_behind_a_waiting_prompt_is_caught(scheduler):
    case = TELLING[4]
    found = differences(case, scheduler.ask(case), plan_of(case), limits_of(case), step=tries_the_next_prompt)
    assert set(found) == {"first step"}


def test_the_published_request_waits_natively_in_every_step(scheduler):
    outcome = scheduler.ask(published(steps=3))
    assert outcome.whole_prompt == ({"c4_mla": 125, "c128_mla": 4, "swa": 998, "c4_state": 7973, "c128_state": 1994},)
    assert outcome.free_blocks == 6958
    assert [step.scheduled for step in outcome.steps] == [{}, {}, {}]
    assert [(step.waiting_for_capacity, step.kv_usage) for step in outcome.steps] == [(1, 0.0)] * 3


def test_the_published_request_starts_with_the_plugin_after_it_paid_for_16_and_for_128_requests(scheduler):
    rows = [row for row in admission_evidence(scheduler) if row["scenario"] == "published"]
    assert [row["max_num_seqs"] for row in rows] == [16, 128]
    for row in rows:
        native, plugin = row["native"], row["plugin"]
        assert row["budget_bytes"] == 6959 * 3249664
        assert (native["blocks_needed"], native["free_blocks"], native["admitted"]) == (11094, 6958, False)
        assert plugin["blocks_needed"] <= 1140
        assert plugin["admitted"] is True
        assert plugin["steps"][0]["scheduled"] == {"r0": 63778}
        # What the plugin reserved is really missing from its pool, and nothing else is.
        left = row["budget_bytes"] - row["plugin_reserved_bytes"]
        assert plugin["free_blocks"] == left // 3249664 - 1


def test_a_packed_32768_token_batch_is_one_step_with_the_plugin_and_not_natively(scheduler):
    rows = [
        row for row in admission_evidence(scheduler, batch=(20000, 9000, 3768)) if row["scenario"] == "packed_batch"
    ]
    for row in rows:
        assert row["native"]["admitted"] is False
        assert row["plugin"]["admitted"] is True
        assert row["plugin"]["steps"][0]["scheduled"] == {"r0": 20000, "r1": 9000, "r2": 3768}


@pytest.mark.parametrize("model", ["flash", "pro"])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_dropping_the_state_layers_leaves_the_other_groups_and_the_block_as_they_were(scheduler, model, block_size):
    case = published(geometry=preset(model), block_size=block_size)
    native, plugin = scheduler.ask(case), scheduler.ask(dataclasses.replace(case, plugin=True))
    assert plugin.groups == tuple(group for group in native.groups if not group.name.endswith("_state"))
    assert plugin.block_bytes == native.block_bytes


def test_the_page_sizes_of_the_stack_are_those_in_its_source(scheduler):
    for block_size, (rows, pages) in scheduler.block_sizes.items():
        layout = page_layout(DEFAULT_STACK, block_size)
        assert [layout.kv_rows, layout.swa_rows, layout.c4_page_rows, layout.c128_page_rows] == rows
        assert [layout.page_bytes(kind) for kind in (CompressorKind.C4_INDEXER, CompressorKind.C4)] == pages
    assert set(scheduler.block_sizes) == {32, 64, 128}


def test_a_case_that_vllm_refuses_is_an_error_with_its_words_and_the_process_goes_on(scheduler):
    with pytest.raises(HarnessError, match="max_num_batched_tokens"):
        scheduler.ask(published(max_num_batched_tokens=1, max_num_seqs=16))
    assert scheduler.ask(published()).free_blocks == 6958


def test_the_answer_says_how_the_stack_was_loaded(scheduler):
    assert scheduler.ask(published()).route == scheduler.route.value
    assert scheduler.route in Route


@pytest.mark.parametrize(
    ("prompt", "free", "plugin", "block_size"),
    [
        (10000, 278, True, 128),
        (10000, 279, True, 128),  # one block more is one request more
        (10000, 1845, False, 128),
        (20010, 500, True, 128),
        (20010, 3650, False, 128),
        (5000, 3600, False, 32),
        (5000, 530, True, 32),
    ],
)
def test_as_many_requests_run_at_once_as_planned(scheduler, prompt, free, plugin, block_size):
    # A step takes one prompt, but for the tokens that those before generate.
    case = published(
        prompts=(prompt,) * 9,
        block_size=block_size,
        max_num_batched_tokens=prompt,
        plugin=plugin,
        free_blocks=free,
        steps=12,
    )
    question = Question(
        geometry=case.geometry,
        layout=page_layout(DEFAULT_STACK, block_size),
        stack=DEFAULT_STACK,
        prompt_tokens=prompt,
        max_num_batched_tokens=prompt,
        max_num_seqs=case.max_num_seqs,
        max_model_len=case.max_model_len,
        async_scheduling=False,
        slots=2,
        executor="stock",
        tile_tokens=None,
        free_blocks=free,
    )
    planned = answer(question).sides["plugin" if plugin else "native"].requests
    assert planned == max(step.running for step in scheduler.ask(case).steps)
    assert 1 < planned < 9
