"""Simulated GPUs: to run programs on a machine that has none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from gpuprobe.errors import EnvironmentUnavailable, MissingExtra, TooLarge, UnknownValue
from gpuprobe.patching import open_at_exit

if TYPE_CHECKING:
    from gpuprobe.native.session import NativeSession


def check_gpu(name: str) -> None:
    """Raises ConfigError if the catalogue has no such GPU (``h100-80gb``, ``2xa100-40gb``)."""
    from gpuprobe.catalogue.gpus import parse_spec

    parse_spec(name)


def load_gpu(gpu: str, *, endless: bool = False) -> None:
    """Load the simulated ``gpu`` into this process, before the program is loaded: Python imports
    the packages that contain a module, and they may import torch. ``endless``: for an estimate,
    whose GPUs never run out of memory.

    Raises ConfigError for an unknown GPU, UsageError if torch is imported already, and
    EnvironmentUnavailable if torch or the machine does not allow it.
    """
    if find_spec("torch") is None:
        return  # running the program raises MissingExtra
    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import load

    load(parse_spec(gpu), endless=endless)


def load_for_parts(gpu: str, without: Mapping[str, str | None] | None = None) -> None:
    """Load the simulated ``gpu`` for parts of this process, as far as that is possible: torch finds
    it only within `virtual_gpu`. ``without``: as `start_again_with` passes it on. Raises what
    `load_gpu` raises.
    """
    from gpuprobe.native import hidden
    from gpuprobe.native.session import active

    if find_spec("torch") is not None and active() is None:
        hidden.load(gpu, without)


def start_again_with(gpu: str, variable: str) -> NoReturn:
    """Replace this process by one with the same command line that has the simulated ``gpu`` from
    its start. There, the environment's ``variable`` has the variables without that GPU, as JSON.
    Raises what `load_gpu` raises, other than `TooLate`.
    """
    import json

    from gpuprobe.catalogue.gpus import parse_spec
    from gpuprobe.native.process import environment_with

    environment = environment_with(parse_spec(gpu))
    before = {name: os.environ.get(name) for name in environment}
    without = {name: value for name, value in before.items() if value != environment[name]}
    os.execve(sys.executable, sys.orig_argv, {**environment, variable: json.dumps(without)})


def has_gpu() -> bool:
    """Whether torch finds a GPU in this process. Imports torch only on a machine that has one."""
    from gpuprobe.native.process import awaits_gpu
    from gpuprobe.torch_support import process_gpus

    return not awaits_gpu() and process_gpus.has_gpu()


@open_at_exit
@contextmanager
def virtual_gpu(
    gpu: str = "h100-80gb",
    compute: str = "auto",
    *,
    conf: str | None = None,
    assume: Sequence[str] = (),
) -> Iterator[NativeSession]:
    """Give torch a CUDA device that this machine does not have, inside this context.

    ::

        with gpuprobe.virtual_gpu("h100-80gb"):
            import torch

            model = Model().cuda()
            train(model)
            print(torch.cuda.max_memory_allocated())

    It has to be loaded before torch, and the process keeps this GPU to its end: outside the context
    its values are not computed.

    ``gpu`` names an entry of the catalogue, or several: ``"2xa100-40gb"``. ``compute="real"``
    computes every value on the CPU, ``"shapes"`` only integers, masks and tensors of up to 1 MiB,
    ``"auto"`` all values while they take no more than 256 MiB and about five seconds, then as
    ``"shapes"``. Other numbers pass as finite, and a line that decides by one ends the context with
    ``ValueNeeded`` unless ``assume`` supplies it, as ``FILE:LINE=VALUE`` (``"train.py:12=false"``).
    ``conf``: allocator settings, instead of ``PYTORCH_CUDA_ALLOC_CONF``.

    Raises MissingExtra without torch, ConfigError for an unknown GPU and for invalid settings,
    UsageError if torch was imported before, if the process has another simulated GPU, and for an
    invalid assumption; EnvironmentUnavailable if torch is a build without CUDA or the machine does
    not run its CUDA code.
    """
    require_torch("required for the simulated GPU")
    from gpuprobe.native.session import EngineOptions, session

    try:
        with session(EngineOptions(gpu, compute, conf, tuple(assume))) as started:
            yield started
    except UnknownValue as unknown:
        raise unknown.error from None
    except TooLarge as large:
        raise EnvironmentUnavailable(
            f"compute={compute!r}: {large}", hint="compute='auto'"
        ) from None


def require_torch(why: str) -> None:
    """Raises MissingExtra without torch. ``why``: what needs it."""
    if find_spec("torch") is None:
        raise MissingExtra("torch", "torch", why=why)
