"""To plain JSON values and back, for every dataclass of the model.

The rules, so that a file can be read without this package:

* a dataclass is an object with its field names; fields equal to their default are left out;
* an enum is its value; a tuple is an array; a dict with enum keys has their values as keys;
* `Unavailable` is ``{"unavailable": reason, "status": status}``;
* a float that is not finite is ``{"float": "inf"}``: JSON has no other word for it;
* a finding has every key, and is as in every other document (`findings.to_document`);
* a reader ignores keys it does not know (a newer minor version only adds keys).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from gpuprobe.errors import DataError
from gpuprobe.model.findings import Finding, to_document
from gpuprobe.model.values import Unavailable

__all__ = ["from_plain", "to_plain"]

T = TypeVar("T")

# What a decoder may raise on data of the wrong shape: float() of a huge integer overflows.
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)


def to_plain(value: Any) -> Any:
    """Turn a model value into what ``json.dumps`` takes.

    Raises TypeError for a value that is not part of the model.
    """
    kind = value.__class__
    encode = _ENCODERS.get(kind)
    if encode is None:
        encode = _ENCODERS[kind] = _encoder(kind)
    return encode(value)


def from_plain(cls: type[T], plain: object) -> T:
    """Rebuild a ``cls`` from what `to_plain` made of it.

    Raises DataError where the data does not have the shape of ``cls``.
    """
    try:
        return typing.cast(T, _decoder(typing.cast(Any, cls))(plain))
    except KeyError as error:
        raise DataError(f"not a valid {cls.__name__}: {error} is missing") from error
    except _MALFORMED as error:
        raise DataError(f"not a valid {cls.__name__}: {error}") from error


_REQUIRED: Any = object()


def _encode_float(value: float) -> Any:
    """JSON has no word for what is not finite: ``{"float": "inf"}``."""
    return value if math.isfinite(value) else {"float": repr(value)}


# type -> how it is encoded. Filled on first use; a step has some fifty objects of ten classes
# and is written while the program waits.
_ENCODERS: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: value,
    int: lambda value: value,
    str: lambda value: value,
    type(None): lambda value: value,
    float: _encode_float,
    Unavailable: lambda value: {"unavailable": value.reason, "status": value.status.value},
    Finding: to_document,
    dict: lambda value: {str(to_plain(key)): to_plain(item) for key, item in value.items()},
    list: lambda value: [to_plain(item) for item in value],
    tuple: lambda value: [to_plain(item) for item in value],
}


def _encoder(kind: type) -> Callable[[Any], Any]:
    if issubclass(kind, Enum):
        return lambda value: value.value
    if dataclasses.is_dataclass(kind):
        return _dataclass_encoder(kind)
    for base in (bool, int, float, str, tuple, list, dict):
        if issubclass(kind, base):  # a subclass, such as a named tuple
            return lambda value: _ENCODERS[base](base(value))
    raise TypeError(f"not a model value: {kind.__qualname__}")


def _dataclass_encoder(cls: type) -> Callable[[Any], Any]:
    fields = _fields(cls)
    names = [name for name, _ in fields]
    defaults = [default for _, default in fields]
    if len(names) < 2:  # attrgetter of one name returns no tuple
        get: Callable[[Any], tuple[Any, ...]] = lambda value: tuple(  # noqa: E731
            getattr(value, name) for name in names
        )
    else:
        get = operator.attrgetter(*names)
    encoders = _ENCODERS

    def encode(value: Any) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for name, default, item in zip(names, defaults, get(value), strict=True):
            if item is default:
                continue
            kind = item.__class__
            # Values of another class than the default's are never equal to it, and most
            # optional fields hold a number where the default is Unavailable.
            if kind is default.__class__ and item == default:
                continue
            if kind is int or kind is str:
                plain[name] = item
            else:
                encode_item = encoders.get(kind)
                plain[name] = to_plain(item) if encode_item is None else encode_item(item)
        return plain

    return encode


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
    while isinstance(hint, typing.NewType):
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
    if hint is Finding:
        return _finding_decoder()
    origin_class = origin if origin is not None else hint
    if dataclasses.is_dataclass(origin_class):
        return _dataclass_decoder(origin_class, hint)
    if hint is float:
        return _decode_float
    if hint in (int, str, bool):
        return _scalar_decoder(hint)
    raise TypeError(f"the codec does not know {hint!r}")


def _expect(plain: Any, kind: Any) -> Any:
    if not isinstance(plain, kind) or (kind is int and isinstance(plain, bool)):
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(f"expected {name}, found {type(plain).__name__}")
    return plain


def _scalar_decoder(kind: type) -> Callable[[Any], Any]:
    def decode(plain: Any) -> Any:
        return plain if plain.__class__ is kind else _expect(plain, kind)

    return decode


def _decode_float(plain: Any) -> float:
    if isinstance(plain, dict):
        return float(_expect(plain["float"], str))
    if isinstance(plain, bool):
        raise ValueError("expected float, found bool")
    return float(_expect(plain, (int, float)))


def _decode_unavailable(plain: Any) -> Unavailable:
    from gpuprobe.model.values import ReadStatus

    return Unavailable(_expect(plain["unavailable"], str), ReadStatus(plain["status"]))


def _union_decoder(arms: tuple[Any, ...]) -> Callable[[Any], Any]:
    """`Unavailable` and None are told apart by shape; of the others the first that fits."""
    others = [_decoder(a) for a in arms if a is not Unavailable and a is not type(None)]
    with_none, with_missing = type(None) in arms, Unavailable in arms
    # ``int | Unavailable`` is the commonest hint by far.
    only = _plain_type(arms[0]) if len(others) == 1 and _plain_type(arms[0]) else None

    def decode(plain: Any) -> Any:
        if plain.__class__ is only:
            return plain
        if plain is None and with_none:
            return None
        if with_missing and isinstance(plain, dict) and "unavailable" in plain:
            return _decode_unavailable(plain)
        if len(others) == 1:
            return others[0](plain)
        problem: Exception = ValueError(f"unexpected {type(plain).__name__}")
        for decoder in others:
            try:
                return decoder(plain)
            except _MALFORMED as error:
                problem = error
        raise problem

    return decode


def _plain_type(hint: Any) -> type | None:
    """int, str or bool where JSON's value is the model's value; else None."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    return hint if hint in (int, str, bool) else None


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
        values = {}
        for name, item in _expect(plain, dict).items():
            decoder = decoders.get(name)
            if decoder is not None:
                values[name] = decoder(item)
        return cls(**values)

    return decode


def _finding_decoder() -> Callable[[Any], Any]:
    """Evidence is a list of ``{"name", "value"}``; before version 2 it was one of pairs."""
    decode = _dataclass_decoder(Finding, Finding)

    def pair(plain: Any) -> Any:
        return [plain["name"], plain["value"]] if isinstance(plain, dict) else plain

    def as_pairs(plain: Any) -> Any:
        if isinstance(plain, dict) and isinstance(plain.get("evidence"), list):
            plain = {**plain, "evidence": [pair(item) for item in plain["evidence"]]}
        return decode(plain)

    return as_pairs


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
