# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A forward whose uBatches are the stages of an asynchronous connector, and the work items that they have under way.

Problem: with afd-plugin's CAMAsyncAFDConnector one thread computes the attention of stage 1 while the experts of stage
0 are computed elsewhere: attention(L, 0), send, attention(L, 1), receive, send, attention(L + 1, 0), ... What has been
sent cannot be taken back: if the forward breaks off with an item under way, nobody can say when the device is done with
what was queued (the receive may spin for ever), and the authors of the connector call a blind drain unsafe.
Way: a work item has no identity of its own, so it gets ours: generation, stage, layer. The connector's subclass says
`sent` before it hands an item over, and `received` once the receive is queued; both are checked against the schedule:
stages send in turn, each a layer that is not behind any of theirs, the stages behind the first the layer of the first,
and one item is under way at a time. Layers may be left out (those without experts send nothing), their compressors not.
A forward that ends with an item under way has its open executions quarantined, one line says why. Where that fails they
stay open, so that nobody gets what they hold: none is ever sealed, since no fence of ours covers what was sent. Failed
is failed: nothing more may be sent or received for this forward, which does not end as if nothing had happened,
whoever caught the error.
Not here: tensors (`boundary.py`), and where the calls come from (adapters). It imports neither torch nor vLLM.

Contract: `connectors/npu/async_cam.py` and `model_executor/models/npu/deepseek_v2_async_cam_forward.py` of
vllm-project/afd-plugin at 85e826e.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from types import TracebackType

from afd_dsv4.execution.forward import E, Forward, Runtime
from afd_dsv4.execution.ubatch import cut_at
from afd_dsv4.tail.tables import RequestChunk
from afd_dsv4.workspace.identity import Generation

_logger = logging.getLogger("vllm.plugins.afd_dsv4")


class CamError(RuntimeError):
    """A stage that leaves its schedule, or a forward that has failed and is used all the same."""


def _chain(error: BaseException) -> Iterable[BaseException]:
    """An exception and all that it comes of, each once."""
    found = {id(error): error}
    todo = [error]
    while todo:
        at = todo.pop()
        for link in (at.__cause__, at.__context__):
            if link is not None and id(link) not in found:
                found[id(link)] = link
                todo.append(link)
    return found.values()


