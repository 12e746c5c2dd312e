# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Device memory of the software NPU: limit, poison, bounds, what its counters say."""

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from afd_dsv4.softnpu import runtime as rt

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.npu
MIB = 1 << 20


def release() -> None:
    gc.collect()
    torch.npu.empty_cache()


def test_more_than_the_limit_raises_torchs_out_of_memory_error_and_leaves_the_device_usable() -> None:
    release()
    free, total = torch.npu.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(total + MIB, dtype=torch.uint8, device="npu")
    assert torch.equal((torch.ones(4, device="npu") + 1).cpu(), torch.full((4,), 2.0))
    release()
    assert torch.npu.mem_get_info()[0] == free


def test_what_is_freed_can_be_allocated_again() -> None:
    release()
    half = torch.npu.mem_get_info()[1] * 6 // 10
    for _ in range(3):
        block = torch.empty(half, dtype=torch.uint8, device="npu")
        del block
        release()


def test_the_limit_is_a_setting_of_the_process() -> None:
    code = (
        "import torch, torch_npu\n"
        "assert torch.npu.mem_get_info()[1] == 64 << 20\n"
        "torch.empty(32 << 20, dtype=torch.uint8, device='npu')\n"
        "try:\n    torch.empty(65 << 20, dtype=torch.uint8, device='npu')\n"
        "except torch.OutOfMemoryError:\n    print('refused')\n"
    )
    command = [sys.executable, "-m", "afd_dsv4.softnpu", "--", "env", "SOFTNPU_HBM_MB=64", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "refused", done.stderr


@pytest.mark.parametrize("count", [100, 3 * MIB, 64 * MIB])
def test_fresh_memory_is_poisoned(count: int) -> None:
    release()
    # What other tests have left may hold a segment that has room for a small block: take it until a new one is made.
    reserved, blocks = torch.npu.memory_reserved(), []
    while torch.npu.memory_reserved() == reserved:
        blocks.append(torch.empty(count, dtype=torch.uint8, device="npu"))
    block = blocks[-1]
    for at in (0, count // 2, count - 1):
        assert block[at].item() == 0xA5
    block[count // 2] = 7
    assert block[count // 2].item() == 7
    assert block[count // 2 - 1].item() == 0xA5


def test_a_large_block_costs_host_memory_only_where_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    release()
    before = resident()
    block = torch.empty(2048 * MIB, dtype=torch.uint8, device="npu")
    block[: 8 * MIB].fill_(1)
    torch.npu.synchronize()
    assert resident() - before < 256 * MIB


def test_the_counters_follow_allocations() -> None:
    release()
    rt.reset_peak()
    before = rt.device_bytes()
    block = torch.empty(128 * MIB, dtype=torch.uint8, device="npu")
    assert rt.device_bytes() - before >= 128 * MIB
    del block
    release()
    assert rt.device_bytes() == before
    assert rt.device_peak_bytes() - before >= 128 * MIB


def test_a_copy_outside_its_allocation_is_refused() -> None:
    acl = ctypes.CDLL("libascendcl.so")
    acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
    address = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(4096), 0) == 0
    host = ctypes.create_string_buffer(8192)
    to_device = 1
    sizes = [(0, 4096, True), (1, 4096, False), (-1, 16, False), (4000, 96, True), (4000, 97, False)]
    for offset, count, allowed in sizes:
        code = acl.aclrtMemcpyAsync(
            ctypes.c_void_p((address.value or 0) + offset),
            ctypes.c_size_t(count),
            host,
            ctypes.c_size_t(count),
            to_device,
            None,
        )
        assert (code == 0) == allowed, (offset, count, code)
        if not allowed:
            assert b"not inside one device allocation" in acl.aclGetRecentErrMsg()
    assert acl.aclrtSynchronizeDevice() == 0
    assert acl.aclrtFree(address) == 0
    assert acl.aclrtFree(address) != 0, "freeing twice"
