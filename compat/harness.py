# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Asks the real vLLM scheduler, with vllm-ascend's KV-cache code, what it does with a prompt; no model runs.

Problem: a claim about admission is worth what the real scheduler says about it. vllm-ascend patches vLLM process-wide,
and importing both takes ten seconds.
Way: `SchedulerProcess` starts `scheduler_worker.py` once and sends it any number of cases. The caller's process stays
as it is, imports neither torch nor vLLM, and may itself run on a real NPU, on the software NPU or on neither; the
answer says by which route it came. `admission_evidence` is the set of cases that the evidence run prints.
What `plugin` means here: the state layers are filtered from the KV-cache specs before the scheduler sees them. That is
what the plugin will do to a model; in this release it is not yet wired into the scheduler and is not loaded here.
Not here: vLLM's start-up check refuses servers whose longest sequence does not fit; it is reported
(`Outcome.startup_blocks`), not enforced, because the published case was started in spite of it.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import IO, Any

from afd_dsv4.admission import GROUP_NAMES
from afd_dsv4.geometry import DEFAULT_STACK, ModelGeometry, PageLayout, page_layout, preset
from afd_dsv4.workspace.sizing import size_workspace


class Route(enum.Enum):
    """How vllm-ascend was loaded: whole, on its own platform, or its KV-cache part with device detection stood in."""

    NPU_PLATFORM = "npu_platform"
    STAND_IN = "stand_in"


class HarnessError(RuntimeError):
    """The real packages refused a case, or could not be loaded."""


@dataclass(frozen=True)
class Case:
    """One question to the scheduler. Exactly one of `free_blocks` and `kv_bytes` is given.

    Attributes:
        geometry: the model.
        prompts: tokens of each prompt, in queue order.
        block_size: vLLM's block size.
        max_num_batched_tokens: most tokens of one step.
        max_model_len: longest sequence.
        max_num_seqs: most running requests.
        plugin: whether the state layers are filtered out of the specs, as the plugin will do; it is not loaded itself.
        free_blocks: blocks that the pool can hand out.
        kv_bytes: memory of the KV cache.
        async_scheduling: two batches in flight.
        reserve_full_isl: whether a prompt starts only where all of it fits, vLLM's default.
        steps: how often `schedule` is called.
    """

    geometry: ModelGeometry
    prompts: tuple[int, ...]
    block_size: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_seqs: int = 16
    plugin: bool = False
    free_blocks: int | None = None
    kv_bytes: int | None = None
    async_scheduling: bool = False
    reserve_full_isl: bool = True
    steps: int = 1

    def __post_init__(self) -> None:
        if (self.free_blocks is None) == (self.kv_bytes is None):
            raise ValueError("give either free_blocks or kv_bytes")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        """Rebuild a case from `asdict` after a round through JSON."""
        geometry = values["geometry"]
        geometry["compress_ratios"] = tuple(geometry["compress_ratios"])
        return cls(**{**values, "geometry": ModelGeometry(**geometry), "prompts": tuple(values["prompts"])})


@dataclass(frozen=True)
class Group:
    """One KV group as vLLM made it: our name of its kind, its size, and the classes that serve it."""

    name: str
    layers: int
    block_rows: int
    spec: str
    manager: str


@dataclass(frozen=True)
class Step:
    """One call of `Scheduler.schedule`, and the scheduler's own statistics after it."""

    scheduled: dict[str, int]
    running: int
    waiting_for_capacity: int
    kv_usage: float
    free_blocks: int


