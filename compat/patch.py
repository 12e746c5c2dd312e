# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Replaces attributes of vLLM and vllm-ascend, and puts the identical objects back.

Problem: a patch that is applied to other code than it was written for corrupts memory; one that misses a name which
another module imported by value is silently without effect there; and one that cannot be undone makes "off" a lie.
Way: a `PatchSet` is applied as a whole or not at all. It refuses where the contract does not hold, and where a target
was not recorded. Every module that holds an original by value gets the replacement too, unless the patch leaves it out,
or means its target's name alone. What was in place is kept and put back as it was: the same object, a descriptor as a
descriptor, an inherited attribute by deleting ours.
Every process applies for itself: a forked child inherits the patches and the record of them, a spawned one has neither;
`apply` is right in both, any number of times. State of this module: `_LIVE`, the sets that are applied in this process.
Not here: originals behind default arguments, closures and instances cannot be found; whoever patches knows that there
are none. Names of objects that are shared by everybody (small numbers, strings) cannot either, and stand in `also`.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from afd_dsv4.compat.contract import Drift, Verdict

_ABSENT: Final = object()
#: Objects that many names share without meaning each other.
_SHARED: Final = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)
_LIVE: Final[dict[str, PatchSet]] = {}


class DriftError(RuntimeError):
    """The installed code is not what the patches were written against.

    Attributes:
        drift: what differs, empty where the stack or a target was never recorded.
    """

    def __init__(self, message: str, drift: tuple[Drift, ...] = ()) -> None:
        super().__init__(message)
        self.drift = drift


class PatchError(RuntimeError):
    """A patch does not fit what is in this process."""


@dataclass(frozen=True)
class Patch:
    """One replacement, documented beside its code.

    Attributes:
        target: `module:qualified.name` of a module's attribute, a member of a class, or an operator of a namespace
            (`torch:ops.namespace.operator`).
        make: gets the original and returns what stands in for it. Of a static method, class method or property it gets
            the function, and what it returns becomes one again. `functools.wraps` is done here.
        reason: why upstream's own way does not do.
        removal: what has to happen upstream for this patch to go.
        also: `module:name` of places that must hold the original by value where they are imported.
        leave: `module:name` of places that hold the original by value and shall keep it.
        alone: the replacement is for the target's name only: whoever else holds the original by value keeps it.
    """

    target: str
    make: Callable[[Any], Any]
    reason: str
    removal: str
    also: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    alone: bool = False

    def __post_init__(self) -> None:
        for name in (self.target, *self.also, *self.leave):
            module, _, qualname = name.partition(":")
            if not module or not qualname:
                raise ValueError(f"{name!r} is not of the form module:name")
        if not self.reason or not self.removal:
            raise ValueError(f"{self.target}: a patch says its reason and its removal")

    @property
    def recorded_as(self) -> str:
        """The target as contracts name it."""
        prefix = "torch:ops."
        return (
            "::".join(self.target.removeprefix(prefix).split(".", 1)) if self.target.startswith(prefix) else self.target
        )


@dataclass(frozen=True)
class Left:
    """A place that `undo` did not touch, because somebody else has replaced our replacement meanwhile."""

    target: str
    found: str

    def __str__(self) -> str:
        return f"{self.target} is left as it is: found {self.found}, which is not what was put there"


@dataclass(frozen=True)
class _Place:
    """One attribute as it was and as it is now."""

    owner: Any
    name: str
    shown: str
    before: Any
    after: Any


