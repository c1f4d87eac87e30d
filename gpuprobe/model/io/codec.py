"""To plain JSON values and back, for every dataclass of the model.

The rules, so that a file can be read without this package:

* a dataclass is an object with its field names; fields equal to their default are left out;
* an enum is its value; a tuple is an array; a dict with enum keys has their values as keys;
* `Unavailable` is ``{"unavailable": reason, "status": status}``;
* a float that is not finite is ``{"float": "inf"}``: JSON has no notation for it;
* a finding has every key, as in all documents;
* a whole number has at most 64 bits, a count of bytes 60, other numbers what their field's
  `gpuprobe.model.values.Bounds` allow;
* a reader ignores keys it does not know (a newer minor version only adds keys).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final, TypeVar

from gpuprobe.errors import DataError, GpuprobeError
from gpuprobe.model.findings import Finding
from gpuprobe.model.io.encoder import COMMON, REQUIRED, Encoder, fields_of
from gpuprobe.model.values import (
    MOST_BYTES,
    AtMost,
    Bounds,
    Bytes,
    Matches,
    OneOf,
    Parsed,
    ReadStatus,
    Unavailable,
)

T = TypeVar("T")


def _encode_float(value: float) -> object:
    """A float as JSON, which has no notation for infinity and NaN: ``{"float": "inf"}``."""
    return value if math.isfinite(value) else {"float": repr(value)}


finding_to_plain: Final = Encoder(COMMON).plain
"""A finding with every key, as in all documents."""
to_plain: Final = Encoder(
    {**COMMON, float: _encode_float, Finding: finding_to_plain}, sparse=True
).plain
"""Turn a model value into what ``json.dumps`` takes. Raises TypeError for a value that is not part
of the model.
"""


# -- and back


class Malformed(ValueError):
    """A part of some data has the wrong shape. ``path`` leads to the part, outermost key last."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint
        self.path: list[str | int] = []

    def __str__(self) -> str:
        where = ""
        for key in reversed(self.path):
            if isinstance(key, int):
                where += f"[{key}]"
            elif key.isidentifier():
                where += f".{key}" if where else key
            else:
                where += f"[{key!r:.60}]"
        return f"{where}: {self.args[0]}" if where else self.args[0]


_CLOSED: set[type] = set()

_C = TypeVar("_C", bound=type)


def closed(cls: _C) -> _C:
    """Make an unknown key an error for this dataclass: people misspell what they write by hand,
    and a setting that is silently ignored is worse than none.
    """
    _CLOSED.add(cls)
    return cls


def from_plain(
    cls: type[T],
    plain: object,
    where: str = "",
    error: type[GpuprobeError] = DataError,
    hint: str = "",
) -> T:
    """Rebuild a ``cls`` from plain data, such as what `to_plain` made of one.

    If the data does not have the shape of ``cls``, ``error`` is raised. Its message is one line:
    ``where`` the data is from, the path to the wrong part, and the problem. ``hint`` is the error's
    hint unless the problem has one.
    """
    try:
        return typing.cast(T, _decoder(typing.cast(Any, cls))(plain))
    except _MALFORMED as problem:
        found = _inside(problem)
        message = f"{where or f'not a valid {cls.__name__}'}: {found}"
        raise error(message, hint=found.hint or hint) from problem


# What a decoder may raise on data of the wrong shape: float() of a huge integer overflows.
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError)


def _inside(problem: Exception, *keys: str | int) -> Malformed:
    """The problem, as one of the part of the data that ``keys`` lead to."""
    if isinstance(problem, KeyError):
        problem = Malformed(f"{problem} is missing")
    if not isinstance(problem, Malformed):
        problem = Malformed(str(problem))
    problem.path += keys
    return problem


_NAMES: dict[object, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "nothing",
}


def _unexpected(expected: str, plain: object) -> Malformed:
    found = _NAMES.get(type(plain), type(plain).__name__)
    if isinstance(plain, (int, float, str)):
        found = f"{plain!r:.40}"
    return Malformed(f"expected {expected}, found {found}")


def _expect(plain: object, kind: Any) -> Any:
    if not isinstance(plain, kind) or (kind is int and isinstance(plain, bool)):
        raise _unexpected(_NAMES[kind], plain)
    return plain


@functools.cache
def _decoder(hint: object) -> Callable[[object], Any]:
    """A function that turns plain data into a value of the type ``hint``."""
    if hint is Bytes:
        return _annotated_decoder(int, _BYTES)
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if typing.get_origin(hint) is not None:
        return _generic_decoder(hint, typing.get_origin(hint), typing.get_args(hint))
    if hint is None or hint is type(None):
        return lambda plain: _expect(plain, type(None))
    if hint is Any:
        return lambda plain: plain
    if hint is Finding:
        return _finding_decoder()
    simple = _SIMPLE.get(hint)
    return _class_decoder(hint) if simple is None else simple


_OF_DOCUMENTS = (str, OneOf, Matches)
"""Notes that only the schemas of JSON documents use: descriptions, and what a text may be."""


