# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The FFN role: a daemon thread that follows the connector, as afd_plugin/v1/worker/npu/ffn_worker.py at 85e826e.

With CAM it takes work items one by one, whatever their layer; with CAMP2P it takes a control payload for each forward
and then walks through the layers and stages that it announces. It ends when the connector is closed under it; any other
end is kept, and raised where it is stopped. Nothing of afd-dsv4 is in it.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from tests.afd.model import LAYERS, Experts
from tests.afd.wire import UsedAfterClose


class FfnRole:
    """One FFN rank.

    Args:
        protocol: of the connector.
        connector: the rank's end of it.
        experts: what it computes.
        stream: where.

    Attributes:
        items: answered so far.
        error: what ended the loop, unless the connector was closed.
        fails: raise in the computation of the next item; a test's fault.
    """

    def __init__(self, protocol: SimpleNamespace, connector: Any, experts: Experts, stream: Any) -> None:
        self.protocol = protocol
        self.connector = connector
        self.experts = experts
        self.items = 0
        self.error: BaseException | None = None
        self.fails: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ffn", daemon=True)
        self._stream = stream

    def start(self) -> FfnRole:
        """Begin."""
        self._thread.start()
        return self

    def join(self, timeout_s: float = 30.0) -> None:
        """Wait for the end of the loop."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError("the FFN loop does not end; close its connector, and let no stream stand still")

    def stop(self, timeout_s: float = 30.0) -> BaseException | None:
        """Close the connector, wait for the thread, and say what had ended it before, if anything did."""
        self._stopped.set()
        self.connector.close()
        self.join(timeout_s)
        return self.error

    def _loop(self) -> None:
        torch.npu.set_device(0)
        torch.npu.set_stream(self._stream)
        step = self._follow_items if self.connector.control_plane is None else self._follow_payloads
        try:
            with torch.inference_mode():
                while not self._stopped.is_set():
                    step()
        except Exception as error:
            if not self._stopped.is_set() and not isinstance(error, UsedAfterClose):
                self.error = error

    def _follow_items(self) -> None:
        item = self.connector.recv_ffn_work_item(stage_idx=0, max_num_tokens=1)
        self._maybe_fail()
        states = item.context.states
        routed = self.experts.routed(item.hidden_states, item.layer_idx, states.group_list)
        shared = self.experts.everybodys(states.expand_x_shared, item.layer_idx)
        self.connector.send_ffn_work_item_output(item, self.protocol.AFDF2ATransferPayload(routed, shared))
        self.items += 1

    def _follow_payloads(self) -> None:
        payload = self.connector.control_plane.recv_dp_metadata_list()
        self.connector.control_plane.update_state_from_dp_metadata(payload)
        for layer in range(LAYERS):
            for stage in sorted(payload.dp_metadata_list):
                received = self.connector.recv_attn_output(ubatch_idx=stage, layer_idx=layer, max_num_tokens=1)
                self._maybe_fail()
                output = self.experts.compute_ffn_output(received.hidden_states, layer)
                self.connector.send_ffn_output(output, received.context, ubatch_idx=stage)
                self.items += 1

    def _maybe_fail(self) -> None:
        if self.fails is not None:
            raise self.fails
