# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""tests/environment/setup.sh on a machine that will not do: status 2, one error with its remedy, and nothing written.

The script runs in a folder of its own, with a PATH of links to the real tools; what the machine lacks is left out, or
is a small program in its place. And what it shows while it builds.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = Path(__file__).resolve().parent.parent / "environment"
TOOLS = ("awk", "bash", "cat", "cut", "df", "dirname", "gcc", "g++", "head", "sed", "sha256sum", "tail", "touch", "wc")

pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in TOOLS), reason=f"no such case: needs {', '.join(TOOLS)}"
)


@pytest.fixture
def machine(tmp_path):
    """A checkout that holds the script alone, and a machine that would do; a test takes something away from it."""
    checkout, tools = tmp_path / "checkout", tmp_path / "tools"
    shutil.copytree(ENVIRONMENT, checkout / "tests" / "environment")
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))
    put(tools, "uname", '[ "$1" = -m ] && echo x86_64 || echo Linux')
    put(tools, "python3.11", f'exec "{sys.executable}" "$@"')
    return checkout, tools


def put(tools, name, shell):
    path = tools / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/bash\n{shell}\n", encoding="utf-8")
    path.chmod(0o755)


def interpreter(version, implementation="cpython", modules=True):
    """A program that answers the script's questions as such a Python would: the real one with its answers changed."""
    lines = [
        "import sys, types, collections",
        "V = collections.namedtuple('V', 'major minor micro releaselevel serial')",
        f"sys.version_info = V({version.replace('.', ', ')}, 0, 'final', 0)",
        f"sys.version = '{version}.0 (stand-in)'",
        f"sys.implementation = types.SimpleNamespace(name='{implementation}', cache_tag=None)",
        "" if modules else "sys.modules['ensurepip'] = None",
        "exec(sys.argv[1])",
    ]
    code = "\n".join(lines)
    return f'exec \'{sys.executable}\' -c "{code}" "$2"'


def refused(machine, **environment):
    """Run the script; it must refuse. Returns its one error."""
    checkout, tools = machine
    before = sorted(path.relative_to(checkout) for path in checkout.rglob("*"))
    done = subprocess.run(
        [tools / "bash", checkout / "tests" / "environment" / "setup.sh"],
        env={"PATH": str(tools), "HOME": str(checkout.parent), **environment},
        cwd=checkout.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    what, found, remedy = done.stderr.splitlines()
    assert what.startswith("setup: needs ")
    assert found.startswith("  found:  ")
    assert remedy.startswith("  remedy: ")
    assert sorted(path.relative_to(checkout) for path in checkout.rglob("*")) == before
    return done.stderr


def test_another_system_is_refused(machine):
    put(machine[1], "uname", "echo Darwin")
    assert "needs Linux\n  found:  Darwin" in refused(machine)


def test_another_processor_is_refused(machine):
    put(machine[1], "uname", '[ "$1" = -m ] && echo riscv64 || echo Linux')
    error = refused(machine)
    assert "needs an x86_64 or aarch64 processor" in error
    assert "found:  riscv64" in error


def test_no_python_is_refused(machine):
    (machine[1] / "python3.11").unlink()
    error = refused(machine)
    assert "needs CPython 3.10, 3.11 or 3.12" in error
    assert "no python3 on PATH" in error


@pytest.mark.parametrize(("version", "implementation"), [("3.9", "cpython"), ("3.13", "cpython"), ("3.11", "pypy")])
def test_an_unsupported_python_is_refused_by_its_version(machine, version, implementation):
    (machine[1] / "python3.11").unlink()
    put(machine[1], "python3", interpreter(version, implementation))
    error = refused(machine)
    assert "needs CPython 3.10, 3.11 or 3.12" in error
    assert f"found:   python3 ({implementation} {version}.0)" in error


def test_an_unsupported_python_that_was_asked_for_is_refused_although_another_would_do(machine):
    put(machine[1], "mine", interpreter("3.9"))
    error = refused(machine, PYTHON="mine")
    assert "found:  PYTHON=mine: cpython 3.9.0" in error
    assert "set PYTHON to such an interpreter, or leave it unset" in error


def test_a_python_without_venv_is_refused(machine):
    put(machine[1], "python3.11", interpreter("3.11", modules=False))
    error = refused(machine)
    assert "needs the venv and ensurepip modules of Python 3.11" in error
    assert "python3.11-venv" in error


@pytest.mark.parametrize("compiler", ["g++", "gcc"])
def test_a_missing_compiler_is_refused_by_its_name(machine, compiler):
    (machine[1] / compiler).unlink()
    error = refused(machine)
    assert "needs a C++20 and a C compiler" in error
    assert f"no {compiler} on PATH" in error
    assert "apt-get install g++" in error


def test_a_compiler_that_is_too_old_is_refused(machine):
    put(machine[1], "g++", '[ "$1" = --version ] && echo "g++ 7.5.0" || exit 1')
    error = refused(machine)
    assert "needs a C++20 compiler" in error
    assert "found:  g++: g++ 7.5.0" in error


def test_a_full_disk_is_refused(machine):
    put(machine[1], "df", "echo Filesystem; echo disk 10000 9000 1000 90% /")
    assert "found:  1000 MiB free at the checkout" in refused(machine)


def built(tmp_path, log, line):
    """What the script shows of the build beside the seconds."""
    script = (ENVIRONMENT / "setup.sh").read_text(encoding="utf-8")
    code = script[script.index("built() {") : script.index("# step NUMBER")]
    (tmp_path / "log").write_text(log, encoding="utf-8")
    command = ["bash", "-euo", "pipefail", "-c", f"log=log\n{code}\nprintf '%s' \"$(built {line})\""]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    ("log", "line", "shown"),
    [
        ("[ 4%] Building CXX\n[ 45%] Building CXX object a.o\nIn file included from b\n", 1, " [ 45%]"),
        ("[11/80] Building CXX\n[12/80] Building CXX object a.o\nwarning: [x] [99%]\n", 1, " [12/80]"),
        ("[100%] Built target of an earlier run\n===== [7/7] software NPU\nCollecting torch\n", 2, ""),
        ("", 1, ""),
    ],
)
def test_how_far_a_build_has_come_is_shown_and_of_other_steps_nothing(tmp_path, log, line, shown):
    assert built(tmp_path, log, line) == shown
