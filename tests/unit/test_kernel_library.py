# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Which kernels the afd executor would load: the right folder, whole, and for this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import afd_dsv4
from afd_dsv4.compressor.library import ARCHITECTURE, KERNELS, MANIFEST, OPERATORS, find
from afd_dsv4.geometry import InputError
from tests import kernels_sweep


def folder_of(path: Path, backend: object, architecture: object = "dav-2201") -> Path:
    path.mkdir()
    for name in (KERNELS, OPERATORS):
        (path / name).touch()
    (path / MANIFEST).write_text(json.dumps({"backend": backend, "architecture": architecture}))
    return path


def refused(environment: dict[str, str]) -> str:
    with pytest.raises(InputError) as caught:
        find(environment)
    return str(caught.value)


def test_the_variable_names_the_folder_also_on_the_software_npu(tmp_path):
    hardware, other = folder_of(tmp_path / "a", "ascendc"), folder_of(tmp_path / "b", "twin")
    softnpu = folder_of(tmp_path / "c", "emulation")
    found = find({"AFD_DSV4_KERNELS": f" {hardware} "})
    assert (found.folder, found.backend, found.on_hardware) == (hardware, "ascendc", True)
    assert (found.kernels, found.operators) == (hardware / KERNELS, hardware / OPERATORS)
    found = find({"AFD_DSV4_KERNELS": str(other), "AFD_DSV4_SOFTNPU_DIR": str(softnpu)})
    assert (found.folder, found.backend, found.on_hardware) == (other, "twin", False)
    assert find({"AFD_DSV4_KERNELS": "", "AFD_DSV4_SOFTNPU_DIR": str(softnpu)}).folder == softnpu


def test_without_a_variable_they_are_in_the_package_and_the_error_says_where_and_how_to_get_them():
    text = refused({})
    folder = Path(afd_dsv4.__file__).parent / "lib"
    assert f"{folder} has no {KERNELS}, {OPERATORS}, " in text
    assert all(word in text for word in ("cmake --preset npu", f"--prefix {folder})", "AFD_DSV4_KERNELS"))


@pytest.mark.parametrize("name", [KERNELS, OPERATORS, MANIFEST])
def test_what_is_not_whole_is_refused_by_name(tmp_path, name):
    folder = folder_of(tmp_path / "a", "emulation")
    (folder / name).unlink()
    text = refused({"AFD_DSV4_SOFTNPU_DIR": str(folder)})
    assert f"has no {name}; run `make setup`" in text


@pytest.mark.parametrize("backend", ["emulation", "twin"])
def test_an_emulation_is_refused_on_hardware_and_hardware_on_the_software_npu(tmp_path, backend):
    text = refused({"AFD_DSV4_KERNELS": str(folder_of(tmp_path / "a", backend))})
    assert f"back end {backend!r}, and this process is on an NPU" in text
    hardware = folder_of(tmp_path / "b", "ascendc")
    text = refused({"AFD_DSV4_KERNELS": str(hardware), "AFD_DSV4_SOFTNPU_DIR": "x"})
    assert "back end 'ascendc', and this process is on the software NPU" in text


@pytest.mark.parametrize("architecture", ["dav-3510", "dav-2002", "", None])
def test_kernels_for_another_architecture_are_refused_on_hardware(tmp_path, architecture):
    text = refused({"AFD_DSV4_KERNELS": str(folder_of(tmp_path / "a", "ascendc", architecture))})
    assert f"compiled for the architecture {architecture!r}; A2 and A3 are dav-2201" in text
    assert "CMAKE_ASC_ARCHITECTURES=dav-2201" in text


def test_the_architecture_that_is_taken_is_the_one_that_the_build_compiles_for():
    assert f'set(CMAKE_ASC_ARCHITECTURES "{ARCHITECTURE}" CACHE' in (ROOT / "CMakeLists.txt").read_text()


