# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-ascend's model runner with one execution of the stock executor around every forward.

Problem: tails must follow requests through new, resumed, preempted, finished and aborted, under asynchronous scheduling
too, and forwards of four kinds (live, dummy, captured, replayed) reach the same attention code.
Way: methods are overridden, and each calls its original. What the scheduler says about ends is taken in
`_update_states`; the chunks are read in `_build_attention_metadata`, where the batch has its final order and, for
models with compressors, the positions on the host have been corrected for rejected drafts (execute_model,
`use_compress`); `_model_forward` begins, launches and ends. State layers give no KV-cache spec, so vLLM plans no blocks
for them. All of it is a mixin, for runners that derive from vllm-ascend's own.
Not here: sampling and drafting, whose layers own no compressor; the arithmetic of a step (`execution/step.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.logger import logger
from vllm_ascend.compilation.acl_graph import ACLGraphWrapper
from vllm_ascend.models.deepseek_v4 import AscendCompressorStateCache
from vllm_ascend.utils import extract_dsv4_layer_index
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.launches import Launches, captured_chunks
from afd_dsv4.compat.contract import verify
from afd_dsv4.compat.stack import InstalledStack, installed
from afd_dsv4.compressor.stock import StockRuntime
from afd_dsv4.config import Executor, Settings, read
from afd_dsv4.execution.forward import ending
from afd_dsv4.execution.step import Steps
from afd_dsv4.geometry import CompressorKind, ModelGeometry, from_hf_config, page_layout
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.lease import Lease

_Native: Final[Any] = object  # a mixin: what follows it in the order of bases is `NPUModelRunner`


class _Replay:
    """What `StockExecution.replay` queues: vllm-ascend's own way to replay, whose result is kept."""

    def __init__(self, run: partial[Any]) -> None:
        self._run = run
        self.output: Any = None

    def replay(self) -> None:
        self.output = self._run()


class RunnerMixin(_Native):  # type: ignore[misc]  # untyped
    """See the module. It comes before `NPUModelRunner` among the bases.

    Attributes:
        tails: the runtime; None until the model is loaded.
        launches: what stands in for the operator; None until the model is loaded.
    """

    tails: StockRuntime | None = None
    launches: Launches | None = None
    _chunks: tuple[RequestChunk, ...] | None = None  # of the step whose forward is to come
    _drafts: Mapping[str, int] = MappingProxyType({})  # of the step
    _scheduled: Collection[str] = ()  # requests of the step
    _lost: tuple[Lease[Any], ...] = ()  # in doubt at the end

    def load_model(self) -> None:
        """Load the model, then take the memory of all tails and workspace slots, and count it as the model's."""
        super().load_model()
        settings = read(self.vllm_config.additional_config, {})  # the front end has put all it read there
        stack = installed()
        hf_config = self.model_config.hf_config
        geometry = from_hf_config(hf_config.to_dict(), str(self.model_config.model))
        layers = self._state_layers()
        places = {name: _place(hf_config, name, layer, geometry) for name, layer in layers.items()}
        if set(places.values()) != {(c.layer, c.kind) for c in geometry.compressors}:
            raise RuntimeError(
                f"the model has compressor states {sorted(layers)}, its config says {geometry.compress_ratios}; "
                f"they must agree"
            )
        self._steps = Steps()
        self._graphs: dict[int, Any] = {}  # what every captured number of tokens stands for
        operators: Any = torch.ops._C_ascend
        self.launches = Launches(operators.compressor, places.values(), self.device)
        self.tails = self._allocate(geometry, settings, self.launches, stack)
        self._stand_ins = dict.fromkeys(layers, self.launches.metadata)
        for name, layer in layers.items():
            layer.kv_cache = [self.launches.states[places[name]]]
        self.model_memory_usage += self.tail_bytes
        self.launches.bind(verify(stack))
        which, count, size = settings.executor.value, len(layers), self.tail_bytes
        logger.info("afd-dsv4: executor %s: %d compressors keep their tails in %d bytes", which, count, size)

    @property
    def tail_bytes(self) -> int:
        """Device bytes of tails and workspace slots."""
        if self.tails is None:
            return 0
        return self.tails.allocated().device

    def _allocate(
        self, geometry: ModelGeometry, settings: Settings, launches: Launches, stack: InstalledStack
    ) -> StockRuntime:
        speculative = self.vllm_config.speculative_config
        drafts = speculative.num_speculative_tokens if speculative is not None else 0
        most = self.scheduler_config.max_num_seqs * (1 + drafts)
        full = self.compilation_config.cudagraph_mode.has_full_cudagraphs()
        if stack.name is None:
            raise RuntimeError(f"the sizes of pages are known of recorded stacks, and this is {stack}")
        runtime: Callable[..., StockRuntime] = StockRuntime
        if settings.executor is Executor.AFD:
            # Here, so that kernels are loaded where they are wanted only.
            from afd_dsv4.compressor.afd import AfdRuntime

            runtime = partial(AfdRuntime, tile_tokens=settings.tile_tokens)
        return runtime(
            geometry,
            page_layout(stack.name, self.cache_config.block_size),
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            device=self.device,
            slots=settings.slots,
            drafts=max(drafts, settings.drafts or 0),
            fence_timeout_s=settings.fence_timeout_s,
            # The sizes that will be captured are settled later; all replays are on one stream and share a slot.
            graphs=[range(1, most + 1)] if full else (),
            operator=launches.queue,
        )

    def close_tails(self, drain_s: float = 10.0) -> tuple[Lease[Any], ...]:
        """Take no more launches and end the runtime. Does nothing if no model was loaded. May be called again.

        Returns:
            Leases in doubt: work that may still touch the memory of tails and slots.
        """
        if self.launches is not None:
            self.launches.unbind()
        tails = self.tails
        if tails is not None and not tails.arena.closed:
            self._lost = tails.close(drain_s)
            if self._lost:
                logger.warning("afd-dsv4: %d leases are in doubt at shutdown: %s", len(self._lost), self._lost)
        return self._lost

    def _state_layers(self) -> dict[str, Any]:
        context = self.compilation_config.static_forward_context
        return {name: layer for name, layer in context.items() if isinstance(layer, AscendCompressorStateCache)}

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """vllm-ascend's own, without the compressors' states."""
        states = self._state_layers()
        return {name: spec for name, spec in super().get_kv_cache_spec().items() if name not in states}

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vllm-ascend's own; a step that breaks off leaves nothing for the next one, and no tail to go on from."""
        self._scheduled = tuple(scheduler_output.num_scheduled_tokens)
        try:
            with self._whole_step():
                return super().execute_model(scheduler_output, *args, **kwargs)
        finally:
            self._chunks = None

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """vllm-ascend's own. Drafts are judged here: where that breaks off, nobody knows which rows stay."""
        with self._whole_step():
            return super().sample_tokens(*args, **kwargs)

    @contextmanager
    def _whole_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._steps.lost(self._scheduled, f"its step broke off with {type(error).__name__}: {error}")
            raise

    def _update_states(self, scheduler_output: Any) -> Any:
        ended = self._steps.end(
            finished=scheduler_output.finished_req_ids,
            preempted=scheduler_output.preempted_req_ids or (),
            resumed=scheduler_output.scheduled_cached_reqs.resumed_req_ids,
        )
        self._end_tails(ended)
        # As the scheduler sees them: vllm-ascend may drop drafts that never came, but their rows stay in the forward.
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._drafts = {request: len(tokens) for request, tokens in drafts.items()}
        return super()._update_states(scheduler_output)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, draft_metadata = super()._build_attention_metadata(*args, **kwargs)
        if kwargs.get("num_scheduled_tokens") is not None:  # no dummy has it
            requests = kwargs["num_reqs"]
            names = self.input_batch.req_ids[:requests]
            computed = self.input_batch.num_computed_tokens_cpu[:requests].tolist()
            self._end_tails(self._steps.restarted(names, computed))
            self._chunks = self._steps.chunks(
                names,
                computed,
                kwargs["num_scheduled_tokens_np"][:requests].tolist(),
                self._drafts,
            )
        for layers in self._by_layer(metadata):
            layers.update(self._stand_ins)
        return metadata, draft_metadata

    def _by_layer(self, metadata: Any) -> Iterable[dict[str, Any]]:
        """Every mapping from a layer to its metadata that this step has."""
        return (metadata,)

    def _end_tails(self, requests: Iterable[RequestId]) -> None:
        assert self.tails is not None
        for request in requests:
            # Where the step that was to begin a tail broke off before its forward, the store has never heard of it.
            if self.tails.store.seat(request) is not None:
                self.tails.end_request(request)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        assert self.launches is not None
        assert self.tails is not None
        self._refuse_after_the_end()
        with self.launches.idling(self.tails):
            return super()._dummy_run(*args, **kwargs)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.launches is not None
        assert self.tails is not None
        self._refuse_after_the_end()
        tails, launches = self.tails, self.launches
        run = partial(super()._model_forward, *args, **kwargs)
        chunks, self._chunks = self._chunks, None
        context: Any = get_forward_context()
        metadata = self._one_of(context.attn_metadata)
        if metadata is None and chunks:
            raise RuntimeError(
                f"a forward of {len(chunks)} requests has no attention metadata; their rows would be lost. Report it"
            )
        graph, captured = self._graph(context)
        if metadata is None or (chunks is None and graph is None):
            return run()
        if graph is None:
            return self._run(run, chunks or (), context)
        generation = tails.mint()
        with ending(tails, generation):
            if not captured:
                shape = captured_chunks(metadata.num_decodes, metadata.num_decode_tokens)
                with (
                    tails.capture(graph, shape, generation=generation) as execution,
                    launches.of([execution], [len(shape)]),
                ):
                    return run()
            replay = _Replay(run)
            with tails.begin_replay(graph, chunks or (), generation=generation) as execution:
                execution.replay(replay)
            return replay.output

    def _one_of(self, metadata: Any) -> Any:
        """The metadata of one attention layer, None where there is none."""
        return next(iter(metadata.values()), None) if metadata else None

    def _run(self, run: Callable[[], Any], chunks: Sequence[RequestChunk], context: Any) -> Any:
        """An eager forward with requests: begin, launch, end."""
        assert self.launches is not None
        assert self.tails is not None
        generation = self.tails.mint()
        with (
            ending(self.tails, generation),
            self.tails.begin(chunks, generation=generation) as execution,
            self.launches.of([execution], [self._one_of(context.attn_metadata).num_decodes]),
        ):
            return run()

    def _refuse_after_the_end(self) -> None:
        # The operator's name may be the true operator's again, and the layers still have stand-ins for their states.
        if self.tails is not None and self.tails.arena.closed:
            raise RuntimeError("a forward after the worker's end; its tails are closed. Start an engine anew")

    def _graph(self, context: Any) -> tuple[int | None, bool]:
        """Key of the graph that this forward captures or replays, None for none; whether it was captured before."""
        if context.cudagraph_runtime_mode is not CUDAGraphMode.FULL or not isinstance(self.model, ACLGraphWrapper):
            return None, False
        descriptor = context.batch_descriptor
        entry = self.model.concrete_aclgraph_entries.get(descriptor)
        known = self._graphs.setdefault(descriptor.num_tokens, descriptor)
        if known != descriptor:
            raise RuntimeError(
                f"graphs {known} and {descriptor} have equally many tokens, by which their slots are told apart; use "
                f"FULL_DECODE_ONLY, without LoRA"
            )
        return descriptor.num_tokens, entry is not None and entry.aclgraph is not None


class AfdDsv4Runner(RunnerMixin, NPUModelRunner):  # type: ignore[misc]  # untyped
    """See the module."""


def _place(hf_config: Any, name: str, layer: Any, geometry: ModelGeometry) -> tuple[int, CompressorKind]:
    """Layer and kind of a state layer, checked against its width."""
    kind = CompressorKind.C128
    if layer.compress_ratio == CompressorKind.C4.ratio:
        kind = CompressorKind.C4_INDEXER if ".indexer." in name else CompressorKind.C4
    if geometry.row_bytes(kind) != layer.state_dim * layer.dtype.itemsize:
        raise RuntimeError(
            f"{name} has rows of {layer.state_dim} x {layer.dtype}, a {kind.value} compressor of this config has "
            f"{geometry.row_bytes(kind)} bytes"
        )
    return extract_dsv4_layer_index(hf_config, name), kind
