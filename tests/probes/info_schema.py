"""The JSON Schema of ``gpuprobe info --json``, made from the model's types.

    python tests/probes/info_schema.py      writes gpuprobe/reporters/json/schemas/info-2.json

The file is what ships and what readers go by; a test checks that it is still what the types say.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from gpuprobe.model.machine.devices import Inventory
from gpuprobe.model.values import Reading, ReadStatus, Unavailable

PATH = Path(__file__).parents[2] / "gpuprobe" / "reporters" / "json" / "schemas" / "info-2.json"

BASIC = {int: "integer", float: "number", str: "string", bool: "boolean"}


def schema() -> dict[str, Any]:
    defs: dict[str, Any] = {}
    root = _object(Inventory, defs)
    root["properties"]["devices"] = {"type": "array", "items": {"$ref": "#/$defs/Device"}}
    defs["Device"]["properties"]["key"] = {"type": "string"}
    defs["Device"]["required"].insert(0, "key")
    head = {
        "schema": {"const": "gpuprobe.info"},
        "version": {
            "type": "array",
            "prefixItems": [{"const": 2}, {"type": "integer", "minimum": 0}],
            "minItems": 2,
            "maxItems": 2,
        },
        "gpuprobe": {"type": "string"},
    }
    root["properties"] = {**head, **root["properties"]}
    root["required"] = [*head, *root["required"]]
    statuses = [status.value for status in ReadStatus]
    defs["missing"] = {
        "description": "A value that could not be read, and why.",
        "type": "object",
        "properties": {
            "value": {"type": "null"},
            "source": {"type": "string"},
            "status": {"enum": [s for s in statuses if s != "ok"]},
            "reason": {"type": "string"},
        },
        "required": ["value", "status", "reason"],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "gpuprobe/info-2.json",
        "title": "gpuprobe info, version 2",
        "description": "Devices, processes and the sources that describe them. Bytes, percent, "
        "degrees Celsius, milliwatts, megahertz. A minor version adds keys.",
        **root,
        "$defs": dict(sorted(defs.items())),
    }


def _object(cls: type, defs: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    doc = (cls.__doc__ or "").strip().split("\n\n")[0]
    return {
        "description": " ".join(doc.replace("``", "").split()),
        "type": "object",
        "properties": {name: _of(hints[name], defs) for name in names},
        "required": names,
    }


def _of(hint: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type; those of dataclasses are added to ``defs``."""
    if isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of(arg, defs) for arg in args]}
    if origin is Reading:
        return {"anyOf": [_read(args[0], defs), {"$ref": "#/$defs/missing"}]}
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": _of(args[0], defs)}
        return {
            "type": "array",
            "prefixItems": [_of(arg, defs) for arg in args],
            "minItems": len(args),
            "maxItems": len(args),
        }
    if origin is dict:
        rule: dict[str, Any] = {"type": "object", "additionalProperties": _of(args[1], defs)}
        if isinstance(args[0], type) and issubclass(args[0], Enum):
            rule["propertyNames"] = {"enum": [member.value for member in args[0]]}
        return rule
    return _plain(hint, defs)


def _plain(hint: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type without arguments."""
    if hint is type(None):
        return {"type": "null"}
    if hint is Unavailable:
        return {"$ref": "#/$defs/missing"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    if dataclasses.is_dataclass(hint):
        name = typing.cast(type, hint).__name__
        if name not in defs:
            defs[name] = {}
            defs[name].update(_object(typing.cast(type, hint), defs))
        return {"$ref": f"#/$defs/{name}"}
    return {"type": BASIC[hint]}


def _read(inner: Any, defs: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "value": _of(inner, defs),
            "source": {"type": "string"},
            "status": {"const": "ok"},
        },
        "required": ["value", "source", "status"],
    }


def text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), "utf-8")
