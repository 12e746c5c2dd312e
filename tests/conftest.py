# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What every test run shares: which tests can run here and why not, the hypothesis profile, and the seeds in the log.

A skipped test always names its reason. ``AFD_DSV4_REQUIRE_NPU=1`` (``make test`` sets it) allows only the skips that
`EXCUSED` names: a software NPU, a vLLM or a library that is missing or broken then fails the run instead of hiding.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import zlib
from collections.abc import Generator, Iterator
from functools import cache
from typing import TYPE_CHECKING

# Without this, merely importing torch beside a torch_npu that cannot load (no CANN, no software NPU) fails.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import hypothesis
import numpy as np
import pytest

from afd_dsv4.softnpu.runtime import is_active

if TYPE_CHECKING:
    from afd_dsv4.compat.harness import SchedulerProcess

#: Seed of the ``rng`` fixture; set the variable to replay or to vary a run.
SEED = int(os.environ.get("AFD_DSV4_TEST_SEED", "0"))

# ci: the same examples on every machine, and no deadline, because two shared cores keep none.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
hypothesis.settings.register_profile("deep", deadline=None, print_blob=True, max_examples=2000)
PROFILE = os.environ.get("AFD_DSV4_HYPOTHESIS", "ci")
hypothesis.settings.load_profile(PROFILE)


REMEDY = "run: python -m afd_dsv4.softnpu -- python -m pytest"
REQUIRE = "AFD_DSV4_REQUIRE_NPU"
#: How the reason of a skip begins that is right on a complete machine too: a test for a real accelerator, or in a
#: browser, or a case that does not exist here.
EXCUSED = ("device: ", "no browser: ", "no such case: ")
#: An object in the name of a test.
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


@cache
def broken_torch_npu() -> str | None:
    """Why torch_npu does not work here, None where it does. Imports it, so only called when a test needs it."""
    try:
        import torch
        import torch_npu  # noqa: F401

        count = torch.npu.device_count()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"torch_npu does not load ({str(error).splitlines()[0]}); {REMEDY}"
    return None if count else f"torch.npu has no device; {REMEDY}"


@cache
def missing_npu() -> str | None:
    """Why the tests marked npu cannot run here. They turn the software NPU's own knobs, so a real NPU does not do."""
    if not is_active():
        return f"drives the software NPU (its waivers, schedules and counters), and this process is not on it; {REMEDY}"
    return broken_torch_npu()


@cache
def missing_stack() -> str | None:
    """Which part of the real stack cannot be imported, None where all can."""
    absent = [name for name in ("vllm", "vllm_ascend", "torch_npu") if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}; run: make setup"
    # transformers imports torch_npu as soon as it is installed, so nothing of the stack imports without it.
    if reason := broken_torch_npu():
        return reason
    try:
        # The index serves torchvision for a CUDA torch; the launcher of the software NPU declares what it misses.
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"torchvision does not load ({error}); {REMEDY}"
    return None


@cache
def missing_device() -> str | None:
    """Why no real accelerator is there; the software NPU is none."""
    if is_active():
        return "runs on the software NPU; needs a real accelerator"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if torch.cuda.is_available() or broken_torch_npu() is None:
        return None
    return "no real accelerator"


REASONS = {"npu": missing_npu, "vllm_runtime": missing_stack, "device": missing_device}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, and skip what cannot run here, each with its reason."""
    # Whole files go to the workers of `make test`: a long one begun last would leave the other worker idle.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if ADDRESS.search(item.nodeid):  # each worker would know the test by another name, and refuse to run any
            raise pytest.UsageError(f"{item.nodeid} has an address in its name; give its parameter an id")
        for name, reason_of in REASONS.items():
            if item.get_closest_marker(name) and (reason := reason_of()):
                if required() and name != "device":
                    raise pytest.UsageError(f"{REQUIRE}=1, but {name}: {reason}")
                item.add_marker(pytest.mark.skip(reason=f"{name}: {reason}"))


def pytest_collection_finish() -> None:
    """Leave out of garbage collection what the imports have made: half a million objects that are never garbage."""
    gc.collect()
    gc.freeze()


def required() -> bool:
    """Whether this run must be complete."""
    return os.environ.get(REQUIRE) == "1"


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Where the run must be complete, make a failure of a skip that nothing excuses."""
    if not required() or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not reason.startswith(EXCUSED):
        report.outcome = "failed"
        report.longrepr = f"{REQUIRE}=1 allows no such skip: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Look at the skips of tests and fixtures."""
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Look at the skips of whole modules."""
    report = yield
    refuse_skip(report)
    return report


def pytest_report_header() -> list[str]:
    """Everything random about this run."""
    device = "software NPU" if is_active() else "of this machine"
    seeds = f"AFD_DSV4_TEST_SEED={SEED} SOFTNPU_SEED={os.environ.get('SOFTNPU_SEED', '0')}"
    return [f"afd-dsv4: device {device}, seeds: {seeds}, AFD_DSV4_HYPOTHESIS={PROFILE}"]


@pytest.fixture(autouse=True)
def current_stream_stays(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """A test that leaves another current stream behind makes the next ones queue where they do not know."""
    yield
    if request.node.get_closest_marker("npu"):
        import torch

        current, default = torch.npu.current_stream(), torch.npu.default_stream()
        torch.npu.set_stream(default)
        assert current == default, f"{current} is left as the current stream"


@pytest.fixture(scope="session")
def scheduler() -> Iterator[SchedulerProcess]:
    """The real vLLM scheduler with vllm-ascend's KV groups, which asks no device: one process for all that is about
    admission, since it takes ten seconds to import."""
    from afd_dsv4.compat.harness import SchedulerProcess

    with SchedulerProcess() as process:
        yield process


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of this test's own: the run's seed and the test's name decide it, the order of the tests does not."""
    return np.random.default_rng([SEED, zlib.crc32(request.node.nodeid.encode())])
