# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Stands in for `_C_ascend::compressor`: finds out whose launch it is, and hands it to the forward's execution.

Problem: all call sites of vllm-ascend (attention/dsa_v1.py: _forward_prefill, _forward_decode,
_indexer_qkv_prepare, cv_indexer_select_qli) call the operator by name, with a state, a state table and starts that mean
the paged KV cache; none says which layer it is, or which requests it has.
Way: what they pass on is what we gave them. The state of a layer is a tiny tensor whose address names layer and kind;
the state table is one of two tensors that say decode or prefill. In a batch decodes come first, but prefill is launched
first (AscendDSAImpl.forward). Where a forward has several uBatches, each with an execution of its own, the adapter says
how to tell which one is running; threads do not tell it, since stages of one thread take turns, too. A launch outside a
forward that we know about, or of a uBatch that it does not have, raises: it would lose rows in silence.
The operator's name is the process's and not an engine's: while it leads here, a launch with a state of nobody's goes to
the true operator, as that of a native engine beside ours. It leads here from `bind` to `unbind`, or until the worker is
gone, however it went.
Not here: when a forward begins and ends (`runner.py`). It imports torch and none of the stack.

Removal plan: gone with the first vllm-ascend whose compressor takes state, table and start from one object (its main
branch has `Compressor.forward`), or that bounds the state itself (vllm-project/vllm-ascend#15452).
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from afd_dsv4.compat.contract import Verdict
from afd_dsv4.compat.patch import Patch, PatchSet
from afd_dsv4.compressor.executor import CompressorWeights
from afd_dsv4.compressor.stock import CONTINUOUS, INTERLEAVED, StockExecution, StockRuntime, call_operator
from afd_dsv4.geometry import CompressorKind
from afd_dsv4.tail.tables import RequestChunk, RequestId

_logger: Final = logging.getLogger("vllm.plugins.afd_dsv4")


class UnknownLaunch(RuntimeError):
    """A compressor launch that cannot be told apart, or that no forward of ours has announced."""


@dataclass(frozen=True)
class _Rows:
    """The one field that the attention reads of a state layer's decode or prefill metadata."""

    block_table: torch.Tensor


@dataclass(frozen=True)
class StandInMetadata:
    """What a state layer has in `attn_metadata`; attention/dsa_v1.py reads `.decode.block_table` or `.prefill...`."""

    decode: _Rows
    prefill: _Rows


class Operator:
    """What bears the operator's name while there are bound `Launches`: leads each launch to those whose state it has.

    Args:
        operator: the true one, which gets all others.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        """Overloads, schema and all else of the operator."""
        return getattr(self._operator, name)

    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        """Arguments of the operator's schema.

        Raises:
            UnknownLaunch: a state of nobody's, in the midst of a forward of ours.
        """
        state: torch.Tensor = args[3] if len(args) > 3 else named["state_cache"]
        owner = _OWNERS.get((state.device, state.data_ptr()))
        if owner is not None and (launches := owner.launches()) is not None:
            return launches.launch(owner, *args, **named)
        forward = getattr(_THREAD, "forward", None)
        if forward is not None and forward.running:
            raise UnknownLaunch(
                "a compressor is launched with a state that belongs to no layer of the model whose forward runs; the "
                "layer's kv_cache was replaced. Report it"
            )
        compressed: torch.Tensor = self._operator.default(*args, **named)  # why not the packet: see Launches
        return compressed


class _Owner:
    """Whose a stand-in is, and what is the same in each launch with it.

    Attributes:
        launches: whose.
        layer: of the model.
        kind: which of its compressors.
        asked: ratio, coff, rotary mode, cache mode and seqused that the operator must be called with.
        weights: of the last launch.
    """

    __slots__ = ("asked", "kind", "launches", "layer", "weights")

    def __init__(self, launches: weakref.ref[Launches], layer: int, kind: CompressorKind) -> None:
        self.launches = launches
        self.layer = layer
        self.kind = kind
        self.asked = (kind.ratio, kind.coff, INTERLEAVED, CONTINUOUS, None)
        self.weights: CompressorWeights | None = None


class _Forward:
    """What is announced: launches of executions by uBatch, or nobody's.

    Attributes:
        running: it is not over.
        thread: that announced it.
    """

    __slots__ = ("decodes", "executions", "idle", "prefills", "running", "thread", "ubatch")

    def __init__(
        self,
        executions: Sequence[StockExecution] = (),
        decodes: Sequence[int] = (),
        ubatch: Callable[[], int] | None = None,
        idle: StockRuntime | None = None,
    ) -> None:
        self.executions = executions
        self.decodes = [slice(0, count) for count in decodes]
        self.prefills = [slice(count, None) for count in decodes]
        self.ubatch = ubatch
        self.idle = idle
        self.running = True
        self.thread = threading.get_ident()


#: Whose stand-in lies where, of all that are bound in this process. They keep its memory, so no address comes twice.
_OWNERS: Final[dict[tuple[torch.device, int], _Owner]] = {}
_LOCK: Final = threading.RLock()
#: `forward`: the announced one that this thread is in, or has launched for. Others may run a native engine meanwhile.
_THREAD: Final = threading.local()
_OPERATOR: Final = PatchSet(
    "the compressor operator",
    [
        Patch(
            target="torch:ops._C_ascend.compressor",
            make=Operator,
            reason="four call sites inside attention/dsa_v1.py pass the paged state, its table and starts",
            removal="a vllm-ascend that calls it in one place that can be overridden (its main branch has "
            "Compressor.forward), or that bounds the state itself (vllm-project/vllm-ascend#15452)",
        )
    ],
)


def _release(places: Iterable[tuple[torch.device, int]]) -> None:
    """Forget these stand-ins; give the operator its name back if they were the last."""
    with _LOCK:
        for place in places:
            _OWNERS.pop(place, None)
        if not _OWNERS:
            for left in _OPERATOR.undo():
                _logger.warning("afd-dsv4: %s", left)


class Launches:
    """The launches of one worker.

    Args:
        operator: the true one, or what bears its name.
        places: layer and kind of every state layer, in any order.
        device: where the stand-ins are.
    """

    def __init__(self, operator: Any, places: Iterable[tuple[int, CompressorKind]], device: torch.device) -> None:
        self.operator = operator
        # The overload, not the packet: called with a parameter of vLLM's, which has a __torch_function__, torch looks
        # the operator up by its name again, and would find us.
        self.queue = functools.partial(call_operator, compressor=operator.default)
        places = list(places)
        cells = torch.zeros((len(places), 1, 1, 1, 1), dtype=torch.float32, device=device)
        #: One a layer and kind: [1 block, 1 row, 1 head, 1 value]. Its address is all that counts.
        self.states = {place: cells[i] for i, place in enumerate(places)}
        self._release: Callable[[], object] = lambda: None
        decode, prefill = (torch.zeros((1, 1), dtype=torch.int32, device=device) for _ in range(2))
        self.metadata = StandInMetadata(_Rows(decode), _Rows(prefill))
        self._decode, self._prefill = decode, prefill
        self._forward: _Forward | None = None
        self._announcements: list[_Forward] = []  # that are not over, innermost last

    def bind(self, verdict: Verdict) -> None:
        """Have the operator's name lead here, until `unbind`, or until nobody holds this object any more.

        Args:
            verdict: of the installed stack, see `contract.verify`.

        Raises:
            DriftError, PatchError: see `PatchSet.apply`. Nothing was changed.
        """
        me = weakref.ref(self)
        places = [(state.device, state.data_ptr()) for state in self.states.values()]
        with _LOCK:
            # First, so that another's release in between gives no name back.
            for place, (layer, kind) in zip(places, self.states, strict=True):
                _OWNERS[place] = _Owner(me, layer, kind)
            release = weakref.finalize(self, _release, places)
            release.atexit = False  # nobody launches then
            self._release = release
            try:
                _OPERATOR.apply(verdict)
            except BaseException:
                release()
                raise

    def unbind(self) -> None:
        """Have it lead here no more; the last one gives the operator its name back. Does nothing where it does not."""
        self._release()

    def of(
        self, executions: Sequence[StockExecution], decodes: Sequence[int], ubatch: Callable[[], int] | None = None
    ) -> AbstractContextManager[None]:
        """Launches within, from whichever thread, are of `executions`.

        Args:
            executions: by uBatch.
            decodes: by uBatch: how many of its requests, which are the first ones, are the decode launch.
            ubatch: index of the uBatch that launches, asked in each launch by the thread that makes it; None where all
                are of uBatch 0.

        Raises:
            ValueError: not one number of decodes for each execution.
            UnknownLaunch: on entering, a forward of another thread is announced. The executions are open by then: where
                they end without launches, the tails of their requests are void.
        """
        if len(decodes) != len(executions):
            raise ValueError(f"{len(executions)} executions and {len(decodes)} numbers of decodes; give one of each")
        return self._announced(_Forward(tuple(executions), tuple(decodes), ubatch))

    def idling(self, runtime: StockRuntime) -> AbstractContextManager[None]:
        """Launches within are nobody's: nothing is stored, nothing is read.

        Raises:
            UnknownLaunch: on entering, a forward of another thread is announced.
        """
        return self._announced(_Forward(idle=runtime))

    @contextmanager
    def _announced(self, forward: _Forward) -> Iterator[None]:
        """Whoever ends first, what is left leads to one that is not over.

        Raises:
            UnknownLaunch: another thread has announced one: nobody could tell whose a launch is.
        """
        with _LOCK:
            if any(other.thread != forward.thread for other in self._announcements):
                raise UnknownLaunch(
                    "a forward is announced while that of another thread runs; their launches could not be told apart. "
                    "Give uBatches one forward, and run forwards one after the other"
                )
            self._announcements.append(forward)
            self._forward = forward
        mine, _THREAD.forward = getattr(_THREAD, "forward", None), forward
        try:
            yield
        finally:
            forward.running = False
            with _LOCK:
                self._announcements.remove(forward)
                left = self._announcements[-1] if self._announcements else None
                self._forward = left
            if getattr(_THREAD, "forward", None) is forward:  # not if one that was announced later is still running
                _THREAD.forward = mine if mine is None or mine.running else left

    def launch(
        self,
        owner: _Owner,
        x: torch.Tensor,
        wkv: torch.Tensor,
        wgate: torch.Tensor,
        state_cache: torch.Tensor,  # noqa: ARG002  # said whose launch it is
        ape: torch.Tensor,
        norm_weight: torch.Tensor,
        rope_sin: torch.Tensor,
        rope_cos: torch.Tensor,
        state_block_table: torch.Tensor | None,
        cu_seqlens: torch.Tensor,
        seqused: torch.Tensor | None,
        start_pos: torch.Tensor | None,  # noqa: ARG002  # the true start; ours is re-based
        rope_head_dim: int,
        cmp_ratio: int,
        coff: int,
        norm_eps: float,
        rotary_mode: int,
        cache_mode: int,
    ) -> torch.Tensor:
        """Whose state it has, then arguments of the operator's schema. State, state table and start are ours to choose.

        Raises:
            UnknownLaunch: no forward was announced, or an argument is not what the recorded call sites pass.
        """
        layer, kind = owner.layer, owner.kind
        if (cmp_ratio, coff, rotary_mode, cache_mode, seqused) != owner.asked:
            raise UnknownLaunch(
                f"{kind.value} of layer {layer} is launched with ratio, coff, rotary mode, cache mode and seqused "
                f"{(cmp_ratio, coff, rotary_mode, cache_mode, seqused)}; known is {owner.asked}"
            )
        weights = owner.weights
        if (
            weights is None
            or weights.wkv is not wkv
            or weights.wgate is not wgate
            or weights.ape is not ape
            or weights.norm_weight is not norm_weight
            or weights.norm_eps != norm_eps
            or weights.rope_head_dim != rope_head_dim
        ):
            owner.weights = weights = CompressorWeights(wkv, wgate, ape, norm_weight, norm_eps, rope_head_dim)
        forward = self._forward
        if forward is None:
            raise UnknownLaunch(
                f"{kind.value} of layer {layer} is launched outside a forward that the runner announced; its rows "
                f"would be lost"
            )
        _THREAD.forward = forward
        if (idle := forward.idle) is not None:
            return idle.compress_idle(kind, x, weights, rope_cos, rope_sin, cu_seqlens)
        ubatch = 0 if forward.ubatch is None else forward.ubatch()
        if not 0 <= ubatch < len(forward.executions):
            raise UnknownLaunch(
                f"{kind.value} of layer {layer} is launched by uBatch {ubatch} of a forward that was announced with "
                f"{len(forward.executions)}; its rows would be lost"
            )
        if state_block_table is self._prefill:
            requests = forward.prefills[ubatch]
        elif state_block_table is self._decode:
            requests = forward.decodes[ubatch]
        else:
            raise UnknownLaunch(f"{kind.value} of layer {layer} is launched with a state table that is not ours")
        execution = forward.executions[ubatch]
        return execution.compress(layer, kind, x, weights, rope_cos, rope_sin, cu_seqlens, requests)


def captured_chunks(requests: int, tokens: int) -> Sequence[RequestChunk]:
    """Chunks with the shape of a graph's decode launch: `tokens` rows, spread evenly over `requests`."""
    each, more = divmod(tokens, requests)
    return [RequestChunk(RequestId(f"row {i} of a graph"), 0, each + (i < more)) for i in range(requests)]
