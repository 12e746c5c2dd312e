# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The evidence run: the claim measured in one process, on an NPU where there is one, else on the software NPU.

Admission by the real vLLM scheduler, execution of the batch that native cannot admit, rows and tokens compared, memory
counted, planted faults that must be found, the real engine at work: each part is a module of its own; this one runs
them in order, says what it does, and turns what they found into checks and verdicts. Exit status: 0 when everything
passed, 1 when something failed, 2 for bad input. Nothing is claimed about speed or about Ascend hardware by a run on
the software NPU. A CUDA device, if it is asked for by name, runs what needs neither vLLM nor an NPU, and parts of its
own (`cuda/parts.py`); nothing is claimed about Ascend hardware there either.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afd_dsv4.compat.harness import SchedulerProcess, admission_evidence
from afd_dsv4.compat.stack import installed
from afd_dsv4.evidence import isolation
from afd_dsv4.evidence.page import render
from afd_dsv4.evidence.report import (
    CHROME_FILE,
    PAGE_FILE,
    POOLS,
    SECTIONS,
    TRACE_FILE,
    Check,
    Point,
    Source,
    Verdict,
    figure,
    forget,
    prepare,
    size,
    strict,
    table,
    write,
)
from afd_dsv4.files import write_whole
from afd_dsv4.geometry import DEFAULT_STACK, InputError, ModelGeometry, PageLayout, page_layout, preset
from afd_dsv4.softnpu import launcher, runtime
from afd_dsv4.workspace import order
from afd_dsv4.workspace.chrome import chrome
from afd_dsv4.workspace.sizing import size_workspace
from afd_dsv4.workspace.trace import Record, Trace

if TYPE_CHECKING:
    import torch

    from afd_dsv4.evidence.engine import Contention
    from afd_dsv4.evidence.rows import Comparison
    from afd_dsv4.evidence.tokens import TokenReport

BLOCK_SIZE = 128
SLOTS = 2
REDUCED_HIDDEN = 64
SEED = 20261129
MAX_DELAY_US = 300
PUBLISHED_NEED = {"c4_mla": 125, "c128_mla": 4, "swa": 998, "c4_state": 7973, "c128_state": 1994}
PUBLISHED_FREE = 6958
PLUGIN_NEED_LIMIT = 1140
STATE_LIMIT = 64 << 20  # tails, spares, staging and lists of the demonstration's requests
NATIVE_PAYLOAD = 9 << 30  # least payload of native's state for 32,768 Flash tokens
FULL_TOKENS = 32768
SMALL_TOKENS = 4096  # load of the sabotaged launches

RFC = {
    1: "token parity with native",
    2: "no contamination across requests or layers",
    3: "device-event evidence that no slot is overwritten early",
    4: "peak transient memory does not scale with the layer count",
    5: "performance is not lost to synchronisation",
    6: "non-AFD behaviour unchanged when off",
    7: "a 32K batch is scheduled and executed on the target stack",
}
PARTS = 8
HOST_LIMIT = 12 << 30
PLANTED = {
    "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots",
    "vllm.v1.core.kv_cache_utils.get_kv_cache_groups",
}


