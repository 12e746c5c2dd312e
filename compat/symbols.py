# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Every symbol of vLLM and vllm-ascend that an adapter touches, what for, and what goes wrong if it drifts. Data only.

To add one, write a line below (targets: see `read.py`) and record the contracts again (`docs/compat.md`). A symbol that
exists in some stacks only names those; everything else is in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

V23: Final = ("vllm-ascend-0.23.0",)
V26: Final = ("vllm-ascend-80d8c194f", "vllm-ascend-cf0baa38d")
ALL: Final = V23 + V26


@dataclass(frozen=True)
class Symbol:
    """One symbol.

    Attributes:
        target: `module:qualified.name`, or `namespace::operator`.
        used_for: what the adapter does with it.
        consequence: what goes wrong if it drifts and the adapter runs all the same.
        stacks: where it exists.
    """

    target: str
    used_for: str
    consequence: str
    stacks: tuple[str, ...] = ALL


def symbols_of(stack: str) -> tuple[Symbol, ...]:
    """The symbols of one stack, in the order of this file."""
    return tuple(symbol for symbol in SYMBOLS if stack in symbol.stacks)


_S = Symbol
_A = "vllm_ascend."
_DSA = "vllm_ascend.attention.dsa_v1:"
_MODEL = "vllm_ascend.models.deepseek_v4:"
_RUNNER = "vllm_ascend.worker.model_runner_v1:NPUModelRunner"
_WORKER = "vllm_ascend.worker.worker:NPUWorker"
_TABLE = "vllm_ascend.worker.block_table:"
_OUTPUT = "vllm.v1.core.sched.output:"
_SPEC = "vllm.v1.kv_cache_interface:"
_GPU_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

