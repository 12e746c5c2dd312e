# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Planning what is not to happen: metadata of one stage, as prefill context parallelism (PCP) builds it.

Problem: PCP's manager knows one batch. To build the metadata of one stage, afd-plugin at its pin for vLLM 0.19.1 takes
the manager's state down, lets it believe that the stage is the batch, clones what comes out, and puts the state back
(`_build_stage_local_pcp_metadata`). Tails that are planned in such a build change owners on the host; the restore of
somebody else's state would leave them so, and the true forward would then plan them a second time.
Way: the same three steps for tails: `pretending` takes down who has which pages and where requests may go on, lets the
caller plan, and puts all of it back. It touches no lease and no device, and refuses where somebody leased in between:
what a lease maps is queued, and cannot be taken back. That a request ends is no plan: whoever ends within stays ended.
Not here: PCP itself. No release has both it and DeepSeek-V4 (vllm-ascend 0.19.1 has no DeepSeek-V4, 80d8c194f no PCP in
this runner), so the gate refuses it; this is what an adapter for one that has both will need.
It imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from afd_dsv4.execution.step import Steps
from afd_dsv4.tail.store import TailStore


class LeasedMeanwhile(RuntimeError):
    """A workspace slot was leased while plans were only to be tried. Nothing was put back."""


@contextmanager
def pretending(store: TailStore, steps: Steps, leases: Callable[[], int]) -> Iterator[None]:
    """Plans made within are put back at the end, however it ends: use their shapes, never their pages.

    Args:
        store: of the tails.
        steps: of the engine.
        leases: how many were acquired so far (`workspace.arena.ArenaCounters.leases`).

    Raises:
        LeasedMeanwhile: a lease was acquired within. What it maps stays as it was planned. What ended the block is the
            context; an interrupt is never replaced.
    """
    before = leases()
    put_back = store.remember(), steps.remember()
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if leases() == before:
            for each in put_back:
                each()
        elif error is None or isinstance(error, Exception):
            raise LeasedMeanwhile(
                f"{leases() - before} workspace slots were leased while plans were only to be tried; begin executions "
                f"before or after"
            )
