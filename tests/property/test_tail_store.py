# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Laws of the tail store: a symbolic operator fed with its lists compresses exactly the right rows, whatever is run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SlotIndex, TailFull, TailStore, TailVoid, UnknownPosition, UnknownRequest
from afd_dsv4.tail.tables import NO_COLUMN, PageList, RequestChunk, RequestId
from tests.scalar_store import ScalarStore
from tests.strategies import LENGTHS, shapes
from tests.symbolic import SymbolicPool, expected

Workload = Callable[[PageList], None]


class Driver:
    """Runs chunks of several requests through one store, one ratio and all its layers."""

    def __init__(self, shape: TailShape, max_num_seqs: int = 4, slots: int = 2) -> None:
        self.shape = shape
        self.store = TailStore({shape.ratio: shape}, max_num_seqs=max_num_seqs, slots=slots)
        self.pool = SymbolicPool(shape)
        self.forwards = 0

    def forward(self, chunks: list[RequestChunk]) -> None:
        lists = self.store.plan(chunks, SlotIndex(self.forwards % 2)).lists
        self.forwards += 1
        pages = lists[self.shape.ratio]
        columns = self.shape.columns(max(chunk.tokens for chunk in chunks))
        want = {name: rows for chunk in chunks for name, rows in expected(self.shape, chunk).items()}
        for layer in range(self.shape.layers):
            assert self.pool.launch(pages.chunks, pages.table(layer, columns), pages.starts) == want
        assert self.owners_are_a_permutation()

    def owners_are_a_permutation(self) -> bool:
        return np.array_equal(self.store.owners(self.shape.ratio), np.arange(1, self.store.pages(self.shape.ratio)))


