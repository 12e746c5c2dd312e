# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What an adapter was written against, and whether that is what is installed.

Problem: an adapter that meets other code than it was written for corrupts memory instead of failing.
Way: `contracts/` holds one file per exact stack: an entry (see `read.py`) for every symbol of `symbols.py`, and the
hash of every file that one was read from. `verify` hashes those files, some milliseconds; only where one differs is it
parsed and its symbols are compared, so that an edited comment is no drift. Standard library only, nothing of the stack
is imported: it runs inside the plugin.
Not here: what to do about it. `check.py` reports and explains, `patch.py` refuses.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from afd_dsv4.compat.read import Entry, Found, NotFound, NotReadable, Reader
from afd_dsv4.compat.stack import AFD_PACKAGE, PACKAGES, InstalledStack, package_folder
from afd_dsv4.compat.symbols import Symbol, symbols_of

FOLDER: Final = Path(__file__).parent / "contracts"
FORMAT: Final = 1


class DriftKind(enum.Enum):
    """What changed, in words for a sentence."""

    MISSING = "removed symbol"
    MOVED = "moved symbol"
    UNRECORDED = "not recorded"
    KIND = "changed kind"
    RENAMED_PARAMETER = "renamed parameter"
    NEW_REQUIRED_PARAMETER = "new required parameter"
    NEW_PARAMETER = "new optional parameter"
    REMOVED_PARAMETER = "removed parameter"
    PARAMETER_ORDER = "changed order of parameters"
    PARAMETER_KIND = "changed kind of parameter"
    DEFAULT = "changed default"
    ANNOTATION = "changed annotation"
    DECORATORS = "changed decorators"
    BODY = "edited body"
    BASES = "changed base class"
    FIELD = "changed field"
    VALUE = "changed constant"
    SOURCE = "imported from elsewhere"
    INHERITED = "inherited from elsewhere"
    SCHEMA = "changed schema"


@dataclass(frozen=True)
class Change:
    """One difference between an entry as recorded and as found."""

    kind: DriftKind
    recorded: str
    found: str


@dataclass(frozen=True)
class Drift:
    """One difference of one symbol, with what it means for the adapter.

    Attributes:
        target: the symbol.
        kind: what changed.
        recorded: how it was.
        found: how it is.
        used_for: what the adapter does with the symbol.
        consequence: what goes wrong if the adapter runs all the same.
        place: file and line of the symbol now, empty where it is not found.
        hint: where it went, as far as that was looked for.
    """

    target: str
    kind: DriftKind
    recorded: str
    found: str
    used_for: str
    consequence: str
    place: str = ""
    hint: str = ""

    def __str__(self) -> str:
        said = f"{self.recorded} -> {self.found}" if self.recorded else self.found
        where = f" ({self.place})" if self.place else ""
        return f"{self.target}: {self.kind.value}: {said}{where}" + (f"; {self.hint}" if self.hint else "")

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return {**vars(self), "kind": self.kind.name.lower(), "text": str(self)}


