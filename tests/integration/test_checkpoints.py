# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Checkpoints on the software NPU: a request that goes on elsewhere compresses the rows of the uninterrupted one.

Every compressed row is compared bit for bit with the definition, computed from the whole sequence in one piece. All
pools are NaN before anything is written there, so a row that should have been restored, and was not, is seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from afd_dsv4.compressor import tails
from afd_dsv4.compressor.tails import CheckpointLost, restore, save
from afd_dsv4.evidence.soak_load import Gate
from afd_dsv4.execution.step import ImpossibleStep, Steps
from afd_dsv4.geometry import CompressorKind
from afd_dsv4.tail import checkpoint
from afd_dsv4.tail.store import TailFull, TailVoid, UnknownPosition, UnknownRequest
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted
from afd_dsv4.workspace.lease import LeaseState, OrderError
from afd_dsv4.workspace.order import check
from tests.stock_world import LAYERS, Request, World, small_hidden_size

__all__ = ["small_hidden_size"]  # a fixture

pytestmark = pytest.mark.npu

R, OTHER = RequestId("r"), RequestId("other")
DRAFTS = 2


def world(**limits: Any) -> World:
    """A world all of whose pages are NaN."""
    made = World(3, drafts=DRAFTS, **limits)
    for pool in made.runtime.pools.values():
        pool.fill_(float("nan"))
    torch.npu.synchronize()
    return made


def chunk(start: int, end: int, drafts: int = 0, request: RequestId = R) -> RequestChunk:
    return RequestChunk(request, start, end, drafts)


def verify(here: World, requests: dict[str, Request], start: int, accepted: int) -> None:
    """A chunk with drafts; those that will be rejected are other tokens than those that follow in the end."""
    wrong = replace(requests["r"], x=requests["r"].x.clone())
    wrong.x[start + 1 + accepted :] += 1
    before = here.different
    here.forward({"r": wrong}, [chunk(start, start + 1 + DRAFTS, DRAFTS)])
    here.different = before  # rows of rejected drafts are nobody's


def go_on(there: World, requests: dict[str, Request], position: int) -> None:
    """Behind the next C128 window, and in the midst of a C4 window."""
    end = position // 128 * 128 + 128 + 2
    there.forward(requests, [chunk(position, end, DRAFTS if position % 2 else 0)])
    there.runtime.end_request(R)


def whole(*worlds: World) -> bool:
    """Whether all rows are right, and all work was ordered."""
    return all(
        each.different == 0
        and check(each.runtime.trace.records(), each.runtime.trace.dropped).violations == ()
        and each.compared > 0
        for each in worlds
    )


def elsewhere() -> World:
    """Other pages, other slots, another seat: nothing lies where it lay."""
    there = world(block_size=32, slots=3)
    there.forward({"other": there.request()}, [chunk(0, 200, request=OTHER)])
    return there


def test_a_request_goes_on_elsewhere_at_every_position_of_a_period() -> None:
    """And where it is, too, as if nothing had been saved."""
    here, there = world(), elsewhere()
    requests = {"r": here.request()}
    here.forward(requests, [chunk(0, 128)])
    for position in range(129, 257):
        verify(here, requests, position - 1, accepted=0)
        restore(there.runtime, R, save(here.runtime, R, position), position)
        go_on(there, requests, position)
    here.forward(requests, [chunk(256, 400)])
    assert whole(here, there)


@pytest.mark.parametrize("known", [True, False], ids=["known", "open"])
def test_a_request_goes_on_elsewhere_behind_every_accept_length(known: bool) -> None:
    """Where it is open, the checkpoint is written before it is known."""
    here, there = world(), elsewhere()
    requests = {"r": here.request()}
    for start in (126, 127, 128, 129, 130, 131, 254):
        for accepted in range(DRAFTS + 1):
            position = start + 1 + accepted
            here.forward(requests, [chunk(0, start)])
            verify(here, requests, start, accepted)
            if known:
                restore(there.runtime, R, save(here.runtime, R, position), position)
            else:
                restore(there.runtime, R, save(here.runtime, R), start + 1, drafts=DRAFTS)
            here.runtime.end_request(R)
            go_on(there, requests, position)
    assert whole(here, there)


