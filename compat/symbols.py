# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Every symbol of vLLM, vllm-ascend and afd-plugin that an adapter touches, what for, and what if it drifts. Data only.

To add one, write a line below (targets: see `read.py`) and record the contracts again (`docs/compat.md`). A symbol that
exists in some stacks only names those; everything else is in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

V23: Final = ("vllm-ascend-0.23.0",)
V26: Final = ("vllm-ascend-80d8c194f", "vllm-ascend-cf0baa38d")
ALL: Final = V23 + V26
#: Of afd-plugin, which has contracts of its own: a server without it is not refused for it.
AFD: Final = ("afd-plugin-85e826e",)


@dataclass(frozen=True)
class Symbol:
    """One symbol.

    Attributes:
        target: `module:qualified.name`, or `namespace::operator`.
        used_for: what the adapter does with it.
        consequence: what goes wrong if it drifts and the adapter runs all the same.
        stacks: the contracts that it is in.
    """

    target: str
    used_for: str
    consequence: str
    stacks: tuple[str, ...] = ALL


def symbols_of(stack: str) -> tuple[Symbol, ...]:
    """The symbols of one contract, in the order of this file."""
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
_P = "afd_plugin."
_NPU = "afd_plugin.v1.worker.npu."
_ATTN_WORKER = "afd_plugin.v1.worker.npu.attention_worker:AFDNPUAttentionWorker"
_ATTN_RUNNER = "afd_plugin.v1.worker.npu.attention_model_runner:AFDNPUAttentionModelRunner"
_FACTORY = "afd_plugin.connectors.factory:AFDConnectorFactory"
_CAM = "afd_plugin.connectors.npu.async_cam:CAMAsyncAFDConnector"
_P2P = "afd_plugin.connectors.npu.camp2p:CAMP2pAFDConnector"
_WRAPPER = "afd_plugin.v1.worker.npu.npu_ubatch_wrapper:AscendUBatchWrapper"
_CONTEXT = "afd_plugin.v1.worker.npu.ubatching:AscendUBatchContext"
_SCHEDULE = "afd_plugin.model_executor.models.npu.deepseek_v2_async_cam_forward:"

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
    # afd-plugin: loading, configuration, and what its own validation asks for.
    _S("afd_plugin:register_afd", "patches and models are registered in it", "patches are missing, and nobody sees it", AFD),
    _S("afd_plugin:_DEEPSEEK_MODEL_REGISTRATIONS", "the class that is registered for DeepSeek-V4", "a model that cannot start on an NPU is let in", AFD),
    _S(f"{_P}model_executor.models.deepseek_v4:AFDDeepseekV4Model.__init__", "refuses every device but CUDA", "a model that could start is refused, or the reverse", AFD),
    _S(f"{_P}model_executor.models.model_utils:get_afd_model_config", "rewrites the architecture in the worker", "the model's geometry is read from another config", AFD),
    _S(f"{_P}config:AFDConfig", "role and connector, with their defaults and aliases", "another role or connector is decided on than runs", AFD),
    _S(f"{_P}config:_ALIASES", "names of the same settings", "another role or connector is decided on than runs", AFD),
    _S(f"{_P}config:SUPPORTED_AFD_CONNECTORS", "the connectors there are", "a connector is refused as unknown", AFD),
    _S(f"{_P}config:parse_optional_afd_config", "when AFD is active", "AFD runs, and the plugin takes the server for a colocated one", AFD),
    _S(f"{_P}validation:NPU_ATTENTION_WORKER_FQCN", "the worker class that the check compares with", "the server does not start", AFD),
    _S(f"{_P}validation:assert_compatible_afd_stack", "compares the worker class as a string while init_device runs", "the server does not start", AFD),
    _S(f"{_P}validation:afd_worker_qualname_for_platform_default", "refuses worker classes that are not the platform's", "the configuration ends with an error", AFD),
    _S(f"{_P}compat.patches.config_validation:create_engine_config", "when the worker class is chosen", "the adapter's worker is not taken", AFD),
    _S(f"{_P}compat.patches.config_validation:_select_afd_worker_for_auto", "lets the adapter's worker stand", "the configuration ends with an error", AFD),
    _S(f"{_P}compat.patches.npu.ascend_platform:apply_afd_ascend_dbo_config_patch", "keeps the number of uBatches through the platform's say", "uBatches are decided on that do not run", AFD),
    _S(f"{_P}compat.npu.feature_validation:fail_if_unsupported_npu_afd_features", "what it refuses is not refused again", "a feature nobody covers is let in", AFD),
    _S(f"{_P}compat.npu.feature_validation:_fail_if_unsupported_npu_afd_async_features", "eager only, no native uBatches", "a feature nobody covers is let in", AFD),
    _S(f"{_P}compat.npu.feature_validation:_fail_if_unsupported_npu_async_moe_ubatching_features", "two stages, no context parallelism", "a feature nobody covers is let in", AFD),
    # afd-plugin: the worker and the runner of the Attention role.
    _S(_ATTN_WORKER, "the adapter's worker derives from it", "overridden methods are not called", AFD),
    _S(f"{_ATTN_WORKER}.__init__", "applies patches first", "patches are applied in another order", AFD),
    _S(f"{_ATTN_WORKER}.init_device", "checks the worker class and makes the runner", "the runner is not the adapter's", AFD),
    _S(f"{_NPU}attention_worker:AFDNPUAttentionModelRunner", "the name is rebound while init_device runs", "the runner is not the adapter's", AFD),
    _S(_ATTN_RUNNER, "the adapter's runner derives from it", "overridden methods are not called", AFD),
    _S(f"{_ATTN_RUNNER}.__init__", "makes the connector", "the connector is not the adapter's", AFD),
    _S(f"{_ATTN_RUNNER}.execute_model", "one live step", "a forward runs outside a generation", AFD),
    _S(f"{_ATTN_RUNNER}._model_forward", "installs slices and stages, and runs the model", "launches happen outside it, or with slices of another step", AFD),
    _S(f"{_ATTN_RUNNER}._build_attention_metadata", "full-batch or per-uBatch metadata", "stand-ins do not reach a uBatch", AFD),
    _S(f"{_ATTN_RUNNER}._build_attention_metadata_with_async_moe_ubatches", "plans the stages and builds their metadata", "stand-ins do not reach a stage, or it is cut elsewhere", AFD),
    _S(f"{_ATTN_RUNNER}._build_attention_metadata_with_ubatches", "one dictionary a uBatch", "stand-ins do not reach a uBatch", AFD),
    _S(f"{_ATTN_RUNNER}._dummy_run", "profile, warm-up and capture", "a forward without requests writes state", AFD),
    _S(f"{_ATTN_RUNNER}._dummy_run_inference_mode", "forgets metadata behind itself", "a forward takes metadata of another", AFD),
    _S(f"{_ATTN_RUNNER}._dummy_run_with_ubatches", "dummy forwards in two uBatches", "a forward without requests writes state", AFD),
    _S(f"{_ATTN_RUNNER}._afd_warmup_and_capture_once", "metadata that is made before a dummy run", "it is forgotten before it is used", AFD),
    _S(f"{_ATTN_RUNNER}._build_afd_metadata", "transactions are no generations", "a generation is taken from a counter that both stages share", AFD),
    _S(f"{_ATTN_RUNNER}._install_afd_metadata_on_forward_context", "makes metadata anew where there is none", "a forward without metadata fails", AFD),
    _S(f"{_ATTN_RUNNER}._install_async_moe_ubatch_metadata_on_forward_context", "hands the stages to the model", "a stage runs with other metadata than was planned", AFD),
    _S(f"{_ATTN_RUNNER}._determine_batch_execution_and_padding", "when a step is cut", "a step is cut that was not planned so", AFD),
    _S(f"{_ATTN_RUNNER}.load_model", "wraps the model and meets the other role", "tails are allocated before weights, or never", AFD),
    _S(f"{_ATTN_RUNNER}._install_ascend_ubatch_wrapper", "wraps the model for two uBatches", "a captured model is taken for an eager one", AFD),
    _S(f"{_ATTN_RUNNER}.initialize_attn_backend", "a metadata builder a stage", "stages share a builder's buffers", AFD),
    _S(f"{_ATTN_RUNNER}.shutdown", "closes the connector, then the engine", "memory is freed under a running launch", AFD),
    _S(f"{_ATTN_RUNNER}.connector", "is told of the forward that runs", "sends and receives are not counted", AFD),
    _S(f"{_ATTN_RUNNER}.ubatch_slices", "is forgotten behind a step", "a forward is cut as another was", AFD),
    _S(f"{_ATTN_RUNNER}._afd_pending_metadata", "is forgotten behind a step", "a forward takes metadata of another", AFD),
    _S(f"{_ATTN_RUNNER}._afd_async_moe_ubatch_metadata", "stages of a step, forgotten behind it", "a forward takes stages of another", AFD),
    # afd-plugin: connectors.
    _S(_FACTORY, "the adapter's connectors are registered in it", "the connector is not the adapter's", AFD),
    _S(f"{_FACTORY}._registry", "is put back as it was", "a connector of ours stays behind", AFD),
    _S(f"{_FACTORY}.register_connector", "registers the adapter's connectors", "the connector is not the adapter's", AFD),
    _S(f"{_FACTORY}.create_connector", "makes the connector while the runner is made", "the connector is not the adapter's", AFD),
    _S(f"{_FACTORY}.get_connector_class", "parses settings with the registered class", "settings are parsed by another class", AFD),
    _S(f"{_P}connectors.base:AFDConnectorBase", "what a connector is", "a payload crosses that nobody looks at", AFD),
    _S(f"{_P}connectors.base:AFDConnectorBase.local_rank", "device of the thread that closes it", "the end waits for another device", AFD),
    _S(f"{_P}connectors.metadata:AFDTransferMetadata", "layer and stage of a transfer", "a transfer is counted for another stage", AFD),
    _S(f"{_P}connectors.metadata:AFDTransferContext", "metadata and state of a transfer", "a payload field is not looked at", AFD),
    _S(f"{_P}connectors.metadata:AFDTransferState", "base of what connectors keep", "a payload field is not looked at", AFD),
    _S(f"{_P}connectors.metadata:AFDA2FTransferPayload", "what FFN receives", "a payload field is not looked at", AFD),
    _S(f"{_P}connectors.metadata:AFDF2ATransferPayload", "what FFN sends", "a payload field is not looked at", AFD),
    _S(_CAM, "the adapter's connector derives from it", "overridden methods are not called", AFD),
    _S(f"{_CAM}.__init__", "makes the queue of pending payloads", "a payload that waits is not looked at", AFD),
    _S(f"{_CAM}.init_afd_connector", "meets the other role", "the adapter's memory is taken at another time", AFD),
    _S(f"{_CAM}.close", "destroys its group without waiting", "memory is freed under a running launch", AFD),
    _S(f"{_CAM}.send_attn_output", "queues the payload, then launches", "a send is counted that did not happen, or the reverse", AFD),
    _S(f"{_CAM}.recv_ffn_output", "takes the oldest payload of a stage", "a receive is counted for another stage", AFD),
    _S(f"{_CAM}.recv_attn_output", "FFN's side of a transfer", "a payload crosses that nobody looks at", AFD),
    _S(f"{_CAM}.send_ffn_output", "FFN's side of a transfer", "a payload crosses that nobody looks at", AFD),
    _S(f"{_CAM}._pending_attention_payloads", "payloads that wait", "a payload that waits is not looked at", AFD),
    _S(f"{_P}connectors.npu.async_cam:AFDAsyncTransferState", "state of a transfer", "a payload field is not looked at", AFD),
    _S(f"{_P}connectors.npu.async_cam:AFDAsyncExtraInfo", "settings, with their defaults", "stages are decided on that do not run", AFD),
    _S(f"{_P}connectors.npu.async_cam:AFDAsyncExtraInfo.from_mapping", "names of the settings", "stages are decided on that do not run", AFD),
    _S(_P2P, "the adapter's connector derives from it", "overridden methods are not called", AFD),
    _S(f"{_P2P}.__init__", "makes its control plane", "start-up fails", AFD),
    _S(f"{_P2P}.init_afd_connector", "meets the other role, one group a uBatch", "the adapter's memory is taken at another time", AFD),
    _S(f"{_P2P}.close", "destroys its groups without waiting", "memory is freed under a running launch", AFD),
    _S(f"{_P2P}.send_attn_output", "sets the uBatch in the forward context", "a launch is given to another uBatch", AFD),
    _S(f"{_P2P}.recv_ffn_output", "sets the uBatch in the forward context", "a launch is given to another uBatch", AFD),
    _S(f"{_P}connectors.npu.camp2p:CAMP2PTransferState", "state of a transfer", "a payload field is not looked at", AFD),
    # afd-plugin: stages; and uBatches in threads, which the gate refuses and tests/integration/test_afd_protocol.py runs.
    _S(f"{_P}model_executor.npu.async_cam_ubatching:AsyncMoeStage", "requests and tokens of a stage", "rows of one stage are given to the other", AFD),
    _S(f"{_P}model_executor.npu.async_cam_ubatching:plan_async_moe_stages", "where a step is cut", "a cut that nobody planned for", AFD),
    _S(f"{_P}model_executor.models.npu.async_cam_layout:AsyncMoeUbatchMetadata", "metadata a stage", "stand-ins do not reach a stage", AFD),
    _S(f"{_P}model_executor.models.npu.deepseek_attention_metadata:isolate_deepseek_attention_builder_inputs", "which inputs a stage owns", "two stages share what one of them changes", AFD),
    _S(f"{_P}model_executor.models.npu.deepseek_attention_metadata:materialize_deepseek_attention_metadata_by_layer", "runs over metadata before stand-ins are in it", "it meets a stand-in, and fails", AFD),
    _S(f"{_SCHEDULE}run_attention_gate_afd_forward", "order of attention, send and receive", "work is counted that did not happen", AFD),
    _S(f"{_SCHEDULE}run_async_moe_ubatch_afd_forward", "order of two stages, and the stage in the forward context", "a launch is given to another stage", AFD),
    _S(f"{_NPU}ubatch_utils:check_enable_ubatch", "when a step is cut", "a step is cut that was not planned so", AFD),
    _S(f"{_NPU}ubatch_utils:split_attn_metadata", "requests and tokens of a uBatch", "rows of one uBatch are given to the other", AFD),
    _S(f"{_NPU}ubatch_utils:_make_metadata_with_slice", "requests and tokens of a uBatch", "rows of one uBatch are given to the other", AFD),
    _S(f"{_NPU}forward_context:create_ascend_forward_context", "the uBatch in the forward context", "a launch is given to another uBatch", AFD),
    _S(f"{_CONTEXT}.__enter__", "puts a thread's forward context in place", "a launch is given to another uBatch", AFD),
    _S(f"{_CONTEXT}.__exit__", "ends a thread's turn, however it went", "an execution is settled while its thread still launches", AFD),
    _S(f"{_CONTEXT}._cpu_yield", "changes turns between send and receive", "two threads launch at once", AFD),
    _S(f"{_NPU}ubatching:make_ubatch_contexts", "two contexts, always", "more uBatches than slots", AFD),
    _S(f"{_WRAPPER}.__call__", "runs, captures or replays uBatches", "a uBatch is captured that is taken for an eager one", AFD),
    _S(f"{_WRAPPER}._run_ubatch_thread", "swallows nothing and keeps no error", "an error is not seen where the forward ends", AFD),
    _S(f"{_WRAPPER}._run_ubatches", "joins both threads before the forward ends", "an execution is settled while its thread still launches", AFD),
    # afd-plugin: the FFN role, where the plugin is off.
    _S(f"{_NPU}ffn_worker:AFDNPUFFNWorker", "is left alone", "memory is taken where nothing needs it", AFD),
    _S(f"{_NPU}ffn_worker:AFDNPUFFNWorker.get_kv_cache_spec", "FFN has no KV cache", "memory is taken where nothing needs it", AFD),
)
