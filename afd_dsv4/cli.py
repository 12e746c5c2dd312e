# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The command `afd-dsv4`: `plan` says what a prompt needs, `doctor` why a queue stands still, `evidence` runs the
demonstration, `trace` judges a run, `compat` compares a stack with what the plugin was written against, `kernels` says
what our kernels take of the device.

Problem: whether a long prompt will ever start is decided by numbers spread over two code bases, and asking a server
costs a model load.
Way: `plan` is arithmetic only, `trace` reads one file, `compat` and `doctor` read sources; none imports torch or vLLM.
Whatever is wrong with the input, or with the place that the answer goes to, becomes one line on stderr (what, found,
remedy) and exit status 2. A reader that has left (`| head`) is nobody's mistake: the command ends silently with the
status that SIGPIPE would give.
Not here: the arithmetic (`admission.py`, `workspace/sizing.py`), the judgement (`workspace/order.py`), the comparison
(`compat/check.py`), and the run (`evidence/run.py`), which is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from afd_dsv4 import __version__
from afd_dsv4.admission import GIB, GROUP_NAMES, NULL_BLOCKS, Admission, KvPlan, SchedulerLimits, admit, kv_plan
from afd_dsv4.config import DEFAULT_SLOTS, DEFAULT_TILE_TOKENS, LEAST_TILE_TOKENS, Executor
from afd_dsv4.geometry import (
    DEFAULT_STACK,
    MOST,
    InputError,
    ModelGeometry,
    PageLayout,
    from_hf_config,
    page_layout,
    preset,
)
from afd_dsv4.workspace.chrome import chrome
from afd_dsv4.workspace.order import Report, check
from afd_dsv4.workspace.sizing import WorkspaceSizes, size_workspace
from afd_dsv4.workspace.trace import Recorded, TraceError, load

MIB = 1 << 20
EXIT_VIOLATIONS = 1
EXIT_BAD_INPUT = 2
EXIT_READER_LEFT = 141  # what a shell reports for a command that SIGPIPE ended
EVIDENCE_TOKENS = (1024, 131072)  # below, no request can be cut behind its first window; above, nothing was measured


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option, or an answer that could not be written, in one line like every other error."""

    def error(self, message: str) -> NoReturn:
        raise InputError("command line", message, f"see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints help and version; argparse's own way is silent about a write that failed."""
        stream = file or sys.stderr
        if stream is not None:
            _print(message.removesuffix("\n"), stream)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for violations, drift or a missed limit, 2 for bad input or an
    unknown stack, or that of the evidence run.

    Raises:
        SystemExit: 0 after `--help` and `--version`, 141 when the reader of the output has left.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with _writing():  # help and version
            options = _parser().parse_args(arguments)
        options.argv = arguments  # the evidence run starts itself again on the software NPU
        if options.command == "evidence":
            from afd_dsv4.evidence.run import main as evidence  # heavy: torch and, mostly, a whole software NPU

            return evidence(options)
        answers = {"trace": _trace, "compat": _compat, "plan": _plan, "doctor": _doctor, "kernels": _kernels}
        return answers[options.command](options)
    except InputError as error:
        _complain(error)
        return EXIT_BAD_INPUT


def _complain(error: InputError | str) -> None:
    if sys.stderr is None:  # closed before the start; print would take stdout instead
        return
    try:
        _print("afd-dsv4: error: " + " ".join(str(error).split()), sys.stderr)  # one line, whatever was typed
    except OSError:  # nowhere left to say it; the status still does
        _discard(sys.stderr)


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Writes out stdout at the end, while a failure can still be reported; Python itself would do it too late."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        raise SystemExit(EXIT_READER_LEFT) from None
    except OSError as error:
        _discard(sys.stdout)
        raise InputError(
            "standard output", f"cannot be written ({error.strerror or error})", "send it somewhere with room for it"
        ) from None


