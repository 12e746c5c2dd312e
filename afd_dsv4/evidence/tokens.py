# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Token parity: an independent DeepSeek-V4 generates the same tokens with our compressors as with its own.

Problem: bit-equal rows show that two executors agree, not that either is right.
Way: the tiny model of `token_model.py` runs twice on real text, FP32. Baseline: transformers as shipped, each prompt in
one chunk, then token by token. Ours: the same model, compressed rows from a compressor runtime, several requests
batched and interleaved, prompts in random chunks, requests coming and going so that pages are reused. Every position
is compared twice: free-running (ours feeds its own tokens back) and teacher-forced (ours reads the baseline's tokens in
random chunks). Planted faults must break the comparison, or it proves nothing.
Only the compressors run on the device; the rest of the model runs on the CPU, in both runs.

A position is *decided* when rounding cannot change its token: its top-2 margin is more than twice the tolerance, and
so is the gap between the last row that the last layer's indexer selects and the first that it does not (in units of
those scores). Both are properties of the baseline alone. The tolerance is computed from the model's sizes before
anything runs (`rounding_tolerance`), never from a measured difference; the measured one is reported beside it and
must not exceed it.
Not here: bit equality, memory, order (the other parts of the evidence run).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from afd_dsv4.compressor.executor import CompressorWeights, Execution, Executor
from afd_dsv4.compressor.stock import StockRuntime
from afd_dsv4.evidence.token_model import (
    SELECTED_ROWS,
    Piece,
    TokenModel,
    build_model,
    forward_chunks,
    text_tokens,
)
from afd_dsv4.geometry import DEFAULT_STACK, CompressorKind, ModelGeometry, page_layout
from afd_dsv4.tail.tables import RequestChunk, RequestId
from afd_dsv4.workspace.identity import Generation

CHUNK_SIZES = (1, 3, 4, 5, 127, 128, 129)
REQUIRED_SHARE = 0.95
PROMPT_TOKENS = (389, 120, 253, 5, 171)  # the second and the third complete a C128 window while generating
CONCURRENT = 3
LARGEST_CHUNK = 200
FP32_WAIVER = "compressor.fp32"
UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class TokenComparison:
    """One pass against the baseline. Positions are those whose logits were compared.

    `max_difference` is the largest absolute difference of two logits, over positions with a decided row selection.
    """

    positions: int
    decided: int
    mismatches: int
    undecided_mismatches: int
    max_difference: float


@dataclass(frozen=True)
class Control:
    """A planted fault, teacher-forced. It is caught when it would have failed the comparison: a decided token changes,
    or logits move beyond the tolerance.
    """

    name: str
    mismatches: int
    max_difference: float
    caught: bool


@dataclass(frozen=True)
class TokenReport:
    """What was run and what came out. `passed` is the verdict, `failures` its reasons, one line each."""

    device: str
    runtime: str
    waived_limits: tuple[str, ...]
    seed: int
    layer_types: tuple[str, ...]
    hidden_size: int
    requests: int
    prompt_tokens: int
    steps: int
    batched_steps: int
    chunk_sizes: tuple[int, ...]
    tolerance: float
    generated_positions: int
    free_running: TokenComparison
    prompts: TokenComparison
    teacher_forced: TokenComparison
    compressed_rows: int
    max_row_difference: float
    baseline_chunking_difference: float
    controls: tuple[Control, ...]
    seconds: float
    failures: tuple[str, ...] = ()

    @property
    def decided_share(self) -> float:
        """Share of generated positions that are decided and were compared free-running."""
        return self.free_running.decided / self.generated_positions

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


