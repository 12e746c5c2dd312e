# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The evidence that a CUDA device can give: a real asynchronous device below the same arena, tails and executors.

All that is CUDA's in this project is here. Nothing of it runs in a server.
"""
