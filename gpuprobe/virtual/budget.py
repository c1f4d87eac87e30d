"""How much a run may compute whose values nobody asked for: ``--compute auto``."""

from __future__ import annotations

from typing import Any, Final

import psutil
from torch.utils import flop_counter

from gpuprobe.errors import TooLarge
from gpuprobe.model.text import human_bytes
from gpuprobe.torch_support.tensors import tensors_in
from gpuprobe.virtual.machine import Machine

MEMORY: Final = 16 << 30
"""Bytes that tensors may take on the device at a time, or half of what this machine has available:
they lie in its memory."""

OPERATIONS: Final = 2e13
"""Floating-point operations of a whole run: about five minutes on two cores, at the 30 to 80
billion a second that fp32 matrix products reach there."""

_OF_ONE_ELEMENT: Final = 10
"""Operations that an element of a result stands for where no formula is known: element-wise
kernels are bound by memory, and take about as long as so many."""


class Budget:
    """Raises `TooLarge` in the program once a machine has done more than it may."""

    def __init__(
        self, machine: Machine, memory: int | None = None, operations: float = OPERATIONS
    ) -> None:
        if memory is None:
            memory = min(MEMORY, psutil.virtual_memory().available // 2)
        self._operations = operations
        self._done = 0.0
        machine.meter = self._count
        for device in machine.devices:
            device.bound = memory
            device.beyond = self._too_much

    @staticmethod
    def _too_much(nbytes: int) -> BaseException:
        return TooLarge(f"its tensors need more than {human_bytes(nbytes)}")

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        formula = flop_counter.flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is None:
            elements = sum(tensor.numel() for tensor in tensors_in(result))
            self._done += _OF_ONE_ELEMENT * elements
        else:
            self._done += formula(*args, **kwargs, out_val=result)
        if self._done > self._operations:
            raise TooLarge(f"it needs more than {self._operations:.0e} floating-point operations")