@dataclass(frozen=True)
class Outcome:
    """What the real packages answered.

    Attributes:
        route: see `Route`.
        scheduler: the scheduler's class.
        num_blocks: blocks of the pool, the null block included.
        block_bytes: bytes behind one block id.
        free_blocks: blocks that an empty pool can hand out.
        max_in_flight_tokens: what vLLM takes for the admission cap.
        startup_blocks: blocks that the start-up check wants for one longest sequence; reported, not enforced.
        groups: the KV groups in vLLM's order.
        whole_prompt: per prompt, blocks by kind of group that the admission check wants (capped).
        first_chunk: per prompt, blocks by kind of group for a first chunk alone in an empty pool (not capped).
        steps: what was scheduled.
    """

    route: str
    scheduler: str
    num_blocks: int
    block_bytes: int
    free_blocks: int
    max_in_flight_tokens: int
    startup_blocks: int
    groups: tuple[Group, ...]
    whole_prompt: tuple[dict[str, int], ...]
    first_chunk: tuple[dict[str, int], ...]
    steps: tuple[Step, ...]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        """Rebuild an outcome from `asdict` after a round through JSON."""
        return cls(
            **{
                **values,
                "groups": tuple(Group(**group) for group in values["groups"]),
                "whole_prompt": tuple(values["whole_prompt"]),
                "first_chunk": tuple(values["first_chunk"]),
                "steps": tuple(Step(**step) for step in values["steps"]),
            }
        )

    def scheduled_tokens(self, step: int = 0) -> int:
        """Tokens of one step, all requests."""
        return sum(self.steps[step].scheduled.values())


