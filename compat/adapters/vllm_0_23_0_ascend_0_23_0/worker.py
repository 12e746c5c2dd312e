# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-ascend's worker with our runner in place of its own, the KV memory that the tails leave, and its end.

Problem: `NPUWorker.init_device` names its runner's class itself; an explicit KV size is not measured but taken; and a
start may fail at any step.
Way: the name is patched while `init_device` runs, and only then. Tails are allocated when the model is loaded, so that
a measured KV size is right by itself, and so is the value that vllm-ascend's log recommends for the next start. An
explicit one (`--kv-cache-memory-bytes`) is the KV cache's alone, as that value and the option's name have it; tails are
beside it, and what does not fit in the device's memory then is refused. A step of the start that fails undoes ours at
once; where the start fails outside the worker, the worker's end does (`launches.py`). All of it is a mixin, for workers
that derive from vllm-ascend's own.
Not here: `num_gpu_blocks_override`, which counts blocks; what does not fit fails where it is allocated, as natively.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import torch
import torch_npu
from vllm.logger import logger
from vllm_ascend.worker.worker import NPUWorker

from afd_dsv4 import metrics
from afd_dsv4.compat.adapters.vllm_0_23_0_ascend_0_23_0.runner import AfdDsv4Runner, RunnerMixin
from afd_dsv4.compat.contract import verify
from afd_dsv4.compat.patch import Patch, PatchSet
from afd_dsv4.compat.stack import installed
from afd_dsv4.notices import Notices

_RUNNER: Final = PatchSet(
    "the worker's runner",
    [
        Patch(
            target="vllm_ascend.worker.worker:NPUModelRunner",
            # An object of its own, not the class: undoing gives every module that holds it the original.
            make=lambda _native: partial(AfdDsv4Runner),
            reason="NPUWorker.init_device makes its runner itself, and takes no class to make it of",
            removal="a vllm-ascend whose worker can be told its runner's class",
            alone=True,  # whoever else holds the class derives from it or asks for it, and makes no runner here
        )
    ],
)


_Native: Final[Any] = object  # a mixin: what follows it in the order of bases is `NPUWorker`


class WorkerMixin(_Native):  # type: ignore[misc]  # untyped
    """See the module. It comes before `NPUWorker` among the bases.

    Attributes:
        patches: in place while `init_device` runs, so that the runner is of our class.
        afd: whether they are of afd-plugin, which is to be as recorded then.
    """

    patches: ClassVar[PatchSet]
    afd: ClassVar[bool] = False
    _metrics: metrics.WorkerMetrics | None = None
    _notices: Notices | None = None

    def init_device(self) -> None:
        """Make the device ready, and a runner of our class."""
        self.patches.apply(verify(installed(), afd=self.afd))
        try:
            super().init_device()
        finally:
            self.patches.undo()
        if not isinstance(self.model_runner, RunnerMixin):
            raise RuntimeError(
                f"the worker made a {type(self.model_runner).__name__}; the plugin needs the first model runner "
                f"(VLLM_USE_V2_MODEL_RUNNER=0)"
            )

    def load_model(self) -> None:
        """See the module."""
        with self._starting():
            super().load_model()
            self._notices = Notices(self.model_runner.tails.arena)
            self._metrics = metrics.of_worker(self.model_runner.tails, self._which)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache.

        Raises:
            ValueError: an explicit KV size that does not fit beside weights, tails and slots and the largest forward.
        """
        with self._starting():
            if not self.cache_config.kv_cache_memory_bytes:
                return int(super().determine_available_memory())
            torch_npu.npu.reset_peak_memory_stats(self.device)
            asked = int(super().determine_available_memory())  # runs the largest forward, and measures nothing
            stats = torch_npu.npu.memory_stats(self.device)
            forward = stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
            gc.collect()
            torch_npu.npu.empty_cache()
            left = torch_npu.npu.mem_get_info(self.device)[0] - forward
            if asked > left:
                raise ValueError(
                    f"kv_cache_memory_bytes is {asked}, and the device has {left} bytes left for it, beside "
                    f"{self.model_runner.model_memory_usage} of weights, tails and slots (of which tails and slots "
                    f"{self.model_runner.tail_bytes}) and {forward} of the largest forward; lower it, or max_num_seqs"
                )
            return asked

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """See the module."""
        with self._starting():
            super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        """See the module."""
        with self._starting():
            return super().compile_or_warm_up_model()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; behind it, say what happened to tails and slots: in the log, and in metrics where they are on."""
        try:
            return super().execute_model(*args, **kwargs)
        except Exception as error:
            if self._metrics is not None:
                self._metrics.refused(error)
            raise
        finally:
            if self._notices is not None:
                self._notices.step()
            if self._metrics is not None:
                self._metrics.step()

    def shutdown(self) -> None:
        """End, and give the operator its name back."""
        try:
            super().shutdown()
        finally:
            self._close()

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """A step of the start: if it fails, nothing of ours is left in the process."""
        try:
            yield
        except BaseException:
            try:
                self._close()
            except Exception:  # what failed first is the cause
                logger.exception("afd-dsv4: the end of a start that failed fails too")
            raise

    def _which(self) -> tuple[int, int]:
        """Rank of the engine, and of the worker among those of all engines."""
        parallel = self.model_runner.vllm_config.parallel_config
        return parallel.data_parallel_rank, torch.distributed.get_rank()

    def _close(self) -> None:
        runner = getattr(self, "model_runner", None)
        if isinstance(runner, RunnerMixin):
            runner.close_tails()
        if self._metrics is not None:
            self._metrics.close()
        self._metrics = self._notices = None  # they know the runtime


class AfdDsv4Worker(WorkerMixin, NPUWorker):  # type: ignore[misc]  # untyped
    """See the module."""

    patches: ClassVar = _RUNNER
