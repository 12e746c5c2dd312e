# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a DeepSeek-V4 model and a vllm-ascend release fix before anything runs: compressors, rows and pages.

Problem: every other module needs the same few numbers (which layer owns which compressor, how wide a row is, how many
rows a page holds), and a wrong one corrupts memory instead of failing.
Way: two frozen descriptions that check themselves. `ModelGeometry` comes from a Hugging Face config or a preset,
`PageLayout` from a table per supported stack. Both are plain Python: neither torch nor vLLM is imported.
Not here: blocks and admission (`admission.py`), tails and workspace slots (`tail/`, `workspace/`).

Sources: compress ratios and dimensions, the released Flash and Pro configs; page sizes, `_DSV4_BLOCK_SIZES` in
`vllm_ascend/models/layer/attention/layer.py`; state widths, `Compressor` in `vllm_ascend/models/deepseek_v4.py`;
operator limits, `csrc/attention/compressor/op_host` of vllm-ascend.
"""

from __future__ import annotations

import enum
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

FP32_BYTES = 4
SUPPORTED_RATIOS = (0, 4, 128)
FUTURE_RATIOS = (1, 2)  # DeepSeek-V4.1: no APE, no overlap
MOST_LAYERS = 10_000  # far above any model, and still planned at once
MOST = 1 << 40  # any other size: beyond any machine, and small enough that no figure turns into infinity


class InputError(ValueError):
    """A wish that cannot be met, as one line: what is wrong, what was found, what to do about it."""

    def __init__(self, what: str, found: str, remedy: str) -> None:
        super().__init__(f"{what}: {found}; {remedy}")
        self.what = what
        self.found = found
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        """So that it passes from one process to another: exceptions are rebuilt from their text otherwise."""
        return type(self), (self.what, self.found, self.remedy)


class _Short(reprlib.Repr):
    """Shortens long numbers too; Python itself refuses to write out more than 4,300 digits."""

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() <= 64 else f"a number of {x.bit_length()} bits"


_short = _Short().repr


def _whole(value: object, what: str, *, least: int, most: int = MOST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InputError(what, _short(value), f"it must be a whole number from {least} to {most}")
    return value


class CompressorKind(enum.Enum):
    """The three compressors of DeepSeek-V4; each has its own private page pool."""

    C4 = "c4"
    C4_INDEXER = "c4_indexer"
    C128 = "c128"

    # Each is one object; enum's own hash is a call of Python's, in every look-up of a launch.
    __hash__ = object.__hash__

    @property
    def ratio(self) -> int:
        """Raw tokens per compressed row."""
        return 128 if self is CompressorKind.C128 else 4

    @property
    def overlap(self) -> bool:
        """Whether a window also reads the window before it (C4 does)."""
        return self is not CompressorKind.C128

    @property
    def coff(self) -> int:
        """Projection width in head dims: 2 with overlap, 1 without."""
        return 2 if self.overlap else 1


@dataclass(frozen=True)
class Compressor:
    """One compressor of one layer."""

    layer: int
    kind: CompressorKind
    head_dim: int

    @property
    def state_dim(self) -> int:
        """FP32 elements of one row: `[kv | score+APE]`, each coff * head_dim wide."""
        return 2 * self.kind.coff * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return FP32_BYTES * self.state_dim


@dataclass(frozen=True)
class ModelGeometry:
    """The part of a DeepSeek-V4 config that decides memory. `compress_ratios` has one entry per main layer.

    Draft (MTP) layers own no compressor; they are counted in `num_nextn_layers` only.

    Raises:
        InputError: a ratio that is not 0, 4 or 128, a list of the wrong length, a size below 1 or above `MOST`, or
            more than `MOST_LAYERS` layers.
    """

    name: str
    hidden_size: int
    num_layers: int
    compress_ratios: tuple[int, ...]
    head_dim: int = 512
    index_head_dim: int = 128
    qk_rope_head_dim: int = 64
    sliding_window: int = 128
    max_position_embeddings: int = 1 << 20
    num_nextn_layers: int = 0

    def __post_init__(self) -> None:
        for field in (
            "hidden_size",
            "num_layers",
            "head_dim",
            "index_head_dim",
            "qk_rope_head_dim",
            "sliding_window",
            "max_position_embeddings",
            "num_nextn_layers",
        ):
            _whole(
                getattr(self, field),
                f"{self.name}: {field}",
                least=0 if field == "num_nextn_layers" else 1,
                most=MOST_LAYERS if field in ("num_layers", "num_nextn_layers") else MOST,
            )
        if len(self.compress_ratios) != self.num_layers:
            raise InputError(
                f"{self.name}: compress_ratios",
                f"{len(self.compress_ratios)} entries for {self.num_layers} layers",
                "give one ratio per main layer",
            )
        for layer, ratio in enumerate(self.compress_ratios):
            _check_ratio(ratio, f"{self.name}: compress ratio of layer {layer}")
        if self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise InputError(
                f"{self.name}: qk_rope_head_dim",
                f"{self.qk_rope_head_dim} is wider than a head ({self.head_dim}, indexer {self.index_head_dim})",
                "the rotated part must lie inside the head",
            )

    @cached_property
    def compressors(self) -> tuple[Compressor, ...]:
        """Every compressor in layer order; a C4 layer gives its main compressor, then its indexer's."""
        found = []
        for layer, ratio in enumerate(self.compress_ratios):
            if ratio == 4:
                found.append(Compressor(layer, CompressorKind.C4, self.head_dim))
                found.append(Compressor(layer, CompressorKind.C4_INDEXER, self.index_head_dim))
            elif ratio == 128:
                found.append(Compressor(layer, CompressorKind.C128, self.head_dim))
        return tuple(found)

    def layers_of(self, kind: CompressorKind) -> tuple[int, ...]:
        """The layers that own a compressor of this kind, ascending."""
        return tuple(layer for layer, ratio in enumerate(self.compress_ratios) if ratio == kind.ratio)

    def row_bytes(self, kind: CompressorKind) -> int:
        """Bytes of one row of this kind, whether or not a layer has it."""
        return Compressor(0, kind, self._head_dim(kind)).row_bytes

    def _head_dim(self, kind: CompressorKind) -> int:
        return self.index_head_dim if kind is CompressorKind.C4_INDEXER else self.head_dim

    def check_stock_operator(self, *, waive_hidden_size: bool = False) -> None:
        """Refuse sizes that the shipped compressor operator refuses.

        Separate from construction, because a test model may be smaller than any operator accepts.

        Raises:
            InputError: head dims other than 512 and 128, a rotated part other than 64, or (unless waived) a hidden
                size that is not a multiple of 512 from 1,024 to 10,240.
        """
        for field, accepted in (("head_dim", 512), ("index_head_dim", 128), ("qk_rope_head_dim", 64)):
            if getattr(self, field) != accepted:
                raise InputError(
                    f"{self.name}: {field}",
                    f"{getattr(self, field)}, which gives state rows that the stock compressor does not have",
                    f"only {field} {accepted} is supported",
                )
        if not waive_hidden_size and (self.hidden_size % 512 or not 1024 <= self.hidden_size <= 10240):
            raise InputError(
                f"{self.name}: hidden_size",
                f"{self.hidden_size}",
                "the stock compressor takes multiples of 512 from 1024 to 10240",
            )


