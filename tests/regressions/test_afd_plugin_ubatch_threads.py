# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin at 85e826e, no report: what a uBatch's thread raises is swallowed, or stops all for ever.

Symptom: the main thread merges the results that are there; one may be missing, and the output is short, without an
error. A thread that fails before the barrier leaves the main thread waiting there.
Here: a uBatch's execution is finished where its thread ends, and a forward whose output is not whole raises, with what
the thread ended with as the cause; its requests' tails are void, the other uBatch's are not. Before the barrier nobody
can help the main thread but somebody else; once it comes back, every workspace slot is free.
The threads are those of the double (tests/afd/ubatching.py), which breaks the barrier where upstream waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from afd_dsv4.execution.forward import BrokenOff, Forward  # noqa: E402
from afd_dsv4.execution.ubatch import cut  # noqa: E402
from afd_dsv4.tail.store import TailVoid  # noqa: E402
from afd_dsv4.tail.tables import RequestChunk, RequestId  # noqa: E402
from tests.afd import protocol, ubatching  # noqa: E402
from tests.model_runtime import ModelRuntime  # noqa: E402

pytestmark = [
    pytest.mark.npu,  # the threads set their stream
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),  # upstream does not handle it
]

P = protocol.double()
A, B = (RequestId(name) for name in "ab")
PARTS = cut([RequestChunk(A, 0, 9), RequestChunk(B, 0, 12)], 9)  # between a and b


class Failure(Exception):
    """What a thread ends with."""


@pytest.fixture(autouse=True)
def nothing_is_observed() -> Iterator[None]:
    yield
    ubatching.observe = ubatching._nothing


class Dbo:
    """A forward in the two threads of uBatches.

    Args:
        fail: called in a thread with its uBatch and every layer; may raise.
        ours: whether the forward is told where a thread ends.
    """

    def __init__(self, fail: Callable[[int, int], None], *, ours: bool = True) -> None:
        self.runtime = ModelRuntime(1)
        self.streams = [self.runtime.device.stream() for _ in range(2)]
        self.fail, self.ours = fail, ours
        self.output: Any = None

    def thread(self, *, inputs_embeds: Any, **_: object) -> Any:
        ubatch = P.get_forward_context().ubatch_idx
        if not self.ours:
            self.layers(ubatch)
            return inputs_embeds
        with self.forward.running(ubatch):
            self.layers(ubatch)
            return inputs_embeds

    def layers(self, ubatch: int) -> None:
        for layer in range(self.runtime.shape.layers):
            self.fail(ubatch, layer)
            self.forward[ubatch].launch(layer, self.streams[ubatch])

    def run(self) -> None:
        with Forward(self.runtime, PARTS) as self.forward, P.override_forward_context(SimpleNamespace()):
            self.output = self.threads()

    def threads(self) -> Any:
        wrapper = P.AscendUBatchWrapper(self.thread)
        contexts = [SimpleNamespace(ubatch_idx=i) for i in range(2)]
        made = P.make_ubatch_contexts(2, torch.npu.current_stream(), contexts, wrapper.ready_barrier)
        rows = (torch.zeros(9, 1), torch.zeros(12, 1))
        ubatches = [
            P.AscendUbatchMetadata(context, None, None, rows[i], None, len(rows[i])) for i, context in enumerate(made)
        ]
        return wrapper._run_ubatches(ubatches, self.thread)

    def void(self) -> list[str]:
        """Requests that cannot go on; all slots are free for those that can."""
        found = []
        for chunk in (RequestChunk(A, 9, 10), RequestChunk(B, 12, 13)):
            try:
                with Forward(self.runtime, [[chunk]]) as forward:
                    for layer in range(self.runtime.shape.layers):
                        forward[0].launch(layer, self.streams[0])
            except TailVoid:
                found.append(str(chunk.request))
        assert self.runtime.open == {}
        assert all(slot.lease is None for slot in self.runtime.arena.slots)
        self.runtime.device.run()
        assert self.runtime.wrong == []
        return found


def nothing(_ubatch: int, _layer: int) -> None:
    """Does not fail."""


def test_both_threads_come_to_their_end() -> None:
    dbo = Dbo(nothing)
    dbo.run()
    assert len(dbo.output) == 21
    assert dbo.void() == []


@pytest.mark.parametrize(("failing", "lost"), [(0, "a"), (1, "b")])
def test_a_swallowed_exception_breaks_the_forward_and_voids_the_tails_of_its_ubatch_alone(
    failing: int, lost: str
) -> None:
    def fail(ubatch: int, layer: int) -> None:
        if (ubatch, layer) == (failing, 1):
            raise Failure("planted")

    dbo = Dbo(fail)
    with pytest.raises(BrokenOff, match=f"uBatch {failing} of generation 1 broke off with Failure: planted") as raised:
        dbo.run()
    assert isinstance(raised.value.__cause__, Failure)
    assert len(dbo.output) == (12, 9)[failing]  # what would have been taken for the whole
    assert dbo.void() == [lost]


def test_a_forward_that_is_told_nothing_is_found_out_by_what_it_lacks() -> None:
    """Planted: nobody finishes the execution in its thread."""

    def fail(ubatch: int, layer: int) -> None:
        if (ubatch, layer) == (1, 2):
            raise Failure("planted")

    dbo = Dbo(fail, ours=False)
    with pytest.raises(BrokenOff, match="uBatch 1 of generation 1 broke off, and nobody said why"):
        dbo.run()
    assert dbo.void() == ["b"]


def test_without_a_forward_the_short_output_is_all_there_is() -> None:
    """Negative control: upstream alone."""

    def fail(ubatch: int, layer: int) -> None:
        if (ubatch, layer) == (0, 0):
            raise Failure("planted")

    dbo = Dbo(fail, ours=False)
    dbo.forward = Forward(dbo.runtime, PARTS)
    with P.override_forward_context(SimpleNamespace()):
        assert len(dbo.threads()) == 12  # of 21, and no error
    dbo.runtime.end_forward(dbo.forward.generation)


def test_a_thread_that_fails_before_the_barrier_leaves_every_slot_free_once_the_main_thread_is_back() -> None:
    def observe(where: str, ubatch: int) -> None:
        if (where, ubatch) == ("enter", 1):
            raise Failure("before the barrier")

    ubatching.observe = observe
    dbo = Dbo(nothing)
    with pytest.raises(ubatching.NeverReady, match="upstream waits for it for ever"):
        dbo.run()
    assert dbo.void() == ["a", "b"]


def test_upstreams_barrier_waits_for_a_thread_that_will_not_come() -> None:
    """Negative control, with a limit where upstream has none."""
    barrier = threading.Barrier(3)

    def comes() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait()

    thread = threading.Thread(target=comes)  # the other one has failed
    thread.start()
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait(timeout=0.05)
    thread.join()
