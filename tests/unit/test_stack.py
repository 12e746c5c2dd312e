# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The installed stack is read from metadata and named only where it is exactly a supported one."""

import dataclasses
import importlib.metadata
import subprocess
import sys

from afd_dsv4.compat.stack import InstalledStack, installed
from afd_dsv4.geometry import STACKS

SUPPORTED = InstalledStack("3.11.7", "x86_64", "2.13.0+cpu", "2.13.0", "0.23.0", "0.23.0", "5.24.0")


def test_the_supported_pair_has_the_name_that_the_page_layouts_know():
    assert SUPPORTED.name in STACKS
    assert dataclasses.replace(SUPPORTED, vllm="0.23.0+empty").name == SUPPORTED.name


def test_any_other_version_or_an_absent_package_has_no_name():
    for changes in ({"vllm": "0.24.0"}, {"vllm_ascend": "0.23.0.post1"}, {"vllm_ascend": None}, {"vllm": None}):
        assert dataclasses.replace(SUPPORTED, **changes).name is None


def test_versions_are_those_of_the_package_metadata():
    for package, version in installed().as_dict().items():
        if package not in ("python", "machine", "vllm") and version is not None:
            assert version == importlib.metadata.version(package)


def test_asking_imports_none_of_the_packages():
    script = (
        "import sys, afd_dsv4.compat.stack as s; s.installed()\n"
        "heavy = {'torch', 'torch_npu', 'vllm', 'vllm_ascend', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
