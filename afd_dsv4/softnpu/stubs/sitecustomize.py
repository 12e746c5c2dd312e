# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a process on the software NPU needs before its own code runs.

Problem: torch_npu must find its kernels the moment it has been imported, by whomever; and a torchvision built for CUDA
cannot be imported beside a CPU torch, because two operators that its Python part describes are missing.
Way: two import hooks. After ``torch_npu`` has run, the aten kernels and the operator libraries are loaded; before
``torchvision`` runs, its two operators are declared. A process whose own site has a ``sitecustomize`` keeps it.
Not done: anything for a process that imports neither.
"""

import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType


class _AfterExecution(Loader):
    """Runs the real loader, then installs the kernels."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # torch_npu prints that CANN is not set up, which would spoil the output of a command that prints JSON.
        with contextlib.redirect_stdout(sys.stderr):
            self._real.exec_module(module)
        from afd_dsv4.softnpu import runtime

        runtime.install()


class _Hook(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            _declare_torchvision_operators()
            return None
        if name != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterExecution(spec.loader)
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
