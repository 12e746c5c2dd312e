# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vLLM's Triton kernels, as operators of the software NPU.

Problem: vllm-ascend launches some Triton kernels; Triton compiles for a device that is not here.
Way: vLLM's own placeholder for an absent Triton turns ``@triton.jit`` functions into plain ones. After
``vllm.triton_utils`` has been imported, ``install`` makes them ``Kernel`` objects instead, launched by the same call
form. A launch runs the body registered for the kernel's full name: torch operations on the current stream, so it is
asynchronous, ordered with events, captured by graphs, and never waits. A kernel without a body raises by name.
Not done: ``HAS_TRITON`` stays False, as on a machine without Triton, so where vllm and vllm-ascend have a torch path
beside a kernel they take it; only kernels without such a path have a body. Reads past the end of a table, which the
kernels do, give ``POISON``: harmless where the result is unread, and an index out of the pool where it is not.
"""

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

POISON = 0x5A5A5A5A
"""A slot that no pool has; it fits int32."""
LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "multibuffer"})
"""Keywords of a launch that are for the compiler."""
CORES = {"_NUM_AICORE": 20, "_NUM_VECTORCORE": 40}
"""What vllm_ascend.ops.triton.triton_utils would ask Triton's driver: the cores of an Ascend910B3."""

Body = Callable[[Any, dict[str, Any]], None]
_bodies: dict[str, Body] = {}


def body(*names: str) -> Callable[[Body], Body]:
    """Register a function as the body of kernels named ``module:function``.

    It gets the grid, and the kernel's arguments by the names that the kernel gives them.
    """

    def register(function: Body) -> Body:
        for name in names:
            if name in _bodies:
                raise ValueError(f"the Triton kernel {name} has a body already")
            _bodies[name] = function
        return function

    return register


class Kernel:
    """What ``@triton.jit`` makes of a function: ``kernel[grid](arguments)`` runs its body."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__}:{function.__qualname__}"
        self._signature = inspect.signature(function)
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *arguments: Any, **named: Any) -> None:
        run = _bodies.get(self.name)
        if run is None:
            raise NotImplementedError(
                f"the Triton kernel {self.name} has no body on the software NPU. Register one with "
                "afd_dsv4.softnpu.triton.body, or take a path without it."
            )
        call = self._signature.bind(*arguments, **{k: v for k, v in named.items() if k not in LAUNCH_OPTIONS})
        call.apply_defaults()
        run(grid, call.arguments)


def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """``triton.jit``, with and without options."""
    return Kernel if function is None else Kernel(function)


def install(triton_utils: ModuleType) -> None:
    """Put ``jit`` into vLLM's placeholder for Triton; ``triton_utils`` is ``vllm.triton_utils``.

    Raises:
        RuntimeError: there is a real Triton, whose kernels have no device here.
    """
    if triton_utils.HAS_TRITON:
        raise RuntimeError(
            "the software NPU found a real Triton, which compiles for a device that is not here. Uninstall triton."
        )
    triton_utils.triton.jit = jit


def set_cores(module: ModuleType) -> None:
    """Answer for the driver: ``module`` is ``vllm_ascend.ops.triton.triton_utils``."""
    for name, count in CORES.items():
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} has no {name}; found another vllm-ascend than 0.23.0")
        setattr(module, name, count)


@body("vllm.v1.worker.block_table:_compute_slot_mapping_kernel")
def _slot_mapping(grid: tuple[int], arguments: dict[str, Any]) -> None:
    """Write each token's slot, and ``PAD_ID`` behind the last token; tokens of no request keep what was there."""
    if (cut := arguments.get("BLOCKS_PER_KV_BLOCK", 1)) != 1:  # an argument since vLLM 0.26.0
        raise NotImplementedError(f"_compute_slot_mapping_kernel with {cut} blocks to one block of KV has no body")
    requests = grid[0] - 1
    num_tokens = arguments["num_tokens"]
    starts = arguments["query_start_loc_ptr"]
    table = arguments["block_table_ptr"]
    slots = arguments["slot_mapping_ptr"]
    block_size = arguments["block_size"]
    ranks = arguments["TOTAL_CP_WORLD_SIZE"]
    interleave = arguments["CP_KV_CACHE_INTERLEAVE_SIZE"]
    pad = arguments["PAD_ID"]
    slots[num_tokens : arguments["max_num_tokens"]].fill_(pad)
    if requests == 0 or num_tokens == 0:
        return
    position = arguments["positions_ptr"][:num_tokens]
    tokens = torch.arange(num_tokens, dtype=starts.dtype, device=starts.device)
    request = torch.searchsorted(starts[1 : requests + 1].contiguous(), tokens, right=True)
    column = position // (block_size * ranks)
    cell = request * arguments["block_table_stride"] + column
    block = torch.take(table, cell.clamp(0, table.numel() - 1)).to(torch.int64)
    offset = position - column * (block_size * ranks)
    local = (offset // interleave) % ranks == arguments["TOTAL_CP_RANK"]
    local_offset = (offset // (ranks * interleave)) * interleave + offset % interleave
    slot = torch.where(local, block * block_size + local_offset, pad)
    # vllm-ascend computes slots for KV groups, too, whose tables are narrower than the positions.
    slot = torch.where(column < table.shape[1], slot, POISON)
    target = slots[:num_tokens]
    target.copy_(torch.where(request < requests, slot.to(target.dtype), target))


@body(
    "vllm_ascend.ops.triton.mul_add:muls_add_kernel",
    "vllm_ascend.ops.triton.muls_add:muls_add_kernel",
)
def _muls_add(_grid: tuple[int], arguments: dict[str, Any]) -> None:
    """``x * scale + y``. A scalar argument is float32 to Triton, and so is the sum; it is rounded once."""
    x, y = (arguments[name].to(torch.float32) for name in ("x_ptr", "y_ptr"))
    arguments["output_ptr"].copy_(torch.add(y, x, alpha=arguments["scale"]))
