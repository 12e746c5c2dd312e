# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The software NPU behind torch_npu's host queue (TASK_QUEUE_ENABLE=1), where events and kernels are queued twice.

The queue is a setting of the process. So the programs below run one after another in one child process, which says how
each ended; a test looks up what it said.
"""

import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.softnpu import runtime as rt
from tests.npu_programs import ForkedGraph, hand_offs

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu
ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------ in the child


def a_query_says_false_while_the_record_is_still_queued_on_the_host() -> None:
    side, event = torch.npu.Stream(), torch.npu.Event()
    event.record(side)
    event.synchronize()
    assert event.query()
    rt.hang_host_queue()
    event.record(side)
    assert not event.query(), "torch_npu counts the records in its queue"
    status = ctypes.c_int()
    acl = ctypes.CDLL("libascendcl.so")
    assert acl.aclrtQueryEventStatus(ctypes.c_void_p(event.npu_event), ctypes.byref(status)) == 0
    assert status.value == 1, "ACL alone knows the older record only, and calls it complete"
    rt.release_host_queue()
    event.synchronize()
    assert event.query()


def an_event_that_was_never_recorded_says_true() -> None:
    assert torch.npu.Event().query()


def kernels_keep_their_place_between_the_events_in_the_queue() -> None:
    first, second = torch.npu.Stream(), torch.npu.Stream()
    x, y = torch.zeros(64, device="npu"), torch.zeros(64, device="npu")
    torch.npu.synchronize()
    rt.hang_host_queue()
    for step in range(8):
        first.wait_stream(second)
        with torch.npu.stream(first):
            x.fill_(float(step))
        second.wait_stream(first)
        with torch.npu.stream(second):
            y.add_(x)
    rt.release_host_queue()
    torch.npu.synchronize()
    assert torch.equal(y.cpu(), torch.full((64,), float(sum(range(8)))))


def an_ordered_program_is_right_under_every_schedule_and_one_without_its_waits_is_not() -> None:
    for seed in range(1, 5):
        for starve in (False, True):
            assert hand_offs(True, 32, seed=seed, max_delay_us=1000, starve=starve)
    assert not all(hand_offs(False, 32) for _ in range(5))
    rt.set_schedule(0)


def races_are_found_and_no_false_ones() -> None:
    rt.set_race_detection(True)
    hand_offs(True, 32)
    assert rt.races() == ()
    hand_offs(False, 32)
    assert len(rt.races()) > 0
    rt.set_race_detection(False)
    rt.clear_races()


def a_graph_of_two_streams_is_captured_and_replayed() -> None:
    assert ForkedGraph().right(1.0, 4.0)


def copies_from_and_to_pinned_memory_are_in_order() -> None:
    there, back = torch.arange(64.0).pin_memory(), torch.zeros(64).pin_memory()
    x, event = torch.zeros(64, device="npu"), torch.npu.Event()
    rt.hang_host_queue()
    x.copy_(there, non_blocking=True)
    x.mul_(2)
    back.copy_(x, non_blocking=True)
    event.record()
    assert torch.equal(back, torch.zeros(64))
    rt.release_host_queue()
    event.synchronize()
    assert torch.equal(back, torch.arange(64.0) * 2)


def an_operator_without_a_body_raises_at_once() -> None:
    import torch_npu

    with pytest.raises(NotImplementedError, match="npu_fast_gelu has no body"):
        torch_npu.npu_fast_gelu(torch.ones(8, device="npu"))
    assert torch.equal((torch.ones(8, device="npu") + 1).cpu(), torch.full((8,), 2.0))


def a_failing_task_is_reported_by_the_next_synchronisation() -> None:
    x = torch.ones(8, device="npu")
    x.index_copy_(0, torch.tensor([99]).npu(), torch.ones(1, device="npu"))
    with pytest.raises(RuntimeError, match=r"aten::index_copy_.*index 99 is out of bounds"):
        torch.npu.synchronize()
    torch.npu.synchronize()


def the_stock_runtime_compresses_the_rows_of_the_definition() -> None:
    from afd_dsv4.tail.tables import RequestChunk, RequestId
    from tests.stock_world import World

    torch.ops.softnpu.waive("compressor.hidden", True)
    rt.set_race_detection(True)
    world = World(5, length=260)
    requests = {name: world.request() for name in "abc"}
    for begin, end in ((0, 130), (130, 131), (131, 260)):
        chunks = [RequestChunk(RequestId(name), begin, end) for name in requests]
        world.forward(requests, chunks, cut_tokens=(end - begin) * 3 // 2, alternate=begin > 0)
    assert world.compared > 500
    assert world.different == 0
    assert rt.races() == ()
    rt.set_race_detection(False)


def our_kernels_keep_their_place_in_the_queue() -> None:
    from afd_dsv4.compressor.afd import AfdRuntime
    from afd_dsv4.tail.tables import RequestChunk, RequestId
    from tests.stock_world import World

    world = World(5, length=260, cls=AfdRuntime)
    requests, chunks = {"a": world.request()}, [RequestChunk(RequestId("a"), 0, 260)]
    execution = world.runtime.begin(chunks)
    torch.npu.synchronize()
    compressor, stream = world.geometry.compressors[0], torch.npu.current_stream()
    arguments = world.arguments(requests, chunks, compressor.kind)
    tokens = arguments[0].clone()
    torch.npu.synchronize()
    arguments[0].zero_()
    torch.npu.synchronize()
    weights = world.on_device[compressor.layer, compressor.kind]
    rt.hang_host_queue()
    arguments[0].copy_(tokens)  # whoever overtakes it compresses zeros
    out = execution.compress(compressor.layer, compressor.kind, arguments[0], weights, *arguments[1:])
    kept = out.clone()
    out.zero_()  # whoever is late writes again
    rt.release_host_queue()
    stream.synchronize()
    assert not out.cpu().any()
    world.pending.append((compressor, chunks, kept))
    world.check_all(requests)
    assert (world.compared, world.different) == (65, 0)
    execution.finish()


def an_operator_that_is_reached_in_another_way_raises_before_its_result_is_seen() -> None:
    """Last, because torch_npu's queue does not recover from an error."""
    import torch_npu

    with pytest.raises(RuntimeError, match="Identity"):
        torch_npu.npu_format_cast(torch.ones(32, 32, device="npu"), 29).cpu()


