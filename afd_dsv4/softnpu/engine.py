# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Runs workloads through the real ``vllm.LLM`` in this process, and says what happened as one line of JSON.

Problem: whether two configurations of the engine (native and with the plugin, chunk sizes, schedulers, graphs) give the
same tokens must be seen in the engine that users run, one fresh process each.
Way: ``python -m afd_dsv4.softnpu -- python -m afd_dsv4.softnpu.engine SPEC.json`` reads a description, builds one
engine, drives ``LLMEngine.step`` itself so that arrivals and aborts have their step, and prints the result; ``run``
starts that and returns it. Everything else that the stack prints goes to stderr. The plugin is on where the
description's ``additional_config`` or the environment says so: nothing here knows about it.

The description: ``checkpoint`` (a folder), ``engine`` (arguments of vllm.LLM over DEFAULTS), ``workloads`` (each a list
of requests: ``id``, ``prompt`` as token ids, ``max_tokens``, and optionally the steps ``arrive`` and ``abort``),
``zero_state`` (numbers of workloads before whose every step the compressors' state is zeroed: a negative control),
``drafts`` ({request id: its expected tokens}: which drafts the scheduler is told, see ``_Drafts``), ``pattern``
(a string of "a" and "r": whether the draft of position i is to be accepted), ``races`` (true: with the race detector),
``replays`` (true: note every replay of a graph, see ``replays.py``), ``move_tables`` (number of a workload before which
the plugin's state tables are moved: a negative control of that).

The result: ``workloads`` (``tokens`` and ``logprobs`` by id; ``steps``; ``preemptions``; ``scheduled`` tokens of every
call of the scheduler; ``usage`` of the KV cache and ``waiting`` by reason after every step; ``stuck`` if nothing could
be scheduled any more; ``replays`` by worker, where asked for), ``num_gpu_blocks`` and their ``kv_bytes``, ``groups``,
``plugins`` that vLLM found, ``peak_device_bytes`` by worker, ``races``, ``seconds``.

Not done: sampling other than greedy; scheduler facts where the engine core runs in a process of its own.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 1500,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}
CHECKOUT = Path(__file__).resolve().parents[2]
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "SOFTNPU_HBM_MB": "2048",
}
"""The environment of an engine where the caller's has no say of its own."""
PLUGIN_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
KEYS = frozenset(
    {"checkpoint", "engine", "workloads", "zero_state", "drafts", "pattern", "races", "replays", "move_tables"}
)
"""What a description may have."""
STUCK_AFTER = 20
"""Steps in a row that run nothing and end nothing, with requests waiting."""


class EngineError(Exception):
    """The engine did not finish; the message has the end of what it printed."""


def run(
    spec: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
    python: str = sys.executable,
) -> dict[str, Any]:
    """Run a description in a fresh process on the software NPU, of as many devices as it has ranks.

    Args:
        spec: the description, see the module.
        environment: more variables for it.
        timeout_s: seconds until it is given up.
        python: the interpreter; this module need not be installed there.

    Raises:
        EngineError: it ended with an error.
        subprocess.TimeoutExpired: it did not end.
    """
    # The interpreter need not have this package.
    path = [str(CHECKOUT), *filter(None, [{**os.environ, **(environment or {})}.get("PYTHONPATH")])]
    devices = {"SOFTNPU_DEVICES": str(spec.get("engine", {}).get("tensor_parallel_size", 1))}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(dict(spec), file)
        file.flush()
        command = [python, "-m", "afd_dsv4.softnpu", "--", python, "-m", __name__, file.name]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env={**QUIET, **devices, **os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(path)},
        )
    if done.returncode:
        raise EngineError(f"exit {done.returncode}: {done.stderr[-6000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


class _Drafts:
    """Replaces what the drafter proposes: the expected token where the pattern says "a", another where it says "r".

    Without asynchronous scheduling the scheduler is told the drafts and hands them to the next step, so this decides
    which are accepted without a change to the model or to the sampler.
    """

    def __init__(self, core: Any, expected: Mapping[str, list[int]], pattern: str) -> None:
        self._take = core.model_executor.take_draft_token_ids
        self._requests = core.scheduler.requests
        self._expected = expected
        self._pattern = pattern
        core.model_executor.take_draft_token_ids = self

    def __call__(self) -> Any:
        drafts = self._take()
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True) if drafts else ():
            request = self._requests.get(name)
            # vLLM appends a dash and random letters to the name that a request was given.
            expected = self._expected.get(name.split("/", 1)[-1].rpartition("-")[0], [])
            for i in range(len(tokens)):
                position = request.num_output_tokens + i if request is not None else len(expected)
                if position < len(expected):
                    accepted = self._pattern[position % len(self._pattern)] == "a"
                    tokens[i] = expected[position] if accepted else (expected[position] + 1) % 100
        return drafts


def _zero_state(worker: Any) -> int:
    """Zero what the compressors keep of earlier tokens; return how many tensors that were."""
    from torch.utils._pytree import tree_leaves

    # The plugin's state layers hold stand-ins; its rows are in the pools of its tails.
    tails = getattr(worker.model_runner, "tails", None)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    states = [layer.kv_cache for layer in layers if type(layer).__name__.endswith("CompressorStateCache")]
    caches = tree_leaves(states) if tails is None else list(tails.pools.values())
    for cache in caches:
        cache.zero_()
    return len(caches)


