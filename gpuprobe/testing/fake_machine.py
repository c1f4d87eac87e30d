"""A context with the GPUs, the CUDA driver and the ``/proc`` of a fleet, and load that moves."""

from __future__ import annotations

import copy
import ctypes
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpuprobe.testing.fake_cuda import FakeCuda
from gpuprobe.testing.fake_nvml import FakeNvml
from gpuprobe.testing.fleet import Facts, Fleet, load_fleet

__all__ = ["Motion", "fake_fleet", "write_proc_tree"]

_UPTIME = 1_000_000  # seconds; default of a fleet


@contextmanager
def fake_fleet(name: str | Fleet) -> Iterator[Fleet]:
    """Replace this machine's GPUs by those of a fleet.

    Replaces the C library below ``pynvml``, ``libcuda`` as ``ctypes.CDLL`` opens it, and ``/proc``
    for gpuprobe; restores all three. Not reentrant, and not for programs in which another thread
    uses NVML at the same time.
    """
    import pynvml  # 25 ms

    fleet = name if isinstance(name, Fleet) else load_fleet(name)
    with ExitStack() as stack:
        library, count = pynvml.nvmlLib, pynvml._nvmlLib_refcount
        pointers = dict(pynvml._nvmlGetFunctionPointer_cache)

        def restore() -> None:
            pynvml.nvmlLib = library
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml._nvmlGetFunctionPointer_cache.update(pointers)
            pynvml._nvmlLib_refcount = count

        stack.callback(restore)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml._nvmlLib_refcount = 0
        pynvml.nvmlLib = FakeNvml(fleet)

        real = ctypes.CDLL
        cuda = FakeCuda(fleet)

        def load(name: Any, *args: Any, **options: Any) -> object:
            is_cuda = str(name).startswith("libcuda.so")
            return cuda if is_cuda else real(name, *args, **options)

        stack.callback(setattr, ctypes, "CDLL", real)
        ctypes.CDLL = load  # type: ignore[misc, assignment]

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuprobe-fleet-")))
        write_proc_tree(fleet, folder)
        changes = {"GPUPROBE_PROCFS": str(folder / "proc")}
        changes.update({k: v for k, v in fleet.environ.items() if k not in os.environ})
        for key, value in changes.items():
            before = os.environ.get(key)
            stack.callback(_restore_variable, key, before)
            os.environ[key] = value
        yield fleet


def _restore_variable(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value


def write_proc_tree(fleet: Fleet, folder: Path) -> None:
    """Write ``folder/proc`` and ``folder/etc/passwd`` for the processes of a fleet."""
    proc = folder / "proc"
    (proc / "self" / "ns").mkdir(parents=True)
    inode = 4026531836 if fleet.namespace == "first" else 4026532201
    (proc / "self" / "ns" / "pid").symlink_to(f"pid:[{inode}]")
    (proc / "self" / "cgroup").write_text("0::/\n")
    (proc / "stat").write_text(host_stat(fleet, time.time() - fleet.host.get("uptime", _UPTIME)))
    hostname = fleet.host.get("hostname")
    if hostname:
        (proc / "sys" / "kernel").mkdir(parents=True)
        _write(proc / "sys" / "kernel" / "hostname", hostname + "\n")
    (proc / "loadavg").write_text("9.61 8.80 7.95 12/2431 70001\n")
    (proc / "meminfo").write_text("MemTotal: 2113456789 kB\nMemAvailable: 1913456789 kB\n")
    if not fleet.init:
        (proc / "driver" / "nvidia").mkdir(parents=True)
        version = fleet.driver["version"]
        (proc / "driver" / "nvidia" / "version").write_text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
        )
    for pid, facts in fleet.proc.items():
        home = proc / pid
        home.mkdir()
        name = facts.get("name", "python")
        # The kernel escapes newlines and backslashes of a name in status, not in stat.
        shown = name.replace("\\", "\\\\").replace("\n", "\\n")
        uid = facts.get("uid", 1000)
        _write(home / "status", f"Name:\t{shown}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        _write(home / "stat", process_stat(pid, facts))
        if "folder" in facts:
            (home / "cwd").symlink_to(facts["folder"])
        _write(home / "cmdline", "".join(f"{arg}\0" for arg in facts.get("cmdline", [])))
        _write(home / "cgroup", facts.get("cgroup", "0::/user.slice") + "\n")
        environ = facts.get("environ", {})
        _write(home / "environ", "".join(f"{k}={v}\0" for k, v in environ.items()))
    (folder / "etc").mkdir()
    lines = [f"{name}:x:{uid}:{uid}::/home:/bin/sh\n" for uid, name in fleet.users.items()]
    _write(folder / "etc" / "passwd", "".join(lines))


def host_stat(fleet: Fleet, booted: float, seconds: float = 0.0) -> str:
    """``/proc/stat`` of the machine, ``seconds`` after the fleet was opened. ``booted``: seconds
    since the Unix epoch.
    """
    cpus = fleet.host.get("cpus", 0)
    total = round(seconds * os.sysconf("SC_CLK_TCK") * cpus)
    busy = sum(facts.get("cpu", 0) for facts in fleet.proc.values()) + 100  # one for the system
    user = min(total, round(total * busy / 100 / cpus)) if cpus else 0
    each = "".join(f"cpu{n} 0 0 0 0 0 0 0 0 0 0\n" for n in range(cpus))
    return f"cpu {user} 0 0 {total - user} 0 0 0 0 0 0\n{each}btime {round(booted)}\n"


def process_stat(pid: str, facts: Facts, seconds: float = 0.0) -> str:
    """``/proc/PID/stat`` of a process that has run for ``seconds`` at its described CPU load."""
    hertz, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    busy = round(seconds * hertz * facts.get("cpu", 0) / 100)
    return (
        f"{pid} ({facts.get('name', 'python')}) S {facts.get('parent', 1)}"
        + " 0" * 9
        + f" {busy} 0"
        + " 0" * 6
        + f" {facts.get('started', 3600) * hertz} 0 {facts.get('resident', 4 << 30) // page}\n"
    )


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))


