# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the gate would say to a configuration, before a server is started with it.

Problem: the gate speaks when a server starts, after minutes; and it asks vLLM's own configuration, which is not there.
Way: the options as vLLM names them, from a JSON file, a server's log or the environment, are turned into the gate's
facts, with the defaults of `vllm serve` where an option is left out. What cannot be known from here is assumed not to
object, and is listed: a "could be on" is only as good as that list. Where no vLLM is here, a known stack with all that
belongs to it is assumed, so that what depends on options alone is judged on any machine.
Not here: the decision (`gate.py`), reading the options (`options.py`), and what a default is (`defaults.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from afd_dsv4.compat.adapters import ADAPTERS, full_name
from afd_dsv4.compat.facts import kernels_here
from afd_dsv4.compat.stack import AFD_PINS, UNVERSIONED, InstalledStack, known
from afd_dsv4.compressor.library import HARDWARE
from afd_dsv4.config import Executor, Mode, Settings, read, switched_off
from afd_dsv4.doctor import defaults
from afd_dsv4.doctor.defaults import Limits
from afd_dsv4.doctor.machine import GENERAL_GROUP, Machine, Plugin, allowlist
from afd_dsv4.doctor.options import Options
from afd_dsv4.gate import (
    ATTENTION,
    CAM_ASYNC,
    CUDA_ONLY,
    DEVICES,
    FCFS,
    NATIVE_WORKER,
    NPU_PLATFORM,
    AfdFacts,
    Decision,
    EngineFacts,
    KernelFacts,
    decide,
    off,
)
from afd_dsv4.geometry import DEFAULT_STACK, InputError, ModelGeometry, preset

#: What moves KV blocks, and what it calls the one that does.
_TRANSFERS: Final = {"kv_transfer_config": "kv_connector", "ec_transfer_config": "ec_connector"}
_OFFLOADING: Final = "kv_offloading_size"


@dataclass(frozen=True)
class Planned:
    """What the gate says.

    Attributes:
        settings: of the plugin, None where they cannot be read.
        decision: None where the settings cannot be read, or where nobody gave options and nothing else asks for a mode.
        error: why not.
        assumed: what could not be known from here, and was taken not to object.
        limits: of the server, those of `vllm serve` where nobody says; None where they were not asked for.
        unknown: why there is neither a decision nor an error, where there is none.
    """

    settings: Settings | None
    decision: Decision | None
    error: str | None = None
    assumed: tuple[str, ...] = ()
    limits: Limits | None = None
    unknown: str = "no options were given"


def plan(
    options: Mapping[str, Any] | None,
    machine: Machine,
    environment: Mapping[str, str],
    geometry: ModelGeometry | None,
    *,
    max_num_batched_tokens: int | None,
    block_size: int | None,
    max_num_seqs: int | None,
    stack: str | None = None,
    refused: bool = False,
) -> Planned:
    """Ask the gate, as `plugin.py` does.

    Args:
        options: of the server, None where they are not known.
        machine: what is installed.
        environment: such as `os.environ`.
        geometry: the model, None where it is not known.
        max_num_batched_tokens, block_size, max_num_seqs: from wherever they are known.
        stack: name of the known stack to judge for where there is no vLLM; None for the default one.
        refused: whether there are options that could not be read.
    """
    try:
        if switched_off(environment):
            return Planned(Settings(), off("the environment says so; additional_config is not looked at"))
        if options is None and refused:
            return Planned(Settings(), None, unknown="the options were refused")
        settings = read(Options(options or {}).inner("additional_config").values, environment)
    except InputError as error:
        return Planned(None, None, str(error))
    if settings.mode is Mode.OFF:
        return Planned(settings, None if options is None else off("no other mode was asked for"))
    assumed: list[str] = ["every option of vLLM has its default"] * (options is None)
    if geometry is None:
        assumed.append("the model is DeepSeek-V4-Flash")
    known_limits = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
    }
    try:
        kernels = kernels_here(environment)
        if not machine.has_vllm:
            with_afd = Options(options or {}).inner("additional_config").values.get("afd") is not None
            machine = _stand_in(stack, with_afd, environment, assumed)
            kernels = KernelFacts(HARDWARE, True, None)
            assumed += ["the project's kernels are built there"] * (settings.executor is Executor.AFD)
        asked, model = Options(options or {}), geometry or preset("flash")
        found = defaults.limits(
            asked,
            batch=max_num_batched_tokens,
            block_size=block_size,
            seqs=max_num_seqs,
            longest=model.max_position_embeddings,
        )
        if by_default := defaults.left_out(asked, found, **known_limits):
            assumed.append(by_default)
        facts = _facts(asked, machine, environment, model, found, kernels, assumed)
    except InputError as error:
        return Planned(settings, None, str(error))
    return Planned(settings, decide(settings, facts), assumed=tuple(assumed), limits=found)


def _facts(
    asked: Options,
    machine: Machine,
    environment: Mapping[str, str],
    geometry: ModelGeometry,
    limits: Limits,
    kernels: KernelFacts,
    assumed: list[str],
) -> EngineFacts:
    """Every fact by name, so that one that is new is not forgotten here."""
    assert machine.stack is not None
    additional, drafting = asked.inner("additional_config"), asked.inner("speculative_config")
    method = drafting.text("method") or asked.text("spec_method")
    stack, afd = machine.stack, _afd(additional, machine, environment)
    adapter = ADAPTERS.get((full_name(stack.name, stack.afd) if afd else stack.name) or "")
    if "plugins" in machine.failed:
        assumed.append("plugins that cannot be read here are loaded")
    if "drift" in machine.failed:
        assumed.append("the code of the stack is as recorded")
    worker = asked.text("worker_cls") or "auto"
    ubatches = 2 if asked.flag("enable_dbo", False) else asked.number("ubatch_size", 0)
    if afd is None:  # vllm_ascend/platform.py:_fix_incompatible_config, which afd-plugin undoes
        ubatches = 0
    assumed += ["the device is an A2 or A3", "vLLM's second model runner is not chosen"]
    return EngineFacts(
        stack=str(stack),
        stack_name=stack.name,
        worker_class=adapter.worker if adapter else None,
        covers=adapter.covers if adapter else frozenset(),
        drift=machine.verdict.reasons if machine.verdict and not machine.verdict.holds else (),
        unread=(),
        platform=NPU_PLATFORM
        if _loaded("ascend", machine, environment)
        else "none of vllm-ascend's, which is not loaded",
        device=DEVICES[0],
        model_type="deepseek_v4",
        dtype=_dtype(asked.text("dtype")),
        geometry=geometry,
        geometry_error=None,
        afd=afd,
        worker_cls=NATIVE_WORKER if worker == "auto" else worker,
        kv_transfer=_kv_transfer(asked),
        prefix_caching=asked.flag("enable_prefix_caching", True),
        decode_context_parallel=asked.number("decode_context_parallel_size", 1),
        prefill_context_parallel=asked.number("prefill_context_parallel_size", 1),
        pipeline_parallel=asked.number("pipeline_parallel_size", 1),
        dsa_context_parallel=additional.flag("enable_dsa_cp", False),
        model_runner_v2=False,
        sleep_mode=asked.flag("enable_sleep_mode", False),
        lora=asked.flag("enable_lora", False),
        policy=asked.text("scheduling_policy") or FCFS,
        scheduler_cls=asked.text("scheduler_cls"),
        overlap=additional.flag("multistream_dsv4_dsa_overlap", True),
        async_scheduling=defaults.asynchronous(asked, method),
        speculative_method=method,
        speculative_tokens=drafting.number("num_speculative_tokens", asked.number("spec_tokens", 0)),
        graphs=defaults.graphs(asked),
        ubatches=max(ubatches, (afd.stages or 1) if afd else 1),
        native_tail=additional.flag("enable_dsv4_shared_compressor_workspace", False),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        kernels=kernels,
    )


def _stand_in(asked: str | None, with_afd: bool, environment: Mapping[str, str], assumed: list[str]) -> Machine:
    """The machine that the server is for: a known stack, its code as recorded, and every plugin that may load."""
    afd = next(pin for pin in AFD_PINS if pin.lacks is None)
    wanted = known(asked or "") or known(afd.stack if with_afd else DEFAULT_STACK)
    assert wanted is not None
    others = "" if asked == wanted.name else " (--stack says otherwise)"
    assumed.append(f"the stack is {wanted.name}{others}, its code is as recorded, its plugins are loaded")
    assumed += [f"{afd.name} is installed"] * with_afd
    stack = InstalledStack(
        python="",
        machine="",
        torch=None,
        torch_npu=None,
        vllm=wanted.vllm,
        vllm_ascend=wanted.vllm_ascend or UNVERSIONED,
        transformers=None,
        vllm_ascend_commit=wanted.commit,
        afd_plugin=UNVERSIONED,
        afd_plugin_commit=afd.commit,
    )
    allowed = allowlist(environment)
    plugins = [Plugin(GENERAL_GROUP, name, "", "", allowed is None or name in allowed) for name in ("ascend", "afd")]
    return Machine(stack, None, None, tuple(plugins), {})


def _loaded(name: str, machine: Machine, environment: Mapping[str, str]) -> bool:
    """Whether vLLM loads the plugin; where not all could be read, one that the allowlist lets in counts as loaded."""
    if "plugins" in machine.failed:
        allowed = allowlist(environment)
        return allowed is None or name in allowed
    return any(plugin.name == name and plugin.loaded for plugin in machine.plugins)


def _kv_transfer(asked: Options) -> str | None:
    """As `compat/facts.py` names it."""
    for option, connector in _TRANSFERS.items():
        if asked.values.get(option) is not None:
            return f"{option} with {asked.inner(option).text(connector)}"
    size = asked.values.get(_OFFLOADING)
    return None if size is None else f"{_OFFLOADING} {size}"


def _dtype(asked: str | None) -> str:
    """As vLLM makes of it (vllm/config/model.py:_get_and_verify_dtype); checkpoints of this model are in bfloat16."""
    return {"half": "float16", "float": "float32", "auto": "bfloat16"}.get(asked or "auto", asked or "auto")


def _afd(additional: Options, machine: Machine, environment: Mapping[str, str]) -> AfdFacts | None:
    """afd-plugin's mapping, as `compat/facts.py` reads it in a process that has afd-plugin."""
    said = additional.values.get("afd")
    if said is None or machine.stack is None:
        return None
    afd = Options(said if isinstance(said, Mapping) else {"role": said}, "additional_config.afd.")
    extra = afd.inner("connector_extra_config")
    connector = afd.text("connector") or afd.text("afd_connector") or "P2pNcclAFDConnector"
    cuts = connector == CAM_ASYNC and extra.flag("async_moe_ubatching", False)
    pin = machine.stack.afd
    return AfdFacts(
        role=afd.text("role") or afd.text("afd_role") or ATTENTION,
        connector=connector,
        asynchronous=afd.flag("async_dp" if "async_dp" in afd.values else "async", False),
        stages=extra.number("async_moe_num_ubatches", 2) if cuts else 1,
        split=extra.text("async_moe_split") or "request",
        dense=0,
        plugin=f"commit {machine.stack.afd_plugin_commit or 'unknown'}" if machine.stack.afd_plugin else None,
        pin=pin.name if pin else None,
        lacks=pin.lacks if pin else None,
        not_loaded=() if _loaded("afd", machine, environment) else ("afd_plugin",),
        model=CUDA_ONLY if pin and not pin.lacks else None,
    )