PROGRAMS: list[Callable[[], None]] = [
    an_event_that_was_never_recorded_says_true,
    a_query_says_false_while_the_record_is_still_queued_on_the_host,
    kernels_keep_their_place_between_the_events_in_the_queue,
    copies_from_and_to_pinned_memory_are_in_order,
    an_ordered_program_is_right_under_every_schedule_and_one_without_its_waits_is_not,
    races_are_found_and_no_false_ones,
    a_graph_of_two_streams_is_captured_and_replayed,
    an_operator_without_a_body_raises_at_once,
    a_failing_task_is_reported_by_the_next_synchronisation,
    the_stock_runtime_compresses_the_rows_of_the_definition,
    our_kernels_keep_their_place_in_the_queue,
    an_operator_that_is_reached_in_another_way_raises_before_its_result_is_seen,
]


def main() -> None:
    import torch_npu  # noqa: F401

    for program in PROGRAMS:
        try:
            program()
            outcome = ""
        except BaseException:
            outcome = traceback.format_exc()
        rt.clear_faults()
        print(json.dumps([program.__name__, outcome]), flush=True)
    os._exit(0)  # the queue is in error, and torch_npu's own shutdown would wait for it


# ------------------------------------------------------------------------------------------------ in the test run


def child(code: str, queue: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TASK_QUEUE_ENABLE": queue}
    command = [sys.executable, "-m", "afd_dsv4.softnpu", "--", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT, env=environment)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    done = child("from tests.integration.test_softnpu_task_queue import main; main()", "1")
    said = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    missing = [program.__name__ for program in PROGRAMS if program.__name__ not in said]
    assert not missing, (missing, done.stderr)
    return said


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_with_the_host_queue(program: Callable[[], None], outcomes: dict[str, Any]) -> None:
    assert outcomes[program.__name__] == ""


def test_without_a_host_queue_there_is_none_to_hang() -> None:
    if os.environ["TASK_QUEUE_ENABLE"] != "0":
        pytest.skip("no such case: the caller has turned the queue on")
    with pytest.raises(RuntimeError, match="no host queue to hang"):
        rt.hang_host_queue()


def test_another_level_of_the_queue_is_not_what_the_caller_gets() -> None:
    """The launcher turns the queue on for 1 only, and a process that asks for more behind its back is refused."""
    done = child("import os; print(os.environ['TASK_QUEUE_ENABLE'])", "2")
    assert done.stdout.strip() == "0"
    done = child("import os; os.environ['TASK_QUEUE_ENABLE'] = '2'; import torch_npu", "0")
    assert "TASK_QUEUE_ENABLE is '2'" in done.stderr
