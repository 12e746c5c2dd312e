# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The race detector of the software NPU, through the real torch_npu.

Every program has a twin that lacks one edge: the detector must say nothing of the one, and name both sides of the
other. No test depends on timing, because the detector does not.
"""

import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.softnpu import runtime as rt
from afd_dsv4.tail.tables import RequestChunk, RequestId
from tests.npu_streams import streams_apart
from tests.stock_op import SMALL, Chunk, Model
from tests.stock_world import World

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu
N = 1 << 10


@pytest.fixture(autouse=True)
def _detecting() -> Iterator[None]:
    torch.npu.synchronize()
    before = rt.race_detection()
    rt.set_race_detection(False)
    rt.clear_races()
    rt.set_race_detection(True)
    yield
    torch.npu.synchronize()
    rt.set_race_detection(before)
    rt.clear_races()
    rt.set_schedule(0)


def stream_id(stream: Any) -> int:
    found = ctypes.c_int32()
    assert ctypes.CDLL("libascendcl.so").aclrtStreamGetId(ctypes.c_void_p(stream.npu_stream), ctypes.byref(found)) == 0
    return found.value


def on(stream: Any, work: Callable[[], Any]) -> None:
    with torch.npu.stream(stream):
        work()


@dataclass
class Pair:
    """Two streams and memory that both use; everything so far is done."""

    def __post_init__(self) -> None:
        self.a, self.b = streams_apart(2)
        self.x, self.y, self.z = (torch.zeros(N, device="npu") for _ in range(3))
        self.event = torch.npu.Event()
        torch.npu.synchronize()

    def write(self, stream: Any) -> None:
        on(stream, lambda: self.x.fill_(1.0))

    def read(self, stream: Any) -> None:
        on(stream, lambda: self.y.copy_(self.x))

    def record(self, stream: Any) -> None:
        self.event.record(stream)

    def wait(self, stream: Any) -> None:
        stream.wait_event(self.event)


# ------------------------------------------------------------------------------------------------ edges


def nothing(p: Pair) -> None:
    p.write(p.a)
    p.read(p.b)


def event(p: Pair) -> None:
    p.write(p.a)
    p.record(p.a)
    p.wait(p.b)
    p.read(p.b)


def record_too_early(p: Pair) -> None:
    p.record(p.a)
    p.write(p.a)
    p.wait(p.b)
    p.read(p.b)


def record_on_the_wrong_stream(p: Pair) -> None:
    p.write(p.a)
    p.record(p.b)
    p.wait(p.b)
    p.read(p.b)


def wait_before_the_record(p: Pair) -> None:
    p.write(p.a)
    p.wait(p.b)
    p.record(p.a)
    p.read(p.b)


def wait_for_an_older_record(p: Pair) -> None:
    p.record(p.a)
    p.wait(p.b)
    p.write(p.a)
    p.record(p.a)
    p.read(p.b)


def wait_for_the_newest_record(p: Pair) -> None:
    p.record(p.a)
    p.write(p.a)
    p.record(p.a)
    p.wait(p.b)
    p.read(p.b)


def recorded_again_elsewhere(p: Pair) -> None:
    """The shape of rapidsai/rmm#2489: the event that is waited for no longer stands for the first use."""
    p.write(p.a)
    p.record(p.a)
    p.record(p.b)
    c = torch.npu.Stream()
    p.wait(c)
    p.read(c)


def through_a_third_stream(p: Pair) -> None:
    c, second = torch.npu.Stream(), torch.npu.Event()
    p.write(p.a)
    p.record(p.a)
    p.wait(c)
    second.record(c)
    p.b.wait_event(second)
    p.read(p.b)


def host_waits_for_the_stream(p: Pair) -> None:
    p.write(p.a)
    p.a.synchronize()
    p.read(p.b)


def host_waits_for_the_event(p: Pair) -> None:
    p.write(p.a)
    p.record(p.a)
    p.event.synchronize()
    p.read(p.b)


def host_waits_for_an_event_before_the_work(p: Pair) -> None:
    p.record(p.a)
    p.write(p.a)
    p.event.synchronize()
    p.read(p.b)


def host_waits_for_the_device(p: Pair) -> None:
    p.write(p.a)
    torch.npu.synchronize()
    p.read(p.b)


def host_polls_the_event(p: Pair) -> None:
    p.write(p.a)
    p.record(p.a)
    while not p.event.query():
        pass
    p.read(p.b)


def host_polls_the_stream(p: Pair) -> None:
    p.write(p.a)
    while not p.a.query():
        pass
    p.read(p.b)


