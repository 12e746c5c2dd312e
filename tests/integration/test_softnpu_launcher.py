# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The launcher: what it starts, what it says when it cannot. These tests need no built library, except where marked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from afd_dsv4.softnpu import launcher
from afd_dsv4.softnpu import runtime as rt


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "afd_dsv4.softnpu", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **environment}
    )


def fake_build(folder: Path) -> Path:
    for name in launcher.LIBRARIES:
        (folder / name).touch()
    return folder


def test_missing_libraries_are_named_with_the_remedy_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "libascendcl.so").touch()
    done = launch("--", "true", AFD_DSV4_SOFTNPU_DIR=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert str(tmp_path) in done.stderr
    assert "libsoftnpu_aten.so" in done.stderr
    assert "libascendcl.so" not in done.stderr
    assert "make setup" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_command_is_an_error_with_the_usage() -> None:
    for arguments in ((), ("--",)):
        done = launch(*arguments)
        assert done.returncode == 2
        assert "usage: python -m afd_dsv4.softnpu -- COMMAND" in done.stderr


def test_help_is_not_an_error() -> None:
    done = launch("--help")
    assert done.returncode == 0
    assert "usage:" in done.stdout


def test_an_unknown_command_is_an_error(tmp_path: Path) -> None:
    done = launch("--", "no-such-command-here", AFD_DSV4_SOFTNPU_DIR=str(fake_build(tmp_path)))
    assert done.returncode == 2
    assert "no-such-command-here" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    done = launch("--", "sh", "-c", "exit 7", AFD_DSV4_SOFTNPU_DIR=str(fake_build(tmp_path)))
    assert done.returncode == 7


def test_the_environment_puts_the_libraries_first_and_keeps_what_was_there(tmp_path: Path) -> None:
    base = {"LD_LIBRARY_PATH": "/old/lib", "PYTHONPATH": "/old/python", "SOFTNPU_SEED": "9", "HOME": "/home/me"}
    made = launcher.environment(base, tmp_path)
    assert made["LD_LIBRARY_PATH"].split(":") == [str(tmp_path), "/old/lib"]
    stubs, root, old = made["PYTHONPATH"].split(":")
    assert (Path(stubs) / "sitecustomize.py").is_file()
    assert (Path(root) / "afd_dsv4" / "softnpu" / "__init__.py").is_file()
    assert old == "/old/python"
    assert (made["SOFTNPU_SEED"], made["HOME"]) == ("9", "/home/me")
    assert (made["TASK_QUEUE_ENABLE"], made["TORCH_DEVICE_BACKEND_AUTOLOAD"]) == ("0", "0")
    assert launcher.environment({}, tmp_path)["LD_LIBRARY_PATH"] == str(tmp_path), "no empty entry: it would mean '.'"


def test_installing_outside_the_launcher_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFD_DSV4_SOFTNPU_DIR", raising=False)
    assert not rt.is_active()
    with pytest.raises(launcher.SoftnpuError, match=r"python -m afd_dsv4\.softnpu"):
        rt.install.__wrapped__()


@pytest.mark.parametrize("level", ["2", ""])
def test_installing_with_an_unknown_level_of_the_task_queue_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: str
) -> None:
    monkeypatch.setenv("AFD_DSV4_SOFTNPU_DIR", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("TASK_QUEUE_ENABLE", level)
    with pytest.raises(launcher.SoftnpuError, match=f"TASK_QUEUE_ENABLE is '{level}'"):
        rt.install.__wrapped__()


@pytest.mark.npu
def test_a_setting_that_is_not_a_number_stops_the_process() -> None:
    done = launch("--", sys.executable, "-c", "import torch, torch_npu; torch.ones(1).npu()", SOFTNPU_HBM_MB="lots")
    assert done.returncode == 2
    assert "SOFTNPU_HBM_MB=lots: expected a whole number" in done.stderr


@pytest.mark.npu
def test_importing_torch_npu_installs_the_kernels_and_installing_again_changes_nothing() -> None:
    code = (
        "import torch, torch_npu\n"
        "from afd_dsv4.softnpu import runtime as rt\n"
        "x = torch.ones(3, device='npu') + 1\n"
        "a = rt.install(); b = rt.install()\n"
        "print(x.sum().item(), a is b, a.on_cpu > 1000, a.raising > 400)\n"
    )
    done = launch("--", "python", "-c", code)
    assert done.stdout.split() == ["6.0", "True", "True", "True"], done.stderr


HCCL = """
import sys, torch, torch_npu, torch.distributed as dist, torch.multiprocessing as mp
def work(rank, size, rendezvous):
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", rank=rank, world_size=size, init_method=f"file://{rendezvous}")
    x = torch.full((4,), float(rank + 1)).npu()
    dist.all_reduce(x)
    assert x.cpu().tolist() == [3.0] * 4, x
    if rank == 0:
        dist.send(torch.arange(6.0).npu(), 1)
    else:
        y = torch.empty(6, device=f"npu:{rank}")
        dist.recv(y, 0)
        assert y.cpu().tolist() == [0, 1, 2, 3, 4, 5], y
    q = torch.empty(4, device=f"npu:{rank}")
    dist.all_to_all_single(q, (torch.arange(4.0) + 10 * rank).npu())
    assert q.cpu().tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank], q
    dist.barrier()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(work, args=(2, sys.argv[1]), nprocs=2)
    print("both ranks right")
"""


@pytest.mark.npu
@pytest.mark.slow
def test_two_processes_talk_through_the_real_process_group(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(HCCL)
    done = launch("--", "python", str(script), str(tmp_path / "rendezvous"), SOFTNPU_DEVICES="2")
    assert done.stdout.strip().endswith("both ranks right"), done.stdout + done.stderr