@pytest.mark.parametrize(
    "written",
    [
        "",
        "[]",
        "{}",
        '{"backend": "twin"}',
        '{"backend": "cuda", "architecture": "host"}',
        '{"backend": ["twin"], "architecture": "host"}',
    ],
)
def test_a_manifest_that_says_nothing_known_is_refused(tmp_path, written):
    folder = folder_of(tmp_path / "a", "twin")
    (folder / MANIFEST).write_text(written)
    assert MANIFEST in refused({"AFD_DSV4_KERNELS": str(folder)})


ROOT = Path(__file__).parents[2]


def configured(folder: Path, *options: str, cann: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What CMake says in a shell where no CANN is set up, or this one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}
    if cann is not None:
        environment["ASCEND_HOME_PATH"] = str(cann)
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), *options]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**environment, "PATH": path}
    )


@pytest.mark.parametrize("backend", ["ascendc", "twin"])
def test_a_back_end_that_needs_cann_is_refused_without_it_with_what_to_do(tmp_path, backend):
    done = configured(tmp_path, f"-DKERNELS={backend}")
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert f"KERNELS={backend} asks for CANN 8.5 or newer" in said
    assert "Source CANN's set_env.sh, or take the preset host." in said


@pytest.mark.parametrize(
    ("version", "taken"), [(None, False), ("8.5.0-beta.1", False), ("9.0.1", False), ("9.1.0-beta.3", True)]
)
def test_a_twin_of_a_cann_that_would_compile_it_for_an_npu_is_refused(tmp_path, version, taken):
    """No compiler here: where the version does, the search for CANN's CMake package is what fails."""
    cann = tmp_path / "cann"
    info = cann / "share" / "info" / "asc-devkit"
    for folder in (cann / "bin", info):
        folder.mkdir(parents=True)
    (cann / "bin" / "bisheng").write_text("#!/bin/sh\nexit 1\n")
    (cann / "bin" / "bisheng").chmod(0o755)
    if version is not None:
        (info / "version.info").write_text(f"Version={version}\nversion_dir=cann\n")
    done = configured(tmp_path / "build", "-DKERNELS=twin", cann=cann)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert ("the CPU twin asks for CANN 9.1 or newer" in said) != taken
    assert ('package configuration file provided by "ASC"' in said) == taken
    if not taken:
        found = "unknown" if version is None else version.partition("-")[0]
        assert f"version.info says {found}: an older one would build code for an NPU" in said


def test_without_cann_the_build_takes_the_emulation_says_why_and_writes_it_beside_the_libraries(tmp_path):
    done = configured(tmp_path, "-DSOFTNPU=OFF")
    assert done.returncode == 0, done.stderr
    assert "kernels: emulation for host: no CANN is set up" in done.stdout
    assert "kernels: no torch operators: SOFTNPU=OFF" in done.stdout
    written = json.loads((tmp_path / "softnpu" / MANIFEST).read_text())
    assert written == {"backend": "emulation", "architecture": "host"}
    assert "KERNELS=cuda is no back end" in configured(tmp_path, "-DKERNELS=cuda").stderr


def test_a_folder_that_cannot_be_asked_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"cannot be read .* name another folder in AFD_DSV4_KERNELS") as error:
        find({"AFD_DSV4_KERNELS": "x" * 5000})
    assert len(str(error.value)) < 300


def test_a_manifest_without_end_is_refused(tmp_path):
    folder = folder_of(tmp_path / "a", "ascendc")
    (folder / MANIFEST).write_text("[" * 200_000)
    assert "cannot be read" in refused({"AFD_DSV4_KERNELS": str(folder)})


@pytest.mark.parametrize("options", [["--jobs", "0"], ["--cases", "0"], ["--seed", "-1"], ["--first", "-1"]])
def test_a_sweep_of_nothing_is_refused(options, capsys):
    with pytest.raises(SystemExit, match="2"):
        kernels_sweep.main(options)
    assert "--cases and --jobs must be at least 1" in capsys.readouterr().err


def test_a_sweep_without_kernels_is_refused_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("AFD_DSV4_KERNELS", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        kernels_sweep.main(["--no-grid", "--cases", "1"])
    assert f"{tmp_path} has no libafd_dsv4_kernels.so" in capsys.readouterr().err
