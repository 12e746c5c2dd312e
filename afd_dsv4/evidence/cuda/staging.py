# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The stack of compressor layers over large staging rows: what ordering their reuse finds, costs and frees.

Problem: slots of the stock runtime hold small things; an executor that projects into explicit staging rows holds a
layer's rows of a whole chunk there (320 MiB at 32,768 tokens), and whether those may be shared by layers, streams and
uBatches is a question of events alone.
Way: per layer and uBatch one product on the main stream fills staging rows, and the compressors of the layer read them
on an auxiliary stream. Where the rows lie and what orders their reuse is the `Reuse`: workspace slots of the same arena
that the executors use (lease, touch, fence), or one of three ways without them, in the same code. One uBatch, or two of
equal length, some requests each, every layer of the geometry at its own widths. Kernels are launched as a compiled
program would, without Triton's own work on every launch, or the host's time would be all there is to see in a short
batch.
Not here: tails, pages and state tables (every request starts at 0 and leaves no tail): those are the stock runtime's,
in `rows.py`, `replays.py` and the soak.
"""

from __future__ import annotations

import enum
import itertools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from afd_dsv4.device.torch_device import TorchDevice
from afd_dsv4.evidence.cuda.operator import on
from afd_dsv4.evidence.cuda.pauses import pauses
from afd_dsv4.geometry import CompressorKind, ModelGeometry
from afd_dsv4.workspace import order
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.identity import ExecutionId, GenerationMint
from afd_dsv4.workspace.lease import Lease
from afd_dsv4.workspace.trace import Trace

REQUESTS = 4  # of a uBatch
ROPE_DIM = 64
AREAS: tuple[tuple[str, ...], ...] = (("rows",), ("more rows",))  # parts of a slot
NOTHING: tuple[str, ...] = ()
MOST_LAG_US = 600


class Reuse(enum.Enum):
    """Where a layer's staging rows lie, and what orders their reuse."""

    PRIVATE = "a private buffer per layer and uBatch, never reused within a forward"
    SLOTS = "one workspace slot per uBatch, ordered by touches and fences"
    TWO_AREAS = "the same with two areas in every slot, for layers in turn"
    SYNCHRONISED = "one buffer per uBatch, which synchronises the device before each of its layers"
    UNORDERED = "one buffer for all, nothing orders its reuse"


LEASED = (Reuse.SLOTS, Reuse.TWO_AREAS)


@dataclass(frozen=True)
class Weights:
    """One compressor of a layer: its columns of the layer's staging rows, and what compresses them."""

    columns: slice
    ape: torch.Tensor
    norm: torch.Tensor
    out: tuple[torch.Tensor, ...]  # by uBatch
    rope: tuple[torch.Tensor, torch.Tensor]
    state: torch.Tensor


