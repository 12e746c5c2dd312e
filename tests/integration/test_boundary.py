# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The boundary audit on the software NPU: what is of a workspace is found in whatever form it is handed over.

Payloads are of the protocol's own dataclasses: the double's, or with AFD_PLUGIN_PATH the commit's.
"""

from __future__ import annotations

import enum
import functools
import gc
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.launches import Launches
from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.compressor.stock import StockRuntime
from afd_dsv4.execution import boundary as audit
from afd_dsv4.execution.boundary import Boundary, BoundaryViolation, Region, owned_tensors
from afd_dsv4.geometry import CompressorKind
from afd_dsv4.tail.store import TailStore
from afd_dsv4.tail.tables import RequestChunk, RequestId
from tests.afd import protocol
from tests.boundary_plants import matrix, memory, payloads, planted_tensors
from tests.stock_world import LAYERS, World, small_hidden_size

__all__ = ["small_hidden_size"]  # a fixture

pytestmark = pytest.mark.npu

P = protocol.load()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(1, length=130)
    yield made
    made.runtime.arena.drain(10)
    made.runtime.close()


@pytest.fixture
def runtime(world: World) -> StockRuntime:
    return world.runtime


def refusal(boundary: Boundary, given: dict[str, object]) -> BoundaryViolation:
    with pytest.raises(BoundaryViolation) as error:
        boundary.check("Connector.send", given)
    return error.value


def test_every_planted_fault_is_caught_in_every_field_of_every_call(world: World) -> None:
    boundary = Boundary(world.runtime)
    with world.runtime.begin([RequestChunk(RequestId("planted"), 0, 5)]) as execution:
        plants = matrix(P, world.runtime, execution, execution.lease, execution.lists[4], world.runtime.store)
        missed = [plant for plant in plants if plant.caught(boundary) is None]
    world.runtime.end_request(RequestId("planted"))
    assert missed == []
    assert {plant.connector for plant in plants} == {"CAMAsyncAFDConnector", "CAMP2pAFDConnector"}
    states = {plant.field.rsplit(".", 1)[-1] for plant in plants if ".states." in plant.field}
    assert {"group_list", "dynamic_scales", "token_nums_rankid_layeridx", "atten_batch_size"} <= states
    for _, _, given in payloads(P, lambda: torch.ones(3, 4, device="npu")):
        boundary.check("as it should be", given)


def test_a_missed_fault_would_be_seen(runtime: StockRuntime) -> None:
    """The same matrix against the audit of another runtime, which has none of this memory."""
    other = Boundary(World(1, length=130).runtime)
    plants = matrix(P, runtime)
    assert all(plant.caught(other) is None for plant in plants)
    assert planted_tensors(P, runtime) == (len(plants), len(plants))


def test_the_error_names_call_field_memory_and_holder(world: World) -> None:
    runtime, boundary = world.runtime, Boundary(world.runtime)
    r = RequestId("r")
    with runtime.begin([RequestChunk(r, 0, 5)], ubatch=1) as execution:
        assert execution.lease is not None
        slot = execution.lease.slot.index
        violation = refusal(boundary, {"context": [runtime.tables[slot][4].rows[1:]]})
        assert str(violation).startswith("Connector.send: context[0] (torch.int32 ")
        assert f"tables[{slot}][4].flat, workspace slot {slot}, held by {execution.lease.execution}" in str(violation)
        page = int(runtime.store.tail(r, 4)[1][1, 0])
        found = refusal(boundary, {"x": runtime.pools[CompressorKind.C4_INDEXER][page, 1:]}).found
        assert (
            f"the pool of c4_indexer, page {page} (tail of request 'r', layer 1 of the pool; open executions: " in found
        )
        assert "ubatch 1" in found
    assert f"last held by {execution.lease.execution}" in refusal(boundary, {"x": runtime.lists[slot].flat}).found
    assert "what forwards without an execution get" in refusal(boundary, {"x": runtime.tables[-1][128].flat}).found
    assert "_idle_starts" in refusal(boundary, {"x": runtime._idle_starts}).found
    assert "staging.entries[1]" in refusal(boundary, {"x": runtime.staging.entries[1].flat}).found
    spare = refusal(boundary, {"x": runtime.pools[CompressorKind.C128][-1]}).found
    assert "spare of workspace slot" in spare
    assert "no execution is open" in spare
    runtime.end_request(r)


def test_equal_content_elsewhere_and_neighbouring_memory_are_let_through(runtime: StockRuntime) -> None:
    boundary = Boundary(runtime)
    for tensor in memory(runtime).values():
        boundary.check("Connector.send", {"x": tensor.clone(), "y": [tensor[:0].clone(), tensor.to("meta")]})
    whole = torch.zeros(300, device="npu")
    part = Boundary(None, {"states": whole[100:200]})  # the storage is one
    assert "states" in refusal(part, {"x": whole[:10]}).found
    for device, regions in boundary.regions.items():
        for region in regions:
            assert boundary.region_of(region.begin - 8, region.begin, device) is None
            assert boundary.region_of(region.begin - 8, region.begin + 1, device) is region
            assert boundary.region_of(region.end - 1, region.end + 8, device) is region
            after = boundary.region_of(region.end, region.end + 1, device)
            assert after is not region
            assert boundary.region_of(region.begin, region.end, torch.device("cuda:0")) is None


class Slotted:
    __slots__ = ("tensor",)


@dataclass(slots=True)
class WithSlots:
    tensor: object
    again: object = None


class Pair(NamedTuple):
    first: object
    second: object


def test_a_payload_of_any_shape_is_walked_and_the_path_is_what_one_would_write(runtime: StockRuntime) -> None:
    boundary, mine = Boundary(runtime), runtime.pools[CompressorKind.C128]
    for payload, field in (
        (mine, "p"),
        ([1, [mine]], "p[1][0]"),
        ({"a": (None, mine)}, "p['a'][1]"),
        ({3: mine}, "p[3]"),
        (OrderedDict(a=deque([mine])), "p['a'][0]"),
        (WithSlots("x", mine), "p.again"),
        (Pair(mine, 1), "p.first"),
        ({mine}, "p.item"),
        ({mine: 1}, "p.keys()"),
        (torch.nn.Parameter(mine), "p"),
        (runtime.staging.entries[0].flat.numpy()[3:5], "p"),
    ):
        assert refusal(boundary, {"p": payload}).field == field
    boundary.check("Connector.send", {"p": P.AFDTransferMetadata(0, 0, [1])})


class Told(list[Any]):
    """A list that shows nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Hidden(dict[str, Any]):
    """A dict that shows nothing."""

    def items(self) -> Any:
        return ()


