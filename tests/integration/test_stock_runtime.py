# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The stock executor on the software NPU: real torch.npu streams and events, the recorded operator, NumPy as truth.

Every compressed row is compared bit for bit with the definition, computed from the whole sequence in one piece.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

from afd_dsv4.compressor.stock import StockRuntime
from afd_dsv4.device.torch_device import TorchDevice
from afd_dsv4.evidence.controls import SABOTAGES, SabotagedRuntime
from afd_dsv4.evidence.memory import broken_laws, measure, planned, scale, scale_forward
from afd_dsv4.evidence.rows import Batch
from afd_dsv4.evidence.soak_load import Gate
from afd_dsv4.geometry import CompressorKind, page_layout
from afd_dsv4.softnpu import runtime as softnpu
from afd_dsv4.tail.store import TailFull, TailVoid, UnknownPosition
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.arena import Exhausted
from afd_dsv4.workspace.fence import EventSource
from afd_dsv4.workspace.lease import OrderError
from afd_dsv4.workspace.sizing import size_workspace
from afd_dsv4.workspace.staging import StagingRing
from tests.stock_world import HIDDEN, LAYERS, LENGTH, Request, World, small_hidden_size

__all__ = ["small_hidden_size"]  # a fixture

pytestmark = pytest.mark.npu


def random_load(
    world: World, rng: random.Random, steps: int, *, alternate: bool = False, first_is_late: bool = False
) -> None:
    """Three requests in random chunks, cut anywhere; a finished one makes room for another.

    Args:
        first_is_late: nothing of the first uBatch runs until all of the second has: only without touches can it.
    """
    requests: dict[str, Request] = {}
    names = iter(f"r{i}" for i in range(1000))
    for _ in range(steps):
        while len(requests) < 3:
            requests[next(names)] = world.request()
        chunks = []
        for name, request in requests.items():
            tokens = min(rng.choice([1, 3, 4, 5, 31, 32, 33, 127, 128, 129, 300]), LENGTH - request.position)
            chunks.append(RequestChunk(RequestId(name), request.position, request.position + tokens))
            request.position += tokens
        held = Gate(torch.npu.ExternalEvent(), world.streams[0], world.copies) if first_is_late else None
        world.queue(
            requests,
            chunks,
            cut_tokens=rng.randint(0, sum(chunk.tokens for chunk in chunks)),
            alternate=alternate,
        )
        if held:
            world.streams[1].synchronize()
            held.open()
        world.check_all(requests)
        for name in [name for name, request in requests.items() if request.position == LENGTH]:
            world.runtime.end_request(RequestId(name))
            del requests[name]


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("streams", ["one stream", "stream per ubatch", "alternating streams"])
def test_random_mixes_in_two_ubatches_compress_the_rows_of_the_definition(block_size: int, streams: str) -> None:
    world = World(block_size, block_size=block_size)
    if streams == "one stream":
        world.streams = [torch.npu.current_stream()] * 2
    random_load(world, random.Random(block_size), 9, alternate=streams == "alternating streams")
    if streams == "one stream":
        assert world.runtime.arena.counters.waits == 0
    assert world.compared > 1000
    assert world.different == 0


def test_without_touches_the_same_load_differs() -> None:
    world = World(5, ordered=False)
    random_load(world, random.Random(5), 6, first_is_late=True)
    assert world.different > 0


@pytest.mark.parametrize("drafts", [1, 4, 9])
def test_every_accept_length_goes_on_with_the_right_rows(drafts: int) -> None:
    for prompt, block_size in ((61, 128), (126, 32), (255, 64)):
        world = World(drafts, block_size=block_size, drafts=drafts)
        requests = {"r": world.request()}
        rid = RequestId("r")
        for accepted in range(drafts + 1):
            world.forward(requests, [RequestChunk(rid, 0, prompt)])
            end = prompt + 1 + drafts
            # Rejected drafts were other tokens than those that follow in the end.
            wrong = replace(requests["r"], x=requests["r"].x.clone())
            wrong.x[prompt + 1 + accepted : end] += 1
            before = world.different
            world.forward({"r": wrong}, [RequestChunk(rid, prompt, end, drafts)])
            world.different = before  # rows of rejected drafts are nobody's
            position = prompt + 1 + accepted
            world.forward(requests, [RequestChunk(rid, position, position + 150)])
            assert world.different == 0, (prompt, block_size, accepted)
            world.runtime.end_request(rid)


