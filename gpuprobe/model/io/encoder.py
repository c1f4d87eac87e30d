"""From values to the data of JSON: one encoder, made from their types.

An object has all fields of its dataclass, under their names. Where it differs from that, a *shape*
of the type declares its keys, each with what its value comes from:

* text: an attribute, or a path of attributes (``"host.rss_peak"``);
* `InnerObject`: an object whose keys come from the same value;
* a function of the value; the annotation of its result is the key's type;
* `Each`: an attribute, and the shape of its items.

The keys of a value whose own key begins with ``*`` are merged into this object; there are none if
the value is None. A key that ends with ``?`` is left out if its value is None. The shape of a type
may also be a function that returns the value to encode instead.

An enum is its value; a tuple is an array; a dict with enum keys has their values as keys.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.record import record
from gpuprobe.model.values import Bounds, Matches, Unavailable

if TYPE_CHECKING:
    from typing import TypeAlias

    Source: TypeAlias = "str | InnerObject | Each | Callable[[Any], object]"
    Shape: TypeAlias = Mapping[str, Source]
    Shapes: TypeAlias = Mapping[type, Shape | Callable[[Any], object]]

SPREAD = "*"


class InnerObject(NamedTuple):
    """In a shape: an object with keys of the same value; ``about`` describes it."""

    shape: Shape
    about: str = ""


class Each(NamedTuple):
    """In a shape: the items of the attribute ``path`` have this shape."""

    path: str
    shape: Shape


@record(frozen=True)
class EvidenceRow:
    """What was observed."""

    name: str
    value: str


def _evidence(finding: Finding) -> tuple[EvidenceRow, ...]:
    return tuple(EvidenceRow(name, value) for name, value in finding.evidence)


def _diff(fix: Fix) -> str | None:
    return fix.diff or None


NotEmpty = Annotated[str, Matches(".")]
Fingerprint = Annotated[str, Matches("^[0-9a-f]{16}$")]


def keys(names: str, **others: Source) -> dict[str, Source]:
    """A shape whose keys are the attributes that ``names`` lists, apart by spaces; ``others`` come
    after them.
    """
    return {**{name: name for name in names.split()}, **others}


def _rule(finding: Finding) -> Annotated[str, Matches("^GP[0-9]{3}$")]:
    return finding.rule


def _kind(finding: Finding) -> NotEmpty:
    return finding.kind


def _message(finding: Finding) -> NotEmpty:
    return finding.message


def _count(finding: Finding) -> Annotated[int, Bounds(1)]:
    return finding.count


def _fingerprint(finding: Finding) -> Annotated[Fingerprint, "survives shifted lines"]:
    return finding.fingerprint


FINDING: Final[Shape] = {
    "rule": _rule,
    "kind": _kind,
    **keys("level", message=_message, **keys("subject location related"), evidence=_evidence),
    **keys("fix", count=_count, fingerprint=_fingerprint),
}
"""A finding, as in every document."""

COMMON: Final[Shapes] = {
    Finding: FINDING,
    Fix: {"text": "text", "code": "code", "diff?": _diff},
    Unavailable: {"unavailable": "reason", "status": "status"},
}
"""Shapes that documents and recordings share."""


REQUIRED: Final = object()
"""In place of the default of a field that has none."""


@functools.cache
def fields_of(cls: type) -> tuple[tuple[str, object], ...]:
    """(name, default) of every field of a dataclass that its constructor takes; `REQUIRED` for a
    field without a default.
    """
    found = []
    for f in dataclasses.fields(cls):
        if not f.init:
            continue
        if f.default is not dataclasses.MISSING:
            default = f.default
        elif f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        else:
            default = REQUIRED
        found.append((f.name, default))
    return tuple(found)


class Encoder:
    """Encodes values by the shapes of their types. ``sparse``: objects without a shape lack the
    fields that are equal to their default, as in the files that gpuprobe reads again.

    Encoders of types are made on first use: a step has some fifty objects of ten classes and is
    written while the program waits, a report has millions.
    """

    def __init__(self, shapes: Shapes, *, sparse: bool = False) -> None:
        self.shapes = shapes
        self._sparse = sparse
        self._as_it_is = frozenset({bool, int, float, str, type(None)} - set(shapes))
        self._encoders: dict[type, Callable[[Any], Any]] = {}

    def shape_of(self, kind: type) -> Shape | Callable[[Any], object]:
        """The keys of a type's objects, or the function that returns what to encode instead."""
        shape = self.shapes.get(kind)
        return {f.name: f.name for f in dataclasses.fields(kind)} if shape is None else shape

    def plain(self, value: Any) -> Any:
        """A value as what ``json.dumps`` takes. Raises TypeError for one of an unknown type."""
        kind = value.__class__
        if kind in self._as_it_is:
            return value
        encode = self._encoders.get(kind)
        if encode is None:
            encode = self._encoders[kind] = self._encoder(kind)
        return encode(value)

    def _encoder(self, kind: type) -> Callable[[Any], Any]:
        if kind in self.shapes or dataclasses.is_dataclass(kind):
            shape = self.shape_of(kind)
            if callable(shape):
                return self._replacing(kind, shape)
            whole = kind in self.shapes or not self._sparse
            return self._object(shape) if whole else self._sparse_object(kind)
        if issubclass(kind, Enum):
            return attrgetter("_value_")  # value.value is a property in Python
        plain = self.plain
        if issubclass(kind, (tuple, list, Iterator)):
            # Columns of numbers are the longest ones.
            return lambda value: [item if item.__class__ is int else plain(item) for item in value]
        if issubclass(kind, dict):
            return lambda value: {str(plain(key)): plain(item) for key, item in value.items()}
        for base in (int, float, str):
            if issubclass(kind, base):
                return lambda value: plain(base(value))
        raise TypeError(f"not a model value: {kind.__qualname__}")

    def _sparse_object(self, kind: type) -> Callable[[Any], dict[str, Any]]:
        known = fields_of(kind)
        names = [name for name, _ in known]
        defaults = [default for _, default in known]
        if len(names) < 2:  # attrgetter of one name returns no tuple
            get: Callable[[object], tuple[object, ...]] = lambda value: tuple(  # noqa: E731
                getattr(value, name) for name in names
            )
        else:
            get = operator.attrgetter(*names)
        encoders, encode_any = self._encoders, self.plain

        def encode(value: object) -> dict[str, Any]:
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
                    plain[name] = encode_any(item) if encode_item is None else encode_item(item)
            return plain

        return encode

    def _replacing(self, kind: type, make: Callable[[Any], object]) -> Callable[[Any], Any]:
        def encode(value: Any) -> Any:
            made = make(value)
            return made if made.__class__ is kind else self.plain(made)

        return encode

    def _object(self, shape: Shape) -> Callable[[Any], dict[str, Any]]:
        parts = [(key.removesuffix("?"), *self._part(source)) for key, source in shape.items()]
        optional = {key[:-1] for key in shape if key.endswith("?")}
        merged = {key for key in shape if key.startswith(SPREAD)}
        as_it_is, special = self._as_it_is, bool(optional | merged)
        if not special and all(isinstance(source, str) for source in shape.values()):
            return self._attributes_encoder(shape)

        def encode(value: Any) -> dict[str, Any]:
            plain: dict[str, Any] = {}
            for key, get, encode_part in parts:
                item = get(value)
                plain[key] = item if item.__class__ in as_it_is else encode_part(item)
            return plain

        def encode_special(value: Any) -> dict[str, Any]:
            plain: dict[str, Any] = {}
            for key, get, encode_part in parts:
                item = encode_part(get(value))
                if key in merged:
                    plain.update(item or {})
                elif item is not None or key not in optional:
                    plain[key] = item
            return plain

        return encode_special if special else encode

    def _attributes_encoder(self, shape: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
        """The encoder of an object whose keys are attributes: a report has millions of them."""
        parts = [(key, attrgetter(path)) for key, path in shape.items()]
        as_it_is, encoders, encode_any = self._as_it_is, self._encoders, self.plain

        def encode(value: Any) -> dict[str, Any]:
            plain: dict[str, Any] = {}
            for key, get in parts:
                item = get(value)
                kind = item.__class__
                if kind not in as_it_is:
                    known = encoders.get(kind)
                    item = encode_any(item) if known is None else known(item)
                plain[key] = item
            return plain

        return encode

    def _part(self, source: Source) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """How the value of a key is read, and how it is encoded then."""
        if isinstance(source, str):
            return attrgetter(source), self.plain
        if isinstance(source, Each):
            encode = self._object(source.shape)
            return attrgetter(source.path), lambda items: [encode(item) for item in items]
        if isinstance(source, InnerObject):
            return lambda value: value, self._object(source.shape)
        return source, self.plain
