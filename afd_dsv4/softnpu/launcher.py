# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Starts a command with the software NPU's libraries where CANN's would be.

Problem: the loader reads LD_LIBRARY_PATH, and torch_npu its settings, when the process starts: too early for Python.
Way: check that the libraries are built, set the environment, replace this process by the command. Not done: building.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from afd_dsv4.compressor.library import SOFTWARE_NPU

LIBRARIES = (
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libhccl.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libatb.so",
    "libsoftnpu_aten.so",
)
USAGE = "usage: python -m afd_dsv4.softnpu -- COMMAND [ARGUMENT ...]"


class SoftnpuError(Exception):
    """The software NPU cannot be used; the message says what was asked, what was found and what to do."""


def library_dir() -> Path:
    """Return the folder of the built libraries: AFD_DSV4_SOFTNPU_DIR, or ``build/softnpu`` of the checkout.

    Raises:
        SoftnpuError: a library is missing there.
    """
    given = os.environ.get(SOFTWARE_NPU)
    folder = Path(given).resolve() if given else Path(__file__).resolve().parents[2] / "build" / "softnpu"
    missing = [name for name in LIBRARIES if not (folder / name).is_file()]
    if missing:
        raise SoftnpuError(
            f"the software NPU was asked for and is not built: {folder} has no {', '.join(missing)}. "
            "Run `make setup` in a checkout of afd-dsv4, or point AFD_DSV4_SOFTNPU_DIR to where the libraries are."
        )
    return folder


def environment(base: Mapping[str, str], libraries: Path) -> dict[str, str]:
    """Return ``base`` with what a process on the software NPU needs; the caller's own SOFTNPU_* settings stay."""
    here = Path(__file__).resolve()

    def with_first(name: str, *first: Path) -> str:
        return os.pathsep.join([*map(str, first), *filter(None, [base.get(name, "")])])

    # Where CANN is set up, torch_npu would look for its operator packages.
    rest = {name: value for name, value in base.items() if name not in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH")}
    return {
        **rest,
        "LD_LIBRARY_PATH": with_first("LD_LIBRARY_PATH", libraries),
        # The stubs' sitecustomize installs the kernels; the package itself must be importable from any folder.
        "PYTHONPATH": with_first("PYTHONPATH", here.parent / "stubs", here.parents[2]),
        SOFTWARE_NPU: str(libraries),
        # A torch_npu that cannot load would otherwise break `import torch` itself.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # Without its host queue torch_npu raises where the mistake is. A caller who wants the queue asks for it.
        "TASK_QUEUE_ENABLE": "1" if base.get("TASK_QUEUE_ENABLE") == "1" else "0",
        # Virtual memory mapping is not part of the software ACL.
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
    }


def main(arguments: list[str]) -> int:
    """Become the command after ``--``. Return only when that is impossible: 2, or 0 for ``--help``."""
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command or command[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if command else sys.stderr)
        return 0 if command else 2
    try:
        libraries = library_dir()
    except SoftnpuError as error:
        print(f"afd-dsv4: {error}", file=sys.stderr)
        return 2
    # The interpreter that runs the launcher has the packages; another `python` on PATH may not.
    program = sys.executable if command[0] in ("python", "python3") else command[0]
    if shutil.which(program) is None:
        print(
            f"afd-dsv4: {USAGE}\nno such command: {program}. Give a program on PATH or a path to one.", file=sys.stderr
        )
        return 2
    # Replaces this process, so that signals, the exit code and the terminal are the command's own.
    return os.execvpe(program, [program, *command[1:]], environment(os.environ, libraries))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
