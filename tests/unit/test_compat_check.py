# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""`afd-dsv4 compat` on made-up packages: where a missing symbol went, which contract is taken, and what is refused."""

import json
from pathlib import Path

import pytest

from afd_dsv4.cli import main
from afd_dsv4.compat import explain
from afd_dsv4.compat.contract import Contract, DriftKind, compare, fingerprint
from afd_dsv4.compat.read import Reader
from afd_dsv4.compat.stack import KNOWN
from afd_dsv4.compat.symbols import Symbol


def write(folder: Path, modules: dict[str, str]) -> Path:
    """A package `pkg` of these files."""
    for name, text in {"__init__.py": "", **modules}.items():
        path = folder / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return folder / "pkg"


def explained(tmp_path: Path, target: str, before: dict[str, str], after: dict[str, str]):
    pytest.importorskip("griffe")
    reader = Reader({"pkg": write(tmp_path / "before", before)})
    entry = reader.read(target).entry
    contract = Contract("made-up", {}, {file: fingerprint(reader, file) for file in entry["files"]}, {target: entry})
    changed = Reader({"pkg": write(tmp_path / "after", after)})
    verdict = compare(contract, changed, (Symbol(target, "the test", "it is wrong"),))
    (drift,) = explain.explain(verdict.drift, contract, changed)
    assert drift.consequence == "it is wrong"
    return drift


CLASS = "class C:\n    def f(self, x): return x + 1\n"


def test_a_moved_class_is_found_and_said_to_be_otherwise_as_recorded(tmp_path):
    drift = explained(tmp_path, "pkg.m:C", {"m.py": CLASS}, {"m.py": "", "a.py": "class C(:", "sub/n.py": CLASS})
    assert drift.kind is DriftKind.MOVED
    assert drift.hint == "now pkg.sub.n:C (pkg/sub/n.py:1), otherwise as recorded"


def test_a_member_moves_with_its_class_and_what_else_changed_in_it_is_said(tmp_path):
    drift = explained(tmp_path, "pkg.m:C.f", {"m.py": CLASS}, {"n.py": CLASS.replace("x)", "y)").replace("x +", "y +")})
    assert drift.kind is DriftKind.MOVED
    assert "now pkg.n:C.f" in drift.hint
    assert "renamed parameter (x -> y)" in drift.hint


def test_a_function_under_a_new_name_is_known_by_its_body(tmp_path):
    drift = explained(tmp_path, "pkg.m:C.f", {"m.py": CLASS}, {"m.py": CLASS.replace(" f(", " g(")})
    assert drift.kind is DriftKind.MISSING
    assert drift.hint == "renamed to pkg.m:C.g, with the same body"
    whole = explained(tmp_path / "2", "pkg.m:f", {"m.py": "def f(): x()\n"}, {"m.py": "def g(): x()\n"})
    assert whole.hint == "renamed to pkg.m:g, with the same body"


def test_a_name_that_is_only_imported_elsewhere_is_told_from_a_moved_one(tmp_path):
    drift = explained(
        tmp_path, "pkg.m:C", {"m.py": CLASS}, {"m.py": "", "n.py": "from pkg.o import D as C\n", "o.py": "D = 1\n"}
    )
    assert drift.kind is DriftKind.MISSING
    assert drift.hint == "imported in pkg.n:C from pkg.o:D"


def test_a_member_that_another_class_has_is_named_and_one_that_is_nowhere_too(tmp_path):
    other = "class Unlike:\n    def f(self): pass\n"
    drift = explained(tmp_path / "1", "pkg.m:C.f", {"m.py": CLASS}, {"m.py": "class C: pass\n", "n.py": other})
    assert drift.hint == "a member of that name is in pkg.n:Unlike"
    drift = explained(tmp_path / "2", "pkg.m:C.f", {"m.py": CLASS}, {"m.py": "class C: pass\n"})
    assert drift.hint == "nowhere in its package"


@pytest.fixture
def empty(tmp_path):
    """A checkout with both packages and nothing in them."""
    for package in ("vllm", "vllm_ascend"):
        (tmp_path / "both" / package).mkdir(parents=True)
        (tmp_path / "both" / package / "__init__.py").touch()
    return tmp_path / "both"


