# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The operators under the connectors, within one process: Attention on a stream, each FFN rank on one of its own.

Problem: a double needs what the device does (a send is a copy on the stream, a receive is a kernel that waits there for
the other side, the host goes on) and no more, and a test must be able to let an answer never come.
Way: the signatures of `torch.ops.umdk_cam_op_lib.*` and `torch.ops.afd_ascend.*` as 85e826e calls them. A send copies
on the current stream and hands the item over in a queue of the host; a receive on Attention makes the current stream
wait for an external event, which the FFN side records behind its answer. A receive on FFN blocks the FFN thread instead
of its stream: what it returns has shapes that only the item knows.
Stricter than the device: a receive without a send, a second send before the answer was received, wrong shapes or types,
and any use after `leave` raise by name. Rows beyond what was sent are NaN.
Not here: more processes than one, quantisation, the gate on Attention.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


class ProtocolError(RuntimeError):
    """The protocol is broken; on a device this would be wrong numbers, or a hang."""


class UnmatchedReceive(ProtocolError):
    """A receive that no send precedes."""


class SecondDispatch(ProtocolError):
    """A send while the answer to the one before was not received."""


class UsedAfterClose(ProtocolError):
    """A group that was left."""


class WrongPayload(ProtocolError, ValueError):
    """A tensor of another shape or type than the protocol has."""


POISON_ROWS = 2


@functools.cache
def streams() -> dict[str, Any]:
    """The streams of this process by name, made once: torch hands out a stream of a small pool, in turn, and a stream
    that waits for itself under another name waits for ever."""
    return {name: torch.npu.Stream() for name in ("attention", "auxiliary", "ffn 0", "ffn 1", "release")}


@dataclass(eq=False)
class Item:
    """One transfer, there and back.

    Attributes:
        number: counts the items of the process.
        sender: rank within the group.
        layer: from the wire; -1 where it does not travel.
        hidden: copy of what was sent.
        ids: copy of the routing, or None.
        sent: recorded behind the copies.
        answer: where the FFN side writes: one tensor [tokens, topk, hidden], one [tokens, hidden], or only the latter.
        answered: one external event per FFN rank.
    """

    number: int
    sender: int
    layer: int
    hidden: torch.Tensor
    ids: torch.Tensor | None
    sent: Any
    answer: tuple[torch.Tensor, ...]
    answered: tuple[Any, ...]


@dataclass(eq=False)
class _Received:
    """What an FFN rank has taken and not answered."""

    item: Item
    handle: torch.Tensor  # what the receive returned to recognise it by
    pairs: Any = None
    shared: Any = None


@dataclass(eq=False)
class Group:
    """One communication group."""

    name: str
    attn_size: int
    ffn_size: int
    members: set[int] = field(default_factory=set)
    closed: bool = False
    arrivals: list[queue.Queue[Item | None]] = field(default_factory=list)
    outstanding: dict[int, Item] = field(default_factory=dict)
    taken: dict[int, _Received] = field(default_factory=dict)
    control: queue.Queue[bytes | None] = field(default_factory=queue.Queue)


