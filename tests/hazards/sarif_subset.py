"""The parts of SARIF 2.1.0 that gpuprobe writes, as a JSON Schema by hand.

Source: the OASIS standard "Static Analysis Results Interchange Format (SARIF) Version 2.1.0",
the sections named beside each object. Stricter than the standard where gpuprobe is: an object
has no properties but those listed, and what code scanning needs is required.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SCHEMA"]


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def _list(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "array", "uniqueItems": True, "items": {"$ref": f"#/$defs/{name}"}, **more}


TEXT = {"type": "string", "minLength": 1}
# Characters of a URI reference, with complete percent escapes (RFC 3986, section 2).
URI = {
    "type": "string",
    "pattern": r"^(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+$",
}
LEVEL = {"enum": ["none", "note", "warning", "error"]}

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    # 3.13 sarifLog
    **_object(
        ("version", "runs"),
        **{"$schema": URI},
        version={"const": "2.1.0"},
        runs={"type": "array", "minItems": 0, "items": {"$ref": "#/$defs/run"}},
    ),
    "$defs": {
        # 3.14 run, 3.18 tool
        "run": _object(
            ("tool", "results"),
            tool=_object(("driver",), driver={"$ref": "#/$defs/toolComponent"}),
            results={"type": "array", "items": {"$ref": "#/$defs/result"}},
            invocations={"type": "array", "items": {"$ref": "#/$defs/invocation"}},
            # 3.14.14: named bases of relative addresses
            originalUriBaseIds={
                "type": "object",
                "additionalProperties": _object(description=_object(("text",), text=TEXT)),
            },
        ),
        # 3.20 invocation
        "invocation": _object(
            ("executionSuccessful",),
            executionSuccessful={"type": "boolean"},
            exitCodeDescription=TEXT,
        ),
        # 3.19 toolComponent
        "toolComponent": _object(
            ("name", "version", "rules"),
            name=TEXT,
            version=TEXT,
            rules=_list("reportingDescriptor"),
        ),
        # 3.49 reportingDescriptor, 3.50 reportingConfiguration, 3.12 multiformatMessageString
        "reportingDescriptor": _object(
            ("id",),
            id=TEXT,
            name=TEXT,
            shortDescription=_object(("text",), text=TEXT),
            fullDescription=_object(("text",), text=TEXT),
            help=_object(("text",), text=TEXT, markdown=TEXT),
            defaultConfiguration=_object(level=LEVEL),
        ),
        # 3.27 result
        "result": _object(
            ("message", "ruleId", "ruleIndex", "level", "partialFingerprints", "locations"),
            message=_object(("text",), text=TEXT),  # 3.11
            ruleId=TEXT,
            ruleIndex={"type": "integer", "minimum": 0},
            level=LEVEL,
            partialFingerprints={"type": "object", "additionalProperties": {"type": "string"}},
            baselineState={"enum": ["new", "unchanged", "updated", "absent"]},
            locations={"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/location"}},
            relatedLocations=_list("location"),
            fixes=_list("fix"),
        ),
        # 3.55 fix, 3.56 artifactChange, 3.57 replacement
        "fix": _object(
            ("artifactChanges",),
            description=_object(("text",), text=TEXT),
            artifactChanges=_list("artifactChange"),
        ),
        "artifactChange": _object(
            ("artifactLocation", "replacements"),
            artifactLocation=_object(("uri",), uri=URI),
            replacements=_list("replacement"),
        ),
        "replacement": _object(
            ("deletedRegion",),
            deletedRegion=_object(
                ("startLine",),
                startLine={"type": "integer", "minimum": 1},
                startColumn={"type": "integer", "minimum": 1},
                endLine={"type": "integer", "minimum": 1},
                endColumn={"type": "integer", "minimum": 1},
            ),
            insertedContent=_object(("text",), text=TEXT),
        ),
        # 3.28 location
        "location": _object(
            ("physicalLocation",),
            id={"type": "integer", "minimum": 0},
            physicalLocation={"$ref": "#/$defs/physicalLocation"},
            logicalLocations=_list("logicalLocation"),
        ),
        # 3.29 physicalLocation, 3.4 artifactLocation, 3.30 region
        "physicalLocation": _object(
            ("artifactLocation",),
            artifactLocation=_object(("uri",), uri=URI, uriBaseId=TEXT),
            region=_object(("startLine",), startLine={"type": "integer", "minimum": 1}),
        ),
        # 3.33 logicalLocation
        "logicalLocation": _object(name={"type": "string"}),
    },
}
