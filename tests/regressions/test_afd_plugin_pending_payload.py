# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/afd-plugin at 85e826e, no report: a send that fails leaves its entry in the queue of its stage.

Symptom: `CAMAsyncAFDConnector.send_attn_output` queues what the receive will need before the operator is launched. If
the launch fails and somebody goes on, the next receive of that stage combines with another item's routing.
Here: an item counts as under way from before the call, whatever becomes of it. A forward that ends so is
quarantined, by name; it receives nothing any more; its requests' tails are void. So nobody comes to the stale entry.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from afd_dsv4.execution.cam import CamError, CamForward
from afd_dsv4.tail.store import TailVoid
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.lease import LeaseState
from tests.afd import connectors, protocol
from tests.model_runtime import ModelExecution, ModelRuntime

P = protocol.double()
ROWS, HIDDEN, TOPK = 3, 4, 2


class LaunchFailed(RuntimeError):
    """The operator's."""


class Operators:
    """What lies below the connector: a send may fail, a receive gives back the routing that it combined with."""

    def __init__(self) -> None:
        self.fails = False

    def async_dispatch_send(self, *_: object) -> None:
        if self.fails:
            raise LaunchFailed("aclnnDispatch")

    def async_combine_recv(self, _placeholder: object, topk_ids: torch.Tensor, *_: object) -> torch.Tensor:
        return topk_ids


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Operators:
    found = Operators()
    monkeypatch.setattr(connectors, "WIRE", found)
    return found


def connector() -> Any:
    """The double's, without a group: only its queue is of interest."""
    settings = connectors.settings(hidden_size=HIDDEN, topk=TOPK, experts=4, max_tokens=8)
    made = P.CAMAsyncAFDConnector(0, 0, settings, P.AFDConfig(async_dp=True), 0)
    made._initialized = True
    made.comm_args = torch.zeros(1)
    return made


def send(to: Any, layer: int, stage: int) -> None:
    """An item whose routing says its layer."""
    metadata = P.AFDTransferMetadata.create_attention_metadata(layer_idx=layer, stage_idx=stage, seq_len=ROWS)
    ids = torch.full((ROWS, TOPK), layer)
    to.send_attn_output(
        torch.zeros(ROWS, HIDDEN), P.AFDTransferContext(metadata), topk_ids=ids, topk_weights=torch.ones(ROWS, TOPK)
    )


def layer_of(received: torch.Tensor) -> int:
    return int(received[0, 0])


def forward_of(runtime: ModelRuntime, start: int) -> CamForward[ModelExecution]:
    chunk = RequestChunk(RequestId("a"), start, start + ROWS)
    return CamForward.from_stages(runtime, [chunk], [(0, ROWS)])


class Subclass:
    """What an adapter's connector does around the native one."""

    def __init__(self, native: Any, forward: CamForward[ModelExecution]) -> None:
        self.native, self.forward = native, forward

    def send(self, layer: int) -> None:
        self.forward.sent(layer, 0)
        send(self.native, layer, 0)

    def receive(self) -> torch.Tensor:
        self.forward.received(0)
        received: torch.Tensor = self.native.recv_ffn_output(torch.zeros(1), 0)
        return received


def test_a_forward_whose_send_failed_receives_nothing_any_more_and_its_tails_are_void(operators: Operators) -> None:
    runtime, native = ModelRuntime(1), connector()
    stream = runtime.device.stream()
    forward = forward_of(runtime, 0)
    ours = Subclass(native, forward)
    forward[0].launch(0, stream)
    operators.fails = True
    with pytest.raises(LaunchFailed), forward:
        ours.send(0)
    operators.fails = False
    assert len(native._pending_attention_payloads[0]) == 1  # the stale entry
    assert forward.failed is not None
    assert "has sent layer 0 of stage 0 and not received it: LaunchFailed" in forward.failed
    for again in (lambda: ours.send(1), ours.receive):
        with pytest.raises(CamError, match="after it failed"):
            again()
    assert len(native._pending_attention_payloads[0]) == 1  # and nobody took it
    assert forward[0].lease is not None
    assert forward[0].lease.state is LeaseState.QUARANTINED
    with pytest.raises(TailVoid, match="is in doubt"):
        forward_of(runtime, ROWS)


def test_items_that_are_sent_and_received_in_turn_have_their_own_routing(operators: Operators) -> None:
    runtime, native = ModelRuntime(1), connector()
    stream = runtime.device.stream()
    with forward_of(runtime, 0) as forward:
        ours = Subclass(native, forward)
        for layer in range(runtime.shape.layers):
            forward[0].launch(layer, stream)
            ours.send(layer)
            assert layer_of(ours.receive()) == layer
    assert not operators.fails
    assert native._pending_attention_payloads == {}


def test_whoever_goes_on_after_a_failed_send_combines_with_another_items_routing(operators: Operators) -> None:
    """Negative control: the connector without us."""
    native = connector()
    operators.fails = True
    with pytest.raises(LaunchFailed):
        send(native, 0, 0)
    operators.fails = False
    send(native, 7, 0)
    assert layer_of(native.recv_ffn_output(torch.zeros(1), 0)) == 0  # and 7 was sent


def test_the_audit_looks_at_what_the_queue_keeps(operators: Operators) -> None:
    from afd_dsv4.execution.boundary import Boundary, BoundaryViolation

    native = connector()
    table = torch.zeros(ROWS, TOPK, dtype=torch.int64)
    boundary = Boundary(None, {"table": table})
    send(native, 0, 1)
    boundary.check_pending("send_attn_output", native)
    context, _, weights = native._pending_attention_payloads[1].pop()
    native._pending_attention_payloads[1].append((context, table[:, :1], weights))
    with pytest.raises(BoundaryViolation, match=r"_pending_attention_payloads\[1\]\[0\]\[1\].*lies in table"):
        boundary.check_pending("send_attn_output", native)
    assert not operators.fails