class Wire:
    """All groups of a process.

    Attributes:
        items: sent so far.
        zero_token_items: how often an FFN rank got none of an item's tokens.
        mute: no answer arrives any more, until `release`; a test's fault.
        going: clear it, and answers wait until it is set.
        at: called with "in send" before a send does anything; a test's faults.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._kept: list[Item] = []  # a stream may still wait for their events
        self._open: set[Any] = set()  # events that nobody has recorded
        self.items = 0
        self.zero_token_items = 0
        self.mute = False
        self.going = threading.Event()
        self.going.set()
        self.at: Callable[[str], None] = lambda _: None

    # Groups

    def join(self, name: str, rank: int, attn_size: int, ffn_size: int) -> str:
        """Enter a group; the first one makes it."""
        with self._lock:
            group = self._groups.get(name)
            if group is None or group.closed:
                group = self._groups[name] = Group(name, attn_size, ffn_size)
                group.arrivals = [queue.Queue() for _ in range(ffn_size)]
            group.members.add(rank)
        return name

    def leave(self, name: str, rank: int) -> None:
        """Destroy a group for all its members: whoever waits for an item in it gets none. Nothing is drained."""
        with self._lock:
            group = self._groups.get(name)
            if group is None or group.closed:
                return
            group.closed = True
            for arrivals in group.arrivals:
                arrivals.put(None)
            group.control.put(None)

    def release(self) -> None:
        """Let every stream go on that waits for an answer which never came. What it then reads is not an answer."""
        self.mute = False
        self.going.set()
        stream = streams()["release"]
        with self._lock:
            for event in self._open:
                event.record(stream)
            self._open.clear()

    def forget(self) -> None:
        """Free what was transferred; the device must have run everything."""
        self._kept.clear()

    def unanswered(self, name: str) -> tuple[Item, ...]:
        """Items that Attention has sent into a group, and not received."""
        return tuple(self._groups[name].outstanding.values())

    def group(self, name: str) -> Group:
        """A group by name."""
        group = self._groups.get(name)
        if group is None or group.closed:
            raise UsedAfterClose(f"group {name!r} was {'left' if group else 'never joined'}; init_afd_connector first")
        return group

    # Control payloads of CAMP2P

    def send_control(self, name: str, payload: bytes, rank: int) -> None:
        """Hand bytes to the FFN side."""
        self.group(name).control.put(payload)

    def recv_control(self, name: str, rank: int) -> bytes:
        """Wait on the host for bytes."""
        payload = self.group(name).control.get()
        if payload is None:
            raise UsedAfterClose(f"group {name!r} was left while a control payload was waited for")
        return payload

    # torch.ops.umdk_cam_op_lib

    def async_dispatch_send(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        comm_args: torch.Tensor,
        comm_id: int,
        max_seq_len: int,
        bs: int,
        h: int,
        topk: int,
        ffn_size: int,
        attn_size: int,
        expert_per_rank: int,
        rank: int,
        world: int,
        layer_idx: int,
        tp_size: int,
        dynamic_quant: int,
        group_name: str,
    ) -> None:
        group = self.group(group_name)
        _check("hidden_states", hidden, (bs, h), torch.bfloat16)
        _check("topk_ids", topk_ids, (bs, topk), torch.int32)
        _check("comm_args", comm_args, (1,), torch.float16)
        if bs > max_seq_len or world != attn_size + ffn_size or group.ffn_size != ffn_size:
            raise WrongPayload(f"{bs} tokens of at most {max_seq_len} in a world of {world} = {attn_size}+{ffn_size}")
        routed = hidden.new_empty((bs, topk, h))
        self._send(group, rank, layer_idx, hidden, topk_ids, (routed, hidden.new_empty((bs, h))))

    def async_combine_recv(
        self,
        placeholder: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        comm_args: torch.Tensor,
        comm_id: int,
        bs: int,
        h: int,
        topk: int,
        ffn_size: int,
        attn_size: int,
        expert_per_rank: int,
        rank: int,
        world: int,
        group_name: str,
    ) -> torch.Tensor:
        group = self.group(group_name)
        _check("topk_weights", topk_weights, (bs, topk), torch.float32)
        _check("topk_ids", topk_ids, (bs, topk), torch.int32)
        _check("placeholder", placeholder, (1,), torch.bfloat16)
        routed, shared = self._receive(group, rank, bs)
        return ((routed.float() * topk_weights[:, :, None]).sum(1) + shared.float()).bfloat16()

    def async_dispatch_recv(
        self,
        placeholder: torch.Tensor,
        comm_args: torch.Tensor,
        comm_id: int,
        bs: int,
        h: int,
        topk: int,
        ffn_size: int,
        attn_size: int,
        expert_per_rank: int,
        rank: int,
        world: int,
        tp_size: int,
        dynamic_quant: int,
        group_name: str,
    ) -> tuple[torch.Tensor, ...]:
        group, ffn_rank = self.group(group_name), rank - attn_size
        item = self._take(group, ffn_rank)
        assert item.ids is not None
        ids = item.ids.cpu().numpy()
        tokens, slots = np.nonzero(ids // expert_per_rank == ffn_rank)
        order = np.lexsort((tokens, ids[tokens, slots]))
        tokens, slots = tokens[order], slots[order]
        counts = np.bincount(ids[tokens, slots] - ffn_rank * expert_per_rank, minlength=expert_per_rank)
        shared = np.arange(ffn_rank, len(ids), ffn_size)
        self.zero_token_items += int(not len(tokens))
        device = item.hidden.device

        def rows(at: Any) -> torch.Tensor:
            found = item.hidden.new_full((len(at) + POISON_ROWS, h), float("nan"))
            if len(at):
                found[: len(at)] = item.hidden.index_select(0, _there(at, device))
            return found

        handle = torch.tensor([len(tokens), item.sender, item.layer, item.number], dtype=torch.int32).to(device)
        scales = torch.empty(0, device=device)
        group.taken[ffn_rank] = _Received(item, handle, _there(tokens * topk + slots, device), _there(shared, device))
        return (
            rows(tokens),
            rows(shared),
            scales,
            scales,
            handle,
            torch.from_numpy(counts.astype(np.int64)).to(device),
            torch.tensor([len(shared)], dtype=torch.int32).to(device),
        )

    def async_combine_send(
        self,
        ffn_out: torch.Tensor,
        expand_x_shared: torch.Tensor,
        comm_args: torch.Tensor,
        token_nums_rankid_layeridx: torch.Tensor,
        comm_id: int,
        bs: int,
        h: int,
        topk: int,
        ffn_size: int,
        attn_size: int,
        expert_per_rank: int,
        rank: int,
        world: int,
        tp_size: int,
        group_name: str,
    ) -> None:
        group, ffn_rank = self.group(group_name), rank - attn_size
        received = self._answer(group, ffn_rank, token_nums_rankid_layeridx)
        routed, shared = received.item.answer
        rows = len(received.pairs)
        _check("routed output", ffn_out, (max(1, rows), h), torch.bfloat16)  # one row stands in for none
        _check("shared output", expand_x_shared, (len(received.shared), h), torch.bfloat16)
        if rows:
            routed.view(-1, h).index_copy_(0, received.pairs, ffn_out)
        if len(received.shared):
            shared.index_copy_(0, received.shared, expand_x_shared)
        self._answered(received.item, ffn_rank)

    # torch.ops.afd_ascend

    def a2e(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        bs: int,
        h: int,
        topk: int,
        ffn_size: int,
        attn_size: int,
        rank: int,
        group_name: str,
        aiv_num: int,
        compute_gate: int,
    ) -> tuple[torch.Tensor, ...]:
        group = self.group(group_name)
        if rank < ffn_size:
            item = self._take(group, rank)
            if len(item.hidden) != bs:
                raise WrongPayload(f"{len(item.hidden)} tokens were sent, and {bs} are to be received")
            handle = torch.tensor([bs, item.number], dtype=torch.int32).to(item.hidden.device)
            group.taken[rank] = _Received(item, handle)
            hidden = item.hidden.clone()
            return hidden, hidden, hidden, handle, torch.ones(bs, dtype=torch.bool, device=hidden.device)
        _check("hidden_states", x, (bs, h), torch.bfloat16)
        number = self._send(group, rank, -1, x, None, (x.new_empty((bs, h)),))
        return x, x, x, torch.tensor([bs, number], dtype=torch.int32), x

    def e2a(
        self,
        x: torch.Tensor,
        atten_batch_size: torch.Tensor,
        bs: int,
        h: int,
        topk: int,
        ffn_size: int,
        attn_size: int,
        rank: int,
        group_name: str,
        aiv_num: int,
    ) -> torch.Tensor:
        group = self.group(group_name)
        _check("hidden_states", x, (bs, h), torch.bfloat16)
        if rank < ffn_size:
            received = self._answer(group, rank, atten_batch_size)
            received.item.answer[0].copy_(x)
            self._answered(received.item, rank)
            return x
        item = group.outstanding.get(rank)
        if item is not None and item.number != int(atten_batch_size[1]):
            raise UnmatchedReceive(
                f"item {item.number} of group {group.name!r} is outstanding, not {int(atten_batch_size[1])}"
            )
        (answer,) = self._receive(group, rank, bs)
        return answer.clone()

    # What they have in common

    def _send(
        self,
        group: Group,
        rank: int,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor | None,
        answer: tuple[torch.Tensor, ...],
    ) -> int:
        if (before := group.outstanding.get(rank)) is not None:
            raise SecondDispatch(
                f"rank {rank} sends layer {layer} into group {group.name!r} while item {before.number} of layer "
                f"{before.layer} is outstanding; receive that first"
            )
        self.at("in send")
        stream = torch.npu.current_stream()
        hidden, ids = hidden.clone(), None if ids is None else ids.clone()
        answered = tuple(torch.npu.ExternalEvent() for _ in range(group.ffn_size))
        item = Item(next(self._numbers), rank, layer, hidden, ids, stream.record_event(), answer, answered)
        self._kept.append(item)
        with self._lock:
            self._open.update(answered)
        self.items += 1
        group.outstanding[rank] = item
        for arrivals in group.arrivals:
            arrivals.put(item)
        return item.number

    def _receive(self, group: Group, rank: int, bs: int) -> tuple[torch.Tensor, ...]:
        item = group.outstanding.pop(rank, None)
        if item is None:
            raise UnmatchedReceive(f"rank {rank} receives from group {group.name!r}, and nothing was sent; send first")
        if len(item.hidden) != bs:
            raise WrongPayload(f"{len(item.hidden)} tokens were sent, and {bs} are to be received")
        stream = torch.npu.current_stream()
        for event in item.answered:
            event.wait(stream)
        return item.answer

    def _take(self, group: Group, ffn_rank: int) -> Item:
        if ffn_rank in group.taken:
            raise ProtocolError(f"FFN rank {ffn_rank} receives again before it has answered")
        item = group.arrivals[ffn_rank].get()
        if item is None:
            raise UsedAfterClose(f"group {group.name!r} was left while FFN rank {ffn_rank} waited for an item")
        torch.npu.current_stream().wait_event(item.sent)
        return item

    def _answer(self, group: Group, ffn_rank: int, handle: torch.Tensor) -> _Received:
        received = group.taken.get(ffn_rank)
        if received is None or received.handle is not handle:
            raise UnmatchedReceive(f"FFN rank {ffn_rank} answers what it did not receive")
        del group.taken[ffn_rank]
        return received

    def _answered(self, item: Item, ffn_rank: int) -> None:
        self.going.wait()
        with self._lock:
            if not self.mute and item.answered[ffn_rank] in self._open:
                self._open.remove(item.answered[ffn_rank])
                item.answered[ffn_rank].record(torch.npu.current_stream())


def _there(values: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype is not dtype:
        raise WrongPayload(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; the protocol has {dtype} {shape}")
