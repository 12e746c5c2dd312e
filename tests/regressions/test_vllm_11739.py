# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm#11739, flagos-ai/vllm-plugin-FL#159: two platform plugins, and vLLM does not start.

Symptom: "Only one platform plugin can be activated", because a plugin beside the device's claims a platform too.
Here: ours has an entry point in the same group, which claims none. vLLM's own resolver is asked, with the entry points
of vllm-ascend and ours, and as a negative control with one of ours that claims something.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm_runtime

ASK = """
import importlib.metadata, json, sys
from importlib.metadata import EntryPoint
import vllm.platforms as platforms

given = importlib.metadata.entry_points
answers = {}
for name, target in json.loads(sys.argv[1]).items():
    points = [EntryPoint("ascend", "vllm_ascend:register", "vllm.platform_plugins")]
    points.append(EntryPoint("afd_dsv4", target, "vllm.platform_plugins"))
    importlib.metadata.entry_points = lambda group, points=points: (
        points if group == "vllm.platform_plugins" else given(group=group)
    )
    try:
        answers[name] = platforms.resolve_current_platform_cls_qualname()
    except RuntimeError as error:
        answers[name] = f"RuntimeError: {error}"
print(json.dumps(answers))
"""


def test_beside_ours_vllm_takes_ascends_platform_and_a_second_claim_stops_it() -> None:
    asked = {"ours": "afd_dsv4.plugin:platform", "claims one": "platform:python_implementation"}
    command = [sys.executable, "-c", ASK, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["ours"] == "vllm_ascend.platform.NPUPlatform"
    assert "Only one platform plugin can be activated" in answers["claims one"]
