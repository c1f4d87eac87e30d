"""The context in which a described machine is there."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpuprobe.testing.fake_cuda import FakeCuda
from gpuprobe.testing.fake_nvml import FakeNvml
from gpuprobe.testing.fleet import Fleet, load_fleet

__all__ = ["fake_fleet", "host_stat", "process_stat"]

_UPTIME = 1_000_000  # seconds, of a machine that is not described


@contextmanager
def fake_fleet(name: str | Fleet) -> Iterator[Fleet]:
    """Inside, this machine has the fleet's GPUs and none of its own.

    Replaces the C library under ``pynvml``, ``libcuda`` for whoever opens it through
    ``ctypes.CDLL``, and ``/proc`` for gpuprobe; restores all three. Not reentrant, and not for
    programs in which another thread uses NVML meanwhile.
    """
    import pynvml  # 25 ms

    fleet = name if isinstance(name, Fleet) else load_fleet(name)
    with ExitStack() as stack:
        kept = (pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache))
        kept_count = pynvml._nvmlLib_refcount

        def restore() -> None:
            pynvml.nvmlLib = kept[0]
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml._nvmlGetFunctionPointer_cache.update(kept[1])
            pynvml._nvmlLib_refcount = kept_count

        stack.callback(restore)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml._nvmlLib_refcount = 0
        pynvml.nvmlLib = FakeNvml(fleet)

        real = ctypes.CDLL
        cuda = FakeCuda(fleet)

        def load(library: Any, *args: Any, **options: Any) -> Any:
            known = str(library).startswith("libcuda.so")
            return cuda if known else real(library, *args, **options)

        stack.callback(setattr, ctypes, "CDLL", real)
        ctypes.CDLL = load  # type: ignore[misc, assignment]

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuprobe-fleet-")))
        write_proc_tree(fleet, folder)
        changes = {"GPUPROBE_PROCFS": str(folder / "proc")}
        changes.update({k: v for k, v in fleet.environ.items() if k not in os.environ})
        for key, value in changes.items():
            before = os.environ.get(key)
            stack.callback(_put_back, key, before)
            os.environ[key] = value
        yield fleet


def _put_back(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value


def write_proc_tree(fleet: Fleet, folder: Path) -> None:
    """Write ``folder/proc`` and ``folder/etc/passwd`` as the fleet's processes would have them."""
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


def process_stat(pid: str, facts: Mapping[str, Any], seconds: float = 0.0) -> str:
    """``/proc/PID/stat`` of a process that was busy for ``seconds`` at its usual share of a CPU."""
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