class Motion:
    """A load that moves, for the demo of a screen that stays open: changes the facts of ``fleet``
    in place, and the CPU time in ``proc``, its ``/proc``.

    The motion is a function of the elapsed time and of the fleet's description: two runs are equal.
    A GPU that is described as idle stays idle; memory does not change, so that it still equals the
    sum of the processes.
    """

    def __init__(self, fleet: Fleet, proc: Path | None = None) -> None:
        self._fleet = fleet
        self._base = [copy.deepcopy(device) for device in fleet.devices]
        self._time = 0.0
        self._proc = proc
        self._booted = 0.0
        if proc is not None:
            match = re.search(r"btime (\d+)", (proc / "stat").read_text("ascii"))
            self._booted = float(match.group(1)) if match else 0.0

    def clock(self) -> float:
        """Seconds elapsed on this machine."""
        return self._time

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._time += seconds
        for index, device in enumerate(self._fleet.devices):
            _move(device, self._base[index], self._time, index)
        if self._proc is not None:
            stat = host_stat(self._fleet, self._booted, self._time)
            (self._proc / "stat").write_text(stat, "ascii")
            for at, (pid, facts) in enumerate(self._fleet.proc.items()):
                # Varies a little from second to second.
                busy = self._time + 0.12 * math.sin(self._time / 3 + at)
                line = process_stat(pid, facts, max(0.0, busy))
                (self._proc / pid / "stat").write_bytes(line.encode("utf-8", "surrogateescape"))


def _move(device: dict[str, Any], base: Facts, elapsed: float, index: int) -> None:
    # A training step of a few seconds: busy, then a dip for data; a slow tide over minutes.
    period = 7 + 3 * (index % 4)
    phase = (elapsed + 2.7 * index) % period / period
    dip = 0.35 if phase > 0.8 else 1.0
    tide = 0.94 + 0.06 * math.sin(elapsed / 40 + index)
    level = dip * tide
    busy = base.get("utilisation")
    if isinstance(busy, list):
        device["utilisation"] = [min(100, round(value * level)) for value in busy]
    power = base.get("power")
    idle = isinstance(busy, list) and not any(busy)
    if isinstance(power, dict) and isinstance(power.get("draw"), int) and not idle:
        device["power"] = {**power, "draw": round(power["draw"] * (0.45 + 0.55 * level))}
    if isinstance(base.get("temperature"), int) and not idle:
        device["temperature"] = round(base["temperature"] - 3 + 4 * tide + 1.5 * level)
    traffic = base.get("pcie_throughput")
    if isinstance(traffic, list) and not idle:
        burst = 4000 * (1.6 - level)
        device["pcie_throughput"] = [round(kilobytes * burst) for kilobytes in traffic]
    links = base.get("nvlinks")
    if isinstance(links, list) and not idle:
        # Counters of KiB: about 10 GB/s on each link of a GPU that is fully busy.
        share = busy[0] / 100 if isinstance(busy, list) else 0.0
        sent = round(share * 1e7 * (elapsed + math.sin(elapsed / 5 + index)))
        device["nvlinks"] = [
            {**link, "kib": [count + sent for count in link["kib"]]} if "kib" in link else link
            for link in links
        ]
