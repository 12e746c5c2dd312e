# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Everything that a CUDA device can show, in one call: the evidence run there, and its ratios in one small file.

    python benchmarks/device/run.py --out build/device

It needs torch with CUDA, Triton, NumPy and psutil, and neither vLLM nor vllm-ascend. Beside `evidence.json` and
`trace.jsonl` of `afd-dsv4 evidence --device cuda` it writes `device.json`: device, driver, versions, commit, command,
and the figures of the table in this folder's README. Exit status as of the evidence run. `--quick` does a little of
everything, to see that it works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

COMMIT = "AFD_DSV4_COMMIT"  # says it where there is no git


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="The evidence run on a CUDA device, and its ratios.")
    parser.add_argument("--out", type=Path, default=Path("build/device"), help="folder (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32768, help="of the batch (default: %(default)s)")
    parser.add_argument("--executions", type=int, help="of the soak (default: 100000, with --quick 600)")
    parser.add_argument("--quick", action="store_true", help="a little of everything; the figures mean nothing")
    asked = parser.parse_args(arguments)
    if not 1024 <= asked.tokens <= 131072:
        parser.error(f"--tokens {asked.tokens}: give 1024 to 131072")
    if asked.executions is not None and asked.executions < 1:
        parser.error(f"--executions {asked.executions}: give at least 1")
    return asked


def commit() -> str:
    """The commit that runs."""
    if given := os.environ.get(COMMIT):
        return given
    try:
        asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"unknown; set {COMMIT}"


def value(entry: Any) -> Any:
    """A figure's number, in whatever is made of figures."""
    if isinstance(entry, dict):
        return entry["value"] if set(entry) == {"value", "unit", "source"} else {k: value(v) for k, v in entry.items()}
    return [value(one) for one in entry] if isinstance(entry, list) else entry


def summary(evidence: dict[str, Any]) -> dict[str, Any]:
    """What the table shows, out of evidence.json. What a part that broke off has not left is None."""
    return {
        "device": evidence["stack"].get("cuda"),
        "commit": commit(),
        "command": evidence["command"],
        "passed": evidence["passed"],
        "points": {str(point["number"]): point["verdict"] for point in evidence["verdicts"]["points"]},
        "failed": [check for check in evidence["verdicts"]["checks"] if not check["passed"]],
        "reuse": value(evidence["performance"].get("reuse")),
        "peaks": value(evidence["memory"].get("peaks")),
        "rows": value(evidence["parity"].get("rows_total")),
        "more_rows": value(evidence["parity"].get("rows_full_hidden")),
        "definition": value(evidence["parity"].get("definition")),
        "controls": value(evidence["order"].get("negative_controls", {}).get("touches")),
        "replays": value(evidence["order"].get("replays")),
        "soak": value(evidence["order"].get("soak")),
        "seconds": value(evidence["performance"].get("parts_seconds")),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write device.json."""
    asked = parse(arguments)
    # A torch_npu that is installed without CANN would not let torch be imported.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from afd_dsv4.evidence import run
    from afd_dsv4.evidence.cuda import parts
    from afd_dsv4.geometry import InputError

    sizes = parts.QUICK if asked.quick else parts.FULL
    options = argparse.Namespace(
        device="cuda",
        model="flash",
        tokens=asked.tokens,
        out=asked.out,
        argv=["evidence", "--device", "cuda", "--tokens", str(asked.tokens)],
        sizes=replace(sizes, executions=asked.executions or sizes.executions),
    )
    try:
        status = run.main(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = summary(json.loads((asked.out / "evidence.json").read_text(encoding="utf-8")))
    found["script"] = ["python", "benchmarks/device/run.py", *(sys.argv[1:] if arguments is None else arguments)]
    path = asked.out / "device.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return status


if __name__ == "__main__":
    sys.exit(main())