def _peak_device_bytes(worker: Any) -> int:
    from afd_dsv4.softnpu import runtime

    return runtime.device_peak_bytes(worker.local_rank)


def _drive(llm: Any, core: Any, number: int, workload: list[dict[str, Any]], zero_state: bool) -> dict[str, Any]:
    """Run one workload to its end, or until nothing can be scheduled."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    scheduler = core.scheduler if core is not None else None
    preempted: list[str] = []
    scheduled: list[int] = []
    if scheduler is not None:
        preempt = type(scheduler)._preempt_request

        def counted(request: Any, *rest: Any, **named: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(scheduler, request, *rest, **named)

        scheduler._preempt_request = counted
        schedule = type(scheduler).schedule

        def noted(*rest: Any, **named: Any) -> Any:
            output = schedule(scheduler, *rest, **named)
            scheduled.append(output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = noted
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[float]] = {}
    usage: list[float] = []
    waiting: list[dict[str, int]] = []
    todo = sorted(workload, key=lambda request: request.get("arrive", 0))
    step = idle = zeroed = 0
    while todo or engine.has_unfinished_requests():
        while todo and todo[0].get("arrive", 0) <= step:
            request = todo.pop(0)
            sampling = SamplingParams(
                max_tokens=request["max_tokens"], temperature=0, logprobs=0, detokenize=False, ignore_eos=True
            )
            engine.add_request(f"{number}/{request['id']}", {"prompt_token_ids": request["prompt"]}, sampling)
        for request in workload:
            if request.get("abort") == step:
                engine.abort_request([f"{number}/{request['id']}"])
        if zero_state:
            zeroed += sum(llm.collective_rpc(_zero_state))
        outputs = engine.step()
        step += 1
        for output in outputs:
            name = output.request_id.split("/", 1)[-1]
            tokens[name] = list(output.outputs[0].token_ids)
            logprobs[name] = [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs]
        if scheduler is None:
            continue
        usage.append(round(scheduler.kv_cache_manager.usage, 5))
        waiting.append({"capacity": len(scheduler.waiting), "deferred": len(scheduler.skipped_waiting)})
        idle = 0 if outputs or scheduler.running or not engine.has_unfinished_requests() else idle + 1
        if idle == STUCK_AFTER:
            break
    stuck = idle == STUCK_AFTER
    if stuck:
        engine.abort_request([f"{number}/{request['id']}" for request in workload])
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "steps": step,
        "preemptions": len(preempted),
        "scheduled": scheduled,
        "usage": usage,
        "waiting": waiting,
        "stuck": stuck,
        "zeroed": zeroed,
    }


def import_stack() -> None:
    """Import vLLM, as an engine does first; no device is touched."""
    # Half a million objects of modules, never garbage: looking at them is a tenth of an engine's time.
    gc.disable()
    try:
        import vllm.compilation.counter  # noqa: F401
        from vllm import LLM  # noqa: F401

        from afd_dsv4.softnpu import replays  # noqa: F401

        gc.freeze()
    finally:
        gc.enable()


def execute(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run a description in this process, see the module."""
    if unknown := set(spec) - KEYS:
        raise ValueError(f"engine description: unknown {sorted(unknown)}; the module says what there is")
    start = time.perf_counter()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import_stack()
    from vllm import LLM
    from vllm.compilation.counter import compilation_counter

    from afd_dsv4.softnpu import replays, runtime

    llm = LLM(model=spec["checkpoint"], **{**DEFAULTS, **spec.get("engine", {})})
    built = time.perf_counter()
    # The engine core is there to be asked only where it runs in this process.
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if spec.get("drafts"):
        if core is None:
            raise EngineError("drafts: asked for with an engine core in another process; set no multiprocessing")
        _Drafts(core, spec["drafts"], spec.get("pattern", "a"))
    if spec.get("races"):
        runtime.set_race_detection(True)
    if spec.get("replays"):
        llm.collective_rpc(replays.watch)
    workloads = []
    for i, load in enumerate(spec["workloads"]):
        if i == spec.get("move_tables"):
            llm.collective_rpc(replays.move_tables)
        workloads.append(_drive(llm, core, i, load, i in spec.get("zero_state", ())))
        if spec.get("replays"):
            workloads[-1]["replays"] = llm.collective_rpc(replays.take)
    races = [str(race) for race in runtime.races()]
    config = core.scheduler.kv_cache_config if core is not None else None
    return {
        "workloads": workloads,
        "num_gpu_blocks": config.num_blocks if config else None,
        "kv_bytes": sum(tensor.size for tensor in config.kv_cache_tensors) if config else None,
        "plugins": sorted({point.name for group in PLUGIN_GROUPS for point in entry_points(group=group)}),
        "groups": [len(group.layer_names) for group in config.kv_cache_groups] if config else None,
        "peak_device_bytes": llm.collective_rpc(_peak_device_bytes),
        "captured": compilation_counter.num_cudagraph_captured,
        "races": races,
        "seconds": {"built": round(built - start, 1), "run": round(time.perf_counter() - built, 1)},
    }


def main(arguments: list[str]) -> int:
    """Print the result of the description in a file as one line of JSON."""
    if len(arguments) != 1:
        print("usage: python -m afd_dsv4.softnpu -- python -m afd_dsv4.softnpu.engine SPEC.json", file=sys.stderr)
        return 2
    with contextlib.redirect_stdout(sys.stderr):
        result = execute(json.loads(Path(arguments[0]).read_text()))
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
