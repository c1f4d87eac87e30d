"""The facts that the rules read, gathered from the machine. This neither creates a CUDA context nor
imports torch into this process: torch and pycuda report in separate processes, within a time limit.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.values import Bytes, ReadStatus, Unavailable
from gpuprobe.probes.health.base import (
    KernelMessage,
    LibraryFile,
    MachineFacts,
    SharedMemory,
    TorchFacts,
)
from gpuprobe.probes.host import ProcTree, container_of

_TIME_LIMIT = 60.0  # seconds: a cold import of torch from a network disk takes tens
_MARK = "gpuprobe facts: "
_MOST_ERROR = 300  # characters of the last line of a failed process's stderr

_TORCH_SCRIPT = """
import torch
facts = {"version": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip}
flags = getattr(torch._C, "_cuda_getArchFlags", None)
facts["archs"] = (flags() or "").split() if flags else None
version = getattr(torch._C, "_nccl_version", None)
if version:
    number = version()
    facts["nccl_built"] = [number >> 32, number >> 16 & 65535, number & 65535]
    import ctypes
    try:
        # Already loaded as torch's dependency: this finds the same one.
        library, number = ctypes.CDLL("libnccl.so.2"), ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)) == 0:
            facts["nccl_loaded"] = number.value
    except (OSError, AttributeError) as error:
        facts["nccl_error"] = str(error)
