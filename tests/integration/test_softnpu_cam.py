# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The operators that AFD connectors call, on the software NPU: CAM's four and a2e/e2a.

Ranks are streams of this process, or processes of the real torch_npu over the software HCCL. What comes back is
compared with a sum written out here, token by token. What CANN answers with wrong rows or an endless spin must be an
error of the device that names its cause, in bounded time. Not shown: anything of the real kernels' memory and speed.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.softnpu import runtime as rt

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu

HIDDEN, TOPK, PER_RANK, MOST = 32, 2, 3, 64
_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Room for 524 routed rows, and no error or schedule left behind."""
    monkeypatch.setenv("BATCH_SIZE_FACTOR", "0.002")
    yield
    rt.set_schedule(0)
    try:
        torch.npu.synchronize()
    except RuntimeError as error:
        pytest.fail(f"an error of the device that the test did not look at: {error}")


def host(stream: Any, *made: Any) -> list[Any]:
    """What the device has made on a stream, which is not the one that it is copied on."""
    stream.synchronize()
    return [each.cpu() for each in made]


class Cam:
    """A group whose ranks are all in this process, each with a stream of its own."""

    def __init__(self, attention: int, ffn: int, tp: int = 1) -> None:
        self.attention, self.ffn, self.tp = attention, ffn, tp
        self.size = attention + ffn
        self.name = f"softnpu_test_{os.getpid()}_{next(_NUMBERS)}"
        for rank in range(self.size):
            rt.join_group(self.name, self.size, rank)
        self.streams = [torch.npu.Stream() for _ in range(self.size)]
        self.args = torch.zeros(1, dtype=torch.float16, device="npu")
        self.anchor = torch.zeros(1, dtype=torch.bfloat16, device="npu")
        self.kept: list[Any] = []  # given to a stream that they were not made on: torch would use their memory again
        torch.npu.synchronize()

    def leave(self) -> None:
        for rank in range(self.size):
            rt.leave_group(self.name, rank)

    def sizes(self, given: dict[str, int]) -> tuple[int, ...]:
        """What all four operators are told of the world, some of it changed."""
        right = {"hidden": HIDDEN, "topk": TOPK, "ffn": self.ffn, "attention": self.attention, "per_rank": PER_RANK}
        return tuple(given.get(name, size) for name, size in right.items())

    def send(self, rank: int, layer: int, x: Any, ids: Any, **more: Any) -> None:
        given = {
            "most": MOST,
            "batch": x.shape[0],
            "tp": self.tp,
            "quant": 0,
            "world": self.size,
            "by": rank,
            **more,
        }
        self.kept += [x, ids]
        with torch.npu.stream(self.streams[rank]):
            torch.ops.umdk_cam_op_lib.async_dispatch_send(
                x, ids, self.args, 0, given["most"], given["batch"], *self.sizes(more), given["by"], given["world"],
                layer, given["tp"], given["quant"], self.name,
            )  # fmt: skip

    def take(self, rank: int, ids: Any, scales: Any, **more: int) -> Any:
        self.kept += [ids, scales]
        with torch.npu.stream(self.streams[rank]):
            return torch.ops.umdk_cam_op_lib.async_combine_recv(
                self.anchor, ids, scales, self.args, 0, ids.shape[0], *self.sizes(more), rank, self.size, self.name,
            )  # fmt: skip

    def receive(self, rank: int, **more: int) -> Any:
        with torch.npu.stream(self.streams[rank]):
            return torch.ops.umdk_cam_op_lib.async_dispatch_recv(
                self.anchor, self.args, 0, more.get("most", MOST), *self.sizes(more), rank, self.size,
                more.get("tp", self.tp), 0, self.name,
            )  # fmt: skip

    def answer(self, rank: int, routed: Any, shared: Any, info: Any, **more: int) -> None:
        self.kept += [routed, shared, info]
        with torch.npu.stream(self.streams[rank]):
            torch.ops.umdk_cam_op_lib.async_combine_send(
                routed, shared, self.args, info, 0, more.get("most", MOST), *self.sizes(more), rank, self.size,
                more.get("tp", self.tp), self.name,
            )  # fmt: skip

    def serve(self, rank: int) -> tuple[int, int]:
        """One work item of an FFN rank, as the connector does it; return the DP group's first rank and the layer."""
        hidden, shared, _, _, info, counts, shared_count = self.receive(rank)
        with torch.npu.stream(self.streams[rank]):
            self.streams[rank].synchronize()
            per_expert, n_shared = counts.tolist(), int(shared_count.item())
            _, source, layer = info[:3].tolist()
            first = (rank - self.attention) * PER_RANK
            rows = sum(per_expert)
            factor = [float(expert_factor(first + e)) for e, n in enumerate(per_expert) for _ in range(n)]
            routed = hidden[:rows] * torch.tensor(factor, dtype=torch.bfloat16, device="npu")[:, None]
            if rows == 0:
                routed = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device="npu")
            self.answer(rank, routed, shared[:n_shared] * SHARED_FACTOR, info)
            self.streams[rank].synchronize()  # whoever leaves the group next leaves behind it
        return source, layer


