# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The real engine, natively and with the plugin: same tokens, and a batch that native cannot admit.

Problem: that rows and tables are right is shown elsewhere; an operator asks whether the server says the same words, and
whether the long prompt starts.
Way: the real vllm.LLM with vllm-ascend serves a small random DeepSeek-V4, each configuration in two fresh processes,
one native, one with the plugin, with the same random workloads, and every token is compared. In batch-invariant mode a
token does not depend on what else is in its batch, so that two schedules may differ. Then one batch of 32,768 tokens,
where native has as many bytes for its KV cache as the plugin has for KV cache, tails and slots together: with few of
them native does not even start, with more it keeps the prompt waiting while others run.
And the same tokens, whether the plugin is off, refused or not installed (untouched.py).
As a negative control the same comparison runs with the plugin's tails zeroed between steps, and must fail.
Not here: sampling other than greedy; what only a device can show: the model is small, its state sizes are real.

    python -m afd_dsv4.evidence.engine
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Semaphore
from typing import Any

from afd_dsv4.config import MODE_VARIABLE
from afd_dsv4.evidence import untouched
from afd_dsv4.geometry import from_hf_config, page_layout
from afd_dsv4.softnpu import checkpoint, engine
from afd_dsv4.workspace.sizing import WorkspaceSizes, size_workspace

STACK = "vllm-ascend-0.23.0"
SEED = 20261130
INVARIANT = {"AFD_DSV4_SOFTNPU_BATCH_INVARIANT": "1"}
BLOCK = 128
#: With vllm-ascend 0.23.0's second stream native runs differ among themselves: a tensor that the second stream still
#: reads is freed (AscendDSAImpl.cv_indexer_select_qli); the race detector of the software NPU names both operators.
ONE_STREAM = {"multistream_dsv4_dsa_overlap": False}
#: Prompt lengths around the ends of windows and pages, drawn as often as any other.
EDGES = (1, 3, 4, 5, 31, 32, 33, 127, 128, 129, 255, 256, 257)
LONG_TOKENS = 32_768
#: Fewer blocks than native needs for them by its start-up check, and more than the plugin does.
FEW_BLOCKS = 2_000
#: Just enough for native to start: a few other requests, and the prompt waits.
ENOUGH_BLOCKS = 6_000
OTHERS = 8
#: The same in small, for `make demo`: tokens, blocks, others; the second where the demo's own batch is smaller still.
DEMOS = ((4096, 765, 3), (1024, 210, 3))
#: One block id over all layers: one page of an indexer, one of an attention cache (block size 128).
BLOCK_BYTES = 16_640 + 131_072
LONG_HBM = {"SOFTNPU_HBM_MB": "8192"}
REFUSAL = "To serve at least one request with the model's max seq len"  # vllm/v1/core/kv_cache_utils.py


@dataclass(frozen=True)
class Configuration:
    """One way to configure the engine, and the load that fits it.

    Attributes:
        name: for people.
        engine: arguments of vllm.LLM, over the driver's own.
        native: more of them for the native engine: it needs more blocks for the same requests.
        requests: most requests of a workload.
        longest: longest prompt.
        answer: most new tokens of a request.
        aborts: whether requests are aborted.
        drafts: which drafts are to be accepted, "a" or "r" by position; None for no speculation.
        preempts: whether the plugin's engine must have preempted, or the configuration proves nothing.
        environment: of both engines, besides.
    """

    name: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    native: Mapping[str, Any] = field(default_factory=dict)
    requests: int = 6
    longest: int = 500
    answer: int = 12
    aborts: bool = False
    drafts: str | None = None
    preempts: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


_GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
_MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}

CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration("eager, chunks of 64", {"max_num_batched_tokens": 64}, longest=300),
    Configuration("eager, chunks of 256", {"max_num_batched_tokens": 256}),
    Configuration(
        "eager, chunks of 2048, 16 requests",
        {"max_num_batched_tokens": 2048, "max_num_seqs": 16, "max_model_len": 2304},
        requests=16,
        longest=2000,
        answer=6,
    ),
    Configuration("requests aborted", {"max_num_batched_tokens": 128}, aborts=True),
    Configuration(
        "requests preempted",
        {
            "max_num_batched_tokens": 128,
            "block_size": 32,
            "max_model_len": 256,
            "max_num_seqs": 6,
            "num_gpu_blocks_override": 40,
        },
        {"num_gpu_blocks_override": 1500},
        requests=10,
        longest=160,
        answer=48,
        preempts=True,
    ),
    Configuration("asynchronous scheduling", {"max_num_batched_tokens": 256, "async_scheduling": True}),
    Configuration(
        "asynchronous scheduling, requests aborted",
        {"max_num_batched_tokens": 64, "async_scheduling": True},
        longest=300,
        aborts=True,
    ),
    Configuration("blocks of 32", {"max_num_batched_tokens": 512, "block_size": 32}),
    Configuration("MTP, drafts as they come", {**_MTP, "max_num_batched_tokens": 256}),
    Configuration("MTP, every other draft accepted", {**_MTP, "max_num_batched_tokens": 256}, drafts="ar"),
    Configuration("graphs", {**_GRAPHS, "max_num_batched_tokens": 256}, answer=16),
    Configuration(
        "graphs, asynchronous scheduling", {**_GRAPHS, "max_num_batched_tokens": 512, "async_scheduling": True}
    ),
    Configuration("graphs, MTP", {**_GRAPHS, **_MTP, "max_num_batched_tokens": 256}, answer=16),
    Configuration(
        "graphs in vLLM's own compile mode",
        {
            "enforce_eager": False,
            "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
            "max_num_batched_tokens": 256,
        },
        answer=16,
        # Why: docs/graphs.md. What an engine compiled must not be another's.
        environment={"VLLM_USE_AOT_COMPILE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"},
    ),
    Configuration("two ranks", {"max_num_batched_tokens": 64, "tensor_parallel_size": 2}, longest=300),
)


def workloads(configuration: Configuration, count: int, seed: int, vocabulary: int) -> list[list[dict[str, Any]]]:
    """Random workloads, a function of their arguments: requests that arrive at different steps, a few aborted."""
    rng = random.Random(f"{configuration.name} {seed}")
    found = []
    for _ in range(count):
        load = []
        for name in range(rng.randint(1, configuration.requests)):
            edges = [edge for edge in EDGES if edge <= configuration.longest]
            length = rng.choice([rng.randint(1, configuration.longest), rng.choice(edges)])
            request: dict[str, Any] = {
                "id": str(name),
                "prompt": [rng.randrange(2, vocabulary) for _ in range(length)],
                "max_tokens": rng.randint(1, configuration.answer),
                "arrive": rng.randrange(6),
            }
            if configuration.aborts and rng.random() < 0.4:
                request["abort"] = request["arrive"] + rng.randint(1, 8)
            load.append(request)
        found.append(load)
    return found


