# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""All executions of one runner forward, by uBatch.

Problem: a forward may run as several uBatches, in threads that take turns or as stages of one thread. A request may be
cut between two of them, one of them may break off, and above us the exception of a thread is swallowed: vllm-ascend's
and afd-plugin's threads of uBatches merge what is there, and nobody hears of what is missing.
Way: one object begins all of them, with one generation and in uBatch order, so that tables are planned together and a
uBatch continues the cut request of the one before it. Whoever launches asks for the execution of its uBatch's index;
threads have no part in it. When the forward ends, however it ends, every execution is settled; and one that lacks
launches breaks the forward, if nothing else has: its output is short, and its requests' tails are void.
Not here: what is launched (`compressor/`), how a batch is cut (`ubatch.py`), what a stage of a connector may do
(`cam.py`). It imports neither torch nor vLLM.

    with Forward(runtime, parts) as forward:          # parts: chunks by uBatch
        with forward.running(0) as execution: ...     # in uBatch 0's thread, or forward[0] and forward.finish(0)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from afd_dsv4.tail.tables import RequestChunk
from afd_dsv4.workspace.identity import ExecutionId, Generation


class Execution(Protocol):
    """What a forward asks of an execution; `compressor/stock.py` has one."""

    @property
    def lost(self) -> str | None:
        """Why its requests' tails are void; None as long as they are not."""

    def computed(self, layer: int) -> bool:
        """Whether all compressor launches of a layer are queued; True where there is nothing to launch."""

    def finish(self) -> None:
        """No more launches."""


_logger = logging.getLogger("vllm.plugins.afd_dsv4")

E = TypeVar("E", bound=Execution)
E_co = TypeVar("E_co", bound=Execution, covariant=True)