SHARED_FACTOR = -3.0


def expert_factor(expert: int) -> int:
    """What expert number ``expert`` multiplies its rows by: exact in bfloat16."""
    return expert + 2


def tokens(rng: random.Random, count: int, experts: int) -> tuple[Any, Any, Any]:
    """Rows, experts and scales of ``count`` tokens; small whole numbers and eighths, so that sums are exact."""
    x = torch.tensor([[float(rng.randint(-4, 4)) for _ in range(HIDDEN)] for _ in range(count)], dtype=torch.bfloat16)
    ids = torch.tensor([rng.sample(range(experts), TOPK) for _ in range(count)], dtype=torch.int32)
    scales = torch.tensor([[rng.randint(1, 8) / 8 for _ in range(TOPK)] for _ in range(count)])
    return x.npu(), ids.npu(), scales.npu()


def combined(x: Any, ids: Any, scales: Any) -> Any:
    """What must come back, token by token and expert by expert."""
    rows = []
    for row, experts, weights in zip(x.cpu().float(), ids.cpu().tolist(), scales.cpu().tolist(), strict=True):
        total = SHARED_FACTOR * row
        for expert, weight in zip(experts, weights, strict=True):
            total = total + weight * expert_factor(expert) * row
        rows.append(total)
    return torch.stack(rows).to(torch.bfloat16)


@pytest.fixture
def cam() -> Iterator[Any]:
    made: list[Cam] = []

    def make(*sizes: int) -> Cam:
        made.append(Cam(*sizes))
        return made[-1]

    yield make
    for each in made:
        each.leave()
        assert not Path("/dev/shm", each.name).exists()


