# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Runs an engine in two roles, as afd-plugin splits it: one Attention process with requests, and FFN processes.

Problem: what the plugin does in an Attention worker of afd-plugin's must be seen in the real engine; that needs the
other role beside it, a plugin that is installed nowhere, operators that ship as binaries, and a model of that commit
for an NPU, which it does not have.
Way: `run` makes a folder that declares a checkout of afd-plugin, and `register` here, as vLLM plugins, puts it before
the packages of every process, starts the FFN processes (`python -m afd_dsv4.softnpu.afd DESCRIPTION`), then runs the
Attention role as `engine.run` runs any engine. `register` makes the names of the binary packages importable, whose
operators the software NPU has, and registers `afd_model.py` for afd-plugin's architecture name. An FFN process serves
until its standard input ends, then stops as afd-plugin's engine core does, and says what it saw.
Not done: more than one Attention process (tensor parallel ranks are workers of it), FFN ranks with data parallelism.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from afd_dsv4.softnpu import engine

CHECKOUT = "AFD_PLUGIN_PATH"
ARCHITECTURE = "AFDDeepseekV4ForCausalLM"
MODEL = "afd_dsv4.softnpu.afd_model:SoftnpuDeepseekV4ForCausalLM"
POLL_S = 0.5
_DECLARED = """[vllm.general_plugins]
afd = afd_plugin:register_afd
afd_softnpu = afd_dsv4.softnpu.afd:register
"""


def register() -> None:
    """Entry point of `vllm.general_plugins` in the processes that `run` starts; safe to call again."""
    from afd_plugin import register_afd
    from vllm.model_executor.models import ModelRegistry

    for name in ("umdk_cam_op_lib", "afd_plugin._C_ascend"):  # their operators are the software NPU's own
        sys.modules.setdefault(name, types.ModuleType(name))
    register_afd()  # whichever entry point comes first, this model is the one that stays
    ModelRegistry.register_model(ARCHITECTURE, MODEL)


def checkout_of(path: str) -> str:
    """A checkout of afd-plugin, looked at before processes are started over it.

    Raises:
        FileNotFoundError: it is none.
    """
    if not (Path(path) / "afd_plugin" / "__init__.py").is_file():
        raise FileNotFoundError(f"{path!r} is no checkout of afd-plugin; name one in {CHECKOUT}, or unset that")
    return path


@contextlib.contextmanager
def declared(checkout: str) -> Iterator[dict[str, str]]:
    """A folder that declares the plugins; yields the environment of processes that are to find them."""
    with tempfile.TemporaryDirectory() as folder:
        about = Path(folder) / "afd_dsv4_softnpu_afd-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: afd-dsv4-softnpu-afd\nVersion: 0\n")
        (about / "entry_points.txt").write_text(_DECLARED)
        path = [folder, checkout, *filter(None, [os.environ.get("PYTHONPATH")])]
        # A capacity that suits small models; see kernels_ascendc/softnpu/npu/cam.cpp.
        yield {"BATCH_SIZE_FACTOR": os.environ.get("BATCH_SIZE_FACTOR", "0.01"), "PYTHONPATH": os.pathsep.join(path)}


