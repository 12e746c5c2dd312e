# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The afd executor on the software NPU: our kernels, emulated, against the definition and against the stock executor.

Both executors get the same loads. Every compressed row is compared bit for bit with the definition, and every tail of
one with that of the other.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from afd_dsv4.compressor import afd, tails
from afd_dsv4.compressor.afd import AfdRuntime, BadTables
from afd_dsv4.compressor.kernels import Kernels
from afd_dsv4.compressor.library import KERNELS, Library
from afd_dsv4.compressor.stock import StockExecution, StockRuntime
from afd_dsv4.execution.boundary import Boundary, BoundaryViolation
from afd_dsv4.geometry import CompressorKind, ModelGeometry
from afd_dsv4.softnpu import runtime as softnpu
from afd_dsv4.tail import checkpoint
from afd_dsv4.tail.store import TailVoid
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.order import check
from tests.integration.test_stock_graphs import Graph, Load
from tests.stock_world import LENGTH, Request, World, small_hidden_size

__all__ = ["small_hidden_size"]  # a fixture

pytestmark = pytest.mark.npu

WHOLE = 1 << 20
#: Smaller than most batches here, so that most launches are cut; and whole chunks.
PHASES = {"tiles": 128, "whole chunks": WHOLE}


def runtime_class(tile_tokens: int) -> Any:
    return partial(AfdRuntime, tile_tokens=tile_tokens)


def chunk(name: str, start: int, end: int, drafts: int = 0) -> RequestChunk:
    return RequestChunk(RequestId(name), start, end, drafts)


class Pair:
    """The same load on the stock executor and on ours.

    Args:
        seed: of weights, tokens and batches.
        tile_tokens: of ours.
        limits: of both runtimes.
    """

    def __init__(self, seed: int, tile_tokens: int, **limits: Any) -> None:
        self.worlds = [World(seed, **limits), World(seed, cls=runtime_class(tile_tokens), **limits)]
        self.requests: dict[str, Request] = {}

    def forward(self, chunks: list[RequestChunk], **how: Any) -> None:
        for world in self.worlds:
            world.forward(self.requests, chunks, **how)
        self.check(chunks)

    def check(self, chunks: list[RequestChunk]) -> None:
        """No row differs from the definition, and the tails are the same."""
        assert [world.different for world in self.worlds] == [0, 0]
        for name in {chunk.request for chunk in chunks}:
            stock, ours = (rows_of(world.runtime, name) for world in self.worlds)
            assert stock.keys() == ours.keys()
            for kind, rows in stock.items():
                assert np.array_equal(rows.view(np.int32), ours[kind].view(np.int32)), (name, kind)

    def end(self, name: str) -> None:
        for world in self.worlds:
            world.runtime.end_request(RequestId(name))
        del self.requests[name]


def rows_of(runtime: StockRuntime, request: RequestId) -> dict[CompressorKind, np.ndarray]:
    """The rows of a tail, all layers, as a checkpoint has them."""
    _, low, high, _ = runtime.store.hold(request)
    data = tails.save(runtime, request)
    return dict(checkpoint.decode(data, runtime.geometry, position=low, drafts=high - low).rows)


@pytest.mark.parametrize(("phase", "block_size"), [("tiles", 32), ("tiles", 128), ("whole chunks", 64)])
def test_mixed_batches_give_the_rows_of_the_definition_and_the_tails_of_the_stock_executor(
    phase: str, block_size: int
) -> None:
    pair, rng, names = Pair(1, PHASES[phase], block_size=block_size), random.Random(block_size), iter("abcdefghijkl")
    for step in range(5):
        while len(pair.requests) < 3:
            name = next(names)
            pair.requests[name] = pair.worlds[0].request()
        chunks = []
        for name, request in pair.requests.items():
            tokens = min(rng.choice([1, 3, 4, 5, 127, 128, 129, 300]), LENGTH - request.position)
            chunks.append(chunk(name, request.position, request.position + tokens))
            request.position += tokens
        tokens = sum(each.tokens for each in chunks)
        pair.forward(chunks, alternate=step % 2 == 1, cut_tokens=rng.randint(0, tokens) if step % 3 else tokens)
        for name in [name for name, request in pair.requests.items() if request.position == LENGTH]:
            pair.end(name)
    assert pair.worlds[1].compared == pair.worlds[0].compared > 500


