# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The adapters of (vllm 0.26.0, vllm-ascend 80d8c194f), held against the recorded contracts: no checkout is needed.

Whatever the adapter's sources override, call behind themselves, import or read of the stack's own objects must be a
symbol of the contract, because only then does drift in it refuse the stack. The sources are read, nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

from afd_dsv4.compat.adapters import ADAPTERS, full_name, worker_class
from afd_dsv4.compat.contract import Contract, differences, load
from afd_dsv4.compat.stack import AFD_PACKAGE, afd_pin, name_of
from afd_dsv4.compat.stack import PACKAGES as STACK_PACKAGES
from afd_dsv4.geometry import page_layout

ROOT = Path(__file__).parents[2]
PACKAGES = (*STACK_PACKAGES, AFD_PACKAGE)
STACK, SHARED = "vllm-ascend-80d8c194f", "vllm-ascend-0.23.0"
PIN = "afd-plugin-85e826e"
SOURCES = [
    ROOT / "compat" / "adapters" / folder / f"{module}.py"
    for folder, modules in (
        ("vllm_0_23_0_ascend_0_23_0", ("worker", "runner", "launches")),
        ("vllm_0_26_0_ascend_80d8c194f", ("worker",)),
        ("vllm_0_26_0_ascend_80d8c194f_afd_85e826e", ("worker", "runner", "connectors")),
    )
    for module in modules
]
_WORKERS = ("vllm_ascend.worker.worker:NPUWorker", "vllm.v1.worker.worker_base:WorkerBase")
_RUNNERS = (
    "vllm_ascend.worker.model_runner_v1:NPUModelRunner",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
)
_CAM = "afd_plugin.connectors.npu.async_cam:CAMAsyncAFDConnector"
#: Where the attributes of an object of each native class, or of a mixin for it, are recorded.
HOMES = {
    "NPUWorker": _WORKERS,
    "WorkerMixin": _WORKERS,
    "AFDNPUAttentionWorker": ("afd_plugin.v1.worker.npu.attention_worker:AFDNPUAttentionWorker", *_WORKERS),
    "NPUModelRunner": _RUNNERS,
    "RunnerMixin": _RUNNERS,
    "AFDNPUAttentionModelRunner": (
        "afd_plugin.v1.worker.npu.attention_model_runner:AFDNPUAttentionModelRunner",
        *_RUNNERS,
    ),
    "WatchedMixin": (_CAM, "afd_plugin.connectors.base:AFDConnectorBase"),
    "CAMAsyncAFDConnector": (_CAM,),
    "CAMP2pAFDConnector": ("afd_plugin.connectors.npu.camp2p:CAMP2pAFDConnector",),
}
#: What a native method whose body is recorded reads, too.
READ_BY_RECORDED = {("AFDNPUAttentionWorker", "vllm_config")}
#: The stack's objects that the adapter's functions are handed, by the name of the variable.
HANDED = {
    "scheduler_output": "vllm.v1.core.sched.output:SchedulerOutput",
    "context": "vllm.forward_context:ForwardContext",
    "descriptor": "vllm.forward_context:BatchDescriptor",
    "entry": "vllm_ascend.compilation.acl_graph:ACLGraphEntry",
}
#: The same in a connector.
TRANSFERRED = {"context": "afd_plugin.connectors.metadata:AFDTransferContext"}
#: It writes lines into the log; were it moved, the import would say so.
HARMLESS = {"vllm.logger:logger"}


@pytest.fixture(scope="module")
def contract() -> Contract:
    found = load(STACK)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def both(contract: Contract) -> Contract:
    """The contracts of the stack and of afd-plugin, as one."""
    found = load(PIN)
    assert found is not None
    return Contract("both", {}, {}, contract.symbols | found.symbols)