def host_waits_for_the_wrong_stream(p: Pair) -> None:
    p.write(p.a)
    p.b.synchronize()
    p.read(p.b)


def external_event(p: Pair) -> None:
    signal = torch.npu.ExternalEvent()
    p.write(p.a)
    signal.record(p.a)
    signal.wait(p.b)
    p.read(p.b)


def external_event_waited_for_first(p: Pair) -> None:
    signal = torch.npu.ExternalEvent()
    signal.wait(p.b)
    p.read(p.b)
    p.write(p.a)
    signal.record(p.a)


def external_event_of_nothing(p: Pair) -> None:
    signal = torch.npu.ExternalEvent()
    signal.record(p.a)
    p.write(p.a)
    signal.wait(p.b)
    p.read(p.b)


def two_reads(p: Pair) -> None:
    p.read(p.a)
    on(p.b, lambda: p.z.copy_(p.x))


ORDERED = [
    event,
    wait_for_the_newest_record,
    through_a_third_stream,
    host_waits_for_the_stream,
    host_waits_for_the_event,
    host_waits_for_the_device,
    host_polls_the_event,
    host_polls_the_stream,
    external_event,
    external_event_waited_for_first,
    two_reads,
]
UNORDERED = [
    nothing,
    record_too_early,
    record_on_the_wrong_stream,
    wait_before_the_record,
    wait_for_an_older_record,
    recorded_again_elsewhere,
    host_waits_for_an_event_before_the_work,
    host_waits_for_the_wrong_stream,
    external_event_of_nothing,
]


@pytest.mark.parametrize("program", ORDERED)
def test_an_edge_orders_what_it_orders_on_the_device(program: Callable[[Pair], None]) -> None:
    program(Pair())
    torch.npu.synchronize()
    assert rt.races() == ()


@pytest.mark.parametrize("program", UNORDERED)
def test_a_missing_edge_is_one_race_with_both_sites(program: Callable[[Pair], None]) -> None:
    pair = Pair()
    program(pair)
    (race,) = rt.races()
    assert (race.first.operator, race.first.stream, race.first.writes) == (
        "aten::fill_.Scalar",
        stream_id(pair.a),
        True,
    )
    assert (race.second.operator, race.second.writes) == ("aclrtMemcpy device to device", False)
    assert race.second.stream != race.first.stream
    assert (race.address, race.size) == (pair.x.data_ptr(), 4 * N)
    assert "aten::fill_.Scalar" in str(race)
    assert rt.race_count() == 1


def test_writes_race_with_reads_and_with_writes_that_came_before() -> None:
    for first, second, kinds in (
        (Pair.read, Pair.write, (False, True)),
        (Pair.write, Pair.write, (True, True)),
        (Pair.write, Pair.read, (True, False)),
    ):
        rt.clear_races()
        pair = Pair()
        first(pair, pair.a)
        second(pair, pair.b)
        assert [(race.first.writes, race.second.writes) for race in rt.races()] == [kinds]


def test_a_write_behind_one_of_two_readers_races_with_the_other() -> None:
    """Released on the producer's stream while a second consumer still reads."""
    pair = Pair()
    c = torch.npu.Stream()
    pair.read(pair.a)
    on(pair.b, lambda: pair.z.copy_(pair.x))
    pair.record(pair.a)
    pair.wait(c)
    pair.write(c)
    (race,) = rt.races()
    assert race.first.stream == stream_id(pair.b)


def test_the_verdict_does_not_depend_on_the_schedule() -> None:
    def verdict(seed: int) -> list[tuple[Any, ...]]:
        rt.set_schedule(seed, 500)
        rt.set_race_detection(False)
        rt.clear_races()
        rt.set_race_detection(True)
        pair = Pair()
        for program in (event, nothing, through_a_third_stream, record_too_early):
            program(pair)
        torch.npu.synchronize()
        base = pair.x.data_ptr()
        return [(r.first.operator, r.second.operator, r.first.writes, r.address - base, r.size) for r in rt.races()]

    first = verdict(0)
    assert len(first) > 1
    assert all(verdict(seed) == first for seed in (1, 2, 3))


def test_an_event_that_a_stream_never_got_to_gives_the_edge_of_its_record() -> None:
    """Judged when it is queued: both tasks are still held when the verdict is there."""
    pair = Pair()
    rt.hang_stream(pair.a)
    pair.write(pair.a)
    pair.read(pair.b)
    assert len(rt.races()) == 1
    rt.release_stream(pair.a)