# fmt: off
# ruff: noqa: E501
#: One symbol a line.
SYMBOLS: Final[tuple[Symbol, ...]] = (
    # The operator that writes and reads the state, and its call sites.
    _S("_C_ascend::compressor", "the stock executor launches it", "arguments land in other places: state is lost"),
    _S("_C_ascend::compressor_metadata", "it keeps the true start while the compressor gets a rebased one", "RoPE positions or slots of compressed rows are wrong"),
    _S("_C_ascend::compressor_metadata_out", "the same under a captured graph", "RoPE positions or slots of compressed rows are wrong"),
    _S(f"{_DSA}AscendDSAImpl", "its methods hold the call sites", "a call site is missed and writes into the null page"),
    _S(f"{_DSA}AscendDSAImpl.forward", "splits a batch into decode and prefill launches", "rows of one launch are given to the other"),
    _S(f"{_DSA}AscendDSAImpl._forward_prefill", "call site of the compressor for prefills", "the launch is not intercepted, or gets rows of other requests"),
    _S(f"{_DSA}AscendDSAImpl._forward_decode", "call site of the compressor for decodes", "the launch is not intercepted, or gets rows of other requests"),
    _S(f"{_DSA}AscendDSAImpl._indexer_qkv_prepare", "call site of the indexer's compressor", "the indexer's state is lost"),
    _S(f"{_DSA}AscendDSAImpl.cv_indexer_select_qli", "call site of the indexer's compressor beside another stream", "the indexer's state is lost, or touched by two streams at once"),
    _S(f"{_DSA}AscendDSAImpl.indexer_select_qli", "reads what the indexer's compressor wrote", "it runs before the write that it needs"),
    _S(f"{_DSA}AscendDSAImpl._compute_compressor_metadata", "its start must stay the true one", "RoPE positions of compressed rows are wrong"),
    _S(f"{_DSA}AscendDSAImpl.update_graph_params", "what a graph replay may change", "a replay uses tables of an older step"),
    _S(f"{_DSA}dsv4_dsa_overlap_stream", "the auxiliary stream is one of the touchers", "a touch from it is not ordered: state is overwritten early"),
    # Metadata that the attention unpacks by position.
    _S(f"{_DSA}AscendDSAMetadata", "stand-in metadata has its fields", "the attention reads a field that the stand-in has not"),
    _S(f"{_DSA}AscendDSAPrefillMetadata", "state table, lengths and starts of prefills are replaced in it", "the compressor gets the native table"),
    _S(f"{_DSA}AscendDSADecodeMetadata", "state table, lengths and starts of decodes are replaced in it", "the compressor gets the native table"),
    _S(f"{_DSA}AscendDSAMetadataBuilder.__init__", "a builder is made for the stand-in", "start-up fails, or the builder reads a spec that is gone"),
    _S(f"{_DSA}AscendDSAMetadataBuilder.build", "builds the metadata that the stand-in copies", "decode and prefill rows are cut elsewhere"),
    _S(f"{_DSA}AscendDSAMetadataBuilder.build_prefill_metadata", "order of requests in a prefill launch", "a request gets the rows of another"),
    _S(f"{_DSA}AscendDSAMetadataBuilder.build_decode_metadata", "order of requests in a decode launch, padding included", "a request gets the rows of another"),
    _S(f"{_DSA}AscendDSAMetadataBuilder.build_for_graph_capture", "metadata of a capture", "a graph captures tables whose addresses change"),
    _S(f"{_DSA}AscendDSAMetadataBuilder.build_for_drafting", "metadata of a draft step", "a draft step writes into state of the target"),
    _S(f"{_DSA}AscendDSABackend.get_impl_cls", "tells dsa_cp from dsa_v1", "call sites of dsa_cp are not intercepted"),
    _S(f"{_DSA}AscendDSABackend.get_builder_cls", "tells dsa_cp from dsa_v1", "call sites of dsa_cp are not intercepted"),
    _S(f"{_DSA}AscendDSABackend.get_kv_cache_shape", "shape of a page of state", "rows are read at other addresses than written"),
    _S(f"{_A}attention.context_parallel.dsa_cp:AscendDSACPImpl._forward", "has a call site that is not intercepted", "the refusal of dsa_cp may be without need, or miss a site"),
    _S(f"{_A}ops.dsa:dsa_forward", "chooses the metadata and KV tensors of a layer", "the stand-in does not reach the attention"),
    _S(f"{_A}ops.dsa:filter_metadata", "sorts the metadata of a layer by key", "the attention unpacks other metadata than it expects"),
    _S(f"{_A}ops.dsa:_build_kv_cache", "places the state tensors in the tuple of KV tensors", "the compressor writes into another tensor"),
    _S(f"{_A}ops.dsa:unfold_kvcache", "unwraps the state tensor", "the compressor gets a list"),
    # The model: which compressors there are.
    _S(f"{_MODEL}AscendCompressorStateCache", "the layers that leave the KV groups", "state layers are not recognised and stay in the pool"),
    _S(f"{_MODEL}AscendCompressorStateCache.__init__", "its prefix, width and ratio name a compressor", "tails have another size than the compressor writes"),
    _S(f"{_MODEL}AscendCompressorStateCache.get_kv_cache_spec", "page size and window of native state", "the bytes that are saved are counted wrong"),
    _S(f"{_MODEL}AscendCompressorStateCache.get_attn_backend", "the builder of the stand-in", "no metadata is built for it"),
    _S(f"{_MODEL}Compressor", "identifies compressors", "a compressor gets no tail"),
    _S(f"{_MODEL}Compressor.__init__", "width, ratio and overlap of a compressor", "tails have another size than the compressor writes"),
    _S(f"{_MODEL}Indexer.__init__", "owns the second compressor of a C4 layer", "the indexer's compressor gets no tail"),
    _S(f"{_MODEL}DeepseekV4Attention.__init__", "names of the compressors of a layer", "a compressor gets no tail"),
    _S(f"{_A}models.layer.attention.layer:DSV4_BLOCK_SIZES", "rows of a page of state by block size", "pages of tails have another size than the compressor's"),
    _S(f"{_A}models.layer.attention.layer:get_dsv4_block_sizes", "rows of a page on A2, A3 and A5", "pages of tails have another size than the compressor's"),
    _S(f"{_A}models.layer.attention.layer:get_dsv4_block_sizes._DSV4_BLOCK_SIZES", "rows of a page on A2 and A3", "pages of tails have another size than the compressor's"),
    _S("vllm.models.deepseek_v4.compressor:CompressorStateCache", "base of the state layers", "state layers are not recognised"),
    _S("vllm.models.deepseek_v4.compressor:CompressorStateCache.__init__", "registers a state layer under its prefix", "tails are bound to no layer"),
    # The KV cache: what the state layers were, and what is left.
    _S(f"{_A}core.kv_cache_interface:AscendSlidingWindowMLASpec", "the spec that state layers and SWA share", "SWA layers are dropped with the state, or state stays"),
    _S(f"{_A}core.kv_cache_interface:AscendSlidingWindowMLASpec.real_page_size_bytes", "bytes of a page", "memory is counted wrong"),
    _S(f"{_A}core.kv_cache_interface:AscendMLAAttentionSpec", "the spec of compressed KV, which stays", "compressed KV is dropped with the state"),
    _S(f"{_SPEC}KVCacheSpec", "what get_kv_cache_spec returns per layer", "the filter drops or keeps other layers"),
    _S(f"{_SPEC}SlidingWindowMLASpec", "base of the state's spec", "the filter drops or keeps other layers"),
    _S(f"{_SPEC}KVCacheConfig", "KV groups that the worker gets", "stand-in metadata is built for the wrong group"),
    _S(f"{_SPEC}KVCacheGroupSpec", "layers of a KV group", "stand-in metadata is built for the wrong group"),
    _S(f"{_SPEC}KVCacheTensor", "memory behind a KV group", "memory is counted wrong"),
    _S("vllm.v1.core.kv_cache_utils:group_and_unify_kv_cache_specs", "groups what is left", "grouping fails without the state layers"),
    _S("vllm.v1.core.kv_cache_utils:get_kv_cache_configs", "splits memory over the groups", "the pool is larger than memory"),
    # What the scheduler tells the worker.
    _S(f"{_OUTPUT}SchedulerOutput", "new, running, preempted and finished requests of a step", "a tail is kept, or dropped while it is needed"),
    _S(f"{_OUTPUT}NewRequestData", "a request's first step", "a new request starts from another's rows"),
    _S(f"{_OUTPUT}CachedRequestData", "resumed requests", "a resumed request reads rows of its first life"),
    _S(f"{_A}patch.platform.patch_balance_schedule:BalanceScheduler.schedule", "plans the steps where vLLM's own scheduler would, without asynchronous scheduling", "a step says other things about its requests than the tails are told"),
    _S("vllm.v1.core.sched.scheduler:Scheduler._preempt_request", "a preempted request starts again at 0", "its tail is kept although it is computed again"),
    _S("vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule", "when a step's tokens count as computed", "starts of the next step are optimistic: rows are missing"),
    # The worker.
    _S(f"{_A}worker.worker:NPUWorker", "the adapter's worker derives from it", "overridden methods are not called"),
    _S(f"{_WORKER}.__init__", "applies vllm-ascend's own patches first", "patches are applied in another order"),
    _S(f"{_WORKER}.init_device", "makes the runner", "the runner is not the adapter's"),
    _S(f"{_WORKER}.load_model", "tails are allocated behind it", "tails are allocated before weights, or never"),
    _S(f"{_WORKER}.determine_available_memory", "a measured size leaves room for the tails, an explicit one is checked against what is free", "the KV cache takes the memory of the tails"),
    _S(f"{_WORKER}.initialize_from_config", "binds KV tensors", "the state layers have no tensor when a forward begins"),
    _S(f"{_WORKER}.compile_or_warm_up_model", "captures graphs", "a graph is captured before the tails exist"),
    _S(f"{_WORKER}.execute_model", "one step", "a step runs outside a generation"),
    _S(f"{_WORKER}.execute_dummy_batch", "an idle rank's forward", "a forward without requests writes state"),
    _S(f"{_WORKER}.get_kv_cache_spec", "what the engine core asks for", "the state layers stay in the KV groups"),
    _S(f"{_WORKER}.shutdown", "leases are settled before it", "memory is freed under a running launch"),
    # The runner.
    _S(f"{_A}worker.model_runner_v1:NPUModelRunner", "the adapter's runner derives from it", "overridden methods are not called"),
    _S(f"{_RUNNER}.__init__", "makes the input batch", "start-up fails"),
    _S(f"{_RUNNER}.execute_model", "a generation opens here", "a forward runs outside a generation"),
    _S(f"{_RUNNER}.load_model", "tails are allocated behind it", "tails are allocated before the state layers exist, or never"),
    _S(f"{_RUNNER}.sample_tokens", "drafting ends the generation", "a lease is settled while a draft launch is queued"),
    _S(f"{_RUNNER}._update_states", "requests enter, resume and leave", "a tail is kept, or dropped while it is needed"),
    _S(f"{_RUNNER}._prepare_inputs", "starts and lengths of the rows of a step", "a request gets the rows of another"),
    _S(f"{_RUNNER}._build_attention_metadata", "stand-in metadata is added to it", "the attention unpacks other metadata than it expects"),
    _S(f"{_RUNNER}._model_forward", "the launches happen in it", "a lease is sealed before its last launch"),
    _S(f"{_RUNNER}._dummy_run", "profile, warm-up and capture", "a forward without requests writes state"),
    _S(f"{_RUNNER}.profile_run", "memory is measured in it", "the slots are not counted"),
    _S(f"{_RUNNER}.capture_model", "captures graphs", "a graph captures tables whose addresses change"),
    _S(f"{_RUNNER}.get_kv_cache_spec", "state layers are dropped from it", "the state layers stay in the KV groups"),
    _S(f"{_RUNNER}.initialize_kv_cache", "KV groups become tensors", "the state layers have no tensor when a forward begins"),
    _S(f"{_RUNNER}.initialize_kv_cache_tensors", "binds tensors to layers by name", "the state layers have no tensor when a forward begins"),
    _S(f"{_RUNNER}.initialize_attn_backend", "metadata builders per KV group", "no builder for the stand-in"),
    _S(f"{_RUNNER}.may_reinitialize_input_batch", "block tables per KV group", "a block table is indexed by the wrong group"),
    _S(f"{_RUNNER}.propose_draft_token_ids", "draft steps", "a draft launch is outside the generation"),
    _S(f"{_RUNNER}._correct_optimistic_seq_lens_cpu", "starts that async scheduling left optimistic", "starts are optimistic: rows are missing"),
    _S(f"{_RUNNER}._update_states_after_model_execute", "accept lengths of drafts", "a tail is committed for the wrong accept length"),
    _S(f"{_GPU_RUNNER}._update_states", "what vllm-ascend's own builds on", "a tail is kept, or dropped while it is needed"),
    _S(f"{_TABLE}MultiGroupBlockTable", "rows of the batch, one table per KV group", "a request gets the rows of another"),
    _S(f"{_TABLE}MultiGroupBlockTable.__init__", "number of KV groups", "a block table is indexed by the wrong group"),
    _S(f"{_TABLE}MultiGroupBlockTable.add_row", "a request enters a row", "a request gets the rows of another"),
    _S(f"{_TABLE}MultiGroupBlockTable.move_row", "a request changes its row", "a request gets the rows of another"),
    _S(f"{_TABLE}MultiGroupBlockTable.swap_row", "two requests change rows", "a request gets the rows of another"),
    _S(f"{_TABLE}BlockTable.compute_slot_mapping", "slots of every KV group", "slots are computed for a group that is gone"),
    _S(f"{_A}ascend_forward_context:set_ascend_forward_context", "tells target, draft, dummy and captured forwards apart", "a draft or dummy forward is taken for the target's"),
    _S(f"{_A}compilation.acl_graph:ACLGraphWrapper", "captures and replays", "a slot is leased for a replay that does not happen"),
    _S(f"{_A}compilation.acl_graph:ACLGraphWrapper.__init__", "the graph's key", "a slot is leased for the wrong graph"),
    _S(f"{_A}compilation.acl_graph:ACLGraphWrapper.__call__", "whether a forward is captured, replayed or eager", "a fixed slot is used outside its graph"),
    _S(f"{_A}worker.worker:NPUModelRunner", "the name is rebound while init_device runs", "the runner is not the adapter's"),
    _S(f"{_RUNNER}.input_batch", "requests of a step in their rows", "a request gets the rows of another"),
    _S(f"{_GPU_RUNNER}.vllm_config", "settings and drafts are read from it", "start-up fails"),
    _S(f"{_GPU_RUNNER}.model_config", "the model's geometry is read from it", "start-up fails"),
    _S(f"{_GPU_RUNNER}.cache_config", "block size", "pages of tails have another size than the compressor's"),
    _S(f"{_GPU_RUNNER}.scheduler_config", "most requests and tokens of a step", "tails run out"),
    _S(f"{_GPU_RUNNER}.compilation_config", "holds the state layers by name", "a compressor gets no tail"),
    _S(f"{_GPU_RUNNER}.device", "tails are allocated on it", "start-up fails"),
    _S(f"{_WORKER}.model_runner", "tails are closed with it", "memory is freed under a running launch"),
    _S("vllm.v1.worker.worker_base:WorkerBase.cache_config", "an explicit KV size", "the KV cache takes the memory of the tails"),
    _S("vllm.v1.worker.worker_base:WorkerBase.device", "memory is measured on it", "start-up fails"),
    _S(f"{_RUNNER}.model", "tells a captured model from an eager one", "a fixed slot is used outside its graph"),
    _S(f"{_RUNNER}.model_memory_usage", "tails count as the model's memory", "the KV cache takes the memory of the tails"),
    _S(f"{_RUNNER}.use_compress", "starts on the host are corrected for models with compressors", "starts are optimistic: rows are missing"),
    _S("vllm.v1.worker.gpu_input_batch:InputBatch.num_computed_tokens_cpu", "starts of the rows of a step", "rows are read at other positions than written"),
    _S("vllm.v1.worker.gpu_input_batch:InputBatch.req_ids", "requests of a step in their rows", "a request gets the rows of another"),
    _S("vllm.forward_context:get_forward_context", "the forward that runs", "a forward is taken for another kind"),
    _S("vllm.forward_context:ForwardContext", "whether a forward is captured, replayed or eager, and its metadata", "a forward is taken for another kind"),
    _S("vllm.forward_context:BatchDescriptor", "key of a graph", "a slot is leased for the wrong graph"),
    _S("vllm.config:CUDAGraphMode", "tells full graphs from piecewise ones", "a fixed slot is used outside its graph"),
    _S("vllm.config.compilation:CUDAGraphMode", "tells full graphs from piecewise ones", "a fixed slot is used outside its graph"),
    _S("vllm.config.cache:CacheConfig.kv_cache_memory_bytes", "whether the KV size is explicit, and is to fit beside the tails", "the KV cache takes the memory of the tails"),
    _S(f"{_A}compilation.acl_graph:ACLGraphEntry", "whether a graph was captured", "a replay is taken for a capture"),
    _S(f"{_A}compilation.acl_graph:ACLGraphWrapper.concrete_aclgraph_entries", "whether a graph was captured", "a replay is taken for a capture"),
    _S(f"{_A}utils:extract_dsv4_layer_index", "the layer of a state, by its name", "a layer gets the tails of another"),
    _S("vllm.models.deepseek_v4.compressor:CompressorStateCache.kv_cache", "takes the stand-in for the state", "the compressor writes into another tensor"),
    _S("vllm.models.deepseek_v4.compressor:CompressorStateCache.state_dim", "width of a row", "tails have another size than the compressor writes"),
    # Platform and plugin loading.
    _S(f"{_A}platform:NPUPlatform.check_and_update_config", "chooses the worker class", "the adapter's worker is not taken"),
    _S(f"{_A}platform:NPUPlatform.pre_register_and_update", "vllm-ascend's patches are applied in it", "patches are applied in another order"),
    _S(f"{_A}platform:NPUPlatform.register_custom_kv_cache_specs", "specs are registered after vLLM's own", "workers lose the built-in specs"),
    _S("vllm_ascend:_ensure_global_patch", "vllm-ascend's patches come first", "patches are applied in another order"),
    _S(f"{_A}utils:adapt_patch", "vllm-ascend's patches come first", "patches are applied in another order"),
    _S(f"{_A}utils:enable_dsa_cp", "dsa_cp is refused", "call sites of dsa_cp are not intercepted"),
    _S(f"{_A}ascend_config:AscendConfig.multistream_dsv4_dsa_overlap", "whether an auxiliary stream is used", "a touch from it is not ordered"),
    _S(f"{_A}ascend_config:SchedulerConfig.short_request_first_config", "a queue that is refused", "new requests overtake preempted ones: tails run out", V26),
    _S("vllm.platforms.interface:Platform.validate_request", "the platform's say in every request", "streaming input is let in, and ends the engine"),
    _S("vllm.v1.engine.input_processor:InputProcessor.process_inputs", "its locals tell streaming input, and which engine it is for", "streaming input is let in, and ends the engine"),
    _S("vllm.plugins:load_general_plugins", "calls the plugin in every process", "the plugin is not loaded in a worker"),
    _S("vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker", "loads the plugin before the worker class", "the plugin comes after the worker was made"),
)