def classes(source: str) -> Iterator[tuple[ast.ClassDef, str]]:
    """The classes that derive from a native one, or that come before one as a mixin, with its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in HOMES]
            if node.name.endswith("Mixin"):
                bases = [node.name]
            if bases:
                yield node, bases[-1]


@cache
def of_mixins() -> frozenset[str]:
    """What our mixins define, which classes behind them use."""
    return frozenset(
        name
        for path in SOURCES
        for node, _ in classes(path.read_text())
        if node.name.endswith("Mixin")
        for name in own_names(node)
    )


def own_names(node: ast.ClassDef) -> set[str]:
    """What the class defines itself: methods, fields, and what its methods first assign to its objects."""
    names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    names |= {c.target.id for c in node.body if isinstance(c, ast.AnnAssign) and isinstance(c.target, ast.Name)}
    for child in ast.walk(node):
        given = child.targets if isinstance(child, ast.Assign) else [child.target] if _annotates(child) else []
        for target in [part for one in given for part in (one.elts if isinstance(one, ast.Tuple) else [one])]:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                names.add(target.attr)
    return names


def _annotates(node: ast.AST) -> TypeGuard[ast.AnnAssign]:
    return isinstance(node, ast.AnnAssign)


def needs(source: str) -> set[str]:
    """Every symbol that an adapter's source relies on; for an attribute, its places in `HOMES`, joined by `|`."""
    found: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
    for node, native in classes(source):
        own = own_names(node) | of_mixins()
        for child in ast.walk(node):
            if not isinstance(child, ast.Attribute):
                continue
            behind = ast.unparse(child.value)
            if (native, child.attr) in READ_BY_RECORDED:
                continue
            if (behind == "super()" and child.attr not in of_mixins()) or (
                behind in ("self", "super()") and child.attr not in own
            ):
                found.add("|".join(f"{home}.{child.attr}" for home in HOMES[native]))
    return found - HARMLESS


def missing(source: str, contract: Contract) -> list[str]:
    return sorted(need for need in needs(source) if not contract.symbols.keys() & set(need.split("|")))


def fields(source: str, handed: dict[str, str]) -> set[tuple[str, str]]:
    """Attributes of what the adapter is handed, as (class, attribute)."""
    return {
        (handed[node.value.id], node.attr)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in handed
    } - {(HANDED["context"], "items")}  # of a dictionary that has the same name elsewhere