@dataclass
class Run:
    """State of one evidence run: where it runs, what it found so far."""

    source: Source
    device: torch.device
    geometry: ModelGeometry
    layout: PageLayout
    tokens: int
    out: Path
    evidence: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    summary: list[Sequence[str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    records: Sequence[Record] = ()

    @property
    def module(self) -> Any:
        """torch.npu or torch.cuda."""
        import torch

        return torch.get_device_module(self.device)

    @contextmanager
    def part(self, number: int, name: str) -> Iterator[None]:
        """Say what is being done, and how long it took. An exception fails the part, and the run goes on."""
        started = time.perf_counter()
        print(f"[{number}/{PARTS}] {name} ...", flush=True)
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            traceback.print_exc()
            self.check(
                f"{name.split(':')[0]}: ran to its end", False, "no exception", f"{type(error).__name__}: {error}"
            )
        self.seconds[name] = time.perf_counter() - started
        print(f"      {self.seconds[name]:.0f} s", flush=True)

    def check(self, name: str, passed: bool, expected: str, found: str) -> bool:
        """Note a condition; say at once when it does not hold."""
        self.checks.append(Check(name, passed, expected, found))
        if not passed:
            print(f"      FAIL {name}: expected {expected}, found {found}", flush=True)
        return passed

    def holds(self, *prefixes: str) -> bool:
        """Whether every check whose name starts like one of these passed; each must have one."""
        found = [[check.passed for check in self.checks if check.name.startswith(prefix)] for prefix in prefixes]
        return all(passed and all(passed) for passed in found)


def main(options: argparse.Namespace) -> int:
    """Run `afd-dsv4 evidence`. See `cli.py` for the options."""
    source = _source(options.device)
    prepare(options.out)
    if source is Source.SOFTNPU and not runtime.is_active():
        try:
            libraries = launcher.library_dir()
        except launcher.SoftnpuError as error:
            remedy = "run `make demo` in a checkout of afd-dsv4: an installed package brings no software NPU"
            raise InputError("no NPU here, and the software NPU", "its libraries are not built", remedy) from error
        command = [sys.executable, "-m", "afd_dsv4", *options.argv]
        os.execvpe(command[0], command, launcher.environment(os.environ, libraries))
    if source is Source.CUDA:
        return _run(options, source, None)
    # The child imports vLLM while we compress; it is asked last.
    with SchedulerProcess() as scheduler:
        return _run(options, source, scheduler)


def _source(device: str) -> Source:
    """Which device to use. A real ACL library on this machine means a real NPU."""
    if runtime.is_active():
        if device in ("npu", "cuda"):
            raise InputError(
                f"--device {device}", "this process runs on the software NPU", "start it without the launcher"
            )
        return Source.SOFTNPU
    if device == "cuda":
        return Source.CUDA
    real = ctypes.util.find_library("ascendcl") is not None or "ASCEND_TOOLKIT_HOME" in os.environ
    if device == "npu" and not real:
        raise InputError(
            "--device npu", "no CANN runtime (libascendcl.so) on this machine", "install CANN, or leave it out"
        )
    return Source.NPU if real and device != "softnpu" else Source.SOFTNPU


def _run(options: argparse.Namespace, source: Source, scheduler: SchedulerProcess | None) -> int:
    packages = "torch" if source is Source.CUDA else "torch and torch_npu"
    try:
        if source is Source.CUDA:  # a torch_npu that is installed without CANN would not let torch be imported
            os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        import torch

        if source is not Source.CUDA:
            import torch_npu  # noqa: F401 - registers the device
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        remedy = "install the supported stack, or use --device softnpu in a checkout"
        raise InputError(f"{packages} for --device {source.value}", first, remedy) from error

    from afd_dsv4.evidence.rows import Batch

    if source is Source.CUDA:
        from afd_dsv4.evidence.cuda import parts

        device = parts.prepare()
    else:
        device = torch.device("npu")
    if source is Source.SOFTNPU:
        runtime.install()
        runtime.set_schedule(SEED, MAX_DELAY_US)
    elif source is Source.NPU:
        _load_operators()
    run = Run(
        source, device, preset(options.model), page_layout(DEFAULT_STACK, BLOCK_SIZE), options.tokens, options.out
    )
    try:
        batch = Batch.of(options.tokens)
    except ValueError as error:
        raise InputError("--tokens", str(options.tokens), str(error)) from error
    forget(options.out)
    run.evidence.update({section: {} for section in SECTIONS})
    run.evidence.update(
        stack={**installed().as_dict(), "device": source.value, "layout": DEFAULT_STACK, "block_size": BLOCK_SIZE},
        command=["afd-dsv4", *options.argv],
        batch={
            "tokens": batch.tokens,
            "requests": [
                {"name": chunk.request, "start": chunk.start, "end": chunk.end, "tokens": chunk.tokens}
                for chunk in batch.chunks
            ],
            "layers": len({compressor.layer for compressor in run.geometry.compressors}),
            "waived": [],
        },
    )
    print(
        f"afd-dsv4 evidence on {source.value}: {options.model}, {batch.tokens:,} tokens in {len(batch.chunks)} requests"
    )
    _rows(run)
    if scheduler is None:
        _on_cuda(run, getattr(options, "sizes", None))
    else:
        _rows_at_full_hidden(run)
        _controls(run)
        _memory_scaling(run)
        _tokens(run)
        _admission(run, scheduler)
        _isolation(run)
        _engine(run)
    _performance(run)
    return _finish(run, options)


def _on_cuda(run: Run, sizes: Any) -> None:
    """All parts but the first, on a CUDA device; `sizes` of them, None for the full ones."""
    from afd_dsv4.evidence.cuda import parts

    sizes = sizes or parts.FULL
    run.evidence["stack"]["cuda"] = parts.about(run.device)
    parts.leave_out(run)
    parts.more_rows(run, sizes)
    _controls(run)
    _memory_scaling(run)
    for part in parts.PARTS:
        part(run, sizes)


def _load_operators() -> None:
    """Register vllm-ascend's operators on a real NPU. Never run: no one has had the hardware yet."""
    import torch

    try:
        from vllm_ascend.utils import enable_custom_op

        enable_custom_op()
        found = hasattr(torch.ops._C_ascend, "compressor")
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError("--device npu", f"vllm-ascend's operators do not load ({error})", "mend the stack") from error
    if not found:
        raise InputError("--device npu", "_C_ascend.compressor is not registered", "install a vllm-ascend that has it")


def _waive(run: Run, name: str) -> None:
    """Waive a limit of the operator, by name and in print. Only the software NPU can."""
    import torch

    if run.source is not Source.SOFTNPU:
        raise InputError("--device npu", f"this part needs the operator limit {name} waived", "use --device softnpu")
    torch.ops.softnpu.waive(name, True)
    _note_waiver(run, name)


def _note_waiver(run: Run, name: str) -> None:
    """Say once, in print and in the file, that an operator limit is waived."""
    if name not in run.evidence["batch"]["waived"]:
        run.evidence["batch"]["waived"].append(name)
        print(f"      operator limit waived: {name}", flush=True)


def _rows(run: Run) -> None:
    """Item b: all layers, two uBatches, the cut at every phase and once behind the last token."""

    from afd_dsv4.compressor.stock import StockRuntime
    from afd_dsv4.evidence import rows

    geometry = run.geometry
    batch = rows.Batch.of(run.tokens)
    if run.source is Source.SOFTNPU:
        geometry = replace(geometry, hidden_size=REDUCED_HIDDEN)
    seqs = len(batch.chunks)
    with run.part(1, f"rows: {run.tokens:,} tokens through every layer, native and plugin"):
        if run.source is Source.SOFTNPU:
            _waive(run, "compressor.hidden")
            print(f"      hidden size {REDUCED_HIDDEN} instead of {run.geometry.hidden_size}; state sizes full")
        inputs = rows.make_inputs(geometry, batch, run.device, SEED)
        phases: list[int | None] = [*rows.CUT_PHASES, None]
        native, largest = rows.run_native(geometry, run.layout, batch, inputs, batch.cut_tokens(phases[0]))
        run.module.synchronize()
        before = run.module.memory_allocated()
        run.module.reset_peak_memory_stats()
        plugin = StockRuntime(
            geometry,
            run.layout,
            max_num_seqs=seqs,
            max_num_batched_tokens=run.tokens,
            device=run.device,
            slots=SLOTS,
            trace=Trace(None),
        )
        held = run.module.memory_allocated() - before
        total = rows.Comparison()
        parity = []
        for phase in phases:
            if run.source is not Source.SOFTNPU:
                # Only the software NPU projects a row the same whatever its neighbours: elsewhere cut native alike.
                native, largest = rows.run_native(geometry, run.layout, batch, inputs, batch.cut_tokens(phase))
            result = rows.run_plugin(plugin, batch, inputs, batch.cut_tokens(phase))
            compared = rows.compare(result.rows, native)
            where = "second uBatch empty" if phase is None else f"cut at phase {phase}"
            parity.append({"cut": where, "seconds": round(result.seconds, 2), **_comparison(compared, run.source)})
            run.check(f"rows: {where}", compared.different == 0, "0 mismatched rows", _words(compared))
            _add(total, compared)
            peak = run.module.max_memory_allocated()
            print(f"      {where}: {_words(compared)}, {result.seconds:.1f} s", flush=True)
            del result
        _memory(run, plugin, seqs, native_layer=largest, held=held, inputs=before, peak=peak)
        _order(run, plugin.trace)
        run.evidence["parity"].update(rows=parity, rows_total=_comparison(total, run.source))
        counters = asdict(plugin.arena.counters)
        run.evidence["order"].update(
            (name, figure(value, "count", run.source))
            for name, value in {**counters, "host_waits": plugin.staging.host_waits}.items()
        )
        run.summary += [
            (f"rows compared, {len(phases)} cuts", "", f"{total.compressed + total.tail:,}", run.source.value),
            ("rows that differ", "", f"{total.different:,}", run.source.value),
        ]


def _order(run: Run, trace: Trace) -> None:
    """Write the trace of the rows, and judge the order of every reuse in it."""
    stack = run.evidence["stack"]
    trace.save(run.out / TRACE_FILE, about={"command": run.evidence["command"], "stack": stack})
    run.records = trace.records()
    write_whole(run.out / CHROME_FILE, json.dumps(chrome(run.records)))
    report = order.check(run.records, trace.dropped)
    unordered = len(report.violations)
    for violation in report.violations[:3]:
        print(f"      {violation}", flush=True)
    run.check(
        "order: trace of the rows",
        unordered == 0 and report.touches > 0 and report.dropped == 0,
        "0 unordered reuses, nothing dropped",
        f"{unordered:,} in {report.records:,} records, {report.dropped:,} dropped",
    )
    run.evidence["order"]["trace"] = {
        "file": TRACE_FILE,
        "unordered_reuses": figure(unordered, "count", run.source),
        **{
            name: figure(getattr(report, name), "count", run.source)
            for name in ("records", "leases", "touches", "edges", "dropped")
        },
    }
    run.summary.append(
        (f"unordered reuses in {report.records:,} trace records", "", f"{unordered:,}", run.source.value)
    )


def _rows_at_full_hidden(run: Run) -> None:
    """Item b: one C4 and one C128 layer with the model's own hidden size, no operator limit waived."""
    from afd_dsv4.compressor.stock import StockRuntime
    from afd_dsv4.evidence import rows

    geometry = replace(run.geometry, name=f"{run.geometry.name}, two layers", num_layers=2, compress_ratios=(4, 128))
    batch = rows.Batch.of(run.tokens)
    with run.part(2, f"rows: one C4 and one C128 layer at hidden size {geometry.hidden_size}"):
        if run.source is Source.SOFTNPU:
            import torch

            torch.ops.softnpu.waive("compressor.hidden", False)
        geometry.check_stock_operator()
        inputs = rows.make_inputs(geometry, batch, run.device, SEED + 1)
        native, _ = rows.run_native(geometry, run.layout, batch, inputs, batch.cut_tokens(3))
        plugin = StockRuntime(
            geometry,
            run.layout,
            max_num_seqs=len(batch.chunks),
            max_num_batched_tokens=run.tokens,
            device=run.device,
            slots=SLOTS,
        )
        compared = rows.compare(rows.run_plugin(plugin, batch, inputs, batch.cut_tokens(3)).rows, native)
        run.evidence["parity"]["rows_full_hidden"] = _comparison(compared, run.source)
        run.check("rows: full hidden size", compared.different == 0, "0 mismatched rows", _words(compared))
        print(f"      {_words(compared)}", flush=True)


def _controls(run: Run) -> None:
    """Item e: the same load without touches, launches with each table rule broken, and the rule checker's mutants."""
    from afd_dsv4.compressor.stock import StockRuntime
    from afd_dsv4.evidence import controls, rows

    geometry = replace(run.geometry, hidden_size=REDUCED_HIDDEN if run.source is Source.SOFTNPU else 1024)
    with run.part(3, "planted faults: touches off, table rules broken"):
        if run.source is Source.SOFTNPU:
            _waive(run, "compressor.hidden")
        batch = rows.Batch.of(run.tokens)
        limits: dict[str, Any] = {"max_num_seqs": len(batch.chunks), "device": run.device, "slots": SLOTS}
        inputs = rows.make_inputs(geometry, batch, run.device, SEED)
        native, _ = rows.run_native(geometry, run.layout, batch, inputs, batch.cut_tokens(1))
        unordered: list[dict[str, Any]] = []
        for alternate in (False, True):
            where = "layers alternating between the streams" if alternate else "a uBatch on each stream"
            different, reuses = {}, {}
            for ordered in (True, False):
                plugin = StockRuntime(
                    geometry, run.layout, max_num_batched_tokens=run.tokens, ordered=ordered, **limits
                )
                result = rows.run_plugin(plugin, batch, inputs, batch.cut_tokens(1), alternate=alternate)
                different[ordered] = rows.compare(result.rows, native).different
                reuses[ordered] = len(order.check(plugin.trace.records(), plugin.trace.dropped).violations)
                del result, plugin
            run.check(f"order: touches on, {where}", different[True] == 0, "0 mismatched rows", f"{different[True]:,}")
            # Whether a stream loses the race or not, a trace without waits is in no order.
            run.check(
                f"order: traces, {where}",
                reuses[True] == 0 and reuses[False] > 0,
                "0 unordered reuses with touches, some without",
                f"{reuses[True]:,} with, {reuses[False]:,} without",
            )
            if run.source is Source.SOFTNPU:  # delays are seeded there; a device need not lose the race
                run.check(f"order: touches off, {where}", different[False] > 0, "corrupt rows", f"{different[False]:,}")
            unordered.append(
                {
                    "load": where,
                    "mismatched_rows_touches_on": figure(different[True], "rows", run.source),
                    "mismatched_rows_touches_off": figure(different[False], "rows", run.source),
                    "unordered_reuses_touches_on": figure(reuses[True], "count", run.source),
                    "unordered_reuses_touches_off": figure(reuses[False], "count", run.source),
                }
            )
            print(
                f"      {where}: with touches {different[True]:,} rows differ and {reuses[True]:,} reuses are "
                f"unordered, without {different[False]:,} and {reuses[False]:,}",
                flush=True,
            )
        mutants = controls.check_mutants()
        for mutant in mutants:
            name = f"table rule {mutant.rule.name}: {mutant.mutant} (ratio {mutant.ratio})"
            run.check(name, mutant.caught, "named by the checker", ", ".join(rule.name for rule in mutant.named))
        broken = _sabotage(run)
        run.evidence["order"]["negative_controls"] = {
            "touches": unordered,
            "table_rules": [
                {"rule": mutant.rule.name, "mutant": mutant.mutant, "ratio": mutant.ratio, "caught": mutant.caught}
                for mutant in mutants
            ],
            "launched_broken": broken,
        }
        caught = sum(mutant.caught for mutant in mutants)
        print(f"      table rules broken on paper: {caught} of {len(mutants)} named", flush=True)
        run.summary += [
            (
                "rows that differ, touches off",
                "",
                f"{unordered[0]['mismatched_rows_touches_off']['value']:,}",
                run.source.value,
            ),
            ("broken table rules caught", "", f"{caught} of {len(mutants)}", "plan"),
        ]


def _sabotage(run: Run) -> list[dict[str, Any]]:
    """Launch with the rules broken whose breach the operator turns into wrong rows, on a small load."""
    from afd_dsv4.evidence import controls, rows

    hidden = REDUCED_HIDDEN if run.source is Source.SOFTNPU else 1024
    geometry = replace(run.geometry, num_layers=3, compress_ratios=(4, 128, 4), hidden_size=hidden)
    batch = rows.Batch.of(min(SMALL_TOKENS, run.tokens))
    inputs = rows.make_inputs(geometry, batch, run.device, SEED)
    native, _ = rows.run_native(geometry, run.layout, batch, inputs, batch.cut_tokens(1))
    found = []
    for rule, sabotage in controls.SABOTAGES.items():
        plugin = controls.SabotagedRuntime(
            geometry,
            run.layout,
            max_num_seqs=len(batch.chunks),
            max_num_batched_tokens=batch.tokens,
            device=run.device,
            slots=SLOTS,
        )
        plugin.sabotage = sabotage
        compared = rows.compare(rows.run_plugin(plugin, batch, inputs, batch.cut_tokens(1)).rows, native)
        run.check(f"launched with rule {rule.name} broken", compared.different > 0, "wrong rows", _words(compared))
        found.append({"rule": rule.name, "sabotage": sabotage.__name__, **_comparison(compared, run.source)})
        print(f"      launched with rule {rule.name} broken: {compared.different:,} rows differ", flush=True)
    return found


def _memory(run: Run, plugin: Any, seqs: int, *, native_layer: int, held: int, inputs: int, peak: int) -> None:
    """Item d: what the runtime holds, by class, against the sizing expression, and what native would need."""
    from afd_dsv4.evidence import memory

    sizes = size_workspace(run.geometry, run.layout, max_num_seqs=seqs, max_num_batched_tokens=run.tokens, slots=SLOTS)
    measured = memory.measure(plugin, SLOTS)
    payload = run.tokens * sum(compressor.row_bytes for compressor in run.geometry.compressors)
    padded = run.tokens * sum(
        run.layout.page_bytes(compressor.kind) // run.layout.page_rows(compressor.kind)
        for compressor in run.geometry.compressors
    )
    bounded = measured["tails"] + measured["spares"] + measured["staging"] + measured["lists"]
    expected = memory.planned(sizes)
    run.check("memory: allocated as sized", measured == expected, str(expected), str(measured))
    if run.tokens == FULL_TOKENS:
        run.check("memory: native payload", payload >= NATIVE_PAYLOAD, f">= {size(NATIVE_PAYLOAD)}", size(payload))
        run.check(
            "memory: tails, spares, staging, lists", bounded <= STATE_LIMIT, f"<= {size(STATE_LIMIT)}", size(bounded)
        )
    run.evidence["memory"].update(
        {
            "native_state_payload": figure(payload, "bytes", Source.PLAN),
            "native_state_padding": figure(padded - payload, "bytes", Source.PLAN),
            "native_largest_layer_allocated": figure(native_layer, "bytes", run.source),
            **{f"plugin_{name}": figure(value, "bytes", run.source) for name, value in measured.items()},
            "plugin_tails_spares_staging_lists": figure(bounded, "bytes", run.source),
            "plugin_held_by_the_allocator": figure(held, "bytes", run.source),
            "activations_peak": figure(peak - inputs - held, "bytes", run.source),
            "device_peak": figure(peak, "bytes", run.source),
            "tail_bytes_per_request": figure(sizes.tail_bytes_per_request, "bytes", Source.PLAN),
            "slot_bytes": figure(sizes.slot_bytes, "bytes", Source.PLAN),
        }
    )
    run.summary += [
        ("compressor state of the batch, payload", size(payload), size(bounded), f"plan, {run.source.value}"),
        ("  tails", "", size(measured["tails"]), run.source.value),
        ("  spares", "", size(measured["spares"]), run.source.value),
        ("  lists and staging", "", size(measured["lists"] + measured["staging"]), run.source.value),
        ("  state tables (apart)", "", size(measured["tables"]), run.source.value),
    ]


def _memory_scaling(run: Run) -> None:
    """Item d: what must not depend on the number of layers or on the chunk."""
    from afd_dsv4.evidence import memory, rows

    with run.part(4, "memory: 1, 2 and 4 times the layers and the chunk"):
        scaled, wrong = memory.scale(
            run.geometry, run.layout, run.device, max_num_seqs=4, tokens=run.tokens, slots=SLOTS
        )
        hidden = REDUCED_HIDDEN if run.source is Source.SOFTNPU else 1024
        small = replace(run.geometry, num_layers=3, compress_ratios=(4, 128, 4), hidden_size=hidden)
        forward, more = memory.scale_forward(
            small,
            run.layout,
            run.device,
            batch=rows.Batch.of(min(SMALL_TOKENS, run.tokens)),
            slots=SLOTS,
            seed=SEED,
        )
        run.evidence["memory"]["scaling"] = [
            {
                "what": entry.what,
                "scale": entry.scale,
                **{
                    name: figure(value, "bytes", run.source)
                    for name, value in asdict(entry).items()
                    if name not in ("what", "scale") and value is not None
                },
            }
            for entry in (*scaled, *forward)
        ]
        expected = "spares, staging and the peak of a forward constant in layers; tails, too, constant in the chunk"
        run.check("memory: scaling", not wrong + more, expected, "; ".join(wrong + more) or "so it is")
        peak = forward[0].transient or 0
        print(f"      a forward of {small.num_layers}, 6 and 12 layers adds {size(peak)} at its peak", flush=True)


def _tokens(run: Run) -> None:
    """Item c: an independent model generates the same tokens with our compressors."""
    from afd_dsv4.evidence.tokens import run_token_parity

    with run.part(5, "tokens: transformers' DeepSeek-V4 with its compressors replaced"):
        if run.source is not Source.SOFTNPU:
            # The comparison is in FP32, which the shipped operator does not take.
            run.evidence["parity"]["tokens"] = {"not_shown_here": "the operator of a device takes no FP32"}
            print("      not shown here: the operator of a device takes no FP32", flush=True)
            return
        report: TokenReport = run_token_parity(device="npu", seed=SEED)
        run.evidence["parity"]["tokens"] = {**asdict(report), "source": run.source.value}
        for name in report.waived_limits:
            _note_waiver(run, name)
        compared = report.free_running
        words = (
            f"{compared.mismatches} of {compared.decided} decided positions differ; "
            f"{compared.decided} of {report.generated_positions} are decided"
        )
        run.check(
            "tokens", report.passed, "0 different tokens at >= 95 % of positions", "; ".join(report.failures) or words
        )
        print(f"      {words} ({100 * report.decided_share:.1f} %)", flush=True)
        run.summary += [
            (
                "tokens compared (margin above rounding)",
                "",
                f"{compared.decided} of {report.generated_positions}",
                run.source.value,
            ),
            ("tokens that differ", "", str(compared.mismatches), run.source.value),
        ]


def _admission(run: Run, scheduler: SchedulerProcess) -> None:
    """Item a: what the real scheduler does, natively and with the plugin, from the same budget."""
    from afd_dsv4.evidence import memory

    with run.part(6, "admission: the real vLLM scheduler with vllm-ascend's KV groups"):
        lengths = [entry["tokens"] for entry in run.evidence["batch"]["requests"]]
        found = admission_evidence(scheduler, geometry=run.geometry, batch=lengths, block_size=BLOCK_SIZE, slots=SLOTS)
        run.evidence["admission"] = {"source": Source.PLAN.value, "scenarios": found}
        said = ""
        for row in found:
            pool = _pool(row)
            if pool != said:
                print(f"      {pool}", flush=True)
            said = pool
            name = f"admission: {row['scenario']}, {row['max_num_seqs']} requests"
            native, plugin = row["native"], row["plugin"]
            waits = f"needs {native['blocks_needed']:,} of {native['free_blocks']:,} free"
            takes = f"needs {plugin['blocks_needed']:,} of {plugin['free_blocks']:,} free"
            if row["scenario"] != "packed_batch" or run.tokens == FULL_TOKENS:  # a smaller batch may well fit natively
                run.check(f"{name}, native", not native["admitted"], "not admitted", waits)
            run.check(f"{name}, plugin", plugin["admitted"], "admitted", takes)
            if row["scenario"] == "published":
                by_group, free = native["by_group"], native["free_blocks"]
                run.check(
                    f"{name}, figures",
                    (by_group, free) == (PUBLISHED_NEED, PUBLISHED_FREE),
                    f"{PUBLISHED_NEED} of {PUBLISHED_FREE}",
                    f"{by_group} of {free}",
                )
                run.check(
                    f"{name}, need",
                    plugin["blocks_needed"] <= PLUGIN_NEED_LIMIT,
                    f"<= {PLUGIN_NEED_LIMIT}",
                    str(plugin["blocks_needed"]),
                )
            sides = [
                f"{side} {words}, starts {row[side]['prompts_started']} of {len(row['prompts'])} prompts at once"
                for side, words in (("native", waits), ("plugin", takes))
            ]
            print(f"        {name[11:]}: {'; '.join(sides)}", flush=True)
            text = f"{row['scenario'].replace('_', ' ')}, room for {row['max_num_seqs']} requests: blocks needed / free"
            run.summary.append(
                (
                    text,
                    f"{native['blocks_needed']:,} / {native['free_blocks']:,}",
                    f"{plugin['blocks_needed']:,} / {plugin['free_blocks']:,}",
                    "plan",
                )
            )
            run.summary.append(
                (
                    "  whole in the first step",
                    *("yes" if side["admitted"] else "no" for side in (native, plugin)),
                    "plan",
                )
            )
        one = next(row for row in found if row["scenario"] == "one_32k_prompt")["native"]
        blocks = one["by_group"]["c4_state"] + one["by_group"]["c128_state"]
        allocated = blocks * one["block_bytes"]
        empty = memory.unused(run.geometry, run.layout, one["by_group"], one["block_bytes"])
        run.evidence["memory"].update(
            native_state_allocated_for_32768_tokens=figure(allocated, "bytes", Source.PLAN),
            native_state_unused_of_allocated=figure(empty, "bytes", Source.PLAN),
        )
        run.summary.append(("compressor state of 32,768 tokens, as allocated", size(allocated), "", "plan"))


def _isolation(run: Run) -> None:
    with run.part(7, "isolation: upstream symbols with the plugin loaded and off"):
        found = isolation.check()
        run.evidence["isolation"] = {
            "symbols_compared": found.compared,
            "changed": list(found.changed),
            "planted_changes_seen": list(found.planted),
        }
        seen = PLANTED & set(found.planted)
        run.check("isolation: probe", seen == PLANTED, "both planted changes seen", str(sorted(found.planted)))
        run.check(
            "isolation",
            found.compared > 0 and not found.changed,
            "no upstream symbol changed",
            f"{len(found.changed)} of {found.compared} changed",
        )
        print(f"      {len(found.changed)} of {found.compared:,} symbols changed", flush=True)


def _engine(run: Run) -> None:
    """A small model with real state sizes in the real engine, natively and with the plugin, from the same bytes."""
    from afd_dsv4.evidence.engine import DEMOS, Bench

    with run.part(8, "engine: the real vLLM and vllm-ascend, a long prompt behind others"):
        if run.source is not Source.SOFTNPU:
            run.evidence["admission"]["engine"] = {"not_shown_here": "the model is too small for the operators' limits"}
            print("      not shown here: the small model needs limits of the operators waived", flush=True)
            return
        # An engine takes most of its time for the prompt: no longer than the batch of this run, where there is one.
        load = next((each for each in DEMOS if each[0] <= run.tokens), DEMOS[-1])
        with tempfile.TemporaryDirectory() as folder:
            found = Bench(Path(folder), jobs=2).contention(*load)
        native, plugin = found.waited
        run.check("engine: native waits for capacity", native > 0, "at least 1 step", f"{native} steps")
        run.check("engine: the plugin does not", plugin == 0, "0 steps", f"{plugin} steps")
        run.check(
            "engine: tokens",
            found.mismatched == 0 < found.tokens,
            "0 different tokens",
            f"{found.mismatched} of {found.tokens}",
        )
        run.evidence["admission"]["engine"] = {
            "prompt": found.prompt,
            "blocks": {"native": found.blocks[0], "plugin": found.blocks[1]},
            "steps_waited": {
                "native": figure(native, "steps", run.source),
                "plugin": figure(plugin, "steps", run.source),
            },
            "tokens": figure(found.tokens, "tokens", run.source),
            "tokens_that_differ": figure(found.mismatched, "tokens", run.source),
        }
        print(f"      {_waits(found)}", flush=True)
        run.summary += [
            (f"real engine, a prompt of {found.prompt:,}: steps it waits", str(native), str(plugin), run.source.value),
            ("  tokens that differ", "", f"{found.mismatched} of {found.tokens}", run.source.value),
        ]


def _pool(row: Mapping[str, Any]) -> str:
    """The memory that both sides of a scenario get, and whose report it is from."""
    return (
        f"both sides from {size(row['budget_bytes'])}, the memory of the {row['native']['free_blocks']:,} blocks that "
        f"{POOLS[row['scenario']]} reports free, and of the null block; tails and slots of the plugin come out of it"
    )


def _waits(found: Contention) -> str:
    """How long the real engine lets the long prompt wait."""
    (theirs, ours), (native, plugin) = found.blocks, found.waited
    return (
        f"a prompt of {found.prompt:,} tokens waits {native} steps natively, where there are {theirs:,} blocks in all, "
        f"and {plugin} with the plugin, where there are {ours:,} and the same bytes hold tails and slots, too; "
        f"{found.mismatched} of {found.tokens} tokens differ"
    )


def _performance(run: Run) -> None:
    """What the run took, children included. On the software NPU this says nothing about a device."""
    import psutil

    seconds = time.time() - psutil.Process().create_time()
    peaks = [resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    run.check("host memory", sum(peaks) <= HOST_LIMIT, f"<= {size(HOST_LIMIT)}", size(sum(peaks)))
    where = {Source.SOFTNPU: "not_shown_here", Source.CUDA: "of staging rows only, in reuse"}
    run.evidence["performance"] |= {
        "device_time": where.get(run.source, "not measured by this release"),
        "evidence_seconds": figure(round(seconds, 1), "s", run.source),
        "host_memory_peak": figure(peaks[0], "bytes", run.source),
        "host_memory_peak_of_the_largest_child": figure(peaks[1], "bytes", run.source),
        "parts_seconds": {name: figure(round(value, 1), "s", run.source) for name, value in run.seconds.items()},
    }
    run.summary.append(("evidence run: seconds, host memory", "", f"{seconds:.0f} s, {size(sum(peaks))}", "host"))


def _points(run: Run) -> list[Point]:
    """Verdicts on the RFC's points. What only a target stack can show is never passed on the software NPU."""

    def judged(number: int, *prefixes: str, because: str) -> Point:
        verdict = Verdict.PASS if run.holds(*prefixes) else Verdict.FAIL
        return Point(number, RFC[number], verdict, because)

    def elsewhere(number: int, *prefixes: str, because: str) -> Point:
        verdict = Verdict.NOT_SHOWN_HERE if not prefixes or run.holds(*prefixes) else Verdict.FAIL
        return Point(number, RFC[number], verdict, because)

    where = run.source.value
    cuda = run.source is Source.CUDA
    delays = " under seeded delays" if run.source is Source.SOFTNPU else ""
    engine, served = (("engine",), "served by the real engine, ") if run.source is Source.SOFTNPU else ((), "")
    return [
        judged(1, "tokens", "rows", because=f"rows equal to native's, tokens to transformers' model, on {where}")
        if run.source is Source.SOFTNPU
        else elsewhere(1, "rows", because="rows equal; tokens are compared on the software NPU only"),
        judged(
            2,
            "rows",
            "order",
            "launched",
            "table rule",
            because=f"rows equal over all cuts{delays}, planted faults found, on {where}",
        ),
        judged(
            3, "order", "reuse", because="events of a CUDA device order every reuse in its traces; no trace of an NPU"
        )
        if cuda
        else elsewhere(3, "order", because=f"events order every reuse in the trace of {where}; no trace of a device"),
        judged(
            4,
            "memory",
            because=f"peak of a forward equal at 1, 2, 4 times the layers, on {where}; tails grow with layers",
        ),
        judged(5, "cost", "reuse: the host", because="staging rows on one CUDA device; no timing of an NPU")
        if cuda
        else elsewhere(5, because="no timing of a device"),
        elsewhere(6, because="vLLM and vllm-ascend are not looked for on a CUDA device")
        if cuda
        else judged(6, "isolation", because="plugin loaded and off: every upstream symbol is the identical object"),
        elsewhere(
            7,
            *(() if cuda else ("admission",)),
            "rows",
            *engine,
            because=f"executed on {where}, not scheduled, not on Ascend"
            if cuda
            else f"scheduled by the real scheduler, executed on {where}, {served}not on Ascend",
        ),
    ]


def _finish(run: Run, options: argparse.Namespace) -> int:
    points = _points(run)
    failed = [check for check in run.checks if not check.passed]
    passed = not failed and all(point.verdict is not Verdict.FAIL for point in points)
    run.evidence["verdicts"] = {
        "points": [{**asdict(point), "verdict": point.verdict.value, "source": run.source.value} for point in points],
        "checks": [asdict(check) for check in run.checks],
    }
    run.evidence["passed"] = passed
    # A part that broke off leaves its section empty; its check says why.
    evidence = {section: run.evidence[section] for section in SECTIONS}
    path = write(options.out, evidence)
    page = write_whole(options.out / PAGE_FILE, render(strict(evidence), run.records))
    verdicts = [(f"{point.number} {point.text}", point.verdict.value) for point in points]
    print()
    print(table([("", "native", "plugin", "source"), (), *run.summary]))
    print()
    print(table([("RFC point (vllm-project/afd-plugin#292)", "verdict"), (), *verdicts]))
    for point in points:
        print(f"  {point.number}: {point.because}")
    print()
    print(f"{len(run.checks) - len(failed)} of {len(run.checks)} checks passed; written to {path}, to read: {page}")
    for check in failed:
        print(f"FAIL {check.name}: expected {check.expected}, found {check.found}")
    if run.source is Source.SOFTNPU:
        print("Everything here ran on the software NPU (CPU threads). No one has run this on Ascend hardware yet.")
    if run.source is Source.CUDA:
        print("Everything here ran on a CUDA device. No one has run this on Ascend hardware yet.")
    return 0 if passed else 1


def _comparison(compared: Comparison, source: Source) -> dict[str, Any]:
    return {name: figure(value, "rows", source) for name, value in asdict(compared).items()}


def _add(total: Comparison, part: Comparison) -> None:
    for name, value in asdict(part).items():
        setattr(total, name, getattr(total, name) + value)


def _words(compared: Comparison) -> str:
    return (
        f"{compared.compressed_different:,} of {compared.compressed:,} compressed rows and "
        f"{compared.tail_different:,} of {compared.tail:,} tail rows differ"
    )
