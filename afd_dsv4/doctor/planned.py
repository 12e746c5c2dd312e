# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the gate would say to a configuration, before a server is started with it.

Problem: the gate speaks when a server starts, after minutes; and it asks vLLM's own configuration, which is not there.
Way: the options as vLLM names them, from a JSON file, a server's log or the environment, are turned into the gate's
facts, with vLLM's defaults where an option is left out. What cannot be known from here is assumed not to object, and is
listed: a "could be on" is only as good as that list.
Not here: the decision (`gate.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from afd_dsv4.compat.adapters import ADAPTERS, full_name
from afd_dsv4.config import Mode, Settings, read
from afd_dsv4.doctor.machine import Machine
from afd_dsv4.gate import (
    CAM_ASYNC,
    CUDA_ONLY,
    NATIVE_WORKER,
    NPU_PLATFORM,
    AfdFacts,
    Decision,
    EngineFacts,
    decide,
    off,
)
from afd_dsv4.geometry import InputError, ModelGeometry, preset

#: Settings of the plugin itself, which belong one level deeper.
_OUR_KEYS: Final = ("mode", "slots", "drafts", "fence_timeout_s")
_TRANSFERS: Final = ("kv_transfer_config", "ec_transfer_config", "kv_offloading_size")
_REMEDY: Final = 'give an object with the options of `vllm serve` by their names, such as {"max_num_seqs": 16}'


@dataclass(frozen=True)
class Planned:
    """What the gate says.

    Attributes:
        settings: of the plugin, None where they cannot be read.
        decision: None where the settings cannot be read.
        error: why not.
        assumed: what could not be known from here, and was taken not to object.
    """

    settings: Settings | None
    decision: Decision | None
    error: str | None = None
    assumed: tuple[str, ...] = ()


def options_of(text: str, name: str) -> dict[str, Any]:
    """Read a JSON file with the options of a server; `max-num-seqs` is `max_num_seqs`.

    Raises:
        InputError: no JSON object, or the plugin's own settings at the top.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"config {name!r}", f"is no JSON ({str(error)[:80]})", _REMEDY) from None
    if not isinstance(found, dict):
        raise InputError(f"config {name!r}", f"holds a JSON {type(found).__name__}", _REMEDY)
    if any(key in found for key in _OUR_KEYS):
        wrong = next(key for key in _OUR_KEYS if key in found)
        remedy = 'put it under {"additional_config": {"afd_dsv4": ...}}, as for vLLM'
        raise InputError(f"config {name!r}", f"has the plugin's own {wrong!r} among the options of vLLM", remedy)
    return {key.lstrip("-").replace("-", "_"): value for key, value in found.items()}


def plan(
    options: Mapping[str, Any],
    machine: Machine,
    environment: Mapping[str, str],
    geometry: ModelGeometry | None,
    *,
    max_num_batched_tokens: int | None,
    block_size: int | None,
    max_num_seqs: int | None,
) -> Planned:
    """Ask the gate.

    Args:
        options: of the server, empty where they are not known.
        machine: what is installed.
        environment: such as `os.environ`.
        geometry: the model, None where it is not known.
        max_num_batched_tokens, block_size, max_num_seqs: from wherever they are known.
    """
    additional = options.get("additional_config")
    if isinstance(additional, str):
        try:
            additional = json.loads(additional)
        except ValueError:
            return Planned(None, None, "additional_config: is no JSON; give an object")
    try:
        settings = read(additional, environment)
    except InputError as error:
        return Planned(None, None, str(error))
    if settings.mode is Mode.OFF:
        return Planned(settings, off("no other mode was asked for"))
    if machine.stack is None or not machine.has_vllm:
        return Planned(settings, None, "no vLLM on this machine, so it cannot be said whether the mode can be had")
    assumed: list[str] = []
    if geometry is None:
        assumed.append("the model is DeepSeek-V4-Flash")
    try:
        facts = EngineFacts(
            **_facts(options, additional if isinstance(additional, Mapping) else {}, machine, assumed),
            geometry=geometry or preset("flash"),
            max_num_batched_tokens=_or(max_num_batched_tokens, 8192, "max_num_batched_tokens", assumed),
            block_size=_or(block_size, 128, "block_size", assumed),
            max_num_seqs=_or(max_num_seqs, 16, "max_num_seqs", assumed),
        )
        return Planned(settings, decide(settings, facts), assumed=tuple(assumed))
    except TypeError as error:  # vLLM would refuse such an option, too
        return Planned(settings, None, f"options of vLLM: one has a type that cannot be ({error}); correct it")


def _facts(
    options: Mapping[str, Any],
    additional: Mapping[str, Any],
    machine: Machine,
    assumed: list[str],
) -> dict[str, Any]:
    assert machine.stack is not None
    stack, afd = machine.stack, _afd(additional, machine)
    adapter = ADAPTERS.get((full_name(stack.name, stack.afd) if afd else stack.name) or "")
    drafting = options.get("speculative_config") or {}
    drafting = drafting if isinstance(drafting, Mapping) else {}
    loaded = any(plugin.name == "ascend" and plugin.loaded for plugin in machine.plugins)
    transfer = next((key for key in _TRANSFERS if options.get(key)), None)
    stages = (afd.stages or 1) if afd else 1
    assumed += ["the device is an A2 or A3", "vLLM's second model runner and scheduler are not chosen elsewhere"]
    return {
        "stack": str(stack),
        "stack_name": stack.name,
        "worker_class": adapter.worker if adapter else None,
        "covers": adapter.covers if adapter else frozenset(),
        "drift": machine.verdict.reasons if machine.verdict and not machine.verdict.holds else (),
        "unread": (),
        "platform": NPU_PLATFORM if loaded else "none of vllm-ascend's, which is not loaded",
        "device": "A2",
        "model_type": "deepseek_v4",
        "geometry_error": None,
        "afd": afd,
        "worker_cls": _worker(options.get("worker_cls")),
        "kv_transfer": transfer,
        "prefix_caching": bool(options.get("enable_prefix_caching", True)),
        "decode_context_parallel": options.get("decode_context_parallel_size", 1),
        "prefill_context_parallel": options.get("prefill_context_parallel_size", 1),
        "pipeline_parallel": options.get("pipeline_parallel_size", 1),
        "dsa_context_parallel": bool(additional.get("enable_dsa_cp", False)),
        "model_runner_v2": False,
        "sleep_mode": bool(options.get("enable_sleep_mode", False)),
        "lora": bool(options.get("enable_lora", False)),
        "policy": options.get("scheduling_policy", "fcfs"),
        "scheduler_cls": options.get("scheduler_cls"),
        "overlap": bool(additional.get("multistream_dsv4_dsa_overlap", True)),
        "async_scheduling": options.get("async_scheduling") is not False,
        "speculative_method": drafting.get("method"),
        "speculative_tokens": drafting.get("num_speculative_tokens") or 0,
        "graphs": _graphs(options, assumed),
        "ubatches": max(2 if options.get("enable_dbo") else options.get("ubatch_size") or 0, stages),
        "native_tail": bool(additional.get("enable_dsv4_shared_compressor_workspace", False)),
    }


def _afd(additional: Mapping[str, Any], machine: Machine) -> AfdFacts | None:
    """afd-plugin's mapping, as `compat/facts.py` reads it in a process that has afd-plugin."""
    said = additional.get("afd")
    if said is None or machine.stack is None:
        return None
    afd = said if isinstance(said, Mapping) else {"role": said}
    extra = afd.get("connector_extra_config")
    extra = extra if isinstance(extra, Mapping) else {}
    connector = str(afd.get("connector", afd.get("afd_connector", "P2pNcclAFDConnector")))
    cuts = connector == CAM_ASYNC and bool(extra.get("async_moe_ubatching", False))
    pin = machine.stack.afd
    loaded = any(plugin.name == "afd" and plugin.loaded for plugin in machine.plugins)
    return AfdFacts(
        role=str(afd.get("role", afd.get("afd_role", "attention"))),
        connector=connector,
        asynchronous=bool(afd.get("async_dp", afd.get("async", False))),
        stages=extra.get("async_moe_num_ubatches", 2) if cuts else 1,
        split=extra.get("async_moe_split", "request"),
        dense=0,
        plugin=f"commit {machine.stack.afd_plugin_commit or 'unknown'}" if machine.stack.afd_plugin else None,
        pin=pin.name if pin else None,
        lacks=pin.lacks if pin else None,
        not_loaded=() if loaded else ("afd_plugin",),
        model=CUDA_ONLY if pin and not pin.lacks else None,
    )


def _graphs(options: Mapping[str, Any], assumed: list[str]) -> str:
    if options.get("enforce_eager"):
        return "NONE"
    compilation = options.get("compilation_config")
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, Mapping) else None
    if isinstance(mode, str):
        return mode.upper()
    assumed.append("no graphs, or FULL_DECODE_ONLY")
    return "NONE"


def _worker(given: object) -> str:
    return given if isinstance(given, str) and given != "auto" else NATIVE_WORKER


def _or(value: int | None, otherwise: int, name: str, assumed: list[str]) -> int:
    if value is None:
        assumed.append(f"{name} {otherwise:,}")
        return otherwise
    return value