def refused_calls(source: str, contract: Contract) -> list[str]:
    """Overrides that the native code could not call as it calls its own."""
    found = []
    for node, native in classes(source):
        for method in [child for child in node.body if isinstance(child, ast.FunctionDef)]:
            entry = next((e for home in HOMES[native] if (e := contract.symbols.get(f"{home}.{method.name}"))), None)
            if entry is None or entry["kind"] != "function":
                continue
            names = [arg.arg for arg in method.args.args]
            native_names = [name for name, *_ in entry["parameters"]]
            anything = method.args.vararg is not None and method.args.kwarg is not None
            if method.args.kwarg and not anything:
                names.append(method.args.kwarg.arg)
            if names != (native_names[: len(names)] if anything else native_names):
                found.append(f"{method.name}({', '.join(names)}) for {', '.join(native_names)}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_all_that_the_adapter_relies_on_is_in_the_contract(path: Path, contract: Contract, both: Contract) -> None:
    source = path.read_text()
    held = both if "_afd_" in path.parent.name else contract
    assert missing(source, held) == []
    assert refused_calls(source, held) == []
    assert list(classes(source)) or path.stem == "launches" or path.parent.name == "vllm_0_26_0_ascend_80d8c194f"
    handed = HANDED | (TRANSFERRED if path.stem == "connectors" else {})
    for target, field in fields(source, handed):
        entry = held.symbols[target]
        assert field in [name for name, *_ in entry["fields"]], f"{target} has no {field}"


def test_the_check_sees_an_override_an_attribute_and_an_import_that_nobody_recorded(contract: Contract) -> None:
    planted = """
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner, unheard_of
class Runner(NPUModelRunner):
    def execute_model(self, other): return super()._unrecorded(self.also_unrecorded, self.device)
    def get_kv_cache_spec(self): self.mine = 1; return self.mine
"""
    found = missing(planted, contract)
    assert [re.split(r"[.:]", need)[-1] for need in found] == ["_unrecorded", "also_unrecorded", "unheard_of"]
    assert refused_calls(planted, contract) == [
        "execute_model(self, other) for self, scheduler_output, intermediate_tensors"
    ]


def test_the_check_sees_into_mixins_and_into_classes_of_afd_plugin(both: Contract) -> None:
    planted = """
from afd_plugin.connectors.factory import unheard_of
class RunnerMixin(object):
    def execute_model(self, other): return super()._unrecorded()
class Runner(RunnerMixin, AFDNPUAttentionModelRunner):
    def shutdown(self): return self.also_unrecorded
"""
    found = missing(planted, both)
    assert {re.split(r"[.:]", need)[-1] for need in found} == {"_unrecorded", "also_unrecorded", "unheard_of"}
    assert refused_calls(planted, both) == [
        "execute_model(self, other) for self, scheduler_output, intermediate_tensors"
    ]


def test_keywords_that_the_adapter_reads_are_parameters_of_the_native_method(contract: Contract) -> None:
    source = (ROOT / "compat/adapters/vllm_0_23_0_ascend_0_23_0/runner.py").read_text()
    read = set(re.findall(r'kwargs(?:\.get\(|\[)"(\w+)"', source))
    entry = contract.symbols["vllm_ascend.worker.model_runner_v1:NPUModelRunner._build_attention_metadata"]
    assert read == {"num_scheduled_tokens", "num_scheduled_tokens_np", "num_reqs"}
    assert read <= {name for name, *_ in entry["parameters"]}


def test_an_adapter_is_found_for_exact_tuples_only() -> None:
    assert set(ADAPTERS) == {SHARED, STACK, f"{STACK}+{PIN}"}
    pin = afd_pin("85e826ed8239dd9d8032375bb84a56116e24f0e0")
    assert full_name(STACK, pin) == f"{STACK}+{PIN}"
    assert full_name(SHARED, pin) is None
    assert worker_class(full_name(STACK, afd_pin("2e4378f"))) is None
    whole = "80d8c194f7584b17fe08065ea99a130916f6b0e7"
    assert worker_class(name_of("0.26.0", "0.19.1rc2.dev1304+g80d8c194f", whole)) == ADAPTERS[STACK].worker
    for vllm, commit in (("0.26.0", None), ("0.26.0", "cf0baa38d"), ("0.26.1", whole), ("0.23.0", whole)):
        assert worker_class(name_of(vllm, "0.19.1rc2.dev1304", commit)) is None


def test_every_adapters_worker_is_where_its_name_says() -> None:
    for adapter in ADAPTERS.values():
        module, _, name = adapter.worker.rpartition(".")
        path = ROOT / Path(*module.split(".")[1:]).with_suffix(".py")  # afd_dsv4.compat is the folder compat
        assert name in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def test_pages_are_those_of_the_shared_adapter_and_of_the_recorded_table(contract: Contract) -> None:
    (table,) = contract.symbols["vllm_ascend.models.layer.attention.layer:get_dsv4_block_sizes._DSV4_BLOCK_SIZES"][
        "values"
    ]
    for size, ((kv, swa, c4, c128), (indexer, other)) in ast.literal_eval(table).items():
        layout = page_layout(STACK, size)
        assert layout == page_layout(SHARED, size)  # the shared runner asks for it by the other name
        assert (layout.kv_rows, layout.swa_rows, layout.c4_page_rows, layout.c128_page_rows) == (kv, swa, c4, c128)
        assert (layout.indexer_page_bytes, layout.other_page_bytes) == (indexer, other)


def test_every_difference_to_the_shared_adapters_stack_is_explained(contract: Contract) -> None:
    shared = load(SHARED)
    assert shared is not None
    new = contract.symbols.keys() - shared.symbols.keys()
    assert new == {"vllm_ascend.ascend_config:SchedulerConfig.short_request_first_config"}
    assert shared.symbols.keys() < contract.symbols.keys()
    differing = {
        target for target, entry in shared.symbols.items() if list(differences(entry, contract.symbols[target]))
    }
    section = (ROOT / "docs" / "compat.md").read_text().split("\n## From 0.23.0 to 80d8c194f\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+:[\w.]+)` \| .+ \| .+ \|$", section, re.MULTILINE)
    assert sorted(rows) == sorted(differing)
