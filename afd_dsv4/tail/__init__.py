# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The tail: the rows a later forward may read, and the pages they lie in."""
