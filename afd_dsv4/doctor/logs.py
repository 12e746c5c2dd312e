# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Reads the log of a vLLM server.

Problem: what a server was told and what it made of it stand in a dozen lines among thousands, of several processes, and
perhaps of several starts.
Way: the messages of vLLM, vllm-ascend and this plugin are looked for by their exact words at the begin of a message
(`lines.py`), so that words in a request that was logged are none. The last start counts, faults of earlier ones are
notes. Within it the last state and every fault count, and of a number that is said again the one that `_NUMBERS` says.
A number has at most 12 digits; a longer one is none. A file without one line in vLLM's format is refused, and one in
which two servers speak of their queues by turns.
Not here: what the numbers mean (`queue.py`), what went wrong (`faults.py`), and what this plugin says (`verdicts.py`).

Sources, with the same words in vLLM 0.23.0 and 0.26.0 (vllm-ascend 0.23.0 and 80d8c194f): of vllm `logger.py`,
`entrypoints/serve/utils/api_utils.py`, `config/{scheduler,vllm,model}.py`, `v1/core/kv_cache_utils.py`,
`v1/engine/core.py` and `v1/metrics/loggers.py`; of vllm_ascend `worker/worker.py` and `utils.py`.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from afd_dsv4.doctor import faults, verdicts
from afd_dsv4.doctor.facts import OVERWRITTEN, Engine, Finding, Server, Severity
from afd_dsv4.doctor.lines import NUMBER as _N
from afd_dsv4.doctor.lines import POINTED as _D
from afd_dsv4.doctor.lines import Line, is_api_server, is_log, lines_with, starts, unwrapped
from afd_dsv4.geometry import MOST, InputError

_STATE = re.compile(
    rf"(?:Engine {_N}|([0-9]{{1,6}} Engines Aggregated)): Avg prompt throughput: {_D} tokens/s, Avg generation "
    rf"throughput: {_D} tokens/s, Running: {_N} reqs, Waiting: {_N} reqs(?:, Deferred: {_N} reqs)?"
    rf"(?:, Preemptions: [0-9]+)?, GPU KV cache usage: {_D}%, Prefix cache hit rate: {_D}%"
)
_CONFIG = re.compile(r"Initializing a V1 LLM engine \(v(\S{1,80})\) with config: model='([^']{1,400})'")
_OPTIONS = re.compile(r"non-default args: (.*)")
_MADE: Final = r"Initializing a V1 LLM engine \(v\S{1,80}\) with config: model=.*"


def _first(old: Any, _: Any) -> Any:
    return old


def _last(_: Any, new: Any) -> Any:
    return new


_Number = tuple[str, re.Pattern[str], Callable[[str], Any], Callable[[Any, Any], Any]]


def _number(name: str, words: str, read: Callable[[str], Any], which: Callable[[Any, Any], Any] = _last) -> _Number:
    """A number: its name in `Server`, how it is read, and which one counts where it is said again."""
    return name, re.compile(words), read, which


_NUMBERS: Final = (
    _number("max_num_batched_tokens", rf"Chunked prefill is enabled with max_num_batched_tokens={_N}\.", int),
    _number("async_scheduling", r"Asynchronous scheduling is (enabled|disabled)\.", "enabled".__eq__),
    # A draft model says its own after the model's (vllm/config/speculative.py:674, in 0.26.0 :831).
    _number("max_model_len", rf"Using max model len {_N}", int, _first),
    _number("max_model_len", rf"{_MADE}\bmax_seq_len={_N},", int),
    # The front end takes the least of all engines (`_apply_ready_response` in vllm/v1/engine/core_client.py).
    _number("max_model_len", rf"Auto-fit max_model_len: reduced from [0-9]+ to {_N}", int, min),
    _number("prefix_caching", rf"{_MADE}\benable_prefix_caching=(True|False),", "True".__eq__),
    # vLLM gives every worker as many blocks as the one with the least memory has room for.
    _number("kv_gib", rf"Available KV cache memory: {_D} GiB", float, min),
    _number("num_blocks", rf"Overriding num_gpu_blocks=[0-9]+ with num_gpu_blocks_override={_N}", int),
)
#: In both the number is of all engines together (vllm/v1/engine/core_client.py:724, in 0.26.0 :726), the first is said
#: once for each.
_BLOCKS = re.compile(rf"(?:Engine {_N}|{_N} Engines): vllm cache_config_info .*num_gpu_blocks is: {_N}")
#: Said where neither 32, 64 nor 128 was asked for (vllm_ascend/utils.py:1390, in 80d8c194f :1254); and by every native
#: engine core of the smallest block of all KV groups, which it has put in the place of what was asked for, before it
#: checks its configuration again (vllm/v1/engine/core.py:283 and 1038, in 0.26.0 :312 and 1173; vllm-ascend#14479).
_BLOCK_SIZE = re.compile(rf"For deepseek_v4 model, block size should be .*Setting block size to {_N}")
_ENGINE_CORE: Final = "EngineCore"

