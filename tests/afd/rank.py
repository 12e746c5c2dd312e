# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""One Attention rank: a runtime, the model, a connector, the FFN ranks behind it, and requests.

`forward` does what a model runner and its adapter do around a forward: it cuts the batch as the planner says, begins
all executions as one `Forward`, and drives the protocol's own schedule. What it returns is compared later, so that the
host runs ahead as under asynchronous scheduling. The connector is a subclass of the double's, as the adapter registers
one, or, on the commit's own code, the adapter's: it audits what it is handed, and tells a `CamForward` what is sent and
received.
Not here: which faults are planted, and what must come of them (`faults.py`, `ends.py`).
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from afd_dsv4.compressor.afd import AfdRuntime
from afd_dsv4.compressor.stock import StockExecution, StockRuntime
from afd_dsv4.evidence.soak_load import Clock
from afd_dsv4.execution import boundary
from afd_dsv4.execution.cam import CamForward
from afd_dsv4.execution.forward import Forward
from afd_dsv4.execution.ubatch import cut_at
from afd_dsv4.geometry import page_layout
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace import order
from afd_dsv4.workspace.arena import Exhausted
from afd_dsv4.workspace.identity import ExecutionId
from afd_dsv4.workspace.trace import Trace
from tests.afd import connectors, protocol, ubatching
from tests.afd.ffn import FfnRole
from tests.afd.model import EXPERTS, GEOMETRY, HIDDEN, LAYERS, LENGTH, SEQUENCES, TOPK, DriverModel, Experts, truth
from tests.afd.points import Mode, Planter
from tests.afd.wire import streams
from tests.model_runtime import watch_lock

LAYOUT = page_layout("vllm-ascend-0.23.0", 128)
SEATS = 3
MAX_TOKENS = 96
CHUNKS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 33)
FENCE_TIMEOUT_S = 60.0
DEPTH = 2  # forwards in flight
PARENT_ALIGN = 4  # rows of a batch are padded to this


class PlantedRuntime(StockRuntime):
    """A runtime whose begins, uploads and launches pass points."""

    planter: Planter

    def begin(self, *arguments: Any, **keywords: Any) -> StockExecution:
        self.planter.at("begin")
        return super().begin(*arguments, **keywords)

    def _upload(self, *arguments: Any) -> None:
        self.planter.at("before upload")
        super()._upload(*arguments)
        self.planter.at("behind upload")

    def _launch(self, *arguments: Any) -> torch.Tensor:
        self.planter.at("in launch")
        return super()._launch(*arguments)


class PlantedAfdRuntime(PlantedRuntime, AfdRuntime):
    """The same of our own kernels."""


EXECUTORS: dict[str, type[PlantedRuntime]] = {"stock": PlantedRuntime, "afd": PlantedAfdRuntime}


@dataclass(eq=False)
class Request:
    """A request, and the position where it goes on."""

    name: RequestId
    position: int = 0

    def chunk(self, tokens: int) -> RequestChunk:
        return RequestChunk(self.name, self.position, self.position + tokens)


@dataclass(eq=False)
class Flight:
    """A forward that is queued: what it should give, and when it is over."""

    chunks: tuple[RequestChunk, ...]
    hidden: torch.Tensor
    outputs: list[Any]
    over: tuple[Any, ...]
    kept: list[Any]


@dataclass
class Found:
    """What a rank did and found."""

    forwards: int = 0
    stages: int = 0
    rows: int = 0
    corrupt: int = 0
    zero_token_items: int = 0
    items: int = 0
    audited: int = 0


def audited(base: type[Any], rank: Rank) -> type[Any]:
    """A subclass of a connector that audits and tells the forward, unless it is the adapter's, which does so itself."""
    ours = hasattr(base, "audit")

    class Audited(base):  # type: ignore[misc]
        def send_attn_output(self, hidden_states: torch.Tensor, context: Any, **kwargs: Any) -> None:
            rank.planter.at("before send")
            hidden_states, kwargs = rank.tamper(hidden_states, kwargs)
            rank.found.audited += 1
            if not ours:
                rank.audit("send_attn_output", hidden_states, context, kwargs)
            if not ours and isinstance(rank.running, CamForward):
                rank.running.sent(context.metadata.layer_idx, context.metadata.stage_idx)
            super().send_attn_output(hidden_states, context, **kwargs)
            rank.planter.at("after send")

        def recv_ffn_output(self, ref_tensor: torch.Tensor, ubatch_idx: int = 0, **kwargs: Any) -> torch.Tensor:
            rank.planter.at("in recv")
            rank.found.audited += 1
            if not ours:
                rank.audit("recv_ffn_output", ref_tensor, None, kwargs)
            output = super().recv_ffn_output(ref_tensor, ubatch_idx, **kwargs)
            if not ours and isinstance(rank.running, CamForward):
                rank.running.received(ubatch_idx)
            rank.planter.at("after recv")
            return output  # type: ignore[no-any-return]

    return Audited


