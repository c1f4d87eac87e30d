"""The GPUs of this process, real or simulated: which are visible, their first use, their time.

Imports torch only in `has_gpu` and `follow_cuda`: processes that never use a GPU import this
module too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Final, TypeVar

from gpuprobe.patching import Patches

_callback: Callable[[], None] | None = None


def when_first_used(callback: Callable[[], None] | None) -> None:
    """Call ``callback``, once, when this process first uses a GPU; None: no longer. Most processes
    that a program starts never do. A process that was forked has to initialise CUDA itself: CUDA
    refuses those whose parent had.
    """
    global _callback
    _callback = callback


def used() -> None:
    """Report that this process uses a GPU."""
    global _callback
    callback, _callback = _callback, None
    if callback is not None:
        callback()


_DEVICES: Final = ("/dev/nvidiactl", "/dev/dxg")
"""What NVIDIA's drivers make on a machine with a GPU, on Linux and in WSL."""


def has_gpu() -> bool:
    """Whether torch finds a GPU in this process. Imports torch only on a machine that has one: a
    simulated GPU has to be loaded before torch.
    """
    from importlib.util import find_spec  # 1 ms, in every child

    if sys.modules.get("torch") is None and (
        not any(map(os.path.exists, _DEVICES)) or find_spec("torch") is None
    ):
        return False
    import torch

    return bool(torch.cuda.is_available())


def follow_cuda() -> Callable[[], None]:
    """Make torch's initialisation of CUDA call `used`, and import torch. Returns a function that
    undoes this.
    """
    import torch

    patches = Patches()
    cuda: Any = torch.cuda
    original = cuda._lazy_init

    def lazy_init() -> None:
        original()
        # This may be inside a call that torch had queued until then.
        if _callback is not None and cuda.is_initialized():
            used()

    if torch.backends.cuda.is_built() and issubclass(
        torch.cuda.Event, getattr(torch._C, "_CudaEventBase", ())
    ):
        patches.set_all(cuda, {"_lazy_init": lazy_init}, "torch.cuda.")
    return patches.undo


NATIVE_SETTINGS: Final = "GPUPROBE_NATIVE"
"""The environment variable with the settings of the simulated GPUs, which children inherit."""


STARTUP: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "startup")  # noqa: PTH118, PTH120 - every child imports this
"""The folder whose ``sitecustomize`` processes import that inherit the simulated GPU, or that are
followed."""


STARTUP_NAME: Final = "GPUPROBE_STARTUP"
"""The environment variable with `STARTUP`, for a process that replaces PYTHONPATH: device.c."""


def add_startup(environment: MutableMapping[str, str]) -> None:
    """Have Python import gpuprobe's ``sitecustomize`` in processes with this environment."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if STARTUP not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, paths)])
    environment[STARTUP_NAME] = STARTUP


def takes_time() -> bool:
    """Whether the work of this process's GPUs takes time. False for simulated ones: kernels do
    nothing, or the host computes their results. Events are recorded in order, but the time between
    two of them is the host's.
    """
    return NATIVE_SETTINGS not in os.environ


NAME: Final = "CUDA_VISIBLE_DEVICES"
T = TypeVar("T")


def visible(setting: str | None, gpus: Sequence[T]) -> list[T]:
    """The GPUs that a setting of ``CUDA_VISIBLE_DEVICES`` selects, in its order: numbers, up to the
    first one that no GPU has (CUDA C++ Programming Guide, "CUDA Environment Variables"). Without a
    setting all of them.
    """
    if setting is None:
        return list(gpus)
    found: list[int] = []
    for part in setting.split(","):
        text = part.strip()
        if not text.isdecimal() or int(text) >= len(gpus):
            break
        if int(text) in found:  # then CUDA has no devices
            return []
        found.append(int(text))
    return [gpus[index] for index in found]
