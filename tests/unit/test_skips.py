# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What may be skipped: in a run that must be complete, only what would be skipped on a complete machine too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parent.parent / "conftest.py"
MARKERS = "".join(f"    {name}: x\n" for name in ("npu", "vllm_runtime", "device"))


NPU = "@pytest.mark.npu\ndef test_npu(): pass"
STACK = "@pytest.mark.vllm_runtime\ndef test_stack(): pass"
#: Skips by something that is missing: in a test, in a fixture, by a condition.
MISSING = """
@pytest.fixture
def library(): pytest.skip("no library")
def test_core(): pytest.skip("no core")
def test_fixture(library): pass
@pytest.mark.skipif(True, reason="no stack")
def test_condition(): pass
"""
EXCUSED = """
@pytest.mark.device
def test_device(): pass
def test_case(): pytest.skip("no such case: another processor")
@pytest.mark.xfail(strict=True)
def test_expected(): assert False
def test_passes(): pass
"""
MODULE = 'pytest.importorskip("absent_package")'


@pytest.fixture
def run(tmp_path):
    """Run pytest with the project's conftest on these modules, away from the software NPU."""
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{MARKERS}", encoding="utf-8")

    def run(*modules, required, **environment):
        for number, code in enumerate(modules):
            (tmp_path / f"test_{number}.py").write_text(f"import pytest\n{code}\n", encoding="utf-8")
        drop = ("LD_LIBRARY_PATH", "AFD_DSV4_SOFTNPU_DIR", "AFD_DSV4_REQUIRE_NPU", "PYTHONPATH")
        base = {name: value for name, value in os.environ.items() if name not in drop}
        given = {"AFD_DSV4_REQUIRE_NPU": str(int(required)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
        command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "-p", "no:warnings"]
        done = subprocess.run(
            command, cwd=tmp_path, env={**base, **given}, capture_output=True, text=True, check=False, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_every_skip_names_its_reason_and_an_ordinary_run_passes(run):
    status, text = run(NPU, STACK, MISSING, EXCUSED, MODULE, required=False)
    assert status == 0, text
    assert "1 passed, 8 skipped, 1 xfailed" in text
    for reason in ("npu: drives the software NPU", "vllm_runtime: ", "no library", "no core", "no stack", "device: "):
        assert reason in text


def test_in_a_run_that_must_be_complete_whatever_is_missing_fails(run):
    status, text = run(MISSING, EXCUSED, required=True)
    assert status == 1, text
    # The excused ones keep their outcome. Before the test itself runs, pytest calls a failure an error.
    assert "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors" in text
    for reason in ("no library", "no core", "no stack"):
        assert f"AFD_DSV4_REQUIRE_NPU=1 allows no such skip: {reason}" in text


def test_in_a_run_that_must_be_complete_a_module_that_cannot_be_imported_fails(run):
    status, text = run(MODULE, EXCUSED, required=True)
    assert status == 2, text
    assert "AFD_DSV4_REQUIRE_NPU=1 allows no such skip: could not import 'absent_package'" in text


def test_a_run_that_must_be_complete_ends_at_once_without_the_software_npu(run):
    status, text = run(NPU, required=True)
    assert status == pytest.ExitCode.USAGE_ERROR, text
    assert "AFD_DSV4_REQUIRE_NPU=1, but npu: drives the software NPU" in text


def test_a_run_that_must_be_complete_ends_at_once_without_vllm(run, tmp_path):
    # A name is absent where the import system says so; nothing else of the machine changes.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'vllm' else real(name, *rest)\n",
        encoding="utf-8",
    )
    status, text = run(STACK, required=True, PYTHONPATH=str(tmp_path))
    assert status == pytest.ExitCode.USAGE_ERROR, text
    assert "AFD_DSV4_REQUIRE_NPU=1, but vllm_runtime: not installed: vllm" in text


def test_a_test_that_every_process_would_name_otherwise_is_refused(run):
    parameters = '@pytest.mark.parametrize("value", [object()], ids=repr)\ndef test_value(value): pass'
    status, text = run(parameters, required=False)
    assert status == 4, text
    assert "has an address in its name; give its parameter an id" in text
    assert run(parameters.replace("ids=repr", 'ids=["object"]'), required=False)[0] == 0
