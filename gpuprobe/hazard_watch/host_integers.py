"""Values of integer tensors on a device that came from the host, so that nothing reads them back.

Indices mostly come from the host. Reading them back would wait for the device. So their values are
noted when they are copied there, and forgotten when something writes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

MOST: Final = 4096
"""Elements of a tensor whose values are kept."""

_KINDS: Final[dict[torch.dtype, Any]] = {torch.int64: ctypes.c_int64, torch.int32: ctypes.c_int32}
_address = torch._C.TensorBase.data_ptr


class HostIntegers:
    """The known values of tensors on a device, by the address of their block."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.dtype, list[int]]] = {}
        # Within the capture of a CUDA graph: at its replay an index has other values.
        self.capturing = False

    def __bool__(self) -> bool:
        return bool(self._values)

    def forget(self, address: int) -> None:
        """Remove the block at ``address``, which was written or freed."""
        self._values.pop(address, None)

    @staticmethod
    def concern(tensor: Tensor) -> bool:
        """Whether a tensor on a device can have known values."""
        return (
            tensor.dtype in _KINDS
            and 0 < tensor.numel() <= MOST
            and tensor.is_contiguous()
            and not tensor.storage_offset()
        )

    def keep(self, block: int, tensor: Tensor, values: Sequence[int] | None) -> None:
        """Set the values of a tensor that `concern` accepts; None: unknown ones."""
        if values is not None and len(values) == tensor.numel() and not self.capturing:
            self._values[block] = tensor.dtype, list(values)

    def of(self, tensor: Tensor, block: int | None) -> list[int] | None:
        """The values of a tensor in a block, in order; None if they are unknown."""
        if self.capturing:
            return None
        if not tensor.is_cuda:
            return on_host(tensor)
        offset = tensor.storage_offset()
        found = self._values.get(-1 if block is None else block)
        if found is None or found[0] != tensor.dtype:
            return None
        places = [offset]
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
            places = [place + at * stride for place in places for at in range(size)]
        values = found[1]
        return [values[place] for place in places] if max(places) < len(values) else None


def on_host(tensor: Tensor) -> list[int] | None:
    """The values of an integer tensor in host memory, read without an operator, which would call
    modes of the program. None if it is not there, or not contiguous.
    """
    kind = _KINDS.get(tensor.dtype)
    count = tensor.numel()
    if kind is None or count > MOST or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return list((kind * count).from_address(_address(tensor))) if count else []


def flat(values: object) -> list[int] | None:
    """Python's integers in nested lists, in order; None if there is anything else."""
    if type(values) is int:
        return [values]
    if not isinstance(values, (list, tuple, range)):
        return None
    found: list[int] = []
    for value in values:
        part = flat(value)
        if part is None or len(found) + len(part) > MOST:
            return None
        found += part
    return found
