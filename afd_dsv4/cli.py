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
Not here: the arithmetic (`plan.py`, `admission.py`, `workspace/sizing.py`), the judgement (`workspace/order.py`), the
comparison (`compat/check.py`), and the run (`evidence/run.py`), which is imported only when it is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO, TypeVar

from afd_dsv4 import __version__
from afd_dsv4.admission import ASYNC_BY_DEFAULT, GIB, NULL_BLOCKS
from afd_dsv4.config import DEFAULT_SLOTS, DEFAULT_TILE_TOKENS, LEAST_TILE_TOKENS, Executor
from afd_dsv4.files import write_whole
from afd_dsv4.geometry import (
    DEFAULT_STACK,
    MOST,
    InputError,
    ModelGeometry,
    from_hf_config,
    page_layout,
    preset,
    preset_name,
)
from afd_dsv4.workspace.chrome import chrome
from afd_dsv4.workspace.order import Report, check
from afd_dsv4.workspace.trace import Recorded, TraceError, load

EXIT_VIOLATIONS = 1
EXIT_BAD_INPUT = 2
EXIT_READER_LEFT = 141  # what a shell reports for a command that SIGPIPE ended
MODEL_HELP = "preset, also by a name such as deepseek-ai/DeepSeek-V4-Flash, or a Hugging Face config.json"
LONGEST_WORD = 300  # of an error: what was typed is repeated in it, names of files mostly
EVIDENCE_TOKENS = (1024, 131072)  # below, no request can be cut behind its first window; above, nothing was measured


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option, or an answer that could not be written, in one line like every other error."""

    def error(self, message: str) -> NoReturn:
        raise InputError("command line", message, f"see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses what is left over where it was read, so that the remedy names the help of that command."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

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
    words = (word if len(word) <= LONGEST_WORD else f"{word[:80]}...{word[-20:]}" for word in str(error).split())
    try:
        _print("afd-dsv4: error: " + " ".join(words), sys.stderr)  # one line that can be read, whatever was typed
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
        "the scheduler starts it, and if not why. Options that show [,] take a list with commas, and so do --model and "
        "--block-size: every combination is then a row of one table.",
    )
    plan.add_argument(
        "--model",
        required=True,
        type=_models,
        metavar="flash|pro|CONFIG.json",
        help=MODEL_HELP,
    )
    plan.add_argument(
        "--prompt-tokens", required=True, type=_long_list(_count), metavar="N[,N]", help="tokens of the prompt"
    )
    plan.add_argument(
        "--max-num-batched-tokens",
        required=True,
        type=_long_list(_count),
        metavar="N[,N]",
        help="most tokens of a step",
    )
    plan.add_argument(
        "--block-size", required=True, type=_list(_count), metavar="32|64|128", help="vLLM's --block-size"
    )
    memory = plan.add_mutually_exclusive_group()
    memory.add_argument(
        "--free-blocks",
        type=_long_list(_count_or_zero),
        metavar="N[,N]",
        help="free KV blocks, the same for both sides: num_gpu_blocks of the server's log, less 1",
    )
    memory.add_argument(
        "--hbm-gib",
        type=_list(_gib),
        metavar="X[,X]",
        help="GiB a rank for the KV cache and all that the plugin reserves, not the card's size",
    )
    plan.add_argument(
        "--max-num-seqs", type=_list(_count), default=(16,), metavar="N[,N]", help="vLLM's --max-num-seqs (default 16)"
    )
    plan.add_argument("--max-model-len", type=_count, metavar="N", help="longest sequence (default: the model's)")
    plan.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=ASYNC_BY_DEFAULT,
        help="whether two batches are in flight (default, as of vLLM) or one",
    )
    plan.add_argument("--slots", type=_count, default=DEFAULT_SLOTS, metavar="N", help="workspace slots (default 2)")
    plan.add_argument(
        "--drafts",
        type=_count_or_zero,
        default=0,
        metavar="N",
        help="draft tokens a step (num_speculative_tokens), for which tails are sized (default 0)",
    )
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
    plan.add_argument("--html", metavar="FILE", help="also write a page with plots; replaced if it exists")

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
    doctor.add_argument("--model", metavar="flash|pro|CONFIG.json", help=MODEL_HELP)
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
        "--stack",
        metavar="NAME",
        help=f"whose pages are counted; without vLLM, what --config is for (default: installed, {DEFAULT_STACK})",
    )


def _doctor(options: argparse.Namespace) -> int:
    from afd_dsv4.doctor import Given, diagnose
    from afd_dsv4.doctor.facts import Server

    if [options.metrics, options.log, options.config].count("-") > 1:
        raise InputError("standard input", "asked for twice", "give all but one of them as files")
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
    from afd_dsv4 import plan

    models = _named_apart(options.model)
    for geometry in models:
        geometry.check_stock_operator()
    layouts = [page_layout(options.stack, size) for size in options.block_size]
    lists = (
        models,
        layouts,
        options.max_num_seqs,
        options.hbm_gib or (None,),
        options.free_blocks or (None,),
        options.prompt_tokens,
        options.max_num_batched_tokens,
    )
    questions = [
        plan.Question(
            geometry=geometry,
            layout=layout,
            stack=options.stack,
            prompt_tokens=prompt,
            max_num_batched_tokens=batch,
            max_num_seqs=seqs,
            max_model_len=options.max_model_len or geometry.max_position_embeddings,
            async_scheduling=options.async_scheduling,
            drafts=options.drafts,
            slots=options.slots,
            executor=options.executor,
            tile_tokens=options.tile_tokens if options.executor == Executor.AFD.value else None,
            free_blocks=free,
            hbm_gib=hbm,
        )
        for geometry, layout, seqs, hbm, free, prompt, batch in plan.combinations(*lists)
    ]
    answers = plan.sweep(questions)
    command = ["afd-dsv4", *options.argv]
    if options.html is not None:
        from afd_dsv4.plan_page import page

        _write(options.html, page(plan.document(answers, command)), read=options.model, option="html")
    if len(answers) > 1:
        _answer(json.dumps(plan.document(answers, command), indent=2) if options.json else plan.as_table(answers))
    else:
        _answer(json.dumps(plan.as_json(answers[0]), indent=2) if options.json else plan.as_text(answers[0]))
    return 0


def _answer(text: str) -> None:
    if sys.stdout is None:
        raise InputError("standard output", "is closed", "leave it open, the answer goes there")
    with _writing():
        _print(text, sys.stdout)


def _trace(options: argparse.Namespace) -> int:
    recorded = _recorded(options.file)
    if options.action == "chrome":
        _write(options.out, json.dumps(chrome(recorded.records)), read=[options.file])
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


def _write(name: str, text: str, *, read: Sequence[str] = (), option: str = "out") -> None:
    """Write an answer to a file, and not over one that it was made from; `read` may hold names of no file, too."""
    path = Path(name)
    try:
        if path.is_file() and any(os.path.exists(other) and path.samefile(other) for other in read):  # noqa: PTH110
            raise InputError(option, f"{name!r} is what was read", "choose another file")
        # A name that is no UTF-8 may stand in the text.
        write_whole(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(option, f"cannot write {name!r} ({reason})", "choose another file") from None


def _recorded(name: str) -> Recorded:
    remedy = "give a trace, such as build/evidence/trace.jsonl, which `make demo` writes"
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


#: A name there, and no path of a file that is not there: those end in .json, or have more than one folder.
_HUGGING_FACE: Final = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*(?<!\.json)", re.ASCII)


def _model(wanted: str) -> ModelGeometry:
    if wanted in ("flash", "pro"):
        return preset(wanted)
    path = Path(wanted)
    remedy = "give flash, pro or the path of a config.json"
    if not wanted:  # for Path this is the current directory
        raise InputError("model", "nothing was given", remedy)
    text, name = "", preset_name(wanted) if _HUGGING_FACE.fullmatch(wanted) else None
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):  # others may never answer, a FIFO without a writer for one
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError("model", f"{wanted} is not a text file", remedy) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if name and isinstance(error, FileNotFoundError):
            return preset(name)
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


def _named_apart(asked: Sequence[str]) -> list[ModelGeometry]:
    """The models, each once, and each called by as much of its path as no other has."""
    found: dict[str, ModelGeometry] = {}
    for wanted in asked:
        geometry = _model(wanted)
        file = geometry.name == Path(wanted).name
        found.setdefault(wanted if file else geometry.name, geometry)  # a preset is one, whatever it was called

    def end(path: str, parts: int) -> str:
        return "/".join(path.split("/")[-parts:])

    def name(path: str) -> str:
        others, parts = found.keys() - {path}, 1
        while end(path, parts) in {end(other, parts) for other in others}:
            parts += 1
        return end(path, parts)

    return [dataclasses.replace(geometry, name=name(path)) for path, geometry in found.items()]


_Value = TypeVar("_Value")


def _list(one: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    """Values with commas between them, each once."""

    def read(text: str) -> tuple[_Value, ...]:
        parts = text.split(",")
        for part in parts[1:]:
            if re.match(r"0\d", part):  # the end of 1,024 or, where decimals have a comma, of 21,0618
                raise argparse.ArgumentTypeError(
                    f"{text!r} has {part!r} behind a comma, which is for lists only; write thousands without it, and "
                    "decimals with a point"
                )
        return tuple(dict.fromkeys(one(part) for part in parts))

    return read


def _long_list(one: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    """The same for values that are seldom below 1,000: what may be one number with a comma in it is refused."""
    values = _list(one)

    def read(text: str) -> tuple[_Value, ...]:
        found = re.search(r"(?:^|,)([1-9]\d{0,2}),(\d{3})(?=,|$)", text)
        if found:
            high, low = found.groups()
            raise argparse.ArgumentTypeError(
                f"{text!r} may mean {high}{low}, which is written without a comma, or {high} and {low}, which are "
                f"written with a space, '{high}, {low}'"
            )
        return values(text)

    return read


def _models(text: str) -> tuple[str, ...]:
    """The same for models; a file whose name has a comma is one."""
    return (text,) if os.path.exists(text) else _list(str)(text)  # noqa: PTH110 - a NUL in it is no error


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