def rounding_tolerance(config: Any) -> float:
    """The largest difference of two logits that FP32 rounding explains, in units of the logits' RMS.

    An inner product of length n, summed in any order, has an error of at most about sqrt(n) * u * sum |a_i b_i|
    (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019, theorem 3.1 with lambda 1). With
    independent weights that sum is about sqrt(n) times the result's own size, so the relative error is n * u. Errors
    of different products are independent and add in quadrature. RMSNorm and the doubly stochastic residual mixing keep
    the gain from layer to layer near one. Both runs round: another sqrt(2). The mixing weights pass through a sigmoid
    (slope at most 1/4) after a projection of deviation 1/2, so an eighth of their error arrives.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    one_layer = (
        *(hidden,) * 9,  # query, key, router, routed and shared gate and up, compressor projections
        config.q_lora_rank,
        config.head_dim,  # attention scores
        2 * config.sliding_window,  # attention sums: window plus compressed rows
        heads * config.head_dim // config.o_groups,
        config.o_groups * config.o_lora_rank,
        *(config.moe_intermediate_size,) * 2,
        128,  # pooling
        *(config.hc_mult * hidden // 8,) * 2,
    )
    squares = len(config.layer_types) * sum(n * n for n in one_layer) + hidden**2 + (config.hc_mult * hidden // 8) ** 2
    return float(UNIT_ROUNDOFF * (2.0 * squares) ** 0.5)


@dataclass
class _Request:
    """A request on its way through a pass. `tokens` grows while generating, up to `length`."""

    name: str
    tokens: list[int]
    length: int
    cache: Any
    position: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class _Truth:
    """The baseline of one request: all tokens but the last are fed, logits `[fed, vocabulary]`."""

    name: str
    prompt: int
    tokens: list[int]
    logits: torch.Tensor
    cache: Any
    selection_decided: torch.Tensor
    decided: torch.Tensor


def _baseline(token_model: TokenModel, name: str, prompt: list[int], generated: int, relative: float) -> _Truth:
    """Greedy generation by the unmodified model."""
    cache = token_model.new_cache(supplied=False)
    tokens = list(prompt)
    with token_model.selection_scores() as scores:
        logits = [token_model.forward(prompt, cache)]
        tokens.append(int(logits[0][-1].argmax()))
        for _ in range(generated - 1):
            logits.append(token_model.forward(tokens[-1:], cache))
            tokens.append(int(logits[-1][-1].argmax()))
    table = torch.cat(logits)
    best = table.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > 2 * relative * _rms(table)
    firsts = [0, *range(len(prompt), len(tokens))]
    selection = torch.cat([_selection_decided(*one, relative) for one in zip(firsts, scores, strict=False)])
    return _Truth(name, len(prompt), tokens, table, cache, selection, clear & selection)


def _selection_decided(first: int, scores: torch.Tensor, relative: float) -> torch.Tensor:
    """Whether rounding leaves alone which rows each query selects.

    Args:
        first: position of the first query.
        scores: index scores `[queries, rows]`.
        relative: tolerance in units of the RMS of a query's visible scores.
    """
    queries, rows = scores.shape
    if rows <= SELECTED_ROWS:
        return torch.ones(queries, dtype=torch.bool)
    visible = (torch.arange(first, first + queries) + 1) // CompressorKind.C4.ratio
    hidden = torch.arange(rows).unsqueeze(0) >= visible.unsqueeze(1)
    ranked = scores.masked_fill(hidden, float("-inf")).topk(SELECTED_ROWS + 1, dim=-1).values
    gap = ranked[:, -2] - ranked[:, -1]
    rms = (scores.masked_fill(hidden, 0.0).square().sum(-1) / visible.clamp(min=1)).sqrt()
    return (visible <= SELECTED_ROWS) | (gap > 2 * relative * rms)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


class _Chunks:
    """Random chunk sizes that use each size of `CHUNK_SIZES`, and one other, once per round."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._bag: list[int] = []
        self.used: set[int] = set()

    def draw(self, remaining: int) -> int:
        if not self._bag:
            self._bag = [*CHUNK_SIZES, self._rng.randint(6, LARGEST_CHUNK - 1)]
            self._rng.shuffle(self._bag)
        fitting = [size for size in self._bag if size <= remaining]
        if fitting:
            size = fitting[0]
            self._bag.remove(size)
        else:
            size = remaining
        self.used.add(size)
        return size


