"""The bounds of ``--compute auto`` where all values are computed."""

from __future__ import annotations

from typing import Any, Final

import psutil
import torch
from torch._ops import OpOverload
from torch.utils import flop_counter

from gpuprobe.errors import TooLarge
from gpuprobe.model.text import human_bytes
from gpuprobe.native.process import Runtime
from gpuprobe.torch_support.tensors import tensors_in

MEMORY: Final = 16 << 30
"""Bytes that tensors may take on the device at a time; at most half of this machine's available
memory, which holds them."""

OPERATIONS: Final = 2e13
"""Floating-point operations of a whole run: about five minutes on two cores, at the 30 to 80
billion a second that fp32 matrix products reach there."""

_OF_ONE_ELEMENT: Final = 10
"""Operations counted for an element of a result without a known formula: element-wise kernels are
bound by memory, and take about as long."""


class Budget:
    """Raises `TooLarge` in the program once it has done more than it may. ``memory`` in bytes
    (default: the smaller of `MEMORY` and half of what this machine has available), ``operations``
    floating-point operations.

    Memory is checked before values are written: what torch only allocates costs nothing.
    """

    def __init__(
        self, runtime: Runtime, memory: int | None = None, operations: float = OPERATIONS
    ) -> None:
        if memory is None:
            memory = min(MEMORY, psutil.virtual_memory().available // 2)
        self._memory = memory
        self._operations = operations
        self._done = 0.0
        self._runtime = runtime

    def check_memory(self) -> None:
        """Raise TooLarge where tensors on one device take more memory than they may."""
        for device in range(torch._C._cuda_getDeviceCount()):
            # What the process holds there takes a microsecond to read, torch's statistics thirty.
            if (
                self._runtime.used(device) > self._memory
                and torch.cuda.memory_allocated(device) > self._memory
            ):
                raise TooLarge(f"its tensors need more than {human_bytes(self._memory)}")

    def count(self, func: OpOverload, args: Any, kwargs: Any, result: object) -> None:
        """Count an operator that was computed. Raises TooLarge beyond the bound."""
        formula = flop_counter.flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is None:
            elements = sum(tensor.numel() for tensor in tensors_in(result))
            self._done += _OF_ONE_ELEMENT * elements
        else:
            self._done += formula(*args, **kwargs, out_val=result)
        if self._done > self._operations:
            raise TooLarge(f"it needs more than {self._operations:.0e} floating-point operations")
