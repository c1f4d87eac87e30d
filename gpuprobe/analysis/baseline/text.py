"""A baseline as text that people review: sorted, one row per line, units with every number,
without times and absolute paths."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from gpuprobe.analysis.baseline.model import METRICS, PEAK, Baseline, Tolerance
from gpuprobe.analysis.compare.accounts import Account, LineShare
from gpuprobe.analysis.peak.high_water import Share
from gpuprobe.errors import DataError
from gpuprobe.model.bounds import Bounds
from gpuprobe.model.io.codec import Malformed, Parsed, from_plain, unknown_key
from gpuprobe.model.io.document import check_version, header
from gpuprobe.model.text import human_bytes

SCHEMA: Final = "gpuprobe.baseline"
VERSION: Final = (2, 0)
"""(major, minor); a minor version only adds keys.

History:
* 1.0: first version.
* 1.1: ``accounts``, ``places`` and ``stopped_after``; ``tolerance`` holds what was chosen, not the
  defaults too. What a line calls is in ``places``, once.
* 2.0: ``gpuprobe``, the version that wrote it. 1.x is still read.
"""

_HINT: Final = "delete it, and gpuprobe baseline update writes a new one"
_BEGIN: Final = '{\n "a'  # accounts, or at_peak: the first key


def dumps(baseline: Baseline) -> str:
    """The baseline as reviewable JSON, ASCII only."""
    peak = baseline.accounts.get(PEAK, Account(0))
    document: dict[str, Any] = {
        **header(SCHEMA, VERSION),
        "environment": dict(baseline.environment),
        "steps": baseline.steps,
        "metrics": {
            name: _size(value) if METRICS[name][0] == "bytes" else {"count": value}
            for name, value in baseline.metrics.items()
        },
        "tolerance": {
            name: {"relative": tolerance.relative, "absolute": tolerance.absolute}
            for name, tolerance in (baseline.tolerances or {}).items()
        },
        "phases": {name: _size(value) for name, value in baseline.phases.items()},
        "at_peak": {
            "categories": _of_shares(peak.categories),
            "modules": _of_shares(peak.modules),
            "lines": _of_lines(peak),
        },
        "accounts": _of_accounts(baseline.accounts),
        "places": {
            line.key: {"calls": line.calls}
            for account in baseline.accounts.values()
            for line in account.lines
            if line.calls
        },
    }
    if baseline.stopped_after is not None:
        document["stopped_after"] = baseline.stopped_after
    return "".join(_rendered(document)) + "\n"


def _size(value: int) -> dict[str, Any]:
    return {"bytes": value, "text": human_bytes(value)}


def _of_shares(rows: Iterable[Share[str]]) -> dict[str, Any]:
    return {row.key: {**_size(row.bytes), "blocks": row.blocks} for row in rows}


def _of_lines(account: Account) -> dict[str, Any]:
    if account.unit == "count":
        return {line.key: {"count": line.bytes} for line in account.lines}
    return {
        line.key: {
            **_size(line.bytes),
            "blocks": line.blocks,
            **_of_categories(line),
            **({"until": line.until} if line.until else {}),
        }
        for line in account.lines
    }


def _of_categories(line: LineShare) -> dict[str, Any]:
    """One category, or as a row of several: ``activation 1024, temporary 512``."""
    if not line.categories or line.categories == (("unknown", line.bytes),):
        return {}
    if len(line.categories) == 1:
        return {"category": line.category}
    return {"category": ", ".join(f"{name} {size}" for name, size in line.categories)}


def _categories(text: str) -> tuple[tuple[str, int | None], ...]:
    """What `_of_categories` wrote."""
    if not text or " " not in text:
        return ((text, None),) if text else ()
    pairs = (part.rpartition(" ") for part in text.split(", "))
    return tuple((name, int(number)) for name, _, number in pairs)


def _of_accounts(accounts: Mapping[str, Account]) -> dict[str, Any]:
    """All but the peak's; one that is the same as an earlier one only says so."""
    found: dict[str, Any] = {}
    seen: list[tuple[str, dict[str, Any]]] = []
    if PEAK in accounts:
        seen.append((PEAK, _of_lines(accounts[PEAK])))
    for name in sorted(accounts):
        account = accounts[name]
        if name == PEAK:
            continue
        rows = _of_lines(account)
        same = next((other for other, lines in seen if lines and lines == rows), None)
        total = {"count": account.total} if account.unit == "count" else _size(account.total)
        if same is not None:
            found[name] = {"total": total, "same_as": same}
        else:
            found[name] = {"total": total, "lines": rows}
            seen.append((name, rows))
    return found


def _rendered(value: Any, depth: int = 0) -> Iterator[str]:
    """JSON with sorted keys, in which an object of plain values is one line."""
    if not isinstance(value, dict) or not any(isinstance(v, dict) for v in value.values()):
        yield json.dumps(value, sort_keys=True, ensure_ascii=True)
        return
    pad = " " * (depth + 1)
    yield "{"
    for index, key in enumerate(sorted(value)):
        yield f"{',' if index else ''}\n{pad}{json.dumps(key, ensure_ascii=True)}: "
        yield from _rendered(value[key], depth + 1)
    yield f"\n{' ' * depth}}}"


# -- and back


def loads(text: str, where: str = "the baseline") -> Baseline:
    """Read what `dumps` wrote. Raises DataError for anything else, UnsupportedSchema for a
    newer major version."""
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise _none(where)
        version = check_version(document, VERSION, where, hint=_HINT)
        decoded = from_plain(_BaselineDocument, document, f"{where} is damaged", hint=_HINT)
        return _baseline(decoded, where, newer=version > VERSION)
    except (ValueError, RecursionError) as error:
        if not _may_be_one(text):
            raise _none(where) from None
        raise DataError(f"{where} is damaged: {error}", hint=_HINT) from error