@dataclass(frozen=True)
class Alone:
    """A world of one Attention rank, in this process: two FFN ranks with CAM, one with CAMP2P."""

    ffn: int
    port: int
    attention: int = 1


def make_connector(p: SimpleNamespace, mode: Mode, place: Any, role: str, number: int, rank: Rank | None = None) -> Any:
    """One end, initialised; audited where it is a rank's."""
    cam = mode is Mode.CAM
    name = "CAMAsyncAFDConnector" if cam else "CAMP2pAFDConnector"
    settings = connectors.settings(
        hidden_size=HIDDEN,
        topk=TOPK,
        experts=EXPERTS,
        max_tokens=MAX_TOKENS + PARENT_ALIGN,
        ubatches=2 if mode is Mode.DBO else 1,
    )
    config = p.AFDConfig(
        connector=name,
        async_dp=cam,
        role=role,
        num_attention_ranks=place.attention,
        num_ffn_ranks=place.ffn,
        port=place.port,
    )
    cls = p.AFDConnectorFactory.get_connector_class(name)
    if rank is None:
        connector = cls(number, 0, settings, config, number)
    elif p.of == "the double":
        connector = audited(cls, rank)(number, 0, settings, config, number)
    else:
        from afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f_afd_85e826e.connectors import CONNECTORS

        connector = audited(CONNECTORS[name], rank)(number, 0, settings, config, number)
        connector.audit = rank.boundary
    connector.init_afd_connector()
    return connector


def start_ffn(p: SimpleNamespace, mode: Mode, place: Any, ranks: Sequence[int]) -> list[FfnRole]:
    """FFN ranks in this process."""
    weights = truth(0, routed=mode is Mode.CAM)
    return [
        FfnRole(
            p, make_connector(p, mode, place, "ffn", r), Experts(weights, r, place.ffn), streams()[f"ffn {r}"]
        ).start()
        for r in ranks
    ]