@settings(max_examples=40)
@given(shapes(), st.lists(st.lists(LENGTHS, min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
def test_any_chunking_of_any_mix_of_requests_reads_only_its_own_rows(
    shape: TailShape, steps: list[list[int]], rng: random.Random
) -> None:
    driver = Driver(shape)
    position: dict[RequestId, int] = {}
    names = iter(range(1000))
    live = [RequestId(f"r{next(names)}") for _ in range(4)]
    for lengths in steps:
        chunks = []
        for request, tokens in zip(rng.sample(live, len(lengths)), lengths, strict=True):
            start = position.get(request, 0)
            chunks.append(RequestChunk(request, start, start + tokens))
            position[request] = start + tokens
        driver.forward(chunks)
        if rng.random() < 0.3:  # a request ends, another takes its row and its pages
            gone = rng.choice(live)
            if gone in position:
                driver.store.end(gone)
                del position[gone]
            live[live.index(gone)] = RequestId(f"r{next(names)}")


@settings(max_examples=60)
@given(st.lists(shapes(drafts=st.integers(0, 4)), min_size=1, max_size=2, unique_by=lambda s: s.ratio), st.data())
def test_plans_equal_those_made_the_long_way_whatever_has_gone_before(
    several: list[TailShape], data: st.DataObject
) -> None:
    """Ids, columns, starts, tails and owners: mixes of prompts, decodes, drafts, ends and requests that come anew."""
    shapes, rng = {shape.ratio: shape for shape in several}, data.draw(st.randoms(use_true_random=False))
    store = TailStore(shapes, max_num_seqs=4, slots=2)
    scalar = ScalarStore(shapes, max_num_seqs=4, slots=2)
    drafts = min(shape.drafts for shape in several)
    names = (RequestId(f"r{number}") for number in itertools.count())
    open_: dict[RequestId, tuple[int, int]] = {}
    for step in range(data.draw(st.integers(1, 12))):
        slot = SlotIndex(step % 2)
        for request in [request for request in open_ if rng.random() < 0.1]:
            store.end(request)
            scalar.end(request)
            del open_[request]
        while len(open_) < 4 and rng.random() < 0.7:
            open_[next(names)] = (0, 0)
        chunks = []
        for request in rng.sample([*open_], rng.randint(0, len(open_))):
            start = rng.randint(*open_[request])
            tokens = rng.choice([1, 1 + drafts, rng.randint(1, 40), rng.randint(1, 700)])
            taken_back = rng.randint(0, min(drafts, tokens - 1))
            chunks.append(RequestChunk(request, start, start + tokens, taken_back))
            open_[request] = (start + tokens - taken_back, start + tokens)
        plan, want = store.plan(chunks, slot), scalar.plan(chunks, slot)
        open_ = {request: span for request, span in open_.items() if request in scalar.seats}  # others never began
        for ratio, shape in shapes.items():
            pages, long = plan.lists[ratio], want[ratio]
            assert pages.starts.tolist() == long.starts
            for place, columns in enumerate(long.columns):
                padding = shape.list_ids - len(columns)
                assert pages.columns[place].tolist() == columns + [NO_COLUMN] * padding
                for layer in range(shape.layers):
                    assert pages.ids[layer, place].tolist() == long.ids[layer][place] + [0] * padding
            assert pages.columns.shape == (len(chunks), shape.list_ids)
            assert pages.ids.shape == (shape.layers, len(chunks), shape.list_ids)
            assert {pages.columns.dtype, pages.ids.dtype, pages.starts.dtype} == {np.dtype(np.int32)}
            assert store.owners(ratio).tolist() == scalar.pools[ratio].owners()
            for request, seat in scalar.seats.items():
                mapped, ids = store.tail(request, ratio)
                assert [*mapped] == scalar.pools[ratio].mapped[seat]
                assert ids.tolist() == [owned[seat][: len(mapped)] for owned in scalar.pools[ratio].owned]


@pytest.mark.parametrize("drafts", range(1, 10))
@settings(max_examples=12)
@given(data=st.data())
def test_every_accept_length_of_every_draft_count_goes_on_from_a_whole_tail(drafts: int, data: st.DataObject) -> None:
    shape = data.draw(shapes(drafts=st.just(drafts)))
    prompt = data.draw(st.integers(1, 2 * shape.period + 5))
    for accepted in range(drafts + 1):
        driver = Driver(shape, max_num_seqs=1)
        request = RequestId("r")
        driver.forward([RequestChunk(request, 0, prompt)])
        end = prompt + 1 + drafts
        driver.forward([RequestChunk(request, prompt, end, drafts)])
        position = end - drafts + accepted
        for tokens in (1, shape.ratio, 2 * shape.ratio + 1):  # the rows behind the accepted ones are written anew
            driver.forward([RequestChunk(request, position, position + tokens)])
            position += tokens


def test_a_store_sized_without_drafts_refuses_a_chunk_with_drafts() -> None:
    driver = Driver(TailShape(4, True, 8, 1))
    with pytest.raises(ValueError, match="tails are sized for 0"):
        driver.forward([RequestChunk(RequestId("r"), 0, 5, drafts=1)])


@pytest.mark.parametrize("start", [1, 99, 101])
def test_a_start_where_the_tail_does_not_end_is_refused_and_changes_nothing(start: int) -> None:
    driver = Driver(TailShape(4, True, 8, 2))
    driver.forward([RequestChunk(RequestId("r"), 0, 100)])
    before = driver.store.tail(RequestId("r"), 4)
    with pytest.raises(UnknownPosition, match=r"\[100, 100\]"):
        driver.store.plan(
            [RequestChunk(RequestId("s"), 0, 5), RequestChunk(RequestId("r"), start, start + 5)], SlotIndex(0)
        )
    assert driver.store.seat(RequestId("s")) is None
    assert before[0] == driver.store.tail(RequestId("r"), 4)[0]
    assert np.array_equal(before[1], driver.store.tail(RequestId("r"), 4)[1])


def test_a_request_without_a_tail_is_named_with_what_is_held() -> None:
    driver = Driver(TailShape(4, True, 8, 1))
    driver.forward([RequestChunk(RequestId("a"), 0, 5)])
    for ask in (driver.store.end, lambda request: driver.store.tail(request, 4)):
        with pytest.raises(UnknownRequest, match=r"'b' has no tail.*1 of 4 seats are held"):
            ask(RequestId("b"))


def test_two_chunks_of_a_request_are_refused_by_its_name() -> None:
    driver = Driver(TailShape(4, True, 8, 1))
    chunks = [
        RequestChunk(RequestId("a"), 0, 5),
        RequestChunk(RequestId("b"), 0, 5),
        RequestChunk(RequestId("b"), 5, 6),
    ]
    with pytest.raises(ValueError, match=r"two chunks in one execution for \['b'\]"):
        driver.forward(chunks)


def test_a_void_tail_is_refused_with_its_reason_until_the_request_is_ended() -> None:
    driver = Driver(TailShape(4, True, 8, 1))
    request = RequestId("a")
    plan = driver.store.plan([RequestChunk(request, 0, 5)], SlotIndex(0))
    plan.void("layer 3 was not launched")
    with pytest.raises(TailVoid, match="'a' lost its tail: layer 3 was not launched"):
        driver.forward([RequestChunk(request, 5, 9)])
    driver.store.end(request)
    driver.forward([RequestChunk(request, 0, 9)])


def test_voiding_means_the_request_as_it_was_planned_not_one_that_took_its_name() -> None:
    driver = Driver(TailShape(4, True, 8, 1))
    request = RequestId("a")
    old = driver.store.plan([RequestChunk(request, 0, 5)], SlotIndex(0))
    driver.store.end(request)
    driver.forward([RequestChunk(request, 0, 9)])
    old.void("broke off")
    driver.forward([RequestChunk(request, 9, 20)])


def test_seats_that_cannot_be_used_are_passed_over_and_change_nothing_when_they_were_needed() -> None:
    shape = TailShape(4, True, 8, 1)
    store = TailStore({4: shape}, max_num_seqs=3, slots=1)
    chunk = RequestChunk(RequestId("a"), 0, 5)
    assert store.plan([chunk], SlotIndex(0), usable=lambda seat: seat != 0).taken == (1,)
    more = [RequestChunk(RequestId("a"), 5, 9), RequestChunk(RequestId("b"), 0, 5), RequestChunk(RequestId("c"), 0, 5)]
    with pytest.raises(TailFull, match="2 new requests, 1 free of 3 tails, 1 more behind open executions"):
        store.plan(more, SlotIndex(0), usable=lambda seat: seat != 0)
    assert store.plan(more, SlotIndex(0)).continued == (1,)


def test_one_request_more_than_tails_is_refused_by_number() -> None:
    driver = Driver(TailShape(4, True, 8, 1), max_num_seqs=2)
    driver.forward([RequestChunk(RequestId("a"), 0, 5), RequestChunk(RequestId("b"), 0, 5)])
    with pytest.raises(TailFull, match="1 new requests, 0 free of 2"):
        driver.forward([RequestChunk(RequestId("c"), 0, 5)])


def test_the_symbolic_operator_sees_a_tail_that_aliases_the_history() -> None:
    """Negative control: reuse the history's page for the fresh tail, and the first window is wrong."""
    shape = TailShape(4, True, 8, 1)
    pool = SymbolicPool(shape)
    request = RequestId("r")
    first = RequestChunk(request, 0, 15)
    pool.launch((first,), np.array([[0, 7]], np.int32), np.array([0], np.int32))
    second = RequestChunk(request, 15, 23)
    clean = pool.launch((second,), np.array([[0, 7, 8]], np.int32), np.array([15], np.int32))
    assert clean == expected(shape, second)
    pool.launch((first,), np.array([[0, 7]], np.int32), np.array([0], np.int32))
    assert pool.launch((second,), np.array([[0, 7, 7]], np.int32), np.array([15], np.int32)) != expected(shape, second)


@given(shapes(drafts=st.integers(0, 4)), st.integers(0, 700), st.data())
def test_a_seat_taken_at_a_position_maps_what_one_that_was_computed_to_there_does(
    shape: TailShape, low: int, data: st.DataObject
) -> None:
    drafts = data.draw(st.integers(0, shape.drafts))
    computed, restored = (TailStore({shape.ratio: shape}, max_num_seqs=2, slots=1) for _ in range(2))
    request = RequestId("r")
    if low > 0:
        computed.plan([RequestChunk(request, 0, low + drafts, drafts)], SlotIndex(0))
    elif drafts == 0:
        computed.plan([RequestChunk(RequestId("nobody"), 0, 1)], SlotIndex(0))
    else:
        return  # a request computes at least one row
    plan = restored.seat_at(request, low, low + drafts)
    assert plan.taken == (restored.seat(request),)
    start = data.draw(st.integers(low, low + drafts))
    if low > 0:
        assert restored.tail(request, shape.ratio)[0] == computed.tail(request, shape.ratio)[0]
        assert restored.hold(request)[1:3] == computed.hold(request)[1:3] == (low, low + drafts)
    then = [RequestChunk(request, start, start + data.draw(LENGTHS))]
    before = restored.tail(request, shape.ratio)[1]
    lists, want = (store.plan(then, SlotIndex(0)).lists[shape.ratio] for store in (restored, computed))
    assert np.array_equal(lists.columns, want.columns)
    assert np.array_equal(lists.starts, want.starts)
    read = len(shape.pages(shape.need(start)))
    for layer in range(shape.layers):  # what is read is what was mapped for the restore
        assert set(lists.ids[layer, 0, :read].tolist()) <= set(before[layer].tolist())
    assert restored.owners(shape.ratio).tolist() == [*range(1, restored.pages(shape.ratio))]


def test_a_seat_is_taken_at_a_position_only_where_it_can_be() -> None:
    shape = TailShape(4, True, 8, layers=2, drafts=1)
    store = TailStore({4: shape}, max_num_seqs=2, slots=1)
    store.plan([RequestChunk(RequestId("a"), 0, 9)], SlotIndex(0))
    with pytest.raises(ValueError, match="'a' has a tail here"):
        store.seat_at(RequestId("a"), 9, 9)
    with pytest.raises(ValueError, match="sized for 1 drafts"):
        store.seat_at(RequestId("b"), 9, 11)
    with pytest.raises(TailFull):
        store.seat_at(RequestId("b"), 9, 9, usable=lambda _: False)
    store.seat_at(RequestId("b"), 9, 10)
    with pytest.raises(TailFull):
        store.seat_at(RequestId("c"), 9, 9)
    with pytest.raises(UnknownPosition):
        store.plan([RequestChunk(RequestId("b"), 8, 12)], SlotIndex(0))
    store.plan([RequestChunk(RequestId("b"), 10, 12)], SlotIndex(0))


def test_whose_a_page_is_can_be_told_of_every_page() -> None:
    shape = TailShape(4, True, 8, layers=2)
    store = TailStore({4: shape}, max_num_seqs=2, slots=2)
    store.plan([RequestChunk(RequestId("a"), 0, 9)], SlotIndex(0))
    said = [store.whose(4, page) for page in range(store.pages(4))]
    assert said[0] == "null page"
    for words in ("request 'a', layer 0", "request 'a', layer 1", "free seat 1, layer 0", "spare of workspace slot 1"):
        assert any(words in each for each in said[1:]), words
    assert "null page" not in said[1:]
