"""The mode that computes values, in all threads of a program.

Modes belong to threads: torch carries them to the threads of its backward pass, not to Python's,
as `torch.nn.DataParallel` starts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gpuprobe.patching import patch


def join(mode: Any) -> Callable[[], None]:
    """Threads that are started from now on have ``mode``. Returns what ends that."""
    before: Callable[[Any], None] = vars(threading.Thread)["_bootstrap_inner"]

    def bootstrap(self: Any) -> None:
        torch._C._push_on_torch_dispatch_stack(mode)
        try:
            before(self)
        finally:
            torch._C._pop_torch_dispatch_stack(None)

    return patch(threading.Thread, "_bootstrap_inner", bootstrap)


def leave_backward() -> None:
    """Wait until the threads of the backward pass have dropped the mode. Called without it.

    Such a thread drops the modes that it was given after the backward pass has returned
    (``Engine::thread_main`` in ``torch/csrc/autograd/engine.cpp``), and needs the interpreter's
    lock for that. One that waits for the lock when Python ends is ended by Python in C++ code that
    does not allow it, which aborts the process. The threads work through queues, so that after
    another backward pass, which has no modes, they have dropped those of the last one. A tensor
    without elements takes no memory.
    """
    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):
            empty = torch.empty(0, device=f"cuda:{device}", requires_grad=True)
            with torch.enable_grad():
                again = empty.view(-1)
            torch.autograd.grad(again, empty, torch.empty_like(again))