def from_hf_config(config: Mapping[str, Any], name: str) -> ModelGeometry:
    """Read a Hugging Face config, as released (`compress_ratios`) or as transformers writes it (`layer_types`).

    Args:
        config: the parsed config.json.
        name: what error messages call the model.

    Raises:
        InputError: a missing or impossible value.
    """
    # What is missing from another model's config is no matter of that config.
    model_type = config.get("model_type", "deepseek_v4")
    if model_type != "deepseek_v4":
        found = f"{_short(model_type)}, so this is no DeepSeek-V4 config.json"
        raise InputError(f"{name}: model_type", found, "only deepseek_v4 models have these compressors")
    if not {"model_type", "compress_ratios", "layer_types"} & set(config):
        found = "missing, and compress_ratios too, so this is no DeepSeek-V4 config.json"
        raise InputError(f"{name}: model_type", found, "give the config.json of a deepseek_v4 model")
    num_layers = _read(config, "num_hidden_layers", name, most=MOST_LAYERS)
    num_nextn = _read(config, "num_nextn_predict_layers", name, default=0, least=0, most=MOST_LAYERS)
    head_dim = _read(config, "head_dim", name)
    if "qk_rope_head_dim" in config:
        rope = _read(config, "qk_rope_head_dim", name)
    else:
        factor = config.get("partial_rotary_factor")
        if not isinstance(factor, (int, float)) or not 0 < factor <= 1:  # refuses nan as well
            raise InputError(
                f"{name}: qk_rope_head_dim",
                f"missing, and partial_rotary_factor is {_short(factor)}",
                "add either to the config, the factor above 0 and at most 1",
            )
        rope = int(head_dim * factor)
    return ModelGeometry(
        name=name,
        hidden_size=_read(config, "hidden_size", name),
        num_layers=num_layers,
        compress_ratios=_ratios(config, name, num_layers, num_nextn),
        head_dim=head_dim,
        index_head_dim=_read(config, "index_head_dim", name),
        qk_rope_head_dim=rope,
        sliding_window=_read(config, "sliding_window", name),
        max_position_embeddings=_read(config, "max_position_embeddings", name),
        num_nextn_layers=num_nextn,
    )


