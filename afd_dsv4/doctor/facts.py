# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What is known of one server, and what the doctor found.

Problem: the numbers that decide whether a prompt starts are spread over options, a metrics page and a log, and each of
them says only some.
Way: one frozen `Server` in which everything may be missing; `first_known` puts several of them together, the first that
knows a number wins, and the answer says where each came from. A `Finding` is one diagnosis with its figures.
Not here: reading (`metrics.py`, `logs.py`, `machine.py`) and judging (`queue.py`, `machine.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

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
    """

    name: str
    running: int
    waiting: int
    deferred: int | None = None
    usage: float | None = None

    @property
    def label(self) -> str:
        """For a sentence; a log may speak of several engines together."""
        return f"engine {self.name}" if self.name.isdigit() else self.name

    @property
    def for_capacity(self) -> int:
        """Requests that wait for blocks, or for a place in the batch."""
        return max(self.waiting - (self.deferred or 0), 0)

    @property
    def stuck(self) -> bool:
        """Whether somebody waits for blocks although nobody has any."""
        return self.for_capacity > 0 and self.running == 0 and self.usage == 0


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


def first_known(servers: Sequence[tuple[str, Server]]) -> Server:
    """Put several descriptions of one server together.

    Args:
        servers: each with the name of its source, the most trusted first.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, server in servers:
        for name, value in (server.known() | ({"engines": server.engines} if server.engines else {})).items():
            if name not in found:
                found[name], sources[name] = value, source
    return Server(**found, sources=sources)
