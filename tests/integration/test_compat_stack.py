# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The contracts against the real packages: as installed, with ten planted drifts, with every file laid out anew."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from afd_dsv4.compat.contract import DriftKind, compare, load, verify
from afd_dsv4.compat.patch import DriftError, Patch, PatchSet
from afd_dsv4.compat.read import Reader
from afd_dsv4.compat.stack import PACKAGES, installed, package_folder
from afd_dsv4.compat.symbols import SYMBOLS, symbols_of

STACK = "vllm-ascend-0.23.0"

pytestmark = pytest.mark.skipif(installed().name != STACK, reason=f"needs {STACK}, installed is {installed()}")


def command(*arguments: str, path: Path | None = None, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """`afd-dsv4 compat ...` in a process of its own, with a folder in front of its search path."""
    environment = dict(os.environ) | ({"PYTHONPATH": str(path)} if path else {})
    script = f"import sys; {prelude}\nfrom afd_dsv4.cli import main\nsys.exit(main({['compat', *arguments]!r}))"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment, timeout=200
    )


def copied(folder: Path) -> Path:
    """The sources of both packages, and the library that states the operators' schemas."""

    def unwanted(_: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if name == "__pycache__" or ("." in name and not re.search(r"(\.py|vllm_ascend_C.*\.so)$", name))
        }

    for package in PACKAGES:
        source = package_folder(package)
        assert source is not None
        shutil.copytree(source, folder / package, ignore=unwanted)
    return folder


#: What is changed: file, what stands there, what shall stand there, symbol, kind of drift, and words of the report.
PLANTED = [
    ("worker/block_table.py", "def move_row(self, src: int, tgt: int) -> None:\n        for",
     "def move_row(self, source: int, tgt: int) -> None:\n        for",
     "vllm_ascend.worker.block_table:MultiGroupBlockTable.move_row", DriftKind.RENAMED_PARAMETER, "src -> source"),
    ("ascend_forward_context.py", "    in_profile_run: bool = False,", "    in_profile_run: bool = True,",
     "vllm_ascend.ascend_forward_context:set_ascend_forward_context", DriftKind.DEFAULT, "False -> True"),
    ("ops/dsa.py", "sorted(metadata.items())", "metadata.items()",
     "vllm_ascend.ops.dsa:filter_metadata", DriftKind.BODY, "ops/dsa.py:"),
    ("worker/model_runner_v1.py", "def _correct_optimistic_seq_lens_cpu(", "def _correct_seq_lens_cpu(",
     "vllm_ascend.worker.model_runner_v1:NPUModelRunner._correct_optimistic_seq_lens_cpu", DriftKind.MISSING,
     "renamed to vllm_ascend.worker.model_runner_v1:NPUModelRunner._correct_seq_lens_cpu, with the same body"),
    ("worker/worker.py", "def initialize_from_config(self, kv_cache_config: KVCacheConfig)",
     "def initialize_from_config(self, kv_cache_config: KVCacheConfig, is_profiling: bool)",
     "vllm_ascend.worker.worker:NPUWorker.initialize_from_config", DriftKind.NEW_REQUIRED_PARAMETER, "is_profiling"),
    ("models/layer/attention/layer.py", "128: [[128, 128, 8, 32]", "128: [[128, 128, 8, 16]",
     "vllm_ascend.models.layer.attention.layer:get_dsv4_block_sizes._DSV4_BLOCK_SIZES", DriftKind.VALUE, "8, 16]"),
    ("../vllm/v1/core/sched/output.py", "    finished_req_ids: set[str]", "    finished_req_ids: list[str]",
     "vllm.v1.core.sched.output:SchedulerOutput", DriftKind.FIELD,
     "finished_req_ids: set[str] -> finished_req_ids: list[str]"),
    ("../vllm/v1/kv_cache_interface.py", "class SlidingWindowMLASpec(SlidingWindowSpec):",
     "class SlidingWindowMLASpec(FullAttentionSpec):",
     "vllm.v1.kv_cache_interface:SlidingWindowMLASpec", DriftKind.BASES, "SlidingWindowSpec -> FullAttentionSpec"),
    ("vllm_ascend_C*.so", b"int rope_head_dim, int cmp_ratio,", b"int cmp_ratio, int rope_head_dim,",
     "_C_ascend::compressor", DriftKind.SCHEMA, "int cmp_ratio, int rope_head_dim"),
]  # fmt: skip
#: The tenth: a class that goes to another module, whole.
MOVED = "vllm_ascend.compilation.acl_graph:ACLGraphWrapper"
WITH_IT = {symbol.target for symbol in symbols_of(STACK) if f"{symbol.target}.".startswith(f"{MOVED}.")}


