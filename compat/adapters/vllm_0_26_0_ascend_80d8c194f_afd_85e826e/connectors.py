# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""afd-plugin's connectors of the Attention role: what crosses is looked at, counted, and let go of in bounded time.

Problem: a workspace tensor, or a view of one, that is handed to a connector is read by another process at a time that
nobody here knows. What has been sent cannot be taken back. And `close` destroys process groups without waiting, may
raise, and may hang for ever behind a receive that is pending (vllm-project/afd-plugin#251).
Way: subclasses under the same names. Every tensor in a call, and every one that waits to be received, is checked by
storage (`execution/boundary.py`) where that is on; the asynchronous connector tells the forward that runs what it sends
and receives (`execution/cam.py`). A forward of any kind that ends with something sent and not received leaves an answer
to the next one that is not its own, so nothing more is handed over from then on.
`close` runs the native one, and waits for the device behind it, in a thread that it waits `CLOSE_S` for. What is raised
is logged, and so is that it has not come back (`hangs`); either way the caller goes on.
Not here: the memory that is checked against, and which forward runs (`runner.py`); the FFN role's connectors.

Contract: `connectors/base.py`, `connectors/npu/{async_cam,camp2p}.py` of vllm-project/afd-plugin at 85e826e.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from afd_plugin.connectors.factory import AFDConnectorFactory
from afd_plugin.connectors.npu.async_cam import CAMAsyncAFDConnector
from afd_plugin.connectors.npu.camp2p import CAMP2pAFDConnector
from vllm.forward_context import get_forward_context
from vllm.logger import logger

from afd_dsv4.execution.boundary import Boundary
from afd_dsv4.execution.cam import CamError, CamForward

#: Seconds that `close` waits. With those for the tails (`runner.py`) less than vLLM gives a worker for its end
#: (VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS, 5), or it is killed before it has said what it leaves.
CLOSE_S: Final = 2.0

_Native: Final[Any] = object  # a mixin: what follows it in the order of bases is a connector of afd-plugin's


class WatchedMixin(_Native):  # type: ignore[misc]  # untyped
    """See the module. It comes before the connector among the bases.

    Attributes:
        audit: looks at what is handed over in a call, and at what waits; None where nothing is looked at.
        forward: of the asynchronous connector: the one that runs; None outside live forwards.
        unanswered: by uBatch, the layer that was sent and not received.
        refused: why nothing more is handed over; None as long as it is.
    """

    audit: Boundary | None = None
    forward: CamForward[Any] | None = None
    unanswered: dict[int, int]
    refused: str | None = None
    _closing: threading.Thread | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unanswered = {}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A forward of whatever kind: what it sends is received within, or nothing is sent behind it."""
        try:
            yield
        finally:
            self.forward = None
            if self.unanswered:
                items = ", ".join(f"layer {layer} of uBatch {ubatch}" for ubatch, layer in self.unanswered.items())
                self.refused = f"a forward has sent {items} and not received it"

    def send_attn_output(self, hidden_states: Any, context: Any, **kwargs: Any) -> None:
        """The native one's, looked at before.

        Raises:
            BoundaryViolation: it shares memory with a tail or a workspace slot. Nothing was sent.
            CamError: an earlier forward failed, or this one leaves its schedule. Nothing was sent.
        """
        self._refuse("send_attn_output")
        if self.audit is not None:
            self._look(self.audit, "send_attn_output", hidden_states=hidden_states, context=context, **kwargs)
        metadata = context.metadata
        layer, ubatch = int(metadata.layer_idx), int(metadata.stage_idx)
        if self.forward is not None:
            self.forward.sent(layer, ubatch)
        self.unanswered[ubatch] = layer  # from here on, whatever becomes of the call
        super().send_attn_output(hidden_states, context, **kwargs)
        if self.audit is not None:
            self._look(self.audit, "send_attn_output", context=context)
            self.audit.check_pending(f"{type(self).__name__}.send_attn_output", self)

    def recv_ffn_output(self, ref_tensor: Any, ubatch_idx: int = 0, **kwargs: Any) -> Any:
        """The native one's; what comes back is looked at, too.

        Raises:
            BoundaryViolation: see `send_attn_output`.
            CamError: an earlier forward failed, or this one receives what it has not sent.
        """
        self._refuse("recv_ffn_output")
        if self.audit is not None:
            self._look(self.audit, "recv_ffn_output", ref_tensor=ref_tensor, **kwargs)
        output = super().recv_ffn_output(ref_tensor, ubatch_idx, **kwargs)
        self.unanswered.pop(int(ubatch_idx), None)
        if self.forward is not None:
            self.forward.received(int(ubatch_idx))
        if self.audit is not None:
            self._look(self.audit, "recv_ffn_output", output=output)
        return output

    def init_afd_connector(self) -> None:
        """The native one's; not after a close that failed."""
        self._refuse("init_afd_connector")
        self._closing = None
        super().init_afd_connector()

    def close(self) -> None:
        """The native one's, once, waited for in bounded time. Does not raise."""
        if self._closing is not None:
            return
        error: list[BaseException] = []
        native = super().close

        def run() -> None:
            try:
                torch.accelerator.set_device_index(self.local_rank)  # a thread begins with another
                try:
                    native()
                finally:  # it destroys groups without waiting, and what it raises says nothing of the device
                    torch.accelerator.synchronize()
            except BaseException as raised:  # whatever it is, the engine must end
                error.append(raised)

        self._closing = threading.Thread(target=run, name="afd-dsv4-connector-close", daemon=True)
        self._closing.start()
        self._closing.join(CLOSE_S)
        if self.hangs:
            self.refused = f"its close, or the device behind it, has not come back after {CLOSE_S} s"
            logger.error("afd-dsv4: %s: %s", type(self).__name__, self.refused)
        elif error:
            self.refused = f"its close failed with {type(error[0]).__name__}: {error[0]}"
            logger.error("afd-dsv4: %s: %s", type(self).__name__, self.refused, exc_info=error[0])

    @property
    def hangs(self) -> bool:
        """Whether the native close, or the device behind it, was waited for in vain: its work may never be over."""
        return self._closing is not None and self._closing.is_alive()

    def _look(self, audit: Boundary, call: str, /, **given: Any) -> None:
        """Only where there is an audit: naming what is given costs the host as much as all else here."""
        audit.check(f"{type(self).__name__}.{call}", given)

    def _refuse(self, call: str) -> None:
        if self.refused is not None:
            raise CamError(f"{type(self).__name__}.{call} is asked for, and {self.refused}; restart the worker")


class AfdDsv4CAMAsyncConnector(WatchedMixin, CAMAsyncAFDConnector):  # type: ignore[misc]  # untyped
    """See the module."""


class AfdDsv4CAMP2pConnector(WatchedMixin, CAMP2pAFDConnector):  # type: ignore[misc]  # untyped
    """See the module. Its calls are synchronous on the device: no forward has to be told of them."""

    @property
    def _pending_attention_payloads(self) -> Any:
        """What it keeps until the answer comes, under the name by which the audit asks a connector for that."""
        return getattr(get_forward_context(), "cam_afdtransfer_state", None)


#: By afd-plugin's name of the connector.
CONNECTORS: Final = {
    "CAMAsyncAFDConnector": AfdDsv4CAMAsyncConnector,
    "CAMP2pAFDConnector": AfdDsv4CAMP2pConnector,
}


@contextmanager
def registered() -> Iterator[None]:
    """Have afd-plugin's factory make connectors of our classes within; put back the identical entries behind."""
    before = dict(AFDConnectorFactory._registry)
    try:
        for name, cls in CONNECTORS.items():
            AFDConnectorFactory.register_connector(name, cls.__module__, cls.__name__, replace=True)
        yield
    finally:
        AFDConnectorFactory._registry.update(before)
