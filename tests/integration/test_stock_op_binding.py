# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The torch binding of the compressor operators: stock schemas, CPU and Meta dispatch, and launches on NPU streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests import stock_op
from tests.stock_op import SMALL, Chunk, Model

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

SCHEMAS = {
    "compressor": "_C_ascend::compressor(Tensor x, Tensor wkv, Tensor wgate, Tensor(a!) state_cache, Tensor ape, "
    "Tensor norm_weight, Tensor rope_sin, Tensor rope_cos, Tensor? state_block_table, Tensor? cu_seqlens, "
    "Tensor? seqused, Tensor? start_pos, int rope_head_dim, int cmp_ratio, int coff, float norm_eps, int rotary_mode, "
    "int cache_mode) -> Tensor",
    "compressor_metadata": "_C_ascend::compressor_metadata(Tensor rope_cos, Tensor rope_sin, Tensor cu_seqlens, "
    "Tensor start_pos, Tensor kv_block_table, int kv_block_size, int slot_mapping_format, int compress_ratio, "
    "int num_compressed_tokens, int num_reqs_actual) -> (Tensor, Tensor, Tensor)",
    "compressor_metadata_out": "_C_ascend::compressor_metadata_out(Tensor rope_cos, Tensor rope_sin, "
    "Tensor cu_seqlens, Tensor start_pos, Tensor kv_block_table, int kv_block_size, int slot_mapping_format, "
    "int compress_ratio, int num_reqs_actual, Tensor(a!) compress_cos, Tensor(b!) compress_sin, "
    "Tensor(c!) slot_mapping) -> (Tensor(a!), Tensor(b!), Tensor(c!))",
}


@pytest.fixture(scope="module")
def ops() -> Any:
    library = stock_op.LIBRARY.with_name("libsoftnpu_ops.so")
    if not library.exists():
        pytest.skip(f"{library} is not built; run: make setup")
    torch.ops.load_library(str(library))
    return torch.ops._C_ascend


@pytest.fixture
def limits_waived(ops: Any) -> Any:
    for name in torch.ops.softnpu.waiver_names():
        torch.ops.softnpu.waive(name, True)
    yield
    for name in torch.ops.softnpu.waiver_names():
        torch.ops.softnpu.waive(name, False)


def tensor(array: Any, device: str = "cpu") -> torch.Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def bits(result: torch.Tensor) -> Any:
    return result.cpu().view(torch.int16).numpy().view(np.uint16)


def case(rng: np.random.Generator) -> tuple[Model, list[Chunk], dict[str, Any]]:
    model = Model.random(rng, SMALL["c4"], [70, 33])
    chunks = [Chunk(0, 6, 64), Chunk(1, 0, 33)]
    return model, chunks, model.arguments(chunks, *model.dense(chunks, 8))


def call(ops: Any, arguments: dict[str, Any], device: str, **changes: Any) -> torch.Tensor:
    given = {k: tensor(v, device) if isinstance(v, np.ndarray) else v for k, v in arguments.items()} | changes
    result: torch.Tensor = ops.compressor(**{"seqused": None, "rotary_mode": 2, "cache_mode": 1} | given)
    return result


def expected(model: Model, chunks: list[Chunk]) -> Any:
    return stock_op.to_bits(np.concatenate([model.expected(chunk) for chunk in chunks]))


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_the_stock_ones(ops: Any, name: str) -> None:
    assert str(getattr(ops, name).default._schema) == SCHEMAS[name]


def test_cpu_dispatch_runs_at_once(ops: Any, limits_waived: None, rng: np.random.Generator) -> None:
    model, chunks, arguments = case(rng)
    state = tensor(arguments["state_cache"])
    out = call(ops, arguments, "cpu", state_cache=state)
    rows = expected(model, chunks)
    assert stock_op.same_bits(bits(out)[: len(rows)], rows)
    assert stock_op.is_poison(bits(out)[len(rows) :])
    assert stock_op.same_bits(state.numpy(), arguments["state_cache"])  # shares memory: saved in place