"""

# get_version() is the CUDA_VERSION of the headers pycuda was compiled with.
_PYCUDA_SCRIPT = """
import pycuda.driver
facts = {"cuda": list(pycuda.driver.get_version())}
"""

_PACKAGES = re.compile(
    r"(nvidia-.*|torch.*|pytorch-.*|triton.*|pycuda|cuda-.*|cupy.*|jax.*|numba|numpy|"
    r"deepspeed|accelerate|transformers|lightning.*|xformers|flash[-_]attn|apex|bitsandbytes|"
    r"vllm|megatron.*|gpuprobe|psutil|textual)"
)


def gather(
    inventory: Inventory | Unavailable,
    environ: Mapping[str, str] = os.environ,
    *,
    time_limit: float = _TIME_LIMIT,
) -> MachineFacts:
    """Gather all facts. ``time_limit`` in seconds, for each of the processes."""
    packages = read_packages()
    # Both import in parallel to the other reads.
    torch = _start_report("torch", _TORCH_SCRIPT, packages, environ)
    pycuda = _start_report("pycuda", _PYCUDA_SCRIPT, packages, environ)
    kernel_log = read_kernel_log()
    libraries = read_libraries(environ)
    return MachineFacts(
        inventory=inventory,
        environ=dict(environ),
        torch=_torch_facts(_read_report(torch, "torch", time_limit)),
        shared_memory=read_shared_memory(),
        memlock=_memlock(),
        kernel_log=kernel_log,
        packages=packages,
        pycuda_cuda=_pycuda_cuda(_read_report(pycuda, "pycuda", time_limit)),
        libraries=libraries,
        in_container=_in_container(),
        uid=os.getuid(),
        rdma_devices=_rdma_devices(),
    )


# -- packages, and the processes that report on them


def read_packages() -> dict[str, str]:
    """Versions of the installed packages that the rules check, from their metadata."""
    from importlib import metadata  # 20 ms: it imports email

    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if _PACKAGES.fullmatch(name):
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def _start_report(
    package: str, script: str, packages: Mapping[str, str], environ: Mapping[str, str]
) -> subprocess.Popen[str] | Unavailable:
    """Start a process that imports a package and prints its facts as JSON."""
    if package not in packages:
        return Unavailable(f"{package} is not installed", ReadStatus.UNSUPPORTED)
    if not sys.executable:
        return Unavailable("the path of the Python executable is unknown")
    # The settings that are checked must not end the process; and it needs no device.
    clean = {k: v for k, v in environ.items() if not re.fullmatch(r"PYTORCH_.*ALLOC_CONF", k)}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    # The same import path as this process: "-c" would put the working directory first.
    program = f"import sys, json\nsys.path[:] = json.loads(sys.argv[1])\n{script}\n"
    program += f"print('\\n{_MARK}' + json.dumps(facts))"
    try:
        return subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return Unavailable(f"a process to query {package}: {error.strerror}")


def _read_report(
    process: subprocess.Popen[str] | Unavailable, package: str, time_limit: float
) -> dict[str, Any] | Unavailable:
    if isinstance(process, Unavailable):
        return process
    try:
        out, err = process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Unavailable(f"importing {package} took longer than {time_limit:.0f} s")
    if process.returncode:
        lines = err.strip().splitlines()
        last = lines[-1] if lines else "nothing"
        code = process.returncode
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Unavailable(f"import {package}: {ended}: {last[-_MOST_ERROR:]}")
    for line in reversed(out.splitlines()):  # a package may print lines too, also at exit
        if line.startswith(_MARK):
            facts: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return facts
    return Unavailable(f"import {package}: the process exited early without output")


def _torch_facts(report: dict[str, Any] | Unavailable) -> TorchFacts | Unavailable:
    if isinstance(report, Unavailable):
        return report
    none = Unavailable("this torch is built without CUDA", ReadStatus.UNSUPPORTED)
    without = Unavailable("this torch is built without NCCL", ReadStatus.UNSUPPORTED)
    built, loaded = report.get("nccl_built"), report.get("nccl_loaded")
    loaded_version: str | Unavailable = without
    if built:
        loaded_version = Unavailable(report.get("nccl_error", "NCCL does not report its version"))
    if loaded:
        loaded_version = _nccl_version(loaded)
    return TorchFacts(
        version=report["version"],
        cuda=report["cuda"] or none,
        hip=report["hip"] or Unavailable("not a ROCm build", ReadStatus.UNSUPPORTED),
        archs=tuple(report["archs"]) if report["archs"] else none,
        nccl_built=".".join(map(str, built)) if built else without,
        nccl_loaded=loaded_version,
    )


def _nccl_version(number: int) -> str:
    """A version number as text. nccl.h, NCCL_VERSION: 20901 is 2.9.1, but 2804 is 2.8.4."""
    if number < 10000:
        return f"{number // 1000}.{number % 1000 // 100}.{number % 100}"
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _pycuda_cuda(report: dict[str, Any] | Unavailable) -> str | Unavailable:
    if isinstance(report, Unavailable):
        return report
    major, minor, *_ = report["cuda"]
    return f"{major}.{minor}"


# -- the machine


def read_shared_memory(path: Path = Path("/dev/shm")) -> SharedMemory | Unavailable:
    try:
        space = os.statvfs(path)
    except OSError as error:
        return Unavailable(f"{path}: {error.strerror}", _status(error))
    return SharedMemory(
        Bytes(space.f_blocks * space.f_frsize),
        Bytes(space.f_bavail * space.f_frsize),
        os.access(path, os.W_OK),
    )


def _status(error: OSError) -> ReadStatus:
    denied = error.errno in (errno.EPERM, errno.EACCES)
    return ReadStatus.DENIED if denied else ReadStatus.ERROR


def _memlock() -> int | Unavailable:
    try:
        import resource
    except ImportError:
        return Unavailable("this platform has no resource limits", ReadStatus.UNSUPPORTED)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _rdma_devices() -> tuple[str, ...] | Unavailable:
    folder = Path("/sys/class/infiniband")
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except FileNotFoundError:
        return ()
    except OSError as error:
        return Unavailable(f"{folder}: {error.strerror}", _status(error))


def _in_container() -> bool | Unavailable:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    cgroup = ProcTree().read("self", "cgroup")
    if isinstance(cgroup, Unavailable):
        return cgroup
    found = container_of(cgroup)
    return found is not None and found.runtime != "slurm"


def read_kernel_log(path: Path = Path("/dev/kmsg")) -> tuple[KernelMessage, ...] | Unavailable:
    """The driver's lines of the kernel log.

    The format is specified in Linux's ``Documentation/ABI/testing/dev-kmsg``: a record is
    ``priority,sequence,microseconds,flags;text``, and lines that begin with a blank continue it.
    """
    lines: list[bytes] = []
    try:
        with _descriptor(path) as fd:
            for chunk in _chunks(fd):
                lines.append(chunk)
    except OSError as error:
        return Unavailable(f"{path}: {error.strerror}", _status(error))
    messages = []
    for line in b"".join(lines).decode("utf-8", "replace").splitlines():
        head, semicolon, text = line.partition(";")
        fields = head.split(",")
        if (
            not semicolon
            or line.startswith(" ")
            or len(fields) < 3
            or not fields[2].isdecimal()
            or not ("NVRM" in text or "nvidia" in text.lower())
        ):
            continue
        messages.append(KernelMessage(int(fields[2]) / 1e6, text))
    return tuple(messages)


@contextmanager
def _descriptor(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _chunks(fd: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return  # all records have been read
        except BrokenPipeError:
            continue  # records were overwritten while reading: continue with the oldest one
        if not chunk:
            return
        yield chunk


# -- the driver's libraries

_DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_REAL_SIZE = 768 * 1024  # bytes: the stubs have less than 200 KiB, the real ones over 1 MiB


def read_libraries(environ: Mapping[str, str] = os.environ) -> tuple[LibraryFile, ...]:
    """The installed driver libraries that the loader finds, in its order: ``LD_LIBRARY_PATH``, then
    the cache of ldconfig.
    """
    cache = _loader_cache()
    found = []
    for name in _DRIVER_LIBRARIES:
        folders = [f for f in environ.get("LD_LIBRARY_PATH", "").split(":") if f]
        candidates = [Path(folder) / name for folder in folders]
        candidates += [Path(path) for path in cache.get(name, ())]
        for candidate in candidates:
            try:
                real = candidate.resolve(strict=True)
                size = real.stat().st_size
            except (OSError, RuntimeError):  # missing, no permission, or a loop of links
                continue
            stub = "stubs" in candidate.parts or "stubs" in real.parts or size < _REAL_SIZE
            found.append(LibraryFile(name, str(real), stub))
            break
    return tuple(found)


def _loader_cache() -> dict[str, list[str]]:
    """The paths of the driver libraries in the list of ``ldconfig -p``, for this word size."""
    for program in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if os.access(program, os.X_OK):
            break
    else:
        return {}  # musl, or no loader cache: the folders of LD_LIBRARY_PATH remain
    try:
        done = subprocess.run([program, "-p"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}  # the folders of LD_LIBRARY_PATH remain
    return cached_libraries(done.stdout.decode("utf-8", "replace"), wide=sys.maxsize > 2**32)


def cached_libraries(listing: str, *, wide: bool) -> dict[str, list[str]]:
    """The paths of the driver libraries in the output of ``ldconfig -p``, in its order, for a word
    size of 64 bits (``wide``) or 32.
    """
    cache: dict[str, list[str]] = {}
    for line in listing.splitlines():
        match = re.match(r"\s*(\S+) \((.*?)\) => (.*)", line)
        if match and match.group(1) in _DRIVER_LIBRARIES:
            is_wide = "64" in match.group(2)
            if is_wide == wide:
                cache.setdefault(match.group(1), []).append(match.group(3))
    return cache