class SchedulerProcess:
    """The worker process, as a context manager. One case at a time.

    Args:
        python: interpreter to run it with.
        environment: its environment; this process's own if None.
        seconds: longest wait for one answer, the first of which comes once vLLM is imported (10 s on an idle machine).
    """

    def __init__(
        self, python: str = sys.executable, environment: Mapping[str, str] | None = None, seconds: float = 240
    ) -> None:
        self._seconds = seconds
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        self._child = subprocess.Popen(
            [python, "-m", "afd_dsv4.compat.scheduler_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=None if environment is None else dict(environment),
        )
        self._unread = b""
        self._ready: dict[str, Any] | None = None

    def __enter__(self) -> SchedulerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def route(self) -> Route:
        """How the worker loaded vllm-ascend. Waits until it has."""
        return Route(self._started()["ready"])

    @property
    def block_sizes(self) -> dict[int, Any]:
        """vllm-ascend's own `DSV4_BLOCK_SIZES`. Waits until it is loaded."""
        return {int(size): entry for size, entry in self._started()["block_sizes"].items()}

    def ask(self, case: Case) -> Outcome:
        """Drive one case.

        Raises:
            HarnessError: with vLLM's or vllm-ascend's own message, or that the worker ended or did not answer in time.
        """
        self._started()
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(asdict(case)).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # _read reports how the worker ended
        answer = self._read()
        if "error" in answer:
            raise HarnessError(f"the scheduler refused {case}: {answer['error']}")
        return Outcome.from_json(answer)

    def close(self) -> None:
        """End the worker."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before it read everything
            self._child.stdin.close()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()
        self._log.close()

    def _started(self) -> dict[str, Any]:
        if self._ready is None:
            self._ready = self._read()
        return self._ready

    def _read(self) -> dict[str, Any]:
        line = self._line()
        if line is None:
            self._child.kill()  # a late answer would be taken for that of the next case
            raise HarnessError(
                f"the scheduler process was asked for an answer: found none in {self._seconds:g} s and ended it; give "
                f"SchedulerProcess more seconds on a slow machine, else see its last words:\n{self._last_words()}"
            )
        if not line:
            raise HarnessError(
                f"the scheduler process ended with status {self._child.wait()}; its last words:\n{self._last_words()}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _line(self) -> bytes | None:
        """The next line without its end, empty where the worker has closed its output, None when the time is over."""
        assert self._child.stdout is not None
        end = time.monotonic() + self._seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                # The descriptor itself: what a buffered reader has taken, the selector cannot see.
                piece = os.read(self._child.stdout.fileno(), 1 << 16)
                if not piece:
                    return b""
                self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]


@dataclass(frozen=True)
class Scenario:
    """Prompts that meet an empty server with a given amount of memory."""

    name: str
    prompts: tuple[int, ...]
    max_num_batched_tokens: int
    free_blocks: int


#: vllm-ascend#15204 (63,778 tokens, 6,958 free) and the pool of vllm-ascend#9543 (5,011 free) for 32,768 tokens.
SCENARIOS = (
    Scenario("published", (63778,), 65536, 6958),
    Scenario("one_32k_prompt", (32768,), 32768, 5011),
)


def admission_evidence(
    process: SchedulerProcess,
    *,
    geometry: ModelGeometry | None = None,
    batch: Sequence[int] = (),
    block_size: int = 128,
    max_num_seqs: Sequence[int] = (16, 128),
    max_model_len: int = 131072,
    slots: int = 2,
    steps: int = 3,
    stack: str = DEFAULT_STACK,
) -> list[dict[str, Any]]:
    """Ask the real scheduler about every scenario, natively and with the plugin, from one and the same HBM budget.

    The budget of a scenario is the memory of its native blocks. Natively all of it is KV cache; with the plugin the
    tails and workspace slots for `max_num_seqs` requests are taken from it first.

    Args:
        process: a running worker.
        geometry: the model, Flash if None.
        batch: prompts of a packed batch, a further scenario in the 5,011-block pool; its sum is the step's budget.
        block_size: vLLM's block size.
        max_num_seqs: for how many requests the plugin reserves, one row each.
        max_model_len: longest sequence.
        slots: workspace slots.
        steps: scheduler steps; with nothing else running, a prompt that waits in the first waits in all.
        stack: a supported stack.

    Returns:
        One JSON object per scenario and value of `max_num_seqs`.
    """
    geometry = geometry or preset("flash")
    layout = page_layout(stack, block_size)
    scenarios = [*SCENARIOS]
    if batch:
        scenarios.append(Scenario("packed_batch", tuple(batch), sum(batch), SCENARIOS[1].free_blocks))
    return [
        _compare(process, scenario, geometry, layout, seqs, max_model_len, slots, steps)
        for scenario in scenarios
        for seqs in max_num_seqs
    ]


def _compare(
    process: SchedulerProcess,
    scenario: Scenario,
    geometry: ModelGeometry,
    layout: PageLayout,
    max_num_seqs: int,
    max_model_len: int,
    slots: int,
    steps: int,
) -> dict[str, Any]:
    sizes = size_workspace(
        geometry,
        layout,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        slots=slots,
    )

    def ask(*, plugin: bool, **memory: int) -> Outcome:
        return process.ask(
            Case(
                geometry=geometry,
                prompts=scenario.prompts,
                block_size=layout.block_size,
                max_num_batched_tokens=scenario.max_num_batched_tokens,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                plugin=plugin,
                steps=steps,
                **memory,  # type: ignore[arg-type]
            )
        )

    native = ask(plugin=False, free_blocks=scenario.free_blocks)
    budget = native.num_blocks * native.block_bytes
    plugin = ask(plugin=True, kv_bytes=budget - sizes.device_bytes)
    return {
        "scenario": scenario.name,
        "prompts": list(scenario.prompts),
        "max_num_batched_tokens": scenario.max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "budget_bytes": budget,
        "plugin_reserved_bytes": sizes.device_bytes,
        "native": _row(native, scenario),
        "plugin": _row(plugin, scenario),
        "route": native.route,
    }


def _row(outcome: Outcome, scenario: Scenario) -> dict[str, Any]:
    by_group = {name: sum(need.get(name, 0) for need in outcome.whole_prompt) for name in GROUP_NAMES}
    started = [name for name, tokens in outcome.steps[0].scheduled.items() if tokens]
    return {
        "blocks_needed": sum(by_group.values()),
        "by_group": by_group,
        "free_blocks": outcome.free_blocks,
        "block_bytes": outcome.block_bytes,
        "kv_groups": [asdict(group) for group in outcome.groups],
        "startup_check_blocks": outcome.startup_blocks,
        # Admitted as one batch: every prompt gets its tokens in the first step.
        "admitted": outcome.scheduled_tokens() == min(sum(scenario.prompts), scenario.max_num_batched_tokens),
        "prompts_started": len(started),
        "steps": [asdict(step) for step in outcome.steps],
    }
