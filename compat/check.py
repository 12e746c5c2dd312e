# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The commands `afd-dsv4 compat check` and `compat record`: a stack compared with its contract, or written down as one.

Problem: "does the plugin work with tomorrow's vllm-ascend" should be answered from its sources, per symbol and with the
consequence, before anything is installed.
Way: `contract.py` compares, `explain.py` says where missing symbols went. Without `--against` it is the installed
stack, which must be a known one; with it, folders that hold sources, compared with the contract that fits them, or with
the nearest one: the one that fewest symbols drift from. A package that was not given is not checked, and that is said.
Not here: whether the code works. `verified.csv` says what was run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afd_dsv4.compat import explain
from afd_dsv4.compat.adapters import worker_class
from afd_dsv4.compat.contract import Contract, Verdict, compare, fingerprint, load
from afd_dsv4.compat.read import NotFound, NotReadable, Reader
from afd_dsv4.compat.stack import (
    KNOWN,
    PACKAGES,
    InstalledStack,
    Origin,
    described,
    installed,
    known,
    name_of,
    origin_of,
    package_folder,
)
from afd_dsv4.compat.symbols import symbols_of
from afd_dsv4.geometry import InputError

EXIT_DRIFT = 1
EXIT_UNKNOWN = 2


@dataclass(frozen=True)
class Subject:
    """What is checked: the folders of the packages, and what they are.

    Attributes:
        folders: by import name of the package.
        origins: version and commit, by import name.
        name: name of the known stack this is, None where it is none.
    """

    folders: dict[str, Path]
    origins: dict[str, Origin]
    name: str | None

    def __str__(self) -> str:
        parts = []
        for package in PACKAGES:
            origin = self.origins.get(package)
            said = described(origin.version or "of no version", origin.commit) if origin else "not given"
            parts.append(f"{package.replace('_', '-')} {said}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Answer:
    """What a check found.

    Attributes:
        subject: what was checked.
        verdict: the comparison; not known where there is no contract to compare with.
        nearest: whether the contract is another stack's, the nearest one.
    """

    subject: Subject
    verdict: Verdict
    nearest: bool = False

    @property
    def status(self) -> int:
        """Exit status of the command."""
        if not self.verdict.known:
            return EXIT_UNKNOWN
        return EXIT_DRIFT if self.verdict.drift else 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "status": self.status,
            "subject": str(self.subject),
            "stack": self.subject.name,
            "contract": self.verdict.name if self.verdict.known else None,
            "adapter": worker_class(self.subject.name),
            "nearest": self.nearest,
            "holds": len(self.verdict.targets),
            "drift": [drift.as_dict() for drift in self.verdict.drift],
            "unchecked": [{"target": target, "reason": reason} for target, reason in self.verdict.unchecked],
            "explained": explain.available(),
        }

    def __str__(self) -> str:
        """The report; its last line sums it up."""
        verdict = self.verdict
        if not verdict.known:
            stacks = "; ".join(str(stack) for stack in KNOWN)
            return (
                f"found: {self.subject}\ncompat: unknown stack; known: {stacks}. To compare its sources with the "
                "nearest contract, give their folder with --against."
            )
        lines = [f"found: {self.subject}", f"contract: {verdict.name}" + (", the nearest one" if self.nearest else "")]
        adapter = worker_class(self.subject.name)
        off = ", which stays off for what follows" if adapter and not verdict.holds else ""
        lines.append(f"adapter: {adapter or 'none, the plugin stays off'}{off}")
        for target in dict.fromkeys(drift.target for drift in verdict.drift):
            same = [drift for drift in verdict.drift if drift.target == target]
            lines += ["", *(_wrapped(str(drift), "    ") for drift in same)]
            lines.append(_wrapped(f"used for: {same[0].used_for}", "      ", "    "))
            lines.append(_wrapped(f"consequence: {same[0].consequence}", "      ", "    "))
        reasons: dict[str, list[str]] = {}
        for target, reason in verdict.unchecked:
            reasons.setdefault(reason, []).append(target)
        if reasons:
            lines += ["", *(f"not checked: {len(targets)} symbols: {reason}" for reason, targets in reasons.items())]
        if any(not drift.place for drift in verdict.drift) and not explain.available():
            lines += ["", explain.MISSING_GRIFFE]
        drifting = len({drift.target for drift in verdict.drift})
        said = f"drift in {drifting} of" if drifting else "no drift in"
        checked = len(verdict.targets) + drifting
        lines += ["" if len(lines) > 3 else None, f"compat: {said} {checked} symbols of {verdict.name}"]  # type: ignore[list-item]
        return "\n".join(line for line in lines if line is not None)


