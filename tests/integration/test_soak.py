# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A small soak, and everything that a soak judges by seen to find a planted fault. `make soak` is the large one."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from afd_dsv4.evidence.soak import World, failures, main, sees_disorder, soak
from afd_dsv4.evidence.soak_load import SEATS, Fault, Lab, NoDevice, Style, Totals
from afd_dsv4.evidence.stamps import PER_WORD, Audit, Rows, salt
from afd_dsv4.geometry import CompressorKind
from afd_dsv4.softnpu import runtime as softnpu
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SlotIndex
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import Slot
from afd_dsv4.workspace.identity import ExecutionId

pytestmark = pytest.mark.npu

LAST_LINE = re.compile(r"soak: executions=(\d+) corrupt_bytes=0 lost_slots=0 faults=(\d+) violations=0")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    yield Lab("npu")
    softnpu.set_schedule(0)
    softnpu.set_race_detection(False)


@pytest.fixture(autouse=True)
def current_stream_is_given_back() -> Iterator[None]:
    yield
    torch.npu.set_stream(torch.npu.default_stream())  # tests call parts of the load, which queue where they like


def test_a_soak_leaves_the_current_stream_as_it_was(lab: Lab) -> None:
    """It would be held, or be one of the streams of another load, in whatever the process does next."""
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        soak(lab, seed=1, executions=4, rounds=[0], fault_rate=0.0)
        assert torch.npu.current_stream() == side


def played(lab: Lab, executions: int = 20) -> World:
    """A load that has run, with nothing queued any more."""
    world = World(lab, Totals(), 2)
    world.play(random.Random(5), Style(), executions, 0.0)
    torch.npu.synchronize()
    return world


def closed(world: World) -> Totals:
    """What is found at the end of its round."""
    world.close_round(random.Random(6), Style(), None)
    return world.totals


def test_the_command_passes_and_says_so_in_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--executions", "300", "--rounds", "3", "--jobs", "1", "--seed", "7"]) == 0
    said = capsys.readouterr().out.splitlines()
    found = LAST_LINE.fullmatch(said[-1])
    assert found, said[-1]
    assert int(found[1]) >= 300
    assert "negative control: 4 of 4 rounds with fences off corrupted bytes and were out of order" in said


def test_every_fault_ends_as_it_must_and_nothing_is_lost(lab: Lab) -> None:
    totals = soak(lab, seed=11, executions=45, rounds=range(15), fault_rate=0.12)
    assert {fault for fault in Fault if totals.faults[fault]} == set(Fault)
    assert totals.violations == []
    assert totals.audit.wrong == totals.lost_count == totals.races == 0
    assert totals.audit.compared > 5_000_000
    assert totals.quarantined == 5, "one lease of three lost streams, two of the one with another that waits for it"
    assert totals.handed_on > 0, "the device must have been behind the host"
    assert 0 < totals.events <= totals.events_allowed


def test_load_and_faults_are_a_function_of_the_seed(lab: Lab) -> None:
    one, again, other = (soak(lab, seed=seed, executions=40, rounds=[0, 1], fault_rate=0.1) for seed in (3, 3, 4))
    assert (one.executions, one.launches, one.faults) == (again.executions, again.launches, again.faults)
    assert (one.executions, one.launches, one.faults) != (other.executions, other.launches, other.faults)


def test_only_rounds_with_fences_off_are_seen_to_be_out_of_order(lab: Lab) -> None:
    for ordered in (True, False):
        found = soak(lab, seed=1, executions=40, rounds=[0], ordered=ordered)
        assert sees_disorder(lab, found) is not ordered
        if not ordered:
            for part in ("audit", "unordered", "races"):  # each of the three must see it
                assert not sees_disorder(lab, replace(found, **{part: type(getattr(found, part))()}))


@pytest.mark.parametrize("kind", list(CompressorKind))
def test_one_wrong_word_in_a_page_is_found(lab: Lab, kind: CompressorKind) -> None:
    world = played(lab)
    assert world.witness.audit().wrong == 0
    pool = world.runtime.pools[kind].view(torch.int32)
    pool[7, 3, 1] += 1
    assert 1 <= world.witness.audit().wrong <= 4
    pool[7, 3, 1] -= 1
    pool[0, 0, 0] += 1  # the null page is nobody's to write
    assert closed(world).audit.wrong >= 1


def test_one_wrong_entry_in_a_table_is_found_also_behind_the_requests(lab: Lab) -> None:
    world = played(lab)
    for table in (world.runtime.tables[0][4], world.runtime.tables[1][128], world.runtime.tables[2][4]):
        before = table.flat[-2].item()
        table.flat[-2] = before + 1
        assert world.witness.audit().wrong == 1
        table.flat[-2] = before
    assert world.witness.audit().wrong == 0


def test_what_a_launch_finds_wrong_is_found_though_it_is_right_again_later(lab: Lab) -> None:
    world = World(lab, Totals(), 2)
    request = world.new()
    world.forward(random.Random(1), Style(), None, [request.chunk(131)], cut_at=131)
    torch.npu.synchronize()
    _, ids = world.runtime.store.tail(request.name, 4)
    page = world.runtime.pools[CompressorKind.C4].view(torch.int32)[int(ids[0, 0])]
    page.add_(1)
    world.lab.on(lab.streams[0])
    torch.npu.synchronize()
    world.forward(random.Random(1), Style(), None, [request.chunk(1)], cut_at=1)
    torch.npu.synchronize()
    assert lab.ledgers.audit().wrong >= page.numel()