@pytest.mark.parametrize(("phase", "drafts"), [("tiles", 3), ("whole chunks", 1)])
def test_every_accept_length_goes_on_with_the_right_rows(phase: str, drafts: int) -> None:
    pair = Pair(drafts, PHASES[phase], drafts=drafts)
    for prompt in (61, 126):
        pair.requests["r"] = right = pair.worlds[0].request()
        for accepted in range(drafts + 1):
            pair.forward([chunk("r", 0, prompt)])
            end = prompt + 1 + drafts
            # Rejected drafts were other tokens than those that follow in the end.
            wrong = replace(right, x=right.x.clone())
            wrong.x[prompt + 1 + accepted : end] += 1
            for world in pair.worlds:
                world.forward({"r": wrong}, [chunk("r", prompt, end, drafts)])
                world.different = 0  # rows of rejected drafts are nobody's
            position = prompt + 1 + accepted
            pair.forward([chunk("r", position, position + 150)])
            for world in pair.worlds:
                world.runtime.end_request(RequestId("r"))


@pytest.mark.parametrize("phase", PHASES)
def test_decode_and_prefill_as_two_launches_share_staging_rows_one_after_the_other(phase: str) -> None:
    pair = Pair(1, PHASES[phase])
    pair.requests = {name: pair.worlds[0].request() for name in "abc"}
    pair.forward([chunk("a", 0, 130), chunk("b", 0, 260), chunk("c", 0, 77)])
    pair.forward([chunk("a", 130, 131), chunk("b", 260, 261), chunk("c", 77, 400)], decodes=2, prefill_first=True)


def test_a_checkpoint_of_one_executor_is_restored_by_the_other() -> None:
    pair = Pair(3, 128)
    pair.requests = {"a": pair.worlds[0].request()}
    pair.forward([chunk("a", 0, 203)])
    for source, target in (pair.worlds, pair.worlds[::-1]):
        data = tails.save(source.runtime, RequestId("a"))
        target.runtime.end_request(RequestId("a"))
        tails.restore(target.runtime, RequestId("a"), data, 203)
    pair.forward([chunk("a", 203, 460)])


@pytest.mark.parametrize("seed", [0, 1])
def test_replays_of_a_graph_with_other_metadata_and_drafts_go_on_from_eager_forwards(seed: int) -> None:
    drafts = 2
    world = World(0, graphs=[("verify",)], drafts=drafts, cls=runtime_class(128))
    load = Load(world)
    softnpu.set_schedule(seed, 300)
    try:
        load.prompts()
        graph = Graph(world, "verify", [1 + drafts] * 3, side=world.streams[1]).capture()
        for step, accepted in enumerate((0, 2, 1, 2, 0)):
            chunks = load.chunks(dict.fromkeys("abc" if step % 2 else "ca", 1 + drafts), drafts)
            graph.replay(load.requests, chunks, pad="without tokens", stream=world.streams[0])
            world.check_all(load.requests)
            for each in chunks:
                load.requests[each.request].position = each.start + 1 + accepted
        load.eager({"a": 130, "b": 7, "c": 200}, cut_tokens=100, alternate=True)
        load.check()
    finally:
        softnpu.set_schedule(0)