#: A line without any of these holds nothing that is looked for.
_WORDS: Final = (
    *faults.WORDS,
    "afd-dsv4 ",
    "afd-dsv4: slot ",
    "Available KV cache",
    "Asynchronous scheduling",
    "Auto-fit",
    "Avg prompt",
    "Chunked prefill",
    "Initializing a V1",
    "Overriding num",
    "Using max",
    "block size should",
    "cache_config_info",
    "non-default args",
)


@dataclass(frozen=True)
class Log:
    """What a log says.

    Attributes:
        server: the numbers.
        options: what the server was told beside the defaults, as vLLM's `EngineArgs` names it; empty is not known.
        version: of vLLM, None where it is not said.
        plugin: what this plugin said last of its mode, None where it said nothing.
        findings: the faults that it names, and as notes those of earlier starts.
        hit_rate: of the prefix cache, 0 to 1, of the last state; None where no prompt was computed.
    """

    server: Server
    options: Mapping[str, Any] = field(default_factory=dict)
    version: str | None = None
    plugin: str | None = None
    findings: tuple[Finding, ...] = ()
    hit_rate: float | None = None


def parse(text: str, name: str) -> Log:
    """Read a log.

    Args:
        text: of the log, or of its begin and its end.
        name: of the file, for messages.

    Raises:
        InputError: no line in vLLM's format, or two servers that speak by turns.
    """
    text = unwrapped(text)
    if not is_log(text):
        none = f"holds {len(text):,} characters and no line such as 'INFO 11-30 05:28:02 [core.py:113] ...'"
        raise InputError(f"log {name!r}", none, "give what the vLLM server writes, at level INFO")
    *earlier, last = starts(lines_with(_WORDS, text))
    _check_one_server(last, name)
    said = verdicts.of_log(last)
    version, hit_rate, computed = None, None, False
    options: Mapping[str, Any] = {}
    notes: list[Finding] = []
    numbers: dict[str, Any] = {} if said.plugin is None else {"plugin": said.plugin}
    engines: dict[str, Engine] = {}
    of_engines: set[str] = set()
    for line in (line for line in last if not line.bare):
        _read_numbers(line.message, numbers)
        if found := _CONFIG.match(line.message):
            version, numbers["model"] = found.groups()
        elif found := _OPTIONS.match(line.message):
            options, lost = _literal(found[1])
            notes += [lost] if lost else []
        elif found := _BLOCK_SIZE.match(line.message):
            if _ENGINE_CORE not in line.process:
                numbers["block_size"] = int(found[1])
        elif found := _BLOCKS.match(line.message):
            of_engines |= {found[1]} if found[1] else set()
            blocks = int(found[3]) // max(int(found[2] or 0), len(of_engines), 1)
            numbers |= {"num_blocks": blocks} if blocks else {}
        elif found := _STATE.match(line.message):
            state = _state(found)
            engines[state.name] = state
            computed |= bool(state.prompt_throughput)
            hit_rate = _share(found[9]) if computed else None
    told = server_of(options)
    if told.block_size in OVERWRITTEN.values():  # what was asked for stands
        numbers["block_size"] = told.block_size
    server = Server(**{**told.known(), **numbers}, engines=tuple(engines.values()))
    findings = (*faults.of_log(last), *said.findings, *notes, *_earlier(earlier))
    return Log(server, options, version, said.text, findings, hit_rate)


def _check_one_server(lines: Iterable[Line], name: str) -> None:
    """Refuse a log in which a server that was there before goes on after the newest one speaks of its queue.

    Raises:
        InputError: they speak by turns, and nobody knows whose number is whose.
    """
    newest: dict[str, str] = {}
    spoke: set[str] = set()
    for line in lines:
        if line.bare or not is_api_server(line.process):
            continue
        pid = newest.setdefault(line.process, line.pid)
        if _STATE.match(line.message) is None:
            continue
        if line.pid == pid:
            spoke.add(line.process)
        elif line.process in spoke:
            by_turns = f"two servers speak by turns, {line.process} pid={line.pid} and pid={pid}"
            raise InputError(f"log {name!r}", by_turns, "give the log of one server")


