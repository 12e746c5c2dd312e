# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Reads the log of a vLLM server.

Problem: what a server was told, what it made of it and why it ended stand in a dozen lines among thousands, of several
processes, perhaps coloured, perhaps behind what a container puts before each line.
Way: the messages of vLLM, vllm-ascend and this plugin are looked for by their exact words, wherever they stand in a
line. Of settings and states the last one counts, of faults all do. A file without one line in vLLM's format is refused.
Not here: what the numbers mean (`queue.py`). Words that no release in `SOURCES` prints are not looked for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from afd_dsv4.doctor.facts import Engine, Finding, Server, Severity
from afd_dsv4.geometry import InputError

#: Where the messages are from, the same words in vLLM 0.23.0 and 0.26.0 (vllm-ascend 0.23.0 and 80d8c194f).
SOURCES: Final = (
    "vllm/logger.py:_FORMAT",
    "vllm/entrypoints/serve/utils/api_utils.py:log_non_default_args",
    "vllm/config/scheduler.py, vllm/config/vllm.py, vllm/config/model.py",
    "vllm/v1/core/kv_cache_utils.py",
    "vllm/v1/metrics/loggers.py:LoggingStatLogger.log",
    "vllm/v1/engine/input_processor.py, vllm/renderers/params.py",
    "vllm/platforms/__init__.py, vllm/plugins/__init__.py",
    "vllm_ascend/worker/worker.py, vllm_ascend/utils.py",
    "afd_dsv4/gate.py:Decision.line, afd_dsv4/plugin.py",
)

_LINE = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+:\d+\] ")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST: Final = 1 << 17  # characters of a line that are looked at

_STATE = re.compile(
    r"(?:Engine (\d+)|(\d+ Engines Aggregated)): Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: "
    r"[\d.]+ tokens/s, Running: (\d+) reqs, Waiting: (\d+) reqs(?:, Deferred: (\d+) reqs)?(?:, Preemptions: \d+)?, GPU "
    r"KV cache usage: ([\d.]+)%, Prefix cache hit rate: ([\d.]+)%"
)
_CONFIG = re.compile(r"Initializing a V1 LLM engine \(v(\S+)\) with config: model='([^']*)'")
_OPTIONS = re.compile(r"non-default args: (\{.*\})\s*$")
_OURS = re.compile(r"afd-dsv4 \S+, (mode '\w+': (on|off|refused, stays off) \(.*\).*|stays off: .*)$")

#: Pattern, and the numbers in it by the name of `Server`.
_NUMBERS: Final[tuple[tuple[re.Pattern[str], str, Callable[[str], Any]], ...]] = (
    (re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)\."), "max_num_batched_tokens", int),
    (re.compile(r"Asynchronous scheduling is (enabled|disabled)\."), "async_scheduling", "enabled".__eq__),
    (re.compile(r"Using max model len (\d+)"), "max_model_len", int),
    (re.compile(r"with config: model=.*\bmax_seq_len=(\d+),"), "max_model_len", int),
    (re.compile(r"Auto-fit max_model_len: reduced from \d+ to (\d+)"), "max_model_len", int),
    (re.compile(r"with config: model=.*\benable_prefix_caching=(True|False),"), "prefix_caching", "True".__eq__),
    (re.compile(r"For deepseek_v4 model, block size should be .*Setting block size to (\d+)"), "block_size", int),
    (re.compile(r"Available KV cache memory: ([\d.]+) GiB"), "kv_gib", float),
    (re.compile(r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(\d+)"), "num_blocks", int),
    (re.compile(r"Engine \d+: vllm cache_config_info .*num_gpu_blocks is: (\d+)"), "num_blocks", int),
)
_OF_ALL = re.compile(r"(\d+) Engines: vllm cache_config_info .*num_gpu_blocks is: (\d+)")

_START = re.compile(
    r"To serve at least one request with the model's max seq len \((\d+)\), \(([\d.]+) GiB KV cache is needed, which "
    r"is larger than the available KV cache memory \(([\d.]+) GiB\)\.(?: Based on the available memory, the estimated "
    r"maximum model length is (\d+)\.)?"
)
_NOTHING = "No available memory for the cache blocks."
_LONG = re.compile(
    r"The decoder prompt \(length (\d+)\)(?: plus the number of requested output tokens \(at least 1\))? is longer "
    r"than the maximum model length of (\d+)\."
)
_LONG_RENDERED = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, you requested (\d+) output tokens and your prompt "
    r"contains (?:at least )?(\d+) input tokens"
)
_LONG_TEXT = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, you requested \d+ output tokens and your prompt "
    r"contains (\d+) characters \(more than \d+ characters, which is the upper bound for (\d+) input tokens\)"
)
_PLATFORMS = re.compile(r"Only one platform plugin can be activated, but got: \[(.*)\]")
_NOT_LOADED = re.compile(r"Failed to load plugin (\S+)")


