"""Formulas of the backward pass in place, where they are without a dispatch mode.

While any dispatch mode is on, torch's engine sums gradients out of place, and some formulas of
derivatives use operators that return new tensors, as either could be a tensor subclass
(``torch/csrc/autograd/input_buffer.cpp``, and ``areAnyTensorSubclassLike`` in
``torch/csrc/autograd/FunctionsManual.cpp``). gpuprobe's modes must not change what is allocated, so
these calls become those that are made without them.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from gpuprobe.torch_support.accumulation import ADD, ADD_TO, called_by_engine, sums_in_place

_ATEN: Final = torch.ops.aten
_IN_PLACE: Final[dict[Any, Any]] = {
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.scatter.value: _ATEN.scatter_.value,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
    _ATEN.index_add.default: _ATEN.index_add_.default,
    _ATEN.index_fill.int_Scalar: _ATEN.index_fill_.int_Scalar,
    _ATEN.put.default: _ATEN.put_.default,
    _ATEN.index_put.default: _ATEN._index_put_impl_.default,
}
_ZEROS: Final = frozenset(
    {_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default, _ATEN.zero_.default}
)


class _Made(threading.local):
    """The zeros that a formula made last in this thread: their storage, and the node."""

    zeros: tuple[int, int] | None = None


class Formulas:
    """What the mode does with operators that formulas call."""

    def __init__(self) -> None:
        self._made = _Made()
        self._functions = frozenset({ADD, *_IN_PLACE, *_ZEROS})

    def concern(self, func: Any) -> bool:
        """Whether calls of an operator may be a formula's."""
        return func in self._functions

    def as_without_a_mode(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The call that is made without a mode. To be called by the mode's handler."""
        if func is ADD:
            return (ADD_TO if not kwargs and sums_in_place(*args) else func), args, kwargs
        made = self._made.zeros
        if func in _ZEROS or made is None or made != _key(args[0]) or not called_by_engine():
            return func, args, kwargs
        if func is _ATEN.index_put.default:
            args = (*args, False)[:4] if len(args) < 4 else args
            args = (*args, True)  # indices that the forward pass has checked
        return _IN_PLACE[func], args, kwargs

    def ran(self, func: Any, result: Any) -> None:
        """An operator that `concern` selected has run. To be called by the mode's handler."""
        if func in _ZEROS:
            self._made.zeros = _key(result) if called_by_engine() else None
        elif func is not ADD and func is not ADD_TO:
            self._made.zeros = None


def _key(tensor: Any) -> tuple[int, int] | None:
    """A storage and the node that runs; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    if node is None or type(tensor) is not torch.Tensor or torch.is_grad_enabled():
        return None
    return tensor.untyped_storage()._cdata, node._sequence_nr()