def _read_numbers(message: str, numbers: dict[str, Any]) -> None:
    """Enter what a message says; a count of 0 is none of a server's, a memory of 0 is."""
    for name, words, read, which in _NUMBERS:
        if found := words.match(message):
            value = read(found[1])
            if name == "kv_gib" or isinstance(value, bool) or value > 0:
                numbers[name] = which(numbers[name], value) if name in numbers else value


def _state(found: re.Match[str]) -> Engine:
    one, all_of_them, prompt, generation, running, waiting, deferred, usage, _ = found.groups()
    return Engine(
        str(int(one)) if one else all_of_them,
        int(running),
        int(waiting),
        int(deferred or 0),
        _share(usage),
        float(prompt),
        float(generation),
    )


def _share(percent: str) -> float | None:
    share = float(percent) / 100
    return share if share <= 1 else None


def _earlier(starts_before: list[list[Line]]) -> Iterator[Finding]:
    """What went wrong in earlier starts, one note for every kind."""
    found: dict[str, list[Finding]] = {}
    for lines in starts_before:
        for finding in (*faults.of_log(lines), *verdicts.of_log(lines).findings):
            found.setdefault(finding.code, []).append(finding)
    for code, these in found.items():
        more = f" (and {len(these) - 1:,} more {code})" if len(these) > 1 else ""
        yield Finding(
            "earlier-start",
            Severity.NOTE,
            f"an earlier start in this log: {these[0].title}{more}",
            (f"The log holds {len(starts_before) + 1:,} starts; all else here is of the last one.",),
            numbers={"code": code, "times": len(these), "starts": len(starts_before) + 1},
        )


def server_of(options: Mapping[str, Any]) -> Server:
    """The numbers in what a server is told, by the names of vLLM's `EngineArgs`; other types are left out.

    So are numbers that no server has: those below 1 (a `max_model_len` of -1 is vLLM's word for its own choice), and
    those that no machine holds.
    """

    def of(name: str, kind: type) -> Any:
        value = options.get(name)
        if kind is int and isinstance(value, int) and not 1 <= value <= MOST:
            return None
        return value if isinstance(value, kind) and isinstance(value, bool) is (kind is bool) else None

    transfer = options.get("kv_transfer_config")
    connector = transfer.get("kv_connector") if isinstance(transfer, Mapping) else None
    return Server(
        model=of("model", str),
        block_size=of("block_size", int),
        max_num_batched_tokens=of("max_num_batched_tokens", int),
        max_model_len=of("max_model_len", int),
        max_num_seqs=of("max_num_seqs", int),
        async_scheduling=of("async_scheduling", bool),
        num_blocks=of("num_gpu_blocks_override", int),
        prefix_caching=of("enable_prefix_caching", bool),
        kv_connector=connector if isinstance(connector, str) else None,
    )


def _literal(text: str) -> tuple[dict[str, Any], Finding | None]:
    """A dictionary as Python writes it, and what could not be read of it: an entry that is no literal is lost alone."""
    # Enumerations are written as <Name.MEMBER: 0>, which is no Python, and told as MEMBER.
    named = re.sub(r"<[A-Za-z]\w*\.(\w+): [^<>]*>", r"'\1'", text)
    for wording in (text, re.sub(r"<[^<>]*>", "None", named)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as of a number that ends in letters
                tree = ast.parse(wording.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if isinstance(tree, ast.Dict):
            break
    else:
        return {}, _not_read("", text)
    found, lost = {}, []
    for key, value in zip(tree.keys, tree.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else "?"
        try:
            if any(isinstance(one, ast.Constant) and not _can_be_told(one.value) for one in ast.walk(value)):
                lost.append(name)
                continue
            found[name] = _value(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            lost.append(name)
    return found, _not_read(", ".join(lost), text) if lost else None


def _value(node: ast.expr) -> Any:
    """A literal; or a configuration, which Python writes as a call with its fields: a dictionary, as it was told."""
    if isinstance(node, ast.Call) and node.keywords and not node.args:
        return {str(field.arg): _value(field.value) for field in node.keywords}
    return ast.literal_eval(node)


def _can_be_told(value: object) -> bool:
    """Whether a number is one that a message can hold; Python writes out no more than 4,300 digits."""
    return not isinstance(value, int | float) or -(2.0**64) < value < 2.0**64


def _not_read(names: str, text: str) -> Finding:
    return Finding(
        "options-not-read",
        Severity.NOTE,
        f"of the log's line 'non-default args' {names or 'nothing'} can{'not' if names else ''} be read, so that "
        f"{'these options count' if names else 'all options count'} as not known",
        () if names else (f"It goes on: {text[:100]}",),
        ("give the options as JSON with --config",),
        numbers={"options": names},
    )
