# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Both routes of the harness: the unmodified NPUPlatform, and vllm-ascend's KV-cache code with the device stood in."""

import os

import pytest

from afd_dsv4.compat.harness import Case, HarnessError, Route, SchedulerProcess, admission_evidence
from afd_dsv4.geometry import preset

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime]

BATCH = (20000, 9000, 3768)
CASE = Case(preset("flash"), (100,), 128, 4096, 8192, free_blocks=1000)
PUBLISHED = {"c4_mla": 125, "c128_mla": 4, "swa": 998, "c4_state": 7973, "c128_state": 1994}


@pytest.mark.slow
def test_the_whole_platform_and_the_stand_in_give_the_same_answers(scheduler):
    # On the platform's route the worker also compares each spec of the model's own classes with the stand-in's.
    without_cann = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    with SchedulerProcess(environment=without_cann) as stand_in:
        assert (scheduler.route, stand_in.route) == (Route.NPU_PLATFORM, Route.STAND_IN)
        on_platform, stood_in = admission_evidence(scheduler, batch=BATCH), admission_evidence(stand_in, batch=BATCH)
    assert {row.pop("route") for row in on_platform} == {"npu_platform"}
    assert {row.pop("route") for row in stood_in} == {"stand_in"}
    assert on_platform == stood_in
    assert on_platform[0]["native"]["by_group"] == PUBLISHED
    assert {(row["native"]["admitted"], row["plugin"]["admitted"]) for row in on_platform} == {(False, True)}


@pytest.fixture
def interpreter(tmp_path):
    """A program in the interpreter's place, from a line of shell."""

    def write(line):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\necho starting up >&2\n{line}\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.mark.parametrize("before", ["", 'printf \'{"ready": "stand_\'; '], ids=["silent", "half_a_line"])
def test_a_worker_that_hangs_is_ended_and_the_error_says_what_to_do(interpreter, before):
    with SchedulerProcess(python=interpreter(f"{before}exec sleep 600"), seconds=0.5) as process:
        with pytest.raises(HarnessError) as caught:
            process.route  # noqa: B018  waits for the worker
        with pytest.raises(HarnessError, match="ended with status -9"):
            process.route  # noqa: B018  it is not asked again
    for piece in ("asked for an answer", "found none in 0.5 s", "give SchedulerProcess more seconds", "starting up"):
        assert piece in str(caught.value)


def test_lines_that_come_together_are_two_answers(interpreter):
    answers = '{"ready": "stand_in", "block_sizes": {}}\\n{"error": "planted"}\\n'
    with SchedulerProcess(python=interpreter(f"printf '{answers}'; cat >&2")) as process:
        assert process.route is Route.STAND_IN
        with pytest.raises(HarnessError, match="planted"):
            process.ask(CASE)


def test_a_worker_that_cannot_start_says_why():
    with SchedulerProcess(python="false") as process, pytest.raises(HarnessError, match="status 1"):
        process.route  # noqa: B018  waits for the worker
