# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Whose the one tensor of metadata is that a launch takes from upstream: see `compressor/stock.py`.

A test that fails here says: a later build may now overwrite `cu_seqlens` under launches that are queued, so a copy of
it must go into the workspace slot. The sources are read, nothing is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

AFD_PLUGIN = os.environ.get("AFD_PLUGIN_PATH", "")


def function(path: Path, name: str) -> ast.FunctionDef:
    (found,) = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found


def assigned(function: ast.FunctionDef, name: str) -> list[str]:
    """Every expression that a local name gets, in order."""
    return [
        ast.unparse(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]
    ]


@pytest.mark.vllm_runtime
def test_prefills_get_a_new_tensor_and_decodes_a_view_of_what_the_runner_fills_once_a_step() -> None:
    found = importlib.util.find_spec("vllm_ascend")
    assert found is not None
    assert found.origin is not None
    builder = Path(found.origin).parent / "attention" / "dsa_v1.py"
    new, cached = assigned(function(builder, "build_prefill_metadata"), "prefill_query_start_loc")
    assert new == "query_start_loc[reqs_start:] - query_start_loc[reqs_start]"
    assert cached == "self.prefill_ratio_to_sas_metadata['prefill_query_start_loc']"
    view, cached = assigned(function(builder, "build_decode_metadata"), "query_start_loc")
    assert view == "common_attn_metadata.query_start_loc[:self.num_decodes + 1]"
    assert cached == "self.decode_ratio_to_sas_metadata['query_start_loc']"


@pytest.mark.skipif(not AFD_PLUGIN, reason="no such case: AFD_PLUGIN_PATH names no checkout")
def test_a_stage_gets_a_new_tensor() -> None:
    slicing = Path(AFD_PLUGIN) / "afd_plugin" / "v1" / "worker" / "npu" / "ubatch_utils.py"
    (returned,) = (
        node for node in ast.walk(function(slicing, "slice_query_start_locs")) if isinstance(node, ast.Return)
    )
    assert isinstance(returned.value, ast.BinOp)
    assert isinstance(returned.value.op, ast.Sub)
    assert "slice_query_start_locs(attn_metadata.query_start_loc, request_slice)" in assigned(
        function(slicing, "_make_metadata_with_slice"), "query_start_loc"
    )
