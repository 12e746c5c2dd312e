# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The command `afd-dsv4 doctor`: what is installed, what stands in the way, and why a queue stands still.

Problem: an operator whose requests wait for capacity at 0 % usage is told nothing by anybody; and whoever asks for help
is asked for versions, plugins and settings first.
Way: a page of answers that is always printed, from the standard library and sources read as text: a broken vLLM cannot
break it. A metrics page, a log, a JSON of options and single numbers may be given, in any combination; the more is
given, the more exact the diagnosis. An input that is refused is named, and costs only what it would have said.
`facts.py` holds the words; `metrics.py`, `logs.py` with `lines.py`, and `options.py` read; `machine.py`, `planned.py`
and `defaults.py` look at what is installed and configured; `case.py` counts; `fits.py`, `queue.py`, `prefix.py`,
`faults.py` and `verdicts.py` explain; `report.py` writes.
Not here: repairing anything, asking a server, and drivers, CANN or devices.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from afd_dsv4.admission import ASYNC_BY_DEFAULT, GIB
from afd_dsv4.compat.stack import known, release
from afd_dsv4.config import Executor, Mode, Settings
from afd_dsv4.doctor import logs, machine, metrics, options, planned, prefix, queue
from afd_dsv4.doctor.case import SEQS_ASSUMED, case_of, drafts_and_graphs
from afd_dsv4.doctor.facts import Finding, Server, Severity, disagreements, first_known
from afd_dsv4.doctor.report import EXIT_BAD_INPUT, EXIT_PROBLEMS, Report
from afd_dsv4.geometry import (
    DEFAULT_STACK,
    STACKS,
    InputError,
    ModelGeometry,
    PageLayout,
    page_layout,
    preset,
    preset_name,
)

__all__ = ["EXIT_BAD_INPUT", "EXIT_PROBLEMS", "Given", "Report", "diagnose"]

#: Bytes of an input that are read: a scrape is smaller than this, a log may be cut in its middle.
MOST_BYTES: Final = 32 << 20
_HEAD: Final = 8 << 20
STDIN: Final = "-"

_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Given:
    """What the operator gives; None is nothing.

    Attributes:
        metrics, log, config: names of files, `-` for standard input.
        model: preset, or path of a config.json.
        server: numbers.
        prompt_tokens: of the prompt that is asked about.
        hbm_gib: GiB a rank for the KV cache and all that the plugin reserves.
        slots: workspace slots.
        stack: name of the stack whose pages are counted, and that options are for where no vLLM is here.
    """

    metrics: str | None = None
    log: str | None = None
    config: str | None = None
    model: str | None = None
    server: Server = field(default_factory=Server)
    prompt_tokens: int | None = None
    hbm_gib: float | None = None
    slots: int | None = None
    stack: str | None = None


