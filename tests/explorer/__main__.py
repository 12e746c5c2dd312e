# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The whole exploration, as `make explore` runs it: scripts, programs, mutants, and one line that sums them up.

Exit code 1 if the shipped protocol violates anything, a script differs from its table, or a mutant is missed. The same
seed and budget give the same output. How many processes share the work changes nothing but the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from dataclasses import dataclass

from tests.explorer.hosts import Outcome, Schedules
from tests.explorer.mutants import MUTANTS, Finding, hunt
from tests.explorer.programs import programs
from tests.explorer.raw import SCRIPTS, run

#: Makes more than 100,000 schedules, in about 3 minutes on 2 idle cores. What two programs share counts twice.
DEFAULT_BUDGET = 1800
#: A rich program gets so many times the budget.
RICH = 5


@dataclass
class Tally:
    """What became of a program.

    Attributes:
        runs: host schedules run, no two with the same choices.
        schedules: those in which the arena did something else than in all before.
        all: there are no others.
        queued: different things that they queued on the device.
        states: device states visited, over those.
        orders: device orders, over those.
        violations: schedules that are not clean.
        first: the first of these.
    """

    name: str
    runs: int = 0
    schedules: int = 0
    all: bool = False
    queued: int = 0
    states: int = 0
    orders: int = 0
    violations: int = 0
    first: Outcome | None = None

    def __str__(self) -> str:
        share = "all" if self.all else "of more"
        return (
            f"{self.name}: {self.schedules} schedules in {self.runs} runs ({share}), {self.states} device states, "
            f"{self.orders} device orders, {self.violations} violations"
        )


def tally(job: tuple[int, int, int]) -> Tally:
    """One program, by its index, budget and seed."""
    index, budget, seed = job
    program = programs()[index]
    result = Tally(program.name)
    found = Schedules(program, budget * RICH if program.rich else budget, seed)
    histories: set[int] = set()
    for outcome in found:
        result.runs += 1
        histories.add(outcome.history)
        if outcome.fresh:
            result.queued += 1
            result.states += outcome.explored.states
            result.orders += outcome.explored.schedules
        if not outcome.clean:
            result.violations += 1
            result.first = result.first or outcome
    result.all = found.all
    result.schedules = len(histories)
    return result


def find(job: tuple[int, int, int]) -> Finding:
    """One mutant, by its index, budget and seed."""
    index, budget, seed = job
    return hunt(MUTANTS[index], limit=budget, seed=seed)


def explain(outcome: Outcome) -> str:
    lines = [f"  choices {','.join(map(str, outcome.choices))}"]
    if outcome.explored.witness:
        lines.append(f"  memory: {'; '.join(outcome.explored.witness)}")
    lines += [f"  trace: {violation}" for violation in outcome.unordered]
    lines += [f"  outcome: {what}" for what in outcome.broken]
    return "\n".join(lines)


def count(text: str) -> int:
    """A number of at least 1: with none there is nothing that could violate anything."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the schedules that are drawn, where not all are run")
    parser.add_argument("--budget", type=count, default=DEFAULT_BUDGET, help="most runs of one program")
    parser.add_argument("--mutant-budget", type=count, default=600, help="most runs of one mutant")
    parser.add_argument("--processes", type=count, default=os.cpu_count() or 1, help="share the work")
    asked = parser.parse_args(arguments)

    different = 0
    for name, (script, states, violations) in SCRIPTS.items():
        found = run(script)
        same = (found.states, found.violations) == (states, violations)
        different += not same
        print(
            f"script: {name}: {found.states} states, {found.violations} violations, {'as' if same else 'NOT as'} known"
        )

    total = Tally("all")
    found_mutants = 0
    with multiprocessing.Pool(asked.processes) as pool:
        jobs = [(index, asked.budget, asked.seed) for index in range(len(programs()))]
        for result in pool.imap(tally, jobs):
            print(f"program: {result}", flush=True)
            if result.first is not None:
                print(explain(result.first), flush=True)
            total.runs += result.runs
            total.schedules += result.schedules
            total.states += result.states
            total.orders += result.orders
            total.queued += result.queued
            total.violations += result.violations
        jobs = [(index, asked.mutant_budget, asked.seed) for index in range(len(MUTANTS))]
        for mutant, finding in zip(MUTANTS, pool.imap(find, jobs), strict=True):
            print(f"mutant: {mutant.name}: {finding}", flush=True)
            found_mutants += finding.convicts(mutant)
    print(
        f"device: {total.states} states visited, {total.orders} orders covered, of {total.queued} different things "
        f"queued by {total.runs} runs"
    )
    print(
        f"explore: schedules={total.schedules} violations={total.violations + different} "
        f"mutants={found_mutants}/{len(MUTANTS)}"
    )
    return int(bool(total.violations or different) or found_mutants != len(MUTANTS))


if __name__ == "__main__":
    sys.exit(main())
