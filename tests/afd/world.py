# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Attention and FFN ranks in processes of their own, over the software NPU's operators.

Problem: that a rank's rows are right beside another one, and that an FFN process has nothing of ours, shows only with
processes. Way: each process is one Attention rank of a world, or its FFN ranks; it says as JSON what it did and found.
The connectors, schedules and threads are the double's or, where AFD_PLUGIN_PATH names a checkout, the commit's own:
then the groups are real process groups over the software HCCL, made by the commit's `init_afd_connector`.
With CAM the Attention ranks are DP groups of one each, and share the FFN ranks; with CAMP2P each has an FFN rank.
Not here: faults (`faults.py`): a world whose rank broke off ends as a whole.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


def run(
    mode: str, *, attention: int, ffn: int, forwards: int, seed: int = 0, python: str = sys.executable
) -> list[Any]:
    """Run a world; returns what each Attention rank said, and then what each FFN process said.

    Raises:
        RuntimeError: a process failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        variables = {**os.environ, "BATCH_SIZE_FACTOR": "0.01", "OMP_NUM_THREADS": "1"}
        for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):  # of this process's own software NPU
            variables.pop(name, None)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            Path(folder, "port").write_text(str(free.getsockname()[1]))
        sizes = [mode, folder, str(attention), str(ffn), str(forwards), str(seed), str(TIMEOUT_S)]

        def start(role: str, rank: int) -> tuple[Any, Any]:
            command = [python, "-m", "afd_dsv4.softnpu", "--", python, "-m", "tests.afd.world", role, str(rank), *sizes]
            noise = stack.enter_context(Path(folder, f"{role}{rank}").open("w+"))
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=noise, text=True, cwd=ROOT, env=variables
            )
            stack.callback(process.kill)  # whatever happens, it does not outlive this
            return process, noise

        def check(process: Any, noise: Any) -> None:
            if process.poll():
                noise.seek(0)
                raise RuntimeError(f"{' '.join(process.args[5:])}: exit {process.returncode}: {noise.read()[-4000:]}")

        ranks = [start("attention", rank) for rank in range(attention)]
        # The commit's process groups want a process for each rank.
        experts = [start("ffn", rank) for rank in range(ffn if os.environ.get("AFD_PLUGIN_PATH") else 1)]
        until = time.monotonic() + TIMEOUT_S + 30
        while not all(Path(folder, f"done {rank}").exists() for rank in range(attention)):
            for process, noise in [*ranks, *experts]:
                check(process, noise)
            if time.monotonic() > until:
                raise RuntimeError(f"no end within {TIMEOUT_S} s: {folder}")
            time.sleep(0.05)
        # What ends is who reads the end of its input: FFN ranks, which nobody waits for any more, and then Attention.
        said = []
        for process, noise in [*experts, *ranks]:
            out, _ = process.communicate(timeout=TIMEOUT_S)
            check(process, noise)
            said.append(json.loads(out.splitlines()[-1]))
        return said[len(experts) :] + said[: len(experts)]


def main(arguments: Sequence[str]) -> None:
    """Be one process of a world."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("attention", "ffn"))
    for name in ("rank", "mode", "folder", "attention", "ffn", "forwards", "seed", "timeout"):
        parser.add_argument(name, type=str if name in ("mode", "folder") else int)
    asked = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(asked.timeout, exit=True)  # a process that takes longer hangs: it says where

    from afd_dsv4.softnpu import runtime as softnpu

    softnpu.install()
    import torch

    torch.ops.softnpu.waive("compressor.hidden", True)
    torch.set_num_threads(1)
    from tests.afd import connectors, operators, protocol
    from tests.afd.points import Mode

    mode = Mode[asked.mode]
    world = Place(Path(asked.folder), asked.attention, asked.ffn)
    if os.environ.get(protocol.VARIABLE):
        start_vllm(world, asked.role, asked.rank)
    else:
        store = torch.distributed.FileStore(str(world.folder / "store"), -1)
        connectors.WIRE = operators.Operators(f"afd_world_{world.folder.name}", store)  # type: ignore[assignment]
    said = (attend if asked.role == "attention" else serve)(mode, world, asked)
    print(json.dumps(said), flush=True)
    os._exit(0)  # what FFN streams wait for has ended with an error


class Place:
    """Where a world's processes meet."""

    def __init__(self, folder: Path, attention: int, ffn: int) -> None:
        self.folder, self.attention, self.ffn = folder, attention, ffn
        self.port = int((folder / "port").read_text())


def attend(mode: Any, world: Place, asked: Any) -> dict[str, Any]:
    """One Attention rank."""
    import torch

    from afd_dsv4.softnpu import runtime as softnpu
    from tests.afd import protocol
    from tests.afd.rank import Rank

    softnpu.set_schedule(asked.seed + asked.rank + 1, 100, starve=asked.rank % 2 == 0)
    rng = random.Random(f"world {asked.seed} {asked.rank}")
    rank = Rank(mode, protocol_=protocol.load(), place=world, number=asked.rank)
    for _ in range(asked.forwards):
        rank.forward(rank.batch(rng))
    rank.land_all()
    torch.npu.synchronize()
    slots = rank.take_slots()
    rank.end_all()
    # All ranks close together: who leaves first ends what the others wait for.
    (world.folder / f"done {asked.rank}").touch()
    sys.stdin.read()
    closed = [repr(error) for error in rank.close_connector()]
    left = len(rank.runtime.close(1.0))
    return {
        **asdict(rank.found),
        "protocol": rank.protocol.of,
        "connector": type(rank.connector).__base__.__name__,
        "looks": rank.boundary.calls,
        "slots": slots,
        "most_slots": len(rank.runtime.arena.slots),
        "violations": rank.violations(),
        "closed": closed,
        "left": left,
        "leases": rank.runtime.arena.counters.leases,
    }


def serve(mode: Any, world: Place, asked: Any) -> dict[str, Any]:
    """All FFN ranks, or one."""
    from afd_dsv4.compressor.stock import StockRuntime
    from tests.afd import protocol
    from tests.afd.rank import start_ffn

    found = protocol.load()
    mine = [asked.rank] if os.environ.get(protocol.VARIABLE) else range(world.ffn)
    roles = start_ffn(found, mode, world, mine)

    ending = threading.Event()

    def watch(role: Any) -> None:
        role.join(TIMEOUT_S)
        if role.error is not None and not ending.is_set():  # whoever waits for an answer would wait for ever
            print("".join(traceback.format_exception(role.error)), file=sys.stderr, flush=True)
            os._exit(1)

    for role in roles:
        threading.Thread(target=watch, args=(role,), daemon=True).start()
    sys.stdin.read()
    ending.set()
    gc.collect()
    errors = [repr(role.error) for role in roles if role.error is not None]
    for role in roles:  # so that its groups leave nothing behind
        role.connector.close()
    ours = [thing for thing in gc.get_objects() if isinstance(thing, StockRuntime)]
    return {
        "protocol": found.of,
        "items": sum(role.items for role in roles),
        "errors": errors,
        "runtimes": len(ours),
    }


def start_vllm(world: Place, role: str, rank: int) -> None:
    """Parallel state of one rank, as the commit's schedules ask for it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{world.folder}/{role}{rank}.world", 0, "gloo")
        initialize_model_parallel()


if __name__ == "__main__":
    main(sys.argv[1:])
