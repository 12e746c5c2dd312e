# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Bounded compressor state for DeepSeek-V4 on Ascend, as an out-of-tree vLLM plugin.

Importing this package imports neither torch nor vLLM: every process of vLLM loads the plugin, and a process that
does not use it must not pay for it. Import the submodule that is needed.
"""

from typing import Final

#: Version of the distribution ``afd-dsv4``; ``pyproject.toml`` reads it from here.
__version__: Final = "0.1.0"
