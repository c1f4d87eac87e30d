"""Known findings: fingerprints that survive shifted lines, and a baseline file of them.

The file is JSON that people review: sorted, without line numbers and absolute paths. It lists the
findings of the run that wrote it; only new findings of a later run count.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Final

from gpuprobe.errors import DataError
from gpuprobe.model.findings import Finding
from gpuprobe.model.io.codec import from_plain
from gpuprobe.model.io.document import check_version, header
from gpuprobe.model.values import Bounds, Parsed

SCHEMA: Final = "gpuprobe.hazards-baseline"
VERSION: Final = (2, 0)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 2.0: ``gpuprobe``, the version that wrote it.
"""

_BEGIN: Final = f'{{\n "schema": "{SCHEMA}"'
_HINT: Final = "--hazards-baseline-update writes a new one"
# A string is kept unchanged; comments and white space do not change what a line does.
_PARTS: Final = re.compile(r"(\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')|#.*|\s+")
_HEX: Final = re.compile(r"[0-9a-f]{16}")


def normalized(source: str) -> str:
    """A line of Python without comments and white space outside of strings."""
    return _PARTS.sub(lambda match: match[1] or "", source)


def fingerprint(rule: str, kind: str, subject: str, places: Iterable[tuple[str, str, str]]) -> str:
    """16 hexadecimal digits. ``subject`` names the operators; ``places`` are (file, function,
    source line). They depend on no line number, and only on the name of a file: they stay the same
    when the code moves, alone or with its file, and change when one of the lines does.
    """
    parts = [rule, kind, subject]
    for file, function, source in places:
        parts += [PurePath(file).name, function, normalized(source)]
    key = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(key).hexdigest()[:16]


def _fingerprint(text: str) -> str:
    if not _HEX.fullmatch(text):
        raise ValueError(f"expected 16 hexadecimal digits, found {text!r:.40}")
    return text


@dataclass(frozen=True, slots=True, order=True)
class KnownFinding:
    """One kind of finding in a baseline. ``count``: the number of findings with this fingerprint;
    ``where`` (file name and function) and ``about`` (the operators) are for people.
    """

    fingerprint: Annotated[str, Parsed(str, _fingerprint)]
    rule: str
    kind: str
    where: str
    about: str
    count: Annotated[int, Bounds(1)] = 1


@dataclass(frozen=True, slots=True)
class _KnownDocument:
    findings: list[KnownFinding]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run compared with its baseline. ``gone``: in the baseline, and not found in this run."""

    new: tuple[Finding, ...]
    known: tuple[Finding, ...]
    gone: tuple[KnownFinding, ...]


def known(findings: Sequence[Finding]) -> tuple[KnownFinding, ...]:
    """The rows of a baseline for these findings."""
    counts = Counter(finding.fingerprint for finding in findings)
    rows = {}
    for finding in findings:
        place = finding.location
        where = "" if place is None else f"{PurePath(place.file).name} {place.function}".strip()
        rows[finding.fingerprint] = KnownFinding(
            finding.fingerprint,
            finding.rule,
            finding.kind,
            where,
            finding.subject,
            counts[finding.fingerprint],
        )
    return tuple(sorted(rows.values()))


def compare(baseline: Sequence[KnownFinding], findings: Sequence[Finding]) -> Comparison:
    """Split findings into new and known ones: of several with one fingerprint, those beyond the
    known count are new.
    """
    left = Counter({row.fingerprint: row.count for row in baseline})
    new, old = [], []
    for finding in findings:
        if left[finding.fingerprint] > 0:
            left[finding.fingerprint] -= 1
            old.append(finding)
        else:
            new.append(finding)
    gone = tuple(row for row in baseline if left[row.fingerprint] == row.count)
    return Comparison(tuple(new), tuple(old), gone)


def dumps(rows: Sequence[KnownFinding]) -> str:
    """The baseline as JSON, ASCII only, ordered by rule and place."""
    ordered = sorted(rows, key=lambda row: (row.rule, row.where, row.about, row.fingerprint))
    document = {
        **header(SCHEMA, VERSION),
        "findings": [
            {
                "rule": row.rule,
                "kind": row.kind,
                "where": row.where,
                "about": row.about,
                "count": row.count,
                "fingerprint": row.fingerprint,
            }
            for row in ordered
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=True) + "\n"


def loads(text: str, where: str = "the baseline") -> tuple[KnownFinding, ...]:
    """Read what `dumps` wrote. Raises DataError for anything else, UnsupportedSchema for a
    newer major version.
    """
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise _not_a_baseline(where)
        check_version(document, VERSION, where, hint=_HINT)
        rows = from_plain(_KnownDocument, document, f"{where} is damaged", hint=_HINT)
        return tuple(sorted(rows.findings))
    except (ValueError, RecursionError) as error:
        if not may_be_one(text):
            raise _not_a_baseline(where) from None
        raise DataError(f"{where} is damaged: {error}", hint=_HINT) from error


def may_be_one(text: str) -> bool:
    """Whether a text is, or begins like, a file that `dumps` writes. Other files are not replaced:
    they may be source files.
    """
    return SCHEMA in text or text.startswith(_BEGIN) or _BEGIN.startswith(text)


def _not_a_baseline(where: str) -> DataError:
    return DataError(
        f"{where} is not a baseline of hazards",
        hint="name another file: --hazards-baseline-update writes one",
    )
