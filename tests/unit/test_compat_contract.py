# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Every kind of drift is named, with its consequence; layout, comments and docstrings are none."""

import ast
import csv
import io
import random
import re
import tokenize
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.compat.contract import FOLDER, Contract, DriftKind, compare, differences, fingerprint, load, verify
from afd_dsv4.compat.read import NotFound, NotReadable, Reader, digest
from afd_dsv4.compat.stack import AFD_PINS, KNOWN, InstalledStack, afd_pin
from afd_dsv4.compat.symbols import SYMBOLS, Symbol, symbols_of

ROOT = Path(__file__).parents[2]
#: Commits of afd-plugin with an adapter, and so with a contract.
PINS = [pin for pin in AFD_PINS if not pin.lacks]


def write(folder: Path, **modules: str) -> Path:
    """A package `pkg` of these modules; `a__b` is module `a.b`."""
    for name, text in {"__init__": "", **modules}.items():
        path = (folder / "pkg").joinpath(*name.split("__") if not name.startswith("__") else [name])
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != folder / "pkg":
            (path.parent / "__init__.py").touch()
        path.with_suffix(".py").write_text(text)
    return folder / "pkg"


def recorded(folder: Path, *targets: str) -> tuple[Contract, tuple[Symbol, ...]]:
    reader = Reader({"pkg": folder})
    entries = {target: reader.read(target).entry for target in targets}
    files = {file: fingerprint(reader, file) for entry in entries.values() for file in entry["files"]}
    contract = Contract.from_json(Contract("made-up", {"pkg": "1"}, files, entries).as_json())
    return contract, tuple(Symbol(target, "the test", f"{target} is wrong") for target in targets)


def drift_of(tmp_path: Path, target: str, before: str, after: str):
    """What is reported of one symbol of the module `pkg.m` once the module reads `after`."""
    contract, symbols = recorded(write(tmp_path / "before", m=before), target)
    verdict = compare(contract, Reader({"pkg": write(tmp_path / "after", m=after)}), symbols)
    assert verdict.known
    assert verdict.holds == (verdict.drift == ())
    assert (target in verdict.targets) == (verdict.drift == ())
    assert all(drift.consequence == f"{target} is wrong" for drift in verdict.drift)
    assert all(drift.used_for == "the test" for drift in verdict.drift)
    return verdict.drift


CLASS = "@dataclass\nclass C(Base):\n    a: int\n    b: str = 'x'\n    def f(self, x, y=1): return x\n"
SELF = "class C:\n    def f(self):\n        self.x = 1\n"


