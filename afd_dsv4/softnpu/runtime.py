# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The software NPU, from inside a process that runs on it.

Problem: torch_npu alone has no operator that runs, and tests want to turn the software NPU's knobs.
Way: ``install`` loads the aten kernels and every operator library beside them; the rest are thin calls into
``libascendcl.so``. The launcher calls ``install`` when torch_npu is imported. Not done: starting on the software NPU a
process that was not started by ``python -m afd_dsv4.softnpu``.
"""

import atexit
import ctypes
import functools
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afd_dsv4.compressor.library import SOFTWARE_NPU
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
    folder = os.environ.get(SOFTWARE_NPU)
    return bool(folder) and str(Path(folder or "")) in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)


@functools.cache
def install() -> Installed:
    """Load torch_npu and every kernel of the software NPU; safe to call again.

    The limits of operators that SOFTNPU_WAIVE names (with commas between) are waived, here and in worker processes.

    Raises:
        SoftnpuError: the process was not started on the software NPU, or TASK_QUEUE_ENABLE is neither 0 nor 1.
        RuntimeError: SOFTNPU_WAIVE has a name that is no limit.
    """
    if not is_active():
        raise SoftnpuError(
            "this process does not run on the software NPU. Start it with `python -m afd_dsv4.softnpu -- COMMAND`."
        )
    queue = os.environ.get("TASK_QUEUE_ENABLE")
    if queue not in ("0", "1"):
        raise SoftnpuError(
            f"TASK_QUEUE_ENABLE is {queue!r}; the software NPU knows '0' (no host queue) and '1'. torch_npu's own "
            "default, and its level 2, compile operators, of which there are none here."
        )
    import torch
    import torch_npu  # noqa: F401

    folder = library_dir()
    torch.ops.load_library(str(folder / ATEN_LIBRARY))
    on_cpu, composite, raising = torch.ops.softnpu.install()
    operators = sorted(folder.glob(OPERATOR_LIBRARIES))
    for library in operators:
        torch.ops.load_library(str(library))
    for limit in filter(None, os.environ.get("SOFTNPU_WAIVE", "").split(",")):
        torch.ops.softnpu.waive(limit.strip(), True)
    return Installed(on_cpu, composite, raising, tuple(path.name for path in operators))


@dataclass(frozen=True)
class Site:
    """One side of a race: what ran, where, and whether it wrote.

    Attributes:
        operator: name of the kernel or copy, or what the host said it did.
        stream: ACL's id of the stream; -1 is the host.
        task: how many tasks the stream had been given before it, since the detector was turned on.
        writes: whether it wrote the memory, or only read it.
    """

    operator: str
    stream: int
    task: int
    writes: bool

    def __str__(self) -> str:
        where = "the host" if self.stream < 0 else f"stream {self.stream}"
        return f"{'write' if self.writes else 'read'} by {self.operator} ({where}, task {self.task})"


@dataclass(frozen=True)
class Race:
    """Two tasks that touch the same bytes, one of them to write, and nothing orders them.

    Attributes:
        first, second: the tasks, in the order in which they were judged (mostly that in which they were queued).
        address, size: from the first to the last byte that they share.
    """

    first: Site
    second: Site
    address: int
    size: int

    def __str__(self) -> str:
        return f"{self.second} races with the {self.first} over {self.size} bytes at {self.address:#x}"


class _Site(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 96),
        ("stream", ctypes.c_int32),
        ("writes", ctypes.c_int32),
        ("task", ctypes.c_uint64),
    ]


class _Race(ctypes.Structure):
    _fields_ = [("first", _Site), ("second", _Site), ("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


class _Access(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("writes", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


@functools.cache
def _acl() -> ctypes.CDLL:
    library = ctypes.CDLL("libascendcl.so")
    for name in (
        "softnpu_device_bytes",
        "softnpu_device_peak_bytes",
        "softnpu_delay_injected_us",
        "softnpu_tasks_held",
        "softnpu_race_count",
        "softnpu_races",
        "softnpu_faults_injected",
        "softnpu_events_created",
        "softnpu_events_destroyed",
        "softnpu_replays",
        "softnpu_replayed_accesses",
    ):
        getattr(library, name).restype = ctypes.c_uint64
    library.softnpu_schedule_delay_us.restype = ctypes.c_uint32
    library.softnpu_schedule_delay_us.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64]
    library.softnpu_set_schedule.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
    library.softnpu_set_schedule.restype = None
    library.softnpu_set_starvation.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
    library.softnpu_set_starvation.restype = None
    library.softnpu_schedule_holds.argtypes = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64]
    library.softnpu_races.argtypes = [ctypes.POINTER(_Race), ctypes.c_uint64]
    library.softnpu_host_access.argtypes = [ctypes.c_char_p, ctypes.POINTER(_Access), ctypes.c_uint64]
    library.softnpu_host_access.restype = None
    for name in ("softnpu_hang_stream", "softnpu_release_stream", "softnpu_kill_stream"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
        getattr(library, name).restype = None
    library.softnpu_fail_task.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.softnpu_fail_task.restype = None
    library.softnpu_fail_calls.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32]
    library.softnpu_fail_calls.restype = None
    library.softnpu_set_fault_rate.argtypes = [ctypes.c_uint64, ctypes.c_double, ctypes.c_uint32, ctypes.c_int32]
    library.softnpu_set_fault_rate.restype = None
    library.softnpu_inject_error.argtypes = [ctypes.c_int32, ctypes.c_char_p]
    library.softnpu_inject_error.restype = None
    library.softnpu_replayed_accesses.argtypes = [ctypes.POINTER(_Access), ctypes.c_uint64]
    library.softnpu_group_join.argtypes = [ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32]
    library.softnpu_group_leave.argtypes = [ctypes.c_char_p, ctypes.c_uint32]
    library.softnpu_group_waiting.argtypes = [ctypes.c_char_p, ctypes.c_uint32]
    library.softnpu_set_copy_delay_us.argtypes = [ctypes.c_uint32]
    library.softnpu_set_copy_delay_us.restype = None
    return library


def set_schedule(seed: int, max_delay_us: int = 200, *, starve: bool = False) -> None:
    """Make the order of the streams adversarial, as a function of (seed, stream, task index); seed 0: off.

    Args:
        seed: the schedule; the same seed gives a stream's tasks the same delays.
        max_delay_us: the longest that a task is kept from running, in microseconds.
        starve: False delays every task by 0..``max_delay_us``. True holds back one task in six, and its stream with it,
            until no other stream has anything to run and the host waits, or ``max_delay_us`` is over: cheaper, and
            what is queued much later on another stream still overtakes.
    """
    if starve:
        _acl().softnpu_set_starvation(seed, max_delay_us)
    else:
        _acl().softnpu_set_schedule(seed, max_delay_us)


def set_batch_invariant(on: bool) -> bool:
    """Make a row's bits independent of the rows it is batched with, or not; return what it was.

    Holds for the tasks that run from now on: synchronise first. What is made invariant, and how:
    ``kernels_ascendc/softnpu/aten/batch_invariant.h``. AFD_DSV4_SOFTNPU_BATCH_INVARIANT=1 turns it on from the start.
    """
    install()
    import torch

    return bool(torch.ops.softnpu.set_batch_invariant(on))


def schedule_holds(seed: int, stream_id: int, task_index: int) -> bool:
    """Tell whether ``set_schedule(seed, starve=True)`` holds this task back."""
    return bool(_acl().softnpu_schedule_holds(seed, stream_id, task_index))


def tasks_held() -> int:
    """Return how many tasks the starving schedule has held back so far."""
    return int(_acl().softnpu_tasks_held())


def schedule_delay_us(seed: int, max_delay_us: int, stream_id: int, task_index: int) -> int:
    """Return the delay in microseconds that ``set_schedule(seed, max_delay_us)`` gives this task."""
    return int(_acl().softnpu_schedule_delay_us(seed, max_delay_us, stream_id, task_index))


def set_copy_delay_us(delay_us: int) -> None:
    """Make every asynchronous copy take at least this many microseconds."""
    _acl().softnpu_set_copy_delay_us(delay_us)


def inject_error(message: str, device: int = 0) -> None:
    """Make the device report a failed task at its next synchronisation, with this text."""
    _acl().softnpu_inject_error(device, message.encode())


def set_race_detection(on: bool) -> None:
    """Turn the race detector on or off. Turned on, it starts anew and knows nothing of what was queued before.

    Two tasks race that touch the same bytes of device or pinned memory, one of them to write, without an order by
    stream, event, captured edge, or what the host had seen when it queued the second. Timing plays no part, but for the
    answers of queries: a True orders what is queued after it. A graph must have been captured with the software NPU as
    it is since this function exists; the detector may have been off.
    """
    _acl().softnpu_set_races(int(on))


def race_detection() -> bool:
    """Tell whether the race detector is on."""
    return bool(_acl().softnpu_races_on())


def races() -> tuple[Race, ...]:
    """Return the races found since the last ``clear_races``: the first 1000, each pair of tasks once."""
    found = (_Race * 1000)()
    count = _acl().softnpu_races(found, len(found))

    def site(c: Any) -> Site:
        return Site(c.name.decode(errors="replace"), int(c.stream), int(c.task), bool(c.writes))

    return tuple(Race(site(r.first), site(r.second), int(r.address), int(r.bytes)) for r in found[:count])


def race_count() -> int:
    """Return how many races there were since the last ``clear_races``, also those that ``races`` has no room for."""
    return int(_acl().softnpu_race_count())


def clear_races() -> None:
    """Forget the races found so far, not what orders later tasks."""
    _acl().softnpu_clear_races()


def host_access(tensor: Any, name: str, *, writes: bool) -> None:
    """Tell the race detector that the host touches a dense pinned tensor now: it cannot see that by itself."""
    access = _Access(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 1, 0, int(writes), 0)
    _acl().softnpu_host_access(name.encode(), ctypes.byref(access), 1)


TS_ERROR = 507001
"""ACL_ERROR_RT_TS_ERROR, an error of the device's scheduler: what injected faults report unless told otherwise."""
_ANY_STREAM = ctypes.c_void_p(-1)
_CALLS = ("create", "record", "wait", "query", "task")