def plant(folder: Path) -> None:
    for file, before, after, *_ in PLANTED:
        (path,) = (folder / "vllm_ascend").glob(file) if "*" in file else [folder / "vllm_ascend" / file]
        content = path.read_bytes()
        old, new = (text if isinstance(text, bytes) else text.encode() for text in (before, after))
        assert content.count(old) == 1, (file, content.count(old))
        path.write_bytes(content.replace(old, new))
    source = folder / "vllm_ascend" / "compilation" / "acl_graph.py"
    tree = ast.parse(source.read_text())
    (moved,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ACLGraphWrapper"]
    tree.body.remove(moved)
    source.write_text(ast.unparse(tree))
    source.with_name("wrapper.py").write_text("import torch\n\n\n" + ast.unparse(moved))


@pytest.fixture(scope="module")
def drifted(tmp_path_factory):
    folder = copied(tmp_path_factory.mktemp("drifted"))
    plant(folder)
    return folder


@pytest.fixture(scope="module")
def answer(drifted):
    done = command("check", "--against", str(drifted), "--json")
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)


def test_the_installed_stack_has_not_drifted():
    done = command("check")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().splitlines()[-1] == f"compat: no drift in {len(symbols_of(STACK))} symbols of {STACK}"
    verdict = verify(installed())
    assert (verdict.known, verdict.name, verdict.drift, verdict.unchecked) == (True, STACK, (), ())
    assert verdict.targets == {symbol.target for symbol in symbols_of(STACK)}


