# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The answer as text and as JSON, from the same objects.

Names of models, engines and plugins and words of a log come from outside: what is no printable character is escaped.
The JSON object is stable: keys are added, none is renamed or dropped while `version` stays 1; what is not known is
null.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from afd_dsv4 import __version__
from afd_dsv4.admission import MIB
from afd_dsv4.doctor.facts import Finding, Server, Severity
from afd_dsv4.doctor.machine import GENERAL_GROUP, OURS, PLATFORM_GROUP, Machine
from afd_dsv4.doctor.planned import Planned
from afd_dsv4.workspace.sizing import WorkspaceSizes

WIDTH: Final = 120
EXIT_PROBLEMS: Final = 1
EXIT_BAD_INPUT: Final = 2
#: How the numbers of a server are shown.
_SHOWN: Final = {
    "model": "{}",
    "block_size": "block size {}",
    "max_num_batched_tokens": "{:,} tokens a step",
    "max_model_len": "longest sequence {:,}",
    "max_num_seqs": "{:,} requests",
    "async_scheduling": "asynchronous scheduling {}",
    "num_blocks": "{:,} KV blocks",
    "kv_gib": "{:.2f} GiB of KV cache",
    "prefix_caching": "prefix caching {}",
    "plugin": "this plugin {}",
    "hits": "{:,} tokens hit",
    "queries": "{:,} tokens asked of the prefix cache",
    "mean_prompt": "mean prompt {:,.0f} tokens",
    "preemptions": "{:,} preemptions",
    "kv_connector": "connector {}",
}


@dataclass(frozen=True)
class Report:
    """Everything that was found.

    Attributes:
        machine: what is installed.
        planned: what the gate says.
        log_said: what this plugin said in the log, None where there is none or it said nothing.
        server: the numbers.
        taken: what was taken for what, where it was not said.
        sizes: of tails and workspace slots, None where they cannot be known.
        findings: problems first.
        errors: inputs that were refused, one line each.
    """

    machine: Machine
    planned: Planned
    log_said: str | None
    server: Server
    taken: tuple[str, ...]
    sizes: WorkspaceSizes | None
    findings: tuple[Finding, ...]
    errors: tuple[str, ...]

    @property
    def status(self) -> int:
        """Exit status: 2 where an input was refused, else 1 where there is a problem, else 0."""
        if self.errors:
            return EXIT_BAD_INPUT
        return EXIT_PROBLEMS if any(one.severity is Severity.PROBLEM for one in self.findings) else 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        machine, decision, settings = self.machine, self.planned.decision, self.planned.settings
        return {
            "version": 1,
            "status": self.status,
            "errors": list(self.errors),
            "findings": [finding.as_dict() for finding in self.findings],
            "stack": machine.stack.as_dict() | {"name": machine.stack.name} if machine.stack else None,
            "adapter": machine.adapter,
            "drift": _drift_as_dict(machine),
            "plugins": [asdict(plugin) for plugin in machine.plugins],
            "patches": {package: list(targets) for package, targets in machine.patches.items()},
            "failed": dict(machine.failed),
            "gate": {
                "mode": settings.mode.value if settings and (decision or self.planned.error) else None,
                "active": decision.active if decision else None,
                "refused": decision.refused if decision else None,
                "reasons": list(decision.reasons) if decision else [],
                "error": self.planned.error,
                "assumed": list(self.planned.assumed),
                "log": self.log_said,
            },
            "sizes": _sizes_as_dict(self.sizes) if self.sizes else None,
            "server": {
                **self.server.known(),
                "engines": [
                    {
                        "name": engine.name,
                        "running": engine.running,
                        "waiting_for_capacity": engine.for_capacity,
                        "deferred": engine.deferred,
                        "usage": engine.usage,
                        "prompt_throughput": engine.prompt_throughput,
                        "generation_throughput": engine.generation_throughput,
                        "asleep": engine.asleep,
                    }
                    for engine in self.server.engines
                ],
                "sources": self.server.sources,
                "taken": list(self.taken),
            },
        }

    def __str__(self) -> str:
        """The text; its last line sums it up."""
        return "\n".join([f"afd-dsv4 doctor {__version__}", *self._about(), *self._diagnoses(), "", self._verdict()])

    def _about(self) -> Iterator[str]:
        yield from _item("stack", _stack(self.machine))
        yield from _item("plugins", _plugins(self.machine))
        yield from _item("patches", _patches(self.machine))
        yield from _item("gate", _gate(self.planned, self.log_said))
        yield from _item("sizes", _sizes(self.sizes))
        yield from _item("server", _server(self.server, self.taken))

    def _diagnoses(self) -> Iterator[str]:
        for number, finding in enumerate(self.findings, 1):
            yield ""
            yield from _wrapped(f"{number}. {finding.severity.value} {finding.code}: {finding.title}", "", "   ")
            for line in finding.why:
                yield from _wrapped(line, "   ", "   ")
            for remedy in finding.remedies:
                yield from _wrapped(remedy, "   - ", "     ")
            if finding.issues:
                yield from _wrapped(f"see {', '.join(finding.issues)}", "   ", "   ")

    def _verdict(self) -> str:
        problems = sum(finding.severity is Severity.PROBLEM for finding in self.findings)
        notes = len(self.findings) - problems
        refused = f", {len(self.errors)} input{'s' * (len(self.errors) > 1)} refused" if self.errors else ""
        if not self.findings and not self.errors:
            return "doctor: nothing found"
        return (
            f"doctor: {problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}{refused} "
            f"(exit status {self.status})"
        )