@pytest.mark.parametrize(
    ("target", "before", "after", "kind", "said"),
    [
        ("f", "def f(a, b): pass", "def f(a, c): pass", DriftKind.RENAMED_PARAMETER, "b -> c"),
        ("f", "def f(a): pass", "def f(a, b): pass", DriftKind.NEW_REQUIRED_PARAMETER, "b"),
        ("f", "def f(a): pass", "def f(a, *, b): pass", DriftKind.NEW_REQUIRED_PARAMETER, "b"),
        ("f", "def f(a): pass", "def f(a, b=None): pass", DriftKind.NEW_PARAMETER, "b=None"),
        ("f", "def f(a): pass", "def f(a, **kw): pass", DriftKind.NEW_PARAMETER, "**kw"),
        ("f", "def f(a, b): pass", "def f(a): pass", DriftKind.REMOVED_PARAMETER, "b"),
        ("f", "def f(a, b): pass", "def f(b, a): pass", DriftKind.PARAMETER_ORDER, "a, b -> b, a"),
        ("f", "def f(a, b): pass", "def f(a, *, b): pass", DriftKind.PARAMETER_KIND, "positional -> keyword-only"),
        ("f", "def f(a=1): pass", "def f(a=2): pass", DriftKind.DEFAULT, "1 -> 2"),
        ("f", "def f(a): pass", "def f(a=2): pass", DriftKind.DEFAULT, "none -> 2"),
        ("f", "def f(a): pass", "def f(a=None): pass", DriftKind.DEFAULT, "none -> None"),
        ("f", "def f(a: int): pass", "def f(a: str): pass", DriftKind.ANNOTATION, "int -> str"),
        ("f", "def f() -> int: pass", "def f() -> str: pass", DriftKind.ANNOTATION, "int -> returns str"),
        ("f", "def f(): return 1", "def f(): return True", DriftKind.BODY, "m.py:1"),
        ("f", "def f():\n  x()\n  y()", "def f():\n  y()\n  x()", DriftKind.BODY, "m.py:1"),
        ("f", "def f(): pass", "@cache\ndef f(): pass", DriftKind.DECORATORS, "none -> cache"),
        ("f", "def f(): pass", "async def f(): pass", DriftKind.KIND, "def -> async def"),
        ("f", "def f(): pass", "f = 1", DriftKind.KIND, "function -> constant"),
        ("f", "def f(): pass", "def g(): pass", DriftKind.MISSING, "no f in pkg.m"),
        ("C", CLASS, CLASS.replace("Base", "Other"), DriftKind.BASES, "Base -> Other"),
        ("C", CLASS, CLASS.replace("a: int", "a: float"), DriftKind.FIELD, "a: int -> a: float"),
        ("C", CLASS, CLASS.replace("'x'", "'y'"), DriftKind.FIELD, "'x' -> b: str = 'y'"),
        ("C", CLASS, CLASS.replace("    a: int\n", ""), DriftKind.FIELD, "a: int -> gone"),
        ("C", CLASS, CLASS.replace("a: int", "a: int\n    c: int"), DriftKind.FIELD, "c: int"),
        ("C", "class C:\n a: int\n b: int", "class C:\n b: int\n a: int", DriftKind.FIELD, "order a, b -> b, a"),
        ("C", CLASS, CLASS.replace("dataclass", "dataclass(frozen=True)"), DriftKind.DECORATORS, "frozen=True"),
        ("C.f", CLASS, CLASS.replace("y=1", "y=2"), DriftKind.DEFAULT, "1 -> 2"),
        ("C.f", CLASS, CLASS.replace("f(", "g("), DriftKind.MISSING, "no f in pkg.m:C"),
        ("SIZES", "SIZES = {1: [2]}", "SIZES = {1: [3]}", DriftKind.VALUE, "{1: [2]} -> {1: [3]}"),
        ("f.SIZES", "def f():\n  SIZES = 1", "def f():\n  SIZES = 2", DriftKind.VALUE, "1 -> 2"),
        ("C.x", SELF, SELF.replace("= 1", "= 2"), DriftKind.VALUE, "1 -> 2"),
        ("C.x", SELF, SELF.replace("self.x", "self.y"), DriftKind.MISSING, "no x in pkg.m:C"),
        ("n", "from pkg.a import n", "from pkg.b import n", DriftKind.SOURCE, "pkg.a:n -> pkg.b:n"),
    ],
)  # fmt: skip
def test_each_kind_of_drift_is_named(tmp_path, target, before, after, kind, said):
    drift = drift_of(tmp_path, f"pkg.m:{target}", before, after)
    assert [one.kind for one in drift] == [kind]
    assert said in str(drift[0])
    assert kind.value in str(drift[0])


def test_several_changes_of_one_symbol_are_all_reported(tmp_path):
    drift = drift_of(tmp_path, "pkg.m:f", "def f(a, b=1): return a", "def f(x, b=2): return x")
    assert [one.kind for one in drift] == [DriftKind.RENAMED_PARAMETER, DriftKind.DEFAULT, DriftKind.BODY]


def test_a_member_that_moves_into_a_base_class_or_to_another_one_is_told(tmp_path):
    own = "class A:\n  def f(self): pass\nclass B(A):\n  def f(self): pass"
    inherited = "class A:\n  def f(self): pass\nclass B(A):\n  pass"
    other = "class Z:\n  def f(self): pass\nclass B(Z):\n  pass"
    (drift,) = drift_of(tmp_path / "1", "pkg.m:B.f", own, inherited)
    assert (drift.kind, drift.found) == (DriftKind.INHERITED, "pkg.m:A")
    (drift,) = drift_of(tmp_path / "2", "pkg.m:B.f", inherited, other)
    assert (drift.kind, drift.recorded, drift.found) == (DriftKind.INHERITED, "pkg.m:A", "pkg.m:Z")


