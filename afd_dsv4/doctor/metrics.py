# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Reads one scrape of vLLM's `/metrics` page.

Problem: the page shows a queue that stands still at 0 % usage, and a file that is called metrics.txt may be an HTML
error page, half a scrape, or another program's.
Way: the text format of Prometheus, line by line and to the letter; a line that is none is counted and left out, any
metric that is not looked for is passed over. A file without one `vllm:` sample is refused by name, and one in which a
queue stands twice for an engine: pages of several servers were joined, and nobody knows whose number is whose.
Not here: what the numbers mean (`queue.py`).

Sources: `vllm/v1/metrics/loggers.py:PrometheusStatLogger` of 0.23.0 and 0.26.0, whose names are the same; counters get
`_total` from prometheus_client. `vllm/v1/engine/core_client.py` adds the blocks of all engines up in one number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from afd_dsv4.doctor import verdicts
from afd_dsv4.doctor.facts import OVERWRITTEN, Engine, Server
from afd_dsv4.geometry import MOST, InputError

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[iI]nf|[nN]a[nN])"
#: A sample, perhaps with a time, perhaps with an exemplar (OpenMetrics).
_SAMPLE = re.compile(
    rf"({_NAME}) ?(?:\{{ ?((?:{_LABEL})(?: ?, ?{_LABEL})*)? ?,? ?\}})?"
    rf"[ \t]+({_NUMBER})(?:[ \t]+-?[0-9]+(?:\.[0-9]+)?)?(?:[ \t]+#[ \t].*)?"
)
_EACH_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_LONGEST = 1 << 16  # characters of a line; a longer one is none of a metrics page

