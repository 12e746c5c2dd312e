# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Admission arithmetic: the published numbers, the laws of the formula, and the words about a request that waits.

Whether the formula is the scheduler's is asked in tests/property/test_admission_against_the_scheduler.py.
"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd_dsv4.admission import GIB, GROUP_NAMES, SchedulerLimits, admit, first_step, kv_plan
from afd_dsv4.geometry import DEFAULT_STACK, InputError, ModelGeometry, PageLayout, page_layout, preset

LONGEST = 1 << 20


def plan(model="flash", block_size=128, plugin=False):
    return kv_plan(preset(model), page_layout(DEFAULT_STACK, block_size), plugin=plugin)


def ceil(value, divisor):
    return value // divisor + (1 if value % divisor else 0)


def test_the_published_request_needs_11094_blocks_and_waits_for_ever():
    answer = admit(plan(), 63778, SchedulerLimits(65536, LONGEST), 6958)
    assert answer.by_group == {"c4_mla": 125, "c128_mla": 4, "swa": 998, "c4_state": 7973, "c128_state": 1994}
    assert answer.blocks_needed == 11094
    assert answer.admitted is False


def test_with_the_plugin_the_published_request_needs_1127_blocks_and_starts():
    answer = admit(plan(plugin=True), 63778, SchedulerLimits(65536, LONGEST), 6958)
    assert answer.by_group == {"c4_mla": 125, "c128_mla": 4, "swa": 998, "c4_state": 0, "c128_state": 0}
    assert answer.blocks_needed == 1127
    assert answer.admitted is True


@pytest.mark.parametrize(
    ("tokens", "one_big_batch", "chunks_of_32k"),
    [(32850, 5715, 5706), (51976, 9042, 5749), (63778, 11094, 5772)],
)
def test_the_known_prompts_need_the_known_blocks(tokens, one_big_batch, chunks_of_32k):
    assert sum(plan().whole_prompt(tokens, SchedulerLimits(65536, LONGEST)).values()) == one_big_batch
    assert sum(plan().whole_prompt(tokens, SchedulerLimits(32768, LONGEST)).values()) == chunks_of_32k


def test_two_batches_in_flight_raise_the_cap_as_a_batch_of_twice_the_size_does():
    in_flight = SchedulerLimits(32768, LONGEST, batches_in_flight=2)
    assert plan().whole_prompt(63778, in_flight) == plan().whole_prompt(63778, SchedulerLimits(65536, LONGEST))