def test_an_inherited_member_is_followed_into_other_modules_and_its_body_counts(tmp_path):
    modules = {
        "base": "class Base:\n  def f(self): return 1\n",
        "sub__deep": "from ..base import Base as Renamed\n",
        "m": "import pkg.other as o\nfrom pkg.sub.deep import Renamed\n"
        "class C(Renamed): pass\nclass D(o.E[int]): pass\n",
        "other": "class E:\n  def g(self): pass\n",
    }
    folder = write(tmp_path / "a", **modules)
    contract, symbols = recorded(folder, "pkg.m:C.f", "pkg.m:D.g")
    assert contract.symbols["pkg.m:C.f"]["inherited_from"] == "pkg.base:Base"
    assert contract.symbols["pkg.m:C.f"]["files"] == ["pkg/m.py", "pkg/sub/deep.py", "pkg/base.py"]
    assert contract.symbols["pkg.m:D.g"]["inherited_from"] == "pkg.other:E"
    assert compare(contract, Reader({"pkg": folder}), symbols).holds
    changed = write(tmp_path / "b", **{**modules, "base": "class Base:\n  def f(self): return 2\n"})
    (drift,) = compare(contract, Reader({"pkg": changed}), symbols).drift
    assert (drift.kind, drift.target) == (DriftKind.BODY, "pkg.m:C.f")
    assert drift.place == "pkg/base.py:2"


def test_definitions_inside_conditions_count_and_so_do_overwritten_ones(tmp_path):
    before = "if new:\n  def f(): return 1\nelse:\n  def f(): return 2\n"
    after = "if new:\n  def f(): return 3\nelse:\n  def f(): return 2\n"
    (drift,) = drift_of(tmp_path, "pkg.m:f", before, after)
    assert drift.kind is DriftKind.BODY
    assert "further definitions" in str(drift)


def test_imports_in_a_circle_and_modules_that_do_not_parse_are_no_answer_and_no_crash(tmp_path):
    folder = write(
        tmp_path, m="from pkg.n import C\n", n="from pkg.m import C\n", broken="def f(:\n", d="class D(Unknown): pass\n"
    )
    reader = Reader({"pkg": folder})
    assert reader.read("pkg.m:C").entry["kind"] == "import"
    for missing in ("pkg.m:C.f", "pkg.d:D.f", "pkg.gone:f", "pkg.m:f"):
        with pytest.raises(NotFound):
            reader.read(missing)
    for unreadable in ("pkg.broken:f", "elsewhere:f", "_C_ascend::compressor", "pkg::op"):
        with pytest.raises(NotReadable):
            reader.read(unreadable)


CPP = """
    // ops.def("compressor(Tensor old) -> Tensor");
    ops.def(
        "compressor(Tensor x, "
        "           Tensor(a!) state_cache, Tensor? seqused=None,"
        "           str layout=\\"BSND\\") -> Tensor"
    );
    ops.def("compressor_metadata(Tensor x) -> (Tensor, Tensor)");
"""
SCHEMA = 'compressor(Tensor x, Tensor(a!) state_cache, Tensor? seqused=None, str layout="BSND") -> Tensor'


def operator_package(folder: Path, cpp: str | None = None, library: bytes | None = None) -> Reader:
    package = folder / "vllm_ascend"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if cpp is not None:
        (folder / "csrc").mkdir()
        (folder / "csrc" / "torch_binding.cpp").write_text(cpp)
    if library is not None:
        (package / "vllm_ascend_C.cpython-311-x86_64-linux-gnu.so").write_bytes(library)
    return Reader({"vllm_ascend": package})


def test_a_schema_is_the_same_from_the_sources_and_from_a_compiled_library(tmp_path):
    library = b"\x7fELF\x00compressor_metadata(Tensor x) -> (Tensor, Tensor)\x00" + SCHEMA.encode() + b"\x00rest"
    for name, reader in {
        "sources": operator_package(tmp_path / "a", cpp=CPP),
        "library": operator_package(tmp_path / "b", library=library),
    }.items():
        assert reader.read("_C_ascend::compressor").entry["schema"] == SCHEMA, name
        assert reader.read("_C_ascend::compressor_metadata").entry["schema"].endswith("-> (Tensor, Tensor)"), name
        with pytest.raises(NotFound):
            reader.read("_C_ascend::compress")
    with pytest.raises(NotReadable, match="not readable statically"):
        operator_package(tmp_path / "c").read("_C_ascend::compressor")


def test_a_changed_schema_is_drift_and_one_that_nothing_states_is_not_checked(tmp_path):
    entry = operator_package(tmp_path / "a", cpp=CPP).read("_C_ascend::compressor").entry
    contract = Contract("made-up", {}, {}, {"_C_ascend::compressor": entry})
    symbols = (Symbol("_C_ascend::compressor", "the launch", "state is lost"),)
    changed = operator_package(tmp_path / "b", cpp=CPP.replace("Tensor x, ", "Tensor x, Tensor y, "))
    (drift,) = compare(contract, changed, symbols).drift
    assert (drift.kind, drift.consequence) == (DriftKind.SCHEMA, "state is lost")
    silent = compare(contract, operator_package(tmp_path / "c"), symbols)
    assert (silent.drift, [target for target, _ in silent.unchecked]) == ((), ["_C_ascend::compressor"])
    assert "_C_ascend::compressor" not in silent.targets
    assert not silent.holds
    assert silent.reasons[0].startswith("_C_ascend::compressor: not checked: ")