def test_strided_inputs_are_accepted_as_by_the_stock_binding(
    ops: Any, limits_waived: None, rng: np.random.Generator
) -> None:
    model, chunks, arguments = case(rng)
    x = tensor(arguments["x"]).t().contiguous().t()
    table = torch.cat([tensor(arguments["state_block_table"])] * 2, 1)[:, : arguments["state_block_table"].shape[1]]
    assert not x.is_contiguous()
    assert not table.is_contiguous()
    out = call(ops, arguments, "cpu", x=x, state_block_table=table)
    rows = expected(model, chunks)
    assert stock_op.same_bits(bits(out)[: len(rows)], rows)


def test_cpu_errors_are_exceptions_with_the_text_of_the_core(
    ops: Any, limits_waived: None, rng: np.random.Generator
) -> None:
    _, _, arguments = case(rng)
    with pytest.raises(RuntimeError, match="compressor: cache_mode: found 2, expected 1"):
        call(ops, arguments, "cpu", cache_mode=2)
    broken = arguments["state_block_table"].copy()
    broken[1, 0] = 10**6
    with pytest.raises(RuntimeError, match="save of position 0 of request 1: page 1000000 of the state cache"):
        call(ops, arguments | {"state_block_table": broken}, "cpu")
    with pytest.raises(ValueError, match="no waiver is called 'all'"):
        torch.ops.softnpu.waive("all", True)


def test_limits_hold_until_waived(ops: Any, rng: np.random.Generator) -> None:
    _, _, arguments = case(rng)
    assert torch.ops.softnpu.waivers() == []
    with pytest.raises(RuntimeError, match=r"waiver 'compressor\.rope_head_dim'"):
        call(ops, arguments, "cpu")


def test_meta_shapes_are_the_stock_ones(ops: Any) -> None:
    def meta(*shape: int, dtype: Any = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    rest = (meta(1, 8, 2048, dtype=torch.float32), meta(4, 1024), meta(512))
    numbers = {"rope_head_dim": 64, "cmp_ratio": 4, "coff": 2, "norm_eps": 1e-6, "rotary_mode": 2, "cache_mode": 1}
    none = dict.fromkeys(("state_block_table", "cu_seqlens", "seqused", "start_pos"))
    weights = (meta(1024, 4096), meta(1024, 4096))
    two = ops.compressor(meta(10, 4096), *weights, *rest, meta(4, 64), meta(4, 64), **none, **numbers)
    assert (two.shape, two.dtype, two.device.type) == ((4, 512), torch.bfloat16, "meta")
    three = ops.compressor(meta(3, 10, 4096), *weights, *rest, meta(3, 3, 64), meta(3, 3, 64), **none, **numbers)
    assert three.shape == (3, 3, 512)
    integers = meta(3, dtype=torch.int32), meta(2, dtype=torch.int32), meta(2, 5, dtype=torch.int32)
    for layout, slots in ((1, (7,)), (2, (7, 2))):
        cos, sin, slot = ops.compressor_metadata(meta(99, 64), meta(99, 64), *integers, 128, layout, 4, 7, 2)
        assert cos.shape == sin.shape == (7, 1, 1, 64)
        assert (slot.shape, slot.dtype) == (slots, torch.int32)


def test_metadata_on_cpu_equals_the_core(ops: Any) -> None:
    cos, sin = (torch.arange(640, dtype=torch.float32).reshape(40, 16) + i for i in (0, 0.5))
    cu, starts = torch.tensor([0, 9, 12], dtype=torch.int32), torch.tensor([3, 8], dtype=torch.int32)
    table = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32)
    out_cos, out_sin, slots = ops.compressor_metadata(cos, sin, cu, starts, table, 2, 2, 4, 5, 2)
    # request 0: tokens 3..11, windows 0, 1, 2; request 1: tokens 8..10, none
    assert slots.tolist() == [[5, 0], [5, 1], [6, 0], [-1, 1], [-1, 1]]
    assert torch.equal(out_cos[:3, 0, 0], cos[[0, 4, 8]])
    assert torch.equal(out_sin[:3, 0, 0], sin[[0, 4, 8]])
    again = [torch.empty_like(t) for t in (out_cos, out_sin, slots)]
    returned = ops.compressor_metadata_out(cos, sin, cu, starts, table, 2, 2, 4, 2, *again)
    for a, b, c in zip(again, returned, (out_cos, out_sin, slots), strict=True):
        assert a.data_ptr() == b.data_ptr()
        assert torch.equal(a, c)


