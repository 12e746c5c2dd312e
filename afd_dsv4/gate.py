# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Decides whether the plugin works in an engine, and says why.

Problem: a plugin that silently stays off looks exactly like one that works, until the queue is stuck; and one that
works where a feature of the engine breaks its assumptions corrupts memory. So every decision carries its reasons, all
of them at once, and a mode that was asked for and refused is told apart from one that was never asked for.
Way: a pure function from the settings and the facts of one engine (`EngineFacts`, plain values) to a frozen
`Decision`. What is known to break is refused by name, features that depend on the adapter are refused unless it says
that it covers them, and so is a fact that could not be read, or is nothing that such a fact can be: deciding never
raises. A feature that is no fact here is not looked at.
Not here: where the facts come from (`compat/facts.py`), and what "on" changes (`plugin.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import UnionType
from typing import Final, get_args, get_origin, get_type_hints

from afd_dsv4.config import Executor, Mode, Settings
from afd_dsv4.geometry import InputError, ModelGeometry, PageLayout, page_layout
from afd_dsv4.workspace.sizing import WorkspaceSizes, size_workspace

NPU_PLATFORM: Final = "vllm_ascend.platform.NPUPlatform"
#: What an adapter's own worker may stand in for: vllm-ascend's, and afd-plugin's in the Attention role.
NATIVE_WORKER: Final = "vllm_ascend.worker.worker.NPUWorker"
AFD_WORKER: Final = "afd_plugin.v1.worker.npu.AFDNPUAttentionWorker"
#: Devices whose page sizes `geometry` knows.
DEVICES: Final = ("A2", "A3")
#: Of what the kernels of the afd executor take: kernels_ascendc/compressor/tiling.h:kMaxRequests, and AfdDsv4Dtype.
MOST_REQUESTS: Final = 4096
DTYPES: Final = ("bfloat16", "float32")
ATTENTION: Final = "attention"
FFN: Final = "ffn"
#: Connectors of afd-plugin that an adapter can follow.
CAM_ASYNC: Final = "CAMAsyncAFDConnector"
CAM_P2P: Final = "CAMP2pAFDConnector"
#: What afd-plugin 85e826e registers for DeepSeek-V4. Its constructor raises on every device but CUDA.
CUDA_ONLY: Final = "afd_plugin.model_executor.models.deepseek_v4:AFDDeepseekV4ForCausalLM"
NO_GRAPHS: Final = "NONE"
FCFS: Final = "fcfs"
FULL_DECODE_ONLY: Final = "FULL_DECODE_ONLY"

# What an adapter may cover.
AFD: Final = "afd"
ASYNC_SCHEDULING: Final = "async_scheduling"
FULL_GRAPHS: Final = "full_graphs"
OPTIMISTIC_STARTS: Final = "optimistic_starts"
OVERLAP: Final = "overlap"
PIECEWISE_GRAPHS: Final = "piecewise_graphs"
PREFIX_CACHING: Final = "prefix_caching"
UBATCHES: Final = "ubatches"
MTP: Final = "mtp"  # vLLM's own name of the method; other methods go by theirs
COVERABLE: Final = frozenset(
    {
        AFD,
        ASYNC_SCHEDULING,
        FULL_GRAPHS,
        OPTIMISTIC_STARTS,
        OVERLAP,
        PIECEWISE_GRAPHS,
        PREFIX_CACHING,
        UBATCHES,
        MTP,
        "ngram",
    }
)
_GRAPHS: Final = {"FULL": FULL_GRAPHS, "PIECEWISE": PIECEWISE_GRAPHS}  # words of vLLM's names

#: Facts that must be known, wherever they come from.
_REQUIRED: Final = (
    "device",
    "model_type",
    "dtype",
    "worker_cls",
    "prefix_caching",
    "decode_context_parallel",
    "prefill_context_parallel",
    "pipeline_parallel",
    "dsa_context_parallel",
    "model_runner_v2",
    "sleep_mode",
    "lora",
    "policy",
    "overlap",
    "async_scheduling",
    "graphs",
    "ubatches",
    "native_tail",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
)


@dataclass(frozen=True)
class AfdFacts:
    """What `additional_config["afd"]` says, and what of afd-plugin is in this process. None where it did not say.

    Attributes:
        role: role of this server.
        connector: name of the connector.
        asynchronous: whether asynchronous data parallelism is on.
        stages: stages that the asynchronous connector cuts a step into, 1 for none.
        split: what it cuts at.
        dense: layers without experts before the first with them, where a step is cut into stages; else 0.
        plugin: the installed afd-plugin, for people; None where there is none.
        pin: name of the pin that it is, None where that is none that is known.
        lacks: why there is no adapter for that pin, None where there is.
        not_loaded: modules of afd-plugin that should be in this process and are not.
        model: class registered for AFDDeepseekV4ForCausalLM, as `module:Class`; None where none is.
    """

    role: str
    connector: str | None
    asynchronous: bool | None
    stages: int | None
    split: str | None
    dense: int | None
    plugin: str | None
    pin: str | None
    lacks: str | None
    not_loaded: tuple[str, ...]
    model: str | None


@dataclass(frozen=True)
class KernelFacts:
    """The kernels of the afd executor that this machine has, see `compressor/library.py`.

    Attributes:
        backend: what they were compiled for, None where there are none to be used.
        on_hardware: whether that is an NPU.
        lacks: why there are none to be used, with what to do; None where there are.
    """

    backend: str | None
    on_hardware: bool
    lacks: str | None


@dataclass(frozen=True)
class EngineFacts:
    """What one engine is configured to do. None means that the configuration did not say, see `unread`.

    Attributes:
        stack: the installed versions, for people.
        stack_name: name of the supported stack that they are, None where they are none.
        worker_class: the adapter's worker class for this stack, None where there is no adapter.
        covers: what that adapter covers, of `COVERABLE`.
        drift: what in the installed stack is not as recorded, one sentence each.
        unread: attributes that should have been in vLLM's configuration and were not, as dotted paths.
        platform: qualified name of vLLM's platform class.
        device: name of the Ascend device type, such as "A2".
        model_type: of the Hugging Face config.
        dtype: that the model computes in, as torch calls it.
        geometry: the model, None where `geometry_error` says why not.
        geometry_error: why there is no geometry.
        afd: afd-plugin's configuration, None without one.
        worker_cls: worker class that vLLM is about to use.
        kv_transfer: name of what moves KV blocks out of this engine (a connector, offloading, another engine's
            encoder), None for nothing.
        prefix_caching: whether a request may start behind position 0 with blocks of another.
        decode_context_parallel, prefill_context_parallel, pipeline_parallel: sizes.
        dsa_context_parallel: whether vllm-ascend's dsa_cp is on.
        model_runner_v2: whether vLLM's second model runner is in use.
        lora: whether LoRA adapters may be loaded.
        policy: of the scheduler's queue.
        scheduler_cls: name of a scheduler that is not vLLM's own, None for vLLM's.
        sleep_mode: whether the engine may give its device memory away and take other memory later.
        overlap: whether vllm-ascend runs part of the attention on a second stream (multistream_dsv4_dsa_overlap).
        async_scheduling: whether the scheduler runs ahead of the sampled tokens.
        speculative_method: None without speculative decoding.
        speculative_tokens: drafts per step.
        graphs: name of vLLM's graph mode.
        ubatches: micro-batches, or stages, that one forward is cut into; 0 or 1 for none.
        native_tail: whether vllm-ascend bounds the compressor state itself
            (enable_dsv4_shared_compressor_workspace, vllm-project/vllm-ascend#15452), and is told to.
        max_num_seqs, max_num_batched_tokens, block_size: vLLM's.
        kernels: of the afd executor.

    Raises:
        ValueError: something covered that nobody asks for.
    """

    stack: str
    stack_name: str | None
    worker_class: str | None
    covers: frozenset[str]
    drift: tuple[str, ...]
    unread: tuple[str, ...]
    platform: str
    device: str | None
    model_type: str | None
    dtype: str | None
    geometry: ModelGeometry | None
    geometry_error: str | None
    afd: AfdFacts | None
    worker_cls: str | None
    kv_transfer: str | None
    prefix_caching: bool | None
    decode_context_parallel: int | None
    prefill_context_parallel: int | None
    pipeline_parallel: int | None
    dsa_context_parallel: bool | None
    model_runner_v2: bool | None
    sleep_mode: bool | None
    lora: bool | None
    policy: str | None
    scheduler_cls: str | None
    overlap: bool | None
    async_scheduling: bool | None
    speculative_method: str | None
    speculative_tokens: int
    graphs: str | None
    ubatches: int | None
    native_tail: bool | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int | None
    kernels: KernelFacts

    def __post_init__(self) -> None:
        if isinstance(self.covers, frozenset) and (unknown := self.covers - COVERABLE):
            raise ValueError(f"covers {sorted(unknown)}; what an adapter may cover is {sorted(COVERABLE)}")


@dataclass(frozen=True)
class Decision:
    """What the plugin does in one engine.

    Attributes:
        requested: the mode that was asked for.
        active: whether the plugin works.
        refused: whether a mode other than `off` was asked for and not given.
        reasons: one sentence each, never empty.
        settings: what the plugin works with, nothing left open; None where it does not.
        sizes: the memory that it takes on one worker; None where it does not work.

    Raises:
        ValueError: no reason, active and refused at once, or active without settings and sizes.
    """

    requested: Mode
    active: bool
    refused: bool
    reasons: tuple[str, ...]
    settings: Settings | None = None
    sizes: WorkspaceSizes | None = None

    def __post_init__(self) -> None:
        if not self.reasons:
            raise ValueError("a decision needs at least one reason")
        if self.active and self.refused:
            raise ValueError("a decision cannot be active and refused at once")
        if self.active is (self.settings is None or self.sizes is None):
            raise ValueError("a decision has settings and sizes exactly when it is active")

    def line(self) -> str:
        """The decision as one line for the log."""
        verdict = "on" if self.active else "refused, stays off" if self.refused else "off"
        why = self.reasons if len(self.reasons) == 1 else [f"{n}. {why}" for n, why in enumerate(self.reasons, 1)]
        return f"mode {self.requested.value!r}: {verdict} ({'; '.join(why)}){self._takes()}"

    def _takes(self) -> str:
        if self.sizes is None or self.settings is None:
            return ""
        tails, slots = self.sizes.tail_bytes, self.sizes.device_bytes - self.sizes.tail_bytes
        return (
            f", executor {self.settings.executor.value!r}, {self.sizes.slots} slots, "
            f"{_mib(self.sizes.device_bytes)} on each worker (tails {_mib(tails)}, slots {_mib(slots)})"
        )


def off(reason: str) -> Decision:
    """A decision for an engine that nobody wants the plugin in."""
    return Decision(Mode.OFF, active=False, refused=False, reasons=(reason,))


def decide(settings: Settings, facts: EngineFacts) -> Decision:
    """Decide for one engine. On only where there is nothing to object, see `objections`. Never raises."""
    mode = settings.mode
    if mode is Mode.OFF:
        return off("no other mode was asked for")
    try:
        absurd = tuple(_absurd(facts))
        return _refused(mode, absurd) if absurd else _decide(settings, facts)
    except Exception as error:  # facts that nobody thought of
        why = _no("facts of this engine", f"cannot be judged: {type(error).__name__}: {error}", "report it")
        return _refused(mode, (why,))


def _refused(mode: Mode, reasons: tuple[str, ...]) -> Decision:
    return Decision(mode, active=False, refused=True, reasons=reasons)


def _absurd(facts: object, cls: type = EngineFacts, path: str = "facts") -> Iterator[str]:
    """Facts that are nothing that such a fact can be."""
    if not isinstance(facts, cls):
        yield _no(path, f"{facts!r}, which is no {cls.__name__}", "report it")
        return
    for name, hint in get_type_hints(cls).items():
        value = getattr(facts, name)
        kinds = tuple(get_origin(each) or each for each in (get_args(hint) if isinstance(hint, UnionType) else (hint,)))
        odd = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
        if odd:
            yield _no(f"{path}.{name}", repr(value), "report it")
        elif isinstance(value, int) and value < 0:  # which a user may have typed
            yield _no(f"{path}.{name}", repr(value), "correct or report it")
        elif isinstance(value, (AfdFacts, KernelFacts)):
            yield from _absurd(value, type(value), f"{path}.{name}")


def _decide(settings: Settings, facts: EngineFacts) -> Decision:
    mode = settings.mode
    if mode is Mode.AFD and facts.afd and facts.afd.role == FFN:
        # The same settings serve both roles; only attention has a compressor.
        why = f"the AFD role here is {FFN!r}; only {ATTENTION!r} has a compressor"
        return Decision(mode, active=False, refused=False, reasons=(why,))
    reasons = tuple(objections(settings, facts))
    if reasons:
        return _refused(mode, reasons)
    drafts = facts.speculative_tokens if settings.drafts is None else settings.drafts
    # Operators of all supported stacks have the contract that the stock executor needs.
    executor = Executor.STOCK if settings.executor is Executor.AUTO else settings.executor
    whole = replace(settings, drafts=drafts, executor=executor)
    asked = "colocated was asked for"
    if facts.afd:
        asked = f"AFD role {ATTENTION!r} with {facts.afd.connector}, {max(1, facts.ubatches or 0)} uBatches"
    if executor is Executor.AFD:
        unproven = ", which have not run on hardware yet" if facts.kernels.on_hardware else ""
        asked += f", with kernels of the back end {facts.kernels.backend!r}{unproven}"
    sizes = _sizes(whole, facts)
    return Decision(mode, active=True, refused=False, reasons=(asked,), settings=whole, sizes=sizes)


def objections(settings: Settings, facts: EngineFacts) -> Iterator[str]:
    """Every reason against a mode other than off: what was asked or is needed; what was found; what to do."""
    yield from _against_stack(settings.mode, facts)
    yield from _against_role(settings.mode, facts)
    yield from _against_model(facts)
    yield from _against_engine(facts)
    if facts.worker_class is not None:  # or nothing at all is covered, which is told
        yield from _against_uncovered(facts)
    yield from _against_limits(settings, facts)
    if settings.executor is Executor.AFD:
        yield from _against_kernels(facts)


def _against_stack(mode: Mode, facts: EngineFacts) -> Iterator[str]:
    if facts.platform != NPU_PLATFORM:
        yield _no(
            "vLLM's platform", facts.platform, "it must be Ascend's; if VLLM_PLUGINS is set, list Ascend's plugins too"
        )
    else:
        unread = facts.unread or tuple(name for name in _REQUIRED if getattr(facts, name) is None)
        if unread:
            yield _no("vLLM's configuration", f"cannot read {', '.join(unread)}", "report it with this line")
    if facts.stack_name is None:
        yield _no("installed stack", f"{facts.stack}, which is none of the supported ones", "install a supported one")
    elif facts.worker_class is None and not (mode is Mode.AFD and facts.afd):  # which is told of afd-plugin
        yield _no("installed stack", f"{facts.stack_name}, which has no adapter yet", "install one that has")
    if facts.drift:
        found = f"{len(facts.drift)} differences from what was recorded, such as: {facts.drift[0]}"
        yield _no("contracts of the stack", found, "see `afd-dsv4 compat check`")
    native = {NATIVE_WORKER, AFD_WORKER} if mode is Mode.AFD else {NATIVE_WORKER}
    if facts.worker_cls not in (None, facts.worker_class, *native):
        remedy = f"leave it to vllm-ascend, which takes {NATIVE_WORKER}"
        if mode is Mode.AFD:
            remedy = f"leave it to afd-plugin, which takes {AFD_WORKER}"
        yield _no("worker class", str(facts.worker_cls), remedy)
    if facts.device is not None and facts.device not in DEVICES:
        yield _no("device", facts.device, f"its page sizes are not in yet; use {' or '.join(DEVICES)}")


def _against_role(mode: Mode, facts: EngineFacts) -> Iterator[str]:
    if mode is Mode.AFD and facts.afd is None:
        yield _no("mode 'afd'", 'no additional_config["afd"]', "configure afd-plugin, or ask for mode 'colocated'")
    elif mode is Mode.AFD and facts.afd is not None:
        yield from _against_afd(facts.afd, facts)
    elif mode is Mode.COLOCATED and facts.afd is not None:
        yield _no("mode 'colocated'", f"AFD role {facts.afd.role!r}", "ask for mode 'afd'")


def _against_afd(afd: AfdFacts, facts: EngineFacts) -> Iterator[str]:
    if afd.role != ATTENTION:
        yield _no("AFD role", repr(afd.role), f"use {ATTENTION!r} or {FFN!r}")
    install = "install commit 85e826e of vllm-project/afd-plugin"
    if afd.plugin is None:
        yield _no("afd-plugin", "not installed", install)
    elif afd.pin is None:
        yield _no("afd-plugin", f"{afd.plugin}, which is no commit that is known", install)
    elif afd.lacks:
        yield _no("afd-plugin", f"{afd.plugin}: {afd.lacks}", install)
    elif AFD not in facts.covers or facts.worker_class is None:
        remedy = "install the stack that this commit was made for"
        yield _no("mode 'afd'", f"{facts.stack}, which has no adapter for it", remedy)
    elif afd.not_loaded:
        remedy = "if VLLM_PLUGINS is set, list afd too; its log at level DEBUG says what failed"
        yield _no("afd-plugin", f"{', '.join(afd.not_loaded)} not loaded in this process", remedy)
    elif afd.model is None or afd.model == CUDA_ONLY:
        found = (
            f"{afd.model}, whose constructor raises on every device but CUDA"
            if afd.model
            else "no class is registered for AFDDeepseekV4ForCausalLM"
        )
        remedy = "no server with this commit's own models serves DeepSeek-V4 on an NPU, with or without this plugin"
        yield _no("AFD model", found, remedy)
    if afd.connector not in (CAM_ASYNC, CAM_P2P):
        yield _no("AFD connector", str(afd.connector), f"use {CAM_ASYNC} or {CAM_P2P}")
    if afd.connector == CAM_ASYNC and afd.asynchronous is False:
        yield _no(CAM_ASYNC, "async is false", 'set additional_config["afd"]["async"] to true')
    if afd.connector == CAM_ASYNC and afd.stages is not None and afd.stages not in (1, 2):
        yield _no("async_moe_num_ubatches", str(afd.stages), "set it to 2")
    if afd.connector == CAM_ASYNC and afd.dense:
        # deepseek_v2_async_cam_forward.py: dense_prefix_layers; the executions are those of the stages.
        found = f"{afd.dense} dense layers first (first_k_dense_replace), where attention runs the whole batch at once"
        yield _no("async_moe_ubatching", found, "set it to false, or serve a model without them")
    if afd.connector == CAM_P2P and facts.ubatches is not None and facts.ubatches > 1:
        # v1/worker/npu/attention_model_runner.py: shared_dsa_metadata_caches; the stages of CAM_ASYNC have one each.
        found = f"{facts.ubatches} uBatches, of which all but the first get lengths and positions of the first"
        remedy = "drop --enable-dbo; with it this commit serves no DeepSeek-V4, with or without this plugin"
        yield _no("DBO of afd-plugin", found, remedy)
    if afd.connector == CAM_ASYNC and afd.split not in ("request", "token"):
        yield _no("async_moe_split", str(afd.split), "use 'request' or 'token'")


def _against_model(facts: EngineFacts) -> Iterator[str]:
    if facts.model_type not in (None, "deepseek_v4"):
        yield _no("model", repr(facts.model_type), "only deepseek_v4 has these compressors")
    elif facts.geometry_error:
        yield facts.geometry_error
    elif facts.geometry and not facts.geometry.compressors:
        yield _no("model", "no layer with a compressor", "native code needs no help")
    elif facts.geometry and facts.stack_name and facts.block_size:
        try:
            _layout(facts).check_holds(facts.geometry)
        except InputError as error:
            yield str(error)


def _against_engine(facts: EngineFacts) -> Iterator[str]:
    if facts.native_tail:
        remedy = "vllm-ascend bounds the state itself; leave it so with mode 'off', or drop that key"
        yield _no("native tail mode", "enable_dsv4_shared_compressor_workspace", remedy)
    if facts.kv_transfer:
        yield _no("KV transfer", facts.kv_transfer, "tails are not transferred; drop the connector")
    if facts.prefix_caching and PREFIX_CACHING not in facts.covers:
        remedy = "a hit needs a tail that nobody kept (no engine stores checkpoints); set --no-enable-prefix-caching"
        yield _no("prefix caching", "on", remedy)
    for what, option, size in (
        ("decode context parallelism", "--decode-context-parallel-size", facts.decode_context_parallel),
        ("prefill context parallelism", "--prefill-context-parallel-size", facts.prefill_context_parallel),
        ("pipeline parallelism", "--pipeline-parallel-size", facts.pipeline_parallel),
    ):
        if size is not None and size != 1:
            yield _no(what, str(size), f"set {option} 1")
    if facts.dsa_context_parallel:
        yield _no("dsa_cp", "on", 'set additional_config "enable_dsa_cp" to false')
    if facts.model_runner_v2:
        yield _no("model runner", "V2", "set VLLM_USE_V2_MODEL_RUNNER=0")
    if facts.sleep_mode:
        yield _no("sleep mode", "on", "tails do not survive it; drop --enable-sleep-mode")
    if facts.lora:
        yield _no("LoRA", "on", "graphs are captured once a size and not once an adapter; drop --enable-lora")
    # Both may admit new requests before those that were preempted are over, or not say who was: more than max_num_seqs.
    if facts.policy not in (None, FCFS):
        yield _no("scheduling policy", str(facts.policy), f"set --scheduling-policy {FCFS}")
    if facts.scheduler_cls is not None:
        yield _no("scheduler", facts.scheduler_cls, "what it tells about preempted requests is not known; use vLLM's")


def _against_uncovered(facts: EngineFacts) -> Iterator[str]:
    if facts.overlap and OVERLAP not in facts.covers:
        remedy = 'set additional_config "multistream_dsv4_dsa_overlap" to false'
        yield _uncovered("multistream overlap", "on (vllm-ascend's default)", remedy)
    if facts.async_scheduling and ASYNC_SCHEDULING not in facts.covers:
        yield _uncovered("asynchronous scheduling", "on (vLLM's default)", "set --no-async-scheduling")
    method = facts.speculative_method
    if method is not None and method not in facts.covers:
        yield _uncovered("speculative decoding", method, "drop --speculative-config")
    if method is not None and facts.async_scheduling and OPTIMISTIC_STARTS not in facts.covers:
        found = "drafts with asynchronous scheduling, where the host's start of a chunk may be too far ahead"
        yield _uncovered("exact starts", found, "set --no-async-scheduling, or drop --speculative-config")
    graphs = facts.graphs or NO_GRAPHS
    needs = {feature for word, feature in _GRAPHS.items() if word in graphs}
    if graphs != NO_GRAPHS and (not needs or needs - facts.covers):
        full = f'set --compilation-config \'{{"cudagraph_mode": "{FULL_DECODE_ONLY}"}}\''
        remedy = full if FULL_GRAPHS in facts.covers else "set --enforce-eager"
        yield _uncovered("graph mode", graphs, remedy)
    if facts.ubatches is not None and facts.ubatches > 1 and UBATCHES not in facts.covers:
        yield _uncovered("uBatches", str(facts.ubatches), "drop --enable-dbo and --ubatch-size")


def _against_limits(settings: Settings, facts: EngineFacts) -> Iterator[str]:
    if settings.drafts is not None and settings.drafts < facts.speculative_tokens:
        found = f"{settings.drafts} where vLLM drafts {facts.speculative_tokens} tokens a step"
        yield _no("setting drafts", found, "leave it out, or give at least as many")
    if facts.ubatches is not None and settings.slots < facts.ubatches:
        yield _no("setting slots", f"{settings.slots} for {facts.ubatches} uBatches", "give one for each at least")


def _against_kernels(facts: EngineFacts) -> Iterator[str]:
    if facts.kernels.lacks:
        yield facts.kernels.lacks
    for field, has in (("head_dim", 512), ("index_head_dim", 128), ("qk_rope_head_dim", 64)):
        if facts.geometry and (found := getattr(facts.geometry, field)) != has:
            yield _no("executor 'afd'", f"{field} {found}, its kernels have {has}", "use executor 'stock'")
    if facts.dtype not in (None, *DTYPES):
        yield _no(
            "executor 'afd'", f"dtype {facts.dtype}, its kernels have {' and '.join(DTYPES)}", "use --dtype bfloat16"
        )
    if facts.max_num_seqs is not None and facts.max_num_seqs > MOST_REQUESTS:
        found = f"max_num_seqs {facts.max_num_seqs}, its kernels take {MOST_REQUESTS} requests"
        yield _no("executor 'afd'", found, f"set --max-num-seqs {MOST_REQUESTS} or less")


def _layout(facts: EngineFacts) -> PageLayout:
    assert facts.stack_name is not None
    assert facts.block_size is not None
    return page_layout(facts.stack_name, facts.block_size)


def _sizes(settings: Settings, facts: EngineFacts) -> WorkspaceSizes:
    """Only where nothing objects, so nothing is missing."""
    assert facts.geometry is not None
    assert facts.max_num_seqs is not None
    assert facts.max_num_batched_tokens is not None
    return size_workspace(
        facts.geometry,
        _layout(facts),
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        drafts=settings.drafts or 0,
        # All graphs of a worker are replayed on one stream and share a slot.
        slots=settings.slots + ("FULL" in (facts.graphs or NO_GRAPHS)),
        tile_tokens=settings.tile_tokens if settings.executor is Executor.AFD else None,
    )


def _no(what: str, found: str, remedy: str) -> str:
    return f"{what}: {found}; {remedy}"


def _uncovered(what: str, found: str, remedy: str) -> str:
    return _no(what, f"{found}, which the adapter of this stack does not cover", remedy)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