def test_a_chunk_is_counted_group_by_group_without_a_cap():
    tokens = 32850
    by_hand = {
        "c4_mla": ceil(tokens // 4, 128),
        "c128_mla": ceil(tokens // 128, 128),
        "swa": 2 * ceil(tokens, 128),
        "c4_state": ceil(tokens, 8),
        "c128_state": ceil(tokens, 32),
    }
    assert plan().chunk(tokens) == by_hand
    assert by_hand["c128_mla"] == 2  # 256 full windows; rounding up would count a 257th row and a third block
    assert ceil(ceil(tokens, 128), 128) == 3


def test_a_window_that_is_not_full_has_no_compressed_row():
    full = plan().chunk(128 * 128)
    assert full["c128_mla"] == 1
    assert plan().chunk(128 * 128 + 127)["c128_mla"] == 1  # 127 tokens more: still 128 rows
    assert plan().chunk(128 * 128 + 128)["c128_mla"] == 2
    assert plan().chunk(3)["c4_mla"] == 0


@given(
    model=st.sampled_from(["flash", "pro"]),
    block_size=st.sampled_from([32, 64, 128]),
    plugin=st.booleans(),
    tokens=st.integers(1, LONGEST),
    batch=st.integers(1, LONGEST),
    flights=st.sampled_from([1, 2]),
)
def test_no_group_needs_more_for_a_first_chunk_than_for_the_whole_prompt(
    model, block_size, plugin, tokens, batch, flights
):
    limits = SchedulerLimits(batch, LONGEST, batches_in_flight=flights)
    first = plan(model, block_size, plugin).chunk(min(tokens, batch))
    whole = plan(model, block_size, plugin).whole_prompt(tokens, limits)
    assert all(first[name] <= whole[name] for name in GROUP_NAMES)


@pytest.mark.parametrize(
    ("model", "block_size", "block_bytes"),
    [("flash", 128, 22 * (131072 + 16640)), ("pro", 128, 31 * (131072 + 16640)), ("pro", 64, 2289536)],
)
def test_one_block_costs_all_layers_natively_and_with_the_plugin(model, block_size, block_bytes):
    assert plan(model, block_size).block_bytes == block_bytes
    assert plan(model, block_size, plugin=True).block_bytes == block_bytes


def test_free_blocks_leave_out_the_null_block():
    kv_plan_ = plan()
    assert kv_plan_.free_blocks(6959 * kv_plan_.block_bytes) == 6958
    assert kv_plan_.free_blocks(6959 * kv_plan_.block_bytes - 1) == 6957
    with pytest.raises(InputError, match="offer at least"):
        kv_plan_.free_blocks(2 * kv_plan_.block_bytes - 1)
    with pytest.raises(InputError, match="0 bytes"):
        kv_plan_.free_blocks(-1)


def test_every_answer_names_every_kind_of_group():
    for plugin in (False, True):
        answer = admit(plan(plugin=plugin), 1000, SchedulerLimits(512, LONGEST), None)
        assert tuple(answer.by_group) == tuple(answer.first_chunk) == GROUP_NAMES


def test_without_a_number_of_free_blocks_nothing_is_said_about_admission():
    answer = admit(plan(), 1000, SchedulerLimits(512, LONGEST), None)
    assert answer.admitted is None
    assert "not known" in answer.reason


def test_the_words_about_a_waiting_request_name_need_free_share_and_ways_out():
    reason = admit(plan(), 63778, SchedulerLimits(65536, LONGEST), 6958).reason
    for piece in ("11,094", "6,958", "c4_state 7,973", "9,967 of them (90 %)", "what the plugin is for"):
        assert piece in reason


@given(tokens=st.integers(1, 130_000), batch=st.integers(1, 70_000), free=st.integers(0, 12_000), plugin=st.booleans())
def test_the_ways_out_that_are_proposed_are_true(tokens, batch, free, plugin):
    groups = plan(plugin=plugin)
    limits = SchedulerLimits(batch, LONGEST)
    answer = admit(groups, tokens, limits, free)
    if answer.admitted:
        return
    gib = float(re.search(r"([0-9.]+) GiB", answer.reason).group(1))
    assert admit(groups, tokens, limits, groups.free_blocks(int(gib * GIB))).admitted
    proposed = re.search(r"max-num-batched-tokens ([0-9,]+) or less", answer.reason)
    smaller = int(proposed.group(1).replace(",", "")) if proposed else 0
    if smaller:
        assert admit(groups, tokens, SchedulerLimits(smaller, LONGEST), free).admitted
    assert smaller + 1 == batch or not admit(groups, tokens, SchedulerLimits(smaller + 1, LONGEST), free).admitted


@given(
    tokens=st.integers(1, 130_000),
    batch=st.integers(1, 70_000),
    flights=st.integers(1, 2),
    block_size=st.sampled_from([32, 64, 128]),
    plugin=st.booleans(),
)
def test_a_first_chunk_never_takes_more_than_was_checked_for_the_whole_prompt(
    tokens, batch, flights, block_size, plugin
):
    answer = admit(plan("flash", block_size, plugin), tokens, SchedulerLimits(batch, LONGEST, 16, flights), None)
    assert all(answer.first_chunk[name] <= answer.by_group[name] for name in GROUP_NAMES)


def test_the_queue_stops_at_the_first_prompt_that_does_not_fit():
    limits = SchedulerLimits(32768, LONGEST)
    assert first_step(plan(), [20000, 9000, 100], limits, 5011) == (20000, 0, 0)
    assert first_step(plan(plugin=True), [20000, 9000, 3768], limits, 5011) == (20000, 9000, 3768)


def test_a_step_ends_with_its_token_budget_and_its_number_of_requests():
    groups = plan(plugin=True)
    assert first_step(groups, [20000, 20000, 5], SchedulerLimits(32768, LONGEST), 6958) == (20000, 12768, 0)
    assert first_step(groups, [10, 10, 10], SchedulerLimits(32768, LONGEST, max_num_seqs=2), 6958) == (10, 10, 0)


@pytest.mark.parametrize(
    ("values", "says"),
    [((0, LONGEST), "max_num_batched_tokens"), ((1, 0), "max_model_len"), ((1, 1, 0), "max_num_seqs")],
)
def test_limits_below_one_are_refused(values, says):
    with pytest.raises(InputError, match=says):
        SchedulerLimits(*values)


@pytest.mark.parametrize(
    ("tokens", "says"), [(0, "give at least 1"), (-5, "give at least 1"), (4096, "4095"), (4097, "4096")]
)
def test_a_prompt_that_no_server_would_take_is_refused(tokens, says):
    with pytest.raises(InputError, match=says):
        admit(plan(), tokens, SchedulerLimits(512, 4096), 100)


def test_a_prompt_may_be_one_token_shorter_than_the_longest_sequence():
    """`vllm/v1/engine/input_processor.py` refuses one that leaves no token to generate, as the doctor does."""
    assert admit(plan(), 4095, SchedulerLimits(512, 4096), 6958).admitted
    assert first_step(plan(), [4095], SchedulerLimits(512, 4096), 6958) == (512,)
    with pytest.raises(InputError, match="at most 4095: at least one token is generated"):
        first_step(plan(), [4096], SchedulerLimits(512, 4096), 6958)


@pytest.mark.parametrize(("length", "c4", "c128"), [(5120, 10, 1), (5121, 11, 1), (16384, 32, 1), (16385, 33, 2)])
def test_start_up_counts_a_window_that_is_not_full_and_admission_does_not(length, c4, c128):
    windows = 2 * (ceil(127 + 2048, 128) + 1) + ceil(7 + 2048, 8) + 1 + ceil(127 + 2048, 32) + 1
    assert plan().at_startup(SchedulerLimits(2048, length)) == c4 + c128 + windows
    assert ceil(5123 // 4, 128) == 10


@given(
    tokens=st.integers(1, 4000),
    batch=st.integers(1, 3000),
    flights=st.sampled_from([1, 2]),
    block_size=st.sampled_from([32, 128]),
    plugin=st.booleans(),
)
def test_what_a_prompt_takes_at_most_is_what_its_chunks_take_one_by_one(tokens, batch, flights, block_size, plugin):
    groups = plan("flash", block_size, plugin)
    tables = {group.name: set() for group in groups.groups}  # numbers of the blocks that are there
    most = 0
    starts = range(0, tokens, batch)
    for index, start in enumerate(starts):
        end = min(start + batch, tokens)
        read = starts[index - (flights - 1)] if index >= flights - 1 else 0
        for group in groups.groups:
            table = tables[group.name]
            if group.window is not None:  # the next token after those that were read sees its own window, itself in it
                table -= {block for block in table if (block + 1) * group.block_rows <= read - group.window + 1}
            rows = end // group.ratio
            already = max(table, default=-1) + 1
            table |= set(range(already, ceil(rows, group.block_rows)))
        most = max(most, sum(group.count * len(tables[group.name]) for group in groups.groups))
    assert groups.peak(tokens, SchedulerLimits(batch, LONGEST, 16, flights)) == most


def test_a_negative_number_of_free_blocks_is_refused():
    with pytest.raises(InputError, match="must not be negative"):
        admit(plan(), 1, SchedulerLimits(512, 4096), -1)


@pytest.mark.parametrize("ratios", [(4, 4), (128, 0), (0, 0)])
def test_a_model_that_the_stack_cannot_group_is_refused(ratios):
    with pytest.raises(InputError, match="models that have both"):
        kv_plan(ModelGeometry("m", 4096, 2, ratios), page_layout(DEFAULT_STACK, 128), plugin=False)


def test_a_state_row_that_does_not_fit_its_page_is_refused():
    wide = ModelGeometry("m", 4096, 2, (4, 128), head_dim=2048)
    with pytest.raises(InputError, match="state page"):
        kv_plan(wide, PageLayout(128, 128, 128, 8, 32, 16640, 131072), plugin=False)
