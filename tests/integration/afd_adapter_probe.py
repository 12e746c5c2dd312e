# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Run as a program by test_adapter_afd.py, by the interpreter of (vllm 0.26.0, vllm-ascend 80d8c194f) with afd-plugin
85e826e on its path: what the plugin decides there, what it changes, and whether worker, runner and connector are made.

It prints one JSON object. What must not disturb anything else runs in forked children; the worker's device is made
ready in this process, at the end. Argument: the engines to decide on by name, as JSON (`isolation_probe.decide_all`).
PROBE_CONNECTOR names the connector that a worker is made with.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from afd_dsv4.evidence import isolation_probe as probe

probe.UPSTREAM = (*probe.UPSTREAM, "afd_plugin")  # type: ignore[assignment]  # longer
AFD_MODULES = (
    "afd_plugin.connectors.factory",
    "afd_plugin.connectors.npu.async_cam",
    "afd_plugin.connectors.npu.camp2p",
    "afd_plugin.v1.worker.npu.attention_model_runner",
    "afd_plugin.v1.worker.npu.attention_worker",
    "afd_plugin.v1.worker.npu.ffn_worker",
    "afd_plugin.v1.worker.npu.npu_ubatch_wrapper",
)
ARCHITECTURE = "AFDDeepseekV4ForCausalLM"


def mapping(connector: str, **values: Any) -> dict[str, Any]:
    """afd-plugin's configuration of one server."""
    found: dict[str, Any] = {"role": "attention", "connector": connector, "num_attention_ranks": 1, "num_ffn_ranks": 1}
    if connector == "CAMAsyncAFDConnector":
        found |= {"async": True, "compute_gate_on_attention": True}
    return found | values


def settle(model: str, arguments: Mapping[str, Any]) -> None:
    """Make a configuration natively: what afd-plugin patches, it patches now."""
    for connector in ("CAMAsyncAFDConnector", "CAMP2pAFDConnector"):
        probe.configure(model, {**arguments, "additional_config": {"afd": mapping(connector)}})
    probe.configure(model, arguments)


def observe(model: str, mode: str, afd: dict[str, Any] | None, ignored: set[str]) -> dict[str, Any]:
    """Load the plugin in one mode, make a configuration, compare everything; then once more behind `unwatch`."""
    from afd_dsv4 import plugin

    before = probe.snapshot()
    probe.load(mode)
    engine = probe.decided(model, {"additional_config": {"afd": afd} if afd else {}})
    ignored = ignored | probe.WATCHES | {probe.LOADED}
    found = [name for name in probe.changes(before, probe.snapshot()) if name not in ignored]
    plugin.unwatch()
    left = [name for name in probe.changes(before, probe.snapshot()) if name not in ignored]
    return {"engine": engine, "changes": found, "left": left}


def made(model: str, connector: str) -> dict[str, Any]:
    """Have vLLM make the worker that a configuration names, and make its device ready."""
    from afd_plugin.connectors.factory import AFDConnectorFactory
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    probe.load("afd")
    vllm_config = probe.configure(model, {"additional_config": {"afd": mapping(connector)}})
    named = vllm_config.parallel_config.worker_cls
    registry = dict(AFDConnectorFactory._registry)
    before = probe.snapshot()
    wrapper = WorkerWrapperBase(rpc_rank=0)
    address = get_distributed_init_method("127.0.0.1", get_open_port())
    arguments = {"local_rank": 0, "rank": 0, "distributed_init_method": address, "is_driver_worker": True}
    wrapper.init_worker([{"vllm_config": vllm_config, **arguments}])
    wrapper.init_device()
    worker: Any = wrapper.worker
    runner = worker.model_runner
    names = ("attention_worker.AFDNPUAttentionModelRunner", "attention_model_runner.AFDNPUAttentionModelRunner")
    result = {
        "named": named,
        "worker": [cls.__name__ for cls in type(worker).__mro__[:4]],
        "worker_cls": vllm_config.parallel_config.worker_cls,
        "runner": [cls.__name__ for cls in type(runner).__mro__[:4]],
        "connector": [cls.__name__ for cls in type(runner.connector).__mro__[:3]],
        "registry_is_as_before": AFDConnectorFactory._registry == registry,
        "names_are_as_before": [
            name
            for name in probe.changes(before, probe.snapshot())
            if name.startswith("afd_plugin") and name.endswith(names)
        ],
        "architectures": list(runner.model_config.hf_config.architectures),
        "bytes_before_the_model": runner.tail_bytes,
    }
    runner._afd_pending_metadata = runner._afd_async_moe_ubatch_metadata = runner.ubatch_slices = object()
    runner._forget()
    result["forgotten"] = [runner._afd_pending_metadata, runner._afd_async_moe_ubatch_metadata, runner.ubatch_slices]
    result["broken_off"] = _broken_off(runner)
    result["ends"] = _ends(worker, runner)
    result["initialized_at_the_end"] = runner.connector.is_initialized
    return result


