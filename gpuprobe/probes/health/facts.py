"""Gathering what the rules read. Nothing here creates a CUDA context or imports torch into
this process: torch and pycuda are asked in processes of their own, within a time limit.
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
_LAST_WORDS = 300  # characters of a failed process's stderr that are kept

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
    """Everything the rules read. ``time_limit`` in seconds, for each process that is asked."""
    packages = read_packages()
    # Both import while the rest is read.
    torch = _ask("torch", _TORCH_SCRIPT, packages, environ)
    pycuda = _ask("pycuda", _PYCUDA_SCRIPT, packages, environ)
    kernel_log = read_kernel_log()
    libraries = read_libraries(environ)
    return MachineFacts(
        inventory=inventory,
        environ=dict(environ),
        torch=_torch_facts(_answer(torch, "torch", time_limit)),
        shared_memory=read_shared_memory(),
        memlock=_memlock(),
        kernel_log=kernel_log,
        packages=packages,
        pycuda_cuda=_pycuda_cuda(_answer(pycuda, "pycuda", time_limit)),
        libraries=libraries,
        in_container=_in_container(),
        uid=os.getuid(),
        rdma_devices=_rdma_devices(),
    )


# -- packages and the processes that ask them


def read_packages() -> dict[str, str]:
    """Versions of the installed packages that matter here, from their metadata."""
    from importlib import metadata  # 20 ms: it brings email

    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if _PACKAGES.fullmatch(name):
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def _ask(
    package: str, script: str, packages: Mapping[str, str], environ: Mapping[str, str]
) -> subprocess.Popen[str] | Unavailable:
    """Start a process that imports a package and prints what it knows as JSON."""
    if package not in packages:
        return Unavailable(f"{package} is not installed", ReadStatus.UNSUPPORTED)
    if not sys.executable:
        return Unavailable("the path of the Python executable is unknown")
    # The settings under examination must not end the examiner; and no device is needed.
    clean = {k: v for k, v in environ.items() if not re.fullmatch(r"PYTORCH_.*ALLOC_CONF", k)}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    # The same import path as here: "-c" would put the working directory first.
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
        return Unavailable(f"a process to ask {package}: {error.strerror}")


def _answer(
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
        words = err.strip().splitlines()
        said = words[-1] if words else "nothing"
        code = process.returncode
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Unavailable(f"import {package}: {ended}: {said[-_LAST_WORDS:]}")
    for line in reversed(out.splitlines()):  # a package may print of its own, also at exit
        if line.startswith(_MARK):
            facts: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return facts
    return Unavailable(f"import {package}: the process exited early without output")


def _torch_facts(answer: dict[str, Any] | Unavailable) -> TorchFacts | Unavailable:
    if isinstance(answer, Unavailable):
        return answer
    none = Unavailable("this torch is built without CUDA", ReadStatus.UNSUPPORTED)
    without = Unavailable("this torch is built without NCCL", ReadStatus.UNSUPPORTED)
    built, loaded = answer.get("nccl_built"), answer.get("nccl_loaded")
    loaded_version: str | Unavailable = without
    if built:
        loaded_version = Unavailable(answer.get("nccl_error", "NCCL does not report its version"))
    if loaded:
        loaded_version = _nccl_version(loaded)
    return TorchFacts(
        version=answer["version"],
        cuda=answer["cuda"] or none,
        hip=answer["hip"] or Unavailable("not a ROCm build", ReadStatus.UNSUPPORTED),
        archs=tuple(answer["archs"]) if answer["archs"] else none,
        nccl_built=".".join(map(str, built)) if built else without,
        nccl_loaded=loaded_version,
    )


def _nccl_version(number: int) -> str:
    """nccl.h, NCCL_VERSION: thousands since 2.9 have two digits more (2.8.4 is 2804)."""
    if number < 10000:
        return f"{number // 1000}.{number % 1000 // 100}.{number % 100}"
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _pycuda_cuda(answer: dict[str, Any] | Unavailable) -> str | Unavailable:
    if isinstance(answer, Unavailable):
        return answer
    major, minor, *_ = answer["cuda"]
    return f"{major}.{minor}"


# -- the machine


def read_shared_memory(path: Path = Path("/dev/shm")) -> SharedMemory | Unavailable:
    try:
        room = os.statvfs(path)
    except OSError as error:
        return Unavailable(f"{path}: {error.strerror}", _status(error))
    return SharedMemory(
        Bytes(room.f_blocks * room.f_frsize),
        Bytes(room.f_bavail * room.f_frsize),
        os.access(path, os.W_OK),
    )


def _status(error: OSError) -> ReadStatus:
    refused = error.errno in (errno.EPERM, errno.EACCES)
    return ReadStatus.DENIED if refused else ReadStatus.ERROR


def _memlock() -> int | Unavailable:
    try:
        import resource
    except ImportError:
        return Unavailable("this platform has no resource limits", ReadStatus.UNSUPPORTED)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _rdma_devices(folder: Path = Path("/sys/class/infiniband")) -> tuple[str, ...] | Unavailable:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except FileNotFoundError:
        return ()
    except OSError as error:
        return Unavailable(f"{folder}: {error.strerror}", _status(error))


def _in_container(root: Path = Path("/")) -> bool | Unavailable:
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    cgroup = ProcTree().read("self", "cgroup")
    if isinstance(cgroup, Unavailable):
        return cgroup
    found = container_of(cgroup)
    return found is not None and found.runtime != "slurm"


def read_kernel_log(path: Path = Path("/dev/kmsg")) -> tuple[KernelMessage, ...] | Unavailable:
    """The driver's lines of the kernel log.

    The format is that of Linux's ``Documentation/ABI/testing/dev-kmsg``: a record is
    ``priority,sequence,microseconds,flags;text``; lines that begin with a blank add to it.
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
            return  # all that is there has been read
        except BrokenPipeError:
            continue  # records were overwritten while reading: go on with the oldest left
        if not chunk:
            return
        yield chunk


