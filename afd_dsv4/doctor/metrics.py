# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Reads one scrape of vLLM's `/metrics` page.

Problem: the page shows a queue that stands still at 0 % usage, and a file that is called metrics.txt may be an HTML
error page, half a scrape, or another program's.
Way: the text format of Prometheus, line by line and to the letter; a line that is none is counted and left out, any
metric that is not looked for is passed over. A file without one `vllm:` sample is refused by name.
Not here: what the numbers mean (`queue.py`).

Sources: `vllm/v1/metrics/loggers.py:PrometheusStatLogger` of 0.23.0 and 0.26.0, whose names are the same; counters get
`_total` from prometheus_client. `vllm/v1/engine/core_client.py` adds the blocks of all engines up in one number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from afd_dsv4.doctor.facts import OVERWRITTEN, Engine, Server
from afd_dsv4.geometry import MOST, InputError

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|[iI]nf|[nN]a[nN])"
#: A sample, perhaps with a time, perhaps with an exemplar (OpenMetrics).
_SAMPLE = re.compile(
    rf"({_NAME}) ?(?:\{{ ?((?:{_LABEL})(?: ?, ?{_LABEL})*)? ?,? ?\}})?"
    rf"[ \t]+({_NUMBER})(?:[ \t]+-?\d+(?:\.\d+)?)?(?:[ \t]+#[ \t].*)?"
)
_EACH_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_LONGEST = 1 << 16  # characters of a line; a longer one is none of a metrics page

CAPACITY, DEFERRED = "capacity", "deferred"


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
        InputError: no sample of vLLM's, or more lines that are no samples than lines that are.
    """
    samples, malformed = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _SAMPLE.fullmatch(line.strip()) if len(line) < _LONGEST else None
        if found is None:
            malformed.append((number, line.strip()[:60]))
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
    return Page(tuple(samples), tuple(malformed))


def server(page: Page) -> Server:
    """What a page says of its server; numbers that cannot be are left out."""
    info = next((sample.labels for sample in page.samples if sample.name == "vllm:cache_config_info"), {})
    engines = tuple(_engines(page))
    block_size = _digits(info.get("block_size"))
    blocks = _digits(info.get("num_gpu_blocks"))
    finished = _sum(page, "vllm:request_prompt_tokens_count")
    prompts = _sum(page, "vllm:request_prompt_tokens_sum")
    names = [sample.labels["model_name"] for sample in page.samples if sample.labels.get("model_name")]
    return Server(
        model=names[0] if names else None,
        block_size=OVERWRITTEN.get(block_size, block_size) if block_size else None,
        # The page's number is of all engines together.
        num_blocks=blocks // max(len(engines), 1) if blocks else None,
        prefix_caching={"True": True, "False": False}.get(info.get("enable_prefix_caching", "")),
        plugin=None if block_size not in (*OVERWRITTEN, *OVERWRITTEN.values()) else block_size not in OVERWRITTEN,
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

    running, waiting = of("vllm:num_requests_running"), of("vllm:num_requests_waiting")
    by_reason = {reason: of("vllm:num_requests_waiting_by_reason", reason=reason) for reason in (CAPACITY, DEFERRED)}
    usage = of("vllm:kv_cache_usage_perc")
    for name in running:
        capacity, deferred = (_whole(by_reason[reason].get(name)) for reason in (CAPACITY, DEFERRED))
        both = None if capacity is None else capacity + (deferred or 0)
        whole = both if both is not None else _whole(waiting.get(name))
        run = _whole(running[name])
        if run is None or whole is None:
            continue
        share = usage.get(name)
        yield Engine(name, run, whole, deferred, share if share is not None and 0 <= share <= 1 else None)


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for key, value in _EACH_LABEL.findall(text):
        yield key, re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), value)


def _sum(page: Page, name: str) -> int | None:
    values = [whole for sample in page.samples if sample.name == name if (whole := _whole(sample.value)) is not None]
    return sum(values) if values else None


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and 0 <= value <= MOST**2 else None


def _digits(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[1-9]\d{0,11}", text) else None