def test_a_graph_that_no_tile_holds_is_refused() -> None:
    world = World(0, graphs=[("large",)], cls=runtime_class(128))
    with pytest.raises(ValueError, match="a graph of 129 tokens is one tile, and tiles hold 128; capture a smaller"):
        Graph(world, "large", [43] * 3).capture()


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Launches within do not look at what their kernels report."""
    kernels = Kernels(softnpu.library_dir() / KERNELS)
    kernels.set("faults", 0)
    try:
        yield
    finally:
        torch.npu.synchronize()
        kernels.set("faults", 1)


def overwrite_pages(runtime: StockRuntime, execution: StockExecution, ratio: int) -> None:
    """Name pages that are not there for one ratio in its last layer, before the launches."""
    assert execution.lease is not None
    part = runtime.lists[execution.lease.slot.index].parts[ratio]
    places, layers = execution.lists[ratio].columns.size, runtime.shapes[ratio].layers
    part.ids[(layers - 1) * places : layers * places] = 10**6


def forward_with_a_bad_page(world: World, requests: dict[str, Request], chunks: list[RequestChunk], ratio: int) -> None:
    """A forward whose pages are overwritten."""
    execution = world.runtime.begin(chunks)
    overwrite_pages(world.runtime, execution, ratio)
    for compressor in world.geometry.compressors:
        world.step(execution, requests, chunks, compressor, world.streams[0])
    execution.finish()
    world.pending = []  # nobody's rows


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_bad_table_is_told_by_name_at_a_later_begin_and_its_tails_are_void(ratio: int) -> None:
    world = World(11, cls=runtime_class(128))
    runtime, requests = world.runtime, {name: world.request() for name in "ab"}
    with as_on_a_device():
        world.forward(requests, [chunk("a", 0, 130), chunk("b", 0, 7)])
        calls = torch.ops.softnpu.calls()[1]
        forward_with_a_bad_page(world, requests, [chunk("a", 130, 300)], ratio)
        assert torch.ops.softnpu.calls()[1] == calls  # nobody has waited
        torch.npu.synchronize()
        told = (
            r"kernels found bad tables on the device: .*: state table of request 0: position \d+ .* in page 1000000, "
        )
        for _ in range(2):  # and ever after
            with pytest.raises(BadTables, match=told):
                runtime.begin([chunk("b", 7, 8)])
        assert runtime.open_of(runtime.mint()) == ()
        with pytest.raises(TailVoid, match=told):
            runtime.store.refuse_void([chunk("a", 300, 301)])
        runtime.store.refuse_void([chunk("b", 7, 8)])  # not of that execution


def test_a_bad_table_is_told_also_where_a_slot_is_never_idle_and_nothing_gathers_on_the_host() -> None:
    """As replays under asynchronous scheduling: one slot, and each step begins before the last one is over."""
    world = World(13, cls=runtime_class(128), slots=1)
    runtime, requests = world.runtime, {"a": world.request()}

    def queue(step: int) -> None:
        stream, other = world.streams[step % 2], world.streams[1 - step % 2]
        chunks = [chunk("a", 4 * step, 4 * step + 4)]
        softnpu.hang_stream(stream)
        with torch.npu.stream(stream):
            execution = runtime.begin(chunks)
            if step == 4:
                overwrite_pages(runtime, execution, 4)
        for compressor in world.geometry.compressors:
            world.step(execution, requests, chunks, compressor, stream)
        with torch.npu.stream(stream):
            execution.finish()
        softnpu.release_stream(other)
        other.synchronize()  # all but this step is over
        assert sum(map(len, runtime._unseen)) <= 2

    with as_on_a_device():
        try:
            for step in range(6):
                queue(step)
            with pytest.raises(BadTables, match="in page 1000000, "):  # the first step that can know of the fifth
                queue(6)
        finally:
            for stream in world.streams:
                softnpu.release_stream(stream)


def test_a_bad_table_of_the_last_forward_is_in_the_log_when_the_runtime_is_closed(caplog: Any) -> None:
    world = World(12, cls=runtime_class(128))
    requests = {"a": world.request()}
    with as_on_a_device():
        forward_with_a_bad_page(world, requests, [chunk("a", 0, 60)], 4)
        assert caplog.text == ""
        assert world.runtime.close(drain_s=60.0) == ()
    assert "kernels found bad tables on the device: tail_update: state table of request 0" in caplog.text


@contextlib.contextmanager
def races() -> Iterator[list[softnpu.Race]]:
    """Races that were found within; filled in at the end."""
    found: list[softnpu.Race] = []
    softnpu.set_race_detection(True)
    try:
        yield found
        found += softnpu.races()
    finally:
        softnpu.set_race_detection(False)
        softnpu.clear_races()


@pytest.mark.parametrize("ordered", [True, False])
def test_launches_on_two_streams_take_turns_with_staging_rows_and_without_touches_both_judges_see_it(
    ordered: bool,
) -> None:
    world = World(4, cls=runtime_class(128), ordered=ordered)
    requests = {"a": world.request()}
    with races() as found:
        world.queue(requests, [chunk("a", 0, 300)], alternate=True)
        # Where nothing orders them, kernels may find other rows where they keep their faults.
        with contextlib.suppress(RuntimeError if not ordered else ()):
            torch.npu.synchronize()
    violations = check(world.runtime.trace.records(), world.runtime.trace.dropped).violations
    assert bool(violations) != ordered
    assert bool(found) != ordered, found
    if not ordered:
        assert any("staging rows of c4" in str(violation) for violation in violations)
        names = {site.operator for race in found for site in (race.first, race.second)}
        assert {"afd_dsv4::project", "afd_dsv4::compress", "afd_dsv4::tail_update"} <= names


def test_a_forward_without_an_execution_gets_zeros_and_changes_nothing() -> None:
    world = World(5, cls=runtime_class(128))
    runtime, request = world.runtime, world.request()
    world.forward({"a": request}, [chunk("a", 0, 200)])
    before = {kind: pool.cpu() for kind, pool in runtime.pools.items()}
    counters = vars(runtime.arena.counters).copy()
    for kind in CompressorKind:
        x, cos, sin, lengths = world.arguments({"a": request}, [chunk("a", 0, 300)], kind)
        with Queued() as seen:
            out = runtime.compress_idle(kind, x, world.on_device[0 if kind.overlap else 1, kind], cos, sin, lengths)
        assert [name for name in seen.names if name.startswith("afd_dsv4")] == ["afd_dsv4.project.default"]
        assert out.shape == (cos.shape[0], 128 if kind is CompressorKind.C4_INDEXER else 512)
        assert not out.cpu().any()
        assert torch.equal(runtime.pools[kind].cpu().view(torch.int32), before[kind].view(torch.int32))
    assert vars(runtime.arena.counters) == counters
    with pytest.raises(ValueError, match="4 idle requests in a runtime for 3"):
        runtime.compress_idle(kind, x, world.on_device[1, kind], cos, sin, torch.zeros(5, dtype=torch.int32).npu())


class Queued(TorchDispatchMode):
    """Operators that are called within, by name, with whether they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(isinstance(value, torch.Tensor) and value.is_meta for value in args):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def queued(world: World, tokens: int, kind: CompressorKind) -> list[str]:
    """What one launch of a fresh request queues, but for views."""
    requests = {"a": world.request()}
    part = [chunk("a", 0, tokens)]
    arguments = world.arguments(requests, part, kind)
    layer = 1 if kind is CompressorKind.C128 else 0
    runtime = world.runtime
    execution = runtime.begin(part)
    try:
        for each in world.geometry.compressors:
            if each.layer == layer and each.kind is not kind:
                world.launch(execution, requests, part, layer, each.kind, slice(0, 1))
        with Queued() as seen:
            execution.compress(layer, kind, arguments[0], world.on_device[layer, kind], *arguments[1:], slice(0, 1))
    finally:
        execution.finish()
        runtime.end_request(RequestId("a"))
        torch.npu.synchronize()
    views = ("aten.slice", "aten.split", "aten.detach", "aten.view", "aten._unsafe_view")
    return [name for name in seen.names if not name.startswith(views)]


