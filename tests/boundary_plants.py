# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Planted faults for the boundary audit: something of a workspace in every field that a connector's calls have.

The fields are found in the protocol's own dataclasses (`tests/afd/protocol.py`: the double's, or the commit's), so one
that is added there is planted too. The soak prints how many of them were caught.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from afd_dsv4.compressor.stock import StockRuntime
from afd_dsv4.execution.boundary import Boundary, BoundaryViolation
from afd_dsv4.geometry import CompressorKind

#: What is planted: a workspace tensor, and views of one that no comparison of objects finds.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[1:] if tensor.shape[0] > 1 else tensor[:],
    "a reshaped alias": lambda tensor: tensor.detach().as_strided((1,), (1,), tensor.numel() - 1),
    "an alias of another type": lambda tensor: tensor.flatten()[-2:].view(torch.uint8),
}


@dataclass(frozen=True)
class Plant:
    """One fault that can be planted.

    Attributes:
        connector: whose call.
        call: which.
        field: where in it, as the error must name it.
        planted: what is planted there.
        given: the call's arguments.
        put: replaces what is in that field.
        fault: what is planted.
        own: what is there otherwise.
    """

    connector: str
    call: str
    field: str
    planted: str
    given: Mapping[str, object] = dataclasses.field(repr=False)
    put: Callable[[object], None] = dataclasses.field(repr=False)
    fault: object = dataclasses.field(repr=False)
    own: object = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """The call, as the audit is told it."""
        return f"{self.connector}.{self.call}"

    def caught(self, boundary: Boundary) -> BoundaryViolation | None:
        """What the audit says of it; None if it sees nothing, or names another call or field."""
        self.put(self.fault)
        try:
            boundary.check(self.name, self.given)
        except BoundaryViolation as violation:
            return violation if (violation.call, violation.field) == (self.name, self.field) else None
        finally:
            self.put(self.own)
        return None


def memory(runtime: StockRuntime) -> dict[str, torch.Tensor]:
    """One tensor of every class of memory that a runtime has."""
    return {
        "a pool": runtime.pools[CompressorKind.C4],
        "a state table": runtime.tables[0][4].rows,
        "page lists": runtime.lists[0].parts[4].ids,
        "the starts of idle forwards": runtime._idle_starts,
        "pinned staging": runtime.staging.entries[0].flat,
    }


