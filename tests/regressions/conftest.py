# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""One process of the real vLLM scheduler for all reports that are about admission: it takes ten seconds to import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from afd_dsv4.compat.harness import SchedulerProcess


@pytest.fixture(scope="session")
def scheduler() -> Iterator[SchedulerProcess]:
    """The real scheduler of vLLM 0.23.0 with vllm-ascend 0.23.0's KV groups; it asks no device."""
    with SchedulerProcess() as process:
        yield process
