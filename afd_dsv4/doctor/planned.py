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
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NoReturn

from afd_dsv4.compat.adapters import ADAPTERS, full_name
from afd_dsv4.compat.facts import kernels_here
from afd_dsv4.config import Mode, Settings, named_once, read, switched_off
from afd_dsv4.doctor.machine import Machine
from afd_dsv4.gate import (
    ATTENTION,
    CAM_ASYNC,
    CUDA_ONLY,
    DEVICES,
    FCFS,
    FULL_DECODE_ONLY,
    NATIVE_WORKER,
    NO_GRAPHS,
    NPU_PLATFORM,
    AfdFacts,
    Decision,
    EngineFacts,
    decide,
    off,
)
from afd_dsv4.geometry import InputError, ModelGeometry, preset

#: Settings of the plugin itself, which belong one level deeper.
_OUR_KEYS: Final = tuple(field.name for field in fields(Settings))
#: Options that are counts: what is below 1 is not a server's.
_COUNTS: Final = ("max_num_batched_tokens", "max_num_seqs", "block_size", "num_gpu_blocks_override")
_TRANSFERS: Final = ("kv_transfer_config", "ec_transfer_config", "kv_offloading_size")
_REMEDY: Final = 'give an object with the options of `vllm serve` by their names, such as {"max_num_seqs": 16}'


@dataclass(frozen=True)
class Planned:
    """What the gate says.

    Attributes:
        settings: of the plugin, None where they cannot be read.
        decision: None where the settings cannot be read, or where nobody gave options and nothing else asks for a mode.
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
        InputError: no JSON object, the plugin's own settings at the top, or a count that is none.
    """
    try:
        found = json.loads(text, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"config {name!r}", f"cannot be read as JSON ({str(error)[:80]})", _REMEDY) from None
    if not isinstance(found, dict):
        raise InputError(f"config {name!r}", f"holds a JSON {type(found).__name__}", _REMEDY)
    try:
        options = named_once([(key.lstrip("-").replace("-", "_"), value) for key, value in found.items()])
    except ValueError as error:  # as of max-num-seqs and max_num_seqs
        raise InputError(f"config {name!r}", f"{error}, under one name or two", _REMEDY) from None
    for wrong in (key for key in _OUR_KEYS if key in options):
        remedy = 'put it under {"additional_config": {"afd_dsv4": ...}}, as for vLLM'
        raise InputError(f"config {name!r}", f"has the plugin's own {wrong!r} among the options of vLLM", remedy)
    for key in _COUNTS:
        value = options.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise InputError(f"config {name!r}", f"{key} is {reprlib.repr(value)}", "give a whole number of at least 1")
    return options


