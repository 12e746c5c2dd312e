# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The software NPU's own operators as the wire of the double's connectors, across processes.

Problem: `wire.py` has both roles in one process. Way: the same methods, each of which calls the operator that
afd-plugin calls (kernels_ascendc/softnpu/npu/{cam,camp2p}.cpp), in a group that the ranks of several processes join by
name; control payloads go through a store of torch.distributed, as they go through gloo upstream. A receive waits on the
stream there, on both sides.
Not here: faults of a test (the points of `wire.py` are never passed).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from afd_dsv4.softnpu import runtime as softnpu
from tests.afd.wire import UsedAfterClose

#: Room for few rows is enough for a small model (kernels_ascendc/softnpu/npu/cam.cpp reads it).
ENVIRONMENT = {"BATCH_SIZE_FACTOR": "0.01"}


class Operators:
    """See the module.

    Args:
        world: name of everything that belongs together, in all its processes.
        store: for control payloads; shared by its processes.
    """

    zero_token_items = 0

    def __init__(self, world: str, store: Any) -> None:
        self._world = world
        self._store = store
        self._sent: dict[int, Iterator[int]] = defaultdict(itertools.count)  # by rank
        self._read: dict[int, Iterator[int]] = defaultdict(itertools.count)

    def _name(self, name: str) -> str:
        return f"{self._world}_{name.split(' ', 1)[0]}"

    def join(self, name: str, rank: int, attn_size: int, ffn_size: int) -> str:
        """Enter a group."""
        softnpu.join_group(self._name(name), attn_size + ffn_size, rank)
        return self._name(name)

    def leave(self, name: str, rank: int) -> None:
        """Leave it; what waits in it ends with an error of the device."""
        softnpu.leave_group(name, rank)

    def forget(self) -> None:
        """Nothing is kept."""

    def release(self) -> None:
        """Nothing can be let go."""

    def send_control(self, name: str, payload: bytes, rank: int) -> None:
        """Hand bytes to the FFN rank of an Attention rank."""
        self._store.set(f"control {name} {rank} {next(self._sent[rank])}", payload)

    def recv_control(self, name: str, rank: int) -> bytes:
        """Wait on the host for bytes; none at all say that the world ends."""
        payload: bytes = self._store.get(f"control {name} {rank} {next(self._read[rank])}")
        if not payload:
            raise UsedAfterClose(f"the world of {name!r} ends")
        return payload

    def async_dispatch_send(self, *arguments: Any) -> None:
        torch.ops.umdk_cam_op_lib.async_dispatch_send(*arguments)

    def async_combine_recv(self, *arguments: Any) -> torch.Tensor:
        output: torch.Tensor = torch.ops.umdk_cam_op_lib.async_combine_recv(*arguments)
        return output

    def async_dispatch_recv(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ops.umdk_cam_op_lib.async_dispatch_recv(*arguments))

    def async_combine_send(self, *arguments: Any) -> None:
        torch.ops.umdk_cam_op_lib.async_combine_send(*arguments)

    def a2e(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ops.afd_ascend.a2e(*arguments))

    def e2a(self, *arguments: Any) -> torch.Tensor:
        output: torch.Tensor = torch.ops.afd_ascend.e2a(*arguments)
        return output
