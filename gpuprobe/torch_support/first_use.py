"""When a process first uses a GPU, a real or a virtual one.

Most processes that a program starts never do. One that was forked off has to initialise CUDA
itself: CUDA refuses those whose parent had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuprobe.patching import Patches

_callback: Callable[[], None] | None = None


def when_first_used(callback: Callable[[], None] | None) -> None:
    """Call back, once, when this process first uses a GPU; None: no longer."""
    global _callback
    _callback = callback


def used() -> None:
    """This process uses a GPU."""
    global _callback
    callback, _callback = _callback, None
    if callback is not None:
        callback()


def follow_cuda() -> Callable[[], None]:
    """Have torch's initialisation of CUDA call `used`; virtual GPUs do that themselves. Imports
    torch. Returns what undoes it.
    """
    import torch

    patches = Patches()
    cuda: Any = torch.cuda
    original = cuda._lazy_init

    def lazy_init() -> None:
        original()
        # It may be inside a call that torch had queued until then.
        if _callback is not None and cuda.is_initialized():
            used()

    if torch.backends.cuda.is_built() and issubclass(
        torch.cuda.Event, getattr(torch._C, "_CudaEventBase", ())
    ):
        patches.set_all(cuda, {"_lazy_init": lazy_init}, "torch.cuda.")
    return patches.undo
