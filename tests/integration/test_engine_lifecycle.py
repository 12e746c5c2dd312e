# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the plugin does where an engine has no smooth life: starts that fail, engines beside each other in one process,
caches that are reset, steps that break off, requests that cannot be had.

One process plays all of it, since an engine is up in a second once vLLM is there; it is this module, run as a program.
Each engine is asked the same, and a native one says what is right.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from afd_dsv4.softnpu import checkpoint, engine

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = checkpoint.Geometry()
ANSWER = 6
#: The last ones need several steps for their prompts.
PROMPTS = [[(k * i) % 120 + 2 for i in range(length)] for k, length in ((3, 20), (5, 60), (7, 150))]
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = checkpoint.write(tmp_path_factory.mktemp("dsv4"), MODEL)
    command = [sys.executable, "-m", "afd_dsv4.softnpu", "--", sys.executable, __file__, str(folder)]
    environment = {**engine.QUIET, **os.environ, "SOFTNPU_WAIVE": ",".join(MODEL.waivers)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=850, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]
    found: Seen = json.loads(done.stdout.splitlines()[-1])
    return found


# A start that fails.


@pytest.mark.parametrize("step", ["load_model", "compile_or_warm_up_model"])
def test_a_start_that_fails_in_the_worker_leaves_nothing_behind_at_once(seen: Seen, step: str) -> None:
    assert seen["failed"][step] == {"raised": f"planted in {step}", "name": "true", "bound": 0, "applied": False}


def test_a_start_that_fails_outside_the_worker_leaves_nothing_behind_once_the_worker_is_collected(seen: Seen) -> None:
    before, after = seen["failed outside"]
    assert before["name"] == "ours"  # a worker that nobody has told, or there would be nothing to see
    assert after == {"raised": None, "name": "true", "bound": 0, "applied": False}


# Engines beside each other.


def test_engines_with_and_without_the_plugin_answer_alike_beside_each_other_in_one_process(seen: Seen) -> None:
    native = seen["native"]
    assert [len(tokens) for tokens in native] == [ANSWER] * len(PROMPTS)
    assert len({tuple(tokens) for tokens in native}) == len(PROMPTS), "equal answers would show nothing"
    assert seen["beside"] == {"first": native, "native": native, "second": native, "first again": native}
    assert seen["in turns"] == {"native": native, "first": native, "second": native}


def test_no_launch_of_a_native_engine_reaches_us_and_every_one_of_ours_does(seen: Seen) -> None:
    launches = seen["launches"]
    assert launches["native"]["all"] > 0 == launches["native"]["ours"]
    assert launches["first"]["all"] == launches["first"]["ours"] > 0


def test_a_launch_with_a_state_of_nobodys_is_refused_in_the_midst_of_a_forward_of_ours(seen: Seen) -> None:
    assert "a state that belongs to no layer of the model whose forward runs" in seen["stray"]


def test_the_operator_has_its_name_back_when_the_last_engine_with_the_plugin_has_ended(seen: Seen) -> None:
    one_left, none_left = seen["ended"]
    assert (one_left["name"], one_left["bound"]) == ("ours", 3)  # one a layer and kind
    assert none_left == {"raised": None, "name": "true", "bound": 0, "applied": False}
    assert seen["native at last"] == seen["native"]


# Memory.


def test_an_explicit_kv_size_is_the_kv_caches_alone_and_the_one_that_the_log_recommends_fits(seen: Seen) -> None:
    found = seen["recommended"]
    # Not less by the bytes of the tails, which the recommendation is without already.
    assert found["kv_bytes"] <= found["recommended"] < found["kv_bytes"] + 2 * found["block_bytes"]
    assert found["tail_bytes"] > 2 * found["block_bytes"], "so small that nobody would see them subtracted"
    assert found["kv_bytes"] + found["tail_bytes"] < found["in use"] < found["limit"]
    assert found["tokens"] == seen["native"]


def test_a_kv_size_that_does_not_fit_beside_the_tails_is_refused_with_every_figure(seen: Seen) -> None:
    text = seen["too much"]["raised"]
    assert text.startswith("kv_cache_memory_bytes is ")
    assert "of weights, tails and slots (of which tails and slots " in text
    assert (seen["too much"]["name"], seen["too much"]["bound"]) == ("true", 0)


# Requests that lose their place.


def test_a_reset_of_the_cache_under_running_requests_leaves_the_answers_as_they_are_natively(seen: Seen) -> None:
    assert seen["reset"]["ours"] == seen["reset"]["native"]
    assert seen["reset"]["preempted"] == len(PROMPTS)