def test_a_symbol_that_was_never_recorded_is_drift(tmp_path):
    contract, symbols = recorded(write(tmp_path, m="f = 1\ng = 2\n"), "pkg.m:f")
    verdict = compare(contract, Reader({"pkg": tmp_path / "pkg"}), (*symbols, Symbol("pkg.m:g", "x", "y")))
    assert [(drift.target, drift.kind) for drift in verdict.drift] == [("pkg.m:g", DriftKind.UNRECORDED)]


SOURCES = sorted(ROOT.glob("compat/*.py")) + sorted(ROOT.glob("afd_dsv4/*/*.py"))


def reformatted(text: str, seed: int) -> str:
    """Other comments, blank lines, line breaks within brackets, and docstrings; the same program."""
    dice = random.Random(seed)
    tokens = []
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.string, 0) * (token.type == tokenize.OP)
        if token.type == tokenize.COMMENT:
            tokens.append((tokenize.COMMENT, f"# {dice.random()}"))
            continue
        tokens.append((token.type, token.string))
        if depth and token.string == "," and dice.random() < 0.2:
            tokens.append((tokenize.NL, "\n"))
        elif token.type == tokenize.NEWLINE and dice.random() < 0.1:
            tokens += [(tokenize.COMMENT, "# and so on"), (tokenize.NL, "\n"), (tokenize.NL, "\n")]
    tree = ast.parse(tokenize.untokenize(tokens))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            has = ast.get_docstring(node) is not None
            if has and dice.random() < 0.7:
                node.body[:1] = [ast.Pass()] if len(node.body) == 1 else []
            elif not has and dice.random() < 0.5:
                node.body.insert(0, ast.Expr(ast.Constant("Said anew.")))
    return ast.unparse(ast.fix_missing_locations(tree)) if dice.random() < 0.5 else tokenize.untokenize(tokens)


@settings(max_examples=25, deadline=None)
@given(source=st.sampled_from(SOURCES), seed=st.integers(0, 1 << 30))
def test_layout_comments_and_docstrings_leave_no_trace(source, seed):
    def digests(text: str) -> dict[str, str]:
        bodies = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                bodies.setdefault(node.name, []).append(digest([node]))
        return bodies

    text = source.read_text()
    assert digests(reformatted(text, seed)) == digests(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [("x + 1", "x - 1"), ("x < 1", "x <= 1"), ("1", "1.0"), ("1", "True"), ("1", "'1'"),
     ("'a'", "b'a'"), ("f(a=1)", "f(b=1)"),
     ("x.a", "x.b"), ("not x", "x"), ("f'{x}'", "f'{x!r}'"), ("lambda: 1", "lambda: 2"), ("[*x]", "[x]"),
     ("x if y else z", "z if y else x"), ("x and y", "x or y"), ("x[1:]", "x[:1]"), ("x", "y")],
)  # fmt: skip
def test_a_body_that_does_something_else_has_another_hash(one, other):
    assert digest(ast.parse(one).body) != digest(ast.parse(other).body)


def test_a_changed_file_with_the_same_symbols_is_no_drift(tmp_path):
    before = 'def f(a, b=(1, 2)):\n    """Says this."""\n    return {"a": a}  # why\n'
    after = (
        "# a licence\n\n\ndef f(\n    a,\n    b=(1, 2,),\n):\n    'Says that.'\n    return {'a': (a)}\n\ndef g(): ...\n"
    )
    assert drift_of(tmp_path, "pkg.m:f", before, after) == ()


def test_a_contract_of_another_format_is_refused(tmp_path):
    contract, _ = recorded(write(tmp_path, m="f = 1\n"), "pkg.m:f")
    with pytest.raises(ValueError, match="record it again"):
        Contract.from_json(contract.as_json().replace('"format": 1', '"format": 0'))


