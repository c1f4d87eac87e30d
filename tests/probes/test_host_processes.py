"""Processes, containers and this machine, from trees laid out like ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuprobe.model.machine.devices import Container, GpuProcess
from gpuprobe.model.values import ReadStatus, Unavailable
from gpuprobe.probes.host import (
    ProcTree,
    container_of,
    describe_host,
    describe_processes,
    kernel_module,
)

ID = "0123456789abcdef" * 4
POD = "0a1b2c3d-1111-2222-3333-444455556666"

CGROUPS = [
    ("0::/user.slice/user-1000.slice/session-3.scope", None),
    ("0::/", None),
    ("", None),
    (f"0::/system.slice/docker-{ID}.scope", Container("docker", ID)),
    (f"12:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}", Container("docker", ID)),
    (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
        Container("podman", ID),
    ),
    (f"5:cpu:/libpod_parent/libpod-{ID}", Container("podman", ID)),
    (f"0::/system.slice/crio-{ID}.scope", Container("crio", ID)),
    (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
        f"{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope",
        Container("kubernetes", ID, POD),
    ),
    (f"9:devices:/kubepods/besteffort/pod{POD}/{ID}", Container("kubernetes", ID, POD)),
    (
        "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_3",
        Container("slurm", job="4711.0"),
    ),
    ("4:freezer:/slurm/uid_1000/job_4711/step_batch", Container("slurm", job="4711.batch")),
    ("0::/lxc.payload.web-1/system.slice", Container("lxc", "web-1")),
    ("3:cpu:/lxc/web-1", Container("lxc", "web-1")),
    (f"0::/some/folder/{ID[:20]}", None),  # hexadecimal, but not a container id
]


@pytest.mark.parametrize(("cgroup", "expected"), CGROUPS)
def test_container_of(cgroup: str, expected: Container | None) -> None:
    assert container_of(cgroup) == expected


def tree(root: Path, *, first: bool = True) -> Path:
    proc = root / "proc"
    (proc / "self" / "ns").mkdir(parents=True)
    (proc / "self" / "ns" / "pid").symlink_to("pid:[4026531836]" if first else "pid:[4026532999]")
    (proc / "stat").write_text("cpu 1\nbtime 1000000\n")
    (root / "etc").mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\nann:x:1001:1001::/:/bin/sh\nbad\n")
    return proc


def add(proc: Path, pid: int, **files: str) -> None:
    home = proc / str(pid)
    home.mkdir()
    for name, text in files.items():
        (home / name).write_text(text)


def described(proc: Path, pid: int) -> GpuProcess:
    listed = (GpuProcess(pid, "GPU-1", ("compute",)),)
    return describe_processes(listed, ProcTree(proc))[0]


def test_a_process_is_described(tmp_path: Path) -> None:
    proc = tree(tmp_path)
    ticks = 50 * os.sysconf("SC_CLK_TCK")
    add(
        proc,
        7,
        status="Name:\tpython\nUid:\t1001\t1001\t1001\t1001\n",
        stat=f"7 (a ) b (c) S 1 {'0 ' * 17}{ticks} 0",
        cmdline="python\0train.py\0--lr\0" + "0.1\0",
        cgroup=f"0::/system.slice/docker-{ID}.scope\n",
        environ="HOME=/\0RANK=3\0LOCAL_RANK=1\0",
    )
    process = described(proc, 7)
    assert process.user.value == "ann"
    assert process.uid.value == 1001
    assert process.command.value == "python train.py --lr 0.1"
    assert process.started_at.value == 1000050.0
    assert process.container.value == Container("docker", ID)
    assert (process.rank.value, process.local_rank.value) == (3, 1)
    assert not process.hidden


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ("SLURM_PROCID=5\0", 5),
        ("OMPI_COMM_WORLD_RANK=2\0", 2),
        ("RANK=1\0SLURM_PROCID=5\0", 1),
        ("RANK=\0SLURM_PROCID=5\0", 5),
        ("RANK=x\0", None),
        ("RANK=²\0", None),
        ("", None),
    ],
)
def test_rank_from_the_environment(tmp_path: Path, environ: str, rank: int | None) -> None:
    proc = tree(tmp_path)
    add(proc, 7, status="Name:\tp\nUid:\t0\t0\t0\t0\n", environ=environ)
    value = described(proc, 7).rank.value
    assert value == rank if rank is not None else isinstance(value, Unavailable)


def test_a_zombie_goes_by_its_name(tmp_path: Path) -> None:
    proc = tree(tmp_path)
    add(proc, 7, status="Name:\tpython\nUid:\t4242\t0\t0\t0\n", cmdline="")
    process = described(proc, 7)
    assert process.command.value == "python"
    assert process.user.value == "4242"  # no user has that number
    assert isinstance(process.started_at.value, Unavailable)


def test_in_a_container_a_foreign_pid_is_hidden(tmp_path: Path) -> None:
    process = described(tree(tmp_path, first=False), 999)
    assert process.hidden
    assert isinstance(process.user.value, Unavailable)
    assert "namespace" in process.user.value.reason


def test_on_the_host_a_missing_pid_has_ended(tmp_path: Path) -> None:
    process = described(tree(tmp_path), 999)
    assert not process.hidden
    assert isinstance(process.user.value, Unavailable)
    assert "still holds memory" in process.user.value.reason


def test_files_without_text_or_shape(tmp_path: Path) -> None:
    proc = tree(tmp_path)
    add(proc, 7, status="", stat="7 (x)")
    (proc / "7" / "cmdline").write_bytes(b"\xff\xfe\0")
    process = described(proc, 7)
    assert isinstance(process.uid.value, Unavailable)
    assert process.command.value == "\udcff\udcfe"
    assert isinstance(process.started_at.value, Unavailable)


def test_this_very_process_in_the_real_proc() -> None:
    process = describe_processes((GpuProcess(os.getpid(), "GPU-1", ("compute",)),), ProcTree())[0]
    assert process.uid.value == os.getuid()
    assert "python" in str(process.command.value)  # under xdist it does not say pytest
    assert isinstance(process.started_at.value, float)


def test_the_host_names_versions_without_importing() -> None:
    from importlib import metadata

    host = describe_host()
    assert host.nvidia_ml_py.value == metadata.version("nvidia-ml-py")
    assert host.memory_total.status is ReadStatus.OK
    try:
        assert host.torch.value == metadata.version("torch")
    except metadata.PackageNotFoundError:
        assert isinstance(host.torch.value, Unavailable)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 17 22:55:48\n",
            "535.161.08",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release\n",
            "570.124.06 (open)",
        ),
        ("something else", None),
        (None, None),
    ],
)
def test_the_kernel_module(tmp_path: Path, text: str | None, version: str | None) -> None:
    proc = tree(tmp_path)
    if text is not None:
        (proc / "driver" / "nvidia").mkdir(parents=True)
        (proc / "driver" / "nvidia" / "version").write_text(text)
    value = kernel_module(ProcTree(proc)).value
    assert value == version if version is not None else isinstance(value, Unavailable)