@dataclass
class Compared:
    """Native against plugin in one configuration.

    Attributes:
        tokens: compared; of an aborted request, those that both engines had given.
        mismatched: of them.
        logprobs_differ: log probabilities of tokens that have other bits; finer than tokens, which may survive a fault.
        preemptions: of the native engine, and of the plugin's.
        seconds: of both engines together.
    """

    name: str
    workloads: int = 0
    requests: int = 0
    tokens: int = 0
    mismatched: int = 0
    logprobs_differ: int = 0
    preemptions: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def compare(
    configuration: Configuration, loads: Sequence[Any], native: Mapping[str, Any], plugin: Mapping[str, Any]
) -> Compared:
    """Compare the results of two engines (`softnpu.engine.run`) for the same workloads."""
    found = Compared(configuration.name, len(loads))
    ran = [sum(load["preemptions"] for load in result["workloads"]) for result in (native, plugin)]
    found.preemptions = ran[0], ran[1]
    if configuration.preempts and ran[1] == 0:
        found.problems.append("nothing was preempted in the plugin's engine")
    if len(plugin["groups"]) >= len(native["groups"]):
        found.problems.append(f"KV groups {plugin['groups']} with the plugin, {native['groups']} natively: it was off")
    for load, one, other in zip(loads, native["workloads"], plugin["workloads"], strict=True):
        for request in load:
            name = request["id"]
            found.requests += 1
            first, second = one["tokens"].get(name, []), other["tokens"].get(name, [])
            if "abort" in request:
                both = min(len(first), len(second))
                first, second = first[:both], second[:both]
            elif not len(first) == len(second) == request["max_tokens"]:
                asked = request["max_tokens"]
                found.problems.append(f"request {name}: {len(first)} and {len(second)} tokens of {asked}")
            found.tokens += max(len(first), len(second))
            found.mismatched += sum(a != b for a, b in zip(first, second, strict=False)) + abs(len(first) - len(second))
            bits = zip(one["logprobs"].get(name, []), other["logprobs"].get(name, []), strict=False)
            found.logprobs_differ += sum(a != b for a, b in list(bits)[: len(first)])
    return found


