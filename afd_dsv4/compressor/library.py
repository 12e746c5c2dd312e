# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Where the kernels of the afd executor are, and for what they were compiled.

Problem: the gate decides in a process that must not load a device library, and a library for another machine loads
without a word and computes nothing, or everything wrong.
Way: the build writes beside the libraries for what it made them. They are looked for in one folder, by this order: the
variable `AFD_DSV4_KERNELS`; on the software NPU the folder of its own libraries; the package's folder `lib`, where
`cmake --install` puts them, of a checkout by itself, of another installation with `--prefix`. What is found must be for
this machine: kernels compiled for hardware do not run on the software NPU, the emulation of them not on hardware, and
those of another architecture of NPU not on this one.
Not here: loading (`afd.py`, `kernels.py`). It imports neither torch nor vLLM.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from afd_dsv4.geometry import InputError

VARIABLE: Final = "AFD_DSV4_KERNELS"
SOFTWARE_NPU: Final = "AFD_DSV4_SOFTNPU_DIR"  # the launcher of the software NPU sets it
KERNELS: Final = "libafd_dsv4_kernels.so"
OPERATORS: Final = "libafd_dsv4_ops.so"
MANIFEST: Final = "afd_dsv4_kernels.json"

#: Back ends of the kernels: compiled for hardware, CANN's CPU twin of them, and the project's emulation.
HARDWARE: Final = "ascendc"
HOST: Final = ("emulation", "twin")

#: Of Atlas A2 and A3, the only devices that the gate takes (`gate.py:DEVICES`).
ARCHITECTURE: Final = "dav-2201"


@dataclass(frozen=True)
class Library:
    """Kernels that can be loaded here.

    Attributes:
        folder: of the libraries.
        backend: what the kernels were compiled for, `HARDWARE` or one of `HOST`.
    """

    folder: Path
    backend: str

    @property
    def on_hardware(self) -> bool:
        """Whether they run on an NPU."""
        return self.backend == HARDWARE

    @property
    def kernels(self) -> Path:
        """The library with the C ABI, kernels_ascendc/compressor/kernels.h."""
        return self.folder / KERNELS

    @property
    def operators(self) -> Path:
        """The library that registers torch.ops.afd_dsv4."""
        return self.folder / OPERATORS


def find(environment: Mapping[str, str]) -> Library:
    """Look for the kernels of this machine.

    Args:
        environment: such as `os.environ`.

    Raises:
        InputError: there are none, they are not whole, or they are for something else.
    """
    emulated = environment.get(SOFTWARE_NPU, "").strip()
    given = environment.get(VARIABLE, "").strip()
    folder = Path(given or emulated or Path(__file__).resolve().parents[1] / "lib")
    try:
        missing = [name for name in (KERNELS, OPERATORS, MANIFEST) if not (folder / name).is_file()]
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            "kernels of the afd executor",
            f"{reprlib.repr(str(folder))} cannot be read ({reason})",
            f"name another folder in {VARIABLE}",
        ) from None
    if missing:
        remedy = (
            f"build them where CANN is (cmake --preset npu && cmake --build --preset npu), then install them there "
            f"(cmake --install build/npu --prefix {folder}), or name their folder in {VARIABLE}"
        )
        if emulated:
            remedy = "run `make setup`, which builds their emulation beside the software NPU"
        raise InputError("kernels of the afd executor", f"{folder} has no {', '.join(missing)}", remedy)
    backend, architecture = _made_for(folder / MANIFEST)
    found = Library(folder, backend)
    if found.on_hardware is bool(emulated):
        asked = "the software NPU, which runs their emulation" if emulated else "an NPU"
        raise InputError(
            "kernels of the afd executor",
            f"those in {folder} are of the back end {found.backend!r}, and this process is on {asked}",
            f"leave {VARIABLE} unset" if emulated else f"build them with CANN, or name others in {VARIABLE}",
        )
    if found.on_hardware and architecture != ARCHITECTURE:
        raise InputError(
            "kernels of the afd executor",
            f"those in {folder} were compiled for the architecture {architecture!r}; A2 and A3 are {ARCHITECTURE}",
            f"build them with CMAKE_ASC_ARCHITECTURES={ARCHITECTURE}, or name others in {VARIABLE}",
        )
    return found


def _made_for(path: Path) -> tuple[str, object]:
    """Back end and architecture."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        backend, architecture = written["backend"], written["architecture"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            "kernels of the afd executor", f"{path} cannot be read ({error!r})", "build them anew"
        ) from None
    if backend not in (HARDWARE, *HOST):
        known = ", ".join((HARDWARE, *HOST))
        raise InputError("kernels of the afd executor", f"{path} names the back end {backend!r}", f"known are {known}")
    return str(backend), architecture
