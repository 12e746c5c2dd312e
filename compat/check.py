# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The commands `afd-dsv4 compat check` and `compat record`: a stack compared with its contract, or written down as one.

Problem: "does the plugin work with tomorrow's vllm-ascend" should be answered from its sources, per symbol and with the
consequence, before anything is installed.
Way: `contract.py` compares, `explain.py` says where missing symbols went. Without `--against` it is the installed
stack, which must be a known one; with it, folders that hold sources, compared with the contract that fits them, or with
the nearest one: the one that fewest symbols drift from. A package that was not given is not checked, and that is said.
afd-plugin has contracts of its own, by its commit, and is compared where it is there.
Not here: whether the code works. `verified.csv` says what was run.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from afd_dsv4.compat import explain
from afd_dsv4.compat.adapters import full_name, worker_class
from afd_dsv4.compat.contract import Contract, Verdict, compare, fingerprint, load
from afd_dsv4.compat.read import NotFound, NotReadable, Reader
from afd_dsv4.compat.stack import (
    AFD_PACKAGE,
    AFD_PINS,
    KNOWN,
    PACKAGES,
    UNVERSIONED,
    AfdPin,
    InstalledStack,
    Origin,
    afd_pin,
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
        absent: what is said of a package that is not there.
    """

    folders: dict[str, Path]
    origins: dict[str, Origin]
    name: str | None
    absent: str = "not given"

    @property
    def afd(self) -> AfdPin | None:
        """The pin that afd-plugin is, None where it is not there or none that is known."""
        origin = self.origins.get(AFD_PACKAGE)
        return afd_pin(origin.commit) if origin else None

    def __str__(self) -> str:
        parts = []
        for package in (*PACKAGES, AFD_PACKAGE):
            origin = self.origins.get(package)
            said = described(origin.version or UNVERSIONED, origin.commit) if origin else self.absent
            parts.append(f"{package.replace('_', '-')} {said}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Answer:
    """What a check found.

    Attributes:
        subject: what was checked.
        verdict: the comparison; not known where there is no contract to compare with.
        nearest: whether the contract is another stack's, the nearest one.
        about: what was compared: the stack, or afd-plugin.
        afd: the same for afd-plugin, None where it is not there.
    """

    subject: Subject
    verdict: Verdict
    nearest: bool = False
    about: str = "stack"
    afd: Answer | None = None

    @property
    def status(self) -> int:
        """Exit status of the command."""
        mine = EXIT_UNKNOWN if not self.verdict.known else EXIT_DRIFT if self.verdict.drift else 0
        return max(mine, self.afd.status if self.afd else 0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "status": self.status,
            "subject": str(self.subject),
            "stack": self.subject.name,
            "contract": self.verdict.name if self.verdict.known else None,
            "adapter": self._adapter(),
            "nearest": self.nearest,
            "holds": len(self.verdict.targets),
            "drift": [drift.as_dict() for drift in self.verdict.drift],
            "unchecked": [{"target": target, "reason": reason} for target, reason in self.verdict.unchecked],
            "explained": explain.available(),
            "afd_plugin": self.afd.as_dict() if self.afd else None,
        }

    def _adapter(self) -> str | None:
        if self.about == "stack":
            return worker_class(self.subject.name)
        pin = self.subject.afd
        # Of a stack that was not given, that it is the right one is assumed.
        given = self.subject.origins.keys() & set(PACKAGES)
        return worker_class(full_name(self.subject.name if given or not pin else pin.stack, pin))

    def __str__(self) -> str:
        """The report; the last line of each part sums it up."""
        return "\n\n".join(part._report() for part in (self, self.afd) if part)

    def _report(self) -> str:
        verdict = self.verdict
        known_ones = KNOWN if self.about == "stack" else [f"{pin.name}{_why_not(pin)}" for pin in AFD_PINS]
        if not verdict.known:
            return (
                f"found: {self.subject}\ncompat: unknown {self.about}; known: {'; '.join(map(str, known_ones))}. To "
                "compare its sources with the nearest contract, give their folder with --against."
            )
        lines = [f"found: {self.subject}", f"contract: {verdict.name}" + (", the nearest one" if self.nearest else "")]
        adapter = self._adapter()
        off = ", which stays off for what follows" if adapter and not verdict.holds else ""
        none = f"none{_why_not(self.subject.afd) if self.about != 'stack' else ''}, the plugin stays off"
        lines.append(f"adapter: {adapter or none}{off}")
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
        against: folders that hold `vllm`, `vllm_ascend` or `afd_plugin`; none for the installed packages.
        stack: name of the contract to compare with; otherwise the one that fits, or for folders the nearest.

    Returns:
        The answer for the stack, or for afd-plugin where it alone was given.

    Raises:
        InputError: a folder without any of the packages, or a stack without a contract.
    """
    subject = _given(against) if against else _installed(installed())
    reader = Reader(subject.folders)
    if AFD_PACKAGE in subject.folders and (_is_pin(stack) or not subject.folders.keys() & set(PACKAGES)):
        return _check_afd(subject, reader, stack, bool(against))
    answer = _check_stack(subject, reader, stack, bool(against))
    if AFD_PACKAGE in subject.folders:
        answer = replace(answer, afd=_check_afd(subject, reader, None, bool(against)))
    return answer


def _check_stack(subject: Subject, reader: Reader, stack: str | None, against: bool) -> Answer:
    if stack is not None:
        contract, nearest = _contract(stack), stack != subject.name
    elif subject.name is not None:
        contract, nearest = _contract(subject.name), False
    elif against:
        contract, nearest = _nearest(reader), True
    else:
        return Answer(subject, Verdict(False, (), None))
    return Answer(subject, _compared(contract, reader), nearest)


def _check_afd(subject: Subject, reader: Reader, name: str | None, against: bool) -> Answer:
    pin = subject.afd
    if name is None:
        name = pin.name if pin and pin.lacks is None else None
    if name is None and against:
        name = _supported()[-1].name
    if name is None:
        return Answer(subject, Verdict(False, (), None), about="afd-plugin")
    nearest = pin is None or pin.name != name
    return Answer(subject, _compared(_contract(name), reader), nearest, about="afd-plugin")


def _compared(contract: Contract, reader: Reader) -> Verdict:
    verdict = compare(contract, reader, symbols_of(contract.name))
    drift = explain.explain(verdict.drift, contract, reader)
    return Verdict(True, drift, verdict.name, verdict.targets, verdict.unchecked)


def _is_pin(name: str | None) -> bool:
    return name in {pin.name for pin in AFD_PINS}


def _supported() -> list[AfdPin]:
    return [pin for pin in AFD_PINS if pin.lacks is None]


def _why_not(pin: AfdPin | None) -> str:
    return f" ({pin.lacks})" if pin and pin.lacks else ""


def record(against: Sequence[Path] = (), stack: str | None = None) -> Contract:
    """Write the installed stack, or the sources in some folders, down as a contract.

    Args:
        against: folders that hold both packages, together, or afd-plugin; none for the installed ones.
        stack: name of the known stack, or pin of afd-plugin, that they are, where they do not say so themselves.

    Raises:
        InputError: the stack is unknown, or lacks a symbol of `symbols.py`.
    """
    subject = _given(against) if against else _installed(installed())
    if _is_pin(stack) or (stack is None and not subject.folders.keys() & set(PACKAGES) and subject.folders):
        return _record_afd(subject, stack)
    name = stack or subject.name
    identity = known(name) if name else None
    if identity is None:
        raise InputError(
            "stack",
            f"{name!r} is unknown" if name else f"{subject} is none that is known",
            f"add it to KNOWN in compat/stack.py, or give --stack with one of {', '.join(one.name for one in KNOWN)}",
        )
    origins = {package: subject.origins.get(package, Origin(None, None)) for package in PACKAGES}
    versions = {
        "vllm": origins["vllm"].version or identity.vllm,
        "vllm_commit": origins["vllm"].commit,
        "vllm_ascend": origins["vllm_ascend"].version or identity.vllm_ascend,
        "vllm_ascend_commit": origins["vllm_ascend"].commit or identity.commit,
    }
    return _written(identity.name, versions, subject)


def _record_afd(subject: Subject, name: str | None) -> Contract:
    pin = next((pin for pin in _supported() if pin.name == name), None) if name else subject.afd
    if pin is None or pin.lacks:
        said = f"{name or subject}{_why_not(pin or subject.afd)}"
        raise InputError("afd-plugin", said, f"give one of {', '.join(pin.name for pin in _supported())}")
    origin = subject.origins.get(AFD_PACKAGE, Origin(None, None))
    versions = {"afd_plugin": origin.version, "afd_plugin_commit": origin.commit or pin.commit}
    return _written(pin.name, versions, subject)


def _written(name: str, versions: dict[str, str | None], subject: Subject) -> Contract:
    reader = Reader(subject.folders)
    entries, missing = {}, []
    for symbol in symbols_of(name):
        try:
            entries[symbol.target] = reader.read(symbol.target).entry
        except (NotFound, NotReadable) as error:
            missing.append(f"{symbol.target} ({error})")
    if missing:
        raise InputError(
            "symbols",
            f"{len(missing)} not found: {', '.join(missing)}",
            "mend compat/symbols.py, or give all packages",
        )
    files = {file: fingerprint(reader, file) for entry in entries.values() for file in entry["files"]}
    return Contract(name, versions, {file: said for file, said in files.items() if said}, entries)


def _installed(stack: InstalledStack) -> Subject:
    folders = {package: folder for package in (*PACKAGES, AFD_PACKAGE) if (folder := package_folder(package))}
    origins = {
        "vllm": Origin(stack.vllm, stack.vllm_commit),
        "vllm_ascend": Origin(stack.vllm_ascend, stack.vllm_ascend_commit),
        AFD_PACKAGE: Origin(stack.afd_plugin, stack.afd_plugin_commit),
    }
    there = {package: origin for package, origin in origins.items() if origin.version}
    return Subject(folders, there, stack.name, "not installed")


def _given(paths: Sequence[Path]) -> Subject:
    folders: dict[str, Path] = {}
    for path in paths:
        held = {package: folder for package in (*PACKAGES, AFD_PACKAGE) if (folder := _holds(path, package))}
        if not held:
            raise InputError(
                "against",
                f"{path} holds neither vllm nor vllm_ascend nor afd_plugin",
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
        names = ", ".join([*(known.name for known in KNOWN), *(pin.name for pin in _supported())])
        raise InputError("stack", f"{name!r} has no contract", f"choose one of {names}")
    return contract


def _nearest(reader: Reader) -> Contract:
    """The contract that fewest symbols drift from, the newest of equals."""

    def distance(contract: Contract) -> int:
        return len({drift.target for drift in compare(contract, reader, symbols_of(contract.name)).drift})

    return min((_contract(stack.name) for stack in reversed(KNOWN)), key=distance)


def _wrapped(text: str, indent: str, first: str = "") -> str:
    return textwrap.fill(text, 120, initial_indent=first, subsequent_indent=indent, break_long_words=False)