def test_requests_that_begin_again_unannounced_get_new_tails_and_answer_right(seen: Seen) -> None:
    assert seen["unannounced"]["tokens"] == seen["reset"]["native"]
    assert seen["unannounced"]["restarted"] == len(PROMPTS)


def test_a_step_that_breaks_off_ends_its_requests_by_name_and_no_other(seen: Seen) -> None:
    broken = seen["broken"]
    assert broken["raised"] == "planted in a forward"
    assert "lost its tail: its step broke off with RuntimeError: planted in a forward" in broken["next"]
    assert broken["new raised"] == "planted in a forward"
    assert broken["amid raised"] == "planted behind a launch"
    assert broken["amid open"] == 0
    assert "lost its tail: its step broke off with RuntimeError: planted behind a launch" in broken["amid next"]
    assert broken["sampling raised"] == "planted in sampling"
    assert "lost its tail: its step broke off with RuntimeError: planted in sampling" in broken["sampling next"]
    # As many as there are tails: none of them may be lost.
    assert broken["afterwards"] == seen["native"]


def test_no_forward_runs_after_the_workers_end(seen: Seen) -> None:
    """The operator's name may be the true one's again, and the layers have one-cell states."""
    assert [says.split(";")[0] for says in seen["after the end"]] == ["a forward after the worker's end"] * 2


def test_streaming_input_is_refused_and_the_engine_goes_on(seen: Seen) -> None:
    assert seen["streaming"]["native"] is None
    assert seen["streaming"]["ours"].startswith("streaming input: ")
    assert seen["streaming"]["afterwards"] == seen["native"]


def test_two_graphs_with_equally_many_tokens_are_refused_since_one_slot_would_be_taken_for_the_other(
    seen: Seen,
) -> None:
    first, again, other = seen["graphs"]
    assert first == again == [4, False]
    assert "have equally many tokens, by which their slots are told apart" in other


# The process.


