# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Executions driven by the protocol double: two CAM stages, two threads of DBO, one uBatch with synchronous CAMP2P.

Every compressed row and hidden state is compared bit for bit with the definition, for the batch that was not cut; and
the double itself is held to what it claims: what upstream does, and where it is stricter.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from afd_dsv4.execution.boundary import BoundaryViolation  # noqa: E402
from afd_dsv4.execution.forward import BrokenOff, Forward  # noqa: E402
from afd_dsv4.execution.ubatch import cut  # noqa: E402
from afd_dsv4.geometry import CompressorKind  # noqa: E402
from afd_dsv4.softnpu import runtime as softnpu  # noqa: E402
from afd_dsv4.workspace.lease import Lease, LeaseState, OrderError  # noqa: E402
from tests.afd import connectors, load, metadata, protocol, schedule, ubatching  # noqa: E402
from tests.afd.faults import APART  # noqa: E402
from tests.afd.model import HIDDEN, LAYERS, TOPK  # noqa: E402
from tests.afd.points import Mode, Planted, Point  # noqa: E402
from tests.afd.rank import Rank  # noqa: E402
from tests.afd.wire import SecondDispatch, UnmatchedReceive, UsedAfterClose, WrongPayload  # noqa: E402
from tests.stock_world import small_hidden_size  # noqa: E402

__all__ = ["small_hidden_size"]  # a fixture

pytestmark = [
    pytest.mark.npu,
    # The double's threads end with exceptions, as upstream's do.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    softnpu.set_schedule(0)
    softnpu.clear_faults()
    ubatching.observe = ubatching._nothing
    connectors.WIRE.release()
    torch.npu.synchronize()
    connectors.WIRE.forget()


def ended(rank: Rank) -> None:
    """End a rank, and see that nothing of it is lost."""
    rank.land_all()
    rank.end_all()
    assert rank.take_slots() == rank.slots
    leases = [slot.last for slot in rank.runtime.arena.slots]
    assert all(lease is None or lease.over() for lease in leases)
    assert rank.disconnect() == []
    assert rank.runtime.close(1.0) == ()
    assert rank.violations() == []


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        (Mode.CAM, {"split": "token"}),
        (Mode.CAM, {"split": "request"}),
        (Mode.CAM, {"split": "token", "sequence_parallel": True}),
        (Mode.DBO, {}),
        (Mode.SYNC, {}),
    ],
)
@pytest.mark.parametrize("apart", ["", "uBatch 0"])
@pytest.mark.parametrize("executor", ["stock", "afd"])
def test_rows_and_hidden_states_are_those_of_the_batch_that_was_not_cut(
    executor: str, mode: Mode, how: Any, apart: str
) -> None:
    softnpu.set_schedule(7, 400, starve=True)
    rng = random.Random(3)
    rank = Rank(mode, executor=executor, **how)
    if apart:  # a uBatch on a stream of its own needs the edge to the other one
        rank.model.auxiliary = rank.auxiliary, APART[apart]
    for _ in range(12):
        rank.forward(rank.batch(rng))
    rank.land_all()
    found = rank.found
    assert found.rows > 300
    assert found.corrupt == 0
    # No more slots than uBatches, however many layers and requests there are, and each forward leased no more.
    assert len(rank.runtime.arena.slots) == (1 if mode is Mode.SYNC else 2)
    assert rank.runtime.arena.counters.leases <= found.forwards * len(rank.runtime.arena.slots)
    # Each layer and stage was audited at its send and at its receive.
    assert found.audited == 2 * found.stages
    assert rank.boundary.tensors >= found.audited
    ended(rank)


@pytest.mark.parametrize("mode", [Mode.CAM, Mode.DBO])
def test_without_the_edges_rows_are_wrong_and_the_checker_says_so(mode: Mode) -> None:
    corrupt, violations = load.control(mode, "control", ordered=False, forwards=30)
    assert corrupt
    assert violations
    assert load.control(mode, "control", ordered=True, forwards=30) == (0, 0)