def prepare(checkpoint: Path) -> None:
    """Say in a checkpoint's configuration that no layer is dense, which afd-plugin's FFN loop asks of every model."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "first_k_dense_replace": 0}))


def run(
    spec: Mapping[str, Any],
    afd: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
    python: str = sys.executable,
    checkout: str | None = None,
) -> dict[str, Any]:
    """Run a description in two roles.

    Args:
        spec: as of `engine.run`; its engine arguments are both roles'.
        afd: afd-plugin's mapping without role, host and port. "ffn_engine" in it: engine arguments of the FFN role
            over the others.
        environment: more variables for all processes.
        timeout_s: seconds until it is given up.
        python: the interpreter, of vllm 0.26.0 and vllm-ascend 80d8c194f.
        checkout: of afd-plugin; None takes AFD_PLUGIN_PATH.

    Returns:
        The result of the Attention role as of `engine.run`, and "ffn": what each FFN process said.

    Raises:
        engine.EngineError: a role ended with an error.
        KeyError: no checkout was given.
        FileNotFoundError: what was given is none.
    """
    given = {name: value for name, value in afd.items() if name != "ffn_engine"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        given |= {"host": "127.0.0.1", "port": free.getsockname()[1]}

    def of_role(role: str, more: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {**spec.get("engine", {}), **more}
        additional = {**arguments.get("additional_config", {}), "afd": {**given, "role": role}}
        return {**spec, "engine": {**arguments, "additional_config": additional}}

    with contextlib.ExitStack() as stack:
        found = stack.enter_context(declared(checkout_of(checkout or os.environ[CHECKOUT])))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = os.pathsep.join([str(engine.CHECKOUT), found["PYTHONPATH"]])
        variables = {**os.environ, **found, **(environment or {}), "PYTHONPATH": path}
        description = folder / "ffn.json"
        description.write_text(json.dumps(of_role("ffn", {"tensor_parallel_size": 1, **afd.get("ffn_engine", {})})))
        command = [python, "-m", "afd_dsv4.softnpu", "--", python, "-m", __name__, str(description)]
        said, noise = (stack.enter_context((folder / name).open("w+")) for name in ("said", "noise"))
        ffn = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, stderr=noise, env={**engine.QUIET, **variables}, text=True
        )
        stack.callback(ffn.wait)
        stack.callback(ffn.kill)  # whatever happens, it does not outlive this
        failed: engine.EngineError | None = None
        try:
            result = engine.run(of_role("attention", {}), {**found, **(environment or {})}, timeout_s, python)
        except (engine.EngineError, subprocess.TimeoutExpired) as error:
            failed = engine.EngineError(f"Attention role: {error}")
        assert ffn.stdin is not None
        with contextlib.suppress(OSError):
            ffn.stdin.close()
        try:
            ffn.wait(60)
        except subprocess.TimeoutExpired:
            ffn.kill()
            ffn.wait()
        noise.seek(0)
        if failed is not None or ffn.returncode:
            raise engine.EngineError(
                f"{failed or ''}\nFFN role: exit {ffn.returncode}: {noise.read()[-6000:]}"
            ) from failed
        said.seek(0)
        result["ffn"] = [json.loads(said.read().splitlines()[-1])]
        return result


def serve(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Be one FFN process: serve until standard input ends; say what was seen.

    Returns:
        "served": work items or steps by layer, "peak_device_bytes", "compressors": layers that own one, "ended": the
        error that ended its loop, as the other role's leaving does; None where it was told to stop.
    """
    for name, value in engine.QUIET.items():
        os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from afd_dsv4.softnpu import runtime

    load_general_plugins()
    arguments = EngineArgs(model=spec["checkpoint"], **{**engine.DEFAULTS, **spec.get("engine", {})})
    config = arguments.create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    worker = core.model_executor.driver_worker.worker
    served: dict[int, int] = {}
    compute = worker.model_runner.model.compute_ffn_output

    def counted(hidden_states: Any, layer_idx: int, **more: Any) -> Any:
        served[layer_idx] = served.get(layer_idx, 0) + 1
        return compute(hidden_states, layer_idx, **more)

    worker.model_runner.model.compute_ffn_output = counted
    core.model_executor.collective_rpc("start_ffn_server_loop")
    ended: str | None = None
    try:
        while not select.select([sys.stdin], [], [], POLL_S)[0] or sys.stdin.read(1):
            # As afd-plugin's engine core: an error of the loop is the end of the process.
            core.model_executor.collective_rpc("raise_ffn_loop_error_if_any")
        core.model_executor.collective_rpc("stop_ffn_server_loop")
    except RuntimeError as error:
        ended = str(error.__cause__ or error)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    return {
        "served": {str(layer): count for layer, count in sorted(served.items())},
        "compressors": sum(type(layer).__name__.endswith("CompressorStateCache") for layer in layers),
        "peak_device_bytes": runtime.device_peak_bytes(worker.local_rank),
        "ended": ended,
    }


def main(arguments: list[str]) -> int:
    """Be the FFN process of the description in a file; its last line is the result as JSON."""
    if len(arguments) != 1:
        print("usage: python -m afd_dsv4.softnpu -- python -m afd_dsv4.softnpu.afd SPEC.json", file=sys.stderr)
        return 2
    with contextlib.redirect_stdout(sys.stderr):
        result = serve(json.loads(Path(arguments[0]).read_text()))
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
