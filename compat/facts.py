# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Reads from vLLM's configuration what the gate decides on.

Problem: a default that is guessed where an attribute has moved makes the gate say yes to something nobody looked at.
Way: every attribute is read by its exact path and must have its type; one that is not there, or is something else, is
noted in `EngineFacts.unread`, and the gate refuses. What vllm-ascend makes of its own options is asked of the modules
that its platform has loaded, and not worked out again here.
Not here: the decision. Nothing of vLLM is imported; a process without vllm-ascend gets facts all the same.

Sources (0.23.0 of both): `vllm/config/*.py`; `vllm_ascend/ascend_config.py:AscendConfig`, `get_ascend_config`;
`vllm_ascend/utils.py:enable_dsa_cp`, `get_ascend_device_type`; of vllm-project/afd-plugin (85e826e)
`additional_config["afd"]`, as `afd_plugin/config.py` names it, and what `afd_plugin:register_afd` loads and registers.
"""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from afd_dsv4.compat.adapters import ADAPTERS, full_name
from afd_dsv4.compat.contract import Verdict
from afd_dsv4.compat.stack import InstalledStack
from afd_dsv4.compressor import library
from afd_dsv4.gate import CAM_ASYNC, AfdFacts, EngineFacts, KernelFacts
from afd_dsv4.geometry import InputError, ModelGeometry, from_hf_config

_MISSING: Final = object()
#: Only a vllm-ascend that has this function has the native tail mode (vllm-project/vllm-ascend#15452).
_NATIVE_TAIL_GATE: Final = "get_dsv4_shared_compressor_workspace_fallback_reasons"
_OWN_SCHEDULERS: Final = ("vllm.v1.core.sched.scheduler.Scheduler", "vllm.v1.core.sched.async_scheduler.AsyncScheduler")
_SHORT_FIRST: Final = "vllm-ascend's short_request_first_config"
_NATIVE_TAIL_KEY: Final = "enable_dsv4_shared_compressor_workspace"
#: `afd_plugin:register_afd` imports them one after the other; where one fails, it says so at level DEBUG and goes on.
_AFD_PATCHES: Final = tuple(
    f"afd_plugin.compat.patches.{name}"
    for name in ("async_dp_engine", "async_dp_forward_context", "config_validation", "engine_core")
)
_AFD_ARCHITECTURE: Final = "AFDDeepseekV4ForCausalLM"


def facts_from(vllm_config: Any, platform: type, stack: InstalledStack, verdict: Verdict) -> EngineFacts:
    """Read the facts of one engine.

    Args:
        vllm_config: vLLM's `VllmConfig`, after the platform's `check_and_update_config`.
        platform: class of vLLM's current platform.
        stack: what is installed.
        verdict: whether it is as recorded, see `contract.verify`; with AFD, also whether afd-plugin is.
    """
    unread: list[str] = []
    config = _Reader("vllm_config", vllm_config, unread)
    model, cache = config.inner("model_config"), config.inner("cache_config")
    parallel, scheduler = config.inner("parallel_config"), config.inner("scheduler_config")
    drafting = config.optional("speculative_config")
    speculative = _Reader("vllm_config.speculative_config", _MISSING if drafting is None else drafting, unread)
    additional = config.read("additional_config", Mapping) or {}
    hf_config = model.inner("hf_config").call("to_dict").whole(Mapping) or {}
    geometry, geometry_error = _geometry(hf_config)
    afd = _afd(additional, hf_config, stack, unread)
    device = _device(unread)
    resolved = _module("vllm_ascend.ascend_config", unread).call("get_ascend_config")
    adapter = ADAPTERS.get((full_name(stack.name, stack.afd) if afd else stack.name) or "")
    return EngineFacts(
        stack=str(stack),
        stack_name=stack.name,
        worker_class=adapter.worker if adapter else None,
        covers=adapter.covers if adapter else frozenset(),
        drift=_drift(verdict),
        platform=f"{platform.__module__}.{platform.__qualname__}",
        device=device,
        model_type=_text(hf_config.get("model_type")),
        dtype=_dtype(model),
        geometry=geometry,
        geometry_error=geometry_error,
        afd=afd,
        worker_cls=parallel.read("worker_cls", str),
        kv_transfer=_kv_transfer(config, cache),
        prefix_caching=cache.read("enable_prefix_caching", bool),
        decode_context_parallel=parallel.read("decode_context_parallel_size", int),
        prefill_context_parallel=parallel.read("prefill_context_parallel_size", int),
        pipeline_parallel=parallel.read("pipeline_parallel_size", int),
        dsa_context_parallel=bool(additional.get("enable_dsa_cp", False)),
        model_runner_v2=config.read("use_v2_model_runner", bool),
        sleep_mode=model.read("enable_sleep_mode", bool),
        lora=_lora(config),
        policy=scheduler.read("policy", str),
        scheduler_cls=_scheduler_cls(scheduler, resolved.whole(object)),
        overlap=_overlap(resolved, vllm_config, unread),
        async_scheduling=scheduler.read("async_scheduling", bool),
        speculative_method=speculative.read("method", str),
        speculative_tokens=speculative.read("num_speculative_tokens", int) or 0,
        graphs=config.inner("compilation_config").inner("cudagraph_mode").read("name", str),
        ubatches=_ubatches(parallel, afd),
        native_tail=_native_tail(additional),
        max_num_seqs=scheduler.read("max_num_seqs", int),
        max_num_batched_tokens=scheduler.read("max_num_batched_tokens", int),
        block_size=cache.read("block_size", int),
        kernels=kernels_here(os.environ),
        unread=tuple(unread),
    )


def kernels_here(environment: Mapping[str, str]) -> KernelFacts:
    """The kernels of the afd executor that this machine has; it loads none."""
    try:
        found = library.find(environment)
    except InputError as error:
        return KernelFacts(backend=None, on_hardware=False, lacks=str(error))
    return KernelFacts(backend=found.backend, on_hardware=found.on_hardware, lacks=None)


class _Reader:
    """Reads attributes by their exact path and notes what is not there; behind a note it reads None."""

    def __init__(self, path: str, value: object, unread: list[str]) -> None:
        self._path, self._value, self._unread = path, value, unread

    def inner(self, name: str) -> _Reader:
        """A reader of an attribute that must be there."""
        return self._reader(name, self._get(name))

    def optional(self, name: str, absent: Any = None) -> Any:
        """An attribute that may be None, of any type; `absent` where there is none."""
        value = self._get(name)
        return absent if value is _MISSING else value

    def read(self, name: str, kind: type) -> Any:
        """An attribute of this type."""
        return self._reader(name, self._get(name)).whole(kind)

    def whole(self, kind: type) -> Any:
        """The value itself, where it is of this type; a bool is no int."""
        value = self._value
        if value is _MISSING:
            return None
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        self._unread.append(self._path)
        return None

    def call(self, name: str) -> _Reader:
        """A reader of what a function without arguments returns; one that raises is noted with what it said."""
        function = self._get(name)
        if function is not _MISSING and not callable(function):
            self._note(name)
            function = _MISSING
        try:
            value = _MISSING if function is _MISSING else function()
        except Exception as error:  # of another's function, which may raise anything
            self._note(f"{name}() ({type(error).__name__}: {error})")
            value = _MISSING
        return self._reader(f"{name}()", value)

    def _reader(self, name: str, value: object) -> _Reader:
        if value is None:
            self._note(name)
        return _Reader(f"{self._path}.{name}", _MISSING if value is None else value, self._unread)

    def _get(self, name: str) -> Any:
        if self._value is _MISSING:
            return _MISSING
        value = getattr(self._value, name, _MISSING)
        if value is _MISSING:
            self._note(name)
        return value

    def _note(self, name: str) -> None:
        self._unread.append(f"{self._path}.{name}")


def _drift(verdict: Verdict) -> tuple[str, ...]:
    if verdict.holds or verdict.name is None:
        return ()
    return verdict.reasons


def _geometry(hf_config: Mapping[str, Any]) -> tuple[ModelGeometry | None, str | None]:
    try:
        return from_hf_config(hf_config, "model"), None
    except InputError as error:
        return None, str(error)


def _dtype(model: _Reader) -> str | None:
    dtype = model.optional("dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _afd(
    additional: Mapping[str, Any], hf_config: Mapping[str, Any], stack: InstalledStack, unread: list[str]
) -> AfdFacts | None:
    """afd-plugin's mapping, its own keys or the aliases; a role that cannot be read is none that we know."""
    afd = additional.get("afd")
    if afd is None:
        return None
    if not isinstance(afd, Mapping):
        afd = {"role": afd}
    role = afd.get("role", afd.get("afd_role", "attention"))
    connector = afd.get("connector", afd.get("afd_connector", "P2pNcclAFDConnector"))
    reader = _Mapping('additional_config["afd"]', afd, unread)
    options = reader.read("connector_extra_config", Mapping, {})
    extra = _Mapping(f"{reader.path}.connector_extra_config", options, unread)
    cuts = connector == CAM_ASYNC and extra.read("async_moe_ubatching", bool, False)
    model = _Mapping("vllm_config.model_config.hf_config", hf_config, unread)
    pin = stack.afd
    return AfdFacts(
        role=role if isinstance(role, str) else reprlib.repr(role),
        connector=connector if isinstance(connector, str) else reprlib.repr(connector),
        asynchronous=reader.read("async_dp" if "async_dp" in afd else "async", bool, False),
        stages=extra.read("async_moe_num_ubatches", int, 2) if cuts else 1,
        split=extra.read("async_moe_split", str, "request"),
        dense=model.read("first_k_dense_replace", int, 0) if cuts else 0,
        plugin=f"commit {stack.afd_plugin_commit or 'unknown'}" if stack.afd_plugin else None,
        pin=pin.name if pin else None,
        lacks=pin.lacks if pin else None,
        not_loaded=tuple(name for name in _AFD_PATCHES if name not in sys.modules),
        model=_afd_model(),
    )


