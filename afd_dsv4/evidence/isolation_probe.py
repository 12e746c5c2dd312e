# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Run as a program by isolation.py: does vLLM's own loader, loading the plugin, change any upstream object?

It imports the upstream modules that an integration could touch and remembers every attribute of every loaded upstream
module and class, and of vLLM's platform instance. Then, for each mode in a child of its own, forked where nobody has
loaded the plugin yet: vLLM loads the plugin and makes an engine configuration for a tiny DeepSeek-V4 (no weights), and
everything is compared by identity. What vLLM and vllm-ascend themselves set anew with every configuration is found out
before, without the plugin, and printed. It prints one JSON object. A program of its own, because a fair answer needs a
process in which nobody has patched anything yet.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

UPSTREAM = ("vllm", "vllm_ascend", "torch", "torch_npu", "transformers")

VLLM_MODULES = (
    "vllm.config",
    "vllm.forward_context",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.engine.core",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.request",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.ubatching",
    "vllm.v1.worker.worker_base",
)
ASCEND_MODULES = (
    "vllm_ascend.worker.worker",
    "vllm_ascend.worker.model_runner_v1",
    "vllm_ascend.worker.block_table",
    "vllm_ascend.ascend_forward_context",
    "vllm_ascend.attention.dsa_v1",
)

#: Everybody else's plugins, loaded first, so that what is left to see is ours.
OTHERS = "ascend,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling"
OWN = "afd_dsv4"
MODES = (None, "off", "afd", "colocated", "nonsense")
PLATFORM = "vllm.platforms.current_platform"
#: The attributes that the plugin sets, on vLLM's platform instance, the second where it is on (see plugin.py).
WATCHES = {f"{PLATFORM}.check_and_update_config", f"{PLATFORM}.validate_request"}
#: The loader's own flag flips when it loads.
LOADED = "vllm.plugins.plugins_loaded"

#: A DeepSeek-V4 with a layer of every kind and a draft layer, as small as its configuration may be.
MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 0],
    "max_position_embeddings": 16384,
    "sliding_window": 128,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 16,
    "num_nextn_predict_layers": 1,
}
#: A server in which nothing speaks against the plugin but a missing adapter.
SERVER: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "block_size": 128,
    "enforce_eager": True,
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "additional_config": {"multistream_dsv4_dsa_overlap": False},
}

#: Name of an attribute -> (value, kept alive so that an id cannot be reused).
Snapshot = dict[str, object]


def is_upstream(name: str) -> bool:
    """Whether a module belongs to a package that we must not change."""
    return name.split(".")[0] in UPSTREAM


def snapshot() -> Snapshot:
    """Every attribute of loaded upstream modules, of the classes that they define, and of vLLM's platform instance."""
    found: Snapshot = {f"{PLATFORM}.{key}": value for key, value in vars(platform()).items()}
    for name, module in sorted(sys.modules.items()):
        if not isinstance(module, ModuleType) or not is_upstream(name):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for member, inner in list(vars(value).items()):
                    found[f"{name}.{key}.{member}"] = inner
    return found


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    """Names that appeared, vanished or hold another object."""
    missing = object()
    names = before.keys() | after.keys()
    return sorted(name for name in names if before.get(name, missing) is not after.get(name, missing))


def platform() -> Any:
    """vLLM's platform."""
    return importlib.import_module("vllm.platforms").current_platform


def configure(model: str, arguments: Mapping[str, Any]) -> Any:
    """Make an engine configuration as `vllm serve` and `vllm.LLM` do."""
    from vllm.engine.arg_utils import EngineArgs

    merged = {**SERVER, **arguments}
    merged["additional_config"] = {**SERVER["additional_config"], **arguments.get("additional_config", {})}
    return EngineArgs(model=model, **merged).create_engine_config()


def load(mode: str | None) -> dict[str, Any]:
    """Let vLLM load the plugin in this mode, and say what came of it."""
    import vllm.plugins

    from afd_dsv4.plugin import state

    os.environ["VLLM_PLUGINS"] = OWN
    os.environ.pop("AFD_DSV4_MODE", None)
    if mode is not None:
        os.environ["AFD_DSV4_MODE"] = mode
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    platforms = vllm.plugins.load_plugins_by_group("vllm.platform_plugins")
    registered = state()
    assert registered is not None
    return {
        "platform_claimed": [name for name, function in platforms.items() if function() is not None],
        "platform_asked": sorted(platforms),
        "calls": registered.calls,
        "error": registered.error,
        "watching": registered.watching,
    }


