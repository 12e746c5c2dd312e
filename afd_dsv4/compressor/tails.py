# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Checkpoints on the device: a request's tail out of the pools of a runtime, and into those of another.

Problem: a tail is spread over pages of all layers, which the device may still be writing, and which change owner with
the next execution of their request.
Way: reading or writing a tail is an execution of its own. It takes a workspace slot for its lease, follows whoever had
the request's pages last, and whoever has them next follows it: so a checkpoint lies behind the last fence, and its
pages are neither rewritten nor given away while they are read. All layers of all kinds go in one copy.
What `save` reads stays the work of the forward that wrote it. `restore` counts as a forward of its own worker: a
generation is counted by one worker, and that of the checkpoint may be another forward's here.
Neither is for the hot path. `save` waits on the host until its copy is over, since its bytes are to be had; `restore`
only queues.
Not here: the bytes (`tail/checkpoint.py`), compressed KV, and who may begin at such a position (`Steps.restore`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from afd_dsv4.compressor.stock import StockRuntime
from afd_dsv4.geometry import CompressorKind
from afd_dsv4.tail import checkpoint
from afd_dsv4.tail.store import StepPlan
from afd_dsv4.tail.tables import Int64Array, RequestId
from afd_dsv4.workspace.identity import ExecutionId
from afd_dsv4.workspace.lease import WHOLE, Lease, LeaseState, OrderError

POLL_S: Final = 0.0001
#: Host memory that a copy which never came to its end may still write to.
_NEVER_FREED: Final[list[torch.Tensor]] = []


class CheckpointLost(RuntimeError):
    """The rows of a checkpoint did not come from the device in time. The request's tail is void."""


def save(runtime: StockRuntime, request: RequestId, position: int | None = None) -> bytes:
    """Write down the tail of a request, which stays as it is. Waits until the device has delivered it.

    Args:
        runtime: has the request, and no open execution of it.
        request: which.
        position: where it goes on; None for wherever its last chunk left it: with drafts, the accept length stays open.

    Raises:
        UnknownRequest: it has no tail here.
        TailVoid: its tail must not be read.
        ValueError: it cannot go on at `position`.
        OrderError: its last execution is open, broke off, or is in doubt.
        Exhausted, CaptureError, ArenaClosed: see `WorkspaceArena.acquire`.
        CheckpointLost: not over within the runtime's fence timeout.
    """
    with runtime.arena.lock:
        plan, low, high, generation = runtime.store.hold(request)
        if position is not None and not low <= position <= high:
            raise ValueError(f"request {request!r} is to be saved at {position}, and goes on in [{low}, {high}]")
        low, high = (low, high) if position is None else (position, position)
        places = {kind: _places(runtime, request, kind, low, high) for kind in runtime.pools}
        with _lease(runtime, plan) as lease:
            rows = _gather(runtime, places)
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
    _wait(runtime, lease, host)
    found, at = {}, 0
    for kind, place in places.items():
        values = runtime.pools[kind].shape[2]
        end = at + place.size * values
        found[kind] = host[at:end].numpy().reshape(*place.shape, values)
        at = end
    return checkpoint.encode(runtime.geometry, low, found, drafts=high - low, generation=generation)


def restore(
    runtime: StockRuntime,
    request: RequestId,
    data: bytes,
    position: int,
    *,
    drafts: int = 0,
    generation: int | None = None,
) -> None:
    """Seat a new request at a position, with the tail of a checkpoint. Queues on the current stream, and does not wait.

    Its next chunk starts at `position`. All rows of its pages that the checkpoint does not have are NaN. The tail is of
    this restore's generation from here on, whatever the checkpoint says.

    Args:
        runtime: another than, or the same as, the one that saved it; pages may have another size.
        request: has no tail here.
        data: as of `save`.
        position: what it must have been saved for.
        drafts: by how much the request may go on later, where it was saved so.
        generation: which forward must have written it; None for any.

    Raises:
        CheckpointError: see `checkpoint.decode`. Nothing was changed.
        ValueError: the request has a tail, or the tails here are sized for fewer drafts.
        TailFull: no tail is free.
        Exhausted, CaptureError, ArenaClosed: see `WorkspaceArena.acquire`.
    """
    read = checkpoint.decode(data, runtime.geometry, position=position, drafts=drafts, generation=generation)
    with runtime.arena.lock:
        plan = runtime.store.seat_at(
            request, position, position + drafts, usable=runtime._usable, in_doubt=runtime._in_doubt
        )
        try:
            with _lease(runtime, plan):
                _scatter(runtime, request, read)
        except BaseException as error:
            plan.void(f"the restore of a checkpoint failed: {error}")
            runtime.store.end(request)
            raise


@contextmanager
def _lease(runtime: StockRuntime, plan: StepPlan) -> Iterator[Lease[Any]]:
    """What is queued within touches the pages of one seat, behind all who had them and before all who will."""
    (seat,) = plan.seats
    last = runtime._last.get(seat)
    read = last if last is not None and plan.continued and not last.over() else None
    # Before a slot is taken: one that is refused later is free only behind what it is refused for, if ever.
    if read and (read.state is LeaseState.ACQUIRED or read.broken or runtime.arena.in_doubt(read)):
        raise OrderError(f"{read.execution} has the tail, and is open, broke off or is in doubt; finish it first")
    lease = runtime.arena.acquire(ExecutionId(runtime.mint()))
    touched = whole = False
    try:
        lease.follow(
            continues=[last] if last is not None and plan.continued else [],
            after=[last] if last is not None and plan.taken else [],
            seats=plan.seats,
            void=plan.void,
        )
        lease.touch(runtime.device.current_stream(), step=WHOLE)
        touched = True
        if plan.taken:
            plan.written_by(lease.execution.generation)
        yield lease
        whole = True
    finally:
        # Who comes next follows this, however far it came: until a whole one has touched them, nobody else covers
        # what was queued here. What only reads leaves the tail as it was, so that others may go on behind it.
        whole = whole or (touched and bool(plan.continued))
        if whole:
            lease.complete(WHOLE)
        if whole or plan.taken:
            runtime._last[seat] = lease
        lease.seal(whole=whole)


def _places(runtime: StockRuntime, request: RequestId, kind: CompressorKind, low: int, high: int) -> Int64Array:
    """Where the rows of a tail lie in a pool, counted in rows: int64 [layers, rows]."""
    shape = runtime.shapes[kind.ratio]
    mapped, ids = runtime.store.tail(request, kind.ratio)
    rows = np.array(shape.live(low, high), np.int64)
    return ids.astype(np.int64)[:, rows // shape.page_rows - mapped.start] * shape.page_rows + rows % shape.page_rows


def _gather(runtime: StockRuntime, places: dict[CompressorKind, Int64Array]) -> torch.Tensor:
    """The rows of all layers and kinds, one behind the other, on the device."""
    where = _upload(runtime, np.concatenate([place.ravel() for place in places.values()]))
    parts = where.split([place.size for place in places.values()])
    rows = [
        runtime.pools[kind].flatten(0, 1).index_select(0, part).flatten()
        for kind, part in zip(places, parts, strict=True)
    ]
    return torch.cat(rows)


def _scatter(runtime: StockRuntime, request: RequestId, read: checkpoint.Checkpoint) -> None:
    """Write the rows of a checkpoint, and poison all else of the pages."""
    low, high = read.position, read.position + read.drafts
    pages = {kind: runtime.store.tail(request, kind.ratio)[1].astype(np.int64) for kind in runtime.pools}
    places = {kind: _places(runtime, request, kind, low, high) for kind in runtime.pools}
    words = [found[kind] for found in (pages, places) for kind in runtime.pools] + [*read.rows.values()]
    cut = _upload(runtime, np.concatenate([word.ravel().view(np.int32) for word in words])).split(
        [word.nbytes // 4 for word in words]
    )
    kinds = len(runtime.pools)
    for i, pool in enumerate(runtime.pools.values()):
        at, row, value = cut[i].view(torch.int64), cut[kinds + i].view(torch.int64), cut[2 * kinds + i]
        pool.index_fill_(0, at, float("nan"))
        pool.flatten(0, 1).index_copy_(0, row, value.view(torch.float32).view(-1, pool.shape[2]))


def _upload(runtime: StockRuntime, words: np.ndarray[Any, Any]) -> torch.Tensor:
    """A copy on the device. The pinned source is torch's, which gives it to nobody before the copy is over."""
    return torch.from_numpy(words).pin_memory().to(runtime.device.device, non_blocking=True)


def _wait(runtime: StockRuntime, lease: Lease[Any], host: torch.Tensor) -> None:
    """Wait on the host until a lease is over."""
    timeout = runtime.arena.fence_timeout_s
    deadline = time.monotonic() + timeout
    while not lease.over():
        if time.monotonic() > deadline:
            _NEVER_FREED.append(host)
            runtime.arena.quarantine(lease, f"its checkpoint has not come within {timeout} s")
            raise CheckpointLost(f"{lease.execution} was to read a tail, which has not come within {timeout} s")
        time.sleep(POLL_S)