class CamForward(Forward[E]):
    """See the module; and `Forward`, whose uBatches are the stages.

    A stage without tokens has an execution without requests: it sends and receives like any other, and leases nothing.

    Attributes:
        under_way: by stage, the layer of the item that was sent and not received.
        failed: why nothing may be sent or received any more; None while it may. If it ended with an item under way,
            the connector's own queue is not to be trusted either: let it refuse from there on.
    """

    def __init__(
        self, runtime: Runtime[E], parts: Sequence[Sequence[RequestChunk]], *, generation: Generation | None = None
    ) -> None:
        super().__init__(runtime, parts, generation=generation)
        self.under_way: dict[int, int] = {}
        self.failed: str | None = None
        self._last = [-1] * len(self)  # by stage, the layer that was sent last
        self._turn = 0  # which stage sends next
        self._first: CamError | None = None  # that made it fail

    @classmethod
    def from_stages(
        cls,
        runtime: Runtime[E],
        chunks: Sequence[RequestChunk],
        stages: Sequence[tuple[int, int]],
        *,
        generation: Generation | None = None,
    ) -> CamForward[E]:
        """A forward whose batch is cut as the planner says.

        Args:
            runtime: see `Forward`.
            chunks: of the whole batch, in batch order.
            stages: first token of each stage in the packed batch, and the one behind its last (`AsyncMoeStage.
                token_slice`); one for the whole batch where the planner does not split.
            generation: see `Forward`.

        Raises:
            ValueError: stages that do not follow each other from the first token to the last, or see `ubatch.cut_at`.
        """
        return cls(runtime, cut_at(chunks, stages), generation=generation)

    def finish(self, ubatch: int, error: BaseException | None = None) -> None:
        """See `Forward`. A stage with an item under way stays open: no fence of ours covers what it has sent."""
        if ubatch not in self.under_way:
            super().finish(ubatch, error)
        elif error is not None:
            self._errors.setdefault(ubatch, error)

    def sent(self, layer: int, stage: int) -> None:
        """A stage is about to hand over its item. From here on it is under way, whatever becomes of the call.

        Args:
            layer: whose output it is.
            stage: index of the stage.

        Raises:
            CamError: the forward has failed or is over, or has no such stage; the model has no such layer; an item is
                under way; the stage is finished, has been at this layer, is not next to send, or has not launched all
                compressors up to it. The forward has failed.
        """
        if self.failed is not None or self._over or not 0 <= stage < len(self.executions):
            self._refuse(f"layer {layer}", stage)
        if stage in self.under_way:
            self._fail(f"sends layer {layer} before it has received that of layer {self.under_way[stage]}", stage)
        for other, sent in self.under_way.items():
            self._fail(f"sends layer {layer} before stage {other} has received that of layer {sent}", stage)
        if not 0 <= layer < self.runtime.num_layers:
            self._fail(f"sends layer {layer} of a model that has {self.runtime.num_layers}", stage)
        if stage in self._finished:
            self._fail(f"sends layer {layer} after it was finished", stage)
        if layer <= self._last[stage]:
            self._fail(f"sends layer {layer} behind layer {self._last[stage]}", stage)
        if stage != self._turn or (stage > 0 and layer != self._last[0]):
            due = f"layer {self._last[0]} of stage {self._turn}" if self._turn else "stage 0"
            self._fail(f"sends layer {layer} out of turn: {due} comes next", stage)
        computed = self.executions[stage].computed
        if not computed(layer) or not all(map(computed, range(self._last[stage] + 1, layer))):
            self._fail(
                f"sends layer {layer}, and has not launched all compressors up to it; their rows are lost", stage
            )
        self._turn = (stage + 1) % len(self._last)
        self._last[stage] = layer
        self.under_way[stage] = layer

    def received(self, stage: int) -> int:
        """The receive of a stage's item is queued: what is queued from now on comes behind it. Returns its layer.

        Raises:
            CamError: the forward has failed or is over, or the stage has nothing under way. The forward has failed.
        """
        if self.failed is not None or self._over or not 0 <= stage < len(self.executions):
            self._refuse("a result", stage)
        if stage not in self.under_way:
            self._fail("receives what it has not sent", stage)
        return self.under_way.pop(stage)

    def _refuse(self, what: str, stage: int) -> None:
        if self.failed is None and not self._over:
            self._fail(f"is none: this forward has {len(self.executions)}", stage)
        raise CamError(
            f"generation {self.generation} moves {what} of stage {stage} after it "
            f"{'failed: ' + self.failed if self.failed else 'was over'}"
        )

    def _fail(self, why: str, stage: int) -> None:
        self.failed = f"stage {stage} of generation {self.generation} {why}"
        self._first = CamError(self.failed)
        raise self._first

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Settle every execution; quarantine those that are open if an item is under way.

        Raises:
            CamError: an item is under way, and no exception says why; or the forward has failed, and the exception
                with which it ends, if any, is another one that does not come of that.
            BrokenOff: see `Forward`.
        """
        if self.under_way:
            items = ", ".join(f"layer {layer} of stage {stage}" for stage, layer in self.under_way.items())
            cause = (self.failed or "it ended") if error is None else f"{type(error).__name__}: {error}"
            why = f"generation {self.generation} has sent {items} and not received it: {cause}"
            _logger.error("afd-dsv4: %s. Nobody can tell when its work is over; restart the worker", why)
            lost = CamError(why) if error is None else None
            self.failed = why
            self._over = True
            try:
                self.runtime.abandon(self.generation, why)
            except Exception:  # the forward ends with what broke it all the same
                _logger.exception("afd-dsv4: what generation %s left open is not quarantined", self.generation)
            self._report(lost or error)
            if lost is not None:
                raise lost
            return
        if error is not None and self.failed is None:
            self.failed = f"{type(error).__name__}: {error}"
        super().__exit__(kind, error, trace)

    def _report(self, error: BaseException | None) -> None:
        """Also that it failed, if whoever was told has kept it to himself."""
        first = self._first
        told = error is not None and (
            isinstance(error, CamError)
            or not isinstance(error, Exception)
            or any(each is first for each in _chain(error))
        )
        if first is not None and not told and not self._errors:
            raise first
        super()._report(error)