class _Pass:
    """Drives requests through a runtime: random subsets per step, at most `CONCURRENT` at a time."""

    def __init__(self, token_model: TokenModel, runtime: Executor, device: str, seed: int) -> None:
        self._model = token_model
        self._runtime = runtime
        self._device = device
        self._rng = random.Random(seed)
        self.chunks = _Chunks(self._rng)
        self.steps = 0
        self.batched_steps = 0
        self._weights = {key: _moved(weights, device) for key, weights in token_model.weights.items()}

    def run(self, requests: Sequence[_Request]) -> None:
        """Until every request has `length` tokens and all but the last are fed."""
        waiting = list(requests)
        running: list[_Request] = []
        while waiting or running:
            while waiting and len(running) < CONCURRENT and (not running or self._rng.random() < 0.5):
                running.append(waiting.pop(0))
            batch = [request for request in running if self._rng.random() < 0.75] or [self._rng.choice(running)]
            self._rng.shuffle(batch)
            self._step(batch)
            for request in batch:
                if request.position == request.length - 1:
                    running.remove(request)
                    self._runtime.end_request(RequestId(request.name))

    def _step(self, batch: Sequence[_Request]) -> None:
        pieces = []
        for request in batch:
            size = self.chunks.draw(min(len(request.tokens), request.length - 1) - request.position)
            ids = tuple(request.tokens[request.position : request.position + size])
            pieces.append(Piece(request.position, ids, request.cache))
        spans = [(piece.start, piece.start + len(piece.ids)) for piece in pieces]
        execution = self._runtime.begin(
            [RequestChunk(RequestId(one.name), start, end) for one, (start, end) in zip(batch, spans, strict=True)]
        )
        launch = _Launch(self._model, execution, self._weights, self._device, spans)
        try:
            logits = forward_chunks(self._model, pieces, launch)
        finally:
            execution.finish()
        self.steps += 1
        self.batched_steps += len(batch) > 1
        for request, (_, end), own in zip(batch, spans, logits, strict=True):
            request.position = end
            request.logits.append(own)
            if end == len(request.tokens) < request.length:
                request.tokens.append(int(own[-1].argmax()))


def _moved(weights: CompressorWeights, device: str) -> CompressorWeights:
    names = ("wkv", "wgate", "ape", "norm_weight")
    return replace(weights, **{name: getattr(weights, name).to(device) for name in names})


