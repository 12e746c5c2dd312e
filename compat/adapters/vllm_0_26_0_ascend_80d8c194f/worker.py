# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The worker of 0.23.0's adapter over the `NPUWorker` and `NPUModelRunner` of vllm-ascend 80d8c194f.

Problem: the shared worker checks that the stack is as recorded, but not which of the recorded stacks it is.
Way: it is asked for its name before anything is made. The classes that the shared code derives from are whatever is
installed, and that the contract of this tuple holds, the shared code has verified before it patches.
Not here: the work itself, see `vllm_0_23_0_ascend_0_23_0/worker.py`, `runner.py` and `launches.py`.
"""

from __future__ import annotations

from typing import Final

from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.worker import AfdDsv4Worker as SharedWorker
from afd_dsv4.compat.stack import installed

STACK: Final = "vllm-ascend-80d8c194f"


class AfdDsv4Worker(SharedWorker):
    """See the module."""

    def init_device(self) -> None:
        """Make the device ready, and a runner of our class.

        Raises:
            RuntimeError: another stack.
        """
        stack = installed()
        if stack.name != STACK:
            raise RuntimeError(
                f"the worker of {STACK} was asked for on {stack}; leave the worker class to the plugin, which takes "
                f"the one of the installed stack"
            )
        super().init_device()
