# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""afd-plugin's Attention worker with our runner and connectors in place of its own.

Problem: `AFDNPUAttentionWorker.init_device` names its runner's class itself, its runner asks the factory for a
connector, and `assert_compatible_afd_stack` compares the configured worker class with a string.
Way: the colocated worker's mixin. The runner's name is patched and our connectors are registered while `init_device`
runs, and only then; and while it runs the configuration names the class that the string names, which ours derives from.
Not here: the work itself, see `runner.py`, `connectors.py` and `vllm_0_23_0_ascend_0_23_0/worker.py`.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Final

from afd_plugin.v1.worker.npu.attention_worker import AFDNPUAttentionWorker

from afd_dsv4.compat.adapters import full_name
from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.worker import WorkerMixin
from afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f_afd_85e826e.connectors import registered
from afd_dsv4.compat.adapters.vllm_0_26_0_ascend_80d8c194f_afd_85e826e.runner import AfdDsv4AttentionRunner
from afd_dsv4.compat.patch import Patch, PatchSet
from afd_dsv4.compat.stack import installed
from afd_dsv4.gate import AFD_WORKER

STACK: Final = "vllm-ascend-80d8c194f+afd-plugin-85e826e"

_RUNNER: Final = PatchSet(
    "the Attention worker's runner",
    [
        Patch(
            target="afd_plugin.v1.worker.npu.attention_worker:AFDNPUAttentionModelRunner",
            # An object of its own, not the class: undoing gives every module that holds it the original.
            make=lambda _native: partial(AfdDsv4AttentionRunner),
            reason="AFDNPUAttentionWorker.init_device makes its runner itself, and takes no class to make it of",
            removal="an afd-plugin whose worker can be told its runner's class",
            alone=True,  # whoever else holds the class derives from it or asks for it, and makes no runner here
        )
    ],
)


class AfdDsv4AttentionWorker(WorkerMixin, AFDNPUAttentionWorker):  # type: ignore[misc]  # untyped
    """See the module."""

    patches: ClassVar = _RUNNER
    afd: ClassVar = True

    def init_device(self) -> None:
        """Make the device ready, and a runner and a connector of our classes.

        Raises:
            RuntimeError: another stack.
        """
        stack = installed()
        if full_name(stack.name, stack.afd) != STACK:
            raise RuntimeError(
                f"the worker of {STACK} was asked for on {stack}; leave the worker class to the plugin, which takes "
                f"the one of the installed stack"
            )
        parallel = self.vllm_config.parallel_config
        entered, parallel.worker_cls = parallel.worker_cls, AFD_WORKER
        try:
            with registered():
                super().init_device()
        finally:
            parallel.worker_cls = entered
