# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Everything that depends on which versions of vLLM and vllm-ascend are installed. Installs as `afd_dsv4.compat`.

Importing this package imports none of them.
"""