#: A line without any of these holds nothing that is looked for.
_WORDS: Final = (
    "afd-dsv4 ",
    "Available KV cache",
    "Asynchronous scheduling",
    "Auto-fit",
    "Avg prompt",
    "Chunked prefill",
    "Failed to load",
    "Initializing a V1",
    "No available memory",
    "Only one platform",
    "Overriding num",
    "To serve at",
    "Using max",
    "block size should",
    "cache_config_info",
    "maximum context",
    "maximum model",
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
        findings: the faults that it names.
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
        InputError: no line in vLLM's format.
    """
    text = _COLOUR.sub("", text)
    if not _LINE.search(text):
        none = f"holds {len(text):,} characters and no line such as 'INFO 11-30 05:28:02 [core.py:113] ...'"
        raise InputError(f"log {name!r}", none, "give what the vLLM server writes, at level INFO")
    numbers: dict[str, Any] = {}
    engines: dict[str, Engine] = {}
    log = Log(Server())
    computed = False
    lines = list(_lines(text))
    for line in lines:
        for pattern, key, read in _NUMBERS:
            if said := pattern.search(line):
                numbers[key] = read(said[1])
        if found := _OF_ALL.search(line):
            numbers["num_blocks"] = int(found[2]) // max(int(found[1]), 1)
        elif found := _CONFIG.search(line):
            log = replace(log, version=found[1])
            numbers["model"] = found[2]
        elif found := _OPTIONS.search(line):
            log = replace(log, options=_literal(found[1]))
        elif found := _OURS.search(line):
            log = replace(log, plugin=found[1])
            numbers["plugin"] = found[2] == "on"
        elif found := _STATE.search(line):
            run, waiting, deferred = int(found[4]), int(found[5]), int(found[6] or 0)
            who = str(int(found[1])) if found[1] else found[2]
            state = Engine(who, run, waiting, deferred, float(found[7]) / 100)
            engines[state.name] = state
            computed |= float(found[3]) > 0
            log = replace(log, hit_rate=float(found[8]) / 100 if computed else None)
    told = server_of(log.options)
    read_server = Server(**{**told.known(), **numbers}, engines=tuple(engines.values()))
    return replace(log, server=read_server, findings=tuple(_faults(lines)))


def _lines(text: str) -> Iterator[str]:
    """The lines that hold one of the words, in their order; a log may have millions of others."""
    begins = set()
    for word in _WORDS:
        at = text.find(word)
        while at >= 0:
            begins.add(text.rfind("\n", 0, at) + 1)
            end = text.find("\n", at)
            at = text.find(word, end) if end >= 0 else -1
    for begin in sorted(begins):
        end = text.find("\n", begin)
        yield text[begin : min(end if end >= 0 else len(text), begin + _LONGEST)].rstrip("\r")


def server_of(options: Mapping[str, Any]) -> Server:
    """The numbers in what a server is told, by the names of vLLM's `EngineArgs`; other types are left out.

    So are numbers below 1: none is one of a server's, and a `max_model_len` of -1 is vLLM's word for its own choice.
    """

    def of(name: str, kind: type) -> Any:
        value = options.get(name)
        if kind is int and isinstance(value, int) and value < 1:
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


def _literal(text: str) -> Mapping[str, Any]:
    """A dictionary as Python writes it; an entry that is no literal is lost alone, text that is none gives nothing."""
    # Enumerations are written as <Name.MEMBER: 0>, which is no Python.
    for wording in (text, re.sub(r"<[^<>]*>", "None", text)):
        try:
            tree = ast.parse(wording, mode="eval").body
            break
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    else:
        return {}
    found = {}
    for key, value in zip(tree.keys, tree.values, strict=True) if isinstance(tree, ast.Dict) else ():
        try:
            found[str(ast.literal_eval(key or ast.Constant(None)))] = ast.literal_eval(value)
        except (ValueError, TypeError, RecursionError):
            continue
    return found


def _faults(lines: Iterable[str]) -> Iterator[Finding]:
    """Each fault once, in the order of the log."""
    seen = set()
    for line in lines:
        for read in (_too_little, _too_long, _platforms, _not_loaded):
            finding = read(line)
            if finding and finding.title not in seen:
                seen.add(finding.title)
                yield finding


def _too_little(line: str) -> Finding | None:
    if found := _START.search(line):
        length, need, free, fits = found.groups()
        return Finding(
            "cache-too-small",
            Severity.PROBLEM,
            f"the server did not start: a sequence of {int(length):,} tokens wants {need} GiB of KV cache, there are "
            f"{free}",
            (f"a sequence of {int(fits):,} tokens would fit, says vLLM",) if fits else (),
            ("lower --max-num-batched-tokens or --max-model-len, or raise --gpu-memory-utilization",),
            ("vllm-project/vllm-ascend#14678",),
            {"max_model_len": int(length), "need_gib": float(need), "available_gib": float(free)}
            | ({"fitting_max_model_len": int(fits)} if fits else {}),
        )
    if _NOTHING in line:
        return Finding(
            "cache-too-small",
            Severity.PROBLEM,
            "the server did not start: the weights and the largest forward leave no memory for the KV cache",
            (),
            ("raise --gpu-memory-utilization, lower --max-num-batched-tokens, or use more devices",),
        )
    return None


def _too_long(line: str) -> Finding | None:
    if found := _LONG.search(line):
        return too_long(int(found[1]), int(found[2]), "the server refused it")
    if found := _LONG_TEXT.search(line):
        longest, characters, least = map(int, found.groups())
        return too_long(least + 1, longest, f"the server refused it unread, for its {characters:,} characters")
    if found := _LONG_RENDERED.search(line):
        longest, wanted, given = map(int, found.groups())
        return too_long(given, longest, f"the server refused it with {wanted:,} tokens of output asked for")
    return None


def too_long(tokens: int, longest: int, what: str, model_longest: int | None = None) -> Finding:
    """The diagnosis of a prompt that is longer than the server takes.

    Args:
        tokens: of the prompt.
        longest: sequence of the server.
        what: happens to it.
        model_longest: what the model itself takes, None where it is not known.
    """
    remedies = [f"shorten the prompt to at most {longest - 1:,} tokens: at least one is generated"]
    if model_longest is not None and tokens >= model_longest:
        remedies.append(f"no setting helps: the model itself ends at {model_longest:,} tokens")
    else:
        remedies.append(f"or start the server with --max-model-len above {max(tokens, longest):,}")
    return Finding(
        "prompt-longer-than-model",
        Severity.PROBLEM,
        f"a prompt of {tokens:,} tokens does not fit in a sequence of {longest:,}: {what}",
        ("It is answered with an error at once and never waits; no KV block is involved.",),
        tuple(remedies),
        numbers={"prompt_tokens": tokens, "max_model_len": longest},
    )


def _platforms(line: str) -> Finding | None:
    found = _PLATFORMS.search(line)
    if not found:
        return None
    names = re.findall(r"'([^']*)'", found[1])
    return two_platforms(names, "the server did not start")


def two_platforms(names: Iterable[str], what: str) -> Finding:
    """The diagnosis of platform plugins that may not be active together.

    Args:
        names: of their entry points.
        what: happens.
    """
    names = sorted(names)
    return Finding(
        "two-platform-plugins",
        Severity.PROBLEM,
        f"{len(names)} platform plugins, {' and '.join(names)}: {what}",
        (
            (
                "vLLM takes one platform; where two plugins claim one, it raises 'Only one platform plugin can be "
                "activated'."
            ),
        ),
        (
            (
                "uninstall all but one, or list in VLLM_PLUGINS the names of every plugin that is to be loaded, with "
                "one of these among them"
            ),
        ),
        ("vllm-project/vllm#11739", "flagos-ai/vllm-plugin-FL#159"),
        {"platform_plugins": names},
    )


def _not_loaded(line: str) -> Finding | None:
    found = _NOT_LOADED.search(line)
    return found and Finding(
        "plugin-not-loaded",
        Severity.PROBLEM,
        f"the plugin {found[1]} could not be imported, and vLLM went on without it",
        ("The lines below that message in the log hold the exception.",),
        ("mend what the exception names; versions that do not belong together are the usual cause",),
        ("vllm-project/vllm-ascend#7058", "vllm-project/vllm-ascend#9305"),
        {"plugin": found[1]},
    )
