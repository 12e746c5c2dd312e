# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Draft lanes: draft layers that own a compressor, whose launches need executions of their own.

Problem: drafting runs the draft layers once per draft token, after the target's forward and outside of it. A draft
layer with a compressor would need tails, a workspace slot and an identity beside the target's; one without must cost
nothing at all.
Way: each draft layer that owns a compressor is a lane, numbered by its substep. A lane has a runtime of its own, made
for its layer alone: other layers, other pages, one slot. Its executions have the target's generation. Where a substep
has no lane, nothing is begun and nothing is leased. No released model has a lane: draft layers of DeepSeek-V4 have
ratio 0, and `geometry.from_hf_config` refuses a config that says otherwise, because no such layer could be tried.
Not here: accept lengths (`tail/`). It imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from afd_dsv4.execution.forward import E, E_co
from afd_dsv4.tail.tables import RequestChunk
from afd_dsv4.workspace.identity import Generation


@dataclass(frozen=True)
class Lane:
    """One draft layer that owns a compressor.

    Attributes:
        substep: which draft step runs it, from 1.
        layer: the model's layer.
        ratio: of its compressor.
    """

    substep: int
    layer: int
    ratio: int


class LaneRuntime(Protocol[E_co]):
    """The runtime of one lane; `compressor.stock.StockRuntime` is one."""

    def begin(
        self, chunks: Sequence[RequestChunk], *, generation: Generation | None = None, ubatch: int = 0, substep: int = 0
    ) -> E_co:
        """Plan an execution and lease its workspace slot."""


def lanes(num_layers: int, draft_ratios: Sequence[int]) -> tuple[Lane, ...]:
    """The lanes of a model.

    Args:
        num_layers: main layers; the draft layers are numbered behind them.
        draft_ratios: compress ratio of each draft layer, 0 where it owns no compressor.
    """
    return tuple(
        Lane(substep, num_layers + substep - 1, ratio) for substep, ratio in enumerate(draft_ratios, 1) if ratio
    )


@contextmanager
def drafting(
    runtimes: Mapping[Lane, LaneRuntime[E]],
    substep: int,
    chunks: Sequence[RequestChunk],
    generation: Generation,
) -> Iterator[E | None]:
    """The execution of one draft step; None, and nothing is leased or queued, where its layer owns no compressor.

    Args:
        runtimes: by lane.
        substep: which draft step, from 1.
        chunks: its requests.
        generation: of the target's forward.
    """
    if substep < 1:
        raise ValueError(f"substep {substep} is none of a draft; they count from 1, the target is 0")
    for lane, runtime in runtimes.items():
        if lane.substep == substep:
            execution = runtime.begin(chunks, generation=generation, substep=substep)
            try:
                yield execution
            finally:
                execution.finish()
            return
    yield None