# -- the driver's libraries

_DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_REAL_SIZE = 768 * 1024  # bytes: the stubs have less than 200 KiB, the real ones over 1 MiB


def read_libraries(environ: Mapping[str, str] = os.environ) -> tuple[LibraryFile, ...]:
    """The driver libraries the loader would find, in its order: ``LD_LIBRARY_PATH``, the
    cache of ldconfig. Those that are not installed are left out.
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
            except (OSError, RuntimeError):  # not there, no permission, or a loop of links
                continue
            stub = "stubs" in candidate.parts or "stubs" in real.parts or size < _REAL_SIZE
            found.append(LibraryFile(name, str(real), stub))
            break
    return tuple(found)


def _loader_cache() -> dict[str, list[str]]:
    """What ``ldconfig -p`` lists of the driver libraries, for this machine word's size."""
    for program in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if os.access(program, os.X_OK):
            break
    else:
        return {}  # musl, or no loader cache: the folders of LD_LIBRARY_PATH remain
    try:
        done = subprocess.run([program, "-p"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}  # the cache only adds places to look in
    return cached_libraries(done.stdout.decode("utf-8", "replace"), wide=sys.maxsize > 2**32)


def cached_libraries(listing: str, *, wide: bool) -> dict[str, list[str]]:
    """The paths of the driver libraries in what ``ldconfig -p`` prints, in its order, for a machine
    word of 64 bits (``wide``) or 32.
    """
    cache: dict[str, list[str]] = {}
    for line in listing.splitlines():
        match = re.match(r"\s*(\S+) \((.*?)\) => (.*)", line)
        if match and match.group(1) in _DRIVER_LIBRARIES:
            is_wide = "64" in match.group(2)
            if is_wide == wide:
                cache.setdefault(match.group(1), []).append(match.group(3))
    return cache
