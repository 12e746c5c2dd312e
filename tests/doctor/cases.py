# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The doctor on machines that are made of a few folders, and the answers that were read and kept.

A machine is a folder with package metadata, which alone is on the path beside this project: no answer depends on what
is installed where the tests run. `python -m tests.doctor.cases` writes every answer anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = (
    "import sys; sys.path[:] = {paths!r} + [p for p in sys.path if 'site-packages' not in p]\n"
    "from afd_dsv4.cli import main; sys.exit(main({arguments!r}))"
)

OURS = {
    "vllm.general_plugins": {"afd_dsv4": "afd_dsv4.plugin:register"},
    "vllm.platform_plugins": {"afd_dsv4": "afd_dsv4.plugin:platform"},
}
ASCEND = {
    "vllm.general_plugins": {
        name: f"vllm_ascend:{name}" for name in ("ascend_kv_connector", "ascend_model", "ascend_model_loader")
    }
    | {"ascend_service_profiling": "vllm_ascend:register_service_profiling"},
    "vllm.platform_plugins": {"ascend": "vllm_ascend:register"},
}
OTHER = {"vllm.platform_plugins": {"fl": "vllm_fl:register"}}

Packages = Mapping[str, tuple[str, Mapping[str, Mapping[str, str]]]]
ALONE: Packages = {"afd-dsv4": ("0.1.0", OURS)}
WITH_POINTS: Packages = {**ALONE, "ascend-points": ("0.23.0", ASCEND)}
WITH_ASCEND: Packages = {**ALONE, "vllm_ascend": ("0.23.0", ASCEND)}


@dataclass(frozen=True)
class Case:
    """One run: what is installed, what is asked, what is in the environment, and the status that it must end with."""

    arguments: Sequence[str]
    status: int
    packages: Packages = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


PUBLISHED = ("--model", "flash", "--block-size", "128", "--free-blocks", "6958", "--max-num-seqs", "128")
CASES = {
    "published": Case([*PUBLISHED, "--max-num-batched-tokens", "65536", "--prompt-tokens", "63778"], 1),
    "published_from_a_log": Case(["--log", "stuck.log", "--prompt-tokens", "63778"], 1),
    "usage_zero": Case(["--metrics", "stuck.metrics"], 1),
    "usage_zero_two_engines": Case(["--metrics", "two_engines.metrics", "--max-num-batched-tokens", "32768"], 1),
    "small_budget": Case(
        [*PUBLISHED[:4], "--hbm-gib", "10", "--max-num-batched-tokens", "32768", "--max-model-len", "131072"], 1
    ),
    "no_block": Case([*PUBLISHED[:4], "--hbm-gib", "0.004", "--max-num-batched-tokens", "32768"], 1),
    "refused_start": Case(["--log", "refused_start.log"], 1),
    "long_prompt": Case(
        [*PUBLISHED, "--max-num-batched-tokens", "8192", "--max-model-len", "131072", "--prompt-tokens", "200000"], 1
    ),
    "longer_than_the_model": Case([*PUBLISHED, "--max-num-batched-tokens", "8192", "--prompt-tokens", "1048577"], 1),
    "long_prompt_in_a_log": Case(["--log", "too_long.log"], 1),
    "no_hits": Case(["--metrics", "short_prompts.metrics"], 1),
    "two_platforms": Case([], 1, {**WITH_POINTS, "vllm-plugin-fl": ("0.3", OTHER)}),
    "two_platforms_in_a_log": Case(["--log", "platforms.log"], 1),
    "left_out": Case([], 1, WITH_POINTS, {"VLLM_PLUGINS": "ascend, afd_dsv4"}),
    "version_mix": Case([], 1, {**WITH_ASCEND, "vllm": ("0.26.0", {})}),
    "no_adapter": Case([], 1, {**ALONE, "vllm": ("0.26.0", {}), "vllm_ascend": ("0.1+gcf0baa38d", ASCEND)}),
    "refused_mode": Case(["--config", "lora.json"], 1, {**WITH_ASCEND, "vllm": ("0.23.0", {})}),
    "refused_mode_on_a_laptop": Case(["--config", "lora.json"], 1),
    "misspelt": Case(["--config", "misspelt.json", "--stack", "vllm-ascend-80d8c194f"], 1),
    "windows": Case(
        ["--metrics", "plugin_on.metrics", "--prompt-tokens", "1000000", "--max-num-batched-tokens", "262144"], 1
    ),
    "plugin_planned": Case(["--config", "drafting.json", "--hbm-gib", "20", "--prompt-tokens", "63778"], 0),
    "plugin_refused": Case(["--log", "plugin_refused.log"], 1),
    "plugin_failed": Case(["--log", "plugin_failed.log"], 1),
    "nodes_disagree": Case(["--log", "nodes.log"], 1),
    "quarantined": Case(["--metrics", "quarantined.metrics"], 1),
    "restarted": Case(["--log", "restarted.log"], 0),
    "healthy": Case(["--metrics", "healthy.metrics"], 0),
    "busy": Case(["--metrics", "plugin_on.metrics"], 0),
    "nothing": Case([], 0),
}


def machine(folder: Path, packages: Packages) -> Path:
    """Lay out the metadata of these packages."""
    for name, (version, points) in packages.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items()]
        (info / "entry_points.txt").write_text("".join(lines))
    return folder


def run(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None, given: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run the doctor on a machine, in the folder of the inputs."""
    script = SCRIPT.format(paths=[str(folder), str(ROOT)], arguments=["doctor", *arguments])
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("AFD_DSV4", "VLLM", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-S", "-c", script],
        input=given,
        capture_output=True,
        check=False,
        cwd=HERE,
        env=keep | dict(environment or {}),
        timeout=120,
    )


def answer(case: Case, folder: Path) -> tuple[str, int, str]:
    """Text, status and errors of a case, without what differs from one computer to the next."""
    done = run(machine(folder, case.packages), case.arguments, case.environment)
    text = re.sub(r"Python \S+, \S+$", "Python VERSION, MACHINE", done.stdout.decode(), flags=re.MULTILINE)
    return text, done.returncode, done.stderr.decode()


if __name__ == "__main__":
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            (HERE / f"{name}.txt").write_text(answer(case, Path(folder))[0], encoding="utf-8")
