# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The names of `vllm serve`'s options, read from vLLM's sources as text.

`python -m tests.doctor.serve_options FOLDER...` records them; each folder is a package `vllm` of another release.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from afd_dsv4.compat.stack import origin_of, release
from afd_dsv4.doctor.options import RECORDED

#: File, and the classes whose fields are options, or the names that a log has for them.
SOURCES = {
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "entrypoints/openai/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),
}


def names_in(folder: Path) -> list[str]:
    """Long options with `_` for `-`, without `--`."""
    found: set[str] = set()
    for file, classes in SOURCES.items():
        for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in classes:
                fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                found |= {target.id for target in fields if isinstance(target, ast.Name)}
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
                words = [one.value for one in node.args if isinstance(one, ast.Constant)]
                found |= {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    return sorted(name for name in found if not name.startswith("_"))


if __name__ == "__main__":
    folders = [Path(folder) for folder in sys.argv[1:]]
    by_release = {release(origin_of(folder).version): names_in(folder) for folder in folders}
    RECORDED.write_text(json.dumps(by_release, indent=1) + "\n", encoding="utf-8")