class Bench:
    """The checkpoints, and how an engine is started natively or with the plugin; `jobs` of them run at once.

    Its parts may be called from as many threads as one likes.
    """

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder = folder
        self._turns = Semaphore(jobs)
        self.plain = checkpoint.Geometry()
        self.drafting = checkpoint.Geometry(mtp=True)
        self._folders = {
            geometry.mtp: checkpoint.write(folder / ("mtp" if geometry.mtp else "plain"), geometry, seed=SEED)
            for geometry in (self.plain, self.drafting)
        }
        self._environment = {"SOFTNPU_WAIVE": ",".join(self.plain.waivers)}

    def run(
        self, spec: Mapping[str, Any], environment: Mapping[str, str], python: str = sys.executable
    ) -> dict[str, Any]:
        """Run an engine in a fresh process, when it is its turn."""
        with self._turns:
            return engine.run(spec, environment, 3000, python)

    def run_both(self, native: Mapping[str, Any], plugin: Mapping[str, Any], **variables: str) -> list[dict[str, Any]]:
        """Run two engines: one natively, one with the plugin."""
        with ThreadPoolExecutor(2) as threads:
            modes = [self.environment(mode, **variables) for mode in ("off", "colocated")]
            return list(threads.map(self.run, (native, plugin), modes))

    def spec(self, arguments: Mapping[str, Any], loads: Sequence[Any], **more: Any) -> dict[str, Any]:
        """A description for `softnpu.engine`."""
        mtp = "speculative_config" in arguments
        how = {"additional_config": ONE_STREAM, "block_size": BLOCK, **arguments}
        return {"checkpoint": str(self._folders[mtp]), "engine": how, "workloads": list(loads), **more}

    def environment(self, mode: str, **more: str) -> dict[str, str]:
        """Of a process in one mode of the plugin."""
        return {**self._environment, **INVARIANT, **more, MODE_VARIABLE: mode}

    def parity(self, configuration: Configuration, count: int, seed: int = SEED) -> Compared:
        """One configuration, native against plugin."""
        loads = workloads(configuration, count, seed, self.plain.vocabulary)
        native = {**configuration.engine, **configuration.native}
        more: dict[str, Any] = {}
        if configuration.drafts is not None:
            # What is to be accepted must be known: the tokens of the same requests without drafts.
            plain = {name: value for name, value in native.items() if name != "speculative_config"}
            expected = self.run(self.spec(plain, loads), self.environment("off"))
            more = {
                "drafts": {name: tokens for load in expected["workloads"] for name, tokens in load["tokens"].items()},
                "pattern": configuration.drafts,
            }
        plugin = self.spec(configuration.engine, loads, **more)
        results = self.run_both(self.spec(native, loads, **more), plugin, **configuration.environment)
        found = compare(configuration, loads, *results)
        found.seconds = round(sum(sum(result["seconds"].values()) for result in results), 1)
        return found

    def control(self, seed: int = SEED) -> Compared:
        """The negative control: the plugin's tails are zeroed between steps."""
        how = {"max_num_batched_tokens": 64}
        configuration = Configuration("negative control: tails zeroed", how, longest=300, answer=32)
        loads = workloads(configuration, 4, seed, self.plain.vocabulary)
        zeroed = self.spec(how, loads, zero_state=[*range(len(loads))])
        return compare(configuration, loads, *self.run_both(self.spec(how, loads), zeroed))

    def untouched(self, count: int, seed: int = SEED) -> list[str]:
        """What differs between mode off, mode afd without AFD and no plugin installed."""
        how = {"max_num_batched_tokens": 64}
        loads = workloads(Configuration("untouched", how, longest=300), count, seed, self.plain.vocabulary)

        def serve(name: str) -> dict[str, Any]:
            mode = "afd" if name == "afd" else "off"
            python = untouched.python_of(name, self._folder / "python")
            return self.run(self.spec(how, loads), self.environment(mode), python)

        with ThreadPoolExecutor(len(untouched.NAMES)) as threads:
            results = dict(zip(untouched.NAMES, threads.map(serve, untouched.NAMES), strict=True))
        return untouched.problems(results)

    def admission(self, tokens: int = LONG_TOKENS, blocks: int = FEW_BLOCKS) -> Admission:
        """One prompt in one batch, from bytes that native does not start with."""
        load = [{"id": "long", "prompt": self._prompt(random.Random(SEED), tokens), "max_tokens": 4}]
        native, plugin, sizes = self._long([load], tokens, blocks, 1)
        with ThreadPoolExecutor(2) as threads:
            tried = threads.submit(self._refusal, native)
            served = self._served(plugin, sizes, blocks)
            refusal = tried.result()
        ran = served["workloads"][0]
        return Admission(
            tokens=tokens,
            refusal=refusal,
            blocks=(blocks, served["num_gpu_blocks"]),
            kv_bytes=served["kv_bytes"],
            workspace_bytes=sizes.device_bytes,
            slots=sizes.slots,
            blocks_used=round(max(ran["usage"]) * served["num_gpu_blocks"]),
            scheduled=max(ran["scheduled"]),
            answered=len(ran["tokens"].get("long", [])),
            peak_bytes=max(served["peak_device_bytes"]),
        )

    def contention(self, tokens: int = LONG_TOKENS, blocks: int = ENOUGH_BLOCKS, others: int = OTHERS) -> Contention:
        """The same prompt behind a few others, from bytes that native starts with."""
        rng = random.Random(SEED + 1)
        load = [
            {"id": str(i), "prompt": self._prompt(rng, rng.randint(150, 300)), "max_tokens": 12} for i in range(others)
        ]
        load.append({"id": "long", "prompt": self._prompt(rng, tokens), "max_tokens": 4, "arrive": 2})
        native, plugin, sizes = self._long([load], tokens, blocks, others + 1)
        with ThreadPoolExecutor(2) as threads:
            alone = threads.submit(self.run, native, self.environment("off", **LONG_HBM))
            ours = self._served(plugin, sizes, blocks)
            theirs = alone.result()
        waited, (one, other) = [], (result["workloads"][0] for result in (theirs, ours))
        for ran in (one, other):
            # From its arrival on only the long prompt can be waiting.
            waited.append(sum(step["capacity"] > 0 for step in ran["waiting"][2:]))
        return Contention(
            prompt=tokens,
            blocks=(theirs["num_gpu_blocks"], ours["num_gpu_blocks"]),
            waited=(waited[0], waited[1]),
            tokens=sum(map(len, one["tokens"].values())),
            mismatched=compare(Configuration("a long prompt"), [load], theirs, ours).mismatched,
        )

    def _prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(2, self.plain.vocabulary) for _ in range(length)]

    def _long(
        self, loads: Sequence[Any], tokens: int, blocks: int, seqs: int
    ) -> tuple[dict[str, Any], dict[str, Any], WorkspaceSizes]:
        """Both engines for a long prompt: the plugin's has as many blocks fewer as tails and slots take."""
        geometry = from_hf_config(self.plain.config(), "the checkpoint")
        sizes = size_workspace(geometry, page_layout(STACK, BLOCK), max_num_seqs=seqs, max_num_batched_tokens=tokens)
        limits = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "max_model_len": tokens + 128}
        fewer = blocks - -(-sizes.device_bytes // BLOCK_BYTES)
        native, plugin = ({**limits, "num_gpu_blocks_override": count} for count in (blocks, fewer))
        return self.spec(native, loads), self.spec(plugin, loads), sizes

    def _served(self, plugin: Mapping[str, Any], sizes: WorkspaceSizes, blocks: int) -> dict[str, Any]:
        """The plugin's engine, and that it had no more bytes than `blocks` blocks."""
        result = self.run(plugin, self.environment("colocated", **LONG_HBM))
        if result["kv_bytes"] + sizes.device_bytes > blocks * BLOCK_BYTES:
            raise RuntimeError(
                f"{result['kv_bytes']} bytes of blocks and {sizes.device_bytes} besides are more than {blocks} blocks"
            )
        return result

    def _refusal(self, native: Mapping[str, Any]) -> str:
        """What native says when it does not start; empty if it starts."""
        try:
            self.run(native, self.environment("off", **LONG_HBM))
        except engine.EngineError as error:
            if found := next((line for line in str(error).splitlines() if REFUSAL in line), ""):
                return found
            raise
        return ""


@dataclass(frozen=True)
class Admission:
    """One long prompt in one batch, from the bytes of `blocks[0]` blocks.

    Attributes:
        tokens: of the prompt, and of the batch.
        refusal: what native says at start-up; empty if it starts.
        blocks: of native's KV cache, and of the plugin's.
        kv_bytes: of the plugin's KV cache.
        workspace_bytes: what the plugin's tails and slots take besides.
        slots: workspace slots.
        blocks_used: by the plugin's engine, at most.
        scheduled: tokens of its largest forward.
        answered: tokens that it gave.
        peak_bytes: of its device.
    """

    tokens: int
    refusal: str
    blocks: tuple[int, int]
    kv_bytes: int
    workspace_bytes: int
    slots: int
    blocks_used: int
    scheduled: int
    answered: int
    peak_bytes: int

    @property
    def problems(self) -> list[str]:
        """Why it does not show what it should."""
        found = []
        if self.kv_bytes + self.workspace_bytes > self.blocks[0] * BLOCK_BYTES:
            found.append(f"the plugin had more bytes: {self.kv_bytes} and {self.workspace_bytes}")
        if not self.refusal:
            found.append(f"native starts with {self.blocks[0]} blocks for {self.tokens} tokens")
        if self.answered == 0 or self.scheduled < self.tokens:
            found.append(f"the plugin ran {self.scheduled} of {self.tokens} tokens at once, gave {self.answered}")
        return found


@dataclass(frozen=True)
class Contention:
    """A long prompt behind others; pairs are native and plugin.

    Attributes:
        prompt: its tokens, and those of the largest batch.
        blocks: of the KV cache, from the same bytes in all.
        waited: steps in which the prompt waited for capacity.
        tokens: that native gave to all requests.
        mismatched: of them.
    """

    prompt: int
    blocks: tuple[int, int]
    waited: tuple[int, int]
    tokens: int
    mismatched: int

    @property
    def problems(self) -> list[str]:
        """Why it does not show what it should."""
        found = []
        if self.waited[0] == 0 or self.waited[1] > 0:
            found.append(f"the long prompt waits {self.waited[0]} steps natively and {self.waited[1]} with the plugin")
        if self.mismatched or not self.tokens:
            found.append(f"a long prompt: {self.mismatched} of {self.tokens} tokens differ")
        return found


def failures(
    compared: Sequence[Compared],
    control: Compared,
    admission: Admission,
    contention: Contention,
    touched: Sequence[str],
) -> list[str]:
    """Everything for which the run fails, in words."""
    found = [f"{part.name}: {problem}" for part in compared for problem in part.problems]
    found += [
        f"{part.name}: {part.mismatched} of {part.tokens} tokens and {part.logprobs_differ} log probabilities differ"
        for part in compared
        if part.mismatched or part.logprobs_differ
    ]
    if not control.mismatched and not control.logprobs_differ:
        found.append(f"{control.name}: {control.tokens} tokens and their log probabilities are the same")
    return [*found, *touched, *admission.problems, *contention.problems]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m afd_dsv4.evidence.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=int, default=14, help="of each configuration (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2, help="engines at once (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/engine"), help="default: %(default)s")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(asked.out / "checkpoints", asked.jobs)
    print("the real vLLM and vllm-ascend on the software NPU, native and with the plugin", flush=True)
    compared = []
    # Everything is asked for at once, the longest first, and as many engines run as have a turn.
    with ThreadPoolExecutor(len(CONFIGURATIONS) + 4) as threads:
        contended, admitted = threads.submit(bench.contention), threads.submit(bench.admission)
        negative = threads.submit(bench.control, asked.seed)
        off = threads.submit(bench.untouched, asked.workloads, asked.seed)
        for part in threads.map(lambda each: bench.parity(each, asked.workloads, asked.seed), CONFIGURATIONS):
            compared.append(part)
            print(
                f"  {part.name}: {part.mismatched} of {part.tokens} tokens and {part.logprobs_differ} log "
                f"probabilities differ, {part.requests} requests, "
                f"{part.preemptions[0]} and {part.preemptions[1]} preemptions, {part.seconds:.0f} s of both engines",
                flush=True,
            )
        control, long, behind, touched = negative.result(), admitted.result(), contended.result(), off.result()
    print(
        f"  {control.name}: {control.mismatched} of {control.tokens} tokens and {control.logprobs_differ} log "
        f"probabilities differ; some must",
        flush=True,
    )
    print(
        f"  {long.tokens} tokens in one batch, {long.blocks[0]} blocks or their bytes:\n"
        f"    native: {long.refusal or 'starts'}\n"
        f"    plugin: {long.scheduled} at once in {long.blocks_used} of {long.blocks[1]} blocks beside "
        f"{long.workspace_bytes / 2**20:.1f} MiB of tails and {long.slots} slots, "
        f"peak {long.peak_bytes / 2**20:.0f} MiB\n"
        f"  the same prompt behind {OTHERS} others, {behind.blocks[0]} blocks or their bytes: waits for capacity in "
        f"{behind.waited[0]} steps natively, in {behind.waited[1]} with the plugin; {behind.mismatched} of "
        f"{behind.tokens} tokens differ",
        flush=True,
    )
    same = "; ".join(touched) or "all the same"
    print(f"  off, afd without AFD, not installed, {asked.workloads} workloads: {same}", flush=True)
    wrong = failures(compared, control, long, behind, touched)
    (asked.out / "engine.json").write_text(
        json.dumps(
            {
                "source": "softnpu",
                "parity": [asdict(part) for part in compared],
                "control": asdict(control),
                "admission": asdict(long),
                "contention": asdict(behind),
                "untouched": touched,
                "verdict_on_the_target_stack": "not_shown_here",
                "failed": wrong,
            },
            indent=1,
        )
    )
    for failure in wrong:
        print(f"failed: {failure}")
    print("Everything here ran on the software NPU (CPU threads). No one has run this on Ascend hardware yet.")
    print(
        f"engine: workloads={sum(part.workloads for part in compared)} "
        f"mismatched_tokens={sum(part.mismatched for part in compared)} "
        f"refused_native={bool(long.refusal) + bool(behind.waited[0])} "
        f"admitted={bool(long.answered) + (not behind.waited[1])}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
