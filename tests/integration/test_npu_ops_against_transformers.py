# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The software NPU's operators, put together as vllm-ascend does, against transformers' DeepSeek-V4.

The definitions in test_npu_ops_*.py are ours; transformers' model is another reading of the same paper. Both sides
get the same weights and tokens. What vllm-ascend does between the operators (models/deepseek_v4.py and
ops/fused_moe) is written out here. Not shown: the caches of the engine, which are another test's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime]

Tensor = Any
TOKENS, HIDDEN, STREAMS, EXPERTS, TOP_K, VOCABULARY = 11, 64, 4, 16, 6, 50
#: float32 sums in another order.
TIGHT = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _small_model() -> Iterator[None]:
    torch.ops.softnpu.waive("npu_hc_pre_v2.d", True)
    with torch.no_grad():
        yield
    torch.ops.softnpu.waive("npu_hc_pre_v2.d", False)


@pytest.fixture(scope="module")
def config() -> Any:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    return DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, swiglu_limit=1.5, mlp_layer_types=["hash_moe", "moe"],
        layer_types=["sliding_attention"] * 2,
    )  # fmt: skip


def filled(module: Any, seed: int) -> Any:
    """The module with random weights that bfloat16 can hold, so that both sides have the same in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("tid2eid"):
            rows = [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(VOCABULARY)]
            tensor.data.copy_(torch.stack(rows))
        elif tensor.is_floating_point():
            scale = 1.0 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5 * 2
            tensor.data.copy_((torch.randn(tensor.shape, generator=generator) * scale).bfloat16())
    return module.float().eval()


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ids_of(seed: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------- as vllm-ascend does


def hc_pre(module: Any, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops._C_ascend.npu_hc_pre_v2(
        streams, module.fn.data.npu(), module.scale.data.npu(), module.base.data.npu(), STREAMS,
        module.hc_sinkhorn_iters, module.input_norm.eps, module.hc_eps,
    )  # fmt: skip


def hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.ops._C_ascend.npu_hc_post(x[None], residual[None], post[None], comb[None])[0]


def moe(block: Any, x: Tensor, ids: Tensor, dtype: Any) -> Tensor:
    """select_experts, TokenDispatcherWithAllGather, unquant_apply_mlp, and AscendSiluAndMulWithClamp."""
    import torch_npu

    gate, limit = block.gate, block.experts.limit
    hashed = {"input_ids": ids, "tid2eid": gate.tid2eid.int().npu()} if block.is_hash else {}
    bias = None if block.is_hash else gate.e_score_correction_bias.npu()
    weights, experts, _ = torch.ops._C_ascend.moe_gating_top_k_hash(
        x=x.float() @ gate.weight.data.float().npu().t(), k=TOP_K, bias=bias, routed_scaling_factor=1.5, eps=1e-20,
        group_select_mode=1, renorm=0, norm_type=2, **hashed,
    )  # fmt: skip
    rows, row_idx, counts, _ = torch.ops._C_ascend.npu_moe_init_routing_custom(
        x, experts, active_num=x.shape[0] * TOP_K, expert_num=EXPERTS, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[0, EXPERTS], quant_mode=-1,
    )  # fmt: skip
    common = {"split_item": 2, "group_list_type": 1, "group_type": 0, "group_list": counts}
    w13, w2 = (w.data.to(dtype).npu().transpose(1, 2) for w in (block.experts.gate_up_proj, block.experts.down_proj))
    both = torch_npu.npu_grouped_matmul([rows], [w13], **common)[0]
    both = torch.cat([both[:, :32].clamp(max=limit), both[:, 32:].clamp(-limit, limit)], -1)
    out = torch_npu.npu_grouped_matmul([torch_npu.npu_swiglu(both)], [w2], **common)[0]
    routed = torch_npu.npu_moe_token_unpermute(out, torch.abs(row_idx), probs=weights)
    shared = block.shared_experts
    gate_up = torch.cat([shared.gate_proj.weight.data, shared.up_proj.weight.data]).to(dtype).npu()
    both = x @ gate_up.t()
    both = torch.cat([both[:, :32].clamp(max=limit), both[:, 32:].clamp(-limit, limit)], -1)
    return routed + torch_npu.npu_swiglu(both) @ shared.down_proj.weight.data.to(dtype).npu().t()


# ---------------------------------------------------------------------------------------------- the comparisons


def test_hyper_connections_are_those_of_transformers(config: Any) -> None:
    module = filled(modeling.DeepseekV4HyperConnection(config), 3)
    streams = random(TOKENS, STREAMS, HIDDEN)
    y, post, comb = hc_pre(module, streams.npu())
    wanted_post, wanted_comb, wanted_y = module(streams.float()[None])
    torch.testing.assert_close(post.cpu(), wanted_post[0], **TIGHT)
    torch.testing.assert_close(comb.cpu(), wanted_comb[0], **TIGHT)
    torch.testing.assert_close(y.cpu().float(), wanted_y[0], rtol=2**-8, atol=1e-5)

    block = random(TOKENS, HIDDEN, seed=4).float()
    joined = hc_post(block.npu(), streams.float().npu(), post, comb)
    wanted = wanted_post.unsqueeze(-1) * block[None].unsqueeze(-2)
    wanted = wanted + torch.matmul(wanted_comb.transpose(-1, -2), streams.float()[None])
    torch.testing.assert_close(joined.cpu(), wanted[0], **TIGHT)


@pytest.mark.parametrize("layer", [0, 1], ids=["hash", "top-k"])
def test_a_mixture_of_experts_is_that_of_transformers(config: Any, layer: int) -> None:
    block = filled(modeling.DeepseekV4SparseMoeBlock(config, layer), 5 + layer)
    x, ids = random(TOKENS, HIDDEN).float(), ids_of()
    found = moe(block, x.npu(), ids.npu(), torch.float32)
    torch.testing.assert_close(found.cpu(), block(x[None], input_ids=ids[None])[0], **TIGHT)


@pytest.mark.parametrize("layer", [0, 1], ids=["hash", "top-k"])
def test_the_feed_forward_half_of_a_layer_is_that_of_transformers(config: Any, layer: int) -> None:
    """In bfloat16, as served; what is compared is the error of the whole, which bfloat16 makes a per cent."""
    import torch_npu

    block = filled(modeling.DeepseekV4SparseMoeBlock(config, layer), 7 + layer)
    connection = filled(modeling.DeepseekV4HyperConnection(config), 9)
    norm = filled(modeling.DeepseekV4RMSNorm(HIDDEN, config.rms_norm_eps), 10)
    streams, ids = random(TOKENS, STREAMS, HIDDEN), ids_of()

    y, post, comb = hc_pre(connection, streams.npu())
    y = torch_npu.npu_rms_norm(y, norm.weight.data.bfloat16().npu(), config.rms_norm_eps)[0]
    found = hc_post(moe(block, y, ids.npu(), torch.bfloat16), streams.npu(), post, comb).cpu().float()

    wanted_post, wanted_comb, collapsed = connection(streams.float()[None])
    out = block(norm(collapsed), input_ids=ids[None])
    wanted = wanted_post.unsqueeze(-1) * out.unsqueeze(-2)
    wanted = (wanted + torch.matmul(wanted_comb.transpose(-1, -2), streams.float()[None]))[0]
    # By token: where rounding makes the router choose another expert, that token would show.
    error = (found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    assert error.max() < 0.02, error


def test_the_comparison_sees_a_wrong_expert(config: Any) -> None:
    block = filled(modeling.DeepseekV4SparseMoeBlock(config, 0), 5)
    x, ids = random(TOKENS, HIDDEN).float(), ids_of()
    wanted = block(x[None], input_ids=ids[None])[0]
    first = block.gate.tid2eid[ids[3], 0].clone()
    block.gate.tid2eid[ids[3], 0] = next(e for e in range(EXPERTS) if e not in block.gate.tid2eid[ids[3]])
    found = moe(block, x.npu(), ids.npu(), torch.float32).cpu()
    assert first != block.gate.tid2eid[ids[3], 0]
    assert not torch.allclose(found[3], wanted[3], rtol=1e-2)