@pytest.mark.parametrize("kind", CompressorKind)
def test_one_value_of_the_payload_changed_makes_rows_differ(kind: CompressorKind) -> None:
    here, there = world(), world()
    requests = {"r": here.request()}
    here.forward(requests, [chunk(0, 201)])
    read = checkpoint.decode(save(here.runtime, R), LAYERS, position=201)
    layers, _, values = read.rows[kind].shape
    kept = checkpoint.kept(kind, values, 201, 201).cells
    score = kept[kept % values >= values // 2]  # it alone decides which kv is taken, where it is large enough
    read.rows[kind].reshape(layers, -1)[-1, score[len(score) // 2]] += 100
    changed = checkpoint.encode(LAYERS, 201, read.rows, generation=read.generation)
    restore(there.runtime, R, changed, 201)
    there.forward(requests, [chunk(201, 258)])
    assert there.different > 0


def test_the_checkpoint_of_a_request_and_of_the_same_one_restored_are_equal() -> None:
    here, there = world(), world(block_size=64)
    here.forward({"r": here.request()}, [chunk(0, 333)])
    data = save(here.runtime, R)
    written = checkpoint.decode(data, LAYERS, position=333).generation
    restore(there.runtime, R, data, 333, generation=written)
    again = save(there.runtime, R)
    payload = checkpoint.payload_bytes(LAYERS, 333)
    assert again[-payload:] == data[-payload:]
    with pytest.raises(checkpoint.StaleCheckpoint, match="generation"):
        restore(here.runtime, OTHER, data, 333, generation=written + 1)


def test_a_restored_request_has_only_the_rows_of_its_checkpoint_and_else_nan() -> None:
    here, there = world(), world()
    here.forward({"r": here.request()}, [chunk(0, 130)])
    for pool in there.runtime.pools.values():
        pool.fill_(7.0)
    restore(there.runtime, R, save(here.runtime, R), 130)
    for kind, pool in there.runtime.pools.items():
        shape = there.runtime.shapes[kind.ratio]
        mapped, ids = there.runtime.store.tail(R, kind.ratio)
        values = pool.shape[2]
        kept = checkpoint.kept(kind, values, 130, 130)
        want = torch.zeros(shape.layers, len(mapped) * shape.page_rows * values, dtype=torch.bool)
        first = (kept.rows.start - mapped.start * shape.page_rows) * values
        want[:, torch.from_numpy(kept.cells) + first] = True
        found = pool.cpu()[torch.from_numpy(ids).long()].reshape(shape.layers, -1)
        assert torch.equal(~found.isnan(), want), kind
        others = torch.ones(pool.shape[0], dtype=torch.bool)
        others[torch.from_numpy(ids).long().ravel()] = False
        assert (pool.cpu()[others] == 7.0).all()


@pytest.mark.parametrize("ordered", [True, False])
def test_saves_and_restores_are_behind_and_before_whoever_has_the_pages_whatever_streams_they_are_on(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world(ordered=ordered, max_num_seqs=2, slots=12)  # a slot each: none waits for another's
    requests = {"r": here.request()}
    requests["other"] = requests["r"]
    here.queue(requests, [chunk(0, 100)], alternate=True)
    data = save(here.runtime, R)
    # From here on the host waits for nothing, and nothing is over when it looks: streams alone must wait.
    monkeypatch.setattr(tails, "_wait", lambda *_: None)
    gate = Gate(torch.npu.ExternalEvent(), here.streams[0], here.copies)
    for start, end in ((100, 203), (203, 390)):
        with torch.npu.stream(torch.npu.Stream()):
            save(here.runtime, R)
        here.queue(requests, [chunk(start, end)], alternate=True)  # takes pages that are being read
        with torch.npu.stream(torch.npu.Stream()):
            restore(here.runtime, OTHER, data, 100)  # into the seat that the last round's launches have
        here.queue(requests, [chunk(100, 170, request=OTHER)], alternate=True)
        here.runtime.end_request(OTHER)
    violations = check(here.runtime.trace.records(), here.runtime.trace.dropped).violations
    gate.open()
    assert bool(violations) is not ordered
    here.check_all(requests)
    assert not ordered or here.different == 0


def test_what_cannot_be_saved_is_refused_by_name_and_stays_as_it_is() -> None:
    here = world()
    requests = {"r": here.request(), "other": here.request()}
    with pytest.raises(UnknownRequest, match="'r' has no tail"):
        save(here.runtime, R)
    here.forward(requests, [chunk(0, 50, DRAFTS)])
    for position in (47, 51):
        with pytest.raises(ValueError, match=rf"'r' is to be saved at {position}, and goes on in \[48, 50\]"):
            save(here.runtime, R, position)
    with (
        here.runtime.begin([chunk(0, 9, request=OTHER)]),
        pytest.raises(OrderError, match="has the tail, and is open, broke off or is in doubt; finish it first"),
    ):
        save(here.runtime, OTHER)
    with pytest.raises(TailVoid, match="'other' lost its tail"):
        save(here.runtime, OTHER)
    here.forward(requests, [chunk(49, 140)])
    assert here.different == 0


def test_what_cannot_be_restored_is_refused_by_name_and_changes_nothing() -> None:
    here = world(max_num_seqs=2)
    requests = {"r": here.request()}
    here.forward(requests, [chunk(0, 50)])
    data = save(here.runtime, R)
    with pytest.raises(ValueError, match="'r' has a tail here"):
        restore(here.runtime, R, data, 50)
    with pytest.raises(checkpoint.StaleCheckpoint):
        restore(here.runtime, OTHER, data, 51)
    with pytest.raises(checkpoint.DamagedCheckpoint):
        restore(here.runtime, OTHER, data[:-1] + bytes([data[-1] ^ 1]), 50)
    restore(here.runtime, OTHER, data, 50)
    with pytest.raises(UnknownPosition, match="'other' starts at 49"):
        here.runtime.begin([chunk(49, 60, request=OTHER)])
    with pytest.raises(TailFull, match="0 free of 2 tails"):
        restore(here.runtime, RequestId("third"), data, 50)
    here.runtime.end_request(OTHER)
    small = World(3)
    here.forward(requests, [chunk(50, 55, DRAFTS)])
    with pytest.raises(ValueError, match="sized for 0 drafts"):
        restore(small.runtime, R, save(here.runtime, R), 53, drafts=DRAFTS)
    restore(small.runtime, R, save(here.runtime, R, 54), 54)
    small.forward(requests, [chunk(54, 140)])
    assert small.different == 0


def test_a_tail_that_is_saved_twice_is_of_the_forward_that_wrote_it_and_a_restore_counts_as_one() -> None:
    here, there = world(), world()
    requests = {"r": here.request()}
    for end in (50, 77):
        before = here.runtime.mint()
        here.forward(requests, [chunk(0 if end == 50 else 50, end)])
        first, second = save(here.runtime, R), save(here.runtime, R)
        assert first == second
        assert before < checkpoint.decode(first, LAYERS, position=end).generation < here.runtime.mint() - 2
    written = checkpoint.decode(first, LAYERS, position=77).generation
    before = there.runtime.mint()
    restore(there.runtime, R, second, 77, generation=written)
    after = there.runtime.mint()
    for _ in range(2):
        assert before < checkpoint.decode(save(there.runtime, R), LAYERS, position=77).generation < after
    there.forward(requests, [chunk(77, 140)])
    assert whole(here, there)


def test_whoever_has_the_pages_next_follows_a_save_that_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(max_num_seqs=1, slots=8)  # a slot each: none waits for another's
    requests = {"r": here.request()}
    here.queue(requests, [chunk(0, 100)])
    gather, gate = tails._gather, Gate(torch.npu.ExternalEvent(), here.streams[0], here.copies)

    def breaks_off(*args: Any) -> None:
        gather(*args)
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched, torch.npu.stream(torch.npu.Stream()):
        patched.setattr(tails, "_gather", breaks_off)
        with pytest.raises(RuntimeError, match="no memory"):
            save(here.runtime, R)
    here.queue(requests, [chunk(100, 203)])  # rewrites pages that are being read
    violations = check(here.runtime.trace.records(), here.runtime.trace.dropped).violations
    gate.open()
    here.check_all(requests)
    save(here.runtime, R)
    assert violations == ()
    assert here.different == 0


def test_whoever_has_the_seat_next_follows_a_restore_that_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(max_num_seqs=1, slots=8)  # a slot each: none waits for another's
    requests = {"r": here.request(), "other": here.request()}
    here.forward(requests, [chunk(0, 77)])
    data = save(here.runtime, R)
    here.runtime.end_request(R)
    scatter = tails._scatter

    def breaks_off(*args: Any) -> None:
        scatter(*args)
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched, torch.npu.stream(torch.npu.Stream()):
        patched.setattr(tails, "_scatter", breaks_off)
        with pytest.raises(RuntimeError, match="no memory"):
            restore(here.runtime, R, data, 77)
    here.queue(requests, [chunk(0, 100, request=OTHER)])  # writes pages that are being written
    violations = check(here.runtime.trace.records(), here.runtime.trace.dropped).violations
    here.check_all(requests)
    assert violations == ()
    assert here.different == 0


def test_a_restore_that_breaks_off_gives_its_seat_back(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = world(), world(max_num_seqs=1)
    requests = {"r": here.request()}
    here.forward(requests, [chunk(0, 77)])
    data = save(here.runtime, R)

    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    upload = tails._upload
    monkeypatch.setattr(tails, "_upload", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        restore(there.runtime, R, data, 77)
    monkeypatch.setattr(tails, "_upload", upload)
    restore(there.runtime, R, data, 77)
    there.forward(requests, [chunk(77, 140)])
    assert there.different == 0


def test_a_checkpoint_needs_a_workspace_slot_and_takes_it_for_its_own_time_only() -> None:
    here = world(slots=1)
    requests = {"r": here.request(), "other": here.request()}
    here.forward(requests, [chunk(0, 77)])
    with here.runtime.begin([chunk(0, 5, request=OTHER)]), pytest.raises(Exhausted):
        save(here.runtime, R)
    for _ in range(3):
        save(here.runtime, R)
    here.forward(requests, [chunk(77, 140)])
    assert here.different == 0


@pytest.mark.parametrize("saves", [0, 3], ids=["control: none", "three saves"])
def test_a_save_that_is_refused_takes_no_workspace_slot_away(saves: int) -> None:
    now = [0.0]
    here = world(slots=4, fence_timeout_s=5.0, clock=lambda: now[0])
    requests = {"r": here.request(), "other": here.request()}
    here.forward(requests, [chunk(0, 10)])
    gate = Gate(torch.npu.ExternalEvent(), here.streams[0], here.copies)
    try:
        here.queue(requests, [chunk(10, 14)])  # hangs
        now[0] = 4.0
        here.queue(requests, [chunk(14, 18), chunk(0, 9, request=OTHER)])  # other only shares an execution with it
        now[0] = 6.0
        here.runtime.arena.watch()
        for _ in range(saves):
            with pytest.raises(OrderError, match="is in doubt"):
                save(here.runtime, OTHER)
        with here.runtime.begin([chunk(0, 5, request=RequestId("third"))]) as third:
            for _ in range(saves):
                with pytest.raises(OrderError, match="is open"):
                    save(here.runtime, RequestId("third"))
            assert third.lease is not None
            free = [slot for slot in here.runtime.arena.slots if slot.lease is None and slot.last is None]
            assert len(free) == 1  # of four: two have what hangs, one is third's
    finally:
        gate.open()
        torch.npu.synchronize()


def test_rows_that_never_come_from_the_device_void_the_tail_and_are_reported() -> None:
    here = world(fence_timeout_s=0.05)
    requests = {"r": here.request()}
    gate = Gate(torch.npu.ExternalEvent(), here.streams[0], here.copies)
    here.queue(requests, [chunk(0, 77)])
    kept = len(tails._NEVER_FREED)
    try:
        with pytest.raises(CheckpointLost, match=r"has not come within 0\.05 s"):
            save(here.runtime, R)
        (host,) = tails._NEVER_FREED[kept:]  # the copy may still write to it
        assert host.is_pinned()
        with pytest.raises(TailVoid, match="its checkpoint has not come"):
            save(here.runtime, R)
        assert LeaseState.QUARANTINED in {lease.state for lease in here.runtime.arena.live()}
    finally:
        gate.open()
        torch.npu.synchronize()
        del tails._NEVER_FREED[kept:]


def test_a_step_takes_a_start_above_0_of_a_restored_request_only() -> None:
    steps = Steps()
    with pytest.raises(ImpossibleStep, match="is new and starts at 77"):
        steps.chunks(["r"], [77], [3], {})
    steps.restore("r", 76, 77)
    assert steps.chunks(["r"], [77], [3], {}) == (chunk(77, 80),)
    with pytest.raises(ImpossibleStep, match="has a tail here"):
        steps.restore("r", 80, 80)
    assert steps.end(finished=["r"]) == (R,)
    with pytest.raises(ImpossibleStep, match="0 <= low <= high"):
        steps.restore("r", 3, 2)
    steps.restore("r", 9, 9)
    with pytest.raises(ImpossibleStep, match="goes on at 10, and was left between 9 and 9"):
        steps.chunks(["r"], [10], [1], {})
    assert steps.restarted(["r"], [0]) == (R,)
