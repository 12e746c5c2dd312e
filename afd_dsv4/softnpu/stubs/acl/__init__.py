# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A stand-in for pyACL, which only CANN ships. vllm-ascend imports ``acl.rt.memcpy``; nothing else is here."""

from . import rt as rt