class PatchSet:
    """Patches that belong together.

    Args:
        name: for messages; at most one set of a name is applied in a process.
        patches: in the order of application, one a target.
    """

    def __init__(self, name: str, patches: Iterable[Patch]) -> None:
        self.name = name
        self.patches = tuple(patches)
        targets = [patch.target for patch in self.patches]
        twice = sorted({target for target in targets if targets.count(target) > 1})
        if twice:
            raise ValueError(f"patch set {name!r} has two patches of {', '.join(twice)}")
        self._places: tuple[_Place, ...] = ()

    @property
    def applied(self) -> bool:
        """Whether it is applied in this process."""
        return _LIVE.get(self.name) is self

    def apply(self, verdict: Verdict) -> None:
        """Put every replacement in place; nothing where it is applied already.

        Args:
            verdict: of the installed stack, see `contract.verify`.

        Raises:
            DriftError: the stack is unknown, a symbol differs, or a target was not recorded. Nothing was changed.
            PatchError: a target is not there, a place in `also` does not hold it, or another set of this name is
                applied. Nothing was changed.
        """
        self._refuse_drift(verdict)
        if self.applied:
            return
        if self.name in _LIVE:
            raise PatchError(f"another patch set {self.name!r} is applied in this process; undo it first")
        _LIVE[self.name] = self  # from here on, so that importing a target may come back here
        done: list[_Place] = []
        try:
            planned = [(patch, place) for patch in self.patches for place in self._plan(patch)]
            for place in [*(place for _, place in planned), *self._held_by_value(planned)]:
                setattr(place.owner, place.name, place.after)
                done.append(place)
        except BaseException:
            for place in reversed(done):
                _put_back(place)
            del _LIVE[self.name]
            raise
        self._places = tuple(done)

    def undo(self) -> tuple[Left, ...]:
        """Put back what was there before, the identical objects; nothing where it is not applied.

        Modules that imported a replacement by value since then get the original too.

        Returns:
            The places that were left, because what is there is not ours.
        """
        if not self.applied:
            return ()
        left = []
        for place in reversed(self._places):
            now = _own(place.owner, place.name)
            if now is place.after:
                _put_back(place)
            else:
                left.append(Left(place.shown, "nothing" if now is _ABSENT else repr(now)))
        late: dict[int, Any] = {}
        for place in self._places:
            late |= dict(zip(map(id, _held_by_others(place.after)), _held_by_others(_original_of(place)), strict=False))
        for module, name, value in _module_attributes():
            if id(value) in late:
                setattr(module, name, late[id(value)])
        self._places = ()
        del _LIVE[self.name]
        return tuple(left)

    def _refuse_drift(self, verdict: Verdict) -> None:
        if not verdict.known:
            raise DriftError(f"patch set {self.name!r}: no contract for this stack ({verdict.name or 'unknown'})")
        if verdict.drift:
            names = ", ".join(dict.fromkeys(drift.target for drift in verdict.drift))
            raise DriftError(f"patch set {self.name!r}: {verdict.name} has drifted in {names}", verdict.drift)
        if not verdict.holds:
            raise DriftError(f"patch set {self.name!r}: {'; '.join(verdict.reasons)}")
        new = [patch.recorded_as for patch in self.patches if patch.recorded_as not in verdict.targets]
        if new:
            raise DriftError(
                f"patch set {self.name!r}: not recorded in {verdict.name}: {', '.join(new)}; add them to "
                "compat/symbols.py and record again"
            )

    def _plan(self, patch: Patch) -> Iterator[_Place]:
        owner, name = _resolve(patch.target)
        before = _own(owner, name)
        original = _static(owner, name) if before is _ABSENT else before
        if original is _ABSENT:
            raise PatchError(f"{patch.target} was asked for: there is no {name} in {owner!r}")
        after = _replacement(original, patch.make, owner, name)
        yield _Place(owner, name, patch.target, before, after)
        for place in patch.also:
            if place.partition(":")[0] not in sys.modules:
                continue  # it will import the replacement
            holder, held = _resolve(place)
            found = _own(holder, held)
            if found is not original:
                raise PatchError(f"{place} was said to hold {patch.target}: found {_shown(found)}; mend `also`")
            yield _Place(holder, held, place, found, after)

    def _held_by_value(self, planned: list[tuple[Patch, _Place]]) -> Iterator[_Place]:
        """One pass over all modules for all patches: some tens of milliseconds with vLLM and torch loaded."""
        known = {(id(place.owner), place.name) for _, place in planned}
        found = {
            id(held): (patch, place.after.__func__ if isinstance(place.after, staticmethod) else place.after)
            for patch, place in planned
            if not patch.alone
            for held in _held_by_others(_original_of(place))
        }
        for module, name, value in _module_attributes():
            patch, after = found.get(id(value), (None, None))
            shown = f"{module.__name__}:{name}"
            if patch is not None and (id(module), name) not in known and shown not in patch.leave:
                yield _Place(module, name, shown, value, after)


def _resolve(target: str) -> tuple[Any, str]:
    """The owner of an attribute and the attribute's name."""
    module, _, qualname = target.partition(":")
    *parts, name = qualname.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in parts:
            owner = getattr(owner, part)
        if not isinstance(owner, (type, types.ModuleType)):
            getattr(owner, name)  # torch makes an operator when it is first asked for
        elif not isinstance(owner, type) and name not in vars(owner):
            getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{target} was asked for: {error}") from error
    return owner, name


def _own(owner: Any, name: str) -> Any:
    """The object in the owner's own dictionary, descriptors as they are."""
    return vars(owner).get(name, _ABSENT)


def _static(owner: Any, name: str) -> Any:
    """The object that an owner inherits under a name, descriptors as they are."""
    for parent in owner.__mro__ if isinstance(owner, type) else ():
        if name in vars(parent):
            return vars(parent)[name]
    return _ABSENT


def _original_of(place: _Place) -> Any:
    return _static(place.owner, place.name) if place.before is _ABSENT else place.before


def _held_by_others(value: Any) -> tuple[Any, ...]:
    """What a module holds that took this attribute by value; nothing where identity says nothing."""
    if isinstance(value, staticmethod):
        return (value.__func__,)
    return () if isinstance(value, _SHARED) else (value,)


def _put_back(place: _Place) -> None:
    if place.before is _ABSENT:
        delattr(place.owner, place.name)
    else:
        setattr(place.owner, place.name, place.before)


def _replacement(original: Any, make: Callable[[Any], Any], owner: Any, name: str) -> Any:
    """What goes into the owner: of the kind that was there."""
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(_wrapped(original.__func__, make))
    if isinstance(original, property):
        if original.fget is None:
            raise PatchError(f"{owner!r}.{name} is a property without a getter")
        return type(original)(_wrapped(original.fget, make), original.fset, original.fdel, original.__doc__)
    if isinstance(original, functools.cached_property):
        cached = functools.cached_property(_wrapped(original.func, make))
        cached.__set_name__(owner, name)
        return cached
    return _wrapped(original, make)


def _wrapped(original: Any, make: Callable[[Any], Any]) -> Any:
    replacement = make(original)
    if replacement is original:
        raise PatchError(f"the replacement of {original!r} is the original itself")
    if isinstance(replacement, types.FunctionType) and callable(original):
        updated = () if isinstance(original, type) else functools.WRAPPER_UPDATES
        functools.update_wrapper(replacement, original, updated=updated)
    return replacement


def _module_attributes() -> Iterator[tuple[types.ModuleType, str, Any]]:
    # Some modules have two names, such as os.path; each once.
    for module in {id(module): module for module in list(sys.modules.values())}.values():
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                yield module, name, value


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else repr(value)