def test_an_unnamed_checkout_is_compared_with_the_nearest_contract_and_every_loss_has_its_consequence(empty, capsys):
    assert main(["compat", "check", "--against", str(empty), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["stack"] is None
    assert answer["nearest"]
    assert answer["contract"] in {stack.name for stack in KNOWN}
    assert answer["holds"] == 0
    assert answer["drift"]
    assert all(drift["consequence"] and drift["used_for"] and drift["kind"] == "missing" for drift in answer["drift"])
    assert {target["target"] for target in answer["unchecked"]} == {
        "_C_ascend::compressor", "_C_ascend::compressor_metadata", "_C_ascend::compressor_metadata_out"
    }  # fmt: skip


def test_a_checkout_of_one_package_is_checked_alone_and_the_report_says_so(empty, capsys):
    assert main(["compat", "check", "--against", str(empty / "vllm_ascend"), "--stack", KNOWN[0].name]) == 1
    report = capsys.readouterr().out
    assert "vllm not given" in report
    assert "symbols: vllm was not given" in report
    assert "\nvllm_ascend.worker.worker:NPUWorker: removed symbol" in report
    assert "\nvllm.v1" not in report
    assert report.rstrip().splitlines()[-1].startswith("compat: drift in ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "--against", "{tmp}"], "holds neither vllm nor vllm_ascend"),
        (["check", "--against", "{tmp}/both", "--against", "{tmp}/both/vllm"], "give it once"),
        (["check", "--stack", "vllm-ascend-0.1"], "has no contract"),
        (["record", "--against", "{tmp}/both"], "none that is known"),
        (["record", "--against", "{tmp}/both", "--stack", "vllm-ascend-0.1"], "unknown"),
        (["record", "--against", "{tmp}/both", "--stack", KNOWN[0].name], "not found"),
        (["check", "--against"], "expected one argument"),
        ([], "required"),
    ],
)
def test_what_cannot_be_answered_is_one_line_and_status_2(empty, tmp_path, capsys, arguments, said):
    (tmp_path / "other").mkdir()
    places = {"{tmp}": str(tmp_path / "other"), "{tmp}/both": str(empty), "{tmp}/both/vllm": str(empty / "vllm")}
    assert main(["compat", *(places.get(argument, argument) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_contract_can_be_written_where_a_file_can(empty, capsys, tmp_path):
    assert main(["compat", "record", "--against", str(empty), "--stack", KNOWN[0].name, "--out", str(tmp_path)]) == 2
    assert "error: symbols" in capsys.readouterr().err


@pytest.fixture
def afd(tmp_path):
    """A checkout of afd-plugin with nothing in it, at a commit."""
    package = tmp_path / "checkout" / "afd_plugin"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "checkout" / ".git").mkdir()

    def at(commit: str) -> str:
        (tmp_path / "checkout" / ".git" / "HEAD").write_text(f"{commit}\n")
        return str(tmp_path / "checkout")

    return at


def test_a_checkout_of_afd_plugin_is_compared_with_its_own_contract(afd, capsys):
    assert main(["compat", "check", "--against", afd("85e826e" + "0" * 33), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["contract"], answer["nearest"], answer["holds"]) == ("afd-plugin-85e826e", False, 0)
    assert str(answer["adapter"]).endswith("AfdDsv4AttentionWorker")
    assert all(drift["consequence"] and drift["kind"] == "missing" for drift in answer["drift"])
    assert all(drift["target"].startswith("afd_plugin") for drift in answer["drift"])


def test_a_refused_or_unknown_commit_is_compared_with_the_nearest_and_has_no_adapter(afd, capsys):
    assert main(["compat", "check", "--against", afd("2e4378f" + "0" * 33)]) == 1
    report = capsys.readouterr().out
    assert "contract: afd-plugin-85e826e, the nearest one" in report
    assert "adapter: none (it registers no DeepSeek-V4, 85e826e is the first that does), the plugin stays" in report
    assert main(["compat", "check", "--against", afd("03b57b3" + "0" * 33)]) == 1
    assert "adapter: none, the plugin stays off" in capsys.readouterr().out


def test_stack_and_afd_plugin_are_checked_together_and_each_sums_itself_up(afd, empty, capsys):
    where = ["--against", str(empty), "--against", afd("85e826e" + "0" * 33)]
    assert main(["compat", "check", *where, "--stack", KNOWN[1].name]) == 1
    sums = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compat: ")]
    assert [line.split(" of ")[-1] for line in sums] == [KNOWN[1].name, "afd-plugin-85e826e"]
    assert main(["compat", "check", *where, "--stack", "afd-plugin-85e826e", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["contract"] == "afd-plugin-85e826e"


@pytest.mark.parametrize("commit", ["2e4378f", "03b57b3"])
def test_a_commit_without_an_adapter_cannot_be_recorded(commit, afd, capsys):
    assert main(["compat", "record", "--against", afd(commit + "0" * 33)]) == 2
    said = capsys.readouterr().err
    assert "give one of afd-plugin-85e826e" in said
    assert ("no DeepSeek-V4" in said) == (commit == "2e4378f")
