# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Run as a program by isolation.py: does vLLM's own loader, loading the plugin, change any upstream object?

It imports the upstream modules that an integration could touch, remembers every attribute of every loaded upstream
module and class, lets vLLM load the plugin under each mode, and compares by identity. It prints one JSON object. A
program of its own, because a fair answer needs a process in which nobody has patched anything yet.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import ModuleType

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

#: Name of an attribute -> (value, kept alive so that an id cannot be reused).
Snapshot = dict[str, object]


def is_upstream(name: str) -> bool:
    """Whether a module belongs to a package that we must not change."""
    return name.split(".")[0] in UPSTREAM


def snapshot() -> Snapshot:
    """Every attribute of every loaded upstream module, and of the classes that these modules define."""
    found: Snapshot = {}
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


def main() -> None:
    """Load, compare, print."""
    with_ascend = sys.argv[1] == "ascend"
    own = "afd_dsv4"
    # Everybody else's plugins first, so that what is left to see is ours.
    others = "ascend,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling"
    os.environ["VLLM_PLUGINS"] = others if with_ascend else "none"

    import vllm.plugins
    from vllm.platforms import current_platform

    platform_name = type(current_platform).__name__
    vllm.plugins.load_general_plugins()
    for name in VLLM_MODULES + (ASCEND_MODULES if with_ascend else ()):
        importlib.import_module(name)

    os.environ["VLLM_PLUGINS"] = own
    snapshot()  # touches lazy attributes, so that the first real one sees them settled
    # The loader's own flag flips when it loads; nothing else may.
    ignored = {"vllm.plugins.plugins_loaded"}
    result: dict[str, object] = {"platform": platform_name, "modes": {}, "compared": len(snapshot())}
    for mode in (None, "off", "afd", "colocated", "nonsense"):
        os.environ.pop("AFD_DSV4_MODE", None)
        if mode is not None:
            os.environ["AFD_DSV4_MODE"] = mode
        before, modules = snapshot(), set(sys.modules)
        vllm.plugins.plugins_loaded = False
        vllm.plugins.load_general_plugins()
        platforms = vllm.plugins.load_plugins_by_group("vllm.platform_plugins")
        from afd_dsv4.plugin import state

        registered = state()
        assert registered is not None
        result["modes"][str(mode)] = {  # type: ignore[index]
            "platform_claimed": [name for name, function in platforms.items() if function() is not None],
            "platform_asked": sorted(platforms),
            "calls": registered.calls,
            "error": registered.error,
            "refused": bool(registered.decision and registered.decision.refused),
            "changes": [name for name in changes(before, snapshot()) if name not in ignored],
            "new_modules": sorted(name for name in set(sys.modules) - modules if is_upstream(name)),
        }

    # The checker must see a patch: plant one of each kind.
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    before = snapshot()
    native = KVCacheManager.allocate_slots
    setattr(KVCacheManager, "allocate_slots", lambda *args, **kwargs: native(*args, **kwargs))  # noqa: B010
    sys.modules["vllm.v1.core.kv_cache_utils"].get_kv_cache_groups = None  # type: ignore[attr-defined]
    result["planted"] = changes(before, snapshot())
    print(json.dumps(result))


if __name__ == "__main__":
    main()