# ------------------------------------------------------------------------------------------------ on a stream


@pytest.mark.npu
def test_a_launch_reads_its_tables_when_the_stream_gets_there(
    ops: Any, limits_waived: None, rng: np.random.Generator
) -> None:
    model, chunks, arguments = case(rng)
    wrong = {"start_pos": torch.full((2,), -1, dtype=torch.int32, device="npu")}
    starts = tensor(arguments["start_pos"], "npu")
    stream = torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        wrong["start_pos"].copy_(starts)  # queued before the launch, on its stream
        out = call(ops, arguments, "npu", **wrong)
    stream.synchronize()
    rows = expected(model, chunks)
    assert stock_op.same_bits(bits(out)[: len(rows)], rows)
    assert stock_op.is_poison(bits(out)[len(rows) :])


@pytest.mark.npu
def test_a_captured_launch_runs_at_every_replay(ops: Any, limits_waived: None, rng: np.random.Generator) -> None:
    model, chunks, arguments = case(rng)
    device = {k: tensor(v, "npu") if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    torch.ops.softnpu.reset_stats()
    with torch.npu.graph(graph):
        out = call(ops, device, "npu")
    torch.npu.synchronize()
    assert torch.ops.softnpu.stats("compressor.launches") == 0
    for replay in (1, 2, 3):
        graph.replay()
        torch.npu.synchronize()
        assert torch.ops.softnpu.stats("compressor.launches") == replay
    rows = expected(model, chunks)
    assert stock_op.same_bits(bits(out)[: len(rows)], rows)


@pytest.mark.npu
def test_a_fault_on_the_stream_is_reported_at_synchronisation(
    ops: Any, limits_waived: None, rng: np.random.Generator
) -> None:
    _, _, arguments = case(rng)
    broken = arguments["state_block_table"].copy()
    broken[1, 0] = 10**6
    call(ops, arguments | {"state_block_table": broken}, "npu")
    with pytest.raises(RuntimeError):
        torch.npu.synchronize()
    torch.npu.synchronize()  # reported once


@pytest.mark.npu
def test_metadata_and_launch_agree_on_the_npu(ops: Any, limits_waived: None, rng: np.random.Generator) -> None:
    """Packed RoPE rows of compressor_metadata feed compressor, as the attention layer does."""
    model, chunks, arguments = case(rng)
    from afd_dsv4.compressor import reference

    cos, sin = (tensor(t, "npu") for t in reference.rope_table(np.arange(80), 16))
    given = {name: tensor(arguments[name], "npu") for name in ("cu_seqlens", "start_pos")}
    table = torch.arange(1, 41, dtype=torch.int32, device="npu").reshape(2, 20)
    rows = len(arguments["rope_cos"])
    c, s, slots = ops.compressor_metadata(cos, sin, *given.values(), table, 4, 2, 4, rows, 2)
    out = call(ops, arguments, "npu", rope_cos=c.view(-1, 16), rope_sin=s.view(-1, 16))
    torch.npu.synchronize()
    emitted = expected(model, chunks)
    assert stock_op.same_bits(bits(out)[: len(emitted)], emitted)
    windows = [(b, w) for b, chunk in enumerate(chunks) for w in model.windows(chunk)]
    assert slots.cpu().tolist()[: len(windows)] == [[1 + 20 * b + w // 4, w % 4] for b, w in windows]