def _handle(stream: Any) -> Any:
    """The ACL handle of a torch.npu stream, or of an integer that is one."""
    return ctypes.c_void_p(stream if isinstance(stream, int) else stream.npu_stream)


def hang_stream(stream: Any) -> None:
    """Let nothing run, tasks and events alike, that is queued on the stream from now on, until it is released."""
    _acl().softnpu_hang_stream(_handle(stream))


def release_stream(stream: Any) -> None:
    """Undo every ``hang_stream`` of the stream."""
    _acl().softnpu_release_stream(_handle(stream))


def kill_stream(stream: Any) -> None:
    """Make the stream dead: what is queued, now and later, never runs, and its events never complete.

    Synchronising with it, with such an event, or with a stream that waits for one raises instead of hanging.
    """
    _acl().softnpu_kill_stream(_handle(stream))


def fail_task(stream: Any, nth: int = 1) -> None:
    """Make the ``nth`` kernel, copy, host function or graph queued on the stream from now fail; 1 is the next.

    It does not run, and the next synchronisation raises. Events are not counted.
    """
    if nth < 1:
        raise ValueError(f"fail_task: nth is {nth}; the next task is number 1")
    _acl().softnpu_fail_task(_handle(stream), nth)


def _fail_next(call: str, stream: Any, code: int, times: int) -> None:
    handle = _ANY_STREAM if stream is None else _handle(stream)
    _acl().softnpu_fail_calls(_CALLS.index(call), handle, code, times)


