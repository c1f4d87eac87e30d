"""A simulated GPU for parts of a program: cells of a notebook, marked tests.

It has to be loaded before torch, and stays to the end of the process. Between its sessions torch
finds no GPU, as on a machine without one, and neither do the processes that the program starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from gpuprobe.catalogue.gpus import parse_spec
from gpuprobe.native import process
from gpuprobe.patching import Patches, when_imported
from gpuprobe.torch_support.process_gpus import NATIVE_SETTINGS as SETTINGS

_MOST: Final = 1 << 46
"""Bytes, more than any GPU has."""

_without: Mapping[str, str | None] | None = None
"""The variables of the environment that the GPU sets, with their values without it; None if no GPU
is loaded that is hidden between its sessions."""
_with: Mapping[str, str | None] = {}
"""The same, with the values of the GPU."""
_hidden = False
_patches: Final = Patches()


def load(gpu: str, without: Mapping[str, str | None] | None = None) -> None:
    """Load a simulated GPU, before torch, which torch does not find until `show`. ``without``: the
    variables of the environment without the GPU, if this process started with that GPU. Raises what
    `gpuprobe.native.process.load` raises.
    """
    global _without
    before = dict(os.environ)
    process.load(parse_spec(gpu))
    if _without is None:
        names = {**before, **os.environ}
        changed = {n: before.get(n) for n in names if before.get(n) != os.environ.get(n)}
        _without = {**changed, **(without or {})}
        when_imported("torch", _follow)
        hide()


def is_hidden() -> bool:
    """Whether this process has a simulated GPU that torch does not find."""
    return _hidden


def show() -> None:
    """Let torch find the GPU that `load` has loaded, if any."""
    global _hidden
    runtime = process.loaded()
    if not _hidden or runtime is None:
        return
    _hidden = False
    _set({**_with, **({SETTINGS: runtime.settings} if _with else {})})
    _occupy(-_MOST)


def hide() -> None:
    """Let torch find no GPU again, if `load` has loaded one. Tensors on it stay, and can be copied
    to the host. Kernels, whose values would not be computed, raise CUDA's error for a machine
    without a GPU; new tensors that fit into no segment of the others raise torch's for too little
    memory.
    """
    global _hidden, _with
    if _without is None or _hidden:
        return
    _hidden = True
    _with = {name: os.environ.get(name) for name in _without}
    _set(_without)
    _occupy(_MOST)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _occupy(nbytes: int) -> None:
    """Count ``nbytes`` as memory of the driver on each GPU, so that none is left for tensors."""
    runtime, torch = process.loaded(), sys.modules.get("torch")
    if runtime is not None:
        runtime.hide(nbytes > 0)
    if runtime is None or torch is None or not torch.cuda.is_initialized():
        return
    torch.cuda.empty_cache()
    for index in range(len(runtime.visible())):
        runtime.hold(index, nbytes)


def _follow() -> None:
    """Replace what finds GPUs. Called when torch has been imported."""
    import torch

    cuda: Any = torch.cuda
    lazy_init = cuda._lazy_init

    def initialise() -> None:
        if _hidden:
            raise RuntimeError(
                "No CUDA GPUs are available: the simulated GPU is for tests with the mark "
                "gpu_memory and for cells that begin with %%gpuprobe"
            )
        lazy_init()

    _patches.set(cuda, "_lazy_init", initialise)
    for owner, name, without in (
        (torch._C, "_cuda_getDeviceCount", 0),
        (cuda, "device_count", 0),
        (cuda, "is_available", False),
    ):
        _patches.set(owner, name, _unless_hidden(getattr(owner, name), without))


def _unless_hidden(original: Any, without: Any) -> Any:
    def found() -> Any:
        return without if _hidden else original()

    return found
