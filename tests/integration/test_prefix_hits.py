# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The shortest prompt that hits the prefix cache, by the doctor's arithmetic and by the real KV-cache managers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from afd_dsv4.compat.stack import installed
from afd_dsv4.doctor.prefix import hit_multiple, least_shared
from afd_dsv4.geometry import page_layout
from tests.doctor.cases import ROOT

pytestmark = [
    pytest.mark.vllm_runtime,
    pytest.mark.skipif(installed().name is None, reason=f"needs a supported stack, installed is {installed()}"),
]


def test_a_prompt_hits_from_one_token_above_what_the_doctor_says_must_be_shared_with_drafts_and_without() -> None:
    asked, expected = [], []
    for block_size in (32, 128):
        layout = page_layout(installed().name or "", block_size)
        for drafts in (False, True):
            least = least_shared(layout, drops=drafts)
            asked += [(block_size, drafts, least), (block_size, drafts, least + 1)]
            expected += [0, hit_multiple(layout)]
    lines = "".join(json.dumps(one) + "\n" for one in asked)
    command = [sys.executable, "-m", "tests.prefix_managers"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [int(line) for line in done.stdout.splitlines()[-len(asked) :]] == expected
