"""JSON documents: how values are encoded and the schemas of documents, from one declaration.

A `Document` names the type that it is made from. An object has all fields of its dataclass, under
their names. Where a document differs from that, a *shape* of the type declares its keys, each with
what its value comes from:

* text: an attribute, or a path of attributes (``"host.rss_peak"``);
* `InnerObject`: an object whose keys come from the same value;
* a function of the value; the annotation of its result is the key's type;
* `Each`: an attribute, and the shape of its items.

The keys of a value whose own key begins with ``*`` are merged into this object; there are none if
the value is None. A key that ends with ``?`` is left out if its value is None. The shape of a type
may also be a function that returns the value to encode instead.

`Document.plain` and `gpuprobe.reporters.json.json_schema.schema_of` follow the same shapes and the
same types, so that they cannot differ. ``Annotated[int, "text"]`` gives a key a description,
`Bounds` a least value, `OneOf` and `Matches` limit a text. ``python docs/schemas.py`` writes the
schemas that are shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, Generic, TypeVar

from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.io.document import header
from gpuprobe.model.io.document import write as write_document
from gpuprobe.model.record import record
from gpuprobe.model.values import Bounds, Matches, Unavailable

if TYPE_CHECKING:
    from typing import TypeAlias

    Source: TypeAlias = "str | InnerObject | Each | Callable[[Any], object]"
    Shape: TypeAlias = Mapping[str, Source]
    Shapes: TypeAlias = Mapping[type, Shape | Callable[[Any], object]]

T = TypeVar("T")

SPREAD = "*"


@record(frozen=True)
class InnerObject:
    """In a shape: an object with keys of the same value; ``about`` describes it."""

    shape: Shape
    about: str = ""


@record(frozen=True)
class Each:
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

_COMMON: Final[Shapes] = {
    Finding: FINDING,
    Fix: {"text": "text", "code": "code", "diff?": _diff},
    Unavailable: {"unavailable": "reason", "status": "status"},
}


def _attributes(shape: Shape, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a document's keys, by the attributes that they come from."""
    found: dict[str, Any] = {}
    for key, source in shape.items():
        if key not in plain:
            continue
        if isinstance(source, InnerObject):
            found |= _attributes(source.shape, plain[key])
        else:
            found[source if isinstance(source, str) else key] = plain[key]
    return found


class Document(Generic[T]):
    """A kind of JSON document, made from values of the type ``kind``.

    ``added`` lists, by minor version, the keys that this version added and that documents of an
    earlier one do not have: of the document, or of an object in it (``RankEstimate.alike``).
    ``bounded``: the schema has the least values of numbers. Objects may have further keys, which
    a later minor version adds.
    """

    def __init__(
        self,
        name: str,
        version: tuple[int, int],
        kind: type[T],
        description: str,
        *,
        title: str = "",
        shapes: Shapes | None = None,
        added: Mapping[str, str] | None = None,
        bounded: bool = True,
    ) -> None:
        self.name = name
        self.version = version
        self.kind = kind
        self.title = title or name.replace(".", " ")
        self.description = description
        self.bounded = bounded
        self.shapes: Shapes = {**_COMMON, **(shapes or {})}
        self.added = {
            key: version for version, keys in (added or {}).items() for key in keys.split()
        }
        self._as_it_is = frozenset({bool, int, float, str, type(None)} - set(self.shapes))
        self._encoders: dict[type, Callable[[Any], Any]] = {}

    def plain(self, value: T) -> dict[str, Any]:
        """The document as what ``json.dumps`` takes."""
        return {**header(self.name, self.version), **self._plain(value)}

    def write(self, value: T, stream: IO[str]) -> None:
        """Write one JSON document, ASCII only."""
        write_document(self.plain(value), stream)

    def read(self, plain: Mapping[str, Any], where: str = "") -> T:
        """The value that a document was made from: keys that come from its fields are read by the
        codec, and other keys follow from these.

        Raises DataError for data of another shape; ``where`` begins the message.
        """
        from gpuprobe.model.io.codec import from_plain  # 5 ms, and few documents are read

        shape = self.shape_of(self.kind)
        assert not callable(shape)
        return from_plain(self.kind, _attributes(shape, plain), where)

    def shape_of(self, kind: type) -> Shape | Callable[[Any], object]:
        """The keys of a type's objects, or the function that returns what to encode instead."""
        shape = self.shapes.get(kind)
        return {f.name: f.name for f in fields(kind)} if shape is None else shape

    def _plain(self, value: Any) -> Any:
        kind = value.__class__
        if kind in self._as_it_is:
            return value
        encode = self._encoders.get(kind)
        if encode is None:
            encode = self._encoders[kind] = self._encoder(kind)
        return encode(value)

    def _encoder(self, kind: type) -> Callable[[Any], Any]:
        if kind in self.shapes or is_dataclass(kind):
            shape = self.shape_of(kind)
            return self._replacing(kind, shape) if callable(shape) else self._object(shape)
        if issubclass(kind, Enum):
            return attrgetter("_value_")  # value.value is a property in Python
        if issubclass(kind, (tuple, list, Iterator)):
            return lambda value: [self._plain(item) for item in value]
        if issubclass(kind, dict):
            return lambda value: {str(self._plain(k)): self._plain(v) for k, v in value.items()}
        raise TypeError(f"not a value of a document: {kind.__qualname__}")

    def _replacing(self, kind: type, make: Callable[[Any], object]) -> Callable[[Any], Any]:
        def encode(value: Any) -> Any:
            made = make(value)
            return made if made.__class__ is kind else self._plain(made)

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
        as_it_is, encoders, encode_any = self._as_it_is, self._encoders, self._plain

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
            return attrgetter(source), self._plain
        if isinstance(source, Each):
            encode = self._object(source.shape)
            return attrgetter(source.path), lambda items: [encode(item) for item in items]
        if isinstance(source, InnerObject):
            return lambda value: value, self._object(source.shape)
        return source, self._plain
