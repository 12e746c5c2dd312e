# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""One server with its model and pages: how many blocks it has, natively and with the plugin, and who multiplies them.

Problem: what an operator knows is a number of blocks, or GiB, of the side that runs; what is asked is about the other.
Way: both are taken back to the bytes of both sides together: the KV cache, and with the plugin what it reserves beside
it. The arithmetic is that of `admission.py` and `workspace/sizing.py`, which plan, gate and runtime use.
Not here: what follows from it (`fits.py`, `queue.py`, `prefix.py`); draft layers, as in `admission.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from afd_dsv4.admission import (
    ASYNC_BY_DEFAULT,
    GIB,
    NULL_BLOCKS,
    STATE_GROUPS,
    KvPlan,
    SchedulerLimits,
    kv_plan,
    largest,
)
from afd_dsv4.doctor.facts import Server
from afd_dsv4.geometry import MOST, InputError, ModelGeometry, PageLayout
from afd_dsv4.workspace.sizing import WorkspaceSizes, size_workspace

#: What is taken where nobody says, as by `plan`.
SEQS_ASSUMED: Final = 16


@dataclass(frozen=True)
class Case:
    """One server, complete enough to count blocks.

    Attributes:
        server: its numbers.
        geometry: the model.
        layout: pages of its stack and block size.
        prompt: tokens of the prompt that is asked about, None for none.
        hbm: bytes for the KV cache and all that the plugin reserves; None where the server's blocks are known.
        slots: workspace slots of the plugin, that of graphs with them.
        drafts: draft tokens that a forward may have to take back.
        tile_tokens: of its afd executor; None where the stock operator compresses.
        drops: whether vLLM drops the last block of a prefix hit, as it does for drafts that read hidden states.
    """

    server: Server
    geometry: ModelGeometry
    layout: PageLayout
    prompt: int | None = None
    hbm: int | None = None
    slots: int = 2
    drafts: int = 0
    tile_tokens: int | None = None
    drops: bool = False

    @property
    def plugin(self) -> bool:
        """Whether this plugin is on; where nobody says, it is not."""
        return bool(self.server.plugin)

    @property
    def max_model_len(self) -> int:
        """Longest sequence; the model's where the server's is not known."""
        return self.server.max_model_len or self.geometry.max_position_embeddings

    @property
    def max_num_seqs(self) -> int:
        """Requests at once."""
        return self.server.max_num_seqs or SEQS_ASSUMED

    def limits(self, batch: int, in_flight: int | None = None) -> SchedulerLimits:
        """The scheduler's settings with this batch."""
        asynchronous = ASYNC_BY_DEFAULT if self.server.async_scheduling is None else self.server.async_scheduling
        return SchedulerLimits(batch, self.max_model_len, self.max_num_seqs, in_flight or 1 + asynchronous)

    def plan(self, *, plugin: bool) -> KvPlan:
        """The KV groups of one side."""
        return kv_plan(self.geometry, self.layout, plugin=plugin)

    def sizes(self, batch: int) -> WorkspaceSizes:
        """What the plugin reserves."""
        return size_workspace(
            self.geometry,
            self.layout,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=batch,
            drafts=self.drafts,
            slots=self.slots,
            tile_tokens=self.tile_tokens,
        )

    def reserved(self, batch: int, *, plugin: bool) -> int:
        """Bytes that are no KV cache on one side."""
        return self.sizes(batch).device_bytes if plugin else 0

    def kv_bytes(self, batch: int) -> int | None:
        """Bytes of both sides together: the KV cache, and with the plugin what it reserves beside it."""
        if self.hbm is not None:
            return self.hbm
        if self.server.num_blocks is not None:
            found = self.server.num_blocks * self.plan(plugin=self.plugin).block_bytes
        elif self.server.kv_gib is not None:
            found = int(self.server.kv_gib * GIB)
        else:
            return None
        return found + self.reserved(batch, plugin=self.plugin)

    def free(self, batch: int, *, plugin: bool) -> int | None:
        """Blocks that one side can hand out when nothing runs; 0 where there is none, None where it is not known."""
        whole = self.kv_bytes(batch)
        if whole is None:
            return None
        whole -= self.reserved(batch, plugin=plugin)
        return max(whole // self.plan(plugin=plugin).block_bytes - NULL_BLOCKS, 0)

    def largest_prompt(self, batch: int, *, plugin: bool) -> int:
        """The longest prompt that starts, 0 for none; blocks must be known."""
        plan, limits, free = self.plan(plugin=plugin), self.limits(batch), self.free(batch, plugin=plugin) or 0
        return largest(lambda tokens: sum(plan.whole_prompt(tokens, limits).values()) <= free, self.max_model_len - 1)

    def multiplier(self, whole: dict[str, int], plan: KvPlan) -> str:
        """Who multiplies: the states where they are paged, otherwise the sliding windows."""
        state = sum(whole.get(name, 0) for name in STATE_GROUPS)
        share = 100 * state / sum(whole.values())
        block = (
            f"a block spans all {self.geometry.num_layers} layers and takes {plan.block_bytes:,} B, whoever asks for it"
        )
        if state:
            return (
                f"Who multiplies: the compressors' states, {state:,} blocks ({share:.0f} %). A C4 compressor takes one "
                f"for every {self.layout.c4_page_rows} tokens of the batch, C128 one for every "
                f"{self.layout.c128_page_rows}, and {block}. Later steps read at most 7 rows of a C4 and 127 of a C128 "
                "compressor again."
            )
        swa = whole["swa"]
        return (
            f"Who multiplies: the sliding windows, {swa:,} blocks ({100 * swa / sum(whole.values()):.0f} %), each "
            f"group one for every {self.layout.swa_rows} tokens of the batch; {block}."
        )

    def should_not_run(self, batch: int) -> list[str]:
        """What vLLM's own check at start-up, which asks for nearly the same, would have said to a server that runs."""
        server = self.server
        if server.max_model_len is None or server.num_blocks is None:
            return []
        wanted = self.plan(plugin=self.plugin).at_startup(self.limits(batch))
        if wanted <= server.num_blocks:
            return []
        return [
            (
                f"With these numbers vLLM's check at start-up wants {wanted:,} blocks and refuses to start. That the "
                "server runs means that its vllm-ascend counts otherwise there, or that a number here is not its own."
            )
        ]


def case_of(server: Server, geometry: ModelGeometry | None, layout: PageLayout | None, **rest: Any) -> Case | None:
    """A case where both model and pages are known, otherwise None.

    Raises:
        InputError: a model whose pages the stack does not have.
    """
    if geometry is None or layout is None:
        return None
    case = Case(server, geometry, layout, **rest)
    for plugin in (False, True):
        case.plan(plugin=plugin)  # raises here, and not in the middle of an answer
    if case.hbm is not None and case.hbm < 1:
        raise InputError("HBM budget", f"{case.hbm} bytes", "give a positive number")
    return case


def told(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An option that is an object, or the text of one as on a command line; empty where it is neither."""
    value = options.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}


def drafts_and_graphs(options: Mapping[str, Any]) -> tuple[int, bool]:
    """Draft tokens of a step, and whether graphs would take a workspace slot, by the options of a server.

    As the gate counts them, for a server of which it does not say that the plugin is on.
    """
    drafts = told(options, "speculative_config").get("num_speculative_tokens", options.get("spec_tokens"))
    mode = told(options, "compilation_config").get("cudagraph_mode")
    graphs = isinstance(mode, str) and "FULL" in mode.upper() and options.get("enforce_eager") is not True
    return (drafts if type(drafts) is int and 0 < drafts <= MOST else 0), graphs
