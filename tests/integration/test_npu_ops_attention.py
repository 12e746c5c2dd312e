# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The attention operators of DeepSeek-V4 on the software NPU, each against its definition, computed here the long way.

The definitions are loops over requests, rows and heads in float64, written from vllm-ascend's documents and not from
the kernels. Everything runs under an adversarial schedule. What the operators refuse is refused in the caller, what is
wrong in the data at the next synchronisation; nothing waits for the stream, and a graph replays with other data.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.softnpu import runtime as rt

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu

HEADS, DIM, WINDOW = 4, 512, 128
INDEX_HEADS, INDEX_DIM = 4, 128
WAIVED = ("npu_vllm_quant_lightning_indexer.heads", "npu_sparse_attn_sharedkv.topk")
INT64_MAX = (1 << 63) - 1


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    rt.set_schedule(3, 100)
    for name in WAIVED:
        torch.ops.softnpu.waive(name, True)
    yield
    for name in WAIVED:
        torch.ops.softnpu.waive(name, False)
    rt.set_schedule(0)


def ops() -> Any:
    return torch.ops._C_ascend


def refused(says: str) -> Any:
    """An error with this text in it, at once."""
    return pytest.raises(RuntimeError, match=re.escape(says))


def cases(named: Sequence[tuple[str, Any, str]]) -> pytest.MarkDecorator:
    """One test for each (name, what is changed, what the error says)."""
    return pytest.mark.parametrize(("changes", "says"), [case[1:] for case in named], ids=[case[0] for case in named])


