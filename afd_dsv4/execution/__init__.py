# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""From the forwards of an engine to executions."""