class Life:
    """What happens in it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.sees: Seen = {}
        import torch

        self.names = torch.ops._C_ascend
        # In a container: whoever holds the operator by value in a module gets ours.
        self.true = [self.names.compressor]

    def start(self, plugin: bool, **arguments: Any) -> Any:
        from vllm import LLM

        additional: dict[str, Any] = {"multistream_dsv4_dsa_overlap": False}
        if plugin:
            additional["afd_dsv4"] = {"mode": "colocated"}
        own = {
            "block_size": 32,
            "max_num_seqs": len(PROMPTS),
            "max_num_batched_tokens": 64,
            "max_model_len": 256,
            "gpu_memory_utilization": 0.25,
            "num_gpu_blocks_override": 200,
        }
        return LLM(model=self.folder, additional_config=additional, **{**engine.DEFAULTS, **own, **arguments})

    def state(self, raised: BaseException | None = None) -> Seen:
        """Who has the operator's name, and how much of ours is there."""
        from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0 import launches

        name = self.names.compressor
        owner = {id(self.true[0]): "true"}.get(id(name), "ours" if isinstance(name, launches.Operator) else "?")
        bound = len(launches._OWNERS)
        text = str(raised) if raised else None
        return {"raised": text, "name": owner, "bound": bound, "applied": launches._OPERATOR.applied}

    def fails(self, **arguments: Any) -> Seen:
        try:
            self.start(True, **arguments)
        except (RuntimeError, ValueError) as error:
            return self.state(error)
        raise AssertionError("the start did not fail")

    def play(self) -> Seen:
        for part in (self.memory, self.starts_that_fail, self.beside, self.losses):
            began = time.monotonic()
            part()
            print(f"{part.__name__}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        return self.sees

    def starts_that_fail(self) -> None:
        from vllm.v1.engine import core
        from vllm_ascend.worker.worker import NPUWorker

        self.sees["failed"] = {}
        for step in ("load_model", "compile_or_warm_up_model"):
            with replaced(NPUWorker, step, breaking_behind(getattr(NPUWorker, step), f"planted in {step}")):
                self.sees["failed"][step] = self.fails()
        with replaced(core, "get_kv_cache_configs", breaking_behind(None, "planted in the engine core")):
            before = self.fails()
        gc.collect()
        self.sees["failed outside"] = before, self.state()

    def beside(self) -> None:
        native = self.start(False)
        self.sees["native"] = ask(native)
        first = self.start(True)
        beside = self.sees["beside"] = {"first": ask(first), "native": ask(native)}
        second = self.start(True)
        beside |= {"second": ask(second), "first again": ask(first)}
        engines = {"native": native, "first": first, "second": second}
        asked = {name: asking(llm) for name, llm in engines.items()}
        while not all(query.over for query in asked.values()):
            for query in asked.values():
                query.step()
        self.sees["in turns"] = {name: query.tokens for name, query in asked.items()}
        self.sees["launches"] = {name: self.launches(engines[name]) for name in ("native", "first")}
        self.sees["stray"] = self.stray(runner_of(first))
        self.engines = native, first, second

    @staticmethod
    def launches(llm: Any) -> Seen:
        """How many launches of an engine there are, and how many of them are led to us."""
        from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.launches import Launches, Operator

        counted = {"all": 0, "ours": 0}

        def counting(whose: str, true: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                counted[whose] += 1
                return true(*args, **named)

            return call

        with (
            replaced(Operator, "__call__", counting("all", Operator.__call__)),
            replaced(Launches, "launch", counting("ours", Launches.launch)),
        ):
            ask(llm)
        return counted

    def stray(self, runner: Any) -> str:
        import torch

        nobodys = torch.zeros((1, 1, 1), device=runner.device)
        try:
            with runner.launches.idling(runner.tails):
                self.names.compressor(None, None, None, nobodys)
        except RuntimeError as error:
            return str(error)
        raise AssertionError("it was launched")

    def losses(self) -> None:
        native, first, second = self.engines
        self.sees["reset"] = {"native": reset_amid(native)[0]}
        self.sees["reset"]["ours"], self.sees["reset"]["preempted"] = reset_amid(first)
        self.sees["unannounced"] = unannounced(first)
        self.sees["broken"] = broken_step(first)
        self.sees["streaming"] = {"native": streaming(native), "ours": streaming(first), "afterwards": ask(first)}
        self.engines, left, self.sees["ended"] = (), [second, first], []
        del first, second
        while left:
            # As a script does that has no more use for one: vLLM's own shutdown would end the groups of all of them.
            left.pop()
            collect()
            self.sees["ended"].append(self.state())
        self.sees["native at last"] = ask(native)
        self.sees["graphs"] = graph_keys()
        native.llm_engine.engine_core.shutdown()

    def memory(self) -> None:
        import torch

        measured = self.start(True, num_gpu_blocks_override=None)
        worker = worker_of(measured)
        device = worker.device
        weights = worker.model_runner.model_memory_usage
        # As vllm-ascend's log has it (worker.py: compile_or_warm_up_model).
        recommended = (
            int(worker.requested_memory)
            - (weights + worker.peak_activation_memory + worker.non_torch_memory)
            - 150 * 2**20
        )
        measured.llm_engine.engine_core.shutdown()
        self.sees["after the end"] = [
            raised_by(partial(worker.model_runner._dummy_run, 1)),
            raised_by(partial(worker.model_runner._model_forward, 1)),
        ]
        watch = weakref.ref(worker)
        del measured, worker
        collect()
        assert watch() is None, "the next engine would not have this one's memory"
        torch.npu.empty_cache()
        llm = self.start(True, num_gpu_blocks_override=None, kv_cache_memory_bytes=recommended)
        found = sizes(llm) | {"recommended": recommended, "tail_bytes": runner_of(llm).tail_bytes}
        torch.npu.empty_cache()
        free, total = torch.npu.mem_get_info(device)
        found |= {"limit": int(total * 0.25), "in use": total - free}
        self.sees["recommended"] = found | {"tokens": ask(llm)}
        llm.llm_engine.engine_core.shutdown()
        self.sees["too much"] = self.fails(num_gpu_blocks_override=None, kv_cache_memory_bytes=total)


class Asking:
    """All prompts at one engine, step by step."""

    def __init__(self, llm: Any, number: int) -> None:
        from vllm import SamplingParams

        self._engine = llm.llm_engine
        self._found: dict[str, list[int]] = {}
        greedy = SamplingParams(max_tokens=ANSWER, temperature=0, detokenize=False, ignore_eos=True)
        self.names = [f"{number}/{i}" for i in range(len(PROMPTS))]
        for name, prompt in zip(self.names, PROMPTS, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, greedy)

    @property
    def over(self) -> bool:
        return not self._engine.has_unfinished_requests()

    def step(self) -> None:
        for output in self._engine.step() if not self.over else ():
            self._found[output.request_id] = list(output.outputs[0].token_ids)

    @property
    def tokens(self) -> list[list[int]]:
        return [self._found[name] for name in self.names]


_asked: list[str] = []


def asking(llm: Any) -> Asking:
    _asked.append("")
    return Asking(llm, len(_asked))


def ask(llm: Any) -> list[list[int]]:
    query = asking(llm)
    while not query.over:
        query.step()
    return query.tokens


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def worker_of(llm: Any) -> Any:
    return core_of(llm).model_executor.driver_worker.worker


def runner_of(llm: Any) -> Any:
    return worker_of(llm).model_runner


def reset_amid(llm: Any) -> tuple[list[list[int]], int]:
    """Take every running request's blocks away amid its answers; the answers, and how many requests that were."""
    query, scheduler = asking(llm), core_of(llm).scheduler
    for _ in range(4):
        query.step()
    running = len(scheduler.running)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    while not query.over:
        query.step()
    return query.tokens, running


def unannounced(llm: Any) -> Seen:
    """The same where the runner is not told who was preempted."""
    steps, found = runner_of(llm)._steps, []
    end, restarted = steps.end, steps.restarted

    def finished_only(*, finished: Any = (), **_: Any) -> Any:
        return end(finished=finished)

    def heard(*given: Any) -> Any:
        again = restarted(*given)
        found.extend(again)
        return again

    with replaced(steps, "end", finished_only), replaced(steps, "restarted", heard):
        tokens, _ = reset_amid(llm)
    return {"tokens": tokens, "restarted": len(found)}


def broken_step(llm: Any) -> Seen:
    """A forward that breaks off amid a prompt, then one of requests that are new."""
    runner, found = runner_of(llm), {}
    query = asking(llm)
    for _ in range(2):
        query.step()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted in a forward")

    with replaced(runner, "_model_forward", broken):
        found["raised"] = raised_by(query.step)
    found["next"] = raised_by(query.step)
    llm.llm_engine.abort_request(query.names)
    query = asking(llm)
    with replaced(runner, "_model_forward", broken):
        found["new raised"] = raised_by(query.step)
    llm.llm_engine.abort_request(query.names)

    launched, queue = [], runner.tails._operator

    def second_breaks(*args: Any, **named: Any) -> Any:
        launched.append(args)
        if len(launched) == 2:
            raise RuntimeError("planted behind a launch")
        return queue(*args, **named)

    query = asking(llm)
    query.step()
    with replaced(runner.tails, "_operator", second_breaks):
        found["amid raised"] = raised_by(query.step)
    found["amid open"] = len(runner.tails._open)
    found["amid next"] = raised_by(query.step)
    llm.llm_engine.abort_request(query.names)

    def sampling_breaks(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted in sampling")

    query = asking(llm)
    query.step()
    with replaced(runner, "_sample", sampling_breaks):
        found["sampling raised"] = raised_by(query.step)
    found["sampling next"] = raised_by(query.step)
    llm.llm_engine.abort_request(query.names)
    return found | {"afterwards": ask(llm)}


def graph_keys() -> list[Any]:
    """A graph's key, the same again, and one of another graph of as many tokens."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import BatchDescriptor
    from vllm_ascend.compilation.acl_graph import ACLGraphWrapper

    from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.runner import AfdDsv4Runner

    runner = object.__new__(AfdDsv4Runner)  # all that is asked of it are its graphs
    runner._graphs, runner.model = {}, object.__new__(ACLGraphWrapper)
    runner.model.concrete_aclgraph_entries = {}

    def key(*descriptor: Any) -> Any:
        full = CUDAGraphMode.FULL
        return runner._graph(
            SimpleNamespace(cudagraph_runtime_mode=full, batch_descriptor=BatchDescriptor(*descriptor))
        )

    return [key(4, 4, True), key(4, 4, True), raised_by(lambda: key(4, 2, True))]


def streaming(llm: Any) -> str | None:
    from vllm import SamplingParams

    processor = llm.llm_engine.input_processor
    given = {"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=1), ("generate",)
    assert processor.process_inputs("whole", *given).prompt_token_ids == PROMPTS[0]
    try:
        assert processor.process_inputs("a part", *given, resumable=True).resumable
    except ValueError as error:
        return str(error)
    return None


def sizes(llm: Any) -> Seen:
    config = core_of(llm).scheduler.kv_cache_config
    found = sum(tensor.size for tensor in config.kv_cache_tensors)
    return {"kv_bytes": found, "block_bytes": found // config.num_blocks}


def collect() -> None:
    gc.unfreeze()  # vLLM keeps the collector away from all that was there when an engine was ready
    gc.collect()


def raised_by(step: Callable[[], object]) -> str:
    try:
        step()
    except Exception as error:
        return str(error)
    raise AssertionError("nothing was raised")


def breaking_behind(first: Callable[..., Any] | None, text: str) -> Callable[..., Any]:
    def breaking(*args: Any, **named: Any) -> Any:
        if first is not None:
            first(*args, **named)
        raise RuntimeError(text)

    return breaking


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is None else setattr(owner, name, before)


def main() -> int:
    with contextlib.redirect_stdout(sys.stderr):
        import vllm_ascend.worker.worker  # noqa: F401  # its operators are there then

        found = Life(sys.argv[1]).play()
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