def _broken_off(runner: Any) -> dict[str, Any]:
    """What a forward without requests, as dummy and profile runs are, leaves behind that fails once it has sent."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import override_forward_context

    found: dict[str, Any] = {}
    context = SimpleNamespace(
        attn_metadata=None,
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        ubatch_slices=None,
        additional_kwargs=None,
        flash_comm_v1_enabled=False,
        capturing=False,
    )
    item = SimpleNamespace(metadata=SimpleNamespace(layer_idx=4, stage_idx=0))

    def model(send: bool) -> Any:
        return lambda **_given: runner.connector.send_attn_output(None, item) if send else "computed"

    runner.launches, runner.tails = object(), _runtime(runner)
    runner._afd_pending_metadata, runner._afd_suppress_metadata_send = object(), True  # nobody is there to hear it
    for how, send in (("computes", False), ("sends", True), ("sends again", True), ("computes again", False)):
        runner.model = model(send)
        with override_forward_context(cast(Any, context)):
            try:
                found[how] = str(runner._model_forward(1))
            except RuntimeError as error:
                found[how] = str(error)
    runner.launches = runner.tails = runner.connector.refused = None
    runner.connector.unanswered.clear()
    return found


def _runtime(runner: Any) -> Any:
    """A small one."""
    from afd_dsv4.compressor.stock import StockRuntime
    from afd_dsv4.geometry import ModelGeometry, page_layout

    geometry, layout = ModelGeometry("small", 512, 1, (4,)), page_layout("vllm-ascend-80d8c194f", 32)
    return StockRuntime(
        geometry, layout, max_num_seqs=1, max_num_batched_tokens=8, device=runner.device, slots=1, drafts=0
    )


def _quarantine(runner: Any) -> None:
    """Leave the runner with a lease in doubt, as a forward does that has sent what it did not receive."""
    from afd_dsv4.tail.tables import RequestChunk, RequestId

    runner.tails = _runtime(runner)
    generation = runner.tails.mint()
    runner.tails.begin([RequestChunk(RequestId("a"), 0, 3)], generation=generation)
    runner.tails.abandon(generation, "planted")


def _ends(worker: Any, runner: Any) -> dict[str, dict[str, Any]]:
    """In which order what ends, and what is said of what is left, by what the close does and what else is in doubt."""
    import torch
    from vllm.logger import logger
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f_afd_85e826e import connectors
    from afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f_afd_85e826e import runner as adapter
    from afd_dsv4.softnpu import runtime as softnpu

    order: list[str] = []
    said: list[str] = []
    release = threading.Event()
    cls: Any = type(runner.connector).__mro__[2]
    native, engine, tails = cls.close, GPUModelRunner.shutdown, runner.close_tails
    listener = logging.Handler(logging.ERROR)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)

    def ended(what: str, then: Any, *arguments: Any) -> Any:
        order.append(what)
        return then(*arguments)

    def raises(_self: Any) -> None:
        raise RuntimeError("planted")

    def hangs(_self: Any) -> None:
        release.wait()

    found = {}
    stream = torch.npu.current_stream()
    runner.close_tails = lambda *given: ended("tails", tails, *given)
    for how, close in (
        ("returns", native),
        ("raises", raises),
        ("hangs", hangs),
        ("returns, with work queued", lambda _self: None),
        ("raises, with work queued", raises),
        ("returns, with a lease in doubt", lambda _self: None),
    ):
        cls.close = lambda self, close=close: ended("connector", close, self)
        once = engine if how == "returns" else lambda _self: None  # it ends once
        GPUModelRunner.shutdown = lambda self, once=once: ended("engine", once, self)  # type: ignore[method-assign]
        runner.connector._closing = None
        if queued := how.endswith("queued"):
            softnpu.hang_stream(stream)
            torch.ones(8, device=runner.device).add_(1)
        if how.endswith("doubt"):
            _quarantine(runner)
        # What does not come back does not, however short that is; what does, does in time.
        connectors.CLOSE_S = 0.05 if queued or how == "hangs" else 120.0  # type: ignore[misc]
        adapter.TAILS_S = 0.05  # type: ignore[misc]  # nothing of theirs runs
        order.clear()
        said.clear()
        worker.shutdown()
        if any("are left to the end" in line for line in said):
            worker.shutdown()  # what is left stays left
        found[how] = {"order": list(order), "left": [line for line in said if "are left to the end" in line]}
        if queued:
            softnpu.release_stream(stream)
            runner.connector._closing.join()
        runner.tails = None
    release.set()
    logger.removeHandler(listener)
    return found


def closed() -> dict[str, Any]:
    """How a connector of ours ends whose native one returns, raises, or does not come back; and how its forwards do."""
    import torch
    from afd_plugin.connectors.metadata import AFDTransferContext, AFDTransferMetadata
    from vllm import envs

    from afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f_afd_85e826e import connectors, runner
    from afd_dsv4.execution.boundary import Boundary

    waits = {"ours": connectors.CLOSE_S + runner.TAILS_S, "vLLM's": envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS}
    release = threading.Event()
    devices: list[int] = []
    looks: list[None] = []  # at what waits to be received

    def returns() -> None:
        devices.append(torch.accelerator.current_device_index())

    def raises() -> None:
        raise RuntimeError("planted")

    def hangs() -> None:
        release.wait()

    def connector(native: Any) -> Any:
        names = {
            "local_rank": 1,
            "close": lambda _self: native(),
            "_pending_attention_payloads": property(lambda _self: looks.append(None)),
            "send_attn_output": lambda _self, _hidden, _context: None,
            "recv_ffn_output": lambda _self, _reference, _ubatch: None,
        }
        return type("Ours", (connectors.WatchedMixin, type("Native", (), names)), {})()

    item = AFDTransferContext(
        metadata=AFDTransferMetadata.create_attention_metadata(layer_idx=4, stage_idx=0, seq_len=1)
    )
    found: dict[str, Any] = {}
    for native in (returns, raises, hangs):
        # The hang is definite, however short it is; the others end, in time.
        connectors.CLOSE_S = 0.05 if native is hangs else 120.0  # type: ignore[misc]
        ours = connector(native)
        with ours.whole():
            ours.send_attn_output(None, item)
            ours.recv_ffn_output(None)
        ours.close()
        ours.close()
        found[native.__name__] = ours.refused
        found[f"{native.__name__}, hangs"] = str(ours.hangs)
        if ours.refused:
            try:
                ours.send_attn_output(None, item)
            except RuntimeError as error:
                found[f"{native.__name__}, then sends"] = str(error)
    release.set()
    found["looks without audit"] = len(looks)
    ours = connector(returns)
    ours.audit = Boundary(None)
    ours.send_attn_output(None, item)
    return {**found, "devices": devices, "waits": waits, "looks": len(looks), "audited": ours.audit.calls}


def main() -> None:
    """Decide, compare, make, print."""
    engines: dict[str, dict[str, Any]] = json.loads(sys.argv[1])
    os.environ["VLLM_PLUGINS"] = probe.OTHERS

    import vllm.plugins

    probe.platform()
    attention = {
        "attention": {"additional_config": {"afd": mapping("CAMP2pAFDConnector"), "afd_dsv4": {"mode": "afd"}}}
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(probe.MODEL))
        vllm.plugins.load_general_plugins()
        without_afd = probe.in_child(probe.decide_all, folder, attention)
        os.environ["VLLM_PLUGINS"] = "afd"  # the others are not to be loaded twice
        vllm.plugins.plugins_loaded = False
        vllm.plugins.load_general_plugins()
        for name in (*probe.VLLM_MODULES, *probe.ASCEND_MODULES, *AFD_MODULES):
            importlib.import_module(name)
        from vllm.model_executor.models import ModelRegistry

        with_its_own_model = probe.in_child(probe.decide_all, folder, attention)
        ModelRegistry.register_model(ARCHITECTURE, "somebody.models:DeepseekV4")  # it is asked for by name only
        settle(folder, {})
        probe.snapshot()
        before = probe.snapshot()
        settle(folder, {})
        theirs = set(probe.changes(before, probe.snapshot()))
        cam = mapping("CAMAsyncAFDConnector")
        result = {
            "without_afd": without_afd["attention"],
            "with_its_own_model": with_its_own_model["attention"],
            "engines": probe.in_child(probe.decide_all, folder, engines),
            "theirs": sorted(theirs),
            "compared": len(before),
            "symbols": {
                name: probe.in_child(observe, folder, mode, afd, theirs)
                for name, mode, afd in (
                    ("off", "off", cam),
                    ("afd without AFD", "afd", None),
                    ("afd as FFN", "afd", {**cam, "role": "ffn"}),
                    ("afd", "afd", cam),
                )
            },
            "closed": closed(),
            "made": made(folder, os.environ["PROBE_CONNECTOR"]),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