class Rank:
    """See the module.

    Args:
        mode: how Attention and FFN are coupled.
        split: of CAM: "token" or "request".
        sequence_parallel: of CAM: stages are padded, as under sequence parallelism.
        executor: which of `EXECUTORS`.
        ordered: False queues no wait: a control.
        slots: None for as many as there are uBatches.
        protocol_: None for the double.
        place: the world of which this is a rank, whose FFN ranks are in another process; None for a world of its own.
        number: of the rank.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        split: str = "token",
        sequence_parallel: bool = False,
        executor: str = "stock",
        ordered: bool = True,
        slots: int | None = None,
        protocol_: SimpleNamespace | None = None,
        place: Any = None,
        number: int = 0,
    ) -> None:
        self.mode, self.split, self.sequence_parallel = mode, split, sequence_parallel
        self.protocol: SimpleNamespace = protocol_ or protocol.double()
        self.apart = place is not None
        self.place = place or Alone(2 if mode is Mode.CAM else 1, 1239 + id(self) % 1000)
        self.number = number
        self.planter = Planter()
        self.found = Found()
        self.clock = Clock()
        self.trace = Trace(None)
        self.truth = truth(0, routed=mode is Mode.CAM)
        self.slots = slots or (1 if mode is Mode.SYNC else 2)
        self.runtime = EXECUTORS[executor](
            GEOMETRY,
            LAYOUT,
            max_num_seqs=SEATS,
            max_num_batched_tokens=MAX_TOKENS,
            device="npu",
            slots=self.slots,
            fence_timeout_s=FENCE_TIMEOUT_S,
            clock=self.clock,
            trace=self.trace,
            ordered=ordered,
        )
        self.runtime.planter = self.planter
        watch_lock(self.runtime.arena)
        self.boundary = boundary.Boundary(self.runtime)
        self.model = DriverModel(self.truth, self.current_ubatch)
        self.model.at = self.planter.at
        self.stream, self.auxiliary = streams()["attention"], streams()["auxiliary"]
        self.running: Forward[StockExecution] | None = None
        self.requests: list[Request] = []
        self.flights: deque[Flight] = deque()
        self.parts: Sequence[tuple[RequestChunk, ...]] = ()
        self.tampering: Any = None
        self.at_end: Callable[[], None] = lambda: None  # called behind a forward's last receive
        self.dropped = 0
        self._numbers = itertools.count()
        self._transactions = itertools.count()
        self.connect()

    # The connector, and who is behind it

    def connect(self) -> None:
        """Make Attention's end, and start the FFN ranks where they are in this process."""
        connectors.WIRE.at = self.planter.at
        self.connector = make_connector(self.protocol, self.mode, self.place, "attention", self.number, self)
        self.ffn = [] if self.apart else start_ffn(self.protocol, self.mode, self.place, range(self.place.ffn))

    def close_connector(self) -> list[BaseException]:
        """Close Attention's end, which drains nothing; what it raises is returned."""
        try:
            self.connector.close()
        except Exception as raised:
            return [raised]
        return []

    def stop_ffn(self) -> list[BaseException]:
        """End the FFN ranks; what had ended a loop before is returned. No stream may stand still for good."""
        errors = [error for role in self.ffn if (error := role.stop()) is not None]
        self.found.items += sum(role.items for role in self.ffn)
        self.found.zero_token_items += connectors.WIRE.zero_token_items
        connectors.WIRE.zero_token_items = 0
        return errors

    def disconnect(self) -> list[BaseException]:
        """Both, where every answer comes."""
        return self.close_connector() + self.stop_ffn()

    def reconnect(self) -> list[BaseException]:
        """After a forward with CAMP2P broke off: close connectors and FFN ranks as `disconnect` does, and make others.

        The FFN ranks have been told of the forward, and wait for those of its items that nobody will send. The commit
        has no way back from there: both sides are restarted. This stands for that restart, in one process: streams that
        wait for an answer are let go, and what they read is not one. The runtime is not restarted, it goes on with
        what the forward has left. With CAM an FFN rank takes any item next, and needs none of this.
        """
        errors = self.disconnect()
        connectors.WIRE.release()
        torch.npu.synchronize()
        connectors.WIRE.forget()
        self.connect()
        return errors

    # What the adapter does

    def current_ubatch(self) -> int:
        """By the forward context, where the attribute is absent on ordinary forwards."""
        return getattr(self.protocol.get_forward_context(), "ubatch_idx", 0)

    def audit(self, call: str, tensor: torch.Tensor, context: Any, keywords: dict[str, Any]) -> None:
        """Nothing transient may cross."""
        self.boundary.check(call, {"tensor": tensor, "context": context, **keywords})
        self.boundary.check_pending(call, self.connector)

    def tamper(self, hidden: torch.Tensor, keywords: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Hand something else over, if a test says so."""
        if self.tampering is None:
            return hidden, keywords
        found: tuple[torch.Tensor, dict[str, Any]] = self.tampering(hidden, keywords)
        return found

    # Requests

    def new(self) -> Request:
        """One more, of a sequence that no other live request has."""
        taken = {int(request.name.rsplit(" ", 1)[1]) for request in self.requests}
        number = next(self._numbers)
        sequence = next(s % SEQUENCES for s in range(number, number + SEQUENCES) if s % SEQUENCES not in taken)
        self.requests.append(Request(RequestId(f"request {number} {sequence}")))
        return self.requests[-1]

    def end(self, request: Request) -> None:
        """It is over, or cancelled."""
        if self.runtime.store.seat(request.name) is not None:
            self.runtime.end_request(request.name)
        self.requests.remove(request)

    def end_all(self) -> None:
        """All are over."""
        for request in list(self.requests):
            self.end(request)

    def batch(self, rng: random.Random) -> tuple[RequestChunk, ...]:
        """Some of the requests, with new ones while there is room."""
        while not self.requests or (len(self.requests) < SEATS and rng.random() < 0.7):
            self.new()
        chunks, room = [], MAX_TOKENS
        for request in rng.sample(self.requests, rng.randint(1, len(self.requests))):
            tokens = min(rng.choice(CHUNKS), LENGTH - request.position, room)
            if tokens:
                room -= tokens
                chunks.append(request.chunk(tokens))
        return tuple(chunks)

    # Forwards

    def forward(self, chunks: Sequence[RequestChunk]) -> Flight | None:
        """Queue one forward, and take its positions over; None if it was the output of an idle one."""
        with torch.inference_mode(), torch.npu.stream(self.stream):
            drive = {Mode.CAM: self._cam, Mode.DBO: self._dbo, Mode.SYNC: self._sync}[self.mode]
            hidden = drive(tuple(chunks))
            if self.model.auxiliary is not None:
                self.stream.wait_stream(self.auxiliary)
            over = (self.stream.record_event(),)
        flight = Flight(tuple(chunks), hidden, self.model.outputs, over, self.model.keep)
        self.model.outputs, self.model.keep = [], []
        ends = {chunk.request: chunk.end for chunk in chunks}
        for request in list(self.requests):
            if request.name in ends:
                request.position = ends[request.name]
                if request.position >= LENGTH:
                    self.end(request)
        self.flights.append(flight)
        while len(self.flights) > DEPTH:
            self.land()
        return flight

    def _parent(self, tokens: int) -> int:
        return -(-tokens // PARENT_ALIGN) * PARENT_ALIGN

    def _metadata(self, stages: int) -> Any:
        return self.protocol.AFDForwardContextMetadata(
            tokens_start_loc=[0],
            requests_start_loc=[0],
            stage_idx=0,
            connector=self.connector,
            tokens_lens=[0],
            num_stages=stages,
            transaction_id=f"afd-npu-{next(self._transactions)}",
        )

    def _context(self, **more: Any) -> Any:
        return SimpleNamespace(
            attn_metadata=None, additional_kwargs={}, flash_comm_v1_enabled=False, dbo_enabled=False, **more
        )

    def _cam(self, chunks: tuple[RequestChunk, ...]) -> torch.Tensor:
        p = self.protocol
        tokens = [chunk.tokens for chunk in chunks]
        total = sum(tokens)
        plan = None
        if chunks:
            plan = p.plan_async_moe_stages(
                tokens, split=self.split, use_sequence_parallel=self.sequence_parallel, tensor_parallel_size=2
            )
        slices = [(s.token_slice.start, s.token_slice.stop) for s in plan] if plan else [(0, total)]
        context = self._context()
        context.flash_comm_v1_enabled = plan is not None and self.sequence_parallel
        context.additional_kwargs["afd_metadata"] = metadata = self._metadata(len(slices))
        self._before(cut_at(chunks, slices))
        with CamForward.from_stages(self.runtime, chunks, slices) as forward, p.override_forward_context(context):
            self._run(forward)
            parent = self._parent(max(1, total)) if plan or not chunks else total
            hidden = self.model.prepare(self.parts, parent)
            positions = torch.zeros(len(hidden), dtype=torch.int64, device="npu")
            if plan is None:
                hidden, _ = p.run_attention_gate_afd_forward(self.model, hidden, None, positions, metadata)
            else:
                stages = p.AsyncMoeUbatchMetadata([{}, {}], plan, parent, self.sequence_parallel)
                hidden, _ = p.run_async_moe_ubatch_afd_forward(self.model, hidden, None, positions, metadata, stages)
            self.at_end()
            for stage in range(len(forward)):
                forward.finish(stage)
        self.found.stages += LAYERS * len(slices)
        return hidden

    def _sync(self, chunks: tuple[RequestChunk, ...]) -> torch.Tensor:
        p = self.protocol
        context = self._context()
        self._before([chunks])
        with Forward(self.runtime, self.parts) as forward, p.override_forward_context(context):
            self._run(forward)
            hidden = self.model.prepare(self.parts, self._parent(max(1, sum(chunk.tokens for chunk in chunks))))
            self._announce([len(hidden)])
            hidden = self._layers(hidden)
        self.found.stages += LAYERS
        return hidden

    def _dbo(self, chunks: tuple[RequestChunk, ...]) -> torch.Tensor:
        p = self.protocol
        total = sum(chunk.tokens for chunk in chunks)
        # Two halves at a token, as vLLM cuts; the last uBatch must not be empty, or the forward is not cut.
        middle = -(-total // 2)
        if total < 2:
            return self._sync(chunks)
        contexts = [self._context(ubatch_idx=i, num_ubatches=2) for i in range(2)]
        self._before(cut_at(chunks, [(0, middle), (middle, total)]))
        with Forward(self.runtime, self.parts) as forward, p.override_forward_context(self._context()):
            self._run(forward)
            whole = self.model.prepare(self.parts, total)
            self._announce([middle, total - middle])
            wrapper = object.__new__(p.AscendUBatchWrapper)  # of the commit's constructor only this is needed
            wrapper.runnable, wrapper.ready_barrier = self._ubatch, threading.Barrier(3)
            made = p.make_ubatch_contexts(2, self.stream, contexts, wrapper.ready_barrier)
            inputs = (whole[:middle], whole[middle:])
            ubatches = [
                p.AscendUbatchMetadata(
                    context=context,
                    input_ids=None,
                    positions=None,
                    inputs_embeds=rows,
                    intermediate_tensors=None,
                    num_tokens=len(rows),
                )
                for context, rows in zip(made, inputs, strict=True)
            ]
            ubatching.observe = self._observe
            try:
                hidden: torch.Tensor = wrapper._run_ubatches(ubatches, self._ubatch)
            finally:
                ubatching.observe = ubatching._nothing
        self.found.stages += 2 * LAYERS
        return hidden

    def _observe(self, where: str, ubatch: int) -> None:
        self.planter.at(where)

    def _ubatch(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: torch.Tensor
    ) -> torch.Tensor:
        """What runs in the thread of a uBatch."""
        assert self.running is not None
        with self.running.running(self.current_ubatch()):
            return self._layers(inputs_embeds)

    def _layers(self, hidden: torch.Tensor) -> torch.Tensor:
        """All layers of the current uBatch, with synchronous CAMP2P."""
        p, ubatch = self.protocol, self.current_ubatch()
        for layer in self.model.layers:
            hidden, *_ = layer.compute_attn_output(None, hidden, None)
            metadata = p.AFDTransferMetadata.create_attention_metadata(
                layer_idx=layer.layer_idx, stage_idx=ubatch, seq_len=len(hidden)
            )
            self.connector.send_attn_output(hidden, p.AFDTransferContext(metadata))
            p.dbo_yield()
            hidden = self.connector.recv_ffn_output(hidden, ubatch_idx=ubatch)
        self.at_end()
        return hidden

    def _announce(self, tokens: Sequence[int]) -> None:
        p = self.protocol
        # As if all ranks had as many: each FFN rank reads the count of its own Attention rank.
        ranks = self.place.attention
        counts = {stage: p.AFDDPMetadata(torch.tensor([count] * ranks)) for stage, count in enumerate(tokens)}
        self.connector.control_plane.send_dp_metadata_list(p.AFDControlPayload(counts, False, False))

    def _before(self, parts: Sequence[tuple[RequestChunk, ...]]) -> None:
        self.parts, self.running = parts, None
        self.planter.at("before begin")

    def _run(self, forward: Forward[StockExecution]) -> None:
        self.running = self.model.forward = forward
        if isinstance(forward, CamForward) and hasattr(self.connector, "audit"):
            self.connector.forward = forward

    # What came of it

    def land(self) -> None:
        """Wait for the oldest forward, and compare all that it gave."""
        flight = self.flights.popleft()
        for event in flight.over:
            event.synchronize()
        with torch.npu.stream(self.auxiliary):  # not behind what is queued since
            compared, wrong = self.model.compare(flight.outputs)
            more, bad = self.model.compare_hidden(flight.chunks, flight.hidden)
        self.found.forwards += 1
        self.found.rows += compared + more
        self.found.corrupt += wrong + bad

    def land_all(self) -> None:
        """Wait for everything."""
        while self.flights:
            self.land()
        torch.npu.synchronize()
        connectors.WIRE.forget()

    def drop(self) -> None:
        """Forget what is in flight: a fault has taken it."""
        self.flights.clear()
        self.model.outputs, self.model.keep = [], []

    def violations(self) -> list[str]:
        """What the order checker has against the trace since the last call."""
        report = order.check(self.trace.records(), self.dropped)
        self.dropped += report.records
        self.trace.clear()
        return [str(violation) for violation in report.violations]

    def take_slots(self) -> int:
        """How many slots can be leased at once; they are given back untouched."""
        arena, leases = self.runtime.arena, []
        try:
            while len(leases) <= len(arena.slots):
                leases.append(arena.acquire(ExecutionId(self.runtime.mint())))
        except Exhausted:
            pass
        for lease in leases:
            lease.seal()
        return len(leases)