@pytest.mark.parametrize(("attention", "ffn", "tp"), [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 2, 2), (1, 3, 1)])
@pytest.mark.parametrize("seed", [0, 7])
def test_every_token_comes_back_as_the_weighted_sum_of_its_experts(
    cam: Any, attention: int, ffn: int, tp: int, seed: int
) -> None:
    """Layer by layer, each rank with its own number of tokens, also under a hostile schedule."""
    group, rng = cam(attention, ffn, tp), random.Random(seed)
    if seed:
        rt.set_schedule(seed, 3000)
    for layer in (0, 0, 1, 1, 2, 0):
        sent = [tokens(rng, rng.randint(1, 9), ffn * PER_RANK) for _ in range(attention)]
        for rank in range(attention):
            group.send(rank, layer, *sent[rank][:2])
        back = [group.take(rank, *sent[rank][1:]) for rank in range(attention)]
        for rank in range(attention, group.size):
            served = {group.serve(rank) for _ in range(attention // tp)}
            assert served == {(source, layer) for source in range(0, attention, tp)}
        torch.npu.synchronize()
        for rank in range(attention):
            assert torch.equal(back[rank].cpu(), combined(*sent[rank])), (layer, rank)


def test_a_work_item_says_what_came_from_whom_and_leaves_the_rest_poisoned(cam: Any) -> None:
    """Two ranks of one DP group, two FFN ranks: rows and batch_info, written out by hand."""
    group = cam(2, 2, 2)
    x = [torch.arange(3.0)[:, None].expand(3, HIDDEN) + 10 * rank for rank in range(2)]
    ids = [torch.tensor(rows, dtype=torch.int32) for rows in ([[0, 5], [2, 0], [4, 3]], [[1, 0], [0, 2], [2, 1]])]
    for rank in range(2):
        group.send(rank, 7, x[rank].to(torch.bfloat16).npu(), ids[rank].npu())
    hidden, shared, scale, shared_scale, info, counts, shared_count = host(group.streams[2], *group.receive(2))
    assert [int(row[0]) for row in hidden[:9]] == [0, 1, 10, 11, 10, 12, 1, 11, 12]  # experts 0, 1, 2
    assert [int(row[0]) for row in shared[:4]] == [0, 1, 10, 11]
    assert counts.tolist() == [4, 2, 3]
    assert shared_count.tolist() == [4]
    assert info.tolist() == [13, 0, 7, 1, 3, 0, 0, 2, 2, 0, 1, 2, 2, 2, 2]
    for unfilled in (hidden[9:], shared[4:], scale, shared_scale):
        assert set(unfilled.view(torch.uint8).flatten().tolist()) == {0x5A}
    assert hidden.shape == (524, HIDDEN)
    assert shared.shape == (262, HIDDEN)
    hidden, _, _, _, info, counts, shared_count = host(group.streams[3], *group.receive(3))
    assert [int(row[0]) for row in hidden[:3]] == [2, 2, 0]  # experts 3, 4, 5
    assert info.tolist() == [5, 0, 7, 1, 3, 5, 8, 1, 1, 1, 1, 1, 0, 0, 0]
    assert counts.tolist() == [1, 1, 1]


def test_the_next_item_is_that_of_the_dp_group_behind_the_last_one(cam: Any) -> None:
    """And one that is there is not kept waiting by one that is not."""
    group, rng = cam(3, 1), random.Random(0)
    sent = {rank: tokens(rng, 2, PER_RANK) for rank in range(3)}
    group.send(1, 0, *sent[1][:2])
    assert group.serve(3) == (1, 0)
    group.take(1, *sent[1][1:])
    for rank in (1, 0, 2):
        group.send(rank, int(rank == 1), *sent[rank][:2])
        group.streams[rank].synchronize()
    assert [group.serve(3)[0] for _ in range(3)] == [2, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant": 1}, "dynamic_quant"),
        ({"most": 4}, "batch_size: found 5"),
        ({"batch": 4}, "x: found"),
        ({"by": 1}, "rank: found 1, expected an Attention rank"),
        ({"world": 3}, "world_size"),
        ({"topk": 1}, "expert_ids: found"),
        ({"tp": 2}, "tp_size: found 2"),
    ],
)
def test_what_a_dispatch_refuses_is_refused_before_anything_is_queued(cam: Any, change: Any, message: str) -> None:
    group = cam(1, 1)
    x, ids, _ = tokens(random.Random(0), 5, PER_RANK)
    with pytest.raises(RuntimeError, match=message):
        group.send(0, 0, x, ids, **change)


def test_tensors_of_another_type_are_refused(cam: Any) -> None:
    group = cam(1, 1)
    x, ids, scales = tokens(random.Random(0), 5, PER_RANK)
    with pytest.raises(RuntimeError, match="x's dtype: found Float"):
        group.send(0, 0, x.float(), ids)
    with pytest.raises(RuntimeError, match="expert_ids: found Long"):
        group.send(0, 0, x, ids.long())
    with pytest.raises(RuntimeError, match="expert_scales: found BFloat16"):
        group.take(0, ids, scales.bfloat16())
    info = torch.zeros(10, dtype=torch.int64, device="npu")
    with pytest.raises(RuntimeError, match="expand_x's dtype: found Char"):  # the quantised buffer of a dispatch
        group.answer(1, x.to(torch.int8), x, info)


def test_a_rank_that_is_not_here_is_refused_by_the_name_of_its_group(cam: Any) -> None:
    group = cam(1, 1)
    name, group.name = group.name, "softnpu_nobody"
    with pytest.raises(RuntimeError, match="rank 1 of the group 'softnpu_nobody' is not in this process"):
        group.receive(1)
    group.name = name


#: Whether the stream had got to the receive is up to its thread.
DESTROYED = "the group was destroyed while this was pending|has left the group"


def fails(stream: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        stream.synchronize()


def test_dispatches_of_one_rank_take_turns_with_their_receives(cam: Any) -> None:
    group = cam(1, 1)
    x, ids, scales = tokens(random.Random(0), 5, PER_RANK)
    group.take(0, ids, scales)
    fails(group.streams[0], "has dispatched nothing that is not received yet")
    group.send(0, 0, x, ids)
    group.send(0, 1, x, ids)
    fails(group.streams[0], "dispatches layer 1 while layer 0 waits for its async_combine_recv")


def test_the_result_of_other_experts_is_an_error(cam: Any) -> None:
    group = cam(1, 1)
    x, ids, scales = tokens(random.Random(0), 5, PER_RANK)
    group.send(0, 0, x, ids)
    group.take(0, (ids + 1) % PER_RANK, scales)
    fails(group.streams[0], "expert_ids are not those of the dispatch of layer 0")


def test_a_layer_that_is_left_out_is_an_error_unless_that_is_waived(cam: Any) -> None:
    for waived in (True, False):
        group = cam(1, 1)
        torch.ops.softnpu.waive("umdk_cam.layer_order", waived)
        x, ids, scales = tokens(random.Random(0), 5, PER_RANK)
        for layer in (1, 3):
            group.send(0, layer, x, ids)
            if layer == 1:
                group.serve(1)
                group.take(0, ids, scales)
        if waived:
            assert group.serve(1) == (0, 3)
        else:
            fails(group.streams[0], "layer 3 after layer 1 of a model that begins with 1")


def test_ranks_of_a_dp_group_that_send_different_layers_are_an_error(cam: Any) -> None:
    group = cam(2, 1, 2)
    x, ids, _ = tokens(random.Random(0), 5, PER_RANK)
    group.send(0, 0, x, ids)
    group.send(1, 1, x, ids)
    group.receive(2)
    fails(group.streams[2], "rank 1 sends layer 1, rank 0 of the same DP group layer 0")


def test_an_expert_that_does_not_exist_and_an_item_without_room_are_errors(
    cam: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = cam(2, 1)
    x, ids, _ = tokens(random.Random(0), 5, PER_RANK)
    group.send(0, 0, x, ids + PER_RANK)
    fails(group.streams[0], r"expert_ids\[0, 0\]: found")
    monkeypatch.setenv("BATCH_SIZE_FACTOR", "0.00002")  # five rows
    group.send(1, 0, x, ids)
    group.receive(2)
    fails(group.streams[2], "10 routed and 5 shared rows where there is room for 5 and 5")


def test_an_item_is_answered_once_and_with_enough_rows(cam: Any) -> None:
    group = cam(1, 1)
    x, ids, scales = tokens(random.Random(0), 5, PER_RANK)
    group.send(0, 0, x, ids)
    hidden, shared, _, _, info, _, _ = group.receive(1)
    group.answer(1, hidden[:9], shared[:5], info)
    fails(group.streams[1], "has 10 routed and 5 shared rows, found 9 and 5")
    group.answer(1, hidden, shared, info)
    group.take(0, ids, scales)
    group.streams[0].synchronize()
    group.answer(1, hidden, shared, info)
    fails(group.streams[1], "no such item of rank 1 waits for an answer")


OTHER = [{"topk": 1}, {"hidden": 64}, {"per_rank": 200}, {"attention": 1, "ffn": 2}]


@pytest.mark.parametrize("change", OTHER)
def test_a_result_taken_with_other_sizes_than_its_dispatch_had_is_an_error(cam: Any, change: dict[str, int]) -> None:
    """Also where the experts' ids are the same numbers in the same order, as those of twice as many tokens."""
    group = cam(2, 1)
    x, ids, scales = tokens(random.Random(0), 5, PER_RANK)
    group.send(0, 0, x, ids)
    group.serve(2)
    shape = -1, change.get("topk", TOPK)
    group.take(0, ids.reshape(shape), scales.reshape(shape), **change)
    fails(group.streams[0], "layer 0 was dispatched with .*, batch_size 5 and is received with")
    back = group.take(0, ids, scales)
    assert torch.equal(host(group.streams[0], back)[0], combined(x, ids, scales))


@pytest.mark.parametrize("change", [*OTHER, {"most": 32}])
def test_an_item_received_with_other_sizes_than_it_was_sent_with_is_an_error(cam: Any, change: dict[str, int]) -> None:
    group = cam(2, 1)
    group.send(0, 0, *tokens(random.Random(0), 5, PER_RANK)[:2])
    group.receive(2, **change)
    fails(group.streams[2], "rank 0 sent with .*; rank 2 receives with")


def test_the_dp_groups_of_an_ffn_rank_stay(cam: Any) -> None:
    group = cam(2, 1)
    group.send(0, 0, *tokens(random.Random(0), 5, PER_RANK)[:2])
    group.serve(2)
    group.receive(2, tp=2)
    fails(group.streams[2], "1 DP groups of tp_size 2 after 2 of 1")


@pytest.mark.parametrize("change", [{"topk": 2}, {"most": 32}, {"attention": 1, "ffn": 2}, {"tp": 2, "per_rank": 1}])
def test_an_item_answered_with_other_sizes_than_it_was_received_with_is_an_error(
    cam: Any, change: dict[str, int]
) -> None:
    """The last of them has a batch_info of the same length, too."""
    group, sizes = cam(2, 1), {"per_rank": 4, "topk": 1}
    x, ids, scales = tokens(random.Random(0), 5, PER_RANK)
    ids, scales = ids[:, :1].contiguous(), scales[:, :1].contiguous()
    torch.npu.synchronize()
    group.send(0, 0, x, ids, **sizes)
    hidden, shared, _, _, info, _, _ = group.receive(2, **sizes)
    group.answer(2, hidden, shared, info, **{**sizes, **change})
    fails(group.streams[2], "tp_size 2 after an" if "tp" in change else "was received with .* and is answered with")
    group.answer(2, hidden, shared, info, **sizes)
    assert host(group.streams[0], group.take(0, ids, scales, **sizes))[0].shape == (5, HIDDEN)


def test_planted_faults_in_an_answer_are_seen_in_the_sum(cam: Any) -> None:
    """The comparison of the first test is able to fail: one row too few scaled, or rows in another order."""
    for plant in (lambda rows: rows.flip(0), lambda rows: torch.cat([rows[:1] * 2, rows[1:]])):
        group = cam(1, 1)
        x, ids, scales = tokens(random.Random(1), 6, PER_RANK)
        x = x + torch.arange(6.0, device="npu").to(torch.bfloat16)[:, None]
        torch.npu.synchronize()
        group.send(0, 0, x, ids)
        hidden, shared, _, _, info, counts, _ = group.receive(1)
        factors = [expert_factor(e) for e, n in enumerate(host(group.streams[1], counts)[0].tolist()) for _ in range(n)]
        routed = hidden[: len(factors)] * torch.tensor(factors, dtype=torch.bfloat16, device="npu")[:, None]
        wrong, other = plant(routed), shared * SHARED_FACTOR
        torch.npu.synchronize()
        group.answer(1, wrong, other, info)
        assert not torch.equal(host(group.streams[0], group.take(0, ids, scales))[0], combined(x, ids, scales))


def test_a_pending_receive_ends_with_an_error_when_its_group_is_destroyed(cam: Any) -> None:
    group = cam(1, 1)
    group.receive(1)
    rt.leave_group(group.name, 1)
    fails(group.streams[1], DESTROYED)
    with pytest.raises(RuntimeError, match="rank 1 has left the group"):
        group.receive(1)


def test_a_pending_receive_ends_with_an_error_when_nobody_can_send_any_more(cam: Any) -> None:
    group = cam(2, 1)
    group.receive(2)
    rt.leave_group(group.name, 0)
    x, ids, _ = tokens(random.Random(0), 2, PER_RANK)
    group.send(1, 0, x, ids)
    group.streams[2].synchronize()  # the other one could, and did
    group.receive(2)
    rt.leave_group(group.name, 1)
    fails(group.streams[2], "those it comes from have left the group, or their processes ended")


CHILD = """
import os, sys
from afd_dsv4.softnpu import runtime as rt
rt.join_group(sys.argv[1], 2, 0)
if sys.argv[2] == "hang":
    import torch
    rt.install()
    rt.set_destroy_hangs(True)
    name, one = sys.argv[1], torch.zeros(0, dtype=torch.bfloat16, device="npu")
    torch.npu.synchronize()
    torch.ops.afd_ascend.a2e(one, None, None, 1, 32, 1, 1, 1, 0, name, 8, 0)
    while not rt.waits_in_group(name, 0):
        pass
if sys.argv[2] != "none":
    if os.fork() == 0:
        rt.leave_group(sys.argv[1], 0)
        print("joined", flush=True)
        sys.stdin.read()
        os._exit(0)
else:
    print("joined", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("children", ["fork", "hang", "none"])
def test_a_pending_receive_ends_with_an_error_when_the_sender_is_killed(children: str) -> None:
    """Also when a child that it has forked lives on, which is not the sender and cannot leave in its place.

    Nor does it hang there, with "hang", for a thread that waits in the sender.
    """
    name = f"softnpu_test_{os.getpid()}_{next(_NUMBERS)}"
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, name, children], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "joined\n"
        rt.join_group(name, 2, 1)
        group = Cam.__new__(Cam)
        group.attention, group.ffn, group.tp, group.size, group.name = 1, 1, 1, 2, name
        group.streams = [torch.npu.Stream() for _ in range(2)]
        group.args = torch.zeros(1, dtype=torch.float16, device="npu")
        group.anchor, group.kept = torch.zeros(1, dtype=torch.bfloat16, device="npu"), []
        torch.npu.synchronize()
        assert not Path("/dev/shm", name, "left0").exists()
        group.receive(1)
        child.kill()
        fails(group.streams[1], "those it comes from have left the group, or their processes ended")
    rt.leave_group(name, 1)
    assert not Path("/dev/shm", name).exists()


def test_destroying_a_group_with_a_pending_receive_can_be_made_to_hang_as_on_cann(p2p: Any) -> None:
    group = p2p(1, 1)
    rt.set_destroy_hangs(True)
    try:
        hidden = group.a2e(0, torch.empty(0, dtype=torch.bfloat16, device="npu"), 2)[0]
        while not rt.waits_in_group(group.name, 0):  # who leaves before it waits leaves in peace
            time.sleep(0.001)
        leaving = threading.Thread(target=rt.leave_group, args=(group.name, 0))
        leaving.start()
        # However late the thread is: without the hang the receive could end with an error, but not with its rows.
        leaving.join(0.1)
        group.a2e(1, rows_of(1, 0, 2))
        leaving.join()
    finally:
        rt.set_destroy_hangs(False)
    group.streams[0].synchronize()
    assert torch.equal(hidden.cpu(), rows_of(1, 0, 2).cpu())


# ---------------------------------------------------------------------------------------------- a2e and e2a


class P2p:
    """FFN ranks first, then Attention ranks, all in this process."""

    def __init__(self, ffn: int, attention: int) -> None:
        self.ffn, self.attention = ffn, attention
        self.name = f"softnpu_test_{os.getpid()}_{next(_NUMBERS)}"
        for rank in range(ffn + attention):
            rt.join_group(self.name, ffn + attention, rank)
        self.streams = [torch.npu.Stream() for _ in range(ffn + attention)]
        self.sizes = torch.zeros(attention // ffn, dtype=torch.int32, device="npu")
        self.kept: list[Any] = []  # as in `Cam`
        torch.npu.synchronize()

    def a2e(self, rank: int, x: Any, batch: int = 0, gate: int = 0) -> Any:
        self.kept.append(x)
        with torch.npu.stream(self.streams[rank]):
            return torch.ops.afd_ascend.a2e(
                x, None, None, batch, HIDDEN, TOPK, self.ffn, self.attention, rank, self.name, 8, gate
            )

    def e2a(self, rank: int, x: Any, batch: int = 0) -> Any:
        self.kept.append(x)
        with torch.npu.stream(self.streams[rank]):
            return torch.ops.afd_ascend.e2a(
                x, self.sizes, batch, x.shape[1], TOPK, self.ffn, self.attention, rank, self.name, 8
            )

    def leave(self) -> None:
        for rank in range(self.ffn + self.attention):
            rt.leave_group(self.name, rank)


@pytest.fixture
def p2p() -> Iterator[Any]:
    made: list[P2p] = []

    def make(ffn: int, attention: int) -> P2p:
        made.append(P2p(ffn, attention))
        return made[-1]

    yield make
    for each in made:
        each.leave()
        assert not Path("/dev/shm", each.name).exists()


def rows_of(rank: int, step: int, count: int) -> Any:
    """Rows that say who sent them and when."""
    rows = torch.arange(float(count))[:, None] + 16 * rank + 64 * step
    return rows.expand(count, HIDDEN).to(torch.bfloat16).npu()


@pytest.mark.parametrize(("ffn", "attention"), [(1, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("seed", [0, 3])
def test_each_ffn_rank_gets_the_rows_of_its_attention_ranks_and_answers_them(
    p2p: Any, ffn: int, attention: int, seed: int
) -> None:
    group = p2p(ffn, attention)
    rt.set_schedule(seed, 2000)
    empty = torch.empty(0, dtype=torch.bfloat16, device="npu")
    for step, count in enumerate((3, 1, 4)):
        sent = {rank: rows_of(rank, step, count) for rank in range(ffn, ffn + attention)}
        for rank, x in sent.items():
            state = group.a2e(rank, x)
            assert [tuple(t.shape) for t in state] == [(1, 1), (1, 1), (1, 1), (attention // ffn,), (1,)]
        back = {rank: group.e2a(rank, x) for rank, x in sent.items()}
        for rank in range(ffn):
            batch = count * attention // ffn
            hidden, ids, scales, _, _ = group.a2e(rank, empty, batch)
            with torch.npu.stream(group.streams[rank]):
                group.e2a(rank, hidden * 2, batch)
            expected = torch.cat([sent[r].cpu() for r in range(ffn + rank, ffn + attention, ffn)])
            assert torch.equal(host(group.streams[rank], hidden)[0], expected)
            for unfilled in (ids, scales):
                assert set(host(group.streams[rank], unfilled)[0].view(torch.uint8).flatten().tolist()) == {0x5A}
        for rank, x in sent.items():
            with torch.npu.stream(group.streams[rank]):
                assert torch.equal(host(group.streams[rank], back[rank])[0], x.cpu() * 2)


def test_a2e_and_e2a_of_a_rank_take_turns(p2p: Any) -> None:
    group = p2p(1, 1)
    x = rows_of(1, 0, 2)
    group.e2a(1, x)
    fails(group.streams[1], "calls e2a without an a2e before it")
    group.a2e(1, x)
    group.a2e(1, x)
    fails(group.streams[1], "calls a2e again before the e2a of the last one")


@pytest.mark.parametrize("shape", [(3, HIDDEN), (2, 64)])
def test_an_e2a_of_other_sizes_than_its_a2e_is_an_error(p2p: Any, shape: tuple[int, int]) -> None:
    group = p2p(1, 1)
    group.a2e(1, rows_of(1, 0, 2))
    group.e2a(1, torch.zeros(shape, dtype=torch.bfloat16, device="npu"))
    fails(group.streams[1], f"{shape[0]} rows, hidden_size {shape[1]}, expert_rank_size 1 after an a2e of 2, 32, 1")


def test_unequal_batches_on_one_ffn_rank_are_an_error(p2p: Any) -> None:
    group = p2p(1, 2)
    group.a2e(1, rows_of(1, 0, 3))
    group.a2e(2, rows_of(2, 0, 1))
    group.a2e(0, torch.empty(0, dtype=torch.bfloat16, device="npu"), 4)
    fails(group.streams[0], "rank 1 sent 3 rows, rank 0 expects 2; ranks that share an FFN rank need equal")


def test_what_a2e_refuses_is_refused_before_anything_is_queued(p2p: Any) -> None:
    group = p2p(1, 2)
    x = rows_of(1, 0, 2)
    with pytest.raises(RuntimeError, match="compute_gate"):
        group.a2e(1, x, gate=1)
    with pytest.raises(RuntimeError, match="x's dtype: found Float"):
        group.a2e(1, x.float())
    with pytest.raises(RuntimeError, match="batch_size: found 3, expected a multiple"):
        group.a2e(0, x, 3)


@pytest.mark.parametrize("who", ["attention", "ffn"])
def test_a_pending_transfer_ends_with_an_error_when_its_group_is_destroyed(p2p: Any, who: str) -> None:
    group = p2p(1, 1)
    if who == "ffn":
        group.a2e(0, rows_of(0, 0, 1), 1)
    else:
        group.a2e(1, rows_of(1, 0, 1))
        group.e2a(1, rows_of(1, 0, 1))
    rank = int(who == "attention")
    rt.leave_group(group.name, rank)
    fails(group.streams[rank], DESTROYED)


# ---------------------------------------------------------------------------------------------- processes

FFN = """
import sys, torch, torch_npu, torch.distributed as dist
dist.init_process_group("hccl", rank=1, world_size=2, init_method=f"file://{sys.argv[1]}")
name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(1)
ops, args = torch.ops.umdk_cam_op_lib, torch.zeros(1, dtype=torch.float16, device="npu")
one = torch.zeros(1, dtype=torch.bfloat16, device="npu")
for layer in range(20):
    rows, shared, _, _, info, _, _ = ops.async_dispatch_recv(one, args, 0, 8, 16, 1, 1, 1, 1, 1, 2, 1, 0, name)
    ops.async_combine_send(rows * 2, shared * 3, args, info, 0, 8, 16, 1, 1, 1, 1, 1, 2, 1, name)
torch.npu.synchronize()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_find_their_ranks_by_the_name_of_the_real_process_group(tmp_path: Path) -> None:
    """This process is the Attention rank, a child the FFN rank."""
    from torch import distributed as dist

    ops, args = torch.ops.umdk_cam_op_lib, torch.zeros(1, dtype=torch.float16, device="npu")
    one, x = torch.zeros(1, dtype=torch.bfloat16, device="npu"), torch.ones(3, 16, dtype=torch.bfloat16).npu()
    ids, scales = torch.zeros(3, 1, dtype=torch.int32).npu(), torch.ones(3, 1).npu()
    store = str(tmp_path / "rendezvous")
    with subprocess.Popen([sys.executable, "-c", FFN, store]) as child:
        try:
            dist.init_process_group("hccl", rank=0, world_size=2, init_method=f"file://{store}")
            name = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(0)
            for layer in range(20):
                ops.async_dispatch_send(x * layer, ids, args, 0, 8, 3, 16, 1, 1, 1, 1, 0, 2, layer, 1, 0, name)
                out = ops.async_combine_recv(one, ids, scales, args, 0, 3, 16, 1, 1, 1, 1, 0, 2, name)
                assert out.cpu().unique().tolist() == [5.0 * layer]
            dist.destroy_process_group()
            assert child.wait(100) == 0
        finally:
            child.kill()
    assert not Path("/dev/shm", name).exists()
