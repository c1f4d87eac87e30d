"""NumPy views of pinned memory that notify the event source when they are used.

Imported when a program makes its first array over a pinned tensor, which needs NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from gpuprobe.hazards.footprint import Footprint, of_tensor

if TYPE_CHECKING:
    from torch import Tensor

_READS: Final = (
    *("all", "any", "argmax", "argmin", "argpartition", "argsort", "astype", "choose", "clip"),
    *("compress", "conj", "conjugate", "copy", "cumprod", "cumsum", "dot", "dump", "dumps"),
    *("flatten", "item", "max", "mean", "min", "nonzero", "prod", "repeat", "round"),
    *("searchsorted", "std", "sum", "take", "tobytes", "tofile", "tolist", "trace", "var"),
    *("__iter__", "__bool__", "__float__", "__int__", "__complex__", "__index__"),
    *("__contains__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"),
    *("__format__", "__str__", "__repr__"),
)
_WRITABLE: Final = 0x0001  # ``PyBUF_WRITABLE``
_WRITES: Final = ("fill", "partition", "put", "setfield", "sort")
_WRITING_FUNCTIONS: Final = frozenset({"copyto", "put", "place", "putmask", "fill_diagonal"})
_OF_SHAPE: Final = frozenset(
    {"zeros_like", "empty_like", "ones_like", "full_like", "shape", "ndim", "size"}
    | {"may_share_memory", "shares_memory", "result_type", "can_cast", "common_type"}
    | {"iscomplexobj", "isrealobj"}
)  # these read no values


class ArraySource(Protocol):
    """An event source that gets reports of uses through NumPy."""

    def host_bytes(self, tensor: Tensor, where: Footprint, write: bool, op: str) -> None:
        """Note that the host read or wrote bytes of a pinned tensor's storage."""


class PinnedArray(np.ndarray):
    """Reports uses through Python; uses by C code that takes the buffer are invisible."""

    _source: ArraySource
    _tensor: Tensor | None = None

    def __array_finalize__(self, other: object) -> None:
        # Views of a traced array are traced; copies have their own memory.
        if isinstance(other, PinnedArray) and other._tensor is not None:
            low, high = _bounds(self)
            first, last = _bounds(other)
            if first <= low and high <= last:
                self._source, self._tensor = other._source, other._tensor

    def notify(self, write: bool, op: str) -> None:
        """Report a use of this array, if it is still over pinned memory."""
        if self._tensor is None:
            return
        low, _ = _bounds(self)
        start = low - self._tensor.untyped_storage().data_ptr()
        where = of_tensor(start, (*self.shape, self.itemsize), (*self.strides, 1), 1)
        if where is not None:
            self._source.host_bytes(self._tensor, where, write, op)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, PinnedArray) and found._tensor is not None:
            return found  # a view: nothing is read yet
        self.notify(False, "numpy index")
        return _plain(found)

    def __setitem__(self, key: Any, value: object) -> None:
        part = super().__getitem__(key)
        view = isinstance(part, PinnedArray) and part._tensor is not None
        (part if view else self).notify(True, "numpy assignment")
        _plain(self)[key] = _plain(value)

    def __buffer__(self, flags: int) -> memoryview:
        """Called since Python 3.12 when C code takes the memory (``readinto``, ``memoryview``; PEP
        688). A request for a writable buffer counts as a write.
        """
        self.notify(bool(flags & _WRITABLE), "C code")
        return memoryview(_plain(self))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = f"numpy {ufunc.__name__}"
        outputs = kwargs.get("out", ())
        for item in inputs:
            _notify(item, method == "at" and item is inputs[0], name)
        for item in outputs:
            _notify(item, True, name)
        if outputs:
            kwargs["out"] = _plain(tuple(outputs))
        result = getattr(ufunc, method)(*_plain(inputs), **kwargs)
        # ``a += 1`` binds the name to the result: the traced array, not the plain one.
        return outputs[0] if len(outputs) == 1 else result

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name, out = func.__name__, kwargs.get("out")
        given = [item for item in _flat((*args, *kwargs.values())) if item is not out]
        result = func(*_plain(args), **{key: _plain(value) for key, value in kwargs.items()})
        if out is not None:
            result = out
        views = _views(given, result)
        in_place = name in _WRITING_FUNCTIONS or (
            name == "nan_to_num" and not kwargs.get("copy", True)
        )
        if (views is None or in_place) and name not in _OF_SHAPE:
            for at, item in enumerate(given):
                _notify(item, in_place and at == 0, f"numpy {name}")
        _notify(out, True, f"numpy {name}")
        return result if views is None else views


