# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Says where a symbol went that is no longer where it was recorded.

Problem: "not found" is true and helps nobody: mostly the symbol was moved, renamed or inherited from elsewhere.
Way: files that mention the name are read with griffe, which knows definitions and aliases without running
anything; what it finds is read by `read.py` and compared with the contract, so that "moved" says whether it was changed
on the way. A function under a new name is known by the hash of its body.
Not here: any decision. griffe is optional (`pip install afd-dsv4[compat]`), and the plugin never needs it.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from afd_dsv4.compat.contract import Change, Contract, Drift, DriftKind, differences
from afd_dsv4.compat.read import Entry, NotFound, NotReadable, Reader

try:
    import griffe
except ImportError:
    griffe = None  # type: ignore[assignment]

MISSING_GRIFFE: Final = (
    "griffe is not installed, so it was not looked for where missing symbols went: pip install 'afd-dsv4[compat]'"
)
_MOST_PLACES: Final = 3


def available() -> bool:
    """Whether griffe is installed."""
    return griffe is not None


def explain(drift: tuple[Drift, ...], contract: Contract, reader: Reader) -> tuple[Drift, ...]:
    """The same drift, each missing symbol with where it went; unchanged where griffe is not installed."""
    if griffe is None:
        return drift
    return tuple(
        _went(one, contract.symbols[one.target], reader)
        if one.kind is DriftKind.MISSING and "::" not in one.target
        else one
        for one in drift
    )


def _went(drift: Drift, recorded: Entry, reader: Reader) -> Drift:
    module, _, qualname = drift.target.partition(":")
    owner, _, member = qualname.rpartition(".")
    renamed = _same_body(recorded, f"{module}:{owner}", reader) if recorded["kind"] == "function" else None
    if renamed:
        return dataclasses.replace(drift, hint=f"renamed to {renamed}, with the same body")
    moved, imported = [], []
    for place in _places(module.partition(".")[0], qualname.partition(".")[0], reader):
        if place == module:
            continue
        target = f"{place}:{qualname}"
        try:
            found = reader.read(target)
        except (NotFound, NotReadable):
            continue
        if found.entry["kind"] == "import" and recorded["kind"] != "import":
            imported.append(f"imported in {target} from {found.entry['from']}")
            continue
        changes = list(differences(recorded, found.entry))
        moved.append(f"now {target} ({found.place}), {_otherwise(changes)}")
    if not moved and not imported:
        holders = _holders(module.partition(".")[0], member, reader) if owner else []
        said = (
            f"a member of that name is in {', '.join(holders[:_MOST_PLACES])}" if holders else "nowhere in its package"
        )
        return dataclasses.replace(drift, hint=said)
    hints = moved or imported  # who imports it matters only where nobody defines it
    kind = DriftKind.MOVED if moved else drift.kind
    return dataclasses.replace(drift, kind=kind, hint="; ".join(hints[:_MOST_PLACES]))


def _otherwise(changes: list[Change]) -> str:
    if not changes:
        return "otherwise as recorded"
    return "also " + ", ".join(f"{change.kind.value} ({change.recorded} -> {change.found})" for change in changes)


def _same_body(recorded: Entry, owner: str, reader: Reader) -> str | None:
    """A function beside the missing one that does the same, by the hash of its body."""
    module, _, qualname = owner.partition(":")
    prefix = f"{qualname}." if qualname else ""
    for path, name in _modules(module.partition(".")[0], reader):
        if name != module:
            continue
        tree = _visit(module, path)
        try:
            holder = tree[qualname] if tree and qualname else tree
        except KeyError:
            return None
        for member in holder.members if holder else ():
            try:
                entry = reader.read(f"{module}:{prefix}{member}").entry
            except (NotFound, NotReadable):
                continue
            if entry.get("body") == recorded["body"]:
                return f"{module}:{prefix}{member}"
    return None


def _places(package: str, name: str, reader: Reader) -> Iterator[str]:
    """Modules of all given packages that have the name, the symbol's own package first."""
    for other in sorted(reader.packages, key=lambda known: known != package):
        for path, module in _modules(other, reader):
            tree = _visit(module, path, rf"\b{re.escape(name)}\b")
            if tree and name in tree.members:
                yield module


def _holders(package: str, member: str, reader: Reader) -> list[str]:
    """Classes of the package that have a member of that name."""
    found = []
    for path, module in _modules(package, reader):
        tree = _visit(module, path, rf"\bdef {re.escape(member)}\b")
        classes = tree.classes.items() if tree else ()
        found += [f"{module}:{name}" for name, holder in classes if member in holder.members]
    return found


def _modules(package: str, reader: Reader) -> Iterator[tuple[Path, str]]:
    folder = reader.packages.get(package)
    for path in sorted(folder.rglob("*.py")) if folder else ():
        parts = path.relative_to(folder.parent).with_suffix("").parts if folder else ()
        yield path, ".".join(part for part in (package, *parts[1:]) if part != "__init__")


def _visit(module: str, path: Path, mentions: str = "") -> griffe.Module | None:
    """A module as griffe reads it, None where the pattern is not in its text, or the text is no Python of today."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if not re.search(mentions, text):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in their text is not ours to report
        try:
            return griffe.visit(module, filepath=path, code=text)
        except (SyntaxError, ValueError):
            return None