def _print(text: str, stream: TextIO) -> None:
    """Print what the stream's encoding lacks as escapes: a file may be called anything."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def _discard(stream: TextIO) -> None:
    """Let what the stream still buffers go nowhere, or Python complains about it once more when it ends."""
    with contextlib.suppress(OSError):  # a stream that is no file needs no help
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="afd-dsv4", description="Bounded compressor state for DeepSeek-V4 on Ascend.")
    parser.add_argument("--version", action="version", version=f"afd-dsv4 {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{plan,doctor,evidence,trace,compat,kernels}"
    )

    plan = commands.add_parser(
        "plan",
        help="blocks a prompt needs, natively and with the plugin, and whether it starts",
        description="Says how many KV blocks a prompt needs on an empty server, natively and with the plugin, whether "
        "the scheduler starts it, and if not why.",
    )
    plan.add_argument(
        "--model", required=True, metavar="flash|pro|CONFIG.json", help="preset, or a Hugging Face config"
    )
    plan.add_argument("--prompt-tokens", required=True, type=_count, metavar="N", help="tokens of the prompt")
    plan.add_argument("--max-num-batched-tokens", required=True, type=_count, metavar="N", help="most tokens of a step")
    plan.add_argument("--block-size", required=True, type=_count, metavar="32|64|128", help="vLLM's --block-size")
    memory = plan.add_mutually_exclusive_group()
    memory.add_argument(
        "--free-blocks",
        type=_count_or_zero,
        metavar="N",
        help="free KV blocks, the same for both sides: num_gpu_blocks of the server's log, less 1",
    )
    memory.add_argument(
        "--hbm-gib", type=_gib, metavar="X", help="GiB a rank for the KV cache and all that the plugin reserves"
    )
    plan.add_argument("--max-num-seqs", type=_count, default=16, metavar="N", help="vLLM's --max-num-seqs (default 16)")
    plan.add_argument("--max-model-len", type=_count, metavar="N", help="longest sequence (default: the model's)")
    plan.add_argument(
        "--async-scheduling", action="store_true", help="two batches in flight instead of one, as vLLM does by default"
    )
    plan.add_argument("--slots", type=_count, default=DEFAULT_SLOTS, metavar="N", help="workspace slots (default 2)")
    plan.add_argument(
        "--executor",
        choices=(Executor.STOCK.value, Executor.AFD.value),
        default=Executor.STOCK.value,
        help="what compresses; afd has staging rows in its slots (default stock)",
    )
    plan.add_argument(
        "--tile-tokens",
        type=_tile_tokens,
        default=DEFAULT_TILE_TOKENS,
        metavar="N",
        help=f"with executor afd: tokens that it stages at once (default {DEFAULT_TILE_TOKENS})",
    )
    plan.add_argument("--stack", default=DEFAULT_STACK, metavar="NAME", help=f"default {DEFAULT_STACK}")
    plan.add_argument("--json", action="store_true", help="machine-readable answer")

    _add_doctor(commands)

    evidence = commands.add_parser("evidence", help="measure the claim on this machine")
    evidence.add_argument("--device", choices=("auto", "npu", "softnpu", "cuda"), default="auto", help="default auto")
    evidence.add_argument("--model", choices=("flash",), default="flash", help="default flash")
    evidence.add_argument(
        "--tokens", type=_evidence_tokens, default=32768, metavar="N", help="1024 to 131072 (default 32768)"
    )
    evidence.add_argument(
        "--out", type=Path, default=Path("build/evidence"), metavar="DIR", help="default build/evidence"
    )

    trace = commands.add_parser("trace", help="judge or draw a trace of the workspace arena")
    actions = trace.add_subparsers(dest="action", required=True, metavar="{check,chrome}")
    judge = actions.add_parser(
        "check",
        help="whether every reuse is ordered",
        description="Prints every reuse of a workspace slot, of pages and of staging that nothing orders, with both of "
        "its records, and last what was judged. Exit status 0: none; 1: some; 2: the file cannot be read.",
    )
    judge.add_argument("file", metavar="FILE", help="a trace that was saved")
    judge.add_argument("--json", action="store_true", help="machine-readable answer")
    draw = actions.add_parser(
        "chrome",
        help="a picture for Perfetto or chrome://tracing",
        description="Writes the trace in the Trace Event Format: a workspace slot is a track, a lease a slice, and "
        "what an event orders an arrow. Times are those at which the host queued the work.",
    )
    draw.add_argument("file", metavar="FILE", help="a trace that was saved")
    draw.add_argument("--out", required=True, metavar="OUT", help="file to write; replaced if it exists")

    compat = commands.add_parser("compat", help="compare a stack with what the plugin was written against")
    actions = compat.add_subparsers(dest="action", required=True, metavar="{check,record}")
    compare = actions.add_parser(
        "check",
        help="every symbol that differs, and what goes wrong because of it",
        description="Compares the sources of vLLM, vllm-ascend and, where it is, afd-plugin with recorded contracts; "
        "nothing of them is imported. Exit status 0: no drift; 1: drift; 2: unknown stack, or bad input.",
    )
    compare.add_argument("--json", action="store_true", help="machine-readable answer")
    write = actions.add_parser(
        "record",
        help="write a contract",
        description="Writes down every symbol of compat/symbols.py as it is in the sources.",
    )
    write.add_argument("--out", metavar="OUT", help="file to write, replaced if it exists (default: standard output)")
    for action in (compare, write):
        action.add_argument(
            "--against",
            action="append",
            default=[],
            type=Path,
            metavar="PATH",
            help="a checkout, an unpacked wheel or sdist of vllm-ascend, vllm or afd-plugin instead of the installed "
            "packages; may be given more than once",
        )
        action.add_argument("--stack", metavar="NAME", help="the stack it is taken for")

    kernels = commands.add_parser("kernels", help="what our kernels take of the device")
    actions = kernels.add_subparsers(dest="action", required=True, metavar="{report}")
    report = actions.add_parser(
        "report",
        help="Unified Buffer, bytes, instructions and slots, each against its limit",
        description="Runs each kernel in the host emulation and prints what it takes, with the source of each figure. "
        "Nothing of it is measured on hardware. Exit status 0: every limit is kept; 1: some are not; 2: no emulation.",
    )
    report.add_argument("--json", action="store_true", help="machine-readable answer")
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what stands in the way, and why a queue stands still",
        description="Says what is installed, which plugins load and what they replace, what the gate decides, and what "
        "the plugin would take; and from a metrics page, a log or single numbers why requests wait. Nothing of vLLM is "
        "imported. Exit status 0: no problem; 1: at least one; 2: an input was refused, and the rest is said all the "
        "same.",
    )
    doctor.add_argument("--metrics", metavar="FILE", help="what the server's /metrics prints; - for standard input")
    doctor.add_argument("--log", metavar="FILE", help="what the server writes; - for standard input")
    doctor.add_argument("--config", metavar="FILE", help="JSON object with options of `vllm serve`, by their names")
    doctor.add_argument("--json", action="store_true", help="machine-readable answer")
    doctor.add_argument("--model", metavar="flash|pro|CONFIG.json", help="preset, or a Hugging Face config")
    doctor.add_argument("--prompt-tokens", type=_count, metavar="N", help="tokens of the prompt that waits")
    doctor.add_argument("--max-num-batched-tokens", type=_count, metavar="N", help="most tokens of a step")
    doctor.add_argument("--block-size", type=_count, metavar="32|64|128", help="that was asked for")
    memory = doctor.add_mutually_exclusive_group()
    memory.add_argument("--num-gpu-blocks", type=_count, metavar="N", help="KV blocks of one engine, as its log says")
    memory.add_argument("--free-blocks", type=_count_or_zero, metavar="N", help="the same, less the null block")
    memory.add_argument("--hbm-gib", type=_gib, metavar="X", help="GiB a rank for the KV cache and the plugin together")
    doctor.add_argument("--max-num-seqs", type=_count, metavar="N", help="vLLM's --max-num-seqs")
    doctor.add_argument("--max-model-len", type=_count, metavar="N", help="vLLM's --max-model-len")
    doctor.add_argument(
        "--async-scheduling", action=argparse.BooleanOptionalAction, help="whether two batches are in flight"
    )
    doctor.add_argument("--slots", type=_count, metavar="N", help="workspace slots")
    doctor.add_argument(
        "--stack", metavar="NAME", help=f"whose pages are counted (default: installed, {DEFAULT_STACK})"
    )


def _doctor(options: argparse.Namespace) -> int:
    from afd_dsv4.doctor import Given, diagnose
    from afd_dsv4.doctor.facts import Server

    blocks = options.num_gpu_blocks
    if options.free_blocks is not None:
        blocks = options.free_blocks + NULL_BLOCKS
    given = Given(
        metrics=options.metrics,
        log=options.log,
        config=options.config,
        model=options.model,
        server=Server(
            block_size=options.block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            async_scheduling=options.async_scheduling,
            num_blocks=blocks,
        ),
        prompt_tokens=options.prompt_tokens,
        hbm_gib=options.hbm_gib,
        slots=options.slots,
        stack=options.stack,
    )
    report = diagnose(given, os.environ, _model)
    _answer(json.dumps(report.as_dict(), indent=2) if options.json else str(report))
    for error in report.errors:
        _complain(error)
    return report.status


def _plan(options: argparse.Namespace) -> int:
    geometry = _model(options.model)
    geometry.check_stock_operator()
    layout = page_layout(options.stack, options.block_size)
    longest = options.max_model_len or geometry.max_position_embeddings
    if longest > geometry.max_position_embeddings:
        raise InputError(
            "max-model-len", f"{longest}, {geometry.name} ends at {geometry.max_position_embeddings}", "lower it"
        )
    limits = SchedulerLimits(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=longest,
        max_num_seqs=options.max_num_seqs,
        batches_in_flight=2 if options.async_scheduling else 1,
    )
    sizes = size_workspace(
        geometry,
        layout,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        slots=options.slots,
        tile_tokens=options.tile_tokens if options.executor == Executor.AFD.value else None,
    )
    plans = {"native": kv_plan(geometry, layout, plugin=False), "plugin": kv_plan(geometry, layout, plugin=True)}
    answers = {
        side: admit(plan, options.prompt_tokens, limits, _free(side, plan, options, sizes))
        for side, plan in plans.items()
    }
    if options.json:
        text = json.dumps(_as_json(options, geometry, limits, sizes, plans, answers), indent=2)
    else:
        text = _as_text(options, geometry, layout, limits, sizes, plans, answers)
    _answer(text)
    return 0


def _answer(text: str) -> None:
    if sys.stdout is None:
        raise InputError("standard output", "is closed", "leave it open, the answer goes there")
    with _writing():
        _print(text, sys.stdout)


def _trace(options: argparse.Namespace) -> int:
    recorded = _recorded(options.file)
    if options.action == "chrome":
        _write(options.out, json.dumps(chrome(recorded.records)))
        return 0
    report = check(recorded.records, recorded.header.dropped)
    if options.json:
        _answer(json.dumps(_report_as_json(report, recorded), indent=2))
    else:
        _answer("\n".join([*map(str, report.violations), f"trace: {report}"]))
    return EXIT_VIOLATIONS if report.violations else 0


def _compat(options: argparse.Namespace) -> int:
    from afd_dsv4.compat.check import check, record  # griffe, where it is installed

    if options.action == "check":
        answer = check(options.against, options.stack)
        _answer(json.dumps(answer.as_dict(), indent=2) if options.json else str(answer))
        return answer.status
    text = record(options.against, options.stack).as_json()
    if options.out:
        _write(options.out, text)
    else:
        _answer(text.removesuffix("\n"))
    return 0


def _kernels(options: argparse.Namespace) -> int:
    from afd_dsv4.kernels_report import run  # NumPy and a native library

    text, status = run(options.json)
    _answer(text)
    return status


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError("out", f"cannot write {name!r} ({reason})", "choose another file") from None


def _recorded(name: str) -> Recorded:
    remedy = "give a file that Trace.save wrote"
    try:
        if stat.S_ISREG(Path(name).stat().st_mode):  # others may never answer, a FIFO without a writer for one
            return load(name)
    except TraceError as error:
        raise InputError(f"trace {name!r}, {error.what}", error.found, error.remedy) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError("trace", f"cannot read {name!r} ({reason})", remedy) from None
    raise InputError("trace", f"{name!r} is not a regular file", remedy)


def _report_as_json(report: Report, recorded: Recorded) -> dict[str, Any]:
    document = dataclasses.asdict(report)
    for violation, found in zip(document["violations"], report.violations, strict=True):
        violation |= {"kind": found.kind.name.lower(), "text": str(found)}
    return {**document, "about": recorded.header.about}


def _free(side: str, plan: KvPlan, options: argparse.Namespace, sizes: WorkspaceSizes) -> int | None:
    if options.hbm_gib is None:
        return None if options.free_blocks is None else int(options.free_blocks)
    budget = int(options.hbm_gib * GIB)
    reserved = sizes.device_bytes if side == "plugin" else 0
    try:
        return plan.free_blocks(budget - reserved)
    except InputError:
        least = reserved + 2 * plan.block_bytes
        raise InputError(
            "HBM budget",
            f"{options.hbm_gib:g} GiB leave {max(budget - reserved, 0):,} bytes for the KV cache ({side} side, "
            f"{reserved:,} bytes reserved), not two blocks of {plan.block_bytes:,}",
            f"offer more than {least / GIB:.2f} GiB, or lower --max-num-seqs",
        ) from None


def _model(wanted: str) -> ModelGeometry:
    if wanted in ("flash", "pro"):
        return preset(wanted)
    path = Path(wanted)
    remedy = "give flash, pro or the path of a config.json"
    if not wanted:  # for Path this is the current directory
        raise InputError("model", "nothing was given", remedy)
    text = ""
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):  # others may never answer, a FIFO without a writer for one
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError("model", f"{wanted} is not a text file", remedy) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(
            "model", f"cannot read {wanted!r} ({getattr(error, 'strerror', None) or error})", remedy
        ) from None
    if stat.S_ISDIR(mode):
        raise InputError("model", f"{wanted} is a directory", "give the config.json in it")
    if not stat.S_ISREG(mode):
        raise InputError("model", f"{wanted} is not a regular file", remedy)
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError("model", f"{wanted} is not JSON ({error})", remedy) from None
    except ValueError:  # Python's own limit, whose message has a remedy for programmers
        raise InputError("model", f"{wanted} holds a number with thousands of digits", "correct it") from None
    if not isinstance(config, dict):
        raise InputError("model", f"{wanted} holds a JSON {type(config).__name__}, not an object", remedy)
    return from_hf_config(config, path.name)


def _as_json(
    options: argparse.Namespace,
    geometry: ModelGeometry,
    limits: SchedulerLimits,
    sizes: WorkspaceSizes,
    plans: dict[str, KvPlan],
    answers: dict[str, Admission],
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "stack": options.stack,
        "model": geometry.name,
        "prompt_tokens": options.prompt_tokens,
        "block_size": options.block_size,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_in_flight_tokens": limits.max_in_flight_tokens,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
    }
    for side, answer in answers.items():
        document[side] = {
            "blocks_needed": answer.blocks_needed,
            "by_group": answer.by_group,
            "first_chunk_blocks": sum(answer.first_chunk.values()),
            "first_chunk_by_group": answer.first_chunk,
            "free_blocks": answer.free_blocks,
            "block_bytes": plans[side].block_bytes,
            "admitted": answer.admitted,
            "reason": answer.reason,
        }
    document["plugin"] |= {
        "tail_bytes_per_request": sizes.tail_bytes_per_request,
        "tail_bytes": sizes.tail_bytes,
        "executor": options.executor,
        "slots": sizes.slots,
        "slot_bytes": sizes.slot_bytes,
        "reserved_bytes": sizes.device_bytes,
        "host_bytes": sizes.host_bytes,
    }
    return document


def _as_text(
    options: argparse.Namespace,
    geometry: ModelGeometry,
    layout: PageLayout,
    limits: SchedulerLimits,
    sizes: WorkspaceSizes,
    plans: dict[str, KvPlan],
    answers: dict[str, Admission],
) -> str:
    native, plugin = answers["native"], answers["plugin"]
    rows = [("KV blocks for", "native", "plugin")]
    rows += [(name, f"{native.by_group[name]:,}", f"{plugin.by_group[name]:,}") for name in GROUP_NAMES]
    rows += [
        ("whole prompt", f"{native.blocks_needed:,}", f"{plugin.blocks_needed:,}"),
        ("first chunk", f"{sum(native.first_chunk.values()):,}", f"{sum(plugin.first_chunk.values()):,}"),
        ("free", _shown(native.free_blocks), _shown(plugin.free_blocks)),
        ("admitted", _shown(native.admitted), _shown(plugin.admitted)),
    ]
    kinds = ", ".join(
        f"{len(geometry.layers_of(kind))} {kind.value} ({geometry.row_bytes(kind):,} B a row, "
        f"{layout.page_rows(kind)} rows a page)"
        for kind in dict.fromkeys(compressor.kind for compressor in geometry.compressors)
    )
    request = (
        f"{geometry.name} on {options.stack}, block size {options.block_size}: {options.prompt_tokens:,} prompt "
        f"tokens, {limits.max_num_batched_tokens:,} tokens a step, {limits.batches_in_flight} in flight, "
        f"longest sequence {limits.max_model_len:,}"
    )
    rest = sizes.device_bytes - sizes.tail_bytes - sizes.slots * sizes.slot_bytes
    reserved = (
        f"The plugin reserves {sizes.device_bytes / MIB:,.1f} MiB ({sizes.device_bytes:,} B): "
        f"tails {sizes.tail_bytes:,} (null pages and {limits.max_num_seqs} requests of "
        f"{sizes.tail_bytes_per_request:,}), "
        f"{sizes.slots} workspace slots of {sizes.slot_bytes:,} for the {options.executor} executor, and {rest:,} for "
        f"forwards without requests."
    )
    scope = (
        "For one fresh prompt on an empty server: no draft layers, prefix hits, KV connector or context parallelism. "
        "The plugin's column is what it would need; it is not wired into a server in this release."
    )
    if limits.batches_in_flight == 1:
        scope += (
            " Synchronous scheduling; if the server schedules asynchronously (vLLM's default), add --async-scheduling."
        )
    if options.free_blocks is not None:
        reserved += " With --free-blocks this is not taken from the plugin's blocks."
    return "\n".join(
        [
            request,
            scope,
            f"compressors: {kinds}",
            "",
            *(f"  {name:<14}{left:>12}{right:>12}" for name, left, right in rows),
            "",
            f"One block: native {plans['native'].block_bytes:,} B, plugin {plans['plugin'].block_bytes:,} B.",
            reserved,
            f"native: {native.reason}.",
            f"plugin: {plugin.reason}.",
        ]
    )


def _shown(value: int | None) -> str:
    if value is None:
        return "?"
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:,}"


def _count(text: str) -> int:
    return _whole(text, 1)


def _count_or_zero(text: str) -> int:
    return _whole(text, 0)


def _tile_tokens(text: str) -> int:
    return _whole(text, LEAST_TILE_TOKENS)


def _evidence_tokens(text: str) -> int:
    return _whole(text, *EVIDENCE_TOKENS)


def _whole(text: str, least: int, most: int = MOST) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
    return value


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= MOST / GIB:  # refuses nan as well
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MOST // GIB}")
    return value
