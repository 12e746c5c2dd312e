# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Which draft layers are lanes, and what the others cost: nothing."""

from __future__ import annotations

import pytest

from afd_dsv4.execution.substep import Lane, drafting, lanes
from afd_dsv4.geometry import InputError, from_hf_config
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.identity import Generation

CONFIG = {
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "head_dim": 512,
    "index_head_dim": 128,
    "hidden_size": 4096,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 4096,
}


def test_a_draft_layer_that_owns_a_compressor_is_a_lane_and_the_others_are_none() -> None:
    assert lanes(43, [0, 4, 0, 128]) == (Lane(2, 44, 4), Lane(4, 46, 128))
    assert lanes(43, []) == ()


def test_a_config_with_a_lane_is_refused() -> None:
    with pytest.raises(InputError, match="compress ratio of draft layer 2: 4; draft layers must own no compressor"):
        from_hf_config(CONFIG | {"compress_ratios": [4, 128, 4]}, "made up")
    assert from_hf_config(CONFIG | {"compress_ratios": [4, 128, 0]}, "made up").compress_ratios == (4, 128)


def test_a_substep_without_a_lane_begins_nothing() -> None:
    with drafting({}, 1, [RequestChunk(RequestId("a"), 0, 3)], Generation(1)) as execution:
        assert execution is None


def test_the_target_is_no_substep_of_a_draft() -> None:
    with pytest.raises(ValueError, match="substep 0 is none of a draft"), drafting({}, 0, [], Generation(1)):
        pass
