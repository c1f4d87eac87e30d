"""Findings as SARIF 2.1.0, for code scanning. Format: docs.oasis-open.org/sarif/sarif/v2.1.0.

GitHub rejects a file in which a result has no location, and resolves relative URIs in the checkout
(docs.github.com, "SARIF support for code scanning"). So a finding without a place is at line 1 of a
file of the project, and a file of an installed package, which is not in the checkout, is relative
to another base (``uriBaseId``, 3.4.4 and 3.14.14).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final, TextIO
from urllib.parse import quote

import gpuprobe.hazards.rules  # noqa: F401 (registers the rules of findings that were read)
from gpuprobe._version import __version__
from gpuprobe.model.findings import Finding, Fix
from gpuprobe.model.place import Place
from gpuprobe.model.rules import rule_of
from gpuprobe.user_frames import package_path

_PACKAGES: Final = "SITE-PACKAGES"

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def document(
    findings: Sequence[Finding],
    root: str = "",
    failed: str = "",
    *,
    elsewhere: str = "",
    repository: str = "",
) -> dict[str, object]:
    """One run as plain data. Relative file names start from ``root``, the project's folder; URIs
    are relative to ``repository``, the checkout's folder (default: the same). ``elsewhere``: the
    file of findings without a place (a baseline, a script), by default the project's folder.

    ``failed``: how the program failed (``invocations``, 3.20).
    """
    rules: dict[str, dict[str, object]] = {}
    results = []
    where = _Addresses(root, repository or root)
    for finding in findings:
        rules.setdefault(finding.rule, _rule(finding))
        text = finding.message
        if finding.fix is not None:
            text = f"{text} {finding.fix.text}"
        result: dict[str, object] = {
            "ruleId": finding.rule,
            "ruleIndex": list(rules).index(finding.rule),
            "level": finding.level.value,
            "message": {"text": _LINK.sub(r"\\[", text)},
            "partialFingerprints": {"gpuprobe/v1": finding.fingerprint},
        }
        place = finding.location
        if place is None or not place.file:
            place = Place(elsewhere or ".", 1, "" if place is None else place.function)
        result["locations"] = [where.location(place)]
        if finding.related:
            result["relatedLocations"] = [
                {"id": at, **where.location(place)} for at, place in enumerate(finding.related, 1)
            ]
        if finding.fix is not None and finding.fix.insertions:
            result["fixes"] = [_fix(finding.fix, where)]
        results.append(result)
    driver = {"name": "gpuprobe", "version": __version__, "rules": list(rules.values())}
    run: dict[str, object] = {"tool": {"driver": driver}, "results": results}
    if where.packages:
        text = "the folder of the environment's installed packages"
        run["originalUriBaseIds"] = {_PACKAGES: {"description": {"text": text}}}
    if failed:
        run["invocations"] = [{"executionSuccessful": False, "exitCodeDescription": failed}]
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


# In a message, ``[words](target)`` is a link unless the bracket is escaped (SARIF 3.11.6).
_LINK = re.compile(r"\[(?=[^\]]*\]\()")


def _rule(finding: Finding) -> dict[str, object]:
    """The rule's descriptor (SARIF 3.49). The title of a rule that is not registered is its
    kind."""
    known = rule_of(finding.rule)
    found: dict[str, object] = {
        "id": finding.rule,
        "name": finding.kind,
        "shortDescription": {"text": known.title if known else finding.kind},
        "defaultConfiguration": {"level": (known.level if known else finding.level).value},
    }
    if known and known.description:
        found["fullDescription"] = {"text": known.description}
    parts = [known.title, known.description, known.remedy] if known else [finding.kind]
    parts = [part for part in parts if part]
    found["help"] = {"text": "\n\n".join(parts), "markdown": _markdown(parts)}
    return found


def _markdown(parts: Sequence[str]) -> str:
    """A rule's title, its reason and the remedy, as on its page."""
    title, *rest = parts
    return "\n\n".join([f"**{title}**", *rest])


def _fix(fix: Fix, where: _Addresses) -> dict[str, object]:
    """A fix as changes of files (SARIF 3.55 to 3.57): whole lines are inserted before a line, or
    replace lines.
    """
    changes: dict[str, list[dict[str, object]]] = {}
    for one in fix.insertions:
        region = {"startLine": one.line, "startColumn": 1, "endColumn": 1}
        region["endLine"] = one.line + one.replaces
        replacement = {"deletedRegion": region, "insertedContent": {"text": one.text}}
        changes.setdefault(one.file, []).append(replacement)
    return {
        "description": {"text": fix.text},
        "artifactChanges": [
            {"artifactLocation": where.artifact(file), "replacements": replacements}
            for file, replacements in changes.items()
        ],
    }


class _Addresses:
    """Converts files to URIs. ``packages``: whether one belongs to an installed package."""

    def __init__(self, root: str, repository: str) -> None:
        self._root = root
        self._repository = repository
        self.packages = False

    def location(self, place: Place) -> dict[str, object]:
        found: dict[str, object] = {
            "physicalLocation": {
                "artifactLocation": self.artifact(place.file),
                "region": {"startLine": max(1, place.line)},
            }
        }
        if place.function:
            found["logicalLocations"] = [{"name": place.function}]
        return found

    def artifact(self, file: str) -> dict[str, object]:
        inside = package_path(file)
        if inside:
            self.packages = True
            return {"uri": _quoted(PurePath(inside)), "uriBaseId": _PACKAGES}
        path = PurePath(file)
        if self._root and PurePath(self._root).is_absolute():
            whole = PurePath(os.path.normpath(PurePath(self._root) / path))
            for folder in (self._repository, self._root):
                with contextlib.suppress(ValueError):  # outside the repository
                    return {"uri": _quoted(whole.relative_to(folder))}
        return {"uri": path.as_uri() if path.is_absolute() else _quoted(path)}


def _quoted(path: PurePath) -> str:
    """A relative path as a URI reference (RFC 3986): a colon would make it look like a scheme."""
    return quote(path.as_posix().encode("utf-8", "surrogateescape"), safe="/")


def write(
    findings: Sequence[Finding],
    stream: TextIO,
    root: str = "",
    failed: str = "",
    *,
    elsewhere: str = "",
    repository: str = "",
) -> None:
    """Write one SARIF document, ASCII only; the arguments are those of `document`."""
    found = document(findings, root, failed, elsewhere=elsewhere, repository=repository)
    json.dump(found, stream, indent=2)
    stream.write("\n")