class WithAttributes:
    """A base for payloads of other types."""

    more: Any


class Listed(WithAttributes, list[Any]): ...


class Mapped(WithAttributes, dict[str, Any]): ...


class Named(WithAttributes, Pair): ...


class Grouped(WithAttributes, set[Any]): ...


class Worded(WithAttributes, str): ...


class Arrayed(WithAttributes, np.ndarray[Any, Any]): ...


class Private(list[Any]):
    __slots__ = ("__more",)

    def __init__(self, more: object) -> None:
        self.__more = more


def test_what_hangs_on_a_container_a_value_or_a_tensor_is_found(
    runtime: StockRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    boundary, mine = Boundary(runtime), runtime.pools[CompressorKind.C128]
    pinned = runtime.staging.entries[0].flat.numpy()
    kinds = (Listed(), Mapped(), Named(1, 2), Grouped(), Worded("x"), np.zeros(3).view(Arrayed), OrderedDict())
    for payload in (*kinds, torch.zeros(1), Color.RED):
        monkeypatch.setattr(payload, "more", None, raising=False)
        boundary.check("Connector.send", {"p": payload})
        monkeypatch.setattr(payload, "more", [mine], raising=False)
        assert refusal(boundary, {"p": payload}).field == "p.more[0]"
    weight = torch.nn.Parameter(torch.zeros(mine.shape, device=mine.device))
    weight.grad = mine
    for payload, field in (
        (Told([mine]), "p[0]"),
        (Hidden(a=mine), "p['a']"),
        (Private(mine), "p._Private__more"),
        (defaultdict(lambda: mine), "p.default_factory"),
        (weight, "p.grad"),
        (pinned[:0], "p.base"),
        (np.broadcast_to(pinned[:1], (3, 0)), "p.base"),
    ):
        assert refusal(boundary, {"p": payload}).field == field
    boundary.check("Connector.send", {"p": [defaultdict(list), np.zeros(3)[:0], np.frombuffer(b"xy", np.uint8)]})


def test_an_array_reaches_from_its_first_byte_to_its_last_whichever_numpy_it_is(
    runtime: StockRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.zeros((2, 3, 4), np.int32)
    at = array.__array_interface__["data"][0]
    for part, begin, end in (
        (array, 0, 96),
        (array.T, 0, 96),
        (array[:, ::-1, 1], 4, 88),  # elements 1 to 21
        (array[::-1, 2, ::-2], 36, 96),  # elements 9 to 23
        (np.broadcast_to(array[1, 0, :1], (5, 7)), 48, 52),
    ):
        assert audit._bounds(part) == (at + begin, at + end)
    begin, end = audit._bounds(array[:, 2:2])
    assert begin == end
    monkeypatch.delattr(np.lib, "array_utils", raising=False)  # as before NumPy 2.0
    pinned = runtime.staging.entries[0].flat.numpy()
    assert refusal(Boundary(runtime), {"p": pinned[3:5][::-1]}).field == "p"


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_what_cannot_be_looked_into_is_named_and_refused(runtime: StockRuntime) -> None:
    boundary = Boundary(runtime)
    holder = Slotted()
    holder.tensor = runtime._idle_starts
    with FakeTensorMode():
        fake = torch.empty(3)
    for payload, name in (
        (holder, "Slotted"),
        (lambda: runtime, "function"),
        (memoryview(b"x"), "memoryview"),
        (iter([1]), "list_iterator"),
        (types.SimpleNamespace(x=1), "SimpleNamespace"),
        (torch.zeros(2).to_sparse(), "Tensor"),
        (fake, "without an address"),
        (np.array([runtime], dtype=object), "objects"),
        (np.zeros(1, "i4,f8")[0], "void"),  # it looks into an array
        (functools.partial(len, runtime), "partial"),
        (torch.nn.Parameter(torch.zeros(2))[1:], "graph of gradients"),
    ):
        violation = refusal(boundary, {"p": [payload]})
        assert violation.field == "p[0]"
        assert name in violation.found
    boundary.check("Connector.send", {"p": [None, 1, 1.5, "x", b"x", True, torch.int8, torch.device("npu"), Color.RED]})
    boundary.check("Connector.send", {"p": [np.int64(3), np.zeros(3), torch.Size([1]), int, {1, 2}]})


@dataclass
class Shared:
    """Its class may have anything."""

    held = None
    rows: int = 0


class SharedBelow(Shared): ...


class Twisted(torch.Tensor):
    """A tensor that tells of another one's memory."""

    elsewhere = torch.zeros(3)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.elsewhere.untyped_storage()

    def data_ptr(self) -> int:
        return self.elsewhere.data_ptr()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size([0])

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return {}

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        return cls.elsewhere


class MakesUp(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        return None


class WrongFields(Pair):
    _fields = ("one",)  # type: ignore[assignment]


class NoFields(Pair):
    _fields = None  # type: ignore[assignment]


class Unreadable(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError("planted")

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


def test_what_hangs_on_a_class_is_found_from_its_objects_and_from_the_class(
    runtime: StockRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    boundary, mine = Boundary(runtime), runtime.pools[CompressorKind.C128]
    payloads_ = (SharedBelow(), SharedBelow, Shared, Listed(), Color.RED)
    boundary.check("Connector.send", {"p": payloads_})
    for cls in (Shared, Listed, Color):
        monkeypatch.setattr(cls, "held", {"x": mine}, raising=False)
    for payload in payloads_:
        assert refusal(boundary, {"p": payload}).field == "p.__class__.held['x']"


def test_a_tensor_that_tells_of_other_memory_is_found_by_its_own(runtime: StockRuntime) -> None:
    boundary, mine = Boundary(runtime), runtime.pools[CompressorKind.C128]
    for payload in (mine.as_subclass(Twisted), mine[1:2].as_subclass(Twisted)):
        violation = refusal(boundary, {"p": [payload]})
        assert violation.field == "p[0]"
        assert "lies in pools[c128]" in violation.found
    twisted = torch.zeros(2).as_subclass(Twisted)
    boundary.check("Connector.send", {"p": twisted})
    torch.Tensor.__dict__["__dict__"].__get__(twisted)["more"] = mine
    assert refusal(boundary, {"p": twisted}).field == "p.more"


def test_mappings_that_make_things_up_or_raise_and_wrong_names_of_fields_are_no_way_through(
    runtime: StockRuntime,
) -> None:
    boundary, mine = Boundary(runtime), runtime.pools[CompressorKind.C128]
    assert "makes up entries" in refusal(boundary, {"p": MakesUp()}).found
    violation = refusal(boundary, {"p": [Unreadable()]})
    assert violation.field == "p[0]"
    assert "Unreadable of" in violation.found
    assert "raises OSError" in violation.found
    boundary.check("Connector.send", {"p": [defaultdict(list), Counter("ab")]})
    for named in (WrongFields, NoFields):
        boundary.check("Connector.send", {"p": named(1, 2)})
        assert refusal(boundary, {"p": named(1, mine)}).field == "p.1"


def test_the_host_s_own_books_of_pages_do_not_cross(runtime: StockRuntime) -> None:
    boundary = Boundary(runtime)
    for pool in runtime.store._pools.values():
        for array in (pool.owned, pool.spare, pool.mapped):
            for payload in (array, array[..., -1:], torch.from_numpy(array)):
                violation = refusal(boundary, {"p": payload})
                assert violation.field == "p"
                assert "lies in store._pools[" in violation.found
            boundary.check("Connector.send", {"p": array.copy()})


@pytest.mark.parametrize("cls", [StockRuntime, TailStore, Boundary, CompressorWeights])
def test_classes_of_ours_do_not_cross_either(runtime: StockRuntime, cls: type) -> None:
    violation = refusal(Boundary(runtime), {"p": [int, cls]})
    assert violation.field == "p[1]"
    assert f"is a {cls.__qualname__} of afd_dsv4." in violation.found


def test_regions_that_overlap_are_one_from_the_first_byte_to_the_last() -> None:
    def region(begin: int, end: int) -> Region:
        return Region(begin, end, (begin,), torch.zeros(1))

    found = audit._apart([region(20, 30), region(0, 10), region(5, 25), region(6, 7), region(40, 50), region(50, 60)])
    assert [(each.begin, each.end) for each in found] == [(0, 30), (40, 50), (50, 60)]
    boundary = Boundary(None)
    cpu = torch.device("cpu")
    boundary.regions = {cpu: found}
    boundary._begins = {cpu: [each.begin for each in found]}
    for at in range(70):
        assert (boundary.region_of(at, at + 1, cpu) is not None) == (at < 30 or 40 <= at < 60)


class Color(enum.Enum):
    RED = 1


def test_cycles_end_and_what_is_too_deep_or_too_much_is_refused(runtime: StockRuntime, monkeypatch: Any) -> None:
    boundary = Boundary(runtime)
    circle: list[object] = []
    circle.append({"again": circle})
    tensor = torch.zeros(1)
    tensor.itself = tensor  # type: ignore[attr-defined]
    boundary.check("Connector.send", {"p": circle, "q": tensor})
    deep: object = runtime._idle_starts
    for _ in range(audit.MAX_DEPTH + 1):
        deep = [deep]
    assert "objects deep" in refusal(boundary, {"p": deep}).found
    monkeypatch.setattr(audit, "MAX_OBJECTS", 10)
    assert "behind" in refusal(boundary, {"p": [[i] for i in range(20)]}).found


def test_connectors_are_not_looked_into_but_their_pending_payloads_are(runtime: StockRuntime) -> None:
    class Connector:
        def __init__(self) -> None:
            self.anything = lambda: None
            self._pending_attention_payloads: dict[int, list[Any]] = {}

    boundary = Boundary(runtime, opaque=(Connector,))
    connector = Connector()
    metadata = P.AFDForwardContextMetadata([0], [0], 0, connector, [3], 2)
    boundary.check("Connector.send", {"afd_metadata": metadata})
    boundary.check_pending("Connector.send", connector)
    context = P.AFDTransferContext(P.AFDTransferMetadata(0, 1, [3]))
    connector._pending_attention_payloads[1] = [(context, torch.zeros(3), runtime.tables[0][4].rows)]
    pending = "connector._pending_attention_payloads[1][0][2]"
    assert refusal(boundary, {"afd_metadata": metadata}).field == f"afd_metadata.{pending}"
    with pytest.raises(BoundaryViolation) as error:
        boundary.check_pending("Connector.send", connector)
    assert error.value.field == pending
    boundary.check_pending("Connector.send", object())  # CAMP2P keeps nothing


def reachable(root: object) -> list[torch.Tensor]:
    """Every tensor that an object holds, found by the garbage collector's own means."""
    seen, todo, found = {id(root)}, [root], []
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        if isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType)):
            continue
        for each in gc.get_referents(value):
            if id(each) not in seen:
                seen.add(id(each))
                todo.append(each)
    return found


class Later(StockRuntime):
    """A runtime to which somebody has added memory."""

    def __init__(self, *args: Any, **limits: Any) -> None:
        super().__init__(*args, **limits)
        self.added = {"new": [torch.zeros(100, device="npu")]}


def test_all_memory_of_a_runtime_and_of_its_stand_ins_is_a_region_also_what_is_added_later(world: World) -> None:
    places = [(each.layer, each.kind) for each in LAYERS.compressors]
    launches = Launches(torch.ops.aten.add, places, torch.device("npu"))
    later = Later(LAYERS, world.layout, max_num_seqs=2, max_num_batched_tokens=64, device="npu")
    boundary = Boundary(later, {"launches": launches})
    tensors = [*reachable(later), *launches.states.values(), launches.metadata.decode.block_table]
    assert len(tensors) > 20
    for tensor in tensors:
        assert refusal(boundary, {"x": tensor}).field == "x"
    assert "added['new'][0]" in refusal(boundary, {"x": later.added["new"][0][3:]}).found
    assert "launches.states" in refusal(boundary, {"x": [*launches.states.values()][1]}).found
    bytes_found = sum(r.end - r.begin for regions in boundary.regions.values() for r in regions)
    allocated = later.allocated()
    ours = allocated.tails_and_spares + allocated.lists + allocated.tables + allocated.staging + allocated.host
    assert bytes_found >= ours + 400


def test_the_search_costs_the_same_for_any_number_of_layers(world: World) -> None:
    """Regions are storages, and no layer has one of its own."""
    many = replace(LAYERS, num_layers=60, compress_ratios=(4, 128) * 30)
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "device": "npu"}
    few, more = (Boundary(StockRuntime(each, world.layout, **limits)) for each in (LAYERS, many))
    count = {device.type: len(regions) for device, regions in few.regions.items()}
    assert count == {device.type: len(regions) for device, regions in more.regions.items()}
    for _, _, given in payloads(P, lambda: torch.ones(3, 4, device="npu")):
        few.check("c", given)
        more.check("c", given)
    assert few.tensors == more.tensors > 0


def test_a_worker_without_a_runtime_has_nothing_to_find_but_types_are_looked_at(runtime: StockRuntime) -> None:
    boundary = Boundary(None)
    assert boundary.regions == {}
    boundary.check("Connector.send", {"x": runtime._idle_starts})
    assert "is a TailStore of afd_dsv4.tail.store" in refusal(boundary, {"x": [runtime.store]}).found
    assert [*owned_tensors({"": None})] == []
