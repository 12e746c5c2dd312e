# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Where the double differs from the checkout that AFD_PLUGIN_PATH names: prints a JSON list, empty if nowhere.

Compared: fields and defaults of dataclasses, signatures of methods and functions, what the planner answers, and the
bytes of control payloads. What threads and schedules do is compared by running both (`world.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
from typing import Any

import torch

from tests.afd import connectors, metadata, protocol, schedule, ubatching

DATACLASSES = {
    metadata: (
        "AFDTransferMetadata AFDTransferContext AFDA2FTransferPayload AFDF2ATransferPayload AFDControlPayload "
        "AFDDPMetadata AFDForwardContextMetadata"
    ),
    schedule: "AsyncMoeStage AsyncMoeUbatchMetadata",
    connectors: "AFDAsyncTransferState AFDAsyncFFNWorkItem CAMP2PTransferState AFDAsyncExtraInfo CAMP2PExtraInfo",
}
CLASSES = {
    connectors: "AFDConnectorBase AFDControlPlane AFDConnectorFactory CAMAsyncAFDConnector CAMP2pAFDConnector",
    ubatching: "AscendUBatchContext",
}
FUNCTIONS = {
    metadata: "encode_control_payload decode_control_payload",
    connectors: "build_async_topology",
    schedule: "plan_async_moe_stages run_async_moe_ubatch_afd_forward run_attention_gate_afd_forward",
    ubatching: "make_ubatch_contexts dbo_enabled dbo_current_ubatch_id dbo_current_stream dbo_set_stream",
}


def theirs(name: str) -> Any:
    """A name of the commit, wherever it is."""
    from afd_plugin import connectors as package
    from afd_plugin.connectors import base, factory
    from afd_plugin.connectors import metadata as transfers
    from afd_plugin.connectors.npu import async_cam, camp2p
    from afd_plugin.model_executor.models.npu import async_cam_layout, deepseek_v2_async_cam_forward
    from afd_plugin.model_executor.npu import async_cam_ubatching
    from afd_plugin.v1.worker.npu import ubatching as contexts

    modules = (package, base, factory, transfers, async_cam, camp2p, async_cam_ubatching, async_cam_layout)
    for module in (*modules, deepseek_v2_async_cam_forward, contexts):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(name)


def parameters(function: Any) -> list[tuple[str, str, str]]:
    """Names, kinds and defaults."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind.name, repr(p.default)) for p in found]


def differences() -> list[str]:
    """Everything that differs, in words."""
    found = []

    def compare(what: str, mine: object, other: object) -> None:
        if mine != other:
            found.append(f"{what}: the double has {mine}, the commit {other}")

    def pairs(table: dict[Any, str]) -> Any:
        return [
            (name, getattr(module, name), theirs(name)) for module, names in table.items() for name in names.split()
        ]

    for name, mine, other in pairs(DATACLASSES):
        compare(name, *([(f.name, repr(f.default)) for f in dataclasses.fields(cls)] for cls in (mine, other)))
    for name, mine, other in pairs(FUNCTIONS):
        compare(name, parameters(mine), parameters(other))
    for name, mine, other in pairs(CLASSES):
        for method, value in vars(mine).items():
            if callable(getattr(mine, method)) and hasattr(value, "__get__") and not method.startswith("_abc"):
                if method.startswith("_") and method not in vars(other):
                    continue  # a helper of the double
                compare(f"{name}.{method}", parameters(getattr(mine, method)), parameters(getattr(other, method)))
    rng = random.Random(0)
    for _ in range(500):
        tokens = [rng.randint(1, 9) for _ in range(rng.randint(1, 6))]
        how = {
            "split": rng.choice(["token", "request"]),
            "use_sequence_parallel": rng.random() < 0.5,
            "tensor_parallel_size": rng.choice([1, 2, 4]),
        }
        plans = [plan(tokens, **how) for plan in (schedule.plan_async_moe_stages, theirs("plan_async_moe_stages"))]
        compare(f"plan of {tokens} {how}", *([*map(dataclasses.astuple, plan)] if plan else None for plan in plans))
    for _ in range(20):
        counts = {stage: torch.tensor([rng.randint(0, 99) for _ in range(3)]) for stage in range(rng.randint(1, 2))}
        flags = rng.random() < 0.5, rng.random() < 0.5
        wires = [
            of("encode_control_payload")(
                of("AFDControlPayload")({s: of("AFDDPMetadata")(c) for s, c in counts.items()}, *flags)
            )
            for of in (lambda name: getattr(metadata, name), theirs)
        ]
        compare("control payload", *wires)
    return found


if __name__ == "__main__":
    from afd_dsv4.softnpu import runtime

    runtime.install()
    protocol.commit()
    print(json.dumps(differences()))
