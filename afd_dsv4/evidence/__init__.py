# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The evidence run: what the plugin claims, measured on the device at hand. Nothing is imported until it is needed."""