def fail_next_record(stream: Any = None, code: int = TS_ERROR, times: int = 1) -> None:
    """Make the next event records (on the stream, or on any) return an ACL error; nothing is recorded."""
    _fail_next("record", stream, code, times)


def fail_next_wait(stream: Any = None, code: int = TS_ERROR, times: int = 1) -> None:
    """Make the next waits of a stream for an event return an ACL error; the stream does not wait."""
    _fail_next("wait", stream, code, times)


def fail_next_query(code: int = TS_ERROR, times: int = 1) -> None:
    """Make the next event queries return an ACL error. torch's allocators query events, too."""
    _fail_next("query", None, code, times)


def fail_next_create(code: int = TS_ERROR, times: int = 1) -> None:
    """Make the next creations of an event return an ACL error. torch creates an event at its first record."""
    _fail_next("create", None, code, times)


def set_fault_rate(seed: int, probability: float, kinds: Collection[str] = ("task",), code: int = TS_ERROR) -> None:
    """Make each task or event call fail with a probability, as a function of seed and number.

    Args:
        seed: which ones fail; the number of a task is counted on its stream, that of a call over all of its kind.
        probability: 0 to 1; 0 turns it off.
        kinds: any of "create", "record", "wait", "query" (event calls, which return ``code``) and "task".
        code: the ACL error.
    """
    if not 0 <= probability <= 1 or not set(kinds) <= set(_CALLS):
        raise ValueError(f"set_fault_rate: probability {probability} and kinds {kinds}; expected 0..1 and of {_CALLS}")
    mask = sum(1 << _CALLS.index(kind) for kind in set(kinds)) if probability else 0
    _acl().softnpu_set_fault_rate(seed, probability, mask, code)