def test_decode_and_prefill_as_two_launches_take_their_own_rows() -> None:
    world = World(1)
    requests = {name: world.request() for name in "abc"}
    chunks = [RequestChunk(RequestId(n), 0, e) for n, e in zip("abc", (130, 260, 77), strict=True)]
    world.forward(requests, chunks)
    chunks = [RequestChunk(RequestId(n), s, e) for n, s, e in (("a", 130, 131), ("b", 260, 261), ("c", 77, 400))]
    world.forward(requests, chunks, decodes=2)
    assert world.different == 0


def test_a_cut_request_whose_first_part_is_one_of_two_launches_is_followed_after_both() -> None:
    world = World(2)
    requests = {name: world.request() for name in "ab"}
    world.forward(requests, [RequestChunk(RequestId("a"), 0, 10)])
    chunks = [RequestChunk(RequestId("a"), 10, 11), RequestChunk(RequestId("b"), 0, 400)]
    world.forward(requests, chunks, decodes=1, cut_tokens=201)
    assert world.different == 0


def test_an_execution_without_requests_leases_nothing_and_queues_nothing() -> None:
    world = World(3)
    before = vars(world.runtime.arena.counters).copy()
    with world.runtime.begin([]) as execution:
        out = world.launch(execution, {}, (), 0, CompressorKind.C4, slice(0, 0))
    assert out.shape == (0, 512)
    assert vars(world.runtime.arena.counters) == before


def test_a_forward_without_an_execution_changes_no_page() -> None:
    world = World(4)
    requests = {"r": world.request()}
    world.forward(requests, [RequestChunk(RequestId("r"), 0, 200)])
    for (layer, kind), weights in world.on_device.items():
        before = world.runtime.pools[kind].cpu()
        table, starts = world.runtime.idle(kind, 2)
        rows = min(64, 64 // kind.ratio + 2)
        torch.ops._C_ascend.compressor(
            torch.randn(64, HIDDEN).bfloat16().npu(),
            weights.wkv,
            weights.wgate,
            world.runtime.pools[kind],
            weights.ape,
            weights.norm_weight,
            world.sin[:rows].npu(),
            world.cos[:rows].npu(),
            state_block_table=table,
            cu_seqlens=torch.tensor([0, 30, 64], dtype=torch.int32).npu(),
            seqused=None,
            start_pos=starts,
            rope_head_dim=64,
            cmp_ratio=kind.ratio,
            coff=kind.coff,
            norm_eps=1e-6,
            rotary_mode=2,
            cache_mode=1,
        )
        torch.npu.synchronize()
        after = world.runtime.pools[kind].cpu()
        assert torch.equal(before.view(torch.int32), after.view(torch.int32)), layer


def requested_bytes() -> int:
    """Device bytes that were asked for; what is handed out for them depends on what others have left free."""
    torch.npu.init()  # before that there are no figures
    return torch.npu.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize(("slots", "drafts", "block_size"), [(1, 0, 128), (2, 0, 64), (3, 5, 32)])
def test_allocated_bytes_are_the_sized_bytes(slots: int, drafts: int, block_size: int) -> None:
    layout = page_layout("vllm-ascend-0.23.0", block_size)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 500, "slots": slots, "drafts": drafts}
    before = requested_bytes()
    runtime = StockRuntime(LAYERS, layout, device="npu", **limits)
    sizes = size_workspace(LAYERS, layout, **limits)
    assert measure(runtime, slots) == planned(sizes)
    assert requested_bytes() - before == sizes.device_bytes


def test_spares_and_staging_do_not_depend_on_layers_nor_anything_but_tables_on_the_chunk() -> None:
    layout = page_layout("vllm-ascend-0.23.0", 128)
    scaled, wrong = scale(LAYERS, layout, torch.device("npu"), max_num_seqs=2, tokens=1000, slots=2)
    assert wrong == []
    by_layers = [entry.tails for entry in scaled if entry.what == "layers"]
    null_pages = 8 * (2048 + 512) * 4 + 32 * 1024 * 4
    assert [tails - null_pages for tails in by_layers] == [(by_layers[0] - null_pages) * n for n in (1, 2, 4)]
    assert len({entry.tables for entry in scaled if entry.what == "chunk"}) == 3


def test_the_peak_of_a_forward_does_not_depend_on_the_layers() -> None:
    layout = page_layout("vllm-ascend-0.23.0", 128)
    found, wrong = scale_forward(LAYERS, layout, torch.device("npu"), batch=Batch.of(1024), slots=2, seed=1)
    assert wrong == []
    assert [entry.transient > 0 for entry in found] == [True] * 3
    grown = [*found[:2], replace(found[2], transient=found[2].transient + 512)]
    assert broken_laws(grown, "layers of a forward", ("transient",)) == [
        f"transient bytes depend on the layers of a forward: {[found[0].transient, found[0].transient + 512]}"
    ]