@pytest.mark.parametrize("edge", [True, False])
def test_a_ubatch_that_forgets_whom_it_continues_reads_rows_that_are_not_there(
    edge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both on one stream: only the order of the host is wrong, and nothing on the device would tell."""
    rank = Rank(Mode.SYNC, slots=2)
    if not edge:
        follow = Lease.follow
        monkeypatch.setattr(Lease, "follow", lambda lease, *, continues, **more: follow(lease, **more))
    request = rank.new()
    parts = cut([request.chunk(42)], 22)
    wrong = 0 if edge else 1  # the first window of the second uBatch has rows of the first, and the overlap of one more

    def backwards() -> None:
        with torch.npu.stream(rank.stream), Forward(rank.runtime, parts) as forward:
            rank.model.forward = forward
            hidden = rank.model.prepare(parts, 42)
            for ubatch, rows in ((1, hidden[22:]), (0, hidden[:22])):
                rank.model.compress(0, ubatch, rows)

    with pytest.raises(OrderError if edge else BrokenOff):  # the other layers are not launched here
        backwards()
    torch.npu.synchronize()
    second = [output for output in rank.model.outputs if output.chunks == parts[1]]
    compared, wrong = rank.model.compare(second)
    # With the edge nothing was launched; without it the window on the cut, and the one that overlaps it, are wrong.
    assert (compared > 0) == (not edge)
    assert (wrong > 0) == (not edge)
    rank.model.outputs = []
    rank.end_all()
    rank.disconnect()
    rank.runtime.close(1.0)


def test_stages_take_turns_with_one_dispatch_under_way() -> None:
    rank = Rank(Mode.CAM)
    calls: list[str] = []

    def at(name: str) -> None:
        short = {"before launch": "attn", "before send": "send", "in recv": "recv"}.get(name)
        if short is not None and (short != "attn" or calls[-1:] != ["attn"]):
            calls.append(short)
        if name == "after send":
            assert len(connectors.WIRE.unanswered(rank.connector.group_name)) == 1
            assert sum(map(len, rank.connector._pending_attention_payloads.values())) == 1

    rank.planter.at = rank.model.at = at  # type: ignore[method-assign]
    rank.forward([rank.new().chunk(9), rank.new().chunk(8)])
    # attn s0, send s0, then attn, receive of the other stage, send.
    assert calls == ["attn", "send", *(["attn", "recv", "send"] * (2 * LAYERS - 1)), "recv"]
    ended(rank)


def test_an_exception_with_an_item_under_way_quarantines_its_leases_by_name(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(Mode.CAM)
    rank.planter.arm(Point.BEFORE_LAUNCH, 3)
    with pytest.raises(Planted, match="point 6"):
        rank.forward([rank.new().chunk(9), rank.new().chunk(8)])
    assert rank.running is not None
    assert {execution.lease.state for execution in rank.running.executions} == {LeaseState.QUARANTINED}  # type: ignore[union-attr]
    assert rank.runtime.arena.counters.quarantined == 2
    rank.land_all()
    rank.end_all()
    assert rank.disconnect() == []
    assert len(rank.runtime.close(0.05)) == 2


def test_a_workspace_tensor_does_not_reach_the_connector() -> None:
    rank = Rank(Mode.SYNC)
    page = rank.runtime.pools[CompressorKind.C4][1, :1]
    rank.tampering = lambda hidden, more: (page, more)
    items = connectors.WIRE.items
    with pytest.raises(BoundaryViolation, match=r"send_attn_output: tensor .* the pool of c4, page 1 "):
        rank.forward([rank.new().chunk(5)])
    assert connectors.WIRE.items == items
    rank.tampering = None
    rank.end_all()
    rank.disconnect()
    rank.runtime.close(1.0)


def test_what_a_ubatchs_thread_swallows_breaks_the_forward() -> None:
    rank, swallowed = Rank(Mode.DBO), []
    hook, threading.excepthook = threading.excepthook, swallowed.append
    try:
        # Behind its last yield, the other one's result is merged alone; before that it would yield to nobody.
        rank.planter.arm(Point.AFTER_RECV, 2 * (LAYERS - 1))
        with pytest.raises(BrokenOff, match=r"uBatch 0 .* with Planted: planted at point 15"):
            rank.forward([rank.new().chunk(9), rank.new().chunk(8)])
        assert len(swallowed) == 1
        rank.reconnect()
        rank.planter.arm(Point.BEFORE_SEND, 2)
        rank.end_all()
        with pytest.raises(BrokenOff, match=r"uBatch 0 .* with Planted: planted at point 9"):
            rank.forward([rank.new().chunk(9), rank.new().chunk(8)])
        assert [type(thread.exc_value).__name__ for thread in swallowed[1:]] == ["Planted", "PeerGone"]
    finally:
        threading.excepthook = hook
    assert rank.runtime.arena.counters.quarantined == 0
    rank.reconnect()
    rank.end_all()
    rank.forward([rank.new().chunk(5)])
    assert rank.found.corrupt == 0
    ended(rank)


class TestTheDoubleIsStrict:
    @pytest.fixture
    def attention(self) -> Iterator[Any]:
        """A CAM connector with nobody behind it."""
        settings = connectors.settings(hidden_size=HIDDEN, topk=TOPK, experts=4, max_tokens=64)
        config = connectors.AFDConfig(num_ffn_ranks=2, port=7)
        connector = connectors.CAMAsyncAFDConnector(0, 0, settings, config, 0)
        connector.init_afd_connector()
        yield connector
        connector.close()

    def payload(self, tokens: int = 3, layer: int = 0, stage: int = 0) -> tuple[Any, Any, dict[str, Any]]:
        hidden = torch.zeros((tokens, HIDDEN), dtype=torch.bfloat16, device="npu")
        ids = torch.zeros((tokens, TOPK), dtype=torch.int32, device="npu")
        transfer = metadata.AFDTransferMetadata.create_attention_metadata(
            layer_idx=layer, stage_idx=stage, seq_len=tokens
        )
        return hidden, metadata.AFDTransferContext(transfer), {"topk_ids": ids, "topk_weights": ids.float()}

    def test_a_receive_needs_a_send(self, attention: Any) -> None:
        with pytest.raises(UnmatchedReceive, match="stage 1 receives, and has nothing pending"):
            attention.recv_ffn_output(self.payload()[0], ubatch_idx=1)

    def test_a_second_dispatch_waits_for_the_first_answer(self, attention: Any) -> None:
        for stage, error in ((0, None), (1, SecondDispatch)):
            hidden, context, routing = self.payload(layer=4, stage=stage)
            if error is None:
                attention.send_attn_output(hidden, context, **routing)
            else:
                with pytest.raises(error, match=r"while item [0-9]+ of layer 4 is outstanding"):
                    attention.send_attn_output(hidden, context, **routing)
        # Queued before the launch, as at this commit: the launch that failed leaves an entry.
        assert {stage: len(held) for stage, held in attention._pending_attention_payloads.items()} == {0: 1, 1: 1}
        attention.close()
        assert attention._pending_attention_payloads == {}
        assert not attention.is_initialized
        with pytest.raises(RuntimeError, match="not initialized"):
            attention.send_attn_output(hidden, context, **routing)
        with pytest.raises(UsedAfterClose, match="was left"):
            connectors.WIRE.group("afd_async_cam 127.0.0.1:7")

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("hidden", lambda t: t[:2], "for a transfer of 3 tokens"),
            ("hidden", lambda t: t.float(), "hidden_states is torch.float32"),
            ("topk_ids", lambda t: t.long(), "topk_ids is torch.int64"),
            ("topk_ids", lambda t: t[:, :1], "topk_ids"),
            ("topk_weights", lambda t: t[:2], "topk_weights"),
        ],
    )
    def test_shapes_and_types_are_those_of_the_protocol(
        self, attention: Any, field: str, value: Any, words: str
    ) -> None:
        hidden, context, routing = self.payload()
        if field == "hidden":
            hidden = value(hidden)
        else:
            routing[field] = value(routing[field])
        with pytest.raises(WrongPayload, match=words):
            attention.send_attn_output(hidden, context, **routing)

    def test_the_control_payload_is_upstreams_json(self) -> None:
        counts = {1: metadata.AFDDPMetadata(torch.tensor([3, 5])), 0: metadata.AFDDPMetadata(torch.tensor([4, 4]))}
        wire = metadata.encode_control_payload(metadata.AFDControlPayload(counts, False, True))
        assert wire == (
            b'{"dp_metadata_list":{"0":{"max_tokens_across_dp_cpu":4,"num_tokens_across_dp_cpu":[4,4]},'
            b'"1":{"max_tokens_across_dp_cpu":5,"num_tokens_across_dp_cpu":[3,5]}},'
            b'"is_graph_capturing":false,"is_warmup":true}'
        )
        back = metadata.decode_control_payload(wire)
        assert (back.is_graph_capturing, back.is_warmup) == (False, True)
        assert back.dp_metadata_list[1].num_tokens_across_dp_cpu.tolist() == [3, 5]

    def test_a_thread_that_ends_before_the_barrier_is_named(self) -> None:
        rank = Rank(Mode.DBO)
        rank.planter.arm(Point.BEFORE_BARRIER, 1)
        hook, threading.excepthook = threading.excepthook, lambda _: None
        try:
            with pytest.raises(ubatching.NeverReady, match="planted at point 16"):
                rank.forward([rank.new().chunk(9), rank.new().chunk(8)])
        finally:
            threading.excepthook = hook
        rank.reconnect()
        rank.end_all()
        ended(rank)

    def test_the_plan_is_upstreams(self) -> None:
        plan = schedule.plan_async_moe_stages

        def cuts(tokens: list[int], split: str, sp: bool = False, tp: int = 2) -> Any:
            stages = plan(tokens, split=split, use_sequence_parallel=sp, tensor_parallel_size=tp)
            return stages and [
                (s.request_slice.start, s.request_slice.stop, s.token_slice.start, s.token_slice.stop, s.input_tokens)
                for s in stages
            ]

        assert cuts([5, 4], "token") == [(0, 1, 0, 5, 5), (1, 2, 5, 9, 4)]  # at the boundary
        assert cuts([4, 5], "token") == [(0, 2, 0, 5, 5), (1, 2, 5, 9, 4)]  # one row behind it
        assert cuts([9], "token", sp=True) == [(0, 1, 0, 5, 6), (0, 1, 5, 9, 4)]
        assert cuts([9], "token", tp=1) is None
        assert cuts([9], "request") is None
        assert cuts([1, 1, 6], "request") == [(0, 2, 0, 2, 2), (2, 3, 2, 8, 6)]
        assert cuts([3, 1, 1, 3], "request") == [(0, 2, 0, 4, 4), (2, 4, 4, 8, 4)]
        with pytest.raises(ValueError, match="above 0"):
            cuts([0], "token")


def test_an_ffn_rank_without_tokens_answers_with_a_stand_in() -> None:
    rank = Rank(Mode.CAM)
    request = rank.new()
    for _ in range(20):
        rank.forward([request.chunk(2)])  # one token a stage, both of whose experts may be one rank's
    rank.land_all()
    assert connectors.WIRE.zero_token_items
    assert rank.found.corrupt == 0
    ended(rank)


def test_a_path_that_is_no_checkout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(protocol.VARIABLE, "/nowhere")
    with pytest.raises(FileNotFoundError, match="'/nowhere' is no checkout of afd-plugin; name one in AFD_PLUGIN_PATH"):
        protocol.load()