def diagnose(given: Given, environment: Mapping[str, str], read_model: Callable[[str], ModelGeometry]) -> Report:
    """Look at everything.

    Args:
        given: by the operator.
        environment: such as `os.environ`.
        read_model: reads what `given.model` names.
    """
    errors: list[str] = []

    def tried(what: Callable[[], _Read]) -> _Read | None:
        try:
            return what()
        except InputError as error:
            errors.append(" ".join(str(error).split()))
            return None

    found: list[Finding] = []
    here = machine.survey(environment)
    page = log = file = None
    if (name := given.metrics) is not None:
        page = tried(lambda: metrics.parse(*_whole_text(name, "metrics")))
    if (log_name := given.log) is not None:
        log = tried(lambda: logs.parse(_text(log_name, "log", found), log_name))
    if given.config is not None:
        file = tried(lambda: options.options_of(*_whole_text(given.config, "config")))
    if page and page.malformed:
        found.append(_cut(given.metrics or "", page))
    from_file, from_log = logs.server_of(file) if file else Server(), log.server if log else Server()
    # A page has the name that the model is served by, which may be any.
    ours = given.model is not None or any(metrics.is_deepseek_v4(one.model) for one in (from_file, from_log))
    said = [
        ("given", given.server),
        ("metrics", metrics.server(page, deepseek_v4=ours) if page else Server()),
        ("config", from_file),
        ("log", from_log),
    ]
    server = first_known(said)
    if differ := disagreements(said):
        found.append(differ)
    taken: list[str] = []
    if log and log.version and here.has_vllm and here.stack and release(here.stack.vllm) != release(log.version):
        taken.append(f"the log is of vLLM {log.version}, not of this machine's")
    geometry = tried(lambda: _geometry(given, server, read_model, taken))
    server = tried(lambda: _within(server, geometry, taken)) or server.without("max_model_len")
    layout = tried(lambda: _layout(given, here, server, geometry, taken))
    plan = planned.plan(
        file if file is not None else (log.options or None) if log else None,
        here,
        environment,
        geometry,
        max_num_batched_tokens=server.max_num_batched_tokens,
        block_size=server.block_size,
        max_num_seqs=server.max_num_seqs,
        stack=given.stack,
        refused=given.config is not None,
    )
    asked = file if file is not None else log.options if log else {}
    if log is None and server.plugin is None and plan.decision and plan.decision.active:
        server = server.having("plugin", True, "gate")  # a server that ran without a line of ours ran without us
    if asked and plan.limits and server.max_num_seqs is None:  # who gives numbers alone gets `plan`'s
        server = server.having("max_num_seqs", plan.limits.max_num_seqs, "vLLM's default")
    hbm = None if given.hbm_gib is None else int(given.hbm_gib * GIB)
    rest = {"prompt": given.prompt_tokens, "hbm": hbm, "drops": prefix.drops_a_block(asked)}
    rest |= _reservation(given, plan, asked)
    case = tried(lambda: case_of(server, geometry, layout, **rest))
    if case and (given.prompt_tokens or hbm or any(engine.looks_stuck for engine in server.engines)):
        taken += [f"asynchronous scheduling {'on' if ASYNC_BY_DEFAULT else 'off'}"] * (server.async_scheduling is None)
        taken += [f"{SEQS_ASSUMED} requests"] * (server.max_num_seqs is None)
        taken += [f"longest sequence {case.max_model_len:,}, the model's"] * (server.max_model_len is None)
    wanted = bool(plan.settings and plan.settings.mode is not Mode.OFF)
    judged = tried(lambda: list(queue.findings(case, server, given.prompt_tokens)))
    found += queue.findings(None, server) if judged is None else judged  # a number that no server has costs the blocks
    found += log.findings if log else ()
    told = {finding.code for finding in found}  # a log says with more words what the page counts
    found += [finding for finding in metrics.said(page).findings if finding.code not in told] if page else []
    found += _hits_of_a_log(log, server)
    found += machine.findings(here, environment, wanted)
    found += options.findings(file, _vllm(given, here)) if file else ()
    # Of a log's options the server's own word comes first.
    found += [one for one in _gate(plan) if file or one.code != "gate-refuses" or "plugin-refused" not in told]
    batch = server.max_num_batched_tokens
    reserved = tried(lambda: case.sizes(batch)) if case and batch else None
    return Report(
        machine=here,
        planned=plan,
        log_said=log.plugin if log else None,
        server=server,
        taken=tuple(taken),
        sizes=reserved or (plan.decision.sizes if plan.decision else None),
        findings=tuple(sorted(_once(found), key=lambda finding: finding.severity is Severity.NOTE)),
        errors=tuple(errors),
    )


def _reservation(given: Given, plan: planned.Planned, asked: Mapping[str, Any]) -> dict[str, int | None]:
    """What the plugin's sizes depend on beside the numbers of the server: the gate's where it says that it is on."""
    settings, sizes = plan.settings or Settings(), plan.decision.sizes if plan.decision else None
    drafts, graphs = drafts_and_graphs(asked)
    slots = settings.slots + graphs
    if plan.decision and plan.decision.settings and sizes:
        settings, slots = plan.decision.settings, sizes.slots
    return {
        "slots": given.slots or slots,
        "drafts": drafts if settings.drafts is None else settings.drafts,
        "tile_tokens": settings.tile_tokens if settings.executor is Executor.AFD else None,
    }


def _geometry(
    given: Given, server: Server, read_model: Callable[[str], ModelGeometry], taken: list[str]
) -> ModelGeometry | None:
    """The model that was given, else the preset whose name is in the server's own."""
    if given.model is not None:
        geometry = read_model(given.model)
        geometry.check_stock_operator()
        return geometry
    name = preset_name(server.model)
    if name is None:
        return None
    taken.append(f"{server.model} for the preset {name} (--model says otherwise)")
    return preset(name)


def _within(server: Server, geometry: ModelGeometry | None, taken: list[str]) -> Server:
    """The server, whose longest sequence is within the model's; one that runs beyond it was told to.

    Raises:
        InputError: a longest sequence that vLLM would not start with.
    """
    longest = server.max_model_len
    if geometry is None or longest is None or longest <= (most := geometry.max_position_embeddings):
        return server
    if server.sources.get("max_model_len") in ("given", "config"):
        raise InputError("max-model-len", f"{longest}, {geometry.name} ends at {most}", "lower it")
    taken.append(f"longest sequence {longest:,}, although the model ends at {most:,}")
    return server


def _layout(
    given: Given, here: machine.Machine, server: Server, geometry: ModelGeometry | None, taken: list[str]
) -> PageLayout | None:
    if given.stack is not None and given.stack not in STACKS:
        raise InputError("stack", f"{given.stack!r} is unknown", f"supported are {', '.join(STACKS)}")
    if server.block_size is None:
        return None
    name = given.stack or (here.stack.name if here.stack and here.stack.name in STACKS else None)
    if name is None:
        name = DEFAULT_STACK
        taken += [f"pages of {name}"] * (geometry is not None)
    try:
        return page_layout(name, server.block_size)
    except InputError:
        if server.sources.get("block_size") in ("given", "config"):
            raise
        taken.append(f"block size {server.block_size} for that of another model: {name} has no such pages")
        return None