def check(against: Sequence[Path] = (), stack: str | None = None) -> Answer:
    """Compare the installed stack, or the sources in some folders, with a contract.

    Args:
        against: folders that hold `vllm`, `vllm_ascend` or both; none for the installed packages.
        stack: name of the contract to compare with; otherwise the one that fits, or for folders the nearest.

    Raises:
        InputError: a folder without either package, or a stack without a contract.
    """
    subject = _given(against) if against else _installed(installed())
    reader = Reader(subject.folders)
    if stack is not None:
        contract, nearest = _contract(stack), stack != subject.name
    elif subject.name is not None:
        contract, nearest = _contract(subject.name), False
    elif against:
        contract, nearest = _nearest(reader), True
    else:
        return Answer(subject, Verdict(False, (), None))
    verdict = compare(contract, reader, symbols_of(contract.name))
    drift = explain.explain(verdict.drift, contract, reader)
    return Answer(subject, Verdict(True, drift, verdict.name, verdict.targets, verdict.unchecked), nearest)


def record(against: Sequence[Path] = (), stack: str | None = None) -> Contract:
    """Write the installed stack, or the sources in some folders, down as a contract.

    Args:
        against: folders that hold both packages, together; none for the installed ones.
        stack: name of the known stack that they are, where they do not say so themselves.

    Raises:
        InputError: the stack is unknown, or lacks a symbol of `symbols.py`.
    """
    subject = _given(against) if against else _installed(installed())
    name = stack or subject.name
    identity = known(name) if name else None
    if identity is None:
        raise InputError(
            "stack",
            f"{name!r} is unknown" if name else f"{subject} is none that is known",
            f"add it to KNOWN in compat/stack.py, or give --stack with one of {', '.join(one.name for one in KNOWN)}",
        )
    reader = Reader(subject.folders)
    entries, missing = {}, []
    for symbol in symbols_of(identity.name):
        try:
            entries[symbol.target] = reader.read(symbol.target).entry
        except (NotFound, NotReadable) as error:
            missing.append(f"{symbol.target} ({error})")
    if missing:
        raise InputError(
            "symbols",
            f"{len(missing)} not found: {', '.join(missing)}",
            "mend compat/symbols.py, or give both packages",
        )
    files = {file: fingerprint(reader, file) for entry in entries.values() for file in entry["files"]}
    origins = {package: subject.origins.get(package, Origin(None, None)) for package in PACKAGES}
    versions = {
        "vllm": origins["vllm"].version or identity.vllm,
        "vllm_commit": origins["vllm"].commit,
        "vllm_ascend": origins["vllm_ascend"].version or identity.vllm_ascend,
        "vllm_ascend_commit": origins["vllm_ascend"].commit or identity.commit,
    }
    return Contract(identity.name, versions, {file: said for file, said in files.items() if said}, entries)


def _installed(stack: InstalledStack) -> Subject:
    folders = {package: folder for package in PACKAGES if (folder := package_folder(package))}
    origins = {
        "vllm": Origin(stack.vllm, stack.vllm_commit),
        "vllm_ascend": Origin(stack.vllm_ascend, stack.vllm_ascend_commit),
    }
    return Subject(folders, {package: origin for package, origin in origins.items() if origin.version}, stack.name)


def _given(paths: Sequence[Path]) -> Subject:
    folders: dict[str, Path] = {}
    for path in paths:
        held = {package: folder for package in PACKAGES if (folder := _holds(path, package))}
        if not held:
            raise InputError(
                "against",
                f"{path} holds neither vllm nor vllm_ascend",
                "give a checkout, an unpacked wheel or sdist, or the folder of the package itself",
            )
        for package in held.keys() & folders.keys():
            raise InputError("against", f"{package} is in {folders[package]} and in {held[package]}", "give it once")
        folders |= held
    origins = {package: origin_of(folder) for package, folder in folders.items()}
    nothing = Origin(None, None)
    vllm, ascend = (origins.get(package, nothing) for package in PACKAGES)
    return Subject(folders, origins, name_of(vllm.version, ascend.version, ascend.commit))


def _holds(path: Path, package: str) -> Path | None:
    """The folder of a package in a checkout or an unpacked archive, one level down too, or the folder itself."""
    if path.name == package and (path / "__init__.py").is_file():
        return path
    for folder in (path / package, path / "src" / package, *sorted(path.glob(f"*/{package}"))):
        if (folder / "__init__.py").is_file():
            return folder
    return None


def _contract(name: str) -> Contract:
    contract = load(name)
    if contract is None:
        names = ", ".join(stack.name for stack in KNOWN)
        raise InputError("stack", f"{name!r} has no contract", f"choose one of {names}")
    return contract


def _nearest(reader: Reader) -> Contract:
    """The contract that fewest symbols drift from, the newest of equals."""

    def distance(contract: Contract) -> int:
        return len({drift.target for drift in compare(contract, reader, symbols_of(contract.name)).drift})

    return min((_contract(stack.name) for stack in reversed(KNOWN)), key=distance)


def _wrapped(text: str, indent: str, first: str = "") -> str:
    return textwrap.fill(text, 120, initial_indent=first, subsequent_indent=indent, break_long_words=False)