@pytest.mark.parametrize("rule", list(SABOTAGES), ids=lambda rule: rule.name)
def test_a_launch_with_a_broken_rule_gives_other_rows(rule) -> None:
    world = World(6, cls=SabotagedRuntime)
    world.runtime.sabotage = SABOTAGES[rule]
    requests = {"r": world.request()}
    world.forward(requests, [RequestChunk(RequestId("r"), 0, 203)])
    world.forward(requests, [RequestChunk(RequestId("r"), 203, 420)])
    world.forward(requests, [RequestChunk(RequestId("r"), 420, 500)])
    assert world.different > 0


def test_refused_plans_give_their_slot_back() -> None:
    world = World(7)
    world.forward({"a": world.request()}, [RequestChunk(RequestId("a"), 0, 5)])
    for chunks, error in (
        ([RequestChunk(RequestId("a"), 7, 9)], UnknownPosition),
        ([RequestChunk(RequestId(n), 0, 5) for n in "wxyz"], TailFull),
    ):
        for _ in range(3):
            with pytest.raises(error):
                world.runtime.begin(chunks)
    first = world.runtime.begin([RequestChunk(RequestId("a"), 5, 9)])
    second = world.runtime.begin([RequestChunk(RequestId("b"), 0, 9)])
    with pytest.raises(Exhausted):
        world.runtime.begin([RequestChunk(RequestId("c"), 0, 9)])
    first.finish()
    second.finish()


def test_a_request_whose_execution_broke_off_is_failed_by_name_and_can_start_anew() -> None:
    world = World(10)
    requests = {name: world.request() for name in "ab"}
    chunk = RequestChunk(RequestId("a"), 0, 9)

    def break_off() -> None:
        with world.runtime.begin([chunk]) as execution:
            world.launch(execution, requests, (chunk,), 0, CompressorKind.C4, slice(0, 1))
            raise KeyError("the layer above failed")

    with pytest.raises(KeyError):
        break_off()
    with pytest.raises(
        TailVoid, match=r"'a' lost its tail: generation .* 4 of 5 launches missing, first layer 0 c4_ind"
    ):
        world.runtime.begin([RequestChunk(RequestId("a"), 9, 12)])
    world.forward(requests, [RequestChunk(RequestId("b"), 0, 300)])
    world.runtime.end_request(RequestId("a"))
    world.forward(requests, [RequestChunk(RequestId("a"), 0, 300)])
    assert world.different == 0


def test_a_refused_last_launch_voids_the_tail_like_any_other() -> None:
    world = World(11)
    requests = {"a": world.request()}
    chunk = RequestChunk(RequestId("a"), 0, 9)
    execution = world.runtime.begin([chunk])
    for compressor in LAYERS.compressors[:-1]:
        world.launch(execution, requests, (chunk,), compressor.layer, compressor.kind, slice(0, 1))
    last = LAYERS.compressors[-1]
    world.on_device[last.layer, last.kind] = replace(world.on_device[last.layer, last.kind], rope_head_dim=32)
    with pytest.raises(RuntimeError):
        world.launch(execution, requests, (chunk,), last.layer, last.kind, slice(0, 1))
    execution.finish()
    with pytest.raises(TailVoid, match="1 of 5 launches missing, first layer 2 c4_indexer"):
        world.runtime.begin([RequestChunk(RequestId("a"), 9, 12)])


def test_an_upload_that_fails_voids_the_tails_that_were_planned() -> None:
    class Broken(StockRuntime):
        def _upload(self, lease, lists, host, stream):
            if self.arena.counters.leases == 2:
                raise MemoryError("no pinned memory")
            super()._upload(lease, lists, host, stream)

    world = World(12, cls=Broken)
    requests = {"a": world.request()}
    world.forward(requests, [RequestChunk(RequestId("a"), 0, 9)])
    with pytest.raises(MemoryError):
        world.runtime.begin([RequestChunk(RequestId("a"), 9, 12)])
    with pytest.raises(TailVoid, match="failed to begin: no pinned memory"):
        world.runtime.begin([RequestChunk(RequestId("a"), 12, 13)])
    world.runtime.end_request(RequestId("a"))
    world.forward(requests, [RequestChunk(RequestId("a"), 0, 300)])
    assert world.different == 0


