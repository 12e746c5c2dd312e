# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A tiny DeepSeek-V4 of transformers whose compressed rows can come from outside.

Problem: token parity needs a model that somebody else wrote, small enough for two CPU cores, in which a wrong
compressed row visibly changes the tokens.
Way: `DeepseekV4ForCausalLM` of transformers, FP32, random weights from one seed, with the compressor sizes of the
released models (head dims 512 and 128, rotated part 64, ratios 4 and 128, YaRN) and everything else small. Its code
stays as shipped. Two methods of its *cache* are replaced: one keeps no compressor state and hands the model an empty
chunk, the other appends the rows that `forward_chunks` was given. So projection, APE, pooling, normalisation, RoPE and
history of all compressors come from outside; SWA, indexer scoring, attention, experts and logits stay with
transformers. Several requests advance layer by layer, so that one launch per compressor serves all of them.
Not here: who computes the rows, chunking, comparison (`tokens.py`).

Two choices keep discrete decisions out of a rounding comparison, and are the model's, not the plugin's: experts are
picked by token (DeepSeek-V4's hash layers), and only the last layer's indexer selects (`SELECTED_ROWS`); an earlier
one keeps all rows, so that a near-tie of two index scores can change one position only, which is then not counted.
"""

from __future__ import annotations

import contextlib
import heapq
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import import_utils

from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.geometry import CompressorKind, ModelGeometry, from_hf_config

LAYER_TYPES = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
)
SELECTED_ROWS = 8  # index_topk of the last layer; a prompt of more than 36 tokens has more rows than that
VOCABULARY = 256  # bytes
_NAMES = {  # transformers' names of the cached entries of a layer
    CompressorKind.C4: "compressor",
    CompressorKind.C4_INDEXER: "indexer",
    CompressorKind.C128: "compressor",
}


@contextlib.contextmanager
def _without(*packages: str) -> Iterator[None]:
    """Hide installed packages that nobody has imported yet: transformers probes them, and they may not load.

    torch_npu needs CANN or the software NPU; torchvision must match torch exactly. A text model needs neither.
    """
    hidden = [name for name in packages if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    _forget_probes()
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        _forget_probes()


def _forget_probes() -> None:
    """transformers remembers its answers; ours are for one import only."""
    for probe in (import_utils.is_torch_npu_available, import_utils.is_torchvision_available):
        probe.cache_clear()


with _without("torch_npu", "torchvision"):
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

_C4Cache: Any = DeepseekV4CSACache  # transformers types its classes only in part
_C128Cache: Any = DeepseekV4HCACache


class _SuppliedRows:
    """Mixin for a cache layer: keeps no compressor state, takes its compressed rows from `supplied`."""

    _layer_type = None  # transformers registers subclasses by this name; the shipped classes must stay registered

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.supplied: dict[str, torch.Tensor] = {}

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Give the model nothing to compress, and remember nothing."""
        del name
        return kv[:, :0], gate[:, :0], 0

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Append the supplied rows. A forward without supplied rows is an error, never an empty result."""
        if compressed.shape[1]:
            raise RuntimeError(f"transformers compressed {compressed.shape[1]} rows of {name!r} itself; expected none")
        rows = self.supplied.pop(name)
        kept: torch.Tensor = super().update_compressor_states(name, rows.unsqueeze(0))  # type: ignore[misc]
        return kept


class _SuppliedC4(_SuppliedRows, _C4Cache):  # type: ignore[misc]
    pass


class _SuppliedC128(_SuppliedRows, _C128Cache):  # type: ignore[misc]
    pass


@dataclass(frozen=True)
class TokenModel:
    """The model, its geometry, and its compressors' weights by (layer, kind), FP32 on the CPU."""

    model: Any
    config: Any
    geometry: ModelGeometry
    weights: dict[tuple[int, CompressorKind], CompressorWeights]

    def new_cache(self, *, supplied: bool) -> Any:
        """A cache for one request: as shipped, or (supplied) with compressed rows from outside."""
        cache: Any = DynamicCache(config=self.config)
        if supplied:
            classes = {"compressed_sparse_attention": _SuppliedC4, "heavily_compressed_attention": _SuppliedC128}
            for layer, kind in enumerate(self.config.layer_types):
                if kind in classes:
                    cache.layers[layer] = classes[kind](self.config)
        return cache

    def compressed_rows(self, cache: Any, layer: int, kind: CompressorKind) -> torch.Tensor:
        """All rows of one compressor that a cache holds, `[rows, head_dim]`."""
        held = cache.layers[layer].compressed_kv[_NAMES[kind]]
        dim = self.weights[layer, kind].norm_weight.shape[0]
        return held[0] if held is not None else torch.empty(0, dim)

    def rope(self, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[rows, 64]` of the given window positions, one angle per interleaved pair."""
        cos, sin = self.model.model.rotary_emb(torch.empty(0), position_ids=windows.unsqueeze(0), layer_type="compress")
        return cos[0].repeat_interleave(2, dim=-1), sin[0].repeat_interleave(2, dim=-1)

    def forward(self, ids: Sequence[int], cache: Any) -> torch.Tensor:
        """The unmodified forward of one request: logits `[tokens, vocabulary]`."""
        logits: torch.Tensor = self.model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True).logits
        return logits[0]

    def selection_scores(self) -> contextlib.AbstractContextManager[list[torch.Tensor]]:
        """Record the last layer's index scores `[tokens, rows]` of each forward while the context is open."""
        return _recorded(self.model.model.layers[-1].self_attn.compressor.indexer.scorer)


@contextlib.contextmanager
def _recorded(module: Any) -> Iterator[list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    try:
        yield seen
    finally:
        handle.remove()


def model_config(hidden_size: int = 1024) -> Any:
    """The sizes of the tiny model, as transformers' config."""
    layers = len(LAYER_TYPES)
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        layer_types=list(LAYER_TYPES),
        mlp_layer_types=["hash_moe"] * layers,
        num_attention_heads=4,
        q_lora_rank=256,
        o_groups=2,
        o_lora_rank=256,
        moe_intermediate_size=128,
        hc_sinkhorn_iters=5,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_n_heads=16,  # fewer heads tie at exactly zero after the ReLU
        index_topk=SELECTED_ROWS,
        num_nextn_predict_layers=0,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={  # as released
            "rope_type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    config._attn_implementation = "eager"
    return config


def build_model(seed: int, *, hidden_size: int = 1024) -> TokenModel:
    """The tiny model for a seed; the same seed gives the same weights on every machine.

    Args:
        seed: of all weights.
        hidden_size: 1,024 is the least that the stock operator takes; less needs its waiver "compressor.hidden".
    """
    config = model_config(hidden_size)
    model: Any = DeepseekV4ForCausalLM(config)
    model = model.to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _initialise(name, parameter, generator)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # experts of a token: distinct
                picks = [torch.randperm(4, generator=generator)[:2] for _ in range(VOCABULARY)]
                buffer.copy_(torch.stack(picks))
    for layer in model.model.layers[:-1]:
        if layer.self_attn.layer_type == "compressed_sparse_attention":
            layer.self_attn.compressor.indexer.index_topk = config.max_position_embeddings
    geometry = from_hf_config(config.to_dict(), "token parity model")
    weights = {}
    for compressor in geometry.compressors:
        owner = model.model.layers[compressor.layer].self_attn.compressor
        if compressor.kind is CompressorKind.C4_INDEXER:
            owner = owner.indexer
        weights[compressor.layer, compressor.kind] = CompressorWeights(
            wkv=owner.kv_proj.weight.detach(),
            wgate=owner.gate_proj.weight.detach(),
            ape=owner.position_bias.detach(),
            norm_weight=owner.kv_norm.weight.detach(),
            norm_eps=config.rms_norm_eps,
            rope_head_dim=geometry.qk_rope_head_dim,
        )
    return TokenModel(model, config, geometry, weights)


def _initialise(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Unit-variance activations, so that logits have standard deviation 1 and top-2 margins are healthy.

    Block outputs are doubled: attention, hence the compressed rows, then moves most tokens.
    """
    noise = torch.randn(parameter.shape, generator=generator)
    fan_in = parameter.shape[-1] ** -0.5
    if name.endswith((".scale", "hc_scale")):
        parameter.fill_(1.0)
    elif "norm" in name:
        parameter.copy_(1.0 + 0.1 * noise)
    elif name.endswith((".base", "hc_base")):
        parameter.copy_(0.3 * noise)
    elif name.endswith((".fn", "hc_fn")):
        parameter.copy_(0.5 * fan_in * noise)
    elif name.endswith("sinks"):
        parameter.copy_(0.5 * noise)
    elif name.endswith(("position_bias", "embed_tokens.weight")):
        parameter.copy_(noise)
    elif "o_b_proj" in name or "down_proj" in name:
        parameter.copy_(2.0 * fan_in * noise)
    else:
        parameter.copy_(fan_in * noise)


def text_tokens(length: int, offset: int) -> list[int]:
    """`length` bytes of real text from `offset` on: the essay on heaps in Python's own `heapq`, cyclic."""
    text = heapq.__about__.encode()
    return [text[(offset + place) % len(text)] for place in range(length)]


@dataclass(frozen=True)
class Piece:
    """The next tokens of one request in a step. `cache` was made by `new_cache(supplied=True)`."""

    start: int
    ids: tuple[int, ...]
    cache: Any


def forward_chunks(
    token_model: TokenModel,
    pieces: Sequence[Piece],
    compress: Callable[[int, CompressorKind, torch.Tensor], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """One step of several requests, layer by layer: logits `[tokens, vocabulary]` of each piece.

    Args:
        token_model: from `build_model`.
        pieces: one per request, in the order of the batch.
        compress: (layer, kind, x `[all tokens, hidden]`) -> the new compressed rows of each piece. x is the attention
            input of the layer, packed in the order of the pieces.
    """
    inner = token_model.model.model
    ids = [torch.tensor([piece.ids]) for piece in pieces]
    embedded = [inner.embed_tokens(one) for one in ids]
    positions = [torch.arange(piece.start, piece.start + len(piece.ids)).unsqueeze(0) for piece in pieces]
    masks = [
        create_sliding_window_causal_mask(
            config=token_model.config,
            inputs_embeds=embedded[index],
            attention_mask=None,
            cache=piece.cache,
            position_ids=positions[index],
        )
        for index, piece in enumerate(pieces)
    ]
    rotary = [
        {label: inner.rotary_emb(embedded[index], position_ids=positions[index], layer_type=label) for label in _LABELS}
        for index in range(len(pieces))
    ]
    hidden = [one.unsqueeze(2).expand(-1, -1, token_model.config.hc_mult, -1).contiguous() for one in embedded]
    for number, layer in enumerate(inner.layers):
        kinds = [kind for owner, kind in token_model.weights if owner == number]
        if kinds:
            # The same two calls as the layer itself is about to make; its attention receives this x.
            packed = torch.cat([layer.input_layernorm(layer.attn_hc(one)[2])[0] for one in hidden])
            for kind in kinds:
                for piece, rows in zip(pieces, compress(number, kind, packed), strict=True):
                    piece.cache.layers[number].supplied[_NAMES[kind]] = rows
        hidden = [
            layer(
                one,
                position_embeddings=rotary[index],
                position_ids=positions[index],
                attention_mask=masks[index],
                input_ids=ids[index],
                cache=pieces[index].cache,
            )
            for index, one in enumerate(hidden)
        ]
    return [token_model.model.lm_head(inner.norm(inner.hc_head(one)))[0] for one in hidden]


_LABELS = ("main", "compress")
