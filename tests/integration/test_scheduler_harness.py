# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Both routes of the harness: the unmodified NPUPlatform, and vllm-ascend's KV-cache code with the device stood in."""

import os

import pytest

from afd_dsv4.compat.harness import HarnessError, Route, SchedulerProcess, admission_evidence

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime]

BATCH = (20000, 9000, 3768)
PUBLISHED = {"c4_mla": 125, "c128_mla": 4, "swa": 998, "c4_state": 7973, "c128_state": 1994}


@pytest.mark.slow
def test_the_whole_platform_and_the_stand_in_give_the_same_answers():
    # On the platform's route the worker also compares each spec of the model's own classes with the stand-in's.
    without_cann = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    with SchedulerProcess() as platform, SchedulerProcess(environment=without_cann) as stand_in:
        assert (platform.route, stand_in.route) == (Route.NPU_PLATFORM, Route.STAND_IN)
        on_platform, stood_in = admission_evidence(platform, batch=BATCH), admission_evidence(stand_in, batch=BATCH)
    assert {row.pop("route") for row in on_platform} == {"npu_platform"}
    assert {row.pop("route") for row in stood_in} == {"stand_in"}
    assert on_platform == stood_in
    assert on_platform[0]["native"]["by_group"] == PUBLISHED
    assert {(row["native"]["admitted"], row["plugin"]["admitted"]) for row in on_platform} == {(False, True)}


def test_a_worker_that_cannot_start_says_why():
    with SchedulerProcess(python="false") as process, pytest.raises(HarnessError, match="status 1"):
        process.route  # noqa: B018  waits for the worker