def test_verifying_imports_nothing_but_the_standard_library_and_ourselves():
    script = (
        "import sys; from afd_dsv4.compat.contract import verify; from afd_dsv4.compat.stack import installed\n"
        "before = set(sys.modules); assert verify(installed()).holds\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(tops - set(sys.stdlib_module_names) - {'__main__'}))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BARE + script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "['afd_dsv4']", done.stderr


#: The search path without the `.pth` files that import things.
PLACES = [*(path for path in sys.path if "site-packages" in path), str(Path(__file__).parents[2])]
BARE = f"import sys; sys.path += {PLACES!r}\n"


@pytest.mark.parametrize(
    ("target", "kind", "said"), [plants[3:] for plants in PLANTED], ids=lambda value: str(value)[:60]
)
def test_each_planted_drift_is_named_with_its_consequence(answer, target, kind, said):
    (symbol,) = [symbol for symbol in SYMBOLS if symbol.target == target and STACK in symbol.stacks]
    drifts = [drift for drift in answer["drift"] if drift["target"] == target]
    assert drifts
    assert all(drift["consequence"] == symbol.consequence for drift in drifts)
    assert any(drift["kind"] == kind.name.lower() and said in drift["text"] for drift in drifts)


def test_a_planted_moved_class_is_found_where_it_went_with_its_members(answer):
    pytest.importorskip("griffe")
    drifts = {drift["target"]: drift for drift in answer["drift"] if drift["target"] in WITH_IT}
    assert set(drifts) == WITH_IT
    for target, drift in drifts.items():
        assert drift["kind"] == "moved"
        assert drift["hint"].startswith(f"now {target.replace('acl_graph', 'wrapper')} (")
        assert drift["hint"].endswith("otherwise as recorded")
        assert drift["consequence"]


def test_nothing_is_reported_that_was_not_planted(answer):
    expected = {plants[3] for plants in PLANTED} | WITH_IT
    # The function around the planted constant has another body too.
    expected.add("vllm_ascend.models.layer.attention.layer:get_dsv4_block_sizes")
    assert {drift["target"] for drift in answer["drift"]} == expected
    assert answer["contract"] == STACK
    assert answer["unchecked"] == []
    assert answer["holds"] == len(symbols_of(STACK)) - len(expected)


def test_without_griffe_the_drift_is_the_same_and_one_line_says_what_is_missing(drifted, answer):
    done = command("check", "--against", str(drifted), prelude="sys.modules['griffe'] = None")
    assert done.returncode == 1, done.stderr
    assert all(f"\n{drift['target']}: " in done.stdout for drift in answer["drift"])
    assert done.stdout.count("pip install 'afd-dsv4[compat]'") == 1
    assert f"{MOVED}: removed symbol" in done.stdout


def test_patching_is_refused_on_the_drifted_packages_and_names_every_symbol(drifted, answer):
    script = (
        "import json, sys\n"
        "from afd_dsv4.compat.contract import verify; from afd_dsv4.compat.patch import *\n"
        "from afd_dsv4.compat.stack import installed, package_folder\n"
        f"assert str(package_folder('vllm')).startswith({str(drifted)!r})\n"
        "patches = PatchSet('x', [Patch('vllm.plugins:load_general_plugins', lambda f: lambda: f(), 'why', 'when')])\n"
        "try: patches.apply(verify(installed()))\n"
        "except DriftError as error: print(json.dumps([str(error), [drift.target for drift in error.drift]]))\n"
        "assert not patches.applied and 'vllm' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=False, env=dict(os.environ) | {"PYTHONPATH": str(drifted)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    message, targets = json.loads(done.stdout)
    assert set(targets) == {drift["target"] for drift in answer["drift"]}
    assert all(target in message for target in targets)


def test_other_layout_and_no_comments_in_every_file_are_no_drift(tmp_path):
    contract = load(STACK)
    assert contract is not None
    for file in {*contract.files, "vllm/__init__.py", "vllm_ascend/__init__.py", "vllm/_version.py"}:
        package, _, rest = file.partition("/")
        content = (package_folder(package) / rest).read_bytes()
        laid_out = ast.unparse(ast.parse(content)).encode() if file.endswith(".py") else content + b"linked anew"
        assert laid_out != content
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(laid_out)
    done = command("check", "--against", str(tmp_path), "--stack", STACK)
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().endswith(f"compat: no drift in {len(symbols_of(STACK))} symbols of {STACK}")


@pytest.mark.parametrize("versions", [{"vllm": "0.24.0"}, {"vllm": "0.23.0.post1"}, {"vllm_ascend": "0.23.0.post1"}])
def test_an_unknown_version_is_status_2_whatever_the_code_looks_like(tmp_path, versions):
    for name, version in versions.items():
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    done = command("check", path=tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    assert "unknown stack" in done.stdout
    assert next(iter(versions.values())) in done.stdout


def test_griffe_reads_the_same_signatures_and_bases():
    griffe = pytest.importorskip("griffe")
    contract = load(STACK)
    assert contract is not None
    trees = {}
    compared = 0
    for target, entry in contract.symbols.items():
        if entry["kind"] not in ("function", "class") or "inherited_from" in entry:
            continue
        module, _, qualname = target.partition(":")
        package, _, file = entry["files"][0].partition("/")
        path = package_folder(package) / file
        tree = trees.get(module) or trees.setdefault(module, griffe.visit(module, filepath=path, code=path.read_text()))
        symbol = tree[qualname]
        if "property" in entry.get("decorators", ()):
            assert "property" in symbol.labels  # griffe takes it for an attribute
        elif entry["kind"] == "class":
            keywords = [base for base in entry["bases"] if "=" in base]
            assert [re.sub(r"\s", "", str(base)) for base in symbol.bases] == [
                re.sub(r"\s", "", base) for base in entry["bases"] if base not in keywords
            ], target
        else:
            expected = [
                (name, kind in ("*", "**") or default is not None) for name, kind, default, _ in entry["parameters"]
            ]
            assert [
                (parameter.name.lstrip("*"), parameter.default is not None) for parameter in symbol.parameters
            ] == expected, target
        compared += 1
    assert compared > 80


def test_a_contract_recorded_again_is_the_one_that_is_here():
    done = command("record")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(
        (Path(__file__).parents[2] / f"compat/contracts/{STACK}.json").read_text()
    )


def test_the_contracts_of_the_other_stacks_tell_them_from_this_one():
    folders = {package: package_folder(package) for package in PACKAGES}
    for name in ("vllm-ascend-80d8c194f", "vllm-ascend-cf0baa38d"):
        contract = load(name)
        assert contract is not None
        drift = compare(contract, Reader(folders), symbols_of(name)).drift
        assert "vllm_ascend.attention.dsa_v1:AscendDSAImpl._forward_decode" in {one.target for one in drift}


@pytest.mark.vllm_runtime
def test_an_operator_of_torch_is_patched_and_comes_back():
    torch = pytest.importorskip("torch")
    original = torch.ops.aten.relu
    patches = PatchSet("torch", [Patch("torch:ops.aten.relu", lambda relu: lambda x: -relu(x), "why", "when")])
    with pytest.raises(DriftError, match="aten::relu"):
        patches.apply(verify(installed()))
    verdict = verify(installed())
    patches.apply(type(verdict)(True, (), STACK, frozenset({"aten::relu"})))
    try:
        assert torch.ops.aten.relu(torch.tensor([2.0])).item() == -2
        assert torch.ops.aten.relu.default is original.default  # the wrapper shows the overloads of what it wraps
    finally:
        patches.undo()
    assert torch.ops.aten.relu is original