@pytest.mark.parametrize(("kind", "carries"), [(CompressorKind.C4, 1), (CompressorKind.C128, 0)])
def test_a_launch_queues_the_same_few_operators_for_every_tile_and_never_waits(
    kind: CompressorKind, carries: int
) -> None:
    world = World(6, cls=runtime_class(128))
    queued(world, 1, kind)  # streams, events and kernels are there from now on
    waits, staging = torch.ops.softnpu.calls()[1], world.runtime.staging.host_waits
    addresses = [area.data_ptr() for slot in world.runtime.areas for area in slot.values()]
    tile = ["afd_dsv4.project.default", "afd_dsv4.compress.default", "afd_dsv4.tail_update.default"]
    for tokens in (1, 128, 256, 500):
        names = queued(world, tokens, kind)
        tiles = -(-tokens // 128)
        ours = [name for name in names if name.startswith("afd_dsv4")]
        assert ours == tile * tiles
        assert names.count("aten.copy_.default") == carries * (tiles - 1)
        others = {name for name in names if name not in tile}
        assert others <= {"aten._to_copy.default", "aten.copy_.default", "aten.new_empty.default", "aten.scatter_.src"}
        assert len(names) - len(ours) <= 4 + carries * (tiles - 1)
    assert (torch.ops.softnpu.calls()[1], world.runtime.staging.host_waits) == (waits, staging)
    assert addresses == [area.data_ptr() for slot in world.runtime.areas for area in slot.values()]


def test_staging_rows_are_counted_as_they_are_planned_and_a_runtime_with_other_memory_does_not_start() -> None:
    class Larger(AfdRuntime):
        def _make_areas(self, slots: int, drafts: int) -> Any:
            return [*super()._make_areas(slots, drafts), *super()._make_areas(1, drafts)]

    stock, ours = (World(7, cls=cls).runtime.allocated() for cls in (StockRuntime, runtime_class(128)))
    found = 2 * 2 * 8192  # of both areas of both slots
    assert replace(ours, rows=0, host=ours.host - 2 * found) == stock
    rows = 2 * (132 * (8192 + 2048)) + found
    assert (ours.rows, ours.device - stock.device) == (rows, rows)
    with pytest.raises(RuntimeError, match=r"allocated .*rows=4104192.* plans .*rows=2736128"):
        World(7, cls=partial(Larger, tile_tokens=128))


def test_a_model_that_the_kernels_have_not_is_refused_at_the_start_by_its_number() -> None:
    narrow = ModelGeometry("narrow", 32, 1, (4,), head_dim=256)
    with pytest.raises(RuntimeError, match=r"afd_dsv4::compress: .*256"):
        World(8, geometry=narrow, cls=runtime_class(128))


def test_every_kernel_runs_once_at_the_start_and_leaves_no_page_changed() -> None:
    pools: dict[CompressorKind, torch.Tensor] = {}

    class Watched(AfdRuntime):
        def _make_areas(self, slots: int, drafts: int) -> Any:
            pools.update((kind, pool.fill_(7).cpu()) for kind, pool in self.pools.items())
            return super()._make_areas(slots, drafts)

    with Queued() as seen:
        runtime = World(8, cls=partial(Watched, tile_tokens=128)).runtime
    each = ["afd_dsv4.project.default", "afd_dsv4.compress.default", "afd_dsv4.tail_update.default"]
    assert [name for name in seen.names if name in each] == each * 3
    assert all(torch.equal(pool.cpu(), pools[kind]) for kind, pool in runtime.pools.items())


def test_operators_of_another_back_end_than_is_written_beside_them_are_refused() -> None:
    library = afd.find({"AFD_DSV4_SOFTNPU_DIR": str(softnpu.library_dir())})
    assert afd.load(library.folder, "emulation").backend() == "emulation"
    with pytest.raises(RuntimeError, match="is of the back end 'emulation', and beside it stands 'twin'; build anew"):
        afd.load(library.folder, "twin")


def test_on_hardware_it_is_said_where_the_projection_takes_copies_and_nowhere_else(caplog: Any) -> None:
    library = afd.find({"AFD_DSV4_SOFTNPU_DIR": str(softnpu.library_dir())})

    class Hardware(Library):
        on_hardware = True  # of kernels that were compiled for it: there are none here

    class Lacking(AfdRuntime):
        product = "aten::_nested_get_values"

    hardware = Hardware(library.folder, library.backend)
    for cls, given in ((AfdRuntime, hardware), (Lacking, library), (Lacking, hardware)):
        assert caplog.text == ""
        World(8, cls=partial(cls, library=given))
    assert "has no aten::_nested_get_values, which multiplies bfloat16 into float32" in caplog.text


def test_staging_rows_that_are_handed_to_another_role_are_found_and_named() -> None:
    runtime = World(9, cls=runtime_class(128)).runtime
    rows = runtime.areas[1][CompressorKind.C4, CompressorKind.C128][4096:8192]
    with pytest.raises(BoundaryViolation, match=r"areas\[1\].*workspace slot 1, held by nobody"):
        Boundary(runtime).check("send", {"rows": rows})
