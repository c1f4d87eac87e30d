"""JSON Schemas (draft 2020-12) of documents, from the types and shapes that encode them."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from typing import Any

from gpuprobe.model.io.codec import substituted
from gpuprobe.model.io.encoder import SPREAD, Each, InnerObject
from gpuprobe.model.values import Bounds, Bytes, Matches, OneOf
from gpuprobe.reporters.json.documents import Document

if typing.TYPE_CHECKING:
    from gpuprobe.model.io.encoder import Shape, Source

Schema = dict[str, Any]

_BASIC = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
}
_NULL: Schema = {"type": "null"}


def schema_of(*documents: Document[Any]) -> Schema:
    """The schema of a document, or of any of several that share a file."""
    first = documents[0]
    file = f"{first.name.partition('.')[2]}-{first.version[0]}"
    made = [_Types(document) for document in documents]
    roots = [one.root() for one in made]
    defs = {name: rule for one in made for name, rule in one.defs.items()}
    body = roots[0]
    if len(documents) > 1:
        names = [document.kind.__name__ for document in documents]
        defs |= dict(zip(names, roots, strict=True))
        body = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"gpuprobe/{file}.json",
        "title": f"{first.title}, version {first.version[0]}",
        "description": first.description,
        **body,
    }
    needed, known = set(_references(body)), set[str]()
    while needed - known:
        name = min(needed - known)
        known.add(name)
        needed |= set(_references(defs[name]))
    return schema | ({"$defs": {name: defs[name] for name in sorted(needed)}} if needed else {})


@dataclass
class _Types:
    """The schemas of the types in one document; ``defs`` are those of its objects, by name."""

    document: Document[Any]
    defs: dict[str, Schema] = field(default_factory=dict)
    kinds: dict[str, object] = field(default_factory=dict)

    def root(self) -> Schema:
        name, (major, _) = self.document.name, self.document.version
        rule = self.object(self.document.kind, top=True)
        head = {
            "schema": {"const": name},
            "version": {
                "type": "array",
                "prefixItems": [{"const": major}, {"type": "integer", "minimum": 0}],
                "minItems": 2,
                "maxItems": 2,
            },
            "gpuprobe": {"type": "string", "description": "the version that wrote it"},
        }
        rule.pop("description", None)
        rule["properties"] = {**head, **rule["properties"]}
        rule["required"] = [*head, *rule["required"]]
        return rule

    def object(
        self, cls: type, bound: Mapping[Any, Any] | None = None, top: bool = False
    ) -> Schema:
        shape = self.document.encoder.shape_of(cls)
        assert not callable(shape)
        about = " ".join((cls.__doc__ or "").replace("``", "").replace("`", "").split())
        keyless = not about or about == cls.__name__ or about.startswith(f"{cls.__name__}(")
        rule: Schema = {} if keyless else {"description": about}
        rule |= self.keys(cls, shape, bound or {}, "" if top else f"{cls.__name__}.")
        return rule

    def keys(self, cls: type, shape: Shape, bound: Mapping[Any, Any], owner: str) -> Schema:
        """An object with the keys of a shape, whose values come from a ``cls``."""
        properties: dict[str, Schema] = {}
        required: list[str] = []
        for key, source in shape.items():
            name = key.removesuffix("?")
            rule = self.source(cls, source, bound)
            if key.startswith(SPREAD):
                arms = rule.get("oneOf", [rule])  # an object, or null
                merged = self.resolved(next(arm for arm in arms if arm != _NULL))
                properties |= merged["properties"]
                required += merged["required"] if _NULL not in arms else []
                continue
            version = self.document.added.get(owner + name)
            if version is not None:
                about = f"{rule['description']}; " if "description" in rule else ""
                rule = {**rule, "description": f"{about}since {version}"}
            elif not key.endswith("?"):
                required.append(name)
            properties[name] = _without_null(rule) if key.endswith("?") else rule
        return {"type": "object", "properties": properties, "required": required}

    def resolved(self, rule: Schema) -> Schema:
        """The object of a reference."""
        name = rule["$ref"].rpartition("/")[2] if "$ref" in rule else ""
        return self.defs[name] if name else rule

    def source(self, cls: type, source: Source, bound: Mapping[Any, Any]) -> Schema:
        if isinstance(source, str):
            return self.of(substituted(_hint_at(cls, source), bound))
        if isinstance(source, Each):
            items = _item(_hint_at(cls, source.path))
            return {"type": "array", "items": self.keys(items, source.shape, {}, "")}
        if isinstance(source, InnerObject):
            about = {"description": source.about} if source.about else {}
            return about | self.keys(cls, source.shape, bound, "")
        return self.of(substituted(_result(source), bound))

    def of(self, hint: Any) -> Schema:
        """The schema of a type."""
        if hint is Bytes:
            return {"type": "integer"} | ({"minimum": 0} if self.document.bounded else {})
        while isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.annotated(args[0], args[1:])
        if origin in (typing.Union, types.UnionType):
            return _union([self.of(arm) for arm in args])
        if origin is typing.Literal:
            return {"enum": list(args)}
        if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            items = [self.of(arg) for arg in args]
            size = len(items)
            return {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size}
        if origin in (tuple, list, Iterator, Sequence):
            return {"type": "array", "items": self.of(args[0])}
        if origin in (dict, Mapping):
            rule: Schema = {"type": "object", "additionalProperties": self.of(args[1])}
            names = self.of(args[0])
            return rule | ({"propertyNames": names} if "enum" in names else {})
        return self.simple(hint, origin, args)

    def simple(self, hint: Any, origin: Any, args: tuple[Any, ...]) -> Schema:
        """The schema of a class, which may have type arguments."""
        cls = origin or hint
        parameters = getattr(cls, "__parameters__", ())
        bound = dict(zip(parameters, args, strict=False))
        shape = self.document.encoder.shapes.get(cls)
        if callable(shape):
            found = substituted(_result(shape), bound)
            arms = typing.get_args(found) or (found,)
            if cls in arms:  # some values are encoded unchanged
                others = [self.of(arm) for arm in arms if arm is not cls]
                own = {"type": _BASIC[cls]}
                return _union([own, *others]) if others else own
            return self.of(found)
        if cls in _BASIC:
            return {"type": _BASIC[cls]}
        if isinstance(cls, type) and issubclass(cls, Enum):
            return {"enum": [member.value for member in cls]}
        if not is_dataclass(cls):
            raise TypeError(f"no schema for {hint!r}")
        if args:
            return self.object(typing.cast(type, cls), bound)
        name = typing.cast(type, cls).__name__.lstrip("_")
        if self.kinds.setdefault(name, cls) is not cls:
            raise TypeError(f"two types of a document are called {name}")
        if name not in self.defs:
            self.defs[name] = {}  # so that a recursive type ends
            self.defs[name].update(self.object(typing.cast(type, cls)))
        return {"$ref": f"#/$defs/{name}"}

    def annotated(self, hint: Any, notes: tuple[Any, ...]) -> Schema:
        rule = self.of(hint)
        for note in notes:
            if isinstance(note, str):
                rule = {**rule, "description": note}
            elif isinstance(note, OneOf):
                rule = {"enum": list(note.values)} | {k: v for k, v in rule.items() if k != "type"}
            elif isinstance(note, Matches):
                rule = {**rule, "pattern": note.pattern}
            elif isinstance(note, Bounds) and note.least >= 0 and self.document.bounded:
                rule = {**rule, "minimum": note.least}
        return rule


def _union(arms: Sequence[Schema]) -> Schema:
    """A value that fits one of ``arms``: a list of types if they are simple, else ``oneOf``, or
    ``anyOf`` with integers and numbers, as an integer fits both.
    """
    distinct = [arm for at, arm in enumerate(arms) if arm not in arms[:at]]
    others = [arm for arm in distinct if arm != _NULL]
    if len(distinct) == 1:
        return distinct[0]
    if len(others) == 1 and _NULL in distinct:
        (only,) = others
        if "enum" in only:
            return {**only, "enum": [*only["enum"], None]}
        if isinstance(only.get("type"), str):
            return {**only, "type": [only["type"], "null"]}
    if all(set(arm) == {"type"} and isinstance(arm["type"], str) for arm in distinct):
        return {"type": [arm["type"] for arm in distinct]}
    names = [arm.get("type") for arm in distinct]
    return {"anyOf" if {"integer", "number"} <= set(map(str, names)) else "oneOf": distinct}


def _without_null(rule: Schema) -> Schema:
    """The schema of a value that is left out where it is null."""
    if isinstance(rule.get("type"), list):
        (only,) = (name for name in rule["type"] if name != "null")
        return {**rule, "type": only}
    if "oneOf" in rule:
        arms = [arm for arm in rule["oneOf"] if arm != _NULL]
        rest = {key: value for key, value in rule.items() if key != "oneOf"}
        return {**rest, **(arms[0] if len(arms) == 1 else {"oneOf": arms})}
    return rule


def _references(rule: object) -> Iterator[str]:
    """The names of the definitions that a schema refers to."""
    if isinstance(rule, dict):
        if "$ref" in rule:
            yield rule["$ref"].rpartition("/")[2]
        for inner in rule.values():
            yield from _references(inner)
    elif isinstance(rule, list):
        for inner in rule:
            yield from _references(inner)


def _result(function: Callable[..., object]) -> Any:
    return typing.get_type_hints(function, include_extras=True)["return"]


def _hint_at(cls: type, path: str) -> Any:
    """The type of an attribute of ``cls``, or of an attribute's attribute (``a.b``)."""
    hint: Any = cls
    for name in path.split("."):
        owner = typing.get_origin(hint) or hint
        hints = typing.get_type_hints(owner, include_extras=True)
        hint = hints[name] if name in hints else _result(getattr(owner, name).fget)
    return hint


def _item(hint: Any) -> type:
    """The type of the items of an array."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    item: type = typing.get_args(hint)[0]
    return item
