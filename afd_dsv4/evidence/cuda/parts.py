# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The parts of the evidence run that a CUDA device has of its own, as checks, figures and lines of its table.

`evidence/run.py` compares rows, plants faults and scales memory there as everywhere; this adds what a real asynchronous
device can show and the software NPU cannot: rows of a longer batch, peaks of all layers' native state, the fault of a
shared workspace and its absence, what ordering costs, graphs, and the soak. What needs vLLM, vllm-ascend or the
software NPU is named in `LEFT_OUT`, and is not shown there.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from afd_dsv4.evidence import rows
from afd_dsv4.evidence.cuda import definition, dense, operator, replays, staging
from afd_dsv4.evidence.report import figure, size
from afd_dsv4.geometry import CompressorKind, InputError, ModelGeometry

if TYPE_CHECKING:
    from afd_dsv4.evidence.run import Run

LEFT_OUT = {
    "tokens": "the model and its operators are compared on the software NPU",
    "admission": "the real scheduler needs vLLM and vllm-ascend",
    "isolation": "upstream's symbols need vLLM and vllm-ascend",
    "engine": "the real engine needs vLLM, vllm-ascend and an NPU, real or software",
}
CHUNKS = (5, 130, 1, 2, 1, 117, 128, 64)  # inside, at and across windows and pages
# Least throughput of slots over that of other ways, by load: ordering must cost nothing, a device-wide wait must cost.
PRIVATE_RATIO = {"32,768 tokens in 2 uBatches": 1.0}
SYNCHRONISED_RATIO = {"32,768 tokens in 2 uBatches": 1.03, "2,048 tokens": 1.2, "2,048 tokens in 2 uBatches": 1.2}
STREAMS = 32  # of torch's pool
TOUCH_US = 20.0  # of the host, for the touches of one layer of one execution


@dataclass(frozen=True)
class Sizes:
    """How much each part does.

    Attributes:
        more_tokens: of the longer batch.
        timed: tokens and uBatches of the stacks that are timed.
        short: the same of one that is timed at another hidden size, where products are short.
        short_hidden: that size.
        turns: of each way of reuse, at each number of tokens.
        fault_rounds: of each way of reuse with random pauses.
        fault_tokens: of them.
        stress_tokens: of the stress.
        reuses: of workspace slots, in the stress.
        replays: of one graph.
        eager: executions between them.
        executions: of the soak.
        rounds: of the soak.
        jobs: processes of the soak.
        peak_hidden: hidden size where memory is measured, which has no part in it.
        replay_hidden: hidden size of the graphs.
    """

    more_tokens: int = 65536
    timed: tuple[tuple[int, int], ...] = ((2048, 1), (2048, 2), (32768, 1), (32768, 2), (65536, 2))
    short: tuple[int, int] = (32768, 1)
    short_hidden: int = 1024
    turns: int = 16
    fault_rounds: int = 20
    fault_tokens: int = 32768
    stress_tokens: int = 2048
    reuses: int = 100_000
    replays: int = 1000
    eager: int = 250
    executions: int = 100_000
    rounds: int = 96
    jobs: int = 8
    peak_hidden: int = 1024
    replay_hidden: int = 1024


FULL = Sizes()
QUICK = Sizes(
    more_tokens=4096,
    timed=((2048, 1), (2048, 2)),
    short=(4096, 1),
    turns=3,
    fault_rounds=3,
    fault_tokens=16384,
    stress_tokens=1024,
    reuses=1000,
    replays=20,
    eager=5,
    executions=600,
    rounds=6,
    jobs=2,
)