def _reporting(name: str, write: bool) -> Callable[..., Any]:
    original = getattr(np.ndarray, name)

    def method(self: PinnedArray, *args: Any, **kwargs: Any) -> Any:
        self.notify(write, f"numpy {name.strip('_')}")
        return original(_plain(self), *args, **kwargs)

    method.__name__ = name
    return method


for _name in _READS + _WRITES:
    setattr(PinnedArray, _name, _reporting(_name, _name in _WRITES))


class _Flat:
    """``array.flat``: an iterator whose elements can be read and assigned by position."""

    def __init__(self, array: PinnedArray) -> None:
        self._array = array
        self._plain = _plain(array).flat

    def __iter__(self) -> _Flat:
        return self

    def __next__(self) -> Any:
        self._array.notify(False, "numpy flat")
        return next(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def __getitem__(self, key: object) -> Any:
        self._array.notify(False, "numpy flat")
        return self._plain[key]

    def __setitem__(self, key: object, value: object) -> None:
        self._array.notify(True, "numpy flat")
        self._plain[key] = _plain(value)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._array.notify(False, "numpy flat")
        return self._plain.__array__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _set_flat(array: PinnedArray, value: object) -> None:
    array.notify(True, "numpy flat")
    _plain(array).flat = _plain(value)


setattr(PinnedArray, "flat", property(_Flat, _set_flat))  # noqa: B010 - read-only in the stubs


def traced(source: ArraySource, tensor: Tensor, array: Any) -> PinnedArray:
    """``array`` as a subclass that reports reads and writes of its part of ``tensor``'s memory, as
    long as the array or one of its views exists. Taking the array itself reads nothing.
    """
    made: PinnedArray = array.view(PinnedArray)
    made._source, made._tensor = source, tensor
    return made


def origin(array: object) -> tuple[Tensor, int] | None:
    """The tensor whose memory an array of `traced` shares, and the array's first byte in the
    tensor's storage; None for all other objects.
    """
    if not isinstance(array, PinnedArray) or array._tensor is None:
        return None
    tensor = array._tensor
    return tensor, _bounds(array)[0] - tensor.untyped_storage().data_ptr()


def retraced(original: object, array: Any, op: str) -> Any:
    """The result of ``op`` on ``original``: traced as well if it is a view. If it is a copy, the
    original is read.
    """
    view = _views([original], array)
    if view is not None:
        return view
    if array is not original:
        for item in _flat([original]):
            _notify(item, False, op)
    return array


def _notify(item: object, write: bool, op: str) -> None:
    if isinstance(item, PinnedArray):
        item.notify(write, op)


def _plain(value: Any) -> Any:
    if isinstance(value, PinnedArray):
        return value.view(np.ndarray)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _views(given: Any, result: Any) -> Any:
    """``result`` with its views of traced arrays traced as well; None if it has none."""
    if isinstance(result, (list, tuple)):
        views = [_views(given, item) for item in result]
        if all(view is None for view in views):
            return None
        both = zip(views, result, strict=True)
        return type(result)([item if view is None else view for view, item in both])
    if type(result) is not np.ndarray:
        return None
    low, high = _bounds(result)
    for item in given:
        if isinstance(item, PinnedArray) and item._tensor is not None:
            first, last = _bounds(item)
            if first <= low < high <= last:
                return traced(item._source, item._tensor, result)
    return None


def _bounds(array: Any) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last."""
    low = high = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        if size == 0:
            return low, low
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high + array.itemsize