class Load:
    """Tokens, weights and compressed rows: what all ways of reuse have in common.

    Args:
        geometry: the model; its layers without a compressor do nothing.
        tokens: of a forward, all uBatches together.
        device: "cuda", or "npu" on the software NPU.
        seed: of tokens and weights.
        ubatches: executions of a forward, of equal length.
    """

    def __init__(
        self, geometry: ModelGeometry, tokens: int, device: torch.device | str, seed: int, ubatches: int = 2
    ) -> None:
        self.ubatches = ubatches
        self.device = TorchDevice(device)
        self.module: Any = torch.get_device_module(self.device.device)
        self.tokens = tokens // ubatches
        if self.tokens < 128 * REQUESTS:
            raise ValueError(f"{tokens} tokens are too few: a request must have a window of 128; give 1024 or more")
        where, hidden = self.device.device, geometry.hidden_size
        generator = torch.Generator(where if where.type == "cuda" else "cpu").manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=generator.device) * scale).to(where)

        shares = [self.tokens * i // REQUESTS for i in range(REQUESTS + 1)]
        self.cu_seqlens = torch.tensor(shares, dtype=torch.int32).to(where)
        self.starts = torch.zeros(REQUESTS, dtype=torch.int32, device=where)
        self.table = torch.zeros((REQUESTS, 1), dtype=torch.int32, device=where)  # nothing is mapped
        self.x = tuple(normal(self.tokens, hidden).bfloat16() for _ in range(ubatches))
        counts = {r: sum((b - a) // r for a, b in itertools.pairwise(shares)) for r in (4, 128)}
        wide = {kind: 2 * kind.coff * _dim(geometry, kind) for kind in CompressorKind}
        states = {kind: torch.zeros((1, 1, columns), device=where) for kind, columns in wide.items()}
        angles = {r: normal(n, ROPE_DIM // 2).repeat_interleave(2, dim=1) for r, n in counts.items()}
        rope = {r: (turn.cos().bfloat16(), turn.sin().bfloat16()) for r, turn in angles.items()}
        kinds: dict[int, list[CompressorKind]] = {}
        for compressor in geometry.compressors:
            kinds.setdefault(compressor.layer, []).append(compressor.kind)
        sizes = [
            counts[kind.ratio] * _dim(geometry, kind) for _ in range(ubatches) for of in kinds.values() for kind in of
        ]
        self.flat = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=where)  # all compressed rows
        cut = list(self.flat.split(sizes))
        self.layers: list[tuple[torch.Tensor, tuple[Weights, ...]]] = []
        for number, of in enumerate(kinds.values()):
            begin, parts = 0, []
            for place, kind in enumerate(of):
                dim, columns = _dim(geometry, kind), wide[kind]
                at = sum(map(len, [*kinds.values()][:number])) + place
                both = range(at, len(cut), len(cut) // ubatches)
                parts.append(
                    Weights(
                        slice(begin, begin + columns),
                        normal(kind.ratio, columns // 2),
                        (1 + normal(dim, scale=0.1)).bfloat16(),
                        tuple(cut[i].view(-1, dim) for i in both),
                        rope[kind.ratio],
                        states[kind],
                    )
                )
                begin += columns
            self.layers.append((normal(hidden, begin, scale=hidden**-0.5).bfloat16(), tuple(parts)))
        self.slot_words = self.tokens * max(weight.shape[1] for weight, _ in self.layers)
        self.main = self.module.Stream()
        # Whoever reads comes first, where both could run: the next write waits for it, and nothing waits for a product.
        self.aux = self.module.Stream(priority=-1)
        self._prepared = on(where).prepared
        self.module.synchronize()

    def product(self, ubatch: int, weight: torch.Tensor, rows: torch.Tensor) -> Callable[[], Any]:
        """What queues the product of a layer on the current stream, for any number of times."""
        x = self.x[ubatch]
        if rows.device.type == "cuda":
            return partial(torch.mm, x, weight, out_dtype=torch.float32, out=rows)
        return lambda: rows.copy_(x.float() @ weight.float())

    def compressors(self, ubatch: int, parts: Sequence[Weights], rows: torch.Tensor) -> tuple[Callable[[], None], ...]:
        """The launches of a layer's compressors on the auxiliary stream, for any number of times."""
        return tuple(
            self._prepared(
                self.aux,
                rows[:, part.columns],
                part.ape,
                part.state,
                self.table,
                self.starts,
                self.cu_seqlens,
                part.norm,
                *part.rope,
                1e-6,
                part.out[ubatch],
            )
            for part in parts
        )

    def outputs(self) -> list[torch.Tensor]:
        """Compressed rows by layer, compressor and uBatch."""
        return [out for _, parts in self.layers for part in parts for out in part.out]


def _dim(geometry: ModelGeometry, kind: CompressorKind) -> int:
    return geometry.index_head_dim if kind is CompressorKind.C4_INDEXER else geometry.head_dim


class Stack:
    """Forwards of a load with one way of reuse. Its buffers are allocated here and nowhere else.

    Args:
        load: the load.
        reuse: the way.
        ordered: False queues no wait in workspace slots; only for negative controls.
        trace: what the arena orders; None for nowhere.

    Attributes:
        arena: of the slots; unused elsewhere.
        touch_s: seconds of the host in each touch so far, event calls included.
        lag: called before the compressors of a layer are queued, on their stream; for stress.
    """

    def __init__(self, load: Load, reuse: Reuse, *, ordered: bool = True, trace: Trace | None = None) -> None:
        self.load = load
        self.reuse = reuse
        self.arena: WorkspaceArena[Any] = WorkspaceArena(load.device, load.ubatches, ordered=ordered, trace=trace)
        count = {
            Reuse.PRIVATE: len(load.layers) * load.ubatches,
            Reuse.UNORDERED: 1,
            Reuse.TWO_AREAS: 2 * load.ubatches,
        }.get(reuse, load.ubatches)
        where = load.device.device
        self._buffers = [torch.empty(self._words(i), dtype=torch.float32, device=where) for i in range(count)]
        self._views: dict[tuple[int, int], torch.Tensor] = {}  # cutting them out anew costs as much as a touch
        for index, buffer in enumerate(self._buffers):
            for layer, (weight, _) in enumerate(load.layers):
                columns = weight.shape[1]
                if load.tokens * columns <= buffer.numel():
                    self._views[index, layer] = buffer[: load.tokens * columns].view(load.tokens, columns)
        self._launches: dict[tuple[int, int, int], tuple[Callable[[], Any], tuple[Callable[[], None], ...]]] = {}
        self._events = [load.module.Event() for _ in range(4 * load.ubatches)]
        self._mint = GenerationMint()
        self.touch_s: list[float] = []
        self.lag: Callable[[], None] = lambda: None

    @property
    def bytes(self) -> int:
        """Of all staging rows."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def _words(self, index: int) -> int:
        if self.reuse is not Reuse.PRIVATE:
            return self.load.slot_words
        return self.load.tokens * int(self.load.layers[index // self.load.ubatches][0].shape[1])

    def forward(self) -> None:
        """Queue one forward. The host waits for nothing, but where the way of reuse is to wait."""
        load = self.load
        leases: list[Lease[Any]] = []
        if self.reuse in LEASED:
            generation = self._mint.mint()
            leases = [self.arena.acquire(ExecutionId(generation, ubatch)) for ubatch in range(load.ubatches)]
        load.module.set_stream(load.main)
        try:
            for number, (weight, parts) in enumerate(load.layers):
                for ubatch in range(load.ubatches):
                    if self.reuse is Reuse.SYNCHRONISED:
                        load.module.synchronize()
                    self._layer(number, ubatch, weight, parts, leases[ubatch] if leases else None)
        finally:
            for lease in leases:
                lease.seal()

    def _layer(
        self, number: int, ubatch: int, weight: torch.Tensor, parts: Sequence[Weights], lease: Lease[Any] | None
    ) -> None:
        load = self.load
        area = NOTHING
        if lease is not None:
            turn = number % 2 if self.reuse is Reuse.TWO_AREAS else 0
            index, area = int(lease.slot.index) + load.ubatches * turn, AREAS[turn]
        else:
            index = {Reuse.PRIVATE: load.ubatches * number + ubatch, Reuse.UNORDERED: 0}.get(self.reuse, ubatch)
        rows = self._views[index, number]
        made = self._launches.get((index, number, ubatch))
        if made is None:
            made = load.product(ubatch, weight, rows), load.compressors(ubatch, parts, rows)
            self._launches[index, number, ubatch] = made
        project, launches = made
        if lease is not None:
            with self.arena.lock:
                self._touch(lease, load.main, NOTHING, area)
                project()
            with self.arena.lock:
                self._touch(lease, load.aux, area, NOTHING)
                self.lag()
                for launch in launches:
                    launch()
        else:
            project()
            event = self._events[(load.ubatches * number + ubatch) % len(self._events)]
            event.record(load.main)
            load.aux.wait_event(event)
            self.lag()
            for launch in launches:
                launch()

    def _touch(self, lease: Lease[Any], stream: Any, reads: Sequence[str], writes: Sequence[str]) -> None:
        began = time.perf_counter()
        lease.touch_locked(stream, reads, writes)
        self.touch_s.append(time.perf_counter() - began)

    def touch_us(self) -> float:
        """Host time of the two touches of one layer of one execution, the median."""
        return 1e6 * statistics.median(a + b for a, b in zip(self.touch_s[::2], self.touch_s[1::2], strict=True))


@contextmanager
def own_stream(module: Any) -> Iterator[None]:
    """Give the calling thread its current stream back."""
    before = module.current_stream()
    try:
        yield
    finally:
        module.set_stream(before)


def truth(load: Load) -> torch.Tensor:
    """All compressed rows, from private buffers; run twice, which must agree, or nothing can be compared."""
    stack = Stack(load, Reuse.PRIVATE)
    found = []
    with own_stream(load.module):
        for _ in range(2):
            load.flat.zero_()
            load.module.synchronize()
            stack.forward()
            load.module.synchronize()
            found.append(load.flat.clone())
        load.module.synchronize()
    if not torch.equal(found[0].view(torch.int16), found[1].view(torch.int16)):
        raise RuntimeError("two forwards with private buffers gave different rows: this device repeats nothing")
    return found[0]


def different(load: Load, expected: torch.Tensor) -> tuple[int, int]:
    """(rows, bytes) of the compressed rows that are not as expected; waits for the device."""
    load.module.synchronize()
    wrong = load.flat.view(torch.int8) != expected.view(torch.int8)
    count = sum(
        int(part.view(out.shape[0], -1).any(1).sum())
        for part, out in zip(wrong.split([2 * o.numel() for o in _packed(load)]), _packed(load), strict=True)
    )
    return count, int(wrong.sum())


def _packed(load: Load) -> list[torch.Tensor]:
    """The outputs in the order in which they lie in `flat`."""
    return sorted(load.outputs(), key=lambda out: out.storage_offset())


@dataclass
class Round:
    """One round of forwards: what is wrong behind its last one, and what the trace says."""

    rows: int
    bytes: int
    unordered: int


def lag_of(load: Load, rng: random.Random) -> Callable[[], None]:
    """Random pauses of the auxiliary stream, where the device can pause: before about one layer in eight."""
    if load.device.device.type != "cuda":
        return lambda: None
    pause = pauses(rng, MOST_LAG_US)

    def lag() -> None:
        with load.module.stream(load.aux):
            pause()

    return lag


def rounds(
    load: Load,
    expected: torch.Tensor,
    reuse: Reuse,
    count: int,
    seed: int,
    *,
    forwards: int = 2,
    ordered: bool = True,
    lag: bool = False,
) -> list[Round]:
    """Rounds with one way of reuse, each of `forwards` forwards, compared at its end; `lag` adds random pauses."""
    found = []
    for index in range(count):
        trace = Trace(None)
        stack = Stack(load, reuse, ordered=ordered, trace=trace)
        if lag:
            stack.lag = lag_of(load, random.Random(f"{seed} {index}"))
        load.flat.zero_()
        load.module.synchronize()
        with own_stream(load.module):
            for _ in range(forwards):
                stack.forward()
        rows, wrong = different(load, expected)
        unordered = len(order.check(trace.records()).violations) if reuse in LEASED else 0
        found.append(Round(rows, wrong, unordered))
    return found


@dataclass
class Stress:
    """Many reuses of workspace slots, every compressed byte of every forward compared.

    Attributes:
        reuses: layers that wrote to staging rows which another layer or execution had before.
        forwards: of two executions each.
        bytes: compared.
        wrong: bytes.
        unordered: reuses that the order checker found.
        records: of the trace.
        host_synchronisations: that torch noticed while forwards were queued.
        touch_us: host time of the two touches of one layer of one execution, the median, with a trace.
        handed_on: slots leased while their fence was pending.
        waits: stream waits queued.
        seconds: all of it.
    """

    reuses: int = 0
    forwards: int = 0
    bytes: int = 0
    wrong: int = 0
    unordered: int = 0
    records: int = 0
    host_synchronisations: int = 0
    touch_us: float = 0.0
    handed_on: int = 0
    waits: int = 0
    seconds: float = 0.0


def stress(load: Load, expected: torch.Tensor, reuses: int, seed: int, *, block: int = 20) -> Stress:
    """Queue forwards until the slots were reused so often; `block` of them at a time without any wait of the host."""
    found, trace = Stress(), Trace(None)
    stack = Stack(load, Reuse.SLOTS, trace=trace)
    stack.lag = lag_of(load, random.Random(seed))
    per_forward = load.ubatches * len(load.layers)
    wrong = torch.zeros((), dtype=torch.int64, device=load.device.device)
    want = expected.view(torch.int8)
    dropped, began = 0, time.perf_counter()
    load.flat.zero_()
    load.module.synchronize()
    with own_stream(load.module):
        while found.reuses < reuses:
            with counted_synchronisations() as seen:
                for _ in range(block):
                    stack.forward()
                    load.module.set_stream(load.aux)  # behind the compressors of this forward, before the next one's
                    wrong += (load.flat.view(torch.int8) != want).sum()
                    load.flat.zero_()
            found.host_synchronisations += seen.count
            found.forwards += block
            found.reuses = found.forwards * per_forward - load.ubatches
            load.module.synchronize()
            report = order.check(trace.records(), dropped)
            dropped += report.records
            trace.clear()
            found.records += report.records
            found.unordered += len(report.violations)
    found.wrong = int(wrong)
    found.bytes = found.forwards * want.numel()
    found.touch_us = stack.touch_us()
    found.handed_on, found.waits = stack.arena.counters.handed_on, stack.arena.counters.waits
    found.seconds = time.perf_counter() - began
    return found


@dataclass
class Counted:
    """How often torch saw the host wait for the device."""

    count: int = 0


@contextmanager
def counted_synchronisations() -> Iterator[Counted]:
    """Count torch operations that make the host wait for a CUDA device; elsewhere it stays 0.

    torch warns of them (`torch.cuda.set_sync_debug_mode`); explicit waits for events, streams and the device it does
    not see: those are the arena's to count, and it has none but in its staging ring.
    """
    found = Counted()
    if not torch.cuda.is_available():
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.count = sum("synchroniz" in str(warning.message) for warning in caught)


@dataclass
class Timing:
    """Times of one load in every way of reuse that gives right rows; all in one process, in turn.

    Attributes:
        tokens: of a forward.
        ubatches: executions of it.
        ms: median time of a forward, by way.
        host_ms: median time in which the host had queued it, by way.
        peak: most bytes allocated during a forward beyond tokens, weights and compressed rows, by way.
        rows: bytes of staging rows, by way.
        touch_us: host time of the two touches of one layer of one execution, the median; the device keeps up, so that
            the host is not held up by a full queue.
        over: throughput with slots, by their way, over that of another way: 1 is "costs nothing". Lower quartile,
            median and upper quartile of what each turn gave.
        wrong: bytes that differ between the ways.
    """

    tokens: int
    ubatches: int
    ms: dict[str, float] = field(default_factory=dict)
    host_ms: dict[str, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    touch_us: float = 0.0
    over: dict[str, dict[str, tuple[float, float, float]]] = field(default_factory=dict)
    wrong: int = 0


def measure(load: Load, expected: torch.Tensor, *, turns: int = 16, forwards: int = 6) -> Timing:
    """Time forwards, `forwards` in a row, one way after the other, `turns` times."""
    found = Timing(load.tokens * load.ubatches, load.ubatches)
    ways = (Reuse.PRIVATE, Reuse.SLOTS, Reuse.TWO_AREAS, Reuse.SYNCHRONISED)
    module = load.module
    with own_stream(module):
        for reuse in ways:  # apart, so that the memory of one is not the other's
            module.synchronize()
            before = module.memory_allocated()
            module.reset_peak_memory_stats()
            stack = Stack(load, reuse)
            for _ in range(2):
                stack.forward()
            module.synchronize()
            found.peak[reuse.name.lower()] = module.max_memory_allocated() - before
            found.rows[reuse.name.lower()] = stack.bytes
            del stack
        stacks = {reuse: Stack(load, reuse) for reuse in ways}
        times: dict[Reuse, list[float]] = {reuse: [] for reuse in ways}
        hosts: dict[Reuse, list[float]] = {reuse: [] for reuse in ways}
        for turn in range(-1, turns):  # the first one warms up
            at = turn % len(ways)  # so that each has each place, and each neighbour, equally often
            for reuse in (ways[at:] + ways[:at])[:: 1 - turn // len(ways) % 2 * 2]:
                load.flat.zero_()
                module.synchronize()
                began = time.perf_counter()
                for _ in range(forwards):
                    stacks[reuse].forward()
                queued = time.perf_counter()
                module.synchronize()
                ended = time.perf_counter()
                if turn < 0:
                    continue
                times[reuse].append(1e3 * (ended - began) / forwards)
                hosts[reuse].append(1e3 * (queued - began) / forwards)
                found.wrong += different(load, expected)[1] if turn in (0, turns - 1) else 0
        slots = stacks[Reuse.SLOTS]
        slots.touch_s.clear()
        for _ in range(turns):
            slots.forward()
            module.synchronize()
        found.touch_us = slots.touch_us()
    for reuse in ways:
        found.ms[reuse.name.lower()] = statistics.median(times[reuse])
        found.host_ms[reuse.name.lower()] = statistics.median(hosts[reuse])
    for slots_way in LEASED:
        for other in (Reuse.PRIVATE, Reuse.SYNCHRONISED):
            ratios = [a / b for a, b in zip(times[other], times[slots_way], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            found.over.setdefault(slots_way.name.lower(), {})[other.name.lower()] = (low, middle, high)
    return found