def test_more_tokens_or_idle_requests_than_sized_for_are_refused() -> None:
    world = World(13)
    with pytest.raises(
        ValueError, match=f"an execution of {3 * LENGTH + 1} tokens in a runtime sized for {3 * LENGTH}"
    ):
        world.runtime.begin([RequestChunk(RequestId("a"), 0, 3 * LENGTH + 1)])
    with pytest.raises(ValueError, match="4 idle requests in a runtime for 3"):
        world.runtime.idle(CompressorKind.C4, 4)


def test_a_refused_batch_leaves_its_healthy_requests_alone() -> None:
    """A new request would need the seat of one whose execution is still open."""
    world = World(17)
    requests = {name: world.request() for name in "abcd"}
    chunks = [RequestChunk(RequestId(name), 0, 9) for name in "acb"]
    world.forward(requests, chunks)
    open_one = world.runtime.begin([RequestChunk(RequestId("b"), 9, 20)])
    world.runtime.end_request(RequestId("b"))
    with pytest.raises(TailFull, match="1 more behind open executions"):
        world.runtime.begin([RequestChunk(RequestId("a"), 9, 30), RequestChunk(RequestId("d"), 0, 9)])
    open_one.finish()  # breaks off; its requests are nobody's any more
    world.forward(requests, [RequestChunk(RequestId("a"), 9, 300), RequestChunk(RequestId("d"), 0, 300)])
    assert world.different == 0


def test_an_execution_that_breaks_off_does_not_void_a_request_that_took_the_name_since() -> None:
    world = World(18)
    requests = {"a": world.request()}
    old = world.runtime.begin([RequestChunk(RequestId("a"), 0, 9)])
    world.runtime.end_request(RequestId("a"))
    world.forward(requests, [RequestChunk(RequestId("a"), 0, 40)])
    old.finish()
    world.forward(requests, [RequestChunk(RequestId("a"), 40, 300)])
    assert world.different == 0


def test_the_one_host_wait_does_not_keep_other_threads_from_launching() -> None:
    world = World(19)
    runtime, free = world.runtime, []

    class Watched(StagingRing):
        def take(self):
            def try_lock() -> None:
                free.append(runtime.arena.lock.acquire(timeout=5))
                runtime.arena.lock.release()

            other = threading.Thread(target=try_lock)
            other.start()
            other.join()
            return super().take()

    runtime.staging = Watched(runtime.arena.events, runtime.staging.entries)
    world.forward({"a": world.request()}, [RequestChunk(RequestId("a"), 0, 9)])
    assert free == [True]


def test_a_stepped_slice_of_requests_is_refused() -> None:
    world = World(20)
    requests = {name: world.request() for name in "ab"}
    chunks = [RequestChunk(RequestId(name), 0, 9) for name in "ab"]
    with world.runtime.begin(chunks) as execution, pytest.raises(ValueError, match="must be neighbours, got step 2"):
        world.launch(execution, requests, chunks[:1], 0, CompressorKind.C4, slice(0, 2, 2))


def test_layers_out_of_order_are_refused() -> None:
    world = World(14)
    requests = {"a": world.request()}
    chunk = RequestChunk(RequestId("a"), 0, 9)
    execution = world.runtime.begin([chunk])
    world.launch(execution, requests, (chunk,), 2, CompressorKind.C4, slice(0, 1))
    with pytest.raises(OrderError, match="c4 of layer 0 after layer 2; launch layers in order"):
        world.launch(execution, requests, (chunk,), 0, CompressorKind.C4, slice(0, 1))
    world.on_device[1, CompressorKind.C4] = world.on_device[0, CompressorKind.C4]
    with pytest.raises(ValueError, match=r"layer 1 has no c4 compressor; it is in \[0, 2\]"):
        world.launch(execution, requests, (chunk,), 1, CompressorKind.C4, slice(0, 1))
    execution.finish()


def test_requests_launched_twice_are_refused() -> None:
    world = World(15)
    requests = {name: world.request() for name in "abc"}
    chunks = [RequestChunk(RequestId(name), 0, 9) for name in "abc"]
    execution = world.runtime.begin(chunks)
    world.launch(execution, requests, chunks[1:2], 0, CompressorKind.C4, slice(1, 2))
    for rows in (slice(1, 2), slice(0, 2), slice(1, 3)):
        with pytest.raises(OrderError, match=f"requests {rows.start} to {rows.stop - 1}, and 1 to 1 are launched"):
            world.launch(execution, requests, chunks[rows], 0, CompressorKind.C4, rows)
    with pytest.raises(ValueError, match="18 tokens for 1 requests that have 9"):
        world.launch(execution, requests, chunks[:2], 0, CompressorKind.C4, slice(2, 3))
    execution.finish()


