"""The context in which a described machine is there."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpuprobe.testing.fake_cuda import FakeCuda
from gpuprobe.testing.fake_nvml import FakeNvml
from gpuprobe.testing.fleet import Fleet, load_fleet

__all__ = ["fake_fleet"]


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
    (proc / "stat").write_text("cpu 0 0 0 0 0 0 0 0 0 0\nbtime 1700000000\n")
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
        ticks = facts.get("started", 3600) * os.sysconf("SC_CLK_TCK")
        _write(
            home / "stat",
            f"{pid} ({name}) S {facts.get('parent', 1)}"
            + " 0" * 17
            + f" {ticks} 0 {facts.get('resident', 4 << 30) // 4096}\n",
        )
        _write(home / "cmdline", "".join(f"{arg}\0" for arg in facts.get("cmdline", [])))
        _write(home / "cgroup", facts.get("cgroup", "0::/user.slice") + "\n")
        environ = facts.get("environ", {})
        _write(home / "environ", "".join(f"{k}={v}\0" for k, v in environ.items()))
    (folder / "etc").mkdir()
    lines = [f"{name}:x:{uid}:{uid}::/home:/bin/sh\n" for uid, name in fleet.users.items()]
    _write(folder / "etc" / "passwd", "".join(lines))


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
