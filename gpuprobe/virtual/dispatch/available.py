"""Whether a call's results can fit on a device at all, found out before the host computes them.

With ``compute="real"`` a result is ordinary host memory, made first and charged to the device
then. Where the device is the smaller of the two, the host must not be asked for what no device
would give: it may refuse in words of its own, or be brought to its knees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.torch_support.tensors import storage_key, tensors_in
from gpuprobe.virtual.device.virtual_device import VirtualDevice
from gpuprobe.virtual.values import without_values

HOST_FULL: Final = "you tried to allocate"
"""In torch's error for host memory that it did not get: ``alloc_cpu.cpp`` and
``CPUAllocator.cpp`` in ``c10/core``."""

_WIDEST: Final = 16  # bytes of one element: complex128
_META = torch.device("meta")


def may_not_fit(device: VirtualDevice, args: tuple[Any, ...]) -> bool:
    """Whether results of about the size of the first argument (a tensor, or a shape) may be more
    than the device has left. Cheap, and never says no to such a size that is.
    """
    first = args[0] if args else None
    if isinstance(first, torch.Tensor):
        count = first.numel()
    elif isinstance(first, (list, tuple)) and all(type(length) is int for length in first):
        count = math.prod(first)
    else:
        return False
    return count * _WIDEST > device.available


def require(
    device: VirtualDevice,
    stream: int,
    run: Callable[..., Any],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raise torch.OutOfMemoryError, as an allocation of them does, where the results of
    ``run(func, args, kwargs)`` take more than the device has left. Nothing is computed.
    """
    sizes = _sizes(run, func, args, kwargs)
    if sum(sizes) <= device.available:
        return
    held = []
    try:
        for nbytes in sizes:
            held.append(device.malloc(nbytes, stream))
    finally:
        for block in reversed(held):
            device.free(block)


def _sizes(
    run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[int]:
    """Bytes of each storage that the call would make; none where only values tell."""
    given = tuple(_valueless(value) for value in args)
    named = {name: _valueless(value) for name, value in kwargs.items() if name != "generator"}
    try:
        result = run(func, given, named)
    except Exception:  # noqa: BLE001 - no shape rule, for which torch has no one error
        return []
    known = {storage_key(tensor) for tensor in tensors_in((*given, *named.values()))}
    sizes = {}
    for tensor in tensors_in(result):
        key = storage_key(tensor)
        if key not in known and key:
            sizes[key] = int(tensor.untyped_storage().nbytes())
    return [nbytes for nbytes in sizes.values() if nbytes]


def _valueless(value: Any) -> Any:
    return _META if isinstance(value, torch.device) else without_values(value)
