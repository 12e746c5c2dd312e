# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""afd-plugin's Attention runner with an execution for every stage of a forward.

Problem: a step may run whole, or as two stages of one thread with work of the other role in between (CAMAsync). Each
has attention metadata of its own, and a request may be cut between them. What the runner notes about a step it forgets
neither where the step ends nor where the next begins, so a forward without metadata of its own may run with another's.
Way: the colocated runner's methods, in front of afd-plugin's. Stand-ins go into every mapping of metadata there is; the
cut is the one that afd-plugin made; all executions of a forward are begun together (`execution/forward.py`, `cam.py`),
and a launch finds its own by `ubatch_idx` of the forward context that is current, which stages set and an uncut forward
does not. Notes of a step are dropped behind every step and every dummy run. The end: connector, then tails, then the
engine; but not the engine, whose end waits for the device and frees the model, where the connector's close or the
device has not come back, or a lease is in doubt.
Not here: the other role; DBO, whose uBatches this commit runs with each other's metadata (docs/compat.md). Identities
of afd-plugin's are not used: `transaction_id` is shared by both stages, and `afd_metadata.stage_idx` is 0 for both.

Contract: `v1/worker/npu/attention_model_runner.py` of vllm-project/afd-plugin at 85e826e.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from afd_plugin.connectors.base import AFDConnectorBase
from afd_plugin.v1.worker.npu.attention_model_runner import AFDNPUAttentionModelRunner
from vllm.forward_context import get_forward_context
from vllm.logger import logger

from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.runner import RunnerMixin
from afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f_afd_85e826e.connectors import (
    AfdDsv4CAMAsyncConnector,
    WatchedMixin,
)
from afd_dsv4.config import read
from afd_dsv4.execution.boundary import Boundary
from afd_dsv4.execution.cam import CamForward
from afd_dsv4.execution.forward import Forward
from afd_dsv4.execution.ubatch import cut_at
from afd_dsv4.tail.tables import RequestChunk

#: Seconds that work of the device is waited for at the end, see `connectors.CLOSE_S`.
TAILS_S: Final = 2.0


def _ubatch() -> int:
    """Index of the uBatch or stage that runs; an uncut forward has no such attribute."""
    return int(getattr(get_forward_context(), "ubatch_idx", 0))


class AfdDsv4AttentionRunner(RunnerMixin, AFDNPUAttentionModelRunner):  # type: ignore[misc]  # untyped
    """See the module."""

    def __init__(self, vllm_config: Any, device: Any) -> None:
        super().__init__(vllm_config, device)
        if not isinstance(self.connector, WatchedMixin):
            raise RuntimeError(
                f"afd-plugin made a {type(self.connector).__name__}, which is none of the adapter's; leave the worker "
                f"class to the plugin"
            )

    def load_model(self) -> None:
        """Load, meet the other role, take the memory of tails and slots, and have the connector look at it."""
        super().load_model()
        wanted = read(self.vllm_config.additional_config, {}).audit
        if logger.isEnabledFor(logging.DEBUG) if wanted is None else wanted:
            boundary = Boundary(self.tails, {"launches": self.launches}, opaque=(AFDConnectorBase,))
            self.connector.audit = boundary

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """See the module."""
        try:
            return super().execute_model(scheduler_output, *args, **kwargs)
        finally:
            self._forget()

    def shutdown(self) -> None:
        """Connector, tails, engine, in this order; the engine only where nothing can run any more.

        Raises:
            StillLeased: an execution is open. The engine is left as it is.
        """
        self.connector.close()
        lost = self.close_tails(TAILS_S)
        doubts = [f"leases in doubt: {len(lost)}"] if lost else []
        if self.connector.hangs:
            doubts.append("the connector's close, or the device, has not come back")
        if doubts:
            what = "model and KV cache, which running work may touch, are left to the end of the process"
            logger.error("afd-dsv4: %s: %s", what, " and ".join(doubts))
            return
        super().shutdown()

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._dummy_run(*args, **kwargs)
        finally:
            self._forget()

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.connector.whole():
            return super()._model_forward(*args, **kwargs)

    def _forget(self) -> None:
        """Drop what was noted about a step."""
        self._afd_pending_metadata = None
        self._afd_async_moe_ubatch_metadata = None
        self.ubatch_slices = None

    def _by_layer(self, metadata: Any) -> Iterable[dict[str, Any]]:
        stages = self._afd_async_moe_ubatch_metadata
        return [metadata, *(stages.attn_metadata if stages is not None else ())]

    def _run(self, run: Callable[[], Any], chunks: Sequence[RequestChunk], context: Any) -> Any:
        assert self.launches is not None
        assert self.tails is not None
        stages = self._afd_async_moe_ubatch_metadata
        if stages is not None:
            cuts, metadata = [stage.token_slice for stage in stages.stages], stages.attn_metadata
        else:
            cuts, metadata = [slice(0, sum(chunk.tokens for chunk in chunks))], [context.attn_metadata]
        parts = cut_at(chunks, [(int(part.start), int(part.stop)) for part in cuts])
        decodes = [self._one_of(part).num_decodes for part in metadata]
        kind = CamForward if isinstance(self.connector, AfdDsv4CAMAsyncConnector) else Forward
        with kind(self.tails, parts) as forward, self.launches.of(forward.executions, decodes, _ubatch):
            if isinstance(forward, CamForward):
                self.connector.forward = forward  # until the forward is over, see `_model_forward`
            return run()
