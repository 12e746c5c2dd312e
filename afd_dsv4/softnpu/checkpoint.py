# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Writes a small DeepSeek-V4 checkpoint with random weights.

Problem: the real engine loads a checkpoint, and DeepSeek-V4's are hundreds of gigabytes.
Way: ``write`` makes ``config.json`` and ``model.safetensors`` with the names and shapes that vllm-ascend 0.23.0 loads
(models/deepseek_v4.py and deepseek_v4_mtp.py: load_weights), every kind of layer among them. Weights are a function of
the geometry and the seed. What is small here breaks limits of the real operators; ``waivers`` names them.
Not done: a tokenizer (prompts are token ids), quantised weights, weights that mean anything.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HEAD_DIM, ROPE_DIM, INDEX_HEAD_DIM, STREAMS = 512, 64, 128, 4
"""Sizes of the published models that the operators or the KV groups do not let go."""


@dataclass(frozen=True)
class Geometry:
    """A small DeepSeek-V4.

    Attributes:
        ratios: one layer each: 0 (SWA alone), 4 (C4, with indexer) or 128 (C128).
        hash_layers: how many of the first layers choose their experts by the token id.
        hidden: hidden size; a multiple of 512 from 1024 on.
        heads: attention heads; a multiple of 4 on every rank.
        experts, chosen: routed experts of a layer, and how many a token goes to.
        vocabulary: token ids.
        index_topk: compressed rows that C4 attends to; 512 or 1024.
        mtp: whether there is an MTP layer behind the last one.
        positions: the longest sequence the configuration allows.
    """

    ratios: tuple[int, ...] = (0, 4, 128)
    hash_layers: int = 1
    hidden: int = 1024
    heads: int = 8
    experts: int = 4
    chosen: int = 2
    vocabulary: int = 128
    index_topk: int = 512
    mtp: bool = False
    positions: int = 65536

    def __post_init__(self) -> None:
        if not self.ratios or not set(self.ratios) <= {0, 4, 128}:
            raise ValueError(f"ratios: found {self.ratios}, expected at least one of 0, 4 and 128")
        if self.hidden < 1024 or self.hidden % 512:
            raise ValueError(f"hidden: found {self.hidden}, expected a multiple of 512 from 1024 on")
        if self.heads < 4 or self.heads % 4:
            raise ValueError(f"heads: found {self.heads}, expected a multiple of 4")
        if not 0 < self.chosen <= self.experts:
            raise ValueError(f"chosen: found {self.chosen} of {self.experts} experts")

    @property
    def waivers(self) -> tuple[str, ...]:
        """The limits of operators that this geometry breaks, for SOFTNPU_WAIVE."""
        small = [] if self.hidden in (4096, 7168) else ["npu_hc_pre_v2.d"]
        small += ["npu_vllm_quant_lightning_indexer.heads"]
        return tuple(small)

    def config(self) -> dict[str, Any]:
        """``config.json``."""
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "moe_intermediate_size": 64,
            "num_hidden_layers": len(self.ratios),
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": HEAD_DIM,
            "qk_rope_head_dim": ROPE_DIM,
            "q_lora_rank": 64,
            "o_lora_rank": 64,
            "o_groups": 2,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.chosen,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
            "num_hash_layers": self.hash_layers,
            "compress_ratios": [*self.ratios, *([0] if self.mtp else [])],
            "compress_rope_theta": 160000.0,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 16,
                "original_max_position_embeddings": self.positions // 16,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "max_position_embeddings": self.positions,
            "sliding_window": 128,
            "index_n_heads": 4,
            "index_head_dim": INDEX_HEAD_DIM,
            "index_topk": self.index_topk,
            "hc_mult": STREAMS,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "num_nextn_predict_layers": int(self.mtp),
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        }


class _Weights:
    """Random tensors by name: bf16 matrices of unit gain, fp32 vectors, norms of ones."""

    def __init__(self, seed: int) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Any] = {}

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        t = self._torch.randn(*shape, generator=self._generator) * (gain * shape[-1] ** -0.5)
        self.tensors[name] = t.to(self._torch.bfloat16)

    def float32(self, name: str, *shape: int, deviation: float = 0.1) -> None:
        self.tensors[name] = self._torch.randn(*shape, generator=self._generator) * deviation

    def ones(self, name: str, size: int) -> None:
        self.tensors[name] = self._torch.ones(size, dtype=self._torch.bfloat16)

    def choices(self, name: str, rows: int, experts: int, chosen: int) -> None:
        torch = self._torch
        row = [torch.randperm(experts, generator=self._generator)[:chosen] for _ in range(rows)]
        self.tensors[name] = torch.stack(row).to(torch.int32)


def _compressor(w: _Weights, prefix: str, ratio: int, dim: int, hidden: int) -> None:
    width = dim * (2 if ratio == 4 else 1)
    w.float32(f"{prefix}ape", ratio, width)
    w.matrix(f"{prefix}wkv.weight", width, hidden)
    w.matrix(f"{prefix}wgate.weight", width, hidden)
    w.ones(f"{prefix}norm.weight", dim)


