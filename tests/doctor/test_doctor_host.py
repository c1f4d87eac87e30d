"""Rules about variables, limits and NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from doctor_machine import GIB, TORCH, Machine, of, only, passed, reasons
from warm_python import shared

from gpuprobe.model.findings import Level
from gpuprobe.model.machine.devices import HostInfo
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.probes.health.base import SharedMemory
from gpuprobe.probes.host import sandbox_of

OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ("expandable_segment:True", "did you mean expandable_segments?"),
        ("nonsense:1", "unknown key"),
        ("expandable_segments:true", "True or False"),
        ("expandable_segments", "KEY:VALUE"),
        ("max_split_size_mb:5", "at least 20"),
        ("max_split_size_mb:lots", "an integer"),
        ("garbage_collection_threshold:1.5", "between 0 and 1"),
        ("roundup_power2_divisions:[256:3]", "power of two"),
        ("backend:fast", "native or cudaMallocAsync"),
    ],
)
def test_settings_that_torch_refuses(machine: Machine, conf: str, says: str) -> None:
    found = only("GP140", machine.but(environ={NEW: conf}))
    assert found.level is Level.ERROR
    assert says in found.message


@pytest.mark.parametrize(
    "conf",
    [
        "expandable_segments:True",
        " max_split_size_mb : 128 , garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "backend:cudaMallocAsync",
        "release_lock_on_hipmalloc:True",
        "max_split_size_mb:128,",
        "",
    ],
)
def test_settings_that_torch_takes(machine: Machine, conf: str) -> None:
    facts = machine.but(environ={NEW: conf})
    assert passed("GP140", facts)
    assert passed("GP141", facts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conf", "said", "right"),
    [
        ("expandable_segments=True", "by a colon", "expandable_segments:True"),
        ('"expandable_segments:True"', "quotes", "expandable_segments:True"),
        ("'max_split_size_mb=64'", "quotes", "max_split_size_mb:64"),
        (
            "expandable_segments:true;max_split_size_mb:64",
            "not by semicolons",
            "expandable_segments:True,max_split_size_mb:64",
        ),
    ],
)
def test_settings_that_are_written_otherwise_are_corrected(
    conf: str, said: str, right: str, machine: Machine
) -> None:
    found = only("GP140", machine.but(environ={NEW: conf}))
    assert said in found.message
    assert found.fix is not None
    assert found.fix.code == f"export {NEW}={right}"
    (renamed,) = of("GP142", machine.but(environ={OLD: conf}))
    assert renamed.fix is not None
    assert renamed.fix.code == f"export {NEW}={right}; unset {OLD}"
    (unknown,) = of("GP142", machine.but(environ={OLD: "nonsense:1"}))
    assert unknown.fix is not None
    assert not unknown.fix.code  # no command sets what torch refuses


@pytest.mark.parametrize(
    ("conf", "refused"),
    [
        ("max_split_size_mb:100", False),
        ("max_split_size_mb:100,", False),
        ("max_split_size_mb:5", True),
        ("expandable_segments:true", True),
        ("garbage_collection_threshold:1.5", True),
    ],
)
def test_the_installed_torch_agrees(machine: Machine, conf: str, refused: bool) -> None:
    pytest.importorskip("torch")
    program = "import sys, torch; torch._C._accelerator_setAllocatorSettings(sys.argv[1])"
    done = subprocess.run([shared().python, "-c", program, conf], capture_output=True, check=False)
    assert bool(done.returncode) is refused, done.stderr
    assert bool(of("GP140", machine.but(environ={NEW: conf}))) is refused


@pytest.mark.slow
def test_which_variable_the_installed_torch_takes() -> None:
    torch = pytest.importorskip("torch")
    if tuple(map(int, torch.__version__.split(".")[:2])) != (2, 13):
        pytest.skip("what GP141 says was seen with torch 2.13")
    program = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    both = {OLD: "max_split_size_mb:100", NEW: "max_split_size_mb:50"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, **both},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == both[OLD]


def test_a_key_newer_than_torch(machine: Machine) -> None:
    conf = {OLD: "per_process_memory_fraction:0.5"}
    old = replace(TORCH, version="2.6.0+cu126")
    assert len(of("GP140", machine.but(environ=conf, torch=old))) == 1
    assert of("GP140", machine.but(environ=conf)) == []


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (
            {OLD: "max_split_size_mb:64", NEW: "max_split_size_mb:128"},
            "both set, with different values",
        ),
        ({NEW: "max_split_size_mb:64,max_split_size_mb:128"}, "more than once"),
        ({NEW: "backend:cudaMallocAsync,max_split_size_mb:64"}, "ignores max_split_size_mb"),
        ({NEW: "expandable_segments:True,max_split_size_mb:64"}, "little effect"),
    ],
)
def test_settings_that_contradict(machine: Machine, environ: dict[str, str], says: str) -> None:
    (found,) = of("GP141", machine.but(environ=environ))
    assert says in found.message


def test_both_variables_saying_the_same_is_no_conflict(machine: Machine) -> None:
    same = {OLD: "max_split_size_mb:64", NEW: "max_split_size_mb: 64"}
    assert passed("GP141", machine.but(environ=same))


def test_the_name_of_the_variable(machine: Machine) -> None:
    value = "expandable_segments:True"
    assert only("GP142", machine.but(environ={OLD: value})).level is Level.NOTE
    old = replace(TORCH, version="2.8.0")
    assert only("GP142", machine.but(environ={NEW: value}, torch=old)).level is Level.WARNING
    assert passed("GP142", machine.but(environ={OLD: value}, torch=old))
    assert passed("GP142", machine.but(environ={NEW: value}))
    unknown = Unavailable("torch is not installed", ReadStatus.UNSUPPORTED)
    assert reasons("GP142", machine.but(environ={NEW: value}, torch=unknown))


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", Level.WARNING),
        ("CUDA_LAUNCH_BLOCKING", "0", None),
        ("CUDA_LAUNCH_BLOCKING", "", None),
        ("TORCH_CUDA_SANITIZER", "1", Level.WARNING),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", Level.WARNING),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", Level.WARNING),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", Level.NOTE),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", None),
        ("NCCL_DEBUG", "TRACE", Level.WARNING),
        ("NCCL_DEBUG", "WARN", None),
        ("NCCL_P2P_DISABLE", "1", Level.WARNING),
        ("NCCL_P2P_DISABLE", "0", None),
        ("NVIDIA_TF32_OVERRIDE", "0", Level.WARNING),
        ("NVIDIA_TF32_OVERRIDE", "1", None),
        ("TORCH_LOGS", "+dynamo", Level.NOTE),
        ("LD_PRELOAD", "/usr/lib/libasan.so.8", Level.WARNING),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2", None),
    ],
)
def test_debug_variables(machine: Machine, name: str, value: str, level: Level | None) -> None:
    found = of("GP143", machine.but(environ={name: value}))
    assert [f.level for f in found] == ([] if level is None else [level])


def test_a_sandbox(machine: Machine) -> None:
    assert passed("GP144", machine.facts)
    host = HostInfo(sandbox=sandbox_of("#1 SMP Sun Jan 10 15:06:54 PST 2016"))
    found = only("GP144", machine.with_inventory(host=host))
    assert "gVisor" in found.message
    assert found.level is Level.NOTE
    assert sandbox_of("#1 SMP PREEMPT_DYNAMIC Debian 6.1.0-18") == ""


def test_shared_memory(machine: Machine) -> None:
    docker = SharedMemory(Bytes(64 * 1024**2), Bytes(64 * 1024**2))
    found = only("GP150", machine.but(shared_memory=docker, in_container=True))
    assert found.level is Level.WARNING
    assert found.fix is not None
    assert "--shm-size" in found.fix.code
    full = SharedMemory(Bytes(32 * GIB), Bytes(1024**2))
    assert "nearly full" in only("GP150", machine.but(shared_memory=full)).message
    shut = SharedMemory(Bytes(32 * GIB), Bytes(32 * GIB), writable=False)
    assert only("GP150", machine.but(shared_memory=shut)).level is Level.ERROR
    enough = SharedMemory(Bytes(GIB), Bytes(GIB))
    assert passed("GP150", machine.but(shared_memory=enough))
    gone = Unavailable("/dev/shm: No such file or directory")
    assert reasons("GP150", machine.but(shared_memory=gone)) == [gone.reason]


def test_locked_memory_matters_with_rdma_only(machine: Machine) -> None:
    low = 8 * 1024**2
    assert only("GP151", machine.but(memlock=low)).level is Level.WARNING
    assert passed("GP151", machine.but(memlock=low, rdma_devices=()))
    assert passed("GP151", machine.but(memlock=-1))
    assert passed("GP151", machine.but(memlock=64 * GIB))


def test_nccl_missing(machine: Machine) -> None:
    none = Unavailable("built without NCCL", ReadStatus.UNSUPPORTED)
    without = replace(TORCH, nccl_built=none, nccl_loaded=none)
    assert only("GP160", machine.but(torch=without)).level is Level.WARNING
    one = machine.with_inventory(devices=(machine.first,))
    assert passed("GP160", replace(one, torch=without))
    assert reasons("GP161", machine.but(torch=without)) == [none.reason]
    cpu = replace(without, cuda=none)
    assert reasons("GP160", machine.but(torch=cpu)) == [none.reason]
    library = replace(TORCH, nccl_loaded=Unavailable("libnccl.so.2: cannot open"))
    assert len(of("GP160", machine.but(torch=library))) == 1


def test_nccl_mismatch(machine: Machine) -> None:
    older = replace(TORCH, nccl_loaded="2.18.3")
    packages = {"nvidia-nccl-cu12": "2.18.3"}
    found = only("GP161", machine.but(torch=older, packages=packages))
    assert found.level is Level.WARNING
    assert ("nvidia-nccl-cu12", "2.18.3") in found.evidence
    newer = replace(TORCH, nccl_loaded="2.28.0")
    assert only("GP161", machine.but(torch=newer)).level is Level.NOTE
    assert passed("GP161", machine.facts)