def test_there_is_a_contract_of_every_known_stack_with_exactly_its_symbols():
    assert {path.stem for path in FOLDER.glob("*.json")} == {one.name for one in (*KNOWN, *PINS)}
    for pin in PINS:
        contract = load(pin.name)
        assert contract is not None
        assert contract.name == pin.name
        assert set(contract.symbols) == {symbol.target for symbol in symbols_of(pin.name)}
        assert {file for entry in contract.symbols.values() for file in entry["files"]} == set(contract.files)
        assert all(file.startswith("afd_plugin/") for file in contract.files)
        assert afd_pin(contract.stack["afd_plugin_commit"]) == pin
    for stack in KNOWN:
        contract = load(stack.name)
        assert contract is not None
        assert contract.name == stack.name
        assert set(contract.symbols) == {symbol.target for symbol in symbols_of(stack.name)}
        assert {file for entry in contract.symbols.values() for file in entry["files"]} == set(contract.files)
        assert stack.matches(*(contract.stack[key] for key in ("vllm", "vllm_ascend", "vllm_ascend_commit")))
    assert load("none such") is None


def test_afd_plugin_is_verified_with_the_stack_where_afd_is_asked_for_and_a_refused_pin_adds_nothing(monkeypatch):
    folders: dict[str, Path] = {}
    monkeypatch.setattr("afd_dsv4.compat.contract.package_folder", folders.get)
    stack = InstalledStack("3.11", "x86_64", None, None, "0.26.0", "0.1", None, None, "80d8c194f", "0.1", "85e826e")
    alone, both = verify(stack), verify(stack, afd=True)
    assert alone.known
    assert both.known
    theirs = {symbol.target for symbol in symbols_of("afd-plugin-85e826e")}
    assert {target for target, _ in both.unchecked} - {target for target, _ in alone.unchecked} == theirs
    assert not both.holds
    for commit in ("2e4378f", "03b57b3", None):
        assert verify(replace(stack, afd_plugin_commit=commit), afd=True) == alone
    assert verify(replace(stack, afd_plugin=None), afd=True) == alone


def test_every_symbol_of_afd_plugin_that_is_gone_is_drift(tmp_path):
    (tmp_path / "afd_plugin").mkdir()
    (tmp_path / "afd_plugin" / "__init__.py").touch()
    contract = load("afd-plugin-85e826e")
    verdict = compare(contract, Reader({"afd_plugin": tmp_path / "afd_plugin"}), symbols_of(contract.name))
    assert {drift.target for drift in verdict.drift} == set(contract.symbols)
    assert {drift.kind for drift in verdict.drift} == {DriftKind.MISSING}


def test_every_symbol_says_what_it_is_for_and_what_its_drift_means_once_a_stack():
    for stack in (*KNOWN, *PINS):
        targets = [symbol.target for symbol in symbols_of(stack.name)]
        assert len(targets) == len(set(targets))
    for symbol in SYMBOLS:
        assert symbol.used_for
        assert symbol.consequence
        assert set(symbol.stacks) <= {one.name for one in (*KNOWN, *PINS)}


def test_the_page_about_two_commits_names_every_symbol_that_differs_and_no_other():
    one, other = (load(f"vllm-ascend-{commit}") for commit in ("80d8c194f", "cf0baa38d"))
    differ = {
        target
        for target in one.symbols.keys() | other.symbols.keys()
        if any(differences(one.symbols[target], other.symbols[target]))
    }
    rows = re.findall(
        r"^\| `([\w.]+:[\w.]+|\w+::\w+)` \| .+ \| (?:yes|no) \| .+ \|$", text_of("docs/compat.md"), re.MULTILINE
    )
    assert len(rows) == len(set(rows))
    assert set(rows) == differ


def test_only_known_stacks_are_said_to_be_verified_and_the_counts_are_those_of_the_contracts():
    with (ROOT / "compat" / "verified.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    by_name = {stack.name: stack for stack in KNOWN}
    pins = {pin.name: pin for pin in PINS}
    assert {name for row in rows for name in row["stack"].split("+")} == by_name.keys() | pins.keys()
    for row in rows:
        assert all(row[key] for key in ("verified", "where", "date", "command"))
        stack, *more = row["stack"].split("+")
        if stack in pins:
            assert afd_pin(row["commit"]) == pins[stack]
        else:
            assert by_name[stack].matches(row["vllm"], row["vllm_ascend"] or None, row["commit"])
            assert all(pins[name].stack == stack for name in more)
        counted = re.search(r"(\d+) symbols", row["verified"])
        assert counted is None or int(counted[1]) == len(symbols_of(row["stack"]))


def text_of(name: str) -> str:
    return (ROOT / name).read_text()