def int32(values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def on_npu(values: dict[str, Any]) -> dict[str, Any]:
    """The tensors among `values` on the device, with their strides."""
    return {name: copied(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def copied(tensor: Any) -> Any:
    """On the device, with the gaps that `tensor` has in memory."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((span,), (1,)) if tensor.numel() else tensor
    return memory.to("npu").as_strided(tensor.shape, tensor.stride()) if tensor.numel() else tensor.to("npu")


@dataclass(frozen=True)
class Requests:
    """Requests of one launch: (new rows, tokens in all) of each, and the block tables of a pool for them."""

    shape: tuple[tuple[int, int], ...]
    page: int = 32
    seed: int = 0

    @property
    def ends(self) -> list[int]:
        return list(itertools.accumulate((rows for rows, _ in self.shape), initial=0))

    @property
    def rows(self) -> int:
        return self.ends[-1]

    def generator(self, salt: int) -> Any:
        return torch.Generator().manual_seed(1000 * self.seed + salt)

    def table(self, salt: int, ratio: int = 1) -> tuple[Any, int]:
        """A block table that no two requests share a page of, and the number of pages."""
        columns = max(1, *(-(-(tokens // ratio) // self.page) for _, tokens in self.shape))
        pages = len(self.shape) * columns + 1
        order = torch.randperm(pages, generator=self.generator(salt))[:-1]
        return order.reshape(len(self.shape), columns).int(), pages

    def pool(self, pages: int, width: int, dtype: Any, salt: int) -> Any:
        """Random, and with a gap behind each page, as pools that share memory with others have."""
        values = torch.randn(pages, self.page + 1, 1, width, generator=self.generator(salt))
        return values.to(dtype)[:, : self.page]


def rows_of(pool: Any, table: Any, request: int, indices: Any) -> Any:
    """Entries of a request, the long way: page by page."""
    page = pool.shape[1]
    return torch.stack([pool[int(table[request, i // page]), i % page].double() for i in indices]).flatten(1)


# ---- sparse attention


def attention_inputs(requests: Requests, ratio: int, topk: int = 0, dtype: Any = None) -> dict[str, Any]:
    dtype = dtype or torch.bfloat16
    table, pages = requests.table(1)
    inputs: dict[str, Any] = {
        "q": torch.randn(requests.rows, HEADS, DIM, generator=requests.generator(2)).to(dtype),
        "ori_kv": requests.pool(pages, DIM, dtype, 3),
        "ori_block_table": table,
        "cu_seqlens_q": int32(requests.ends),
        "seqused_kv": int32([tokens for _, tokens in requests.shape]),
        "sinks": torch.randn(HEADS, generator=requests.generator(4)),
        "softmax_scale": 0.11,
        "cmp_ratio": ratio,
        "ori_win_left": WINDOW - 1,
        "layout_q": "TND",
    }
    if ratio > 1:
        cmp_table, cmp_pages = requests.table(5, ratio)
        inputs |= {"cmp_kv": requests.pool(cmp_pages, DIM, dtype, 6), "cmp_block_table": cmp_table}
    if topk:
        inputs["cmp_sparse_indices"] = chosen_indices(requests, ratio, topk)
    return inputs


def positions(requests: Requests) -> list[tuple[int, int, int]]:
    """(request, row, position) of every row."""
    return [
        (b, requests.ends[b] + i, tokens - rows + i)
        for b, (rows, tokens) in enumerate(requests.shape)
        for i in range(rows)
    ]


def chosen_indices(requests: Requests, ratio: int, topk: int) -> Any:
    indices = torch.full((requests.rows, 1, topk), -1, dtype=torch.int32)
    for _, row, position in positions(requests):
        visible = max(0, (position + 1) // ratio)
        chosen = torch.randperm(visible, generator=requests.generator(10 + row))[:topk]
        indices[row, 0, : len(chosen)] = chosen.int()
    return indices


def attention_defined(inputs: dict[str, Any], requests: Requests) -> Any:
    """softmax(q k / with a sink) v over what each row sees, in float64."""
    q, ratio, out = inputs["q"], inputs["cmp_ratio"], torch.zeros(inputs["q"].shape, dtype=torch.float64)
    for b, row, position in positions(requests):
        if position < 0:
            continue
        seen = list(range(max(0, position - inputs["ori_win_left"]), position + 1))
        kv = [rows_of(inputs["ori_kv"], inputs["ori_block_table"], b, seen)]
        far = list(range((position + 1) // ratio)) if "cmp_kv" in inputs else []
        if "cmp_sparse_indices" in inputs:
            far = [i for i in inputs["cmp_sparse_indices"][row, 0].tolist() if i >= 0]
        if far:
            kv.append(rows_of(inputs["cmp_kv"], inputs["cmp_block_table"], b, far))
        k = torch.cat(kv)
        for head in range(q.shape[1]):
            weights = torch.exp(k @ q[row, head].double() * inputs["softmax_scale"])
            total = weights.sum() + torch.exp(inputs["sinks"][head].double())
            out[row, head] = weights @ k / total
    return out


def attention_metadata(inputs: dict[str, Any], **changes: Any) -> Any:
    arguments = {
        "num_heads_q": inputs["q"].shape[1],
        "num_heads_kv": 1,
        "head_dim": inputs["q"].shape[2],
        "cu_seqlens_q": inputs["cu_seqlens_q"],
        "seqused_q": torch.empty(0, device=inputs["q"].device),
        "seqused_kv": inputs["seqused_kv"],
        "batch_size": inputs["seqused_kv"].numel(),
        "cmp_ratio": inputs["cmp_ratio"],
        "ori_win_left": inputs["ori_win_left"],
        "layout_q": "TND",
    }
    return ops().npu_sparse_attn_sharedkv_metadata(**(arguments | changes))


def attend(inputs: dict[str, Any], **changes: Any) -> Any:
    """On the device; `changes` replace or, where None, remove arguments."""
    device = on_npu(inputs | changes)
    if "metadata" not in device:
        device["metadata"] = attention_metadata(device)
    q = device.pop("q")
    return ops().npu_sparse_attn_sharedkv(q, **{name: value for name, value in device.items() if value is not None})[0]


MIXED = Requests(((3, 3), (1, 700), (5, 133), (0, 0), (1, 0), (2, 256)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("ratio", "topk"), [(1, 0), (128, 0), (4, 0), (4, 64), (4, 512)])
def test_attention_is_its_definition_over_windows_compressed_entries_and_choices(
    ratio: int, topk: int, dtype: Any
) -> None:
    inputs = attention_inputs(MIXED, ratio, topk, dtype)
    found = attend(inputs).cpu()
    expected = attention_defined(inputs, MIXED)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-7)
    assert found[9].abs().sum() == 0  # the row of the request without tokens, as a graph pads
    wrong = attention_defined(inputs | {"ori_win_left": WINDOW - 2}, MIXED)
    assert (found.double() - wrong).abs().max() > 2**-6  # the comparison sees a window that is too short


@st.composite
def launches(draw: st.DrawFn) -> Requests:
    """Up to four requests with histories, among them ones without rows and rows without tokens."""
    shape = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(0, 3))
        shape.append((rows, draw(st.sampled_from([0, rows])) + draw(st.integers(0, 200))))
    if not sum(rows for rows, _ in shape):
        shape.append((1, 1))
    return Requests(tuple(shape), draw(st.sampled_from([16, 32, 128])), draw(st.integers(0, 99)))


@settings(max_examples=15)
@given(launches(), st.sampled_from([(1, 0), (128, 0), (4, 0), (4, 8)]))
def test_attention_is_its_definition_for_any_requests(requests: Requests, kind: tuple[int, int]) -> None:
    inputs = attention_inputs(requests, *kind)
    found = attend(inputs).cpu().double()
    torch.testing.assert_close(found, attention_defined(inputs, requests), rtol=2**-7, atol=2**-7)


def test_attention_in_one_piece_is_attention_row_by_row() -> None:
    requests = Requests(((300, 400),), seed=1)
    inputs = attention_inputs(requests, 4, 64)
    together = attend(inputs).cpu()
    for row in (0, 27, 28, 155, 299):
        alone = inputs | {
            "q": inputs["q"][row : row + 1],
            "cu_seqlens_q": int32([0, 1]),
            "seqused_kv": int32([101 + row]),
            "cmp_sparse_indices": inputs["cmp_sparse_indices"][row : row + 1],
        }
        torch.testing.assert_close(attend(alone).cpu()[0], together[row], rtol=2**-8, atol=2**-9)


def test_attention_leaves_the_rows_of_no_request_unusable() -> None:
    requests = Requests(((2, 40), (1, 5)), seed=2)
    inputs = attention_inputs(requests, 1)
    inputs["q"] = torch.cat([inputs["q"], torch.ones(3, HEADS, DIM, dtype=torch.bfloat16)])
    found = attend(inputs).cpu()
    assert found[:3].isfinite().all()
    assert found[3:].isnan().all()


SMALL = Requests(((2, 150), (1, 9)), seed=3)
#: What is changed of a launch with choices (ratio 4, 512 of them), and what the refusal says.
ATTENTION_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("layout_q", {"layout_q": "BSND"}, "layout_q: found BSND"),
    ("layout_kv", {"layout_kv": "BSND"}, "layout_kv: found BSND"),
    ("lse", {"return_softmax_lse": True}, "return_softmax_lse: found True"),
    ("float32", {"q": torch.zeros(3, HEADS, DIM)}, "q's dtype: found Float"),
    ("no rows", {"q": torch.zeros(0, HEADS, DIM, dtype=torch.bfloat16)}, "expected [rows, heads, head_dim], not empty"),
    ("heads", {"q": torch.zeros(3, 3, DIM, dtype=torch.bfloat16)}, "waiver 'npu_sparse_attn_sharedkv.heads'"),
    ("head_dim", {"q": torch.zeros(3, HEADS, 256, dtype=torch.bfloat16)}, "waiver 'npu_sparse_attn_sharedkv.head_dim'"),
    ("cu_seqlens dtype", {"cu_seqlens_q": torch.tensor([0, 2, 3])}, "cu_seqlens_q: found"),
    ("seqused_kv count", {"seqused_kv": int32([150])}, "seqused_kv: found [1], expected int32 [2]"),
    ("seqused_q", {"seqused_q": int32([2, 1])}, "seqused_q: found [2], expected None"),
    ("ori_sparse_indices", {"ori_sparse_indices": int32([[[0]]] * 3)}, "ori_sparse_indices: found"),
    ("no ori_kv", {"ori_kv": None}, "ori_kv: found None"),
    ("no table", {"ori_block_table": None}, "ori_kv: found no block table"),
    ("short table", {"cmp_block_table": int32([[0, 1]])}, "expected a block table of int32 [2 requests"),
    ("page", {"ori_kv": torch.zeros(9, 24, 1, DIM, dtype=torch.bfloat16)}, "waiver 'npu_sparse_attn_sharedkv.page'"),
    ("pool dtype", {"cmp_kv": torch.zeros(9, 32, 1, DIM, dtype=torch.float16)}, "cmp_kv: found Half"),
    ("pool strides", {"ori_kv": torch.zeros(9, 32, 1, 2 * DIM, dtype=torch.bfloat16)[..., :DIM]}, "without gaps"),
    ("ratio", {"cmp_ratio": 8}, "cmp_ratio: found 8, expected 4 or 128"),
    ("indices without entries", {"cmp_kv": None}, "cmp_kv: found None"),
    ("indices' rows", {"cmp_sparse_indices": torch.zeros(2, 1, 512, dtype=torch.int32)}, "expected int32 [3, 1, topk]"),
    ("sinks", {"sinks": torch.zeros(HEADS + 1)}, "sinks: found [5]"),
    ("metadata", {"metadata": torch.zeros(64, dtype=torch.int32)}, "metadata: found [64]"),
    ("ori_mask_mode", {"ori_mask_mode": 3}, "ori_mask_mode: found 3"),
    ("cmp_mask_mode", {"cmp_mask_mode": 0}, "cmp_mask_mode: found 0"),
    ("window", {"ori_win_left": 128}, "waiver 'npu_sparse_attn_sharedkv.window'"),
    ("ori_win_right", {"ori_win_right": 1}, "ori_win_right: found 1"),
]


@cases(ATTENTION_REFUSALS)
def test_attention_refuses_what_the_stock_operator_does_not_take(changes: dict[str, Any], says: str) -> None:
    inputs = attention_inputs(SMALL, 4, 512)
    changes = {"metadata": torch.zeros(1024, dtype=torch.int32)} | changes
    with refused(says):
        attend(inputs, **changes)
    attend(inputs)
    torch.npu.synchronize()


def test_attention_refuses_a_choice_of_another_size_unless_waived() -> None:
    inputs = attention_inputs(SMALL, 4, 64)
    torch.ops.softnpu.waive("npu_sparse_attn_sharedkv.topk", False)
    with refused("waiver 'npu_sparse_attn_sharedkv.topk'"):
        attend(inputs)


def device_error(call: Callable[[], Any], says: str) -> None:
    """`call` returns, and the next synchronisation raises what `says`."""
    call()
    with refused(says):
        torch.npu.synchronize()


def with_entry(tensor: Any, index: tuple[int, ...], value: int) -> Any:
    changed = tensor.clone()
    changed[index] = value
    return changed


#: Data of a launch that the device cannot serve. The first row's position is 148: it sees tokens 21 to 148, and 37
#: compressed entries of two pages.
ATTENTION_FAULTS: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    (
        "page below the pool",
        lambda i: {"ori_block_table": with_entry(i["ori_block_table"], (0, 2), -1)},
        "names page -1",
    ),
    (
        "page beyond the pool",
        lambda i: {"cmp_block_table": with_entry(i["cmp_block_table"], (0, 1), 99)},
        "names page 99",
    ),
    (
        "table too narrow",
        lambda i: {"ori_block_table": i["ori_block_table"][:, :4]},
        "beyond its block table of 4 pages",
    ),
    ("negative length", lambda i: {"seqused_kv": int32([150, -1])}, "request 1 has -1 tokens"),
    ("ends that shrink", lambda i: {"cu_seqlens_q": int32([0, 3, 2])}, "request 1 has query rows [3, 2)"),
    ("ends beyond q", lambda i: {"cu_seqlens_q": int32([0, 2, 4])}, "request 1 has query rows [2, 4)"),
    ("ends without 0", lambda i: {"cu_seqlens_q": int32([1, 2, 3])}, "prefix sums begin with 1"),
    (
        "unseen index",
        lambda i: {"cmp_sparse_indices": with_entry(i["cmp_sparse_indices"], (0, 0, 3), 37)},
        "row 0 is 37",
    ),
    (
        "missing index",
        lambda i: {"cmp_sparse_indices": with_entry(i["cmp_sparse_indices"], (0, 0, 3), -1)},
        "row 0 is -1",
    ),
]


@cases(ATTENTION_FAULTS)
def test_attention_reports_wrong_data_as_an_error_of_the_device(
    changes: Callable[[dict[str, Any]], dict[str, Any]], says: str
) -> None:
    inputs = attention_inputs(SMALL, 4, 512)
    device_error(lambda: attend(inputs, **changes(inputs)), says)


def test_attention_reads_no_table_entry_that_it_does_not_need() -> None:
    inputs = attention_inputs(SMALL, 4, 512)
    expected = attend(inputs).cpu()
    table = inputs["ori_block_table"].clone()
    table[1, 1:] = 99  # request 1 has 9 tokens: one page
    assert torch.equal(attend(inputs, ori_block_table=table).cpu(), expected)


def test_attention_refuses_metadata_of_other_lengths_heads_or_ratio() -> None:
    inputs = attention_inputs(SMALL, 4, 512)
    device = on_npu(inputs)
    stale = attention_metadata(device | {"seqused_kv": int32([151, 9]).npu()})
    device_error(lambda: attend(inputs, metadata=stale), "metadata: made for other lengths")
    heads = attention_metadata(device, num_heads_q=64)
    device_error(lambda: attend(inputs, metadata=heads), "made for 64 heads and ratio 4, the launch has 4 and 4")
    ratio = attention_metadata(device, cmp_ratio=128)
    device_error(lambda: attend(inputs, metadata=ratio), "made for 4 heads and ratio 128")
    unfilled = torch.zeros(1024, dtype=torch.int32)
    device_error(lambda: attend(inputs, metadata=unfilled), "not what npu_sparse_attn_sharedkv_metadata has filled")


# ---- lightning indexer


def indexer_inputs(requests: Requests, count: int, ratio: int = 4) -> dict[str, Any]:
    table, pages = requests.table(1, ratio)
    heads = (requests.rows, INDEX_HEADS)

    def int8(*shape: int, salt: int) -> Any:
        return torch.randint(-127, 128, shape, generator=requests.generator(salt)).to(torch.int8)

    def float16(*shape: int, salt: int) -> Any:
        return torch.rand(*shape, generator=requests.generator(salt)).half()

    return {
        "query": int8(*heads, INDEX_DIM, salt=2),
        "key": int8(pages, requests.page + 1, 1, INDEX_DIM, salt=3)[:, : requests.page],
        "weights": float16(*heads, salt=4) - 0.25,
        "query_dequant_scale": float16(*heads, salt=5) / 16,
        "key_dequant_scale": float16(pages, requests.page + 1, 1, salt=6)[:, : requests.page],
        "actual_seq_lengths_query": int32(requests.ends[1:]),
        "actual_seq_lengths_key": int32([tokens for _, tokens in requests.shape]),
        "block_table": table,
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": count,
        "cmp_ratio": ratio,
    }


def scores_defined(inputs: dict[str, Any], b: int, row: int, visible: int) -> list[float]:
    table, keys, scales = inputs["block_table"], inputs["key"], inputs["key_dequant_scale"]
    page, scores = keys.shape[1], []
    for i in range(visible):
        where = int(table[b, i // page]), i % page
        total = 0.0
        for head in range(INDEX_HEADS):
            dot = int((inputs["query"][row, head].long() * keys[where][0].long()).sum())
            scale = float(inputs["weights"][row, head]) * float(inputs["query_dequant_scale"][row, head])
            total += scale * max(dot, 0)
        scores.append(total * float(scales[where][0]))
    return scores


def indexer_metadata(inputs: dict[str, Any], **changes: Any) -> Any:
    arguments = {
        "num_heads_q": inputs["query"].shape[1],
        "num_heads_k": 1,
        "head_dim": INDEX_DIM,
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "actual_seq_lengths_query": inputs["actual_seq_lengths_query"].clone(),
        "actual_seq_lengths_key": inputs["actual_seq_lengths_key"].clone(),
        "batch_size": inputs["actual_seq_lengths_key"].numel(),
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": inputs["sparse_count"],
        "cmp_ratio": inputs["cmp_ratio"],
    }
    return ops().npu_vllm_quant_lightning_indexer_metadata(**(arguments | changes))


def index(inputs: dict[str, Any], **changes: Any) -> Any:
    device = on_npu(inputs | changes)
    if "metadata" not in device:
        device["metadata"] = indexer_metadata(device)
    return ops().npu_vllm_quant_lightning_indexer(**{k: v for k, v in device.items() if v is not None})[0]


INDEXED = Requests(((3, 3), (1, 300), (4, 133), (0, 0), (1, 0), (2, 64)), seed=4)


def check_best(found: Any, inputs: dict[str, Any], requests: Requests, count: int) -> None:
    assert found.shape == (requests.rows, 1, count)
    assert found.dtype == torch.int32
    for b, row, position in positions(requests):
        scores = scores_defined(inputs, b, row, max(0, (position + 1) // inputs["cmp_ratio"]))
        kept = min(count, len(scores))
        best, rest = found[row, 0, :kept].tolist(), found[row, 0, kept:].tolist()
        assert len(set(best)) == kept
        assert all(0 <= i < len(scores) for i in best)
        assert set(rest) <= {-1}
        expected = sorted(scores, reverse=True)[:kept]
        assert [scores[i] for i in best] == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("count", [1, 16, 512])
def test_the_indexer_gives_the_best_visible_keys_in_order_and_then_minus_one(count: int) -> None:
    inputs = indexer_inputs(INDEXED, count)
    found = index(inputs).cpu()
    check_best(found, inputs, INDEXED, count)
    row = INDEXED.ends[1]  # sees 75 keys
    for planted in (found[row - 1, 0], found[row, 0].flip(0), (found[row, 0] + 1) % 75):
        wrong = found.clone()
        wrong[row, 0] = planted
        if not torch.equal(wrong, found):
            with pytest.raises(AssertionError):
                check_best(wrong, inputs, INDEXED, count)


@settings(max_examples=10)
@given(launches(), st.sampled_from([3, 40]), st.sampled_from([1, 4, 64]))
def test_the_indexer_gives_the_best_of_any_requests(requests: Requests, count: int, ratio: int) -> None:
    inputs = indexer_inputs(requests, count, ratio)
    check_best(index(inputs).cpu(), inputs, requests, count)


def test_of_equal_keys_the_indexer_gives_the_lowest_first_also_of_zero_and_of_minus_zero() -> None:
    requests = Requests(((2, 400),), seed=5)
    inputs = indexer_inputs(requests, 32)
    inputs["key"][:] = inputs["key"][0, 0, 0].clone()
    inputs["key_dequant_scale"][:] = 0.5
    inputs["query"][1] = 0  # every dot is 0, and its weights' signs must not matter
    inputs["weights"][1] = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    assert index(inputs).cpu().tolist() == [[list(range(32))]] * 2


def test_a_row_gets_the_same_indices_alone_and_among_others() -> None:
    requests = Requests(((150, 4600),), page=64, seed=6)  # more keys and rows than one chunk has
    inputs = indexer_inputs(requests, 512)
    together = index(inputs).cpu()
    for row in (0, 63, 64, 149):
        alone = inputs | {name: inputs[name][row : row + 1] for name in ("query", "weights", "query_dequant_scale")}
        alone |= {"actual_seq_lengths_query": int32([1]), "actual_seq_lengths_key": int32([4451 + row])}
        assert torch.equal(index(alone).cpu()[0], together[row])


def test_the_indexer_takes_prefix_sums_with_their_leading_zero_and_poisons_the_rows_of_no_request() -> None:
    requests = Requests(((2, 150), (1, 9)), seed=7)
    inputs = indexer_inputs(requests, 16)
    expected = index(inputs).cpu()
    metadata = indexer_metadata(on_npu(inputs))
    ends = int32([0, 2, 3])
    assert torch.equal(index(inputs, actual_seq_lengths_query=ends, metadata=metadata).cpu(), expected)
    fewer = index(inputs, actual_seq_lengths_query=int32([2, 2])).cpu()
    assert torch.equal(fewer[:2], expected[:2])
    assert (fewer[2] == 0x5A5A5A5A).all()


def test_without_a_mask_the_indexer_gives_every_row_all_keys() -> None:
    requests = Requests(((3, 16),), seed=8)
    found = index(indexer_inputs(requests, 8), sparse_mode=0).cpu()
    assert all(sorted(row) == [-1] * 4 + list(range(4)) for row in found[:, 0].tolist())


INDEXER_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("layout_query", {"layout_query": "BSND"}, "layout_query: found BSND"),
    ("layout_key", {"layout_key": "BSND"}, "layout_key: found BSND"),
    ("quant mode", {"query_quant_mode": 1}, "query_quant_mode: found 1"),
    ("key quant mode", {"key_quant_mode": 1}, "key_quant_mode: found 1"),
    ("count", {"sparse_count": 2049}, "sparse_count: found 2049"),
    ("sparse_mode", {"sparse_mode": 1}, "sparse_mode: found 1"),
    ("pre_tokens", {"pre_tokens": 7}, "pre_tokens: found 7"),
    ("next_tokens", {"next_tokens": 7}, "next_tokens: found 7"),
    ("ratio", {"cmp_ratio": 3}, "cmp_ratio: found 3"),
    ("values", {"return_value": True}, "return_value: found True"),
    ("query dtype", {"query": torch.zeros(3, INDEX_HEADS, INDEX_DIM)}, "dtypes: found Float"),
    ("head_dim", {"query": torch.zeros(3, INDEX_HEADS, 64, dtype=torch.int8)}, "indexer.head_dim'"),
    ("key", {"key": torch.zeros(9, 32, 2, INDEX_DIM, dtype=torch.int8)}, "key: found [9, 32, 2, 128]"),
    ("page", {"key": torch.zeros(9, 24, 1, INDEX_DIM, dtype=torch.int8)}, "indexer.page'"),
    ("weights", {"weights": torch.zeros(3, INDEX_HEADS)}, "weights: found"),
    ("query scale", {"query_dequant_scale": torch.zeros(3, 1).half()}, "query_dequant_scale: found [3, 1]"),
    ("key scale", {"key_dequant_scale": torch.zeros(9, 32, 1)}, "key_dequant_scale: found"),
    ("no key lengths", {"actual_seq_lengths_key": None}, "actual_seq_lengths_key: found"),
    ("query lengths", {"actual_seq_lengths_query": int32([0, 1, 2, 3])}, "actual_seq_lengths_query: found [4]"),
    ("no table", {"block_table": None}, "block_table: found"),
    ("metadata", {"metadata": torch.zeros(8, dtype=torch.int32)}, "metadata: found [8]"),
]


@cases(INDEXER_REFUSALS)
def test_the_indexer_refuses_what_the_stock_operator_does_not_take(changes: dict[str, Any], says: str) -> None:
    inputs = indexer_inputs(SMALL, 16)
    changes = {"metadata": torch.zeros(1024, dtype=torch.int32)} | changes
    with refused(says):
        index(inputs, **changes)


def test_the_indexer_refuses_other_heads_unless_waived() -> None:
    torch.ops.softnpu.waive("npu_vllm_quant_lightning_indexer.heads", False)
    with refused("waiver 'npu_vllm_quant_lightning_indexer.heads'"):
        index(indexer_inputs(SMALL, 16))


INDEXER_FAULTS: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    ("page beyond the pool", lambda i: {"block_table": with_entry(i["block_table"], (0, 1), 99)}, "names page 99"),
    ("table too narrow", lambda i: {"block_table": i["block_table"][:, :1]}, "beyond its block table of 1 pages"),
    ("negative length", lambda i: {"actual_seq_lengths_key": int32([150, -4])}, "request 1 has -4 tokens"),
    ("ends that shrink", lambda i: {"actual_seq_lengths_query": int32([3, 2])}, "request 1 has query rows [3, 2)"),
]


@cases(INDEXER_FAULTS)
def test_the_indexer_reports_wrong_data_as_an_error_of_the_device(
    changes: Callable[[dict[str, Any]], dict[str, Any]], says: str
) -> None:
    inputs = indexer_inputs(SMALL, 16)
    device_error(lambda: index(inputs, **changes(inputs)), says)


def test_the_indexer_refuses_metadata_of_other_lengths_and_of_attention() -> None:
    inputs = indexer_inputs(SMALL, 16)
    stale = indexer_metadata(on_npu(inputs | {"actual_seq_lengths_key": int32([151, 9])}))
    device_error(lambda: index(inputs, metadata=stale), "metadata: made for other lengths")
    other = attention_metadata(on_npu(attention_inputs(SMALL, 4)))
    device_error(lambda: index(inputs, metadata=other), "not what npu_vllm_quant_lightning_indexer_metadata has filled")


def test_metadata_is_refused_for_shapes_that_do_not_match_its_batch() -> None:
    with refused("seqused_kv: found [2], expected int32 [3]"):
        attention_metadata(on_npu(attention_inputs(SMALL, 1)), batch_size=3)
    with refused("actual_seq_lengths_query: found [2], expected int32 [3]"):
        indexer_metadata(on_npu(indexer_inputs(SMALL, 16)), batch_size=3)
    with refused("num_heads_k: found 2"):
        indexer_metadata(on_npu(indexer_inputs(SMALL, 16)), num_heads_k=2)


# ---- rotary embeddings


def rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Of the last dim, pair by pair, in float64."""
    x, out = x.double(), torch.empty(x.shape, dtype=torch.float64)
    width = x.shape[-1]
    cos, sin = cos.double().expand(x.shape), sin.double().expand(x.shape)
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        out[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        out[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return out


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("angles", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_partial_rotary_turns_only_its_slice_in_place(heads: int, angles: Any) -> None:
    whole = torch.randn(7, heads, 128).bfloat16()
    cos, sin = torch.randn(2, 7, 1, 1, 64).to(angles)
    x = whole.npu()
    ops().inplace_partial_rotary_mul(x.unsqueeze(1), cos.npu(), sin.npu(), "interleave", [64, 128])
    found = x.cpu()
    assert torch.equal(found[..., :64], whole[..., :64])
    expected = rotated(whole[..., 64:].unsqueeze(1), cos, sin, True).squeeze(1)
    torch.testing.assert_close(found[..., 64:].double(), expected, rtol=2**-8, atol=2**-8)
    assert (
        found[..., 64:].double() - rotated(whole[..., 64:].unsqueeze(1), cos, sin, False).squeeze(1)
    ).abs().max() > 0.1


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_the_rotary_product_turns_the_whole_dim_and_broadcasts_its_angles(mode: str) -> None:
    x = torch.randn(5, 3, 1, 64)
    cos, sin = torch.randn(2, 5, 1, 1, 64)
    found = torch.ops.npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), rotary_mode=mode).cpu()
    torch.testing.assert_close(found.double(), rotated(x, cos, sin, mode == "interleave"), rtol=1e-6, atol=1e-6)


def test_rotary_operators_refuse_other_shapes_modes_and_dtypes() -> None:
    def partial(
        x: Any = (7, 1, 4, 128), r1: Any = (7, 1, 1, 64), mode: str = "interleave", part: Any = (64, 128)
    ) -> None:
        angles = torch.zeros(r1).npu()
        ops().inplace_partial_rotary_mul(torch.zeros(x).npu(), angles, angles, mode, list(part))

    partial()
    for changes, says in [
        ({"mode": "half"}, "rotary_mode: found half, expected interleave"),
        ({"mode": "nonsense"}, "rotary_mode: found nonsense"),
        ({"x": (7, 4, 128)}, "x: found"),
        ({"r1": (6, 1, 1, 64)}, "r1 and r2: found [6, 1, 1, 64]"),
        ({"r1": (7, 1, 4, 64)}, "r1 and r2: found"),
        ({"x": (7, 2, 4, 128)}, "r1 and r2: found"),
        ({"part": (64, 129)}, "partial_slice: found"),
        ({"part": (64, 64)}, "partial_slice: found"),
        ({"part": (60, 64), "r1": (7, 1, 1, 4)}, "a multiple of 8 elements"),
        ({"part": (0, 128), "r1": (7, 1, 1, 128)}, "at most 64"),
    ]:
        with refused(says):
            partial(**changes)  # type: ignore[arg-type]
    x, r = torch.zeros(2, 1, 4, 64).npu(), torch.zeros(2, 1, 1, 64).npu()
    with refused("dtypes: found Half"):
        ops().inplace_partial_rotary_mul(x, r.half(), r.half(), "interleave", [0, 64])
    with refused("rotary_mode: found quarter"):
        torch.ops.npu.npu_rotary_mul(x, r, r, rotary_mode="quarter")
    with refused("broadcasts to input's"):
        torch.ops.npu.npu_rotary_mul(x, r[:1, :, :, :32], r[:1, :, :, :32])


# ---- scatter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32], ids=str)
def test_scatter_writes_rows_of_a_pool_with_gaps_and_leaves_out_the_padding(dtype: Any) -> None:
    memory = torch.zeros(5, 9, 1, 16).to(dtype)
    update = torch.randint(-100, 100, (4, 1, 16)).to(dtype)
    slots = int32([[3, 7], [-1, 7], [0, 0], [4, 2]])
    pool = memory.npu()
    ops().npu_scatter_nd_update_v2(pool[:, :8], slots.npu(), update.npu())
    expected = memory.clone()
    for (page, offset), row in zip(slots.tolist(), update, strict=True):
        if page >= 0:
            expected[page, offset] = row
    assert torch.equal(pool.cpu(), expected)


def test_scatter_follows_any_strides_and_takes_no_rows() -> None:
    var = torch.zeros(4, 6).npu()
    ops().npu_scatter_nd_update_v2(var.t(), torch.tensor([[5], [1]]).npu(), torch.arange(8.0).reshape(2, 4).npu())
    expected = torch.zeros(4, 6)
    expected[:, 5], expected[:, 1] = torch.arange(4.0), torch.arange(4.0, 8.0)
    assert torch.equal(var.cpu(), expected)
    ops().npu_scatter_nd_update_v2(var, torch.zeros(0, 1, dtype=torch.int32).npu(), torch.zeros(0, 6).npu())
    assert torch.equal(var.cpu(), expected)


@pytest.mark.parametrize("slot", [[5, 0], [-2, 7], [0, 8], [0, -1], [-1, 8]], ids=str)
def test_scatter_reports_a_slot_outside_the_pool_as_an_error_of_the_device(slot: list[int]) -> None:
    pool, update = torch.zeros(5, 8, 1, 16).npu(), torch.ones(2, 16).npu()
    slots = int32([[0, 0], slot]).npu()
    device_error(lambda: ops().npu_scatter_nd_update_v2(pool, slots, update), "of row 1 is outside dim")


def test_scatter_refuses_other_dtypes_and_sizes() -> None:
    pool, update, slots = torch.zeros(5, 8, 1, 16).npu(), torch.ones(2, 16).npu(), int32([[0, 0], [1, 1]]).npu()
    for arguments, says in [
        ((pool, slots.float(), update), "indices' dtype: found Float"),
        ((pool, slots, update.half()), "update's dtype: found Half, expected var's Float"),
        ((pool, slots, update[:1]), "update: found [1, 16], expected 32 elements"),
        ((pool, slots[0], update), "indices: found [2]"),
        ((pool, int32([[0] * 5]).npu(), update), "up to 4 indices"),
    ]:
        with refused(says):
            ops().npu_scatter_nd_update_v2(*arguments)


# ---- quantisation, norm, product


def test_dynamic_quantisation_scales_each_row_by_its_greatest_value_and_rounds_half_to_even() -> None:
    x = torch.randn(3, 4, 128).bfloat16()
    x[1, 2] = 0
    x[2, 3, :5] = torch.tensor([127.0, 0.5, 1.5, -0.5, -126.5])
    x[2, 3, 5:] = 0
    y, scale = torch.ops.npu.npu_dynamic_quant(x.npu(), dst_type=torch.int8)
    y, scale = y.cpu(), scale.cpu()
    assert y.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert scale.shape == (3, 4)
    for i, j in itertools.product(range(3), range(4)):
        row = x[i, j].double()
        greatest = float(row.abs().max())
        assert float(scale[i, j]) == pytest.approx(greatest / 127, rel=1e-6)
        expected = [round(float(v) * 127 / greatest) if greatest else 0 for v in row]
        assert max(abs(a - b) for a, b in zip(y[i, j].tolist(), expected, strict=True)) <= 1
        assert sum(a != b for a, b in zip(y[i, j].tolist(), expected, strict=True)) <= 2  # ties within rounding
    assert y[2, 3, :5].tolist() == [127, 0, 2, 0, -126]
    assert not y[1, 2].any()


def test_dynamic_quantisation_smooths_first_and_refuses_what_it_does_not_have() -> None:
    x, smooth = torch.randn(2, 64).half(), (torch.rand(64) + 0.5).half()
    y, scale = torch.ops.npu.npu_dynamic_quant(x.npu(), smooth_scales=smooth.npu())
    product = x.double() * smooth.double()
    torch.testing.assert_close(y.cpu().double() * scale.cpu().double()[:, None], product, rtol=0, atol=0.03)
    for arguments, says in [
        ({"dst_type": torch.float16}, "dst_type: found"),
        ({"quant_mode": "pertensor"}, "quant_mode: found pertensor"),
        ({"group_index": int32([1]).npu()}, "group_index: found"),
        ({"smooth_scales": smooth[:9].npu()}, "smooth_scales: found [9]"),
    ]:
        with refused(says):
            torch.ops.npu.npu_dynamic_quant(x.npu(), **arguments)
    with refused("input's dtype: found Float"):
        torch.ops.npu.npu_dynamic_quant(x.float().npu())


@pytest.mark.parametrize("gamma_dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_rms_norm_divides_by_the_root_of_the_mean_square(gamma_dtype: Any) -> None:
    x, gamma = torch.randn(5, 3, 96).bfloat16(), torch.randn(96).to(gamma_dtype)
    y, rstd = torch.ops.npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-3)
    for i, j in itertools.product(range(5), range(3)):
        row = x[i, j].double()
        factor = (sum(float(v) ** 2 for v in row) / 96 + 1e-3) ** -0.5
        assert float(rstd.cpu()[i, j, 0]) == pytest.approx(factor, rel=1e-5)
        torch.testing.assert_close(y.cpu()[i, j].double(), row * factor * gamma.double(), rtol=2**-8, atol=2**-9)
    with refused("gamma: found [95]"):
        torch.ops.npu.npu_rms_norm(x.npu(), gamma[:95].npu())
    with refused("self's dtype: found Int"):
        torch.ops.npu.npu_rms_norm(x.int().npu(), gamma.npu())
    with refused("gamma's dtype: found Half"):
        torch.ops.npu.npu_rms_norm(x.npu(), gamma.half().npu())


def test_the_transposed_batch_product_multiplies_each_group_by_its_matrix() -> None:
    x, w = torch.randn(5, 2, 32).bfloat16(), torch.randn(2, 32, 9).bfloat16()
    found = torch.ops.npu.npu_transpose_batchmatmul(
        x.npu(), w.npu(), bias=None, scale=None, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    ).cpu()
    assert found.shape == (5, 2, 9)
    assert found.is_contiguous()
    for row, group in itertools.product(range(5), range(2)):
        expected = sum(x[row, group, k].double() * w[group, k].double() for k in range(32))
        torch.testing.assert_close(found[row, group].double(), expected, rtol=2**-7, atol=2**-7)


def test_the_transposed_batch_product_refuses_what_does_not_fit() -> None:
    x, w = torch.zeros(5, 2, 32).bfloat16().npu(), torch.zeros(2, 32, 9).bfloat16().npu()
    given = {"perm_x1": (1, 0, 2), "perm_x2": (0, 1, 2), "perm_y": (1, 0, 2)}
    for arguments, says in [
        ({"weight": w[0]}, "input and weight: found"),
        ({"weight": w.half()}, "weight's dtype: found Half"),
        ({"weight": w[:, :31]}, "weight: found"),
        ({"perm_x1": (2, 1, 0)}, "perm_x1: found"),
        ({"perm_x2": (1, 0, 2)}, "perm_x2: found"),
        ({"perm_y": (0, 1, 2)}, "perm_y: found"),
        ({"bias": w[0, 0]}, "bias: found"),
        ({"scale": w[0, 0]}, "scale: found"),
        ({"batch_split_factor": 2}, "batch_split_factor: found 2"),
    ]:
        with refused(says):
            torch.ops.npu.npu_transpose_batchmatmul(**({"input": x, "weight": w} | given | arguments))


# ---- all of them: asynchronous, and in a graph


def every_operator(requests: Requests) -> tuple[dict[str, Any], Callable[[dict[str, Any]], list[Any]]]:
    """The tensors of one step through all operators, and the step, which gives what it made and wrote."""
    attention, indexer = attention_inputs(requests, 4, 16), indexer_inputs(requests, 16)
    del attention["cmp_sparse_indices"]
    tensors = {f"a.{k}": v for k, v in attention.items()} | {f"i.{k}": v for k, v in indexer.items()}
    rows = requests.rows
    tensors |= {
        "a.metadata": attention_metadata(on_npu(attention)).cpu(),
        "i.metadata": indexer_metadata(on_npu(indexer)).cpu(),
        "cos": torch.randn(rows, 1, 1, 64, generator=requests.generator(90)),
        "sin": torch.randn(rows, 1, 1, 64, generator=requests.generator(91)),
        "slots": torch.stack([torch.zeros(rows).int(), torch.arange(rows).int()], 1),
        "gamma": torch.randn(DIM, generator=requests.generator(92)).bfloat16(),
        "matrix": torch.randn(1, HEADS * DIM, 8, generator=requests.generator(93)).bfloat16(),
    }

    def step(t: dict[str, Any]) -> list[Any]:
        a = {k[2:]: v for k, v in t.items() if k.startswith("a.")}
        i = {k[2:]: v for k, v in t.items() if k.startswith("i.")}
        q = torch.ops.npu.npu_rms_norm(a.pop("q"), t["gamma"])[0]
        ops().inplace_partial_rotary_mul(q.unsqueeze(1), t["cos"], t["sin"], "interleave", [DIM - 64, DIM])
        pool = a["ori_kv"].clone()
        ops().npu_scatter_nd_update_v2(pool, t["slots"], q[:, :1].contiguous())
        chosen = ops().npu_vllm_quant_lightning_indexer(**i)[0]
        out = ops().npu_sparse_attn_sharedkv(q, **(a | {"ori_kv": pool}), cmp_sparse_indices=chosen)[0]
        quantised, scale = torch.ops.npu.npu_dynamic_quant(out)
        product = torch.ops.npu.npu_transpose_batchmatmul(out.view(len(out), 1, -1), t["matrix"], perm_x1=(1, 0, 2))
        turned = torch.ops.npu.npu_rotary_mul(out[..., :64].unsqueeze(2).float(), t["cos"], t["sin"])
        return [chosen, out, pool, quantised, scale, product, turned]

    return tensors, step


def test_no_operator_waits_for_the_stream() -> None:
    tensors, step = every_operator(Requests(((2, 150), (1, 9)), seed=9))
    device = on_npu(tensors)
    expected = [result.cpu() for result in step(device)]
    torch.npu.synchronize()
    waited = rt.calls()[1]
    stream, key, event = torch.npu.current_stream(), torch.npu.Stream(), torch.npu.ExternalEvent()
    event.wait(stream)
    results = step(device)
    assert not stream.query()
    assert rt.calls()[1] == waited
    event.record(key)
    for found, value in zip(results, expected, strict=True):
        assert torch.equal(found.cpu(), value)


def test_a_graph_replays_every_operator_on_other_data_and_with_padding() -> None:
    full = Requests(((1, 150), (1, 133), (1, 60)), seed=10)
    tensors, step = every_operator(full)
    static = on_npu(tensors)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        results = step(static)
    other, _ = every_operator(replace(full, seed=11))
    padded, _ = every_operator(Requests(((1, 150), (1, 0), (1, 0)), seed=12))
    for values in (tensors, other, padded):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                shape = tuple(slice(0, size) for size in value.shape)
                static[name][shape].copy_(value)
        if values is padded:
            static["slots"][1:] = int32([-1, 31]).npu()
        graph.replay()
        found = [result.cpu() for result in results]
        expected = [result.cpu() for result in step(static)]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
        assert found[1].isfinite().all()
    assert (found[0][1:] == -1).all()
    assert not found[1][1:].any()