def _hyper_connection(w: _Weights, prefix: str, outputs: int, scales: int, hidden: int) -> None:
    w.float32(f"{prefix}_fn", outputs, STREAMS * hidden, deviation=(STREAMS * hidden) ** -0.5)
    w.float32(f"{prefix}_base", outputs)
    w.float32(f"{prefix}_scale", scales, deviation=1.0)


def _layer(w: _Weights, prefix: str, ratio: int, hashed: bool, g: Geometry) -> None:
    config = g.config()
    q_rank, o_rank, groups, inner = (
        config[k] for k in ("q_lora_rank", "o_lora_rank", "o_groups", "moe_intermediate_size")
    )
    for part in ("attn", "ffn"):
        _hyper_connection(w, f"{prefix}hc_{part}", (2 + STREAMS) * STREAMS, 3, g.hidden)
        w.ones(f"{prefix}{part}_norm.weight", g.hidden)
    attn = f"{prefix}attn."
    w.matrix(f"{attn}wq_a.weight", q_rank, g.hidden)
    w.ones(f"{attn}q_norm.weight", q_rank)
    w.matrix(f"{attn}wq_b.weight", g.heads * HEAD_DIM, q_rank)
    w.matrix(f"{attn}wkv.weight", HEAD_DIM, g.hidden)
    w.ones(f"{attn}kv_norm.weight", HEAD_DIM)
    w.matrix(f"{attn}wo_a.weight", groups * o_rank, g.heads * HEAD_DIM // groups)
    w.matrix(f"{attn}wo_b.weight", g.hidden, groups * o_rank)
    w.float32(f"{attn}attn_sink", g.heads)
    if ratio:
        _compressor(w, f"{attn}compressor.", ratio, HEAD_DIM, g.hidden)
    if ratio == 4:
        heads = config["index_n_heads"]
        w.matrix(f"{attn}indexer.wq_b.weight", heads * INDEX_HEAD_DIM, q_rank)
        w.matrix(f"{attn}indexer.weights_proj.weight", heads, g.hidden)
        _compressor(w, f"{attn}indexer.compressor.", ratio, INDEX_HEAD_DIM, g.hidden)
    ffn = f"{prefix}ffn."
    w.matrix(f"{ffn}gate.weight", g.experts, g.hidden)
    if hashed:
        w.choices(f"{ffn}gate.tid2eid", g.vocabulary, g.experts, g.chosen)
    else:
        w.float32(f"{ffn}gate.bias", g.experts)
    for expert in (*(f"{ffn}experts.{i}." for i in range(g.experts)), f"{ffn}shared_experts."):
        w.matrix(f"{expert}w1.weight", inner, g.hidden)
        w.matrix(f"{expert}w3.weight", inner, g.hidden)
        w.matrix(f"{expert}w2.weight", g.hidden, inner)


def write(folder: Path, geometry: Geometry, seed: int = 0) -> Path:
    """Write the checkpoint into ``folder`` (made if absent), unless this very one is there already.

    Args:
        folder: gets config.json, model.safetensors and afd_dsv4.json, which says what they were made from.
        geometry: the model.
        seed: of the weights.

    Returns:
        ``folder``.
    """
    # A torch_npu that cannot load, as outside the software NPU, would break the import of torch itself.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from safetensors.torch import save_file

    made_from = json.dumps({"geometry": asdict(geometry), "seed": seed})
    note = folder / "afd_dsv4.json"
    if note.is_file() and note.read_text() == made_from:
        return folder
    w = _Weights(seed)
    g = geometry
    w.matrix("embed.weight", g.vocabulary, g.hidden, gain=g.hidden**0.5)
    w.matrix("head.weight", g.vocabulary, g.hidden)
    w.ones("norm.weight", g.hidden)
    _hyper_connection(w, "hc_head", STREAMS, 1, g.hidden)
    for i, ratio in enumerate(g.ratios):
        _layer(w, f"layers.{i}.", ratio, i < g.hash_layers, g)
    if g.mtp:
        for name in ("e_proj", "h_proj"):
            w.matrix(f"mtp.0.{name}.weight", g.hidden, g.hidden)
        for name in ("enorm", "hnorm", "norm"):
            w.ones(f"mtp.0.{name}.weight", g.hidden)
        _hyper_connection(w, "mtp.0.hc_head", STREAMS, 1, g.hidden)
        w.tensors["mtp.0.head.weight"] = w.tensors["head.weight"].clone()
        w.tensors["mtp.0.emb.tok_emb.weight"] = w.tensors["embed.weight"].clone()
        _layer(w, "mtp.0.", 0, False, g)
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    save_file(w.tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(g.config(), indent=1))
    note.write_text(made_from)
    return folder
