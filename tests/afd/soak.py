# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The soak of AFD: forwards through the protocol, with a fault at every numbered point of their life.

Problem: uBatches in threads, stages of a connector with answers under way, and requests that are cut between them each
end well as long as nothing goes wrong; what goes wrong does so where nobody looks.
Way: ranks live and end, one after another: random batches through the protocol double's schedule on hostile streams,
every compressed row and hidden state compared with the definition; at random forwards one of `points.Point`, whose
outcome (which error, naming what; which leases in which state; whose tails are void) is asserted where it is planted.
Each rank ends with a point that ends one, and is then counted: slots, staging entries and pages that are neither free
nor quarantined are lost; the order checker judges its trace. Controls, or the soak proves nothing: with the waits of
the same load left out rows must come out wrong and the checker must say so, and workspace tensors planted in payloads
must all be found.
Where: `load.py` (ranks one after another, controls, worlds), `faults.py` and `ends.py` (what is planted in a rank's
steps and at its end, and what must come of it), `judge.py` (what was found, and whether that is right); here processes.
Two ranks are two such processes; and two ranks of one world, whose FFN ranks are in a third process, without faults.
What it is not: evidence about a device, or about afd-plugin's own code: the protocol is the double's.

    python -m afd_dsv4.softnpu -- python -m tests.afd.soak
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from afd_dsv4.softnpu import runtime as softnpu
from tests.afd import protocol
from tests.afd.judge import Totals, failures, report
from tests.afd.load import beside, control, soak
from tests.afd.points import Mode
from tests.afd.rank import Rank
from tests.boundary_plants import planted_tensors

STAGES = 10_000  # layers-times-stages of each mode, for each number of ranks
CELL_LIMIT_S = 900  # a process that takes longer hangs: it says where, and ends


@dataclass(frozen=True)
class Cell:
    """What one process does: one of the ranks of one mode.

    Attributes:
        mode: of its ranks.
        ranks: how many processes share the stages.
        number: which of them this is.
        stages: of all of them.
    """

    mode: Mode
    ranks: int
    number: int
    seed: int
    stages: int

    def run(self) -> tuple[Totals, list[str]]:
        """Returns the totals, and controls that were blind."""
        start()
        faulthandler.dump_traceback_later(CELL_LIMIT_S, exit=True, file=2)
        name = f"{self.mode.name} {self.ranks} {self.number} {self.seed}"
        blind = []
        if self.mode is not Mode.SYNC:
            corrupt, violations = control(self.mode, name, ordered=False)
            if not corrupt or not violations:
                blind.append(f"{name}: without waits {corrupt} corrupt rows, {violations} violations")
            if any(found := control(self.mode, name, ordered=True)):
                blind.append(f"{name}: with waits {found[0]} corrupt rows, {found[1]} violations")
        totals = soak(self.mode, name, -(-self.stages // self.ranks))
        faulthandler.cancel_dump_traceback_later()
        return totals, blind


def start() -> None:
    """Make this process ready for the software NPU and a tiny model."""
    softnpu.install()
    torch.ops.softnpu.waive("compressor.hidden", True)
    torch.set_num_threads(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; 1 if anything is not as it must be, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m tests.afd.soak", description="Soak AFD on the protocol double.")
    parser.add_argument("--seed", type=int, default=20261130, help="of load and faults")
    parser.add_argument("--stages", type=int, default=STAGES, help="of each mode and number of ranks (%(default)s)")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="processes of Attention (default: 1, then 2)")
    parser.add_argument(
        "--mode",
        choices=[mode.name.lower() for mode in Mode],
        help=f"only one of {', '.join(f'{mode.name.lower()} ({mode.value})' for mode in Mode)}",
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes at once")
    asked = parser.parse_args(arguments)
    if asked.stages < 1 or asked.jobs < 1:
        parser.error("--stages and --jobs must be at least 1")
    if not softnpu.is_active():
        parser.error("runs on the software NPU: python -m afd_dsv4.softnpu -- python -m tests.afd.soak")
    started = time.monotonic()
    modes = [Mode[asked.mode.upper()]] if asked.mode else [*Mode]
    cells = [
        Cell(mode, ranks, number, asked.seed, asked.stages)
        for ranks in ([asked.ranks] if asked.ranks else [1, 2])
        for mode in modes
        for number in range(ranks)
    ]
    print(f"soak of AFD on the protocol double and the software NPU, seed {asked.seed}, {len(cells)} cells", flush=True)
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        planting = pool.submit(_planted)
        done = list(pool.map(Cell.run, cells))
        planted = planting.result()
    totals = sum((found for found, _ in done), Totals())
    if asked.ranks != 1:
        for mode in modes:
            totals += beside(mode, asked.seed)
    blind = [line for _, lines in done for line in lines]
    report(totals, modes, time.monotonic() - started)
    wrong = failures(totals, blind, planted, modes)
    for failure in wrong:
        print(f"failed: {failure}")
    print(
        f"afd-soak: stages={sum(totals.stages.values())} violations={len(totals.violations)} "
        f"corrupt_rows={totals.corrupt} lost_slots={totals.lost.total()} planted_tensors={planted[0]}/{planted[1]}"
    )
    return int(bool(wrong))


def _planted() -> tuple[int, int]:
    start()
    return planted_tensors(protocol.double(), Rank(Mode.CAM).runtime)


if __name__ == "__main__":
    sys.exit(main())
