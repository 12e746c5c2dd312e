# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Geometry: what the released models contain, which configs are refused, and the page sizes."""

import itertools
import json
import pickle

import pytest

from afd_dsv4.geometry import (
    MOST,
    MOST_LAYERS,
    STACKS,
    CompressorKind,
    InputError,
    ModelGeometry,
    PageLayout,
    from_hf_config,
    page_layout,
    preset,
)

RELEASED = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 4, 128, 4, 0],
    "head_dim": 512,
    "index_head_dim": 128,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 1048576,
}


def test_flash_has_21_c4_20_c128_and_2_plain_layers():
    flash = preset("flash")
    assert flash.layers_of(CompressorKind.C4) == tuple(range(2, 43, 2))
    assert flash.layers_of(CompressorKind.C4_INDEXER) == tuple(range(2, 43, 2))
    assert flash.layers_of(CompressorKind.C128) == tuple(range(3, 43, 2))
    assert (flash.num_layers, flash.hidden_size, flash.num_nextn_layers) == (43, 4096, 1)


def test_pro_has_30_c4_and_31_c128_layers():
    pro = preset("pro")
    assert pro.layers_of(CompressorKind.C4) == tuple(range(2, 61, 2))
    assert pro.layers_of(CompressorKind.C128) == (0, *range(1, 61, 2))
    assert (pro.num_layers, pro.hidden_size) == (61, 7168)


@pytest.mark.parametrize(("name", "row_bytes"), [("flash", 296960), ("pro", 434176)])
def test_all_rows_of_one_token_weigh_what_the_released_model_says(name, row_bytes):
    assert sum(compressor.row_bytes for compressor in preset(name).compressors) == row_bytes


def test_a_c4_layer_gives_its_main_compressor_then_its_indexer():
    kinds = [(c.layer, c.kind) for c in from_hf_config(RELEASED, "m").compressors]
    assert kinds == [
        (1, CompressorKind.C4),
        (1, CompressorKind.C4_INDEXER),
        (2, CompressorKind.C128),
        (3, CompressorKind.C4),
        (3, CompressorKind.C4_INDEXER),
    ]


def test_a_row_holds_kv_and_score_for_every_projected_head():
    dims = {c.kind: (c.state_dim, c.row_bytes) for c in preset("flash").compressors}
    assert dims == {  # 2 (kv, score) * 2 with overlap * head_dim, in FP32
        CompressorKind.C4: (2048, 8192),
        CompressorKind.C4_INDEXER: (512, 2048),
        CompressorKind.C128: (1024, 4096),
    }


def test_a_released_config_and_its_transformers_form_describe_the_same_model():
    modern = {key: value for key, value in RELEASED.items() if key not in ("compress_ratios", "qk_rope_head_dim")}
    modern["layer_types"] = [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ]
    modern["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    modern["partial_rotary_factor"] = 64 / 512
    assert from_hf_config(modern, "m") == from_hf_config(RELEASED, "m")


def test_entries_of_draft_layers_are_optional_and_dropped():
    without = {**RELEASED, "compress_ratios": [0, 4, 128, 4]}
    assert from_hf_config(without, "m") == from_hf_config(RELEASED, "m")
    assert from_hf_config(RELEASED, "m").compress_ratios == (0, 4, 128, 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"compress_ratios": [0, 4, 8, 4]}, "compress ratio of layer 2: 8"),
        ({"compress_ratios": [0, 4, 1, 4]}, "V4.1, which is not supported yet"),
        ({"compress_ratios": [0, 4, 2, 4]}, "V4.1, which is not supported yet"),
        ({"compress_ratios": [0, 4, -4, 4]}, "supported are 0 (no compressor), 4 and 128"),
        ({"compress_ratios": [0, 4, 4.0, 4]}, "4.0"),
        ({"compress_ratios": [0, 4, True, 4]}, "True"),
        ({"compress_ratios": [0, 4, None, 4]}, "None"),
        ({"compress_ratios": [0, 4, 128, 4, 4]}, "draft layers must own no compressor"),
        ({"compress_ratios": [0, 4, 128]}, "3 entries for 4 layers"),
        ({"compress_ratios": [0, 4, 128, 4, 0, 0]}, "6 entries for 4 layers and 1 draft layers"),
        ({"compress_ratios": "0, 4"}, "it must be a list"),
        ({"compress_ratios": {"0": 4}}, "it must be a list"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": -4096}, "it must be a whole number from 1 to 1099511627776"),
        ({"hidden_size": "4096"}, "'4096'"),
        ({"head_dim": 0}, "head_dim: 0"),
        ({"num_hidden_layers": 10_000}, "entries for 10000 layers"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers: 10001; it must be a whole number from 1 to 10000"),
        ({"num_nextn_predict_layers": 10_001}, "num_nextn_predict_layers: 10001; it must be a whole number from 0 to"),
        ({"max_position_embeddings": MOST + 1}, "max_position_embeddings: 1099511627777; it must be"),
        ({"model_type": [10**5000]}, "[a number of 16610 bits]"),
        ({"compress_ratios": [0, 4, 10**5000, 4]}, "compress ratio of layer 2: a number of 16610 bits"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"model_type": "llama"}, "only deepseek_v4 models"),
        ({"qk_rope_head_dim": 256}, "wider than a head"),
    ],
)
def test_an_impossible_config_is_refused_in_one_line_that_says_why(change, says):
    with pytest.raises(InputError) as caught:
        from_hf_config({**RELEASED, **change}, "m")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "head_dim",
    "index_head_dim",
    "qk_rope_head_dim",
    "sliding_window",
    "max_position_embeddings",
)


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("digits", [400, 4000, 100_000])  # above 4,300 Python refuses to write a number out
def test_a_size_beyond_any_machine_is_refused_and_shown_shortened(field, digits):
    with pytest.raises(InputError) as caught:
        from_hf_config({**RELEASED, field: 10**digits}, "m")
    assert f"m: {field}: a number of {(10**digits).bit_length()} bits; it must be" in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_head_too_wide_for_a_float_is_refused_before_the_rotary_factor_is_applied():
    config = {key: value for key, value in RELEASED.items() if key != "qk_rope_head_dim"}
    with pytest.raises(InputError, match="head_dim: a number of 1329 bits"):
        from_hf_config({**config, "head_dim": 10**400, "partial_rotary_factor": 0.125}, "m")


