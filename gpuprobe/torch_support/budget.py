"""The bounds on what a run computes if values were not requested: ``--compute auto``."""

from __future__ import annotations

from typing import Any, Final

import psutil
from torch._ops import OpOverload

from gpuprobe.errors import TooLarge
from gpuprobe.model.text import human_bytes
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


class Allowance:
    """The amount that a run has computed, and the bounds on it.

    ``memory`` in bytes (default: the smaller of `MEMORY` and half of what this machine has
    available), ``operations`` floating-point operations.
    """

    def __init__(self, memory: int | None = None, operations: float = OPERATIONS) -> None:
        if memory is None:
            memory = min(MEMORY, psutil.virtual_memory().available // 2)
        self.memory = memory
        self._operations = operations
        self._done = 0.0

    @staticmethod
    def too_much(nbytes: int) -> TooLarge:
        """The error to raise if tensors take more than ``nbytes``."""
        return TooLarge(f"its tensors need more than {human_bytes(nbytes)}")

    def count(self, func: OpOverload, args: Any, kwargs: Any, result: object) -> None:
        """Count an operator that was computed. Raises TooLarge beyond the bound."""
        self._done += operations_of(func, args, kwargs, result)
        if self._done > self._operations:
            raise TooLarge(f"it needs more than {self._operations:.0e} floating-point operations")


def operations_of(func: OpOverload, args: Any, kwargs: Any, result: object) -> float:
    """Floating-point operations of an operator, from the shapes of its arguments and its result."""
    from torch.utils import flop_counter  # 200 ms: it imports Triton

    formula = flop_counter.flop_registry.get(getattr(func, "_overloadpacket", None))
    if formula is not None:
        try:
            return float(formula(*args, **kwargs, out_val=result))
        except Exception:  # noqa: BLE001 - of heads that share keys, torch's formula is an assertion
            pass
    return float(_OF_ONE_ELEMENT * sum(tensor.numel() for tensor in tensors_in(result)))
