"""Uses of pinned and device memory outside of operators: NumPy, pickling, printing."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from gpuprobe.hazard_watch.device import PINNED, Cuda
from gpuprobe.patching import Patches
from gpuprobe.torch_support.tensors import is_meta


class HostSource(Protocol):
    """The part of an event source that gets reports of the host's accesses."""

    machine: Cuda

    def host_use(self, tensor: Tensor, write: bool, op: str) -> None:
        """The host touched a pinned tensor."""

    def device_read(self, tensor: Tensor, index: int, op: str) -> None:
        """The host read a device's tensor, and waited for it."""

    def constructed(self, made: Tensor, data: object) -> None:
        """The host created a tensor from ``data``."""


class _ThreadState(threading.local):
    """What this thread is doing."""

    assigning = False  # a Python number to part of a tensor
    constructing = False  # a tensor, in `torch.tensor` or a similar function


_now = _ThreadState()


def is_number(source: Tensor) -> bool:
    """Whether the source of a copy is a number that is assigned to one element: torch makes a host
    tensor from it and copies that, and the host waits for the copy (``valueToTensor`` and
    ``copy_to`` in ``python_variable_indexing.cpp``). For several elements it launches a kernel.
    """
    return _now.assigning and not source.dim()


def is_constructed() -> bool:
    """Whether `torch.tensor` or a similar function is creating a tensor."""
    return _now.constructing


def install(source: HostSource, patches: Patches) -> None:
    """Report such uses to ``source`` until ``patches`` are undone."""
    # torch collects, at their first use, the functions whose tensors are on the default device:
    # the original ones are those that it passes to the mode of that device.
    _device_constructors()
    # ``__array__``: NumPy returns a plain array, which cannot be traced further.
    for name, op, write in (
        ("__array__", "conversion to NumPy", False),
        ("__reduce_ex__", "pickling", False),
        ("__repr__", "print", False),
        ("apply_", "apply_", True),
        ("map_", "map_", True),
        ("map2_", "map2_", True),
    ):
        patches.set(torch.Tensor, name, _reporting(source, name, op, write))
    patches.set(torch.Tensor, "__setitem__", _assigning(torch.Tensor.__setitem__))
    for name in ("from_numpy", "as_tensor", "asarray", "frombuffer", "tensor"):
        patches.set(torch, name, _aliasing(source, getattr(torch, name)))
    patches.set(torch.Tensor, "new_tensor", _constructing(source))
    numpy = sys.modules.get("numpy")  # already imported if torch can make arrays
    if numpy is not None:
        for name in ("array", "asarray", "ascontiguousarray", "frombuffer"):
            patches.set(numpy, name, _viewing(getattr(numpy, name)))


def _reporting(source: HostSource, name: str, op: str, write: bool) -> Callable[..., Any]:
    original = getattr(torch.Tensor, name)

    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        place = source.machine.place_of(tensor)
        if place == PINNED:
            source.host_use(tensor, write, op)
        elif place >= 0:
            source.device_read(tensor, place, op)
        return original(tensor, *args, **kwargs)

    method.__name__ = name
    return method


def _assigning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def setitem(tensor: Tensor, key: object, value: object) -> None:
        before = _now.assigning
        _now.assigning = isinstance(value, (bool, int, float, complex))
        try:
            original(tensor, key, value)
        finally:
            _now.assigning = before

    return setitem


def _pinned_array() -> Any:
    """The module of traced arrays, None before the first one was created."""
    return sys.modules.get("gpuprobe.hazard_watch.pinned_array")


def _aliasing(source: HostSource, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a tensor over a traced array share the memory of the pinned tensor."""
    machine = source.machine

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        before, _now.constructing = _now.constructing, True
        try:
            made = original(data, *args, **kwargs)
        finally:
            _now.constructing = before
        source.constructed(made, data)
        arrays = _pinned_array()
        found = None if arrays is None else arrays.origin(data)
        if found is None or not isinstance(made, torch.Tensor) or is_meta(made):
            return made
        storage = found[0].untyped_storage()
        item = made.element_size()
        offset = -1 if machine.place_of(made) >= 0 else _address(made) - storage.data_ptr()
        if not 0 <= offset < storage.nbytes() or offset % item:
            data.notify(False, "conversion to a tensor")  # copied
            return made
        alias = torch.empty(0, dtype=made.dtype)
        alias.set_(storage, offset // item, made.shape, made.stride())
        return alias

    return make


def _constructing(source: HostSource) -> Callable[..., Any]:
    original = torch.Tensor.new_tensor

    @functools.wraps(original)
    def new_tensor(tensor: Tensor, data: object, *args: Any, **kwargs: Any) -> Tensor:
        before, _now.constructing = _now.constructing, True
        try:
            made = original(tensor, data, *args, **kwargs)
        finally:
            _now.constructing = before
        source.constructed(made, data)
        return made

    return new_tensor


def _viewing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Trace the plain array that NumPy makes from a traced one, over the same memory."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        call = _call
        own = make.__code__
        if isinstance(data, torch.Tensor):
            # NumPy's C code warns about torch's ``__array__`` at the line of the innermost frame,
            # which must be the program's.
            frame = sys._getframe(1)
            code = _call.__code__.replace(
                co_filename=frame.f_code.co_filename, co_firstlineno=frame.f_lineno
            )
            call = FunctionType(code, frame.f_globals)
            del frame
        try:
            made = call(original, data, args, kwargs)
        except BaseException as error:
            entry = error.__traceback__
            while entry is not None and entry.tb_frame.f_code in (own, call.__code__):
                entry = entry.tb_next
            error.__traceback__ = entry
            raise
        arrays = _pinned_array()
        return made if arrays is None else arrays.retraced(data, made, "conversion to NumPy")

    return make


# On one line, so that a warning has the line of the caller.
def _call(original: Any, data: Any, args: Any, kwargs: Any) -> Any: return original(data, *args, **kwargs)  # noqa: E501  # fmt: skip


def _address(tensor: Tensor) -> int:
    start = tensor.untyped_storage().data_ptr()
    return int(start + tensor.storage_offset() * tensor.element_size())
