# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The KV compressors of DeepSeek-V4: what they compute (`reference`) and who computes it (`executor`, `stock`)."""