class _Launch:
    """Turns a packed batch of one layer into compressed rows per request."""

    def __init__(
        self,
        token_model: TokenModel,
        execution: Execution,
        weights: dict[tuple[int, CompressorKind], CompressorWeights],
        device: str,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._execution = execution
        self._weights = weights
        self._device = device
        self._spans = spans
        lengths = [end - start for start, end in spans]
        self._tokens = sum(lengths)
        self._cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32).to(device)
        self._counts: dict[int, list[int]] = {}
        self._rope: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for ratio in {kind.ratio for _, kind in weights}:
            self._counts[ratio] = [end // ratio - start // ratio for start, end in spans]
            windows = torch.cat([torch.arange(start // ratio, end // ratio) * ratio for start, end in spans])
            cos, sin = token_model.rope(windows)
            # The operator wants as many rows as it may ever write; the rest is padding, rotated by nothing.
            padding = min(self._tokens, self._tokens // ratio + len(spans)) - len(windows)
            cos = torch.cat([cos, torch.ones(padding, cos.shape[1])])
            sin = torch.cat([sin, torch.zeros(padding, sin.shape[1])])
            self._rope[ratio] = cos.to(device), sin.to(device)

    def __call__(self, layer: int, kind: CompressorKind, x: torch.Tensor) -> list[torch.Tensor]:
        weights = self._weights[layer, kind]
        cos, sin = self._rope[kind.ratio]
        rows = self._execution.compress(layer, kind, x.to(self._device), weights, cos, sin, self._cu_seqlens)
        expected = (cos.shape[0], weights.norm_weight.shape[0])
        if tuple(rows.shape) != expected or rows.dtype != torch.float32:
            raise RuntimeError(
                f"compressed rows of layer {layer} {kind.value} are {rows.dtype} {tuple(rows.shape)}; "
                f"expected torch.float32 {expected}: run the operator with its FP32 option"
            )
        counts = self._counts[kind.ratio]
        return list(torch.split(rows.cpu()[: sum(counts)], counts))


def _compare(truths: Sequence[_Truth], requests: Sequence[_Request], first: Callable[[_Truth], int]) -> TokenComparison:
    """Ours against the baseline from position `first` of each request on, as long as the inputs are the same."""
    positions = decided = mismatches = undecided_mismatches = 0
    largest = 0.0
    for truth, request in zip(truths, requests, strict=True):
        ours = torch.cat(request.logits)
        same = len(truth.logits)
        for place, (left, right) in enumerate(zip(truth.tokens[:-1], request.tokens, strict=False)):
            if left != right:
                same = place
                break
        begin = first(truth)
        span = slice(begin, min(same, len(ours)))
        differs = truth.logits[span].argmax(-1) != ours[span].argmax(-1)
        sure = truth.decided[span]
        positions += len(differs)
        decided += int(sure.sum())
        mismatches += int((differs & sure).sum())
        undecided_mismatches += int((differs & ~sure).sum())
        distance = (truth.logits[span] - ours[span]).abs().amax(-1)[truth.selection_decided[span]]
        if len(distance):
            # NaN must not slip through a maximum.
            largest = max(largest, float(torch.nan_to_num(distance, nan=float("inf")).max()))
    return TokenComparison(positions, decided, mismatches, undecided_mismatches, largest)


def _row_difference(
    token_model: TokenModel, truths: Sequence[_Truth], requests: Sequence[_Request]
) -> tuple[int, float]:
    """(rows compared, largest absolute difference) over every compressor's cached rows at the end."""
    count, largest = 0, 0.0
    for truth, request in zip(truths, requests, strict=True):
        for layer, kind in token_model.weights:
            theirs = token_model.compressed_rows(truth.cache, layer, kind)
            ours = token_model.compressed_rows(request.cache, layer, kind)
            if theirs.shape != ours.shape:
                raise RuntimeError(
                    f"{request.name}: layer {layer} {kind.value} has {tuple(ours.shape)} rows; "
                    f"the baseline has {tuple(theirs.shape)}"
                )
            count += len(ours)
            if len(ours):
                distance = torch.nan_to_num((theirs - ours).abs(), nan=float("inf"))
                largest = max(largest, float(distance.max()))
    return count, largest


class _Faulty:
    """A runtime with one planted fault: `before` each step, and `after` each launch."""

    def __init__(
        self,
        inner: Executor,
        before: Callable[[Any], None] = lambda _runtime: None,
        after: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> None:
        self._inner = inner
        self._before = before
        self._after = after

    def begin(
        self, chunks: Sequence[RequestChunk], *, generation: Generation | None = None, ubatch: int = 0
    ) -> Execution:
        self._before(self._inner)
        return _FaultyExecution(self._inner.begin(chunks, generation=generation, ubatch=ubatch), self._after)

    def end_request(self, request: RequestId) -> None:
        self._inner.end_request(request)


class _FaultyExecution:
    def __init__(self, inner: Execution, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._inner = inner
        self._after = after

    def compress(self, *arguments: Any) -> torch.Tensor:
        return self._after(self._inner.compress(*arguments))

    def finish(self) -> None:
        self._inner.finish()


def _drop_history(kind: CompressorKind) -> Callable[[Any], None]:
    """Between steps, forget every row of one kind."""

    def forget(runtime: Any) -> None:
        runtime.pools[kind].zero_()

    return forget


def _drop_left_half(runtime: Any) -> None:
    """Between steps, forget what C4 windows leave to the next one: value 0, score so low that it never counts."""
    for kind in (CompressorKind.C4, CompressorKind.C4_INDEXER):
        pool = runtime.pools[kind]
        quarter = pool.shape[-1] // 4  # [kv left | kv right | score left | score right]
        pool[..., :quarter].zero_()
        pool[..., 2 * quarter : 3 * quarter].fill_(-1e30)


def stock_runtime(geometry: ModelGeometry, device: str, *, block_size: int = 128) -> StockRuntime:
    """The runtime under test: room for `CONCURRENT` requests only, so that their pages go round."""
    layout = page_layout(DEFAULT_STACK, block_size)
    return StockRuntime(
        geometry,
        layout,
        max_num_seqs=CONCURRENT,
        max_num_batched_tokens=CONCURRENT * LARGEST_CHUNK,
        device=device,
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Products this small only wait for each other on a busy machine (measured: 8 times the CPU time with two)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _fp32_operator() -> Iterator[str]:
    """Let the software NPU's operator take FP32 while this is open; the name of the waived limit.

    Raises:
        RuntimeError: another device. Its operator takes bfloat16 and float16 only, and rounding then decides tokens.
    """
    if not hasattr(torch.ops.softnpu, "waive"):
        raise RuntimeError(
            "token parity in FP32 was asked for, and the stock operator here takes only bfloat16 and float16; "
            "run it on the software NPU: python -m afd_dsv4.softnpu -- COMMAND"
        )
    before = FP32_WAIVER in torch.ops.softnpu.waivers()
    torch.ops.softnpu.waive(FP32_WAIVER, True)
    try:
        yield FP32_WAIVER
    finally:
        torch.ops.softnpu.waive(FP32_WAIVER, before)


def run_token_parity(
    device: str = "npu",
    seed: int = 0,
    *,
    make_runtime: Callable[[ModelGeometry], Executor] | None = None,
    hidden_size: int = 1024,
    prompt_tokens: Sequence[int] = PROMPT_TOKENS,
    generated: int = 40,
    controls: bool = True,
) -> TokenReport:
    """Generate with the shipped compressors and with ours, and compare.

    Args:
        device: where the compressors run.
        seed: of the weights, the chunking and the batching.
        make_runtime: the compressor runtime; by default `stock_runtime` on the device.
        hidden_size: see `token_model.build_model`.
        prompt_tokens: length of each prompt; each is a different stretch of text.
        generated: tokens per request.
        controls: also run the planted faults. They need a runtime with `pools`, as `StockRuntime` has.

    Returns:
        The report; look at `passed`. Only broken set-ups raise.
    """
    began = time.perf_counter()
    waiver = _fp32_operator() if make_runtime is None else contextlib.nullcontext("")
    with torch.no_grad(), _one_thread(), waiver as waived:
        token_model = build_model(seed, hidden_size=hidden_size)
        make = make_runtime or (lambda geometry: stock_runtime(geometry, device))
        relative = rounding_tolerance(token_model.config)
        truths = [
            _baseline(token_model, f"r{index}", text_tokens(length, 997 * index), generated, relative)
            for index, length in enumerate(prompt_tokens)
        ]
        tolerance = relative * _rms(torch.cat([truth.logits for truth in truths]))
        runtime = make(token_model.geometry)

        free = [_request(token_model, truth, truth.prompt) for truth in truths]
        free_pass = _Pass(token_model, runtime, device, seed)
        free_pass.run(free)
        forced_pass = _Pass(token_model, runtime, device, seed + 1)
        forced = [_request(token_model, truth, len(truth.tokens)) for truth in truths]
        forced_pass.run(forced)
        rows, row_difference = _row_difference(token_model, truths, forced)

        report = TokenReport(
            device=device,
            runtime=type(runtime).__name__,
            waived_limits=(waived,) if waived else (),
            seed=seed,
            layer_types=tuple(token_model.config.layer_types),
            hidden_size=hidden_size,
            requests=len(truths),
            prompt_tokens=sum(prompt_tokens),
            steps=free_pass.steps + forced_pass.steps,
            batched_steps=free_pass.batched_steps + forced_pass.batched_steps,
            chunk_sizes=tuple(sorted(free_pass.chunks.used | forced_pass.chunks.used)),
            tolerance=tolerance,
            generated_positions=generated * len(truths),
            free_running=_compare(truths, free, lambda truth: truth.prompt - 1),
            prompts=_compare(truths, [_cut(one, truth) for one, truth in zip(free, truths, strict=True)], lambda _: 0),
            teacher_forced=_compare(truths, forced, lambda _: 0),
            compressed_rows=rows,
            max_row_difference=row_difference,
            baseline_chunking_difference=_baseline_chunking(token_model, truths[0], seed),
            controls=_controls(token_model, truths, make, device, seed, tolerance) if controls else (),
            seconds=time.perf_counter() - began,
        )
        # Compressed rows are normalised: their RMS is one.
        return replace(report, failures=tuple(_failures(report, row_tolerance=relative)))


def _request(token_model: TokenModel, truth: _Truth, known: int) -> _Request:
    cache = token_model.new_cache(supplied=True)
    return _Request(truth.name, truth.tokens[:known], len(truth.tokens), cache)


def _cut(request: _Request, truth: _Truth) -> _Request:
    """The prompt part of a pass."""
    logits = torch.cat(request.logits)[: truth.prompt - 1]
    return replace(request, logits=[logits])


def _baseline_chunking(token_model: TokenModel, truth: _Truth, seed: int) -> float:
    """How far the unmodified model moves its own logits when it reads the same tokens in chunks."""
    chunks, cache, logits, position = _Chunks(random.Random(seed)), token_model.new_cache(supplied=False), [], 0
    fed = truth.tokens[:-1]
    while position < len(fed):
        size = chunks.draw(len(fed) - position)
        logits.append(token_model.forward(fed[position : position + size], cache))
        position += size
    distance = (torch.cat(logits) - truth.logits).abs().amax(-1)
    return float(distance[truth.selection_decided].max())


def _controls(
    token_model: TokenModel,
    truths: Sequence[_Truth],
    make: Callable[[ModelGeometry], Executor],
    device: str,
    seed: int,
    tolerance: float,
) -> tuple[Control, ...]:
    """Teacher-forced passes over the first two requests with one fault each."""
    some = truths[:2]
    faults: dict[str, Callable[[Executor], Executor]] = {
        "compressed rows zeroed": lambda runtime: _Faulty(runtime, after=torch.zeros_like),
        "C4 left half not carried": lambda runtime: _Faulty(runtime, before=_drop_left_half),
    }
    for kind in CompressorKind:
        faults[f"{kind.value} history dropped"] = lambda runtime, kind=kind: _Faulty(  # type: ignore[misc]
            runtime, before=_drop_history(kind)
        )
    found = []
    for name, plant in faults.items():
        requests = [_request(token_model, truth, len(truth.tokens)) for truth in some]
        _Pass(token_model, plant(make(token_model.geometry)), device, seed + 1).run(requests)
        result = _compare(some, requests, lambda _: 0)
        caught = result.mismatches > 0 or not result.max_difference <= tolerance
        found.append(Control(name, result.mismatches, result.max_difference, caught))
    return tuple(found)


def _failures(report: TokenReport, *, row_tolerance: float) -> list[str]:
    """Why the report does not pass."""
    found = []
    passes = {
        "free-running": report.free_running,
        "prompts": report.prompts,
        "teacher-forced": report.teacher_forced,
    }
    for name, result in passes.items():
        if result.mismatches:
            found.append(f"{name}: {result.mismatches} of {result.decided} decided positions have another token")
        if not result.max_difference <= report.tolerance:
            found.append(f"{name}: logits differ by {result.max_difference:.3g}, tolerance {report.tolerance:.3g}")
    if not report.max_row_difference <= row_tolerance:
        found.append(f"compressed rows differ by {report.max_row_difference:.3g}, tolerance {row_tolerance:.3g}")
    if report.decided_share < REQUIRED_SHARE:
        found.append(f"{report.decided_share:.1%} of generated positions are decided, {REQUIRED_SHARE:.0%} required")
    missing = sorted(set(CHUNK_SIZES) - set(report.chunk_sizes))
    if missing:
        found.append(f"chunk sizes {missing} were never used; lengthen the prompts")
    if not report.batched_steps:
        found.append("no step had more than one request")
    found.extend(f"planted fault not caught: {one.name}" for one in report.controls if not one.caught)
    return found