def _none(where: str) -> DataError:
    return DataError(
        f"{where} is not a gpuprobe baseline",
        hint="name another file: gpuprobe baseline update writes one",
    )


def _may_be_one(text: str) -> bool:
    """Whether this is, or begins as, what `dumps` writes. Nobody is told to delete anything else:
    it may be a source file."""
    return SCHEMA in text or text.startswith(_BEGIN) or _BEGIN.startswith(text)


_Whole = Annotated[int, Bounds(0, (1 << 63) - 1)]
_Signed = Annotated[int, Bounds(1 - (1 << 63), (1 << 63) - 1)]  # growth may be below 0


@dataclass(frozen=True)
class _Amount:
    """``bytes``, or of what is counted ``count``."""

    bytes: _Signed | None = None
    count: _Signed | None = None

    def __post_init__(self) -> None:
        if self.bytes is None and self.count is None:
            raise Malformed("'bytes' is missing")

    @property
    def value(self) -> int:
        return self.bytes if self.bytes is not None else self.count or 0


@dataclass(frozen=True)
class _Size(_Amount):
    bytes: _Whole | None = None
    count: _Whole | None = None


@dataclass(frozen=True)
class _Line(_Amount):
    """``calls`` is version 1.0's: a list, where later ones have it in ``places``."""

    blocks: _Signed = 0
    category: Annotated[tuple[tuple[str, int | None], ...], Parsed(str, _categories)] = ()
    until: str = ""
    calls: list[str] | None = None


@dataclass(frozen=True)
class _PartOfPeak:
    bytes: _Signed
    blocks: _Signed


@dataclass(frozen=True)
class _AccountRow:
    total: _Amount
    lines: dict[str, _Line] = field(default_factory=dict)
    same_as: str = ""


@dataclass(frozen=True)
class _AtPeak:
    lines: dict[str, _Line]
    categories: dict[str, _PartOfPeak]
    modules: dict[str, _PartOfPeak]


@dataclass(frozen=True)
class _Called:
    calls: str


@dataclass(frozen=True)
class _Accepted:
    relative: Annotated[float, Bounds(0, 1e6)] = 0.0
    absolute: _Whole = 0


@dataclass(frozen=True)
class _BaselineDocument:
    """What `dumps` writes, without what is there for those who read it."""

    environment: dict[str, str]
    steps: _Whole
    metrics: dict[str, _Size]
    phases: dict[str, _Size]
    at_peak: _AtPeak
    tolerance: dict[str, _Accepted] = field(default_factory=dict)
    accounts: dict[str, _AccountRow] = field(default_factory=dict)
    places: dict[str, _Called] = field(default_factory=dict)
    stopped_after: _Whole | None = None


def _baseline(document: _BaselineDocument, where: str, *, newer: bool) -> Baseline:
    for name in document.tolerance:
        if name not in METRICS and not newer:
            problem = unknown_key(name, METRICS)
            raise DataError(f"{where}: tolerance: {problem}", hint=problem.hint)
    return Baseline(
        environment=document.environment,
        steps=document.steps,
        metrics={name: row.value for name, row in document.metrics.items() if name in METRICS},
        phases={name: row.value for name, row in document.phases.items()},
        accounts=_accounts(document),
        tolerances={
            name: Tolerance(row.relative, row.absolute)
            for name, row in document.tolerance.items()
            if name in METRICS
        },
        stopped_after=document.stopped_after,
    )


def _accounts(document: _BaselineDocument) -> dict[str, Account]:
    at_peak = document.at_peak
    calls = {key: row.calls for key, row in document.places.items()} or {
        key: " ".join(row.calls) for key, row in at_peak.lines.items() if row.calls is not None
    }
    found: dict[str, Account] = {}
    if at_peak.lines or at_peak.categories or at_peak.modules:
        lines = _lines(at_peak.lines, calls)
        total = sum(line.bytes for line in lines)
        shares = _shares(at_peak.categories), _shares(at_peak.modules)
        found[PEAK] = Account(total, lines, *shares)
    rest = document.accounts
    for name in sorted(rest, key=lambda name: (bool(rest[name].same_as), name)):
        row = rest[name]
        if row.same_as and row.same_as not in found:
            raise Malformed(f"accounts[{name!r}] is the same as {row.same_as!r}, which is missing")
        lines = found[row.same_as].lines if row.same_as else _lines(row.lines, calls)
        unit = "bytes" if row.total.count is None else "count"
        found[name] = Account(row.total.value, lines, unit=unit)
    return found


def _lines(rows: Mapping[str, _Line], calls: Mapping[str, str]) -> tuple[LineShare, ...]:
    found = []
    for key, row in rows.items():
        if row.count is not None:
            found.append(LineShare(key, row.count, row.count, calls=calls.get(key, "")))
            continue
        # One category alone is written without its bytes: they are the line's.
        categories = tuple(
            (name, row.value if size is None else size)
            for name, size in row.category or (("unknown", None),)
        )
        share = LineShare(key, row.value, row.blocks, categories, row.until, calls.get(key, ""))
        found.append(share)
    return tuple(sorted(found, key=lambda line: (-line.bytes, line.key)))


def _shares(rows: Mapping[str, _PartOfPeak]) -> tuple[Share[str], ...]:
    found = [Share(key, row.bytes, row.blocks) for key, row in rows.items()]
    return tuple(sorted(found, key=lambda share: (-share.bytes, share.key)))
