# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The forward context of the process, and the two threads of DBO (afd_plugin/v1/worker/npu/ubatching.py and
npu_ubatch_wrapper.py at 85e826e).

Two threads share one compute stream and run in turns: a baton of paired events, handed over between a send and its
receive. The forward context is one field of the process, put back whenever a thread gets the baton. An exception in a
thread is swallowed: its result is missing, and what is merged is short. All that is upstream's.
Stricter, where upstream waits for ever: a thread that ends before the barrier breaks it, and the main thread raises
`NeverReady`; a thread that hands the baton to one that has ended raises `PeerGone`. So an exception leads to a short
output only behind the peer's last yield. `observe` is called on the threads' way, so that tests can plant faults there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


class NeverReady(RuntimeError):
    """A uBatch's thread ended before the barrier. Upstream waits for it for ever."""


class PeerGone(RuntimeError):
    """The other uBatch's thread has ended. Upstream hands it the baton, and waits for ever."""


ForwardContext = SimpleNamespace

_forward_context: Any = None
_THREAD_ID_TO_CONTEXT: dict[int, int] = {}
_CURRENT_CONTEXTS: list[AscendUBatchContext | None] = []
_DBO_CURRENT_STREAM = threading.local()


def _nothing(where: str, ubatch: int) -> None:
    """Observe nothing."""


#: Called with "enter", "ready", "yield" or "exit", and the uBatch.
observe: Callable[[str, int], None] = _nothing


def get_forward_context() -> Any:
    assert _forward_context is not None, "no forward context is set"
    return _forward_context


@contextmanager
def override_forward_context(forward_context: Any) -> Iterator[None]:
    global _forward_context
    before, _forward_context = _forward_context, forward_context
    try:
        yield
    finally:
        _forward_context = before


class AscendUBatchContext:
    def __init__(
        self,
        id: int,
        compute_stream: Any,
        forward_context: Any,
        ready_barrier: threading.Barrier,
        cpu_wait_event: threading.Event,
        cpu_signal_event: threading.Event,
    ) -> None:
        self.id = id
        self.compute_stream = compute_stream
        self.current_stream = compute_stream
        self.forward_context = forward_context
        self.ready_barrier = ready_barrier
        self.cpu_wait_event = cpu_wait_event
        self.cpu_signal_event = cpu_signal_event
        self.peer = self
        self.left = False
        self.error: object = None

    def __enter__(self) -> AscendUBatchContext:
        observe("enter", self.id)
        _THREAD_ID_TO_CONTEXT[threading.get_ident()] = self.id
        _CURRENT_CONTEXTS[self.id] = self
        try:
            self.ready_barrier.wait()
        except threading.BrokenBarrierError:  # upstream never breaks it
            del _THREAD_ID_TO_CONTEXT[threading.get_ident()]
            raise
        self._resume(self.compute_stream)
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> bool:
        _CURRENT_CONTEXTS[self.id] = None
        del _THREAD_ID_TO_CONTEXT[threading.get_ident()]
        try:
            observe("exit", self.id)
        finally:
            self.left, self.error = True, exc_val
            self.cpu_signal_event.set()
            self.cpu_wait_event.clear()
        return False

    def yield_(self) -> None:
        observe("yield", self.id)
        self.current_stream = dbo_current_stream()
        assert _forward_context is self.forward_context, "another uBatch's forward context is set"
        if self.peer.left:
            raise PeerGone(
                f"uBatch {self.id} yields to uBatch {self.peer.id}, whose thread has ended with {self.peer.error!r}"
            )
        assert not self.cpu_wait_event.is_set(), "the baton is here and is waited for"
        self.cpu_signal_event.set()
        self._resume(self.current_stream)

    def _resume(self, stream: Any) -> None:
        global _forward_context
        self.cpu_wait_event.wait()
        self.cpu_wait_event.clear()
        _forward_context = self.forward_context
        self.current_stream = stream
        if dbo_current_stream() != stream:
            dbo_set_stream(stream)


