# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The whole comparison of our kernels, as `make kernels` runs it: a grid of starts and lengths, then random cases.

    python -m tests.kernels_sweep [--cases N] [--seed S] [--jobs J]

Every launch runs in the host emulation; every byte of its memory is compared with the reference. A case that differs is
printed with its number, and `--seed S --first N --cases 1` runs it alone. Exit status 1 if any differs. At the end the
time of one C4 layer (main compressor and indexer) of 32,768 tokens, in seconds of one core: of the emulation, which
says nothing of a device; over 20 is an error.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from afd_dsv4.compressor.kernels import CoreOrder, Dtype, Kernels
from afd_dsv4.geometry import InputError
from afd_dsv4.kernels_report import Launch, find
from tests.kernels_world import KINDS, LENGTHS, PAGE_ROWS, Case, Request, World, random_case

#: Not above this: the emulation is of use only while it is quick. Seconds of one core, whatever else the machine does.
LAYER_TOKENS, LAYER_SECONDS = 32768, 20.0


@dataclass
class Tally:
    """What was compared."""

    cases: int = 0
    requests: int = 0
    windows: int = 0
    different: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        self.cases += other.cases
        self.requests += other.requests
        self.windows += other.windows
        self.different += other.different
        return self

    def __str__(self) -> str:
        return (
            f"{self.cases:,} launches, {self.requests:,} requests, {self.windows:,} compressed rows: "
            f"{self.different:,} differ"
        )


def grid(kind: str) -> Iterator[Case]:
    """Every start phase with every length of `LENGTHS`, in mixed batches; staging, order and cores in turn.

    C4's phases are those of two windows on a page of 8 rows: 0 to 15. Lengths of 4,096 are single requests.
    """
    spec = KINDS[kind]
    phases = range(4 * spec.ratio if spec.overlap else spec.ratio)
    batch = 4 if spec.overlap else 8
    turn = 0
    for first in range(0, len(phases), batch):
        some = phases[first : first + batch]
        short = tuple(Request(phase, length) for length in LENGTHS[:-1] for phase in some)
        for requests in (short, *((Request(phase, LENGTHS[-1]),) for phase in some)):
            turn += 1
            yield Case(
                kind,
                requests,
                page_rows=PAGE_ROWS[kind][0],
                row_dtype=Dtype(turn % 2),
                out_dtype=Dtype(turn // 2 % 2),
                blocks=(1, 3, 24, 48)[turn % 4],
                order=CoreOrder(turn % 3),
                tile=2048 if turn % 5 == 0 else 0,
                padded_tokens=turn % 3,
                padded_requests=turn % 2,
                seed=turn,
            )


def check(kernels: Kernels, world: World, name: str) -> Tally:
    """Run one launch and compare it; prints what differs."""
    tally = Tally(1, len(world.case.requests), sum(len(world.windows(r)) for r in world.case.requests))
    try:
        world.launch(kernels)
        found = world.differences()
    except (RuntimeError, ValueError) as error:
        found = [f"{type(error).__name__}: {error}"]
    if found:
        tally.different = 1
        print(f"{name}: {'; '.join(found)}\n  {world.case}", flush=True)
    return tally


def _random(work: tuple[int, int, int]) -> Tally:
    seed, first, count = work
    kernels, tally = Kernels(find()), Tally()
    for number in range(first, first + count):
        case = random_case(np.random.default_rng([seed, number]), number)
        tally += check(kernels, World(case), f"case {number} of seed {seed}")
    return tally


def _grid(work: tuple[str, int, int]) -> Tally:
    kind, part, parts = work
    kernels, tally = Kernels(find()), Tally()
    for number, case in enumerate(grid(kind)):
        if number % parts == part:
            tally += check(kernels, World(case), f"{kind}, launch {number} of the grid")
    return tally


def layer_seconds(kernels: Kernels, cores: int = 48) -> float:
    """Seconds of a core that the emulation takes for one C4 layer: main compressor and indexer, both launches each."""
    launches = [Launch(KINDS[kind], [LAYER_TOKENS], Dtype.FP32) for kind in ("c4", "c4_indexer")]
    memory = [launch.arrays(kernels) for launch in launches]
    kernels.set("order", CoreOrder.FORWARD)
    begin = time.process_time()
    for launch, arrays in zip(launches, memory, strict=True):
        kernels.compress(cores, launch.compress, arrays)
        kernels.tail_update(cores, launch.tail, arrays)
    return time.process_time() - begin


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels_sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, metavar="N", help="random cases (default 10000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the random cases (default 0)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first random case")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="processes (default 2)")
    parser.add_argument("--no-grid", action="store_true", help="random cases only")
    options = parser.parse_args(arguments)
    if min(options.cases, options.jobs) < 1 or min(options.seed, options.first) < 0:
        parser.error("--cases and --jobs must be at least 1, --seed and --first at least 0")
    try:
        library = find()
    except InputError as error:
        parser.error(str(error))
    begin = time.perf_counter()
    step = 100
    cases = [
        (options.seed, first, min(step, options.first + options.cases - first))
        for first in range(options.first, options.first + options.cases, step)
    ]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        whole = Tally()
        if not options.no_grid:
            work = [(kind, part, options.jobs) for kind in KINDS for part in range(options.jobs)]
            for tally in pool.imap_unordered(_grid, work):
                whole += tally
            print(f"grid of starts and lengths: {whole}", flush=True)
        random = Tally()
        for tally in pool.imap_unordered(_random, cases):
            random += tally
            if random.cases % 1000 == 0:
                print(f"{random.cases:,} random cases, {random.different:,} differ", flush=True)
    print(f"random cases of seed {options.seed}: {random}")
    whole += random
    seconds = layer_seconds(Kernels(library))
    print(f"one C4 layer of {LAYER_TOKENS:,} tokens, emulated: {seconds:.1f} s of one core")
    slow = seconds > LAYER_SECONDS
    print(f"kernels: {whole}, {time.perf_counter() - begin:.0f} s" + (f"; over {LAYER_SECONDS:.0f} s" if slow else ""))
    return 1 if whole.different or slow else 0


if __name__ == "__main__":
    sys.exit(main())
