"""Operators that CUDA has for a dtype and the CPU does not: computed in the nearest dtype.

What the CPU's kernel refuses (``"histogram_cpu" not implemented for 'Int'``) is computed in a
wider dtype that it takes, and the result is given the dtype and the strides that torch's own meta
kernel says it has. Nothing of that is charged to the device: on CUDA it is one kernel.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch

_LACKING: Final = re.compile(
    r"not implemented for '(?P<name>\w+)'"
    r"|(doesn't|does not) support (tensors of )?(data )?(type|dtype):? '?(?P<type>\w+)"
    r"|[Uu]nsupported (input |data )?d?type:? '?(?P<dtype>[\w.]+)"
)
"""What CPU kernels say of a dtype that they lack."""

_NAMES: Final = {
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "UInt16": torch.uint16,
    "UInt32": torch.uint32,
    "UInt64": torch.uint64,
    "ComplexHalf": torch.complex32,
    "Float8_e4m3fn": torch.float8_e4m3fn,
    "Float8_e5m2": torch.float8_e5m2,
}
"""As ``c10::toString`` writes them."""

_META: Final = torch.device("meta")
_SMALL: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2}
)


def wider(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtypes that hold every value of one, or nearly, from the nearest."""
    if dtype is torch.complex32:
        return (torch.complex64,)
    if dtype.is_complex:
        return (torch.complex128,) if dtype is torch.complex64 else ()
    if dtype.is_floating_point:
        if dtype.itemsize < 4:
            return (torch.float32, torch.float64)
        return (torch.float64,) if dtype is torch.float32 else ()
    if dtype is torch.bool:
        return (torch.uint8, torch.int64, torch.float32)
    return (torch.float64,) if dtype is torch.int64 else (torch.int64, torch.float64)


def lacking(error: Exception) -> torch.dtype | str | None:
    """The dtype that a CPU kernel says it lacks, its name where that is not known here; None for
    all other errors.
    """
    found = _LACKING.search(str(error))
    if found is None:
        return None
    name = found["name"] or found["type"] or found["dtype"] or ""
    name = name.removeprefix("torch.")
    direct = getattr(torch, name, None)
    return direct if isinstance(direct, torch.dtype) else _NAMES.get(name, name)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


# Not within the methods: a function that refers to itself is a cycle, and would keep the tensors
# alive until the garbage collector comes.
def _changed(
    value: Any, change: dict[torch.dtype, torch.dtype], copies: list[tuple[Any, Any]]
) -> Any:
    """``value`` with dtypes replaced; ``copies`` takes each tensor and its copy."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in change:
            return value
        made = value.to(change[value.dtype])
        copies.append((value, made))
        return made
    if isinstance(value, torch.dtype):
        return change.get(value, value)
    if type(value) in (list, tuple):
        return type(value)(_changed(item, change, copies) for item in value)
    return value


def _valueless(value: Any) -> Any:
    """``value`` with meta tensors in place of all others."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise NotImplementedError
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
    if type(value) in (list, tuple):
        return type(value)(_valueless(item) for item in value)
    return _META if isinstance(value, torch.device) else value


class Instead:
    """One call again, with one dtype replaced by another."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs

    def dtypes(self, lacked: torch.dtype | str) -> list[torch.dtype]:
        """The dtypes to replace: the one that is lacking, where an argument has it, else all
        small ones.
        """
        given = []
        for value in _flat((*self.args, *self.kwargs.values())):
            dtype = value.dtype if isinstance(value, torch.Tensor) else value
            if isinstance(dtype, torch.dtype) and dtype not in given:
                given.append(dtype)
        if lacked in given:
            related = {torch.complex32, torch.float16}
            more = related & set(given) if lacked in related else ()
            return [*{lacked, *more}]
        small = [dtype for dtype in given if dtype in _SMALL]
        return small or given

    def run(self, change: dict[torch.dtype, torch.dtype]) -> Any:
        """The result in the dtypes and strides that it is to have. Raises what the kernel raises
        of the other dtype too.
        """
        copies: list[tuple[Any, Any]] = []
        schema = self.func._schema
        expected = self._expected()
        args = tuple(_changed(value, change, copies) for value in self.args)
        kwargs = {name: _changed(value, change, copies) for name, value in self.kwargs.items()}
        found = self.func(*args, **kwargs)
        written: set[int] = set()
        for at, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[at] if at < len(self.args) else self.kwargs.get(argument.name)
                written.update(id(item) for item in _flat(value))
        back = {}
        for original, made in copies:
            if id(original) in written:
                if original.shape != made.shape:
                    original.resize_(made.shape)
                original.copy_(made)
                back[id(made)] = original
        narrow = {wide: small for small, wide in change.items()}
        return self._finished(found, expected, back, narrow)

    def _expected(self) -> Any:
        """The results without values; None where torch cannot tell."""
        try:
            return self.func(
                *(_valueless(value) for value in self.args),
                **{name: _valueless(value) for name, value in self.kwargs.items()},
            )
        except Exception:  # noqa: BLE001 - torch has no one error for that
            return None

    def _finished(self, found: Any, expected: Any, back: Any, narrow: Any) -> Any:
        if isinstance(found, torch.Tensor):
            if id(found) in back:
                return back[id(found)]
            if isinstance(expected, torch.Tensor) and expected.shape == found.shape:
                if found.layout is not torch.strided:
                    return found.to(expected.dtype)
                if found.dtype is expected.dtype and found.stride() == expected.stride():
                    return found
                made = torch.empty_strided(
                    expected.size(), expected.stride(), dtype=expected.dtype, device=found.device
                )
                return made.copy_(found)
            return found.to(narrow.get(found.dtype, found.dtype))
        if isinstance(found, (list, tuple)):
            others = expected if isinstance(expected, (list, tuple)) else [None] * len(found)
            return type(found)(
                self._finished(item, other, back, narrow)
                for item, other in zip(found, others, strict=True)
            )
        return found


def import_compiler() -> None:
    """Import what torch's shape rules import with the first of them that is written in Python.

    That takes 1.8 s of CPU time, and leaves a reference cycle with all frames that wait for it
    (``wrap`` in ``torch/fx/_symbolic_trace.py``): their tensors would be alive until the garbage
    collector comes. In a thread of its own there are none.
    """
    if "torch._dynamo" in sys.modules:
        return
    if getattr(torch.__spec__, "_initializing", False):
        # At the end of the import of torch, in a spawned process: no tensor is alive, and another
        # thread would wait for that import.
        importlib.import_module("torch._dynamo")
    else:
        thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
        thread.start()
        thread.join()


def instead(func: Any, error: Exception, *args: Any, **kwargs: Any) -> Any:
    """The results of a call that the CPU's kernel refused with ``error`` for its dtype. Raises
    ``error`` where it is another one, or no dtype helps.
    """
    lacked = lacking(error)
    if lacked is None or not isinstance(func, torch._ops.OpOverload):
        raise error
    import_compiler()
    call = Instead(func, args, kwargs)
    dtypes = call.dtypes(lacked)
    ladders = [wider(dtype) for dtype in dtypes]
    for rung in range(max(map(len, ladders), default=0)):
        change = {
            dtype: ladder[min(rung, len(ladder) - 1)]
            for dtype, ladder in zip(dtypes, ladders, strict=True)
            if ladder
        }
        try:
            return call.run(change)
        except (NotImplementedError, RuntimeError) as other:
            if lacking(other) is None:
                raise
    raise error
