# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What MkDocs does differently from the pages as they are read in the repository. Called by MkDocs (`mkdocs.yml`).

Problem: pages link to files outside docs/, which a reader of the repository can follow and the site does not have.
Way: such a link becomes its text and the file's path. One whose file is not there is left alone, so that the strict
build names it.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text, with links that lead out of docs/ as paths."""
    here = (DOCS / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = Path(os.path.normpath(here / target))
        if not path.exists() or not path.is_relative_to(ROOT) or path.is_relative_to(DOCS):
            return link.group()
        name = path.relative_to(ROOT).as_posix()
        return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}` of the repository)"

    return LINK.sub(replace, markdown)
