"""Shapes of results, remembered: much of torch's rules for them is Python code, and programs call
the same operators on the same shapes again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from gpuprobe.torch_support.tensors import is_meta, storage_key, tensors_in
from gpuprobe.virtual.dispatch.facts import OperatorFacts

_Tensor = torch.Tensor
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_NUMBERS: Final = (int, float, bool, complex)
_MOST: Final = 50_000  # entries; all are dropped where a program has more different calls
_empty_strided = torch.empty_strided
# Instead of a plan: the result is the first argument; there is none; it has to be made anew.
_ARGUMENT, _NO_RESULT, _ANEW = (object() for _ in range(3))


class _NotRemembered(Exception):
    """A call whose result does not depend on what a key can hold."""


class ShapeCache:
    """Results of operators that make new tensors, or write to their first argument."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}

    def result(
        self,
        facts: OperatorFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
    ) -> Any:
        """What ``run`` returns: tensors without memory, of which only the shapes matter."""
        if not facts.remembered:
            return run()
        key: list[Any] = [func, torch.get_default_dtype()]
        try:
            for value in args:
                _add(key, value, facts.pointwise)
            for name, value in kwargs.items():
                key.append(name)
                _add(key, value, facts.pointwise)
            whole = tuple(key)
            plan = self._found.get(whole)
        except (_NotRemembered, TypeError):  # TypeError: no hash
            return run()
        if plan is not None:
            return run() if plan is _ANEW else _made(plan, args)
        result = run()
        if len(self._found) >= _MOST:
            self._found.clear()
        self._found[whole] = _plan(facts, args, result) or _ANEW
        return result


def _add(key: list[Any], value: Any, pointwise: bool) -> None:
    kind = type(value)
    if kind in _PLAIN:
        if not is_meta(value):
            if value.layout is not torch.strided:
                raise _NotRemembered
            if not value.dim():
                # A number that torch made a tensor of counts less in what type the result has.
                key.append(torch.result_type(value, _FLAT))
                key.append(torch.result_type(value, _WHOLE))
        elif value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise _NotRemembered
        key.append(value.dtype)
        key.append(value.size())
        key.append(value.stride())
    elif kind is list or kind is tuple:
        key.append(len(value))
        for item in value:
            _add(key, item, pointwise)
    elif kind in _NUMBERS:
        key.append(kind)
        if not pointwise:
            key.append(value)
    elif isinstance(value, (_Tensor, torch.Generator)):
        raise _NotRemembered
    else:
        key.append(kind)
        key.append(value)


# Of one dimension: types that a number of a higher kind changes, and by which it is told apart.
_FLAT: Final = torch.empty(1, dtype=torch.float16, device="meta")
_WHOLE: Final = torch.empty(1, dtype=torch.int8, device="meta")


def _plan(facts: OperatorFacts, args: tuple[Any, ...], result: Any) -> Any:
    """How to make the result again; None where it is not simply new memory."""
    if facts.writes:
        return _NO_RESULT if result is None else _ARGUMENT
    if type(result) is _Tensor:
        return _new(args, result)
    if type(result) not in (list, tuple):
        return None
    parts = []
    seen = set()
    for item in result:
        part = None if type(item) is not _Tensor else _new(args, item)
        if part is None or storage_key(item) in seen:
            return None
        seen.add(storage_key(item))
        parts.append(part)
    return type(result), parts


def _new(args: tuple[Any, ...], tensor: Any) -> Any:
    if not is_meta(tensor) or tensor.layout is not torch.strided or tensor.storage_offset():
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return None
    if any(storage_key(item) == storage_key(tensor) for item in tensors_in(args)):
        return None
    size, stride, dtype = tuple(tensor.size()), tensor.stride(), tensor.dtype
    again = _empty_strided(size, stride, dtype=dtype, device="meta")
    if again.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
        return None
    return (size, stride, dtype)


def _made(plan: Any, args: tuple[Any, ...]) -> Any:
    if plan is _ARGUMENT or plan is _NO_RESULT:
        return args[0] if plan is _ARGUMENT else None
    if len(plan) == 3:
        size, stride, dtype = plan
        return _empty_strided(size, stride, dtype=dtype, device="meta")
    kind, parts = plan
    return kind(
        _empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in parts
    )