def test_a_model_or_a_page_layout_made_by_hand_keeps_to_the_same_limits():
    ModelGeometry("m", MOST, MOST_LAYERS, (4,) * MOST_LAYERS)
    with pytest.raises(InputError, match="num_layers: 2000000; it must be a whole number from 1 to 10000"):
        ModelGeometry("m", 4096, 2_000_000, (4,) * 2_000_000)
    with pytest.raises(InputError, match="hidden_size"):
        ModelGeometry("m", MOST + 1, 1, (4,))
    with pytest.raises(InputError, match="other_page_bytes"):
        PageLayout(128, 128, 128, 8, 32, 16640, MOST + 1)


@pytest.mark.parametrize("factor", [None, "0.125", float("nan"), float("inf"), 0, -1])
def test_a_config_without_any_rotary_width_is_refused(factor):
    config = {key: value for key, value in RELEASED.items() if key != "qk_rope_head_dim"}
    with pytest.raises(InputError, match="partial_rotary_factor"):
        from_hf_config({**config, "partial_rotary_factor": factor}, "m")


@pytest.mark.parametrize(
    ("field", "value"),
    [("head_dim", 256), ("index_head_dim", 64), ("qk_rope_head_dim", 32), ("hidden_size", 4000), ("hidden_size", 512)],
)
def test_sizes_that_the_stock_operator_refuses_can_be_described_but_not_planned(field, value):
    geometry = from_hf_config({**RELEASED, field: value}, "m")
    with pytest.raises(InputError, match=field):
        geometry.check_stock_operator()


def test_a_reduced_hidden_size_can_be_waived_but_a_state_width_cannot():
    from_hf_config({**RELEASED, "hidden_size": 512}, "m").check_stock_operator(waive_hidden_size=True)
    with pytest.raises(InputError, match="state rows"):
        from_hf_config({**RELEASED, "head_dim": 256}, "m").check_stock_operator(waive_hidden_size=True)


def test_every_offered_page_holds_its_rows_and_wastes_what_is_published():
    for stack, size in itertools.product(STACKS, (32, 64, 128)):
        layout = page_layout(stack, size)
        layout.check_holds(preset("flash"))
        layout.check_holds(preset("pro"))
        payload = {kind: layout.page_rows(kind) * preset("flash").row_bytes(kind) for kind in CompressorKind}
        assert layout.page_bytes(CompressorKind.C4) == 2 * payload[CompressorKind.C4]
        assert layout.page_bytes(CompressorKind.C128) == payload[CompressorKind.C128]
        assert payload[CompressorKind.C4_INDEXER] < layout.page_bytes(CompressorKind.C4_INDEXER)


def test_a_page_too_small_for_its_rows_is_refused():
    small = PageLayout(128, 128, 128, 8, 32, 16640, 131071)
    with pytest.raises(InputError, match="c128 state page of layer 3: 131072 bytes where the stack has 131071"):
        small.check_holds(preset("flash"))


@pytest.mark.parametrize("size", [0, 16, 48, 256, -128])
def test_a_block_size_that_is_not_offered_is_refused_with_those_that_are(size):
    with pytest.raises(InputError, match="choose one of 32, 64, 128"):
        page_layout(STACKS[0], size)


def test_an_unknown_stack_and_an_unknown_preset_name_the_known_ones():
    with pytest.raises(InputError, match=r"supported: vllm-ascend-0\.23\.0"):
        page_layout("vllm-ascend-9", 128)
    with pytest.raises(InputError, match="choose flash or pro"):
        preset("mini")


def test_the_number_of_ratios_must_be_the_number_of_layers():
    with pytest.raises(InputError, match="1 entries for 2 layers"):
        ModelGeometry("m", 4096, 2, (4,))


def test_a_config_survives_json():
    assert from_hf_config(json.loads(json.dumps(RELEASED)), "m") == from_hf_config(RELEASED, "m")


def test_a_refusal_passes_from_one_process_to_another() -> None:
    error = pickle.loads(pickle.dumps(InputError("what", "found", "do this")))
    assert (error.what, error.found, error.remedy, str(error)) == ("what", "found", "do this", "what: found; do this")
