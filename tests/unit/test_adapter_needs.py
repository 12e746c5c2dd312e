# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Why the adapter of vllm-ascend 0.23.0 patches what it patches. A test that fails here says: that patch can go.

The sources are read, nothing is imported.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm_runtime


def tree(module: str) -> ast.Module:
    found = importlib.util.find_spec("vllm_ascend")
    assert found is not None
    assert found.origin is not None
    return ast.parse((Path(found.origin).parent / module).read_text())


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_the_worker_still_makes_its_runner_of_a_class_that_it_names_itself() -> None:
    (init_device,) = (
        node
        for node in ast.walk(tree("worker/worker.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "init_device"
    )
    assert "NPUModelRunner(self.vllm_config, self.device)" in [ast.unparse(call) for call in calls(init_device)]


def test_the_operator_is_still_called_inside_the_attention_at_four_places() -> None:
    sites = [
        node.name
        for node in ast.walk(tree("attention/dsa_v1.py"))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(call.func) == "torch.ops._C_ascend.compressor" for call in calls(node))
    ]
    assert sorted(sites) == ["_forward_decode", "_forward_prefill", "_indexer_qkv_prepare", "cv_indexer_select_qli"]


def test_a_stand_in_has_all_that_the_attention_reads_of_a_states_metadata() -> None:
    names = {
        "compressor_state_prefill_metadata",
        "compressor_state_decode_metadata",
        "indexer_state_prefill_metadata",
        "indexer_state_decode_metadata",
    }
    read = {
        (node.value.id, node.attr)
        for node in ast.walk(tree("attention/dsa_v1.py"))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    }
    assert read == {(name, "block_table") for name in names}