CAPACITY, DEFERRED = "capacity", "deferred"
_RUNNING, _WAITING, _BY_REASON = (f"vllm:num_requests_{rest}" for rest in ("running", "waiting", "waiting_by_reason"))
_USAGE = "vllm:kv_cache_usage_perc"
_DEEPSEEK_V4 = re.compile(r"deepseek-?v4(?!\.?[0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class Sample:
    """One number of the page."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Page:
    """A page as read.

    Attributes:
        samples: in the order of the page.
        malformed: numbers and beginnings of lines that are no Prometheus text.
    """

    samples: tuple[Sample, ...]
    malformed: tuple[tuple[int, str], ...]


def parse(text: str, name: str) -> Page:
    """Read a page.

    Args:
        text: of the page.
        name: of the file, for messages.

    Raises:
        InputError: no sample of vLLM's, more lines that are no samples than lines that are, or a queue that stands
            twice for an engine.
    """
    samples, malformed = [], []
    for number, raw in enumerate(text.split("\n"), 1):  # other ends of lines may stand in a label
        line = raw.strip(" \t\r")
        if not line or line.startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line) if len(line) < _LONGEST else None
        if found is None:
            malformed.append((number, line[:60]))
        else:
            samples.append(Sample(found[1], dict(_labels(found[2] or "")), float(found[3])))
    what = f"metrics {name!r}"
    remedy = "give what `curl http://HOST:PORT/metrics` of the vLLM server prints"
    if not text.strip():
        raise InputError(what, "is empty", remedy)
    if not samples or len(malformed) > len(samples):
        where, first = malformed[0] if malformed else (1, text.strip()[:60])
        raise InputError(what, f"is no Prometheus text (line {where}: {first!r})", remedy)
    if not any(sample.name.startswith("vllm:") for sample in samples):
        held = sorted({sample.name for sample in samples})
        raise InputError(what, f"holds no metric of vLLM, but {len(held)} others such as {held[0]}", remedy)
    if twice := _twice(samples):
        remedy = "give the page of one server, as `curl http://HOST:PORT/metrics` prints it"
        raise InputError(what, twice, remedy)
    return Page(tuple(samples), tuple(malformed))


def _twice(samples: Iterable[Sample]) -> str | None:
    """Says which queue stands twice for one engine, and what tells the two apart; None where none does."""
    seen: dict[tuple[str, str, str], dict[str, str]] = {}
    for sample in samples:
        if sample.name not in (_RUNNING, _WAITING, _BY_REASON, _USAGE):
            continue
        key = (sample.name, sample.labels.get("engine", "0"), sample.labels.get("reason", ""))
        if key not in seen:
            seen[key] = sample.labels
            continue
        differ = [name for name, value in sample.labels.items() if seen[key].get(name) != value]
        apart = f", with {differ[0]} {seen[key].get(differ[0])!r} and {sample.labels[differ[0]]!r}" if differ else ""
        return f"{sample.name} stands twice for engine {key[1]!r}{apart}, so it is of several servers or scrapes"
    return None


def is_deepseek_v4(model: str | None) -> bool:
    """Whether the name of a model says so."""
    return _DEEPSEEK_V4.search(model or "") is not None


def said(page: Page) -> verdicts.Said:
    """What this plugin says on the page."""
    return verdicts.of_page((sample.name, sample.labels, sample.value) for sample in page.samples)


def server(page: Page, *, deepseek_v4: bool = False) -> Server:
    """What a page says of its server; numbers that cannot be are left out.

    Args:
        page: as read.
        deepseek_v4: whether the model is known to be one, whatever its name on the page: only for those a block size
            tells whether this plugin is on, and what was asked for.
    """
    infos = [sample.labels for sample in page.samples if sample.name == "vllm:cache_config_info"]

    def of_all(name: str) -> str | None:
        """What all engines say alike."""
        values = {info.get(name) for info in infos}
        return values.pop() if len(values) == 1 else None

    engines = tuple(_engines(page))
    block_size = _digits(of_all("block_size"))
    blocks = _digits(of_all("num_gpu_blocks"))
    named = {info["engine"] for info in infos if "engine" in info}
    named = named or {sample.labels["engine"] for sample in page.samples if "engine" in sample.labels}
    finished = _sum(page, "vllm:request_prompt_tokens_count")
    prompts = _sum(page, "vllm:request_prompt_tokens_sum")
    names = [sample.labels["model_name"] for sample in page.samples if sample.labels.get("model_name")]
    model = names[0] if names else None
    ours, plugin = said(page), None
    if deepseek_v4 or is_deepseek_v4(model):
        plugin = None if block_size not in (*OVERWRITTEN, *OVERWRITTEN.values()) else block_size not in OVERWRITTEN
        block_size = OVERWRITTEN.get(block_size or 0, block_size)
    return Server(
        model=model,
        block_size=block_size,
        # The page's number is of all engines together.
        num_blocks=blocks // max(len(named), 1) or None if blocks else None,
        prefix_caching={"True": True, "False": False}.get(of_all("enable_prefix_caching") or ""),
        plugin=ours.plugin if ours.spoke else plugin,
        hits=_sum(page, "vllm:prefix_cache_hits_total"),
        queries=_sum(page, "vllm:prefix_cache_queries_total"),
        mean_prompt=prompts / finished if prompts is not None and finished else None,
        preemptions=_sum(page, "vllm:num_preemptions_total"),
        engines=engines,
    )


def _engines(page: Page) -> Iterator[Engine]:
    def of(name: str, **labels: str) -> dict[str, float]:
        return {
            sample.labels.get("engine", "0"): sample.value
            for sample in page.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }

    running, waiting = of(_RUNNING), of(_WAITING)
    by_reason = {reason: of(_BY_REASON, reason=reason) for reason in (CAPACITY, DEFERRED)}
    usage, awake = of(_USAGE), of("vllm:engine_sleep_state", sleep_state="awake")
    for name in running:
        capacity, deferred = (_whole(by_reason[reason].get(name)) for reason in (CAPACITY, DEFERRED))
        both = None if capacity is None else capacity + (deferred or 0)
        whole = both if both is not None else _whole(waiting.get(name))
        run = _whole(running[name])
        if run is None or whole is None:
            continue
        share = usage.get(name)
        asleep = {0.0: True, 1.0: False}.get(awake.get(name, -1))
        share = share if share is not None and 0 <= share <= 1 else None
        yield Engine(name, run, whole, deferred, share, asleep=asleep)


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for key, value in _EACH_LABEL.findall(text):
        yield key, re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), value)


def _sum(page: Page, name: str) -> int | None:
    values = [whole for sample in page.samples if sample.name == name if (whole := _whole(sample.value)) is not None]
    return sum(values) if values else None


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and 0 <= value <= MOST**2 else None


def _digits(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[1-9][0-9]{0,11}", text) else None
