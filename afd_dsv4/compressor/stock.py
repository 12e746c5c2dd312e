# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The stock executor: the compressor operator that vllm-ascend ships, given tails instead of a state cache.

The operator writes no row whose state-table entry is page 0 and reads only rows before its start. So this runtime gives
it one page pool per kind for all layers, a table that maps history and tail only, and a re-based start; nothing else of
the state is ever stored. Per launch the host queues one scatter of page ids and the operator, and says one `touch`.

Memory is taken once, in the constructor, by the expression in `workspace/sizing.py`. `compressor_metadata` is not ours:
it keeps getting the true start and vLLM's own tables.

What a uBatch's launches read of its metadata lies in its slot: page lists, state table, re-based starts. Only
`cu_seqlens` stays upstream's, and so does the order of what overwrites it: vllm-ascend and afd-plugin write every
tensor that is metadata on the stream that launches, or let that wait for the auxiliary one, so that whatever a later
build overwrites is overwritten behind the launches that were queued before. A build between a uBatch's own build and
its launches overwrites nothing of it: prefill and the stages of a cut batch get a difference, which is a new tensor
(dsa_v1.py:build_prefill_metadata, afd-plugin's ubatch_utils.py:slice_query_start_locs), and the decodes of an uncut
batch a view of the one tensor that the runner fills once a step. A launch with the metadata of another uBatch is
refused where it shows: other tokens here, other requests by the operator, whose table has one row for each of ours.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.device.torch_device import TorchDevice
from afd_dsv4.geometry import CompressorKind, ModelGeometry, PageLayout
from afd_dsv4.tail.rows import TailShape
from afd_dsv4.tail.store import SeatIndex, StepPlan, TailStore
from afd_dsv4.tail.tables import NO_COLUMN, PageList, RequestChunk, RequestId
from afd_dsv4.workspace.arena import ArenaClosed, CaptureError, WorkspaceArena
from afd_dsv4.workspace.identity import Domain, ExecutionId, ExecutionKind, Generation, GenerationMint
from afd_dsv4.workspace.lease import WHOLE, Lease, LeaseState, OrderError
from afd_dsv4.workspace.sizing import size_workspace, tail_shapes
from afd_dsv4.workspace.staging import StagingRing
from afd_dsv4.workspace.trace import Trace

#: Runtimes whose memory the device, or the replay of a graph, may touch at any time.
_NEVER_FREED: set[StockRuntime] = set()

#: Of the process: a runtime that follows another one, as in an elastic restart, must not give its generations again.
_MINT = GenerationMint()

CONTINUOUS = 1  # the operator's cache_mode that skips page 0
INTERLEAVED = 2  # the operator's rotary_mode


def call_operator(
    x: torch.Tensor,
    weights: CompressorWeights,
    kind: CompressorKind,
    state: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    rope_cos: torch.Tensor,
    rope_sin: torch.Tensor,
    compressor: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Call `_C_ascend::compressor` as vllm-ascend calls it (attention/dsa_v1.py). See `executor.Execution.compress`.

    Args:
        x: packed tokens.
        weights: of the compressor.
        kind: which compressor.
        state: float32 [pages, page rows, state_dim]; pages may be padded.
        table: int32 [requests, columns].
        starts: int32 [requests].
        cu_seqlens: int32 [requests + 1].
        rope_cos: one row per compressed row.
        rope_sin: the same.
        compressor: the operator; None for what bears its name now, which an adapter may have rebound to us.
    """
    compressed: torch.Tensor = (compressor or torch.ops._C_ascend.compressor)(
        x,
        weights.wkv,
        weights.wgate,
        state,
        weights.ape,
        weights.norm_weight,
        rope_sin,
        rope_cos,
        state_block_table=table,
        cu_seqlens=cu_seqlens,
        seqused=None,  # a value selects another, slower template of the operator
        start_pos=starts,
        rope_head_dim=weights.rope_head_dim,
        cmp_ratio=kind.ratio,
        coff=kind.coff,
        norm_eps=weights.norm_eps,
        rotary_mode=INTERLEAVED,
        cache_mode=CONTINUOUS,
    )
    return compressed


@dataclass(frozen=True)
class _Part:
    """What the launches of one ratio read; a batch's part lies at the front of each."""

    cells: torch.Tensor  # int64 [max_num_seqs * list_ids], where the ids go
    starts: torch.Tensor  # int32 [max_num_seqs]
    ids: torch.Tensor  # int32 [layers * max_num_seqs * list_ids]


class _Lists:
    """The parts of all ratios in one tensor, for one copy: once pinned on the host, once on the device."""

    def __init__(self, shapes: Sequence[TailShape], max_num_seqs: int, *, device: torch.device, pinned: bool) -> None:
        places = [max_num_seqs * shape.list_ids for shape in shapes]
        # Words of 4 bytes. Cells have two, and come first so that they are aligned; ids, which are the most, last.
        words = [2 * count for count in places] + [max_num_seqs] * len(shapes)
        words += [shape.layers * count for shape, count in zip(shapes, places, strict=True)]
        self.flat = torch.zeros(sum(words), dtype=torch.int32, device=device, pin_memory=pinned)
        cut = self.flat.split(words)
        self.parts = {
            shape.ratio: _Part(cut[i].view(torch.int64), cut[i + len(shapes)], cut[i + 2 * len(shapes)])
            for i, shape in enumerate(shapes)
        }

    @property
    def list_bytes(self) -> int:
        return sum(part.ids.nbytes for part in self.parts.values())

    @property
    def staging_bytes(self) -> int:
        return self.flat.nbytes - self.list_bytes


class _Table:
    """The wide state table of one ratio in one slot, with one cell behind it for padded list entries."""

    def __init__(self, shape: TailShape, max_num_seqs: int, max_num_batched_tokens: int, device: torch.device) -> None:
        self.columns = shape.columns(max_num_batched_tokens)
        self.flat = torch.zeros(max_num_seqs * self.columns + 1, dtype=torch.int32, device=device)
        self.rows = self.flat[:-1].view(max_num_seqs, self.columns)
        self.layer: int | None = None  # whose ids it holds

    def cells(self, pages: PageList) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Flat index of every list entry, int64 [requests, list_ids]; padded entries all mean the last cell."""
        row = np.arange(len(pages.starts), dtype=np.int64)[:, None] * self.columns
        return np.where(pages.columns == NO_COLUMN, self.flat.numel() - 1, row + pages.columns)


def _named_part(what: str, whose: object) -> str:
    """A part of a slot, as touches name it."""
    return f"{what} {whose}"


class _Step:
    """What never changes about the launches of one compressor: a launch has no time to make it anew.

    Attributes:
        index: of the layer among those of its kind.
        ratio: of the kind.
        reads: parts of the slot.
        writes: parts of it, where the state table has the layer's ids already.
        scatters: the same where it gets them first.

    Args:
        index: see above.
        kind: of the compressor.
        also: further parts that a launch writes.
    """

    __slots__ = ("index", "ratio", "reads", "scatters", "writes")

    def __init__(self, index: int, kind: CompressorKind, also: tuple[str, ...] = ()) -> None:
        self.index = index
        self.ratio = ratio = kind.ratio
        # Strings know their hash, which tuples work out in every touch.
        table = _named_part("table", ratio)
        self.reads = (_named_part("lists", ratio), table)
        self.writes: tuple[str, ...] = (_named_part("pages", kind.value),)
        self.scatters: tuple[str, ...] = (*self.writes, table)
        self.writes += also
        self.scatters += also


class Split:
    """Requests that are launched together.

    Attributes:
        mine: which.
        chunks: they themselves.
        tokens: of them.
        requests: how many.
        cut: state table and starts of them, by ratio.
        tiles: what the afd executor has worked out for their launches, by kind.
    """

    __slots__ = ("chunks", "cut", "mine", "requests", "tiles", "tokens")

    def __init__(self, mine: slice, chunks: tuple[RequestChunk, ...]) -> None:
        self.mine = mine
        self.chunks = chunks
        self.tokens = sum(chunk.tokens for chunk in chunks)
        self.requests = mine.stop - mine.start
        self.cut: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.tiles: dict[CompressorKind, Any] = {}


@dataclass(frozen=True)
class AllocatedBytes:
    """Bytes of the tensors that a runtime really holds, by class. Compare `workspace.sizing.WorkspaceSizes`."""

    tails_and_spares: int
    lists: int
    tables: int
    staging: int
    host: int
    rows: int = 0

    @property
    def device(self) -> int:
        """All that is on the device."""
        return self.tails_and_spares + self.lists + self.tables + self.staging + self.rows


class StockRuntime:
    """Tails, workspace slots and page lists of one worker.

    Args:
        geometry: the model.
        layout: rows per page.
        max_num_seqs: most requests at once.
        max_num_batched_tokens: most tokens of one launch.
        device: where the operator runs.
        slots: executions in flight at once: uBatches, or forwards under asynchronous scheduling.
        drafts: most draft tokens a forward may have to take back.
        graphs: one more slot each, with the keys of the graphs that use it (`workspace/arena.py`).
        fence_timeout_s: what has not passed for so long is quarantined.
        clock: seconds, monotonic.
        trace: what was ordered; None for a ring of the default size.
        ordered: False drops every stream wait; only for negative controls.
        operator: what a launch queues, for a load that checks its own bytes; called as `call_operator` is.

    Attributes:
        tile_tokens: None here; of the afd executor, see `workspace/sizing.py`.
        areas: memory for staging rows in each slot, by the kinds that share it; none here.
    """

    tile_tokens: int | None = None

    def __init__(
        self,
        geometry: ModelGeometry,
        layout: PageLayout,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        device: torch.device | str,
        slots: int = 2,
        drafts: int = 0,
        graphs: Sequence[Iterable[Hashable]] = (),
        fence_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        trace: Trace | None = None,
        ordered: bool = True,
        operator: Callable[..., torch.Tensor] = call_operator,
    ) -> None:
        eager, slots = slots, slots + len(graphs)
        self.geometry = geometry
        self.max_num_batched_tokens = max_num_batched_tokens
        self.device = TorchDevice(device)
        self.shapes = tail_shapes(geometry, layout, drafts)
        self.store = TailStore(self.shapes, max_num_seqs=max_num_seqs, slots=slots)
        self.trace = Trace() if trace is None else trace
        self.arena: WorkspaceArena[Any] = WorkspaceArena(
            self.device,
            eager,
            graphs=graphs,
            ordered=ordered,
            fence_timeout_s=fence_timeout_s,
            clock=clock,
            trace=self.trace,
            since=_MINT.mint(),
        )
        self._operator = operator
        self._beginning = threading.Lock()
        self._last: dict[SeatIndex, Lease[Any]] = {}  # who had a seat's pages last
        self._open: dict[ExecutionId, StockExecution] = {}
        self._captured: dict[Hashable, tuple[int, int]] = {}  # graph key -> requests, tokens
        self.layers = {kind: {layer: i for i, layer in enumerate(geometry.layers_of(kind))} for kind in CompressorKind}
        self._steps = {
            (layer, kind): _Step(i, kind, self._also_writes(kind))
            for kind in self.layers
            for layer, i in self.layers[kind].items()
        }
        self._of_layer: dict[int, list[tuple[int, CompressorKind]]] = {}  # its compressors
        for place in self._steps:
            self._of_layer.setdefault(place[0], []).append(place)
        where = self.device.device
        self.pools = {
            kind: torch.empty(
                (self.store.pages(kind.ratio), layout.page_rows(kind), geometry.row_bytes(kind) // 4),
                dtype=torch.float32,
                device=where,
            )
            for kind in CompressorKind
            if geometry.layers_of(kind)
        }
        self.tables = [
            {r: _Table(shape, max_num_seqs, max_num_batched_tokens, where) for r, shape in self.shapes.items()}
            for _ in range(slots + 1)  # the last one stays all zero
        ]
        self.areas: list[dict[tuple[CompressorKind, ...], torch.Tensor]] = self._make_areas(slots, drafts)
        self._idle_starts = torch.zeros(max_num_seqs, dtype=torch.int32, device=where)
        self.lists = [_Lists([*self.shapes.values()], max_num_seqs, device=where, pinned=False) for _ in range(slots)]
        host = torch.device("cpu")
        self.staging: StagingRing[Any, _Lists] = StagingRing(
            self.arena.events,
            [_Lists([*self.shapes.values()], max_num_seqs, device=host, pinned=True) for _ in range(slots + 1)],
            timeout_s=fence_timeout_s,
        )

        sizes = size_workspace(
            geometry,
            layout,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            drafts=drafts,
            slots=slots,
            tile_tokens=self.tile_tokens,
        )
        found = self.allocated()
        planned = AllocatedBytes(
            tails_and_spares=sizes.tail_bytes + sizes.spare_bytes,
            lists=sizes.list_bytes,
            tables=sizes.table_bytes,
            staging=sizes.staging_bytes,
            host=sizes.host_bytes,
            rows=sizes.rows_bytes,
        )
        if found != planned:
            raise RuntimeError(f"allocated {found}, but workspace.sizing plans {planned}: admission would be wrong")

    def begin(
        self,
        chunks: Sequence[RequestChunk],
        *,
        generation: Generation | None = None,
        ubatch: int = 0,
        substep: int = 0,
    ) -> StockExecution:
        """Plan an execution, lease its slot and queue the upload of its lists on the current stream.

        Without chunks (an empty uBatch share, an idle rank) nothing is leased and nothing is queued.

        Args:
            chunks: requests in batch order. For a batch cut into uBatches call in uBatch order, with one generation.
            generation: from `mint`; None mints one.
            ubatch: index of the uBatch.
            substep: 0 for the target model, else which draft lane (`execution/substep.py`).

        Raises:
            ValueError: more tokens than the state tables were sized for.
            CaptureError: a graph is being captured.
            Exhausted: all slots are held by unfinished executions.
            StagingLost: no copy of earlier lists is known to be over.
            ArenaClosed: the runtime was closed.
            TailFull: more requests than tails that are free, or behind finished executions.
            TailVoid: a request whose last execution did not launch everything.
            UnknownPosition: a chunk does not start where its request's tail ends.
        """
        return self._plan(chunks, ExecutionId(generation or _MINT.mint(), ubatch, substep), None, 0)

    def capture(
        self, key: Hashable, chunks: Sequence[RequestChunk], *, generation: Generation | None = None
    ) -> StockExecution:
        """Begin the capture of a graph; call `compress` within it.

        Its page lists are empty (rule 7): the chunks give the shape of the launches and nothing else. From here to
        `finish` nothing else may begin, and no thread queries an event. So where other threads may look at the arena,
        begin before the capture and finish after it: `with runtime.capture(...) as execution, torch.npu.graph(graph)`.

        Args:
            key: of the graph, one of `graphs`.
            chunks: as many requests and tokens as every replay will have.
            generation: from `mint`; None mints one.

        Raises:
            ValueError: no requests, or more of them, or tokens, than the runtime was sized for.
            CaptureError: `key` has no slot, or executions are open.
        """
        if not chunks:
            raise ValueError(f"graph {key!r} is to be captured without requests; there is nothing to launch")
        if len(chunks) > self.store.max_num_seqs:
            raise ValueError(
                f"graph {key!r} is to be captured for {len(chunks)} requests in a runtime for "
                f"{self.store.max_num_seqs}; capture a smaller one, or raise max_num_seqs"
            )
        self._check_tokens(chunks)
        execution = ExecutionId(generation or _MINT.mint(), 0, 0, Domain.GRAPH, ExecutionKind.CAPTURE)
        lists = {
            ratio: PageList(
                shape=shape,
                chunks=tuple(chunks),
                columns=np.full((0, shape.list_ids), NO_COLUMN, np.int32),
                ids=np.zeros((shape.layers, 0, shape.list_ids), np.int32),
                starts=np.zeros(0, np.int32),
            ).padded(len(chunks))
            for ratio, shape in self.shapes.items()
        }
        # What is half begun may ask events, which a capture forbids.
        with self._beginning, self.arena.lock:
            lease = self.arena.capture(key, execution)
            self._captured[key] = len(chunks), sum(chunk.tokens for chunk in chunks)
            for table in self.tables[lease.slot.index].values():
                table.layer = None
            return StockExecution(self, lease, StepPlan(lists, (), ()), tuple(chunks))

    def begin_replay(
        self, key: Hashable, chunks: Sequence[RequestChunk], *, generation: Generation | None = None
    ) -> StockExecution:
        """Like `begin`, in the slot of a captured graph: instead of `compress`, call `StockExecution.replay` once.

        Without chunks (an idle rank that replays a graph all the same) the page lists are empty: nothing is stored.

        Raises:
            ValueError: more requests or tokens than were captured.
            CaptureError: nothing was captured under `key`, or the memory was replaced since.
            Exhausted: the graph's slot is held by an unfinished replay.
        """
        requests, tokens = self._captured.get(key, (0, 0))
        asked = sum(chunk.tokens for chunk in chunks)
        if key in self._captured and (len(chunks) > requests or asked > tokens):
            raise ValueError(
                f"{len(chunks)} requests with {asked} tokens for graph {key!r}, captured for {requests} and {tokens}; "
                f"capture a larger one, or begin without a graph"
            )
        execution = ExecutionId(generation or _MINT.mint(), 0, 0, Domain.GRAPH)
        return self._plan(chunks, execution, key, requests)

    def _plan(
        self, chunks: Sequence[RequestChunk], execution: ExecutionId, graph: Hashable | None, rows: int
    ) -> StockExecution:
        if not chunks and graph is None:
            return StockExecution(self, None, None, ())
        self._check_tokens(chunks)
        # The staging ring may make the host wait. Other threads must be able to launch meanwhile, or what the copies
        # wait for may never be queued: so its entry is taken before the lock of the arena, under one of `begin` alone.
        with self._beginning:
            if self.arena.closed:
                raise ArenaClosed(f"{execution} wants a workspace slot after the arena was closed")
            if self.arena.events.mute():
                raise CaptureError(
                    f"{execution} begins while a graph is captured, which may not ask events what is free; "
                    f"begin before the capture or after it, and inside it call capture() only"
                )
            stream = self.device.current_stream()
            entry, host = self.staging.take()
            with self.arena.lock:
                try:
                    begun = self._begin(chunks, execution, graph, rows, host, stream)
                except BaseException:
                    self.staging.copied(entry, stream)  # some of the copies may be queued
                    raise
                try:
                    self.staging.copied(entry, stream)
                except BaseException:
                    begun.finish()  # nobody else will: its caller does not get it
                    raise
                return begun

    def _begin(
        self,
        chunks: Sequence[RequestChunk],
        execution: ExecutionId,
        graph: Hashable | None,
        rows: int,
        host: _Lists,
        stream: Any,
    ) -> StockExecution:
        # By name first: who fails so need not wait for a slot, and must not take one from others.
        self._look()
        self._void_in_doubt(chunks)
        self.store.refuse_void(chunks)
        lease = self.arena.acquire(execution) if graph is None else self.arena.replay(graph, execution)
        plan: StepPlan | None = None
        try:
            plan = self.store.plan(chunks, lease.slot.index, usable=self._usable, in_doubt=self._in_doubt)
            lease.follow(
                continues=[self._last[seat] for seat in plan.continued],
                after=[self._last[seat] for seat in plan.taken if seat in self._last],
                seats=plan.seats,
                void=plan.void,
            )
            lists = {r: pages.padded(rows) for r, pages in plan.lists.items()} if rows else plan.lists
            self._upload(lease, lists, host, stream)
        except BaseException as error:
            if plan is not None:  # pages have changed owner, and nothing will be launched
                plan.void(f"{execution} failed to begin: {error}")
                self._last.update(dict.fromkeys(plan.seats, lease))
            lease.seal(whole=plan is None)
            raise
        plan.written_by(execution.generation)
        self._last.update(dict.fromkeys(plan.seats, lease))
        return StockExecution(self, lease, plan, tuple(chunks), graph)

    def _void_in_doubt(self, chunks: Sequence[RequestChunk]) -> None:
        """Fail those by name who would go on behind work that may never be over, before more work waits for it."""
        if not self.arena.counters.quarantined:
            return
        seats = {self.store.seat(chunk.request) for chunk in chunks}
        for last in {lease for seat, lease in self._last.items() if seat in seats}:
            if last.void is not None and self.arena.in_doubt(last):
                last.void(f"{last.execution} is in doubt: it waits for what was quarantined")

    def _check_tokens(self, chunks: Sequence[RequestChunk]) -> None:
        tokens = sum(chunk.tokens for chunk in chunks)
        if tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"an execution of {tokens} tokens in a runtime sized for {self.max_num_batched_tokens}; "
                f"cut the batch, or construct the runtime with a larger max_num_batched_tokens"
            )

    def _usable(self, seat: SeatIndex) -> bool:
        """Whether a stream can be made to wait for all that may still touch a free seat's pages."""
        return seat not in self._last or self._last[seat].can_be_waited_for()

    def _in_doubt(self, seat: SeatIndex) -> bool:
        """Whether the device may touch a seat's pages at any time."""
        return seat in self._last and self.arena.in_doubt(self._last[seat])

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self.geometry.num_layers

    def mint(self) -> Generation:
        """A generation for a forward whose uBatches are begun one by one."""
        return _MINT.mint()

    def end_request(self, request: RequestId) -> None:
        """Give a request's tail away. Its next owner waits for the last lease that mapped it."""
        with self.arena.lock:
            self.store.end(request)

    def open_of(self, generation: Generation) -> tuple[ExecutionId, ...]:
        """Executions of a forward that are open."""
        with self.arena.lock:
            return tuple(execution for execution in self._open if execution.generation == generation)

    def end_forward(self, generation: Generation) -> tuple[ExecutionId, ...]:
        """Finish what a forward left open. Call it where the forward ends, in a `finally`, once its threads have ended.

        The threads of uBatches may swallow an exception, and with it the call of `finish`. Their executions are sealed
        as broken here: the requests' tails are void, and the slots are free behind what was queued.

        Returns:
            The executions that had been left open.
        """
        with self.arena.lock:
            left = self.open_of(generation)
            errors = []
            for execution in left:
                try:
                    self._open[execution].finish()
                except Exception as error:  # the others must be finished all the same
                    errors.append(error)
        if errors:
            raise errors[0]
        return left

    def abandon(self, generation: Generation, why: str) -> tuple[ExecutionId, ...]:
        """Quarantine what a forward left open: nobody can prove that its work is over, or ever will be.

        Their slots are never leased again, their requests' tails are void and those requests' pages never taken, as
        after `WorkspaceArena.quarantine`. Executions of the forward that are finished have a fence and keep it.
        What cannot be quarantined is not sealed either: no fence would cover it. All are tried, then the first error
        goes on.

        Args:
            generation: of the forward.
            why: for whoever goes on all the same.

        Returns:
            The executions that were open. Finishing them now does nothing.
        """
        with self.arena.lock:
            left = self.open_of(generation)
            errors = []
            for execution in left:
                try:
                    self._open.pop(execution).abandon(why)
                except Exception as error:  # the others must not be sealed all the same
                    errors.append(error)
        if errors:
            raise errors[0]
        return left

    def seats_in_doubt(self) -> tuple[SeatIndex, ...]:
        """Seats that are not taken: nobody knows when the device is done with their pages, or whether it ever is."""
        with self.arena.lock:
            return tuple(seat for seat in self._last if self._in_doubt(seat))

    def close(self, drain_s: float = 0.0) -> tuple[Lease[Any], ...]:
        """End: no execution begins any more. Refuses, and changes nothing, while work may still run.

        Args:
            drain_s: wait for it so long; what is not over then is quarantined.

        Returns:
            Leases in doubt. The runtime's memory stays allocated for the life of the process if there are any.

        Raises:
            StillLeased: executions are open, or work may still run.
        """
        if drain_s > 0 and all(lease.state is not LeaseState.ACQUIRED for lease in self.arena.live()):
            self.arena.drain(drain_s)
        lost = self.arena.close()
        if lost:
            _NEVER_FREED.add(self)
        return lost

    def __del__(self) -> None:
        """Garbage collection frees nothing that the device or a graph may still touch; `close` tells that it may."""
        arena: WorkspaceArena[Any] | None = getattr(self, "arena", None)  # None if the constructor failed early
        if arena is None or arena.closed or sys.is_finalizing():
            return
        if getattr(self, "_captured", None) or arena.live():
            _NEVER_FREED.add(self)

    def idle(self, kind: CompressorKind, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Table and starts for a forward without an execution (profile, dummy, idle rank): all zero, nothing is stored.

        Args:
            kind: the compressor.
            rows: requests that the launch pretends to have.

        Raises:
            ValueError: more than `max_num_seqs`.
        """
        if rows > self.store.max_num_seqs:
            raise ValueError(f"{rows} idle requests in a runtime for {self.store.max_num_seqs}; raise max_num_seqs")
        return self.tables[-1][kind.ratio].rows[:rows], self._idle_starts[:rows]

    def compress_idle(
        self,
        kind: CompressorKind,
        x: torch.Tensor,
        weights: CompressorWeights,
        rope_cos: torch.Tensor,
        rope_sin: torch.Tensor,
        cu_seqlens: torch.Tensor,
    ) -> torch.Tensor:
        """Launch for a forward without an execution; nothing is stored, and nobody may read the result as rows.

        Args and result as of `executor.Execution.compress`.

        Raises:
            ValueError: see `idle`.
        """
        table, starts = self.idle(kind, cu_seqlens.shape[0] - 1)
        return self._operator(x, weights, kind, self.pools[kind], table, starts, cu_seqlens, rope_cos, rope_sin)

    def allocated(self) -> AllocatedBytes:
        """What the runtime holds, measured on its tensors."""
        return AllocatedBytes(
            tails_and_spares=sum(pool.nbytes for pool in self.pools.values()),
            lists=sum(lists.list_bytes for lists in self.lists),
            tables=sum(table.flat.nbytes for slot in self.tables for table in slot.values()),
            staging=self._idle_starts.nbytes + sum(lists.staging_bytes for lists in self.lists),
            host=sum(entry.flat.nbytes for entry in self.staging.entries),
            rows=sum(area.nbytes for slot in self.areas for area in slot.values()),
        )

    def _also_writes(self, kind: CompressorKind) -> tuple[str, ...]:  # noqa: ARG002
        """Parts of the slot that a launch of this kind writes besides pages and table."""
        return ()

    def _make_areas(self, slots: int, drafts: int) -> list[dict[tuple[CompressorKind, ...], torch.Tensor]]:  # noqa: ARG002
        """Memory for staging rows, by slot."""
        return []

    def _end(self, lease: Lease[Any], void: Callable[[str], None]) -> None:
        """Called before a lease all of whose launches are queued is sealed; `void` voids its requests' tails."""

    def _look(self) -> None:
        """Called before an execution is planned: raises what the device has found since."""

    def _launch(
        self,
        lease: Lease[Any],  # noqa: ARG002
        split: Split,  # noqa: ARG002
        x: torch.Tensor,
        weights: CompressorWeights,
        kind: CompressorKind,
        table: torch.Tensor,
        starts: torch.Tensor,
        cu_seqlens: torch.Tensor,
        rope_cos: torch.Tensor,
        rope_sin: torch.Tensor,
    ) -> torch.Tensor:
        """Queue what compresses; all that it may touch is the lease's for the current stream."""
        return self._operator(x, weights, kind, self.pools[kind], table, starts, cu_seqlens, rope_cos, rope_sin)

    def _upload(self, lease: Lease[Any], lists: dict[int, PageList], host: _Lists, stream: Any) -> None:
        slot, end = lease.slot.index, 0
        parts = [_named_part(what, ratio) for ratio in lists for what in ("lists", "table")]
        lease.touch(stream, writes=parts)
        for ratio, pages in lists.items():
            table, part = self.tables[slot][ratio], host.parts[ratio]
            for there, values in ((part.cells, table.cells(pages)), (part.starts, pages.starts), (part.ids, pages.ids)):
                there.numpy()[: values.size] = values.ravel()
            end = int(part.ids.storage_offset()) + pages.ids.size
            table.rows[: len(pages.starts)].zero_()
            table.layer = None
        # One copy, though it takes what lies between the parts along: the host pays for copies, not for their bytes.
        self.lists[slot].flat[:end].copy_(host.flat[:end], non_blocking=True)


class StockExecution:
    """One execution of a `StockRuntime`; a context manager that seals its lease. See `executor.Execution`.

    Attributes:
        lease: None for an execution without requests.
        lists: page lists by ratio.
    """

    def __init__(
        self,
        runtime: StockRuntime,
        lease: Lease[Any] | None,
        plan: StepPlan | None,
        chunks: tuple[RequestChunk, ...],
        graph: Hashable | None = None,
    ) -> None:
        self._runtime = runtime
        self._graph = graph  # to be replayed instead of launches
        self._plan = plan
        self._chunks = chunks
        self._launched: dict[tuple[int, CompressorKind], list[slice]] = {}  # requests whose launch is queued
        self._whole: set[tuple[int, CompressorKind]] = set()  # compressors all of whose requests are launched
        self._layer: dict[CompressorKind, int] = {}  # the last layer launched
        self._splits: dict[tuple[int | None, int | None, int | None], Split] = {}  # by the slice that was asked for
        self._scattered: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}  # see _ids
        self._replayed = False
        self._lost: str | None = None
        self.lease = lease
        self.lists = plan.lists if plan else {}
        if lease is not None:
            runtime._open[lease.execution] = self

    @property
    def lost(self) -> str | None:
        """Once it is finished without all of its launches, or quarantined by whomever: why its tails are void."""
        if self._lost is None and self.lease is not None and self.lease.state is LeaseState.QUARANTINED:
            why = next((held.void for held in self._plan.holders if held.void) if self._plan else iter(()), None)
            return why or f"{self.lease.execution} was quarantined"
        return self._lost

    def compress(
        self,
        layer: int,
        kind: CompressorKind,
        x: torch.Tensor,
        weights: CompressorWeights,
        rope_cos: torch.Tensor,
        rope_sin: torch.Tensor,
        cu_seqlens: torch.Tensor,
        requests: slice = slice(None),
    ) -> torch.Tensor:
        """See `executor.Execution`.

        Raises:
            ValueError: a layer without this kind, or tokens that are not those of the requests.
            OrderError: a layer out of order, requests out of order or twice, or an execution that is finished, or is
                to replay a graph.
        """
        split = self._splits.get((requests.start, requests.stop, requests.step)) or self._split(requests)
        if x.shape[0] != split.tokens:
            raise ValueError(
                f"{x.shape[0]} tokens for {split.requests} requests that have {split.tokens} in this execution; they "
                f"are those of another batch or uBatch"
            )
        lease, runtime, place = self.lease, self._runtime, (layer, kind)
        if lease is None:
            return x.new_empty((0, weights.norm_weight.shape[0]))
        if self._graph is not None:
            raise OrderError(f"{lease.execution} was begun for graph {self._graph!r}; replay that, once")
        step = runtime._steps.get(place)
        if step is None:
            raise ValueError(f"layer {layer} has no {kind.value} compressor; it is in {[*runtime.layers[kind]]}")
        launched = self._launched.get(place)
        if launched or layer < self._layer.get(kind, layer):
            self._check_order(layer, kind, split.mine, launched)
        self._layer[kind] = layer
        table = runtime.tables[lease.slot.index][step.ratio]
        rows, starts = split.cut.get(step.ratio) or self._cut(split, step.ratio)
        # Held until all is queued: another thread may order itself behind this touch as soon as it is made.
        with runtime.arena.lock:
            scatter = table.layer != layer
            writes = step.scatters if scatter else step.writes
            lease.touch_locked(runtime.device.current_stream(), step.reads, writes, place)
            if scatter:
                cells, ids = self._ids(step.ratio)
                table.flat.scatter_(0, cells, ids[step.index])
                table.layer = layer
            compressed = runtime._launch(lease, split, x, weights, kind, rows, starts, cu_seqlens, rope_cos, rope_sin)
            count = split.requests
            if launched is None:
                self._launched[place] = [split.mine]
            else:
                for done in launched:
                    count += done.stop - done.start
                launched.append(split.mine)
            if count == len(self._chunks) and split.requests:
                self._whole.add(place)
                lease.complete_locked(place)
        return compressed

    def _split(self, requests: slice) -> Split:
        """What the launches of some requests have in common: once, since nothing per launch may grow with requests."""
        first, stop, step = requests.indices(len(self._chunks))
        if step != 1:
            raise ValueError(f"requests of a launch must be neighbours, got step {step}; launch each run apart")
        stop = max(first, stop)
        split = Split(slice(first, stop), self._chunks[first:stop])
        self._splits[requests.start, requests.stop, requests.step] = split
        return split

    def _cut(self, split: Split, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """State table and starts of a split; torch takes long to cut them out, and all layers have the same."""
        assert self.lease is not None
        slot = self.lease.slot.index
        rows, starts = self._runtime.tables[slot][ratio].rows, self._runtime.lists[slot].parts[ratio].starts
        split.cut[ratio] = found = rows[split.mine], starts[split.mine]
        return found

    def _ids(self, ratio: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Where the ids of a layer go, and the ids of every layer."""
        found = self._scattered.get(ratio)
        if found is None:
            assert self.lease is not None
            part, places = self._runtime.lists[self.lease.slot.index].parts[ratio], self.lists[ratio].columns.size
            ids = part.ids[: self._runtime.shapes[ratio].layers * places].split(places)
            found = self._scattered[ratio] = part.cells[:places], ids
        return found

    def replay(self, graph: Any) -> None:
        """Queue a captured graph, with all launches of this execution in it, on the current stream.

        Args:
            graph: what was captured under the key of `begin_replay`; it has a method `replay`.

        Raises:
            OrderError: not begun by `begin_replay`, or replayed already.
        """
        if self.lease is None:
            return
        if self._graph is None or self._replayed:
            state = "was replayed already" if self._replayed else "was begun without a graph"
            raise OrderError(f"{self.lease.execution} is to replay a graph, and {state}; call begin_replay for each")
        runtime = self._runtime
        with runtime.arena.lock:
            stream = runtime.device.current_stream()
            self.lease.touch(stream, writes=[WHOLE], step=WHOLE)
            runtime.trace.add("replay", self.lease.number, str(self._graph), runtime.device.stream_id(stream))
            graph.replay()
            self.lease.complete(WHOLE)
            self._replayed = True

    def _check_order(self, layer: int, kind: CompressorKind, mine: slice, launched: Sequence[slice] | None) -> None:
        """Layers ascend, because spares pass from layer to layer; each request of a layer comes once."""
        if layer < self._layer.get(kind, layer):
            raise OrderError(f"{kind.value} of layer {layer} after layer {self._layer[kind]}; launch layers in order")
        for done in launched or ():
            if mine.start < done.stop and done.start < mine.stop:
                raise OrderError(
                    f"{kind.value} of layer {layer}: requests {mine.start} to {mine.stop - 1}, and {done.start} to "
                    f"{done.stop - 1} are launched already; launch each request once"
                )

    def _count(self, place: tuple[int, CompressorKind]) -> int:
        """Requests whose launch is queued."""
        return sum(done.stop - done.start for done in self._launched.get(place, ()))

    def computed(self, layer: int) -> bool:
        """Whether all launches of a layer are queued. True without requests, and where the layer has no compressor."""
        return self.lease is None or self._replayed or self._whole.issuperset(self._runtime._of_layer.get(layer, ()))

    def abandon(self, why: str) -> None:
        """See `StockRuntime.abandon`, which calls it."""
        if self.lease is not None and self._plan is not None:
            self._lost = self.lost or f"{self.lease.execution} was quarantined: {why}"
            self._plan.void(f"{self.lease.execution} is in doubt: {why}")  # also where the quarantine fails
            self._runtime.arena.quarantine(self.lease, why)

    def finish(self) -> None:
        """Seal the lease. If a launch is missing, as after an exception, the requests' tails are void from here on.

        Safe to call once only; an execution without requests has nothing to finish.
        """
        if self.lease is None or self._plan is None:
            return
        compressors = () if self._replayed else self._runtime.geometry.compressors
        missing = []
        if len(self._whole) < len(compressors):
            missing = [c for c in compressors if self._count((c.layer, c.kind)) != len(self._chunks)]
        with self._runtime.arena.lock:  # void before anybody can go on from these tails
            if missing and self.lease.state is LeaseState.ACQUIRED:
                first = f"layer {missing[0].layer} {missing[0].kind.value}"
                missed = f"{len(missing)} of {len(compressors)} launches missing, first {first}"
                self._lost = f"{self.lease.execution} ended with {missed}"
                self._plan.void(self._lost)
            self._runtime._open.pop(self.lease.execution, None)
            if self.lease.state is LeaseState.QUARANTINED:  # before: what there was to void is void
                return
            try:
                if not missing and self.lease.state is LeaseState.ACQUIRED:
                    self._runtime._end(self.lease, self._plan.void)
            finally:
                self.lease.seal(whole=not missing)

    def __enter__(self) -> StockExecution:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
