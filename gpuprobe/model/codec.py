"""To plain JSON values and back, for every dataclass of the model.

The rules, so that a file can be read without this package:

* a dataclass is an object with its field names; fields equal to their default are left out;
* an enum is its value; a tuple is an array; a dict with enum keys has their values as keys;
* `Unavailable` is ``{"unavailable": reason, "status": status}``;
* a reader ignores keys it does not know (a newer minor version only adds keys).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from gpuprobe.errors import DataError
from gpuprobe.model.values import Unavailable

__all__ = ["from_plain", "to_plain"]

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Turn a model value into what ``json.dumps`` takes.

    Raises TypeError for a value that is not part of the model.
    """
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Unavailable):
        return {"unavailable": value.reason, "status": value.status.value}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(to_plain(key)): to_plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        plain = {}
        for name, default in _fields(value.__class__):
            item = getattr(value, name)
            if default is _REQUIRED or item != default:
                plain[name] = to_plain(item)
        return plain
    raise TypeError(f"not a model value: {type(value).__qualname__}")


def from_plain(cls: type[T], plain: object) -> T:
    """Rebuild a ``cls`` from what `to_plain` made of it.

    Raises DataError where the data does not have the shape of ``cls``.
    """
    try:
        return typing.cast(T, _decoder(typing.cast(Any, cls))(plain))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"not a valid {cls.__name__}: {error}") from error


_REQUIRED: Any = object()


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, Any], ...]:
    """(name, default) of every init field; `_REQUIRED` where there is no default."""
    found = []
    for f in dataclasses.fields(cls):
        if not f.init:
            continue
        if f.default is not dataclasses.MISSING:
            default = f.default
        elif f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        else:
            default = _REQUIRED
        found.append((f.name, default))
    return tuple(found)


@functools.cache
def _decoder(hint: Any) -> Callable[[Any], Any]:
    """A function that turns plain data into a value of the type ``hint``."""
    if isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(typing.get_args(hint))
    if origin is tuple:
        return _tuple_decoder(typing.get_args(hint))
    if origin is list:
        item = _decoder(typing.get_args(hint)[0])
        return lambda plain: [item(p) for p in _expect(plain, list)]
    if origin is dict:
        key, item = (_decoder(arg) for arg in typing.get_args(hint))
        as_key = int if typing.get_args(hint)[0] is int else key
        return lambda plain: {as_key(k): item(v) for k, v in _expect(plain, dict).items()}
    if hint is None or hint is type(None):
        return lambda plain: _expect(plain, type(None))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if hint is Unavailable:
        return _decode_unavailable
    origin_class = origin if origin is not None else hint
    if dataclasses.is_dataclass(origin_class):
        return _dataclass_decoder(origin_class, hint)
    if hint is float:
        return lambda plain: float(_expect(plain, (int, float)))
    if hint in (int, str, bool):
        return lambda plain: _expect(plain, hint)
    raise TypeError(f"the codec does not know {hint!r}")


def _expect(plain: Any, kind: Any) -> Any:
    if not isinstance(plain, kind) or (kind is int and isinstance(plain, bool)):
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(f"expected {name}, found {type(plain).__name__}")
    return plain


def _decode_unavailable(plain: Any) -> Unavailable:
    from gpuprobe.model.values import ReadStatus

    return Unavailable(_expect(plain["unavailable"], str), ReadStatus(plain["status"]))


def _union_decoder(arms: tuple[Any, ...]) -> Callable[[Any], Any]:
    """`Unavailable` and None are told apart by shape; of the others the first that fits."""
    others = [_decoder(a) for a in arms if a is not Unavailable and a is not type(None)]
    with_none, with_missing = type(None) in arms, Unavailable in arms

    def decode(plain: Any) -> Any:
        if plain is None and with_none:
            return None
        if with_missing and isinstance(plain, dict) and "unavailable" in plain:
            return _decode_unavailable(plain)
        problem: Exception = ValueError(f"unexpected {type(plain).__name__}")
        for decoder in others:
            try:
                return decoder(plain)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                problem = error
        raise problem

    return decode


def _tuple_decoder(args: tuple[Any, ...]) -> Callable[[Any], Any]:
    if len(args) == 2 and args[1] is Ellipsis:
        item = _decoder(args[0])
        return lambda plain: tuple(item(p) for p in _expect(plain, list))
    items = [_decoder(arg) for arg in args]

    def decode(plain: Any) -> Any:
        if len(_expect(plain, list)) != len(items):
            raise ValueError(f"expected {len(items)} items, found {len(plain)}")
        return tuple(d(p) for d, p in zip(items, plain, strict=True))

    return decode


def _dataclass_decoder(cls: Any, hint: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(cls)
    parameters = getattr(cls, "__parameters__", ())
    bound = dict(zip(parameters, typing.get_args(hint), strict=False))
    decoders: dict[str, Callable[[Any], Any]] = {}

    def decode(plain: Any) -> Any:
        if not decoders:  # on first use, so that recursive types work
            for name, _ in _fields(cls):
                field_hint = hints[name]
                if parameters:
                    field_hint = _substitute(field_hint, bound)
                decoders[name] = _decoder(field_hint)
        known = _expect(plain, dict)
        return cls(**{name: decoders[name](known[name]) for name in decoders if name in known})

    return decode


def _substitute(hint: Any, bound: dict[Any, Any]) -> Any:
    """Replace type variables in ``hint`` by what they are bound to."""
    if isinstance(hint, TypeVar):
        return bound.get(hint, hint)
    args = typing.get_args(hint)
    if not args:
        return hint
    new = tuple(_substitute(a, bound) for a in args)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, new)
    return origin[new] if origin is not None else hint
