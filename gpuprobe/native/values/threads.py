"""Threads that a program starts while values are computed compute them as well.

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