class _Mapping:
    """Reads entries of a mapping that may be missing; one of another type is noted, and read as None."""

    def __init__(self, path: str, values: Mapping[str, Any] | None, unread: list[str]) -> None:
        self.path, self._values, self._unread = path, values or {}, unread

    def read(self, name: str, kind: type, absent: Any) -> Any:
        value = self._values.get(name, absent)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        self._unread.append(f"{self.path}.{name}")
        return None


def _afd_model() -> str | None:
    """What vLLM makes a model of that has DeepSeek-V4's architecture as afd-plugin names it.

    `vllm/model_executor/models/registry.py:ModelRegistry`; a class by name is imported only where a model is made.
    """
    registry = getattr(sys.modules.get("vllm.model_executor.models.registry"), "ModelRegistry", None)
    found = getattr(registry, "models", {}).get(_AFD_ARCHITECTURE)
    if found is None:
        return None
    cls = getattr(found, "model_cls", None)  # of a class that was registered itself
    if cls is not None:
        return f"{cls.__module__}:{cls.__qualname__}"
    return f"{getattr(found, 'module_name', None)}:{getattr(found, 'class_name', None)}"


def _ubatches(parallel: _Reader, afd: AfdFacts | None) -> Any:
    """vLLM's own, or the stages of the asynchronous connector, which refuses vLLM's."""
    found = parallel.read("num_ubatches", int)
    return found if afd is None or found is None else max(found, afd.stages or 1)


