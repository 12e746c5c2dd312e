# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Says what is installed on this machine, who loads into vLLM, who patches what, and what stands in the way.

Problem: a version mix, a second platform plugin or an allowlist that forgets somebody shows itself deep inside vLLM's
start, or not at all: the plugin is simply not there.
Way: package metadata, entry points and sources are read as text; nothing of the stack is imported, so that the answer
is the same where vLLM is broken or missing. Each question is asked on its own: one that fails says so in its place, and
is a problem, because what it would have said is missing. Of the plugins, each distribution is asked on its own.
Not here: what the gate decides (`planned.py`), and what is bound in a running process, which metadata cannot say.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from afd_dsv4 import compat
from afd_dsv4.compat.adapters import ADAPTERS, full_name
from afd_dsv4.compat.contract import Verdict, verify
from afd_dsv4.compat.stack import KNOWN, InstalledStack, installed, package_folder
from afd_dsv4.doctor.facts import Finding, Severity
from afd_dsv4.doctor.faults import two_platforms

PLATFORM_GROUP: Final = "vllm.platform_plugins"
GENERAL_GROUP: Final = "vllm.general_plugins"
ALLOWLIST: Final = "VLLM_PLUGINS"
OURS: Final = "afd_dsv4"
#: Answers to vLLM's question for a platform with None, always.
CLAIMS_NONE: Final = "afd_dsv4.plugin:platform"
#: What vllm-ascend cannot do without, and afd-plugin's own.
ASCEND: Final = (
    "ascend",
    "ascend_kv_connector",
    "ascend_model",
    "ascend_model_loader",
    "ascend_service_profiling",
)
#: Folders in which others keep what they replace.
_PATCHES: Final = {"vllm_ascend": "patch", "afd_plugin": "compat/patches"}
#: By question, what is not known without its answer, and what to do.
_REINSTALL: Final = "reinstall what the message is about"
_LOST: Final = {
    "stack": ("What is said of this machine's stack is not known.", _REINSTALL),
    "drift": (
        "Whether the code of the stack is as recorded is not known; the plugin stays off where it is not.",
        _REINSTALL,
    ),
    "plugins": (
        "Not all plugins are known. vLLM reads the same when it starts, and ends with the same error.",
        "reinstall or remove that distribution",
    ),
    "patches": ("What others replace when they are loaded is not known.", _REINSTALL),
}


@dataclass(frozen=True)
class Plugin:
    """One entry point.

    Attributes:
        group, name, value: of the entry point.
        distribution: that brought it, with its version.
        loaded: whether the allowlist lets it in.
    """

    group: str
    name: str
    value: str
    distribution: str
    loaded: bool


