# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-ascend's worker with our runner in place of its own, and the KV memory that the tails leave.

Problem: `NPUWorker.init_device` names its runner's class itself, and an explicit KV size is not measured but taken.
Way: the name is patched while `init_device` runs, and only then. Tails are allocated when the model is loaded, so that
a measured KV size is right by itself; an explicit one (`--kv-cache-memory`) is less by their bytes, because natively it
holds the compressors' states too.
Not here: `num_gpu_blocks_override`, which counts blocks and not bytes: the tails come on top of those.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from vllm_ascend.worker.worker import NPUWorker

from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.runner import AfdDsv4Runner
from afd_dsv4.compat.contract import verify
from afd_dsv4.compat.patch import Patch, PatchSet
from afd_dsv4.compat.stack import installed

_RUNNER: Final = PatchSet(
    "the worker's runner",
    [
        Patch(
            target="vllm_ascend.worker.worker:NPUModelRunner",
            # An object of its own, not the class: undoing gives every module that holds it the original.
            make=lambda _native: partial(AfdDsv4Runner),
            reason="NPUWorker.init_device makes its runner itself, and takes no class to make it of",
            removal="a vllm-ascend whose worker can be told its runner's class",
            leave=(
                "vllm_ascend.worker.model_runner_v1:NPUModelRunner",
                f"{AfdDsv4Runner.__module__}:NPUModelRunner",
            ),
        )
    ],
)


class AfdDsv4Worker(NPUWorker):  # type: ignore[misc]  # untyped
    """See the module."""

    def init_device(self) -> None:
        """Make the device ready, and a runner of our class."""
        _RUNNER.apply(verify(installed()))
        try:
            super().init_device()
        finally:
            _RUNNER.undo()
        if not isinstance(self.model_runner, AfdDsv4Runner):
            raise RuntimeError(
                f"the worker made a {type(self.model_runner).__name__}; the plugin needs the first model runner "
                f"(VLLM_USE_V2_MODEL_RUNNER=0)"
            )

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache.

        Raises:
            ValueError: an explicit KV size that the tails do not fit in.
        """
        available = int(super().determine_available_memory())
        if not self.cache_config.kv_cache_memory_bytes:
            return available
        taken: int = self.model_runner.tail_bytes
        if taken >= available:
            raise ValueError(
                f"kv_cache_memory_bytes is {available}, and the compressors' tails take {taken} of it; raise it, or "
                f"lower max_num_seqs"
            )
        return available - taken

    def shutdown(self) -> None:
        """End, and give the operator its name back."""
        try:
            super().shutdown()
        finally:
            runner = getattr(self, "model_runner", None)
            if isinstance(runner, AfdDsv4Runner):
                runner.close_tails()