def dbo_current_stream() -> Any:
    if getattr(_DBO_CURRENT_STREAM, "value", None) is None:
        _DBO_CURRENT_STREAM.value = torch.npu.current_stream()
    return _DBO_CURRENT_STREAM.value


def dbo_set_stream(stream: Any) -> None:
    _DBO_CURRENT_STREAM.value = stream
    torch.npu.set_stream(stream)


def dbo_enabled() -> bool:
    return bool(_THREAD_ID_TO_CONTEXT)


def dbo_current_ubatch_id() -> int:
    return _THREAD_ID_TO_CONTEXT[threading.get_ident()] if _THREAD_ID_TO_CONTEXT else 0


def dbo_yield() -> None:
    if _THREAD_ID_TO_CONTEXT:
        context = _CURRENT_CONTEXTS[_THREAD_ID_TO_CONTEXT[threading.get_ident()]]
        assert context is not None
        context.yield_()


def make_ubatch_contexts(
    num_micro_batches: int,
    compute_stream: Any,
    forward_contexts: list[Any],
    ready_barrier: threading.Barrier,
) -> list[AscendUBatchContext]:
    assert num_micro_batches == 2, "there are two uBatches, always"
    _CURRENT_CONTEXTS.extend([None] * (2 - len(_CURRENT_CONTEXTS)))
    turns = [threading.Event(), threading.Event()]
    contexts = [
        AscendUBatchContext(i, compute_stream, forward_contexts[i], ready_barrier, turns[i], turns[1 - i])
        for i in range(2)
    ]
    contexts[0].peer, contexts[1].peer = contexts[1], contexts[0]
    return contexts


@dataclass
class AscendUbatchMetadata:
    context: AscendUBatchContext
    input_ids: Any
    positions: Any
    inputs_embeds: Any
    intermediate_tensors: Any
    num_tokens: int


class AscendUBatchWrapper:
    """The threads' part of upstream's wrapper: no graphs, and stages come as contexts that are made already."""

    def __init__(self, runnable: Callable[..., torch.Tensor]) -> None:
        self.runnable = runnable
        self.ready_barrier = threading.Barrier(3)

    def _run_ubatch_thread(
        self,
        results: list[tuple[int, torch.Tensor]],
        model: Callable[..., torch.Tensor],
        ubatch_metadata: AscendUbatchMetadata,
    ) -> None:
        with torch.inference_mode():
            with ubatch_metadata.context:
                observe("ready", ubatch_metadata.context.id)
                output = model(
                    input_ids=ubatch_metadata.input_ids,
                    positions=ubatch_metadata.positions,
                    intermediate_tensors=ubatch_metadata.intermediate_tensors,
                    inputs_embeds=ubatch_metadata.inputs_embeds,
                )
            results.append((ubatch_metadata.context.id, output))

    def _run_ubatches(
        self, ubatch_metadata: Sequence[AscendUbatchMetadata], model: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        results: list[tuple[int, torch.Tensor]] = []

        def run(metadata: AscendUbatchMetadata) -> None:
            try:
                self._run_ubatch_thread(results, model, metadata)
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                if not passed.is_set():
                    self.ready_barrier.abort()

        errors: list[BaseException] = []
        passed = threading.Event()
        with override_forward_context(None):
            threads = [threading.Thread(target=run, args=(metadata,)) for metadata in ubatch_metadata]
            for thread in threads:
                thread.start()
            try:
                self.ready_barrier.wait()
                passed.set()
            except threading.BrokenBarrierError:
                for thread in threads:
                    thread.join()
                self.ready_barrier.reset()
                raise NeverReady(
                    f"a uBatch's thread ended before the barrier with {errors[0]!r}; upstream waits for it for ever"
                ) from None
            ubatch_metadata[0].context.cpu_wait_event.set()
            for thread in threads:
                thread.join()
        get_forward_context().dbo_enabled = True
        outputs = [output for _, output in sorted(results, key=lambda result: result[0])]
        if not outputs:
            raise RuntimeError("no uBatch has a result")  # upstream: an assertion
        return torch.cat(outputs)