def test_a_slot_that_is_never_sealed_is_lost(lab: Lab) -> None:
    world = played(lab)
    world.runtime.arena.acquire(ExecutionId(world.runtime.mint()))
    assert closed(world).lost == {"slots": 1, "seats": 0, "staging entries": 0, "pages": 0}


def test_a_slot_that_can_be_had_twice_is_no_gain(lab: Lab) -> None:
    """It must not cancel with a slot that is lost."""
    world = played(lab)
    arena = world.runtime.arena
    arena.acquire(ExecutionId(world.runtime.mint()))
    arena._eager += tuple(Slot(SlotIndex(0)) for _ in range(2))
    totals = closed(world)
    assert any("no slot is leased twice" in violation for violation in totals.violations)
    assert (totals + Totals()).lost_count == totals.lost_count == 0


def test_a_seat_a_staging_entry_and_a_page_that_nobody_has_are_lost(lab: Lab) -> None:
    world = played(lab)
    world.end_all()
    world.runtime.store._free.pop()
    world.runtime.staging.take()
    world.runtime.store._pools[4].spare[0, 0, 0] = world.runtime.store._pools[4].spare[1, 0, 0]
    assert closed(world).lost == {"slots": 0, "seats": 1, "staging entries": 1, "pages": 1}


def test_an_outcome_that_nobody_planted_is_a_violation(lab: Lab) -> None:
    world = played(lab)
    world.end_all()
    world.runtime.fails = (0, True)
    world.forward(random.Random(2), Style(), None, [world.new().chunk(4)], cut_at=4)
    assert any("begin fails if its upload does" in violation for violation in world.totals.violations)


def test_a_seat_in_doubt_that_nobody_expects_is_a_violation(lab: Lab) -> None:
    world = played(lab)
    world.end_all()
    part = world.forward(random.Random(2), Style(), None, [world.new().chunk(4)], cut_at=4)[0]
    world.runtime.arena.quarantine(part.lease, "planted")
    torch.npu.synchronize()
    assert any("are in doubt" in violation for violation in closed(world).violations)
    assert SEATS > 1


def rows_the_long_way(ratio: int, page_rows: int, columns: int, chunks: list[RequestChunk]) -> tuple[set, set]:
    """History pages, and written rows with their place, by cell; row by row."""

    def needed(position: int) -> set[int]:
        """Rows before `position` that some window ending at or behind it pools."""
        first = position // ratio * ratio - (ratio if ratio == 4 else 0)
        return {row for row in range(position) if row >= first}

    pages, written = set(), set()
    for index, chunk in enumerate(chunks):
        reach = ratio if ratio == 4 else 0
        period = math.lcm(ratio, page_rows)
        base = max(base for base in range(0, chunk.start + 1, period) if base <= max(chunk.start - reach, 0))
        history = {row // page_rows for row in needed(chunk.start)}
        tail = {row // page_rows for row in needed(chunk.end)}
        pages |= {index * columns + page - base // page_rows for page in history}
        for row in range(chunk.start, chunk.end):
            if row // page_rows in history | tail:
                cell = index * columns + (row - base) // page_rows
                written.add((cell, row % page_rows))
    return pages, written


@pytest.mark.parametrize(("ratio", "page_rows"), [(4, 2), (4, 4), (4, 8), (128, 32), (128, 8)])
def test_a_launch_touches_the_rows_that_the_stock_operator_would(ratio: int, page_rows: int) -> None:
    rng = random.Random(ratio)
    shape = TailShape(ratio, ratio == 4, page_rows, layers=2)
    columns = shape.columns(160)
    for _ in range(60):
        starts = [rng.choice([0, 1, rng.randint(0, 400)]) for _ in range(3)]
        chunks = [RequestChunk(RequestId("r"), start, start + rng.choice([1, 2, 5, 128, 160])) for start in starts]
        rows = Rows.of(shape, columns, [(7, chunk) for chunk in chunks])
        pages, written = rows_the_long_way(ratio, page_rows, columns, chunks)
        cells = rows.cells.tolist()
        assert len(cells) == rows.history + len(rows.places) == rows.history + len(rows.stamps)
        assert (set(cells[: rows.history]), rows.history) == (pages, len(pages))
        found = list(zip(cells[rows.history :], rows.places.tolist(), strict=True))
        assert (set(found), len(found)) == (written, len(written))


def test_no_two_rows_have_a_word_in_common() -> None:
    stamps = {
        (int(stamp) + int(salt(layer, kind)) + word * PER_WORD) % 2**32
        for layer, kind in itertools.product(range(3), CompressorKind)
        for request in range(1, 40)
        for stamp in Rows.of(
            TailShape(4, True, 4, layers=1), 30, [(request, RequestChunk(RequestId("r"), 0, 8))]
        ).stamps
        for word in range(16)
    }
    assert len(stamps) == 9 * 39 * 4 * 16, "the tail of 8 rows is 4 rows"


def test_the_verdict_names_everything_that_is_wrong() -> None:
    good = Totals(resident=[100 << 20, 110 << 20])
    assert failures([], [good, good]) == []
    assert "with fences off" in failures([2], [good])[0]
    assert "host memory" in failures([], [good, Totals(resident=[100 << 20, 200 << 20])])[0]
    for bad in (Totals(audit=Audit(8, 1)), Totals(violations=["x"])):
        assert len(failures([], [good, bad])) == 1
    lost = Totals()
    lost.lost["seats"] = 1
    assert len(failures([], [lost])) == 1


def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoDevice, match="--device abacus is not there"):
        Lab("abacus")
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "abacus", "--executions", "1", "--rounds", "1"])
    assert stopped.value.code == 2
    assert "abacus" in capsys.readouterr().err
