# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The software NPU's operators, put together as vllm-ascend does, against transformers' DeepSeek-V4.

The definitions in test_npu_ops_*.py are ours; transformers' model is another reading of the same paper. Both sides
get the same weights and tokens. What vllm-ascend does between the operators (models/deepseek_v4.py and
ops/fused_moe, attention/dsa_v1.py) is written out here. Not shown: the engine's own tables and tests of its order.
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
    limits = ("npu_hc_pre_v2.d", "compressor.hidden")
    for limit in limits:
        torch.ops.softnpu.waive(limit, True)
    with torch.no_grad():
        yield
    for limit in limits:
        torch.ops.softnpu.waive(limit, False)


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
        elif not name.endswith("inv_freq"):
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


# ---------------------------------------------------------------------------------------------- attention

HEADS, HEAD_DIM, ROPE, INDEX_HEADS, INDEX_DIM, PAGE, LENGTH = 4, 512, 64, 64, 128, 32, 297
LAYERS = {1: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def attention_config(ratio: int, index_topk: int = 512) -> Any:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, moe_intermediate_size=32, num_hidden_layers=1, n_routed_experts=4,
        num_attention_heads=HEADS, head_dim=HEAD_DIM, q_lora_rank=48, o_groups=2, o_lora_rank=16, index_topk=index_topk,
        index_n_heads=INDEX_HEADS, index_head_dim=INDEX_DIM, layer_types=[LAYERS[ratio]], max_position_embeddings=512,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


class Attention:
    """AscendDSAImpl._forward_prefill for one request, chunk by chunk, with the pools of one layer."""

    def __init__(self, module: Any, rotary: Any, ratio: int) -> None:
        self.m, self.ratio = module, ratio
        positions = torch.arange(512)[None]
        halves = rotary(torch.zeros(1), position_ids=positions, layer_type=module.rope_layer_type)
        self.cos, self.sin = (h[0].repeat_interleave(2, -1).bfloat16().npu() for h in halves)
        self.table = torch.arange(1, 17, dtype=torch.int32)[None].npu()  # page 0 is no page
        self.swa, self.compressed = self.pool(HEAD_DIM, torch.bfloat16), self.pool(HEAD_DIM, torch.bfloat16)
        self.keys, self.key_scales = self.pool(INDEX_DIM, torch.int8), self.pool(1, torch.float16)
        self.states: dict[int, Tensor] = {}

    @staticmethod
    def pool(width: int, dtype: Any) -> Tensor:
        return torch.zeros(17, PAGE, 1, width, dtype=dtype, device="npu")

    @staticmethod
    def weight(linear: Any) -> Tensor:
        return linear.weight.data.bfloat16().npu()

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x, self.weight(norm), norm.variance_epsilon)[0]

    def rotate(self, x: Tensor, rows: slice, sign: float = 1.0) -> None:
        cos, sin = self.cos[rows, None, None], self.sin[rows, None, None] * sign
        width = x.shape[-1]
        torch.ops._C_ascend.inplace_partial_rotary_mul(
            x.unsqueeze(1), cos, sin, rotary_mode="interleave", partial_slice=[width - ROPE, width]
        )

    def compress(self, module: Any, x: Tensor, width: int, cu: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed rows and where they belong."""
        coff = 2 if self.ratio == 4 else 1
        if width not in self.states:
            self.states[width] = torch.zeros(64, 8, 2 * coff * width, device="npu")
        rows = min(x.shape[0], x.shape[0] // self.ratio + 1)
        cos, sin, slots = torch.ops._C_ascend.compressor_metadata(
            self.cos, self.sin, cu, start, self.table, PAGE, 2, self.ratio, rows, 1
        )
        out = torch.ops._C_ascend.compressor(
            x, self.weight(module.kv_proj), self.weight(module.gate_proj), self.states[width],
            module.position_bias.data.npu(), self.weight(module.kv_norm), sin.view(-1, ROPE), cos.view(-1, ROPE),
            state_block_table=torch.arange(1, 64, dtype=torch.int32, device="npu")[None], cu_seqlens=cu, seqused=None,
            start_pos=start, rope_head_dim=ROPE, cmp_ratio=self.ratio, coff=coff, norm_eps=1e-6, rotary_mode=2,
            cache_mode=1,
        )  # fmt: skip
        return out, slots

    def choose(self, x: Tensor, qr: Tensor, rows: slice, cu: Tensor, start: Tensor, count: int) -> Tensor:
        """The indexer. The Hadamard rotation of both sides keeps their products, and is left out."""
        module = self.m.compressor.indexer
        q = (qr @ self.weight(module.q_b_proj).t()).view(-1, INDEX_HEADS, INDEX_DIM)
        self.rotate(q, rows)
        keys, slots = self.compress(module, x, INDEX_DIM, cu, start)
        key, scale = torch.ops.npu.npu_dynamic_quant(keys)
        torch.ops._C_ascend.npu_scatter_nd_update_v2(self.keys, slots, key)
        torch.ops._C_ascend.npu_scatter_nd_update_v2(self.key_scales, slots, scale.half()[:, None, None])
        query, query_scale = torch.ops.npu.npu_dynamic_quant(q)
        weights = x @ self.weight(module.scorer.weights_proj).t() * (INDEX_DIM**-0.5 * INDEX_HEADS**-0.5)
        lengths = torch.tensor([rows.stop], dtype=torch.int32, device="npu")
        common = {"actual_seq_lengths_query": cu[1:].clone(), "actual_seq_lengths_key": lengths, "cmp_ratio": 4}
        common |= {"layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": count, "sparse_mode": 3}
        metadata = torch.ops._C_ascend.npu_vllm_quant_lightning_indexer_metadata(
            num_heads_q=INDEX_HEADS, num_heads_k=1, head_dim=INDEX_DIM, query_quant_mode=0, key_quant_mode=0,
            batch_size=1, max_seqlen_q=x.shape[0], max_seqlen_k=rows.stop, device="npu:0", **common,
        )  # fmt: skip
        return torch.ops._C_ascend.npu_vllm_quant_lightning_indexer(
            query=query, key=self.keys, weights=weights.half(), query_dequant_scale=query_scale.half(),
            key_dequant_scale=self.key_scales.squeeze(-2).squeeze(-1).unsqueeze(-1), block_table=self.table,
            metadata=metadata, query_quant_mode=0, key_quant_mode=0, **common,
        )[0]  # fmt: skip

    def __call__(self, x: Tensor, first: int, index_topk: int = 512) -> tuple[Tensor, Tensor | None]:
        m, rows = self.m, slice(first, first + x.shape[0])
        cu = torch.tensor([0, x.shape[0]], dtype=torch.int32, device="npu")
        start = torch.tensor([first], dtype=torch.int32, device="npu")
        qr = self.norm(x @ self.weight(m.q_a_proj).t(), m.q_a_norm)
        q = (qr @ self.weight(m.q_b_proj).t()).view(-1, HEADS, HEAD_DIM).float()
        q = (q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
        self.rotate(q, rows)
        kv = self.norm(x @ self.weight(m.kv_proj).t(), m.kv_norm).view(-1, 1, HEAD_DIM)
        self.rotate(kv, rows)
        at = torch.arange(rows.start, rows.stop, dtype=torch.int32)
        torch.ops._C_ascend.npu_scatter_nd_update_v2(self.swa, torch.stack([at // PAGE + 1, at % PAGE], 1).npu(), kv)
        chosen = None
        more: dict[str, Any] = {}
        if self.ratio > 1:
            if self.ratio == 4:
                chosen = more["cmp_sparse_indices"] = self.choose(x, qr, rows, cu, start, index_topk)
            compressed, slots = self.compress(m.compressor, x, HEAD_DIM, cu, start)
            torch.ops._C_ascend.npu_scatter_nd_update_v2(self.compressed, slots, compressed)
            more |= {"cmp_kv": self.compressed, "cmp_block_table": self.table}
        lengths = torch.tensor([rows.stop], dtype=torch.int32, device="npu")
        common = {"cu_seqlens_q": cu, "seqused_kv": lengths, "cmp_ratio": self.ratio, "ori_mask_mode": 4}
        common |= {"cmp_mask_mode": 3, "ori_win_left": 127, "ori_win_right": 0, "layout_q": "TND", "layout_kv": "PA_ND"}
        metadata = torch.ops._C_ascend.npu_sparse_attn_sharedkv_metadata(
            num_heads_q=HEADS, num_heads_kv=1, head_dim=HEAD_DIM, batch_size=1, max_seqlen_q=x.shape[0],
            max_seqlen_kv=rows.stop, cmp_topk=index_topk if self.ratio == 4 else 0, has_ori_kv=True,
            has_cmp_kv=self.ratio > 1, device="npu:0", **common,
        )  # fmt: skip
        out = torch.ops._C_ascend.npu_sparse_attn_sharedkv(
            q, ori_kv=self.swa, ori_block_table=self.table, sinks=m.sinks.data.npu(), metadata=metadata,
            softmax_scale=m.scaling, **common, **more,
        )[0]  # fmt: skip
        self.rotate(out, rows, -1.0)
        wo_a = self.weight(m.o_a_proj).view(2, 16, -1).transpose(1, 2).contiguous()
        out = torch.ops.npu.npu_transpose_batchmatmul(
            out.view(x.shape[0], 2, -1), wo_a, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
        return out.reshape(x.shape[0], -1) @ self.weight(m.o_b_proj).t(), chosen


def causal_mask() -> Tensor:
    ages = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return torch.zeros(LENGTH, LENGTH).masked_fill((ages < 0) | (ages > 127), float("-inf"))[None, None]


def attention_error(ratio: int, chunks: list[int], forget: bool = False) -> float:
    """The worst token's relative error against transformers; with `forget`, of a compressor that keeps no state."""
    config = attention_config(ratio)
    module = filled(modeling.DeepseekV4Attention(config, 0), 11)
    rotary = modeling.DeepseekV4RotaryEmbedding(config)
    x, positions = random(LENGTH, HIDDEN), torch.arange(LENGTH)[None]
    attention, found, first = Attention(module, rotary, ratio), [], 0
    for count in chunks:
        found.append(attention(x[first : first + count].npu(), first)[0].cpu().float())
        first += count
        if forget:
            for state in attention.states.values():
                state.zero_()
    embeddings = {name: rotary(x.float(), position_ids=positions, layer_type=name) for name in ("main", "compress")}
    wanted = module(x.float()[None], embeddings, positions, causal_mask())[0][0]
    return float(((torch.cat(found) - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("chunks", [[LENGTH], [130, 1, 166]], ids=["at-once", "chunks"])
def test_attention_is_that_of_transformers(ratio: int, chunks: list[int]) -> None:
    assert attention_error(ratio, chunks) < 0.015


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_comparison_sees_a_compressor_that_forgets(ratio: int) -> None:
    assert attention_error(ratio, [130, 1, 166], forget=True) > 0.025


def test_the_indexer_chooses_what_transformers_chooses() -> None:
    """Queries and keys of int8 may put two nearly equal scores in another order, so a few choices may differ."""
    config, topk = attention_config(4, index_topk=512), 8
    module = filled(modeling.DeepseekV4Attention(config, 0), 11)
    rotary = modeling.DeepseekV4RotaryEmbedding(config)
    x, positions = random(LENGTH, HIDDEN), torch.arange(LENGTH)[None]
    module.compressor.indexer.index_topk = topk
    qr = module.q_a_norm(module.q_a_proj(x.float()[None]))
    wanted = module.compressor.indexer(x.float()[None], qr, positions, None, 0)[0]
    attention = Attention(module, rotary, 4)
    rows = slice(0, LENGTH)
    cu, start = torch.tensor([0, LENGTH], dtype=torch.int32).npu(), torch.zeros(1, dtype=torch.int32, device="npu")
    found = attention.choose(x.npu(), qr[0].bfloat16().npu(), rows, cu, start, topk)[:, 0].cpu()
    agree = total = 0
    for row in range(LENGTH):
        one, other = ({int(i) for i in t[row] if i >= 0} for t in (found, wanted))
        assert len(one) == len(other) == min(topk, (row + 1) // 4)
        agree, total = agree + len(one & other), total + len(one)
    assert agree / total > 0.97, agree / total