def test_turned_off_it_says_nothing_and_turned_on_it_starts_anew() -> None:
    pair = Pair()
    rt.set_race_detection(False)
    nothing(pair)
    assert not rt.race_detection()
    pair.write(pair.a)
    rt.set_race_detection(True)
    pair.read(pair.b)
    assert rt.races() == ()
    pair.write(pair.a)
    assert len(rt.races()) == 1


def test_only_the_first_thousand_races_are_kept_and_all_are_counted() -> None:
    pair = Pair()
    for _ in range(401):
        pair.write(pair.a)
        pair.read(pair.b)
    # Every write but the first meets the read before it, and every read the write before it.
    assert rt.race_count() == 401 + 400
    for _ in range(200):
        pair.write(pair.a)
        pair.read(pair.b)
    assert rt.race_count() == 601 + 600
    assert len(rt.races()) == 1000
    rt.clear_races()
    assert (rt.race_count(), rt.races()) == (0, ())


# ------------------------------------------------------------------------------------------------ bytes


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Size and stride of up to three dims, and an offset, inside 400 elements."""
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    strides = tuple(draw(st.sampled_from([1, 2, 5, 7, 20, 25])) for _ in sizes)
    return (
        sizes,
        strides,
        (draw(st.integers(0, 400 - 1 - sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))),),
    )


def elements(view: tuple[tuple[int, ...], ...]) -> list[int]:
    """The elements of a view, one by one."""
    sizes, strides, (offset,) = view
    found = [offset]
    for size, stride in zip(sizes, strides, strict=True):
        found = [at + i * stride for at in found for i in range(size)]
    return found


@given(st.tuples(views(), views()))
@settings(max_examples=150)
def test_two_views_race_exactly_if_they_share_an_element(pair: tuple[Any, Any]) -> None:
    first, second = pair
    if any(len(set(elements(view))) < len(elements(view)) for view in pair):
        return  # elements that overlap: torch refuses to write them
    buffer = torch.zeros(400, device="npu")
    streams = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    rt.clear_races()
    for (sizes, strides, (offset,)), stream in zip((first, second), streams, strict=True):
        on(stream, lambda s=sizes, t=strides, o=offset: buffer.as_strided(s, t, o).fill_(1.0))
    shared = sorted(set(elements(first)) & set(elements(second)))
    assert len(rt.races()) == (1 if shared else 0)
    if shared:
        (race,) = rt.races()
        assert race.address == buffer.data_ptr() + 4 * shared[0]
        assert race.size == 4 * (shared[-1] - shared[0] + 1)
    torch.npu.synchronize()


@pytest.mark.parametrize(
    ("first", "second", "races"),
    [
        ((slice(0, 50),), (slice(50, 100),), False),
        ((slice(0, 51),), (slice(50, 100),), True),
        ((slice(None), slice(0, 64)), (slice(None), slice(64, 128)), False),
        ((slice(None), slice(0, 65)), (slice(None), slice(64, 128)), True),
        ((slice(None), slice(0, 64)), (slice(7, 8),), True),
        ((slice(None), slice(0, None, 2)), (slice(None), slice(1, None, 2)), False),
    ],
)
def test_slices_of_rows_and_of_columns_are_told_apart(first: Any, second: Any, races: bool) -> None:
    buffer = torch.zeros(100, 128, device="npu")
    a, b = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    on(a, lambda: buffer[first].fill_(1.0))
    on(b, lambda: buffer[second].fill_(2.0))
    assert bool(rt.races()) == races


def test_freed_and_allocated_again_memory_has_no_past() -> None:
    size = 48 << 20

    def use(stream: Any) -> int:
        block = torch.empty(size, dtype=torch.uint8, device="npu")
        address: int = block.data_ptr()
        on(stream, lambda b=block: b.fill_(1))
        block.record_stream(stream)
        stream.synchronize()
        del block
        gc.collect()
        torch.npu.empty_cache()
        return address

    for _ in range(4):
        use(torch.npu.Stream())
    assert rt.races() == ()


def test_copies_from_and_to_pinned_memory_are_judged_on_the_host_side_too() -> None:
    host = torch.zeros(N).pin_memory()
    pair = Pair()
    on(pair.a, lambda: pair.x.copy_(host, non_blocking=True))
    on(pair.b, lambda: host.copy_(pair.y, non_blocking=True))
    (race,) = rt.races()
    assert (race.first.operator, race.second.operator) == ("aclrtMemcpy host to device", "aclrtMemcpy device to host")
    assert race.address == host.data_ptr()


@pytest.mark.parametrize("awaited", [False, True])
def test_the_host_may_rewrite_staging_only_behind_the_copies_from_it(awaited: bool) -> None:
    host = torch.zeros(N).pin_memory()
    pair = Pair()
    on(pair.a, lambda: pair.x.copy_(host, non_blocking=True))
    pair.record(pair.a)
    if awaited:
        pair.event.synchronize()
    rt.host_access(host, "rewrite of the staging entry", writes=True)
    assert [(r.second.operator, r.second.stream) for r in rt.races()] == (
        [] if awaited else [("rewrite of the staging entry", -1)]
    )


def test_an_operator_that_waits_for_its_stream_is_judged_there_and_seen_by_the_host() -> None:
    pair = Pair()
    pair.write(pair.a)
    _, waited = rt.calls()
    on(pair.b, lambda: pair.x.nonzero())
    assert rt.calls()[1] == waited + 1
    assert [race.second.operator for race in rt.races()] == ["aten::nonzero"]
    rt.clear_races()
    pair.a.synchronize()
    found: list[Any] = []
    on(pair.b, lambda: found.append(pair.x.nonzero()))
    on(pair.a, lambda: found[0].add_(1))  # the host has seen the result
    assert rt.races() == ()


# ------------------------------------------------------------------------------------------------ graphs


def captured(p: Pair, *, fork: bool, join: bool) -> Any:
    """A graph: x on the first stream, y from x on a second one, z from y on the first again."""
    torch.npu.synchronize()
    graph, event = torch.npu.NPUGraph(), torch.npu.Event()
    with torch.npu.graph(graph):
        main = torch.npu.current_stream()
        event.record(main)
        if not fork:
            p.a.wait_event(event)
        p.x.fill_(3.0)
        if fork:
            p.a.wait_stream(main)
        on(p.a, lambda: p.y.copy_(p.x))
        if join:
            main.wait_stream(p.a)
        p.z.copy_(p.y)
        main.wait_stream(p.a)
    return graph


@pytest.mark.parametrize(("fork", "join", "racing"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_the_branches_of_a_replay_are_ordered_by_their_captured_edges(fork: bool, join: bool, racing: int) -> None:
    graph = captured(Pair(), fork=fork, join=join)
    assert rt.races() == (), "a capture runs nothing"
    for _ in range(3):
        rt.clear_races()
        graph.replay()
        assert len(rt.races()) == racing
    torch.npu.synchronize()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_replay_is_as_a_whole_in_the_order_of_its_stream(ordered: bool) -> None:
    pair = Pair()
    graph = captured(pair, fork=True, join=True)
    main = torch.npu.current_stream()
    on(pair.b, lambda: pair.y.fill_(9.0))
    if ordered:
        main.wait_stream(pair.b)
    graph.replay()
    if ordered:
        pair.b.wait_stream(main)
    on(pair.b, lambda: pair.y.fill_(9.0))
    # Unordered: the branch that writes y meets the fill before it; the fill after it meets that write and z's read.
    assert len(rt.races()) == (0 if ordered else 3)
    torch.npu.synchronize()


# ------------------------------------------------------------------------------------------------ operators


@pytest.fixture
def limits_waived() -> Iterator[None]:
    rt.install()
    for name in torch.ops.softnpu.waiver_names():
        torch.ops.softnpu.waive(name, True)
    yield
    for name in torch.ops.softnpu.waiver_names():
        torch.ops.softnpu.waive(name, False)


def to_device(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).npu()
    return torch.from_numpy(array).npu()


@pytest.mark.parametrize(
    ("shared", "kinds"), [("no page", set()), ("a page", {"write"}), ("a page of history", {"read"})]
)
def test_launches_of_the_compressor_race_over_the_pages_that_their_tables_map(
    limits_waived: None, shared: str, kinds: set[str]
) -> None:
    """One pool, two launches on two streams, each with the pages that its table on the device names."""
    rng = np.random.default_rng(7)
    model = Model.random(rng, SMALL["c4"], [40, 40])
    first, second = Chunk(0, 8, 16), Chunk(1, 8, 16)
    state = to_device(np.zeros((20, 8, model.spec.row_dim), np.float32))
    tables = [np.array([[1, 2, 3]], np.int32), np.array([[4, 5, 6]], np.int32)]
    if shared == "a page":
        tables[1][0, 2] = tables[0][0, 2]  # positions 16 to 23: both save their rows there
    if shared == "a page of history":
        tables[1][0, 0] = tables[0][0, 1]  # positions 0 to 7 of the second: only read, and written by the first
    launches = [
        {k: to_device(v) for k, v in model.arguments([chunk], np.zeros((1, 8, 1), np.float32), table).items()}
        | {"state_cache": state}
        for chunk, table in zip((first, second), tables, strict=True)
    ]
    streams = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    for stream, arguments in zip(streams, launches, strict=True):
        on(
            stream,
            lambda a=arguments: torch.ops._C_ascend.compressor(
                **{"seqused": None, "rotary_mode": 2, "cache_mode": 1} | a
            ),
        )
    torch.npu.synchronize()
    sites = [site for race in rt.races() for site in (race.first, race.second)]
    assert {site.operator for site in sites} == ({"_C_ascend::compressor"} if kinds else set())
    page = 8 * model.spec.row_dim * 4
    assert {(race.address - state.data_ptr()) // page for race in rt.races()} == (
        {3} if shared == "a page" else {2} if kinds else set()
    )
    if kinds == {"read"}:
        assert {site.writes for site in sites} == {True, False}


# ------------------------------------------------------------------------------------------------ torch's allocator


@dataclass(frozen=True)
class Row:
    """One row of the truth table of torch_npu's stream sanitizer (test_sanitizer_record_stream.py).

    `race`: whether the creation of a tensor and its use on another stream race. `keep_alive`: whether the memory may be
    handed out again while it is used, so that the caller has to keep the tensor (or to call record_stream).
    """

    usage_waits: bool = False
    creation_waits: bool = False
    synchronize: bool = False
    record_stream: bool = False
    same_stream: bool = False
    race: bool = False
    keep_alive: bool = False


TRUTH = {
    "no sync": Row(race=True, keep_alive=True),
    "usage waits for creation only": Row(usage_waits=True, race=False, keep_alive=True),
    # The table says "possible": whether it happens is a matter of timing, which is what a race is.
    "creation waits for usage only": Row(creation_waits=True, race=True, keep_alive=False),
    "both directions": Row(usage_waits=True, creation_waits=True, race=False, keep_alive=False),
    "device synchronize": Row(synchronize=True, race=False, keep_alive=False),
    # The table says "unresolved": record_stream is about the memory's next owner and orders no work.
    "record_stream only": Row(record_stream=True, race=True, keep_alive=False),
    "same stream": Row(same_stream=True, race=False, keep_alive=False),
}


@pytest.mark.parametrize("situation", TRUTH)
def test_the_truth_table_of_record_stream(situation: str) -> None:
    row = TRUTH[situation]
    creation, out = torch.npu.current_stream(), torch.zeros(3 << 14, device="npu")
    usage = creation if row.same_stream else torch.npu.Stream()
    torch.npu.synchronize()
    x = torch.full((3 << 14,), 1.0, device="npu")
    address = x.data_ptr()
    if row.usage_waits:
        usage.wait_stream(creation)
    if row.synchronize:
        torch.npu.synchronize()
    on(usage, lambda x=x: out.copy_(x))
    if row.record_stream:
        x.record_stream(usage)
    if row.creation_waits:
        creation.wait_stream(usage)
    if row.synchronize:
        torch.npu.synchronize()
    assert bool(rt.races()) == row.race
    rt.clear_races()
    del x
    again = torch.full((3 << 14,), 2.0, device="npu")  # the next owner, on the stream of the creation
    assert again.data_ptr() == address or row.record_stream
    assert bool(rt.races()) == row.keep_alive
    torch.npu.synchronize()


# ------------------------------------------------------------------------------------------------ real programs


@pytest.mark.parametrize("ordered", [True, False])
def test_two_ubatches_of_the_stock_runtime_have_no_race_and_without_their_order_they_have(
    limits_waived: None, ordered: bool
) -> None:
    world = World(3, length=300, ordered=ordered)
    names = "abc"
    requests = {name: world.request() for name in names}
    for step in range(5):
        chunks = [RequestChunk(RequestId(name), 60 * step, 60 * (step + 1)) for name in names]
        world.queue(requests, chunks, cut_tokens=90, alternate=step % 2 == 1)
    torch.npu.synchronize()
    assert (rt.races() == ()) == ordered


def test_a_process_is_watched_from_the_start_by_a_setting() -> None:
    code = (
        "import torch, torch_npu\n"
        "from afd_dsv4.softnpu import runtime as rt\n"
        "x, side = torch.zeros(8, device='npu'), torch.npu.Stream()\n"
        "with torch.npu.stream(side):\n    x.add_(1)\n"
        "print(rt.race_detection(), [str(race) for race in rt.races()])\n"
    )
    command = [sys.executable, "-m", "afd_dsv4.softnpu", "--", "env", "SOFTNPU_RACES=1", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.startswith("True ['write by aten::add_"), done.stderr
    assert "races with the write by aten::zero_" in done.stdout
