# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The software NPU, from inside a process that runs on it.

Problem: torch_npu alone has no operator that runs, and tests want to turn the software NPU's knobs.
Way: ``install`` loads the aten kernels and every operator library beside them; the rest are thin calls into
``libascendcl.so``. The launcher calls ``install`` when torch_npu is imported. Not done: starting on the software NPU a
process that was not started by ``python -m afd_dsv4.softnpu``.
"""

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from afd_dsv4.softnpu.launcher import SoftnpuError, library_dir

ATEN_LIBRARY = "libsoftnpu_aten.so"
OPERATOR_LIBRARIES = "libsoftnpu_ops*.so"


@dataclass(frozen=True)
class Installed:
    """What ``install`` registered: operators run on the CPU, composites restored, operators that raise by name."""

    on_cpu: int
    composite: int
    raising: int
    libraries: tuple[str, ...]


def is_active() -> bool:
    """Tell whether this process was started on the software NPU."""
    folder = os.environ.get("AFD_DSV4_SOFTNPU_DIR")
    return bool(folder) and str(Path(folder or "")) in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)


@functools.cache
def install() -> Installed:
    """Load torch_npu and every kernel of the software NPU; safe to call again.

    Raises:
        SoftnpuError: the process was not started on the software NPU, or the task queue is on.
    """
    if not is_active():
        raise SoftnpuError(
            "this process does not run on the software NPU. Start it with `python -m afd_dsv4.softnpu -- COMMAND`."
        )
    if os.environ.get("TASK_QUEUE_ENABLE") != "0":
        raise SoftnpuError(
            f"TASK_QUEUE_ENABLE is {os.environ.get('TASK_QUEUE_ENABLE')!r}; the software NPU needs '0', "
            "because with the task queue an operator without a body may hand back unfilled memory."
        )
    import torch
    import torch_npu  # noqa: F401

    folder = library_dir()
    torch.ops.load_library(str(folder / ATEN_LIBRARY))
    on_cpu, composite, raising = torch.ops.softnpu.install()
    operators = sorted(folder.glob(OPERATOR_LIBRARIES))
    for library in operators:
        torch.ops.load_library(str(library))
    return Installed(on_cpu, composite, raising, tuple(path.name for path in operators))


@functools.cache
def _acl() -> ctypes.CDLL:
    library = ctypes.CDLL("libascendcl.so")
    for name in ("softnpu_device_bytes", "softnpu_device_peak_bytes", "softnpu_delay_injected_us"):
        getattr(library, name).restype = ctypes.c_uint64
    library.softnpu_schedule_delay_us.restype = ctypes.c_uint32
    library.softnpu_schedule_delay_us.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64]
    library.softnpu_set_schedule.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
    library.softnpu_set_schedule.restype = None
    library.softnpu_inject_error.argtypes = [ctypes.c_int32, ctypes.c_char_p]
    library.softnpu_inject_error.restype = None
    library.softnpu_set_copy_delay_us.argtypes = [ctypes.c_uint32]
    library.softnpu_set_copy_delay_us.restype = None
    return library


def set_schedule(seed: int, max_delay_us: int = 200) -> None:
    """Delay every task by 0..``max_delay_us`` microseconds, a function of (seed, stream, task index); seed 0: off."""
    _acl().softnpu_set_schedule(seed, max_delay_us)


def schedule_delay_us(seed: int, max_delay_us: int, stream_id: int, task_index: int) -> int:
    """Return the delay in microseconds that ``set_schedule(seed, max_delay_us)`` gives this task."""
    return int(_acl().softnpu_schedule_delay_us(seed, max_delay_us, stream_id, task_index))


def set_copy_delay_us(delay_us: int) -> None:
    """Make every asynchronous copy take at least this many microseconds."""
    _acl().softnpu_set_copy_delay_us(delay_us)


def inject_error(message: str, device: int = 0) -> None:
    """Make the device report a failed task at its next synchronisation, with this text."""
    _acl().softnpu_inject_error(device, message.encode())


def device_bytes(device: int = 0) -> int:
    """Return the device memory in use, in bytes, below torch's caching allocator."""
    return int(_acl().softnpu_device_bytes(device))


def device_peak_bytes(device: int = 0) -> int:
    """Return the most device memory that was in use since the last ``reset_peak``, in bytes."""
    return int(_acl().softnpu_device_peak_bytes(device))


def reset_peak(device: int = 0) -> None:
    """Start a new peak measurement."""
    _acl().softnpu_reset_peak(device)


def delay_injected_us() -> int:
    """Return the total delay of the adversarial schedule so far, in microseconds."""
    return int(_acl().softnpu_delay_injected_us())


def calls() -> tuple[int, int]:
    """Return how many aten calls were queued on a stream, and how many had to wait for the stream first."""
    install()
    import torch

    queued, waited = torch.ops.softnpu.calls()
    return int(queued), int(waited)