def decided(model: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make a configuration beside the plugin, and say what came of it."""
    from afd_dsv4.plugin import state

    worker = additional = refusal = None
    try:
        made = configure(model, arguments)
        worker, additional = made.parallel_config.worker_cls, made.additional_config.get(OWN)
    except ValueError as error:
        refusal = str(error)
    found = state()
    assert found is not None
    decision = found.decision
    return {
        "worker": worker,
        "entered": additional,
        "raised": refusal,
        "error": found.error,
        "stack": found.stack,
        "active": bool(decision and decision.active),
        "refused": bool(decision and decision.refused),
        "reasons": list(decision.reasons) if decision else [],
    }


def observe(mode: str | None, model: str | None, ignored: set[str]) -> dict[str, Any]:
    """Load the plugin in one mode, make a configuration where there is a model, and compare everything."""
    before, modules = snapshot(), set(sys.modules)
    result = load(mode)
    if model:
        result["engine"] = decided(model, {})
    now = snapshot()
    result["watched"] = sorted(vars(platform()))
    result["changes"] = [name for name in changes(before, now) if name not in ignored]
    result["new_modules"] = sorted(name for name in set(sys.modules) - modules if is_upstream(name))
    return result


def decide_all(model: str, engines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Load the plugin once, and make one configuration after the other, all in this process."""
    load(None)
    return {name: decided(model, arguments) for name, arguments in engines.items()}


def loaded_by_worker(model: str) -> dict[str, Any]:
    """Let vLLM's own code load the plugin as a worker's process does: behind a configuration."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    made = _elsewhere(model)
    made.parallel_config.worker_cls = "builtins.dict"  # takes what a worker is given
    WorkerWrapperBase(rpc_rank=0).init_worker([{"vllm_config": made}])
    return _loaded()


def loaded_by_engine_core(model: str) -> dict[str, Any]:
    """The same as an engine core's process does; it ends where it would make its executor."""
    from vllm.v1.engine.core import EngineCore

    class NoExecutor(Exception):
        """Raised in place of one."""

        def __init__(self, *_: object) -> None:
            raise self

    try:
        EngineCore(_elsewhere(model), NoExecutor, log_stats=False)  # type: ignore[arg-type]
    except NoExecutor:
        return _loaded()
    raise AssertionError("the engine core came past its executor")


def _elsewhere(model: str) -> Any:
    """A configuration as it arrives from the process that made it, where the plugin is still to be loaded."""
    import vllm.plugins

    made = configure(model, {})
    os.environ["VLLM_PLUGINS"] = OWN
    vllm.plugins.plugins_loaded = False
    return made


def _loaded() -> dict[str, Any]:
    from afd_dsv4.plugin import state

    found = state()
    assert found is not None
    return {"calls": found.calls, "watching": found.watching, "error": found.error, "watched": sorted(vars(platform()))}


def plant() -> list[str]:
    """Patch upstream ourselves, once of each kind: what the comparison must see."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    before = snapshot()
    native = KVCacheManager.allocate_slots
    setattr(KVCacheManager, "allocate_slots", lambda *args, **kwargs: native(*args, **kwargs))  # noqa: B010
    sys.modules["vllm.v1.core.kv_cache_utils"].get_kv_cache_groups = None  # type: ignore[attr-defined]
    return changes(before, snapshot())


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process that is forked here and ends with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    """Load, compare, print. Arguments: `vllm` or `ascend`; optionally engines by name, as JSON, see `decide_all`."""
    with_ascend = sys.argv[1] == "ascend"
    engines = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    os.environ["VLLM_PLUGINS"] = OTHERS if with_ascend else OWN

    import vllm.plugins

    platform_name = type(platform()).__name__
    if not with_ascend:
        os.environ["VLLM_PLUGINS"] = "none"
    vllm.plugins.load_general_plugins()
    for name in VLLM_MODULES + (ASCEND_MODULES if with_ascend else ()):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = folder if with_ascend else None
        snapshot()  # touches lazy attributes, so that the first real one sees them settled
        theirs: set[str] = set()
        if model:
            for arguments in ({}, *engines.values()):
                configure(model, {key: value for key, value in arguments.items() if key != "additional_config"})
            before = snapshot()
            configure(model, {})
            theirs = set(changes(before, snapshot()))
        result = {
            "platform": platform_name,
            "compared": len(snapshot()),
            "theirs": sorted(theirs),
            "modes": {str(mode): in_child(observe, mode, model, theirs | WATCHES | {LOADED}) for mode in MODES},
            "engines": in_child(decide_all, model, engines) if model else {},
            "processes": {f.__name__: in_child(f, model) for f in (loaded_by_worker, loaded_by_engine_core) if model},
            "planted": in_child(plant),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