class Runtime(Protocol[E_co]):
    """What a forward asks of the runtime; `compressor.stock.StockRuntime` is one."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""

    def mint(self) -> Generation:
        """A new generation."""

    def begin(self, chunks: Sequence[RequestChunk], *, generation: Generation | None = None, ubatch: int = 0) -> E_co:
        """Plan an execution and lease its workspace slot."""

    def open_of(self, generation: Generation) -> tuple[ExecutionId, ...]:
        """Executions of a generation that are open."""

    def end_forward(self, generation: Generation) -> tuple[ExecutionId, ...]:
        """Seal what is open of a forward, as broken where launches are missing."""

    def abandon(self, generation: Generation, why: str) -> tuple[ExecutionId, ...]:
        """Quarantine what is open of a forward. Where that fails, seal nothing of it."""


@contextmanager
def ending(runtime: Runtime[E], generation: Generation) -> Iterator[None]:
    """End the forward of a generation where this ends. What breaks it goes on also where its end raises, too."""
    try:
        yield
    except BaseException:
        _end_broken(runtime, generation)
        raise
    runtime.end_forward(generation)


def _end_broken(runtime: Runtime[E], generation: Generation) -> None:
    """End a forward that an exception has broken, which goes on: what this raises is logged."""
    try:
        runtime.end_forward(generation)
    except Exception:
        _logger.exception("afd-dsv4: not all that generation %s left open is settled", generation)


class BrokenOff(RuntimeError):
    """A uBatch of a forward did not launch all that it should have, and nobody had heard of it. Its tails are void."""


class Forward(Generic[E]):
    """A context manager; see the module. Enter it at once: its executions hold workspace slots from here on.

    Args:
        runtime: begins and settles executions.
        parts: chunks by uBatch; a uBatch without requests has an execution that holds nothing.
        generation: from `runtime.mint`, and of no other forward that is open; None mints one.

    Attributes:
        generation: of all its executions.
        executions: by uBatch.

    Raises:
        ValueError: executions of this generation are open. They are left alone.
        Whatever `runtime.begin` does. What had been begun by then is settled, its requests' tails are void.
    """

    def __init__(
        self, runtime: Runtime[E], parts: Sequence[Sequence[RequestChunk]], *, generation: Generation | None = None
    ) -> None:
        parts = [tuple(chunks) for chunks in parts]  # whatever gives them, and before anything is begun
        # By its generation a forward ends what it has begun: two of one generation would end each other's.
        if generation is not None and (held := runtime.open_of(generation)):
            raise ValueError(
                f"a forward is to have generation {generation}, of which {'; '.join(map(str, held))} are open; mint one"
            )
        self.runtime = runtime
        self.generation = runtime.mint() if generation is None else generation
        self._finished: set[int] = set()
        self._errors: dict[int, BaseException] = {}  # by uBatch, what its thread ended with
        self._over = False
        try:
            self.executions: tuple[E, ...] = tuple(
                runtime.begin(chunks, generation=self.generation, ubatch=ubatch) for ubatch, chunks in enumerate(parts)
            )
        except BaseException:
            self._over = True
            _end_broken(runtime, self.generation)
            raise

    def __len__(self) -> int:
        return len(self.executions)

    def __getitem__(self, ubatch: int) -> E:
        """The execution of a uBatch.

        Raises:
            IndexError: the forward has no such uBatch.
        """
        if not 0 <= ubatch < len(self.executions):
            raise IndexError(
                f"uBatch {ubatch} of generation {self.generation}, which has {len(self.executions)}; the forward was "
                f"planned with another cut"
            )
        return self.executions[ubatch]

    def finish(self, ubatch: int, error: BaseException | None = None) -> None:
        """A uBatch's last launch is queued, or its thread is over, however it went. Later calls do nothing.

        Args:
            ubatch: its index.
            error: what its thread ends with, which nobody above may hear of.
        """
        execution = self[ubatch]
        if error is not None:
            self._errors.setdefault(ubatch, error)
        if self._over or ubatch in self._finished:
            return
        self._finished.add(ubatch)
        try:
            execution.finish()
        except BaseException as failed:  # its fence, where a thread may swallow that, too
            self._errors.setdefault(ubatch, failed)
            raise

    @contextmanager
    def running(self, ubatch: int) -> Iterator[E]:
        """Finish a uBatch where its thread, or its part of one, ends. What that raises goes on."""
        error: BaseException | None = None
        try:
            yield self[ubatch]
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.finish(ubatch, error)

    def __enter__(self: F) -> F:
        if self._over:
            raise RuntimeError(f"generation {self.generation} is over; make a new forward")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Settle every execution. Call it once the threads of all uBatches have ended.

        What that raises is logged where an exception ends the forward already.

        Raises:
            Whatever `runtime.end_forward` does.
            BrokenOff: a uBatch lacks launches, or its thread ended with an exception that is not the one with which the
                forward ends, if it does. What the first such thread ended with is the cause, what the forward would
                have ended with the context; those of further threads are named. An interrupt is never replaced.
        """
        self._over = True
        if error is None:
            self.runtime.end_forward(self.generation)
        else:
            _end_broken(self.runtime, self.generation)
        self._report(error)

    def _report(self, error: BaseException | None) -> None:
        """Raise what nobody has heard of, once all is settled; `error` is what the forward ends with."""
        unheard = {ubatch: raised for ubatch, raised in sorted(self._errors.items()) if raised is not error}
        if error is not None and not (isinstance(error, Exception) and unheard):
            return
        broken = [*unheard] or [ubatch for ubatch, each in enumerate(self.executions) if each.lost is not None]
        if not broken:
            return
        first, *others = broken
        cause = unheard.get(first)
        said = f" with {type(cause).__name__}: {cause}" if cause else ", and nobody said why"
        also = "".join(f"; uBatch {each} with {unheard[each]!r}" for each in others if each in unheard)
        raise BrokenOff(
            f"uBatch {first} of generation {self.generation} broke off{said}{also}. The output of this forward is not "
            f"whole; tails: {self.executions[first].lost or 'whole'}"
        ) from cause


F = TypeVar("F", bound=Forward)  # type: ignore[type-arg]  # of any execution