def plan(
    options: Mapping[str, Any] | None,
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
        options: of the server, None where they are not known.
        machine: what is installed.
        environment: such as `os.environ`.
        geometry: the model, None where it is not known.
        max_num_batched_tokens, block_size, max_num_seqs: from wherever they are known.
    """
    try:
        settings = read(_Options(options or {}, "").inner("additional_config").values, environment)
    except InputError as error:
        return Planned(None, None, str(error))
    if settings.mode is Mode.OFF and options is None and not switched_off(environment):
        return Planned(settings, None)
    if settings.mode is Mode.OFF:
        return Planned(settings, off("no other mode was asked for"))
    if machine.stack is None or not machine.has_vllm:
        return Planned(settings, None, "no vLLM on this machine, so it cannot be said whether the mode can be had")
    assumed: list[str] = []
    if geometry is None:
        assumed.append("the model is DeepSeek-V4-Flash")
    server = (
        _or(max_num_batched_tokens, 8192, "max_num_batched_tokens", assumed),
        _or(block_size, 128, "block_size", assumed),
        _or(max_num_seqs, 16, "max_num_seqs", assumed),
    )
    try:
        facts = _facts(options or {}, machine, environment, geometry or preset("flash"), server, assumed)
    except InputError as error:
        return Planned(settings, None, str(error))
    return Planned(settings, decide(settings, facts), assumed=tuple(assumed))


def _facts(
    options: Mapping[str, Any],
    machine: Machine,
    environment: Mapping[str, str],
    geometry: ModelGeometry,
    server: tuple[int, int, int],
    assumed: list[str],
) -> EngineFacts:
    """Every fact by name, so that one that is new is not forgotten here."""
    assert machine.stack is not None
    asked = _Options(options, "")
    additional = asked.inner("additional_config")
    drafting, compilation = asked.inner("speculative_config"), asked.inner("compilation_config")
    stack, afd = machine.stack, _afd(additional, machine)
    adapter = ADAPTERS.get((full_name(stack.name, stack.afd) if afd else stack.name) or "")
    loaded = any(plugin.name == "ascend" and plugin.loaded for plugin in machine.plugins)
    mode = compilation.text("cudagraph_mode")
    graphs = NO_GRAPHS if asked.flag("enforce_eager", False) else (mode or NO_GRAPHS).upper()
    worker = asked.text("worker_cls") or "auto"
    ubatches = 2 if asked.flag("enable_dbo", False) else asked.number("ubatch_size", 0)
    assumed += ["the device is an A2 or A3", "vLLM's second model runner is not chosen"]
    assumed += [f"no graphs but {FULL_DECODE_ONLY}"] * (graphs == NO_GRAPHS and not asked.flag("enforce_eager", False))
    batch, block_size, seqs = server
    return EngineFacts(
        stack=str(stack),
        stack_name=stack.name,
        worker_class=adapter.worker if adapter else None,
        covers=adapter.covers if adapter else frozenset(),
        drift=machine.verdict.reasons if machine.verdict and not machine.verdict.holds else (),
        unread=(),
        platform=NPU_PLATFORM if loaded else "none of vllm-ascend's, which is not loaded",
        device=DEVICES[0],
        model_type="deepseek_v4",
        dtype=_dtype(asked.text("dtype")),
        geometry=geometry,
        geometry_error=None,
        afd=afd,
        worker_cls=NATIVE_WORKER if worker == "auto" else worker,
        kv_transfer=next((key for key in _TRANSFERS if options.get(key)), None),
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
        async_scheduling=asked.flag("async_scheduling", True),
        speculative_method=drafting.text("method"),
        speculative_tokens=drafting.number("num_speculative_tokens", 0),
        graphs=graphs,
        ubatches=max(ubatches, (afd.stages or 1) if afd else 1),
        native_tail=additional.flag("enable_dsv4_shared_compressor_workspace", False),
        max_num_seqs=seqs,
        max_num_batched_tokens=batch,
        block_size=block_size,
        kernels=kernels_here(environment),
    )


def _dtype(asked: str | None) -> str:
    """As vLLM makes of it (vllm/config/model.py:_get_and_verify_dtype); checkpoints of this model are in bfloat16."""
    return {"half": "float16", "float": "float32", "auto": "bfloat16"}.get(asked or "auto", asked or "auto")


class _Options:
    """Reads options that may be missing, or null, for vLLM's default; one of another type is refused by name."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self._path = values, path

    def inner(self, name: str) -> _Options:
        value = self.values.get(name)
        if isinstance(value, str):  # as on a command line
            try:
                value = json.loads(value, object_pairs_hook=named_once)
            except (ValueError, RecursionError):
                self._refuse(name, value, "a JSON object, each name in it once")
        if value is not None and not isinstance(value, Mapping):
            self._refuse(name, value, "an object")
        return _Options(value or {}, f"{self._path}{name}.")

    def flag(self, name: str, otherwise: bool) -> bool:
        return bool(self._read(name, bool, otherwise))

    def number(self, name: str, otherwise: int) -> int:
        return int(self._read(name, int, otherwise))

    def text(self, name: str) -> str | None:
        value = self._read(name, str, "")
        return str(value) if value else None

    def _read(self, name: str, kind: type, otherwise: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            return otherwise
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            self._refuse(name, value, {bool: "true or false", int: "a whole number", str: "a text"}[kind])
        return value

    def _refuse(self, name: str, value: object, wanted: str) -> NoReturn:
        raise InputError(f"option {self._path}{name}", reprlib.repr(value), f"it must be {wanted}")


def _afd(additional: _Options, machine: Machine) -> AfdFacts | None:
    """afd-plugin's mapping, as `compat/facts.py` reads it in a process that has afd-plugin."""
    said = additional.values.get("afd")
    if said is None or machine.stack is None:
        return None
    afd = _Options(said if isinstance(said, Mapping) else {"role": said}, "additional_config.afd.")
    extra = afd.inner("connector_extra_config")
    connector = afd.text("connector") or afd.text("afd_connector") or "P2pNcclAFDConnector"
    cuts = connector == CAM_ASYNC and extra.flag("async_moe_ubatching", False)
    pin = machine.stack.afd
    loaded = any(plugin.name == "afd" and plugin.loaded for plugin in machine.plugins)
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
        not_loaded=() if loaded else ("afd_plugin",),
        model=CUDA_ONLY if pin and not pin.lacks else None,
    )


def _or(value: int | None, otherwise: int, name: str, assumed: list[str]) -> int:
    if value is None:
        assumed.append(f"{name} {otherwise:,}")
        return otherwise
    return value
