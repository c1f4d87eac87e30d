"""Gradients that the autograd engine adds up, in place while a dispatch mode is on, too."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ADD: Final = torch.ops.aten.add.Tensor
ADD_TO: Final = torch.ops.aten.add_.Tensor


def place_of_sum(first: Any, second: Any) -> int | None:
    """Which of two gradients of one node, the older one first, the engine adds the other one to
    while no mode is on (``torch/csrc/autograd/input_buffer.cpp``: ``accumulate``): one that
    nothing else holds. None if it makes a new tensor, and for every sum that is not the engine's.
    During the call of `ADD`.
    """
    if torch._C._current_autograd_node() is None or torch.is_grad_enabled():
        return None
    if type(first) is not torch.Tensor or type(second) is not torch.Tensor:
        return None
    if first.dtype is not second.dtype or first.shape != second.shape:
        return None
    if first.layout is not torch.strided or second.layout is not torch.strided:
        return None
    for which, gradient in enumerate((first, second)):
        if _owners(gradient) == owners_of_gradients()[which] and _is_dense(gradient):
            return which
    return None


class _Owners(TorchDispatchMode):
    """Counts the owners of gradients that only the engine holds, while the engine adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple[tuple[int, int], tuple[int, int]] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is ADD and torch._C._current_autograd_node() is not None:
            self.found = _owners(args[0]), _owners(args[1])
        return func(*args, **(kwargs or {}))


def _owners(tensor: Any) -> tuple[int, int]:
    """The number of the tensor's owners, and of its storage's."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are next to each other, in any order of its dimensions, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@functools.cache
def owners_of_gradients() -> tuple[tuple[int, int], tuple[int, int]]:
    """What `_owners` returns of gradients that the engine alone holds, with this torch: of the
    older and of the new one.
    """
    leaf = torch.zeros(2, requires_grad=True)
    with torch.enable_grad(), _Owners() as counted:
        torch.autograd.grad((leaf * 2 + leaf * 3).sum(), leaf)
    return counted.found or ((0, 0), (0, 0))
