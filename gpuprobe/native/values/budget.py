"""The bounds of ``--compute auto`` where all values are computed."""

from __future__ import annotations

import torch

from gpuprobe.native.process import Runtime
from gpuprobe.torch_support.budget import OPERATIONS, Allowance


class Budget:
    """Raises `TooLarge` in the program once it has done more than it may.

    Memory is checked before values are written: what torch only allocates costs nothing.
    """

    def __init__(
        self, runtime: Runtime, memory: int | None = None, operations: float = OPERATIONS
    ) -> None:
        allowance = Allowance(memory, operations)
        self.count = allowance.count
        self._too_much = allowance.too_much
        self._memory = allowance.memory
        self._runtime = runtime

    def check_memory(self) -> None:
        """Raise TooLarge where tensors on one device take more memory than they may."""
        for device in range(torch._C._cuda_getDeviceCount()):
            # What the process holds there takes a microsecond to read, torch's statistics thirty.
            if (
                self._runtime.used(device) > self._memory
                and torch.cuda.memory_allocated(device) > self._memory
            ):
                raise self._too_much(self._memory)
