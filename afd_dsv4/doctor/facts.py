# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What is known of one server, and what the doctor found.

Problem: the numbers that decide whether a prompt starts are spread over options, a metrics page and a log, and each of
them says only some.
Way: one frozen `Server` in which everything may be missing; `first_known` puts several of them together, the first that
knows a number wins, and the answer says where each came from; `disagreements` says where two of them cannot be of one
server. A `Finding` is one diagnosis with its figures.
Not here: reading (`metrics.py`, `logs.py`, `options.py`, `machine.py`) and judging (`fits.py`, `queue.py`, `prefix.py`,
`machine.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from afd_dsv4.geometry import preset_name

#: `cache_config.block_size` as vLLM's engine core overwrites it natively, with the smallest block of all KV groups,
#: and what was asked for (vllm-project/vllm-ascend#14479). With the plugin nothing is overwritten.
OVERWRITTEN = {8: 128, 4: 64, 2: 32}


class Severity(enum.Enum):
    """A problem needs somebody; a note is only worth knowing."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One diagnosis.

    Attributes:
        code: stable name, see docs/troubleshooting.md.
        title: one sentence: what is wrong.
        why: sentences, or lines of a table.
        remedies: what changes it, the least first.
        issues: public reports of the same, as `owner/repository#number`.
        numbers: the figures, for programs.
    """

    code: str
    severity: Severity
    title: str
    why: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    issues: tuple[str, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"severity": self.severity.value}


@dataclass(frozen=True)
class Engine:
    """The queue of one engine (one data-parallel rank).

    Attributes:
        name: vLLM's index of it, or what the log calls several.
        running, waiting: requests.
        deferred: those of `waiting` that wait for something else than blocks; None where it is not said.
        usage: share of the KV cache that is in use, 0 to 1; None where it is not said.
        prompt_throughput, generation_throughput: tokens a second, of the interval that a log's line sums up; None where
            it is not said, as on a metrics page, which shows one instant.
        asleep: whether it was sent to sleep and starts nothing; None where it is not said.
    """

    name: str
    running: int
    waiting: int
    deferred: int | None = None
    usage: float | None = None
    prompt_throughput: float | None = None
    generation_throughput: float | None = None
    asleep: bool | None = None

    @property
    def label(self) -> str:
        """For a sentence; a log may speak of several engines together."""
        return f"engine {self.name}" if self.name.isdigit() else self.name

    @property
    def for_capacity(self) -> int:
        """Requests that wait for blocks, or for a place in the batch."""
        return max(self.waiting - (self.deferred or 0), 0)

    @property
    def throughput(self) -> float | None:
        """Tokens a second, both kinds; None where one of them is not said, unless the other is enough to be above 0."""
        both = (self.prompt_throughput, self.generation_throughput)
        known = [one for one in both if one is not None]
        return sum(known) if len(known) == len(both) or any(known) else None

    @property
    def looks_stuck(self) -> bool:
        """Whether somebody waits for blocks although nobody has any, as far as one instant shows.

        An engine whose requests end in the step in which they start looks so, too, between two steps.
        """
        return (
            self.for_capacity > 0 and self.running == 0 and self.usage == 0 and not self.throughput and not self.asleep
        )

    @property
    def stuck(self) -> bool:
        """Whether it also did nothing for the whole interval that a log's line sums up."""
        return self.looks_stuck and self.throughput == 0


@dataclass(frozen=True)
class Server:
    """One server; None is not known.

    Attributes:
        model: its name, for people and to choose a preset.
        block_size: that was asked for.
        max_num_batched_tokens, max_model_len, max_num_seqs: vLLM's.
        async_scheduling: whether two batches may be in flight.
        num_blocks: blocks of one engine's KV cache, with the null block.
        kv_gib: GiB of the KV cache on one worker.
        prefix_caching: whether it is on.
        plugin: whether this plugin is on.
        hits, queries: tokens of the prefix cache.
        mean_prompt: tokens of a finished request's prompt.
        preemptions: since the start.
        kv_connector: name of what moves KV blocks.
        engines: their queues; empty is not known.
        sources: where each was found, by name.
    """

    model: str | None = None
    block_size: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    async_scheduling: bool | None = None
    num_blocks: int | None = None
    kv_gib: float | None = None
    prefix_caching: bool | None = None
    plugin: bool | None = None
    hits: int | None = None
    queries: int | None = None
    mean_prompt: float | None = None
    preemptions: int | None = None
    kv_connector: str | None = None
    engines: tuple[Engine, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    def known(self) -> dict[str, Any]:
        """What is known, by name, engines and sources apart."""
        names = [one.name for one in fields(self) if one.name not in ("engines", "sources")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def having(self, name: str, value: Any, source: str) -> Server:
        """The same with a number from another source."""
        changes: dict[str, Any] = {name: value, "sources": {**self.sources, name: source}}
        return replace(self, **changes)

    def without(self, name: str) -> Server:
        """The same with a number that was refused not known."""
        sources = {known: source for known, source in self.sources.items() if known != name}
        changes: dict[str, Any] = {name: None, "sources": sources}
        return replace(self, **changes)


#: What two descriptions of one server may say differently, for it grows; of a model's name only the preset counts.
_MAY_DIFFER = ("hits", "queries", "mean_prompt", "preemptions")


def first_known(servers: Sequence[tuple[str, Server]]) -> Server:
    """Put several descriptions of one server together.

    An engine that only looks stuck where it is taken from, and is stuck by a later description, is stuck.

    Args:
        servers: each with the name of its source, the most trusted first.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, server in servers:
        for name, value in (server.known() | ({"engines": server.engines} if server.engines else {})).items():
            if name not in found:
                found[name], sources[name] = value, source
            elif name == "engines":
                found[name] = tuple(_agreed(engine, value) for engine in found[name])
    return Server(**found, sources=sources)


def _agreed(engine: Engine, others: Sequence[Engine]) -> Engine:
    """The engine with the throughput of 0 of another description in which it is stuck, by itself or among all."""
    same = any(one.stuck and (one.name == engine.name or not one.name.isdigit()) for one in others)
    return replace(engine, prompt_throughput=0.0, generation_throughput=0.0) if engine.looks_stuck and same else engine


def disagreements(servers: Sequence[tuple[str, Server]]) -> Finding | None:
    """What two descriptions of one server say differently, and which of them was taken.

    Args:
        servers: as for `first_known`.
    """
    said: dict[str, dict[str, Any]] = {}
    for source, server in servers:
        for name, value in (server.known() | {"model": preset_name(server.model)}).items():
            if value is not None and name not in _MAY_DIFFER:
                said.setdefault(name, {})[source] = value
    differ = {name: by_source for name, by_source in said.items() if len(set(by_source.values())) > 1}
    if not differ:
        return None
    taken = {name: next(iter(by_source)) for name, by_source in differ.items()}
    return Finding(
        "disagree",
        Severity.NOTE,
        f"the inputs disagree about {' and '.join(differ)}",
        tuple(
            f"{name}: {', '.join(f'{_shown(value)} ({source})' for source, value in by_source.items())}; "
            f"{_shown(by_source[taken[name]])} was taken."
            for name, by_source in differ.items()
        ),
        ("if that is not on purpose, give inputs of one server and one start",),
        numbers={name: {**by_source, "taken": taken[name]} for name, by_source in differ.items()},
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
