# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Workspace slots: what only a running forward needs, leased to one execution at a time."""