def preset(name: str) -> ModelGeometry:
    """DeepSeek-V4 Flash or Pro as released.

    Raises:
        InputError: another name.
    """
    ratios: tuple[int, ...]
    if name == "flash":  # 2 layers without a compressor, then 21 C4 and 20 C128 in turn
        ratios = (0, 0) + (4, 128) * 20 + (4,)
        return ModelGeometry("flash", 4096, 43, ratios, num_nextn_layers=1)
    if name == "pro":  # 2 C128 layers, then 30 C4 and 29 C128 in turn
        ratios = (128, 128) + (4, 128) * 29 + (4,)
        return ModelGeometry("pro", 7168, 61, ratios, num_nextn_layers=1)
    raise InputError("model preset", repr(name), "choose flash or pro, or give the path of a config.json")


def preset_name(model: str | None) -> str | None:
    """The preset that a model's name says it is, such as deepseek-ai/DeepSeek-V4-Flash; None where it says none."""
    found = re.search(r"deepseek-?v4(?!\.?\d)[^/]*?(flash|pro)(?![a-z])", model or "", re.IGNORECASE)
    return found[1].lower() if found else None


@dataclass(frozen=True)
class PageLayout:
    """How one vllm-ascend release cuts its KV cache for one configured block size. Rows are per page, bytes padded.

    `kv_rows` counts *compressed* rows (one page of a ratio-4 layer covers 4 * kv_rows tokens); `swa_rows`,
    `c4_page_rows` and `c128_page_rows` count tokens. `indexer_page_bytes` is the padded size of a C4 indexer state
    page, `other_page_bytes` of the C4 main and C128 state pages.

    Raises:
        InputError: a size below 1 or above `MOST`.
    """

    block_size: int
    kv_rows: int
    swa_rows: int
    c4_page_rows: int
    c128_page_rows: int
    indexer_page_bytes: int
    other_page_bytes: int

    def __post_init__(self) -> None:
        for field in self.__dataclass_fields__:
            _whole(getattr(self, field), f"page layout: {field}", least=1)

    def page_rows(self, kind: CompressorKind) -> int:
        """Rows of one state page of this kind."""
        return self.c128_page_rows if kind is CompressorKind.C128 else self.c4_page_rows

    def page_bytes(self, kind: CompressorKind) -> int:
        """Bytes that vllm-ascend allocates for one state page of this kind, padding included."""
        return self.indexer_page_bytes if kind is CompressorKind.C4_INDEXER else self.other_page_bytes

    def check_holds(self, geometry: ModelGeometry) -> None:
        """Refuse a model whose state rows do not fit the padded pages.

        Raises:
            InputError: naming the compressor and both sizes.
        """
        for compressor in geometry.compressors:
            kind = compressor.kind
            need = self.page_rows(kind) * compressor.row_bytes
            if need > self.page_bytes(kind):
                raise InputError(
                    f"{geometry.name}: {kind.value} state page of layer {compressor.layer}",
                    f"{need} bytes where the stack has {self.page_bytes(kind)}",
                    f"its state row of {compressor.state_dim} values is not one that the stack supports",
                )