def _generic_decoder(
    hint: object, origin: object, args: tuple[object, ...]
) -> Callable[[object], object]:
    """The decoder of a type with arguments, such as ``tuple[int, ...]``."""
    if origin is typing.Annotated:
        notes = [note for note in args[1:] if not isinstance(note, _OF_DOCUMENTS)]
        return _annotated_decoder(args[0], notes[0]) if notes else _decoder(args[0])
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(args)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            items = _items_decoder(args[0])
            return lambda plain: tuple(items(plain))
        return _tuple_decoder(args, tuple)
    if origin is list:
        return _items_decoder(args[0])
    if origin in (dict, Mapping):
        return _dict_decoder(*args)
    if dataclasses.is_dataclass(origin):
        return _dataclass_decoder(origin, hint)
    raise TypeError(f"the codec does not know {hint!r}")


def _class_decoder(hint: object) -> Callable[[object], object]:
    if dataclasses.is_dataclass(hint):
        return _dataclass_decoder(hint, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_decoder(hint)
    if isinstance(hint, type) and issubclass(hint, tuple):  # a named tuple
        return _tuple_decoder(tuple(typing.get_type_hints(hint).values()), lambda v: hint(*v))
    raise TypeError(f"the codec does not know {hint!r}")


_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
"""The range of whole numbers: 64 bits, signed or unsigned (an address uses all of them)."""


def _decode_int(plain: object) -> int:
    number: int = plain if plain.__class__ is int else _expect(plain, int)
    if not _LEAST <= number <= _MOST:
        raise Malformed("expected a number of at most 64 bits: it is too large")
    return number


def _decode_float(plain: object) -> float:
    if isinstance(plain, dict):
        text = _expect(plain["float"], str)
        if text not in ("inf", "-inf", "nan"):
            raise Malformed(f"expected one of inf, -inf, nan, found {text!r:.40}")
        return float(text)
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise _unexpected("a number", plain)
    number = float(plain)
    if not math.isfinite(number):
        raise Malformed("expected a number, found one that is not finite")
    return number


def _decode_unavailable(plain: Any) -> Unavailable:
    return Unavailable(_expect(plain["unavailable"], str), ReadStatus(plain["status"]))


def _annotated_decoder(hint: object, note: object) -> Callable[[object], object]:
    if isinstance(note, Parsed):
        decode = _decoder(note.hint)
        return lambda plain: note.make(decode(plain))
    if isinstance(note, AtMost):
        return _limited_decoder(hint, note.items)
    if not isinstance(note, Bounds):
        raise TypeError(f"the codec does not know {note!r}")
    hint = int if hint is Bytes else hint
    base, whole = _decoder(hint), hint is int
    expected = "a whole number" if whole else "a number"
    expected += f" from {note.least}" if note.least > _LEAST else ""
    expected += f" to {note.most}" if note.most < _MOST else ""

    least, most = note.least, note.most

    def decode_bounded(plain: object) -> object:
        if whole and plain.__class__ is int and least <= plain <= most:
            return plain
        try:
            value = base(plain)
        except _MALFORMED as error:
            raise _unexpected(expected, plain) from error
        # Of a union, the bounds are those of the number. The comparison is false for NaN.
        if isinstance(value, (int, float)) and not least <= value <= most:
            raise _unexpected(expected, plain)
        return value

    return decode_bounded


def _limited_decoder(hint: object, most: int) -> Callable[[object], object]:
    decode = _decoder(hint)

    def decode_limited(plain: object) -> object:
        if isinstance(plain, list) and len(plain) > most:
            raise Malformed(f"expected at most {most} items, found {len(plain)}")
        return decode(plain)

    return decode_limited


def _enum_decoder(kind: type[Enum]) -> Callable[[object], object]:
    def decode(plain: object) -> object:
        try:
            return kind(plain)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise _unexpected(f"one of {known}", plain) from None

    return decode


def _union_decoder(arms: tuple[object, ...]) -> Callable[[object], object]:
    """`Unavailable` and None are recognised by their shape; of the others the first that fits."""
    others = [_decoder(a) for a in arms if a is not Unavailable and a is not type(None)]
    with_none, with_missing = type(None) in arms, Unavailable in arms
    # ``int | Unavailable`` is the commonest hint by far.
    only = _plain_type(arms[0]) if len(others) == 1 else None
    least, most = _whole_range(arms[0])
    whole = only is int

    def decode(plain: Any) -> object:
        kind = plain.__class__
        if kind is only and (not whole or least <= plain <= most):
            return plain
        if plain is None and with_none:
            return None
        if with_missing and isinstance(plain, dict) and "unavailable" in plain:
            return _decode_unavailable(plain)
        if len(others) == 1:
            return others[0](plain)
        problem: Exception = _unexpected("something else", plain)
        for decoder in others:
            try:
                return decoder(plain)
            except _MALFORMED as error:
                problem = error
        raise problem

    return decode


def _plain_type(hint: object) -> type | None:
    """int, str or bool where JSON's value is the model's value; else None."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if typing.get_origin(hint) is typing.Annotated:
        base, note = typing.get_args(hint)[:2]
        hint = int if base in (int, Bytes) and isinstance(note, Bounds) else None
    return hint if hint in (int, str, bool) else None


_BYTES = Bounds(0, MOST_BYTES)


def _whole_range(hint: Any) -> tuple[float, float]:
    """The least and the largest whole number of this type."""
    if hint is Bytes:
        return _BYTES.least, _BYTES.most
    if typing.get_origin(hint) is typing.Annotated and isinstance(hint.__metadata__[0], Bounds):
        return hint.__metadata__[0].least, hint.__metadata__[0].most
    return _LEAST, _MOST


def _items_decoder(hint: object) -> Callable[[object], list[object]]:
    decode = _decoder(hint)

    def decode_items(plain: Any) -> list[Any]:
        _expect(plain, list)
        try:
            return [decode(item) for item in plain]
        except _MALFORMED:
            for at, item in enumerate(plain):
                try:
                    decode(item)
                except _MALFORMED as error:
                    raise _inside(error, at) from error
            raise

    return decode_items


def _tuple_decoder(args: Any, make: Callable[[Any], object]) -> Callable[[object], object]:
    items = [_decoder(arg) for arg in args]

    def decode(plain: Any) -> object:
        if len(_expect(plain, list)) != len(items):
            raise Malformed(f"expected {len(items)} items, found {len(plain)}")
        at = 0
        values = []
        try:
            for at, item in enumerate(plain):
                values.append(items[at](item))
        except _MALFORMED as error:
            raise _inside(error, at) from error
        return make(values)

    return decode


def _dict_decoder(key_hint: object, item_hint: object) -> Callable[[object], object]:
    decode_item = _decoder(item_hint)
    decode_key = _whole_key if _plain_type(key_hint) is int else _decoder(key_hint)

    def decode(plain: object) -> object:
        values = {}
        key = ""
        try:
            for key, item in _expect(plain, dict).items():
                values[decode_key(key)] = decode_item(item)
        except _MALFORMED as error:
            raise (_inside(error, key) if key else error) from error
        return values

    return decode


def _whole_key(text: str) -> int:
    return _decode_int(int(text))


def _dataclass_decoder(cls: Any, hint: object) -> Callable[[object], object]:
    hints = typing.get_type_hints(cls, include_extras=True)
    parameters = getattr(cls, "__parameters__", ())
    bound = dict(zip(parameters, typing.get_args(hint), strict=False))
    required = [name for name, default in fields_of(cls) if default is REQUIRED]
    decoders: dict[str, Callable[[object], object]] = {}

    def decode(plain: object) -> object:
        if not decoders:  # on first use, so that recursive types work
            for name, _ in fields_of(cls):
                field_hint = hints[name]
                if parameters:
                    field_hint = substituted(field_hint, bound)
                decoders[name] = _decoder(field_hint)
        values = {}
        key = ""
        try:
            for key, item in _expect(plain, dict).items():
                decoder = decoders.get(key)
                if decoder is not None:
                    values[key] = decoder(item)
                elif cls in _CLOSED:
                    raise unknown_key(key, decoders)
        except _MALFORMED as error:
            raise (_inside(error, key) if key in decoders else error) from error
        try:
            return cls(**values)
        except TypeError as error:
            for name in required:
                if name not in values:
                    raise Malformed(f"{name!r} is missing") from error
            raise

    return decode


def unknown_key(name: str, known: Iterable[str]) -> Malformed:
    """An error for an unknown key, with the most similar known one as its hint."""
    import difflib  # 3 ms

    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return Malformed(f"unknown key {name!r:.60}", hint)


def _finding_decoder() -> Callable[[object], object]:
    """Evidence is a list of ``{"name", "value"}``."""
    decode = _dataclass_decoder(Finding, Finding)

    def pair(plain: object) -> object:
        return [plain.get("name"), plain.get("value")] if isinstance(plain, dict) else None

    def as_pairs(plain: object) -> object:
        if isinstance(plain, dict) and isinstance(plain.get("evidence"), list):
            plain = {**plain, "evidence": [pair(item) for item in plain["evidence"]]}
        return decode(plain)

    return as_pairs


def substituted(hint: object, bound: Mapping[object, object]) -> object:
    """Replace type variables in ``hint`` by what they are bound to."""
    if isinstance(hint, TypeVar):
        return bound.get(hint, hint)
    args = typing.get_args(hint)
    if not args:
        return hint
    new = tuple(substituted(a, bound) for a in args)
    origin = typing.get_origin(hint)
    if new == args:
        return hint
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, new)
    return origin[new] if origin is not None else hint


_SIMPLE: dict[object, Callable[[object], object]] = {
    int: _decode_int,
    float: _decode_float,
    str: lambda plain: plain if plain.__class__ is str else _expect(plain, str),
    bool: lambda plain: plain if plain.__class__ is bool else _expect(plain, bool),
    Unavailable: _decode_unavailable,
}
