# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The batch-invariant mode of the software NPU: a row's bits do not depend on what it is batched with.

Each case maps a batch of rows to one result a row. A row is computed alone, in a batch at the front, in the middle and
at the end, and elsewhere among other rows; in the mode all bits are equal. Without it some are not, which is the
negative control: it shows that these cases and sizes can tell.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afd_dsv4.softnpu import runtime as rt

torch = pytest.importorskip("torch")
F = torch.nn.functional
pytestmark = pytest.mark.npu

Tensor = Any
Case = Callable[[Any, "Weights"], Any]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTH = 100  # not a multiple of any vector; four heads of 25
SIZES = (2, 5, 17, 64, 301)  # below and above what one call of a kernel takes at once


class Weights:
    """What the cases share, on the device."""

    def __init__(self, dtype: Any) -> None:
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).to(dtype).npu()

        self.matrix, self.transposed, self.bias = draw(WIDTH, 40), draw(40, WIDTH), draw(40)
        self.groups, self.gamma = draw(4, WIDTH // 4, 9), draw(WIDTH)
        self.streams = tuple(t.float() for t in (draw(24, WIDTH), draw(3), draw(24)))


def heads(x: Any) -> Any:
    """[rows, 4, 25]."""
    return x.reshape(-1, 4, WIDTH // 4)


def both(values_and_indices: Any) -> Any:
    """Values and indices side by side."""
    return torch.cat([part.float() for part in values_and_indices], -1)


def elementwise(name: str) -> Case:
    function = getattr(torch, name, None) or getattr(F, name)
    positive = name in ("rsqrt", "log1p", "log")
    return lambda x, w: function(x.abs() + 0.1 if positive else x)


PRODUCTS: dict[str, Case] = {
    "mm": lambda x, w: x @ w.matrix,
    "mm of a transposed matrix": lambda x, w: x @ w.transposed.t(),
    "linear": lambda x, w: F.linear(x, w.transposed, w.bias),
    "linear of three dimensions": lambda x, w: F.linear(x[:, None], w.transposed, w.bias),
    "addmm": lambda x, w: torch.addmm(w.bias, x, w.matrix, beta=0.5, alpha=2),
    "bmm by row": lambda x, w: torch.bmm(heads(x), heads(x).transpose(1, 2)),
    "bmm by head": lambda x, w: torch.bmm(heads(x).transpose(0, 1), w.groups).transpose(0, 1),
    "baddbmm": lambda x, w: torch.baddbmm(w.bias[:4], heads(x), heads(x).transpose(1, 2), beta=0.5),
    "mv": lambda x, w: x @ w.matrix[:, 0],
    "matmul into given memory": lambda x, w: torch.mm(x, w.matrix, out=x.new_empty(len(x), 40)),
}
ROWS: dict[str, Case] = {
    "softmax": lambda x, w: x.softmax(-1),
    "softmax of an inner dimension": lambda x, w: heads(x).softmax(1),
    "log_softmax": lambda x, w: x.log_softmax(-1),
    "layer_norm": lambda x, w: F.layer_norm(x, (WIDTH,), w.gamma, w.gamma),
    "rms_norm": lambda x, w: F.rms_norm(x, (WIDTH,), w.gamma),
    "sum": lambda x, w: x.sum(-1),
    "sum of an inner dimension": lambda x, w: heads(x).sum(1, keepdim=True),
    "sum of two dimensions": lambda x, w: heads(x).sum((1, 2)),
    "mean": lambda x, w: x.square().mean(-1, keepdim=True),
    "mean of columns": lambda x, w: x.t().mean(0),
    "var": lambda x, w: x.var(-1),
    "norm": lambda x, w: torch.linalg.vector_norm(x, dim=-1),
    "logsumexp": lambda x, w: x.logsumexp(-1),
    "cumsum": lambda x, w: x.cumsum(-1),
    "topk with ties": lambda x, w: both((x * 2).round().topk(8, -1)),
    "sort with ties": lambda x, w: both((x * 2).round().sort(-1, descending=True)),
}
ELEMENTS: dict[str, Case] = {
    **{name: elementwise(name) for name in ("exp", "exp2", "expm1", "sigmoid", "silu", "gelu", "mish", "softplus")},
    **{name: elementwise(name) for name in ("tanh", "erf", "sin", "cos", "log", "log1p", "rsqrt", "reciprocal")},
    "add with a factor": lambda x, w: torch.add(x, x.square(), alpha=0.3),
    "addcmul": lambda x, w: torch.addcmul(x, x, w.gamma, value=0.7),
    "pow": lambda x, w: x.abs() ** 1.7,
    "in place": lambda x, w: x.clone().exp_().sigmoid_(),
    "of columns": lambda x, w: (x[:, 1::2] * 2).sigmoid() * x[:, ::2].t().tanh().t(),
}
OPERATORS: dict[str, Case] = {
    "npu_rms_norm": lambda x, w: torch.ops.npu.npu_rms_norm(x, w.gamma, 1e-6)[0],
    "npu_swiglu": lambda x, w: torch.ops.npu.npu_swiglu(x),
    "npu_transpose_batchmatmul": lambda x, w: torch.ops.npu.npu_transpose_batchmatmul(
        heads(x), w.groups, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    ),
    "npu_hc_pre_v2": lambda x, w: torch.ops._C_ascend.npu_hc_pre_v2(
        heads(x).contiguous(), *w.streams, 4, 20, 1e-6, 1e-6
    )[0],
    "npu_grouped_matmul": lambda x, w: torch.ops.npu.npu_grouped_matmul(
        [x],
        [w.matrix[None]],
        group_list=torch.tensor([len(x)]).npu(),
        split_item=2,
        group_type=0,
        group_list_type=1,
    )[0],
}
CASES = PRODUCTS | ROWS | ELEMENTS | OPERATORS
BF16_ONLY = ("npu_hc_pre_v2", "npu_transpose_batchmatmul", "npu_grouped_matmul")


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    before = rt.set_batch_invariant(True)
    torch.ops.softnpu.waive("npu_hc_pre_v2.d", True)
    yield
    torch.ops.softnpu.waive("npu_hc_pre_v2.d", False)
    rt.set_batch_invariant(before)


def bits(t: Any) -> bytes:
    return bytes(t.reshape(-1).clone().view(torch.uint8).tolist())


def differences(case: Case, dtype: Any) -> list[tuple[int, int]]:
    """Batch sizes and rows whose bits are others than alone."""
    weights, generator = Weights(dtype), torch.Generator().manual_seed(2)
    found = []
    for size in SIZES:
        batch = torch.randn(size, WIDTH, generator=generator).to(dtype)
        whole = case(batch.npu(), weights).cpu()
        for row in sorted({0, size // 2, size - 1}):
            alone = case(batch[row : row + 1].npu(), weights).cpu()
            others = torch.randn(size + 3, WIDTH, generator=generator).to(dtype)
            place = (7 * row + 2) % (size + 3)
            others[place] = batch[row]
            elsewhere = case(others.npu(), weights).cpu()
            if len({bits(alone[0]), bits(whole[row]), bits(elsewhere[place])}) != 1:
                found.append((size, row))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_row_are_the_same_alone_in_any_batch_and_at_any_place(name: str, dtype: Any) -> None:
    if name in BF16_ONLY and dtype is not torch.bfloat16:
        pytest.skip("no such case: the operator, or the case, is for bfloat16")
    assert differences(CASES[name], dtype) == []


@pytest.mark.parametrize("cases", [PRODUCTS, ELEMENTS], ids=["products", "elements"])
def test_without_the_mode_some_rows_have_other_bits_in_a_batch(cases: dict[str, Case]) -> None:
    """Negative control. Reductions differ on some hosts only; their layout is what the mode makes the same."""
    rt.set_batch_invariant(False)
    assert any(differences(case, torch.float32) for case in cases.values())


def test_an_operator_without_an_invariant_form_is_refused_by_name() -> None:
    x, w = torch.randn(1, 2, 9).npu(), torch.randn(3, 2, 3).npu()
    with pytest.raises(RuntimeError, match="has no batch-invariant form"):
        F.conv1d(x, w).cpu()
    rt.set_batch_invariant(False)
    F.conv1d(x, w).cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_the_definition(dtype: Any) -> None:
    a, b, c = (torch.randn(*shape).to(dtype) for shape in ((250, 600), (600, 33), (33,)))
    exact = 0.5 * c.double() + 2 * (a.double() @ b.double())
    found = torch.addmm(c.npu(), a.npu(), b.npu(), beta=0.5, alpha=2).cpu().double()
    step = torch.finfo(dtype).eps if dtype is not torch.float32 else 2**-17
    torch.testing.assert_close(found, exact, rtol=step, atol=step * 64)


def test_the_environment_turns_the_mode_on() -> None:
    code = "from afd_dsv4.softnpu import runtime as rt; print(rt.set_batch_invariant(False))"
    environment = {**os.environ, "AFD_DSV4_SOFTNPU_BATCH_INVARIANT": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "True"
