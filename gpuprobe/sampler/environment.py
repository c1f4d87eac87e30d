"""The machine, the software and the rank of this process."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from os import getpid
from pathlib import Path
from types import MappingProxyType

from gpuprobe._version import __version__
from gpuprobe.clocks import time
from gpuprobe.model.run.session import Environment, Session
from gpuprobe.model.values import Bytes, Unavailable


def allocator_conf() -> str:
    """The allocator settings the program was started with.

    torch 2.9 added a name without CUDA in it; if both are set the old one wins, as torch 2.13's
    ``torch._C._accelerator_getAllocatorSettings`` shows.
    """
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")


def ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size) as ``torchrun`` sets them; (0, 0, 1) without it."""

    def number(name: str, default: int) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.isdecimal() else default

    return number("RANK", 0), number("LOCAL_RANK", 0), max(1, number("WORLD_SIZE", 1))


@contextmanager
def as_rank(
    rank: int, local_rank: int, world_size: int, more: Mapping[str, object] = MappingProxyType({})
) -> Iterator[None]:
    """Set these ranks in the environment as ``torchrun`` does, and the variables of ``more``;
    nothing for a single rank.
    """
    values = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, **more}
    before = {name: os.environ.get(name) for name in values}
    if world_size > 1:
        os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def describe() -> Environment:
    """This machine and its software. Imports torch only if the program has."""
    torch = sys.modules.get("torch")
    version: str | Unavailable
    cuda: str | Unavailable = Unavailable("torch was not imported")
    try:
        version = metadata.version("torch") if torch is None else str(torch.__version__)
    except metadata.PackageNotFoundError:
        version = Unavailable("torch is not installed")
    if torch is not None:
        cuda = torch.version.cuda or Unavailable("this torch is built without CUDA")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    memory: Bytes | Unavailable
    try:
        memory = Bytes(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError) as error:
        memory = Unavailable(f"total memory: {error}")
    return Environment(
        gpuprobe=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        hostname=socket.gethostname(),
        torch=version,
        cuda_runtime=cuda,
        allocator_conf=allocator_conf(),
        cuda_visible_devices=Unavailable("not set") if visible is None else visible,
        cpu_count=os.cpu_count() or 0,
        total_memory=memory,
    )


def gpu_names() -> tuple[str, ...]:
    """The names of the GPUs by index, as torch reports them. None unless the program has
    initialised CUDA: the question would do so.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    try:
        return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    except RuntimeError:  # the GPU is in error
        return ()


def session(
    argv: tuple[str, ...], level: str, devices: tuple[str, ...], *, simulated: bool = False
) -> Session:
    """The session of this process, which is recorded from now on."""
    rank, local_rank, world_size = ranks()
    try:
        cwd = str(Path.cwd())
    except OSError:  # the directory was deleted under us
        cwd = ""
    return Session(
        started_at=time(),
        pid=getpid(),
        argv=argv,
        level=level,
        devices=devices,
        cwd=cwd,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        virtual=simulated,
    )
