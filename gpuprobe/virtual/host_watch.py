"""Uses of pinned and device memory that no operator shows: NumPy, pickling, printing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpuprobe.virtual.machine import PINNED, is_meta
from gpuprobe.virtual.patches import Patches
from gpuprobe.virtual.pinned_array import origin

__all__ = ["install"]


def install(feed: Any, patches: Patches) -> None:
    """Tell ``feed`` of them until ``patches`` are undone."""
    machine = feed.machine

    def read(tensor: Any, op: str) -> None:
        place = machine.place_of(tensor)
        if place == PINNED:
            feed.host_use(tensor, False, op)
        elif place >= 0:
            feed.device_read(tensor, place, op)

    def reading(name: str, op: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            read(tensor, op)
            return original(tensor, *args, **kwargs)

        method.__name__ = name
        return method

    # ``__array__``: what NumPy makes of it is a plain array that cannot be followed further.
    for name, op in (
        ("__array__", "conversion to NumPy"),
        ("__reduce_ex__", "pickling"),
        ("__repr__", "print"),
    ):
        patches.set(torch.Tensor, name, reading(name, op))

    def aliasing(original: Callable[..., Any]) -> Callable[..., Any]:
        """The tensor over a watched array shares the memory of the pinned one."""

        def make(data: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(data, *args, **kwargs)
            found = origin(data)
            if found is None or not isinstance(made, torch.Tensor) or is_meta(made):
                return made
            tensor, offset = found
            start = tensor.untyped_storage().data_ptr() + offset
            item = made.element_size()
            if machine.place_of(made) >= 0 or _address(made) != start or offset % item:
                return made  # a copy
            alias = torch.empty(0, dtype=made.dtype)
            alias.set_(tensor.untyped_storage(), offset // item, made.shape, made.stride())
            return alias

        return make

    for module, name in ((torch, "from_numpy"), (torch, "as_tensor"), (torch, "asarray")):
        patches.set(module, name, aliasing(getattr(module, name)))


def _address(tensor: Any) -> int:
    start = tensor.untyped_storage().data_ptr()
    return int(start + tensor.storage_offset() * tensor.element_size())