def faults_injected() -> int:
    """Return how many tasks and calls were made to fail so far."""
    return int(_acl().softnpu_faults_injected())


def hang_host_queue() -> None:
    """Let nothing leave torch_npu's host queue (TASK_QUEUE_ENABLE=1), neither kernels nor events, until it is released.

    Whatever empties the queue first waits with it: synchronisations, copies to the host, ``stream.npu_stream``.
    """
    install()
    import torch

    atexit.register(release_host_queue)  # the end of the process empties the queue
    torch.ops.softnpu.hang_host_queue()


def release_host_queue() -> None:
    """Undo ``hang_host_queue``."""
    install()
    import torch

    torch.ops.softnpu.release_host_queue()


def clear_faults() -> None:
    """Undo every injected fault. What a dead stream lost stays lost, but its events complete."""
    _acl().softnpu_clear_faults()
    if os.environ.get("TASK_QUEUE_ENABLE") == "1":
        release_host_queue()


def event_counts() -> tuple[int, int]:
    """Return how many device events were created, and how many destroyed, so far."""
    return int(_acl().softnpu_events_created()), int(_acl().softnpu_events_destroyed())


def replays() -> int:
    """Return how many replays of graphs were queued so far."""
    return int(_acl().softnpu_replays())


def replayed_bytes() -> tuple[tuple[int, int], ...]:
    """Return what the graph replayed last touches: addresses and sizes in bytes, as known when it was captured.

    A graph that is gone touches nothing. What lies between the rows of a slice is counted in.
    """
    count = int(_acl().softnpu_replayed_accesses(None, 0))
    found = (_Access * count)()
    _acl().softnpu_replayed_accesses(found, count)
    return tuple((piece.address, (piece.rows - 1) * piece.stride + piece.bytes) for piece in found if piece.rows)


def join_group(name: str, size: int, rank: int) -> None:
    """Make this process rank ``rank`` of a group that operators talk in by its name, without torch.distributed.

    The real process group does this with the name that ``get_hccl_comm_name`` gives. One process may be several ranks.

    Raises:
        SoftnpuError: there is such a rank already, here or in another process.
    """
    if _acl().softnpu_group_join(name.encode(), size, rank):
        raise SoftnpuError(f"group {name!r}: rank {rank} of {size} cannot join; the reason is on stderr")


def set_destroy_hangs(on: bool) -> None:
    """Choose what leaving a group does to what this rank waits for there; SOFTNPU_DESTROY says it from the start.

    Args:
        on: False ("error") ends it with an error of the device. True ("hang") does not: leaving returns when nothing is
            pending any more, perhaps never, as destroying a communicator may on CANN.
    """
    _acl().softnpu_set_destroy_hangs(int(on))


def leave_group(name: str, rank: int) -> None:
    """Leave the group, as destroying a communicator does; see ``set_destroy_hangs`` for what is pending there."""
    if _acl().softnpu_group_leave(name.encode(), rank):
        raise SoftnpuError(f"group {name!r}: rank {rank} never joined in this process")


def waits_in_group(name: str, rank: int) -> bool:
    """Whether a receive of this rank has begun and waits for what others send."""
    waiting = int(_acl().softnpu_group_waiting(name.encode(), rank))
    if waiting < 0:
        raise SoftnpuError(f"group {name!r}: rank {rank} never joined in this process")
    return waiting > 0


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

    queued, waited, _ = torch.ops.softnpu.calls()
    return int(queued), int(waited)


def remembered_calls() -> int:
    """Return of how many aten calls the shapes of the results were known from an earlier one."""
    install()
    import torch

    return int(torch.ops.softnpu.calls()[2])
