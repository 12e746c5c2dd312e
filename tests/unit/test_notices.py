# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Notices: what an operator reads in the log, and how often."""

from __future__ import annotations

import pytest

from afd_dsv4.notices import Notices
from tests.metrics_worker import SLOTS, Runtime


def test_a_quarantined_slot_is_an_error_in_the_log_once_whatever_metrics_are(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime()
    notices = Notices(runtime.arena)
    lease = runtime.step("a")
    notices.step()
    assert caplog.records == []
    runtime.arena.quarantine(lease, "a test says so")
    notices.step()
    notices.step()
    (record,) = caplog.records
    assert record.name.startswith("vllm.")
    said = record.getMessage()
    assert said.startswith("afd-dsv4: slot 0 is quarantined: nobody can prove that ")
    assert f"; 1 of {SLOTS} slots are left." in said
    runtime.arena.quarantine(runtime.step("b"), "again")
    notices.step()
    assert "slot 1 is quarantined" in caplog.records[1].getMessage()
    assert f"; 0 of {SLOTS} slots are left." in caplog.records[1].getMessage()
