# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the recipes for NPUs start from, recorded from the sources of their pins in `recipe_sources.json`.

Problem: a recipe says what it changed of vllm-ascend's own page, and its `afd` mapping has keys that only afd-plugin
knows; neither is installed where the tests run.
Way: `python -m tests.recipe_sources CHECKOUT_OF_VLLM_ASCEND CHECKOUT_OF_AFD_PLUGIN`, at the pinned commits, records the
page's commands for A3 as options and environment, the keys that each connector takes, and every quoted name of
afd-plugin that could be a variable. Nothing of them is imported.
Not here: what a key means, and the keys of the mapping itself, which the contract of afd-plugin has.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")
PAGES = {"flash": "DeepSeek-V4-Flash", "pro": "DeepSeek-V4-Pro"}
CONNECTORS = {
    "CAMAsyncAFDConnector": ("async_cam.py", "_AFD_ASYNC_EXTRA_CONFIG_FIELDS"),
    "CAMP2pAFDConnector": ("camp2p.py", "_CAMP2P_EXTRA_CONFIG_FIELDS"),
}


def options(words: list[str]) -> dict[str, Any]:
    """Options by their names, with `_` for `-` and without `--`; one that begins with `no_` is said to be false."""
    found: dict[str, Any] = {}
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        name = rest.pop(0)
        assert name.startswith("--"), name
        key = name[2:].replace("-", "_")
        assert key.removeprefix("no_") not in found, f"{name} twice"
        if not rest or rest[0].startswith("--"):
            found[key.removeprefix("no_")] = not key.startswith("no_")
        else:
            value = rest.pop(0)
            is_json = re.fullmatch(r"\s*\{.*\}|(0|[1-9]\d*)(\.\d+)?", value, re.DOTALL)
            found[key] = json.loads(value) if is_json else value
    return found


def commands(page: str) -> list[dict[str, Any]]:
    """Of a page of vllm-ascend, the commands for A3 in front of what it says of separated prefill."""
    here = page[: page.index("### 5.2")]
    found = []
    for script in re.findall(r"```\w+\n(.*?)```", here[here.rindex('=== "A3 series"') :], re.DOTALL):
        if "vllm serve" in script:
            front, _, command = re.sub(r"^ *#.*$", "", script, flags=re.MULTILINE).partition("vllm serve")
            exported = dict(re.findall(r"export (\w+)=(.*)", front))
            found.append(
                {
                    "environment": {name: value.strip('"') for name, value in exported.items()},
                    "options": options(shlex.split(command.replace("\\\n", " "))[1:]),
                }
            )
    return found


def main(ascend: Path, afd: Path) -> None:
    """Record the two checkouts."""
    tutorials = ascend / "docs" / "source" / "tutorials" / "models"
    pages = {model: commands((tutorials / f"{name}.md").read_text("utf-8")) for model, name in PAGES.items()}
    keys = {}
    for connector, (file, constant) in CONNECTORS.items():
        tree = ast.parse((afd / "afd_plugin" / "connectors" / "npu" / file).read_text("utf-8"))
        (value,) = (
            node.value
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == constant and node.value
        )
        keys[connector] = sorted(one.value for one in ast.walk(value) if isinstance(one, ast.Constant))
    sources = "".join(file.read_text("utf-8") for file in sorted((afd / "afd_plugin").rglob("*.py")))
    keys["environment"] = sorted(set(re.findall(r'"(AFD_[A-Z0-9_]+)"', sources)))
    recorded = {"vllm-ascend 80d8c194f": pages, "afd-plugin 85e826e": keys}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
