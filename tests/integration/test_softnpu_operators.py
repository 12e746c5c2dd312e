# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""aten on the software NPU: the values of the CPU kernels, asynchronously; what has no body raises by name.

Every comparison runs under an adversarial schedule, so that a kernel that ran too early or on unfilled memory shows.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from afd_dsv4.softnpu import runtime as rt

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu
F = torch.nn.functional
Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def _schedule() -> Iterator[None]:
    rt.set_schedule(3, 100)
    yield
    rt.set_schedule(0)


# Each body gets `f`, which makes the next random tensor of a shape, and `i`, which makes the next random index below n.
# (name, does it wait for the stream, body)
SAMPLES: list[tuple[str, bool, Callable[[Make, Make], Any]]] = [
    ("zeros_ones_full", False, lambda f, i: f(3).new_zeros(3) + torch.ones_like(f(3)) + torch.full_like(f(3), 2.5)),
    ("arange", False, lambda f, i: torch.arange(2, 17, 3, device=f(1).device)),
    ("scalar", False, lambda f, i: 2 * f(4, 5) + 1 - f(4, 5) / 3),
    ("broadcast", False, lambda f, i: f(4, 1, 5) * f(3, 1)),
    ("inplace", False, lambda f, i: f(4, 5).mul_(2).add_(f(5)).clamp_(-1, 1)),
    ("inplace_view", False, lambda f, i: _write_view(f(6, 8), f(2, 8))),
    ("cast", False, lambda f, i: (f(4, 5).half().float(), f(4, 5).double(), (f(4, 5) * 10).long(), f(4, 5) > 0)),
    ("transpose_contiguous", False, lambda f, i: f(4, 5, 6).permute(2, 0, 1).contiguous()),
    ("strided_copy", False, lambda f, i: torch.zeros_like(f(8, 8)[::2]).copy_(f(8, 8)[:, ::2].t())),
    ("cat_stack", False, lambda f, i: (torch.cat([f(2, 3), f(4, 3)]), torch.stack([f(2, 3), f(2, 3)], 1))),
    ("split_pad", False, lambda f, i: (f(7, 4).split(3), F.pad(f(3, 4), (1, 2), value=9.0))),
    ("where", False, lambda f, i: torch.where(f(4, 5) > 0, f(4, 5), 0.0)),
    ("masked_fill", False, lambda f, i: f(4, 5).masked_fill(f(4, 5) > 0, float("-inf"))),
    (
        "reductions",
        False,
        lambda f, i: (f(4, 5).sum(0), f(4, 5).mean(), f(4, 5).amax(1), f(4, 5).max(1), f(4, 5).std()),
    ),
    ("cumsum", False, lambda f, i: f(4, 50).cumsum(1)),
    ("sort", False, lambda f, i: f(4, 50).sort(dim=1, descending=True, stable=True)),
    ("topk", False, lambda f, i: f(4, 50).topk(7, dim=1)),
    ("argmax", False, lambda f, i: f(4, 50).argmax(-1)),
    ("softmax", False, lambda f, i: (f(4, 50).softmax(-1), F.log_softmax(f(4, 50), -1), torch.logsumexp(f(4, 50), 1))),
    ("matmul", False, lambda f, i: (f(17, 33) @ f(33, 9), torch.bmm(f(3, 4, 5), f(3, 5, 6)), f(2, 3, 4) @ f(4, 5))),
    ("addmm", False, lambda f, i: torch.addmm(f(9), f(17, 33), f(33, 9), beta=0.5, alpha=2.0)),
    ("einsum", False, lambda f, i: torch.einsum("bqhd,bkhd->bhqk", f(2, 3, 4, 5), f(2, 6, 4, 5))),
    ("linear", False, lambda f, i: F.linear(f(7, 16), f(9, 16), f(9))),
    ("layer_norm", False, lambda f, i: F.layer_norm(f(7, 16), (16,), f(16), f(16))),
    ("rms_norm", False, lambda f, i: F.rms_norm(f(7, 16), (16,), f(16))),
    (
        "activations",
        False,
        lambda f, i: (F.silu(f(9)), F.gelu(f(9)), f(9).sigmoid(), F.softplus(f(9)), f(9).tanh(), f(9).relu()),
    ),
    (
        "pointwise",
        False,
        lambda f, i: (f(9).exp(), f(9).cos(), f(9).sin(), f(9).abs().rsqrt(), f(9).pow(2), f(9).abs().sqrt()),
    ),
    (
        "attention",
        False,
        lambda f, i: F.scaled_dot_product_attention(f(2, 4, 9, 8), f(2, 4, 9, 8), f(2, 4, 9, 8), is_causal=True),
    ),
    (
        "attention_mask",
        False,
        lambda f, i: F.scaled_dot_product_attention(f(2, 4, 9, 8), f(2, 4, 9, 8), f(2, 4, 9, 8), f(9, 9)),
    ),
    ("embedding", False, lambda f, i: F.embedding(i(7, 12), f(12, 4))),
    ("one_hot", False, lambda f, i: F.one_hot(i(7, 12))),
    ("one_hot_classes", False, lambda f, i: F.one_hot(i(7, 12), 12)),
    ("index", False, lambda f, i: f(12, 4)[i(7, 12)]),
    ("index_pair", False, lambda f, i: f(12, 4)[i(7, 12), i(7, 4)]),
    ("index_mask", True, lambda f, i: f(12, 4)[f(12) > 0]),
    ("index_put", False, lambda f, i: _index_put(f(12, 4), i(1, 12), f(1, 4))),
    ("index_select", False, lambda f, i: f(12, 4).index_select(0, i(7, 12))),
    ("index_copy", False, lambda f, i: f(12, 4).index_copy(0, i(1, 12), f(1, 4))),
    ("index_add", False, lambda f, i: f(12, 4).index_add(0, i(7, 12), f(7, 4))),
    ("gather", False, lambda f, i: f(5, 12).gather(1, i((5, 3), 12))),
    ("scatter", False, lambda f, i: f(5, 12).scatter(1, i((5, 1), 12), 7.0)),
    ("scatter_add", False, lambda f, i: f(5, 12).scatter_add(1, i((5, 3), 12), f(5, 3))),
    ("tril_triu", False, lambda f, i: (f(6, 6).tril(), f(6, 6).triu(1))),
    (
        "repeat_interleave",
        False,
        lambda f, i: (f(3, 4).repeat_interleave(2, 0), f(3, 4).repeat(2, 1), f(3, 1).expand(3, 5) + 0),
    ),
    ("conv", False, lambda f, i: F.conv1d(f(2, 4, 9), f(6, 4, 3), f(6), padding=1)),
    ("unique", True, lambda f, i: i(20, 5).unique()),
    ("nonzero", True, lambda f, i: (f(4, 5) > 0).nonzero()),
    ("out", False, lambda f, i: torch.add(f(4, 5), f(4, 5), out=f(4, 5))),
    ("out_resized", False, lambda f, i: torch.mm(f(4, 5), f(5, 6), out=f(0))),
    ("foreach", False, lambda f, i: torch._foreach_add([f(3), f(4)], 1.0)),
    ("complex", False, lambda f, i: torch.view_as_real(torch.complex(f(5), f(5)).conj() * torch.complex(f(5), f(5)))),
    ("empty_tensor", False, lambda f, i: (f(0, 4) + 1, torch.cat([f(0, 4), f(2, 4)]), f(0, 4).sum(0))),
]