def _stack(machine: Machine) -> Iterator[str]:
    if why := machine.failed.get("stack"):
        yield f"cannot be read: {why}"
    stack = machine.stack
    if stack is None:
        return
    others = [f"torch {stack.torch or 'absent'}", f"torch-npu {stack.torch_npu or 'absent'}"]
    yield str(stack)
    yield f"{', '.join(others)}, Python {stack.python}, {stack.machine}"
    if not machine.has_vllm:
        yield "no vLLM here: what follows is about the numbers of another machine's server"
    elif stack.name is None:
        yield "none of the known ones"
    else:
        yield f"known as {stack.name}; {_drift(machine)}; adapter: {machine.adapter or 'none'}"


def _drift(machine: Machine) -> str:
    if why := machine.failed.get("drift"):
        return f"its code cannot be compared ({why})"
    verdict = machine.verdict
    if verdict is None or not verdict.known:
        return "no contract for it"
    drifting = len({drift.target for drift in verdict.drift})
    if drifting or verdict.unchecked:
        return f"{drifting} symbols differ from what was recorded, {len(verdict.unchecked)} could not be read"
    return f"code as recorded in {len(verdict.targets)} symbols"


def _drift_as_dict(machine: Machine) -> dict[str, Any] | None:
    verdict = machine.verdict
    if verdict is None or not verdict.known:
        return None
    return {
        "contract": verdict.name,
        "holds": len(verdict.targets),
        "drift": [drift.as_dict() for drift in verdict.drift],
        "unchecked": [{"target": target, "reason": reason} for target, reason in verdict.unchecked],
    }


def _plugins(machine: Machine) -> Iterator[str]:
    if why := machine.failed.get("plugins"):
        yield f"cannot be read: {why}"
    for group, word in ((PLATFORM_GROUP, "platform"), (GENERAL_GROUP, "general")):
        here = [plugin for plugin in machine.plugins if plugin.group == group and not plugin.value.startswith("vllm.")]
        shown = [f"{plugin.name} ({plugin.distribution}{'' if plugin.loaded else ', not loaded'})" for plugin in here]
        yield f"{word}: {', '.join(shown) or 'none'}"


def _patches(machine: Machine) -> Iterator[str]:
    if why := machine.failed.get("patches"):
        yield f"cannot be read: {why}"
    for package, targets in machine.patches.items():
        if package == OURS:
            yield f"{package}, only where it is on, and undone: {', '.join(targets)}"
        else:
            yield f"{package}: {len(targets)} attributes of others{_such_as(targets)}"
    if not machine.patches and "patches" not in machine.failed:
        yield "none found"


def _such_as(targets: tuple[str, ...]) -> str:
    """Those that have to do with admission, which is what a reader of this asks about."""
    about = [target for target in targets if "kv_cache" in target.lower() and "core" in target]
    return f", of which {len(about)} of the KV cache, such as {about[0]}" if about else ""


def _gate(planned: Planned, log_said: str | None) -> Iterator[str]:
    if planned.error:
        yield f"undecided: {planned.error}"
    elif planned.decision is None:
        yield f"not known: {planned.unknown}"
    if planned.decision:
        yield planned.decision.line()
    if planned.assumed and planned.decision:
        yield f"assumed, because it cannot be known from here: {'; '.join(planned.assumed)}"
    if log_said:
        yield f"the log says: {log_said}"


def _sizes(sizes: WorkspaceSizes | None) -> Iterator[str]:
    if sizes is None:
        yield "unknown: give --model, --block-size and --max-num-batched-tokens"
        return
    slots = sizes.device_bytes - sizes.tail_bytes
    yield (
        f"with the plugin {sizes.device_bytes / MIB:,.1f} MiB on each worker: tails {sizes.tail_bytes / MIB:,.1f} MiB "
        f"({sizes.tail_bytes_per_request:,} B a request), {sizes.slots} workspace slots and their tables "
        f"{slots / MIB:,.1f} MiB; {sizes.host_bytes / 1024:,.0f} KiB of pinned host memory"
    )


def _sizes_as_dict(sizes: WorkspaceSizes) -> dict[str, int]:
    return {
        "tail_bytes_per_request": sizes.tail_bytes_per_request,
        "tail_bytes": sizes.tail_bytes,
        "slots": sizes.slots,
        "slot_bytes": sizes.slot_bytes,
        "reserved_bytes": sizes.device_bytes,
        "host_bytes": sizes.host_bytes,
    }


def _server(server: Server, taken: tuple[str, ...]) -> Iterator[str]:
    words = {True: "on", False: "off"}
    by_source: dict[str, list[str]] = {}
    for name, value in server.known().items():
        if name in ("hits", "queries", "preemptions") and not value and not (name == "hits" and server.queries):
            continue
        shown = _SHOWN[name].format(words[value] if isinstance(value, bool) else value)
        by_source.setdefault(server.sources[name], []).append(shown)
    if not by_source and not server.engines:
        yield "nothing is known: give --metrics, --log, or the numbers"
    for source, values in by_source.items():
        yield f"{source}: {', '.join(values)}"
    for engine in server.engines:
        usage = "unknown" if engine.usage is None else f"{100 * engine.usage:.1f} %"
        deferred = f", {engine.deferred} deferred" if engine.deferred else ""
        yield (
            f"{engine.label}: {engine.running} running, {engine.for_capacity} waiting for capacity{deferred}, "
            f"KV cache usage {usage}{', asleep' if engine.asleep else ''}"
        )
    if taken:
        yield f"taken: {'; '.join(taken)}"


def _item(name: str, lines: Iterator[str]) -> Iterator[str]:
    first = f"{name:<9}"
    for line in lines:
        yield from _wrapped(line, first, " " * 9)
        first = " " * 9


def _escaped(text: str) -> str:
    """Text as one line that a terminal only shows: names and lines of a log may hold what moves it or colours it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    text = _escaped(text)
    if "  " in text:  # a row of a table
        return [first + text]
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