def test_a_request_left_out_between_two_launches_loses_its_tail() -> None:
    world = World(15)
    requests = {name: world.request() for name in "abc"}
    chunks = [RequestChunk(RequestId(name), 0, 9) for name in "abc"]
    with world.runtime.begin(chunks) as execution:
        for compressor in world.geometry.compressors:
            for rows in (slice(2, 3), slice(0, 1)):
                world.launch(execution, requests, chunks[rows], compressor.layer, compressor.kind, rows)
    with pytest.raises(TailVoid, match=r"request 'b' lost its tail: .* 5 of 5 launches missing"):
        world.runtime.begin([RequestChunk(RequestId("b"), 9, 10)])


def test_prefill_launched_before_decode_gives_the_same_rows() -> None:
    """The order of vllm-ascend 0.23 (attention/dsa_v1.py:AscendDSAImpl.forward)."""
    world = World(16)
    requests = {name: world.request() for name in "abc"}
    world.forward(requests, [RequestChunk(RequestId(name), 0, end) for name, end in (("a", 126), ("b", 61))])
    start = {"a": 126, "b": 61, "c": 0}
    for tokens in ({"a": 1, "b": 1, "c": 130}, {"a": 2, "b": 3, "c": 7}, {"a": 1, "b": 64, "c": 200}):
        chunks = [RequestChunk(RequestId(name), start[name], start[name] + n) for name, n in tokens.items()]
        world.forward(requests, chunks, decodes=2, prefill_first=True)
        start = {name: start[name] + n for name, n in tokens.items()}
    assert world.different == 0
    assert world.compared > 0


@pytest.mark.parametrize("entries", [1, 2, 3])
def test_a_staging_entry_is_rewritten_only_behind_its_copy_and_waits_are_counted(entries: int) -> None:
    assert staged(entries, ordered=True) == (list(range(8)), 8 - entries)


def test_staging_rewritten_without_the_ring_sends_other_values() -> None:
    """Negative control."""
    assert staged(2, ordered=False)[0] != list(range(8))


class HeldEvent:
    """An event of a stream that hangs until the host waits for it: the copy is never over before, and always then."""

    def __init__(self) -> None:
        self._event = torch.npu.Event()
        self._stream: torch.npu.Stream | None = None

    def record(self, stream: torch.npu.Stream) -> None:
        self._stream = stream
        self._event.record(stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        softnpu.release_stream(self._stream)
        self._event.synchronize()


class HoldingDevice(TorchDevice):
    def event(self) -> HeldEvent:
        return HeldEvent()


def staged(entries: int, *, ordered: bool) -> tuple[list[int], int]:
    """Eight values through the ring, each copy held back; what arrived, and how often the host waited."""
    buffers = [torch.zeros(1, dtype=torch.int32).pin_memory() for _ in range(entries)]
    arrived = torch.zeros(8, dtype=torch.int32, device="npu")
    streams = [torch.npu.Stream() for _ in range(8)]  # one a copy, so that each can be held back alone
    ring: StagingRing = StagingRing(EventSource(HoldingDevice("npu")), buffers)
    torch.npu.synchronize()
    try:
        for value, stream in enumerate(streams):
            index, buffer = ring.take() if ordered else (value % entries, buffers[value % entries])
            buffer.numpy()[0] = value
            softnpu.hang_stream(stream)
            with torch.npu.stream(stream):
                arrived[value : value + 1].copy_(buffer, non_blocking=True)
            ring.copied(index, stream)
    finally:
        for stream in streams:
            softnpu.release_stream(stream)
    torch.npu.synchronize()
    return arrived.tolist(), ring.host_waits


def test_a_launch_after_finish_is_an_error() -> None:
    world = World(8)
    requests = {"r": world.request()}
    chunk = RequestChunk(RequestId("r"), 0, 9)
    execution = world.runtime.begin([chunk])
    execution.finish()
    with pytest.raises(OrderError, match="after it was sealed"):
        world.launch(execution, requests, (chunk,), 0, CompressorKind.C4, slice(0, 1))


def test_a_request_in_a_reused_row_follows_the_last_lease_of_its_predecessor() -> None:
    """Row and pages go to the next request at once; only the order of the streams keeps them apart."""
    softnpu.set_schedule(11, 3000)
    try:
        world = World(9)
        requests = {name: world.request() for name in "abcdef"}
        for index, name in enumerate(requests):
            world.streams.reverse()
            chunk = RequestChunk(RequestId(name), 0, 300 + 33 * index)
            world.forward(requests, [chunk])
            world.runtime.end_request(chunk.request)
    finally:
        softnpu.set_schedule(0)
    assert world.different == 0
