# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Engines whose processes are forked from one that has imported vLLM, and done nothing else.

Problem: tests want each engine in a fresh process, and importing the stack is more than half of what a small one takes.
Way: one process for each environment imports what `engine.execute` imports first, and listens; it has one thread and
has touched no device. For each request it forks a process, which runs the description as `engine.main` does and ends as
a program ends. Nothing that one engine does is seen by another.
Not done: what depends on how vLLM is imported, or on packages; `engine.run` starts a program for that. What a process
has from its start is shared by all engines of one environment: the seed of its hashes, and `os.environ`, as it was at
the first use of that environment.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from afd_dsv4.softnpu import engine


class Nursery:
    """Where the engines of one environment come from; `nursery` makes it.

    Args:
        environment: variables of the engines over `engine.QUIET` and those of this process; with several ranks
            SOFTNPU_DEVICES.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._runs = 0  # under way, in whichever threads; `_making` guards it
        self._folder = tempfile.TemporaryDirectory(prefix="engines")
        self._address = str(Path(self._folder.name, "socket"))
        self._log = Path(self._folder.name, "log")
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("w") as log:
            listener.bind(self._address)
            listener.listen(16)  # who comes early waits; who comes when it has died is refused
            program = [sys.executable, "-m", "tests.forked_engines", str(listener.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "afd_dsv4.softnpu", "--", *program],
                stdin=subprocess.PIPE,  # which ends when this process does, however it does
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                cwd=engine.CHECKOUT,
                env={**engine.QUIET, **os.environ, **environment},
                start_new_session=True,
            )

    def run(self, spec: Mapping[str, Any], *, prelude: str = "", timeout_s: float = 850) -> dict[str, Any]:
        """Run a description in a process of its own.

        Args:
            spec: see `engine`.
            prelude: Python that runs before it.
            timeout_s: seconds until this nursery is ended with all of its engines; who asks for one then gets another.

        Raises:
            EngineError: it ended with an error.
        """
        with (
            self._counted(),
            tempfile.TemporaryDirectory(dir=self._folder.name) as folder,
            socket.socket(socket.AF_UNIX) as connection,
        ):
            Path(folder, "spec").write_text(json.dumps(dict(spec)))
            Path(folder, "prelude").write_text(prelude)
            connection.settimeout(timeout_s)
            try:
                connection.connect(self._address)
                connection.sendall(folder.encode() + b"\n")
                status = connection.recv(16).decode()
            except TimeoutError:
                self._kill()
                status = "no answer in time"
            except ConnectionError as error:
                status = f"{error}: {self._log.read_text()[-6000:]}"
            if status != "0":
                said = Path(folder, "err")
                raise engine.EngineError(f"exit {status or '?'}: {said.read_text()[-6000:] if said.exists() else ''}")
            found: dict[str, Any] = json.loads(Path(folder, "out").read_text().splitlines()[-1])
            return found

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with _making:
            self._runs += 1
        try:
            yield
        finally:
            with _making:
                self._runs -= 1

    def refuse_to_end(self) -> None:
        """Call it where another takes its place, with `_making` held.

        Raises:
            RuntimeError: somebody waits for an engine of it, which would end with it.
        """
        if self._runs and not self.ended:
            raise RuntimeError(
                f"engines of another environment are asked for while {self._runs} of {self._environment} run; ask for "
                f"them once those are over"
            )

    @property
    def ended(self) -> bool:
        """Whether its process is over, so that no engine comes from it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process, and engines that still run."""
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_made: dict[frozenset[tuple[str, str]], Nursery] = {}
_making = threading.Lock()  # tests start engines from threads


def nursery(environment: Mapping[str, str]) -> Nursery:
    """The one of this process, which lasts until another environment is asked for: it takes most of a GiB.

    One that has ended is replaced: what one test waited for in vain must not fail those behind it.

    Raises:
        RuntimeError: an engine of another environment is under way in another thread.
    """
    key = frozenset(environment.items())
    with _making:
        if key not in _made or _made[key].ended:
            for other in _made.values():
                other.refuse_to_end()
            _close()
            _made[key] = Nursery(environment)
        return _made[key]


@atexit.register
def _close() -> None:
    while _made:
        _made.popitem()[1].close()


def _engine(folder: Path) -> None:
    """What a forked process does: `engine`'s program, with files for standard output and error."""
    for name, number in (("out", 1), ("err", 2)):
        with Path(folder, name).open("w") as file:
            os.dup2(file.fileno(), number)
    # vLLM looks for a free port and takes it a while later: not one of those that the kernel gives to others meanwhile.
    os.environ.setdefault("VLLM_PORT", str(10_240 + os.getpid() * 8 % 20_000))
    exec(Path(folder, "prelude").read_text(), {})
    sys.exit(engine.main([str(Path(folder, "spec"))]))


def _serve(listener: socket.socket) -> None:
    engine.import_stack()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener not in ready:
            return
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):  # none has been forked
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # of those that waited for engines before
        if os.fork():
            connection.close()
            continue
        # One process waits for the engine, so that it can end as it likes.
        listener.close()
        asked = connection.makefile().readline()
        if not asked.endswith("\n"):  # who asked has gone
            os._exit(0)
        folder = Path(asked.rstrip("\n"))
        child = os.fork()
        if not child:
            connection.close()
            _engine(folder)
        _, status = os.waitpid(child, 0)
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
