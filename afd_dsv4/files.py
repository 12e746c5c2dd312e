# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Files that are there whole or not at all.

Problem: a report whose writing breaks off, on a full disk for one, has already cut the one before it.
Way: write beside it, then rename over it, which takes a folder that can be written to. What is no regular file, such
as `/dev/stdout` or a FIFO, has nothing to lose and is written as it is; a link keeps leading where it led, a file keeps
its mode.
Not here: several files that belong together.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def write_whole(path: Path, text: str) -> Path:
    """Write a text file in UTF-8, or leave what was there.

    Raises:
        OSError: it cannot be written.
        ValueError: a NUL in its name.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return path
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise OSError(errno.ELOOP, "its links lead in a circle", str(path))
    for place, what in ((real, "it"), (real.parent, "its folder")):
        if place.exists() and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, f"{what} is write-protected", str(path))
    partial = real.with_name(f".afd_dsv4.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        if real.exists():
            shutil.copymode(real, partial)
        partial.replace(real)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path