@dataclass(frozen=True)
class Verdict:
    """Whether the installed stack is one that a contract is about, and is what the contract says.

    Attributes:
        known: whether there is a contract for exactly this stack.
        drift: every difference, none where it is as recorded.
        name: name of the stack, None where it is not known.
        targets: the symbols that were compared and hold.
        unchecked: symbols that nothing at hand says anything about, with the reason.
    """

    known: bool
    drift: tuple[Drift, ...]
    name: str | None
    targets: frozenset[str] = frozenset()
    unchecked: tuple[tuple[str, str], ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why an adapter may not be applied, one sentence each; none where it may."""
        if not self.known:
            return (f"no contract of {self.name or 'this stack'} is recorded",)
        return (*map(str, self.drift), *(f"{target}: not checked: {reason}" for target, reason in self.unchecked))

    @property
    def holds(self) -> bool:
        """Whether an adapter of this stack may be applied; what cannot be read is no better than what differs."""
        return not self.reasons


@dataclass(frozen=True)
class Contract:
    """A contract as its file holds it.

    Attributes:
        name: name of the stack.
        stack: releases and commits that it was recorded from.
        files: sha256 and number of lines of every file that an entry was read from.
        symbols: the entries, by target.
    """

    name: str
    stack: dict[str, str | None]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    symbols: dict[str, Entry] = field(default_factory=dict)

    def as_json(self) -> str:
        """As text of the file: an entry a line, so that a change of one symbol is a change of one line."""
        head = {"format": FORMAT, "name": self.name, "stack": self.stack}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        for title, members in (("files", self.files), ("symbols", self.symbols)):
            rows = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(members.items())]
            lines += [f'  "{title}": {{', ",\n".join(rows), "  }" + ("," if title == "files" else "")]
        return "\n".join(["{", *lines, "}", ""])

    @classmethod
    def from_json(cls, text: str) -> Contract:
        """Rebuild one from its file.

        Raises:
            ValueError: another format.
        """
        values = json.loads(text)
        if values.pop("format", None) != FORMAT:
            raise ValueError(f"a contract of another format than {FORMAT}; record it again")
        return cls(**values)


def load(name: str) -> Contract | None:
    """The contract of a stack, None where there is none."""
    path = FOLDER / f"{name}.json"
    return Contract.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def verify(stack: InstalledStack, afd: bool = False) -> Verdict:
    """Compare the installed stack with its contract.

    Args:
        stack: what is installed, see `stack.installed`.
        afd: whether afd-plugin is to be as recorded, too. A pin of it that has no adapter adds nothing to the verdict,
            so that no patch of it is let in; why there is none, `stack.afd` says.

    Returns:
        A verdict with `known` False where no contract is about exactly this stack.
    """
    verdict = _verify(stack.name, PACKAGES)
    pin = stack.afd
    if not afd or pin is None or pin.lacks:
        return verdict
    other = _verify(pin.name, (AFD_PACKAGE,))
    return Verdict(
        verdict.known and other.known,
        verdict.drift + other.drift,
        verdict.name,
        verdict.targets | other.targets,
        verdict.unchecked + other.unchecked,
    )


def _verify(name: str | None, packages: tuple[str, ...]) -> Verdict:
    contract = load(name) if name else None
    if contract is None:
        return Verdict(False, (), name)
    folders = {package: folder for package in packages if (folder := package_folder(package))}
    return compare(contract, Reader(folders), symbols_of(contract.name))


def compare(contract: Contract, reader: Reader, symbols: tuple[Symbol, ...]) -> Verdict:
    """Compare what a reader finds with a contract, for these symbols."""
    intact = {file for file, said in contract.files.items() if fingerprint(reader, file) == said}
    drift: list[Drift] = []
    holds: set[str] = set()
    unchecked: list[tuple[str, str]] = []
    for symbol in symbols:
        recorded = contract.symbols.get(symbol.target)
        if recorded is None:
            drift.append(_drift(symbol, Change(DriftKind.UNRECORDED, "", f"not in the contract {contract.name}")))
            continue
        if intact.issuperset(recorded["files"]):
            holds.add(symbol.target)
            continue
        try:
            found = reader.read(symbol.target)
        except NotReadable as error:
            unchecked.append((symbol.target, str(error)))
        except NotFound as error:
            drift.append(_drift(symbol, Change(DriftKind.MISSING, recorded["kind"], str(error))))
        else:
            changes = list(differences(recorded, found.entry))
            drift += [_drift(symbol, change, found) for change in changes]
            if not changes:
                holds.add(symbol.target)
    return Verdict(True, tuple(drift), contract.name, frozenset(holds), tuple(unchecked))


def fingerprint(reader: Reader, file: str) -> dict[str, Any] | None:
    """Hash and number of lines of a file that an entry names, None where it is absent."""
    path = reader.folder_of(file)
    try:
        content = path.read_bytes() if path else None
    except OSError:
        return None
    if content is None:
        return None
    return {"sha256": hashlib.sha256(content).hexdigest(), "lines": content.count(b"\n")}


def differences(recorded: Entry, found: Entry) -> Iterator[Change]:
    """Everything in which two entries differ, files apart."""
    if recorded["kind"] != found["kind"]:
        yield Change(DriftKind.KIND, recorded["kind"], found["kind"])
        return
    for name, kind in (("inherited_from", DriftKind.INHERITED), ("from", DriftKind.SOURCE)):
        was, now = (str(entry.get(name) or "defined here") for entry in (recorded, found))
        if was != now:
            yield Change(kind, was, now)
    if recorded["kind"] == "function":
        yield from _function(recorded, found)
    elif recorded["kind"] == "class":
        yield from _class(recorded, found)
    elif recorded["kind"] == "operator" and recorded["schema"] != found["schema"]:
        yield Change(DriftKind.SCHEMA, recorded["schema"], found["schema"])
    elif recorded["kind"] in ("constant", "attribute") and recorded["values"] != found["values"]:
        yield Change(DriftKind.VALUE, _either(recorded["values"]), _either(found["values"]))


def _function(recorded: Entry, found: Entry) -> Iterator[Change]:
    yield from _parameters(recorded["parameters"], found["parameters"])
    if recorded["returns"] != found["returns"]:
        yield Change(DriftKind.ANNOTATION, f"returns {recorded['returns']}", f"returns {found['returns']}")
    if recorded["decorators"] != found["decorators"]:
        yield Change(DriftKind.DECORATORS, _either(recorded["decorators"]), _either(found["decorators"]))
    if recorded["async"] != found["async"]:
        yield Change(DriftKind.KIND, *("async def" if entry["async"] else "def" for entry in (recorded, found)))
    for name, what in (("body", "body"), ("others", "further definitions of the name")):
        if recorded.get(name) != found.get(name):
            yield Change(DriftKind.BODY, f"{what} {recorded.get(name)}", str(found.get(name)))


def _parameters(recorded: list[list[Any]], found: list[list[Any]]) -> Iterator[Change]:
    before = {name: rest for name, *rest in recorded}
    after = {name: rest for name, *rest in found}
    gone = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    for name in list(gone):  # the same place and kind under another name
        index = list(before).index(name)
        other = list(after)[index] if index < len(after) else ""
        if other in new and before[name][0] == after[other][0]:
            yield Change(DriftKind.RENAMED_PARAMETER, name, other)
            gone.remove(name)
            new.remove(other)
    for name in gone:
        yield Change(DriftKind.REMOVED_PARAMETER, name, "gone")
    for name in new:
        kind, default, _ = after[name]
        required = default is None and kind not in ("*", "**")
        shown = name if required else f"{kind}{name}" if kind in ("*", "**") else f"{name}={default}"
        yield Change(DriftKind.NEW_REQUIRED_PARAMETER if required else DriftKind.NEW_PARAMETER, "", shown)
    common = [name for name in before if name in after]
    order = [name for name in after if name in before]
    if common != order:
        yield Change(DriftKind.PARAMETER_ORDER, ", ".join(common), ", ".join(order))
    for name in common:
        for kind, was, now in zip(
            (DriftKind.PARAMETER_KIND, DriftKind.DEFAULT, DriftKind.ANNOTATION), before[name], after[name], strict=True
        ):
            if was != now:
                yield Change(kind, f"{name}: {was or 'none'}", now or "none")


def _class(recorded: Entry, found: Entry) -> Iterator[Change]:
    if recorded["bases"] != found["bases"]:
        yield Change(DriftKind.BASES, _either(recorded["bases"]), _either(found["bases"]))
    if recorded["decorators"] != found["decorators"]:
        yield Change(DriftKind.DECORATORS, _either(recorded["decorators"]), _either(found["decorators"]))
    before = {name: rest for name, *rest in recorded["fields"]}
    after = {name: rest for name, *rest in found["fields"]}
    for name in before:
        if name not in after:
            yield Change(DriftKind.FIELD, _field(name, before), "gone")
        elif before[name] != after[name]:
            yield Change(DriftKind.FIELD, _field(name, before), _field(name, after))
    for name in after:
        if name not in before:
            yield Change(DriftKind.FIELD, "no such field", _field(name, after))
    common = [name for name in before if name in after]
    order = [name for name in after if name in before]
    if common != order:
        yield Change(DriftKind.FIELD, f"in the order {', '.join(common)}", ", ".join(order))


def _field(name: str, fields: Mapping[str, list[str | None]]) -> str:
    annotation, default = fields[name]
    return name + (f": {annotation}" if annotation else "") + (f" = {default}" if default is not None else "")


def _either(values: list[str]) -> str:
    return ", ".join(str(value) for value in values) or "none"


def _drift(symbol: Symbol, change: Change, found: Found | None = None) -> Drift:
    return Drift(
        target=symbol.target,
        kind=change.kind,
        recorded=change.recorded,
        found=change.found,
        used_for=symbol.used_for,
        consequence=symbol.consequence,
        place=found.place if found else "",
    )
