"""Gradients that the autograd engine adds up, in place where operators are watched, too."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpuprobe.code_origin import PACKAGE
from gpuprobe.patching import original_of
from gpuprobe.torch_support.callers import TORCH

ADD: Final = torch.ops.aten.add.Tensor
ADD_TO: Final = torch.ops.aten.add_.Tensor
_run_backward: Final = original_of(torch.autograd.graph._engine_run_backward)
_RUN: Final = _run_backward.__code__
"""The last Python code before the engine's, where that has no thread of its own."""
_BETWEEN: Final = (PACKAGE, f"{TORCH}_ops.py")
"""Files whose functions call operators in the engine's place."""


def called_by_engine() -> bool:
    """Whether C++ code of a backward pass called the operator at hand, and no Python code: a hook
    or a function of the program's could hold the tensors. On a GPU that is in a thread of the
    engine's own.
    """
    if torch._C._current_autograd_node() is None:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame is None or frame.f_code is _RUN


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


def owners_below_modes(
    handled_by: Callable[[Any], AbstractContextManager[None]],
) -> tuple[int, int]:
    """What `_owners` returns, in a handler of `gpuprobe.torch_support.operator_calls`, of a
    gradient that the engine alone holds and whose storage Python knows: the engine takes that for
    an owner. ``handled_by`` is the function of that module.

    It runs a backward pass, so only within one of the program's: the first in a process starts the
    engine's threads, which initialises CUDA and makes autograd unusable in forked processes.
    """
    found: list[tuple[int, int]] = []
    known: list[Any] = []

    def note(op: Any, args: Any, kwargs: Any, below: Any) -> Any:
        if op is ADD and not torch.is_grad_enabled():  # not the sum of the forward pass
            found.append(_owners(args[0]))
        result = below(op, args, kwargs)
        if isinstance(result, torch.Tensor):
            known.append(weakref.ref(result.untyped_storage()))
        return result

    with (
        handled_by(note),
        torch.inference_mode(False),
        torch.enable_grad(),
        _disable_current_modes(),
    ):
        leaf = torch.zeros(2, requires_grad=True, device="cpu")
        total = (leaf * 2 + leaf * 3).sum()
        # As `torch.autograd.grad` calls it: no watch is to take it for a pass of the program's.
        _run_backward(
            (total,), (torch.ones_like(total),), False, False, (leaf,), False, accumulate_grad=False
        )
    return found[0] if found else (0, 0)


@functools.cache
def _makes_new(op: Any) -> bool:
    """Whether an operator returns one tensor, that is no view and none of its arguments."""
    returns = op._schema.returns
    return len(returns) == 1 and returns[0].alias_info is None


class EngineSums(threading.local):
    """Tells the engine's sums of gradients from those of a node's own formula, below modes.

    The older gradient of a sum was made by another node, or the node hands two gradients to one
    consumer.
    """

    _alone: tuple[int, int] | None = None

    def __init__(self, handled_by: Callable[[Any], AbstractContextManager[None]]) -> None:
        self._handled_by = handled_by
        self._node: tuple[int, int] | None = None
        self._made: set[int] = set()  # addresses of what the node has made
        self._measures = False

    def ran(self, op: Any, result: Any) -> None:
        """An operator has run while a node is at work."""
        if not _makes_new(op) or type(result) is not torch.Tensor:
            return
        identity = _identity(torch._C._current_autograd_node())
        if identity != self._node:
            self._node = identity
            self._made.clear()
        if result.layout is torch.strided:
            self._made.add(result.data_ptr())

    def in_place(self, first: Any, second: Any) -> bool:
        """Whether the engine adds ``second``, the younger of two gradients of one node, to
        ``first`` where neither is watched (``torch/csrc/autograd/input_buffer.cpp``:
        ``accumulate``): if nothing else holds that. False if it makes a new tensor, and for every
        sum that is not the engine's. To be called in a call of `ADD`.
        """
        if not called_by_engine() or torch.is_grad_enabled():
            return False
        if type(first) is not torch.Tensor or type(second) is not torch.Tensor:
            return False
        if first.dtype is not second.dtype or first.shape != second.shape:
            return False
        if first.layout is not torch.strided or second.layout is not torch.strided:
            return False
        if _owners(first) != self._owners_alone() or not _is_dense(first):
            return False
        node = torch._C._current_autograd_node()
        if _identity(node) != self._node or first.data_ptr() not in self._made:
            return True
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        return len(set(edges)) < len(edges)

    def _owners_alone(self) -> tuple[int, int]:
        """The owners of a gradient that only the engine holds; (0, 0) while that is measured."""
        if EngineSums._alone is None:
            if self._measures:
                return 0, 0
            kept = self._node, self._made
            self._node, self._made, self._measures = None, set(), True
            try:
                EngineSums._alone = owners_below_modes(self._handled_by)
            finally:
                (self._node, self._made), self._measures = kept, False
        return EngineSums._alone


def _identity(node: Any) -> tuple[int, int]:
    return id(node), node._sequence_nr()