def _kv_transfer(config: _Reader, cache: _Reader) -> str | None:
    """A connector, or the offloading that vLLM turns into one only after the platform has been asked."""
    transfer = config.optional("kv_transfer_config")
    if transfer is not None:
        return f"kv_transfer_config with {getattr(transfer, 'kv_connector', None)}"
    encoder = config.optional("ec_transfer_config")
    if encoder is not None:
        return f"ec_transfer_config with {getattr(encoder, 'ec_connector', None)}"
    size = cache.optional("kv_offloading_size")
    return None if size is None else f"kv_offloading_size {size}"


def _lora(config: _Reader) -> bool | None:
    """None where the configuration has no such attribute."""
    lora = config.optional("lora_config", absent=_MISSING)
    return None if lora is _MISSING else lora is not None


def _scheduler_cls(scheduler: _Reader, resolved: object) -> str | None:
    """A scheduler by name or class, or vllm-ascend's queue within vLLM's; None for vLLM's own."""
    found = scheduler.optional("scheduler_cls")
    if found is None:
        return _SHORT_FIRST if _short_first(resolved) else None
    name = found if isinstance(found, str) else f"{found.__module__}.{found.__qualname__}"
    return None if name in _OWN_SCHEDULERS else name


def _short_first(resolved: object) -> bool:
    """Whether short requests go first, which a vllm-ascend that has it puts into vLLM's scheduler without a name.

    `vllm_ascend/ascend_config.py:SchedulerConfig` of 80d8c194f; without asynchronous scheduling, see
    `patch_balance_schedule.py:BalanceScheduler.__init__`.
    """
    options = getattr(resolved, "scheduler_config", None)
    return bool(getattr(getattr(options, "short_request_first_config", None), "enabled", False))


def _device(unread: list[str]) -> Any:
    return _module("vllm_ascend.utils", unread).call("get_ascend_device_type").read("name", str)


def _overlap(resolved: _Reader, vllm_config: object, unread: list[str]) -> Any:
    """As vllm-ascend has resolved it for this very configuration; its default is on."""
    held = resolved.optional("vllm_config")
    if held is not None and held is not vllm_config:
        unread.append("vllm_ascend.ascend_config.get_ascend_config() of this engine")
        return None
    return resolved.read("multistream_dsv4_dsa_overlap", bool)


def _native_tail(additional: Mapping[str, Any]) -> bool:
    there = hasattr(sys.modules.get("vllm_ascend.ascend_config"), _NATIVE_TAIL_GATE)
    return there and bool(additional.get(_NATIVE_TAIL_KEY, False))


def _module(name: str, unread: list[str]) -> _Reader:
    if name not in sys.modules:
        unread.append(name)
    return _Reader(name, sys.modules.get(name, _MISSING), unread)