def _hits_of_a_log(log: logs.Log | None, server: Server) -> list[Finding]:
    if log is None or log.hit_rate != 0 or server.queries is not None or not server.prefix_caching:
        return []
    return [
        Finding(
            "prefix-hits-zero-in-log",
            Severity.NOTE,
            "the log shows a prefix cache hit rate of 0.0 % after prompts were computed",
            (
                (
                    "Whether they could have hit depends on their length, which the metrics page says: give it with "
                    "--metrics."
                ),
            ),
            (),
            ("vllm-project/vllm-ascend#16270",),
        )
    ]


def _vllm(given: Given, here: machine.Machine) -> str | None:
    """The version of vLLM that the options are for: the one that is here, else that of the stack; None is not known."""
    if here.has_vllm and here.stack:
        return here.stack.vllm
    stack = known(given.stack or "")
    return stack.vllm if stack else None


def _gate(plan: planned.Planned) -> list[Finding]:
    if plan.settings is None:
        remedy = "correct the setting; a server started with it ends with the same line"
        return [Finding("settings", Severity.PROBLEM, plan.error or "settings cannot be read", (), (remedy,))]
    if plan.error:
        return [Finding("options", Severity.PROBLEM, plan.error, (), ("vLLM would refuse it, too; correct it",))]
    if plan.decision is None or not plan.decision.refused:
        return []
    return [
        Finding(
            "gate-refuses",
            Severity.PROBLEM,
            f"mode {plan.settings.mode.value!r} is refused, and native code would serve",
            (),
            plan.decision.reasons,
        )
    ]


def _cut(name: str, page: metrics.Page) -> Finding:
    where, first = page.malformed[0]
    count = len(page.malformed)
    return Finding(
        "malformed-metrics",
        Severity.NOTE,
        f"metrics {name!r}: {count} line{'s' * (count > 1)} left out that {'are' if count > 1 else 'is'} no sample, "
        f"the first is line {where}: {first!r}",
        ("Perhaps the file was cut; what is missing counts as not known.",),
        numbers={"malformed": count},
    )


def _once(findings: list[Finding]) -> list[Finding]:
    """Each diagnosis once: a log and this machine may tell the same."""
    return list({(finding.code, finding.title): finding for finding in findings}.values())


def _whole_text(name: str | None, what: str) -> tuple[str, str]:
    """Text and name of an input that is nothing without its end.

    Raises:
        InputError: as `_bytes`, or one that is too long.
    """
    name = name or ""
    head, tail, size = _bytes(name, what)
    if tail or size > MOST_BYTES:
        raise InputError(f"{what} {name!r}", f"has {size:,} bytes", f"give at most {MOST_BYTES:,}")
    return head.decode("utf-8-sig", "replace"), name


def _text(name: str, what: str, found: list[Finding]) -> str:
    head, tail, size = _bytes(name, what)
    if size <= MOST_BYTES:
        return head.decode("utf-8-sig", "replace")
    found.append(
        Finding(
            "log-cut",
            Severity.NOTE,
            f"{what} {name!r} has {size:,} bytes: the first {len(head):,} and the last {len(tail):,} were read",
        )
    )
    return head.decode("utf-8-sig", "replace") + "\n" + tail.decode("utf-8", "replace")


def _bytes(name: str, what: str) -> tuple[bytes, bytes, int]:
    """The begin and the end of an input, and its size; no end where the begin is all.

    Raises:
        InputError: one that cannot be read, or is no regular file.
    """
    remedy = "give a file, or - for standard input"
    if not name:
        raise InputError(what, "an empty name was given", remedy)
    if re.match(r"https?://", name, re.IGNORECASE):
        remedy = f"say `curl -s {shlex.quote(name)} | afd-dsv4 doctor --{what} -`"
        raise InputError(what, f"{name!r} is an address, and doctor asks no server", remedy)
    try:
        if name == STDIN:
            if sys.stdin is None:
                raise InputError(what, "standard input is closed", remedy)
            whole = sys.stdin.buffer.read(MOST_BYTES + 1)
            return whole, b"", len(whole)
        if not stat.S_ISREG(Path(name).stat().st_mode):  # others may never answer, a FIFO without a writer for one
            raise InputError(what, f"{name!r} is not a regular file", remedy)
        with Path(name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= MOST_BYTES:
                whole = file.read(MOST_BYTES)
                return whole, b"", len(whole)
            head = file.read(_HEAD)
            file.seek(-(MOST_BYTES - _HEAD), os.SEEK_END)
            return head, file.read(MOST_BYTES - _HEAD), size
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(what, f"cannot read {name!r} ({reason})", remedy) from None
