# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The real engine with the plugin off, refused (mode afd, no AFD) and not installed: three processes, the same tokens.

More of the same is part of `make engine`; that each difference would be seen, `tests/unit/test_evidence_engine.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from afd_dsv4.evidence.engine import Bench

pytestmark = [pytest.mark.npu, pytest.mark.vllm_runtime, pytest.mark.slow, pytest.mark.timeout(900)]


def test_off_and_refused_serve_what_is_served_without_the_plugin(tmp_path: Path) -> None:
    assert Bench(tmp_path, jobs=2).untouched(count=1) == []