def prepare() -> torch.device:
    """The device, with the operators under their names.

    Raises:
        InputError: there is none.
    """
    if not torch.cuda.is_available():
        raise InputError(
            "--device cuda",
            f"torch {torch.__version__} sees no CUDA device",
            "run it on a machine that has one, or without it on the software NPU (make demo)",
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    operator.register()
    device = torch.device("cuda", torch.cuda.current_device())
    # cuBLAS takes memory for good on every stream that it first sees, and torch hands out streams of a small pool in
    # turn: taken now, it is no part of any peak.
    some = torch.zeros((64, 64), dtype=torch.bfloat16, device=device)
    for _ in range(STREAMS):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.mm(some, some, out_dtype=torch.float32)
    torch.cuda.synchronize()
    return device


def about(device: torch.device) -> dict[str, Any]:
    """Device, driver and versions."""
    driver = "unknown"
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        driver = f"unknown ({type(error).__name__})"
    import triton

    return {
        "name": torch.cuda.get_device_name(device),
        "memory": torch.cuda.get_device_properties(device).total_memory,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def leave_out(run: Run) -> None:
    """Name what is not shown on such a device."""
    for name, why in LEFT_OUT.items():
        print(f"      {name}: not shown here: {why}", flush=True)
    run.evidence["parity"]["tokens"] = {"not_shown_here": LEFT_OUT["tokens"]}
    run.evidence["admission"] = {"not_shown_here": LEFT_OUT["admission"], "engine": LEFT_OUT["engine"]}
    run.evidence["isolation"] = {"not_shown_here": LEFT_OUT["isolation"]}


def more_rows(run: Run, sizes: Sizes) -> None:
    """Rows against the definition, and a longer batch through every layer."""
    from afd_dsv4.compressor.stock import StockRuntime

    with run.part(2, f"rows: against the definition, and {sizes.more_tokens:,} tokens through every layer"):
        far = [definition.distance(kind, run.device, CHUNKS) for kind in CompressorKind]
        run.evidence["parity"]["definition"] = [
            {
                "kind": one.kind.value,
                "values": figure(one.values, "count", run.source),
                "off": figure(one.off, "count", run.source),
                "largest": figure(one.ulps, "bfloat16 ulp", run.source),
            }
            for one in far
        ]
        worst, off, values = max(d.ulps for d in far), sum(d.off for d in far), sum(d.values for d in far)
        words = f"{off:,} of {values:,} values differ from the definition, by at most {worst} bfloat16 ulp"
        run.check("rows: definition", worst <= 1, "at most 1 bfloat16 ulp", words)
        print(f"      {words}", flush=True)
        run.summary.append(
            ("values that differ from the definition, by 1 ulp at most", "", f"{off:,} of {values:,}", run.source.value)
        )

        batch = rows.Batch.of(sizes.more_tokens)
        inputs = rows.make_inputs(run.geometry, batch, run.device, 3)
        native, _ = rows.run_native(run.geometry, run.layout, batch, inputs, batch.cut_tokens(3))
        plugin = StockRuntime(
            run.geometry,
            run.layout,
            max_num_seqs=len(batch.chunks),
            max_num_batched_tokens=batch.tokens,
            device=run.device,
        )
        compared = rows.compare(rows.run_plugin(plugin, batch, inputs, batch.cut_tokens(3)).rows, native)
        total = compared.compressed + compared.tail
        run.evidence["parity"]["rows_full_hidden"] = {
            "tokens": batch.tokens,
            **{name: figure(value, "rows", run.source) for name, value in asdict(compared).items()},
        }
        run.check("rows: longer batch", compared.different == 0 < total, "0 mismatched rows", f"{compared}")
        print(f"      {batch.tokens:,} tokens: {compared.different:,} of {total:,} rows differ", flush=True)
        run.summary.append(
            (f"rows that differ, {batch.tokens:,} tokens", "", f"{compared.different} of {total:,}", run.source.value)
        )


def peaks(run: Run, sizes: Sizes) -> None:
    """Native's state of all layers against tails and slots, at once and twice the layers."""
    with run.part(5, "memory: every layer's native state at once, and at twice the layers"):
        geometry = replace(run.geometry, hidden_size=sizes.peak_hidden)
        found = dense.peaks(geometry, run.layout, run.device, tokens=run.tokens, seed=5)
        wrong = found.broken()
        expected = "native doubles, ours grows by tails and page lists"
        run.check("memory: twice the layers", not wrong, expected, "; ".join(wrong) or "so it is")
        run.evidence["memory"]["peaks"] = {
            side: [
                {"layers": peak.layers, **{n: figure(getattr(peak, n), "bytes", run.source) for n in ("state", "peak")}}
                for peak in getattr(found, side)
            ]
            for side in ("native", "ours")
        }
        for native, ours in zip(found.native, found.ours, strict=True):
            for what in ("state", "peak"):
                pair = size(getattr(native, what)), size(getattr(ours, what))
                run.summary.append((f"{native.layers} layers, {run.tokens:,} tokens: {what}", *pair, run.source.value))
            print(f"      {native.layers} layers: {size(native.peak)} natively, {size(ours.peak)} ours", flush=True)


def reuse(run: Run, sizes: Sizes) -> None:
    """The fault of a shared workspace, its absence over many reuses, and what ordering costs."""
    with run.part(6, "reuse: staging rows shared by layers, streams and uBatches"):
        found: dict[str, Any] = {}
        _faults(run, sizes, found)
        _stress(run, sizes, found)
        hidden = run.geometry.hidden_size
        for tokens, ubatches, width in (*((*load, hidden) for load in sizes.timed), (*sizes.short, sizes.short_hidden)):
            _timing(run, sizes, tokens, ubatches, width, found)
        run.evidence["performance"]["reuse"] = found


def _load(run: Run, tokens: int, ubatches: int = 2, hidden: int = 0) -> tuple[staging.Load, torch.Tensor]:
    geometry = replace(run.geometry, hidden_size=hidden or run.geometry.hidden_size)
    load = staging.Load(geometry, tokens, run.device, 7, ubatches)
    return load, staging.truth(load)


def _faults(run: Run, sizes: Sizes, found: dict[str, Any]) -> None:
    load, expected = _load(run, sizes.fault_tokens)
    ways: dict[str, tuple[staging.Reuse, bool]] = {
        "shared, nothing orders its reuse": (staging.Reuse.UNORDERED, True),
        "slots, fences and waits off": (staging.Reuse.SLOTS, False),
        "slots": (staging.Reuse.SLOTS, True),
    }
    for name, (way, ordered) in ways.items():
        got = staging.rounds(load, expected, way, sizes.fault_rounds, 11, ordered=ordered, lag=name == "slots")
        corrupt = sum(one.rows > 0 for one in got)
        worst = sum(one.rows for one in got)
        words = f"{corrupt} of {len(got)} rounds corrupt, {worst:,} rows"
        if name == "slots":
            clean = corrupt == 0 == sum(one.unordered for one in got)
            run.check(f"reuse: {name}", clean, "0 corrupt rows, 0 unordered reuses", words)
        else:
            blind = way is staging.Reuse.SLOTS and not all(one.unordered for one in got)
            run.check(f"reuse: {name}", corrupt == len(got) and not blind, "corrupt rows in every round", words)
        found[name] = {
            "rounds": figure(len(got), "count", run.source),
            "corrupt_rounds": figure(corrupt, "count", run.source),
            "corrupt_rows": figure(worst, "rows", run.source),
            "unordered_reuses": figure(sum(one.unordered for one in got), "count", run.source),
        }
        print(f"      {name}: {words}", flush=True)
        run.summary.append((f"corrupt rounds, {name}", "", f"{corrupt} of {len(got)}", run.source.value))


def _stress(run: Run, sizes: Sizes, found: dict[str, Any]) -> None:
    load, expected = _load(run, sizes.stress_tokens)
    with staging.counted_synchronisations() as control:
        expected.sum().item()
    run.check("reuse: host waits are seen", control.count > 0, "a planted one is counted", str(control.count))
    got = staging.stress(load, expected, sizes.reuses, 13)
    run.check(
        "reuse: stress",
        got.reuses >= sizes.reuses and not got.wrong and not got.unordered,
        f">= {sizes.reuses:,} reuses, 0 corrupt bytes, 0 unordered",
        f"{got.reuses:,} reuses, {got.wrong:,} of {got.bytes:,} bytes corrupt, {got.unordered:,} unordered",
    )
    waits = got.host_synchronisations
    run.check("reuse: the host does not wait", waits == 0, "0 synchronisations", str(waits))
    found["stress"] = {
        name: figure(
            value, {"touch_us": "us", "seconds": "s", "bytes": "bytes", "wrong": "bytes"}.get(name, "count"), run.source
        )
        for name, value in asdict(got).items()
    }
    print(
        f"      {got.reuses:,} reuses in {got.seconds:.0f} s: {got.wrong} of {got.bytes:,} bytes corrupt, "
        f"{got.unordered} unordered in {got.records:,} records, {waits} host synchronisations",
        flush=True,
    )
    run.summary += [
        (f"corrupt bytes, {got.reuses:,} slot reuses", "", f"{got.wrong} of {got.bytes:,}", run.source.value),
        ("  unordered reuses in its trace", "", str(got.unordered), run.source.value),
        ("  host synchronisations in it", "", str(waits), run.source.value),
    ]


def _timing(run: Run, sizes: Sizes, tokens: int, ubatches: int, hidden: int, found: dict[str, Any]) -> None:
    load, expected = _load(run, tokens, ubatches, hidden)
    what = f"{tokens:,} tokens in {ubatches} uBatches" if ubatches > 1 else f"{tokens:,} tokens"
    if hidden != run.geometry.hidden_size:
        what += f", hidden size {hidden:,}"
    got = staging.measure(load, expected, turns=sizes.turns)
    middle = {way: {other: ratios[1] for other, ratios in over.items()} for way, over in got.over.items()}
    private, synchronised = middle["slots"]["private"], middle["slots"]["synchronised"]
    run.check(f"reuse: same rows at {what}", got.wrong == 0, "0 bytes", f"{got.wrong:,}")
    run.check(f"cost: touches at {what}", got.touch_us <= TOUCH_US, f"<= {TOUCH_US} us", f"{got.touch_us:.1f} us")
    if (least := PRIVATE_RATIO.get(what)) is not None:
        run.check(
            f"cost: private at {what}", round(private, 2) >= least, f">= {least}, to two decimals", f"{private:.4f}"
        )
    if (least := SYNCHRONISED_RATIO.get(what)) is not None:
        run.check(
            f"cost: synchronised at {what}", round(synchronised, 2) >= least, f">= {least}", f"{synchronised:.4f}"
        )
    found[what] = {
        "hidden": hidden,
        "ms_a_forward": {name: figure(round(ms, 3), "ms", run.source) for name, ms in got.ms.items()},
        "host_ms_a_forward": {name: figure(round(ms, 3), "ms", run.source) for name, ms in got.host_ms.items()},
        "staging_rows": {name: figure(value, "bytes", run.source) for name, value in got.rows.items()},
        "peak": {name: figure(value, "bytes", run.source) for name, value in got.peak.items()},
        "throughput_of": {
            way: {f"over_{other}": figure(round(ratios[1], 4), "ratio", run.source) for other, ratios in over.items()}
            for way, over in got.over.items()
        },
        "quartiles_of": {
            way: {f"over_{other}": [round(ratios[0], 4), round(ratios[2], 4)] for other, ratios in over.items()}
            for way, over in got.over.items()
        },
        "touches_a_layer": figure(round(got.touch_us, 2), "us", run.source),
    }
    ms = ", ".join(f"{name} {value:.2f}" for name, value in got.ms.items())
    low, _, high = got.over["slots"]["private"]
    print(
        f"      {what}: {ms} ms; slots over private {private:.3f} ({low:.3f} to {high:.3f}), over synchronised "
        f"{synchronised:.3f}; two areas {middle['two_areas']['private']:.3f}, "
        f"{middle['two_areas']['synchronised']:.3f}; touches {got.touch_us:.1f} us a layer",
        flush=True,
    )
    where = run.source.value
    run.summary += [
        (f"throughput over private buffers, {what}", "1", f"{private:.3f}", where),
        ("  over a device synchronisation per layer", "1", f"{synchronised:.3f}", where),
        ("  staging rows", size(got.rows["private"]), size(got.rows["slots"]), where),
    ]


def graphs(run: Run, sizes: Sizes) -> None:
    """One graph with a fixed slot, replayed between eager executions."""
    with run.part(7, f"graphs: {sizes.replays:,} replays between {sizes.eager:,} eager executions"):
        geometry: ModelGeometry = replace(run.geometry, hidden_size=sizes.replay_hidden)
        got = replays.replay_steps(geometry, run.layout, run.device, replays=sizes.replays, eager=sizes.eager, seed=17)
        run.check(
            "order: rows of replays",
            got.different == 0 < got.rows,
            "0 mismatched rows",
            f"{got.different} of {got.rows:,}",
        )
        run.check("order: trace of replays", got.unordered == 0, "0 unordered reuses", str(got.unordered))
        run.check("order: replays with wiped lists", got.control > 0, "rows that differ", str(got.control))
        waits = got.host_synchronisations + got.host_waits
        run.check("order: replays wait for nothing", waits == 0, "0 waits of the host", f"{waits}")
        run.evidence["order"]["replays"] = {
            name: figure(value, "s" if name == "seconds" else "count", run.source)
            for name, value in asdict(got).items()
        }
        print(
            f"      {got.different} of {got.rows:,} rows differ; {got.control} once page lists are wiped; "
            f"{got.unordered} unordered, {waits} host waits, {got.seconds:.1f} s",
            flush=True,
        )
        run.summary.append(
            (
                f"rows that differ, {got.replays:,} replays, {got.eager:,} eager",
                "",
                f"{got.different} of {got.rows:,}",
                run.source.value,
            )
        )


def soak(run: Run, sizes: Sizes) -> None:
    """Random forwards with faults through the stock runtime, every byte of pages and tables compared."""
    from afd_dsv4.evidence import soak as soaking
    from afd_dsv4.evidence.soak_load import Totals

    with run.part(8, f"soak: {sizes.executions:,} executions, every byte compared, fences off as a control"):
        began = time.monotonic()
        jobs = [
            soaking.Job(number, sizes.jobs, "cuda", 20261130, sizes.executions, sizes.rounds, began)
            for number in range(sizes.jobs)
        ]
        blind, parts = soaking.play(jobs)
        wrong = soaking.failures(blind, parts)
        totals = sum(parts, Totals())
        run.check(
            "order: soak",
            not wrong,
            "nothing corrupt, lost or violated; the control corrupts",
            "; ".join(wrong) or str(totals),
        )
        for line in totals.violations[:5]:
            print(f"      {line}", flush=True)
        counts = {
            "executions": totals.executions,
            "launches": totals.launches,
            "bytes_compared": totals.audit.compared,
            "bytes_wrong": totals.audit.wrong,
            "unordered": totals.unordered,
            "lost": totals.lost_count,
            "faults": totals.faults.total(),
            "violations": len(totals.violations),
            "trace_records": totals.records,
            "control_rounds": soaking.UNORDERED_ROUNDS,
            "control_rounds_blind": len(blind),
        }
        run.evidence["order"]["soak"] = {name: figure(value, "count", run.source) for name, value in counts.items()}
        seconds = time.monotonic() - began
        print(f"      {totals}, control blind in {len(blind)} rounds, {seconds:.0f} s", flush=True)
        run.summary.append(
            (
                f"soak: corrupt bytes, {totals.executions:,} executions",
                "",
                f"{totals.audit.wrong} of {totals.audit.compared:,}",
                run.source.value,
            )
        )


PARTS: tuple[Callable[[Run, Sizes], None], ...] = (peaks, reuse, graphs, soak)