_A2_AND_A3 = {  # Atlas; `_DSV4_BLOCK_SIZES` in vllm_ascend/models/layer/attention/layer.py
    128: PageLayout(128, 128, 128, 8, 32, 16640, 131072),
    64: PageLayout(64, 64, 64, 4, 16, 8320, 65536),
    32: PageLayout(32, 32, 32, 2, 8, 4160, 32768),
}
_STACKS: dict[str, dict[int, PageLayout]] = {
    "vllm-ascend-0.23.0": _A2_AND_A3,
    "vllm-ascend-80d8c194f": _A2_AND_A3,  # the file is the same to the byte
}
STACKS = tuple(_STACKS)
DEFAULT_STACK = STACKS[0]


def page_layout(stack_name: str, block_size: int) -> PageLayout:
    """The page sizes of a supported stack for a configured block size.

    Raises:
        InputError: an unknown stack, or a block size that the stack does not offer.
    """
    layouts = _STACKS.get(stack_name)
    if layouts is None:
        raise InputError("stack", f"{stack_name!r} is unknown", f"supported: {', '.join(STACKS)}")
    layout = layouts.get(block_size)
    if layout is None:
        offered = ", ".join(str(size) for size in sorted(layouts))
        raise InputError("block size", f"{block_size} is not offered by {stack_name}", f"choose one of {offered}")
    return layout


_LAYER_TYPES = {  # transformers' names; the ratios come from compress_rates
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def _ratios(config: Mapping[str, Any], name: str, num_layers: int, num_nextn: int) -> tuple[int, ...]:
    """One ratio per main layer; entries of draft layers are checked and dropped."""
    if "compress_ratios" in config:
        key, given = "compress_ratios", config["compress_ratios"]
    elif "layer_types" in config:
        key, given = "layer_types", config["layer_types"]
    else:
        raise InputError(f"{name}: compress_ratios", "missing", "add it to the config")
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InputError(f"{name}: {key}", f"{type(given).__name__}", "it must be a list, one entry per layer")
    if not num_layers <= len(given) <= num_layers + num_nextn:
        raise InputError(
            f"{name}: {key}",
            f"{len(given)} entries for {num_layers} layers and {num_nextn} draft layers",
            "give one entry per main layer, then optionally one per draft layer",
        )
    ratios = []
    for layer, entry in enumerate(given):
        ratio = entry if key == "compress_ratios" else _ratio_of_type(config, entry, name, layer)
        _check_ratio(ratio, f"{name}: compress ratio of layer {layer}")
        if layer >= num_layers and ratio != 0:
            raise InputError(
                f"{name}: compress ratio of draft layer {layer}", f"{ratio}", "draft layers must own no compressor (0)"
            )
        ratios.append(ratio)
    return tuple(ratios[:num_layers])


def _ratio_of_type(config: Mapping[str, Any], entry: object, name: str, layer: int) -> int:
    if not isinstance(entry, str) or entry not in _LAYER_TYPES:
        raise InputError(f"{name}: type of layer {layer}", _short(entry), f"use one of {', '.join(_LAYER_TYPES)}")
    rates = config.get("compress_rates") or {}
    if not isinstance(rates, Mapping):
        raise InputError(f"{name}: compress_rates", f"{type(rates).__name__}", "it must map layer types to ratios")
    return int(_whole(rates.get(entry, _LAYER_TYPES[entry]), f"{name}: compress rate of {entry}", least=0))


def _check_ratio(ratio: object, what: str) -> None:
    if isinstance(ratio, int) and not isinstance(ratio, bool):
        if ratio in SUPPORTED_RATIOS:
            return
        if ratio in FUTURE_RATIOS:
            raise InputError(what, f"{ratio}", "ratios 1 and 2 belong to DeepSeek-V4.1, which is not supported yet")
    raise InputError(what, _short(ratio), "supported are 0 (no compressor), 4 and 128")


def _read(
    config: Mapping[str, Any], key: str, name: str, *, default: int | None = None, least: int = 1, most: int = MOST
) -> int:
    value = config.get(key, default)
    if value is None:
        raise InputError(f"{name}: {key}", "missing", "add it to the config")
    return _whole(value, f"{name}: {key}", least=least, most=most)