def _write_view(x: Any, rows: Any) -> Any:
    x[1:3].fill_(7)
    x[3:5] = rows
    x[:, 0] += 1
    return x


def _index_put(x: Any, index: Any, rows: Any) -> Any:
    x[index] = rows
    return x


def flat(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in flat(part)]


def run(body: Callable[[Make, Make], Any], device: str, dtype: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def below(shape: Any, n: int) -> Any:
        shape = shape if isinstance(shape, tuple) else (shape,)
        return torch.randint(0, n, shape, generator=generator).to(device)

    return flat(body(floats, below))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "waits", "body"), SAMPLES, ids=[name for name, _, _ in SAMPLES])
def test_an_operator_gives_the_values_of_the_cpu(name: str, waits: bool, body: Any, dtype: str) -> None:
    if name == "complex" and dtype == "bfloat16":
        pytest.skip("no such case: complex numbers of bfloat16 parts do not exist in torch")
    wanted = run(body, "cpu", getattr(torch, dtype))
    before = rt.calls()
    found = run(body, "npu", getattr(torch, dtype))
    after = rt.calls()
    assert (after[1] > before[1]) == waits, "asynchronous operators must not wait for the stream"
    assert len(found) == len(wanted)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for expected, result in zip(wanted, found, strict=True):
        assert result.device.type == "npu"
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(result.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


QUESTIONS: list[tuple[str, Callable[[str], Any]]] = [
    ("float_scalar", lambda d: torch.arange(4, device=d) + 0.5),
    ("int_scalar", lambda d: torch.arange(4, device=d) + 5),
    ("device_scalar", lambda d: torch.arange(4, device=d) + torch.tensor(5, device=d)),
    ("other_tensor", lambda d: torch.ones(4, 3, device=d) * torch.ones(4, 3, device=d).mul(2)),
    ("same_tensor", lambda d: (lambda x: torch.mul(x, x, out=x))(torch.full((4, 3), 2.0, device=d))),
    ("dense", lambda d: torch.ones(4, 3, device=d).exp()),
    ("transposed", lambda d: torch.ones(3, 4, device=d).t().exp()),
    ("one_row", lambda d: torch.ones(1, 3, device=d) + torch.ones(4, 1, device=d)),
    ("grown_out", lambda d: torch.add(torch.ones(4, device=d), 1, out=torch.empty(0, device=d))),
    ("right_out", lambda d: torch.add(torch.ones(4, device=d), 1, out=torch.empty(4, device=d))),
    ("dim_0", lambda d: torch.ones(4, 3, device=d).sum(0)),
    ("dim_1", lambda d: torch.ones(4, 3, device=d).sum(1)),
    ("kept_dim", lambda d: torch.ones(4, 3, device=d).sum(1, keepdim=True)),
    ("pieces", lambda d: torch.cat([torch.ones(2, device=d), torch.ones(3, device=d)])),
    ("other_pieces", lambda d: torch.cat([torch.ones(1, device=d), torch.ones(5, device=d)])),
]


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_same_question_asked_again_or_a_little_differently_gets_its_own_answer(default: Any) -> None:
    """Shapes that a meta kernel gave are remembered: for the same arguments and default dtype alone."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        for _ in range(2):
            known = rt.remembered_calls()
            for name, ask in QUESTIONS:
                expected, found = ask("cpu"), ask("npu")
                about = [(t.shape, t.stride(), t.dtype) for t in (expected, found)]
                assert about[0] == about[1], name
                assert torch.equal(found.cpu(), expected), name
        assert rt.remembered_calls() - known >= len(QUESTIONS), "in the second round every shape is known"
    finally:
        torch.set_default_dtype(before)


def test_what_was_refused_is_refused_again_after_the_right_call() -> None:
    for _ in range(2):
        assert (torch.ones(3, device="npu") + torch.ones(3, device="npu")).shape == (3,)
        with pytest.raises(RuntimeError, match="must match"):
            torch.ones(3, device="npu") + torch.ones(4, device="npu")


def test_the_comparison_sees_a_wrong_value() -> None:
    with pytest.raises(AssertionError):
        torch.testing.assert_close((torch.ones(3).npu() + 1e-3).cpu(), torch.ones(3), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_cpu() -> None:
    def gradients(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
        x = torch.randn(5, 8)
        model.to(device)(x.to(device)).pow(2).mean().backward()
        return [p.grad.cpu() for p in model.parameters()]

    for expected, found in zip(gradients("cpu"), gradients("npu"), strict=True):
        torch.testing.assert_close(found, expected)


def test_random_numbers_repeat_with_the_device_seed() -> None:
    def draw() -> list[Any]:
        return [
            torch.rand(8, device="npu").cpu(),
            torch.randn(8, device="npu").cpu(),
            torch.randperm(8, device="npu").cpu(),
        ]

    torch.npu.manual_seed(5)
    first = draw()
    torch.npu.manual_seed(5)
    again, other = draw(), draw()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_host_tensor_beside_device_tensors_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"aten::add.*expected all tensors on the same device, found npu:0 and cpu"):
        torch.ones(4, device="npu") + torch.ones(4)


# Each body writes the host scalar `c` from device tensors that `n` makes.
HOST_WRITES: list[tuple[str, Callable[[Any, Make], Any]]] = [
    ("add_", lambda c, n: c.add_(n(2.0))),
    ("add_", lambda c, n: _accumulate(c, n([1.0, 2.0]).sum())),
    ("mul_", lambda c, n: c.mul_(n(2.0))),
    ("fill_", lambda c, n: c.fill_(n(2.0))),
    ("lerp_", lambda c, n: c.lerp_(n(3.0), n(0.5))),
    ("add_", lambda c, n: torch._foreach_add_([c], [n(2.0)])),
    ("sum", lambda c, n: torch.sum(n([1.0, 2.0]), dim=0, out=c)),
    ("where", lambda c, n: torch.where(n(True), n(2.0), n(3.0), out=c)),
    ("index_put_", lambda c, n: c.index_put_((n(True),), n(5.0))),
]


@pytest.mark.parametrize(("name", "write"), HOST_WRITES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(HOST_WRITES)])
def test_a_host_scalar_that_would_be_written_is_refused(name: str, write: Any) -> None:
    scalar = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=rf"aten::\w*{name}.*expected all tensors on the same device.*and cpu"):
        write(scalar, lambda value: torch.tensor(value).npu())
    assert scalar.item() == 1.0


def test_a_host_scalar_beside_device_tensors_is_read() -> None:
    x = torch.arange(4.0)
    assert torch.equal((x.npu() * torch.tensor(3.0)).cpu(), x * 3)
    assert torch.equal(x.npu().add_(torch.tensor(3.0)).cpu(), x + 3)


def test_a_host_tensor_is_not_indexed_by_the_device_but_the_other_way_round() -> None:
    x, index = torch.arange(4.0), torch.tensor([2, 0])
    with pytest.raises(RuntimeError, match=r"aten::index.*expected all tensors on the same device.*and cpu.*'self'"):
        x[index.npu()]
    with pytest.raises(RuntimeError, match=r"aten::\w*index_put\w*.*expected all tensors on the same device.*and cpu"):
        x[index.npu()] = 5.0
    assert torch.equal(x, torch.arange(4.0))
    assert torch.equal(x.npu()[index].cpu(), x[index])


# What the CPU refuses because a written argument is also read: a resize of it, or an overlap. With it, what the refusal
# says on the software NPU when that is not what the CPU says.
NO_GROWTH = "a written argument that is also read has another shape than the result, and cannot grow"
REFUSED_WRITES: list[tuple[str, str, Callable[[Make], Any]]] = [
    ("logical_or_", "", lambda n: n([False] * 3).logical_or_(n([[False] * 3] * 2))),
    ("logical_and_", "", lambda n: n([1.0] * 3).logical_and_(n([[1.0] * 3] * 2))),
    ("logical_xor_", "", lambda n: n([1.0] * 3).logical_xor_(n([[1.0] * 3] * 2))),
    ("ldexp_", "", lambda n: n([1.0] * 3).ldexp_(n([[1.0] * 3] * 2))),
    ("addr_", f"aten::addr.out: {NO_GROWTH}", lambda n: n(1.0).addr_(n([1.0, 1.0]), n([1.0, 1.0]))),
    ("where", "", lambda n: _where_in_place(n(1.0), n([[True] * 2] * 2))),
    ("masked_select", "", lambda n: _select_in_place(n([1.0, 0.0, 2.0, 0.0]))),
    ("cat", f"aten::cat.out: {NO_GROWTH}", lambda n: _cat_in_place(n([1.0]))),
]


def _accumulate(total: Any, part: Any) -> Any:
    total += part
    return total


def _where_in_place(a: Any, mask: Any) -> Any:
    return torch.where(mask, a, a, out=a)


def _select_in_place(a: Any) -> Any:
    return torch.masked_select(a, a > 0, out=a)


def _cat_in_place(a: Any) -> Any:
    return torch.cat([a, a], out=a)


@pytest.mark.parametrize(("name", "why", "write"), REFUSED_WRITES, ids=[name for name, _, _ in REFUSED_WRITES])
def test_a_written_argument_that_is_also_read_is_refused_as_on_the_cpu(name: str, why: str, write: Any) -> None:
    made: list[Any] = []

    def make(value: Any) -> Any:
        made.append((torch.tensor(value), torch.tensor(value).npu()))
        return made[-1][1]

    with pytest.raises(RuntimeError) as refusal:
        write(torch.tensor)
    with pytest.raises(RuntimeError, match=re.escape(why or str(refusal.value).splitlines()[0])):
        write(make)
    torch.npu.synchronize()
    for before, after in made:
        assert torch.equal(after.cpu(), before), "what is refused changes nothing"


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch.sort(x, out=(x, torch.empty(0, dtype=torch.long, device=x.device)))[0],
        lambda x: torch.linalg.inv(x, out=x),
        lambda x: torch.mul(x, 2, out=x[:0]),
        lambda x: torch.histc(x, 9, -2, 2, out=x.view(9)),
    ],
    ids=["add", "sort", "inv", "resized_view", "histc"],
)
def test_an_out_argument_that_is_also_read_gives_the_values_of_the_cpu(write: Any) -> None:
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    on_device = x.npu()
    wanted, found = write(x), write(on_device)
    torch.testing.assert_close(found.cpu(), wanted)
    torch.testing.assert_close(on_device.cpu(), x)


def test_an_operator_with_out_arguments_reads_what_else_it_writes() -> None:
    def statistics(device: str) -> list[Any]:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(device)
        mean, variance = torch.full((3,), 5.0).to(device), torch.full((3,), 2.0).to(device)
        out, saved_mean, saved_invstd = (torch.empty(0, device=device) for _ in range(3))
        torch.ops.aten._native_batch_norm_legit.out(
            x, None, None, mean, variance, True, 0.1, 1e-5, out=out, save_mean=saved_mean, save_invstd=saved_invstd
        )
        return [tensor.cpu() for tensor in (mean, variance, out, saved_mean, saved_invstd)]

    for expected, found in zip(statistics("cpu"), statistics("npu"), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("adjoint", [False, True])
def test_a_result_that_the_cpu_conjugates_by_a_bit_has_its_values_in_the_out_argument(
    left: bool, adjoint: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    factors, pivots = torch.linalg.lu_factor(torch.randn(3, 3, dtype=torch.complex64, generator=generator))
    right = torch.randn((3, 4) if left else (4, 3), dtype=torch.complex64, generator=generator)

    def solve(device: str) -> Any:
        out = torch.empty(0, dtype=torch.complex64, device=device)
        torch.linalg.lu_solve(
            factors.to(device), pivots.to(device), right.to(device), left=left, adjoint=adjoint, out=out
        )
        return out.cpu().resolve_conj()

    torch.testing.assert_close(solve("npu"), solve("cpu"), rtol=1e-4, atol=1e-4)


def test_wrong_shapes_raise_in_the_caller_not_on_the_stream() -> None:
    with pytest.raises(RuntimeError, match="size of tensor a"):
        torch.ones(4, device="npu") + torch.ones(5, device="npu")
    with pytest.raises(RuntimeError, match=r"size of tensor a|shape"):
        torch.ones(4, device="npu").add_(torch.ones(5, device="npu"))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("npu::npu_silu", lambda n, x: n.npu_silu(x)),
        ("npu::npu_geglu", lambda n, x: n.npu_geglu(x)),
        ("npu::npu_deep_norm", lambda n, x: n.npu_deep_norm(x, x, x[0], x[0])),
        ("atb::_npu_reshape_and_cache", lambda n, x: n._npu_reshape_and_cache(x, x, x, x, x[0].int())),
        ("aten::_thnn_fused_lstm_cell", lambda n, x: torch.ops.aten._thnn_fused_lstm_cell(x, x, x, None, None)),
    ],
)
def test_an_operator_without_a_body_raises_with_its_name(name: str, call: Any) -> None:
    import torch_npu

    with pytest.raises(NotImplementedError, match=re.escape(name)):
        call(torch_npu, torch.ones(4, 8, device="npu"))


def test_a_device_operator_that_is_reached_in_another_way_raises_with_its_name() -> None:
    import torch_npu

    with pytest.raises(RuntimeError, match="Identity"):
        torch_npu.npu_format_cast(torch.ones(32, 32, device="npu"), 29)


#: What may keep torch_npu's own kernel: it needs no device operator. A view, an allocation, a setting of the host.
HOST_SIDE = re.compile(
    r"aten::(_local_scalar_dense|record_stream|is_pinned|_pin_memory|pin_memory|empty\.|empty_strided|new_empty_strided|"
    r"set_data|set_\.|is_set_to|resize_|resize_as_|_copy_from|_has_compatible_shallow_copy_type|_resize_output_)"
    r"|npu::(.*_(infer_output|get_max_workspace)|.*format_cast.*|get_npu_format|get_storage_size|.*with_format.*|.*swapped_memory|"
    r"npu_change_data_ptr|copy_memory_|npu_reshape.*|npu_prefetch|set_op_timeout_ms|super_kernel_scope_.*|.*_worker_scheduler_?|"
    r"print_npugraph_tensor|save_npugraph_tensor.*)"
)


def device_kernels(names: list[str], allowed: re.Pattern[str] = HOST_SIDE) -> list[str]:
    """Operators whose PrivateUse1 kernel is torch_npu's, although they are neither views nor host-side."""
    left = []
    for name in names:
        dump = torch._C._dispatch_dump(name)
        active = next((line for line in dump.splitlines() if line.startswith("PrivateUse1:")), "")
        schema = next((line for line in dump.splitlines() if line.startswith("schema:")), "")
        returns = schema.rpartition("->")[2]
        view = re.search(r"\(\w+( -> \*)?\)", returns) is not None
        in_place_view = "inplace_view" in str(operator_tags(name))
        if "torch_npu" in active and not view and not in_place_view and not allowed.match(name):
            left.append(name)
    return left


def operator_tags(name: str) -> list[Any]:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return list(getattr(getattr(getattr(torch.ops, namespace), base), overload or "default").tags)
    except AttributeError:
        return []


def test_no_operator_keeps_a_kernel_that_would_need_the_device() -> None:
    names = [
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
        if name.partition("::")[0] in ("aten", "npu", "atb") and "schema: (none)" not in torch._C._dispatch_dump(name)
    ]
    assert len(names) > 1500
    assert device_kernels(names) == []
    unlisted = device_kernels(names, allowed=re.compile("npu::"))
    assert "aten::_local_scalar_dense" in unlisted, "the search must see a kernel of torch_npu that no list excuses"


def test_zeros_ignore_pin_memory_as_torch_npu_does_and_empty_refuses_it() -> None:
    found = torch.zeros((2, 3), dtype=torch.int32, device="npu", pin_memory=True)
    assert found.device.type == "npu"
    assert found.tolist() == [[0] * 3] * 2
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(2, device="npu", pin_memory=True)


@pytest.mark.slow
def test_a_transformers_model_generates_the_tokens_of_the_cpu() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    prompt = torch.randint(0, 128, (1, 40))
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        wanted = model.generate(prompt, **settings)
        found = model.to("npu").generate(prompt.npu(), **settings)
    assert torch.equal(found.cpu(), wanted)
