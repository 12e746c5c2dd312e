# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Which protocol the tests drive: the double, or the commit's own classes where AFD_PLUGIN_PATH names a checkout.

Both are seen as one namespace. The commit's modules import vLLM and vllm-ascend of its pin, so that needs an
interpreter which has them; docs/compat.md says how to make one.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from afd_dsv4.softnpu import afd

VARIABLE = afd.CHECKOUT
NAMES = (
    "AFDConnectorFactory",
    "AFDConnectorBase",
    "CAMAsyncAFDConnector",
    "CAMP2pAFDConnector",
    "AFDConfig",
    "AFDTransferMetadata",
    "AFDTransferContext",
    "AFDA2FTransferPayload",
    "AFDF2ATransferPayload",
    "AFDControlPayload",
    "AFDDPMetadata",
    "AFDForwardContextMetadata",
    "plan_async_moe_stages",
    "AsyncMoeUbatchMetadata",
    "run_async_moe_ubatch_afd_forward",
    "run_attention_gate_afd_forward",
    "make_ubatch_contexts",
    "AscendUBatchWrapper",
    "AscendUbatchMetadata",
    "dbo_yield",
    "get_forward_context",
    "override_forward_context",
)


def double() -> SimpleNamespace:
    """The double's namespace."""
    from tests.afd import connectors, metadata, schedule, ubatching

    found: dict[str, Any] = {}
    for module in (metadata, schedule, ubatching, connectors):
        found |= {name: vars(module)[name] for name in NAMES if name in vars(module)}
    return SimpleNamespace(**found, of="the double")


def commit() -> SimpleNamespace:
    """The namespace of the checkout that AFD_PLUGIN_PATH names."""
    path = os.environ[VARIABLE]
    if path not in sys.path:
        sys.path.insert(0, path)
    for name in ("umdk_cam_op_lib", "afd_plugin._C_ascend"):  # their operators are the software NPU's own
        sys.modules.setdefault(name, ModuleType(name))
    from afd_plugin import config, connectors
    from afd_plugin.connectors import base, metadata
    from afd_plugin.connectors.npu import async_cam, camp2p
    from afd_plugin.model_executor.models.npu import async_cam_layout, deepseek_v2_async_cam_forward
    from afd_plugin.model_executor.npu import async_cam_ubatching
    from afd_plugin.v1.worker.npu import npu_ubatch_wrapper, ubatching
    from vllm import forward_context

    modules = (
        forward_context,
        config,
        base,
        metadata,
        connectors,
        async_cam,
        camp2p,
        async_cam_ubatching,
        async_cam_layout,
        deepseek_v2_async_cam_forward,
        ubatching,
        npu_ubatch_wrapper,
    )
    found: dict[str, Any] = {}
    for module in modules:
        found |= {name: getattr(module, name) for name in NAMES if hasattr(module, name)}
    return SimpleNamespace(**found, of="afd-plugin 85e826e")


def load() -> SimpleNamespace:
    """The commit's where a checkout is named, else the double's."""
    checkout = os.environ.get(VARIABLE)
    if not checkout:
        return double()
    afd.checkout_of(checkout)
    return commit()