def payloads(protocol: SimpleNamespace, like: Callable[[], torch.Tensor]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every call that hands something over, with arguments as the commit's callers give them: connector, call, given.

    Args:
        protocol: see `tests/afd/protocol.py`.
        like: makes a tensor of the model's own.
    """
    cam, p2p = (sys.modules[getattr(protocol, f"{name}AFDConnector").__module__] for name in ("CAMAsync", "CAMP2p"))
    for connector, states in (
        ("CAMAsyncAFDConnector", cam.AFDAsyncTransferState),
        ("CAMP2pAFDConnector", p2p.CAMP2PTransferState),
    ):
        routing = {"topk_ids": like(), "topk_weights": like()} if states is cam.AFDAsyncTransferState else {}

        def context(states: type[Any] = states) -> Any:
            return protocol.AFDTransferContext(
                metadata=protocol.AFDTransferMetadata(layer_idx=1, stage_idx=0, seq_lens=[3]),
                states=states(**{name: like() for name in tensor_fields(states)}),
            )

        def received(context: Callable[[], Any] = context) -> Any:
            return protocol.AFDA2FTransferPayload(like(), context(), router_logits=like(), input_ids=like())

        pending = {0: [(context(), like(), like())]} if routing else {}
        metadata = protocol.AFDForwardContextMetadata(
            tokens_start_loc=[0],
            requests_start_loc=[0],
            stage_idx=0,
            connector=None,
            tokens_lens=[3],
            num_stages=2,
        )
        yield (
            connector,
            "send_attn_output",
            {"hidden_states": like(), "context": context(), **routing, "router_logits": like(), "input_ids": like()},
        )
        yield connector, "send_attn_output", {"context": context(), "pending": pending, "afd_metadata": metadata}
        yield connector, "recv_ffn_output", {"ref_tensor": like(), "context": context(), **routing}
        yield connector, "recv_ffn_output", {"output": like()}
        yield connector, "recv_attn_output", {"output": received()}
        yield (
            connector,
            "send_ffn_output",
            {
                "ffn_output": like(),
                "context": context(),
                "expand_x_shared": like(),
                "token_nums_rankid_layeridx": like(),
            },
        )
        if routing:
            item = cam.AFDAsyncFFNWorkItem(
                hidden_states=like(),
                context=context(),
                recv_output=received(),
                layer_idx=1,
                stage_idx=0,
                num_tokens=3,
                total_num_tokens=3,
                shared_num_tokens=0,
            )
            yield (
                connector,
                "send_ffn_work_item_output",
                {"work_item": item, "ffn_output": protocol.AFDF2ATransferPayload(like(), like())},
            )
        else:
            counts = protocol.AFDDPMetadata(torch.ones(2, dtype=torch.int32))
            yield connector, "send_dp_metadata_list", {"payload": protocol.AFDControlPayload({0: counts}, False, False)}


def tensor_fields(cls: type[Any]) -> list[str]:
    """Fields of a dataclass that are, or may be, a tensor."""
    hints = typing.get_type_hints(cls)
    return [
        field.name
        for field in dataclasses.fields(cls)
        if torch.Tensor in (hints[field.name], *typing.get_args(hints[field.name]))
    ]


Put = Callable[[object], None]


def places(value: object, path: str, put: Put) -> Iterator[tuple[str, object, Put]]:
    """Every leaf of a payload: its path, what is there, and what puts something else there."""
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], f"{path}[{key!r}]", lambda new, key=key: value.__setitem__(key, new))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from places(value[index], f"{path}[{index}]", lambda new, index=index: value.__setitem__(index, new))
    elif isinstance(value, tuple):
        for index in range(len(value)):

            def swap(new: object, index: int = index) -> None:
                put((*value[:index], new, *value[index + 1 :]))

            yield from places(value[index], f"{path}[{index}]", swap)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from places(
                getattr(value, field.name),
                f"{path}.{field.name}",
                lambda new, name=field.name: object.__setattr__(value, name, new),
            )
    else:
        yield path, value, put


def matrix(protocol: SimpleNamespace, runtime: StockRuntime, *objects: object, device: str = "npu") -> list[Plant]:
    """Every field of every call that has a tensor with every class of workspace memory, as itself and as views; and
    every field at all with objects that stand for workspace.

    Args:
        protocol: see `tests/afd/protocol.py`.
        runtime: whose memory is planted.
        objects: such objects: a lease, a slot, an execution.
        device: of the payloads.
    """
    faults = [
        (f"{how} of {what}", view(tensor)) for what, tensor in memory(runtime).items() for how, view in VIEWS.items()
    ]
    ours = [(f"a {type(each).__name__}", each) for each in objects]
    plants = []
    for connector, call, given in payloads(protocol, lambda: torch.ones(3, 4, device=device)):
        for name in given:
            for field, own, put in places(
                given[name], name, lambda new, given=given, name=name: given.__setitem__(name, new)
            ):
                for planted, fault in [*(faults if isinstance(own, torch.Tensor) else []), *ours]:
                    plants.append(Plant(connector, call, field, planted, given, put, fault, own))
    return plants


def planted_tensors(protocol: SimpleNamespace, runtime: StockRuntime) -> tuple[int, int]:
    """How many planted tensors the audit of a runtime catches, and how many there are."""
    boundary, plants = Boundary(runtime), matrix(protocol, runtime)
    return sum(plant.caught(boundary) is not None for plant in plants), len(plants)
