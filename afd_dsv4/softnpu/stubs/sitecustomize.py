# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a process on the software NPU needs before its own code runs.

Problem: torch_npu must find its kernels the moment it has been imported, by whomever; vLLM's Triton kernels have no
compiler here; and a torchvision built for CUDA cannot be imported beside a CPU torch, because two operators that its
Python part describes are missing.
Way: import hooks. After ``torch_npu`` has run, the aten kernels and the operator libraries are loaded; after vLLM's
placeholder for Triton has, its kernels get bodies; before ``torchvision`` runs, its two operators are declared. A
process whose own site has a ``sitecustomize`` keeps it.
Not done: anything for a process that imports none of them.
"""

import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType


def _after_torch_npu(_module: ModuleType) -> None:
    from afd_dsv4.softnpu import runtime

    runtime.install()


def _after_triton_utils(module: ModuleType) -> None:
    from afd_dsv4.softnpu import triton

    triton.install(module)


def _after_ascend_triton_utils(module: ModuleType) -> None:
    from afd_dsv4.softnpu import triton

    triton.set_cores(module)


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torch_npu": _after_torch_npu,
    "vllm.triton_utils": _after_triton_utils,
    "vllm_ascend.ops.triton.triton_utils": _after_ascend_triton_utils,
}


class _AfterExecution(Loader):
    """Runs the real loader, then what has to follow."""

    def __init__(self, real: Loader, then: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # torch_npu prints that CANN is not set up, which would spoil the output of a command that prints JSON.
        with contextlib.redirect_stdout(sys.stderr):
            self._real.exec_module(module)
        self._then(module)


class _Hook(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            _declare_torchvision_operators()
            return None
        then = _AFTER.get(name)
        if then is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterExecution(spec.loader, then)
        return spec


_torchvision_library: object = None


def _declare_torchvision_operators() -> None:
    global _torchvision_library
    if _torchvision_library is not None:
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision_library = library


def _run_shadowed() -> None:
    here = str(Path(__file__).resolve().parent)
    rest = [p for p in sys.path if str(Path(p).resolve()) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Hook())
_run_shadowed()