@dataclass(frozen=True)
class Machine:
    """What is installed. A question that failed is in `failed`, and its answer is empty, or not whole.

    Attributes:
        stack: the versions.
        verdict: whether its code is as recorded.
        adapter: our worker class for it, None where there is none.
        plugins: all entry points of both groups.
        patches: what each package replaces, `module:name`, by package; ours only where the plugin is on.
        failed: by question, why there is no answer.
    """

    stack: InstalledStack | None
    verdict: Verdict | None
    adapter: str | None
    plugins: tuple[Plugin, ...]
    patches: Mapping[str, tuple[str, ...]]
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_vllm(self) -> bool:
        """Whether any of the two packages is here."""
        return bool(self.stack and (self.stack.vllm or self.stack.vllm_ascend))


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def survey(environment: Mapping[str, str]) -> Machine:
    """Ask everything; never raises for what is wrong with the machine."""
    failed: dict[str, str] = {}

    def ask(what: str, question: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return question()
        except Exception as error:  # a broken package must not cost the rest of the answer
            failed[what] = _shown(error)
            return otherwise

    stack: InstalledStack | None = ask("stack", installed, None)
    verdict = ask("drift", lambda: verify(stack, afd=True), None) if stack and stack.name else None
    name = full_name(stack.name, stack.afd) if stack and stack.afd else None
    adapter = ADAPTERS.get(name or (stack.name if stack else None) or "")
    return Machine(
        stack,
        verdict,
        adapter.worker if adapter else None,
        ask("plugins", lambda: tuple(_plugins(environment, failed)), ()),
        ask("patches", lambda: dict(_patches(adapter.worker if adapter else None)), {}),
        failed,
    )


def _plugins(environment: Mapping[str, str], failed: dict[str, str]) -> Iterator[Plugin]:
    allowed, broken = allowlist(environment), []
    found: list[tuple[metadata.EntryPoint, str]] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        name, version = _named(distribution)
        if (key := re.sub(r"[-_.]+", "-", name).lower()) in seen:  # the first on the path hides others of its name
            continue
        seen.add(key)
        try:
            found += [(point, f"{name} {version}".strip()) for point in distribution.entry_points]
        except Exception as error:  # one that is broken must not hide the others
            broken.append(f"those of {name}: {_shown(error)}")
    if broken:
        failed["plugins"] = "; ".join(broken)
    for group in (PLATFORM_GROUP, GENERAL_GROUP):
        for point, whose in found:
            if point.group == group:
                yield Plugin(group, point.name, point.value, whose, allowed is None or point.name in allowed)


def _named(distribution: metadata.Distribution) -> tuple[str, str]:
    """Name and version; of one without metadata, as an installation that was broken off leaves it, its folder."""
    try:
        if name := distribution.metadata["Name"]:
            return name, distribution.version or ""
    except Exception:  # entry points may be there all the same
        pass
    return Path(str(getattr(distribution, "_path", "unknown"))).name, ""


def allowlist(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """`VLLM_PLUGINS` as vLLM reads it (`vllm/envs.py`): set and empty is a list that lets nobody in, blanks count."""
    return tuple(environment[ALLOWLIST].split(",")) if ALLOWLIST in environment else None


def findings(machine: Machine, environment: Mapping[str, str], wanted: bool) -> Iterator[Finding]:
    """What stands in the way.

    Args:
        machine: see `survey`.
        environment: such as `os.environ`.
        wanted: whether a mode but off is asked for.
    """
    yield from _against_plugins(machine, environment, wanted)
    yield from _against_stack(machine)
    for what, why in machine.failed.items():
        lost, remedy = _LOST[what]
        yield Finding("unreadable", Severity.PROBLEM, f"{what}: cannot be read ({why})", (lost,), (remedy,))


def _against_plugins(machine: Machine, environment: Mapping[str, str], wanted: bool) -> Iterator[Finding]:
    claims = {p.name for p in machine.plugins if p.group == PLATFORM_GROUP and p.loaded and p.value != CLAIMS_NONE}
    if len(claims) > 1:
        yield two_platforms(claims, "vLLM starts only where at most one of them claims this machine")
    allowed = allowlist(environment)
    if allowed is None:
        return
    there = {plugin.name for plugin in machine.plugins}
    blank = [name for name in allowed if name != name.strip()]
    lost = [name for name in ASCEND if name in there and name not in allowed]
    ours = OURS in there and OURS not in allowed
    shown = f"{ALLOWLIST}={environment[ALLOWLIST]!r}"
    if not (blank or lost or ours):
        return
    why = []
    if ours:
        why.append("afd_dsv4 is not in it: the plugin is not loaded, in no process, and says nothing.")
    if "ascend" in lost:
        why.append("ascend is not in it: vLLM does not find the NPU and takes another platform.")
    elif lost:
        why.append(f"{', '.join(lost)} of vllm-ascend {'are' if len(lost) > 1 else 'is'} not in it.")
    if blank:
        why.append(f"{', '.join(map(repr, blank))}: vLLM takes blanks as part of a name, so that nothing is called so.")
    keep = [name.strip() for name in allowed if name.strip()]
    whole = list(dict.fromkeys([*keep, *(n for n in ASCEND if n in there), *([OURS] if OURS in there else [])]))
    severity = Severity.PROBLEM if lost or blank or wanted else Severity.NOTE
    yield Finding(
        "allowlist",
        severity,
        f"{shown} leaves out what is installed",
        tuple(why),
        (f"set {ALLOWLIST}={','.join(whole)}, or do not set it",),
        (),
        {"missing": [*lost, *([OURS] if ours else [])]},
    )


def _against_stack(machine: Machine) -> Iterator[Finding]:
    stack = machine.stack
    if stack is None or not machine.has_vllm:
        return
    known = "; ".join(map(str, KNOWN))
    if stack.name is None:
        yield Finding(
            "version-mix",
            Severity.PROBLEM,
            f"{stack}: no stack that is known",
            (
                f"Known are {known}.",
                (
                    "The plugin stays off with any other; and vLLM and vllm-ascend of different releases fail at an "
                    "import or, worse, later."
                ),
            ),
            (
                (
                    "install two that belong together; `afd-dsv4 compat check --against SOURCES` compares any other "
                    "with them"
                ),
            ),
            (
                "vllm-project/vllm-ascend#7058",
                "vllm-project/vllm-ascend#9305",
                "vllm-project/vllm-ascend#9672",
                "vllm-project/vllm-omni#5350",
            ),
            {"vllm": stack.vllm, "vllm_ascend": stack.vllm_ascend, "vllm_ascend_commit": stack.vllm_ascend_commit},
        )
    elif stack.name not in ADAPTERS:
        yield Finding(
            "no-adapter",
            Severity.PROBLEM,
            f"{stack.name} is known, but has no adapter: the plugin stays off",
            (),
            (f"use one of {', '.join(sorted(ADAPTERS))}",),
        )
    verdict = machine.verdict
    if verdict and verdict.known and not verdict.holds:
        symbols = list(dict.fromkeys(drift.target for drift in verdict.drift))
        if symbols:
            what = f"{len(symbols)} symbols of {verdict.name} are not as recorded"
        else:
            what = f"{len(verdict.unchecked)} symbols of {verdict.name} cannot be read"
        yield Finding(
            "drift",
            Severity.PROBLEM,
            f"{what}: the plugin stays off",
            tuple(verdict.reasons[:3]),
            ("`afd-dsv4 compat check` lists all, with what goes wrong because of each; reinstall the release",),
            ("vllm-project/vllm-ascend#7823",),
            {"symbols": symbols},
        )


def _patches(worker: str | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    for package, inside in _PATCHES.items():
        folder = package_folder(package)
        if folder and (folder / inside).is_dir():
            found = {target for file in sorted((folder / inside).rglob("*.py")) for target in _assigned(file)}
            yield package, tuple(sorted(found))
    if worker:
        ours = Path(compat.__file__).parent
        folders = [ours / "adapters" / name for name in _bases(worker)]
        files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
        files += [ours / "afd.py"] * ("_afd_" in worker)
        yield OURS, tuple(sorted({target for file in files for target in _declared(file)}))


def _bases(worker: str) -> list[str]:
    """The folder of an adapter. Every adapter uses the first one's launches; its runner, only that one."""
    return list(dict.fromkeys([worker.split(".")[-3], "vllm_0_23_0_ascend_0_23_0"]))


def _declared(file: Path) -> Iterator[str]:
    """Targets of our own patches, which are constants."""
    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Patch":
            yield from (
                str(word.value.value)
                for word in call.keywords
                if word.arg == "target" and isinstance(word.value, ast.Constant)
            )


def _assigned(file: Path) -> Iterator[str]:
    """What a module replaces in others when it is imported: assignments to their attributes outside functions."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except (SyntaxError, ValueError, RecursionError):
        return
    names: dict[str, str] = {}
    for node in _outside_functions(tree):
        if isinstance(node, ast.Import):
            names |= {
                name.asname or name.name.partition(".")[0]: name.name if name.asname else "" for name in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        for target in node.targets if isinstance(node, ast.Assign) else ():
            dotted = ast.unparse(target)
            first, _, rest = dotted.partition(".")
            if isinstance(target, ast.Attribute) and first in names and rest.replace(".", "").isidentifier():
                yield f"{names[first] or first}.{rest}"


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _outside_functions(child)
