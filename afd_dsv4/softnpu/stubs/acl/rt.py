# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""``acl.rt`` of the stand-in for pyACL: a synchronous copy through the software ACL."""

import ctypes

_library = ctypes.CDLL("libascendcl.so")


def memcpy(dst: int, room: int, src: int, count: int, kind: int) -> int:
    """Copy ``count`` bytes from address ``src`` to ``dst`` (``room`` bytes large); return the ACL error code."""
    result: int = _library.aclrtMemcpy(
        ctypes.c_void_p(dst), ctypes.c_size_t(room), ctypes.c_void_p(src), ctypes.c_size_t(count), ctypes.c_int(kind)
    )
    return result
