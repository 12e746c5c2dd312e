# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a log says of a server that did not start, a plugin that was not loaded, and a prompt that was refused.

Problem: vLLM says each of them in one line of a traceback, and not what to do about it.
Way: the messages of vLLM, written by its logger or by Python that prints an exception. Each fault is told once, however
often it is logged, with its figures and what changes it. Two of these answers are also given without a log: `too_long`
and `two_platforms`.
Not here: what this plugin says of itself (`verdicts.py`).

Sources, with the same words in vLLM 0.23.0 and 0.26.0: `v1/core/kv_cache_utils.py`, `v1/engine/input_processor.py`,
`renderers/params.py`, `platforms/__init__.py` and `plugins/__init__.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from afd_dsv4.doctor.facts import Finding, Severity
from afd_dsv4.doctor.lines import NUMBER as _N
from afd_dsv4.doctor.lines import POINTED as _D
from afd_dsv4.doctor.lines import RAISED, Line

#: A line without any of these holds no fault.
WORDS: Final = (
    "Failed to load",
    "No available memory",
    "Only one platform",
    "To serve at",
    "maximum context",
    "maximum model",
)

_START = re.compile(
    rf"To serve at least one request with the model's max seq len \({_N}\), \({_D} GiB KV cache is needed, which "
    rf"is larger than the available KV cache memory \({_D} GiB\)\.(?: Based on the available memory, the estimated "
    rf"maximum model length is {_N}\.)?"
)
_NOTHING = "No available memory for the cache blocks."
_LONG = re.compile(
    rf"The decoder prompt \(length {_N}\)(?: plus the number of requested output tokens \(at least 1\))? is longer "
    rf"than the maximum model length of {_N}\."
)
_LONG_RENDERED = re.compile(
    rf"This model's maximum context length is {_N} tokens\. However, you requested {_N} output tokens and your prompt "
    rf"contains (?:at least )?{_N} input tokens"
)
_LONG_TEXT = re.compile(
    rf"This model's maximum context length is {_N} tokens\. However, you requested [0-9]+ output tokens and your "
    rf"prompt contains {_N} characters \(more than [0-9]+ characters, which is the upper bound for {_N} input tokens\)"
)
_PLATFORMS = re.compile(r"Only one platform plugin can be activated, but got: \[(.*)\]")
_NOT_LOADED = re.compile(r"Failed to load plugin (\S{1,200})")


def of_log(lines: Iterable[Line]) -> Iterator[Finding]:
    """Each fault of one start once, in the order of the log."""
    seen = set()
    for line in lines:
        raised = RAISED.match(line.message)
        exception = line.message[raised.end() :] if raised else line.message
        finding = _too_little(exception) or _too_long(exception) or _platforms(exception)
        finding = finding or (None if raised else _not_loaded(line.message))
        if finding and finding.title not in seen:
            seen.add(finding.title)
            yield finding


def _too_little(message: str) -> Finding | None:
    if found := _START.match(message):
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
    if message.startswith(_NOTHING):
        return Finding(
            "cache-too-small",
            Severity.PROBLEM,
            "the server did not start: the weights and the largest forward leave no memory for the KV cache",
            (),
            ("raise --gpu-memory-utilization, lower --max-num-batched-tokens, or use more devices",),
        )
    return None


def _too_long(message: str) -> Finding | None:
    if found := _LONG.match(message):
        return too_long(int(found[1]), int(found[2]), "the server refused it")
    if found := _LONG_TEXT.match(message):
        longest, characters, least = map(int, found.groups())
        return too_long(least + 1, longest, f"the server refused it unread, for its {characters:,} characters")
    if found := _LONG_RENDERED.match(message):
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


def _platforms(message: str) -> Finding | None:
    found = _PLATFORMS.match(message)
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


def _not_loaded(message: str) -> Finding | None:
    found = _NOT_LOADED.match(message)
    return found and Finding(
        "plugin-not-loaded",
        Severity.PROBLEM,
        f"the plugin {found[1]} could not be imported, and vLLM went on without it",
        ("The lines below that message in the log hold the exception.",),
        ("mend what the exception names; versions that do not belong together are the usual cause",),
        ("vllm-project/vllm-ascend#7058", "vllm-project/vllm-ascend#9305"),
        {"plugin": found[1]},
    )
